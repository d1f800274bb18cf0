#!/usr/bin/env python3
"""Writes src/template/unicode_kinds.def: what Python's methods of str know about code points.

usage: tools/template_tables.py > src/template/unicode_kinds.def

Runs of code points for each question (KIND) and of upper and title case (CASE: first, last, step, distance), and the
code points that become several (MANY). Lower case is in unicode_lower.def of the tokenizer.
"""
import sys
import unicodedata

ALL = [c for c in range(0x110000) if not 0xD800 <= c < 0xE000]


def runs(keep):
    out = []
    for c in ALL:
        if not keep(chr(c)):
            continue
        if out and out[-1][1] == c - 1:
            out[-1][1] = c
        else:
            out.append([c, c])
    return out


def cases(convert):
    out = []
    for c in ALL:
        to = convert(chr(c))
        if len(to) != 1 or ord(to) == c:
            continue
        d = ord(to) - c
        if out and out[-1][3] == d and c - out[-1][1] in (1, 2) and out[-1][2] in (0, c - out[-1][1]):
            out[-1][2] = c - out[-1][1]
            out[-1][1] = c
        else:
            out.append([c, c, 0, d])
    return [(a, b, s or 1, d) for a, b, s, d in out]


def write(words):
    line = ""
    for w in words:
        if len(line) + len(w) + 1 > 118:
            print(line)
            line = ""
        line += (" " if line else "") + w
    print(line)


print("/* unicode_kinds.def - code points as Python's methods of str see them.\n"
      " * Unicode %s, written by tools/template_tables.py; sorted. */" % unicodedata.unidata_version)
for name, keep in [("PRINTABLE", str.isprintable), ("ALPHABETIC", str.isalpha), ("NUMERIC", str.isnumeric),
                   ("DIGIT", str.isdigit), ("DECIMAL", str.isdecimal), ("LOWER", str.islower), ("UPPER", str.isupper)]:
    if name == "PRINTABLE":
        keep = lambda c: not c.isprintable()
    print("#ifdef KIND_%s" % name)
    write(["KIND(0x%X, 0x%X)" % tuple(r) for r in runs(keep)])
    print("#endif")
for name, convert in [("UPPER", str.upper), ("TITLE", str.title)]:
    print("#ifdef CASE_OF_%s" % name)
    write(["CASE(0x%X, 0x%X, %d, %d)" % r for r in cases(convert)])
    print("#endif")
    print("#ifdef MANY_OF_%s" % name)
    write(["MANY(0x%X, %s)" % (c, ", ".join("0x%X" % ord(x) for x in (convert(chr(c)) + "\0\0")[:3]))
           for c in ALL if len(convert(chr(c))) > 1])
    print("#endif")
