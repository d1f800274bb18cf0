"""The Python of the guide runs: the blocks of a page one after the other, in a folder with a model."""

import re
import subprocess
import os

import pytest

PAGES = {"python.md": ("numpy",), "torch.md": ("torch",), "transformers.md": ("torch", "transformers")}


def blocks(text):
    return [body for kind, body in re.findall(r"^```python([^\n]*)\n(.*?)^```", text,
                                              re.MULTILINE | re.DOTALL) if "notest" not in kind]


@pytest.mark.parametrize("page", sorted(PAGES))
def test_page(page, repository, tmp_path, make_model, monkeypatch):
    for module in PAGES[page]:
        pytest.importorskip(module)
    monkeypatch.chdir(tmp_path)
    make_model(tmp_path / "folder", {"layers": "gdn, kla, bayes", "hidden_size": 32,
                                     "vocab_size": 256})
    found = blocks((repository / "docs/guide" / page).read_text())
    assert found
    names = {"__name__": page}
    for body in found:
        if '"run"' in body:
            if "MNEME_PROGRAM" not in os.environ:
                continue
            pytest.importorskip("pandas")
            (tmp_path / "text").write_text("one two three. " * 400)
            subprocess.run([os.environ["MNEME_PROGRAM"], "train", "--quiet", "--threads", "1",
                            *(word for change in ("data.train=text", "model.layers=gdn",
                                                  "model.hidden_size=16", "train.batch=2",
                                                  "train.context=16", "train.steps=5", "out=run")
                              for word in ("--set", change))], check=True, capture_output=True)
        exec(compile(body, page, "exec"), names)
