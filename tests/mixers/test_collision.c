/* test_collision.c - the collision experiment against tests/golden/collision.json: every printed
 * number of the paper that the exact recursion reproduces, to its last digit, and every stored
 * series. */
// labels: sanitize
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "io/json.h"
#include "experiments/collision/collision.h"

enum { MAX_LENGTH = 6000, BEFORE_FLOOD = 52 };

/* An independent program in double precision: apart by rounding over 112 steps only. */
static const double tolerance = 1e-10;

static mn_json golden;

static int open_golden(void **state) {
    (void)state;
    return mn_json_load(&golden, MN_SOURCE_DIR "/tests/golden/collision.json", MN_JSON_STANDARD) !=
           MN_OK;
}

static int close_golden(void **state) {
    (void)state;
    mn_json_free(&golden);
    return 0;
}

static mn_collision_rule rule_called(const char *name) {
    for (int rule = 0; rule < MN_COLLISION_RULES; rule++) {
        if (strcmp(mn_collision_name((mn_collision_rule)rule), name) == 0) {
            return (mn_collision_rule)rule;
        }
    }
    fail_msg("no rule is called %s", name);
    return MN_COLLISION_RULES;
}

static void run(mn_collision_point *points, mn_collision_rule rule,
                const mn_collision_setup *setup) {
    assert_true(mn_collision_length(setup) <= MAX_LENGTH);
    if (mn_collision_run(points, rule, setup) != MN_OK) fail_msg("%s", mn_last_error());
}

/* ---- series ---------------------------------------------------------------------------------- */

static double quantity(const mn_collision_point *point, const char *name) {
    if (strcmp(name, "gain") == 0) return point->gain;
    if (strcmp(name, "gain_norm") == 0) return point->gain_norm;
    if (strcmp(name, "margin") == 0) return point->margin;
    if (strcmp(name, "p") == 0) return point->p;
    if (strcmp(name, "var_a") == 0) return point->var_a;
    if (strcmp(name, "var_b") == 0) return point->var_b;
    if (strcmp(name, "cos") == 0) return point->cosine;
    fail_msg("the file has a series %s", name);
    return NAN;
}

static void compare_series(const mn_json *list, const char *name, const mn_collision_point *points,
                           const mn_collision_setup *setup) {
    assert_int_equal(mn_json_count(list), mn_collision_length(setup));
    for (int64_t t = 0; t < mn_json_count(list); t++) {
        const mn_json item = mn_json_item(list, t);
        double want;
        assert_int_equal(mn_json_read_f64(&want, &item), MN_OK);
        const double got = quantity(&points[t], name);
        if (!(fabs(got - want) <= tolerance)) {
            fail_msg("%s at t = %lld: %.15g, not %.15g", name, (long long)t + 1, got, want);
        }
    }
}

static void every_series_agrees(void **state) {
    (void)state;
    static mn_collision_point points[MAX_LENGTH];
    const mn_json series = mn_json_member(&golden, "series");
    int64_t n_series = 0;
    for (mn_json rule = { 0 }; mn_json_next(&rule, &series);) {
        char name[32];
        double rho;
        assert_int_equal(sscanf(rule.name, "%31[a-z]_%lf", name, &rho), 2);
        mn_collision_setup setup = mn_collision_default();
        setup.rho = rho;
        run(points, rule_called(name), &setup);
        for (mn_json list = { 0 }; mn_json_next(&list, &rule); n_series++) {
            compare_series(&list, list.name, points, &setup);
        }
    }
    assert_true(n_series >= 26);
}

/* ---- printed numbers ------------------------------------------------------------------------- */

/* One entry of the file. */
typedef struct entry {
    const char *what, *rule, *printed, *note;
    double value;
    int64_t t; // 0: a limit, or not at a step
    mn_collision_setup setup;
} entry;

static entry read_entry(const mn_json *item) {
    entry e = { .note = "", .setup = mn_collision_default() };
    const mn_json t = mn_json_member(item, "t");
    assert_int_equal(mn_json_get_text(&e.what, item, "what"), MN_OK);
    assert_int_equal(mn_json_get_text(&e.rule, item, "rule"), MN_OK);
    assert_int_equal(mn_json_get_text(&e.printed, item, "printed"), MN_OK);
    assert_int_equal(mn_json_opt_text(&e.note, item, "note"), MN_OK);
    assert_int_equal(mn_json_get_f64(&e.value, item, "value"), MN_OK);
    assert_int_equal(mn_json_get_f64(&e.setup.rho, item, "rho"), MN_OK);
    assert_int_equal(mn_json_opt_f64(&e.setup.c, item, "c"), MN_OK);
    if (mn_json_given(&t) && json_is_integer(t.value)) mn_json_read_i64(&e.t, &t);
    return e;
}

/* What Appendix E.3 calls by names, from the theory or from the points. */
static double limit_of(const entry *e, const mn_collision_theory *theory) {
    const double *b = strcmp(e->rule, "reset") == 0 ? theory->reset_b : theory->bayes_b;
    const double p = strcmp(e->rule, "reset") == 0 ? theory->reset_p : theory->bayes_p;
    if (strcmp(e->what, "b_inf(A)") == 0) return b[0];
    if (strcmp(e->what, "b_inf(B)") == 0) return b[1];
    if (strcmp(e->what, "b_inf(B) - b_inf(A)") == 0) return b[1] - b[0];
    if (strcmp(e->what, "p_inf") == 0) return p;
    if (strcmp(e->what, "boost asymptote of p") == 0) return theory->boost_p;
    if (strcmp(e->what, "steady gain g_ss") == 0) return theory->gain_floor;
    return NAN;
}

static double measured(const entry *e, const mn_collision_point *points) {
    const mn_collision_point *point =
        &points[(e->t > 0 ? e->t : mn_collision_length(&e->setup)) - 1];
    if (strcmp(e->what, "a_0(A)") == 0) return point->a[0];
    if (strcmp(e->what, "a_0(B)") == 0) return point->a[1];
    if (strcmp(e->what, "b_0(A)") == 0) return point->b[0];
    if (strcmp(e->what, "b_0(B)") == 0) return point->b[1];
    if (strcmp(e->what, "sequence length T") == 0) return (double)mn_collision_length(&e->setup);
    if (strncmp(e->what, "zero-crossing", 13) == 0) {
        return (double)mn_collision_crossing(points, &e->setup);
    }
    if (strstr(e->note, "norm |beta u|")) return point->gain_norm;
    if (strncmp(e->what, "margin", 6) == 0) return point->margin;
    if (strstr(e->what, "gain")) return point->gain;
    return NAN;
}

/* Half a unit of the last printed digit. */
static double half_unit(const char *printed) {
    const char *point = strchr(printed, '.');
    return 0.5 * pow(10.0, point ? -(double)strlen(point + 1) : 0.0);
}

static void check_entry(entry *e) {
    static mn_collision_point points[MAX_LENGTH], bayes[MAX_LENGTH], reset[MAX_LENGTH];
    static mn_collision_point linear[MAX_LENGTH];
    mn_collision_theory theory;
    if (strcmp(e->what, "same, infinite boost") == 0) {
        e->setup.n_boost = 5000; // the file's stand-in for an endless boost
        e->t = e->setup.n_seed * MN_COLLISION_M + e->setup.n_boost + 1;
        e->what = "gain of the first flood write";
    }
    run(points, rule_called(e->rule), &e->setup);
    run(bayes, MN_COLLISION_BAYES, &e->setup);
    run(reset, MN_COLLISION_RESET, &e->setup);
    run(linear, MN_COLLISION_LINEAR, &e->setup);
    mn_collision_predict(&theory, &e->setup, bayes, reset, linear);
    const double limit = limit_of(e, &theory), got = isnan(limit) ? measured(e, points) : limit;
    if (!(fabs(got - e->value) <= tolerance) ||
        !(fabs(got - atof(e->printed)) <= half_unit(e->printed))) {
        fail_msg("%s, %s at rho = %g: %.15g, the file has %.15g, the paper %s", e->what, e->rule,
                 e->setup.rho, got, e->value, e->printed);
    }
}

static void every_printed_number_agrees(void **state) {
    (void)state;
    const mn_json list = mn_json_member(&golden, "printed_numbers_that_reproduce");
    assert_int_equal(mn_json_count(&list), 70);
    for (int64_t i = 0; i < mn_json_count(&list); i++) {
        const mn_json item = mn_json_item(&list, i);
        entry e = read_entry(&item);
        check_entry(&e);
    }
}

/* ---- closed forms ---------------------------------------------------------------------------- */

/* A flood of 4000 writes is where the limits say it goes. */
static void limits_are_where_floods_end(void **state) {
    (void)state;
    static mn_collision_point bayes[MAX_LENGTH], reset[MAX_LENGTH], linear[MAX_LENGTH];
    const double overlaps[] = { -0.5, 0.0, 0.45, 0.92, 0.99 };
    for (int i = 0; i < 5; i++) {
        mn_collision_theory theory;
        mn_collision_setup setup = mn_collision_default();
        setup.rho = overlaps[i];
        setup.n_flood = 4000;
        run(bayes, MN_COLLISION_BAYES, &setup);
        run(reset, MN_COLLISION_RESET, &setup);
        run(linear, MN_COLLISION_LINEAR, &setup);
        mn_collision_predict(&theory, &setup, bayes, reset, linear);
        const mn_collision_point *end = &bayes[mn_collision_length(&setup) - 1];
        assert_true(fabs(end->p - theory.bayes_p) < 1e-9);
        assert_true(fabs(end->b[0] - theory.bayes_b[0]) < 1e-9);
        assert_true(fabs(end->gain - theory.gain_floor) < 1e-12);
        assert_true(fabs(end->var_a - theory.var_a) < 1e-12);
        assert_true(fabs(end->var_b - end[-1].var_b - theory.var_b_rate) < 1e-9);
        assert_true(fabs(bayes[BEFORE_FLOOD].gain - theory.onset_gain) < 1e-12);
        assert_true(fabs(bayes[BEFORE_FLOOD].cosine - theory.onset_cosine) < 1e-12);
        assert_true(fabs(reset[mn_collision_length(&setup) - 1].p - theory.reset_p) < 1e-9);
        assert_true(fabs(linear[mn_collision_length(&setup) - 1].b[0] - theory.linear_b[0]) < 1e-8);
    }
}

/* The write turns away from k_A as the boost goes on, towards arcsin rho. */
static void endless_boost_turns_the_write(void **state) {
    (void)state;
    static mn_collision_point bayes[MAX_LENGTH], reset[MAX_LENGTH], linear[MAX_LENGTH];
    mn_collision_theory theory;
    mn_collision_setup setup = mn_collision_default();
    setup.n_boost = 5000;
    run(bayes, MN_COLLISION_BAYES, &setup);
    run(reset, MN_COLLISION_RESET, &setup);
    run(linear, MN_COLLISION_LINEAR, &setup);
    mn_collision_predict(&theory, &setup, bayes, reset, linear);
    assert_true(fabs(theory.onset_cosine - theory.cosine_limit) < 1e-3);
    assert_true(theory.onset_cosine > theory.cosine_limit);
}

/* Rows that are one another's special cases at A_t = I answer the same. */
static void families_coincide(void **state) {
    (void)state;
    static const mn_collision_rule same[][2] = {
        { MN_COLLISION_RESET, MN_COLLISION_DELTA },
        { MN_COLLISION_DELTA, MN_COLLISION_GDN },
        { MN_COLLISION_DELTA, MN_COLLISION_KDA },
        { MN_COLLISION_DELTA, MN_COLLISION_GDN2 },
        { MN_COLLISION_DELTA, MN_COLLISION_LONGHORN_COLUMN },
        { MN_COLLISION_LINEAR, MN_COLLISION_GLA },
        { MN_COLLISION_LINEAR, MN_COLLISION_MAMBA1 },
        { MN_COLLISION_LINEAR, MN_COLLISION_RETNET },
        { MN_COLLISION_BAYES, MN_COLLISION_BAYES_ROTATION },
        { MN_COLLISION_PALIMPSA_PAPER, MN_COLLISION_PALIMPSA_CODE },
    };
    static mn_collision_point x[MAX_LENGTH], y[MAX_LENGTH];
    const mn_collision_setup setup = mn_collision_default();
    for (size_t i = 0; i < sizeof same / sizeof *same; i++) {
        run(x, same[i][0], &setup);
        run(y, same[i][1], &setup);
        for (int64_t t = 0; t < mn_collision_length(&setup); t++) {
            assert_true(fabs(x[t].p - y[t].p) < 1e-12);
            assert_true(isnan(y[t].var_b) || isnan(x[t].var_b) ||
                        fabs(x[t].var_b - y[t].var_b) < 1e-12);
        }
    }
}

/* Every row of the table takes part or says why not, and what it answers is a number. */
static void every_row_is_accounted_for(void **state) {
    (void)state;
    static mn_collision_point points[MAX_LENGTH];
    const mn_collision_setup setup = mn_collision_default();
    for (int i = 0; i < mn_mixer_count(); i++) {
        const char *name = mn_mixer_row(i)->name, *row, *why;
        bool found = false;
        for (int rule = 0; rule < MN_COLLISION_RULES; rule++) {
            if (strcmp(mn_collision_name((mn_collision_rule)rule), name) != 0) continue;
            found = true;
            run(points, (mn_collision_rule)rule, &setup);
            for (int64_t t = 0; t < mn_collision_length(&setup); t++) {
                assert_true(isfinite(points[t].p));
            }
        }
        for (int n = 0; mn_collision_absent(n, &row, &why); n++) found |= strcmp(row, name) == 0;
        if (!found) fail_msg("%s takes no part and nobody says why", name);
    }
}

static void bad_setups_are_refused(void **state) {
    (void)state;
    static mn_collision_point points[MAX_LENGTH];
    mn_collision_setup setup = mn_collision_default();
    setup.rho = 1.0;
    assert_int_equal(mn_collision_run(points, MN_COLLISION_BAYES, &setup), MN_ERR_ARGUMENT);
    setup.rho = NAN;
    assert_int_equal(mn_collision_run(points, MN_COLLISION_BAYES, &setup), MN_ERR_ARGUMENT);
    setup = mn_collision_default();
    setup.r2 = 0.0;
    assert_int_equal(mn_collision_run(points, MN_COLLISION_BAYES, &setup), MN_ERR_ARGUMENT);
    setup = mn_collision_default();
    setup.n_flood = -1;
    assert_int_equal(mn_collision_run(points, MN_COLLISION_BAYES, &setup), MN_ERR_ARGUMENT);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_series_agrees),
        cmocka_unit_test(every_printed_number_agrees),
        cmocka_unit_test(limits_are_where_floods_end),
        cmocka_unit_test(endless_boost_turns_the_write),
        cmocka_unit_test(families_coincide),
        cmocka_unit_test(every_row_is_accounted_for),
        cmocka_unit_test(bad_setups_are_refused),
    };
    return cmocka_run_group_tests(tests, open_golden, close_golden);
}
