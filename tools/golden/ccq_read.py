"""ccq_read: the state of another row, read by cleaned queries."""
import additive
import ccq
import delta_net
from core import sample

EQUATION = """\
The backbone reads qt instead of q; its write is untouched.  beta given: (gated) delta; else additive.

Resolution: the covariance is undecayed even when the backbone decays (paper, main text)."""

INPUTS = {**ccq.INPUTS, "v": "BTHV", "g": "H|BTH|BTHK", "beta": "BTH", "state0": "BHKV"}
OUTPUTS = {"o": "BTHV", "state": "BHKV", "kk": "BHKK", "ks": "BHK"}
SYMMETRIC = ccq.SYMMETRIC


def evaluate(x, p):
    qt, kk, ks = ccq.clean(x, p)
    backbone = delta_net if "beta" in x else additive
    names = ("k", "v", "g", "beta", "state0")
    y = backbone.evaluate({"q": qt, **{name: x[name] for name in names if name in x}}, p)
    return {"o": y["o"], "state": y["state"], "kk": kk, "ks": ks}


SIZES = dict(B=2, T=15, H=2, K=8, V=12)
OPTIONS = {"state0": False, "row": "gla", "extreme": False, "weak": False}


def draw(d, n, o):
    x, p = ccq.draw(d, n, o)
    x["v"] = d.normal(n.B, n.T, n.H, n.V)
    gla = o.row == "gla"
    x["g"] = sample.decayed(d, o, *((n.B, n.T, n.H, n.K) if gla else (n.B, n.T, n.H)))
    if not gla:
        x["beta"] = d.uniform(0.1, 1.0, n.B, n.T, n.H)
    if o.state0:
        x["state0"] = d.normal(n.states, n.H, n.K, n.V)
    return x, {**p, "scale": sample.scale_of(n.K)}


_ROWS = {"gla": "GLA", "gated_deltanet": "Gated DeltaNet"}
CASES = {
    **{f"ccq_{row}": dict(row=row, note=f"CCQ read of a {name} state")
       for row, name in _ROWS.items()},
    **{f"ccq_{row}_state0": dict(row=row, state0=True, note="given states, count 5")
       for row in _ROWS},
    **{f"ccq_{row}_packed": dict(row=row, V=5, packed=(37, 1, 70), note="packed") for row in _ROWS},
    "ccq_gated_deltanet_long": dict(row="gated_deltanet", B=1, T=300, H=1, V=6, weak=True,
                                    note="long"),
}
