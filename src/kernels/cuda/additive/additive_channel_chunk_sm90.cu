/* additive_channel_chunk_sm90.cu - additive over chunks on Hopper where each channel has a decay:
 * the state scans of o and dv, and the gradients of all chunks at once. */

#include "kernels/cuda/additive/additive_channel_scale.cuh"
#include "kernels/cuda/prim/mbarrier.cuh"
#include "kernels/cuda/prim/tma.cuh"
#include "kernels/cuda/additive/additive.cuh"
#include "kernels/cuda/prim/sync.cuh"

namespace mneme::additive {

/* Scans of keys with decays per channel on Hopper, for bf16 and keys of up to 128: what
 * additive_channel_chunk.cu computes, here by groups of warps that work on different chunks of 32
 * tokens.
 *
 *   o    O = scale (Q~ M + P V)       M <- f M + K~'V
 *   dv   O = scale (K~ M + P'V)       M <- f M + Q~'V     in reverse, V the gradient of o
 *
 * M (K, 64 value columns) is the state, f (K) the decay of each channel over the chunk. Q~ (32, K)
 * are queries times the decays from the chunk's start, K~ (32, K) keys times those to its end, P
 * (32, 32) scores of its own tokens. One warp loads tiles by TMA, chunks ahead, and one stores
 * results. Eight warps scale: they write Q~ and K~ over queries and keys in shared memory, and
 * scores and f over the decays. A group of four warps keeps M, transposed, in its registers and
 * writes results over the values. */

/* What decays per channel make of a chunk of 32 tokens, by a pair of warps on Hopper, each of
 * which has half of the channels.
 *
 * With e_t the sum of log2 decays from the start of a part of 16 tokens to token t, and f_0, f_1
 * the channel's decays over the two parts,
 *
 *   P inside a part     (q_t 2^(e_t)) . (k_s 2^(-e_s))
 *   P across            (q_t 2^(e_t) f_0) . (k_s 2^(-e_s))
 *   Q~                  q_t 2^(e_t), in the second part times f_0
 *   K~                  k_s 2^(-e_s) times f of its part, in the first part times f_1 too
 *
 * Sums are products of tensor cores with a triangle of log2 e, as two bf16 numbers, and so come
 * where the factors of q and k lie: nothing but tiles passes through shared memory. Where a
 * channel has decayed by 2^100 or more up to a key of the part, 2^(-e_s) would overflow: scores of
 * such keys are added up one by one, from differences of e. Keys before stay as they are, so that
 * no token's bits depend on later decays; K~ of all keys of the part's channel is made of
 * differences. */

enum {
    MN_GATED_CHUNK = 2 * MN_SUBCHUNK,
    MN_GATED_STAGES = 8,                       // chunks under way
    MN_GATED_PAIRS = 4,                        // chunks that are made at a time
    MN_GATED_SMEM_TILE = MN_GATED_CHUNK * 128,     // bytes of a tile of 64 columns
    MN_GATED_SUB_BYTES = MN_SUBCHUNK * 128,             // of a part's rows
};

/* Tiles have rows of 64 columns, 128 bytes each, 16-byte vector o of row r at place o ^ (r % 8). */
__device__ inline uint32_t mn_gated_swizzle(int row, int vec16) {
    return (uint32_t)(row * 128 + (((vec16 ^ row) & 7) << 4));
}

/* A chunk in shared memory: q, k (32, KP), v (32, 64). `g` has the log decays (32, KP); afterwards
 * the scores (32, 32) in its first tile, and in the second what the two warps of a pair exchange,
 * and the decays of channels over the chunk (KP). */
template <int KP>
struct alignas(1024) mn_gated_stage {
    unsigned char q[KP / 64 * MN_GATED_SMEM_TILE], k[KP / 64 * MN_GATED_SMEM_TILE];
    unsigned char g[2 * MN_GATED_SMEM_TILE];
    unsigned char v[MN_GATED_SMEM_TILE];

    __device__ unsigned char *scores(void) { return g; }
    __device__ float4 *given(int half) { return (float4 *)(g + MN_GATED_SMEM_TILE) + half * 96; }
    __device__ float *cum_decays(void) { return (float *)(g + MN_GATED_SMEM_TILE + 2 * 96 * 16); }
};

/* Barriers of stages: tiles have come, are made, have been used, are free. */
template <int KP>
struct mn_gated_smem {
    mn_gated_stage<KP> stage[MN_GATED_STAGES];
    uint64_t full[MN_GATED_STAGES], scaled[MN_GATED_STAGES];
    uint64_t out_full[MN_GATED_STAGES], empty[MN_GATED_STAGES];
    mn_scan_coord place;
};

/* The first token of the chunk that is number `iter` of the segment's scan, from the sequence's
 * start. */
__device__ inline int64_t mn_gated_token0(const mn_scan_coord &at, bool reverse, int iter) {
    const int64_t n = at.iter + iter;
    return (reverse ? at.n_chunks - 1 - n : n) * MN_GATED_CHUNK;
}

__device__ inline int mn_gated_chunk_len(const mn_scan_coord &at, int64_t t) {
    return (int)min((int64_t)MN_GATED_CHUNK, at.span.length - t);
}

#if MN_HAS_WGMMA

template <bool TRANS = false>
__device__ inline void mn_gated_stmatrix(uint32_t at, const uint32_t (&r)[4]) {
    if (TRANS) {
        asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                         at), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]) : "memory");
    } else {
        asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at),
                     "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]) : "memory");
    }
}

template <bool TRANS = false>
__device__ inline void mn_gated_stmatrix(uint32_t at, uint32_t r0, uint32_t r1) {
    if (TRANS) {
        asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(at),
                     "r"(r0), "r"(r1) : "memory");
    } else {
        asm volatile("stmatrix.sync.aligned.m8n8.x2.shared.b16 [%0], {%1, %2};" ::"r"(at), "r"(r0),
                     "r"(r1) : "memory");
    }
}

/* The same number, which the compiler then keeps in a register instead of making it again and again
 * where it is used. */
__device__ inline uint32_t mn_gated_pin_reg(uint32_t x) {
    return __shfl_sync(0xffffffffu, x, threadIdx.x % 32);
}

/* The triangle of ones times log2 e as a left operand: its upper right quarter is zero. */
struct mn_gated_cumsum_mma {
    uint32_t low[4], high[4];    // log2 e = high + low

    __device__ mn_gated_cumsum_mma() {
        const uint32_t rest = 0xbb2c, most = 0x3fb9;    // -0.0026245, 1.4453125
        const int row = threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
        const uint32_t mask = (column <= row ? 0xffffu : 0) | (column < row ? 0xffff0000u : 0);
        low[1] = rest << 16 | rest, high[1] = most << 16 | most, low[2] = high[2] = 0;
        low[0] = low[3] = low[1] & mask, high[0] = high[3] = high[1] & mask;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if (i != 2) low[i] = mn_gated_pin_reg(low[i]), high[i] = mn_gated_pin_reg(high[i]);
        }
    }

    __device__ static void multiply(float (&e)[4], const uint32_t (&a)[4], uint32_t b0,
                                    uint32_t b1, const float (&c)[4]) {
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, "
                     "{%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};"
                     : "=f"(e[0]), "=f"(e[1]), "=f"(e[2]), "=f"(e[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c[0]),
                       "f"(c[1]), "f"(c[2]), "f"(c[3]));
    }

    /* Sums over tokens of eight channels; a decay below exp(-208) leaves nothing of a float. */
    __device__ void sum(float (&e)[4], uint32_t g0, uint32_t g1) const {
        const float zero[4] = {};
        float rest[4];
        asm("max.NaN.bf16x2 %0, %0, %1;" : "+r"(g0) : "r"(0xc350c350));
        asm("max.NaN.bf16x2 %0, %0, %1;" : "+r"(g1) : "r"(0xc350c350));
        multiply(rest, low, g0, g1, zero);
        multiply(e, high, g0, g1, rest);
    }
};

/* Numbers of 16 tokens and 16 channels: number i of eight channels n is of token
 * lane / 4 + i / 2 * 8 and channel 8 n + lane % 4 * 2 + i % 2. */
typedef float mn_gated_acc[2][4];

/* Sums of decays, their factors, and that of the last token of two channels in each eight. */
struct mn_gated_decay_factors {
    mn_gated_acc e, up;
    float whole[2][2];

    __device__ static int last(void) {
        return 28 + threadIdx.x % 4;
    }

    __device__ void make(const mn_gated_cumsum_mma &triangle, uint32_t tile) {
        uint32_t g[4];
        mn_gated_ldmatrix<true>(g, tile);
#pragma unroll
        for (int n = 0; n < 2; n++) {
            triangle.sum(e[n], g[2 * n], g[2 * n + 1]);
#pragma unroll
            for (int i = 0; i < 4; i++) up[n][i] = mn_exp2(e[n][i]);
            whole[n][0] = __shfl_sync(0xffffffffu, up[n][2], last());
            whole[n][1] = __shfl_sync(0xffffffffu, up[n][3], last());
        }
    }

    __device__ static bool is_underflow(float cum_decay) {
        return !(cum_decay > 0x1p-100f);
    }

    __device__ bool has_underflow(void) const {
        return is_underflow(fminf(fminf(whole[0][0], whole[0][1]),
                                  fminf(whole[1][0], whole[1][1])));
    }
};

/* y = x times factors */
__device__ inline void mn_gated_scale_rows(mn_gated_acc &y, const uint32_t (&x)[4],
                                      const mn_gated_acc &factor) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        y[i / 2][i % 2 * 2] = mn_bf16_lo(x[i]) * factor[i / 2][i % 2 * 2];
        y[i / 2][i % 2 * 2 + 1] = mn_bf16_hi(x[i]) * factor[i / 2][i % 2 * 2 + 1];
    }
}

/* x times the decay of its channel */
__device__ inline void mn_gated_decay_rows(mn_gated_acc &y, const mn_gated_acc &x,
                                      const float (&cum_decay)[2][2]) {
#pragma unroll
    for (int i = 0; i < 8; i++) y[i / 4][i % 4] = x[i / 4][i % 4] * cum_decay[i / 4][i % 2];
}

/* Keys of a part: with what has fallen before them taken back, and lowered to the chunk's end. */
struct mn_gated_scaled_keys {
    mn_gated_acc inside, to_end;

    /* `cum_decay`: of the channels, from the part's start to the chunk's end */
    __device__ void make(const mn_gated_decay_factors &f, const uint32_t (&k)[4],
                         const float (&cum_decay)[2][2]) {
        mn_gated_acc down;
#pragma unroll
        for (int i = 0; i < 8; i++) down[i / 4][i % 4] = mn_exp2(-f.e[i / 4][i % 4]);
        mn_gated_scale_rows(inside, k, down);
        mn_gated_decay_rows(to_end, inside, cum_decay);
    }
};

/* ---- channels that decay too far ------------------------------------------------------------- */

/* Which of them do, by lanes, and of keys that are too far from the part's start the sums of
 * decays up to them, and how far they are from its end; others have an infinity, so that their
 * factors are 0. */
struct mn_gated_underflow {
    unsigned mask[2][2];
    mn_gated_acc far, left;
    /* Makes their keys once more: zeros inside the part for those too far; `after` is the decay of
     * channels behind the part. */
    __device__ void recompute(mn_gated_scaled_keys &keys, const mn_gated_decay_factors &f,
                              const uint32_t (&k)[4],
                         const float (&after)[2][2]) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int n = i / 2, j = i % 2;
            const bool local = f.is_underflow(f.whole[n][j]);
            const float end = __shfl_sync(0xffffffffu, f.e[n][2 + j], f.last());
            mask[n][j] = __ballot_sync(0xffffffffu, local);
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const uint32_t pair = k[2 * n + half];
                const int at = 2 * half + j;
                const float to_end = f.e[n][at] - end;
                const bool too_far = !(f.e[n][at] > -100.0f);
                far[n][at] = too_far ? f.e[n][at] : INFINITY;
                left[n][at] = too_far ? to_end : INFINITY;
                if (!local) continue;
                if (too_far) keys.inside[n][at] = 0.0f;
                keys.to_end[n][at] =
                    (j ? mn_bf16_hi(pair) : mn_bf16_lo(pair)) * mn_exp2(-to_end) * after[n][j];
            }
        }
    }

    /* P += their scores one by one: q_t k_s 2^(row_t - column_s). */
    __device__ void add(float (&P)[2][4], const uint32_t (&q)[4], const mn_gated_acc &rows,
                        const uint32_t (&k)[4], const mn_gated_acc &columns) const {
        const int lane = threadIdx.x % 32;
#pragma unroll 1
        for (int channel = 0; channel < 16; channel++) {
            const bool right = channel >= 8, odd = channel % 2;
            const int from = channel % 8 / 2;
            const unsigned first = odd ? mask[0][1] : mask[0][0];
            const unsigned second = odd ? mask[1][1] : mask[1][0];
            if (!((right ? second : first) >> from & 1)) continue;
            float row[2], column[2], read[2], write[2];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const uint32_t x = right ? q[2 + i] : q[i], y = right ? k[2 + i] : k[i];
                const int low = 2 * i, high = low + 1;
                row[i] = right ? (odd ? rows[1][high] : rows[1][low])
                               : (odd ? rows[0][high] : rows[0][low]);
                column[i] = right ? (odd ? columns[1][high] : columns[1][low])
                                  : (odd ? columns[0][high] : columns[0][low]);
                read[i] = odd ? mn_bf16_hi(x) : mn_bf16_lo(x),
                    write[i] = odd ? mn_bf16_hi(y) : mn_bf16_lo(y);
            }
#pragma unroll
            for (int i = 0; i < 4; i++) {    // row half i / 2, one of two columns
                const int t_at = (lane & ~3) + from, s_at = (lane % 4 * 2 + i % 2) * 4 + from;
                const float t = __shfl_sync(0xffffffffu, row[i / 2], t_at);
                const float x = __shfl_sync(0xffffffffu, read[i / 2], t_at);
#pragma unroll
                for (int n = 0; n < 2; n++) {
                    const float s = __shfl_sync(0xffffffffu, column[n], s_at);
                    const float y = __shfl_sync(0xffffffffu, write[n], s_at);
                    P[n][i] = fmaf(x * y, mn_exp2(t - s), P[n][i]);
                }
            }
        }
    }
};

/* P += x y' for 16 tokens each, 16 channels deep. */
__device__ inline void mn_gated_mma_scores(float (&P)[2][4], const uint32_t (&x)[4],
                                      const uint32_t (&y)[4]) {
    mn_mma(P[0], x, y[0], y[2]);
    mn_mma(P[1], x, y[1], y[3]);
}

/* Scores of a warp's channels: inside the two parts, and of the second with the first. */
struct mn_gated_scores {
    float own[2][2][4], across[2][4];
};

/* Channels that decay too far, in either part. */
__device__ inline void mn_gated_fix_underflow(mn_gated_scores &P, mn_gated_scaled_keys (&keys)[2],
                                     const mn_gated_decay_factors (&f)[2],
                                         const uint32_t (&q)[2][4],
                                     const uint32_t (&k)[2][4]) {
    const float one[2][2] = { { 1.0f, 1.0f }, { 1.0f, 1.0f } };
    mn_gated_underflow deep;
    deep.recompute(keys[1], f[1], k[1], one);
    deep.add(P.own[1], q[1], f[1].e, k[1], deep.far);
    deep.recompute(keys[0], f[0], k[0], f[1].whole);
    deep.add(P.own[0], q[0], f[0].e, k[0], deep.far);
    deep.add(P.across, q[1], f[1].e, k[0], deep.left);
}

/* 16 channels of a chunk, whose tiles lie at q, k and g; stores their decays over the
 * chunk. */
__device__ inline void mn_gated_scale_channels(mn_gated_scores &P, float (&cum_decay)[2][2],
                                         const mn_gated_cumsum_mma &triangle, uint32_t q,
                                             uint32_t k,
                                         uint32_t g) {
    mn_gated_decay_factors f[2];
    mn_gated_scaled_keys keys[2];
    uint32_t x[2][4], y[2][4], left[4], right[2][4];
#pragma unroll
    for (int part = 0; part < 2; part++) {
        f[part].make(triangle, g + part * MN_GATED_SUB_BYTES);
        mn_gated_ldmatrix<false>(y[part], k + part * MN_GATED_SUB_BYTES);
        mn_gated_ldmatrix<false>(x[part], q + part * MN_GATED_SUB_BYTES);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        cum_decay[i / 2][i % 2] = f[0].whole[i / 2][i % 2] * f[1].whole[i / 2][i % 2];
    }
    keys[0].make(f[0], y[0], cum_decay);
    keys[1].make(f[1], y[1], f[1].whole);
    if (__any_sync(0xffffffffu, f[0].has_underflow() || f[1].has_underflow())) {
        mn_gated_fix_underflow(P, keys, f, x, y);
    }
#pragma unroll
    for (int part = 0; part < 2; part++) {
        mn_gated_acc queries;
        mn_gated_scale_rows(queries, x[part], f[part].up);
        mn_frag_a_of(left, queries[0], queries[1]);
        mn_frag_a_of(right[part], keys[part].inside[0], keys[part].inside[1]);
        mn_gated_mma_scores(P.own[part], left, right[part]);
        if (part == 1) {
            mn_gated_decay_rows(queries, queries, f[0].whole);
            mn_frag_a_of(left, queries[0], queries[1]);
            mn_gated_mma_scores(P.across, left, right[0]);
        }
        mn_gated_stmatrix(q + part * MN_GATED_SUB_BYTES, left);
        mn_frag_a_of(left, keys[part].to_end[0], keys[part].to_end[1]);
        mn_gated_stmatrix(k + part * MN_GATED_SUB_BYTES, left);
    }
}

/* The same where only states are wanted: keys, or queries against time. */
__device__ inline void mn_gated_scale_writes(float (&cum_decay)[2][2],
                                             const mn_gated_cumsum_mma &triangle,
                                       uint32_t q, uint32_t k, uint32_t g, bool reverse) {
    mn_gated_decay_factors f[2];
    uint32_t x[2][4], y[4];
    const uint32_t at = reverse ? q : k;
#pragma unroll
    for (int part = 0; part < 2; part++) {
        f[part].make(triangle, g + part * MN_GATED_SUB_BYTES);
        mn_gated_ldmatrix<false>(x[part], at + part * MN_GATED_SUB_BYTES);
    }
#pragma unroll
    for (int part = 0; part < 2; part++) {
        mn_gated_acc factor, rows;
        float end[2][2];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            end[i / 2][i % 2] =
                __shfl_sync(0xffffffffu, f[part].e[i / 2][2 + i % 2], f[part].last());
        }
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const float left = mn_exp2(end[i / 4][i % 2] - f[part].e[i / 4][i % 4]);
            factor[i / 4][i % 4] = reverse ? f[part].up[i / 4][i % 4] : left;
        }
        mn_gated_scale_rows(rows, x[part], factor);
        if (reverse == (part == 1)) mn_gated_decay_rows(rows, rows, f[1 - part].whole);
        mn_frag_a_of(y, rows[0], rows[1]);
        mn_gated_stmatrix(at + part * MN_GATED_SUB_BYTES, y);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        cum_decay[i / 2][i % 2] = f[0].whole[i / 2][i % 2] * f[1].whole[i / 2][i % 2];
    }
}

/* Tokens behind a sequence's last become zeros, in a warp's own 16-byte vectors of rows of q, k
 * and g; the
 * first warp of a pair has the values. */
template <int KP>
__device__ inline void mn_gated_zero_tail(mn_gated_stage<KP> &in, int count, int half) {
    constexpr int vec16s = KP / 16;
    const uint4 zeros = make_uint4(0, 0, 0, 0);
    const int left = MN_GATED_CHUNK - count;
#pragma unroll 1
    for (int i = threadIdx.x % 32; i < left * vec16s; i += 32) {
        const int row = count + i / vec16s, vec16 = half * vec16s + i % vec16s;
        const uint32_t at = vec16 / 8 * MN_GATED_SMEM_TILE + mn_gated_swizzle(row, vec16);
        *(uint4 *)(in.q + at) = zeros, *(uint4 *)(in.k + at) = zeros;
        *(uint4 *)(in.g + at) = zeros;
    }
#pragma unroll 1
    for (int i = threadIdx.x % 32; half == 0 && i < left * 8; i += 32) {
        *(uint4 *)(in.v + mn_gated_swizzle(count + i / 8, i % 8)) = zeros;
    }
    __syncwarp();
}

__device__ inline void mn_gated_pair_sync(int pair) {
    mn_named_barrier_sync(pair + 1, 64);
}

/* The two warps of a pair add up their scores; each has the rest of one part, and eight columns of
 * what lies across. Against time they are transposed. */
template <int KP>
__device__ inline void mn_gated_reduce_scores(mn_gated_stage<KP> &in, mn_gated_scores &P, int half,
                                     int pair, bool reverse) {
    const int lane = threadIdx.x % 32;
    const uint32_t tile = mn_smem_addr(in.scores());
    float sum[3][4];
    float4 *give = in.given(half) + lane;
    const float4 *take = in.given(1 - half) + lane;
#pragma unroll
    for (int i = 0; i < 3; i++) {
        const float(&first)[4] = i < 2 ? P.own[0][i] : P.across[0];
        const float(&second)[4] = i < 2 ? P.own[1][i] : P.across[1];
        give[32 * i] = half ? make_float4(first[0], first[1], first[2], first[3])
                            : make_float4(second[0], second[1], second[2], second[3]);
#pragma unroll
        for (int j = 0; j < 4; j++) sum[i][j] = half ? second[j] : first[j];
    }
    mn_gated_pair_sync(pair);
#pragma unroll
    for (int i = 0; i < 3; i++) {
        const float4 x = take[32 * i];
        sum[i][0] += x.x, sum[i][1] += x.y, sum[i][2] += x.z, sum[i][3] += x.w;
    }
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const int column = 8 * (i / 4) + lane % 4 * 2 + i % 2, row = lane / 4 + i % 4 / 2 * 8;
        if (column > row) sum[i / 4][i % 4] = 0.0f;
    }
    uint32_t own[4];
    mn_frag_a_of(own, sum[0], sum[1]);
    const uint32_t across[2] = { mn_bf16x2(sum[2][0], sum[2][1]), mn_bf16x2(sum[2][2], sum[2][3]) };
    // part by part: rows; vec16s 2 half
    const uint32_t corner = tile + half * MN_GATED_SUB_BYTES;
    if (reverse) {
        const int down = lane % 8 + lane / 16 * 8, along = lane / 8 % 2;
        mn_gated_stmatrix<true>(corner + mn_gated_swizzle(down, 2 * half + along), own);
        mn_gated_stmatrix<true>(tile + mn_gated_swizzle(8 * half + lane % 8, 2 + along), across[0],
                           across[1]);
        mn_gated_stmatrix(tile + MN_GATED_SUB_BYTES + mn_gated_swizzle(lane % 16, half), 0, 0);
    } else {
        mn_gated_stmatrix(corner + mn_gated_swizzle(lane % 16, 2 * half + lane / 16), own);
        mn_gated_stmatrix(tile + MN_GATED_SUB_BYTES + mn_gated_swizzle(lane % 16, half),
                          across[0], across[1]);
        mn_gated_stmatrix(tile + mn_gated_swizzle(lane % 16, 2 + half), 0, 0);
    }
}

/* The first `count` values become zeros. A warp calls. */
template <int KP>
__device__ inline void mn_gated_zero_head(mn_gated_stage<KP> &in, int count) {
    for (int i = threadIdx.x % 32; i < 8 * count; i += 32) {
        *(uint4 *)(in.v + mn_gated_swizzle(i / 8, i % 8)) = make_uint4(0, 0, 0, 0);
    }
    __syncwarp();
}

/* What the warps that scale do. */
template <int KP, bool HAS_OUT, bool REDO>
__device__ inline void mn_gated_scale(mn_gated_smem<KP> &smem, bool reverse) {
    constexpr int steps = KP / 32;    // of 16 channels, of a warp
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % (2 * MN_GATED_PAIRS);
    const int pair = warp % MN_GATED_PAIRS, half = warp / MN_GATED_PAIRS;
    const int iters = (int)(smem.place.end - smem.place.iter);
    const int last = (int)smem.place.n_chunks - 1, iter = (int)smem.place.iter;
    const int ending = reverse ? -iter : last - iter;    // when the sequence's last chunk comes
    const int count = (int)smem.place.span.length - last * MN_GATED_CHUNK;    // its tokens
    const mn_gated_cumsum_mma triangle;
    const uint32_t first =
        mn_gated_pin_reg(mn_smem_addr(&smem) + mn_gated_swizzle(lane % 16, lane / 16));
    for (int n = pair; n < iters; n += MN_GATED_PAIRS) {
        const int slot = n % MN_GATED_STAGES;
        mn_gated_stage<KP> &in = smem.stage[slot];
        mn_gated_scores P = {};
        float cum_decays[2][2];
        mn_mbarrier_wait(&smem.full[slot], n / MN_GATED_STAGES & 1);
        if (n == ending && count < MN_GATED_CHUNK) mn_gated_zero_tail<KP>(in, count, half);
        if (REDO && half == 0) {
            const int64_t t = mn_gated_token0(smem.place, reverse, n);
            mn_gated_zero_head(in, (int)(smem.place.from - t));
        }
#pragma unroll 1
        for (int step = 0; step < steps; step++) {
            const int k = half * steps + step;
            const uint32_t q =
                ((first + slot * (int)sizeof(in)) ^ k % 4 * 32) + k / 4 * MN_GATED_SMEM_TILE;
            float cum_decay[2][2];
            const uint32_t keys = q + (int)sizeof(in.q), g = keys + (int)sizeof(in.q);
            if (HAS_OUT) mn_gated_scale_channels(P, cum_decay, triangle, q, keys, g);
            else mn_gated_scale_writes(cum_decay, triangle, q, keys, g, reverse);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                if (lane / 4 == step) cum_decays[i / 2][i % 2] = cum_decay[i / 2][i % 2];
            }
        }
        mn_gated_pair_sync(pair);    // both have read the decays
        if (lane / 4 < steps) {
            float *to = in.cum_decays() + (half * steps + lane / 4) * 16 + lane % 4 * 2;
            *(float2 *)to = make_float2(cum_decays[0][0], cum_decays[0][1]);
            *(float2 *)(to + 8) = make_float2(cum_decays[1][0], cum_decays[1][1]);
        }
        if (HAS_OUT) mn_gated_reduce_scores<KP>(in, P, half, pair, reverse);
        mn_fence_proxy_async();
        mn_mbarrier_arrive_warp(&smem.scaled[slot]);
    }
}

#endif

/* Gradients of queries, keys and decays where each channel has its own decay, on Hopper, from
 * states that the scans above have left: S in front of each chunk of 64 tokens, and its gradient N
 * behind it.
 *
 *   dq_t = scale (2^(e_t) S do_t + sum over s <= t of (do_t.v_s) 2^(e_t - e_s) k_s)
 *   dk_s = scale (2^(E - e_s) N v_s + sum over t >= s of (do_t.v_s) 2^(e_t - e_s) q_t)
 *   dg_t = scale sum over V of N (2^E S + sum over s of 2^(E - e_s) k_s v_s')
 *          + sum over u >= t of (q_u dq_u - k_u dk_u)
 *
 * with e the sums of log2 decays from the chunk's start, E that of the chunk; no dg takes in what
 * an earlier token's do makes. They are taken from part to part of 16 tokens as in
 * additive_channel_chunk.cu, and inside a part as additive_channel_scale.cuh says. No chunk waits
 * for another: a block has 64 channels of one chunk of one head; four warps have queries, four
 * keys, each those of one part. */

enum {
    MN_GATED_GRAD_CHUNK = MN_SUBCHUNK_CHUNK,           // tokens between states
    MN_GATED_GRAD_TILE = MN_GATED_GRAD_CHUNK * 128,      // bytes of a tile of 64 columns
    MN_GATED_GRAD_THREADS = 64 * MN_SUBCHUNKS,        // threads
    MN_GATED_TERMS_LD = MN_SCAN_WIDTH + 4,       // floats between rows of terms
};

struct mn_gated_grad_params {
    mn_call call;
    CUtensorMap q, k, v, g, cot;
    mn_out dq, dk, dg;
    const mn_bf16 *S, *N;
    float scale;
    bool contain;    // q that is not finite reaches the tokens up to its own alone
};

/* States as they were kept: eight rows of 64 channels by eight columns each. */
template <int VP>
struct alignas(1024) mn_gated_grad_smem {
    unsigned char cot[VP / 64 * MN_GATED_GRAD_TILE], v[VP / 64 * MN_GATED_GRAD_TILE];
    unsigned char q[MN_GATED_GRAD_TILE], k[MN_GATED_GRAD_TILE], g[MN_GATED_GRAD_TILE];
    unsigned char q_inside[MN_GATED_GRAD_TILE], k_inside[MN_GATED_GRAD_TILE];
    unsigned char S[VP * 128], N[VP * 128];
    alignas(16) float cum_decay[MN_SUBCHUNKS][MN_SCAN_WIDTH];
    alignas(16) float read[MN_SUBCHUNKS][MN_SCAN_WIDTH];    // N v_s k~_s of parts
    alignas(16) float met[MN_SCAN_WIDTH];               // S with N
    alignas(16) float sums[2 * MN_SUBCHUNKS][MN_SCAN_WIDTH];    // terms of halves of parts
    int wild[MN_SCAN_WIDTH];    // the last token whose q is not finite, -1: none
    uint64_t front, back;                                   // what is made has come, the rest

    /* Of queries, or of keys, where tiles were that have been read. */
    __device__ float *terms(int of_keys) {
        return (float *)cot + of_keys * MN_GATED_GRAD_CHUNK * MN_GATED_TERMS_LD;
    }
};

#if MN_HAS_WGMMA
/* One thread asks TMA for all tiles. */
template <int VP>
__device__ inline void mn_gated_tma_load_all(mn_gated_grad_smem<VP> &smem,
                                          const mn_gated_grad_params &p, const mn_tile_span &at,
                                          int64_t slot, int h, int slice, int n_slices) {
    const int t = (int)(at.span.t0 + at.first), b = (int)at.span.b;
    const int64_t state = ((slot * p.call.H + h) * n_slices + slice) * (VP * MN_SCAN_WIDTH);
    mn_mbarrier_arrive_expect_tx(&smem.front, 3 * MN_GATED_GRAD_TILE);
    mn_tma_load(smem.g, p.g, &smem.front, 64 * slice, h, t, b);
    const int key = (int)mn_key_head(p.call, h);
    mn_tma_load(smem.q, p.q, &smem.front, 64 * slice, key, t, b);
    mn_tma_load(smem.k, p.k, &smem.front, 64 * slice, key, t, b);
    mn_mbarrier_arrive_expect_tx(&smem.back, 2 * (VP / 64) * MN_GATED_GRAD_TILE + 2 * VP * 128);
    mn_tma_load_1d(smem.S, p.S + state, VP * 128, &smem.back);
    mn_tma_load_1d(smem.N, p.N + state, VP * 128, &smem.back);
    for (int smem_tile = 0; smem_tile < VP / 64; smem_tile++) {
        const int at_smem_tile = smem_tile * MN_GATED_GRAD_TILE;
        mn_tma_load(smem.cot + at_smem_tile, p.cot, &smem.back, 64 * smem_tile, h, t, b);
        mn_tma_load(smem.v + at_smem_tile, p.v, &smem.back, 64 * smem_tile, h, t, b);
    }
}

/* Where one of several packed sequences ends, tokens of the next become zeros: `tiles` of 64 rows.
 * All threads of the block call. */
__device__ inline void mn_gated_zero_tail_tiles(unsigned char *first, int tiles, int n_rows) {
    const int each = (MN_GATED_GRAD_CHUNK - n_rows) * 8;
    for (int i = threadIdx.x; i < tiles * each; i += blockDim.x) {
        *(uint4 *)(first + i / each * MN_GATED_GRAD_TILE + n_rows * 128 + i % each * 16) =
            make_uint4(0, 0, 0, 0);
    }
    __syncthreads();
}

/* ---- log decays ------------------------------------------------------------------------------ */

/* A part's 16 tokens by 64 channels: number i of eight channels n is of token
 * lane / 4 + i / 2 * 8, channel 8 n + lane % 4 * 2 + i % 2. */
typedef float mn_gated_acc_tile[8][4];

__device__ inline int mn_gated_subchunk(void) {
    return threadIdx.x / 32 % MN_SUBCHUNKS;
}

/* Sums of log decays inside a part of a channel that decays too far, at a token and eight later:
 * see  * additive_channel_scale.cuh. `g` is the channel at the part's first token. */
static __device__ __noinline__ float2 mn_gated_clamp_decay(const unsigned char *tile, int part,
                                                           int channel,
                                                   int token) {
    const float usual = 12.5f, most = 200.0f;
    const auto fall_at = [&](int u) {
        const unsigned char *at = tile + mn_gated_swizzle(16 * part + u, channel / 8);
        return -mn_scale_log2(mn_float(((const mn_bf16 *)at)[channel % 8]));
    };
    float gentle = 0.0f, depth = 0.0f, d[2] = {};
    int steep = 0;
    for (int u = 1; u < MN_SUBCHUNK; u++) {
        const float cum_decay = fall_at(u);
        if (cum_decay > usual) steep++;
        else gentle += cum_decay;
    }
    const float limit = steep ? fmaxf(usual, (most - gentle) / (float)steep) : most;
    for (int u = 1; u < MN_SUBCHUNK; u++) {
        const float step = fminf(fall_at(u), limit);
        depth += step;
        if (u <= token) d[0] -= step;
        if (u <= token + 8) d[1] -= step;
    }
    return make_float2(d[0] + 0.5f * depth, d[1] + 0.5f * depth);
}

/* Sums of log2 decays, and which channels decay too far. */
struct mn_gated_log_decays {
    mn_gated_acc_tile e;
    unsigned deep;    // bit 2 n + j
    bool any;         // in the warp

    __device__ void make(uint32_t g) {
        const mn_gated_cumsum_mma triangle;
        deep = 0;
#pragma unroll
        for (int k = 0; k < 4; k++) {
            uint32_t b[4];
            mn_gated_ldmatrix<true>(b, g ^ k * 32);
            triangle.sum(e[2 * k], b[0], b[1]);
            triangle.sum(e[2 * k + 1], b[2], b[3]);
        }
#pragma unroll
        for (int i = 0; i < 16; i++) {
            if (end(i / 2, i % 2) < -100.0f) deep |= 1u << i;
        }
        any = __any_sync(0xffffffffu, deep != 0);
    }

    /* The sum of the whole part for channel j of eight channels n; a warp calls. */
    __device__ float end(int n, int j) const {
        return __shfl_sync(0xffffffffu, e[n][2 + j], 28 + threadIdx.x % 4);
    }

    /* x <- the sums of log decays inside the part, of 16 channels from 16 k on */
    __device__ void inside(float (&x)[2][4], int k, const unsigned char *tile) const {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int i = 0; i < 8; i++) x[i / 4][i % 4] = e[2 * k + i / 4][i % 4];
        if (!any) return;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if (!(deep >> (4 * k + i) & 1)) continue;
            const float2 d = mn_gated_clamp_decay(tile, mn_gated_subchunk(),
                                          16 * k + i / 2 * 8 + lane % 4 * 2 + i % 2, lane / 4);
            x[i / 2][i % 2] = d.x, x[i / 2][2 + i % 2] = d.y;
        }
    }
};

/* A left operand times 2^log_decay, number by number. */
__device__ inline void mn_gated_mul_exp2(uint32_t (&y)[4], const uint32_t (&x)[4],
                                      const float (&log_decay)[2][4]) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float(&l)[4] = log_decay[i / 2];
        y[i] = mn_bf16x2_mul(x[i], mn_exp2(l[i % 2 * 2]), mn_exp2(l[i % 2 * 2 + 1]));
    }
}

/* ---- products -------------------------------------------------------------------------------- */

/* Where this lane points in 16 rows and 16 columns of a tile: matrices down the rows first, or
 * along the columns first. */
__device__ inline uint32_t mn_gated_addr_rows(uint32_t tile, int row) {
    const int lane = threadIdx.x % 32;
    return tile + mn_gated_swizzle(row + lane % 16, lane / 16);
}

__device__ inline uint32_t mn_gated_addr_cols(uint32_t tile, int row) {
    const int lane = threadIdx.x % 32;
    return tile + mn_gated_swizzle(row + lane % 8 + lane / 16 * 8, lane / 8 % 2);
}

/* Rows of this warp's part, columns from 16 k on, as a left operand. */
__device__ inline void mn_gated_frag_a(uint32_t (&a)[4], uint32_t tile, int k) {
    mn_gated_ldmatrix<false>(a, (mn_gated_addr_rows(tile, 16 * mn_gated_subchunk()) ^ k % 4 * 32) +
                                    k / 4 * MN_GATED_GRAD_TILE);
}

/* o = x M for a kept state M and this part's rows x of a tile */
template <int VP>
__device__ inline void mn_gated_mma_state(mn_gated_acc_tile &o, uint32_t x, uint32_t M) {
    const int lane = threadIdx.x % 32;
    const uint32_t at = M + (lane / 8 % 2 * 8 + lane / 16) * 128 + lane % 8 * 16;
#pragma unroll
    for (int i = 0; i < 32; i++) o[i / 4][i % 4] = 0.0f;
#pragma unroll 2
    for (int k = 0; k < VP / 16; k++) {
        uint32_t a[4];
        mn_gated_frag_a(a, x, k);
#pragma unroll
        for (int n = 0; n < 8; n += 2) {
            uint32_t b[4];
            mn_gated_ldmatrix<true>(b, at + k * 2048 + n * 128);
            mn_mma(o[n], a, b[0], b[1]);
            mn_mma(o[n + 1], a, b[2], b[3]);
        }
    }
}

/* Scores of this part's rows of x with those of a part of y. */
template <int VP>
__device__ inline void mn_gated_subchunk_scores(float (&P)[2][4], uint32_t x, uint32_t y,
                                                int part) {
    float odd[2][4] = {};
#pragma unroll
    for (int i = 0; i < 8; i++) P[i / 4][i % 4] = 0.0f;
#pragma unroll
    for (int k = 0; k < VP / 16; k++) {
        uint32_t a[4], b[4];
        mn_gated_frag_a(a, x, k);
        mn_gated_ldmatrix<false>(
            b, (mn_gated_addr_cols(y, 16 * part) ^ k % 4 * 32) + k / 4 * MN_GATED_GRAD_TILE);
        mn_mma(k % 2 ? odd[0] : P[0], a, b[0], b[1]);
        mn_mma(k % 2 ? odd[1] : P[1], a, b[2], b[3]);
    }
#pragma unroll
    for (int i = 0; i < 8; i++) P[i / 4][i % 4] += odd[i / 4][i % 4];
}

/* o += P x for the 16 rows of a part of a tile */
__device__ inline void mn_gated_mma_add(mn_gated_acc_tile &o, const float (&P)[2][4], uint32_t tile,
                                    int part) {
    uint32_t a[4];
    mn_frag_a_of(a, P[0], P[1]);
#pragma unroll
    for (int n = 0; n < 8; n += 2) {
        uint32_t b[4];
        mn_gated_ldmatrix<true>(b, mn_gated_addr_rows(tile, 16 * part) ^ n * 16);
        mn_mma(o[n], a, b[0], b[1]);
        mn_mma(o[n + 1], a, b[2], b[3]);
    }
}

/* The same for the part's own rows, where P has a triangle: numbers that are not finite reach the
 * rows that see them alone. */
__device__ inline void mn_gated_mma_add_causal(mn_gated_acc_tile &o, const float (&P)[2][4],
                                               uint32_t tile, int part) {
    const uint32_t at = mn_gated_addr_rows(tile, 16 * part);
    uint32_t a[4];
    mn_frag_a_of(a, P[0], P[1]);
    mn_mma_causal_by(o, a, [&](uint32_t (&b)[4], int n) {
        mn_gated_ldmatrix<true>(b, at ^ n * 16);
    });
}

__device__ inline void mn_gated_decay_subchunk(mn_gated_acc_tile &o, const float *cum_decay) {
#pragma unroll
    for (int n = 0; n < 8; n++) {
        const float2 f = *(const float2 *)(cum_decay + 8 * n + threadIdx.x % 4 * 2);
        o[n][0] *= f.x, o[n][1] *= f.y, o[n][2] *= f.x, o[n][3] *= f.y;
    }
}

/* Whether q of the chunk has numbers that are not finite. They become zeros, and `wild` tells the
 * last token of each channel that had one: what they make of dk and dg, up to there, is NaN. All
 * threads of the block call. */
template <int VP>
__device__ inline bool mn_gated_take_wild(mn_gated_grad_smem<VP> &smem) {
    bool found = false;
#pragma unroll
    for (int i = threadIdx.x; i < MN_GATED_GRAD_TILE / 16; i += MN_GATED_GRAD_THREADS) {
        const uint4 x = ((const uint4 *)smem.q)[i];
        found |= mn_bf16x2_wild(x.x) || mn_bf16x2_wild(x.y) || mn_bf16x2_wild(x.z) ||
                 mn_bf16x2_wild(x.w);
    }
    if (!__syncthreads_or(found)) return false;
    if (threadIdx.x < MN_SCAN_WIDTH) {
        int last = -1;
        for (int row = 0; row < MN_GATED_GRAD_CHUNK; row++) {
            mn_bf16 *at = (mn_bf16 *)(smem.q + mn_gated_swizzle(row, threadIdx.x / 8)) +
                          threadIdx.x % 8;
            if (isfinite(mn_float(*at))) continue;
            mn_put(at, 0.0f);
            last = row;
        }
        smem.wild[threadIdx.x] = last;
    }
    __syncthreads();
    return true;
}

/* NaN where a later token of the channel had a q that is not finite, or the row's own. */
__device__ inline void mn_gated_give_wild(mn_gated_acc_tile &o, const int *wild) {
    const int lane = threadIdx.x % 32, part = mn_gated_subchunk();
#pragma unroll
    for (int i = 0; i < 32; i++) {
        const int row = 16 * part + lane / 4 + i % 4 / 2 * 8;
        if (row <= wild[i / 4 * 8 + lane % 4 * 2 + i % 2]) o[i / 4][i % 4] = nanf("");
    }
}

/* Rows of a part to memory. */
__device__ inline void mn_gated_store_subchunk(const mn_gated_acc_tile &o, const mn_out &view,
                                           const mn_tile_span &at, int64_t h, int slice,
                                           int64_t K) {
    const int lane = threadIdx.x % 32, part = mn_gated_subchunk();
    const mn_col_tile<mn_bf16> to =
        mn_col_tile_of<mn_bf16>(view, at.span, h, 64 * slice, K, MN_SCAN_WIDTH);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int row = 16 * part + lane / 4 + 8 * half;
#pragma unroll
        for (int n = 0; n < 8; n += 4) {
            uint32_t pair[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                pair[i] = mn_bf16x2(o[n + i][2 * half], o[n + i][2 * half + 1]);
            }
            mn_store_tokens(to, pair, at.first + row, row < at.n_rows, 8 * n);
        }
    }
}

/* ---- a block --------------------------------------------------------------------------------- */

/* What the state adds to dg: sums over this part's rows of k~ and what they read from N, which the
 * parts behind have still to lower. */
__device__ inline void mn_gated_sum_state_terms(float (*sums)[MN_SCAN_WIDTH],
                                                const mn_gated_acc_tile &o,
                                         uint32_t keys) {
    const int lane = threadIdx.x % 32, part = mn_gated_subchunk();
#pragma unroll
    for (int k = 0; k < 4; k++) {
        uint32_t x[4];
        mn_gated_ldmatrix<false>(x, mn_gated_addr_rows(keys, 16 * part) ^ k * 32);
#pragma unroll
        for (int n = 0; n < 2; n++) {
            const float(&y)[4] = o[2 * k + n];
            const int channel = 16 * k + 8 * n + lane % 4 * 2;
            float2 sum;
            sum.x = fmaf(y[0], mn_bf16_lo(x[2 * n]), y[2] * mn_bf16_lo(x[2 * n + 1]));
            sum.y = fmaf(y[1], mn_bf16_hi(x[2 * n]), y[3] * mn_bf16_hi(x[2 * n + 1]));
#pragma unroll
            for (int by = 4; by < 32; by <<= 1) {
                sum.x += __shfl_xor_sync(0xffffffffu, sum.x, by);
                sum.y += __shfl_xor_sync(0xffffffffu, sum.y, by);
            }
            if (lane < 4) *(float2 *)&sums[part][channel] = sum;
        }
    }
}

/* Sums of products of S and N: a warp has eight channels. */
template <int VP>
__device__ inline void mn_gated_dot_states(float *sums, const unsigned char *S,
                                        const unsigned char *N) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    float2 sum = {};
#pragma unroll
    for (int rows = 0; rows < VP / 8; rows++) {
        const int at = (rows * 8 + warp) * 128 + lane * 4;
        const uint32_t x = *(const uint32_t *)(S + at), y = *(const uint32_t *)(N + at);
        sum.x = fmaf(mn_bf16_lo(x), mn_bf16_lo(y), sum.x),
            sum.y = fmaf(mn_bf16_hi(x), mn_bf16_hi(y), sum.y);
    }
#pragma unroll
    for (int by = 4; by < 32; by <<= 1) {
        sum.x += __shfl_xor_sync(0xffffffffu, sum.x, by);
        sum.y += __shfl_xor_sync(0xffffffffu, sum.y, by);
    }
    if (lane < 4) *(float2 *)(sums + 8 * warp + lane * 2) = sum;
}

/* o <- scale (o 2^e + inside 2^l), where l and e differ if channels decay too far; dk has -l, and
 * E - e for e. Terms are -q dq or k dk, with the rounded rows that products had, at `far` and at
 * `near`, so that what one token reads from another is the same number in both. */
template <bool OF_KEYS>
__device__ inline void mn_gated_grad_epilogue(mn_gated_acc_tile &o, const mn_gated_acc_tile &inside,
                                       mn_gated_acc_tile &terms,
                                           const mn_gated_log_decays &log_decays,
                                       uint32_t far, uint32_t near, const unsigned char *g,
                                       float scale) {
    const int part = mn_gated_subchunk();
#pragma unroll
    for (int k = 0; k < 4; k++) {
        uint32_t x[4], y[4];
        float l[2][4], end[4] = {};
#pragma unroll
        for (int i = 0; OF_KEYS && i < 4; i++) end[i] = log_decays.end(2 * k + i / 2, i % 2);
        log_decays.inside(l, k, g);
        mn_gated_ldmatrix<false>(x, mn_gated_addr_rows(far, 16 * part) ^ k * 32);
        mn_gated_ldmatrix<false>(y, mn_gated_addr_rows(near, 16 * part) ^ k * 32);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const int n = 2 * k + i / 4, c = i % 4;
            const float e = log_decays.e[n][c];
            const float up = mn_exp2(OF_KEYS ? end[i / 4 * 2 + c % 2] - e : e);
            const float log_decay = l[i / 4][c],
                up_inside = mn_exp2(OF_KEYS ? -log_decay : log_decay);
            const float wide = c % 2 ? mn_bf16_hi(x[i / 2]) : mn_bf16_lo(x[i / 2]);
            const float close = c % 2 ? mn_bf16_hi(y[i / 2]) : mn_bf16_lo(y[i / 2]);
            const float term = fmaf(o[n][c], wide, inside[n][c] * close);
            terms[n][c] = (OF_KEYS ? scale : -scale) * term;
            o[n][c] = scale * fmaf(inside[n][c], up_inside, o[n][c] * up);
        }
    }
}

/* Zero where the column is later than the row, or earlier. */
__device__ inline void mn_gated_causal_mask(float (&P)[2][4], bool earlier) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const int column = 8 * (i / 4) + lane % 4 * 2 + i % 2, row = lane / 4 + i % 4 / 2 * 8;
        if (earlier ? column < row : column > row) P[i / 4][i % 4] = 0.0f;
    }
}

/* dq of this warp's part, and its terms. */
template <int VP>
__device__ inline void mn_gated_grad_queries(mn_gated_grad_smem<VP> &smem,
                                               mn_gated_acc_tile &terms,
                                                   const mn_gated_log_decays &log_decays,
                                               const mn_gated_grad_params &p,
                                                   const mn_tile_span &at,
                                               int64_t h, int slice) {
    const int part = mn_gated_subchunk();
    const uint32_t x = mn_smem_addr(smem.cot), y = mn_smem_addr(smem.v);
    const uint32_t far = mn_smem_addr(smem.q), near = mn_smem_addr(smem.q_inside);
    mn_gated_acc_tile o, inside = {};
    float P[2][4];
    mn_gated_mma_state<VP>(o, x, mn_smem_addr(smem.S));
#pragma unroll 1
    for (int from = 0; from < part; from++) {
        mn_gated_decay_subchunk(o, smem.cum_decay[from]);
        mn_gated_subchunk_scores<VP>(P, x, y, from);
        mn_gated_mma_add(o, P, mn_smem_addr(smem.k), from);
    }
    mn_gated_subchunk_scores<VP>(P, x, y, part);
    mn_gated_causal_mask(P, false);
    mn_gated_mma_add(inside, P, mn_smem_addr(smem.k_inside), part);
    mn_gated_grad_epilogue<false>(o, inside, terms, log_decays, far, near, smem.g, p.scale);
    mn_gated_store_subchunk(o, p.dq, at, h, slice, p.call.K);
}

/* dk likewise. */
template <int VP>
__device__ inline void mn_gated_grad_keys(mn_gated_grad_smem<VP> &smem, mn_gated_acc_tile &terms,
                                            const mn_gated_log_decays &log_decays,
                                            const mn_gated_grad_params &p, const mn_tile_span &at,
                                            int64_t h, int slice, bool wild) {
    const int part = mn_gated_subchunk();
    const uint32_t x = mn_smem_addr(smem.v), y = mn_smem_addr(smem.cot);
    const uint32_t far = mn_smem_addr(smem.k), near = mn_smem_addr(smem.k_inside);
    mn_gated_acc_tile o, inside = {};
    float P[2][4];
    mn_gated_mma_state<VP>(o, x, mn_smem_addr(smem.N));
    mn_gated_sum_state_terms(smem.read, o, far);
#pragma unroll 1
    for (int from = MN_SUBCHUNKS - 1; from > part; from--) {
        mn_gated_decay_subchunk(o, smem.cum_decay[from]);
        mn_gated_subchunk_scores<VP>(P, x, y, from);
        mn_gated_mma_add(o, P, mn_smem_addr(smem.q), from);
    }
    mn_gated_subchunk_scores<VP>(P, x, y, part);
    mn_gated_causal_mask(P, true);
    mn_gated_mma_add(inside, P, mn_smem_addr(smem.q_inside), part);
    mn_gated_grad_epilogue<true>(o, inside, terms, log_decays, far, near, smem.g, p.scale);
    if (wild) mn_gated_give_wild(o, smem.wild);
    mn_gated_store_subchunk(o, p.dk, at, h, slice, p.call.K);
}

/* dg: sums of terms over tokens; a warp has eight. All threads of the block call. */
template <int VP>
__device__ inline void mn_gated_grad_decays(mn_gated_grad_smem<VP> &smem,
                                              const mn_gated_acc_tile &terms, int of_keys,
                                              const mn_gated_grad_params &p, const mn_tile_span &at,
                                              int64_t h, int slice, bool wild) {
    constexpr int each = MN_SUBCHUNK / 2;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, j = 2 * lane;
    const int64_t channel = 64 * slice + j;
    float *rows = smem.terms(of_keys) + mn_gated_subchunk() * MN_SUBCHUNK * MN_GATED_TERMS_LD;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 16; i++) {
        const int row = lane / 4 + i % 2 * 8, n = i / 2;
        *(float2 *)(rows + row * MN_GATED_TERMS_LD + 8 * n + lane % 4 * 2) =
            make_float2(terms[n][i % 2 * 2], terms[n][i % 2 * 2 + 1]);
    }
    __syncthreads();
    float2 term[each], sum = {};
#pragma unroll
    for (int u = 0; u < each; u++) {
        const int i = (warp * each + u) * MN_GATED_TERMS_LD + j;
        const float2 x = *(const float2 *)(smem.terms(0) + i);
        const float2 y = *(const float2 *)(smem.terms(1) + i);
        term[u] = make_float2(x.x + y.x, x.y + y.y);
        sum.x += term[u].x, sum.y += term[u].y;
    }
    *(float2 *)&smem.sums[warp][j] = sum;
    __syncthreads();
    const float2 met = *(const float2 *)&smem.met[j];
    float2 read = {}, behind = {}, cum_decay = { 1.0f, 1.0f };
#pragma unroll
    for (int i = 2 * MN_SUBCHUNKS - 1; i > 0; i--) {
        const float2 z = *(const float2 *)&smem.sums[i][j];
        if (i > warp) behind.x += z.x, behind.y += z.y;
    }
#pragma unroll
    for (int i = MN_SUBCHUNKS - 1; i >= 0; i--) {
        const float2 x = *(const float2 *)&smem.read[i][j];
        const float2 f = *(const float2 *)&smem.cum_decay[i][j];
        read.x = fmaf(cum_decay.x, x.x, read.x), read.y = fmaf(cum_decay.y, x.y, read.y);
        cum_decay.x *= f.x, cum_decay.y *= f.y;
    }
    sum.x = fmaf(p.scale, fmaf(cum_decay.x, met.x, read.x), -behind.x);
    sum.y = fmaf(p.scale, fmaf(cum_decay.y, met.y, read.y), -behind.y);
    const int row0 = warp * each, left = (int)at.n_rows - row0;
    mn_bf16 *to = mn_row<mn_bf16>(p.dg, at.span.b, at.span.t0 + at.first + row0, h) + channel;
    if (channel >= p.call.K) return;
    to += each * p.dg.stride[1];
#pragma unroll
    for (int u = each - 1; u >= 0; u--) {
        sum.x -= term[u].x, sum.y -= term[u].y, to -= p.dg.stride[1];
        float2 out = sum;
        if (wild && row0 + u <= smem.wild[j]) out.x = nanf("");
        if (wild && row0 + u <= smem.wild[j + 1]) out.y = nanf("");
        if (u < left) *(uint32_t *)to = mn_bf16x2(out.x, out.y);
    }
}

/* Keys of a part for what its own tokens read, k 2^(-l). Where channels decay too far these are the
 * keys up to which they have not yet, with l = e, or FAR the others, with l of log_decays.inside;
 * zeros in the place of the rest. So no token's bits depend on later decays. */
template <bool FAR>
__device__ inline void mn_gated_scale_near(uint32_t (&y)[4], const uint32_t (&x)[4],
                                           const mn_gated_log_decays &log_decays, int k,
                                           const unsigned char *g) {
    float l[2][4];
    if (FAR) log_decays.inside(l, k, g);
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const float e = log_decays.e[2 * k + i / 4][i % 4];
        const bool far = e < -100.0f;
        l[i / 4][i % 4] = far != FAR ? -INFINITY : FAR ? -l[i / 4][i % 4] : -e;
    }
    mn_gated_mul_exp2(y, x, l);
}

/* This warp's part of queries or of keys, made, as two tiles: `far` in their place. */
__device__ inline void mn_gated_scale_subchunk(unsigned char *far, unsigned char *near,
                                           const mn_gated_log_decays &log_decays,
                                               const unsigned char *g,
                                           bool of_keys) {
    const uint32_t at = mn_gated_addr_rows(mn_smem_addr(far), 16 * mn_gated_subchunk());
    const uint32_t near_addr = mn_gated_addr_rows(mn_smem_addr(near), 16 * mn_gated_subchunk());
#pragma unroll
    for (int k = 0; k < 4; k++) {
        uint32_t x[4], y[4];
        float log_decay[2][4], end[4];
        mn_gated_ldmatrix<false>(x, at ^ k * 32);
#pragma unroll
        for (int i = 0; i < 4; i++) end[i] = log_decays.end(2 * k + i / 2, i % 2);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const float e = log_decays.e[2 * k + i / 4][i % 4];
            log_decay[i / 4][i % 4] = of_keys ? end[i / 4 * 2 + i % 2] - e : e;
        }
        mn_gated_mul_exp2(y, x, log_decay);
        mn_gated_stmatrix(at ^ k * 32, y);
        if (of_keys || log_decays.any) {    // otherwise they are the same
            log_decays.inside(log_decay, k, g);
#pragma unroll
            for (int i = 0; i < 8; i++) {
                log_decay[i / 4][i % 4] = of_keys ? -log_decay[i / 4][i % 4]
                    : log_decay[i / 4][i % 4];
            }
            mn_gated_mul_exp2(y, x, log_decay);
        }
        mn_gated_stmatrix(near_addr ^ k * 32, y);
    }
}

#endif

template <int VP>
__global__ void __launch_bounds__(MN_GATED_GRAD_THREADS, 2)
additive_gated_grad_sm90(const __grid_constant__ mn_gated_grad_params p, unsigned n_slices) {
#if MN_HAS_WGMMA
    extern __shared__ __align__(1024) unsigned char grad_smem_bytes[];
    mn_gated_grad_smem<VP> &smem = *(mn_gated_grad_smem<VP> *)grad_smem_bytes;
    const int slice = (int)(blockIdx.x % n_slices);
    const int part = mn_gated_subchunk(), lane = threadIdx.x % 32;
    const unsigned heads = (unsigned)p.call.H, index = blockIdx.x / n_slices;
    const int64_t h = index % heads, slot = index / heads;
    const mn_tile_span at = mn_tile_at(p.call, MN_GATED_GRAD_CHUNK, slot);
    const bool of_keys = threadIdx.x >= MN_GATED_GRAD_THREADS / 2;
    if (at.n_rows == 0) return;
    const bool ends = p.call.cu_seqlens && at.n_rows < MN_GATED_GRAD_CHUNK;
    if (threadIdx.x == 0) {
        mn_mbarrier_init(&smem.front, 1);
        mn_mbarrier_init(&smem.back, 1);
        mn_mbarrier_init_fence();
        mn_gated_tma_load_all<VP>(smem, p, at, slot, (int)h, slice, (int)n_slices);
    }
    __syncthreads();
    mn_mbarrier_wait(&smem.front, 0);
    if (ends) mn_gated_zero_tail_tiles(smem.q, 3, (int)at.n_rows);
    const bool wild = p.contain && mn_gated_take_wild(smem);
    mn_gated_log_decays log_decays;
    mn_gated_acc_tile terms;
    log_decays.make(mn_gated_addr_rows(mn_smem_addr(smem.g), 16 * part));
    mn_gated_scale_subchunk(of_keys ? smem.k : smem.q, of_keys ? smem.k_inside : smem.q_inside,
                            log_decays,
                        smem.g, of_keys);
    if (!of_keys) {
#pragma unroll
        for (int n = 0; n < 8; n++) {
            const float2 cum_decay = make_float2(mn_exp2(log_decays.end(n, 0)),
                                                 mn_exp2(log_decays.end(n, 1)));
            if (lane < 4) *(float2 *)&smem.cum_decay[part][8 * n + 2 * lane] = cum_decay;
        }
    }
    mn_mbarrier_wait(&smem.back, 0);
    if (ends) mn_gated_zero_tail_tiles(smem.cot, 2 * (VP / 64), (int)at.n_rows);
    __syncthreads();
    mn_gated_dot_states<VP>(smem.met, smem.S, smem.N);
    if (of_keys) mn_gated_grad_keys<VP>(smem, terms, log_decays, p, at, h, slice, wild);
    else mn_gated_grad_queries<VP>(smem, terms, log_decays, p, at, h, slice);
    mn_gated_grad_decays<VP>(smem, terms, of_keys, p, at, h, slice, wild);
#endif
}

template <int VP>
inline int mn_gated_grad_launch(const mn_gated_grad_params &job, cudaStream_t stream) {
    const int64_t slices = mn_ceil_div(job.call.K, 64);
    const int64_t blocks = mn_tile_slots(job.call, MN_GATED_GRAD_CHUNK) * job.call.H * slices;
    if (blocks == 0) return cudaSuccess;
    if (blocks > INT32_MAX) return cudaErrorNotSupported;
    return mn_launch_smem(additive_gated_grad_sm90<VP>, dim3((unsigned)blocks),
                               MN_GATED_GRAD_THREADS, sizeof(mn_gated_grad_smem<VP>), stream, job,
                               (unsigned)slices);
}

/* ---- dq alone -------------------------------------------------------------------------------- */
template <int VP>
struct alignas(1024) mn_gated_query_smem {    // as mn_gated_grad_smem
    unsigned char cot[VP / 64 * MN_GATED_GRAD_TILE], v[VP / 64 * MN_GATED_GRAD_TILE];
    unsigned char k[MN_GATED_GRAD_TILE], g[MN_GATED_GRAD_TILE], k_inside[MN_GATED_GRAD_TILE];
    unsigned char S[VP * 128];
    alignas(16) float cum_decay[MN_SUBCHUNKS][MN_SCAN_WIDTH];
    uint64_t front, back;
};

enum { MN_GATED_QUERY_THREADS = 32 * MN_SUBCHUNKS };

#if MN_HAS_WGMMA
template <int VP>
__device__ inline void mn_gated_query_load(mn_gated_query_smem<VP> &smem,
                                           const mn_gated_grad_params &p, const mn_tile_span &at,
                                           int64_t slot, int h, int slice, int n_slices) {
    const int t = (int)(at.span.t0 + at.first), b = (int)at.span.b;
    const int key = (int)mn_key_head(p.call, h);
    const int64_t state = ((slot * p.call.H + h) * n_slices + slice) * (VP * MN_SCAN_WIDTH);
    mn_mbarrier_arrive_expect_tx(&smem.front, 2 * MN_GATED_GRAD_TILE);
    mn_tma_load(smem.g, p.g, &smem.front, 64 * slice, h, t, b);
    mn_tma_load(smem.k, p.k, &smem.front, 64 * slice, key, t, b);
    mn_mbarrier_arrive_expect_tx(&smem.back, 2 * (VP / 64) * MN_GATED_GRAD_TILE + VP * 128);
    mn_tma_load_1d(smem.S, p.S + state, VP * 128, &smem.back);
    for (int tile = 0; tile < VP / 64; tile++) {
        const int at_tile = tile * MN_GATED_GRAD_TILE;
        mn_tma_load(smem.cot + at_tile, p.cot, &smem.back, 64 * tile, h, t, b);
        mn_tma_load(smem.v + at_tile, p.v, &smem.back, 64 * tile, h, t, b);
    }
}

/* Keys of this warp's part lowered to its end, in place, and for what its own tokens read; `far` is
 * made where channels decay too far. */
template <int VP>
__device__ inline void mn_gated_query_keys(mn_gated_query_smem<VP> &smem, uint32_t (&far)[4][4],
                                           const mn_gated_log_decays &log_decays) {
    const int row = 16 * mn_gated_subchunk();
    const uint32_t at = mn_gated_addr_rows(mn_smem_addr(smem.k), row);
    const uint32_t near = mn_gated_addr_rows(mn_smem_addr(smem.k_inside), row);
#pragma unroll
    for (int k = 0; k < 4; k++) {
        uint32_t x[4], y[4];
        float to_end[2][4], end[4];
        mn_gated_ldmatrix<false>(x, at ^ k * 32);
#pragma unroll
        for (int i = 0; i < 4; i++) end[i] = log_decays.end(2 * k + i / 2, i % 2);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            to_end[i / 4][i % 4] = end[i / 4 * 2 + i % 2] - log_decays.e[2 * k + i / 4][i % 4];
        }
        mn_gated_mul_exp2(y, x, to_end);
        mn_gated_stmatrix(at ^ k * 32, y);
        mn_gated_scale_near<false>(y, x, log_decays, k, smem.g);
        mn_gated_stmatrix(near ^ k * 32, y);
        if (log_decays.any) mn_gated_scale_near<true>(far[k], x, log_decays, k, smem.g);
    }
}

/* What the part's own tokens read of keys that are too far from its start. */
template <int VP>
__device__ inline void mn_gated_query_far(mn_gated_acc_tile &o, mn_gated_query_smem<VP> &smem,
                                          const uint32_t (&far)[4][4], const float (&P)[2][4],
                                          const mn_gated_log_decays &log_decays) {
    const uint32_t tile = mn_smem_addr(smem.k_inside);
    const uint32_t at = mn_gated_addr_rows(tile, 16 * mn_gated_subchunk());
    mn_gated_acc_tile sums = {};
    __syncwarp();
#pragma unroll
    for (int k = 0; k < 4; k++) mn_gated_stmatrix(at ^ k * 32, far[k]);
    __syncwarp();
    mn_gated_mma_add_causal(sums, P, tile, mn_gated_subchunk());
#pragma unroll
    for (int k = 0; k < 4; k++) {
        float l[2][4];
        log_decays.inside(l, k, smem.g);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            o[2 * k + i / 4][i % 4] += sums[2 * k + i / 4][i % 4] * mn_exp2(l[i / 4][i % 4]);
        }
    }
}

/* dq of this warp's part as mn_gated_grad_queries has it, without its terms. */
template <int VP>
__device__ inline void mn_gated_query_part(mn_gated_query_smem<VP> &smem,
                                           const uint32_t (&far)[4][4],
                                           const mn_gated_log_decays &log_decays,
                                           const mn_gated_grad_params &p, const mn_tile_span &at,
                                           int64_t h, int slice) {
    const int part = mn_gated_subchunk();
    const uint32_t x = mn_smem_addr(smem.cot), y = mn_smem_addr(smem.v);
    mn_gated_acc_tile o, inside = {};
    float P[2][4];
    mn_gated_mma_state<VP>(o, x, mn_smem_addr(smem.S));
#pragma unroll 1
    for (int from = 0; from < part; from++) {
        mn_gated_decay_subchunk(o, smem.cum_decay[from]);
        mn_gated_subchunk_scores<VP>(P, x, y, from);
        mn_gated_mma_add(o, P, mn_smem_addr(smem.k), from);
    }
    mn_gated_subchunk_scores<VP>(P, x, y, part);
    mn_gated_causal_mask(P, false);
    mn_gated_mma_add_causal(inside, P, mn_smem_addr(smem.k_inside), part);
#pragma unroll
    for (int i = 0; i < 32; i++) {
        const float up = mn_exp2(log_decays.e[i / 4][i % 4]);
        o[i / 4][i % 4] = fmaf(inside[i / 4][i % 4], up, o[i / 4][i % 4] * up);
    }
    if (log_decays.any) mn_gated_query_far(o, smem, far, P, log_decays);
#pragma unroll
    for (int i = 0; i < 32; i++) o[i / 4][i % 4] *= p.scale;
    mn_gated_store_subchunk(o, p.dq, at, h, slice, p.call.K);
}

#endif
/* A block has 64 channels of a chunk of a head, a warp a part of its tokens. */
template <int VP>
__global__ void __launch_bounds__(MN_GATED_QUERY_THREADS)
additive_gated_query_sm90(const __grid_constant__ mn_gated_grad_params p, unsigned n_slices) {
#if MN_HAS_WGMMA
    extern __shared__ __align__(1024) unsigned char query_smem_bytes[];
    mn_gated_query_smem<VP> &smem = *(mn_gated_query_smem<VP> *)query_smem_bytes;
    const int slice = (int)(blockIdx.x % n_slices);
    const int part = mn_gated_subchunk(), lane = threadIdx.x % 32;
    const unsigned heads = (unsigned)p.call.H, index = blockIdx.x / n_slices;
    const int64_t h = index % heads, slot = index / heads;
    const mn_tile_span at = mn_tile_at(p.call, MN_GATED_GRAD_CHUNK, slot);
    if (at.n_rows == 0) return;
    const bool ends = p.call.cu_seqlens && at.n_rows < MN_GATED_GRAD_CHUNK;
    if (threadIdx.x == 0) {
        mn_mbarrier_init(&smem.front, 1);
        mn_mbarrier_init(&smem.back, 1);
        mn_mbarrier_init_fence();
        mn_gated_query_load<VP>(smem, p, at, slot, (int)h, slice, (int)n_slices);
    }
    __syncthreads();
    mn_mbarrier_wait(&smem.front, 0);
    if (ends) mn_gated_zero_tail_tiles(smem.k, 2, (int)at.n_rows);
    mn_gated_log_decays log_decays;
    log_decays.make(mn_gated_addr_rows(mn_smem_addr(smem.g), 16 * part));
    uint32_t far[4][4] = {};
    mn_gated_query_keys(smem, far, log_decays);
#pragma unroll
    for (int n = 0; n < 8; n++) {
        const float low = mn_exp2(log_decays.end(n, 0)), high = mn_exp2(log_decays.end(n, 1));
        if (lane < 4) *(float2 *)&smem.cum_decay[part][8 * n + 2 * lane] = make_float2(low, high);
    }
    mn_mbarrier_wait(&smem.back, 0);
    if (ends) mn_gated_zero_tail_tiles(smem.cot, 2 * (VP / 64), (int)at.n_rows);
    __syncthreads();
    mn_gated_query_part<VP>(smem, far, log_decays, p, at, h, slice);
#endif
}

template <int VP>
inline int mn_gated_query_launch(const mn_gated_grad_params &job, cudaStream_t stream) {
    const int64_t slices = mn_ceil_div(job.call.K, 64);
    const int64_t blocks = mn_tile_slots(job.call, MN_GATED_GRAD_CHUNK) * job.call.H * slices;
    if (blocks == 0) return cudaSuccess;
    if (blocks > INT32_MAX) return cudaErrorNotSupported;
    return mn_launch_smem(additive_gated_query_sm90<VP>, dim3((unsigned)blocks),
                          MN_GATED_QUERY_THREADS, sizeof(mn_gated_query_smem<VP>), stream, job,
                          (unsigned)slices);
}

enum {
    MN_GATED_WARPGROUP = 128,
    MN_GATED_SCALE_THREADS = 32 * MN_GATED_PAIRS * 2,
    MN_GATED_THREADS = 2 * MN_GATED_WARPGROUP + MN_GATED_SCALE_THREADS,
};

struct mn_gated_params {
    mn_call call;
    mn_chunk_scan scan;
    CUtensorMap q, k, v, g, out;
    bool redo;    // of rows in front of numbers that are not finite: mn_additive_cut
};

#if MN_HAS_WGMMA
/* ---- products of a group --------------------------------------------------------------------- */
/* Where a product finds rows of a tile; `n` bytes further on, n / 16 is added. */
__device__ inline uint64_t mn_gated_smem_desc(uint32_t address) {
    return (address & 0x3ffffu) >> 4 | (uint64_t)1 << 16 | (uint64_t)64 << 32 | (uint64_t)1 << 62;
}

__device__ inline void mn_gated_wgmma_fence(void) {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ inline void mn_gated_wgmma_commit(void) {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

/* Waits for all that was sent but the last PENDING times. */
template <int PENDING>
__device__ inline void mn_gated_wgmma_wait(void) {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

#define MN_GATED_ACC8(i)                                                                          \
    "+f"(y[i][0]), "+f"(y[i][1]), "+f"(y[i][2]), "+f"(y[i][3]), "+f"(y[(i) + 1][0]),               \
        "+f"(y[(i) + 1][1]), "+f"(y[(i) + 1][2]), "+f"(y[(i) + 1][3])

/* y (32 columns) += a b' for 16 columns of a tile, whose rows are those of b */
__device__ inline void mn_gated_wgmma_abt(float (*y)[4], const uint32_t (&a)[4], uint64_t b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 "
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
                 "{%16, %17, %18, %19}, %20, 1, 1, 1, 0;"
                 : MN_GATED_ACC8(0), MN_GATED_ACC8(2)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b)
                 : "memory");
}

/* y (64 columns) += a b for 16 rows of a tile */
__device__ inline void mn_gated_wgmma_ab(float (*y)[4], const uint32_t (&a)[4], uint64_t b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
                 "{%32, %33, %34, %35}, %36, 1, 1, 1, 1;"
                 : MN_GATED_ACC8(0), MN_GATED_ACC8(2), MN_GATED_ACC8(4), MN_GATED_ACC8(6)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b)
                 : "memory");
}

/* ---- warps that load and store --------------------------------------------------------------- */

/* A warp. */
template <int KP, bool HAS_OUT>
__device__ inline void mn_gated_producer(mn_gated_smem<KP> &smem, const mn_gated_params &job) {
    const mn_scan_coord &at = smem.place;
    const int iters = (int)(at.end - at.iter), h = (int)at.h, b = (int)at.span.b;
    const int key = (int)at.key;
    const int column0 = (int)at.column0;
    const bool has_q = HAS_OUT || job.scan.reverse, has_k = HAS_OUT || !job.scan.reverse;
#pragma unroll 1
    for (int n = 0; n < iters; n++) {
        const int slot = n % MN_GATED_STAGES;
        const int t = (int)(at.span.t0 + mn_gated_token0(at, job.scan.reverse, n));
        mn_gated_stage<KP> &to = smem.stage[slot];
        uint64_t *full = &smem.full[slot];
        mn_mbarrier_wait(&smem.empty[slot], (n / MN_GATED_STAGES & 1) ^ 1);
        if (!mn_elect_one()) continue;
        mn_mbarrier_arrive_expect_tx(full,
                                     ((1 + has_q + has_k) * (KP / 64) + 1) * MN_GATED_SMEM_TILE);
#pragma unroll
        for (int smem_tile = 0; smem_tile < KP / 64; smem_tile++) {
            const int at_smem_tile = smem_tile * MN_GATED_SMEM_TILE;
            mn_tma_load(to.g + at_smem_tile, job.g, full, 64 * smem_tile, h, t, b);
            if (has_k) mn_tma_load(to.k + at_smem_tile, job.k, full, 64 * smem_tile, key, t, b);
            if (has_q) mn_tma_load(to.q + at_smem_tile, job.q, full, 64 * smem_tile, key, t, b);
        }
        mn_tma_load(to.v, job.v, full, column0, h, t, b);
    }
}

/* Results of a chunk with which one of several packed sequences ends, or a redo; a warp calls. */
__device__ inline void mn_gated_store_rows(const mn_gated_params &job, const mn_scan_coord &at,
                                         const unsigned char *tile, int64_t t, int count) {
    const int lane = threadIdx.x % 32, vec16 = lane % 8;
    const int64_t j = at.column0 + 8 * vec16;
    for (int row = lane / 8; j < job.scan.width && row < count; row += 4) {
        if (t + row < at.from) continue;
        mn_bf16 *to = mn_row<mn_bf16>(job.scan.out, at.span.b, at.span.t0 + t + row, at.h) + j;
        *(uint4 *)to = *(const uint4 *)(tile + mn_gated_swizzle(row, vec16));
    }
}

/* A warp: the place of a chunk is free when the next one's results are on their way. */
template <int KP, bool REDO>
__device__ inline void mn_gated_tma_store(mn_gated_smem<KP> &smem, const mn_gated_params &job) {
    const mn_scan_coord &at = smem.place;
    const int iters = (int)(at.end - at.iter), lane = threadIdx.x % 32;
    for (int n = 0; n <= iters; n++) {
        if (n < iters) {
            const int64_t t = mn_gated_token0(at, job.scan.reverse, n);
            const int count = mn_gated_chunk_len(at, t);
            const unsigned char *tile = smem.stage[n % MN_GATED_STAGES].v;
            mn_mbarrier_wait(&smem.out_full[n % MN_GATED_STAGES], n / MN_GATED_STAGES & 1);
            if (((job.call.cu_seqlens || REDO) && count < MN_GATED_CHUNK) ||
                (REDO && t < at.from)) {
                mn_gated_store_rows(job, at, tile, t, count);
                __syncwarp();
            } else if (lane == 0) {
                mn_tma_store(job.out, tile, (int)at.column0, (int)at.h, (int)(at.span.t0 + t),
                              (int)at.span.b);
            }
        }
        if (lane > 0) continue;
        if (n < iters) mn_tma_store_wait_read<1>();
        else mn_tma_store_wait_read();
        if (n > 0) mn_mbarrier_arrive(&smem.empty[(n - 1) % MN_GATED_STAGES]);
    }
}

/* ---- the group that has the state ------------------------------------------------------------ */

/* The state, transposed: a thread has two of the 64 value columns and, of each eight channels, two.
 * */
template <int KP>
struct mn_gated_state {
    float at[KP / 8][4];

    template <typename F>
    __device__ void each(F use) {
        const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane / 4;
#pragma unroll
        for (int i = 0; i < KP / 2; i++) {
            use(at[i / 4][i % 4], i / 4 * 8 + lane % 4 * 2 + i % 2, row + i % 4 / 2 * 8);
        }
    }

    __device__ void begin(const mn_chunk_scan &p, const mn_scan_coord &place) {
        const float *from = mn_row<float>(p.state0, place.n, 0, place.h);
        const int depth = from && !p.reduce_pass ? (int)p.depth : 0;
        const int left = (int)min(p.width - place.column0, (int64_t)MN_SCAN_WIDTH);
        each([&](float &cell, int i, int j) {
            const bool inside = i < depth && j < left;
            cell = inside ? p.into * from[i * p.state_row + place.column0 + j] : 0.0f;
        });
        for (int before = p.reduce_pass ? 0 : (int)blockIdx.z; before > 0; before--) {
            const int64_t index = place.index - before * place.stride;
            const float *cum_decays = p.cum_decays + index * MN_SCAN_DECAYS;
            const float4 *sums = (const float4 *)(p.sums + index * KP * MN_SCAN_WIDTH);
            each([&](float &cell, int i, int) { cell *= cum_decays[i]; });
#pragma unroll
            for (int k = 0; k < KP / 8; k++) {
                const float4 x = sums[k * MN_GATED_WARPGROUP + threadIdx.x];
                at[k][0] += x.x, at[k][1] += x.y, at[k][2] += x.z, at[k][3] += x.w;
            }
        }
    }

    __device__ void end(const mn_chunk_scan &p, const mn_scan_coord &place, float cum_decay) {
        float *to = mn_row<float>(p.state, place.n, 0, place.h);
        if (p.reduce_pass) {
            float4 *sums = (float4 *)(p.sums + place.index * KP * MN_SCAN_WIDTH);
#pragma unroll
            for (int k = 0; k < KP / 8; k++) {
                sums[k * MN_GATED_WARPGROUP + threadIdx.x] =
                    make_float4(at[k][0], at[k][1], at[k][2], at[k][3]);
            }
            if (threadIdx.x < KP) p.cum_decays[place.index * MN_SCAN_DECAYS + threadIdx.x] =
                cum_decay;
        } else if (place.last && to) {
            const int depth = (int)p.depth;
            const int left = (int)min(p.width - place.column0, (int64_t)MN_SCAN_WIDTH);
            each([&](float &cell, int i, int j) {
                if (i < depth && j < left) to[i * p.state_row + place.column0 + j] = p.from * cell;
            });
        }
    }

    /* As left operands of 16 channels each. */
    __device__ void left(uint32_t (&a)[KP / 16][4]) const {
#pragma unroll
        for (int k = 0; k < KP / 16; k++) mn_frag_a_of(a[k], at[2 * k], at[2 * k + 1]);
    }

    /* In bf16, as matrices of 8 x 8: for each 64 channels, `apart` numbers from the next, eight
     * such side by side for each eight rows. */
    __device__ void keep(mn_bf16 *to, int64_t subtile_stride) const {
        uint32_t *pairs = (uint32_t *)to + threadIdx.x / 32 * 512 + threadIdx.x % 32;
#pragma unroll
        for (int k = 0; k < KP / 4; k++) {
            pairs[k / 16 * (subtile_stride / 2) + k % 2 * 256 + k / 2 % 8 * 32] =
                mn_bf16x2(at[k / 2][k % 2 * 2], at[k / 2][k % 2 * 2 + 1]);
        }
    }

    __device__ void lower(const float *cum_decays) {
#pragma unroll
        for (int k = 0; k < KP / 8; k++) {
            const float2 f = *(const float2 *)(cum_decays + 8 * k + threadIdx.x % 4 * 2);
            at[k][0] *= f.x, at[k][1] *= f.y, at[k][2] *= f.x, at[k][3] *= f.y;
        }
    }
};

/* Where lane l points in 16 tokens and this warp's 16 columns of a tile of values, transposed. */
__device__ inline uint32_t mn_gated_trans_addr(uint32_t tile, int token) {
    const int lane = threadIdx.x % 32, row = token + lane % 8 + lane / 16 * 8;
    return tile + mn_gated_swizzle(row, threadIdx.x / 32 * 2 + lane / 8 % 2);
}

/* scale O as a tile of rows */
__device__ inline void mn_gated_store_out(uint32_t tile, float (&O)[4][4], float scale) {
#pragma unroll
    for (int i = 0; i < 16; i++) O[i / 4][i % 4] *= scale;
#pragma unroll
    for (int k = 0; k < 2; k++) {
        uint32_t x[4];
        mn_frag_a_of(x, O[2 * k], O[2 * k + 1]);
        mn_gated_stmatrix<true>(mn_gated_trans_addr(tile, 16 * k), x);
    }
}

/* Where a state is kept in front of a chunk: once in 64 tokens, NULL elsewhere. Against time that
 * is behind them. */
template <int KP>
__device__ inline mn_bf16 *mn_gated_saved_at(const mn_gated_params &job, const mn_scan_coord &at,
                                            int iter) {
    if (!job.scan.kept || job.scan.reduce_pass) return NULL;
    const int64_t chunk = mn_gated_token0(at, job.scan.reverse, iter) / MN_GATED_CHUNK;
    const bool first = job.scan.reverse ? chunk % 2 == 1 || chunk == at.n_chunks - 1
                                        : chunk % 2 == 0;
    if (!first) return NULL;
    const int64_t slot = mn_scan_first_slot(job.call, at.n, 2 * MN_GATED_CHUNK) + chunk / 2;
    return job.scan.kept +
           ((slot * job.call.H + at.h) * at.n_slices * KP + at.slice * MN_SCAN_WIDTH) *
               MN_SCAN_WIDTH;
}

/* HAS_OUT: leaves results; otherwise only what becomes of the state. */
template <int KP, bool HAS_OUT>
__device__ inline void mn_gated_state_scan(mn_gated_smem<KP> &smem, const mn_gated_params &job) {
    const mn_chunk_scan &p = job.scan;
    const int iters = (int)(smem.place.end - smem.place.iter);
    float cum_decay = 1.0f;
    mn_gated_state<KP> M;
    M.begin(p, smem.place);
    for (int n = 0; n < iters; n++) {
        const int slot = n % MN_GATED_STAGES, phase = n / MN_GATED_STAGES & 1;
        mn_gated_stage<KP> &in = smem.stage[slot];
        const uint32_t v = mn_smem_addr(in.v);
        const uint64_t read = mn_gated_smem_desc(mn_smem_addr(p.reverse ? in.k : in.q));
        const uint64_t write = mn_gated_smem_desc(mn_smem_addr(p.reverse ? in.q : in.k));
        uint32_t a[KP / 16][4], z[2][4];
        float O[4][4] = {};
        mn_bf16 *kept = mn_gated_saved_at<KP>(job, smem.place, n);
        if (kept) M.keep(kept, smem.place.n_slices * (MN_SCAN_WIDTH * MN_SCAN_WIDTH));
        if (HAS_OUT) M.left(a);
        mn_mbarrier_wait(&smem.full[slot], phase);
        mn_mbarrier_wait(&smem.scaled[slot], phase);
        mn_gated_ldmatrix<true>(z[0], mn_gated_trans_addr(v, 0));
        mn_gated_ldmatrix<true>(z[1], mn_gated_trans_addr(v, 16));
        M.lower(in.cum_decays());
        if (!HAS_OUT && threadIdx.x < KP) cum_decay *= in.cum_decays()[threadIdx.x];
        mn_gated_wgmma_fence();
        if (HAS_OUT) {
            const uint64_t P = mn_gated_smem_desc(mn_smem_addr(in.scores()));
#pragma unroll
            for (int i = 0; i < KP / 16; i++) {
                mn_gated_wgmma_abt(O, a[i], read + (i / 4 * MN_GATED_SMEM_TILE + i % 4 * 32) / 16);
            }
            mn_gated_wgmma_abt(O, z[0], P);
            mn_gated_wgmma_abt(O, z[1], P + 32 / 16);
            mn_gated_wgmma_commit();
        }
#pragma unroll
        for (int smem_tile = 0; smem_tile < KP / 64; smem_tile++) {
            const uint64_t rows = write + smem_tile * MN_GATED_SMEM_TILE / 16;
            mn_gated_wgmma_ab(M.at + 8 * smem_tile, z[0], rows);
            mn_gated_wgmma_ab(M.at + 8 * smem_tile, z[1], rows + MN_GATED_SUB_BYTES / 16);
        }
        mn_gated_wgmma_commit();
        if (HAS_OUT) {
            mn_gated_wgmma_wait<1>();
            mn_gated_store_out(v, O, p.scale);
            mn_fence_proxy_async();
        }
        mn_gated_wgmma_wait<0>();
        mn_mbarrier_arrive_warp(HAS_OUT ? &smem.out_full[slot] : &smem.empty[slot]);
    }
    M.end(p, smem.place, cum_decay);
}

#endif
/* ---- the kernel ------------------------------------------------------------------------------ */

template <int KP, bool HAS_OUT, bool REDO>
__global__ void __launch_bounds__(MN_GATED_THREADS, 1)
additive_gated_scan_sm90(const __grid_constant__ mn_gated_params job) {
#if MN_HAS_WGMMA
    extern __shared__ __align__(1024) unsigned char gated_smem_bytes[];
    mn_gated_smem<KP> &smem = *(mn_gated_smem<KP> *)gated_smem_bytes;
    if (HAS_OUT && !REDO) mn_pdl_launch_dependents();
    if (threadIdx.x == 0) {
        for (int i = 0; i < MN_GATED_STAGES; i++) {
            mn_mbarrier_init(&smem.full[i], 1);
            mn_mbarrier_init(&smem.scaled[i], 2);
            mn_mbarrier_init(&smem.out_full[i], MN_GATED_WARPGROUP / 32);
            mn_mbarrier_init(&smem.empty[i], HAS_OUT ? 1 : MN_GATED_WARPGROUP / 32);
        }
        mn_mbarrier_init_fence();
        smem.place = mn_scan_block_coord(job.call, job.scan, MN_GATED_CHUNK);
    }
    __syncthreads();
    if (REDO) mn_additive_cut(smem.place, job.scan, MN_GATED_CHUNK);
    if (smem.place.idle) return;
    if (threadIdx.x < MN_GATED_WARPGROUP) {
        mn_setmaxnreg_inc<168>();
        mn_gated_state_scan<KP, HAS_OUT>(smem, job);
    } else if (threadIdx.x < MN_GATED_WARPGROUP + MN_GATED_SCALE_THREADS) {
        mn_setmaxnreg_inc<152>();
        mn_gated_scale<KP, HAS_OUT, REDO>(smem, job.scan.reverse);
    } else {
        mn_setmaxnreg_dec<40>();
        const int warp = threadIdx.x / 32 % 4;
        if (warp == 0) mn_gated_producer<KP, HAS_OUT>(smem, job);
        if (warp == 1 && HAS_OUT) mn_gated_tma_store<KP, REDO>(smem, job);
    }
#endif
}

/* Whether the kernel serves a scan: by its kind and sizes, never by its length; rows have to be
 * such that TMA can bring them. Fills in the maps. */
inline bool mn_gated_supported(mn_gated_params *job, const mn_chunk_scans *scans) {
    const mn_chunk_scan &p = scans->scan[0];
    const mn_call &call = scans->call;
    const mn_in &q = p.reverse ? p.y : p.x, &k = p.reverse ? p.x : p.y;
    job->call = call, job->scan = p, job->redo = false;
    return p.mode == MN_SCAN_PLAIN && p.state_column == 1 && p.depth <= 128 &&
           p.depth % 8 == 0 && p.width % 8 == 0 && mn_device_is_sm90() &&
           mn_tma_map(&job->q, q, call, p.depth, MN_GATED_CHUNK) &&
           mn_tma_map(&job->k, k, call, p.depth, MN_GATED_CHUNK) &&
           mn_tma_map(&job->v, p.z, call, p.width, MN_GATED_CHUNK) &&
           mn_tma_map(&job->g, scans->g, call, p.depth, MN_GATED_CHUNK) &&
           (p.out.data ? mn_tma_map(&job->out, p.out, call, p.width, MN_GATED_CHUNK)
                       : p.kept != NULL);
}

template <int KP>
static int launch_scan(const mn_gated_params &job, int64_t segments, cudaStream_t stream) {
    const int64_t blocks = mn_scan_slices(job.scan) * job.call.H * mn_n_spans(job.call);
    if (blocks == 0) return cudaSuccess;
    if (blocks > INT32_MAX) return cudaErrorNotSupported;
    const dim3 grid((unsigned)blocks, 1, (unsigned)segments);
    const bool reads = job.scan.out.data && !job.scan.reduce_pass;
    const auto kernel = job.redo ? additive_gated_scan_sm90<KP, true, true>
                        : reads  ? additive_gated_scan_sm90<KP, true, false>
                                 : additive_gated_scan_sm90<KP, false, false>;
    return mn_launch_smem_behind(job.redo, kernel, grid, MN_GATED_THREADS,
                                 sizeof(mn_gated_smem<KP>), stream, job);
}

static int launch(const mn_gated_params &job, int64_t segments, cudaStream_t stream) {
    return job.scan.depth <= 64 ? launch_scan<64>(job, segments, stream)
                                : launch_scan<128>(job, segments, stream);
}

/* Whether o, and dv, are made again in front of numbers that are not finite. */
static const bool redoes_results = true, redoes_gradients = true;

/* Rows of a scan that has run. */
static int redo(const mn_gated_params &job, int64_t segments, cudaStream_t stream) {
    mn_gated_params again = job;
    if (!(job.scan.reverse ? redoes_gradients : redoes_results) || job.scan.reduce_pass ||
        !job.scan.out.data || job.call.T < 2) {
        return cudaSuccess;
    }
    again.redo = true, again.scan.kept = nullptr;
    return launch(again, segments, stream);
}

int mn_additive_gated_launch(const mn_chunk_scans *scans, int64_t segments, cudaStream_t stream) {
    mn_gated_params job;
    if (!mn_gated_supported(&job, scans)) return cudaErrorNotSupported;
    const int code = launch(job, segments, stream);
    return code == cudaSuccess ? redo(job, segments, stream) : code;
}

/* A scan with what reduce_pass for it. */
static int launch_two_pass(mn_gated_params *job, int64_t segments, cudaStream_t stream) {
    int code = cudaSuccess;
    if (segments > 1) {
        job->scan.reduce_pass = true;
        code = launch(*job, segments, stream);
        job->scan.reduce_pass = false;
    }
    return code == cudaSuccess ? launch(*job, segments, stream) : code;
}

int mn_additive_gated_backward(const mn_additive_args *p, const mn_chunk_scans *fwd,
                               const mn_chunk_scans *bwd, int64_t segments, bool contain,
                               cudaStream_t stream) {
    mn_gated_params to_end, to_start;
    const mn_out &dg = p->grad.g;
    bool pairs = (uintptr_t)dg.data % 4 == 0;
    for (int axis = 0; axis < 3; axis++) pairs = pairs && dg.stride[axis] % 2 == 0;
    if (!pairs || p->call.V > 128 || !mn_gated_supported(&to_end, fwd) ||
        !mn_gated_supported(&to_start, bwd)) {
        return cudaErrorNotSupported;
    }
    mn_gated_grad_params job = {};
    job.call = p->call, job.dq = p->grad.q, job.dk = p->grad.k, job.dg = dg;
    job.S = to_end.scan.kept, job.N = to_start.scan.kept, job.scale = (float)p->scale;
    job.contain = contain;
    if (!mn_tma_map(&job.q, p->q, p->call, p->call.K, MN_GATED_GRAD_CHUNK) ||
        !mn_tma_map(&job.k, p->k, p->call, p->call.K, MN_GATED_GRAD_CHUNK) ||
        !mn_tma_map(&job.g, p->g, p->call, p->call.K, MN_GATED_GRAD_CHUNK) ||
        !mn_tma_map(&job.v, p->v, p->call, p->call.V, MN_GATED_GRAD_CHUNK) ||
        !mn_tma_map(&job.cot, p->cot.o, p->call, p->call.V, MN_GATED_GRAD_CHUNK)) {
        return cudaErrorNotSupported;
    }
    int code = launch_two_pass(&to_end, segments, stream);
    if (code == cudaSuccess) code = launch_two_pass(&to_start, segments, stream);
    if (code == cudaSuccess) code = redo(to_start, segments, stream);
    if (code != cudaSuccess) return code;
    return p->call.V <= 64 ? mn_gated_grad_launch<64>(job, stream)
                           : mn_gated_grad_launch<128>(job, stream);
}

int mn_additive_gated_query(const mn_additive_args *p, const mn_chunk_scans *fwd, int64_t segments,
                            cudaStream_t stream) {
    mn_gated_params to_end;
    mn_gated_grad_params job = {};
    if (p->call.V > 128 || !mn_gated_supported(&to_end, fwd)) return cudaErrorNotSupported;
    job.call = p->call, job.dq = p->grad.q, job.S = fwd->scan[0].kept;
    job.scale = (float)p->scale;
    if (!mn_tma_map(&job.k, p->k, p->call, p->call.K, MN_GATED_GRAD_CHUNK) ||
        !mn_tma_map(&job.g, p->g, p->call, p->call.K, MN_GATED_GRAD_CHUNK) ||
        !mn_tma_map(&job.v, p->v, p->call, p->call.V, MN_GATED_GRAD_CHUNK) ||
        !mn_tma_map(&job.cot, p->cot.o, p->call, p->call.V, MN_GATED_GRAD_CHUNK)) {
        return cudaErrorNotSupported;
    }
    const int code = launch_two_pass(&to_end, segments, stream);
    if (code != cudaSuccess || !p->grad.q.data) return code;
    return p->call.V <= 64 ? mn_gated_query_launch<64>(job, stream)
                           : mn_gated_query_launch<128>(job, stream);
}

}    // namespace mneme::additive
