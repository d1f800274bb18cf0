/* delta_grad.cuh - gradients of delta's keys and decays, all chunks at once, from the states S
 * in front of chunks, their adjoints D behind them, residuals R and their adjoints dX.
 *
 *   dP = tril(dO R')     dA = -tril(dX R', -1)
 *   dq = scale exp(G) dO S' + (scale dP . fall) w_beta
 *   de = -exp(G) dX S' + (dA . fall) w_beta
 *   dw_beta = exp(G_L - G) R D' + (scale dP . fall)'q + (dA . fall)'e       fall = exp(G_t - G_s)
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

#include "kernels/cuda/delta/delta_smem.cuh"

enum { MN_DELTA_GRADERS = 512, MN_DELTA_GRADE_WARPS = 16 };

/* What a block leaves of a chunk for the second step: dG, with that of the chunk's end ws, and
 * the gradient of beta. */
struct mn_delta_part {
    float G[MN_DELTA_CHUNK], beta[MN_DELTA_CHUNK], end, nothing[3];
};

/* A tile of 64 value columns. */
template <int KT>
struct alignas(128) mn_grade_stage {
    unsigned char cot[mn_tile_bytes<64>()], dX[mn_tile_bytes<64>()], R[mn_tile_bytes<64>()];
    unsigned char S[mn_tile_bytes<KT>()], D[mn_tile_bytes<KT>()];
};

/* Squares with the decays in them, bare and times beta_s. */
struct alignas(128) mn_grade_squares {
    unsigned char P[mn_tile_bytes<64>()], A[mn_tile_bytes<64>()];
    unsigned char P_beta[mn_tile_bytes<64>()], A_beta[mn_tile_bytes<64>()];
};

template <int KT>
struct alignas(128) mn_grade_keys {
    unsigned char q[mn_tile_bytes<KT>()], e[mn_tile_bytes<KT>()], w[mn_tile_bytes<KT>()];
};

/* Sums over the quarters of channels or columns, and over blocks of rows. */
struct mn_grade_sums {
    float G[4][MN_DELTA_CHUNK], beta[4][MN_DELTA_CHUNK], write[4][MN_DELTA_CHUNK];
    float rows[4][MN_DELTA_CHUNK], columns[4][MN_DELTA_CHUNK];
    float end[MN_DELTA_GRADE_WARPS];
};

template <int KT>
struct mn_grade_smem {
    union {
        mn_grade_stage<KT> stage[2];
        mn_grade_squares squares;
    };
    mn_grade_keys<KT> keys;
    mn_delta_levels levels;
    mn_grade_sums sums;
};

struct mn_grade_place {
    mn_tile_span tile;
    int64_t h, slot, index, channel0, stride;    // index of the record; stride of rows of states
    int count;
    int block, quarter;                          // of this warp
};

/* What a warp sums up: 16 tokens times KT / 4 channels, and times 16 columns of squares. */
template <int KT>
struct mn_grade_tile {
    static constexpr int N = KT / 32;    // tiles of eight channels
    float q[N][4], e[N][4], w[N][4], P[2][4], A[2][4];
    float end[8];                        // S . D of eight channels, some of the rows
};

template <int KT>
__device__ inline void mn_grade_load(mn_grade_stage<KT> &to, const mn_delta_job &job,
                                      const mn_grade_place &at, int64_t column0) {
    const mn_delta_work &work = job.work;
    const int64_t row = at.index * job.wide_v + column0;
    constexpr int hands = MN_DELTA_GRADERS;
    const int hand = threadIdx.x, stride = (int)at.stride;
    mn_tile_load<64, hands>(to.cot, job.p.cot.o, job.packed[MN_DELTA_COT], at.tile.span, at.h,
                             at.tile.first, at.count, column0, job.p.call.V, hand);
    mn_tile_recall<64, hands>(to.dX, work.dX + row * MN_DELTA_CHUNK, MN_DELTA_CHUNK, hand);
    mn_tile_recall<64, hands>(to.R, work.R + row * MN_DELTA_CHUNK, MN_DELTA_CHUNK, hand);
    mn_tile_recall<KT, hands>(to.S, work.S + row * stride + at.channel0, stride, hand);
    mn_tile_recall<KT, hands>(to.D, work.D + row * stride + at.channel0, stride, hand);
}

/* Adds a tile of value columns to the sums. */
template <int KT>
__device__ inline void mn_grade_values(mn_grade_tile<KT> &sum, const mn_grade_stage<KT> &stage,
                                       const mn_grade_place &at) {
    const unsigned cot = mn_shared(stage.cot), dX = mn_shared(stage.dX), R = mn_shared(stage.R);
    const unsigned S = mn_shared(stage.S), D = mn_shared(stage.D);
    const int row0 = 16 * at.block, channel0 = at.quarter * (KT / 4);
#pragma unroll
    for (int k = 0; k < 64; k += 16) {
        unsigned from_cot[4], from_dX[4], from_R[4], b[4];
        mn_left(from_cot, cot, row0, k);
        mn_left_transposed(from_dX, dX, row0, k);
        mn_left_transposed(from_R, R, row0, k);
#pragma unroll
        for (int n = 0; n < mn_grade_tile<KT>::N; n += 2) {
            mn_right_transposed(b, S, k, channel0 + 8 * n);
            mn_product(sum.q[n], from_cot, b[0], b[1]);
            mn_product(sum.q[n + 1], from_cot, b[2], b[3]);
            mn_product(sum.e[n], from_dX, b[0], b[1]);
            mn_product(sum.e[n + 1], from_dX, b[2], b[3]);
            mn_right_transposed(b, D, k, channel0 + 8 * n);
            mn_product(sum.w[n], from_R, b[0], b[1]);
            mn_product(sum.w[n + 1], from_R, b[2], b[3]);
        }
        if (at.quarter > at.block) continue;
        mn_right_transposed(b, R, k, 16 * at.quarter);
        mn_product(sum.P[0], from_cot, b[0], b[1]);
        mn_product(sum.P[1], from_cot, b[2], b[3]);
        mn_product(sum.A[0], from_dX, b[0], b[1]);
        mn_product(sum.A[1], from_dX, b[2], b[3]);
    }
    constexpr int vec16s = KT / 8;
    const int vec16 = threadIdx.x % vec16s;
#pragma unroll
    for (int row = threadIdx.x / vec16s; row < 64; row += MN_DELTA_GRADERS / vec16s) {
        const uint4 s = *(const uint4 *)(stage.S + mn_tile_place(row, vec16));
        const uint4 d = *(const uint4 *)(stage.D + mn_tile_place(row, vec16));
        const unsigned x[4] = { s.x, s.y, s.z, s.w }, y[4] = { d.x, d.y, d.z, d.w };
#pragma unroll
        for (int i = 0; i < 4; i++) {
            sum.end[2 * i] = fmaf(mn_low(x[i]), mn_low(y[i]), sum.end[2 * i]);
            sum.end[2 * i + 1] = fmaf(mn_high(x[i]), mn_high(y[i]), sum.end[2 * i + 1]);
        }
    }
}

/* All value columns, and the keys into the room. */
template <int KT, typename Room>
__device__ inline void mn_grade_all_values(mn_grade_tile<KT> &sum, Room &room,
                                           const mn_delta_job &job, const mn_grade_place &at) {
    const mn_delta_args &p = job.p;
    const int tiles = (int)(job.wide_v / 64);
    const auto keys = [&](unsigned char *to, const mn_in &view, int tensor) {
        if (!view.data) return;
        mn_tile_load<KT, MN_DELTA_GRADERS>(to, view, job.packed[tensor], at.tile.span, at.h,
                                            at.tile.first, at.count, at.channel0, p.call.K,
                                            threadIdx.x);
    };
    sum = {};
    mn_grade_load<KT>(room.stage[0], job, at, 0);
    mn_copy_commit();
    keys(room.keys.q, p.q, MN_DELTA_Q);
    keys(room.keys.e, p.e, MN_DELTA_E);
    keys(room.keys.w, p.w, MN_DELTA_W);
    for (int i = 0; i < tiles; i++) {
        if (i + 1 < tiles) mn_grade_load<KT>(room.stage[(i + 1) % 2], job, at, (i + 1) * 64);
        mn_copy_commit();
        mn_copy_wait<1>();
        __syncthreads();
        mn_grade_values<KT>(sum, room.stage[i % 2], at);
        __syncthreads();
    }
    mn_copy_wait<0>();
}

__device__ inline mn_grade_place mn_grade_here(const mn_delta_job &job, int KT, int KP) {
    const mn_call &call = job.p.call;
    mn_grade_place at;
    at.index = blockIdx.x;
    at.h = blockIdx.x % call.H;
    at.slot = blockIdx.x / call.H;
    at.tile = mn_tile_at(call, MN_DELTA_CHUNK, at.slot);
    at.count = (int)at.tile.n_rows;
    at.channel0 = (int64_t)blockIdx.y * KT;
    at.stride = KP;
    at.block = threadIdx.x / 32 % 4;
    at.quarter = threadIdx.x / 128;
    return at;
}

/* ---- decays that channels share -------------------------------------------------------------- */

/* Squares with decays into the room, and the sums of what passes between tokens. */
template <int KT>
__device__ inline void mn_grade_pairs(mn_grade_smem<KT> &room, const mn_grade_tile<KT> &sum,
                                      const mn_delta_job &job, const mn_grade_place &at) {
    const int lane = threadIdx.x % 32;
    const mn_bf16 *P = job.work.P + at.index * MN_DELTA_SQUARE;
    const mn_bf16 *A = job.work.A + at.index * MN_DELTA_SQUARE;
    float rows[2] = {}, columns[2][2] = {};
#pragma unroll
    for (int n = 0; n < 2; n++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int t = at.block * 16 + lane / 4 + 8 * half;
            const int s = at.quarter * 16 + n * 8 + lane % 4 * 2;
            float p[2], a[2];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int c = 2 * half + i;
                const bool inside = s + i <= t, before = s + i < t;
                const float fall = expf((float)(room.levels.G[t] - room.levels.G[s + i]));
                p[i] = inside ? job.scale * fall * sum.P[n][c] : 0.0f;
                a[i] = before ? -fall * sum.A[n][c] : 0.0f;
                if (!before) continue;
                const float passed = fmaf(sum.P[n][c], mn_float(P[t * MN_DELTA_CHUNK + s + i]),
                                          -sum.A[n][c] * mn_float(A[t * MN_DELTA_CHUNK + s + i]));
                rows[half] += passed;
                columns[n][i] += passed;
            }
            if (at.quarter > at.block) continue;
            const unsigned place = mn_tile_place(t, s / 8) + lane % 4 * 4;
            const float2 beta = *(const float2 *)&room.levels.beta[s];
            *(unsigned *)(room.squares.P + place) = mn_pair(p[0], p[1]);
            *(unsigned *)(room.squares.A + place) = mn_pair(a[0], a[1]);
            *(unsigned *)(room.squares.P_beta + place) = mn_pair(p[0] * beta.x, p[1] * beta.y);
            *(unsigned *)(room.squares.A_beta + place) = mn_pair(a[0] * beta.x, a[1] * beta.y);
        }
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const float row = mn_sum_along(rows[half]);
        if (lane % 4 == 0) {
            room.sums.rows[at.quarter][at.block * 16 + lane / 4 + 8 * half] = row;
        }
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const float column = mn_sum_down(columns[half][i]);
            const int s = at.quarter * 16 + half * 8 + lane * 2 + i;
            if (lane < 4) room.sums.columns[at.block][s] = column;
        }
    }
}

/* Decays what came through the states, and sums it up over channels. */
template <int KT>
__device__ inline void mn_grade_states(mn_grade_smem<KT> &room, mn_grade_tile<KT> &sum,
                                       unsigned w, float scale, const mn_grade_place &at) {
    const int lane = threadIdx.x % 32, t = at.block * 16 + lane / 4;
    const double end = room.levels.G[MN_DELTA_CHUNK - 1];
    float gamma[2], late[2], beta[2], whole[2] = {}, written[2] = {};
#pragma unroll
    for (int half = 0; half < 2; half++) {
        gamma[half] = room.levels.gamma[t + 8 * half];
        late[half] = expf((float)(end - room.levels.G[t + 8 * half]));
        beta[half] = room.levels.beta[t + 8 * half];
    }
#pragma unroll
    for (int n = 0; n < mn_grade_tile<KT>::N; n += 2) {
        const int channel = at.quarter * (KT / 4) + 8 * n;
        unsigned q[4], e[4], write[4];
        mn_left(q, mn_shared(room.keys.q), at.block * 16, channel);
        mn_left(e, mn_shared(room.keys.e), at.block * 16, channel);
        mn_left(write, w, at.block * 16, channel);
#pragma unroll
        for (int c = 0; c < 8; c++) {
            const int half = c / 2 % 2, from = c / 2;
            float &dq = sum.q[n + c / 4][c % 4], &de = sum.e[n + c / 4][c % 4];
            float &dw = sum.w[n + c / 4][c % 4];
            dq *= scale * gamma[half], de *= -gamma[half], dw *= late[half];
            const float w_at = c % 2 ? mn_high(write[from]) : mn_low(write[from]);
            whole[half] = fmaf(c % 2 ? mn_high(q[from]) : mn_low(q[from]), dq, whole[half]);
            whole[half] = fmaf(c % 2 ? mn_high(e[from]) : mn_low(e[from]), de, whole[half]);
            written[half] = fmaf(beta[half] * w_at, dw, written[half]);
        }
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
        whole[half] = mn_sum_along(whole[half] - written[half]);
        written[half] = mn_sum_along(written[half]);
        if (lane % 4 != 0) continue;
        room.sums.G[at.quarter][t + 8 * half] = whole[half];
        room.sums.write[at.quarter][t + 8 * half] = written[half];
    }
}

/* Adds what passed inside the chunk. */
template <int KT>
__device__ inline void mn_grade_inside(mn_grade_smem<KT> &room, mn_grade_tile<KT> &sum, unsigned w,
                                       const mn_grade_place &at) {
    const unsigned q = mn_shared(room.keys.q), e = mn_shared(room.keys.e);
    const unsigned P = mn_shared(room.squares.P), A = mn_shared(room.squares.A);
    const unsigned P_beta = mn_shared(room.squares.P_beta), A_beta = mn_shared(room.squares.A_beta);
    const int row0 = 16 * at.block, channel0 = at.quarter * (KT / 4);
    unsigned p[4], a[4], b[4];
    for (int k = 0; k <= row0; k += 16) {
        mn_left(p, P_beta, row0, k);
        mn_left(a, A_beta, row0, k);
#pragma unroll
        for (int n = 0; n < mn_grade_tile<KT>::N; n += 2) {
            mn_right_transposed(b, w, k, channel0 + 8 * n);
            mn_product(sum.q[n], p, b[0], b[1]);
            mn_product(sum.q[n + 1], p, b[2], b[3]);
            mn_product(sum.e[n], a, b[0], b[1]);
            mn_product(sum.e[n + 1], a, b[2], b[3]);
        }
    }
    for (int k = row0; k < MN_DELTA_CHUNK; k += 16) {
        mn_left_transposed(p, P, row0, k);
        mn_left_transposed(a, A, row0, k);
#pragma unroll
        for (int n = 0; n < mn_grade_tile<KT>::N; n += 2) {
            mn_right_transposed(b, q, k, channel0 + 8 * n);
            mn_product(sum.w[n], p, b[0], b[1]);
            mn_product(sum.w[n + 1], p, b[2], b[3]);
            mn_right_transposed(b, e, k, channel0 + 8 * n);
            mn_product(sum.w[n], a, b[0], b[1]);
            mn_product(sum.w[n + 1], a, b[2], b[3]);
        }
    }
}

/* A warp's 16 x KT / 4 numbers into rows of a tensor, through its part of a tile that nobody reads
 * any more. */
template <int KT>
__device__ inline void mn_grade_put(const mn_out &view, bool packed, const mn_grade_place &at,
                                    int64_t K, unsigned char *tile,
                                    const float (&x)[mn_grade_tile<KT>::N][4]) {
    constexpr int N = mn_grade_tile<KT>::N;
    if (!view.data) return;
    const int lane = threadIdx.x % 32;
    __syncwarp();
#pragma unroll
    for (int n = 0; n < N; n++) {
        const int row = at.block * 16 + lane / 4, vec16 = at.quarter * N + n;
        *(unsigned *)(tile + mn_tile_place(row, vec16) + lane % 4 * 4) = mn_pair(x[n][0], x[n][1]);
        *(unsigned *)(tile + mn_tile_place(row + 8, vec16) + lane % 4 * 4) = mn_pair(x[n][2],
                                                                                    x[n][3]);
    }
    __syncwarp();
#pragma unroll
    for (int k = lane; k < 16 * N; k += 32) {
        const int row = at.block * 16 + k / N, vec16 = at.quarter * N + k % N;
        const int64_t i = at.channel0 + 8 * vec16;
        if (row >= at.count || i >= K) continue;
        const mn_pack<mn_bf16, 8> pack = *(mn_pack<mn_bf16, 8> *)(tile + mn_tile_place(row, vec16));
        mn_bf16 *to = mn_row<mn_bf16>(view, at.tile.span.b, at.tile.span.t0 + at.tile.first + row,
                                      at.h) + i;
        if (packed) {
            *(mn_pack<mn_bf16, 8> *)to = pack;
        } else {
            for (int c = 0; c < 8 && i + c < K; c++) to[c] = pack.at[c];
        }
    }
}

/* Writes gradients of keys; sums that of beta over channels. All threads of the block call. */
template <int KT, typename Room>
__device__ inline void mn_grade_leave_keys(Room &room, mn_grade_tile<KT> &sum,
                                           const mn_delta_job &job, const float *beta_at,
                                           unsigned w, const mn_grade_place &at) {
    const mn_delta_args &p = job.p;
    const int lane = threadIdx.x % 32, t = at.block * 16 + lane / 4;
    const float beta[2] = { beta_at[t], beta_at[t + 8] };
    float to_beta[2] = {};
#pragma unroll
    for (int n = 0; n < mn_grade_tile<KT>::N; n += 2) {
        unsigned write[4];
        mn_left(write, w, at.block * 16, at.quarter * (KT / 4) + 8 * n);
#pragma unroll
        for (int c = 0; c < 8; c++) {
            const int half = c / 2 % 2;
            float &dw = sum.w[n + c / 4][c % 4], &de = sum.e[n + c / 4][c % 4];
            const float w_at = c % 2 ? mn_high(write[c / 2]) : mn_low(write[c / 2]);
            to_beta[half] = fmaf(w_at, dw, to_beta[half]);
            dw *= beta[half];
            if (!p.w.data) de += dw;
        }
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
        to_beta[half] = mn_sum_along(to_beta[half]);
        if (lane % 4 == 0) room.sums.beta[at.quarter][t + 8 * half] = to_beta[half];
    }
    __syncthreads();
    const int64_t K = p.call.K;
    mn_grade_put<KT>(p.grad.q, job.packed[MN_DELTA_DQ], at, K, room.keys.q, sum.q);
    mn_grade_put<KT>(p.grad.e, job.packed[MN_DELTA_DE], at, K, room.keys.e, sum.e);
    if (p.w.data) mn_grade_put<KT>(p.grad.w, job.packed[MN_DELTA_DW], at, K, room.keys.w, sum.w);
}

/* The block's part of the sums over channels. */
__device__ inline void mn_grade_leave_part(mn_delta_part &part, const mn_grade_sums &sums,
                                           float fall, bool with_pairs) {
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
        for (int i = 0; i < MN_DELTA_GRADE_WARPS; i++) end += sums.end[i];
        for (int i = 0; i < 4 * MN_DELTA_CHUNK; i++) written += (&sums.write[0][0])[i];
        part.end = fmaf(fall, end, written);
    }
}

template <int KT, int KP>
__global__ void __launch_bounds__(MN_DELTA_GRADERS)
mn_delta_gradient_kernel(const __grid_constant__ mn_delta_job job) {
    extern __shared__ __align__(128) unsigned char bytes[];
    mn_grade_smem<KT> &room = *(mn_grade_smem<KT> *)bytes;
    const mn_grade_place at = mn_grade_here(job, KT, KP);
    if (at.count == 0) return;
    const unsigned w = mn_shared(job.p.w.data ? room.keys.w : room.keys.e);
    mn_grade_tile<KT> sum;
    mn_copy_plain(&room.levels, job.work.levels + at.index, (int)sizeof room.levels,
                  MN_DELTA_GRADERS, threadIdx.x);
    mn_grade_all_values<KT>(sum, room, job, at);
    float end = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; i++) end += sum.end[i];
    end = mn_warp_sum(end);
    if (threadIdx.x % 32 == 0) room.sums.end[threadIdx.x / 32] = end;
    __syncthreads();
    mn_grade_pairs<KT>(room, sum, job, at);
    mn_grade_states<KT>(room, sum, w, job.scale, at);
    __syncthreads();
    mn_grade_inside<KT>(room, sum, w, at);
    mn_grade_leave_keys<KT>(room, sum, job, room.levels.beta, w, at);
    mn_delta_part *parts = (mn_delta_part *)job.work.parts + gridDim.x * (int64_t)blockIdx.y;
    mn_grade_leave_part(parts[at.index], room.sums, room.levels.gamma[MN_DELTA_CHUNK - 1],
                        blockIdx.y == 0);
}

#endif
