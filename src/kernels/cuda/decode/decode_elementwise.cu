/* decode_elementwise.cu - small works side by side in one launch (kernels/decode.h).
 *
 * Block i does part i, one work after the other: what one writes to memory the next one reads from
 * the cache of their processor. */
#include "kernels/cuda/prim/pdl.cuh"
#include "kernels/cuda/decode/decode_elementwise.cuh"

namespace mneme::decode {

enum { THREADS = 512 };

struct op_chains {
    int first[MN_DECODE_OPS + 1];
    mn_decode_job job[MN_DECODE_OPS];
};

__global__ void __launch_bounds__(THREADS, 2)
decode_op_chains(const __grid_constant__ op_chains p) {
    __shared__ float smem[32];
    __shared__ mn_decode_job jobs[MN_DECODE_OPS];
    const int first = p.first[blockIdx.x], last = p.first[blockIdx.x + 1];
    mn_pdl_launch_dependents();
    for (int i = first; i < last; i++) mn_load_args_to_smem(&jobs[i - first], p.job[i]);
    __syncthreads();
    for (int i = 0; i < last - first; i++) mn_decode_prefetch(jobs[i]);
    mn_pdl_wait();
    for (int i = first; i < last; i++) {
        if (i > first) __syncthreads();
        mn_decode_run_op(jobs[i - first], mn_decode_dst{}, smem);
    }
}

extern "C" int mn_decode_run_chains(const mn_decode_chains *parts, void *stream) {
    op_chains p = {};
    for (int i = 0; i <= parts->n_chains; i++) p.first[i] = parts->first[i];
    for (int i = 0; i < parts->first[parts->n_chains]; i++) p.job[i] =
        mn_decode_job_of(parts->work[i]);
    return mn_launch_pdl(decode_op_chains, dim3((unsigned)parts->n_chains), THREADS, 0,
                           (cudaStream_t)stream, p);
}

}    // namespace mneme::decode
