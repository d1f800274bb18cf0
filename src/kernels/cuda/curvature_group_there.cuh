/* curvature_group_there.cuh - the walk of curvature in the order of time on Hopper: forward, and
 * the gradients of q and gamma, which are the same with the cotangent d in place of q:
 *
 *   Y' = R X' + K' tril(X K' - m)' - s m'     out = x - gamma / n y     R <- R + K' K
 *
 * Rows 64 and 65 of a tile of keys are s, rounded, and what that leaves, so that scores bring s.x
 * with them. Going back (BACK) nothing may be lost of y, as dgamma is -y.q / n: what bf16 rounds
 * away of R and of the scores is multiplied too, and the means of q are made besides. */
#ifndef MN_KERNELS_CUDA_CURVATURE_GROUP_THERE_CUH
#define MN_KERNELS_CUDA_CURVATURE_GROUP_THERE_CUH

#include "kernels/cuda/curvature_group.cuh"

enum { MN_CURVE_ROWS = MN_CURVE_CHUNK + 8 };    // of a tile of keys

template <int KP, bool BACK>
struct alignas(1024) mn_curve_there_stage {
    unsigned char k[KP / 64 * MN_CURVE_ROWS * 128];
    unsigned char x[KP / 64 * MN_CURVE_SQUARE];
    unsigned char q[BACK ? KP / 64 * MN_CURVE_SQUARE : 16];
    float s[KP], factor[MN_CURVE_CHUNK], each[MN_CURVE_CHUNK];    // factor: -gamma / n
    float mean[MN_CURVE_CHUNK];                                   // of x
};

template <int KP, bool BACK>
struct mn_curve_there_room {
    static constexpr int stages = BACK ? 3 : 5;
    mn_curve_there_stage<KP, BACK> stage[stages];
    alignas(1024) unsigned char P[2][MN_CURVE_SQUARE];
    alignas(1024) unsigned char P_low[2][BACK ? MN_CURVE_SQUARE : 1024];
    alignas(1024) unsigned char out[MN_CURVE_SQUARE];
    float part[2][4][KP];
    uint64_t there[stages], gone[stages], scored[2], read[2];
};

#if MN_HAS_WGMMA

/* d = a b' for 64 rows a and the 72 rows of a tile of keys. */
template <int KP>
__device__ inline void mn_curve_scores_start(float (&d)[36], uint32_t a, uint32_t b) {
#pragma unroll
    for (int k = 0; k < KP; k += 16) {
        const uint64_t left = mn_tile_seen(a + k / 64 * MN_CURVE_SQUARE + k % 64 * 2, 16);
        const uint64_t right = mn_tile_seen(b + k / 64 * MN_CURVE_ROWS * 128 + k % 64 * 2, 16);
        asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %38, 0;\n\t"
                     "wgmma.mma_async.sync.aligned.m64n72k16.f32.bf16.bf16 {"
                     "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, "
                     "%17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
                     "%32, %33, %34, %35}, %36, %37, p, 1, 1, 0, 0;\n\t}"
                     : MN_SUMS(0), MN_SUMS(16), MN_FOUR_SUMS(32)
                     : "l"(left), "l"(right), "r"((int)(k > 0)));
    }
}

/* ---- the group that copies ------------------------------------------------------------------- */

template <int KP, bool BACK>
__device__ inline void mn_curve_there_fetch(mn_curve_there_stage<KP, BACK> &to,
                                            const mn_curvature_args &p, const mn_curve_place &at,
                                            int64_t t, int count) {
    const int i = threadIdx.x % MN_GROUP, K = (int)p.call.K;
    const int64_t b = at.s.span.b, from = at.s.span.t0 + t;
    mn_copy_tile<MN_CURVE_CHUNK, KP, MN_CURVE_ROWS>(mn_shared_at(to.k),
                                                    mn_row<mn_bf16>(p.k, b, from, at.h),
                                                    p.k.stride[1], count, K, i);
    const mn_in &x = BACK ? p.cot.qt : p.q;
    mn_copy_tile<MN_CURVE_CHUNK, KP>(mn_shared_at(to.x), mn_row<mn_bf16>(x, b, from, at.h),
                                     x.stride[1], x.data ? count : 0, K, i);
    if (!BACK) return;
    mn_copy_tile<MN_CURVE_CHUNK, KP>(mn_shared_at(to.q), mn_row<mn_bf16>(p.q, b, from, at.h),
                                     p.q.stride[1], count, K, i);
}

/* The sums of a tile's columns over the rows that this thread copied, then over all: `part` has
 * room for four warps. Returns that of column i. */
template <int KP, int PANEL>
__device__ inline float mn_curve_column(const unsigned char *tile, float (&part)[4][KP]) {
    constexpr int pieces = KP / 8, step = MN_GROUP / pieces;
    const int i = threadIdx.x % MN_GROUP, piece = i % pieces * 8;
    float sum[8] = {};
#pragma unroll
    for (int row = 0; row < MN_CURVE_CHUNK; row += step) {
        const uint4 pack = *(const uint4 *)(tile + mn_tile_byte(PANEL, row + i / pieces, piece));
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
template <int KP, bool BACK>
__device__ inline void mn_curve_there_copy(mn_curve_there_room<KP, BACK> &room,
                                           const mn_curvature_args &p, const mn_curve_place &at,
                                           const float *vector) {
    constexpr int stages = mn_curve_there_room<KP, BACK>::stages;
    const int i = threadIdx.x % MN_GROUP, n_chunks = (at.s.rows + 63) / 64;
    const int64_t seen = (int64_t)mn_curve_before(p, at.s.n);
    float s = i < p.call.K ? mn_get(vector, i) : 0.0f, gamma = 0.0f;
    for (int n = i; n < stages * (KP / 64) * 48; n += MN_GROUP) {    // the rows behind s
        unsigned char *k = room.stage[n / 48 / (KP / 64)].k;
        const int panel = n / 48 % (KP / 64);
        *(uint4 *)(k + (panel * MN_CURVE_ROWS + 66) * 128 + n % 48 * 16) = make_uint4(0, 0, 0, 0);
    }
    for (int c = 0; c <= n_chunks; c++) {
        const float gamma_now = gamma;
        if (c < n_chunks) {
            const int64_t t = at.s.first + c * 64;
            const int count = min(64, at.s.rows - c * 64);
            mn_barrier_wait(&room.gone[c % stages], (c / stages & 1) ^ 1);
            mn_curve_there_fetch<KP, BACK>(room.stage[c % stages], p, at, t, count);
            if (i < count) {
                gamma = mn_float(*mn_row<mn_bf16>(p.gamma, at.s.span.b, at.s.span.t0 + t + i,
                                                  at.h));
            }
        }
        mn_curve_copies_end();
        if (c == 0) continue;
        mn_curve_there_stage<KP, BACK> &now = room.stage[(c - 1) % stages];
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
            now.factor[i] = -gamma_now * each;
        }
        mn_curve_publish();
        mn_barrier_arrive(&room.there[(c - 1) % stages]);
        s += mn_curve_column<KP, MN_CURVE_ROWS>(now.k, room.part[c % 2]);
    }
    float *last = at.s.last && !BACK ? mn_row<float>(p.ks, at.s.n, 0, at.h) : NULL;
    if (last && i < p.call.K && i / MN_CURVE_SLICE == at.slice) last[i] = s;
}

/* ---- the group that makes scores ------------------------------------------------------------- */

/* Sums of the rows of tril(X K'), with s.x, times 1 / n. */
__device__ inline void mn_curve_means(float (&mean)[2], const float (&d)[36], const float *each) {
    const int thread = threadIdx.x % MN_GROUP, lane = thread % 32;
    const int row = thread / 32 * 16 + lane / 4;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float sum = 0.0f;
#pragma unroll
        for (int i = 2 * r; i < 32; i += i % 2 ? 3 : 1) {
            if (i / 4 * 8 + lane % 4 * 2 + i % 2 <= row + 8 * r) sum += d[i];
        }
        mean[r] = mn_quad_sum(sum + (d[32 + 2 * r] + d[33 + 2 * r])) * each[row + 8 * r];
    }
}

template <int KP, bool BACK>
__device__ inline void mn_curve_there_scores(mn_curve_there_room<KP, BACK> &room,
                                             const mn_curvature_args &p, const mn_curve_work &w,
                                             const mn_curve_place &at) {
    constexpr int stages = mn_curve_there_room<KP, BACK>::stages;
    const int thread = threadIdx.x % MN_GROUP, row = thread / 32 * 16 + thread % 32 / 4;
    const int n_chunks = (at.s.rows + 63) / 64;
    for (int c = 0; c < n_chunks; c++) {
        mn_curve_there_stage<KP, BACK> &in = room.stage[c % stages];
        float d[36], of_q[36], mean[2], mean_q[2];
        mn_barrier_wait(&room.there[c % stages], c / stages & 1);
        mn_products_start();
        mn_curve_scores_start<KP>(d, mn_shared_at(in.x), mn_shared_at(in.k));
        mn_products_end();
        if (BACK) {
            mn_curve_scores_start<KP>(of_q, mn_shared_at(in.q), mn_shared_at(in.k));
            mn_products_end();
        }
        mn_products_wait<BACK ? 1 : 0>();
        mn_curve_means(mean, d, in.each);
        mn_barrier_wait(&room.read[c % 2], (c / 2 & 1) ^ 1);
        mn_curve_put_square(room.P[c % 2], BACK ? room.P_low[c % 2] : NULL, d, mean);
        if (thread % 4 == 0) {
            in.mean[row] = mean[0];
            in.mean[row + 8] = mean[1];
        }
        mn_curve_publish();
        mn_barrier_arrive(&room.scored[c % 2]);
        if (BACK) {
            mn_products_wait<0>();
            mn_curve_means(mean_q, of_q, in.each);
            const int64_t first = mn_curve_row_of(p.call, at, at.s.first + c * 64 + row);
#pragma unroll
            for (int r = 0; r < 2; r++) {
                if (thread % 4 || at.slice || c * 64 + row + 8 * r >= at.s.rows) continue;
                *(float2 *)(w.means + 2 * (first + 8 * r)) = make_float2(mean_q[r], mean[r]);
            }
        }
        mn_curve_release(&room.gone[c % stages]);
    }
}

/* ---- the group that has R -------------------------------------------------------------------- */

/* Adds those of lane ^ 2 N to half of x, the upper half where the lane has that bit. */
template <int N>
__device__ inline void mn_curve_fold(float (&x)[16]) {
    const bool upper = threadIdx.x & 2 * N;
#pragma unroll
    for (int i = 0; i < N; i++) {
        const float give = upper ? x[i] : x[i + N], keep = upper ? x[i + N] : x[i];
        x[i] = keep + __shfl_xor_sync(0xffffffffu, give, 2 * N);
    }
}

/* Sums over the warp's rows of 16 numbers that a thread has of tokens: those of tokens 2 lane and
 * the next. */
__device__ inline float2 mn_curve_sum_rows(float (&x)[16]) {
    mn_curve_fold<8>(x);
    mn_curve_fold<4>(x);
    mn_curve_fold<2>(x);
    return make_float2(x[0], x[1]);
}

/* out = x + factor (y - m s), and the warp's part of y.q. */
template <int KP, bool BACK>
__device__ inline void mn_curve_there_put(const float (&Y)[32],
                                          mn_curve_there_room<KP, BACK> &room,
                                          const mn_curve_there_stage<KP, BACK> &in,
                                          const mn_curvature_args &p, const mn_curve_work &w,
                                          const mn_curve_place &at, int64_t t, int count) {
    const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    const int own = at.column0 + warp * 16;
    const float s[2] = { in.s[own + lane / 4], in.s[own + lane / 4 + 8] };
    uint32_t x[16], q[16];
    float products[16];
    mn_curve_left<64>(x, in.x, own);
    if (BACK) mn_curve_left<64>(q, in.q, own);
#pragma unroll
    for (int n = 0; n < 8; n++) {
        const float2 m = *(const float2 *)(in.mean + 8 * n + lane % 4 * 2);
        const float2 f = *(const float2 *)(in.factor + 8 * n + lane % 4 * 2);
        products[2 * n] = products[2 * n + 1] = 0.0f;
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const float y0 = fmaf(-m.x, s[r], Y[4 * n + 2 * r]);
            const float y1 = fmaf(-m.y, s[r], Y[4 * n + 2 * r + 1]);
            if (BACK) {
                products[2 * n] = fmaf(mn_curve_low(q[2 * n + r]), y0, products[2 * n]);
                products[2 * n + 1] = fmaf(mn_curve_high(q[2 * n + r]), y1, products[2 * n + 1]);
            }
            mn_curve_put_pair(room.out, mn_pair(fmaf(f.x, y0, mn_curve_low(x[2 * n + r])),
                                                fmaf(f.y, y1, mn_curve_high(x[2 * n + r]))),
                              n, r);
        }
    }
    mn_curve_put_rows(BACK ? p.grad.q : p.qt, room.out, at, t, count, p.call.K);
    if (!BACK) return;
    const float2 sum = mn_curve_sum_rows(products);
    const int token = 2 * lane;
    const int64_t rows = p.call.B * p.call.T * p.call.H;
    float *to = w.parts + (at.slice * 4 + warp) * rows + mn_curve_row_of(p.call, at, t + token);
    if (token < count) to[0] = sum.x;
    if (token + 1 < count) to[1] = sum.y;
}

template <int KP, bool BACK>
__device__ inline void mn_curve_there_read(mn_curve_there_room<KP, BACK> &room,
                                           const mn_curvature_args &p, const mn_curve_work &w,
                                           const mn_curve_place &at, const float *sums) {
    constexpr int stages = mn_curve_there_room<KP, BACK>::stages;
    const int n_chunks = (at.s.rows + 63) / 64, warp = threadIdx.x / 32 % 4;
    float R[KP / 2], Y[32], done[32];
    mn_curve_load(R, mn_row<float>(p.kk0, at.s.n, 0, at.h), sums, 0.5f, p.call.K, at.column0);
    const auto put = [&](int c) {
        mn_curve_there_put<KP, BACK>(done, room, room.stage[c % stages], p, w, at,
                                     at.s.first + c * 64, min(64, at.s.rows - c * 64));
        mn_curve_release(&room.gone[c % stages]);
    };
    for (int c = 0; c < n_chunks; c++) {
        mn_curve_there_stage<KP, BACK> &in = room.stage[c % stages];
        uint32_t a[KP / 4], low[BACK ? KP / 4 : 1], k[16];
#pragma unroll
        for (int i = 0; i < 32; i++) Y[i] = 0.0f;
        mn_curve_pack(a, R);
        if constexpr (BACK) mn_curve_pack_rest(low, R);
        mn_barrier_wait(&room.there[c % stages], c / stages & 1);
        mn_products_start();
        mn_curve_rows<KP, 64>(Y, a, mn_shared_at(in.x));
        if constexpr (BACK) mn_curve_rows<KP, 64>(Y, low, mn_shared_at(in.x));
        mn_products_end();
        mn_curve_left<MN_CURVE_ROWS>(k, in.k, at.column0 + warp * 16);
        mn_barrier_wait(&room.scored[c % 2], c / 2 & 1);
        mn_products_start();
        mn_curve_square(Y, k, mn_shared_at(room.P[c % 2]));
        if (BACK) mn_curve_square(Y, k, mn_shared_at(room.P_low[c % 2]));
        mn_curve_depth<MN_CURVE_ROWS>(R, k, mn_shared_at(in.k));
        mn_products_end();
        if (BACK) mn_products_wait<1>();    // frees registers
        if (c > 0) put(c - 1);
        mn_products_wait<0>();
        mn_curve_release(&room.read[c % 2]);
#pragma unroll
        for (int i = 0; i < 32; i++) done[i] = Y[i];
    }
    if (n_chunks > 0) put(n_chunks - 1);
    if (at.s.last && !BACK) {
        mn_curve_store(mn_row<float>(p.kk, at.s.n, 0, at.h), R, 1.0f, p.call.K, at.column0);
    }
}

#endif

template <int KP, bool BACK>
__global__ void __launch_bounds__(MN_CURVE_GROUPS, 1)
mn_curve_there_kernel(const __grid_constant__ mn_curvature_args p, mn_curve_work w,
                      mn_curve_cut cut) {
#if MN_HAS_WGMMA
    extern __shared__ __align__(1024) unsigned char curve_bytes[];
    mn_curve_there_room<KP, BACK> &room = *(mn_curve_there_room<KP, BACK> *)curve_bytes;
    const mn_curve_place at = mn_curve_place_of(p.call, cut);
    if (!at.s.there) return;
    const int64_t K = p.call.K;
    const float *sums =
        at.s.first > 0 ? mn_curve_sums_for(w.there, p.call, at, at.s.slot - 1) : NULL;
    if (threadIdx.x == 0) {
        for (int i = 0; i < mn_curve_there_room<KP, BACK>::stages; i++) {
            mn_barrier_open(&room.there[i], MN_GROUP);
            mn_barrier_open(&room.gone[i], 8);
        }
        for (int i = 0; i < 2; i++) {
            mn_barrier_open(&room.scored[i], MN_GROUP);
            mn_barrier_open(&room.read[i], 4);
        }
    }
    __syncthreads();
    if (threadIdx.x < MN_GROUP) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 96;");
        mn_curve_there_copy<KP, BACK>(
            room, p, at, sums ? sums + K * K : mn_row<float>(p.ks0, at.s.n, 0, at.h));
    } else if (threadIdx.x < 2 * MN_GROUP) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 160;");
        mn_curve_there_scores<KP, BACK>(room, p, w, at);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
        mn_curve_there_read<KP, BACK>(room, p, w, at, sums);
    }
#endif
}

template <int KP, bool BACK>
inline int mn_curve_there(const mn_curvature_args *p, const mn_curve_work &w,
                          const mn_curve_cut &cut, cudaStream_t on) {
    return mn_curve_start(mn_curve_there_kernel<KP, BACK>, MN_CURVE_GROUPS,
                          sizeof(mn_curve_there_room<KP, BACK>), p->call, cut, on, *p, w);
}

#endif
