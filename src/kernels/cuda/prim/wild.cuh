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

}    // namespace mneme

#endif
