"""documented.py MNEME SOURCE WORK - runs the commands that documents show: lines of fenced blocks
that begin with `mneme `, but for blocks marked `norun`, which take hours or go on from each other.
Each runs in a copy of a folder with the files, models and lists that pages name. Exit status 1 if one
fails."""
import concurrent.futures
import contextlib
import glob
import json
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import threading

SECONDS = 3
ELSEWHERE = ("--device cuda", "on a terminal")    # what this test has not
STORY = ("Once upon a time there was a river that knew the name of every stone. The stones did not "
         "know the river, and so it told them stories. ") * 400


def commands(page):
    """Line number and command of all that a page shows, without the comment behind it."""
    fenced = runs = False
    with open(page) as file:
        for number, line in enumerate(file, 1):
            if line.startswith("```"):
                fenced = not fenced
                runs = fenced and not line.rstrip().endswith(" norun")
            elif runs and line.startswith("mneme ") and not any(x in line for x in ELSEWHERE):
                yield number, re.sub(r"\s+#\s.*$", "", line.rstrip("\n"))


def write(path, text):
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    with open(path, "w" if isinstance(text, str) else "wb") as file:
        file.write(text)


def call(mneme, folder, *arguments):
    done = subprocess.run([mneme, *arguments], cwd=folder, capture_output=True, text=True)
    if done.returncode:
        sys.exit("FAILED to prepare: mneme %s\n%s" % (" ".join(arguments), done.stderr))


def prepare(mneme, source, folder):
    """What the pages name."""
    for name in ("book.txt", "other.txt", "held-out.txt", "letters.txt", "long.txt", "shakespeare.txt", "story.txt",
                 "books/one.txt", "books/two.txt"):
        write(os.path.join(folder, name), STORY)
    write(os.path.join(folder, "in.jsonl"), "".join(json.dumps({"text": STORY[:n]}) + "\n"
                                                    for n in (10, 20)))
    choice = {"context": "The river", "choices": [" knew", " told"], "answer": 0}
    write(os.path.join(folder, "hellaswag.jsonl"), json.dumps(choice) + "\n")
    write(os.path.join(folder, "key"), "0123456789abcdef0123456789abcdef\n")
    write(os.path.join(folder, "ids.bin"), struct.pack("<40H", *range(40)))
    call(mneme, folder, "tokenizer", "train", "--kind", "bytes", "-o", "gpt2/tokenizer.json")
    call(mneme, folder, "prepare", "book.txt", "--tokenizer", "gpt2", "--out",
         "prepared", "--valid", "0.2", "--quiet")
    for layer, name in (("gdn", "book"), ("gdn", "gdn"), ("kla", "kla")):
        call(mneme, folder, "train", "book.txt", "--out", "runs/" + name, "--layers", layer,
             "--size", "100k", "--steps", "4", "--quiet")
    call(mneme, folder, "generate", "--model", "runs/gdn", "--file", "story.txt", "--tokens", "0",
         "--save-state", "long.state")
    call(mneme, folder, "eval", "--model", "runs/kla/best", "--calibration", "--text", "held-out.txt",
         "--lengths", "64", "--rows", "8", "--save-calibration", "runs/kla/best/calibration.json")
    prepare_chat(folder)
    prepare_sweep(mneme, source, folder)


def prepare_chat(folder):
    """A model with a chat template, and a conversation."""
    model = os.path.join(folder, "qwen3")
    shutil.copytree(os.path.join(folder, "runs/book/best"), model)
    write(os.path.join(model, "chat_template.jinja"),
          "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: ")
    write(os.path.join(folder, "chat.json"), json.dumps([{"role": "user", "content": "Hello"}]))


def prepare_sweep(mneme, source, folder):
    """The jobs that the page on experiments shows, made short once and as they stand."""
    with open(source + "/docs/guide/reproducing.md") as page:
        shown = json.loads(re.search(r"```json\n(.*?)```", page.read(), re.S).group(1))
    short = json.loads(json.dumps(shown))
    short["job"]["train"]["steps"] = 2
    short["job"]["task"]["test"] = 8
    write(os.path.join(folder, "jobs.json"), json.dumps(short))
    call(mneme, folder, "sweep", "jobs.json", "--quiet")
    write(os.path.join(folder, "jobs.json"), json.dumps(shown))


def run(mneme, source, folder, command):
    """Exit status and complaints; an interrupt counts as the end that was asked for."""
    path = os.path.join(folder, ".bin")
    os.makedirs(path, exist_ok=True)
    os.symlink(mneme, os.path.join(path, "mneme"))
    there = dict(os.environ, PATH=path + os.pathsep + os.environ["PATH"])
    child = subprocess.Popen(["sh", "-c", "exec " + command], cwd=folder, env=there, text=True,
                             stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                             stderr=subprocess.PIPE, start_new_session=True)
    try:
        _, complaints = child.communicate(timeout=SECONDS)
        return child.returncode, complaints
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGINT)    # as a terminal does
    try:
        child.communicate(timeout=30)
        return 0, ""
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        child.communicate()
        return 1, "did not end after an interrupt"


def main(mneme, source, work):
    # a shell that starts this in the background has interrupts ignored, and children would inherit that
    signal.signal(signal.SIGINT, signal.default_int_handler)
    prepared, failed, count = os.path.join(work, "prepared"), 0, 0
    os.makedirs(prepared)
    prepare(mneme, source, prepared)
    pages = [os.path.join(source, "README.md")] + sorted(glob.glob(source + "/docs/guide/*.md"))
    shown = [(page, number, command) for page in pages for number, command in commands(page)]

    port = threading.Lock()    # servers that are shown listen at the same one

    def one(index):
        page, number, command = shown[index]
        folder = os.path.join(work, "here%d" % index)
        shutil.copytree(prepared, folder, symlinks=True)
        if command.startswith("mneme train ") and "--resume" not in command:
            for out in re.findall(r"--out (\S+)", command) or ["runs/book", "runs/gdn"]:
                if "--from " + out not in command:
                    shutil.rmtree(os.path.join(folder, out), ignore_errors=True)
        with port if command.startswith("mneme serve ") else contextlib.nullcontext():
            status, complaints = run(mneme, source, folder, command)
        shutil.rmtree(folder, ignore_errors=True)
        return page, number, command, status, complaints

    # two at a time: much of a command's time is that of starting, or of waiting for its three seconds
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        for page, number, command, status, complaints in pool.map(one, range(len(shown))):
            count += 1
            if status:
                failed += 1
                print("%s:%d: %s\n    exit status %d: %s" % (os.path.relpath(page, source), number,
                                                            command, status,
                                                            complaints.strip()[-300:]), flush=True)
    print("%d commands of the documents, %d failed" % (count, failed))
    return failed > 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
