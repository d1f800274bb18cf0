"""models.py - looks into model folders for tests: bits of tensors, logits of mneme eval.

    models.py equal A B               every tensor of A is in B with the same type, shape and bits
    models.py stays A B LAYER ...     the same for those that are in none of these layers' mixers,
                                      by the names of mneme's own folders
    models.py finite MNEME A WORK     logits of a few tokens are finite, and not all the same
    models.py logits MNEME A B WORK   logits of both are the same bits
    models.py near MNEME A B WORK X   and these within X of the largest"""
import array
import json
import math
import os
import re
import struct
import subprocess
import sys


def tensors(path):
    if os.path.isdir(path):
        path = os.path.join(path, "model.safetensors")
    with open(path, "rb") as file:
        size = struct.unpack("<Q", file.read(8))[0]
        head, data = json.loads(file.read(size)), file.read()
    head.pop("__metadata__", None)
    return {name: (at["dtype"], at["shape"], data[at["data_offsets"][0]:at["data_offsets"][1]])
            for name, at in head.items()}


def equal(a, b, names=None):
    a, b = tensors(a), tensors(b)
    names = a if names is None else names(a)
    assert names, "nothing to compare"
    for name in names:
        assert name in b, name + " is not there"
        assert a[name] == b[name], name + " is another"


def stays(a, b, *layers):
    mixer = re.compile(r"model\.layers\.(%s)\.attn\." % "|".join(layers))
    equal(a, b, lambda all_of: [name for name in all_of if not mixer.match(name)])


def logits(mneme, folder, work):
    with open(os.path.join(folder, "config.json")) as file:
        vocabulary = json.load(file)["vocab_size"]
    tokens, out = os.path.join(work, "tokens.json"), os.path.join(work, "logits.safetensors")
    with open(tokens, "w") as file:
        json.dump([(7 * i * i + 3 * i) % vocabulary for i in range(40)], file)
    run = subprocess.run([mneme, "eval", "--model", folder, "--tokens", tokens, "--logits", out,
                          "--threads", "1"], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return array.array("f", tensors(out)["logits"][2])


def finite(mneme, folder, work):
    x = logits(mneme, folder, work)
    assert all(math.isfinite(v) for v in x) and len(set(x)) > len(x) // 4


def same_logits(mneme, a, b, work):
    assert logits(mneme, a, work) == logits(mneme, b, work), "other logits"


def near(mneme, a, b, work, bound):
    x, y = logits(mneme, a, work), logits(mneme, b, work)
    largest = max(abs(v) for v in x)
    away = max(abs(v - w) for v, w in zip(x, y)) / largest
    assert 0 < away < float(bound), away


{"equal": equal, "stays": stays, "finite": finite, "logits": same_logits,
 "near": near}[sys.argv[1]](*sys.argv[2:])
