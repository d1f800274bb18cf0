"""hyper_layer: the module around hyper_core, under the names of its authors."""
import hyper_core
from core import autodiff as ad
from core.blocks import conv

EQUATION = """\
The official module: gates, controls, the two depthwise convs on x, q/k/v, hyper_core, c_proj.

x (B,T,D); par maps the official parameter names (q.weight, conv1.conv.weight, op.mix.U, ...)."""

_WEIGHTS = ("q.weight", "k.weight", "v.weight", "c_proj.weight", "left_gate.weight",
            "left_gate.bias", "right_gate.weight", "right_gate.bias", "control1.weight",
            "control1.bias", "control2.weight", "control2.bias", "conv1.conv.weight",
            "conv2.conv.weight", "op.mix.U", "op.mix.Vt", "op.mix.d", "op2.mix.U", "op2.mix.Vt",
            "op2.mix.d")
INPUTS = {"x": "BTD", **{name: "*" for name in _WEIGHTS}}
OUTPUTS = {"y": "BTD"}


def _heads(x, n):
    return x.reshape(*x.shape[:-1], n, x.shape[-1] // n)


def _gate(x, par, name):
    return ad.sigmoid(ad.linear(x, par[f"{name}.weight"], par[f"{name}.bias"]))


def _short(x, par, name):
    w = par[f"{name}.conv.weight"]
    return conv(x, w.reshape(w.shape[0], w.shape[2]), None)[0]


def evaluate(par, p):
    x, heads = par["x"], p["n_head"]
    branches = heads * (2 if p["kind"] == "glu" else 1)
    q = ad.linear(x, par["q.weight"]) * _gate(x, par, "left_gate")
    core = {"q": _heads(q, branches),
            "k": _heads(ad.linear(_short(x, par, "conv1"), par["k.weight"]), branches),
            "v": _heads(ad.linear(_short(x, par, "conv2"), par["v.weight"]), heads),
            "gv": _heads(_gate(x, par, "right_gate"), heads),
            "c1": _heads(_gate(x, par, "control1"), branches),
            "c2": _heads(_gate(x, par, "control2"), heads)}
    for which, name in ((1, "op"), (2, "op2")):
        core.update({f"{part}{which}": par[f"{name}.mix.{part}"] for part in ("U", "Vt", "d")})
    o = hyper_core.evaluate(core, p)["o"]
    return {"y": ad.linear(o.reshape(*o.shape[:2], o.shape[2] * o.shape[3]), par["c_proj.weight"])}


SIZES = dict(B=2, T=15, D=16, H=2, d=8, v=12, r=3, s=2)
OPTIONS = {"kind": "glu"}


def draw(d, n, o):
    branches, lags = n.H * (2 if o.kind == "glu" else 1), n.T + 5
    controls = {"control1": branches * n.r, "control2": n.H * n.s}
    x = {"x": d.normal(n.B, n.T, n.D), "q.weight": d.weight(n.d, n.D),
         "k.weight": d.weight(n.d, n.D), "v.weight": d.weight(n.v, n.D),
         "c_proj.weight": d.weight(n.D, n.v)}
    for name, width in {"left_gate": n.d, "right_gate": n.v, **controls}.items():
        x[f"{name}.weight"], x[f"{name}.bias"] = d.weight(width, n.D), d.normal(width, by=0.5)
    for name in ("conv1", "conv2"):
        x[f"{name}.conv.weight"] = d.normal(n.D, 1, 4, by=0.5)
    for name, rows, rank in (("op", branches, n.r), ("op2", n.H, n.s)):
        x[f"{name}.mix.U"] = d.normal(rows, lags, rank, by=0.3)
        x[f"{name}.mix.Vt"] = d.normal(rows, rank, lags, by=0.3)
        x[f"{name}.mix.d"] = d.normal(rows, lags, by=0.3)
    return x, {"n_head": n.H, "kind": o.kind, "norm": "out_scale", "eps": 1e-12}


_NOTE = "whole official module, block_size = T + 5, qk_rank 8, vo_rank 12"
CASES = {f"{name}_layer": dict(kind=kind, note=_NOTE)
         for name, kind in (("hypermlp", "relu"), ("hyperglu", "glu"))}
