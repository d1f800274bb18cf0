"""log_linear_mamba2: Mamba-2 whose memory is read by levels of a Fenwick tree, as a layer."""
import numpy as np

from core import autodiff as ad
from core.blocks import causal, conv, heads_for, rms

EQUATION = """\
z, (u, b, c), r, l = in_proj x;  (u, b, c) = SiLU(conv(u, b, c));  d = softplus(r + dt_bias);  G the sum
of -d e^A_log over tokens;  weights w_n = softplus(L l)_n for n = 0 .. S - 1.

o_t = sum over s <= t of w_{n(t,s)} e^(G_t - G_s) (c_t.b_s) d_s u_s + D u_t: n(t,t) = 0, and below the
diagonal n is one more than the place of the highest bit that t and s differ in.

y = out_proj(norm rms(o SiLU(z); eps)), rms over the channels of each of the groups of b and c."""

INPUTS = {"x": "BTD", "in_proj.weight": "ED", "conv1d.weight": "C1W", "conv1d.bias": "C", "A_log": "H",
          "L": "HS", "D": "H", "dt_bias": "H", "norm.weight": "I", "out_proj.weight": "DI"}
OUTPUTS = {"y": "BTD"}


def level(t, s):
    """Of the block in which token t finds token s."""
    return (t ^ s).bit_length()


def evaluate(x, p):
    z, H, groups = x["x"], p["heads"], p["groups"]
    B, T = z.shape[:2]
    inner, levels = x["norm.weight"].shape[0], x["L"].shape[1]
    taps, width = x["conv1d.weight"], x["conv1d.weight"].shape[0]
    wide = ad.linear(z, x["in_proj.weight"])
    at = np.cumsum([0, inner, width, H, H * levels])
    gate, ubc, r, l = (wide[..., a:b] for a, b in zip(at[:-1], at[1:]))
    ubc, _ = conv(ubc, taps.reshape(width, taps.shape[2]), None, x["conv1d.bias"])
    ubc, state = ad.silu(ubc), (width - inner) // 2
    u = ubc[..., :inner].reshape(B, T, H, inner // H)
    b, c = (heads_for(ubc[..., a:a + state].reshape(B, T, groups, state // groups), H)
            for a in (inner, inner + state))
    d = ad.softplus(r + x["dt_bias"])
    fall = ad.einsum("ts,bsh->bth", np.tril(np.ones((T, T), ad.value(z).dtype)),
                     d * ad.exp(x["A_log"]))
    fall = fall.reshape(B, T, 1, H) - fall.reshape(B, 1, T, H)
    seen = causal(T)[None, :, :, None]
    decay = ad.exp(-ad.keep(fall, seen, np.inf))
    weights = ad.softplus(l.reshape(B, T, H, levels) * x["L"])
    which = np.zeros((T, T, levels), ad.value(z).dtype)
    for t in range(T):
        for s in range(t + 1):
            which[t, s, level(t, s)] = 1
    scores = ad.einsum("bthk,bshk->btsh", c, b) * decay
    scores = scores * ad.einsum("bthn,tsn->btsh", weights, which)
    o = ad.einsum("btsh,bshv->bthv", scores, u * d.reshape(B, T, H, 1))
    o = (o + u * x["D"].reshape(H, 1)).reshape(B, T, inner) * ad.silu(gate)
    o = rms(o.reshape(B, T, groups, inner // groups), p["eps"]).reshape(B, T, inner)
    return {"y": ad.linear(o * x["norm.weight"], x["out_proj.weight"])}


SIZES = dict(B=2, T=23, H=2, K=4, V=3, G=1, D=6)
OPTIONS = {}
LEVELS = 15


def draw(d, n, o):
    inner = n.H * n.V
    width = inner + 2 * n.G * n.K
    return {"x": d.normal(n.B, n.T, n.D),
            "in_proj.weight": d.weight(inner + width + n.H * (1 + LEVELS), n.D),
            "conv1d.weight": d.normal(width, 1, 4, by=0.5), "conv1d.bias": d.normal(width, by=0.1),
            "A_log": d.normal(n.H, by=0.5), "L": d.normal(n.H, LEVELS, around=1.0, by=0.3),
            "D": d.normal(n.H, around=1.0, by=0.3), "dt_bias": d.normal(n.H, around=-2.0, by=0.5),
            "norm.weight": d.normal(inner, around=1.0, by=0.2),
            "out_proj.weight": d.weight(n.D, inner)}, {"heads": n.H, "groups": n.G, "eps": 1e-5}


CASES = {
    "log_linear_mamba2": dict(note="tokens of five levels"),
    "log_linear_mamba2_groups": dict(B=1, T=70, G=2, note="two groups, seven levels"),
    "log_linear_mamba2_packed": dict(packed=(17, 1, 33), note="packed sequences"),
}
