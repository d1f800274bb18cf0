/* adamw.c - AdamW over blocks of parameters, one pass over memory. */
#include "base/checked.h"
#include "base/util.h"
#include "kernels/kernel.h"
#include "kernels/cpu/optim/adamw_step.h"
#include "kernels/cpu/optim/optim.h"

enum { NUMBERS = 8192 };

bool MN_T(mn_adamw_forward_plan)(const void *args, mn_plan *plan) {
    const mn_call *c = args;
    plan->n_phases = 1;
    plan->items[0] = mn_ceil_div(c->B, NUMBERS);
    return mn_mul_size(&plan->scratch_bytes, (size_t)c->S, sizeof(adamw_rates));
}

void MN_T(mn_adamw_forward_run)(const void *args, int phase, int64_t item, void *shared,
                                void *scratch) {
    (void)phase, (void)shared;
    const mn_adamw_args *a = args;
    adamw_rates *rates = scratch;
    for (int64_t s = 0; s < a->call.S; s++) {
        rates[s] = (adamw_rates){
            .decay = (float)(a->lr * a->weight_decay),
            .first = (float)(1.0 - a->beta1), .second = (float)(1.0 - a->beta2),
            .eps = (float)a->eps,
            .rate = (float)(a->lr / adamw_correction(a->beta1, a->step0 + s + 1)),
            .spread = (float)(1.0 / adamw_correction(a->beta2, a->step0 + s + 1)),
        };
    }
    const int64_t B = a->call.B, end = mn_min(B, (item + 1) * NUMBERS);
    const float *p = a->p.data, *m = a->m.data, *v = a->v.data, *g = a->grads.data;
    float *p_out = a->p_out.data, *m_out = a->m_out.data, *v_out = a->v_out.data;
    for (int64_t i = item * NUMBERS; i < end; i += MN_VW) {
        const int lanes = vf_lanes(end - i);
        adamw_moments x = { vf_load_row(p + i, lanes), vf_load_row(m + i, lanes),
                            vf_load_row(v + i, lanes) };
        for (int64_t s = 0; s < a->call.S; s++) {
            adamw_step(&x, vf_load_row(g + s * B + i, lanes), &rates[s]);
            if (p_out) vf_store_row(p_out + s * B + i, x.p, lanes);
            if (m_out) vf_store_row(m_out + s * B + i, x.m, lanes);
            if (v_out) vf_store_row(v_out + s * B + i, x.v, lanes);
        }
    }
}

/* ---- the optimiser's pieces (optim.h) -------------------------------------------------------- */

void MN_T(mn_adamw_update)(const mn_adamw_piece *a) {
    const adamw_rates rates = { .decay = (float)(a->lr * a->weight_decay),
                                .first = (float)(1.0 - a->beta1),
                                .second = (float)(1.0 - a->beta2),
                                .eps = (float)a->eps,
                                .rate = (float)(a->lr / adamw_correction(a->beta1, a->step)),
                                .spread = (float)(1.0 / adamw_correction(a->beta2, a->step)) };
    const vf scale = vf_set1((float)a->grad_scale);
    for (int64_t i = 0; i < a->count; i += MN_VW) {
        const int lanes = vf_lanes(a->count - i);
        adamw_moments x = { vf_load_row(a->p + i, lanes), vf_load_row(a->m + i, lanes),
                            vf_load_row(a->v + i, lanes) };
        adamw_step(&x, vf_mul(scale, vf_load_row(a->g + i, lanes)), &rates);
        vf_store_row(a->p + i, x.p, lanes);
        vf_store_row(a->m + i, x.m, lanes);
        vf_store_row(a->v + i, x.v, lanes);
    }
}

/* A square of a float is exact in double. Lanes in the same order on every target. */
double MN_T(mn_sum_squares)(const float *x, int64_t count) {
    enum { LANES = 16 };
    double sums[LANES] = { 0.0 };
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        for (int l = 0; l < LANES; l++) sums[l] += (double)x[i + l] * x[i + l];
    }
    for (int l = 0; i < count; i++, l++) sums[l] += (double)x[i] * x[i];
    double sum = 0.0;
    for (int l = 0; l < LANES; l++) sum += sums[l];
    return sum;
}
