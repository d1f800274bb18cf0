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

}    // namespace mneme

#endif
