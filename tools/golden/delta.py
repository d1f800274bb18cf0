"""delta: the delta rule with independent erase and write keys; the other delta rows call it."""
from additive import decay_factors
from core import autodiff as ad, sample
from core.blocks import tokens, zeros

EQUATION = """\
S' = diag(exp g_t) S_{t-1};  S_t = S' + w_t (v_t - S'^T e_t)^T;  o_t = scale * S_t^T q_t.

e is the erase (prediction) key, w the write key.  The prediction reads the decayed state."""

INPUTS = {"q": "BTHK", "e": "BTHK", "w": "BTHK", "v": "BTHV", "g": "BTHK", "state0": "BHKV"}
OUTPUTS = {"o": "BTHV", "state": "BHKV"}


def correct(state, e, w, v):
    """S + w (v - S^T e)^T for one token."""
    error = v - ad.einsum("bhkv,bhk->bhv", state, e)
    return state + ad.einsum("bhk,bhv->bhkv", w, error)


def recurrence(q, e, w, v, g, state, scale):
    if state is None:
        state = zeros(q, v.shape[0], v.shape[2], e.shape[3], v.shape[3])
    out = []
    rows = zip(tokens(q), tokens(e), tokens(w), tokens(v), decay_factors(g, q.shape[1]))
    for qt, et, wt, vt, at in rows:
        state = correct(at * state, et, wt, vt)
        out.append(ad.einsum("bhkv,bhk->bhv", state, qt) * scale)
    return ad.stack(out, 1), state


def evaluate(x, p):
    o, state = recurrence(x["q"], x["e"], x["w"], x["v"], x.get("g"), x.get("state0"),
                          p.get("scale", 1.0))
    return {"o": o, "state": state}


SIZES = dict(B=2, T=15, H=2, K=8, V=12)
OPTIONS = {"decay": True, "state0": False, "extreme": False, "weak": False}


def draw(d, n, o):
    x = {"q": d.normal(n.B, n.T, n.H, n.K), "e": sample.keys(d, o, n.B, n.T, n.H, n.K)}
    x["w"] = sample.exact(x["e"] * d.uniform(0.05, 1.0, n.B, n.T, n.H, 1) +
                          d.normal(n.B, n.T, n.H, n.K, by=0.1))
    x["v"] = d.normal(n.B, n.T, n.H, n.V)
    if o.decay:
        x["g"] = sample.decayed(d, o, n.B, n.T, n.H, n.K)
    if o.state0:
        x["state0"] = d.normal(n.states, n.H, n.K, n.V)
    return x, {"scale": sample.scale_of(n.K)}


CASES = {
    "delta_general": dict(
        state0=True, note="independent erase and write vectors, vector decay, initial state"),
    "delta_general_nodecay": dict(
        decay=False, note="independent erase and write vectors, no decay"),
    "delta_general_packed_state0": dict(V=5, packed=(37, 1, 70), state0=True,
                                        note="packed, one initial state per sequence"),
}
