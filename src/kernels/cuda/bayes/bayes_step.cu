/* bayes_step.cu - one token of the Bayesian Layer (bayes_step.cuh): a block has a noise group of a
 * head. */
#include "kernels/cuda/prim/pdl.cuh"
#include "kernels/cuda/bayes/bayes_step.cuh"

namespace mneme::bayes {

MN_CUDA_PLAN(bayes_forward);
MN_CUDA_LAUNCH(bayes_forward);

enum { LAUNCH_THREADS = 512, LAUNCH_WIDEST = 512 };

typedef step_smem<LAUNCH_THREADS, LAUNCH_WIDEST> launch_smem;

template <typename T>
__global__ void __launch_bounds__(LAUNCH_THREADS)
bayes_step_kernel(const __grid_constant__ mn_bayes_args p) {
    extern __shared__ __align__(16) unsigned char bytes[];
    const int64_t G = p.call.G, g = blockIdx.x % G, h = blockIdx.x / G % p.call.H;
    const int64_t n = blockIdx.x / G / p.call.H;
    mn_pdl_launch_dependents();
    mn_pdl_wait();
    bayes_step_group<T, mn_cta<LAUNCH_THREADS>, launch_smem>(p, n, h, g,
                                                             step_token_of<T>(p, n, h, g), bytes);
}

static bool serves(const void *args) {
    return bayes_step_serves((const mn_bayes_args *)args, LAUNCH_WIDEST);
}

MN_CUDA_PLAN(bayes_step) {
    return serves(args) ? true : mn_bayes_forward_cuda_plan(args, plan);
}

MN_CUDA_LAUNCH(bayes_step) {
    const mn_bayes_args *p = (const mn_bayes_args *)args;
    const auto kernel = p->call.dtype == MN_BF16 ? bayes_step_kernel<mn_bf16>
                                                 : bayes_step_kernel<float>;
    const int64_t blocks = p->call.B * p->call.H * p->call.G;
    if (!serves(args)) return mn_bayes_forward_cuda(args, shared, stream);
    if (blocks == 0) return cudaSuccess;
    if (blocks > INT32_MAX) return cudaErrorNotSupported;
    return mn_launch_pdl(kernel, dim3((unsigned)blocks), LAUNCH_THREADS, sizeof(launch_smem),
                         (cudaStream_t)stream, *p);
}

}    // namespace mneme::bayes
