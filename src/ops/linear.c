/* linear.c - y = x W' + b over rows, or its sigmoid s; ds/dz = s (1 - s).
 *
 *   dz = dy or dy s (1 - s)      dW = dz'x      db = column sums of dz      dx = dz W */
#include "ops/linear.h"

#include <math.h>

#include "base/util.h"
#include "ops/matmul.h"

#if MN_HAVE_X86_TARGETS
#define MN_TARGET avx2
#include "kernels/vec/map.h"
#undef MN_TARGET
#define MN_TARGET avx512
#include "kernels/vec/map.h"
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
static void finish_rows(void *context, int64_t item, int worker) {
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
static void open_rows(void *context, int64_t item, int worker) {
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

void mn_linear_forward(mn_context *context, const mn_linear *p, void *y) {
    const mn_matmul_args product = { .dtype = p->dtype, .c = y, .a = p->x, .b = p->weight,
                                     .M = p->n_rows, .N = p->n_out, .K = p->n_in,
                                     .b_transposed = true };
    mn_matmul(context, &product);
    job j = { .p = p, .out = y, .sigmoid_f32 = plain_sigmoid };
#if MN_HAVE_X86_TARGETS
    if (context->target == MN_TARGET_AVX2) j.sigmoid_f32 = mn_map_sigmoid_avx2;
    if (context->target == MN_TARGET_AVX512) j.sigmoid_f32 = mn_map_sigmoid_avx512;
#endif
    if (!p->bias && !p->sigmoid) return;
    mn_threads_run(context->threads, mn_ceil_div(p->n_rows, ROWS), finish_rows, &j);
}

void mn_linear_backward(mn_context *context, const mn_linear *p, const void *y, void *dy,
                        void *dweight, void *dbias, void *dx, bool add) {
    if (p->sigmoid) {
        job j = { .p = p, .y = y, .out = dy };
        mn_threads_run(context->threads, mn_ceil_div(p->n_rows, ROWS), open_rows, &j);
    }
    if (dweight) {
        const mn_matmul_args product = { .dtype = p->dtype, .c = dweight, .a = dy, .b = p->x,
                                         .M = p->n_out, .N = p->n_in, .K = p->n_rows,
                                         .a_transposed = true };
        mn_matmul(context, &product);
    }
    if (dbias) {
        job j = { .p = p, .y = dy, .out = dbias };
        mn_threads_run(context->threads, mn_ceil_div(p->n_out, COLUMNS), sum_columns, &j);
    }
    if (dx) {
        const mn_matmul_args product = { .dtype = p->dtype, .c = dx, .a = dy, .b = p->weight,
                                         .M = p->n_rows, .N = p->n_in, .K = p->n_out,
                                         .accumulate = add };
        mn_matmul(context, &product);
    }
}
