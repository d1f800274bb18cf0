/* mesa.cu - what ridge regression on all pairs so far predicts for a query (see ref/mesa.c).
 *
 * Forward: sums of chunks (mesa.cuh), then every token's M x = scale q and o = Hkv'x: a warp for a
 * token (mesa_output.cuh), or for wider keys a block for four tokens of a head, which scans there
 * from the chunk's front. Backward: the same with a second right side, Hkv do, for y; sums of the
 * adjoints (A, B); then what they give keys and values, a chunk at a time (mesa_grad_kernel).
 * The gradient of a decay is a running sum: what tokens from t on read of writes before t is
 *
 *   dg_t = dg_{t+1} + r_t - beta_t dbeta_t       r_t = x'Hkv do - x'Hkk y = sum of lam x y
 *
 * counted from the pair and the adjoint at the chunk's end, whose product dg is there. */
#include "kernels/cuda/mesa/mesa_steps.h"
#include "kernels/cuda/mesa/mesa.cuh"
#include "kernels/cuda/prim/device_props.h"
#include "kernels/cuda/mesa/mesa_output.cuh"

namespace mneme::mesa {

/* gradients of keys, values, beta and decays, a block for a chunk of a head.
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

// a warp's tokens; length of rows of 32 numbers
enum { MN_MESA_WARP_TOKENS = 4, MN_MESA_PITCH = 33 };

/* Tokens of the chunk, zeros behind the last. N: channels of a lane. */
template <int N>
struct mn_mesa_grad_smem {
    static constexpr int pitch = 32 * N + 1;
    float k[MN_MESA_CHUNK][pitch], x[MN_MESA_CHUNK][pitch], y[MN_MESA_CHUNK][pitch];
    float cot[MN_MESA_CHUNK][MN_MESA_PITCH], v[MN_MESA_CHUNK][MN_MESA_PITCH];
    float x_k[MN_MESA_CHUNK][MN_MESA_PITCH];    // [t][s]: F_ts x_s.k_t, and so on
    float y_k[MN_MESA_CHUNK][MN_MESA_PITCH], cot_v[MN_MESA_CHUNK][MN_MESA_PITCH];
    float tile[32 * N * MN_MESA_PITCH];         // 32 rows of A, or 32 columns of B
    float to_beta[MN_MESA_CHUNK], read[MN_MESA_CHUNK], parts[MN_MESA_THREADS / 32];
    float beta[MN_MESA_CHUNK];
    double G[MN_MESA_CHUNK];
};

/* What a warp adds up: F_t A k and F_t B v of its tokens, and F_ts do_s.v_t for s = lane. */
template <int N>
struct mn_mesa_grad_acc {
    float Ak[MN_MESA_WARP_TOKENS][N], Bv[MN_MESA_WARP_TOKENS][N], cot_v[MN_MESA_WARP_TOKENS];
};

/* A chunk's place, its adjoint, and the pair behind it. */
struct mn_mesa_grad_ctx {
    mn_mesa_coord at;
    const float *adjoint, *behind;
    int64_t b, t0;
    int count, first, lane;    // first: of the warp's tokens
};

template <int N, typename T>
__device__ inline void mn_mesa_grad_load(mn_mesa_grad_smem<N> &smem, const mn_mesa_args &p,
                                           const mn_mesa_workspace &w, const mn_mesa_grad_ctx &me) {
    const int K = (int)p.call.K, h = (int)me.at.h;
    for (int i = threadIdx.x; i < MN_MESA_CHUNK * 32 * N; i += MN_MESA_THREADS) {
        const int u = i / (32 * N), channel = i % (32 * N);
        const bool there = u < me.count && channel < K;
        const int64_t row = ((me.b * p.call.T + me.t0 + u) * p.call.H + h) * K + channel;
        smem.k[u][channel] = there ? mn_float(mn_row<T>(p.k, me.b, me.t0 + u, h)[channel]) : 0.0f;
        smem.x[u][channel] = there ? w.x[row] : 0.0f;
        smem.y[u][channel] = there ? w.y[row] : 0.0f;
    }
    if (threadIdx.x >= MN_MESA_CHUNK) return;
    const int u = threadIdx.x;
    const float2 token = mn_mesa_token<T>(p, me.at, u);
    smem.G[u] = mn_mesa_log_decay_cumsum(token.y, u), smem.beta[u] = token.x;
}

/* Whether token s of the chunk is there and no earlier than t. */
__device__ inline bool mn_mesa_reaches(const mn_mesa_grad_ctx &me, int t, int s) {
    return s >= t && s < me.count;
}

/* F_ts where s reaches t, else 0. */
template <int N>
__device__ inline float mn_mesa_decay(const mn_mesa_grad_smem<N> &smem, const mn_mesa_grad_ctx &me,
                                     int t, int s) {
    return mn_mesa_reaches(me, t, s) ? expf((float)(smem.G[s] - smem.G[t])) : 0.0f;
}

/* use(s, n) for tokens s from the warp's first one on, in their order; s reaches the first n of the
 * warp's tokens. Weights of the others are 0, but what lies at s may be NaN. */
template <typename F>
__device__ __forceinline__ void mn_mesa_each_later(const mn_mesa_grad_ctx &me, F use) {
    const int mixed = min(me.first + MN_MESA_WARP_TOKENS - 1, me.count);
#pragma unroll 1
    for (int s = me.first; s < mixed; s++) use(s, s - me.first + 1);
    for (int s = mixed; s < me.count; s++) use(s, (int)MN_MESA_WARP_TOKENS);
}

/* Products of this warp's keys with the x and y of all tokens. */
template <int N>
__device__ inline void mn_mesa_grad_scores(mn_mesa_grad_smem<N> &smem, const mn_mesa_grad_ctx &me) {
    const float *x = smem.x[me.lane], *y = smem.y[me.lane];
    float x_k[MN_MESA_WARP_TOKENS] = {}, y_k[MN_MESA_WARP_TOKENS] = {};
#pragma unroll 4
    for (int i = 0; i < 32 * N; i++) {
#pragma unroll
        for (int q = 0; q < MN_MESA_WARP_TOKENS; q++) {
            const float k = smem.k[me.first + q][i];
            x_k[q] = fmaf(x[i], k, x_k[q]), y_k[q] = fmaf(y[i], k, y_k[q]);
        }
    }
#pragma unroll
    for (int q = 0; q < MN_MESA_WARP_TOKENS; q++) {
        const bool reaches = mn_mesa_reaches(me, me.first + q, me.lane);    // else x may be NaN
        const float decay = mn_mesa_decay(smem, me, me.first + q, me.lane);
        smem.x_k[me.first + q][me.lane] = reaches ? decay * x_k[q] : 0.0f;
        smem.y_k[me.first + q][me.lane] = reaches ? decay * y_k[q] : 0.0f;
    }
}

/* A k, tile by tile; A is symmetric. Returns this thread's part of the product of A with Hkk. */
template <int N>
__device__ inline float mn_mesa_grad_keys(mn_mesa_grad_acc<N> &sum, mn_mesa_grad_smem<N> &smem,
                                           const mn_mesa_args &p, const mn_mesa_grad_ctx &me) {
    const int64_t K = p.call.K, pitch = mn_mesa_layout::of(p.call).pitch;
    float met = 0.0f;
    for (int64_t j0 = 0; j0 < K; j0 += 32) {
        __syncthreads();
        for (int i = threadIdx.x; i < 32 * 32 * N; i += MN_MESA_THREADS) {
            const int64_t j = j0 + i / (32 * N), channel = i % (32 * N);
            const bool there = j < K && channel < K;
            const float cell = there ? me.adjoint[j * pitch + channel] : 0.0f;
            if (there) met = fmaf(cell, me.behind[j * pitch + channel], met);
            smem.tile[i] = cell;
        }
        __syncthreads();
#pragma unroll 4
        for (int j = 0; j < 32; j++) {
            float k[MN_MESA_WARP_TOKENS];
#pragma unroll
            for (int q = 0; q < MN_MESA_WARP_TOKENS; q++) k[q] = smem.k[me.first + q][j0 + j];
#pragma unroll
            for (int n = 0; n < N; n++) {
                const float cell = smem.tile[(j * N + n) * 32 + me.lane];
#pragma unroll
                for (int q = 0; q < MN_MESA_WARP_TOKENS; q++) {
                    sum.Ak[q][n] = fmaf(cell, k[q], sum.Ak[q][n]);
                }
            }
        }
    }
    return met;
}

/* 32 columns of B and of the tokens' values into shared memory. */
template <int N, typename T>
__device__ inline float mn_mesa_grad_load_columns(mn_mesa_grad_smem<N> &smem, const mn_mesa_args &p,
                                              const mn_mesa_grad_ctx &me, int64_t j0) {
    const int64_t K = p.call.K, V = p.call.V, h = me.at.h;
    const mn_mesa_layout layout = mn_mesa_layout::of(p.call);
    float met = 0.0f;
    for (int i = threadIdx.x; i < MN_MESA_CHUNK * 32; i += MN_MESA_THREADS) {
        const int u = i / 32, j = i % 32;
        const bool there = u < me.count && j0 + j < V;
        const T *v = mn_row<T>(p.v, me.b, me.t0 + u, h);
        const T *cot = mn_row<T>(p.cot.o, me.b, me.t0 + u, h);
        smem.v[u][j] = there ? mn_float(v[j0 + j]) : 0.0f;
        smem.cot[u][j] = there ? mn_get(cot, j0 + j) : 0.0f;
    }
    for (int i = threadIdx.x; i < 32 * N * 32; i += MN_MESA_THREADS) {
        const int64_t channel = i / 32, j = j0 + i % 32;
        const int64_t cell_at = channel * layout.pitch + layout.rows + j;
        const bool there = channel < K && j < V;
        const float cell = there ? me.adjoint[cell_at] : 0.0f;
        if (there) met = fmaf(cell, me.behind[cell_at], met);
        smem.tile[channel * MN_MESA_PITCH + i % 32] = cell;
    }
    return met;
}

/* The gradients of this warp's values, columns j0 to j0 + 31. */
template <int N, typename T>
__device__ inline void mn_mesa_grad_values(mn_mesa_grad_smem<N> &smem, const mn_mesa_args &p,
                                            const mn_mesa_grad_ctx &me, int64_t j0) {
    float Bk[MN_MESA_WARP_TOKENS] = {};
#pragma unroll 4
    for (int i = 0; i < 32 * N; i++) {
        const float cell = smem.tile[i * MN_MESA_PITCH + me.lane];
#pragma unroll
        for (int q = 0; q < MN_MESA_WARP_TOKENS; q++) Bk[q] =
            fmaf(cell, smem.k[me.first + q][i], Bk[q]);
    }
#pragma unroll
    for (int q = 0; q < MN_MESA_WARP_TOKENS; q++) {
        Bk[q] *= mn_mesa_decay(smem, me, me.first + q, me.count - 1);
    }
    mn_mesa_each_later(me, [&](int s, int n) {
        const float cot = smem.cot[s][me.lane];
#pragma unroll
        for (int q = 0; q < MN_MESA_WARP_TOKENS; q++) {
            if (q < n) Bk[q] = fmaf(cot, smem.x_k[me.first + q][s], Bk[q]);
        }
    });
#pragma unroll
    for (int q = 0; q < MN_MESA_WARP_TOKENS; q++) {
        const int t = me.first + q;
        T *dv = mn_row<T>(p.grad.v, me.b, me.t0 + t, me.at.h);
        if (dv && t < me.count && j0 + me.lane < p.call.V) {
            mn_put(dv + j0 + me.lane, smem.beta[t] * Bk[q]);
        }
    }
}

/* B v and do.v, tile by tile, and gradients of values. Returns this thread's part of the product of
 * B with Hkv. */
template <int N, typename T>
__device__ inline float mn_mesa_grad_all_values(mn_mesa_grad_acc<N> &sum,
                                                mn_mesa_grad_smem<N> &smem,
                                                 const mn_mesa_args &p,
                                                     const mn_mesa_grad_ctx &me) {
    float met = 0.0f;
    for (int64_t j0 = 0; j0 < p.call.V; j0 += 32) {
        __syncthreads();
        met += mn_mesa_grad_load_columns<N, T>(smem, p, me, j0);
        __syncthreads();
#pragma unroll 4
        for (int j = 0; j < 32; j++) {
            const float cot = smem.cot[me.lane][j];
            float v[MN_MESA_WARP_TOKENS];
#pragma unroll
            for (int q = 0; q < MN_MESA_WARP_TOKENS; q++) {
                v[q] = smem.v[me.first + q][j];
                sum.cot_v[q] = fmaf(cot, v[q], sum.cot_v[q]);
            }
#pragma unroll
            for (int n = 0; n < N; n++) {
                const float cell = smem.tile[(32 * n + me.lane) * MN_MESA_PITCH + j];
#pragma unroll
                for (int q = 0; q < MN_MESA_WARP_TOKENS; q++) {
                    sum.Bv[q][n] = fmaf(cell, v[q], sum.Bv[q][n]);
                }
            }
        }
        mn_mesa_grad_values<N, T>(smem, p, me, j0);
    }
    return met;
}

/* Adds what passes inside the chunk; gradients of keys and beta. */
template <int N, typename T>
__device__ inline void mn_mesa_grad_epilogue(mn_mesa_grad_acc<N> &sum, mn_mesa_grad_smem<N> &smem,
                                           const mn_mesa_args &p, const mn_mesa_grad_ctx &me) {
    const int K = (int)p.call.K;
    const T *lam = mn_row<T>(p.lam, 0, 0, me.at.h);
#pragma unroll
    for (int q = 0; q < MN_MESA_WARP_TOKENS; q++) {
        const int t = me.first + q;
        const float end = mn_mesa_decay(smem, me, t, me.count - 1);
        const float decay = mn_mesa_decay(smem, me, t, me.lane);
        smem.cot_v[t][me.lane] = mn_mesa_reaches(me, t, me.lane) ? decay * sum.cot_v[q] : 0.0f;
#pragma unroll
        for (int n = 0; n < N; n++) sum.Ak[q][n] *= end, sum.Bv[q][n] *= end;
    }
    __syncwarp();
    mn_mesa_each_later(me, [&](int s, int reached) {
#pragma unroll
        for (int n = 0; n < N; n++) {
            const float x = smem.x[s][32 * n + me.lane], y = smem.y[s][32 * n + me.lane];
#pragma unroll
            for (int q = 0; q < MN_MESA_WARP_TOKENS; q++) {
                const int t = me.first + q;
                if (q >= reached) continue;
                const float read = fmaf(x, smem.y_k[t][s], y * smem.x_k[t][s]);
                sum.Ak[q][n] = fmaf(-0.5f, read, sum.Ak[q][n]);
                sum.Bv[q][n] = fmaf(x, smem.cot_v[t][s], sum.Bv[q][n]);
            }
        }
    });
#pragma unroll
    for (int q = 0; q < MN_MESA_WARP_TOKENS; q++) {
        const int t = me.first + q;
        T *dk = mn_row<T>(p.grad.k, me.b, me.t0 + t, me.at.h);
        float to_beta = 0.0f, read = 0.0f;
#pragma unroll
        for (int n = 0; n < N; n++) {
            const int i = 32 * n + me.lane;
            const float ridge = i < K ? mn_float(lam[i]) : 0.0f;
            to_beta = fmaf(smem.k[t][i], sum.Ak[q][n] + sum.Bv[q][n], to_beta);
            read = fmaf(ridge * smem.x[t][i], smem.y[t][i], read);
            if (dk && t < me.count && i < K) {
                mn_put(dk + i, smem.beta[t] * fmaf(2.0f, sum.Ak[q][n], sum.Bv[q][n]));
            }
        }
        to_beta = mn_warp_sum(to_beta), read = mn_warp_sum(read);
        if (me.lane == 0) smem.to_beta[t] = to_beta, smem.read[t] = read;
    }
}

template <int N, typename T>
__global__ void __launch_bounds__(MN_MESA_THREADS, N <= 4 ? 2 : 1)
mesa_grad_kernel(const __grid_constant__ mn_mesa_args p, mn_mesa_workspace w) {
    extern __shared__ __align__(128) unsigned char grade_bytes[];
    mn_mesa_grad_smem<N> &smem = *(mn_mesa_grad_smem<N> *)grade_bytes;
    mn_mesa_grad_ctx me;
    me.at = mn_mesa_coord_of(p.call, blockIdx.x / p.call.H, blockIdx.x % p.call.H);
    if (me.at.tile.n_rows == 0) return;
    const int64_t size = mn_mesa_layout::of(p.call).size;
    const bool last = me.at.tile.first + me.at.tile.n_rows == me.at.tile.span.length;
    me.adjoint = w.adjoints + me.at.index * size;
    me.behind = last ? w.last + (me.at.tile.n * p.call.H + me.at.h) * size
                     : w.pairs + (me.at.index + p.call.H) * size;
    me.b = me.at.tile.span.b, me.t0 = me.at.tile.span.t0 + me.at.tile.first;
    me.count = (int)me.at.tile.n_rows, me.lane = threadIdx.x % 32;
    me.first = threadIdx.x / 32 * MN_MESA_WARP_TOKENS;
    mn_mesa_grad_acc<N> sum = {};
    mn_mesa_grad_load<N, T>(smem, p, w, me);
    __syncthreads();
    mn_mesa_grad_scores<N>(smem, me);
    float met = mn_mesa_grad_keys<N>(sum, smem, p, me);
    met += mn_mesa_grad_all_values<N, T>(sum, smem, p, me);
    mn_mesa_grad_epilogue<N, T>(sum, smem, p, me);
    met = mn_group_sum<MN_MESA_THREADS>(met, smem.parts);
    __syncthreads();
    if (threadIdx.x >= MN_MESA_CHUNK) return;
    const int t = threadIdx.x;    // the sum from t to the chunk's end
    double dg = t < me.count ? (double)fmaf(-smem.beta[t], smem.to_beta[t], smem.read[t]) : 0.0;
    for (int lanes = 1; lanes < MN_MESA_CHUNK; lanes *= 2) {
        const double behind = __shfl_down_sync(0xffffffffu, dg, lanes);
        if (t + lanes < MN_MESA_CHUNK) dg += behind;
    }
    T *to_beta = mn_row<T>(p.grad.beta, me.b, me.t0 + t, me.at.h);
    T *to_g = mn_row<T>(p.grad.g, me.b, me.t0 + t, me.at.h);
    if (to_beta && t < me.count) mn_put(to_beta, smem.to_beta[t]);
    if (to_g && t < me.count) mn_put(to_g, (float)((double)met + dg));
}

/* Vectors of a block, and its pair. */
struct smem {
    float *pair, *kv, *b[2], *cot, *out, *parts;
};

__device__ static smem smem_at(unsigned char *bytes, const mn_call &c, float *state_spill) {
    const int64_t K = c.K, V = c.V;
    float *at = (float *)(bytes + sizeof(mn_mesa_solve_smem));
    const auto carve = [&](int64_t count) { float *from = at; at += count; return from; };
    smem r;
    r.kv = carve(K + V), r.b[0] = carve(K), r.b[1] = carve(K), r.cot = carve(V);
    r.out = carve(V), r.parts = carve(MN_MESA_THREADS);
    r.pair = state_spill ? state_spill + blockIdx.x * mn_mesa_layout::of(c).size : at;
    return r;
}

static size_t vector_bytes(int64_t K, int64_t V) {
    return (size_t)(3 * K + 3 * V + MN_MESA_THREADS) * sizeof(float);
}

template <typename T>
__device__ static void load_token(const smem &r, const mn_mesa_args &p, int64_t b, int64_t t,
                                  int64_t h) {
    const T *k = mn_row<T>(p.k, b, t, h), *v = mn_row<T>(p.v, b, t, h);
    for (int64_t i = threadIdx.x; i < p.call.K; i += MN_MESA_THREADS) r.kv[i] = mn_float(k[i]);
    for (int64_t j = threadIdx.x; j < p.call.V; j += MN_MESA_THREADS) {
        r.kv[p.call.K + j] = mn_float(v[j]);
    }
}

__device__ static void load_pair(float *to, const float *from, int64_t count) {
    for (int64_t i = threadIdx.x; i < count; i += MN_MESA_THREADS) to[i] = from[i];
}

/* ---- solving --------------------------------------------------------------------------------- */

/* x and y of the token, from the pair at it; o or dq. Returns this thread's part of x y. */
template <typename T>
__device__ static float read_token(const smem &r, const mn_mesa_args &p, const mn_mesa_coord &at,
                                   mn_mesa_solve_smem &memory, const mn_mesa_workspace &w,
                                       int64_t t,
                                   bool backward) {
    const int64_t K = p.call.K, V = p.call.V, b = at.tile.span.b, thread = threadIdx.x;
    const mn_mesa_layout layout = mn_mesa_layout::of(p.call);
    const float *values = r.pair + layout.rows;
    const T *q = mn_row<T>(p.q, b, t, at.h), *cot = mn_row<T>(p.cot.o, b, t, at.h);
    if (thread < K) {
        r.b[0][thread] = (float)p.scale * mn_float(q[thread]);
        r.b[1][thread] = 0.0f;
    }
    if (backward) {
        for (int64_t j = thread; j < V; j += MN_MESA_THREADS) r.cot[j] = mn_get(cot, j);
        __syncthreads();
        mn_mesa_mat_vec(r.b[1], values, layout.pitch, V, r.cot, K);
    }
    __syncthreads();
    mn_mesa_solve<T>({ r.b[0], r.b[1] }, r.pair, layout.pitch, mn_row<T>(p.lam, 0, 0, at.h), K,
                     memory,
                     w.matrices + blockIdx.x * mn_mesa_matrix_size(K));
    if (!backward) {
        T *o = mn_row<T>(p.o, b, t, at.h);
        mn_mesa_vec_mat(r.out, values, layout.pitch, V, r.b[0], K, r.parts);
        for (int64_t j = thread; j < V; j += MN_MESA_THREADS) mn_put(o + j, r.out[j]);
        return 0.0f;
    }
    T *dq = mn_row<T>(p.grad.q, b, t, at.h);
    const int64_t row = ((b * p.call.T + t) * p.call.H + at.h) * K;
    if (thread >= K) return 0.0f;
    w.x[row + thread] = r.b[0][thread], w.y[row + thread] = r.b[1][thread];
    if (dq) mn_put(dq + thread, (float)p.scale * r.b[1][thread]);
    return r.b[0][thread] * r.b[1][thread];
}

/* One row of a matrix of the pair, by a warp: several numbers at once, as it lies far away. */
__device__ static void write_row(float *row, const float *x, int64_t width, float write,
                                 float decay) {
    constexpr int UNROLL = 8;
    for (int64_t j0 = threadIdx.x % 32; j0 < width; j0 += 32 * UNROLL) {
        float cell[UNROLL];
#pragma unroll
        for (int i = 0; i < UNROLL; i++) {
            cell[i] = j0 + 32 * i < width ? row[j0 + 32 * i] : 0.0f;
        }
#pragma unroll
        for (int i = 0; i < UNROLL; i++) {
            const int64_t j = j0 + 32 * i;
            if (j < width) row[j] = fmaf(write, x[j], decay * cell[i]);
        }
    }
}

/* A block takes parts of chunks in turn. */
template <typename T>
__global__ void __launch_bounds__(MN_MESA_THREADS)
mesa_solve_wide_kernel(const __grid_constant__ mn_mesa_args p, mn_mesa_workspace w, int64_t items,
                       bool backward) {
    extern __shared__ __align__(128) unsigned char bytes[];
    constexpr int parts = MN_MESA_CHUNK / MN_MESA_TOKENS_WIDE;
    mn_mesa_solve_smem &memory = *(mn_mesa_solve_smem *)bytes;
    const smem r = smem_at(bytes, p.call, w.state_spill);
    const int64_t K = p.call.K;
    const mn_mesa_layout layout = mn_mesa_layout::of(p.call);
    for (int64_t item = blockIdx.x; item < items; item += gridDim.x) {
        const int64_t chunk = item / parts;
        const mn_mesa_coord at = mn_mesa_coord_of(p.call, chunk / p.call.H, chunk % p.call.H);
        const int first = (int)(item % parts) * MN_MESA_TOKENS_WIDE;
        const int last = (int)min((int64_t)first + MN_MESA_TOKENS_WIDE, at.tile.n_rows);
        const int64_t b = at.tile.span.b, t0 = at.tile.span.t0 + at.tile.first;
        float lam = 0.0f;
        if (first >= at.tile.n_rows) continue;
        __syncthreads();
        load_pair(r.pair, w.pairs + at.index * layout.size, layout.size);
        for (int u = 0; u < last; u++) {
            __syncthreads();
            load_token<T>(r, p, b, t0 + u, at.h);
            __syncthreads();
            const float decay = expf(mn_mesa_log<T>(p, b, t0 + u, at.h));
            const float beta = mn_float(*mn_row<T>(p.beta, b, t0 + u, at.h));
            for (int64_t i = threadIdx.x / 32; i < K; i += MN_MESA_THREADS / 32) {
                float *row = r.pair + i * layout.pitch;
                write_row(row, r.kv, K, beta * r.kv[i], decay);
                write_row(row + layout.rows, r.kv + K, p.call.V, beta * r.kv[i], decay);
            }
            __syncthreads();
            if (u >= first) lam -= read_token<T>(r, p, at, memory, w, t0 + u, backward);
        }
        if (backward && threadIdx.x < K) w.lam[item * K + threadIdx.x] = lam;
    }
}

/* The gradient of lam: parts in their order. */
template <typename T>
__global__ void __launch_bounds__(MN_MESA_THREADS)
mesa_lam_grad_kernel(const __grid_constant__ mn_mesa_args p, mn_mesa_workspace w, int64_t slots) {
    const int parts = mn_mesa_splits(p.call);
    // begins at
    const int each = p.call.K <= MN_MESA_REG_MAX_K ? MN_MESA_TOKENS / 2 : MN_MESA_TOKENS_WIDE;
    const int64_t h = blockIdx.x, i = threadIdx.x, K = p.call.K;
    T *to = mn_row<T>(p.grad.lam, 0, 0, h);
    float sum = 0.0f;
    if (i >= K) return;
    for (int64_t slot = 0; slot < slots; slot++) {
        const int64_t rows = mn_tile_at(p.call, MN_MESA_CHUNK, slot).n_rows;
        for (int part = 0; part < parts && part * each < rows; part++) {
            sum += w.lam[((slot * p.call.H + h) * parts + part) * K + i];
        }
    }
    mn_put(to + i, sum);
}

/* ---- launches -------------------------------------------------------------------------------- */

/* What blocks that scan need: a matrix to eliminate in, and room for a pair. */
static bool size_wide_solve(mn_mesa_workspace_sizes *to, const mn_call *c, size_t size) {
    const size_t limit = (size_t)mn_device_props_current().shared_bytes;
    size_t bytes;
    if (!mn_mul_size(&bytes, size, sizeof(float)) ||
        !mn_mul_size(&to->matrices, MN_MESA_BLOCKS, (size_t)mn_mesa_matrix_size(c->K))) {
        return false;
    }
    to->smem_bytes = sizeof(mn_mesa_solve_smem) + vector_bytes(c->K, c->V);
    if (bytes >= limit || to->smem_bytes + bytes > limit) {
        return mn_mul_size(&to->state_spill, MN_MESA_BLOCKS, size);
    }
    to->smem_bytes += bytes;
    return true;
}

/* Numbers of a pair as it lies in work space; false where they are too many. */
static bool state_numel(size_t *size, const mn_call &c) {
    const mn_mesa_layout layout = mn_mesa_layout::of(c);
    return mn_mul_size(size, (size_t)layout.rows, (size_t)layout.pitch) && *size <= INT32_MAX;
}

static bool workspace_sizes(mn_mesa_workspace_sizes *to, const mn_call *c, bool backward) {
    const size_t parts = (size_t)mn_mesa_splits(*c);
    size_t size, heads, chunks;
    *to = {};
    to->slots = mn_tile_slots(*c, MN_MESA_CHUNK);
    const bool ok = state_numel(&size, *c) &&
                    mn_mul_size(&heads, (size_t)mn_n_spans(*c), (size_t)c->H) &&
                    mn_mul_size(&chunks, (size_t)to->slots, (size_t)c->H) &&
                    mn_mul_size(&to->pairs, chunks, size) && mn_mul_size(&to->last, heads, size);
    if (!ok || (c->K > MN_MESA_REG_MAX_K && !size_wide_solve(to, c, size))) return false;
    to->decays = chunks;
    if (!backward) return true;
    return mn_mul_size(&to->tokens, (size_t)c->B, (size_t)c->T) &&
           mn_mul_size(&to->tokens, to->tokens, (size_t)c->H) &&
           mn_mul_size(&to->tokens, to->tokens, (size_t)c->K) &&
           mn_mul_size(&to->lam, chunks * parts, (size_t)c->K);
}

static bool plan_of(const mn_call *c, bool backward, mn_plan *plan) {
    mn_mesa_workspace_sizes e;
    size_t floats, bytes;
    return workspace_sizes(&e, c, backward) && mn_mul_size(&floats, e.pairs, backward ? 2 : 1) &&
           mn_add_size(&floats, floats, e.decays) && mn_add_size(&floats, floats, e.last) &&
           mn_add_size(&floats, floats, e.tokens) && mn_add_size(&floats, floats, e.tokens) &&
           mn_add_size(&floats, floats, e.lam) && mn_add_size(&floats, floats, e.state_spill) &&
           mn_mul_size(&floats, floats, sizeof(float)) &&
           mn_mul_size(&bytes, e.matrices, sizeof(double)) &&
           mn_add_size(&plan->shared_bytes, floats, bytes);
}

static mn_mesa_workspace workspace_at(void *shared, const mn_mesa_workspace_sizes &e,
                                      bool backward) {
    mn_mesa_workspace w = {};
    w.matrices = (double *)shared;
    float *at = (float *)(w.matrices + e.matrices);
    const auto carve = [&](size_t count) { float *from = at; at += count; return from; };
    w.pairs = carve(e.pairs), w.last = carve(e.last);    // first what is taken in packs
    if (backward) w.adjoints = carve(e.pairs);
    if (e.state_spill > 0) w.state_spill = carve(e.state_spill);
    w.decays = carve(e.decays);
    if (!backward) return w;
    w.x = carve(e.tokens), w.y = carve(e.tokens), w.lam = carve(e.lam);
    return w;
}

/* Sums of chunks, then over them. */
template <typename T>
static int scan_chunks_long(const mn_mesa_args *p, const mn_mesa_workspace_sizes &e,
                            const mn_mesa_workspace &w,
                      bool backward, cudaStream_t on) {
    const mn_call &c = p->call;
    const mn_mesa_layout layout = mn_mesa_layout::of(c);
    if (e.slots > 0) {
        const dim3 blocks((unsigned)e.slots, mn_blocks(layout.rows, MN_MESA_ROWS), (unsigned)c.H);
        if (backward) mesa_chunk_sums_kernel<T, true><<<blocks, MN_MESA_SUM_THREADS, 0,
            on>>>(*p, w);
        else mesa_chunk_sums_kernel<T, false><<<blocks, MN_MESA_SUM_THREADS, 0, on>>>(*p, w);
    }
    const dim3 packs(mn_blocks(layout.size, MN_MESA_VEC * MN_MESA_SCAN_THREADS),
                     (unsigned)(mn_n_spans(c) * c.H));
    return mn_launch_pdl(mesa_chunk_scan_kernel, packs, MN_MESA_SCAN_THREADS, 0, on,
                         *p, w, backward);
}

/* Both, and what is wanted of the pairs at the end. */
template <typename T>
static int scan_chunks(const mn_mesa_args *p, const mn_mesa_workspace_sizes &e,
                       const mn_mesa_workspace &w,
                 bool backward, cudaStream_t on) {
    const mn_call &c = p->call;
    const mn_mesa_layout layout = mn_mesa_layout::of(c);
    const int64_t n = mn_n_spans(c);
    int code = cudaSuccess;
    if (e.slots * c.H > INT32_MAX || n * c.H > 65535) return cudaErrorNotSupported;
    if (backward || c.T > MN_MESA_SHORT_TOKENS || layout.rows % MN_MESA_ROWS != 0) {
        code = scan_chunks_long<T>(p, e, w, backward, on);
    } else {
        const dim3 blocks((unsigned)n, mn_blocks(layout.rows, MN_MESA_ROWS), (unsigned)c.H);
        mesa_chunk_scan_short_kernel<T><<<blocks, MN_MESA_SHORT_CHUNKS * MN_MESA_SUM_THREADS, 0,
            on>>>(*p, w);
        code = mn_launch_status();
    }
    if (code == cudaSuccess && !backward && (p->hkk.data || p->hkv.data)) {
        const dim3 grid(mn_blocks(layout.size, MN_MESA_THREADS), (unsigned)(n * c.H));
        mesa_store_state_kernel<<<grid, MN_MESA_THREADS, 0, on>>>(*p, w.last);
        return mn_launch_status();
    }
    return code;
}

template <typename T>
static int solve_wide_of(const mn_mesa_args *p, const mn_mesa_workspace_sizes &e,
                         const mn_mesa_workspace &w,
                   bool backward, int64_t items, cudaStream_t on) {
    return mn_launch_smem(mesa_solve_wide_kernel<T>, dim3(mn_blocks(items, 1, MN_MESA_BLOCKS)),
                               MN_MESA_THREADS, e.smem_bytes, on, *p, w, items, backward);
}

template <int N, typename T>
static int read_launch(const mn_mesa_args *p, const mn_mesa_workspace &w, bool backward,
                       int64_t parts,
                   cudaStream_t on) {
    const auto kernel = backward ? mesa_read_kernel<N, T, true>
                                 : mesa_read_kernel<N, T, false>;
    const cudaError_t code = cudaFuncSetAttribute(
        kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)sizeof(mn_mesa_read_smem<N>));
    if (code != cudaSuccess) return code;
    return mn_launch_pdl(kernel, dim3((unsigned)parts, (unsigned)p->call.H), MN_MESA_READ_THREADS,
                           sizeof(mn_mesa_read_smem<N>), on, *p, w);
}

/* What tokens read. */
template <typename T>
static int read_dispatch(const mn_mesa_args *p, const mn_mesa_workspace_sizes &e,
                         const mn_mesa_workspace &w,
                    bool backward, cudaStream_t on) {
    const int64_t K = p->call.K, parts = e.slots * mn_mesa_splits(p->call);
    const int64_t items = parts * p->call.H;
    if (items == 0) return cudaSuccess;
    if (items > INT32_MAX || p->call.H > 65535) return cudaErrorNotSupported;
    if (K <= 16) return read_launch<2, T>(p, w, backward, parts, on);
    if (K <= 32) return read_launch<4, T>(p, w, backward, parts, on);
    if (K <= 64) return read_launch<8, T>(p, w, backward, parts, on);
    if (K <= MN_MESA_REG_MAX_K) return read_launch<16, T>(p, w, backward, parts, on);
    return solve_wide_of<T>(p, e, w, backward, items, on);
}

template <int N, typename T>
static int grad_of(const mn_mesa_args *p, const mn_mesa_workspace &w, int64_t items,
                      cudaStream_t on) {
    return mn_launch_smem(mesa_grad_kernel<N, T>, dim3((unsigned)items), MN_MESA_THREADS,
                               sizeof(mn_mesa_grad_smem<N>), on, *p, w);
}

/* Gradients of keys, values, beta and decays. */
template <typename T>
static int grad_dispatch(const mn_mesa_args *p, const mn_mesa_workspace_sizes &e,
                         const mn_mesa_workspace &w,
                       cudaStream_t on) {
    const int64_t K = p->call.K, items = e.slots * p->call.H;
    if (items == 0) return cudaSuccess;
    if (K <= 32) return grad_of<1, T>(p, w, items, on);
    if (K <= 64) return grad_of<2, T>(p, w, items, on);
    if (K <= 128) return grad_of<4, T>(p, w, items, on);
    return grad_of<8, T>(p, w, items, on);
}

template <typename T>
static int run(const mn_mesa_args *p, void *shared, bool backward, cudaStream_t on) {
    mn_mesa_workspace_sizes e;
    if (p->call.K > MN_MESA_MAX_K || !workspace_sizes(&e, &p->call, backward)) {
        return cudaErrorNotSupported;
    }
    if (e.last == 0) return cudaSuccess;
    const mn_mesa_workspace w = workspace_at(shared, e, backward);
    if (!backward && mn_mesa_single_launch_supported(p)) return mn_mesa_single_launch(p, w, on);
    int code = scan_chunks<T>(p, e, w, false, on);
    if (code == cudaSuccess && (backward || p->o.data)) {
        code = read_dispatch<T>(p, e, w, backward, on);
    }
    if (code != cudaSuccess || !backward) return code;
    if (p->grad.lam.data) {
        mesa_lam_grad_kernel<T><<<(unsigned)p->call.H, MN_MESA_THREADS, 0, on>>>(*p, w, e.slots);
    }
    code = scan_chunks<T>(p, e, w, true, on);
    return code == cudaSuccess ? grad_dispatch<T>(p, e, w, on) : code;
}

static int run_any(const void *args, void *shared, bool backward, void *stream) {
    const mn_mesa_args *p = (const mn_mesa_args *)args;
    const cudaStream_t on = (cudaStream_t)stream;
    return p->call.dtype == MN_BF16 ? run<mn_bf16>(p, shared, backward, on)
                                    : run<float>(p, shared, backward, on);
}

MN_CUDA_PLAN(mesa_forward) {
    const mn_mesa_args *p = (const mn_mesa_args *)args;
    return p->steps > 0 ? mn_mesa_steps_plan(plan, &p->call) : plan_of(&p->call, false, plan);
}

MN_CUDA_PLAN(mesa_backward) {
    return plan_of((const mn_call *)args, true, plan);
}

MN_CUDA_LAUNCH(mesa_forward) {
    const mn_mesa_args *p = (const mn_mesa_args *)args;
    if (p->steps > 0) return mn_mesa_steps_launch(p, shared, (cudaStream_t)stream);
    return run_any(args, shared, false, stream);
}

MN_CUDA_LAUNCH(mesa_backward) {
    return run_any(args, shared, true, stream);
}

}    // namespace mneme::mesa
