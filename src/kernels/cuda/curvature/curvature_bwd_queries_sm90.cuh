/* curvature_bwd_queries_sm90.cuh - the gradients of q and gamma on Hopper, a walk in the order of
 * time:
 * forward with the cotangent x in place of q.
 *
 *   Y' = R X' + K' tril(X K' - m)' - s m'     dq = x - gamma / n y     R <- R + K' K
 *
 * Rows 64 and 65 of a tile of keys are s, rounded, and what that leaves, so that scores bring s.x
 * with them. Nothing may be lost of y, as dgamma is -y.q / n: what bf16 rounds away of R and of the
 * scores is multiplied too. The means of q are made besides. */
#ifndef MN_KERNELS_CUDA_CURVATURE_CURVATURE_BWD_QUERIES_SM90_CUH
#define MN_KERNELS_CUDA_CURVATURE_CURVATURE_BWD_QUERIES_SM90_CUH

#include "kernels/cuda/curvature/curvature_sm90.cuh"

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
    const int i = threadIdx.x % MN_GROUP, K = (int)p.call.K;
    const int64_t b = at.s.span.b, from = at.s.span.t0 + t;
    mn_copy_tile<MN_CURVE_CHUNK, KP, MN_CURVE_ROWS>(mn_smem_address(to.k),
                                                    mn_row<mn_bf16>(p.k, b, from, at.h),
                                                    p.k.stride[1], count, K, i);
    const mn_in &x = p.cot.qt;
    mn_copy_tile<MN_CURVE_CHUNK, KP>(mn_smem_address(to.x), mn_row<mn_bf16>(x, b, from, at.h),
                                     x.stride[1], x.data ? count : 0, K, i);
    mn_copy_tile<MN_CURVE_CHUNK, KP>(mn_smem_address(to.q), mn_row<mn_bf16>(p.q, b, from, at.h),
                                     p.q.stride[1], count, K, i);
}

/* The sums of a tile's columns over the rows that this thread copied, then over all: `part` has
 * room for four warps. Returns that of column i. */
template <int KP, int SMEM_TILE>
__device__ inline float mn_curve_column(const unsigned char *tile, float (&part)[4][KP]) {
    constexpr int pieces = KP / 8, step = MN_GROUP / pieces;
    const int i = threadIdx.x % MN_GROUP, piece = i % pieces * 8;
    float sum[8] = {};
#pragma unroll
    for (int row = 0; row < MN_CURVE_CHUNK; row += step) {
        const uint4 pack = *(const uint4 *)(tile
                                            + mn_tile_byte(SMEM_TILE, row + i / pieces, piece));
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
__device__ inline void mn_curve_queries_copy(mn_curve_queries_smem<KP> &room,
                                           const mn_curvature_args &p, const mn_curve_place &at,
                                           const float *vector) {
    constexpr int stages = mn_curve_queries_smem<KP>::stages;
    const int i = threadIdx.x % MN_GROUP, n_chunks = (at.s.rows + 63) / 64;
    const int64_t seen = (int64_t)mn_curve_before(p, at.s.n);
    float s = i < p.call.K ? mn_get(vector, i) : 0.0f;
    mn_bf16 gamma = __float2bfloat16_rn(0.0f);    // as it comes, so that nobody waits for it
    for (int n = i; n < stages * (KP / 64) * 48; n += MN_GROUP) {    // the rows behind s
        unsigned char *k = room.stage[n / 48 / (KP / 64)].k;
        const int smem_tile = n / 48 % (KP / 64);
        *(uint4 *)(k + (smem_tile * MN_CURVE_ROWS + 66) * 128 + n % 48 * 16) =
            make_uint4(0, 0, 0, 0);
    }
    for (int c = 0; c <= n_chunks; c++) {
        const mn_bf16 gamma_now = gamma;
        if (c < n_chunks) {
            const int64_t t = at.s.first + c * 64;
            const int count = min(64, at.s.rows - c * 64);
            mn_mbarrier_wait(&room.gone[c % stages], (c / stages & 1) ^ 1);
            mn_curve_queries_load<KP>(room.stage[c % stages], p, at, t, count);
            if (i < count) {
                gamma = *mn_row<mn_bf16>(p.gamma, at.s.span.b, at.s.span.t0 + t + i, at.h);
            }
        }
        mn_curve_copies_end();
        if (c == 0) continue;
        mn_curve_queries_stage<KP> &now = room.stage[(c - 1) % stages];
        mn_curve_copies_wait<1>();
        if (i < KP) {
            const mn_bf16 rounded = __float2bfloat16_rn(s);
            now.s[i] = s;
            *(mn_bf16 *)(now.k + mn_tile_byte(MN_CURVE_ROWS, 64, i)) = rounded;
            *(mn_bf16 *)(now.k + mn_tile_byte(MN_CURVE_ROWS, 65, i)) =
                __float2bfloat16_rn(s - __bfloat162float(rounded));
        }
        if (i < MN_CURVE_CHUNK) {
            const float each = 1.0f / (float)(seen + at.s.first + (c - 1) * 64 + i + 1);
            now.each[i] = each;
            now.factor[i] = -mn_float(gamma_now) * each;
        }
        mn_mbarrier_arrive(&room.there[(c - 1) % stages]);
        s += mn_curve_column<KP, MN_CURVE_ROWS>(now.k, room.part[c % 2]);
    }
}

/* ---- the group that makes scores ------------------------------------------------------------- */

template <int KP>
__device__ inline void mn_curve_queries_scores(mn_curve_queries_smem<KP> &room,
                                             const mn_curvature_args &p, const mn_curve_work &w,
                                             const mn_curve_place &at) {
    constexpr int stages = mn_curve_queries_smem<KP>::stages;
    const int thread = threadIdx.x % MN_GROUP, row = thread / 32 * 16 + thread % 32 / 4;
    const int n_chunks = (at.s.rows + 63) / 64;
    for (int c = 0; c < n_chunks; c++) {
        mn_curve_queries_stage<KP> &in = room.stage[c % stages];
        float d[36], of_q[36], mean[2], mean_q[2];
        mn_mbarrier_wait(&room.there[c % stages], c / stages & 1);
        mn_fence_proxy_async();
        mn_products_start();
        mn_curve_scores_start<KP>(d, mn_smem_address(in.x), mn_smem_address(in.k));
        mn_products_end();
        mn_curve_scores_start<KP>(of_q, mn_smem_address(in.q), mn_smem_address(in.k));
        mn_products_end();
        mn_products_wait<1>();
        const float each[2] = { in.each[row], in.each[row + 8] };
        mn_curve_means(mean, d, each);
        mn_mbarrier_wait(&room.used[c % 2], (c / 2 & 1) ^ 1);
        mn_curve_put_square(room.P[c % 2], room.P_low[c % 2], d, mean);
        if (thread % 4 == 0) {
            in.mean[row] = mean[0];
            in.mean[row + 8] = mean[1];
        }
        mn_mbarrier_arrive(&room.scored[c % 2]);
        mn_products_wait<0>();
        mn_curve_means(mean_q, of_q, each);
        const int64_t first = mn_curve_row_of(p.call, at, at.s.first + c * 64 + row);
#pragma unroll
        for (int r = 0; r < 2; r++) {
            if (thread % 4 || at.slice || c * 64 + row + 8 * r >= at.s.rows) continue;
            *(float2 *)(w.means + 2 * (first + 8 * r)) = make_float2(mean_q[r], mean[r]);
        }
        mn_mbarrier_arrive_warp(&room.gone[c % stages]);
    }
}

/* ---- the group that has R -------------------------------------------------------------------- */

template <int KP>
__device__ inline void mn_curve_queries_read(mn_curve_queries_smem<KP> &room,
                                           const mn_curvature_args &p, const mn_curve_place &at,
                                           const float *sums) {
    constexpr int stages = mn_curve_queries_smem<KP>::stages;
    constexpr int reads = mn_curve_queries_smem<KP>::reads;
    const int n_chunks = (at.s.rows + 63) / 64, warp = threadIdx.x / 32 % 4;
    float R[KP / 2], Y[32];
    mn_curve_load(R, mn_row<float>(p.kk0, at.s.n, 0, at.h), sums, 0.5f, p.call.K, at.column0);
    for (int c = 0; c < n_chunks; c++) {
        mn_curve_queries_stage<KP> &in = room.stage[c % stages];
        uint32_t a[KP / 4], low[KP / 4], k[16];
#pragma unroll
        for (int i = 0; i < 32; i++) Y[i] = 0.0f;
        mn_curve_pack(a, R);
        mn_curve_pack_rest(low, R);
        mn_mbarrier_wait(&room.there[c % stages], c / stages & 1);
        mn_curve_left<MN_CURVE_ROWS>(k, in.k, at.column0 + warp * 16);
        mn_mbarrier_wait(&room.scored[c % 2], c / 2 & 1);
        mn_fence_proxy_async();
        mn_products_start();
        mn_curve_rows<KP, 64>(Y, a, mn_smem_address(in.x));
        mn_curve_rows<KP, 64>(Y, low, mn_smem_address(in.x));
        mn_curve_square(Y, k, mn_smem_address(room.P[c % 2]));
        mn_curve_square(Y, k, mn_smem_address(room.P_low[c % 2]));
        mn_products_end();
        mn_curve_depth<MN_CURVE_ROWS>(R, k, mn_smem_address(in.k));
        mn_products_end();
        mn_mbarrier_wait(&room.left[c % reads], (c / reads & 1) ^ 1);
        mn_products_wait<1>();
        room.Y[c % reads].put(Y);
        mn_mbarrier_arrive(&room.read[c % reads]);
        mn_products_wait<0>();
        mn_mbarrier_arrive_warp(&room.gone[c % stages]);
        mn_mbarrier_arrive_warp(&room.used[c % 2]);
    }
}

/* ---- the group that stores ------------------------------------------------------------------- */

/* Eight columns of a token: out = x + factor (y - m s), and the slice's part of y.q. */
template <int KP>
__device__ inline void mn_curve_queries_result(const float (&y)[8], const float (&s)[8],
                                             const mn_curve_queries_stage<KP> &in, mn_bf16 *to,
                                             float *part, int column, int token) {
    const float m = in.mean[token], f = in.factor[token];
    const uint32_t byte = mn_tile_byte(64, token, column);
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
__device__ inline void mn_curve_queries_store(mn_curve_queries_smem<KP> &room,
                                            const mn_curvature_args &p, const mn_curve_work &w,
                                            const mn_curve_place &at) {
    constexpr int stages = mn_curve_queries_smem<KP>::stages;
    constexpr int reads = mn_curve_queries_smem<KP>::reads;
    const int i = threadIdx.x % MN_GROUP, n_chunks = (at.s.rows + 63) / 64;
    const int vec16 = i % 8, column = at.column0 + 8 * vec16;
    const mn_out &out = p.grad.q;
    const int64_t rows = p.call.B * p.call.T * p.call.H;
    for (int c = 0; c < n_chunks; c++) {
        const mn_curve_queries_stage<KP> &in = room.stage[c % stages];
        const int64_t t = at.s.first + c * 64;
        mn_bf16 *to = mn_row<mn_bf16>(out, at.s.span.b, at.s.span.t0 + t, at.h);
        float *parts = w.parts + at.slice * rows + mn_curve_row_of(p.call, at, t);
        float s[8];
        mn_mbarrier_wait(&room.read[c % reads], c / reads & 1);
#pragma unroll
        for (int j = 0; j < 8; j++) s[j] = in.s[column + j];
#pragma unroll
        for (int token = i / 8; token < MN_CURVE_CHUNK; token += MN_GROUP / 8) {
            const bool inside = c * 64 + token < at.s.rows;
            float y[8];
            room.Y[c % reads].get(y, vec16, token);
            mn_curve_queries_result<KP>(
                y, s, in,
                to && inside && column < p.call.K ? to + token * out.stride[1] + column : NULL,
                inside ? parts + token : NULL, column, token);
        }
        mn_mbarrier_arrive(&room.gone[c % stages]);
        mn_mbarrier_arrive(&room.left[c % reads]);
    }
}

#endif

template <int KP>
__global__ void __launch_bounds__(MN_CURVE_GROUPS, 1)
mn_curve_queries_kernel(const __grid_constant__ mn_curvature_args p, mn_curve_work w,
                      mn_curve_cut cut) {
#if MN_HAS_WGMMA
    extern __shared__ __align__(1024) unsigned char curve_bytes[];
    mn_curve_queries_smem<KP> &room = *(mn_curve_queries_smem<KP> *)curve_bytes;
    const mn_curve_place at = mn_curve_place_of(p.call, cut);
    if (!at.s.there) return;
    const int64_t K = p.call.K;
    const float *sums =
        at.s.first > 0 ? mn_curve_sums_for(w.there, p.call, at, at.s.slot - 1) : NULL;
    if (threadIdx.x == 0) {
        for (int i = 0; i < mn_curve_queries_smem<KP>::stages; i++) {
            mn_mbarrier_init(&room.there[i], MN_GROUP);
            mn_mbarrier_init(&room.gone[i], MN_GROUP + 8);    // who stores, products
        }
        for (int i = 0; i < 2; i++) {
            mn_mbarrier_init(&room.scored[i], MN_GROUP);
            mn_mbarrier_init(&room.used[i], 4);
        }
        for (int i = 0; i < mn_curve_queries_smem<KP>::reads; i++) {
            mn_mbarrier_init(&room.read[i], MN_GROUP);
            mn_mbarrier_init(&room.left[i], MN_GROUP);
        }
    }
    __syncthreads();
    if (threadIdx.x < MN_GROUP) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 80;");
        mn_curve_queries_copy<KP>(
            room, p, at, sums ? sums + K * K : mn_row<float>(p.ks0, at.s.n, 0, at.h));
    } else if (threadIdx.x < 2 * MN_GROUP) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 120;");
        mn_curve_queries_scores<KP>(room, p, w, at);
    } else if (threadIdx.x < 3 * MN_GROUP) {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 224;");
        mn_curve_queries_read<KP>(room, p, at, sums);
    } else {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 80;");
        mn_curve_queries_store<KP>(room, p, w, at);
    }
#endif
}

template <int KP>
inline int mn_curve_queries(const mn_curvature_args *p, const mn_curve_work &w,
                          const mn_curve_cut &cut, cudaStream_t on) {
    return mn_curve_start(mn_curve_queries_kernel<KP>, MN_CURVE_GROUPS,
                          sizeof(mn_curve_queries_smem<KP>), p->call, cut, on, *p, w);
}

#endif
