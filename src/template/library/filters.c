/* filters.c - filters over one value: text, numbers, and a few of containers. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/utf8.h"
#include "template/library/rows.h"

/* ---- text ------------------------------------------------------------------------------------ */

value *filter_string(state *s, value **a, const arguments *all) {
    (void)all;
    return string_of(s, a[0]);
}

#define TEXT_FILTER(name)                                                                          \
    value *filter_##name(state *s, value **a, const arguments *all) {                              \
        value *text = string_of(s, a[0]);                                                          \
        return text ? method_##name(s, &text, all) : NULL;                                         \
    }

TEXT_FILTER(lower)
TEXT_FILTER(upper)
TEXT_FILTER(capitalize)

value *filter_trim(state *s, value **a, const arguments *all) {
    (void)all;
    value *text = string_of(s, a[0]);
    return text ? strip_string(s, text, a[1], true, true) : NULL;
}

value *filter_center(state *s, value **a, const arguments *all) {
    int64_t width;
    (void)all;
    value *text = string_of(s, a[0]);
    return text && want_whole(s, &width, a[1], 80) ? pad_string(s, text, width, NULL, 0) : NULL;
}

value *filter_replace(state *s, value **a, const arguments *all) {
    int64_t most;
    (void)all;
    value *text = string_of(s, a[0]), *old = text ? string_of(s, a[1]) : NULL;
    value *with = old ? string_of(s, a[2]) : NULL;
    if (!with || !want_whole(s, &most, given(a[3]) ? a[3] : NULL, -1)) return NULL;
    return replace_string(s, text, &old->text, &with->text, most);
}

static bool begins_word(uint32_t point) {
    return point == '-' || point == '(' || point == '{' || point == '[' || point == '<' ||
           is_blank(point);
}

/* The first letter of what stands behind blanks and opening brackets. */
value *filter_title(state *s, value **a, const arguments *all) {
    maker m = { .s = s };
    (void)all;
    value *text = string_of(s, a[0]);
    if (!text) return NULL;
    const string *t = &text->text;
    for (size_t at = 0; at < t->size;) {
        uint32_t point;
        size_t first = (size_t)mn_utf8_take(t->bytes + at, t->size - at, &point), end = at + first;
        const bool between = begins_word(point);
        while (end < t->size) {
            const int n = mn_utf8_take(t->bytes + end, t->size - end, &point);
            if (begins_word(point) != between) break;
            end += (size_t)n;
        }
        put_case(&m, t->bytes + at, first, CASE_UPPER);
        put_case(&m, t->bytes + at + first, end - at - first, CASE_LOWER);
        at = end;
    }
    return made(&m);
}

value *filter_escape(state *s, value **a, const arguments *all) {
    maker m = { .s = s };
    (void)all;
    value *text = string_of(s, a[0]);
    for (size_t i = 0; text && i < text->text.size; i++) {
        const char c = text->text.bytes[i];
        if (c == '&') put_text(&m, "&amp;");
        else if (c == '<') put_text(&m, "&lt;");
        else if (c == '>') put_text(&m, "&gt;");
        else if (c == '"') put_text(&m, "&#34;");
        else if (c == '\'') put_text(&m, "&#39;");
        else put(&m, &c, 1);
    }
    return text ? made(&m) : NULL;
}

/* Comments and tags go, runs of blanks become one. */
value *filter_striptags(state *s, value **a, const arguments *all) {
    maker m = { .s = s };
    (void)all;
    value *text = string_of(s, a[0]);
    if (!text) return NULL;
    const char *at = text->text.bytes, *end = at + text->text.size;
    while (at < end) {
        const char *close = NULL;
        if (*at == '<') {
            const bool comment = end - at >= 4 && memcmp(at, "<!--", 4) == 0;
            for (const char *c = at + (comment ? 4 : 1); c < end && !close; c++) {
                if (!comment && *c == '>') close = c + 1;
                if (comment && end - c >= 3 && memcmp(c, "-->", 3) == 0) close = c + 3;
            }
            if (!spend_bytes(s, (size_t)((close ? close : end) - at) + 64)) return NULL;
        }
        if (close) at = close;
        else put(&m, at++, 1);
    }
    value *bare = made(&m), *words[] = { bare, NULL, NULL };
    value *list = bare ? method_split(s, words, NULL) : NULL;
    const string blank = { " ", 1, 1 };
    return list ? join_strings(s, &blank, list, false) : NULL;
}

value *filter_wordcount(state *s, value **a, const arguments *all) {
    int64_t n = 0;
    bool within = false;
    (void)all;
    value *text = string_of(s, a[0]);
    for (size_t at = 0; text && at < text->text.size;) {
        uint32_t point;
        at += (size_t)mn_utf8_take(text->text.bytes + at, text->text.size - at, &point);
        n += is_word(point) && !within;
        within = is_word(point);
    }
    return text ? new_int(s, n) : NULL;
}

value *filter_indent(state *s, value **a, const arguments *all) {
    int64_t width = 4;
    maker m = { .s = s };
    (void)all;
    value *by = a[1];
    const bool first = yes_or(s, a[2], false), blank = yes_or(s, a[3], false);
    if (by && by->kind != K_STRING && !want_whole(s, &width, by, 4)) return NULL;
    if (a[0]->kind == K_UNDEFINED) return fail_undefined(s, a[0]);
    if (a[0]->kind != K_STRING) {
        return fail(s, "unsupported operand type(s) for +=: '%s' and 'str'", type_name(a[0]));
    }
    if (width > 1 << 20) return fail(s, "an indented text is over the limit");
    value *newline = lent_string(s, "\n", 1);
    value *text = newline ? concat(s, a[0], newline) : NULL;
    const value *lines = text ? split_lines(s, text, false) : NULL;
    for (int64_t i = 0; lines && i < lines->list.n && !m.failed; i++) {
        const string *line = &lines->list.at[i]->text;
        const bool in = i ? line->size || blank : first;
        if (i) put(&m, "\n", 1);
        if (in && by && by->kind == K_STRING) put(&m, by->text.bytes, by->text.size);
        else if (in) put_fill(&m, ' ', width);
        put(&m, line->bytes, line->size);
    }
    return lines ? made(&m) : NULL;
}

value *filter_truncate(state *s, value **a, const arguments *all) {
    int64_t most, leeway;
    (void)all;
    value *end = a[3] ? a[3] : lent_string(s, "...", 3);
    if (!end || !want_whole(s, &most, a[1], 255) ||
        !want_whole(s, &leeway, given(a[4]) ? a[4] : NULL, 5)) return NULL;
    if (end->kind != K_STRING || a[0]->kind != K_STRING) {
        if (a[0]->kind == K_UNDEFINED) return lent_string(s, "", 0);
        return fail(s, "truncate takes texts, not %s", type_name(a[0]));
    }
    const int64_t n_end = string_points(s, end);
    if (most < n_end) return fail(s, "expected length >= %lld", (long long)n_end);
    if (leeway < 0) return fail(s, "expected leeway >= 0");
    if (string_points(s, a[0]) <= most + leeway) return a[0];
    value *start = string_cut(s, a[0], 0, most - n_end);
    if (start && !yes_or(s, a[2], false)) {
        value *blank = lent_string(s, " ", 1), *cuts[] = { start, blank, new_int(s, 1) };
        const value *parts = blank && cuts[2] ? method_rsplit(s, cuts, NULL) : NULL;
        start = parts ? parts->list.at[0] : NULL;
    }
    return start ? concat(s, start, end) : NULL;
}

static void put_quoted(maker *m, const string *t, const char *safe) {
    for (size_t i = 0; i < t->size; i++) {
        const char c = t->bytes[i];
        const bool plain = (c >= '0' && c <= '9') || ((c | 32) >= 'a' && (c | 32) <= 'z') ||
                           (c && strchr("_.-~", c)) || (c && strchr(safe, c));
        char text[4];
        if (plain) put(m, &c, 1);
        else put(m, text, (size_t)snprintf(text, sizeof text, "%%%02X", (uint8_t)c));
    }
}

value *filter_urlencode(state *s, value **a, const arguments *all) {
    maker m = { .s = s };
    (void)all;
    if (a[0]->kind == K_STRING || !iterable(a[0])) {
        const value *text = string_of(s, a[0]);
        if (text) put_quoted(&m, &text->text, "/");
        return text ? made(&m) : NULL;
    }
    value *of = a[0];
    if (of->kind == K_DICT && !(of = method_items(s, a, all))) return NULL;
    iterator *it = iterate(s, of);
    bool more = false;
    for (value *pair; it && (pair = next_item(s, it)); more = true) {
        items two = { 0 };
        if (!collect(s, &two, pair)) return NULL;
        if (two.n != 2) return fail(s, "urlencode takes pairs");
        for (int i = 0; i < 2; i++) {
            const value *text = string_of(s, two.at[i]);
            if (!text) return NULL;
            if (i || more) put(&m, i ? "=" : "&", 1);
            put_quoted(&m, &text->text, "");
        }
    }
    return failed(s) ? NULL : made(&m);
}

value *filter_format(state *s, value **a, const arguments *all) {
    value *text = string_of(s, a[0]), *with;
    if (!text) return NULL;
    if (all->n && all->n_named) {
        return fail(s, "can't handle positional and keyword arguments at the same time");
    }
    if (all->n_named) {
        with = new_dict(s);
        for (int64_t i = 0; with && i < all->n_named; i++) {
            dict_set(s, with->members, all->names[i], all->named[i]);
        }
    } else {
        with = new_list(s, K_TUPLE, all->n);
        for (int64_t i = 0; with && i < all->n; i++) with->list.at[i] = all->at[i];
    }
    return with && !failed(s) ? format_percent(s, text, with) : NULL;
}

value *filter_tojson(state *s, value **a, const arguments *all) {
    maker m = { .s = s };
    (void)all;
    const bool ascii = yes_or(s, a[1], false), sort = yes_or(s, a[4], false);
    return put_json(&m, a[0], a[2], a[3], sort, ascii) ? made(&m) : NULL;
}

value *filter_pprint(state *s, value **a, const arguments *all) {
    (void)all;
    value *text = repr_of(s, a[0]);
    if (text && string_points(s, text) > 80 && a[0]->kind != K_STRING) {
        return fail(s, "pprint of more than a line is not supported; use tojson(indent=...)");
    }
    return text;
}

/* ---- numbers --------------------------------------------------------------------------------- */

value *filter_abs(state *s, value **a, const arguments *all) {
    int64_t x;
    (void)all;
    if (a[0]->kind == K_UNDEFINED) return fail_undefined(s, a[0]);
    if (a[0]->kind == K_FLOAT) return new_float(s, fabs(a[0]->real));
    if (!whole_of(a[0], &x)) return fail(s, "bad operand type for abs(): '%s'", type_name(a[0]));
    const value number = { .kind = K_INT, .whole = x };
    return x < 0 ? negative(s, (value *)&number) : new_int(s, x);
}

static value *whole_from_real(state *s, double real, value *otherwise) {
    if (!isfinite(real)) return otherwise;
    real = trunc(real);
    if (fabs(real) >= 9.2e18) return fail(s, "a whole number has more than 64 bits");
    return new_int(s, (int64_t)real);
}

value *filter_int(state *s, value **a, const arguments *all) {
    int64_t x, base;
    double real;
    (void)all;
    value *otherwise = a[1] ? a[1] : new_int(s, 0);
    if (!otherwise || !want_whole(s, &base, a[2], 10)) return NULL;
    if (a[0]->kind == K_UNDEFINED) return fail_undefined(s, a[0]);
    if (whole_of(a[0], &x)) return new_int(s, x);
    if (a[0]->kind == K_FLOAT) {
        if (isinf(a[0]->real)) return fail(s, "cannot convert float infinity to integer");
        return whole_from_real(s, a[0]->real, otherwise);
    }
    if (a[0]->kind != K_STRING) return otherwise;
    const string *t = &a[0]->text;
    if (base != 0 && (base < 2 || base > 36)) base = 1;     // no digits: a real number or nothing
    if (base != 1 && parse_whole(&x, t->bytes, t->size, (int)base)) return new_int(s, x);
    if (parse_real(&real, t->bytes, t->size)) return whole_from_real(s, real, otherwise);
    return otherwise;
}

value *filter_float(state *s, value **a, const arguments *all) {
    double real;
    (void)all;
    if (a[0]->kind == K_UNDEFINED) return fail_undefined(s, a[0]);
    if (is_number(a[0])) return new_float(s, real_of(a[0]));
    if (a[0]->kind == K_STRING && parse_real(&real, a[0]->text.bytes, a[0]->text.size)) {
        return new_float(s, real);
    }
    return a[1] ? a[1] : new_float(s, 0);
}

/* Half to even of the decimal value, through text as Python does. */
static double round_real(double real, int64_t digits) {
    char text[400];
    if (!isfinite(real) || digits > 300) return real;
    if (digits < -308) return 0 * real;
    if (digits >= 0) {
        const int n = snprintf(text, sizeof text, "%.*f", (int)digits, real);
        double out = real;
        if (n < (int)sizeof text) {
            for (char *c = text; *c; c++) {
                if (*c == ',') *c = '.';
            }
            parse_real(&out, text, strlen(text));
        }
        return out;
    }
    const double scale = pow(10, (double)-digits), part = real / scale;
    double whole = round(part);
    if (fabs(part - whole) == 0.5) whole = 2 * round(part / 2);
    return whole * scale;
}

static value *round_whole(state *s, int64_t x, int64_t digits) {
    int64_t scale = 1, out;
    if (digits >= 0) return new_int(s, x);
    if (digits < -18) return new_int(s, 0);
    for (; digits < 0; digits++) scale *= 10;
    int64_t rest = x % scale;
    if (rest < 0) rest += scale;
    const int64_t low = x - rest;
    const bool up = rest > scale - rest || (rest == scale - rest && low / scale % 2 != 0);
    if (__builtin_add_overflow(low, up ? scale : 0, &out)) {
        return fail(s, "a whole number has more than 64 bits");
    }
    return new_int(s, out);
}

value *filter_round(state *s, value **a, const arguments *all) {
    int64_t digits, x;
    (void)all;
    const bool up = a[2] && string_is(a[2], "ceil"), down = a[2] && string_is(a[2], "floor");
    if (a[2] && !up && !down && !string_is(a[2], "common")) {
        return fail(s, "method must be common, ceil or floor");
    }
    if (!want_whole(s, &digits, a[1], 0)) return NULL;
    if (a[0]->kind == K_UNDEFINED) return fail_undefined(s, a[0]);
    if (!is_number(a[0])) return fail(s, "type %s doesn't define __round__", type_name(a[0]));
    if (!up && !down) {
        if (whole_of(a[0], &x)) return round_whole(s, x, digits);
        return new_float(s, round_real(a[0]->real, digits));
    }
    const double scale = pow(10, (double)digits), scaled = real_of(a[0]) * scale;
    if (!isfinite(scaled)) return fail(s, "a number is too large to be rounded");
    return new_float(s, (up ? ceil(scaled) : floor(scaled)) / scale);
}

value *filter_filesizeformat(state *s, value **a, const arguments *all) {
    char text[64];
    (void)all;
    const bool binary = yes_or(s, a[1], false);
    double size, base = binary ? 1024 : 1000, unit = base;
    if (is_number(a[0])) size = real_of(a[0]);
    else if (a[0]->kind != K_STRING || !parse_real(&size, a[0]->text.bytes, a[0]->text.size)) {
        return fail(s, "filesizeformat takes a number, not %s", type_name(a[0]));
    }
    if (size == 1) return new_text(s, "1 Byte");
    if (!isfinite(size)) return fail(s, "filesizeformat takes a finite number");
    if (size < base) {
        snprintf(text, sizeof text, "%.0f Bytes", trunc(size));
        return new_text(s, text);
    }
    int i = 0;
    for (unit *= base; i < 7 && size >= unit; i++) unit *= base;
    snprintf(text, sizeof text, "%.1f %c%sB", base * size / unit, (binary ? "KMGTPEZY"
                                                                         : "kMGTPEZY")[i],
             binary ? "i" : "");
    return new_text(s, text);
}

/* ---- one value of any kind ------------------------------------------------------------------- */

value *filter_default(state *s, value **a, const arguments *all) {
    (void)all;
    const bool also_false = yes_or(s, a[2], false);
    if (a[0]->kind != K_UNDEFINED && !(also_false && !truth(s, a[0]))) return a[0];
    return a[1] ? a[1] : lent_string(s, "", 0);
}

value *filter_length(state *s, value **a, const arguments *all) {
    (void)all;
    const int64_t n = length_of(s, a[0]);
    return n >= 0 ? new_int(s, n) : fail(s, "object of type '%s' has no len()", type_name(a[0]));
}

value *filter_attr(state *s, value **a, const arguments *all) {
    (void)all;
    if (a[1]->kind != K_STRING) return fail(s, "attribute name must be string");
    if (a[0]->kind == K_UNDEFINED) return fail_undefined(s, a[0]);
    /* the attribute only, not the item of a dictionary */
    if (a[0]->kind == K_DICT && !find_method(K_DICT, a[1]->text.bytes, a[1]->text.size) &&
        !unsafe_method(K_DICT, a[1]->text.bytes, a[1]->text.size)) {
        return new_undefined(s, NULL, a[1], a[0]);
    }
    return get_attribute(s, a[0], a[1]);
}
