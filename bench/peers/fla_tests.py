#!/usr/bin/env python3
"""Runs the published tests of flash-linear-attention with our operators in place of theirs.

    bench/peers/fla_tests.py COPY [--only gdn,kda] [pytest arguments]

COPY is a checkout of flash-linear-attention (its tests folder is what counts; its package is taken
from there unless it is installed). Tests of their internal kernels still test their kernels, and
are left out: a test runs when it calls a function that mneme.torch.ops has. Exit status 77 where
something is missing."""

import importlib
import importlib.util
import os
import pathlib
import sys
import types

# This folder has a tokenizers.py, which is not the package of that name.
sys.path[:] = [p for p in sys.path
               if pathlib.Path(p).resolve() != pathlib.Path(__file__).resolve().parent]

FILES = ["gdn", "gla", "kda", "delta", "rwkv7", "dplr_delta", "iplr_delta", "gdp", "delta_product",
         "comba", "gsa", "hgrn", "gdn2", "mesa", "simple_gla", "retention", "lightning_attn",
         "linear_attn", "based", "attn"]

# What these ask for is not an operator of ours: their other forms, settings, pools of states.
NOT_OURS = {
    "guard": "their kernels' settings", "naive_chunk": "their reference against itself",
    "vllm": "a pool of states by index", "parallel": "their parallel form",
    "decoding_one_step": "their decode kernel", "invalid_chunk_size": "a chunk size means nothing",
    "intermediate": "their intermediate states", "cp_": "a sequence over several GPUs",
    "flash_kda": "their binding of another package", "routing": "their choice of kernels",
}


def unavailable():
    for name, what in (("torch", "PyTorch"), ("pytest", "pytest"), ("einops", "einops"),
                       ("triton", "Triton")):
        try:
            importlib.import_module(name)
        except ImportError:
            return f"{what} is not installed"
    import torch
    if torch.cuda.is_available() or os.environ.get("MNEME_TEST_DEVICE") == "cpu":
        return None
    return "PyTorch sees no GPU (MNEME_TEST_DEVICE=cpu tries the tests without one)"


def names_in(code):
    """Names that a function uses, and the functions inside of it."""
    inner = [c for c in code.co_consts if isinstance(c, types.CodeType)]
    return set(code.co_names).union(*map(names_in, inner))


class Plugin:
    """Leaves out what is not about our operators."""

    def pytest_collection_modifyitems(self, config, items):
        import pytest
        from mneme.torch import ops
        ours = set(ops.__all__)
        for item in items:
            given = str(item.callspec.params.values()) if hasattr(item, "callspec") else ""
            why = next((why for key, why in NOT_OURS.items() if key in item.originalname), None)
            if not why and not names_in(item.function.__code__) & ours and not any(
                    name in given for name in ours):
                why = "calls nothing that mneme.torch.ops has"
            if why:
                item.add_marker(pytest.mark.skip(reason=why))
            elif "test_mesa" in item.nodeid:
                item.add_marker(pytest.mark.xfail(reason="h_kk_init is symmetric: here its gradient "
                                                  "is the symmetric part of theirs"))


def main():
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    copy, more = pathlib.Path(sys.argv[1]).resolve(), sys.argv[2:]
    files = FILES
    if "--only" in more:
        at = more.index("--only")
        files = more[at + 1].split(",")
        del more[at:at + 2]
    tests = [copy / "tests/ops" / f"test_{name}.py" for name in files]
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
    import torch
    if not torch.cuda.is_available():
        import fla.utils
        fla.utils.device = "cpu"
        more.append("--noconftest")    # it asks for a GPU
    import pytest
    return pytest.main(["-q", "-rs", "-p", "no:cacheprovider", "--rootdir", str(copy), *tests,
                        *more], plugins=[Plugin()])


if __name__ == "__main__":
    sys.exit(main())
