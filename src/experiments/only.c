/* only.c - some jobs of a grid, by their labels. */
#include "experiments/only.h"

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/status.h"
#include "experiments/grid.h"

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
static json_t *label_of(const json_t *grid, const choice *c) {
    char *end;
    const double number = strtod(c->label, &end);
    if (is_named(grid, c->axis) || *c->label == '\0' || *end != '\0') return json_string(c->label);
    const long whole = (long)number;
    return (double)whole == number ? json_integer(whole) : json_real(number);
}

/* Lays the choices over the grid: axes that they name keep these labels alone. */
static mn_status choose(json_t *grid, const char *const *only, int n) {
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
        json_array_append_new(list, label_of(grid, &c));
    }
    if (before) json_object_update(before, chosen);
    else if (n > 0) json_object_set(grid, "only", chosen);
    json_decref(chosen);
    return MN_OK;
}

/* That each choice names some job. */
static mn_status check(const json_t *jobs, const json_t *grid, const char *const *only, int n) {
    for (int i = 0; i < n; i++) {
        choice c;
        bool found = false;
        if (split(&c, only[i]) != MN_OK) return MN_ERR_ARGUMENT;
        json_t *label = label_of(grid, &c);
        for (size_t k = 0; k < json_array_size(jobs) && !found; k++) {
            const json_t *labels = json_object_get(json_array_get(jobs, k), "labels");
            found = json_equal(json_object_get(labels, c.axis), label) == 1;
        }
        json_decref(label);
        if (!found) return mn_fail(MN_ERR_ARGUMENT, "--only %s: no run has this", only[i]);
    }
    return MN_OK;
}

mn_status mn_only_expand(json_t **jobs, const mn_json *grid, const json_t *also,
                         const char *const *only, int n) {
    mn_status st = choose(grid->value, only, n);
    if (st != MN_OK) return st;
    st = mn_grid_expand(jobs, grid, also);
    if (st == MN_OK) return check(*jobs, grid->value, only, n);
    if (n > 0 && strstr(mn_last_error(), "no job is left")) {
        st = mn_fail(st, "no run has all that --only asks for; --dry-run names them");
    }
    return st;
}
