/* fmax.cuh - a maximum that NaN passes through. fmaxf drops it, and a model that has gone wrong
 * would look sound. */
#ifndef MN_KERNELS_CUDA_PRIM_FMAX_CUH
#define MN_KERNELS_CUDA_PRIM_FMAX_CUH

namespace mneme {

__device__ inline float mn_fmax(float x, float y) {
    float z;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
    return z;
}

/* The double type has no such instruction; a comparison with NaN is false. */
__device__ inline double mn_fmax(double x, double y) {
    return x < y ? y : x;    // NaN where x is; y is a bound
}

}    // namespace mneme

#endif
