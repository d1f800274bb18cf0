/* mesa_grad.cuh - gradients of keys, values, beta and decays, a block for a chunk of a head.
 *
 * With (A, B) the adjoint behind the chunk, G the sum of log decays inside and F_ts = exp(G_s -
 * G_t), F_t up to the chunk's end, the adjoint at token t gives
 *
 *   A_t k_t  = F_t A k_t  - sum_{s >= t} F_ts (x_s (y_s.k_t) + y_s (x_s.k_t)) / 2
 *   B_t v_t  = F_t B v_t  + sum_{s >= t} F_ts x_s (do_s.v_t)
 *   B_t'k_t  = F_t B'k_t  + sum_{s >= t} F_ts do_s (x_s.k_t)
 *
 * A warp has four tokens, a lane every 32nd channel of theirs or, for values, one of 32 columns. A
 * and B pass through shared memory in tiles of 32 rows or columns. */
#ifndef MN_KERNELS_CUDA_MESA_MESA_GRAD_CUH
#define MN_KERNELS_CUDA_MESA_MESA_GRAD_CUH

#include "kernels/cuda/mesa/mesa.cuh"

enum { MN_MESA_QUAD = 4, MN_MESA_SPAN = 33 };    // a warp's tokens; length of rows of 32 numbers

/* Tokens of the chunk, zeros behind the last. N: channels of a lane. */
template <int N>
struct mn_mesa_graders {
    static constexpr int pitch = 32 * N + 1;
    float k[MN_MESA_CHUNK][pitch], x[MN_MESA_CHUNK][pitch], y[MN_MESA_CHUNK][pitch];
    float cot[MN_MESA_CHUNK][MN_MESA_SPAN], v[MN_MESA_CHUNK][MN_MESA_SPAN];
    float x_k[MN_MESA_CHUNK][MN_MESA_SPAN];    // [t][s]: F_ts x_s.k_t, and so on
    float y_k[MN_MESA_CHUNK][MN_MESA_SPAN], cot_v[MN_MESA_CHUNK][MN_MESA_SPAN];
    float tile[32 * N * MN_MESA_SPAN];         // 32 rows of A, or 32 columns of B
    float to_beta[MN_MESA_CHUNK], read[MN_MESA_CHUNK], parts[MN_MESA_THREADS / 32];
    float beta[MN_MESA_CHUNK];
    double G[MN_MESA_CHUNK];
};

/* What a warp adds up: F_t A k and F_t B v of its tokens, and F_ts do_s.v_t for s = lane. */
template <int N>
struct mn_mesa_grade {
    float Ak[MN_MESA_QUAD][N], Bv[MN_MESA_QUAD][N], cot_v[MN_MESA_QUAD];
};

/* A chunk's place, its adjoint, and the pair behind it. */
struct mn_mesa_grader {
    mn_mesa_place at;
    const float *adjoint, *behind;
    int64_t b, t0;
    int count, first, lane;    // first: of the warp's tokens
};

template <int N, typename T>
__device__ inline void mn_mesa_grade_stage(mn_mesa_graders<N> &room, const mn_mesa_args &p,
                                           const mn_mesa_work &w, const mn_mesa_grader &me) {
    const int K = (int)p.call.K, h = (int)me.at.h;
    for (int i = threadIdx.x; i < MN_MESA_CHUNK * 32 * N; i += MN_MESA_THREADS) {
        const int u = i / (32 * N), channel = i % (32 * N);
        const bool there = u < me.count && channel < K;
        const int64_t row = ((me.b * p.call.T + me.t0 + u) * p.call.H + h) * K + channel;
        room.k[u][channel] = there ? mn_float(mn_row<T>(p.k, me.b, me.t0 + u, h)[channel]) : 0.0f;
        room.x[u][channel] = there ? w.x[row] : 0.0f;
        room.y[u][channel] = there ? w.y[row] : 0.0f;
    }
    if (threadIdx.x >= MN_MESA_CHUNK) return;
    const int u = threadIdx.x;
    const float2 token = mn_mesa_token<T>(p, me.at, u);
    room.G[u] = mn_mesa_levels(token.y, u), room.beta[u] = token.x;
}

/* F_ts where s is a token of the chunk that is no earlier than t, else 0. */
template <int N>
__device__ inline float mn_mesa_fall(const mn_mesa_graders<N> &room, const mn_mesa_grader &me,
                                     int t, int s) {
    return s >= t && s < me.count ? expf((float)(room.G[s] - room.G[t])) : 0.0f;
}

/* Products of this warp's keys with the x and y of all tokens. */
template <int N>
__device__ inline void mn_mesa_grade_pairs(mn_mesa_graders<N> &room, const mn_mesa_grader &me) {
    const float *x = room.x[me.lane], *y = room.y[me.lane];
    float x_k[MN_MESA_QUAD] = {}, y_k[MN_MESA_QUAD] = {};
#pragma unroll 4
    for (int i = 0; i < 32 * N; i++) {
#pragma unroll
        for (int q = 0; q < MN_MESA_QUAD; q++) {
            const float k = room.k[me.first + q][i];
            x_k[q] = fmaf(x[i], k, x_k[q]), y_k[q] = fmaf(y[i], k, y_k[q]);
        }
    }
#pragma unroll
    for (int q = 0; q < MN_MESA_QUAD; q++) {
        const float fall = mn_mesa_fall(room, me, me.first + q, me.lane);
        room.x_k[me.first + q][me.lane] = fall * x_k[q];
        room.y_k[me.first + q][me.lane] = fall * y_k[q];
    }
}

/* A k, tile by tile; A is symmetric. Returns this thread's part of the product of A with Hkk. */
template <int N>
__device__ inline float mn_mesa_grade_keys(mn_mesa_grade<N> &sum, mn_mesa_graders<N> &room,
                                           const mn_mesa_args &p, const mn_mesa_grader &me) {
    const int64_t K = p.call.K, pitch = mn_mesa_layout::of(p.call).pitch;
    float met = 0.0f;
    for (int64_t j0 = 0; j0 < K; j0 += 32) {
        __syncthreads();
        for (int i = threadIdx.x; i < 32 * 32 * N; i += MN_MESA_THREADS) {
            const int64_t j = j0 + i / (32 * N), channel = i % (32 * N);
            const bool there = j < K && channel < K;
            const float cell = there ? me.adjoint[j * pitch + channel] : 0.0f;
            if (there) met = fmaf(cell, me.behind[j * pitch + channel], met);
            room.tile[i] = cell;
        }
        __syncthreads();
#pragma unroll 4
        for (int j = 0; j < 32; j++) {
            float k[MN_MESA_QUAD];
#pragma unroll
            for (int q = 0; q < MN_MESA_QUAD; q++) k[q] = room.k[me.first + q][j0 + j];
#pragma unroll
            for (int n = 0; n < N; n++) {
                const float cell = room.tile[(j * N + n) * 32 + me.lane];
#pragma unroll
                for (int q = 0; q < MN_MESA_QUAD; q++) {
                    sum.Ak[q][n] = fmaf(cell, k[q], sum.Ak[q][n]);
                }
            }
        }
    }
    return met;
}

/* 32 columns of B and of the tokens' values into the room. */
template <int N, typename T>
__device__ inline float mn_mesa_grade_columns(mn_mesa_graders<N> &room, const mn_mesa_args &p,
                                              const mn_mesa_grader &me, int64_t j0) {
    const int64_t K = p.call.K, V = p.call.V, h = me.at.h;
    const mn_mesa_layout lie = mn_mesa_layout::of(p.call);
    float met = 0.0f;
    for (int i = threadIdx.x; i < MN_MESA_CHUNK * 32; i += MN_MESA_THREADS) {
        const int u = i / 32, j = i % 32;
        const bool there = u < me.count && j0 + j < V;
        const T *v = mn_row<T>(p.v, me.b, me.t0 + u, h);
        const T *cot = mn_row<T>(p.cot.o, me.b, me.t0 + u, h);
        room.v[u][j] = there ? mn_float(v[j0 + j]) : 0.0f;
        room.cot[u][j] = there ? mn_get(cot, j0 + j) : 0.0f;
    }
    for (int i = threadIdx.x; i < 32 * N * 32; i += MN_MESA_THREADS) {
        const int64_t channel = i / 32, j = j0 + i % 32;
        const int64_t cell_at = channel * lie.pitch + lie.rows + j;
        const bool there = channel < K && j < V;
        const float cell = there ? me.adjoint[cell_at] : 0.0f;
        if (there) met = fmaf(cell, me.behind[cell_at], met);
        room.tile[channel * MN_MESA_SPAN + i % 32] = cell;
    }
    return met;
}

/* The gradients of this warp's values, columns j0 to j0 + 31. */
template <int N, typename T>
__device__ inline void mn_mesa_grade_values(mn_mesa_graders<N> &room, const mn_mesa_args &p,
                                            const mn_mesa_grader &me, int64_t j0) {
    float Bk[MN_MESA_QUAD] = {};
#pragma unroll 4
    for (int i = 0; i < 32 * N; i++) {
        const float cell = room.tile[i * MN_MESA_SPAN + me.lane];
#pragma unroll
        for (int q = 0; q < MN_MESA_QUAD; q++) Bk[q] = fmaf(cell, room.k[me.first + q][i], Bk[q]);
    }
#pragma unroll
    for (int q = 0; q < MN_MESA_QUAD; q++) {
        Bk[q] *= mn_mesa_fall(room, me, me.first + q, me.count - 1);
    }
    for (int s = me.first; s < me.count; s++) {
        const float cot = room.cot[s][me.lane];
#pragma unroll
        for (int q = 0; q < MN_MESA_QUAD; q++) Bk[q] = fmaf(cot, room.x_k[me.first + q][s], Bk[q]);
    }
#pragma unroll
    for (int q = 0; q < MN_MESA_QUAD; q++) {
        const int t = me.first + q;
        T *dv = mn_row<T>(p.grad.v, me.b, me.t0 + t, me.at.h);
        if (dv && t < me.count && j0 + me.lane < p.call.V) {
            mn_put(dv + j0 + me.lane, room.beta[t] * Bk[q]);
        }
    }
}

/* B v and do.v, tile by tile, and gradients of values. Returns this thread's part of the product of
 * B with Hkv. */
template <int N, typename T>
__device__ inline float mn_mesa_grade_all_values(mn_mesa_grade<N> &sum, mn_mesa_graders<N> &room,
                                                 const mn_mesa_args &p, const mn_mesa_grader &me) {
    float met = 0.0f;
    for (int64_t j0 = 0; j0 < p.call.V; j0 += 32) {
        __syncthreads();
        met += mn_mesa_grade_columns<N, T>(room, p, me, j0);
        __syncthreads();
#pragma unroll 4
        for (int j = 0; j < 32; j++) {
            const float cot = room.cot[me.lane][j];
            float v[MN_MESA_QUAD];
#pragma unroll
            for (int q = 0; q < MN_MESA_QUAD; q++) {
                v[q] = room.v[me.first + q][j];
                sum.cot_v[q] = fmaf(cot, v[q], sum.cot_v[q]);
            }
#pragma unroll
            for (int n = 0; n < N; n++) {
                const float cell = room.tile[(32 * n + me.lane) * MN_MESA_SPAN + j];
#pragma unroll
                for (int q = 0; q < MN_MESA_QUAD; q++) {
                    sum.Bv[q][n] = fmaf(cell, v[q], sum.Bv[q][n]);
                }
            }
        }
        mn_mesa_grade_values<N, T>(room, p, me, j0);
    }
    return met;
}

/* Adds what passes inside the chunk; gradients of keys and beta. */
template <int N, typename T>
__device__ inline void mn_mesa_grade_leave(mn_mesa_grade<N> &sum, mn_mesa_graders<N> &room,
                                           const mn_mesa_args &p, const mn_mesa_grader &me) {
    const int K = (int)p.call.K;
    const T *lam = mn_row<T>(p.lam, 0, 0, me.at.h);
#pragma unroll
    for (int q = 0; q < MN_MESA_QUAD; q++) {
        const int t = me.first + q;
        const float end = mn_mesa_fall(room, me, t, me.count - 1);
        room.cot_v[t][me.lane] = mn_mesa_fall(room, me, t, me.lane) * sum.cot_v[q];
#pragma unroll
        for (int n = 0; n < N; n++) sum.Ak[q][n] *= end, sum.Bv[q][n] *= end;
    }
    __syncwarp();
    for (int s = me.first; s < me.count; s++) {
#pragma unroll
        for (int n = 0; n < N; n++) {
            const float x = room.x[s][32 * n + me.lane], y = room.y[s][32 * n + me.lane];
#pragma unroll
            for (int q = 0; q < MN_MESA_QUAD; q++) {
                const int t = me.first + q;
                const float read = fmaf(x, room.y_k[t][s], y * room.x_k[t][s]);
                sum.Ak[q][n] = fmaf(-0.5f, read, sum.Ak[q][n]);
                sum.Bv[q][n] = fmaf(x, room.cot_v[t][s], sum.Bv[q][n]);
            }
        }
    }
#pragma unroll
    for (int q = 0; q < MN_MESA_QUAD; q++) {
        const int t = me.first + q;
        T *dk = mn_row<T>(p.grad.k, me.b, me.t0 + t, me.at.h);
        float to_beta = 0.0f, read = 0.0f;
#pragma unroll
        for (int n = 0; n < N; n++) {
            const int i = 32 * n + me.lane;
            const float ridge = i < K ? mn_float(lam[i]) : 0.0f;
            to_beta = fmaf(room.k[t][i], sum.Ak[q][n] + sum.Bv[q][n], to_beta);
            read = fmaf(ridge * room.x[t][i], room.y[t][i], read);
            if (dk && t < me.count && i < K) {
                mn_put(dk + i, room.beta[t] * fmaf(2.0f, sum.Ak[q][n], sum.Bv[q][n]));
            }
        }
        to_beta = mn_warp_sum(to_beta), read = mn_warp_sum(read);
        if (me.lane == 0) room.to_beta[t] = to_beta, room.read[t] = read;
    }
}

template <int N, typename T>
__global__ void __launch_bounds__(MN_MESA_THREADS)
mn_mesa_adjoint_kernel(const __grid_constant__ mn_mesa_args p, mn_mesa_work w) {
    extern __shared__ __align__(128) unsigned char grade_bytes[];
    mn_mesa_graders<N> &room = *(mn_mesa_graders<N> *)grade_bytes;
    mn_mesa_grader me;
    me.at = mn_mesa_here(p.call, blockIdx.x / p.call.H, blockIdx.x % p.call.H);
    if (me.at.tile.n_rows == 0) return;
    const int64_t size = mn_mesa_layout::of(p.call).size;
    const bool last = me.at.tile.first + me.at.tile.n_rows == me.at.tile.span.length;
    me.adjoint = w.adjoints + me.at.index * size;
    me.behind = last ? w.last + (me.at.tile.n * p.call.H + me.at.h) * size
                     : w.pairs + (me.at.index + p.call.H) * size;
    me.b = me.at.tile.span.b, me.t0 = me.at.tile.span.t0 + me.at.tile.first;
    me.count = (int)me.at.tile.n_rows, me.lane = threadIdx.x % 32;
    me.first = threadIdx.x / 32 * MN_MESA_QUAD;
    mn_mesa_grade<N> sum = {};
    mn_mesa_grade_stage<N, T>(room, p, w, me);
    __syncthreads();
    mn_mesa_grade_pairs<N>(room, me);
    float met = mn_mesa_grade_keys<N>(sum, room, p, me);
    met += mn_mesa_grade_all_values<N, T>(sum, room, p, me);
    mn_mesa_grade_leave<N, T>(sum, room, p, me);
    met = mn_group_sum<MN_MESA_THREADS>(met, room.parts);
    __syncthreads();
    if (threadIdx.x >= MN_MESA_CHUNK) return;
    const int t = threadIdx.x;    // the sum from t to the chunk's end
    double dg = t < me.count ? (double)fmaf(-room.beta[t], room.to_beta[t], room.read[t]) : 0.0;
    for (int lanes = 1; lanes < MN_MESA_CHUNK; lanes *= 2) {
        const double behind = __shfl_down_sync(0xffffffffu, dg, lanes);
        if (t + lanes < MN_MESA_CHUNK) dg += behind;
    }
    T *to_beta = mn_row<T>(p.grad.beta, me.b, me.t0 + t, me.at.h);
    T *to_g = mn_row<T>(p.grad.g, me.b, me.t0 + t, me.at.h);
    if (to_beta && t < me.count) mn_put(to_beta, room.to_beta[t]);
    if (to_g && t < me.count) mn_put(to_g, (float)((double)met + dg));
}

#endif
