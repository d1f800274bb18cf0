"""Tens of thousands of idle connections, and bodies of 1 GB, beside clients that mean well: how long
those wait, and what the server holds.

usage: idle.py MNEME MODEL [--connections 30000]      ulimit -n has to allow twice as many
"""
import argparse
import http.client
import json
import resource
import socket
import threading
import time

from serving import Server, quantile, table

parser = argparse.ArgumentParser()
parser.add_argument("mneme")
parser.add_argument("model")
parser.add_argument("--connections", type=int, default=30000)
args = parser.parse_args()
want = 2 * args.connections + 500
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
try:
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, want), max(hard, want)))
except (ValueError, OSError):
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    args.connections = min(args.connections, hard - 500)
rows = []


def answers(server, n):
    """Seconds that short completions take, each on a connection of its own."""
    took = []
    for i in range(n):
        start = time.perf_counter()
        server.complete(prompt="quick", max_tokens=4, seed=i)
        took.append(time.perf_counter() - start)
    return took


def body_of_a_gigabyte(server, chunked):
    """What a client gets that sends 1 GB, and how many bytes it was read."""
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
    head += b"Transfer-Encoding: chunked\r\n\r\n" if chunked else b"Content-Length: 1073741824\r\n\r\n"
    piece = b"100000\r\n" + b"a" * 0x100000 + b"\r\n" if chunked else b"a" * 0x100000
    sent, out = 0, b""
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as s:
        try:
            s.sendall(head)
            while sent < 1024:
                s.sendall(piece)
                sent += 1
        except OSError:
            pass
        try:
            out = s.recv(4096)
        except OSError:
            pass
    return out.split(b"\r\n")[0].decode() or "closed", sent


server = Server(args.mneme, args.model, "--connections", str(args.connections + 300), "--timeout", "300")
answers(server, 5)
before, alone = server.resident(), answers(server, 40)
idle, start = [], time.perf_counter()
first = [b"", b"GET /hea", b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 50\r\n\r\n{\"pro"]
for i in range(args.connections):
    s = socket.socket()
    s.setsockopt(socket.IPPROTO_IP, 24, 1)      # IP_BIND_ADDRESS_NO_PORT
    s.bind((f"127.0.{1 + i // 20000}.1", 0))    # one address has too few ports
    s.connect(("127.0.0.1", server.port))
    s.sendall(first[i % 3])
    idle.append(s)
opened = time.perf_counter() - start
held, beside = server.resident(), answers(server, 40)
rows += [("idle connections, opened in", f"{len(idle)}, {opened:.0f} s"),
         ("memory before, with them", f"{before / 2**20:.0f}, {held / 2**20:.0f} MiB"),
         ("bytes a connection", f"{(held - before) / len(idle):.0f}"),
         ("4 tokens alone, median and largest",
          f"{1e3 * quantile(alone, .5):.1f}, {1e3 * max(alone):.1f} ms"),
         ("4 tokens beside them, median and largest",
          f"{1e3 * quantile(beside, .5):.1f}, {1e3 * max(beside):.1f} ms")]
for s in idle:
    s.close()
for chunked in (False, True):
    took = []
    helper = threading.Thread(target=lambda: took.extend(answers(server, 20)))
    helper.start()
    line, sent = body_of_a_gigabyte(server, chunked)
    helper.join()
    rows.append((f"a body of 1 GB{', chunked' if chunked else ''}: answer, MiB sent before it ended",
                 f"{line}, {sent}"))
    rows.append(("4 tokens meanwhile, largest", f"{1e3 * max(took):.1f} ms"))
rows.append(("memory at the end", f"{server.resident() / 2**20:.0f} MiB"))
c = http.client.HTTPConnection("127.0.0.1", server.port)
c.request("GET", "/health")
rows.append(("health", json.loads(c.getresponse().read())["status"]))
rows.append(("exit status", server.stop()))
print("| what | measured |\n|---|---|")
for what, value in rows:
    print(f"| {what} | {value} |")
