/* additive_channel_scale_sm90.cuh - what decays per channel make of a chunk of 32 tokens, by a pair
 * of
 * warps on Hopper, each of which has half of the channels.
 *
 * With e_t the sum of log2 decays from the start of a part of 16 tokens to token t, and f_0, f_1
 * what the channel cum_decays over the two parts,
 *
 *   P inside a part     (q_t 2^(e_t)) . (k_s 2^(-e_s))
 *   P across            (q_t 2^(e_t) f_0) . (k_s 2^(-e_s))
 *   Q~                  q_t 2^(e_t), in the second part times f_0
 *   K~                  k_s 2^(-e_s) times the part's cum_decay, in the first part times f_1 too
 *
 * Sums are products of tensor cores with a triangle of log2 e, as two bf16 numbers, and so come
 * where the factors of q and k lie: nothing but tiles passes through shared memory. Where a channel
 * cum_decays by more than 2^100 in a part, 2^(-e_s) would overflow: scores of such a channel's keys
 * are
 * added up one by one, from differences of e, and K~ is scaled of those too. */
#ifndef MN_KERNELS_CUDA_ADDITIVE_ADDITIVE_CHANNEL_SCALE_SM90_CUH
#define MN_KERNELS_CUDA_ADDITIVE_ADDITIVE_CHANNEL_SCALE_SM90_CUH

#include "kernels/cuda/additive/additive_channel_scale.cuh"
#include "kernels/cuda/prim/mbarrier.cuh"

enum {
    MN_GATED_CHUNK = 2 * MN_SUBCHUNK,
    MN_GATED_STAGES = 8,                       // chunks under way
    MN_GATED_PAIRS = 4,                        // chunks that are scaled at a time
    MN_GATED_SMEM_TILE = MN_GATED_CHUNK * 128,     // bytes of a tile of 64 columns
    MN_GATED_SUB_BYTES = MN_SUBCHUNK * 128,             // of a part's rows
};

/* Tiles have rows of 64 columns, 128 bytes each, vec16 o of row r at place o ^ (r % 8). */
__device__ inline uint32_t mn_gated_swizzle(int row, int vec16) {
    return (uint32_t)(row * 128 + (((vec16 ^ row) & 7) << 4));
}

/* `g` has the decays; afterwards scores in its first smem_tile, in the second what the two warps
 * give
 * each other, and cum_decays. */
template <int KP>
struct alignas(1024) mn_gated_stage {
    unsigned char q[KP / 64 * MN_GATED_SMEM_TILE], k[KP / 64 * MN_GATED_SMEM_TILE];
    unsigned char g[2 * MN_GATED_SMEM_TILE];
    unsigned char v[MN_GATED_SMEM_TILE];

    __device__ unsigned char *scores(void) { return g; }
    __device__ float4 *given(int half) { return (float4 *)(g + MN_GATED_SMEM_TILE) + half * 96; }
    __device__ float *cum_decays(void) { return (float *)(g + MN_GATED_SMEM_TILE + 2 * 96 * 16); }
};

/* Barriers of stages: tiles have come, are scaled, have been used, are free. */
template <int KP>
struct mn_gated_smem {
    mn_gated_stage<KP> stage[MN_GATED_STAGES];
    uint64_t full[MN_GATED_STAGES], scaled[MN_GATED_STAGES];
    uint64_t out_full[MN_GATED_STAGES], empty[MN_GATED_STAGES];
    mn_scan_coord place;
};

/* The first token of a iter's chunk, from the sequence's start. */
__device__ inline int64_t mn_gated_token0(const mn_scan_coord &at, bool reverse, int iter) {
    const int64_t n = at.iter + iter;
    return (reverse ? at.n_chunks - 1 - n : n) * MN_GATED_CHUNK;
}

__device__ inline int mn_gated_chunk_len(const mn_scan_coord &at, int64_t t) {
    return (int)min((int64_t)MN_GATED_CHUNK, at.span.length - t);
}

/* Four matrices of 8 x 8, of which each lane points at a row. */
template <bool TRANS>
__device__ inline void mn_gated_ldmatrix(uint32_t (&r)[4], uint32_t at) {
    if (TRANS) {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at) : "memory");
    } else {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at) : "memory");
    }
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

/* x times what its channel cum_decays */
__device__ inline void mn_gated_decay_rows(mn_gated_acc &y, const mn_gated_acc &x,
                                      const float (&cum_decay)[2][2]) {
#pragma unroll
    for (int i = 0; i < 8; i++) y[i / 4][i % 4] = x[i / 4][i % 4] * cum_decay[i / 4][i % 2];
}

/* Keys of a part: with what has fallen before them taken back, and lowered to the chunk's end. */
struct mn_gated_scaled_keys {
    mn_gated_acc inside, to_end;

    /* `cum_decay`: from the part's start to the chunk's end */
    __device__ void make(const mn_gated_decay_factors &f, const uint32_t (&k)[4],
                         const float (&cum_decay)[2][2]) {
        mn_gated_acc down;
#pragma unroll
        for (int i = 0; i < 8; i++) down[i / 4][i % 4] = mn_exp2(-f.e[i / 4][i % 4]);
        mn_gated_scale_rows(inside, k, down);
        mn_gated_decay_rows(to_end, inside, cum_decay);
    }
};

/* ---- channels that cum_decay too deep
 * ------------------------------------------------------------- */

/* Which of them do, by lanes, and how far their tokens are from the part's end. */
struct mn_gated_underflow {
    unsigned mask[2][2];
    mn_gated_acc left;

    /* Their keys are scaled once more: none inside; `after` is the cum_decay behind the part. */
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
                left[n][at] = f.e[n][at] - end;
                if (!local) continue;
                keys.inside[n][at] = 0.0f;
                keys.to_end[n][at] =
                    (j ? mn_bf16_hi(pair) : mn_bf16_lo(pair)) * mn_exp2(-left[n][at]) * after[n][j];
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

/* Channels that cum_decay too deep, in either part. */
__device__ inline void mn_gated_fix_underflow(mn_gated_scores &P, mn_gated_scaled_keys (&keys)[2],
                                     const mn_gated_decay_factors (&f)[2],
                                         const uint32_t (&q)[2][4],
                                     const uint32_t (&k)[2][4]) {
    const float one[2][2] = { { 1.0f, 1.0f }, { 1.0f, 1.0f } };
    mn_gated_underflow deep;
    deep.recompute(keys[1], f[1], k[1], one);
    deep.add(P.own[1], q[1], f[1].e, k[1], f[1].e);
    deep.recompute(keys[0], f[0], k[0], f[1].whole);
    deep.add(P.own[0], q[0], f[0].e, k[0], f[0].e);
    deep.add(P.across, q[1], f[1].e, k[0], deep.left);
}

/* 16 channels of a chunk, whose tiles lie at q, k and g; their cum_decays over the chunk. */
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

/* Tokens behind a sequence's last become zeros, in a warp's own vec16s of rows of q, k and g; the
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
    asm volatile("bar.sync %0, 64;" ::"r"(pair + 1) : "memory");
}

/* The two warps of a pair add up their scores; each has the rest of one part, and eight columns of
 * what lies across. Against time they are transposed. */
template <int KP>
__device__ inline void mn_gated_reduce_scores(mn_gated_stage<KP> &in, mn_gated_scores &P, int half,
                                     int pair, bool reverse) {
    const int lane = threadIdx.x % 32;
    const uint32_t tile = mn_smem_address(in.scores());
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

/* What the warps that scale do. */
template <int KP, bool HAS_OUT>
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
        mn_gated_pin_reg(mn_smem_address(&smem) + mn_gated_swizzle(lane % 16, lane / 16));
    for (int n = pair; n < iters; n += MN_GATED_PAIRS) {
        const int slot = n % MN_GATED_STAGES;
        mn_gated_stage<KP> &in = smem.stage[slot];
        mn_gated_scores P = {};
        float cum_decays[2][2];
        mn_mbarrier_wait(&smem.full[slot], n / MN_GATED_STAGES & 1);
        if (n == ending && count < MN_GATED_CHUNK) mn_gated_zero_tail<KP>(in, count, half);
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

#endif
