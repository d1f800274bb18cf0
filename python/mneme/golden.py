"""Operators held to golden vectors, through the same calls that users make.

    for line in mneme.golden.check("tests/golden/mesa.safetensors", dtype="f64"):
        print(line)"""

import collections

import numpy as np

from . import ops, safetensors
from ._operators import operators, safe_name

__all__ = ["check", "Line"]

Line = collections.namedtuple("Line", "name passed rms worst tolerance")


def _list(metadata, key):
    return [name for name in metadata.get(key, "").split(",") if name]


def _field(name):
    return name.replace(".", "_")


def _params(op, metadata):
    out = {}
    for param in op.params:
        text = metadata.get(param.name)
        if text is None:
            continue
        if param.kind == "choice":
            out[param.name] = text == "True" if param.names == ["False", "True"] else text
        else:
            out[param.name] = float(text) if param.kind == "real" else int(float(text))
    return out


def _as_field(op, name, array):
    """An array whose steps of a token are an axis of their own, as files have them, with these and
    heads as one axis, as operators do: the memory is the same."""
    axes = op.by_name[name].axes[0]
    if len(axes) > 2 and axes[2] == "Q" and array.ndim == len(axes) + 1:
        return array.reshape(array.shape[:2] + (-1,) + array.shape[4:])
    return array


def _compare(name, got, want, tolerance, symmetric):
    want = want.reshape(got.shape)
    if symmetric:
        got = (got + np.swapaxes(got, -1, -2)) / 2
    got = np.asarray(got, np.float64)
    difference = got - want
    scale = np.sqrt(np.mean(want * want)) or 1.0
    top = np.abs(want).max() or 1.0
    rms = float(np.sqrt(np.mean(difference * difference)) / scale)
    worst = float(np.abs(difference).max() / top)
    return Line(name, rms <= tolerance and worst <= 16 * tolerance, rms, worst, tolerance)


def check(path, dtype="f64", context=None, run=None):
    """Lines for all results and gradients of a golden file. `run(op, tensors, params, cu_seqlens,
    cotangents)` gives (results by name, gradients by name); by default mneme.ops does."""
    data, metadata = safetensors.load(path)
    op = next((o for o in operators().values() if o.vector == metadata.get("op")), None)
    if op is None:
        raise ValueError(f"{path}: no operator is called {metadata.get('op')!r} in golden files")
    kind = np.float64 if dtype == "f64" else np.float32
    tensors = {_field(n): _as_field(op, _field(n), data[n].astype(kind))
               for n in _list(metadata, "inputs")}
    cotangents = {n[1:]: data[n].astype(kind) for n in _list(metadata, "cotangents")}
    results, grads = (run or _run)(op, tensors, _params(op, metadata), data.get("cu_seqlens"),
                                   cotangents, context)
    symmetric, lines = _list(metadata, "symmetric"), []
    units = {"C", "n"} if op.name == "mlstm" else set()
    for name in _list(metadata, "outputs"):
        if name in results and results[name] is not None:
            got, want = results[name], data[name]
            if name in units:    # in units of exp(m), which is free to choose
                shift = (results["m"] - data["m"]).astype(np.float64)
                got = got * np.exp(shift.reshape(shift.shape + (1,) * (got.ndim - shift.ndim)))
            elif op.name == "mlstm" and name == "m":
                continue
            lines.append(_compare(name, got, want, _tolerance(metadata, dtype, name), False))
    for name in _list(metadata, "grads"):
        got = grads.get(_field(name[1:]))
        if got is not None:
            lines.append(_compare(name, got, data[name], _tolerance(metadata, dtype, name),
                                  name[1:] in symmetric))
    return lines


def _tolerance(metadata, dtype, name):
    return float(metadata[f"tol{'64' if dtype == 'f64' else '32'}.{name}"])


def _run(op, tensors, params, cu_seqlens, cotangents, context):
    call = getattr(ops, op.name)
    named = {safe_name(k): v for k, v in tensors.items()}
    results = call(**named, **params, cu_seqlens=cu_seqlens, context=context,
                   outputs=[f.name for f in op.outputs])
    grads = None
    if cotangents and op.differentiable:
        grads = call.backward(**named, **params, cu_seqlens=cu_seqlens, context=context,
                              cotangents=cotangents)
    by_name = {f.name: value for f, value in zip(op.outputs, results)}
    return by_name, {} if grads is None else {f.name: g for f, g in zip(op.inputs, grads)}
