/* delta_grad.cuh - gradients of delta's keys and decays, all chunks at once, from the states S
 * in front of chunks, their adjoints D behind them, residuals R and their adjoints dX. With d_ts =
 * exp(G_t - G_s), w_beta = beta w and L the chunk's last token,
 *
 *   dP = tril(dO R')     dA = -tril(dX R', -1)
 *   dq = scale exp(G) dO S' + (scale dP . d) w_beta
 *   de = -exp(G) dX S' + (dA . d) w_beta
 *   dw_beta = exp(G_L - G) R D' + (scale dP . d)'q + (dA . d)'e
 *   dG = q dq + e de - w_beta dw_beta
 *   dG_L += exp(G_L) rowsum(S . D) + sum_s w_beta exp(G_L - G) R D'
 *
 * and dg is the sum of dG from t to the end of the chunk. For that sum, what passes between two
 * tokens t and s inside the chunk is taken from dP . P + dA . A, so that it cancels before and
 * after both to the last bit.
 *
 * A block has at most 128 channels of one chunk and head. Of the 16 warps, warp w has the 16 tokens
 * from 16 (w % 4) on and a quarter of the channels (of dP and dA: a quarter of the columns). Value
 * columns come in tiles of 64. Sums over channels leave as parts, one for each block. */
#ifndef MN_KERNELS_CUDA_DELTA_DELTA_GRAD_CUH
#define MN_KERNELS_CUDA_DELTA_DELTA_GRAD_CUH

#include "kernels/cuda/delta/delta_pairs.cuh"
#include "kernels/cuda/delta/delta_redo.cuh"

namespace mneme::delta {

enum { MN_DELTA_GRAD_THREADS = 512, MN_DELTA_GRAD_WARPS = 16 };

/* A barrier of the 16 warps that multiply. */
__device__ inline void mn_grad_sync(void) {
    asm volatile("barrier.sync 1, %0;\n" ::"n"((int)MN_DELTA_GRAD_THREADS) : "memory");
}

/* What a block stores of a chunk for delta_reduce_grads: dG, with that of the chunk's end apart,
 * and dbeta, both over its channels alone. */
struct mn_delta_partial {
    float G[MN_DELTA_CHUNK], beta[MN_DELTA_CHUNK], end, nothing[3];
};

/* Gradients of query and key heads that `times` value heads share; times 0: each has its own. A
 * block stores those of its head, and the last of a group's to arrive adds them up from L2. */
struct mn_grad_fold {
    mn_out q, e, w;         // (B,T,J,K)
    bool packed[3];         // rows of whole 16-byte vectors
    int *arrived;           // of each chunk, group and tile of channels, zeros
    int times;
};

/* A tile of 64 value columns. dX comes as the record has it, or as dv: (64 tokens, 64 columns). */
template <int KT>
struct alignas(128) mn_grad_stage {
    unsigned char cot[mn_tile_bytes<64>()], dX[mn_tile_bytes<64>()], R[mn_tile_bytes<64>()];
    unsigned char S[mn_tile_bytes<KT>()], D[mn_tile_bytes<KT>()];
};

/* scale dP . d and dA . d, (64,64), and the same times beta_s. */
struct alignas(128) mn_grad_matrices {
    unsigned char P[mn_tile_bytes<64>()], A[mn_tile_bytes<64>()];
    unsigned char P_beta[mn_tile_bytes<64>()], A_beta[mn_tile_bytes<64>()];
};

template <int KT>
struct alignas(128) mn_grad_keys {
    unsigned char q[mn_tile_bytes<KT>()], e[mn_tile_bytes<KT>()], w[mn_tile_bytes<KT>()];
};

/* Sums over the quarters of channels or columns, and over blocks of rows. */
struct mn_grad_sums {
    float G[4][MN_DELTA_CHUNK], beta[4][MN_DELTA_CHUNK], write[4][MN_DELTA_CHUNK];
    float rows[4][MN_DELTA_CHUNK], columns[4][MN_DELTA_CHUNK];
    float end[MN_DELTA_GRAD_WARPS];
};

template <int KT>
struct mn_grad_smem {
    union {
        mn_grad_stage<KT> stage[2];
        mn_grad_matrices matrices;
    };
    mn_grad_keys<KT> keys;
    mn_delta_log_decays log_decays;
    mn_grad_sums sums;
};

struct mn_grad_coord {
    mn_tile_span tile;
    int64_t h, slot, index, channel0, stride;    // index of the record; stride of rows of states
    int count, from;                             // rows; in pairs a redo leaves the first out
    int block, quarter;                          // of this warp
};

/* What a warp sums up: 16 tokens times KT / 4 channels, and times 16 columns of matrices. */
template <int KT>
struct mn_grad_acc {
    static constexpr int N = KT / 32;    // tiles of eight channels
    float q[N][4], e[N][4], w[N][4], P[2][4], A[2][4];
    float end[8];                        // S . D of eight channels, some of the rows
};

/* dv, which the scan back has stored, as what gradients come from. */
__host__ __device__ inline mn_in mn_grad_dv(const mn_delta_params &job) {
    const mn_out &dv = job.p.grad.v;
    return { dv.data, { dv.stride[0], dv.stride[1], dv.stride[2] } };
}

template <int KT, int CHANNEL>
__device__ inline void mn_grad_load(mn_grad_stage<KT> &to, const mn_delta_params &job,
                                      const mn_grad_coord &at, int64_t column0) {
    const mn_delta_workspace &workspace = job.workspace;
    const int64_t row = at.index * job.padded_v + column0;
    constexpr int n_threads = MN_DELTA_GRAD_THREADS;
    const int tid = threadIdx.x, stride = (int)at.stride;
    mn_chunk_load<CHANNEL, 64, n_threads>(to.cot, mn_in{}, job.p.cot.o, job.packed[MN_DELTA_COT],
                                          at.tile.span, at.h, at.tile.first, at.count, column0,
                                          job.p.call.V, tid);
    if (job.dX_is_dv) {
        mn_tile_load<64, n_threads>(to.dX, mn_grad_dv(job), job.packed[MN_DELTA_DV], at.tile.span,
                                    at.h, at.tile.first, at.count, column0, job.p.call.V, tid);
    } else {
        mn_tile_reload<64, n_threads>(to.dX, workspace.dX + row * MN_DELTA_CHUNK, MN_DELTA_CHUNK,
                                      tid);
    }
    mn_tile_reload<64, n_threads>(to.R, workspace.R + row * MN_DELTA_CHUNK, MN_DELTA_CHUNK, tid);
    mn_tile_reload<KT, n_threads>(to.S, workspace.S + row * stride + at.channel0, stride, tid);
    mn_tile_reload<KT, n_threads>(to.D, workspace.D + row * stride + at.channel0, stride, tid);
}

/* Adds S . D of a tile of value columns, of eight channels to N sums. */
template <int KT, int N>
__device__ inline void mn_grad_add_ends(float (&end)[N], const mn_grad_stage<KT> &stage) {
    constexpr int vec16s = KT / 8;
    const int vec16 = threadIdx.x % vec16s;
#pragma unroll
    for (int row = threadIdx.x / vec16s; row < 64; row += MN_DELTA_GRAD_THREADS / vec16s) {
        const uint4 s = *(const uint4 *)(stage.S + mn_tile_swizzle(row, vec16));
        const uint4 d = *(const uint4 *)(stage.D + mn_tile_swizzle(row, vec16));
        const unsigned x[4] = { s.x, s.y, s.z, s.w }, y[4] = { d.x, d.y, d.z, d.w };
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float &even = end[2 * i % N], &odd = end[(2 * i + 1) % N];
            even = fmaf(mn_bf16_lo(x[i]), mn_bf16_lo(y[i]), even);
            odd = fmaf(mn_bf16_hi(x[i]), mn_bf16_hi(y[i]), odd);
        }
    }
}

/* Adds a tile of value columns to the sums. DV: dX came as dv. */
template <int KT, bool DV>
__device__ inline void mn_grad_mma_values(mn_grad_acc<KT> &sum, const mn_grad_stage<KT> &stage,
                                          const mn_grad_coord &at) {
    const unsigned cot = mn_shared_u32(stage.cot), dX = mn_shared_u32(stage.dX),
        R = mn_shared_u32(stage.R);
    const unsigned S = mn_shared_u32(stage.S), D = mn_shared_u32(stage.D);
    const int row0 = 16 * at.block, channel0 = at.quarter * (KT / 4);
#pragma unroll
    for (int k = 0; k < 64; k += 16) {
        unsigned from_cot[4], from_dX[4], from_R[4], b[4];
        mn_frag_a(from_cot, cot, row0, k);
        if (DV) mn_frag_a(from_dX, dX, row0, k);
        else mn_frag_a_trans(from_dX, dX, row0, k);
        mn_frag_a_trans(from_R, R, row0, k);
#pragma unroll
        for (int n = 0; n < mn_grad_acc<KT>::N; n += 2) {
            mn_frag_b_trans(b, S, k, channel0 + 8 * n);
            mn_mma(sum.q[n], from_cot, b[0], b[1]);
            mn_mma(sum.q[n + 1], from_cot, b[2], b[3]);
            mn_mma(sum.e[n], from_dX, b[0], b[1]);
            mn_mma(sum.e[n + 1], from_dX, b[2], b[3]);
            mn_frag_b_trans(b, D, k, channel0 + 8 * n);
            mn_mma(sum.w[n], from_R, b[0], b[1]);
            mn_mma(sum.w[n + 1], from_R, b[2], b[3]);
        }
        if (at.quarter > at.block) continue;
        mn_frag_b_trans(b, R, k, 16 * at.quarter);
        mn_mma(sum.P[0], from_cot, b[0], b[1]);
        mn_mma(sum.P[1], from_cot, b[2], b[3]);
        mn_mma(sum.A[0], from_dX, b[0], b[1]);
        mn_mma(sum.A[1], from_dX, b[2], b[3]);
    }
    mn_grad_add_ends<KT>(sum.end, stage);
}

/* Starts to load the chunk's q, e, w; a block of 16 warps calls. */
template <int KT, int CHANNEL = false>
__device__ inline void mn_grad_load_keys(mn_grad_keys<KT> &to, const mn_delta_params &job,
                                         const mn_grad_coord &at) {
    const mn_delta_args &p = job.p;
    const int64_t key = mn_key_head(p.call, at.h);
    constexpr bool in_pairs = CHANNEL == MN_DELTA_PAIRS;
    const auto keys = [&](unsigned char *to, const mn_in &even, const mn_in &odd, int tensor) {
        if (!even.data && !odd.data) return;
        mn_chunk_load<CHANNEL, KT, MN_DELTA_GRAD_THREADS>(to, even, odd, job.packed[tensor],
                                                          at.tile.span, key, at.tile.first,
                                                          at.count, at.channel0, p.call.K,
                                                          threadIdx.x);
    };
    keys(to.q, mn_in{}, p.q, MN_DELTA_Q);
    keys(to.e, p.e, in_pairs ? mn_in{} : p.e, MN_DELTA_E);
    keys(to.w, p.w, in_pairs ? job.odd_w : p.w, MN_DELTA_W);
    mn_cp_async_commit();
}

/* Adds all value columns to `sum`, and loads the chunk's q, e, w into smem.keys. */
template <int KT, int CHANNEL = false, typename Smem>
__device__ inline void mn_grad_mainloop(mn_grad_acc<KT> &sum, Smem &smem,
                                           const mn_delta_params &job, const mn_grad_coord &at) {
    const int tiles = (int)(job.padded_v / 64);
    sum = {};
    mn_grad_load<KT, CHANNEL>(smem.stage[0], job, at, 0);
    mn_cp_async_commit();
    mn_grad_load_keys<KT, CHANNEL>(smem.keys, job, at);
    for (int i = 0; i < tiles; i++) {
        if (i + 1 < tiles) {
            mn_grad_load<KT, CHANNEL>(smem.stage[(i + 1) % 2], job, at, (i + 1) * 64);
        }
        mn_cp_async_commit();
        mn_cp_async_wait<1>();
        __syncthreads();
        if (job.dX_is_dv) mn_grad_mma_values<KT, true>(sum, smem.stage[i % 2], at);
        else mn_grad_mma_values<KT, false>(sum, smem.stage[i % 2], at);
        __syncthreads();
    }
    mn_cp_async_wait<0>();
}

/* A record's coordinates, without those of a warp. */
template <bool REDOES = true>
__device__ inline mn_grad_coord mn_grad_record_coord(const mn_delta_params &job, int64_t index,
                                                     int KP) {
    const mn_call &call = job.p.call;
    mn_grad_coord at = {};
    at.index = REDOES ? mn_delta_record_of(job, index) : index;
    at.stride = KP;
    if (REDOES && at.index < 0) return at;
    at.h = at.index % call.H;
    at.slot = at.index / call.H;
    at.tile = mn_tile_at(call, mn_delta_chunk_tokens(job.pairs), at.slot);
    at.count = (int)at.tile.n_rows * (job.pairs ? 2 : 1);
    return at;
}

template <bool PAIRS = false>
__device__ inline mn_grad_coord mn_grad_block_coord(const mn_delta_params &job, int KT, int KP) {
    mn_grad_coord at = mn_grad_record_coord(job, blockIdx.x, KP);
    if (PAIRS && job.cuts) at.from = 2 * (job.cuts[blockIdx.x] % mn_delta_chunk_tokens(true));
    at.channel0 = (int64_t)blockIdx.y * KT;
    at.block = threadIdx.x / 32 % 4;
    at.quarter = threadIdx.x / 128;
    return at;
}

/* ---- decays that channels share -------------------------------------------------------------- */

/* Two neighbours of P, and of A. */
__device__ inline float4 mn_grad_known(const unsigned *P, const unsigned *A) {
    return make_float4(mn_bf16_lo(*P), mn_bf16_hi(*P), mn_bf16_lo(*A), mn_bf16_hi(*A));
}

/* Stores matrices P and A with their decays in shared memory, and sums of dP . P + dA . A over rows
 * and columns. known(t, s): P at (t, s) and (t, s + 1), then A, with their decays and beta. */
template <int KT, typename Smem, typename Known>
__device__ inline void mn_grad_pairs(Smem &smem, const mn_grad_acc<KT> &sum, float scale,
                                      const mn_grad_coord &at, Known known) {
    const int lane = threadIdx.x % 32;
    float rows[2] = {}, columns[2][2] = {};
#pragma unroll
    for (int n = 0; n < 2; n++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int t = at.block * 16 + lane / 4 + 8 * half;
            const int s = at.quarter * 16 + n * 8 + lane % 4 * 2;
            float p[2], a[2];
            const float2 beta = *(const float2 *)&smem.log_decays.beta[s];
            if (at.quarter > at.block) continue;
            const float4 matrices = known(t, s);    // P, A
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int c = 2 * half + i;
                const float P = i ? matrices.y : matrices.x, A = i ? matrices.w : matrices.z;
                const bool inside = s + i <= t, before = s + i < t;
                const float cum_decay =
                    expf(mn_log_between(smem.log_decays.G[t], smem.log_decays.G[s + i]));
                p[i] = inside ? scale * cum_decay * sum.P[n][c] : 0.0f;
                a[i] = before ? -cum_decay * sum.A[n][c] : 0.0f;
                if (!before) continue;
                const float passed = fmaf(sum.P[n][c], P, -sum.A[n][c] * A);
                rows[half] += passed;
                columns[n][i] += passed;
            }
            const unsigned place = mn_tile_swizzle(t, s / 8) + lane % 4 * 4;
            *(unsigned *)(smem.matrices.P + place) = mn_bf16x2(p[0], p[1]);
            *(unsigned *)(smem.matrices.A + place) = mn_bf16x2(a[0], a[1]);
            *(unsigned *)(smem.matrices.P_beta + place) = mn_bf16x2(p[0] * beta.x, p[1] * beta.y);
            *(unsigned *)(smem.matrices.A_beta + place) = mn_bf16x2(a[0] * beta.x, a[1] * beta.y);
        }
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const float row = mn_row_sum(rows[half]);
        if (lane % 4 == 0) {
            smem.sums.rows[at.quarter][at.block * 16 + lane / 4 + 8 * half] = row;
        }
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const float column = mn_col_sum(columns[half][i]);
            const int s = at.quarter * 16 + half * 8 + lane * 2 + i;
            if (lane < 4) smem.sums.columns[at.block][s] = column;
        }
    }
}

/* Decays what came through the states, and sums it up over channels. */
template <int KT, typename Smem>
__device__ inline void mn_grad_states(Smem &smem, mn_grad_acc<KT> &sum,
                                       unsigned w, float scale, const mn_grad_coord &at) {
    const int lane = threadIdx.x % 32, t = at.block * 16 + lane / 4;
    const mn_log_sum end = smem.log_decays.G[MN_DELTA_CHUNK - 1];
    float gamma[2], late[2], beta[2], whole[2] = {}, written[2] = {};
#pragma unroll
    for (int half = 0; half < 2; half++) {
        gamma[half] = smem.log_decays.gamma[t + 8 * half];
        late[half] = expf(mn_log_between(end, smem.log_decays.G[t + 8 * half]));
        beta[half] = smem.log_decays.beta[t + 8 * half];
    }
#pragma unroll
    for (int n = 0; n < mn_grad_acc<KT>::N; n += 2) {
        const int channel = at.quarter * (KT / 4) + 8 * n;
        unsigned q[4], e[4], write[4];
        mn_frag_a(q, mn_shared_u32(smem.keys.q), at.block * 16, channel);
        mn_frag_a(e, mn_shared_u32(smem.keys.e), at.block * 16, channel);
        mn_frag_a(write, w, at.block * 16, channel);
#pragma unroll
        for (int c = 0; c < 8; c++) {
            const int half = c / 2 % 2, from = c / 2;
            float &dq = sum.q[n + c / 4][c % 4], &de = sum.e[n + c / 4][c % 4];
            float &dw = sum.w[n + c / 4][c % 4];
            dq *= scale * gamma[half], de *= -gamma[half], dw *= late[half];
            const float w_at = c % 2 ? mn_bf16_hi(write[from]) : mn_bf16_lo(write[from]);
            whole[half] = fmaf(c % 2 ? mn_bf16_hi(q[from]) : mn_bf16_lo(q[from]), dq, whole[half]);
            whole[half] = fmaf(c % 2 ? mn_bf16_hi(e[from]) : mn_bf16_lo(e[from]), de, whole[half]);
            written[half] = fmaf(beta[half] * w_at, dw, written[half]);
        }
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
        whole[half] = mn_row_sum(whole[half] - written[half]);
        written[half] = mn_row_sum(written[half]);
        if (lane % 4 != 0) continue;
        smem.sums.G[at.quarter][t + 8 * half] = whole[half];
        smem.sums.write[at.quarter][t + 8 * half] = written[half];
    }
}

/* Adds what passed inside the chunk. */
template <int KT, typename Smem>
__device__ inline void mn_grad_intra_chunk(Smem &smem, mn_grad_acc<KT> &sum, unsigned w,
                                       const mn_grad_coord &at) {
    const unsigned q = mn_shared_u32(smem.keys.q), e = mn_shared_u32(smem.keys.e);
    const unsigned P = mn_shared_u32(smem.matrices.P), A = mn_shared_u32(smem.matrices.A);
    const unsigned P_beta = mn_shared_u32(smem.matrices.P_beta),
        A_beta = mn_shared_u32(smem.matrices.A_beta);
    const int row0 = 16 * at.block, channel0 = at.quarter * (KT / 4);
    unsigned p[4], a[4], b[4];
    for (int k = 0; k <= row0; k += 16) {
        mn_frag_a(p, P_beta, row0, k);
        mn_frag_a(a, A_beta, row0, k);
#pragma unroll
        for (int n = 0; n < mn_grad_acc<KT>::N; n += 2) {
            mn_frag_b_trans(b, w, k, channel0 + 8 * n);
            mn_mma(sum.q[n], p, b[0], b[1]);
            mn_mma(sum.q[n + 1], p, b[2], b[3]);
            mn_mma(sum.e[n], a, b[0], b[1]);
            mn_mma(sum.e[n + 1], a, b[2], b[3]);
        }
    }
    for (int k = row0; k < MN_DELTA_CHUNK; k += 16) {
        mn_frag_a_trans(p, P, row0, k);
        mn_frag_a_trans(a, A, row0, k);
#pragma unroll
        for (int n = 0; n < mn_grad_acc<KT>::N; n += 2) {
            mn_frag_b_trans(b, q, k, channel0 + 8 * n);
            mn_mma(sum.w[n], p, b[0], b[1]);
            mn_mma(sum.w[n + 1], p, b[2], b[3]);
            mn_frag_b_trans(b, e, k, channel0 + 8 * n);
            mn_mma(sum.w[n], a, b[0], b[1]);
            mn_mma(sum.w[n + 1], a, b[2], b[3]);
        }
    }
}

/* A warp's 16 x KT / 4 numbers into rows of a tensor, through its part of a tile that nobody reads
 * any more. `of`: the first of every `rows` rows that is a token's. */
template <int KT>
__device__ inline void mn_grad_store(const mn_out &view, bool packed, const mn_grad_coord &at,
                                    int64_t K, unsigned char *tile,
                                    const float (&x)[mn_grad_acc<KT>::N][4], int rows = 1,
                                    int of = 0) {
    constexpr int N = mn_grad_acc<KT>::N;
    if (!view.data) return;
    const int lane = threadIdx.x % 32;
    __syncwarp();
#pragma unroll
    for (int n = 0; n < N; n++) {
        const int row = at.block * 16 + lane / 4, vec16 = at.quarter * N + n;
        *(unsigned *)(tile + mn_tile_swizzle(row, vec16) + lane % 4 * 4) =
            mn_bf16x2(x[n][0], x[n][1]);
        *(unsigned *)(tile + mn_tile_swizzle(row + 8, vec16) + lane % 4 * 4) = mn_bf16x2(x[n][2],
                                                                                    x[n][3]);
    }
    __syncwarp();
#pragma unroll
    for (int k = lane; k < 16 * N; k += 32) {
        const int row = at.block * 16 + k / N, vec16 = at.quarter * N + k % N;
        const int64_t i = at.channel0 + 8 * vec16;
        if (row < at.from || row >= at.count || i >= K || row % rows != of) continue;
        const mn_vec<mn_bf16, 8> pack = *(mn_vec<mn_bf16,
                                           8> *)(tile + mn_tile_swizzle(row, vec16));
        const int64_t when = at.tile.span.t0 + at.tile.first + row / rows;
        mn_bf16 *to = mn_row<mn_bf16>(view, at.tile.span.b, when, at.h) + i;
        if (packed) {
            *(mn_vec<mn_bf16, 8> *)to = pack;
        } else {
            for (int c = 0; c < 8 && i + c < K; c++) to[c] = pack.at[c];
        }
    }
}

/* From dw / beta to dw, and de where it is both; sums that of beta over channels. */
template <int KT, typename Smem>
__device__ inline void mn_grad_scale_writes(Smem &smem, mn_grad_acc<KT> &sum,
                                            const mn_delta_params &job, const float *beta_at,
                                            unsigned w, const mn_grad_coord &at) {
    const mn_delta_args &p = job.p;
    const int lane = threadIdx.x % 32, t = at.block * 16 + lane / 4;
    const float beta[2] = { beta_at[t], beta_at[t + 8] };
    float to_beta[2] = {};
#pragma unroll
    for (int n = 0; n < mn_grad_acc<KT>::N; n += 2) {
        unsigned write[4];
        mn_frag_a(write, w, at.block * 16, at.quarter * (KT / 4) + 8 * n);
#pragma unroll
        for (int c = 0; c < 8; c++) {
            const int half = c / 2 % 2;
            float &dw = sum.w[n + c / 4][c % 4], &de = sum.e[n + c / 4][c % 4];
            const float w_at = c % 2 ? mn_bf16_hi(write[c / 2]) : mn_bf16_lo(write[c / 2]);
            to_beta[half] = fmaf(w_at, dw, to_beta[half]);
            dw *= beta[half];
            if (!p.w.data) de += dw;
        }
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
        to_beta[half] = mn_row_sum(to_beta[half]);
        if (lane % 4 == 0) smem.sums.beta[at.quarter][t + 8 * half] = to_beta[half];
    }
}

/* Writes gradients of keys. All threads of 16 warps call, and after() once all of them have passed
 * the products. */
template <int KT, int CHANNEL = false, typename Smem, typename After>
__device__ inline void mn_grad_store_keys(Smem &smem, mn_grad_acc<KT> &sum,
                                          const mn_delta_params &job, const float *beta_at,
                                          unsigned w, const mn_grad_coord &at, After after) {
    const mn_delta_args &p = job.p;
    const int64_t K = p.call.K;
    mn_grad_scale_writes<KT>(smem, sum, job, beta_at, w, at);
    mn_grad_sync();
    after();
    if constexpr (CHANNEL == MN_DELTA_PAIRS) {
        const bool packed = job.packed[MN_DELTA_DW];
        mn_grad_store<KT>(p.grad.q, job.packed[MN_DELTA_DQ], at, K, smem.keys.q, sum.q, 2, 1);
        mn_grad_store<KT>(p.grad.e, job.packed[MN_DELTA_DE], at, K, smem.keys.e, sum.e, 2, 0);
        mn_grad_store<KT>(p.grad.w, packed, at, K, smem.keys.w, sum.w, 2, 0);
        mn_grad_store<KT>(job.odd_dw, packed, at, K, smem.keys.w, sum.w, 2, 1);
        return;
    }
    mn_grad_store<KT>(p.grad.q, job.packed[MN_DELTA_DQ], at, K, smem.keys.q, sum.q);
    mn_grad_store<KT>(p.grad.e, job.packed[MN_DELTA_DE], at, K, smem.keys.e, sum.e);
    if (p.w.data) mn_grad_store<KT>(p.grad.w, job.packed[MN_DELTA_DW], at, K, smem.keys.w, sum.w);
}

/* The sum over a group's heads of their gradients `from` (B,T,H,K), in the order of the heads, of
 * the block's tokens and channels. */
template <int KT>
__device__ inline void mn_grad_fold_rows(const mn_out &to, const mn_out &from, bool packed,
                                         int times, const mn_grad_coord &at, int64_t K) {
    constexpr int vec16s = KT / 8;
    if (!to.data) return;
    const int64_t group = at.h / times;
    for (int k = threadIdx.x; k < at.count * vec16s; k += MN_DELTA_GRAD_THREADS) {
        const int64_t when = at.tile.span.t0 + at.tile.first + k / vec16s;
        const int64_t i = at.channel0 + 8 * (k % vec16s);
        if (i >= K) continue;
        float sum[8] = {};
        for (int copy = 0; copy < times; copy++) {
            const mn_bf16 *row = mn_row<mn_bf16>(from, at.tile.span.b, when, group * times + copy);
            const uint4 x = __ldcg((const uint4 *)(row + i));
            const unsigned words[4] = { x.x, x.y, x.z, x.w };
#pragma unroll
            for (int c = 0; c < 8; c++) {
                sum[c] += c % 2 ? mn_bf16_hi(words[c / 2]) : mn_bf16_lo(words[c / 2]);
            }
        }
        mn_bf16 *row = mn_row<mn_bf16>(to, at.tile.span.b, when, group) + i;
        if (packed) mn_store<8>(row, 0, sum);
        for (int c = 0; !packed && c < 8; c++) mn_put(row + c, sum[c]);
    }
}

/* Whoever comes last of a group's blocks adds up its gradients. Of shared memory, which nobody may
 * read any more, `arrival` tells the threads of 16 warps. All of them call. */
template <int KT>
__device__ inline void mn_grad_fold_heads(const mn_delta_params &job, const mn_grad_fold &fold,
                                          const mn_grad_coord &at, int *arrival) {
    if (fold.times == 0) return;
    const int64_t group = at.slot * (job.p.call.H / fold.times) + at.h / fold.times;
    __threadfence();
    mn_grad_sync();
    if (threadIdx.x == 0) {
        *arrival = atomicAdd(fold.arrived + group * gridDim.y + blockIdx.y, 1);
    }
    mn_grad_sync();
    if (*arrival != fold.times - 1) return;
    __threadfence();
    const int64_t K = job.p.call.K;
    mn_grad_fold_rows<KT>(fold.q, job.p.grad.q, fold.packed[0], fold.times, at, K);
    mn_grad_fold_rows<KT>(fold.e, job.p.grad.e, fold.packed[1], fold.times, at, K);
    mn_grad_fold_rows<KT>(fold.w, job.p.grad.w, fold.packed[2], fold.times, at, K);
}

/* The block's part of the sums over channels. */
__device__ inline void mn_grad_store_partial(mn_delta_partial &part, const mn_grad_sums &sums,
                                           float cum_decay, bool with_pairs) {
    const int t = threadIdx.x;
    if (t < MN_DELTA_CHUNK) {
        float G = 0.0f, beta = 0.0f;
        for (int i = 0; i < 4; i++) {
            G += sums.G[i][t];
            beta += sums.beta[i][t];
            if (with_pairs) G += sums.rows[i][t] - sums.columns[i][t];
        }
        part.G[t] = G;
        part.beta[t] = beta;
    } else if (t == MN_DELTA_CHUNK) {
        float end = 0.0f, written = 0.0f;
        for (int i = 0; i < MN_DELTA_GRAD_WARPS; i++) end += sums.end[i];
        for (int i = 0; i < 4 * MN_DELTA_CHUNK; i++) written += (&sums.write[0][0])[i];
        part.end = fmaf(cum_decay, end, written);
    }
}

template <int KT, int KP>
__global__ void __launch_bounds__(MN_DELTA_GRAD_THREADS)
delta_grad_kernel(const __grid_constant__ mn_delta_params job,
                  const __grid_constant__ mn_grad_fold fold) {
    extern __shared__ __align__(128) unsigned char bytes[];
    mn_grad_smem<KT> &smem = *(mn_grad_smem<KT> *)bytes;
    if (job.cuts) mn_pdl_wait();
    const mn_grad_coord at = mn_grad_block_coord(job, KT, KP);
    if (at.count == 0) return;
    const unsigned w = mn_shared_u32(job.p.w.data ? smem.keys.w : smem.keys.e);
    mn_grad_acc<KT> sum;
    mn_cp_async_raw(&smem.log_decays, job.workspace.log_decays + at.index,
                    (int)sizeof smem.log_decays,
                  MN_DELTA_GRAD_THREADS, threadIdx.x);
    mn_grad_mainloop<KT>(sum, smem, job, at);
    float end = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; i++) end += sum.end[i];
    end = mn_warp_sum(end);
    if (threadIdx.x % 32 == 0) smem.sums.end[threadIdx.x / 32] = end;
    __syncthreads();
    const int64_t matrix = at.index * MN_DELTA_MATRIX;
    mn_grad_pairs<KT>(smem, sum, job.scale, at, [&](int t, int s) {
        const int64_t from = matrix + t * MN_DELTA_CHUNK + s;
        return mn_grad_known((const unsigned *)(job.workspace.P + from),
                             (const unsigned *)(job.workspace.A + from));
    });
    mn_grad_states<KT>(smem, sum, w, job.scale, at);
    __syncthreads();
    mn_grad_intra_chunk<KT>(smem, sum, w, at);
    mn_grad_store_keys<KT>(smem, sum, job, smem.log_decays.beta, w, at, [] {});
    mn_delta_partial *parts =
        (mn_delta_partial *)job.workspace.parts + mn_delta_records(job) * (int64_t)blockIdx.y;
    mn_grad_store_partial(parts[at.index], smem.sums, smem.log_decays.gamma[MN_DELTA_CHUNK - 1],
                        blockIdx.y == 0);
    mn_grad_fold_heads<KT>(job, fold, at, (int *)bytes);
}

}    // namespace mneme::delta

#endif
