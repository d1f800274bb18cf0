/* moebius_step.c - one token of Kalman Linear Attention on a state of its own, in place if asked.
 *
 * The state lies (channel, slot), so here a vector holds slots of one channel; means and variances
 * of MN_VW channels are turned before they are summed, which makes the order of every sum that of
 * the forward kernel, and its bits the same. lam and eta are read and written once. */
#include "base/checked.h"
#include "kernels/access.h"
#include "kernels/kernel.h"
#include "kernels/vec/moebius_tile.h"

/* Channels of an item: about CELLS cells. */
enum { CELLS = 4096 };

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

/* Slots [s, s + n) of channel m: new state, and what is read from it. */
static inline void advance(float *mean_at, float *variance_at, const step *x, int64_t m, int64_t s,
                           int n) {
    const int64_t at = m * x->K + s;
    const vf least = vf_set1(MOEBIUS_FLOOR), one = vf_set1(1.0f);
    const vf a = vf_load_n(x->a + at, n), a2 = vf_max(vf_mul(a, a), least);
    const vf p = vf_max(vf_load_n(x->p + at, n), least), k = vf_load_n(x->k + s, n);
    const vf prec = vf_set1(x->prec[m]), pv = vf_mul(prec, vf_set1(x->v[m]));
    vf lam = x->lam0 ? vf_load_n(x->lam0 + at, n) : one, d = one;
    vf eta = x->eta0 ? vf_load_n(x->eta0 + at, n) : vf_zero();
    moebius_careful(&lam, &d, &eta, a, a2, p, prec, pv, k, vf_mul(k, k));
    if (x->lam) vf_store_n(x->lam + at, vf_div(lam, d), n);
    if (x->eta) vf_store_n(x->eta + at, vf_div(eta, d), n);
    const vf r = vf_div(one, vf_max(lam, vf_mul(d, least)));
    vf mean = vf_mul(eta, r), variance = vf_mul(d, r);
    if (x->prior) mean = vf_mul(a, mean), variance = vf_fma(a2, variance, p);
    vf_store(mean_at, mean);
    vf_store(variance_at, variance);
}

/* Means and variances of channels [m, m + lanes), a lane each. */
static void run_channels(vf *y, vf *yvar, const step *x, int64_t m, int lanes) {
    _Alignas(64) float means[MN_VW * MN_VW], variances[MN_VW * MN_VW];
    _Alignas(64) float mean_of[MN_VW * MN_VW], variance_of[MN_VW * MN_VW];
    *y = *yvar = vf_zero();
    for (int64_t s = 0; s < x->K; s += MN_VW) {
        const int n = vf_lanes(x->K - s);
        for (int i = 0; i < lanes; i++) {
            advance(means + i * MN_VW, variances + i * MN_VW, x, m + i, s, n);
        }
        MN_T(mn_transpose)(mean_of, MN_VW, means, MN_VW, lanes, n);
        MN_T(mn_transpose)(variance_of, MN_VW, variances, MN_VW, lanes, n);
        for (int i = 0; i < n; i++) {
            const vf q = vf_set1(x->q[s + i]);
            *y = vf_fma(q, vf_load(mean_of + i * MN_VW), *y);
            *yvar = vf_fma(vf_mul(q, q), vf_load(variance_of + i * MN_VW), *yvar);
        }
    }
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
        vf mean, variance;
        run_channels(&mean, &variance, &x, m, lanes);
        if (y) vf_store_n(y + m, mean, lanes);
        if (yvar) vf_store_n(yvar + m, variance, lanes);
    }
}
