"""qwen_gdn: the gated delta block of Qwen3-Next and Qwen3.5, under their names."""
import delta_gva
from core import autodiff as ad
from core.blocks import conv, rms, unit_root

EQUATION = """\
q, k, v = SiLU(conv4 over the channels [q | k | v]);  z gate, b, a per value head;  beta = sigmoid(b);
g = -exp(A_log) softplus(a + dt_bias);  q, k = x / sqrt(|x|^2 + 1e-6);  o = delta_gva, scale K^-1/2;
y = out_proj(rms(o; eps) norm silu(z)), rms per head.

Rows of in_proj_qkvz, per key head: q K, k K, v r V, z r V; of in_proj_ba, per key head: b r, a r; r = HV / H.
in_proj_qkv: all q heads, all k heads, all v heads."""

INPUTS = {"x": "BTD", "in_proj_qkvz.weight": "ZD", "in_proj_ba.weight": "YD",
          "in_proj_qkv.weight": "CD", "in_proj_z.weight": "OD", "in_proj_b.weight": "HD",
          "in_proj_a.weight": "HD", "conv1d.weight": "C1W", "dt_bias": "H", "A_log": "H",
          "norm.weight": "V", "out_proj.weight": "DO", "tail0": "BMC", "state0": "BHKV"}
OUTPUTS = {"y": "BTD", "tail": "BMC", "state": "BHKV"}


def parts(x, z, J, H, K, V):
    """[q | k | v] of all heads, the gate, b and a of all value heads."""
    rows = z.shape[:2]
    if "in_proj_qkv.weight" in x:
        return (ad.linear(z, x["in_proj_qkv.weight"]), ad.linear(z, x["in_proj_z.weight"]),
                ad.linear(z, x["in_proj_b.weight"]), ad.linear(z, x["in_proj_a.weight"]))
    r = H // J
    wide = ad.linear(z, x["in_proj_qkvz.weight"]).reshape(*rows, J, -1)
    ends = [0, K, 2 * K, 2 * K + r * V, 2 * K + 2 * r * V]
    q, k, v, gate = (wide[..., a:b].reshape(*rows, -1) for a, b in zip(ends, ends[1:]))
    ba = ad.linear(z, x["in_proj_ba.weight"]).reshape(*rows, J, 2 * r)
    return (ad.concat([q, k, v], -1), gate, ba[..., :r].reshape(*rows, -1),
            ba[..., r:].reshape(*rows, -1))


def evaluate(x, p):
    z, J, H = x["x"], p["key_heads"], p["value_heads"]
    V, taps = x["norm.weight"].shape[0], x["conv1d.weight"]
    K, rows = (taps.shape[0] - H * V) // (2 * J), z.shape[:2]
    qkv, gate, b, a = parts(x, z, J, H, K, V)
    qkv, tail = conv(qkv, taps.reshape(taps.shape[0], taps.shape[2]), x.get("tail0"))
    qkv = ad.silu(qkv)
    q, k = (unit_root(qkv[..., i * J * K:(i + 1) * J * K].reshape(*rows, J, K), 1e-6)
            for i in (0, 1))
    g = -ad.exp(x["A_log"]) * ad.softplus(a + x["dt_bias"])
    given = {"state0": x["state0"]} if "state0" in x else {}
    out = delta_gva.evaluate({"q": q, "k": k, "v": qkv[..., 2 * J * K:].reshape(*rows, H, V),
                              "beta": ad.sigmoid(b), "g": g, **given}, {"scale": K ** -0.5})
    o = rms(out["o"], p["eps"]) * x["norm.weight"] * ad.silu(gate.reshape(*rows, H, V))
    return {"y": ad.linear(o.reshape(*rows, -1), x["out_proj.weight"]), "tail": tail,
            "state": out["state"]}


SIZES = dict(B=2, T=15, J=2, H=4, K=4, V=6, D=12)
OPTIONS = {"next": True, "state0": False}


def draw(d, n, o):
    C = 2 * n.J * n.K + n.H * n.V
    x = {"x": d.normal(n.B, n.T, n.D)}
    if o.next:
        x["in_proj_qkvz.weight"] = d.weight(C + n.H * n.V, n.D)
        x["in_proj_ba.weight"] = d.weight(2 * n.H, n.D)
    else:
        for name, rows in (("qkv", C), ("z", n.H * n.V), ("b", n.H), ("a", n.H)):
            x[f"in_proj_{name}.weight"] = d.weight(rows, n.D)
    x.update({"conv1d.weight": d.normal(C, 1, 4, by=0.5), "dt_bias": d.normal(n.H),
              "A_log": d.uniform(-1.0, 1.5, n.H), "norm.weight": d.normal(n.V, around=1.0, by=0.2),
              "out_proj.weight": d.weight(n.D, n.H * n.V)})
    if o.state0:
        x.update({"tail0": d.normal(n.states, 3, C),
                  "state0": d.normal(n.states, n.H, n.K, n.V)})
    return x, {"key_heads": n.J, "value_heads": n.H, "eps": 1e-6}


CASES = {
    "qwen_gdn_next_state0": dict(state0=True, note="rows per key head, given tail and state"),
    "qwen_gdn_packed": dict(next=False, B=1, packed=(37, 1, 12), state0=True,
                            note="rows by kind, packed, given tails and states"),
}
