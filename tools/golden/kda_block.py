"""kda_block: Kimi's delta attention as a layer, under flash-linear-attention's names."""
import delta_gva
from core import autodiff as ad
from core.blocks import conv, rms, unit_root

EQUATION = """\
q, k, v = SiLU(conv4(proj x)), one conv each;  beta = sigmoid(b_proj x);  f = f_proj.1 f_proj.0 x + dt_bias;
g = -exp(A_log) softplus(f), or lower_bound sigmoid(exp(A_log) f) where that is below 0, per value head and key channel;
q, k = x / sqrt(|x|^2 + 1e-6);  o = delta_gva, scale K^-1/2;
y = o_proj(rms(o; eps) o_norm sigmoid(g_proj.1 g_proj.0 x))."""

_TAILS = ("q_tail", "k_tail", "v_tail")
INPUTS = {"x": "BTD", "q_proj.weight": "QD", "k_proj.weight": "QD", "v_proj.weight": "OD",
          "q_conv1d.weight": "Q1W", "k_conv1d.weight": "Q1W", "v_conv1d.weight": "O1W",
          "f_proj.0.weight": "VD", "f_proj.1.weight": "FV", "b_proj.weight": "HD", "A_log": "H",
          "dt_bias": "F", "g_proj.0.weight": "VD", "g_proj.1.weight": "OV", "g_proj.1.bias": "O",
          "o_norm.weight": "V", "o_proj.weight": "DO", "q_tail0": "BMQ", "k_tail0": "BMQ",
          "v_tail0": "BMO", "state0": "BHKV"}
OUTPUTS = {"y": "BTD", "state": "BHKV", "q_tail": "BMQ", "k_tail": "BMQ", "v_tail": "BMO"}


def evaluate(x, p):
    z, J, H = x["x"], p["key_heads"], p["value_heads"]
    rows, tails, made = z.shape[:2], {}, {}
    for name in "qkv":
        taps = x[f"{name}_conv1d.weight"]
        y, tails[f"{name}_tail"] = conv(ad.linear(z, x[f"{name}_proj.weight"]),
                                        taps.reshape(taps.shape[0], taps.shape[2]),
                                        x.get(f"{name}_tail0"))
        made[name] = ad.silu(y).reshape(*rows, H if name == "v" else J, -1)
    K = made["q"].shape[3]
    f = ad.linear(ad.linear(z, x["f_proj.0.weight"]), x["f_proj.1.weight"], x["dt_bias"])
    f, rate = f.reshape(*rows, H, K), ad.exp(x["A_log"]).reshape(H, 1)
    bound = p.get("lower_bound", 0.0)
    g = ad.sigmoid(rate * f) * bound if bound < 0 else -rate * ad.softplus(f)
    given = {"state0": x["state0"]} if "state0" in x else {}
    out = delta_gva.evaluate({"q": unit_root(made["q"], 1e-6), "k": unit_root(made["k"], 1e-6),
                              "v": made["v"], "g": g,
                              "beta": ad.sigmoid(ad.linear(z, x["b_proj.weight"])), **given},
                             {"scale": K ** -0.5})
    gate = ad.linear(ad.linear(z, x["g_proj.0.weight"]), x["g_proj.1.weight"], x["g_proj.1.bias"])
    o = rms(out["o"], p["eps"]) * x["o_norm.weight"] * ad.sigmoid(gate.reshape(*rows, H, -1))
    return {"y": ad.linear(o.reshape(*rows, -1), x["o_proj.weight"]), "state": out["state"],
            **tails}


SIZES = dict(B=2, T=15, J=2, H=4, K=4, V=6, D=12)
OPTIONS = {"bound": 0.0, "state0": False}


def draw(d, n, o):
    Q, O, F = n.J * n.K, n.H * n.V, n.H * n.K
    x = {"x": d.normal(n.B, n.T, n.D)}
    x.update({f"{name}_proj.weight": d.weight(w, n.D) for name, w in (("q", Q), ("k", Q), ("v", O))})
    x.update({f"{name}_conv1d.weight": d.normal(w, 1, 4, by=0.5)
              for name, w in (("q", Q), ("k", Q), ("v", O))})
    x.update({"f_proj.0.weight": d.weight(n.V, n.D), "f_proj.1.weight": d.weight(F, n.V),
              "b_proj.weight": d.weight(n.H, n.D), "A_log": d.uniform(-1.0, 1.0, n.H),
              "dt_bias": d.normal(F), "g_proj.0.weight": d.weight(n.V, n.D),
              "g_proj.1.weight": d.weight(O, n.V), "g_proj.1.bias": d.normal(O, by=0.3),
              "o_norm.weight": d.normal(n.V, around=1.0, by=0.2), "o_proj.weight": d.weight(n.D, O)})
    if o.state0:
        x.update({"q_tail0": d.normal(n.states, 3, Q), "k_tail0": d.normal(n.states, 3, Q),
                  "v_tail0": d.normal(n.states, 3, O), "state0": d.normal(n.states, n.H, n.K, n.V)})
    return x, {"key_heads": n.J, "value_heads": n.H, "eps": 1e-5,
               **({"lower_bound": o.bound} if o.bound else {})}


CASES = {
    "kda_block": dict(H=2, note="as many value heads as key heads"),
    "kda_block_safe_packed": dict(bound=-5.0, B=1, packed=(37, 1, 12), state0=True,
                                  note="bounded gate, grouped value heads, packed, given states"),
}
