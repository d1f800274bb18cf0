/* run.c - statements: what each adds to the text and which variables it sets. */
#include <stdio.h>
#include <string.h>

#include "base/status.h"
#include "template/state.h"

frame *new_frame(state *s, frame *outer, const function *f) {
    frame *out = take(s, sizeof *out);
    if (!out) return NULL;
    *out = (frame){ outer, f, take(s, (size_t)(f->n_slots + 1) * sizeof *out->slots) };
    return out->slots ? out : NULL;
}

/* A name nothing in the text stores: what the template was given, or what every template has. */
static value *resolve(state *s, const string *name) {
    value *v = dict_get_text(s->exported, name->bytes, name->size);
    if (!v) v = dict_get_text(s->globals, name->bytes, name->size);
    if (v) return v;
    const global_row *row = find_global(name->bytes, name->size);
    if (row && (v = new_value(s, K_GLOBAL))) v->global = row;
    return v;
}

bool enter_scope(state *s, const load *loads) {
    for (const load *l = loads; l; l = l->next) {
        value **to = slot_of(s, l->target), **from;
        if (l->kind == LOAD_PARAMETER || !to) continue;
        *to = NULL;
        if (l->kind == LOAD_RESOLVE) *to = resolve(s, l->target->name);
        if (l->kind == LOAD_ALIAS && (from = slot_of(s, l->from))) *to = *from;
    }
    return !failed(s);
}

/* ---- output ---------------------------------------------------------------------------------- */

static bool add_text(state *s, const char *bytes, size_t size) {
    if (size > s->most_output - s->out.size) {
        fail(s, "the text of the template is larger than the limit of %zu bytes", s->most_output);
        return false;
    }
    if (mn_text_add(&s->out, bytes, size) != MN_OK) {
        fail(s, "not enough memory for the text of the template");
        return false;
    }
    return spend_bytes(s, size);
}

static bool write_value(state *s, const node *n) {
    if (n->kind == N_DATA) return add_text(s, n->name->bytes, n->name->size);
    value *v = evaluate(s, n);
    value *text = v ? string_of(s, v) : NULL;
    if (text && add_text(s, text->text.bytes, text->text.size)) return true;
    if (!s->line) s->line = n->line;
    return false;
}

value *capture(state *s, size_t from) {
    value *text = new_string(s, s->out.bytes + from, s->out.size - from);
    s->out.size = from;
    return text;
}

/* ---- assignment ------------------------------------------------------------------------------ */

static bool assign_attribute(state *s, const node *target, value *v) {
    value **slot = target->ident ? slot_of(s, target->ident) : NULL;
    const string *name = &target->constant->text;
    if (!slot || !*slot || (*slot)->kind != K_NAMESPACE) {
        fail(s, "cannot assign attribute on non-namespace object");
        return false;
    }
    if (name->size && name->bytes[0] == '_') {
        fail(s, "chat templates cannot store underscore-prefixed attributes on a namespace");
        return false;
    }
    return dict_set(s, (*slot)->members, target->constant, v);
}

static bool assign_many(state *s, const node *target, value *v, bool top) {
    iterator *it = iterate(s, v);
    if (!it) return false;
    for (int64_t i = 0; i < target->list.n; i++) {
        value *item = next_item(s, it);
        if (!item) {
            fail(s, "not enough values to unpack (expected %lld, got %lld)",
                 (long long)target->list.n, (long long)i);
            return false;
        }
        if (!assign(s, target->list.at[i], item, top)) return false;
    }
    if (next_item(s, it)) {
        fail(s, "too many values to unpack (expected %lld)", (long long)target->list.n);
    }
    return !failed(s);
}

bool assign(state *s, const node *target, value *v, bool top) {
    if (target->kind == N_TUPLE) return assign_many(s, target, v, top);
    if (target->kind == N_ATTRIBUTE_OF_NAMESPACE) return assign_attribute(s, target, v);
    value **slot = target->ident ? slot_of(s, target->ident) : NULL;
    if (!slot) {
        fail(s, "a variable has no place");
        return false;
    }
    *slot = v;
    value *name = top ? lent_string(s, target->name->bytes, target->name->size) : NULL;
    return !top || dict_set(s, s->exported, name, v);
}

/* Attributes are of namespaces: said before the value is evaluated. */
static bool check_targets(state *s, const node *target) {
    for (int64_t i = 0; target->kind == N_TUPLE && i < target->list.n; i++) {
        if (!check_targets(s, target->list.at[i])) return false;
    }
    if (target->kind != N_ATTRIBUTE_OF_NAMESPACE) return true;
    value **slot = target->ident ? slot_of(s, target->ident) : NULL;
    if (slot && *slot && (*slot)->kind == K_NAMESPACE) return true;
    fail(s, "cannot assign attribute on non-namespace object");
    return false;
}

/* ---- macros ---------------------------------------------------------------------------------- */

static value *new_macro(state *s, const node *n) {
    value *v = new_value(s, K_MACRO);
    macro *m = v ? take(s, sizeof *m) : NULL;
    if (!m) return NULL;
    *m = (macro){ .node = n, .outer = s->frame, .takes_caller = n->caller != NULL };
    if (n->kind == N_MACRO) {
        value *name = new_string(s, n->name->bytes, n->name->size);
        value *end = name ? new_string(s, "", 1) : NULL;
        if (!end) return NULL;
        char *closed = take(s, n->name->size + 1);
        if (!closed) return NULL;
        memcpy(closed, n->name->bytes, n->name->size);
        m->name = closed;
    }
    for (int64_t i = 0; i < n->list.n; i++) {
        const string *t = n->list.at[i]->name;
        if (t->size == 6 && memcmp(t->bytes, "caller", 6) == 0) m->explicit_caller = true;
    }
    v->macro = m;
    return v;
}

/* What is left of the named arguments once parameters took theirs. */
static bool take_named(state *s, value **out, arguments *rest, const char *name, size_t size) {
    for (int64_t i = 0; i < rest->n_named; i++) {
        const string *t = &rest->names[i]->text;
        if (t->size != size || memcmp(t->bytes, name, size) != 0) continue;
        *out = rest->named[i];
        for (int64_t k = i + 1; k < rest->n_named; k++) {
            rest->names[k - 1] = rest->names[k];
            rest->named[k - 1] = rest->named[k];
        }
        rest->n_named--;
        return true;
    }
    (void)s;
    return false;
}

static value *dict_of_named(state *s, const arguments *rest) {
    value *v = new_dict(s);
    for (int64_t i = 0; v && i < rest->n_named; i++) {
        if (!dict_set(s, v->members, rest->names[i], rest->named[i])) return NULL;
    }
    return v;
}

static bool bind_special(state *s, macro *m, frame *f, arguments *rest, bool found_caller) {
    const node *n = m->node;
    const char *called = m->name ? m->name : "caller";
    if (n->caller && !found_caller) {
        value *caller = NULL;
        if (!take_named(s, &caller, rest, "caller", 6) || caller->kind == K_NONE) {
            caller = new_undefined(s, "no caller defined", NULL, NULL);
        }
        f->slots[n->caller->slot] = caller;
    }
    if (n->kwargs) {
        if (!(f->slots[n->kwargs->slot] = dict_of_named(s, rest))) return false;
    } else if (rest->n_named) {
        fail(s, "macro '%s' takes no keyword argument '%.*s'", called,
             (int)rest->names[0]->text.size, rest->names[0]->text.bytes);
        return false;
    }
    const int64_t more = rest->n - n->list.n;
    if (n->varargs) {
        value *list = new_list(s, K_TUPLE, more > 0 ? more : 0);
        for (int64_t i = 0; list && i < more; i++) list->list.at[i] = rest->at[n->list.n + i];
        f->slots[n->varargs->slot] = list;
    } else if (more > 0) {
        fail(s, "macro '%s' takes not more than %lld argument(s)", called, (long long)n->list.n);
    }
    return !failed(s);
}

/* Values for all parameters; called within the macro's frame. */
static bool bind_parameters(state *s, macro *m, frame *f, const arguments *given) {
    const node *n = m->node;
    arguments rest = *given;
    bool found_caller = given->n >= n->list.n && m->explicit_caller;
    if (rest.n_named) {
        rest.names = take(s, (size_t)rest.n_named * sizeof *rest.names);
        rest.named = take(s, (size_t)rest.n_named * sizeof *rest.named);
        if (!rest.names || !rest.named) return false;
        memcpy(rest.names, given->names, (size_t)rest.n_named * sizeof *rest.names);
        memcpy(rest.named, given->named, (size_t)rest.n_named * sizeof *rest.named);
    }
    for (int64_t i = 0; i < n->list.n; i++) {
        const string *name = n->list.at[i]->name;
        value *v = NULL;
        if (i < given->n) v = given->at[i];
        else take_named(s, &v, &rest, name->bytes, name->size);
        if (i >= given->n && name->size == 6 && memcmp(name->bytes, "caller", 6) == 0) {
            found_caller = true;
        }
        f->slots[n->list.at[i]->ident->slot] = v;
    }
    if (!bind_special(s, m, f, &rest, found_caller) || !enter_scope(s, n->loads)) return false;
    for (int64_t i = 0; i < n->list.n; i++) {
        value **slot = &f->slots[n->list.at[i]->ident->slot];
        const int64_t given_at = i - (n->list.n - n->other.n);
        if (*slot) continue;
        if (given_at >= 0) {
            if (!(*slot = evaluate(s, n->other.at[given_at]))) return false;
            continue;
        }
        const string *name = n->list.at[i]->name;
        char text[160];
        const int size = snprintf(text, sizeof text, "parameter '%.*s' was not provided",
                                  (int)(name->size < 100 ? name->size : 100), name->bytes);
        value *hint = new_string(s, text, (size_t)size + 1);
        if (!hint || !(*slot = new_undefined(s, hint->text.bytes, NULL, NULL))) return false;
    }
    return true;
}

value *call_macro(state *s, macro *m, const arguments *a) {
    frame *before = s->frame, *f = new_frame(s, m->outer, m->node->function);
    const size_t from = s->out.size;
    if (!f || ++s->macros > MOST_MACROS) {
        return fail(s, "macros call each other more than %d deep", MOST_MACROS);
    }
    s->frame = f;
    const bool ok = bind_parameters(s, m, f, a) && run_body(s, &m->node->body) == GO_ON;
    s->frame = before;
    s->macros--;
    return ok ? capture(s, from) : NULL;
}

/* ---- blocks ---------------------------------------------------------------------------------- */

static outcome run_call_block(state *s, const node *n) {
    value *caller = new_macro(s, n);
    if (!caller) return GO_FAILED;
    value *v = n->a ? evaluate_call(s, n->a, caller)
                    : call_macro(s, caller->macro, &(arguments){ 0 });     // generation
    value *text = v ? string_of(s, v) : NULL;
    return text && add_text(s, text->text.bytes, text->text.size) ? GO_ON : GO_FAILED;
}

/* The body's text through the filters of `b`; a break within leaves it. */
static outcome run_captured(state *s, const node *n, value **out) {
    const size_t from = s->out.size;
    if (!enter_scope(s, n->loads)) return GO_FAILED;
    const outcome o = run_body(s, &n->body);
    if (o != GO_ON) {
        if (o != GO_FAILED) s->out.size = from;
        return o;
    }
    *out = capture(s, from);
    if (*out && n->b) {
        value *before = s->captured;
        s->captured = *out;
        *out = evaluate(s, n->b);
        s->captured = before;
    }
    return *out ? GO_ON : GO_FAILED;
}

static outcome run_with(state *s, const node *n) {
    if (!enter_scope(s, n->loads)) return GO_FAILED;
    for (int64_t i = 0; i < n->list.n; i++) {
        value *v = evaluate(s, n->other.at[i]);
        if (!v || !assign(s, n->list.at[i], v, false)) return GO_FAILED;
    }
    return run_body(s, &n->body);
}

static outcome run_if(state *s, const node *n) {
    const node *branch = n;
    for (int64_t i = -1; i < n->list.n; i++) {
        if (i >= 0) branch = n->list.at[i];
        const value *test = evaluate(s, branch->a);
        const bool yes = test && truth(s, test);
        if (!test || failed(s)) return GO_FAILED;
        if (yes) return run_body(s, &branch->body);
    }
    return run_body(s, &n->other);
}

static outcome run_block(state *s, const node *n) {
    frame *before = s->frame, *f = new_frame(s, NULL, n->function);
    if (!f) return GO_FAILED;
    s->frame = f;
    const outcome o = enter_scope(s, n->loads) ? run_body(s, &n->body) : GO_FAILED;
    s->frame = before;
    return o;
}

static outcome run_set(state *s, const node *n) {
    value *v = NULL;
    if (n->kind == N_SET) {
        if (!check_targets(s, n->a) || !(v = evaluate(s, n->b))) return GO_FAILED;
    } else {
        const outcome o = run_captured(s, n, &v);
        if (o != GO_ON) return o;
    }
    return assign(s, n->a, v, n->top) ? GO_ON : GO_FAILED;
}

static outcome run_macro(state *s, const node *n) {
    value *v = new_macro(s, n), **slot = n->ident ? slot_of(s, n->ident) : NULL;
    if (!v || !slot) return GO_FAILED;
    *slot = v;
    value *name = n->top ? lent_string(s, n->name->bytes, n->name->size) : NULL;
    return !n->top || dict_set(s, s->exported, name, v) ? GO_ON : GO_FAILED;
}

static outcome run_node(state *s, const node *n) {
    value *v = NULL;
    outcome o;
    switch (n->kind) {
    case N_OUTPUT:
        for (int64_t i = 0; i < n->list.n; i++) {
            if (!write_value(s, n->list.at[i])) return GO_FAILED;
        }
        return GO_ON;
    case N_IF: return run_if(s, n);
    case N_FOR: return run_loop(s, n);
    case N_SET:
    case N_SET_BLOCK: return run_set(s, n);
    case N_MACRO: return run_macro(s, n);
    case N_CALL_BLOCK: return run_call_block(s, n);
    case N_FILTER_BLOCK:
        o = run_captured(s, n, &v);
        if (o == GO_ON) v = string_of(s, v);
        if (o == GO_ON && (!v || !add_text(s, v->text.bytes, v->text.size))) return GO_FAILED;
        return o;
    case N_WITH: return run_with(s, n);
    case N_SCOPE: return enter_scope(s, n->loads) ? run_body(s, &n->body) : GO_FAILED;
    case N_BLOCK: return run_block(s, n);
    case N_BREAK: return GO_BREAK;
    case N_CONTINUE: return GO_CONTINUE;
    default: fail(s, "this is no statement"); return GO_FAILED;
    }
}

outcome run_body(state *s, const nodes *body) {
    outcome o = GO_ON;
    if (++s->depth > MOST_DEPTH) fail(s, "blocks and calls are nested too deep");
    for (int64_t i = 0; i < body->n && o == GO_ON; i++) {
        o = spend(s, 1) ? run_node(s, body->at[i]) : GO_FAILED;
        if (o == GO_FAILED && !s->line) s->line = body->at[i]->line;
    }
    s->depth--;
    return failed(s) ? GO_FAILED : o;
}

bool render_root(state *s, const mn_jinja *t) {
    s->frame = new_frame(s, NULL, t->root->function);
    return s->frame && enter_scope(s, t->root->loads) && run_body(s, &t->root->body) == GO_ON;
}
