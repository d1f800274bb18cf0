/* first_wild.cuh - the first token of a head with a number that is not finite, or too large for a
 * product of two, for kernels that make rows again (docs/internals/causality.md). All threads of a
 * block call; no shared memory is used. */
#ifndef MN_KERNELS_CUDA_PRIM_FIRST_WILD_CUH
#define MN_KERNELS_CUDA_PRIM_FIRST_WILD_CUH

#include "kernels/cuda/prim/pdl.cuh"
#include "kernels/cuda/prim/wild.cuh"

namespace mneme {

/* Whether one of `count` numbers is NaN or larger than `most`; false where there are none. */
template <typename T>
__device__ inline bool mn_redo_has_wild(const T *x, int64_t count, float most) {
    bool wild = false;
    for (int64_t j = 0; x && j < count; j++) wild = wild || !(fabsf(mn_float(x[j])) <= most);
    return wild;
}

/* Whether a row that all threads look at together has a number that is not finite. */
template <typename T>
__device__ inline bool mn_redo_row_is_wild(const T *row, int64_t count) {
    bool wild = false;
    for (int64_t j = threadIdx.x; row && j < count; j += blockDim.x) {
        wild = wild || mn_is_wild(mn_float(row[j]));
    }
    return __syncthreads_or(wild) != 0;
}

/* The first of `count` tokens of which is_wild(t, most) says that it has a number that is not
 * finite, or where none has, one larger than 1e15, of which two may give a product that is not; 0
 * where all are tame. */
template <typename F>
__device__ __forceinline__ int mn_redo_first_token(int64_t count, F is_wild) {
    for (int large = 0; large < 2; large++) {
        const float most = large ? 1e15f : 3.40282347e38f;
        for (int64_t first = 0; first < count; first += blockDim.x) {
            const int64_t t = first + threadIdx.x;
            const bool wild = t < count && is_wild(t, most);
            int low = 0, high = (int)blockDim.x;    // the first that is wild is in [low, high)
            if (!__syncthreads_or(wild)) continue;
            while (high - low > 1) {
                const int middle = (low + high) / 2, i = (int)threadIdx.x;
                if (__syncthreads_or(wild && i >= low && i < middle)) high = middle;
                else low = middle;
            }
            return (int)first + low;
        }
    }
    return 0;
}

/* mn_launch_smem, or where `early` mn_launch_pdl of such a kernel. */
template <typename... Arguments, typename... LaunchArgs>
inline int mn_launch_smem_behind(bool early, void (*kernel)(Arguments...), dim3 blocks, int threads,
                                 size_t smem, cudaStream_t stream,
                                 const LaunchArgs &...launch_args) {
    if (!early) return mn_launch_smem(kernel, blocks, threads, smem, stream, launch_args...);
    const cudaError_t code = cudaFuncSetAttribute(
        kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)smem);
    return code != cudaSuccess ? (int)code
                               : mn_launch_pdl(kernel, blocks, threads, smem, stream,
                                               launch_args...);
}

}    // namespace mneme

#endif
