"""cross_entropy: the mean negative log-likelihood of classes, some rows ignored."""
from core import autodiff as ad

EQUATION = """\
nll_i = logsumexp(logits_i) - logits_i[target_i], 0 where target is ignore; loss = mean over the kept."""

INPUTS = {"logits": "NC", "target": "N"}
OUTPUTS = {"nll": "N", "loss": ""}
INTEGERS = ("target",)
NO_GRADIENT = ("target",)
NO_COTANGENT = ("nll",)


def evaluate(x, p):
    logits, target = x["logits"], x["target"].value.astype(int)
    kept = target != p["ignore"]
    chosen = logits[ad.np.arange(len(target)), ad.np.where(kept, target, 0)]
    nll = (ad.logsumexp(logits, -1) - chosen) * kept.astype(logits.value.dtype)
    return {"nll": nll, "loss": ad.total(nll, 0) * (1 / kept.sum())}


SIZES = dict(N=12, C=17)
OPTIONS = {}


def draw(d, n, o):
    logits, target = d.normal(n.N, n.C, by=2.0), d.choice(range(n.C), n.N)
    logits[n.N // 2] = d.normal(n.C, by=1000.0)
    target[[1, n.N - 1]] = -100
    return {"logits": logits, "target": target}, {"ignore": -100}


CASES = {"cross_entropy": dict(note="two ignored rows, one row with logits of thousands")}
