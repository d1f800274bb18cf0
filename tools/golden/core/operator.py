"""An operator: a module tools/golden/OP.py, found by its name, and how one call of it is evaluated.

A module gives
    EQUATION            the text that goes into the metadata
    INPUTS, OUTPUTS     {name: axes}: "BT..." one row per token, "B..." a state, anything else shared
                        by all sequences; "H|BTH" are alternatives told apart by their rank
    evaluate(x, p)      outputs from inputs `x` (Vars) and parameters `p`, for sequences of one length
    draw(d, n, o)       inputs and parameters of a new file: random draws, sizes, options
    SIZES, OPTIONS      default sizes (their order is that of --shape) and options with their defaults
    CASES               {name: {"note": ..., sizes, options, "packed": lengths}}
and, where they apply, INTEGERS, SYMMETRIC (names), NO_COTANGENT (outputs outside the loss),
NO_GRADIENT (inputs without one).
"""
import importlib
import pathlib

import numpy as np

from core import autodiff as ad

FOLDER = pathlib.Path(__file__).resolve().parent.parent
_SCRIPTS = {"check", "make", "selftest", "rounded"}


def all_names():
    return sorted(p.stem for p in FOLDER.glob("*.py") if p.stem not in _SCRIPTS)


def find(name):
    """The module of an operator; KeyError with a sentence if there is none."""
    if name not in all_names():
        raise KeyError(f"no generator is called {name}; there are {', '.join(all_names())}")
    return importlib.import_module(name)


def axes_of(module, name, rank):
    """Which alternative of the axes a tensor of this rank has."""
    table = {**module.INPUTS, **module.OUTPUTS}
    for axes in table[name].split("|"):
        if len(axes) == rank or "*" in axes:
            return axes
    raise ValueError(f"{name} has {rank} axes, expected {table[name]}")


def _part(axes, x, n, start, end):
    """What sequence n of a packed call reads of an input."""
    if axes.startswith("BT"):
        return x[:, start:end]
    return x[n:n + 1] if axes.startswith("B") else x


def _evaluate_packed(module, x, p, cu):
    runs = []
    for n, (start, end) in enumerate(zip(cu[:-1], cu[1:])):
        axes = {name: axes_of(module, name, v.ndim) for name, v in x.items()}
        part = {name: _part(axes[name], v, n, start, end) for name, v in x.items()}
        runs.append(module.evaluate(part, p))
    joined = {}
    for name in runs[0]:
        tokens = axes_of(module, name, runs[0][name].ndim).startswith("BT")
        joined[name] = ad.concat([run[name] for run in runs], 1 if tokens else 0)
    return joined


def forward(module, inputs, p, cu=None):
    """Vars of the inputs and of the outputs; the floating type is that of the inputs."""
    x = {name: ad.Var(array) for name, array in inputs.items()}
    y = _evaluate_packed(module, x, p, cu) if cu else module.evaluate(x, p)
    return x, y


def run(module, inputs, p, cotangents, cu=None, grads=(), outputs=None, symmetric=()):
    """Arrays of the outputs and of the gradients d<input>; cotangents are named d<output>."""
    x, y = forward(module, inputs, p, cu)
    results = {name: y[name].value for name in (outputs or y)}
    if grads:
        ad.backward([(y[name[1:]], dy) for name, dy in cotangents.items()])
    for name in grads:
        var = x[name[1:]]
        grad = np.zeros_like(var.value) if var.grad is None else var.grad
        if name[1:] in symmetric:
            grad = 0.5 * (grad + np.swapaxes(grad, -1, -2))
        results[name] = grad
    return results
