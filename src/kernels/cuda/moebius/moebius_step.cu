/* moebius_step.cu - one token of Kalman Linear Attention (moebius_step.cuh), states in place: a
 * block has eight channels. */
#include "kernels/cuda/prim/pdl.cuh"
#include "kernels/cuda/moebius/moebius_step.cuh"

namespace mneme::moebius {

MN_CUDA_PLAN(moebius_forward);
MN_CUDA_LAUNCH(moebius_forward);

template <typename T>
__global__ void __launch_bounds__(STEP_THREADS)
moebius_step_kernel(const __grid_constant__ mn_moebius_args p, int n_tiles) {
    const int64_t column = blockIdx.x % n_tiles * (int64_t)STEP_COLUMNS;
    mn_pdl_launch_dependents();
    mn_pdl_wait();
    moebius_step<T, mn_cta<STEP_THREADS>>(p, blockIdx.x / n_tiles, 0, column, nullptr);
}

MN_CUDA_PLAN(moebius_step) {
    const mn_moebius_args *p = (const mn_moebius_args *)args;
    return moebius_step_supported(p) ? true : mn_moebius_forward_cuda_plan(args, plan);
}

MN_CUDA_LAUNCH(moebius_step) {
    const mn_moebius_args *p = (const mn_moebius_args *)args;
    const int64_t tiles = mn_ceil_div(p->call.V, (int64_t)STEP_COLUMNS);
    const int64_t blocks = p->call.B * tiles;
    if (!moebius_step_supported(p)) return mn_moebius_forward_cuda(args, shared, stream);
    if (blocks == 0) return cudaSuccess;
    if (blocks > INT32_MAX) return cudaErrorNotSupported;
    return mn_launch_pdl(p->call.dtype == MN_BF16 ? moebius_step_kernel<mn_bf16>
                                                  : moebius_step_kernel<float>,
                         dim3((unsigned)blocks), STEP_THREADS, 0, (cudaStream_t)stream, *p,
                         (int)tiles);
}

}    // namespace mneme::moebius
