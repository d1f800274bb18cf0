"""Talks to `mneme serve` as clients do, friendly ones and others. Standard library only.

usage: serve.py MNEME MODEL FOLDER     the model keeps beliefs and has one token per byte
"""
import concurrent.futures
import http.client
import json
import math
import os
import random
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time

MNEME, MODEL, FOLDER = sys.argv[1:4]
failures = []


def check(holds, *what):
    if not holds:
        failures.append(what)
        print("FAILED:", *what, flush=True)
    return holds


class Server:
    def __init__(self, *options, env=None, model=MODEL):
        self.log = open(os.path.join(FOLDER, "log"), "ab")
        self.process = subprocess.Popen([MNEME, "serve", model, "--port", "0", *options],
                                        stdout=subprocess.PIPE, stderr=self.log,
                                        env={**os.environ, **(env or {})})
        line = self.process.stdout.readline().decode().strip()
        if not line:
            raise SystemExit("the server did not start: see " + self.log.name)
        self.port = int(line.rsplit(":", 1)[1])

    def ask(self, method, path, body=None, headers=None, timeout=120):
        c = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        c.request(method, path, data, headers or {})
        reply = c.getresponse()
        content = reply.read()
        c.close()
        kind = reply.headers.get("Content-Type", "")
        return reply.status, json.loads(content) if kind.startswith("application/json") else content

    def complete(self, **body):
        status, reply = self.ask("POST", "/v1/completions", body)
        check(status == 200, "completion", body, status, reply)
        return reply

    def text(self, **body):
        return self.complete(**body)["choices"][0]["text"]

    def metric(self, name):
        _, text = self.ask("GET", "/metrics")
        return float(re.search(rf"^{name} (\S+)$", text.decode(), re.M).group(1))

    def healthy(self, what):
        status, reply = self.ask("GET", "/health")
        check(status == 200 and reply == {"status": "ok"}, "not healthy after", what)

    def raw(self, data, wait=5.0):
        """Bytes as they are; what comes back until the server closes or `wait` seconds."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=wait) as s:
            out = b""
            try:
                s.sendall(data)
                while True:
                    more = s.recv(65536)
                    if not more:
                        break
                    out += more
                    if b"\r\n\r\n" in out and b"Content-Length: 0" in out:
                        break
            except OSError:
                pass
            return out

    def stop(self):
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(60)
        check(code == 0, "ended with", code)
        self.log.close()


def events(server, body):
    c = http.client.HTTPConnection("127.0.0.1", server.port, timeout=120)
    c.request("POST", "/v1/completions", json.dumps({**body, "stream": True}))
    reply = c.getresponse()
    lines = reply.read().decode().split("\n\n")
    check(reply.headers["Content-Type"] == "text/event-stream", "type of a stream")
    check(lines[-2:] == ["data: [DONE]", ""], "end of a stream", lines[-3:])
    c.close()
    return [json.loads(line[6:]) for line in lines[:-2]]


# ---- what clients expect ---------------------------------------------------------------------

def forms_of_prompts(s):
    one = s.complete(prompt="hello", max_tokens=6, seed=1)
    check(one["object"] == "text_completion" and len(one["choices"]) == 1, "one", one)
    check(one["usage"]["prompt_tokens"] == 5 and one["usage"]["completion_tokens"] == 6, one)
    text = one["choices"][0]["text"]
    check(s.text(prompt=list(b"hello"), max_tokens=6, seed=1) == text, "ids as text")
    both = s.complete(prompt=["hello", "world"], max_tokens=6, seed=1)["choices"]
    check([c["index"] for c in both] == [0, 1] and both[0]["text"] == text, "a list", both)
    ragged = s.complete(prompt=[list(b"hello"), [1], [7] * 40], max_tokens=6, seed=1)["choices"]
    check(len(ragged) == 3 and ragged[0]["text"] == text, "ragged ids")
    echoed = s.text(prompt="hello", max_tokens=6, seed=1, echo=True)
    check(echoed == "hello" + text, "echo", echoed)
    many = s.complete(prompt="hello", max_tokens=6, seed=1, n=5)["choices"]
    check(len(many) == 5 and many[0]["text"] == text, "n", many)
    check(len({c["text"] for c in many}) > 1, "continuations are all the same")
    check(s.text(prompt="hello", max_tokens=0) == "", "max_tokens 0")


def scored_prompts(s):
    """What lm-evaluation-harness sends and reads (log-likelihoods)."""
    rng = random.Random(5)
    prompts = [[rng.randrange(256) for _ in range(n)] for n in (1, 2, 3, 17, 128, 129, 300)]
    ask = dict(temperature=0, logprobs=1, seed=1234, echo=True, model="any")
    reply = s.complete(prompt=prompts, max_tokens=1, **ask)
    for prompt, choice in zip(prompts, reply["choices"]):
        l = choice["logprobs"]
        values, tops = l["token_logprobs"], l["top_logprobs"]
        check(len(values) == len(tops) == len(l["tokens"]) == len(prompt) + 1, "lengths", l)
        check(values[0] is None and tops[0] is None, "the first token has no probability")
        for value, top in zip(values[1:], tops[1:]):
            check(top and math.isfinite(value) and value <= max(top.values()) <= 0.0, value, top)
        check(values[-1] == max(tops[-1].values()), "greedy is the largest, exactly")
    alone = s.complete(prompt=[prompts[4]], max_tokens=1, **ask)["choices"][0]["logprobs"]
    check(alone == reply["choices"][4]["logprobs"], "scores depend on the company")
    none = s.complete(prompt=[prompts[3]], max_tokens=0, **ask)["choices"][0]["logprobs"]
    check(len(none["token_logprobs"]) == 17, "max_tokens 0 with echo")
    return prompts, reply


def scores_of_eval(s, prompts, reply):
    """The same numbers as mneme eval, to 1e-4."""
    ids = prompts[6]
    tokens, out = os.path.join(FOLDER, "tokens.bin"), os.path.join(FOLDER, "logits.safetensors")
    with open(tokens, "wb") as f:
        f.write(struct.pack(f"<{len(ids)}H", *ids))
    done = subprocess.run([MNEME, "eval", "--model", MODEL, "--tokens", tokens, "--logits", out],
                          capture_output=True, text=True)
    if not check(done.returncode == 0, "mneme eval", done.stderr):
        return
    blob = open(out, "rb").read()
    size, = struct.unpack_from("<Q", blob)
    about = json.loads(blob[8:8 + size])["logits"]
    width = about["shape"][-1]
    start = 8 + size + about["data_offsets"][0]
    told = reply["choices"][6]["logprobs"]["token_logprobs"]
    worst = 0.0
    for t in range(len(ids) - 1):
        row = struct.unpack_from(f"<{width}f", blob, start + 4 * width * t)
        top = max(row)
        want = row[ids[t + 1]] - top - math.log(math.fsum(math.exp(x - top) for x in row))
        worst = max(worst, abs(want - told[t + 1]))
    check(worst < 1e-4, "log probabilities differ from those of mneme eval by", worst)


def streams(s):
    body = dict(prompt="a stream", max_tokens=40, seed=9, logprobs=2)
    whole = s.complete(**body)["choices"][0]
    parts = events(s, {**body, "stream_options": {"include_usage": True}})
    check("".join(p["choices"][0]["text"] for p in parts[:-1]) == whole["text"], "streamed text")
    check(parts[-1]["choices"] == [] and parts[-1]["usage"]["completion_tokens"] == 40, "usage")
    check(parts[-2]["choices"][0]["finish_reason"] == "length", parts[-2])
    values = [v for p in parts[:-1] if p["choices"][0]["logprobs"]
              for v in p["choices"][0]["logprobs"]["token_logprobs"]]
    check(values == whole["logprobs"]["token_logprobs"], "streamed log probabilities")
    both = events(s, dict(prompt=["x", "y"], max_tokens=5, seed=3))
    for i, prompt in enumerate("xy"):
        text = "".join(p["choices"][0]["text"] for p in both if p["choices"][0]["index"] == i)
        check(text == s.text(prompt=prompt, max_tokens=5, seed=3), "stream of two", i)


def stops(s):
    text = s.text(prompt="stop here", max_tokens=60, seed=4)
    for a, b in ((5, 6), (10, 13), (30, 32)):
        stop = text[a:b]
        want = text[:text.index(stop)]
        reply = s.complete(prompt="stop here", max_tokens=60, seed=4, stop=["never", stop])
        check(reply["choices"][0]["text"] == want, "stop", repr(stop))
        check(reply["choices"][0]["finish_reason"] == "stop", "reason")
        streamed = events(s, dict(prompt="stop here", max_tokens=60, seed=4, stop=stop))
        check("".join(p["choices"][0]["text"] for p in streamed) == want, "streamed stop")


def same_text_in_any_company(s):
    prompts = ["p%d " % i * (1 + i * 3) for i in range(24)]
    ask = lambda i: dict(prompt=prompts[i], max_tokens=30, seed=i, cache_prompt=False)
    alone = [s.text(**ask(i)) for i in range(24)]
    with concurrent.futures.ThreadPoolExecutor(24) as pool:
        together = list(pool.map(lambda i: s.text(**ask(i)), range(24)))
    for i in range(24):
        check(alone[i] == together[i], "company changes the text of", i)
    for i in (3, 12, 23):    # and so does not what the cache holds: none of it, all, a part
        body = {**ask(i), "cache_prompt": True}
        check(s.text(**body) == alone[i] and s.text(**body) == alone[i], "the cache changes", i)
        longer = {**body, "prompt": prompts[i] + "and more " * 20}
        cold = s.text(**{**longer, "cache_prompt": False})
        check(s.text(**longer) == cold, "a prefix from the cache changes", i)


def cache_tells(s):
    before = s.metric("mneme_cache_hits_total")
    prompt = "the same beginning " * 30
    s.complete(prompt=prompt, max_tokens=1)
    again = s.complete(prompt=prompt, max_tokens=1)["usage"]["prompt_tokens_details"]
    check(again["cached_tokens"] == len(prompt), "a whole prompt from the cache", again)
    part = s.complete(prompt=prompt + "x" * 10, max_tokens=1)["usage"]["prompt_tokens_details"]
    check(len(prompt) - 128 <= part["cached_tokens"] <= len(prompt), "a prefix", part)
    check(s.metric("mneme_cache_hits_total") == before + 2, "hits in /metrics")


def states(s):
    full = s.text(prompt="once upon a time", max_tokens=20, seed=2)
    _, a = s.ask("POST", "/v1/states", {"prompt": "once upon a time"})
    check(a["position"] == 16 and a["kind"] == "state", a)
    go_on = lambda i, **more: s.complete(prompt="", state=i, max_tokens=20, seed=2, **more)
    check(go_on(a["id"])["choices"][0]["text"] == full, "a state goes on as its prompt does")
    check(go_on(a["id"])["choices"][0]["text"] == full, "a state stays as it is")
    _, snapshot = s.ask("POST", f"/v1/states/{a['id']}/snapshot")
    _, fork = s.ask("POST", f"/v1/states/{a['id']}/fork")
    check(snapshot["kind"] == "snapshot" and fork["id"] != a["id"], snapshot, fork)
    status, fed = s.ask("POST", f"/v1/states/{a['id']}/feed", {"prompt": " and a place"})
    check(status == 200 and fed["position"] == 28 and fed["id"] == a["id"], fed)
    check(go_on(fork["id"])["choices"][0]["text"] == full, "a fork goes on by itself")
    status, _ = s.ask("POST", f"/v1/states/{snapshot['id']}/feed", {"prompt": "x"})
    check(status == 400, "a snapshot was fed")
    status, back = s.ask("POST", f"/v1/states/{a['id']}/restore", {"snapshot": snapshot["id"]})
    check(status == 200 and back["position"] == 16, back)
    check(go_on(a["id"])["choices"][0]["text"] == full, "a restored state")
    kept = go_on(a["id"], keep=True)["choices"][0]
    _, more = s.ask("GET", f"/v1/states/{kept['state']}")
    check(more["position"] == 36, "a kept state has read what was written", more)
    status, blob = s.ask("GET", f"/v1/states/{a['id']}/content")
    check(status == 200 and len(blob) > 1000, "download")
    status, up = s.ask("PUT", "/v1/states", blob)
    check(status == 200 and go_on(up["id"])["choices"][0]["text"] == full, "upload", up)
    status, listed = s.ask("GET", "/v1/states")
    check({a["id"], fork["id"], up["id"]} <= {x["id"] for x in listed["data"]}, listed)
    for x in listed["data"]:
        check(s.ask("DELETE", f"/v1/states/{x['id']}")[0] == 200, "delete")
    check(s.ask("GET", f"/v1/states/{a['id']}")[0] == 404, "a deleted state")
    check(s.metric("mneme_state_bytes") == 0, "memory of deleted states")
    return blob


def beliefs(s):
    status, b = s.ask("POST", "/v1/belief", {"prompt": "how sure?"})
    check(status == 200 and len(b["variance"]) == 9 and b["tokens"][0] == "h", b)
    check(all(v > 0 for row in b["variance"] for v in row), "variances", b)
    parts = s.ask("POST", "/v1/belief", {"prompt": "na\u00efve"})[1]
    check("".join(parts["pieces"]) == "na\u00efve" and parts["pieces"][2] == "", "pieces", parts["pieces"])
    told = s.complete(prompt="how sure?", max_tokens=5, seed=1, belief=True)["choices"][0]
    check(told["belief"]["variance"][:9] == b["variance"], "of a prompt")
    check(len(told["belief"]["variance"]) == 14, "of what was written")
    check(told["text"] == s.text(prompt="how sure?", max_tokens=5, seed=1), "looking changes it")


def inside(s):
    """By head, gains, and rows of Kalman attention: of a prompt, of a state, behind a state."""
    text = "what is in the memory? " * 12    # more than one chunk
    def look(**body):
        status, reply = s.ask("POST", "/v1/belief", body)
        check(status == 200, "inside", body, reply)
        return reply
    whole = look(prompt=text, rows=[0, 200, -1])
    n, layers = len(text), whole["layers"]
    check(len(whole["head_variance"]) == len(whole["gain"]) == n == len(whole["tokens"]), "lengths")
    for row, gains, means in zip(whole["head_variance"], whole["gain"], whole["variance"]):
        check(all(0 < g < 1 for g in gains) and len(gains) == len(whole["heads"]), "gains", gains)
        for layer, mean in zip(layers, means):
            own = [v for (l, _), v in zip(whole["heads"], row) if l == layer]
            check(own and abs(sum(own) / len(own) - mean) < 1e-3 * mean, "heads", layer, own, mean)
    rows = whole["attention"]
    check([len(r["weights"]) for r in rows] == [1, 201, n], "rows", [len(r["weights"]) for r in rows])
    for r in rows:
        check(r["digits"] > 4 and r["before"] == 0, "a row is not what the layer reads", r["digits"])
        check(min(r["weights"]) >= 0 and max(r["weights"]) > 0, "weights", r["layer"])
    _, state = s.ask("POST", "/v1/states", {"prompt": text[:100]})
    _, state = s.ask("POST", f"/v1/states/{state['id']}/feed", {"prompt": text[100:]})
    check(look(state=state["id"], rows=[0, 200, -1]) == whole, "a look at a state")
    more = look(state=state["id"], prompt=" yes", rows=[-1])
    check(len(more["tokens"]) == n + 4, "a look at a state and more")
    _, blob = s.ask("GET", f"/v1/states/{state['id']}/content")
    _, up = s.ask("PUT", "/v1/states", blob)
    status, reply = s.ask("POST", "/v1/belief", {"state": up["id"], "rows": [-1]})
    check(status == 400 and "prompt" in reply["error"]["message"], "what an upload has read", reply)
    behind = look(state=up["id"], prompt=" yes", rows=[-1])
    check(len(behind["tokens"]) == 4 and behind["attention"][0]["digits"] > 4, behind["attention"])
    check(behind["attention"][0]["before"] > 0, "what was read before weighs something")
    for a, b in zip(behind["head_variance"], more["head_variance"][n:]):
        check(all(abs(x - y) < 1e-4 * y for x, y in zip(a, b)), "behind a state", a, b)
    for body in ({"rows": [0] * 17}, {"rows": [n]}, {"rows": [-n - 1]}, {"rows": 5}, {"rows": ["a"]},
                 {"rows": [2**40]}, {"inside": 1}, {"prompt": [1] * 5000, "inside": True}):
        status, reply = s.ask("POST", "/v1/belief", {"prompt": text, **body})
        check(status == 400 and reply["error"]["message"], "not refused", body, status, reply)
    for i in (state, up):
        s.ask("DELETE", "/v1/states/" + i["id"])


def small_routes(s):
    _, t = s.ask("POST", "/tokenize", {"prompt": "ab", "add_special_tokens": False})
    check(t["tokens"] == [97, 98], t)
    _, d = s.ask("POST", "/detokenize", {"tokens": [97, 98]})
    check(d == {"prompt": "ab"}, d)
    _, info = s.ask("GET", "/tokenizer_info")
    check({"eos_token", "bos_token", "pad_token", "chat_template"} <= set(info), info)
    _, models = s.ask("GET", "/v1/models")
    check(models["data"][0]["object"] == "model", models)
    _, api = s.ask("GET", "/openapi.json")
    check("post" in api["paths"]["/v1/completions"] and "{id}" in "".join(api["paths"]), "openapi")
    status, page = s.ask("GET", "/")
    check(status == 200 and b"<!doctype html>" in page[:200].lower(), "page")
    status, chat = s.ask("POST", "/v1/chat/completions",
                         {"messages": [{"role": "user", "content": "hi"}]})
    check(status == 200 or (status == 400 and "template" in chat["error"]["message"]), chat)


def token_stops(s):
    text = s.text(prompt="stop here", max_tokens=60, seed=4)
    reply = s.complete(prompt="stop here", max_tokens=60, seed=4, logprobs=0)["choices"][0]
    names = reply["logprobs"]["tokens"]
    at = next(i for i, t in enumerate(names) if i > 3 and len(t) == 1 and t not in names[:i])
    cut = s.complete(prompt="stop here", max_tokens=60, seed=4, stop_token_ids=[ord(names[at])])
    check(cut["choices"][0]["finish_reason"] == "stop", "reason of a token that stops")
    check(cut["usage"]["completion_tokens"] == at + 1, "a token that stops", cut["usage"], at)
    kept = s.text(prompt="stop here", max_tokens=60, seed=4, stop=text[5:7],
                  include_stop_str_in_output=True)
    check(kept == text[:text.index(text[5:7]) + 2], "a stop that stays", kept)


def chats():
    """The template of a folder, with tools; a random model calls none."""
    folder = os.path.join(FOLDER, "chat")
    shutil.copytree(MODEL, folder)
    with open(os.path.join(folder, "chat_template.jinja"), "w") as f:
        f.write("{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}{% for m in messages %}"
                "{{ m.role }}: {{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.arguments."
                "city }}{% endfor %}.{% endfor %}{% if add_generation_prompt %}>{% endif %}")
    s = Server(model=folder)
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
    user = {"role": "user", "content": "hi"}
    def chat(**body):
        status, reply = s.ask("POST", "/v1/chat/completions", {"max_tokens": 5, "seed": 1, **body})
        check(status == 200, "chat", body, reply)
        return reply
    plain = chat(messages=[user])
    message = plain["choices"][0]["message"]
    check(plain["usage"]["prompt_tokens"] == len("user: hi.>"), plain["usage"])
    check(message["content"] == s.text(prompt="user: hi.>", max_tokens=5, seed=1), message)
    parts = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    check(chat(messages=parts)["choices"][0]["message"] == message, "parts of text")
    told = chat(messages=[user], tools=tools, tool_choice="auto")
    check(told["usage"]["prompt_tokens"] == len("[weather]user: hi.>"), told["usage"])
    none = chat(messages=[user], tools=tools, tool_choice="none")
    check(none["choices"][0]["message"] == message, "no tools")
    called = {"role": "assistant", "content": "", "tool_calls": [
        {"id": "1", "type": "function", "function": {"name": "weather",
                                                     "arguments": '{"city": "Oslo"}'}}]}
    asked = chat(messages=[user, called])["usage"]["prompt_tokens"]
    check(asked == len("user: hi.assistant: Oslo.>"), "arguments of a call", asked)
    for body in ({"tool_choice": "required"}, {"tool_choice": {"type": "function"}}, {"tools": 5},
                 {"messages": []}, {"messages": [{"content": "x"}]}):
        status, reply = s.ask("POST", "/v1/chat/completions", {"messages": [user], **body})
        check(status == 400 and reply["error"]["message"], "not refused", body, reply)
    s.stop()


# ---- what others send ------------------------------------------------------------------------

def refusals(s):
    bad = [b"", b"{", b"[]", b"null", b"{\"prompt\": \"\xff\xfe\"}", b"\xff" * 100, b"[" * 100000,
           b'{"prompt": "a", "temperature": NaN}', b'{"prompt": "a", "temperature": 1e999}',
           b'{"prompt": "a", "prompt": "b"}', b'{"prompt": "\\ud800"}', b'{"prompt": "a\\u0000b"}',
           b'{"max_tokens": 4}']
    for prompt in (1, True, None, {}, [True], [1.5], ["a", 1], [[1], "a", {}], [-1], [10**6],
                   [2**63], [[2**31]], [[[1]]], ["a"] * 300, "x" * 200000):
        bad.append(json.dumps({"prompt": prompt}).encode())
    for key, values in {
            "temperature": (-1, "1", [], 1e30, True), "top_p": (-0.1, 1.1, "x"), "top_k": (1.5, "2"),
            "max_tokens": (-1, 10**18, "4", 1.5), "n": (0, -1, 1000, "2"), "logprobs": (-1, 99, "x"),
            "stop": (1, [1], ["a"] * 17, {}), "seed": ("a", 1.5), "stream": ("yes", 1),
            "stream_options": (1, {"include_usage": 1}), "echo": (1,), "state": (1, "zz", "0" * 31),
            "presence_penalty": (1,), "logit_bias": ({"1": 5},), "suffix": ("x",), "best_of": (3,),
            "response_format": ({"type": "json_object"},), "grammar": ("root",), "unknown": (1,),
            "stop_token_ids": (5, ["a"], [-1], [1] * 17), "n_predict": (-2,), "mirostat": (1,),
            "guided_regex": ("a*",), "lora": ([{"id": 0}],), "bad_words": (["x"],),
            "min_p": (2,), "repetition_penalty": (-1, 1e9), "model": (5,)}.items():
        bad += [json.dumps({"prompt": "a", key: v}).encode() for v in values]
    for body in bad:
        status, reply = s.ask("POST", "/v1/completions", body)
        fine = status == 400 and reply["error"]["message"] and reply["error"]["code"] == 400
        check(fine, "not refused", body[:80], status, reply)
    for body in ({"prompt": "a", "user": "me", "presence_penalty": 0, "frequency_penalty": 0.0,
                  "best_of": 1, "suffix": None, "logit_bias": {}, "top_k": -1,
                  "response_format": {"type": "text"}},
                 {"prompt": "a", "speculative.n_max": 4, "mirostat_tau": 5.0, "bad_words": [],
                  "tfs_z": 1.0, "samplers": None, "truncate_prompt_tokens": None}):
        s.complete(max_tokens=1, **body)
    status, reply = s.ask("POST", "/v1/completions", {"prompt": "a", "state": "0" * 32})
    check(status == 400 and "state" in reply["error"]["message"], "a state that is not there", reply)
    for path in ("/tokenize", "/detokenize", "/v1/states", "/v1/belief", "/v1/chat/completions"):
        for body in (b"{", b"[]", b'{"prompt": 5, "tokens": 5, "messages": 5}', b"\xff\x00"):
            status, reply = s.ask("POST", path, body)
            check(status == 400, "not refused", path, body, status, reply)
    check(s.ask("POST", "/detokenize", {"tokens": [-1, 5]})[0] == 400, "an id below 0")
    for path in ("/..", "/../../etc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "//", "/v1/states/../x",
                 "/v1/states/" + "0" * 5000, "/v1/states/%00", "/v1/completions/", "/" + "a" * 9000):
        status, _ = s.ask("GET", path)
        check(status in (400, 404, 405, 414, 431), "path", path[:60], status)
    s.healthy("refusals")


def hard_clients(s):
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
    out = s.raw(head + b"Content-Length: 1000000000\r\n\r\n{")
    check(b" 413 " in out.split(b"\r\n")[0], "a body of 1 GB", out[:200])
    check(b"application/json" in out, "with a reason")
    chunk = b"10000\r\n" + b"a" * 0x10000 + b"\r\n"
    out = s.raw(head + b"Transfer-Encoding: chunked\r\n\r\n" + chunk * 400 + b"0\r\n\r\n", 20)
    check(b" 413 " in out.split(b"\r\n")[0] and b'"error"' in out, "a body without an end", out[:100])
    out = s.raw(head + b"".join(b"X-%d: %s\r\n" % (i, b"a" * 1000) for i in range(5000)) + b"\r\n")
    check(not out or b" 4" in out.split(b"\r\n")[0], "a flood of header lines", out[:100])
    for junk in (b"\0" * 1000, b"GET\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"\x16\x03\x01\x02\x00",
                 head + b"Content-Length: -5\r\n\r\n", head + b"Content-Length: x\r\n\r\n"):
        s.raw(junk, 1)
    slow = []
    for i in range(3000):   # connections that say little or nothing
        c = socket.create_connection(("127.0.0.1", s.port))
        c.sendall([b"", b"GET /hea", head + b"Content-Length: 50\r\n\r\n{\"pro"][i % 3])
        slow.append(c)
    start = time.time()
    s.complete(prompt="quick", max_tokens=2)
    check(time.time() - start < 10, "slow clients hold up others")
    for c in slow:
        c.close()
    s.healthy("hard clients")


def cut_states(s, blob):
    rng = random.Random(11)
    cuts = [0, 1, 7, 8, 9, 100, len(blob) // 2, len(blob) - 1]
    blobs = [blob[:n] for n in cuts] + [blob + b"x", b"\xff" * 64, struct.pack("<Q", 2**63) + blob]
    size, = struct.unpack_from("<Q", blob)
    for _ in range(150):
        b = bytearray(blob)
        for _ in range(rng.randrange(1, 4)):
            b[rng.randrange(8 + size if rng.random() < 0.9 else len(b))] = rng.randrange(256)
        blobs.append(bytes(b))
    taken = 0
    for b in blobs:
        status, reply = s.ask("PUT", "/v1/states", b)
        if not check(status in (200, 400), "an altered state", status, reply):
            continue
        if status == 200:
            taken += 1
            status, more = s.ask("POST", "/v1/completions", {"prompt": "go", "state": reply["id"],
                                                             "max_tokens": 3})
            check(status in (200, 400, 500), "a state that lies", status, more)
            s.ask("DELETE", "/v1/states/" + reply["id"])
        else:
            check(FOLDER not in reply["error"]["message"] and reply["error"]["message"], reply)
    s.healthy(f"{len(blobs)} altered states, {taken} of them taken")


def leaving(s):
    before = s.metric("mneme_requests_cancelled_total")
    body = json.dumps({"prompt": "a", "max_tokens": 100000, "ignore_eos": True}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
    c = socket.create_connection(("127.0.0.1", s.port))
    c.sendall(head % len(body) + body)
    time.sleep(0.3)
    c.close()
    streamed = body[:-1] + b', "stream": true}'
    c = socket.create_connection(("127.0.0.1", s.port))
    c.sendall(head % len(streamed) + streamed)
    c.recv(1000)
    c.close()
    for _ in range(1200):
        if s.metric("mneme_requests_cancelled_total") >= before + 2:
            break
        time.sleep(0.1)
    check(s.metric("mneme_requests_cancelled_total") == before + 2, "cancelled requests run on")
    check(s.metric("mneme_sequences_active") == 0, "their sequences are there")


def other_servers():
    s = Server("--queue", "2", "--streams", "2", "--context", "400", env={"MNEME_API_KEY": "s3cret"})
    key = {"Authorization": "Bearer s3cret"}
    for given in ({}, {"Authorization": "Bearer "}, {"Authorization": "Bearer s3cre"},
                  {"Authorization": "Bearer s3crets3cret"}, {"Authorization": "Basic s3cret"}):
        status, reply = s.ask("POST", "/v1/completions", {"prompt": "a"}, given)
        check(status == 401 and reply["error"]["code"] == 401, "without the key", given, status)
    check(s.ask("GET", "/v1/models", headers=key)[0] == 200, "with the key")
    check(s.ask("GET", "/health")[0] == 200, "health needs no key")
    evil = {**key, "Origin": "http://evil.example"}
    check(s.ask("GET", "/v1/models", headers=evil)[0] == 403, "another origin")
    body = {"prompt": "a" * 300, "max_tokens": 101}
    check(s.ask("POST", "/v1/completions", body, key)[0] == 400, "more than the context")
    left = {"prompt": "a" * 390, "n_predict": -1, "ignore_eos": True}
    usage = s.ask("POST", "/v1/completions", left, key)[1]["usage"]
    check(usage["completion_tokens"] == 10, "n_predict -1: what is left", usage)
    busy = {"prompt": "a", "max_tokens": 399, "ignore_eos": True}
    with concurrent.futures.ThreadPoolExecutor(24) as pool:
        done = list(pool.map(lambda i: s.ask("POST", "/v1/completions", busy, key)[0], range(24)))
    check(set(done) <= {200, 429} and done.count(200) >= 2, "a full queue", done)
    s.stop()
    s = Server("--drain", "60")    # what runs when the server ends is finished
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        running = pool.submit(s.complete, prompt="end", max_tokens=2000, ignore_eos=True)
        while s.metric("mneme_sequences_active") == 0 and not running.done():
            time.sleep(0.01)
        s.stop()
        check(running.result()["usage"]["completion_tokens"] == 2000, "cut by the end")


def reloads():
    """A model is read again: what runs ends with the one before, the next request has the new one."""
    folder = os.path.join(FOLDER, "replaced")
    shutil.copytree(MODEL, folder)
    s = Server("--draft", "0", model=folder)
    ask = dict(prompt="which model?", max_tokens=3000, ignore_eos=True, seed=3)
    short = {**ask, "max_tokens": 30}
    old, before = s.text(**short), s.text(**ask)
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        running = [pool.submit(s.text, **ask) for _ in range(3)]
        while s.metric("mneme_sequences_active") < 3 and not running[0].done():
            time.sleep(0.01)
        weights = os.path.join(folder, "model.safetensors")
        data = bytearray(open(weights, "rb").read())
        for i in range(len(data) - 4000, len(data), 4):    # the last tensor, other numbers
            data[i + 2] ^= 0x40
        with open(weights + ".new", "wb") as f:
            f.write(data)
        os.replace(weights + ".new", weights)
        told = s.metric("mneme_requests_total")
        s.process.send_signal(signal.SIGHUP)
        while s.metric("mneme_reloads_total") < 1:
            time.sleep(0.01)
        check(s.text(**short) != old, "the model is still the old one")
        check([r.result() for r in running] == [before] * 3, "requests were cut by a reload")
    check(s.metric("mneme_requests_total") > told, "counts begin again")
    new = s.text(**short)
    with open(weights, "wb") as f:
        f.write(b"no model")
    s.process.send_signal(signal.SIGHUP)
    time.sleep(1)
    check(s.text(**short) == new and s.metric("mneme_reloads_total") == 1, "a reload that failed")
    s.healthy("a reload that failed")
    s.stop()


def drips():
    """Clients that send one byte now and then are not waited for."""
    s = Server("--timeout", "2", "--seconds", "2")
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 500\r\n\r\n"
    kinds = {"header": b"GET /health HTTP/1.1\r\nX: ", "body": head}
    for kind, first in kinds.items():
        with socket.create_connection(("127.0.0.1", s.port), timeout=10) as c:
            c.sendall(first)
            c.setblocking(False)
            start, out, open_ = time.time(), b"", True
            while open_ and time.time() - start < 12:
                time.sleep(0.4)
                try:
                    c.sendall(b"a")
                    more = c.recv(1000)
                    out += more
                    open_ = bool(more)
                except BlockingIOError:
                    pass
                except OSError:
                    open_ = False
            check(not open_, "a dripping", kind, "was borne for", time.time() - start)
            if kind == "body":
                check(b" 408 " in out.split(b"\r\n")[0] and b'"error"' in out, "no reason", out)
    status, reply = s.ask("POST", "/v1/completions", {"prompt": "a", "max_tokens": 100000,
                                                      "ignore_eos": True})
    check(status == 503 and "longer" in reply["error"]["message"], "a request without an end", reply)
    s.healthy("drips")
    s.stop()


def guesses(s):
    """Tokens that are guessed and read ahead change no text."""
    plain = Server("--draft", "0")
    for i, (temperature, penalty) in enumerate(((0, 1), (0.3, 1), (1.0, 1), (0, 0.1), (1.0, 0.1))):
        ask = dict(prompt="again and again and again", max_tokens=300, seed=i, logprobs=1,
                   temperature=temperature, ignore_eos=True, repetition_penalty=penalty)
        with_, without = s.complete(**ask), plain.complete(**ask)    # below 1: it likes to repeat
        check(with_["choices"] == without["choices"], "guesses change a text at", temperature, penalty)
    check(s.metric("mneme_guessed_right_total") > 0, "no guess came true")
    check(plain.metric("mneme_guessed_tokens_total") == 0, "guesses with --draft 0")
    plain.stop()


def folder(name):
    path = os.path.join(FOLDER, name)
    shutil.rmtree(path, ignore_errors=True)
    os.makedirs(path)
    return path


def restarts():
    """Stored states and the state cache are found again by the next server, also after a kill."""
    cache, kept = folder("cache"), folder("kept")
    how = ("--cache-disk", cache, "--states-disk", kept, "--chunk", "32")
    prompt = "a prompt that is read once, " * 20
    ask = dict(prompt=prompt, max_tokens=12, seed=5)
    s = Server(*how)
    text = s.text(**ask)
    _, state = s.ask("POST", "/v1/states", {"prompt": "what was said before"})
    _, shot = s.ask("POST", f"/v1/states/{state['id']}/snapshot")
    _, empty = s.ask("POST", "/v1/states")
    _, gone = s.ask("POST", "/v1/states", {"prompt": "forgotten"})
    s.ask("DELETE", f"/v1/states/{gone['id']}")
    s.ask("POST", f"/v1/states/{state['id']}/feed", {"prompt": ", and more"})
    more = dict(prompt=" so", max_tokens=8, seed=2)
    told = {i: s.text(state=i, **more) for i in (state["id"], shot["id"])}
    s.stop()
    check(len(os.listdir(kept)) == 3, "files of states", os.listdir(kept))

    s = Server(*how)
    again = s.complete(**ask)
    cached = again["usage"]["prompt_tokens_details"]["cached_tokens"]
    check(again["choices"][0]["text"] == text, "another text from the cache on disk")
    check(cached == len(prompt), "found of a prompt after a restart", cached)
    longer = s.complete(**{**ask, "prompt": prompt + "and goes on"})
    check(longer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0, "a prefix after a restart")
    _, listed = s.ask("GET", "/v1/states")
    kinds = {x["id"]: x["kind"] for x in listed["data"]}
    check(kinds == {state["id"]: "state", shot["id"]: "snapshot", empty["id"]: "state"}, listed)
    check(all(s.text(state=i, **more) == told[i] for i in told), "states go on otherwise")
    status, _ = s.ask("POST", f"/v1/states/{shot['id']}/feed", {"prompt": "x"})
    check(status == 400, "a snapshot is fed after a restart", status)
    s.ask("POST", f"/v1/states/{state['id']}/restore", {"snapshot": shot["id"]})
    check(s.text(state=state["id"], **more) == told[shot["id"]], "restored after a restart")
    s.process.kill()
    s.process.wait()

    for name in os.listdir(cache):    # what is cut, or another server takes away, is read again
        with open(os.path.join(cache, name), "r+b") as f:
            f.truncate(os.path.getsize(f.name) // 2)
    s = Server(*how)
    check(s.text(**ask) == text, "a text after its files were cut")
    for name in os.listdir(cache):
        os.remove(os.path.join(cache, name))
    check(s.text(state=state["id"], **more) == told[shot["id"]], "a state after a kill")
    s.stop()
    s = Server(*how)
    for name in os.listdir(cache):
        os.remove(os.path.join(cache, name))
    check(s.text(**ask) == text, "a text after its files were removed")
    s.stop()
    n = len(os.listdir(cache))
    s = Server("--cache-disk", cache, "--states-disk", kept, "--chunk", "48")    # rounds otherwise
    reply = s.complete(**ask)
    check(reply["usage"]["prompt_tokens_details"]["cached_tokens"] == 0, "a cache of other chunks")
    check(len(os.listdir(cache)) >= n > 0, "files of others are left alone")
    s.stop()


def main():
    s = Server()
    forms_of_prompts(s)
    prompts, reply = scored_prompts(s)
    scores_of_eval(s, prompts, reply)
    streams(s)
    stops(s)
    token_stops(s)
    same_text_in_any_company(s)
    cache_tells(s)
    blob = states(s)
    beliefs(s)
    inside(s)
    guesses(s)
    small_routes(s)
    refusals(s)
    hard_clients(s)
    cut_states(s, blob)
    leaving(s)
    s.stop()
    other_servers()
    chats()
    reloads()
    drips()
    restarts()
    print(f"{len(failures)} failed")
    return len(failures) > 0


sys.exit(main())
