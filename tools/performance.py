#!/usr/bin/env python3
"""Writes the tables of measured figures into documents, from bench/results/*.json.

    tools/performance.py [--check] FILE...

Between "<!-- figures: KIND -->" and "<!-- end of figures -->" a document has the newest results of a
kind on each machine: train, infer, ops, grid (what `mneme bench KIND --json` printed), peers (bench/peers/gpu.py). A
file of results is {"date", "commit", "machine", "command", "result": what was printed}. --check only
tells what is stale, and is the exit status."""
import glob
import json
import os
import re
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def results():
    """The newest file of each kind and machine."""
    newest = {}
    for path in sorted(glob.glob(os.path.join(ROOT, "bench", "results", "*.json"))):
        with open(path) as file:
            one = json.load(file)
        one["path"] = os.path.relpath(path, ROOT)
        newest.setdefault(one["result"].get("bench", "peers"), {})[one["machine"]] = one
    return newest


def table(head, rows):
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return lines + ["| " + " | ".join(row) + " |" for row in rows]


def train(r):
    head = ("model", "parameters", "batch", "ms a step", "tokens/s", "TFLOP/s", "GiB")
    return table(head, [(c["name"], f"{c['parameters'] * 1e-6:.0f}M",
                         f"{c['batch']} x {c['context']}", f"{1e3 * c['step_seconds']:.1f}",
                         f"{c['tokens_per_second']:,.0f}", f"{1e-12 * c['flops']:.0f}",
                         f"{c['peak_mebibytes'] / 1024:.1f}") for c in r["cases"]])


def infer(r):
    head = ("model", "prefill of 4,096 tokens, ms", "a decoded token, ms")
    return table(head, [(c["name"], f"{1e3 * c['prefill_seconds']:.1f}",
                         f"{1e3 * c['decode_seconds']:.3f}") for c in r["cases"]])


def sizes(c):
    return " ".join(f"{k}{v}" for k, v in c["sizes"].items())


def ops(r):
    head = ("case", "sizes", "pass", "median ms", "ceiling", "share of it")
    return table(head, [(c["name"], sizes(c), c["pass"], f"{1e3 * c['median_s']:.3f}",
                         c["ceiling"]["name"], f"{c['share'] or 0:.2f}") for c in r["cases"]])


def grid(r):
    head = ("row", "shapes", "forward: mean share of the floor", "worst", "with backward", "worst")

    def share(x):
        return "" if x is None else f"{x:.3f}"
    return table(head, [(row["name"], str(sum(p["pass"] == "forward" for p in row["points"])),
                         share(row["mean_forward"]), share(row["worst_forward"]),
                         share(row["mean_train"]), share(row["worst_train"]))
                        for row in r["rows"]])


def peers(r):
    head = ("row", "sequences x tokens", "heads", "gates", "side", "forward ms", "with backward ms")
    rows = []
    for x in r["results"]:
        for key in x:
            if key.endswith("_forward_ms"):
                side = key[:-len("_forward_ms")]
                both = x.get(f"{side}_train_ms")
                rows.append((x["row"], f"{x['B']} x {x['T']}", f"{x['H']} / {x['HV']}",
                             f"x{x['gates']:g}", side, f"{x[key]:.3f}",
                             "" if both is None else f"{both:.3f}"))
    return table(head, rows)


COMMANDS = {"grid": "ops --grid --device cuda"}
KINDS = {"train": train, "infer": infer, "ops": ops, "grid": grid, "peers": peers}


def figures(kind, newest):
    if kind not in newest:
        command = "bench/peers/gpu.py" if kind == "peers" else f"mneme bench {COMMANDS.get(kind, kind)}"
        return [f"No results of this kind in bench/results yet: `{command} --json`."]
    lines = []
    for one in newest[kind].values():
        lines += [""] if lines else []
        lines += [f"{one['machine']}, {one['date']}, commit {one['commit']}, `{one['command']}` "
                  f"([{os.path.basename(one['path'])}](../../{one['path']})):", ""]
        lines += KINDS[kind](one["result"])
    return lines


def fresh(text, newest):
    def fill(found):
        lines = figures(found.group(1), newest)
        return f"<!-- figures: {found.group(1)} -->\n" + "\n".join(lines) + "\n<!-- end of figures -->"
    return re.sub(r"<!-- figures: (\w+) -->\n.*?<!-- end of figures -->", fill, text, flags=re.S)


def main(arguments):
    check = "--check" in arguments
    pages = [a for a in arguments if a != "--check"]
    if not pages:
        print(__doc__)
        return 2
    newest, stale = results(), 0
    for page in pages:
        with open(page) as file:
            text = file.read()
        new = fresh(text, newest)
        if new == text:
            continue
        stale += 1
        if check:
            print(f"{page}: its figures are not those of bench/results; run tools/performance.py {page}",
                  file=sys.stderr)
        else:
            with open(page, "w") as file:
                file.write(new)
            print(page)
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
