/* iterate.c - going through what holds items, one after the other. */
#include <string.h>

#include "base/utf8.h"
#include "template/state.h"

static value *next_of_list(state *s, iterator *it) {
    (void)s;
    const items *list = &it->source->list;
    return it->place < list->n ? list->at[it->place++] : NULL;
}

static value *next_of_string(state *s, iterator *it) {
    const string *t = &it->source->text;
    uint32_t point;
    if (it->place >= (int64_t)t->size) return NULL;
    const char *at = t->bytes + it->place;
    const int n = mn_utf8_take(at, t->size - (size_t)it->place, &point);
    it->place += n;
    value *out = lent_string(s, at, (size_t)n);
    if (out) out->text.points = 1;
    return out;
}

static value *item_of_view(state *s, const dict *d, view_kind which, int64_t i) {
    const dict_slot *slot = &d->slots[i];
    if (which == VIEW_ITEMS) return pair_of(s, slot->key, slot->item);
    return which == VIEW_KEYS ? slot->key : slot->item;
}

static value *next_of_dict(state *s, iterator *it) {
    const value *v = it->source;
    const dict *d = v->kind == K_VIEW ? v->view.of : v->members;
    if (it->place >= d->n) return NULL;
    return item_of_view(s, d, v->kind == K_VIEW ? v->view.which : VIEW_KEYS, it->place++);
}

static value *next_of_range(state *s, iterator *it) {
    const range *r = &it->source->range;
    return it->place < r->n ? new_int(s, r->from + it->place++ * r->step) : NULL;
}

static value *next_of_nothing(state *s, iterator *it) {
    (void)s, (void)it;
    return NULL;
}

static value *next_of_loop(state *s, iterator *it) {
    loop_state *l = it->source->loop;
    value *item = l->peeked ? l->after : next_item(s, l->from);
    l->peeked = false;
    if (!item) return NULL;
    l->index0++;
    l->before = l->current;
    l->current = item;
    return pair_of(s, item, it->source);
}

bool iterable(const value *v) {
    switch (v->kind) {
    case K_UNDEFINED:
    case K_STRING:
    case K_LIST:
    case K_TUPLE:
    case K_DICT:
    case K_VIEW:
    case K_RANGE:
    case K_ITERATOR:
    case K_LOOP: return true;
    default: return false;
    }
}

iterator *iterate(state *s, value *v) {
    if (v->kind == K_ITERATOR) return v->iterator;
    if (!iterable(v)) {
        fail(s, "'%s' object is not iterable", type_name(v));
        return NULL;
    }
    iterator *it = take(s, sizeof *it);
    if (!it) return NULL;
    it->source = v;
    switch (v->kind) {
    case K_UNDEFINED: it->next = next_of_nothing; break;
    case K_STRING: it->next = next_of_string; break;
    case K_LIST:
    case K_TUPLE: it->next = next_of_list; break;
    case K_RANGE: it->next = next_of_range; break;
    case K_LOOP: it->next = next_of_loop; break;
    default: it->next = next_of_dict; break;
    }
    return it;
}

/* Iterators may stand in chains, so a step counts as a level of evaluation. */
value *next_item(state *s, iterator *it) {
    if (!spend(s, 1)) return NULL;
    if (++s->depth > MOST_DEPTH) fail(s, "filters are chained too deep");
    value *v = failed(s) ? NULL : it->next(s, it);
    s->depth--;
    return failed(s) ? NULL : v;
}

bool collect(state *s, items *out, value *v) {
    iterator *it = iterate(s, v);
    if (!it) return false;
    for (value *item; (item = next_item(s, it));) {
        if (!push(s, out, item)) return false;
    }
    return !failed(s);
}
