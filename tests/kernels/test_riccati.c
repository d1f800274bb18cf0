/* test_riccati.c - the covariance pass and the Bayesian Layer: chunks against tokens, positivity
 * over long sequences and many decades, the delta rule as its reset, gradients by differences. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/rng.h"
#include "base/util.h"
#include "kernels/dispatch.h"
#include "ops/run.h"
#include "ops/sample.h"

#define FOR_TARGETS(id) \
    for (int id = 0; id < MN_TARGET_COUNT; id++) \
        if (mn_target_available((mn_target_id)id))

static mn_context *context_of(int target) {
    mn_context *context = NULL;
    const mn_context_options options = { .n_threads = 2,
                                         .target = mn_target_name((mn_target_id)target) };
    assert_int_equal(mn_context_create(&context, &options), MN_OK);
    return context;
}

typedef struct shape {
    mn_op_id op;
    mn_dtype dtype;
    int64_t B, T, H, K, V, G;
    const char *given;    // optional inputs present, each between spaces
} shape;

static mn_sample *sample_of(shape s) {
    mn_sample *sample = calloc(1, sizeof *sample);
    assert_non_null(sample);
    mn_sample_init(sample, s.op);
    mn_call *call = (mn_call *)sample->args;
    call->dtype = s.dtype;
    call->B = s.B, call->T = s.T, call->H = s.H, call->K = s.K, call->V = s.V, call->G = s.G;
    int count;
    const mn_field *fields = mn_op_fields(s.op, &count);
    uint64_t present = 0;
    for (int i = 0; i < count; i++) {
        char name[32];
        snprintf(name, sizeof name, " %s ", fields[i].name);
        if (strstr(s.given, name)) present |= (uint64_t)1 << i;
    }
    assert_int_equal(mn_sample_allocate(sample, present), MN_OK);
    mn_sample_draw(sample, 11);
    return sample;
}

static void release(mn_sample *sample) {
    assert_true(mn_sample_guards_intact(sample));
    mn_sample_free(sample);
    free(sample);
}

static float *floats(mn_sample *sample, const char *name) {
    mn_sample_tensor *tensor = mn_sample_find(sample, name);
    assert_non_null(tensor);
    assert_non_null(tensor->data);
    return tensor->data;
}

/* The inputs and cotangents of `from` (float32), as they are, into `to` (either type). */
static void copy_inputs(mn_sample *to, const mn_sample *from) {
    for (int i = 0; i < from->n_tensors; i++) {
        const mn_sample_tensor *x = &from->tensors[i];
        const bool input = x->field->role <= MN_ROLE_RAW;
        const void *source = input ? x->data : x->partner;
        void *target = input ? to->tensors[i].data : to->tensors[i].partner;
        for (int64_t at = 0; source && at < x->count; at++) {
            mn_sample_set(to, target, at, mn_sample_get(from, source, at));
        }
    }
}

/* rms of the difference over the rms of `want`; 0 for two tensors that are absent or empty */
static double distance(const mn_sample *a, const void *got, const mn_sample *b, const void *want,
                       int64_t count) {
    double error = 0.0, norm = 0.0;
    for (int64_t i = 0; got && want && i < count; i++) {
        const double x = mn_sample_get(a, got, i), y = mn_sample_get(b, want, i);
        if (!isfinite(x)) return INFINITY;
        error += (x - y) * (x - y);
        norm += y * y;
    }
    return norm > 0.0 ? sqrt(error / norm) : sqrt(error);
}

/* Results within `tolerance` of the reference in double, gradients within ten times that. */
static void check_against_reference(shape s, double tolerance) {
    mn_context *reference = context_of(MN_TARGET_REF);
    FOR_TARGETS(id) {
        mn_context *context = context_of(id);
        mn_sample *got = sample_of(s);
        s.dtype = MN_F64;
        mn_sample *want = sample_of(s);
        s.dtype = MN_F32;
        copy_inputs(want, got);
        for (mn_pass pass = MN_FORWARD; pass <= MN_BACKWARD; pass++) {
            assert_int_equal(mn_op_run(context, s.op, pass, got->args), MN_OK);
            assert_int_equal(mn_op_run(reference, s.op, pass, want->args), MN_OK);
        }
        for (int i = 0; i < got->n_tensors; i++) {
            const mn_sample_tensor *x = &got->tensors[i], *y = &want->tensors[i];
            const bool input = x->field->role <= MN_ROLE_RAW;
            const double off = input ? distance(got, x->partner, want, y->partner, x->count)
                                     : distance(got, x->data, want, y->data, x->count);
            if (!(off <= (input ? 10.0 : 1.0) * tolerance)) {
                fail_msg("%s T%d K%d V%d G%d:%s %s%s is off by %.2e",
                         mn_target_name((mn_target_id)id), (int)s.T, (int)s.K, (int)s.V, (int)s.G,
                         s.given, input ? "d" : "", x->field->name, off);
            }
        }
        release(got);
        release(want);
        mn_context_destroy(context);
    }
    mn_context_destroy(reference);
}

/* Sums of at most K + L products of either sign, relative to the covariance in front of the chunk,
 * which 16 writes with r2 around 0.1 shrink by less than a hundred: 100 roundings of 2^-24. */
static const double usual_tolerance = 100 * 0x1p-24;

static void chunks_match_the_reference(void **state) {
    (void)state;
    static const int64_t lengths[] = { 1, 7, 8, 9, 16, 17, 33 };
    static const int64_t widths[] = { 3, 16, 31, 32, 33, 65 };
    for (size_t t = 0; t < MN_COUNTOF(lengths); t++) {
        for (size_t k = 0; k < MN_COUNTOF(widths); k++) {
            const int64_t T = lengths[t], K = widths[k];
            check_against_reference(
                (shape){ MN_OP_riccati, MN_F32, 2, T, 2, K, 0, 2, " q P0 " }, usual_tolerance);
            check_against_reference(
                (shape){ MN_OP_bayes, MN_F32, 1, T, 2, K, 5, 3, " theta M0 P0 " }, usual_tolerance);
        }
    }
    check_against_reference((shape){ MN_OP_bayes, MN_F32, 1, 0, 2, 5, 4, 2, " M0 P0 " }, 1e-7);
    /* spans of chunks, and the states kept in front of them */
    check_against_reference((shape){ MN_OP_bayes, MN_F32, 1, 600, 1, 9, 2, 1, " p0 theta " },
                            usual_tolerance);
    check_against_reference((shape){ MN_OP_bayes, MN_F32, 1, 600, 1, 9, 2, 3, " p0 M0 " },
                            usual_tolerance);
}

/* Angles of any size turn as they do in double. */
static void large_angles(void **state) {
    (void)state;
    FOR_TARGETS(id) {
        mn_context *context = context_of(id);
        const shape s = { MN_OP_bayes, MN_F32, 1, 40, 1, 8, 4, 1, " theta p0 " };
        shape wide = s;
        wide.dtype = MN_F64;
        mn_sample *got = sample_of(s), *want = sample_of(wide);
        mn_sample_tensor *theta = mn_sample_find(got, "theta");
        for (int64_t i = 0; i < theta->count; i++) {
            ((float *)theta->data)[i] *= powf(10.0f, (float)(i % 9));
        }
        copy_inputs(want, got);
        assert_int_equal(mn_op_run(context, s.op, MN_FORWARD, got->args), MN_OK);
        assert_int_equal(mn_op_run(context, s.op, MN_FORWARD, want->args), MN_OK);
        const int64_t count = mn_sample_find(got, "M")->count;
        assert_true(distance(got, floats(got, "M"), want, mn_sample_find(want, "M")->data, count) <
                    usual_tolerance);
        release(got);
        release(want);
        mn_context_destroy(context);
    }
}

/* One call over T tokens against T calls of one token on states in place. */
static void tokens_match_chunks(void **state) {
    (void)state;
    enum { T = 37, H = 2, K = 33, V = 21, G = 2 };
    FOR_TARGETS(id) {
        mn_context *context = context_of(id);
        for (int turns = 0; turns < 2; turns++) {
            const char *given = turns ? " theta M0 P0 " : " M0 P0 ";
            const shape s = { MN_OP_bayes, MN_F32, 1, T, H, K, V, G, given };
            mn_sample *all = sample_of(s), *one = sample_of(s);
            assert_int_equal(mn_op_run(context, s.op, MN_FORWARD, all->args), MN_OK);
            mn_bayes_args *p = (mn_bayes_args *)one->args;
            p->M.data = (void *)p->M0.data, p->P.data = (void *)p->P0.data;
            mn_bayes_args step = *p;
            step.call.T = 1;
            const int64_t R = turns ? 2 * K : K;
            for (int64_t t = 0; t < T; t++) {
#define AT(view, width) step.view.data = (float *)p->view.data + t * H * (width)
                AT(q, K), AT(k, K), AT(v, V), AT(la, K), AT(l2, 1), AT(r2, G);
                AT(o, V), AT(gain, G), AT(gainvec, G * R), AT(kvar, G), AT(qvar, G);
                if (turns) AT(theta, K);
#undef AT
                assert_int_equal(mn_op_bayes(context, &step), MN_OK);
            }
            static const char *const results[] = { "o", "gain", "gainvec", "kvar", "qvar" };
            for (size_t i = 0; i < MN_COUNTOF(results); i++) {
                const mn_sample_tensor *want = mn_sample_find(all, results[i]);
                const float *got = floats(one, results[i]);
                assert_true(distance(one, got, all, want->data, want->count) < usual_tolerance);
            }
            const mn_sample_tensor *P = mn_sample_find(all, "P"), *M = mn_sample_find(all, "M");
            assert_true(distance(one, p->P0.data, all, P->data, P->count) < usual_tolerance);
            assert_true(distance(one, p->M0.data, all, M->data, M->count) < usual_tolerance);
            release(all);
            release(one);
        }
        mn_context_destroy(context);
    }
}

/* Whether P + shift I has a Cholesky factor. Destroys P, n x n. */
static bool positive(double *P, int64_t n, double shift) {
    for (int64_t i = 0; i < n; i++) P[i * (n + 1)] += shift;
    for (int64_t j = 0; j < n; j++) {
        for (int64_t i = j; i < n; i++) {
            double sum = P[i * n + j];
            for (int64_t s = 0; s < j; s++) sum -= P[i * n + s] * P[j * n + s];
            if (i == j && !(sum > 0.0)) return false;
            P[i * n + j] = i == j ? sqrt(sum) : sum / P[j * (n + 1)];
        }
    }
    return true;
}

/* The largest eigenvalue, by powers; from below, so that the test can only become stricter. */
static double largest_eigenvalue(const float *P, int64_t n) {
    double x[128], y[128], value = 0.0;
    for (int64_t i = 0; i < n; i++) x[i] = 1.0 + 0.1 * (double)(i % 7);
    for (int round = 0; round < 60; round++) {
        double norm = 0.0;
        for (int64_t i = 0; i < n; i++) {
            y[i] = 0.0;
            for (int64_t j = 0; j < n; j++) y[i] += P[i * n + j] * x[j];
            norm += y[i] * y[i];
        }
        value = sqrt(norm);
        for (int64_t i = 0; i < n; i++) x[i] = y[i] / (value + 1e-300);
    }
    return value;
}

static void check_covariance(const float *P, int64_t n, const char *what) {
    double *copy = malloc((size_t)(n * n) * sizeof *copy);
    assert_non_null(copy);
    for (int64_t i = 0; i < n * n; i++) {
        assert_true(isfinite(P[i]));
        assert_true(P[i] == P[i % n * n + i / n]);
        copy[i] = P[i];
    }
    if (!positive(copy, n, 1e-6 * largest_eigenvalue(P, n))) fail_msg("%s: P is indefinite", what);
    free(copy);
}

/* How keys are drawn: all directions; four, two of them nearly equal; all close to one. */
typedef enum { RANDOM, FEW, NEAR, N_KINDS } key_kind;

static void draw_keys(float *k, int64_t T, int64_t K, key_kind kind) {
    for (int64_t t = 0; t < T; t++) {
        const uint64_t pick = mn_rng_bits(5, 1, (uint64_t)t) % 4;
        double norm = 0.0;
        for (int64_t i = 0; i < K; i++) {
            double x = mn_rng_normal(5, 2, (uint64_t)(t * K + i));
            if (kind == NEAR) x = mn_rng_normal(5, 3, (uint64_t)i) + 3e-3 * x;
            if (kind == FEW) x = mn_rng_normal(5, 4 + (pick == 1 ? 0 : pick), (uint64_t)i);
            if (kind == FEW && pick == 1) x += 1e-3 * mn_rng_normal(5, 9, (uint64_t)i);
            k[t * K + i] = (float)x;
            norm += x * x;
        }
        for (int64_t i = 0; i < K; i++) k[t * K + i] /= (float)sqrt(norm);
    }
}

/* exponents of ten between which l2 and r2 are drawn, token by token */
typedef struct range {
    double l2_from, l2_to, r2_from, r2_to;
    float p0, la;
} range;

static void draw_noises(mn_sample *sample, range r) {
    mn_sample_tensor *l2 = mn_sample_find(sample, "l2"), *r2 = mn_sample_find(sample, "r2");
    mn_sample_tensor *la = mn_sample_find(sample, "la"), *p0 = mn_sample_find(sample, "p0");
    for (int64_t i = 0; i < l2->count; i++) {
        const double u = mn_rng_uniform(6, 1, (uint64_t)i);
        ((float *)l2->data)[i] = (float)pow(10.0, r.l2_from + u * (r.l2_to - r.l2_from));
    }
    for (int64_t i = 0; i < r2->count; i++) {
        const double u = mn_rng_uniform(6, 2, (uint64_t)i);
        ((float *)r2->data)[i] = (float)pow(10.0, r.r2_from + u * (r.r2_to - r.r2_from));
    }
    for (int64_t i = 0; i < la->count; i++) ((float *)la->data)[i] = r.la;
    for (int64_t i = 0; i < p0->count; i++) ((float *)p0->data)[i] = r.p0;
}

/* 0 <= gain <= 1, and variances that are numbers and not negative */
static void check_gains(mn_sample *sample, int64_t T, const char *what) {
    for (int64_t t = 0; t < T; t++) {
        const float gain = floats(sample, "gain")[t], kvar = floats(sample, "kvar")[t];
        const float qvar = floats(sample, "qvar")[t];
        if (!(gain >= 0.0f && gain <= 1.0f && kvar >= 0.0f && isfinite(kvar) && qvar >= 0.0f)) {
            fail_msg("%s: gain %g kvar %g qvar %g at token %d", what, gain, kvar, qvar, (int)t);
        }
    }
}

static void check_gradients_finite(const mn_sample *sample, const char *what) {
    for (int i = 0; i < sample->n_tensors; i++) {
        const mn_sample_tensor *x = &sample->tensors[i];
        const bool input = x->field->role <= MN_ROLE_RAW && x->data;
        for (int64_t at = 0; input && at < x->count; at++) {
            if (!isfinite(((float *)x->partner)[at])) {
                fail_msg("%s: d%s is not finite", what, x->field->name);
            }
        }
    }
}

/* Writes T tokens and looks at P, the gains and, if asked, the gradients. */
static void check_stays_positive(int64_t T, range r, bool turns, bool gradients) {
    enum { K = 12 };
    const shape s = { MN_OP_riccati, MN_F32, 1, T, 1, K, 0, 1, turns ? " q theta p0 " : " q p0 " };
    for (key_kind kind = RANDOM; kind < N_KINDS; kind++) {
        FOR_TARGETS(id) {
            char what[120];
            mn_context *context = context_of(id);
            mn_sample *sample = sample_of(s);
            draw_noises(sample, r);
            draw_keys(floats(sample, "k"), T, K, kind);
            snprintf(what, sizeof what,
                     "%s keys %d l2 1e%g..1e%g r2 1e%g..1e%g p0 %g la %g turns %d",
                     mn_target_name((mn_target_id)id), (int)kind, r.l2_from, r.l2_to, r.r2_from,
                     r.r2_to, r.p0, r.la, turns);
            assert_int_equal(mn_op_run(context, s.op, MN_FORWARD, sample->args), MN_OK);
            check_covariance(floats(sample, "P"), turns ? 2 * K : K, what);
            check_gains(sample, T, what);
            if (gradients) {
                assert_int_equal(mn_op_run(context, s.op, MN_BACKWARD, sample->args), MN_OK);
                check_gradients_finite(sample, what);
            }
            release(sample);
            mn_context_destroy(context);
        }
    }
}

/* The same while decoding: P goes through float32 after each token. */
static void check_steps_stay_positive(int64_t T, range r) {
    enum { K = 12 };
    const shape s = { MN_OP_riccati, MN_F32, 1, T, 1, K, 0, 1, " q P0 p0 " };
    for (key_kind kind = RANDOM; kind < N_KINDS; kind++) {
        FOR_TARGETS(id) {
            mn_context *context = context_of(id);
            mn_sample *sample = sample_of(s);
            float P[K * K] = { 0 };
            draw_noises(sample, r);
            draw_keys(floats(sample, "k"), T, K, kind);
            for (int64_t i = 0; i < K; i++) P[i * (K + 1)] = r.p0;
            mn_riccati_args step = *(mn_riccati_args *)sample->args;
            step.call.T = 1;
            step.P0.data = step.P.data = P;
            for (int64_t t = 0; t < T; t++) {
                step.q.data = floats(sample, "q") + t * K;
                step.k.data = floats(sample, "k") + t * K;
                step.la.data = floats(sample, "la") + t * K;
                step.l2.data = floats(sample, "l2") + t;
                step.r2.data = floats(sample, "r2") + t;
                assert_int_equal(mn_op_riccati(context, &step), MN_OK);
                const float gain = *(float *)step.gain.data;
                if (!(gain >= 0.0f && gain <= 1.0f)) {
                    fail_msg("%s keys %d token %d: gain %g", mn_target_name((mn_target_id)id),
                             (int)kind, (int)t, gain);
                }
                if (t % 64 == 0) check_covariance(P, K, "steps");
            }
            check_covariance(P, K, "steps");
            release(sample);
            mn_context_destroy(context);
        }
    }
}

static void decoding_stays_positive(void **state) {
    (void)state;
    check_steps_stay_positive(8192, (range){ -6, 0, -6, 0, 1.0f, 0.0f });
    check_steps_stay_positive(2048, (range){ 0, 0, -6, -6, 1.0f, 0.0f });
    check_steps_stay_positive(2048, (range){ -6, -6, -6, -6, 1e6f, 0.0f });
    check_steps_stay_positive(2048, (range){ -12, 0, -12, 0, 1.0f, -1e-3f });
}

static void long_sequences_stay_positive(void **state) {
    (void)state;
    static const range ranges[] = {
        { -6, 0, -6, 0, 1.0f, 0.0f }, { -6, -6, -6, -6, 1.0f, 0.0f },
        { 0, 0, -6, -6, 1.0f, 0.0f }, { -6, -6, 0, 0, 1.0f, 0.0f },
        { 0, 0, 0, 0, 1.0f, 0.0f },   { -3, -3, -6, -6, 1.0f, -1e-3f },
    };
    for (size_t i = 0; i < MN_COUNTOF(ranges); i++) {
        check_stays_positive(16384, ranges[i], i % 2 == 1, false);
    }
}

static void twelve_decades_stay_finite(void **state) {
    (void)state;
    static const range ranges[] = {
        { -6, -6, -6, -6, 1e6f, 0.0f },  { -6, 0, -6, 0, 1e6f, -1e-3f },
        { -12, 0, -12, 0, 1.0f, 0.0f },  { -12, -12, -12, -12, 1.0f, 0 },
        { 0, 0, -12, -12, 1.0f, -0.1f }, { -12, -12, 0, 0, 1.0f, 0.0f },
    };
    for (size_t i = 0; i < MN_COUNTOF(ranges); i++) {
        check_stays_positive(1024, ranges[i], false, true);
        check_stays_positive(256, ranges[i], true, true);
    }
}

/* A covariance that is set back to c I before each token makes the layer the delta rule, with
 * beta = (c + l2) / (r2 + (c + l2) |k|^2). */
static void reset_covariance_is_the_delta_rule(void **state) {
    (void)state;
    enum { T = 12, K = 9, V = 5 };
    static const float c = 0.7f;
    FOR_TARGETS(id) {
        mn_context *context = context_of(id);
        mn_sample *bayes = sample_of((shape){ MN_OP_bayes, MN_F32, 1, T, 1, K, V, 1, " M0 P0 " });
        mn_sample *delta = sample_of((shape){ MN_OP_delta_net, MN_F32, 1, T, 1, K, V, 1,
                                              " state0 " });
        const mn_bayes_args *p = (const mn_bayes_args *)bayes->args;
        mn_bayes_args step = *p;
        float P[K * K], M[K * V], after[K * K];
        memset(floats(bayes, "la"), 0, T * K * sizeof(float));
        memcpy(M, p->M0.data, sizeof M);
        memcpy(floats(delta, "state0"), p->M0.data, sizeof M);
        memcpy(floats(delta, "q"), p->q.data, T * K * sizeof(float));
        memcpy(floats(delta, "k"), p->k.data, T * K * sizeof(float));
        memcpy(floats(delta, "v"), p->v.data, T * V * sizeof(float));
        step.call.T = 1;
        step.M0.data = step.M.data = M;
        step.P0.data = P;
        step.P.data = after;
        for (int64_t t = 0; t < T; t++) {
            const float *k = (const float *)p->k.data + t * K;
            const float prior = c + ((const float *)p->l2.data)[t];
            const float r2 = ((const float *)p->r2.data)[t];
            float square = 0.0f;
            for (int64_t i = 0; i < K; i++) square += k[i] * k[i];
            floats(delta, "beta")[t] = prior / (r2 + prior * square);
            for (int64_t i = 0; i < K * K; i++) P[i] = i % (K + 1) == 0 ? c : 0.0f;
            step.q.data = (const float *)p->q.data + t * K;
            step.k.data = k;
            step.v.data = (const float *)p->v.data + t * V;
            step.l2.data = (const float *)p->l2.data + t;
            step.r2.data = (const float *)p->r2.data + t;
            step.o.data = (float *)p->o.data + t * V;
            assert_int_equal(mn_op_bayes(context, &step), MN_OK);
        }
        assert_int_equal(mn_op_run(context, delta->op, MN_FORWARD, delta->args), MN_OK);
        assert_true(distance(bayes, M, delta, floats(delta, "state"), K * V) < 1e-6);
        assert_true(distance(bayes, p->o.data, delta, floats(delta, "o"), T * V) < 1e-6);
        release(bayes);
        release(delta);
        mn_context_destroy(context);
    }
}

/* The loss that the cotangents define */
static double loss(mn_context *context, mn_sample *sample) {
    double sum = 0.0;
    assert_int_equal(mn_op_run(context, sample->op, MN_FORWARD, sample->args), MN_OK);
    for (int i = 0; i < sample->n_tensors; i++) {
        const mn_sample_tensor *x = &sample->tensors[i];
        if (x->field->role <= MN_ROLE_RAW || !x->partner) continue;
        for (int64_t at = 0; at < x->count; at++) {
            sum += mn_sample_get(sample, x->data, at) * mn_sample_get(sample, x->partner, at);
        }
    }
    return sum;
}

/* Central differences of the reference in double, along a random direction of each input; P0 moves
 * symmetrically. Truncation is of the order h^2, rounding 1e-16 / h. */
static void check_differences(const char *given) {
    mn_context *context = context_of(MN_TARGET_REF);
    const double h = 1e-5;
    mn_sample *sample = sample_of((shape){ MN_OP_bayes, MN_F64, 2, 5, 2, 3, 5, 2, given });
    assert_int_equal(mn_op_run(context, sample->op, MN_BACKWARD, sample->args), MN_OK);
    for (int i = 0; i < sample->n_tensors; i++) {
        const mn_sample_tensor *x = &sample->tensors[i];
        if (x->field->role > MN_ROLE_RAW || !x->data) continue;
        const bool square = strcmp(x->field->name, "P0") == 0;
        const int64_t R = ((mn_bayes_args *)sample->args)->theta.data ? 6 : 3;
        double *data = x->data, *saved = malloc((size_t)x->count * sizeof *saved);
        double slope = 0.0, f[2];
        assert_non_null(saved);
        memcpy(saved, data, (size_t)x->count * sizeof *saved);
        for (int side = 0; side < 2; side++) {
            for (int64_t at = 0; at < x->count; at++) {
                const int64_t row = at / R % R, col = at % R, block = at / (R * R);
                const int64_t pair = block * R * R + mn_max(row, col) * R + mn_min(row, col);
                const double d = mn_rng_normal(21, (uint64_t)i, (uint64_t)(square ? pair : at));
                const bool decay = x->field->law == MN_LAW_DECAY;    // must stay at most 0
                const double along = d * (decay ? fmin(1.0, -saved[at]) : 1.0);
                data[at] = saved[at] + (side ? h : -h) * along;
                if (side) slope += along * mn_sample_get(sample, x->partner, at);
            }
            f[side] = loss(context, sample);
        }
        memcpy(data, saved, (size_t)x->count * sizeof *saved);
        free(saved);
        const double want = (f[1] - f[0]) / (2.0 * h);
        if (!(fabs(slope - want) <= 1e-6 * (fabs(want) + 1.0))) {
            fail_msg("%s: d%s gives %.9g, differences %.9g", given, x->field->name, slope, want);
        }
    }
    release(sample);
    mn_context_destroy(context);
}

static void gradients_match_differences(void **state) {
    (void)state;
    check_differences(" p0 ");
    check_differences(" theta p0 M0 ");
    check_differences(" M0 P0 ");
    check_differences(" theta M0 P0 ");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(chunks_match_the_reference),
        cmocka_unit_test(large_angles),
        cmocka_unit_test(tokens_match_chunks),
        cmocka_unit_test(long_sequences_stay_positive),
        cmocka_unit_test(decoding_stays_positive),
        cmocka_unit_test(twelve_decades_stay_finite),
        cmocka_unit_test(reset_covariance_is_the_delta_rule),
        cmocka_unit_test(gradients_match_differences),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
