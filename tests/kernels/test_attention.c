/* test_attention.c - attention and relu_attention beyond what the walks over the table reach: sizes
 * around blocks of queries and keys, groups of heads, caches, decoding, positions and large scores.
 *
 * Tolerances, relative rms, float32 against float64: a score is a sum of K products, so it is off
 * by some 2^-24 sqrt(K) |z|, with |z| up to about 5 here; its exponential inherits that as a
 * relative error of 1e-6, and outputs average such errors. Gradients pass two more sums. 5e-6 and
 * 2e-5. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/dtype.h"
#include "base/util.h"
#include "support/close.h"
#include "support/op_against.h"
#include "support/op_walk.h"

typedef struct shape {
    mn_op_id op;
    int rope;                            // rope_kind of attention
    int64_t B, T, H, J, K, V, L;         // L 0: T
} shape;

static const char *shape_text(const shape *s) {
    static char text[160];
    snprintf(text, sizeof text, "%s rope %d B=%d T=%d H=%d J=%d K=%d V=%d L=%d",
             mn_op_describe(s->op)->name, s->rope, (int)s->B, (int)s->T, (int)s->H, (int)s->J,
             (int)s->K, (int)s->V, (int)s->L);
    return text;
}

static mn_sample *make(const shape *s, mn_dtype dtype, uint64_t seed) {
    mn_sample *sample = calloc(1, sizeof *sample);
    assert_non_null(sample);
    mn_sample_init(sample, s->op);
    mn_call *call = (mn_call *)sample->args;
    *call = (mn_call){ .dtype = dtype, .B = s->B, .T = s->T, .H = s->H, .J = s->J, .K = s->K,
                       .V = s->V, .L = s->L };
    if (s->op == MN_OP_attention) {
        mn_attention_args *args = (mn_attention_args *)sample->args;
        args->scale = 1.0 / sqrt((double)s->K);
        args->rope_kind = s->rope;
    }
    assert_int_equal(mn_sample_allocate(sample, MN_ALL_FIELDS), MN_OK);
    mn_sample_draw(sample, seed);
    return sample;
}

static void drop(mn_sample *sample) {
    mn_sample_free(sample);
    free(sample);
}

static void run(mn_context *context, mn_sample *sample, bool backward) {
    const mn_pass pass = backward ? MN_BACKWARD : MN_FORWARD;
    if (mn_op_run(context, sample->op, pass, sample->args) != MN_OK)
        check_fatal("%s", mn_last_error());
    CHECK(mn_sample_guards_intact(sample), "memory around a result was overwritten");
}

static double tolerance(const op_target *target, bool gradients) {
    if (target->dtype == MN_F64) return 1e-13;
    return gradients ? 2e-5 : 5e-6;
}

/* The sample in float64, of the numbers that the float32 sample of the same seed has. */
static mn_sample *widened(const shape *s, uint64_t seed) {
    mn_sample *f32 = make(s, MN_F32, seed), *f64 = make(s, MN_F64, seed);
    op_convert(f64, f32);
    drop(f32);
    return f64;
}

#define EACH_TARGET(target)                                                                        \
    op_target targets[MN_TARGET_COUNT + 1];                                                        \
    const int n_targets = op_targets(targets);                                                     \
    for (const op_target *target = targets; target < targets + n_targets; target++)

/* Around 64 rows of queries, 128 and 256 keys, four lanes and two; groups that fill a block and
 * more; steps with one and several segments of keys. */
static const shape shapes[] = {
    { MN_OP_attention, 0, 1, 127, 1, 1, 8, 5, 0 },
    { MN_OP_attention, 1, 1, 129, 2, 1, 6, 17, 0 },
    { MN_OP_attention, 2, 2, 257, 3, 3, 16, 9, 0 },
    { MN_OP_attention, 0, 1, 400, 4, 2, 33, 31, 0 },
    { MN_OP_attention, 0, 1, 9, 70, 1, 4, 4, 0 },
    { MN_OP_attention, 1, 1, 40, 16, 2, 8, 8, 300 },
    { MN_OP_attention, 0, 1, 100, 1, 1, 4, 3, 8300 },
    { MN_OP_attention, 1, 2, 1, 4, 4, 20, 7, 1 },
    { MN_OP_attention, 1, 2, 1, 4, 4, 20, 7, 3 },
    { MN_OP_attention, 0, 3, 1, 6, 2, 64, 64, 259 },
    { MN_OP_attention, 2, 1, 1, 12, 1, 34, 33, 700 },
    { MN_OP_attention, 0, 1, 1, 8, 2, 7, 70, 1021 },
    { MN_OP_attention, 0, 1, 1, 34, 2, 12, 20, 301 },
    { MN_OP_relu_attention, 0, 1, 129, 2, 1, 6, 17, 0 },
    { MN_OP_relu_attention, 0, 2, 321, 4, 2, 16, 9, 0 },
    { MN_OP_relu_attention, 0, 1, 66, 2, 2, 5, 6, 8250 },
    { MN_OP_relu_attention, 0, 1, 1, 4, 4, 20, 7, 515 },
    { MN_OP_relu_attention, 0, 2, 1, 12, 2, 16, 40, 300 },
};

static void targets_match_reference(void **state) {
    (void)state;
    for (size_t i = 0; i < MN_COUNTOF(shapes); i++) {
        mn_sample *want = widened(&shapes[i], i + 1);
        run(op_context("ref", 2), want, false);
        run(op_context("ref", 2), want, true);
        EACH_TARGET(target) {
            if (target->dtype == MN_F64) continue;
            mn_sample *got = make(&shapes[i], MN_F32, i + 1);
            run(op_context(target->name, 2), got, false);
            run(op_context(target->name, 2), got, true);
            const char *text = shape_text(&shapes[i]);
            check_samples_close(text, target->name, got, want, false, tolerance(target, false));
            check_samples_close(text, target->name, got, want, true, tolerance(target, true));
            drop(got);
        }
        drop(want);
    }
    check_done();
}

/* Query head h reads key-value head floor(h J / H): the same as J = H with the heads repeated, and
 * gradients of a repeated head add up. */
static void groups_share_heads(void **state) {
    (void)state;
    const shape few = { MN_OP_attention, 1, 2, 70, 6, 2, 8, 5, 0 };
    const shape all = { MN_OP_attention, 1, 2, 70, 6, 6, 8, 5, 0 };
    EACH_TARGET(target) {
        mn_sample *a = make(&few, target->dtype, 1), *b = make(&all, target->dtype, 1);
        const size_t bytes = mn_dtype_bytes(target->dtype);
        const mn_sample_tensor *ka = mn_sample_find(a, "k"), *kb = mn_sample_find(b, "k");
        const mn_sample_tensor *va = mn_sample_find(a, "v"), *vb = mn_sample_find(b, "v");
        for (int64_t row = 0; row < 2 * 70; row++) {
            for (int64_t h = 0; h < 6; h++) {
                memcpy((char *)kb->data + (size_t)(row * 6 + h) * 8 * bytes,
                       (char *)ka->data + (size_t)(row * 2 + h / 3) * 8 * bytes, 8 * bytes);
                memcpy((char *)vb->data + (size_t)(row * 6 + h) * 5 * bytes,
                       (char *)va->data + (size_t)(row * 2 + h / 3) * 5 * bytes, 5 * bytes);
            }
        }
        memcpy(mn_sample_find(b, "q")->data, mn_sample_find(a, "q")->data,
               (size_t)mn_sample_find(a, "q")->count * bytes);
        memcpy(mn_sample_find(b, "o")->partner, mn_sample_find(a, "o")->partner,
               (size_t)mn_sample_find(a, "o")->count * bytes);
        mn_context *context = op_context(target->name, 2);
        run(context, a, false), run(context, b, false);
        run(context, a, true), run(context, b, true);
        check_samples_close("groups", target->name, a, b, false, tolerance(target, false));
        for (int64_t i = 0; i < kb->count; i++) {
            const int64_t row = i / 48, h = i / 8 % 6, at = (row * 2 + h / 3) * 8 + i % 8;
            const double rest = mn_sample_get(a, ka->partner, at) -
                                mn_sample_get(b, kb->partner, i);
            mn_sample_set(a, ka->partner, at, rest);
        }
        double left = 0.0, size = 0.0;
        for (int64_t i = 0; i < ka->count; i++) left += pow(mn_sample_get(a, ka->partner, i), 2);
        for (int64_t i = 0; i < kb->count; i++) size += pow(mn_sample_get(b, kb->partner, i), 2);
        CHECK(sqrt(left) <= tolerance(target, true) * sqrt(size), "%s: dk of a group is no sum",
              target->name);
        drop(a);
        drop(b);
    }
    check_done();
}

/* Row t of a whole sequence and of a cache of its keys up to t, decoded token by token; and the
 * rows of T tokens in T + 1. */
static void decoding_is_the_whole(void **state) {
    (void)state;
    static const shape whole[] = { { MN_OP_attention, 0, 1, 300, 4, 2, 16, 8, 0 },
                                   { MN_OP_attention, 1, 1, 150, 2, 2, 10, 19, 0 },
                                   { MN_OP_relu_attention, 0, 1, 290, 3, 1, 9, 33, 0 } };
    for (size_t i = 0; i < MN_COUNTOF(whole); i++) {
        EACH_TARGET(target) {
            const shape *s = &whole[i];
            mn_context *context = op_context(target->name, 2);
            mn_sample *all = make(s, target->dtype, 3), *one = make(s, target->dtype, 3);
            mn_sample_tensor *o_all = mn_sample_find(all, "o"), *o_one = mn_sample_find(one, "o");
            run(context, all, false);
            const size_t bytes = mn_dtype_bytes(target->dtype);
            const int64_t q_row = s->H * s->K, o_row = s->H * s->V;
            mn_call *call = (mn_call *)one->args;
            mn_attention_args *args = (mn_attention_args *)one->args;
            mn_relu_attention_args *relu = (mn_relu_attention_args *)one->args;
            const bool softmax = s->op == MN_OP_attention;
            mn_in *q = softmax ? &args->q : &relu->q;
            mn_out *o = softmax ? &args->o : &relu->o;
            for (int64_t t = 0; t < s->T; t += t < 4 ? 1 : 29) {
                call->T = 1;
                call->L = t + 1;
                q->data = (char *)mn_sample_find(one, "q")->data + (size_t)(t * q_row) * bytes;
                o->data = (char *)o_one->data + (size_t)(t * o_row) * bytes;
                run(context, one, false);
                check_close("decoded row", target->name, one, o->data, all,
                            (char *)o_all->data + (size_t)(t * o_row) * bytes, o_row,
                            tolerance(target, false));
            }
            q->data = mn_sample_find(one, "q")->data;
            o->data = o_one->data;
            call->T = call->L = s->T - 1;
            run(context, one, false);
            check_close("prefix", target->name, one, o->data, all, o_all->data,
                        (s->T - 1) * o_row, tolerance(target, false));
            drop(all);
            drop(one);
        }
    }
    check_done();
}

/* Positions inside attention are those of the rope operator outside. */
static void rope_inside_is_rope_outside(void **state) {
    (void)state;
    EACH_TARGET(target) {
        for (int kind = 1; kind <= 2; kind++) {
            const shape inside = { MN_OP_attention, kind, 1, 200, 2, 2, 12, 5, 0 };
            const shape outside = { MN_OP_attention, 0, 1, 200, 2, 2, 12, 5, 0 };
            mn_context *context = op_context(target->name, 2);
            mn_sample *a = make(&inside, target->dtype, 5), *b = make(&outside, target->dtype, 5);
            const char *names[] = { "q", "k" };
            for (int i = 0; i < 2; i++) {
                mn_sample_tensor *x = mn_sample_find(b, names[i]);
                mn_rope_args rope = { .call = *(mn_call *)b->args, .kind = kind - 1, .base = 10000,
                                      .x = { .data = mn_sample_find(a, names[i])->data },
                                      .y = { .data = x->data } };
                assert_int_equal(mn_op_rope(context, &rope), MN_OK);
            }
            run(context, a, false), run(context, b, false);
            run(context, a, true), run(context, b, true);
            for (int i = 0; i < 2; i++) {
                mn_sample_tensor *dx = mn_sample_find(b, names[i]);
                mn_rope_args rope = { .call = *(mn_call *)b->args, .kind = kind - 1, .base = 10000,
                                      .x = { .data = dx->data }, .cot.y = { .data = dx->partner },
                                      .grad.x = { .data = dx->data } };
                assert_int_equal(mn_op_rope_backward(context, &rope), MN_OK);
                memcpy(dx->partner, dx->data, (size_t)dx->count * mn_dtype_bytes(target->dtype));
            }
            check_samples_close("rope", target->name, a, b, false, tolerance(target, false));
            check_samples_close("rope", target->name, a, b, true, tolerance(target, true));
            drop(a);
            drop(b);
        }
    }
    check_done();
}

/* lse of a row is the log of the sum of e^z over the keys that it sees. */
static void lse_is_what_it_says(void **state) {
    (void)state;
    EACH_TARGET(target) {
        const shape s = { MN_OP_attention, 0, 2, 9, 4, 2, 5, 3, 12 };
        mn_sample *a = make(&s, target->dtype, 11);
        const void *q = mn_sample_find(a, "q")->data, *k = mn_sample_find(a, "k")->data;
        const mn_sample_tensor *lse = mn_sample_find(a, "lse");
        run(op_context(target->name, 2), a, false);
        for (int64_t i = 0; i < lse->count; i++) {
            const int64_t h = i % s.H, t = i / s.H % s.T, b = i / s.H / s.T;
            double sum = 0.0;
            for (int64_t key = 0; key <= s.L - s.T + t; key++) {
                double z = 0.0;
                for (int64_t c = 0; c < s.K; c++) {
                    const int64_t at = (b * s.L + key) * s.J + h * s.J / s.H;
                    z += mn_sample_get(a, q, i * s.K + c) * mn_sample_get(a, k, at * s.K + c);
                }
                sum += exp(z / sqrt((double)s.K));
            }
            const double got = mn_sample_get(a, lse->data, i);
            CHECK(fabs(got - log(sum)) <= tolerance(target, false) * (1.0 + fabs(log(sum))),
                  "%s: lse of token %d, head %d is %.9g, not %.9g", target->name, (int)t, (int)h,
                  got, log(sum));
        }
        drop(a);
    }
    check_done();
}

/* Scores of many hundred, as training runs have them before they are lost: weights are then 0 and
 * 1, outputs are values, and nothing is infinite. */
static void large_scores_stay_finite(void **state) {
    (void)state;
    EACH_TARGET(target) {
        for (int64_t tokens = 1; tokens <= 150; tokens += 149) {
            const shape s = { MN_OP_attention, 0, 1, tokens, 2, 2, 16, 6, 150 };
            mn_sample *a = make(&s, target->dtype, 7);
            mn_sample_tensor *q = mn_sample_find(a, "q"), *v = mn_sample_find(a, "v");
            for (int64_t i = 0; i < q->count; i++) {
                mn_sample_set(a, q->data, i, 1000.0 * mn_sample_get(a, q->data, i));
            }
            double largest = 0.0;
            for (int64_t i = 0; i < v->count; i++)
                largest = fmax(largest, fabs(mn_sample_get(a, v->data, i)));
            run(op_context(target->name, 2), a, false);
            run(op_context(target->name, 2), a, true);
            const mn_sample_tensor *o = mn_sample_find(a, "o");
            for (int64_t i = 0; i < o->count; i++) {
                const double x = fabs(mn_sample_get(a, o->data, i));
                if (!CHECK(x <= largest * 1.000001, "%s: output %g of values up to %g",
                           target->name, x, largest))
                    break;
            }
            for (int64_t i = 0; i < q->count; i++) {
                if (!CHECK(isfinite(mn_sample_get(a, q->partner, i)), "%s: dq", target->name))
                    break;
            }
            drop(a);
        }
    }
    check_done();
}

/* A query that is 0, or sees only keys it is opposed to, reads nothing. */
static void zero_rows_give_zero(void **state) {
    (void)state;
    EACH_TARGET(target) {
        for (int64_t tokens = 1; tokens <= 90; tokens += 89) {
            const shape s = { MN_OP_relu_attention, 0, 1, tokens, 1, 1, 4, 6, 90 };
            mn_sample *a = make(&s, target->dtype, 9);
            mn_sample_tensor *q = mn_sample_find(a, "q"), *k = mn_sample_find(a, "k");
            mn_sample_tensor *o = mn_sample_find(a, "o");
            const int64_t zero = tokens / 2, opposed = tokens - 1;
            for (int64_t i = 0; i < k->count; i++) {
                mn_sample_set(a, k->data, i, fabs(mn_sample_get(a, k->data, i)));
            }
            for (int64_t i = 0; i < 4; i++) {
                mn_sample_set(a, q->data, opposed * 4 + i, -1.0);
                mn_sample_set(a, q->data, zero * 4 + i, 0.0);
            }
            run(op_context(target->name, 2), a, false);
            run(op_context(target->name, 2), a, true);
            for (int64_t i = 0; i < 6; i++) {
                const double x = mn_sample_get(a, o->data, zero * 6 + i);
                const double y = mn_sample_get(a, o->data, opposed * 6 + i);
                CHECK(x == 0.0 && y == 0.0, "%s: reads %g, %g", target->name, x, y);
            }
            for (int64_t i = 0; i < k->count; i++) {
                if (!CHECK(isfinite(mn_sample_get(a, k->partner, i)), "%s: dk", target->name))
                    break;
            }
            drop(a);
        }
    }
    check_done();
}

/* A gradient has the same bits whether or not the others are wanted; no cotangent means 0. */
static void gradients_come_alone(void **state) {
    (void)state;
    const shape s = { MN_OP_attention, 1, 2, 130, 4, 2, 8, 6, 0 };
    EACH_TARGET(target) {
        mn_context *context = op_context(target->name, 2);
        mn_sample *all = make(&s, target->dtype, 11), *one = make(&s, target->dtype, 11);
        mn_attention_args *args = (mn_attention_args *)one->args;
        const mn_out wanted[] = { args->grad.q, args->grad.k, args->grad.v };
        mn_out *grads[] = { &args->grad.q, &args->grad.k, &args->grad.v };
        const char *names[] = { "q", "k", "v" };
        run(context, all, true);
        for (int i = 0; i < 3; i++) {
            for (int j = 0; j < 3; j++)
                *grads[j] = i == j ? wanted[i] : (mn_out){ NULL, { 0, 0, 0 } };
            run(context, one, true);
            const mn_sample_tensor *x = mn_sample_find(all, names[i]),
                                   *y = mn_sample_find(one, names[i]);
            CHECK(memcmp(x->partner, y->partner,
                         (size_t)x->count * mn_dtype_bytes(target->dtype)) == 0,
                  "%s: d%s alone differs", target->name, names[i]);
        }
        for (int j = 0; j < 3; j++) *grads[j] = wanted[j];
        args->cot.o.data = NULL;
        run(context, one, true);
        for (int i = 0; i < 3; i++) {
            const mn_sample_tensor *y = mn_sample_find(one, names[i]);
            double sum = 0.0;
            for (int64_t at = 0; at < y->count; at++)
                sum += fabs(mn_sample_get(one, y->partner, at));
            CHECK(sum == 0.0, "%s: d%s without a cotangent", target->name, names[i]);
        }
        drop(all);
        drop(one);
    }
    check_done();
}

/* Sequences several times as long as the windows, which leave whole blocks of keys unseen. */
static void windows_match_reference(void **state) {
    (void)state;
    static const struct {
        int64_t window, T, more_keys, groups;
    } seen[] = { { 1, 300, 0, 1 }, { 5, 600, 0, 2 }, { 64, 520, 0, 1 }, { 256, 700, 0, 2 },
                 { 300, 700, 130, 1 }, { 1000, 300, 0, 1 }, { 40, 100, 900, 2 } };
    for (size_t i = 0; i < MN_COUNTOF(seen); i++) {
        op_against_reference((op_case){ .op = MN_OP_attention, .dtype = MN_F32,
                                        .fields = MN_ALL_FIELDS, .B = 1, .H = 2, .K = 8, .V = 6,
                                        .T = seen[i].T, .window = seen[i].window,
                                        .more_keys = seen[i].more_keys,
                                        .groups = seen[i].groups, .seed = 5 }, NULL);
    }
    check_done();
}

static void wrong_sizes_are_refused(void **state) {
    (void)state;
    const shape s = { MN_OP_attention, 1, 1, 5, 4, 2, 8, 6, 0 };
    mn_sample *a = make(&s, MN_F32, 1);
    mn_call *call = (mn_call *)a->args;
    mn_context *context = op_context("ref", 1);
    const mn_call good = *call;
    call->K = 7;
    CHECK(mn_op_run(context, a->op, MN_FORWARD, a->args) == MN_ERR_ARGUMENT, "odd K with rope");
    *call = good, call->J = 3;
    CHECK(mn_op_run(context, a->op, MN_FORWARD, a->args) == MN_ERR_ARGUMENT, "H no multiple of J");
    *call = good, call->L = 4;
    CHECK(mn_op_run(context, a->op, MN_FORWARD, a->args) == MN_ERR_ARGUMENT,
          "fewer keys than queries");
    *call = good;
    ((mn_attention_args *)a->args)->rope_kind = 3;
    CHECK(mn_op_run(context, a->op, MN_FORWARD, a->args) == MN_ERR_ARGUMENT, "no such rope");
    drop(a);
    check_done();
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(targets_match_reference),   cmocka_unit_test(groups_share_heads),
        cmocka_unit_test(decoding_is_the_whole),     cmocka_unit_test(rope_inside_is_rope_outside),
        cmocka_unit_test(large_scores_stay_finite),  cmocka_unit_test(zero_rows_give_zero),
        cmocka_unit_test(gradients_come_alone),      cmocka_unit_test(wrong_sizes_are_refused),
        cmocka_unit_test(lse_is_what_it_says),       cmocka_unit_test(windows_match_reference),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
