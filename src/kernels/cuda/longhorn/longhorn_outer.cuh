/* longhorn_outer.cuh - outer products onto cells by tensor cores, of longhorn_diag in bf16.
 *
 * What a token multiplies cells with, 1 - w_j k_i^2, and what it adds to them are outer products of
 * a row's number and a column's. Factors are split into two numbers of bf16 where one does not
 * hold them; a product of depth 8 has places for four such pairs. An element of a product depends
 * on its own row and column alone, so what is not finite goes no further than it does cell by
 * cell. */
#ifndef MN_KERNELS_CUDA_LONGHORN_LONGHORN_OUTER_CUH
#define MN_KERNELS_CUDA_LONGHORN_LONGHORN_OUTER_CUH

#include "kernels/cuda/prim/mma_bf16.cuh"

namespace mneme::longhorn::outer {

__device__ __forceinline__ float reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

}    // namespace mneme::longhorn::outer

#endif
