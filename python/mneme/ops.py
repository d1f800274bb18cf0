"""Operators on numpy arrays, forward and backward.

Each operator of the library is a function here: tensors first, its numbers by keyword. float32
runs on the best kernels of this machine, float64 on the reference kernels. Shapes are in the
docstrings by letters: B batch, T time, H heads, K key width, V value width, N sequences.

    o, state = mneme.ops.delta_net(q, k, v, beta, g, scale=K**-0.5)
    grads = mneme.ops.delta_net.backward(q, k, v, beta, g, scale=K**-0.5, cotangents={"o": do})

cu_seqlens packs sequences: B = 1, sequence n is the tokens [cu_seqlens[n], cu_seqlens[n+1])."""

import ctypes

import numpy as np

from . import _library
from ._operators import operators, safe_name

_NAMES = {np.dtype(np.float32): "f32", np.dtype(np.float64): "f64"}


_byte, _addressof = ctypes.c_byte.from_buffer, ctypes.addressof


def _address(a):
    """Where the numbers of an array are; a.ctypes.data takes three times as long."""
    try:
        return _addressof(_byte(a))
    except (TypeError, ValueError):    # read-only, strided or empty
        return a.ctypes.data


def _arrays(op, tensors):
    """Inputs as arrays of one dtype, contiguous or with strides the library takes."""
    arrays = [None if x is None else x if type(x) is np.ndarray else np.asarray(x)
              for x in tensors]
    wide = any(a is not None and a.dtype == np.float64 and not f.counts_classes
               for f, a in zip(op.inputs, arrays))
    dtype = np.dtype(np.float64 if wide else np.float32)
    strides = [None] * len(arrays)
    for i, (field, a) in enumerate(zip(op.inputs, arrays)):
        if a is None:
            continue
        if a.dtype != dtype:
            if a.dtype.kind not in "fiub":
                raise TypeError(f"{op.name}: {field.name} holds {a.dtype}, not numbers")
            arrays[i] = a = a.astype(dtype)
        if not a.flags.c_contiguous:
            per_element = tuple(s // a.itemsize for s in a.strides)
            strides[i] = op.strides_of(field, a.shape, per_element) if field.may_stride else None
            if strides[i] is None:
                arrays[i] = np.ascontiguousarray(a)
    return arrays, tuple(strides), dtype


def _host_integers(op, name, values):
    array = np.ascontiguousarray(values, dtype=np.int64)
    if array.ndim != 1 or array.size < 1:
        raise ValueError(f"{op.name}: {name} has shape {array.shape}, expected one axis")
    return array


def _prepare(op, tensors, params, cu_seqlens, counts0):
    arrays, strides, dtype = _arrays(op, tensors)
    if cu_seqlens is not None:
        cu_seqlens = _host_integers(op, "cu_seqlens", cu_seqlens)
    shapes = tuple(None if a is None else a.shape for a in arrays)
    plan = op.plan(_NAMES[dtype], shapes, strides, params,
                   None if cu_seqlens is None else cu_seqlens.size - 1)
    words = op.array.from_buffer_copy(plan.words)
    for field, a in zip(op.inputs, arrays):
        if a is not None:
            words[field.word] = _address(a)
    keep = [arrays]
    if cu_seqlens is not None:
        words[op.call["cu_seqlens"] // 8] = _address(cu_seqlens)
    if counts0 is not None:
        counts0 = _host_integers(op, "counts0", counts0)
        if counts0.size != plan.sizes["N"]:
            raise ValueError(f"{op.name}: counts0 holds {counts0.size} numbers for "
                             f"{plan.sizes['N']} sequences")
        words[op.counts0 // 8] = _address(counts0)
        keep.append(counts0)
    return words, plan, dtype, (keep, cu_seqlens)


def _forward(op, tensors, params, cu_seqlens, counts0, outputs, context):
    words, plan, dtype, keep = _prepare(op, tensors, params, cu_seqlens, counts0)
    if outputs is None:
        wanted = op.main
    else:
        for name in outputs:
            if name not in op.by_name or op.by_name[name].is_input:
                raise ValueError(f"{op.name} has no result {name!r}; it has "
                                 + ", ".join(f.name for f in op.outputs))
        wanted = [i for i, f in enumerate(op.outputs) if f.name in outputs]
    results = [None] * len(op.outputs)
    for i in wanted:
        results[i] = np.empty(plan.out_shapes[i], dtype)
        words[op.outputs[i].word] = _address(results[i])
    status = op.forward(context.handle if context else _library.cpu_handle(), words)
    if status:
        _library.check(status)
    del keep
    if outputs is None and len(op.main) == 1:
        return results[op.main[0]]
    return op.result(*results)


def _backward(op, tensors, params, cu_seqlens, counts0, cotangents, wanted, context):
    words, plan, dtype, keep = _prepare(op, tensors, params, cu_seqlens, counts0)
    given = []
    for name, value in cotangents.items():
        field = op.by_name.get(name)
        if field is None or field.is_input or field.partner is None:
            raise ValueError(f"{op.name} has no cotangent {name!r}; it has "
                             + ", ".join(f.name for f in op.outputs if f.partner is not None))
        if value is None:
            continue
        value = np.require(value, dtype, "C")
        shape = plan.out_shapes[op.outputs.index(field)]
        if value.shape != shape:
            raise ValueError(f"{op.name}: the cotangent of {name} has shape {value.shape}, "
                             f"expected {shape}")
        words[field.partner] = _address(value)
        given.append(value)
    grads = [None] * len(op.inputs)
    for i, (field, a) in enumerate(zip(op.inputs, keep[0][0])):
        if a is None or field.partner is None or (wanted is not None and field.name not in wanted):
            continue
        grads[i] = np.empty(a.shape, dtype)
        words[field.partner] = _address(grads[i])
    _library.check(op.backward((context or _library.context()).handle, words))
    return op.gradient(*grads)


# ---- one function per operator ------------------------------------------------------------------

def _documentation(op):
    lines = [op.about.rstrip(".") + ".", ""]
    for field in op.inputs:
        note = "" if field.required else ", optional"
        lines.append(f"    {safe_name(field.name)}: {field.shape_text()}{note}")
    for param in op.params:
        what = "one of " + ", ".join(param.names) if param.names else param.kind
        lines.append(f"    {param.name}: {what}, {param.default!r} by default")
    lines.append("    cu_seqlens: offsets of packed sequences")
    if op.counts0 is not None:
        lines.append("    counts0: tokens before each sequence, instead of n0")
    lines.append("    outputs: names of the results to compute; by default "
                 + ", ".join(op.outputs[i].name for i in op.main))
    lines += ["", "Results: " + "; ".join(f"{f.name} {f.shape_text()}" for f in op.outputs) + "."]
    return "\n".join(lines)


def _define(op):
    names = [safe_name(f.name) for f in op.inputs]
    # what may be absent goes by keyword only where something required follows it
    last = max((i for i, f in enumerate(op.inputs) if f.required), default=-1)
    head = [n if f.required else n + "=None" for i, (n, f) in enumerate(zip(names, op.inputs))
            if f.required or i > last]
    early = [n + "=None" for i, (n, f) in enumerate(zip(names, op.inputs))
             if not f.required and i < last]
    numbers = [f"{p.name}={p.default!r}" for p in op.params]
    counts = ["counts0=None"] if op.counts0 is not None else []
    common = early + numbers + ["cu_seqlens=None"] + counts
    values = "(" + "".join(n + ", " for n in names) + ")"
    chosen = "(" + "".join(p.name + ", " for p in op.params) + ")"
    passed = f"_op, {values}, {chosen}, cu_seqlens, {'counts0' if counts else 'None'}"
    head = ", ".join(head)
    source = (f"def {op.name}({head}, *, {', '.join(common)}, outputs=None, context=None):\n"
              f"    return _forward({passed}, outputs, context)\n"
              f"def backward({head}, *, {', '.join(common)}, cotangents, wanted=None, "
              f"context=None):\n"
              f"    return _backward({passed}, cotangents, wanted, context)\n")
    scope = {"_op": op, "_forward": _forward, "_backward": _backward}
    exec(source, scope)
    forward, backward = scope[op.name], scope["backward"]
    forward.__doc__ = _documentation(op)
    backward.__doc__ = (f"Gradients of {op.name} for `cotangents`, a dict of results' names; "
                        "`wanted` names the inputs (default: all).")
    backward.__name__ = backward.__qualname__ = op.name + "_backward"
    for function in (forward, backward):
        function.__module__ = __name__
    forward.operator = op
    if op.differentiable:
        forward.backward = backward
    return forward


for _name, _operator in operators().items():
    globals()[_name] = _define(_operator)
__all__ = list(operators())
