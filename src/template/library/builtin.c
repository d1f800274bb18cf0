/* builtin.c - finding functions by name, giving them their arguments, and calling whatever can be
 * called. */
#include <stdio.h>
#include <string.h>

#include "template/library/rows.h"
#include "template/state.h"

static const filter_row filters[] = {
#define FILTER(name, run, parameters) { name, filter_##run, parameters },
#include "template/library/filters.def"
#undef FILTER
};

static const filter_row tests[] = {
#define TEST(name, run, parameters) { name, test_##run, parameters },
#include "template/library/tests.def"
#undef TEST
};

static const method_row methods[] = {
#define METHOD(kind, name, parameters) { K_##kind, #name, method_##name, parameters },
#include "template/library/methods.def"
#undef METHOD
};

static const global_row globals[] = {
#define GLOBAL(name, parameters) { #name, global_##name, parameters },
#include "template/library/globals.def"
#undef GLOBAL
};

static const struct {
    value_kind of;
    const char *name;
} unsafe_methods[] = {
#define UNSAFE(kind, name) { K_##kind, #name },
#include "template/library/unsafe.def"
#undef UNSAFE
};

#define FIND(rows, what)                                                                           \
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {                                      \
        if ((what) && strlen(rows[i].name) == size && memcmp(rows[i].name, name, size) == 0) {     \
            return &rows[i];                                                                       \
        }                                                                                          \
    }                                                                                              \
    return NULL

const filter_row *find_filter(const char *name, size_t size) {
    FIND(filters, true);
}

const filter_row *find_test(const char *name, size_t size) {
    FIND(tests, true);
}

const method_row *find_method(value_kind of, const char *name, size_t size) {
    FIND(methods, methods[i].of == of);
}

const global_row *find_global(const char *name, size_t size) {
    FIND(globals, true);
}

bool unsafe_method(value_kind of, const char *name, size_t size) {
    for (size_t i = 0; i < sizeof unsafe_methods / sizeof *unsafe_methods; i++) {
        if (unsafe_methods[i].of == of && strlen(unsafe_methods[i].name) == size &&
            memcmp(unsafe_methods[i].name, name, size) == 0) return true;
    }
    return false;
}

/* ---- arguments ------------------------------------------------------------------------------- */

typedef struct parameter {
    const char *name;
    size_t size;
    bool optional;
} parameter;

typedef struct signature {
    parameter at[MOST_PARAMETERS];
    int n;
    bool rest, named_rest, by_place;
} signature;

static void read_signature(signature *out, const char *text) {
    *out = (signature){ 0 };
    while (*text) {
        const size_t n = strcspn(text, " ");
        if (n == 1 && *text == '/') out->by_place = true;
        else if (n == 1 && *text == '*') out->rest = true;
        else if (n == 2 && text[0] == '*') out->named_rest = true;
        else {
            const bool optional = text[n - 1] == '?';
            out->at[out->n++] = (parameter){ text, n - optional, optional };
        }
        text += n;
        text += *text == ' ';
    }
}

static bool bind_named(state *s, value **out, const char *called, const signature *sig,
                       const value *name, value *item) {
    for (int i = 0; i < sig->n && !sig->by_place; i++) {
        if (sig->at[i].size != name->text.size ||
            memcmp(sig->at[i].name, name->text.bytes, name->text.size) != 0) continue;
        if (out[i]) {
            fail(s, "%s() got multiple values for argument '%.*s'", called,
                 (int)name->text.size, name->text.bytes);
            return false;
        }
        out[i] = item;
        return true;
    }
    if (sig->named_rest) return true;
    fail(s, "%s() got an unexpected keyword argument '%.*s'", called,
         (int)(name->text.size < 100 ? name->text.size : 100), name->text.bytes);
    return false;
}

bool bind(state *s, value *out[MOST_PARAMETERS], const char *name, const char *parameters,
          value *first, const arguments *all) {
    signature sig;
    int at = 0;
    read_signature(&sig, parameters);
    for (int i = 0; i < MOST_PARAMETERS; i++) out[i] = NULL;
    if (first) out[at++] = first;
    for (int64_t i = 0; i < all->n; i++) {
        if (at < sig.n) {
            out[at++] = all->at[i];
        } else if (!sig.rest) {
            fail(s, "%s() takes %d argument(s), %lld were given", name, sig.n - (first != NULL),
                 (long long)all->n);
            return false;
        }
    }
    for (int64_t i = 0; i < all->n_named; i++) {
        if (!bind_named(s, out, name, &sig, all->names[i], all->named[i])) return false;
    }
    for (int i = 0; i < sig.n; i++) {
        if (out[i] || sig.at[i].optional) continue;
        fail(s, "%s() misses its argument '%.*s'", name, (int)sig.at[i].size, sig.at[i].name);
        return false;
    }
    return true;
}

value *call_row(state *s, const char *name, builtin run, const char *parameters, value *first,
                const arguments *a) {
    value *bound[MOST_PARAMETERS];
    if (!spend(s, 1) || !bind(s, bound, name, parameters, first, a)) return NULL;
    value *v = run(s, bound, a);
    if (!v && !failed(s)) return fail(s, "%s() gave nothing", name);
    return failed(s) ? NULL : v;
}

value *call_filter(state *s, const filter_row *row, value *of, const arguments *a) {
    return call_row(s, row->name, row->run, row->parameters, of, a);
}

value *call_test(state *s, const filter_row *row, value *of, const arguments *a) {
    return call_row(s, row->name, row->run, row->parameters, of, a);
}

/* ---- calls ----------------------------------------------------------------------------------- */

static value *call_below(state *s, value *f, const arguments *a) {
    switch (f->kind) {
    case K_GLOBAL:
        return call_row(s, f->global->name, f->global->run, f->global->parameters, NULL, a);
    case K_METHOD:
        return call_row(s, f->method.row->name, f->method.row->run, f->method.row->parameters,
                        f->method.self, a);
    case K_MACRO: return call_macro(s, f->macro, a);
    case K_LOOP:
        if (a->n != 1 || a->n_named) return fail(s, "a loop is called with what it goes through");
        return run_recursive(s, f->loop, a->at[0]);
    case K_JOINER:
        if (f->joiner.used) return f->joiner.separator;
        f->joiner.used = true;
        return lent_string(s, "", 0);
    case K_UNDEFINED: return fail_undefined(s, f);
    default: return fail(s, "'%s' object is not callable", type_name(f));
    }
}

value *call_value(state *s, value *f, const arguments *a) {
    if (++s->depth > MOST_DEPTH) fail(s, "calls are nested too deep");
    value *v = failed(s) ? NULL : call_below(s, f, a);
    s->depth--;
    return v;
}
