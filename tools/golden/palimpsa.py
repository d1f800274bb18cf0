"""palimpsa: an importance-weighted running mean per entry of the state; two gatings share it."""
from core import autodiff as ad, sample
from core.blocks import tokens, zeros

EQUATION = """\
I_t = a I_{t-1} + (1-a) Ip + k^2 b^T;  mu_t = (a I_{t-1} mu_{t-1} + k v^T) / I_t, a = exp(g_t);
o = scale mu^T q;  ovar_j = scale^2 sum_i q_i^2 / I_ij.

v is the value as it enters the numerator (already multiplied by its gate), b the importance gate,
both (B,T,H,V); g (B,T,H); ip (H).  Fresh state: mu = 0, I = Ip.
Resolution: (1-a) Ip as in eqs. 23/25 and the code; eq. 3's (a-1) is a typo.  ovar carries scale^2
as in the official Python reference; the official kernels multiply by scale once."""

INPUTS = {"q": "BTHK", "k": "BTHK", "v": "BTHV", "b": "BTHV", "g": "BTH", "ip": "H",
          "mu0": "BHKV", "imp0": "BHKV"}
OUTPUTS = {"o": "BTHV", "ovar": "BTHV", "mu": "BHKV", "imp": "BHKV"}


def recurrence(x, p, v, b, kept, lost):
    """`kept` is the decay a (B,T,H), `lost` is 1 - a; v and b (B,T,H,V)."""
    q, k, scale = x["q"], x["k"], p.get("scale", 1.0)
    prior = x["ip"][None, :, None, None]
    shape = (q.shape[0], q.shape[2], k.shape[3], v.shape[3])
    mean = x.get("mu0", None) or zeros(q, *shape)
    importance = x.get("imp0", None) or prior + zeros(q, *shape)
    out, spread = [], []
    for qt, kt, vt, bt, at, lt in zip(*map(tokens, (q, k, v, b, kept, lost))):
        at, lt = at[..., None, None], lt[..., None, None]
        before = at * importance
        importance = before + lt * prior + ad.einsum("bhk,bhv->bhkv", kt * kt, bt)
        mean = (before * mean + ad.einsum("bhk,bhv->bhkv", kt, vt)) / importance
        out.append(ad.einsum("bhkv,bhk->bhv", mean, qt) * scale)
        spread.append(ad.einsum("bhkv,bhk->bhv", 1 / importance, qt * qt) * scale * scale)
    return {"o": ad.stack(out, 1), "ovar": ad.stack(spread, 1), "mu": mean, "imp": importance}


def evaluate(x, p):
    return recurrence(x, p, x["v"], x["b"], ad.exp(x["g"]), -ad.expm1(x["g"]))


SIZES = dict(B=2, T=15, H=2, K=8, V=12)
OPTIONS = {"state0": False, "extreme": False, "weak": False}


def draw(d, n, o):
    key, value = (n.B, n.T, n.H, n.K), (n.B, n.T, n.H, n.V)
    x = {"q": d.normal(*key), "k": sample.keys(d, o, *key), "v": d.normal(*value)}
    x["b"] = d.log_uniform(1e-8, 1e2, *value) if o.extreme else d.log_uniform(0.05, 1.3, *value)
    x["g"] = (d.choice(sample.HARD_DECAYS, n.B, n.T, n.H) if o.extreme else
              d.log_decay(n.B, n.T, n.H, around=5.0 if o.weak else 3.0))
    x["ip"] = d.log_uniform(0.3, 10.0, n.H) if o.extreme else d.uniform(0.5, 2.0, n.H)
    if o.state0:
        x["mu0"] = d.normal(n.states, n.H, n.K, n.V)
        x["imp0"] = d.uniform(2.0, 4.0, n.states, n.H, n.K, n.V)
    return x, {"scale": sample.scale_of(n.K)}


CASES = {
    "palimpsa": dict(note="gates given as log decay g and importance b"),
    "palimpsa_state0": dict(state0=True, note="given mu0, imp0 (not equal to the prior)"),
    "palimpsa_long": dict(B=1, T=300, H=1, V=6, state0=True, weak=True, note="long, weak decay"),
    "palimpsa_packed": dict(V=5, packed=(37, 1, 70), note="packed, fresh start at borders"),
    "palimpsa_wide": dict(B=1, T=40, H=1, K=48, V=32, state0=True,
                          note="kernel-sized head, K = 48 not a power of two"),
    "palimpsa_extreme": dict(
        B=1, T=70, V=6, extreme=True,
        note="decays to exp(-40), b and Ip over many decades, zero and near-zero keys"),
}
