"""based_layer: linear attention with Based's feature map, divided by the sum of its weights."""
from core import autodiff as ad
from core.blocks import causal, rms

EQUATION = """\
q, k, v = x W^T per head;  w_ti = 1 + s + s^2 / 2, s = q_t.k_i / sqrt(d);  o_t = sum_{i<=t} w_ti v_i / (sum w_ti + 1e-10);
y = o_proj(rms(o; eps) norm).  The map [1, x / d^(1/4), x_i^2 / sqrt(2 d), x_i x_j / sqrt(d)] has those weights as products."""

INPUTS = {"x": "BTD", "q_proj.weight": "ED", "k_proj.weight": "ED", "v_proj.weight": "FD",
          "norm.weight": "V", "o_proj.weight": "DF"}
OUTPUTS = {"y": "BTD"}


def evaluate(x, p):
    z, heads = x["x"], p["heads"]
    q, k, v = (ad.linear(z, x[f"{name}_proj.weight"]).reshape(*z.shape[:2], heads, -1)
               for name in "qkv")
    s = ad.einsum("bthd,bihd->bhti", q, k) * q.shape[-1] ** -0.5
    w = ad.keep(1 + s + s * s * 0.5, causal(z.shape[1]), 0.0)
    o = ad.einsum("bhti,bihv->bthv", w, v)
    total = ad.einsum("bhti,bihv->bthv", w, v * 0.0 + 1.0)
    o = rms(o / (total + 1e-10), p["eps"]) * x["norm.weight"]
    return {"y": ad.linear(o.reshape(*z.shape[:2], -1), x["o_proj.weight"])}


SIZES = dict(B=2, T=15, H=2, D=12)
OPTIONS = {}


def draw(d, n, o):
    x = {"x": d.normal(n.B, n.T, n.D)}
    for name in "qkv":
        x[f"{name}_proj.weight"] = d.weight(n.D, n.D)
    x["norm.weight"] = d.normal(n.D // n.H, around=1.0, by=0.3)
    x["o_proj.weight"] = d.weight(n.D, n.D)
    return x, {"heads": n.H, "eps": 1e-5}


CASES = {"based_layer": dict(note="second-order Taylor features")}
