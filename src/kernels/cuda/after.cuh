/* after.cuh - launches that begin before the ones in front of them have ended.
 *
 * A kernel launched by mn_launch_early gets its blocks as soon as every block of the launch before
 * has said mn_let_next_begin or ended. What it does up to mn_wait_for_before may only read what is
 * older than all launches that may still be at work; behind it, all of them have ended. Every
 * thread of such a kernel waits, so that a launch that has ended tells that those before it have.
 * Machines before 9.0 have none of this: there a launch begins when the one before has ended. */
#ifndef MN_KERNELS_CUDA_AFTER_CUH
#define MN_KERNELS_CUDA_AFTER_CUH

#include "kernels/cuda/common.cuh"

__device__ inline void mn_let_next_begin(void) {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

__device__ inline void mn_wait_for_before(void) {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

template <typename... Arguments, typename... Given>
inline int mn_launch_early(void (*kernel)(Arguments...), dim3 blocks, int threads, size_t room,
                           cudaStream_t stream, const Given &...given) {
    cudaLaunchAttribute early = {};
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t how = {};
    how.gridDim = blocks, how.blockDim = dim3((unsigned)threads), how.dynamicSmemBytes = room;
    how.stream = stream, how.attrs = &early, how.numAttrs = 1;
    return (int)cudaLaunchKernelEx(&how, kernel, given...);
}

#endif
