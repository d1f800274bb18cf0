/* l2_norm.c - y = r x with r = 1 / max(|x|, eps) (max) or 1 / sqrt(|x|^2 + eps) (root), row by row.
 *
 *   dx = r (dy - x r^2 (x.dy));  below the floor of `max` r is constant and dx = r dy
 *
 * One item is a block of rows. */
#include <math.h>

#include "kernels/ref/ref.h"

enum { ROWS = 256, ROOT = 1 };

/* r; *bent says whether it depends on x */
static double inverse_norm(const mn_l2_norm_args *p, const REAL *x, bool *bent) {
    double sum = 0.0;
    for (int64_t i = 0; i < p->call.V; i++) sum += (double)x[i] * x[i];
    *bent = p->kind == ROOT || sqrt(sum) > p->eps;
    if (p->kind == ROOT) return 1.0 / sqrt(sum + p->eps);
    return 1.0 / (*bent ? sqrt(sum) : p->eps);
}

bool MN_REF(mn_l2_norm_forward_plan)(const void *args, mn_plan *plan) {
    const mn_call *c = args;
    return mn_ref_plan(plan, mn_ceil_div(c->B, ROWS), 0);
}

void MN_REF(mn_l2_norm_forward_run)(const void *args, int phase, int64_t item, void *shared,
                                    void *scratch) {
    (void)phase, (void)shared, (void)scratch;
    const mn_l2_norm_args *p = args;
    const int64_t end = mn_min(p->call.B, (item + 1) * ROWS);
    for (int64_t b = item * ROWS; p->y.data && b < end; b++) {
        bool bent;
        const REAL *x = MN_ROW(REAL, p->x, b, 0, 0);
        REAL *y = MN_ROW_OUT(REAL, p->y, b, 0, 0);
        const double r = inverse_norm(p, x, &bent);
        for (int64_t i = 0; i < p->call.V; i++) y[i] = (REAL)(x[i] * r);
    }
}

bool MN_REF(mn_l2_norm_backward_plan)(const void *args, mn_plan *plan) {
    return MN_REF(mn_l2_norm_forward_plan)(args, plan);
}

void MN_REF(mn_l2_norm_backward_run)(const void *args, int phase, int64_t item, void *shared,
                                     void *scratch) {
    (void)phase, (void)shared, (void)scratch;
    const mn_l2_norm_args *p = args;
    const int64_t V = p->call.V, end = mn_min(p->call.B, (item + 1) * ROWS);
    for (int64_t b = item * ROWS; p->grad.x.data && b < end; b++) {
        bool bent;
        const REAL *x = MN_ROW(REAL, p->x, b, 0, 0), *dy = MN_ROW(REAL, p->cot.y, b, 0, 0);
        REAL *dx = MN_ROW_OUT(REAL, p->grad.x, b, 0, 0);
        const double r = inverse_norm(p, x, &bent);
        double dot = 0.0;
        for (int64_t i = 0; bent && i < V; i++) dot += x[i] * mn_ref_get(dy, i);
        for (int64_t i = 0; i < V; i++)
            dx[i] = (REAL)(r * (mn_ref_get(dy, i) - x[i] * r * r * dot));
    }
}
