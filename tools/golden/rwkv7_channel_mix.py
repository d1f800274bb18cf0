"""rwkv7_channel_mix: the second half of a block of RWKV-7."""
from core import autodiff as ad

EQUATION = """\
k = x_t + x_k (x_{t-1} - x_t);  y = value relu(key k)^2.  x_{-1} is last0 or 0; last is the last input."""

INPUTS = {"x": "BTD", "x_k": "D", "key.weight": "ED", "value.weight": "DE", "last0": "BD"}
OUTPUTS = {"y": "BTD", "last": "BD"}


def shift(x, last):
    """x_{t-1} - x_t, and the last input."""
    first = x[:, 0] * 0.0 if last is None else last
    before = ad.stack([first] + [x[:, t] for t in range(x.shape[1] - 1)], 1)
    return before - x, x[:, x.shape[1] - 1]


def evaluate(x, p):
    d, last = shift(x["x"], x.get("last0"))
    k = ad.relu(ad.linear(x["x"] + d * x["x_k"], x["key.weight"]))
    return {"y": ad.linear(k * k, x["value.weight"]), "last": last}


SIZES = dict(B=2, T=15, D=10, E=14)
OPTIONS = {"state0": False}


def draw(d, n, o):
    x = {"x": d.normal(n.B, n.T, n.D), "x_k": d.uniform(0.0, 1.0, n.D),
         "key.weight": d.weight(n.E, n.D), "value.weight": d.weight(n.D, n.E)}
    if o.state0:
        x["last0"] = d.normal(n.states, n.D)
    return x, {}


CASES = {"rwkv7_channel_mix": dict(note="zero start"),
         "rwkv7_channel_mix_packed": dict(B=1, packed=(37, 1, 12), state0=True,
                                          note="packed, one last input per sequence")}
