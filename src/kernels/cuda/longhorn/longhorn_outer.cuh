/* longhorn_outer.cuh - outer products onto cells by tensor cores, of longhorn_diag in bf16.
 *
 * What a token multiplies cells with, 1 - w_j k_i^2, and what it adds to them are outer products of
 * a row's number and a column's. Factors are split into two numbers of bf16 where one does not
 * hold them; a product of depth 8 has places for four such pairs. An element of a product depends
 * on its own row and column alone, so what is not finite goes no further than it does cell by
 * cell. */
#ifndef MN_KERNELS_CUDA_LONGHORN_LONGHORN_OUTER_CUH
#define MN_KERNELS_CUDA_LONGHORN_LONGHORN_OUTER_CUH

namespace mneme::longhorn::outer {

/* to = A b of depth 8 */
__device__ __forceinline__ void mma_k8_zero(float (&to)[4], unsigned a0, unsigned a1, unsigned b) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, "
        "{%7, %7, %7, %7};"
        : "=f"(to[0]), "=f"(to[1]), "=f"(to[2]), "=f"(to[3])
        : "r"(a0), "r"(a1), "r"(b), "f"(0.0f));
}

/* sum += A b of depth 8 */
__device__ __forceinline__ void mma_k8(float (&sum)[4], unsigned a0, unsigned a1, unsigned b) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, "
        "{%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a0), "r"(a1), "r"(b));
}

/* A pair of bf16, the first number in the lower half. */
__device__ __forceinline__ unsigned bf16_pair(float first, float second) {
    unsigned pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
    return pair;
}

__device__ __forceinline__ float rounded(float x) {
    return __uint_as_float(bf16_pair(0.0f, x));
}

/* Two numbers of bf16 whose sum is x. */
__device__ __forceinline__ unsigned split(float x) {
    const float high = rounded(x);
    return bf16_pair(high, x - high);
}

__device__ __forceinline__ float reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

}    // namespace mneme::longhorn::outer

#endif
