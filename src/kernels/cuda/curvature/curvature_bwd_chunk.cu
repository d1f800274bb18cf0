/* curvature_bwd_chunk.cu - curvature backward: products of tiles, and which calls go to
 * those of Hopper. */
#include "kernels/cuda/curvature/curvature_mma_sm80.cuh"
#include "kernels/cuda/curvature/curvature_sm90.cuh"
#include "kernels/cuda/curvature/curvature_smem.cuh"
#include "kernels/cuda/prim/sync.cuh"

namespace mneme::curvature {

/* the scan of curvature against time on Hopper: the gradients of keys and of the states. With d
 * the cotangent, f = -gamma / n, m and md the means of q and d:
 *
 *   dK' = G K' + (fD)' tril(Q K' - m) + (fQ)' tril(D K' - md) + e
 *   G <- G + (fD)'Q + (fQ)'D      e <- e - sum of f (m d + md q) */

template <int KP>
struct alignas(1024) mn_curve_back_stage {
    unsigned char k[KP / 64 * MN_CURVE_SQUARE];
    unsigned char q[KP / 64 * MN_CURVE_SQUARE];
    unsigned char d[KP / 64 * MN_CURVE_SQUARE];
    float e[MN_CURVE_SLICE];                               // behind the chunk
    float factor[MN_CURVE_CHUNK], mean[2][MN_CURVE_CHUNK];
};

template <int KP>
struct mn_curve_back_smem {
    static constexpr int stages = 3;
    mn_curve_back_stage<KP> stage[stages];
    alignas(1024) unsigned char P[2][2][MN_CURVE_SQUARE];    // of q, of d
    mn_curve_read Y[2];
    float part[2][4][MN_CURVE_SLICE];
    uint64_t there[stages], gone[stages], scored[2], used[2], read[2], left[2];
};

#if MN_HAS_WGMMA

/* ---- the group that copies ------------------------------------------------------------------- */

template <int KP>
__device__ inline void mn_curve_back_load(mn_curve_back_stage<KP> &to,
                                           const mn_curvature_args &p, const mn_curve_place &at,
                                           int64_t t, int count) {
    const mn_in *views[3] = { &p.k, &p.q, &p.cot.qt };
    unsigned char *tiles[3] = { to.k, to.q, to.d };
#pragma unroll
    for (int n = 0; n < 3; n++) {
        const mn_in &x = *views[n];
        mn_cp_async_tile<MN_CURVE_CHUNK, KP>(
            mn_smem_addr(tiles[n]), mn_row<mn_bf16>(x, at.s.span.b, at.s.span.t0 + t, at.h),
            x.stride[1], x.data ? count : 0, (int)p.call.K, threadIdx.x % MN_WARPGROUP);
    }
}

/* What a token's thread knows of it. */
struct mn_curve_token {
    float gamma, mean, mean_d, part;
};

__device__ inline mn_curve_token mn_curve_token_of(const mn_curvature_args &p,
                                                   const mn_curve_work &w,
                                                   const mn_curve_place &at, int n_parts,
                                                   int64_t t) {
    const int64_t row = mn_curve_row_of(p.call, at, t);
    const int64_t rows = p.call.B * p.call.T * p.call.H;
    const float2 means = *(const float2 *)(w.means + 2 * row);
    const mn_bf16 *gamma = mn_row<mn_bf16>(p.gamma, at.s.span.b, at.s.span.t0 + t, at.h);
    mn_curve_token x = { mn_float(*gamma), means.x, means.y, 0.0f };
    for (int i = 0; i < n_parts && at.slice == 0; i++) x.part += w.parts[i * rows + row];
    return x;
}

/* -sum of f (m d + md q) over the rows that this thread copied, then over all: that of column i of
 * the slice. */
template <int KP>
__device__ inline float mn_curve_weighted_column(const mn_curve_back_stage<KP> &in, int slice,
                                                 float (&part)[4][MN_CURVE_SLICE]) {
    constexpr int pieces = KP / 8, step = MN_WARPGROUP / pieces;
    const int i = threadIdx.x % MN_WARPGROUP, piece = i % pieces * 8;
    float sum[8] = {};
#pragma unroll 4
    for (int row = i / pieces; row < MN_CURVE_CHUNK; row += step) {
        const uint32_t byte = mn_swizzle_byte(64, row, piece);
        const uint4 d = *(const uint4 *)(in.d + byte), q = *(const uint4 *)(in.q + byte);
        const uint32_t of_d[4] = { d.x, d.y, d.z, d.w }, of_q[4] = { q.x, q.y, q.z, q.w };
        const float by_d = -in.factor[row] * in.mean[0][row];
        const float by_q = -in.factor[row] * in.mean[1][row];
#pragma unroll
        for (int j = 0; j < 8; j++) {
            const uint32_t x = of_d[j / 2], y = of_q[j / 2];
            sum[j] = fmaf(by_d, j % 2 ? mn_curve_high(x) : mn_curve_low(x), sum[j]);
            sum[j] = fmaf(by_q, j % 2 ? mn_curve_high(y) : mn_curve_low(y), sum[j]);
        }
    }
#pragma unroll
    for (int j = 0; j < 8; j++) {
        if (pieces == 8) sum[j] += __shfl_xor_sync(0xffffffffu, sum[j], 8);
        sum[j] += __shfl_xor_sync(0xffffffffu, sum[j], 16);
    }
    if (i % 32 < pieces && piece / MN_CURVE_SLICE == slice) {
        float4 *to = (float4 *)&part[i / 32][piece % MN_CURVE_SLICE];
        to[0] = make_float4(sum[0], sum[1], sum[2], sum[3]);
        to[1] = make_float4(sum[4], sum[5], sum[6], sum[7]);
    }
    mn_curve_group_sync(1);
    if (i >= MN_CURVE_SLICE) return 0.0f;
    return (part[0][i] + part[1][i]) + (part[2][i] + part[3][i]);
}

/* Tiles of all chunks, the last first, one ahead of what is shown to the others, and e behind each;
 * dgamma. */
template <int KP>
__device__ inline void mn_curve_back_copy(mn_curve_back_smem<KP> &smem,
                                          const mn_curvature_args &p, const mn_curve_work &w,
                                          const mn_curve_place &at, int n_parts,
                                          const float *vector) {
    constexpr int stages = mn_curve_back_smem<KP>::stages;
    const int i = threadIdx.x % MN_WARPGROUP, n_chunks = (at.s.rows + 63) / 64;
    const int64_t own = at.column0 + i;
    const int64_t seen = (int64_t)mn_curve_before(p, at.s.n);
    float e = i < MN_CURVE_SLICE && own < p.call.K ? mn_get(vector, own) : 0.0f;
    mn_curve_token token = {};
    for (int c = 0; c <= n_chunks; c++) {
        const mn_curve_token token_now = token;
        if (c < n_chunks) {
            const int start = (n_chunks - 1 - c) * 64, count = min(64, at.s.rows - start);
            const int64_t t = at.s.first + start;
            mn_mbarrier_wait(&smem.gone[c % stages], (c / stages & 1) ^ 1);
            mn_curve_back_load<KP>(smem.stage[c % stages], p, at, t, count);
            token = {};
            if (i < count) token = mn_curve_token_of(p, w, at, n_parts, t + i);
        }
        mn_curve_copies_end();
        if (c == 0) continue;
        mn_curve_back_stage<KP> &now = smem.stage[(c - 1) % stages];
        const int start = (n_chunks - c) * 64;
        mn_curve_copies_wait<1>();
        if (i < MN_CURVE_CHUNK) {
            const int64_t t = at.s.first + start + i;
            const float each = 1.0f / (float)(seen + t + 1);
            now.e[i] = e;
            now.factor[i] = -token_now.gamma * each;
            now.mean[0][i] = token_now.mean, now.mean[1][i] = token_now.mean_d;
            mn_bf16 *to = mn_row<mn_bf16>(p.grad.gamma, at.s.span.b, at.s.span.t0 + t, at.h);
            if (to && at.slice == 0 && start + i < at.s.rows) mn_put(to, -token_now.part * each);
        }
        mn_mbarrier_arrive(&smem.there[(c - 1) % stages]);
        mn_curve_group_sync(1);
        e += mn_curve_weighted_column<KP>(now, at.slice, smem.part[c % 2]);
    }
    float *first = at.s.first == 0 ? mn_row<float>(p.grad.ks0, at.s.n, 0, at.h) : NULL;
    if (first && i < MN_CURVE_SLICE && own < p.call.K) first[own] = e;
}

/* ---- the group that makes scores ------------------------------------------------------------- */

template <int KP>
__device__ inline void mn_curve_back_scores(mn_curve_back_smem<KP> &smem, int n_chunks) {
    constexpr int stages = mn_curve_back_smem<KP>::stages;
    const int thread = threadIdx.x % MN_WARPGROUP, row = thread / 32 * 16 + thread % 32 / 4;
    for (int c = 0; c < n_chunks; c++) {
        mn_curve_back_stage<KP> &in = smem.stage[c % stages];
        float of_q[32], of_d[32];
        mn_mbarrier_wait(&smem.there[c % stages], c / stages & 1);
        mn_fence_proxy_async();
        mn_wgmma_fence();
        mn_curve_back_product<KP>(of_q, mn_smem_addr(in.q), mn_smem_addr(in.k));
        mn_curve_back_product<KP>(of_d, mn_smem_addr(in.d), mn_smem_addr(in.k));
        mn_mbarrier_wait(&smem.used[c % 2], (c / 2 & 1) ^ 1);
        mn_wgmma_wait<1>();
        const float mean[2] = { in.mean[0][row], in.mean[0][row + 8] };
        mn_curve_put_square(smem.P[c % 2][0], NULL, of_q, mean);
        mn_wgmma_wait<0>();
        const float mean_d[2] = { in.mean[1][row], in.mean[1][row + 8] };
        mn_curve_put_square(smem.P[c % 2][1], NULL, of_d, mean_d);
        mn_mbarrier_arrive(&smem.scored[c % 2]);
    }
}

/* ---- the group that has G -------------------------------------------------------------------- */

template <int KP>
__device__ inline void mn_curve_back_read(mn_curve_back_smem<KP> &smem,
                                          const mn_curvature_args &p, const mn_curve_place &at,
                                          const float *sums) {
    constexpr int stages = mn_curve_back_smem<KP>::stages;
    const int n_chunks = (at.s.rows + 63) / 64, warp = threadIdx.x / 32 % 4;
    const int lane = threadIdx.x % 32, own = at.column0 + warp * 16;
    float G[KP / 2], Y[32];
    mn_curve_load(G, mn_row<float>(p.cot.kk, at.s.n, 0, at.h), sums, 1.0f, p.call.K, at.column0);
    for (int c = 0; c < n_chunks; c++) {
        mn_curve_back_stage<KP> &in = smem.stage[c % stages];
        uint32_t a[KP / 4], d[16], q[16];
        mn_curve_pack(a, G);
        mn_mbarrier_wait(&smem.there[c % stages], c / stages & 1);
        const float e[2] = { in.e[warp * 16 + lane / 4], in.e[warp * 16 + lane / 4 + 8] };
#pragma unroll
        for (int i = 0; i < 32; i++) Y[i] = e[i % 4 / 2];
        mn_fence_proxy_async();
        mn_wgmma_fence();
        mn_curve_rows<KP, 64>(Y, a, mn_smem_addr(in.k));
        mn_wgmma_commit();
        mn_curve_left<64>(d, in.d, own);
        mn_curve_left<64>(q, in.q, own);
        mn_curve_weigh_tokens(d, in.factor);
        mn_curve_weigh_tokens(q, in.factor);
        const bool wild = mn_curve_tame(d);
        mn_mbarrier_wait(&smem.scored[c % 2], c / 2 & 1);
        mn_fence_proxy_async();
        mn_wgmma_fence();
        mn_curve_depth<MN_CURVE_CHUNK>(Y, d, mn_smem_addr(smem.P[c % 2][0]));
        mn_curve_depth<MN_CURVE_CHUNK>(Y, q, mn_smem_addr(smem.P[c % 2][1]));
        mn_wgmma_commit();
        mn_curve_depth<64>(G, d, mn_smem_addr(in.q));
        mn_curve_depth<64>(G, q, mn_smem_addr(in.d));
        mn_wgmma_commit();
        mn_mbarrier_wait(&smem.left[c % 2], (c / 2 & 1) ^ 1);
        mn_wgmma_wait<1>();
        if (wild) {
            uint32_t all[16];
            mn_curve_left<64>(all, in.d, own);
            mn_curve_weigh_tokens(all, in.factor);
            mn_curve_add_wild<MN_SEES_LATER>(Y, all, smem.P[c % 2][0]);
        }
        smem.Y[c % 2].put(Y);
        mn_mbarrier_arrive(&smem.read[c % 2]);
        mn_wgmma_wait<0>();
        if (wild) {
            uint32_t all[16];
            mn_curve_left<64>(all, in.d, own);
            mn_curve_wild_rows(G, all);
        }
        mn_mbarrier_arrive(&smem.gone[c % stages]);
        mn_mbarrier_arrive_warp(&smem.used[c % 2]);
    }
    if (at.s.first > 0) return;
    mn_curve_store(mn_row<float>(p.grad.kk0, at.s.n, 0, at.h), G, 0.5f, p.call.K, at.column0);
}

/* ---- the group that stores ------------------------------------------------------------------- */

template <int KP>
__device__ inline void mn_curve_back_store(mn_curve_back_smem<KP> &smem,
                                           const mn_curvature_args &p, const mn_curve_place &at) {
    const int i = threadIdx.x % MN_WARPGROUP, n_chunks = (at.s.rows + 63) / 64;
    const int vec16 = i % 8, column = at.column0 + 8 * vec16;
    for (int c = 0; c < n_chunks; c++) {
        const int start = (n_chunks - 1 - c) * 64;
        mn_bf16 *to = mn_row<mn_bf16>(p.grad.k, at.s.span.b, at.s.span.t0 + at.s.first + start,
                                      at.h);
        const bool wanted = to && column < p.call.K;
        uint4 before[4] = {};
#pragma unroll
        for (int n = 0; n < 4; n++) {
            const int token = i / 8 + 16 * n;
            if (!wanted || !p.adds_k || start + token >= at.s.rows) continue;
            before[n] = *(const uint4 *)(to + token * p.grad.k.stride[1] + column);
        }
        mn_mbarrier_wait(&smem.read[c % 2], c / 2 & 1);
#pragma unroll
        for (int n = 0; n < 4; n++) {
            const int token = i / 8 + 16 * n;
            float y[8], x[8];
            if (!wanted || start + token >= at.s.rows) continue;
            smem.Y[c % 2].get(y, vec16, token);
            mn_curve_unpack(x, before[n]);
#pragma unroll
            for (int j = 0; j < 8; j++) x[j] += y[j];
            *(uint4 *)(to + token * p.grad.k.stride[1] + column) = mn_curve_pack_vec16(x);
        }
        mn_mbarrier_arrive(&smem.left[c % 2]);
    }
}

#endif

template <int KP>
__global__ void __launch_bounds__(MN_CURVE_GROUPS, 1)
mn_curve_back_kernel(const __grid_constant__ mn_curvature_args p, mn_curve_work w,
                     mn_curve_cut cut) {
#if MN_HAS_WGMMA
    extern __shared__ __align__(1024) unsigned char curve_bytes[];
    mn_curve_back_smem<KP> &smem = *(mn_curve_back_smem<KP> *)curve_bytes;
    const mn_curve_place at = mn_curve_place_of(p.call, cut);
    if (!at.s.there) return;
    const int64_t K = p.call.K;
    const float *sums = at.s.last ? NULL : mn_curve_sums_for(w.back, p.call, at, at.s.slot + 1);
    if (threadIdx.x == 0) {
        for (int i = 0; i < mn_curve_back_smem<KP>::stages; i++) {
            mn_mbarrier_init(&smem.there[i], MN_WARPGROUP);
            mn_mbarrier_init(&smem.gone[i], MN_WARPGROUP);
        }
        for (int i = 0; i < 2; i++) {
            mn_mbarrier_init(&smem.scored[i], MN_WARPGROUP);
            mn_mbarrier_init(&smem.used[i], 4);
            mn_mbarrier_init(&smem.read[i], MN_WARPGROUP);
            mn_mbarrier_init(&smem.left[i], MN_WARPGROUP);
        }
    }
    __syncthreads();
    if (threadIdx.x < MN_WARPGROUP) {
        mn_setmaxnreg_dec<80>();
        mn_curve_back_copy<KP>(smem, p, w, at, cut.n_parts,
                               sums ? sums + K * K : mn_row<float>(p.cot.ks, at.s.n, 0, at.h));
    } else if (threadIdx.x < 2 * MN_WARPGROUP) {
        mn_setmaxnreg_dec<120>();
        mn_curve_back_scores<KP>(smem, (at.s.rows + 63) / 64);
    } else if (threadIdx.x < 3 * MN_WARPGROUP) {
        mn_setmaxnreg_inc<224>();
        mn_curve_back_read<KP>(smem, p, at, sums);
    } else {
        mn_setmaxnreg_dec<80>();
        mn_curve_back_store<KP>(smem, p, at);
    }
#endif
}

template <int KP>
inline int mn_curve_back(const mn_curvature_args *p, const mn_curve_work &w,
                         const mn_curve_cut &cut, cudaStream_t on) {
    return mn_curve_start(mn_curve_back_kernel<KP>, MN_CURVE_GROUPS,
                          sizeof(mn_curve_back_smem<KP>), p->call, cut, on, *p, w);
}

/* the gradients of q and gamma on Hopper, a scan in the order of time: forward with the cotangent
 * x in place of q.
 *
 *   Y' = R X' + K' tril(X K' - m)' - s m'     dq = x - gamma / n y     R <- R + K' K
 *
 * Rows 64 and 65 of a tile of keys are s, rounded, and what that leaves, so that scores bring s.x
 * with them. Nothing may be lost of y, as dgamma is -y.q / n: what bf16 rounds away of R and of the
 * scores is multiplied too. The means of q are made besides. */

template <int KP>
struct alignas(1024) mn_curve_queries_stage {
    unsigned char k[KP / 64 * MN_CURVE_ROWS * 128];
    unsigned char x[KP / 64 * MN_CURVE_SQUARE];
    unsigned char q[KP / 64 * MN_CURVE_SQUARE];
    float s[KP], factor[MN_CURVE_CHUNK], each[MN_CURVE_CHUNK];    // factor: -gamma / n
    float mean[MN_CURVE_CHUNK];                                   // of x
};

template <int KP>
struct mn_curve_queries_smem {
    static constexpr int stages = 3, reads = 1;
    mn_curve_queries_stage<KP> stage[stages];
    alignas(1024) unsigned char P[2][MN_CURVE_SQUARE];
    alignas(1024) unsigned char P_low[2][MN_CURVE_SQUARE];
    mn_curve_read Y[reads];
    float part[2][4][KP];
    uint64_t there[stages], gone[stages], scored[2], used[2], read[reads], left[reads];
};

#if MN_HAS_WGMMA

/* ---- the group that copies ------------------------------------------------------------------- */

template <int KP>
__device__ inline void mn_curve_queries_load(mn_curve_queries_stage<KP> &to,
                                            const mn_curvature_args &p, const mn_curve_place &at,
                                            int64_t t, int count) {
    const int i = threadIdx.x % MN_WARPGROUP, K = (int)p.call.K;
    const int64_t b = at.s.span.b, from = at.s.span.t0 + t;
    mn_cp_async_tile<MN_CURVE_CHUNK, KP, MN_CURVE_ROWS>(mn_smem_addr(to.k),
                                                    mn_row<mn_bf16>(p.k, b, from, at.h),
                                                    p.k.stride[1], count, K, i);
    const mn_in &x = p.cot.qt;
    mn_cp_async_tile<MN_CURVE_CHUNK, KP>(mn_smem_addr(to.x), mn_row<mn_bf16>(x, b, from, at.h),
                                     x.stride[1], x.data ? count : 0, K, i);
    mn_cp_async_tile<MN_CURVE_CHUNK, KP>(mn_smem_addr(to.q), mn_row<mn_bf16>(p.q, b, from, at.h),
                                     p.q.stride[1], count, K, i);
}

/* The sums of a tile's columns over the rows that this thread copied, then over all: `part` has
 * room for four warps. Returns that of column i. */
template <int KP, int SMEM_TILE>
__device__ inline float mn_curve_column(const unsigned char *tile, float (&part)[4][KP]) {
    constexpr int pieces = KP / 8, step = MN_WARPGROUP / pieces;
    const int i = threadIdx.x % MN_WARPGROUP, piece = i % pieces * 8;
    float sum[8] = {};
#pragma unroll
    for (int row = 0; row < MN_CURVE_CHUNK; row += step) {
        const uint4 pack = *(const uint4 *)(tile
                                            + mn_swizzle_byte(SMEM_TILE, row + i / pieces, piece));
        const uint32_t pair[4] = { pack.x, pack.y, pack.z, pack.w };
#pragma unroll
        for (int j = 0; j < 8; j++) {
            sum[j] += j % 2 ? mn_curve_high(pair[j / 2]) : mn_curve_low(pair[j / 2]);
        }
    }
#pragma unroll
    for (int j = 0; j < 8; j++) {
        if (pieces == 8) sum[j] += __shfl_xor_sync(0xffffffffu, sum[j], 8);
        sum[j] += __shfl_xor_sync(0xffffffffu, sum[j], 16);
    }
    if (i % 32 < pieces) {
        float4 *to = (float4 *)&part[i / 32][piece];
        to[0] = make_float4(sum[0], sum[1], sum[2], sum[3]);
        to[1] = make_float4(sum[4], sum[5], sum[6], sum[7]);
    }
    mn_curve_group_sync(1);
    if (i >= KP) return 0.0f;
    return (part[0][i] + part[1][i]) + (part[2][i] + part[3][i]);
}

/* Tiles of all chunks, one ahead of what is shown to the others, and s in front of each. */
template <int KP>
__device__ inline void mn_curve_queries_copy(mn_curve_queries_smem<KP> &smem,
                                           const mn_curvature_args &p, const mn_curve_place &at,
                                           const float *vector) {
    constexpr int stages = mn_curve_queries_smem<KP>::stages;
    const int i = threadIdx.x % MN_WARPGROUP, n_chunks = (at.s.rows + 63) / 64;
    const int64_t seen = (int64_t)mn_curve_before(p, at.s.n);
    float s = i < p.call.K ? mn_get(vector, i) : 0.0f;
    mn_bf16 gamma = __float2bfloat16_rn(0.0f);    // as it comes, so that nobody waits for it
    for (int n = i; n < stages * (KP / 64) * 48; n += MN_WARPGROUP) {    // the rows behind s
        unsigned char *k = smem.stage[n / 48 / (KP / 64)].k;
        const int smem_tile = n / 48 % (KP / 64);
        *(uint4 *)(k + (smem_tile * MN_CURVE_ROWS + 66) * 128 + n % 48 * 16) =
            make_uint4(0, 0, 0, 0);
    }
    for (int c = 0; c <= n_chunks; c++) {
        const mn_bf16 gamma_now = gamma;
        if (c < n_chunks) {
            const int64_t t = at.s.first + c * 64;
            const int count = min(64, at.s.rows - c * 64);
            mn_mbarrier_wait(&smem.gone[c % stages], (c / stages & 1) ^ 1);
            mn_curve_queries_load<KP>(smem.stage[c % stages], p, at, t, count);
            if (i < count) {
                gamma = *mn_row<mn_bf16>(p.gamma, at.s.span.b, at.s.span.t0 + t + i, at.h);
            }
        }
        mn_curve_copies_end();
        if (c == 0) continue;
        mn_curve_queries_stage<KP> &now = smem.stage[(c - 1) % stages];
        mn_curve_copies_wait<1>();
        if (i < KP) {
            const mn_bf16 rounded = __float2bfloat16_rn(s);
            now.s[i] = s;
            *(mn_bf16 *)(now.k + mn_swizzle_byte(MN_CURVE_ROWS, 64, i)) = rounded;
            *(mn_bf16 *)(now.k + mn_swizzle_byte(MN_CURVE_ROWS, 65, i)) =
                __float2bfloat16_rn(s - __bfloat162float(rounded));
        }
        if (i < MN_CURVE_CHUNK) {
            const float each = 1.0f / (float)(seen + at.s.first + (c - 1) * 64 + i + 1);
            now.each[i] = each;
            now.factor[i] = -mn_float(gamma_now) * each;
        }
        mn_mbarrier_arrive(&smem.there[(c - 1) % stages]);
        s += mn_curve_column<KP, MN_CURVE_ROWS>(now.k, smem.part[c % 2]);
    }
}

/* ---- the group that makes scores ------------------------------------------------------------- */

template <int KP>
__device__ inline void mn_curve_queries_scores(mn_curve_queries_smem<KP> &smem,
                                             const mn_curvature_args &p, const mn_curve_work &w,
                                             const mn_curve_place &at) {
    constexpr int stages = mn_curve_queries_smem<KP>::stages;
    const int thread = threadIdx.x % MN_WARPGROUP, row = thread / 32 * 16 + thread % 32 / 4;
    const int n_chunks = (at.s.rows + 63) / 64;
    for (int c = 0; c < n_chunks; c++) {
        mn_curve_queries_stage<KP> &in = smem.stage[c % stages];
        float d[36], of_q[36], mean[2], mean_q[2];
        mn_mbarrier_wait(&smem.there[c % stages], c / stages & 1);
        mn_fence_proxy_async();
        mn_wgmma_fence();
        mn_curve_scores_start<KP>(d, mn_smem_addr(in.x), mn_smem_addr(in.k));
        mn_wgmma_commit();
        mn_curve_scores_start<KP>(of_q, mn_smem_addr(in.q), mn_smem_addr(in.k));
        mn_wgmma_commit();
        mn_wgmma_wait<1>();
        const float each[2] = { in.each[row], in.each[row + 8] };
        mn_curve_means(mean, d, each);
        mn_mbarrier_wait(&smem.used[c % 2], (c / 2 & 1) ^ 1);
        mn_curve_put_square(smem.P[c % 2], smem.P_low[c % 2], d, mean);
        if (thread % 4 == 0) {
            in.mean[row] = mean[0];
            in.mean[row + 8] = mean[1];
        }
        mn_mbarrier_arrive(&smem.scored[c % 2]);
        mn_wgmma_wait<0>();
        mn_curve_means(mean_q, of_q, each);
        const int64_t first = mn_curve_row_of(p.call, at, at.s.first + c * 64 + row);
#pragma unroll
        for (int r = 0; r < 2; r++) {
            if (thread % 4 || at.slice || c * 64 + row + 8 * r >= at.s.rows) continue;
            *(float2 *)(w.means + 2 * (first + 8 * r)) = make_float2(mean_q[r], mean[r]);
        }
        mn_mbarrier_arrive_warp(&smem.gone[c % stages]);
    }
}

/* ---- the group that has R -------------------------------------------------------------------- */

template <int KP>
__device__ inline void mn_curve_queries_read(mn_curve_queries_smem<KP> &smem,
                                           const mn_curvature_args &p, const mn_curve_place &at,
                                           const float *sums) {
    constexpr int stages = mn_curve_queries_smem<KP>::stages;
    constexpr int reads = mn_curve_queries_smem<KP>::reads;
    const int n_chunks = (at.s.rows + 63) / 64, warp = threadIdx.x / 32 % 4;
    float R[KP / 2], Y[32];
    mn_curve_load(R, mn_row<float>(p.kk0, at.s.n, 0, at.h), sums, 0.5f, p.call.K, at.column0);
    for (int c = 0; c < n_chunks; c++) {
        mn_curve_queries_stage<KP> &in = smem.stage[c % stages];
        uint32_t a[KP / 4], low[KP / 4], k[16];
#pragma unroll
        for (int i = 0; i < 32; i++) Y[i] = 0.0f;
        mn_curve_pack(a, R);
        mn_curve_pack_rest(low, R);
        mn_mbarrier_wait(&smem.there[c % stages], c / stages & 1);
        mn_curve_left<MN_CURVE_ROWS>(k, in.k, at.column0 + warp * 16);
        mn_mbarrier_wait(&smem.scored[c % 2], c / 2 & 1);
        mn_fence_proxy_async();
        mn_wgmma_fence();
        mn_curve_rows<KP, 64>(Y, a, mn_smem_addr(in.x));
        mn_curve_rows<KP, 64>(Y, low, mn_smem_addr(in.x));
        mn_curve_square(Y, k, mn_smem_addr(smem.P[c % 2]));
        mn_curve_square(Y, k, mn_smem_addr(smem.P_low[c % 2]));
        mn_wgmma_commit();
        mn_curve_depth<MN_CURVE_ROWS>(R, k, mn_smem_addr(in.k));
        mn_wgmma_commit();
        mn_mbarrier_wait(&smem.left[c % reads], (c / reads & 1) ^ 1);
        mn_wgmma_wait<1>();
        smem.Y[c % reads].put(Y);
        mn_mbarrier_arrive(&smem.read[c % reads]);
        mn_wgmma_wait<0>();
        mn_mbarrier_arrive_warp(&smem.gone[c % stages]);
        mn_mbarrier_arrive_warp(&smem.used[c % 2]);
    }
}

/* ---- the group that stores ------------------------------------------------------------------- */

/* Eight columns of a token: out = x + factor (y - m s), and the slice's part of y.q. */
template <int KP>
__device__ inline void mn_curve_queries_result(const float (&y)[8], const float (&s)[8],
                                             const mn_curve_queries_stage<KP> &in, mn_bf16 *to,
                                             float *part, int column, int token) {
    const float m = in.mean[token], f = in.factor[token];
    const uint32_t byte = mn_swizzle_byte(64, token, column);
    float x[8], q[8], product = 0.0f;
    mn_curve_unpack(x, *(const uint4 *)(in.x + byte));
    mn_curve_unpack(q, *(const uint4 *)(in.q + byte));
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const float centred = fmaf(-m, s[i], y[i]);
        x[i] = fmaf(f, centred, x[i]);
        product = fmaf(q[i], centred, product);
    }
    if (to) *(uint4 *)to = mn_curve_pack_vec16(x);
#pragma unroll
    for (int by = 1; by < 8; by *= 2) product += __shfl_xor_sync(0xffffffffu, product, by);
    if (part && threadIdx.x % 8 == 0) *part = product;
}

template <int KP>
__device__ inline void mn_curve_queries_store(mn_curve_queries_smem<KP> &smem,
                                            const mn_curvature_args &p, const mn_curve_work &w,
                                            const mn_curve_place &at) {
    constexpr int stages = mn_curve_queries_smem<KP>::stages;
    constexpr int reads = mn_curve_queries_smem<KP>::reads;
    const int i = threadIdx.x % MN_WARPGROUP, n_chunks = (at.s.rows + 63) / 64;
    const int vec16 = i % 8, column = at.column0 + 8 * vec16;
    const mn_out &out = p.grad.q;
    const int64_t rows = p.call.B * p.call.T * p.call.H;
    for (int c = 0; c < n_chunks; c++) {
        const mn_curve_queries_stage<KP> &in = smem.stage[c % stages];
        const int64_t t = at.s.first + c * 64;
        mn_bf16 *to = mn_row<mn_bf16>(out, at.s.span.b, at.s.span.t0 + t, at.h);
        float *parts = w.parts + at.slice * rows + mn_curve_row_of(p.call, at, t);
        float s[8];
        mn_mbarrier_wait(&smem.read[c % reads], c / reads & 1);
#pragma unroll
        for (int j = 0; j < 8; j++) s[j] = in.s[column + j];
#pragma unroll
        for (int token = i / 8; token < MN_CURVE_CHUNK; token += MN_WARPGROUP / 8) {
            const bool inside = c * 64 + token < at.s.rows;
            float y[8];
            smem.Y[c % reads].get(y, vec16, token);
            mn_curve_queries_result<KP>(
                y, s, in,
                to && inside && column < p.call.K ? to + token * out.stride[1] + column : NULL,
                inside ? parts + token : NULL, column, token);
        }
        mn_mbarrier_arrive(&smem.gone[c % stages]);
        mn_mbarrier_arrive(&smem.left[c % reads]);
    }
}

#endif

template <int KP>
__global__ void __launch_bounds__(MN_CURVE_GROUPS, 1)
mn_curve_queries_kernel(const __grid_constant__ mn_curvature_args p, mn_curve_work w,
                      mn_curve_cut cut) {
#if MN_HAS_WGMMA
    extern __shared__ __align__(1024) unsigned char curve_bytes[];
    mn_curve_queries_smem<KP> &smem = *(mn_curve_queries_smem<KP> *)curve_bytes;
    const mn_curve_place at = mn_curve_place_of(p.call, cut);
    if (!at.s.there) return;
    const int64_t K = p.call.K;
    const float *sums =
        at.s.first > 0 ? mn_curve_sums_for(w.there, p.call, at, at.s.slot - 1) : NULL;
    if (threadIdx.x == 0) {
        for (int i = 0; i < mn_curve_queries_smem<KP>::stages; i++) {
            mn_mbarrier_init(&smem.there[i], MN_WARPGROUP);
            mn_mbarrier_init(&smem.gone[i], MN_WARPGROUP + 8);    // who stores, products
        }
        for (int i = 0; i < 2; i++) {
            mn_mbarrier_init(&smem.scored[i], MN_WARPGROUP);
            mn_mbarrier_init(&smem.used[i], 4);
        }
        for (int i = 0; i < mn_curve_queries_smem<KP>::reads; i++) {
            mn_mbarrier_init(&smem.read[i], MN_WARPGROUP);
            mn_mbarrier_init(&smem.left[i], MN_WARPGROUP);
        }
    }
    __syncthreads();
    if (threadIdx.x < MN_WARPGROUP) {
        mn_setmaxnreg_dec<80>();
        mn_curve_queries_copy<KP>(
            smem, p, at, sums ? sums + K * K : mn_row<float>(p.ks0, at.s.n, 0, at.h));
    } else if (threadIdx.x < 2 * MN_WARPGROUP) {
        mn_setmaxnreg_dec<120>();
        mn_curve_queries_scores<KP>(smem, p, w, at);
    } else if (threadIdx.x < 3 * MN_WARPGROUP) {
        mn_setmaxnreg_inc<224>();
        mn_curve_queries_read<KP>(smem, p, at, sums);
    } else {
        mn_setmaxnreg_dec<80>();
        mn_curve_queries_store<KP>(smem, p, w, at);
    }
#endif
}

template <int KP>
inline int mn_curve_queries(const mn_curvature_args *p, const mn_curve_work &w,
                          const mn_curve_cut &cut, cudaStream_t on) {
    return mn_curve_start(mn_curve_queries_kernel<KP>, MN_CURVE_GROUPS,
                          sizeof(mn_curve_queries_smem<KP>), p->call, cut, on, *p, w);
}

/* ---- there ----------------------------------------------------------------------------------- */

template <typename T, int KP>
struct queries_smem {
    using z = mn_curve_sizes<T, KP>;
    alignas(16) T q[z::chunk * z::pitch];
    alignas(16) T k[z::chunk * z::pitch];
    alignas(16) T d[z::chunk * z::pitch];
    alignas(16) T R[KP * MN_CURVE_PITCH];
    alignas(16) T P[z::chunk * z::score_pitch];
    /* What bf16 rounds away of R and P: y.q, which dgamma is, would show it. */
    static constexpr bool is_narrow = sizeof(T) == 2;
    alignas(16) T R_low[is_narrow ? KP * MN_CURVE_PITCH : 1];
    alignas(16) T P_low[is_narrow ? z::chunk * z::score_pitch : 1];
    float s[KP], within[2][z::chunk], before[2][z::chunk], mean[2][z::chunk], each[z::chunk];
    float gamma[z::chunk], part[z::across][z::chunk];
};

/* dq, and this warp's part of y.q for each of its rows. */
template <typename T, int KP>
__device__ inline void query_back(queries_smem<T, KP> &smem, const mn_curvature_args &p,
                                  const mn_curve_place &at, int64_t t, int count) {
    using z = mn_curve_sizes<T, KP>;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int row0 = warp % z::down * 16, column0 = warp / z::down * z::columns;
    mn_tile_acc<z::columns / 8> Y;
    float part[2] = { 0.0f, 0.0f };
    Y.clear();
    mn_curve_apply<T, KP>(Y, smem.d, smem.R, smem.P, smem.k, at.column0);
    if (smem.is_narrow) {
        mn_curve_apply<T, KP>(Y, smem.d, smem.R_low, smem.P_low, smem.k, at.column0);
    }
    Y.pairs([&](const float *y, int row, int column) {
        const int token = row0 + row, j = at.column0 + column0 + column;
        const float2 q = mn_load2(smem.q + token * z::pitch + j);
        const float2 d = mn_load2(smem.d + token * z::pitch + j);
        const float left = fmaf(-smem.mean[1][token], smem.s[j], y[0]);
        const float right = fmaf(-smem.mean[1][token], smem.s[j + 1], y[1]);
        float &sum = part[row < 8 ? 0 : 1];
        sum = fmaf(q.y, right, fmaf(q.x, left, sum));
        T *dq = mn_row<T>(p.grad.q, at.s.span.b, at.s.span.t0 + t + token, at.h);
        if (!dq || token >= count) return;
        const float weight = -smem.gamma[token] * smem.each[token];
        mn_row_store2(dq, j, p.call.K, fmaf(weight, left, d.x), fmaf(weight, right, d.y));
    });
#pragma unroll
    for (int i = 0; i < 2; i++) {
        part[i] += __shfl_xor_sync(0xffffffffu, part[i], 1);
        part[i] += __shfl_xor_sync(0xffffffffu, part[i], 2);
        if (lane % 4 == 0) smem.part[warp / z::down][row0 + lane / 4 + 8 * i] = part[i];
    }
}

/* The means of a chunk's tokens and the scores of d. */
template <typename T, int KP>
__device__ inline void queries_scores(queries_smem<T, KP> &smem) {
    using z = mn_curve_sizes<T, KP>;
    const int warp = threadIdx.x / 32;
    mn_tile_acc<z::chunk / 8> P;
    if (warp < z::down) mn_curve_scores<T, KP>(P, smem.within[1], smem.d, smem.k, warp * 16);
    else if (warp < 2 * z::down) {
        mn_curve_scores<T, KP>(P, smem.within[0], smem.q, smem.k, (warp - z::down) * 16);
    }
    mn_curve_dots<T, KP>(smem.before[0], smem.s, smem.q, warp, MN_CURVE_WARPS);
    mn_curve_dots<T, KP>(smem.before[1], smem.s, smem.d, warp, MN_CURVE_WARPS);
    __syncthreads();
    for (int i = threadIdx.x; i < 2 * z::chunk; i += MN_CURVE_THREADS) {
        const int which = i / z::chunk, t = i % z::chunk;
        smem.mean[which][t] = (smem.within[which][t] + smem.before[which][t]) * smem.each[t];
    }
    __syncthreads();
    if (warp < z::down) {
        mn_curve_put_scores<T, KP>(smem.P, P, smem.mean[1], warp * 16,
                                   smem.is_narrow ? smem.P_low : NULL);
    }
    __syncthreads();
}

template <typename T, int KP>
__global__ void __launch_bounds__(MN_CURVE_THREADS, KP == 256 ? 1 : 2)
curvature_queries_kernel(const __grid_constant__ mn_curvature_args p, mn_curve_work w,
                      mn_curve_cut cut) {
    using z = mn_curve_sizes<T, KP>;
    extern __shared__ __align__(128) unsigned char bytes[];
    queries_smem<T, KP> &smem = *(queries_smem<T, KP> *)bytes;
    const mn_curve_place at = mn_curve_place_of(p.call, cut);
    if (!at.s.there) return;
    const int64_t K = p.call.K, h = at.h, rows = p.call.B * p.call.T * p.call.H;
    const int64_t b = at.s.span.b, t0 = at.s.span.t0;
    const double seen = mn_curve_before(p, at.s.n);
    const float *sums =
        at.s.first > 0 ? mn_curve_sums_for(w.there, p.call, at, at.s.slot - 1) : NULL;
    const float *vector = sums ? sums + K * K : mn_row<float>(p.ks0, at.s.n, 0, h);
    mn_curve_matrix<T, KP> R;
    R.load(mn_row<float>(p.kk0, at.s.n, 0, h), sums, 0.5f, K, at.column0);
    for (int i = threadIdx.x; i < KP; i += MN_CURVE_THREADS) {
        smem.s[i] = i < K ? mn_get(vector, i) : 0.0f;
    }
    for (int start = 0; start < at.s.rows; start += z::chunk) {
        const int count = min(z::chunk, at.s.rows - start);
        const int64_t t = at.s.first + start;
        mn_smem_tile_load(smem.q, z::pitch, z::chunk, KP, p.q, at.s.span, h, t, count, K,
                          cut.packs);
        mn_smem_tile_load(smem.k, z::pitch, z::chunk, KP, p.k, at.s.span, h, t, count, K,
                          cut.packs);
        mn_smem_tile_load(smem.d, z::pitch, z::chunk, KP, p.cot.qt, at.s.span, h, t, count, K,
                       cut.packs);
        const int next = min(z::chunk, at.s.rows - start - z::chunk);
        mn_smem_tile_prefetch<T>(p.q, at.s.span, h, t + z::chunk, next, K);
        mn_smem_tile_prefetch<T>(p.k, at.s.span, h, t + z::chunk, next, K);
        mn_smem_tile_prefetch<T>(p.cot.qt, at.s.span, h, t + z::chunk, next, K);
        R.put(smem.R);
        if (smem.is_narrow) R.put_rest(smem.R_low);
        if (threadIdx.x < z::chunk) {
            const int i = threadIdx.x;
            smem.each[i] = (float)(1.0 / (seen + (double)(t + i + 1)));
            smem.gamma[i] = i < count ? mn_float(*mn_row<T>(p.gamma, b, t0 + t + i, h)) : 0.0f;
        }
        __syncthreads();
        queries_scores<T, KP>(smem);
        query_back<T, KP>(smem, p, at, t, count);
        R.add(smem.k, smem.k + at.column0);
        __syncthreads();
        if (threadIdx.x < count) {
            const int i = threadIdx.x;
            const int64_t row = mn_curve_row_of(p.call, at, t + i);
            float part = 0.0f;
            for (int a = 0; a < z::across; a++) part += smem.part[a][i];
            w.parts[at.slice * rows + row] = part;
            if (at.slice == 0) w.means[2 * row] = smem.mean[0][i];
            if (at.slice == 0) w.means[2 * row + 1] = smem.mean[1][i];
        }
        for (int i = threadIdx.x; i < KP; i += MN_CURVE_THREADS) {
            smem.s[i] += mn_curve_column_sum(smem.k, z::pitch, z::chunk, i);
        }
        __syncthreads();
    }
}

template <typename T, int KP>
struct back_smem {
    using z = mn_curve_sizes<T, KP>;
    alignas(16) T q[z::chunk * z::pitch];
    alignas(16) T k[z::chunk * z::pitch];
    alignas(16) T z_[z::chunk * z::pitch];
    alignas(16) T G[KP * MN_CURVE_PITCH];
    alignas(16) T P[2][z::chunk * z::score_pitch];
    float e[MN_CURVE_SLICE], rows[z::chunk], mean[2][z::chunk], weight[z::chunk];
};

/* dK of the warp's tile. */
template <typename T, int KP>
__device__ inline void key_back(back_smem<T, KP> &smem, const mn_curvature_args &p,
                                const mn_curve_place &at, int64_t t, int count) {
    using z = mn_curve_sizes<T, KP>;
    const int warp = threadIdx.x / 32, row0 = warp % z::down * 16;
    const int column0 = warp / z::down * z::columns;
    mn_tile_acc<z::columns / 8> dk;
    dk.clear();
    mn_curve_product<MN_NO_TRANS, MN_NO_TRANS>(dk, smem.k + row0 * z::pitch, z::pitch,
                                               smem.G + column0,
                                         MN_CURVE_PITCH, KP);
    const int first = row0 * z::score_pitch + row0;    // of tokens before row0 there is nothing
    const int from = row0 * z::pitch + at.column0 + column0;
    mn_curve_product_later(dk, smem.P[0] + first, z::score_pitch, smem.z_ + from, z::pitch,
                           z::chunk - row0);
    mn_curve_product_later(dk, smem.P[1] + first, z::score_pitch, smem.q + from, z::pitch,
                           z::chunk - row0);
    dk.pairs([&](const float *x, int row, int column) {
        const int token = row0 + row;
        const int64_t j = at.column0 + column0 + column, K = p.call.K;
        T *to = mn_row<T>(p.grad.k, at.s.span.b, at.s.span.t0 + t + token, at.h);
        if (!to || token >= count) return;
        float left = x[0] + smem.e[column0 + column], right = x[1] + smem.e[column0 + column + 1];
        if (p.adds_k && j < K) left += mn_float(to[j]);
        if (p.adds_k && j + 1 < K) right += mn_float(to[j + 1]);
        mn_row_store2(to, j, K, left, right);
    });
}

template <typename T, int KP>
__global__ void __launch_bounds__(MN_CURVE_THREADS, KP == 256 ? 1 : 2)
curvature_back_kernel(const __grid_constant__ mn_curvature_args p, mn_curve_work w,
                      mn_curve_cut cut) {
    using z = mn_curve_sizes<T, KP>;
    extern __shared__ __align__(128) unsigned char bytes[];
    back_smem<T, KP> &smem = *(back_smem<T, KP> *)bytes;
    const mn_curve_place at = mn_curve_place_of(p.call, cut);
    if (!at.s.there) return;
    const int64_t K = p.call.K, h = at.h, rows = p.call.B * p.call.T * p.call.H;
    const int64_t b = at.s.span.b, t0 = at.s.span.t0;
    const int warp = threadIdx.x / 32;
    const double seen = mn_curve_before(p, at.s.n);
    const float *sums = at.s.last ? NULL : mn_curve_sums_for(w.back, p.call, at, at.s.slot + 1);
    const float *vector = sums ? sums + K * K : mn_row<float>(p.cot.ks, at.s.n, 0, h);
    const int64_t own = at.column0 + threadIdx.x;
    mn_curve_matrix<T, KP> G;
    G.load(mn_row<float>(p.cot.kk, at.s.n, 0, h), sums, 1.0f, K, at.column0);
    if (threadIdx.x < MN_CURVE_SLICE) smem.e[threadIdx.x] = own < K ? mn_get(vector, own) : 0.0f;
    const int n_chunks = (at.s.rows + z::chunk - 1) / z::chunk;
    for (int c = n_chunks - 1; c >= 0; c--) {
        const int start = c * z::chunk, count = min(z::chunk, at.s.rows - start);
        const int64_t t = at.s.first + start;
        mn_smem_tile_load(smem.q, z::pitch, z::chunk, KP, p.q, at.s.span, h, t, count, K,
                          cut.packs);
        mn_smem_tile_load(smem.k, z::pitch, z::chunk, KP, p.k, at.s.span, h, t, count, K,
                          cut.packs);
        mn_smem_tile_load(smem.z_, z::pitch, z::chunk, KP, p.cot.qt, at.s.span, h, t, count, K,
                       cut.packs);
        G.put(smem.G);
        if (threadIdx.x < z::chunk) {
            const int i = threadIdx.x;
            float gamma = 0.0f, mean = 0.0f, mean_d = 0.0f;
            const float each = (float)(1.0 / (seen + (double)(t + i + 1)));
            if (i < count) {
                const int64_t row = mn_curve_row_of(p.call, at, t + i);
                gamma = mn_float(*mn_row<T>(p.gamma, b, t0 + t + i, h));
                mean = w.means[2 * row], mean_d = w.means[2 * row + 1];
                T *dgamma = mn_row<T>(p.grad.gamma, b, t0 + t + i, h);
                float part = 0.0f;
                for (int a = 0; a < cut.n_parts; a++) part += w.parts[a * rows + row];
                if (dgamma && at.slice == 0) mn_put(dgamma, -part * each);
            }
            smem.mean[0][i] = mean, smem.mean[1][i] = -gamma * each * mean_d;
            smem.weight[i] = mn_curve_weight(gamma, seen + (double)(t + i));
        }
        const int before = start > 0 ? z::chunk : 0;    // tokens of the chunk that comes next
        mn_smem_tile_prefetch<T>(p.q, at.s.span, h, t - before, before, K);
        mn_smem_tile_prefetch<T>(p.k, at.s.span, h, t - before, before, K);
        mn_smem_tile_prefetch<T>(p.cot.qt, at.s.span, h, t - before, before, K);
        __syncthreads();
        mn_curve_weigh<T, KP>(smem.z_, smem.weight, count);
        __syncthreads();
        mn_tile_acc<z::chunk / 8> P;
        if (warp < z::down) {
            mn_curve_scores<T, KP>(P, smem.rows, smem.q, smem.k, warp * 16);
            mn_curve_put_scores<T, KP>(smem.P[0], P, smem.mean[0], warp * 16);
        } else if (warp < 2 * z::down) {
            const int row0 = (warp - z::down) * 16;
            P.clear();
            mn_curve_product<MN_NO_TRANS, MN_TRANS>(P, smem.z_ + row0 * z::pitch, z::pitch,
                                                      smem.k,
                                                  z::pitch, KP);
            mn_curve_put_scores<T, KP>(smem.P[1], P, smem.mean[1], row0);
        }
        __syncthreads();
        key_back<T, KP>(smem, p, at, t, count);
        G.add(smem.z_, smem.q + at.column0);
        G.add(smem.q, smem.z_ + at.column0);
        __syncthreads();
        if (threadIdx.x < MN_CURVE_SLICE) {
            smem.e[threadIdx.x] = mn_curve_weighted(smem.e[threadIdx.x], smem.z_ + own,
                                                    smem.q + own, z::pitch, smem.mean[0],
                                                    smem.mean[1], count);
        }
        __syncthreads();
    }
    if (at.s.first > 0) return;
    G.store(mn_row<float>(p.grad.kk0, at.s.n, 0, h), 0.5f, K, at.column0);
    float *ds = mn_row<float>(p.grad.ks0, at.s.n, 0, h);
    __syncthreads();
    if (ds && threadIdx.x < MN_CURVE_SLICE && own < K) ds[own] = smem.e[threadIdx.x];
}

/* ---- launches -------------------------------------------------------------------------------- */

enum { MOST_PARTS = 4 };    // of y.q of a token

MN_CUDA_PLAN(curvature_backward) {
    const mn_call *c = (const mn_call *)args;
    size_t states, tokens, all;
    return mn_curve_states_size(&states, c) && mn_curve_tokens_size(&tokens, c) &&
           mn_mul_size(&tokens, tokens, 2 + MOST_PARTS) && mn_mul_size(&all, states, 2) &&
           mn_add_size(&all, all, tokens) && mn_mul_size(&plan->shared_bytes, all, sizeof(float));
}

template <typename T, int KP>
static int backward_of(const mn_curvature_args *p, const mn_curve_work &w, cudaStream_t on) {
    const mn_curve_cut cut = mn_curve_smem_tile_cut<T>(p);
    int code = mn_curve_add_up<T, KP, false>(p, w.there, NULL, cut, on);
    if (code != cudaSuccess) return code;
    code = mn_curve_start(curvature_queries_kernel<T, KP>, MN_CURVE_THREADS,
                          sizeof(queries_smem<T, KP>), p->call, cut, on, *p, w);
    if (code != cudaSuccess) return code;
    code = mn_curve_add_up<T, KP, true>(p, w.back, w.means, cut, on);
    if (code != cudaSuccess) return code;
    return mn_curve_start(curvature_back_kernel<T, KP>, MN_CURVE_THREADS, sizeof(back_smem<T, KP>),
                          p->call, cut, on, *p, w);
}

/* By tiles that TMA brings where it can (curvature_bwd_sm90.cu). */
template <int KP>
static int group_of(const mn_curvature_args *p, const mn_curve_work &w, cudaStream_t on) {
    const mn_curve_cut cut = mn_curve_group_cut(p);
    mn_curve_back_maps maps;
    const bool maps_there = mn_curve_back_map(&maps, p);
    int code = mn_curve_add_up<mn_bf16, KP, false>(p, w.there, NULL, cut, on);
    if (code != cudaSuccess) return code;
    code = maps_there ? mn_curve_back_queries(p, maps, w, cut, on)
                      : mn_curve_queries<KP>(p, w, cut, on);
    if (code != cudaSuccess) return code;
    code = mn_curve_add_up<mn_bf16, KP, true>(p, w.back, w.means, cut, on);
    if (code != cudaSuccess) return code;
    return maps_there ? mn_curve_back_keys(p, maps, w, cut, on)
                      : mn_curve_back<KP>(p, w, cut, on);
}

MN_CUDA_LAUNCH(curvature_backward) {
    const mn_curvature_args *p = (const mn_curvature_args *)args;
    const mn_call &c = p->call;
    const cudaStream_t on = (cudaStream_t)stream;
    size_t states, tokens;
    if (mn_curve_slots(c, MN_CURVE_SEGMENT) * c.H == 0) return cudaSuccess;
    if (c.K > MN_CURVE_WIDEST || !mn_curve_states_size(&states, &c) ||
        !mn_curve_tokens_size(&tokens, &c)) {
        return cudaErrorNotSupported;
    }
    float *at = (float *)shared;
    const mn_curve_work w = { at, at + states, at + 2 * states, at + 2 * states + 2 * tokens };
    if (mn_curve_group_serves(p)) {
        return c.K <= 64 ? group_of<64>(p, w, on) : group_of<128>(p, w, on);
    }
    int code;
    if (mn_curve_backward_sm80(&code, p, w, on)) return code;
    if (c.dtype == MN_BF16) MN_CURVE_BY_WIDTH(backward_of, mn_bf16, c.K, (p, w, on));
    MN_CURVE_BY_WIDTH(backward_of, float, c.K, (p, w, on));
}

}    // namespace mneme::curvature
