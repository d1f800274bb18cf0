/* longhorn_column_chunk.cu - longhorn_column in bf16 over chunks of 64 tokens. Forward: what keys
 * say to each other, all chunks at once, then the scan. Back: the same, with states and what tokens
 * write left for later instead of o; the scan back; dq and dk, all chunks at once:
 *
 *   dq_t = scale S do_t + sum over s <= t of scale (do_t.e_s) k_s             x_t = w_t y_t
 *   dk_t = D e_t - S x_t + sum over u >= t of scale (do_u.e_t) q_u
 *          - sum over s <= t of (x_t.e_s) k_s - sum over u >= t of (x_u.e_t) k_u
 *
 * where S is in front of the chunk and D behind it. What |k|^2 does through the gains is there: it
 * is -2 k_t (x_t.e_t), and both last sums have s = t. */
#include "kernels/cuda/delta/delta_smem.cuh"
#include "kernels/cuda/longhorn/longhorn_column_chunk.h"
#include "kernels/cuda/delta/delta_grad.cuh"
#include "kernels/cuda/prim/device_props.h"

namespace mneme::longhorn {

using namespace delta;

/* longhorn_column in bf16 over chunks (see ref/longhorn_column.c). With e = w r what a token
 * writes, S the state in front of a block of tokens and D its adjoint behind it,
 *
 *   r_t = v_t - S'k_t - sum over s < t of (k_t.k_s) e_s           o_t = scale S'q_t + sum over
 *   S += sum of k_t e_t'                                    s <= t of (scale q_t.k_s) e_s
 *
 *   y_s = D'k_s + sum over t >= s of (scale q_t.k_s) do_t - sum over t > s of (k_t.k_s) w_t y_t
 *   D += sum of scale q_t do_t' - k_t (w_t y_t)'          dv = w y      dbeta = y r u^2
 *
 * u = 1 / (1 + beta |k|^2), w = beta u. Products of keys belong to all columns, gains to each: what
 * a column's tokens owe each other is solved in float32, sixteen tokens at a time, and all else is
 * products of tiles. State scans keep a state transposed in the accumulators of tensor cores: a
 * warp has sixteen value columns of it, a lane two of these columns and four tokens of each block,
 *
 *   columns l / 4 + 8 m      tokens and channels 8 n + 2 (l % 4) + i      at [n][2 m + i]
 *
 * so that what a scan makes of a block of tokens is a left factor as it stands, and warps share
 * nothing but tokens. Within a chunk a block is looked up in the state that lacks the block just
 * solved, which `across` makes up for: states take and give while the next block is solved. These
 * come in chunks of 64 by the numbering of delta_smem.cuh. dq and dk are those of delta
 * (delta_grad.cuh) without decays. */

enum {
    MN_LONGHORN_BLOCK = 16,                                      // tokens solved at a time
    MN_LONGHORN_BLOCKS = MN_DELTA_CHUNK / MN_LONGHORN_BLOCK,
    MN_LONGHORN_WIDTH = 64,                                      // value columns of a scan
    MN_LONGHORN_SCAN_THREADS = 128, MN_LONGHORN_INTRA_THREADS = 128,
};

/* Products of the keys of each block with each other, and with queries. `below` has for pair i of
 * tokens that others wait for and lane p of a quad what its four tokens take from either: forward
 * k_t.k_s of s in the pair, zero unless s < t; back of t in it. `pairs` are right factors of scale
 * q_t.k_s, forward with depth s and columns t, back with depth t and columns s; `across` those of
 * keys with the block that was solved before, which is the depth. */
struct alignas(16) mn_longhorn_record {
    float norm[MN_DELTA_CHUNK];    // |k|^2
    float below[MN_LONGHORN_BLOCKS][8][4][8];
    uint4 pairs[MN_LONGHORN_BLOCKS][32], across[MN_LONGHORN_BLOCKS][32];
};

/* Records of chunks and heads. States and what tokens leave for later are transposed as those of
 * delta: [V rounded up to 64][K rounded up], [V rounded up][64]. */
struct mn_longhorn_workspace {
    mn_longhorn_record *ahead, *back;
    mn_bf16 *S, *D, *e, *r, *dr;
    int *cuts;    // [n * H + h] of a redo
};

enum mn_longhorn_tensor {
    MN_LONGHORN_Q, MN_LONGHORN_K, MN_LONGHORN_V, MN_LONGHORN_BETA, MN_LONGHORN_O, MN_LONGHORN_COT,
    MN_LONGHORN_DV, MN_LONGHORN_DBETA, MN_LONGHORN_TENSORS
};

struct mn_longhorn_params {
    mn_longhorn_column_args p;
    mn_longhorn_workspace workspace;
    float scale;
    bool packed[MN_LONGHORN_TENSORS];
    int64_t padded_v;
    bool redo;    // of rows in front of numbers that are not finite (longhorn_find_chunk), or back
                  // of those behind such a cotangent (longhorn_find_redo_back)
};

/* ---- what keys say to each other ------------------------------------------------------------- */

template <int KP>
struct alignas(128) mn_longhorn_intra_smem {
    unsigned char k[mn_tile_bytes<KP>()], q[mn_tile_bytes<KP>()];
};

/* Sums of 16 x 16 as a right factor whose columns are their rows. */
__device__ inline uint4 mn_longhorn_frag_b(const float (&x)[2][4]) {
    return make_uint4(mn_bf16x2(x[0][0], x[0][1]), mn_bf16x2(x[1][0], x[1][1]),
                      mn_bf16x2(x[0][2], x[0][3]), mn_bf16x2(x[1][2], x[1][3]));
}

/* sums += left times two right factors of eight columns */
__device__ inline void mn_longhorn_mma(float (&sums)[2][4], const unsigned (&left)[4],
                                            const unsigned (&right)[4]) {
    mn_mma(sums[0], left, right[0], right[1]);
    mn_mma(sums[1], left, right[2], right[3]);
}

__device__ inline void mn_longhorn_mma(float (&sums)[2][4], const unsigned (&left)[4],
                                            const uint4 &right) {
    mn_mma(sums[0], left, right.x, right.y);
    mn_mma(sums[1], left, right.z, right.w);
}

/* A warp's block of the record: of products of keys `kk`, of queries and keys `qk` and of keys with
 * the block before, whose rows are t, or with BACK s. */
template <bool BACK>
__device__ inline void mn_longhorn_store_record(mn_longhorn_record &to, const float (&kk)[2][4],
                                                const float (&qk)[2][4],
                                                const float (&across)[2][4], float scale) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    float pair[2][4];
#pragma unroll
    for (int n = 0; n < 2; n++) {
#pragma unroll
        for (int m = 0; m < 2; m++) {
            const int row = lane / 4 + 8 * m, column = 8 * n + lane % 4 * 2;
            float take[2];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const bool other = BACK ? column + i > row : column + i < row;
                const float x = kk[n][2 * m + i];
                take[i] = other ? x : 0.0f;
                pair[n][2 * m + i] = other || row == column + i ? scale * qk[n][2 * m + i] : 0.0f;
                if (row == column + i) to.norm[MN_LONGHORN_BLOCK * warp + row] = x;
            }
            float *at = to.below[warp][4 * n + lane % 4][row % 8 / 2];
            *(float2 *)(at + 2 * (row / 8 * 2 + row % 2)) = make_float2(take[0], take[1]);
        }
    }
    to.pairs[warp][lane] = mn_longhorn_frag_b(pair);
    to.across[warp][lane] = mn_longhorn_frag_b(across);
}

/* The chunk of a block and its record. In a redo, of block n * H + h, that of the first token whose
 * numbers are not finite, if they show in the last token's o, up to that token, and where that is
 * for the scan; no rows where there is nothing to do (docs/internals/causality.md). */
template <bool BACK>
__device__ inline mn_tile_span longhorn_find_chunk(const mn_longhorn_params &job, int64_t &index) {
    const mn_longhorn_column_args &p = job.p;
    const mn_call &call = p.call;
    const int64_t h = blockIdx.x % call.H, n = blockIdx.x / call.H;
    index = blockIdx.x;
    if (BACK || !job.redo) return mn_tile_at(call, MN_DELTA_CHUNK, n);
    mn_pdl_wait();
    mn_tile_span tile = {};
    tile.n = n, tile.span = mn_span_at(call, n);
    const int64_t b = tile.span.b, t0 = tile.span.t0, length = tile.span.length;
    const mn_bf16 *last = mn_row<mn_bf16>(p.o, b, t0 + length - 1, h);
    int cut = 0;
    if (length > 0 && mn_redo_row_is_wild(last, call.V)) {
        cut = mn_redo_first_token(length, [&](int64_t t, float most) {
            return mn_redo_has_wild(mn_row<mn_bf16>(p.v, b, t0 + t, h), call.V, most) ||
                   mn_redo_has_wild(mn_row<mn_bf16>(p.k, b, t0 + t, h), call.K, most) ||
                   mn_redo_has_wild(mn_row<mn_bf16>(p.beta, b, t0 + t, h), call.V, most);
        });
    }
    if (cut % MN_DELTA_CHUNK == 0) cut = 0;
    if (threadIdx.x == 0) job.workspace.cuts[blockIdx.x] = cut;
    tile.first = cut / MN_DELTA_CHUNK * MN_DELTA_CHUNK, tile.n_rows = cut - tile.first;
    index = (mn_delta_first_slot(call, n) + cut / MN_DELTA_CHUNK) * call.H + h;
    return tile;
}

/* A block has a chunk of a head, a warp a block of its tokens. */
template <int KP, bool BACK>
__global__ void __launch_bounds__(MN_LONGHORN_INTRA_THREADS)
longhorn_intra_chunk(const __grid_constant__ mn_longhorn_params job) {
    extern __shared__ __align__(128) unsigned char bytes[];
    mn_longhorn_intra_smem<KP> &smem = *(mn_longhorn_intra_smem<KP> *)bytes;
    const mn_call &call = job.p.call;
    int64_t index;
    const int64_t h = blockIdx.x % call.H;
    const mn_tile_span tile = longhorn_find_chunk<BACK>(job, index);
    const int count = (int)tile.n_rows, row0 = threadIdx.x / 32 * MN_LONGHORN_BLOCK;
    if (count == 0) return;
    mn_tile_load<KP, MN_LONGHORN_INTRA_THREADS>(smem.k, job.p.k, job.packed[MN_LONGHORN_K],
                                                tile.span,
                                             h, tile.first, count, 0, call.K, threadIdx.x);
    mn_tile_load<KP, MN_LONGHORN_INTRA_THREADS>(smem.q, job.p.q, job.packed[MN_LONGHORN_Q],
                                                tile.span,
                                             h, tile.first, count, 0, call.K, threadIdx.x);
    mn_cp_async_commit();
    mn_cp_async_wait<0>();
    __syncthreads();
    const unsigned k = mn_shared_u32(smem.k), q = mn_shared_u32(smem.q);
    const int before = max(row0 - MN_LONGHORN_BLOCK, 0);    // the first and last block have none:
    const int behind = min(row0 + MN_LONGHORN_BLOCK, MN_DELTA_CHUNK - MN_LONGHORN_BLOCK);    // any
    float kk[2][4] = {}, qk[2][4] = {}, kq[2][4] = {}, ahead[2][4] = {}, back[2][4] = {};
#pragma unroll
    for (int c = 0; c < KP; c += 16) {
        unsigned keys[4], queries[4], right[4];
        mn_frag_a(keys, k, row0, c);
        mn_frag_a(queries, q, row0, c);
        mn_frag_b(right, k, c, row0);
        mn_longhorn_mma(kk, keys, right);
        mn_longhorn_mma(qk, queries, right);
        mn_frag_b(right, k, c, before);
        mn_longhorn_mma(ahead, keys, right);
        if (!BACK) continue;
        mn_frag_b(right, k, c, behind);
        mn_longhorn_mma(back, keys, right);
        mn_frag_b(right, q, c, row0);
        mn_longhorn_mma(kq, keys, right);
    }
    mn_longhorn_store_record<false>(job.workspace.ahead[index], kk, qk, ahead, job.scale);
    if (BACK) mn_longhorn_store_record<true>(job.workspace.back[index], kk, kq, back, job.scale);
}

/* ---- what both scans share ------------------------------------------------------------------- */

struct mn_longhorn_coord {
    int64_t n, h, column0, slot0;
    mn_span span;
    int n_chunks, column;    // column: of this warp, in the block's

    __device__ int64_t index(const mn_call &call, int chunk) const {
        return (slot0 + chunk) * call.H + h;
    }
    __device__ int count(int chunk) const {
        return (int)min((int64_t)MN_DELTA_CHUNK, span.length - chunk * (int64_t)MN_DELTA_CHUNK);
    }
};

__device__ inline mn_longhorn_coord mn_longhorn_block_coord(const mn_longhorn_params &job) {
    const mn_call &call = job.p.call;
    const int64_t col_tiles = job.padded_v / MN_LONGHORN_WIDTH;
    mn_longhorn_coord at;
    at.column0 = blockIdx.x % col_tiles * MN_LONGHORN_WIDTH;
    at.h = blockIdx.x / col_tiles % call.H, at.n = blockIdx.x / col_tiles / call.H;
    at.span = mn_span_at(call, at.n);
    at.slot0 = mn_delta_first_slot(call, at.n);
    at.n_chunks = (int)((at.span.length + MN_DELTA_CHUNK - 1) / MN_DELTA_CHUNK);
    at.column = threadIdx.x / 32 * 16;
    return at;
}

/* This warp's rows of a tile, whose rows are value columns, to workspace. */
template <int COLUMNS>
__device__ inline void mn_longhorn_store_tile(mn_bf16 *record, const unsigned char *tile,
                                        const mn_longhorn_coord &at) {
    constexpr int vec16s = COLUMNS / 8;
#pragma unroll
    for (int i = threadIdx.x % 32; i < 16 * vec16s; i += 32) {
        const int row = at.column + i / vec16s, vec16 = i % vec16s;
        *(uint4 *)(record + (at.column0 + row) * COLUMNS + 8 * vec16) =
            *(const uint4 *)(tile + mn_tile_swizzle(row, vec16));
    }
}

/* A warp's state or adjoint: KP channels of its columns. */
template <int KP>
struct mn_longhorn_state {
    float at[KP / 8][4];

    template <typename F>
    __device__ void each(const mn_call &call, const mn_longhorn_coord &place, F use) {
        const int lane = threadIdx.x % 32;
        const int64_t head = place.n * call.H + place.h;
#pragma unroll
        for (int n = 0; n < KP / 8; n++) {
#pragma unroll
            for (int c = 0; c < 4; c++) {
                const int64_t i = 8 * n + lane % 4 * 2 + c % 2;
                const int64_t j = place.column0 + place.column + lane / 4 + c / 2 * 8;
                use(at[n][c], (head * call.K + i) * call.V + j, i < call.K && j < call.V);
            }
        }
    }
    __device__ void load(const mn_call &call, const mn_longhorn_coord &place, const float *from) {
        each(call, place, [&](float &x, int64_t cell, bool inside) {
            x = from && inside ? from[cell] : 0.0f;
        });
    }
    __device__ void store(const mn_call &call, const mn_longhorn_coord &place, float *to) {
        each(call, place, [&](float &x, int64_t cell, bool inside) {
            if (to && inside) to[cell] = x;
        });
    }

    /* To a record of states, rounded, through this warp's rows of a tile. */
    __device__ void keep(mn_bf16 *record, unsigned char *tile,
                         const mn_longhorn_coord &place) const {
        const int lane = threadIdx.x % 32;
        __syncwarp();
#pragma unroll
        for (int n = 0; n < KP / 8; n++) {
#pragma unroll
            for (int m = 0; m < 2; m++) {
                const unsigned to = mn_tile_swizzle(place.column + lane / 4 + 8 * m, n);
                *(unsigned *)(tile + to + lane % 4 * 4) = mn_bf16x2(at[n][2 * m], at[n][2 * m + 1]);
            }
        }
        __syncwarp();
        mn_longhorn_store_tile<KP>(record, tile, place);
    }

    /* Adds what a block of tokens, rows of a tile of keys, finds in 16 channels. */
    __device__ void find(float (&sums)[2][4], int c, unsigned tile, int token0) const {
        unsigned left[4], right[4];
        mn_frag_a_of(left, at[2 * c], at[2 * c + 1]);
        mn_frag_b(right, tile, 16 * c, token0);
        mn_longhorn_mma(sums, left, right);
    }

    /* 16 channels take columns x of a block of tokens times the rows of a tile. */
    __device__ void take(const unsigned (&x)[4], int c, unsigned tile, int token0) {
        unsigned right[4];
        mn_frag_b_trans(right, tile, token0, 16 * c);
        mn_mma(at[2 * c], x, right[0], right[1]);
        mn_mma(at[2 * c + 1], x, right[2], right[3]);
    }
};

/* What a lane has of a block of tokens: two columns, four tokens. */
typedef float mn_longhorn_frag[2][4];

/* Gains of columns: u = 1 / (1 + beta n), w = beta u; beta as a left factor. */
__device__ inline void mn_longhorn_gains(mn_longhorn_frag &w, mn_longhorn_frag &u,
                                         const unsigned (&beta)[4], const float *norm) {
    const int pair = threadIdx.x % 4 * 2;
#pragma unroll
    for (int n = 0; n < 2; n++) {
        const float2 of = *(const float2 *)(norm + 8 * n + pair);
#pragma unroll
        for (int m = 0; m < 2; m++) {
            const float low = mn_bf16_lo(beta[2 * n + m]), high = mn_bf16_hi(beta[2 * n + m]);
            u[m][2 * n] = __fdividef(1.0f, fmaf(low, of.x, 1.0f));
            u[m][2 * n + 1] = __fdividef(1.0f, fmaf(high, of.y, 1.0f));
            w[m][2 * n] = low * u[m][2 * n], w[m][2 * n + 1] = high * u[m][2 * n + 1];
        }
    }
}

/* Solves what the tokens of a block owe each other: x becomes the residuals r from what they
 * would be without, or BACK y. Pairs of tokens in their order, or against it: the lane that has a
 * pair solves it, and its quad takes w x of both. That is one chain of exchanges; beside(0) to
 * beside(7) are done meanwhile. */
template <bool BACK, typename F>
__device__ __forceinline__ void mn_longhorn_solve(mn_longhorn_frag &x, const mn_longhorn_frag &w,
                                                  const float (&below)[8][4][8], F overlap) {
    const int lane = threadIdx.x % 4;
#pragma unroll
    for (int step = 0; step < 8; step++) {
        const int iter = BACK ? 7 - step : step, half = iter / 4;
        const int first = 2 * half + (BACK ? 1 : 0), second = 2 * half + (BACK ? 0 : 1);
        float a[8];
        *(float4 *)&a[4] = *(const float4 *)&below[iter][lane][4];
        *(float4 *)&a[0] = *(const float4 *)&below[iter][lane][0];
        float from[2][2];    // of both tokens, in both columns
#pragma unroll
        for (int m = 0; m < 2; m++) {
            const float one = w[m][first] * x[m][first], owed = a[2 * second + (BACK ? 1 : 0)];
            const float two = w[m][second] * fmaf(-owed, one, x[m][second]);
            from[m][0] = __shfl_sync(0xffffffffu, one, iter % 4, 4);
            from[m][1] = __shfl_sync(0xffffffffu, two, iter % 4, 4);
        }
        overlap(step);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            float &local = x[i / 4][i % 4];
            if (BACK ? i % 4 / 2 > half : i % 4 / 2 < half) continue;
            local = fmaf(-a[2 * (i % 4) + (BACK ? 1 : 0)], from[i / 4][0], local);
            local = fmaf(-a[2 * (i % 4) + (BACK ? 0 : 1)], from[i / 4][1], local);
        }
    }
}

/* As a left factor: rows are columns, depth is tokens. */
__device__ inline void mn_longhorn_frag_a(unsigned (&to)[4], const mn_longhorn_frag &x) {
#pragma unroll
    for (int m = 0; m < 2; m++) {
        to[m] = mn_bf16x2(x[m][0], x[m][1]), to[2 + m] = mn_bf16x2(x[m][2], x[m][3]);
    }
}

/* The same to a tile whose rows are columns. */
__device__ inline void mn_longhorn_frag_to_smem(unsigned char *tile, const unsigned (&x)[4],
                                                int column,
                                       int token0) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int row = column + i % 2 * 8 + lane / 4, vec16 = token0 / 8 + i / 2;
        *(unsigned *)(tile + mn_tile_swizzle(row, vec16) + lane % 4 * 4) = x[i];
    }
}

/* To a tile whose rows are tokens. */
__device__ inline void mn_longhorn_frag_to_smem_trans(unsigned char *tile, const unsigned (&x)[4],
                                              int column, int token0) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int row = token0 + i / 2 * 8 + lane / 4, vec16 = column / 8 + i % 2;
        *(unsigned *)(tile + mn_tile_swizzle(row, vec16) + lane % 4 * 4) = mn_movmatrix_trans(x[i]);
    }
}

/* A warp's columns of a tile of 64 tokens, from token `from` on, to rows of a tensor. */
__device__ inline void mn_longhorn_store_rows(const mn_out &view, bool packed,
                                              const unsigned char *tile,
                                       const mn_longhorn_coord &at, int64_t V, int chunk,
                                              int from = 0) {
    const int64_t t0 = at.span.t0 + chunk * (int64_t)MN_DELTA_CHUNK;
    const int count = at.count(chunk);
    if (!view.data) return;
#pragma unroll
    for (int i = threadIdx.x % 32; i < 2 * MN_DELTA_CHUNK; i += 32) {
        const int row = i / 2, vec16 = at.column / 8 + i % 2;
        const int64_t j = at.column0 + 8 * vec16;
        if (row < from || row >= count || j >= V) continue;
        const mn_vec<mn_bf16, 8> pack = *(mn_vec<mn_bf16,
                                           8> *)(tile + mn_tile_swizzle(row, vec16));
        mn_bf16 *to = mn_row<mn_bf16>(view, at.span.b, t0 + row, at.h) + j;
        if (packed) {
            *(mn_vec<mn_bf16, 8> *)to = pack;
        } else {
            for (int c = 0; c < 8 && j + c < V; c++) to[c] = pack.at[c];
        }
    }
}

/* ---- forward --------------------------------------------------------------------------------- */

template <int KP>
struct alignas(128) fwd_stage {
    unsigned char k[mn_tile_bytes<KP>()], q[mn_tile_bytes<KP>()];
    unsigned char v[mn_tile_bytes<64>()], beta[mn_tile_bytes<64>()];
    mn_longhorn_record record;
};

template <int KP>
struct fwd_smem {
    fwd_stage<KP> stage[2];
    unsigned char o[mn_tile_bytes<64>()];    // or e
    unsigned char r[mn_tile_bytes<64>()], S[mn_tile_bytes<KP>()];
};

/* Chunk number `chunk` of the head, on its way. */
template <int KP, bool SAVES>
__device__ static void load_fwd_stage(fwd_stage<KP> &to, const mn_longhorn_params &job,
                                   const mn_longhorn_coord &at, int chunk) {
    constexpr int n_threads = MN_LONGHORN_SCAN_THREADS;
    const mn_longhorn_column_args &p = job.p;
    const int64_t t = chunk * (int64_t)MN_DELTA_CHUNK, V = p.call.V;
    const int count = at.count(chunk), tid = threadIdx.x;
    mn_tile_load<KP, n_threads>(to.k, p.k, job.packed[MN_LONGHORN_K], at.span, at.h, t, count, 0,
                             p.call.K, tid);
    if (!SAVES) {
        mn_tile_load<KP, n_threads>(to.q, p.q, job.packed[MN_LONGHORN_Q], at.span, at.h, t, count,
                                    0,
                                 p.call.K, tid);
    }
    mn_tile_load<64, n_threads>(to.v, p.v, job.packed[MN_LONGHORN_V], at.span, at.h, t, count,
                             at.column0, V, tid);
    mn_tile_load<64, n_threads>(to.beta, p.beta, job.packed[MN_LONGHORN_BETA], at.span, at.h, t,
                                count,
                             at.column0, V, tid);
    mn_cp_async_raw(&to.record, job.workspace.ahead + at.index(p.call, chunk),
                    (int)sizeof to.record,
                  n_threads, tid);
}

/* A block of tokens, of which `found` has what they find in the state without the last block's
 * writes, `last`. Both become those of this block and the next. */
template <int KP, bool SAVES>
__device__ __forceinline__ void fwd_block(mn_longhorn_state<KP> &S, float (&found)[2][2][4],
                                           unsigned (&last)[4], fwd_smem<KP> &smem,
                                           const fwd_stage<KP> &stage, int column, int block,
                                           float scale) {
    constexpr int parts = KP / 16;
    const int token0 = MN_LONGHORN_BLOCK * block;
    const int before = max(token0 - MN_LONGHORN_BLOCK, 0);
    const int next = min(token0 + MN_LONGHORN_BLOCK, MN_DELTA_CHUNK - MN_LONGHORN_BLOCK);
    const unsigned k = mn_shared_u32(stage.k), q = mn_shared_u32(stage.q);
    float o[2][4] = {}, written[2][4] = {}, ahead[2][2][4] = {};
    unsigned v[4], beta[4];
    mn_longhorn_frag r, e, w, u;
    mn_longhorn_mma(written, last, stage.record.across[block][threadIdx.x % 32]);
    mn_frag_a_trans(v, mn_shared_u32(stage.v), column, token0);
    mn_frag_a_trans(beta, mn_shared_u32(stage.beta), column, token0);
    mn_longhorn_gains(w, u, beta, stage.record.norm + token0);
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const int m = i / 4, n = i % 4 / 2, c = 2 * m + i % 2;
        const float value = i % 2 ? mn_bf16_hi(v[2 * n + m]) : mn_bf16_lo(v[2 * n + m]);
        r[m][i % 4] = value - (found[0][n][c] + found[1][n][c]) - written[n][c];
    }
    const auto look_up = [&](int c) {
        S.find(ahead[c % 2], c, k, next);
        if (!SAVES) S.find(o, c, q, token0);
    };
    mn_longhorn_solve<false>(r, w, stage.record.below[block], [&](int step) {
        if (step < parts) S.take(last, step, k, before);
        if (step > 0 && step <= parts) look_up(step - 1);
    });
    if (parts == 8) look_up(7);
#pragma unroll
    for (int i = 0; i < 8; i++) e[i / 4][i % 4] = w[i / 4][i % 4] * r[i / 4][i % 4];
    mn_longhorn_frag_a(last, e);
#pragma unroll
    for (int i = 0; i < 16; i++) found[i / 8][i / 4 % 2][i % 4] = ahead[i / 8][i / 4 % 2][i % 4];
    unsigned out[4];
    if constexpr (SAVES) {
        mn_longhorn_frag_a(out, r);
        mn_longhorn_frag_to_smem(smem.o, last, column, token0);
        mn_longhorn_frag_to_smem(smem.r, out, column, token0);
    } else {
#pragma unroll
        for (int c = 0; c < 8; c++) o[c / 4][c % 4] *= scale;
        mn_longhorn_mma(o, last, stage.record.pairs[block][threadIdx.x % 32]);
        mn_frag_a_of(out, o[0], o[1]);
        mn_longhorn_frag_to_smem_trans(smem.o, out, column, token0);
    }
}

/* A chunk, of which `blocks` have tokens. */
template <int KP, bool SAVES>
__device__ __forceinline__ void scan_fwd_chunk(mn_longhorn_state<KP> &S, fwd_smem<KP> &smem,
                                           const fwd_stage<KP> &stage, int column, int blocks,
                                           float scale) {
    const unsigned k = mn_shared_u32(stage.k);
    float found[2][2][4] = {};
    unsigned last[4] = {};
#pragma unroll
    for (int c = 0; c < KP / 16; c++) S.find(found[c % 2], c, k, 0);
#pragma unroll 1
    for (int block = 0; block < blocks; block++) {
        fwd_block<KP, SAVES>(S, found, last, smem, stage, column, block, scale);
    }
#pragma unroll
    for (int c = 0; c < KP / 16; c++) S.take(last, c, k, MN_LONGHORN_BLOCK * (blocks - 1));
}

/* A block has 64 value columns of a head of a sequence, a warp sixteen of them. */
template <int KP, bool SAVES>
__global__ void __launch_bounds__(MN_LONGHORN_SCAN_THREADS, 1)
longhorn_state_scan(const __grid_constant__ mn_longhorn_params job) {
    extern __shared__ __align__(128) unsigned char bytes[];
    fwd_smem<KP> &smem = *(fwd_smem<KP> *)bytes;
    const mn_longhorn_column_args &p = job.p;
    mn_longhorn_coord at = mn_longhorn_block_coord(job);
    if (!SAVES && job.redo) {
        mn_pdl_wait();
        at.span.length = job.workspace.cuts[at.n * p.call.H + at.h];
        at.n_chunks = (int)((at.span.length + MN_DELTA_CHUNK - 1) / MN_DELTA_CHUNK);
        if (at.n_chunks == 0) return;
    }
    mn_longhorn_state<KP> S;
    if (at.n_chunks > 0) load_fwd_stage<KP, SAVES>(smem.stage[0], job, at, 0);
    mn_cp_async_commit();
    S.load(p.call, at, (const float *)p.state0.data);
#pragma unroll 1
    for (int chunk = 0; chunk < at.n_chunks; chunk++) {
        const fwd_stage<KP> &stage = smem.stage[chunk % 2];
        const int64_t index = at.index(p.call, chunk);
        const int blocks = SAVES ? MN_LONGHORN_BLOCKS
                                 : (at.count(chunk) + MN_LONGHORN_BLOCK - 1) / MN_LONGHORN_BLOCK;
        if (chunk + 1 < at.n_chunks) {
            load_fwd_stage<KP, SAVES>(smem.stage[(chunk + 1) % 2], job, at, chunk + 1);
        }
        mn_cp_async_commit();
        mn_cp_async_wait<1>();
        __syncthreads();
        if (SAVES) S.keep(job.workspace.S + index * job.padded_v * KP, smem.S, at);
        scan_fwd_chunk<KP, SAVES>(S, smem, stage, at.column, blocks, job.scale);
        __syncwarp();
        if (SAVES) {
            const int64_t record = index * job.padded_v * MN_DELTA_CHUNK;
            mn_longhorn_store_tile<MN_DELTA_CHUNK>(job.workspace.e + record, smem.o, at);
            mn_longhorn_store_tile<MN_DELTA_CHUNK>(job.workspace.r + record, smem.r, at);
        } else {
            mn_longhorn_store_rows(p.o, job.packed[MN_LONGHORN_O], smem.o, at, p.call.V, chunk);
        }
        __syncthreads();
    }
    if (!SAVES) S.store(p.call, at, (float *)p.state.data);
}

/* ---- back ------------------------------------------------------------------------------------ */

template <int KP>
struct alignas(128) bwd_stage {
    unsigned char k[mn_tile_bytes<KP>()], q[mn_tile_bytes<KP>()];
    unsigned char cot[mn_tile_bytes<64>()], beta[mn_tile_bytes<64>()], r[mn_tile_bytes<64>()];
    mn_longhorn_record record;
};

template <int KP>
struct bwd_smem {
    bwd_stage<KP> stage[2];
    unsigned char dr[mn_tile_bytes<64>()], dv[mn_tile_bytes<64>()], dbeta[mn_tile_bytes<64>()];
    unsigned char D[mn_tile_bytes<KP>()];
};

template <int KP>
__device__ static void load_bwd_stage(bwd_stage<KP> &to, const mn_longhorn_params &job,
                                  const mn_longhorn_coord &at, int chunk) {
    constexpr int n_threads = MN_LONGHORN_SCAN_THREADS;
    const mn_longhorn_column_args &p = job.p;
    const int64_t t = chunk * (int64_t)MN_DELTA_CHUNK, V = p.call.V;
    const int64_t index = at.index(p.call, chunk);
    const int count = at.count(chunk), tid = threadIdx.x;
    mn_tile_load<KP, n_threads>(to.k, p.k, job.packed[MN_LONGHORN_K], at.span, at.h, t, count, 0,
                             p.call.K, tid);
    mn_tile_load<KP, n_threads>(to.q, p.q, job.packed[MN_LONGHORN_Q], at.span, at.h, t, count, 0,
                             p.call.K, tid);
    mn_tile_load<64, n_threads>(to.cot, p.cot.o, job.packed[MN_LONGHORN_COT], at.span, at.h, t,
                                count,
                             at.column0, V, tid);
    mn_tile_load<64, n_threads>(to.beta, p.beta, job.packed[MN_LONGHORN_BETA], at.span, at.h, t,
                                count,
                             at.column0, V, tid);
    mn_tile_reload<64, n_threads>(to.r, job.workspace.r + (index * job.padded_v + at.column0)
                                  * MN_DELTA_CHUNK,
                              MN_DELTA_CHUNK, tid);
    mn_cp_async_raw(&to.record, job.workspace.back + index, (int)sizeof to.record, n_threads, tid);
}

/* A block of tokens, of which `found` has what they find in the adjoint without what the block
 * behind wrote, -`last`. Both become those of this block and the one in front. */
template <int KP>
__device__ __forceinline__ void bwd_block(mn_longhorn_state<KP> &D, float (&found)[2][2][4],
                                          unsigned (&last)[4], bwd_smem<KP> &smem,
                                          const bwd_stage<KP> &stage, int column, int block,
                                          float scale) {
    constexpr int parts = KP / 16;
    const int token0 = MN_LONGHORN_BLOCK * block;
    const int behind = min(token0 + MN_LONGHORN_BLOCK, MN_DELTA_CHUNK - MN_LONGHORN_BLOCK);
    const int next = max(token0 - MN_LONGHORN_BLOCK, 0);
    const unsigned k = mn_shared_u32(stage.k), q = mn_shared_u32(stage.q);
    float written[2][4] = {}, ahead[2][2][4] = {};
    unsigned cot[4], beta[4], rest[4], out[4];
    mn_longhorn_frag y, w, u, x;
    mn_longhorn_mma(written, last, stage.record.across[block][threadIdx.x % 32]);
    mn_frag_a_trans(cot, mn_shared_u32(stage.cot), column, token0);
    mn_frag_a_trans(beta, mn_shared_u32(stage.beta), column, token0);
    mn_frag_a(rest, mn_shared_u32(stage.r), column, token0);
    mn_longhorn_mma(found[0], cot, stage.record.pairs[block][threadIdx.x % 32]);
    mn_longhorn_gains(w, u, beta, stage.record.norm + token0);
#pragma unroll
    for (int i = 0; i < 4; i++) cot[i] = mn_bf16x2(scale * mn_bf16_lo(cot[i]),
                                                   scale * mn_bf16_hi(cot[i]));
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const int m = i / 4, n = i % 4 / 2, c = 2 * m + i % 2;
        y[m][i % 4] = found[0][n][c] + found[1][n][c] + written[n][c];
    }
    mn_longhorn_solve<true>(y, w, stage.record.below[block], [&](int step) {
        if (step < parts) D.take(last, step, k, behind), D.take(cot, step, q, token0);
        if (step > 0 && step <= parts) D.find(ahead[step % 2], step - 1, k, next);
    });
    if (parts == 8) D.find(ahead[0], 7, k, next);
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const int m = i / 4, n = i % 4 / 2;
        const float r = i % 2 ? mn_bf16_hi(rest[2 * n + m]) : mn_bf16_lo(rest[2 * n + m]);
        x[m][i % 4] = w[m][i % 4] * y[m][i % 4];
        y[m][i % 4] *= r * u[m][i % 4] * u[m][i % 4];
    }
#pragma unroll
    for (int i = 0; i < 16; i++) found[i / 8][i / 4 % 2][i % 4] = ahead[i / 8][i / 4 % 2][i % 4];
    mn_longhorn_frag_a(last, x);
    mn_longhorn_frag_to_smem(smem.dr, last, column, token0);
    mn_longhorn_frag_to_smem_trans(smem.dv, last, column, token0);
    mn_longhorn_frag_a(out, y);
    mn_longhorn_frag_to_smem_trans(smem.dbeta, out, column, token0);
#pragma unroll
    for (int i = 0; i < 4; i++) last[i] ^= 0x80008000u;
}

template <int KP>
__device__ __forceinline__ void scan_bwd_chunk(mn_longhorn_state<KP> &D, bwd_smem<KP> &smem,
                                          const bwd_stage<KP> &stage, int column, float scale) {
    const unsigned k = mn_shared_u32(stage.k);
    float found[2][2][4] = {};
    unsigned last[4] = {};
#pragma unroll
    for (int c = 0; c < KP / 16; c++) {
        D.find(found[c % 2], c, k, MN_DELTA_CHUNK - MN_LONGHORN_BLOCK);
    }
#pragma unroll 1
    for (int block = MN_LONGHORN_BLOCKS - 1; block >= 0; block--) {
        bwd_block<KP>(D, found, last, smem, stage, column, block, scale);
    }
#pragma unroll
    for (int c = 0; c < KP / 16; c++) D.take(last, c, k, 0);
}

/* Leaves in workspace.cuts the first token whose gradients are made again, 0: none.
 *
 * Grid: n * H + h. Loads the first row of dv, or where that is absent of dbeta or dk: what comes
 * into D that is not finite stays there. Where it is not finite cot.o (T,V). */
__global__ void __launch_bounds__(MN_LONGHORN_SCAN_THREADS)
longhorn_find_redo_back(const __grid_constant__ mn_longhorn_params job) {
    const mn_longhorn_column_args &p = job.p;
    const int64_t h = blockIdx.x % p.call.H;
    const mn_span span = mn_span_at(p.call, blockIdx.x / p.call.H);
    const int64_t end = span.t0 + span.length;
    const mn_out &shows = p.grad.v.data ? p.grad.v : p.grad.beta.data ? p.grad.beta : p.grad.k;
    const int64_t width = p.grad.v.data || p.grad.beta.data ? p.call.V : p.call.K;
    int64_t cut = 0;
    mn_pdl_launch_dependents();
    mn_pdl_wait();
    if (span.length > 0 &&
        mn_redo_row_is_wild(mn_row<mn_bf16>(shows, span.b, span.t0, h), width)) {
        const int behind = mn_redo_first_token(span.length, [&](int64_t t, float most) {
            return mn_redo_has_wild(mn_row<mn_bf16>(p.cot.o, span.b, end - 1 - t, h), p.call.V,
                                    most);
        });
        cut = behind > 0 ? span.length - behind : 0;
    }
    if (threadIdx.x == 0) {
        job.workspace.cuts[blockIdx.x] = cut % MN_DELTA_CHUNK == 0 ? 0 : (int)cut;
    }
}

/* The chunk at which a redo ends; its cotangents of tokens in front of `from` become zeros. The
 * block calls. */
template <int KP>
__device__ static void leave_out_cotangents(bwd_stage<KP> &stage, int from) {
    for (int i = threadIdx.x; i < 8 * from; i += MN_LONGHORN_SCAN_THREADS) {
        *(uint4 *)(stage.cot + mn_tile_swizzle(i / 8, i % 8)) = make_uint4(0, 0, 0, 0);
    }
    __syncthreads();
}

/* Tokens in front of `from` leave for dk what they did before: from `record` to this warp's rows of
 * the tile. */
__device__ static void keep_residuals(unsigned char *tile, const mn_bf16 *record,
                                      const mn_longhorn_coord &at, int from) {
    for (int i = threadIdx.x % 32; i < 16 * from; i += 32) {
        const int row = at.column + i / from, t = i % from;
        *((mn_bf16 *)(tile + mn_tile_swizzle(row, t / 8)) + t % 8) =
            record[(at.column0 + row) * MN_DELTA_CHUNK + t];
    }
    __syncwarp();
}

/* The scan back; in a REDO from the last chunk to that of the cut, as if cotangents in front of it
 * were zeros. */
template <int KP, bool REDO>
__global__ void __launch_bounds__(MN_LONGHORN_SCAN_THREADS, 1)
longhorn_state_scan_bwd(const __grid_constant__ mn_longhorn_params job) {
    extern __shared__ __align__(128) unsigned char bytes[];
    bwd_smem<KP> &smem = *(bwd_smem<KP> *)bytes;
    const mn_longhorn_column_args &p = job.p;
    const mn_longhorn_coord at = mn_longhorn_block_coord(job);
    mn_longhorn_state<KP> D;
    int cut = 0;
    if (REDO) {
        mn_pdl_wait();
        cut = job.workspace.cuts[at.n * p.call.H + at.h];
        if (cut == 0) return;
    }
    const int last = cut / MN_DELTA_CHUNK;
    if (at.n_chunks > 0) load_bwd_stage<KP>(smem.stage[0], job, at, at.n_chunks - 1);
    mn_cp_async_commit();
    D.load(p.call, at, (const float *)p.cot.state.data);
#pragma unroll 1
    for (int iter = 0; iter < at.n_chunks - last; iter++) {
        const int chunk = at.n_chunks - 1 - iter;
        bwd_stage<KP> &stage = smem.stage[iter % 2];
        const int64_t index = at.index(p.call, chunk);
        const int from = REDO && chunk == last ? cut % MN_DELTA_CHUNK : 0;
        if (chunk > last) load_bwd_stage<KP>(smem.stage[(iter + 1) % 2], job, at, chunk - 1);
        mn_cp_async_commit();
        mn_cp_async_wait<1>();
        __syncthreads();
        if (REDO && from > 0) leave_out_cotangents<KP>(stage, from);
        D.keep(job.workspace.D + index * job.padded_v * KP, smem.D, at);
        scan_bwd_chunk<KP>(D, smem, stage, at.column, job.scale);
        __syncwarp();
        mn_bf16 *dr = job.workspace.dr + index * job.padded_v * MN_DELTA_CHUNK;
        if (REDO && from > 0) keep_residuals(smem.dr, dr, at, from);
        mn_longhorn_store_tile<MN_DELTA_CHUNK>(dr, smem.dr, at);
        mn_longhorn_store_rows(p.grad.v, job.packed[MN_LONGHORN_DV], smem.dv, at, p.call.V, chunk,
                               from);
        mn_longhorn_store_rows(p.grad.beta, job.packed[MN_LONGHORN_DBETA], smem.dbeta, at, p.call.V,
                        chunk, from);
        __syncthreads();
    }
    if (!REDO) D.store(p.call, at, (float *)p.grad.state0.data);
}

/* ---- dq and dk ------------------------------------------------------------------------------- */

/* Products of what tokens say and write as delta_grad.cuh wants them for what passes between
 * tokens: scaled, with their signs, zero where s > t. */
template <int KT>
__device__ static void store_matrices(mn_grad_matrices &to, const mn_grad_acc<KT> &sum,
                                     float scale, const mn_grad_coord &at) {
    const int lane = threadIdx.x % 32;
    if (at.quarter > at.block) return;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int n = i / 2, c = i % 2 * 2;
        const int t = at.block * 16 + lane / 4 + 8 * (i % 2);
        const int s = at.quarter * 16 + n * 8 + lane % 4 * 2;
        const bool first = s <= t, second = s < t;
        const unsigned P = mn_bf16x2(first ? scale * sum.P[n][c] : 0.0f,
                                   second ? scale * sum.P[n][c + 1] : 0.0f);
        const unsigned A = mn_bf16x2(first ? -sum.A[n][c] : 0.0f, second ? -sum.A[n][c + 1] : 0.0f);
        const unsigned place = mn_tile_swizzle(t, s / 8) + lane % 4 * 4;
        *(unsigned *)(to.P + place) = *(unsigned *)(to.P_beta + place) = P;
        *(unsigned *)(to.A + place) = *(unsigned *)(to.A_beta + place) = A;
    }
}

/* A block has a chunk of a head. */
template <int KT>
__global__ void __launch_bounds__(MN_DELTA_GRAD_THREADS)
longhorn_qk_grads(const __grid_constant__ mn_delta_params job) {
    extern __shared__ __align__(128) unsigned char bytes[];
    mn_grad_smem<KT> &smem = *(mn_grad_smem<KT> *)bytes;
    if (job.cuts) mn_pdl_wait();
    const mn_grad_coord at = mn_grad_block_coord(job, KT, KT);
    const int64_t K = job.p.call.K;
    if (at.count == 0) return;
    mn_grad_acc<KT> sum;
    mn_grad_mainloop<KT>(sum, smem, job, at);
    __syncthreads();    // nobody copies or reads where matrices go
    store_matrices<KT>(smem.matrices, sum, job.scale, at);
#pragma unroll
    for (int c = 0; c < 4 * mn_grad_acc<KT>::N; c++) {
        sum.q[c / 4][c % 4] *= job.scale, sum.e[c / 4][c % 4] *= -1.0f;
    }
    __syncthreads();
    mn_grad_intra_chunk<KT>(smem, sum, mn_shared_u32(smem.keys.e), at);
#pragma unroll
    for (int c = 0; c < 4 * mn_grad_acc<KT>::N; c++) {
        sum.e[c / 4][c % 4] += sum.w[c / 4][c % 4];
    }
    __syncthreads();
    mn_grad_store<KT>(job.p.grad.q, job.packed[MN_DELTA_DQ], at, K, smem.keys.q, sum.q);
    mn_grad_store<KT>(job.p.grad.e, job.packed[MN_DELTA_DE], at, K, smem.keys.e, sum.e);
}

/* ---- launches -------------------------------------------------------------------------------- */

static int64_t padded_k(const mn_call &call) {
    return call.K <= 64 ? 64 : 128;
}

static int64_t padded_v(const mn_call &call) {
    return mn_ceil_div(call.V, MN_LONGHORN_WIDTH) * MN_LONGHORN_WIDTH;
}

static int64_t n_records(const mn_call &call) {
    return mn_tile_slots(call, MN_DELTA_CHUNK) * call.H;
}

/* Lays out the workspace that starts at `base` (NULL: only counts it); false when sizes
 * overflow. */
static bool workspace_layout(mn_longhorn_workspace *workspace, size_t *bytes, const mn_call &call,
                             char *base,
                    bool back) {
    const int64_t records = n_records(call), V = padded_v(call);
    bool ok = true;
    const auto take = [&](auto *&to, int64_t each) {
        size_t size;
        ok = ok && mn_mul_size(&size, (size_t)records, (size_t)each) &&
             mn_mul_size(&size, size, sizeof *to);
        to = decltype(to + 0)(ok && base ? base + *bytes : nullptr);
        ok = ok && mn_add_size(bytes, *bytes, size);
    };
    *workspace = {}, *bytes = 0;
    take(workspace->ahead, 1);
    if (back) {
        take(workspace->back, 1);
        take(workspace->S, V * padded_k(call)), take(workspace->D, V * padded_k(call));
        take(workspace->e, V * MN_DELTA_CHUNK), take(workspace->r, V * MN_DELTA_CHUNK);
        take(workspace->dr, V * MN_DELTA_CHUNK);
    }
    size_t size;
    ok = ok && mn_mul_size(&size, (size_t)mn_n_spans(call), (size_t)call.H * sizeof(int));
    workspace->cuts = ok && base ? (int *)(base + *bytes) : nullptr;
    return ok && mn_add_size(bytes, *bytes, size);
}

/* Whether rows of a view come in packs of eight. */
template <typename View>
static bool vec_aligned(const View &view, int64_t width) {
    bool whole = (uintptr_t)view.data % 16 == 0 && width % 8 == 0;
    for (int axis = 0; axis < 3; axis++) whole = whole && view.stride[axis] % 8 == 0;
    return whole;
}

static bool make_params(mn_longhorn_params *job, const mn_longhorn_column_args *p, void *shared,
                   bool back) {
    const int64_t K = p->call.K, V = p->call.V;
    size_t bytes;
    *job = {};
    job->p = *p, job->scale = (float)p->scale, job->padded_v = padded_v(p->call);
    job->packed[MN_LONGHORN_Q] = vec_aligned(p->q, K);
    job->packed[MN_LONGHORN_K] = vec_aligned(p->k, K);
    job->packed[MN_LONGHORN_V] = vec_aligned(p->v, V);
    job->packed[MN_LONGHORN_BETA] = vec_aligned(p->beta, V);
    job->packed[MN_LONGHORN_O] = vec_aligned(p->o, V);
    job->packed[MN_LONGHORN_COT] = vec_aligned(p->cot.o, V);
    job->packed[MN_LONGHORN_DV] = vec_aligned(p->grad.v, V);
    job->packed[MN_LONGHORN_DBETA] = vec_aligned(p->grad.beta, V);
    return workspace_layout(&job->workspace, &bytes, p->call, (char *)shared, back);
}

/* The same as a call of delta without decays, for dq and dk. */
static mn_delta_params make_delta_params(const mn_longhorn_params &from) {
    const mn_longhorn_column_args &p = from.p;
    mn_delta_params job = {};
    job.p.call = p.call, job.scale = from.scale, job.padded_v = from.padded_v;
    job.p.q = p.q, job.p.e = p.k, job.p.cot.o = p.cot.o;
    job.p.grad.q = p.grad.q, job.p.grad.e = p.grad.k;
    job.workspace.S = from.workspace.S, job.workspace.D = from.workspace.D;
    job.workspace.R = from.workspace.e, job.workspace.dX = from.workspace.dr;
    job.packed[MN_DELTA_Q] = from.packed[MN_LONGHORN_Q];
    job.packed[MN_DELTA_E] = from.packed[MN_LONGHORN_K];
    job.packed[MN_DELTA_COT] = from.packed[MN_LONGHORN_COT];
    job.packed[MN_DELTA_DQ] = vec_aligned(p.grad.q, p.call.K);
    job.packed[MN_DELTA_DE] = vec_aligned(p.grad.k, p.call.K);
    return job;
}

template <int KP, bool BACK>
static int prepare(const mn_longhorn_params &job, cudaStream_t on) {
    const int64_t heads = mn_n_spans(job.p.call) * job.p.call.H;
    const int64_t records = job.redo ? heads : n_records(job.p.call);
    if (records == 0) return cudaSuccess;
    if (records > INT32_MAX) return cudaErrorNotSupported;
    return mn_launch_smem_behind(job.redo, longhorn_intra_chunk<KP, BACK>, dim3((unsigned)records),
                                 MN_LONGHORN_INTRA_THREADS, sizeof(mn_longhorn_intra_smem<KP>), on,
                                 job);
}

/* A scan of either kind. */
static int scan(void (*kernel)(mn_longhorn_params), size_t smem, const mn_longhorn_params &job,
                cudaStream_t on) {
    const int64_t heads = mn_n_spans(job.p.call) * job.p.call.H;
    const int64_t blocks = job.padded_v / MN_LONGHORN_WIDTH * heads;
    if (blocks == 0) return cudaSuccess;
    if (blocks > INT32_MAX) return cudaErrorNotSupported;
    return mn_launch_smem_behind(job.redo, kernel, dim3((unsigned)blocks),
                                 MN_LONGHORN_SCAN_THREADS, smem, on, job);
}

template <int KP>
static int forward(const mn_longhorn_params &job, cudaStream_t on) {
    const int code = prepare<KP, false>(job, on);
    if (code != cudaSuccess) return code;
    return scan(longhorn_state_scan<KP, false>, sizeof(fwd_smem<KP>), job, on);
}

/* And rows in front of numbers that are not finite once more. */
template <int KP>
static int forward_kept(const mn_longhorn_params &job, cudaStream_t on) {
    const int code = forward<KP>(job, on);
    if (code != cudaSuccess || !job.p.o.data || job.p.call.T < 2) return code;
    mn_longhorn_params redo = job;
    redo.redo = true, redo.p.state = {};
    return forward<KP>(redo, on);
}

/* dq and dk of all chunks, or of those that `job` cuts. */
template <int KP>
static int qk_grads(const mn_delta_params &job, int64_t blocks, cudaStream_t on) {
    return mn_launch_smem_behind(job.cuts, longhorn_qk_grads<KP>, dim3((unsigned)blocks),
                                 MN_DELTA_GRAD_THREADS, sizeof(mn_grad_smem<KP>), on, job);
}

/* Whether gradients behind cotangents that are not finite are made again. */
static const bool redoes_gradients = true;

/* Gradients of tokens behind a cotangent that is not finite once more. */
template <int KP>
static int redo_back(const mn_longhorn_params &job, cudaStream_t on) {
    const mn_longhorn_column_args &p = job.p;
    const bool shows = p.grad.v.data || p.grad.beta.data || p.grad.k.data;
    if (!redoes_gradients || !shows || !p.cot.o.data || p.call.T < 2) return cudaSuccess;
    const int64_t heads = mn_n_spans(p.call) * p.call.H;
    mn_longhorn_params redo = job;
    mn_delta_params keys = make_delta_params(job);
    redo.redo = true, keys.cuts = job.workspace.cuts;
    int code = mn_launch_smem_behind(true, longhorn_find_redo_back, dim3((unsigned)heads),
                                     MN_LONGHORN_SCAN_THREADS, 0, on, redo);
    if (code == cudaSuccess) {
        code = scan(longhorn_state_scan_bwd<KP, true>, sizeof(bwd_smem<KP>), redo, on);
    }
    return code == cudaSuccess ? qk_grads<KP>(keys, heads, on) : code;
}

template <int KP>
static int backward(const mn_longhorn_params &job, cudaStream_t on) {
    const int64_t records = n_records(job.p.call);
    int code = prepare<KP, true>(job, on);
    if (code == cudaSuccess) {
        code = scan(longhorn_state_scan<KP, true>, sizeof(fwd_smem<KP>), job, on);
    }
    if (code == cudaSuccess) {
        code = scan(longhorn_state_scan_bwd<KP, false>, sizeof(bwd_smem<KP>), job, on);
    }
    if (code != cudaSuccess || records == 0) return code;
    code = qk_grads<KP>(make_delta_params(job), records, on);
    return code == cudaSuccess ? redo_back<KP>(job, on) : code;
}

/* Narrow memories would lose more than twice what storing in bf16 does, as for delta. */
bool mn_longhorn_uses_chunks(const mn_call *call) {
    return call->dtype == MN_BF16 && call->K >= 32 && call->K <= 128 && call->V > 32 &&
           mn_device_props_current().shared_bytes >= (int)sizeof(bwd_smem<128>);
}

bool mn_longhorn_chunk_plan(mn_plan *plan, const mn_call *call, bool back) {
    mn_longhorn_workspace workspace;
    return workspace_layout(&workspace, &plan->shared_bytes, *call, nullptr, back);
}

int mn_longhorn_chunk_forward(const mn_longhorn_column_args *p, void *shared, void *stream) {
    const cudaStream_t on = (cudaStream_t)stream;
    mn_longhorn_params job;
    if (!make_params(&job, p, shared, false)) return cudaErrorNotSupported;
    return padded_k(p->call) == 64 ? forward_kept<64>(job, on) : forward_kept<128>(job, on);
}

int mn_longhorn_chunk_backward(const mn_longhorn_column_args *p, void *shared, void *stream) {
    const cudaStream_t on = (cudaStream_t)stream;
    mn_longhorn_params job;
    if (!make_params(&job, p, shared, true)) return cudaErrorNotSupported;
    return padded_k(p->call) == 64 ? backward<64>(job, on) : backward<128>(job, on);
}

}    // namespace mneme::longhorn
