/* task_case.c - tasks for tests: open by name, take samples, count, and judge the counts. */
#include "support/task_case.h"

#include <math.h>
#include <stdlib.h>

static mn_status make(mn_task **out, const char *name, const char *changes) {
    mn_json options = { .value = json_object(), .name = "options" };
    mn_status st = mn_task_apply(&options, changes);
    *out = NULL;
    if (st == MN_OK) st = mn_task_create(out, name, &options);
    json_decref(options.value);
    return st;
}

mn_status task_try(const char *name, const char *changes) {
    mn_task *task;
    const mn_status st = make(&task, name, changes);
    if (st != MN_OK && task) check_fatal("%s %s: failed and left a task", name, changes);
    mn_task_destroy(task);
    return st;
}

task_case task_open(const char *name, const char *changes) {
    task_case c = { 0 };
    if (make(&c.task, name, changes) != MN_OK) {
        check_fatal("%s %s: %s", name, changes, mn_last_error());
    }
    c.shape = mn_task_shape_of(c.task);
    c.n = c.shape.length;
    c.input = malloc((size_t)c.n * sizeof *c.input);
    c.target = malloc((size_t)c.n * sizeof *c.target);
    if (c.shape.features > 0) c.x = malloc((size_t)(c.n * c.shape.features) * sizeof *c.x);
    return c;
}

void task_close(task_case *c) {
    mn_task_destroy(c->task);
    free(c->input);
    free(c->target);
    free(c->x);
    *c = (task_case){ 0 };
}

void task_take(task_case *c, uint64_t seed, mn_split split, int64_t index) {
    const mn_status st = c->x ? mn_task_vectors(c->task, seed, split, index, c->x, c->target)
                              : mn_task_sample(c->task, seed, split, index, c->input, c->target);
    if (st != MN_OK) check_fatal("sample %d: %s", (int)index, mn_last_error());
}

int64_t task_scored(const task_case *c) {
    int64_t scored = 0;
    for (int64_t t = 0; t < c->n; t++) scored += c->target[t] != MN_NO_TARGET;
    return scored;
}

tally tally_even(const char *what, int64_t n) {
    tally t = { .what = what, .n = n };
    for (int64_t i = 0; i < n; i++) t.p[i] = 1.0 / (double)n;
    return t;
}

void tally_check(const tally *t) {
    double total = 0.0, chi = 0.0;
    for (int64_t i = 0; i < t->n; i++) total += (double)t->count[i];
    for (int64_t i = 0; i < t->n; i++) {
        const double want = total * t->p[i];
        CHECK(want >= 10.0, "%s: only %g draws expected in cell %d", t->what, want, (int)i);
        chi += ((double)t->count[i] - want) * ((double)t->count[i] - want) / want;
    }
    const double k = (double)t->n - 1.0, x = 14.0;
    CHECK(chi <= k + 2.0 * sqrt(k * x) + 2.0 * x, "%s: chi-square %g with %g degrees of freedom",
          t->what, chi, k);
}

void moments_add(moments *m, double x) {
    m->n += 1.0;
    m->sum += x;
    m->squares += x * x;
}

double moments_mean(const moments *m) {
    return m->sum / m->n;
}

double moments_variance(const moments *m) {
    const double mean = moments_mean(m);
    return fmax(0.0, m->squares / m->n - mean * mean);
}

void moments_check(const moments *m, const char *what, double want, double most) {
    const double error = 5.0 * sqrt(moments_variance(m) / m->n) + 1e-12;
    const double off = fabs(moments_mean(m) - want);
    CHECK(off <= error && off <= most, "%s: %g, expected %g (%g are allowed)", what,
          moments_mean(m), want, fmin(error, most));
}
