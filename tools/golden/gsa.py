"""gsa: gated slot attention, two memories of M slots, the second read by a softmax of the first."""
from core import autodiff as ad, sample
from core.blocks import zeros

EQUATION = """\
Hk = Hk diag(exp g) + k s^T;  p = softmax over slots of scale Hk^T q;  Hv = diag(exp g) Hv + s v^T;  o = Hv^T p.

q (B,T,H,K); k (B,T,J,K), v (B,T,J,V), s, g (B,T,J,M): query head h reads memory floor(h J / H)."""

INPUTS = {"q": "BTHK", "k": "BTJK", "v": "BTJV", "s": "BTJM", "g": "BTJM", "hk0": "BJKM",
          "hv0": "BJMV"}
OUTPUTS = {"o": "BTHV", "hk": "BJKM", "hv": "BJMV"}


def evaluate(x, p):
    q, k, v, s, g = (x[name] for name in "qkvsg")
    heads, J, M = q.shape[2], k.shape[2], s.shape[3]
    hk = x.get("hk0")
    hv = x.get("hv0")
    if hk is None:
        hk = ad.Var(zeros(q, q.shape[0], J, k.shape[3], M))
        hv = ad.Var(zeros(q, q.shape[0], J, M, v.shape[3]))
    keep, out = ad.exp(g), []
    share = [h * J // heads for h in range(heads)]
    for t in range(q.shape[1]):
        hk = hk * keep[:, t][:, :, None, :] + ad.einsum("bjk,bjm->bjkm", k[:, t], s[:, t])
        hv = hv * keep[:, t][..., None] + ad.einsum("bjm,bjv->bjmv", s[:, t], v[:, t])
        z = ad.einsum("bhkm,bhk->bhm", ad.take(hk, share, 1), q[:, t]) * p.get("scale", 1.0)
        out.append(ad.einsum("bhmv,bhm->bhv", ad.take(hv, share, 1), ad.softmax(z)))
    return {"o": ad.stack(out, 1), "hk": hk, "hv": hv}


SIZES = dict(B=2, T=15, H=2, J=2, K=8, V=6, M=5)
OPTIONS = {"state0": False, "extreme": False, "weak": False}


def draw(d, n, o):
    x = {"q": d.normal(n.B, n.T, n.H, n.K), "k": d.normal(n.B, n.T, n.J, n.K),
         "v": d.normal(n.B, n.T, n.J, n.V)}
    x["s"] = d.uniform(0.0, 1.0, n.B, n.T, n.J, n.M)
    x["g"] = sample.decayed(d, o, n.B, n.T, n.J, n.M)
    if o.state0:
        x["hk0"] = d.normal(n.states, n.J, n.K, n.M)
        x["hv0"] = d.normal(n.states, n.J, n.M, n.V)
    return x, {"scale": 1.0}


CASES = {
    "gsa": dict(note="zero start"),
    "gsa_gqa_state0": dict(B=1, T=40, H=4, V=5, state0=True,
                           note="four query heads on two memories, initial states"),
    "gsa_packed_state0": dict(V=5, packed=(37, 1, 70), state0=True,
                              note="packed, initial states per sequence"),
    "gsa_extreme": dict(B=1, T=70, K=7, V=5, J=1, state0=True, extreme=True,
                        note="decays from none to exp(-40)"),
}
