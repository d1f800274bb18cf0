"""swiglu: the gated second half of a block."""
from core import autodiff as ad

EQUATION = """\
y = (silu(x gate^T) * (x up^T)) down^T.  gate, up (F,D); down (D,F)."""

INPUTS = {"x": "BTD", "gate": "FD", "up": "FD", "down": "DF"}
OUTPUTS = {"y": "BTD"}


def evaluate(x, p):
    inner = ad.silu(ad.linear(x["x"], x["gate"])) * ad.linear(x["x"], x["up"])
    return {"y": ad.linear(inner, x["down"])}


SIZES = dict(B=2, T=6, D=12, F=20)
OPTIONS = {}


def draw(d, n, o):
    x = {"x": d.normal(n.B, n.T, n.D), "gate": d.weight(n.F, n.D), "up": d.weight(n.F, n.D),
         "down": d.weight(n.D, n.F)}
    return x, {}


CASES = {"swiglu": dict(note="plain case")}
