"""mesa: a least-squares read, solved exactly at every token."""
from core import autodiff as ad, sample
from core.blocks import tokens, zeros

EQUATION = """\
Hkk_t = e^g Hkk + beta k k^T;  Hkv_t = e^g Hkv + beta k v^T;  (Hkk + diag lam) x = scale q;  o = Hkv^T x.

g, beta (B,T,H); lam (H,K).
Resolution: exact solve; the official conjugate gradients (30 steps, 1e-5 in denominators) only
approximate it."""

INPUTS = {"q": "BTHK", "k": "BTHK", "v": "BTHV", "g": "BTH", "beta": "BTH", "lam": "HK",
          "hkk0": "BHKK", "hkv0": "BHKV"}
OUTPUTS = {"o": "BTHV", "hkk": "BHKK", "hkv": "BHKV"}
SYMMETRIC = ("hkk0", "hkk")


def evaluate(x, p):
    q, k, v = x["q"], x["k"], x["v"]
    batch, heads, width = q.shape[0], q.shape[2], q.shape[3]
    hkk, hkv = x.get("hkk0"), x.get("hkv0")
    if hkk is None:
        hkk, hkv = zeros(q, batch, heads, width, width), zeros(q, batch, heads, width, v.shape[3])
    ridge = ad.einsum("hk,kl->hkl", x["lam"], ad.np.eye(width, dtype=q.value.dtype))
    out = []
    for qt, kt, vt, bt, at in zip(*map(tokens, (q, k, v, x["beta"], ad.exp(x["g"])))):
        written = kt * bt[..., None]
        hkk = at[..., None, None] * hkk + ad.einsum("bhk,bhl->bhkl", written, kt)
        hkv = at[..., None, None] * hkv + ad.einsum("bhk,bhv->bhkv", written, vt)
        read = ad.solve(hkk + ridge, qt * p.get("scale", 1.0))
        out.append(ad.einsum("bhkv,bhk->bhv", hkv, read))
    return {"o": ad.stack(out, 1), "hkk": hkk, "hkv": hkv}


SIZES = dict(B=2, T=15, H=2, K=8, V=12)
OPTIONS = {"state0": False, "extreme": False, "weak": False}


def draw(d, n, o):
    key, head = (n.B, n.T, n.H, n.K), (n.B, n.T, n.H)
    x = {"q": d.unit(*key), "k": sample.keys(d, o, *key), "v": d.normal(*head, n.V)}
    x["g"] = sample.decayed(d, o, *head)
    x["beta"] = d.log_uniform(1e-8, 1.0, *head) if o.extreme else d.uniform(0.1, 1.0, *head)
    x["lam"] = d.uniform(*((0.01, 0.05) if o.extreme else (0.25, 1.0)), n.H, n.K)
    if o.state0:
        x["hkk0"] = d.positive(n.states, n.H, n.K, n.K)
        x["hkv0"] = d.normal(n.states, n.H, n.K, n.V)
    return x, {"scale": 1.0}


CASES = {
    "mesa": dict(note="zero start"),
    "mesa_state0": dict(state0=True, note="given Hkk, Hkv; dhkk0 is the symmetric part"),
    "mesa_long": dict(B=1, T=300, H=1, V=6, weak=True, note="long"),
    "mesa_packed": dict(V=5, packed=(37, 1, 70), note="packed, zero start"),
    "mesa_wide": dict(B=1, T=40, H=1, K=64, V=32, note="kernel-sized head"),
    "mesa_extreme": dict(B=1, T=70, V=6, extreme=True,
                         note="decays to exp(-40), beta from 1e-8, small ridge, zero and near-zero "
                              "keys"),
}
