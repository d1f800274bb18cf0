/* rms_norm.c - y = r x w, r = 1 / sqrt(mean(x^2) + eps), by blocks of rows (see ref/rms_norm.c).
 *
 * A row is read twice, the second time from the first cache. The gradient of w is gathered per
 * block of rows in shared memory and added up in a second phase. */
#include "base/checked.h"
#include "base/util.h"
#include "kernels/access.h"
#include "kernels/kernel.h"
#include "kernels/cpu/norm/norm.h"

#include <string.h>

static double inverse_rms(const float *x, int64_t V, double eps) {
    return 1.0 / sqrt(mn_row_squares(x, V) / (double)V + eps);
}

bool MN_T(mn_rms_norm_forward_plan)(const void *args, mn_plan *plan) {
    const mn_rms_norm_args *p = args;
    plan->n_phases = 1;
    plan->items[0] = p->y.data ? mn_ceil_div(p->call.B, MN_NORM_ROWS) : 0;
    return true;
}

void MN_T(mn_rms_norm_forward_run)(const void *args, int phase, int64_t item, void *shared,
                                   void *scratch) {
    (void)phase, (void)shared, (void)scratch;
    const mn_rms_norm_args *p = args;
    const int64_t V = p->call.V, end = mn_min(p->call.B, (item + 1) * MN_NORM_ROWS);
    const float *w = p->w.data;
    for (int64_t b = item * MN_NORM_ROWS; b < end; b++) {
        const float *x = MN_ROW(float, p->x, b, 0, 0);
        float *y = MN_ROW_OUT(float, p->y, b, 0, 0);
        const vf r = vf_set1((float)inverse_rms(x, V, p->eps));
        for (int64_t i = 0; i < V; i += MN_VW) {
            const int lanes = vf_lanes(V - i);
            const vf scaled = vf_mul(vf_load_row(x + i, lanes), r);
            vf_store_row(y + i, vf_mul(scaled, vf_load_row(w + i, lanes)), lanes);
        }
    }
}

/* Scratch: a row of c. Shared: for each block of rows its part of dw. */
bool MN_T(mn_rms_norm_backward_plan)(const void *args, mn_plan *plan) {
    const mn_call *c = args;
    int64_t count;
    plan->n_phases = 2;
    plan->items[0] = mn_ceil_div(c->B, MN_NORM_ROWS);
    plan->items[1] = mn_ceil_div(c->V, MN_NORM_ROWS);
    return mn_mul_size(&plan->scratch_bytes, (size_t)c->V, sizeof(float)) &&
           mn_mul_i64(&count, plan->items[0], c->V) &&
           mn_mul_size(&plan->shared_bytes, (size_t)count, sizeof(float));
}

/* c = dy w into `scaled`, dw += dy r x, then dx = r (c - x r^2 mean(c x)) */
static void row_backward(float *scaled, float *dw, const mn_rms_norm_args *p, int64_t b) {
    const int64_t V = p->call.V;
    const float *x = MN_ROW(float, p->x, b, 0, 0), *dy = MN_ROW(float, p->cot.y, b, 0, 0);
    const float *w = p->w.data;
    float *dx = MN_ROW_OUT(float, p->grad.x, b, 0, 0);
    const double inverse = inverse_rms(x, V, p->eps);
    const vf r = vf_set1((float)inverse);
    for (int64_t i = 0; i < V; i += MN_VW) {
        const int lanes = vf_lanes(V - i);
        const vf d = vf_load_row(dy + i, lanes), x_i = vf_load_row(x + i, lanes);
        vf_store_row(scaled + i, vf_mul(d, vf_load_row(w + i, lanes)), lanes);
        vf_store_row(dw + i, vf_fma(d, vf_mul(r, x_i), vf_load_row(dw + i, lanes)), lanes);
    }
    if (!dx) return;
    const vf pull = vf_set1((float)(inverse * inverse * mn_row_dot(scaled, x, V) / (double)V));
    for (int64_t i = 0; i < V; i += MN_VW) {
        const int lanes = vf_lanes(V - i);
        const vf x_i = vf_load_row(x + i, lanes), c = vf_load_row(scaled + i, lanes);
        vf_store_row(dx + i, vf_mul(r, vf_fnma(pull, x_i, c)), lanes);
    }
}

void MN_T(mn_rms_norm_backward_run)(const void *args, int phase, int64_t item, void *shared,
                                    void *scratch) {
    const mn_rms_norm_args *p = args;
    const int64_t V = p->call.V;
    if (phase == 1) {
        mn_sum_parts(p->grad.w.data, shared, item, mn_ceil_div(p->call.B, MN_NORM_ROWS), V);
        return;
    }
    float *dw = (float *)shared + item * V;
    memset(dw, 0, (size_t)V * sizeof(float));
    const int64_t end = mn_min(p->call.B, (item + 1) * MN_NORM_ROWS);
    for (int64_t b = item * MN_NORM_ROWS; b < end; b++) {
        float *dx = MN_ROW_OUT(float, p->grad.x, b, 0, 0);
        if (p->cot.y.data) row_backward(scratch, dw, p, b);
        else if (dx) memset(dx, 0, (size_t)V * sizeof(float));
    }
}
