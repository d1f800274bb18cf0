#!/usr/bin/env python3
"""Chat templates of mneme beside jinja2 as transformers sets it up, over generated expressions and templates.

usage: tests/template_reference.py RENDER_TEMPLATE [COUNT] [SEED]

RENDER_TEMPLATE is the program of tests/support/programs. Texts have to be equal; where one fails the other has to. Left
out: what has no defined text (addresses of objects, sets), whole numbers beyond 64 bits, and slices of what has none,
where jinja2 fails or gives nothing as its optimiser happens to see a constant. Exit status 77 where jinja2 is missing.
"""
import json
import random
import re
import subprocess
import sys
import warnings

try:
    import jinja2
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment
except ImportError:
    print("the jinja2 package is not here: skipped")
    sys.exit(77)


class Generation(Extension):
    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller):
        return caller()


def refuse(message):
    raise jinja2.exceptions.TemplateError(message)


ENV = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
ENV.filters["tojson"] = lambda x, ensure_ascii=False, indent=None, separators=None, sort_keys=False: json.dumps(
    x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
ENV.globals["raise_exception"] = refuse
GIVEN = {"s": "Héllo wörld", "t": "  a,b ,c\n", "e": "", "i": 7, "z": 0, "m": -3, "f": 2.5, "y": True, "n": None,
         "l": [3, 1, 2], "w": ["b", "A", "c", "a"], "d": {"k": 1, "a": [1, "x"], "items": 2}, "q": [],
         "ms": [{"role": "user", "content": "hi", "n": 2}, {"role": "assistant", "content": "Yo", "n": 1},
                {"role": "user", "content": "é ", "n": 3}]}
STRINGS = ["s", "t", "e", "'a'", "'x y'", "\"it's\"", "'-'", "','", "'\\n'", "'12'", "'3.7'", "w[0]", "ms[0].content", "'é'"]
NUMBERS = ["i", "z", "m", "f", "1", "2", "0", "-1", "3.0", "10", "y", "l[1]", "1e3", "0.1"]
LISTS = ["l", "w", "q", "[1, 2.0, '3']", "(1, 'a')", "range(4)", "ms", "s.split()", "d.keys()", "[[1], [0, 2]]", "d.items()"]
OTHER = ["n", "d", "missing", "{'a': 1, 2: 'b'}", "true", "ms[0]", "d.missing"]
FILTERS = ["upper", "lower", "trim", "length", "list", "first", "last", "join(', ')", "string", "int", "float", "abs",
           "sort", "reverse|list", "title", "capitalize", "tojson", "tojson(indent=2)", "default('D')", "default('D', true)",
           "replace('a', 'bb')", "round", "round(1)", "sum", "min", "max", "unique|list", "batch(2)|list", "slice(2)|list",
           "indent", "indent(2, true)", "truncate(5)", "truncate(7, true, '')", "wordcount", "center(9)", "escape",
           "urlencode", "dictsort", "items|list", "map('string')|list", "select|list", "reject('odd')|list", "count",
           "map(attribute='n')|list", "selectattr('n', 'gt', 1)|list", "groupby('role')", "sort(attribute='n')",
           "sort(reverse=true)", "map('upper')|join", "join", "sum(attribute='n')", "striptags", "filesizeformat",
           "format(1, 'a')", "tojson(sort_keys=true)", "rejectattr('content', 'equalto', 'hi')|list", "attr('upper')()",
           "tojson(separators=(',', ':'))", "tojson(ensure_ascii=true)"]
TESTS = ["odd", "even", "defined", "undefined", "none", "string", "number", "mapping", "sequence", "iterable", "true",
         "false", "boolean", "integer", "float", "upper", "lower", "divisibleby 3", "eq 1", "in l", "in 'abc'", "gt 2",
         "sameas none", "not none", "not string", "callable", "equalto 'hi'", "lt 'b'", "filter", "test"]
METHODS = ["upper()", "lower()", "strip()", "lstrip()", "rstrip('\\n')", "split()", "split(',')", "split(',', 1)",
           "rsplit(' ', 1)", "startswith('a')", "endswith(('d', ' '))", "replace('l', 'L')", "replace('l', 'L', 1)",
           "find('l')", "rfind('l')", "count('l')", "title()", "capitalize()", "join(w)", "format(1, x=2)", "isdigit()",
           "isalpha()", "zfill(6)", "center(9, '*')", "ljust(7)", "rjust(4, '0')", "partition(' ')", "rpartition(',')",
           "splitlines()", "swapcase()", "islower()", "isspace()", "removeprefix('H')", "removesuffix('d')", "index('l')",
           "items()|list", "keys()|list", "values()|list", "get('k')", "get('z', 5)", "append(1)", "copy()", "index(1)",
           "count(1)", "casefold()", "isnumeric()", "istitle()", "expandtabs()"]
BINARY = ["+", "-", "*", "/", "//", "%", "~", "==", "!=", "<", "<=", ">", ">=", "in", "not in", "and", "or"]


class Maker:
    def __init__(self, r):
        self.r = r

    def leaf(self):
        return self.r.choice(self.r.choice([STRINGS, NUMBERS, LISTS, OTHER, STRINGS, LISTS]))

    def expression(self, depth=2):
        r = self.r
        if depth == 0:
            return self.leaf()
        kind = r.randrange(11)
        a = self.expression(depth - 1)
        if kind < 2:
            return "%s %s %s" % (a, r.choice(BINARY), self.expression(depth - 1))
        if kind < 5:
            return "(%s)|%s" % (a, r.choice(FILTERS))
        if kind == 5:
            return "(%s) is %s" % (a, r.choice(TESTS))
        if kind < 8:
            return "(%s).%s" % (a, r.choice(METHODS))
        if kind == 8:
            part = lambda: r.choice(["", "1", "-1", "0", "2", "-3", "9"])
            return "(%s)[%s:%s%s]" % (a, part(), part(), r.choice(["", "", ":-1", ":2"]))
        if kind == 9:
            return "(%s)[%s]" % (a, r.choice(["0", "-1", "1", "'k'", "'role'", "9", "'upper'"]))
        return "%s if %s else %s" % (a, self.expression(depth - 1), self.leaf())

    def blanks(self):
        return self.r.choice(["", "", "\n", "  \n", " ", "\n\n", "x", "\n  ", "t\n"])

    def tag(self, text):
        return "%s{%%%s %s %s%%}%s" % (self.blanks(), self.r.choice(["", "", "-", "+"]), text, self.r.choice(["", "", "-"]),
                                       self.blanks())

    def body(self, depth):
        return "".join(self.statement(depth - 1) for _ in range(self.r.randrange(1, 4)))

    def statement(self, depth=3):
        r, t = self.r, self.tag
        kind = r.randrange(14) if depth > 0 else 0
        if kind < 3:
            return "%s{{%s %s %s}}%s" % (self.blanks(), r.choice(["", "-"]), self.expression(1), r.choice(["", "-"]), self.blanks())
        if kind == 3:
            return t("if " + self.expression(1)) + self.body(depth) + r.choice(["", t("else") + self.body(depth),
                   t("elif y") + self.body(depth)]) + t("endif")
        if kind < 7:
            test = r.choice(["", "", " if v", " if v is string", " if not loop is defined"])
            inner = self.body(depth) + r.choice(["{{ loop.index }}", "{{ loop.last }}", "{{ v }}", "{{ loop.previtem }}",
                    "{{ loop.length }}", "{{ loop.revindex0 }}", "{% if v == 1 %}{% continue %}{% endif %}", "{{ loop.nextitem }}",
                    "{% if loop.index > 2 %}{% break %}{% endif %}", "{{ loop.cycle('p', 'q') }}", "{{ loop.changed(v) }}"])
            return t("for v in %s%s" % (r.choice(LISTS), test)) + inner + r.choice(["", t("else") + "none"]) + t("endfor")
        if kind < 9:
            return t("set %s = %s" % (r.choice("abv"), self.expression(1))) + "{{ %s }}" % r.choice("abvil")
        if kind == 9:
            return t("set ns = namespace(c=0)") + t("for v in l") + t("set ns.c = ns.c + v") + t("endfor") + "{{ ns.c }}"
        if kind == 10:
            name = r.choice("gh")
            return (t("macro %s(a, b=%s)" % (name, self.leaf())) + self.body(depth) + "{{ a }}{{ b }}" + t("endmacro") +
                    "{{ %s(%s) }}" % (name, r.choice(["1", "1, 2", "b=1", "", "1, c=2"])))
        if kind == 11:
            return t("set %s" % r.choice("ab")) + self.body(depth) + t("endset") + "{{ a }}"
        if kind == 12:
            return t("with a = %s" % self.leaf()) + self.body(depth) + "{{ a }}" + t("endwith")
        return r.choice([t("filter upper") + self.body(depth) + t("endfilter"), t("generation") + self.body(depth) +
                         t("endgeneration"), "{# c #}\n", t("raw") + "{{ x }}" + t("endraw"),
                         t("macro w()") + "<{{ caller() }}>" + t("endmacro") + t("call w()") + self.body(depth) + t("endcall")])


def reference(text):
    try:
        return {"text": ENV.from_string(text).render(**json.loads(json.dumps(GIVEN)))}
    except Exception as e:      # any failure of the reference is one
        return {"error": "%s: %s" % (type(e).__name__, e)}


def undefined_text(text):
    return re.search(r" at 0x|Markup\(|<(bound|built-in|function|class|generator|list_reverse|dict_|Undefined|filter|map)|unhashable type", text, re.I)


def left_out_error(text):
    return re.search(r"64 bits|not subscriptable|'slice'|dict_keys|dict_items|not all arguments converted", text)


def main():
    warnings.simplefilter("ignore")     # of the code that jinja2 makes
    count, seed = int((sys.argv[2:] + ["4000"])[0]), int((sys.argv[3:] + ["1"])[0])
    maker = Maker(random.Random(seed))
    texts = ["{{ %s }}" % maker.expression(maker.r.choice([1, 2, 2, 3])) if i % 2 else maker.body(3) for i in range(count)]
    lines = "".join(json.dumps({"template": t, "variables": GIVEN}) + "\n" for t in texts)
    run = subprocess.run([sys.argv[1]], input=lines, capture_output=True, text=True, check=True, timeout=500)
    bad = left_out = equal = 0
    for text, line in zip(texts, run.stdout.splitlines()):
        ours, theirs = json.loads(line), reference(text)
        if (left_out_error(ours.get("error", "")) or undefined_text(theirs.get("text", "") + theirs.get("error", "")) or
                re.search(r"\.keys\(\) -|- d\.keys\(\)", text)):
            left_out += 1
        elif ("text" in ours) != ("text" in theirs) or ours.get("text") != theirs.get("text"):
            bad += 1
            if bad <= 20:
                print("%r\n  ours   %s\n  theirs %s" % (text, ours, theirs))
        else:
            equal += "text" in ours
    print("%d templates: %d texts equal, %d left out, %d differ" % (len(texts), equal, left_out, bad))
    return bad != 0


sys.exit(main())
