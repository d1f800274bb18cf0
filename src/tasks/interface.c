/* interface.c - tasks as mneme.h has them: text for options and splits, many samples at once. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/status.h"
#include "io/json_write.h"
#include "tasks/task.h"

/* ---- descriptions ---------------------------------------------------------------------------- */

static void add_option(void *context, const char *key, const char *value, const char *about) {
    json_array_append_new(context, json_pack("{s:s, s:s, s:s}", "name", key, "default", value,
                                             "about", about));
}

json_t *mn_task_json(int i) {
    const mn_task_info info = mn_task_row(i);
    json_t *list = json_array(), *settings = json_array();
    mn_task_options_list(i, add_option, list);
    for (int k = 0; k < mn_task_setting_count(); k++) {
        const mn_task_setting s = mn_task_setting_row(k);
        if (strcmp(s.task, info.name) != 0) continue;
        json_array_append_new(settings, json_pack("{s:s, s:s, s:s, s:I, s:I}", "suite", s.suite,
                                                  "name", s.name, "changes", s.changes, "train",
                                                  (json_int_t)s.train, "test",
                                                  (json_int_t)s.test));
    }
    return json_pack("{s:s, s:s, s:s, s:o, s:o}", "name", info.name, "about", info.about, "metric",
                     info.metric, "options", list, "settings", settings);
}

mn_status mn_describe_tasks(char **json) {
    if (!json) return mn_fail(MN_ERR_ARGUMENT, "describe: json is NULL");
    *json = NULL;
    json_t *list = json_array();
    for (int i = 0; i < mn_task_count(); i++) json_array_append_new(list, mn_task_json(i));
    json_t *root = json_pack("{s:o}", "tasks", list);
    const mn_status st = root ? mn_json_text(json, root, MN_JSON_COMPACT)
                              : mn_fail(MN_ERR_MEMORY, "no memory for a description");
    json_decref(root);
    return st;
}

/* ---- samples --------------------------------------------------------------------------------- */

mn_status mn_task_open(mn_task **out, const char *name, const char *options) {
    if (out) *out = NULL;
    if (!out || !name) return mn_fail(MN_ERR_ARGUMENT, "task: out or name is NULL");
    if (!options) return mn_task_create(out, name, NULL);
    mn_json root;
    mn_status st = mn_json_parse(&root, options, strlen(options), name, MN_JSON_STANDARD);
    if (st == MN_OK) st = mn_json_expect_object(&root);
    if (st == MN_OK) st = mn_task_create(out, name, &root);
    mn_json_free(&root);
    return st;
}

void mn_task_close(mn_task *task) {
    mn_task_destroy(task);
}

void mn_task_sizes(const mn_task *task, int64_t *vocabulary, int64_t *features, int64_t *classes,
                   int64_t *length) {
    const mn_task_shape s = task ? mn_task_shape_of(task) : (mn_task_shape){ 0 };
    if (vocabulary) *vocabulary = s.vocab;
    if (features) *features = s.features;
    if (classes) *classes = s.classes;
    if (length) *length = s.length;
}

static mn_status check_draw(const mn_task *task, const mn_task_shape *s, int64_t first,
                            int64_t count, const int32_t *tokens, const float *features,
                            const int32_t *targets) {
    const char *name = mn_task_row(mn_task_row_of(task)).name;
    if (first < 0 || count < 0 || first > INT64_MAX - count) {
        return mn_fail(MN_ERR_ARGUMENT, "%s: samples %" PRId64 " and the next %" PRId64
                       " cannot be drawn; both numbers are at least 0", name, first, count);
    }
    if (!targets) return mn_fail(MN_ERR_ARGUMENT, "%s: targets is NULL", name);
    if (s->features > 0 ? !features || tokens : !tokens || features) {
        return mn_fail(MN_ERR_ARGUMENT, "%s: its inputs are %s; give %s and leave the other NULL",
                       name, s->features > 0 ? "numbers" : "tokens",
                       s->features > 0 ? "features" : "tokens");
    }
    return MN_OK;
}

mn_status mn_task_draw(mn_task *task, uint64_t seed, const char *split, int64_t first,
                       int64_t count, int32_t *tokens, float *features, int32_t *targets) {
    if (!task || !split) return mn_fail(MN_ERR_ARGUMENT, "task: task or split is NULL");
    const mn_task_shape s = mn_task_shape_of(task);
    mn_split which;
    mn_status st = check_draw(task, &s, first, count, tokens, features, targets);
    if (st == MN_OK && !mn_split_find(&which, split)) {
        st = mn_fail(MN_ERR_ARGUMENT, "there is no split \"%s\"; there are train, valid and test",
                     split);
    }
    for (int64_t i = 0; i < count && st == MN_OK; i++) {
        int32_t *target = targets + i * s.length;
        st = features ? mn_task_vectors(task, seed, which, first + i,
                                        features + i * s.length * s.features, target)
                      : mn_task_sample(task, seed, which, first + i, tokens + i * s.length, target);
    }
    return st;
}
