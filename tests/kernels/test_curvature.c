/* test_curvature.c - the curvature-conditioned query: its definition, its bounds, its statistics
 * over long and interrupted sequences. Sizes, gradients and bits are walked by test_ops_*.c. */
#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/status.h"
#include "base/util.h"
#include "support/op_against.h"

static op_case case_of(int64_t T, int64_t K) {
    return (op_case){ .op = MN_OP_curvature,
                      .fields = MN_ALL_FIELDS,
                      .B = 1,
                      .T = T,
                      .H = 1,
                      .K = K,
                      .V = 1,
                      .seed = (uint64_t)(T + K) };
}

/* No statistics before the first token. */
static op_case fresh_case_of(int64_t T, int64_t K) {
    op_case c = case_of(T, K);
    c.fields = 0;
    return c;
}

/* ---- the definition -------------------------------------------------------------------------- */

/* out = q - gamma C q with C = (1/n) sum (k_i - mean)(k_i - mean)', from the n keys up to token
 * t. */
static void contract_centred(double *out, mn_sample *s, int64_t t, int64_t K) {
    double mean[64] = { 0.0 };
    const double n = (double)t + 1.0, gamma = op_at(s, "gamma", t);
    for (int64_t i = 0; i <= t; i++) {
        for (int64_t j = 0; j < K; j++) mean[j] += op_at(s, "k", i * K + j) / n;
    }
    for (int64_t j = 0; j < K; j++) out[j] = op_at(s, "q", t * K + j);
    for (int64_t i = 0; i <= t; i++) {
        double product = 0.0;
        for (int64_t j = 0; j < K; j++) {
            product += (op_at(s, "k", i * K + j) - mean[j]) * op_at(s, "q", t * K + j);
        }
        for (int64_t j = 0; j < K; j++) {
            out[j] -= gamma / n * (op_at(s, "k", i * K + j) - mean[j]) * product;
        }
    }
}

static void query_is_contracted_by_the_covariance(void **state) {
    (void)state;
    enum { T = 70, K = 13 };
    mn_sample s;
    op_case c = fresh_case_of(T, K);
    c.dtype = MN_F64;
    op_open(&s, &c);
    op_run(op_context("ref", 1), &s, MN_FORWARD, &c);
    for (int64_t t = 0; t < T; t++) {
        double want[K];
        contract_centred(want, &s, t, K);
        for (int64_t j = 0; j < K; j++) {
            CHECK(fabs(op_at(&s, "qt", t * K + j) - want[j]) < 1e-13, "token %d channel %d", (int)t,
                  (int)j);
        }
    }
    mn_sample_free(&s);
    check_done();
}

/* ---- bounds ---------------------------------------------------------------------------------- */

/* Roundings between exact and computed qt, relative to gamma |q|, for unit keys: the moment of n
 * keys is a sum over at most `chunks` chunks of 32 keys, its product with q has K terms, the part
 * inside the chunk 32 + K, the mean as many again. Each of these steps rounds numbers whose norm is
 * at most |q|. */
static double slack(int64_t T, int64_t K) {
    return ((double)T / 32.0 + 2.0 * (double)K + 100.0) * FLT_EPSILON;
}

/* |qt| <= |q| and q.qt >= (1 - gamma) |q|^2: the spectrum of I - gamma C lies in [1 - gamma, 1]. */
static void check_bounds(const char *target, op_case c) {
    mn_sample s;
    op_open(&s, &c);
    op_run(op_context(target, 2), &s, MN_FORWARD, &c);
    const double more = slack(c.T, c.K);
    for (int64_t t = 0; t < c.T; t++) {
        double q2 = 0.0, qt2 = 0.0, product = 0.0;
        for (int64_t j = 0; j < c.K; j++) {
            const double q = op_at(&s, "q", t * c.K + j), qt = op_at(&s, "qt", t * c.K + j);
            q2 += q * q, qt2 += qt * qt, product += q * qt;
        }
        const double gamma = op_at(&s, "gamma", t);
        CHECK(sqrt(qt2) <= sqrt(q2) * (1.0 + gamma * more), "%s: token %d grew by %.3e", target,
              (int)t, sqrt(qt2 / q2) - 1.0);
        CHECK(product >= q2 * (1.0 - gamma - gamma * more),
              "%s: token %d, 1 - q.qt / q.q is %.9g of %.9g", target, (int)t, 1.0 - product / q2,
              gamma);
    }
    mn_sample_free(&s);
}

static void spectrum_stays_in_its_interval(void **state) {
    (void)state;
    static const int64_t sizes[][2] = {
        { 1, 5 }, { 40, 1 }, { 200, 3 }, { 130, 64 }, { 3000, 17 }
    };
    op_target targets[MN_TARGET_COUNT + 1];
    const int n_targets = op_targets(targets);
    for (int i = 0; i < n_targets; i++) {
        for (size_t j = 0; j < MN_COUNTOF(sizes); j++) {
            op_case c = fresh_case_of(sizes[j][0], sizes[j][1]);
            c.dtype = targets[i].dtype;
            check_bounds(targets[i].name, c);
        }
    }
    check_done();
}

/* All keys are the first one: nothing varies, the query stays. */
static void repeat_first_key(mn_sample *s) {
    const mn_sample_tensor *k = mn_sample_find(s, "k");
    const int64_t K = ((const mn_call *)s->args)->K;
    for (int64_t i = K; i < k->count; i++) {
        mn_sample_set(s, k->data, i, mn_sample_get(s, k->data, i % K));
    }
}

static void repeated_keys_leave_the_query(void **state) {
    (void)state;
    op_target targets[MN_TARGET_COUNT + 1];
    const int n_targets = op_targets(targets);
    for (int i = 0; i < n_targets; i++) {
        mn_sample s;
        op_case c = fresh_case_of(150, 33);
        c.dtype = targets[i].dtype;
        op_open(&s, &c);
        repeat_first_key(&s);
        op_run(op_context(targets[i].name, 1), &s, MN_FORWARD, &c);
        for (int64_t t = 0; t < c.T; t++) {
            double size = 0.0, off = 0.0;
            for (int64_t j = 0; j < c.K; j++) {
                const double q = op_at(&s, "q", t * c.K + j);
                size += q * q;
                off += (op_at(&s, "qt", t * c.K + j) - q) * (op_at(&s, "qt", t * c.K + j) - q);
            }
            CHECK(sqrt(off) <= slack(c.T, c.K) * sqrt(size), "%s: token %d moved by %.3e",
                  targets[i].name, (int)t, sqrt(off / size));
        }
        mn_sample_free(&s);
    }
    op_case c = fresh_case_of(150, 33);
    op_against_reference(c, repeat_first_key);
    check_done();
}

/* ---- long and interrupted sequences ---------------------------------------------------------- */

static void long_sequences_stay_accurate(void **state) {
    (void)state;
    op_against_reference(fresh_case_of(65536, 6), NULL);
    op_against_reference(case_of(65536, 3), NULL);
    check_done();
}

static void steps_are_the_chunks(void **state) {
    (void)state;
    op_steps_against_reference(case_of(100, 17), NULL);
    op_case c = case_of(45, 64);
    c.B = 2, c.H = 3;
    op_steps_against_reference(c, NULL);
    check_done();
}

/* Zero keys, zero queries, gates at both ends. */
static void degenerate(mn_sample *s) {
    op_fill_token(s, "k", 0, 0.0);
    op_fill_token(s, "k", 40, 0.0);
    op_fill_token(s, "k", 41, 1e-20);
    op_fill_token(s, "q", 3, 0.0);
    op_fill_token(s, "gamma", 5, 0.0);
    op_fill_token(s, "gamma", 6, 1.0);
}

static void degenerate_tokens_are_harmless(void **state) {
    (void)state;
    op_against_reference(fresh_case_of(70, 9), degenerate);
    check_done();
}

/* Two sequences in a pack that go on after 3 and 11 tokens, given by counts0, are those with n0. */
static void counts_may_differ_in_a_pack(void **state) {
    (void)state;
    static const int64_t cu[] = { 0, 33, 90 }, counts[] = { 3, 11 };
    op_target targets[MN_TARGET_COUNT + 1];
    const int n_targets = op_targets(targets);
    for (int i = 0; i < n_targets; i++) {
        op_case c = case_of(90, 12);
        c.dtype = targets[i].dtype;
        c.cu_seqlens = cu, c.n_seqs = 2;
        mn_sample packed;
        op_open(&packed, &c);
        ((mn_curvature_args *)packed.args)->counts0 = counts;
        op_run_both(op_context(targets[i].name, 2), &packed, &c);
        for (int64_t n = 0; n < 2; n++) {
            op_case alone = c;
            alone.cu_seqlens = NULL, alone.n_seqs = 0, alone.T = cu[n + 1] - cu[n];
            mn_sample one, part;
            op_open(&one, &alone);
            op_open(&part, &alone);
            op_copy_tokens(&one, 0, &packed, cu[n], alone.T, OP_GIVEN);
            op_copy_states(&one, 0, &packed, n, 1, OP_GIVEN);
            ((mn_curvature_args *)one.args)->n0 = counts[n];
            op_run_both(op_context(targets[i].name, 2), &one, &alone);
            op_copy_tokens(&part, 0, &packed, cu[n], alone.T, OP_COMPUTED);
            const mn_sample_tensor *a = mn_sample_find(&one, "qt"),
                                   *b = mn_sample_find(&part, "qt");
            const mn_sample_tensor *da = mn_sample_find(&one, "k"),
                                   *db = mn_sample_find(&part, "k");
            const size_t size = c.dtype == MN_F64 ? sizeof(double) : sizeof(float);
            CHECK(memcmp(a->data, b->data, (size_t)a->count * size) == 0, "%s: qt of sequence %d",
                  targets[i].name, (int)n);
            CHECK(memcmp(da->partner, db->partner, (size_t)da->count * size) == 0,
                  "%s: dk of sequence %d", targets[i].name, (int)n);
            mn_sample_free(&one);
            mn_sample_free(&part);
        }
        mn_sample_free(&packed);
    }
    check_done();
}

static void negative_counts_are_refused(void **state) {
    (void)state;
    static const int64_t counts[] = { -1 };
    mn_sample s;
    op_case c = case_of(4, 3);
    op_open(&s, &c);
    mn_curvature_args *p = (mn_curvature_args *)s.args;
    p->n0 = -1;
    assert_int_equal(mn_op_curvature(op_context("ref", 1), p), MN_ERR_ARGUMENT);
    assert_non_null(strstr(mn_last_error(), "n0 is -1"));
    p->n0 = 0;
    p->counts0 = counts;
    assert_int_equal(mn_op_curvature(op_context("ref", 1), p), MN_ERR_ARGUMENT);
    assert_non_null(strstr(mn_last_error(), "counts0[0]"));
    mn_sample_free(&s);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(query_is_contracted_by_the_covariance),
        cmocka_unit_test(spectrum_stays_in_its_interval),
        cmocka_unit_test(repeated_keys_leave_the_query),
        cmocka_unit_test(long_sequences_stay_accurate),
        cmocka_unit_test(steps_are_the_chunks),
        cmocka_unit_test(degenerate_tokens_are_harmless),
        cmocka_unit_test(counts_may_differ_in_a_pack),
        cmocka_unit_test(negative_counts_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
