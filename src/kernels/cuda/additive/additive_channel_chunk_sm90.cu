/* additive_channel_chunk_sm90.cu - launches of additive_channel_state_scan_sm90.cuh and
 * additive_channel_grad_sm90.cuh. */
#include "kernels/cuda/additive/additive_channel_state_scan_sm90.cuh"

#include "kernels/cuda/additive/additive.cuh"
#include "kernels/cuda/additive/additive_channel_grad_sm90.cuh"

template <int KP>
static int launch_scan(const mn_gated_params &job, int64_t segments, cudaStream_t stream) {
    const int64_t blocks = mn_scan_slices(job.scan) * job.call.H * mn_n_spans(job.call);
    if (blocks == 0) return cudaSuccess;
    if (blocks > INT32_MAX) return cudaErrorNotSupported;
    const dim3 grid((unsigned)blocks, 1, (unsigned)segments);
    const bool reads = job.scan.out.data && !job.scan.reduce_pass;
    return mn_launch_smem(reads ? additive_gated_scan_sm90<KP,
                          true> : additive_gated_scan_sm90<KP, false>, grid,
                               MN_GATED_THREADS, sizeof(mn_gated_smem<KP>), stream, job);
}

static int launch(const mn_gated_params &job, int64_t segments, cudaStream_t stream) {
    return job.scan.depth <= 64 ? launch_scan<64>(job, segments, stream)
                                : launch_scan<128>(job, segments, stream);
}

int mn_additive_gated_launch(const mn_chunk_scans *scans, int64_t segments, cudaStream_t stream) {
    mn_gated_params job;
    if (!mn_gated_supported(&job, scans)) return cudaErrorNotSupported;
    return launch(job, segments, stream);
}

/* A scan with what reduce_pass for it. */
static int launch_two_pass(mn_gated_params *job, int64_t segments, cudaStream_t stream) {
    int code = cudaSuccess;
    if (segments > 1) {
        job->scan.reduce_pass = true;
        code = launch(*job, segments, stream);
        job->scan.reduce_pass = false;
    }
    return code == cudaSuccess ? launch(*job, segments, stream) : code;
}

int mn_additive_gated_backward(const mn_additive_args *p, const mn_chunk_scans *fwd,
                               const mn_chunk_scans *bwd, int64_t segments, cudaStream_t stream) {
    mn_gated_params to_end, to_start;
    const mn_out &dg = p->grad.g;
    bool pairs = (uintptr_t)dg.data % 4 == 0;
    for (int axis = 0; axis < 3; axis++) pairs = pairs && dg.stride[axis] % 2 == 0;
    if (!pairs || p->call.V > 128 || !mn_gated_supported(&to_end, fwd) ||
        !mn_gated_supported(&to_start, bwd)) {
        return cudaErrorNotSupported;
    }
    mn_gated_grad_params job = {};
    job.call = p->call, job.dq = p->grad.q, job.dk = p->grad.k, job.dg = dg;
    job.S = to_end.scan.kept, job.N = to_start.scan.kept, job.scale = (float)p->scale;
    if (!mn_tma_map(&job.q, p->q, p->call, p->call.K, MN_GATED_GRAD_CHUNK) ||
        !mn_tma_map(&job.k, p->k, p->call, p->call.K, MN_GATED_GRAD_CHUNK) ||
        !mn_tma_map(&job.g, p->g, p->call, p->call.K, MN_GATED_GRAD_CHUNK) ||
        !mn_tma_map(&job.v, p->v, p->call, p->call.V, MN_GATED_GRAD_CHUNK) ||
        !mn_tma_map(&job.cot, p->cot.o, p->call, p->call.V, MN_GATED_GRAD_CHUNK)) {
        return cudaErrorNotSupported;
    }
    int code = launch_two_pass(&to_end, segments, stream);
    if (code == cudaSuccess) code = launch_two_pass(&to_start, segments, stream);
    if (code != cudaSuccess) return code;
    return p->call.V <= 64 ? mn_gated_grad_launch<64>(job, stream)
                           : mn_gated_grad_launch<128>(job, stream);
}
