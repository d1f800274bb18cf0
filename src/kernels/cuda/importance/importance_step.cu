/* importance_step.cu - one token of Palimpsa: a block has eight columns of a memory. */
#include "kernels/cuda/prim/pdl.cuh"
#include "kernels/cuda/importance/importance_step.cuh"

namespace mneme::importance {

MN_CUDA_PLAN(importance_forward);
MN_CUDA_LAUNCH(importance_forward);

template <typename T>
__global__ void __launch_bounds__(STEP_THREADS)
importance_step_kernel(const __grid_constant__ mn_importance_args p, int n_tiles) {
    __shared__ __align__(16) unsigned char smem[sizeof(step_smem)];
    const int64_t h = blockIdx.x / n_tiles % p.call.H, n = blockIdx.x / n_tiles / p.call.H;
    mn_pdl_launch_dependents();
    mn_pdl_wait();
    importance_step<T, mn_cta<STEP_THREADS>>(p, n, h, blockIdx.x % n_tiles * (int64_t)STEP_COLUMNS,
                                             smem);
}

MN_CUDA_PLAN(importance_step) {
    return importance_step_supported((const mn_importance_args *)args)
               ? true : mn_importance_forward_cuda_plan(args, plan);
}

MN_CUDA_LAUNCH(importance_step) {
    const mn_importance_args *p = (const mn_importance_args *)args;
    if (!importance_step_supported(p)) return mn_importance_forward_cuda(args, shared, stream);
    const int64_t tiles = mn_ceil_div(p->call.V, (int64_t)STEP_COLUMNS);
    const int64_t blocks = p->call.B * p->call.H * tiles;
    if (blocks == 0) return cudaSuccess;
    if (blocks > INT32_MAX) return cudaErrorNotSupported;
    return mn_launch_pdl(p->call.dtype == MN_BF16 ? importance_step_kernel<mn_bf16>
                                                    : importance_step_kernel<float>,
                         dim3((unsigned)blocks), STEP_THREADS, 0, (cudaStream_t)stream, *p,
                         (int)tiles);
}

}    // namespace mneme::importance
