/* delta_intra_chunk_channel.cuh - delta_intra_chunk.cuh where each channel has a decay of its own.
 *
 *   A_ts = beta_s sum_i e_ti w_si exp(G_ti - G_si)      and P likewise
 *
 * Exponents of both signs would overflow, so that each pair of blocks of 16 tokens has its own
 * origin: the start of block t for blocks of s before it, and inside a block the middle of the
 * eight tokens of s. Products of tensor cores then have factors of at most exp(64) with decays cut
 * off at -16 a token: what a pair keeps through a deeper fall, 1e-7, is far below bf16's rounding.
 * Decays of rows that meet states are sums from the chunk's start, or to its end, and not cut off.
 *
 * One block has one chunk of one head; warp w has the 16 rows of block w % 4, for A and P, and half
 * of the channels. Factors are made where they are used, in registers. */
#ifndef MN_KERNELS_CUDA_DELTA_DELTA_INTRA_CHUNK_CHANNEL_CUH
#define MN_KERNELS_CUDA_DELTA_DELTA_INTRA_CHUNK_CHANNEL_CUH

#include "kernels/cuda/delta/delta_intra_chunk.cuh"

/* Decays added up from the start of each block of 16 tokens, cut off. */
template <int KP>
struct mn_channel_levels {
    static constexpr int ld = KP + 8;
    float at[MN_DELTA_CHUNK][ld];

    __device__ float2 pair(int t, int i) const {
        return *(const float2 *)&at[t][i];
    }
};

template <int KP>
struct alignas(128) mn_channel_keys {
    unsigned char q[mn_tile_bytes<KP>()], e[mn_tile_bytes<KP>()], w[mn_tile_bytes<KP>()];
    float A[MN_DELTA_CHUNK][MN_DELTA_LD];
    union {
        mn_channel_levels<KP> levels;
        float P[MN_DELTA_CHUNK][MN_DELTA_LD];    // once the levels have been read
    };
    float total[4][KP];    // of blocks, not cut off
    mn_delta_levels tokens;
};

__device__ inline float2 operator-(float2 a, float2 b) {
    return make_float2(a.x - b.x, a.y - b.y);
}

__device__ inline float2 operator+(float2 a, float2 b) {
    return make_float2(a.x + b.x, a.y + b.y);
}

/* x exp(level) for two neighbours */
__device__ inline unsigned mn_channel_scale(unsigned x, float2 level) {
    return mn_pair(mn_low(x) * __expf(level.x), mn_high(x) * __expf(level.y));
}

/* Decays of channels i and i + 1 at 16 tokens from t on; zeros beyond the sizes. */
__device__ inline void mn_channel_decays(float2 (&g)[16], const mn_delta_job &job,
                                         const mn_span &span, int64_t h, int64_t t, int count,
                                         int64_t i) {
    const mn_in &view = job.p.g;
    const mn_bf16 *from = mn_row<mn_bf16>(view, span.b, span.t0 + t, h) + i;
    const int64_t left = job.p.call.K - i;
#pragma unroll
    for (int token = 0; token < 16; token++) {
        g[token] = make_float2(0.0f, 0.0f);
        if (token >= count || left <= 0) continue;
        const mn_bf16 *at = from + token * view.stride[1];
        if (job.packed[MN_DELTA_G]) {
            const unsigned both = *(const unsigned *)at;
            g[token] = make_float2(mn_low(both), mn_high(both));
        } else {
            g[token].x = mn_float(at[0]);
            if (left > 1) g[token].y = mn_float(at[1]);
        }
    }
}

/* A decay that is not below the cut; NaN stays. */
__device__ inline float mn_channel_cut(float g) {
    return g < -16.0f ? -16.0f : g;
}

/* Levels of a pair of channels in a block of 16 tokens. */
template <int KP>
__device__ inline void mn_channel_add_up(mn_channel_levels<KP> &levels, const float2 (&g)[16],
                                         int block, int i) {
    float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll
    for (int token = 0; token < 16; token++) {
        sum.x += mn_channel_cut(g[token].x), sum.y += mn_channel_cut(g[token].y);
        *(float2 *)&levels.at[block * 16 + token][i] = sum;
    }
}

/* Levels, totals and the decayed rows. All threads of the block call. */
template <int KP>
__device__ void mn_channel_rows(mn_channel_keys<KP> &room, const mn_delta_job &job,
                                const mn_tile_span &tile, int64_t h, int64_t index,
                                const unsigned char *w) {
    constexpr int pairs = KP / 2;
    constexpr int rounds = (4 * pairs + MN_DELTA_PREPARERS - 1) / MN_DELTA_PREPARERS;
    float2 g[rounds][16];
#pragma unroll
    for (int round = 0; round < rounds; round++) {
        const int k = threadIdx.x + round * MN_DELTA_PREPARERS;
        const int block = k / pairs, i = k % pairs * 2;
        if (block >= 4) break;
        mn_channel_decays(g[round], job, tile.span, h, tile.first + 16 * block,
                          (int)tile.n_rows - 16 * block, i);
        mn_channel_add_up<KP>(room.levels, g[round], block, i);
        float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll
        for (int token = 0; token < 16; token++) sum = sum + g[round][token];
        *(float2 *)&room.total[block][i] = sum;
    }
    mn_copy_wait<0>();
    __syncthreads();
#pragma unroll
    for (int round = 0; round < rounds; round++) {
        const int k = threadIdx.x + round * MN_DELTA_PREPARERS;
        const int block = k / pairs, i = k % pairs * 2;
        if (block >= 4) break;
        const int64_t first = (index * MN_DELTA_CHUNK + 16 * block) * KP + i;
        float2 before = make_float2(0.0f, 0.0f), behind = before;
        for (int M = 0; M < 4; M++) {
            const float2 total = *(const float2 *)&room.total[M][i];
            if (M < block) before = before + total;
            if (M > block) behind = behind + total;
        }
#pragma unroll
        for (int token = 0; token < 16; token++) {
            const unsigned place = mn_tile_place(16 * block + token, i / 8) + i % 8 * 2;
            const unsigned q = *(const unsigned *)(room.q + place);
            const unsigned e = *(const unsigned *)(room.e + place);
            before = before + g[round][token];
            const float x = __expf(before.x), y = __expf(before.y);
            *(unsigned *)(job.work.q + first + token * KP) =
                mn_pair(job.scale * x * mn_low(q), job.scale * y * mn_high(q));
            *(unsigned *)(job.work.e + first + token * KP) = mn_pair(x * mn_low(e), y * mn_high(e));
        }
        if (block == 3) {
            *(float2 *)(job.work.fall + index * KP + i) = make_float2(__expf(before.x),
                                                                      __expf(before.y));
        }
#pragma unroll
        for (int token = 15; token >= 0; token--) {
            const unsigned place = mn_tile_place(16 * block + token, i / 8) + i % 8 * 2;
            const unsigned write = *(const unsigned *)(w + place);
            const float beta = room.tokens.beta[16 * block + token];
            *(unsigned *)(job.work.w + first + token * KP) =
                mn_pair(beta * __expf(behind.x) * mn_low(write),
                        beta * __expf(behind.y) * mn_high(write));
            behind = behind + g[round][token];
        }
    }
}

/* Sums over this warp's channels for its 16 rows of A and of P, betas left out. */
template <int KP>
__device__ void mn_channel_scores(float (&A)[8][4], float (&P)[8][4],
                                  const mn_channel_keys<KP> &room, const unsigned char *write) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, block = warp % 4;
    const int row = lane / 4, column = lane % 4 * 2;
    const mn_channel_levels<KP> &c = room.levels;
    const unsigned w = mn_shared(write);
    for (int k = warp / 4 * (KP / 2), end = k + KP / 2; k < end; k += 16) {
        unsigned e[4], q[4], b[4], a[4], p[4];
        mn_left(e, mn_shared(room.e), 16 * block, k);
        mn_left(q, mn_shared(room.q), 16 * block, k);
        float2 base[2] = {};    // from block J's start to this block's
        for (int J = block - 1; J >= 0; J--) {
            mn_right(b, w, k, 16 * J);
            if (J == block - 1) {
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const int t = 16 * block + row + i % 2 * 8;
                    const float2 level = c.pair(t, k + column + i / 2 * 8);
                    a[i] = mn_channel_scale(e[i], level), p[i] = mn_channel_scale(q[i], level);
                }
            }
#pragma unroll
            for (int i = 0; i < 2; i++) {
                base[i] = base[i] + c.pair(16 * J + 15, k + column + 8 * i);
            }
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float2 level = c.pair(16 * J + row + i / 2 * 8, k + column + i % 2 * 8);
                b[i] = mn_channel_scale(b[i], base[i % 2] - level);
            }
#pragma unroll
            for (int n = 0; n < 3; n++) {
                if (n != J) continue;
                mn_product(A[2 * n], a, b[0], b[1]);
                mn_product(A[2 * n + 1], a, b[2], b[3]);
                mn_product(P[2 * n], p, b[0], b[1]);
                mn_product(P[2 * n + 1], p, b[2], b[3]);
            }
        }
        mn_right(b, w, k, 16 * block);
#pragma unroll
        for (int half = 0; half < 2; half++) {    // eight columns of the diagonal block
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int at = k + column + i / 2 * 8;
                const float2 level = c.pair(16 * block + row + i % 2 * 8, at) -
                                     c.pair(16 * block + 3 + 8 * half, at);
                a[i] = mn_channel_scale(e[i], level), p[i] = mn_channel_scale(q[i], level);
            }
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int at = k + column + 8 * i;
                b[2 * half + i] = mn_channel_scale(b[2 * half + i],
                                                   c.pair(16 * block + 3 + 8 * half, at) -
                                                       c.pair(16 * block + row + 8 * half, at));
            }
#pragma unroll
            for (int n = 0; n < 4; n++) {
                if (n != block) continue;
                mn_product(A[2 * n + half], a, b[2 * half], b[2 * half + 1]);
                mn_product(P[2 * n + half], p, b[2 * half], b[2 * half + 1]);
            }
        }
    }
}

/* Visits a warp's sums: use(t, s, x, i, j) for number j of tile i. */
template <typename F>
__device__ inline void mn_channel_each(F use) {
    const int lane = threadIdx.x % 32, block = threadIdx.x / 32 % 4;
#pragma unroll
    for (int n = 0; n < 8; n++) {
        if (n / 2 > block) break;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            use(block * 16 + lane / 4 + half * 8, n * 8 + lane % 4 * 2, n, 2 * half);
        }
    }
}

/* Joins the halves of the channels: A ends in the room, P in work space. */
template <int KP>
__device__ void mn_channel_join(mn_channel_keys<KP> &room, const float (&A)[8][4],
                                const float (&P)[8][4], mn_bf16 *to, float scale) {
    const bool second = threadIdx.x >= 128;
    __syncthreads();
    mn_channel_each([&](int t, int s, int n, int c) {
        if (second) *(float2 *)&room.P[t][s] = make_float2(P[n][c], P[n][c + 1]);
        else *(float2 *)&room.A[t][s] = make_float2(A[n][c], A[n][c + 1]);
    });
    __syncthreads();
    mn_channel_each([&](int t, int s, int n, int c) {
        const float2 beta = *(const float2 *)&room.tokens.beta[s];
        if (second) {
            float2 &at = *(float2 *)&room.A[t][s];
            at = at + make_float2(A[n][c], A[n][c + 1]);
            at = make_float2(s < t ? at.x * beta.x : 0.0f, s + 1 < t ? at.y * beta.y : 0.0f);
        } else {
            const float2 x = *(const float2 *)&room.P[t][s] + make_float2(P[n][c], P[n][c + 1]);
            *(unsigned *)(to + t * MN_DELTA_CHUNK + s) =
                mn_pair(s <= t ? scale * x.x * beta.x : 0.0f,
                        s + 1 <= t ? scale * x.y * beta.y : 0.0f);
        }
    });
}

template <int KP>
__global__ void __launch_bounds__(MN_DELTA_PREPARERS)
mn_delta_prepare_channel_kernel(const __grid_constant__ mn_delta_job job) {
    extern __shared__ __align__(128) unsigned char bytes[];
    mn_channel_keys<KP> &room = *(mn_channel_keys<KP> *)bytes;
    const mn_delta_args &p = job.p;
    const mn_call &call = p.call;
    const int64_t h = blockIdx.x % call.H, slot = blockIdx.x / call.H, index = blockIdx.x;
    const mn_tile_span tile = mn_tile_at(call, MN_DELTA_CHUNK, slot);
    const int count = (int)tile.n_rows;
    float A[8][4] = {}, P[8][4] = {};
    if (count == 0) return;
    mn_tile_load<KP, MN_DELTA_PREPARERS>(room.q, p.q, job.packed[MN_DELTA_Q], tile.span, h,
                                          tile.first, count, 0, call.K, threadIdx.x);
    mn_tile_load<KP, MN_DELTA_PREPARERS>(room.e, p.e, job.packed[MN_DELTA_E], tile.span, h,
                                          tile.first, count, 0, call.K, threadIdx.x);
    if (p.w.data) {
        mn_tile_load<KP, MN_DELTA_PREPARERS>(room.w, p.w, job.packed[MN_DELTA_W], tile.span, h,
                                              tile.first, count, 0, call.K, threadIdx.x);
    }
    mn_copy_commit();
    if (threadIdx.x < MN_DELTA_CHUNK) {
        const int64_t when = tile.span.t0 + tile.first + threadIdx.x;
        const bool inside = (int)threadIdx.x < count;
        const mn_bf16 *beta = inside ? mn_row<mn_bf16>(p.beta, tile.span.b, when, h) : nullptr;
        room.tokens.beta[threadIdx.x] = beta ? mn_float(*beta) : inside ? 1.0f : 0.0f;
    }
    const unsigned char *w = p.w.data ? room.w : room.e;
    mn_channel_rows<KP>(room, job, tile, h, index, w);
    mn_channel_scores<KP>(A, P, room, w);
    mn_delta_clear_above(job.work.P + index * MN_DELTA_SQUARE);
    mn_channel_join<KP>(room, A, P, job.work.P + index * MN_DELTA_SQUARE, job.scale);
    mn_delta_invert<MN_DELTA_PREPARERS, false>(
        *(mn_delta_solver *)room.A, job.work.T + index * MN_DELTA_SQUARE,
        job.work.A ? job.work.A + index * MN_DELTA_SQUARE : nullptr);
    if (threadIdx.x < MN_DELTA_CHUNK) {
        job.work.levels[index].beta[threadIdx.x] = room.tokens.beta[threadIdx.x];
    }
}

#endif
