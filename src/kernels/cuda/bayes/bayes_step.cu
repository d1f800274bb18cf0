/* bayes_step.cu - one token of the Bayesian Layer: a block has a noise group of a head. */
#include "kernels/cuda/prim/pdl.cuh"
#include "kernels/cuda/bayes/bayes_step.cuh"

namespace mneme::bayes {

enum { STEP_THREADS = 512, STEP_WIDEST = 512 };

typedef step_smem<STEP_THREADS, STEP_WIDEST> smem_layout;

template <typename T>
__global__ void __launch_bounds__(STEP_THREADS)
bayes_step_kernel(const __grid_constant__ mn_bayes_args p) {
    extern __shared__ __align__(16) unsigned char bytes[];
    const int64_t G = p.call.G, g = blockIdx.x % G, h = blockIdx.x / G % p.call.H;
    mn_pdl_launch_dependents();
    mn_pdl_wait();
    bayes_step_group<T, mn_cta<STEP_THREADS>, smem_layout>(p, blockIdx.x / G / p.call.H, h, g,
                                                           bytes);
}

MN_CUDA_PLAN(bayes_forward);
MN_CUDA_LAUNCH(bayes_forward);

MN_CUDA_PLAN(bayes_step) {
    return bayes_step_serves((const mn_bayes_args *)args, STEP_WIDEST)
               ? true : mn_bayes_forward_cuda_plan(args, plan);
}

MN_CUDA_LAUNCH(bayes_step) {
    const mn_bayes_args *p = (const mn_bayes_args *)args;
    const auto kernel = p->call.dtype == MN_BF16 ? bayes_step_kernel<mn_bf16>
                                                 : bayes_step_kernel<float>;
    const int64_t blocks = p->call.B * p->call.H * p->call.G;
    if (!bayes_step_serves(p, STEP_WIDEST)) return mn_bayes_forward_cuda(args, shared, stream);
    if (blocks == 0) return cudaSuccess;
    if (blocks > INT32_MAX) return cudaErrorNotSupported;
    return mn_launch_pdl(kernel, dim3((unsigned)blocks), STEP_THREADS, sizeof(smem_layout),
                           (cudaStream_t)stream, *p);
}

}    // namespace mneme::bayes
