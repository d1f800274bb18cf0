"""adamw: steps of AdamW, computed as they stand, without gradients of their own."""
from core import autodiff as ad, sample

EQUATION = """\
Per step s: p -= lr wd p;  m = b1 m + (1-b1) g;  v = b2 v + (1-b2) g^2;
p -= lr (m / (1-b1^s)) / (sqrt(v / (1-b2^s)) + eps).  Lists of p, m, v after each step."""

INPUTS = {"p": "MN", "m": "MN", "v": "MN", "grads": "SMN"}
OUTPUTS = {"p_out": "SMN", "m_out": "SMN", "v_out": "SMN"}
NO_GRADIENT = tuple(INPUTS)
NO_COTANGENT = tuple(OUTPUTS)


def evaluate(x, p):
    weight, m, v = x["p"], x["m"], x["v"]
    b1, b2, lr = p["beta1"], p["beta2"], p["lr"]
    seen = {name: [] for name in OUTPUTS}
    for i in range(x["grads"].shape[0]):
        step, g = p["step0"] + i + 1, x["grads"][i]
        weight = weight - lr * p["weight_decay"] * weight
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
        size = ad.sqrt(v * (1 / (1 - b2 ** step))) + p["eps"]
        weight = weight - lr * (m * (1 / (1 - b1 ** step))) / size
        for name, value in zip(OUTPUTS, (weight, m, v)):
            seen[name].append(value)
    return {name: ad.stack(values, 0) for name, values in seen.items()}


SIZES = dict(M=5, N=7, S=3)
OPTIONS = {}


def draw(d, n, o):
    shape = (n.M, n.N)
    x = {"p": d.normal(*shape), "m": d.normal(*shape, by=0.1), "v": d.uniform(0.0, 0.1, *shape),
         "grads": d.normal(n.S, *shape)}
    return x, {"step0": 10, "lr": 0.01, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8,
               "weight_decay": 0.1}


CASES = {"adamw": dict(note="three steps after step 10; no gradients, p_out etc. are stacked over "
                            "the steps")}
