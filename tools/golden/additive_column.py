"""additive_column: a sum whose value channels forget, the first memory of gated slot attention."""
from core import autodiff as ad, sample
from core.blocks import tokens, zeros

EQUATION = """\
S_t = diag(exp g_t) S_{t-1} + v_t k_t^T;  o_t = scale * S_t q_t.

g (B,T,H,V) per value channel; the state is (B,H,V,K)."""

INPUTS = {"q": "BTHK", "k": "BTHK", "v": "BTHV", "g": "BTHV", "state0": "BHVK"}
OUTPUTS = {"o": "BTHV", "state": "BHVK"}


def evaluate(x, p):
    q, k, v, g = (x[name] for name in "qkvg")
    state, keep, out = x.get("state0"), ad.exp(g), []
    if state is None:
        state = ad.Var(zeros(q, q.shape[0], q.shape[2], v.shape[3], k.shape[3]))
    for t, (qt, kt, vt) in enumerate(zip(tokens(q), tokens(k), tokens(v))):
        state = keep[:, t][..., None] * state + ad.einsum("bhv,bhk->bhvk", vt, kt)
        out.append(ad.einsum("bhvk,bhk->bhv", state, qt) * p.get("scale", 1.0))
    return {"o": ad.stack(out, 1), "state": state}


SIZES = dict(B=2, T=15, H=2, K=8, V=12)
OPTIONS = {"state0": False, "extreme": False, "weak": False}


def draw(d, n, o):
    x = {"q": d.normal(n.B, n.T, n.H, n.K)}
    x["k"] = (d.hard_keys if o.extreme else d.normal)(n.B, n.T, n.H, n.K)
    x["v"] = d.normal(n.B, n.T, n.H, n.V)
    x["g"] = sample.decayed(d, o, n.B, n.T, n.H, n.V)
    if o.state0:
        x["state0"] = d.normal(n.states, n.H, n.V, n.K)
    return x, {"scale": 1.0 if o.extreme else sample.scale_of(n.K)}


CASES = {
    "additive_column": dict(note="zero start"),
    "additive_column_state0": dict(state0=True, note="initial state"),
    "additive_column_packed_state0": dict(V=5, packed=(37, 1, 70), state0=True,
                                          note="packed, one initial state per sequence"),
    "additive_column_long": dict(B=1, T=300, H=1, V=6, state0=True, weak=True,
                                 note="long, weak decay, initial state"),
    "additive_column_wide": dict(B=1, T=66, H=1, K=32, V=64, state0=True, note="64 slots"),
    "additive_column_extreme": dict(B=1, T=70, V=6, state0=True, extreme=True,
                                    note="decays from none to exp(-40), zero and near-zero keys"),
}
