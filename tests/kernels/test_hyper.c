/* test_hyper.c - hyper and hyper_layer beyond what the walks over the table reach: strips and
 * lanes, more sequences than groups, lag truncation, decoding, norms, rows of zeros.
 *
 * Tolerances, relative rms, float32 against float64: scores and both mixes are sums of up to n
 * products each, off by some 2^-24 sqrt(n) of their size, and the norm adds one more sum; n is
 * below 500 here. 1e-5 for outputs and, with the two sums on the way back, 4e-5 for gradients. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/dtype.h"
#include "base/util.h"
#include "support/close.h"
#include "support/op_walk.h"

enum { RELU, GLU };
enum { OUT_SCALE, L2, NONE };
enum { LAG, POSITION };

typedef struct shape {
    int kind, norm;
    int64_t B, T, H, K, V, R, W, L, P;    // L 0: T; P 0: L
} shape;

static const char *shape_text(const shape *s) {
    static char text[160];
    snprintf(text, sizeof text, "kind %d norm %d B=%d T=%d H=%d K=%d V=%d R=%d W=%d L=%d P=%d",
             s->kind, s->norm, (int)s->B, (int)s->T, (int)s->H, (int)s->K, (int)s->V, (int)s->R,
             (int)s->W, (int)s->L, (int)s->P);
    return text;
}

static mn_sample *make(const shape *s, mn_dtype dtype, uint64_t seed) {
    mn_sample *sample = calloc(1, sizeof *sample);
    assert_non_null(sample);
    mn_sample_init(sample, MN_OP_hyper);
    mn_hyper_args *args = (mn_hyper_args *)sample->args;
    args->kind = s->kind;
    args->norm = s->norm;
    args->call = (mn_call){ .dtype = dtype, .B = s->B, .T = s->T, .H = s->H, .K = s->K, .V = s->V,
                            .R = s->R, .W = s->W, .L = s->L ? s->L : s->T };
    args->call.Q = s->kind == GLU ? 2 * s->H : s->H;
    args->call.P = s->P ? s->P : args->call.L;
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
    if (target->dtype == MN_F64) return 1e-12;
    return gradients ? 4e-5 : 1e-5;
}

#define EACH_TARGET(target)                                                                        \
    op_target targets[MN_TARGET_COUNT + 1];                                                        \
    const int n_targets = op_targets(targets);                                                     \
    for (const op_target *target = targets; target < targets + n_targets; target++)

/* Around strips of 48 rows and products of 256 columns, with one lane to four and more sequences
 * than the eight groups that share sums; ranks around a vector; steps of one segment of keys and of
 * three. */
static const shape shapes[] = {
    { RELU, OUT_SCALE, 1, 49, 1, 5, 7, 3, 2, 0, 60 },
    { GLU, OUT_SCALE, 1, 97, 2, 8, 16, 16, 16, 0, 0 },
    { GLU, L2, 2, 257, 1, 16, 9, 4, 17, 0, 300 },
    { RELU, NONE, 1, 300, 2, 3, 33, 1, 1, 0, 301 },
    { GLU, NONE, 11, 20, 2, 4, 5, 2, 3, 0, 40 },
    { RELU, L2, 9, 60, 1, 6, 4, 5, 6, 0, 64 },
    { GLU, OUT_SCALE, 1, 70, 2, 8, 8, 4, 4, 400, 450 },
    { RELU, OUT_SCALE, 1, 5, 1, 9, 31, 8, 8, 300, 300 },
    { GLU, OUT_SCALE, 2, 1, 2, 17, 20, 16, 3, 260, 0 },
    { RELU, L2, 3, 1, 2, 64, 64, 8, 8, 519, 600 },
    { GLU, NONE, 2, 1, 3, 12, 33, 5, 9, 7, 0 },
    { GLU, OUT_SCALE, 1, 60, 1, 4, 4, 2, 2, 8260, 8300 },
};

static mn_sample *make_in(int layout, const shape *s, mn_dtype dtype, uint64_t seed) {
    mn_sample *sample = make(s, dtype, seed);
    ((mn_hyper_args *)sample->args)->layout = layout;
    return sample;
}

static void match_reference(int layout, const shape *s, uint64_t seed) {
    mn_sample *f32 = make_in(layout, s, MN_F32, seed), *want = make_in(layout, s, MN_F64, seed);
    op_convert(want, f32);
    drop(f32);
    run(op_context("ref", 2), want, false);
    run(op_context("ref", 2), want, true);
    EACH_TARGET(target) {
        if (target->dtype == MN_F64) continue;
        mn_sample *got = make_in(layout, s, MN_F32, seed);
        run(op_context(target->name, 2), got, false);
        run(op_context(target->name, 2), got, true);
        const char *text = shape_text(s);
        check_samples_close(text, target->name, got, want, false, tolerance(target, false));
        check_samples_close(text, target->name, got, want, true, tolerance(target, true));
        drop(got);
    }
    drop(want);
}

static void targets_match_reference(void **state) {
    (void)state;
    for (size_t i = 0; i < MN_COUNTOF(shapes); i++) match_reference(LAG, &shapes[i], i + 1);
    check_done();
}

static void positions_match_reference(void **state) {
    (void)state;
    for (size_t i = 0; i < MN_COUNTOF(shapes); i++) match_reference(POSITION, &shapes[i], i + 1);
    check_done();
}

/* The last row of a full block has the same entries in both layouts, the rows before others. */
static void layouts_meet_in_the_last_row(void **state) {
    (void)state;
    EACH_TARGET(target) {
        const shape s = { GLU, OUT_SCALE, 1, 60, 2, 4, 6, 3, 5, 0, 60 };
        mn_sample *lag = make_in(LAG, &s, target->dtype, 5);
        mn_sample *position = make_in(POSITION, &s, target->dtype, 5);
        run(op_context(target->name, 2), lag, false);
        run(op_context(target->name, 2), position, false);
        const size_t bytes = mn_dtype_bytes(target->dtype), row = (size_t)(s.H * s.V) * bytes;
        char *a = mn_sample_find(lag, "o")->data, *b = mn_sample_find(position, "o")->data;
        check_close("last row", target->name, position, b + (size_t)(s.T - 1) * row, lag,
                    a + (size_t)(s.T - 1) * row, s.H * s.V, tolerance(target, false));
        CHECK(memcmp(a + row, b + row, row) != 0, "%s: the layouts are the same", target->name);
        drop(lag);
        drop(position);
    }
    check_done();
}

/* Mixing and everything after the activation is homogeneous, so dividing x1 by its norm before it
 * and dividing the output after it are the same. */
static void l2_is_out_scale(void **state) {
    (void)state;
    for (int kind = RELU; kind <= GLU; kind++) {
        EACH_TARGET(target) {
            shape s = { kind, OUT_SCALE, 1, 110, 2, 6, 8, 3, 4, 0, 120 };
            mn_sample *a = make(&s, target->dtype, 3);
            s.norm = L2;
            mn_sample *b = make(&s, target->dtype, 3);
            run(op_context(target->name, 2), a, false), run(op_context(target->name, 2), b, false);
            run(op_context(target->name, 2), a, true), run(op_context(target->name, 2), b, true);
            check_samples_close("l2", target->name, a, b, false, tolerance(target, false));
            check_samples_close("l2", target->name, a, b, true, tolerance(target, true));
            drop(a);
            drop(b);
        }
    }
    check_done();
}

/* Copies the last `kept` lags of a parameter of `from` (or of its gradient) into `to`, whose block
 * is that long. Lags are the last axis of Vt and d and the one before it of U. */
static void cut_lags(mn_sample *to, const mn_sample *from, const char *name, bool gradient) {
    const mn_sample_tensor *a = mn_sample_find((mn_sample *)from, name);
    const mn_sample_tensor *b = mn_sample_find(to, name);
    const int64_t P = ((const mn_call *)from->args)->P, kept = ((const mn_call *)to->args)->P;
    const bool lag_is_row = name[0] == 'U';
    bool ok = true;
    const int64_t width = lag_is_row ? mn_axis_size((const mn_call *)to->args, b->axes[2], &ok) : 1;
    for (int64_t i = 0; i < b->count; i++) {
        const int64_t lag = i / width % kept, outer = i / width / kept;
        const int64_t at = (outer * P + P - kept + lag) * width + i % width;
        const double x = mn_sample_get(from, gradient ? a->partner : a->data, at);
        mn_sample_set(to, gradient ? b->partner : b->data, i, x);
    }
}

static const char *const parameters[] = { "U1", "Vt1", "d1", "U2", "Vt2", "d2" };

/* Lags that no query has change nothing, and get no gradient. */
static void unused_lags_do_not_show(void **state) {
    (void)state;
    EACH_TARGET(target) {
        const shape longer = { GLU, OUT_SCALE, 2, 100, 1, 4, 6, 3, 5, 0, 140 };
        const shape exact = { GLU, OUT_SCALE, 2, 100, 1, 4, 6, 3, 5, 0, 100 };
        mn_context *context = op_context(target->name, 2);
        mn_sample *a = make(&longer, target->dtype, 5), *b = make(&exact, target->dtype, 5);
        mn_sample *grads = make(&exact, target->dtype, 5);
        op_copy_shared(b, a, OP_GIVEN);
        for (size_t i = 0; i < MN_COUNTOF(parameters); i++) cut_lags(b, a, parameters[i], false);
        run(context, a, false), run(context, b, false);
        run(context, a, true), run(context, b, true);
        for (int i = 0; i < a->n_tensors; i++) {
            const mn_sample_tensor *x = &a->tensors[i], *y = &b->tensors[i];
            const bool input = x->field->role <= MN_ROLE_RAW;
            if (x->count != y->count) continue;
            CHECK(memcmp(input ? x->partner : x->data, input ? y->partner : y->data,
                         (size_t)x->count * mn_dtype_bytes(target->dtype)) == 0,
                  "%s: %s depends on unused lags", target->name, x->field->name);
        }
        for (size_t i = 0; i < MN_COUNTOF(parameters); i++) {
            const mn_sample_tensor *x = mn_sample_find(a, parameters[i]);
            const mn_sample_tensor *y = mn_sample_find(b, parameters[i]);
            const mn_sample_tensor *z = mn_sample_find(grads, parameters[i]);
            double all = 0.0, used = 0.0;
            cut_lags(grads, a, parameters[i], true);
            CHECK(memcmp(z->partner, y->partner,
                         (size_t)y->count * mn_dtype_bytes(target->dtype)) == 0,
                  "%s: d%s differs", target->name, parameters[i]);
            for (int64_t at = 0; at < x->count; at++) all += fabs(mn_sample_get(a, x->partner, at));
            for (int64_t at = 0; at < z->count; at++)
                used += fabs(mn_sample_get(grads, z->partner, at));
            CHECK(fabs(all - used) <= 1e-12 * all, "%s: d%s of unused lags", target->name,
                  parameters[i]);
        }
        drop(a);
        drop(b);
        drop(grads);
    }
    check_done();
}

/* Row t of a whole sequence and of a cache of its keys up to t; and the rows of T tokens in T +
 * 1. */
static void decoding_is_the_whole(void **state) {
    (void)state;
    for (int kind = RELU; kind <= GLU; kind++) {
        EACH_TARGET(target) {
            const shape s = { kind, OUT_SCALE, 1, 270, 2, 8, 12, 4, 3, 0, 280 };
            mn_context *context = op_context(target->name, 2);
            mn_sample *all = make(&s, target->dtype, 3), *one = make(&s, target->dtype, 3);
            mn_hyper_args *args = (mn_hyper_args *)one->args;
            const mn_hyper_args whole = *args;
            const size_t bytes = mn_dtype_bytes(target->dtype);
            mn_call *call = &args->call;
            run(context, all, false);
            for (int64_t t = 0; t < s.T; t += t < 4 ? 1 : 19) {
                call->T = 1;
                call->L = t + 1;
                args->q.data = (const char *)whole.q.data + (size_t)(t * call->Q * s.K) * bytes;
                args->c1.data = (const char *)whole.c1.data + (size_t)(t * call->Q * s.R) * bytes;
                args->c2.data = (const char *)whole.c2.data + (size_t)(t * s.H * s.W) * bytes;
                args->gv.data = (const char *)whole.gv.data + (size_t)(t * s.H * s.V) * bytes;
                args->o.data = (char *)whole.o.data + (size_t)(t * s.H * s.V) * bytes;
                run(context, one, false);
                check_close("decoded row", target->name, one, args->o.data, all,
                            (char *)mn_sample_find(all, "o")->data +
                                (size_t)(t * s.H * s.V) * bytes,
                            s.H * s.V, tolerance(target, false));
            }
            *args = whole;
            call->T = call->L = s.T - 1;
            run(context, one, false);
            check_close("prefix", target->name, one, whole.o.data, all,
                        mn_sample_find(all, "o")->data, (s.T - 1) * s.H * s.V,
                        tolerance(target, false));
            drop(all);
            drop(one);
        }
    }
    check_done();
}

/* The first tokens of the whole layer do not change when one is added: that is decoding. */
static void layer_keeps_its_past(void **state) {
    (void)state;
    EACH_TARGET(target) {
        const op_case c = { .op = MN_OP_hyper_layer,
                            .dtype = target->dtype,
                            .choice = { GLU, OUT_SCALE },
                            .fields = MN_ALL_FIELDS,
                            .B = 1,
                            .T = 120,
                            .H = 2,
                            .K = 8,
                            .V = 9,
                            .block = 130,
                            .seed = 5 };
        static mn_sample all, part;
        op_open(&all, &c);
        op_open(&part, &c);
        mn_context *context = op_context(target->name, 2);
        const mn_sample_tensor *y = mn_sample_find(&all, "y"), *z = mn_sample_find(&part, "y");
        const int64_t D = ((mn_call *)all.args)->D;
        op_run(context, &all, MN_FORWARD, &c);
        for (int64_t t = 1; t < c.T; t += 17) {
            ((mn_call *)part.args)->T = t;
            op_run(context, &part, MN_FORWARD, &c);
            check_close("layer", target->name, &part, z->data, &all, y->data, t * D,
                        tolerance(target, false));
        }
        mn_sample_free(&all);
        mn_sample_free(&part);
    }
    check_done();
}

/* Keys and values that are masked to 0, as an attention mask does, read 0 and have finite
 * gradients. */
static void zero_rows_give_zero(void **state) {
    (void)state;
    for (int norm = OUT_SCALE; norm <= NONE; norm++) {
        EACH_TARGET(target) {
            const shape s = { norm == L2 ? RELU : GLU, norm, 1, 90, 1, 4, 6, 3, 2, 0, 95 };
            const int64_t masked = 55;    // the first rows see nothing
            mn_sample *a = make(&s, target->dtype, 9);
            const char *names[] = { "k", "v" };
            for (int i = 0; i < 2; i++) {
                mn_sample_tensor *x = mn_sample_find(a, names[i]);
                for (int64_t at = 0; at < x->count / 90 * masked; at++)
                    mn_sample_set(a, x->data, at, 0.0);
            }
            run(op_context(target->name, 2), a, false);
            run(op_context(target->name, 2), a, true);
            const mn_sample_tensor *o = mn_sample_find(a, "o");
            for (int64_t i = 0; i < masked * s.V; i++) {
                const double x = mn_sample_get(a, o->data, i);
                if (!CHECK(x == 0.0, "%s norm %d: a masked row reads %g", target->name, norm, x))
                    break;
            }
            for (int i = 0; i < a->n_tensors; i++) {
                const mn_sample_tensor *t = &a->tensors[i];
                for (int64_t at = 0; t->field->role <= MN_ROLE_RAW && at < t->count; at++) {
                    const double x = mn_sample_get(a, t->partner, at);
                    if (!CHECK(isfinite(x), "%s norm %d: d%s is %g", target->name, norm,
                               t->field->name, x)) break;
                }
            }
            drop(a);
        }
    }
    check_done();
}

/* Mixes whose parameters are all 0 are no mixes. */
static void zero_mixes_are_none(void **state) {
    (void)state;
    EACH_TARGET(target) {
        const shape s = { GLU, OUT_SCALE, 1, 100, 2, 4, 6, 3, 2, 0, 0 };
        mn_sample *a = make(&s, target->dtype, 9), *b = make(&s, target->dtype, 9);
        mn_hyper_args *none = (mn_hyper_args *)b->args;
        for (size_t i = 0; i < MN_COUNTOF(parameters); i++) {
            mn_sample_tensor *x = mn_sample_find(a, parameters[i]);
            memset(x->data, 0, (size_t)x->count * mn_dtype_bytes(target->dtype));
        }
        none->c1.data = none->U1.data = none->Vt1.data = none->d1.data = NULL;
        none->c2.data = none->U2.data = none->Vt2.data = none->d2.data = NULL;
        none->grad.c1.data = none->grad.U1.data = none->grad.Vt1.data = none->grad.d1.data = NULL;
        none->grad.c2.data = none->grad.U2.data = none->grad.Vt2.data = none->grad.d2.data = NULL;
        run(op_context(target->name, 2), a, false), run(op_context(target->name, 2), b, false);
        run(op_context(target->name, 2), a, true), run(op_context(target->name, 2), b, true);
        check_samples_close("no mix", target->name, b, a, false, 0.0);
        const char *same[] = { "q", "k", "v", "gv" };
        for (size_t i = 0; i < MN_COUNTOF(same); i++) {
            const mn_sample_tensor *x = mn_sample_find(a, same[i]), *y = mn_sample_find(b, same[i]);
            check_close(same[i], target->name, b, y->partner, a, x->partner, x->count, 0.0);
        }
        drop(a);
        drop(b);
    }
    check_done();
}

static void wrong_sizes_are_refused(void **state) {
    (void)state;
    const shape s = { GLU, OUT_SCALE, 1, 6, 2, 4, 6, 3, 2, 0, 8 };
    mn_sample *a = make(&s, MN_F32, 1);
    mn_hyper_args *args = (mn_hyper_args *)a->args;
    mn_context *context = op_context("ref", 1);
    const mn_hyper_args good = *args;
    args->call.Q = 2;
    CHECK(mn_op_hyper(context, args) == MN_ERR_ARGUMENT, "glu with Q = H");
    *args = good, args->kind = RELU;
    CHECK(mn_op_hyper(context, args) == MN_ERR_ARGUMENT, "relu with Q = 2 H");
    *args = good, args->call.P = 5;
    CHECK(mn_op_hyper(context, args) == MN_ERR_ARGUMENT, "fewer lags than keys");
    *args = good, args->norm = 3;
    CHECK(mn_op_hyper(context, args) == MN_ERR_ARGUMENT, "no such norm");
    *args = good;
    CHECK(mn_op_hyper(context, args) == MN_OK, "%s", mn_last_error());
    drop(a);
    check_done();
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(targets_match_reference),
        cmocka_unit_test(positions_match_reference),
        cmocka_unit_test(layouts_meet_in_the_last_row), cmocka_unit_test(l2_is_out_scale),
        cmocka_unit_test(unused_lags_do_not_show), cmocka_unit_test(decoding_is_the_whole),
        cmocka_unit_test(layer_keeps_its_past),    cmocka_unit_test(zero_rows_give_zero),
        cmocka_unit_test(zero_mixes_are_none),     cmocka_unit_test(wrong_sizes_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
