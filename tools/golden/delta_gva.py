"""delta_gva: delta_net whose value heads share query and key heads."""
import delta_net
from core import sample
from core.blocks import heads_for

EQUATION = """\
delta_net with grouped value heads: value head h of HV uses query and key head floor(h H / HV).

q, k (B,T,H,K); v (B,T,HV,V); beta (B,T,HV); g (B,T,HV) or (B,T,HV,K); state (B,HV,K,V)."""

INPUTS = {"q": "BTJK", "k": "BTJK", "v": "BTHV", "beta": "BTH", "g": "BTH|BTHK", "state0": "BHKV"}
OUTPUTS = delta_net.OUTPUTS


def evaluate(x, p):
    heads = x["v"].shape[2]
    return delta_net.evaluate({**x, "q": heads_for(x["q"], heads), "k": heads_for(x["k"], heads)},
                              p)


SIZES = dict(B=2, T=15, H=4, J=2, K=8, V=6)
OPTIONS = delta_net.OPTIONS


def draw(d, n, o):
    key = (n.B, n.T, n.J, n.K)
    x = {"q": d.normal(*key), "k": sample.keys(d, o, *key), "v": d.normal(n.B, n.T, n.H, n.V),
         "beta": delta_net.draw_beta(d, o, n.B, n.T, n.H)}
    x["g"] = sample.decayed(d, o, n.B, n.T, n.H, *((n.K,) if o.decay == "vector" else ()))
    if o.state0:
        x["state0"] = d.normal(n.states, n.H, n.K, n.V)
    return x, {"scale": sample.scale_of(n.K)}


CASES = {
    "delta_gva_gated_deltanet": dict(note="two key heads, decay per token and value head"),
    "delta_gva_kda_state0": dict(decay="vector", state0=True,
                                 note="two key heads, decay per key channel and value head, "
                                      "initial state"),
    "delta_gva_kda_packed_state0": dict(decay="vector", state0=True, H=2, J=1, V=5,
                                        packed=(37, 1, 70), note="packed, given states"),
    "delta_gva_gated_deltanet_extreme": dict(B=1, T=70, H=3, J=1, K=7, V=5, extreme=True,
                                             state0=True,
                                             note="one key head, decays to exp(-40), beta to 2"),
}
