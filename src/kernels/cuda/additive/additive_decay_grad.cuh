/* additive_decay_grad.cuh - gradients of decays per token, from what two scans left:
 *
 *   dg_t = D.S + sum over u in the chunk of k_u.dk'_u
 *              + sum over u >= t in the chunk of (q_u.dq_u - k_u.dk_u)
 *
 * where S is the state in front of the chunk, D the adjoint of the state behind it, decayed over
 * it, and dk' the part of dk that is read from that adjoint. Sums go from a token to the chunk's
 * end, so that none has what only earlier cotangents make. What cancels here has been rounded
 * alike, or, by additive_token_chunk_sm90.cu, what tokens of a chunk read from each other is left
 * out of dq and dk and comes with q_u.dq'_u as a number that nothing has been taken from. */
#ifndef MN_KERNELS_CUDA_ADDITIVE_ADDITIVE_DECAY_GRAD_CUH
#define MN_KERNELS_CUDA_ADDITIVE_ADDITIVE_DECAY_GRAD_CUH

#include "kernels/cuda/prim/common.cuh"

namespace mneme::additive {

/* Products of q.dq and k.dk as `shares` parts of (B T, H); what met at a chunk and head as `parts`
 * numbers each. */
struct mn_decay_partials {
    const float *query, *key, *state_dots, *inside;
    int64_t shares;
    int parts;
};

/* Token t of batch row b, head h: the sum of its shares of q.dq or k.dk. */
__device__ inline float mn_decay_sum_partials(const mn_decay_partials &p, const float *products,
                                        const mn_call &call, int64_t b, int64_t t, int64_t h) {
    float sum = 0.0f;
    for (int64_t share = 0; share < p.shares; share++) {
        sum += products[((share * call.B + b) * call.T + t) * call.H + h];
    }
    return sum;
}

/* `base` and the sum of `step` over this thread and those behind it, 0 beyond the chunk. */
__device__ inline float mn_decay_sum_to_end(float *smem, float base, float step, bool inside) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    float sum = step;
#pragma unroll
    for (int by = 1; by < 32; by <<= 1) {
        const float other = __shfl_down_sync(0xffffffffu, sum, by);
        if (lane + by < 32) sum += other;
    }
    if (lane == 0) smem[warp] = sum;
    __syncthreads();
    for (int i = (int)blockDim.x / 32 - 1; i > warp; i--) base += smem[i];
    return inside ? base + sum : 0.0f;
}

/* dg of this thread's token of a chunk, 0 beyond its end. A block has a chunk, of at most 1024
 * tokens, and a head; all its threads call. `smem`: 32 floats of shared memory. */
__device__ inline float mn_decay_grad(float *smem, const mn_decay_partials &p, const mn_call &call,
                                    const mn_tile_span &tile, int64_t slot, int64_t h) {
    const int thread = threadIdx.x;
    const int64_t t = tile.span.t0 + tile.first + thread;
    const bool inside = thread < tile.n_rows;
    float step = 0.0f, base = 0.0f;
    if (inside) {
        for (int64_t share = 0; share < p.shares; share++) {
            const int64_t at = ((share * call.B + tile.span.b) * call.T + t) * call.H + h;
            step += p.query[at] - p.key[at];
        }
    }
    for (int64_t i = 0; i < p.parts && tile.n_rows > 0; i++) {
        const int64_t at = (slot * call.H + h) * p.parts + i;
        base += p.state_dots[at] + p.inside[at];
    }
    return mn_decay_sum_to_end(smem, base, step, inside);
}

/* The same from what additive_token_chunk_sm90.cu leaves: a chunk's tokens of a head and of each of
 * `shares` blocks side by side. */
__device__ inline float mn_decay_grad_by_warpgroups(float *smem, const mn_decay_partials &p,
                                                    const mn_tile_span &tile, int64_t index) {
    const int thread = threadIdx.x;
    const bool inside = thread < tile.n_rows;
    float step = 0.0f, base = 0.0f;
    for (int64_t share = 0; share < p.shares && tile.n_rows > 0; share++) {
        const int64_t at = index * p.shares + share;
        if (inside) step += p.query[at * blockDim.x + thread] - p.key[at * blockDim.x + thread];
        base += p.inside[at];
    }
    for (int i = 0; i < p.parts && tile.n_rows > 0; i++) base += p.state_dots[index * p.parts + i];
    return mn_decay_sum_to_end(smem, base, step, inside);
}

}    // namespace mneme::additive

#endif
