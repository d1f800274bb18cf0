/* additive_token.cu - launches of additive_walk.cuh, and gradients of decays per token and head:
 *
 *   dg_t = D.S + sum over u in the chunk of q_u.dq'_u
 *              + sum over u < t in the chunk of (k_u.dk_u - q_u.dq_u)
 *
 * where S is the state in front of the chunk, D the adjoint of the state behind it, decayed over
 * it, and dq' the part of dq that is read from S. What cancels here has been rounded alike. */
#include "kernels/cuda/additive.cuh"
#include "kernels/cuda/additive_walk.cuh"

enum { MOST_CHUNK = 128 };

int mn_additive_token_chunk(int depth) {
    const size_t limit = (size_t)mn_additive_shared_limit();
    if (depth == 64) return sizeof(mn_walk_room<64, 128>) <= limit ? 128 : 64;
    if (depth == 128 && sizeof(mn_walk_room<128, 128>) <= limit) return 128;
    if (depth == 128) return sizeof(mn_walk_room<128, 64>) <= limit ? 64 : 0;
    return depth == 256 && sizeof(mn_walk_room<256, 64>) <= limit ? 64 : 0;
}

template <int DEPTH, int CHUNK, bool DECAYS>
static int launch_of(const mn_walks *walks, int count, int64_t segments, cudaStream_t stream) {
    int64_t blocks = 0;
    for (int i = 0; i < count; i++) {
        const int64_t n = mn_walk_slices(walks->walk[i]) * walks->call.H * mn_n_spans(walks->call);
        blocks = mn_max(blocks, n);
    }
    if (blocks == 0) return cudaSuccess;
    if (blocks > INT32_MAX) return cudaErrorNotSupported;
    const dim3 grid((unsigned)blocks, (unsigned)count, (unsigned)segments);
    return mn_launch_with_room(mn_walk_kernel<DEPTH, CHUNK, DECAYS>, grid,
                               mn_walk_sizes<DEPTH, CHUNK>::threads,
                               sizeof(mn_walk_room<DEPTH, CHUNK>), stream, *walks);
}

template <int DEPTH, int CHUNK>
static int launch_with(const mn_walks *walks, int count, int64_t segments, bool decays,
                       cudaStream_t stream) {
    if (decays) return launch_of<DEPTH, CHUNK, true>(walks, count, segments, stream);
    return launch_of<DEPTH, CHUNK, false>(walks, count, segments, stream);
}

int mn_additive_token_launch(const mn_walks *walks, int count, int64_t segments, bool decays,
                             cudaStream_t stream) {
    const int depth = mn_additive_depth(walks->walk[0].depth);
    const bool wide = mn_additive_token_chunk(depth) == 128;
    int (*launch)(const mn_walks *, int, int64_t, bool, cudaStream_t) = launch_with<256, 64>;
    if (depth == 128) launch = wide ? launch_with<128, 128> : launch_with<128, 64>;
    if (depth == 64) launch = wide ? launch_with<64, 128> : launch_with<64, 64>;
    return launch(walks, count, segments, decays, stream);
}

/* ---- gradients of decays --------------------------------------------------------------------- */

/* One block per chunk and head, one thread per token. `parts` numbers meet at each chunk. */
__global__ void __launch_bounds__(MOST_CHUNK)
chunk_decay_kernel(const __grid_constant__ mn_additive_args p, int64_t slices, int parts,
                   mn_additive_work work) {
    __shared__ float room[32];
    const int64_t h = blockIdx.x % p.call.H, slot = blockIdx.x / p.call.H;
    const int chunk = blockDim.x, thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    const mn_tile_span tile = mn_tile_at(p.call, chunk, slot);
    const int64_t tokens = p.call.B * p.call.T, t = tile.span.t0 + tile.first + thread;
    const bool inside = thread < tile.n_rows;
    float step = 0.0f, base = 0.0f;
    for (int64_t slice = 0; slice < slices && inside; slice++) {
        const int64_t at = (slice * tokens + tile.span.b * p.call.T + t) * p.call.H + h;
        step += work.key[at] - work.query[at];
    }
    for (int64_t i = 0; i < parts && tile.n_rows > 0; i++) {
        const int64_t at = (slot * p.call.H + h) * parts + i;
        base += work.meetings[at] + work.inside[at];
    }
    float sum = step;
#pragma unroll
    for (int by = 1; by < 32; by <<= 1) {
        const float other = __shfl_up_sync(0xffffffffu, sum, by);
        if (lane >= by) sum += other;
    }
    if (lane == 31) room[warp] = sum;
    float before = __shfl_up_sync(0xffffffffu, sum, 1);
    if (lane == 0) before = 0.0f;
    __syncthreads();
    for (int i = 0; i < warp; i++) base += room[i];
    const float dg = inside ? base + before : 0.0f;
    if (inside && p.decay == MN_DECAY_TOKEN) {
        mn_put(mn_row<mn_bf16>(p.grad.g, tile.span.b, t, h), dg);
    }
    __syncthreads();
    const float all = mn_warp_sum(dg);
    if (lane == 0) room[warp] = all;
    __syncthreads();
    if (thread != 0) return;
    float whole = 0.0f;
    for (int i = 0; i < chunk / 32; i++) whole += room[i];
    work.whole[slot * p.call.H + h] = whole;
}

/* A decay per head: the sum over all chunks, each thread's in their order, then the threads'. */
__global__ void __launch_bounds__(256)
head_decay_kernel(const __grid_constant__ mn_additive_args p, int64_t slots, const float *whole) {
    __shared__ float room[32];
    float sum = 0.0f;
    for (int64_t slot = threadIdx.x; slot < slots; slot += 256) {
        sum += whole[slot * p.call.H + blockIdx.x];
    }
    sum = mn_team_sum<256>(sum, room);
    if (threadIdx.x == 0) mn_put(mn_row<mn_bf16>(p.grad.g, 0, 0, blockIdx.x), sum);
}

int mn_additive_token_decay(const mn_additive_args *p, const mn_additive_extent *extent,
                            const mn_additive_work *work, cudaStream_t stream) {
    const int chunk = mn_additive_token_chunk(mn_additive_depth(p->call.V));
    const int64_t blocks = extent->slots * p->call.H;
    if (blocks > INT32_MAX) return cudaErrorNotSupported;
    if (blocks > 0) {
        const int parts = (int)extent->slices * MN_WALK_WARPS;
        chunk_decay_kernel<<<(unsigned)blocks, chunk, 0, stream>>>(
            *p, extent->slices * (128 / chunk), parts, *work);
    }
    if (p->decay == MN_DECAY_HEAD && p->call.H > 0) {
        head_decay_kernel<<<(unsigned)p->call.H, 256, 0, stream>>>(*p, extent->slots, work->whole);
    }
    return mn_launched();
}
