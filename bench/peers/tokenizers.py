#!/usr/bin/env python3
"""Tokens of mneme beside those of the `tokenizers` package: the same ids, the same texts, and speed.

usage: bench/peers/tokenizers.py MNEME TEXT... [--strings N] [--seed S] [--only NAME]

Trains tokenizers of each family with the package, saves tokenizer.json, and compares ids over the
texts and over N random Unicode strings per family, and the text of those ids. Then the other way:
what `mneme tokenizer train` writes is loaded by the package. Ends with status 1 at any difference.
"""
import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
import unicodedata

sys.path = [p for p in sys.path if os.path.abspath(p or ".") != os.path.dirname(os.path.abspath(__file__))]
try:
    import tokenizers as hf
except ImportError:
    print("skipped: the Python package `tokenizers` is not installed (pip install tokenizers)")
    sys.exit(0)
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers
from tokenizers import pre_tokenizers as pre
from tokenizers import processors, trainers

LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
          r"|\s*[\r\n]+|\s+(?!\S)|\s+")
QWEN2 = LLAMA3.replace("{1,3}", "")
GPT4O = (r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
         r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
         r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+")
DEEPSEEK = (r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
            r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")


# ---- families ------------------------------------------------------------------------------------

def train(tok, texts, size, special=("<|endoftext|>",), byte_level=True, **more):
    alphabet = pre.ByteLevel.alphabet() if byte_level else []
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=list(special), show_progress=False,
                                  initial_alphabet=alphabet, min_frequency=2, **more)
    tok.train_from_iterator(texts, trainer)
    return tok


def edited(tok, change):
    d = json.loads(tok.to_str())
    change(d)
    return Tokenizer.from_str(json.dumps(d))


def byte_level(texts, splitter, size=2000, special=("<|endoftext|>",), normalizer=None):
    tok = Tokenizer(models.BPE())
    if normalizer:
        tok.normalizer = normalizer
    tok.pre_tokenizer = splitter
    tok.decoder = decoders.ByteLevel()
    return train(tok, texts, size, special)


def split_bytes(*splits):
    parts = [pre.Split(Regex(s), "isolated") for s in splits]
    return pre.Sequence(parts + [pre.ByteLevel(add_prefix_space=False, use_regex=False)])


def gpt2(texts):
    tok = byte_level(texts, pre.ByteLevel(add_prefix_space=False), 4000)
    tok.post_processor = processors.ByteLevel(trim_offsets=False)
    return tok


def gpt2_prefix(texts):
    return byte_level(texts, pre.ByteLevel(add_prefix_space=True))


def gpt2_added(texts):
    tok = gpt2(texts)
    tok.add_special_tokens([AddedToken("<mask>", lstrip=True), AddedToken("<sep>", rstrip=True)])
    tok.add_tokens([AddedToken("word", single_word=True), AddedToken("    ", normalized=False),
                    AddedToken("  "), AddedToken("<|think|>", normalized=False)])
    return tok


def roberta(texts):
    tok = byte_level(texts, pre.ByteLevel(add_prefix_space=False), 2000, ("<s>", "<pad>", "</s>"))
    tok.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
    return tok


def llama3(texts):
    tok = byte_level(texts, split_bytes(LLAMA3), 4000, ("<|begin_of_text|>", "<|end_of_text|>"))
    tok.post_processor = processors.Sequence([
        processors.ByteLevel(trim_offsets=False),
        processors.TemplateProcessing("<|begin_of_text|> $A", "<|begin_of_text|> $A $B",
                                      [("<|begin_of_text|>", 0)])])

    def ignore(d):
        d["model"]["ignore_merges"] = True
        d["model"]["merges"] = [" ".join(m) for m in d["model"]["merges"]]     # the older spelling
    return edited(tok, ignore)


def qwen2(texts):
    tok = byte_level(texts, split_bytes(QWEN2), 4000, ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
                     normalizers.NFC())
    tok.add_tokens([AddedToken("<tool_call>", normalized=False), AddedToken("Å")])
    return tok


def gpt4o(texts):
    return byte_level(texts, split_bytes(GPT4O), 3000)


def deepseek(texts):
    return byte_level(texts, split_bytes(r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", DEEPSEEK), 3000)


def falcon(texts):
    return byte_level(texts, pre.Sequence([pre.Punctuation("contiguous"), pre.ByteLevel(add_prefix_space=False),
                                           pre.Digits(False), pre.Split(Regex("[0-9][0-9][0-9]"), "isolated")]))


def starcoder(texts):
    return byte_level(texts, pre.Sequence([pre.Digits(True), pre.ByteLevel(add_prefix_space=False)]))


def with_byte_tokens(tok, **rules):
    def change(d):
        v = d["model"]["vocab"]
        for b in range(256):
            v["<0x%02X>" % b] = max(v.values()) + 1
        d["model"].update(byte_fallback=True, fuse_unk=True, unk_token="<unk>")
        d.update(rules)
    return edited(tok, change)


def characters(texts):
    tok = Tokenizer(models.BPE(unk_token="<unk>"))
    tok.pre_tokenizer = pre.Metaspace()
    return train(tok, texts, 4000, ("<unk>", "<s>", "</s>"), False, limit_alphabet=60)


def llama2(texts):
    steps = [{"type": "Prepend", "prepend": "▁"},
             {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]
    back = [{"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"},
            {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]
    tok = with_byte_tokens(characters(texts), pre_tokenizer=None,
                           normalizer={"type": "Sequence", "normalizers": steps},
                           decoder={"type": "Sequence", "decoders": back})
    tok.post_processor = processors.TemplateProcessing("<s> $A", "<s> $A $B", [("<s>", 1)])
    return tok


def mistral(texts):
    tok = with_byte_tokens(characters(texts), decoder={"type": "Sequence", "decoders": [
        {"type": "ByteFallback"}, {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always"}]})
    tok.pre_tokenizer = pre.Metaspace(prepend_scheme="first", split=False)
    return tok


def unknown(fuse):
    def make(texts):
        tok = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=fuse))
        tok.normalizer = normalizers.Sequence([normalizers.NFKD(), normalizers.Lowercase(), normalizers.Strip()])
        tok.pre_tokenizer = pre.Whitespace()
        tok.decoder = decoders.Fuse()
        return train(tok, texts, 1500, ("<unk>",), False, limit_alphabet=50)
    return make


def words(splitter, normalizer):
    def make(texts):
        tok = Tokenizer(models.BPE(unk_token="<unk>"))
        tok.normalizer = normalizer
        tok.pre_tokenizer = splitter
        return train(tok, texts, 1500, ("<unk>",), False, limit_alphabet=50)
    return make


def behaviours():
    made = {}
    for name in ("isolated", "removed", "merged_with_previous", "merged_with_next", "contiguous"):
        for invert in (False, True):
            def make(texts, name=name, invert=invert):
                tok = byte_level(texts, pre.Sequence([pre.Split(Regex(r"\s|[,.]"), name, invert),
                                                      pre.ByteLevel(False, use_regex=False)]), 600)
                return tok
            made[f"split {name}{' inverted' if invert else ''}"] = make
    return made


FAMILIES = {
    "gpt2": gpt2, "gpt2 prefix": gpt2_prefix, "gpt2 added": gpt2_added, "roberta": roberta, "llama2": llama2,
    "mistral": mistral, "llama3": llama3, "qwen2": qwen2, "gpt4o": gpt4o, "deepseek": deepseek, "falcon": falcon,
    "starcoder": starcoder, "unknown": unknown(False), "unknown fused": unknown(True),
    "whitespace nfkc": words(pre.WhitespaceSplit(), normalizers.NFKC()),
    "punctuation nfd": words(pre.Sequence([pre.WhitespaceSplit(), pre.Punctuation()]), normalizers.NFD()),
    "delimiter": words(pre.CharDelimiterSplit(" "), normalizers.Replace(Regex(r"\s+"), " ")),
    "metaspace": words(pre.Metaspace(prepend_scheme="always"), normalizers.NFC()),
    "metaspace never": words(pre.Metaspace(prepend_scheme="never"), normalizers.NFC()),
    **behaviours(),
}


# ---- strings -------------------------------------------------------------------------------------

def same_everywhere():
    """Code points on whose properties all Unicode versions in use agree: those of Unicode 3.2 and a few later."""
    old = unicodedata.ucd_3_2_0
    return [c for c in range(1, 0x110000) if old.category(chr(c)) not in ("Cn", "Cs", "Co")
            and old.category(chr(c)) == unicodedata.category(chr(c))]


def random_strings(count, seed, extra):
    rng = random.Random(seed)
    points = same_everywhere()
    marks = [c for c in points if unicodedata.combining(chr(c))]
    spaces = [0x20] * 12 + [9, 10, 13, 10, 0xA0, 0x2003, 0x3000, 0x2028, 0x85, 0x0B, 0x180E, 0x200B, 0x200D]
    some = ["don't", "I'LL", "it's", "we've", "'S", "ſ'ſ", "K", "hello", " world", "The", "12345", "3.14", "١٢٣", "½²",
            "naïve", "e\u0301", "Å", "Å", "한국어", "ᄒ\u1161\u11ab", "日本語", "ひらがな", "😀👍🏽", "▁", "Ġ", "<0x0A>",
            "\r\n\r\n", "    ", "...", "!?", "word", "words", "İstanbul", "ΑΣ", "ﬁ", "\ufeff"] + extra
    out = []
    for _ in range(count):
        pieces = []
        for _ in range(rng.randrange(1, 14)):
            kind = rng.randrange(8)
            if kind < 3:
                pieces.append(rng.choice(some))
            elif kind == 3:
                pieces.append("".join(chr(rng.choice(spaces)) for _ in range(rng.randrange(1, 5))))
            elif kind == 4:
                pieces.append("".join(chr(rng.choice(points)) for _ in range(rng.randrange(1, 6))))
            elif kind == 5:
                pieces.append("".join(chr(rng.randrange(32, 127)) for _ in range(rng.randrange(1, 9))))
            elif kind == 6:
                pieces.append(chr(rng.randrange(0x21, 0x250)) + "".join(
                    chr(rng.choice(marks)) for _ in range(rng.randrange(0, 4))))
            else:
                pieces.append(rng.choice("abcdefghijklmnopqrstuvwxyz") * rng.randrange(1, 60))
        out.append("".join(pieces))
    return out


# ---- comparing -----------------------------------------------------------------------------------

def mneme(program, *args):
    done = subprocess.run([program, "tokenizer", *args], stdout=subprocess.PIPE)
    if done.returncode != 0:
        sys.exit(f"mneme tokenizer {' '.join(args)} failed")
    return done.stdout.decode()


def write_lines(path, values):
    with open(path, "w", encoding="utf-8") as f:
        f.writelines(json.dumps(v) + "\n" for v in values)


def compare(name, program, tok, path, texts, strings, folder, decode=True):
    """The number of differences between the package and the program, both using the file at `path`."""
    lines, ids_file, bad = os.path.join(folder, "lines"), os.path.join(folder, "ids"), 0
    everything = list(texts) + strings
    write_lines(lines, everything)
    for plain in (False, True):
        tok.encode_special_tokens = plain
        start = time.time()
        want = [e.ids for e in tok.encode_batch(everything, add_special_tokens=not plain)]
        seconds = time.time() - start
        flags = ["--plain"] if plain else []
        got = [json.loads(s) for s in mneme(program, "encode", "--tokenizer", path, "--lines", *flags, lines).split("\n") if s]
        assert len(got) == len(want), f"{name}: {len(got)} lines for {len(want)} texts"
        for text, a, b in zip(everything, want, got):
            if a != b:
                bad += 1
                at = next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
                if bad <= 3:
                    print(f"  {name}: plain={plain}: {text[:80]!r}: token {at}: package {a[at:at + 5]}, mneme {b[at:at + 5]}")
        del seconds
    tok.encode_special_tokens = False
    if decode:
        some = [i for i in want[len(texts):] if i]
        write_lines(ids_file, some)
        want_text = [tok.decode(i) for i in some]
        got_text = [json.loads(s) for s in mneme(program, "decode", "--tokenizer", path, "--lines", ids_file).split("\n") if s]
        for ids, a, b in zip(some, want_text, got_text):
            if a != b:
                bad += 1
                if bad <= 3:
                    print(f"  {name}: decode {ids[:12]}: package {a[:60]!r}, mneme {b[:60]!r}")
    print(f"{'ok  ' if bad == 0 else 'FAIL'} {name}: {len(texts)} texts, {len(strings)} strings, {bad} differences", flush=True)
    return bad


def speed(program, tok, path, files):
    size = sum(os.path.getsize(f) for f in files)
    texts = [open(f, encoding="utf-8", newline="").read() for f in files]
    best = 1e9
    for _ in range(3):
        start = time.time()
        for t in texts:
            tok.encode(t)
        best = min(best, time.time() - start)
    own = 1e9
    for _ in range(3):
        seconds = sum(float(mneme(program, "encode", "--tokenizer", path, "--count", f).split(", ")[3].split()[0]) for f in files)
        own = min(own, seconds)
    print(f"speed on {size} bytes, one thread, best of 3: package {1e-6 * size / best:.1f} MB/s, mneme {1e-6 * size / own:.1f} MB/s")


def ours(program, files, texts, strings, folder):
    """Tokenizers that mneme makes, loaded by the package; and the same merges as its trainer learns."""
    bad = 0
    for pattern in ("gpt2", "llama3", "qwen2"):
        path = os.path.join(folder, f"mneme_{pattern}.json")
        mneme(program, "train", *files, "--vocab-size", "3000", "--pattern", pattern, "--special", "<|endoftext|>",
              "-o", path, "--quiet")
        tok = Tokenizer.from_file(path)
        bad += compare(f"mneme {pattern}", program, tok, path, texts, strings, folder)
        splitter = {"gpt2": pre.ByteLevel(False), "llama3": split_bytes(LLAMA3), "qwen2": split_bytes(QWEN2)}[pattern]
        peer = byte_level(texts, splitter, 3000, normalizer=normalizers.NFC() if pattern == "qwen2" else None)
        same = json.loads(peer.to_str())["model"]
        mine = json.load(open(path, encoding="utf-8"))["model"]
        equal = same["vocab"] == mine["vocab"] and same["merges"] == mine["merges"]
        print(f"{'ok  ' if equal else 'FAIL'} mneme {pattern}: vocabulary and merges equal those of the package's trainer")
        bad += not equal
    path = os.path.join(folder, "bytes.json")
    mneme(program, "train", "--kind", "bytes", "-o", path)
    bad += compare("mneme bytes", program, Tokenizer.from_file(path), path, [t[:200000] for t in texts], strings, folder)
    path = os.path.join(folder, "chars.json")
    mneme(program, "train", "--kind", "chars", *files, "-o", path)
    letters = sorted(set("".join(texts)))
    rng = random.Random(1)
    own = ["".join(rng.choice(letters) for _ in range(rng.randrange(1, 40))) for _ in range(2000)]
    bad += compare("mneme chars", program, Tokenizer.from_file(path), path, [t[:200000] for t in texts], own, folder)
    return bad


def main():
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument("mneme")
    args.add_argument("text", nargs="+")
    args.add_argument("--strings", type=int, default=2000, help="random strings per family")
    args.add_argument("--seed", type=int, default=0)
    args.add_argument("--only", help="one family")
    a = args.parse_args()
    texts = [open(f, encoding="utf-8", newline="").read() for f in a.text]
    bad = 0
    print(f"tokenizers {hf.__version__}")
    with tempfile.TemporaryDirectory() as folder:
        for i, (name, make) in enumerate(FAMILIES.items()):
            if a.only and a.only != name:
                continue
            tok = make(texts)
            path = os.path.join(folder, "tokenizer.json")
            tok.save(path)
            tok = Tokenizer.from_file(path)
            special = [t.content for t in tok.get_added_tokens_decoder().values()]
            strings = random_strings(a.strings, a.seed + i, special)
            bad += compare(name, a.mneme, tok, path, texts, strings, folder)
            if name in ("gpt2", "llama2", "llama3"):
                speed(a.mneme, tok, path, a.text)
        if not a.only:
            bad += ours(a.mneme, a.text, texts, random_strings(a.strings, a.seed + 99, ["<|endoftext|>"]), folder)
    print(f"{bad} differences")
    sys.exit(1 if bad else 0)


main()
