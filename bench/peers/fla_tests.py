#!/usr/bin/env python3
"""Runs the published tests of flash-linear-attention with our operators in place of theirs.

    bench/peers/fla_tests.py COPY [pytest arguments]

COPY is a checkout of flash-linear-attention (its tests folder is what counts; its package is taken
from there unless it is installed). Tests of their internal kernels still test their kernels, and
are left out: a test runs when it calls a function that mneme.torch.ops has. Exit status 77 where
something is missing."""

import importlib
import pathlib
import sys

FILES = ["linear_attn", "retention", "simple_gla", "lightning_attn", "gla", "delta", "gdn", "kda",
         "mesa"]

# What these ask for is not an operator of ours: their own kernels, caches, settings, other shapes.
NOT_OURS = {
    "wy": "their kernel of the WY form", "guard": "their kernels' settings",
    "naive_chunk": "their reference against itself", "vllm": "a pool of states by index",
    "parallel": "their parallel form", "gate_": "their gate kernel", "_gate": "their gate kernel",
    "decoding_one_step": "their decode kernel", "invalid_chunk_size": "a chunk size means nothing",
    "intermediate": "their intermediate states", "cp_": "a sequence over several GPUs",
}


def unavailable():
    for name, what in (("torch", "PyTorch"), ("pytest", "pytest"), ("einops", "einops"),
                       ("triton", "Triton")):
        try:
            importlib.import_module(name)
        except ImportError:
            return f"{what} is not installed"
    import torch
    return None if torch.cuda.is_available() else "PyTorch sees no GPU"


class Plugin:
    """Exchanges the operators before tests import them, and leaves out what is not about them."""

    def pytest_collection_modifyitems(self, config, items):
        import pytest
        from mneme.torch import ops
        ours = set(ops.__all__)
        for item in items:
            used = set(item.function.__code__.co_names)
            why = next((why for key, why in NOT_OURS.items() if key in item.originalname), None)
            if why is None and not used & ours and not any(
                    f in str(item.callspec.params.values()) for f in ours
                    if hasattr(item, "callspec")):
                why = "calls nothing that mneme.torch.ops has"
            if why:
                item.add_marker(pytest.mark.skip(reason=why))


def main():
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    copy = pathlib.Path(sys.argv[1]).resolve()
    tests = [copy / "tests/ops" / f"test_{name}.py" for name in FILES]
    tests = [str(path) for path in tests if path.exists()]
    if not tests:
        sys.exit(f"{copy} holds no tests/ops/test_*.py of flash-linear-attention")
    why = unavailable()
    if why:
        print(f"skipped: {why}")
        return 77
    if importlib.util.find_spec("fla") is None:
        sys.path.insert(0, str(copy))
    import mneme.torch.fla
    names = mneme.torch.fla.install(norms=False)
    print("exchanged:", ", ".join(names))
    import pytest
    return pytest.main(["-q", "-rs", "-p", "no:cacheprovider", "--rootdir", str(copy), *tests,
                        *sys.argv[2:]], plugins=[Plugin()])


if __name__ == "__main__":
    import importlib.util
    sys.exit(main())
