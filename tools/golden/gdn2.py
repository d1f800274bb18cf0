"""gdn2: Gated DeltaNet-2, an erase gate on the keys and a write gate on the values."""
import delta
from core import sample

EQUATION = """\
S_t = (I - k (erase*k)^T) diag(exp g) S_{t-1} + k (write*v)^T.  erase (B,T,H,K), write (B,T,H,V)."""

INPUTS = {"q": "BTHK", "k": "BTHK", "v": "BTHV", "g": "BTHK", "erase": "BTHK", "write": "BTHV",
          "state0": "BHKV"}
OUTPUTS = {"o": "BTHV", "state": "BHKV"}


def evaluate(x, p):
    o, state = delta.recurrence(x["q"], x["erase"] * x["k"], x["k"], x["write"] * x["v"],
                                x.get("g"), x.get("state0"), p.get("scale", 1.0))
    return {"o": o, "state": state}


SIZES = dict(B=2, T=15, H=2, K=8, V=12)
OPTIONS = {"state0": False, "extreme": False, "weak": False}


def draw(d, n, o):
    key, value = (n.B, n.T, n.H, n.K), (n.B, n.T, n.H, n.V)
    x = {"q": d.normal(*key), "k": sample.keys(d, o, *key), "v": d.normal(*value),
         "g": sample.decayed(d, o, *key), "erase": d.uniform(0.1, 1.8, *key),
         "write": d.uniform(0.0, 1.0, *value)}
    if o.state0:
        x["state0"] = d.normal(n.states, n.H, n.K, n.V)
    return x, {"scale": sample.scale_of(n.K)}


CASES = {
    "delta_gdn2": dict(note="Gated DeltaNet-2: erase gate on keys, write gate on values"),
    "delta_gdn2_state0": dict(state0=True, note="initial state"),
}
