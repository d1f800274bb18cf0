/* compare.c - what Python says of values: their type, truth, length, equality and order. */
#include <math.h>
#include <string.h>

#include "template/state.h"

static const char *const types[K_COUNT] = {
#define TYPE(id, name) [K_##id] = name,
#include "template/types.def"
#undef TYPE
};

const char *type_name(const value *v) {
    static const char *const views[] = { "dict_keys", "dict_values", "dict_items" };
    return v->kind == K_VIEW ? views[v->view.which] : types[v->kind];
}

bool whole_of(const value *v, int64_t *out) {
    if (v->kind == K_INT) *out = v->whole;
    else if (v->kind == K_BOOL) *out = v->yes;
    else return false;
    return true;
}

bool is_number(const value *v) {
    return v->kind == K_BOOL || v->kind == K_INT || v->kind == K_FLOAT;
}

double real_of(const value *v) {
    int64_t whole = 0;
    if (v->kind == K_FLOAT) return v->real;
    whole_of(v, &whole);
    return (double)whole;
}

int64_t length_of(state *s, value *v) {
    switch (v->kind) {
    case K_UNDEFINED: return 0;
    case K_STRING: return string_points(s, v);
    case K_LIST:
    case K_TUPLE: return v->list.n;
    case K_DICT: return v->members->n;
    case K_VIEW: return v->view.of->n;
    case K_RANGE: return v->range.n;
    case K_LOOP: {
        const value *n = loop_attribute(s, v, "length", 6);
        return n ? n->whole : -1;
    }
    default: return -1;
    }
}

bool truth(state *s, const value *v) {
    switch (v->kind) {
    case K_NONE: return false;
    case K_BOOL: return v->yes;
    case K_INT: return v->whole != 0;
    case K_FLOAT: return v->real != 0;
    case K_STRING: return v->text.size > 0;
    case K_UNDEFINED:
    case K_LIST:
    case K_TUPLE:
    case K_DICT:
    case K_VIEW:
    case K_RANGE:
    case K_LOOP: return length_of(s, (value *)v) != 0;
    default: return true;
    }
}

bool same(const value *a, const value *b) {
    if (a == b) return true;
    if (a->kind != b->kind) return false;
    if (a->kind == K_NONE) return true;
    if (a->kind == K_BOOL) return a->yes == b->yes;
    if (a->kind == K_INT) return a->whole == b->whole && a->whole >= -5 && a->whole <= 256;
    if (a->kind == K_DICT) return a->members == b->members;
    if (a->kind == K_LIST) return a->list.at == b->list.at && a->list.n && a->list.n == b->list.n;
    return a->kind == K_STRING && a->text.size == b->text.size &&
           (a->text.bytes == b->text.bytes || a->text.size == 0);
}

static bool equal_items(state *s, const items *a, const items *b) {
    if (a->n != b->n) return false;
    for (int64_t i = 0; i < a->n; i++) {
        if (a->at[i] != b->at[i] && !equal(s, a->at[i], b->at[i])) return false;
    }
    return true;
}

static bool equal_dicts(state *s, const dict *a, const dict *b) {
    if (a->n != b->n) return false;
    for (int64_t i = 0; i < a->n; i++) {
        const value *other = dict_get(s, b, a->slots[i].key);
        if (!other || (other != a->slots[i].item && !equal(s, a->slots[i].item,
                                                           other))) return false;
    }
    return true;
}

/* An integer beside a double, exactly: -1, 0, 1, or 2 beside NaN. */
static int compare_whole(int64_t a, double b) {
    if (isnan(b)) return 2;
    if (b >= 9223372036854775808.0) return -1;
    if (b < -9223372036854775808.0) return 1;
    const int64_t whole = (int64_t)b;
    if (a != whole) return a < whole ? -1 : 1;
    const double rest = b - (double)whole;
    return rest > 0 ? -1 : rest < 0 ? 1 : 0;
}

static int compare_numbers(const value *a, const value *b) {
    int64_t x, y;
    const bool wx = whole_of(a, &x), wy = whole_of(b, &y);
    if (wx && wy) return x < y ? -1 : x > y;
    if (wx) return compare_whole(x, b->real);
    if (wy) {
        const int c = compare_whole(y, a->real);
        return c == 2 ? 2 : -c;
    }
    if (isnan(a->real) || isnan(b->real)) return 2;
    return a->real < b->real ? -1 : a->real > b->real;
}

static bool equal_views(state *s, const value *a, const value *b) {
    if (a->view.which == VIEW_VALUES || a->view.which != b->view.which) return a == b;
    if (a->view.of->n != b->view.of->n) return false;
    for (int64_t i = 0; i < a->view.of->n; i++) {
        const dict_slot *slot = &a->view.of->slots[i];
        const value *other = dict_get(s, b->view.of, slot->key);
        if (!other || (a->view.which == VIEW_ITEMS && !equal(s, slot->item, other))) return false;
    }
    return true;
}

static bool equal_below(state *s, const value *a, const value *b) {
    if (is_number(a) && is_number(b)) return compare_numbers(a, b) == 0;
    if (a->kind != b->kind) return false;
    switch (a->kind) {
    case K_UNDEFINED:
    case K_NONE: return true;
    case K_STRING:
        if (s && !spend_bytes(s, a->text.size < b->text.size ? a->text.size : b->text.size)) {
            return false;
        }
        return a->text.size == b->text.size &&
               memcmp(a->text.bytes, b->text.bytes, a->text.size) == 0;
    case K_LIST:
    case K_TUPLE: return equal_items(s, &a->list, &b->list);
    case K_DICT: return equal_dicts(s, a->members, b->members);
    case K_VIEW: return equal_views(s, a, b);
    case K_RANGE:
        return a->range.n == b->range.n && (a->range.n == 0 || (a->range.from == b->range.from &&
               (a->range.n == 1 || a->range.step == b->range.step)));
    case K_METHOD: return a->method.row == b->method.row && same(a->method.self, b->method.self);
    case K_GLOBAL: return a->global == b->global;
    default: return a == b;
    }
}

bool equal(state *s, const value *a, const value *b) {
    if (!s) return equal_below(s, a, b);
    if (++s->depth > MOST_DEPTH) {
        fail(s, "values are nested too deep to be compared");
    }
    const bool yes = spend(s, 1) && equal_below(s, a, b);
    s->depth--;
    return yes;
}

static int order_strings(const string *a, const string *b) {
    const size_t n = a->size < b->size ? a->size : b->size;
    const int c = n ? memcmp(a->bytes, b->bytes, n) : 0;     // as UTF-8, so as code points
    return c ? (c < 0 ? -1 : 1) : a->size < b->size ? -1 : a->size > b->size;
}

static bool order_items(state *s, const items *a, const items *b, const char *sign, int *out) {
    const int64_t n = a->n < b->n ? a->n : b->n;
    for (int64_t i = 0; i < n; i++) {
        if (!equal(s, a->at[i], b->at[i])) {
            if (failed(s) || ++s->depth > MOST_DEPTH) {
                fail(s, "values are nested too deep to be compared");
                return false;
            }
            const bool ok = order(s, a->at[i], b->at[i], sign, out);
            s->depth--;
            return ok;
        }
    }
    *out = a->n < b->n ? -1 : a->n > b->n;
    return true;
}

bool order(state *s, const value *a, const value *b, const char *sign, int *out) {
    if (!spend(s, 1)) return false;
    if (a->kind == K_UNDEFINED || b->kind == K_UNDEFINED) {
        fail_undefined(s, a->kind == K_UNDEFINED ? a : b);
        return false;
    }
    if (is_number(a) && is_number(b)) {
        *out = compare_numbers(a, b);
        return true;
    }
    if (a->kind == K_STRING && b->kind == K_STRING) {
        *out = order_strings(&a->text, &b->text);
        return spend_bytes(s, a->text.size < b->text.size ? a->text.size : b->text.size);
    }
    if ((a->kind == K_LIST || a->kind == K_TUPLE) && a->kind == b->kind) {
        return order_items(s, &a->list, &b->list, sign, out);
    }
    fail(s, "'%s' not supported between instances of '%s' and '%s'", sign, type_name(a),
         type_name(b));
    return false;
}
