"""dplr: a diagonal decay and a correction of rank one, as in RWKV-7."""
from core import autodiff as ad, sample
from core.blocks import tokens, zeros

EQUATION = """\
S_t = diag(exp g_t) S_{t-1} + b_t (S_{t-1}^T a_t)^T + k_t v_t^T;  o_t = scale * S_t^T q_t.

The read by a sees the state before the decay.  RWKV-7: q = r, a = -kk, b = kk * iclr, scale 1.
Resolution: paper, RWKV-LM and fla agree on the undecayed read; delta reads the decayed state."""

INPUTS = {"q": "BTHK", "k": "BTHK", "v": "BTHV", "a": "BTHK", "b": "BTHK", "g": "BTHK",
          "state0": "BHKV"}
OUTPUTS = {"o": "BTHV", "state": "BHKV"}


def evaluate(x, p):
    q = x["q"]
    state = x.get("state0")
    if state is None:
        state = ad.Var(zeros(q, q.shape[0], q.shape[2], q.shape[3], x["v"].shape[3]))
    out = []
    for qt, kt, vt, at, bt, gt in zip(*map(tokens, (q, x["k"], x["v"], x["a"], x["b"], x["g"]))):
        read = ad.einsum("bhkv,bhk->bhv", state, at)
        state = (ad.exp(gt)[..., None] * state + ad.einsum("bhk,bhv->bhkv", bt, read) +
                 ad.einsum("bhk,bhv->bhkv", kt, vt))
        out.append(ad.einsum("bhkv,bhk->bhv", state, qt) * p.get("scale", 1.0))
    return {"o": ad.stack(out, 1), "state": state}


SIZES = dict(B=2, T=15, H=2, K=8, V=12)
OPTIONS = {"state0": False, "extreme": False}


def draw(d, n, o):
    key = (n.B, n.T, n.H, n.K)
    kk = (d.hard_keys if o.extreme else d.unit)(*key)
    rate = d.choice((0.0, 0.5, 1.0), *key) if o.extreme else d.uniform(0.0, 1.0, *key)
    x = {"q": d.normal(*key), "k": d.normal(*key), "v": d.normal(*key[:3], n.V), "a": -kk,
         "b": sample.exact(kk * rate)}
    x["g"] = (d.choice(sample.HARD_DECAYS, *key) if o.extreme else
              sample.exact(-sample.np.exp(-0.5) * d.uniform(0.0, 1.0, *key)))
    if o.state0:
        x["state0"] = d.normal(n.states, n.H, n.K, n.V)
    return x, {"scale": 1.0}


CASES = {
    "dplr": dict(note="RWKV-7 ranges: a = -kk unit, b = kk * iclr, g in (-0.6065, 0)"),
    "dplr_state0": dict(state0=True, note="initial state"),
    "dplr_long": dict(B=1, T=150, H=1, V=6, state0=True, note="long, initial state"),
    "dplr_packed_state0": dict(V=5, packed=(37, 1, 70), state0=True,
                               note="packed, one initial state per sequence"),
    "dplr_extreme": dict(B=1, T=70, K=7, V=5, extreme=True, state0=True,
                         note="decays to exp(-40), iclr from 0 to 1, zero and near-zero kk"),
}
