/* curvature_sm90.cuh - curvature on Hopper, for bf16 and keys of up to 128: what its scans share,
 * forward (curvature_fwd_chunk.cu) and going back, in the order of time and against it
 * (curvature_bwd_sm90.cu).
 *
 * Warp groups of a block work on different chunks of 64 tokens at a time: going back one brings
 * tiles and what is known of tokens, one makes scores, one has 64 rows of the symmetric R (or G)
 * in its registers, reads and moves it, one makes results of what the third has read and stores
 * them. Everything the third one computes is transposed, rows being columns of the result, so that
 * its rows of R are the left operand and never leave the registers.
 *
 * Every thread arrives at a barrier for what it has itself read or written, which takes no longer
 * than one lane of a warp (mn_mbarrier_arrive_warp) and is what racecheck follows; for what
 * products read one lane does. Those who use a chunk last arrive for those whom they have waited
 * for. */
#ifndef MN_KERNELS_CUDA_CURVATURE_CURVATURE_SM90_CUH
#define MN_KERNELS_CUDA_CURVATURE_CURVATURE_SM90_CUH

#include "kernels/cuda/attention/attention_wgmma_sm90.cuh"
#include "kernels/cuda/curvature/curvature.cuh"
#include "kernels/cuda/prim/sync.cuh"
#include "kernels/cuda/prim/tma.cuh"

namespace mneme::curvature {

using namespace attention;

enum {
    MN_CURVE_CHUNK = 64,
    MN_CURVE_GROUPS = 4 * MN_WARPGROUP,             // threads
    MN_CURVE_SQUARE = MN_CURVE_CHUNK * 128,     // bytes of a tile of 64 by 64
    MN_CURVE_GRAIN = 128,                       // tokens that segments have a multiple of
    MN_CURVE_READ_PITCH = 72,                   // of rows of what was read
    MN_CURVE_ROWS = MN_CURVE_CHUNK + 8,         // of a tile of keys: behind them s
};

/* Least tokens of a segment: so many that the blocks of one long sequence fill a GPU. By sizes that
 * a sequence shares with all others. */
inline int64_t mn_curve_group_segment(const mn_call &c) {
    return mn_max(mn_min(mn_curve_slices(c.K) * c.H, 32), 8) * MN_CURVE_GRAIN;
}

template <typename View>
inline bool mn_curve_packable(const View &view) {
    bool whole = (uintptr_t)view.data % 16 == 0;
    for (int axis = 0; axis < 3; axis++) whole = whole && view.stride[axis] % 8 == 0;
    return !view.data || whole;
}

/* Whether a call's rows are such as kernels on tiles of 128 bytes take. */
inline bool mn_curve_group_takes(const mn_curvature_args *p) {
    const mn_call &c = p->call;
    return c.dtype == MN_BF16 && c.K % 8 == 0 && c.K <= 128 && mn_curve_packable(p->q) &&
           mn_curve_packable(p->k) && mn_curve_packable(p->qt) && mn_curve_packable(p->cot.qt) &&
           mn_curve_packable(p->grad.q) && mn_curve_packable(p->grad.k);
}

/* Whether the kernels serve a call: by its kind and sizes, never by its length. */
inline bool mn_curve_group_serves(const mn_curvature_args *p) {
    return mn_curve_group_takes(p) && mn_device_is_sm90();
}

inline mn_curve_cut mn_curve_group_cut(const mn_curvature_args *p) {
    const int slices = mn_curve_slices(p->call.K);
    return { mn_curve_group_segment(p->call), slices, slices, true };
}

/* What the third group has read of a chunk: rows are columns of the result. Token t of row j lies
 * at t + 4 (j / 8), so that neither those who write pairs of tokens nor those who read one token
 * of eight rows meet in a bank. */
struct mn_curve_read {
    alignas(16) float at[MN_CURVE_SLICE * MN_CURVE_READ_PITCH];

    __device__ static int place(int row, int token) {
        return row * MN_CURVE_READ_PITCH + (token + row / 8 * 4) % MN_CURVE_CHUNK;
    }

    __device__ void put(const float (&Y)[32]) {
        const int thread = threadIdx.x % MN_WARPGROUP, lane = thread % 32;
        const int row = thread / 32 * 16 + lane / 4;
#pragma unroll
        for (int i = 0; i < 32; i += 2) {
            const int token = i / 4 * 8 + lane % 4 * 2;
            *(float2 *)(at + place(row + i % 4 / 2 * 8, token)) = make_float2(Y[i], Y[i + 1]);
        }
    }

    /* y <- numbers 8 vec16 to 8 vec16 + 7 of a token. */
    __device__ void get(float (&y)[8], int vec16, int token) const {
#pragma unroll
        for (int i = 0; i < 8; i++) y[i] = at[place(8 * vec16, token) + i * MN_CURVE_READ_PITCH];
    }
};

__device__ inline float mn_curve_low(uint32_t pair) {
    return __uint_as_float(pair << 16);
}

__device__ inline float mn_curve_high(uint32_t pair) {
    return __uint_as_float(pair & 0xffff0000u);
}

/* The element at `byte` of a tile. */
__device__ inline const mn_bf16 *mn_curve_at(const unsigned char *tile, uint32_t byte) {
    return (const mn_bf16 *)(tile + byte);
}

/* A left operand of 16 columns of a tile, from `column` on, by its 64 rows. */
template <int SMEM_TILE>
__device__ inline void mn_curve_left(uint32_t (&a)[16], const unsigned char *tile, int column) {
    const int lane = threadIdx.x % 32;
    const int row = lane % 8 + lane / 16 * 8, j = column + lane / 8 % 2 * 8;
#pragma unroll
    for (int step = 0; step < 4; step++) {
        unsigned part[4];
        mn_ldmatrix_x4<true>(part, mn_curve_at(tile,
                                               mn_swizzle_byte(SMEM_TILE, 16 * step + row, j)));
#pragma unroll
        for (int i = 0; i < 4; i++) a[4 * step + i] = part[i];
    }
}

/* Numbers of a left operand of tokens that are not finite become 0; whether there are any in the
 * warp. What results see of them, mn_curve_add_wild adds. */
__device__ inline bool mn_curve_tame(uint32_t (&a)[16]) {
    uint32_t watch[4] = {};    // four chains, as each step takes in the one before
#pragma unroll
    for (int i = 0; i < 16; i++) watch[i % 4] = mn_bf16x2_watch(a[i], watch[i % 4]);
    const uint32_t all = watch[0] | watch[1] | watch[2] | watch[3];
    if (!__any_sync(0xffffffffu, all & 0x7fff7fffu)) return false;
#pragma unroll
    for (int i = 0; i < 16; i++) a[i] &= ~mn_bf16x2_wild(a[i]);
    return true;
}

/* Y (16 columns of a warp by 64 tokens) += A'P' of what is not finite in the left operand `a`,
 * token by token, where P (results by tokens that they see, or the other way round) is not
 * masked. */
template <mn_tile_sees SEES>
__device__ __forceinline__ void mn_curve_add_wild(float (&Y)[32], const uint32_t (&a)[16],
                                                  const unsigned char *P) {
    const int lane = threadIdx.x % 32, column = lane % 4 * 2;
#pragma unroll
    for (int step = 0; step < 4; step++) {
#pragma unroll 1
        for (int s = 16 * step; s < 16 * step + 16; s++) {
            uint32_t x[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int token = 16 * step + i / 2 * 8 + column;    // of the lower half
                const uint32_t half = token == s ? 0xffffu : token + 1 == s ? 0xffff0000u : 0u;
                x[i] = a[4 * step + i] & mn_bf16x2_wild(a[4 * step + i]) & half;
            }
            if (!__any_sync(0xffffffffu, x[0] | x[1] | x[2] | x[3])) continue;
#pragma unroll
            for (int n = 0; n < 4; n++) {
                unsigned b[4];
                float own[2][4] = {};
                const int plain = mn_swizzle_byte(64, 16 * n + lane % 8 + lane / 16 * 8,
                                                  16 * step + lane / 8 % 2 * 8);
                const int trans = mn_swizzle_byte(64, 16 * step + lane % 16,
                                                  16 * n + lane / 16 * 8);
                mn_ldmatrix_x4<SEES == MN_SEES_LATER>(
                    b, mn_curve_at(P, SEES == MN_SEES_LATER ? trans : plain));
                mn_mma_m16n8k16(own[0], x, b[0], b[1]);
                mn_mma_m16n8k16(own[1], x, b[2], b[3]);
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    const int t = 16 * n + i / 4 * 8 + column + i % 2;
                    if (!mn_tile_row_sees<SEES>(t, s) || !mn_is_wild(own[i / 4][i % 4])) continue;
                    Y[8 * n + i] += own[i / 4][i % 4];
                }
            }
        }
    }
}

/* Rows of a symmetric sum of outer products whose left operand had a number that is not finite:
 * their columns have met it, they have not, and become NaN. */
template <int N>
__device__ inline void mn_curve_wild_rows(float (&R)[N], const uint32_t (&a)[16]) {
    float row[2] = { 0.0f, 0.0f };
#pragma unroll
    for (int i = 0; i < 16; i++) {
        row[i % 2] = fmaf(0.0f, mn_curve_low(a[i]), row[i % 2]);
        row[i % 2] = fmaf(0.0f, mn_curve_high(a[i]), row[i % 2]);
    }
    row[0] = mn_quad_sum(row[0]), row[1] = mn_quad_sum(row[1]);
#pragma unroll
    for (int i = 0; i < N; i++) R[i] += row[i % 4 / 2];
}

/* A left operand's tokens times their factors. */
__device__ inline void mn_curve_weigh_tokens(uint32_t (&a)[16], const float *factor) {
    const int column = threadIdx.x % 4 * 2;
#pragma unroll
    for (int i = 0; i < 16; i++) {
        const float2 by = *(const float2 *)(factor + i / 2 * 8 + column);
        a[i] = mn_bf16x2(by.x * mn_curve_low(a[i]), by.y * mn_curve_high(a[i]));
    }
}

/* Sums as a left operand; `low` what rounding them leaves. */
template <int N>
__device__ inline void mn_curve_pack(uint32_t (&a)[N / 2], const float (&x)[N]) {
#pragma unroll
    for (int i = 0; i < N / 2; i++) a[i] = mn_bf16x2(x[2 * i], x[2 * i + 1]);
}

template <int N>
__device__ inline void mn_curve_pack_rest(uint32_t (&a)[N / 2], const float (&x)[N]) {
#pragma unroll
    for (int i = 0; i < N / 2; i++) {
        const uint32_t pair = mn_bf16x2(x[2 * i], x[2 * i + 1]);
        a[i] = mn_bf16x2(x[2 * i] - mn_curve_low(pair), x[2 * i + 1] - mn_curve_high(pair));
    }
}

/* What a thread's rows of scores see, as masks: of eight columns n and row r (of two) those of
 * n - r, where -1 is all; even columns and odd ones. */
struct mn_curve_seen {
    uint32_t even[8], odd[8];

    __device__ mn_curve_seen() {
        const int lane = threadIdx.x % 32, warp = threadIdx.x % MN_WARPGROUP / 32;
#pragma unroll
        for (int i = 0; i < 8; i++) {
            /* the row's token less the column's */
            const int left = 8 * (2 * warp - i) + lane / 4 - lane % 4 * 2;
            even[i] = left >= 0 ? ~0u : 0u;
            odd[i] = left >= 1 ? ~0u : 0u;
        }
    }

    __device__ float column(float x, int i, bool is_odd) const {
        return i < 0 ? x : __uint_as_float(__float_as_uint(x) & (is_odd ? odd[i] : even[i]));
    }

    __device__ uint32_t pair(uint32_t x, int i) const {
        return i < 0 ? x : x & (even[i] & 0xffffu | odd[i] & 0xffff0000u);
    }
};

/* Sums of the rows of tril(X K'), with s.x, times 1 / n, which is `each`. */
__device__ inline void mn_curve_means(float (&mean)[2], const float (&d)[36],
                                      const float (&each)[2], const mn_curve_seen &seen) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float even = d[32 + 2 * r], odd = d[33 + 2 * r];
#pragma unroll
        for (int vec16 = 0; vec16 < 8; vec16++) {
            even += seen.column(d[4 * vec16 + 2 * r], vec16 - r, false);
            odd += seen.column(d[4 * vec16 + 2 * r + 1], vec16 - r, true);
        }
        mean[r] = mn_quad_sum(even + odd) * each[r];
    }
}

/* use(x, row, column) for a thread's sums of 64 rows. */
template <int N, typename F>
__device__ inline void mn_curve_each(float (&d)[N], F use) {
    const int thread = threadIdx.x % MN_WARPGROUP, lane = thread % 32;
    const int row = thread / 32 * 16 + lane / 4, column = lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < N; i++) use(d[i], row + i % 4 / 2 * 8, i / 4 * 8 + column + i % 2);
}

/* The caller's symmetric matrix, `times` over, or the sums in front. */
template <int N>
__device__ inline void mn_curve_load(float (&R)[N], const float *given, const float *sums,
                                     float times, int64_t K, int row0) {
    mn_curve_each(R, [&](float &x, int row, int column) {
        const int64_t j = row0 + row;
        x = 0.0f;
        if (j >= K || column >= K) return;
        if (sums) x = sums[j * K + column];
        else if (given) x = times * (given[j * K + column] + given[column * K + j]);
    });
}

template <int N>
__device__ inline void mn_curve_store(float *to, float (&R)[N], float times, int64_t K, int row0) {
    mn_curve_each(R, [&](float &x, int row, int column) {
        const int64_t j = row0 + row;
        if (to && j < K && column < K) to[j * K + column] = times * x;
    });
}

/* Scores less their row's mean, lower triangular, into a tile; what rounding leaves into `low`. */
__device__ inline void mn_curve_put_square(unsigned char *to, unsigned char *low, const float *sums,
                                           const float (&mean)[2], const mn_curve_seen &seen) {
    const int thread = threadIdx.x % MN_WARPGROUP, lane = thread % 32;
    const int row = thread / 32 * 16 + lane / 4;
#pragma unroll
    for (int i = 0; i < 32; i += 2) {
        const int r = i % 4 / 2, own = i / 4 - r;
        const float x = sums[i] - mean[r], y = sums[i + 1] - mean[r];
        const uint32_t pair = mn_bf16x2(x, y);
        const uint32_t byte = mn_swizzle_byte(64, row + 8 * r, i / 4 * 8 + lane % 4 * 2);
        *(uint32_t *)(to + byte) = seen.pair(pair, own);
        if (low) {
            const uint32_t rest = mn_bf16x2(x - mn_curve_low(pair), y - mn_curve_high(pair));
            *(uint32_t *)(low + byte) = seen.pair(rest, own);
        }
    }
}

__device__ inline void mn_curve_unpack(float (&x)[8], const uint4 &pack) {
    const uint32_t pair[4] = { pack.x, pack.y, pack.z, pack.w };
#pragma unroll
    for (int i = 0; i < 8; i++) {
        x[i] = i % 2 ? mn_curve_high(pair[i / 2]) : mn_curve_low(pair[i / 2]);
    }
}

__device__ inline uint4 mn_curve_pack_vec16(const float (&x)[8]) {
    return make_uint4(mn_bf16x2(x[0], x[1]), mn_bf16x2(x[2], x[3]), mn_bf16x2(x[4], x[5]),
                      mn_bf16x2(x[6], x[7]));
}

/* Tokens behind a sequence's last become zeros in a tile of 64 rows: they are another's. A warp
 * calls. */
template <int KP>
__device__ inline void mn_curve_zero_end(unsigned char *tile, int count) {
    constexpr int vec16s = KP / 8;
    for (int n = threadIdx.x % 32; n < (MN_CURVE_CHUNK - count) * vec16s; n += 32) {
        const uint32_t at = mn_swizzle_byte(64, count + n / vec16s, n % vec16s * 8);
        *(uint4 *)(tile + at) = make_uint4(0, 0, 0, 0);
    }
}

/* Numbers of tokens as a right operand, rows by tokens: the first row has them rounded, the second
 * what that leaves; what products with the others make nobody reads. */
struct alignas(1024) mn_curve_token_row {
    unsigned char at[8 * 128];

    __device__ void put(int token, float x) {
        const mn_bf16 rounded = __float2bfloat16_rn(x);
        *(mn_bf16 *)(at + mn_swizzle_byte(8, 0, token)) = rounded;
        *(mn_bf16 *)(at + mn_swizzle_byte(8, 1, token)) =
            __float2bfloat16_rn(x - mn_float(rounded));
    }
};

/* The running vector (s or e) of a warp's 16 columns, which its group makes from the left operands
 * that it has, beside their other products: the two halves of its sums are the first two of eight
 * columns, which the first lane of each quad has, in rows lane / 4 and that plus 8. */
struct mn_curve_row_vector {
    float at[4];

    __device__ void load(const float *from, int64_t K, int column) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int64_t j = column + threadIdx.x % 32 / 4 + i / 2 * 8;
            const bool own = i % 2 == 0 && threadIdx.x % 4 == 0 && j < K;
            at[i] = own ? mn_get(from, j) : 0.0f;
        }
    }

    __device__ void read(float (&e)[2]) const {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            e[r] = __shfl_sync(0xffffffffu, at[2 * r] + at[2 * r + 1], threadIdx.x % 32 & ~3);
        }
    }

#if MN_HAS_WGMMA
    /* Starts += a x for the tokens of a left operand. */
    __device__ void add(const uint32_t (&a)[16], const mn_curve_token_row &x) {
        const uint64_t b = mn_smem_desc(mn_smem_addr(x.at), 16);
#pragma unroll
        for (int step = 0; step < 4; step++) {
            asm volatile("wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0, %1, %2, %3}, "
                         "{%4, %5, %6, %7}, %8, 1, 1, 1, 0;"
                         : "+f"(at[0]), "+f"(at[1]), "+f"(at[2]), "+f"(at[3])
                         : "r"(a[4 * step]), "r"(a[4 * step + 1]), "r"(a[4 * step + 2]),
                           "r"(a[4 * step + 3]), "l"(b + 2 * step));
        }
    }
#endif

    __device__ void store(float *to, int64_t K, int column) const {
        float e[2];
        read(e);
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const int64_t j = column + threadIdx.x % 32 / 4 + 8 * r;
            if (to && threadIdx.x % 4 == 0 && j < K) to[j] = e[r];
        }
    }
};

#if MN_HAS_WGMMA

/* One warp group alone; the number of its barrier is that of the group, not 0. */
__device__ inline void mn_curve_group_sync(int number) {
    mn_named_barrier_sync(number, 128);
}

/* A warp: put(slot, i, -gamma / n, 1 / n) for token i of each chunk, which has slot `slot` of
 * STAGES; gammas are asked for a chunk before. */
template <int STAGES, typename Smem, typename F>
__device__ inline void mn_curve_weigh_chunks(Smem &smem, const mn_curvature_args &p,
                                             const mn_curve_place &at, F put) {
    const int lane = threadIdx.x % 32, n_chunks = (at.s.rows + 63) / 64;
    const int64_t seen = (int64_t)mn_curve_before(p, at.s.n) + at.s.first;
    const mn_bf16 *gammas = mn_row<mn_bf16>(p.gamma, at.s.span.b, at.s.span.t0 + at.s.first, at.h);
    const auto gamma_of = [&](int t) {
        return t < at.s.rows ? gammas[t * p.gamma.stride[1]] : __float2bfloat16_rn(0.0f);
    };
    mn_bf16 gamma[2] = { gamma_of(lane), gamma_of(32 + lane) };
    for (int c = 0; c < n_chunks; c++) {
        const int slot = c % STAGES;
        const mn_bf16 next[2] = { gamma_of(64 * c + 64 + lane), gamma_of(64 * c + 96 + lane) };
        mn_mbarrier_wait(&smem.gone[slot], (c / STAGES & 1) ^ 1);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int i = 32 * half + lane;
            const float each = 1.0f / (float)(seen + 64 * c + i + 1);
            put(slot, i, -__bfloat162float(gamma[half]) * each, each);
            gamma[half] = next[half];
        }
        mn_mbarrier_arrive(&smem.ready[slot]);
    }
}

/* Offsets in tiles are constants in units of 16 bytes, which one addition to the tile's own address
 * reaches.
 *
 * d += a b' over KP columns of tile `b` of SMEM_TILE rows, of which the first 64 count; d starts
 * from 0 unless there is `more`. */
template <int KP, int SMEM_TILE>
__device__ inline void mn_curve_rows(float (&d)[32], const uint32_t (&a)[KP / 4], uint32_t b,
                                     bool more = true) {
    const uint64_t at = mn_smem_desc(b, 16);
#pragma unroll
    for (int k = 0; k < KP; k += 16) {
        mn_wgmma<0>(d, a + k / 4, at + (k / 64 * SMEM_TILE * 8 + k % 64 / 8), more || k > 0);
    }
}

/* d += a b, tile `b` of SMEM_TILE rows; N / 2 64 columns */
template <int SMEM_TILE, int N>
__device__ inline void mn_curve_depth(float (&d)[N], const uint32_t (&a)[16], uint32_t b) {
    const uint64_t at = mn_smem_desc(b, SMEM_TILE * 128);
#pragma unroll
    for (int step = 0; step < 4; step++) mn_wgmma<1>(d, a + 4 * step, at + step * 16 * 8, 1);
}

/* d += a b' over 64 columns */
__device__ inline void mn_curve_square(float (&d)[32], const uint32_t (&a)[16], uint32_t b) {
    const uint64_t at = mn_smem_desc(b, 16);
#pragma unroll
    for (int step = 0; step < 4; step++) mn_wgmma<0>(d, a + 4 * step, at + step * 2, 1);
}

/* d = a b' for 64 rows a and the 72 rows of a tile of keys. */
template <int KP>
__device__ inline void mn_curve_scores_start(float (&d)[36], uint32_t a, uint32_t b) {
    const uint64_t at_a = mn_smem_desc(a, 16), at_b = mn_smem_desc(b, 16);
#pragma unroll
    for (int k = 0; k < KP; k += 16) {
        const uint64_t left = at_a + (k / 64 * MN_CURVE_SQUARE / 16 + k % 64 / 8);
        const uint64_t right = at_b + (k / 64 * MN_CURVE_ROWS * 8 + k % 64 / 8);
        asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %38, 0;\n\t"
                     "wgmma.mma_async.sync.aligned.m64n72k16.f32.bf16.bf16 {"
                     "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, "
                     "%17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
                     "%32, %33, %34, %35}, %36, %37, p, 1, 1, 0, 0;\n\t}"
                     : MN_ACC16(0), MN_ACC16(16), MN_ACC4(32)
                     : "l"(left), "l"(right), "r"((int)(k > 0)));
    }
}

/* Scores going back: d = a b' for tiles of 64 rows, begun. */
template <int KP>
__device__ inline void mn_curve_back_product(float (&d)[32], uint32_t a, uint32_t b) {
    const uint64_t at_a = mn_smem_desc(a, 16), at_b = mn_smem_desc(b, 16);
#pragma unroll
    for (int k = 0; k < KP; k += 16) {
        const int at = k / 64 * MN_CURVE_SQUARE / 16 + k % 64 / 8;
        mn_wgmma<0>(d, at_a + at, at_b + at, k > 0);
    }
    mn_wgmma_commit();
}

#endif

/* ---- going back (curvature_bwd_sm90.cu) ------------------------------------------------------ */

struct mn_curve_back_maps {
    CUtensorMap q, k, d;
    bool has_d;    // a cotangent of results; else d is zeros
};

/* False: the tensors cannot be mapped. */
bool mn_curve_back_map(mn_curve_back_maps *maps, const mn_curvature_args *p);

/* What each segment adds to R and s (from maps.k), or to G and e (from maps.q, maps.d and w.means),
 * and the sums up to each (curvature_moments_sm90.cu); nothing if no sequence can have more than
 * one segment. */
int mn_curve_group_sums(const mn_curvature_args *p, const mn_curve_back_maps &maps, float *states,
                        const mn_curve_cut &cut, cudaStream_t on);
int mn_curve_group_sums_back(const mn_curvature_args *p, const mn_curve_back_maps &maps,
                             const mn_curve_work &w, const mn_curve_cut &cut, cudaStream_t on);

/* Gradients of q and gamma, for which w.means and w.parts are left; then those of keys, with
 * dgamma, and of states. */
int mn_curve_back_queries(const mn_curvature_args *p, const mn_curve_back_maps &maps,
                          const mn_curve_work &w, const mn_curve_cut &cut, cudaStream_t on);
int mn_curve_back_keys(const mn_curvature_args *p, const mn_curve_back_maps &maps,
                       const mn_curve_work &w, const mn_curve_cut &cut, cudaStream_t on);

}    // namespace mneme::curvature

#endif
