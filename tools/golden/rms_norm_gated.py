"""rms_norm_gated: rms_norm with a gate before or after it."""
from core import autodiff as ad
from core.blocks import rms

EQUATION = """\
norm_first: rms(x) w * act(z) (fla; act sigmoid for KDA).  gate_first: rms(x act(z)) w over groups (Mamba-2)."""

INPUTS = {"x": "*", "z": "*", "w": "N"}
OUTPUTS = {"y": "*"}


def evaluate(x, p):
    act = ad.sigmoid if p["act"] == "sigmoid" else ad.silu
    data, groups = x["x"], p.get("groups", 1)
    if p["order"] == "norm_first":
        return {"y": rms(data, p["eps"]) * x["w"] * act(x["z"])}
    data = data * act(x["z"])
    parts = data.reshape(*data.shape[:-1], groups, data.shape[-1] // groups)
    return {"y": rms(parts, p["eps"]).reshape(*data.shape) * x["w"]}


SIZES = dict(B=2, T=15, N=24)
OPTIONS = {"order": "norm_first", "act": "silu", "groups": 1}


def draw(d, n, o):
    x = {"x": d.normal(n.B, n.T, n.N), "z": d.normal(n.B, n.T, n.N),
         "w": d.normal(n.N, by=0.1, around=1.0)}
    p = {"eps": 1e-5, "order": o.order, "act": o.act}
    return x, ({**p, "groups": o.groups} if o.groups > 1 else p)


CASES = {
    "rms_norm_gated_norm_first": dict(note="norm first, SiLU"),
    "rms_norm_gated_norm_first_sigmoid": dict(act="sigmoid", note="norm first, sigmoid"),
    "rms_norm_gated_gate_first": dict(order="gate_first", groups=2, note="gate first, two groups"),
}
