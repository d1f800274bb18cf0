/* test_mesa.c - regression statistics read by a solve: what it means, every way it is solved, and
 * the numbers that make solving hard. Sizes, gradients and bits are walked by test_ops_*.c. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/rng.h"
#include "base/util.h"
#include "support/op_against.h"

static op_case case_of(int64_t T, int64_t K, int64_t V) {
    return (op_case){ .op = MN_OP_mesa,
                      .fields = MN_ALL_FIELDS,
                      .B = 1,
                      .T = T,
                      .H = 1,
                      .K = K,
                      .V = V,
                      .seed = (uint64_t)(T + 3 * K + V) };
}

/* ---- ridge regression ------------------------------------------------------------------------ */

/* Solves A x = b, n <= 32, by elimination with pivots: none of the ways of the kernels. */
static void eliminate(double *x, double A[32][33], int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        int64_t best = i;
        for (int64_t r = i; r < n; r++) {
            if (fabs(A[r][i]) > fabs(A[best][i])) best = r;
        }
        for (int64_t c = 0; c <= n; c++) {
            const double kept = A[i][c];
            A[i][c] = A[best][c];
            A[best][c] = kept;
        }
        for (int64_t r = i + 1; r < n; r++) {
            const double factor = A[r][i] / A[i][i];
            for (int64_t c = i; c <= n; c++) A[r][c] -= factor * A[i][c];
        }
    }
    for (int64_t i = n - 1; i >= 0; i--) {
        x[i] = A[i][n];
        for (int64_t c = i + 1; c < n; c++) x[i] -= A[i][c] * x[c];
        x[i] /= A[i][i];
    }
}

/* w minimises sum_{i<=t} (w.k_i - v_i)^2 + w'diag(lam) w for value column j. */
static void regress(double *w, mn_sample *s, int64_t t, int64_t j, int64_t K, int64_t V) {
    double A[32][33] = { { 0.0 } };
    for (int64_t i = 0; i <= t; i++) {
        for (int64_t a = 0; a < K; a++) {
            const double k = op_at(s, "k", i * K + a);
            for (int64_t b = 0; b < K; b++) A[a][b] += k * op_at(s, "k", i * K + b);
            A[a][K] += k * op_at(s, "v", i * V + j);
        }
    }
    for (int64_t a = 0; a < K; a++) A[a][a] += op_at(s, "lam", a);
    eliminate(w, A, K);
}

/* With beta = 1 and no decay the output is the prediction of ridge regression at the query. */
static void output_is_the_prediction_of_ridge_regression(void **state) {
    (void)state;
    enum { T = 50, K = 11, V = 3 };
    mn_sample s;
    op_case c = case_of(T, K, V);
    c.fields = 0;
    c.dtype = MN_F64;
    op_open(&s, &c);
    op_fill(&s, "g", 0.0);
    op_fill(&s, "beta", 1.0);
    op_run(op_context("ref", 1), &s, MN_FORWARD, &c);
    for (int64_t t = 0; t < T; t++) {
        for (int64_t j = 0; j < V; j++) {
            double w[K], sum = 0.0;
            regress(w, &s, t, j, K, V);
            for (int64_t i = 0; i < K; i++) sum += 0.7 * op_at(&s, "q", t * K + i) * w[i];
            CHECK(fabs(sum - op_at(&s, "o", t * V + j)) < 1e-11 * (1.0 + fabs(sum)),
                  "token %d column %d: %.15g, should be %.15g", (int)t, (int)j,
                  op_at(&s, "o", t * V + j), sum);
        }
    }
    mn_sample_free(&s);
    check_done();
}

/* ---- all ways to solve ----------------------------------------------------------------------- */

static double decay, ridge, tilt;

/* A constant decay and ridge; channel i of the keys is (i+1)^-tilt as large, which spreads the
 * spectrum of the statistics over that range squared. */
static void set_regime(mn_sample *s) {
    const mn_sample_tensor *k = mn_sample_find(s, "k");
    const int64_t K = ((const mn_call *)s->args)->K;
    op_fill(s, "g", decay);
    if (ridge > 0.0) op_fill(s, "lam", ridge);
    for (int64_t row = 0; tilt > 0.0 && row < k->count; row += K) {
        double sum = 1e-30;
        for (int64_t i = 0; i < K; i++) {
            const double x = mn_sample_get(s, k->data, row + i) * pow((double)i + 1.0, -tilt);
            mn_sample_set(s, k->data, row + i, x);
            sum += x * x;
        }
        for (int64_t i = 0; i < K; i++) {
            mn_sample_set(s, k->data, row + i, mn_sample_get(s, k->data, row + i) / sqrt(sum));
        }
    }
}

static void check_regime(op_case c, double g, double lam, double power) {
    decay = g, ridge = lam, tilt = power;
    op_against_reference(c, set_regime);
}

static void check_hard_regime(op_case c, double g, double lam, double power) {
    decay = g, ridge = lam, tilt = power;
    op_against_rounded_states(c, set_regime, 3);
}

/* Narrow heads are factorised, wide ones iterated for with the inverse of the middle of a chunk or,
 * under strong decay, 1 / lam; both across chunk borders. */
static void every_regime_is_solved(void **state) {
    (void)state;
    static const double decays[] = { 0.0, -0.01, -0.06, -0.7, -5.0 };
    for (size_t i = 0; i < MN_COUNTOF(decays); i++) {
        check_regime(case_of(70, 24, 9), decays[i], 0.0, 0.0);
        check_regime(case_of(70, 48, 17), decays[i], 0.0, 0.0);
        check_regime(case_of(100, 64, 32), decays[i], 0.3, 1.0);
        check_regime(case_of(67, 129, 8), decays[i], 1.0, 0.5);
    }
    check_done();
}

/* Ridges so small that the iteration does not converge: those tokens are factorised. What is left
 * is what float32 loses: the ridge makes x and y as large as 1 / lam in directions without keys,
 * and what a rounding leaves there of their products with keys is amplified as a rounding of the
 * statistics is. So three arrays: the statistics, x and y. */
static void hard_systems_are_solved(void **state) {
    (void)state;
    static const double decays[] = { 0.0, -0.06, -0.7 };
    for (size_t i = 0; i < MN_COUNTOF(decays); i++) {
        check_hard_regime(case_of(100, 64, 16), decays[i], 1e-3, 1.0);
        check_hard_regime(case_of(150, 40, 16), decays[i], 1e-4, 0.0);
        check_hard_regime(case_of(150, 40, 16), decays[i], 1e-2, 2.0);
    }
    check_done();
}

/* Some tokens forget all, write nothing, write a lot or read nothing. */
static void degenerate(mn_sample *s) {
    op_fill_token(s, "g", 10, -1e30);
    op_fill_token(s, "g", 11, -INFINITY);
    op_fill_token(s, "g", 50, -60.0);
    op_fill_token(s, "beta", 0, 0.0);
    op_fill_token(s, "beta", 20, 1e-8);
    op_fill_token(s, "beta", 21, 1e4);
    op_fill_token(s, "k", 30, 0.0);
    op_fill_token(s, "k", 31, 1e-18);
    op_fill_token(s, "q", 12, 0.0);
    op_fill_token(s, "q", 13, 1e-25);
    op_fill_token(s, "q", 14, 1e25);
}

static void degenerate_tokens_are_harmless(void **state) {
    (void)state;
    static const int64_t widths[] = { 1, 12, 50 };
    for (size_t i = 0; i < MN_COUNTOF(widths); i++) {
        op_against_rounded_states(case_of(70, widths[i], 7), degenerate, 3);
    }
    check_done();
}

/* The decay after a token that forgot everything still counts, token by token. */
static void forget_then_fade(mn_sample *s) {
    op_fill(s, "g", -0.4);
    op_fill_token(s, "g", 3, -1e30);
}

static void decay_after_forgetting_counts(void **state) {
    (void)state;
    op_against_reference(case_of(20, 6, 5), forget_then_fade);
    op_against_reference(case_of(20, 40, 5), forget_then_fade);
    check_done();
}

/* ---- long sequences and steps ---------------------------------------------------------------- */

static void long_sequences_stay_accurate(void **state) {
    (void)state;
    op_against_reference(case_of(65536, 3, 2), NULL);
    check_regime(case_of(2100, 36, 4), 0.0, 0.0, 0.0);
    check_done();
}

static void steps_are_the_chunks(void **state) {
    (void)state;
    op_steps_against_reference(case_of(100, 17, 9), NULL);
    op_case c = case_of(45, 48, 16);
    c.B = 2, c.H = 3;
    op_steps_against_reference(c, NULL);
    op_steps_against_reference(case_of(30, 50, 9), forget_then_fade);
    op_steps_against_reference(case_of(12, 136, 20), NULL);
    check_done();
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(output_is_the_prediction_of_ridge_regression),
        cmocka_unit_test(every_regime_is_solved),
        cmocka_unit_test(hard_systems_are_solved),
        cmocka_unit_test(degenerate_tokens_are_harmless),
        cmocka_unit_test(decay_after_forgetting_counts),
        cmocka_unit_test(long_sequences_stay_accurate),
        cmocka_unit_test(steps_are_the_chunks),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
