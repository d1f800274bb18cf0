/* delta_bwd_chunk.cu - gradients of delta over chunks: matrices again, the scan forward that keeps
 * the states, the scan back, then keys and decays of all chunks at once. */
#include "kernels/cuda/delta/delta_intra_chunk_channel.cuh"
#include "kernels/cuda/delta/delta_grad.cuh"
#include "kernels/cuda/delta/delta_launch.cuh"

namespace mneme::delta {

/* delta_grad.cuh where each channel has a decay of its own.
 *
 *   dq_ti += scale sum_s dP_ts beta_s w_si exp(G_ti - G_si)      and so on
 *
 * Pairs of tokens in different blocks of 16 go through tensor cores, with decays counted from the
 * start of the later token's block on one side and to the end of the earlier one's on the other, so
 * that no factor exceeds 1. Pairs inside a block are summed up one by one in float32, a thread for
 * each channel of each block. Decays are cut off as in delta_intra_chunk_channel.cuh. */

/* What is in shared memory once the states have been read: tiles in iter, and -dA and scale dP of
 * pairs inside blocks. */
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
    unsigned char P[mn_tile_bytes<64>()], A[mn_tile_bytes<64>()];    // scale dP and -dA
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
        float ends[MN_DELTA_GRAD_THREADS / (KT / 8)][KT];    // S . D, before
    };
    mn_channel_log_decays<KT> log_decays;
    float written[4][KT], end[KT], run[4][KT], beta[MN_DELTA_CHUNK];
    mn_grad_sums sums;
};

/* ---- through states -------------------------------------------------------------------------- */

/* Levels of this block's channels. */
template <int KT>
__device__ inline void mn_channel_load_log_decays(mn_channel_grad_smem<KT> &smem,
                                                  const mn_delta_params &job,
                                        const mn_grad_coord &at) {
    const int k = threadIdx.x, block = k / (KT / 2), i = k % (KT / 2) * 2;
    if (k < MN_DELTA_CHUNK) smem.beta[k] = job.workspace.log_decays[at.index].beta[k];
    if (block >= 4) return;
    float2 g[16];
    mn_channel_load_decays(g, job, at.tile.span, at.h, at.tile.first + 16 * block,
                      at.count - 16 * block, at.channel0 + i);
    mn_channel_cumsum<KT>(smem.log_decays, g, block, i);
}

/* The decay of block `block`'s channels from the chunk's start, or from its end to the chunk's. */
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

/* Decays what came through the states; adds up w_beta dw over tokens. */
template <int KT>
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
            const float2 log_decay = smem.log_decays.pair(row, i), early = before + log_decay;
            const float2 late = behind + (last - log_decay);
            const float2 cum_decay = make_float2(__expf(early.x), __expf(early.y));
            const float2 keep = make_float2(__expf(late.x), __expf(late.y));
            const unsigned write = *(const unsigned *)(w + mn_tile_swizzle(row, i / 8) + i % 8 * 2);
            sum.q[n][c] *= scale * cum_decay.x, sum.q[n][c + 1] *= scale * cum_decay.y;
            sum.e[n][c] *= -cum_decay.x, sum.e[n][c + 1] *= -cum_decay.y;
            sum.w[n][c] *= keep.x, sum.w[n][c + 1] *= keep.y;
            written.x = fmaf(smem.beta[row] * mn_bf16_lo(write), sum.w[n][c], written.x);
            written.y = fmaf(smem.beta[row] * mn_bf16_hi(write), sum.w[n][c + 1], written.y);
        }
        written.x = mn_col_sum(written.x), written.y = mn_col_sum(written.y);
        if (lane < 4) *(float2 *)&smem.written[at.block][i] = written;
    }
}

/* dG of the chunk's end for each channel: a thread each. */
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
    smem.end[i] = fmaf(__expf(log_decay), both, written);
}

/* ---- between blocks -------------------------------------------------------------------------- */

/* scale dP and -dA in bf16, and in float32 inside blocks. */
template <int KT>
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
            const float p[2] = { scale * sum.P[n][c], scale * sum.P[n][c + 1] };
            const unsigned place = mn_tile_swizzle(t, s / 8) + s % 8 * 2;
            *(unsigned *)(smem.matrices.P + place) = mn_bf16x2(p[0], p[1]);
            *(unsigned *)(smem.matrices.A + place) = mn_bf16x2(-sum.A[n][c], -sum.A[n][c + 1]);
            if (at.quarter != at.block) continue;
            smem.tiles.inside[at.block][row][column] = make_float2(p[0], -sum.A[n][c]);
            smem.tiles.inside[at.block][row][column + 1] = make_float2(p[1], -sum.A[n][c + 1]);
        }
    }
}

/* Rows of w_beta decayed to the start of each later block. */
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
            *(unsigned *)(smem.tiles.late[I - 1] + place) = mn_bf16x2(x * __expf(log_decay.x),
                                                                   y * __expf(log_decay.y));
            log_decay = log_decay + smem.log_decays.pair(16 * I + 15, i);
        }
    }
}

/* Rows of q and e decayed from the end of each earlier block. */
template <int KT>
__device__ void mn_channel_decay_qe(mn_channel_grad_smem<KT> &smem) {
    constexpr int pairs = KT / 2;
    for (int k = threadIdx.x; k < 48 * pairs; k += MN_DELTA_GRAD_THREADS) {
        const int t = 16 + k / pairs, i = k % pairs * 2, I = t / 16;
        const unsigned place = mn_tile_swizzle(t, i / 8) + i % 8 * 2;
        const unsigned q = *(const unsigned *)(smem.keys.q + place);
        const unsigned e = *(const unsigned *)(smem.keys.e + place);
        float2 log_decay = smem.log_decays.pair(t, i);
        for (int J = I - 1; J >= 0; J--) {
            const float x = __expf(log_decay.x), y = __expf(log_decay.y);
            *(unsigned *)(smem.tiles.early.q[J] + place) =
                mn_bf16x2(x * mn_bf16_lo(q), y * mn_bf16_hi(q));
            *(unsigned *)(smem.tiles.early.e[J] + place) =
                mn_bf16x2(x * mn_bf16_lo(e), y * mn_bf16_hi(e));
            log_decay = log_decay + smem.log_decays.pair(16 * J + 15, i);
        }
    }
}

/* to += x exp(log_decay) of this warp's rows: from the block's start, or to its end. */
template <int KT>
__device__ inline void mn_channel_add_decayed(float (&to)[4], const float (&x)[4],
                                       const mn_channel_log_decays<KT> &c, int block, int i,
                                       bool to_end) {
    const int t = block * 16 + threadIdx.x % 32 / 4;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float2 log_decay = c.pair(t + 8 * half, i);
        if (to_end) log_decay = c.pair(block * 16 + 15, i) - log_decay;
        to[2 * half] = fmaf(__expf(log_decay.x), x[2 * half], to[2 * half]);
        to[2 * half + 1] = fmaf(__expf(log_decay.y), x[2 * half + 1], to[2 * half + 1]);
    }
}

/* dq and de from earlier blocks. */
template <int KT>
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
            mn_channel_add_decayed<KT>(sum.q[n + j], q[j], smem.log_decays, I, i, false);
            mn_channel_add_decayed<KT>(sum.e[n + j], e[j], smem.log_decays, I, i, false);
        }
    }
}

/* dw from later blocks. */
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
            mn_channel_add_decayed<KT>(sum.w[n + j], w[j], smem.log_decays, J, i, true);
        }
    }
}

/* ---- inside blocks --------------------------------------------------------------------------- */

__device__ inline float mn_tile_element(const unsigned char *tile, int row, int i) {
    return mn_float(*(const mn_bf16 *)(tile + mn_tile_swizzle(row, i / 8) + i % 8 * 2));
}

/* All pairs of a block of 16 tokens, s < t, in one channel. */
template <int KT>
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
        float dq = 0.0f, de = 0.0f;
#pragma unroll
        for (int s = 0; s < t; s++) {
            const float cum_decay = __expf(log_decay[t] - log_decay[s]), x = cum_decay * write[s];
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

/* Adds the pairs inside blocks; leaves dG in their place. A token's read of its own write, which no
 * decay comes between, is added after that. */
template <int KT>
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
            const float2 dq = to, de = smem.tiles.sums.e.pair(t, i);
            const float2 dw = smem.tiles.sums.w.pair(t, i);
            const float beta = smem.beta[t], own = smem.tiles.inside[at.block][t % 16][t % 16].x;
            sum.q[n][c] += dq.x, sum.q[n][c + 1] += dq.y;
            sum.e[n][c] += de.x, sum.e[n][c + 1] += de.y;
            sum.w[n][c] += dw.x, sum.w[n][c + 1] += dw.y;
            to.x = fmaf(mn_bf16_lo(q), sum.q[n][c], mn_bf16_lo(e) * sum.e[n][c]);
            to.y = fmaf(mn_bf16_hi(q), sum.q[n][c + 1], mn_bf16_hi(e) * sum.e[n][c + 1]);
            to.x = fmaf(-beta * mn_bf16_lo(write), sum.w[n][c], to.x);
            to.y = fmaf(-beta * mn_bf16_hi(write), sum.w[n][c + 1], to.y);
            sum.q[n][c] = fmaf(own, beta * mn_bf16_lo(write), sum.q[n][c]);
            sum.q[n][c + 1] = fmaf(own, beta * mn_bf16_hi(write), sum.q[n][c + 1]);
            sum.w[n][c] = fmaf(own, mn_bf16_lo(q), sum.w[n][c]);
            sum.w[n][c + 1] = fmaf(own, mn_bf16_hi(q), sum.w[n][c + 1]);
        }
    }
}

/* dg from dG: sums from each token to the end. All threads of the block call. */
template <int KT>
__device__ void mn_channel_store_decays(mn_channel_grad_smem<KT> &smem, const mn_delta_params &job,
                                        const mn_grad_coord &at) {
    const int block = threadIdx.x / KT, i = threadIdx.x % KT;
    const mn_channel_log_decays<KT> &dG = smem.tiles.sums.q;
    float run = 0.0f;
    if (block < 4) {
        for (int t = 16 * block + 15; t >= 16 * block; t--) run += dG.at[t][i];
        smem.run[block][i] = run;
    }
    __syncthreads();
    if (block >= 4 || at.channel0 + i >= job.p.call.K || !job.p.grad.g.data) return;
    run = smem.end[i];
    for (int M = 3; M > block; M--) run += smem.run[M][i];
    for (int t = 16 * block + 15; t >= 16 * block; t--) {
        run += dG.at[t][i];
        if (t >= at.count) continue;
        mn_bf16 *to = mn_row<mn_bf16>(job.p.grad.g, at.tile.span.b,
                                      at.tile.span.t0 + at.tile.first + t, at.h);
        mn_put(to + at.channel0 + i, run);
    }
}

template <int KT, int KP>
__global__ void __launch_bounds__(MN_DELTA_GRAD_THREADS)
delta_grad_channel_kernel(const __grid_constant__ mn_delta_params job) {
    extern __shared__ __align__(128) unsigned char bytes[];
    mn_channel_grad_smem<KT> &smem = *(mn_channel_grad_smem<KT> *)bytes;
    const mn_grad_coord at = mn_grad_block_coord(job, KT, KP);
    if (at.count == 0) return;
    const unsigned char *w = job.p.w.data ? smem.keys.w : smem.keys.e;
    mn_grad_acc<KT> sum;
    mn_channel_load_log_decays<KT>(smem, job, at);
    mn_grad_mainloop<KT>(sum, smem, job, at);
    mn_store<8>(&smem.ends[threadIdx.x / (KT / 8)][0], threadIdx.x % (KT / 8) * 8, sum.end);
    __syncthreads();
    mn_channel_decay_states<KT>(smem, sum, w, job.scale, at);
    mn_channel_decay_w<KT>(smem, w);
    __syncthreads();
    mn_channel_end<KT>(smem);
    __syncthreads();
    mn_channel_store_matrices<KT>(smem, sum, job.scale, at);
    __syncthreads();
    mn_channel_grad_qe<KT>(smem, sum, at);
    __syncthreads();
    mn_channel_decay_qe<KT>(smem);
    __syncthreads();
    mn_channel_grad_w<KT>(smem, sum, at);
    __syncthreads();
    mn_channel_grad_inside<KT>(smem, w);
    __syncthreads();
    mn_channel_add_inside<KT>(smem, sum, w, at);
    mn_grad_store_keys<KT>(smem, sum, job, smem.beta, mn_shared_u32(w), at);
    mn_channel_store_decays<KT>(smem, job, at);
    mn_delta_partial *parts = (mn_delta_partial *)job.workspace.parts + gridDim.x
        * (int64_t)blockIdx.y;
    if (threadIdx.x >= MN_DELTA_CHUNK) return;
    float beta = 0.0f;
    for (int i = 0; i < 4; i++) beta += smem.sums.beta[i][threadIdx.x];
    parts[at.index].beta[threadIdx.x] = beta;
}

/* ---- the second step ------------------------------------------------------------------------- */

/* Gradients of beta, and of a decay per token or head, from the parts of a chunk: one thread for
 * each token. `whole` takes the chunk's sum for a decay per head. */
__global__ void __launch_bounds__(MN_DELTA_CHUNK)
delta_reduce_grads(const __grid_constant__ mn_delta_params job, int n_partials) {
    __shared__ float sums[2][MN_DELTA_CHUNK];
    const mn_delta_args &p = job.p;
    const mn_delta_partial *parts = (const mn_delta_partial *)job.workspace.parts;
    const int64_t h = blockIdx.x % p.call.H, slot = blockIdx.x / p.call.H;
    const mn_tile_span tile = mn_tile_at(p.call, MN_DELTA_CHUNK, slot);
    const int t = threadIdx.x;
    float G = 0.0f, beta = 0.0f, end = 0.0f;
    for (int i = 0; i < n_partials && tile.n_rows > 0; i++) {
        const mn_delta_partial &part = parts[gridDim.x * (int64_t)i + blockIdx.x];
        G += part.G[t];
        beta += part.beta[t];
        end += part.end;
    }
    int now = 0;
    sums[0][t] = G;
    __syncthreads();
    for (int step = 1; step < MN_DELTA_CHUNK; step <<= 1, now ^= 1) {    // sums from t to the end
        sums[now ^ 1][t] = sums[now][t] + (t + step < MN_DELTA_CHUNK ? sums[now][t + step] : 0.0f);
        __syncthreads();
    }
    const float dg = sums[now][t] + end;
    __syncthreads();
    sums[0][t] = t < tile.n_rows ? dg : 0.0f;
    __syncthreads();
    if (t == 0 && job.workspace.whole) {
        float sum = 0.0f;
        for (int i = 0; i < MN_DELTA_CHUNK; i++) sum += sums[0][i];
        job.workspace.whole[blockIdx.x] = sum;
    }
    if (t >= tile.n_rows) return;
    const int64_t when = tile.span.t0 + tile.first + t;
    mn_bf16 *to_beta = mn_row<mn_bf16>(p.grad.beta, tile.span.b, when, h);
    if (to_beta) mn_put(to_beta, beta);
    if (p.decay != MN_DECAY_TOKEN || !p.grad.g.data) return;
    mn_put(mn_row<mn_bf16>(p.grad.g, tile.span.b, when, h), dg);
}

/* A decay per head: the sum over its chunks, each thread's in their order, then the threads'. */
__global__ void __launch_bounds__(256)
delta_head_decay_grad(const __grid_constant__ mn_delta_params job, int64_t slots) {
    __shared__ float smem[32];
    const int64_t h = blockIdx.x;
    float sum = 0.0f;
    for (int64_t slot = threadIdx.x; slot < slots; slot += 256) {
        sum += job.workspace.whole[slot * job.p.call.H + h];
    }
    sum = mn_group_sum<256>(sum, smem);
    if (threadIdx.x == 0) mn_put(mn_row<mn_bf16>(job.p.grad.g, 0, 0, h), sum);
}

/* ---- launches -------------------------------------------------------------------------------- */

/* The gradient of a decay per head is there without tokens too, and is zero then. */
static int reduce_grads(const mn_delta_params &job, int64_t records, int n_partials,
                        cudaStream_t stream) {
    const mn_delta_args &p = job.p;
    int code = cudaSuccess;
    if (records > 0) {
        delta_reduce_grads<<<(unsigned)records, MN_DELTA_CHUNK, 0, stream>>>(job, n_partials);
        code = mn_launch_status();
    }
    if (code != cudaSuccess || p.decay != MN_DECAY_HEAD || !p.grad.g.data) return code;
    delta_head_decay_grad<<<(unsigned)p.call.H, 256, 0, stream>>>(job, records / p.call.H);
    return mn_launch_status();
}

/* Both scans. */
template <int KP, bool CHANNEL>
static int scan(const mn_delta_params &job, cudaStream_t stream) {
    const int code = mn_delta_state_scan<KP>(delta_state_scan_kernel<KP, CHANNEL, true>,
                                       delta_state_scan_warp_kernel<KP, CHANNEL, true>, job, false,
                                       job.padded_v, stream);
    if (code != cudaSuccess) return code;
    return mn_delta_state_scan<KP>(delta_state_scan_bwd_kernel<KP, CHANNEL>,
                             delta_state_scan_bwd_warp_kernel<KP, CHANNEL>, job, true, job.padded_v,
                             stream);
}

template <int KP>
static int backward(const mn_delta_params &job, cudaStream_t stream) {
    constexpr int KT = KP < 128 ? KP : 128;
    const bool channel = job.p.decay == MN_DECAY_CHANNEL;
    const int64_t records = mn_tile_slots(job.p.call, MN_DELTA_CHUNK) * job.p.call.H;
    const dim3 blocks((unsigned)records, KP / KT);
    int code = mn_delta_intra_chunk<KP>(job, stream);
    if (code != cudaSuccess) return code;
    code = channel ? scan<KP, true>(job, stream) : scan<KP, false>(job, stream);
    if (code != cudaSuccess) return code;
    if (records == 0) return reduce_grads(job, 0, KP / KT, stream);
    code = mn_launch_smem(channel ? delta_grad_channel_kernel<KT, KP>
                                       : delta_grad_kernel<KT, KP>,
                               blocks, MN_DELTA_GRAD_THREADS,
                               channel ? sizeof(mn_channel_grad_smem<KT>)
                                   : sizeof(mn_grad_smem<KT>),
                               stream, job);
    if (code != cudaSuccess) return code;
    return reduce_grads(job, records, KP / KT, stream);
}

bool mn_delta_chunk_backward_plan(mn_plan *plan, const mn_delta_args *p) {
    mn_delta_workspace workspace;
    return mn_delta_workspace_layout(&workspace, &plan->shared_bytes, p, nullptr, true);
}

int mn_delta_chunk_backward(const mn_delta_args *p, void *shared, void *stream) {
    mn_delta_params job;
    if (!mn_delta_make_params(&job, p, shared, true)) return cudaErrorNotSupported;
    MN_DELTA_DISPATCH_K(backward, p->call.K, (job, (cudaStream_t)stream));
}

}    // namespace mneme::delta
