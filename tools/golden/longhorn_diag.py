"""longhorn_diag: Longhorn with its diagonal approximation."""
from core import autodiff as ad, sample
from core.blocks import tokens, zeros

EQUATION = """\
Paper 001 Table 1, diagonal approximation: with n = 1 + beta_j |k|^2 per value column j,
S_ij <- (1 - beta_j k_i^2 / n_j) S_ij + (beta_j v_j / n_j) k_i."""

INPUTS = {"q": "BTHK", "k": "BTHK", "v": "BTHV", "beta": "BTHV", "state0": "BHKV"}
OUTPUTS = {"o": "BTHV", "state": "BHKV"}


def step_size(k, beta):
    """beta / (1 + beta |k|^2) per value column."""
    return beta / (1 + beta * ad.total(k * k, -1, True))


def recurrence(x, p, update):
    q, k, v = x["q"], x["k"], x["v"]
    eta = step_size(k, x["beta"])
    state = x.get("state0")
    if state is None:
        state = zeros(q, q.shape[0], q.shape[2], k.shape[3], v.shape[3])
    out = []
    for qt, kt, vt, et in zip(tokens(q), tokens(k), tokens(v), tokens(eta)):
        state = update(state, kt, vt, et)
        out.append(ad.einsum("bhkv,bhk->bhv", state, qt) * p.get("scale", 1.0))
    return {"o": ad.stack(out, 1), "state": state}


def _update(state, k, v, eta):
    kept = 1 - ad.einsum("bhk,bhv->bhkv", k * k, eta)
    return kept * state + ad.einsum("bhk,bhv->bhkv", k, eta * v)


def evaluate(x, p):
    return recurrence(x, p, _update)


SIZES = dict(B=2, T=15, H=2, K=8, V=12)
OPTIONS = {"state0": True, "extreme": False}


def draw(d, n, o):
    key, value = (n.B, n.T, n.H, n.K), (n.B, n.T, n.H, n.V)
    x = {"q": d.normal(*key), "k": (d.hard_keys if o.extreme else d.normal)(*key),
         "v": d.normal(*value)}
    x["beta"] = d.log_uniform(1e-8, 1e8, *value) if o.extreme else d.log_uniform(0.1, 3, *value)
    if o.state0:
        x["state0"] = d.normal(n.states, n.H, n.K, n.V)
    return x, {"scale": 1.0}


def cases(op):
    return {
        op: dict(note="initial state"),
        f"{op}_long": dict(B=1, T=300, H=1, V=6, note="long"),
        f"{op}_packed": dict(V=5, packed=(37, 1, 70), state0=False, note="packed, zero start"),
        f"{op}_extreme": dict(B=1, T=70, V=6, extreme=True,
                              note="beta from 1e-8 to 1e8, zero and near-zero keys"),
    }


CASES = cases("longhorn_diag")
