#!/usr/bin/env python3
"""Operators of a GPU beside the kernels people use instead, in one process, in turn.

    python3 bench/peers/gpu.py [--rows gdn,kda,attention] [--shapes table|grid|one]
                               [--peers fla,flashqla,flashinfer,cudnn] [--json FILE] [--compilers N]

Peers that can be imported take part, the others are named and left out: flash-linear-attention (fla),
FlashQLA (flash_qla), FlashInfer's gated delta rule (flashinfer, forward), cuDNN's KDA (cudnn), cuDNN's
and FlashAttention's softmax attention (torch).
Each figure is the median of --runs calls; ours and the peers' take turns, an event on either side of
a call, and the stream is kept busy so that the host is always ahead. Differences are relative to
each peer, in the norm of the whole tensor. Needs the package `mneme` with CUDA kernels.

With --compilers N, N processes first compile the Triton kernels of flash-linear-attention, each a
share of the settings that its autotuner will try, row by row for at most --compile-seconds; what is
left is compiled when it is needed. The autotuner then compares the same settings as ever, over 20 ms
each instead of 100."""
import argparse
import importlib
import json
import math
import statistics
import subprocess
import sys
import time

import torch
import torch.nn.functional as F

import mneme.torch.ops as ours
from patched_fla import share_of_settings

# sequences, tokens, query heads, value heads, width
TABLE = [(4, 4096, 16, 16, 128), (8, 4096, 16, 16, 128), (1, 32768, 16, 16, 128),
         (4, 8192, 16, 32, 128), (1, 32768, 16, 32, 128), (4, 8192, 16, 64, 128),
         (1, 8192, 8, 8, 128)]
STEPS = 2    # of a token of gated_deltaproduct
SLOTS = 64    # of gsa
SHAPES = {"rwkv7": [(4, 4096, 32, 32, 64), (4, 4096, 16, 16, 64), (4, 4096, 16, 16, 128)]}
GRID = TABLE + [(8, 4096, 8, 8, 128), (1, 131072, 16, 16, 128), (1, 131072, 4, 4, 128),
                (1, 4096, 16, 16, 128), (1, 512, 16, 16, 128), (16, 512, 16, 16, 128),
                (64, 512, 16, 16, 128), (64, 1024, 4, 4, 128), (32, 2048, 4, 4, 128)]


def module(name):
    try:
        return importlib.import_module(name)
    except Exception as problem:            # a peer may fail in any way where it does not fit
        print(f"left out: {name}: {type(problem).__name__}: {str(problem)[:120]}", file=sys.stderr)
        return None


def normal(*shape):
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def unit(*shape):
    return F.normalize(normal(*shape).float(), dim=-1).bfloat16()


def inputs_of(row, B, T, H, HV, D, strength):
    """What the row takes; q and k repeated to the value heads unless a peer does that itself."""
    x = {"q": unit(B, T, H, D), "k": unit(B, T, H, D), "v": normal(B, T, HV, D)}
    if row == "rwkv7":
        x["k"], x["a"] = normal(B, T, H, D) / D ** 0.5, -x["k"]
        x["b"] = -x["a"] * torch.rand(B, T, H, D, device="cuda").bfloat16()
        # RWKV-7's decays lie between exp(-0.6065) and 1
        x["g"] = -0.6065 * strength * torch.rand(B, T, H, D, device="cuda").bfloat16()
    if row == "gated_deltaproduct":
        x["k"], x["v"] = unit(B, T, STEPS * H, D), normal(B, T, STEPS * HV, D)
        x["beta"] = torch.rand(B, T, STEPS * HV, device="cuda").bfloat16()
        x["g"] = (strength * F.logsigmoid(torch.randn(B, T, HV, device="cuda"))).bfloat16()
    if row == "gsa":
        g = strength / 8 * F.logsigmoid(torch.randn(B, T, HV, SLOTS, device="cuda"))
        x["g"], x["s"] = g.bfloat16(), (1 - g.exp()).bfloat16()
    if row in ("gdn", "kda", "delta"):
        x["beta"] = torch.rand(B, T, HV, device="cuda").bfloat16()
    if row == "gdn":
        x["g"] = F.logsigmoid(torch.randn(B, T, HV, device="cuda"))
    if row in ("kda", "gla", "hgrn2"):
        g = F.logsigmoid(torch.randn(B, T, HV, D, device="cuda"))
        x["g"] = strength * g if row == "kda" else (strength * g).bfloat16()
        if row == "hgrn2":
            x["k"] = (1 - x["g"].float().exp()).bfloat16()
    return x


def repeated(x, heads):
    have = x.shape[2]
    return x if have == heads else x.repeat_interleave(heads // have, 2)


def first(results):
    return results[0] if isinstance(results, tuple) else results


def extras_of(row, scale):
    return {"linear": {"normalize": False}, "retnet": {},
            "lightning": {"layer_idx": 3, "num_layers": 24}}.get(row, {"scale": scale})


def our_call(row, x, scale):
    """The function and its inputs."""
    if row == "rwkv7":
        return (lambda *a: first(ours.dplr(*a, scale=1.0))), x, tuple("qkvabg")
    if row == "gated_deltaproduct":
        call = lambda *a: first(ours.delta_product(*a, scale=scale))
        return call, x, ("q", "k", "v", "beta", "g")
    heads = x["v"].shape[2]
    t = {**x, "q": repeated(x["q"], heads), "k": repeated(x["k"], heads)}
    if row == "gsa":
        return (lambda *a: first(ours.chunk_gsa(*a, scale=scale))), t, tuple("qkvsg")
    if "g" in t:
        t["g"] = t["g"].bfloat16()
    names = {"gdn": ("chunk_gated_delta_rule", "q k v g beta"), "kda": ("chunk_kda", "q k v g beta"),
             "delta": ("chunk_delta_rule", "q k v beta"), "gla": ("chunk_gla", "q k v g"),
             "linear": ("chunk_linear_attn", "q k v"), "retnet": ("chunk_retention", "q k v"),
             "hgrn2": ("chunk_gla", "q k v g"), "lightning": ("chunk_lightning_attn", "q k v")}
    if row == "attention":
        return (lambda *a: first(ours.attention(*a, scale=scale))), t, ("q", "k", "v")
    function, order = names[row]
    call = getattr(ours, function)
    extra = extras_of(row, scale)
    return (lambda *a: call(*a, **extra)[0]), t, tuple(order.split())


def fla_call(row, x, scale):
    fla = module("fla.ops")
    if not fla or row == "attention":
        return None
    names = {"gdn": "chunk_gated_delta_rule", "kda": "chunk_kda", "delta": "chunk_delta_rule",
             "gla": "chunk_gla", "linear": "chunk_linear_attn", "retnet": "chunk_retention",
             "hgrn2": "chunk_gla", "lightning": "chunk_lightning_attn", "gsa": "chunk_gsa",
             "gated_deltaproduct": "chunk_gated_delta_product"}
    if row == "rwkv7":
        from fla.ops.rwkv7 import chunk_rwkv7
        call = lambda q, k, v, a, b, g: chunk_rwkv7(q, g, k, v, a, b, scale=1.0, lower_bound=-0.61)[0]
        return call, x, tuple("qkvabg")
    if row == "gated_deltaproduct":
        fla = module("fla.ops.gated_delta_product")
    function = getattr(fla, names[row], None)
    if not function:
        return None
    if row == "gated_deltaproduct":
        rows = lambda z: z.reshape(z.shape[0], z.shape[1] * STEPS, -1, *z.shape[3:])
        call = lambda q, k, v, beta, g: function(q, rows(k), rows(v), g, rows(beta), STEPS,
                                                 scale=scale)[0]
        return call, x, ("q", "k", "v", "beta", "g")
    call, t, order = our_call(row, x, scale)
    extra = extras_of(row, scale)
    return (lambda *a: function(*a, **extra)[0]), t, order


def flashqla_call(row, x, scale):
    qla = module("flash_qla") if row == "gdn" else None
    if not qla:
        return None
    return (lambda *a: qla.chunk_gated_delta_rule(*a, scale=scale)[0]), x, ("q", "k", "v", "g", "beta")


def flashinfer_call(row, x, scale):
    """Forward alone, at width 128."""
    wanted = row == "gdn" and x["v"].shape[-1] == 128
    rule = module("flashinfer.gdn_kernels.delta_rule_dsl") if wanted else None
    if not rule:
        return None
    B, T, heads, D = x["v"].shape
    borders = torch.arange(B + 1, device="cuda") * T
    flat = {n: z.reshape(-1, *z.shape[2:]) for n, z in x.items()}
    flat["alpha"], flat["beta"] = flat["g"].float().exp(), flat["beta"].float()
    gpu = torch.cuda.get_device_properties(0)
    lengths = module("flashinfer.gdn_kernels.delta_rule_dsl.varlen_helper")
    segments = lengths.should_use_cp_host(B * heads, gpu.multi_processor_count, gpu.name,
                                          device_capability=(gpu.major, gpu.minor))

    def call(q, k, v, alpha, beta):
        o, state = torch.empty_like(v), torch.empty(B, heads, D, D, device="cuda")
        if segments:        # as its public function chooses
            rule.cp_delta_rule_dsl_sm90(o, state, q, k, v, alpha, beta, borders, scale,
                                        max_seqlen=T)
        else:
            rule.chunk_gated_delta_rule_sm90(o, state, q, k, v, None, alpha, beta, borders, scale)
        return o
    return call, flat, ("q", "k", "v", "alpha", "beta")


def cudnn_call(row, x, scale):
    if row == "attention":
        from torch.nn.attention import SDPBackend, sdpa_kernel

        def attend(q, k, v):
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                return F.scaled_dot_product_attention(*(z.transpose(1, 2) for z in (q, k, v)),
                                                      is_causal=True, scale=scale).transpose(1, 2)
        return attend, x, ("q", "k", "v")
    cudnn = module("cudnn.linear_attention") if row == "kda" else None
    if not cudnn:
        return None
    B, T = x["q"].shape[:2]
    borders = torch.arange(B + 1, device="cuda", dtype=torch.int32) * T
    flat = {n: z.reshape(-1, *z.shape[2:]) for n, z in our_call(row, x, scale)[1].items()}
    flat["g"], flat["beta"] = flat["g"].float(), flat["beta"].float()

    def attend(*a):
        o = cudnn.kimi_delta_attention(*a, borders, plan_name="kda_hopper_cuda")
        return o[0] if isinstance(o, tuple) else o
    return attend, flat, ("q", "k", "v", "g", "beta")


PEERS = {"fla": fla_call, "flashqla": flashqla_call, "flashinfer": flashinfer_call,
         "cudnn": cudnn_call}


class Contender:
    """One side: its function, its inputs, and what its calls took."""

    def __init__(self, name, function, tensors, order):
        self.name, self.function, self.times = name, function, {"forward": [], "train": []}
        self.still = [tensors[n].detach().clone() for n in order]
        self.leaves = [t.detach().clone().requires_grad_(True) for t in self.still]
        self.cotangent = None

    def forward(self):
        with torch.no_grad():
            return self.function(*self.still)

    def train(self):
        for leaf in self.leaves:
            leaf.grad = None
        o = self.function(*self.leaves)
        if self.cotangent is None:
            self.cotangent = torch.randn_like(o)
        o.backward(self.cotangent)
        return o

    def time(self, what):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(2000000)          # a millisecond: the host gets ahead
        start.record()
        getattr(self, what)()
        end.record()
        return start, end


def contenders(row, shape, strength, peers):
    x = inputs_of(row, *shape, strength)
    scale = shape[-1] ** -0.5
    made = [Contender("mneme", *our_call(row, x, scale))]
    for name in peers:
        try:
            call = PEERS[name](row, x, scale)
            if not call:
                continue
            peer = Contender(name, *call)
            peer.forward()
            made.append(peer)
        except Exception as problem:
            print(f"left out: {name} at {shape}: {str(problem)[:120]}", file=sys.stderr)
    return made


def measure(row, shape, strength, runs, peers):
    made = contenders(row, shape, strength, peers)
    result = {"row": row, "B": shape[0], "T": shape[1], "H": shape[2], "HV": shape[3],
              "D": shape[4], "gates": strength}
    for what in ("forward", "train"):
        alive = []
        for c in made:
            try:
                for _ in range(3):
                    getattr(c, what)()
                alive.append(c)
            except Exception as problem:
                print(f"left out: {c.name} {what} at {shape}: {str(problem)[:120]}", file=sys.stderr)
        events = [[c.time(what) for c in alive] for _ in range(runs)]
        torch.cuda.synchronize()
        for c, column in zip(alive, zip(*events)):
            result[f"{c.name}_{what}_ms"] = statistics.median(a.elapsed_time(b) for a, b in column)
    o = made[0].forward().float().reshape(-1)
    for c in made[1:]:
        p = c.forward().float().reshape(-1)
        result[f"{c.name}_difference"] = ((o - p).norm() / p.norm()).item()
        result.setdefault("difference", result[f"{c.name}_difference"])
    return result


def compare_briefly(milliseconds):
    """The autotuner compares settings over so long each; 0: runs each once, to be compiled."""
    import triton.testing
    from triton.runtime.autotuner import Autotuner

    def once(call, quantiles):
        call()
        return [1.0] * len(quantiles)

    def brief(call, quantiles):
        return triton.testing.do_bench(call, warmup=milliseconds / 4, rep=milliseconds,
                                       quantiles=quantiles)
    Autotuner.do_bench = property(lambda self: brief if milliseconds else once)


def compile_share(rows, share):
    """A call of each row forward and back by the peers, with a share of all settings."""
    share_of_settings(share)
    compare_briefly(0)
    for row in rows:
        shape = SHAPES.get(row, TABLE)[0]
        x = inputs_of(row, *shape, 1.0)
        call = fla_call(row, x, shape[-1] ** -0.5)
        if not call:
            continue
        try:
            Contender("fla", *call).train()
            torch.cuda.synchronize()
        except Exception as problem:
            print(f"{row}, share {share}: {str(problem)[:200]}", file=sys.stderr)


def compile_first(processes, seconds):
    """Fills Triton's cache by processes of this file, which are ended after so long."""
    start = time.perf_counter()
    running = [subprocess.Popen([sys.executable, __file__, *sys.argv[1:], "--share",
                                 f"{i}/{processes}"], stdout=subprocess.DEVNULL)
               for i in range(processes)]
    for process in running:
        try:
            process.wait(max(0.1, start + seconds - time.perf_counter()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    ended = sum(process.returncode == 0 for process in running)
    print(f"compiled by {processes} processes, {ended} of them to the end, in "
          f"{time.perf_counter() - start:.1f} s", flush=True)


def show(r):
    sides = [k[:-len("_forward_ms")] for k in r if k.endswith("_forward_ms")]
    figures = "   ".join("%s %.3f / %.3f" % (s, r[f"{s}_forward_ms"], r.get(f"{s}_train_ms", math.nan))
                         for s in sides)
    off = "   ".join("%s %.1e" % (k[:-len("_difference")], v) for k, v in r.items()
                     if k.endswith("_difference"))
    print(f"{r['row']:9s} {r['B']:2d} x {r['T']:6d}  H {r['H']:2d}/{r['HV']:2d} d{r['D']} "
          f"gates x{r['gates']:g}   {figures}   off {off}", flush=True)


def closing(results):
    """Best peer's time over ours, over all shapes of a row."""
    for row in dict.fromkeys(r["row"] for r in results):
        for what in ("forward", "train"):
            ratios = []
            for r in (r for r in results if r["row"] == row):
                peers = [v for k, v in r.items() if k.endswith(f"_{what}_ms") and "mneme" not in k]
                if peers and f"mneme_{what}_ms" in r:
                    ratios.append(min(peers) / r[f"mneme_{what}_ms"])
            if ratios:
                mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
                print(f"{row} {what}: {len(ratios)} shapes, best peer over ours: geometric mean "
                      f"{mean:.2f}, worst {min(ratios):.2f}")


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="gdn,kda,gla,linear,retnet,attention")
    parser.add_argument("--all-backward", action="store_true",
                        help="time backward passes that fla refuses as wrong on this machine")
    parser.add_argument("--shapes", default="table", choices=("table", "grid", "one"))
    parser.add_argument("--gates", default="1", help="factors of log decays, such as 0.0625,1,3")
    parser.add_argument("--peers", default=",".join(PEERS), help="which take part")
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--compilers", type=int, default=0)
    parser.add_argument("--compile-seconds", type=float, default=120)
    parser.add_argument("--share", help=argparse.SUPPRESS)    # "2/10": of the settings to compile
    options = parser.parse_args()
    if options.all_backward:
        common = module("fla.ops.common.chunk_o")
        if common:
            common.TRITON_ABOVE_3_7_1 = True
    torch.manual_seed(1)
    rows = options.rows.split(",")
    if options.share:
        return compile_share(rows, options.share)
    if options.compilers:
        compile_first(options.compilers, options.compile_seconds)
        compare_briefly(20)
    results = []
    shapes = {"table": TABLE, "grid": GRID, "one": TABLE[:1]}[options.shapes]
    for row in rows:
        own = SHAPES.get(row, TABLE[:1])
        for shape in shapes if row == "gdn" else own[:1] if options.shapes == "one" else own:
            for strength in map(float, options.gates.split(",")):
                r = measure(row, shape, strength, options.runs, options.peers.split(","))
                results.append(r)
                show(r)
                torch.cuda.empty_cache()
                if options.json:
                    with open(options.json, "w") as file:
                        json.dump({"gpu": torch.cuda.get_device_name(), "torch": torch.__version__,
                                   "results": results}, file, indent=1)
    closing(results)


if __name__ == "__main__":
    main()
