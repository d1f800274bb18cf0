"""bayes: the Kalman filter over a whole covariance, diagonal or rotating dynamics, noise groups."""
import numpy as np

from core import autodiff as ad, sample
from core.blocks import tokens, zeros

EQUATION = """\
Paper 000 Prop. 1 with diagonal or rotating dynamics and G observation-noise groups.

A_t = diag(exp la_t);  Mb = A M;  Pb_g = A P_g A^T + l2 N;  u_g = Pb_g k;  s_g = r2_g + k^T u_g;
K_g = u_g / s_g;  M[:,j] = Mb[:,j] + K_g (v_j - k^T Mb[:,j]);  P_g = Pb_g - u_g u_g^T / s_g;
o = scale M^T q.   Also gain_g = k^T u_g / s_g, gainvec_g = K_g, kvar_g = k^T Pb_g k,
qvar_g = scale^2 q^T P_g q.

q, k, la (B,T,H,D); v (B,T,H,m); l2 (B,T,H); r2 (B,T,H,G); p0 (H).  Column j belongs to group
floor(j G / m).  Start: M = 0 and P = p0 I unless M0 (B,H,D,m) and P0 (B,H,G,D,D) are given.

theta (B,T,H,D) turns on the damped 2x2 rotations of Appendix D: the state has 2D rows, pair j on
rows 2j (real) and 2j+1 (imaginary), A_t acts on it as exp(la_j) [[cos, -sin], [sin, cos]](theta_j),
i.e. multiplies x + iy by exp(la + i theta).  N = diag(1,0,1,0,...), and k, q touch real rows only.
Resolution: the paper gives noise on the real rows but only "P_0 = p0 I" for the start, so the
start is p0 on all 2D rows."""

INPUTS = {"q": "BTHD", "k": "BTHD", "v": "BTHm", "la": "BTHD", "l2": "BTH", "r2": "BTHG",
          "theta": "BTHD", "p0": "H", "M0": "BHRm", "P0": "BHGRR"}
OUTPUTS = {"o": "BTHm", "gain": "BTHG", "gainvec": "BTHGR", "kvar": "BTHG", "qvar": "BTHG",
           "M": "BHRm", "P": "BHGRR"}
SYMMETRIC = ("P0", "P")


def _dynamics(x):
    """For every token, the map x -> A_t x on the second-last axis of an array (B,H,..,R,n)."""
    damping = ad.exp(x["la"])
    if "theta" not in x:
        return [lambda s, a=a: _along(a, s.ndim) * s for a in tokens(damping)]
    real, imaginary = damping * ad.cos(x["theta"]), damping * ad.sin(x["theta"])
    return [lambda s, c=c, i=i: _turn(c, i, s) for c, i in zip(tokens(real), tokens(imaginary))]


def _along(a, ndim):
    """(B,H,D) shaped to multiply the second-last axis of an array of `ndim` axes."""
    return a[(slice(None), slice(None)) + (None,) * (ndim - 4) + (slice(None), None)]


def _turn(c, s, x):
    pairs = x.reshape(*x.shape[:-2], x.shape[-2] // 2, 2, x.shape[-1])
    real, imaginary = pairs[..., 0, :], pairs[..., 1, :]
    c, s = _along(c, x.ndim), _along(s, x.ndim)
    return ad.stack([c * real - s * imaginary, s * real + c * imaginary], -2).reshape(*x.shape)


def _on_real_rows(x):
    """(B,T,H,D) on the even rows of (B,T,H,2D)."""
    return ad.stack([x, np.zeros_like(x.value)], -1).reshape(*x.shape[:-1], 2 * x.shape[-1])


def _start(x, rows, noise_rows):
    q, v, groups = x["q"], x["v"], x["r2"].shape[3]
    mean, cov = x.get("M0"), x.get("P0")
    if mean is None:
        mean = ad.Var(zeros(q, q.shape[0], q.shape[2], rows, v.shape[3]))
    if cov is None:
        eye = np.broadcast_to(np.eye(rows, dtype=q.value.dtype),
                              (q.shape[0], q.shape[2], groups, rows, rows))
        cov = x["p0"][None, :, None, None, None] * eye
    return mean, cov


def evaluate(x, p):
    q, k, v, r2, scale = x["q"], x["k"], x["v"], x["r2"], p.get("scale", 1.0)
    groups, width = r2.shape[3], v.shape[3]
    if "theta" in x:
        q, k = _on_real_rows(q), _on_real_rows(k)
    rows = q.shape[3]
    noise = np.eye(rows, dtype=q.value.dtype)
    if "theta" in x:
        noise[1::2, 1::2] = 0
    mean, cov = _start(x, rows, noise)
    group = [j * groups // width for j in range(width)]
    seen = {name: [] for name in ("o", "gain", "gainvec", "kvar", "qvar")}
    for qt, kt, vt, lt, rt, a in zip(tokens(q), tokens(k), tokens(v), tokens(x["l2"]), tokens(r2),
                                     _dynamics(x)):
        mean = a(mean)
        cov = a(a(cov).swap(-1, -2)).swap(-1, -2) + lt[..., None, None, None] * noise
        u = ad.einsum("bhgij,bhj->bhgi", cov, kt)
        kvar = ad.einsum("bhgi,bhi->bhg", u, kt)
        s = rt + kvar
        gain = u / s[..., None]
        error = vt - ad.einsum("bhim,bhi->bhm", mean, kt)
        mean = mean + ad.einsum("bhmi,bhm->bhim", ad.take(gain, group, 2), error)
        cov = cov - ad.einsum("bhgi,bhgj->bhgij", u, gain)
        seen["o"].append(ad.einsum("bhim,bhi->bhm", mean, qt) * scale)
        seen["gain"].append(kvar / s)
        seen["gainvec"].append(gain)
        seen["kvar"].append(kvar)
        pq = ad.einsum("bhgij,bhj->bhgi", cov, qt)
        seen["qvar"].append(ad.einsum("bhgi,bhi->bhg", pq, qt) * scale * scale)
    return {**{name: ad.stack(rows, 1) for name, rows in seen.items()}, "M": mean, "P": cov}


SIZES = dict(B=2, T=13, H=2, D=6, m=8, G=2)
OPTIONS = {"rotation": False, "state0": False, "hard": "", "all_cotangents": True}


def draw(d, n, o):
    key = (n.B, n.T, n.H, n.D)
    x = {"q": d.unit(*key), "k": (d.hard_keys if o.hard == "decay" else d.unit)(*key),
         "v": d.normal(n.B, n.T, n.H, n.m)}
    x["la"] = (d.choice(sample.HARD_DECAYS, *key) if o.hard == "decay" else
               d.choice((0.0,), *key) if o.hard == "small_l2" else d.log_decay(*key, around=4.0))
    low, high = {"small_l2": (1e-12, 1e-10), "large_l2": (1e3, 1e6)}.get(o.hard, (0.01, 0.1))
    x["l2"] = d.log_uniform(low, high, n.B, n.T, n.H)
    low, high = {"small_r2": (1e-8, 1e-4), "large_r2": (1e4, 1e10)}.get(o.hard, (0.05, 0.5))
    x["r2"] = d.log_uniform(low, high, n.B, n.T, n.H, n.G)
    rows = 2 * n.D if o.rotation else n.D
    if o.rotation:
        x["theta"] = d.uniform(-1.5, 1.5, *key)
    if o.state0:
        x["M0"] = d.normal(n.states, n.H, rows, n.m)
        x["P0"] = d.positive(n.states, n.H, n.G, rows, rows)
    else:
        x["p0"] = d.uniform(0.8, 3.0, n.H)
    return x, {}


def without_cotangent(o):
    """gainvec only where there are cotangents on everything."""
    return () if o.all_cotangents else ("gain", "gainvec", "kvar", "qvar")


_PACK = dict(m=6, packed=(37, 1, 70))
_HARD = dict(B=1, T=70, H=1, m=6)
CASES = {
    "bayes_diag": dict(G=1, all_cotangents=False, note="G = 1, diagonal dynamics"),
    "bayes_diag_groups": dict(all_cotangents=False, note="G noise groups"),
    "bayes_diag_var": dict(note="cotangents on every output, variances and gains included"),
    "bayes_diag_state0": dict(state0=True, note="given M0, P0; dP0 is the symmetric part"),
    "bayes_rotation": dict(rotation=True, G=1, all_cotangents=False, note="2x2 rotations, G = 1"),
    "bayes_rotation_var": dict(rotation=True,
                               note="2x2 rotations, groups, cotangents on every output"),
    "bayes_rotation_state0": dict(rotation=True, state0=True, note="2x2 rotations, given M0, P0"),
    "bayes_diag_long": dict(B=1, T=300, H=1, D=8, m=6, G=1, note="long"),
    "bayes_rotation_long": dict(B=1, T=300, H=1, D=4, m=6, rotation=True, note="long, rotations"),
    "bayes_diag_wide": dict(B=1, T=20, H=1, D=32, m=32, all_cotangents=False, note="larger head"),
    "bayes_diag_packed": dict(_PACK, note="packed, fresh start at borders"),
    "bayes_rotation_packed": dict(_PACK, H=1, D=3, rotation=True, note="packed, rotations"),
    "bayes_extreme_decay": dict(_HARD, hard="decay",
                                note="decays to exp(-40), zero and near-zero keys"),
    "bayes_extreme_small_l2": dict(_HARD, hard="small_l2",
                                   note="l2 from 1e-12: the covariance only shrinks"),
    "bayes_extreme_large_l2": dict(_HARD, hard="large_l2",
                                   note="l2 up to 1e6: gains next to 1"),
    "bayes_extreme_small_r2": dict(_HARD, hard="small_r2",
                                   note="r2 from 1e-8: P nearly singular along the last keys"),
    "bayes_extreme_large_r2": dict(_HARD, hard="large_r2",
                                   note="r2 up to 1e10: writes almost ignored"),
}
