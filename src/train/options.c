/* options.c - reads the configuration of a run from the table of its options. */
#include "train/options.h"

#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/status.h"
#include "base/util.h"
#include "io/json_write.h"

typedef enum kind { KIND_INT, KIND_REAL, KIND_FLAG, KIND_TEXT, KIND_PATH } kind;

static const struct option {
    const char *section, *name, *text, *about;    // text: the default as written in the table
    kind kind;
    double value, least, most;                    // of numbers
    size_t offset;
} options[] = {
#define ROW(section, name, text, about, kind, ...)                                                 \
    { #section, #name, text, about, kind, __VA_ARGS__, offsetof(mn_train_options, name) },
#define INT(section, name, value, least, most, about)                                              \
    ROW(section, name, #value, about, KIND_INT, value, (double)least, (double)most)
#define REAL(section, name, value, least, most, about)                                             \
    ROW(section, name, #value, about, KIND_REAL, value, least, most)
#define FLAG(section, name, value, about) ROW(section, name, #value, about, KIND_FLAG, value, 0, 1)
#define TEXT(section, name, value, about) ROW(section, name, value, about, KIND_TEXT, 0, 0, 0)
#define PATH(section, name, value, about) ROW(section, name, value, about, KIND_PATH, 0, 0, 0)
#include "train/train_options.def"
#undef ROW
};

void mn_train_options_list(mn_option_line line, void *context) {
    for (size_t i = 0; i < MN_COUNTOF(options); i++) {
        char key[96];
        snprintf(key, sizeof key, "%s.%s", options[i].section, options[i].name);
        line(context, key, options[i].text, options[i].about);
    }
}

void mn_train_options_paths(void (*path)(void *context, const char *section, const char *name),
                            void *context) {
    path(context, "data", "train");
    path(context, "data", "valid");
    for (size_t i = 0; i < MN_COUNTOF(options); i++) {
        if (options[i].kind == KIND_PATH) path(context, options[i].section, options[i].name);
    }
}

/* ---- writing --------------------------------------------------------------------------------- */

static json_t *option_json(const mn_train_options *o, const struct option *row) {
    const void *at = (const char *)o + row->offset;
    switch (row->kind) {
    case KIND_INT: return json_integer(*(const int64_t *)at);
    case KIND_REAL: return mn_json_real(*(const double *)at);
    case KIND_FLAG: return json_boolean(*(const bool *)at);
    case KIND_TEXT:
    case KIND_PATH: return json_string(at);
    }
    return NULL;
}

static json_t *paths_json(const char *const *paths, int n) {
    json_t *list = json_array();
    for (int i = 0; i < n; i++) json_array_append_new(list, json_string(paths[i]));
    return list;
}

mn_status mn_train_options_json(json_t **out, const mn_train_options *o) {
    json_t *data = json_object(), *train = json_object(), *groups = json_object();
    bool fits = json_object_set_new(data, "train", paths_json(o->train, o->n_train)) == 0 &&
                json_object_set_new(data, "valid", paths_json(o->valid, o->n_valid)) == 0;
    for (size_t i = 0; i < MN_COUNTOF(options); i++) {
        json_t *section = strcmp(options[i].section, "data") == 0 ? data : train;
        fits &= json_object_set_new(section, options[i].name, option_json(o, &options[i])) == 0;
    }
    for (int i = 0; i < MN_GROUP_COUNT; i++) {
        json_t *group = json_pack("{s:o, s:b}", "lr", mn_json_real(o->groups[i].lr),
                                  "decays", (int)o->groups[i].decays);
        fits &= json_object_set_new(groups, mn_group_name((mn_group)i), group) == 0;
    }
    fits &= json_object_set_new(train, "groups", groups) == 0;
    *out = json_pack("{s:o, s:o, s:s}", "data", data, "train", train, "out", o->out);
    return *out && fits ? MN_OK : mn_fail(MN_ERR_MEMORY, "no memory to write the settings");
}

/* ---- --set ----------------------------------------------------------------------------------- */

static json_t *value_of(const char *text) {
    json_t *value = json_loads(text, JSON_DECODE_ANY, NULL);
    return value ? value : json_string(text);
}

mn_status mn_train_set(mn_json *root, const char *assignment) {
    const char *equals = strchr(assignment, '=');
    char key[256];
    const size_t length = equals ? (size_t)(equals - assignment) : 0;
    if (!equals || length == 0 || length >= sizeof key) {
        return mn_fail(MN_ERR_ARGUMENT, "--set %s: write it as --set section.key=value",
                       assignment);
    }
    memcpy(key, assignment, length);
    key[length] = '\0';
    json_t *at = root->value;
    char *part = key;
    for (char *dot = strchr(part, '.'); dot; part = dot + 1, dot = strchr(part, '.')) {
        *dot = '\0';
        json_t *next = json_object_get(at, part);
        if (!next) {
            next = json_object();
            if (json_object_set_new(at, part, next) != 0) break;
        }
        if (!json_is_object(next)) {
            return mn_fail(MN_ERR_ARGUMENT, "--set %s: %s is no object", assignment, part);
        }
        at = next;
    }
    json_t *value = value_of(equals + 1);
    if (!value || json_object_set_new(at, part, value) != 0) {
        return mn_fail(MN_ERR_ARGUMENT, "--set %s: not valid UTF-8", assignment);
    }
    return MN_OK;
}

/* ---- reading --------------------------------------------------------------------------------- */

static void set_default(mn_train_options *out, const struct option *o) {
    void *at = (char *)out + o->offset;
    switch (o->kind) {
    case KIND_INT: *(int64_t *)at = (int64_t)o->value; break;
    case KIND_REAL: *(double *)at = o->value; break;
    case KIND_FLAG: *(bool *)at = o->value != 0.0; break;
    case KIND_TEXT:
    case KIND_PATH: snprintf(at, MN_TRAIN_TEXT, "%s", o->text); break;
    }
}

/* A whole number stands for its digits: train.distill_layers=5. */
static mn_status read_text(char out[MN_TRAIN_TEXT], const mn_json *at) {
    const char *text;
    if (json_is_integer(at->value)) {
        snprintf(out, MN_TRAIN_TEXT, "%lld", (long long)json_integer_value(at->value));
        return MN_OK;
    }
    const mn_status st = mn_json_read_text(&text, at);
    if (st != MN_OK) return st;
    if (strlen(text) >= MN_TRAIN_TEXT) {
        return mn_json_fail(at, "longer than %d bytes", MN_TRAIN_TEXT - 1);
    }
    strcpy(out, text);
    return MN_OK;
}

static mn_status read_value(mn_train_options *out, const struct option *o, const mn_json *at) {
    void *to = (char *)out + o->offset;
    mn_status st = MN_OK;
    switch (o->kind) {
    case KIND_INT: st = mn_json_read_i64(to, at); break;
    case KIND_REAL: st = mn_json_read_f64(to, at); break;
    case KIND_FLAG: st = mn_json_read_bool(to, at); break;
    case KIND_TEXT:
    case KIND_PATH: st = read_text(to, at); break;
    }
    if (st != MN_OK) return st;
    if (o->kind != KIND_INT && o->kind != KIND_REAL) return MN_OK;
    const double x = o->kind == KIND_INT ? (double)*(int64_t *)to : *(double *)to;
    if (x >= o->least && x <= o->most) return MN_OK;
    return mn_json_fail(at, "must lie between %.16g and %.16g", o->least, o->most);
}

static mn_status read_section(mn_train_options *out, const mn_json *root, const char *section,
                              const char *const *others, int n_others) {
    const mn_json object = mn_json_member(root, section);
    if (!mn_json_given(&object)) return MN_OK;
    mn_status st = mn_json_expect_object(&object);
    const char *keys[MN_COUNTOF(options) + 8];
    int n = 0;
    for (int i = 0; i < n_others; i++) keys[n++] = others[i];
    for (size_t i = 0; i < MN_COUNTOF(options); i++) {
        if (strcmp(options[i].section, section) == 0) keys[n++] = options[i].name;
    }
    if (st == MN_OK) st = mn_json_unknown_key(&object, keys, n);
    for (size_t i = 0; i < MN_COUNTOF(options) && st == MN_OK; i++) {
        if (strcmp(options[i].section, section) != 0) continue;
        const mn_json at = mn_json_member(&object, options[i].name);
        if (mn_json_given(&at)) st = read_value(out, &options[i], &at);
    }
    return st;
}

/* A path or a list of them. */
static mn_status read_paths(const char **paths, int *n, const mn_json *at) {
    *n = 0;
    if (!mn_json_given(at)) return MN_OK;
    if (json_is_string(at->value)) return mn_json_read_text(&paths[(*n)++], at);
    mn_status st = mn_json_expect_list(at);
    if (st == MN_OK && mn_json_count(at) > MN_TRAIN_PATHS) {
        return mn_json_fail(at, "more than %d paths; name a folder instead", MN_TRAIN_PATHS);
    }
    for (int64_t i = 0; st == MN_OK && i < mn_json_count(at); i++) {
        const mn_json item = mn_json_item(at, i);
        st = mn_json_read_text(&paths[(*n)++], &item);
    }
    return st;
}

static mn_status read_groups(mn_train_options *out, const mn_json *train) {
    const char *names[MN_GROUP_COUNT];
    for (int i = 0; i < MN_GROUP_COUNT; i++) {
        names[i] = mn_group_name((mn_group)i);
        out->groups[i] = (mn_train_group){ mn_group_lr((mn_group)i), mn_group_decays((mn_group)i) };
    }
    const mn_json groups = mn_json_member(train, "groups");
    if (!mn_json_given(&groups)) return MN_OK;
    mn_status st = mn_json_expect_object(&groups);
    if (st == MN_OK) st = mn_json_unknown_key(&groups, names, MN_GROUP_COUNT);
    for (int i = 0; st == MN_OK && i < MN_GROUP_COUNT; i++) {
        const mn_json group = mn_json_member(&groups, names[i]);
        if (!mn_json_given(&group)) continue;
        static const char *const keys[] = { "lr", "decays" };
        st = mn_json_unknown_key(&group, keys, 2);
        if (st == MN_OK) st = mn_json_opt_f64(&out->groups[i].lr, &group, "lr");
        if (st == MN_OK && !(out->groups[i].lr >= 0.0 && out->groups[i].lr <= 1e38)) {
            const mn_json at = mn_json_member(&group, "lr");
            st = mn_json_fail(&at, "must lie between 0 and 1e38");
        }
        if (st == MN_OK) st = mn_json_opt_bool(&out->groups[i].decays, &group, "decays");
    }
    return st;
}

static mn_status require(const mn_json *root, const char *section, const char *key, bool holds,
                         const char *why) {
    if (holds) return MN_OK;
    const mn_json object = mn_json_member(root, section), at = mn_json_member(&object, key);
    return mn_json_fail(&at, "%s", why);
}

/* What holds between options; the range of each is in the table. */
static mn_status check_together(const mn_train_options *o, const mn_json *root) {
    mn_status st = require(root, "train", "batch",
                           (double)o->batch * (double)o->context <= INT32_MAX,
                           "times train.context must lie below 2^31; train.accumulate makes larger "
                           "steps");
    if (st == MN_OK) {
        st = require(root, "train", "min_lr", o->min_lr <= o->lr,
                     "must be at most train.lr; give it beside a small one");
    }
    return st;
}

/* Of a key that only lacks its section the message says so. */
static mn_status check_top(const mn_json *root) {
    static const char *const sections[] = { "model", "data", "train", "out" };
    for (mn_json member = { 0 }; mn_json_next(&member, root);) {
        for (size_t i = 0; i < MN_COUNTOF(options); i++) {
            if (strcmp(member.name, options[i].name) != 0) continue;
            return mn_json_fail(root, "unknown key \"%s\", did you mean \"%s.%s\"?", member.name,
                                options[i].section, member.name);
        }
    }
    return mn_json_unknown_key(root, sections, MN_COUNTOF(sections));
}

mn_status mn_train_options_read(mn_train_options *out, const mn_json *root) {
    static const char *const paths[] = { "train", "valid" }, *const groups[] = { "groups" };
    memset(out, 0, sizeof *out);
    for (size_t i = 0; i < MN_COUNTOF(options); i++) set_default(out, &options[i]);
    mn_status st = mn_json_expect_object(root);
    if (st == MN_OK) st = check_top(root);
    if (st == MN_OK) st = read_section(out, root, "data", paths, 2);
    if (st == MN_OK) st = read_section(out, root, "train", groups, 1);
    if (st != MN_OK) return st;
    const mn_json data = mn_json_member(root, "data"), train = mn_json_member(root, "train");
    const mn_json to = mn_json_member(root, "out"), files = mn_json_member(&data, "train");
    const mn_json held = mn_json_member(&data, "valid");
    st = read_paths(out->train, &out->n_train, &files);
    if (st == MN_OK) st = read_paths(out->valid, &out->n_valid, &held);
    if (st == MN_OK) st = read_groups(out, &train);
    if (st == MN_OK && mn_json_given(&to)) st = read_text(out->out, &to);
    return st == MN_OK ? check_together(out, root) : st;
}
