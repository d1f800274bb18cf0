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

/* ---- of several sequences -------------------------------------------------------------------- */

enum { ROW_THREADS = 256 };

/* Bytes between what a work sees of one sequence and of the next. */
struct row_chains {
    op_chains all;
    int64_t advance[MN_DECODE_OPS][MN_DECODE_VIEWS];
};

/* Block (i, n) does part i for sequence n. */
__global__ void __launch_bounds__(ROW_THREADS, 3)
decode_row_chains(const __grid_constant__ row_chains p) {
    __shared__ float smem[32];
    __shared__ mn_decode_job jobs[MN_DECODE_OPS];
    const int first = p.all.first[blockIdx.x], n = p.all.first[blockIdx.x + 1] - first;
    mn_pdl_launch_dependents();
    for (int i = 0; i < n; i++) mn_load_args_to_smem(&jobs[i], p.all.job[first + i]);
    __syncthreads();
    for (int i = threadIdx.x; i < n * MN_DECODE_VIEWS; i += ROW_THREADS) {
        mn_operand &side = jobs[i / MN_DECODE_VIEWS].side[i % MN_DECODE_VIEWS];
        const int64_t step = p.advance[first + i / MN_DECODE_VIEWS][i % MN_DECODE_VIEWS];
        if (side.data) side.data += blockIdx.y * step;
    }
    __syncthreads();
    for (int i = 0; i < n; i++) mn_decode_prefetch(jobs[i]);
    mn_pdl_wait();
    for (int i = 0; i < n; i++) {
        if (i > 0) __syncthreads();
        mn_decode_run_op(jobs[i], mn_decode_dst{}, smem);
    }
}

static int run_row_chains(const mn_decode_chains *parts, const op_chains &all, void *stream) {
    row_chains p = {};
    p.all = all;
    for (int i = 0; i < parts->first[parts->n_chains]; i++) {
        for (int k = 0; k < MN_DECODE_VIEWS; k++) p.advance[i][k] = parts->work[i].advance[k];
    }
    const dim3 blocks((unsigned)parts->n_chains, (unsigned)parts->sequences);
    return mn_launch_pdl(decode_row_chains, blocks, ROW_THREADS, 0, (cudaStream_t)stream, p);
}

extern "C" int mn_decode_run_chains(const mn_decode_chains *parts, void *stream) {
    op_chains p = {};
    for (int i = 0; i <= parts->n_chains; i++) p.first[i] = parts->first[i];
    for (int i = 0; i < parts->first[parts->n_chains]; i++) p.job[i] =
        mn_decode_job_of(parts->work[i]);
    if (parts->sequences > 0) return run_row_chains(parts, p, stream);
    return mn_launch_pdl(decode_op_chains, dim3((unsigned)parts->n_chains), THREADS, 0,
                           (cudaStream_t)stream, p);
}

}    // namespace mneme::decode
