"""Operators on tensors.

Two sets of names. The operators of the library, as in mneme.ops (`additive`, `delta_net`, `bayes`,
...): tensors first, numbers by keyword, results as a named tuple, or one tensor where there is one
result. And the functions of flash-linear-attention (`chunk_gla`, `chunk_gated_delta_rule`, ...) and
ours in that style (`kla_scan`, `palimpsa`, `bayes_filter`, ...), layouts [B, T, H, ...], which give
(o, final_state).

float32 and float64 (exact to rounding: for gradcheck) run on the CPU, float32 and bfloat16 on GPUs;
halves on the CPU are computed in float32 and rounded. Gradients are exact for every input, initial
states included; two runs give the same bits, and a packed call (cu_seqlens) those of separate
ones."""

import functools
import inspect

import torch

from ._call import _compiled, _is_compiling, call_new, remember, torch_operators
from .._operators import safe_name
from .. import ops as _arrays

__all__ = list(torch_operators)


@functools.lru_cache(maxsize=None)
def _bits(op, outputs):
    bits = 0
    for name in outputs:
        if name not in op.by_name or op.by_name[name].is_input:
            raise ValueError(f"{op.name} has no result {name!r}; it has "
                             + ", ".join(f.name for f in op.outputs))
        bits |= 1 << op.outputs.index(op.by_name[name])
    return bits


def _check_tensor(op, field, x):
    if x is None and field.required:
        raise TypeError(f"{op.name}: {field.name} is missing, it has shape {field.shape_text()}")
    if x is not None and not isinstance(x, torch.Tensor):
        raise TypeError(f"{op.name}: {field.name} is {type(x).__name__}, not a tensor")


def _numbers(top, params):
    """Numbers as the library takes them; those of the last call are kept."""
    kept = top.last_numbers
    if kept is not None and kept[0] == params and kept[1] == (*map(type, params),):
        return kept[2]
    op = top.op
    chosen = tuple(p.value(op.name, given) for p, given in zip(op.params, params))
    top.last_numbers = params, (*map(type, params),), chosen
    return chosen


def _plain(top, tensors, given, cu_seqlens, counts0, outputs):
    op = top.op
    params = _numbers(top, given)
    wanted = top.main if outputs is None else _bits(op, tuple(outputs))
    for field, x in zip(op.inputs, tensors):
        _check_tensor(op, field, x)
    results = call_new(top, tensors, params, cu_seqlens, counts0, wanted)
    one = outputs is None and len(op.main) == 1
    if cu_seqlens is None and counts0 is None:
        remember(top, given, outputs, params, wanted, None if one else op.result,
                 op.main[0] if one else 0)
    return results[op.main[0]] if one else op.result(*results)


_CALL = """
def {name}({head}):
    if {alone} and not _compiling():
        made = _ask(_known, {tensors}, {numbers}, outputs)
        if made is not None:
            return made
    return _plain(_top, {tensors}, {numbers}, cu_seqlens, {counts}, outputs)
"""


def _define(top):
    """The operator with the signature and words of mneme.ops. Calls that look like an earlier one
    are left to src/fastcall.c, all others to _plain()."""
    op = top.op
    twin = getattr(_arrays, op.name)
    parameters = [p for p in inspect.signature(twin).parameters.values() if p.name != "context"]
    head = ", ".join(("*, " if p.kind is p.KEYWORD_ONLY and p.name == first else "")
                     + (p.name if p.default is p.empty else f"{p.name}={p.default!r}")
                     for first in [next(p.name for p in parameters if p.kind is p.KEYWORD_ONLY)]
                     for p in parameters)
    text = _CALL.format(
        name=op.name, head=head, counts="counts0" if top.has_counts else "None",
        tensors="(" + "".join(safe_name(f.name) + ", " for f in op.inputs) + ")",
        numbers="(" + "".join(p.name + ", " for p in op.params) + ")",
        alone="cu_seqlens is None" + " and counts0 is None" * top.has_counts
        if top.known is not None else "False")
    scope = {"_top": top, "_plain": _plain, "_known": top.known, "_compiling": _is_compiling,
             "_ask": getattr(_compiled, "ask", None)}
    exec(text, scope)
    function = scope[op.name]
    function.__doc__, function.__module__ = twin.__doc__, __name__
    function.operator = top
    return function


for _name, _top in torch_operators.items():
    globals()[_name] = _define(_top)

from ._fla import *          # noqa: E402,F401,F403
from ._fla import __all__ as _more    # noqa: E402
__all__ += _more
