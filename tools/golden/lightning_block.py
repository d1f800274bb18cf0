"""lightning_block: MiniMax's linear attention, whose heads forget at fixed rates."""
import additive
from core import autodiff as ad
from core.blocks import rms

import numpy as np

EQUATION = """\
q, k, v = SiLU(qkv_proj x), rows per head: q d, k d, v d;  g_h = -2^(-8 (h + 1) / H) f,
f = 1 - layer / (n_layers - 1 + 1e-5) + 1e-5;  o = additive(q, k, v, g), scale 1;
y = out_proj(sigmoid(output_gate x) rms(o; eps) norm), rms over all H d channels."""

INPUTS = {"x": "BTD", "qkv_proj.weight": "WD", "output_gate.weight": "ED", "norm.weight": "E",
          "out_proj.weight": "DE", "state0": "BHKV"}
OUTPUTS = {"y": "BTD", "state": "BHKV"}


def evaluate(x, p):
    z, H = x["x"], p["heads"]
    rows, d = z.shape[:2], x["norm.weight"].shape[0] // H
    qkv = ad.silu(ad.linear(z, x["qkv_proj.weight"])).reshape(*rows, H, 3 * d)
    f = 1 - p["layer"] / (p["n_layers"] - 1 + 1e-5) + 1e-5
    slopes = -(2.0 ** (-8.0 * (np.arange(H) + 1) / H)) * f
    state = x.get("state0")
    o, state = additive.recurrence(qkv[..., :d], qkv[..., d:2 * d], qkv[..., 2 * d:],
                                   ad.Var(slopes.astype(ad.value(z).dtype)), state, 1.0)
    o = rms(o.reshape(*rows, H * d), p["eps"]) * x["norm.weight"]
    o = ad.sigmoid(ad.linear(z, x["output_gate.weight"])) * o
    return {"y": ad.linear(o, x["out_proj.weight"]), "state": state}


SIZES = dict(B=2, T=15, H=2, K=6, D=10)
OPTIONS = {"state0": False}


def draw(d, n, o):
    E = n.H * n.K
    x = {"x": d.normal(n.B, n.T, n.D), "qkv_proj.weight": d.weight(3 * E, n.D),
         "output_gate.weight": d.weight(E, n.D), "norm.weight": d.normal(E, around=1.0, by=0.2),
         "out_proj.weight": d.weight(n.D, E)}
    if o.state0:
        x["state0"] = d.normal(n.states, n.H, n.K, n.K)
    return x, {"heads": n.H, "layer": 1, "n_layers": 4, "eps": 1e-6}


CASES = {"lightning_block": dict(state0=True, note="given state")}
