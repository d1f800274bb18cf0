"""rope: pairs of channels turned by their positions."""
from core import blocks

EQUATION = """\
Rotate pairs of channels of x (B,T,H,D) by pos * base^(-2j/D), j = 0..D/2-1.

half: pair (j, j + D/2), as NeoX and fla;  pairs: pair (2j, 2j+1).
Resolution: HyperMLP's official RoPE mixes the two (not a rotation) and is off by default; not built."""

INPUTS = {"x": "BTHD"}
OUTPUTS = {"y": "BTHD"}


def evaluate(x, p):
    return {"y": blocks.rope(x["x"], p["kind"], p["base"], p.get("pos0", 0))}


SIZES = dict(B=2, T=15, H=2, D=8)
OPTIONS = {"kind": "half"}


def draw(d, n, o):
    return {"x": d.normal(n.B, n.T, n.H, n.D)}, {"kind": o.kind, "base": 10000.0, "pos0": 3}


CASES = {f"rope_{kind}": dict(kind=kind, note="positions start at 3") for kind in ("half", "pairs")}
