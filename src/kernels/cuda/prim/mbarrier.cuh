/* mbarrier.cuh - what code for Hopper (sm_90a) starts from: whether it is compiled for, whether the
 * device is one, and barriers in shared memory between those that bring something and those that
 * use it, which all machines from 9.0 on have. */
#ifndef MN_KERNELS_CUDA_PRIM_MBARRIER_CUH
#define MN_KERNELS_CUDA_PRIM_MBARRIER_CUH

#include <cuda/ptx>

#include "kernels/cuda/prim/common.cuh"
#include "kernels/cuda/prim/device_props.h"

namespace mneme {

/* Machine code for sm_90a has these instructions; what is compiled for others is never launched. */
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define MN_HAS_WGMMA 1
#else
#define MN_HAS_WGMMA 0
#endif

/* Whether this device runs what was compiled for sm_90a. */
inline bool mn_device_is_sm90(void) {
    const mn_device_props m = mn_device_props_current();
    return m.major == 9 && m.minor == 0;
}

__device__ inline uint32_t mn_smem_addr(const void *at) {
    return (uint32_t)__cvta_generic_to_shared(at);
}

/* Shows products and TMA what this thread wrote to shared memory, or others did before
 * a barrier that it has passed. Those who copy by themselves must not do it: it would wait for all
 * copies that they have under way. */
__device__ inline void mn_fence_proxy_async(void) {
#if MN_HAS_WGMMA
    cuda::ptx::fence_proxy_async(cuda::ptx::space_shared);
#endif
}

/* ---- barriers -------------------------------------------------------------------------------- */

__device__ inline void mn_mbarrier_init(uint64_t *mbar, int n_arrivals) {
    cuda::ptx::mbarrier_init(mbar, (uint32_t)n_arrivals);
}

__device__ inline void mn_mbarrier_arrive(uint64_t *mbar) {
    cuda::ptx::mbarrier_arrive(mbar);
}

/* Waits until the barrier's phase `phase` (0, 1, 0, ...) is over. The loop is assembly:
 * nvcc does not unroll what waits in a loop of C++. */
__device__ inline void mn_mbarrier_wait(const uint64_t *mbar, int phase) {
#if __CUDA_ARCH__ >= 900
    asm volatile("{\n\t.reg .pred done;\n"
                 "again:\n\t"
                 "mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n\t"
                 "@!done bra again;\n\t}" ::"r"(mn_smem_addr(mbar)), "r"(phase) : "memory");
#endif
}

/* This warp has done with what lies behind the barrier; to racecheck only lane 0 has. */
__device__ inline void mn_mbarrier_arrive_warp(uint64_t *mbar) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) mn_mbarrier_arrive(mbar);
}

}    // namespace mneme

#endif
