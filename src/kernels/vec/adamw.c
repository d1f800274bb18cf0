/* adamw.c - AdamW over blocks of parameters, one pass over memory (see ref/adamw.c).
 *
 * Moments move towards their inputs, m += (1 - b1)(g - m): with b1 m + (1 - b1) g two rounded
 * factors would not add up to one, and v would settle beside g^2. */
#include "base/checked.h"
#include "base/util.h"
#include "kernels/kernel.h"
#include "kernels/vec/row.h"

enum { NUMBERS = 8192 };

bool MN_T(mn_adamw_forward_plan)(const void *args, mn_plan *plan) {
    const mn_call *c = args;
    plan->n_phases = 1;
    plan->items[0] = mn_ceil_div(c->B, NUMBERS);
    return mn_mul_size(&plan->scratch_bytes, (size_t)c->S, 2 * sizeof(float));
}

/* 1 - beta^step, without cancellation for beta next to 1 */
static double correction(double beta, int64_t step) {
    return -expm1((double)step * log(beta));
}

typedef struct moments {
    vf p, m, v;
} moments;

/* rate = lr / (1 - b1^s); spread = 1 / (1 - b2^s) */
static inline void step_once(moments *x, vf g, const mn_adamw_args *a, float rate, float spread) {
    const vf decayed = vf_fnma(vf_set1((float)(a->lr * a->weight_decay)), x->p, x->p);
    x->m = vf_fma(vf_set1((float)(1.0 - a->beta1)), vf_sub(g, x->m), x->m);
    x->v = vf_fma(vf_set1((float)(1.0 - a->beta2)), vf_sub(vf_mul(g, g), x->v), x->v);
    const vf root = vf_sqrt(vf_mul(x->v, vf_set1(spread)));
    const vf ratio = vf_div(x->m, vf_add(root, vf_set1((float)a->eps)));
    x->p = vf_fnma(vf_set1(rate), ratio, decayed);
}

void MN_T(mn_adamw_forward_run)(const void *args, int phase, int64_t item, void *shared,
                                void *scratch) {
    (void)phase, (void)shared;
    const mn_adamw_args *a = args;
    float *rate = scratch, *spread = rate + a->call.S;
    for (int64_t s = 0; s < a->call.S; s++) {
        rate[s] = (float)(a->lr / correction(a->beta1, a->step0 + s + 1));
        spread[s] = (float)(1.0 / correction(a->beta2, a->step0 + s + 1));
    }
    const int64_t B = a->call.B, end = mn_min(B, (item + 1) * NUMBERS);
    const float *p = a->p.data, *m = a->m.data, *v = a->v.data, *g = a->grads.data;
    float *p_out = a->p_out.data, *m_out = a->m_out.data, *v_out = a->v_out.data;
    for (int64_t i = item * NUMBERS; i < end; i += MN_VW) {
        const int lanes = vf_lanes(end - i);
        moments x = { vf_load_row(p + i, lanes), vf_load_row(m + i, lanes),
                      vf_load_row(v + i, lanes) };
        for (int64_t s = 0; s < a->call.S; s++) {
            step_once(&x, vf_load_row(g + s * B + i, lanes), a, rate[s], spread[s]);
            if (p_out) vf_store_row(p_out + s * B + i, x.p, lanes);
            if (m_out) vf_store_row(m_out + s * B + i, x.m, lanes);
            if (v_out) vf_store_row(v_out + s * B + i, x.v, lanes);
        }
    }
}
