"""longhorn_column: Longhorn solved exactly, a delta rule with one step size per value column."""
import longhorn_diag
from core import autodiff as ad

EQUATION = """\
Paper 000 Table 1, per-column delta: S[:,j] <- S[:,j] + eta_j k (v_j - k^T S[:,j]),
eta_j = beta_j / (1 + beta_j |k|^2).

Resolution: the table's eta = lambda / (r_j^2 + lambda |k|^2) is this with beta_j = lambda / r_j^2,
so both readings share Longhorn's one input beta (B,T,H,V)."""

INPUTS, OUTPUTS = longhorn_diag.INPUTS, longhorn_diag.OUTPUTS


def _update(state, k, v, eta):
    error = v - ad.einsum("bhkv,bhk->bhv", state, k)
    return state + ad.einsum("bhk,bhv->bhkv", k, eta * error)


def evaluate(x, p):
    return longhorn_diag.recurrence(x, p, _update)


SIZES, OPTIONS, draw = longhorn_diag.SIZES, longhorn_diag.OPTIONS, longhorn_diag.draw
CASES = longhorn_diag.cases("longhorn_column")
