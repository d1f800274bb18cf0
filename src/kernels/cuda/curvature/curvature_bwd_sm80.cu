/* curvature_bwd_sm80.cu - curvature going back by mma.sync: curvature_mma_sm80.cuh. With D the
 * cotangents of results, in the order of time
 *
 *   Y' = R D' + K' tril(D K' - m)'     dq = d - gamma / n (y - m s)     R <- R + K' K
 *
 * where R and scores go in with what rounding leaves of them, as y.q, which dgamma is, would show
 * it; and against it, with Z = diag(-gamma / n) D,
 *
 *   dK' = G K' + Z' tril(Q K' - m) + Q' tril(Z K' - mz) + e     G <- G + Z' Q + Q' Z
 *   e <- e - Z' m - Q' mz */
#include "kernels/cuda/curvature/curvature_mma_sm80.cuh"

namespace mneme::curvature {

/* ---- in the order of time -------------------------------------------------------------------- */

/* dq of the chunk, in the place of its d, `x`; a warp's part of y.q of the chunk's tokens. s is
 * that in front of the chunk. A warp has 16 columns. */
__device__ static void queries_results(unsigned char *x, float *parts, const float (&Y)[32],
                                       const unsigned char *q, const float2 *weight,
                                       const float (&s)[2]) {
    const int lane = threadIdx.x % 32, column = threadIdx.x / 32 * 16;
    float part[16] = {};
#pragma unroll
    for (int step = 0; step < 4; step++) {
        uint32_t to[4], of_q[4];
        mn_curve80_left<64>(to, x, column, step);
        mn_curve80_left<64>(of_q, q, column, step);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int n = 2 * step + i / 2, r = i % 2;
            const float4 w = *(const float4 *)(weight + 8 * n + lane % 4 * 2);
            const float left = fmaf(-w.y, s[r], Y[4 * n + 2 * r]);
            const float right = fmaf(-w.w, s[r], Y[4 * n + 2 * r + 1]);
            part[2 * n] = fmaf(mn_curve_low(of_q[i]), left, part[2 * n]);
            part[2 * n + 1] = fmaf(mn_curve_high(of_q[i]), right, part[2 * n + 1]);
            to[i] = mn_bf16x2(fmaf(w.x, left, mn_curve_low(to[i])),
                              fmaf(w.z, right, mn_curve_high(to[i])));
        }
        mn_curve80_put_turned(x, to, 16 * step);
    }
#pragma unroll
    for (int kept = 8; kept > 1; kept /= 2) {    // of the tokens, those that are the lane's own
        const bool upper = lane & 2 * kept;
#pragma unroll
        for (int i = 0; i < kept; i++) {
            const float give = upper ? part[i] : part[i + kept];
            part[i] = (upper ? part[i + kept] : part[i]) +
                      __shfl_xor_sync(0xffffffffu, give, 2 * kept);
        }
    }
    const int n = lane / 16 * 4 + lane / 8 % 2 * 2 + lane / 4 % 2;
    *(float2 *)(parts + 8 * n + lane % 4 * 2) = make_float2(part[0], part[1]);
}

/* Scores of d into P and what rounding leaves, means of a warp's 16 tokens. */
template <int KP, int BLOCK>
__device__ static void queries_scores(mn_curve80_queries_smem<KP> &smem, int slot, int64_t seen) {
    const int lane = threadIdx.x % 32;
    float d[36], each[2], mean[2];
    mn_curve80_scores<KP, MN_CURVE_ROWS, BLOCK>(d, smem.x[slot], smem.k[slot]);
    mn_curve80_each(each, seen);
    mn_curve80_means<BLOCK>(mean, d, each);
    mn_curve80_put_scores<BLOCK>(smem.P, smem.low, d, mean);
    if (lane % 4 > 0) return;
    smem.weight[16 * BLOCK + lane / 4].y = mean[0];
    smem.weight[16 * BLOCK + lane / 4 + 8].y = mean[1];
}

/* Means of q of 16 tokens, by the warps behind those of scores, or by these. */
template <int KP, int BLOCK>
__device__ static void queries_means(mn_curve80_queries_smem<KP> &smem, int slot, int64_t seen) {
    const int lane = threadIdx.x % 32;
    float d[36], each[2], mean[2];
    mn_curve80_scores<KP, MN_CURVE_ROWS, BLOCK>(d, smem.q[slot], smem.k[slot]);
    mn_curve80_each(each, seen);
    mn_curve80_means<BLOCK>(mean, d, each);
    if (lane % 4 > 0) return;
    smem.mean[16 * BLOCK + lane / 4] = mean[0], smem.mean[16 * BLOCK + lane / 4 + 8] = mean[1];
}

/* What the way back needs of a chunk's tokens: means of q and of d, and y.q. */
template <int KP>
__device__ static void queries_keep(const mn_curve80_queries_smem<KP> &smem,
                                    const mn_curvature_args &p, const mn_curve_work &w,
                                    const mn_curve_place &at, int c) {
    const int i = threadIdx.x;
    if (i >= min(64, at.s.rows - c * 64)) return;
    const int64_t row = mn_curve_row_of(p.call, at, at.s.first + c * 64 + i);
    float part = 0.0f;
#pragma unroll
    for (int n = 0; n < KP / 16; n++) part += smem.parts[n][i];
    w.parts[row] = part;
    w.means[2 * row] = smem.mean[i], w.means[2 * row + 1] = smem.weight[i].y;
}

/* Grid: a block for each head of a segment.
 * Loads   q, k, d (64,K) and gamma of each chunk; at the start R (K,K) and s (K).
 * Stores  dq (64,K) of each chunk where it is wanted; w.means and w.parts of its tokens. */
template <int KP>
__global__ void __launch_bounds__(mn_curve80_threads<KP>, KP == 64 ? 2 : 1)
curvature_queries_sm80_kernel(const __grid_constant__ mn_curvature_args p, mn_curve_work w,
                              mn_curve_cut cut) {
    extern __shared__ __align__(128) unsigned char bytes[];
    mn_curve80_queries_smem<KP> &smem = *(mn_curve80_queries_smem<KP> *)bytes;
    const mn_curve80_views &of = mn_curve80_find(smem.views, p, cut, p.cot.qt, p.q, p.grad.q);
    const mn_curve_place &at = of.place;
    if (!at.s.there) return;
    const int64_t seen = (int64_t)mn_curve_before(p, at.s.n) + at.s.first;
    const int K = (int)p.call.K, rows = at.s.rows, n_chunks = (rows + 63) / 64;
    const int warp = threadIdx.x / 32;
    float R[KP / 2], s[2];
    mn_curve80_gamma<KP> gamma, next;
    const auto load = [&](int c) {
        const int start = c * 64, count = rows - start;
        mn_curve80_load<KP, MN_CURVE_ROWS>(smem.k[c % 2], of.k, p.k.data, start, count, K);
        mn_curve80_load<KP, 64>(smem.x[c % 2], of.x, p.k.data, start, count, K);
        mn_curve80_load<KP, 64>(smem.q[c % 2], of.q, p.k.data, start, count, K);
        next.ask(of.gamma, start, count);
        mn_cp_async_commit_group();
    };
    if (n_chunks > 0) load(0);
    mn_curve80_begin<KP>(smem, R, s, p, at, w.there);
    for (int c = 0; c < n_chunks; c++) {
        const int slot = c % 2;
        float Y[32] = {};
        mn_curve80_put_vector(smem.k[slot], s);
        mn_cp_async_wait_group<0>();
        __syncthreads();
        gamma = next;
        if (c > 0) queries_keep<KP>(smem, p, w, at, c - 1);
        if (c + 1 < n_chunks) load(c + 1);
        mn_curve80_through<KP, 64, false>(Y, R, smem.x[slot]);
        mn_curve80_through<KP, 64, true>(Y, R, smem.x[slot]);
        __syncthreads();    // means, weights and parts of the chunk before are kept
        mn_curve80_by_block([&](auto block) {
            if (warp < 4) queries_scores<KP, block.value>(smem, slot, seen + c * 64);
            if (KP == 64 || warp >= 4) queries_means<KP, block.value>(smem, slot, seen + c * 64);
        });
        if (gamma.has()) smem.weight[gamma.token()].x = gamma.factor(seen + c * 64);
        __syncthreads();
        const float before[2] = { s[0], s[1] };
        mn_curve80_take_keys<KP>(Y, R, s, smem.k[slot], smem.P, smem.low);
        queries_results(smem.x[slot], smem.parts[warp], Y, smem.q[slot], smem.weight, before);
        mn_curve80_store(smem.x[slot], of.to, c * 64, rows - c * 64, K);
    }
    __syncthreads();
    if (n_chunks > 0) queries_keep<KP>(smem, p, w, at, n_chunks - 1);
}

/* ---- against it ------------------------------------------------------------------------------ */

template <int KP>
struct alignas(128) mn_curve80_back_smem {
    static constexpr int wide = KP / 64 * MN_CURVE_SQUARE;

    unsigned char k[2][wide], q[2][wide], z[2][wide], added[wide];
    unsigned char P[2][MN_CURVE_SQUARE];
    float2 mean[MN_CURVE_CHUNK];    // of q and of z
    mn_curve80_views views;
};

/* Of the rows that a thread loads: d times these weights are z. */
template <int KP>
struct back_weights {
    static constexpr int vecs = KP / 8, step = mn_curve80_threads<KP> / vecs;
    static constexpr int N = MN_CURVE_CHUNK / step;
    mn_bf16 gamma[N];    // as it comes, so that nobody waits for it

    __device__ void ask(mn_curve80_rows from, int start, int count) {
        const int row = threadIdx.x / vecs;
        const mn_bf16 *at = from.at + (int64_t)(start + row) * from.stride;
#pragma unroll
        for (int i = 0; i < N; i++, at += step * from.stride) {
            gamma[i] = __float2bfloat16_rn(0.0f);
            if (row + i * step < count) gamma[i] = *at;
        }
    }

    /* The thread's own pieces of a tile, which have arrived. */
    __device__ void weigh(unsigned char *tile, int64_t seen) const {
#pragma unroll
        for (int i = 0; i < N; i++) {
            const int row = threadIdx.x / vecs + i * step;
            const float by = -mn_float(gamma[i]) / (float)(seen + row + 1);
            uint4 &piece = *(uint4 *)(tile + mn_swizzle_byte(64, row, threadIdx.x % vecs * 8));
            float x[8];
            mn_curve_unpack(x, piece);
#pragma unroll
            for (int j = 0; j < 8; j++) x[j] *= by;
            piece = mn_curve_pack_vec16(x);
        }
    }
};

/* gamma, as it comes, and both means of the two tokens whose scores a lane makes. */
struct back_tokens {
    mn_bf16 gamma[2];
    float q[2], d[2];

    __device__ void ask(mn_curve80_rows from, const mn_curvature_args &p, const float *means,
                        const mn_curve_place &at, int start) {
        const int row = threadIdx.x % MN_WARPGROUP / 32 * 16 + threadIdx.x % 32 / 4;
        const int64_t first = mn_curve_row_of(p.call, at, at.s.first + start);
        const mn_bf16 *from_gamma = from.at + (int64_t)(start + row) * from.stride;
#pragma unroll
        for (int r = 0; r < 2; r++, from_gamma += 8 * from.stride) {
            const int token = row + 8 * r;
            const bool there = start + token < at.s.rows;
            gamma[r] = __float2bfloat16_rn(0.0f);
            if (there) gamma[r] = *from_gamma;
            q[r] = there ? means[2 * (first + token)] : 0.0f;
            d[r] = there ? means[2 * (first + token) + 1] : 0.0f;
        }
    }
};

/* Scores of q, and of z, with keys, less their means, for 16 tokens of a warp. */
template <int KP, int BLOCK>
__device__ static void back_scores(mn_curve80_back_smem<KP> &smem, int slot,
                                   const back_tokens &tokens, int64_t seen) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float d[36], each[2], mz[2];
    mn_curve80_each(each, seen);
#pragma unroll
    for (int r = 0; r < 2; r++) mz[r] = -mn_float(tokens.gamma[r]) * each[r] * tokens.d[r];
    if (warp < 4) {
        mn_curve80_scores<KP, MN_CURVE_CHUNK, BLOCK>(d, smem.q[slot], smem.k[slot]);
        mn_curve80_put_scores<BLOCK>(smem.P[0], NULL, d, tokens.q);
        for (int r = 0; r < 2 && lane % 4 == 0; r++) {
            smem.mean[16 * BLOCK + lane / 4 + 8 * r] = make_float2(tokens.q[r], mz[r]);
        }
    }
    if (KP > 64 && warp < 4) return;
    mn_curve80_scores<KP, MN_CURVE_CHUNK, BLOCK>(d, smem.z[slot], smem.k[slot]);
    mn_curve80_put_scores<BLOCK>(smem.P[1], NULL, d, mz);
}

/* e <- e - x' m for a left operand of a chunk and the means of its tokens, q's or z's. */
template <bool OF_Z>
__device__ static void back_add_means(float (&e)[2], const uint32_t (&x)[16], const float2 *mean) {
    const int lane = threadIdx.x % 32;
    float sum[2] = {};
#pragma unroll
    for (int n = 0; n < 8; n++) {
        const float4 m = *(const float4 *)(mean + 8 * n + lane % 4 * 2);
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const uint32_t pair = x[2 * n + r];
            sum[r] = fmaf(OF_Z ? -m.y : -m.x, mn_curve_low(pair), sum[r]);
            sum[r] = fmaf(OF_Z ? -m.w : -m.z, mn_curve_high(pair), sum[r]);
        }
    }
#pragma unroll
    for (int r = 0; r < 2; r++) e[r] += mn_quad_sum(sum[r]);
}

/* What keys get of one of z and q, `tile`, by scores P of the other; what it adds to G by `other`,
 * and to e by means. */
template <int KP, bool OF_Z>
__device__ static void back_part(float (&Y)[32], float (&G)[KP / 2], float (&e)[2],
                                 const unsigned char *tile, const unsigned char *other,
                                 const unsigned char *P, const float2 *mean) {
    uint32_t x[16];
    mn_curve_left<64>(x, tile, threadIdx.x / 32 * 16);
    const bool wild = mn_curve_tame(x);
    mn_curve80_see_later(Y, x, P);
    mn_warp_ab<MN_CURVE_CHUNK, KP, 64>(G, x, mn_curve80_address(other), 0);
    if (wild) {
        mn_curve_left<64>(x, tile, threadIdx.x / 32 * 16);
        mn_curve_add_wild<MN_SEES_LATER>(Y, x, P);
        mn_curve_wild_rows(G, x);
    }
    back_add_means<OF_Z>(e, x, mean);
}

/* dk of the chunk, in the place of its keys, with what is there already where it is added; e is
 * that behind the chunk. A warp has 16 columns. */
__device__ static void back_results(unsigned char *k, const float (&Y)[32], const float (&e)[2],
                                    const unsigned char *added) {
#pragma unroll
    for (int step = 0; step < 4; step++) {
        uint32_t x[4] = {};
        if (added) mn_curve80_left<64>(x, added, threadIdx.x / 32 * 16, step);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int pair = 4 * step + i;
            float left = Y[2 * pair] + e[i % 2], right = Y[2 * pair + 1] + e[i % 2];
            if (added) left += mn_curve_low(x[i]), right += mn_curve_high(x[i]);
            x[i] = mn_bf16x2(left, right);
        }
        mn_curve80_put_turned(k, x, 16 * step);
    }
}

/* dgamma of a chunk, from the one part of y.q that there is. */
__device__ static void back_put_gamma(const mn_curvature_args &p, const mn_curve_work &w,
                                      const mn_curve_place &at, int start, int64_t seen) {
    const int i = threadIdx.x;
    if (i >= min(64, at.s.rows - start)) return;
    const int64_t t = at.s.first + start + i;
    mn_bf16 *to = mn_row<mn_bf16>(p.grad.gamma, at.s.span.b, at.s.span.t0 + t, at.h);
    const float each = 1.0f / (float)(seen + i + 1);
    if (to) mn_put(to, -w.parts[mn_curve_row_of(p.call, at, t)] * each);
}

/* Grid: a block for each head of a segment, whose chunks it takes in reverse.
 * Loads   q, k, d (64,K), gamma, w.means and w.parts of each chunk, dk where it is added to; at
 *         the start G (K,K) and e (K).
 * Stores  dk (64,K) and dgamma of each chunk; G and e in front of a sequence. */
template <int KP>
__global__ void __launch_bounds__(mn_curve80_threads<KP>, KP == 64 ? 2 : 1)
curvature_back_sm80_kernel(const __grid_constant__ mn_curvature_args p, mn_curve_work w,
                           mn_curve_cut cut) {
    extern __shared__ __align__(128) unsigned char bytes[];
    mn_curve80_back_smem<KP> &smem = *(mn_curve80_back_smem<KP> *)bytes;
    const mn_curve80_views &of = mn_curve80_find(smem.views, p, cut, p.cot.qt, p.q, p.grad.k);
    const mn_curve_place &at = of.place;
    if (!at.s.there) return;
    const int64_t seen = (int64_t)mn_curve_before(p, at.s.n) + at.s.first;
    const int K = (int)p.call.K, rows = at.s.rows, n_chunks = (rows + 63) / 64;
    const int warp = threadIdx.x / 32, j = warp * 16 + threadIdx.x % 32 / 4;
    const float *sums = at.s.last ? NULL : mn_curve_sums_for(w.back, p.call, at, at.s.slot + 1);
    const float *vector = sums ? sums + (int64_t)K * K : mn_row<float>(p.cot.ks, at.s.n, 0, at.h);
    float G[KP / 2], e[2];
    back_weights<KP> weights;
    back_tokens tokens, next;
    const auto load = [&](int c) {
        const int start = c * 64, count = rows - start;
        mn_curve80_load<KP, 64>(smem.k[c % 2], of.k, p.k.data, start, count, K);
        mn_curve80_load<KP, 64>(smem.q[c % 2], of.q, p.k.data, start, count, K);
        mn_curve80_load<KP, 64>(smem.z[c % 2], of.x, p.k.data, start, count, K);
        weights.ask(of.gamma, start, count);
        next.ask(of.gamma, p, w.means, at, start);
        mn_cp_async_commit_group();
    };
    if (n_chunks > 0) load(n_chunks - 1);
    mn_curve_load(G, mn_row<float>(p.cot.kk, at.s.n, 0, at.h), sums, 1.0f, K, warp / 4 * 64);
#pragma unroll
    for (int r = 0; r < 2; r++) e[r] = j + 8 * r < K ? mn_get(vector, j + 8 * r) : 0.0f;
    for (int c = n_chunks - 1; c >= 0; c--) {
        const int slot = c % 2, start = c * 64, count = rows - start;
        float Y[32] = {};
        mn_cp_async_wait_group<0>();
        weights.weigh(smem.z[slot], seen + start);
        __syncthreads();
        tokens = next;
        if (p.adds_k) {
            mn_curve80_load<KP, 64>(smem.added, of.to, p.k.data, start, count, K);
            mn_cp_async_commit_group();
        }
        if (c > 0) load(c - 1);
        back_put_gamma(p, w, at, start, seen + start);
        mn_curve80_by_block([&](auto block) {
            back_scores<KP, block.value>(smem, slot, tokens, seen + start);
        });
        mn_curve80_through<KP, 64, false>(Y, G, smem.k[slot]);
        if (p.adds_k && c > 0) mn_cp_async_wait_group<1>();
        if (p.adds_k && c == 0) mn_cp_async_wait_group<0>();
        __syncthreads();
        const float behind[2] = { e[0], e[1] };
        back_part<KP, false>(Y, G, e, smem.z[slot], smem.q[slot], smem.P[0], smem.mean);
        back_part<KP, true>(Y, G, e, smem.q[slot], smem.z[slot], smem.P[1], smem.mean);
        back_results(smem.k[slot], Y, behind, p.adds_k ? smem.added : NULL);
        mn_curve80_store(smem.k[slot], of.to, start, count, K);
    }
    if (at.s.first > 0) return;
    mn_curve_store(mn_row<float>(p.grad.kk0, at.s.n, 0, at.h), G, 0.5f, K, warp / 4 * 64);
    float *ds = mn_row<float>(p.grad.ks0, at.s.n, 0, at.h);
#pragma unroll
    for (int r = 0; r < 2; r++) {
        if (ds && threadIdx.x % 4 == 0 && j + 8 * r < K) ds[j + 8 * r] = e[r];
    }
}

/* ---- launches -------------------------------------------------------------------------------- */

template <int KP>
static int start_backward(const mn_curvature_args *p, const mn_curve_work &w, cudaStream_t on) {
    const mn_curve_cut sums = mn_curve_smem_tile_cut<mn_bf16>(p), cut = mn_curve80_cut(p);
    int code = mn_curve_sums_sm80(p, w.there, on);
    if (code != cudaSuccess) return code;
    code = mn_curve_start(curvature_queries_sm80_kernel<KP>, mn_curve80_threads<KP>,
                          sizeof(mn_curve80_queries_smem<KP>), p->call, cut, on, *p, w);
    if (code != cudaSuccess) return code;
    code = mn_curve_add_up<mn_bf16, KP, true>(p, w.back, w.means, sums, on);
    if (code != cudaSuccess) return code;
    return mn_curve_start(curvature_back_sm80_kernel<KP>, mn_curve80_threads<KP>,
                          sizeof(mn_curve80_back_smem<KP>), p->call, cut, on, *p, w);
}

bool mn_curve_backward_sm80(int *code, const mn_curvature_args *p, const mn_curve_work &w,
                            cudaStream_t on) {
    const bool narrow = p->call.K <= 64;
    const size_t smem = mn_max(sizeof(mn_curve80_queries_smem<128>),
                               sizeof(mn_curve80_back_smem<128>));
    const size_t less = mn_max(sizeof(mn_curve80_queries_smem<64>),
                               sizeof(mn_curve80_back_smem<64>));
    if (!mn_curve80_serves(p, narrow ? less : smem)) return false;
    *code = narrow ? start_backward<64>(p, w, on) : start_backward<128>(p, w, on);
    return true;
}

}    // namespace mneme::curvature
