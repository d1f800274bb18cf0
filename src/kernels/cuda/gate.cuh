/* gate.cuh - activations with their slopes. */
#ifndef MN_KERNELS_CUDA_GATE_CUH
#define MN_KERNELS_CUDA_GATE_CUH

struct mn_gate {
    float value, slope;
};

/* The division may be off by two roundings, in a third of the instructions; where exp(-x) is past
 * 2^126 it gives 0. */
__device__ inline float mn_sigmoid(float x) {
    return __fdividef(1.0f, 1.0f + expf(-x));
}

/* x sigmoid(x) */
__device__ inline mn_gate mn_silu(float x) {
    const float s = mn_sigmoid(x);
    return { x * s, s * fmaf(x, 1.0f - s, 1.0f) };
}

__device__ inline float mn_softplus(float x) {
    return fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x)));
}

#endif
