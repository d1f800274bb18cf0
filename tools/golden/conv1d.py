"""conv1d: a depthwise causal convolution of a few taps."""
from core import autodiff as ad
from core.blocks import conv

EQUATION = """\
y_t = act(bias + sum_i w_i x_{t-W+1+i}); depthwise, tap W-1 meets the current token, zeros before.

x (B,T,C), w (C,W); tail (B,W-1,C) is the last W-1 inputs, oldest first."""

INPUTS = {"x": "BTC", "w": "CW", "bias": "C", "tail0": "BWC"}
OUTPUTS = {"y": "BTC", "tail": "BWC"}


def evaluate(x, p):
    y, tail = conv(x["x"], x["w"], x.get("tail0"), x.get("bias"))
    return {"y": ad.silu(y) if p["act"] == "silu" else y, "tail": tail}


SIZES = dict(B=2, T=15, C=10, W=4)
OPTIONS = {"bias": False, "act": "silu", "tail0": False}


def draw(d, n, o):
    x = {"x": d.normal(n.B, n.T, n.C), "w": d.normal(n.C, n.W, by=0.5)}
    if o.bias:
        x["bias"] = d.normal(n.C, by=0.5)
    if o.tail0:
        x["tail0"] = d.normal(n.states, n.W - 1, n.C)
    return x, {"act": o.act}


CASES = {
    "conv1d": dict(bias=True, note="bias and SiLU"),
    "conv1d_linear": dict(act="none", note="no bias, no activation"),
    "conv1d_tail": dict(tail0=True, note="continues after three inputs"),
    "conv1d_packed": dict(bias=True, packed=(37, 1, 70), note="packed"),
}
