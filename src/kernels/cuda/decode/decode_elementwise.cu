/* decode_elementwise.cu - small works side by side in one launch (kernels/decode.h).
 *
 * Block i does part i, one work after the other: what one writes to memory the next one reads from
 * the cache of their processor. */
#include "kernels/cuda/prim/pdl.cuh"
#include "kernels/cuda/decode/decode_elementwise.cuh"

enum { THREADS = 512 };

struct few_parts {
    int first[MN_FEW_WORKS + 1];
    mn_few_job job[MN_FEW_WORKS];
};

__global__ void __launch_bounds__(THREADS, 2)
few_parts_kernel(const __grid_constant__ few_parts p) {
    __shared__ float room[32];
    __shared__ mn_few_job jobs[MN_FEW_WORKS];
    const int first = p.first[blockIdx.x], last = p.first[blockIdx.x + 1];
    mn_let_next_begin();
    for (int i = first; i < last; i++) mn_bring_arguments(&jobs[i - first], p.job[i]);
    __syncthreads();
    for (int i = 0; i < last - first; i++) mn_few_ask(jobs[i]);
    mn_wait_for_before();
    for (int i = first; i < last; i++) {
        if (i > first) __syncthreads();
        mn_few_do(jobs[i - first], mn_few_rows{}, room);
    }
}

extern "C" int mn_few_run(const mn_few_parts *parts, void *stream) {
    few_parts p = {};
    for (int i = 0; i <= parts->n_parts; i++) p.first[i] = parts->first[i];
    for (int i = 0; i < parts->first[parts->n_parts]; i++) p.job[i] = mn_few_job_of(parts->work[i]);
    return mn_launch_early(few_parts_kernel, dim3((unsigned)parts->n_parts), THREADS, 0,
                           (cudaStream_t)stream, p);
}
