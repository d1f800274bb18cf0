/* scan_step.c - one token of the selective scan on a state kept in place.
 *
 * The state lies (channel, slot), so here a vector holds slots of one channel; sums over slots are
 * folded for several channels at once. h is read and written once. */
#include "kernels/cpu/scan/scan_tile.h"

/* Channels of an item: about CELLS cells. Cells asked of memory before they are needed. */
enum { CELLS = 8192, AHEAD = 1024 };

static int64_t channels_of_item(const mn_call *call) {
    return mn_max(1, CELLS / call->K / MN_VW) * MN_VW;
}

bool MN_T(mn_scan_step_plan)(const void *args, mn_plan *plan) {
    const mn_call *c = args;
    plan->n_phases = 1;
    plan->scratch_bytes = (size_t)(3 * channels_of_item(c)) * sizeof(float);
    return mn_mul_i64(&plan->items[0], c->B, mn_ceil_div(c->V, channels_of_item(c)));
}

/* Pointers of one sequence, NULL where absent; rate, du, y are scratch memory, one number a
 * channel of the item. */
typedef struct step {
    const float *A, *B, *C, *h0;
    float *h;
    int64_t K;
    float *rate, *du, *y;    // d log2 e, d u, sum_s C h
} step;

/* sum + C h of slots [s, s + n) of channel m, the i-th of the item; h advanced. With `whole`, n is
 * MN_VW. */
MN_ALWAYS_INLINE vf advance(vf sum, const step *x, int64_t m, int64_t i, int64_t s, int n,
                            bool whole) {
#define LOAD(from) (whole ? vf_load(from) : vf_load_n(from, n))
#define STORE(to, v) (whole ? vf_store(to, v) : vf_store_n(to, v, n))
    const int64_t at = m * x->K + s;
    const vf decay = scan_exp2(vf_mul(vf_set1(x->rate[i]), LOAD(x->A + at)));
    if (x->h0) __builtin_prefetch(x->h0 + at + AHEAD);
    const vf before = x->h0 ? LOAD(x->h0 + at) : vf_zero();
    const vf h = vf_fma(decay, before, vf_mul(vf_set1(x->du[i]), LOAD(x->B + s)));
    if (x->h) STORE(x->h + at, h);
    return vf_fma(LOAD(x->C + s), h, sum);
#undef LOAD
#undef STORE
}

/* sum_s C h of the `lanes` channels from m on, the first being the i-th of the item */
MN_ALWAYS_INLINE vf run_channels(const step *x, int64_t m, int64_t i, int lanes, bool whole) {
    _Alignas(64) float folds[MN_VW / 4 * MN_VW] = { 0 };
    for (int h = 0; 4 * h < lanes; h++) {
        vf sum[4];
        MN_UNROLL
        for (int j = 0; j < 4; j++) {
            const int at = 4 * h + j;
            sum[j] = vf_zero();
            for (int64_t s = 0; at < lanes && s < x->K; s += MN_VW) {
                const int n = whole ? MN_VW : vf_lanes(x->K - s);
                sum[j] = advance(sum[j], x, m + at, i + at, s, n, whole);
            }
        }
        vf_store(folds + h * MN_VW, lanes_fold(sum));
    }
    return lanes_join(folds);
}

/* d log2 e and d u of channels [first, first + count): before the slots, since they take long to
 * come out of softplus. */
static void find_rates(const step *x, const mn_scan_args *p, int64_t b, int64_t first,
                       int64_t count) {
    const float *u = MN_ROW(float, p->u, b, 0, 0) + first;
    const float *dt = MN_ROW(float, p->dt, b, 0, 0) + first;
    const float *bias = p->dt_bias.data;
    for (int64_t i = 0; i < count; i += MN_VW) {
        const int n = vf_lanes(count - i);
        vf d = vf_load_n(dt + i, n);
        if (bias) d = vf_add(d, vf_load_n(bias + first + i, n));
        if (p->softplus) d = vf_softplus(d);
        vf_store(x->rate + i, vf_mul(d, vf_set1(MN_LOG2_E)));
        vf_store(x->du + i, vf_mul(d, vf_load_n(u + i, n)));
    }
}

/* (sum_s C h + D u) silu(z) */
static void write_out(const step *x, const mn_scan_args *p, int64_t b, int64_t first,
                      int64_t count) {
    const float *u = MN_ROW(float, p->u, b, 0, 0) + first, *z_row = MN_ROW(float, p->z, b, 0, 0);
    const float *D = p->D.data;
    float *y_row = MN_ROW_OUT(float, p->y, b, 0, 0);
    for (int64_t i = 0; y_row && i < count; i += MN_VW) {
        const int n = vf_lanes(count - i);
        vf y = vf_load(x->y + i);
        if (D) y = vf_fma(vf_load_n(D + first + i, n), vf_load_n(u + i, n), y);
        if (z_row) {
            const vf z = vf_load_n(z_row + first + i, n);
            y = vf_mul(y, vf_mul(z, vf_sigmoid(z)));
        }
        vf_store_n(y_row + first + i, y, n);
    }
}

void MN_T(mn_scan_step_run)(const void *args, int phase, int64_t item, void *shared,
                            void *scratch) {
    (void)phase, (void)shared;
    const mn_scan_args *p = args;
    const int64_t V = p->call.V, K = p->call.K, width = channels_of_item(&p->call);
    const int64_t blocks = mn_ceil_div(V, width), b = item / blocks, first = item % blocks * width;
    const int64_t count = mn_min(width, V - first);
    float *rate = scratch;
    const step x = {
        p->A.data, MN_ROW(float, p->Bm, b, 0, 0), MN_ROW(float, p->Cm, b, 0, 0),
        MN_ROW(float, p->h0, b, 0, 0), MN_ROW_OUT(float, p->h, b, 0, 0), K,
        rate, rate + width, rate + 2 * width,
    };
    find_rates(&x, p, b, first, count);
    for (int64_t i = 0; i < count; i += MN_VW) {
        const int n = vf_lanes(count - i);
        if (K % MN_VW == 0) vf_store(x.y + i, run_channels(&x, first + i, i, n, true));
        else vf_store(x.y + i, run_channels(&x, first + i, i, n, false));
    }
    write_out(&x, p, b, first, count);
}
