/* l2_norm.c - y = r x with r = 1 / max(|x|, eps) or 1 / sqrt(|x|^2 + eps) (see ref/l2_norm.c). */
#include "base/util.h"
#include "kernels/access.h"
#include "kernels/kernel.h"
#include "kernels/cpu/norm/norm.h"

enum { ROOT = 1 };

/* r; *bent says whether it depends on x */
static double inverse_norm(const mn_l2_norm_args *p, const float *x, bool *bent) {
    const double sum = mn_row_squares(x, p->call.V);
    *bent = p->kind == ROOT || sqrt(sum) > p->eps;
    if (p->kind == ROOT) return 1.0 / sqrt(sum + p->eps);
    return 1.0 / (*bent ? sqrt(sum) : p->eps);
}

/* y = r (x - pull z); x NULL: 0; pull = 0 leaves z unread */
static void scale_row(float *y, const float *x, double r, const float *z, double pull, int64_t n) {
    const vf r_all = vf_set1((float)r), pull_all = vf_set1((float)pull);
    for (int64_t i = 0; i < n; i += MN_VW) {
        const int lanes = vf_lanes(n - i);
        vf inner = x ? vf_load_row(x + i, lanes) : vf_zero();
        if (pull != 0.0) inner = vf_fnma(pull_all, vf_load_row(z + i, lanes), inner);
        vf_store_row(y + i, vf_mul(r_all, inner), lanes);
    }
}

bool MN_T(mn_l2_norm_forward_plan)(const void *args, mn_plan *plan) {
    const mn_l2_norm_args *p = args;
    plan->n_phases = 1;
    plan->items[0] = p->y.data ? mn_ceil_div(p->call.B, MN_NORM_ROWS) : 0;
    return true;
}

void MN_T(mn_l2_norm_forward_run)(const void *args, int phase, int64_t item, void *shared,
                                  void *scratch) {
    (void)phase, (void)shared, (void)scratch;
    const mn_l2_norm_args *p = args;
    const int64_t end = mn_min(p->call.B, (item + 1) * MN_NORM_ROWS);
    for (int64_t b = item * MN_NORM_ROWS; b < end; b++) {
        bool bent;
        const float *x = MN_ROW(float, p->x, b, 0, 0);
        scale_row(MN_ROW_OUT(float, p->y, b, 0, 0), x, inverse_norm(p, x, &bent), NULL, 0.0,
                  p->call.V);
    }
}

bool MN_T(mn_l2_norm_backward_plan)(const void *args, mn_plan *plan) {
    const mn_l2_norm_args *p = args;
    plan->n_phases = 1;
    plan->items[0] = p->grad.x.data ? mn_ceil_div(p->call.B, MN_NORM_ROWS) : 0;
    return true;
}

/* dx = r (dy - x r^2 (x.dy)) */
void MN_T(mn_l2_norm_backward_run)(const void *args, int phase, int64_t item, void *shared,
                                   void *scratch) {
    (void)phase, (void)shared, (void)scratch;
    const mn_l2_norm_args *p = args;
    const int64_t V = p->call.V, end = mn_min(p->call.B, (item + 1) * MN_NORM_ROWS);
    for (int64_t b = item * MN_NORM_ROWS; b < end; b++) {
        bool bent;
        const float *x = MN_ROW(float, p->x, b, 0, 0), *dy = MN_ROW(float, p->cot.y, b, 0, 0);
        const double r = inverse_norm(p, x, &bent);
        const double dot = bent && dy ? mn_row_dot(x, dy, V) : 0.0;
        scale_row(MN_ROW_OUT(float, p->grad.x, b, 0, 0), dy, r, x, r * r * dot, V);
    }
}
