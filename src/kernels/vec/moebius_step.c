/* moebius_step.c - one token of Kalman Linear Attention on a state of its own, in place if asked.
 *
 * The state lies (channel, slot), so here a vector holds slots of one channel; sums over slots of
 * MN_VW channels are then folded at once. lam and eta are read and written once. */
#include "base/checked.h"
#include "kernels/access.h"
#include "kernels/kernel.h"
#include "kernels/vec/lanes.h"

/* Channels of an item: about CELLS cells. */
enum { CELLS = 4096 };
static const float least = 1e-12f;

static int64_t channels_of_item(const mn_call *call) {
    return mn_max(1, CELLS / mn_max(1, call->K) / MN_VW) * MN_VW;
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

/* Slots [s, s + n) of channel m: new state, and what the channel's mean and variance gain. */
static inline void advance(vf *y, vf *yvar, const step *x, int64_t m, int64_t s, int n) {
    const int64_t at = m * x->K + s;
    const vf floor_at = vf_set1(least), one = vf_set1(1.0f);
    const vf a = vf_load_n(x->a + at, n), a2 = vf_max(vf_mul(a, a), floor_at);
    const vf p = vf_max(vf_load_n(x->p + at, n), floor_at);
    const vf k = vf_load_n(x->k + s, n), q = vf_load_n(x->q + s, n), prec = vf_set1(x->prec[m]);
    vf lam = x->lam0 ? vf_load_n(x->lam0 + at, n) : one;
    vf eta = x->eta0 ? vf_load_n(x->eta0 + at, n) : vf_zero();
    const vf g = vf_div(one, vf_max(vf_fma(p, lam, a2), floor_at));
    lam = vf_fma(prec, vf_mul(k, k), vf_mul(lam, g));
    eta = vf_fma(vf_mul(prec, vf_set1(x->v[m])), k, vf_mul(vf_mul(a, g), eta));
    if (x->lam) vf_store_n(x->lam + at, lam, n);
    if (x->eta) vf_store_n(x->eta + at, eta, n);
    vf variance = vf_div(one, vf_max(lam, floor_at)), mean = vf_mul(eta, variance);
    if (x->prior) mean = vf_mul(a, mean), variance = vf_fma(a2, variance, p);
    *y = vf_fma(q, mean, *y);                                  // q is 0 beyond n
    *yvar = vf_fma(vf_mul(q, q), variance, *yvar);
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
    _Alignas(64) float means[MN_VW * MN_VW] = { 0 }, variances[MN_VW * MN_VW] = { 0 };
    for (int64_t m = first; m < mn_min(V, first + width); m += MN_VW) {
        const int lanes = vf_lanes(V - m);
        for (int i = 0; i < lanes; i++) {
            vf sum = vf_zero(), sum_var = vf_zero();
            for (int64_t s = 0; s < K; s += MN_VW) advance(&sum, &sum_var, &x, m + i, s, vf_lanes(K - s));
            vf_store(means + i * MN_VW, sum);
            vf_store(variances + i * MN_VW, sum_var);
        }
        if (y) vf_store_n(y + m, lanes_sum_square(means), lanes);
        if (yvar) vf_store_n(yvar + m, lanes_sum_square(variances), lanes);
    }
}
