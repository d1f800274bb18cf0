/* wild.cuh - numbers that are not finite, where a product takes in tokens that some of its rows may
 * not see (docs/internals/causality.md).
 *
 * What a row may not see has a weight of 0 there, and 0 times an infinity or NaN is NaN. Where
 * products select, such weights are left out; where they cannot, as those of tensor cores, tokens
 * go in with 0 in the place of what is not finite, and the rows that see it get it added
 * afterwards. With finite numbers all bits are the same. */
#ifndef MN_KERNELS_CUDA_PRIM_WILD_CUH
#define MN_KERNELS_CUDA_PRIM_WILD_CUH

#include "kernels/cuda/prim/common.cuh"

namespace mneme {

/* x 0 + sum: 0 as long as no number passed that is not finite. */
__device__ inline uint32_t mn_bf16x2_watch(uint32_t x, uint32_t sum) {
    uint32_t y;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(y) : "r"(x), "r"(0u), "r"(sum));
    return y;
}

/* Which halves of a pair are not finite. */
__device__ inline uint32_t mn_bf16x2_wild(uint32_t x) {
    const uint32_t low = (x & 0x7f80u) == 0x7f80u ? 0xffffu : 0u;
    return low | ((x & 0x7f800000u) == 0x7f800000u ? 0xffff0000u : 0u);
}

__device__ inline bool mn_is_wild(float x) {
    return (__float_as_uint(x) & 0x7f800000u) == 0x7f800000u;
}

__device__ inline bool mn_is_wild(double x) {
    return (__double2hiint(x) & 0x7ff00000) == 0x7ff00000;
}

/* x, or 0 where it is not finite. */
__device__ inline float mn_finite(float x) {
    return mn_is_wild(x) ? 0.0f : x;
}

/* Whether one of eight numbers of bf16 is not finite. */
__device__ inline bool mn_bf16x8_is_wild(const uint4 &x) {
    const uint32_t pairs[4] = { x.x, x.y, x.z, x.w };
    uint32_t watch = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) watch = mn_bf16x2_watch(pairs[i], watch);
    return (watch & 0x7fff7fffu) != 0;
}

/* Eight numbers of bf16, those that are not finite as 0; whether there were any. */
__device__ inline bool mn_bf16x8_tame(uint4 &x) {
    if (!mn_bf16x8_is_wild(x)) return false;
    x.x &= ~mn_bf16x2_wild(x.x), x.y &= ~mn_bf16x2_wild(x.y);
    x.z &= ~mn_bf16x2_wild(x.z), x.w &= ~mn_bf16x2_wild(x.w);
    return true;
}

}    // namespace mneme

#endif
