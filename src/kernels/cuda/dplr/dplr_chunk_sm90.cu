/* dplr_chunk_sm90.cu - dplr over chunks of 16 tokens for keys and values of up to 64, on Hopper:
 * forward one launch, backward three: states saved, the scan back, gradients of all chunks. */
#include "kernels/cuda/dplr/dplr_chunk.h"

#include "kernels/cuda/delta/delta_smem.cuh"
#include "kernels/cuda/prim/exp2.cuh"
#include "kernels/cuda/prim/first_wild.cuh"
#include "kernels/cuda/prim/mbarrier.cuh"

namespace mneme::dplr {

/* What a chunk of 16 tokens is made of before states come to it:
 *
 *   Ad_t = exp(G_{t-1}) a_t     Qd_t = scale exp(G_t) q_t    Kd_t = exp(G_15 - G_t) k_t
 *   Ak_ts = sum_i a_ti k_si exp(G_{t-1,i} - G_si), s < t     Pk_ts = scale sum_i q_ti k_si
 *   Bd, Ab and Pb with b for k     T = (I - Ab)^-1                   exp(G_ti - G_si), s <= t
 *
 * with G_t the sum of g from the chunk's start to token t. The factors of the sums over channels
 * would overflow with one origin for all: for columns s < 8 it is about token 3, for the others
 * about token 11, so that they are at most exp(64) with decays cut off at -16 a token. What a pair
 * keeps through a larger decay, 1e-7, is far below bf16's rounding. Decays of rows that meet states
 * are sums from the chunk's start, or to its end, and not cut off.
 *
 * An origin comes after tokens that it serves, whose bits may not depend on it: it is a whole
 * number of powers of two from where its eight columns begin, and sums of decays that are cut off
 * are whole multiples of 2^-14. Then differences are exact, and another origin moves exponents of
 * both factors and no bit of their product. A token's rounding to them is 2e-5 at most; bf16's is
 * 2e-3.
 *
 * A warp has a chunk of a head, and a lane two channels of its rows. */

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
    int *cuts;              // [n * H + h] of a redo back: its first token, 0: none
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

/* The head and sequence of a block. In a redo (docs/internals/causality.md) the span ends where it
 * is cut, or back the scan does: as if tokens from there on, or cotangents up to there, were zeros.
 * Decays stay, as scores are counted from tokens a little later. */
struct chunk_coord {
    mn_span span;
    int64_t n, h, first;    // the sequence's first slot
    int n_chunks;
    int cut, length;        // of a redo: of the whole sequence

    __device__ int count(int chunk) const {
        return (int)min((int64_t)CHUNK, span.length - (int64_t)chunk * CHUNK);
    }

    /* Chunks that a scan has: of a redo back, those behind the cut and the one that holds it. */
    template <bool CUT_BACK>
    __device__ int n_scanned() const {
        return CUT_BACK ? n_chunks - cut / CHUNK : n_chunks;
    }

    __device__ int64_t record(const mn_call &call, int chunk) const {
        return (first + chunk) * call.H + h;
    }
};

/* ---- rows ------------------------------------------------------------------------------------ */

/* Eight numbers of a row whose place is no multiple of 16 bytes, of which `count` are there. */
[[maybe_unused]] static __device__ __noinline__ void
load_slowly(unsigned char *to, const mn_bf16 *from, int count) {
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

/* The nearest whole number: from 2^23 to 2^24 there are no others. */
__device__ inline float2 whole_of(float2 x) {
    constexpr float there = 12582912.0f;
    return make_float2(x.x + there - there, x.y + there - there);
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
    /* Where sums of decays that are cut off begin: 16 tokens lead to 653, and numbers from 512 to
     * 1024 are 2^-14 apart. */
    constexpr float level = 1023.0f;
    const int i = threadIdx.x % 32 * 2;
    float2 g[CHUNK], c[CHUNK];
    float2 sum = {}, decay = make_float2(1.0f, 1.0f), near = {}, late = {}, origin[2] = {};
#pragma unroll
    for (int t = 0; t < CHUNK; t++) g[t] = load_decay(in.g, t, i);
    if (SCORES) {
        float2 cut = make_float2(level, level);
#pragma unroll
        for (int t = 0; t < CHUNK; t++) c[t] = cut = cut + cut_decay(g[t]);
        origin[0] = whole_of(c[origin_of(0)]);
        origin[1] = c[7] + whole_of(c[origin_of(8)] - c[7]);
        near = mn_exp2(make_float2(level, level) - origin[0]);
        late = mn_exp2(c[7] - origin[1]);
    }
#pragma unroll
    for (int t = 0; t < CHUNK; t++) {
        const float2 a = load_pair(in.a, t, i), q = load_pair(in.q, t, i);
        store_pair(to.a, t, i, decay * a);
        sum = sum + g[t];
        decay = mn_exp2(sum);
        if (KIND == SCAN_OUTPUT) store_pair(to.q, t, i, decay * q);
        if (KIND == SCAN_BACK) store_pair(to.q, t, i, scale * (decay * q));
        if (!SCORES) continue;
        store_pair(in.a, t, i, near * a);
        if (KIND == SCAN_SAVE) store_rest(rest.a, t, i, near * a, *row_pair(in.a, t, i));
        near = mn_exp2(c[t] - origin[0]);
        store_pair(in.q, t, i, near * q);
        if (t < CHUNK / 2) continue;
        store_pair(in.g, t, i, late * a);
        if (KIND == SCAN_SAVE) {
            store_rest(rest.late, t - CHUNK / 2, i, late * a, *row_pair(in.g, t, i));
        }
        late = mn_exp2(c[t] - origin[1]);
        store_pair(in.g, t - CHUNK / 2, i, late * q);
    }
    *(float2 *)&to.decay[i] = decay;
    sum = make_float2(0.0f, 0.0f);
#pragma unroll
    for (int t = CHUNK - 1; t >= 0; t--) {
        const float2 k = load_pair(in.k, t, i), b = load_pair(in.b, t, i);
        decay = mn_exp2(sum);
        store_pair(to.k, t, i, decay * k);
        store_pair(to.b, t, i, decay * b);
        sum = sum + g[t];
        if (!SCORES) continue;
        const float2 back = mn_exp2(origin[t / (CHUNK / 2)] - c[t]);
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

/* States, chunk after chunk of 16 tokens, forward and back.
 *
 *   X = Ad S + Ak V    U = X + (T - I) X      O = Qd S + Pk V + Pb U        S <- d S + Kd'V + Bd'U
 *   dU = Bd D + Pb'dO  dX = T'dU    dV = Kd D + Pk'dO + Ak'dX     D <- d D + Qd'dO + Ad'dX
 *
 * with S and D (K,V), d the decay of the whole chunk and the rest from above. One
 * block has one head of one sequence. Producer warps take chunks in turn: each loads one, makes
 * its rows and matrices, and shows them by an mbarrier. Four consumer warps with 16 value columns
 * each keep these of the state, transposed, in registers in float32; everything is computed
 * transposed as well, so that sums of one product are the left operand of the next. */

enum {
    CONSUMERS = WIDTH / 16,    // warps
    PRODUCERS = 6,
    SCAN_THREADS = 32 * (CONSUMERS + PRODUCERS),
    STAGES = 12,               // chunks between producers and consumers
};
static_assert((int)PRODUCERS <= (int)STAGES, "waits by parity need it");

struct scan_smem {
    chunk_stage stage[STAGES];
    chunk_rows rows[PRODUCERS];
    chunk_scratch scratch[PRODUCERS];
    uint64_t full[STAGES], empty[STAGES];
    chunk_coord place;
};

#if MN_HAS_WGMMA

/* ---- producer warps -------------------------------------------------------------------------- */

/* Starts to load q, a, k, b and g of a chunk. */
template <bool REDO>
__device__ inline void load_keys(chunk_rows &to, const chunk_params &job, const chunk_coord &at,
                                 int chunk) {
    const mn_dplr_args &p = job.p;
    const int64_t t = (int64_t)chunk * CHUNK, K = p.call.K;
    const int count = at.count(chunk), lane = threadIdx.x % 32;
    const int of_g = REDO ? min((int)CHUNK, at.length - chunk * CHUNK) : count;
    load_rows<32>(to.g, p.g, job.packed_keys, at.span, at.h, t, of_g, K, lane);
    load_rows<32>(to.a, p.a, job.packed_keys, at.span, at.h, t, count, K, lane);
    load_rows<32>(to.q, p.q, job.packed_keys, at.span, at.h, t, count, K, lane);
    load_rows<32>(to.k, p.k, job.packed_keys, at.span, at.h, t, count, K, lane);
    load_rows<32>(to.b, p.b, job.packed_keys, at.span, at.h, t, count, K, lane);
}

/* Copies a tile of 16 rows as it lies. A warp calls. */
__device__ inline void copy_tile(unsigned char *to, const unsigned char *from) {
#pragma unroll
    for (int i = 0; i < ROWS / 512; i++) {
        const int at = i * 512 + threadIdx.x % 32 * 16;
        *(uint4 *)(to + at) = *(const uint4 *)(from + at);
    }
}

/* Starts to load what consumers take as it is: values, and on the way back the matrices. */
template <scan_kind KIND>
__device__ inline void load_values(chunk_stage &to, const chunk_params &job, const chunk_coord &at,
                                   int chunk) {
    const mn_call &call = job.p.call;
    const bool back = KIND == SCAN_BACK;
    load_rows<32>(to.values, back ? job.p.cot.o : job.p.v,
                  back ? job.packed_cot : job.packed_values, at.span, at.h,
                  (int64_t)chunk * CHUNK, at.count(chunk), call.V, threadIdx.x % 32);
    if (!back) return;
    mn_cp_async_raw(to.matrices, job.workspace.matrices + at.record(call, chunk) * ROWS, ROWS, 32,
                    threadIdx.x % 32);
}

/* Rows in front of `from` become zeros. */
__device__ inline void clear_rows(unsigned char *tile, int from, int tid, int n_threads) {
    for (int i = tid; i < 8 * from; i += n_threads) {
        *(uint4 *)(tile + mn_tile_swizzle(i / 8, i % 8)) = make_uint4(0, 0, 0, 0);
    }
}

/* Makes every PRODUCERS-th chunk of the scan. Its slot may have been another producer's: consumers
 * empty slots in the order of chunks, so who has seen that of chunk n - PRODUCERS - STAGES knows
 * that those before it are over, chunk n - 2 STAGES among them, and a wait by parity is right. */
template <scan_kind KIND, bool REDO>
__device__ inline void produce(scan_smem &smem, const chunk_params &job) {
    const chunk_coord at = smem.place;
    const int warp = threadIdx.x / 32 - CONSUMERS;
    const int n_chunks = at.n_scanned<REDO && KIND == SCAN_BACK>();
    chunk_rows &rows = smem.rows[warp];
    const auto chunk_of = [&](int n) { return KIND == SCAN_BACK ? at.n_chunks - 1 - n : n; };
    if (warp < n_chunks) load_keys<REDO>(rows, job, at, chunk_of(warp));
    mn_cp_async_commit();
    for (int n = warp; n < n_chunks; n += PRODUCERS) {
        const int slot = n % STAGES, next = n + PRODUCERS;
        chunk_stage &to = smem.stage[slot];
        mn_mbarrier_wait(&smem.empty[slot], (n / STAGES & 1) ^ 1);
        load_values<KIND>(to, job, at, chunk_of(n));
        mn_cp_async_commit();
        mn_cp_async_wait<1>();
        __syncwarp();
        const chunk_rests rest = { to.q, to.matrices, (unsigned char *)&smem.scratch[warp] };
        decay_rows<KIND>(to, rows, rest, job.scale);
        __syncwarp();
        chunk_scores scores;
        if (KIND != SCAN_BACK) make_scores<KIND>(scores, rows, rest);
        __syncwarp();
        if (next < n_chunks) load_keys<REDO>(rows, job, at, chunk_of(next));
        mn_cp_async_commit();
        if (KIND != SCAN_BACK) make_matrices(to.matrices, scores, smem.scratch[warp], job.scale);
        mn_cp_async_wait<1>();
        __syncwarp();
        if (REDO && KIND == SCAN_BACK) {
            clear_rows(to.values, at.cut - chunk_of(n) * CHUNK, threadIdx.x % 32, 32);
            __syncwarp();
        }
        if (KIND == SCAN_SAVE) {
            copy_tile(job.workspace.matrices + at.record(job.p.call, n) * ROWS, to.matrices);
        }
        mn_mbarrier_arrive(&smem.full[slot]);
    }
}

/* ---- products of a consumer warp ------------------------------------------------------------- */

/* y (16 value columns, 16 tokens) += S' rows', S' (16 value columns, 64 channels). */
__device__ inline void add_read(float (&y)[2][4], const unsigned (&S)[4][4],
                                const unsigned char *rows) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        unsigned b[4];
        mn_frag_b(b, mn_shared_u32(rows), 16 * i, 0);
        mn_mma(y[0], S[i], b[0], b[1]);
        mn_mma(y[1], S[i], b[2], b[3]);
    }
}

/* y += x matrix', or x matrix where TRANS, for x (16 value columns, 16 tokens). */
template <bool TRANS>
__device__ inline void add_tokens(float (&y)[2][4], const unsigned (&x)[4],
                                  const unsigned char *matrices, int at) {
    unsigned b[4];
    if (TRANS) mn_frag_b_trans(b, mn_shared_u32(matrices), 0, at);
    else mn_frag_b(b, mn_shared_u32(matrices), at, 0);
    mn_mma(y[0], x, b[0], b[1]);
    mn_mma(y[1], x, b[2], b[3]);
}

/* y += S' rows' of what rounding the state left. */
__device__ inline void add_read_of_rest(float (&y)[2][4], const float (&S)[8][4],
                                        const unsigned (&a)[4][4], const unsigned char *rows) {
    unsigned rest[4][4];
#pragma unroll
    for (int i = 0; i < 16; i++) {
        const float *from = &S[i / 4 * 2 + i % 4 / 2][i % 2 * 2];
        const unsigned x = a[i / 4][i % 4];
        rest[i / 4][i % 4] = mn_bf16x2(from[0] - mn_bf16_lo(x), from[1] - mn_bf16_hi(x));
    }
    add_read(y, rest, rows);
}

/* y += y matrix' or y matrix, where rounding y once would weigh: its rest comes behind it. */
template <bool TRANS>
__device__ inline void add_own_tokens(float (&y)[2][4], const unsigned char *matrices, int at) {
    unsigned x[4], rest[4];
    mn_frag_a_of(x, y[0], y[1]);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float *from = &y[i / 2][i % 2 * 2];
        rest[i] = mn_bf16x2(from[0] - mn_bf16_lo(x[i]), from[1] - mn_bf16_hi(x[i]));
    }
    add_tokens<TRANS>(y, x, matrices, at);
    add_tokens<TRANS>(y, rest, matrices, at);
}

/* S' += x rows */
__device__ inline void add_write(float (&S)[8][4], const unsigned (&x)[4],
                                 const unsigned char *rows) {
#pragma unroll
    for (int n = 0; n < 4; n++) {
        unsigned b[4];
        mn_frag_b_trans(b, mn_shared_u32(rows), 0, 16 * n);
        mn_mma(S[2 * n], x, b[0], b[1]);
        mn_mma(S[2 * n + 1], x, b[2], b[3]);
    }
}

__device__ inline void decay_state(float (&S)[8][4], const float *decay) {
#pragma unroll
    for (int n = 0; n < 8; n++) {
        const float2 d = *(const float2 *)&decay[8 * n + threadIdx.x % 4 * 2];
        S[n][0] *= d.x, S[n][1] *= d.y, S[n][2] *= d.x, S[n][3] *= d.y;
    }
}

/* The state as left operand; kept in the workspace where there is a place. */
__device__ inline void frags_of_state(unsigned (&a)[4][4], const float (&S)[8][4], uint4 *keep) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        mn_frag_a_of(a[i], S[2 * i], S[2 * i + 1]);
        if (!keep) continue;
        keep[(warp * 4 + i) * 32 + lane] = make_uint4(a[i][0], a[i][1], a[i][2], a[i][3]);
    }
}

/* ---- what consumer warps store --------------------------------------------------------------- */

/* Row t of `rows`, this warp's 16 columns, from an operand (16 value columns, 16 tokens): by twos,
 * or one by one below `width`; none in front of row `from`. */
__device__ inline void store_columns(mn_bf16 *rows, int64_t stride, int count, int64_t width,
                                     bool packed, const unsigned (&x)[4], int from = 0) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const unsigned both = mn_movmatrix_trans(x[i]);
        const int t = threadIdx.x % 32 / 4 + i / 2 * 8;
        const int j = threadIdx.x / 32 * 16 + i % 2 * 8 + threadIdx.x % 4 * 2;
        mn_bf16 *to = rows + t * stride + j;
        if (t < from || t >= count || j >= width) continue;
        if (packed) {
            *(unsigned *)to = both;
            continue;
        }
        to[0] = __float2bfloat16_rn(mn_bf16_lo(both));
        if (j + 1 < width) to[1] = __float2bfloat16_rn(mn_bf16_hi(both));
    }
}

/* Rows of a chunk of a view. */
__device__ inline void store_values(const mn_out &view, bool packed, const chunk_params &job,
                                    const chunk_coord &at, int chunk, const unsigned (&x)[4],
                                    int from = 0) {
    mn_bf16 *to = mn_row<mn_bf16>(view, at.span.b, at.span.t0 + (int64_t)chunk * CHUNK, at.h);
    if (to) store_columns(to, view.stride[1], at.count(chunk), job.p.call.V, packed, x, from);
}

/* The warp's columns of a state (K,V), transposed; each(number, element). */
template <typename Each>
__device__ inline void each_of_state(float (&S)[8][4], const mn_call &call, Each each) {
    const int j0 = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
#pragma unroll
    for (int n = 0; n < 8; n++) {
#pragma unroll
        for (int c = 0; c < 4; c++) {
            const int i = 8 * n + threadIdx.x % 4 * 2 + c % 2, j = j0 + c / 2 * 8;
            if (i < call.K && j < call.V) each(S[n][c], i * call.V + j);
        }
    }
}

__device__ inline void load_state(float (&S)[8][4], const mn_in &view, const chunk_params &job,
                                  const chunk_coord &at) {
    const float *from = mn_row<float>(view, at.n, 0, at.h);
#pragma unroll
    for (int n = 0; n < 8; n++) S[n][0] = S[n][1] = S[n][2] = S[n][3] = 0.0f;
    if (from) each_of_state(S, job.p.call, [&](float &x, int64_t i) { x = from[i]; });
}

__device__ inline void store_state(const mn_out &view, float (&S)[8][4], const chunk_params &job,
                                   const chunk_coord &at) {
    float *to = mn_row<float>(view, at.n, 0, at.h);
    if (to) each_of_state(S, job.p.call, [&](float &x, int64_t i) { to[i] = x; });
}

/* ---- consumer warps -------------------------------------------------------------------------- */

template <scan_kind KIND>
__device__ inline void scan_forward(scan_smem &smem, const chunk_params &job) {
    const chunk_coord at = smem.place;
    float S[8][4];
    load_state(S, job.p.state0, job, at);
    for (int n = 0; n < at.n_chunks; n++) {
        const int slot = n % STAGES;
        const chunk_stage &in = smem.stage[slot];
        const int64_t record = at.record(job.p.call, n);
        float U[2][4] = {}, O[2][4] = {};    // U: at first X
        unsigned a[4][4], v[4], x[4];
        frags_of_state(a, S, KIND == SCAN_SAVE ? job.workspace.S + record * STATE_VECS : nullptr);
        mn_mbarrier_wait(&smem.full[slot], n / STAGES & 1);
        mn_frag_a_trans(v, mn_shared_u32(in.values), threadIdx.x / 32 * 16, 0);
        add_read(U, a, in.a);
        if (KIND == SCAN_SAVE) add_read_of_rest(U, S, a, in.a);
        add_tokens<false>(U, v, in.matrices, AT_AK);
        decay_state(S, in.decay);
        add_own_tokens<false>(U, in.matrices, AT_T);
        add_write(S, v, in.k);
        mn_frag_a_of(x, U[0], U[1]);
        add_write(S, x, in.b);
        if (KIND == SCAN_OUTPUT) {
            add_read(O, a, in.q);
#pragma unroll
            for (int i = 0; i < 8; i++) O[i / 4][i % 4] *= job.scale;
            add_tokens<false>(O, v, in.matrices, AT_PK);
            add_tokens<false>(O, x, in.matrices, AT_PB);
        }
        mn_mbarrier_arrive_warp(&smem.empty[slot]);
        if (KIND == SCAN_OUTPUT) {
            mn_frag_a_of(x, O[0], O[1]);
            store_values(job.p.o, job.packed_o, job, at, n, x);
        } else {
            store_columns(job.workspace.U + record * CHUNK * WIDTH, WIDTH, CHUNK, WIDTH, true, x);
        }
    }
    if (KIND == SCAN_OUTPUT) store_state(job.p.state, S, job, at);
}

template <bool REDO>
__device__ inline void scan_back(scan_smem &smem, const chunk_params &job) {
    const chunk_coord at = smem.place;
    float D[8][4];
    load_state(D, job.p.cot.state, job, at);
    for (int n = 0; n < at.n_scanned<REDO>(); n++) {
        const int slot = n % STAGES, chunk = at.n_chunks - 1 - n;
        const chunk_stage &in = smem.stage[slot];
        const int64_t record = at.record(job.p.call, chunk);
        float dX[2][4] = {}, dV[2][4] = {};    // dX: at first dU
        unsigned a[4][4], y[4], x[4];
        frags_of_state(a, D, job.workspace.D + record * STATE_VECS);
        mn_mbarrier_wait(&smem.full[slot], n / STAGES & 1);
        mn_frag_a_trans(y, mn_shared_u32(in.values), threadIdx.x / 32 * 16, 0);
        add_read(dX, a, in.b);
        add_read_of_rest(dX, D, a, in.b);
        add_tokens<true>(dX, y, in.matrices, AT_PB);
        decay_state(D, in.decay);
        add_own_tokens<true>(dX, in.matrices, AT_T);
        add_write(D, y, in.q);
        mn_frag_a_of(x, dX[0], dX[1]);
        add_write(D, x, in.a);
        add_read(dV, a, in.k);
        add_tokens<true>(dV, y, in.matrices, AT_PK);
        add_tokens<true>(dV, x, in.matrices, AT_AK);
        mn_mbarrier_arrive_warp(&smem.empty[slot]);
        store_columns(job.workspace.dX + record * CHUNK * WIDTH, WIDTH, CHUNK, WIDTH, true, x);
        mn_frag_a_of(x, dV[0], dV[1]);
        store_values(job.p.grad.v, job.packed_dv, job, at, chunk, x,
                     REDO ? at.cut - chunk * CHUNK : 0);
    }
    if (!REDO) store_state(job.p.grad.state0, D, job, at);
}

/* ---- redo ------------------------------------------------------------------------------------ */

/* How many tokens of a sequence are in front of the first whose numbers harm those, if they show in
 * the last token's o. What comes into a state that is not finite stays there. The block calls. */
__device__ inline int cut_of_results(const mn_dplr_args &p, const chunk_coord &at) {
    const int64_t b = at.span.b, t0 = at.span.t0, K = p.call.K, V = p.call.V;
    if (at.span.length == 0 ||
        !mn_redo_row_is_wild(mn_row<mn_bf16>(p.o, b, t0 + at.span.length - 1, at.h), V)) {
        return 0;
    }
    return mn_redo_first_token(at.span.length, [&](int64_t t, float most) {
        return mn_redo_has_wild(mn_row<mn_bf16>(p.v, b, t0 + t, at.h), V, most) ||
               mn_redo_has_wild(mn_row<mn_bf16>(p.k, b, t0 + t, at.h), K, most) ||
               mn_redo_has_wild(mn_row<mn_bf16>(p.a, b, t0 + t, at.h), K, most) ||
               mn_redo_has_wild(mn_row<mn_bf16>(p.b, b, t0 + t, at.h), K, most);
    });
}

/* The first token behind the last bad cotangent, if that shows in the first token's gradients; 0
 * where nothing is to be made again. The block calls. */
__device__ inline int cut_of_gradients(const mn_dplr_args &p, const chunk_coord &at) {
    const int64_t b = at.span.b, t0 = at.span.t0, K = p.call.K, V = p.call.V;
    const int64_t end = t0 + at.span.length;
    if (at.span.length == 0 ||
        (!mn_redo_row_is_wild(mn_row<mn_bf16>(p.grad.v, b, t0, at.h), V) &&
         !mn_redo_row_is_wild(mn_row<mn_bf16>(p.grad.k, b, t0, at.h), K) &&
         !mn_redo_row_is_wild(mn_row<mn_bf16>(p.grad.b, b, t0, at.h), K))) {
        return 0;
    }
    const int behind = mn_redo_first_token(at.span.length, [&](int64_t t, float most) {
        return mn_redo_has_wild(mn_row<mn_bf16>(p.cot.o, b, end - 1 - t, at.h), V, most);
    });
    return behind > 0 ? (int)at.span.length - behind : 0;
}

/* Cuts the sequence; false where the head has nothing to make again. All threads call. */
template <scan_kind KIND>
__device__ inline bool cut_sequence(chunk_coord &at, const chunk_params &job) {
    mn_pdl_wait();
    int cut = KIND == SCAN_BACK ? cut_of_gradients(job.p, at) : cut_of_results(job.p, at);
    if (cut % CHUNK == 0) cut = 0;    // those of other chunks never met it
    __syncthreads();
    if (threadIdx.x == 0) {
        at.cut = cut, at.length = (int)at.span.length;
        if (KIND == SCAN_BACK) {
            job.workspace.cuts[blockIdx.x] = cut;
        } else {
            at.span.length = cut, at.n_chunks = (cut + CHUNK - 1) / CHUNK;
        }
    }
    __syncthreads();
    return cut > 0;
}

#endif

/* ---- the kernel ------------------------------------------------------------------------------ */

/* Grid: blocks of SCAN_THREADS, block = n * H + h for sequence n and head h.
 * SCAN_OUTPUT  loads q, a, k, b, g, v and state0; stores o and state where given.
 * SCAN_SAVE    loads the same; stores S, U and matrices of the workspace.
 * SCAN_BACK    loads q, a, k, b, g, cot.o, cot.state and matrices; stores D and dX of the
 *              workspace, grad.v and grad.state0 where given.
 * REDO         the first or the last once more, of heads with numbers that are not finite; no
 *              states are stored, back workspace.cuts. */
template <scan_kind KIND, bool REDO>
__global__ void __launch_bounds__(SCAN_THREADS, 1)
dplr_state_scan_sm90_kernel(const __grid_constant__ chunk_params job) {
#if MN_HAS_WGMMA
    extern __shared__ __align__(128) unsigned char scan_smem_bytes[];
    scan_smem &smem = *(scan_smem *)scan_smem_bytes;
    if (threadIdx.x == 0) {
        const mn_call &call = job.p.call;
        chunk_coord &at = smem.place;
        at.n = blockIdx.x / call.H, at.h = blockIdx.x % call.H;
        at.span = mn_span_at(call, at.n);
        at.n_chunks = (int)((at.span.length + CHUNK - 1) / CHUNK);
        at.first = call.cu_seqlens ? call.cu_seqlens[at.n] / CHUNK + at.n : at.n * at.n_chunks;
        for (int i = 0; i < STAGES; i++) {
            mn_mbarrier_init(&smem.full[i], 32);
            mn_mbarrier_init(&smem.empty[i], CONSUMERS);
        }
    }
    __syncthreads();
    if (REDO && !cut_sequence<KIND>(smem.place, job)) return;
    if (threadIdx.x >= 32 * CONSUMERS) produce<KIND, REDO>(smem, job);
    else if (KIND == SCAN_BACK) scan_back<REDO>(smem, job);
    else scan_forward<KIND>(smem, job);
#endif
}

/* Gradients of q, a, k, b and g of all chunks at once, from S in front of a chunk,
 * D behind it, U and dX of the scans.
 *
 *   dPk = scale dO V'    dPb = scale dO U'    dAk = dX V'    dAb = dX U'      below the diagonal
 *   dq_t = exp(G_t) scale S dO_t + sum_s (dPk_ts k_s + dPb_ts b_s) exp(G_t - G_s)
 *   da_t = exp(G_{t-1}) S dX_t + sum_s (dAk_ts k_s + dAb_ts b_s) exp(G_{t-1} - G_s)
 *   dk_s = exp(G_15 - G_s) D v_s + sum_t dPk_ts q_t exp(G_t - G_s) + dAk_ts a_t exp(G_{t-1} - G_s)
 *   db_s likewise, with u_s, dPb and dAb
 *   dg_t = rowsum(D . S behind the chunk) + sum over s >= t of q dq - k dk - b db,
 *                                                     over s > t of a da
 *
 * A token's read of its own write, which no decay comes between, is added behind dg. One block of
 * four warps has a chunk of a head; a warp has 16 channels. */

enum { GRAD_THREADS = 128, GRAD_WARPS = GRAD_THREADS / 32 };

/* What products with states take: these [value column][channel], rows of value columns. */
struct alignas(128) grad_states {
    unsigned char S[WIDTH * WIDTH * 2], D[WIDTH * WIDTH * 2];
    unsigned char v[ROWS], u[ROWS], d_o[ROWS], dx[ROWS];
};

/* What is made behind them: rows with the origins' decays, sums of decays. */
struct alignas(128) grad_rows {
    chunk_rows scores;
    float2 G[CHUNK][WIDTH / 2];         // from the start,
    float2 cut[CHUNK][WIDTH / 2];       // the same cut off,
    float2 behind[CHUNK][WIDTH / 2];    // and from behind the token to the end
};

struct alignas(128) grad_smem {
    union {
        grad_states states;
        grad_rows rows;
    };
    chunk_rows in;
    unsigned char matrices[ROWS], rests[ROWS];    // rests: what rounding left of them
    float ends[GRAD_WARPS][WIDTH];    // sums of D . S in front of the chunk
    float own[2][CHUNK];              // diagonals of dPk and dPb
};

#if MN_HAS_WGMMA

/* ---- loads ----------------------------------------------------------------------------------- */

/* States of the workspace, of which this warp has 16 value columns, to a tile. */
__device__ inline void unpack_state(unsigned char *tile, const uint4 *from) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, j = warp * 16 + lane / 4;
#pragma unroll
    for (int n = 0; n < 4; n++) {
        const uint4 x = from[(warp * 4 + n) * 32 + lane];
        const int i = 16 * n + lane % 4 * 2;
        *row_pair(tile, j, i) = x.x, *row_pair(tile, j + 8, i) = x.y;
        *row_pair(tile, j, i + 8) = x.z, *row_pair(tile, j + 8, i + 8) = x.w;
    }
}

__device__ inline void load_chunk(grad_smem &smem, const chunk_params &job,
                                  const mn_tile_span &tile, int64_t h, int64_t record) {
    const mn_dplr_args &p = job.p;
    const mn_span &span = tile.span;
    const int64_t t = tile.first, K = p.call.K, V = p.call.V;
    const int count = (int)tile.n_rows, tid = threadIdx.x, vec = tid * 8;
    load_rows<GRAD_THREADS>(smem.in.g, p.g, job.packed_keys, span, h, t, count, K, tid);
    load_rows<GRAD_THREADS>(smem.in.q, p.q, job.packed_keys, span, h, t, count, K, tid);
    load_rows<GRAD_THREADS>(smem.in.a, p.a, job.packed_keys, span, h, t, count, K, tid);
    load_rows<GRAD_THREADS>(smem.in.k, p.k, job.packed_keys, span, h, t, count, K, tid);
    load_rows<GRAD_THREADS>(smem.in.b, p.b, job.packed_keys, span, h, t, count, K, tid);
    load_rows<GRAD_THREADS>(smem.states.v, p.v, job.packed_values, span, h, t, count, V, tid);
    load_rows<GRAD_THREADS>(smem.states.d_o, p.cot.o, job.packed_cot, span, h, t, count, V, tid);
    const unsigned at = mn_tile_swizzle(tid / 8, tid % 8);
    mn_cp_async_vec16(mn_shared_u32(smem.states.u) + at,
                      job.workspace.U + record * CHUNK * WIDTH + vec, 16);
    mn_cp_async_vec16(mn_shared_u32(smem.states.dx) + at,
                      job.workspace.dX + record * CHUNK * WIDTH + vec, 16);
    mn_cp_async_commit();
    unpack_state(smem.states.S, job.workspace.S + record * STATE_VECS);
    unpack_state(smem.states.D, job.workspace.D + record * STATE_VECS);
}

/* ---- rows of scores, sums of decays ---------------------------------------------------------- */

/* Tokens 4 w to 4 w + 3 by warp w; a lane has two channels. */
__device__ inline void make_rows(grad_smem &smem) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, i = 2 * lane;
    float2 c[CHUNK], G = {}, behind = {};
#pragma unroll
    for (int t = 0; t < CHUNK; t++) {
        const float2 g = load_decay(smem.in.g, t, i);
        c[t] = cut_decay(g) + (t > 0 ? c[t - 1] : make_float2(0.0f, 0.0f));
        G = G + g;
        if (t / 4 == warp) smem.rows.G[t][lane] = G, smem.rows.cut[t][lane] = c[t];
    }
#pragma unroll
    for (int t = CHUNK - 1; t >= 0; t--) {
        if (t / 4 == warp) smem.rows.behind[t][lane] = behind;
        behind = behind + load_decay(smem.in.g, t, i);
    }
#pragma unroll
    for (int t = 0; t < CHUNK; t++) {
        if (t / 4 != warp) continue;
        const float2 before = t > 0 ? c[t - 1] : make_float2(0.0f, 0.0f);
        const float2 near = c[origin_of(0)], late = c[origin_of(8)];
        const float2 q = load_pair(smem.in.q, t, i), a = load_pair(smem.in.a, t, i);
        const float2 back = mn_exp2(c[origin_of(t)] - c[t]);
        store_pair(smem.rows.scores.q, t, i, mn_exp2(c[t] - near) * q);
        store_pair(smem.rows.scores.a, t, i, mn_exp2(before - near) * a);
        store_pair(smem.rows.scores.k, t, i, back * load_pair(smem.in.k, t, i));
        store_pair(smem.rows.scores.b, t, i, back * load_pair(smem.in.b, t, i));
        if (t < CHUNK / 2) continue;
        store_pair(smem.rows.scores.g, t - CHUNK / 2, i, mn_exp2(c[t] - late) * q);
        store_pair(smem.rows.scores.g, t, i, mn_exp2(before - late) * a);
    }
}

/* Sums of D . S over this warp's value columns. */
__device__ inline void sum_states(grad_smem &smem) {
    const int warp = threadIdx.x / 32, i = threadIdx.x % 32 * 2;
    float2 sum = {};
#pragma unroll
    for (int j = 16 * warp; j < 16 * warp + 16; j++) {
        sum = fma_of(load_pair(smem.states.S, j, i), load_pair(smem.states.D, j, i), sum);
    }
    *(float2 *)&smem.ends[warp][i] = sum;
}

/* ---- products -------------------------------------------------------------------------------- */

/* Gradients of this warp's 16 channels: rows of sums as those of tensor cores, two tiles of eight
 * channels. */
struct grad_sums {
    float q[2][4], a[2][4], k[2][4], b[2][4];
};

/* y (16 tokens, 16 channels) += x b */
__device__ inline void add_channels(float (&y)[2][4], const unsigned (&x)[4],
                                    const unsigned (&b)[4]) {
    mn_mma(y[0], x, b[0], b[1]);
    mn_mma(y[1], x, b[2], b[3]);
}

/* S dO, S dX, D v and D u, decays left out; and one of the four matrices to smem.matrices. */
__device__ inline void through_states(grad_sums &sum, grad_smem &smem, float scale) {
    const int warp = threadIdx.x / 32, t = threadIdx.x % 32 / 4, s = threadIdx.x % 4 * 2;
    const bool reads = warp >= 2;    // matrices AT_PK, AT_PB
    float matrix[2][4] = {};
    sum = {};
#pragma unroll
    for (int j = 0; j < WIDTH; j += 16) {
        unsigned S[4], D[4], d_o[4], dx[4], v[4], u[4], w[4];
        mn_frag_b_trans(S, mn_shared_u32(smem.states.S), j, 16 * warp);
        mn_frag_b_trans(D, mn_shared_u32(smem.states.D), j, 16 * warp);
        mn_frag_a(d_o, mn_shared_u32(smem.states.d_o), 0, j);
        mn_frag_a(dx, mn_shared_u32(smem.states.dx), 0, j);
        mn_frag_a(v, mn_shared_u32(smem.states.v), 0, j);
        mn_frag_a(u, mn_shared_u32(smem.states.u), 0, j);
        mn_frag_b(w, mn_shared_u32(warp % 2 ? smem.states.u : smem.states.v), j, 0);
        add_channels(sum.q, d_o, S);
        add_channels(sum.a, dx, S);
        add_channels(sum.k, v, D);
        add_channels(sum.b, u, D);
        if (reads) add_channels(matrix, d_o, w);
        else add_channels(matrix, dx, w);
    }
#pragma unroll
    for (int c = 0; c < 4; c++) {
        const int row = t + c / 2 * 8, col = s + c % 2;
        const float x = reads ? scale : 1.0f;
        matrix[0][c] *= x, matrix[1][c] *= x;
        if (reads && row == col) smem.own[warp - 2][row] = matrix[0][c];
        if (reads && row == col + 8) smem.own[warp - 2][row] = matrix[1][c];
        if (col >= row) matrix[0][c] = 0.0f;
        if (col + 8 >= row) matrix[1][c] = 0.0f;
    }
#pragma unroll
    for (int n = 0; n < 2; n++) {
        const int at = 16 * warp + 8 * n + s;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const float2 x = make_float2(matrix[n][2 * half], matrix[n][2 * half + 1]);
            store_pair(smem.matrices, t + 8 * half, at, x);
            store_rest(smem.rests, t + 8 * half, at, x,
                       *row_pair(smem.matrices, t + 8 * half, at));
        }
    }
}

/* Sums over tokens of the chunk, decays to or from origins left out: of q and a with columns s < 8
 * of the matrices, and with the others, which rows t < 8 have none of; of k and, from [2] on, b,
 * tokens s < 8 and the others. */
struct grad_inside {
    float q[2][2][4], a[2][2][4], kb[2][2][4];
};

__device__ inline void inside_chunk(grad_inside &sum, const grad_smem &smem) {
    const int i = threadIdx.x / 32 * 16;
    const unsigned matrices = mn_shared_u32(smem.matrices), rests = mn_shared_u32(smem.rests);
    unsigned k[4], b[4], q[4], a[4], late[4], x[4], y[4];
    sum = {};
    mn_frag_b_trans(k, mn_shared_u32(smem.rows.scores.k), 0, i);
    mn_frag_b_trans(b, mn_shared_u32(smem.rows.scores.b), 0, i);
    const unsigned near_kb[4] = { k[0], b[0], k[2], b[2] }, far_kb[4] = { k[1], b[1], k[3], b[3] };
    const auto reads = [&](float (&to)[2][2][4], unsigned from, int at_k, int at_b) {
        mn_frag_a(x, from, 0, at_k);
        mn_frag_a(y, from, 0, at_b);
        const unsigned near[4] = { x[0], x[1], y[0], y[1] }, far[4] = { x[2], x[3], y[2], y[3] };
        add_channels(to[0], near, near_kb);
        add_channels(to[1], far, far_kb);
    };
    reads(sum.q, matrices, AT_PK, AT_PB);
    reads(sum.a, matrices, AT_AK, AT_AB);
    reads(sum.a, rests, AT_AK, AT_AB);
    mn_frag_b_trans(q, mn_shared_u32(smem.rows.scores.q), 0, i);
    mn_frag_b_trans(a, mn_shared_u32(smem.rows.scores.a), 0, i);
    mn_frag_b_trans(late, mn_shared_u32(smem.rows.scores.g), 0, i);
    unsigned far[4];    // tokens s >= 8, read by t >= 8: of q, then of a
    const auto writes = [&](const unsigned (&rows)[4], unsigned from, int at_k, int at_b, int n) {
        mn_frag_a_trans(x, from, at_k, 0);
        mn_frag_a_trans(y, from, at_b, 0);
        const unsigned near[4] = { x[0], y[0], x[2], y[2] };
        add_channels(sum.kb[0], near, rows);
        far[2 * n] = x[3], far[2 * n + 1] = y[3];
    };
#pragma unroll
    for (int rest = 0; rest < 2; rest++) {
        const unsigned from = rest ? rests : matrices;
        writes(q, from, AT_PK, AT_PB, 0);
        writes(a, from, AT_AK, AT_AB, 1);
        add_channels(sum.kb[1], far, late);
    }
}

/* ---- sums of both, dg, and stores ------------------------------------------------------------ */

/* Numbers of two neighbouring channels in rows of a chunk. */
struct grad_pair {
    float2 q, a, k, b, inclusive, exclusive;
};

/* Gradients at row t, and what they add to dg, without the diagonals; `ends` += D behind the chunk
 * times what the row writes. */
__device__ inline grad_pair grad_of_row(const grad_sums &sum, const grad_inside &inside,
                                        grad_smem &smem, float scale, int n, int half, int t,
                                        int i, float2 &ends) {
    const float2 zero = make_float2(0.0f, 0.0f);
    const auto of = [&](const float (&x)[4]) {
        return half ? make_float2(x[2], x[3]) : make_float2(x[0], x[1]);
    };
    const float2 G = smem.rows.G[t][i / 2], G_read = t > 0 ? smem.rows.G[t - 1][i / 2] : zero;
    const float2 c = smem.rows.cut[t][i / 2], c_read = t > 0 ? smem.rows.cut[t - 1][i / 2] : zero;
    const float2 near = smem.rows.cut[origin_of(0)][i / 2];
    const float2 far = smem.rows.cut[origin_of(8)][i / 2];
    const float2 write = mn_exp2(smem.rows.behind[t][i / 2]);
    const float2 back = mn_exp2((half ? far : near) - c);
    const float2 k = load_pair(smem.in.k, t, i), b = load_pair(smem.in.b, t, i);
    const float2 dk = write * of(sum.k[n]), db = write * of(sum.b[n]);
    const float (&kb)[4] = inside.kb[half][n];
    grad_pair grad;
    grad.q = fma_of(mn_exp2(c - near), of(inside.q[0][n]), scale * (mn_exp2(G) * of(sum.q[n])));
    grad.a = fma_of(mn_exp2(c_read - near), of(inside.a[0][n]), mn_exp2(G_read) * of(sum.a[n]));
    if (half) {
        grad.q = fma_of(mn_exp2(c - far), of(inside.q[1][n]), grad.q);
        grad.a = fma_of(mn_exp2(c_read - far), of(inside.a[1][n]), grad.a);
    }
    grad.k = fma_of(back, make_float2(kb[0], kb[1]), dk);
    grad.b = fma_of(back, make_float2(kb[2], kb[3]), db);
    ends = fma_of(k, dk, fma_of(b, db, ends));
    grad.exclusive = load_pair(smem.in.a, t, i) * grad.a;
    grad.inclusive = load_pair(smem.in.q, t, i) * grad.q - fma_of(k, grad.k, b * grad.b);
    return grad;
}

/* Adds what the token reads of its own write. */
__device__ inline void add_own(grad_pair &grad, grad_smem &smem, int t, int i) {
    const float own_k = smem.own[0][t], own_b = smem.own[1][t];
    const float2 q = load_pair(smem.in.q, t, i);
    grad.q = grad.q + own_k * load_pair(smem.in.k, t, i) + own_b * load_pair(smem.in.b, t, i);
    grad.k = grad.k + own_k * q;
    grad.b = grad.b + own_b * q;
}

/* The sum over this row of eight and those behind it, and over all eight. */
__device__ inline float sum_behind(float x, float &all) {
    const int row = threadIdx.x % 32 / 4;
#pragma unroll
    for (int step = 1; step < 8; step *= 2) {
        const float next = __shfl_down_sync(0xffffffffu, x, 4 * step);
        if (row + step < 8) x += next;
    }
    all = __shfl_sync(0xffffffffu, x, threadIdx.x % 4);
    return x;
}

__device__ inline float2 sum_behind(float2 x, float2 &all) {
    return make_float2(sum_behind(x.x, all.x), sum_behind(x.y, all.y));
}

__device__ inline void store_grad(const mn_out &view, const chunk_params &job, const mn_span &span,
                                  int64_t h, int64_t t, int i, float2 x) {
    mn_bf16 *to = mn_row<mn_bf16>(view, span.b, span.t0 + t, h);
    if (!to || i >= job.p.call.K) return;
    if (job.packed_grads) {
        *(unsigned *)(to + i) = mn_bf16x2(x.x, x.y);
        return;
    }
    mn_put(to + i, x.x);
    if (i + 1 < job.p.call.K) mn_put(to + i + 1, x.y);
}

__device__ inline void store_grads(const grad_sums &sum, const grad_inside &inside,
                                   grad_smem &smem, const chunk_params &job,
                                   const mn_tile_span &tile, int64_t h, int from) {
    const int row = threadIdx.x % 32 / 4;
#pragma unroll
    for (int n = 0; n < 2; n++) {
        const int i = threadIdx.x / 32 * 16 + 8 * n + threadIdx.x % 4 * 2;
        float2 written = {}, behind = {}, all, end = {}, dg[2];
        grad_pair grad[2];
#pragma unroll
        for (int half = 1; half >= 0; half--) {
            const int t = row + 8 * half;
            grad[half] = grad_of_row(sum, inside, smem, job.scale, n, half, t, i, written);
            dg[half] = sum_behind(grad[half].inclusive + grad[half].exclusive, all) + behind -
                       grad[half].exclusive;
            behind = behind + all;
        }
#pragma unroll
        for (int warp = 0; warp < GRAD_WARPS; warp++) {
            end = end + *(const float2 *)&smem.ends[warp][i];
        }
        end = mn_exp2(smem.rows.G[CHUNK - 1][i / 2]) * end +
              make_float2(mn_col_sum(written.x), mn_col_sum(written.y));
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int t = row + 8 * half;
            const int64_t when = tile.first + t;
            if (t < from || t >= tile.n_rows) continue;
            add_own(grad[half], smem, t, i);
            store_grad(job.p.grad.q, job, tile.span, h, when, i, grad[half].q);
            store_grad(job.p.grad.a, job, tile.span, h, when, i, grad[half].a);
            store_grad(job.p.grad.k, job, tile.span, h, when, i, grad[half].k);
            store_grad(job.p.grad.b, job, tile.span, h, when, i, grad[half].b);
            store_grad(job.p.grad.g, job, tile.span, h, when, i, end + dg[half]);
        }
    }
}

#endif

/* Grid: chunk slots * H blocks of GRAD_THREADS, block = slot * H + h.
 * Loads   q, a, k, b, g, v and cot.o of the chunk; S, D, U and dX of the workspace.
 * Stores  grad.q, grad.a, grad.k, grad.b and grad.g where given.
 * REDO    block = n * H + h: the chunk that workspace.cuts cuts, from there on. */
template <bool REDO>
__global__ void __launch_bounds__(GRAD_THREADS, 4)
dplr_grad_sm90_kernel(const __grid_constant__ chunk_params job) {
#if MN_HAS_WGMMA
    extern __shared__ __align__(128) unsigned char grad_smem_bytes[];
    grad_smem &smem = *(grad_smem *)grad_smem_bytes;
    const mn_call &call = job.p.call;
    const int64_t h = blockIdx.x % call.H;
    int64_t record = blockIdx.x;
    int from = 0;
    if (REDO) {
        mn_pdl_wait();
        const int cut = job.workspace.cuts[blockIdx.x];
        const int64_t n = blockIdx.x / call.H;
        if (cut == 0) return;
        const int64_t slot = call.cu_seqlens ? call.cu_seqlens[n] / CHUNK + n
                                             : n * ((call.T + CHUNK - 1) / CHUNK);
        record = (slot + cut / CHUNK) * call.H + h, from = cut % CHUNK;
    }
    const mn_tile_span tile = mn_tile_at(call, CHUNK, record / call.H);
    if (tile.n_rows == 0) return;
    grad_sums sum;
    grad_inside inside;
    load_chunk(smem, job, tile, h, record);
    mn_cp_async_wait<0>();
    __syncthreads();
    if (REDO) {
        clear_rows(smem.states.d_o, from, threadIdx.x, GRAD_THREADS);
        __syncthreads();
    }
    sum_states(smem);
    through_states(sum, smem, job.scale);
    __syncthreads();
    make_rows(smem);
    __syncthreads();
    inside_chunk(inside, smem);
    store_grads(sum, inside, smem, job, tile, h, from);
#endif
}

bool mn_dplr_uses_chunks_sm90(const mn_dplr_args *p) {
    return p->call.K <= WIDTH && p->call.V <= WIDTH && mn_device_is_sm90();
}

/* Lays the workspace out from `base` on; false when sizes overflow. */
static bool workspace_layout(chunk_workspace *to, size_t *bytes, const mn_call &call, void *base) {
    const int64_t records = mn_tile_slots(call, CHUNK) * call.H;
    const size_t state = STATE_VECS * sizeof(uint4), rows = ROWS;
    size_t count, cuts;
    if (!mn_mul_size(&count, (size_t)records, 1) ||
        !mn_mul_size(bytes, count, 2 * state + 3 * rows) ||
        !mn_mul_size(&cuts, (size_t)(mn_n_spans(call) * call.H), sizeof(int)) ||
        !mn_add_size(bytes, *bytes, cuts)) {
        return false;
    }
    if (!base) return true;
    char *at = (char *)base;
    const auto take = [&](size_t each) {
        char *from = at;
        at += count * each;
        return from;
    };
    to->S = (uint4 *)take(state), to->D = (uint4 *)take(state);
    to->U = (mn_bf16 *)take(rows), to->dX = (mn_bf16 *)take(rows);
    to->matrices = (unsigned char *)take(rows);
    to->cuts = (int *)at;
    return true;
}

bool mn_dplr_chunk_plan_sm90(mn_plan *plan, const mn_dplr_args *p, bool back) {
    chunk_workspace workspace;
    return !back || workspace_layout(&workspace, &plan->shared_bytes, p->call, nullptr);
}

/* Whether rows of `width` numbers of a view begin at multiples of N of them. */
template <int N, typename View>
static bool aligned(const View &view, int64_t width) {
    bool whole = (uintptr_t)view.data % (N * sizeof(mn_bf16)) == 0 && width % N == 0;
    for (int axis = 0; axis < 3; axis++) whole = whole && view.stride[axis] % N == 0;
    return whole;
}

static chunk_params params_of(const mn_dplr_args *p) {
    const int64_t K = p->call.K, V = p->call.V;
    chunk_params job = {};
    job.p = *p;
    job.scale = (float)p->scale;
    job.packed_keys = aligned<8>(p->q, K) && aligned<8>(p->a, K) && aligned<8>(p->k, K) &&
                      aligned<8>(p->b, K) && aligned<8>(p->g, K);
    job.packed_values = aligned<8>(p->v, V), job.packed_cot = aligned<8>(p->cot.o, V);
    job.packed_o = aligned<2>(p->o, V), job.packed_dv = aligned<2>(p->grad.v, V);
    job.packed_grads = aligned<2>(p->grad.q, K) && aligned<2>(p->grad.a, K) &&
                       aligned<2>(p->grad.k, K) && aligned<2>(p->grad.b, K) &&
                       aligned<2>(p->grad.g, K);
    return job;
}

template <scan_kind KIND, bool REDO = false>
static int scan(const chunk_params &job, cudaStream_t stream) {
    const int64_t blocks = mn_n_spans(job.p.call) * job.p.call.H;
    if (blocks == 0) return cudaSuccess;
    if (blocks > INT32_MAX) return cudaErrorNotSupported;
    return mn_launch_smem_behind(REDO, dplr_state_scan_sm90_kernel<KIND, REDO>,
                                 dim3((unsigned)blocks), SCAN_THREADS, sizeof(scan_smem), stream,
                                 job);
}

/* Whether rows in front of numbers that are not finite are made again, and gradients behind such
 * cotangents. */
static const bool redoes_results = true, redoes_gradients = true;

int mn_dplr_chunk_forward_sm90(const mn_dplr_args *p, cudaStream_t stream) {
    chunk_params job = params_of(p);
    const int code = scan<SCAN_OUTPUT>(job, stream);
    if (code != cudaSuccess || !redoes_results || !p->o.data || p->call.T < 2) return code;
    job.p.state = {};
    return scan<SCAN_OUTPUT, true>(job, stream);
}

/* Gradients of q, a, k, b and g of all chunks, or of those that a redo has cut. */
template <bool REDO>
static int grad(const chunk_params &job, int64_t blocks, cudaStream_t stream) {
    return mn_launch_smem_behind(REDO, dplr_grad_sm90_kernel<REDO>, dim3((unsigned)blocks),
                                 GRAD_THREADS, sizeof(grad_smem), stream, job);
}

int mn_dplr_chunk_backward_sm90(const mn_dplr_args *p, void *shared, cudaStream_t stream) {
    chunk_params job = params_of(p);
    size_t bytes;
    const int64_t records = mn_tile_slots(p->call, CHUNK) * p->call.H;
    if (records > INT32_MAX || !workspace_layout(&job.workspace, &bytes, p->call, shared)) {
        return cudaErrorNotSupported;
    }
    int code = scan<SCAN_SAVE>(job, stream);
    if (code == cudaSuccess) code = scan<SCAN_BACK>(job, stream);
    if (code != cudaSuccess || records == 0) return code;
    code = grad<false>(job, records, stream);
    const bool shows = p->grad.v.data || p->grad.k.data || p->grad.b.data;
    if (code != cudaSuccess || !redoes_gradients || !shows || !p->cot.o.data || p->call.T < 2) {
        return code;
    }
    code = scan<SCAN_BACK, true>(job, stream);
    return code == cudaSuccess
               ? grad<true>(job, mn_n_spans(p->call) * p->call.H, stream) : code;
}

}    // namespace mneme::dplr
