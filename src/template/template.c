/* template.c - a text parsed once, and rendered over values of JSON. */
#define _XOPEN_SOURCE 700       // strdup under -std=c11
#include "template/template.h"

#include <stdlib.h>
#include <string.h>

#include "base/status.h"
#include "template/state.h"

enum { STEPS = 50000000 };

static const size_t most_bytes = (size_t)512 << 20, most_output = (size_t)64 << 20;
static const size_t most_text = (size_t)4 << 20;

static mn_status report(const state *s) {
    if (s->line > 0) return mn_fail(s->status, "%s: line %d: %s", s->name, s->line, s->message);
    return mn_fail(s->status, "%s: %s", s->name, s->message);
}

mn_status mn_jinja_parse(mn_jinja **out, const char *text, size_t size, const char *name) {
    mn_jinja *t = calloc(1, sizeof *t);
    *out = NULL;
    if (!t) return mn_fail(MN_ERR_MEMORY, "%s: no memory for a template", name);
    state s = { .store = &t->store, .name = name, .steps = INT64_MAX, .most_bytes = most_bytes };
    t->name = strdup(name);
    if (!t->name) {
        fail(&s, "not enough memory for the template");
    } else if (size > most_text) {
        fail(&s, "the template is larger than %zu bytes", most_text);
    } else if ((t->root = parse_template(&s, text, size))) {
        resolve_names(&s, t->root);
    }
    /* strings of the tree lie beside it */
    t->texts = s.texts;
    if (t->root && !failed(&s)) {
        *out = t;
        return MN_OK;
    }
    if (!failed(&s)) fail(&s, "the template could not be read");
    if (s.status == MN_ERR_ARGUMENT) s.status = MN_ERR_FORMAT;
    s.name = name;
    mn_jinja_free(t);
    return report(&s);
}

void mn_jinja_free(mn_jinja *t) {
    if (!t) return;
    store_free(&t->store);
    store_free(&t->texts);
    free(t->name);
    free(t);
}

/* ---- values of JSON -------------------------------------------------------------------------- */

static value *value_of(state *s, const json_t *json, int depth);

static value *list_of_json(state *s, const json_t *json, int depth) {
    value *v = new_list(s, K_LIST, (int64_t)json_array_size(json));
    for (int64_t i = 0; v && i < v->list.n; i++) {
        if (!(v->list.at[i] = value_of(s, json_array_get(json, (size_t)i), depth))) return NULL;
    }
    return v;
}

static value *dict_of_json(state *s, const json_t *json, int depth) {
    value *v = new_dict(s);
    const char *key;
    json_t *item;
    if (!v) return NULL;
    json_object_foreach((json_t *)json, key, item) {
        if (!dict_set_text(s, v->members, key, value_of(s, item, depth))) return NULL;
    }
    return v;
}

static value *value_of(state *s, const json_t *json, int depth) {
    if (depth > 100) return fail(s, "values are nested too deep");
    switch (json_typeof(json)) {
    case JSON_OBJECT: return dict_of_json(s, json, depth + 1);
    case JSON_ARRAY: return list_of_json(s, json, depth + 1);
    case JSON_STRING: return new_string(s, json_string_value(json), json_string_length(json));
    case JSON_INTEGER: return new_int(s, json_integer_value(json));
    case JSON_REAL: return new_float(s, json_real_value(json));
    case JSON_TRUE: return &mn_value_true;
    case JSON_FALSE: return &mn_value_false;
    default: return &mn_value_none;
    }
}

mn_status mn_jinja_render(mn_text *out, const mn_jinja *t, const json_t *variables,
                             const mn_jinja_limits *limits) {
    state s = { .name = t->name, .steps = STEPS, .most_bytes = most_bytes,
                .most_output = most_output };
    s.store = &s.own;
    if (limits && limits->steps) s.steps = limits->steps;
    if (limits && limits->bytes) s.most_bytes = limits->bytes;
    if (limits && limits->output) s.most_output = limits->output;
    s.own.most = s.texts.most = s.most_bytes;
    const value *given = value_of(&s, variables, 0), *exported = new_dict(&s);
    bool ok = given && given->kind == K_DICT && exported;
    if (ok) {
        s.globals = given->members;
        s.exported = exported->members;
        ok = render_root(&s, t);
    }
    if (!ok && !failed(&s)) fail(&s, "the variables of a template are an object");
    mn_status st = ok ? mn_text_add(out, s.out.bytes, s.out.size) : report(&s);
    mn_text_free(&s.out);
    store_free(&s.own);
    store_free(&s.texts);
    return st;
}
