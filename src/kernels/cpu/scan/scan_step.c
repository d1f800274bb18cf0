/* scan_step.c - one token of the selective scan on a state kept in place.
 *
 * The state lies (channel, slot), so here a vector holds slots of one channel; sums over slots are
 * folded for several channels at once. h is read and written once. */
#include "kernels/cpu/scan/scan_tile.h"
#include "kernels/cpu/simd/row.h"

/* Channels of an item: about CELLS cells. Cells asked of memory before they are needed. Channels
 * whose sums over slots are folded together. */
enum { CELLS = 8192, AHEAD = 1024, CHANNELS = 4 };

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

/* Rows of CHANNELS channels, K numbers each; and what multiplies their A and B. */
typedef struct rows {
    const float *A, *h0;
    float *h;
    const float *rate, *du;
    int64_t K;
} rows;

/* Slots [s, s + MN_VW): h advanced, and C h added to the sums. fresh and kept are constants where
 * this is expanded: no h0; h wanted. */
MN_ALWAYS_INLINE void advance(vf sum[CHANNELS], rows x, int64_t s, vf B, vf C, bool fresh,
                              bool kept) {
    const vf most = vf_set1(SCAN_NEAR);
    vf decay[CHANNELS];
    vm far = vm_first(0);
    MN_UNROLL
    for (int j = 0; j < CHANNELS; j++) {
        decay[j] = vf_mul(vf_set1(x.rate[j]), vf_load(x.A + j * x.K + s));
        far = vm_or(far, vf_gt(vf_abs(decay[j]), most));
    }
    if (vm_any(far)) {
        MN_UNROLL
        for (int j = 0; j < CHANNELS; j++) decay[j] = scan_exp2(decay[j]);
    } else {
        MN_UNROLL
        for (int j = 0; j < CHANNELS; j++) decay[j] = scan_exp2_near(decay[j]);
    }
    MN_UNROLL
    for (int j = 0; j < CHANNELS; j++) {
        vf h = vf_mul(vf_set1(x.du[j]), B);
        if (!fresh) {
            __builtin_prefetch(x.h0 + j * x.K + s + AHEAD);
            h = vf_fma(decay[j], vf_load(x.h0 + j * x.K + s), h);
        }
        if (kept) vf_store(x.h + j * x.K + s, h);
        sum[j] = vf_fma(C, h, sum[j]);
    }
}

/* sum_s C h of MN_VW channels from m on, the first being the i-th of the item, of whole vectors of
 * slots */
MN_ALWAYS_INLINE vf run_whole(step x, int64_t m, int64_t i, bool fresh, bool kept) {
    _Alignas(64) float folds[MN_VW / CHANNELS * MN_VW];
    for (int g = 0; g < MN_VW; g += CHANNELS) {
        const int64_t at = (m + g) * x.K;
        const rows group = { x.A + at, fresh ? NULL : x.h0 + at, kept ? x.h + at : NULL,
                             x.rate + i + g, x.du + i + g, x.K };
        vf sum[CHANNELS];
        MN_UNROLL
        for (int j = 0; j < CHANNELS; j++) sum[j] = vf_zero();
        for (int64_t s = 0; s < x.K; s += MN_VW) {
            advance(sum, group, s, vf_load(x.B + s), vf_load(x.C + s), fresh, kept);
        }
        vf_store(folds + g / CHANNELS * MN_VW, lanes_fold(sum));
    }
    return lanes_join(folds);
}

/* The same of `lanes` channels and any number of slots. */
static vf run_partial(const step *x, int64_t m, int64_t i, int lanes) {
    _Alignas(64) float sums[MN_VW * MN_VW] = { 0 };
    for (int j = 0; j < lanes; j++) {
        vf sum = vf_zero();
        for (int64_t s = 0; s < x->K; s += MN_VW) {
            const int n = vf_lanes(x->K - s);
            const int64_t at = (m + j) * x->K + s;
            const vf rate = vf_mul(vf_set1(x->rate[i + j]), vf_load_row(x->A + at, n));
            const vf before = x->h0 ? vf_load_row(x->h0 + at, n) : vf_zero();
            const vf h = vf_fma(scan_exp2(rate), before,
                                vf_mul(vf_set1(x->du[i + j]), vf_load_row(x->B + s, n)));
            if (x->h) vf_store_row(x->h + at, h, n);
            sum = vf_fma(vf_load_row(x->C + s, n), h, sum);
        }
        vf_store(sums + j * MN_VW, sum);
    }
    return lanes_sum_square(sums);
}

static vf run_channels(const step *x, int64_t m, int64_t i, int lanes) {
    if (lanes < MN_VW || x->K % MN_VW) return run_partial(x, m, i, lanes);
    if (!x->h) return x->h0 ? run_whole(*x, m, i, false, false) : run_whole(*x, m, i, true, false);
    return x->h0 ? run_whole(*x, m, i, false, true) : run_whole(*x, m, i, true, true);
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
        vf_store(x.y + i, run_channels(&x, first + i, i, n));
    }
    write_out(&x, p, b, first, count);
}
