"""mlstm: a matrix memory with exponential gates, kept in range by a stabiliser."""
from core import autodiff as ad, sample
from core.blocks import tokens, zeros

EQUATION = """\
m_t = max(lf_t + m_{t-1}, i_t), lf = logsigmoid(fpre);  f' = exp(lf + m_{t-1} - m_t), i' = exp(i - m_t);
C = f' C + i' k v^T;  n = f' n + i' k;  o = scale C^T q / max(|scale n.q|, exp(-m_t)).

ipre, fpre (B,T,H); C (B,H,K,V), n (B,H,K), m (B,H).  Fresh state: C = n = 0, m = -inf (m_1 = i_1).
o and C e^m, n e^m do not depend on how m is chosen; csum = C e^m and nsum = n e^m are returned for
comparison and carry the state's cotangents.
Resolution: K^-1/2 sits on q (code) instead of k (paper), same result; the code's +1e-6 in the
denominator is left out as in the paper; the bound is exp(-m), which is the paper's 1 in unscaled terms."""

INPUTS = {"q": "BTHK", "k": "BTHK", "v": "BTHV", "ipre": "BTH", "fpre": "BTH",
          "C0": "BHKV", "n0": "BHK", "m0": "BH"}
OUTPUTS = {"o": "BTHV", "C": "BHKV", "n": "BHK", "m": "BH", "csum": "BHKV", "nsum": "BHK"}
NO_COTANGENT = ("C", "n", "m")


def evaluate(x, p):
    """m is a constant of the gradient: no output of the loss depends on how it is chosen."""
    q, k, v, scale = x["q"], x["k"], x["v"], p.get("scale", 1.0)
    shape = (q.shape[0], q.shape[2], k.shape[3])
    C, n, m = x.get("C0"), x.get("n0"), x.get("m0")
    out = []
    for qt, kt, vt, it, lf in zip(*map(tokens, (q, k, v, x["ipre"], ad.logsigmoid(x["fpre"])))):
        if m is None:
            top, kept = ad.constant(it), zeros(q, *shape[:2])
            C, n = zeros(q, *shape, v.shape[3]), zeros(q, *shape)
        else:
            top = ad.np.maximum(ad.constant(lf) + ad.constant(m), ad.constant(it))
            kept = ad.exp(lf + m - top)
        added = kt * ad.exp(it - top)[..., None]
        C = kept[..., None, None] * C + ad.einsum("bhk,bhv->bhkv", added, vt)
        n = kept[..., None] * n + added
        m = top
        against = ad.total(n * qt, -1) * scale
        below = ad.larger(ad.magnitude(against), ad.Var(ad.np.exp(-top)))
        out.append(ad.einsum("bhkv,bhk->bhv", C, qt) * scale / below[..., None])
    grown = ad.np.exp(m)
    return {"o": ad.stack(out, 1), "C": C, "n": n, "m": ad.Var(m),
            "csum": C * grown[..., None, None], "nsum": n * grown[..., None]}


SIZES = dict(B=2, T=15, H=2, K=8, V=12)
OPTIONS = {"state0": False, "extreme": False, "weak": False}


def draw(d, n, o):
    key, head = (n.B, n.T, n.H, n.K), (n.B, n.T, n.H)
    x = {"q": d.normal(*key), "k": d.normal(*key), "v": d.normal(*head, n.V),
         "ipre": d.normal(*head, by=40.0 if o.extreme else 1.0),
         "fpre": d.normal(*head, by=40.0 if o.extreme else 1.0, around=0 if o.extreme else 3)}
    if o.state0:
        x.update(C0=d.normal(n.states, *key[2:], n.V), n0=d.normal(n.states, *key[2:]),
                 m0=d.normal(n.states, n.H))
    return x, {"scale": sample.scale_of(n.K)}


def without_outputs(o):
    """exp(m) overflows where gates are extreme."""
    return ("csum", "nsum") if o.extreme else ()


CASES = {
    "mlstm": dict(note="fresh state"),
    "mlstm_state0": dict(state0=True, note="given C, n, m"),
    "mlstm_long": dict(B=1, T=300, H=1, V=6, note="long"),
    "mlstm_packed": dict(V=5, packed=(37, 1, 70), note="packed, fresh start at borders"),
    "mlstm_extreme": dict(B=1, T=70, V=6, extreme=True,
                          note="gate pre-activations up to about +-100; compare C and n only after "
                               "matching m"),
}
