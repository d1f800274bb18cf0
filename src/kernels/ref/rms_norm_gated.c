/* rms_norm_gated.c - RMS norm with a gate a = act(z), before or after.
 *
 *   norm_first: u = x, y = r u w a        gate_first: u = x a, y = r u w
 *   r = 1 / sqrt(mean(u^2) + eps) over each group of V / groups channels
 *
 * Backward, with c = dy w a (norm_first) or dy w (gate_first):
 *
 *   du = r (c - u r^2 mean(c u))      norm_first: dx = du, da = dy w r x      dw = sum dy r u a
 *                                     gate_first: dx = du a, da = du x        dw = sum dy r u
 *   dz = da act'(z)
 *
 * One item is a block of rows; its part of dw waits in shared memory for the second phase. */
#include <math.h>

#include "kernels/ref/ref.h"

enum { ROWS = 256, GATE_FIRST = 1, SIGMOID = 1 };

typedef struct gate {
    double value, slope;
} gate;

static gate gate_at(const mn_rms_norm_gated_args *p, double z) {
    const double s = 1.0 / (1.0 + exp(-z));
    if (p->act == SIGMOID) return (gate){ s, s * (1.0 - s) };
    return (gate){ z * s, s * (1.0 + z * (1.0 - s)) };
}

/* u of one channel */
static double normed(const mn_rms_norm_gated_args *p, double x, double z) {
    return p->order == GATE_FIRST ? x * gate_at(p, z).value : x;
}

static double inverse_rms(const mn_rms_norm_gated_args *p, const REAL *x, const REAL *z,
                          int64_t n) {
    double sum = 0.0;
    for (int64_t i = 0; i < n; i++) {
        const double u = normed(p, x[i], z[i]);
        sum += u * u;
    }
    return 1.0 / sqrt(sum / (double)n + p->eps);
}

bool MN_REF(mn_rms_norm_gated_forward_plan)(const void *args, mn_plan *plan) {
    const mn_call *c = args;
    return mn_ref_plan(plan, mn_ceil_div(c->B, ROWS), 0);
}

void MN_REF(mn_rms_norm_gated_forward_run)(const void *args, int phase, int64_t item, void *shared,
                                           void *scratch) {
    (void)phase, (void)shared, (void)scratch;
    const mn_rms_norm_gated_args *p = args;
    const int64_t V = p->call.V, n = V / p->groups, end = mn_min(p->call.B, (item + 1) * ROWS);
    const REAL *w = p->w.data;
    for (int64_t b = item * ROWS; p->y.data && b < end; b++) {
        const REAL *x = MN_ROW(REAL, p->x, b, 0, 0), *z = MN_ROW(REAL, p->z, b, 0, 0);
        REAL *y = MN_ROW_OUT(REAL, p->y, b, 0, 0);
        for (int64_t first = 0; first < V; first += n) {
            const double r = inverse_rms(p, x + first, z + first, n);
            for (int64_t i = first; i < first + n; i++) {
                y[i] = (REAL)(x[i] * gate_at(p, z[i]).value * r * w[i]);
            }
        }
    }
}

bool MN_REF(mn_rms_norm_gated_backward_plan)(const void *args, mn_plan *plan) {
    const mn_call *c = args;
    int64_t count;
    const int64_t items = mn_ceil_div(c->B, ROWS);
    const bool ok = mn_ref_plan(plan, items, 0) && mn_mul_i64(&count, items, c->V) &&
                    mn_mul_size(&plan->shared_bytes, (size_t)count, sizeof(double));
    mn_ref_add_phase(plan, c->V);
    return ok;
}

/* dx and dz of channels [first, first + n) of row b, and its part of dw added to `parts` */
static void group_backward(double *parts, const mn_rms_norm_gated_args *p, int64_t b, int64_t first,
                           int64_t n) {
    const bool gate_first = p->order == GATE_FIRST;
    const REAL *x = MN_ROW(REAL, p->x, b, 0, 0), *z = MN_ROW(REAL, p->z, b, 0, 0), *w = p->w.data;
    const REAL *dy = MN_ROW(REAL, p->cot.y, b, 0, 0);
    REAL *dx = MN_ROW_OUT(REAL, p->grad.x, b, 0, 0), *dz = MN_ROW_OUT(REAL, p->grad.z, b, 0, 0);
    const double r = inverse_rms(p, x + first, z + first, n);
    double dot = 0.0;
    for (int64_t i = first; i < first + n; i++) {
        dot += mn_ref_get(dy, i) * w[i] * x[i] * gate_at(p, z[i]).value;    // c u, either order
    }
    for (int64_t i = first; i < first + n; i++) {
        const gate a = gate_at(p, z[i]);
        const double d = mn_ref_get(dy, i), u = normed(p, x[i], z[i]);
        const double c = d * w[i] * (gate_first ? 1.0 : a.value);
        const double du = r * (c - u * r * r * dot / (double)n);
        const double da = gate_first ? du * x[i] : d * w[i] * r * x[i];
        if (dx) dx[i] = (REAL)(gate_first ? du * a.value : du);
        if (dz) dz[i] = (REAL)(da * a.slope);
        parts[i] += d * r * x[i] * a.value;
    }
}

void MN_REF(mn_rms_norm_gated_backward_run)(const void *args, int phase, int64_t item, void *shared,
                                            void *scratch) {
    (void)scratch;
    const mn_rms_norm_gated_args *p = args;
    const int64_t V = p->call.V, n = V / p->groups;
    if (phase == 1) {
        mn_ref_sum_parts(p->grad.w.data, shared, item, mn_ceil_div(p->call.B, ROWS), V);
        return;
    }
    double *parts = (double *)shared + item * V;
    for (int64_t i = 0; i < V; i++) parts[i] = 0.0;
    const int64_t end = mn_min(p->call.B, (item + 1) * ROWS);
    for (int64_t b = item * ROWS; b < end; b++) {
        for (int64_t first = 0; first < V; first += n) group_backward(parts, p, b, first, n);
    }
}
