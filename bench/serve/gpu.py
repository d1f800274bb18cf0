"""The server on a GPU, in less than a minute: 64 and 256 streams of a gdn of 400M in bf16, the step
of one stream against bench infer, and a prompt of 32,000 tokens that was seen before.

usage: gpu.py MNEME MAKE_MODEL [--layers 24] [--device cuda] [--dtype bf16] [--folder DIR]

Weights are random. Answers are whole, not streamed: 60,000 events a second would measure this
client. Tokens are those that /metrics counts between two moments in which all streams are busy.
"""
import argparse
import http.client
import json
import os
import random
import subprocess
import time

from serving import Server, Streams, deep_model, quantile, table

parser = argparse.ArgumentParser()
parser.add_argument("mneme")
parser.add_argument("make_model")
parser.add_argument("--layers", type=int, default=24)
parser.add_argument("--device", default="cuda")
parser.add_argument("--dtype", default="bf16")
parser.add_argument("--folder", default=os.environ.get("TMPDIR", "/tmp") + "/mneme-serve-gpu")
parser.add_argument("--prompt", type=int, default=32000)
parser.add_argument("--seconds", type=float, default=4)
parser.add_argument("--config", default="{}", help="JSON over the model's configuration")
args = parser.parse_args()

CONFIG = {"layers": "gdn", "num_hidden_layers": args.layers, "hidden_size": 1024,
          "num_heads": 4, "head_dim": 256, "expand_v": 1, "intermediate_size": 2816, "mlp": "swiglu",
          "vocab_size": 32000, "tie_word_embeddings": False, "max_position_embeddings": 65536,
          **json.loads(args.config)}
started = time.perf_counter()


def said(what):
    print(f"# {time.perf_counter() - started:5.1f} s: {what}", flush=True)


def throughput(server, n):
    """Tokens/s of `n` requests that all write for the whole time."""
    body = {"prompt": "a", "max_tokens": 60000, "ignore_eos": True, "temperature": 0, "seed": 1}
    connections = []

    def one(i):
        c = http.client.HTTPConnection("127.0.0.1", server.port, timeout=600)
        connections.append(c)
        c.request("POST", "/v1/completions", json.dumps({**body, "prompt": [i % 256, 5, 7]}))

    for i in range(n):
        one(i)
    while server.metric("mneme_sequences_active") < n:
        time.sleep(0.02)
    time.sleep(1.0)
    steps, first = server.metric("mneme_decode_steps_total"), time.perf_counter()
    time.sleep(args.seconds)
    done = server.metric("mneme_decode_steps_total") - steps
    took = time.perf_counter() - first
    for c in connections:
        c.close()
    while server.metric("mneme_sequences_active") > 0:
        time.sleep(0.02)
    return n * done / took, 1e3 * took / max(done, 1)


def bench_step():
    """Milliseconds of a decode step as bench infer measures it; None where it cannot."""
    run = subprocess.run([args.mneme, "bench", "infer", "--device", args.device, "--dtype",
                          args.dtype, "--layers", str(args.layers), "--only", "gdn.400m", "--runs", "3",
                          "--json"], capture_output=True, text=True, timeout=120)
    print("\n".join("# bench infer: " + line for line in run.stdout.splitlines()[:60]))
    return run.returncode


def first_tokens(server):
    rng = random.Random(3)
    body = {"prompt": [rng.randrange(256) for _ in range(args.prompt)], "max_tokens": 2, "seed": 1}
    took = []
    for _ in range(8):
        s = Streams(server.port, 1, iter([body]))
        s.finish()
        took.append(1e3 * s.ended[0].first)
    return took[0], quantile(took[1:], 0.5)


model = deep_model(args.make_model, args.folder, CONFIG)
said("model written")


def serve(streams):
    return Server(args.mneme, model, "--device", args.device, "--dtype", args.dtype, "--streams",
                  str(streams), "--queue", "512", "--chunk", "1024", "--cache-mb", "4096")


rows = []
server = serve(1)
one, step = throughput(server, 1)
rows.append(("step of the only stream of a server", f"{step:.3f} ms ({one:.0f} tokens/s)",
             "within 5 % of bench infer"))
said(rows[-1])
server.stop()
server = serve(256)
about = server.ask("GET", "/v1/models")["data"][0]
said(f"server ready, {about['parameters'] / 1e6:.0f}M parameters")
one, step = throughput(server, 1)
rows.append(("step of one stream of 256 that may come", f"{step:.3f} ms ({one:.0f} tokens/s)", ""))
said(rows[-1])
for n, asked in ((64, 40000), (256, 60000)):
    speed, step = throughput(server, n)
    rows.append((f"tokens/s of {n} streams", f"{speed:.0f} ({step:.2f} ms a step)", f">= {asked}"))
    said(rows[-1])
cold, warm = first_tokens(server)
rows.append((f"first token of {args.prompt} tokens, not seen before", f"{cold:.0f} ms", ""))
rows.append((f"first token of {args.prompt} tokens, seen before", f"{warm:.2f} ms", "<= 5 ms"))
said(rows[-1])
code = server.stop()
rows.append(("exit status", code, 0))
table(rows)
said("server ended")
bench_step()
