/* value.c - making values; work and failure of a rendering. */
#include "template/value.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "base/status.h"
#include "base/utf8.h"
#include "template/state.h"

value mn_value_none = { .kind = K_NONE };
value mn_value_true = { .kind = K_BOOL, .yes = true };
value mn_value_false = { .kind = K_BOOL, .yes = false };

/* ---- failure and limits ---------------------------------------------------------------------- */

bool failed(const state *s) {
    return s->status != MN_OK;
}

static value *fail_as(state *s, mn_status status, const char *format, va_list args) {
    if (s->status != MN_OK) return NULL;
    s->status = status;
    vsnprintf(s->message, sizeof s->message, format, args);
    /* the message may be cut within a character */
    s->message[mn_utf8_valid(s->message, strlen(s->message))] = 0;
    return NULL;
}

value *fail(state *s, const char *format, ...) {
    va_list args;
    va_start(args, format);
    value *none = fail_as(s, MN_ERR_ARGUMENT, format, args);
    va_end(args);
    return none;
}

static value *fail_limit(state *s, const char *format, ...) {
    va_list args;
    va_start(args, format);
    value *none = fail_as(s, MN_ERR_UNSUPPORTED, format, args);
    va_end(args);
    return none;
}

bool spend(state *s, int64_t steps) {
    if (s->steps >= steps) {
        s->steps -= steps;
        return !failed(s);
    }
    s->steps = 0;
    fail_limit(s, "the template takes more steps than the limit");
    return false;
}

bool spend_bytes(state *s, size_t bytes) {
    return spend(s, (int64_t)(bytes / 64));
}

value *no_memory(state *s) {
    return fail_limit(s, "the template's values take more than the limit of %zu MiB",
                      s->most_bytes >> 20);
}

void *take(state *s, size_t bytes) {
    void *out = store_take(s->store, bytes);
    if (!out) no_memory(s);
    return out;
}

bool add_node(state *s, nodes *list, node *n) {
    if (list->n == list->room) {
        const int64_t room = list->room ? 2 * list->room : 4;
        node **grown = take(s, (size_t)room * sizeof *grown);
        if (!grown) return false;
        if (list->n) memcpy(grown, list->at, (size_t)list->n * sizeof *grown);
        list->at = grown;
        list->room = room;
    }
    list->at[list->n++] = n;
    return true;
}

/* ---- values ---------------------------------------------------------------------------------- */

value *new_value(state *s, value_kind kind) {
    value *v = take(s, sizeof *v);
    if (v) v->kind = kind;
    return v;
}

value *new_bool(bool yes) {
    return yes ? &mn_value_true : &mn_value_false;
}

value *new_int(state *s, int64_t whole) {
    value *v = new_value(s, K_INT);
    if (v) v->whole = whole;
    return v;
}

value *new_float(state *s, double real) {
    value *v = new_value(s, K_FLOAT);
    if (v) v->real = real;
    return v;
}

value *lent_string(state *s, const char *bytes, size_t size) {
    value *v = new_value(s, K_STRING);
    if (v) v->text = (string){ bytes, size, -1 };
    return v;
}

value *new_string(state *s, const char *bytes, size_t size) {
    char *copy = store_bytes(&s->texts, size + 1);
    if (!copy) return no_memory(s);
    if (size) memcpy(copy, bytes, size);
    return spend_bytes(s, size) ? lent_string(s, copy, size) : NULL;
}

value *new_text(state *s, const char *text) {
    return new_string(s, text, strlen(text));
}

value *new_list(state *s, value_kind kind, int64_t n) {
    value *v = new_value(s, kind);
    if (!v || !spend(s, n / 8)) return NULL;
    v->list.n = n;
    v->list.at = n ? take(s, (size_t)n * sizeof *v->list.at) : NULL;
    return n && !v->list.at ? NULL : v;
}

value *pair_of(state *s, value *a, value *b) {
    value *v = a && b ? new_list(s, K_TUPLE, 2) : NULL;
    if (!v) return NULL;
    v->list.at[0] = a;
    v->list.at[1] = b;
    return v;
}

bool push(state *s, items *list, value *item) {
    if (!item) return false;
    if ((list->n & (list->n - 1)) == 0) {               // room is the next power of two
        const int64_t room = list->n ? 2 * list->n : 1;
        value **grown = take(s, (size_t)room * sizeof *grown);
        if (!grown) return false;
        if (list->n) memcpy(grown, list->at, (size_t)list->n * sizeof *grown);
        list->at = grown;
    }
    list->at[list->n++] = item;
    return true;
}

value *list_of(state *s, const items *list) {
    value *v = new_value(s, K_LIST);
    if (v) v->list = *list;
    return v;
}

value *new_undefined(state *s, const char *hint, value *name, value *object) {
    value *v = new_value(s, K_UNDEFINED);
    if (v) v->undefined = (undefined){ hint, name, object };
    return v;
}

value *new_iterator(state *s, value *(*next)(state *s, iterator *it)) {
    value *v = new_value(s, K_ITERATOR);
    iterator *it = v ? take(s, sizeof *it) : NULL;
    if (!it) return NULL;
    it->next = next;
    v->iterator = it;
    return v;
}

value *fail_undefined(state *s, const value *v) {
    const undefined *u = &v->undefined;
    if (u->hint) return fail(s, "%s", u->hint);
    value *name = u->name ? repr_of(s, u->name) : NULL;
    if (!name) return fail(s, "a value is undefined");
    const int n = (int)(name->text.size < 200 ? name->text.size : 200);
    if (!u->object) return fail(s, "%.*s is undefined", n, name->text.bytes);
    return fail(s, "%s has no %s %.*s", u->object->kind == K_NONE ? "None" : type_name(u->object),
                u->name->kind == K_STRING ? "attribute" : "element", n, name->text.bytes);
}

/* ---- strings --------------------------------------------------------------------------------- */

int64_t string_points(state *s, value *v) {
    string *t = &v->text;
    if (t->points < 0) {
        int64_t n = 0;
        for (size_t i = 0; i < t->size; i++) n += ((uint8_t)t->bytes[i] & 0xC0) != 0x80;
        spend_bytes(s, t->size);
        t->points = n;
    }
    return t->points;
}

bool string_is(const value *v, const char *text) {
    return v->kind == K_STRING && v->text.size == strlen(text) &&
           memcmp(v->text.bytes, text, v->text.size) == 0;
}

/* Where the code point `n` begins. */
static size_t byte_of(const string *t, int64_t n) {
    if (t->points == (int64_t)t->size) return (size_t)n;
    size_t at = 0;
    for (; at < t->size; at++) {
        if (((uint8_t)t->bytes[at] & 0xC0) == 0x80) continue;
        if (n-- == 0) break;
    }
    return at;
}

value *string_cut(state *s, value *v, int64_t from, int64_t to) {
    const int64_t points = string_points(s, v);
    if (from >= to) return lent_string(s, "", 0);
    const size_t a = byte_of(&v->text, from), b = byte_of(&v->text, to);
    if (points != (int64_t)v->text.size && !spend_bytes(s, b)) return NULL;
    value *out = lent_string(s, v->text.bytes + a, b - a);
    if (out) out->text.points = to - from;
    return out;
}

/* ---- text being made ------------------------------------------------------------------------- */

void put(maker *m, const char *bytes, size_t size) {
    if (m->failed || !size) return;
    if (size > m->room - m->size) {
        size_t room = m->room ? 2 * m->room : 64;
        if (room < m->size + size) room = m->size + size;
        char *grown = store_grow(&m->s->texts, m->bytes, m->room, room);
        if (!grown) {
            no_memory(m->s);
            m->failed = true;
            return;
        }
        m->bytes = grown;
        m->room = room;
    }
    memcpy(m->bytes + m->size, bytes, size);
    m->size += size;
}

void put_text(maker *m, const char *text) {
    put(m, text, strlen(text));
}

void put_point(maker *m, uint32_t point) {
    char bytes[4];
    put(m, bytes, (size_t)mn_utf8_put(bytes, point));
}

void put_fill(maker *m, char c, int64_t n) {
    char many[64];
    memset(many, c, sizeof many);
    for (; n > 0 && !m->failed; n -= (int64_t)sizeof many) {
        put(m, many, n < (int64_t)sizeof many ? (size_t)n : sizeof many);
    }
}

value *made(maker *m) {
    if (m->failed || failed(m->s)) {
        fail(m->s, "a text could not be made");
        return NULL;
    }
    /* what was not used is given back where nothing lies behind it */
    if (m->bytes && m->s->texts.at == m->bytes + m->room) m->s->texts.at = m->bytes + m->size;
    return spend_bytes(m->s, m->size) ? lent_string(m->s, m->bytes ? m->bytes : "", m->size) : NULL;
}
