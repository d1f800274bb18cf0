"""mneme in PyTorch: operators with autograd, layers, models.

    from mneme.torch.ops import chunk_gated_delta_rule     # flash-linear-attention's names
    from mneme.torch.nn import GDN, Bayes                  # [B, T, D] -> [B, T, D]"""

try:
    import torch as _torch
except ImportError as _error:
    raise ImportError("mneme.torch needs PyTorch (2.4 or newer); mneme itself needs numpy alone. "
                      f"import torch says: {_error}") from None

if tuple(int(part) for part in _torch.__version__.split(".")[:2]) < (2, 4):
    raise ImportError(f"mneme.torch needs PyTorch 2.4 or newer, this is {_torch.__version__}")

import importlib as _importlib

__all__ = ["ops", "nn", "patch"]


def __getattr__(name):
    if name in ("ops", "nn"):
        return _importlib.import_module("mneme.torch." + name)
    if name == "patch":
        return _importlib.import_module("mneme.torch.nn").patch
    raise AttributeError(f"mneme.torch has no {name!r}; it has ops, nn and patch")
