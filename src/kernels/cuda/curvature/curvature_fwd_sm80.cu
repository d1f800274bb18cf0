/* curvature_fwd_sm80.cu - curvature forward by mma.sync: curvature_mma_sm80.cuh.
 *
 *   Y' = R Q' + K' tril(Q K' - m)'     qt = q - gamma / n (y - m s)     R <- R + K' K */
#include "kernels/cuda/curvature/curvature_mma_sm80.cuh"

namespace mneme::curvature {

/* Pairs of tokens of q, `x`, become results; the chunk's s is that in front of it. */
__device__ static void forward_result(uint32_t (&x)[16], const float (&Y)[32],
                                      const float2 *weight, const float (&s)[2]) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int n = 0; n < 8; n++) {
        const float4 w = *(const float4 *)(weight + 8 * n + lane % 4 * 2);
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const float left = fmaf(-w.y, s[r], Y[4 * n + 2 * r]);
            const float right = fmaf(-w.w, s[r], Y[4 * n + 2 * r + 1]);
            uint32_t &pair = x[2 * n + r];
            pair = mn_bf16x2(fmaf(w.x, left, mn_curve_low(pair)),
                             fmaf(w.z, right, mn_curve_high(pair)));
        }
    }
}

/* Scores of a warp's 16 tokens into P, and their weights. */
template <int KP>
__device__ static void forward_scores(mn_curve80_smem<KP> &smem, const unsigned char *k,
                                      const unsigned char *q, const mn_curve80_tokens &tokens,
                                      int64_t seen) {
    float d[36], each[2], mean[2];
    mn_curve80_scores<KP, MN_CURVE_ROWS>(d, q, k, threadIdx.x / 32);
    tokens.each_of(each, seen);
    mn_curve_means(mean, d, each);
    mn_curve_put_square(smem.P, NULL, d, mean);
    if (threadIdx.x % 4 > 0) return;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        smem.weight[tokens.row + 8 * r] = make_float2(-tokens.gamma[r] * each[r], mean[r]);
    }
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
    const mn_curve_place &at = mn_curve80_place(smem.place, p.call, cut);
    if (!at.s.there) return;
    const int64_t K = p.call.K, seen = (int64_t)mn_curve_before(p, at.s.n) + at.s.first;
    const int warp = threadIdx.x / 32, n_chunks = (at.s.rows + 63) / 64;
    float R[KP / 2], s[2];
    mn_curve80_tokens tokens, next;
    const auto load = [&](int c) {
        const int64_t t = at.s.first + c * 64;
        const int count = at.s.rows - c * 64;
        mn_curve80_load<KP, MN_CURVE_ROWS>(smem.k[c % 2], p.k, p.k, at.s.span, at.h, t, count, K);
        mn_curve80_load<KP, 64>(smem.x[c % 2], p.q, p.q, at.s.span, at.h, t, count, K);
        if (warp < 4) next.ask(p, at, c * 64);
        mn_cp_async_commit_group();
    };
    if (n_chunks > 0) load(0);
    mn_curve80_begin<KP>(smem, R, s, p, at, states);
    for (int c = 0; c < n_chunks; c++) {
        unsigned char *k = smem.k[c % 2], *q = smem.x[c % 2];
        uint32_t x[16];
        float Y[32] = {};
        mn_curve80_put_vector(k, s);
        mn_cp_async_wait_group<0>();
        __syncthreads();
        tokens = next;
        if (c + 1 < n_chunks) load(c + 1);
        if (warp < 4) forward_scores<KP>(smem, k, q, tokens, seen + c * 64);
        mn_curve80_through<KP, 64, false>(Y, R, q);
        __syncthreads();
        const float before[2] = { s[0], s[1] };
        const bool wild = mn_curve80_see_keys(Y, x, k, smem.P, NULL);
        mn_curve80_add<KP>(R, s, x, k, wild);
        mn_curve_left<64>(x, q, 16 * warp);
        forward_result(x, Y, smem.weight, before);
        mn_curve80_store(q, x, p.qt, at.s.span, at.h, at.s.first + c * 64, at.s.rows - c * 64, K);
    }
    if (!at.s.last) return;
    mn_curve_store(mn_row<float>(p.kk, at.s.n, 0, at.h), R, 1.0f, K, warp / 4 * 64);
    float *last = mn_row<float>(p.ks, at.s.n, 0, at.h);
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int j = warp * 16 + threadIdx.x % 32 / 4 + 8 * r;
        if (last && threadIdx.x % 4 == 0 && j < K) last[j] = s[r];
    }
}

template <int KP>
static int start_forward(const mn_curvature_args *p, float *states, cudaStream_t on) {
    const mn_curve_cut sums = mn_curve_smem_tile_cut<mn_bf16>(p), cut = mn_curve80_cut(p);
    const int code = mn_curve_add_up<mn_bf16, KP, false>(p, states, NULL, sums, on);
    if (code != cudaSuccess) return code;
    return mn_curve_start(curvature_forward_sm80_kernel<KP>, mn_curve80_threads<KP>,
                          sizeof(mn_curve80_smem<KP>), p->call, cut, on, *p,
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
