/* loop.c - for: its items, its test, what `loop` tells, and loops that call themselves. */
#include <string.h>

#include "template/state.h"

/* ---- what loop tells ------------------------------------------------------------------------- */

/* Length of what is gone through; takes all items at once where it has none of its own. */
static bool know_length(state *s, loop_state *l) {
    if (l->length >= 0) return true;
    items rest = { 0 };
    for (value *v; (v = next_item(s, l->from));) {
        if (!push(s, &rest, v)) return false;
    }
    if (failed(s)) return false;
    value *list = list_of(s, &rest);
    if (!list || !(l->from = iterate(s, list))) return false;
    l->length = rest.n + l->index0 + 1 + (l->peeked && l->after);
    return true;
}

static value *look_ahead(state *s, loop_state *l) {
    if (!l->peeked || !l->after) {
        l->after = next_item(s, l->from);
        l->peeked = true;
    }
    return l->after;
}

value *loop_attribute(state *s, value *loop, const char *name, size_t size) {
    loop_state *l = loop->loop;
    const value key = { .kind = K_STRING, .text = { name, size, -1 } };
    if (string_is(&key, "index")) return new_int(s, l->index0 + 1);
    if (string_is(&key, "index0")) return new_int(s, l->index0);
    if (string_is(&key, "first")) return new_bool(l->index0 == 0);
    if (string_is(&key, "depth")) return new_int(s, l->depth0 + 1);
    if (string_is(&key, "depth0")) return new_int(s, l->depth0);
    if (string_is(&key, "last")) {
        const value *after = look_ahead(s, l);
        return failed(s) ? NULL : new_bool(!after);
    }
    if (string_is(&key, "previtem")) {
        if (l->index0 == 0 || !l->before) {
            return new_undefined(s, "there is no previous item", NULL, NULL);
        }
        return l->before;
    }
    if (string_is(&key, "nextitem")) {
        value *after = look_ahead(s, l);
        if (after || failed(s)) return after;
        return new_undefined(s, "there is no next item", NULL, NULL);
    }
    const bool back = string_is(&key, "revindex"), back0 = string_is(&key, "revindex0");
    if (!back && !back0 && !string_is(&key, "length")) return NULL;
    if (!know_length(s, l)) return NULL;
    return new_int(s, !back && !back0 ? l->length : l->length - l->index0 - (back0 ? 1 : 0));
}

/* ---- items ----------------------------------------------------------------------------------- */

typedef struct tested {
    const node *loop;
    frame *outer, *frame;       // the test's own; NULL before the first item
} tested;

/* The next item that passes the test of `for ... if`. */
static value *next_tested(state *s, iterator *it) {
    tested *t = it->more;
    frame *before = s->frame;
    value *item = NULL;
    bool yes = false;
    if (!t->frame) {
        t->frame = new_frame(s, t->outer, t->loop->test_function);
        s->frame = t->frame;
        if (!t->frame || !enter_scope(s, t->loop->test_loads)) return NULL;
    }
    s->frame = t->frame;
    while (!yes && (item = next_item(s, it->from))) {
        const value *test = assign(s, t->loop->d, item, false) ? evaluate(s, t->loop->c) : NULL;
        if (!test) break;
        yes = truth(s, test);
    }
    s->frame = before;
    return yes && !failed(s) ? item : NULL;
}

static iterator *items_of(state *s, const node *n, value *over, frame *outer) {
    iterator *from = iterate(s, over);
    if (!from || !n->c) return from;
    value *v = new_iterator(s, next_tested);
    tested *t = v ? take(s, sizeof *t) : NULL;
    if (!t) return NULL;
    *t = (tested){ n, outer, NULL };
    v->iterator->from = from;
    v->iterator->more = t;
    return v->iterator;
}

/* ---- running --------------------------------------------------------------------------------- */

static value *new_loop(state *s, const node *n, value *over, iterator *from, frame *outer,
                       int depth0) {
    value *v = new_value(s, K_LOOP);
    loop_state *l = v ? take(s, sizeof *l) : NULL;
    if (!l) return NULL;
    *l = (loop_state){ .from = from, .over = over, .index0 = -1, .length = -1, .depth0 = depth0,
                       .recursive = n->recursive ? n : NULL, .frame = outer };
    if (!n->c) l->length = length_of(s, over);
    v->loop = l;
    return v;
}

static value *step_loop(state *s, loop_state *l) {
    value *item = l->peeked ? l->after : next_item(s, l->from);
    if (!item) return NULL;
    l->peeked = false;
    l->after = NULL;
    l->index0++;
    l->before = l->current;
    l->current = item;
    return item;
}

/* The iterations, in the frame that is current. */
static outcome run_items(state *s, const node *n, value *over, frame *outer, int depth0) {
    iterator *from = items_of(s, n, over, outer);
    if (!from) return GO_FAILED;
    value *loop = n->loop ? new_loop(s, n, over, from, outer, depth0) : NULL;
    if (n->loop && (!loop || failed(s))) return GO_FAILED;
    bool none = true;
    for (value *item; (item = loop ? step_loop(s, loop->loop) : next_item(s, from));) {
        value **slot = loop ? slot_of(s, n->loop) : NULL;
        if (slot) *slot = loop;
        if (!assign(s, n->a, item, false) || !enter_scope(s, n->loads)) return GO_FAILED;
        const outcome o = run_body(s, &n->body);
        if (o == GO_FAILED) return o;
        if (o == GO_BREAK) break;
        if (o == GO_ON) none = false;           // as Jinja counts: continue does not
    }
    if (failed(s)) return GO_FAILED;
    if (!none || !n->other.n) return GO_ON;
    return enter_scope(s, n->more_loads) ? run_body(s, &n->other) : GO_FAILED;
}

/* A recursive loop is a function: its text is made, then put where it was called. */
static value *run_recursive_items(state *s, const node *n, value *over, frame *outer, int depth0) {
    frame *before = s->frame, *f = new_frame(s, outer, n->function);
    const size_t from = s->out.size;
    if (!f || ++s->macros > MOST_MACROS) {
        return fail(s, "a recursive loop calls itself more than %d deep", MOST_MACROS);
    }
    s->frame = f;
    const outcome o = run_items(s, n, over, outer, depth0);
    s->frame = before;
    s->macros--;
    return o == GO_ON ? capture(s, from) : NULL;
}

value *run_recursive(state *s, loop_state *l, value *over) {
    if (!l->recursive) {
        return fail(s, "the loop must have the 'recursive' marker to be called recursively");
    }
    return run_recursive_items(s, l->recursive, over, l->frame, l->depth0 + 1);
}

outcome run_loop(state *s, const node *n) {
    value *over = evaluate(s, n->b);
    if (!over) return GO_FAILED;
    if (!n->recursive) return run_items(s, n, over, s->frame, 0);
    const value *text = run_recursive_items(s, n, over, s->frame, 0);
    if (!text || mn_text_add(&s->out, text->text.bytes, text->text.size) != 0) return GO_FAILED;
    return GO_ON;
}
