"""l2_norm: rows over their length."""
from core.blocks import unit_max, unit_root
from core import sample

EQUATION = """\
max: x / max(|x|, eps) (KLA, Palimpsa);  root: x / sqrt(|x|^2 + eps) (fla)."""

INPUTS = {"x": "*"}
OUTPUTS = {"y": "*"}


def evaluate(x, p):
    return {"y": (unit_max if p["kind"] == "max" else unit_root)(x["x"], p["eps"])}


SIZES = dict(N=8, C=24)
OPTIONS = {"kind": "max"}


def draw(d, n, o):
    size = 10.0 ** sample.np.linspace(-9, 4, n.N)
    x = sample.exact(d.normal(n.N, n.C) * size[:, None])
    return {"x": x}, {"eps": 1e-12 if o.kind == "max" else 1e-6, "kind": o.kind}


CASES = {f"l2_norm_{kind}": dict(kind=kind, note="rows from 1e-9 to 1e4")
         for kind in ("max", "root")}
