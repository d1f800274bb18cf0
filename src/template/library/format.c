/* format.c - texts with places for values: "%s" % x, and "{}".format(x). */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/utf8.h"
#include "template/library/rows.h"

/* ---- numbers in a form ----------------------------------------------------------------------- */

typedef struct form {
    uint32_t fill;
    char align, sign, type;
    bool alternate, zero;
    char group;
    int64_t width, digits;      // digits -1: none
} form;

enum { MOST_WIDTH = 1 << 20, MOST_DIGITS = 300 };

/* A number as text without sign, by %, with digits grouped. */
static bool put_number(maker *m, const form *f, const value *v, bool *minus) {
    char text[700], type = f->type;
    int64_t whole;
    size_t n;
    if (whole_of(v, &whole) && (!type || strchr("dxXobcn", type))) {
        uint64_t x = whole < 0 ? -(uint64_t)whole : (uint64_t)whole;
        const int base = type == 'x' || type == 'X' ? 16 : type == 'o' ? 8 : type == 'b' ? 2 : 10;
        char *c = text + 80;
        *c = 0;
        do *--c = (type == 'X' ? "0123456789ABCDEF" : "0123456789abcdef")[x % (unsigned)base];
        while (x /= (unsigned)base);
        if (f->alternate && base != 10) {
            *--c = type;
            *--c = '0';
        }
        *minus = whole < 0;
        n = strlen(c);
        memmove(text, c, n + 1);
    } else {
        double real = real_of(v);
        *minus = signbit(real) != 0;
        real = fabs(real);
        const bool percent = type == '%';
        char pattern[16];
        if (!isfinite(real)) {
            n = (size_t)sprintf(text, isnan(real) ? "nan" : "inf");
            if (isnan(real)) *minus = false;
        } else if (!type && f->digits < 0) {
            n = real_text(text, real);
            text[n] = 0;
        } else {
            snprintf(pattern, sizeof pattern, "%%%s.*%c", f->alternate ? "#" : "",
                     percent ? 'f' : type ? type : 'g');
            n = (size_t)snprintf(text, sizeof text, pattern, (int)(f->digits < 0 ? 6 : f->digits),
                                 percent ? 100 * real : real);
        }
        for (size_t i = 0; i < n; i++) text[i] = text[i] == ',' ? '.' : text[i];
        if (percent) text[n++] = '%';
    }
    size_t digits = 0;
    while (digits < n && text[digits] >= '0' && text[digits] <= '9') digits++;
    for (size_t i = 0; i < n; i++) {
        if (f->group && i && i < digits && (digits - i) % 3 == 0) put(m, &f->group, 1);
        put(m, text + i, 1);
    }
    return !m->failed;
}

/* A text within its width. */
static void put_wide(maker *m, const form *f, value *text, char none) {
    const int64_t more = f->width - string_points(m->s, text);
    const char align = f->align ? f->align : none;
    const int64_t left = align == '>' ? more : align == '^' ? more / 2 : 0;
    for (int64_t i = 0; i < left && !m->failed; i++) put_point(m, f->fill);
    put(m, text->text.bytes, text->text.size);
    for (int64_t i = left; i < more && !m->failed; i++) put_point(m, f->fill);
}

static value *number_text(state *s, const form *f, const value *v) {
    maker digits = { .s = s }, m = { .s = s };
    bool minus = false;
    if (!put_number(&digits, f, v, &minus)) return NULL;
    value *text = made(&digits);
    if (!text) return NULL;
    const char sign = minus ? '-' : f->sign == '+' || f->sign == ' ' ? f->sign : 0;
    if (f->align == '=' || (f->zero && !f->align)) {
        const int64_t more = f->width - string_points(s, text) - (sign ? 1 : 0);
        if (sign) put(&m, &sign, 1);
        for (int64_t i = 0; i < more && !m.failed; i++) put_point(&m, f->zero ? '0' : f->fill);
        put(&m, text->text.bytes, text->text.size);
        return made(&m);
    }
    maker with_sign = { .s = s };
    if (sign) put(&with_sign, &sign, 1);
    put(&with_sign, text->text.bytes, text->text.size);
    value *all = made(&with_sign);
    if (!all) return NULL;
    put_wide(&m, f, all, '>');
    return made(&m);
}

/* ---- format specifications ------------------------------------------------------------------- */

static bool read_form(state *s, form *f, const char *spec, size_t size) {
    size_t at = 0;
    uint32_t point;
    *f = (form){ .fill = ' ', .digits = -1 };
    const size_t first = size ? (size_t)mn_utf8_take(spec, size, &point) : 0;
    if (first && first < size && strchr("<>^=", spec[first]) && spec[first]) {
        f->fill = point;
        f->align = spec[first];
        at = first + 1;
    } else if (size && spec[0] && strchr("<>^=", spec[0])) {
        f->align = spec[at++];
    }
    if (at < size && (spec[at] == '+' || spec[at] == '-' || spec[at] == ' ')) f->sign = spec[at++];
    if (at < size && spec[at] == '#') f->alternate = at++ < size;
    if (at < size && spec[at] == '0') {
        f->zero = !f->align;
        if (!f->zero && f->fill == ' ') f->fill = '0';
        at++;
    }
    while (at < size && spec[at] >= '0' && spec[at] <= '9' && f->width < MOST_WIDTH) {
        f->width = 10 * f->width + spec[at++] - '0';
    }
    if (at < size && (spec[at] == ',' || spec[at] == '_')) f->group = spec[at++];
    if (at < size && spec[at] == '.') {
        f->digits = 0;
        const size_t from = ++at;
        while (at < size && spec[at] >= '0' && spec[at] <= '9' && f->digits < MOST_WIDTH) {
            f->digits = 10 * f->digits + spec[at++] - '0';
        }
        if (at == from) at = size + 1;
    }
    if (at < size) f->type = spec[at++];
    if (at == size && f->width < MOST_WIDTH && f->digits < MOST_WIDTH) return true;
    fail(s, "invalid format specifier");
    return false;
}

value *format_one(state *s, value *v, const char *spec, size_t size) {
    form f;
    maker m = { .s = s };
    if (!size) return string_of(s, v);
    if (!read_form(s, &f, spec, size)) return NULL;
    if (v->kind == K_STRING) {
        if ((f.type && f.type != 's') || f.align == '=' || f.sign || f.group || f.alternate) {
            return fail(s, "unknown format code '%c' for object of type 'str'",
                        f.type ? f.type : '=');
        }
        if (f.zero) f.fill = '0';
        const int64_t n = string_points(s, v);
        value *text = f.digits >= 0 && f.digits < n ? string_cut(s, v, 0, f.digits) : v;
        if (!text) return NULL;
        put_wide(&m, &f, text, '<');
        return made(&m);
    }
    const bool whole = v->kind == K_INT || v->kind == K_BOOL;
    if (!is_number(v)) {
        return fail(s, "unsupported format string passed to %s.__format__", type_name(v));
    }
    if (f.type && !strchr(whole ? "dxXobeEfFgG%" : "eEfFgG%", f.type)) {
        return fail(s, "unknown format code '%c' for object of type '%s'", f.type, type_name(v));
    }
    if (whole && f.digits >= 0 && (!f.type || strchr("dxXob", f.type))) {
        return fail(s, "precision not allowed in integer format specifier");
    }
    if (f.digits > MOST_DIGITS) return fail(s, "a number of so many digits is not supported");
    if (!whole && !f.type && f.digits >= 0) return fail(s,
                                                        "a float needs a type behind its digits");
    return number_text(s, &f, v);
}

/* ---- "{}".format ----------------------------------------------------------------------------- */

typedef struct braces {
    state *s;
    const arguments *given;
    int64_t next;               // of "{}"; -1: places have numbers
    int depth;
} braces;

static value *named_value(state *s, const arguments *a, const char *name, size_t size) {
    for (int64_t i = 0; i < a->n_named; i++) {
        const value *key = a->names[i];
        if (key->kind == K_STRING && key->text.size == size &&
            memcmp(key->text.bytes, name, size) == 0) return a->named[i];
    }
    return fail(s, "format: there is no value named '%.*s'", (int)(size < 100 ? size : 100), name);
}

/* The value of "0.a[b]". */
static value *field_value(braces *b, const char *text, size_t size) {
    state *s = b->s;
    size_t at = 0;
    int64_t place;
    value *v;
    while (at < size && text[at] != '.' && text[at] != '[') at++;
    if (at == 0 || (text[0] >= '0' && text[0] <= '9' && parse_whole(&place, text, at, 10))) {
        if ((at == 0 && b->next < 0) || (at && b->next > 0)) {
            return fail(s, "format: places with and without numbers are mixed");
        }
        if (at == 0) place = b->next++;
        else b->next = -1;
        if (place < 0 || place >= b->given->n) {
            return fail(s, "replacement index %lld out of range for positional args tuple",
                        (long long)place);
        }
        v = b->given->at[place];
    } else {
        v = named_value(s, b->given, text, at);
    }
    while (v && at < size) {
        const bool item = text[at++] == '[';
        size_t end = at;
        while (end < size && (item ? text[end] != ']' : text[end] != '.' &&
               text[end] != '[')) end++;
        if (end == at || (item && end == size)) return fail(s, "format: a field is malformed");
        const bool number = item && parse_whole(&place, text + at, end - at, 10);
        value *key = number ? new_int(s, place) : lent_string(s, text + at, end - at);
        v = !key ? NULL : item ? get_item(s, v, key) : get_attribute(s, v, key);
        at = end + (item ? 1 : 0);
        if (at < size && text[at] != '.' && text[at] != '[') {
            return fail(s, "format: only '.' or '[' may follow ']'");
        }
    }
    return v;
}

static bool put_braces(braces *b, maker *m, const char *text, size_t size);

/* "{name!r:spec}" without its braces. */
static bool put_field(braces *b, maker *m, const char *text, size_t size) {
    size_t name = 0, bracket = 0;
    char convert = 0;
    for (; name < size; name++) {
        if (text[name] == '[') bracket = 1;
        if (text[name] == ']') bracket = 0;
        if (!bracket && (text[name] == '!' || text[name] == ':')) break;
    }
    size_t at = name;
    if (at < size && text[at] == '!') {
        convert = at + 1 < size ? text[at + 1] : 0;
        at += 2;
        if (!convert || !strchr("rsa", convert) || (at < size && text[at] != ':')) {
            fail(b->s, "format: a conversion is malformed");
            return false;
        }
    }
    value *v = field_value(b, text, name);
    if (v && convert) v = convert == 's' ? string_of(b->s, v) : repr_of(b->s, v);
    if (!v) return false;
    maker spec = { .s = b->s };
    if (at < size && !put_braces(b, &spec, text + at + 1, size - at - 1)) return false;
    const value *how = made(&spec);
    const value *out = how ? format_one(b->s, v, how->text.bytes, how->text.size) : NULL;
    if (out) put(m, out->text.bytes, out->text.size);
    return out != NULL;
}

static bool put_braces(braces *b, maker *m, const char *text, size_t size) {
    if (++b->depth > 2) {
        fail(b->s, "format: fields are nested too deep");
        return false;
    }
    for (size_t at = 0; at < size && !m->failed;) {
        const char c = text[at++];
        if (c != '{' && c != '}') {
            put(m, &c, 1);
        } else if (at < size && text[at] == c) {
            put(m, &c, 1);
            at++;
        } else {
            int open = 1;
            size_t end = at;
            for (; end < size && open; end++) open += text[end] == '{' ? 1 : text[end] == '}' ? -1
                : 0;
            if (c == '}' || open) {
                fail(b->s, "format: single '%c' encountered in format string", c);
                return false;
            }
            if (!put_field(b, m, text + at, end - 1 - at)) return false;
            at = end;
        }
    }
    b->depth--;
    return !m->failed;
}

value *format_braces(state *s, value *format, const arguments *a) {
    maker m = { .s = s };
    braces b = { .s = s, .given = a };
    return put_braces(&b, &m, format->text.bytes, format->text.size) ? made(&m) : NULL;
}

/* ---- "%s" % x -------------------------------------------------------------------------------- */

typedef struct percent {
    state *s;
    value *with;
    int64_t next;
    bool named;
} percent;

static value *next_value(percent *p) {
    if (p->with->kind == K_TUPLE) {
        if (p->next < p->with->list.n) return p->with->list.at[p->next++];
    } else if (p->next++ == 0) {
        return p->with;
    }
    return fail(p->s, "not enough arguments for format string");
}

static bool read_star(percent *p, const string *t, size_t *at, int64_t *out) {
    *out = 0;
    if (*at < t->size && t->bytes[*at] == '*') {
        const value *v = next_value(p);
        (*at)++;
        return v && want_whole(p->s, out, v, 0);
    }
    while (*at < t->size && t->bytes[*at] >= '0' && t->bytes[*at] <= '9' && *out < MOST_WIDTH) {
        *out = 10 * *out + t->bytes[(*at)++] - '0';
    }
    return true;
}

static value *converted(percent *p, form *f, value *v) {
    state *s = p->s;
    maker m = { .s = s };
    if (f->type == 's' || f->type == 'r' || f->type == 'a' || f->type == 'c') {
        value *text = f->type == 's' || (f->type == 'c' && v->kind == K_STRING) ? string_of(s, v)
                                                                               : repr_of(s, v);
        if (f->type == 'c' && v->kind == K_INT && text) {
            maker one = { .s = s };
            if (v->whole < 0 || v->whole > 0x10FFFF || (v->whole >= 0xD800 && v->whole < 0xE000)) {
                return fail(s, "%%c arg not in range(0x110000)");
            }
            put_point(&one, (uint32_t)v->whole);
            text = made(&one);
        }
        if (!text) return NULL;
        if (f->type == 'c' && string_points(s, text) != 1) {
            return fail(s, "%%c requires int or char");
        }
        if (f->digits >= 0 && f->digits < string_points(s, text)) {
            text = string_cut(s, text, 0, f->digits);
        }
        if (!text) return NULL;
        put_wide(&m, f, text, '>');
        return made(&m);
    }
    const bool whole = strchr("diuxXo", f->type) != NULL;
    if (v->kind == K_UNDEFINED) return fail_undefined(s, v);
    if (!is_number(v) || (whole && v->kind == K_FLOAT && strchr("xXo", f->type))) {
        return fail(s, "%%%c format: a number is required, not %s", f->type, type_name(v));
    }
    if (whole && v->kind == K_FLOAT) {
        if (!(fabs(v->real) < 9.2e18)) return fail(s, "a whole number has more than 64 bits");
        v = new_int(s, (int64_t)v->real);
    }
    if (f->digits > MOST_DIGITS) return fail(s, "a number of so many digits is not supported");
    if (whole && strchr("diu", f->type)) f->type = 'd';
    if (whole && f->digits > 0) return fail(s, "digits of whole numbers are not supported");
    return v ? number_text(s, f, v) : NULL;
}

/* One "%..." from behind the sign on. */
static value *take_percent(percent *p, const string *t, size_t *at) {
    form f = { .fill = ' ', .digits = -1 };
    value *v = NULL;
    state *s = p->s;
    if (*at < t->size && t->bytes[*at] == '(') {
        const size_t from = ++*at;
        while (*at < t->size && t->bytes[*at] != ')') (*at)++;
        if (*at >= t->size) return fail(s, "incomplete format key");
        if (p->with->kind != K_DICT) return fail(s, "format requires a mapping");
        v = dict_get_text(p->with->members, t->bytes + from, *at - from);
        if (!v) return fail(s, "format: a key is missing");
        p->named = true;
        (*at)++;
    }
    for (; *at < t->size && t->bytes[*at] && strchr("-+ 0#", t->bytes[*at]); (*at)++) {
        const char c = t->bytes[*at];
        if (c == '-') f.align = '<';
        else if (c == '0') f.zero = true;
        else if (c == '#') f.alternate = true;
        else if (f.sign != '+') f.sign = c;
    }
    if (!read_star(p, t, at, &f.width)) return NULL;
    if (f.width < 0) {
        f.align = '<';
        f.width = -f.width;
    }
    if (*at < t->size && t->bytes[*at] == '.') {
        (*at)++;
        if (!read_star(p, t, at, &f.digits)) return NULL;
        if (f.digits < 0) f.digits = 0;
    }
    if (f.width >= MOST_WIDTH || f.digits >= MOST_WIDTH) return fail(s,
                                                                     "a width is over the limit");
    while (*at < t->size && t->bytes[*at] && strchr("hlL", t->bytes[*at])) (*at)++;
    if (*at >= t->size) return fail(s, "incomplete format");
    f.type = t->bytes[(*at)++];
    if (f.type == '%') return lent_string(s, "%", 1);
    if (!f.type || !strchr("srcadiuxXoeEfFgG", f.type)) {
        return fail(s, "unsupported format character '%c'", f.type > 32 ? f.type : '?');
    }
    if (!v && !(v = next_value(p))) return NULL;
    return converted(p, &f, v);
}

value *format_percent(state *s, value *format, value *with) {
    const string *t = &format->text;
    percent p = { .s = s, .with = with };
    maker m = { .s = s };
    for (size_t at = 0; at < t->size && !m.failed;) {
        const char c = t->bytes[at++];
        if (c != '%') {
            put(&m, &c, 1);
            continue;
        }
        const value *v = take_percent(&p, t, &at);
        if (!v) return NULL;
        put(&m, v->text.bytes, v->text.size);
    }
    const bool over = with->kind == K_TUPLE ? p.next < with->list.n
                                            : p.next == 0 && !p.named && with->kind != K_DICT &&
                                              with->kind != K_LIST;
    if (over) return fail(s, "not all arguments converted during string formatting");
    return made(&m);
}
