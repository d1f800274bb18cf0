"""softmax_attention: causal softmax attention, grouped heads, rotary positions."""
from core import autodiff as ad, sample
from core.blocks import heads_for, rope, softmax_maps

EQUATION = """\
o_t = sum_{i<=t} softmax_i(scale q_t.k_i) v_i, RoPE on q and k first if rope_kind is given.

k, v may have fewer heads (B,T,Hkv,*): query head h reads kv head floor(h Hkv / H)."""

INPUTS = {"q": "BTHd", "k": "BTJd", "v": "BTJv"}
OUTPUTS = {"o": "BTHv"}


def evaluate(x, p):
    q, k, v = x["q"], x["k"], x["v"]
    if "rope_kind" in p:
        q, k = (rope(z, p["rope_kind"], p["rope_base"]) for z in (q, k))
    k, v = heads_for(k, q.shape[2]), heads_for(v, q.shape[2])
    maps = softmax_maps(q, k, p.get("scale", 1.0))
    return {"o": ad.einsum("bhti,bihv->bthv", maps, v)}


SIZES = dict(B=2, T=15, H=2, J=2, d=8, v=6)
OPTIONS = {"rope": False, "by": 1.0}


def draw(d, n, o):
    key = (n.B, n.T, n.J, n.d)
    x = {"q": d.normal(n.B, n.T, n.H, n.d, by=o.by), "k": d.normal(*key, by=o.by),
         "v": d.normal(n.B, n.T, n.J, n.v)}
    turned = {"rope_kind": "half", "rope_base": 10000.0} if o.rope else {}
    return x, {"scale": sample.scale_of(n.d), **turned}


CASES = {
    "attention": dict(note="causal softmax"),
    "attention_rope": dict(rope=True, note="rotary positions, half convention"),
    "attention_gqa_rope": dict(B=1, H=4, rope=True, note="four query heads on two key heads"),
    "attention_long": dict(B=1, T=300, H=1, J=1, note="long"),
    "attention_rope_packed": dict(packed=(37, 1, 70), H=1, J=1, rope=True,
                                  note="packed, positions restart"),
    "attention_extreme": dict(B=1, T=70, H=1, J=1, by=20.0, note="scores of several hundred"),
}
