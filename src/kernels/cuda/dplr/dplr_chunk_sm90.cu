/* dplr_chunk_sm90.cu - dplr over chunks of 16 tokens for keys and values of up to 64, on Hopper:
 * forward one launch, backward three: states saved, the scan back, gradients of all chunks. Rows,
 * matrices and equations: dplr_intra_chunk.cuh, dplr_state_scan.cuh, dplr_grad.cuh. */
#include "kernels/cuda/dplr/dplr_chunk.h"

#include "kernels/cuda/dplr/dplr_grad.cuh"
#include "kernels/cuda/dplr/dplr_state_scan.cuh"

namespace mneme::dplr {

bool mn_dplr_uses_chunks_sm90(const mn_dplr_args *p) {
    return p->call.K <= WIDTH && p->call.V <= WIDTH && mn_device_is_sm90();
}

/* Lays the workspace out from `base` on; false when sizes overflow. */
static bool workspace_layout(chunk_workspace *to, size_t *bytes, const mn_call &call, void *base) {
    const int64_t records = mn_tile_slots(call, CHUNK) * call.H;
    const size_t state = STATE_VECS * sizeof(uint4), rows = ROWS;
    size_t count;
    if (!mn_mul_size(&count, (size_t)records, 1) ||
        !mn_mul_size(bytes, count, 2 * state + 3 * rows)) {
        return false;
    }
    if (!base) return true;
    char *at = (char *)base;
    const auto take = [&](size_t each) {
        char *from = at;
        at += count * each;
        return from;
    };
    to->S = (uint4 *)take(state), to->D = (uint4 *)take(state);
    to->U = (mn_bf16 *)take(rows), to->dX = (mn_bf16 *)take(rows);
    to->matrices = (unsigned char *)take(rows);
    return true;
}

bool mn_dplr_chunk_plan_sm90(mn_plan *plan, const mn_dplr_args *p, bool back) {
    chunk_workspace workspace;
    return !back || workspace_layout(&workspace, &plan->shared_bytes, p->call, nullptr);
}

/* Whether rows of `width` numbers of a view begin at multiples of N of them. */
template <int N, typename View>
static bool aligned(const View &view, int64_t width) {
    bool whole = (uintptr_t)view.data % (N * sizeof(mn_bf16)) == 0 && width % N == 0;
    for (int axis = 0; axis < 3; axis++) whole = whole && view.stride[axis] % N == 0;
    return whole;
}

static chunk_params params_of(const mn_dplr_args *p) {
    const int64_t K = p->call.K, V = p->call.V;
    chunk_params job = {};
    job.p = *p;
    job.scale = (float)p->scale;
    job.packed_keys = aligned<8>(p->q, K) && aligned<8>(p->a, K) && aligned<8>(p->k, K) &&
                      aligned<8>(p->b, K) && aligned<8>(p->g, K);
    job.packed_values = aligned<8>(p->v, V), job.packed_cot = aligned<8>(p->cot.o, V);
    job.packed_o = aligned<2>(p->o, V), job.packed_dv = aligned<2>(p->grad.v, V);
    job.packed_grads = aligned<2>(p->grad.q, K) && aligned<2>(p->grad.a, K) &&
                       aligned<2>(p->grad.k, K) && aligned<2>(p->grad.b, K) &&
                       aligned<2>(p->grad.g, K);
    return job;
}

template <scan_kind KIND>
static int scan(const chunk_params &job, cudaStream_t stream) {
    const int64_t blocks = mn_n_spans(job.p.call) * job.p.call.H;
    if (blocks == 0) return cudaSuccess;
    if (blocks > INT32_MAX) return cudaErrorNotSupported;
    return mn_launch_smem(dplr_state_scan_sm90_kernel<KIND>, dim3((unsigned)blocks), SCAN_THREADS,
                          sizeof(scan_smem), stream, job);
}

int mn_dplr_chunk_forward_sm90(const mn_dplr_args *p, cudaStream_t stream) {
    return scan<SCAN_OUTPUT>(params_of(p), stream);
}

int mn_dplr_chunk_backward_sm90(const mn_dplr_args *p, void *shared, cudaStream_t stream) {
    chunk_params job = params_of(p);
    size_t bytes;
    const int64_t records = mn_tile_slots(p->call, CHUNK) * p->call.H;
    if (records > INT32_MAX || !workspace_layout(&job.workspace, &bytes, p->call, shared)) {
        return cudaErrorNotSupported;
    }
    int code = scan<SCAN_SAVE>(job, stream);
    if (code == cudaSuccess) code = scan<SCAN_BACK>(job, stream);
    if (code != cudaSuccess || records == 0) return code;
    return mn_launch_smem(dplr_grad_sm90_kernel, dim3((unsigned)records), GRAD_THREADS,
                          sizeof(grad_smem), stream, job);
}

}    // namespace mneme::dplr
