"""kla_mc: the loss of KLA+, averaged over draws of what a head reads."""
from core import autodiff as ad
from core.blocks import rms

EQUATION = """\
nll_t = log S - logsumexp_s log_softmax(head x_s)[target_t],  x_s = mu + sqrt(max(var,1e-12)) noise_s.

mu, var (B,T,D); noise (S,B,T,D) fixed draws; head (vocab, D); norm (D) adds an RMSNorm before the
head.  logprob is the whole normalised log-distribution (B,T,vocab).
Resolution: the code's form (independent noise per output channel), not the paper's state sampling."""

INPUTS = {"mu": "BTD", "var": "BTD", "noise": "SBTD", "target": "BT", "head": "ND", "norm": "D"}
OUTPUTS = {"nll": "BT", "logprob": "BTN"}
INTEGERS = ("target",)
NO_GRADIENT = ("target",)
NO_COTANGENT = ("logprob",)


def evaluate(x, p):
    draws = x["mu"] + ad.sqrt(ad.floor_at(x["var"], 1e-12)) * x["noise"]
    if "norm" in x:
        draws = rms(draws, p["norm_eps"]) * x["norm"]
    logits = ad.linear(draws, x["head"])
    each = logits - ad.logsumexp(logits, -1, True)
    logprob = ad.logsumexp(each, 0) - ad.np.log(x["noise"].shape[0])
    b, t = ad.np.indices(x["target"].shape)
    return {"nll": -logprob[b, t, x["target"].value.astype(int)], "logprob": logprob}


SIZES = dict(B=2, T=6, D=10, N=13, S=5)
OPTIONS = {"norm": False}


def draw(d, n, o):
    row = (n.B, n.T, n.D)
    x = {"mu": d.normal(*row), "var": d.uniform(-0.1, 1.0, *row), "noise": d.normal(n.S, *row),
         "target": d.choice(range(n.N), n.B, n.T), "head": d.weight(n.N, n.D)}
    if o.norm:
        x["norm"] = d.normal(n.D, by=0.1, around=1.0)
    return x, ({"norm_eps": 1e-5} if o.norm else {})


CASES = {
    "kla_mc": dict(note="KLA+ loss, linear head, S = 5 fixed draws; var below its floor in places"),
    "kla_mc_norm": dict(norm=True, note="KLA+ loss, RMSNorm then linear head"),
}
