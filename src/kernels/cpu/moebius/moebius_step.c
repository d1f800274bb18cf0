/* moebius_step.c - one token of Kalman Linear Attention on a state kept in place.
 *
 * The state lies (channel, slot), so here a vector holds slots of one channel; sums over slots are
 * folded for several channels at once. lam and eta are read and written once, on the equations of
 * ref/moebius.c as they stand: a single token has no chain of divisions to shorten. */
#include "kernels/cpu/moebius/moebius_tile.h"

/* Channels of an item: about CELLS cells. Cells asked of memory before they are needed. */
enum { CELLS = 8192, AHEAD = 1024 };

static int64_t channels_of_item(const mn_call *call) {
    return mn_max(1, CELLS / call->K / MN_VW) * MN_VW;
}

bool MN_T(mn_moebius_step_plan)(const void *args, mn_plan *plan) {
    const mn_call *c = args;
    plan->n_phases = 1;
    return mn_mul_i64(&plan->items[0], c->B, mn_ceil_div(c->V, channels_of_item(c)));
}

/* Pointers of one sequence; NULL where absent. */
typedef struct step {
    const float *v, *prec, *k, *q, *a, *p, *lam0, *eta0;
    float *lam, *eta;
    int64_t K;
    bool prior;
} step;

/* Slots [s, s + n) of channel m: new state, and what the channel's mean and variance gain. With
 * `whole`, n is MN_VW; without `var`, yvar is not wanted. */
MN_ALWAYS_INLINE void advance(vf *y, vf *yvar, const step *x, int64_t m, int64_t s, int n,
                              bool whole, bool var) {
#define LOAD(from) (whole ? vf_load(from) : vf_load_n(from, n))
#define STORE(to, v) (whole ? vf_store(to, v) : vf_store_n(to, v, n))
    const int64_t at = m * x->K + s;
    const vf least = vf_set1(MOEBIUS_FLOOR), one = vf_set1(1.0f);
    const vf a = LOAD(x->a + at), a2 = vf_max(least, vf_mul(a, a));
    const vf p = vf_max(least, LOAD(x->p + at)), k = LOAD(x->k + s), q = LOAD(x->q + s);
    const vf prec = vf_set1(x->prec[m]), pv = vf_mul(prec, vf_set1(x->v[m]));
    if (x->lam0) __builtin_prefetch(x->lam0 + at + AHEAD);
    if (x->eta0) __builtin_prefetch(x->eta0 + at + AHEAD);
    vf lam = x->lam0 ? LOAD(x->lam0 + at) : one;
    vf eta = x->eta0 ? LOAD(x->eta0 + at) : vf_zero();
    const vf g = vf_div(one, vf_max(least, vf_fma(p, lam, a2)));
    lam = vf_fma(vf_mul(prec, k), k, vf_mul(lam, g));
    eta = vf_fma(pv, k, vf_mul(vf_mul(a, g), eta));
    if (x->lam) STORE(x->lam + at, lam);
    if (x->eta) STORE(x->eta + at, eta);
    vf variance = vf_div(one, vf_max(least, lam)), mean = vf_mul(eta, variance);
    if (x->prior) mean = vf_mul(a, mean), variance = vf_fma(a2, variance, p);
    *y = vf_fma(q, mean, *y);                        // q is 0 beyond n
    if (var) *yvar = vf_fma(vf_mul(q, q), variance, *yvar);
#undef LOAD
#undef STORE
}

/* Means and variances of channels [m, m + lanes), a lane each. */
MN_ALWAYS_INLINE void run_channels(vf *y, vf *yvar, const step *x, int64_t m, int lanes, bool whole,
                                   bool var) {
    _Alignas(64) float means[MN_VW / 4 * MN_VW] = { 0 }, variances[MN_VW / 4 * MN_VW] = { 0 };
    for (int h = 0; 4 * h < lanes; h++) {
        vf mean[4], variance[4];
        MN_UNROLL
        for (int i = 0; i < 4; i++) {
            mean[i] = variance[i] = vf_zero();
            for (int64_t s = 0; 4 * h + i < lanes && s < x->K; s += MN_VW) {
                const int n = whole ? MN_VW : vf_lanes(x->K - s);
                advance(&mean[i], &variance[i], x, m + 4 * h + i, s, n, whole, var);
            }
        }
        vf_store(means + h * MN_VW, lanes_fold(mean));
        if (var) vf_store(variances + h * MN_VW, lanes_fold(variance));
    }
    *y = lanes_join(means);
    if (var) *yvar = lanes_join(variances);
}

void MN_T(mn_moebius_step_run)(const void *args, int phase, int64_t item, void *shared,
                               void *scratch) {
    (void)phase, (void)shared, (void)scratch;
    const mn_moebius_args *p = args;
    const int64_t V = p->call.V, K = p->call.K, width = channels_of_item(&p->call);
    const int64_t blocks = mn_ceil_div(V, width), b = item / blocks, first = item % blocks * width;
    const step x = {
        MN_ROW(float, p->v, b, 0, 0), MN_ROW(float, p->prec, b, 0, 0), MN_ROW(float, p->k, b, 0, 0),
        MN_ROW(float, p->q, b, 0, 0), p->a.data, p->p.data, MN_ROW(float, p->lam0, b, 0, 0),
        MN_ROW(float, p->eta0, b, 0, 0), MN_ROW_OUT(float, p->lam, b, 0, 0),
        MN_ROW_OUT(float, p->eta, b, 0, 0), K, p->from_prior,
    };
    float *y = MN_ROW_OUT(float, p->y, b, 0, 0), *yvar = MN_ROW_OUT(float, p->yvar, b, 0, 0);
    for (int64_t m = first; m < mn_min(V, first + width); m += MN_VW) {
        const int lanes = vf_lanes(V - m);
        vf mean, variance = vf_zero();
        if (K % MN_VW != 0) run_channels(&mean, &variance, &x, m, lanes, false, true);
        else if (yvar) run_channels(&mean, &variance, &x, m, lanes, true, true);
        else run_channels(&mean, &variance, &x, m, lanes, true, false);
        if (y) vf_store_n(y + m, mean, lanes);
        if (yvar) vf_store_n(yvar + m, variance, lanes);
    }
}
