/* adamw.c - AdamW (Loshchilov and Hutter, 2019): decoupled weight decay, bias-corrected moments.
 *
 *   p -= lr wd p;  m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2
 *   p -= lr (m / (1 - b1^s)) / (sqrt(v / (1 - b2^s)) + eps)
 *
 * S stacked steps give what S calls give: numbers are stored between steps as memory would store
 * them. One item is a block of parameters. */
#include <math.h>

#include "kernels/ref/ref.h"

enum { NUMBERS = 4096 };

bool MN_REF(mn_adamw_forward_plan)(const void *args, mn_plan *plan) {
    const mn_call *c = args;
    int64_t count;
    return mn_mul_i64(&count, c->S, 2) && mn_ref_plan(plan, mn_ceil_div(c->B, NUMBERS), count);
}

/* 1 - beta^step, without cancellation for beta next to 1 */
static double correction(double beta, int64_t step) {
    return -expm1((double)step * log(beta));
}

static void step_once(REAL *p, REAL *m, REAL *v, double g, const mn_adamw_args *a,
                      const double bias[2]) {
    const double decayed = *p - a->lr * a->weight_decay * *p;
    *m = (REAL)(a->beta1 * *m + (1.0 - a->beta1) * g);
    *v = (REAL)(a->beta2 * *v + (1.0 - a->beta2) * g * g);
    const double m_hat = *m / bias[0], v_hat = *v / bias[1];
    *p = (REAL)(decayed - a->lr * m_hat / (sqrt(v_hat) + a->eps));
}

void MN_REF(mn_adamw_forward_run)(const void *args, int phase, int64_t item, void *shared,
                                  void *scratch) {
    (void)phase, (void)shared;
    const mn_adamw_args *a = args;
    double *bias = scratch;
    for (int64_t s = 0; s < a->call.S; s++) {
        bias[2 * s] = correction(a->beta1, a->step0 + s + 1);
        bias[2 * s + 1] = correction(a->beta2, a->step0 + s + 1);
    }
    const int64_t B = a->call.B, end = mn_min(B, (item + 1) * NUMBERS);
    const REAL *g = a->grads.data;
    REAL *p_out = a->p_out.data, *m_out = a->m_out.data, *v_out = a->v_out.data;
    for (int64_t i = item * NUMBERS; i < end; i++) {
        REAL p = ((const REAL *)a->p.data)[i];
        REAL m = ((const REAL *)a->m.data)[i], v = ((const REAL *)a->v.data)[i];
        for (int64_t s = 0; s < a->call.S; s++) {
            step_once(&p, &m, &v, g[s * B + i], a, bias + 2 * s);
            if (p_out) p_out[s * B + i] = p;
            if (m_out) m_out[s * B + i] = m;
            if (v_out) v_out[s * B + i] = v;
        }
    }
}

/* A step has no gradients: nothing to do. */
bool MN_REF(mn_adamw_backward_plan)(const void *args, mn_plan *plan) {
    (void)args, (void)plan;
    return true;
}

void MN_REF(mn_adamw_backward_run)(const void *args, int phase, int64_t item, void *shared,
                                   void *scratch) {
    (void)args, (void)phase, (void)item, (void)shared, (void)scratch;
}
