/* globals.c - functions that every template has. */
#define _POSIX_C_SOURCE 200809L // localtime_r
#include <string.h>
#include <time.h>

#include "template/library/rows.h"

value *global_range(state *s, value **a, const arguments *all) {
    int64_t from, to, step = 1;
    (void)all;
    if (!want_whole(s, &from, a[0], 0)) return NULL;
    to = from;
    if (a[1] ? !want_whole(s, &to, a[1], 0) : (from = 0, false)) return NULL;
    if (a[2] && !want_whole(s, &step, a[2], 1)) return NULL;
    if (step == 0) return fail(s, "range() arg 3 must not be zero");
    value *v = new_value(s, K_RANGE);
    if (!v) return NULL;
    const __int128 span = step > 0 ? (__int128)to - from : (__int128)from - to;
    const __int128 width = step > 0 ? step : -(__int128)step;
    const __int128 n = span <= 0 ? 0 : (span + width - 1) / width;
    if (n > MOST_RANGE) return fail(s, "range too big: %d items are the most", MOST_RANGE);
    v->range = (range){ from, to, step, (int64_t)n };
    return v;
}

/* Members of a mapping, or of pairs, and then what has a name. */
static bool fill(state *s, dict *d, value *from, const arguments *all) {
    if (all->n > 1) {
        fail(s, "dict expected at most 1 argument, got %lld", (long long)all->n);
        return false;
    }
    if (from && all->n == 0) from = NULL;               // an argument named like the parameter
    if (from && from->kind == K_DICT) {
        for (int64_t i = 0; i < from->members->n; i++) {
            const dict_slot *slot = &from->members->slots[i];
            if (!dict_set(s, d, slot->key, slot->item)) return false;
        }
    } else if (from) {
        iterator *it = iterate(s, from);
        for (value *pair; it && (pair = next_item(s, it));) {
            items two = { 0 };
            if (!collect(s, &two, pair)) return false;
            if (two.n != 2) {
                fail(s, "dictionary update sequence has an element of length %lld; 2 is required",
                     (long long)two.n);
                return false;
            }
            if (!dict_set(s, d, two.at[0], two.at[1])) return false;
        }
    }
    for (int64_t i = 0; i < all->n_named; i++) {
        if (!dict_set(s, d, all->names[i], all->named[i])) return false;
    }
    return !failed(s);
}

value *global_dict(state *s, value **a, const arguments *all) {
    value *v = new_dict(s);
    return v && fill(s, v->members, a[0], all) ? v : NULL;
}

value *global_namespace(state *s, value **a, const arguments *all) {
    value *v = global_dict(s, a, all);
    if (!v) return NULL;
    for (int64_t i = 0; i < v->members->n; i++) {
        const value *key = v->members->slots[i].key;
        if (key->kind == K_STRING && key->text.size && key->text.bytes[0] == '_') {
            return fail(s, "chat templates cannot store underscore-prefixed attributes on a "
                           "namespace");
        }
    }
    v->kind = K_NAMESPACE;
    return v;
}

value *global_cycler(state *s, value **a, const arguments *all) {
    (void)a;
    if (!all->n) return fail(s, "at least one item has to be provided");
    value *v = new_value(s, K_CYCLER);
    if (v) v->cycler.items = (items){ all->at, all->n };
    return v;
}

value *global_joiner(state *s, value **a, const arguments *all) {
    (void)all;
    value *v = new_value(s, K_JOINER);
    if (!v) return NULL;
    v->joiner.separator = a[0] ? a[0] : lent_string(s, ", ", 2);
    return v->joiner.separator ? v : NULL;
}

value *global_raise_exception(state *s, value **a, const arguments *all) {
    (void)all;
    const value *text = string_of(s, a[0]);
    if (!text) return NULL;
    return fail(s, "%.*s", (int)(text->text.size < 500 ? text->text.size : 500), text->text.bytes);
}

value *global_strftime_now(state *s, value **a, const arguments *all) {
    const string *format;
    char closed[256], out[512];
    struct tm now;
    const time_t at = time(NULL);
    (void)all;
    if (!want_string(s, &format, a[0])) return NULL;
    if (format->size >= sizeof closed) return fail(s, "strftime_now: the format is too long");
    memcpy(closed, format->bytes, format->size);
    closed[format->size] = 0;
    if (!localtime_r(&at, &now)) return fail(s, "strftime_now: there is no local time");
    const size_t n = strftime(out, sizeof out, closed, &now);
    return new_string(s, out, n);
}

/* ---- methods of cyclers and loops -------------------------------------------------------------
 * */

value *method_next(state *s, value **a, const arguments *all) {
    (void)s, (void)all;
    value *v = a[0]->cycler.items.at[a[0]->cycler.place];
    a[0]->cycler.place = (a[0]->cycler.place + 1) % a[0]->cycler.items.n;
    return v;
}

value *method_reset(state *s, value **a, const arguments *all) {
    (void)s, (void)all;
    a[0]->cycler.place = 0;
    return &mn_value_none;
}

value *method_cycle(state *s, value **a, const arguments *all) {
    if (!all->n) return fail(s, "no items for cycling given");
    const int64_t at = a[0]->loop->index0 % all->n;
    return all->at[at < 0 ? at + all->n : at];
}

value *method_changed(state *s, value **a, const arguments *all) {
    value *now = new_list(s, K_TUPLE, all->n);
    if (!now) return NULL;
    for (int64_t i = 0; i < all->n; i++) now->list.at[i] = all->at[i];
    loop_state *l = a[0]->loop;
    const bool same_as_before = l->last_changed && equal(s, l->last_changed, now);
    l->last_changed = now;
    return new_bool(!same_as_before);
}
