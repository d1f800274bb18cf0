/* delta_forward.cu - delta over chunks: squares of all chunks, then the walk. */
#include "kernels/cuda/delta_job.cuh"

template <int KP>
static int forward(const mn_delta_job &job, cudaStream_t stream) {
    const int code = mn_delta_prepare<KP>(job, stream);
    if (code != cudaSuccess) return code;
    return mn_delta_walk<KP>(mn_delta_walk_kernel<KP, false, false>, job, job.p.call.V, stream);
}

bool mn_delta_chunks(const mn_delta_args *p) {
    return p->call.dtype == MN_BF16 && p->call.K >= 32 && p->call.K <= 256 && p->call.V >= 32 &&
           p->decay != MN_DECAY_CHANNEL;
}

bool mn_delta_chunk_forward_plan(mn_plan *plan, const mn_delta_args *p) {
    mn_delta_work work;
    return mn_delta_lay_out(&work, &plan->shared_bytes, p, nullptr, false);
}

int mn_delta_chunk_forward(const mn_delta_args *p, void *shared, void *stream) {
    mn_delta_job job;
    if (!mn_delta_job_of(&job, p, shared, false)) return cudaErrorNotSupported;
    MN_DELTA_BY_WIDTH(forward, p->call.K, (job, (cudaStream_t)stream));
}
