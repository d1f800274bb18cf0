/* longhorn.cu - both forms of Longhorn (see ref/longhorn_diag.c and ref/longhorn_column.c):
 * longhorn_column in bf16 over chunks (longhorn_column_chunk.cu) where memories are neither
 * narrow nor wide, except for decode steps; longhorn_diag in bf16, where keys have at most 128
 * channels, by longhorn_diag_fwd_recurrent.cu and longhorn_diag_bwd_recurrent.cu; all else by the
 * recurrences of column_state.cuh, longhorn_diag back, for such keys in float32, by
 * longhorn_diag_bwd below, and single tokens with the state in place by longhorn_step.cuh.
 * Backward, a kernel after these has one token and head for each warp:
 *
 *   u_j = 1 / (1 + beta_j |k|^2)     w_j = beta_j u_j
 *   dbeta_j = y_j u_j^2              dk_i -= 2 k_i sum_j w_j^2 y_j */
#include <type_traits>

#include "kernels/cuda/prim/pdl.cuh"
#include "kernels/cuda/recurrent/column_state.cuh"
#include "kernels/cuda/recurrent/column_state_bwd.cuh"
#include "kernels/cuda/longhorn/longhorn_column_chunk.h"
#include "kernels/cuda/longhorn/longhorn_diag_bwd.h"
#include "kernels/cuda/longhorn/longhorn_diag_fwd.h"
#include "kernels/cuda/longhorn/longhorn_step.cuh"

namespace mneme::longhorn {

using namespace recurrent;

/* gradients of longhorn_diag, for keys of at most 128 channels (see column_state.cuh, CELL). With
 * c = u + w x, S the state in front of a token and D the adjoint of the one behind it,
 *
 *   D += scale q do'      dq = scale (state behind) do      y_j = sum_i D k (v - k S)
 *   dv_j = w sum_i D k    dk_i = sum_j w D (v - 2 k S)      D <- c D
 *
 * Nothing of a cell waits for another one, so that threads have blocks of cells as forward: sums
 * over columns are mostly within a thread then, and what is read of a token serves four columns.
 *
 * The state in front of every 64 tokens is kept on a first way through, inside such a span that of
 * every 8 tokens, and of four tokens at a time each one's, in shared memory; the state behind a
 * token is the one in front of the next, which has just been used. */

enum { MN_DIAG_MAX_K = 128, MN_DIAG_WARPS = MN_COLUMNS_TILE / 8 };
enum { MN_DIAG_THREADS = 32 * MN_DIAG_WARPS, MN_DIAG_STASH = 4 };    // tokens

template <int R>
struct mn_diag_smem {
    static constexpr int cells = 4 * R * MN_DIAG_THREADS;    // of a state
    mn_column_bwd_smem<4 * R> tokens;                         // of which `in` and `cot` are used
    alignas(16) float sums[MN_DIAG_STASH][2][MN_DIAG_WARPS][16 * R];    // dq and dk
    alignas(16) float before[MN_DIAG_STASH][cells];
};

/* Walks tokens [t0, t1) with S and keeps the state in front of every `every` of them. */
template <typename T, int R>
__device__ static void mn_diag_recompute(mn_column_cells4<4 * R> &S, float *kept, int64_t stride,
                                      int every, mn_diag_smem<R> &smem, const mn_column_params &p,
                                      const mn_column_coord &at, int64_t t0, int64_t t1) {
    constexpr int group = mn_column_sizes<4 * R>::group;
    mn_column_prefetch<T, 4 * R> ahead;
    if (t0 < t1) ahead.template fetch<MN_COLUMNS_CELL>(p, at, t0);
#pragma unroll 1
    for (int64_t t = t0; t < t1; t += group) {
        const int count = (int)min((int64_t)group, t1 - t);
        if ((t - t0) % every == 0) S.keep(kept + (t - t0) / every * stride);
        __syncthreads();
        ahead.template put<MN_COLUMNS_CELL>(smem.tokens.in);
        __syncthreads();
        if (t + group < t1) ahead.template fetch<MN_COLUMNS_CELL>(p, at, t + group);
#pragma unroll 1
        for (int token = 0; token < count; token++) {
            float none[4];
            S.template advance<MN_COLUMNS_CELL, false>(none, smem.tokens.in, token);
        }
    }
}

/* Sums over this warp's columns, to its row of shared memory. */
template <int R>
__device__ inline void mn_diag_store_sums(float *sums, float (&x)[R]) {
    typedef mn_column_cells4<4 * R> cells;
    mn_lanes_reduce_scatter<R / 2, 16>(x);
    const int half = threadIdx.x % 32 / 16;
    if (R == 8) {
        mn_vec<float, 4> pack = { { x[0], x[1], x[2], x[3] } };
        *(mn_vec<float, 4> *)(sums + cells::first_row(half)) = pack;
    } else {
        *(float2 *)(sums + cells::first_row(0) + 2 * half) = make_float2(x[0], x[1]);
    }
}

/* Gradients of token number `token` of the group; S is the state behind it and becomes the one in
 * front. */
template <typename T, int R>
__device__ __forceinline__ void mn_diag_token_bwd(mn_column_cells4<4 * R> &D,
                                                   mn_column_cells4<4 * R> &S,
                                                       mn_diag_smem<R> &smem,
                                                   const mn_column_params &p,
                                                       const mn_column_coord &at,
                                                   int64_t t, int token) {
    typedef mn_column_cells4<4 * R> cells;
    const mn_column_smem<4 * R> &in = smem.tokens.in;
    const float *before = smem.before[token % MN_DIAG_STASH];
    float w[4], u[4], v[4], cot[4], to_q[R], to_k[R], sums[8] = {};    // D k, then y
    mn_load<4>(w, in.w[token], cells::first_column());
    mn_load<4>(u, in.u[token], cells::first_column());
    mn_load<4>(v, in.v[token], cells::first_column());
    mn_load<4>(cot, smem.tokens.cot[token], cells::first_column());
#pragma unroll
    for (int m = 0; m < R / 4; m++) {
        float k[4], q[4], x[4];
        mn_load<4>(k, in.k[token], cells::first_row(m));
        mn_load<4>(q, in.q[token], cells::first_row(m));
        mn_load<4>(x, in.x[token], cells::first_row(m));
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int r = 4 * m + i;
            const float query = p.scale * q[i], twice = -2.0f * k[i];
            float old[4], q_sum = 0.0f, k_sum = 0.0f;
            mn_load<4>(old, before, (r * MN_DIAG_THREADS + (int)threadIdx.x) * 4);
#pragma unroll
            for (int c = 0; c < 4; c++) {
                const float d = fmaf(query, cot[c], D.at[r][c]), dk = d * k[i];
                q_sum = fmaf(S.at[r][c], cot[c], q_sum);
                k_sum = fmaf(w[c] * d, fmaf(twice, old[c], v[c]), k_sum);
                sums[c] += dk;
                sums[4 + c] = fmaf(dk, fmaf(-k[i], old[c], v[c]), sums[4 + c]);
                D.at[r][c] = d * fmaf(w[c], x[i], u[c]);
                S.at[r][c] = old[c];
            }
            to_q[r] = p.scale * q_sum, to_k[r] = k_sum;
        }
    }
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    mn_diag_store_sums<R>(smem.sums[token % MN_DIAG_STASH][0][warp], to_q);
    mn_diag_store_sums<R>(smem.sums[token % MN_DIAG_STASH][1][warp], to_k);
    mn_lanes_reduce_scatter<4, 8>(sums);    // lanes 0 to 7 of 16 have D k, others y
    mn_lanes_reduce_scatter<2, 4>(sums);
    mn_lanes_reduce_scatter<1, 2>(sums);
    const float sum = sums[0] + __shfl_xor_sync(0xffffffffu, sums[0], 1);
    const int column = cells::first_column() + lane % 8 / 2;
    const int64_t j = at.tile * MN_COLUMNS_TILE + column;
    if (lane % 2 || j >= p.columns) return;
    if (lane & 8) {
        p.y[mn_columns_row(p, at, t) * p.columns + j] = sum;
    } else {
        T *dv = mn_row<T>(p.dv, at.span.b, at.span.t0 + t, at.h);
        if (dv) mn_put(dv + j, in.w[token][column] * sum);
    }
}

/* Adds the warps' sums of `count` tokens, of which the first is token t. All threads call, between
 * barriers. */
template <int R>
__device__ static void mn_diag_reduce_warps(const mn_diag_smem<R> &smem, const mn_column_params &p,
                                         const mn_column_coord &at, int64_t t, int count) {
    constexpr int rows = 16 * R;
    const int64_t all = p.call.B * p.call.T * p.call.H;
    for (int item = threadIdx.x; item < count * 2 * rows; item += MN_DIAG_THREADS) {
        const int token = item / (2 * rows), which = item / rows % 2, i = item % rows;
        float *part = p.partials + (at.tile * all + mn_columns_row(p, at, t + token)) * 2
            * p.call.K;
        float sum = 0.0f;
#pragma unroll
        for (int warp = 0; warp < MN_DIAG_WARPS; warp++) sum += smem.sums[token][which][warp][i];
        if (i < p.call.K) part[which * p.call.K + i] = sum;
    }
}

/* A group of tokens and their cotangents on their way: a warp brings a token. */
template <typename T, int R>
struct mn_diag_prefetch {
    using sizes = mn_column_sizes<4 * R>;
    mn_column_prefetch<T, 4 * R> tokens;
    mn_column_raw<sizes::column_items, T> cot;

    __device__ void fetch(const mn_column_params &p, const mn_column_coord &at, int64_t t,
                          int64_t end) {
        const int64_t when = t + sizes::token(), j = at.tile * sizes::tile + sizes::column();
        const T *row = mn_row<T>(p.cot_o, at.span.b, at.span.t0 + when, at.h);
        tokens.template fetch<MN_COLUMNS_CELL>(p, at, t);
        cot.fetch(row, j, row && when < end ? p.call.V : 0, p.vec_aligned);
    }

    /* All threads call, between barriers. */
    __device__ void put(mn_diag_smem<R> &smem) const {
        float x[sizes::column_items];
#pragma unroll
        for (int n = 0; n < sizes::column_items; n++) x[n] = cot.at(n);
        tokens.template put<MN_COLUMNS_CELL>(smem.tokens.in);
        mn_store<sizes::column_items>(smem.tokens.cot[sizes::token()], sizes::column(), x);
    }
};

/* Gradients of the group of `count` tokens at t, which are in shared memory, from the state in
 * front of it and D behind it. */
template <typename T, int R>
__device__ static void mn_diag_group_bwd(mn_column_cells4<4 * R> &D, const float *front,
                                          mn_diag_smem<R> &smem, const mn_column_params &p,
                                          const mn_column_coord &at, int64_t t, int count) {
#pragma unroll 1
    for (int first = (count - 1) / MN_DIAG_STASH * MN_DIAG_STASH; first >= 0;
         first -= MN_DIAG_STASH) {
        const int last = min(first + MN_DIAG_STASH, count);
        mn_column_cells4<4 * R> S;
        S.recall(front);
#pragma unroll 1
        for (int token = 0; token < last; token++) {
            float none[4];
            if (token >= first) S.keep(smem.before[token - first]);
            S.template advance<MN_COLUMNS_CELL, false>(none, smem.tokens.in, token);
        }
#pragma unroll 1
        for (int token = last - 1; token >= first; token--) {
            mn_diag_token_bwd<T, R>(D, S, smem, p, at, t + token, token);
        }
        __syncthreads();
        mn_diag_reduce_warps<R>(smem, p, at, t + first, last - first);
        __syncthreads();
    }
}

template <typename T, int R>
__global__ void __launch_bounds__(MN_DIAG_THREADS, 1)
longhorn_diag_bwd(const __grid_constant__ mn_column_params p, int64_t tiles) {
    constexpr int group = mn_column_sizes<4 * R>::group, splits = MN_COLUMNS_SEGMENT / group;
    typedef mn_diag_smem<R> smem_of;
    extern __shared__ __align__(128) unsigned char bytes[];
    smem_of &smem = *(smem_of *)bytes;
    const mn_column_coord at = mn_column_block_coord(p, tiles);
    const int64_t length = at.span.length, stride = p.call.H * tiles * smem_of::cells;
    float *spans = mn_columns_segments(p, at, tiles, stride, smem_of::cells);
    float *fronts = p.tokens + at.block * splits * smem_of::cells;
    mn_column_cells4<4 * R> D, S;
    S.load(p, at, p.state0, NULL);
    mn_diag_recompute<T, R>(S, spans, stride, MN_COLUMNS_SEGMENT, smem, p, at, 0, length);
    D.load(p, at, p.cot_state, NULL);
#pragma unroll 1
    for (int64_t i = (length + MN_COLUMNS_SEGMENT - 1) / MN_COLUMNS_SEGMENT - 1; i >= 0; i--) {
        const int64_t t0 = i * MN_COLUMNS_SEGMENT, t1 = min(t0 + MN_COLUMNS_SEGMENT, length);
        S.recall(spans + i * stride);
        mn_diag_recompute<T, R>(S, fronts, smem_of::cells, group, smem, p, at, t0, t1);
        mn_diag_prefetch<T, R> ahead;
        const int64_t groups_here = (t1 - t0 + group - 1) / group;
        ahead.fetch(p, at, t0 + (groups_here - 1) * group, length);
#pragma unroll 1
        for (int64_t g = groups_here - 1; g >= 0; g--) {
            const int64_t t = t0 + g * group;
            __syncthreads();
            ahead.put(smem);
            __syncthreads();
            if (g > 0) ahead.fetch(p, at, t - group, length);
            mn_diag_group_bwd<T, R>(D, fronts + g * smem_of::cells, smem, p, at, t,
                                     (int)min((int64_t)group, t1 - t));
        }
    }
    D.store(p, at, p.dstate0, NULL);
}

/* Work space as of column_state_bwd.cuh, for at least 64 rows; by products of tiles there are no
 * states of a span's own. */
inline bool mn_diag_workspace_sizes(mn_column_workspace *to, mn_call c) {
    const bool by_products = diag::supported(c);
    size_t saved = 0;
    if (by_products && !diag::saved_size(&saved, c)) return false;
    c.K = mn_max(c.K, 64);
    if (!mn_column_workspace_sizes(to, c, c.V)) return false;
    if (by_products) to->spans = saved, to->tokens = 0;
    return true;
}

/* Whether a block's shared memory suffices on this device. */
inline bool mn_diag_supported(const mn_call &c) {
    const int limit = mn_device_props_current().shared_bytes;
    return c.K <= 64 ? (int)sizeof(mn_diag_smem<4>) <= limit
                     : c.K <= MN_DIAG_MAX_K && (int)sizeof(mn_diag_smem<8>) <= limit;
}

template <typename T, int R>
static int mn_diag_launch(const mn_column_params &p, cudaStream_t on) {
    const int64_t tiles = mn_columns_tiles(p.columns);
    const int64_t blocks = tiles * p.call.H * mn_n_spans(p.call);
    if (blocks == 0) return cudaSuccess;
    if (blocks > INT32_MAX) return cudaErrorNotSupported;
    return mn_launch_smem(longhorn_diag_bwd<T, R>, dim3((unsigned)blocks),
                               MN_DIAG_THREADS, sizeof(mn_diag_smem<R>), on, p, tiles);
}

template <typename T>
static int mn_diag_backward(mn_column_params p, const diag::whole_grads &whole, cudaStream_t on) {
    if (diag::supported(p.call)) return diag::launch(p, whole, on);
    p.vec_aligned = mn_columns_vec_aligned<T>(p, p.call.K <= 64 ? 2 : 4);
    return p.call.K <= 64 ? mn_diag_launch<T, 4>(p, on) : mn_diag_launch<T, 8>(p, on);
}

enum { ROWS = 8 };    // of a block

struct row_coord {
    int64_t row, b, t, h;
};

__device__ static row_coord warp_row_coord(const mn_call &c) {
    const int64_t row = blockIdx.x * (int64_t)ROWS + threadIdx.x / 32;
    return { row, row / c.H / c.T, row / c.H % c.T, row % c.H };
}

/* What float32 calls sum the squares of keys in; bf16's own rounding is far above float32's. */
template <typename T>
using norm_type = std::conditional_t<sizeof(T) == sizeof(float), double, float>;

/* Four numbers from number i on, those of them that there are. */
template <typename T>
__device__ __forceinline__ void put_four(T *row, int64_t i, int64_t width, bool vec_aligned,
                                         const float (&x)[4]) {
    if (!row) return;
    if (vec_aligned && i < width) {
        mn_store<4>(row, i, x);
        return;
    }
#pragma unroll
    for (int n = 0; n < 4; n++) {
        if (i + n < width) mn_put(row + i + n, x[n]);
    }
}

/* dq, dk and dbeta of a token and head by a warp, of whose lanes each has four numbers side by side
 * PASSES times: the sums of column tiles' parts, which are asked for before anything else. */
template <typename T, int PASSES>
__global__ void __launch_bounds__(32 * ROWS)
longhorn_reduce_grads(const __grid_constant__ mn_longhorn_diag_args p, const float *y,
                      const float *partials, int tiles, bool vec_aligned) {
    const row_coord at = warp_row_coord(p.call);
    const int64_t rows = p.call.B * p.call.T * p.call.H, K = p.call.K, V = p.call.V;
    if (at.row >= rows) return;
    const int lane = threadIdx.x % 32;
    const T *k_row = mn_row<T>(p.k, at.b, at.t, at.h);
    const T *beta_row = mn_row<T>(p.beta, at.b, at.t, at.h);
    mn_column_raw<4, T> k[PASSES];
    float to_q[PASSES][4] = {}, to_k[PASSES][4] = {};
    norm_type<T> norm = 0;
#pragma unroll
    for (int pass = 0; pass < PASSES; pass++) {
        const int64_t i = 128 * pass + 4 * lane;
        k[pass].fetch(k_row, i, K, vec_aligned);
        for (int tile = 0; tile < tiles; tile++) {
            const float *part = partials + (tile * rows + at.row) * 2 * K;
            mn_column_raw<4, float> q_part, k_part;
            q_part.fetch(part, i, K, vec_aligned);
            k_part.fetch(part + K, i, K, vec_aligned);
#pragma unroll
            for (int n = 0; n < 4; n++) {
                to_q[pass][n] += q_part.at(n), to_k[pass][n] += k_part.at(n);
            }
        }
    }
#pragma unroll
    for (int n = 0; n < 4 * PASSES; n++) {
        norm += (norm_type<T>)k[n / 4].at(n % 4) * (norm_type<T>)k[n / 4].at(n % 4);
    }
    for (int lanes = 16; lanes > 0; lanes >>= 1) norm += __shfl_xor_sync(0xffffffffu, norm, lanes);
    float through = 0.0f;
    for (int64_t j = 4 * lane; j < V; j += 128) {
        mn_column_raw<4, T> beta;
        mn_column_raw<4, float> to_w;
        float dbeta[4];
        beta.fetch(beta_row, j, V, vec_aligned);
        to_w.fetch(y + at.row * V, j, V, vec_aligned);
#pragma unroll
        for (int n = 0; n < 4; n++) {
            const float b = beta.at(n);
            const float u = 1.0f / (float)((norm_type<T>)1 + (norm_type<T>)b * norm);
            dbeta[n] = to_w.at(n) * u * u;
            through = fmaf(b * u * b * u, to_w.at(n), through);
        }
        put_four(mn_row<T>(p.grad.beta, at.b, at.t, at.h), j, V, vec_aligned, dbeta);
    }
    through = mn_warp_sum(through);
#pragma unroll
    for (int pass = 0; pass < PASSES; pass++) {
        const int64_t i = 128 * pass + 4 * lane;
#pragma unroll
        for (int n = 0; n < 4; n++) {
            to_k[pass][n] = fmaf(-2.0f * k[pass].at(n), through, to_k[pass][n]);
        }
        put_four(mn_row<T>(p.grad.q, at.b, at.t, at.h), i, K, vec_aligned, to_q[pass]);
        put_four(mn_row<T>(p.grad.k, at.b, at.t, at.h), i, K, vec_aligned, to_k[pass]);
    }
}

/* Whether four neighbours of `width` come by one access. */
template <typename T, typename View>
static bool fours(const View &view, int64_t width) {
    bool fit = (uintptr_t)view.data % (4 * sizeof(T)) == 0 && width % 4 == 0;
    for (int axis = 0; axis < 3; axis++) fit = fit && view.stride[axis] % 4 == 0;
    return fit || !view.data;
}

template <typename T>
static int reduce_grads(const mn_longhorn_diag_args *p, const float *y, const float *partials,
                        cudaStream_t on) {
    const int64_t K = p->call.K, V = p->call.V, rows = p->call.B * p->call.T * p->call.H;
    const int tiles = (int)mn_columns_tiles(V);
    const bool vec_aligned = fours<T>(p->k, K) && fours<T>(p->beta, V) && fours<T>(p->grad.q, K) &&
        fours<T>(p->grad.k, K) && fours<T>(p->grad.beta, V) && K % 4 == 0 && V % 4 == 0 &&
        ((uintptr_t)y | (uintptr_t)partials) % 16 == 0;
    if (K <= 128) {
        longhorn_reduce_grads<T, 1><<<mn_blocks(rows, ROWS), 32 * ROWS, 0, on>>>(
            *p, y, partials, tiles, vec_aligned);
    } else {
        longhorn_reduce_grads<T, 2><<<mn_blocks(rows, ROWS), 32 * ROWS, 0, on>>>(
            *p, y, partials, tiles, vec_aligned);
    }
    return mn_launch_status();
}

static bool rows_size(size_t *count, const mn_call *c) {
    return mn_mul_size(count, (size_t)c->B, (size_t)c->T) &&
           mn_mul_size(count, *count, (size_t)c->H) && mn_mul_size(count, *count, (size_t)c->V);
}

static bool get_sizes(mn_column_workspace *to, const mn_call &c, mn_column_kind kind) {
    if (kind == MN_COLUMNS_CELL && c.K <= MN_DIAG_MAX_K) return mn_diag_workspace_sizes(to, c);
    return mn_column_workspace_sizes(to, c, c.V);
}

static bool backward_plan(const mn_call *c, mn_column_kind kind, mn_plan *plan) {
    mn_column_workspace extent;
    size_t rows;
    return rows_size(&rows, c) && get_sizes(&extent, *c, kind) &&
           mn_add_size(&rows, rows, extent.spans) &&
           mn_add_size(&rows, rows, extent.tokens) && mn_add_size(&rows, rows, extent.partials) &&
           mn_add_size(&rows, rows, 4) &&
           mn_mul_size(&plan->shared_bytes, rows, sizeof(float));
}

/* A sequence of one token goes cell by cell, so that it has the bits of a decode step. */
template <typename T, mn_column_kind KIND>
static int forward(const mn_longhorn_diag_args *p, cudaStream_t on) {
    mn_column_params m = forward_columns_of(p);
    const bool packed = p->call.cu_seqlens;
    const bool by_products = KIND == MN_COLUMNS_CELL && diag_fwd::supported(p->call);
    if (by_products && !packed && p->call.T != 1) return diag_fwd::launch(m, on);
    m.single_tokens = by_products && packed;
    const int code = mn_columns_forward<T, KIND>(m, on);
    return code != cudaSuccess || !m.single_tokens ? code : diag_fwd::launch(m, on);
}

template <typename T, mn_column_kind KIND>
static int backward(const mn_longhorn_diag_args *p, float *at, cudaStream_t on) {
    const mn_call &c = p->call;
    const int64_t rows = c.B * c.T * c.H, size = rows * c.V;
    mn_column_workspace extent;
    if (!get_sizes(&extent, c, KIND)) return cudaErrorNotSupported;
    mn_column_params m = columns_of(p);
    m.beta = p->beta, m.cot_o = p->cot.o, m.reads = true, m.y = at, m.dv = p->grad.v;
    m.spans = (float *)(((uintptr_t)(at + size) + 15) / 16 * 16);
    m.tokens = m.spans + extent.spans, m.partials = m.tokens + extent.tokens;
    m.cot_state = (const float *)p->cot.state.data, m.dstate0 = (float *)p->grad.state0.data;
    int code;
    if (KIND == MN_COLUMNS_CELL && mn_diag_supported(c)) {
        const bool by_fours = fours<T>(p->grad.q, c.K) && fours<T>(p->grad.k, c.K);
        code = mn_diag_backward<T>(m, { p->grad.q, p->grad.k, p->grad.beta, by_fours }, on);
        if (diag::makes_whole(c)) return code;
    } else {
        code = mn_columns_backward<T, KIND>(m, on);
    }
    if (code != cudaSuccess || size == 0) return code;
    return reduce_grads<T>(p, m.y, m.partials, on);
}

static bool uses_chunks(const mn_call *c, mn_column_kind kind) {
    return kind == MN_COLUMNS_COLUMN && mn_longhorn_uses_chunks(c);
}

template <mn_column_kind KIND>
static int forward_any(const mn_longhorn_diag_args *p, void *stream) {
    const cudaStream_t on = (cudaStream_t)stream;
    return p->call.dtype == MN_BF16 ? forward<mn_bf16, KIND>(p, on) : forward<float, KIND>(p, on);
}

template <mn_column_kind KIND>
static int backward_any(const mn_longhorn_diag_args *p, void *shared, void *stream) {
    const cudaStream_t on = (cudaStream_t)stream;
    return p->call.dtype == MN_BF16 ? backward<mn_bf16, KIND>(p, (float *)shared, on)
                                    : backward<float, KIND>(p, (float *)shared, on);
}

#define LONGHORN(name, KIND)                                                                       \
    MN_CUDA_PLAN(name##_forward) {                                                                 \
        const mn_call *c = (const mn_call *)args;                                                  \
        return uses_chunks(c, KIND) ? mn_longhorn_chunk_plan(plan, c, false) : true;            \
    }                                                                                              \
    MN_CUDA_PLAN(name##_backward) {                                                                \
        const mn_call *c = (const mn_call *)args;                                                  \
        return uses_chunks(c, KIND) ? mn_longhorn_chunk_plan(plan, c, true)                     \
                                       : backward_plan(c, KIND, plan);                             \
    }                                                                                              \
    MN_CUDA_LAUNCH(name##_forward) {                                                               \
        const mn_longhorn_diag_args *p = (const mn_longhorn_diag_args *)args;                      \
        return uses_chunks(&p->call, KIND) ? mn_longhorn_chunk_forward(p, shared, stream)       \
                                              : forward_any<KIND>(p, stream);                      \
    }                                                                                              \
    MN_CUDA_LAUNCH(name##_backward) {                                                              \
        const mn_longhorn_diag_args *p = (const mn_longhorn_diag_args *)args;                      \
        return uses_chunks(&p->call, KIND) ? mn_longhorn_chunk_backward(p, shared, stream)      \
                                              : backward_any<KIND>(p, shared, stream);             \
    }
LONGHORN(longhorn_diag, MN_COLUMNS_CELL)
LONGHORN(longhorn_column, MN_COLUMNS_COLUMN)

/* ---- one token, the state in place ----------------------------------------------------------- */

template <typename T, int ROWS, mn_column_kind KIND>
__global__ void __launch_bounds__(STEP_THREADS)
longhorn_step_recurrent(const __grid_constant__ mn_column_params p, unsigned tiles) {
    typedef step_of<KIND, ROWS, mn_cta<STEP_THREADS>, MN_COLUMNS_TILE / 8> step;
    __shared__ typename step::smem smem;
    const unsigned head = blockIdx.x / tiles, n = head / (unsigned)p.call.H;
    const mn_column_coord at = { n, head - n * (unsigned)p.call.H, blockIdx.x - head * tiles,
                                 blockIdx.x, { n, 0, 1 } };
    mn_pdl_launch_dependents();
    step::prefetch(p, at);
    mn_pdl_wait();
    step::template run<T>(p, at, smem);
}

template <typename T, int ROWS, mn_column_kind KIND>
static int step_launch(const mn_longhorn_diag_args *p, cudaStream_t on) {
    const int64_t tiles = mn_ceil_div(p->call.V, (int64_t)MN_COLUMNS_TILE);
    const int64_t blocks = tiles * p->call.H * p->call.B;
    mn_column_params m = forward_columns_of(p);
    m.vec_aligned = mn_columns_vec_aligned<T>(m, mn_columns_rows(p->call) / 32);
    if (blocks == 0) return cudaSuccess;
    if (blocks > INT32_MAX) return cudaErrorNotSupported;
    return mn_launch_pdl(longhorn_step_recurrent<T, ROWS, KIND>, dim3((unsigned)blocks),
                         STEP_THREADS, 0, on, m, (unsigned)tiles);
}

/* What the scan serves, where states do not come in packs. */
template <typename T, mn_column_kind KIND>
static int step(const mn_longhorn_diag_args *p, cudaStream_t on) {
    const int64_t K = p->call.K;
    if (!step_serves(p)) return forward<T, KIND>(p, on);
    if (K <= 32) return step_launch<T, 8, KIND>(p, on);
    if (K <= 64) return step_launch<T, 16, KIND>(p, on);
    return K <= 128 ? step_launch<T, 32, KIND>(p, on) : step_launch<T, 64, KIND>(p, on);
}

#define LONGHORN_STEP(name, KIND)                                                                  \
    MN_CUDA_PLAN(name##_step) {                                                                    \
        (void)args, (void)plan;                                                                    \
        return true;                                                                               \
    }                                                                                              \
    MN_CUDA_LAUNCH(name##_step) {                                                                  \
        (void)shared;                                                                              \
        const mn_longhorn_diag_args *p = (const mn_longhorn_diag_args *)args;                      \
        const cudaStream_t on = (cudaStream_t)stream;                                              \
        return p->call.dtype == MN_BF16 ? step<mn_bf16, KIND>(p, on) : step<float, KIND>(p, on);   \
    }

LONGHORN_STEP(longhorn_diag, MN_COLUMNS_CELL)
LONGHORN_STEP(longhorn_column, MN_COLUMNS_COLUMN)

}    // namespace mneme::longhorn
