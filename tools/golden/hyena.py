"""hyena: the operator of order 2, a convolution as long as the sequence between two gates."""
from core import autodiff as ad

EQUATION = """\
u = x1 v;  y_t = x0_t (D u_t + sum_{i=0..t} h_i u_{t-i}).

v, x0, x1 (B,T,C); h (L,C), L >= T, lag by lag, only its first T rows used; D (C)."""

INPUTS = {"v": "BTC", "x0": "BTC", "x1": "BTC", "h": "LC", "D": "C"}
OUTPUTS = {"y": "BTC"}


def evaluate(x, p):
    u, h = x["x1"] * x["v"], x["h"]
    y = []
    for t in range(u.shape[1]):
        y.append(sum(u[:, t - i] * h[i] for i in range(t + 1)))
    return {"y": x["x0"] * (u * x["D"] + ad.stack(y, 1))}


SIZES = dict(B=2, T=15, C=6, L=18)
OPTIONS = {}


def draw(d, n, o):
    x = {name: d.normal(n.B, n.T, n.C) for name in ("v", "x0", "x1")}
    x["h"] = d.normal(max(n.L, n.T), n.C, by=0.3)
    x["D"] = d.normal(n.C)
    return x, {}


CASES = {"hyena": dict(note="filter longer than the sequence"),
         "hyena_packed": dict(C=3, packed=(37, 1, 32), note="packed: lags restart")}
