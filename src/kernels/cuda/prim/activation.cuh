/* activation.cuh - sigmoid, SiLU and softplus: what functions are made of (kernels/functions.h),
 * and kernels that apply one of them. */
#ifndef MN_KERNELS_CUDA_PRIM_ACTIVATION_CUH
#define MN_KERNELS_CUDA_PRIM_ACTIVATION_CUH

namespace mneme {

struct mn_activation {
    float value, slope;
};

/* Four instructions. The exponential is off by about |x| 2^-24 of itself, most where it and the
 * sigmoid are smallest; below the smallest normal float it gives 0. */
__device__ inline float mn_sigmoid(float x) {
    float e, y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(-1.44269504f * x));
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(1.0f + e));
    return y;
}

/* All digits above 0; below, about |x| 2^-24 of itself. */
__device__ inline float mn_sigmoid_exact(float x) {
    return 1.0f / (1.0f + expf(-x));
}

/* All digits on both sides. */
__device__ inline float mn_sigmoid_tail(float x) {
    const float e = expf(-fabsf(x)), s = 1.0f / (1.0f + e);
    return x >= 0.0f ? s : e * s;
}

/* x sigmoid(x) */
__device__ inline mn_activation mn_silu(float x) {
    const float s = mn_sigmoid(x);
    return { x * s, s * fmaf(x, 1.0f - s, 1.0f) };
}

__device__ inline float mn_softplus(float x) {
    return fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x)));
}

}    // namespace mneme

#endif
