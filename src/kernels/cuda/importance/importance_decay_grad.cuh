/* importance_decay_grad.cuh - gradients of Palimpsa's log decays and prior, from what the blocks of
 * importance_bwd_mma.cuh have left.
 *
 *   S_t = a sum(D_t . M_{t-1} + C_t . I_{t-1})     dg = S_t - a ip sum C_t
 *   S_{t+1} = S_t + v'dv + b'db + (1 - a) ip sum C_t     dip = sum (1 - a) sum C_t
 *
 * Sums are over cells. S in front of each tile is formed from its definition; sum C_t, which is
 * also what ip in I adds to it, is a number that decays and gets -sum pull_t mu_t: a walk from the
 * last token to the first, in float32, which tiles know up to what comes from behind them. */
#ifndef MN_KERNELS_CUDA_IMPORTANCE_IMPORTANCE_DECAY_GRAD_CUH
#define MN_KERNELS_CUDA_IMPORTANCE_IMPORTANCE_DECAY_GRAD_CUH

#include "kernels/cuda/importance/importance_bwd_mma.cuh"

namespace importance::by_mma {

enum {
    WALKERS = 512,                      // threads of a block
    AT_ONCE = WALKERS / TOKENS,         // tiles that they have at once
    WALKED = 8 * AT_ONCE,               // tiles of one step of the walk between tiles
};

/* A head of one sequence, half a warp to a tile. */
template <typename Block>
struct gate_scan {
    parts_of<Block> parts;    // of the first block
    const gates *decays;      // of the first tile
    int64_t n_rows, n_blocks, heads;
    int length;

    /* Sums over the blocks: what S gets at this lane's token without ip, and sum pull mu there. */
    __device__ float2 token(int tile) const {
        float2 sum = { 0.0f, 0.0f };
        const int t = tile * TOKENS + threadIdx.x % TOKENS;
        if (t >= length) return sum;
#pragma unroll 4
        for (int64_t block = 0; block < n_blocks; block++) {
            const float2 part = parts.gates[block * n_rows + t * heads];
            sum.x += part.x, sum.y += part.y;
        }
        return sum;
    }

    /* S in front of the tile without ip sum C. */
    __device__ float start(int tile) const {
        static_assert(Block::WARPS == TOKENS, "a lane for each warp");
        const float *from = parts.along + tile * parts.tiles_ws + threadIdx.x % TOKENS;
        float sum = 0.0f;
#pragma unroll 4
        for (int64_t block = 0; block < n_blocks; block++) sum += from[block * Block::WARPS];
#pragma unroll
        for (int by = 1; by < TOKENS; by *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, by);
        return sum;
    }

    /* sum C_t = -spread_t + a_{t+1} sum C_{t+1} is the result and `keeps` times what comes from
     * behind the tile. */
    __device__ static float local(float &keeps, float spread, const gates &g) {
        const int t = threadIdx.x % TOKENS;
        float C = -spread;
        keeps = t + 1 < TOKENS ? g.a[t + 1] : 1.0f;
#pragma unroll
        for (int by = 1; by < TOKENS; by *= 2) {
            const float later = __shfl_down_sync(0xffffffffu, C, by, TOKENS);
            const float more = __shfl_down_sync(0xffffffffu, keeps, by, TOKENS);
            if (t + by < TOKENS) C = fmaf(keeps, later, C), keeps *= more;
        }
        return C;
    }
};

/* What comes from behind each of a step's tiles: first its own share of what goes to the tile in
 * front of it, and by what it multiplies what comes from behind itself. */
struct scan_smem {
    float keeps[WALKED], share[WALKED], behind[WALKED + 1], team[32];
};

/* A block has a head of a sequence; `dips` (sequence, head) gets its part of dip. */
template <typename Block>
__global__ void __launch_bounds__(WALKERS)
scan_gates_kernel(const __grid_constant__ mn_importance_args p, const gates *decays, room to,
                  float *dips, int64_t n_blocks, int64_t n_rows) {
    __shared__ scan_smem r;
    const place at = place::of(p, blockIdx.x);
    const int64_t slot = mn_cell_first_slot(p.call, at.n, TOKENS);
    const gate_scan<Block> along = { parts_of<Block>(p, to, at, n_rows, n_blocks, 0),
                                     decays + slot * p.call.H + at.h, n_rows, n_blocks, p.call.H,
                                     (int)at.span.length };
    const int n_tiles = (int)mn_cell_tiles(at.span.length), t = threadIdx.x % TOKENS;
    float dip = 0.0f, edge = 0.0f;
    for (int64_t block = 0; block < n_blocks; block++) edge += along.parts.edge[block].x;
    for (int end = n_tiles; end > 0; end -= WALKED) {
        const int first = max(end - WALKED, 0);
        for (int from = first; from < end; from += AT_ONCE) {
            const int wanted = from + (int)threadIdx.x / TOKENS, tile = min(wanted, end - 1);
            const gates &g = along.decays[tile * along.heads];
            float keeps;
            const float C = along.local(keeps, along.token(tile).y, g);
            if (t > 0 || wanted >= end) continue;
            r.keeps[tile - first] = g.a[0] * keeps;
            r.share[tile - first] = g.a[0] * C;
        }
        __syncthreads();
        if (threadIdx.x == 0) {
            float behind = edge;
            for (int tile = end - 1; tile >= first; tile--) {
                r.behind[tile - first + 1] = behind;
                behind = fmaf(r.keeps[tile - first], behind, r.share[tile - first]);
            }
            r.behind[0] = behind;
        }
        __syncthreads();
        edge = r.behind[0];
        for (int from = first; from < end; from += AT_ONCE) {
            const int wanted = from + (int)threadIdx.x / TOKENS, tile = min(wanted, end - 1);
            const gates &g = along.decays[tile * along.heads];
            const float2 token = along.token(tile);
            float keeps, C = along.local(keeps, token.y, g);
            C = fmaf(keeps, r.behind[tile - first + 1], C);
            const float fall = fmaf(g.forget[t] * at.ip, C, token.x);
            float sum = fall;
#pragma unroll
            for (int by = 1; by < TOKENS; by *= 2) {
                const float before = __shfl_up_sync(0xffffffffu, sum, by, TOKENS);
                if (t >= by) sum += before;
            }
            const float start = fmaf(at.ip, r.behind[tile - first], along.start(tile));
            const int64_t token_at = (int64_t)tile * TOKENS + t;
            if (wanted >= end || token_at >= at.span.length) continue;
            dip = fmaf(g.forget[t], C, dip);
            float *dg = mn_row<float>(p.grad.g, at.span.b, at.span.t0 + token_at, at.h);
            if (dg) *dg = start + (sum - fall) - g.a[t] * at.ip * C;
        }
        __syncthreads();
    }
    dip = mn_group_sum<WALKERS>(dip, r.team);
    for (int64_t block = 0; block < n_blocks; block++) dip += along.parts.edge[block].y;
    if (threadIdx.x == 0) dips[at.n * p.call.H + at.h] = dip;
}

}    // namespace importance::by_mma

#endif
