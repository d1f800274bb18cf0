"""hgrn2: a sum of outer products whose forget gate is also what keys are not."""
import additive
from core import autodiff as ad, sample

EQUATION = """\
z = lb + (1 - lb) sigmoid(f) (lb = 0 if absent);  additive with log decay g = log z, key 1 - z, value v.

q, f (B,T,H,K), lb (H,K).  1 - z is formed as (1 - lb) sigmoid(-f)."""

INPUTS = {"q": "BTHK", "f": "BTHK", "v": "BTHV", "lb": "HK", "state0": "BHKV"}
OUTPUTS = {"o": "BTHV", "state": "BHKV"}


def evaluate(x, p):
    f, lb = x["f"], x.get("lb")
    key, g = ad.sigmoid(-f), ad.logsigmoid(f)
    if lb is not None:
        key = (1.0 - lb)[None, None] * key
        g = ad.log(lb[None, None] + (1.0 - lb)[None, None] * ad.sigmoid(f))
    o, state = additive.recurrence(x["q"], key, x["v"], g, x.get("state0"), p.get("scale", 1.0))
    return {"o": o, "state": state}


SIZES = dict(B=2, T=15, H=2, K=8, V=12)
OPTIONS = {"bound": True, "state0": False, "by": 1.0, "least": False}


def draw(d, n, o):
    x = {"q": d.normal(n.B, n.T, n.H, n.K), "f": d.normal(n.B, n.T, n.H, n.K, by=o.by),
         "v": d.normal(n.B, n.T, n.H, n.V)}
    if o.bound:
        x["lb"] = (d.choice((1e-6, 0.5, 0.999), n.H, n.K) if o.least
                   else d.uniform(0.02, 0.95, n.H, n.K))
    if o.state0:
        x["state0"] = d.normal(n.states, n.H, n.K, n.V)
    return x, {"scale": sample.scale_of(n.K)}


CASES = {
    "hgrn2": dict(note="gates with a least value"),
    "hgrn2_first_state0": dict(bound=False, state0=True, note="no least value, initial state"),
    "hgrn2_packed": dict(V=5, packed=(37, 1, 70), note="packed, zero start"),
    "hgrn2_extreme": dict(B=1, T=70, K=7, V=5, by=12.0, state0=True,
                          note="gates from nearly their least value to nearly one"),
    "hgrn2_least": dict(B=1, T=70, K=7, V=5, by=12.0, state0=True, least=True,
                        note="least values from 1e-6 to 0.999, gates from there to nearly one"),
}
