/* curvature_fwd_sm80.cu - curvature forward by mma.sync: curvature_mma_sm80.cuh.
 *
 *   Y' = R Q' + K' tril(Q K' - m)'     qt = q - gamma / n (y - m s)     R <- R + K' K */
#include "kernels/cuda/curvature/curvature_mma_sm80.cuh"

namespace mneme::curvature {

/* A warp's part of s, 16 numbers, to `to` if that is there. */
__device__ static void store_vector(float *to, const float (&s)[2], int64_t K) {
    const int first = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        if (to && threadIdx.x % 4 == 0 && first + 8 * r < K) to[first + 8 * r] = s[r];
    }
}

/* Results of the chunk, in the place of its q; s is that in front of it. A warp has 16 columns. */
__device__ static void forward_results(unsigned char *q, const float (&Y)[32],
                                       const float2 *weight, const float (&s)[2]) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int step = 0; step < 4; step++) {
        uint32_t x[4];
        mn_curve80_left<64>(x, q, threadIdx.x / 32 * 16, step);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int n = 2 * step + i / 2, r = i % 2;
            const float4 w = *(const float4 *)(weight + 8 * n + lane % 4 * 2);
            const float left = fmaf(-w.y, s[r], Y[4 * n + 2 * r]);
            const float right = fmaf(-w.w, s[r], Y[4 * n + 2 * r + 1]);
            x[i] = mn_bf16x2(fmaf(w.x, left, mn_curve_low(x[i])),
                             fmaf(w.z, right, mn_curve_high(x[i])));
        }
        mn_curve80_put_turned(q, x, 16 * step);
    }
}

/* Scores of a warp's 16 tokens into P, and their means. */
template <int KP, int BLOCK>
__device__ static void forward_scores(mn_curve80_smem<KP> &smem, const unsigned char *k,
                                      const unsigned char *q, int64_t seen) {
    const int lane = threadIdx.x % 32;
    float d[36], each[2], mean[2];
    mn_curve80_scores<KP, MN_CURVE_ROWS, BLOCK>(d, q, k);
    mn_curve80_each(each, seen);
    mn_curve80_means<BLOCK>(mean, d, each);
    mn_curve80_put_scores<BLOCK>(smem.P, NULL, d, mean);
    if (lane % 4 > 0) return;
    smem.weight[16 * BLOCK + lane / 4].y = mean[0];
    smem.weight[16 * BLOCK + lane / 4 + 8].y = mean[1];
}

/* Grid: a block for each head of a segment.
 * Loads   q, k (64,K) and gamma of each chunk; at the start R (K,K) and s (K).
 * Stores  qt (64,K) of each chunk where it is wanted; R and s behind a sequence. */
template <int KP>
__global__ void __launch_bounds__(mn_curve80_threads<KP>, KP == 64 ? 4 : 2)
curvature_forward_sm80_kernel(const __grid_constant__ mn_curvature_args p, const float *states,
                              mn_curve_cut cut) {
    extern __shared__ __align__(128) unsigned char bytes[];
    mn_curve80_smem<KP> &smem = *(mn_curve80_smem<KP> *)bytes;
    const mn_curve80_views &of = mn_curve80_find(smem.views, p, cut, p.q, {}, p.qt);
    const mn_curve_place &at = of.place;
    if (!at.s.there) return;
    const int K = (int)p.call.K, rows = at.s.rows, n_chunks = (rows + 63) / 64;
    const int64_t seen = (int64_t)mn_curve_before(p, at.s.n) + at.s.first;
    float R[KP / 2], s[2];
    mn_curve80_gamma<KP> gamma, next;
    const auto load = [&](int c) {
        const int start = c * 64, count = rows - start;
        mn_curve80_load<KP, MN_CURVE_ROWS>(smem.k[c % 2], of.k, p.k.data, start, count, K);
        mn_curve80_load<KP, 64>(smem.x[c % 2], of.x, p.k.data, start, count, K);
        next.ask(of.gamma, start, count);
        mn_cp_async_commit_group();
    };
    if (n_chunks > 0) load(0);
    mn_curve80_begin<KP>(smem, R, s, p, at, states);
    for (int c = 0; c < n_chunks; c++) {
        unsigned char *k = smem.k[c % 2], *q = smem.x[c % 2];
        float Y[32] = {};
        mn_curve80_put_vector(k, s);
        mn_cp_async_wait_group<0>();
        __syncthreads();
        gamma = next;
        if (c + 1 < n_chunks) load(c + 1);
        if (threadIdx.x < MN_WARPGROUP) {
            mn_curve80_by_block([&](auto block) {
                forward_scores<KP, block.value>(smem, k, q, seen + c * 64);
            });
        }
        if (gamma.has()) smem.weight[gamma.token()].x = gamma.factor(seen + c * 64);
        mn_curve80_through<KP, 64, false>(Y, R, q);
        __syncthreads();
        const float before[2] = { s[0], s[1] };
        mn_curve80_take_keys<KP>(Y, R, s, k, smem.P, NULL);
        forward_results(q, Y, smem.weight, before);
        mn_curve80_store(q, of.to, c * 64, rows - c * 64, K);
    }
    if (!at.s.last) return;
    mn_curve_store(mn_row<float>(p.kk, at.s.n, 0, at.h), R, 1.0f, K,
                   threadIdx.x / MN_WARPGROUP * 64);
    store_vector(mn_row<float>(p.ks, at.s.n, 0, at.h), s, K);
}

/* ---- what segments add ----------------------------------------------------------------------- */

template <int KP>
struct alignas(128) sums_smem {
    static constexpr int stages = 4;    // chunks here or on their way
    unsigned char k[stages][KP / 64 * MN_CURVE_SQUARE];
    mn_curve80_views views;
};

/* Grid: a block for each head of a segment; 16 rows of R are in the registers of each warp.
 * Loads   k (64,K) of each chunk of a segment that is not its sequence's last.
 * Stores  what they add to R (K,K) and s (K). */
template <int KP>
__global__ void __launch_bounds__(mn_curve80_threads<KP>, KP == 64 ? 4 : 2)
curvature_sums_sm80_kernel(const __grid_constant__ mn_curvature_args p, float *states,
                           mn_curve_cut cut) {
    constexpr int stages = sums_smem<KP>::stages;
    extern __shared__ __align__(128) unsigned char bytes[];
    sums_smem<KP> &smem = *(sums_smem<KP> *)bytes;
    const mn_curve80_views &of = mn_curve80_find(smem.views, p, cut, {}, {}, {});
    const mn_curve_place &at = of.place;
    if (!at.s.there || at.s.last) return;
    const int K = (int)p.call.K, rows = at.s.rows, n_chunks = (rows + 63) / 64;
    const int warp = threadIdx.x / 32;
    float R[KP / 2] = {}, sum[4] = {};
    const auto load = [&](int c) {
        if (c < n_chunks) {
            mn_curve80_load<KP, 64>(smem.k[c % stages], of.k, p.k.data, c * 64, rows - c * 64, K);
        }
        mn_cp_async_commit_group();
    };
    for (int c = 0; c < stages - 1; c++) load(c);
    for (int c = 0; c < n_chunks; c++) {
        const unsigned char *tile = smem.k[c % stages];
        mn_cp_async_wait_group<stages - 2>();
        __syncthreads();    // and the chunk before has been read
        load(c + stages - 1);
#pragma unroll
        for (int step = 0; step < 4; step++) {
            uint32_t k[4];
            mn_curve80_left<64>(k, tile, 16 * warp, step);
            mn_curve80_add_ones(sum, k);
            mn_warp_ab<16, KP, 64>(R, k, mn_curve80_address(tile), 16 * step);
        }
    }
    const float s[2] = { sum[0], sum[2] };
    float *state = states + (at.s.slot * p.call.H + at.h) * mn_curve_state_size(K);
    mn_curve_store(state, R, 1.0f, K, warp / 4 * 64);
    store_vector(state + (int64_t)K * K, s, K);
}

template <int KP>
static int start_sums(const mn_curvature_args *p, float *states, const mn_curve_cut &cut,
                      cudaStream_t on) {
    const int code = mn_curve_start(curvature_sums_sm80_kernel<KP>, mn_curve80_threads<KP>,
                                    sizeof(sums_smem<KP>), p->call, cut, on, *p, states);
    return code == cudaSuccess ? mn_curve_scan<false>(p, states, cut.segment, on) : code;
}

int mn_curve_sums_sm80(const mn_curvature_args *p, float *states, cudaStream_t on) {
    const mn_curve_cut cut = mn_curve80_cut(p), tiles = mn_curve_smem_tile_cut<mn_bf16>(p);
    const bool narrow = p->call.K <= 64;
    if (p->call.T <= cut.segment) return cudaSuccess;
    if (mn_curve80_sums_taken) {
        return narrow ? start_sums<64>(p, states, cut, on) : start_sums<128>(p, states, cut, on);
    }
    return narrow ? mn_curve_add_up<mn_bf16, 64, false>(p, states, NULL, tiles, on)
                  : mn_curve_add_up<mn_bf16, 128, false>(p, states, NULL, tiles, on);
}

/* ---- launches -------------------------------------------------------------------------------- */

template <int KP>
static int start_forward(const mn_curvature_args *p, float *states, cudaStream_t on) {
    const int code = mn_curve_sums_sm80(p, states, on);
    if (code != cudaSuccess) return code;
    return mn_curve_start(curvature_forward_sm80_kernel<KP>, mn_curve80_threads<KP>,
                          sizeof(mn_curve80_smem<KP>), p->call, mn_curve80_cut(p), on, *p,
                          (const float *)states);
}

bool mn_curve_forward_sm80(int *code, const mn_curvature_args *p, float *states, cudaStream_t on) {
    const bool narrow = p->call.K <= 64;
    if (!mn_curve80_serves(p, narrow ? sizeof(mn_curve80_smem<64>)
                                     : sizeof(mn_curve80_smem<128>))) {
        return false;
    }
    *code = narrow ? start_forward<64>(p, states, on) : start_forward<128>(p, states, on);
    return true;
}

}    // namespace mneme::curvature
