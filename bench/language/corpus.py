#!/usr/bin/env python3
"""Makes a corpus of text from Debian packages of documentation and sources.

    bench/language/corpus.py OUT [--packages NAME,...] [--limit MB] [--keep DIR]

Downloads the packages named below by `apt-get download` (no root needed; `apt-get update` first), unpacks
them beside OUT and writes OUT/train.jsonl and OUT/valid.jsonl, a document a line ({"text": ...}), in the
order of packages and paths: manual pages, plain text, reStructuredText, Markdown, Texinfo, POD, the text of
HTML, and C, C++, Python, Lisp and Rust sources. Left out are documents of less than 200 characters, copies
of others, what is not UTF-8, and all of a package beyond --limit (24 MB), so that none outweighs the rest.
One document in 200, by a hash of its text, is held out. OUT/train.txt is the text to train on once more, for a
tokenizer. OUT/packages.txt names versions.
"""
import argparse
import gzip
import hashlib
import html.parser
import json
import os
import re
import subprocess
import sys
import tarfile

PACKAGES = """
manpages manpages-dev perl-doc python3.11-doc git-doc postgresql-doc-15 cmake-doc sqlite3-doc apache2-doc
debian-handbook debian-reference-en octave-doc maxima-doc rust-doc ghc-doc erlang-doc openjdk-17-doc
python-pandas-doc python-scipy-doc python-sympy-doc python-django-doc libboost1.74-doc vim-doc zsh-doc
bind9-doc guile-3.0-doc sbcl-doc linux-doc-6.1 dict-gcide dict-jargon bible-kjv-text miscfiles fortunes
glibc-source binutils-source gcc-12-source emacs-el sbcl-source
""".split()
TEXT = {".txt", ".rst", ".md", ".texi", ".texinfo", ".pod", ".org", ".adoc", ".info", ".tex"}
SOURCE = {".c", ".h", ".cc", ".cpp", ".hpp", ".py", ".el", ".lisp", ".rs", ".pl", ".pm", ".s", ".def"}
BLOCKS = {"p", "div", "li", "tr", "br", "pre", "h1", "h2", "h3", "h4", "h5", "h6", "table", "dt", "dd", "ul"}
PLAIN_PACKAGES = {"bible-kjv-text", "dict-gcide", "dict-jargon", "miscfiles", "fortunes"}


class Words(html.parser.HTMLParser):
    """The text of a page without scripts, styles and navigation."""

    def __init__(self):
        super().__init__(convert_charrefs=True)
        self.parts, self.hidden, self.pre = [], 0, 0

    def handle_starttag(self, tag, attrs):
        self.hidden += tag in ("script", "style", "nav", "head")
        self.pre += tag == "pre"
        if tag in BLOCKS:
            self.parts.append("\n")

    def handle_endtag(self, tag):
        self.hidden -= tag in ("script", "style", "nav", "head") and self.hidden > 0
        self.pre -= tag == "pre" and self.pre > 0
        if tag in BLOCKS:
            self.parts.append("\n")

    def handle_data(self, data):
        if not self.hidden:
            self.parts.append(data if self.pre else re.sub(r"\s+", " ", data))


def of_html(text):
    words = Words()
    words.feed(text)
    return "".join(words.parts)


def of_roff(text):
    """Manual pages: requests go, what they set in a face of its own stays."""
    lines = []
    for line in text.split("\n"):
        if line.startswith(('.\\"', "'\\\"", ".TH", ".so", ".ds", ".de", "..", ".if", ".ie", ".el", ".nr")):
            continue
        request = re.match(r"[.']\s*(\w+)\s?(.*)", line)
        if request:
            kind, rest = request.groups()
            if kind in ("SH", "SS", "Sh", "Ss"):
                lines += ["", rest.strip('"')]
            elif kind in ("PP", "P", "LP", "Pp", "IP", "TP"):
                lines += ["", rest.strip('"')] if rest else [""]
            elif len(kind) <= 2:
                lines.append(rest.replace('"', ""))
            continue
        lines.append(line)
    text = "\n".join(lines)
    text = re.sub(r"\\f[BIRP1-4]|\\f\(..|\\f\[\w*\]|\\s[-+]?\d|\\[&/,|^]", "", text)
    for old, new in (("\\-", "-"), ("\\(aq", "'"), ("\\(co", "(c)"), ("\\e", "\\"), ("\\ ", " "), ("\\~", " ")):
        text = text.replace(old, new)
    return text


def clean(text):
    text = text.replace("\r\n", "\n").replace("\0", "").expandtabs(8)
    text = re.sub(r"[ \u00a0]+\n", "\n", text)
    return re.sub(r"\n{3,}", "\n\n", text).strip()


def text_of(path, data, plain):
    """The text of a file, None where it is none that is wanted."""
    name = path
    if name.endswith((".gz", ".dz")):
        data, name = gzip.decompress(data), name.rsplit(".", 1)[0]
    ending = os.path.splitext(name)[1].lower()
    manual = re.search(r"/man\d\w*/[^/]+\.\d\w*$", name) is not None
    page = ending in (".html", ".htm", ".xhtml")
    wanted = manual or page or ending in TEXT or ending in SOURCE or (plain and len(data) > 2000)
    if not wanted or "/testsuite/" in name or b"\0" in data[:4096]:
        return None
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        return None
    return clean(of_roff(text) if manual else of_html(text) if page else text)


def files_of(folder):
    """Paths and bytes of a package's files; archives of sources are looked into."""
    for at, folders, names in os.walk(folder):
        folders.sort()
        for name in sorted(names):
            path = os.path.join(at, name)
            if os.path.islink(path) or not os.path.isfile(path):
                continue
            if re.search(r"\.tar\.(xz|gz|bz2)$", name):
                with tarfile.open(path) as archive:
                    for member in archive:
                        if member.isfile() and member.size < 4 << 20:
                            yield "/" + member.name, archive.extractfile(member).read()
            elif os.path.getsize(path) < 64 << 20:
                with open(path, "rb") as file:
                    yield path[len(folder):], file.read()


def fetch(package, keep):
    """Downloads and unpacks a package; the folder and its version, or None where there is none."""
    folder = os.path.join(keep, package)
    mark = folder + ".version"
    if not os.path.exists(mark):
        got = subprocess.run(["apt-get", "download", "-qq", package], cwd=keep)
        found = sorted(f for f in os.listdir(keep) if f.startswith(package + "_") and f.endswith(".deb"))
        if got.returncode != 0 or not found:
            return None
        deb = os.path.join(keep, found[-1])
        subprocess.run(["dpkg-deb", "-x", deb, folder], check=True)
        os.remove(deb)
        with open(mark, "w") as file:
            file.write(found[-1].split("_")[1])
    with open(mark) as file:
        return folder, file.read()


def main():
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("out")
    ask.add_argument("--packages", default=",".join(PACKAGES))
    ask.add_argument("--limit", type=float, default=24.0, help="MB of text of one package at most")
    ask.add_argument("--keep", help="where packages are unpacked (default: OUT/packages)")
    o = ask.parse_args()
    keep = os.path.abspath(o.keep or os.path.join(o.out, "packages"))
    os.makedirs(keep, exist_ok=True)
    seen, sizes, versions = set(), [0, 0], []
    names = ("train.jsonl", "valid.jsonl", "train.txt")
    files = [open(os.path.join(o.out, name), "w", encoding="utf-8") for name in names]
    for package in o.packages.split(","):
        got = fetch(package, keep)
        if got is None:
            print(f"{package}: not to be had", file=sys.stderr)
            continue
        used = documents = 0
        for path, data in files_of(got[0]):
            text = text_of(path, data, package in PLAIN_PACKAGES)
            if text is None or len(text) < 200:
                continue
            size = len(text.encode())
            mark = hashlib.sha256(text.encode()).digest()
            if mark in seen or used + size > o.limit * 1e6:
                continue
            seen.add(mark)
            held = int.from_bytes(mark[:4], "big") % 200 == 0
            files[held].write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
            if not held:
                files[2].write(text + "\n\n")
            sizes[held] += size
            used += size
            documents += 1
            if used > 0.99 * o.limit * 1e6:
                break
        versions.append(f"{package} {got[1]} {used} {documents}")
        print(f"{package}: {used / 1e6:.1f} MB, {documents} documents", flush=True)
    for file in files:
        file.close()
    with open(os.path.join(o.out, "packages.txt"), "w") as file:
        file.write("\n".join(versions) + "\n")
    print(f"{sizes[0] / 1e6:.1f} MB to train on, {sizes[1] / 1e6:.2f} MB held out")


if __name__ == "__main__":
    main()
