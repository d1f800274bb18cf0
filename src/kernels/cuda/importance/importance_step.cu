/* importance_step.cu - one token of Palimpsa (importance_step.cuh): a block has 128 columns of a
 * memory, a thread four of them in every 16th row. */
#include "kernels/cuda/prim/pdl.cuh"
#include "kernels/cuda/importance/importance_step.cuh"

namespace mneme::importance {

MN_CUDA_PLAN(importance_forward);
MN_CUDA_LAUNCH(importance_forward);

enum { LAUNCH_THREADS = 512, LAUNCH_COLUMNS = 128, LAUNCH_ROWS = 4 };

typedef step_tile<LAUNCH_THREADS, LAUNCH_COLUMNS, LAUNCH_ROWS> launch_tile;

template <typename T>
__global__ void __launch_bounds__(LAUNCH_THREADS)
importance_step_kernel(const __grid_constant__ mn_importance_args p, int n_tiles) {
    __shared__ launch_tile::smem smem;
    const int64_t h = blockIdx.x / n_tiles % p.call.H, n = blockIdx.x / n_tiles / p.call.H;
    const int64_t column = blockIdx.x % n_tiles * (int64_t)LAUNCH_COLUMNS;
    mn_pdl_launch_dependents();
    mn_pdl_wait();
    step_columns<T, mn_cta<LAUNCH_THREADS>, launch_tile>(p, n, h, column, smem);
}

MN_CUDA_PLAN(importance_step) {
    const mn_importance_args *p = (const mn_importance_args *)args;
    return importance_step_supported(p) ? true : mn_importance_forward_cuda_plan(args, plan);
}

MN_CUDA_LAUNCH(importance_step) {
    const mn_importance_args *p = (const mn_importance_args *)args;
    const int64_t tiles = mn_ceil_div(p->call.V, (int64_t)LAUNCH_COLUMNS);
    const int64_t blocks = p->call.B * p->call.H * tiles;
    if (!importance_step_supported(p)) return mn_importance_forward_cuda(args, shared, stream);
    if (blocks == 0) return cudaSuccess;
    if (blocks > INT32_MAX) return cudaErrorNotSupported;
    return mn_launch_pdl(p->call.dtype == MN_BF16 ? importance_step_kernel<mn_bf16>
                                                  : importance_step_kernel<float>,
                         dim3((unsigned)blocks), LAUNCH_THREADS, 0, (cudaStream_t)stream, *p,
                         (int)tiles);
}

}    // namespace mneme::importance
