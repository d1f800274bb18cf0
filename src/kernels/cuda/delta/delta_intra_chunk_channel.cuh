/* delta_intra_chunk_channel.cuh - delta_intra_chunk.cuh where each channel has a decay of its own.
 *
 *   A_ts = beta_s sum_i e_ti w_si exp(G_ti - G_si)      and P likewise
 *
 * Exponents of both signs would overflow, so that each pair of blocks of 16 tokens has its own
 * origin: the start of block t for blocks of s before it, and inside a block about the middle of
 * the eight tokens of s. Products of tensor cores then have factors of at most 2^93 with decays cut
 * off at 2^-23 a token: what a pair keeps through a larger decay, 1e-7, is far below bf16's
 * rounding. Decays of rows that meet states are sums from the chunk's start, or to its end, and
 * not cut off. Sums of decays are logarithms to base 2, as the processor's exponential is.
 *
 * The middle comes after tokens that it serves, whose bits may not depend on it: it is a whole
 * number of powers of two from where the eight tokens begin, and decays that are not cut off are
 * whole multiples of 2^-15. Then differences are exact, and another middle moves exponents of both
 * factors and no bit of their product. 2^-16 in a logarithm is a hundredth of bf16's rounding.
 *
 * One block has one chunk of one head; warp w has the 16 rows of block w % 4, for A and P, and half
 * of the channels that are in shared memory: all, or where a block gets little of it 128 of 256
 * after the other. Factors are made where they are used, in registers. */
#ifndef MN_KERNELS_CUDA_DELTA_DELTA_INTRA_CHUNK_CHANNEL_CUH
#define MN_KERNELS_CUDA_DELTA_DELTA_INTRA_CHUNK_CHANNEL_CUH

#include "kernels/cuda/prim/exp2.cuh"
#include "kernels/cuda/delta/delta_intra_chunk.cuh"
#include "kernels/cuda/delta/delta_pairs.cuh"

namespace mneme::delta {

/* Decays added up from the start of each block of 16 rows, cut off. ROWS: of a token, of which the
 * first has the decay. */
template <int KP, int ROWS = 1>
struct mn_channel_log_decays {
    static constexpr int ld = KP + 8, rows = ROWS;
    float at[MN_DELTA_CHUNK / ROWS][ld];

    __device__ float2 pair(int t, int i) const {
        return *(const float2 *)&at[t / ROWS][i];
    }

    /* The sum of decays that row t's reads meet: in pairs of rows without the row's own. */
    template <int CHANNEL>
    __device__ float2 read(int t, int i) const {
        if (CHANNEL != MN_DELTA_PAIRS) return pair(t, i);
        return t % 16 == 0 ? make_float2(0.0f, 0.0f) : pair(t - 1, i);
    }
};

/* JOINED: rows of q are in e. */
template <int KP, bool JOINED = false>
struct alignas(128) mn_channel_intra_smem {
    unsigned char q[JOINED ? 128 : mn_tile_bytes<KP>()];
    unsigned char e[mn_tile_bytes<KP>()], w[mn_tile_bytes<KP>()];
    float A[MN_DELTA_CHUNK][MN_DELTA_LD];
    union {
        mn_channel_log_decays<KP, JOINED ? 2 : 1> log_decays;
        float P[MN_DELTA_CHUNK][MN_DELTA_LD];    // once the sums of decays have been read
    };
    float total[4][KP];    // of blocks, not cut off
    mn_delta_log_decays tokens;
};

__device__ inline float2 operator-(float2 a, float2 b) {
    return make_float2(a.x - b.x, a.y - b.y);
}

__device__ inline float2 operator+(float2 a, float2 b) {
    return make_float2(a.x + b.x, a.y + b.y);
}

/* x 2^log_decay for two neighbours */
__device__ inline unsigned mn_channel_mul_exp(unsigned x, float2 log_decay) {
    const float2 decay = mn_exp2(log_decay);
    return mn_bf16x2(mn_bf16_lo(x) * decay.x, mn_bf16_hi(x) * decay.y);
}

/* Decays of channels i and i + 1 at 16 rows, the first of which is of token t, as logarithms to
 * base 2; zeros beyond the sizes. */
template <int CHANNEL>
__device__ inline void mn_channel_load_decays(float2 (&g)[16], const mn_delta_params &job,
                                         const mn_span &span, int64_t h, int64_t t, int count,
                                         int64_t i) {
    const mn_in &view = job.p.g;
    const mn_bf16 *from = mn_row<mn_bf16>(view, span.b, span.t0 + t, h) + i;
    const int64_t left = job.p.call.K - i;
#pragma unroll
    for (int row = 0; row < 16; row++) {
        constexpr int rows = CHANNEL == MN_DELTA_PAIRS ? 2 : 1;    // of a token
        g[row] = make_float2(0.0f, 0.0f);
        if (row >= count || left <= 0 || row % rows != 0) continue;
        const mn_bf16 *at = from + row / rows * view.stride[1];
        if (job.packed[MN_DELTA_G]) {
            const unsigned both = *(const unsigned *)at;
            g[row] = make_float2(mn_bf16_lo(both), mn_bf16_hi(both));
        } else {
            g[row].x = mn_float(at[0]);
            if (left > 1) g[row].y = mn_float(at[1]);
        }
    }
#pragma unroll
    for (int row = 0; row < 16; row++) g[row].x *= 1.44269504f, g[row].y *= 1.44269504f;
}

/* A decay that is not below the cut, to the nearest multiple of 2^-15: numbers from 256 to 512 are
 * that far apart. NaN stays. */
__device__ inline float mn_channel_clamp(float g) {
    return (g < -23.0f ? -23.0f : g) + 384.0f - 384.0f;
}

/* The nearest whole number: from 2^23 to 2^24 there are no others. */
__device__ inline float2 mn_channel_whole(float2 x) {
    constexpr float there = 12582912.0f;
    return make_float2(x.x + there - there, x.y + there - there);
}

/* Levels of a pair of channels in a block of 16 rows. */
template <int KP, int ROWS>
__device__ inline void mn_channel_cumsum(mn_channel_log_decays<KP, ROWS> &log_decays,
                                         const float2 (&g)[16],
                                         int block, int i) {
    float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll
    for (int row = 0; row < 16; row += ROWS) {
        sum.x += mn_channel_clamp(g[row].x), sum.y += mn_channel_clamp(g[row].y);
        *(float2 *)&log_decays.at[(block * 16 + row) / ROWS][i] = sum;
    }
}

/* Levels, totals and the decayed rows of KP channels from `channel0` on, of ROW that a row of
 * workspace has. All threads of the block call. */
template <int KP, int CHANNEL, int ROW>
__device__ void mn_channel_rows(mn_channel_intra_smem<KP, mn_rows_joined<CHANNEL>> &smem,
                                const mn_delta_params &job,
                                const mn_tile_span &tile, int64_t h, int64_t index,
                                const unsigned char *w, int channel0) {
    constexpr bool in_pairs = CHANNEL == MN_DELTA_PAIRS, joined = mn_rows_joined<CHANNEL>;
    constexpr int pairs = KP / 2, tokens = mn_delta_chunk_tokens(in_pairs) / 4;
    // decays behind a redo's last row too: scores go by levels of tokens a little later
    const int n_rows = (int)min((int64_t)4 * tokens, tile.span.length - tile.first) *
                       (in_pairs ? 2 : 1);
    const float sign = in_pairs ? -1.0f : 1.0f;
    constexpr int rounds = (4 * pairs + MN_DELTA_INTRA_THREADS - 1) / MN_DELTA_INTRA_THREADS;
    float2 g[rounds][16];
#pragma unroll
    for (int round = 0; round < rounds; round++) {
        const int k = threadIdx.x + round * MN_DELTA_INTRA_THREADS;
        const int block = k / pairs, i = k % pairs * 2;
        if (block >= 4) break;
        mn_channel_load_decays<CHANNEL>(g[round], job, tile.span, h, tile.first + tokens * block,
                                        n_rows - 16 * block, channel0 + i);
        mn_channel_cumsum(smem.log_decays, g[round], block, i);
        float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll
        for (int token = 0; token < 16; token++) sum = sum + g[round][token];
        *(float2 *)&smem.total[block][i] = sum;
    }
    mn_cp_async_wait<0>();
    __syncthreads();
#pragma unroll
    for (int round = 0; round < rounds; round++) {
        const int k = threadIdx.x + round * MN_DELTA_INTRA_THREADS;
        const int block = k / pairs, i = k % pairs * 2;
        if (block >= 4) break;
        const int64_t first = (index * MN_DELTA_CHUNK + 16 * block) * ROW + channel0 + i;
        float2 before = make_float2(0.0f, 0.0f), behind = before, decay = before;
        for (int M = 0; M < 4; M++) {
            const float2 total = *(const float2 *)&smem.total[M][i];
            if (M < block) before = before + total;
            if (M > block) behind = behind + total;
        }
#pragma unroll
        for (int token = 0; token < 16; token++) {
            const unsigned place = mn_tile_swizzle(16 * block + token, i / 8) + i % 8 * 2;
            const unsigned e = *(const unsigned *)(smem.e + place);
            if (!in_pairs) before = before + g[round][token];
            if (!joined || token == 0 || token % 2 == 1) decay = mn_exp2(before);
            const float x = decay.x, y = decay.y;
            if (in_pairs && (!joined || token % 2 == 0)) before = before + g[round][token];
            if (joined) {
                const float factor = token % 2 ? job.scale : sign;
                *(unsigned *)(job.workspace.e + first + token * ROW) =
                    mn_bf16x2(factor * x * mn_bf16_lo(e), factor * y * mn_bf16_hi(e));
                continue;
            }
            const unsigned q = *(const unsigned *)(smem.q + place);
            *(unsigned *)(job.workspace.q + first + token * ROW) =
                mn_bf16x2(job.scale * x * mn_bf16_lo(q), job.scale * y * mn_bf16_hi(q));
            *(unsigned *)(job.workspace.e + first + token * ROW) =
                mn_bf16x2(sign * x * mn_bf16_lo(e), sign * y * mn_bf16_hi(e));
        }
        if (block == 3) {
            *(float2 *)(job.workspace.cum_decay + index * ROW + channel0 + i) = mn_exp2(before);
        }
#pragma unroll
        for (int token = 15; token >= 0; token--) {
            const unsigned place = mn_tile_swizzle(16 * block + token, i / 8) + i % 8 * 2;
            const unsigned write = *(const unsigned *)(w + place);
            const float beta = smem.tokens.beta[16 * block + token];
            if (!joined || token % 2 == 1) decay = mn_exp2(behind);
            *(unsigned *)(job.workspace.w + first + token * ROW) =
                mn_bf16x2(beta * decay.x * mn_bf16_lo(write), beta * decay.y * mn_bf16_hi(write));
            if (!joined || token % 2 == 0) behind = behind + g[round][token];
        }
    }
}

/* Where decays of eight columns of a diagonal block are counted from, in two pairs of channels. */
template <typename Decays>
__device__ inline void mn_channel_origins(float2 (&origin)[2], const Decays &c, int block, int half,
                                          int channel) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int at = channel + 8 * i;
        const float2 start = half ? c.pair(16 * block + 7, at) : make_float2(0.0f, 0.0f);
        const float2 middle = c.pair(16 * block + 3 + 8 * half, at);
        origin[i] = start + mn_channel_whole(middle - start);
    }
}

/* Sums over this warp's channels for its 16 rows of A and of P, betas left out. */
template <int KP, int CHANNEL>
__device__ void mn_channel_scores(float (&A)[8][4], float (&P)[8][4],
                                  const mn_channel_intra_smem<KP> &smem,
                                      const unsigned char *write) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, block = warp % 4;
    const int row = lane / 4, column = lane % 4 * 2;
    const mn_channel_log_decays<KP> &c = smem.log_decays;
    const unsigned w = mn_shared_u32(write);
    for (int k = warp / 4 * (KP / 2), end = k + KP / 2; k < end; k += 16) {
        unsigned e[4], q[4], b[4], a[4], p[4];
        mn_frag_a(e, mn_shared_u32(smem.e), 16 * block, k);
        mn_frag_a(q, mn_shared_u32(smem.q), 16 * block, k);
        float2 base[2] = {};    // from block J's start to this block's
        for (int J = block - 1; J >= 0; J--) {
            mn_frag_b(b, w, k, 16 * J);
            if (J == block - 1) {
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const int t = 16 * block + row + i % 2 * 8;
                    const float2 log_decay = c.template read<CHANNEL>(t, k + column + i / 2 * 8);
                    a[i] = mn_channel_mul_exp(e[i], log_decay),
                        p[i] = mn_channel_mul_exp(q[i], log_decay);
                }
            }
#pragma unroll
            for (int i = 0; i < 2; i++) {
                base[i] = base[i] + c.pair(16 * J + 15, k + column + 8 * i);
            }
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float2 log_decay = c.pair(16 * J + row + i / 2 * 8, k + column + i % 2 * 8);
                b[i] = mn_channel_mul_exp(b[i], base[i % 2] - log_decay);
            }
#pragma unroll
            for (int n = 0; n < 3; n++) {
                if (n != J) continue;
                mn_mma(A[2 * n], a, b[0], b[1]);
                mn_mma(A[2 * n + 1], a, b[2], b[3]);
                mn_mma(P[2 * n], p, b[0], b[1]);
                mn_mma(P[2 * n + 1], p, b[2], b[3]);
            }
        }
        mn_frag_b(b, w, k, 16 * block);
#pragma unroll
        for (int half = 0; half < 2; half++) {    // eight columns of the diagonal block
            float2 origin[2];
            mn_channel_origins(origin, c, block, half, k + column);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int at = k + column + i / 2 * 8;
                const float2 log_decay =
                    c.template read<CHANNEL>(16 * block + row + i % 2 * 8, at) - origin[i / 2];
                a[i] = mn_channel_mul_exp(e[i], log_decay),
                    p[i] = mn_channel_mul_exp(q[i], log_decay);
            }
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int at = k + column + 8 * i;
                b[2 * half + i] = mn_channel_mul_exp(b[2 * half + i],
                                                     origin[i] -
                                                         c.pair(16 * block + row + 8 * half, at));
            }
#pragma unroll
            for (int n = 0; n < 4; n++) {
                if (n != block) continue;
                mn_mma(A[2 * n + half], a, b[2 * half], b[2 * half + 1]);
                mn_mma(P[2 * n + half], p, b[2 * half], b[2 * half + 1]);
            }
        }
    }
}

/* x 2^log_decay for two neighbours, and where RESTS what rounding leaves of it. */
template <bool RESTS>
__device__ inline void mn_channel_mul_exp_rest(unsigned &whole, unsigned &rest, unsigned x,
                                               float2 log_decay) {
    const float2 decay = mn_exp2(log_decay);
    const float first = mn_bf16_lo(x) * decay.x, second = mn_bf16_hi(x) * decay.y;
    whole = mn_bf16x2(first, second);
    if (RESTS) rest = mn_bf16x2_rest(first, second, whole);
}

/* A left operand times a right one, without what rounding left of both. */
template <bool RESTS>
__device__ inline void mn_channel_mma_rest(float (&sum)[4], const unsigned (&a)[4],
                                           const unsigned (&a_rest)[4], const unsigned *b,
                                           const unsigned *b_rest) {
    mn_mma(sum, a, b[0], b[1]);
    if (!RESTS) return;
    mn_mma(sum, a_rest, b[0], b[1]);
    mn_mma(sum, a, b_rest[0], b_rest[1]);
}

/* mn_channel_scores where rows are pairs: even rows of A, which are of a, and odd ones of P, which
 * are of q, in one; a and q meet the same decays. T repeats errors of A, and both scans those of P,
 * so that where gradients come of them (RESTS) factors have two parts. */
template <int KP, bool RESTS, bool JOINED>
__device__ void mn_channel_scores_pairs(float (&sum)[8][4],
                                        const mn_channel_intra_smem<KP, JOINED> &smem) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, block = warp % 4;
    const int row = lane / 4, column = lane % 4 * 2;
    const auto &c = smem.log_decays;
    const unsigned w = mn_shared_u32(smem.w);
    for (int k = warp / 4 * (KP / 2), end = k + KP / 2; k < end; k += 16) {
        unsigned x[4], q[4], b[4], a[4], a_rest[4], b_rest[4];
        mn_frag_a(x, mn_shared_u32(smem.e), 16 * block, k);
        if (!JOINED) mn_frag_a(q, mn_shared_u32(smem.q), 16 * block, k);
#pragma unroll
        for (int i = 0; i < 4 && !JOINED; i++) x[i] |= q[i];    // one of the two is zeros
        float2 base[2] = {};                         // from block J's start to this block's
        for (int J = block - 1; J >= 0; J--) {
            mn_frag_b(b, w, k, 16 * J);
            if (J == block - 1) {
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const int t = 16 * block + row + i % 2 * 8;
                    mn_channel_mul_exp_rest<RESTS>(
                        a[i], a_rest[i], x[i],
                        c.template read<MN_DELTA_PAIRS>(t, k + column + i / 2 * 8));
                }
            }
#pragma unroll
            for (int i = 0; i < 2; i++) {
                base[i] = base[i] + c.pair(16 * J + 15, k + column + 8 * i);
            }
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float2 log_decay = c.pair(16 * J + row + i / 2 * 8, k + column + i % 2 * 8);
                mn_channel_mul_exp_rest<RESTS>(b[i], b_rest[i], b[i], base[i % 2] - log_decay);
            }
#pragma unroll
            for (int n = 0; n < 3; n++) {
                if (n != J) continue;
                mn_channel_mma_rest<RESTS>(sum[2 * n], a, a_rest, b, b_rest);
                mn_channel_mma_rest<RESTS>(sum[2 * n + 1], a, a_rest, b + 2, b_rest + 2);
            }
        }
        mn_frag_b(b, w, k, 16 * block);
#pragma unroll
        for (int half = 0; half < 2; half++) {    // eight columns of the diagonal block
            float2 origin[2];
            mn_channel_origins(origin, c, block, half, k + column);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int at = k + column + i / 2 * 8, t = 16 * block + row + i % 2 * 8;
                mn_channel_mul_exp_rest<RESTS>(a[i], a_rest[i], x[i],
                                        c.template read<MN_DELTA_PAIRS>(t, at) -
                                            origin[i / 2]);
            }
#pragma unroll
            for (int i = 2 * half; i < 2 * half + 2; i++) {
                const int at = k + column + i % 2 * 8;
                mn_channel_mul_exp_rest<RESTS>(b[i], b_rest[i], b[i],
                                        origin[i % 2] -
                                            c.pair(16 * block + row + 8 * half, at));
            }
#pragma unroll
            for (int n = 0; n < 4; n++) {
                if (n != block) continue;
                mn_channel_mma_rest<RESTS>(sum[2 * n + half], a, a_rest, b + 2 * half,
                                    b_rest + 2 * half);
            }
        }
    }
}

/* Visits a warp's sums: use(t, s, x, i, j) for number j of tile i. */
template <typename F>
__device__ inline void mn_channel_for_each(F use) {
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

/* Joins the halves of the channels: A goes to shared memory, P to the workspace. */
template <int KP>
__device__ void mn_channel_reduce_halves(mn_channel_intra_smem<KP> &smem, const float (&A)[8][4],
                                const float (&P)[8][4], mn_bf16 *to, float scale) {
    const bool second = threadIdx.x >= 128;
    __syncthreads();
    mn_channel_for_each([&](int t, int s, int n, int c) {
        if (second) *(float2 *)&smem.P[t][s] = make_float2(P[n][c], P[n][c + 1]);
        else *(float2 *)&smem.A[t][s] = make_float2(A[n][c], A[n][c + 1]);
    });
    __syncthreads();
    mn_channel_for_each([&](int t, int s, int n, int c) {
        const float2 beta = *(const float2 *)&smem.tokens.beta[s];
        if (second) {
            float2 &at = *(float2 *)&smem.A[t][s];
            at = at + make_float2(A[n][c], A[n][c + 1]);
            at = make_float2(s < t ? at.x * beta.x : 0.0f, s + 1 < t ? at.y * beta.y : 0.0f);
        } else {
            const float2 x = *(const float2 *)&smem.P[t][s] + make_float2(P[n][c], P[n][c + 1]);
            *(unsigned *)(to + t * MN_DELTA_CHUNK + s) =
                mn_bf16x2(s <= t ? scale * x.x * beta.x : 0.0f,
                        s + 1 <= t ? scale * x.y * beta.y : 0.0f);
        }
    });
}

/* Likewise where rows are pairs: e is minus what the tile has, and the row in front of one of P has
 * what rounding leaves of it, or zeros. */
template <int KP, bool RESTS, bool JOINED>
__device__ void mn_channel_reduce_halves_pairs(mn_channel_intra_smem<KP, JOINED> &smem,
                                               const float (&sum)[8][4], mn_bf16 *to,
                                               float scale) {
    const bool second = threadIdx.x >= 128;
    __syncthreads();
    mn_channel_for_each([&](int t, int s, int n, int c) {
        if (second) *(float2 *)&smem.P[t][s] = make_float2(sum[n][c], sum[n][c + 1]);
    });
    __syncthreads();
    if (second) return;
    mn_channel_for_each([&](int t, int s, int n, int c) {
        const float2 beta = *(const float2 *)&smem.tokens.beta[s];
        const float2 x = *(const float2 *)&smem.P[t][s] + make_float2(sum[n][c], sum[n][c + 1]);
        float2 &A = *(float2 *)&smem.A[t][s];
        if (t % 2 == 0) {
            A = make_float2(s < t ? -x.x * beta.x : 0.0f, s + 1 < t ? -x.y * beta.y : 0.0f);
            return;
        }
        A = make_float2(0.0f, 0.0f);
        const float first = s <= t ? scale * x.x * beta.x : 0.0f;
        const float other = s + 1 <= t ? scale * x.y * beta.y : 0.0f;
        const unsigned whole = mn_bf16x2(first, other);
        mn_bf16 *row = to + t * MN_DELTA_CHUNK + s;
        *(unsigned *)row = whole;
        *(unsigned *)(row - MN_DELTA_CHUNK) = RESTS ? mn_bf16x2_rest(first, other, whole) : 0;
    });
}

/* COLUMNS channels are in shared memory at a time. RESTS: in pairs second parts are kept. */
template <int KP, int CHANNEL, int COLUMNS = KP, bool RESTS = true>
__global__ void __launch_bounds__(MN_DELTA_INTRA_THREADS, mn_rows_joined<CHANNEL> ? 3 : 0)
delta_intra_chunk_channel_kernel(const __grid_constant__ mn_delta_params job) {
    extern __shared__ __align__(128) unsigned char bytes[];
    constexpr bool joined = mn_rows_joined<CHANNEL>;
    typedef mn_channel_intra_smem<COLUMNS, joined> smem_type;
    smem_type &smem = *(smem_type *)bytes;
    const mn_delta_args &p = job.p;
    const mn_call &call = p.call;
    constexpr bool in_pairs = CHANNEL == MN_DELTA_PAIRS;
    const mn_delta_chunk_place place =
        mn_delta_find_chunk<true>(job, mn_delta_chunk_tokens(in_pairs));
    const int64_t h = place.h, index = place.index, key = mn_key_head(call, h);
    const mn_tile_span &tile = place.tile;
    const int count = (int)tile.n_rows * (in_pairs ? 2 : 1);
    float A[8][4] = {}, P[8][4] = {};    // in pairs A has both
    if (count == 0) return;
    const unsigned char *w = p.w.data ? smem.w : smem.e;
#pragma unroll 1
    for (int channel0 = 0; channel0 < KP; channel0 += COLUMNS) {
        const auto load = [&](unsigned char *to, const mn_in &even, const mn_in &odd,
                              bool packed) {
            mn_chunk_load<CHANNEL, COLUMNS, MN_DELTA_INTRA_THREADS>(
                to, even, odd, packed, tile.span, key, tile.first, count, channel0, call.K,
                threadIdx.x);
        };
        const bool packed_q = job.packed[MN_DELTA_Q], packed_e = job.packed[MN_DELTA_E];
        if (channel0 > 0) __syncthreads();    // the channels in front of these have been read
        if (joined) {
            load(smem.e, p.e, p.q, packed_q && packed_e);
        } else {
            load(smem.q, mn_in{}, p.q, packed_q);
            load(smem.e, p.e, in_pairs ? mn_in{} : p.e, packed_e);
        }
        if (p.w.data) load(smem.w, p.w, in_pairs ? job.odd_w : p.w, job.packed[MN_DELTA_W]);
        mn_cp_async_commit();
        if (channel0 == 0 && threadIdx.x < MN_DELTA_CHUNK) {
            const int64_t when = tile.span.t0 + tile.first + threadIdx.x;
            const bool inside = (int)threadIdx.x < count;
            const mn_bf16 *beta = inside ? mn_row<mn_bf16>(p.beta, tile.span.b, when, h) : nullptr;
            smem.tokens.beta[threadIdx.x] = beta ? mn_float(*beta) : inside ? 1.0f : 0.0f;
        }
        mn_channel_rows<COLUMNS, CHANNEL, KP>(smem, job, tile, h, index, w, channel0);
        if constexpr (in_pairs) mn_channel_scores_pairs<COLUMNS, RESTS>(A, smem);
        else mn_channel_scores<COLUMNS, CHANNEL>(A, P, smem, w);
    }
    mn_bf16 *to = job.workspace.P + index * MN_DELTA_MATRIX;
    mn_delta_zero_upper(to);
    if constexpr (in_pairs) mn_channel_reduce_halves_pairs<COLUMNS, RESTS>(smem, A, to, job.scale);
    else mn_channel_reduce_halves<COLUMNS>(smem, A, P, to, job.scale);
    mn_delta_wy_inverse<MN_DELTA_INTRA_THREADS, false>(
        *(mn_delta_wy_solver *)smem.A, job.workspace.T + index * MN_DELTA_MATRIX,
        job.workspace.A ? job.workspace.A + index * MN_DELTA_MATRIX : nullptr);
    if (threadIdx.x < MN_DELTA_CHUNK) {
        job.workspace.log_decays[index].beta[threadIdx.x] = smem.tokens.beta[threadIdx.x];
    }
}

}    // namespace mneme::delta

#endif
