/* curvature_moments_sm90.cu - what segments of long sequences add to R and s, or G and e, on
 * Hopper, for bf16 and keys of up to 128:
 *
 *   there   R = sum of k k'                       s = sum of k
 *   back    G = sum of f (d q' + q d')            e = -sum of f (m d + md q)
 *
 * as curvature_bwd_sm90.cu's scan against time makes G and e, with f = -gamma / n, m and md the
 * means of q and d. A block has all columns of a head's segment: a group of four warps for each 64
 * of them, which reads its left operands from the tiles that are right operands too, one warp that
 * brings tiles by TMA, chunks of 64 tokens ahead, and one that makes what is known of tokens. */
#include "kernels/cuda/curvature/curvature_sm90.cuh"
#include "kernels/cuda/curvature/curvature_smem.cuh"

namespace mneme::curvature {

enum { MN_CURVE_SUM_STAGES = 6 };

/* Tiles of a chunk: k or, going back, q and d. */
template <int KP, bool BACK>
struct alignas(1024) mn_curve_sum_stage {
    unsigned char tile[BACK ? 2 : 1][KP / 64 * MN_CURVE_SQUARE];
    mn_curve_token_row less[BACK ? 2 : 1];    // -m and -md
    float factor[MN_CURVE_CHUNK];
};

/* Barriers of stages: tiles have come, tokens' numbers are there, all has been used. */
template <int KP, bool BACK>
struct mn_curve_sum_smem {
    mn_curve_sum_stage<KP, BACK> stage[MN_CURVE_SUM_STAGES];
    mn_curve_token_row ones;
    uint64_t there[MN_CURVE_SUM_STAGES], ready[MN_CURVE_SUM_STAGES], gone[MN_CURVE_SUM_STAGES];
};

#if MN_HAS_WGMMA

/* One lane: tiles of all chunks. */
template <int KP, bool BACK>
__device__ inline void mn_curve_sum_request(mn_curve_sum_smem<KP, BACK> &smem,
                                            const mn_curve_back_maps &maps,
                                            const mn_curve_place &at) {
    const int n_chunks = (at.s.rows + 63) / 64, h = (int)at.h, b = (int)at.s.span.b;
    const bool has_d = BACK && maps.has_d;
    for (int c = 0; c < n_chunks; c++) {
        const int slot = c % MN_CURVE_SUM_STAGES, t = (int)(at.s.span.t0 + at.s.first) + 64 * c;
        auto &tile = smem.stage[slot].tile;
        uint64_t *there = &smem.there[slot];
        mn_mbarrier_wait(&smem.gone[slot], (c / MN_CURVE_SUM_STAGES & 1) ^ 1);
        mn_mbarrier_arrive_expect_tx(there, (has_d ? 2 : 1) * (KP / 64) * MN_CURVE_SQUARE);
#pragma unroll
        for (int i = 0; i < KP / 64; i++) {
            unsigned char *to = tile[0] + i * MN_CURVE_SQUARE;
            mn_tma_load(to, BACK ? maps.q : maps.k, there, 64 * i, h, t, b);
            if (!has_d) continue;
            mn_tma_load(tile[BACK] + i * MN_CURVE_SQUARE, maps.d, there, 64 * i, h, t, b);
        }
    }
}

/* What is known of a lane's two tokens of a chunk; nothing behind the last. */
struct mn_curve_sum_tokens {
    mn_bf16 gamma[2];
    float2 means[2];

    __device__ void load(const mn_curvature_args &p, const float *all_means,
                         const mn_curve_place &at, int start) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int i = start + 32 * half + threadIdx.x % 32;
            const int64_t t = at.s.first + i;
            gamma[half] = __float2bfloat16_rn(0.0f);
            means[half] = make_float2(0.0f, 0.0f);
            if (i >= at.s.rows) continue;
            gamma[half] = *mn_row<mn_bf16>(p.gamma, at.s.span.b, at.s.span.t0 + t, at.h);
            means[half] = *(const float2 *)(all_means + 2 * mn_curve_row_of(p.call, at, t));
        }
    }
};

/* A warp: tokens' factors and means, asked for a chunk before, and zeros behind the last token. */
template <int KP, bool BACK>
__device__ inline void mn_curve_sum_weigh(mn_curve_sum_smem<KP, BACK> &smem,
                                          const mn_curvature_args &p, const float *means,
                                          const mn_curve_place &at) {
    const int lane = threadIdx.x % 32, n_chunks = (at.s.rows + 63) / 64;
    const int64_t seen = (int64_t)mn_curve_before(p, at.s.n) + at.s.first;
    mn_curve_sum_tokens now, next;
    if (BACK) next.load(p, means, at, 0);
    for (int c = 0; c < n_chunks; c++) {
        const int slot = c % MN_CURVE_SUM_STAGES, phase = c / MN_CURVE_SUM_STAGES & 1;
        const int count = at.s.rows - 64 * c;
        mn_curve_sum_stage<KP, BACK> &to = smem.stage[slot];
        now = next;
        if (BACK) next.load(p, means, at, 64 * c + 64);
        mn_mbarrier_wait(&smem.gone[slot], phase ^ 1);
#pragma unroll
        for (int half = 0; half < 2 && BACK; half++) {
            const int i = 32 * half + lane;
            const float each = 1.0f / (float)(seen + 64 * c + i + 1);
            to.factor[i] = -mn_float(now.gamma[half]) * each;
            to.less[0].put(i, -now.means[half].x), to.less[1].put(i, -now.means[half].y);
        }
        if (count < MN_CURVE_CHUNK) {
            mn_mbarrier_wait(&smem.there[slot], phase);
            mn_curve_zero_end<KP>(to.tile[0], count);
            if (BACK) mn_curve_zero_end<KP>(to.tile[BACK], count);
        }
        if (BACK || count < MN_CURVE_CHUNK) mn_fence_proxy_async();
        mn_mbarrier_arrive(&smem.ready[slot]);
    }
}

/* A group: what the segment adds to 64 rows, to memory at `state`. */
template <int KP, bool BACK>
__device__ inline void mn_curve_sum_add(mn_curve_sum_smem<KP, BACK> &smem, const mn_curve_place &at,
                                        float *state, int64_t K) {
    const int n_chunks = (at.s.rows + 63) / 64, own = threadIdx.x / 32 * 16;
    float R[KP / 2] = {};
    mn_curve_row_vector s = {};
    for (int c = 0; c < n_chunks; c++) {
        const int slot = c % MN_CURVE_SUM_STAGES, phase = c / MN_CURVE_SUM_STAGES & 1;
        mn_curve_sum_stage<KP, BACK> &in = smem.stage[slot];
        uint32_t x[16], d[16];
        mn_mbarrier_wait(&smem.there[slot], phase);
        mn_mbarrier_wait(&smem.ready[slot], phase);
        mn_curve_left<64>(x, in.tile[0], own);
        if (BACK) {
            mn_curve_left<64>(d, in.tile[BACK], own);
            mn_curve_weigh_tokens(d, in.factor);
            mn_curve_weigh_tokens(x, in.factor);
        }
        mn_wgmma_fence();
        if (BACK) mn_curve_depth<64>(R, d, mn_smem_addr(in.tile[0]));
        mn_curve_depth<64>(R, x, mn_smem_addr(in.tile[BACK]));
        if constexpr (BACK) {
            s.add(d, in.less[0]);
            s.add(x, in.less[1]);
        } else {
            s.add(x, smem.ones);
        }
        mn_wgmma_commit();
        mn_wgmma_wait<0>();
        mn_mbarrier_arrive(&smem.gone[slot]);
    }
    mn_curve_store(state, R, 1.0f, K, (int)threadIdx.x / MN_WARPGROUP * 64);
    s.store(state + K * K, K, own);
}

#endif

template <int KP>
inline constexpr int mn_curve_sum_threads = KP / 64 * MN_WARPGROUP + 64;

template <int KP, bool BACK>
__global__ void __launch_bounds__(mn_curve_sum_threads<KP>, 1)
mn_curve_sum_kernel(const __grid_constant__ mn_curvature_args p,
                    const __grid_constant__ mn_curve_back_maps maps, float *states,
                    const float *means, mn_curve_cut cut) {
#if MN_HAS_WGMMA
    extern __shared__ __align__(1024) unsigned char curve_sum_bytes[];
    mn_curve_sum_smem<KP, BACK> &smem = *(mn_curve_sum_smem<KP, BACK> *)curve_sum_bytes;
    constexpr int groups = KP / 64 * MN_WARPGROUP;
    const mn_curve_place at = mn_curve_place_of(p.call, cut);
    if (!at.s.there || (BACK ? at.s.first == 0 : at.s.last)) return;
    if (threadIdx.x == 0) {
        for (int i = 0; i < MN_CURVE_SUM_STAGES; i++) {
            mn_mbarrier_init(&smem.there[i], 1);
            mn_mbarrier_init(&smem.ready[i], 32);
            mn_mbarrier_init(&smem.gone[i], groups);
        }
        mn_mbarrier_init_fence();
    }
    if (threadIdx.x < MN_CURVE_CHUNK) {
        smem.ones.put(threadIdx.x, 1.0f);
        mn_fence_proxy_async();
    }
    if (BACK && !maps.has_d) {    // zeros, which nobody brings
        constexpr int vec16s = KP / 64 * MN_CURVE_SQUARE / 16;
        for (int i = threadIdx.x; i < MN_CURVE_SUM_STAGES * vec16s; i += blockDim.x) {
            ((uint4 *)smem.stage[i / vec16s].tile[BACK])[i % vec16s] = make_uint4(0, 0, 0, 0);
        }
        mn_fence_proxy_async();
    }
    __syncthreads();
    if (threadIdx.x < groups) {
        const int64_t K = p.call.K;
        float *state = states + (at.s.slot * p.call.H + at.h) * mn_curve_state_size(K);
        mn_curve_sum_add<KP, BACK>(smem, at, state, K);
    } else if (threadIdx.x == groups) {
        mn_curve_sum_request<KP, BACK>(smem, maps, at);
    } else if (threadIdx.x >= groups + 32) {
        mn_curve_sum_weigh<KP, BACK>(smem, p, means, at);
    }
#endif
}

/* ---- launches -------------------------------------------------------------------------------- */

template <int KP, bool BACK>
static int launch_sums(const mn_curvature_args *p, const mn_curve_back_maps &maps, float *states,
                       const float *means, const mn_curve_cut &cut, cudaStream_t on) {
    mn_curve_cut whole = cut;
    if (p->call.T <= cut.segment) return cudaSuccess;
    whole.slices = 1;
    const int code = mn_curve_start(mn_curve_sum_kernel<KP, BACK>, mn_curve_sum_threads<KP>,
                                    sizeof(mn_curve_sum_smem<KP, BACK>), p->call, whole, on, *p,
                                    maps, states, means);
    return code == cudaSuccess ? mn_curve_scan<BACK>(p, states, cut.segment, on) : code;
}

int mn_curve_group_sums(const mn_curvature_args *p, const mn_curve_back_maps &maps, float *states,
                        const mn_curve_cut &cut, cudaStream_t on) {
    return p->call.K <= 64 ? launch_sums<64, false>(p, maps, states, NULL, cut, on)
                           : launch_sums<128, false>(p, maps, states, NULL, cut, on);
}

int mn_curve_group_sums_back(const mn_curvature_args *p, const mn_curve_back_maps &maps,
                             const mn_curve_work &w, const mn_curve_cut &cut, cudaStream_t on) {
    return p->call.K <= 64 ? launch_sums<64, true>(p, maps, w.back, w.means, cut, on)
                           : launch_sums<128, true>(p, maps, w.back, w.means, cut, on);
}

}    // namespace mneme::curvature
