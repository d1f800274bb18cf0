/* test_mlstm.c - the stabiliser of mlstm is free, extreme gates are exact, long sequences and
 * steps. Sizes, gradients and bits are walked by test_ops_*.c. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/util.h"
#include "support/op_against.h"

static op_case case_of(int64_t T, int64_t K, int64_t V) {
    return (op_case){ .op = MN_OP_mlstm,
                      .fields = MN_ALL_FIELDS,
                      .B = 1,
                      .T = T,
                      .H = 1,
                      .K = K,
                      .V = V,
                      .seed = (uint64_t)(T + 3 * K + V) };
}

static uint64_t bit_of(const char *name) {
    int count;
    const mn_field *fields = mn_op_fields(MN_OP_mlstm, &count);
    for (int i = 0; i < count; i++) {
        if (strcmp(fields[i].name, name) == 0) return (uint64_t)1 << i;
    }
    return 0;
}

/* ---- the stabiliser -------------------------------------------------------------------------- */

static void scale_tensor(mn_sample *s, const char *name, double factor) {
    const mn_sample_tensor *t = mn_sample_find(s, name);
    for (int64_t i = 0; i < t->count; i++) {
        mn_sample_set(s, t->data, i, mn_sample_get(s, t->data, i) * factor);
    }
}

static double distance(mn_sample *a, mn_sample *b, const char *name, bool gradient, double factor) {
    const mn_sample_tensor *x = mn_sample_find(a, name), *y = mn_sample_find(b, name);
    double off = 0.0, size = 0.0;
    for (int64_t i = 0; i < x->count; i++) {
        const double u = mn_sample_get(a, gradient ? x->partner : x->data, i);
        const double v = factor * mn_sample_get(b, gradient ? y->partner : y->data, i);
        off += (u - v) * (u - v);
        size += u * u;
    }
    return sqrt(off / size);
}

/* C0 e^-s, n0 e^-s and m0 + s are the same memory for every s: all outputs and gradients stay,
 * those for C0 and n0 in their new unit. Moving m by s rounds it and the state anew, a relative
 * change of |m + s| roundings in the weight of all that was stored before. */
static void check_shift(const op_target *target, double shift) {
    static const char *const results[] = { "o", "csum", "nsum" };
    static const char *const inputs[] = { "q", "k", "v", "ipre", "fpre", "m0" };
    op_case c = case_of(75, 9, 12);
    c.dtype = target->dtype;
    mn_sample here, there;
    op_open(&here, &c);
    op_open(&there, &c);
    scale_tensor(&there, "C0", exp(-shift));
    scale_tensor(&there, "n0", exp(-shift));
    op_fill(&there, "m0", op_at(&here, "m0", 0) + shift);
    op_run_both(op_context(target->name, 1), &here, &c);
    op_run_both(op_context(target->name, 1), &there, &c);
    const double unit = c.dtype == MN_F64 ? 0x1p-53 : 0x1p-24;
    const double tolerance = 64.0 * (8.0 + fabs(shift)) * unit;
    for (size_t i = 0; i < MN_COUNTOF(results); i++) {
        const double d = distance(&here, &there, results[i], false, 1.0);
        CHECK(d < tolerance, "%s shift %g: %s off by %.2e", target->name, shift, results[i], d);
    }
    for (size_t i = 0; i < MN_COUNTOF(inputs); i++) {
        const double d = distance(&here, &there, inputs[i], true, 1.0);
        CHECK(d < 4.0 * tolerance, "%s shift %g: d%s off by %.2e", target->name, shift, inputs[i],
              d);
    }
    CHECK(distance(&here, &there, "C0", true, exp(-shift)) < 4.0 * tolerance, "%s: dC0",
          target->name);
    CHECK(distance(&here, &there, "n0", true, exp(-shift)) < 4.0 * tolerance, "%s: dn0",
          target->name);
    mn_sample_free(&here);
    mn_sample_free(&there);
}

static void stabiliser_is_free(void **state) {
    (void)state;
    static const double shifts[] = { 1.0, -3.5, 20.0, -40.0 };
    op_target targets[MN_TARGET_COUNT + 1];
    const int n_targets = op_targets(targets);
    for (int i = 0; i < n_targets; i++) {
        for (size_t j = 0; j < MN_COUNTOF(shifts); j++) check_shift(&targets[i], shifts[j]);
    }
    check_done();
}

/* m0 = -inf given, with C0 and n0 given as well, is the fresh state: they weigh exp(-inf). */
static void minus_infinity_is_the_fresh_state(void **state) {
    (void)state;
    static const int64_t lengths[] = { 1, 70 };
    static const char *const names[] = { "o", "C", "n", "m", "csum", "nsum" };
    op_target targets[MN_TARGET_COUNT + 1];
    const int n_targets = op_targets(targets);
    for (int i = 0; i < n_targets; i++) {
        for (size_t l = 0; l < MN_COUNTOF(lengths); l++) {
            op_case c = case_of(lengths[l], 9, 12);
            c.dtype = targets[i].dtype;
            mn_sample given, fresh;
            op_open(&given, &c);
            c.fields = ~(bit_of("C0") | bit_of("n0") | bit_of("m0"));
            op_open(&fresh, &c);
            op_fill(&given, "m0", -INFINITY);
            op_run_both(op_context(targets[i].name, 1), &given, &c);
            op_run_both(op_context(targets[i].name, 1), &fresh, &c);
            for (size_t k = 0; k < MN_COUNTOF(names); k++) {
                CHECK(distance(&fresh, &given, names[k], false, 1.0) == 0.0, "%s: %s",
                      targets[i].name, names[k]);
            }
            for (int64_t k = 0; k < 9 * 12; k++) {
                const mn_sample_tensor *C0 = mn_sample_find(&given, "C0");
                CHECK(mn_sample_get(&given, C0->partner, k) == 0.0, "%s: dC0", targets[i].name);
            }
            mn_sample_free(&given);
            mn_sample_free(&fresh);
        }
    }
    check_done();
}

/* ---- extreme gates --------------------------------------------------------------------------- */

/* Nothing is written at first, then gates far apart; m stays below 80, so that csum is finite. */
static void extreme(mn_sample *s) {
    op_fill_token(s, "ipre", 7, 60.0);
    op_fill_token(s, "fpre", 20, -100.0);
    op_fill_token(s, "ipre", 21, -90.0);
    op_fill_token(s, "fpre", 30, 100.0);
    op_fill_token(s, "fpre", 40, -1e30);
    op_fill_token(s, "fpre", 41, -INFINITY);
    op_fill_token(s, "ipre", 50, 75.0);
    op_fill_token(s, "q", 51, 0.0);
    op_fill_token(s, "fpre", 60, -300.0);
}

static void extreme_gates_are_exact(void **state) {
    (void)state;
    op_case c = case_of(90, 8, 6);
    op_against_reference(c, extreme);
    c.fields = 0;
    op_against_reference(c, extreme);
    c = case_of(90, 40, 33);
    op_against_reference(c, extreme);
    check_done();
}

/* Strong forgetting throughout: the gradient of the forget gates is small against everything that
 * flows through the state, and still exact. */
static void strong_forgetting(mn_sample *s) {
    op_fill(s, "fpre", -12.0);
}

static void small_gradients_are_exact(void **state) {
    (void)state;
    op_against_reference(case_of(70, 8, 6), strong_forgetting);
    check_done();
}

/* Input gates at -inf write nothing: o is 0 and nothing is NaN. */
static void nothing_stored_reads_zero(void **state) {
    (void)state;
    op_target targets[MN_TARGET_COUNT + 1];
    const int n_targets = op_targets(targets);
    for (int i = 0; i < n_targets; i++) {
        mn_sample s;
        op_case c = case_of(40, 5, 6);
        c.fields = 0;
        c.dtype = targets[i].dtype;
        op_open(&s, &c);
        for (int64_t t = 0; t < 36; t++) op_fill_token(&s, "ipre", t, -INFINITY);
        op_run_both(op_context(targets[i].name, 1), &s, &c);
        for (int64_t j = 0; j < 40 * 6; j++) {
            const double o = op_at(&s, "o", j);
            CHECK(j < 36 * 6 ? o == 0.0 : isfinite(o), "%s: o[%d] is %g", targets[i].name, (int)j,
                  o);
        }
        const mn_sample_tensor *fpre = mn_sample_find(&s, "fpre");
        for (int64_t t = 0; t < 40; t++) {
            CHECK(isfinite(mn_sample_get(&s, fpre->partner, t)), "%s: dfpre", targets[i].name);
        }
        mn_sample_free(&s);
    }
    check_done();
}

/* ---- long sequences and steps ---------------------------------------------------------------- */

static void remember(mn_sample *s) {
    op_fill(s, "fpre", 7.0);
}

static void long_sequences_stay_accurate(void **state) {
    (void)state;
    op_against_reference(case_of(65536, 3, 2), NULL);
    op_against_reference(case_of(20000, 3, 4), remember);
    check_done();
}

static void steps_are_the_chunks(void **state) {
    (void)state;
    op_steps_against_reference(case_of(100, 17, 9), NULL);
    op_case c = case_of(45, 48, 16);
    c.B = 2, c.H = 3;
    op_steps_against_reference(c, NULL);
    check_done();
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(stabiliser_is_free),
        cmocka_unit_test(minus_infinity_is_the_fresh_state),
        cmocka_unit_test(extreme_gates_are_exact),
        cmocka_unit_test(small_gradients_are_exact),
        cmocka_unit_test(nothing_stored_reads_zero),
        cmocka_unit_test(long_sequences_stay_accurate),
        cmocka_unit_test(steps_are_the_chunks),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
