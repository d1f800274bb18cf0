/* delta_backward.cu - gradients of delta over chunks: squares again, the walk forward that keeps
 * the states, the walk back, then keys and decays of all chunks at once. */
#include "kernels/cuda/delta_gradient.cuh"
#include "kernels/cuda/delta_gradient_channel.cuh"
#include "kernels/cuda/delta_job.cuh"

/* The gradient of a decay per head is there without tokens too, and is zero then. */
static int finish(const mn_delta_job &job, int64_t records, int n_parts, cudaStream_t stream) {
    const mn_delta_args &p = job.p;
    int code = cudaSuccess;
    if (records > 0) {
        mn_delta_finish_kernel<<<(unsigned)records, MN_DELTA_CHUNK, 0, stream>>>(job, n_parts);
        code = mn_launched();
    }
    if (code != cudaSuccess || p.decay != MN_DECAY_HEAD || !p.grad.g.data) return code;
    mn_delta_head_kernel<<<(unsigned)p.call.H, 256, 0, stream>>>(job, records / p.call.H);
    return mn_launched();
}

/* Both walks. */
template <int KP, bool CHANNEL>
static int walk(const mn_delta_job &job, cudaStream_t stream) {
    const int code = mn_delta_walk<KP>(mn_delta_walk_kernel<KP, CHANNEL, true>,
                                       mn_delta_walk_warps_kernel<KP, CHANNEL, true>, job, false,
                                       job.wide_v, stream);
    if (code != cudaSuccess) return code;
    return mn_delta_walk<KP>(mn_delta_walk_back_kernel<KP, CHANNEL>,
                             mn_delta_walk_back_warps_kernel<KP, CHANNEL>, job, true, job.wide_v,
                             stream);
}

template <int KP>
static int backward(const mn_delta_job &job, cudaStream_t stream) {
    constexpr int KT = KP < 128 ? KP : 128;
    const bool channel = job.p.decay == MN_DECAY_CHANNEL;
    const int64_t records = mn_tile_slots(job.p.call, MN_DELTA_CHUNK) * job.p.call.H;
    const dim3 blocks((unsigned)records, KP / KT);
    int code = mn_delta_prepare<KP>(job, stream);
    if (code != cudaSuccess) return code;
    code = channel ? walk<KP, true>(job, stream) : walk<KP, false>(job, stream);
    if (code != cudaSuccess) return code;
    if (records == 0) return finish(job, 0, KP / KT, stream);
    code = mn_launch_with_room(channel ? mn_delta_gradient_channel_kernel<KT, KP>
                                       : mn_delta_gradient_kernel<KT, KP>,
                               blocks, MN_DELTA_GRADERS,
                               channel ? sizeof(mn_channel_room<KT>) : sizeof(mn_grade_room<KT>),
                               stream, job);
    if (code != cudaSuccess) return code;
    return finish(job, records, KP / KT, stream);
}

bool mn_delta_chunk_backward_plan(mn_plan *plan, const mn_delta_args *p) {
    mn_delta_work work;
    return mn_delta_lay_out(&work, &plan->shared_bytes, p, nullptr, true);
}

int mn_delta_chunk_backward(const mn_delta_args *p, void *shared, void *stream) {
    mn_delta_job job;
    if (!mn_delta_job_of(&job, p, shared, true)) return cudaErrorNotSupported;
    MN_DELTA_BY_WIDTH(backward, p->call.K, (job, (cudaStream_t)stream));
}
