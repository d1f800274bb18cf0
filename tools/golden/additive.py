"""additive: linear attention, RetNet, Mamba-2/SSD and GLA, a state that only sums and decays."""
from core import autodiff as ad, sample
from core.blocks import heads_for, tokens, zeros

EQUATION = """\
S_t = diag(exp g_t) S_{t-1} + k_t v_t^T;  o_t = scale * S_t^T q_t.

g: None linear attention, (H) RetNet, (B,T,H) Mamba-2/SSD, (B,T,H,K) GLA."""

INPUTS = {"q": "BTJK", "k": "BTJK", "v": "BTHV", "g": "H|BTH|BTHK", "state0": "BHKV"}
OUTPUTS = {"o": "BTHV", "state": "BHKV"}


def decay_factors(g, length):
    """exp(g_t) for every token, shaped to multiply a state (B,H,K,V); 1 without decay."""
    if g is None:
        return [1.0] * length
    factor = ad.exp(g)
    if g.ndim == 1:
        return [factor[None, :, None, None]] * length
    index = (Ellipsis, None, None) if g.ndim == 3 else (Ellipsis, None)
    return [factor[:, t][index] for t in range(length)]


def recurrence(q, k, v, g, state, scale):
    if state is None:
        state = zeros(q, q.shape[0], q.shape[2], k.shape[3], v.shape[3])
    out = []
    for qt, kt, vt, at in zip(tokens(q), tokens(k), tokens(v), decay_factors(g, q.shape[1])):
        state = at * state + ad.einsum("bhk,bhv->bhkv", kt, vt)
        out.append(ad.einsum("bhkv,bhk->bhv", state, qt) * scale)
    return ad.stack(out, 1), state


def evaluate(x, p):
    heads = x["v"].shape[2]    # value head h of H reads with head floor(h J / H) of q and k
    q, k = heads_for(x["q"], heads), heads_for(x["k"], heads)
    o, state = recurrence(q, k, x["v"], x.get("g"), x.get("state0"), p.get("scale", 1.0))
    return {"o": o, "state": state}


SIZES = dict(B=2, T=15, H=2, K=8, V=12, J=0)    # J 0: as many as H
OPTIONS = {"decay": "scalar", "state0": False, "extreme": False, "weak": False}


def draw_decay(d, n, o):
    if o.decay == "head":
        return sample.exact(-(2.0 ** -(5 + sample.np.arange(n.H))))
    shape = (n.B, n.T, n.H, n.K) if o.decay == "vector" else (n.B, n.T, n.H)
    return sample.decayed(d, o, *shape)


def draw(d, n, o):
    key = (n.B, n.T, n.J or n.H, n.K)
    x = {"q": d.normal(*key)}
    x["k"] = (d.hard_keys if o.extreme else d.normal)(*key)
    x["v"] = d.normal(n.B, n.T, n.H, n.V)
    if o.decay != "none":
        x["g"] = draw_decay(d, n, o)
    if o.state0:
        x["state0"] = d.normal(n.states, n.H, n.K, n.V)
    return x, {"scale": 1.0 if o.extreme else sample.scale_of(n.K)}


_LONG = dict(B=1, T=300, H=1, V=6, state0=True, weak=True, note="long, weak decay, initial state")
_PACK = dict(V=5, packed=(37, 1, 70), note="packed, zero start")
_WIDE = dict(B=1, T=66, H=1, K=64, V=32, state0=True, note="kernel-sized head")
_HARD = dict(B=1, T=70, V=6, state0=True, extreme=True,
             note="decays from none to exp(-40), zero and near-zero keys")
_KINDS = {"none": "linear attention, no decay", "head": "RetNet, one constant decay per head",
          "scalar": "Mamba-2/SSD, one decay per token and head",
          "vector": "GLA, decay per key channel"}
CASES = {
    **{f"additive_{k}": dict(decay=k, note=note) for k, note in _KINDS.items()},
    **{f"additive_{k}_state0": dict(decay=k, state0=True, note=note + "; initial state")
       for k, note in _KINDS.items()},
    "additive_scalar_long": dict(_LONG, decay="scalar"),
    "additive_vector_long": dict(_LONG, decay="vector"),
    "additive_none_packed": dict(_PACK, decay="none"),
    "additive_scalar_packed": dict(_PACK, decay="scalar"),
    "additive_vector_packed_state0": dict(_PACK, decay="vector", state0=True,
                                          note="packed, one initial state per sequence"),
    "additive_vector_wide": dict(_WIDE, decay="vector"),
    "additive_grouped_scalar_state0": dict(decay="scalar", state0=True, H=4, J=2,
                                           note="four value heads on two query and key heads"),
    "additive_grouped_vector_packed": dict(_PACK, decay="vector", H=3, J=1,
                                           note="packed, three value heads on one"),
    "additive_scalar_extreme": dict(_HARD, decay="scalar"),
    "additive_vector_extreme": dict(_HARD, decay="vector"),
}
