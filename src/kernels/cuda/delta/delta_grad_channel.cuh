/* delta_grad_channel.cuh - delta_grad.cuh where each channel has a decay of its own.
 *
 *   dq_ti  = scale exp(G_ti) (dO S')_ti + scale sum_{s <= t} dP_ts beta_s w_si exp(G_ti - G_si)
 *   de_ti  = -exp(G_ti) (dX S')_ti + sum_{s < t} dA_ts beta_s w_si exp(G_ti - G_si)
 *   dw_si  = beta_s (exp(G_Li - G_si) (R D')_si + sum_{t >= s} scale dP_ts q_ti exp(G_ti - G_si)
 *            + sum_{t > s} dA_ts e_ti exp(G_ti - G_si))
 *   dG_ti  = q_ti dq_ti + e_ti de_ti - w_ti dw_ti,  and that of the chunk's end as in
 *   delta_grad.cuh
 *
 * Pairs of tokens in different blocks of 16 go through tensor cores, with decays counted from the
 * start of the later token's block on one side and to the end of the earlier one's on the other, so
 * that no factor exceeds 1. Pairs inside a block are summed up one by one in float32, a thread for
 * each channel of each block. Decays are cut off as in delta_intra_chunk_channel.cuh.
 *
 * In pairs of rows (MN_DELTA_PAIRS) sums named e are those of a, whose sign is the other, and reads
 * take the sum of decays without their row's own. */
#ifndef MN_KERNELS_CUDA_DELTA_DELTA_GRAD_CHANNEL_CUH
#define MN_KERNELS_CUDA_DELTA_DELTA_GRAD_CHANNEL_CUH

#include "kernels/cuda/delta/delta_grad.cuh"
#include "kernels/cuda/delta/delta_intra_chunk_channel.cuh"

namespace mneme::delta {

/* What is in shared memory once the states have been read: in turn the tiles `late`, `early` and
 * `sums`, and scale dP (x) and dA (y) of pairs of tokens inside blocks of 16
 * (inside[block][t][s]). */
template <int KT>
struct mn_channel_grad_tiles {
    union {
        unsigned char late[3][mn_tile_bytes<KT>()];    // rows of w for a later block: 1, 2, 3
        struct {
            unsigned char q[3][mn_tile_bytes<KT>()], e[3][mn_tile_bytes<KT>()];
        } early;                                       // of q and e for an earlier one: 0, 1, 2
        struct {
            mn_channel_log_decays<KT> q, e, w;
        } sums;                                        // of pairs inside blocks; then dG in q
    };
    float2 inside[4][16][16];
};

struct alignas(128) mn_channel_matrices_smem {
    unsigned char P[mn_tile_bytes<64>()], A[mn_tile_bytes<64>()];    // scale dP and dA
};

template <int KT>
struct mn_channel_grad_smem {
    union {
        mn_grad_stage<KT> stage[2];
        mn_channel_grad_tiles<KT> tiles;
    };
    mn_grad_keys<KT> keys;
    union {
        mn_channel_matrices_smem matrices;
        float ends[MN_DELTA_GRAD_THREADS / (KT / 8)][KT];    // parts of S . D, before matrices
    };
    mn_channel_log_decays<KT> log_decays;
    float written[4][KT], end[KT], run[4][KT], beta[MN_DELTA_CHUNK];
    mn_grad_sums sums;
};

/* ---- through states -------------------------------------------------------------------------- */

/* Loads g of the chunk and stores its running sums from the start of each block of 16 rows in
 * smem.log_decays; beta too. */
template <int KT, int CHANNEL>
__device__ inline void mn_channel_load_log_decays(mn_channel_grad_smem<KT> &smem,
                                                  const mn_delta_params &job,
                                        const mn_grad_coord &at) {
    const int k = threadIdx.x, block = k / (KT / 2), i = k % (KT / 2) * 2;
    if (k < MN_DELTA_CHUNK) smem.beta[k] = job.workspace.log_decays[at.index].beta[k];
    if (block >= 4) return;
    float2 g[16];
    constexpr int tokens = mn_delta_chunk_tokens(CHANNEL == MN_DELTA_PAIRS) / 4;
    mn_channel_load_decays<CHANNEL>(g, job, at.tile.span, at.h, at.tile.first + tokens * block,
                                    at.count - 16 * block, at.channel0 + i);
    mn_channel_cumsum(smem.log_decays, g, block, i);
}

/* Sums of log decays of channels i and i + 1 from the chunk's start to that of block `block`, or
 * from the block's end to the chunk's. */
template <int KT>
__device__ inline float2 mn_channel_decay_from_start(const mn_channel_log_decays<KT> &c,
                                                     int block, int i) {
    float2 sum = make_float2(0.0f, 0.0f);
    for (int M = 0; M < block; M++) sum = sum + c.pair(16 * M + 15, i);
    return sum;
}

template <int KT>
__device__ inline float2 mn_channel_decay_to_end(const mn_channel_log_decays<KT> &c, int block,
                                                 int i) {
    float2 sum = make_float2(0.0f, 0.0f);
    for (int M = block + 1; M < 4; M++) sum = sum + c.pair(16 * M + 15, i);
    return sum;
}

/* Multiplies what came through the states by its decays: dO S', dX S' and R D' in `sum`. Stores
 * in smem.written the sums over the block's tokens of beta w times the last of these. */
template <int KT, int CHANNEL>
__device__ void mn_channel_decay_states(mn_channel_grad_smem<KT> &smem, mn_grad_acc<KT> &sum,
                                  const unsigned char *w, float scale, const mn_grad_coord &at) {
    const int lane = threadIdx.x % 32, t = at.block * 16 + lane / 4;
#pragma unroll
    for (int n = 0; n < mn_grad_acc<KT>::N; n++) {
        const int i = at.quarter * (KT / 4) + 8 * n + lane % 4 * 2;
        const float2 before = mn_channel_decay_from_start(smem.log_decays, at.block, i);
        const float2 behind = mn_channel_decay_to_end(smem.log_decays, at.block, i);
        const float2 last = smem.log_decays.pair(at.block * 16 + 15, i);
        float2 written = make_float2(0.0f, 0.0f);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int row = t + 8 * half, c = 2 * half;
            const float2 log_decay = smem.log_decays.pair(row, i);
            const float2 early = before + smem.log_decays.template read<CHANNEL>(row, i);
            const float2 late = behind + (last - log_decay);
            const float2 cum_decay = mn_exp2(early), keep = mn_exp2(late);
            const unsigned write = *(const unsigned *)(w + mn_tile_swizzle(row, i / 8) + i % 8 * 2);
            sum.q[n][c] *= scale * cum_decay.x, sum.q[n][c + 1] *= scale * cum_decay.y;
            const float sign = CHANNEL == MN_DELTA_PAIRS ? 1.0f : -1.0f;
            sum.e[n][c] *= sign * cum_decay.x, sum.e[n][c + 1] *= sign * cum_decay.y;
            sum.w[n][c] *= keep.x, sum.w[n][c + 1] *= keep.y;
            written.x = fmaf(smem.beta[row] * mn_bf16_lo(write), sum.w[n][c], written.x);
            written.y = fmaf(smem.beta[row] * mn_bf16_hi(write), sum.w[n][c + 1], written.y);
        }
        written.x = mn_col_sum(written.x), written.y = mn_col_sum(written.y);
        if (lane < 4) *(float2 *)&smem.written[at.block][i] = written;
    }
}

/* smem.end[i] = exp(G_Li) sum over columns of S . D + sum_s beta_s w_si exp(G_Li - G_si) (R D')_si:
 * dG of the chunk's end, a thread for each channel. */
template <int KT>
__device__ inline void mn_channel_end(mn_channel_grad_smem<KT> &smem) {
    const int i = threadIdx.x;
    if (i >= KT) return;
    float log_decay = 0.0f, both = 0.0f, written = 0.0f;
    for (int M = 0; M < 4; M++) {
        log_decay += smem.log_decays.at[16 * M + 15][i];
        written += smem.written[M][i];
    }
    for (int k = 0; k < MN_DELTA_GRAD_THREADS / (KT / 8); k++) both += smem.ends[k][i];
    smem.end[i] = fmaf(mn_exp2(log_decay), both, written);
}

/* In pairs: adds dX S' and dX R' of what rounding left of dX, which is in the row behind. */
template <int KT>
__device__ inline void mn_channel_add_rest(mn_grad_acc<KT> &sum) {
    const auto add = [](float (&x)[4]) {
#pragma unroll
        for (int c = 0; c < 4; c++) x[c] += __shfl_xor_sync(0xffffffffu, x[c], 4);
    };
#pragma unroll
    for (int n = 0; n < mn_grad_acc<KT>::N; n++) add(sum.e[n]);
#pragma unroll
    for (int n = 0; n < 2; n++) add(sum.A[n]);
}

/* ---- between blocks -------------------------------------------------------------------------- */

/* Stores scale dP and dA = -dX R' (in pairs dX R') in bf16, and in float32 inside blocks of 16. */
template <int KT, int CHANNEL>
__device__ inline void mn_channel_store_matrices(mn_channel_grad_smem<KT> &smem,
                                                 const mn_grad_acc<KT> &sum,
                                          float scale, const mn_grad_coord &at) {
    const int lane = threadIdx.x % 32;
    if (at.quarter > at.block) return;
#pragma unroll
    for (int n = 0; n < 2; n++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int row = lane / 4 + 8 * half, column = n * 8 + lane % 4 * 2, c = 2 * half;
            const int t = at.block * 16 + row, s = at.quarter * 16 + column;
            const float sign = CHANNEL == MN_DELTA_PAIRS ? 1.0f : -1.0f;
            const float p[2] = { scale * sum.P[n][c], scale * sum.P[n][c + 1] };
            const float a[2] = { sign * sum.A[n][c], sign * sum.A[n][c + 1] };
            const unsigned place = mn_tile_swizzle(t, s / 8) + s % 8 * 2;
            *(unsigned *)(smem.matrices.P + place) = mn_bf16x2(p[0], p[1]);
            *(unsigned *)(smem.matrices.A + place) = mn_bf16x2(a[0], a[1]);
            if (at.quarter != at.block) continue;
            smem.tiles.inside[at.block][row][column] = make_float2(p[0], a[0]);
            smem.tiles.inside[at.block][row][column + 1] = make_float2(p[1], a[1]);
        }
    }
}

/* tiles.late[I - 1], for I = 1, 2, 3: rows beta_s w_s of earlier blocks, decayed to the start of
 * block I. */
template <int KT>
__device__ void mn_channel_decay_w(mn_channel_grad_smem<KT> &smem, const unsigned char *w) {
    constexpr int pairs = KT / 2;
    for (int k = threadIdx.x; k < 48 * pairs; k += MN_DELTA_GRAD_THREADS) {
        const int s = k / pairs, i = k % pairs * 2, J = s / 16;
        const unsigned place = mn_tile_swizzle(s, i / 8) + i % 8 * 2;
        const unsigned write = *(const unsigned *)(w + place);
        const float x = smem.beta[s] * mn_bf16_lo(write), y = smem.beta[s] * mn_bf16_hi(write);
        float2 log_decay = smem.log_decays.pair(16 * J + 15, i) - smem.log_decays.pair(s, i);
        for (int I = J + 1; I < 4; I++) {
            const float2 decay = mn_exp2(log_decay);
            *(unsigned *)(smem.tiles.late[I - 1] + place) = mn_bf16x2(x * decay.x, y * decay.y);
            log_decay = log_decay + smem.log_decays.pair(16 * I + 15, i);
        }
    }
}

/* tiles.early.q[J] and .e[J], for J = 0, 1, 2: rows of later blocks, decayed from the end of
 * block J. */
template <int KT, int CHANNEL>
__device__ void mn_channel_decay_qe(mn_channel_grad_smem<KT> &smem) {
    constexpr int pairs = KT / 2;
    for (int k = threadIdx.x; k < 48 * pairs; k += MN_DELTA_GRAD_THREADS) {
        const int t = 16 + k / pairs, i = k % pairs * 2, I = t / 16;
        const unsigned place = mn_tile_swizzle(t, i / 8) + i % 8 * 2;
        const unsigned q = *(const unsigned *)(smem.keys.q + place);
        const unsigned e = *(const unsigned *)(smem.keys.e + place);
        float2 log_decay = smem.log_decays.template read<CHANNEL>(t, i);
        for (int J = I - 1; J >= 0; J--) {
            const float x = mn_exp2(log_decay.x), y = mn_exp2(log_decay.y);
            *(unsigned *)(smem.tiles.early.q[J] + place) =
                mn_bf16x2(x * mn_bf16_lo(q), y * mn_bf16_hi(q));
            *(unsigned *)(smem.tiles.early.e[J] + place) =
                mn_bf16x2(x * mn_bf16_lo(e), y * mn_bf16_hi(e));
            log_decay = log_decay + smem.log_decays.pair(16 * J + 15, i);
        }
    }
}

/* to += x exp(log_decay) of this warp's rows: from the block's start, or to its end. */
template <int KT, int CHANNEL>
__device__ inline void mn_channel_add_decayed(float (&to)[4], const float (&x)[4],
                                       const mn_channel_log_decays<KT> &c, int block, int i,
                                       bool to_end) {
    const int t = block * 16 + threadIdx.x % 32 / 4;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float2 log_decay = c.template read<CHANNEL>(t + 8 * half, i);
        if (to_end) log_decay = c.pair(block * 16 + 15, i) - c.pair(t + 8 * half, i);
        to[2 * half] = fmaf(mn_exp2(log_decay.x), x[2 * half], to[2 * half]);
        to[2 * half + 1] = fmaf(mn_exp2(log_decay.y), x[2 * half + 1], to[2 * half + 1]);
    }
}

/* dq and de of block I from tokens of earlier blocks: products of P and A with tiles.late. */
template <int KT, int CHANNEL>
__device__ void mn_channel_grad_qe(mn_channel_grad_smem<KT> &smem, mn_grad_acc<KT> &sum,
                                      const mn_grad_coord &at) {
    const int I = at.block, channel0 = at.quarter * (KT / 4);
    if (I == 0) return;
    const unsigned rows = mn_shared_u32(smem.tiles.late[I - 1]);
#pragma unroll
    for (int n = 0; n < mn_grad_acc<KT>::N; n += 2) {
        float q[2][4] = {}, e[2][4] = {};
        for (int J = 0; J < I; J++) {
            unsigned p[4], a[4], b[4];
            mn_frag_a(p, mn_shared_u32(smem.matrices.P), 16 * I, 16 * J);
            mn_frag_a(a, mn_shared_u32(smem.matrices.A), 16 * I, 16 * J);
            mn_frag_b_trans(b, rows, 16 * J, channel0 + 8 * n);
            mn_mma(q[0], p, b[0], b[1]);
            mn_mma(q[1], p, b[2], b[3]);
            mn_mma(e[0], a, b[0], b[1]);
            mn_mma(e[1], a, b[2], b[3]);
        }
#pragma unroll
        for (int j = 0; j < 2; j++) {
            const int i = channel0 + 8 * (n + j) + threadIdx.x % 4 * 2;
            mn_channel_add_decayed<KT, CHANNEL>(sum.q[n + j], q[j], smem.log_decays, I, i, false);
            mn_channel_add_decayed<KT, CHANNEL>(sum.e[n + j], e[j], smem.log_decays, I, i, false);
        }
    }
}

/* dw of block J from tokens of later blocks: products of P' and A' with tiles.early. */
template <int KT>
__device__ void mn_channel_grad_w(mn_channel_grad_smem<KT> &smem, mn_grad_acc<KT> &sum,
                                     const mn_grad_coord &at) {
    const int J = at.block, channel0 = at.quarter * (KT / 4);
    if (J == 3) return;
#pragma unroll
    for (int n = 0; n < mn_grad_acc<KT>::N; n += 2) {
        float w[2][4] = {};
        for (int I = J + 1; I < 4; I++) {
            unsigned p[4], a[4], b[4];
            mn_frag_a_trans(p, mn_shared_u32(smem.matrices.P), 16 * J, 16 * I);
            mn_frag_a_trans(a, mn_shared_u32(smem.matrices.A), 16 * J, 16 * I);
            mn_frag_b_trans(b, mn_shared_u32(smem.tiles.early.q[J]), 16 * I, channel0 + 8 * n);
            mn_mma(w[0], p, b[0], b[1]);
            mn_mma(w[1], p, b[2], b[3]);
            mn_frag_b_trans(b, mn_shared_u32(smem.tiles.early.e[J]), 16 * I, channel0 + 8 * n);
            mn_mma(w[0], a, b[0], b[1]);
            mn_mma(w[1], a, b[2], b[3]);
        }
#pragma unroll
        for (int j = 0; j < 2; j++) {
            const int i = channel0 + 8 * (n + j) + threadIdx.x % 4 * 2;
            mn_channel_add_decayed<KT, true>(sum.w[n + j], w[j], smem.log_decays, J, i, true);
        }
    }
}

/* ---- inside blocks --------------------------------------------------------------------------- */

__device__ inline float mn_tile_element(const unsigned char *tile, int row, int i) {
    return mn_float(*(const mn_bf16 *)(tile + mn_tile_swizzle(row, i / 8) + i % 8 * 2));
}

/* dq, de and dw / beta of all pairs s < t of a block of 16 rows in one channel, to tiles.sums: a
 * thread for each block and channel. */
template <int KT, int CHANNEL>
__device__ void mn_channel_grad_inside(mn_channel_grad_smem<KT> &smem, const unsigned char *w) {
    const int block = threadIdx.x / KT, i = threadIdx.x % KT, first = 16 * block;
    if (block >= 4) return;
    float log_decay[16], write[16], dw[16];
#pragma unroll
    for (int s = 0; s < 16; s++) {
        log_decay[s] = smem.log_decays.at[first + s][i];
        write[s] = smem.beta[first + s] * mn_tile_element(w, first + s, i);
        dw[s] = 0.0f;
    }
#pragma unroll
    for (int t = 0; t < 16; t++) {
        const float q = mn_tile_element(smem.keys.q, first + t, i);
        const float e = mn_tile_element(smem.keys.e, first + t, i);
        const float read = log_decay[CHANNEL == MN_DELTA_PAIRS && t > 0 ? t - 1 : t];
        float dq = 0.0f, de = 0.0f;
#pragma unroll
        for (int s = 0; s < t; s++) {
            const float cum_decay = mn_exp2(read - log_decay[s]), x = cum_decay * write[s];
            const float2 both = smem.tiles.inside[block][t][s];
            dq = fmaf(both.x, x, dq);
            de = fmaf(both.y, x, de);
            dw[s] = fmaf(cum_decay, fmaf(both.x, q, both.y * e), dw[s]);
        }
        smem.tiles.sums.q.at[first + t][i] = dq;
        smem.tiles.sums.e.at[first + t][i] = de;
    }
#pragma unroll
    for (int s = 0; s < 16; s++) smem.tiles.sums.w.at[first + s][i] = dw[s];
}

/* Adds tiles.sums to dq, de, dw; stores dG over sums.q, for MN_DELTA_PAIRS that of reads over
 * sums.e. A token's read of its own write, which no decay comes between, is added after that. */
template <int KT, int CHANNEL>
__device__ void mn_channel_add_inside(mn_channel_grad_smem<KT> &smem, mn_grad_acc<KT> &sum,
                                       const unsigned char *w, const mn_grad_coord &at) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int n = 0; n < mn_grad_acc<KT>::N; n++) {
        const int i = at.quarter * (KT / 4) + 8 * n + lane % 4 * 2;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int t = at.block * 16 + lane / 4 + 8 * half, c = 2 * half;
            const unsigned place = mn_tile_swizzle(t, i / 8) + i % 8 * 2;
            const unsigned q = *(const unsigned *)(smem.keys.q + place);
            const unsigned e = *(const unsigned *)(smem.keys.e + place);
            const unsigned write = *(const unsigned *)(w + place);
            float2 &to = *(float2 *)&smem.tiles.sums.q.at[t][i];
            float2 &to_e = *(float2 *)&smem.tiles.sums.e.at[t][i];
            const float2 dq = to, de = to_e;
            const float2 dw = smem.tiles.sums.w.pair(t, i);
            const float beta = smem.beta[t], own = smem.tiles.inside[at.block][t % 16][t % 16].x;
            sum.q[n][c] += dq.x, sum.q[n][c + 1] += dq.y;
            sum.e[n][c] += de.x, sum.e[n][c + 1] += de.y;
            sum.w[n][c] += dw.x, sum.w[n][c + 1] += dw.y;
            const float2 erased = make_float2(mn_bf16_lo(e) * sum.e[n][c],
                                              mn_bf16_hi(e) * sum.e[n][c + 1]);
            if (CHANNEL == MN_DELTA_PAIRS) to_e = erased;
            to = CHANNEL == MN_DELTA_PAIRS ? make_float2(0.0f, 0.0f) : erased;
            to.x = fmaf(mn_bf16_lo(q), sum.q[n][c], to.x);
            to.y = fmaf(mn_bf16_hi(q), sum.q[n][c + 1], to.y);
            to.x = fmaf(-beta * mn_bf16_lo(write), sum.w[n][c], to.x);
            to.y = fmaf(-beta * mn_bf16_hi(write), sum.w[n][c + 1], to.y);
            sum.q[n][c] = fmaf(own, beta * mn_bf16_lo(write), sum.q[n][c]);
            sum.q[n][c + 1] = fmaf(own, beta * mn_bf16_hi(write), sum.q[n][c + 1]);
            sum.w[n][c] = fmaf(own, mn_bf16_lo(q), sum.w[n][c]);
            sum.w[n][c + 1] = fmaf(own, mn_bf16_hi(q), sum.w[n][c + 1]);
        }
    }
}

/* grad.g (B,T,H,K) from dG: sums from each row to the end, and dG of the end. All threads call. */
template <int KT, int CHANNEL>
__device__ void mn_channel_store_decays(mn_channel_grad_smem<KT> &smem, const mn_delta_params &job,
                                        const mn_grad_coord &at) {
    const int block = threadIdx.x / KT, i = threadIdx.x % KT;
    constexpr bool in_pairs = CHANNEL == MN_DELTA_PAIRS;
    const mn_channel_log_decays<KT> &dG = smem.tiles.sums.q, &reads = smem.tiles.sums.e;
    float run = 0.0f;
    if (block < 4) {
        for (int t = 16 * block + 15; t >= 16 * block; t--) {
            run += dG.at[t][i];
            if (in_pairs) run += reads.at[t][i];
        }
        smem.run[block][i] = run;
    }
    __syncthreads();
    if (block >= 4 || at.channel0 + i >= job.p.call.K || !job.p.grad.g.data) return;
    run = smem.end[i];
    for (int M = 3; M > block; M--) run += smem.run[M][i];
    for (int t = 16 * block + 15; t >= 16 * block; t--) {
        const int64_t when = at.tile.span.t0 + at.tile.first + (in_pairs ? t / 2 : t);
        run += dG.at[t][i];
        if (t >= at.from && t < at.count && !(in_pairs && t % 2)) {
            mn_put(mn_row<mn_bf16>(job.p.grad.g, at.tile.span.b, when, at.h) + at.channel0 + i,
                   run);
        }
        if (in_pairs) run += reads.at[t][i];
    }
}

/* What is left of a chunk once all value columns are in `sum`, but for dbeta. */
template <int KT, int CHANNEL>
__device__ inline void mn_channel_finish_chunk(mn_channel_grad_smem<KT> &smem,
                                               mn_grad_acc<KT> &sum, const mn_delta_params &job,
                                               const mn_grad_coord &at) {
    const unsigned char *w = job.p.w.data ? smem.keys.w : smem.keys.e;
    mn_store<8>(&smem.ends[threadIdx.x / (KT / 8)][0], threadIdx.x % (KT / 8) * 8, sum.end);
    __syncthreads();
    mn_channel_decay_states<KT, CHANNEL>(smem, sum, w, job.scale, at);
    mn_channel_decay_w<KT>(smem, w);
    __syncthreads();
    mn_channel_end<KT>(smem);
    __syncthreads();
    mn_channel_store_matrices<KT, CHANNEL>(smem, sum, job.scale, at);
    __syncthreads();
    mn_channel_grad_qe<KT, CHANNEL>(smem, sum, at);
    __syncthreads();
    mn_channel_decay_qe<KT, CHANNEL>(smem);
    __syncthreads();
    mn_channel_grad_w<KT>(smem, sum, at);
    __syncthreads();
    mn_channel_grad_inside<KT, CHANNEL>(smem, w);
    __syncthreads();
    mn_channel_add_inside<KT, CHANNEL>(smem, sum, w, at);
    mn_grad_store_keys<KT, CHANNEL>(smem, sum, job, smem.beta, mn_shared_u32(w), at, [] {});
    mn_channel_store_decays<KT, CHANNEL>(smem, job, at);
}

/* dbeta of the chunk's tokens, or where KT are not all channels the sum over these to
 * workspace.parts. */
template <int KT, int KP>
__device__ inline void mn_channel_store_betas(const mn_channel_grad_smem<KT> &smem,
                                              const mn_delta_params &job,
                                              const mn_grad_coord &at) {
    const int t = (int)threadIdx.x;
    float beta = 0.0f;
    if (t >= MN_DELTA_CHUNK) return;
    for (int i = 0; i < 4; i++) beta += smem.sums.beta[i][t];
    if (KT < KP) {
        mn_delta_partial *parts = (mn_delta_partial *)job.workspace.parts +
                                  mn_delta_records(job) * (int64_t)blockIdx.y;
        parts[at.index].beta[t] = beta;
        return;
    }
    const int64_t when = at.tile.span.t0 + at.tile.first + t;
    mn_bf16 *to = mn_row<mn_bf16>(job.p.grad.beta, at.tile.span.b, when, at.h);
    if (to && t < at.count) mn_put(to, beta);
}

/* Grid: (chunk slots * H, KP / KT) blocks of 512 threads: a chunk of a head, KT of its channels.
 * Loads   cot.o (64,V); dX, R (V,64) and S, D (V, KT of KP) of the workspace, 64 value columns at a
 *         time; q, e, w, g (64,KT) and beta (64).
 * Stores  grad.q, grad.e, grad.w, grad.g (64,KT) where given; dbeta (64), or where KT are not all
 *         channels the sum over these in workspace.parts[blockIdx.y][blockIdx.x].
 * Launched by backward of delta_bwd_chunk.cu and, with CHANNEL = MN_DELTA_PAIRS, by
 * dplr_chunk.cu. */
template <int KT, int KP, int CHANNEL>
__global__ void __launch_bounds__(MN_DELTA_GRAD_THREADS)
delta_grad_channel_kernel(const __grid_constant__ mn_delta_params job,
                          const __grid_constant__ mn_grad_fold fold) {
    extern __shared__ __align__(128) unsigned char bytes[];
    mn_channel_grad_smem<KT> &smem = *(mn_channel_grad_smem<KT> *)bytes;
    if (job.cuts) mn_pdl_wait();
    const mn_grad_coord at = mn_grad_block_coord<CHANNEL == MN_DELTA_PAIRS>(job, KT, KP);
    if (at.count == 0) return;
    mn_grad_acc<KT> sum;
    mn_channel_load_log_decays<KT, CHANNEL>(smem, job, at);
    mn_grad_mainloop<KT, CHANNEL>(sum, smem, job, at);
    if (CHANNEL == MN_DELTA_PAIRS) mn_channel_add_rest<KT>(sum);
    mn_channel_finish_chunk<KT, CHANNEL>(smem, sum, job, at);
    if (CHANNEL == MN_DELTA_PAIRS) return;    // betas are ones
    mn_channel_store_betas<KT, KP>(smem, job, at);
    mn_grad_fold_heads<KT>(job, fold, at, (int *)bytes);
}

}    // namespace mneme::delta

#endif
