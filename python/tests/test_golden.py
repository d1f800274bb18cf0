"""Operators against the golden vectors, in float64 and float32, forward and backward."""

import pathlib

import pytest

from mneme import golden

FILES = sorted((pathlib.Path(__file__).parents[2] / "tests/golden").glob("*.safetensors"))


@pytest.mark.parametrize("dtype", ["f64", "f32"])
@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_golden(path, dtype):
    lines = golden.check(path, dtype)
    assert lines and all(line.passed for line in lines), [ln for ln in lines if not ln.passed]
