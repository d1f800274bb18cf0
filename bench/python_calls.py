#!/usr/bin/env python3
"""Where the time of a call from PyTorch goes, beside another copy of the Python package.

    bench/python_calls.py [--before FOLDER] [--rounds N] [--device cuda]

FOLDER is the `python` folder of an earlier checkout. Processes of both copies, and of this one with
MNEME_FASTCALL=0, take turns, pinned to one CPU each; a figure is the median over rounds of the
median over 40 batches of 50 calls, in microseconds, on smallest shapes. `C` is the library's
function by ctypes with its arguments ready. Prints a table in Markdown."""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time

HERE = pathlib.Path(__file__).resolve().parents[1] / "python"


def median(run, wait, batches=40, calls=50):
    """Microseconds of a call."""
    for _ in range(3 * calls):
        run()
    times = []
    for _ in range(batches):
        wait()
        start = time.perf_counter()
        for _ in range(calls):
            run()
        times.append((time.perf_counter() - start) / calls)
        wait()
    return 1e6 * statistics.median(times)


def bare(torch, top, tensors, device):
    """The C function of an operator with its arguments ready."""
    from mneme import _library
    from mneme.torch import _device
    words, plan, _, _ = top._prepare(tensors, top.no_host,
                                     tuple(p.value(top.op.name, p.default) for p in top.op.params))
    out = torch.empty(plan.out_shapes[top.op.main[0]], device=device)
    words[top.op.outputs[top.op.main[0]].word] = out.data_ptr()
    handle = (_library.cpu_handle() if device == "cpu"
              else _device.context(torch.cuda.current_device()).handle)
    return lambda: (top.op.forward(handle, words), out)[0]


def measure(device):
    import torch
    from mneme.torch import ops
    from mneme.torch._call import torch_operators
    torch.set_num_threads(1)
    torch.manual_seed(0)
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    q, k, v = (torch.randn(1, 1, 1, 4, device=device) for _ in range(3))
    g, beta = (torch.rand(1, 1, 1, device=device) for _ in range(2))
    g = -g
    x, weight = torch.randn(1, 64, device=device), torch.randn(64, device=device)
    rows = [("delta_net", (q, k, v, beta, g, None),
             lambda q: ops.delta_net(q, k, v, beta, g, outputs=("o",)).o, q),
            ("chunk_gated_delta_rule", (q, k, v, beta, g, None),
             lambda q: ops.chunk_gated_delta_rule(q, k, v, g, beta)[0], q),
            ("rms_norm", (x, weight), lambda x: ops.rms_norm(x, weight), x)]
    found = {}
    for name, tensors, call, first in rows:
        top = torch_operators["rms_norm" if name == "rms_norm" else "delta_net"]
        leaf = first.clone().requires_grad_()
        found[name + ", C"] = median(bare(torch, top, tensors, device), wait)
        found[name] = median(lambda: call(first), wait)
        found[name + ", gradient recorded"] = median(lambda: call(leaf), wait)
        y = call(leaf)
        cot = torch.ones_like(y)
        found[name + ", forward and backward"] = median(
            lambda: torch.autograd.grad(call(leaf), leaf, cot), wait)
    return found


def child(folder, fast, device, cpu):
    env = {**os.environ, "PYTHONPATH": str(folder), "MNEME_FASTCALL": fast,
           "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, __file__, "--child", "--device", device]
    done = subprocess.run(command, env=env, capture_output=True, text=True,
                          preexec_fn=lambda: os.sched_setaffinity(0, {cpu}))
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}\n{done.stderr}")
    return json.loads(done.stdout)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--before", help="the python folder of an earlier checkout")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        print(json.dumps(measure(given.device)), flush=True)
        # A thread of autograd that still lets go of Python's objects while the interpreter ends
        # ends the process before CPython 3.14.
        os._exit(0)
    ways = {"Python": (HERE, "0"), "one C function": (HERE, "1")}
    if given.before:
        ways = {"before": (pathlib.Path(given.before).resolve(), "1"), **ways}
    found = {way: [] for way in ways}
    for turn in range(given.rounds):
        for i, (way, (folder, fast)) in enumerate(ways.items()):
            cpu = sorted(os.sched_getaffinity(0))[(turn + i) % len(os.sched_getaffinity(0))]
            found[way].append(child(folder, fast, given.device, cpu))
    print("| microseconds | " + " | ".join(ways) + " |\n|---|" + "---|" * len(ways))
    for name in found["Python"][0]:
        print(f"| {name} | " + " | ".join(
            f"{statistics.median(turn[name] for turn in found[way]):.1f}" for way in ways) + " |")


if __name__ == "__main__":
    main()
