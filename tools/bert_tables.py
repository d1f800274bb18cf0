#!/usr/bin/env python3
"""Writes src/tokenizer/unicode/unicode_bert.def: the code points that BertNormalizer and BertPreTokenizer treat apart.

The tokenizers package takes them from tables of an older Unicode version than its normal forms; ids agree only with the
same sets, so they are asked of it, one code point after the other.

usage: tools/bert_tables.py           (in the root of the repository; needs the tokenizers package)
"""
import tokenizers
from tokenizers import normalizers, pre_tokenizers

POINTS = [c for c in range(0x110000) if not 0xD800 <= c <= 0xDFFF]
CLEAN = normalizers.BertNormalizer(clean_text=True, handle_chinese_chars=False, strip_accents=False, lowercase=False)
MARKS = normalizers.BertNormalizer(clean_text=False, handle_chinese_chars=False, strip_accents=True, lowercase=False)
ACCENTS = normalizers.StripAccents()
SPLIT = pre_tokenizers.BertPreTokenizer()
SETS = (
    ("DROPPED", "left out by clean_text", lambda c: CLEAN.normalize_str(f"a{c}b") == "ab"),
    ("MARK", "left out by strip_accents", lambda c: MARKS.normalize_str(c) == ""),
    ("ACCENT", "left out by StripAccents", lambda c: ACCENTS.normalize_str(c) == ""),
    ("PUNCTUATION", "stands alone", lambda c: len(SPLIT.pre_tokenize_str(f"a{c}b")) == 3),
)


def runs(has):
    out = []
    for c in POINTS:
        if not has(chr(c)):
            continue
        if out and out[-1][1] == c - 1:
            out[-1][1] = c
        else:
            out.append([c, c])
    return out


with open("src/tokenizer/unicode/unicode_bert.def", "w") as f:
    f.write("/* unicode_bert.def - first and last code points of what BERT's stages treat apart:\n")
    for name, about, _ in SETS:
        f.write(f" *   {name:12} {about}\n")
    f.write(f" * As tokenizers {tokenizers.__version__} has them, written by tools/bert_tables.py; each sorted. */\n")
    for name, _, has in SETS:
        f.write(f"#ifdef {name}\n")
        rows = [f"{name}(0x{a:X}, 0x{b:X})" for a, b in runs(has)]
        for i in range(0, len(rows), 3):
            f.write(" ".join(rows[i:i + 3]) + "\n")
        f.write("#endif\n")
