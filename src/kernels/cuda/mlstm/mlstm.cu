/* mlstm.cu - mLSTM (see ref/mlstm.c): over chunks in bf16 (mlstm_chunk.cu), else by the
 * recurrence of column_state.cuh, the normaliser being a last column of ones:
 *
 *   m_t = max(lf_t + m_{t-1}, ipre_t)     f = exp(lf_t + m_{t-1} - m_t)     w = exp(ipre_t - m_t)
 *   num, a = scale (C, n)'q               o = num / max(|a|, exp(-m_t))
 *
 * Kernels after the recurrence have one token and head for each warp. */
#include "kernels/cuda/recurrent/column_state_bwd.cuh"
#include "kernels/cuda/mlstm/mlstm.cuh"

namespace mneme::mlstm {

using namespace recurrent;

enum { ROWS = 8 };    // of a block

/* Work space: gates by rows; read sums and their cotangents, gradients of w (rows, V + 1). */
struct workspace {
    float *f, *w, *m, *o, *cot, *y;
    mn_mlstm_states states;
    float *spans;    // and all behind it
};

struct row_coord {
    int64_t row, b, t, h;
};

__device__ static row_coord warp_row_coord(const mn_call &c) {
    const int64_t row = blockIdx.x * (int64_t)ROWS + threadIdx.x / 32;
    return { row, row / c.H / c.T, row / c.H % c.T, row % c.H };
}

__device__ static float safe_div(float x, float den) {
    return den == 0.0f ? 0.0f : x / den;    // NaN stays
}

template <typename T>
__global__ void __launch_bounds__(32 * ROWS)
mlstm_normalize(const __grid_constant__ mn_mlstm_args p, workspace s) {
    const row_coord at = warp_row_coord(p.call);
    if (at.row >= p.call.B * p.call.T * p.call.H) return;
    const int64_t V = p.call.V;
    const float *num = s.o + at.row * (V + 1), a = num[V], least = expf(-s.m[at.row]);
    const float den = mn_fmax(fabsf(a), least);
    T *o = mn_row<T>(p.o, at.b, at.t, at.h);
    const T *d_o = mn_row<T>(p.cot.o, at.b, at.t, at.h);
    float inner = 0.0f;
    for (int64_t j = threadIdx.x % 32; j < V; j += 32) {
        const float x = safe_div(num[j], den), d = mn_get(d_o, j);
        if (!s.cot) {
            if (o) mn_put(o + j, x);
            continue;
        }
        inner = fmaf(x, d, inner);
        s.cot[at.row * (V + 1) + j] = safe_div(d, den);
    }
    if (!s.cot) return;
    inner = mn_warp_sum(inner);
    if (threadIdx.x % 32 == 0) {
        s.cot[at.row * (V + 1) + V] = fabsf(a) > least ? -inner / a : 0.0f;
    }
}

template <typename T>
__global__ void __launch_bounds__(32 * ROWS)
mlstm_reduce_grads(const __grid_constant__ mn_mlstm_args p, workspace s, const float *partials,
                    const float *f_partials, int64_t tiles) {
    const row_coord at = warp_row_coord(p.call);
    const int64_t rows = p.call.B * p.call.T * p.call.H, K = p.call.K, V = p.call.V;
    if (at.row >= rows) return;
    T *dq = mn_row<T>(p.grad.q, at.b, at.t, at.h), *dk = mn_row<T>(p.grad.k, at.b, at.t, at.h);
    T *dipre = mn_row<T>(p.grad.ipre, at.b, at.t, at.h);
    T *dfpre = mn_row<T>(p.grad.fpre, at.b, at.t, at.h);
    float to_w = 0.0f, to_f = 0.0f;
    for (int64_t j = threadIdx.x % 32; j <= V; j += 32) to_w += s.y[at.row * (V + 1) + j];
    to_w = mn_warp_sum(to_w);
    for (int64_t i = threadIdx.x % 32; i < K; i += 32) {
        float to_q = 0.0f, to_k = 0.0f;
        for (int64_t tile = 0; tile < tiles; tile++) {
            const float *part = partials + (tile * rows + at.row) * 2 * K + i;
            to_q += part[0], to_k += part[K];
        }
        if (dq) mn_put(dq + i, to_q);
        if (dk) mn_put(dk + i, to_k);
    }
    if (threadIdx.x % 32 != 0) return;
    for (int64_t tile = 0; tile < tiles; tile++) to_f += f_partials[tile * rows + at.row];
    const float fpre = mn_float(*mn_row<T>(p.fpre, at.b, at.t, at.h));
    if (dipre) mn_put(dipre, s.w[at.row] * to_w);
    if (dfpre) mn_put(dfpre, to_f * expf(mn_log_sigmoid(-fpre)));
}

/* ---- launches -------------------------------------------------------------------------------- */

/* Floats of the gates, of each of the three (rows, V + 1), and of the states. */
static bool get_sizes(size_t *rows, size_t *reads, size_t *states, size_t *heads,
                      const mn_call *c) {
    return mn_mul_size(rows, (size_t)c->B, (size_t)c->T) &&
           mn_mul_size(rows, *rows, (size_t)c->H) &&
           mn_mul_size(reads, *rows, (size_t)c->V + 1) &&
           mn_mul_size(heads, (size_t)mn_n_spans(*c), (size_t)c->H) &&
           mn_mul_size(states, *heads, (size_t)c->K) &&
           mn_mul_size(states, *states, (size_t)c->V + 1);
}

static bool plan_of(const mn_call *c, bool backward, mn_plan *plan) {
    mn_column_workspace e;
    size_t rows, reads, states, heads, all;
    bool ok = get_sizes(&rows, &reads, &states, &heads, c)
        && mn_column_workspace_sizes(&e, *c, c->V + 1);
    ok = ok && mn_mul_size(&all, rows, 3) && mn_add_size(&all, all, heads) &&
         mn_add_size(&all, all, states) && mn_add_size(&all, all, reads);
    if (ok && backward) {
        ok = mn_add_size(&all, all, states) && mn_mul_size(&reads, reads, 2) &&
             mn_add_size(&all, all, reads) && mn_add_size(&all, all, e.spans) &&
             mn_add_size(&all, all, e.tokens) && mn_add_size(&all, all, e.partials) &&
             mn_add_size(&all, all, e.f_partials) && mn_add_size(&all, all, 4);
    }
    return ok && mn_mul_size(&plan->shared_bytes, all, sizeof(float));
}

static workspace workspace_at(float *at, const mn_call &c, size_t rows, size_t reads, size_t states,
                    size_t heads, bool backward) {
    const size_t ones = heads * (size_t)c.K;
    workspace s = {};
    const auto take = [&](size_t count) { float *from = at; at += count; return from; };
    s.f = take(rows), s.w = take(rows), s.m = take(rows), s.states.last = take(heads);
    s.states.state = take(states - ones), s.states.ones = take(ones), s.o = take(reads);
    if (!backward) return s;
    s.cot = take(reads), s.y = take(reads);
    s.states.dstate0 = take(states - ones), s.states.dones0 = take(ones);
    s.spans = (float *)(((uintptr_t)at + 15) / 16 * 16);
    return s;
}

template <typename T>
static int run(const mn_mlstm_args *p, float *at, bool backward, cudaStream_t on) {
    const mn_call &c = p->call;
    size_t rows, reads, states, heads;
    mn_column_workspace e;
    if (!get_sizes(&rows, &reads, &states, &heads, &c)
        || !mn_column_workspace_sizes(&e, c, c.V + 1)) {
        return cudaErrorNotSupported;
    }
    if (heads == 0) return cudaSuccess;
    if (heads > INT32_MAX) return cudaErrorNotSupported;
    const workspace s = workspace_at(at, c, rows, reads, states, heads, backward);
    const unsigned row_blocks = mn_blocks((int64_t)rows, ROWS);
    mn_column_params m = {};
    m.call = c, m.scale = (float)p->scale, m.columns = c.V + 1;
    m.q = p->q, m.k = p->k, m.v = p->v, m.f = s.f, m.w = s.w;
    m.state0 = (const float *)p->C0.data, m.ones0 = (const float *)p->n0.data;
    m.o = s.o, m.reads = true, m.state = backward ? NULL : s.states.state;
    m.ones = backward ? NULL : s.states.ones;
    mlstm_gates<T, false><<<(unsigned)heads, MN_GATE_THREADS, 0, on>>>(
        *p, s.f, s.w, s.m, s.states.last);
    int code = mn_columns_forward<T, MN_COLUMNS_SUM>(m, on);
    if (code != cudaSuccess) return code;
    if (rows > 0) mlstm_normalize<T><<<row_blocks, 32 * ROWS, 0, on>>>(*p, s);
    code = mn_mlstm_store_states(p, s.states, (int64_t)heads, backward, on);
    if (code != cudaSuccess || !backward) return code;
    m.o = NULL, m.cot = s.cot, m.y = s.y, m.dv = p->grad.v;
    m.cot_state = s.states.state, m.cot_ones = s.states.ones;
    m.dstate0 = s.states.dstate0, m.dones0 = s.states.dones0;
    m.spans = s.spans, m.tokens = m.spans + e.spans, m.partials = m.tokens + e.tokens;
    m.f_partials = m.partials + e.partials;
    code = mn_columns_backward<T, MN_COLUMNS_SUM>(m, on);
    if (code != cudaSuccess) return code;
    if (rows > 0) {
        mlstm_reduce_grads<T><<<row_blocks, 32 * ROWS, 0, on>>>(*p, s, m.partials, m.f_partials,
                                                                 mn_columns_tiles(c.V + 1));
    }
    return mn_mlstm_store_state0_grads(p, s.states, (int64_t)heads, on);
}

static bool plan_any(const mn_mlstm_args *p, bool backward, mn_plan *plan) {
    if (mn_mlstm_uses_chunks(p, backward)) return mn_mlstm_chunk_plan(p, backward, plan);
    return plan_of(&p->call, backward, plan);
}

static int run_any(const mn_mlstm_args *p, void *shared, bool backward, cudaStream_t on) {
    if (mn_mlstm_uses_chunks(p, backward)) return mn_mlstm_chunk_run(p, shared, backward, on);
    return p->call.dtype == MN_BF16 ? run<mn_bf16>(p, (float *)shared, backward, on)
                                    : run<float>(p, (float *)shared, backward, on);
}

MN_CUDA_PLAN(mlstm_forward) {
    return plan_any((const mn_mlstm_args *)args, false, plan);
}

MN_CUDA_PLAN(mlstm_backward) {
    return plan_any((const mn_mlstm_args *)args, true, plan);
}

MN_CUDA_LAUNCH(mlstm_forward) {
    return run_any((const mn_mlstm_args *)args, shared, false, (cudaStream_t)stream);
}

MN_CUDA_LAUNCH(mlstm_backward) {
    return run_any((const mn_mlstm_args *)args, shared, true, (cudaStream_t)stream);
}

}    // namespace mneme::mlstm
