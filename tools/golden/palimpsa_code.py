"""palimpsa_code: palimpsa with the gates of the released code."""
import palimpsa
from core import autodiff as ad, sample

EQUATION = """\
Released code: a_t = exp(-dt_t A), dt (B,T,H), A = decay_rate (H); v already gated, b separate."""

INPUTS = {"q": "BTHK", "k": "BTHK", "v": "BTHV", "b": "BTHV", "dt": "BTH", "decay_rate": "H",
          "ip": "H", "mu0": "BHKV", "imp0": "BHKV"}
OUTPUTS = palimpsa.OUTPUTS


def evaluate(x, p):
    g = -x["dt"] * x["decay_rate"]
    return palimpsa.recurrence(x, p, x["v"], x["b"], ad.exp(g), -ad.expm1(g))


SIZES = dict(B=2, T=15, H=2, K=8, V=12)
OPTIONS = {"state0": False}


def draw(d, n, o):
    key, value = (n.B, n.T, n.H, n.K), (n.B, n.T, n.H, n.V)
    x = {"q": d.normal(*key), "k": d.unit(*key), "v": d.normal(*value, by=0.5),
         "b": d.log_uniform(0.02, 1.0, *value), "dt": d.log_uniform(1e-3, 0.1, n.B, n.T, n.H),
         "decay_rate": d.uniform(1.0, 16.0, n.H), "ip": d.uniform(1.0, 1.0, n.H)}
    if o.state0:
        x["mu0"] = d.normal(n.states, n.H, n.K, n.V)
        x["imp0"] = d.uniform(2.0, 4.0, n.states, n.H, n.K, n.V)
    return x, {"scale": sample.scale_of(n.K)}


CASES = {"palimpsa_code": dict(
    note="released code: decay exp(-dt A), v gated by bs only, Ip = 1")}
