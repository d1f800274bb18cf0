/* longhorn.cu - both forms of Longhorn (see ref/longhorn_diag.c and ref/longhorn_column.c):
 * longhorn_column in bf16 over chunks (longhorn_column_chunk.cu) where memories are neither narrow
 * nor
 * wide, except for decode steps; all else by the recurrences of column_state.cuh, longhorn_diag
 * back by
 * longhorn_diag_bwd.cuh where keys have at most 128 channels, and single tokens of it by
 * longhorn_diag_step.cuh. Backward, a kernel after these has one token and head for each warp:
 *
 *   u_j = 1 / (1 + beta_j |k|^2)     w_j = beta_j u_j
 *   dbeta_j = y_j u_j^2              dk_i -= 2 k_i sum_j w_j^2 y_j */
#include "kernels/cuda/longhorn/longhorn_column_chunk.h"
#include "kernels/cuda/longhorn/longhorn_diag_bwd.cuh"
#include "kernels/cuda/longhorn/longhorn_diag_step.cuh"

enum { ROWS = 8 };    // of a block

struct row_coord {
    int64_t row, b, t, h;
};

__device__ static row_coord warp_row_coord(const mn_call &c) {
    const int64_t row = blockIdx.x * (int64_t)ROWS + threadIdx.x / 32;
    return { row, row / c.H / c.T, row / c.H % c.T, row % c.H };
}

template <typename T>
__global__ void __launch_bounds__(32 * ROWS)
longhorn_reduce_grads(const __grid_constant__ mn_longhorn_diag_args p, const float *y,
                       const float *parts, int64_t tiles) {
    const row_coord at = warp_row_coord(p.call);
    const int64_t rows = p.call.B * p.call.T * p.call.H, K = p.call.K, V = p.call.V;
    if (at.row >= rows) return;
    T *dbeta = mn_row<T>(p.grad.beta, at.b, at.t, at.h);
    T *dq = mn_row<T>(p.grad.q, at.b, at.t, at.h), *dk = mn_row<T>(p.grad.k, at.b, at.t, at.h);
    const T *k = mn_row<T>(p.k, at.b, at.t, at.h), *beta = mn_row<T>(p.beta, at.b, at.t, at.h);
    double norm = 0.0;
    for (int64_t i = threadIdx.x % 32; i < K; i += 32) {
        norm += (double)mn_float(k[i]) * (double)mn_float(k[i]);
    }
    for (int lanes = 16; lanes > 0; lanes >>= 1) norm += __shfl_xor_sync(0xffffffffu, norm, lanes);
    float through = 0.0f;
    for (int64_t j = threadIdx.x % 32; j < V; j += 32) {
        const float b = mn_float(beta[j]), u = 1.0f / (float)(1.0 + (double)b * norm);
        const float to_w = y[at.row * V + j];
        if (dbeta) mn_put(dbeta + j, to_w * u * u);
        through = fmaf(b * u * b * u, to_w, through);
    }
    through = mn_warp_sum(through);
    for (int64_t i = threadIdx.x % 32; i < K; i += 32) {
        float to_q = 0.0f, to_k = 0.0f;
        for (int64_t tile = 0; tile < tiles; tile++) {
            const float *part = parts + (tile * rows + at.row) * 2 * K + i;
            to_q += part[0], to_k += part[K];
        }
        if (dq) mn_put(dq + i, to_q);
        if (dk) mn_put(dk + i, fmaf(-2.0f * mn_float(k[i]), through, to_k));
    }
}

static bool rows_size(size_t *count, const mn_call *c) {
    return mn_mul_size(count, (size_t)c->B, (size_t)c->T) &&
           mn_mul_size(count, *count, (size_t)c->H) && mn_mul_size(count, *count, (size_t)c->V);
}

static bool get_sizes(mn_columns_extent *to, const mn_call &c, mn_columns_kind kind) {
    if (kind == MN_COLUMNS_CELL && c.K <= MN_DIAG_MAX_K) return mn_diag_workspace_sizes(to, c);
    return mn_columns_measure(to, c, c.V);
}

static bool backward_plan(const mn_call *c, mn_columns_kind kind, mn_plan *plan) {
    mn_columns_extent extent;
    size_t rows;
    return rows_size(&rows, c) && get_sizes(&extent, *c, kind) &&
           mn_add_size(&rows, rows, extent.spans) &&
           mn_add_size(&rows, rows, extent.tokens) && mn_add_size(&rows, rows, extent.parts) &&
           mn_add_size(&rows, rows, 4) &&
           mn_mul_size(&plan->shared_bytes, rows, sizeof(float));
}

static mn_columns columns_of(const mn_longhorn_diag_args *p) {
    mn_columns m = {};
    m.call = p->call, m.scale = (float)p->scale, m.columns = p->call.V;
    m.q = p->q, m.k = p->k, m.v = p->v;
    m.state0 = (const float *)p->state0.data;
    return m;
}

static mn_columns forward_columns_of(const mn_longhorn_diag_args *p) {
    mn_columns m = columns_of(p);
    m.beta = p->beta, m.out = p->o, m.reads = p->o.data;
    m.state = (float *)p->state.data;
    return m;
}

template <typename T, mn_columns_kind KIND>
static int forward(const mn_longhorn_diag_args *p, cudaStream_t on) {
    return mn_columns_forward<T, KIND>(forward_columns_of(p), on);
}

template <typename T, mn_columns_kind KIND>
static int backward(const mn_longhorn_diag_args *p, float *at, cudaStream_t on) {
    const mn_call &c = p->call;
    const int64_t rows = c.B * c.T * c.H, size = rows * c.V;
    mn_columns_extent extent;
    if (!get_sizes(&extent, c, KIND)) return cudaErrorNotSupported;
    mn_columns m = columns_of(p);
    m.beta = p->beta, m.cot_o = p->cot.o, m.reads = true, m.y = at, m.dv = p->grad.v;
    m.spans = (float *)(((uintptr_t)(at + size) + 15) / 16 * 16);
    m.tokens = m.spans + extent.spans, m.parts = m.tokens + extent.tokens;
    m.cot_state = (const float *)p->cot.state.data, m.dstate0 = (float *)p->grad.state0.data;
    int code;
    if (KIND == MN_COLUMNS_CELL && mn_diag_supported(c)) code = mn_diag_backward<T>(m, on);
    else code = mn_columns_backward<T, KIND>(m, on);
    if (code != cudaSuccess || size == 0) return code;
    longhorn_reduce_grads<T><<<mn_blocks(rows, ROWS), 32 * ROWS, 0, on>>>(
        *p, m.y, m.parts, mn_columns_tiles(c.V));
    return mn_launch_status();
}

static bool uses_chunks(const mn_call *c, mn_columns_kind kind) {
    return kind == MN_COLUMNS_COLUMN && mn_longhorn_uses_chunks(c);
}

template <mn_columns_kind KIND>
static int forward_any(const mn_longhorn_diag_args *p, void *stream) {
    const cudaStream_t on = (cudaStream_t)stream;
    return p->call.dtype == MN_BF16 ? forward<mn_bf16, KIND>(p, on) : forward<float, KIND>(p, on);
}

template <mn_columns_kind KIND>
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

/* One token, the state in place. */
MN_CUDA_PLAN(longhorn_diag_step) {
    (void)args, (void)plan;
    return true;
}

MN_CUDA_LAUNCH(longhorn_diag_step) {
    const mn_longhorn_diag_args *p = (const mn_longhorn_diag_args *)args;
    const mn_columns m = forward_columns_of(p);
    const cudaStream_t on = (cudaStream_t)stream;
    (void)shared;
    return p->call.dtype == MN_BF16 ? mn_diag_step<mn_bf16>(m, on) : mn_diag_step<float>(m, on);
}

/* Bound by memory, and exact in the state. */
MN_CUDA_PLAN(longhorn_column_step) {
    (void)args, (void)plan;
    return true;
}

MN_CUDA_LAUNCH(longhorn_column_step) {
    (void)shared;
    return forward_any<MN_COLUMNS_COLUMN>((const mn_longhorn_column_args *)args, stream);
}
