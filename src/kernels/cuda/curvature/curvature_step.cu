/* curvature_step.cu - one token of curvature (curvature_step.cuh), states in place: a block has a
 * head. */
#include "kernels/cuda/prim/pdl.cuh"
#include "kernels/cuda/curvature/curvature_step.cuh"

namespace mneme::curvature {

enum { STEP_THREADS = 320 };    // keys of 128 have ten squares

template <typename T>
__global__ void __launch_bounds__(STEP_THREADS)
curvature_step_kernel(const __grid_constant__ mn_curvature_args p) {
    __shared__ __align__(16) unsigned char bytes[sizeof(step_smem)];
    mn_pdl_launch_dependents();
    mn_pdl_wait();
    curvature_step<T, mn_cta<STEP_THREADS>>(p, blockIdx.x / p.call.H, blockIdx.x % p.call.H, 0,
                                            bytes);
}

MN_CUDA_PLAN(curvature_step) {
    (void)args, (void)plan;
    return true;
}

MN_CUDA_LAUNCH(curvature_step) {
    (void)shared;
    const mn_curvature_args *p = (const mn_curvature_args *)args;
    const int64_t blocks = p->call.B * p->call.H;
    if (!curvature_step_supported(p) || blocks > INT32_MAX) return cudaErrorNotSupported;
    if (blocks == 0) return cudaSuccess;
    return mn_launch_pdl(p->call.dtype == MN_BF16 ? curvature_step_kernel<mn_bf16>
                                                  : curvature_step_kernel<float>,
                         dim3((unsigned)blocks), STEP_THREADS, 0, (cudaStream_t)stream, *p);
}

}    // namespace mneme::curvature
