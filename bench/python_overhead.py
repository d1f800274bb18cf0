#!/usr/bin/env python3
"""What a call from Python costs over the C call, and how long the first one takes.

    bench/python_overhead.py [--device cuda] [--json] [--limit MICROSECONDS]
                             [--first | --compiled]

The C call alone is the library's function with its arguments ready, less what ctypes needs for a
function that does nothing, timed in turns with the calls. Calls are of the smallest shapes, so that what is measured is the way
there. `first` is the time from the end of `import mneme.torch.ops` to the end of the first call in
a fresh process where PyTorch and its GPU are already awake. Exit status 1 above the limit (20 on
the CPU, 10 on a GPU; 0.5 s for a first call). --first measures the first call alone,
--compiled what an operator costs the host in a graph of torch.compile (on a GPU with its CUDA
graphs), by graphs of 11 operators and of one."""

import argparse
import json
import subprocess
import sys
import time

FIRST = """
import sys, time, torch
device = sys.argv[1]
x = torch.randn(1, 64, 2, 64, device=device)
(x @ x.transpose(-1, -2)).sum().item()
at = time.perf_counter()
from mneme.torch import ops
imported = time.perf_counter()
o = ops.chunk_gated_delta_rule(x, x, x, -x[..., 0].abs(), x[..., 0].sigmoid())[0]
o.sum().item()
print(imported - at, time.perf_counter() - imported)
"""


def least_of(runs, wait, rounds=30, calls=100, warm=0.3):
    """Seconds of a call of each: the least mean of a round, the GPU being waited for in between.
    Rounds take turns, after calls of `warm` seconds each: a processor that has just woken up is
    slow for some tenths of a second."""
    for run in runs:
        start = time.perf_counter()
        while time.perf_counter() - start < warm:
            for _ in range(20):
                run()
            wait()
    means = [[] for _ in runs]
    for _ in range(rounds):
        for found, run in zip(means, runs):
            wait()
            start = time.perf_counter()
            for _ in range(calls):
                run()
            found.append((time.perf_counter() - start) / calls)
            wait()
    return [min(found) for found in means]


def least(run, wait, calls=100):
    return least_of([run], wait, calls=calls)[0]


def calls(torch, device):
    """(name, call from PyTorch, its operator, tensors, call from numpy or None)."""
    import mneme.ops as arrays
    from mneme.torch import ops
    from mneme.torch._call import torch_operators
    torch.manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, device=device)
    q, k, v = (normal(1, 1, 1, 4) for _ in range(3))
    g, beta = -normal(1, 1, 1).abs(), normal(1, 1, 1).sigmoid()
    x, weight = normal(1, 64), normal(64)
    a = [t.cpu().numpy() for t in (q, k, v, beta, g, x, weight)]
    delta = torch_operators["delta_net"]
    return [
        ("delta_net", lambda: ops.delta_net(q, k, v, beta, g, outputs=("o",)), delta,
         (q, k, v, beta, g, None), lambda: arrays.delta_net(*a[:5], outputs=("o",))),
        ("chunk_gated_delta_rule", lambda: ops.chunk_gated_delta_rule(q, k, v, g, beta), delta,
         (q, k, v, beta, g, None), None),
        ("rms_norm", lambda: ops.rms_norm(x, weight), torch_operators["rms_norm"], (x, weight),
         lambda: arrays.rms_norm(*a[5:])),
    ]


def measure(torch, device):
    from mneme import _library
    from mneme.torch import _device
    lib = _library.library()
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    handle = _device.context(torch.cuda.current_device()).handle if device == "cuda" else \
        _library.context().handle
    rows = []
    for name, call, top, tensors, numpy_call in calls(torch, device):
        numbers = tuple(p.value(top.op.name, p.default) for p in top.op.params)
        host = (None,) * top.n_host
        words, plan, types, keep = top._prepare(tensors, host, numbers)
        outs = [torch.empty(plan.out_shapes[i], device=device) for i in top.op.main[:1]]
        words[top.op.outputs[top.op.main[0]].word] = outs[0].data_ptr()
        bare, ctypes_alone, whole = least_of(
            [lambda: top.op.forward(handle, words), lambda: lib.mn_context_threads(handle), call],
            wait)
        bare -= ctypes_alone
        row = {"operator": name, "c_us": 1e6 * bare, "call_us": 1e6 * (whole - bare)}
        for t in tensors:
            if t is not None:
                t.requires_grad_()
        row["with_gradient_us"] = 1e6 * (least(call, wait) - bare)
        for t in tensors:
            if t is not None:
                t.requires_grad_(False)
        if numpy_call and device == "cpu":
            row["numpy_us"] = 1e6 * (least(numpy_call, wait) - bare)
        rows.append(row)
    return rows


def compiled(torch, device):
    """Microseconds of the host for each operator of a chain: called eagerly, and compiled."""
    from mneme.torch import ops
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 1, 1, 4, device=device) for _ in range(3))
    g, beta = -torch.rand(1, 1, 1, device=device), torch.rand(1, 1, 1, device=device)

    def chain(n):
        def run(q):
            for _ in range(n):
                q = ops.delta_net(q, k, v, beta, g, outputs=("o",)).o
            return q
        return run

    mode = "reduce-overhead" if device == "cuda" else "default"
    found = {}
    with torch.no_grad():
        for name, make in (("eager", chain), ("compiled", lambda n: torch.compile(
                chain(n), fullgraph=True, mode=mode))):
            one, many = (least(lambda f=make(n): f(q), wait, calls=20) for n in (1, 11))
            found[name + "_us"] = 1e5 * (many - one)
    return found


def first_call(device):
    out = subprocess.run([sys.executable, "-c", FIRST, device], check=True, capture_output=True,
                         text=True).stdout.split()
    return {"import_s": float(out[0]), "first_call_s": float(out[1])}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("--limit", type=float, help="microseconds that a call may cost")
    parser.add_argument("--first", action="store_true", help="the first call alone")
    parser.add_argument("--compiled", action="store_true", help="operators in compiled graphs")
    given = parser.parse_args()
    try:
        import torch
    except ImportError:
        sys.exit("python_overhead.py needs PyTorch")
    if given.device == "cuda" and not torch.cuda.is_available():
        print("skipped: PyTorch sees no GPU")
        return 77
    limit = given.limit or (20.0 if given.device == "cpu" else 10.0)
    torch.set_num_threads(1)
    if given.compiled:
        print("an operator of a chain: " + ", ".join(
            f"{name} {value:.1f}" for name, value in compiled(torch, given.device).items()))
        return 0
    first, rows = first_call(given.device), [] if given.first else measure(torch, given.device)
    if given.json:
        print(json.dumps({"device": given.device, "torch": torch.__version__, **first,
                          "limit_us": limit, "calls": rows}, indent=1))
    else:
        for row in rows:
            print("  ".join(f"{k} {v:.1f}" if isinstance(v, float) else f"{v:24}"
                            for k, v in row.items()))
        print(f"import {first['import_s']:.3f} s, first call {first['first_call_s']:.3f} s")
    slow = [r["operator"] for r in rows if r["call_us"] > limit]
    if slow:
        print(f"above {limit:.0f} microseconds: {', '.join(slow)}", file=sys.stderr)
    return 1 if slow or first["first_call_s"] > 0.5 else 0


if __name__ == "__main__":
    sys.exit(main())
