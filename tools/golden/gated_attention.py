"""gated_attention: the attention of Qwen3-Next and Qwen3.5, a gate inside its queries' projection."""
from core import autodiff as ad
from core.blocks import heads_for, rms, rope, softmax_maps

EQUATION = """\
q_proj rows, per head: query d, gate d;  q, k = rms(.; eps) (1 + w) per head;  RoPE (half) on the first rope_dim channels;
softmax with scale d^-1/2;  y = o_proj(o sigmoid(gate))."""

INPUTS = {"x": "BTD", "q_proj.weight": "QD", "k_proj.weight": "KD", "v_proj.weight": "KD",
          "q_norm.weight": "W", "k_norm.weight": "W", "o_proj.weight": "DO"}
OUTPUTS = {"y": "BTD"}


def evaluate(x, p):
    z, H, J = x["x"], p["heads"], p["kv_heads"]
    rows, d = z.shape[:2], x["q_norm.weight"].shape[0]
    wide = ad.linear(z, x["q_proj.weight"]).reshape(*rows, H, 2 * d)
    q, gate = wide[..., :d], wide[..., d:]
    k = ad.linear(z, x["k_proj.weight"]).reshape(*rows, J, d)
    v = ad.linear(z, x["v_proj.weight"]).reshape(*rows, J, d)
    q = rms(q, p["eps"]) * (x["q_norm.weight"] + 1.0)
    k = rms(k, p["eps"]) * (x["k_norm.weight"] + 1.0)
    q, k = (rope(t, "half", p["rope_base"], width=int(p["rope_dim"])) for t in (q, k))
    maps = softmax_maps(q, heads_for(k, H), d ** -0.5)
    o = ad.einsum("bhti,bihv->bthv", maps, heads_for(v, H)) * ad.sigmoid(gate)
    return {"y": ad.linear(o.reshape(*rows, H * d), x["o_proj.weight"])}


SIZES = dict(B=2, T=15, H=4, J=2, K=8, D=12)
OPTIONS = {}


def draw(d, n, o):
    x = {"x": d.normal(n.B, n.T, n.D), "q_proj.weight": d.weight(2 * n.H * n.K, n.D),
         "k_proj.weight": d.weight(n.J * n.K, n.D), "v_proj.weight": d.weight(n.J * n.K, n.D),
         "q_norm.weight": d.normal(n.K, by=0.2), "k_norm.weight": d.normal(n.K, by=0.2),
         "o_proj.weight": d.weight(n.D, n.H * n.K)}
    return x, {"heads": n.H, "kv_heads": n.J, "eps": 1e-6, "rope_base": 1e7, "rope_dim": 2}


CASES = {"gated_attention": dict(note="norms that store their factor less one, part of a head turned")}
