/* pilot.c - settings chosen on seeds of their own. */
#include "experiments/pilot.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/status.h"
#include "experiments/job.h"
#include "experiments/job_internal.h"

static mn_status no_memory(void) {
    return mn_fail(MN_ERR_MEMORY, "no memory for the jobs of a pilot");
}

static bool is_tried(const json_t *pilot, const char *axis) {
    const json_t *axes = json_object_get(pilot, "axes"), *name;
    size_t i;
    json_array_foreach((json_t *)(uintptr_t)axes, i, name) {
        if (strcmp(json_string_value(name), axis) == 0) return true;
    }
    return false;
}

/* The labels of a job that are tried, or (not `tried`) those of its row; without the seed. */
static json_t *labels_of(const json_t *job, const json_t *pilot, bool tried) {
    json_t *out = json_object(), *label;
    const char *axis;
    json_object_foreach(json_object_get(job, "labels"), axis, label) {
        if (strcmp(axis, "seed") == 0 || strcmp(axis, "pilot") == 0) continue;
        if (is_tried(pilot, axis) == tried) json_object_set(out, axis, label);
    }
    return out;
}

static bool same_labels(const json_t *a, const json_t *b, const json_t *pilot, bool tried) {
    json_t *x = labels_of(a, pilot, tried), *y = labels_of(b, pilot, tried);
    const bool same = json_equal(x, y) == 1;
    json_decref(x);
    json_decref(y);
    return same;
}

/* Whether the row of a job has several settings. */
static bool has_choice(const json_t *jobs, const json_t *job, const json_t *pilot) {
    for (size_t i = 0; i < json_array_size(jobs); i++) {
        const json_t *other = json_array_get(jobs, i);
        if (same_labels(other, job, pilot, false) && !same_labels(other, job, pilot, true)) {
            return true;
        }
    }
    return false;
}

/* Whether a job before `at` is the same but for its seed. */
static bool came_before(const json_t *jobs, size_t at, const json_t *pilot) {
    const json_t *job = json_array_get(jobs, at);
    for (size_t i = 0; i < at; i++) {
        const json_t *other = json_array_get(jobs, i);
        if (same_labels(other, job, pilot, false) && same_labels(other, job, pilot, true)) {
            return true;
        }
    }
    return false;
}

/* The pilot's own length, where it has one. */
static mn_status cut(json_t *job, const json_t *pilot) {
    const json_t *most = json_object_get(pilot, "steps"), *steps = mn_spec_get(job, "train.steps");
    const json_int_t n = json_integer_value(most);
    if (!most || !steps || json_integer_value(steps) <= n) return MN_OK;
    return mn_spec_set(job, "train.steps", json_integer(n));
}

static mn_status add_seeds(json_t *out, const json_t *job, const json_t *pilot) {
    const json_t *seeds = json_object_get(pilot, "seeds"), *seed;
    size_t i;
    json_array_foreach((json_t *)(uintptr_t)seeds, i, seed) {
        json_t *one = json_deep_copy(job), *labels = json_object_get(one, "labels");
        const bool whole = labels && json_object_set_new(one, "seed", json_copy(
                                         (json_t *)(uintptr_t)seed)) == 0 &&
                           json_object_set_new(labels, "seed",
                                               json_copy((json_t *)(uintptr_t)seed)) == 0 &&
                           json_object_set_new(labels, "pilot", json_string("pilot")) == 0;
        const mn_status st = cut(one, pilot);
        if (st != MN_OK) return st;
        if (!whole || json_array_append_new(out, one) != 0) return no_memory();
    }
    return MN_OK;
}

mn_status mn_pilot_jobs(json_t **out, const json_t *jobs, const json_t *pilot) {
    mn_status st = MN_OK;
    *out = json_array();
    for (size_t i = 0; st == MN_OK && pilot && i < json_array_size(jobs); i++) {
        const json_t *job = json_array_get(jobs, i);
        if (came_before(jobs, i, pilot) || !has_choice(jobs, job, pilot)) continue;
        st = add_seeds(*out, job, pilot);
    }
    return *out ? st : no_memory();
}

/* The mean value of a pilot's runs with the row and setting of `job`; -INFINITY without any. */
static double value_of(const json_t *job, const json_t *pilot, const json_t *first,
                       const json_t *records) {
    const char *way = json_string_value(json_object_get(pilot, "value"));
    const double sign = json_is_true(json_object_get(pilot, "least")) ? -1.0 : 1.0;
    double sum = 0.0;
    int n = 0;
    for (size_t i = 0; i < json_array_size(first); i++) {
        char key[MN_JOB_KEY];
        const json_t *one = json_array_get(first, i);
        if (!same_labels(one, job, pilot, false) || !same_labels(one, job, pilot, true)) continue;
        if (mn_job_key(key, one) != MN_OK) return -INFINITY;
        const json_t *record = json_object_get(records, key);
        const json_t *value = mn_spec_get(json_object_get(record, "result"), way ? way : "score");
        if (!json_is_number(value)) return -INFINITY;
        sum += sign * json_number_value(value);
        n++;
    }
    return n > 0 ? sum / n : -INFINITY;
}

/* Whether no other setting of the row of job `at` is better, and none before it as good. */
static bool is_chosen(const json_t *jobs, size_t at, const double *values, const json_t *pilot) {
    const json_t *job = json_array_get(jobs, at);
    if (values[at] == -INFINITY) return false;
    for (size_t i = 0; i < json_array_size(jobs); i++) {
        const json_t *other = json_array_get(jobs, i);
        const bool rival = same_labels(other, job, pilot, false) &&
                           !same_labels(other, job, pilot, true);
        if (!rival) continue;
        if (values[i] > values[at] || (values[i] == values[at] && i < at)) return false;
    }
    return true;
}

mn_status mn_pilot_choose(json_t **out, const json_t *jobs, const json_t *pilot,
                          const json_t *first, const json_t *records) {
    const size_t n = json_array_size(jobs);
    double *values = calloc(n + 1, sizeof *values);
    *out = json_array();
    mn_status st = values && *out ? MN_OK : no_memory();
    for (size_t i = 0; st == MN_OK && i < n; i++) {
        values[i] = value_of(json_array_get(jobs, i), pilot, first, records);
    }
    for (size_t i = 0; st == MN_OK && i < n; i++) {
        json_t *job = json_array_get(jobs, i);
        if (has_choice(jobs, job, pilot) && !is_chosen(jobs, i, values, pilot)) continue;
        if (json_array_append(*out, job) != 0) st = no_memory();
    }
    free(values);
    return st;
}

bool mn_pilot_covers(const json_t *jobs, const json_t *chosen, const json_t *pilot) {
    for (size_t i = 0; i < json_array_size(jobs); i++) {
        bool found = false;
        for (size_t k = 0; k < json_array_size(chosen) && !found; k++) {
            found = same_labels(json_array_get(jobs, i), json_array_get(chosen, k), pilot, false);
        }
        if (!found) return false;
    }
    return true;
}

/* Whether the row of a job has a setting among `chosen`. */
static bool is_settled(const json_t *job, const json_t *chosen, const json_t *pilot) {
    for (size_t k = 0; k < json_array_size(chosen); k++) {
        if (same_labels(job, json_array_get(chosen, k), pilot, false)) return true;
    }
    return false;
}

/* Whether a job before `at` is of the same row with another setting. */
static bool has_earlier_setting(const json_t *jobs, size_t at, const json_t *pilot) {
    const json_t *job = json_array_get(jobs, at);
    for (size_t i = 0; i < at; i++) {
        const json_t *other = json_array_get(jobs, i);
        if (same_labels(other, job, pilot, false) && !same_labels(other, job, pilot, true)) {
            return true;
        }
    }
    return false;
}

mn_status mn_pilot_expected(json_t **out, const json_t *jobs, const json_t *chosen,
                            const json_t *pilot) {
    *out = json_array();
    for (size_t i = 0; *out && i < json_array_size(jobs); i++) {
        json_t *job = json_array_get(jobs, i);
        bool runs = !has_earlier_setting(jobs, i, pilot);
        if (is_settled(job, chosen, pilot)) {
            runs = false;
            for (size_t k = 0; k < json_array_size(chosen); k++) {
                runs |= json_array_get(chosen, k) == job;
            }
        }
        if (runs && json_array_append(*out, job) != 0) return no_memory();
    }
    return *out ? MN_OK : no_memory();
}
