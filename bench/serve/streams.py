"""Many streams at once on a CPU against one: tokens/s, time to the first token, memory, and that a
seed gives the same text in any company; then a long prompt that was read before.

usage: streams.py MNEME MAKE_MODEL [--minutes 10] [--streams 64] [--model FOLDER] [--prompt 32000]

Without --model: a gdn of 10M parameters with random weights. The client is one process that counts
events as bytes; it shares the processor with the server. Prompts have 8 to 32 tokens; texts end after
half to one and a half of --tokens, so that streams come and go one by one. Measuring begins when the
state cache is full, and counts the requests that come from then on.
"""
import argparse
import itertools
import random
import statistics
import tempfile
import time

from serving import Server, Stream, Streams, quantile, random_model, table

CONFIG = {"layers": "gdn", "num_hidden_layers": 6, "hidden_size": 320, "intermediate_size": 1024,
          "vocab_size": 4096, "max_position_embeddings": 65536}

parser = argparse.ArgumentParser()
parser.add_argument("mneme")
parser.add_argument("make_model")
parser.add_argument("--minutes", type=float, default=10)
parser.add_argument("--streams", type=int, default=64)
parser.add_argument("--tokens", type=int, default=200)
parser.add_argument("--prompt", type=int, default=32000)
parser.add_argument("--model")
parser.add_argument("--cache-mb", type=int, default=32)
parser.add_argument("--alone", type=int, default=30, help="requests one after the other")
args = parser.parse_args()


def bodies(seed):
    rng = random.Random(seed)
    while True:
        text = "".join(rng.choice("abcdefgh ") for _ in range(rng.randrange(8, 32)))
        length = rng.randrange(args.tokens // 2, args.tokens * 3 // 2)
        yield {"prompt": text, "max_tokens": length, "ignore_eos": True, "temperature": 0.8,
               "seed": rng.randrange(1 << 30)}


def alone(server, n):
    """Seconds to the first token and tokens/s of streams one after the other."""
    firsts, speeds = [], []
    for body in itertools.islice(bodies(1), n):
        streams = Streams(server.port, 1, iter([body]))
        start = time.perf_counter()
        streams.finish()
        took = time.perf_counter() - start
        firsts.append(streams.ended[0].first)
        speeds.append(body["max_tokens"] / took)
    return firsts, speeds


def within(before, after, q):
    """The bound, in seconds, that the part q of what was counted meanwhile kept."""
    grown = {bound: after[bound] - before[bound] for bound in after}
    return next(bound for bound in sorted(grown) if grown[bound] >= q * max(grown.values()))


def cached(server):
    """The first token of a long prompt, cold and when it was seen before."""
    rng = random.Random(3)
    body = {"prompt": [rng.randrange(256) for _ in range(args.prompt)], "max_tokens": 2, "seed": 1}
    took = []
    for _ in range(6):
        s = Streams(server.port, 1, iter([body]))
        s.finish()
        took.append(s.ended[0].first)
    return took[0], statistics.median(took[1:])


with tempfile.TemporaryDirectory() as folder:
    model = args.model or random_model(args.make_model, folder + "/model", CONFIG)
    server = Server(args.mneme, model, "--streams", str(args.streams), "--cache-mb",
                    str(args.cache_mb))
    about = server.ask("GET", "/v1/models")["data"][0]
    probe = {"prompt": "the same text", "max_tokens": 100, "seed": 5, "temperature": 1.0,
             "ignore_eos": True}
    text = server.complete(**probe)["choices"][0]["text"]
    firsts, speeds = alone(server, args.alone)
    one = statistics.median(speeds)
    load = Streams(server.port, args.streams - 1, bodies(2))    # the probe is one of them, too
    load.run(15)
    while args.cache_mb and server.metric("mneme_cache_evictions_total") == 0:
        load.run(5)
    memory = []
    steps = server.buckets("mneme_step_seconds")
    written, start = server.metric("mneme_generated_tokens_total"), time.perf_counter()
    probe_stream = Stream(server.port, probe)
    load.selector.register(probe_stream.socket, 1, probe_stream)
    load.run(60 * args.minutes, lambda: memory.append(server.resident()))
    took = time.perf_counter() - start
    tokens = server.metric("mneme_generated_tokens_total") - written
    after = server.buckets("mneme_step_seconds")
    with_company = server.complete(**probe)["choices"][0]["text"]
    load.finish()
    many = tokens / took
    load.ended = [s for s in load.ended if s.start > start and s is not probe_stream]
    p99 = quantile([s.first for s in load.ended], 0.99)
    p50 = quantile([s.first for s in load.ended], 0.5)
    base = statistics.median(firsts)
    half = len(memory) // 2
    change = statistics.mean(memory[half:]) / statistics.mean(memory[:half]) - 1
    cold, warm = cached(server)
    code = server.stop()
    print(f"{about['parameters'] / 1e6:.1f}M parameters, layers {about['layers'][0]}, "
          f"{args.streams} streams of {args.tokens} tokens, {args.minutes:g} minutes\n")
    table([
        ("requests that ended", len(load.ended), ""),
        ("requests that failed, exit status", f"{len(load.failed)}, {code}", "0, 0"),
        ("tokens/s of one stream (median)", f"{one:.0f}", ""),
        ("tokens/s of all", f"{many:.0f}", ""),
        ("times one stream", f"{many / one:.2f}", ">= 4"),
        ("first token alone, median", f"{1e3 * base:.1f} ms", ""),
        ("first token in company, median", f"{1e3 * p50:.1f} ms", ""),
        ("first token in company, p99", f"{1e3 * p99:.1f} ms", ""),
        ("p99 over alone", f"{p99 / base:.1f}", "< 10"),
        ("steps of the batch: half, 99 % took at most",
         f"{1e3 * within(steps, after, .5):.0f}, {1e3 * within(steps, after, .99):.0f} ms", ""),
        ("memory, first sample to largest",
         f"{memory[0] / 2**20:.1f} to {max(memory) / 2**20:.1f} MiB", ""),
        ("memory, second half over first", f"{100 * change:+.2f} %", "within 2 %"),
        ("the same seed, alone and in company", "equal" if text == with_company else "DIFFERS",
         "equal"),
        (f"first token of {args.prompt} tokens, not seen before", f"{1e3 * cold:.0f} ms", ""),
        (f"first token of {args.prompt} tokens, seen before", f"{1e3 * warm:.1f} ms", ""),
    ])
