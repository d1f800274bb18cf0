/* bayes_bwd_wild.cuh - cotangents that are not finite, on the way back of the Bayesian Layer
 * (docs/internals/causality.md).
 *
 * What scans and products of spans take of them is 0 (mn_finite), so that gradients of later tokens
 * have the bits that they would have without. Gradients of a head's tokens up to the last one with
 * such a cotangent, all of which it reaches, become NaN in the end: a kernel before looks for it,
 * one behind does that. */
#ifndef MN_KERNELS_CUDA_BAYES_BAYES_BWD_WILD_CUH
#define MN_KERNELS_CUDA_BAYES_BAYES_BWD_WILD_CUH

#include "kernels/cuda/prim/common.cuh"
#include "kernels/cuda/prim/wild.cuh"

namespace mneme::bayes {

enum { WILD_THREADS = 256, WILD_PACK = 8 };

/* Whether a row of numbers has one that is not finite, from element `i` on by steps. */
template <typename T>
__device__ static bool row_is_wild(const T *x, int64_t width, int i, int step) {
    bool wild = false;
    if (!x) return false;
    const bool packs = (uintptr_t)x % (WILD_PACK * sizeof(T)) == 0 && width % WILD_PACK == 0;
    if (!packs) {
        for (int64_t j = i; j < width; j += step) wild = wild || mn_is_wild(mn_float(x[j]));
        return wild;
    }
    for (int64_t j = (int64_t)i * WILD_PACK; j < width; j += (int64_t)step * WILD_PACK) {
        float y[WILD_PACK], watch = 0.0f;
        mn_load<WILD_PACK>(y, x, j);
#pragma unroll
        for (int k = 0; k < WILD_PACK; k++) watch = fmaf(0.0f, y[k], watch);
        wild = wild || watch != 0.0f;
    }
    return wild;
}

/* wild[n * H + h]: 1 + the last token of sequence n and head h that has a cotangent that is not
 * finite; 0 before. 16 threads have a token of a head. */
template <typename T>
__global__ void __launch_bounds__(WILD_THREADS)
bayes_find_wild_kernel(const __grid_constant__ mn_bayes_args p, int *wild) {
    const mn_call &c = p.call;
    const int64_t rows = c.K * (p.theta.data ? 2 : 1);
    const int64_t row = blockIdx.x * (int64_t)(WILD_THREADS / 16) + threadIdx.x / 16;
    if (row >= c.B * c.T * c.H) return;
    const int64_t h = row % c.H, t = row / c.H % c.T, b = row / c.H / c.T;
    const int i = threadIdx.x % 16;
    bool found = row_is_wild(mn_row<T>(p.cot.o, b, t, h), c.V, i, 16);
    found = row_is_wild(mn_row<T>(p.cot.gainvec, b, t, h), c.G * rows, i, 16) || found;
    found = row_is_wild(mn_row<T>(p.cot.gain, b, t, h), c.G, i, 16) || found;
    found = row_is_wild(mn_row<T>(p.cot.kvar, b, t, h), c.G, i, 16) || found;
    found = row_is_wild(mn_row<T>(p.cot.qvar, b, t, h), c.G, i, 16) || found;
    if (!found) return;
    const int64_t n = mn_span_of(c, b, t);
    atomicMax(wild + n * c.H + h, (int)(t - mn_span_at(c, n).t0) + 1);
}

template <typename T>
__device__ static void fill_nan(const mn_out &to, const mn_span &span, int64_t h, int count,
                                int64_t width) {
    if (!to.data) return;
    for (int64_t i = threadIdx.x; i < count * width; i += WILD_THREADS) {
        mn_put(mn_row<T>(to, span.b, span.t0 + i / width, h) + i % width, NAN);
    }
}

/* A block has a head of a sequence. */
template <typename T>
__global__ void __launch_bounds__(WILD_THREADS)
bayes_give_wild_kernel(const __grid_constant__ mn_bayes_args p, const int *wild) {
    const mn_call &c = p.call;
    const int64_t n = blockIdx.x / c.H, h = blockIdx.x % c.H;
    const int64_t rows = c.K * (p.theta.data ? 2 : 1);
    const int count = wild[blockIdx.x];
    if (count == 0) return;
    const mn_span span = mn_span_at(c, n);
    fill_nan<T>(p.grad.q, span, h, count, c.K), fill_nan<T>(p.grad.k, span, h, count, c.K);
    fill_nan<T>(p.grad.v, span, h, count, c.V), fill_nan<T>(p.grad.la, span, h, count, c.K);
    fill_nan<T>(p.grad.theta, span, h, count, c.K);
    fill_nan<T>(p.grad.l2, span, h, count, 1), fill_nan<T>(p.grad.r2, span, h, count, c.G);
    float *dP = mn_row<float>(p.grad.P0, n, 0, h), *dM = mn_row<float>(p.grad.M0, n, 0, h);
    for (int64_t i = threadIdx.x; dP && i < c.G * rows * rows; i += WILD_THREADS) dP[i] = NAN;
    for (int64_t i = threadIdx.x; dM && i < rows * c.V; i += WILD_THREADS) dM[i] = NAN;
    if (p.grad.p0.data && !p.P0.data && threadIdx.x == 0) {
        mn_put(mn_row<T>(p.grad.p0, 0, 0, h), NAN);
    }
}

/* Before all else and behind it. `wild` has a number for each head of a sequence. */
template <typename T>
static int find_wild(const mn_bayes_args *p, int *wild, cudaStream_t on) {
    const mn_call &c = p->call;
    const int64_t heads = mn_n_spans(c) * c.H, rows = c.B * c.T * c.H;
    const int code = (int)cudaMemsetAsync(wild, 0, (size_t)heads * sizeof *wild, on);
    if (code != cudaSuccess || rows == 0) return code;
    bayes_find_wild_kernel<T><<<mn_blocks(rows, WILD_THREADS / 16), WILD_THREADS, 0, on>>>(*p,
                                                                                        wild);
    return mn_launch_status();
}

template <typename T>
static int give_wild(const mn_bayes_args *p, const int *wild, cudaStream_t on) {
    const int64_t heads = mn_n_spans(p->call) * p->call.H;
    bayes_give_wild_kernel<T><<<(unsigned)heads, WILD_THREADS, 0, on>>>(*p, wild);
    return mn_launch_status();
}

}    // namespace mneme::bayes

#endif
