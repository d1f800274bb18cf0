/* grid.c - products of axes as lists of jobs. */
#include "experiments/grid.h"

#include <inttypes.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/status.h"
#include "base/util.h"
#include "experiments/job_internal.h"

enum { MOST_JOBS = 100000, TITLE = 256 };

typedef struct product {
    json_t *jobs;            // completed ones are added here
    const json_t *only, *also;
} product;

/* The label of a choice: its name, or its value. */
static json_t *label_of(const char *name, const json_t *value) {
    return name ? json_string(name) : json_deep_copy(value);
}

static bool is_wanted(const product *p, const char *axis, const json_t *label) {
    const json_t *list = json_object_get(p->only, axis);
    for (size_t i = 0; i < json_array_size(list); i++) {
        if (json_equal(json_array_get(list, i), label)) return true;
    }
    return !json_is_array(list);
}

static mn_status add_job(product *p, json_t *spec) {
    mn_status st = p->also ? mn_spec_merge(spec, p->also) : MN_OK;
    const mn_json handle = { .value = spec, .name = "job" };
    json_t *job = NULL;
    if (st == MN_OK && json_array_size(p->jobs) >= MOST_JOBS) {
        return mn_fail(MN_ERR_ARGUMENT, "more than %d jobs; write several sweeps", MOST_JOBS);
    }
    if (st == MN_OK) st = mn_job_complete(&job, &handle);
    if (st == MN_OK) {
        return json_array_append_new(p->jobs, job) == 0
                   ? MN_OK : mn_fail(MN_ERR_MEMORY, "no memory for a list of jobs");
    }
    char title[TITLE], why[512];
    mn_job_title(title, sizeof title, spec);
    snprintf(why, sizeof why, "%s", mn_last_error());
    return mn_fail(st, "%s%s%s", title, *title ? ": " : "", why);
}

static mn_status walk(product *p, const json_t *job, const json_t *grid, void *axis);

/* The job with one choice made, and the axes behind. */
static mn_status choose(product *p, const json_t *job, const json_t *grid, void *axis,
                        const char *name, const json_t *value) {
    const char *key = json_object_iter_key(axis);
    json_t *label = label_of(name, value);
    if (!is_wanted(p, key, label)) {
        json_decref(label);
        return MN_OK;
    }
    json_t *next = json_deep_copy(job), *labels = json_object_get(next, "labels");
    mn_status st = next ? MN_OK : mn_fail(MN_ERR_MEMORY, "no memory for a job");
    if (!labels) {
        labels = json_object();
        json_object_set_new(next, "labels", labels);
    }
    json_object_set_new(labels, key, label);
    if (st == MN_OK) {
        st = name ? mn_spec_merge(next, value) : mn_spec_set(next, key, json_deep_copy(value));
    }
    void *behind = json_object_iter_next((json_t *)(uintptr_t)grid, axis);
    if (st == MN_OK) st = behind ? walk(p, next, grid, behind) : add_job(p, next);
    json_decref(next);
    return st;
}

static mn_status walk(product *p, const json_t *job, const json_t *grid, void *axis) {
    json_t *choices = json_object_iter_value(axis), *value;
    mn_status st = MN_OK;
    const char *name;
    size_t i;
    if (json_is_object(choices)) {
        json_object_foreach(choices, name, value) {
            if (st == MN_OK) st = choose(p, job, grid, axis, name, value);
        }
        return st;
    }
    if (!json_is_array(choices)) {
        return mn_fail(MN_ERR_ARGUMENT, "grid: \"%s\" is neither a list nor an object of choices",
                       json_object_iter_key(axis));
    }
    json_array_foreach(choices, i, value) {
        if (st == MN_OK) st = choose(p, job, grid, axis, NULL, value);
    }
    return st;
}

static mn_status multiply(product *p, const json_t *job, const json_t *grid) {
    void *axis = json_object_iter((json_t *)(uintptr_t)grid);
    if (axis) return walk(p, job, grid, axis);
    json_t *alone = json_deep_copy(job);
    const mn_status st = add_job(p, alone);
    json_decref(alone);
    return st;
}

/* The common beginning with a part over it; axes of a part replace those of the same name. */
static mn_status multiply_part(product *p, const mn_json *root, const mn_json *part) {
    static const char *const keys[] = { "job", "grid" };
    const json_t *job = json_object_get(root->value, "job");
    const json_t *grid = json_object_get(root->value, "grid");
    json_t *one = job ? json_deep_copy(job) : json_object();
    json_t *axes = grid ? json_copy((json_t *)(uintptr_t)grid) : json_object();
    mn_status st = MN_OK;
    if (part) {
        st = mn_json_unknown_key(part, keys, MN_COUNTOF(keys));
        const json_t *more = json_object_get(part->value, "job");
        if (st == MN_OK && more) st = mn_spec_merge(one, more);
        json_object_update(axes, json_object_get(part->value, "grid"));
    }
    if (st == MN_OK && (!json_is_object(one) || !json_is_object(axes))) {
        st = mn_json_fail(part ? part : root, "job and grid are objects");
    }
    if (st == MN_OK) st = multiply(p, one, axes);
    json_decref(one);
    json_decref(axes);
    return st;
}

mn_status mn_grid_expand(json_t **jobs, const mn_json *root, const json_t *also) {
    static const char *const keys[] = { "job", "grid", "only", "parts", "jobs" };
    *jobs = NULL;
    mn_status st = mn_json_expect_object(root);
    if (st == MN_OK) st = mn_json_unknown_key(root, keys, MN_COUNTOF(keys));
    if (st != MN_OK) return st;
    product p = { .jobs = json_array(), .also = also,
                  .only = json_object_get(root->value, "only") };
    const mn_json parts = mn_json_member(root, "parts"), list = mn_json_member(root, "jobs");
    for (int64_t i = 0; st == MN_OK && i < mn_json_count(&list); i++) {
        json_t *spec = json_deep_copy(json_array_get(list.value, (size_t)i));
        st = add_job(&p, spec);
        json_decref(spec);
    }
    for (int64_t i = 0; st == MN_OK && i < mn_json_count(&parts); i++) {
        const mn_json part = mn_json_item(&parts, i);
        st = multiply_part(&p, root, &part);
    }
    if (st == MN_OK && !list.value && !parts.value) st = multiply_part(&p, root, NULL);
    if (st == MN_OK && json_array_size(p.jobs) == 0) {
        st = mn_json_fail(root, "no job is left to run");
    }
    if (st == MN_OK) *jobs = p.jobs;
    else json_decref(p.jobs);
    return st;
}

/* ---- some jobs alone -------------------------------------------------------------------------- */

/* "axis=label" in two. */
typedef struct choice {
    char axis[64];
    const char *label;
} choice;

static mn_status split(choice *out, const char *text) {
    const char *at = strchr(text, '=');
    if (!at || at == text || (size_t)(at - text) >= sizeof out->axis) {
        return mn_fail(MN_ERR_ARGUMENT, "--only %s: give AXIS=LABEL", text);
    }
    snprintf(out->axis, sizeof out->axis, "%.*s", (int)(at - text), text);
    out->label = at + 1;
    return MN_OK;
}

/* Whether an axis of the grid, or of a part of it, is of named choices. */
static bool is_named(const json_t *grid, const char *axis) {
    const json_t *parts = json_object_get(grid, "parts"), *part;
    size_t i;
    if (json_is_object(json_object_get(json_object_get(grid, "grid"), axis))) return true;
    json_array_foreach((json_t *)(uintptr_t)parts, i, part) {
        if (is_named(part, axis)) return true;
    }
    return false;
}

/* The label as the grid has it: a number where it is one, and no name. */
static json_t *given_label(const json_t *grid, const choice *c) {
    char *end;
    const double number = strtod(c->label, &end);
    if (is_named(grid, c->axis) || *c->label == '\0' || *end != '\0') {
        return json_string(c->label);
    }
    const long whole = (long)number;
    return (double)whole == number ? json_integer(whole) : json_real(number);
}

/* Lays the choices over the grid: axes that they name keep these labels alone. */
static mn_status keep_labels(json_t *grid, const char *const *only, int n) {
    json_t *before = json_object_get(grid, "only"), *chosen = json_object();
    for (int i = 0; i < n; i++) {
        choice c;
        const mn_status st = split(&c, only[i]);
        if (st != MN_OK) {
            json_decref(chosen);
            return st;
        }
        json_t *list = json_object_get(chosen, c.axis);
        if (!list) {
            list = json_array();
            json_object_set_new(chosen, c.axis, list);
        }
        json_array_append_new(list, given_label(grid, &c));
    }
    if (before) json_object_update(before, chosen);
    else if (n > 0) json_object_set(grid, "only", chosen);
    json_decref(chosen);
    return MN_OK;
}

/* That each choice names some job. */
static mn_status check_labels(const json_t *jobs, const json_t *grid, const char *const *only,
                              int n) {
    for (int i = 0; i < n; i++) {
        choice c;
        bool found = false;
        if (split(&c, only[i]) != MN_OK) return MN_ERR_ARGUMENT;
        json_t *label = given_label(grid, &c);
        for (size_t k = 0; k < json_array_size(jobs) && !found; k++) {
            const json_t *labels = json_object_get(json_array_get(jobs, k), "labels");
            found = json_equal(json_object_get(labels, c.axis), label) == 1;
        }
        json_decref(label);
        if (!found) return mn_fail(MN_ERR_ARGUMENT, "--only %s: no run has this", only[i]);
    }
    return MN_OK;
}

mn_status mn_grid_expand_only(json_t **jobs, const mn_json *grid, const json_t *also,
                              const char *const *only, int n) {
    mn_status st = keep_labels(grid->value, only, n);
    if (st != MN_OK) return st;
    st = mn_grid_expand(jobs, grid, also);
    if (st == MN_OK) return check_labels(*jobs, grid->value, only, n);
    if (n > 0 && strstr(mn_last_error(), "no job is left")) {
        st = mn_fail(st, "no run has all that --only asks for; --dry-run names them");
    }
    return st;
}
