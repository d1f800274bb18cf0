/* delta_fwd_chunk.cu - delta over chunks: matrices of all chunks, then the scan; and what makes its
 * queries, where that is curvature, which the scan then follows. */
#include "kernels/cuda/delta/delta_launch.cuh"
#include "kernels/cuda/delta/delta_fwd_chunk_sm90.cuh"

static int sm_count(void) {
    int device = 0, count = 0;
    if (cudaGetDevice(&device) != cudaSuccess ||
        cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device) != cudaSuccess) {
        (void)cudaGetLastError();
    }
    return count;
}

/* The scan overlapped the curvature that makes its queries, a chunk or two behind. */
template <int KP>
static int forward_sm90_pdl(const mn_delta_params &job, const mn_fwd_chunk_maps &maps,
                            const mn_curve_beside &query,
                  cudaStream_t stream) {
    int code = mn_curve_beside_sums(query, stream);
    if (code == cudaSuccess) code = mn_delta_wy_inverse_sm90<KP>(job, maps.e, false, stream);
    if (code == cudaSuccess) code = mn_curve_beside_launch(query, stream);
    return code == cudaSuccess ? mn_delta_fwd_chunk_sm90_pdl<KP>(job, maps, query.ready, stream)
        : code;
}

/* Where all blocks of curvature and of the scan find a processor, the scan follows; else T is
 * prepared overlapped curvature. The bits are the same. */
template <int KP>
static int forward_sm90(const mn_delta_params &job, const mn_fwd_chunk_maps &maps, void *query_work,
                 cudaStream_t stream) {
    const mn_curvature_args *query = job.p.query;
    mn_curve_beside overlapped;
    int code = cudaSuccess;
    if (query && mn_curve_beside_of(&overlapped, query, query_work) &&
        mn_curve_beside_blocks(overlapped) + mn_fwd_chunk_blocks(job.p.call) <= sm_count()) {
        return forward_sm90_pdl<KP>(job, maps, overlapped, stream);
    }
    if (query) code = mn_curvature_forward_cuda(query, query_work, stream);
    if (code == cudaSuccess) code = mn_delta_wy_inverse_sm90<KP>(job, maps.e, query != nullptr,
                                                                 stream);
    return code == cudaSuccess ? mn_delta_fwd_chunk_sm90<KP>(job, maps, stream) : code;
}

template <int KP>
static int forward(const mn_delta_params &job, void *query_work, cudaStream_t stream) {
    const int64_t V = job.p.call.V;
    if constexpr (KP <= 128) {
        mn_fwd_chunk_maps maps;
        if (mn_delta_fwd_chunk_supported(&maps, job)) {
            return forward_sm90<KP>(job, maps, query_work, stream);
        }
    }
    int code = cudaSuccess;
    if (job.p.query) code = mn_curvature_forward_cuda(job.p.query, query_work, stream);
    if (code == cudaSuccess) code = mn_delta_intra_chunk<KP>(job, stream);
    if (code != cudaSuccess) return code;
    if (job.p.decay == MN_DECAY_CHANNEL) {
        return mn_delta_state_scan<KP>(delta_state_scan_kernel<KP, true, false>,
                                 delta_state_scan_warp_kernel<KP, true, false>, job, false, V,
                                 stream);
    }
    return mn_delta_state_scan<KP>(delta_state_scan_kernel<KP, false, false>,
                             delta_state_scan_warp_kernel<KP, false, false>, job, false, V, stream);
}

/* Whether a block gets as much shared memory as the widest kernels take. Where there is no GPU to
 * ask, a prediction is made for one that has it. */
static bool has_smem(void) {
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
bool mn_delta_uses_chunks(const mn_delta_args *p) {
    return p->call.dtype == MN_BF16 && p->call.K >= 32 && p->call.K <= 256 && p->call.V > 32 &&
           has_smem();
}

bool mn_delta_chunk_forward_plan(mn_plan *plan, const mn_delta_args *p) {
    mn_delta_workspace workspace;
    size_t own, query = 0;
    return mn_delta_workspace_layout(&workspace, &own, p, nullptr, false) &&
           (!p->query || mn_curve_beside_plan(&query, p->query)) &&
           mn_add_size(&plan->shared_bytes, own, query);
}

int mn_delta_chunk_forward(const mn_delta_args *p, void *shared, void *stream) {
    mn_delta_params job;
    mn_delta_workspace workspace;
    size_t own;
    if (!mn_delta_make_params(&job, p, shared, false) ||
        !mn_delta_workspace_layout(&workspace, &own, p, nullptr, false)) {
        return cudaErrorNotSupported;
    }
    MN_DELTA_DISPATCH_K(forward, p->call.K, (job, (char *)shared + own, (cudaStream_t)stream));
}
