/* dplr_chunk.cu - dplr as delta with two rows a token (delta/delta_pairs.cuh):
 *
 *   u = S'a            S = diag(exp g) S;  S = S + b (0 - S_before'(-a))'     an even row
 *   S = S + k v'       o = scale S'q                                          the odd row behind
 *
 * so that a chunk's 64 rows are 32 tokens. The rows are put together where chunks are loaded: no
 * tensor is written for them. Matrices, scans and gradients are delta's with a decay a channel;
 * what differs is that a row's reads meet the state before the row's decay, and the signs of
 * e = -a. Kernels and what they load and store: README.md of delta, with q, e = a, w = b and k
 * (B,T,H,K), v (B,T,H,V), g (B,T,H,K). */
#include "kernels/cuda/dplr/dplr_chunk.h"

#include "kernels/cuda/delta/delta_grad_channel.cuh"
#include "kernels/cuda/delta/delta_launch.cuh"

namespace mneme::dplr {

using namespace delta;

static mn_delta_args rows_of(const mn_dplr_args *p) {
    mn_delta_args rows = {};
    rows.call = p->call, rows.scale = p->scale, rows.decay = MN_DECAY_CHANNEL;
    rows.call.J = p->call.H;
    rows.q = p->q, rows.e = p->a, rows.w = p->b, rows.v = p->v, rows.g = p->g;
    rows.state0 = p->state0, rows.o = p->o, rows.state = p->state;
    rows.cot.o = p->cot.o, rows.cot.state = p->cot.state;
    rows.grad.q = p->grad.q, rows.grad.e = p->grad.a, rows.grad.w = p->grad.b;
    rows.grad.v = p->grad.v, rows.grad.g = p->grad.g, rows.grad.state0 = p->grad.state0;
    return rows;
}

bool mn_dplr_uses_chunks(const mn_dplr_args *p) {
    const mn_delta_args rows = rows_of(p);
    return p->call.K <= 128 && mn_delta_uses_chunks(&rows);
}

bool mn_dplr_chunk_plan(mn_plan *plan, const mn_dplr_args *p, bool back) {
    if (mn_dplr_uses_chunks_sm90(p)) return mn_dplr_chunk_plan_sm90(plan, p, back);
    const mn_delta_args rows = rows_of(p);
    mn_delta_workspace workspace;
    return mn_delta_workspace_layout(&workspace, &plan->shared_bytes, &rows, nullptr, back, true);
}

static bool make_params(mn_delta_params *job, const mn_dplr_args *p, void *shared, bool back) {
    const mn_delta_args rows = rows_of(p);
    const int64_t K = p->call.K;
    size_t bytes;
    if (!mn_delta_make_params(job, &rows, shared, back) ||
        !mn_delta_workspace_layout(&job->workspace, &bytes, &rows, shared, back, true)) {
        return false;
    }
    job->pairs = true, job->segments.count = 1;
    job->odd_w = p->k, job->odd_dw = p->grad.k;
    job->packed[MN_DELTA_W] = job->packed[MN_DELTA_W] && mn_delta_vec_aligned(p->k, K);
    job->packed[MN_DELTA_DW] = job->packed[MN_DELTA_DW] && mn_delta_vec_aligned(p->grad.k, K);
    return true;
}

/* Whether rows in front of numbers that are not finite are made again, and gradients behind such
 * cotangents (docs/internals/causality.md). */
static const bool redoes_results = true, redoes_gradients = true;

static int64_t records_of(const mn_call &call) {
    return mn_tile_slots(call, mn_delta_chunk_tokens(true)) * call.H;
}

/* Whether o is made of scores and P in two parts, as gradients are. It is off by 3.4e-3 in the rms
 * without them, 2.3e-3 with them; storing it is 1.6e-3. */
constexpr bool keeps_rests_forward = false;

template <int KP, bool RESTS>
static int intra_chunk(const mn_delta_params &job, cudaStream_t stream) {
    const int64_t blocks = mn_delta_chunk_blocks(job, mn_delta_chunk_tokens(true));
    if (blocks == 0) return cudaSuccess;
    if (blocks > INT32_MAX) return cudaErrorNotSupported;
    return mn_launch_smem_behind(
        job.cuts, delta_intra_chunk_channel_kernel<KP, MN_DELTA_PAIRS, KP, RESTS>,
        dim3((unsigned)blocks), MN_DELTA_INTRA_THREADS,
        sizeof(mn_channel_intra_smem<KP, mn_rows_joined<MN_DELTA_PAIRS>>), stream, job);
}

template <int KP>
static int forward(const mn_delta_params &job, cudaStream_t stream) {
    const int code = intra_chunk<KP, keeps_rests_forward>(job, stream);
    if (code != cudaSuccess) return code;
    return mn_delta_state_scan<KP>(delta_state_scan_kernel<KP, MN_DELTA_PAIRS, MN_SCAN_OUTPUT>,
                                   delta_state_scan_warp_kernel<KP, MN_DELTA_PAIRS, false>, job,
                                   false, job.p.call.V, stream);
}

/* A call, and rows in front of numbers that are not finite once more (delta_redo.cuh). */
template <int KP>
static int forward_kept(const mn_delta_params &job, cudaStream_t stream) {
    const int code = forward<KP>(job, stream);
    mn_delta_params redo = job;
    if (code != cudaSuccess || !redoes_results || !job.p.o.data || job.p.call.T < 2) return code;
    redo.cuts = job.workspace.cuts;
    redo.p.state = {};
    return forward<KP>(redo, stream);
}

/* The scan back of all chunks and their gradients, or of those that a redo has. */
template <int KP>
static int scan_back(const mn_delta_params &job, cudaStream_t stream) {
    constexpr int KT = KP < 128 ? KP : 128;
    const int64_t blocks = mn_delta_grad_blocks(job, records_of(job.p.call));
    const int code = mn_delta_state_scan<KP>(
        delta_state_scan_bwd_kernel<KP, MN_DELTA_PAIRS>,
        delta_state_scan_bwd_warp_kernel<KP, MN_DELTA_PAIRS>, job, true, job.padded_v, stream);
    if (code != cudaSuccess || records_of(job.p.call) == 0) return code;
    return mn_launch_smem_behind(job.cuts, delta_grad_channel_kernel<KT, KP, MN_DELTA_PAIRS>,
                                 dim3((unsigned)blocks, KP / KT), MN_DELTA_GRAD_THREADS,
                                 sizeof(mn_channel_grad_smem<KT>), stream, job, mn_grad_fold{});
}

template <int KP>
static int backward(const mn_delta_params &job, cudaStream_t stream) {
    int code = intra_chunk<KP, true>(job, stream);
    if (code != cudaSuccess) return code;
    code = mn_delta_state_scan<KP>(delta_state_scan_kernel<KP, MN_DELTA_PAIRS, MN_SCAN_SAVE>,
                                   delta_state_scan_warp_kernel<KP, MN_DELTA_PAIRS, true>, job,
                                   false, job.padded_v, stream);
    return code == cudaSuccess ? scan_back<KP>(job, stream) : code;
}

/* A call, and gradients behind cotangents that are not finite once more: the scan back as if
 * cotangents up to the last of them were zeros, as far as its chunk, and the gradients of that. */
template <int KP>
static int backward_kept(const mn_delta_params &job, cudaStream_t stream) {
    const mn_call &call = job.p.call;
    const int code = backward<KP>(job, stream);
    mn_delta_params redo = job;
    const bool shows = job.p.grad.v.data || job.p.grad.e.data;
    const int64_t heads = mn_n_spans(call) * call.H;
    if (code != cudaSuccess || !redoes_gradients || !shows || call.T < 2 || heads == 0 ||
        !job.p.cot.o.data) {
        return code;
    }
    redo.cuts = job.workspace.cuts;
    redo.p.grad.state0 = {};
    const int found = mn_launch_smem_behind(true, delta_find_redo_back<true>, dim3((unsigned)heads),
                                            MN_DELTA_REDO_THREADS, 0, stream, redo,
                                            job.p.grad.v, 1);
    return found == cudaSuccess ? scan_back<KP>(redo, stream) : found;
}

int mn_dplr_chunk_forward(const mn_dplr_args *p, void *shared, void *stream) {
    mn_delta_params job;
    if (mn_dplr_uses_chunks_sm90(p)) return mn_dplr_chunk_forward_sm90(p, (cudaStream_t)stream);
    if (!make_params(&job, p, shared, false)) return cudaErrorNotSupported;
    return p->call.K <= 64 ? forward_kept<64>(job, (cudaStream_t)stream)
                           : forward_kept<128>(job, (cudaStream_t)stream);
}

int mn_dplr_chunk_backward(const mn_dplr_args *p, void *shared, void *stream) {
    mn_delta_params job;
    if (mn_dplr_uses_chunks_sm90(p)) {
        return mn_dplr_chunk_backward_sm90(p, shared, (cudaStream_t)stream);
    }
    if (!make_params(&job, p, shared, true)) return cudaErrorNotSupported;
    return p->call.K <= 64 ? backward_kept<64>(job, (cudaStream_t)stream)
                           : backward_kept<128>(job, (cudaStream_t)stream);
}

}    // namespace mneme::dplr
