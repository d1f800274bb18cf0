/* additive_channel_chunk_sm90.cu - additive over chunks on Hopper where each channel has a decay:
 * the state scans of o and dv; additive_channel_grad_sm90.cu has the gradients of all chunks at
 * once. */
#include "kernels/cuda/additive/additive_channel_sm90.cuh"

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
 * Sums are products of tensor cores with a triangle of ones, times log2 e, and so come where the
 * factors of q and k lie: nothing but tiles passes through shared memory. Where a
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
static_assert((int)MN_GATED_STAGES % (int)MN_GATED_PAIRS == 0, "a pair for each stage");

/* How many blocks of a head share the scaling. ALIKE: one, which adds scores up in the order of
 * two, for short calls, which clusters take longer, and for rows that are redone. */
enum { MN_GATED_ALIKE = 0, MN_GATED_ALONE = 1, MN_GATED_CLUSTER = 2 };
enum { MN_GATED_SHARED_TOKENS = 1024 };    // of a call that is not short

/* A chunk in shared memory: q, k (32, KP), v (32, 64). `g` has the log decays (32, KP); afterwards
 * the scores (32, 32) in its first tile, and in the second what the two warps of a pair exchange,
 * and the decays of channels over the chunk (KP).
 *
 * Where two blocks SHARE a head, each scales 64 of 128 channels for both: it loads those of q, k
 * and g, the last into the first tile of `g`, where warps of a pair exchange too. The second one
 * has sums of scores from the other block. */
template <int KP>
struct alignas(1024) mn_gated_stage {
    unsigned char q[KP / 64 * MN_GATED_SMEM_TILE], k[KP / 64 * MN_GATED_SMEM_TILE];
    unsigned char g[2 * MN_GATED_SMEM_TILE];
    unsigned char v[MN_GATED_SMEM_TILE];

    __device__ unsigned char *scores(void) { return g; }
    __device__ float4 *given(int half, bool near = false) {
        return (float4 *)(g + (near ? 0 : MN_GATED_SMEM_TILE)) + half * 96;
    }
    __device__ float *cum_decays(void) { return (float *)(g + MN_GATED_SMEM_TILE + 2 * 96 * 16); }
};

/* Where the decay of a channel lies: of each 16 the four of a thread side by side. */
__device__ inline int mn_gated_decay_place(int channel) {
    return channel / 16 * 16 + channel % 8 / 2 * 4 + channel / 8 % 2 * 2 + channel % 2;
}

/* Barriers of stages: tiles have come, are made, have been used, are free; the other block's sums
 * have come. */
template <int KP>
struct mn_gated_smem {
    mn_gated_stage<KP> stage[MN_GATED_STAGES];
    uint64_t full[MN_GATED_STAGES], scaled[MN_GATED_STAGES];
    uint64_t out_full[MN_GATED_STAGES], empty[MN_GATED_STAGES], given[MN_GATED_STAGES];
    mn_scan_coord place;
    uint32_t triangle[4 * 32];    // of mn_gated_cumsum_mma
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

    __device__ static void sum(mn_gated_acc &e, const mn_gated_cumsum_mma &triangle,
                               uint32_t tile) {
        uint32_t g[4];
        mn_gated_ldmatrix<true>(g, tile);
        triangle.sum(e[0], g[0], g[1]);
        triangle.sum(e[1], g[2], g[3]);
    }

    __device__ void make(const mn_gated_acc &sums) {
#pragma unroll
        for (int n = 0; n < 2; n++) {
#pragma unroll
            for (int i = 0; i < 4; i++) e[n][i] = sums[n][i];
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

/* Which of them do, by lanes. */
struct mn_gated_underflow {
    unsigned mask[2][2];

    /* Whether a channel has decayed too far up to a key, from the sum of its decays. */
    __device__ static bool is_far(float e) { return !(e > -100.0f); }

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
                if (!local) continue;
                if (is_far(f.e[n][at])) keys.inside[n][at] = 0.0f;
                keys.to_end[n][at] =
                    (j ? mn_bf16_hi(pair) : mn_bf16_lo(pair)) * mn_exp2(-to_end) * after[n][j];
            }
        }
    }

    /* P += their scores one by one: q_t k_s 2^(row_t - column_s), for keys that are too far; of
     * rows of the next part where it is ACROSS, whose sums begin where those of the columns end. */
    template <bool ACROSS>
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
            const float shift =
                ACROSS ? __shfl_sync(0xffffffffu, column[1], 28 + from) : 0.0f;    // of token 15
#pragma unroll
            for (int i = 0; i < 2; i++) {
                column[i] = is_far(column[i]) ? column[i] - shift : INFINITY;    // a factor of 0
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
    deep.add<false>(P.own[1], q[1], f[1].e, k[1], f[1].e);
    deep.recompute(keys[0], f[0], k[0], f[1].whole);
    deep.add<false>(P.own[0], q[0], f[0].e, k[0], f[0].e);
    deep.add<true>(P.across, q[1], f[1].e, k[0], f[0].e);
}

/* 16 channels of a chunk, whose tiles lie at q and k; stores their decays over the chunk. `sums`
 * are those of their decays, and become those of the next 16 channels, at `next`: they are added up
 * while results of these are made. */
__device__ inline void mn_gated_scale_channels(mn_gated_scores &P, float (&cum_decay)[2][2],
                                               mn_gated_acc (&sums)[2],
                                               const mn_gated_cumsum_mma &triangle, uint32_t q,
                                               uint32_t k, uint32_t next) {
    mn_gated_decay_factors f[2];
    mn_gated_scaled_keys keys[2];
    uint32_t x[2][4], y[2][4], left[4], right[2][4];
#pragma unroll
    for (int part = 0; part < 2; part++) {
        f[part].make(sums[part]);
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
        f[0].sum(sums[part], triangle, next + part * MN_GATED_SUB_BYTES);
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
        mn_gated_acc sums;
        f[part].sum(sums, triangle, g + part * MN_GATED_SUB_BYTES);
        f[part].make(sums);
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
template <int KP, int SHARE>
__device__ inline void mn_gated_zero_tail(mn_gated_stage<KP> &in, int count, int half, int rank) {
    constexpr int vec16s = KP / 16 / (SHARE > 1 ? SHARE : 1);
    const uint4 zeros = make_uint4(0, 0, 0, 0);
    const int left = MN_GATED_CHUNK - count;
#pragma unroll 1
    for (int i = threadIdx.x % 32; i < left * vec16s; i += 32) {
        const int row = count + i / vec16s, vec16 = half * vec16s + i % vec16s;
        const uint32_t at = vec16 / 8 * MN_GATED_SMEM_TILE + mn_gated_swizzle(row, vec16);
        const uint32_t own = at + rank * MN_GATED_SMEM_TILE;
        *(uint4 *)(in.q + own) = zeros, *(uint4 *)(in.k + own) = zeros;
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

/* The other of two blocks that share a head: addresses there are so far from these. */
struct mn_gated_other {
    uint32_t shift;    // 0: there is none

    template <int KP>
    __device__ mn_gated_other(const mn_gated_smem<KP> &smem, int rank) {
        const uint32_t here = mn_smem_addr(&smem);
        shift = mn_cluster_address(here, 1 - rank) - here;
    }

    __device__ mn_gated_other() : shift(0) {}

    /* To the same place there, whose barrier counts the bytes. */
    __device__ void give(const void *to, float4 x, const uint64_t *mbar) const {
        mn_cluster_store(mn_smem_addr(to) + shift, x, mn_smem_addr(mbar) + shift);
    }

    __device__ void arrive(const uint64_t *mbar) const {
        asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(
                         mn_smem_addr(mbar) + shift) : "memory");
    }
};

template <int SHARE, int KP>
__device__ inline mn_gated_other mn_gated_other_of(const mn_gated_smem<KP> &smem, int rank) {
    if constexpr (SHARE > 1) return mn_gated_other(smem, rank);
    else return mn_gated_other();
}

/* What a pair has made of its block's channels to the other block: one warp Q~, one K~. */
template <int KP>
__device__ inline void mn_gated_give_tiles(mn_gated_smem<KP> &smem, int slot, int half, int rank,
                                           const mn_gated_other &other) {
    mn_gated_stage<KP> &in = smem.stage[slot];
    const float4 *from = (const float4 *)((half ? in.k : in.q) + rank * MN_GATED_SMEM_TILE);
#pragma unroll
    for (int i = 0; i < MN_GATED_SMEM_TILE / 16; i += 32) {
        const float4 *at = from + i + threadIdx.x % 32;
        other.give(at, *at, &smem.scaled[slot]);
    }
}

/* Both blocks' sums, which each adds up alike; tiles go out while the other's sums come. */
template <int KP>
__device__ inline void mn_gated_join_scores(mn_gated_smem<KP> &smem, int slot, int phase,
                                            float (&sum)[3][4], int half, int pair,
                                            const mn_gated_other &other) {
    const float4 *at = smem.stage[slot].given(half) + threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < 3; i++) {
        const float(&x)[4] = sum[i];
        other.give(at + 32 * i, make_float4(x[0], x[1], x[2], x[3]), &smem.given[slot]);
    }
    mn_gated_give_tiles(smem, slot, half, (int)smem.place.slice, other);
    mn_mbarrier_wait(&smem.given[slot], phase);
#pragma unroll
    for (int i = 0; i < 3; i++) {
        const float4 x = at[32 * i];
        sum[i][0] += x.x, sum[i][1] += x.y, sum[i][2] += x.z, sum[i][3] += x.w;
    }
    mn_gated_pair_sync(pair);    // both have read what they gave each other, where scores go
}

/* The two warps of a pair add up their scores; each has the rest of one part, and eight columns of
 * what lies across. Where blocks SHARE, those of the other block's pair join. Against time they are
 * transposed. */
template <int KP, int SHARE>
__device__ inline void mn_gated_reduce_scores(mn_gated_smem<KP> &smem, int slot, int phase,
                                              mn_gated_scores &P, int half, int pair, bool reverse,
                                              const mn_gated_other &other) {
    const int lane = threadIdx.x % 32;
    mn_gated_stage<KP> &in = smem.stage[slot];
    const uint32_t tile = mn_smem_addr(in.scores());
    float sum[3][4];
    float4 *give = in.given(half, SHARE > 1) + lane;
    const float4 *take = in.given(1 - half, SHARE > 1) + lane;
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
    if (SHARE > 1) mn_gated_join_scores<KP>(smem, slot, phase, sum, half, pair, other);
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

__device__ inline void mn_gated_add_scores(mn_gated_scores &P, const mn_gated_scores &other) {
#pragma unroll
    for (int i = 0; i < 8; i++) {
        P.own[0][i / 4][i % 4] += other.own[0][i / 4][i % 4];
        P.own[1][i / 4][i % 4] += other.own[1][i / 4][i % 4];
        P.across[i / 4][i % 4] += other.across[i / 4][i % 4];
    }
}

/* What the warps that scale do. */
template <int KP, bool HAS_OUT, bool REDO, int SHARE>
__device__ inline void mn_gated_scale(mn_gated_smem<KP> &smem, bool reverse) {
    constexpr int steps = KP / 32 / (SHARE > 1 ? SHARE : 1);    // of 16 channels, of a warp
    constexpr bool quarters = SHARE == MN_GATED_ALIKE;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % (2 * MN_GATED_PAIRS);
    const int pair = warp % MN_GATED_PAIRS, half = warp / MN_GATED_PAIRS;
    const int rank = SHARE > 1 ? (int)smem.place.slice : 0;
    const int iters = (int)(smem.place.end - smem.place.iter);
    const int last = (int)smem.place.n_chunks - 1, iter = (int)smem.place.iter;
    const int ending = reverse ? -iter : last - iter;    // when the sequence's last chunk comes
    const int count = (int)smem.place.span.length - last * MN_GATED_CHUNK;    // its tokens
    mn_gated_cumsum_mma triangle;
    triangle.get(smem.triangle);
    const uint32_t first =
        mn_gated_pin_reg(mn_smem_addr(&smem) + mn_gated_swizzle(lane % 16, lane / 16));
    for (int n = pair; n < iters; n += MN_GATED_PAIRS) {
        const int slot = n % MN_GATED_STAGES, phase = n / MN_GATED_STAGES & 1;
        mn_gated_stage<KP> &in = smem.stage[slot];
        mn_gated_scores P = {}, first_half;
        float cum_decays[2][2];
        mn_mbarrier_wait(&smem.full[slot], phase);
        if (n == ending && count < MN_GATED_CHUNK) {
            mn_gated_zero_tail<KP, SHARE>(in, count, half, rank);
        }
        if (REDO && half == 0) {
            const int64_t t = mn_gated_token0(smem.place, reverse, n);
            mn_gated_zero_head(in, (int)(smem.place.from - t));
        }
        const auto channels_at = [&](int step) {
            const int k = (rank * 2 + half) * steps + step;
            return ((first + slot * (int)sizeof(in)) ^ k % 4 * 32) + k / 4 * MN_GATED_SMEM_TILE;
        };
        const int to_decays = 2 * (int)sizeof(in.q) - rank * MN_GATED_SMEM_TILE;
        mn_gated_acc sums[2];
#pragma unroll
        for (int part = 0; HAS_OUT && part < 2; part++) {
            mn_gated_decay_factors::sum(sums[part], triangle,
                                        channels_at(0) + to_decays + part * MN_GATED_SUB_BYTES);
        }
#pragma unroll 1
        for (int step = 0; step < steps; step++) {
            const uint32_t q = channels_at(step), keys = q + (int)sizeof(in.q);
            const uint32_t g = q + to_decays;
            const uint32_t next = channels_at(min(step + 1, steps - 1)) + to_decays;
            float cum_decay[2][2];
            if (quarters && step == steps / 2) first_half = P, P = {};
            if (HAS_OUT) mn_gated_scale_channels(P, cum_decay, sums, triangle, q, keys, next);
            else mn_gated_scale_writes(cum_decay, triangle, q, keys, g, reverse);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                if (lane / 4 == step) cum_decays[i / 2][i % 2] = cum_decay[i / 2][i % 2];
            }
        }
        if (quarters) mn_gated_add_scores(P, first_half);
        const mn_gated_other other = mn_gated_other_of<SHARE>(smem, rank);
        mn_gated_pair_sync(pair);    // both have read the decays
        if (lane / 4 < steps) {
            const int channel = ((rank * 2 + half) * steps + lane / 4) * 16 + lane % 4 * 2;
            float *to = in.cum_decays() + mn_gated_decay_place(channel);
            const float4 x = make_float4(cum_decays[0][0], cum_decays[0][1], cum_decays[1][0],
                                         cum_decays[1][1]);
            *(float4 *)to = x;
            if (SHARE > 1) other.give(to, x, &smem.scaled[slot]);
        }
        if (HAS_OUT) {
            mn_gated_reduce_scores<KP, SHARE>(smem, slot, phase, P, half, pair, reverse, other);
        }
        mn_fence_proxy_async();
        mn_mbarrier_arrive_warp(&smem.scaled[slot]);
    }
}

#endif

enum {
    MN_GATED_WARPGROUP = 128,
    MN_GATED_SCALE_THREADS = 32 * MN_GATED_PAIRS * 2,
    MN_GATED_THREADS = 2 * MN_GATED_WARPGROUP + MN_GATED_SCALE_THREADS,
};

struct mn_gated_params {
    mn_call call;
    mn_chunk_scan scan;
    CUtensorMap q, k, v, g, out;
    bool redo;      // of rows in front of numbers that are not finite: mn_additive_cut
    bool shares;    // scores are added up as two blocks of a head that share it do
};

#if MN_HAS_WGMMA
/* ---- products of a group --------------------------------------------------------------------- */
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
template <int KP, bool HAS_OUT, int SHARE>
__device__ inline void mn_gated_producer(mn_gated_smem<KP> &smem, const mn_gated_params &job) {
    constexpr int tiles = KP / 64 / (SHARE > 1 ? SHARE : 1);
    const int rank = SHARE > 1 ? (int)smem.place.slice : 0;
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
        if (SHARE > 1) {    // what comes from the other block: Q~ and K~, decays; scores
            mn_mbarrier_arrive_expect_tx(&smem.scaled[slot],
                                         2 * MN_GATED_SMEM_TILE + 64 * (int)sizeof(float));
            mn_mbarrier_arrive_expect_tx(&smem.given[slot], 2 * 96 * (int)sizeof(float4));
        }
        mn_mbarrier_arrive_expect_tx(full,
                                     ((1 + has_q + has_k) * tiles + 1) * MN_GATED_SMEM_TILE);
#pragma unroll
        for (int i = 0; i < tiles; i++) {
            const int at_smem_tile = (rank + i) * MN_GATED_SMEM_TILE, column = 64 * (rank + i);
            mn_tma_load(to.g + i * MN_GATED_SMEM_TILE, job.g, full, column, h, t, b);
            if (has_k) mn_tma_load(to.k + at_smem_tile, job.k, full, column, key, t, b);
            if (has_q) mn_tma_load(to.q + at_smem_tile, job.q, full, column, key, t, b);
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

/* A warp: the place of a chunk is free as soon as its results have been read. */
template <int KP, bool REDO, int SHARE>
__device__ inline void mn_gated_tma_store(mn_gated_smem<KP> &smem, const mn_gated_params &job) {
    const mn_scan_coord &at = smem.place;
    const mn_gated_other other = mn_gated_other_of<SHARE>(smem, (int)at.slice);
    const int iters = (int)(at.end - at.iter), lane = threadIdx.x % 32;
    for (int n = 0; n < iters; n++) {
        const int64_t t = mn_gated_token0(at, job.scan.reverse, n);
        const int count = mn_gated_chunk_len(at, t);
        const unsigned char *tile = smem.stage[n % MN_GATED_STAGES].v;
        mn_mbarrier_wait(&smem.out_full[n % MN_GATED_STAGES], n / MN_GATED_STAGES & 1);
        if (((job.call.cu_seqlens || REDO) && count < MN_GATED_CHUNK) || (REDO && t < at.from)) {
            mn_gated_store_rows(job, at, tile, t, count);
            __syncwarp();
        } else if (lane == 0) {
            mn_tma_store(job.out, tile, (int)at.column0, (int)at.h, (int)(at.span.t0 + t),
                         (int)at.span.b);
            mn_tma_store_wait_read();
        }
        if (lane == 0) {
            mn_mbarrier_arrive(&smem.empty[n % MN_GATED_STAGES]);
            if (SHARE > 1) other.arrive(&smem.empty[n % MN_GATED_STAGES]);
        }
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

    /* Left operands to memory, as matrices of 8 x 8: for each 64 channels, `subtile_stride` numbers
     * from the next, eight such side by side for each eight rows. */
    __device__ static void keep(mn_bf16 *to, int64_t subtile_stride,
                                const uint32_t (&a)[KP / 16][4]) {
        uint32_t *pairs = (uint32_t *)to + threadIdx.x / 32 * 512 + threadIdx.x % 32;
#pragma unroll
        for (int k = 0; k < KP / 4; k++) {
            pairs[k / 16 * (subtile_stride / 2) + k % 2 * 256 + k / 2 % 8 * 32] = a[k / 4][k % 4];
        }
    }

    __device__ void lower(const float *cum_decays) {
#pragma unroll
        for (int k = 0; k < KP / 16; k++) {
            const float4 f = *(const float4 *)(cum_decays + 16 * k + threadIdx.x % 4 * 4);
            float(&low)[4] = at[2 * k], (&high)[4] = at[2 * k + 1];
            low[0] *= f.x, low[1] *= f.y, low[2] *= f.x, low[3] *= f.y;
            high[0] *= f.z, high[1] *= f.w, high[2] *= f.z, high[3] *= f.w;
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

/* Where states are kept: in front of each 64 tokens; against time that is behind them. */
template <int KP>
struct mn_gated_saved {
    mn_bf16 *first;          // of the sequence's first 64 tokens, NULL: none is kept
    int64_t stride;          // numbers to the next 64 tokens
    int chunk, last, step;    // the chunk that comes next, the sequence's last

    __device__ mn_gated_saved(const mn_gated_params &job, const mn_scan_coord &at) {
        const int64_t head = at.n_slices * (KP * MN_SCAN_WIDTH);
        const bool reverse = job.scan.reverse;
        stride = job.call.H * head, first = NULL;
        last = (int)at.n_chunks - 1, step = reverse ? -1 : 1;
        chunk = reverse ? last - (int)at.iter : (int)at.iter;
        if (!job.scan.kept || job.scan.reduce_pass) return;
        first = job.scan.kept + mn_scan_first_slot(job.call, at.n, 2 * MN_GATED_CHUNK) * stride +
                at.h * head + at.slice * (MN_SCAN_WIDTH * MN_SCAN_WIDTH);
    }

    /* Where the state in front of the next chunk is kept, NULL: nowhere. */
    __device__ mn_bf16 *next(void) {
        const int now = chunk;
        chunk += step;
        const bool kept = step > 0 ? now % 2 == 0 : now % 2 == 1 || now == last;
        return first && kept ? first + now / 2 * stride : NULL;
    }
};

/* HAS_OUT: leaves results; otherwise only what becomes of the state. */
template <int KP, bool HAS_OUT, int SHARE>
__device__ inline void mn_gated_state_scan(mn_gated_smem<KP> &smem, const mn_gated_params &job) {
    const mn_chunk_scan &p = job.scan;
    const int iters = (int)(smem.place.end - smem.place.iter);
    float cum_decay = 1.0f;
    mn_gated_saved<KP> saved(job, smem.place);
    const int64_t subtile_stride = smem.place.n_slices * (MN_SCAN_WIDTH * MN_SCAN_WIDTH);
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
        mn_bf16 *kept = saved.next();
        if (HAS_OUT || kept) M.left(a);
        if (!HAS_OUT && kept) M.keep(kept, subtile_stride, a);
        mn_mbarrier_wait(&smem.full[slot], phase);
        mn_mbarrier_wait(&smem.scaled[slot], phase);
        if (SHARE > 1) mn_fence_proxy_async();    // the other block stored for threads
        mn_gated_ldmatrix<true>(z[0], mn_gated_trans_addr(v, 0));
        mn_gated_ldmatrix<true>(z[1], mn_gated_trans_addr(v, 16));
        M.lower(in.cum_decays());
        if (!HAS_OUT && threadIdx.x < KP) {
            cum_decay *= in.cum_decays()[mn_gated_decay_place(threadIdx.x)];
        }
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
        if (HAS_OUT && kept) M.keep(kept, subtile_stride, a);    // while products run
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

template <int KP, bool HAS_OUT, bool REDO, int SHARE>
__global__ void __launch_bounds__(MN_GATED_THREADS, 1)
additive_gated_scan_sm90(const __grid_constant__ mn_gated_params job) {
#if MN_HAS_WGMMA
    extern __shared__ __align__(1024) unsigned char gated_smem_bytes[];
    mn_gated_smem<KP> &smem = *(mn_gated_smem<KP> *)gated_smem_bytes;
    if (HAS_OUT && !REDO) mn_pdl_launch_dependents();
    if (threadIdx.x == 0) {
        for (int i = 0; i < MN_GATED_STAGES; i++) {
            mn_mbarrier_init(&smem.full[i], 1);
            mn_mbarrier_init(&smem.scaled[i], SHARE > 1 ? 3 : 2);
            mn_mbarrier_init(&smem.given[i], 1);
            mn_mbarrier_init(&smem.out_full[i], MN_GATED_WARPGROUP / 32);
            mn_mbarrier_init(&smem.empty[i], SHARE > 1 ? SHARE
                                             : HAS_OUT ? 1
                                                       : MN_GATED_WARPGROUP / 32);
        }
        mn_mbarrier_init_fence();
        smem.place = mn_scan_block_coord(job.call, job.scan, MN_GATED_CHUNK);
    }
    if (threadIdx.x / 32 == 1) mn_gated_cumsum_mma().put(smem.triangle);
    __syncthreads();
    if (REDO) mn_additive_cut(smem.place, job.scan, MN_GATED_CHUNK);
    if (smem.place.idle) return;    // so is the other of two blocks that share a head
    if (SHARE > 1) mn_cluster_arrive(), mn_cluster_wait();
    if (threadIdx.x < MN_GATED_WARPGROUP) {
        mn_setmaxnreg_inc<152>();
        mn_gated_state_scan<KP, HAS_OUT, SHARE>(smem, job);
    } else if (threadIdx.x < MN_GATED_WARPGROUP + MN_GATED_SCALE_THREADS) {
        mn_setmaxnreg_inc<160>();
        mn_gated_scale<KP, HAS_OUT, REDO, SHARE>(smem, job.scan.reverse);
    } else {
        mn_setmaxnreg_dec<40>();
        const int warp = threadIdx.x / 32 % 4;
        if (warp == 0) mn_gated_producer<KP, HAS_OUT, SHARE>(smem, job);
        if (warp == 1 && HAS_OUT) mn_gated_tma_store<KP, REDO, SHARE>(smem, job);
    }
    if (SHARE > 1) mn_cluster_arrive(), mn_cluster_wait();    // nothing comes for this block
#endif
}

/* Whether the kernel serves a scan: by its kind and sizes, never by its length; rows have to be
 * such that TMA can bring them. Fills in the maps. */
inline bool mn_gated_supported(mn_gated_params *job, const mn_chunk_scans *scans) {
    const mn_chunk_scan &p = scans->scan[0];
    const mn_call &call = scans->call;
    const mn_in &q = p.reverse ? p.y : p.x, &k = p.reverse ? p.x : p.y;
    job->call = call, job->scan = p, job->redo = false;
    job->shares = p.depth > 64 && mn_scan_slices(p) == 2 && p.out.data && !p.kept;
    return p.mode == MN_SCAN_PLAIN && p.state_column == 1 && p.depth <= 128 &&
           p.depth % 8 == 0 && p.width % 8 == 0 && mn_device_is_sm90() &&
           mn_tma_map(&job->q, q, call, p.depth, MN_GATED_CHUNK) &&
           mn_tma_map(&job->k, k, call, p.depth, MN_GATED_CHUNK) &&
           mn_tma_map(&job->v, p.z, call, p.width, MN_GATED_CHUNK) &&
           mn_tma_map(&job->g, scans->g, call, p.depth, MN_GATED_CHUNK) &&
           (p.out.data ? mn_tma_map(&job->out, p.out, call, p.width, MN_GATED_CHUNK)
                       : p.kept != NULL);
}

/* The two blocks of a head as a cluster: stores of kept states would hold up both. */
template <int KP>
static int launch_cluster(const mn_gated_params &job, dim3 grid, cudaStream_t stream) {
    const auto kernel = additive_gated_scan_sm90<KP, true, false, KP / 64>;
    const int smem = (int)sizeof(mn_gated_smem<KP>);
    const cudaError_t code =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, smem);
    if (code != cudaSuccess) return code;
    cudaLaunchAttribute cluster = {};
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim.x = KP / 64, cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = grid, config.blockDim = dim3(MN_GATED_THREADS);
    config.dynamicSmemBytes = smem, config.stream = stream;
    config.attrs = &cluster, config.numAttrs = 1;
    return cudaLaunchKernelEx(&config, kernel, job);
}

template <int KP>
static int launch_scan(const mn_gated_params &job, int64_t segments, cudaStream_t stream) {
    constexpr int alike = KP > 64 ? MN_GATED_ALIKE : MN_GATED_ALONE;
    const int64_t blocks = mn_scan_slices(job.scan) * job.call.H * mn_n_spans(job.call);
    if (blocks == 0) return cudaSuccess;
    if (blocks > INT32_MAX) return cudaErrorNotSupported;
    const dim3 grid((unsigned)blocks, 1, (unsigned)segments);
    const bool reads = job.scan.out.data && !job.scan.reduce_pass;
    if (job.shares && reads && !job.redo && job.call.T >= MN_GATED_SHARED_TOKENS) {
        return launch_cluster<KP>(job, grid, stream);
    }
    const auto alone = job.redo ? additive_gated_scan_sm90<KP, true, true, MN_GATED_ALONE>
                       : reads  ? additive_gated_scan_sm90<KP, true, false, MN_GATED_ALONE>
                                : additive_gated_scan_sm90<KP, false, false, MN_GATED_ALONE>;
    const auto as_two = job.redo ? additive_gated_scan_sm90<KP, true, true, alike>
                                 : additive_gated_scan_sm90<KP, true, false, alike>;
    return mn_launch_smem_behind(job.redo, job.shares && reads ? as_two : alone, grid,
                                 MN_GATED_THREADS, sizeof(mn_gated_smem<KP>), stream, job);
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
    return mn_additive_gated_grads(job, stream);
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
    return mn_additive_gated_queries(job, stream);
}

}    // namespace mneme::additive
