"""mneme: sequence memory. Needs numpy alone; mneme.torch needs PyTorch besides.

    mneme.ops        the operators on arrays, forward and backward
    mneme.Model      a model folder; mneme.Session reads tokens, tells logits and beliefs
    mneme.Task       synthetic tasks: samples as arrays
    mneme.golden     operators held to golden vectors
    mneme.runs       training runs and sweeps as arrays, or pandas frames
    mneme.torch      operators with autograd, layers, models for transformers"""

import importlib

_PLACES = {
    "Model": "session", "Session": "session", "Snapshot": "session", "Tokenizer": "session",
    "Sampling": "session", "Task": "tasks", "tasks": "tasks", "ops": "ops", "golden": "golden",
    "runs": "runs", "safetensors": "safetensors", "Context": "_library", "Error": "_library",
    "set_threads": "_library", "LibraryNotFound": "_library", "torch": "torch",
    "layers": "layers", "session": "session",
}
__all__ = ["Model", "Session", "Snapshot", "Tokenizer", "Sampling", "Task", "ops", "golden", "runs",
           "Context", "Error", "set_threads", "version"]


def version():
    """Of libmneme."""
    from . import _library
    return _library.library().mn_version().decode()


def __getattr__(name):
    if name == "__version__":
        return version()
    if name not in _PLACES:
        raise AttributeError(f"mneme has no {name!r}; it has " + ", ".join(sorted(_PLACES)))
    module = importlib.import_module("mneme." + _PLACES[name])
    found = module if _PLACES[name] == name else getattr(module, name)
    globals()[name] = found
    return found


def __dir__():
    return sorted(set(globals()) | set(_PLACES))
