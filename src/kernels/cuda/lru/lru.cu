/* lru.cu - the real-gated linear recurrent unit, a thread for each channel of a sequence (see
 * ref/lru.c). Neighbouring threads have neighbouring channels. Backward goes forward first and
 * keeps the states; sums of a parameter over sequences are a second kernel. What a channel does
 * at a token is lru_step.cuh. */
#include "kernels/cuda/lru/lru_step.cuh"

namespace mneme::lru {

enum { THREADS = 64 };

template <typename T>
__device__ inline cell cell_at(const mn_lru_args &p, int64_t b, int64_t t, int64_t v, float soft,
                               bool first) {
    return cell_of(mn_float(mn_row<T>(p.x, b, t, 0)[v]), mn_float(mn_row<T>(p.gx, b, t, 0)[v]),
                   mn_float(mn_row<T>(p.ga, b, t, 0)[v]), soft, first);
}

template <typename T>
__global__ void __launch_bounds__(THREADS)
lru_fwd_recurrent(const __grid_constant__ mn_lru_args p, int64_t tiles) {
    const int64_t n = blockIdx.x / tiles, v = blockIdx.x % tiles * THREADS + threadIdx.x;
    if (v >= p.call.V) return;
    const mn_span span = mn_span_at(p.call, n);
    const float *h0 = mn_row<float>(p.h0, n, 0, 0);
    float *last = mn_row<float>(p.h, n, 0, 0), h = mn_get(h0, v);
    const float soft = mn_softplus(((const float *)p.a_param.data)[v]);
    for (int64_t t = 0; t < span.length; t++) {
        const cell c = cell_at<T>(p, span.b, span.t0 + t, v, soft, t == 0 && !h0);
        T *y = mn_row<T>(p.y, span.b, span.t0 + t, 0);
        h = advance(c, h);
        if (y) mn_put(y + v, h);
    }
    if (last) last[v] = h;
}

/* One token: a thread has four neighbouring channels of STEP_ROWS sequences, so that what belongs
 * to a channel alone is made once for them. */
enum { STEP_ROWS = 4, STEP_THREADS = 128, STEP_FEW = 1 << 17 };    // few: a thread has a channel

template <typename T>
__global__ void __launch_bounds__(STEP_THREADS)
lru_step_kernel(const __grid_constant__ mn_lru_args p) {
    const int64_t v = 4 * (blockIdx.x * (int64_t)STEP_THREADS + threadIdx.x);
    const int64_t n0 = blockIdx.y * (int64_t)STEP_ROWS;
    if (v >= p.call.V) return;
    float soft[4], x[STEP_ROWS][4], gx[STEP_ROWS][4], ga[STEP_ROWS][4], h[STEP_ROWS][4];
    mn_load<4>(soft, (const float *)p.a_param.data, v);
#pragma unroll
    for (int r = 0; r < STEP_ROWS; r++) {
        const int64_t n = min(n0 + r, p.call.B - 1);
        mn_load<4>(x[r], mn_row<T>(p.x, n, 0, 0), v);
        mn_load<4>(gx[r], mn_row<T>(p.gx, n, 0, 0), v);
        mn_load<4>(ga[r], mn_row<T>(p.ga, n, 0, 0), v);
        mn_load<4>(h[r], mn_row<float>(p.h0, n, 0, 0), v);
    }
#pragma unroll
    for (int c = 0; c < 4; c++) soft[c] = mn_softplus(soft[c]);
#pragma unroll
    for (int r = 0; r < STEP_ROWS; r++) {
        const int64_t n = n0 + r;
        if (n >= p.call.B) return;
#pragma unroll
        for (int c = 0; c < 4; c++) {
            const cell z = cell_of(x[r][c], gx[r][c], ga[r][c], soft[c], !p.h0.data);
            h[r][c] = advance(z, h[r][c]);
        }
        T *y = mn_row<T>(p.y, n, 0, 0);
        float *last = mn_row<float>(p.h, n, 0, 0);
        if (y) mn_store<4>(y, v, h[r]);
        if (last) mn_store<4>(last, v, h[r]);
    }
}

/* `states` (B,T,V) takes what is in front of each token, `parts` (N,V) each sequence's sum. */
template <typename T>
__global__ void __launch_bounds__(THREADS)
lru_bwd_recurrent(const __grid_constant__ mn_lru_args p, int64_t tiles, float *states,
                  float *parts) {
    const int64_t n = blockIdx.x / tiles, v = blockIdx.x % tiles * THREADS + threadIdx.x;
    const int64_t V = p.call.V;
    if (v >= V) return;
    const mn_span span = mn_span_at(p.call, n);
    const float *h0 = mn_row<float>(p.h0, n, 0, 0);
    const float param = ((const float *)p.a_param.data)[v], soft = mn_softplus(param);
    float *kept = states + (span.b * p.call.T + span.t0) * V + v;
    float h = mn_get(h0, v), D = mn_get(mn_row<float>(p.cot.h, n, 0, 0), v), sum = 0.0f;
    for (int64_t t = 0; t < span.length; t++) {
        const cell c = cell_at<T>(p, span.b, span.t0 + t, v, soft, t == 0 && !h0);
        kept[t * V] = h;
        h = advance(c, h);
    }
    for (int64_t t = span.length - 1; t >= 0; t--) {
        const int64_t b = span.b, at = span.t0 + t;
        const cell c = cell_at<T>(p, b, at, v, soft, t == 0 && !h0);
        T *dx = mn_row<T>(p.grad.x, b, at, 0), *dgx = mn_row<T>(p.grad.gx, b, at, 0);
        T *dga = mn_row<T>(p.grad.ga, b, at, 0);
        D += mn_get(mn_row<T>(p.cot.y, b, at, 0), v);
        const float steep = fminf(1.0f / c.r, 2000.0f), in = c.i * c.x;
        const float dla = D * fmaf(-in * c.a * c.a, steep, c.a * kept[t * V]);
        if (dx) mn_put(dx + v, D * c.r * c.i);
        if (dgx) mn_put(dgx + v, D * c.r * in * (1.0f - c.i));
        if (dga) mn_put(dga + v, -8.0f * dla * soft * c.rate * (1.0f - c.rate));
        sum = fmaf(dla, c.rate, sum);
        D *= c.a;
    }
    float *dh0 = mn_row<float>(p.grad.h0, n, 0, 0);
    if (dh0) dh0[v] = D;
    parts[n * V + v] = -8.0f * mn_sigmoid_exact(param) * sum;
}

__global__ void __launch_bounds__(THREADS)
lru_reduce_grads(const __grid_constant__ mn_lru_args p, int64_t n_spans, const float *parts) {
    const int64_t v = blockIdx.x * (int64_t)THREADS + threadIdx.x;
    if (v >= p.call.V) return;
    float sum = 0.0f;
    for (int64_t n = 0; n < n_spans; n++) sum += parts[n * p.call.V + v];
    ((float *)p.grad.a_param.data)[v] = sum;
}

MN_CUDA_PLAN(lru_forward) {
    (void)args, (void)plan;
    return true;
}

MN_CUDA_LAUNCH(lru_forward) {
    (void)shared;
    const mn_lru_args &p = *(const mn_lru_args *)args;
    const int64_t tiles = mn_ceil_div(p.call.V, THREADS), blocks = tiles * mn_n_spans(p.call);
    const cudaStream_t on = (cudaStream_t)stream;
    if (blocks == 0) return cudaSuccess;
    if (blocks > INT32_MAX) return cudaErrorNotSupported;
    if (p.call.dtype == MN_BF16) {
        lru_fwd_recurrent<mn_bf16><<<(unsigned)blocks, THREADS, 0, on>>>(p, tiles);
    } else {
        lru_fwd_recurrent<float><<<(unsigned)blocks, THREADS, 0, on>>>(p, tiles);
    }
    return mn_launch_status();
}

/* Whether rows of the view can be read four numbers at a time. */
template <typename View>
static bool by_fours(const View &view, size_t bytes) {
    return (uintptr_t)view.data % (4 * bytes) == 0 && view.stride[0] % 4 == 0;
}

MN_CUDA_PLAN(lru_step) {
    (void)args, (void)plan;
    return true;
}

MN_CUDA_LAUNCH(lru_step) {
    const mn_lru_args &p = *(const mn_lru_args *)args;
    const cudaStream_t on = (cudaStream_t)stream;
    const size_t bytes = p.call.dtype == MN_BF16 ? 2 : 4;
    const int64_t rows = mn_ceil_div(p.call.B, STEP_ROWS);
    const bool few = p.call.B * p.call.V <= STEP_FEW;
    const bool fours = p.call.V % 4 == 0 && by_fours(p.x, bytes) && by_fours(p.gx, bytes) &&
                       by_fours(p.ga, bytes) && by_fours(p.y, bytes) && by_fours(p.h0, 4) &&
                       by_fours(p.h, 4) && (uintptr_t)p.a_param.data % 16 == 0;
    if (few || !fours || rows > 65535) return mn_lru_forward_cuda(args, shared, stream);
    const dim3 grid(mn_blocks(p.call.V, 4 * STEP_THREADS), (unsigned)rows);
    if (p.call.dtype == MN_BF16) lru_step_kernel<mn_bf16><<<grid, STEP_THREADS, 0, on>>>(p);
    else lru_step_kernel<float><<<grid, STEP_THREADS, 0, on>>>(p);
    return mn_launch_status();
}

MN_CUDA_PLAN(lru_backward) {
    const mn_call &call = *(const mn_call *)args;
    size_t states, parts;
    return mn_mul_size(&states, (size_t)(call.B * call.T), (size_t)call.V) &&
           mn_mul_size(&parts, (size_t)mn_n_spans(call), (size_t)call.V) &&
           mn_add_size(&states, states, parts) &&
           mn_mul_size(&plan->shared_bytes, states, sizeof(float));
}

MN_CUDA_LAUNCH(lru_backward) {
    const mn_lru_args &p = *(const mn_lru_args *)args;
    const int64_t tiles = mn_ceil_div(p.call.V, THREADS), spans = mn_n_spans(p.call);
    const int64_t blocks = tiles * spans;
    const cudaStream_t on = (cudaStream_t)stream;
    float *states = (float *)shared, *parts = states + p.call.B * p.call.T * p.call.V;
    if (tiles == 0) return cudaSuccess;
    if (blocks > INT32_MAX) return cudaErrorNotSupported;
    if (blocks > 0 && p.call.dtype == MN_BF16) {
        lru_bwd_recurrent<mn_bf16><<<(unsigned)blocks, THREADS, 0, on>>>(p, tiles, states, parts);
    } else if (blocks > 0) {
        lru_bwd_recurrent<float><<<(unsigned)blocks, THREADS, 0, on>>>(p, tiles, states, parts);
    }
    if (p.grad.a_param.data) {
        lru_reduce_grads<<<(unsigned)tiles, THREADS, 0, on>>>(p, spans, parts);
    }
    return mn_launch_status();
}

}    // namespace mneme::lru
