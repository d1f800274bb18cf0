/* task.c - tasks by name: the tables, options, and single samples. */
#include "tasks/task.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "base/status.h"
#include "base/util.h"
#include "io/closest.h"
#include "tasks/task_internal.h"

typedef struct task_row {
    mn_task_info info;
    const char *defaults;
    const mn_generator *generator;
} task_row;

static const task_row tasks[] = {
#define TASK(generator, name, metric, defaults, about)                                             \
    { { name, about, metric }, defaults, &mn_generator_##generator },
#include "tasks/tasks.def"
};

static const mn_task_setting settings[] = {
#define SETTING(...) { __VA_ARGS__ },
#include "tasks/task_settings.def"
};

typedef enum kind { KIND_INT, KIND_REAL, KIND_FLAG, KIND_TEXT } kind;

typedef struct field {
    const char *name, *about;
    kind kind;
    int64_t least, most;
    double low, high;
    size_t offset;
} field;

#define AT(name) offsetof(mn_task_values, name)
static const field fields[] = {
#define INT(name, least, most, about) { #name, about, KIND_INT, least, most, 0, 0, AT(name) },
#define REAL(name, least, most, about) { #name, about, KIND_REAL, 0, 0, least, most, AT(name) },
#define FLAG(name, about) { #name, about, KIND_FLAG, 0, 0, 0, 0, AT(name) },
#define TEXT(name, about) { #name, about, KIND_TEXT, 0, 0, 0, 0, AT(name) },
#include "tasks/task_fields.def"
};
#undef AT

static const char *const split_names[MN_SPLIT_COUNT] = { "train", "valid", "test" };

const char *mn_split_name(mn_split split) {
    return split_names[split];
}

bool mn_split_find(mn_split *out, const char *name) {
    for (int i = 0; i < MN_SPLIT_COUNT; i++) {
        if (strcmp(split_names[i], name) != 0) continue;
        *out = (mn_split)i;
        return true;
    }
    return false;
}

int mn_task_count(void) {
    return (int)MN_COUNTOF(tasks);
}

mn_task_info mn_task_row(int i) {
    return tasks[i].info;
}

int mn_task_find(const char *name) {
    for (int i = 0; i < mn_task_count(); i++) {
        if (strcmp(tasks[i].info.name, name) == 0) return i;
    }
    return -1;
}

int mn_task_setting_count(void) {
    return (int)MN_COUNTOF(settings);
}

mn_task_setting mn_task_setting_row(int i) {
    return settings[i];
}

/* ---- key=value ------------------------------------------------------------------------------- */

/* Sets one key of `root` from "key=value" of `size` bytes. */
static mn_status set_one(mn_json *root, const char *text, size_t size) {
    const char *equals = memchr(text, '=', size);
    char key[64];
    const size_t length = equals ? (size_t)(equals - text) : 0;
    if (length == 0 || length >= sizeof key) {
        return mn_fail(MN_ERR_ARGUMENT, "%.*s: write it as key=value", (int)mn_min(
                       (int64_t)size, 200), text);
    }
    memcpy(key, text, length);
    key[length] = '\0';
    const size_t rest = size - length - 1;
    json_t *value = json_loadb(equals + 1, rest, JSON_DECODE_ANY, NULL);
    if (!value) value = json_stringn(equals + 1, rest);
    if (!value || json_object_set_new(root->value, key, value) != 0) {
        return mn_fail(MN_ERR_ARGUMENT, "%s: its value is not valid UTF-8", key);
    }
    return MN_OK;
}

mn_status mn_task_set(mn_json *root, const char *assignment) {
    return set_one(root, assignment, strlen(assignment));
}

mn_status mn_task_apply(mn_json *root, const char *changes) {
    mn_status st = MN_OK;
    while (st == MN_OK && *(changes += strspn(changes, " "))) {
        const size_t size = strcspn(changes, " ");
        st = set_one(root, changes, size);
        changes += size;
    }
    return st;
}

/* The default of `name` as text; false when the task has no such option. */
static bool default_text(char *out, size_t room, const char *defaults, const char *name) {
    const size_t length = strlen(name);
    for (const char *at = defaults; *at; at += strspn(at, " ")) {
        const size_t size = strcspn(at, " ");
        if (size > length && at[length] == '=' && strncmp(at, name, length) == 0) {
            snprintf(out, room, "%.*s", (int)(size - length - 1), at + length + 1);
            return true;
        }
        at += size;
    }
    return false;
}

void mn_task_options_list(int i, mn_task_option_line line, void *context) {
    for (size_t k = 0; k < MN_COUNTOF(fields); k++) {
        char value[128];
        if (default_text(value, sizeof value, tasks[i].defaults, fields[k].name)) {
            line(context, fields[k].name, value, fields[k].about);
        }
    }
}

/* ---- options --------------------------------------------------------------------------------- */

static mn_status read_text(char out[MN_TASK_OPTION_TEXT], const mn_json *at) {
    if (json_is_integer(at->value)) {    // --set floods=16
        snprintf(out, MN_TASK_OPTION_TEXT, "%" PRId64, (int64_t)json_integer_value(at->value));
        return MN_OK;
    }
    const char *text;
    const mn_status st = mn_json_read_text(&text, at);
    if (st != MN_OK) return st;
    if (strlen(text) >= MN_TASK_OPTION_TEXT) {
        return mn_json_fail(at, "longer than %d bytes", MN_TASK_OPTION_TEXT - 1);
    }
    strcpy(out, text);
    return MN_OK;
}

static mn_status read_field(mn_task_values *values, const field *f, const mn_json *at) {
    void *to = (char *)values + f->offset;
    mn_status st = MN_OK;
    switch (f->kind) {
    case KIND_INT: st = mn_json_read_i64(to, at); break;
    case KIND_REAL: st = mn_json_read_f64(to, at); break;
    case KIND_FLAG: return mn_json_read_bool(to, at);
    case KIND_TEXT: return read_text(to, at);
    }
    if (st != MN_OK) return st;
    const int64_t n = f->kind == KIND_INT ? *(int64_t *)to : 0;
    const double x = f->kind == KIND_REAL ? *(double *)to : 0.0;
    if (f->kind == KIND_INT && (n < f->least || n > f->most)) {
        return mn_json_fail(at, "is %" PRId64 ", from %" PRId64 " to %" PRId64 " is possible", n,
                            f->least, f->most);
    }
    if (f->kind == KIND_REAL && !(x >= f->low && x <= f->high)) {
        return mn_json_fail(at, "is %g, from %g to %g is possible", x, f->low, f->high);
    }
    return MN_OK;
}

static mn_status read_values(mn_task *task, const mn_json *options, const char *defaults) {
    static const mn_json nothing = { 0 };
    const mn_json *given = options ? options : &nothing;
    const char *known[MN_COUNTOF(fields)];
    mn_json base = { .value = json_object(), .name = task->info.name };
    mn_status st = base.value ? mn_task_apply(&base, defaults)
                              : mn_fail(MN_ERR_MEMORY, "%s: no memory", task->info.name);
    int n = 0;
    for (size_t i = 0; i < MN_COUNTOF(fields); i++) {
        if (json_object_get(base.value, fields[i].name)) known[n++] = fields[i].name;
    }
    if (st == MN_OK && given->value) st = mn_json_expect_object(given);
    if (st == MN_OK && given->value) st = mn_json_unknown_key(given, known, n);
    for (size_t i = 0; i < MN_COUNTOF(fields) && st == MN_OK; i++) {
        const mn_json usual = mn_json_member(&base, fields[i].name);
        const mn_json special = mn_json_member(given, fields[i].name);
        if (!usual.value) continue;
        st = read_field(&task->values, &fields[i], mn_json_given(&special) ? &special : &usual);
    }
    json_decref(base.value);
    return st;
}

/* ---- what generators call -------------------------------------------------------------------- */

mn_status mn_task_require(const mn_task *task, bool holds, const char *key, const char *why) {
    if (holds) return MN_OK;
    for (size_t i = 0; i < MN_COUNTOF(fields); i++) {
        if (fields[i].kind != KIND_INT || strcmp(fields[i].name, key) != 0) continue;
        const int64_t *value = (const void *)((const char *)&task->values + fields[i].offset);
        return mn_fail(MN_ERR_ARGUMENT, "%s: %s is %" PRId64 "; %s", task->info.name, key, *value,
                       why);
    }
    return mn_fail(MN_ERR_ARGUMENT, "%s: %s: %s", task->info.name, key, why);
}

mn_status mn_task_own(mn_task *task, size_t size) {
    return mn_task_memory(&task->own, task, 1, size);
}

mn_status mn_task_memory(void *out, const mn_task *task, int64_t count, size_t size) {
    void *memory = count >= 0 && (uint64_t)count <= SIZE_MAX / size
                       ? calloc(count ? (size_t)count : 1, size) : NULL;
    memcpy(out, &memory, sizeof memory);
    if (memory) return MN_OK;
    return mn_fail(MN_ERR_MEMORY, "%s: no memory for %" PRId64 " times %zu bytes; choose smaller "
                   "sizes", task->info.name, count, size);
}

mn_status mn_task_list(int64_t out[MN_TASK_LIST], int *count, const mn_task *task, const char *key,
                       const char *text, int64_t least, int64_t most) {
    *count = 0;
    for (const char *at = text; *count < MN_TASK_LIST; at++) {
        char *end;
        const bool digit = *at >= '0' && *at <= '9';
        const long long n = digit ? strtoll(at, &end, 10) : -1;
        if (!digit || n < least || n > most) break;
        out[(*count)++] = n;
        at = end;
        if (*at == '\0') return MN_OK;
        if (*at != ',') break;
    }
    return mn_fail(MN_ERR_ARGUMENT, "%s: %s is \"%s\"; write up to %d whole numbers from %" PRId64
                   " to %" PRId64 ", separated by commas", task->info.name, key, text,
                   MN_TASK_LIST, least, most);
}

mn_status mn_deck_create(mn_deck *out, int64_t n) {
    *out = (mn_deck){ .n = n };
    size_t bytes;
    const bool fits = n >= 0 && mn_mul_size(&bytes, (size_t)n + 1, sizeof *out->cards);
    out->cards = fits ? malloc(bytes) : NULL;
    out->swapped = fits ? malloc(bytes) : NULL;
    if (!out->cards || !out->swapped) {
        mn_deck_free(out);
        return mn_fail(MN_ERR_MEMORY, "no memory to draw from %" PRId64 " tokens", n);
    }
    for (int64_t i = 0; i < n; i++) out->cards[i] = (int32_t)i;
    return MN_OK;
}

void mn_deck_free(mn_deck *deck) {
    free(deck->cards);
    free(deck->swapped);
    *deck = (mn_deck){ 0 };
}

int32_t mn_deck_draw(mn_deck *deck, mn_draws *d) {
    const int64_t to = deck->drawn++, from = to + mn_draw_below(d, deck->n - to);
    const int32_t card = deck->cards[from];
    deck->cards[from] = deck->cards[to];
    deck->cards[to] = card;
    deck->swapped[to] = (int32_t)from;
    return card;
}

void mn_deck_restore(mn_deck *deck) {
    while (deck->drawn > 0) {
        const int64_t to = --deck->drawn, from = deck->swapped[to];
        const int32_t card = deck->cards[from];
        deck->cards[from] = deck->cards[to];
        deck->cards[to] = card;
    }
}

/* ---- one task -------------------------------------------------------------------------------- */

static mn_status no_task(const char *name) {
    const char *names[MN_COUNTOF(tasks)];
    for (size_t i = 0; i < MN_COUNTOF(tasks); i++) names[i] = tasks[i].info.name;
    const char *near = mn_closest(name, names, (int64_t)MN_COUNTOF(tasks));
    return mn_fail(MN_ERR_ARGUMENT, "there is no task \"%s\"%s%s%s; mneme task lists them", name,
                   near ? ", did you mean \"" : "", near ? near : "", near ? "\"?" : "");
}

mn_status mn_task_create(mn_task **out, const char *name, const mn_json *options) {
    *out = NULL;
    const int row = mn_task_find(name);
    if (row < 0) return no_task(name);
    mn_task *task = calloc(1, sizeof *task);
    if (!task) return mn_fail(MN_ERR_MEMORY, "%s: no memory", name);
    task->row = row;
    task->info = tasks[row].info;
    task->generator = tasks[row].generator;
    mn_status st = read_values(task, options, tasks[row].defaults);
    if (st == MN_OK) st = task->generator->open(task);
    if (st == MN_OK) *out = task;
    else mn_task_destroy(task);
    return st;
}

void mn_task_destroy(mn_task *task) {
    if (!task) return;
    if (task->own && task->generator->close) task->generator->close(task);
    free(task->own);
    free(task);
}

mn_task_shape mn_task_shape_of(const mn_task *task) {
    return task->shape;
}

int mn_task_row_of(const mn_task *task) {
    return task->row;
}

int64_t mn_task_examples(const mn_task *task, mn_split split) {
    return task->examples[split];
}

int64_t mn_task_used(const mn_task *task) {
    return task->used;
}

int mn_task_groups(const mn_task *task) {
    return task->n_groups;
}

const char *mn_task_group_name(const mn_task *task, int group) {
    return task->groups[group];
}

void mn_task_group(const mn_task *task, const int32_t *input, const int32_t *target,
                   int8_t *group) {
    memset(group, -1, (size_t)task->shape.length);
    if (task->generator->group) task->generator->group(task, input, target, group);
}

void mn_task_rival(const mn_task *task, const float *input, const int32_t *target, int32_t *rival) {
    for (int64_t t = 0; t < task->shape.length; t++) rival[t] = MN_NO_TARGET;
    if (task->generator->rival) task->generator->rival(task, input, target, rival);
}

/* Index and random numbers of a sample; targets are cleared where there are any. */
static mn_status begin(mn_task *task, mn_sample_row *row) {
    if (row->index < 0 || row->split < 0 || row->split >= MN_SPLIT_COUNT) {
        return mn_fail(MN_ERR_ARGUMENT, "%s: sample %" PRId64 " of split %d: there is none",
                       task->info.name, row->index, (int)row->split);
    }
    if (task->examples[row->split] > 0) row->index %= task->examples[row->split];
    row->draws = mn_draws_make(row->seed, MN_DRAW_SAMPLE, row->split, row->index);
    task->used = task->shape.length;
    for (int64_t t = 0; row->target && t < task->shape.length; t++) row->target[t] = MN_NO_TARGET;
    return MN_OK;
}

mn_status mn_task_sample(mn_task *task, uint64_t seed, mn_split split, int64_t index,
                         int32_t *input, int32_t *target) {
    mn_sample_row row = { .seed = seed, .split = split, .index = index, .input = input,
                          .target = target };
    if (task->shape.features > 0) {
        return mn_fail(MN_ERR_ARGUMENT, "%s: its inputs are numbers, not tokens: ask for vectors",
                       task->info.name);
    }
    const mn_status st = begin(task, &row);
    if (st != MN_OK) return st;
    memset(input, 0, (size_t)task->shape.length * sizeof *input);
    return task->generator->draw(task, &row);
}

mn_status mn_task_vectors(mn_task *task, uint64_t seed, mn_split split, int64_t index,
                          float *input, int32_t *target) {
    mn_sample_row row = { .seed = seed, .split = split, .index = index, .features = input,
                          .target = target };
    if (task->shape.features == 0) {
        return mn_fail(MN_ERR_ARGUMENT, "%s: its inputs are tokens, not numbers: ask for a sample",
                       task->info.name);
    }
    const mn_status st = begin(task, &row);
    if (st != MN_OK) return st;
    memset(input, 0, (size_t)(task->shape.length * task->shape.features) * sizeof *input);
    return task->generator->draw(task, &row);
}

bool mn_task_has_text(const mn_task *task) {
    return task->generator->text != NULL;
}

mn_status mn_task_text_of(mn_task *task, uint64_t seed, mn_split split, int64_t index,
                          mn_task_text *out) {
    memset(out, 0, sizeof *out);
    if (!task->generator->text) {
        return mn_fail(MN_ERR_ARGUMENT, "%s: this task is made of tokens, not of text",
                       task->info.name);
    }
    mn_sample_row row = { .seed = seed, .split = split, .index = index };
    const mn_status st = begin(task, &row);
    return st == MN_OK ? task->generator->text(task, &row, out) : st;
}
