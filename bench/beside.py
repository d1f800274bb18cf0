#!/usr/bin/env python3
"""The comparison table of the README in one run on one machine: mneme and what can be had of its peers.

    python3 bench/beside.py MNEME OUT [--python PYTHON] [--llmc SOURCE] [--seconds 600]

With a GPU: models of 400M parameters, `mneme bench train` and `infer` in turn with bench/peers/pytorch_400m.py
(PyTorch with CUDA; flash-linear-attention where PYTHON can import `fla`). On the CPU: a GPT of 10.7M parameters
beside bench/peers/pytorch_gpt.py and, given its sources, llm.c. OUT gets a file for each step, OUT/table.md the
rows; a peer that is not there leaves a dash. Each step ends after what is left of --seconds."""
import argparse
import json
import os
import re
import subprocess
import sys
import time

HERE = os.path.dirname(os.path.abspath(__file__))


class Runs:
    def __init__(self, o):
        self.o, self.end = o, time.monotonic() + o.seconds

    def text(self, name, *command):
        """What a command prints, kept as a file too; empty where it fails or has no time left."""
        print("+", *command, file=sys.stderr, flush=True)
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=max(self.end - time.monotonic(), 1))
            out, problem = done.stdout, done.stderr if done.returncode else ""
        except (OSError, subprocess.TimeoutExpired) as why:
            out, problem = "", str(why)
        with open(os.path.join(self.o.out, name), "w") as file:
            file.write(out)
        if problem:
            print(problem.strip()[-500:], file=sys.stderr)
        return "" if problem else out

    def mneme(self, what, only, *more):
        """The case of that name, as a dictionary."""
        text = self.text(f"{what}-{only}.json", self.o.mneme, "bench", what, "--only", only, "--json", *more)
        cases = json.loads(text)["cases"] if text else []
        return next((c for c in cases if c["name"] == only), {})

    def peer(self, model):
        text = self.text(f"{model}.json", self.o.python, os.path.join(HERE, "peers", "pytorch_400m.py"), model)
        return json.loads(text.strip().splitlines()[-1]) if text else {}


def cell(pattern, *values):
    return "-" if any(v is None for v in values) else pattern.format(*values)


def gpu_rows(runs):
    ours = {name: runs.mneme("train", name, "--device", "cuda") for name in ("attention.400m", "gdn.400m")}
    transformer, fla = runs.peer("transformer"), runs.peer("gdn")
    infer = runs.mneme("infer", "gdn.400m", "--device", "cuda")
    gdn, attention = ours["gdn.400m"], ours["attention.400m"]

    def training(case):
        peak = case.get("gib_in_use", case.get("peak_mebibytes") and case["peak_mebibytes"] / 1024)
        return cell("{:,.0f} tokens/s in {:.1f} GiB", case.get("tokens_per_second"), peak)

    def first(case):
        return cell("{:.1f} s", case.get("first_step_seconds"))

    def ms(case):
        prompt, token = case.get("prefill_seconds"), case.get("decode_seconds")
        return cell("{:.1f} ms; {:.2f} ms", prompt and 1e3 * prompt, token and 1e3 * token)

    yield "train gated delta net, GPU", training(gdn), "flash-linear-attention: " + training(fla)
    yield "train softmax attention, GPU", training(attention), "PyTorch, compiled: " + training(transformer)
    yield ("first training step after start", f"{first(gdn)}; {first(attention)}",
           f"flash-linear-attention {first(fla)}, PyTorch compiled {first(transformer)}")
    yield "prompt of 4,096 tokens; one token", ms(infer), "flash-linear-attention " + ms(fla)


def cpu_row(runs):
    rate = runs.mneme("train", "gpt").get("tokens_per_second")
    beside = []
    eager = runs.text("pytorch_gpt.txt", runs.o.python, os.path.join(HERE, "peers", "pytorch_gpt.py"))
    if runs.o.llmc:
        llmc = runs.text("llmc.txt", "sh", os.path.join(HERE, "peers", "llmc.sh"), runs.o.llmc)
        beside.append("llm.c " + rate_of(llmc))
    beside.append("PyTorch eager " + rate_of(eager))
    yield f"train a GPT of 10.7M, {os.cpu_count()} cores", cell("{:,.0f} tokens/s", rate), ", ".join(beside)


def rate_of(text):
    found = re.findall(r"([\d,.]+) tokens/s", text)
    return found[0] if found else "-"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mneme")
    parser.add_argument("out")
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--llmc")
    parser.add_argument("--seconds", type=int, default=600)
    o = parser.parse_args()
    os.makedirs(o.out, exist_ok=True)
    runs = Runs(o)
    has_gpu = bool(runs.text("nvidia-smi.txt", "nvidia-smi", "-L").strip())
    rows = list(gpu_rows(runs)) if has_gpu else []
    rows += cpu_row(runs)
    with open(os.path.join(o.out, "table.md"), "w") as file:
        file.write("| | mneme | beside it |\n|---|---|---|\n")
        file.writelines("| %s | %s | %s |\n" % row for row in rows)
    with open(os.path.join(o.out, "table.md")) as file:
        print(file.read(), end="")


if __name__ == "__main__":
    main()
