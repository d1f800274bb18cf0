#!/usr/bin/env python3
"""Writes src/tokenizer/unicode/unicode_*.def: what normal forms and lower case need, from Python's unicodedata.

usage: tools/unicode_tables.py        (in the root of the repository)
"""
import sys
import unicodedata as u

POINTS = [c for c in range(0x110000) if not 0xD800 <= c <= 0xDFFF]
HANGUL = range(0xAC00, 0xAC00 + 11172)


def text(s):
    """A C string in three-digit octal escapes, which cannot run into the next character."""
    out = ""
    for b in s.encode():
        plain = 0x20 <= b < 0x7F and chr(b) not in '"\\?'
        out += chr(b) if plain else "\\%03o" % b
    return '"' + out + '"'


def write(name, purpose, rows, per_line):
    with open(f"src/tokenizer/unicode/unicode_{name}.def", "w") as f:
        f.write(f"/* unicode_{name}.def - {purpose}\n * Unicode {u.unidata_version}, "
                "written by tools/unicode_tables.py; sorted. */\n")
        for i in range(0, len(rows), per_line):
            f.write(" ".join(rows[i:i + per_line]) + "\n")


def classes():
    runs = []
    for c in POINTS:
        k = u.combining(chr(c))
        if not k:
            continue
        if runs and runs[-1][1] == c - 1 and runs[-1][2] == k:
            runs[-1][1] = c
        else:
            runs.append([c, c, k])
    return [f"CLASS(0x{a:X}, 0x{b:X}, {k})" for a, b, k in runs]


def canonical():
    return [f"CANONICAL(0x{c:X}, {text(u.normalize('NFD', chr(c)))})" for c in POINTS
            if c not in HANGUL and u.normalize("NFD", chr(c)) != chr(c)]


def compatible():
    return [f"COMPATIBLE(0x{c:X}, {text(u.normalize('NFKD', chr(c)))})" for c in POINTS
            if c not in HANGUL and u.normalize("NFKD", chr(c)) != u.normalize("NFD", chr(c))]


def pairs():
    found = []
    for c in POINTS:
        parts = u.decomposition(chr(c)).split()
        if len(parts) != 2 or parts[0].startswith("<"):
            continue
        a, b = (int(p, 16) for p in parts)
        if u.normalize("NFC", chr(a) + chr(b)) == chr(c):      # not excluded from composition
            found.append((a, b, c))
    return [f"PAIR(0x{a:X}, 0x{b:X}, 0x{c:X})" for a, b, c in sorted(found)]


def lower():
    """Runs of equal distance; step 2 where upper and lower case alternate."""
    runs = []
    for c in POINTS:
        low = chr(c).lower()
        if low == chr(c) or len(low) != 1:
            continue
        delta = ord(low) - c
        last = runs[-1] if runs else None
        if last and last[3] == delta and c - last[1] in (1, 2) and last[2] in (0, c - last[1]):
            last[1], last[2] = c, c - last[1]
        else:
            runs.append([c, c, 0, delta])
    return [f"LOWER(0x{a:X}, 0x{b:X}, {s or 1}, {d})" for a, b, s, d in runs]


def main():
    if len(sys.argv) > 1:
        sys.exit(__doc__)
    write("class", "combining classes other than 0: first, last, class.", classes(), 4)
    write("canonical", "full canonical decompositions (Hangul is computed).", canonical(), 3)
    write("compatible", "full compatibility decompositions where they differ.", compatible(), 5)
    write("pair", "primary composites: first, second, both as one.", pairs(), 4)
    write("lower", "lower case: first, last, step, distance.", lower(), 4)


main()
