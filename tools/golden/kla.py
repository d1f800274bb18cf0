"""kla: Kalman linear attention, a Gaussian per channel and slot, filtered in precision form."""
from core import autodiff as ad, sample
from core.blocks import tokens, zeros

EQUATION = """\
den = a^2 + p lam_{t-1};  lam_t = lam_{t-1}/den + prec k^2;  eta_t = (a/den) eta_{t-1} + prec v k;
y[m] = sum_s q_s eta/lam;  yvar[m] = sum_s q_s^2 / lam.

v, prec (B,T,M); k, q (B,T,S) shared by the channels; a, p (M,S) constant in time; state (B,M,S).
Fresh state lam = 1, eta = 0.  from_prior reads one prediction ahead: mean*a, var*a^2 + p.
Resolution: floors of the official linear path - a^2, p, den and the lam under the division are
floored at 1e-12, prec k^2 is not; where a floor binds its gradient is zero."""

INPUTS = {"v": "BTM", "prec": "BTM", "k": "BTS", "q": "BTS", "a": "MS", "p": "MS",
          "lam0": "BMS", "eta0": "BMS"}
OUTPUTS = {"y": "BTM", "yvar": "BTM", "lam": "BMS", "eta": "BMS"}

FLOOR = 1e-12


def evaluate(x, p):
    a, noise = x["a"], ad.floor_at(x["p"], FLOOR)
    a2 = ad.floor_at(a * a, FLOOR)
    shape = (x["v"].shape[0],) + a.shape
    lam, eta = x.get("lam0"), x.get("eta0")
    if lam is None:
        lam = ad.Var(zeros(a, *shape) + 1)
    if eta is None:
        eta = ad.Var(zeros(a, *shape))
    mean, spread = [], []
    for vt, rt, kt, qt in zip(*map(tokens, (x["v"], x["prec"], x["k"], x["q"]))):
        den = ad.floor_at(a2 + noise * lam, FLOOR)
        lam = lam / den + ad.einsum("bm,bs->bms", rt, kt * kt)
        eta = a / den * eta + ad.einsum("bm,bs->bms", rt * vt, kt)
        mu, var = eta / ad.floor_at(lam, FLOOR), 1 / ad.floor_at(lam, FLOOR)
        if p.get("from_prior"):
            mu, var = mu * a, var * a2 + noise
        mean.append(ad.einsum("bms,bs->bm", mu, qt))
        spread.append(ad.einsum("bms,bs->bm", var, qt * qt))
    return {"y": ad.stack(mean, 1), "yvar": ad.stack(spread, 1), "lam": lam, "eta": eta}


SIZES = dict(B=2, T=15, M=12, S=8)
OPTIONS = {"state0": False, "from_prior": False, "hard": "", "unit": False}


def draw(d, n, o):
    key, channel, cell = (n.B, n.T, n.S), (n.B, n.T, n.M), (n.M, n.S)
    keys = d.hard_keys if o.hard else d.unit if o.unit else d.normal
    x = {"v": d.normal(*channel), "k": keys(*key), "q": d.normal(*key)}
    x["prec"] = d.log_uniform(*((1e-4, 1e4) if o.hard == "extreme" else (0.2, 3.0)), *channel)
    x["a"] = d.uniform(*((0.95, 0.999) if o.unit else (0.01, 1.0) if o.hard else (0.5, 1.0)), *cell)
    x["p"] = d.log_uniform(*((1e-7, 1e2) if o.hard else (1e-3, 0.3)), *cell)
    if o.hard == "floors":
        x["a"] = sample.exact(sample.np.exp(d.uniform(-40.0, 0.0, *cell)))
        x["p"] = d.choice((0.0, -1.0, -1e-3), *cell)
    if o.state0:
        x["lam0"], x["eta0"] = d.uniform(0.5, 3.0, n.states, *cell), d.normal(n.states, *cell)
    x = {name: x[name] for name in INPUTS if name in x}
    return x, ({"from_prior": True} if o.from_prior else {})


def without_cotangent(o):
    """The state of the case whose precision grows without bound stays outside the loss."""
    return ("lam", "eta") if o.hard == "floors" else ()


_PACK = dict(M=6, packed=(37, 1, 70))
CASES = {
    "kla": dict(note="fresh state lam = 1, eta = 0"),
    "kla_state0": dict(state0=True, note="given lam0, eta0"),
    "kla_prior": dict(from_prior=True, note="read one prediction ahead"),
    "kla_long": dict(B=1, T=300, M=6, unit=True, note="long, layer-like dynamics, unit keys"),
    "kla_wide": dict(B=1, T=66, M=32, S=16, state0=True, note="kernel-sized"),
    "kla_packed": dict(_PACK, note="packed, fresh start at borders"),
    "kla_packed_state0": dict(_PACK, state0=True, note="packed, given states"),
    "kla_extreme": dict(B=1, T=140, M=6, hard="extreme",
                        note="precision 1e-4 to 1e4, decay 0.01 to 1, noise 1e-7 to 100, zero and "
                             "near-zero keys"),
    "kla_floors": dict(B=1, T=40, M=4, S=5, hard="floors",
                       note="decay down to exp(-40), noise zero or negative: the 1e-12 floors bind"),
}
