/* tape_linear.c - y = x W' + b on the tape.
 *
 *   dx = dy W      dW = dy'x      db = column sums of dy */
#include "base/util.h"
#include "ops/matmul.h"
#include "ops/tape_node.h"

typedef struct linear {
    mn_tensor *x, *weight, *bias, *y;
    int64_t rows, n_in, n_out;
} linear;

enum { ROWS = 32, COLUMNS = 64 };

typedef struct bias_job {
    void *y;
    const void *b;
    int64_t rows, n;
    bool f64, add;
} bias_job;

static void add_bias(void *job, int64_t item, int worker) {
    (void)worker;
    const bias_job *j = job;
    const int64_t last = mn_min((item + 1) * ROWS, j->rows);
    for (int64_t row = item * ROWS; row < last; row++) {
        if (j->f64) {
            double *y = (double *)j->y + row * j->n;
            for (int64_t i = 0; i < j->n; i++) y[i] += ((const double *)j->b)[i];
        } else {
            float *y = (float *)j->y + row * j->n;
            for (int64_t i = 0; i < j->n; i++) y[i] += ((const float *)j->b)[i];
        }
    }
}

/* Column sums in double, rows in order. Here y is the gradient of the bias and b that of the
 * result. */
static void sum_columns(void *job, int64_t item, int worker) {
    (void)worker;
    const bias_job *j = job;
    const int64_t first = item * COLUMNS, width = mn_min(COLUMNS, j->n - first);
    double sum[COLUMNS] = { 0.0 };
    for (int64_t row = 0; row < j->rows; row++) {
        const int64_t at = row * j->n + first;
        if (j->f64) {
            for (int64_t i = 0; i < width; i++) sum[i] += ((const double *)j->b)[at + i];
        } else {
            for (int64_t i = 0; i < width; i++) sum[i] += ((const float *)j->b)[at + i];
        }
    }
    for (int64_t i = 0; i < width; i++) {
        if (j->f64) {
            double *y = (double *)j->y + first + i;
            *y = (j->add ? *y : 0.0) + sum[i];
        } else {
            float *y = (float *)j->y + first + i;
            *y = (float)((j->add ? (double)*y : 0.0) + sum[i]);
        }
    }
}

/* The gradient of x goes straight to where it belongs. */
static void back_input(mn_tape *tape, const linear *l, const void *dy) {
    mn_matmul_args dx = { .dtype = tape->dtype, .a = dy, .b = l->weight->data, .M = l->rows,
                          .N = l->n_in, .K = l->n_out, .c_row = mn_row_step(l->x) };
    dx.c = mn_grad_write(tape, l->x, &dx.accumulate);
    if (dx.c) mn_tape_product(tape, &dx);
}

static void back_weight(mn_tape *tape, const linear *l, const void *dy) {
    mn_matmul_args dw = { .dtype = tape->dtype, .a = dy, .a_transposed = true, .b = l->x->data,
                          .b_row = mn_row_step(l->x), .M = l->n_out, .N = l->n_in, .K = l->rows };
    dw.c = mn_grad_write(tape, l->weight, &dw.accumulate);
    if (dw.c) mn_tape_product(tape, &dw);
}

static void back_bias(mn_tape *tape, const linear *l, const void *dy) {
    bias_job job = { .b = dy, .rows = l->rows, .n = l->n_out, .f64 = tape->dtype == MN_F64 };
    job.y = mn_grad_write(tape, l->bias, &job.add);
    if (!job.y || !mn_tape_runs(tape)) return;
    mn_tape_items(tape, mn_ceil_div(job.n, COLUMNS), sum_columns, &job);
}

static void back_linear(mn_tape *tape, void *payload) {
    const linear *l = payload;
    const void *dy = mn_grad_read(l->y);
    if (!dy) return;
    if (mn_wants(l->x)) back_input(tape, l, dy);
    if (mn_wants(l->weight)) back_weight(tape, l, dy);
    if (l->bias && mn_wants(l->bias)) back_bias(tape, l, dy);
}

mn_tensor *mn_tape_linear(mn_tape *tape, mn_tensor *x, mn_tensor *weight, mn_tensor *bias) {
    if (!x || !weight || mn_tape_dead(tape)) return NULL;
    const int64_t n_in = weight->shape[3], n_out = weight->shape[2];
    if (x->shape[2] != 1 || x->shape[3] != n_in || mn_row_step(x) == 0) {
        return mn_tape_fail(tape, mn_fail(MN_ERR_INTERNAL,
                            "%s: a weight of %lld inputs on rows of %lld numbers", tape->scope,
                            (long long)n_in, (long long)x->shape[3]));
    }
    linear *l = mn_tape_note(tape, sizeof *l);
    mn_tensor *y = mn_tape_new(tape, (int64_t[]){ x->shape[0], x->shape[1], 1, n_out });
    if (!l || !y) return NULL;
    *l = (linear){ x, weight, bias, y, x->shape[0] * x->shape[1], n_in, n_out };
    mn_tape_product(tape, &(mn_matmul_args){
        .dtype = tape->dtype, .c = y->data, .a = x->data, .b = weight->data, .M = l->rows,
        .N = n_out, .K = n_in, .b_transposed = true, .a_row = mn_row_step(x) });
    if (bias && mn_tape_runs(tape)) {
        bias_job job = { y->data, bias->data, l->rows, n_out, tape->dtype == MN_F64, true };
        mn_tape_items(tape, mn_ceil_div(l->rows, ROWS), add_bias, &job);
    }
    const bool wanted = mn_wants(x) || mn_wants(weight) || mn_wants(bias);
    mn_tape_record(tape, "a projection", back_linear, l, wanted, &y, 1);
    return y;
}
