"""Tolerances of a file, measured: what float32 costs a result, whatever program computes it.

For every result, relative RMS errors of three runs:

    a   the same recurrence in float32
    b   in float64, every input moved by 2^-24 of itself
    c   in float64, cumulative log decays in blocks of 64 steps moved by 2^-24 of themselves

    tol32 = max(floor, factor max(a, b), 3 c)    tol64 = max(1e-12, 64 max(a, b, c) 2^-29)
"""
import numpy as np

from core import operator

EPS32 = 2.0 ** -24
BLOCK = 64
DYNAMICS = {"g", "la", "theta", "l2", "a", "p", "gamma", "n_mem", "dt", "dt_bias", "decay_rate", "A",
            "fpre"}
LOG_DECAYS = {"g", "la"}


def _rule(name):
    """Factor and floor of a result."""
    if not name.startswith("d"):
        return 10.0, 2e-6
    return (40.0, 2e-5) if name[1:] in DYNAMICS else (20.0, 5e-6)


def _error(x, r):
    size = np.sqrt(np.mean(r * r))
    off = np.sqrt(np.mean((x - r) ** 2))
    return off / size if size else off


def _moved(x, random):
    return x * (1 + EPS32 * random.choice([-1.0, 1.0], x.shape))


def _moved_sums(g, random):
    """A log decay (B,T,...) whose running sums in blocks have moved."""
    moved = np.empty_like(g)
    for start in range(0, g.shape[1], BLOCK):
        block = g[:, start:start + BLOCK]
        sums = _moved(np.cumsum(block, 1), random)
        moved[:, start:start + BLOCK] = np.diff(sums, axis=1, prepend=0)
    return moved


def measure(call, seed):
    """{result: (tol32, tol64)} of the arguments of operator.run."""
    module, inputs, p, cotangents, *rest = call
    random = np.random.Generator(np.random.PCG64(seed))
    exact = operator.run(*call)
    kept = set(getattr(module, "INTEGERS", ()))
    narrow = {name: x if name in kept else x.astype(np.float32) for name, x in inputs.items()}
    with np.errstate(all="ignore"):
        runs = [operator.run(module, narrow, p, cotangents, *rest)]
    runs.append(operator.run(module, {name: x if name in kept else _moved(x, random)
                                      for name, x in inputs.items()}, p, cotangents, *rest))
    decays = {name for name in LOG_DECAYS & set(inputs) if inputs[name].ndim > 2}
    sums = {name: _moved_sums(x, random) if name in decays else x for name, x in inputs.items()}
    runs.append(operator.run(module, sums, p, cotangents, *rest) if decays else exact)
    found = {}
    for name, r in exact.items():
        a, b, c = (_error(run[name].astype(np.float64), r) for run in runs)
        if not np.isfinite(a):
            raise ValueError(f"{name} is not finite in float32: this case has no tolerance")
        factor, floor = _rule(name)
        found[name] = (max(floor, factor * max(a, b), 3 * c),
                       max(1e-12, 64 * max(a, b, c) * 2.0 ** -29))
    return found
