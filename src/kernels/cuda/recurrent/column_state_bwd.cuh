/* column_state_bwd.cuh - the recurrences of column_state.cuh backward, threads and cells as in
 * column_state.cuh.
 *
 * The state in front of every 64 tokens is kept on a first way through, inside such a span that of
 * every 8 tokens, and of a few tokens at a time each one's, in shared memory; a thread reads back
 * only what it wrote. Sums over columns, dq and dk, go through the lanes of a warp in halves, then
 * over warps, and leave parts, one for each tile of columns. */
#ifndef MN_KERNELS_CUDA_RECURRENT_COLUMN_STATE_BWD_CUH
#define MN_KERNELS_CUDA_RECURRENT_COLUMN_STATE_BWD_CUH

#include "kernels/cuda/recurrent/column_state.cuh"
#include "kernels/cuda/prim/device_props.h"

namespace mneme::recurrent {

enum { MN_COLUMNS_SEGMENT = 64 };

template <int ROWS>
struct mn_column_bwd_smem {
    using sizes = mn_column_sizes<ROWS>;
    static constexpr int cells = ROWS * sizes::columns * sizes::threads;    // of a state
    static constexpr int row_groups = MN_COLUMNS_SEGMENT / sizes::group;
    static constexpr int max_saved_states = 4;                                    // tokens
    mn_column_smem<ROWS> in;
    alignas(16) float cot[sizes::group][sizes::tile];
    alignas(16) float written[max_saved_states][sizes::tile];    // v, or what k'S leaves of it
    alignas(16) float sums[2][sizes::warps][sizes::rows];    // dq and dk of a token
    float to_f[sizes::warps];

    /* The states in front of some tokens lie behind the rest. */
    __device__ float *before(int token) { return (float *)(this + 1) + token * cells; }
};

/* Cotangents of the tokens at t to shared memory. */
template <typename T, int ROWS>
__device__ inline void mn_column_load_cot(mn_column_bwd_smem<ROWS> &smem, const mn_column_params &p,
                                        const mn_column_coord &at, int64_t t, int count) {
    using sizes = mn_column_sizes<ROWS>;
#pragma unroll
    for (int n = 0; n < sizes::column_items; n++) {
        const int item = threadIdx.x + n * sizes::threads, token = item / sizes::tile;
        const int64_t j = at.tile * sizes::tile + item % sizes::tile;
        float x = 0.0f;
        if (token < count && j < p.columns && p.cot) {
            x = p.cot[mn_columns_row(p, at, t + token) * p.columns + j];
        } else if (token < count && j < p.columns) {
            x = mn_get(mn_row<T>(p.cot_o, at.span.b, at.span.t0 + t + token, at.h), j);
        }
        smem.cot[0][item] = x;
    }
}

/* Sums over the eight lanes that have the same rows, to the warp's sums of all rows: each lane ends
 * with an eighth of the rows that they share. */
template <int ROWS>
__device__ inline void mn_column_reduce_lanes(float *sums, float (&x)[ROWS]) {
    mn_lanes_reduce_scatter<ROWS / 2, 16>(x);
    mn_lanes_reduce_scatter<ROWS / 4, 8>(x);
    mn_lanes_reduce_scatter<ROWS / 8, 4>(x);
    const int first = threadIdx.x % 32 / 16 * (ROWS / 2) + threadIdx.x % 16 / 8 * (ROWS / 4) +
                      threadIdx.x % 8 / 4 * (ROWS / 8);
#pragma unroll
    for (int i = 0; i < ROWS / 8; i++) {
        const int r = first + i;
        sums[4 * (threadIdx.x % 4 + 4 * (r / 4)) + r % 4] = x[i];
    }
}

/* What a token needs of this thread's columns. */
template <int ROWS, mn_column_kind KIND>
struct mn_column_token {
    static constexpr int C = mn_column_sizes<ROWS>::columns;
    float w[C], u[C], written[C], cot[C], dot[C], y[C];

    __device__ mn_column_token(const mn_column_bwd_smem<ROWS> &smem, int token,
                               int n_saved_states) {
#pragma unroll
        for (int c = 0; c < C; c++) {
            const int j = mn_column_cells<ROWS>::column(c);
            w[c] = KIND == MN_COLUMNS_SUM ? smem.in.token_weight[token] : smem.in.w[token][j];
            u[c] = KIND == MN_COLUMNS_SUM ? smem.in.f[token] : smem.in.u[token][j];
            written[c] = smem.written[token % n_saved_states][j];
            cot[c] = smem.cot[token][j];
        }
    }
};

/* D takes what the token reads; dq of this warp; D'k and the gradients y of the weights. */
template <int ROWS, mn_column_kind KIND>
__device__ inline void mn_column_output_bwd(mn_column_cells<ROWS> &D, mn_column_token<ROWS,
                                            KIND> &of,
                                         mn_column_bwd_smem<ROWS> &smem, const float *before,
                                         float scale, int token) {
    using cells = mn_column_cells<ROWS>;
    constexpr int C = cells::C, threads = mn_column_sizes<ROWS>::threads;
    float to_q[ROWS], dot[C][4] = {}, y[C][4] = {};
#pragma unroll
    for (int m = 0; m < ROWS / 4; m++) {
        const int first = 4 * (threadIdx.x % 4 + 4 * m);
        float k[4], q[4], x[4];
        mn_load<4>(k, smem.in.k[token], first);
        mn_load<4>(q, smem.in.q[token], first);
        if (KIND == MN_COLUMNS_CELL) mn_load<4>(x, smem.in.x[token], first);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int r = 4 * m + i;
            float old[C], sum = 0.0f;
            mn_load<C>(old, before, (r * threads + (int)threadIdx.x) * C);
#pragma unroll
            for (int c = 0; c < C; c++) {
                float now = old[c];
                if (KIND == MN_COLUMNS_SUM) now *= of.u[c];
                if (KIND == MN_COLUMNS_CELL) now *= fmaf(of.w[c], x[i], of.u[c]);
                now = fmaf(k[i], of.w[c] * of.written[c], now);
                sum = fmaf(now, of.cot[c], sum);
                const float d = fmaf(scale * q[i], of.cot[c], D.at[r][c]), dk = d * k[i];
                D.at[r][c] = d;
                dot[c][i] += dk;
                if (KIND == MN_COLUMNS_CELL) {
                    y[c][i] = fmaf(dk, fmaf(-k[i], old[c], of.written[c]), y[c][i]);
                }
            }
            to_q[r] = scale * sum;
        }
    }
    mn_column_reduce_lanes<ROWS>(smem.sums[0][threadIdx.x / 32], to_q);
#pragma unroll
    for (int c = 0; c < C; c++) {
        of.dot[c] = cells::reduce_lanes((dot[c][0] + dot[c][1]) + (dot[c][2] + dot[c][3]));
        of.y[c] = of.dot[c] * of.written[c];
        if (KIND != MN_COLUMNS_CELL) continue;
        of.y[c] = cells::reduce_lanes((y[c][0] + y[c][1]) + (y[c][2] + y[c][3]));
    }
}

/* dk of this warp; D becomes the adjoint of the state in front. Returns a thread's part of df. */
template <int ROWS, mn_column_kind KIND>
__device__ inline float mn_column_update_bwd(mn_column_cells<ROWS> &D,
                                           const mn_column_token<ROWS, KIND> &of,
                                           mn_column_bwd_smem<ROWS> &smem, const float *before,
                                           int token) {
    constexpr int C = mn_column_cells<ROWS>::C, threads = mn_column_sizes<ROWS>::threads;
    float to_k[ROWS], to_f = 0.0f;
#pragma unroll
    for (int m = 0; m < ROWS / 4; m++) {
        const int first = 4 * (threadIdx.x % 4 + 4 * m);
        float k[4], x[4];
        mn_load<4>(k, smem.in.k[token], first);
        if (KIND == MN_COLUMNS_CELL) mn_load<4>(x, smem.in.x[token], first);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int r = 4 * m + i;
            float old[C], sum = 0.0f;
            mn_load<C>(old, before, (r * threads + (int)threadIdx.x) * C);
#pragma unroll
            for (int c = 0; c < C; c++) {
                float &d = D.at[r][c];
                const float v = of.w[c] * of.written[c];
                if (KIND == MN_COLUMNS_SUM) {
                    sum = fmaf(v, d, sum);
                    d *= of.u[c];
                    to_f = fmaf(d, old[c], to_f);
                } else if (KIND == MN_COLUMNS_CELL) {
                    sum = fmaf(of.w[c] * d, fmaf(-2.0f * k[i], old[c], of.written[c]), sum);
                    d *= fmaf(of.w[c], x[i], of.u[c]);
                } else {
                    const float write = of.w[c] * of.dot[c];
                    sum = fmaf(v, d, sum);
                    sum = fmaf(-write, old[c], sum);
                    d = fmaf(-k[i], write, d);
                }
            }
            to_k[r] = sum;
        }
    }
    mn_column_reduce_lanes<ROWS>(smem.sums[1][threadIdx.x / 32], to_k);
    return to_f;
}

/* Adds the warps' sums of a token. All threads call, between barriers. */
template <int ROWS, mn_column_kind KIND>
__device__ inline void mn_column_reduce_warps(const mn_column_bwd_smem<ROWS> &smem,
                                              const mn_column_params &p,
                                         const mn_column_coord &at, int64_t t) {
    using sizes = mn_column_sizes<ROWS>;
    const int64_t rows = p.call.B * p.call.T * p.call.H, row = mn_columns_row(p, at, t);
    float *partial = p.partials + (at.tile * rows + row) * 2 * p.call.K;
    for (int item = threadIdx.x; item < 2 * sizes::rows; item += sizes::threads) {
        const int which = item / sizes::rows, i = item % sizes::rows;
        float sum = 0.0f;
#pragma unroll
        for (int warp = 0; warp < sizes::warps; warp++) sum += smem.sums[which][warp][i];
        if (i < p.call.K) partial[which * p.call.K + i] = sum;
    }
    if (KIND == MN_COLUMNS_SUM && threadIdx.x == 0) {
        float sum = 0.0f;
        for (int warp = 0; warp < sizes::warps; warp++) sum += smem.to_f[warp];
        p.f_partials[at.tile * rows + row] = sum;
    }
    __syncthreads();
}

/* Gradients of one token, whose number in the group is `token`. All threads call. */
template <typename T, int ROWS, mn_column_kind KIND>
__device__ void mn_column_token_bwd(mn_column_cells<ROWS> &D, mn_column_bwd_smem<ROWS> &smem,
                                   const mn_column_params &p, const mn_column_coord &at, int64_t t,
                                   int token) {
    constexpr int C = mn_column_cells<ROWS>::C;
    const float *before = smem.before(token % p.n_saved_states);
    mn_column_token<ROWS, KIND> of(smem, token, p.n_saved_states);
    mn_column_output_bwd<ROWS, KIND>(D, of, smem, before, p.scale, token);
    const int64_t row = mn_columns_row(p, at, t);
    T *dv = mn_row<T>(p.dv, at.span.b, at.span.t0 + t, at.h);
#pragma unroll
    for (int c = 0; c < C; c++) {
        const int64_t j = at.tile * mn_column_sizes<ROWS>::tile + mn_column_cells<ROWS>::column(c);
        if ((int)threadIdx.x % 4 != c || j >= p.columns) continue;
        p.y[row * p.columns + j] = of.y[c];
        if (dv && j < p.call.V) mn_put(dv + j, of.w[c] * of.dot[c]);
    }
    float to_f = mn_column_update_bwd<ROWS, KIND>(D, of, smem, before, token);
    if (KIND == MN_COLUMNS_SUM) {
        to_f = mn_warp_sum(to_f);
        if (threadIdx.x % 32 == 0) smem.to_f[threadIdx.x / 32] = to_f;
    }
    __syncthreads();
    mn_column_reduce_warps<ROWS, KIND>(smem, p, at, t);
}

/* Walks tokens [t0, t1) from the state at `front`, or the first one where it is NULL, and keeps the
 * state in front of every `every` of them. */
template <typename T, int ROWS, mn_column_kind KIND>
__device__ void mn_column_recompute(const float *front, float *kept, int64_t stride, int every,
                               mn_column_bwd_smem<ROWS> &smem, const mn_column_params &p,
                               const mn_column_coord &at, int64_t t0, int64_t t1) {
    using sizes = mn_column_sizes<ROWS>;
    mn_column_cells<ROWS> S;
    mn_column_prefetch<T, ROWS> ahead;
    if (front) S.recall(front);
    else S.load(p, at, p.state0, p.ones0);
    if (t0 < t1) ahead.template fetch<KIND>(p, at, t0);
    for (int64_t t = t0; t < t1; t += sizes::group) {
        const int count = (int)min((int64_t)sizes::group, t1 - t);
        if ((t - t0) % every == 0) S.keep(kept + (t - t0) / every * stride);
        __syncthreads();
        ahead.template put<KIND>(smem.in);
        __syncthreads();
        if (t + sizes::group < t1) ahead.template fetch<KIND>(p, at, t + sizes::group);
#pragma unroll 1
        for (int token = 0; token < count; token++) {
            float o[sizes::columns], written[sizes::columns];
            S.template advance<KIND, false>(o, written, smem.in, token);
        }
    }
}

/* The group of tokens at t to shared memory. All threads call. */
template <typename T, int ROWS, mn_column_kind KIND>
__device__ void mn_column_load_group(mn_column_bwd_smem<ROWS> &smem, const mn_column_params &p,
                              const mn_column_coord &at, int64_t t, int count) {
    mn_column_prefetch<T, ROWS> tokens;
    tokens.template fetch<KIND>(p, at, t);
    __syncthreads();
    tokens.template put<KIND>(smem.in);
    mn_column_load_cot<T, ROWS>(smem, p, at, t, count);
    __syncthreads();
}

/* Gradients of the group of `count` tokens at t, from the state in front of it and D behind it. */
template <typename T, int ROWS, mn_column_kind KIND>
__device__ void mn_column_group_bwd(mn_column_cells<ROWS> &D, const float *front,
                                   mn_column_bwd_smem<ROWS> &smem, const mn_column_params &p,
                                   const mn_column_coord &at, int64_t t, int count) {
    using cells = mn_column_cells<ROWS>;
    mn_column_load_group<T, ROWS, KIND>(smem, p, at, t, count);
    for (int first = (count - 1) / p.n_saved_states * p.n_saved_states; first >= 0;
         first -= p.n_saved_states) {
        const int last = min(first + p.n_saved_states, count);
        cells S;
        S.recall(front);
#pragma unroll 1
        for (int token = 0; token < last; token++) {
            float o[cells::C], written[cells::C];
            if (token >= first) S.keep(smem.before(token - first));
            S.template advance<KIND, false>(o, written, smem.in, token);
            if (token < first || threadIdx.x % 4 != 0) continue;
#pragma unroll
            for (int c = 0; c < cells::C; c++) {
                smem.written[token - first][cells::column(c)] = written[c];
            }
        }
        __syncwarp();
#pragma unroll 1
        for (int token = last - 1; token >= first; token--) {
            mn_column_token_bwd<T, ROWS, KIND>(D, smem, p, at, t + token, token);
        }
        __syncwarp();
    }
}

/* Where the spans of this block's memory are kept, `stride` numbers apart. */
__device__ inline float *mn_columns_segments(const mn_column_params &p, const mn_column_coord &at,
                                          int64_t tiles, int64_t stride, int64_t cells) {
    const int64_t slot0 = p.call.cu_seqlens
                              ? at.span.t0 / MN_COLUMNS_SEGMENT + at.n
                              : at.n * ((p.call.T + MN_COLUMNS_SEGMENT - 1) / MN_COLUMNS_SEGMENT);
    return p.spans + slot0 * stride + (at.h * tiles + at.tile) * cells;
}

template <typename T, int ROWS, mn_column_kind KIND>
__global__ void __launch_bounds__(mn_column_sizes<ROWS>::threads)
column_state_scan_bwd_kernel(const __grid_constant__ mn_column_params p, int64_t tiles) {
    using sizes = mn_column_sizes<ROWS>;
    using smem_type = mn_column_bwd_smem<ROWS>;
    extern __shared__ __align__(128) unsigned char bytes[];
    smem_type &smem = *(smem_type *)bytes;
    const mn_column_coord at = mn_column_block_coord(p, tiles);
    const int64_t length = at.span.length, stride = p.call.H * tiles * smem_type::cells;
    float *spans = mn_columns_segments(p, at, tiles, stride, smem_type::cells);
    float *row_groups = p.tokens + at.block * smem_type::row_groups * smem_type::cells;
    mn_column_cells<ROWS> D;
    mn_column_recompute<T, ROWS, KIND>(NULL, spans, stride, MN_COLUMNS_SEGMENT, smem, p, at, 0,
                                       length);
    D.load(p, at, p.cot_state, p.cot_ones);
    for (int64_t i = (length + MN_COLUMNS_SEGMENT - 1) / MN_COLUMNS_SEGMENT - 1; i >= 0; i--) {
        const int64_t t0 = i * MN_COLUMNS_SEGMENT, t1 = min(t0 + MN_COLUMNS_SEGMENT, length);
        mn_column_recompute<T, ROWS, KIND>(spans + i * stride, row_groups, smem_type::cells,
                                           sizes::group,
                                      smem, p, at, t0, t1);
        for (int64_t g = (t1 - t0 - 1) / sizes::group; g >= 0; g--) {
            const int64_t t = t0 + g * sizes::group;
            const int count = (int)min((int64_t)sizes::group, t1 - t);
            mn_column_group_bwd<T, ROWS, KIND>(D, row_groups + g * smem_type::cells, smem, p, at, t,
                                              count);
        }
    }
    D.store(p, at, p.dstate0, p.dones0);
}

/* ---- launches -------------------------------------------------------------------------------- */

inline int64_t mn_columns_tiles(int64_t columns) {
    return mn_ceil_div(columns, MN_COLUMNS_TILE);
}

/* Floats of the work space of a way back: spans, tokens, parts and f_partials. */
struct mn_column_workspace {
    size_t spans, tokens, partials, f_partials;
};

inline bool mn_column_workspace_sizes(mn_column_workspace *to, const mn_call &c, int64_t columns) {
    const int64_t rows = mn_columns_rows(c);
    const size_t tiles = (size_t)mn_columns_tiles(columns);
    const size_t cells = (size_t)(rows * MN_COLUMNS_TILE);
    size_t heads;
    bool ok = mn_mul_size(&heads, tiles, (size_t)c.H);
    ok = ok && mn_mul_size(&to->spans, heads, (size_t)mn_tile_slots(c, MN_COLUMNS_SEGMENT)) &&
         mn_mul_size(&to->spans, to->spans, cells);
    ok = ok && mn_mul_size(&to->tokens, heads, (size_t)mn_n_spans(c)) &&
         mn_mul_size(&to->tokens, to->tokens, cells * mn_column_bwd_smem<32>::row_groups);
    ok = ok && mn_mul_size(&to->f_partials, heads, (size_t)c.B) &&
         mn_mul_size(&to->f_partials, to->f_partials, (size_t)c.T);
    return ok && mn_mul_size(&to->partials, to->f_partials, 2 * (size_t)c.K);
}

/* As many tokens' states as shared memory has room for, up to four. */
template <typename T, int ROWS, mn_column_kind KIND>
static int mn_column_launch_bwd(mn_column_params p, cudaStream_t on) {
    using smem = mn_column_bwd_smem<ROWS>;
    const int64_t tiles = mn_columns_tiles(p.columns);
    const int64_t blocks = tiles * p.call.H * mn_n_spans(p.call);
    const int state = smem::cells * (int)sizeof(float);
    if (blocks == 0) return cudaSuccess;
    if (blocks > INT32_MAX) return cudaErrorNotSupported;
    const int limit = mn_device_props_current().shared_bytes;
    p.n_saved_states = mn_min((limit - (int)sizeof(smem)) / state, smem::max_saved_states);
    if (p.n_saved_states < 1) return cudaErrorNotSupported;
    return mn_launch_smem(column_state_scan_bwd_kernel<T, ROWS, KIND>, dim3((unsigned)blocks),
                               mn_column_sizes<ROWS>::threads,
                               sizeof(smem) + (size_t)(p.n_saved_states * state), on, p, tiles);
}

template <typename T, mn_column_kind KIND>
static int mn_columns_backward(mn_column_params p, cudaStream_t on) {
    p.vec_aligned = mn_columns_vec_aligned<T>(p, mn_columns_rows(p.call) / 32);
    if (p.call.K <= 32) return mn_column_launch_bwd<T, 8, KIND>(p, on);
    if (p.call.K <= 64) return mn_column_launch_bwd<T, 16, KIND>(p, on);
    if (p.call.K <= 128) return mn_column_launch_bwd<T, 32, KIND>(p, on);
    if (p.call.K <= MN_COLUMNS_MAX_K) return mn_column_launch_bwd<T, 64, KIND>(p, on);
    return cudaErrorNotSupported;
}

}    // namespace mneme::recurrent

#endif
