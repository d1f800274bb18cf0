/* longhorn_column_chunk.cuh - longhorn_column in bf16 over chunks (see ref/longhorn_column.c). With
 * e = w
 * r what a token writes, S the state in front of a block of tokens and D its adjoint behind it,
 *
 *   r_t = v_t - S'k_t - sum over s < t of (k_t.k_s) e_s           o_t = scale S'q_t + sum over
 *   S += sum of k_t e_t'                                    s <= t of (scale q_t.k_s) e_s
 *
 *   y_s = D'k_s + sum over t >= s of (scale q_t.k_s) do_t - sum over t > s of (k_t.k_s) w_t y_t
 *   D += sum of scale q_t do_t' - k_t (w_t y_t)'          dv = w y      dbeta = y r u^2
 *
 * u = 1 / (1 + beta |k|^2), w = beta u. Products of keys belong to all columns, gains to each: what
 * a column's tokens owe each other is solved in float32, sixteen tokens at a time, and all else is
 * products of tiles. Walks have a state transposed in the sums of tensor cores: a warp has sixteen
 * value columns of it, a lane two of these columns and four tokens of each block,
 *
 *   columns l / 4 + 8 m      tokens and channels 8 n + 2 (l % 4) + i      at [n][2 m + i]
 *
 * so that what a scan makes of a block of tokens is a left factor as it stands, and warps share
 * nothing but tokens. Within a chunk a block is looked up in the state that lacks the block just
 * solved, which `across` makes up for: states take and give while the next block is solved. These
 * come in chunks of 64 by the numbering of delta_smem.cuh. dq and dk are those of delta
 * (delta_grad.cuh) without decays. */
#ifndef MN_KERNELS_CUDA_LONGHORN_LONGHORN_COLUMN_CHUNK_CUH
#define MN_KERNELS_CUDA_LONGHORN_LONGHORN_COLUMN_CHUNK_CUH

#include "kernels/cuda/delta/delta_smem.cuh"

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

/* A block has a chunk of a head, a warp a block of its tokens. */
template <int KP, bool BACK>
__global__ void __launch_bounds__(MN_LONGHORN_INTRA_THREADS)
longhorn_intra_chunk(const __grid_constant__ mn_longhorn_params job) {
    extern __shared__ __align__(128) unsigned char bytes[];
    mn_longhorn_intra_smem<KP> &smem = *(mn_longhorn_intra_smem<KP> *)bytes;
    const mn_call &call = job.p.call;
    const int64_t h = blockIdx.x % call.H, slot = blockIdx.x / call.H;
    const mn_tile_span tile = mn_tile_at(call, MN_DELTA_CHUNK, slot);
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
    mn_longhorn_store_record<false>(job.workspace.ahead[blockIdx.x], kk, qk, ahead, job.scale);
    if (BACK) mn_longhorn_store_record<true>(job.workspace.back[blockIdx.x], kk, kq, back,
                                             job.scale);
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

/* Solves what the tokens of a block owe each other: x becomes the residuals r from what they would
 * be without, or BACK y. Pairs of tokens in their order, or against it: the lane that has a pair
 * solves it, and its quad takes w x of both. That is one chain of exchanges; overlap(0) to
 * overlap(7)
 * are done meanwhile. */
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

/* A warp's columns of a tile of 64 tokens to rows of a tensor. */
__device__ inline void mn_longhorn_store_rows(const mn_out &view, bool packed,
                                              const unsigned char *tile,
                                       const mn_longhorn_coord &at, int64_t V, int chunk) {
    const int64_t t0 = at.span.t0 + chunk * (int64_t)MN_DELTA_CHUNK;
    const int count = at.count(chunk);
    if (!view.data) return;
#pragma unroll
    for (int i = threadIdx.x % 32; i < 2 * MN_DELTA_CHUNK; i += 32) {
        const int row = i / 2, vec16 = at.column / 8 + i % 2;
        const int64_t j = at.column0 + 8 * vec16;
        if (row >= count || j >= V) continue;
        const mn_pack<mn_bf16, 8> pack = *(mn_pack<mn_bf16,
                                           8> *)(tile + mn_tile_swizzle(row, vec16));
        mn_bf16 *to = mn_row<mn_bf16>(view, at.span.b, t0 + row, at.h) + j;
        if (packed) {
            *(mn_pack<mn_bf16, 8> *)to = pack;
        } else {
            for (int c = 0; c < 8 && j + c < V; c++) to[c] = pack.at[c];
        }
    }
}

#endif
