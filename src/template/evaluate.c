/* evaluate.c - the value of an expression. */
#include <string.h>

#include "template/state.h"

value **slot_of(state *s, const ident *i) {
    frame *f = s->frame;
    while (f && f->function != i->of) f = f->outer;
    return f ? &f->slots[i->slot] : NULL;
}

static value *read_name(state *s, const node *n) {
    value **slot = n->ident ? slot_of(s, n->ident) : NULL;
    if (slot && *slot) return *slot;
    value *name = lent_string(s, n->name->bytes, n->name->size);
    return name ? new_undefined(s, NULL, name, NULL) : NULL;
}

static value *make_list(state *s, const node *n, value_kind kind) {
    value *v = new_list(s, kind, n->list.n);
    for (int64_t i = 0; v && i < n->list.n; i++) {
        if (!(v->list.at[i] = evaluate(s, n->list.at[i]))) return NULL;
    }
    return v;
}

static value *make_dict(state *s, const node *n) {
    value *v = new_dict(s);
    for (int64_t i = 0; v && i < n->list.n; i++) {
        value *key = evaluate(s, n->list.at[i]);
        value *item = key ? evaluate(s, n->body.at[i]) : NULL;
        if (!item || !dict_set(s, v->members, key, item)) return NULL;
    }
    return v;
}

static value *make_concat(state *s, const node *n) {
    value *all = NULL;
    for (int64_t i = 0; i < n->list.n; i++) {
        value *v = evaluate(s, n->list.at[i]);
        value *text = v ? string_of(s, v) : NULL;
        if (!text) return NULL;
        all = all ? concat(s, all, text) : text;
        if (!all) return NULL;
    }
    return all;
}

static value *compare_two(state *s, compare_sign sign, value *a, value *b) {
    static const char *const signs[] = { "==", "!=", "<", "<=", ">", ">=" };
    int c;
    if (sign == SIGN_IN || sign == SIGN_NOT_IN) {
        value *v = contains(s, a, b);
        return v && sign == SIGN_NOT_IN ? new_bool(!v->yes) : v;
    }
    if (sign == SIGN_EQ || sign == SIGN_NE) {
        const bool yes = equal(s, a, b);
        return failed(s) ? NULL : new_bool(yes == (sign == SIGN_EQ));
    }
    if (!order(s, a, b, signs[sign], &c)) return NULL;
    return new_bool(c != 2 && (sign == SIGN_LT ? c < 0 : sign == SIGN_LE ? c <= 0
                               : sign == SIGN_GT ? c > 0 : c >= 0));
}

static value *compare(state *s, const node *n) {
    value *a = evaluate(s, n->a), *v = NULL;
    for (int64_t i = 0; a && i < n->list.n; i++) {
        value *b = evaluate(s, n->list.at[i]->a);
        v = b ? compare_two(s, (compare_sign)n->list.at[i]->op, a, b) : NULL;
        if (!v || !v->yes) return v;
        a = b;
    }
    return a ? v : NULL;
}

/* ---- calls ----------------------------------------------------------------------------------- */

static bool add_named(state *s, arguments *a, items *names, items *named, value *name,
                      value *item) {
    for (int64_t i = 0; i < names->n; i++) {
        if (equal(s, names->at[i], name)) {
            fail(s, "got multiple values for keyword argument '%.*s'", (int)name->text.size,
                 name->text.bytes);
            return false;
        }
    }
    (void)a;
    return push(s, names, name) && push(s, named, item);
}

static bool add_rest(state *s, arguments *a, items *names, items *named, value *rest) {
    if (rest->kind != K_DICT && rest->kind != K_UNDEFINED) {
        fail(s, "argument after ** must be a mapping, not %s", type_name(rest));
        return false;
    }
    if (rest->kind == K_UNDEFINED) return fail_undefined(s, rest);
    for (int64_t i = 0; i < rest->members->n; i++) {
        const dict_slot *slot = &rest->members->slots[i];
        if (slot->key->kind != K_STRING) {
            fail(s, "keywords must be strings");
            return false;
        }
        if (!add_named(s, a, names, named, slot->key, slot->item)) return false;
    }
    return true;
}

static bool evaluate_arguments(state *s, arguments *out, const call_nodes *c, value *caller) {
    items at = { 0 }, names = { 0 }, named = { 0 };
    for (int64_t i = 0; c && i < c->at.n; i++) {
        if (!push(s, &at, evaluate(s, c->at.at[i]))) return false;
    }
    if (c && c->rest) {
        value *rest = evaluate(s, c->rest);
        if (!rest || !collect(s, &at, rest)) return false;
    }
    for (int64_t i = 0; c && i < c->named.n; i++) {
        value *item = evaluate(s, c->named.at[i]);
        if (!item || !add_named(s, out, &names, &named, c->names.at[i]->constant, item)) {
            return false;
        }
    }
    if (caller) {
        value *name = lent_string(s, "caller", 6);
        if (!name || !add_named(s, out, &names, &named, name, caller)) return false;
    }
    if (c && c->named_rest) {
        value *rest = evaluate(s, c->named_rest);
        if (!rest || !add_rest(s, out, &names, &named, rest)) return false;
    }
    *out = (arguments){ at.at, at.n, names.at, named.at, names.n };
    return true;
}

value *evaluate_call(state *s, const node *n, value *caller) {
    arguments a = { 0 };
    value *f = evaluate(s, n->a);
    if (!f || !evaluate_arguments(s, &a, n->call, caller)) return NULL;
    return call_value(s, f, &a);
}

static value *apply_row(state *s, const node *n) {
    arguments a = { 0 };
    value *of = n->a ? evaluate(s, n->a) : s->captured;
    if (!n->row) {
        return fail(s, "no %s named '%.*s'", n->kind == N_FILTER ? "filter" : "test",
                    (int)n->name->size, n->name->bytes);
    }
    if (!of || !evaluate_arguments(s, &a, n->call, NULL)) return NULL;
    return n->kind == N_FILTER ? call_filter(s, n->row, of, &a) : call_test(s, n->row, of, &a);
}

static value *take_item(state *s, const node *n) {
    value *of = evaluate(s, n->a);
    if (!of) return NULL;
    if (n->b->kind != N_SLICE) {
        value *key = evaluate(s, n->b);
        return key ? get_item(s, of, key) : NULL;
    }
    const node *parts[] = { n->b->a, n->b->b, n->b->c };
    value *at[3] = { NULL };
    for (int i = 0; i < 3; i++) {
        if (parts[i] && !(at[i] = evaluate(s, parts[i]))) return NULL;
    }
    return get_slice(s, of, at[0], at[1], at[2]);
}

static value *choose(state *s, const node *n) {
    const value *test = evaluate(s, n->a);
    if (!test) return NULL;
    const bool yes = truth(s, test);
    if (failed(s)) return NULL;
    if (yes) return evaluate(s, n->b);
    if (n->c) return evaluate(s, n->c);
    return new_undefined(s, "the inline if-expression evaluated to false and no else section was "
                            "defined", NULL, NULL);
}

static value *evaluate_below(state *s, const node *n) {
    value *a, *b;
    switch (n->kind) {
    case N_CONST: return n->constant;
    case N_DATA: return lent_string(s, n->name->bytes, n->name->size);
    case N_NAME: return read_name(s, n);
    case N_TUPLE: return make_list(s, n, K_TUPLE);
    case N_LIST: return make_list(s, n, K_LIST);
    case N_DICT: return make_dict(s, n);
    case N_ATTRIBUTE: return (a = evaluate(s, n->a)) ? get_attribute(s, a, n->constant) : NULL;
    case N_ITEM: return take_item(s, n);
    case N_CALL: return evaluate_call(s, n, NULL);
    case N_FILTER:
    case N_TEST: return apply_row(s, n);
    case N_NOT:
        if (!(a = evaluate(s, n->a))) return NULL;
        a = new_bool(!truth(s, a));
        return failed(s) ? NULL : a;
    case N_NEGATIVE: return (a = evaluate(s, n->a)) ? negative(s, a) : NULL;
    case N_POSITIVE:
        if (!(a = evaluate(s, n->a))) return NULL;
        if (a->kind == K_BOOL) return new_int(s, a->yes);
        if (a->kind == K_UNDEFINED) return fail_undefined(s, a);
        return is_number(a) ? a : fail(s, "bad operand type for unary +: '%s'", type_name(a));
    case N_CONCAT: return make_concat(s, n);
    case N_COMPARE: return compare(s, n);
    case N_AND:
    case N_OR:
        if (!(a = evaluate(s, n->a))) return NULL;
        if (truth(s, a) == (n->kind == N_OR)) return failed(s) ? NULL : a;
        return failed(s) ? NULL : evaluate(s, n->b);
    case N_CHOICE: return choose(s, n);
    case N_SLICE: return fail(s, "a slice stands where it has no meaning");
    default: break;
    }
    if (n->kind < N_ADD || n->kind > N_POWER) return fail(s, "this has no value");
    if (!(a = evaluate(s, n->a)) || !(b = evaluate(s, n->b))) return NULL;
    return arithmetic(s, n->kind, a, b);
}

value *evaluate(state *s, const node *n) {
    if (++s->depth > MOST_DEPTH) fail(s, "expressions and calls are nested too deep");
    value *v = spend(s, 1) ? evaluate_below(s, n) : NULL;
    s->depth--;
    if (v && !failed(s)) return v;
    if (!s->line) s->line = n->line;
    return NULL;
}
