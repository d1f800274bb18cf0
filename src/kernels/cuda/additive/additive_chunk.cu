/* additive_chunk.cu - launches of additive_state_scan.cuh, and gradients of decays per token and
 * head, by additive_decay_grad.cuh. */
#include "kernels/cuda/additive/additive.cuh"
#include "kernels/cuda/additive/additive_decay_grad.cuh"
#include "kernels/cuda/additive/additive_state_scan.cuh"

namespace mneme::additive {

enum { MAX_CHUNK = 128 };

int mn_additive_token_chunk(int depth) {
    const size_t limit = (size_t)mn_additive_smem_limit();
    if (depth == 64) return sizeof(mn_scan_smem<64, 128>) <= limit ? 128 : 64;
    if (depth == 128 && sizeof(mn_scan_smem<128, 128>) <= limit) return 128;
    if (depth == 128) return sizeof(mn_scan_smem<128, 64>) <= limit ? 64 : 0;
    return depth == 256 && sizeof(mn_scan_smem<256, 64>) <= limit ? 64 : 0;
}

template <int DEPTH, int CHUNK, bool DECAYS>
static int launch_of(const mn_chunk_scans *scans, int count, int64_t segments,
                     cudaStream_t stream) {
    int64_t blocks = 0;
    for (int i = 0; i < count; i++) {
        const int64_t n = mn_scan_slices(scans->scan[i]) * scans->call.H
            * mn_n_spans(scans->call);
        blocks = mn_max(blocks, n);
    }
    if (blocks == 0) return cudaSuccess;
    if (blocks > INT32_MAX) return cudaErrorNotSupported;
    const dim3 grid((unsigned)blocks, (unsigned)count, (unsigned)segments);
    return mn_launch_smem(additive_state_scan<DEPTH, CHUNK, DECAYS>, grid,
                               mn_scan_sizes<DEPTH, CHUNK>::threads,
                               sizeof(mn_scan_smem<DEPTH, CHUNK>), stream, *scans);
}

template <int DEPTH, int CHUNK>
static int launch_decay(const mn_chunk_scans *scans, int count, int64_t segments, bool decays,
                       cudaStream_t stream) {
    if (decays) return launch_of<DEPTH, CHUNK, true>(scans, count, segments, stream);
    return launch_of<DEPTH, CHUNK, false>(scans, count, segments, stream);
}

int mn_additive_token_launch(const mn_chunk_scans *scans, int count, int64_t segments, bool decays,
                             cudaStream_t stream) {
    mn_chunk_scans rest = *scans;
    const int code = mn_additive_token_launch_sm90(&rest, &count, segments, decays, stream);
    if (code != cudaSuccess || count == 0) return code;
    const int depth = mn_additive_padded_depth(scans->scan[0].depth);
    const bool wide = mn_additive_token_chunk(depth) == 128;
    int (*launch)(const mn_chunk_scans *, int, int64_t, bool, cudaStream_t) = launch_decay<256, 64>;
    if (depth == 128) launch = wide ? launch_decay<128, 128> : launch_decay<128, 64>;
    if (depth == 64) launch = wide ? launch_decay<64, 128> : launch_decay<64, 64>;
    return launch(&rest, count, segments, decays, stream);
}

/* ---- gradients of decays --------------------------------------------------------------------- */

/* One block per chunk and head, one thread per token. BY_WARPGROUPS: from what
 * additive_token_chunk_sm90.cu has left. */
template <bool BY_WARPGROUPS>
__global__ void __launch_bounds__(MAX_CHUNK)
additive_chunk_decay_grad(const __grid_constant__ mn_additive_args p, mn_decay_partials parts,
                          float *whole) {
    __shared__ float smem[32];
    const int64_t h = blockIdx.x % p.call.H, slot = blockIdx.x / p.call.H;
    const int chunk = blockDim.x, thread = threadIdx.x, lane = thread % 32;
    const mn_tile_span tile = mn_tile_at(p.call, chunk, slot);
    const int64_t t = tile.span.t0 + tile.first + thread;
    const bool inside = thread < tile.n_rows;
    const float dg = BY_WARPGROUPS ? mn_decay_grad_by_warpgroups(smem, parts, tile, blockIdx.x)
                                   : mn_decay_grad(smem, parts, p.call, tile, slot, h);
    if (inside && p.decay == MN_DECAY_TOKEN) {
        mn_put(mn_row<mn_bf16>(p.grad.g, tile.span.b, t, h), dg);
    }
    __syncthreads();
    const float all = mn_warp_sum(dg);
    if (lane == 0) smem[thread / 32] = all;
    __syncthreads();
    if (thread != 0) return;
    float sum = 0.0f;
    for (int i = 0; i < chunk / 32; i++) sum += smem[i];
    whole[slot * p.call.H + h] = sum;
}

/* A decay per head: the sum over all chunks, each thread's in their order, then the threads'. */
__global__ void __launch_bounds__(256)
additive_head_decay_grad(const __grid_constant__ mn_additive_args p, int64_t slots,
                         const float *whole) {
    __shared__ float smem[32];
    float sum = 0.0f;
    for (int64_t slot = threadIdx.x; slot < slots; slot += 256) {
        sum += whole[slot * p.call.H + blockIdx.x];
    }
    sum = mn_group_sum<256>(sum, smem);
    if (threadIdx.x == 0) mn_put(mn_row<mn_bf16>(p.grad.g, 0, 0, blockIdx.x), sum);
}

int mn_additive_token_decay_grad(const mn_additive_args *p, const mn_additive_extent *extent,
                            const mn_additive_workspace *workspace, cudaStream_t stream) {
    const int64_t blocks = extent->slots * p->call.H, slices = extent->slices;
    if (blocks > INT32_MAX) return cudaErrorNotSupported;
    mn_decay_partials parts = { workspace->query, workspace->key, workspace->state_dots,
                                workspace->inside, 0, 0 };
    if (blocks > 0 && extent->by_warpgroups) {
        parts.shares = mn_additive_token_blocks_sm90(p->call.V, p->call.K);
        parts.parts = 4 * (int)slices;
        additive_chunk_decay_grad<true><<<(unsigned)blocks, MN_SCAN_BY_WARPGROUPS, 0, stream>>>(
            *p, parts, workspace->whole);
    } else if (blocks > 0) {
        const int chunk = mn_additive_token_chunk(mn_additive_padded_depth(p->call.V));
        parts.shares = slices * (128 / chunk);
        parts.parts = (int)slices * MN_SCAN_WARPS;
        additive_chunk_decay_grad<false><<<(unsigned)blocks, chunk, 0, stream>>>(
            *p, parts, workspace->whole);
    }
    if (p->decay == MN_DECAY_HEAD && p->call.H > 0) {
        additive_head_decay_grad<<<(unsigned)p->call.H, 256, 0,
            stream>>>(*p, extent->slots, workspace->whole);
    }
    return mn_launch_status();
}

}    // namespace mneme::additive
