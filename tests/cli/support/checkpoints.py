"""checkpoints.py MNEME FOLDER WORK [NAME...] - logits of model folders beside those of the software
that defines them: a table of folder, largest difference over its bound, verdict. Exit status 1 if a
folder does not agree. MNEME_DEVICE: where (cpu)."""
import array
import json
import os
import struct
import subprocess
import sys

LENGTHS = (1, 5, 63, 64, 65, 130)
TYPES = {"F32": ("f", 4), "I64": ("q", 8)}


def tensors(path):
    with open(path, "rb") as file:
        size = struct.unpack("<Q", file.read(8))[0]
        head, data = json.loads(file.read(size)), file.read()
    head.pop("__metadata__", None)
    found = {}
    for name, at in head.items():
        first, end = at["data_offsets"]
        if at["dtype"] in TYPES:
            found[name] = array.array(TYPES[at["dtype"]][0], data[first:end])
    return found


def logits(mneme, model, rows, work, per_pass):
    """Logits of rows of ids that each start from nothing, one after the other."""
    tokens, out = os.path.join(work, "tokens.json"), os.path.join(work, "logits.safetensors")
    with open(tokens, "w") as file:
        json.dump([list(row) for row in rows], file)
    command = [mneme, "eval", "--model", model, "--tokens", tokens, "--logits", out, "--threads", "1",
               "--device", os.environ.get("MNEME_DEVICE", "cpu")]
    if per_pass:
        command += ["--per-pass", str(per_pass)]
    run = subprocess.run(command, capture_output=True, text=True)
    if run.returncode:
        raise RuntimeError(run.stderr.strip().splitlines()[0] if run.stderr else "no word")
    return tensors(out)["logits"]


def compare(mneme, model, work):
    """The largest difference over its bound, and where."""
    expect = tensors(os.path.join(model, "expect.safetensors"))
    with open(os.path.join(model, "expect.json")) as file:
        told = json.load(file)["float32_rel"]
    rows = [expect["ids_%d" % T][row * T:(row + 1) * T] for T in LENGTHS for row in range(2)]
    worst = (0.0, "")
    for per_pass in (0, 1):
        have, at = logits(mneme, model, rows, work, per_pass), 0
        if len(have) != sum(len(expect["logits_%d" % T]) for T in LENGTHS):
            raise RuntimeError("%d logits" % len(have))
        for T in LENGTHS:
            want = expect["logits_%d" % T]
            bound = max(5e-6, 5 * told[str(T)]) * max(abs(x) for x in want)
            away = max(abs(a - b) if a == a else float("inf")
                       for a, b in zip(have[at:at + len(want)], want))
            at += len(want)
            if away / bound > worst[0]:
                worst = (away / bound, "T = %d %s" % (T, "by token" if per_pass else "whole"))
    return worst


def main(mneme, folder, work, *names):
    failed = 0
    names = names or sorted(n for n in os.listdir(folder)
                            if os.path.exists(os.path.join(folder, n, "expect.safetensors")))
    print("| folder | difference / bound | |\n|---|---|---|")
    for name in names:
        try:
            share, where = compare(mneme, os.path.join(folder, name), work)
            verdict = "agrees" if share <= 1.0 else "differs at " + where
            print("| %s | %.3g | %s |" % (name, share, verdict), flush=True)
            failed += share > 1.0
        except RuntimeError as problem:
            print("| %s | - | %s |" % (name, problem), flush=True)
            failed += 1
    print("%d of %d agree" % (len(names) - failed, len(names)))
    return failed > 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
