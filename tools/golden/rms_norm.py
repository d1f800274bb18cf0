"""rms_norm: rows over the root of their mean square, weighted."""
from core import sample
from core.blocks import rms

EQUATION = """\
y = x / sqrt(mean(x^2) + eps) * w over the last axis."""

INPUTS = {"x": "*", "w": "N"}
OUTPUTS = {"y": "*"}


def evaluate(x, p):
    return {"y": rms(x["x"], p["eps"]) * x["w"]}


SIZES = dict(B=2, T=15, N=24)
OPTIONS = {"small": False}


def draw(d, n, o):
    x = {"x": d.normal(n.B, n.T, n.N), "w": d.normal(n.N, by=0.1, around=1.0)}
    if o.small:
        size = 10.0 ** sample.np.linspace(-6, 2, n.T)
        x["x"] = sample.exact(d.normal(n.T, n.N) * size[:, None])
    return x, {"eps": 1e-5 if o.small else 1e-6}


CASES = {"rms_norm": dict(note="plain case"),
         "rms_norm_small": dict(T=9, small=True, note="rows from 1e-6 to 1e2")}
