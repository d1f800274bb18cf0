/* delta_grad_channel.cuh - delta_grad.cuh where each channel has a decay of its own.
 *
 *   dq_ti += scale sum_s dP_ts beta_s w_si exp(G_ti - G_si)      and so on
 *
 * Pairs of tokens in different blocks of 16 go through tensor cores, with decays counted from the
 * start of the later token's block on one side and to the end of the earlier one's on the other, so
 * that no factor exceeds 1. Pairs inside a block are summed up one by one in float32, a thread for
 * each channel of each block. Decays are cut off as in delta_intra_chunk_channel.cuh. */
#ifndef MN_KERNELS_CUDA_DELTA_DELTA_GRAD_CHANNEL_CUH
#define MN_KERNELS_CUDA_DELTA_DELTA_GRAD_CHANNEL_CUH

#include "kernels/cuda/delta/delta_grad.cuh"
#include "kernels/cuda/delta/delta_intra_chunk_channel.cuh"

/* What is in shared memory once the states have been read: tiles in turn, and -dA and scale dP of
 * pairs inside blocks. */
template <int KT>
struct mn_channel_tiles {
    union {
        unsigned char late[3][mn_tile_bytes<KT>()];    // rows of w for a later block: 1, 2, 3
        struct {
            unsigned char q[3][mn_tile_bytes<KT>()], e[3][mn_tile_bytes<KT>()];
        } early;                                       // of q and e for an earlier one: 0, 1, 2
        struct {
            mn_channel_levels<KT> q, e, w;
        } sums;                                        // of pairs inside blocks; then dG in q
    };
    float2 inside[4][16][16];
};

struct alignas(128) mn_channel_squares_smem {
    unsigned char P[mn_tile_bytes<64>()], A[mn_tile_bytes<64>()];    // scale dP and -dA
};

template <int KT>
struct mn_channel_smem {
    union {
        mn_grade_stage<KT> stage[2];
        mn_channel_tiles<KT> tiles;
    };
    mn_grade_keys<KT> keys;
    union {
        mn_channel_squares_smem squares;
        float ends[MN_DELTA_GRADERS / (KT / 8)][KT];    // S . D, before
    };
    mn_channel_levels<KT> levels;
    float written[4][KT], end[KT], run[4][KT], beta[MN_DELTA_CHUNK];
    mn_grade_sums sums;
};

/* ---- through states -------------------------------------------------------------------------- */

/* Levels of this block's channels. */
template <int KT>
__device__ inline void mn_channel_count(mn_channel_smem<KT> &room, const mn_delta_job &job,
                                        const mn_grade_place &at) {
    const int k = threadIdx.x, block = k / (KT / 2), i = k % (KT / 2) * 2;
    if (k < MN_DELTA_CHUNK) room.beta[k] = job.work.levels[at.index].beta[k];
    if (block >= 4) return;
    float2 g[16];
    mn_channel_decays(g, job, at.tile.span, at.h, at.tile.first + 16 * block,
                      at.count - 16 * block, at.channel0 + i);
    mn_channel_add_up<KT>(room.levels, g, block, i);
}

/* The decay of block `block`'s channels from the chunk's start, or from its end to the chunk's. */
template <int KT>
__device__ inline float2 mn_channel_before(const mn_channel_levels<KT> &c, int block, int i) {
    float2 sum = make_float2(0.0f, 0.0f);
    for (int M = 0; M < block; M++) sum = sum + c.pair(16 * M + 15, i);
    return sum;
}

template <int KT>
__device__ inline float2 mn_channel_behind(const mn_channel_levels<KT> &c, int block, int i) {
    float2 sum = make_float2(0.0f, 0.0f);
    for (int M = block + 1; M < 4; M++) sum = sum + c.pair(16 * M + 15, i);
    return sum;
}

/* Decays what came through the states; adds up w_beta dw over tokens. */
template <int KT>
__device__ void mn_channel_states(mn_channel_smem<KT> &room, mn_grade_tile<KT> &sum,
                                  const unsigned char *w, float scale, const mn_grade_place &at) {
    const int lane = threadIdx.x % 32, t = at.block * 16 + lane / 4;
#pragma unroll
    for (int n = 0; n < mn_grade_tile<KT>::N; n++) {
        const int i = at.quarter * (KT / 4) + 8 * n + lane % 4 * 2;
        const float2 before = mn_channel_before(room.levels, at.block, i);
        const float2 behind = mn_channel_behind(room.levels, at.block, i);
        const float2 last = room.levels.pair(at.block * 16 + 15, i);
        float2 written = make_float2(0.0f, 0.0f);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int row = t + 8 * half, c = 2 * half;
            const float2 level = room.levels.pair(row, i), early = before + level;
            const float2 late = behind + (last - level);
            const float2 fall = make_float2(__expf(early.x), __expf(early.y));
            const float2 keep = make_float2(__expf(late.x), __expf(late.y));
            const unsigned write = *(const unsigned *)(w + mn_tile_place(row, i / 8) + i % 8 * 2);
            sum.q[n][c] *= scale * fall.x, sum.q[n][c + 1] *= scale * fall.y;
            sum.e[n][c] *= -fall.x, sum.e[n][c + 1] *= -fall.y;
            sum.w[n][c] *= keep.x, sum.w[n][c + 1] *= keep.y;
            written.x = fmaf(room.beta[row] * mn_low(write), sum.w[n][c], written.x);
            written.y = fmaf(room.beta[row] * mn_high(write), sum.w[n][c + 1], written.y);
        }
        written.x = mn_sum_down(written.x), written.y = mn_sum_down(written.y);
        if (lane < 4) *(float2 *)&room.written[at.block][i] = written;
    }
}

/* dG of the chunk's end for each channel: a thread each. */
template <int KT>
__device__ inline void mn_channel_end(mn_channel_smem<KT> &room) {
    const int i = threadIdx.x;
    if (i >= KT) return;
    float level = 0.0f, both = 0.0f, written = 0.0f;
    for (int M = 0; M < 4; M++) {
        level += room.levels.at[16 * M + 15][i];
        written += room.written[M][i];
    }
    for (int k = 0; k < MN_DELTA_GRADERS / (KT / 8); k++) both += room.ends[k][i];
    room.end[i] = fmaf(__expf(level), both, written);
}

/* ---- between blocks -------------------------------------------------------------------------- */

/* scale dP and -dA in bf16, and in float32 inside blocks. */
template <int KT>
__device__ inline void mn_channel_squares(mn_channel_smem<KT> &room, const mn_grade_tile<KT> &sum,
                                          float scale, const mn_grade_place &at) {
    const int lane = threadIdx.x % 32;
    if (at.quarter > at.block) return;
#pragma unroll
    for (int n = 0; n < 2; n++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int row = lane / 4 + 8 * half, column = n * 8 + lane % 4 * 2, c = 2 * half;
            const int t = at.block * 16 + row, s = at.quarter * 16 + column;
            const float p[2] = { scale * sum.P[n][c], scale * sum.P[n][c + 1] };
            const unsigned place = mn_tile_place(t, s / 8) + s % 8 * 2;
            *(unsigned *)(room.squares.P + place) = mn_pair(p[0], p[1]);
            *(unsigned *)(room.squares.A + place) = mn_pair(-sum.A[n][c], -sum.A[n][c + 1]);
            if (at.quarter != at.block) continue;
            room.tiles.inside[at.block][row][column] = make_float2(p[0], -sum.A[n][c]);
            room.tiles.inside[at.block][row][column + 1] = make_float2(p[1], -sum.A[n][c + 1]);
        }
    }
}

/* Rows of w_beta decayed to the start of each later block. */
template <int KT>
__device__ void mn_channel_fill_late(mn_channel_smem<KT> &room, const unsigned char *w) {
    constexpr int pairs = KT / 2;
    for (int k = threadIdx.x; k < 48 * pairs; k += MN_DELTA_GRADERS) {
        const int s = k / pairs, i = k % pairs * 2, J = s / 16;
        const unsigned place = mn_tile_place(s, i / 8) + i % 8 * 2;
        const unsigned write = *(const unsigned *)(w + place);
        const float x = room.beta[s] * mn_low(write), y = room.beta[s] * mn_high(write);
        float2 level = room.levels.pair(16 * J + 15, i) - room.levels.pair(s, i);
        for (int I = J + 1; I < 4; I++) {
            *(unsigned *)(room.tiles.late[I - 1] + place) = mn_pair(x * __expf(level.x),
                                                                   y * __expf(level.y));
            level = level + room.levels.pair(16 * I + 15, i);
        }
    }
}

/* Rows of q and e decayed from the end of each earlier block. */
template <int KT>
__device__ void mn_channel_fill_early(mn_channel_smem<KT> &room) {
    constexpr int pairs = KT / 2;
    for (int k = threadIdx.x; k < 48 * pairs; k += MN_DELTA_GRADERS) {
        const int t = 16 + k / pairs, i = k % pairs * 2, I = t / 16;
        const unsigned place = mn_tile_place(t, i / 8) + i % 8 * 2;
        const unsigned q = *(const unsigned *)(room.keys.q + place);
        const unsigned e = *(const unsigned *)(room.keys.e + place);
        float2 level = room.levels.pair(t, i);
        for (int J = I - 1; J >= 0; J--) {
            const float x = __expf(level.x), y = __expf(level.y);
            *(unsigned *)(room.tiles.early.q[J] + place) = mn_pair(x * mn_low(q), y * mn_high(q));
            *(unsigned *)(room.tiles.early.e[J] + place) = mn_pair(x * mn_low(e), y * mn_high(e));
            level = level + room.levels.pair(16 * J + 15, i);
        }
    }
}

/* to += x exp(level) of this warp's rows: from the block's start, or to its end. */
template <int KT>
__device__ inline void mn_channel_take(float (&to)[4], const float (&x)[4],
                                       const mn_channel_levels<KT> &c, int block, int i,
                                       bool to_end) {
    const int t = block * 16 + threadIdx.x % 32 / 4;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float2 level = c.pair(t + 8 * half, i);
        if (to_end) level = c.pair(block * 16 + 15, i) - level;
        to[2 * half] = fmaf(__expf(level.x), x[2 * half], to[2 * half]);
        to[2 * half + 1] = fmaf(__expf(level.y), x[2 * half + 1], to[2 * half + 1]);
    }
}

/* dq and de from earlier blocks. */
template <int KT>
__device__ void mn_channel_from_early(mn_channel_smem<KT> &room, mn_grade_tile<KT> &sum,
                                      const mn_grade_place &at) {
    const int I = at.block, channel0 = at.quarter * (KT / 4);
    if (I == 0) return;
    const unsigned rows = mn_shared(room.tiles.late[I - 1]);
#pragma unroll
    for (int n = 0; n < mn_grade_tile<KT>::N; n += 2) {
        float q[2][4] = {}, e[2][4] = {};
        for (int J = 0; J < I; J++) {
            unsigned p[4], a[4], b[4];
            mn_left(p, mn_shared(room.squares.P), 16 * I, 16 * J);
            mn_left(a, mn_shared(room.squares.A), 16 * I, 16 * J);
            mn_right_transposed(b, rows, 16 * J, channel0 + 8 * n);
            mn_product(q[0], p, b[0], b[1]);
            mn_product(q[1], p, b[2], b[3]);
            mn_product(e[0], a, b[0], b[1]);
            mn_product(e[1], a, b[2], b[3]);
        }
#pragma unroll
        for (int j = 0; j < 2; j++) {
            const int i = channel0 + 8 * (n + j) + threadIdx.x % 4 * 2;
            mn_channel_take<KT>(sum.q[n + j], q[j], room.levels, I, i, false);
            mn_channel_take<KT>(sum.e[n + j], e[j], room.levels, I, i, false);
        }
    }
}

/* dw from later blocks. */
template <int KT>
__device__ void mn_channel_from_late(mn_channel_smem<KT> &room, mn_grade_tile<KT> &sum,
                                     const mn_grade_place &at) {
    const int J = at.block, channel0 = at.quarter * (KT / 4);
    if (J == 3) return;
#pragma unroll
    for (int n = 0; n < mn_grade_tile<KT>::N; n += 2) {
        float w[2][4] = {};
        for (int I = J + 1; I < 4; I++) {
            unsigned p[4], a[4], b[4];
            mn_left_transposed(p, mn_shared(room.squares.P), 16 * J, 16 * I);
            mn_left_transposed(a, mn_shared(room.squares.A), 16 * J, 16 * I);
            mn_right_transposed(b, mn_shared(room.tiles.early.q[J]), 16 * I, channel0 + 8 * n);
            mn_product(w[0], p, b[0], b[1]);
            mn_product(w[1], p, b[2], b[3]);
            mn_right_transposed(b, mn_shared(room.tiles.early.e[J]), 16 * I, channel0 + 8 * n);
            mn_product(w[0], a, b[0], b[1]);
            mn_product(w[1], a, b[2], b[3]);
        }
#pragma unroll
        for (int j = 0; j < 2; j++) {
            const int i = channel0 + 8 * (n + j) + threadIdx.x % 4 * 2;
            mn_channel_take<KT>(sum.w[n + j], w[j], room.levels, J, i, true);
        }
    }
}

/* ---- inside blocks --------------------------------------------------------------------------- */

__device__ inline float mn_tile_number(const unsigned char *tile, int row, int i) {
    return mn_float(*(const mn_bf16 *)(tile + mn_tile_place(row, i / 8) + i % 8 * 2));
}

/* All pairs of a block of 16 tokens, s < t, in one channel. */
template <int KT>
__device__ void mn_channel_inside(mn_channel_smem<KT> &room, const unsigned char *w) {
    const int block = threadIdx.x / KT, i = threadIdx.x % KT, first = 16 * block;
    if (block >= 4) return;
    float level[16], write[16], dw[16];
#pragma unroll
    for (int s = 0; s < 16; s++) {
        level[s] = room.levels.at[first + s][i];
        write[s] = room.beta[first + s] * mn_tile_number(w, first + s, i);
        dw[s] = 0.0f;
    }
#pragma unroll
    for (int t = 0; t < 16; t++) {
        const float q = mn_tile_number(room.keys.q, first + t, i);
        const float e = mn_tile_number(room.keys.e, first + t, i);
        float dq = 0.0f, de = 0.0f;
#pragma unroll
        for (int s = 0; s < t; s++) {
            const float fall = __expf(level[t] - level[s]), x = fall * write[s];
            const float2 both = room.tiles.inside[block][t][s];
            dq = fmaf(both.x, x, dq);
            de = fmaf(both.y, x, de);
            dw[s] = fmaf(fall, fmaf(both.x, q, both.y * e), dw[s]);
        }
        room.tiles.sums.q.at[first + t][i] = dq;
        room.tiles.sums.e.at[first + t][i] = de;
    }
#pragma unroll
    for (int s = 0; s < 16; s++) room.tiles.sums.w.at[first + s][i] = dw[s];
}

/* Adds the pairs inside blocks; leaves dG in their place. A token's read of its own write, which no
 * decay comes between, is added after that. */
template <int KT>
__device__ void mn_channel_join_inside(mn_channel_smem<KT> &room, mn_grade_tile<KT> &sum,
                                       const unsigned char *w, const mn_grade_place &at) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int n = 0; n < mn_grade_tile<KT>::N; n++) {
        const int i = at.quarter * (KT / 4) + 8 * n + lane % 4 * 2;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int t = at.block * 16 + lane / 4 + 8 * half, c = 2 * half;
            const unsigned place = mn_tile_place(t, i / 8) + i % 8 * 2;
            const unsigned q = *(const unsigned *)(room.keys.q + place);
            const unsigned e = *(const unsigned *)(room.keys.e + place);
            const unsigned write = *(const unsigned *)(w + place);
            float2 &to = *(float2 *)&room.tiles.sums.q.at[t][i];
            const float2 dq = to, de = room.tiles.sums.e.pair(t, i);
            const float2 dw = room.tiles.sums.w.pair(t, i);
            const float beta = room.beta[t], own = room.tiles.inside[at.block][t % 16][t % 16].x;
            sum.q[n][c] += dq.x, sum.q[n][c + 1] += dq.y;
            sum.e[n][c] += de.x, sum.e[n][c + 1] += de.y;
            sum.w[n][c] += dw.x, sum.w[n][c + 1] += dw.y;
            to.x = fmaf(mn_low(q), sum.q[n][c], mn_low(e) * sum.e[n][c]);
            to.y = fmaf(mn_high(q), sum.q[n][c + 1], mn_high(e) * sum.e[n][c + 1]);
            to.x = fmaf(-beta * mn_low(write), sum.w[n][c], to.x);
            to.y = fmaf(-beta * mn_high(write), sum.w[n][c + 1], to.y);
            sum.q[n][c] = fmaf(own, beta * mn_low(write), sum.q[n][c]);
            sum.q[n][c + 1] = fmaf(own, beta * mn_high(write), sum.q[n][c + 1]);
            sum.w[n][c] = fmaf(own, mn_low(q), sum.w[n][c]);
            sum.w[n][c + 1] = fmaf(own, mn_high(q), sum.w[n][c + 1]);
        }
    }
}

/* dg from dG: sums from each token to the end. All threads of the block call. */
template <int KT>
__device__ void mn_channel_leave_decays(mn_channel_smem<KT> &room, const mn_delta_job &job,
                                        const mn_grade_place &at) {
    const int block = threadIdx.x / KT, i = threadIdx.x % KT;
    const mn_channel_levels<KT> &dG = room.tiles.sums.q;
    float run = 0.0f;
    if (block < 4) {
        for (int t = 16 * block + 15; t >= 16 * block; t--) run += dG.at[t][i];
        room.run[block][i] = run;
    }
    __syncthreads();
    if (block >= 4 || at.channel0 + i >= job.p.call.K || !job.p.grad.g.data) return;
    run = room.end[i];
    for (int M = 3; M > block; M--) run += room.run[M][i];
    for (int t = 16 * block + 15; t >= 16 * block; t--) {
        run += dG.at[t][i];
        if (t >= at.count) continue;
        mn_bf16 *to = mn_row<mn_bf16>(job.p.grad.g, at.tile.span.b,
                                      at.tile.span.t0 + at.tile.first + t, at.h);
        mn_put(to + at.channel0 + i, run);
    }
}

template <int KT, int KP>
__global__ void __launch_bounds__(MN_DELTA_GRADERS)
mn_delta_gradient_channel_kernel(const __grid_constant__ mn_delta_job job) {
    extern __shared__ __align__(128) unsigned char bytes[];
    mn_channel_smem<KT> &room = *(mn_channel_smem<KT> *)bytes;
    const mn_grade_place at = mn_grade_here(job, KT, KP);
    if (at.count == 0) return;
    const unsigned char *w = job.p.w.data ? room.keys.w : room.keys.e;
    mn_grade_tile<KT> sum;
    mn_channel_count<KT>(room, job, at);
    mn_grade_all_values<KT>(sum, room, job, at);
    mn_store<8>(&room.ends[threadIdx.x / (KT / 8)][0], threadIdx.x % (KT / 8) * 8, sum.end);
    __syncthreads();
    mn_channel_states<KT>(room, sum, w, job.scale, at);
    mn_channel_fill_late<KT>(room, w);
    __syncthreads();
    mn_channel_end<KT>(room);
    __syncthreads();
    mn_channel_squares<KT>(room, sum, job.scale, at);
    __syncthreads();
    mn_channel_from_early<KT>(room, sum, at);
    __syncthreads();
    mn_channel_fill_early<KT>(room);
    __syncthreads();
    mn_channel_from_late<KT>(room, sum, at);
    __syncthreads();
    mn_channel_inside<KT>(room, w);
    __syncthreads();
    mn_channel_join_inside<KT>(room, sum, w, at);
    mn_grade_leave_keys<KT>(room, sum, job, room.beta, mn_shared(w), at);
    mn_channel_leave_decays<KT>(room, job, at);
    mn_delta_part *parts = (mn_delta_part *)job.work.parts + gridDim.x * (int64_t)blockIdx.y;
    if (threadIdx.x >= MN_DELTA_CHUNK) return;
    float beta = 0.0f;
    for (int i = 0; i < 4; i++) beta += room.sums.beta[i][threadIdx.x];
    parts[at.index].beta[threadIdx.x] = beta;
}

#endif
