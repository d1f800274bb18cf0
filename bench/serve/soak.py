"""Clients of all kinds for as long as you like, meant for a server built with sanitizers: friendly ones,
ones that leave, ones that send what they should not, states that are cut and altered, and a model
that is read again every few minutes.

usage: soak.py MNEME MAKE_MODEL [--minutes 60] [--clients 4] [--seed 1]

A sanitizer ends the server with another status than 0, and so does a leak at its end. Checked
besides: that every answer is one of those a server may give, that a text asked for again and again is
always the same, and that the server is healthy at the end. A line a minute says what was done so far and
how much memory the server holds.
"""
import argparse
import collections
import http.client
import json
import random
import signal
import socket
import tempfile
import threading
import time

from serving import Server, random_model, table

parser = argparse.ArgumentParser()
parser.add_argument("mneme")
parser.add_argument("make_model")
parser.add_argument("--minutes", type=float, default=60)
parser.add_argument("--clients", type=int, default=4)
parser.add_argument("--seed", type=int, default=1)
args = parser.parse_args()

CONFIG = {"layers": "kla, gdn, attention, bayes", "hidden_size": 32, "vocab_size": 260,
          "max_position_embeddings": 512}
counts, failures, lock = collections.Counter(), [], threading.Lock()


def fail(what, *more):
    with lock:
        failures.append((what, *more))
        print("FAILED:", what, *more, flush=True)


def ask(server, method, path, body=None, timeout=600):
    c = http.client.HTTPConnection("127.0.0.1", server.port, timeout=timeout)
    c.request(method, path, body if body is None or isinstance(body, bytes) else json.dumps(body))
    reply = c.getresponse()
    content = reply.read()
    c.close()
    if reply.status not in (200, 400, 404, 405, 409, 413, 429, 503):
        fail("status", method, path, reply.status, content[:200])
    return reply.status, content


def words(rng, most):
    return "".join(rng.choice("abcdef ,.\n") for _ in range(rng.randrange(1, most)))


def completion(server, rng):
    body = {"prompt": words(rng, 200), "max_tokens": rng.randrange(20), "seed": rng.randrange(99),
            "n": rng.randrange(1, 4), "echo": rng.random() < .3, "belief": rng.random() < .3,
            "keep": rng.random() < .1}
    if rng.random() < .5:
        body["logprobs"] = rng.randrange(6)
    if rng.random() < .3:
        body["stop"] = [words(rng, 3)]
    if rng.random() < .4:
        body["stream"] = True
    if ask(server, "POST", "/v1/completions", body)[0] not in (200, 503):
        fail("a completion was refused", body)


def same_text(server, rng):
    body = {"prompt": "always the same", "max_tokens": 12, "seed": 7}
    status, content = ask(server, "POST", "/v1/completions", body)
    if status == 200 and json.loads(content)["choices"][0]["text"] != server.text:
        fail("the same seed, another text", content)


def leaves(server, rng):
    body = json.dumps({"prompt": words(rng, 50), "max_tokens": 400, "ignore_eos": True,
                       "stream": rng.random() < .5}).encode()
    with socket.create_connection(("127.0.0.1", server.port)) as s:
        s.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
                  % len(body) + body[:rng.choice([len(body), len(body) // 2])])
        time.sleep(rng.random())


def states(server, rng):
    status, content = ask(server, "POST", "/v1/states", {"prompt": words(rng, 100)})
    if status != 200:
        return
    mine = json.loads(content)["id"]
    ask(server, "POST", f"/v1/states/{mine}/feed", {"prompt": words(rng, 40)})
    snapshot = json.loads(ask(server, "POST", f"/v1/states/{mine}/snapshot")[1]).get("id", "0" * 32)
    ask(server, "POST", "/v1/belief", {"state": mine, "rows": [-1], "inside": True})
    ask(server, "POST", "/v1/completions", {"state": mine, "prompt": "x", "max_tokens": 3})
    status, blob = ask(server, "GET", f"/v1/states/{mine}/content")
    if status == 200:
        altered = bytearray(blob)
        for _ in range(rng.randrange(4)):
            altered[rng.randrange(min(len(altered), 4000))] = rng.randrange(256)
        cut = bytes(altered[:rng.choice([len(altered), rng.randrange(len(altered))])])
        status, content = ask(server, "PUT", "/v1/states", cut)
        if status == 200:
            new = json.loads(content)["id"]
            ask(server, "POST", "/v1/belief", {"state": new, "prompt": "y", "rows": [0]})
            ask(server, "DELETE", f"/v1/states/{new}")
    ask(server, "POST", f"/v1/states/{mine}/restore", {"snapshot": snapshot})
    ask(server, "DELETE", f"/v1/states/{snapshot}")
    ask(server, "DELETE", f"/v1/states/{mine}")


def nonsense(server, rng):
    bodies = [b"{", b"\xff" * 40, b"[" * 5000, b'{"prompt": NaN}', b'{"prompt": [99999999]}',
              b'{"prompt": "a", "temperature": -1}', bytes(rng.randrange(256) for _ in range(200)),
              b'{"prompt": "a", "temperature": NaN, "top_p": Infinity}', b'{"prompt": [-1, 260]}',
              b'{"prompt": "\\ud800", "max_tokens": 1}', b'{"prompt": "a", "seed": 1e400}',
              json.dumps({rng.choice(["prompt", "n", "stop", "state", "seed", "rows"]):
                          rng.choice([None, True, [], {}, -1, 1e300, "x", ["a", 1]])}).encode()]
    path = rng.choice(["/v1/completions", "/v1/chat/completions", "/v1/belief", "/v1/states",
                       "/tokenize", "/detokenize", "/v1/states/" + "0" * 32 + "/restore", "/../x",
                       "/v1/states/..%2f..%2fetc%2fpasswd/content", "//v1/models", "/%00", "/" + "a" * 5000])
    ask(server, rng.choice(["POST", "POST", "PUT", "GET"]), path, rng.choice(bodies))


def raw(server, rng, *parts, pause=0.0):
    """Bytes as they are, and whatever comes back until the server closes or nothing comes."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as s:
        try:
            for part in parts:
                s.sendall(part)
                time.sleep(pause)
            s.settimeout(2)
            while s.recv(1 << 16):
                pass
        except (TimeoutError, BrokenPipeError, ConnectionResetError):
            pass    # it need not read to the end of what it refuses


def floods(server, rng):
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
    kind = rng.randrange(5)
    if kind == 0:      # a body of a gigabyte: announced, begun, dropped
        raw(server, rng, head + b"Content-Length: 1073741824\r\n\r\n", *[b"x" * (1 << 20)] * 20)
    elif kind == 1:    # headers without end
        raw(server, rng, head, *[b"X-%d: %s\r\n" % (i, b"y" * 1000) for i in range(500)])
    elif kind == 2:    # a slow client, a few bytes at a time
        body = b'{"prompt": "slow", "max_tokens": 2}'
        request = head + b"Content-Length: %d\r\n\r\n" % len(body) + body
        raw(server, rng, *[request[i:i + 8] for i in range(0, len(request), 8)], pause=0.1)
    elif kind == 3:    # not HTTP, or nearly
        raw(server, rng, rng.choice([b"\0" * 3000, b"GET\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n",
                                     head + b"Content-Length: -5\r\n\r\n",
                                     head + b"Transfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\n"]))
    else:              # idle connections
        idle = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(100)]
        time.sleep(rng.random() * 5)
        for s in idle:
            s.close()


def looks(server, rng):
    ask(server, "GET", rng.choice(["/", "/metrics", "/health", "/v1/models", "/openapi.json",
                                   "/tokenizer_info", "/v1/states"]))
    ask(server, "POST", "/v1/belief", {"prompt": words(rng, 300), "inside": True,
                                       "rows": [0, rng.randrange(-300, 300)]})
    ask(server, "POST", "/v1/chat/completions",
        {"messages": [{"role": "user", "content": words(rng, 50)}], "max_tokens": 5})


KINDS = [completion, completion, completion, same_text, leaves, states, nonsense, floods, looks]


def client(server, seed, end):
    rng = random.Random(seed)
    while time.time() < end and not failures:
        kind = rng.choice(KINDS)
        try:
            kind(server, rng)
        except (OSError, http.client.HTTPException) as e:
            if server.process.poll() is not None:
                fail("the server has ended", server.process.returncode)
                return
            with lock:
                counts["connections that broke: " + type(e).__name__] += 1
        with lock:
            counts[kind.__name__] += 1


with tempfile.TemporaryDirectory() as folder:
    model = random_model(args.make_model, folder + "/model", CONFIG)
    server = Server(args.mneme, model, "--streams", "8", "--states", "40", "--cache-mb", "8",
                    env={"ASAN_OPTIONS": "quarantine_size_mb=32:detect_leaks=1"})
    server.text = server.complete(prompt="always the same", max_tokens=12,
                                  seed=7)["choices"][0]["text"]
    end = time.time() + 60 * args.minutes
    threads = [threading.Thread(target=client, args=(server, args.seed * 1000 + i, end))
               for i in range(args.clients)]
    for t in threads:
        t.start()
    memory, next_reload, next_word = [], time.time() + 120, time.time() + 60
    while any(t.is_alive() for t in threads):
        time.sleep(2)
        if server.process.poll() is None:
            memory.append(server.resident())
            if time.time() > next_reload:
                server.process.send_signal(signal.SIGHUP)
                next_reload = time.time() + 300
            if time.time() > next_word:
                print(time.strftime("%H:%M:%S"), f"{memory[-1] / 2**20:.0f} MiB", dict(counts), flush=True)
                next_word += 60
    if server.process.poll() is None:
        counts["answers"] = int(server.metric("mneme_requests_total"))
        counts["reloads"] = int(server.metric("mneme_reloads_total"))
    code = server.stop() if server.process.poll() is None else server.process.returncode
    third = len(memory) // 3
    table([("minutes, clients", f"{args.minutes:g}, {args.clients}", ""),
           *[(name, n, "") for name, n in sorted(counts.items())],
           ("memory, after a third and at the end",
            f"{memory[third] / 2**20:.0f} and {memory[-1] / 2**20:.0f} MiB", ""),
           ("failures", len(failures), 0), ("exit status", code, 0)])
    raise SystemExit(bool(failures or code))
