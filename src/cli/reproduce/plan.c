/* plan.c - what an experiment would run and what it would cost, without running it.
 *
 * A row of the plan holds the runs that differ in settings that are tried and in seeds alone. Its
 * seconds a step are those of runs of the folder that ended: of the row, else of its model. */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/status.h"
#include "base/util.h"
#include "cli/reproduce/reproduce.h"
#include "experiments/job.h"
#include "experiments/job_internal.h"
#include "io/json_write.h"

/* What a job's row is called: its labels but those of seeds and settings. */
static void name_row(char *text, size_t size, const json_t *job, const json_t *pilot) {
    const json_t *labels = json_object_get(job, "labels"), *tried = json_object_get(pilot, "axes");
    json_t *label;
    const char *axis;
    size_t used = 0;
    *text = '\0';
    json_object_foreach((json_t *)(uintptr_t)labels, axis, label) {
        bool counts = strcmp(axis, "seed") != 0 && json_is_string(label);
        for (size_t i = 0; i < json_array_size(tried); i++) {
            counts &= strcmp(axis, json_string_value(json_array_get(tried, i))) != 0;
        }
        if (!counts || used >= size) continue;
        const int n = snprintf(text + used, size - used, "%s%s", used > 0 ? ", " : "",
                               json_string_value(label));
        used += n > 0 ? (size_t)n : 0;
    }
}

static int64_t steps_of(const json_t *job) {
    const json_t *steps = mn_spec_get(job, "train.steps");
    return json_integer_value(steps ? steps : json_object_get(job, "steps"));
}

static bool same_label(const json_t *a, const json_t *b, const char *axis) {
    const json_t *x = json_object_get(json_object_get(a, "labels"), axis);
    const json_t *y = json_object_get(json_object_get(b, "labels"), axis);
    return x && json_equal(x, y) == 1;
}

/* Whether `other` has all labels of `job` but those of the seed and of numbers that are tried. */
static bool is_of_row(const json_t *job, const json_t *other) {
    json_t *label;
    const char *axis;
    json_object_foreach(json_object_get(job, "labels"), axis, label) {
        if (json_is_string(label) && strcmp(axis, "pilot") != 0 && !same_label(job, other, axis)) {
            return false;
        }
    }
    return true;
}

/* Seconds a step of runs that ended like `job`, of its row or else of its model; NAN without. */
static double pace_of(const json_t *job, const json_t *records) {
    double seconds[2] = { 0.0, 0.0 }, steps[2] = { 0.0, 0.0 };
    const json_t *record;
    const char *key;
    json_object_foreach((json_t *)(uintptr_t)records, key, record) {
        const json_t *other = json_object_get(record, "job");
        const char *status = json_string_value(json_object_get(record, "status"));
        if (!status || strcmp(status, "ok") != 0) continue;
        const json_t *took = mn_spec_get(record, "result.steps");
        const double n = took ? json_number_value(took) : (double)steps_of(other);
        const bool of[2] = { is_of_row(job, other), same_label(job, other, "model") };
        for (int i = 0; i < 2; i++) {
            seconds[i] += of[i] ? json_number_value(json_object_get(record, "seconds")) : 0.0;
            steps[i] += of[i] ? n : 0.0;
        }
    }
    for (int i = 0; i < 2; i++) {
        if (steps[i] > 0.0) return seconds[i] / steps[i];
    }
    return NAN;
}

static bool is_done(const json_t *job, const json_t *records) {
    char key[MN_JOB_KEY];
    if (mn_job_key(key, job) != MN_OK) return false;
    const char *status = json_string_value(json_object_get(json_object_get(records, key),
                                                           "status"));
    return status && strcmp(status, "ok") == 0;
}

/* The row of that name in `rows`, made where there is none. */
static json_t *row_of(json_t *rows, const char *name, double pace) {
    json_t *row;
    size_t i;
    json_array_foreach(rows, i, row) {
        if (strcmp(json_string_value(json_object_get(row, "row")), name) == 0) return row;
    }
    row = json_pack("{s:s, s:i, s:i, s:I, s:o}", "row", name, "runs", 0, "done", 0, "steps_left",
                    (json_int_t)0, "seconds_a_step", mn_json_real(pace));
    json_array_append_new(rows, row);
    return row;
}

static void add_to(json_t *row, const char *key, int64_t n) {
    const json_int_t sum = json_integer_value(json_object_get(row, key)) + n;
    json_object_set_new(row, key, json_integer(sum));
}

mn_status mn_reproduce_plan(json_t **out, const json_t *jobs, const json_t *pilot,
                            const json_t *records) {
    json_t *rows = json_array(), *row;
    size_t i;
    for (i = 0; rows && i < json_array_size(jobs); i++) {
        const json_t *job = json_array_get(jobs, i);
        char name[256];
        name_row(name, sizeof name, job, pilot);
        row = row_of(rows, name, pace_of(job, records));
        if (!row) continue;
        const bool done = is_done(job, records);
        add_to(row, "runs", 1);
        add_to(row, "done", done);
        if (!done) add_to(row, "steps_left", steps_of(job));
    }
    double seconds = 0.0;
    json_array_foreach(rows, i, row) {
        const json_t *pace = json_object_get(row, "seconds_a_step");
        const double left = (double)json_integer_value(json_object_get(row, "steps_left"));
        const double take = left == 0.0 ? 0.0 : json_is_number(pace)
                                                    ? left * json_number_value(pace) : NAN;
        json_object_set_new(row, "seconds_left", mn_json_real(take));
        seconds += take;
    }
    *out = json_pack("{s:o, s:o}", "rows", rows, "seconds_left", mn_json_real(seconds));
    return *out ? MN_OK : mn_fail(MN_ERR_MEMORY, "no memory for a plan");
}

static void put_seconds(const json_t *value) {
    if (json_is_number(value)) printf("  %10.0f\n", json_number_value(value));
    else printf("  %10s\n", "-");
}

void mn_reproduce_plan_show(const json_t *plan) {
    const json_t *row;
    size_t i;
    printf("%-44s %5s %5s %11s %12s  %10s\n", "", "runs", "done", "steps left", "s/1000 steps",
           "s left");
    json_array_foreach(json_object_get(plan, "rows"), i, row) {
        const json_t *pace = json_object_get(row, "seconds_a_step");
        printf("%-44.44s %5" PRId64 " %5" PRId64 " %11" PRId64, json_string_value(
                   json_object_get(row, "row")),
               (int64_t)json_integer_value(json_object_get(row, "runs")),
               (int64_t)json_integer_value(json_object_get(row, "done")),
               (int64_t)json_integer_value(json_object_get(row, "steps_left")));
        if (json_is_number(pace)) printf(" %12.2f", 1000.0 * json_number_value(pace));
        else printf(" %12s", "-");
        put_seconds(json_object_get(row, "seconds_left"));
    }
    printf("%-79s", "all, one process after the other");
    put_seconds(json_object_get(plan, "seconds_left"));
}
