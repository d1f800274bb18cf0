/* lru.cu - the real-gated linear recurrent unit (see ref/lru.c), sequences by segments of eight
 * tokens side by side, and one token of many sequences. What a channel does at a token is
 * lru_step.cuh's.
 *
 * A segment's tokens make one map of the state in front of it, h = A h + H with A the product of
 * its decays and H its state from nothing. A block has 32 channels, a lane each, and a warp for
 * each of 16 segments of a chunk: all write their map, each goes through those in front of it from
 * the state of the chunk before, and then through its own tokens once more, in their order.
 * Cotangents of states go back by such maps in the other direction. */
#include "kernels/cuda/lru/lru_step.cuh"

namespace mneme::lru {

enum { THREADS = 64 };

enum {
    CHANNELS = 32,
    SEGMENT = 8,     // tokens
    SEGMENTS = 16,   // of a chunk, a warp each
    CHUNK = SEGMENT * SEGMENTS,
    SCAN_THREADS = 32 * SEGMENTS,
};

/* A map of a segment; A is -1 where it is 0 since a decay is, not since a product of small ones is:
 * an infinite state is NaN behind the former and infinite behind the latter. */
struct segment_map {
    float A, H;
};

__device__ inline float apply(const segment_map &map, float h) {
    if (isfinite(h)) return fmaf(fmaxf(map.A, 0.0f), h, map.H);
    return map.A < 0.0f ? NAN : h + map.H;
}

/* Takes a decay into the product A. */
__device__ inline float product(float A, float a) {
    return A < 0.0f || a == 0.0f ? -1.0f : A * a;
}

/* What a thread works on: channel v of a sequence of `length` tokens from row t0 of b on. */
struct channel {
    mn_span span;
    int64_t v;
    float soft;
    bool there, fresh;    // the channel is one; the first token has no state in front of it
};

__device__ inline channel channel_at(const mn_lru_args &p, int64_t tiles) {
    channel at;
    at.span = mn_span_at(p.call, blockIdx.x / tiles);
    at.v = blockIdx.x % tiles * CHANNELS + threadIdx.x % 32;
    at.there = at.v < p.call.V;
    at.soft = at.there ? mn_softplus(((const float *)p.a_param.data)[at.v]) : 0.0f;
    at.fresh = !p.h0.data;
    return at;
}

template <typename T, typename View>
__device__ inline float number_at(const View &view, const channel &at, int64_t t) {
    const T *row = mn_row<T>(view, at.span.b, at.span.t0 + t, 0);
    return row && at.there && t < at.span.length ? mn_float(row[at.v]) : 0.0f;
}

/* Tokens behind the end have a decay of 1 and add nothing. */
template <typename T>
__device__ inline cell cell_at(const mn_lru_args &p, const channel &at, int64_t t) {
    if (t >= at.span.length) return { 0.0f, 0.0f, 0.0f, 1.0f, 0.0f };
    return cell_of(number_at<T>(p.x, at, t), number_at<T>(p.gx, at, t),
                   number_at<T>(p.ga, at, t), at.soft, t == 0 && at.fresh);
}

/* Takes `in` through the maps of warps [0, warp) and all; every thread of a chunk calls. */
struct carried {
    float in, out;    // of the warp's segment; of the chunk
};

__device__ inline carried pass_maps(segment_map (*maps)[32], const segment_map &own, int rank,
                                    float in) {
    const int lane = threadIdx.x % 32;
    maps[rank][lane] = own;
    __syncthreads();
    carried c = { in, in };
    for (int i = 0; i < SEGMENTS; i++) {
        if (i == rank) c.in = c.out;
        c.out = apply(maps[i][lane], c.out);
    }
    return c;
}

/* The row of the first segment of sequence n among those of all. */
__device__ inline int64_t first_segment(const mn_call &call, const mn_span &span, int64_t n) {
    return call.cu_seqlens ? span.t0 / SEGMENT + n : n * ((call.T + SEGMENT - 1) / SEGMENT);
}

/* The sequence forward. Stores y where it is wanted, the last state, and in `states` (segments, V),
 * where that is given, the state in front of each segment. */
template <typename T>
__device__ inline void scan_forward(const mn_lru_args &p, const channel &at, int64_t n,
                                    float *states, segment_map (*maps)[SEGMENTS][32]) {
    const int warp = threadIdx.x / 32;
    const int64_t segment0 = first_segment(p.call, at.span, n);
    float h = at.there ? mn_get(mn_row<float>(p.h0, n, 0, 0), at.v) : 0.0f;
    for (int64_t chunk = 0; chunk * CHUNK < at.span.length; chunk++) {
        const int64_t first = chunk * CHUNK + warp * SEGMENT;
        float a[SEGMENT], u[SEGMENT];
        segment_map map = { 1.0f, 0.0f };
#pragma unroll
        for (int j = 0; j < SEGMENT; j++) {
            const cell c = cell_at<T>(p, at, first + j);
            a[j] = c.a, u[j] = c.r * c.i * c.x;
            map = { product(map.A, a[j]), fmaf(a[j], map.H, u[j]) };
        }
        const carried c = pass_maps(maps[chunk & 1], map, warp, h);
        h = c.out;
        if (!at.there || first >= at.span.length) continue;
        if (states) states[(segment0 + first / SEGMENT) * p.call.V + at.v] = c.in;
        float z = c.in;
#pragma unroll
        for (int j = 0; j < SEGMENT; j++) {
            z = fmaf(a[j], z, u[j]);
            T *y = mn_row<T>(p.y, at.span.b, at.span.t0 + first + j, 0);
            if (y && !states && first + j < at.span.length) mn_put(y + at.v, z);
        }
    }
    float *last = mn_row<float>(p.h, n, 0, 0);
    if (last && !states && at.there && warp == 0) last[at.v] = h;
}

template <typename T>
__global__ void __launch_bounds__(SCAN_THREADS)
lru_fwd_scan(const __grid_constant__ mn_lru_args p, int64_t tiles) {
    __shared__ segment_map maps[2][SEGMENTS][32];
    scan_forward<T>(p, channel_at(p, tiles), blockIdx.x / tiles, NULL, maps);
}

/* Gradients of one token, and what they add to that of a_param; D is the cotangent of its state,
 * `before` the state in front of it. */
template <typename T>
__device__ inline float token_grads(const mn_lru_args &p, const channel &at, int64_t t,
                                    const cell &c, float D, float before) {
    const int64_t b = at.span.b, row = at.span.t0 + t;
    T *dx = mn_row<T>(p.grad.x, b, row, 0), *dgx = mn_row<T>(p.grad.gx, b, row, 0);
    T *dga = mn_row<T>(p.grad.ga, b, row, 0);
    const float steep = fminf(1.0f / c.r, 2000.0f), in = c.i * c.x;
    const float dla = D * fmaf(-in * c.a * c.a, steep, c.a * before);
    if (dx) mn_put(dx + at.v, D * c.r * c.i);
    if (dgx) mn_put(dgx + at.v, D * c.r * in * (1.0f - c.i));
    if (dga) mn_put(dga + at.v, -8.0f * dla * at.soft * c.rate * (1.0f - c.rate));
    return dla * c.rate;
}

/* The sum of warps' numbers in their order, in the first warp. */
__device__ inline float sum_warps(float (*sums)[32], float x) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    sums[warp][lane] = x;
    __syncthreads();
    float sum = 0.0f;
    for (int i = 0; i < SEGMENTS && warp == 0; i++) sum += sums[i][lane];
    return sum;
}

/* Back over the sequence, from the states in front of its segments. `parts` (N,V) takes its share
 * of the gradient of a_param. */
template <typename T>
__device__ inline void scan_backward(const mn_lru_args &p, const channel &at, int64_t n,
                                     const float *states, float *parts,
                                     segment_map (*maps)[SEGMENTS][32], float (*sums)[32]) {
    const int warp = threadIdx.x / 32, rank = SEGMENTS - 1 - warp;    // the last segment begins
    const int64_t segment0 = first_segment(p.call, at.span, n);
    float E = at.there ? mn_get(mn_row<float>(p.cot.h, n, 0, 0), at.v) : 0.0f, sum = 0.0f;
    for (int64_t chunk = (at.span.length + CHUNK - 1) / CHUNK - 1; chunk >= 0; chunk--) {
        const int64_t first = chunk * CHUNK + warp * SEGMENT;
        cell c[SEGMENT];
        float dy[SEGMENT], before[SEGMENT];
        segment_map map = { 1.0f, 0.0f };
#pragma unroll
        for (int j = SEGMENT - 1; j >= 0; j--) {
            c[j] = cell_at<T>(p, at, first + j);
            dy[j] = number_at<T>(p.cot.y, at, first + j);
            map = { product(map.A, c[j].a), c[j].a * (map.H + dy[j]) };
        }
        const carried by = pass_maps(maps[chunk & 1], map, rank, E);
        E = by.out;
        if (!at.there || first >= at.span.length) continue;
        before[0] = states[(segment0 + first / SEGMENT) * p.call.V + at.v];
#pragma unroll
        for (int j = 1; j < SEGMENT; j++) before[j] = advance(c[j - 1], before[j - 1]);
        float D = by.in;
#pragma unroll
        for (int j = SEGMENT - 1; j >= 0; j--) {
            if (first + j >= at.span.length) continue;
            D += dy[j];
            sum += token_grads<T>(p, at, first + j, c[j], D, before[j]);
            D *= c[j].a;
        }
    }
    float *dh0 = mn_row<float>(p.grad.h0, n, 0, 0);
    sum = sum_warps(sums, sum);
    if (!at.there || warp > 0) return;
    if (dh0) dh0[at.v] = E;
    const float param = ((const float *)p.a_param.data)[at.v];
    parts[n * p.call.V + at.v] = -8.0f * mn_sigmoid_exact(param) * sum;
}

template <typename T>
__global__ void __launch_bounds__(SCAN_THREADS)
lru_bwd_scan(const __grid_constant__ mn_lru_args p, int64_t tiles, float *states, float *parts) {
    __shared__ segment_map maps[2][SEGMENTS][32];
    __shared__ float sums[SEGMENTS][32];
    const channel at = channel_at(p, tiles);
    const int64_t n = blockIdx.x / tiles;
    scan_forward<T>(p, at, n, states, maps);
    __syncthreads();
    scan_backward<T>(p, at, n, states, parts, maps, sums);
}

/* One token: a thread has four neighbouring channels of ROWS sequences, so that what belongs to a
 * channel alone is made once for them; of one sequence where all states are few. */
enum { STEP_ROWS = 4, STEP_THREADS = 128, STEP_FEW = 1 << 17, STEP_FEW_THREADS = 32 };

template <typename T, int ROWS, int WIDTH>
__global__ void __launch_bounds__(WIDTH)
lru_step_kernel(const __grid_constant__ mn_lru_args p) {
    const int64_t v = 4 * (blockIdx.x * (int64_t)WIDTH + threadIdx.x);
    const int64_t n0 = blockIdx.y * (int64_t)ROWS;
    if (v >= p.call.V) return;
    float soft[4], x[ROWS][4], gx[ROWS][4], ga[ROWS][4], h[ROWS][4];
    mn_load<4>(soft, (const float *)p.a_param.data, v);
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        const int64_t n = min(n0 + r, p.call.B - 1);
        mn_load<4>(x[r], mn_row<T>(p.x, n, 0, 0), v);
        mn_load<4>(gx[r], mn_row<T>(p.gx, n, 0, 0), v);
        mn_load<4>(ga[r], mn_row<T>(p.ga, n, 0, 0), v);
        mn_load<4>(h[r], mn_row<float>(p.h0, n, 0, 0), v);
    }
#pragma unroll
    for (int c = 0; c < 4; c++) soft[c] = mn_softplus(soft[c]);
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
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
    const int64_t tiles = mn_ceil_div(p.call.V, CHANNELS), blocks = tiles * mn_n_spans(p.call);
    const cudaStream_t on = (cudaStream_t)stream;
    if (blocks == 0) return cudaSuccess;
    if (blocks > INT32_MAX) return cudaErrorNotSupported;
    const auto kernel = p.call.dtype == MN_BF16 ? lru_fwd_scan<mn_bf16> : lru_fwd_scan<float>;
    kernel<<<(unsigned)blocks, SCAN_THREADS, 0, on>>>(p, tiles);
    return mn_launch_status();
}

/* Whether rows of the view can be read four numbers at a time. */
template <typename View>
static bool by_fours(const View &view, size_t bytes) {
    return (uintptr_t)view.data % (4 * bytes) == 0 && view.stride[0] % 4 == 0;
}

template <typename T, int ROWS, int WIDTH>
static int step_by(const mn_lru_args &p, cudaStream_t stream) {
    const dim3 grid(mn_blocks(p.call.V, 4 * WIDTH), (unsigned)mn_ceil_div(p.call.B, ROWS));
    lru_step_kernel<T, ROWS, WIDTH><<<grid, WIDTH, 0, stream>>>(p);
    return mn_launch_status();
}

template <typename T>
static int step_of(const mn_lru_args &p, cudaStream_t stream) {
    const bool few = p.call.B <= 65535 && p.call.B * p.call.V <= STEP_FEW;
    return few ? step_by<T, 1, STEP_FEW_THREADS>(p, stream)
               : step_by<T, STEP_ROWS, STEP_THREADS>(p, stream);
}

MN_CUDA_PLAN(lru_step) {
    (void)args, (void)plan;
    return true;
}

MN_CUDA_LAUNCH(lru_step) {
    const mn_lru_args &p = *(const mn_lru_args *)args;
    const cudaStream_t on = (cudaStream_t)stream;
    const size_t bytes = p.call.dtype == MN_BF16 ? 2 : 4;
    const bool fours = p.call.V % 4 == 0 && by_fours(p.x, bytes) && by_fours(p.gx, bytes) &&
                       by_fours(p.ga, bytes) && by_fours(p.y, bytes) && by_fours(p.h0, 4) &&
                       by_fours(p.h, 4) && (uintptr_t)p.a_param.data % 16 == 0;
    if (!fours || p.call.B == 0 || mn_ceil_div(p.call.B, STEP_ROWS) > 65535) {
        return mn_lru_forward_cuda(args, shared, stream);
    }
    return p.call.dtype == MN_BF16 ? step_of<mn_bf16>(p, on) : step_of<float>(p, on);
}

MN_CUDA_PLAN(lru_backward) {
    const mn_call &call = *(const mn_call *)args;
    size_t states, parts;
    return mn_mul_size(&states, (size_t)mn_tile_slots(call, SEGMENT), (size_t)call.V) &&
           mn_mul_size(&parts, (size_t)mn_n_spans(call), (size_t)call.V) &&
           mn_add_size(&states, states, parts) &&
           mn_mul_size(&plan->shared_bytes, states, sizeof(float));
}

MN_CUDA_LAUNCH(lru_backward) {
    const mn_lru_args &p = *(const mn_lru_args *)args;
    const int64_t tiles = mn_ceil_div(p.call.V, CHANNELS), spans = mn_n_spans(p.call);
    const int64_t blocks = tiles * spans;
    const cudaStream_t on = (cudaStream_t)stream;
    float *states = (float *)shared;
    float *parts = states + mn_tile_slots(p.call, SEGMENT) * p.call.V;
    if (tiles == 0) return cudaSuccess;
    if (blocks > INT32_MAX) return cudaErrorNotSupported;
    const auto kernel = p.call.dtype == MN_BF16 ? lru_bwd_scan<mn_bf16> : lru_bwd_scan<float>;
    if (blocks > 0) kernel<<<(unsigned)blocks, SCAN_THREADS, 0, on>>>(p, tiles, states, parts);
    if (p.grad.a_param.data) {
        lru_reduce_grads<<<mn_blocks(p.call.V, THREADS), THREADS, 0, on>>>(p, spans, parts);
    }
    return mn_launch_status();
}

}    // namespace mneme::lru
