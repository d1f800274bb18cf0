"""selective_scan: the recurrence of Mamba, a diagonal state per channel."""
from core import autodiff as ad
from core.blocks import tokens, zeros

EQUATION = """\
d = softplus(dt + bias);  h_t = exp(d_t A) h_{t-1} + d_t u_t B_t^T;  y = h C_t + D u;  y *= silu(z).

u, dt, z (B,T,E); A (E,N) negative; Bm, Cm (B,T,N); D, dt_bias (E); state (B,E,N)."""

INPUTS = {"u": "BTE", "dt": "BTE", "A": "EN", "Bm": "BTN", "Cm": "BTN", "D": "E", "z": "BTE",
          "dt_bias": "E", "h0": "BEN"}
OUTPUTS = {"y": "BTE", "h": "BEN"}


def evaluate(x, p):
    u, dt = x["u"], x["dt"]
    if "dt_bias" in x:
        dt = dt + x["dt_bias"]
    if p.get("softplus"):
        dt = ad.softplus(dt)
    h = x.get("h0")
    if h is None:
        h = zeros(u, u.shape[0], *x["A"].shape)
    out = []
    for ut, st, bt, ct in zip(*map(tokens, (u, dt, x["Bm"], x["Cm"]))):
        kept = ad.exp(st[..., None] * x["A"])
        h = kept * h + ad.einsum("be,bn->ben", st * ut, bt)
        out.append(ad.einsum("ben,bn->be", h, ct))
    y = ad.stack(out, 1)
    if "D" in x:
        y = y + x["D"] * u
    return {"y": y * ad.silu(x["z"]) if "z" in x else y, "h": h}


SIZES = dict(B=2, T=15, E=10, N=6)
OPTIONS = {"full": True, "state0": False}


def draw(d, n, o):
    row, low = (n.B, n.T, n.E), (n.B, n.T, n.N)
    x = {"u": d.normal(*row), "dt": d.normal(*row) if o.full else d.uniform(0.01, 0.5, *row),
         "A": -d.log_uniform(0.2, 4.0, n.E, n.N), "Bm": d.normal(*low), "Cm": d.normal(*low)}
    if o.full:
        x.update(D=d.normal(n.E), z=d.normal(*row), dt_bias=d.uniform(-4.0, -1.0, n.E))
    if o.state0:
        x["h0"] = d.normal(n.states, n.E, n.N)
    return x, {"softplus": o.full}


CASES = {
    "selective_scan": dict(note="softplus, bias, skip D and gate z"),
    "selective_scan_state0": dict(full=False, state0=True, note="bare recurrence, given state"),
    "selective_scan_packed": dict(packed=(37, 1, 70), note="packed"),
    "selective_scan_long": dict(B=1, T=300, E=6, state0=True, note="long, given state"),
}
