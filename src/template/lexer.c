/* lexer.c - data, tags and what stands in them.
 *
 * A tag may carry - (blanks beside it go) or + (they stay). Otherwise blanks in front of a block or
 * comment that begins its line go, and so does one line break behind it. */
#include "template/lexer.h"

#include <string.h>

#include "base/utf8.h"
#include "template/state.h"

typedef struct lexer {
    state *s;
    tokens *out;
    const char *text;
    size_t size, at;
    int line;
    bool line_starting;         // what was taken last ends a line
    char open[MOST_NESTING];    // brackets
    int n_open;
} lexer;

static const char *const names[T_COUNT] = {
    [T_END] = "end of template", [T_DATA] = "template data", [T_VARIABLE_BEGIN] = "{{",
    [T_VARIABLE_END] = "}}", [T_BLOCK_BEGIN] = "{%", [T_BLOCK_END] = "%}", [T_NAME] = "a name",
    [T_STRING] = "a string", [T_INT] = "a whole number", [T_FLOAT] = "a number", [T_ADD] = "+",
    [T_SUB] = "-", [T_DIV] = "/", [T_FLOOR] = "//", [T_MUL] = "*", [T_MOD] = "%", [T_POW] = "**",
    [T_TILDE] = "~", [T_LBRACKET] = "[", [T_RBRACKET] = "]", [T_LPAREN] = "(", [T_RPAREN] = ")",
    [T_LBRACE] = "{", [T_RBRACE] = "}", [T_EQ] = "==", [T_NE] = "!=", [T_GT] = ">", [T_GE] = ">=",
    [T_LT] = "<", [T_LE] = "<=", [T_ASSIGN] = "=", [T_DOT] = ".", [T_COLON] = ":", [T_PIPE] = "|",
    [T_COMMA] = ",", [T_SEMICOLON] = ";",
};

const char *token_name(token_kind kind) {
    return names[kind];
}

static token *add(lexer *x, token_kind kind) {
    tokens *out = x->out;
    if (out->n == out->room) {
        const int64_t room = out->room ? 2 * out->room : 64;
        token *grown = take(x->s, (size_t)room * sizeof *grown);
        if (!grown) return NULL;
        if (out->n) memcpy(grown, out->at, (size_t)out->n * sizeof *grown);
        out->at = grown;
        out->room = room;
    }
    token *t = &out->at[out->n++];
    *t = (token){ .kind = kind, .line = x->line };
    return t;
}

static void count_lines(lexer *x, size_t from, size_t to) {
    for (size_t i = from; i < to; i++) x->line += x->text[i] == '\n';
}

/* Moves on to `to`; what lies between was taken. */
static void move(lexer *x, size_t to) {
    if (to > x->at) x->line_starting = x->text[to - 1] == '\n';
    count_lines(x, x->at, to);
    x->at = to;
}

static bool starts(const lexer *x, size_t at, const char *with) {
    const size_t n = strlen(with);
    return n <= x->size - at && memcmp(x->text + at, with, n) == 0;
}

static size_t skip_blanks(const lexer *x, size_t at) {
    while (at < x->size) {
        uint32_t point;
        const int n = mn_utf8_take(x->text + at, x->size - at, &point);
        if (!is_blank(point)) break;
        at += (size_t)n;
    }
    return at;
}

/* Where the text before `end` ends without blanks, not before `from`. */
static size_t strip_back(const lexer *x, size_t from, size_t end) {
    while (end > from) {
        size_t at = end - 1;
        while (at > from && ((uint8_t)x->text[at] & 0xC0) == 0x80) at--;
        uint32_t point;
        mn_utf8_take(x->text + at, end - at, &point);
        if (!is_blank(point)) break;
        end = at;
    }
    return end;
}

/* Data from here to the tag at `end`, with blanks in front of the tag treated as it says. */
static bool add_data(lexer *x, size_t end, char sign, bool variable) {
    size_t stop = end;
    if (sign == '-') {
        stop = strip_back(x, x->at, end);
    } else if (sign != '+' && !variable) {
        size_t line = end;
        while (line > x->at && x->text[line - 1] != '\n') line--;
        if ((line > x->at || x->line_starting) && strip_back(x, line, end) == line) stop = line;
    }
    if (stop > x->at) {
        token *t = add(x, T_DATA);
        if (!t) return false;
        t->text = (string){ x->text + x->at, stop - x->at, -1 };
    }
    count_lines(x, x->at, end);
    x->at = end;
    return true;
}

static bool error(lexer *x, const char *what) {
    x->s->line = x->line;
    fail(x->s, "%s", what);
    return false;
}

/* Behind a "%}" or "#}" that begins at `at`, by the sign in front of it. */
static size_t behind_end(const lexer *x, size_t at, char sign) {
    at += 2;
    if (sign == '-') return skip_blanks(x, at);
    if (sign != '+' && at < x->size && x->text[at] == '\n') at++;
    return at;
}

static bool take_comment(lexer *x) {
    for (size_t i = x->at; i + 1 < x->size; i++) {
        if (x->text[i] != '#' || x->text[i + 1] != '}') continue;
        const char before = i > x->at ? x->text[i - 1] : 0;
        move(x, behind_end(x, i, before));
        return true;
    }
    return error(x, "a comment has no end: #} is missing");
}

/* Whether `{% word %}` stands at `at`; `*behind` is what follows its word and blanks. */
static bool word_tag(const lexer *x, size_t at, const char *word, char *sign, size_t *behind) {
    if (!starts(x, at, "{%")) return false;
    at += 2;
    *sign = at < x->size && (x->text[at] == '-' || x->text[at] == '+') ? x->text[at++] : 0;
    at = skip_blanks(x, at);
    if (!starts(x, at, word)) return false;
    *behind = skip_blanks(x, at + strlen(word));
    return true;
}

/* The rest of a {% raw %} up to its end, as data. */
static bool take_raw(lexer *x) {
    for (size_t i = x->at; i + 1 < x->size; i++) {
        char sign, last = 0;
        size_t end;
        if (!word_tag(x, i, "endraw", &sign, &end)) continue;
        if (end < x->size && (x->text[end] == '-' || x->text[end] == '+')) last = x->text[end++];
        if (!starts(x, end, "%}")) continue;
        if (!add_data(x, i, sign, false)) return false;
        move(x, behind_end(x, end, last));
        return true;
    }
    return error(x, "a raw block has no end: {% endraw %} is missing");
}

/* ---- in tags --------------------------------------------------------------------------------- */

static bool is_digit_of(char c, int base) {
    if (base == 16 && ((c | 32) >= 'a' && (c | 32) <= 'f')) return true;
    return c >= '0' && c < '0' + (base < 10 ? base : 10);
}

/* Digits with single underscores between them, from `at` on. */
static size_t digits(const lexer *x, size_t at, int base, bool lead) {
    size_t end = at;
    while (end < x->size) {
        const bool under = x->text[end] == '_' && (end > at || lead) && end + 1 < x->size &&
                           is_digit_of(x->text[end + 1], base);
        if (!under && !is_digit_of(x->text[end], base)) break;
        end += under ? 2 : 1;
    }
    return end;
}

/* Behind a number with a fraction or an exponent, or 0. */
static size_t float_end(const lexer *x) {
    if (x->at > 0 && x->text[x->at - 1] == '.') return 0;
    size_t at = digits(x, x->at, 10, false), behind = 0;
    if (at == x->at) return 0;
    if (at < x->size && x->text[at] == '.') {
        const size_t end = digits(x, at + 1, 10, false);
        if (end > at + 1) behind = at = end;
    }
    if (at < x->size && (x->text[at] | 32) == 'e') {
        size_t power = at + 1;
        if (power < x->size && (x->text[power] == '+' || x->text[power] == '-')) power++;
        const size_t end = digits(x, power, 10, false);
        if (end > power) behind = end;
    }
    return behind;
}

static size_t int_end(const lexer *x, int *base) {
    const char c = x->text[x->at], next = x->at + 1 < x->size ? x->text[x->at + 1] | 32 : 0;
    *base = 10;
    if (c == '0') {
        const int other = next == 'b' ? 2 : next == 'o' ? 8 : next == 'x' ? 16 : 0;
        const size_t end = other ? digits(x, x->at + 2, other, true) : 0;
        if (other && end > x->at + 2) {
            *base = other;
            return end;
        }
        size_t at = x->at + 1;
        while (at < x->size && (x->text[at] == '0' ||
               (x->text[at] == '_' && at + 1 < x->size && x->text[at + 1] == '0'))) at++;
        return at;
    }
    return digits(x, x->at, 10, false);
}

static bool take_number(lexer *x) {
    char plain[400];
    int base = 10;
    const size_t as_float = float_end(x), end = as_float ? as_float : int_end(x, &base);
    size_t n = 0;
    for (size_t i = x->at + (base != 10 ? 2 : 0); i < end; i++) {
        if (x->text[i] == '_') continue;
        if (n + 1 >= sizeof plain) return error(x, "a number has more than 400 digits");
        plain[n++] = x->text[i];
    }
    token *t = add(x, as_float ? T_FLOAT : T_INT);
    if (!t) return false;
    if (as_float && !parse_real(&t->real, plain, n)) return error(x, "a number is not understood");
    if (!as_float && !parse_whole(&t->whole, plain, n, base)) {
        return error(x, "a whole number has more than 64 bits");
    }
    move(x, end);
    return true;
}

static int hex_of(char c) {
    return c >= '0' && c <= '9' ? c - '0' : (c | 32) >= 'a' && (c | 32) <= 'f' ? (c | 32) - 87 : -1;
}

/* What stands behind a backslash at `*at`, as Python's unicode-escape reads it. */
static bool take_escape(lexer *x, maker *m, size_t *at, size_t end) {
    static const char letters[] = "\\'\"abfnrtv", means[] = "\\'\"\a\b\f\n\r\t\v";
    const char c = x->text[(*at)++];
    const char *letter = c ? strchr(letters, c) : NULL;
    if (letter) {
        put(m, &means[letter - letters], 1);
    } else if (c == '\n') {
        return true;
    } else if (c >= '0' && c <= '7') {
        uint32_t point = (uint32_t)(c - '0');
        for (int i = 0; i < 2 && *at < end && x->text[*at] >= '0' && x->text[*at] <= '7'; i++) {
            point = point * 8 + (uint32_t)(x->text[(*at)++] - '0');
        }
        put_point(m, point);
    } else if (c == 'x' || c == 'u' || c == 'U') {
        uint32_t point = 0;
        for (int i = 0; i < (c == 'x' ? 2 : c == 'u' ? 4 : 8); i++) {
            const int digit = *at < end ? hex_of(x->text[*at]) : -1;
            if (digit < 0) return error(x, "an escape in a string has too few digits");
            point = point << 4 | (uint32_t)digit;
            (*at)++;
        }
        if (point > 0x10FFFF || (point >= 0xD800 && point < 0xE000)) {
            return error(x, "an escape in a string is no character");
        }
        put_point(m, point);
    } else if (c == 'N') {
        return error(x, "\\N{...} in a string is not supported; write the character");
    } else {
        put(m, "\\", 1);
        *at -= 1;
        uint32_t point;
        const int n = mn_utf8_take(x->text + *at, end - *at, &point);
        put(m, x->text + *at, (size_t)n);
        *at += (size_t)n;
    }
    return true;
}

static bool take_string(lexer *x) {
    const char quote = x->text[x->at];
    size_t end = x->at + 1;
    while (end < x->size && x->text[end] != quote) end += x->text[end] == '\\' ? 2 : 1;
    if (end >= x->size) return error(x, "a string has no end");
    maker m = { .s = x->s };
    for (size_t at = x->at + 1; at < end;) {
        size_t plain = at;
        while (plain < end && x->text[plain] != '\\') plain++;
        put(&m, x->text + at, plain - at);
        at = plain;
        if (at < end && (at++, !take_escape(x, &m, &at, end))) return false;
    }
    token *t = add(x, T_STRING);
    value *v = made(&m);
    if (!t || !v) return false;
    t->text = v->text;
    move(x, end + 1);
    return true;
}

static bool take_name(lexer *x) {
    size_t end = x->at;
    while (end < x->size) {
        uint32_t point;
        const int n = mn_utf8_take(x->text + end, x->size - end, &point);
        if (!is_word(point)) break;
        end += (size_t)n;
    }
    if (end == x->at) return false;
    token *t = add(x, T_NAME);
    if (!t) return false;
    t->text = (string){ x->text + x->at, end - x->at, -1 };
    move(x, end);
    return true;
}

/* Brackets have to match; tags end outside of them only. */
static bool balance(lexer *x, token_kind kind) {
    const char c = x->text[x->at];
    if (kind == T_LBRACE || kind == T_LPAREN || kind == T_LBRACKET) {
        if (x->n_open == MOST_NESTING) return error(x, "brackets are nested too deep");
        x->open[x->n_open++] = c == '(' ? ')' : c == '[' ? ']' : '}';
    } else if (kind == T_RBRACE || kind == T_RPAREN || kind == T_RBRACKET) {
        if (x->n_open == 0 || x->open[--x->n_open] != c) {
            x->s->line = x->line;
            fail(x->s, "unexpected '%c'", c);
            return false;
        }
    }
    return true;
}

static bool take_operator(lexer *x) {
    for (int width = 2; width >= 1; width--) {
        for (int kind = T_ADD; kind < T_COUNT; kind++) {
            if ((int)strlen(names[kind]) != width || !starts(x, x->at, names[kind])) continue;
            if (!balance(x, (token_kind)kind) || !add(x, (token_kind)kind)) return false;
            move(x, x->at + (size_t)width);
            return true;
        }
    }
    return error(x, "a character that has no meaning in a tag");
}

/* The end of the tag, where it stands here. */
static bool take_end(lexer *x, bool variable, bool *over) {
    const char c = x->text[x->at];
    const char sign = c == '-' || (c == '+' && !variable) ? c : 0;
    const size_t at = x->at + (sign ? 1 : 0);
    *over = x->n_open == 0 && starts(x, at, variable ? "}}" : "%}");
    if (!*over) return true;
    if (!add(x, variable ? T_VARIABLE_END : T_BLOCK_END)) return false;
    move(x, variable && sign != '-' ? at + 2 : behind_end(x, at, sign));
    return true;
}

static bool take_tag(lexer *x, bool variable) {
    if (!add(x, variable ? T_VARIABLE_BEGIN : T_BLOCK_BEGIN)) return false;
    x->n_open = 0;
    while (x->at < x->size) {
        bool over;
        if (!take_end(x, variable, &over)) return false;
        if (over) return true;
        const size_t blanks = skip_blanks(x, x->at);
        if (blanks > x->at) {
            move(x, blanks);
            continue;
        }
        const char c = x->text[x->at];
        bool ok;
        if (c >= '0' && c <= '9') ok = take_number(x);
        else if ((c == '\'' || c == '"')) ok = take_string(x);
        else ok = take_name(x) || (!failed(x->s) && take_operator(x));
        if (!ok) return false;
    }
    return true;                // the parser misses the end
}

/* ---- the whole text -------------------------------------------------------------------------- */

/* Line breaks of any kind become \n, and the last one goes. */
static char *normalised(state *s, const char *text, size_t *size) {
    char *out = store_bytes(s->store, *size + 1);
    size_t n = 0;
    if (!out) {
        fail(s, "not enough memory for the template");
        return NULL;
    }
    for (size_t i = 0; i < *size; i++) {
        if (text[i] == '\r' && i + 1 < *size && text[i + 1] == '\n') continue;
        out[n++] = text[i] == '\r' ? '\n' : text[i];
    }
    if (n > 0 && out[n - 1] == '\n') n--;
    *size = n;
    return out;
}

/* One tag at x->at, whose data before it was taken. */
static bool take_any(lexer *x, size_t tag) {
    char sign = 0;
    size_t behind;
    if (word_tag(x, tag, "raw", &sign, &behind)) {
        const bool minus = behind < x->size && x->text[behind] == '-';
        if (starts(x, behind + (minus ? 1 : 0), "%}")) {
            if (!add_data(x, tag, sign, false)) return false;
            behind += minus ? 3 : 2;
            move(x, minus ? skip_blanks(x, behind) : behind);
            return take_raw(x);
        }
    }
    const char kind = x->text[tag + 1], next = tag + 2 < x->size ? x->text[tag + 2] : 0;
    sign = next == '-' || next == '+' ? next : 0;
    if (!add_data(x, tag, sign, kind == '{')) return false;
    move(x, tag + (sign ? 3 : 2));
    return kind == '#' ? take_comment(x) : take_tag(x, kind == '{');
}

bool read_tokens(state *s, tokens *out, const char *text, size_t size) {
    if (mn_utf8_valid(text, size) != size) {
        fail(s, "the template is not UTF-8");
        return false;
    }
    char *copy = normalised(s, text, &size);
    if (!copy) return false;
    lexer x = { .s = s, .out = out, .text = copy, .size = size, .line = 1, .line_starting = true };
    while (x.at < size) {
        size_t tag = x.at;
        while (tag + 1 < size && !(copy[tag] == '{' && strchr("{%#", copy[tag + 1]) &&
                                   copy[tag + 1])) tag++;
        if (tag + 1 >= size) {
            token *t = add(&x, T_DATA);
            if (!t) return false;
            t->text = (string){ copy + x.at, size - x.at, -1 };
            move(&x, size);
        } else if (!take_any(&x, tag)) {
            return false;
        }
    }
    return add(&x, T_END) != NULL;
}
