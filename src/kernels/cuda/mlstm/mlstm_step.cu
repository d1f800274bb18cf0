/* mlstm_step.cu - one token of mLSTM (mlstm_step.cuh), states in place: a block has a memory, so
 * that no other block may have written its normaliser and stabiliser before. */
#include "kernels/cuda/prim/pdl.cuh"
#include "kernels/cuda/mlstm/mlstm_step.cuh"

namespace mneme::mlstm {

enum { STEP_THREADS = 512 };

template <typename T>
__global__ void __launch_bounds__(STEP_THREADS)
mlstm_step_recurrent(const __grid_constant__ mn_mlstm_args p) {
    typedef mn_cta<STEP_THREADS> block;
    __shared__ step_tile<block>::smem smem;
    const int64_t h = blockIdx.x % p.call.H, n = blockIdx.x / p.call.H;
    mn_pdl_launch_dependents();
    mn_pdl_wait();
    const step_gates g = step_gates_of<T>(p, n, h);
    const float divisor = step_divisor<T, block>(p, g, n, h, smem);    // all have read the first m
    step_shared<T, block>(p, g, n, h);
    for (int64_t j = 0; j < p.call.V; j += step_tile<block>::columns) {
        step_columns<T, block>(p, g, divisor, n, h, j, smem);
    }
}

MN_CUDA_PLAN(mlstm_forward);
MN_CUDA_LAUNCH(mlstm_forward);

MN_CUDA_PLAN(mlstm_step) {
    const bool serves = mlstm_step_supported((const mn_mlstm_args *)args);
    return serves ? true : mn_mlstm_forward_cuda_plan(args, plan);
}

MN_CUDA_LAUNCH(mlstm_step) {
    const mn_mlstm_args *p = (const mn_mlstm_args *)args;
    const int64_t blocks = p->call.B * p->call.H;
    if (!mlstm_step_supported(p)) return mn_mlstm_forward_cuda(args, shared, stream);
    if (blocks == 0) return cudaSuccess;
    if (blocks > INT32_MAX) return cudaErrorNotSupported;
    return mn_launch_pdl(p->call.dtype == MN_BF16 ? mlstm_step_recurrent<mn_bf16>
                                                  : mlstm_step_recurrent<float>,
                         dim3((unsigned)blocks), STEP_THREADS, 0, (cudaStream_t)stream, *p);
}

}    // namespace mneme::mlstm
