"""diff_layer: differential attention as a layer, with one lambda a layer or one a token and head."""
import math

from core import autodiff as ad
from core.blocks import heads_for, rms, rope, softmax_maps

EQUATION = """\
q 2H heads, k n heads of width d; RoPE (pairs) on q, k; maps A_j, j < 2H, of softmax attention with scale d^-1/2, map j
reading key head floor(j n / 2H);  o_h = A_2h v - lam A_2h+1 v.
A number of the layer: n = 2J, v J heads of width 2d, lam = exp(lambda_q1.lambda_k1) - exp(lambda_q2.lambda_k2) + l0,
l0 = 0.8 - 0.6 exp(-0.3 depth), y = out_proj(rms(o; eps) subln (1 - l0)).
One of each token and head: n = J, v J heads of width d, lam = sigmoid(lambda_proj x), y = out_proj o."""

INPUTS = {"x": "BTD", "q_proj.weight": "ED", "k_proj.weight": "FD", "v_proj.weight": "GD",
          "out_proj.weight": "DO", "subln.weight": "V", "lambda_proj.weight": "HD",
          "lambda_q1": "K", "lambda_k1": "K", "lambda_q2": "K", "lambda_k2": "K"}
OUTPUTS = {"y": "BTD"}


def evaluate(x, p):
    d, heads, kv = p["head_dim"], p["heads"], p["kv_heads"]
    z = x["x"]
    rows = (*z.shape[:2], -1)
    token = "lambda_proj.weight" in x
    width = d if token else 2 * d
    q = ad.linear(z, x["q_proj.weight"]).reshape(*rows, d)
    k = ad.linear(z, x["k_proj.weight"]).reshape(*rows, d)
    v = ad.linear(z, x["v_proj.weight"]).reshape(*rows, width)
    if p["rope_base"]:
        q, k = (rope(t, "pairs", p["rope_base"]) for t in (q, k))
    maps = softmax_maps(q, heads_for(k, 2 * heads), d ** -0.5)
    o = ad.einsum("bhti,bihv->bthv", maps, heads_for(v, 2 * heads))
    first, second = (ad.take(o, list(range(i, 2 * heads, 2)), 2) for i in (0, 1))
    if token:
        lam = ad.sigmoid(ad.linear(z, x["lambda_proj.weight"]))[..., None]
        o = first - lam * second
    else:
        start = 0.8 - 0.6 * math.exp(-0.3 * p["depth"])
        lam = (ad.exp(ad.total(x["lambda_q1"] * x["lambda_k1"], -1))
               - ad.exp(ad.total(x["lambda_q2"] * x["lambda_k2"], -1)) + start)
        o = rms(first - lam * second, 1e-5) * x["subln.weight"] * (1 - start)
    return {"y": ad.linear(o.reshape(*z.shape[:2], heads * width), x["out_proj.weight"])}


SIZES = dict(B=2, T=15, H=2, J=2, K=4, D=16)
OPTIONS = {"token": False, "rope": True, "depth": 0}


def draw(d, n, o):
    keys, width = (n.J, n.K) if o.token else (2 * n.J, 2 * n.K)
    x = {"x": d.normal(n.B, n.T, n.D), "q_proj.weight": d.weight(2 * n.H * n.K, n.D),
         "k_proj.weight": d.weight(keys * n.K, n.D), "v_proj.weight": d.weight(n.J * width, n.D),
         "out_proj.weight": d.weight(n.D, n.H * width)}
    if o.token:
        x["lambda_proj.weight"] = d.weight(n.H, n.D)
    else:
        x["subln.weight"] = d.normal(width, around=1.0, by=0.3)
        for name in ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2"):
            x[name] = d.normal(n.K, by=0.4)
    return x, {"heads": n.H, "kv_heads": n.J, "head_dim": n.K, "depth": o.depth,
               "rope_base": 10000.0 if o.rope else 0.0}


CASES = {
    "diff_layer": dict(note="a number of the layer"),
    "diff_layer_gqa": dict(H=4, J=2, D=32, depth=3, rope=False,
                           note="grouped heads, both maps of a pair read the same key head"),
    "diff_layer_token": dict(H=4, J=2, token=True, note="one of each token and head"),
}
