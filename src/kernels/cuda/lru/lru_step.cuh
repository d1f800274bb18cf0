/* lru_step.cuh - channels of the real-gated linear recurrent unit through one token (see
 * ref/lru.c), states in place. A thread has a channel. */
#ifndef MN_KERNELS_CUDA_LRU_LRU_STEP_CUH
#define MN_KERNELS_CUDA_LRU_LRU_STEP_CUH

#include "kernels/cuda/prim/activation.cuh"
#include "kernels/cuda/prim/common.cuh"

namespace mneme::lru {

struct cell {
    float x, i, rate, a, r;
};

/* sqrt(1 - exp(-y)) for y >= 0, where a = exp(-y / 2): a series where 1 - a^2 would lose digits, of
 * which y^7 / 40320 is left out. */
__device__ inline float input_scale(float y, float a) {
    float sum = fmaf(y, 1.0f / 5040.0f, -1.0f / 720.0f), root;
    sum = fmaf(sum, y, 1.0f / 120.0f);
    sum = fmaf(sum, y, -1.0f / 24.0f);
    sum = fmaf(sum, y, 1.0f / 6.0f);
    sum = fmaf(sum, y, -0.5f);
    sum = fmaf(sum * y, y, y);
    const float square = y < 0.5f ? sum : fmaf(-a, a, 1.0f);
    asm("sqrt.approx.f32 %0, %1;" : "=f"(root) : "f"(square));
    return root;
}

/* From x and the numbers of both gates. The decay is exact to its last digit, as errors of it add
 * up over all tokens that a state lasts; gates are off by |x| 2^-24 of themselves. */
__device__ inline cell cell_of(float x, float gx, float ga, float soft, bool first) {
    cell c;
    c.x = x;
    c.i = mn_sigmoid(gx);
    c.rate = mn_sigmoid(ga);
    const float la = -8.0f * c.rate * soft, a = expf(la);
    c.a = first ? 0.0f : a;
    c.r = first ? 1.0f : input_scale(-2.0f * la, a);
    return c;
}

__device__ inline float advance(const cell &c, float h) {
    return fmaf(c.a, h, c.r * c.i * c.x);
}

enum { STEP_COLUMNS = 32 };    // of a stage of a megakernel

/* Channels from `column` on of sequence n. */
template <typename T, typename Block>
__device__ inline void lru_step(const mn_lru_args &p, int64_t n, int64_t, int64_t column,
                                unsigned char *) {
    const int64_t v = column + threadIdx.x;
    if (threadIdx.x >= STEP_COLUMNS || v >= p.call.V) return;
    const float *h0 = mn_row<float>(p.h0, n, 0, 0);
    float *last = mn_row<float>(p.h, n, 0, 0);
    T *y = mn_row<T>(p.y, n, 0, 0);
    const float soft = mn_softplus(((const float *)p.a_param.data)[v]);
    const cell c = cell_of(mn_float(mn_row<T>(p.x, n, 0, 0)[v]),
                           mn_float(mn_row<T>(p.gx, n, 0, 0)[v]),
                           mn_float(mn_row<T>(p.ga, n, 0, 0)[v]), soft, !h0);
    const float h = advance(c, mn_get(h0, v));
    if (y) mn_put(y + v, h);
    if (last) last[v] = h;
}

inline bool lru_step_supported(const mn_lru_args *) {
    return true;
}

}    // namespace mneme::lru

#endif
