/* importance_mma.cuh - Palimpsa in bf16: tensor cores do whatever is not one cell's own.
 *
 * Within a tile of 16 tokens, M and I are kept divided by A, the product of the decays so far, so
 * that nothing decays:
 *
 *   M' <- M' + (k / A) v        I' <- I' + (k^2 / A) b + ((1 - a) ip / A) 1        mu = M' / I'
 *
 * A token is then one product of depth 8 onto M' and I', whose factors are split into two numbers
 * of bf16. Where A would get smaller than exp(-20), a token is a head: what is there is multiplied
 * by A, which begins anew. o = q mu takes mu rounded to bf16, eight tokens to a product's result.
 *
 * Here: forward, and the states in front of tiles, from which importance_bwd_mma.cuh goes back. */
#ifndef MN_KERNELS_CUDA_IMPORTANCE_IMPORTANCE_MMA_CUH
#define MN_KERNELS_CUDA_IMPORTANCE_IMPORTANCE_MMA_CUH

#include "kernels/cuda/importance/importance_tile.cuh"

namespace importance::by_mma {

/* ---- forward --------------------------------------------------------------------------------- */

/* Tiles take turns in each pair. */
template <typename Block>
struct forward_smem {
    static constexpr int PITCH = Block::COLUMNS + 4;
    tile<Block, FORWARD_PASS> in[2];
    arrivals<Block, FORWARD_PASS> came[2];
    typename producer<Block, FORWARD_PASS>::sources from;
    alignas(16) float out[2][Block::GROUPS][TOKENS][PITCH];
};

/* Forward, M' and I' are counted in 1 / FORWARD_UNIT, so that A leaves as much room above as below.
 * The product of two I' is a float32 of which there is an inverse where both lie within these
 * bounds at the beginning of a tile: in it they grow, by no more than 1e18 unless k^2 b is above
 * some 1e13. */
static constexpr float FORWARD_UNIT = 1.0f / 16384, LEAST_PAIRED = 1e-18f, MOST_PAIRED = 1e18f;

/* mu of a group of cells. PAIRS: each reciprocal is that of a product of two, as they take longer
 * than the products that gives back. */
template <bool PAIRS>
__device__ __forceinline__ void means_of(float (&mu)[4], const float (&M)[4], const float (&I)[4]) {
#pragma unroll
    for (int i = 0; i < 4; i += PAIRS ? 2 : 1) {
        if (PAIRS) {
            const float over = mn_inverse(I[i] * I[i + 1]);
            mu[i] = M[i] * I[i + 1] * over;
            mu[i + 1] = M[i + 1] * I[i] * over;
        } else {
            mu[i] = M[i] * mn_inverse(I[i]);
        }
    }
}

/* Whether reciprocals may be shared in a tile without heads. */
__device__ __forceinline__ bool may_pair(const cells &c) {
    float least = c.I[0][0], most = c.I[0][0];
#pragma unroll
    for (int i = 1; i < 8; i++) {
        least = fminf(least, c.I[i / 4][i % 4]);
        most = fmaxf(most, c.I[i / 4][i % 4]);
    }
    return __all_sync(0xffffffffu, least >= LEAST_PAIRED && most <= MOST_PAIRED);
}

/* o of a tile, the sums over a warp's 16 slots of it. PLAIN: it has no heads, and may_pair. */
template <typename Block, bool PLAIN>
__device__ __forceinline__ void tile_forward(cells &c, forward_smem<Block> &r,
                                             int turn, const uint2 (&queries)[2]) {
    const walk<Block, FORWARD_PASS> along(r.in[turn]);
    const int column = Block::column();
#pragma unroll 1
    for (int first = 0; first < TOKENS; first += HALF) {
        const uint2 q = first == 0 ? queries[0] : queries[1];
        float sums[4];
        along.template advance<!PLAIN>(c, first);
#pragma unroll
        for (int t = 0; t < HALF; t++) {    // the next token before this one is read
            const cells now = c;
            if (t + 1 < HALF) along.template advance<!PLAIN>(c, first + t + 1);
            float mu[2][4];
            unsigned factor[4];
#pragma unroll
            for (int i = 0; i < 2; i++) means_of<PLAIN>(mu[i], now.M[i], now.I[i]);
            factor_of(factor, mu[0], mu[1]);
            put_column(sums, factor, q, t);
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int t = first + 2 * column_lane() + i % 2;
            r.out[turn][Block::group()][t][column + neighbour(i / 2)] = sums[i];
        }
    }
    c.times(r.in[turn].rest);
}

/* Where a thread puts its share of o: into o or, where blocks share the slots, into its part. */
template <typename Block>
struct reader {
    typedef mn_cell_share<Block::COLUMNS, Block::THREADS> share;
    mn_bf16 *to;
    float *part;
    int64_t inside;

    __device__ reader(const mn_importance_args &p, float *parts, const place &at, int64_t n_rows) {
        const int64_t v = Block::column0() + share::place(), token = at.span.t0 + share::row();
        const int64_t row = blockIdx.z * n_rows + (at.span.b * p.call.T + token) * p.call.H + at.h;
        inside = p.call.V - v;
        part = gridDim.z > 1 ? parts + row * 2 * p.call.V + v : nullptr;
        to = mn_row<mn_bf16>(p.o, at.span.b, token, at.h);
        if (to) to += v;
    }

    __device__ __forceinline__ void put(const mn_importance_args &p, const forward_smem<Block> &r,
                                        const mn_cell_tile &tile, int turn) const {
        if (share::row() >= tile.n_rows) return;
        float x[share::EACH] = {};
#pragma unroll
        for (int group = 0; group < Block::GROUPS; group++) {
            mn_cell_add(x, &r.out[turn][group][share::row()][share::place()]);
        }
#pragma unroll
        for (int i = 0; i < share::EACH; i++) x[i] *= (float)p.scale;
        if (part) mn_cell_store(part + tile.first * p.call.H * 2 * p.call.V, inside, x);
        else if (to) mn_cell_store(to + tile.first * p.o.stride[1], inside, x);
    }
};

template <typename Block>
__device__ void put_last_state(const cells &c, const mn_importance_args &p,
                               const place &at) {
    float *mu = mn_row<float>(p.mu, at.n, 0, at.h), *imp = mn_row<float>(p.imp, at.n, 0, at.h);
#pragma unroll
    for (int n = 0; n < 8; n++) {
        const int64_t cell = cell_at<Block, true>(p.call, n / 4, n % 4);
        const float M = c.M[n / 4][n % 4], I = c.I[n / 4][n % 4];
        if (cell >= 0 && mu) mu[cell] = M / I;
        if (cell >= 0 && imp) imp[cell] = I * (1.0f / FORWARD_UNIT);
    }
}

template <typename Block>
__global__ void __launch_bounds__(Block::THREADS, Block::PER_PROCESSOR)
forward_kernel(const __grid_constant__ mn_importance_args p, const gates *decays, float *sums,
               int64_t n_rows) {
    extern __shared__ float4 shared[];
    forward_smem<Block> &r = *(forward_smem<Block> *)shared;
    r.in[0].open();
    r.in[1].open();
    for (int64_t item = blockIdx.y; item < mn_n_spans(p.call) * p.call.H; item += gridDim.y) {
        const place at = place::of(p, item);
        const int length = (int)at.span.length, n_tiles = (int)mn_cell_tiles(length);
        const reader<Block> to(p, sums, at, n_rows);
        typedef producer<Block, FORWARD_PASS> next;
        next::open(r.from, p, at, decays);
        cells c;
        load_first<Block, true>(c, p, at);
        c.times(FORWARD_UNIT);
        __syncthreads();
        next::share(r.from, r.came[0]);
        next::fetch(r.came[0], r.from, 0, length);
        next::fetch(r.came[1], r.from, 1, length);
        next::wait();
        __syncthreads();
        for (int i = 0; i < n_tiles; i++) {    // what its one barrier orders has two smems
            const int turn = i % 2, slot = Block::slot() + 4 * column_lane();
            next::put(r.in[turn], r.came[turn], 1.0f);
            const uint2 q[2] = { r.came[turn].slots[1].get(row_lane(), slot),
                                 r.came[turn].slots[1].get(row_lane() + HALF, slot) };
            next::wait();
            __syncthreads();
            next::fetch(r.came[turn], r.from, i + 2, length);
            if (i > 0) to.put(p, r, mn_cell_tile_at(at.span, i - 1), !turn);
            if (r.in[turn].heads == 0 && may_pair(c)) tile_forward<Block, true>(c, r, turn, q);
            else tile_forward<Block, false>(c, r, turn, q);
        }
        __syncthreads();
        if (n_tiles > 0) to.put(p, r, mn_cell_tile_at(at.span, n_tiles - 1), (n_tiles - 1) % 2);
        put_last_state<Block>(c, p, at);
        __syncthreads();
    }
}

/* ---- states ---------------------------------------------------------------------------------- */

template <typename Block, pass PASS>
__device__ __forceinline__ void advance_tile(cells &c, const tile<Block, PASS> &in) {
    const walk<Block, PASS> along(in);
    along.pass(c, 0, TOKENS);
    c.times(in.rest);
}

template <typename Block>
struct states_smem {
    tile<Block, STATES_PASS> in[2];
    arrivals<Block, STATES_PASS> came[2];
    typename producer<Block, STATES_PASS>::sources from;
};

/* States in front of every tile, of which there are SETS sets for each head. */
template <typename Block>
__global__ void __launch_bounds__(Block::THREADS, 2 * Block::PER_PROCESSOR)
states_kernel(const __grid_constant__ mn_importance_args p, const gates *decays, float *states) {
    extern __shared__ float4 shared[];
    states_smem<Block> &r = *(states_smem<Block> *)shared;
    r.in[0].open();
    r.in[1].open();
    for (int64_t item = blockIdx.y; item < mn_n_spans(p.call) * p.call.H; item += gridDim.y) {
        const place at = place::of(p, item);
        const int length = (int)at.span.length, n_tiles = (int)mn_cell_tiles(length);
        const int64_t slot = mn_cell_first_slot(p.call, at.n, TOKENS);
        float *to = states + state_at<Block>(slot * p.call.H + at.h) + threadIdx.x * 4;
        const int64_t between = state_at<Block>(p.call.H) - state_at<Block>(0);
        typedef producer<Block, STATES_PASS> next;
        next::open(r.from, p, at, decays);
        cells c;
        load_first<Block, false>(c, p, at);
        __syncthreads();
        next::share(r.from, r.came[0]);
        next::fetch(r.came[0], r.from, 0, length);
        next::fetch(r.came[1], r.from, 1, length);
        next::wait();
        __syncthreads();
        for (int i = 0; i < n_tiles; i++) {
            const int turn = i % 2;
            c.store(to, SET_STRIDE<Block>);
            to += between;
            if (i + 1 == n_tiles) break;
            next::put(r.in[turn], r.came[turn], 1.0f);
            next::wait();
            __syncthreads();
            next::fetch(r.came[turn], r.from, i + 2, length);
            advance_tile<Block, STATES_PASS>(c, r.in[turn]);
        }
        __syncthreads();
    }
}

}    // namespace importance::by_mma

#endif
