/* linear.c - y = x W' + b over rows, or its sigmoid s; ds/dz = s (1 - s).
 *
 *   dz = dy or dy s (1 - s)      dW = dz'x      db = column sums of dz      dx = dz W */
#include "ops/linear.h"

#include <math.h>

#include "base/util.h"
#include "ops/matmul.h"
#include "ops/workspace.h"

#if MN_HAVE_X86_TARGETS
#define MN_TARGET avx2
#include "kernels/cpu/simd/map.h"
#undef MN_TARGET
#define MN_TARGET avx512
#include "kernels/cpu/simd/map.h"
#undef MN_TARGET
#endif

enum { ROWS = 16, COLUMNS = 64 };    // of one item

typedef struct job {
    const mn_linear *p;
    const void *y;
    void *out;
    void (*sigmoid_f32)(float *y, const float *x, int64_t n);
} job;

static void plain_sigmoid(float *y, const float *x, int64_t n) {
    for (int64_t i = 0; i < n; i++) y[i] = (float)(1.0 / (1.0 + exp(-(double)x[i])));
}

/* Rows of one item: y = z + b, or its sigmoid, in place. */
static void epilogue_rows(void *context, int64_t item, int worker) {
    (void)worker;
    const job *j = context;
    const mn_linear *p = j->p;
    const int64_t n = p->n_out, last = mn_min((item + 1) * ROWS, p->n_rows);
    for (int64_t row = item * ROWS; row < last; row++) {
        if (p->dtype == MN_F64) {
            double *y = (double *)j->out + row * n;
            const double *b = p->bias;
            for (int64_t i = 0; b && i < n; i++) y[i] += b[i];
            for (int64_t i = 0; p->sigmoid && i < n; i++) y[i] = 1.0 / (1.0 + exp(-y[i]));
        } else {
            float *y = (float *)j->out + row * n;
            const float *b = p->bias;
            for (int64_t i = 0; b && i < n; i++) y[i] += b[i];
            if (p->sigmoid) j->sigmoid_f32(y, y, n);
        }
    }
}

/* Rows of one item: dy *= s (1 - s). */
static void sigmoid_back_rows(void *context, int64_t item, int worker) {
    (void)worker;
    const job *j = context;
    const mn_linear *p = j->p;
    const int64_t end = mn_min((item + 1) * ROWS, p->n_rows) * p->n_out;
    for (int64_t i = item * ROWS * p->n_out; i < end; i++) {
        if (p->dtype == MN_F64) {
            const double s = ((const double *)j->y)[i];
            ((double *)j->out)[i] *= s * (1.0 - s);
        } else {
            const float s = ((const float *)j->y)[i];
            ((float *)j->out)[i] *= s * (1.0f - s);
        }
    }
}

/* Columns of one item: their sums over all rows, in double. */
static void sum_columns(void *context, int64_t item, int worker) {
    (void)worker;
    const job *j = context;
    const mn_linear *p = j->p;
    const int64_t first = item * COLUMNS, n = mn_min(COLUMNS, p->n_out - first);
    double sum[COLUMNS] = { 0.0 };
    for (int64_t row = 0; row < p->n_rows; row++) {
        const int64_t at = row * p->n_out + first;
        if (p->dtype == MN_F64) {
            for (int64_t i = 0; i < n; i++) sum[i] += ((const double *)j->y)[at + i];
        } else {
            for (int64_t i = 0; i < n; i++) sum[i] += ((const float *)j->y)[at + i];
        }
    }
    for (int64_t i = 0; i < n; i++) {
        if (p->dtype == MN_F64) ((double *)j->out)[first + i] = sum[i];
        else ((float *)j->out)[first + i] = (float)sum[i];
    }
}

/* ---- on a device ----------------------------------------------------------------------------- */

/* A step over the rows of results: x from a and, the same for all rows, or row by row, b. */
static mn_status step_on_device(mn_context *context, mn_glue_id id, const mn_linear *p, void *x,
                            const void *a, const void *b, bool b_is_row) {
    const int64_t n = p->n_out;
    const mn_glue step = { .dtype = p->dtype, .B = 1, .T = p->n_rows, .H = 1, .width = n,
                           .a = { a, { 0, n, 0 } }, .b = { b, { 0, b_is_row ? 0 : n, 0 } },
                           .x = { x, { 0, n, 0 } } };
    return mn_run_glue(context, id, &step);
}

/* ---- the gemms ---------------------------------------------------------------------------- */

static mn_matmul_args forward_gemm(const mn_linear *p, void *y) {
    return (mn_matmul_args){ .dtype = p->dtype, .c_dtype = p->dtype, .c = y, .a = p->x,
                             .b = p->weight, .M = p->n_rows, .N = p->n_out, .K = p->n_in,
                             .b_transposed = true };
}

static mn_status weight_backward(mn_context *context, const mn_linear *p, const void *dy,
                                 void *dweight) {
    const mn_matmul_args product = { .dtype = p->dtype, .c_dtype = p->dtype, .c = dweight, .a = dy,
                                     .b = p->x, .M = p->n_out, .N = p->n_in, .K = p->n_rows,
                                     .a_transposed = true };
    return dweight ? mn_matmul(context, &product) : MN_OK;
}

static mn_status input_backward(mn_context *context, const mn_linear *p, const void *dy, void *dx,
                                bool add) {
    const mn_matmul_args product = { .dtype = p->dtype, .c_dtype = p->dtype,
                                     .c = dx, .a = dy, .b = p->weight, .M = p->n_rows,
                                     .N = p->n_in, .K = p->n_out, .accumulate = add };
    return dx ? mn_matmul(context, &product) : MN_OK;
}

mn_status mn_linear_forward(mn_context *context, const mn_linear *p, void *y) {
    mn_matmul_args product = forward_gemm(p, y);
    if (context->device) {
        product.bias = p->sigmoid ? NULL : p->bias;
        const mn_status st = mn_matmul(context, &product);
        if (st != MN_OK || !p->sigmoid) return st;
        return step_on_device(context, MN_GLUE_sigmoid, p, y, y, p->bias, true);
    }
    const mn_status st = mn_matmul(context, &product);
    job j = { .p = p, .out = y, .sigmoid_f32 = plain_sigmoid };
#if MN_HAVE_X86_TARGETS
    if (context->target == MN_TARGET_AVX2) j.sigmoid_f32 = mn_map_sigmoid_avx2;
    if (context->target == MN_TARGET_AVX512) j.sigmoid_f32 = mn_map_sigmoid_avx512;
#endif
    if (st != MN_OK || (!p->bias && !p->sigmoid)) return st;
    mn_threads_run(context->threads, mn_ceil_div(p->n_rows, ROWS), epilogue_rows, &j);
    return MN_OK;
}

/* dy becomes the cotangent of x W' + b, and dbias its sums. */
static mn_status preact_backward(mn_context *context, const mn_linear *p, const void *y, void *dy,
                               void *dbias) {
    mn_status st = MN_OK;
    if (context->device) {
        if (p->sigmoid) st = step_on_device(context, MN_GLUE_sigmoid_back, p, dy, dy, y, false);
        if (st != MN_OK || !dbias) return st;
        return step_on_device(context, MN_GLUE_sum, p, dbias, dy, NULL, false);
    }
    job preact = { .p = p, .y = y, .out = dy }, sums = { .p = p, .y = dy, .out = dbias };
    if (p->sigmoid) {
        mn_threads_run(context->threads, mn_ceil_div(p->n_rows, ROWS), sigmoid_back_rows, &preact);
    }
    if (dbias) {
        mn_threads_run(context->threads, mn_ceil_div(p->n_out, COLUMNS), sum_columns, &sums);
    }
    return MN_OK;
}

mn_status mn_linear_backward(mn_context *context, const mn_linear *p, const void *y, void *dy,
                             void *dweight, void *dbias, void *dx, bool add) {
    mn_status st = preact_backward(context, p, y, dy, dbias);
    if (st == MN_OK) st = weight_backward(context, p, dy, dweight);
    if (st == MN_OK) st = input_backward(context, p, dy, dx, add);
    return st;
}
