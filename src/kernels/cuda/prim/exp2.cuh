/* exp2.cuh - powers of two by one instruction. */
#ifndef MN_KERNELS_CUDA_PRIM_EXP2_CUH
#define MN_KERNELS_CUDA_PRIM_EXP2_CUH

namespace mneme {

/* 2^x, to the last bit or two; 0 where it is no normal number */
__device__ inline float mn_exp2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ inline float2 mn_exp2(float2 x) {
    return make_float2(mn_exp2(x.x), mn_exp2(x.y));
}

}    // namespace mneme

#endif
