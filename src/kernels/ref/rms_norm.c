/* rms_norm.c - y = r x w with r = 1 / sqrt(mean(x^2) + eps), row by row.
 *
 *   dx = r (c - x r^2 mean(c x)), c = dy w            dw = sum over rows of dy r x
 *
 * One item is a block of rows; its part of dw waits in shared memory for the second phase. */
#include <math.h>

#include "kernels/ref/ref.h"

enum { ROWS = 256 };

static double inverse_rms(const REAL *x, int64_t V, double eps) {
    double sum = 0.0;
    for (int64_t i = 0; i < V; i++) sum += (double)x[i] * x[i];
    return 1.0 / sqrt(sum / (double)V + eps);
}

bool MN_REF(mn_rms_norm_forward_plan)(const void *args, mn_plan *plan) {
    const mn_call *c = args;
    return mn_ref_plan(plan, mn_ceil_div(c->B, ROWS), 0);
}

void MN_REF(mn_rms_norm_forward_run)(const void *args, int phase, int64_t item, void *shared,
                                     void *scratch) {
    (void)phase, (void)shared, (void)scratch;
    const mn_rms_norm_args *p = args;
    const int64_t V = p->call.V, end = mn_min(p->call.B, (item + 1) * ROWS);
    const REAL *w = p->w.data;
    for (int64_t b = item * ROWS; p->y.data && b < end; b++) {
        const REAL *x = MN_ROW(REAL, p->x, b, 0, 0);
        REAL *y = MN_ROW_OUT(REAL, p->y, b, 0, 0);
        const double r = inverse_rms(x, V, p->eps);
        for (int64_t i = 0; i < V; i++) y[i] = (REAL)(x[i] * r * w[i]);
    }
}

bool MN_REF(mn_rms_norm_backward_plan)(const void *args, mn_plan *plan) {
    const mn_call *c = args;
    int64_t count;
    const int64_t items = mn_ceil_div(c->B, ROWS);
    const bool ok = mn_ref_plan(plan, items, 0) && mn_mul_i64(&count, items, c->V) &&
                    mn_mul_size(&plan->shared_bytes, (size_t)count, sizeof(double));
    mn_ref_add_phase(plan, c->V);
    return ok;
}

/* dx of one row, and its part of dw added to `parts` */
static void row_backward(double *parts, const mn_rms_norm_args *p, int64_t b) {
    const int64_t V = p->call.V;
    const REAL *x = MN_ROW(REAL, p->x, b, 0, 0), *dy = MN_ROW(REAL, p->cot.y, b, 0, 0);
    const REAL *w = p->w.data;
    REAL *dx = MN_ROW_OUT(REAL, p->grad.x, b, 0, 0);
    const double r = inverse_rms(x, V, p->eps);
    double dot = 0.0;
    for (int64_t i = 0; i < V; i++) dot += mn_ref_get(dy, i) * w[i] * x[i];
    for (int64_t i = 0; i < V; i++) {
        const double d = mn_ref_get(dy, i);
        if (dx) dx[i] = (REAL)(r * (d * w[i] - x[i] * r * r * dot / (double)V));
        parts[i] += d * x[i] * r;
    }
}

void MN_REF(mn_rms_norm_backward_run)(const void *args, int phase, int64_t item, void *shared,
                                      void *scratch) {
    (void)scratch;
    const mn_rms_norm_args *p = args;
    const int64_t V = p->call.V;
    if (phase == 1) {
        mn_ref_sum_parts(p->grad.w.data, shared, item, mn_ceil_div(p->call.B, ROWS), V);
        return;
    }
    double *parts = (double *)shared + item * V;
    for (int64_t i = 0; i < V; i++) parts[i] = 0.0;
    const int64_t end = mn_min(p->call.B, (item + 1) * ROWS);
    for (int64_t b = item * ROWS; b < end; b++) row_backward(parts, p, b);
}
