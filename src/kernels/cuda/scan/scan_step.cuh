/* scan_step.cuh - channels of the selective scan through one token (see ref/scan.c), states in
 * place.
 *
 *   d = softplus(dt + dt_bias)     h = exp(d A) h + d u B     y = (sum C h + D u) silu(z)
 *
 * Sixteen lanes have a channel, each every 16th state of it. They add up as the lanes of the scan
 * over many tokens do (scan.cu), so that both have the same bits. */
#ifndef MN_KERNELS_CUDA_SCAN_SCAN_STEP_CUH
#define MN_KERNELS_CUDA_SCAN_SCAN_STEP_CUH

#include "kernels/cuda/prim/activation.cuh"
#include "kernels/cuda/prim/block.cuh"
#include "kernels/cuda/prim/common.cuh"

namespace mneme::scan {

enum { STEP_THREADS = 256, STEP_LANES = 16, STEP_COLUMNS = STEP_THREADS / STEP_LANES };

/* The states of channel v of sequence n that this lane has; returns its part of sum C h. */
template <typename T>
__device__ inline float step_states(const mn_scan_args &p, int64_t n, int64_t v, float d, float u) {
    const float *h0 = mn_row<float>(p.h0, n, 0, 0);
    float *last = mn_row<float>(p.h, n, 0, 0), sum = 0.0f;
    const T *A = (const T *)p.A.data, *B = mn_row<T>(p.Bm, n, 0, 0), *C = mn_row<T>(p.Cm, n, 0, 0);
    for (int64_t k = threadIdx.x % STEP_LANES; k < p.call.K; k += STEP_LANES) {
        const int64_t at = v * p.call.K + k;
        const float h = fmaf(expf(d * mn_float(A[at])), mn_get(h0, at), d * u * mn_float(B[k]));
        sum = fmaf(mn_float(C[k]), h, sum);
        if (last) last[at] = h;
    }
    return sum;
}

/* Channels from `column` on of sequence n. */
template <typename T, typename Block>
__device__ inline void scan_step(const mn_scan_args &p, int64_t n, int64_t, int64_t column,
                                 unsigned char *) {
    static_assert(Block::size == STEP_THREADS, "a step's threads");
    const int64_t v = column + threadIdx.x / STEP_LANES;
    const bool there = v < p.call.V;
    float sum = 0.0f, u = 0.0f;
    if (there) {
        const float bias = mn_get((const T *)p.dt_bias.data, v);
        const float x = mn_float(mn_row<T>(p.dt, n, 0, 0)[v]) + bias;
        u = mn_float(mn_row<T>(p.u, n, 0, 0)[v]);
        sum = step_states<T>(p, n, v, p.softplus ? mn_softplus(x) : x, u);
    }
    __syncwarp();
#pragma unroll
    for (int lanes = STEP_LANES / 2; lanes > 0; lanes /= 2) {
        sum += __shfl_xor_sync(0xffffffffu, sum, lanes);
    }
    if (!there || threadIdx.x % STEP_LANES > 0 || !p.y.data) return;
    const T *z = mn_row<T>(p.z, n, 0, 0);
    const float D = mn_get((const T *)p.D.data, v);
    const float x = z ? mn_float(z[v]) : 0.0f, gate = z ? x * mn_sigmoid_tail(x) : 1.0f;
    mn_put(mn_row<T>(p.y, n, 0, 0) + v, gate * fmaf(D, u, sum));
}

inline bool scan_step_supported(const mn_scan_args *) {
    return true;
}

}    // namespace mneme::scan

#endif
