/* additive_chunk.cu - launches of additive_state_scan.cuh, and gradients of decays per token and
 * head, by
 * additive_decay_grad.cuh. */
#include "kernels/cuda/additive/additive.cuh"
#include "kernels/cuda/additive/additive_decay_grad.cuh"
#include "kernels/cuda/additive/additive_state_scan.cuh"

enum { MOST_CHUNK = 128 };

int mn_additive_token_chunk(int depth) {
    const size_t limit = (size_t)mn_additive_shared_limit();
    if (depth == 64) return sizeof(mn_state_scan_smem<64, 128>) <= limit ? 128 : 64;
    if (depth == 128 && sizeof(mn_state_scan_smem<128, 128>) <= limit) return 128;
    if (depth == 128) return sizeof(mn_state_scan_smem<128, 64>) <= limit ? 64 : 0;
    return depth == 256 && sizeof(mn_state_scan_smem<256, 64>) <= limit ? 64 : 0;
}

template <int DEPTH, int CHUNK, bool DECAYS>
static int launch_of(const mn_state_scans *scans, int count, int64_t segments,
                     cudaStream_t stream) {
    int64_t blocks = 0;
    for (int i = 0; i < count; i++) {
        const int64_t n = mn_state_scan_slices(scans->walk[i]) * scans->call.H
            * mn_n_spans(scans->call);
        blocks = mn_max(blocks, n);
    }
    if (blocks == 0) return cudaSuccess;
    if (blocks > INT32_MAX) return cudaErrorNotSupported;
    const dim3 grid((unsigned)blocks, (unsigned)count, (unsigned)segments);
    return mn_launch_smem(mn_state_scan_kernel<DEPTH, CHUNK, DECAYS>, grid,
                               mn_state_scan_sizes<DEPTH, CHUNK>::threads,
                               sizeof(mn_state_scan_smem<DEPTH, CHUNK>), stream, *scans);
}

template <int DEPTH, int CHUNK>
static int launch_with(const mn_state_scans *scans, int count, int64_t segments, bool decays,
                       cudaStream_t stream) {
    if (decays) return launch_of<DEPTH, CHUNK, true>(scans, count, segments, stream);
    return launch_of<DEPTH, CHUNK, false>(scans, count, segments, stream);
}

int mn_additive_token_launch(const mn_state_scans *scans, int count, int64_t segments, bool decays,
                             cudaStream_t stream) {
    const int depth = mn_additive_depth(scans->walk[0].depth);
    const bool wide = mn_additive_token_chunk(depth) == 128;
    int (*launch)(const mn_state_scans *, int, int64_t, bool, cudaStream_t) = launch_with<256, 64>;
    if (depth == 128) launch = wide ? launch_with<128, 128> : launch_with<128, 64>;
    if (depth == 64) launch = wide ? launch_with<64, 128> : launch_with<64, 64>;
    return launch(scans, count, segments, decays, stream);
}

/* ---- gradients of decays --------------------------------------------------------------------- */

/* One block per chunk and head, one thread per token. */
__global__ void __launch_bounds__(MOST_CHUNK)
chunk_decay_kernel(const __grid_constant__ mn_additive_args p, mn_decay_parts parts, float *whole) {
    __shared__ float room[32];
    const int64_t h = blockIdx.x % p.call.H, slot = blockIdx.x / p.call.H;
    const int chunk = blockDim.x, thread = threadIdx.x, lane = thread % 32;
    const mn_tile_span tile = mn_tile_at(p.call, chunk, slot);
    const int64_t t = tile.span.t0 + tile.first + thread;
    const bool inside = thread < tile.n_rows;
    const float dg = mn_decay_of(room, parts, p.call, tile, slot, h);
    if (inside && p.decay == MN_DECAY_TOKEN) {
        mn_put(mn_row<mn_bf16>(p.grad.g, tile.span.b, t, h), dg);
    }
    __syncthreads();
    const float all = mn_warp_sum(dg);
    if (lane == 0) room[thread / 32] = all;
    __syncthreads();
    if (thread != 0) return;
    float sum = 0.0f;
    for (int i = 0; i < chunk / 32; i++) sum += room[i];
    whole[slot * p.call.H + h] = sum;
}

/* A decay per head: the sum over all chunks, each thread's in their order, then the threads'. */
__global__ void __launch_bounds__(256)
head_decay_kernel(const __grid_constant__ mn_additive_args p, int64_t slots, const float *whole) {
    __shared__ float room[32];
    float sum = 0.0f;
    for (int64_t slot = threadIdx.x; slot < slots; slot += 256) {
        sum += whole[slot * p.call.H + blockIdx.x];
    }
    sum = mn_group_sum<256>(sum, room);
    if (threadIdx.x == 0) mn_put(mn_row<mn_bf16>(p.grad.g, 0, 0, blockIdx.x), sum);
}

int mn_additive_token_decay(const mn_additive_args *p, const mn_additive_extent *extent,
                            const mn_additive_work *work, cudaStream_t stream) {
    const int chunk = mn_additive_token_chunk(mn_additive_depth(p->call.V));
    const int64_t blocks = extent->slots * p->call.H;
    if (blocks > INT32_MAX) return cudaErrorNotSupported;
    if (blocks > 0) {
        const mn_decay_parts parts = { work->query, work->key, work->meetings, work->inside,
                                       extent->slices * (128 / chunk),
                                       (int)extent->slices * MN_SCAN_WARPS };
        chunk_decay_kernel<<<(unsigned)blocks, chunk, 0, stream>>>(*p, parts, work->whole);
    }
    if (p->decay == MN_DECAY_HEAD && p->call.H > 0) {
        head_decay_kernel<<<(unsigned)p->call.H, 256, 0, stream>>>(*p, extent->slots, work->whole);
    }
    return mn_launch_status();
}
