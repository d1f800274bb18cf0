"""palimpsa_paper: palimpsa with the gates of the paper's text."""
import palimpsa
from core import sample

EQUATION = """\
Seed-text gates: a_t = 1 - gamma_t / N with N (H), value beta*v, importance gate beta (B,T,H,V)."""

INPUTS = {"q": "BTHK", "k": "BTHK", "v": "BTHV", "beta": "BTHV", "gamma": "BTH", "n_mem": "H",
          "ip": "H", "mu0": "BHKV", "imp0": "BHKV"}
OUTPUTS = palimpsa.OUTPUTS


def evaluate(x, p):
    lost = x["gamma"] / x["n_mem"]
    return palimpsa.recurrence(x, p, x["beta"] * x["v"], x["beta"], 1 - lost, lost)


SIZES = dict(B=2, T=15, H=2, K=8, V=12)
OPTIONS = {"state0": False}


def draw(d, n, o):
    key, value = (n.B, n.T, n.H, n.K), (n.B, n.T, n.H, n.V)
    x = {"q": d.normal(*key), "k": d.unit(*key), "v": d.normal(*value),
         "beta": d.uniform(0.01, 0.8, *value), "gamma": d.uniform(0.1, 0.95, n.B, n.T, n.H),
         "n_mem": d.uniform(20.0, 50.0, n.H), "ip": d.uniform(0.5, 1.5, n.H)}
    if o.state0:
        x["mu0"] = d.normal(n.states, n.H, n.K, n.V)
        x["imp0"] = d.uniform(2.0, 4.0, n.states, n.H, n.K, n.V)
    return x, {"scale": 1.0}


CASES = {"palimpsa_paper": dict(note="seed text: decay 1 - gamma/N, value beta*v")}
