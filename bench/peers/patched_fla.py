#!/usr/bin/env python3
"""Trains a gated delta net of flash-linear-attention twice, with its operators and with ours.

    bench/peers/patched_fla.py [--steps 80] [--batch 8] [--compilers N] [--profile] [--json FILE]

Same modules, same first weights, same tokens, bfloat16 under autocast, AdamW; by default the model
of `mneme bench train --only gdn.400m`: 24 layers of width 1024 with 4 heads of 256. Prints tokens/s
of both (the median of steps after the first `--warm`), their ratio (1.3 is asked for) and the
largest relative difference of the loss curves, smoothed over ten steps (0.5 % is allowed), then
with --profile where the GPU's time of a step goes. With --compilers N, N processes first compile
the Triton kernels of flash-linear-attention, each a share of the settings that its autotuner will
try: what is chosen and timed stays the same, the first step takes a tenth of the time. Needs a GPU
and the packages flash-linear-attention and fla-core; exit status 77 with a reason where they are
missing, 1 where a figure falls short."""

import argparse
import gc
import json
import pathlib
import statistics
import subprocess
import sys
import time

# This folder has a tokenizers.py, which is not the package of that name.
sys.path[:] = [p for p in sys.path
               if pathlib.Path(p).resolve() != pathlib.Path(__file__).resolve().parent]


def parse():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, value in (("steps", 80), ("batch", 8), ("context", 4096), ("layers", 24),
                        ("width", 1024), ("heads", 4), ("head-dim", 256), ("vocabulary", 32000),
                        ("warm", 20), ("compilers", 0)):
        parser.add_argument("--" + name, type=int, default=value)
    parser.add_argument("--expand-v", type=float, default=1.0)
    parser.add_argument("--share", help=argparse.SUPPRESS)    # "2/10": of the settings to compile
    parser.add_argument("--no-norms", action="store_true",
                        help="exchange the delta rule alone, not norms and convolutions")
    parser.add_argument("--profile", action="store_true", help="the kernels of a step, by time")
    parser.add_argument("--json", help="write figures and loss curves to this file")
    return parser.parse_args()


def missing():
    try:
        import torch
    except ImportError:
        return "PyTorch is not installed"
    if not torch.cuda.is_available():
        return "PyTorch sees no GPU"
    try:
        import fla.models    # noqa: F401
    except ImportError as error:
        return f"flash-linear-attention is not installed ({error})"
    return None


def pass_over_refusal(torch):
    """Their backward of gated rules refuses Hopper GPUs with Triton 3.4 to 3.7.0, whose code may be
    wrong there. Here it runs all the same, for its speed; True where that was so."""
    from fla.ops.common import chunk_o
    refuses = (getattr(chunk_o, "IS_NVIDIA_HOPPER", False)
               and getattr(chunk_o, "TRITON_ABOVE_3_4_0", False)
               and not getattr(chunk_o, "TRITON_ABOVE_3_7_1", True))
    if refuses:
        chunk_o.TRITON_ABOVE_3_7_1 = True
    return refuses


class Tokens:
    """A language with something to learn: mostly a function of the two tokens before."""

    def __init__(self, torch, size, seed=0):
        self.torch, self.size = torch, size
        generator = torch.Generator().manual_seed(seed)
        self.common = min(size, 512)
        self.next = torch.randint(0, self.common, (self.common, 16), generator=generator).cuda()
        self.generator = torch.Generator(device="cuda").manual_seed(seed + 1)

    def draw(self, batch, length):
        torch, common = self.torch, self.common
        rand = torch.rand(batch, length, device="cuda", generator=self.generator)
        free = (rand * rand * common).long()
        odd = torch.rand(batch, length, device="cuda", generator=self.generator) < 0.15
        out = torch.empty(batch, length, dtype=torch.long, device="cuda")
        out[:, :2] = free[:, :2]
        for t in range(2, length):
            follows = self.next[out[:, t - 1], out[:, t - 2] % 16]
            out[:, t] = torch.where(odd[:, t], free[:, t], follows)
        return out


def loss_of(torch, model, tokens):
    with torch.autocast("cuda", torch.bfloat16):
        return model(input_ids=tokens, labels=tokens, use_cache=False).loss


def share_of_settings(share):
    """The autotuner tries but a share of the settings of each kernel. Where none of them fits the
    GPU, the kernel is left out: what the process computes is of no use but to be compiled."""
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.errors import OutOfResources
    turn, of = map(int, share.split("/"))
    whole, run_any = Autotuner.prune_configs, Autotuner.run

    def prune_configs(self, kwargs):
        found = whole(self, kwargs)
        return found[turn::of] or found[:1]

    def run(self, *args, **kwargs):
        try:
            return run_any(self, *args, **kwargs)
        except OutOfResources:
            return None
    Autotuner.prune_configs, Autotuner.run = prune_configs, run


def compile_first(processes):
    """Fills Triton's cache: a step of two layers in every process, with a share of the settings."""
    start = time.perf_counter()
    running = [subprocess.Popen([sys.executable, __file__, *sys.argv[1:], "--share",
                                 f"{i}/{processes}"], stdout=subprocess.DEVNULL,
                                stderr=subprocess.PIPE, text=True) for i in range(processes)]
    for process in running:
        told = process.communicate()[1]
        if process.returncode != 0:
            print("a compiling process failed:", told.strip().splitlines()[-1:])
    print(f"compiled by {processes} processes in {time.perf_counter() - start:.1f} s", flush=True)


def profile(torch, model, batches):
    """The kernels of a step that take most of the GPU's time."""
    from torch.profiler import ProfilerActivity, profile as record
    with record(activities=[ProfilerActivity.CUDA]) as found:
        for tokens in batches:
            loss_of(torch, model, tokens).backward()
            model.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
    rows = {}
    for event in found.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            spent = rows.setdefault(event.name, [0.0, 0])
            spent[0] += event.time_range.elapsed_us() / 1e3 / len(batches)
            spent[1] += 1
    print(f"  GPU busy {sum(ms for ms, _ in rows.values()):.1f} ms in forward and backward")
    for name, (ms, n) in sorted(rows.items(), key=lambda row: -row[1][0])[:14]:
        print(f"  {ms:8.2f} ms {n // len(batches):5} times  {name[:90]}")


def train(torch, model, batches, warm):
    """Losses of all steps, tokens a second of the median step after the first `warm`."""
    model = model.cuda().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, betas=(0.9, 0.95),
                                  weight_decay=0.1, fused=True)
    losses, first, marks = [], time.perf_counter(), []
    for step, tokens in enumerate(batches):
        if step == 1:
            torch.cuda.synchronize()
            print(f"first step {time.perf_counter() - first:.1f} s", flush=True)
        if step >= warm:
            marks.append(torch.cuda.Event(enable_timing=True))
            marks[-1].record()
        for group in optimizer.param_groups:
            group["lr"] = 6e-4 * min(1.0, (step + 1) / warm)
        loss = loss_of(torch, model, tokens)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
    torch.cuda.synchronize()
    took = statistics.median(a.elapsed_time(b) for a, b in zip(marks, marks[1:])) / 1e3
    return torch.stack(losses).double().cpu().tolist(), batches[-1].numel() / took


def smooth(losses, width=10):
    return [sum(losses[i:i + width]) / width for i in range(len(losses) - width + 1)]


def main():
    given = parse()
    why = missing()
    if why:
        print(f"skipped: {why}")
        return 77
    import torch
    from fla.models import GatedDeltaNetConfig, GatedDeltaNetForCausalLM
    import mneme.torch.fla
    config = GatedDeltaNetConfig(
        hidden_size=given.width, num_hidden_layers=given.layers, num_heads=given.heads,
        head_dim=given.head_dim, expand_v=given.expand_v, vocab_size=given.vocabulary,
        max_position_embeddings=given.context, use_cache=False)
    if given.share:
        share_of_settings(given.share)
        pass_over_refusal(torch)
        tokens = Tokens(torch, given.vocabulary).draw(given.batch, given.context)
        config.num_hidden_layers = 2
        loss_of(torch, GatedDeltaNetForCausalLM(config).cuda().train(), tokens).backward()
        torch.cuda.synchronize()
        return 0
    torch.manual_seed(0)
    first = GatedDeltaNetForCausalLM(config)
    weights = {k: v.clone() for k, v in first.state_dict().items()}
    count = sum(p.numel() for p in first.parameters())
    source = Tokens(torch, given.vocabulary)
    batches = [source.draw(given.batch, given.context) for _ in range(given.steps)]
    print(f"{count / 1e6:.0f}M parameters, {given.batch} x {given.context} tokens a step, "
          f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    if given.compilers:
        compile_first(given.compilers)
    out = {"refusal_passed_over": pass_over_refusal(torch)}
    if out["refusal_passed_over"]:
        print("theirs: their gated backward refuses this GPU with this Triton, for wrong "
              "gradients; it is run all the same")
    for name in ("ours", "theirs"):
        if name == "ours":
            print("exchanged:", ", ".join(mneme.torch.fla.install(norms=not given.no_norms)))
        else:
            mneme.torch.fla.uninstall()
        torch.manual_seed(0)
        model = GatedDeltaNetForCausalLM(config)
        model.load_state_dict(weights)
        losses, rate = train(torch, model, batches, given.warm)
        peak = torch.cuda.max_memory_allocated() / 2 ** 30
        out[name] = {"tokens_per_s": rate, "losses": losses, "peak_gib": peak}
        print(f"{name:7} {rate:10.0f} tokens/s  loss {losses[0]:.4f} -> {smooth(losses)[-1]:.4f}  "
              f"{peak:.1f} GiB", flush=True)
        if given.json:
            pathlib.Path(given.json).write_text(json.dumps(out))
        if given.profile:
            profile(torch, model, batches[:3])
        del model
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    a, b = smooth(out["theirs"]["losses"]), smooth(out["ours"]["losses"])
    apart = max(abs(x - y) / x for x, y in zip(a, b))
    ratio = out["ours"]["tokens_per_s"] / out["theirs"]["tokens_per_s"]
    print(f"ratio {ratio:.3f} (1.3 is asked for), loss curves apart by {100 * apart:.3f} % at most")
    if given.json:
        out.update(ratio=ratio, apart=apart, parameters=count)
        with open(given.json, "w") as file:
            json.dump(out, file, indent=1)
    return 0 if ratio >= 1.3 and apart <= 0.005 else 1


if __name__ == "__main__":
    sys.exit(main())
