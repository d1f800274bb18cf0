"""linear_norm: linear attention divided by the sum of its weights."""
from core import autodiff as ad, sample
from core.blocks import tokens, zeros

EQUATION = """\
Normalised linear attention: S += k v^T, z += k;  o = scale S^T q / (scale z.q + eps).  State S (B,H,K,V), z (B,H,K)."""

INPUTS = {"q": "BTHK", "k": "BTHK", "v": "BTHV", "state0": "BHKV", "z0": "BHK"}
OUTPUTS = {"o": "BTHV", "state": "BHKV", "z": "BHK"}


def evaluate(x, p):
    q, k, v, scale = x["q"], x["k"], x["v"], p.get("scale", 1.0)
    state, z, out = x.get("state0"), x.get("z0"), []
    if state is None:
        state = ad.Var(zeros(q, q.shape[0], q.shape[2], q.shape[3], v.shape[3]))
        z = ad.Var(zeros(q, q.shape[0], q.shape[2], q.shape[3]))
    for qt, kt, vt in zip(tokens(q), tokens(k), tokens(v)):
        state = state + ad.einsum("bhk,bhv->bhkv", kt, vt)
        z = z + kt
        below = ad.einsum("bhk,bhk->bh", z, qt) * scale + p["eps"]
        out.append(ad.einsum("bhkv,bhk->bhv", state, qt) * scale / below[..., None])
    return {"o": ad.stack(out, 1), "state": state, "z": z}


SIZES = dict(B=2, T=15, H=2, K=8, V=12)
OPTIONS = {"state0": False}


def draw(d, n, o):
    x = {"q": d.uniform(0.05, 1.0, n.B, n.T, n.H, n.K), "k": d.uniform(0.05, 1.0, n.B, n.T, n.H, n.K),
         "v": d.normal(n.B, n.T, n.H, n.V)}
    if o.state0:
        x["state0"] = d.normal(n.states, n.H, n.K, n.V)
        x["z0"] = d.uniform(0.05, 1.0, n.states, n.H, n.K)
    return x, {"scale": sample.scale_of(n.K), "eps": 1e-6}


CASES = {
    "linear_norm": dict(note="features above zero"),
    "linear_norm_state0": dict(state0=True, note="initial sums"),
    "linear_norm_packed": dict(V=5, packed=(37, 1, 70), note="packed, zero start"),
}
