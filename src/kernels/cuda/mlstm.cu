/* mlstm.cu - mLSTM (see ref/mlstm.c) by the recurrence of columns.cuh, the normaliser being a last
 * column of ones:
 *
 *   m_t = max(lf_t + m_{t-1}, ipre_t)     f = exp(lf_t + m_{t-1} - m_t)     w = exp(ipre_t - m_t)
 *   num, a = scale (C, n)'q               o = num / max(|a|, exp(-m_t))
 *
 * One thread walks the gates of a head of a sequence; kernels after the recurrence have one token
 * and head for each warp. */
#include "kernels/cuda/columns.cuh"

enum { ROWS = 8 };    // of a block

/* Work space: gates by rows; read sums and their cotangents, gradients of w (rows, V + 1); states
 * at the end and their cotangents or, going back, the gradients of the first ones. */
struct work {
    float *f, *w, *m, *o, *cot, *y, *state, *ones, *last, *dstate0, *dones0;
    float *spans;    // and all behind it
};

struct row_place {
    int64_t row, b, t, h;
};

__device__ static row_place row_here(const mn_call &c) {
    const int64_t row = blockIdx.x * (int64_t)ROWS + threadIdx.x / 32;
    return { row, row / c.H / c.T, row / c.H % c.T, row % c.H };
}

__device__ static float log_sigmoid(float x) {
    return fminf(x, 0.0f) - log1pf(expf(-fabsf(x)));
}

template <typename T>
__global__ void __launch_bounds__(64)
mlstm_gates_kernel(const __grid_constant__ mn_mlstm_args p, work s) {
    const int64_t head = blockIdx.x * (int64_t)64 + threadIdx.x;
    if (head >= mn_n_spans(p.call) * p.call.H) return;
    const int64_t n = head / p.call.H, h = head % p.call.H;
    const mn_span span = mn_span_at(p.call, n);
    const float *first = mn_row<float>(p.m0, n, 0, h);
    double m = first ? (double)*first : -INFINITY;
    for (int64_t t = span.t0; t < span.t0 + span.length; t++) {
        const int64_t row = (span.b * p.call.T + t) * p.call.H + h;
        const double ipre = (double)mn_float(*mn_row<T>(p.ipre, span.b, t, h));
        const float fpre = mn_float(*mn_row<T>(p.fpre, span.b, t, h));
        const double decayed = (double)log_sigmoid(fpre) + m, next = fmax(decayed, ipre);
        s.f[row] = decayed == -INFINITY ? 0.0f : expf((float)(decayed - next));
        s.w[row] = ipre == -INFINITY ? 0.0f : expf((float)(ipre - next));
        s.m[row] = (float)next;
        m = next;
    }
    s.last[head] = (float)m;
}

__device__ static float over(float x, float den) {
    return den > 0.0f ? x / den : 0.0f;
}

template <typename T>
__global__ void __launch_bounds__(32 * ROWS)
mlstm_quotient_kernel(const __grid_constant__ mn_mlstm_args p, work s) {
    const row_place at = row_here(p.call);
    if (at.row >= p.call.B * p.call.T * p.call.H) return;
    const int64_t V = p.call.V;
    const float *num = s.o + at.row * (V + 1), a = num[V], least = expf(-s.m[at.row]);
    const float den = fmaxf(fabsf(a), least);
    T *o = mn_row<T>(p.o, at.b, at.t, at.h);
    const T *d_o = mn_row<T>(p.cot.o, at.b, at.t, at.h);
    float inner = 0.0f;
    for (int64_t j = threadIdx.x % 32; j < V; j += 32) {
        const float x = over(num[j], den), d = mn_get(d_o, j);
        if (!s.cot) {
            if (o) mn_put(o + j, x);
            continue;
        }
        inner = fmaf(x, d, inner);
        s.cot[at.row * (V + 1) + j] = over(d, den);
    }
    if (!s.cot) return;
    inner = mn_warp_sum(inner);
    if (threadIdx.x % 32 == 0) {
        s.cot[at.row * (V + 1) + V] = fabsf(a) > least ? -inner / a : 0.0f;
    }
}

/* What is asked of the states at the end, or the cotangents of their sums in units of exp(-m). */
__global__ void __launch_bounds__(256)
mlstm_states_kernel(const __grid_constant__ mn_mlstm_args p, work s, bool backward) {
    const int64_t K = p.call.K, V = p.call.V, size = K * (V + 1);
    const int64_t at = blockIdx.x * (int64_t)256 + threadIdx.x;
    if (at >= size * p.call.H * mn_n_spans(p.call)) return;
    const int64_t head = at / size, i = at % size / (V + 1), j = at % size % (V + 1);
    const int64_t cell = (head * K + i) * V + j, row = head * K + i;
    const float m = s.last[head], unit = expf(m);
    if (backward) {
        const float *sum = j < V ? (const float *)p.cot.csum.data : (const float *)p.cot.nsum.data;
        const float x = mn_get(sum, j < V ? cell : row);
        if (j < V) s.state[cell] = x == 0.0f ? 0.0f : x * unit;
        else s.ones[row] = x == 0.0f ? 0.0f : x * unit;
        return;
    }
    const float x = j < V ? s.state[cell] : s.ones[row];
    float *to = j < V ? (float *)p.C.data : (float *)p.n.data;
    float *sum = j < V ? (float *)p.csum.data : (float *)p.nsum.data;
    if (to) to[j < V ? cell : row] = x;
    if (sum) sum[j < V ? cell : row] = x * unit;
    if (p.m.data && at % size == 0) ((float *)p.m.data)[head] = m;
}

template <typename T>
__global__ void __launch_bounds__(32 * ROWS)
mlstm_finish_kernel(const __grid_constant__ mn_mlstm_args p, work s, const float *parts,
                    const float *fparts, int64_t tiles) {
    const row_place at = row_here(p.call);
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
            const float *part = parts + (tile * rows + at.row) * 2 * K + i;
            to_q += part[0], to_k += part[K];
        }
        if (dq) mn_put(dq + i, to_q);
        if (dk) mn_put(dk + i, to_k);
    }
    if (threadIdx.x % 32 != 0) return;
    for (int64_t tile = 0; tile < tiles; tile++) to_f += fparts[tile * rows + at.row];
    const float fpre = mn_float(*mn_row<T>(p.fpre, at.b, at.t, at.h));
    if (dipre) mn_put(dipre, s.w[at.row] * to_w);
    if (dfpre) mn_put(dfpre, to_f * expf(log_sigmoid(-fpre)));
}

/* The gradients of the first states; dm0 is their product with them. A block has a head. */
__global__ void __launch_bounds__(256)
mlstm_first_kernel(const __grid_constant__ mn_mlstm_args p, work s) {
    __shared__ float room[32];
    const int64_t head = blockIdx.x, K = p.call.K, KV = K * p.call.V;
    float sum = 0.0f;
    for (int64_t i = threadIdx.x; i < KV + K; i += 256) {
        const int64_t at = i < KV ? head * KV + i : head * K + i - KV;
        const float d = i < KV ? s.dstate0[at] : s.dones0[at];
        float *to = i < KV ? (float *)p.grad.C0.data : (float *)p.grad.n0.data;
        const float *first = i < KV ? (const float *)p.C0.data : (const float *)p.n0.data;
        if (to) to[at] = d;
        sum = fmaf(d, mn_get(first, at), sum);
    }
    sum = mn_team_sum<256>(sum, room);
    if (threadIdx.x == 0 && p.grad.m0.data) ((float *)p.grad.m0.data)[head] = sum;
}

/* ---- launches -------------------------------------------------------------------------------- */

/* Floats of the gates, of each of the three (rows, V + 1), and of the states. */
static bool measure(size_t *rows, size_t *reads, size_t *states, size_t *heads, const mn_call *c) {
    return mn_mul_size(rows, (size_t)c->B, (size_t)c->T) &&
           mn_mul_size(rows, *rows, (size_t)c->H) &&
           mn_mul_size(reads, *rows, (size_t)c->V + 1) &&
           mn_mul_size(heads, (size_t)mn_n_spans(*c), (size_t)c->H) &&
           mn_mul_size(states, *heads, (size_t)c->K) &&
           mn_mul_size(states, *states, (size_t)c->V + 1);
}

static bool plan_of(const mn_call *c, bool backward, mn_plan *plan) {
    mn_columns_extent e;
    size_t rows, reads, states, heads, all;
    bool ok = measure(&rows, &reads, &states, &heads, c) && mn_columns_measure(&e, *c, c->V + 1);
    ok = ok && mn_mul_size(&all, rows, 3) && mn_add_size(&all, all, heads) &&
         mn_add_size(&all, all, states) && mn_add_size(&all, all, reads);
    if (ok && backward) {
        ok = mn_add_size(&all, all, states) && mn_mul_size(&reads, reads, 2) &&
             mn_add_size(&all, all, reads) && mn_add_size(&all, all, e.spans) &&
             mn_add_size(&all, all, e.tokens) && mn_add_size(&all, all, e.parts) &&
             mn_add_size(&all, all, e.fparts) && mn_add_size(&all, all, 4);
    }
    return ok && mn_mul_size(&plan->shared_bytes, all, sizeof(float));
}

static work work_in(float *at, const mn_call &c, size_t rows, size_t reads, size_t states,
                    size_t heads, bool backward) {
    const size_t ones = heads * (size_t)c.K;
    work s = {};
    const auto take = [&](size_t count) { float *from = at; at += count; return from; };
    s.f = take(rows), s.w = take(rows), s.m = take(rows), s.last = take(heads);
    s.state = take(states - ones), s.ones = take(ones), s.o = take(reads);
    if (!backward) return s;
    s.cot = take(reads), s.y = take(reads);
    s.dstate0 = take(states - ones), s.dones0 = take(ones);
    s.spans = (float *)(((uintptr_t)at + 15) / 16 * 16);
    return s;
}

template <typename T>
static int run(const mn_mlstm_args *p, float *at, bool backward, cudaStream_t on) {
    const mn_call &c = p->call;
    size_t rows, reads, states, heads;
    mn_columns_extent e;
    if (!measure(&rows, &reads, &states, &heads, &c) || !mn_columns_measure(&e, c, c.V + 1)) {
        return cudaErrorNotSupported;
    }
    if (heads == 0) return cudaSuccess;
    const work s = work_in(at, c, rows, reads, states, heads, backward);
    const unsigned row_blocks = mn_blocks((int64_t)rows, ROWS);
    mn_columns m = {};
    m.call = c, m.scale = (float)p->scale, m.columns = c.V + 1;
    m.q = p->q, m.k = p->k, m.v = p->v, m.f = s.f, m.w = s.w;
    m.state0 = (const float *)p->C0.data, m.ones0 = (const float *)p->n0.data;
    m.o = s.o, m.state = backward ? NULL : s.state, m.ones = backward ? NULL : s.ones;
    mlstm_gates_kernel<T><<<mn_blocks((int64_t)heads, 64), 64, 0, on>>>(*p, s);
    int code = mn_columns_run<T, MN_COLUMNS_SUM>(m, false, on);
    if (code != cudaSuccess) return code;
    if (rows > 0) mlstm_quotient_kernel<T><<<row_blocks, 32 * ROWS, 0, on>>>(*p, s);
    mlstm_states_kernel<<<mn_blocks((int64_t)states, 256), 256, 0, on>>>(*p, s, backward);
    code = mn_launched();
    if (code != cudaSuccess || !backward) return code;
    m.o = NULL, m.cot = s.cot, m.y = s.y, m.dv = p->grad.v;
    m.cot_state = s.state, m.cot_ones = s.ones, m.dstate0 = s.dstate0, m.dones0 = s.dones0;
    m.spans = s.spans, m.tokens = m.spans + e.spans, m.parts = m.tokens + e.tokens;
    m.fparts = m.parts + e.parts;
    code = mn_columns_run<T, MN_COLUMNS_SUM>(m, true, on);
    if (code != cudaSuccess) return code;
    if (rows > 0) {
        mlstm_finish_kernel<T><<<row_blocks, 32 * ROWS, 0, on>>>(*p, s, m.parts, m.fparts,
                                                                 mn_columns_tiles(c.V + 1));
    }
    mlstm_first_kernel<<<(unsigned)heads, 256, 0, on>>>(*p, s);
    return mn_launched();
}

MN_CUDA_PLAN(mlstm_forward) {
    return plan_of((const mn_call *)args, false, plan);
}

MN_CUDA_PLAN(mlstm_backward) {
    return plan_of((const mn_call *)args, true, plan);
}

MN_CUDA_LAUNCH(mlstm_forward) {
    const mn_mlstm_args *p = (const mn_mlstm_args *)args;
    const cudaStream_t on = (cudaStream_t)stream;
    return p->call.dtype == MN_BF16 ? run<mn_bf16>(p, (float *)shared, false, on)
                                    : run<float>(p, (float *)shared, false, on);
}

MN_CUDA_LAUNCH(mlstm_backward) {
    const mn_mlstm_args *p = (const mn_mlstm_args *)args;
    const cudaStream_t on = (cudaStream_t)stream;
    return p->call.dtype == MN_BF16 ? run<mn_bf16>(p, (float *)shared, true, on)
                                    : run<float>(p, (float *)shared, true, on);
}
