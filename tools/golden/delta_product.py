"""delta_product: several delta steps a token, behind one decay."""
import delta_net
from core import autodiff as ad, sample
from core.blocks import tokens, zeros

EQUATION = """\
One decay, then n delta steps per token:  S = exp(g_t) S;  for j = 1..n: S += beta_tj k_tj (v_tj - S^T k_tj)^T;
o_t = scale S^T q_t.

q (B,T,H,K); k (B,T,n,H,K), v (B,T,n,H,V), beta (B,T,n,H) in memory as fla's (B,T n,H,*); g (B,T,H) or absent.
beta in (0,2) gives eigenvalues 1 - beta in (-1,1)."""

INPUTS = {"q": "BTHK", "k": "BTnHK", "v": "BTnHV", "beta": "BTnH", "g": "BTH", "state0": "BHKV"}
OUTPUTS = {"o": "BTHV", "state": "BHKV"}


def evaluate(x, p):
    q, k, v = x["q"], x["k"], x["v"]
    state = x.get("state0")
    if state is None:
        state = ad.Var(zeros(q, q.shape[0], q.shape[2], q.shape[3], v.shape[4]))
    out = []
    for t, qt in enumerate(tokens(q)):
        if "g" in x:
            state = ad.exp(x["g"][:, t])[..., None, None] * state
        for j in range(k.shape[2]):
            key, value, step = k[:, t, j], v[:, t, j], x["beta"][:, t, j]
            error = value - ad.einsum("bhkv,bhk->bhv", state, key)
            state = state + ad.einsum("bhk,bhv->bhkv", key * step[..., None], error)
        out.append(ad.einsum("bhkv,bhk->bhv", state, qt) * p.get("scale", 1.0))
    return {"o": ad.stack(out, 1), "state": state}


SIZES = dict(B=2, T=15, n=2, H=2, K=8, V=12)
OPTIONS = {"decay": False, "state0": False, "extreme": False, "weak": False}


def draw(d, n, o):
    step = (n.B, n.T, n.n, n.H)
    x = {"q": d.normal(n.B, n.T, n.H, n.K), "k": sample.keys(d, o, *step, n.K),
         "v": d.normal(*step, n.V)}
    x["beta"] = delta_net.draw_beta(d, o, *step) if o.extreme else d.uniform(0.05, 1.95, *step)
    if o.decay:
        x["g"] = sample.decayed(d, o, n.B, n.T, n.H)
    if o.state0:
        x["state0"] = d.normal(n.states, n.H, n.K, n.V)
    return x, {"scale": sample.scale_of(n.K)}


CASES = {
    "delta_product": dict(note="n = 2, no decay, beta in (0,2)"),
    "delta_product_gated_state0": dict(n=3, decay=True, state0=True,
                                       note="n = 3, decay, initial state"),
    "delta_product_packed": dict(H=1, V=5, decay=True, packed=(37, 1, 70),
                                 note="n = 2, packed, zero start"),
    "delta_product_extreme": dict(B=1, T=40, n=3, K=7, V=5, decay=True, extreme=True, state0=True,
                                  note="beta from 0 to 2, decays to exp(-40), zero and near-zero "
                                       "keys"),
}
