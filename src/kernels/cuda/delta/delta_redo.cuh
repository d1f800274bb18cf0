/* delta_redo.cuh - numbers that are not finite, in delta (docs/internals/causality.md).
 *
 * What comes into a state that is not finite stays there: it shows in the last token's o. One
 * launch behind the others where delta_fwd_chunk_sm90_kernel serves, else two, look at that, head
 * by head, and end at once where all is well. Where it is not, they find the first token with such
 * a number, and make the rows before it again as if the sequence ended there: the intra-chunk stage
 * of the chunk that holds it, and the scan. Rows from it on, and the last state, stay as they
 * are. */
#ifndef MN_KERNELS_CUDA_DELTA_DELTA_REDO_CUH
#define MN_KERNELS_CUDA_DELTA_DELTA_REDO_CUH

#include "kernels/cuda/delta/delta_smem.cuh"
#include "kernels/cuda/prim/first_wild.cuh"

namespace mneme::delta {

/* The chunk of a block: of every one, or of a redo. */
struct mn_delta_chunk_place {
    mn_tile_span tile;
    int64_t h, index;    // record of the workspace
};

/* The first token of sequence `span` whose numbers harm those before it, 0: none. The block calls;
 * queries harm nobody but their own row, and log decays of channels, which are cut off, only where
 * they are NaN. */
__device__ inline int mn_delta_first_wild(const mn_delta_params &job, const mn_span &span,
                                          int64_t h) {
    const mn_delta_args &p = job.p;
    const mn_call &call = p.call;
    const int64_t key = mn_key_head(call, h);
    const mn_bf16 *last = mn_row<mn_bf16>(p.o, span.b, span.t0 + span.length - 1, h);
    const bool channel = p.decay == MN_DECAY_CHANNEL;
    const bool token_g = channel || p.decay == MN_DECAY_TOKEN;
    if (!mn_redo_row_is_wild(last, call.V)) return 0;
    return mn_redo_first_token(span.length, [&](int64_t t, float most) {
        const int64_t at = span.t0 + t;
        return mn_redo_has_wild(mn_row<mn_bf16>(p.v, span.b, at, h), call.V, most) ||
               mn_redo_has_wild(mn_row<mn_bf16>(p.e, span.b, at, key), call.K, most) ||
               mn_redo_has_wild(mn_row<mn_bf16>(p.w, span.b, at, key), call.K, most) ||
               mn_redo_has_wild(mn_row<mn_bf16>(job.odd_w, span.b, at, key), call.K, most) ||
               mn_redo_has_wild(mn_row<mn_bf16>(p.beta, span.b, at, h), 1, most) ||
               (token_g && mn_redo_has_wild(mn_row<mn_bf16>(p.g, span.b, at, h),
                                            channel ? call.K : 1, channel ? INFINITY : most));
    });
}

/* The chunk of `tokens` in which sequence n is cut for head h, with its rows in front of the cut;
 * no rows where there is nothing to do. The block calls. */
__device__ inline mn_delta_chunk_place mn_delta_cut_chunk(const mn_delta_params &job, int tokens,
                                                          int64_t n, int64_t h) {
    const mn_call &call = job.p.call;
    mn_delta_chunk_place place = {};
    mn_tile_span &tile = place.tile;
    mn_pdl_wait();
    tile.n = n, tile.span = mn_span_at(call, n), place.h = h;
    int cut = tile.span.length > 0 ? mn_delta_first_wild(job, tile.span, h) : 0;
    if (cut % tokens == 0) cut = 0;    // those of the chunks before never met it
    if (threadIdx.x == 0) job.cuts[n * call.H + h] = cut;
    tile.first = cut / tokens * tokens, tile.n_rows = cut - tile.first;
    place.index = (mn_delta_first_slot(call, n, tokens) + cut / tokens) * call.H + h;
    return place;
}

/* Block = slot * H + h; in a redo, of kernels that have one, n * H + h. That leaves where the
 * sequence is cut for the scan; chunks are of `tokens`. No rows where there is nothing to do. */
template <bool REDOES>
__device__ inline mn_delta_chunk_place mn_delta_find_chunk(const mn_delta_params &job,
                                                           int tokens) {
    const mn_call &call = job.p.call;
    const int64_t slot = blockIdx.x / (unsigned)call.H;
    mn_delta_chunk_place place = {};
    place.h = blockIdx.x % (unsigned)call.H, place.index = blockIdx.x;
    if (REDOES && job.cuts) return mn_delta_cut_chunk(job, tokens, slot, place.h);
    place.tile = mn_tile_at(call, tokens, slot);
    return place;
}

/* Records of a call: chunks of all heads. */
__host__ __device__ inline int64_t mn_delta_records(const mn_delta_params &job) {
    return mn_tile_slots(job.p.call, mn_delta_chunk_tokens(job.pairs)) * job.p.call.H;
}

/* The record of a block that has one: `index`; in a redo that of the chunk in which the sequence
 * and head `index` are cut, below zero where they are not. */
__device__ inline int64_t mn_delta_record_of(const mn_delta_params &job, int64_t index) {
    const int64_t H = job.p.call.H;
    const int tokens = mn_delta_chunk_tokens(job.pairs);
    if (!job.cuts) return index;
    const int cut = job.cuts[index];
    if (cut == 0) return -1;
    return (mn_delta_first_slot(job.p.call, index / H, tokens) + cut / tokens) * H + index % H;
}

/* Blocks of the intra-chunk stage. */
inline int64_t mn_delta_chunk_blocks(const mn_delta_params &job, int tokens) {
    const mn_call &call = job.p.call;
    return (job.cuts ? mn_n_spans(call) : mn_tile_slots(call, tokens)) * call.H;
}

/* Blocks of gradients of chunks: in a redo sequences and heads. */
inline int64_t mn_delta_grad_blocks(const mn_delta_params &job, int64_t records) {
    return job.cuts ? mn_n_spans(job.p.call) * job.p.call.H : records;
}

/* ---- back ------------------------------------------------------------------------------------ */

enum { MN_DELTA_REDO_THREADS = 128 };

/* Leaves in job.cuts the first token to make again, 0: none.
 *
 * Grid: n * H + h. Loads the first row of dv, or where `dv` is absent of grad.e, of which `times`
 * heads share one; where that is not finite cot.o (T,V). */
template <bool PAIRS>
__global__ void __launch_bounds__(MN_DELTA_REDO_THREADS)
delta_find_redo_back(const __grid_constant__ mn_delta_params job, const mn_out dv, int times) {
    const mn_delta_args &p = job.p;
    const mn_call &call = p.call;
    const int64_t h = blockIdx.x % call.H, width = dv.data ? call.V : call.K;
    const mn_span span = mn_span_at(call, blockIdx.x / call.H);
    const int64_t end = span.t0 + span.length;
    int64_t cut = 0;
    mn_pdl_launch_dependents();
    mn_pdl_wait();
    if (span.length > 0 && mn_redo_row_is_wild(mn_row<mn_bf16>(dv.data ? dv : p.grad.e, span.b,
                                                               span.t0, dv.data ? h : h / times),
                                               width)) {
        const int behind = mn_redo_first_token(span.length, [&](int64_t t, float most) {
            return mn_redo_has_wild(mn_row<mn_bf16>(p.cot.o, span.b, end - 1 - t, h), call.V, most);
        });
        cut = behind > 0 ? span.length - behind : 0;
    }
    if (cut % mn_delta_chunk_tokens(PAIRS) == 0) cut = 0;    // chunks behind never met it
    if (threadIdx.x == 0) job.cuts[blockIdx.x] = (int)cut;
}

}    // namespace mneme::delta

#endif
