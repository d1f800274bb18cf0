/* test_linear.c - additive and delta in chunk form: decays that cut chunks into segments, columns
 * cut into tiles, spans of chunks that are recomputed on the way back, and the decode step.
 *
 * The judge is the reference in double on the same numbers. Tolerance, relative rms: a chunk sums
 * up to 64 products per element in float32 and meets the state once, and errors of states fade or
 * stay with the state, so outputs lie within a few hundred roundings of 2^-24 (2e-5 leaves a factor
 * of two). Gradients pass two such sums and gradients of decays are differences of running sums
 * over a chunk, hence 1e-4 for all. */
// labels: sanitize
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/rng.h"
#include "base/util.h"
#include "kernels/dispatch.h"
#include "ops/run.h"
#include "ops/sample.h"

typedef struct shape {
    mn_op_id op;
    int decay;
    int64_t B, T, H, K, V;
} shape;

static void set_decay(mn_sample *sample, int decay) {
    if (sample->op == MN_OP_additive) ((mn_additive_args *)sample->args)->decay = decay;
    if (sample->op == MN_OP_delta) ((mn_delta_args *)sample->args)->decay = decay;
}

static mn_sample *make(const shape *s, mn_dtype dtype) {
    mn_sample *sample = calloc(1, sizeof *sample);
    assert_non_null(sample);
    mn_sample_init(sample, s->op);
    mn_call *call = (mn_call *)sample->args;
    *call = (mn_call){ .dtype = dtype, .B = s->B, .T = s->T, .H = s->H, .K = s->K, .V = s->V };
    set_decay(sample, s->decay);
    assert_int_equal(mn_sample_allocate(sample, MN_ALL_FIELDS), MN_OK);
    return sample;
}

static void drop(mn_sample *sample) {
    mn_sample_free(sample);
    free(sample);
}

/* Inputs as they are in `from`, rounded or widened to the type of `to`. */
static void copy_inputs(mn_sample *to, const mn_sample *from) {
    for (int i = 0; i < from->n_tensors; i++) {
        const mn_sample_tensor *a = &from->tensors[i];
        const bool input = a->field->role <= MN_ROLE_RAW;
        const void *source = input ? a->data : a->partner;
        void *target = input ? to->tensors[i].data : to->tensors[i].partner;
        for (int64_t at = 0; source && at < a->count; at++) {
            mn_sample_set(to, target, at, mn_sample_get(from, source, at));
        }
    }
}

/* Log decays of every kind: none, weak, sudden falls of 20, 90 and 1e4, and a long strong one. */
static void harsh_decays(mn_sample *sample) {
    static const double falls[] = { 0, -1e-4, -0.05, -1, -5, -20, -90, -1e4 };
    mn_sample_tensor *g = mn_sample_find(sample, "g");
    for (int64_t i = 0; i < g->count; i++) {
        const double u = mn_rng_uniform(5, 77, (uint64_t)i);
        const size_t pick = u < 0.7 ? (size_t)(u * 4) : (size_t)(u * MN_COUNTOF(falls));
        mn_sample_set(sample, g->data, i, falls[pick]);
    }
}

/* Strong decays in every other chunk of 32 tokens: only those have more than one segment. */
static void alternating_decays(mn_sample *sample) {
    mn_sample_tensor *g = mn_sample_find(sample, "g");
    const mn_call *call = (const mn_call *)sample->args;
    const int64_t row = g->count / (call->B * call->T);
    for (int64_t i = 0; i < g->count; i++) {
        const double u = mn_rng_uniform(5, 78, (uint64_t)i);
        mn_sample_set(sample, g->data, i, -u * (i / row % call->T / 32 % 2 == 0 ? 6 : 0.1));
    }
}

static double relative_rms(const mn_sample *got, const void *x, const mn_sample *want,
                           const void *r, int64_t count) {
    double error = 0, norm = 0;
    for (int64_t i = 0; i < count; i++) {
        const double a = mn_sample_get(got, x, i), b = mn_sample_get(want, r, i);
        error += (a - b) * (a - b);
        norm += b * b;
    }
    return norm > 0 ? sqrt(error / norm) : sqrt(error);
}

/* Every result and gradient of `got` against `want`. */
static void compare(const mn_sample *got, const mn_sample *want, const char *target) {
    for (int i = 0; i < got->n_tensors; i++) {
        const mn_sample_tensor *a = &got->tensors[i], *b = &want->tensors[i];
        const bool input = a->field->role <= MN_ROLE_RAW;
        const void *x = input ? a->partner : a->data, *r = input ? b->partner : b->data;
        if (!x) continue;
        const double error = relative_rms(got, x, want, r, a->count);
        const double limit = input ? 1e-4 : 2e-5;
        if (!(error <= limit)) {
            const mn_call *c = (const mn_call *)got->args;
            fail_msg("%s: %s%s of T %ld K %ld V %ld H %ld: %.2e > %.0e", target, input ? "d" : "",
                     a->field->name, (long)c->T, (long)c->K, (long)c->V, (long)c->H, error, limit);
        }
    }
    assert_true(mn_sample_guards_intact(got));
}

static void run_both(mn_context *context, mn_sample *sample) {
    assert_int_equal(mn_op_run(context, sample->op, MN_FORWARD, sample->args), MN_OK);
    assert_int_equal(mn_op_run(context, sample->op, MN_BACKWARD, sample->args), MN_OK);
}

static void check_shape(const shape *s, int n_threads, void (*decays)(mn_sample *)) {
    mn_sample *fast = make(s, MN_F32), *exact = make(s, MN_F64);
    mn_sample_draw(fast, 11);
    if (decays && s->decay != MN_DECAY_NONE) decays(fast);
    copy_inputs(exact, fast);
    for (int id = MN_TARGET_REF; id < MN_TARGET_COUNT; id++) {
        if (!mn_target_available((mn_target_id)id)) continue;
        const mn_context_options options = { .n_threads = n_threads,
                                             .target = mn_target_name((mn_target_id)id) };
        mn_context *context = NULL;
        assert_int_equal(mn_context_create(&context, &options), MN_OK);
        if (id == MN_TARGET_REF) {
            run_both(context, exact);
        } else {
            run_both(context, fast);
            compare(fast, exact, options.target);
        }
        mn_context_destroy(context);
    }
    drop(fast);
    drop(exact);
}

static void harsh_decays_are_exact(void **state) {
    (void)state;
    static const int64_t lengths[] = { 1, 31, 32, 33, 100 };
    static const mn_op_id ops[] = { MN_OP_additive, MN_OP_delta };
    for (size_t o = 0; o < MN_COUNTOF(ops); o++) {
        for (int decay = MN_DECAY_HEAD; decay <= MN_DECAY_CHANNEL; decay++) {
            for (size_t t = 0; t < MN_COUNTOF(lengths); t++) {
                check_shape(&(shape){ ops[o], decay, 2, lengths[t], 2, 17, 19 }, 2,
                            harsh_decays);
            }
        }
    }
}

/* One or two heads: columns are cut into tiles and their parts of the key gradients are joined. */
static void column_tiles_join(void **state) {
    (void)state;
    static const int64_t values[] = { 31, 32, 63, 64, 65, 100, 128, 160, 512 };
    for (size_t i = 0; i < MN_COUNTOF(values); i++) {
        const int decay = (int)(i % 4);
        check_shape(&(shape){ MN_OP_delta, decay, 1, 70, 1, 24, values[i] }, 2, NULL);
        check_shape(&(shape){ MN_OP_additive, decay, 1, 70, 3, 24, values[i] }, 2, NULL);
    }
}

/* Tiles share the prepared chunks, but the columns of a chunk of several segments are a tile's own.
 * One thread: what a tile leaves in the shared ones, the next would read. */
static void tiles_have_their_own_segments(void **state) {
    (void)state;
    static const mn_op_id ops[] = { MN_OP_additive, MN_OP_delta };
    for (size_t o = 0; o < MN_COUNTOF(ops); o++) {
        for (int decay = MN_DECAY_TOKEN; decay <= MN_DECAY_CHANNEL; decay++) {
            for (int n_threads = 1; n_threads <= 2; n_threads++) {
                check_shape(&(shape){ ops[o], decay, 1, 40, 1, 64, 64 }, n_threads,
                            alternating_decays);
                check_shape(&(shape){ ops[o], decay, 2, 150, 2, 24, 160 }, n_threads,
                            alternating_decays);
            }
        }
    }
}

/* 256 x 512 over enough chunks that states are kept per span and replayed. */
static void spans_replay(void **state) {
    (void)state;
    check_shape(&(shape){ MN_OP_delta, MN_DECAY_TOKEN, 1, 1200, 1, 256, 512 }, 2, NULL);
    check_shape(&(shape){ MN_OP_additive, MN_DECAY_CHANNEL, 1, 1200, 1, 256, 512 }, 2, NULL);
}

/* T calls with one token each, state in place, against one call. */
static void check_steps(mn_context *context, const shape *s) {
    mn_sample *whole = make(s, MN_F32),
              *one = make(&(shape){ s->op, s->decay, s->B, 1, s->H, s->K, s->V }, MN_F32);
    mn_sample_draw(whole, 3);
    assert_int_equal(mn_op_run(context, s->op, MN_FORWARD, whole->args), MN_OK);
    mn_sample_tensor *state = mn_sample_find(one, "state"), *first = mn_sample_find(one, "state0");
    memcpy(state->data, mn_sample_find(whole, "state0")->data,
           (size_t)state->count * sizeof(float));
    ((mn_in *)(one->args + first->field->offset))->data = state->data;
    const mn_sample_tensor *all = mn_sample_find(whole, "o"), *o = mn_sample_find(one, "o");
    double error = 0, norm = 0;
    for (int64_t t = 0; t < s->T; t++) {
        for (int i = 0; i < one->n_tensors; i++) {
            mn_sample_tensor *x = &one->tensors[i];
            if (!x->data || x->field->role > MN_ROLE_RAW || x == first) continue;
            const float *from = whole->tensors[i].data;
            const bool timed = strchr(x->axes, 'T') != NULL;
            const int64_t n_rows = timed ? s->B : 1, row = x->count / n_rows;
            for (int64_t b = 0; b < n_rows; b++) {
                const int64_t at = timed ? (b * s->T + t) * row : 0;
                memcpy((float *)x->data + b * row, from + at, (size_t)row * sizeof(float));
            }
        }
        assert_int_equal(mn_op_run(context, s->op, MN_FORWARD, one->args), MN_OK);
        const int64_t row = o->count / s->B;
        for (int64_t i = 0; i < o->count; i++) {
            const double b = ((float *)all->data)[(i / row * s->T + t) * row + i % row];
            const double d = ((float *)o->data)[i] - b;
            error += d * d;
            norm += b * b;
        }
    }
    assert_true(sqrt(error / norm) <= 2e-5);
    assert_true(relative_rms(one, state->data, whole, mn_sample_find(whole, "state")->data,
                             state->count) <= 2e-5);
    drop(whole);
    drop(one);
}

static void steps_equal_chunks(void **state) {
    (void)state;
    for (int id = 0; id < MN_TARGET_COUNT; id++) {
        if (!mn_target_available((mn_target_id)id)) continue;
        const mn_context_options options = { .n_threads = 2,
                                             .target = mn_target_name((mn_target_id)id) };
        mn_context *context = NULL;
        assert_int_equal(mn_context_create(&context, &options), MN_OK);
        for (int decay = 0; decay <= MN_DECAY_CHANNEL; decay++) {
            check_steps(context, &(shape){ MN_OP_additive, decay, 2, 70, 3, 20, 37 });
            check_steps(context, &(shape){ MN_OP_delta, decay, 2, 70, 3, 33, 200 });
        }
        mn_context_destroy(context);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(harsh_decays_are_exact),
        cmocka_unit_test(column_tiles_join),
        cmocka_unit_test(tiles_have_their_own_segments),
        cmocka_unit_test(spans_replay),
        cmocka_unit_test(steps_equal_chunks),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
