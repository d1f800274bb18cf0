/* dplr_intra_chunk.cuh - what a chunk of 16 tokens is made of before states come to it:
 *
 *   Ad_t = exp(G_{t-1}) a_t     Qd_t = scale exp(G_t) q_t    Kd_t = exp(G_15 - G_t) k_t
 *   Ak_ts = sum_i a_ti k_si exp(G_{t-1,i} - G_si), s < t     Pk_ts = scale sum_i q_ti k_si
 *   Bd, Ab and Pb with b for k     T = (I - Ab)^-1                   exp(G_ti - G_si), s <= t
 *
 * with G_t the sum of g from the chunk's start to token t. The factors of the sums over channels
 * would overflow with one origin for all: for columns s < 8 it is token 3, for the others token
 * 11, so that they are at most exp(64) with decays cut off at -16 a token. What a pair keeps
 * through a larger decay, 1e-7, is far below bf16's rounding. Decays of rows that meet states are
 * sums from the chunk's start, or to its end, and not cut off.
 *
 * A warp has a chunk of a head, and a lane two channels of its rows. */
#ifndef MN_KERNELS_CUDA_DPLR_DPLR_INTRA_CHUNK_CUH
#define MN_KERNELS_CUDA_DPLR_DPLR_INTRA_CHUNK_CUH

#include "kernels/cuda/delta/delta_smem.cuh"
#include "kernels/cuda/prim/mbarrier.cuh"

namespace mneme::dplr {

using namespace delta;

enum {
    CHUNK = 16,
    WIDTH = 64,                  // channels and value columns; zeros beyond K and V
    ROWS = CHUNK * WIDTH * 2,    // bytes of a chunk's rows
};

/* Columns of a chunk's matrices, which lie side by side in one tile: Ak, T - I, Pk, Pb, and of
 * their gradients dAk, dAb, dPk, dPb. */
enum { AT_AK = 0, AT_T = 16, AT_AB = 16, AT_PK = 32, AT_PB = 48 };

/* A record for each chunk and head at slot * H + h: states in front of chunks and their adjoints
 * behind them as left operands (mn_frag_a_of) of warps of 16 value columns, tiles of 16 rows. */
struct chunk_workspace {
    uint4 *S, *D;           // [4 column tiles][4 of 16 channels][32 lanes]
    mn_bf16 *U, *dX;        // [16][64]
    unsigned char *matrices;
};

enum { STATE_VECS = WIDTH * WIDTH / 8 };    // of a record of S and D

struct chunk_params {
    mn_dplr_args p;
    chunk_workspace workspace;
    float scale;
    bool packed_keys, packed_values, packed_cot;    // rows can be read in 16-byte vectors
    bool packed_o, packed_dv, packed_grads;         // and written by twos
};

/* A chunk in shared memory, ready for the scan: decayed rows, values (forward v, back do),
 * matrices, the decay of the whole chunk. */
struct alignas(128) chunk_stage {
    unsigned char q[ROWS], a[ROWS], k[ROWS], b[ROWS], values[ROWS], matrices[ROWS];
    float decay[WIDTH];
};

/* Rows as they are given; later those that scores are made of, in the places of q, a, k and b, and
 * in that of g the last eight rows of q and of a with the second origin. */
struct alignas(128) chunk_rows {
    unsigned char q[ROWS], a[ROWS], k[ROWS], b[ROWS], g[ROWS];
};

/* The head and sequence of a block. */
struct chunk_coord {
    mn_span span;
    int64_t n, h, first;    // the sequence's first slot
    int n_chunks;

    __device__ int count(int chunk) const {
        return (int)min((int64_t)CHUNK, span.length - (int64_t)chunk * CHUNK);
    }

    __device__ int64_t record(const mn_call &call, int chunk) const {
        return (first + chunk) * call.H + h;
    }
};

/* ---- rows ------------------------------------------------------------------------------------ */

/* Eight numbers of a row whose place is no multiple of 16 bytes, of which `count` are there. */
static __device__ __noinline__ void load_slowly(unsigned char *to, const mn_bf16 *from, int count) {
    mn_vec<mn_bf16, 8> pack = {};
#pragma unroll
    for (int i = 0; i < 8; i++) {
        if (i < count) pack.at[i] = from[i];
    }
    *(mn_vec<mn_bf16, 8> *)to = pack;
}

/* `count` rows of a view from token t on, and zeros behind them and beyond `width`, by threads
 * `tid` of N_THREADS. */
template <int N_THREADS>
__device__ inline void load_rows(unsigned char *tile, const mn_in &view, bool packed,
                                 const mn_span &span, int64_t h, int64_t t, int count,
                                 int64_t width, int tid) {
    const int vec16 = tid % 8;
    const int64_t j = 8 * vec16;
    for (int row = tid / 8; row < CHUNK; row += N_THREADS / 8) {
        const bool inside = view.data && row < count && j < width;
        const mn_bf16 *from = mn_row<mn_bf16>(view, span.b, span.t0 + t + row, h) + j;
        unsigned char *to = tile + mn_tile_swizzle(row, vec16);
        if (packed && view.data) {
            mn_cp_async_vec16(mn_shared_u32(to), inside ? (const void *)from : view.data,
                              inside ? 16 : 0);
            continue;
        }
        load_slowly(to, from, inside ? (int)(width - j) : 0);
    }
}

/* Channels i and i + 1 of a row, i being even. */
__device__ inline unsigned *row_pair(unsigned char *tile, int row, int i) {
    return (unsigned *)(tile + mn_tile_swizzle(row, i / 8) + i % 8 * 2);
}

__device__ inline float2 load_pair(unsigned char *tile, int row, int i) {
    const unsigned both = *row_pair(tile, row, i);
    return make_float2(mn_bf16_lo(both), mn_bf16_hi(both));
}

__device__ inline void store_pair(unsigned char *tile, int row, int i, float2 x) {
    *row_pair(tile, row, i) = mn_bf16x2(x.x, x.y);
}

/* What rounding left of a pair that was stored in a row, to another. */
__device__ inline void store_rest(unsigned char *tile, int row, int i, float2 x, unsigned stored) {
    *row_pair(tile, row, i) = mn_bf16x2(x.x - mn_bf16_lo(stored), x.y - mn_bf16_hi(stored));
}

__device__ inline float2 operator+(float2 a, float2 b) {
    return make_float2(a.x + b.x, a.y + b.y);
}

__device__ inline float2 operator-(float2 a, float2 b) {
    return make_float2(a.x - b.x, a.y - b.y);
}

__device__ inline float2 operator*(float2 a, float2 b) {
    return make_float2(a.x * b.x, a.y * b.y);
}

__device__ inline float2 operator*(float a, float2 b) {
    return make_float2(a * b.x, a * b.y);
}

/* a b + c */
__device__ inline float2 fma_of(float2 a, float2 b, float2 c) {
    return make_float2(fmaf(a.x, b.x, c.x), fmaf(a.y, b.y, c.y));
}

__device__ inline float exp2_of(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ inline float2 exp2_of(float2 x) {
    return make_float2(exp2_of(x.x), exp2_of(x.y));
}

/* Log decays by powers of two, as all sums of them are. */
__device__ inline float2 load_decay(unsigned char *tile, int row, int i) {
    return 1.44269504f * load_pair(tile, row, i);
}

/* Decays that are not below the cut; NaN stays. */
__device__ inline float2 cut_decay(float2 g) {
    constexpr float least = -16.0f * 1.44269504f;
    return make_float2(g.x < least ? least : g.x, g.y < least ? least : g.y);
}

/* The token that is the origin of decays to and from token s. */
__device__ constexpr int origin_of(int s) {
    return s < CHUNK / 2 ? 3 : 11;
}

/* What a scan is for: o and the last state; states in front of chunks, U and matrices for the way
 * back; or the way back itself. */
enum scan_kind { SCAN_OUTPUT, SCAN_SAVE, SCAN_BACK };

/* Where rows of scores with b keep what rounding leaves of them, on the way to gradients, as errors
 * of (I - Ab)^-1 weigh most in these: places of a stage that are free until there are matrices. */
struct chunk_rests {
    unsigned char *a, *b, *late;    // late: eight rows
};

/* Fills in the decayed rows of a stage, but for those of q where nobody reads them, without the
 * scale on the way forward; turns `in` into the rows of scores where these are still to be made. */
template <scan_kind KIND>
__device__ inline void decay_rows(chunk_stage &to, chunk_rows &in, const chunk_rests &rest,
                                  float scale) {
    constexpr bool SCORES = KIND != SCAN_BACK;
    const int i = threadIdx.x % 32 * 2;
    float2 g[CHUNK], c[CHUNK];
    float2 sum = {}, decay = make_float2(1.0f, 1.0f), near = {}, late = {};
#pragma unroll
    for (int t = 0; t < CHUNK; t++) g[t] = load_decay(in.g, t, i);
    if (SCORES) {
        float2 cut = {};
#pragma unroll
        for (int t = 0; t < CHUNK; t++) c[t] = cut = cut + cut_decay(g[t]);
        near = exp2_of(make_float2(0.0f, 0.0f) - c[origin_of(0)]);
        late = exp2_of(c[7] - c[origin_of(8)]);
    }
#pragma unroll
    for (int t = 0; t < CHUNK; t++) {
        const float2 a = load_pair(in.a, t, i), q = load_pair(in.q, t, i);
        store_pair(to.a, t, i, decay * a);
        sum = sum + g[t];
        decay = exp2_of(sum);
        if (KIND == SCAN_OUTPUT) store_pair(to.q, t, i, decay * q);
        if (KIND == SCAN_BACK) store_pair(to.q, t, i, scale * (decay * q));
        if (!SCORES) continue;
        store_pair(in.a, t, i, near * a);
        if (KIND == SCAN_SAVE) store_rest(rest.a, t, i, near * a, *row_pair(in.a, t, i));
        near = exp2_of(c[t] - c[origin_of(0)]);
        store_pair(in.q, t, i, near * q);
        if (t < CHUNK / 2) continue;
        store_pair(in.g, t, i, late * a);
        if (KIND == SCAN_SAVE) {
            store_rest(rest.late, t - CHUNK / 2, i, late * a, *row_pair(in.g, t, i));
        }
        late = exp2_of(c[t] - c[origin_of(8)]);
        store_pair(in.g, t - CHUNK / 2, i, late * q);
    }
    *(float2 *)&to.decay[i] = decay;
    sum = make_float2(0.0f, 0.0f);
#pragma unroll
    for (int t = CHUNK - 1; t >= 0; t--) {
        const float2 k = load_pair(in.k, t, i), b = load_pair(in.b, t, i);
        decay = exp2_of(sum);
        store_pair(to.k, t, i, decay * k);
        store_pair(to.b, t, i, decay * b);
        sum = sum + g[t];
        if (!SCORES) continue;
        const float2 back = exp2_of(c[origin_of(t)] - c[t]);
        store_pair(in.k, t, i, back * k);
        store_pair(in.b, t, i, back * b);
        if (KIND == SCAN_SAVE) store_rest(rest.b, t, i, back * b, *row_pair(in.b, t, i));
    }
}

/* ---- matrices -------------------------------------------------------------------------------- */

/* Sums over channels: q and a with the first eight columns of k and of b; with the others the last
 * eight rows of q, in front, and of a. */
struct chunk_scores {
    float qk[4], qb[4], ak[4], ab[4], late_k[4], late_b[4];
};

/* Scores of rows with the rests of b, and of the rests of a with rows, channels i to i + 15. */
__device__ inline void add_rests(chunk_scores &sum, const chunk_rests &rest,
                                 const unsigned (&a)[4], const unsigned (&late)[4],
                                 const unsigned (&b)[4], int i) {
    const int lane = threadIdx.x % 32;
    unsigned rest_a[4], rest_b[4], x[4];
    mn_frag_b(rest_b, mn_shared_u32(rest.b), i, 0);
    mn_frag_a(rest_a, mn_shared_u32(rest.a), 0, i);
    mn_ldmatrix_x4(x, mn_shared_u32(rest.late) + mn_tile_swizzle(lane % 8, i / 8 + lane / 16));
    const unsigned rest_late[4] = { 0, x[0], 0, x[2] };
    mn_mma(sum.ab, a, rest_b[0], rest_b[1]);
    mn_mma(sum.late_b, late, rest_b[2], rest_b[3]);
    mn_mma(sum.ab, rest_a, b[0], b[1]);
    mn_mma(sum.late_b, rest_late, b[2], b[3]);
}

template <scan_kind KIND>
__device__ inline void make_scores(chunk_scores &sum, const chunk_rows &in,
                                   const chunk_rests &rest) {
    sum = {};
#pragma unroll
    for (int i = 0; i < WIDTH; i += 16) {
        unsigned k[4], b[4], q[4], a[4], late[4];
        mn_frag_b(k, mn_shared_u32(in.k), i, 0);
        mn_frag_b(b, mn_shared_u32(in.b), i, 0);
        mn_frag_a(q, mn_shared_u32(in.q), 0, i);
        mn_frag_a(a, mn_shared_u32(in.a), 0, i);
        mn_frag_a(late, mn_shared_u32(in.g), 0, i);
        mn_mma(sum.ab, a, b[0], b[1]);
        mn_mma(sum.late_b, late, b[2], b[3]);
        mn_mma(sum.ak, a, k[0], k[1]);
        mn_mma(sum.qk, q, k[0], k[1]);
        mn_mma(sum.qb, q, b[0], b[1]);
        mn_mma(sum.late_k, late, k[2], k[3]);
        if (KIND == SCAN_SAVE) add_rests(sum, rest, a, late, b, i);
    }
}

/* A matrix's rows t and t + 8 of this lane, columns s, s + 1 and those eight behind, from sums with
 * the first eight columns and, of rows t + 8 alone, with the last. */
__device__ inline void store_matrix(unsigned char *tile, int at, const float (&first)[4], float x,
                                    float y, float scale, bool diagonal) {
    const int t = threadIdx.x % 32 / 4, s = threadIdx.x % 4 * 2, end = t + diagonal;
    const float zero = 0.0f;
    *row_pair(tile, t, at + s) = mn_bf16x2(s < end ? scale * first[0] : zero,
                                           s + 1 < end ? scale * first[1] : zero);
    *row_pair(tile, t, at + s + 8) = 0;
    *row_pair(tile, t + 8, at + s) = mn_bf16x2(scale * first[2], scale * first[3]);
    *row_pair(tile, t + 8, at + s + 8) = mn_bf16x2(s < end ? scale * x : zero,
                                                   s + 1 < end ? scale * y : zero);
}

/* Ab, transposed, in float32. */
struct chunk_scratch {
    float at[CHUNK][CHUNK];
};

__device__ inline void store_scratch(chunk_scratch &to, const chunk_scores &sum) {
    const int t = threadIdx.x % 32 / 4, s = threadIdx.x % 4 * 2;
    to.at[s][t] = sum.ab[0], to.at[s + 1][t] = sum.ab[1];
    to.at[s][t + 8] = sum.ab[2], to.at[s + 1][t + 8] = sum.ab[3];
    to.at[s + 8][t + 8] = sum.late_b[2], to.at[s + 9][t + 8] = sum.late_b[3];
}

/* T - I by substitution: a lane has a column. Of Ab what lies below the diagonal is read. */
__device__ inline void make_inverse(unsigned char *tile, const chunk_scratch &Ab) {
    const int column = threadIdx.x % CHUNK;
    float x[CHUNK];
#pragma unroll
    for (int t = 0; t < CHUNK; t++) x[t] = t == column ? 1.0f : 0.0f;
#pragma unroll
    for (int s = 0; s < CHUNK - 1; s++) {
        float row[CHUNK];
#pragma unroll
        for (int t = s / 4 * 4; t < CHUNK; t += 4) {
            *(float4 *)&row[t] = *(const float4 *)&Ab.at[s][t];
        }
#pragma unroll
        for (int t = s + 1; t < CHUNK; t++) x[t] = fmaf(row[t], x[s], x[t]);
    }
    if (threadIdx.x % 32 >= CHUNK) return;
#pragma unroll
    for (int t = 0; t < CHUNK; t++) {
        const int at = AT_T + column;
        *(mn_bf16 *)(tile + mn_tile_swizzle(t, at / 8) + at % 8 * 2) =
            __float2bfloat16_rn(t <= column ? 0.0f : x[t]);
    }
}

/* Ak, T - I, Pk and Pb of a chunk. */
__device__ inline void make_matrices(unsigned char *tile, const chunk_scores &sum,
                                     chunk_scratch &scratch, float scale) {
    store_scratch(scratch, sum);
    store_matrix(tile, AT_AK, sum.ak, sum.late_k[2], sum.late_k[3], 1.0f, false);
    store_matrix(tile, AT_PK, sum.qk, sum.late_k[0], sum.late_k[1], scale, true);
    store_matrix(tile, AT_PB, sum.qb, sum.late_b[0], sum.late_b[1], scale, true);
    __syncwarp();
    make_inverse(tile, scratch);
}

}    // namespace mneme::dplr

#endif
