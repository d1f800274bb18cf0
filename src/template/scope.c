/* scope.c - which variable a name means: decided before anything runs, as Jinja does.
 *
 * A scope (the template, a loop, a macro, a block) has its own variables. Where it is entered each
 * of them is looked up among those the template was given, copied from the scope around, or
 * undefined, depending on where the text first stores to it. So a set within a loop does not reach
 * out of it, and a name that is set later in a scope is undefined until then for scopes inside. */
#include <string.h>

#include "template/state.h"

typedef struct ref {
    const string *name;
    ident *to;
} ref;

typedef struct scope {
    struct scope *parent;
    function *function;
    int level;
    ref *refs;
    load *loads;
    const string **stores;
    int n_refs, room_refs, n_stores, room_stores;
} scope;

typedef struct walk {
    state *s;
    scope *scope;
    bool soft;                  // within an if: rows that do not exist may stand
    bool top, loop;             // at the template's top; within a loop of the same function
} walk;

static bool same_name(const string *a, const string *b) {
    return a == b || (a->size == b->size && memcmp(a->bytes, b->bytes, a->size) == 0);
}

/* ---- symbols --------------------------------------------------------------------------------- */

static ident *ident_of(state *s, scope *c, const string *name) {
    function *f = c->function;
    for (ident *i = f->idents; i; i = i->next) {
        if (i->level == c->level && same_name(i->name, name)) return i;
    }
    ident *i = take(s, sizeof *i);
    if (!i) return NULL;
    *i = (ident){ .name = name, .level = c->level, .of = f, .slot = f->n_slots++,
                  .next = f->idents };
    f->idents = i;
    return i;
}

static ref *own_ref(const scope *c, const string *name) {
    for (int i = 0; i < c->n_refs; i++) {
        if (same_name(c->refs[i].name, name)) return &c->refs[i];
    }
    return NULL;
}

static ident *find_ref(const scope *c, const string *name) {
    for (; c; c = c->parent) {
        const ref *r = own_ref(c, name);
        if (r) return r->to;
    }
    return NULL;
}

/* Room for one more in a list of the store. */
static bool more_room(state *s, void **list, int n, int *room, size_t size) {
    if (n < *room) return true;
    const int wanted = *room ? 2 * *room : 8;
    void *grown = take(s, (size_t)wanted * size);
    if (!grown) return false;
    if (n) memcpy(grown, *list, (size_t)n * size);
    *list = grown;
    *room = wanted;
    return true;
}

static bool set_load(state *s, scope *c, ident *target, load_kind kind, ident *from) {
    load *l = c->loads;
    while (l && l->target != target) l = l->next;
    if (!l) {
        if (!(l = take(s, sizeof *l))) return false;
        l->target = target;
        l->next = c->loads;
        c->loads = l;
    }
    l->kind = kind;
    l->from = from;
    return true;
}

static ident *define(state *s, scope *c, const string *name, load_kind kind, ident *from) {
    ident *i = ident_of(s, c, name);
    ref *r = own_ref(c, name);
    if (!i || !set_load(s, c, i, kind, from)) return NULL;
    if (!r) {
        if (!more_room(s, (void **)&c->refs, c->n_refs, &c->room_refs,
                       sizeof *c->refs)) return NULL;
        r = &c->refs[c->n_refs++];
    }
    *r = (ref){ name, i };
    return i;
}

static bool stored(const scope *c, const string *name) {
    for (int i = 0; i < c->n_stores; i++) {
        if (same_name(c->stores[i], name)) return true;
    }
    return false;
}

static bool note_store(state *s, scope *c, const string *name) {
    if (stored(c, name)) return true;
    if (!more_room(s, (void **)&c->stores, c->n_stores, &c->room_stores, sizeof *c->stores)) {
        return false;
    }
    c->stores[c->n_stores++] = name;
    return true;
}

static bool store_name(walk *w, const string *name) {
    scope *c = w->scope;
    if (!note_store(w->s, c, name)) return false;
    if (own_ref(c, name)) return true;
    ident *outer = find_ref(c->parent, name);
    return define(w->s, c, name, outer ? LOAD_ALIAS : LOAD_UNDEFINED, outer) != NULL;
}

static ident *declare(walk *w, const string *name) {
    return note_store(w->s, w->scope, name) ? define(w->s, w->scope, name, LOAD_PARAMETER, NULL)
                                            : NULL;
}

static bool load_name(walk *w, const string *name) {
    return find_ref(w->scope, name) ||
           define(w->s, w->scope, name, LOAD_RESOLVE, NULL) != NULL;
}

static bool copy_scope(state *s, scope *out, const scope *from) {
    *out = *from;
    out->refs = take(s, (size_t)(from->room_refs + 1) * sizeof *out->refs);
    out->stores = take(s, (size_t)(from->room_stores + 1) * sizeof *out->stores);
    out->loads = NULL;
    if (!out->refs || !out->stores) return false;
    if (from->n_refs) memcpy(out->refs, from->refs, (size_t)from->n_refs * sizeof *out->refs);
    if (from->n_stores) {
        memcpy(out->stores, from->stores, (size_t)from->n_stores * sizeof *out->stores);
    }
    for (const load *l = from->loads; l; l = l->next) {
        if (!set_load(s, out, l->target, l->kind, l->from)) return false;
    }
    return true;
}

/* The scope behind an if: what any branch knew; what one of them stores is looked up first. */
static bool join_branches(walk *w, scope *branches, int n) {
    scope *c = w->scope;
    scope before;
    if (!copy_scope(w->s, &before, c)) return false;
    for (int b = 0; b < n; b++) {
        for (int i = 0; i < branches[b].n_refs; i++) {
            ref *r = own_ref(c, branches[b].refs[i].name);
            if (!r) {
                if (!more_room(w->s, (void **)&c->refs, c->n_refs, &c->room_refs, sizeof *r)) {
                    return false;
                }
                r = &c->refs[c->n_refs++];
            }
            *r = branches[b].refs[i];
        }
        for (const load *l = branches[b].loads; l; l = l->next) {
            if (!set_load(w->s, c, l->target, l->kind, l->from)) return false;
        }
        for (int i = 0; i < branches[b].n_stores; i++) {
            if (!note_store(w->s, c, branches[b].stores[i])) return false;
        }
    }
    for (int i = 0; i < c->n_stores; i++) {
        if (stored(&before, c->stores[i])) continue;
        ident *target = find_ref(c, c->stores[i]);
        ident *outer = find_ref(c->parent, c->stores[i]);
        if (!set_load(w->s, c, target, outer ? LOAD_ALIAS : LOAD_RESOLVE, outer)) return false;
    }
    return true;
}

/* ---- first pass over a scope: which names it has ----------------------------------------------
 * */

static bool visit(walk *w, const node *n, bool parameter);

static bool visit_all(walk *w, const nodes *list, bool parameter) {
    for (int64_t i = 0; i < list->n; i++) {
        if (!visit(w, list->at[i], parameter)) return false;
    }
    return true;
}

static bool visit_call(walk *w, const call_nodes *c) {
    return !c || (visit_all(w, &c->at, false) && visit_all(w, &c->named, false) &&
                  visit(w, c->rest, false) && visit(w, c->named_rest, false));
}

static bool visit_if(walk *w, const node *n) {
    scope *before = w->scope;
    scope branches[3];
    for (int b = 0; b < 3; b++) {
        if (!copy_scope(w->s, &branches[b], before)) return false;
        w->scope = &branches[b];
        const bool ok = visit_all(w, b == 0 ? &n->body : b == 1 ? &n->list : &n->other, false);
        w->scope = before;
        if (!ok) return false;
    }
    return join_branches(w, branches, 3);
}

/* Names in the order Jinja meets them. Scopes inside are not entered. */
static bool visit(walk *w, const node *n, bool parameter) {
    if (!n) return true;
    switch (n->kind) {
    case N_NAME:
        if (parameter || n->use == USE_PARAMETER) return declare(w, n->name) != NULL;
        return n->use == USE_STORE ? store_name(w, n->name) : load_name(w, n->name);
    case N_ATTRIBUTE_OF_NAMESPACE: return load_name(w, n->name);
    case N_IF: return visit(w, n->a, false) && visit_if(w, n);
    case N_MACRO: return store_name(w, n->name);
    case N_SET: return visit(w, n->b, false) && visit(w, n->a, false);
    case N_SET_BLOCK: return visit(w, n->a, false);
    case N_FOR: return visit(w, n->b, false);
    case N_CALL_BLOCK: return visit(w, n->a, false);
    case N_FILTER_BLOCK: return visit(w, n->b, false);
    case N_WITH: return visit_all(w, &n->other, false);
    case N_SCOPE:
    case N_BLOCK: return true;
    default: break;
    }
    /* of a choice Jinja meets the test, then the first value, then the second: as stored here */
    return visit(w, n->a, parameter) && visit(w, n->b, parameter) && visit(w, n->c, parameter) &&
           visit_all(w, &n->list, parameter) && visit_all(w, &n->body, parameter) &&
           visit_call(w, n->call);
}

/* ---- second pass: names are bound, scopes inside are entered ----------------------------------
 * */

static bool bind_node(walk *w, node *n);

static bool bind_all(walk *w, const nodes *list) {
    for (int64_t i = 0; i < list->n; i++) {
        if (!bind_node(w, list->at[i])) return false;
    }
    return true;
}

static scope inner(const walk *w, function *f) {
    return (scope){ .parent = w->scope, .function = f ? f : w->scope->function,
                    .level = w->scope->level + 1 };
}

static function *new_function(walk *w) {
    function *f = take(w->s, sizeof *f);
    if (f) *f = (function){ .outer = w->scope->function, .depth = w->scope->function->depth + 1 };
    return f;
}

/* Whether one of the statements reads `name` before storing to it, looking into all but blocks.
 * 1: yes; 2: stored first. */
static int reads_name(const node *n, const string *name);

static int reads_any(const nodes *list, const string *name) {
    for (int64_t i = 0; i < list->n; i++) {
        const int found = reads_name(list->at[i], name);
        if (found) return found;
    }
    return 0;
}

static int reads_name(const node *n, const string *name) {
    int found;
    if (!n || n->kind == N_BLOCK) return 0;
    if (n->kind == N_NAME && same_name(n->name, name)) return n->use == USE_LOAD ? 1 : 2;
    if (n->kind == N_FOR && ((found = reads_name(n->a, name)) || (found = reads_name(n->b, name)) ||
        (found = reads_any(&n->body, name)) || (found = reads_any(&n->other, name)))) return found;
    if (n->kind == N_FOR) return reads_name(n->c, name);
    if ((found = reads_name(n->a, name)) || (found = reads_name(n->b, name)) ||
        (found = reads_name(n->c, name))) return found;
    if (n->kind == N_IF) {
        if ((found = reads_any(&n->body, name)) || (found = reads_any(&n->list,
                                                                      name))) return found;
        return reads_any(&n->other, name);
    }
    if ((found = reads_any(&n->list, name)) || (found = reads_any(&n->other, name)) ||
        (found = reads_any(&n->body, name))) return found;
    const call_nodes *c = n->call;
    if (!c) return 0;
    if ((found = reads_any(&c->at, name)) || (found = reads_any(&c->named, name)) ||
        (found = reads_name(c->rest, name))) return found;
    return reads_name(c->named_rest, name);
}

static bool reads(const nodes *body, const char *text) {
    const string name = { text, strlen(text), -1 };
    return reads_any(body, &name) == 1;
}

static const string *word(const char *text) {
    static const string words[] = { { "loop", 4, 4 }, { "caller", 6, 6 }, { "kwargs", 6, 6 },
                                    { "varargs", 7, 7 } };
    for (int i = 0; i < 4; i++) {
        if (strcmp(words[i].bytes, text) == 0) return &words[i];
    }
    return NULL;
}

/* Binds a body within `c`; what is loaded on its entry goes to `loads`. */
static bool bind_body(walk *w, scope *c, const nodes *body, load **loads, bool loop) {
    const walk before = *w;
    w->scope = c;
    w->soft = false;
    w->top = false;
    w->loop = loop;
    const bool ok = bind_all(w, body);
    *w = before;
    *loads = c->loads;
    return ok;
}

static bool in_scope(walk *w, scope *c, bool (*run)(walk *w, const node *n), const node *n) {
    scope *before = w->scope;
    w->scope = c;
    const bool ok = run(w, n);
    w->scope = before;
    return ok;
}

static bool visit_loop(walk *w, const node *n) {
    return visit(w, n->a, true) && visit_all(w, &n->body, false);
}

static bool visit_loop_test(walk *w, const node *n) {
    return visit(w, n->a, true) && visit(w, n->c, false);
}

static bool visit_loop_else(walk *w, const node *n) {
    return visit_all(w, &n->other, false);
}

static bool bind_target(walk *w, node *n) {
    if (n->kind == N_TUPLE) {
        for (int64_t i = 0; i < n->list.n; i++) {
            if (!bind_target(w, n->list.at[i])) return false;
        }
        return true;
    }
    n->ident = find_ref(w->scope, n->name);
    return true;
}

static bool names_loop(const node *n) {
    if (n->kind == N_NAME) return same_name(n->name, word("loop"));
    for (int64_t i = 0; n->kind == N_TUPLE && i < n->list.n; i++) {
        if (names_loop(n->list.at[i])) return true;
    }
    return false;
}

/* A target is bound twice where there is a test: the copy of the test in `d`. */
static bool bind_test(walk *w, node *n) {
    n->test_function = new_function(w);
    if (!n->test_function) return false;
    scope test = inner(w, n->test_function);
    node *copy = take(w->s, sizeof *copy);
    if (!copy || !in_scope(w, &test, visit_loop_test, n)) return false;
    *copy = *n->a;
    if (copy->kind == N_TUPLE) {
        copy->list.at = take(w->s, (size_t)n->a->list.n * sizeof *copy->list.at + 1);
        if (!copy->list.at) return false;
        for (int64_t i = 0; i < n->a->list.n; i++) {
            if (!(copy->list.at[i] = take(w->s, sizeof *copy))) return false;
            *copy->list.at[i] = *n->a->list.at[i];
            if (copy->list.at[i]->kind == N_TUPLE) {
                w->s->line = n->line;
                fail(w->s, "names of a loop with a test are nested too deep");
                return false;
            }
        }
    }
    n->d = copy;
    const walk before = *w;
    w->scope = &test;
    const bool ok = bind_target(w, copy) && bind_node(w, n->c);
    *w = before;
    n->test_loads = test.loads;
    return ok;
}

static bool bind_for(walk *w, node *n) {
    if (names_loop(n->a)) {
        w->s->line = n->line;
        fail(w->s, "loop is the loop's own name; choose another");
        return false;
    }
    if (n->recursive && !(n->function = new_function(w))) return false;
    scope body = inner(w, n->function), other = inner(w, n->function);
    scope *before = w->scope;
    if (n->recursive || reads(&n->body, "loop")) {
        w->scope = &body;
        n->loop = declare(w, word("loop"));
        w->scope = before;
        if (!n->loop) return false;
    }
    if (!in_scope(w, &body, visit_loop, n) || !in_scope(w, &other, visit_loop_else,
                                                        n)) return false;
    if (n->c && !bind_test(w, n)) return false;
    if (!bind_node(w, n->b)) return false;
    w->scope = &body;
    bind_target(w, n->a);
    w->scope = before;
    return bind_body(w, &body, &n->body, &n->loads, true) &&
           bind_body(w, &other, &n->other, &n->more_loads, w->loop && !n->recursive);
}

static bool visit_macro_names(walk *w, const node *n) {
    return visit_all(w, &n->list, false) && visit_all(w, &n->other, false) &&
           visit_all(w, &n->body, false);
}

static bool has_parameter(const node *n, const string *name) {
    for (int64_t i = 0; i < n->list.n; i++) {
        if (same_name(n->list.at[i]->name, name)) return true;
    }
    return false;
}

/* The special names of a macro that its body reads without having them as parameters. */
static bool bind_specials(walk *w, scope *c, node *n) {
    ident **where[] = { &n->caller, &n->kwargs, &n->varargs };
    static const char *const specials[] = { "caller", "kwargs", "varargs" };
    for (int i = 0; i < 3; i++) {
        if (!reads(&n->body, specials[i])) continue;
        if (has_parameter(n, word(specials[i]))) {
            const node *first = n->other.n ? n->list.at[n->list.n - n->other.n] : NULL;
            bool given = false;
            for (int64_t k = 0; i == 0 && k < n->list.n; k++) {
                given |= n->list.at[k] == first;
                if (same_name(n->list.at[k]->name, word("caller")) && !given) {
                    w->s->line = n->line;
                    fail(w->s, "the parameter caller needs a default, or is left out");
                    return false;
                }
            }
            continue;
        }
        scope *before = w->scope;
        w->scope = c;
        *where[i] = declare(w, word(specials[i]));
        w->scope = before;
        if (!*where[i]) return false;
    }
    return true;
}

static bool bind_macro(walk *w, node *n) {
    n->function = new_function(w);
    if (!n->function) return false;
    scope c = inner(w, n->function);
    if (!in_scope(w, &c, visit_macro_names, n) || !bind_specials(w, &c, n) ||
        !in_scope(w, &c, visit_macro_names, n)) return false;
    const walk before = *w;
    w->scope = &c;
    w->soft = w->top = w->loop = false;
    bool ok = true;
    for (int64_t i = 0; i < n->list.n; i++) n->list.at[i]->ident = find_ref(&c,
                                                                            n->list.at[i]->name);
    ok = bind_all(w, &n->other);
    *w = before;
    return ok && bind_body(w, &c, &n->body, &n->loads, false);
}

static bool visit_bodies(walk *w, const node *n) {
    return visit_all(w, n->kind == N_WITH ? &n->list : &n->body, false) &&
           (n->kind != N_WITH || visit_all(w, &n->body, false)) &&
           visit(w, n->kind == N_WITH ? NULL : n->b, false);
}

/* Blocks with variables of their own within the same function. */
static bool bind_scope(walk *w, node *n) {
    scope c = inner(w, NULL);
    if (!in_scope(w, &c, visit_bodies, n)) return false;
    if (n->kind == N_WITH && !bind_all(w, &n->other)) return false;
    scope *before = w->scope;
    w->scope = &c;
    bool ok = true;
    for (int64_t i = 0; n->kind == N_WITH && i < n->list.n; i++) bind_target(w, n->list.at[i]);
    if (n->b) ok = bind_node(w, n->b);
    w->scope = before;
    return ok && bind_body(w, &c, &n->body, &n->loads, w->loop);
}

/* A block knows what the template was given and what was set at its top, nothing else. */
static bool bind_block(walk *w, node *n) {
    const walk before = *w;
    n->function = take(w->s, sizeof *n->function);
    if (!n->function) return false;
    scope c = { .function = n->function };
    const bool ok = in_scope(w, &c, visit_bodies, n) &&
                    bind_body(w, &c, &n->body, &n->loads, false);
    *w = before;
    return ok;
}

static bool bind_call(walk *w, const call_nodes *c) {
    return !c || (bind_all(w, &c->at) && bind_all(w, &c->named) &&
                  (!c->rest || bind_node(w, c->rest)) &&
                  (!c->named_rest || bind_node(w, c->named_rest)));
}

static bool bind_if(walk *w, node *n) {
    const bool before = w->soft;
    w->soft = true;
    const bool ok = (!n->a || bind_node(w, n->a)) && (!n->b || bind_node(w, n->b)) &&
                    (!n->c || bind_node(w, n->c)) && bind_all(w, &n->body) &&
                    bind_all(w, &n->list) && bind_all(w, &n->other);
    w->soft = before;
    return ok;
}

static bool bind_row(walk *w, node *n) {
    if (!n->row && !w->soft) {
        w->s->line = n->line;
        fail(w->s, "no %s named '%.*s'", n->kind == N_FILTER ? "filter" : "test",
             (int)n->name->size, n->name->bytes);
        return false;
    }
    return (!n->a || bind_node(w, n->a)) && bind_call(w, n->call);
}

static bool bind_node(walk *w, node *n) {
    n->top = w->top;
    switch (n->kind) {
    case N_NAME:
    case N_ATTRIBUTE_OF_NAMESPACE:
        n->ident = find_ref(w->scope, n->name);
        return true;
    case N_FOR: return bind_for(w, n);
    case N_IF:
    case N_CHOICE: return bind_if(w, n);
    case N_MACRO:
        n->ident = find_ref(w->scope, n->name);
        return bind_macro(w, n);
    case N_CALL_BLOCK: return (!n->a || bind_node(w, n->a)) && bind_macro(w, n);
    case N_SET: return bind_node(w, n->b) && bind_node(w, n->a);
    case N_SET_BLOCK:
        if (!bind_node(w, n->a)) return false;
        return bind_scope(w, n);
    case N_FILTER_BLOCK:
    case N_WITH:
    case N_SCOPE: return bind_scope(w, n);
    case N_BLOCK: return bind_block(w, n);
    case N_FILTER:
    case N_TEST: return bind_row(w, n);
    case N_BREAK:
    case N_CONTINUE:
        if (w->loop) return true;
        w->s->line = n->line;
        fail(w->s, "%s stands outside of a loop", n->kind == N_BREAK ? "break" : "continue");
        return false;
    default: break;
    }
    return (!n->a || bind_node(w, n->a)) && (!n->b || bind_node(w, n->b)) &&
           (!n->c || bind_node(w, n->c)) && bind_all(w, &n->list) && bind_all(w, &n->body) &&
           bind_call(w, n->call);
}

bool resolve_names(state *s, node *root) {
    root->function = take(s, sizeof *root->function);
    if (!root->function) return false;
    scope c = { .function = root->function };
    walk w = { .s = s, .scope = &c, .top = true };
    if (!visit_all(&w, &root->body, false) || !bind_all(&w, &root->body)) return false;
    root->loads = c.loads;
    return true;
}
