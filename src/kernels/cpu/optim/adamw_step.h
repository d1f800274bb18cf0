/* adamw_step.h - one AdamW step of a vector of parameters (see ref/adamw.c).
 *
 * Moments move towards their inputs, m += (1 - b1)(g - m): with b1 m + (1 - b1) g two rounded
 * factors would not add up to one, and v would settle beside g^2. */
#ifndef MN_KERNELS_CPU_OPTIM_ADAMW_STEP_H
#define MN_KERNELS_CPU_OPTIM_ADAMW_STEP_H

#include <math.h>

#include "kernels/cpu/simd/row.h"

typedef struct adamw_moments {
    vf p, m, v;
} adamw_moments;

typedef struct adamw_rates {
    float decay;     // lr weight_decay
    float first;     // 1 - b1
    float second;    // 1 - b2
    float eps;
    float rate;      // lr / (1 - b1^s)
    float spread;    // 1 / (1 - b2^s)
} adamw_rates;

/* 1 - beta^step, without cancellation for beta next to 1 */
static inline double adamw_correction(double beta, int64_t step) {
    return -expm1((double)step * log(beta));
}

static inline void adamw_step(adamw_moments *x, vf g, const adamw_rates *r) {
    const vf decayed = vf_fnma(vf_set1(r->decay), x->p, x->p);
    x->m = vf_fma(vf_set1(r->first), vf_sub(g, x->m), x->m);
    x->v = vf_fma(vf_set1(r->second), vf_sub(vf_mul(g, g), x->v), x->v);
    const vf root = vf_sqrt(vf_mul(x->v, vf_set1(r->spread)));
    const vf ratio = vf_div(x->m, vf_add(root, vf_set1(r->eps)));
    x->p = vf_fnma(vf_set1(r->rate), ratio, decayed);
}

#endif
