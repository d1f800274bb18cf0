"""ccq: queries cleaned of the directions in which keys crowd."""
from core import autodiff as ad
from core.blocks import tokens, zeros

EQUATION = """\
kbar = (1/n) sum k_i;  C = (1/n) sum k_i k_i^T - kbar kbar^T over i <= t;  qt = q - gamma C q.

n counts the current token.  State: raw sums kk (B,H,K,K), ks (B,H,K) and the count n0.  Keys are
used as given; the paper's bounds hold for unit-norm keys.  gamma (B,T,H)."""

INPUTS = {"q": "BTHK", "k": "BTHK", "gamma": "BTH", "kk0": "BHKK", "ks0": "BHK"}
OUTPUTS = {"qt": "BTHK", "kk": "BHKK", "ks": "BHK"}
SYMMETRIC = ("kk0", "kk")


def clean(x, p):
    """The cleaned query of every token, and the raw sums after the last one."""
    q, k = x["q"], x["k"]
    kk, ks, count = x.get("kk0"), x.get("ks0"), p.get("n0", 0)
    if kk is None:
        shape = (q.shape[0], q.shape[2], q.shape[3])
        kk, ks = zeros(q, *shape, shape[-1]), zeros(q, *shape)
    out = []
    for i, (qt, kt, gate) in enumerate(zip(*map(tokens, (q, k, x["gamma"])))):
        kk, ks = kk + ad.einsum("bhk,bhl->bhkl", kt, kt), ks + kt
        share = 1 / (count + i + 1)
        mean = ks * share
        along = ad.total(mean * qt, -1, True)
        covered = ad.einsum("bhkl,bhl->bhk", kk, qt) * share - mean * along
        out.append(qt - gate[..., None] * covered)
    return ad.stack(out, 1), kk, ks


def evaluate(x, p):
    qt, kk, ks = clean(x, p)
    return {"qt": qt, "kk": kk, "ks": ks}


SIZES = dict(B=2, T=15, H=2, K=8)
OPTIONS = {"state0": False, "extreme": False}


def draw(d, n, o):
    key = (n.B, n.T, n.H, n.K)
    x = {"q": d.normal(*key), "k": (d.hard_keys if o.extreme else d.unit)(*key)}
    x["gamma"] = d.choice((0.0, 0.5, 1.0), *key[:3]) if o.extreme else d.uniform(0, 1, *key[:3])
    if o.state0:
        x["kk0"], x["ks0"] = d.positive(n.states, n.H, n.K, n.K), d.normal(n.states, n.H, n.K)
    return x, ({"n0": 5} if o.state0 else {})


CASES = {
    "ccq": dict(note="zero start"),
    "ccq_state0": dict(state0=True, note="continues after 5 tokens"),
    "ccq_long": dict(B=1, T=300, H=1, note="long"),
    "ccq_packed": dict(packed=(37, 1, 70), note="packed, counts restart"),
    "ccq_extreme": dict(B=1, T=70, extreme=True,
                        note="gate 0 to 1, repeated keys (C = 0), zero and near-zero keys"),
}
