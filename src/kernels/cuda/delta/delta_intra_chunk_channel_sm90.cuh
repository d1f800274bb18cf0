/* delta_intra_chunk_channel_sm90.cuh - delta_intra_chunk_channel.cuh on Hopper, where w = e.
 *
 *   A_ts = beta_s sum_i e_ti e_si exp(G_ti - G_si)      and P likewise
 *
 * A chunk has four parts of 16 tokens, a part two eights. Levels l_t are sums of log2 decays from
 * the start of an eight to token t, those of its eight cut off at 2^-20.2 each; L is that of its
 * last token. `row` is the decay from the part's start to a token, `column` that from a token to
 * the part's end, f that of a whole part. Rows are q, or e for A; factors of a channel:
 *
 *   in an eight               2^(70 + l_t)       2^(-70 - l_s)
 *   its second with its first 2^(70 + l_t + L)   2^(-70 - l_s)      L of the first
 *   parts 1, 0 and 3, 2       row                column
 *   parts 2 and 3 with 1      row, row f_2       column
 *                with 0       row, row f_2       column f_1
 *   rows that meet states     row f_0 .. f_p-1   column f_p+1 .. f_3
 *
 * So no factor but 2^(-70 - l_s) exceeds 2^70, and that not 2^92; what they are counted from is no
 * token's, and no later decay moves a bit of a score. What a pair keeps through a decay that is
 * cut, 1e-6, is far below bf16's rounding; rows that meet states, and f, get what is cut off as
 * another factor, which is 1 in front of the first such decay.
 *
 * One block of four warps has one chunk of one head, a warp a part. It goes through its channels by
 * 16, for which sums of decays by tensor cores, factors, and scores inside the part lie in the same
 * places of its registers: nothing but tiles passes through shared memory. Operands of scores of
 * other parts take the places of q, e and g there. */
#ifndef MN_KERNELS_CUDA_DELTA_DELTA_INTRA_CHUNK_CHANNEL_SM90_CUH
#define MN_KERNELS_CUDA_DELTA_DELTA_INTRA_CHUNK_CHANNEL_SM90_CUH

#include "kernels/cuda/delta/delta_intra_chunk.cuh"
#include "kernels/cuda/delta/delta_launch.cuh"
#include "kernels/cuda/delta/delta_wy_inverse_sm90.cuh"
#include "kernels/cuda/prim/exp2.cuh"
#include "kernels/cuda/prim/tma.cuh"

namespace mneme::delta {

enum {
    MN_CHANNEL_THREADS = 128,
    MN_CHANNEL_PART = 16,                              // tokens
    MN_CHANNEL_PART_BYTES = MN_CHANNEL_PART * 128,     // of 64 columns
    MN_CHANNEL_PIECE = MN_DELTA_CHUNK * 128,           // bytes from 64 columns to the next
};

struct mn_channel_maps {
    CUtensorMap q, e, g;
};

/* Tiles q, e, g (64,KP), whose parts are written over once they have been read:
 *
 *   part   q              e       g
 *   0      column f_1             column
 *   1, 2   q row          e row   column
 *   3      q row          e row   q row f_2        and e row f_2 in `more` */
template <int KP>
struct alignas(1024) mn_channel_sm90_smem {
    union {
        struct {
            unsigned char q[mn_tile_bytes<KP>()], e[mn_tile_bytes<KP>()], g[mn_tile_bytes<KP>()];
        };
        mn_delta_wy_solver solver;    // once all scores have been added up
    };
    unsigned char more[KP / 64 * MN_CHANNEL_PART_BYTES];
    float cum_decay[4][KP];    // f
    float beta[MN_DELTA_CHUNK];
    uint64_t full;
};
static_assert(4 * (sizeof(mn_channel_sm90_smem<128>) + 1024) <= 228 * 1024 &&
                  2 * (sizeof(mn_channel_sm90_smem<256>) + 1024) <= 228 * 1024,
              "blocks a processor");

#if MN_HAS_WGMMA

/* Numbers of 16 tokens and 16 channels: number i of eight channels n is of token
 * lane / 4 + i / 2 * 8 and channel 8 n + lane % 4 * 2 + i % 2. */
typedef float mn_channel_acc[2][4];

/* Numbers of the same channels: [n][i % 2]. */
typedef float mn_channel_each[2][2];

__device__ inline void mn_channel_stmatrix(unsigned at, const unsigned (&x)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};\n" ::"r"(at),
                 "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]) : "memory");
}

/* The greater of two pairs; NaN stays. */
__device__ inline unsigned mn_channel_max(unsigned x, unsigned y) {
    unsigned pair;
    asm("max.NaN.bf16x2 %0, %1, %2;\n" : "=r"(pair) : "r"(x), "r"(y));
    return pair;
}

/* x - y */
__device__ inline unsigned mn_channel_sub(unsigned x, unsigned y) {
    unsigned pair;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;\n" : "=r"(pair) : "r"(y), "r"(0xbf80bf80u), "r"(x));
    return pair;
}

/* ---- sums of decays -------------------------------------------------------------------------- */

/* log2 e = high + low, in pairs of bf16 */
enum : unsigned { MN_CHANNEL_LOG2E_HIGH = 0x3fb93fb9, MN_CHANNEL_LOG2E_LOW = 0xbb2cbb2c };

/* Below exp(-208) nothing is left of a float; scores are cut off at exp(-14), twice in bf16. */
enum : unsigned { MN_CHANNEL_NOTHING = 0xc350c350, MN_CHANNEL_CUT = 0xc160c160 };

#define MN_CHANNEL_SHIFT 70.0f
#define MN_CHANNEL_UNSHIFT 0x1p-70f

/* A triangle of ones times log2 e, of eight tokens. */
struct mn_channel_triangle {
    unsigned high, low;

    __device__ mn_channel_triangle() {
        const int row = threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
        const unsigned mask = (column <= row ? 0xffffu : 0) | (column < row ? 0xffff0000u : 0);
        high = MN_CHANNEL_LOG2E_HIGH & mask, low = MN_CHANNEL_LOG2E_LOW & mask;
    }

    /* Sums over tokens from the start of each eight, or of the part. */
    template <bool PART>
    __device__ void sum(mn_channel_acc &sums, const unsigned (&g)[4], float from) const {
        const unsigned a_low[4] = { low, PART ? MN_CHANNEL_LOG2E_LOW : 0u, 0u, low };
        const unsigned a_high[4] = { high, PART ? MN_CHANNEL_LOG2E_HIGH : 0u, 0u, high };
#pragma unroll
        for (int n = 0; n < 2; n++) {
#pragma unroll
            for (int i = 0; i < 4; i++) sums[n][i] = from;
            mn_mma(sums[n], a_low, g[2 * n], g[2 * n + 1]);
            mn_mma(sums[n], a_high, g[2 * n], g[2 * n + 1]);
        }
    }
};

/* The number of `half`'s last token, for each channel. */
__device__ inline void mn_channel_last(mn_channel_each &last, const mn_channel_acc &x, int half) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        last[i / 2][i % 2] =
            __shfl_sync(0xffffffffu, x[i / 2][2 * half + i % 2], 28 + threadIdx.x % 4);
    }
}

/* Where this lane points in 16 rows and channels from 16 k on of a tile or part at `tile`, whose
 * 64 columns are `piece` bytes apart: `first` is its place in the first 16. */
__device__ inline unsigned mn_channel_at(unsigned tile, unsigned first, int k, int piece) {
    return tile + (first ^ (unsigned)(k % 4 * 32)) + (unsigned)(k / 4 * piece);
}

__device__ inline unsigned mn_channel_first(void) {
    const int lane = threadIdx.x % 32;
    return mn_tile_swizzle(lane % 16, lane / 16);
}

/* f of this warp's part. */
template <int KP>
__device__ inline void mn_channel_sum_part(mn_channel_sm90_smem<KP> &smem) {
    const unsigned low[4] = { MN_CHANNEL_LOG2E_LOW, MN_CHANNEL_LOG2E_LOW, MN_CHANNEL_LOG2E_LOW,
                              MN_CHANNEL_LOG2E_LOW };
    const unsigned high[4] = { MN_CHANNEL_LOG2E_HIGH, MN_CHANNEL_LOG2E_HIGH, MN_CHANNEL_LOG2E_HIGH,
                               MN_CHANNEL_LOG2E_HIGH };
    const int lane = threadIdx.x % 32, part = threadIdx.x / 32;
    const unsigned tile = mn_shared_u32(smem.g) + part * MN_CHANNEL_PART_BYTES;
#pragma unroll 2
    for (int k = 0; k < KP / 16; k++) {
        unsigned g[4];
        mn_ldmatrix_x4_trans(g, mn_channel_at(tile, mn_channel_first(), k, MN_CHANNEL_PIECE));
#pragma unroll
        for (int i = 0; i < 4; i++) g[i] = mn_channel_max(g[i], MN_CHANNEL_NOTHING);
#pragma unroll
        for (int n = 0; n < 2; n++) {
            float sum[4] = {};
            mn_mma(sum, low, g[2 * n], g[2 * n + 1]);
            mn_mma(sum, high, g[2 * n], g[2 * n + 1]);
            if (lane >= 4) continue;    // all rows are the same
            *(float2 *)&smem.cum_decay[part][16 * k + 8 * n + 2 * lane] =
                mn_exp2(make_float2(sum[0], sum[1]));
        }
    }
}

/* ---- factors of 16 tokens and 16 channels ---------------------------------------------------- */

struct mn_channel_factors {
    mn_channel_acc up, down;       // 2^(70 + l), 2^(-70 - l)
    mn_channel_acc row, column;    // row times 2^70
    mn_channel_acc row_rest, column_rest;    // what is cut off of them, where `cut`
    bool cut;

    __device__ void make(const mn_channel_triangle &triangle, const unsigned (&g)[4]) {
        unsigned gentle[4], differ = 0;
        mn_channel_acc level;
        mn_channel_each first, second;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            gentle[i] = mn_channel_max(g[i], MN_CHANNEL_CUT);
            differ |= gentle[i] ^ g[i];
        }
        triangle.sum<false>(level, gentle, MN_CHANNEL_SHIFT);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            up[i / 4][i % 4] = mn_exp2(level[i / 4][i % 4]);
            down[i / 4][i % 4] = mn_exp2(-level[i / 4][i % 4]);
        }
        mn_channel_last(first, up, 0);
        mn_channel_last(second, up, 1);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int n = i / 2, j = i % 2;
            const float whole = second[n][j] * MN_CHANNEL_UNSHIFT;
            row[n][j] = up[n][j];
            row[n][2 + j] = up[n][2 + j] * MN_CHANNEL_UNSHIFT * first[n][j];
            column[n][j] = down[n][j] * first[n][j] * whole;
            column[n][2 + j] = down[n][2 + j] * second[n][j];
        }
        cut = __any_sync(0xffffffffu, differ != 0);
        if (cut) make_rest(triangle, g, gentle);
    }

    __device__ void make_rest(const mn_channel_triangle &triangle, const unsigned (&g)[4],
                              const unsigned (&gentle)[4]) {
        unsigned rest[4];
        mn_channel_acc sum;
        mn_channel_each end;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            rest[i] = mn_channel_sub(mn_channel_max(g[i], MN_CHANNEL_NOTHING), gentle[i]);
        }
        triangle.sum<true>(sum, rest, 0.0f);
        mn_channel_last(end, sum, 1);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            row_rest[i / 4][i % 4] = mn_exp2(sum[i / 4][i % 4]);
            column_rest[i / 4][i % 4] = mn_exp2(end[i / 4][i % 2] - sum[i / 4][i % 4]);
        }
    }
};

/* Decays of whole parts, of this lane's channels: those in front of a part, those behind it, and
 * that of the part `between`. */
struct mn_channel_parts {
    mn_channel_each before, behind, between;

    template <int KP>
    __device__ void load(const mn_channel_sm90_smem<KP> &smem, int part, int k) {
        const int other = part == 0 ? 1 : 2;
#pragma unroll
        for (int n = 0; n < 2; n++) {
            const int channel = 16 * k + 8 * n + threadIdx.x % 4 * 2;
            before[n][0] = before[n][1] = behind[n][0] = behind[n][1] = 1.0f;
#pragma unroll
            for (int m = 0; m < 4; m++) {
                const float2 f = *(const float2 *)&smem.cum_decay[m][channel];
                if (m < part) before[n][0] *= f.x, before[n][1] *= f.y;
                if (m > part) behind[n][0] *= f.x, behind[n][1] *= f.y;
                if (m == other) between[n][0] = f.x, between[n][1] = f.y;
            }
        }
    }
};

/* As numbers, times `scale`. */
__device__ inline void mn_channel_unpack(mn_channel_acc &y, const unsigned (&x)[4], float scale) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        y[i / 2][i % 2 * 2] = mn_bf16_lo(x[i]) * scale;
        y[i / 2][i % 2 * 2 + 1] = mn_bf16_hi(x[i]) * scale;
    }
}

/* x times factors, as a left operand, or two right ones: 0 and 2, 1 and 3. */
__device__ inline void mn_channel_pack(unsigned (&y)[4], const mn_channel_acc &x,
                                       const mn_channel_acc &factor) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int n = i / 2, j = i % 2 * 2;
        y[i] = mn_bf16x2(x[n][j] * factor[n][j], x[n][j + 1] * factor[n][j + 1]);
    }
}

__device__ inline void mn_channel_decay(mn_channel_acc &y, const mn_channel_acc &x,
                                        const mn_channel_each &decay, float scale = 1.0f) {
#pragma unroll
    for (int i = 0; i < 8; i++) y[i / 4][i % 4] = x[i / 4][i % 4] * (decay[i / 4][i % 2] * scale);
}

__device__ inline void mn_channel_times(mn_channel_acc &x, const mn_channel_acc &factor) {
#pragma unroll
    for (int i = 0; i < 8; i++) x[i / 4][i % 4] *= factor[i / 4][i % 4];
}

/* Adds a part's scores with itself over 16 channels; leaves the rows that meet other parts. */
__device__ inline void mn_channel_score_part(float (&sum)[2][4], unsigned (&rows)[4],
                                             const mn_channel_acc &x, const mn_channel_factors &f,
                                             const unsigned (&keys)[4]) {
    unsigned late[4];    // the second eight, with keys of its own
    mn_channel_pack(rows, x, f.row);
    late[0] = rows[0], late[2] = rows[2];
#pragma unroll
    for (int n = 0; n < 2; n++) {
        late[2 * n + 1] = mn_bf16x2(x[n][2] * f.up[n][2], x[n][3] * f.up[n][3]);
    }
    mn_mma(sum[0], rows, keys[0], keys[2]);
    mn_mma(sum[1], late, keys[1], keys[3]);
}

/* 16 rows of 16 channels to memory, where `to` is this lane's place. Lanes in twos swap, so that
 * each has four neighbours of a row. */
template <int KP>
__device__ inline void mn_channel_store(mn_bf16 *to, const unsigned (&x)[4]) {
    const bool odd = threadIdx.x % 2;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const unsigned give = odd ? x[half] : x[2 + half], keep = odd ? x[2 + half] : x[half];
        const unsigned got = __shfl_xor_sync(0xffffffffu, give, 1);
        *(uint2 *)(to + half * 8 * KP) = make_uint2(odd ? got : keep, odd ? keep : got);
    }
}

/* ---- a warp's part --------------------------------------------------------------------------- */

/* Scores P and A of this warp's part with itself, in bits of 16 channels; decayed rows to the
 * workspace, operands of other scores to shared memory. */
template <int KP>
__device__ inline void mn_channel_part(float (&P)[2][4], float (&A)[2][4],
                                       mn_channel_sm90_smem<KP> &smem, const mn_delta_params &job,
                                       int64_t index) {
    const int lane = threadIdx.x % 32, part = threadIdx.x / 32, row = 16 * part + lane / 4;
    const unsigned offset = part * MN_CHANNEL_PART_BYTES, first = mn_channel_first();
    const unsigned q_tile = mn_shared_u32(smem.q) + offset, e_tile = mn_shared_u32(smem.e) + offset;
    const unsigned g_tile = mn_shared_u32(smem.g) + offset, more = mn_shared_u32(smem.more);
    const mn_channel_triangle triangle;
    const mn_channel_acc beta = { { smem.beta[row], smem.beta[row], smem.beta[row + 8],
                                    smem.beta[row + 8] },
                                  { smem.beta[row], smem.beta[row], smem.beta[row + 8],
                                    smem.beta[row + 8] } };
    int64_t to = (index * MN_DELTA_CHUNK + row) * KP + lane % 2 * 8 + lane % 4 / 2 * 4;
#pragma unroll 1
    for (int k = 0; k < KP / 16; k++, to += 16) {
        unsigned g[4], x[4], keys[4], q_rows[4], e_rows[4];
        mn_channel_factors f;
        mn_channel_parts parts;
        mn_channel_acc q, e, y;
        const unsigned q_at = mn_channel_at(q_tile, first, k, MN_CHANNEL_PIECE);
        const unsigned e_at = mn_channel_at(e_tile, first, k, MN_CHANNEL_PIECE);
        const unsigned g_at = mn_channel_at(g_tile, first, k, MN_CHANNEL_PIECE);
        mn_ldmatrix_x4_trans(g, g_at);
        mn_ldmatrix_x4(x, q_at);
        mn_ldmatrix_x4(keys, e_at);
        parts.load(smem, part, k);
        f.make(triangle, g);
        mn_channel_unpack(q, x, job.scale);
        mn_channel_unpack(e, keys, 1.0f);
        mn_channel_pack(keys, e, f.down);
        mn_channel_score_part(P, q_rows, q, f, keys);
        mn_channel_score_part(A, e_rows, e, f, keys);
        if (part > 0) mn_channel_stmatrix(q_at, q_rows), mn_channel_stmatrix(e_at, e_rows);
        if (part < 3) mn_channel_pack(x, e, f.column), mn_channel_stmatrix(g_at, x);
        if (part == 0) {
            mn_channel_decay(y, f.column, parts.between);
            mn_channel_pack(x, e, y), mn_channel_stmatrix(q_at, x);
        }
        if (part == 3) {
            mn_channel_decay(y, f.row, parts.between);
            mn_channel_pack(x, q, y), mn_channel_stmatrix(g_at, x);
            mn_channel_pack(x, e, y);
            mn_channel_stmatrix(mn_channel_at(more, first, k, MN_CHANNEL_PART_BYTES), x);
        }
        mn_channel_decay(y, f.row, parts.before, MN_CHANNEL_UNSHIFT);
        if (f.cut) mn_channel_times(y, f.row_rest);
        mn_channel_pack(x, q, y), mn_channel_store<KP>(job.workspace.q + to, x);
        mn_channel_pack(x, e, y), mn_channel_store<KP>(job.workspace.e + to, x);
        mn_channel_decay(y, f.column, parts.behind);
        if (f.cut) mn_channel_times(y, f.column_rest);
        mn_channel_times(y, beta);
        mn_channel_pack(x, e, y), mn_channel_store<KP>(job.workspace.w + to, x);
    }
}

/* ---- scores across parts --------------------------------------------------------------------- */

/* Of q for even warps, of e for odd ones: rows of part 2 or 3 with parts 0 and 1, and of 1 or 3
 * with the part in front; all times 2^70. */
template <int KP>
__device__ inline void mn_channel_score_across(float (&far)[4][4], float (&near)[2][4],
                                               const mn_channel_sm90_smem<KP> &smem) {
    const int warp = threadIdx.x / 32;
    const bool keys = warp % 2, last = warp / 2;
    const unsigned q = mn_shared_u32(smem.q), e = mn_shared_u32(smem.e), g = mn_shared_u32(smem.g);
    const unsigned first = mn_channel_first(), rows = keys ? e : q;
    const unsigned near_rows = rows + (last ? 3 : 1) * MN_CHANNEL_PART_BYTES;
    const unsigned near_columns = g + (last ? 2 : 0) * MN_CHANNEL_PART_BYTES;
    const unsigned far_rows = !last ? rows + 2 * MN_CHANNEL_PART_BYTES
                              : keys ? mn_shared_u32(smem.more) : g + 3 * MN_CHANNEL_PART_BYTES;
    const int far_piece = last && keys ? MN_CHANNEL_PART_BYTES : MN_CHANNEL_PIECE;
#pragma unroll 2
    for (int k = 0; k < KP / 16; k++) {
        unsigned a[4], b[2][4];
        mn_ldmatrix_x4(a, mn_channel_at(far_rows, first, k, far_piece));
        mn_ldmatrix_x4(b[0], mn_channel_at(q, first, k, MN_CHANNEL_PIECE));
        mn_ldmatrix_x4(b[1], mn_channel_at(g + MN_CHANNEL_PART_BYTES, first, k, MN_CHANNEL_PIECE));
#pragma unroll
        for (int i = 0; i < 4; i++) mn_mma(far[i], a, b[i / 2][i % 2], b[i / 2][i % 2 + 2]);
        mn_ldmatrix_x4(a, mn_channel_at(near_rows, first, k, MN_CHANNEL_PIECE));
        mn_ldmatrix_x4(b[0], mn_channel_at(near_columns, first, k, MN_CHANNEL_PIECE));
#pragma unroll
        for (int i = 0; i < 2; i++) mn_mma(near[i], a, b[0][i], b[0][i + 2]);
    }
}

/* put(t, s, x, y) for pairs of neighbours among sums of rows from `t` on and columns from `s` on,
 * times beta and `scale`; zeros behind the diagonal, and on it unless it is `inclusive`. */
template <int N, typename F>
__device__ inline void mn_channel_put(const float (&sum)[N][4], const float *beta, int t, int s,
                                      float scale, bool inclusive, F put) {
    t += threadIdx.x % 32 / 4, s += threadIdx.x % 4 * 2;
#pragma unroll
    for (int i = 0; i < 2 * N; i++) {
        const int row = t + i % 2 * 8, column = s + i / 2 * 8, end = inclusive ? row + 1 : row;
        const float2 b = *(const float2 *)&beta[column];
        const float x = sum[i / 2][i % 2 * 2] * scale * b.x;
        const float y = sum[i / 2][i % 2 * 2 + 1] * scale * b.y;
        put(row, column, column < end ? x : 0.0f, column + 1 < end ? y : 0.0f);
    }
}

/* ---- a chunk --------------------------------------------------------------------------------- */

/* The chunk of a block: of all sequences the last ones first, so that those with which the scan
 * begins are still in the second cache then. */
__device__ inline mn_delta_chunk_place mn_channel_find_chunk(const mn_delta_params &job) {
    const mn_call &call = job.p.call;
    if (job.cuts) return mn_delta_find_chunk<true>(job, MN_DELTA_CHUNK);
    const int64_t slots = mn_tile_slots(call, MN_DELTA_CHUNK);
    const int64_t i = slots - 1 - blockIdx.x / (unsigned)call.H;
    const int64_t slot = call.cu_seqlens ? i : i % call.B * (slots / call.B) + i / call.B;
    mn_delta_chunk_place place = {};
    place.h = blockIdx.x % (unsigned)call.H, place.index = slot * call.H + place.h;
    place.tile = mn_tile_at(call, MN_DELTA_CHUNK, slot);
    return place;
}

/* Brings q, e, g and beta of a chunk. */
template <int KP>
__device__ inline void mn_channel_load(mn_channel_sm90_smem<KP> &smem, const mn_delta_params &job,
                                       const mn_channel_maps &maps, const mn_tile_span &tile,
                                       int64_t h) {
    const mn_delta_args &p = job.p;
    const int count = (int)tile.n_rows, key = (int)mn_key_head(p.call, h);
    // others' rows follow, or what a redo leaves out
    const bool copies = (p.call.cu_seqlens || job.cuts) && count < MN_DELTA_CHUNK;
    const auto copy = [&](unsigned char *to, const mn_in &view, int64_t head) {
        mn_tile_load<KP, MN_CHANNEL_THREADS>(to, view, true, tile.span, head, tile.first, count, 0,
                                             p.call.K, threadIdx.x);
    };
    if (copies) {
        copy(smem.q, p.q, key), copy(smem.e, p.e, key), copy(smem.g, p.g, h);
        mn_cp_async_commit();
    } else if (threadIdx.x == 0) {
        const int t = (int)(tile.span.t0 + tile.first), b = (int)tile.span.b;
        mn_mbarrier_init(&smem.full, 1);
        mn_mbarrier_init_fence();
        mn_mbarrier_arrive_expect_tx(&smem.full, 3 * mn_tile_bytes<KP>());
        mn_wy_inverse_tma_load<KP>(smem.g, maps.g, &smem.full, (int)h, t, b);
        mn_wy_inverse_tma_load<KP>(smem.q, maps.q, &smem.full, key, t, b);
        mn_wy_inverse_tma_load<KP>(smem.e, maps.e, &smem.full, key, t, b);
    }
    if (threadIdx.x < MN_DELTA_CHUNK) {
        const int64_t when = tile.span.t0 + tile.first + threadIdx.x;
        const bool inside = (int)threadIdx.x < count;
        const mn_bf16 *beta = inside ? mn_row<mn_bf16>(p.beta, tile.span.b, when, h) : nullptr;
        smem.beta[threadIdx.x] = beta ? mn_float(*beta) : inside ? 1.0f : 0.0f;
    }
    mn_cp_async_wait<0>();
    __syncthreads();
    if (!copies) mn_mbarrier_wait(&smem.full, 0);
}

/* From q, e, g and beta to T, P, decayed rows and, where wanted, A in the workspace. */
template <int KP>
__device__ inline void mn_channel_chunk(mn_channel_sm90_smem<KP> &smem, const mn_delta_params &job,
                                        int64_t index) {
    const mn_delta_workspace &workspace = job.workspace;
    const int warp = threadIdx.x / 32, far_row = 32 + warp / 2 * 16, near_column = warp / 2 * 32;
    mn_bf16 *to = workspace.P + index * MN_DELTA_MATRIX;
    float P[2][4] = {}, A[2][4] = {}, far[4][4] = {}, near[2][4] = {};
    const auto put_P = [&](int t, int s, float x, float y) {
        *(unsigned *)(to + t * MN_DELTA_CHUNK + s) = mn_bf16x2(x, y);
    };
    const auto put_A = [&](int t, int s, float x, float y) {
        *(float2 *)&smem.solver.A[t][s] = make_float2(x, y);
    };
    mn_channel_sum_part(smem);
    mn_delta_zero_upper<MN_CHANNEL_THREADS>(to);
    __syncthreads();
    for (int channel = threadIdx.x; channel < KP; channel += MN_CHANNEL_THREADS) {
        float decay = 1.0f;
        for (int part = 0; part < 4; part++) decay *= smem.cum_decay[part][channel];
        workspace.cum_decay[index * KP + channel] = decay;
    }
    mn_channel_part(P, A, smem, job, index);
    mn_channel_put(P, smem.beta, 16 * warp, 16 * warp, 1.0f, true, put_P);
    __syncthreads();
    mn_channel_score_across(far, near, smem);
    __syncthreads();    // the solver takes the operands' place
    mn_channel_put(A, smem.beta, 16 * warp, 16 * warp, 1.0f, false, put_A);
    const auto put_across = [&](auto put) {
        mn_channel_put(far, smem.beta, far_row, 0, MN_CHANNEL_UNSHIFT, true, put);
        mn_channel_put(near, smem.beta, near_column + 16, near_column, MN_CHANNEL_UNSHIFT, true,
                       put);
    };
    if (warp % 2) put_across(put_A);
    else put_across(put_P);
    mn_delta_wy_inverse<MN_CHANNEL_THREADS, false>(
        smem.solver, workspace.T + index * MN_DELTA_MATRIX,
        workspace.A ? workspace.A + index * MN_DELTA_MATRIX : nullptr);
    if (threadIdx.x < MN_DELTA_CHUNK) {
        workspace.log_decays[index].beta[threadIdx.x] = smem.beta[threadIdx.x];
    }
}

#endif

/* Grid: chunk slots * H blocks of 128 threads, as mn_channel_find_chunk numbers them.
 * Loads   q and e (64,K) of the key head and g (64,K) of the head by TMA, beta (64).
 * Stores  T and P (64,64), q, e, w (64,KP), cum_decay (KP), log_decays' beta and, where wanted, A
 *         (64,64) of the workspace at [slot * H + h]. The launch behind may begin, and wait. */
template <int KP>
__global__ void __launch_bounds__(MN_CHANNEL_THREADS, KP <= 128 ? 4 : 2)
delta_intra_chunk_channel_sm90_kernel(const __grid_constant__ mn_delta_params job,
                                      const __grid_constant__ mn_channel_maps maps) {
#if MN_HAS_WGMMA
    extern __shared__ __align__(1024) unsigned char channel_smem_bytes[];
    mn_channel_sm90_smem<KP> &smem = *(mn_channel_sm90_smem<KP> *)channel_smem_bytes;
    mn_pdl_launch_dependents();
    const mn_delta_chunk_place place = mn_channel_find_chunk(job);
    if (place.tile.n_rows == 0) return;
    mn_channel_load<KP>(smem, job, maps, place.tile, place.h);
    mn_channel_chunk<KP>(smem, job, place.index);
#endif
}

/* Up to how many keys this kernel takes the place of delta_intra_chunk_channel_kernel; 0: never. */
static const int mn_delta_channel_sm90_keys = 256;

/* The intra-chunk stage, by this kernel where each channel has a decay, w = e and TMA brings the
 * rows. */
template <int KP>
inline int mn_delta_intra_chunk_by_decay(const mn_delta_params &job, cudaStream_t stream) {
    const mn_delta_args &p = job.p;
    const int64_t blocks = mn_delta_chunk_blocks(job, MN_DELTA_CHUNK);
    mn_channel_maps maps;
    const bool serves =
        KP <= mn_delta_channel_sm90_keys && mn_device_is_sm90() && p.decay == MN_DECAY_CHANNEL &&
        !p.w.data && blocks > 0 && blocks <= INT32_MAX && job.packed[MN_DELTA_Q] &&
        job.packed[MN_DELTA_E] && job.packed[MN_DELTA_G] &&
        mn_tma_map(&maps.q, p.q, p.call, p.call.K, MN_DELTA_CHUNK) &&
        mn_tma_map(&maps.e, p.e, p.call, p.call.K, MN_DELTA_CHUNK) &&
        mn_tma_map(&maps.g, p.g, p.call, p.call.K, MN_DELTA_CHUNK);
    if (!serves) return mn_delta_intra_chunk<KP>(job, stream);
    return mn_launch_smem_behind(job.cuts, delta_intra_chunk_channel_sm90_kernel<KP>,
                                 dim3((unsigned)blocks), MN_CHANNEL_THREADS,
                                 sizeof(mn_channel_sm90_smem<KP>), stream, job, maps);
}

}    // namespace mneme::delta

#endif
