/* attribute.c - a.b, a[b], a[b:c] and `in`, as the sandbox of Jinja allows them.
 *
 * a.b means the attribute first, then the item; a[b] the other way round. What would change a value
 * and what begins with __ is undefined. */
#include <stdio.h>
#include <string.h>

#include "template/state.h"

static bool starts_with(const string *t, const char *with) {
    return t->size >= strlen(with) && memcmp(t->bytes, with, strlen(with)) == 0;
}

static value *unsafe(state *s, value *of, value *name) {
    char text[200];
    snprintf(text, sizeof text, "access to attribute '%.*s' of '%s' object is unsafe",
             (int)(name->text.size < 100 ? name->text.size : 100), name->text.bytes,
             type_name(of));
    value *hint = new_string(s, text, strlen(text) + 1);
    return hint ? new_undefined(s, hint->text.bytes, name, of) : NULL;
}

static value *range_part(state *s, const range *r, const string *name) {
    const value key = { .kind = K_STRING, .text = *name };
    if (string_is(&key, "start")) return new_int(s, r->from);
    if (string_is(&key, "stop")) return new_int(s, r->to);
    return string_is(&key, "step") ? new_int(s, r->step) : NULL;
}

static value *macro_part(state *s, const macro *m, const value *name) {
    if (string_is(name, "name")) return m->name ? new_text(s, m->name) : &mn_value_none;
    if (string_is(name, "catch_kwargs")) return new_bool(m->node->kwargs != NULL);
    if (string_is(name, "catch_varargs")) return new_bool(m->node->varargs != NULL);
    if (string_is(name, "caller")) return new_bool(m->takes_caller);
    if (!string_is(name, "arguments")) return NULL;
    value *list = new_list(s, K_TUPLE, m->node->list.n);
    for (int64_t i = 0; list && i < list->list.n; i++) {
        const string *t = m->node->list.at[i]->name;
        if (!(list->list.at[i] = lent_string(s, t->bytes, t->size))) return NULL;
    }
    return list;
}

static value *cycler_part(state *s, value *v, const value *name) {
    if (string_is(name, "current")) return v->cycler.items.at[v->cycler.place];
    if (string_is(name, "pos")) return new_int(s, v->cycler.place);
    return NULL;
}

/* getattr(); NULL without failure where there is none. */
static value *own_attribute(state *s, value *of, value *name) {
    const string *t = &name->text;
    const value_kind k = of->kind;
    if (starts_with(t, "__") && t->size > 4) return unsafe(s, of, name);
    if (k == K_NAMESPACE) return dict_get_text(of->members, t->bytes, t->size);
    if (k == K_LOOP) {
        value *part = loop_attribute(s, of, t->bytes, t->size);
        if (part || failed(s)) return part;
    }
    if (k == K_RANGE || k == K_MACRO || k == K_CYCLER) {
        value *part = k == K_RANGE ? range_part(s, &of->range, t)
                      : k == K_MACRO ? macro_part(s, of->macro, name) : cycler_part(s, of, name);
        if (part || failed(s)) return part;
    }
    if (k == K_TUPLE && of->grouped && string_is(name, "grouper")) return of->list.at[0];
    if (k == K_TUPLE && of->grouped && string_is(name, "list")) return of->list.at[1];
    if (unsafe_method(k, t->bytes, t->size)) return unsafe(s, of, name);
    const method_row *row = find_method(k, t->bytes, t->size);
    value *method = row ? new_value(s, K_METHOD) : NULL;
    if (!method) return NULL;
    method->method.row = row;
    method->method.self = of;
    return method;
}

/* a[b]; NULL without failure where Python raises TypeError or LookupError. */
static value *own_item(state *s, value *of, value *key) {
    int64_t at, n;
    switch (of->kind) {
    case K_DICT: return hashable(key) ? dict_get(s, of->members, key) : NULL;
    case K_STRING:
    case K_LIST:
    case K_TUPLE:
    case K_RANGE:
        if (!whole_of(key, &at)) return NULL;
        n = length_of(s, of);
        if (at < 0) at += n;
        if (at < 0 || at >= n) return NULL;
        if (of->kind == K_STRING) return string_cut(s, of, at, at + 1);
        if (of->kind == K_RANGE) return new_int(s, of->range.from + at * of->range.step);
        return of->list.at[at];
    default: return NULL;
    }
}

value *get_attribute(state *s, value *of, value *name) {
    if (of->kind == K_UNDEFINED) return fail_undefined(s, of);
    value *v = own_attribute(s, of, name);
    if (!v && !failed(s)) v = own_item(s, of, name);
    return v || failed(s) ? v : new_undefined(s, NULL, name, of);
}

value *get_item(state *s, value *of, value *key) {
    if (of->kind == K_UNDEFINED) return fail_undefined(s, of);
    value *v = own_item(s, of, key);
    if (!v && !failed(s) && key->kind == K_STRING) v = own_attribute(s, of, key);
    return v || failed(s) ? v : new_undefined(s, NULL, key, of);
}

/* ---- slices ---------------------------------------------------------------------------------- */

static bool bound(state *s, int64_t *out, const value *v, int64_t none) {
    if (!v || v->kind == K_NONE) {
        *out = none;
        return true;
    }
    if (whole_of(v, out)) return true;
    fail(s, "slice indices must be integers or None or have an __index__ method");
    return false;
}

static int64_t clip(int64_t at, int64_t n, int64_t low, int64_t high) {
    if (at < 0) at = at < -n ? low : at + n;
    if (at < low) at = low;
    return at > high ? high : at;
}

static value *pick(state *s, value *of, int64_t from, int64_t step, int64_t n) {
    if (of->kind == K_STRING) {
        if (step == 1) return string_cut(s, of, from, from + n);
        maker m = { .s = s };
        for (int64_t i = 0; i < n && !failed(s); i++, from += step) {
            value *one = string_cut(s, of, from, from + 1);
            if (one) put(&m, one->text.bytes, one->text.size);
        }
        return failed(s) ? NULL : made(&m);
    }
    if (of->kind == K_RANGE) {
        value *out = new_value(s, K_RANGE);
        if (!out) return NULL;
        const range *r = &of->range;
        out->range = (range){ r->from + from * r->step, r->from + (from + n * step) * r->step,
                              r->step * step, n };
        return out;
    }
    value *out = new_list(s, of->kind, n);
    for (int64_t i = 0; out && i < n; i++) out->list.at[i] = of->list.at[from + i * step];
    return out;
}

value *get_slice(state *s, value *of, value *from, value *to, value *step) {
    int64_t a, b, by, n;
    if (of->kind == K_UNDEFINED) return fail_undefined(s, of);
    if (of->kind != K_STRING && of->kind != K_LIST && of->kind != K_TUPLE && of->kind != K_RANGE) {
        return fail(s, of->kind == K_DICT ? "unhashable type: 'slice'"
                                          : "'%s' object is not subscriptable", type_name(of));
    }
    if (!bound(s, &by, step, 1)) return NULL;
    if (by == 0) return fail(s, "slice step cannot be zero");
    n = length_of(s, of);
    if (by < -n - 1) by = -n - 1;                       // one item at most either way
    if (by > n + 1) by = n + 1;
    if (!bound(s, &a, from, by > 0 ? 0 : n) || !bound(s, &b, to, by > 0 ? n : -n - 1)) return NULL;
    const int64_t low = by > 0 ? 0 : -1, high = by > 0 ? n : n - 1;
    a = clip(a, n, low, high);
    b = clip(b, n, low, high);
    const int64_t span = by > 0 ? b - a : a - b, width = by > 0 ? by : -by;
    return pick(s, of, a, by, span <= 0 ? 0 : (span + width - 1) / width);
}

/* ---- in -------------------------------------------------------------------------------------- */

static bool find_bytes(state *s, const string *in, const string *what) {
    if (what->size == 0) return true;
    spend_bytes(s, in->size);
    for (size_t at = 0; at + what->size <= in->size; at++) {
        const char *first = memchr(in->bytes + at, what->bytes[0], in->size - what->size - at + 1);
        if (!first) return false;
        at = (size_t)(first - in->bytes);
        if (memcmp(first, what->bytes, what->size) == 0) return true;
        if ((at & 63) == 0 && !spend(s, 1)) return false;
    }
    return false;
}

value *contains(state *s, value *item, value *in) {
    if (in->kind == K_STRING) {
        if (item->kind != K_STRING) {
            return fail(s, "'in <string>' requires string as left operand, not %s",
                        type_name(item));
        }
        return new_bool(find_bytes(s, &in->text, &item->text));
    }
    if (in->kind == K_DICT || (in->kind == K_VIEW && in->view.which == VIEW_KEYS)) {
        const value *found = dict_get(s, in->kind == K_DICT ? in->members : in->view.of, item);
        return failed(s) ? NULL : new_bool(found != NULL);
    }
    if (!iterable(in)) return fail(s, "argument of type '%s' is not iterable", type_name(in));
    iterator *it = iterate(s, in);
    for (value *one; it && (one = next_item(s, it));) {
        if (one == item || equal(s, one, item)) return &mn_value_true;
    }
    return failed(s) ? NULL : &mn_value_false;
}
