/* kla_discretise.c - KLA's dynamics from its parameters; equations in ref/kla_discretise.c.
 *
 * Cells are independent and lie in a row, so an item is a stretch of cells. */
#include "base/util.h"
#include "kernels/access.h"
#include "kernels/kernel.h"
#include "kernels/cpu/simd/vec.h"

enum { CELLS = 4096 };

/* What both passes need of a vector of cells. With the zero-order hold x is not used: w = fade =
 * 1. */
typedef struct cell {
    vf dt, c, p, abar;
    vf w, slope, fade;    // (1 - e^-x) / x, its derivative, e^-x for x = 2 c dt
} cell;

/* w and its slope: differences cancel below x = 1/2, where their Taylor series are taken instead,
 * w = sum (-x)^(i-1) / i!. The first term left out is below 2^-26 of the sum. */
static void weigh(cell *cells, vf x) {
    static const float W[] = { 1.0f, -1.0f / 2, 1.0f / 6, -1.0f / 24, 1.0f / 120, -1.0f / 720,
                               1.0f / 5040, -1.0f / 40320 };
    static const float S[] = { -1.0f / 2,   2.0f / 6,    -3.0f / 24,    4.0f / 120,
                               -5.0f / 720, 6.0f / 5040, -7.0f / 40320, 8.0f / 362880 };
    const vm small = vf_lt(x, vf_set1(0.5f));
    const vf r = vf_div(vf_set1(1.0f), x), less = vf_neg(vf_expm1(vf_neg(x)));
    cells->fade = vf_exp(vf_neg(x));
    cells->w = vf_select(small, vf_poly(W, 8, x), vf_mul(less, r));
    const vf slope = vf_mul(vf_sub(cells->fade, vf_mul(less, r)), r);
    cells->slope = vf_select(small, vf_poly(S, 8, x), slope);
}

/* Above 80 exp(lambda_log) nears the end of float32; there abar is 0 and pbar below 1e-35
 * already. */
static cell cell_at(const mn_kla_discretise_args *args, int64_t at, int n) {
    const vf lambda_log = vf_load_n((const float *)args->lambda_log.data + at, n);
    const vf delta = vf_load_n((const float *)args->delta.data + at, n);
    const vf noise = vf_load_n((const float *)args->process_noise.data + at, n);
    cell x = { .dt = vf_add(vf_softplus(delta), vf_set1(1e-7f)),
               .c = vf_exp(vf_min(vf_set1(80.0f), lambda_log)),
               .p = vf_max(noise, vf_set1(1e-7f)), .w = vf_set1(1.0f), .fade = vf_set1(1.0f),
               .slope = vf_zero() };
    const vf rate = vf_mul(x.c, x.dt);
    x.abar = vf_exp(vf_neg(rate));
    if (args->mode == 0) weigh(&x, vf_add(rate, rate));
    return x;
}

bool MN_T(mn_kla_discretise_forward_plan)(const void *args, mn_plan *plan) {
    const mn_call *c = args;
    plan->n_phases = 1;
    plan->items[0] = mn_ceil_div(c->V * c->K, CELLS);
    return true;
}

void MN_T(mn_kla_discretise_forward_run)(const void *args, int phase, int64_t item, void *shared,
                                         void *scratch) {
    (void)phase, (void)shared, (void)scratch;
    const mn_kla_discretise_args *p = args;
    const int64_t end = mn_min(p->call.V * p->call.K, (item + 1) * CELLS);
    float *abar = p->abar.data, *pbar = p->pbar.data;
    for (int64_t at = item * CELLS; at < end; at += MN_VW) {
        const int n = vf_lanes(end - at);
        const cell x = cell_at(p, at, n);
        if (abar) vf_store_n(abar + at, x.abar, n);
        if (pbar) vf_store_n(pbar + at, vf_mul(vf_mul(x.p, x.dt), x.w), n);
    }
}

bool MN_T(mn_kla_discretise_backward_plan)(const void *args, mn_plan *plan) {
    return MN_T(mn_kla_discretise_forward_plan)(args, plan);
}

void MN_T(mn_kla_discretise_backward_run)(const void *args, int phase, int64_t item, void *shared,
                                          void *scratch) {
    (void)phase, (void)shared, (void)scratch;
    const mn_kla_discretise_args *p = args;
    const int64_t end = mn_min(p->call.V * p->call.K, (item + 1) * CELLS);
    const float *cot_a = p->cot.abar.data, *cot_p = p->cot.pbar.data;
    float *ddelta = p->grad.delta.data, *dlambda = p->grad.lambda_log.data;
    float *dnoise = p->grad.process_noise.data;
    for (int64_t at = item * CELLS; at < end; at += MN_VW) {
        const int n = vf_lanes(end - at);
        const cell x = cell_at(p, at, n);
        const vf ga = cot_a ? vf_load_n(cot_a + at, n) : vf_zero();
        const vf gp = cot_p ? vf_load_n(cot_p + at, n) : vf_zero();
        const vf decay = vf_mul(vf_mul(ga, x.c), x.abar), grow = vf_mul(gp, x.p);
        const vf rate2 = vf_mul(vf_mul(x.c, x.dt), vf_mul(x.slope, x.dt));
        const vf dlog = vf_fnma(decay, x.dt, vf_mul(vf_add(grow, grow), rate2));
        const vf ddt = vf_sub(vf_mul(grow, x.fade), decay);
        const vf noise = vf_load_n((const float *)p->process_noise.data + at, n);
        const vf delta = vf_load_n((const float *)p->delta.data + at, n);
        const vf to_noise = vf_mul(vf_mul(gp, x.dt), x.w);
        if (dlambda) vf_store_n(dlambda + at, dlog, n);
        if (ddelta) vf_store_n(ddelta + at, vf_mul(vf_sigmoid(delta), ddt), n);
        if (!dnoise) continue;
        vf_store_n(dnoise + at, vf_select(vf_ge(noise, vf_set1(1e-7f)), to_noise, vf_zero()), n);
    }
}
