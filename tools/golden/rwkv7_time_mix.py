"""rwkv7_time_mix: the mixer of RWKV-7 as a layer, under flash-linear-attention's names."""
import numpy as np

import dplr
from core import autodiff as ad
from core.blocks import unit_max
from rwkv7_channel_mix import shift

EQUATION = """\
x^c = x + d x_c, d = x_{t-1} - x_t;  r, k, v projections of x^r, x^k, x^v;  g = -exp(-1/2) sigmoid(w_lora tanh);
a = sigmoid(a_lora);  kk = unit(k k_k), k = k (1 + (a - 1) k_a);  v = v + (v_first - v) sigmoid(v_lora) where v_first is
given, else v is v_first;  dplr with a = -kk, b = kk a, scale 1;  group norm with eps head_dim norm_eps;
o + (sum r k r_k) v;  y = o_proj(o g_lora sigmoid)."""

_D = "x_r x_w x_k x_v x_a x_g".split()
INPUTS = {"x": "BTD", "v_first": "BTD", **{name: "11D" for name in _D}, "k_k": "D", "k_a": "D",
          "r_k": "HK", "r_proj.weight": "DD", "k_proj.weight": "DD", "v_proj.weight": "DD",
          "o_proj.weight": "DD", "w_lora.lora.0.weight": "RD", "w_lora.lora.2.weight": "DR",
          "w_lora.lora.2.bias": "D", "v_lora.lora.0.weight": "LD", "v_lora.lora.2.weight": "DL",
          "v_lora.lora.2.bias": "D", "a_lora.lora.0.weight": "AD", "a_lora.lora.2.weight": "DA",
          "a_lora.lora.2.bias": "D", "g_lora.lora.0.weight": "GD", "g_lora.lora.2.weight": "DG",
          "g_norm.weight": "D", "g_norm.bias": "D", "last0": "BD", "state0": "BHKV"}
OUTPUTS = {"y": "BTD", "last": "BD", "state": "BHKV", "v_first": "BTD"}


def evaluate(x, p):
    z, N = x["x"], p["head_dim"]
    d, last = shift(z, x.get("last0"))
    heads = (*z.shape[:2], z.shape[2] // N, N)

    def mixed(name):
        return z + d * x[name]

    def low_rank(which, at, inner=None):
        y = ad.linear(mixed(at), x[f"{which}.lora.0.weight"])
        return ad.linear(inner(y) if inner else y, x[f"{which}.lora.2.weight"],
                         x.get(f"{which}.lora.2.bias"))

    r = ad.linear(mixed("x_r"), x["r_proj.weight"])
    k = ad.linear(mixed("x_k"), x["k_proj.weight"])
    v = ad.linear(mixed("x_v"), x["v_proj.weight"])
    first = {} if "v_first" in x else {"v_first": v}
    if "v_first" in x:
        v = v + (x["v_first"] - v) * ad.sigmoid(low_rank("v_lora", "x_v"))
    g = ad.sigmoid(low_rank("w_lora", "x_w", ad.tanh)) * -float(np.exp(-0.5))
    rate = ad.sigmoid(low_rank("a_lora", "x_a"))
    kk = unit_max((k * x["k_k"]).reshape(*heads), 1e-12)
    k = k * ((rate - 1.0) * x["k_a"] + 1.0)
    r, k, v, g, rate = (t.reshape(*heads) for t in (r, k, v, g, rate))
    out = dplr.evaluate({"q": r, "k": k, "v": v, "a": -kk, "b": kk * rate, "g": g,
                         **({"state0": x["state0"]} if "state0" in x else {})}, {"scale": 1.0})
    o = out["o"] - ad.mean(out["o"], -1, True)
    o = o / ad.sqrt(ad.mean(o * o, -1, True) + N * p["norm_eps"])
    o = o * x["g_norm.weight"].reshape(*heads[2:]) + x["g_norm.bias"].reshape(*heads[2:])
    o = o + ad.total(r * k * x["r_k"], -1, True) * v
    o = o.reshape(*z.shape) * low_rank("g_lora", "x_g", ad.sigmoid)
    return {"y": ad.linear(o, x["o_proj.weight"]), "last": last, "state": out["state"], **first}


SIZES = dict(B=2, T=15, H=2, K=6, R=4, L=2, A=3, G=5)
OPTIONS = {"later": True, "state0": False}


def draw(d, n, o):
    D = n.H * n.K
    x = {"x": d.normal(n.B, n.T, D)}
    if o.later:
        x["v_first"] = d.normal(n.B, n.T, D)
    x.update({name: d.uniform(0.0, 1.0, 1, 1, D) for name in _D})
    x.update({"k_k": d.normal(D, around=0.7, by=0.2), "k_a": d.normal(D, around=1.0, by=0.2),
              "r_k": d.normal(n.H, n.K, by=0.3)})
    x.update({f"{name}_proj.weight": d.weight(D, D) for name in "rkvo"})
    for name, rank in (("w", n.R), ("v", n.L), ("a", n.A), ("g", n.G)):
        if name == "v" and not o.later:
            continue
        x[f"{name}_lora.lora.0.weight"] = d.weight(rank, D)
        x[f"{name}_lora.lora.2.weight"] = d.weight(D, rank)
        if name != "g":
            x[f"{name}_lora.lora.2.bias"] = d.normal(D, by=0.5)
    x.update({"g_norm.weight": d.normal(D, around=1.0, by=0.2), "g_norm.bias": d.normal(D, by=0.2)})
    if o.state0:
        x.update({"last0": d.normal(n.states, D), "state0": d.normal(n.states, n.H, n.K, n.K)})
    return x, {"head_dim": n.K, "norm_eps": 1e-5}


CASES = {
    "rwkv7_time_mix": dict(state0=True, note="a later layer, given last inputs and states"),
    "rwkv7_time_mix_first": dict(later=False, note="the first layer, which gives v_first"),
    "rwkv7_time_mix_packed": dict(B=1, packed=(37, 1, 12), state0=True, note="packed, given states"),
}
