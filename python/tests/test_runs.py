"""Runs and sweeps as arrays and frames; the event files that the program writes."""

import json
import os
import subprocess

import numpy as np
import pytest

from mneme import runs


@pytest.fixture
def run(tmp_path):
    lines = [{"step": 10, "loss": 3.5, "lr": 1e-3}, {"step": 20, "loss": None, "lr": 2e-3},
             {"step": 20, "valid_loss": 3.25, "text": "once"}]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "metrics.jsonl").write_text(text + '{"step": 30, "lo')
    (tmp_path / "train.json").write_text('{"train": {"steps": 30}}')
    return tmp_path


def test_columns(run):
    got = runs.read(run)
    assert list(got) == ["step", "loss", "lr", "valid_loss"]
    np.testing.assert_array_equal(got["step"], [10, 20, 20])
    np.testing.assert_array_equal(got["loss"], [3.5, np.nan, np.nan])
    assert runs.config(run) == {"train": {"steps": 30}}


def test_frames(run):
    pytest.importorskip("pandas")
    table = runs.frame(run)
    assert table.shape == (3, 4) and table["valid_loss"].dropna().tolist() == [3.25]


def test_results_of_a_sweep(tmp_path):
    rows = [{"key": "a", "status": "ok", "seconds": 1.5, "job": {"labels": {"lr": 0.1, "seed": 0}},
             "result": {"score": 0.5, "curve": [[5, 1.0]]}},
            {"key": "b", "status": "failed", "error": "no memory", "job": {"labels": {"lr": 0.3}}}]
    (tmp_path / "results.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    got = runs.results(tmp_path)
    assert got[0]["score"] == 0.5 and got[0]["lr"] == 0.1 and got[1]["error"] == "no memory"
    if pytest.importorskip("pandas"):
        assert runs.results_frame(tmp_path)["lr"].tolist() == [0.1, 0.3]


def test_mistakes_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="has no metrics.jsonl"):
        runs.read(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": \n')
    with pytest.raises(ValueError, match="line 2 is no JSON"):
        runs.read(tmp_path)
    with pytest.raises(FileNotFoundError, match="no event files"):
        runs.events(tmp_path)


@pytest.mark.skipif("MNEME_PROGRAM" not in os.environ, reason="MNEME_PROGRAM names no mneme")
def test_a_run_of_the_program(tmp_path):
    (tmp_path / "text").write_text("".join(f"line {i} says {i * 7 % 13}.\n" for i in range(300)))
    command = [os.environ["MNEME_PROGRAM"], "train", "--quiet", "--threads", "1"]
    for change in ("data.train=text", "model.layers=gdn", "model.hidden_size=16", "train.batch=2",
                   "train.context=16", "train.steps=30", "train.eval_batches=2", "out=run"):
        command += ["--set", change]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    metrics, events = runs.read(tmp_path / "run"), runs.events(tmp_path / "run")
    loss = metrics["loss"][~np.isnan(metrics["loss"])]
    tag = next(t for t in events if t.split("/")[-1] == "loss")
    np.testing.assert_allclose(events[tag][1], loss, rtol=1e-6)
    np.testing.assert_array_equal(events[tag][0], metrics["step"][~np.isnan(metrics["loss"])])
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    import mneme
    import mneme.transformers                              # noqa: F401
    from transformers import AutoModelForCausalLM
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run/best")
    session = mneme.Model(tmp_path / "run/best").session()
    tokens = session.model.tokenizer.encode("line 7 says")
    session.feed(tokens)
    with torch.no_grad():
        got = model(torch.tensor(tokens).long()[None]).logits[0, -1].numpy()
    np.testing.assert_allclose(got, session.logits, rtol=1e-3, atol=1e-4)
