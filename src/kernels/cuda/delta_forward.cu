/* delta_forward.cu - delta over chunks: squares of all chunks, then the walk. */
#include "kernels/cuda/delta_job.cuh"
#include "kernels/cuda/delta_walk_group.cuh"

template <int KP>
static int forward(const mn_delta_job &job, cudaStream_t stream) {
    const int64_t V = job.p.call.V;
    if constexpr (KP <= 128) {
        mn_apart_maps maps;
        if (mn_delta_goes_apart(&maps, job)) {
            const int code = mn_delta_triangles<KP>(job, job.p.q_late, stream);
            return code == cudaSuccess ? mn_delta_apart<KP>(job, maps, stream) : code;
        }
    }
    const int code = mn_delta_prepare<KP>(job, stream);
    if (code != cudaSuccess) return code;
    if (job.p.decay == MN_DECAY_CHANNEL) {
        return mn_delta_walk<KP>(mn_delta_walk_kernel<KP, true, false>,
                                 mn_delta_walk_warps_kernel<KP, true, false>, job, false, V,
                                 stream);
    }
    return mn_delta_walk<KP>(mn_delta_walk_kernel<KP, false, false>,
                             mn_delta_walk_warps_kernel<KP, false, false>, job, false, V, stream);
}

/* Whether a block gets as much shared memory as the widest kernels take. Where there is no GPU to
 * ask, a prediction is made for one that has it. */
static bool has_room(void) {
    int device = 0, bytes = 0;
    if (cudaGetDevice(&device) != cudaSuccess ||
        cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device)) {
        (void)cudaGetLastError();
        return true;
    }
    return bytes >= 226 * 1024;
}

/* Sums over few value columns average the roundings of operands less: those of up to 32 lose more
 * than twice what storing in bf16 does. */
bool mn_delta_chunks(const mn_delta_args *p) {
    return p->call.dtype == MN_BF16 && p->call.K >= 32 && p->call.K <= 256 && p->call.V > 32 &&
           has_room();
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
