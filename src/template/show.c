/* show.c - values as text: str() and repr() of Python, and its json.dumps. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/utf8.h"
#include "template/state.h"

/* ---- numbers --------------------------------------------------------------------------------- */

/* repr(float): the fewest digits that read back, with an exponent from 1e16 and below 1e-4 on. */
size_t real_text(char out[40], double real) {
    if (isnan(real)) return (size_t)sprintf(out, "nan");
    if (isinf(real)) return (size_t)sprintf(out, real < 0 ? "-inf" : "inf");
    char text[40], digits[24];
    for (int more = 0; more <= 16; more++) {
        snprintf(text, sizeof text, "%.*e", more, real);
        if (strtod(text, NULL) == real) break;             // of the same locale
    }
    size_t n = 0, at = 0;
    int n_digits = 0;
    const char *c = text;
    if (*c == '-') out[n++] = *c++;
    for (; *c && *c != 'e'; c++) {
        if (*c >= '0' && *c <= '9') digits[n_digits++] = *c;
    }
    const int power = atoi(c + 1);
    while (n_digits > 1 && digits[n_digits - 1] == '0') n_digits--;
    if (power >= 16 || power < -4) {
        out[n++] = digits[at++];
        if (n_digits > 1) out[n++] = '.';
        while (at < (size_t)n_digits) out[n++] = digits[at++];
        return n + (size_t)sprintf(out + n, "e%c%02d", power < 0 ? '-' : '+', abs(power));
    }
    if (power < 0) {
        n += (size_t)sprintf(out + n, "0.");
        for (int i = -1; i > power; i--) out[n++] = '0';
    }
    for (int i = 0; i < n_digits || i <= power; i++) {
        out[n++] = i < n_digits ? digits[i] : '0';
        if (i == power) out[n++] = '.';
    }
    if (out[n - 1] == '.') out[n++] = '0';
    return n;
}

static void put_real(maker *m, double real) {
    char text[40];
    put(m, text, real_text(text, real));
}

static void put_whole(maker *m, int64_t whole) {
    char text[24];
    put(m, text, (size_t)snprintf(text, sizeof text, "%lld", (long long)whole));
}

/* ---- repr ------------------------------------------------------------------------------------ */

static void put_string_repr(maker *m, const string *t) {
    const bool single = t->size && memchr(t->bytes, '\'', t->size);
    const bool twice = t->size && memchr(t->bytes, '"', t->size);
    const char quote = single && !twice ? '"' : '\'';
    put(m, &quote, 1);
    for (size_t at = 0; at < t->size;) {
        uint32_t point;
        const int n = mn_utf8_take(t->bytes + at, t->size - at, &point);
        char text[16];
        if (point == (uint32_t)quote || point == '\\') {
            put(m, "\\", 1);
            put_point(m, point);
        } else if (point == '\n' || point == '\r' || point == '\t') {
            put_text(m, point == '\n' ? "\\n" : point == '\r' ? "\\r" : "\\t");
        } else if (point >= 0x20 && point < 0x7F) {
            put_point(m, point);
        } else if (!is_printable(point)) {
            snprintf(text, sizeof text, point < 0x100 ? "\\x%02x" : point < 0x10000 ? "\\u%04x"
                                                                                    : "\\U%08x",
                     (unsigned)point);
            put_text(m, text);
        } else {
            put(m, t->bytes + at, (size_t)n);
        }
        at += (size_t)n;
    }
    put(m, &quote, 1);
}

static bool put_items(maker *m, const items *list, const char *open, const char *close) {
    put_text(m, open);
    for (int64_t i = 0; i < list->n; i++) {
        if (i) put_text(m, ", ");
        if (!put_repr(m, list->at[i])) return false;
    }
    put_text(m, close);
    return true;
}

static bool put_members(maker *m, const dict *d) {
    put_text(m, "{");
    for (int64_t i = 0; i < d->n; i++) {
        if (i) put_text(m, ", ");
        if (!put_repr(m, d->slots[i].key)) return false;
        put_text(m, ": ");
        if (!put_repr(m, d->slots[i].item)) return false;
    }
    put_text(m, "}");
    return true;
}

static bool put_view(maker *m, const value *v) {
    put_text(m, type_name(v));
    put_text(m, "([");
    for (int64_t i = 0; i < v->view.of->n; i++) {
        const dict_slot *slot = &v->view.of->slots[i];
        if (i) put_text(m, ", ");
        if (v->view.which == VIEW_ITEMS) put_text(m, "(");
        if (v->view.which != VIEW_VALUES && !put_repr(m, slot->key)) return false;
        if (v->view.which == VIEW_ITEMS) put_text(m, ", ");
        if (v->view.which != VIEW_KEYS && !put_repr(m, slot->item)) return false;
        if (v->view.which == VIEW_ITEMS) put_text(m, ")");
    }
    put_text(m, "])");
    return true;
}

/* Objects print by what they are; Python would add an address. */
static bool put_object(maker *m, const value *v) {
    char text[200];
    if (v->kind == K_RANGE) {
        const range *r = &v->range;
        if (r->step == 1) {
            snprintf(text, sizeof text, "range(%lld, %lld)", (long long)r->from, (long long)r->to);
        } else {
            snprintf(text, sizeof text, "range(%lld, %lld, %lld)", (long long)r->from,
                     (long long)r->to, (long long)r->step);
        }
    } else if (v->kind == K_MACRO) {
        snprintf(text, sizeof text, "<Macro %s%.150s%s>", v->macro->name ? "'" : "",
                 v->macro->name ? v->macro->name : "anonymous", v->macro->name ? "'" : "");
    } else if (v->kind == K_LOOP) {
        const int64_t n = length_of(m->s, (value *)v);
        snprintf(text, sizeof text, "<LoopContext %lld/%lld>", (long long)v->loop->index0 + 1,
                 (long long)n);
    } else {
        snprintf(text, sizeof text, "<%s object>", type_name(v));
    }
    put_text(m, text);
    return true;
}

static bool put_repr_below(maker *m, value *v) {
    switch (v->kind) {
    case K_UNDEFINED: put_text(m, "Undefined"); return true;
    case K_NONE: put_text(m, "None"); return true;
    case K_BOOL: put_text(m, v->yes ? "True" : "False"); return true;
    case K_INT: put_whole(m, v->whole); return true;
    case K_FLOAT: put_real(m, v->real); return true;
    case K_STRING: put_string_repr(m, &v->text); return true;
    case K_LIST: return put_items(m, &v->list, "[", "]");
    case K_TUPLE: return put_items(m, &v->list, "(", v->list.n == 1 ? ",)" : ")");
    case K_DICT: return put_members(m, v->members);
    case K_NAMESPACE: {
        put_text(m, "<Namespace ");
        if (!put_members(m, v->members)) return false;
        put_text(m, ">");
        return true;
    }
    case K_VIEW: return put_view(m, v);
    default: return put_object(m, v);
    }
}

bool put_repr(maker *m, value *v) {
    state *s = m->s;
    if (++s->depth > MOST_DEPTH) fail(s, "a value is nested too deep to be shown");
    const bool ok = spend(s, 1) && put_repr_below(m, v);
    s->depth--;
    return ok && !m->failed && !failed(s);
}

bool put_string_of(maker *m, value *v) {
    if (v->kind == K_STRING) {
        put(m, v->text.bytes, v->text.size);
        return spend_bytes(m->s, v->text.size);
    }
    return v->kind == K_UNDEFINED || put_repr(m, v);
}

value *string_of(state *s, value *v) {
    if (v->kind == K_STRING) return v;
    maker m = { .s = s };
    return put_string_of(&m, v) ? made(&m) : NULL;
}

value *repr_of(state *s, value *v) {
    maker m = { .s = s };
    return put_repr(&m, v) ? made(&m) : NULL;
}

/* ---- json.dumps ------------------------------------------------------------------------------ */

typedef struct json_style {
    maker *m;
    const char *indent;         // NULL: on one line
    size_t indent_size;
    const char *comma, *colon;
    size_t comma_size, colon_size;
    bool sort, ascii;
    int depth;
} json_style;

static void put_json_string(maker *m, const string *t, bool ascii) {
    put(m, "\"", 1);
    for (size_t at = 0; at < t->size;) {
        uint32_t point;
        const int n = mn_utf8_take(t->bytes + at, t->size - at, &point);
        static const char special[] = "\"\\\n\r\t\f\b", names[] = "\"\\nrtfb";
        const char *found = point && point < 0x80 ? strchr(special, (int)point) : NULL;
        char text[16];
        if (found) {
            put(m, "\\", 1);
            put(m, &names[found - special], 1);
        } else if (point < 0x20 || (ascii && point >= 0x7F && point < 0x10000 && point != 0x7F)) {
            snprintf(text, sizeof text, "\\u%04x", (unsigned)point);
            put_text(m, text);
        } else if (ascii && point >= 0x10000) {
            snprintf(text, sizeof text, "\\u%04x\\u%04x",
                     (unsigned)(0xD800 + ((point - 0x10000) >> 10)),
                     (unsigned)(0xDC00 + (point & 0x3FF)));
            put_text(m, text);
        } else {
            put(m, t->bytes + at, (size_t)n);
        }
        at += (size_t)n;
    }
    put(m, "\"", 1);
}

static void put_break(json_style *j) {
    if (!j->indent) return;
    put(j->m, "\n", 1);
    for (int i = 0; i < j->depth; i++) put(j->m, j->indent, j->indent_size);
}

static bool put_json_value(json_style *j, value *v);

static bool put_json_list(json_style *j, const items *list) {
    if (!list->n) {
        put_text(j->m, "[]");
        return true;
    }
    put_text(j->m, "[");
    j->depth++;
    for (int64_t i = 0; i < list->n; i++) {
        if (i) put(j->m, j->comma, j->comma_size);
        put_break(j);
        if (!put_json_value(j, list->at[i])) return false;
    }
    j->depth--;
    put_break(j);
    put_text(j->m, "]");
    return true;
}

/* Keys become strings the way JSON spells their values. */
static bool put_json_key(json_style *j, value *key) {
    if (key->kind == K_STRING) {
        put_json_string(j->m, &key->text, j->ascii);
        return true;
    }
    if (!is_number(key) && key->kind != K_NONE) {
        fail(j->m->s, "keys must be str, int, float, bool or None, not %s", type_name(key));
        return false;
    }
    put_text(j->m, "\"");
    if (!put_json_value(j, key)) return false;
    put_text(j->m, "\"");
    return true;
}

typedef struct sorting {
    dict_slot **slots, **other;
    state *s;
} sorting;

/* Merge sort by key: stable, and it ends whatever a comparison says. */
static bool sort_slots(sorting *t, int64_t from, int64_t to) {
    if (to - from < 2) return true;
    const int64_t middle = (from + to) / 2;
    if (!sort_slots(t, from, middle) || !sort_slots(t, middle, to)) return false;
    for (int64_t a = from, b = middle, n = from; n < to; n++) {
        int c = -1;
        if (a < middle && b < to && !order(t->s, t->slots[b]->key, t->slots[a]->key, "<", &c)) {
            return false;
        }
        const bool second = a == middle || (b < to && c == -1);
        t->other[n] = second ? t->slots[b++] : t->slots[a++];
    }
    memcpy(t->slots + from, t->other + from, (size_t)(to - from) * sizeof *t->slots);
    return true;
}

static bool put_json_dict(json_style *j, const dict *d) {
    state *s = j->m->s;
    sorting t = { .s = s };
    if (!d->n) {
        put_text(j->m, "{}");
        return true;
    }
    t.slots = take(s, 2 * (size_t)d->n * sizeof *t.slots);
    if (!t.slots) return false;
    t.other = t.slots + d->n;
    for (int64_t i = 0; i < d->n; i++) t.slots[i] = &d->slots[i];
    if (j->sort && !sort_slots(&t, 0, d->n)) return false;
    put_text(j->m, "{");
    j->depth++;
    for (int64_t i = 0; i < d->n; i++) {
        if (i) put(j->m, j->comma, j->comma_size);
        put_break(j);
        if (!put_json_key(j, t.slots[i]->key)) return false;
        put(j->m, j->colon, j->colon_size);
        if (!put_json_value(j, t.slots[i]->item)) return false;
    }
    j->depth--;
    put_break(j);
    put_text(j->m, "}");
    return true;
}

static bool put_json_value(json_style *j, value *v) {
    if (j->m->failed || !spend(j->m->s, 1)) return false;
    if (j->m->s->depth + j->depth > MOST_DEPTH) {
        fail(j->m->s, "a value is nested too deep to be shown");
        return false;
    }
    switch (v->kind) {
    case K_NONE: put_text(j->m, "null"); return true;
    case K_BOOL: put_text(j->m, v->yes ? "true" : "false"); return true;
    case K_INT: put_whole(j->m, v->whole); return true;
    case K_FLOAT:
        if (isnan(v->real)) put_text(j->m, "NaN");
        else if (isinf(v->real)) put_text(j->m, v->real < 0 ? "-Infinity" : "Infinity");
        else put_real(j->m, v->real);
        return true;
    case K_STRING:
        put_json_string(j->m, &v->text, j->ascii);
        return spend_bytes(j->m->s, v->text.size);
    case K_LIST:
    case K_TUPLE: return put_json_list(j, &v->list);
    case K_DICT: return put_json_dict(j, v->members);
    default:
        fail(j->m->s, "Object of type %s is not JSON serializable", type_name(v));
        return false;
    }
}

/* The pair of separators, of a tuple or list. */
static bool read_separators(json_style *j, const value *given) {
    if (!given || given->kind == K_NONE) return true;
    const bool fits = (given->kind == K_LIST || given->kind == K_TUPLE) && given->list.n == 2 &&
                      given->list.at[0]->kind == K_STRING && given->list.at[1]->kind == K_STRING;
    if (!fits) {
        fail(j->m->s, "tojson takes two texts as separators");
        return false;
    }
    j->comma = given->list.at[0]->text.bytes;
    j->comma_size = given->list.at[0]->text.size;
    j->colon = given->list.at[1]->text.bytes;
    j->colon_size = given->list.at[1]->text.size;
    return true;
}

bool put_json(maker *m, value *v, value *indent, value *separators, bool sort, bool ascii) {
    int64_t width;
    json_style j = { .m = m, .comma = ", ", .colon = ": ", .comma_size = 2, .colon_size = 2,
                     .sort = sort, .ascii = ascii };
    if (indent && indent->kind == K_STRING) {
        j.indent = indent->text.bytes;
        j.indent_size = indent->text.size;
    } else if (indent && whole_of(indent, &width)) {
        maker blanks = { .s = m->s };
        put_fill(&blanks, ' ', width);
        const value *text = made(&blanks);
        if (!text) return false;
        j.indent = text->text.bytes;
        j.indent_size = text->text.size;
    } else if (indent && indent->kind != K_NONE) {
        fail(m->s, "tojson takes a number or a text as indent, not %s", type_name(indent));
        return false;
    }
    if (j.indent) j.comma_size = 1;                     // "," and a line break
    return read_separators(&j, separators) && put_json_value(&j, v) && !m->failed;
}
