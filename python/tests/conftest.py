import json
import os
import pathlib

import pytest

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]


def pytest_report_header(config):
    import mneme
    from mneme import _library
    return f"libmneme {mneme.version()}: {_library.library()._name}"


@pytest.fixture(scope="session")
def repository():
    return REPOSITORY


@pytest.fixture(scope="session")
def make_model():
    """make_model(folder, config): a small model with numbers that tell layers apart."""
    from support import write_model
    return write_model


@pytest.fixture
def small_folder(tmp_path):
    from support import write_model
    return write_model(tmp_path / "model", {"layers": "gdn, kla, bayes", "hidden_size": 32,
                                            "vocab_size": 300})
