/* pdl.cuh - launches that begin before the ones in front of them have ended.
 *
 * A kernel launched by mn_launch_pdl gets its blocks as soon as every block of the launch before
 * has said mn_pdl_launch_dependents or ended. What it does up to mn_pdl_wait may only read what
 * is older than all launches that may still be at work; behind it, all of them have ended. Every
 * thread of such a kernel waits, or one block does at its end, so that a launch that has ended
 * shows that those before it have. Machines before 9.0 have none of this: there a launch begins
 * when the one before has ended. */
#ifndef MN_KERNELS_CUDA_PRIM_PDL_CUH
#define MN_KERNELS_CUDA_PRIM_PDL_CUH

#include "kernels/cuda/prim/common.cuh"

namespace mneme {

__device__ inline void mn_pdl_launch_dependents(void) {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

__device__ inline void mn_pdl_wait(void) {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/* Arguments to shared memory, all at once: from where they lie each first look at a line of them
 * waits for the second cache, and these looks come one after the other. A barrier has to follow. */
template <typename X>
__device__ inline void mn_load_args_to_smem(X *to, const X &arguments) {
    static_assert(sizeof(X) % 16 == 0 && alignof(X) == 16, "whole packs");
    const char *from = (const char *)&arguments;
    for (int i = threadIdx.x; i < (int)(sizeof(X) / 16); i += blockDim.x) {
        uint4 vec;
        asm("ld.v4.u32 {%0,%1,%2,%3}, [%4];"
            : "=r"(vec.x), "=r"(vec.y), "=r"(vec.z), "=r"(vec.w) : "l"(from + i * 16));
        ((uint4 *)to)[i] = vec;
    }
}

template <typename... Arguments, typename... LaunchArgs>
inline int mn_launch_pdl(void (*kernel)(Arguments...), dim3 blocks, int threads, size_t smem,
                           cudaStream_t stream, const LaunchArgs &...launch_args) {
    cudaLaunchAttribute pdl_attr = {};
    pdl_attr.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    pdl_attr.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = blocks, config.blockDim = dim3((unsigned)threads),
        config.dynamicSmemBytes = smem;
    config.stream = stream, config.attrs = &pdl_attr, config.numAttrs = 1;
    return (int)cudaLaunchKernelEx(&config, kernel, launch_args...);
}

}    // namespace mneme

#endif
