"""Calls that look like an earlier one, in one C function (src/fastcall.c), where there is one.

It is an extension module by the limited API, in the wheel or beside libmneme; it needs PyTorch's
DLPack exchange table (2.10 or newer). Without either, or with MNEME_FASTCALL=0, every call goes
through _call.py, with the same results."""

import functools
import importlib.util
import os
import pathlib

import torch

from . import _device
from .. import _library


def _beside_library():
    path = pathlib.Path(_library.library()._name)
    path = path.with_name("_fastcall.abi3.so")
    if not path.is_absolute() or not path.exists():
        return None
    spec = importlib.util.spec_from_file_location("mneme._fastcall", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _module():
    try:
        from .. import _fastcall
        return _fastcall
    except ImportError:
        pass
    try:
        return _beside_library()
    except ImportError:    # of another kind of Python
        return None


_any_autocast = getattr(torch._C, "_is_any_autocast_enabled", None) or (
    lambda: torch.is_autocast_enabled("cuda"))


def load(watchers):
    """The module, set up; None where calls go through Python. `watchers` are functions that give
    None or 0 where nobody traces or transforms calls."""
    table = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    if os.environ.get("MNEME_FASTCALL", "1") == "0" or table is None or None in watchers:
        return None
    module = _module()
    if module is None or not module.setup(table, torch.Tensor, torch.nn.Parameter,
                                          torch.is_grad_enabled, torch.is_autocast_enabled,
                                          _any_autocast, _device._current, _device._stream_of,
                                          _device._records, _library.made_handle,
                                          tuple(watchers)):
        return None
    _device.compiled = module
    return module


_guards = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
_strided = {"cpu": getattr(_guards, "_empty_strided_cpu", None),
            "cuda": getattr(_guards, "_empty_strided_cuda", None)}


def _new(shape, dtype, device):
    return torch.empty(shape, dtype=dtype, device=device)


def maker(shape, dtype, device):
    """(function, arguments) that give a new contiguous tensor; on a GPU, of the current device."""
    function = _strided.get(device.type)
    if function is None:
        return _new, (shape, dtype, device)
    strides, size = [], 1
    for n in reversed(shape):
        strides.append(size)
        size *= max(n, 1)
    return function, (tuple(shape), tuple(reversed(strides)), dtype)


def nothing(dtype, device):
    """A new tensor without elements."""
    if device.type == "cuda" and device.index != _device._current():
        return _new((0,), dtype, device)
    function, given = _no_elements(dtype, device)
    return function(*given)


@functools.lru_cache(maxsize=None)
def _no_elements(dtype, device):
    return maker((0,), dtype, device)
