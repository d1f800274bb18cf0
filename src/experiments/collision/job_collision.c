/* job_collision.c - a job that computes one number of the deterministic collision experiment: see
 * experiments/collision/collision.h.
 *
 *   quantity, rule, overlap, c, boost, write      write: the number is of this write, from 1 */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/status.h"
#include "base/util.h"
#include "experiments/job_internal.h"
#include "io/json_write.h"
#include "experiments/collision/collision.h"

typedef struct collision_run {
    mn_collision_setup setup;
    mn_collision_rule rule;
    int64_t length, write;
    mn_collision_point *points[MN_COLLISION_RULES];    // of bayes, reset, linear and the rule
    mn_collision_theory theory;
} collision_run;

/* The point of the write asked for. */
static const mn_collision_point *at(const collision_run *r) {
    return &r->points[r->rule][r->write - 1];
}

static bool is_reset(const collision_run *r) {
    return r->rule == MN_COLLISION_RESET;
}

#define OF_WRITE(name, field) static double name(const collision_run *r) { return at(r)->field; }
OF_WRITE(a_A, a[0])
OF_WRITE(a_B, a[1])
OF_WRITE(b_A, b[0])
OF_WRITE(b_B, b[1])
OF_WRITE(margin, margin)
OF_WRITE(gain, gain)
OF_WRITE(gain_norm, gain_norm)
#undef OF_WRITE

static double limit_b_A(const collision_run *r) {
    return is_reset(r) ? r->theory.reset_b[0] : r->theory.bayes_b[0];
}

static double limit_b_B(const collision_run *r) {
    return is_reset(r) ? r->theory.reset_b[1] : r->theory.bayes_b[1];
}

static double limit_gap(const collision_run *r) {
    return limit_b_B(r) - limit_b_A(r);
}

static double limit_p(const collision_run *r) {
    return is_reset(r) ? r->theory.reset_p : r->theory.bayes_p;
}

static double limit_boost_p(const collision_run *r) {
    return r->theory.boost_p;
}

static double limit_gain(const collision_run *r) {
    return r->theory.gain_floor;
}

static double length(const collision_run *r) {
    return (double)r->length;
}

static double crossing(const collision_run *r) {
    return (double)mn_collision_crossing(r->points[r->rule], &r->setup);
}

static const struct {
    const char *name;
    double (*of)(const collision_run *r);
    bool of_write;
} quantities[] = {
#define ROW(name, of_write) { #name, name, of_write }
    ROW(a_A, true), ROW(a_B, true), ROW(b_A, true), ROW(b_B, true), ROW(margin, true),
    ROW(gain, true), ROW(gain_norm, true), ROW(limit_b_A, false), ROW(limit_b_B, false),
    ROW(limit_gap, false), ROW(limit_p, false), ROW(limit_boost_p, false),
    ROW(limit_gain, false), ROW(length, false), ROW(crossing, false),
#undef ROW
};

/* The quantity's row, -1 after a failure. */
static int read_job(collision_run *r, const mn_json *job) {
    static const char *const keys[] = { "kind", "quantity", "rule", "overlap", "c", "boost",
                                        "write", "labels" };
    const char *name = NULL, *rule = NULL;
    r->setup = mn_collision_default();
    mn_status st = mn_json_unknown_key(job, keys, MN_COUNTOF(keys));
    if (st == MN_OK) st = mn_json_get_text(&name, job, "quantity");
    if (st == MN_OK) st = mn_json_get_text(&rule, job, "rule");
    if (st == MN_OK) st = mn_json_opt_f64(&r->setup.rho, job, "overlap");
    if (st == MN_OK) st = mn_json_opt_f64(&r->setup.c, job, "c");
    if (st == MN_OK) st = mn_json_opt_i64(&r->setup.n_boost, job, "boost");
    if (st == MN_OK) st = mn_json_opt_i64(&r->write, job, "write");
    if (st != MN_OK) return -1;
    bool known = false;
    for (int i = 0; i < MN_COLLISION_RULES && !known; i++) {
        known = strcmp(mn_collision_name((mn_collision_rule)i), rule) == 0;
        if (known) r->rule = (mn_collision_rule)i;
    }
    if (!known) mn_json_fail(job, "there is no rule \"%s\" in the collision experiment", rule);
    if (!known || r->setup.n_boost < 0 || r->setup.n_boost > 1000000) return -1;
    r->length = mn_collision_length(&r->setup);
    for (size_t i = 0; i < MN_COUNTOF(quantities); i++) {
        if (strcmp(quantities[i].name, name) != 0) continue;
        if (!quantities[i].of_write || (r->write >= 1 && r->write <= r->length)) return (int)i;
        mn_json_fail(job, "%s is of a write from 1 to %" PRId64, name, r->length);
        return -1;
    }
    mn_json_fail(job, "there is no quantity \"%s\"", name);
    return -1;
}

static mn_status complete(mn_json *job) {
    collision_run r = { 0 };
    return read_job(&r, job) >= 0 ? MN_OK : MN_ERR_ARGUMENT;
}

static mn_status simulate(collision_run *r) {
    const mn_collision_rule needed[] = { MN_COLLISION_BAYES, MN_COLLISION_RESET,
                                         MN_COLLISION_LINEAR, r->rule };
    mn_status st = MN_OK;
    for (size_t i = 0; i < MN_COUNTOF(needed) && st == MN_OK; i++) {
        mn_collision_point **points = &r->points[needed[i]];
        if (*points) continue;
        *points = calloc((size_t)r->length + 1, sizeof **points);
        if (!*points) return mn_fail(MN_ERR_MEMORY, "no memory for the collision experiment");
        st = mn_collision_run(*points, needed[i], &r->setup);
    }
    if (st == MN_OK) {
        mn_collision_predict(&r->theory, &r->setup, r->points[MN_COLLISION_BAYES],
                             r->points[MN_COLLISION_RESET], r->points[MN_COLLISION_LINEAR]);
    }
    return st;
}

static mn_status run(json_t **result, const mn_json *job, const mn_job_call *call) {
    (void)call;
    collision_run r = { 0 };
    const int quantity = read_job(&r, job);
    mn_status st = quantity >= 0 ? simulate(&r) : MN_ERR_ARGUMENT;
    if (st == MN_OK) {
        *result = json_pack("{s:o}", "score", mn_json_real(quantities[quantity].of(&r)));
    }
    for (int i = 0; i < MN_COLLISION_RULES; i++) free(r.points[i]);
    return st;
}

const mn_job_kind mn_job_collision = { complete, run };
