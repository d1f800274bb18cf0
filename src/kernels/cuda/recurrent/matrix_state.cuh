/* matrix_state.cuh - the recurrence of a matrix state, forward and back; one token with the state
 * in place is matrix_step.cuh. */
#ifndef MN_KERNELS_CUDA_RECURRENT_MATRIX_STATE_CUH
#define MN_KERNELS_CUDA_RECURRENT_MATRIX_STATE_CUH

#include "kernels/cuda/prim/common.cuh"
#include "kernels/cuda/prim/pdl.cuh"
#include "kernels/cuda/prim/sync.cuh"
#include "kernels/cuda/recurrent/matrix_step.cuh"

namespace mneme::recurrent {

/* matrix memories that are read, corrected and written token by token: the recurrence of delta,
 * and of additive, which is delta without an eraser.
 *
 *   S' = diag(exp g) S;  r = v - S'^T e;  S = S' + w r';  o = scale S'q        (w includes beta)
 *
 *   D += scale q do'     dq = scale S do     dw = D r     dr = D'w     dv = dr     de = -S' dr
 *   D' = D - e dr'       dg = rowsum(D' . S')             D_{t-1} = diag(exp g) D'
 *
 * A block has a tile of value columns of one head of one sequence and scans its tokens; columns
 * never meet. Lane l of a warp holds rows l, l + 32, ... of the state of the warp's four columns in
 * registers. Tokens come through shared memory, a group at a time.
 *
 * Backward scans forward first and keeps the state of every 64 tokens; from there, last span first,
 * it keeps the state of every group, and of a group every token's in shared memory. A thread reads
 * back only what it wrote. Sums over columns go through shared memory inside a block, and between
 * blocks through parts that a second kernel adds in the order of the tiles. */

enum { MN_MATRIX_COLUMNS = 4, MN_MATRIX_SEGMENT = 64, MN_MATRIX_MAX_K = 1024 };

/* What the kernels read of additive's or delta's arguments. */
struct mn_matrix_params {
    mn_call call;
    float scale;
    int decay;
    mn_in q, e, w, v, beta, g, state0;    // w absent: e
    mn_out o, state;
    mn_in cot_o, cot_state;
    mn_out dq, de, dw, dv, dbeta, dg, dstate0;
};

/* Sizes for R rows of each lane. */
template <int R>
struct mn_matrix_sizes {
    static constexpr int warps = R > 8 ? 4 : 8, threads = 32 * warps;
    static constexpr int tile = warps * MN_MATRIX_COLUMNS;    // columns of a block
    static constexpr int rows = 32 * R;                       // K, rounded up
    static constexpr int ahead = R > 8 ? 2 : R > 4 ? 8 : 16;  // tokens of a group forward
    static constexpr int group = R > 8 ? 1 : 4;               // and backward
    static constexpr int kept = R * MN_MATRIX_COLUMNS * threads;    // floats of a tile's state
    static constexpr int row_groups = MN_MATRIX_SEGMENT / group;     // of a span
};

/* A group of tokens in shared memory; zeros beyond the sizes. */
template <int R, int TOKENS>
struct mn_matrix_tokens {
    float q[TOKENS][32 * R], e[TOKENS][32 * R], w[TOKENS][32 * R], decay[TOKENS][32 * R];
    float v[TOKENS][mn_matrix_sizes<R>::tile], cot[TOKENS][mn_matrix_sizes<R>::tile];
};

/* Which tile this is. */
struct mn_matrix_coord {
    int64_t n, h, column0, index;    // index: among all blocks
    int64_t key;                     // head of the queries and keys
    mn_span span;
};

template <int R>
__device__ inline mn_matrix_coord mn_matrix_block_coord(const mn_matrix_params &p,
                                                        int64_t n_tiles) {
    mn_matrix_coord at;
    at.index = blockIdx.x;
    at.column0 = at.index % n_tiles * mn_matrix_sizes<R>::tile;
    at.h = at.index / n_tiles % p.call.H;
    at.key = mn_key_head(p.call, at.h);
    at.n = at.index / n_tiles / p.call.H;
    at.span = mn_span_at(p.call, at.n);
    return at;
}

/* A decay exp(g) as it travels: itself, or -|exp(g) - 1|, the sign bit set, when it is near 1. expf
 * of a slow decay is off by the same rounding at every token of a head that has one decay, which
 * grows with their number; by what it takes away, each cell is rounded on its own. */
__device__ inline float mn_matrix_decay(float g) {
    return g > -0.5f && g <= 0.0f ? -fabsf(expm1f(g)) : expf(g);
}

__device__ inline float mn_matrix_apply_decay(float x, float decay) {
    return fmaf(x, decay, signbit(decay) ? x : 0.0f);
}

/* Reads tokens [t, t + count) of the sequence. All threads of the block call; those that still read
 * the group before must be done. */
template <typename T, int R, int TOKENS>
__device__ void mn_matrix_load(mn_matrix_tokens<R, TOKENS> &to, const mn_matrix_params &p,
                                const mn_matrix_coord &at, int64_t t, int count) {
    using sizes = mn_matrix_sizes<R>;
    for (int k = threadIdx.x; k < count * sizes::rows; k += sizes::threads) {
        const int token = k / sizes::rows, i = k % sizes::rows;
        const int64_t b = at.span.b, when = at.span.t0 + t + token;
        const bool inside = i < p.call.K;
        const T *e = mn_row<T>(p.e, b, when, at.key), *g = mn_row<T>(p.g, b, when, at.h);
        const T *w = p.w.data ? mn_row<T>(p.w, b, when, at.key) : e;
        const T *beta = mn_row<T>(p.beta, b, when, at.h);
        const float write = beta ? mn_float(*beta) : 1.0f;
        to.q[token][i] = inside ? mn_float(mn_row<T>(p.q, b, when, at.key)[i]) : 0.0f;
        to.e[token][i] = inside ? mn_get(e, i) : 0.0f;
        to.w[token][i] = inside ? write * mn_float(w[i]) : 0.0f;
        to.decay[token][i] = 1.0f;
        if (g && inside) {
            to.decay[token][i] = mn_matrix_decay(mn_get(g, p.decay == MN_DECAY_CHANNEL ? i : 0));
        }
    }
    for (int k = threadIdx.x; k < count * sizes::tile; k += sizes::threads) {
        const int token = k / sizes::tile, c = k % sizes::tile;
        const int64_t b = at.span.b, when = at.span.t0 + t + token, j = at.column0 + c;
        const bool inside = j < p.call.V;
        to.v[token][c] = inside ? mn_float(mn_row<T>(p.v, b, when, at.h)[j]) : 0.0f;
        to.cot[token][c] = inside ? mn_get(mn_row<T>(p.cot_o, b, when, at.h), j) : 0.0f;
    }
}

/* ---- the part of a state that a thread holds ------------------------------------------------- */

template <int R>
struct mn_matrix_cells {
    float at[R][MN_MATRIX_COLUMNS];

    /* Rows and columns of the state in memory; zeros where there are none. */
    __device__ void load(const mn_in &state, const mn_call &call, const mn_matrix_coord &coord) {
        const float *from = mn_row<float>(state, coord.n, 0, coord.h);
        each(call, coord, [&](float &cell, int64_t i, int64_t j, bool inside) {
            cell = inside && from ? from[i * call.V + j] : 0.0f;
        });
    }

    __device__ void store(const mn_out &state, const mn_call &call, const mn_matrix_coord &coord) {
        float *to = mn_row<float>(state, coord.n, 0, coord.h);
        each(call, coord, [&](float &cell, int64_t i, int64_t j, bool inside) {
            if (inside && to) to[i * call.V + j] = cell;
        });
    }

    template <typename F>
    __device__ void each(const mn_call &call, const mn_matrix_coord &coord, F use) {
        const int64_t j0 = coord.column0 + threadIdx.x / 32 * MN_MATRIX_COLUMNS;
#pragma unroll
        for (int r = 0; r < R; r++) {
            const int64_t i = threadIdx.x % 32 + 32 * r;
#pragma unroll
            for (int c = 0; c < MN_MATRIX_COLUMNS; c++) {
                use(at[r][c], i, j0 + c, i < call.K && j0 + c < call.V);
            }
        }
    }

    /* To and from `kept` floats of shared memory, of which each thread touches its own. */
    __device__ void keep(float *smem) const {
#pragma unroll
        for (int r = 0; r < R; r++) mn_store<4>(smem, index_of(r), at[r]);
    }

    __device__ void recall(const float *smem) {
#pragma unroll
        for (int r = 0; r < R; r++) mn_load<4>(at[r], smem, index_of(r));
    }

    __device__ static int index_of(int r) {
        return (r * mn_matrix_sizes<R>::threads + (int)threadIdx.x) * MN_MATRIX_COLUMNS;
    }

    /* sums[c] = sum over rows of x_i S_ic, in all lanes */
    __device__ void dot(float (&sums)[MN_MATRIX_COLUMNS], const float *x) const {
#pragma unroll
        for (int c = 0; c < MN_MATRIX_COLUMNS; c++) sums[c] = 0.0f;
#pragma unroll
        for (int r = 0; r < R; r++) {
            const float x_r = x[threadIdx.x % 32 + 32 * r];
#pragma unroll
            for (int c = 0; c < MN_MATRIX_COLUMNS; c++) sums[c] = fmaf(x_r, at[r][c], sums[c]);
        }
#pragma unroll
        for (int c = 0; c < MN_MATRIX_COLUMNS; c++) sums[c] = mn_warp_sum(sums[c]);
    }

    /* One token: decays the state, leaves the residual in `r` and writes it. */
    template <bool DELTA_RULE, int TOKENS>
    __device__ void advance(float (&residual)[MN_MATRIX_COLUMNS],
                            const mn_matrix_tokens<R, TOKENS> &in, int token) {
        const int lane = threadIdx.x % 32, c0 = threadIdx.x / 32 * MN_MATRIX_COLUMNS;
#pragma unroll
        for (int r = 0; r < R; r++) {
            const float decay = in.decay[token][lane + 32 * r];
#pragma unroll
            for (int c = 0; c < MN_MATRIX_COLUMNS; c++) {
                at[r][c] = mn_matrix_apply_decay(at[r][c], decay);
            }
        }
        float known[MN_MATRIX_COLUMNS] = {};
        if (DELTA_RULE) dot(known, in.e[token]);
#pragma unroll
        for (int c = 0; c < MN_MATRIX_COLUMNS; c++) residual[c] = in.v[token][c0 + c] - known[c];
#pragma unroll
        for (int r = 0; r < R; r++) {
            const float w = in.w[token][lane + 32 * r];
#pragma unroll
            for (int c = 0; c < MN_MATRIX_COLUMNS; c++) {
                at[r][c] = fmaf(w, residual[c], at[r][c]);
            }
        }
    }
};

/* Lane c of a warp writes number c of the warp's columns to row `to`. */
template <typename T>
__device__ inline void mn_matrix_store_row(T *to, const float (&x)[MN_MATRIX_COLUMNS],
                                           int64_t column0,
                                     int64_t V) {
    const int lane = threadIdx.x % 32;
    const int64_t j0 = column0 + threadIdx.x / 32 * MN_MATRIX_COLUMNS;
#pragma unroll
    for (int c = 0; c < MN_MATRIX_COLUMNS; c++) {
        if (to && lane == c && j0 + c < V) mn_put(to + j0 + c, x[c]);
    }
}

/* ---- forward --------------------------------------------------------------------------------- */

template <typename T, int R, bool DELTA_RULE>
__global__ void __launch_bounds__(mn_matrix_sizes<R>::threads)
matrix_state_scan_kernel(const __grid_constant__ mn_matrix_params p, int64_t n_tiles) {
    constexpr int TOKENS = mn_matrix_sizes<R>::ahead;
    __shared__ mn_matrix_tokens<R, TOKENS> in;
    const mn_matrix_coord at = mn_matrix_block_coord<R>(p, n_tiles);
    mn_matrix_cells<R> S;
    S.load(p.state0, p.call, at);
    for (int64_t t = 0; t < at.span.length; t += TOKENS) {
        const int count = (int)min((int64_t)TOKENS, at.span.length - t);
        __syncthreads();
        mn_matrix_load<T, R, TOKENS>(in, p, at, t, count);
        __syncthreads();
        for (int token = 0; token < count; token++) {
            float residual[MN_MATRIX_COLUMNS], o[MN_MATRIX_COLUMNS];
            S.template advance<DELTA_RULE>(residual, in, token);
            if (!p.o.data) continue;
            S.dot(o, in.q[token]);
#pragma unroll
            for (int c = 0; c < MN_MATRIX_COLUMNS; c++) o[c] *= p.scale;
            T *row = mn_row<T>(p.o, at.span.b, at.span.t0 + t + token, at.h);
            mn_matrix_store_row(row, o, at.column0, p.call.V);
        }
    }
    S.store(p.state, p.call, at);
}

/* ---- backward -------------------------------------------------------------------------------- */

enum { MN_MATRIX_TO_Q, MN_MATRIX_TO_W, MN_MATRIX_TO_E, MN_MATRIX_TO_G, MN_MATRIX_SUMS };

/* Work space: states in front of spans and of a span's groups of tokens, sums over columns.
 * */
struct mn_matrix_workspace {
    float *spans, *row_groups, *sums;
};

template <int R>
struct mn_matrix_smem {
    mn_matrix_tokens<R, mn_matrix_sizes<R>::group> in;
    float before[mn_matrix_sizes<R>::group][mn_matrix_sizes<R>::kept];
    float residual[mn_matrix_sizes<R>::group][mn_matrix_sizes<R>::tile];
    float sums[mn_matrix_sizes<R>::warps][MN_MATRIX_SUMS][32 * R];
};

/* Where the sums of a token start in a tile's part: MN_MATRIX_SUMS rows of K. */
__device__ inline int64_t mn_matrix_partial(const mn_matrix_params &p, int64_t tile, int64_t b,
                                            int64_t t,
                                         int64_t h) {
    const int64_t row = ((tile * p.call.B + b) * p.call.T + t) * p.call.H + h;
    return row * MN_MATRIX_SUMS * p.call.K;
}

/* Gradients of one token, from D behind it; D is then the one in front of it. This warp's sums over
 * its columns go to shared memory. */
template <typename T, int R>
__device__ void mn_matrix_token_bwd(mn_matrix_cells<R> &D, mn_matrix_smem<R> &smem,
                                     const mn_matrix_params &p, const mn_matrix_coord &at,
                                         int64_t t,
                                     int token) {
    constexpr int C = MN_MATRIX_COLUMNS;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    mn_matrix_cells<R> before;
    float cot[C], residual[C], dr[C];
    before.recall(smem.before[token]);
    mn_load<C>(cot, smem.in.cot[token], warp * C);
    mn_load<C>(residual, smem.residual[token], warp * C);
#pragma unroll
    for (int r = 0; r < R; r++) {
        const float q = p.scale * smem.in.q[token][lane + 32 * r];
#pragma unroll
        for (int c = 0; c < C; c++) D.at[r][c] = fmaf(q, cot[c], D.at[r][c]);
    }
    D.dot(dr, smem.in.w[token]);
    mn_matrix_store_row(mn_row<T>(p.dv, at.span.b, at.span.t0 + t, at.h), dr, at.column0, p.call.V);
#pragma unroll
    for (int r = 0; r < R; r++) {
        const int i = lane + 32 * r;
        const float decay = smem.in.decay[token][i], w = smem.in.w[token][i];
        const float e = smem.in.e[token][i];
        float to_q = 0.0f, to_w = 0.0f, to_e = 0.0f, to_g = 0.0f;
#pragma unroll
        for (int c = 0; c < C; c++) {
            const float decayed = mn_matrix_apply_decay(before.at[r][c], decay);
            to_q = fmaf(fmaf(w, residual[c], decayed), cot[c], to_q);
            to_w = fmaf(D.at[r][c], residual[c], to_w);
            to_e = fmaf(-decayed, dr[c], to_e);
            D.at[r][c] = fmaf(-e, dr[c], D.at[r][c]);
            to_g = fmaf(D.at[r][c], decayed, to_g);
            D.at[r][c] = mn_matrix_apply_decay(D.at[r][c], decay);
        }
        smem.sums[warp][MN_MATRIX_TO_Q][i] = to_q;
        smem.sums[warp][MN_MATRIX_TO_W][i] = to_w;
        smem.sums[warp][MN_MATRIX_TO_E][i] = to_e;
        smem.sums[warp][MN_MATRIX_TO_G][i] = to_g;
    }
}

/* Adds the warps' sums of a token in their order. All threads of the block call. */
template <int R>
__device__ void mn_matrix_store_sums(const mn_matrix_smem<R> &smem, const mn_matrix_params &p,
                                     float *partial) {
    using sizes = mn_matrix_sizes<R>;
    for (int k = threadIdx.x; k < MN_MATRIX_SUMS * sizes::rows; k += sizes::threads) {
        const int which = k / sizes::rows, i = k % sizes::rows;
        if (i >= p.call.K) continue;
        float sum = 0.0f;
#pragma unroll
        for (int warp = 0; warp < sizes::warps; warp++) sum += smem.sums[warp][which][i];
        partial[which * p.call.K + i] = sum;
    }
}

/* The gradients of group [t, t + count), from the state in front of it and D behind it. */
template <typename T, int R, bool DELTA_RULE>
__device__ void mn_matrix_group_bwd(mn_matrix_cells<R> &D, const float *state,
                                     mn_matrix_smem<R> &smem, float *sums,
                                         const mn_matrix_params &p,
                                     const mn_matrix_coord &at, int64_t t, int count) {
    constexpr int C = MN_MATRIX_COLUMNS;
    mn_matrix_cells<R> S;
    S.recall(state);
    __syncthreads();
    mn_matrix_load<T, R>(smem.in, p, at, t, count);
    __syncthreads();
    for (int token = 0; token < count; token++) {
        float residual[C];
        S.keep(smem.before[token]);
        S.template advance<DELTA_RULE>(residual, smem.in, token);
        if (threadIdx.x % 32 == 0) {
            mn_store<C>(smem.residual[token], threadIdx.x / 32 * C, residual);
        }
        __syncwarp();
    }
    const int64_t tile = at.column0 / mn_matrix_sizes<R>::tile;
    for (int token = count - 1; token >= 0; token--) {
        mn_matrix_token_bwd<T, R>(D, smem, p, at, t + token, token);
        __syncthreads();
        const int64_t when = at.span.t0 + t + token;
        mn_matrix_store_sums<R>(smem, p,
                                sums + mn_matrix_partial(p, tile, at.span.b, when, at.h));
        __syncthreads();
    }
}

/* Walks tokens [t0, t1) and keeps the state in front of every `every` of them. */
template <typename T, int R, bool DELTA_RULE>
__device__ void mn_matrix_recompute(mn_matrix_cells<R> &S, float *kept, int64_t stride, int every,
                                 mn_matrix_smem<R> &smem, const mn_matrix_params &p,
                                 const mn_matrix_coord &at, int64_t t0, int64_t t1) {
    constexpr int TOKENS = mn_matrix_sizes<R>::group;
    for (int64_t t = t0; t < t1; t += TOKENS) {
        const int count = (int)min((int64_t)TOKENS, t1 - t);
        if ((t - t0) % every == 0) S.keep(kept + (t - t0) / every * stride);
        __syncthreads();
        mn_matrix_load<T, R>(smem.in, p, at, t, count);
        __syncthreads();
        for (int token = 0; token < count; token++) {
            float residual[MN_MATRIX_COLUMNS];
            S.template advance<DELTA_RULE>(residual, smem.in, token);
        }
    }
}

/* The first of a sequence's spans in the numbering of mn_tile_slots. */
__device__ inline int64_t mn_matrix_first_segment(const mn_call &call, int64_t n) {
    if (call.cu_seqlens) return call.cu_seqlens[n] / MN_MATRIX_SEGMENT + n;
    return n * ((call.T + MN_MATRIX_SEGMENT - 1) / MN_MATRIX_SEGMENT);
}

template <typename T, int R, bool DELTA_RULE>
__global__ void __launch_bounds__(mn_matrix_sizes<R>::threads)
matrix_state_scan_bwd_kernel(const __grid_constant__ mn_matrix_params p, int64_t n_tiles,
                          mn_matrix_workspace workspace) {
    using sizes = mn_matrix_sizes<R>;
    extern __shared__ __align__(128) unsigned char bytes[];
    mn_matrix_smem<R> &smem = *(mn_matrix_smem<R> *)bytes;
    const mn_matrix_coord at = mn_matrix_block_coord<R>(p, n_tiles);
    const int64_t stride = p.call.H * n_tiles * sizes::kept;    // between spans
    float *spans = workspace.spans + mn_matrix_first_segment(p.call, at.n) * stride +
                   at.index % (p.call.H * n_tiles) * sizes::kept;
    float *row_groups = workspace.row_groups + at.index * sizes::row_groups * sizes::kept;
    mn_matrix_cells<R> S, D;
    S.load(p.state0, p.call, at);
    mn_matrix_recompute<T, R, DELTA_RULE>(S, spans, stride, MN_MATRIX_SEGMENT, smem, p, at, 0,
                                   at.span.length);
    D.load(p.cot_state, p.call, at);
    const int64_t n_spans = (at.span.length + MN_MATRIX_SEGMENT - 1) / MN_MATRIX_SEGMENT;
    for (int64_t span = n_spans - 1; span >= 0; span--) {
        const int64_t t0 = span * MN_MATRIX_SEGMENT;
        const int64_t t1 = min(t0 + MN_MATRIX_SEGMENT, at.span.length);
        S.recall(spans + span * stride);
        mn_matrix_recompute<T, R, DELTA_RULE>(S, row_groups, sizes::kept, sizes::group, smem, p,
                                              at, t0, t1);
        for (int64_t group = (t1 - t0 - 1) / sizes::group; group >= 0; group--) {
            const int64_t t = t0 + group * sizes::group;
            const int count = (int)min((int64_t)sizes::group, t1 - t);
            mn_matrix_group_bwd<T, R, DELTA_RULE>(D, row_groups + group * sizes::kept, smem,
                                                  workspace.sums, p,
                                               at, t, count);
        }
    }
    D.store(p.dstate0, p.call, at);
}

/* Sums of a token over the tiles, and from them its gradients. One warp has one token and head.
 * `whole` takes the sum that a decay per head adds up. */
template <typename T>
__global__ void __launch_bounds__(256)
matrix_reduce_grads_kernel(const __grid_constant__ mn_matrix_params p, int64_t n_tiles,
                           const float *sums,
                        float *head_decay) {
    const int64_t row = blockIdx.x * (int64_t)8 + threadIdx.x / 32, K = p.call.K;
    if (row >= p.call.B * p.call.T * p.call.H) return;
    const int64_t h = row % p.call.H, t = row / p.call.H % p.call.T;
    const int64_t b = row / p.call.H / p.call.T;
    const T *beta_at = mn_row<T>(p.beta, b, t, h);
    const T *w = mn_row<T>(p.w.data ? p.w : p.e, b, t, mn_key_head(p.call, h));
    T *dq = mn_row<T>(p.dq, b, t, h), *de = mn_row<T>(p.de, b, t, h);
    T *dw = mn_row<T>(p.dw, b, t, h), *dg = mn_row<T>(p.dg, b, t, h);
    T *dbeta = mn_row<T>(p.dbeta, b, t, h);
    const float beta = beta_at ? mn_float(*beta_at) : 1.0f;
    float to_beta = 0.0f, to_decay = 0.0f;
    for (int64_t i = threadIdx.x % 32; i < K; i += 32) {
        float sum[MN_MATRIX_SUMS] = {};
        for (int64_t tile = 0; tile < n_tiles; tile++) {
            const float *partial = sums + mn_matrix_partial(p, tile, b, t, h) + i;
#pragma unroll
            for (int which = 0; which < MN_MATRIX_SUMS; which++) sum[which] += partial[which * K];
        }
        const float to_w = beta * sum[MN_MATRIX_TO_W];
        to_beta = fmaf(mn_float(w[i]), sum[MN_MATRIX_TO_W], to_beta);
        to_decay += sum[MN_MATRIX_TO_G];
        if (dq) mn_put(dq + i, p.scale * sum[MN_MATRIX_TO_Q]);
        if (dw) mn_put(dw + i, to_w);
        if (de) mn_put(de + i, sum[MN_MATRIX_TO_E] + (p.w.data ? 0.0f : to_w));
        if (dg && p.decay == MN_DECAY_CHANNEL) mn_put(dg + i, sum[MN_MATRIX_TO_G]);
    }
    to_beta = mn_warp_sum(to_beta);
    to_decay = mn_warp_sum(to_decay);
    if (threadIdx.x % 32 != 0) return;
    if (dbeta) mn_put(dbeta, to_beta);
    if (dg && p.decay == MN_DECAY_TOKEN) mn_put(dg, to_decay);
    head_decay[row] = to_decay;
}

/* A decay per head: the sum over all tokens, each thread's in their order, then the threads'. */
template <typename T>
__global__ void __launch_bounds__(256)
matrix_head_decay_grad_kernel(const __grid_constant__ mn_matrix_params p, const float *head_decay) {
    __shared__ float smem[32];
    const int64_t h = blockIdx.x;
    float sum = 0.0f;
    for (int64_t row = threadIdx.x; row < p.call.B * p.call.T; row += 256) {
        sum += head_decay[row * p.call.H + h];
    }
    sum = mn_group_sum<256>(sum, smem);
    if (threadIdx.x == 0) mn_put(mn_row<T>(p.dg, 0, 0, h), sum);
}

/* ---- launches -------------------------------------------------------------------------------- */

/* Floats of the four parts of the work space. */
struct mn_matrix_workspace_sizes {
    size_t spans, row_groups, sums, head_decay;
};

template <int R>
inline bool mn_matrix_size_workspace(mn_matrix_workspace_sizes *to, const mn_call &call) {
    using sizes = mn_matrix_sizes<R>;
    const size_t tiles = (size_t)mn_ceil_div(call.V, sizes::tile), H = (size_t)call.H;
    size_t blocks;
    bool ok = mn_mul_size(&blocks, H * tiles, (size_t)mn_n_spans(call));
    ok = ok && mn_mul_size(&to->spans, (size_t)mn_tile_slots(call, MN_MATRIX_SEGMENT), H * tiles) &&
         mn_mul_size(&to->spans, to->spans, sizes::kept);
    ok = ok && mn_mul_size(&to->row_groups, blocks, (size_t)sizes::row_groups * sizes::kept);
    ok = ok && mn_mul_size(&to->head_decay, (size_t)call.B, (size_t)call.T) &&
         mn_mul_size(&to->head_decay, to->head_decay, H);
    return ok && mn_mul_size(&to->sums, to->head_decay, tiles) &&
           mn_mul_size(&to->sums, to->sums, (size_t)(MN_MATRIX_SUMS * call.K));
}

inline bool mn_matrix_size_workspace_any(mn_matrix_workspace_sizes *to, const mn_call &call) {
    if (call.K <= 32) return mn_matrix_size_workspace<1>(to, call);
    if (call.K <= 64) return mn_matrix_size_workspace<2>(to, call);
    if (call.K <= 128) return mn_matrix_size_workspace<4>(to, call);
    if (call.K <= 256) return mn_matrix_size_workspace<8>(to, call);
    return mn_matrix_size_workspace<32>(to, call);
}

inline bool mn_matrix_backward_plan(mn_plan *plan, const mn_call &call) {
    mn_matrix_workspace_sizes extent;
    size_t all;
    return mn_matrix_size_workspace_any(&extent, call) &&
           mn_add_size(&all, extent.spans, extent.row_groups)
               && mn_add_size(&all, all, extent.sums) &&
           mn_add_size(&all, all, extent.head_decay) &&
           mn_mul_size(&plan->shared_bytes, all, sizeof(float));
}

template <typename T, int R, bool DELTA_RULE>
static int mn_matrix_forward_of(const mn_matrix_params &p, cudaStream_t stream) {
    using sizes = mn_matrix_sizes<R>;
    const int64_t n_tiles = mn_ceil_div(p.call.V, sizes::tile);
    const int64_t blocks = n_tiles * p.call.H * mn_n_spans(p.call);
    if (blocks == 0) return cudaSuccess;
    if (blocks > INT32_MAX) return cudaErrorNotSupported;
    matrix_state_scan_kernel<T, R, DELTA_RULE>
        <<<(unsigned)blocks, sizes::threads, 0, stream>>>(p, n_tiles);
    return mn_launch_status();
}

template <typename T>
static int mn_matrix_reduce_grads(const mn_matrix_params &p, int64_t n_tiles, const float *sums,
                                  float *head_decay,
                            cudaStream_t stream) {
    const int64_t rows = p.call.B * p.call.T * p.call.H;
    if (rows > 0) {
        matrix_reduce_grads_kernel<T><<<mn_blocks(rows, 8), 256, 0,
            stream>>>(p, n_tiles, sums, head_decay);
    }
    if (p.decay == MN_DECAY_HEAD && p.dg.data && p.call.H > 0) {
        matrix_head_decay_grad_kernel<T><<<(unsigned)p.call.H, 256, 0, stream>>>(p, head_decay);
    }
    return mn_launch_status();
}

template <typename T, int R, bool DELTA_RULE>
static int mn_matrix_backward_of(const mn_matrix_params &p, float *shared, cudaStream_t stream) {
    using sizes = mn_matrix_sizes<R>;
    const int64_t n_tiles = mn_ceil_div(p.call.V, sizes::tile);
    const int64_t blocks = n_tiles * p.call.H * mn_n_spans(p.call);
    mn_matrix_workspace_sizes extent;
    if (blocks == 0) return cudaSuccess;
    if (blocks > INT32_MAX || !mn_matrix_size_workspace<R>(&extent,
                                                           p.call)) return cudaErrorNotSupported;
    const mn_matrix_workspace workspace = { shared, shared + extent.spans,
                                  shared + extent.spans + extent.row_groups };
    const int launched = mn_launch_smem(
        matrix_state_scan_bwd_kernel<T, R, DELTA_RULE>, dim3((unsigned)blocks), sizes::threads,
        sizeof(mn_matrix_smem<R>), stream, p, n_tiles, workspace);
    if (launched != cudaSuccess) return launched;
    return mn_matrix_reduce_grads<T>(p, n_tiles, workspace.sums, workspace.sums + extent.sums,
                                     stream);
}

/* Calls function<T, R, DELTA_RULE> for a key width; `arguments` in parentheses. */
#define MN_MATRIX_DISPATCH_K(function, T, delta_rule, K, arguments)                                \
    do {                                                                                           \
        if ((K) <= 32) return function<T, 1, delta_rule> arguments;                                \
        if ((K) <= 64) return function<T, 2, delta_rule> arguments;                                \
        if ((K) <= 128) return function<T, 4, delta_rule> arguments;                               \
        if ((K) <= 256) return function<T, 8, delta_rule> arguments;                               \
        if ((K) <= MN_MATRIX_MAX_K) return function<T, 32, delta_rule> arguments;                  \
        return cudaErrorNotSupported;                                                              \
    } while (0)

template <bool DELTA_RULE>
static int mn_matrix_forward(const mn_matrix_params &p, void *stream) {
    const cudaStream_t on = (cudaStream_t)stream;
    if (p.call.dtype == MN_BF16) {
        MN_MATRIX_DISPATCH_K(mn_matrix_forward_of, mn_bf16, DELTA_RULE, p.call.K, (p, on));
    }
    MN_MATRIX_DISPATCH_K(mn_matrix_forward_of, float, DELTA_RULE, p.call.K, (p, on));
}

template <bool DELTA_RULE>
static int mn_matrix_backward(const mn_matrix_params &p, void *shared, void *stream) {
    const cudaStream_t on = (cudaStream_t)stream;
    float *smem = (float *)shared;
    if (p.call.dtype == MN_BF16) {
        MN_MATRIX_DISPATCH_K(mn_matrix_backward_of, mn_bf16, DELTA_RULE, p.call.K, (p, smem, on));
    }
    MN_MATRIX_DISPATCH_K(mn_matrix_backward_of, float, DELTA_RULE, p.call.K, (p, smem, on));
}

/* One token with the state in place; false where matrix_step.cuh does not take it. */
template <typename T>
static bool mn_matrix_step_params(mn_step_params *to, const mn_matrix_params &p) {
    *to = {};
    to->K = (int)p.call.K, to->V = (int)p.call.V, to->H = (int)p.call.H, to->n_rows = 1;
    to->share = p.call.J > 0 ? (int)(p.call.H / p.call.J) : 1;
    to->by_channel = p.decay == MN_DECAY_CHANNEL, to->scale = p.scale;
    return mn_step_fits(p.call) && mn_step_vec_aligned<T>(p.v) && mn_step_vec_aligned<T>(p.o) &&
           mn_step_vec_aligned<float>(p.state0) && mn_step_vec_aligned<float>(p.state) &&
           mn_step_view_of(&to->state0, p.state0) && mn_step_view_of(&to->state, p.state) &&
           mn_step_view_of(&to->q, p.q) && mn_step_view_of(&to->e, p.e) &&
           mn_step_view_of(&to->w, p.w) && mn_step_view_of(&to->v, p.v) &&
           mn_step_view_of(&to->beta, p.beta) && mn_step_view_of(&to->g, p.g) &&
           mn_step_view_of(&to->o, p.o);
}

template <typename T, bool DELTA_RULE>
static int mn_matrix_step_in(const mn_matrix_params &p, cudaStream_t stream) {
    constexpr int rule = DELTA_RULE ? MN_STEP_DELTA : MN_STEP_ADD;
    mn_step_params step;
    if (!mn_matrix_step_params<T>(&step, p)) return mn_matrix_forward<DELTA_RULE>(p, stream);
    return mn_step_launch<T, rule, 1>(step, p.call.B, stream);
}

template <bool DELTA_RULE>
static int mn_matrix_step(const mn_matrix_params &p, void *stream) {
    const cudaStream_t on = (cudaStream_t)stream;
    return p.call.dtype == MN_BF16 ? mn_matrix_step_in<mn_bf16, DELTA_RULE>(p, on)
                                   : mn_matrix_step_in<float, DELTA_RULE>(p, on);
}

}    // namespace mneme::recurrent

#endif
