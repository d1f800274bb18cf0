"""delta_net: DeltaNet, Gated DeltaNet and KDA."""
import delta
from core import sample

EQUATION = """\
delta with e = k, w = beta k.  g None: DeltaNet; (B,T,H): Gated DeltaNet; (B,T,H,K): KDA.

Resolution: paper 001 Table 1 writes Gated DeltaNet as S (alpha (I - beta k k^T)) + beta v k^T,
the same map; its eqs. 28-29 carry a flipped sign and are ignored."""

INPUTS = {"q": "BTHK", "k": "BTHK", "v": "BTHV", "beta": "BTH", "g": "BTH|BTHK", "state0": "BHKV"}
OUTPUTS = {"o": "BTHV", "state": "BHKV"}


def recurrence(q, k, v, beta, g, state, scale):
    return delta.recurrence(q, k, beta[..., None] * k, v, g, state, scale)


def evaluate(x, p):
    o, state = recurrence(x["q"], x["k"], x["v"], x["beta"], x.get("g"), x.get("state0"),
                          p.get("scale", 1.0))
    return {"o": o, "state": state}


SIZES = dict(B=2, T=15, H=2, K=8, V=12)
OPTIONS = {"decay": "scalar", "state0": False, "extreme": False, "weak": False}


def draw_beta(d, o, *shape):
    return d.choice((0.0, 0.5, 1.0, 2.0), *shape) if o.extreme else d.uniform(0.05, 1.0, *shape)


def draw(d, n, o):
    x = {"q": d.normal(n.B, n.T, n.H, n.K), "k": sample.keys(d, o, n.B, n.T, n.H, n.K),
         "v": d.normal(n.B, n.T, n.H, n.V), "beta": draw_beta(d, o, n.B, n.T, n.H)}
    if o.decay != "none":
        x["g"] = sample.decayed(d, o, n.B, n.T, n.H, *((n.K,) if o.decay == "vector" else ()))
    if o.state0:
        x["state0"] = d.normal(n.states, n.H, n.K, n.V)
    return x, {"scale": 1.0 if o.extreme else sample.scale_of(n.K)}


_LONG = dict(B=1, T=300, H=1, V=6, state0=True, weak=True, note="long, initial state")
_PACK = dict(V=5, packed=(37, 1, 70), note="packed, zero start")
_WIDE = dict(B=1, T=66, H=1, K=64, V=32, state0=True, note="kernel-sized head")
_HARD = dict(B=1, T=70, V=6, state0=True, extreme=True,
             note="beta from 0 to 2, zero and near-zero keys, decays to exp(-40)")
_KINDS = {"deltanet": "none", "gated_deltanet": "scalar", "kda": "vector"}
CASES = {
    **{f"delta_{k}": dict(decay=g, note=f"{k}: e = k, w = beta k") for k, g in _KINDS.items()},
    **{f"delta_{k}_state0": dict(decay=g, state0=True, note="initial state")
       for k, g in _KINDS.items()},
    **{f"delta_{k}_long": dict(_LONG, decay=g) for k, g in _KINDS.items()},
    "delta_gated_deltanet_wide": dict(_WIDE, decay="scalar"),
    "delta_kda_wide": dict(_WIDE, decay="vector"),
    "delta_gated_deltanet_packed": dict(_PACK, decay="scalar"),
    "delta_kda_packed": dict(_PACK, decay="vector"),
    "delta_deltanet_extreme": dict(_HARD, decay="none",
                                   note="beta from 0 to 2, zero and near-zero keys"),
    "delta_gated_deltanet_extreme": dict(_HARD, decay="scalar"),
    "delta_kda_extreme": dict(_HARD, decay="vector"),
}
