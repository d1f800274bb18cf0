/* mma_bf16.cuh - products of bf16 of depth 8 on tensor cores, and numbers of bf16 in pairs. */
#ifndef MN_KERNELS_CUDA_PRIM_MMA_BF16_CUH
#define MN_KERNELS_CUDA_PRIM_MMA_BF16_CUH

namespace mneme {

/* (16,8) += (16,8) (8,8) */
__device__ __forceinline__ void mn_mma_bf16_k8(float (&sum)[4], uint2 a, unsigned b) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, "
        "{%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a.x), "r"(a.y), "r"(b));
}

/* (16,8) = (16,8) (8,8) */
__device__ __forceinline__ void mn_mma_bf16_k8_zero(float (&to)[4], uint2 a, unsigned b) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, "
        "{%7, %7, %7, %7};"
        : "=f"(to[0]), "=f"(to[1]), "=f"(to[2]), "=f"(to[3])
        : "r"(a.x), "r"(a.y), "r"(b), "f"(0.0f));
}

/* A pair of bf16, the first number in the lower half. */
__device__ __forceinline__ unsigned mn_bf16x2_of(float first, float second) {
    unsigned pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
    return pair;
}

__device__ __forceinline__ float mn_bf16_rounded(float x) {
    return __uint_as_float(mn_bf16x2_of(0.0f, x));
}

/* Two numbers of bf16 whose sum is x. */
__device__ __forceinline__ unsigned mn_bf16_split(float x) {
    const float high = mn_bf16_rounded(x);
    return mn_bf16x2_of(high, x - high);
}

}    // namespace mneme

#endif
