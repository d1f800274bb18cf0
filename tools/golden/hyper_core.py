"""hyper_core: HyperMLP and HyperGLU heads, mixes over lags on both sides of the activation."""
from core import autodiff as ad
from core.blocks import unit_max

EQUATION = """\
HyperMLP (kind relu) / HyperGLU (kind glu) head, one query row at a time in lag order.

z_j = q_t . k_{t-j};  x = z R1_t;  relu: base = relu(x1), x1 = x;  glu: branches 0..h-1 are the gate
x1, h..2h-1 the scale x2, base = softplus(x2) relu(x1);  w = base R2_t;  o = sum_j w_j v_{t-j}.
R = I + diag(d) + U diag(c_t) Vt in lag order, absent when its factors are None.
norm: out_scale o /= max(|x1|, eps); l2 normalises x1 before relu (equal in exact arithmetic); none.
gv multiplies o per channel.  q (B,T,Q,dq) is already gated; Q = 2h for glu, h for relu; no score scale.
Resolution: R2 enters as in the code (same form as R1), not transposed."""

INPUTS = {"q": "BTQd", "k": "BTQd", "v": "BTHv", "gv": "BTHv",
          "c1": "BTQr", "U1": "QLr", "Vt1": "QrL", "d1": "QL",
          "c2": "BTHs", "U2": "HLs", "Vt2": "HsL", "d2": "HL"}
OUTPUTS = {"o": "BTHv"}


def mix(z, x, control, which, t):
    """z (B,n,t+1) in lag order by I + diag(d) + U diag(c_t) Vt; z itself without factors."""
    if f"U{which}" not in x:
        return z
    lags = x[f"d{which}"].shape[1] - 1 - ad.np.arange(t + 1)    # the last entry meets lag 0
    U, Vt = ad.take(x[f"U{which}"], lags, 1), ad.take(x[f"Vt{which}"], lags, 2)
    d = ad.take(x[f"d{which}"], lags, 1)
    inner = ad.einsum("bnl,nlr->bnr", z, U) * control[:, t]
    return z + z * d + ad.einsum("bnr,nrl->bnl", inner, Vt)


def _row(x, p, t):
    heads, eps = x["v"].shape[2], p.get("eps", 1e-12)
    lags = ad.np.arange(t, -1, -1)
    z = ad.einsum("bqd,blqd->bql", x["q"][:, t], ad.take(x["k"], lags, 1))
    z = mix(z, x, x.get("c1"), 1, t)
    x1 = z[:, :heads] if p["kind"] == "glu" else z
    length = ad.floor_at(ad.sqrt(ad.total(x1 * x1, -1, True)), eps)
    base = ad.relu(x1 / length if p["norm"] == "l2" else x1)
    if p["kind"] == "glu":
        base = ad.softplus(z[:, heads:]) * base
    w = mix(base, x, x.get("c2"), 2, t)
    o = ad.einsum("bhl,blhv->bhv", w, ad.take(x["v"], lags, 1))
    return o / length if p["norm"] == "out_scale" else o


def evaluate(x, p):
    o = ad.stack([_row(x, p, t) for t in range(x["q"].shape[1])], 1)
    return {"o": o * x["gv"] if "gv" in x else o}


SIZES = dict(B=2, T=15, H=2, d=4, v=6, r=3, s=2)
OPTIONS = {"kind": "glu", "norm": "out_scale", "mix": True}


def draw(d, n, o):
    branches, lags = n.H * (2 if o.kind == "glu" else 1), n.T + 7
    x = {"q": d.normal(n.B, n.T, branches, n.d), "k": d.normal(n.B, n.T, branches, n.d),
         "v": d.normal(n.B, n.T, n.H, n.v), "gv": d.uniform(0.0, 1.0, n.B, n.T, n.H, n.v)}
    sides = ((1, branches, n.r), (2, n.H, n.s)) if o.mix else ()
    for which, rows, rank in sides:
        x[f"c{which}"] = d.uniform(0.0, 1.0, n.B, n.T, rows, rank)
        x[f"U{which}"] = d.normal(rows, lags, rank, by=0.3)
        x[f"Vt{which}"] = d.normal(rows, rank, lags, by=0.3)
        x[f"d{which}"] = d.normal(rows, lags, by=0.3)
    return x, {"kind": o.kind, "norm": o.norm, "eps": 1e-12}


_USED = "L = T + 7, so only the last T entries of the mixers are used"
_BOTH = {"hypermlp_core": "relu", "hyperglu_core": "glu"}
CASES = {
    **{name: dict(kind=kind, note=_USED) for name, kind in _BOTH.items()},
    **{f"{name}_l2": dict(kind=kind, norm="l2", note="attn_norm l2")
       for name, kind in _BOTH.items()},
    **{f"{name}_nomix": dict(kind=kind, mix=False, note="no sequence mixing (R1 = R2 = I)")
       for name, kind in _BOTH.items()},
    "hyperglu_core_none": dict(norm="none", note="attn_norm none"),
    "hyperglu_core_long": dict(B=1, T=130, note="long"),
}
