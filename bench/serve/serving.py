"""What the scripts of bench/serve share: a server as a process, requests, events, medians.
Standard library only."""
import http.client
import json
import os
import re
import selectors
import signal
import socket
import struct
import subprocess
import time


class Server:
    """mneme serve MODEL on a free port of the loopback."""

    def __init__(self, mneme, model, *options, env=None):
        self.process = subprocess.Popen([mneme, "serve", model, "--port", "0", "--quiet", *options],
                                        stdout=subprocess.PIPE, env={**os.environ, **(env or {})})
        line = self.process.stdout.readline().decode().strip()
        if not line:
            raise SystemExit("the server did not start")
        self.port = int(line.rsplit(":", 1)[1])
        self.url = f"http://127.0.0.1:{self.port}"

    def ask(self, method, path, body=None, timeout=600):
        c = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        c.request(method, path, None if body is None else json.dumps(body))
        reply = c.getresponse()
        content = reply.read()
        c.close()
        if reply.status != 200:
            raise RuntimeError(f"{path}: {reply.status} {content[:300]}")
        kind = reply.headers.get("Content-Type", "")
        return json.loads(content) if kind.startswith("application/json") else content

    def complete(self, **body):
        return self.ask("POST", "/v1/completions", body)

    def metric(self, name):
        text = self.ask("GET", "/metrics").decode()
        return float(re.search(rf"^{name} (\S+)$", text, re.M).group(1))

    def buckets(self, name):
        """Counts up to each bound of a histogram."""
        text = self.ask("GET", "/metrics").decode()
        return {float(b): int(n) for b, n in
                re.findall(rf'^{name}_bucket{{le="([^"]+)"}} (\d+)$', text, re.M)}

    def resident(self):
        """Bytes of memory the process holds."""
        with open(f"/proc/{self.process.pid}/status") as f:
            return int(re.search(r"^VmRSS:\s+(\d+) kB", f.read(), re.M).group(1)) << 10

    def stop(self):
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


class Stream:
    """A streamed completion on a socket of its own, read by Streams."""

    def __init__(self, port, body):
        data = json.dumps({**body, "stream": True}).encode()
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.start = time.perf_counter()
        self.socket.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
                            b"Content-Length: %d\r\n\r\n" % len(data) + data)
        self.socket.setblocking(False)
        self.first = None
        self.events = 0
        self.received = b""
        self.tail = self.last = b""

    def read(self):
        """False at the end."""
        more = self.socket.recv(1 << 16)
        if not more:
            self.socket.close()
            return False
        window = self.tail + more
        count = window.count(b"data: {")
        self.tail = window[-6:]
        if count and self.first is None:
            self.first = time.perf_counter() - self.start
        self.events += count
        if len(self.received) < 4096:
            self.received += more
        self.last = (self.last + more)[-64:]
        return True

    def good(self):
        return b" 200 " in self.received[:20] and b"[DONE]" in self.last


class Streams:
    """`n` streams at any time for some seconds: whoever ends is replaced by the next of `bodies`."""

    def __init__(self, port, n, bodies):
        self.port, self.bodies = port, bodies
        self.selector = selectors.DefaultSelector()
        self.ended, self.failed = [], []
        for _ in range(n):
            self.add()

    def add(self):
        s = Stream(self.port, next(self.bodies))
        self.selector.register(s.socket, selectors.EVENT_READ, s)

    def turn(self, replace):
        for key, _ in self.selector.select(0.2):
            s = key.data
            if s.read():
                continue
            self.selector.unregister(key.fileobj)
            (self.ended if s.good() else self.failed).append(s)
            if replace:
                self.add()

    def run(self, seconds, each_second=None):
        end = time.perf_counter() + seconds
        tick = time.perf_counter()
        while time.perf_counter() < end:
            self.turn(True)
            if each_second and time.perf_counter() >= tick:
                each_second()
                tick += 1.0

    def finish(self):
        while self.selector.get_map():
            self.turn(False)


def quantile(values, q):
    ordered = sorted(values)
    return ordered[min(int(q * len(ordered)), len(ordered) - 1)]


def table(rows):
    print("| what | measured | asked |\n|---|---|---|")
    for row in rows:
        print("| " + " | ".join(str(x) for x in row) + " |")


def random_model(make_model, folder, config):
    """A model of random weights, by the tests' make_model; one token a byte."""
    if not os.path.exists(os.path.join(folder, "model.safetensors")):
        os.makedirs(folder, exist_ok=True)
        subprocess.run([make_model, folder, json.dumps(config)], check=True)
    return folder


TEMPLATE = ("{% if tools %}<|tools|>{{ tools | tojson }}{% endif %}{% for m in messages %}<|{{ m.role }}|>{{ m.content or '' }}"
            "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|end|>{% endfor %}"
            "{% if add_generation_prompt %}<|assistant|>{% endif %}")


def chat_model(make_model, folder, config):
    """random_model whose tokenizer has an end of text, with a chat template that knows tools."""
    random_model(make_model, folder, {**config, "vocab_size": 260})
    with open(os.path.join(folder, "tokenizer.json")) as f:
        tokenizer = json.load(f)
    tokenizer["added_tokens"] = [{"id": 256, "content": "<|end|>", "single_word": False, "lstrip": False,
                                  "rstrip": False, "normalized": False, "special": True}]
    with open(os.path.join(folder, "tokenizer.json"), "w") as f:
        json.dump(tokenizer, f)
    with open(os.path.join(folder, "tokenizer_config.json"), "w") as f:
        json.dump({"eos_token": "<|end|>", "chat_template": TEMPLATE}, f)
    return folder


def deep_model(make_model, folder, config):
    """random_model of many layers, sooner: every layer has the random weights of the first."""
    weights = os.path.join(folder, "model.safetensors")
    if os.path.exists(weights):
        return folder
    depth = config["num_hidden_layers"]
    random_model(make_model, folder, {**config, "num_hidden_layers": 1})
    with open(weights, "rb") as f:
        size, = struct.unpack("<Q", f.read(8))
        header = json.loads(f.read(size))
        data = f.read()
    header.pop("__metadata__", None)
    pieces, out, at = [], {}, 0
    for name, about in header.items():
        start, end = about["data_offsets"]
        for layer in range(depth if ".layers.0." in name else 1):
            out[name.replace(".layers.0.", f".layers.{layer}.")] = {
                **about, "data_offsets": [at, at + end - start]}
            pieces.append((start, end))
            at += end - start
    text = json.dumps(out).encode()
    text += b" " * (-len(text) % 8)
    with open(weights, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        for start, end in pieces:
            f.write(memoryview(data)[start:end])
    with open(os.path.join(folder, "config.json")) as f:
        about = json.load(f)
    about["num_hidden_layers"] = depth
    with open(os.path.join(folder, "config.json"), "w") as f:
        json.dump(about, f)
    return folder
