/* test_elementwise.c - fused functions and sums over tokens of elementwise.def, every row on every
 * target: against the same function of doubles, with strides, absent views and results that lie
 * over inputs; and one element's bits do not go by its place. */
// labels: sanitize threads
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/rng.h"
#include "base/util.h"
#include "kernels/functions_scalar.h"
#include "ops/elementwise/elementwise.h"
#include "support/op_walk.h"

enum { B = 2, T = 3, H = 2, MOST = 300, PITCH = MOST + 5, ROWS = B * T * H, GUARD = -77 };

static const int64_t widths[] = { 1, 7, 8, 9, 15, 16, 17, 31, 65, 257 };

/* Three operands of rows and three results; rows have room behind them. */
typedef struct operands {
    mn_dtype dtype;
    double memory[6][ROWS * PITCH];    // of float, half of it is used
} operands;

static double get(const operands *x, int k, int64_t i) {
    return x->dtype == MN_F64 ? x->memory[k][i] : (double)((const float *)x->memory[k])[i];
}

static void put(operands *x, int k, int64_t i, double value) {
    if (x->dtype == MN_F64) x->memory[k][i] = value;
    else ((float *)x->memory[k])[i] = (float)value;
}

/* Inputs of which all functions are numbers: 0 < a < 1 < b. */
static operands *draw(mn_dtype dtype) {
    operands *x = malloc(sizeof *x);
    if (!x) check_fatal("no memory");
    x->dtype = dtype;
    for (int64_t i = 0; i < ROWS * PITCH; i++) {
        const double u[3] = { mn_rng_uniform(5, 1, (uint64_t)i), mn_rng_uniform(5, 2, (uint64_t)i),
                              mn_rng_uniform(5, 3, (uint64_t)i) };
        put(x, 0, i, 0.05 + 0.9 * u[0]);
        put(x, 1, i, 1.1 + 2.0 * u[1]);
        put(x, 2, i, 4.0 * u[2] - 2.0);
        for (int k = 3; k < 6; k++) put(x, k, i, GUARD);
    }
    return x;
}

static mn_view view_of(operands *x, int k) {
    return (mn_view){ x->memory[k], x->dtype, { T * H * PITCH, H * PITCH, PITCH, 1 } };
}

typedef void fused(double *y, double a, double b, double c);

static const struct row {
    const char *name;
    int ins, outs;
    fused *f;
} rows[MN_N_FUSED] = {
#define FUSED(id, n_ins, n_outs, about) [MN_FUSED_##id] = { #id, n_ins, n_outs, fused_##id##_f64 },
#include "kernels/elementwise.def"
};

static mn_fused_params job_of(operands *x, int f, int64_t width) {
    return (mn_fused_params){ .f = (mn_fused_kind)f, .shape = { B, T, H, width },
                              .in = { view_of(x, 0), view_of(x, 1), view_of(x, 2) },
                              .out = { view_of(x, 3), view_of(x, 4), view_of(x, 5) } };
}

/* Functions are up to 8 operations on numbers below 8, each rounded once, the sigmoids of vectors
 * off by 4 roundings: 12 of 8 2^-24. Doubles are the same expressions. */
static void check_fused(const op_target *target, int f, int64_t width, bool absent) {
    operands *x = draw(target->dtype);
    mn_fused_params job = job_of(x, f, width);
    const double tolerance = target->dtype == MN_F64 ? 0.0 : 12 * 8 * 0x1p-24;
    if (absent) job.in[2].data = NULL, job.out[0].data = NULL;
    mn_elementwise_run(op_context(target->name, 3), MN_ELEMENTWISE_FUSED, &job);
    for (int64_t i = 0; i < ROWS * PITCH; i++) {
        double want[3];
        rows[f].f(want, get(x, 0, i), get(x, 1, i), absent ? 0.0 : get(x, 2, i));
        for (int k = 0; k < 3; k++) {
            const bool made = i % PITCH < width && k < rows[f].outs && job.out[k].data;
            const double is = get(x, 3 + k, i), to_be = made ? want[k] : GUARD;
            CHECK(made ? fabs(is - to_be) <= tolerance * fmax(1.0, fabs(to_be)) : is == to_be,
                  "%s of %s, width %d, number %d, result %d: %.9g, not %.9g", rows[f].name,
                  target->name, (int)width, (int)i, k, is, to_be);
        }
    }
    free(x);
}

/* The same numbers one at a time, and over an input. */
static void check_places(const op_target *target, int f) {
    enum { WIDTH = 37 };
    operands *all = draw(target->dtype), *one = draw(target->dtype);
    const mn_fused_params job = job_of(all, f, WIDTH);
    mn_context *context = op_context(target->name, 2);
    mn_elementwise_run(context, MN_ELEMENTWISE_FUSED, &job);
    for (int64_t i = 0; i < WIDTH; i++) {
        mn_fused_params part = job_of(one, f, 1);
        for (int k = 0; k < 3; k++) {
            const size_t from = (size_t)i * (one->dtype == MN_F64 ? sizeof(double) : sizeof(float));
            part.in[k].data = (char *)part.in[k].data + from;
            part.out[k].data = (char *)part.out[k].data + from;
        }
        part.out[0] = part.in[0];
        mn_elementwise_run(context, MN_ELEMENTWISE_FUSED, &part);
        for (int64_t row = 0; row < ROWS; row++) {
            const double is = get(one, 0, row * PITCH + i), want = get(all, 3, row * PITCH + i);
            CHECK(is == want, "%s of %s: number %d alone, over its input, is %.9g, not %.9g",
                  rows[f].name, target->name, (int)i, is, want);
        }
    }
    free(all);
    free(one);
}

typedef double term(double a, double b, double c);

static const struct sum {
    const char *name;
    term *f;
} sums[MN_N_TOKEN_SUM] = {
#define TOKEN_SUM(id, about) [MN_TOKEN_SUM_##id] = { #id, mn_term_##id },
#include "kernels/elementwise.def"
};

/* Added in the order of the tokens, in double: the same bits. */
static void check_sum(const op_target *target, int f, int64_t width) {
    operands *x = draw(target->dtype);
    const mn_token_sum_params job = { .f = (mn_token_sum_kind)f, .shape = { B, T, H, width },
                                      .in = { view_of(x, 0), view_of(x, 1), view_of(x, 2) },
                                      .sum = view_of(x, 3) };
    mn_elementwise_run(op_context(target->name, 3), MN_ELEMENTWISE_TOKEN_SUM, &job);
    for (int64_t i = 0; i < H * PITCH; i++) {
        double want = 0.0;
        for (int64_t token = 0; token < B * T; token++) {
            const int64_t at = token * H * PITCH + i;
            want += sums[f].f(get(x, 0, at), get(x, 1, at), get(x, 2, at));
        }
        if (target->dtype == MN_F32) want = (double)(float)want;
        if (i % PITCH >= width) want = GUARD;
        CHECK(get(x, 3, i) == want, "sum %s of %s, width %d, number %d: %.9g, not %.9g",
              sums[f].name, target->name, (int)width, (int)i, get(x, 3, i), want);
    }
    free(x);
}

static void every_row(void **state) {
    (void)state;
    op_target targets[MN_TARGET_COUNT + 1];
    const int n_targets = op_targets(targets);
    for (int t = 0; t < n_targets; t++) {
        for (size_t w = 0; w < MN_COUNTOF(widths); w++) {
            for (int f = 0; f < MN_N_FUSED; f++) {
                check_fused(&targets[t], f, widths[w], false);
                check_fused(&targets[t], f, widths[w], true);
            }
            for (int f = 0; f < MN_N_TOKEN_SUM; f++) check_sum(&targets[t], f, widths[w]);
        }
        for (int f = 0; f < MN_N_FUSED; f++) check_places(&targets[t], f);
    }
    check_done();
}

int main(void) {
    const struct CMUnitTest tests[] = { cmocka_unit_test(every_row) };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
