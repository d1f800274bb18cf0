"""hgrn2_bounds: the least gates of all layers of HGRN2, from one parameter of the model."""
from core import autodiff as ad

EQUATION = """\
lb_l = sum_{j=1..l} softmax over layers of lower_bounds, so lb_0 = 0."""

INPUTS = {"lower_bounds": "LD"}
OUTPUTS = {"y": "LD"}


def evaluate(x, p):
    share, y = ad.softmax(x["lower_bounds"], 0), []
    for layer in range(share.shape[0]):
        y.append(y[-1] + share[layer] if layer else share[0] * 0.0)
    return {"y": ad.stack(y, 0)}


SIZES = dict(L=4, D=9)
OPTIONS = {}


def draw(d, n, o):
    return {"lower_bounds": d.normal(n.L, n.D)}, {}


CASES = {"hgrn2_bounds": dict(note="four layers"),
         "hgrn2_bounds_two": dict(L=2, note="two layers: one bound")}
