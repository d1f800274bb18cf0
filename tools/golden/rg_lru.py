"""rg_lru: the gated linear recurrent unit of Hawk and Griffin."""
from core import autodiff as ad
from core.blocks import tokens

EQUATION = """\
log a = -8 sigmoid(ga) softplus(a_param);  h_t = a h_{t-1} + sqrt(1 - a^2) sigmoid(gx) x;  y = h.

x, gx, ga (B,T,E), a_param (E), state h (B,E).  Without h0 the first token starts a document: h_1 = sigmoid(gx) x
(a = 0 and the root replaced by 1).
Resolution: 1 - a^2 as -expm1(2 log a); the official clip of the root's derivative at 1000 (1 - a^2 < 2.5e-7) is left out."""

INPUTS = {"x": "BTE", "gx": "BTE", "ga": "BTE", "a_param": "E", "h0": "BE"}
OUTPUTS = {"y": "BTE", "h": "BE"}


def evaluate(x, p):
    log_a = -8 * ad.sigmoid(x["ga"]) * ad.softplus(x["a_param"])
    entered = ad.sigmoid(x["gx"]) * x["x"]
    h, out = x.get("h0"), []
    for lt, et in zip(tokens(log_a), tokens(entered)):
        h = et if h is None else ad.exp(lt) * h + ad.sqrt(-ad.expm1(2 * lt)) * et
        out.append(h)
    return {"y": ad.stack(out, 1), "h": h}


SIZES = dict(B=2, T=15, E=11)
OPTIONS = {"state0": False, "extreme": False}


def draw(d, n, o):
    row = (n.B, n.T, n.E)
    x = {"x": d.normal(*row), "gx": d.normal(*row, by=12.0 if o.extreme else 1.0),
         "ga": d.uniform(-6.0, 12.0, *row) if o.extreme else d.normal(*row),
         "a_param": d.uniform(*((-9.0, 8.0) if o.extreme else (-9.0, -4.3)), n.E)}
    if o.state0:
        x["h0"] = d.normal(n.states, n.E)
    return x, {}


CASES = {
    "rg_lru": dict(note="document start: first token enters unscaled"),
    "rg_lru_state0": dict(state0=True, note="given state: continues, no reset"),
    "rg_lru_packed": dict(E=7, packed=(37, 1, 70),
                          note="packed, a document start at every border"),
    "rg_lru_extreme": dict(B=1, T=70, E=9, extreme=True, state0=True,
                           note="decays from 1 - 2.4e-6 to exp(-64), saturated gates; form 1 - a^2 "
                                "by expm1"),
}
