/* scan_step.c - one token of the selective scan on a state of its own, in place if asked.
 *
 * The state lies (channel, slot), so here a vector holds slots of one channel; states of MN_VW
 * channels are turned before they are summed, which makes the order of the sum that of the forward
 * kernel, and its bits the same. h is read and written once. */
#include "kernels/vec/scan_tile.h"

/* Channels of an item: about CELLS cells. */
enum { CELLS = 4096 };

static int64_t channels_of_item(const mn_call *call) {
    return mn_max(1, CELLS / mn_max(1, call->K) / MN_VW) * MN_VW;
}

bool MN_T(mn_scan_step_plan)(const void *args, mn_plan *plan) {
    const mn_call *c = args;
    plan->n_phases = 1;
    return mn_mul_i64(&plan->items[0], c->B, mn_ceil_div(c->V, channels_of_item(c)));
}

/* Pointers of one sequence, NULL where absent, and d, d u of the channels at hand. */
typedef struct step {
    const float *A, *B, *C, *h0;
    float *h;
    int64_t K;
    float d[MN_VW], du[MN_VW];
} step;

/* Slots [s, s + n) of channel m, the i-th at hand: h advanced */
static inline void advance(float *h_at, const step *x, int64_t m, int i, int64_t s, int n) {
    const int64_t at = m * x->K + s;
    const vf rate = vf_mul(vf_load_n(x->A + at, n), vf_set1(MN_LOG2_E));
    const vf before = x->h0 ? vf_load_n(x->h0 + at, n) : vf_zero();
    const vf gain = vf_mul(vf_set1(x->du[i]), vf_load_n(x->B + s, n));
    const vf h = vf_fma(scan_exp2(vf_mul(vf_set1(x->d[i]), rate)), before, gain);
    if (x->h) vf_store_n(x->h + at, h, n);
    vf_store(h_at, h);
}

/* y + sum_s C h of channels [m, m + lanes), a lane each */
static vf run_channels(vf y, const step *x, int64_t m, int lanes) {
    _Alignas(64) float states[MN_VW * MN_VW], turned[MN_VW * MN_VW];
    for (int64_t s = 0; s < x->K; s += MN_VW) {
        const int n = vf_lanes(x->K - s);
        for (int i = 0; i < lanes; i++) advance(states + i * MN_VW, x, m + i, i, s, n);
        MN_T(mn_transpose)(turned, MN_VW, states, MN_VW, lanes, n);
        for (int i = 0; i < n; i++) {
            y = vf_fma(vf_set1(x->C[s + i]), vf_load(turned + i * MN_VW), y);
        }
    }
    return y;
}

void MN_T(mn_scan_step_run)(const void *args, int phase, int64_t item, void *shared,
                            void *scratch) {
    (void)phase, (void)shared, (void)scratch;
    const mn_scan_args *p = args;
    const int64_t V = p->call.V, width = channels_of_item(&p->call), blocks = mn_ceil_div(V, width);
    const int64_t b = item / blocks, first = item % blocks * width;
    const float *u_row = MN_ROW(float, p->u, b, 0, 0), *dt = MN_ROW(float, p->dt, b, 0, 0);
    const float *z_row = MN_ROW(float, p->z, b, 0, 0), *D = p->D.data, *bias = p->dt_bias.data;
    float *y_row = MN_ROW_OUT(float, p->y, b, 0, 0);
    step x = { p->A.data,
               MN_ROW(float, p->Bm, b, 0, 0),
               MN_ROW(float, p->Cm, b, 0, 0),
               MN_ROW(float, p->h0, b, 0, 0),
               MN_ROW_OUT(float, p->h, b, 0, 0),
               p->call.K,
               { 0 },
               { 0 } };
    for (int64_t m = first; m < mn_min(V, first + width); m += MN_VW) {
        const int n = vf_lanes(V - m);
        const vf u = vf_load_n(u_row + m, n);
        vf d = vf_load_n(dt + m, n);
        if (bias) d = vf_add(d, vf_load_n(bias + m, n));
        if (p->softplus) d = vf_softplus(d);
        vf_store(x.d, d);
        vf_store(x.du, vf_mul(d, u));
        vf y = run_channels(vf_mul(D ? vf_load_n(D + m, n) : vf_zero(), u), &x, m, n);
        if (z_row) {
            const vf z = vf_load_n(z_row + m, n);
            y = vf_mul(y, vf_mul(z, vf_sigmoid(z)));
        }
        if (y_row) vf_store_n(y_row + m, y, n);
    }
}
