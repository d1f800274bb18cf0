/* curvature_bwd_keys_sm90.cuh - the walk of curvature against time on Hopper: the gradients of keys
 * and of the states. With d the cotangent, f = -gamma / n, m and md the means of q and d:
 *
 *   dK' = G K' + (fD)' tril(Q K' - m) + (fQ)' tril(D K' - md) + e
 *   G <- G + (fD)'Q + (fQ)'D      e <- e - sum of f (m d + md q) */
#ifndef MN_KERNELS_CUDA_CURVATURE_CURVATURE_BWD_KEYS_SM90_CUH
#define MN_KERNELS_CUDA_CURVATURE_CURVATURE_BWD_KEYS_SM90_CUH

#include "kernels/cuda/curvature/curvature_sm90.cuh"

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
        mn_copy_tile<MN_CURVE_CHUNK, KP>(
            mn_smem_address(tiles[n]), mn_row<mn_bf16>(x, at.s.span.b, at.s.span.t0 + t, at.h),
            x.stride[1], x.data ? count : 0, (int)p.call.K, threadIdx.x % MN_GROUP);
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
    constexpr int pieces = KP / 8, step = MN_GROUP / pieces;
    const int i = threadIdx.x % MN_GROUP, piece = i % pieces * 8;
    float sum[8] = {};
#pragma unroll 4
    for (int row = i / pieces; row < MN_CURVE_CHUNK; row += step) {
        const uint32_t byte = mn_tile_byte(64, row, piece);
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
__device__ inline void mn_curve_back_copy(mn_curve_back_smem<KP> &room,
                                          const mn_curvature_args &p, const mn_curve_work &w,
                                          const mn_curve_place &at, int n_parts,
                                          const float *vector) {
    constexpr int stages = mn_curve_back_smem<KP>::stages;
    const int i = threadIdx.x % MN_GROUP, n_chunks = (at.s.rows + 63) / 64;
    const int64_t own = at.column0 + i;
    const int64_t seen = (int64_t)mn_curve_before(p, at.s.n);
    float e = i < MN_CURVE_SLICE && own < p.call.K ? mn_get(vector, own) : 0.0f;
    mn_curve_token token = {};
    for (int c = 0; c <= n_chunks; c++) {
        const mn_curve_token token_now = token;
        if (c < n_chunks) {
            const int start = (n_chunks - 1 - c) * 64, count = min(64, at.s.rows - start);
            const int64_t t = at.s.first + start;
            mn_mbarrier_wait(&room.gone[c % stages], (c / stages & 1) ^ 1);
            mn_curve_back_load<KP>(room.stage[c % stages], p, at, t, count);
            token = {};
            if (i < count) token = mn_curve_token_of(p, w, at, n_parts, t + i);
        }
        mn_curve_copies_end();
        if (c == 0) continue;
        mn_curve_back_stage<KP> &now = room.stage[(c - 1) % stages];
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
        mn_mbarrier_arrive(&room.there[(c - 1) % stages]);
        mn_curve_group_sync(1);
        e += mn_curve_weighted_column<KP>(now, at.slice, room.part[c % 2]);
    }
    float *first = at.s.first == 0 ? mn_row<float>(p.grad.ks0, at.s.n, 0, at.h) : NULL;
    if (first && i < MN_CURVE_SLICE && own < p.call.K) first[own] = e;
}

/* ---- the group that makes scores ------------------------------------------------------------- */

template <int KP>
__device__ inline void mn_curve_back_product(float (&d)[32], uint32_t a, uint32_t b) {
    const uint64_t at_a = mn_tile_seen(a, 16), at_b = mn_tile_seen(b, 16);
#pragma unroll
    for (int k = 0; k < KP; k += 16) {
        const int at = k / 64 * MN_CURVE_SQUARE / 16 + k % 64 / 8;
        mn_product<0>(d, at_a + at, at_b + at, k > 0);
    }
    mn_products_end();
}

template <int KP>
__device__ inline void mn_curve_back_scores(mn_curve_back_smem<KP> &room, int n_chunks) {
    constexpr int stages = mn_curve_back_smem<KP>::stages;
    const int thread = threadIdx.x % MN_GROUP, row = thread / 32 * 16 + thread % 32 / 4;
    for (int c = 0; c < n_chunks; c++) {
        mn_curve_back_stage<KP> &in = room.stage[c % stages];
        float of_q[32], of_d[32];
        mn_mbarrier_wait(&room.there[c % stages], c / stages & 1);
        mn_fence_proxy_async();
        mn_products_start();
        mn_curve_back_product<KP>(of_q, mn_smem_address(in.q), mn_smem_address(in.k));
        mn_curve_back_product<KP>(of_d, mn_smem_address(in.d), mn_smem_address(in.k));
        mn_mbarrier_wait(&room.used[c % 2], (c / 2 & 1) ^ 1);
        mn_products_wait<1>();
        const float mean[2] = { in.mean[0][row], in.mean[0][row + 8] };
        mn_curve_put_square(room.P[c % 2][0], NULL, of_q, mean);
        mn_products_wait<0>();
        const float mean_d[2] = { in.mean[1][row], in.mean[1][row + 8] };
        mn_curve_put_square(room.P[c % 2][1], NULL, of_d, mean_d);
        mn_mbarrier_arrive(&room.scored[c % 2]);
    }
}

/* ---- the group that has G -------------------------------------------------------------------- */

/* A left operand's tokens times their factors. */
__device__ inline void mn_curve_weigh_tokens(uint32_t (&a)[16], const float *factor) {
    const int column = threadIdx.x % 4 * 2;
#pragma unroll
    for (int i = 0; i < 16; i++) {
        const float2 by = *(const float2 *)(factor + i / 2 * 8 + column);
        a[i] = mn_pair(by.x * mn_curve_low(a[i]), by.y * mn_curve_high(a[i]));
    }
}

/* d += a b over 64 columns of a square */
__device__ inline void mn_curve_transposed_square(float (&d)[32], const uint32_t (&a)[16],
                                              uint32_t b) {
    const uint64_t at = mn_tile_seen(b, MN_CURVE_SQUARE);
#pragma unroll
    for (int step = 0; step < 4; step++) mn_product<1>(d, a + 4 * step, at + step * 16 * 8, 1);
}

template <int KP>
__device__ inline void mn_curve_back_read(mn_curve_back_smem<KP> &room,
                                          const mn_curvature_args &p, const mn_curve_place &at,
                                          const float *sums) {
    constexpr int stages = mn_curve_back_smem<KP>::stages;
    const int n_chunks = (at.s.rows + 63) / 64, warp = threadIdx.x / 32 % 4;
    const int lane = threadIdx.x % 32, own = at.column0 + warp * 16;
    float G[KP / 2], Y[32];
    mn_curve_load(G, mn_row<float>(p.cot.kk, at.s.n, 0, at.h), sums, 1.0f, p.call.K, at.column0);
    for (int c = 0; c < n_chunks; c++) {
        mn_curve_back_stage<KP> &in = room.stage[c % stages];
        uint32_t a[KP / 4], d[16], q[16];
        mn_curve_pack(a, G);
        mn_mbarrier_wait(&room.there[c % stages], c / stages & 1);
        const float e[2] = { in.e[warp * 16 + lane / 4], in.e[warp * 16 + lane / 4 + 8] };
#pragma unroll
        for (int i = 0; i < 32; i++) Y[i] = e[i % 4 / 2];
        mn_fence_proxy_async();
        mn_products_start();
        mn_curve_rows<KP, 64>(Y, a, mn_smem_address(in.k));
        mn_products_end();
        mn_curve_left<64>(d, in.d, own);
        mn_curve_left<64>(q, in.q, own);
        mn_curve_weigh_tokens(d, in.factor);
        mn_curve_weigh_tokens(q, in.factor);
        mn_mbarrier_wait(&room.scored[c % 2], c / 2 & 1);
        mn_fence_proxy_async();
        mn_products_start();
        mn_curve_transposed_square(Y, d, mn_smem_address(room.P[c % 2][0]));
        mn_curve_transposed_square(Y, q, mn_smem_address(room.P[c % 2][1]));
        mn_products_end();
        mn_curve_depth<64>(G, d, mn_smem_address(in.q));
        mn_curve_depth<64>(G, q, mn_smem_address(in.d));
        mn_products_end();
        mn_mbarrier_wait(&room.left[c % 2], (c / 2 & 1) ^ 1);
        mn_products_wait<1>();
        room.Y[c % 2].put(Y);
        mn_mbarrier_arrive(&room.read[c % 2]);
        mn_products_wait<0>();
        mn_mbarrier_arrive(&room.gone[c % stages]);
        mn_mbarrier_arrive_warp(&room.used[c % 2]);
    }
    if (at.s.first > 0) return;
    mn_curve_store(mn_row<float>(p.grad.kk0, at.s.n, 0, at.h), G, 0.5f, p.call.K, at.column0);
}

/* ---- the group that stores ------------------------------------------------------------------- */

template <int KP>
__device__ inline void mn_curve_back_store(mn_curve_back_smem<KP> &room,
                                           const mn_curvature_args &p, const mn_curve_place &at) {
    const int i = threadIdx.x % MN_GROUP, n_chunks = (at.s.rows + 63) / 64;
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
        mn_mbarrier_wait(&room.read[c % 2], c / 2 & 1);
#pragma unroll
        for (int n = 0; n < 4; n++) {
            const int token = i / 8 + 16 * n;
            float y[8], x[8];
            if (!wanted || start + token >= at.s.rows) continue;
            room.Y[c % 2].get(y, vec16, token);
            mn_curve_unpack(x, before[n]);
#pragma unroll
            for (int j = 0; j < 8; j++) x[j] += y[j];
            *(uint4 *)(to + token * p.grad.k.stride[1] + column) = mn_curve_pack_vec16(x);
        }
        mn_mbarrier_arrive(&room.left[c % 2]);
    }
}

#endif

template <int KP>
__global__ void __launch_bounds__(MN_CURVE_GROUPS, 1)
mn_curve_back_kernel(const __grid_constant__ mn_curvature_args p, mn_curve_work w,
                     mn_curve_cut cut) {
#if MN_HAS_WGMMA
    extern __shared__ __align__(1024) unsigned char curve_bytes[];
    mn_curve_back_smem<KP> &room = *(mn_curve_back_smem<KP> *)curve_bytes;
    const mn_curve_place at = mn_curve_place_of(p.call, cut);
    if (!at.s.there) return;
    const int64_t K = p.call.K;
    const float *sums = at.s.last ? NULL : mn_curve_sums_for(w.back, p.call, at, at.s.slot + 1);
    if (threadIdx.x == 0) {
        for (int i = 0; i < mn_curve_back_smem<KP>::stages; i++) {
            mn_mbarrier_init(&room.there[i], MN_GROUP);
            mn_mbarrier_init(&room.gone[i], MN_GROUP);
        }
        for (int i = 0; i < 2; i++) {
            mn_mbarrier_init(&room.scored[i], MN_GROUP);
            mn_mbarrier_init(&room.used[i], 4);
            mn_mbarrier_init(&room.read[i], MN_GROUP);
            mn_mbarrier_init(&room.left[i], MN_GROUP);
        }
    }
    __syncthreads();
    if (threadIdx.x < MN_GROUP) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 80;");
        mn_curve_back_copy<KP>(room, p, w, at, cut.n_parts,
                               sums ? sums + K * K : mn_row<float>(p.cot.ks, at.s.n, 0, at.h));
    } else if (threadIdx.x < 2 * MN_GROUP) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 120;");
        mn_curve_back_scores<KP>(room, (at.s.rows + 63) / 64);
    } else if (threadIdx.x < 3 * MN_GROUP) {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 224;");
        mn_curve_back_read<KP>(room, p, at, sums);
    } else {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 80;");
        mn_curve_back_store<KP>(room, p, at);
    }
#endif
}

template <int KP>
inline int mn_curve_back(const mn_curvature_args *p, const mn_curve_work &w,
                         const mn_curve_cut &cut, cudaStream_t on) {
    return mn_curve_start(mn_curve_back_kernel<KP>, MN_CURVE_GROUPS,
                          sizeof(mn_curve_back_smem<KP>), p->call, cut, on, *p, w);
}

#endif
