"""The page of `mneme serve` in a headless Chromium, as a person uses it: it loads, writes, colours,
looks inside, keeps snapshots, branches, copies a request, fits a small screen, and goes on after the
server was started again. Standard library only: Chromium is spoken to over its pipe.

usage: page.py MNEME MODEL [--chromium PATH] [--prompt TEXT] [--tokens N] [--screenshots FOLDER]
                                                           the model has a kla layer
"""
import argparse
import base64
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time

parser = argparse.ArgumentParser()
parser.add_argument("mneme")
parser.add_argument("model")
parser.add_argument("--chromium", default=shutil.which("chromium") or shutil.which("chromium-browser"))
parser.add_argument("--prompt", default="Once upon a time")
parser.add_argument("--tokens", type=int, default=40)
parser.add_argument("--screenshots")
args = parser.parse_args()
failures = []


def check(holds, *what):
    if not holds:
        failures.append(what)
        print("FAILED:", *what, flush=True)
    return holds


class Server:
    def __init__(self, port=0):
        self.process = subprocess.Popen([args.mneme, "serve", args.model, "--port", str(port),
                                         "--quiet", "--drain", "0"], stdout=subprocess.PIPE)
        self.url = self.process.stdout.readline().decode().strip()
        self.port = int(self.url.rsplit(":", 1)[1])

    def stop(self):
        self.process.send_signal(signal.SIGTERM)
        check(self.process.wait(60) == 0, "the server ended with", self.process.returncode)


class Browser:
    """One page of a Chromium, by its debugging protocol: JSON messages that end with a zero byte."""

    def __init__(self, url, folder):
        self.count, self.events, self.held = 0, [], b""
        read, out = os.pipe()
        into, self.write = os.pipe()
        sandbox = "--no-sandbox" if os.getuid() == 0 else ""
        command = (f'exec "{args.chromium}" --headless=new {sandbox} --disable-gpu --hide-scrollbars '
                   f"--disable-dev-shm-usage --no-first-run --remote-debugging-pipe "
                   f'--user-data-dir="{folder}" about:blank 3<&{into} 4>&{out}')
        self.process = subprocess.Popen(["sh", "-c", command], pass_fds=(into, out),
                                        stderr=subprocess.DEVNULL)
        os.close(into)
        os.close(out)
        self.read = read
        self.session = None
        target = self.call("Target.createTarget", url=url)["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(domain + ".enable")
        self.screen(1200, 900)

    def call(self, method, **params):
        self.count += 1
        message = {"id": self.count, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.write, json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self.held:
                more = os.read(self.read, 1 << 20)
                if not more:
                    raise SystemExit("Chromium has ended")
                self.held += more
            one, _, self.held = self.held.partition(b"\0")
            reply = json.loads(one)
            if reply.get("id") == self.count:
                if "error" in reply:
                    raise RuntimeError(f"{method}: {reply['error']}")
                return reply["result"]
            self.events.append(reply)

    def run(self, script):
        """The value of an expression in the page."""
        result = self.call("Runtime.evaluate", expression=script, awaitPromise=True,
                           returnByValue=True, userGesture=True)
        if "exceptionDetails" in result:
            raise RuntimeError(f"{script}: {result['exceptionDetails']}")
        return result["result"].get("value")

    def wait(self, script, what, seconds=60):
        end = time.time() + seconds
        while time.time() < end:
            value = self.run(script)
            if value:
                return value
            time.sleep(0.1)
        check(False, "waited in vain for", what, "- it says:",
              self.run("document.getElementById('said').textContent"))

    def key(self, key, code=0, modifiers=0):
        for kind in ("rawKeyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key,
                      windowsVirtualKeyCode=code, modifiers=modifiers)

    def screen(self, width, height, scale=1):
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height,
                  deviceScaleFactor=scale, mobile=width < 600)

    def colours(self, scheme):
        self.call("Emulation.setEmulatedMedia",
                  features=[{"name": "prefers-color-scheme", "value": scheme}])

    def picture(self, name, height=None):
        if not args.screenshots:
            return
        os.makedirs(args.screenshots, exist_ok=True)
        if height is None:
            height = self.run("document.documentElement.scrollHeight")
        width = self.run("innerWidth")
        self.screen(width, height)
        time.sleep(0.4)
        data = self.call("Page.captureScreenshot", format="png")["data"]
        with open(os.path.join(args.screenshots, name), "wb") as f:
            f.write(base64.b64decode(data))
        self.screen(width, 900)

    def errors(self):
        """What the page complained of; a server that was away is none."""
        out = []
        for e in self.events:
            if e.get("method") == "Runtime.exceptionThrown":
                out.append(e["params"]["exceptionDetails"])
            if e.get("method") == "Log.entryAdded" and e["params"]["entry"]["level"] == "error":
                text = e["params"]["entry"]["text"]
                if "ERR_CONNECTION" not in text and "status of 400" not in text:
                    out.append(text)
        return out

    def close(self):
        self.session = None
        self.call("Browser.close")
        self.process.wait(30)


IDLE = "!branches.some((b) => b.busy) && branches.length"


def press(b, branch, name):
    b.run(f"branches[{branch}].buttons[{json.dumps(name)}].click()")


def tokens(b, branch=0):
    return b.run(f"branches[{branch}].tokens.length")


def loads_and_writes(b):
    b.wait("typeof model != 'undefined' && model && document.getElementById('model').textContent.includes('parameters')", "the model")
    b.run(f"document.getElementById('prompt').value = {json.dumps(args.prompt)};"
          f"document.getElementById('max_tokens').value = {args.tokens}")
    b.run("document.getElementById('prompt').focus()")
    b.key("Enter", 13, 2)    # with control
    b.wait("branches.length == 1", "a branch")
    b.wait(IDLE, "the end of writing")
    prompt = b.run("branches[0].tokens.filter((t) => t.node.classList.contains('prompt')).length")
    check(tokens(b) == prompt + args.tokens, "tokens", tokens(b), prompt)
    time.sleep(0.3)
    bare = b.run("branches[0].tokens.filter((t) => !t.node.style.background).length")
    shades = b.run("new Set(branches[0].tokens.map((t) => t.node.style.background)).size")
    check(bare == 0 and shades >= 4, "colours:", bare, "tokens without,", shades, "shades")
    meta = b.run("branches[0].meta.textContent")
    check("tokens" in meta and "B" in meta and "old" in meta, "size and age of the state", meta)


def looks_inside(b):
    at = tokens(b) - 5
    b.run(f"branches[0].tokens[{at}].node.click()")
    b.wait("document.querySelectorAll('#heads .head').length", "heads")
    b.run("branches[0].text.focus()")
    b.key("ArrowRight", 39)
    check(b.run("chosen.i") == at + 1, "an arrow moves along the tokens")
    b.wait(f"document.querySelectorAll('.kalman').length && "
           f"document.querySelector('.kalman').children.length == {at + 2}", "Kalman attention")
    heads = b.run("document.querySelectorAll('#heads .head').length")
    layers = b.run("document.querySelectorAll('#heads .cells').length")
    check(layers == b.run("model.beliefs") and heads >= layers, "heads", heads, "layers", layers)
    print(f"{layers} layers, {heads} heads, rows of {at + 2} tokens")
    b.picture("serve-light.png")


def branches_off(b):
    first = tokens(b)
    press(b, 0, "Snapshot")
    b.wait("!branches[0].buttons.Back.disabled", "a snapshot")
    press(b, 0, "Continue")
    b.wait("branches[0].busy", "writing", 10)
    b.wait(IDLE, "the end of going on")
    check(tokens(b) == first + args.tokens, "going on", tokens(b))
    press(b, 0, "Back")
    b.wait(f"branches[0].tokens.length == {first}", "the snapshot")
    press(b, 0, "Branch")
    b.wait("branches.length == 2", "a second branch")
    b.wait(IDLE, "the end of both")
    texts = b.run("branches.map((b) => b.tokens.map((t) => t.text).join(''))")
    check(len(texts[0]) > 0 and texts[0] != texts[1], "two continuations", texts)
    side = b.run("branches[0].node.getBoundingClientRect().top == branches[1].node.getBoundingClientRect().top")
    check(side, "they stand side by side")
    b.run("branches[1].tokens[branches[1].tokens.length - 3].node.click()")
    b.wait("document.querySelectorAll('.kalman').length", "a look at the second")
    b.colours("dark")
    b.picture("serve-dark.png")
    b.colours("light")


def copies(b):
    b.run("navigator.clipboard.writeText = async (t) => { window.copied = t; }")
    b.run("document.getElementById('write').click()")
    b.wait("branches.length == 1 && branches[0].busy", "writing", 20)
    b.wait(IDLE, "the end of writing")
    written = b.run("branches[0].tokens.filter((t) => !t.node.classList.contains('prompt'))"
                    ".map((t) => t.text).join('')")
    b.run("document.getElementById('curl').click()")
    command = b.wait("window.copied", "the command")
    if not command or not shutil.which("curl"):
        return
    out = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=120).stdout
    events = [json.loads(line[6:]) for line in out.splitlines() if line.startswith("data: {")]
    told = [t for e in events for c in e["choices"] for t in (c.get("belief") or {"tokens": []})["tokens"]]
    check(len(written) > 0 and "".join(told).endswith(written), "the copied command writes the same", command)


def survives(b, server):
    before = tokens(b)
    server.stop()
    press(b, 0, "Continue")
    b.wait("document.getElementById('model').textContent == 'no server'", "that it sees the end")
    again = Server(server.port)
    b.wait("!away && document.getElementById('model').textContent.includes('parameters')", "its return")
    press(b, 0, "Continue")
    b.wait("branches[0].busy", "writing", 10)
    b.wait(IDLE, "the end of going on")
    check(tokens(b) == before + args.tokens, "it goes on after a restart", before, tokens(b))
    return again


def small_screen(b):
    b.screen(360, 740, 2)
    time.sleep(0.3)
    check(b.run("document.documentElement.scrollWidth") <= 360, "a small screen scrolls sideways")
    b.picture("serve-small.png", 740)
    b.screen(1200, 900)


def main():
    server = Server()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        b = Browser(server.url + "/", folder)
        loads_and_writes(b)
        looks_inside(b)
        branches_off(b)
        copies(b)
        server = survives(b, server)
        small_screen(b)
        names = b.run("performance.getEntriesByType('resource').map((r) => r.name)")
        check(all(n.startswith(server.url) for n in names), "requests elsewhere", names)
        check(not b.errors(), "complaints", b.errors()[:3])
        b.close()
    server.stop()
    print(f"{len(failures)} failed")
    return len(failures) > 0


sys.exit(main())
