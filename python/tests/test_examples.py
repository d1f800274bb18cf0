"""Every program of python/examples runs and does what it says."""

import os
import re
import subprocess
import sys

import pytest


def run(repository, folder, name, *arguments):
    environment = dict(os.environ, OMP_NUM_THREADS="1")    # machines of CI are shared
    out = subprocess.run([sys.executable, repository / "python/examples" / name,
                          *map(str, arguments)], cwd=folder, capture_output=True, text=True,
                         env=environment, timeout=300)
    assert out.returncode == 0, out.stderr
    return out.stdout


def test_mqar_learns_to_look_up(repository, tmp_path):
    pytest.importorskip("torch")
    lines = run(repository, tmp_path, "mqar.py", 150).splitlines()
    right = [int(re.search(r"right (\d+)", line)[1]) for line in lines]
    assert right[0] < 30 and right[-1] > 80


def test_a_mixer_is_exchanged(repository, tmp_path):
    torch = pytest.importorskip("torch")
    (tmp_path / "text").write_text("".join(f"line {i} says {i * 7 % 13}.\n" for i in range(400)))
    small = ("--text", "text", "--steps", 30, "--batch", 4, "--context", 48, "--layers", 2,
             "--width", 32, "--heads", 2)
    before = run(repository, tmp_path, "nanogpt.py", *small, "--mixer", "attention", "--save", "a.pt")
    for more in (("--mixer", "gdn"), ("--mixer", "bayes", "--only", "1", "--start", "a.pt")):
        out = run(repository, tmp_path, "nanogpt.py", *small, *more, "--save", "b.pt")
        assert f"blocks {'0, 1' if len(more) == 2 else '1'}: {more[1]}" in out
        losses = [float(x) for x in re.findall(r"loss ([\d.]+)", out)]
        assert losses[-1] < 0.8 * losses[0]
        assert any("attn.mixer" in key for key in torch.load(tmp_path / "b.pt"))
    assert "h.0.attn.qkv.weight" in torch.load(tmp_path / "a.pt") and "loss" in before


def test_beliefs_are_read(repository, tmp_path, small_folder):
    np = pytest.importorskip("numpy")
    picture = []
    try:
        import matplotlib    # noqa: F401
        picture = ["picture.png"]
    except ImportError:
        pass
    out = run(repository, tmp_path, "beliefs.py", small_folder, "once upon a time", *picture)
    numbers = np.load(tmp_path / "beliefs.npz")
    assert "layer 1" in out and "layer 2" in out
    assert (numbers["layer2"] > 0).all() and len(numbers["layer2"]) == len(numbers["tokens"])
    assert not picture or (tmp_path / "picture.png").stat().st_size > 1000


def test_a_folder_is_loaded_and_goes_on(repository, tmp_path, small_folder):
    plain = run(repository, tmp_path, "published.py", small_folder, "once upon", "--tokens", 12)
    assert plain.startswith("once upon") and len(plain) > 10
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    same = run(repository, tmp_path, "published.py", small_folder, "once upon", "--tokens", 12,
               "--transformers")
    assert same == plain
