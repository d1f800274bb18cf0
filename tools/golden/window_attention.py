"""window_attention: causal softmax attention over the newest keys, heads normed and turned first."""
from core import autodiff as ad, sample
from core.blocks import heads_for, rms, rope, softmax_maps

EQUATION = """\
Causal softmax attention.  First, in this order: q, k = rms(q) q_norm, rms(k) k_norm over the head width (if given),
then RoPE on the first rope_dim channels (0: all).  Token t sees i with max(0, t - window + 1) <= i <= t; window 0: all."""

INPUTS = {"q": "BTHd", "k": "BTJd", "v": "BTJv", "q_norm": "d", "k_norm": "d"}
OUTPUTS = {"o": "BTHv"}


def prepared(x, weight, p):
    if weight is not None:
        x = rms(x, p["norm_eps"]) * weight
    if "rope_kind" in p:
        x = rope(x, p["rope_kind"], p["rope_base"], width=int(p.get("rope_dim", 0)))
    return x


def evaluate(x, p):
    q, k = prepared(x["q"], x.get("q_norm"), p), prepared(x["k"], x.get("k_norm"), p)
    k, v = heads_for(k, q.shape[2]), heads_for(x["v"], q.shape[2])
    maps = softmax_maps(q, k, p.get("scale", 1.0), window=int(p.get("window", 0)))
    return {"o": ad.einsum("bhti,bihv->bthv", maps, v)}


SIZES = dict(B=2, T=15, H=2, J=2, d=8, v=6)
OPTIONS = {"window": 0, "norm": False, "rope": False, "rope_dim": 0}


def draw(d, n, o):
    x = {"q": d.normal(n.B, n.T, n.H, n.d), "k": d.normal(n.B, n.T, n.J, n.d),
         "v": d.normal(n.B, n.T, n.J, n.v)}
    p = {"scale": sample.scale_of(n.d)}
    if o.window:
        p["window"] = o.window
    if o.norm:
        x["q_norm"], x["k_norm"] = d.normal(n.d), d.normal(n.d)
        p["norm_eps"] = 1e-6
    if o.rope:
        p.update(rope_kind="half", rope_base=10000.0)
    if o.rope_dim:
        p["rope_dim"] = o.rope_dim
    return x, p


CASES = {
    "window_attention": dict(window=5, note="a window shorter than the sequence"),
    "window_attention_packed": dict(J=1, window=16, norm=True, rope=True, packed=(37, 1, 70),
                                    note="packed, heads normed and turned"),
    "window_attention_qk_norm": dict(B=1, H=4, d=12, norm=True, rope=True, rope_dim=4,
                                     note="no window, a third of the channels turn"),
    "window_attention_long": dict(B=1, T=200, H=1, J=1, window=64, note="a window of a tile"),
}
