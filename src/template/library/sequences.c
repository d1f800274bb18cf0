/* sequences.c - filters over many items: chosen, changed, sorted, grouped, joined. */
#include <stdlib.h>
#include <string.h>

#include "template/library/rows.h"

/* ---- attributes of items --------------------------------------------------------------------- */

/* "a.0.b" -> "a", 0, "b" */
static bool read_parts(state *s, items *out, value *attribute) {
    if (!attribute || attribute->kind == K_NONE) return true;
    if (attribute->kind != K_STRING) return push(s, out, attribute);
    const string *t = &attribute->text;
    for (size_t from = 0; from <= t->size;) {
        size_t to = from;
        int64_t whole;
        bool digits = true;
        for (; to < t->size && t->bytes[to] != '.'; to++) {
            digits &= t->bytes[to] >= '0' && t->bytes[to] <= '9';
        }
        digits &= to > from && parse_whole(&whole, t->bytes + from, to - from, 10);
        if (!push(s, out, digits ? new_int(s, whole)
                                 : lent_string(s, t->bytes + from, to - from))) return false;
        from = to + 1;
    }
    return true;
}

bool read_getter(state *s, getter *out, value *attribute, bool lower, value *otherwise) {
    *out = (getter){ .otherwise = given(otherwise) ? otherwise : NULL, .lower = lower };
    return read_parts(s, &out->parts, attribute);
}

value *get_part(state *s, const getter *g, value *of) {
    for (int64_t i = 0; of && i < g->parts.n; i++) {
        of = get_item(s, of, g->parts.at[i]);
        if (of && of->kind == K_UNDEFINED && g->otherwise) of = g->otherwise;
    }
    return of && g->lower ? lower_of(s, of) : of;
}

/* ---- map, select and their like -------------------------------------------------------------- */

typedef struct picking {
    value *over;                // until the first item is asked for
    getter getter;
    const filter_row *row;      // NULL: the item, or its truth
    arguments rest;
    bool maps, keeps;           // map; select as against reject
} picking;

static value *next_picked(state *s, iterator *it) {
    picking *p = it->more;
    if (!it->from && !(it->from = iterate(s, p->over))) return NULL;
    for (value *item; (item = next_item(s, it->from));) {
        value *v = get_part(s, &p->getter, item);
        if (!v) return NULL;
        if (p->row) v = p->maps ? call_filter(s, p->row, v, &p->rest)
                                : call_test(s, p->row, v, &p->rest);
        if (!v || p->maps) return v;
        const bool yes = truth(s, v);
        if (failed(s)) return NULL;
        if (yes == p->keeps) return item;
    }
    return NULL;
}

static value *next_nothing(state *s, iterator *it) {
    (void)s, (void)it;
    return NULL;
}

/* An iterator that fails when it is stepped, as a generator of Python does. */
static value *next_failing(state *s, iterator *it) {
    return fail(s, "%s", (const char *)it->more);
}

static value *failing(state *s, const char *why) {
    value *v = new_iterator(s, next_failing);
    if (v) v->iterator->more = (void *)why;
    return v;
}

static value *pick(state *s, value **a, picking p, int64_t used, const arguments *all) {
    picking *kept = take(s, sizeof *kept);
    if (!kept) return NULL;
    if (!truth(s, a[0])) return failed(s) ? NULL : new_iterator(s, next_nothing);
    p.over = a[0];
    if (all->n > used) {
        const value *name = all->at[used];
        const bool named = name->kind == K_STRING;
        p.row = !named ? NULL : p.maps ? find_filter(name->text.bytes, name->text.size)
                                       : find_test(name->text.bytes, name->text.size);
        if (!p.row) return failing(s, p.maps ? "map: there is no filter of that name"
                                             : "select: there is no test of that name");
        p.rest = (arguments){ all->at + used + 1, all->n - used - 1, all->names, all->named,
                              all->n_named };
    }
    *kept = p;
    value *v = new_iterator(s, next_picked);
    if (v) v->iterator->more = kept;
    return v;
}

static value *named_argument(const arguments *all, const char *name) {
    for (int64_t i = 0; i < all->n_named; i++) {
        if (string_is(all->names[i], name)) return all->named[i];
    }
    return NULL;
}

value *filter_map(state *s, value **a, const arguments *all) {
    picking p = { .maps = true };
    value *attribute = named_argument(all, "attribute");
    if (all->n || !attribute) {
        if (all->n) return pick(s, a, p, 0, all);
        return truth(s, a[0]) ? failing(s, "map requires a filter argument")
                              : new_iterator(s, next_nothing);
    }
    for (int64_t i = 0; i < all->n_named; i++) {
        if (!string_is(all->names[i], "attribute") && !string_is(all->names[i], "default")) {
            return failing(s, "map: unexpected keyword argument beside attribute");
        }
    }
    if (!read_getter(s, &p.getter, attribute, false, named_argument(all, "default"))) return NULL;
    return pick(s, a, p, 0, all);
}

value *filter_select(state *s, value **a, const arguments *all) {
    return pick(s, a, (picking){ .keeps = true }, 0, all);
}

value *filter_reject(state *s, value **a, const arguments *all) {
    return pick(s, a, (picking){ .keeps = false }, 0, all);
}

static value *pick_by_attribute(state *s, value **a, const arguments *all, bool keeps) {
    picking p = { .keeps = keeps };
    if (!all->n) {
        return truth(s, a[0]) ? failing(s, "missing parameter for attribute name")
                              : new_iterator(s, next_nothing);
    }
    if (!read_getter(s, &p.getter, all->at[0], false, NULL)) return NULL;
    return pick(s, a, p, 1, all);
}

value *filter_selectattr(state *s, value **a, const arguments *all) {
    return pick_by_attribute(s, a, all, true);
}

value *filter_rejectattr(state *s, value **a, const arguments *all) {
    return pick_by_attribute(s, a, all, false);
}

/* ---- ends and order -------------------------------------------------------------------------- */

value *filter_list(state *s, value **a, const arguments *all) {
    items out = { 0 };
    (void)all;
    return collect(s, &out, a[0]) ? list_of(s, &out) : NULL;
}

value *filter_first(state *s, value **a, const arguments *all) {
    (void)all;
    iterator *it = iterate(s, a[0]);
    value *v = it ? next_item(s, it) : NULL;
    if (v || failed(s)) return v;
    return new_undefined(s, "no first item, sequence was empty", NULL, NULL);
}

/* What can be gone through from its end. */
static bool reversible(const value *v) {
    return iterable(v) && v->kind != K_ITERATOR && v->kind != K_LOOP && v->kind != K_UNDEFINED;
}

value *filter_last(state *s, value **a, const arguments *all) {
    items out = { 0 };
    (void)all;
    if (a[0]->kind == K_UNDEFINED) return fail_undefined(s, a[0]);
    if (!reversible(a[0])) return fail(s, "'%s' object is not reversible", type_name(a[0]));
    if (a[0]->kind == K_LIST || a[0]->kind == K_TUPLE) out = a[0]->list;
    else if (!collect(s, &out, a[0])) return NULL;
    if (out.n) return out.at[out.n - 1];
    return new_undefined(s, "no last item, sequence was empty", NULL, NULL);
}

value *filter_reverse(state *s, value **a, const arguments *all) {
    items out = { 0 };
    (void)all;
    if (a[0]->kind == K_STRING) {
        return get_slice(s, a[0], NULL, NULL, new_int(s, -1));
    }
    if (a[0]->kind == K_UNDEFINED) return fail_undefined(s, a[0]);
    if (!collect(s, &out, a[0])) return NULL;
    value *list = new_list(s, K_LIST, out.n);
    for (int64_t i = 0; list && i < out.n; i++) list->list.at[i] = out.at[out.n - 1 - i];
    if (!list || !reversible(a[0])) return list;
    value *v = new_iterator(s, NULL);
    if (v) v->iterator = iterate(s, list);
    return v && v->iterator ? v : NULL;
}

typedef struct merging {
    state *s;
    value **items, **keys, **other, **other_keys;
    bool reverse;
} merging;

/* Stable, by keys; `<` alone decides, as for Python. */
static bool merge(merging *m, int64_t from, int64_t to) {
    if (to - from < 2) return true;
    const int64_t middle = (from + to) / 2;
    if (!merge(m, from, middle) || !merge(m, middle, to)) return false;
    for (int64_t a = from, b = middle, n = from; n < to; n++) {
        bool second = a == middle;
        int c;
        if (a < middle && b < to) {
            value *x = m->keys[m->reverse ? a : b], *y = m->keys[m->reverse ? b : a];
            if (!order(m->s, x, y, "<", &c)) return false;
            second = c == -1;
        }
        m->other[n] = m->items[second ? b : a];
        m->other_keys[n] = m->keys[second ? b++ : a++];
    }
    const size_t bytes = (size_t)(to - from) * sizeof *m->items;
    memcpy(m->items + from, m->other + from, bytes);
    memcpy(m->keys + from, m->other_keys + from, bytes);
    return true;
}

bool sort_values(state *s, items *list, items *keys, bool reverse) {
    merging m = { .s = s, .items = list->at, .keys = keys->at, .reverse = reverse };
    if (list->n < 2) return true;
    m.other = take(s, (size_t)list->n * sizeof *m.other);
    m.other_keys = take(s, (size_t)list->n * sizeof *m.other_keys);
    return m.other && m.other_keys && merge(&m, 0, list->n);
}

/* "a,b.c" sorts by a list of both. */
static bool read_getters(state *s, getter *out, int *n, value *attribute, bool lower) {
    *n = 1;
    if (!attribute || attribute->kind != K_STRING) {
        return read_getter(s, out, attribute, lower, NULL);
    }
    const string *t = &attribute->text;
    *n = 0;
    for (size_t from = 0; from <= t->size; (*n)++) {
        size_t to = from;
        while (to < t->size && t->bytes[to] != ',') to++;
        if (*n == MOST_PARAMETERS) {
            fail(s, "sort takes %d attributes at most", MOST_PARAMETERS);
            return false;
        }
        value *one = lent_string(s, t->bytes + from, to - from);
        if (!one || !read_getter(s, &out[*n], one, lower, NULL)) return false;
        from = to + 1;
    }
    return true;
}

value *filter_sort(state *s, value **a, const arguments *all) {
    items list = { 0 }, keys = { 0 };
    getter by[MOST_PARAMETERS];
    int n;
    (void)all;
    if (!read_getters(s, by, &n, a[3], !yes_or(s, a[2], false)) || !collect(s, &list, a[0])) {
        return NULL;
    }
    value *sorted = new_list(s, K_LIST, list.n);
    for (int64_t i = 0; sorted && i < list.n; i++) {
        value *key = new_list(s, K_LIST, n);
        for (int k = 0; key && k < n; k++) {
            if (!(key->list.at[k] = get_part(s, &by[k], list.at[i]))) return NULL;
        }
        if (!push(s, &keys, key)) return NULL;
        sorted->list.at[i] = list.at[i];
    }
    return sorted && sort_values(s, &sorted->list, &keys, yes_or(s, a[1], false)) ? sorted : NULL;
}

value *filter_dictsort(state *s, value **a, const arguments *all) {
    items list = { 0 }, keys = { 0 };
    (void)all;
    const bool by_value = a[2] && string_is(a[2], "value"), exact = yes_or(s, a[1], false);
    if (a[2] && !by_value && !string_is(a[2], "key")) {
        return fail(s, "you can only sort by either \"key\" or \"value\"");
    }
    if (a[0]->kind == K_UNDEFINED) return fail_undefined(s, a[0]);
    if (a[0]->kind != K_DICT) return fail(s, "'%s' object has no attribute 'items'",
                                          type_name(a[0]));
    for (int64_t i = 0; i < a[0]->members->n; i++) {
        const dict_slot *slot = &a[0]->members->slots[i];
        value *key = by_value ? slot->item : slot->key;
        if (!exact) key = lower_of(s, key);
        if (!key || !push(s, &keys, key) || !push(s, &list, pair_of(s, slot->key, slot->item))) {
            return NULL;
        }
    }
    return sort_values(s, &list, &keys, yes_or(s, a[3], false)) ? list_of(s, &list) : NULL;
}

static value *extreme(state *s, value **a, bool largest) {
    getter by;
    value *best = NULL, *best_key = NULL;
    if (!read_getter(s, &by, a[2], !yes_or(s, a[1], false), NULL)) return NULL;
    iterator *it = iterate(s, a[0]);
    for (value *v; it && (v = next_item(s, it));) {
        value *key = get_part(s, &by, v);
        int c = -1;
        if (!key) return NULL;
        if (best && !(largest ? order(s, key, best_key, ">", &c) : order(s, key, best_key, "<",
                                                                         &c))) {
            return NULL;
        }
        if (best && c != (largest ? 1 : -1)) continue;
        best = v;
        best_key = key;
    }
    if (best || failed(s)) return failed(s) ? NULL : best;
    return new_undefined(s, "no aggregated item, sequence was empty", NULL, NULL);
}

value *filter_min(state *s, value **a, const arguments *all) {
    (void)all;
    return extreme(s, a, false);
}

value *filter_max(state *s, value **a, const arguments *all) {
    (void)all;
    return extreme(s, a, true);
}

value *filter_sum(state *s, value **a, const arguments *all) {
    getter by;
    (void)all;
    value *sum = a[2] ? a[2] : new_int(s, 0);
    if (!sum || !read_getter(s, &by, a[1], false, NULL)) return NULL;
    if (sum->kind == K_STRING) return fail(s, "sum() can't sum strings [use join instead]");
    iterator *it = iterate(s, a[0]);
    for (value *v; it && (v = next_item(s, it));) {
        value *part = get_part(s, &by, v);
        sum = part ? arithmetic(s, N_ADD, sum, part) : NULL;
        if (!sum) return NULL;
    }
    return failed(s) ? NULL : sum;
}

value *filter_join(state *s, value **a, const arguments *all) {
    (void)all;
    value *between = a[1] ? string_of(s, a[1]) : lent_string(s, "", 0), *over = a[0];
    if (!between) return NULL;
    if (given(a[2])) {
        picking p = { .maps = true };
        const arguments none = { 0 };
        if (!read_getter(s, &p.getter, a[2], false, NULL)) return NULL;
        if (!iterable(over)) return fail(s, "'%s' object is not iterable", type_name(over));
        over = pick(s, a, p, 0, &none);
    }
    return over ? join_strings(s, &between->text, over, true) : NULL;
}

/* ---- generators over lists ------------------------------------------------------------------- */

static value *iterator_over(state *s, items *list) {
    value *v = new_iterator(s, NULL), *all = list_of(s, list);
    if (!v || !all) return NULL;
    v->iterator = iterate(s, all);
    return v->iterator ? v : NULL;
}

value *filter_items(state *s, value **a, const arguments *all) {
    items none = { 0 };
    if (a[0]->kind == K_UNDEFINED) return iterator_over(s, &none);
    if (a[0]->kind != K_DICT) return failing(s, "can only get item pairs from a mapping");
    value *pairs = method_items(s, a, all), *v = new_iterator(s, NULL);
    if (!pairs || !v) return NULL;
    v->iterator = iterate(s, pairs);
    return v->iterator ? v : NULL;
}

value *filter_unique(state *s, value **a, const arguments *all) {
    items list = { 0 };
    getter by;
    (void)all;
    value *seen = new_dict(s);
    if (!seen || !read_getter(s, &by, a[2], !yes_or(s, a[1], false), NULL)) return NULL;
    iterator *it = iterate(s, a[0]);
    for (value *v; it && (v = next_item(s, it));) {
        value *key = get_part(s, &by, v);
        const int64_t before = seen->members->n;
        if (!key || !dict_set(s, seen->members, key, &mn_value_none)) return NULL;
        if (seen->members->n > before && !push(s, &list, v)) return NULL;
    }
    return failed(s) ? NULL : iterator_over(s, &list);
}

value *filter_batch(state *s, value **a, const arguments *all) {
    items batches = { 0 }, list = { 0 };
    int64_t n;
    (void)all;
    if (!want_whole(s, &n, a[1], 0) || !collect(s, &list, a[0])) return NULL;
    if (n < 1) return fail(s, "batch takes batches of at least one item");
    for (int64_t from = 0; from < list.n; from += n) {
        items one = { 0 };
        for (int64_t i = from; i < from + n && (i < list.n || given(a[2])); i++) {
            if (!push(s, &one, i < list.n ? list.at[i] : a[2])) return NULL;
        }
        if (!push(s, &batches, list_of(s, &one))) return NULL;
    }
    return iterator_over(s, &batches);
}

value *filter_slice(state *s, value **a, const arguments *all) {
    items slices = { 0 }, list = { 0 };
    int64_t n, offset = 0;
    (void)all;
    if (!want_whole(s, &n, a[1], 0) || !collect(s, &list, a[0])) return NULL;
    if (n == 0) return fail(s, "integer division or modulo by zero");
    for (int64_t i = 0; i < n; i++) {
        items one = { 0 };
        const int64_t each = list.n / n, extra = list.n % n;
        const int64_t from = offset + i * each;
        if (i < extra) offset++;
        for (int64_t k = from; k < offset + (i + 1) * each; k++) {
            if (!push(s, &one, list.at[k])) return NULL;
        }
        if (given(a[2]) && i >= extra && !push(s, &one, a[2])) return NULL;
        if (!push(s, &slices, list_of(s, &one))) return NULL;
    }
    return iterator_over(s, &slices);
}

value *filter_groupby(state *s, value **a, const arguments *all) {
    items list = { 0 }, keys = { 0 }, groups = { 0 };
    getter by, exact;
    (void)all;
    const bool lower = !yes_or(s, a[3], false);
    if (!read_getter(s, &by, a[1], lower, a[2]) || !read_getter(s, &exact, a[1], false, a[2]) ||
        !collect(s, &list, a[0])) return NULL;
    for (int64_t i = 0; i < list.n; i++) {
        if (!push(s, &keys, get_part(s, &by, list.at[i]))) return NULL;
    }
    value *sorted = new_list(s, K_LIST, list.n);
    for (int64_t i = 0; sorted && i < list.n; i++) sorted->list.at[i] = list.at[i];
    if (!sorted || !sort_values(s, &sorted->list, &keys, false)) return NULL;
    for (int64_t from = 0, to; from < list.n; from = to) {
        items one = { 0 };
        for (to = from; to < list.n && equal(s, keys.at[to], keys.at[from]); to++) {
            if (!push(s, &one, sorted->list.at[to])) return NULL;
        }
        if (failed(s)) return NULL;
        value *key = get_part(s, &exact, one.at[0]), *group = list_of(s, &one);
        value *pair = key && group ? pair_of(s, key, group) : NULL;
        if (!pair) return NULL;
        pair->grouped = true;
        if (!push(s, &groups, pair)) return NULL;
    }
    return list_of(s, &groups);
}
