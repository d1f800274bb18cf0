"""relu_attention: rectified scores over their length instead of a softmax."""
from core import autodiff as ad
from core.blocks import causal

EQUATION = """\
o_t = sum_{i<=t} relu(z_i / max(|z|_2, eps)) v_i, z_i = scale q_t.k_i over i <= t.

Resolution: max(|z|, eps) as in the code; the paper's sqrt(|z|^2 + eps) differs near |z| = 1e-6."""

INPUTS = {"q": "BTHd", "k": "BTHd", "v": "BTHv"}
OUTPUTS = {"o": "BTHv"}

EPS = 1e-6


def evaluate(x, p):
    scores = ad.einsum("bthd,bihd->bhti", x["q"], x["k"]) * p.get("scale", 1.0)
    scores = ad.keep(scores, causal(x["q"].shape[1]), 0.0)
    length = ad.floor_at(ad.sqrt(ad.total(scores * scores, -1, True)), p.get("eps", EPS))
    return {"o": ad.einsum("bhti,bihv->bthv", ad.relu(scores / length), x["v"])}


SIZES = dict(B=2, T=15, H=2, d=8, v=6)
OPTIONS = {"zero": False}


def draw(d, n, o):
    key = (n.B, n.T, n.H, n.d)
    x = {"q": d.normal(*key), "k": d.normal(*key), "v": d.normal(n.B, n.T, n.H, n.v)}
    if o.zero:
        x["k"][..., 0] = abs(x["k"][..., 0]) + 0.5
        x["q"][:, 5] = 0.0                      # no scores
        x["q"][:, 9] = 0.0                      # only negative ones
        x["q"][:, 9, :, 0] = -1.0
    return x, {"scale": 1.0}


CASES = {
    "relu_attention": dict(note="ReLU(L2Norm) attention, no score scale"),
    "relu_attention_zero": dict(B=1, T=20, zero=True,
                                note="row 5 has zero scores, row 9 only negative ones"),
}
