#!/usr/bin/env python3
"""Ids and decoded texts of mneme beside those of the tokenizers package, for each kind of tokenizer, over random strings.

usage: tests/tokenizer_reference.py MNEME [STRINGS] [FOLDER...]

Tokenizers are learned by the package from the pages of docs/; FOLDERs with a tokenizer.json are compared as well. Exit
status 77 where the package is missing. Strings are drawn from the words of the pages, from letters of many scripts,
marks, blanks, controls and symbols. Code points that the package's own tables of normal forms do not know yet (they are
of an older Unicode version than its lower case) are left out.
"""
import glob
import json
import os
import random
import subprocess
import sys
import tempfile
import unicodedata

try:
    from tokenizers import (Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers)
except ImportError:
    print("the tokenizers package is not here: skipped")
    sys.exit(77)

SPECIAL = ["<pad>", "</s>", "<unk>"]


def texts():
    root = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..")
    pages = sorted(glob.glob(os.path.join(root, "docs", "**", "*.md"), recursive=True))
    lines = [line for page in pages for line in open(page, encoding="utf-8").read().split("\n") if line.strip()]
    return lines[:4000] + ["Ångström naïve façade Ελληνικά русский 中文字符 日本語 한국어 हिन्दी العربية 🙂👩‍👩‍👧"] * 20


def byte_bpe(lines):
    t = Tokenizer(models.BPE())
    t.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    t.decoder = decoders.ByteLevel()
    t.train_from_iterator(lines, trainers.BpeTrainer(vocab_size=900, special_tokens=["<|endoftext|>"], show_progress=False,
                                                     initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    return t


def wordpiece(lower):
    def make(lines):
        t = Tokenizer(models.WordPiece(unk_token="[UNK]", max_input_chars_per_word=20))
        t.normalizer = normalizers.BertNormalizer(lowercase=lower)
        t.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        t.decoder = decoders.WordPiece(prefix="##", cleanup=lower)
        t.train_from_iterator(lines, trainers.WordPieceTrainer(vocab_size=900, show_progress=False,
                                                               special_tokens=["[PAD]", "[UNK]", "[CLS]", "[SEP]"]))
        ids = [("[CLS]", t.token_to_id("[CLS]")), ("[SEP]", t.token_to_id("[SEP]"))]
        t.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ids)
        return t
    return make


def unigram(fallback):
    def make(lines):
        t = Tokenizer(models.Unigram())
        steps = [normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")]
        t.normalizer = normalizers.Sequence(steps + ([normalizers.StripAccents()] if fallback else []))
        t.pre_tokenizer = pre_tokenizers.Metaspace()
        t.decoder = decoders.Metaspace()
        special = SPECIAL + ([f"<0x{b:02X}>" for b in range(256)] if fallback else [])
        t.train_from_iterator(lines, trainers.UnigramTrainer(vocab_size=900, special_tokens=special, unk_token="<unk>",
                                                             show_progress=False))
        if fallback:
            model = json.loads(t.to_str())
            model["model"]["byte_fallback"] = True
            model["added_tokens"] = [a for a in model["added_tokens"] if not a["content"].startswith("<0x")]
            model["decoder"] = {"type": "Sequence", "decoders": [
                {"type": "ByteFallback"}, {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always", "split": True}]}
            t = Tokenizer.from_str(json.dumps(model))
        return t
    return make


def known_points():
    """Assigned code points whose normal forms the package knows as Python does."""
    forms = {name: getattr(normalizers, name)() for name in ("NFD", "NFKC")}
    lower = normalizers.Lowercase()
    points = []
    for c in range(1, 0x110000):
        char = chr(c)
        if 0xD800 <= c <= 0xDFFF or unicodedata.category(char) in ("Cn", "Co"):
            continue
        # alone, and among marks, which are put in order by classes that newer code points have only in newer tables
        near = (char, "a\u0301" + char, "a\u0327" + char, "a" + char + "\u0334")
        if all(form.normalize_str(s) == unicodedata.normalize(name, s) for name, form in forms.items() for s in near):
            if lower.normalize_str(char) == char.lower():
                points.append(char)
    return points


def strings(count, lines, rng):
    words = [w for line in lines for w in line.split()]
    points = known_points()
    near = [p for p in points if ord(p) < 0x3000]
    made = []
    for _ in range(count):
        parts = []
        for _ in range(rng.randint(0, 12)):
            kind = rng.random()
            if kind < 0.4:
                parts.append(rng.choice(words))
            elif kind < 0.55:
                parts.append("".join(rng.choice(near) for _ in range(rng.randint(1, 6))))
            elif kind < 0.65:
                parts.append("".join(rng.choice(points) for _ in range(rng.randint(1, 4))))
            elif kind < 0.75:
                parts.append(rng.choice(["  ", "\n", "\t", "\r\n", "\u00a0", "\u3000", "\u200b", "...", "!?", "don't", " do not", "it's"]))
            elif kind < 0.85:
                parts.append(str(rng.randint(0, 10 ** rng.randint(1, 9))))
            elif kind < 0.92:
                parts.append(rng.choice("aeiounc") + "".join(rng.choice("\u0300\u0301\u0308\u0327\u0323") for _ in range(rng.randint(1, 3))))
            else:
                parts.append(rng.choice(words) * rng.randint(1, 8))
            if rng.random() < 0.6:
                parts.append(" ")
        made.append("".join(parts))
    return made


def run(mneme, verb, path, lines):
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl", encoding="utf-8") as file:
        file.write("\n".join(lines) + "\n")
        file.flush()
        out = subprocess.run([mneme, "tokenizer", verb, "--tokenizer", path, "--lines", file.name], capture_output=True, check=False)
    if out.returncode != 0:
        sys.exit(f"mneme tokenizer {verb} {path}: {out.stderr.decode()}")
    return [json.loads(line) for line in out.stdout.decode("utf-8").split("\n") if line]


def compare(mneme, name, tokenizer, path, samples):
    ours = run(mneme, "encode", path, [json.dumps(s) for s in samples])
    theirs = [e.ids for e in tokenizer.encode_batch(samples)]
    wrong = [i for i in range(len(samples)) if ours[i] != theirs[i]]
    for i in wrong[:3]:
        print(f"{name}: {samples[i]!r}\n  ours   {ours[i]}\n  theirs {theirs[i]}")
    texts_ours = run(mneme, "decode", path, [json.dumps(ids) for ids in theirs])
    texts_theirs = tokenizer.decode_batch(theirs, skip_special_tokens=True)
    other = [i for i in range(len(samples)) if texts_ours[i] != texts_theirs[i]]
    for i in other[:3]:
        print(f"{name}: decoding of {theirs[i]}\n  ours   {texts_ours[i]!r}\n  theirs {texts_theirs[i]!r}")
    print(f"{name}: {len(samples)} strings, {len(wrong)} differ in ids, {len(other)} in decoded text")
    return len(wrong) + len(other)


def main():
    mneme, count = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 10000
    lines = texts()
    samples = strings(count, lines, random.Random(16))
    made = {"bpe": byte_bpe, "wordpiece": wordpiece(True), "wordpiece cased": wordpiece(False), "unigram": unigram(False),
            "unigram bytes": unigram(True)}
    differences = 0
    with tempfile.TemporaryDirectory() as folder:
        for name, make in made.items():
            path = os.path.join(folder, name.replace(" ", "-") + ".json")
            tokenizer = make(lines)
            tokenizer.save(path)
            differences += compare(mneme, name, tokenizer, path, samples)
        for given in sys.argv[3:]:
            path = os.path.join(given, "tokenizer.json")
            differences += compare(mneme, given, Tokenizer.from_file(path), path, samples)
    sys.exit(differences > 0)


main()
