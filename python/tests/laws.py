"""Random inputs of every operator, after the laws of the library's tables."""

import numpy as np

from mneme._operators import operators

SIZES = dict(B=2, T=5, H=2, K=4, V=6, G=2, L=7, Q=4, P=8, R=3, W=3, D=6, S=3, J=1)
# where letters depend on one another
SPECIAL = {"hyper": dict(Q=2, W=3), "hyper_layer": dict(Q=2, J=6, L=6, K=4, V=6),
           "riccati": dict(R=8), "bayes": dict(R=8)}


def _covariance(rng, shape):
    a = rng.standard_normal(shape)
    return a @ np.swapaxes(a, -1, -2) / shape[-1] + np.eye(shape[-1])


def draw(field, shape, rng, classes):
    x = rng.standard_normal(shape)
    law = field.law
    if law == "SMALL":
        return 0.2 * x
    if law == "UNIT":
        return x / np.linalg.norm(x, axis=-1, keepdims=True)
    if law == "GATE":
        return rng.uniform(0.1, 0.9, shape)
    if law == "POSITIVE":
        return rng.uniform(0.5, 1.5, shape)
    if law == "NOISE":
        return rng.uniform(0.05, 0.2, shape)
    if law == "MEMORY":
        return rng.uniform(8, 24, shape)
    if law == "DECAY":
        return -rng.uniform(0.05, 1.0, shape)
    if law == "COVARIANCE":
        return _covariance(rng, shape)
    if law == "CLASS":
        return rng.integers(0, classes, shape).astype(np.float64)
    return x


def sample(op, seed=0, optional=True, packed=False, alternative=-1, sizes=None):
    """(tensors in order, cu_seqlens): float64 arrays, None for what is left out."""
    rng = np.random.default_rng(seed)
    size = {**SIZES, **SPECIAL.get(op.name, {}), **(sizes or {})}
    if packed:
        size.update(B=1, T=7)
        if op.name != "hyper_layer":    # L is another letter there
            size.update(L=7)
    N = 3 if packed else size["B"]
    tensors = []
    for field in op.inputs:
        if not field.required and not optional:
            tensors.append(None)
            continue
        shape = []
        for letter in field.axes[alternative]:
            if letter == "*":
                shape += [size["B"], size["T"]]
            else:
                shape.append({"N": N, "M": size["W"] - 1, "1": 1}.get(letter) or size[letter])
        tensors.append(draw(field, tuple(shape), rng, size["V"]))
    return tensors, [0, 3, 4, 7] if packed else None


def packs(op):
    return any("T" in axes for f in op.inputs for axes in f.axes) and not op.name.startswith("kla_")


NAMES = [name for name, op in operators().items() if op.differentiable]
