"""hawk_layer: Griffin's recurrent block, under the names that files of recurrent_gemma have."""
import rg_lru
from core import autodiff as ad
from core.blocks import conv

EQUATION = """\
u = conv(linear_x x), y = linear_out(gelu_tanh(linear_y x) rg_lru(u, u Wi + bi, u Wr + br)).

Wi, Wr block-diagonal, blocks (in, out); convolution of 4 taps, with bias and without activation."""

INPUTS = {"x": "BTD", "linear_y.weight": "ED", "linear_y.bias": "E", "linear_x.weight": "ED",
          "linear_x.bias": "E", "linear_out.weight": "DE", "linear_out.bias": "D",
          "conv_1d.weight": "E1W", "conv_1d.bias": "E", "rg_lru.recurrent_param": "E",
          "rg_lru.input_gate_weight": "nww", "rg_lru.input_gate_bias": "nw",
          "rg_lru.recurrent_gate_weight": "nww", "rg_lru.recurrent_gate_bias": "nw"}
OUTPUTS = {"y": "BTD"}


def gate(u, weight, bias):
    blocks = u.reshape(*u.shape[:2], *weight.shape[:2])
    return (ad.einsum("btni,nio->btno", blocks, weight) + bias).reshape(*u.shape)


def evaluate(x, p):
    z = x["x"]
    u = ad.linear(z, x["linear_x.weight"], x["linear_x.bias"])
    taps = x["conv_1d.weight"]
    u, _ = conv(u, taps.reshape(taps.shape[0], taps.shape[2]), None, x["conv_1d.bias"])
    h = rg_lru.evaluate({
        "x": u, "a_param": x["rg_lru.recurrent_param"],
        "gx": gate(u, x["rg_lru.input_gate_weight"], x["rg_lru.input_gate_bias"]),
        "ga": gate(u, x["rg_lru.recurrent_gate_weight"], x["rg_lru.recurrent_gate_bias"])}, p)["y"]
    y = ad.gelu_tanh(ad.linear(z, x["linear_y.weight"], x["linear_y.bias"])) * h
    return {"y": ad.linear(y, x["linear_out.weight"], x["linear_out.bias"])}


SIZES = dict(B=2, T=15, D=10, n=3, w=4)
OPTIONS = {}


def draw(d, n, o):
    width = n.n * n.w
    return {"x": d.normal(n.B, n.T, n.D),
            "linear_y.weight": d.weight(width, n.D), "linear_y.bias": d.normal(width, by=0.1),
            "linear_x.weight": d.weight(width, n.D), "linear_x.bias": d.normal(width, by=0.1),
            "linear_out.weight": d.weight(n.D, width), "linear_out.bias": d.normal(n.D, by=0.1),
            "conv_1d.weight": d.normal(width, 1, 4, by=0.5), "conv_1d.bias": d.normal(width, by=0.1),
            "rg_lru.recurrent_param": d.uniform(-9.0, -4.3, width),
            "rg_lru.input_gate_weight": d.normal(n.n, n.w, n.w, by=0.5),
            "rg_lru.input_gate_bias": d.normal(n.n, n.w, by=0.1),
            "rg_lru.recurrent_gate_weight": d.normal(n.n, n.w, n.w, by=0.5),
            "rg_lru.recurrent_gate_bias": d.normal(n.n, n.w, by=0.1)}, {}


CASES = {"hawk_layer": dict(note="a sequence's first token enters unscaled")}
