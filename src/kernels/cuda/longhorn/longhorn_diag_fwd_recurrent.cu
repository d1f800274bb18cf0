/* longhorn_diag_fwd_recurrent.cu - longhorn_diag forward in bf16, for keys of at most 128 channels:
 *
 *   w_j = beta_j / (1 + beta_j |k|^2)   S_ij <- (1 - w_j k_i^2) S_ij + w_j v_j k_i   o = scale S'q
 *
 * What a cell is multiplied with and what is added to it are outer products of a row's and a
 * column's number, so tensor cores compute both, and a multiplication is left for each cell:
 *
 *   C = -W X'     S <- S + C . S + P K'
 *
 * where each entry of a factor is split into two numbers of bf16 (W of w, X of k^2, P of w v; k is
 * one), and products are added up in float32. One product of depth 8 holds both pairs: depths 0 to
 * 3 have W with X, 4 and 5 have P with K, and 6 and 7 zeros; C and the second sum read the same
 * factor of keys and different ones of columns, with zeros where the other's depths are. An element
 * of a product depends on its own row and column alone, so what is not finite goes no further than
 * it does cell by cell.
 *
 * o: a lane adds up its own four rows in float32, and products with ones, of depth 4, what the four
 * lanes of a quad have, cut to tf32. (Cells rounded to bf16 would miss where terms of o cancel.) A
 * warp has 32 columns by 16 rows; warps along the rows leave parts of o in shared memory. Eight
 * producer warps load a token each of the next eight, make its factors, and store what the last
 * eight read. */
#include "kernels/cuda/longhorn/longhorn_diag_fwd.h"

#include "kernels/cuda/longhorn/longhorn_outer.cuh"

namespace mneme::longhorn::diag_fwd {

using namespace outer;
using namespace recurrent;

enum { GROUP = 8 };    // tokens of a stage, and warps that load them

/* Of a block with ROW_WARPS by COLUMN_WARPS warps that scan. */
template <int ROW_WARPS, int COLUMN_WARPS>
struct sizes {
    static constexpr int ROWS = 16 * ROW_WARPS, COLUMNS = 32 * COLUMN_WARPS;
    static constexpr int SCAN_THREADS = 32 * ROW_WARPS * COLUMN_WARPS;
    static constexpr int THREADS = SCAN_THREADS + 32 * GROUP;
};

/* A token's factors, in words of two numbers. Tables of keys lie a quarter of the banks apart,
 * those of columns half of them from the zeros: lanes of different depths meet no bank twice. A
 * warp's words of keys lie as its lanes read them, number n of both tiles side by side. */
template <int ROW_WARPS, int COLUMN_WARPS>
struct alignas(16) token_record {
    typedef sizes<ROW_WARPS, COLUMN_WARPS> size;
    static constexpr int PITCH = size::ROWS + 8, ZEROS = 3 * PITCH, N_ZEROS = 48;
    static constexpr int WEIGHTS = ZEROS + N_ZEROS, WRITES = WEIGHTS + size::COLUMNS;
    unsigned keys[3][PITCH];              // k^2 in two parts, k; each twice
    unsigned zeros[N_ZEROS];
    unsigned weights[size::COLUMNS];      // -w in two parts
    unsigned writes[size::COLUMNS];       // w v in two parts
    unsigned queries[size::ROWS / 2];     // as they are in memory
};

/* Tokens, and what warps read of them. */
template <int ROW_WARPS, int COLUMN_WARPS>
struct stage {
    token_record<ROW_WARPS, COLUMN_WARPS> tokens[GROUP];
    alignas(16) float out[GROUP][ROW_WARPS][sizes<ROW_WARPS, COLUMN_WARPS>::COLUMNS];
};

/* ---- products -------------------------------------------------------------------------------- */

/* to = sums of A over its four columns, of float32 as tf32: what is behind ten bits is cut off. */
__device__ __forceinline__ void mma_k4_sums(float (&to)[4], float upper, float lower) {
    asm("mma.sync.aligned.m16n8k4.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, "
        "{%7, %7, %7, %7};"
        : "=f"(to[0]), "=f"(to[1]), "=f"(to[2]), "=f"(to[3])
        : "r"(__float_as_uint(upper)), "r"(__float_as_uint(lower)), "r"(0x3f800000), "f"(0.0f));
}

/* ---- cells ----------------------------------------------------------------------------------- */

/* A lane's place: its row of a product's first factor and its pair of the depth, which in results
 * is a pair of columns. */
__device__ __forceinline__ int lane_row() { return (int)threadIdx.x % 32 / 4; }
__device__ __forceinline__ int lane_pair() { return (int)threadIdx.x % 4; }

/* Which of a warp's rows is number n = 0 .. 7 of tile 0 or 1: such that a lane's pairs of rows
 * are neighbours in memory. */
__device__ constexpr int key_row(int tile, int n) { return n / 2 * 4 + 2 * tile + n % 2; }

/* Cells of a lane: of two by two tiles of 16 columns by 8 rows, two columns and two rows. */
template <int ROW_WARPS, int COLUMN_WARPS>
struct cells {
    float at[2][2][4];

    __device__ static int row_warp() { return (int)threadIdx.x / 32 / COLUMN_WARPS; }
    __device__ static int column_warp() { return (int)threadIdx.x / 32 % COLUMN_WARPS; }

    /* use(cell, its place in the state, whether there is one) */
    template <typename F>
    __device__ void each(const mn_column_params &p, const mn_column_coord &place, F use) {
        const int64_t head = place.n * p.call.H + place.h;
#pragma unroll
        for (int n = 0; n < 16; n++) {
            const int c = n / 8, tile = n / 4 % 2, half = n / 2 % 2;
            const int64_t i = 16 * row_warp() + key_row(tile, 2 * lane_pair() + n % 2);
            const int64_t j = (place.tile * COLUMN_WARPS + column_warp()) * 32 + 4 * lane_row()
                + 2 * c + half;
            use(at[c][tile][n % 4], (head * p.call.K + i) * p.call.V + j,
                i < p.call.K && j < p.call.V);
        }
    }

    __device__ void load(const mn_column_params &p, const mn_column_coord &place) {
        each(p, place, [&](float &x, int64_t cell, bool inside) {
            x = p.state0 && inside ? p.state0[cell] : 0.0f;
        });
    }

    __device__ void store(const mn_column_params &p, const mn_column_coord &place) {
        each(p, place, [&](float &x, int64_t cell, bool inside) {
            if (p.state && inside) p.state[cell] = x;
        });
    }
};

/* Where a lane reads a token's factors, in words of its record: of the depths that it has. */
template <int ROW_WARPS, int COLUMN_WARPS>
struct lane_factors {
    typedef token_record<ROW_WARPS, COLUMN_WARPS> record;
    int keys, weights, writes;

    __device__ lane_factors() {
        typedef cells<ROW_WARPS, COLUMN_WARPS> cells;
        const int pair = lane_pair(), row = lane_row(), zeros = record::ZEROS + 4 * row;
        const int column = 32 * cells::column_warp() + 4 * row;
        const int own = 16 * cells::row_warp() + 2 * row;
        keys = pair < 3 ? pair * record::PITCH + own : record::ZEROS + own % 32;
        weights = pair < 2 ? record::WEIGHTS + column : zeros;
        writes = pair == 2 ? record::WRITES + column : zeros;
    }
};

/* A lane's factors of a token. They are loaded before what the token in front reads is stored:
 * loads and stores of shared memory keep their order, and sums come late. */
struct token_frags {
    unsigned weights[4], writes[4], keys[2];
    uint2 queries;

    template <int ROW_WARPS, int COLUMN_WARPS>
    __device__ __forceinline__ void load(const token_record<ROW_WARPS, COLUMN_WARPS> &token,
                                         const lane_factors<ROW_WARPS, COLUMN_WARPS> &own) {
        const unsigned *words = (const unsigned *)&token;
        const int row_warp = cells<ROW_WARPS, COLUMN_WARPS>::row_warp();
        const uint4 w = *(const uint4 *)(words + own.weights);
        const uint4 p = *(const uint4 *)(words + own.writes);
        const uint2 k = *(const uint2 *)(words + own.keys);
        weights[0] = w.x, weights[1] = w.y, weights[2] = w.z, weights[3] = w.w;
        writes[0] = p.x, writes[1] = p.y, writes[2] = p.z, writes[3] = p.w;
        keys[0] = k.x, keys[1] = k.y;
        queries = *(const uint2 *)(token.queries + 8 * row_warp + 2 * lane_pair());
    }
};

/* One token onto the cells. */
template <typename Cells>
__device__ __forceinline__ void advance(Cells &S, const token_frags &in) {
    float by[4][4];    // -w k^2
#pragma unroll
    for (int n = 0; n < 4; n++) {
        mn_mma_bf16_k8_zero(by[n], make_uint2(in.weights[n / 2 * 2], in.weights[n / 2 * 2 + 1]),
                            in.keys[n % 2]);
    }
#pragma unroll
    for (int n = 0; n < 4; n++) {
        float(&cell)[4] = S.at[n / 2][n % 2];
#pragma unroll
        for (int i = 0; i < 4; i++) cell[i] = fmaf(by[n][i], cell[i], cell[i]);
        mn_mma_bf16_k8(cell, make_uint2(in.writes[n / 2 * 2], in.writes[n / 2 * 2 + 1]),
                       in.keys[n % 2]);
    }
}

/* S'q of this warp's rows to its part: a lane leaves one of its quad's four columns. */
template <typename Cells>
__device__ __forceinline__ void read(float *to, const Cells &S, uint2 queries) {
    const float q[2][2] = {
        { __uint_as_float(queries.x << 16), __uint_as_float(queries.x & 0xffff0000u) },
        { __uint_as_float(queries.y << 16), __uint_as_float(queries.y & 0xffff0000u) }
    };
    float o[2][4];
#pragma unroll
    for (int c = 0; c < 2; c++) {
        float own[2] = {};
#pragma unroll
        for (int n = 0; n < 8; n++) {
            float &sum = own[n / 2 % 2];
            sum = fmaf(S.at[c][n / 4][n % 4], q[n / 4][n % 2], sum);
        }
        mma_k4_sums(o[c], own[0], own[1]);
    }
    const float first = lane_pair() % 2 ? o[0][2] : o[0][0];
    const float last = lane_pair() % 2 ? o[1][2] : o[1][0];
    *to = lane_pair() < 2 ? first : last;
}

/* ---- tokens ---------------------------------------------------------------------------------- */

/* This warp's token of the next stage as it was stored: a lane has four rows. */
template <int ROW_WARPS, int COLUMN_WARPS>
struct prefetch {
    typedef sizes<ROW_WARPS, COLUMN_WARPS> size;
    mn_column_raw<4, mn_bf16> k, q;
    mn_column_raw<COLUMN_WARPS, mn_bf16> v, beta;
    const mn_bf16 *k_at, *q_at, *v_at, *beta_at;    // this lane's part of the next one
    int64_t left;                                   // tokens from there to the end
    int keys, columns;                              // how many there are from the lane's first on

    __device__ static int lane() { return (int)threadIdx.x % 32; }
    __device__ static int first_column() { return COLUMN_WARPS * lane(); }
    __device__ static int token() { return ((int)threadIdx.x - size::SCAN_THREADS) / 32; }
    __device__ static bool has_rows() { return 4 * lane() < size::ROWS; }

    __device__ prefetch(const mn_column_params &p, const mn_column_coord &at) {
        const int64_t j = at.tile * size::COLUMNS + first_column(), b = at.span.b;
        const int64_t when = at.span.t0 + token();
        left = at.span.length - token();
        keys = has_rows() ? (int)p.call.K - 4 * lane() : 0;
        columns = (int)min(max(p.call.V - j, (int64_t)0), (int64_t)COLUMN_WARPS);
        k_at = mn_row<mn_bf16>(p.k, b, when, at.h) + 4 * lane();
        q_at = mn_row<mn_bf16>(p.q, b, when, at.h) + 4 * lane();
        v_at = mn_row<mn_bf16>(p.v, b, when, at.h) + j;
        beta_at = mn_row<mn_bf16>(p.beta, b, when, at.h) + j;
    }

    /* And on by a group. */
    __device__ __forceinline__ void fetch(const mn_column_params &p) {
        const int K = left > 0 ? keys : 0, V = left > 0 ? columns : 0;
        k.fetch(k_at, 0, K, p.vec_aligned);
        q.fetch(q_at, 0, p.reads ? K : 0, p.vec_aligned);
        v.fetch(v_at, 0, V, p.vec_aligned);
        beta.fetch(beta_at, 0, V, p.vec_aligned);
        left -= GROUP;
        k_at += GROUP * p.k.stride[1], q_at += GROUP * p.q.stride[1];
        v_at += GROUP * p.v.stride[1], beta_at += GROUP * p.beta.stride[1];
    }

    __device__ __forceinline__ void put(stage<ROW_WARPS, COLUMN_WARPS> &stage) const {
        token_record<ROW_WARPS, COLUMN_WARPS> &to = stage.tokens[token()];
        float norm = 0.0f;
        unsigned high[4], low[4], key[4];
#pragma unroll
        for (int n = 0; n < 4; n++) {
            const float x = k.at(n), square = x * x, first = mn_bf16_rounded(square);
            norm = fmaf(x, x, norm);
            high[n] = mn_bf16x2_of(first, first);
            low[n] = mn_bf16x2_of(square - first, square - first);
            key[n] = mn_bf16x2_of(x, x);
        }
        norm = mn_warp_sum(norm);
        if (has_rows()) {    // rows 0, 2, 1, 3: tiles 0 and 1 of two numbers
            *(uint4 *)(to.keys[0] + 4 * lane()) = make_uint4(high[0], high[2], high[1], high[3]);
            *(uint4 *)(to.keys[1] + 4 * lane()) = make_uint4(low[0], low[2], low[1], low[3]);
            *(uint4 *)(to.keys[2] + 4 * lane()) = make_uint4(key[0], key[2], key[1], key[3]);
            *(uint2 *)(to.queries + 2 * lane()) = make_uint2(q.word[0], q.word[1]);
        }
#pragma unroll
        for (int c = 0; c < COLUMN_WARPS; c++) {
            const float b = beta.at(c), w = b * reciprocal(fmaf(b, norm, 1.0f));
            to.weights[first_column() + c] = mn_bf16_split(-w);
            to.writes[first_column() + c] = mn_bf16_split(w * v.at(c));
        }
    }
};

/* What the producers' tokens of the group at t read, to memory. */
template <int ROW_WARPS, int COLUMN_WARPS>
__device__ __forceinline__ void store_out(const stage<ROW_WARPS, COLUMN_WARPS> &from,
                                          const mn_column_params &p, const mn_column_coord &at,
                                          int64_t t) {
    typedef sizes<ROW_WARPS, COLUMN_WARPS> size;
    typedef prefetch<ROW_WARPS, COLUMN_WARPS> producer;
    const int column = producer::first_column(), token = producer::token();
    const int64_t j = at.tile * size::COLUMNS + column;
    if (t + token >= at.span.length) return;
    float sums[COLUMN_WARPS] = {};
#pragma unroll
    for (int row_warp = 0; row_warp < ROW_WARPS; row_warp++) {
        float x[COLUMN_WARPS];
        mn_load<COLUMN_WARPS>(x, from.out[token][row_warp], column);
#pragma unroll
        for (int n = 0; n < COLUMN_WARPS; n++) sums[n] += x[n];
    }
    mn_bf16 *out = mn_row<mn_bf16>(p.out, at.span.b, at.span.t0 + t + token, at.h) + j;
    if constexpr (COLUMN_WARPS == 2) {
        if (j + 1 < p.call.V && (uintptr_t)out % 4 == 0) {
            *(unsigned *)out = mn_bf16x2_of(p.scale * sums[0], p.scale * sums[1]);
            return;
        }
    }
#pragma unroll
    for (int n = 0; n < COLUMN_WARPS; n++) {
        if (j + n < p.call.V) mn_put(out + n, p.scale * sums[n]);
    }
}

/* ---- scan ------------------------------------------------------------------------------------ */

/* The producers' way: while a group is scanned, the next one's factors are made, the one behind
 * that is on its way, and what the one before read is stored. */
template <int ROW_WARPS, int COLUMN_WARPS>
__device__ __forceinline__ void produce(stage<ROW_WARPS, COLUMN_WARPS> *stages,
                                        const mn_column_params &p, const mn_column_coord &at) {
    const int64_t length = at.span.length;
    prefetch<ROW_WARPS, COLUMN_WARPS> ahead(p, at);
    ahead.fetch(p);
    ahead.put(stages[0]);
    ahead.fetch(p);
    int turn = 0;
#pragma unroll 1
    for (int64_t t = 0; t < length; t += GROUP, turn ^= 1) {
        __syncthreads();
        ahead.put(stages[turn ^ 1]);
        ahead.fetch(p);
        if (p.reads && t > 0) store_out(stages[turn ^ 1], p, at, t - GROUP);
    }
    __syncthreads();
    const int64_t last = (length - 1) / GROUP * GROUP;
    if (p.reads && length > 0) store_out(stages[turn ^ 1], p, at, last);
}

/* The others'; behind the last token there are zeros, which change nothing. */
template <int ROW_WARPS, int COLUMN_WARPS>
__device__ __forceinline__ void scan(stage<ROW_WARPS, COLUMN_WARPS> *stages,
                                     const mn_column_params &p, const mn_column_coord &at) {
    const lane_factors<ROW_WARPS, COLUMN_WARPS> own;
    cells<ROW_WARPS, COLUMN_WARPS> S;
    S.load(p, at);
    const unsigned groups = (unsigned)((at.span.length + GROUP - 1) / GROUP);
#pragma unroll 1
    for (unsigned group = 0; group < groups; group++) {
        __syncthreads();
        stage<ROW_WARPS, COLUMN_WARPS> &in = stages[group % 2];
        float *const to = &in.out[0][S.row_warp()][32 * S.column_warp() + threadIdx.x % 32];
        token_frags now;
        now.load(in.tokens[0], own);
#pragma unroll
        for (int token = 0; token < GROUP; token++) {
            advance(S, now);
            const uint2 queries = now.queries;
            if (token + 1 < GROUP) now.load(in.tokens[token + 1], own);
            read(to + token * ROW_WARPS * sizes<ROW_WARPS, COLUMN_WARPS>::COLUMNS, S, queries);
        }
    }
    __syncthreads();
    S.store(p, at);
}

template <int ROW_WARPS, int COLUMN_WARPS>
__global__ void __launch_bounds__(sizes<ROW_WARPS, COLUMN_WARPS>::THREADS, 1)
longhorn_diag_fwd(const __grid_constant__ mn_column_params p, int64_t tiles) {
    typedef sizes<ROW_WARPS, COLUMN_WARPS> size;
    typedef token_record<ROW_WARPS, COLUMN_WARPS> record;
    extern __shared__ float4 diag_fwd_stages[];
    stage<ROW_WARPS, COLUMN_WARPS> *stages = (stage<ROW_WARPS, COLUMN_WARPS> *)diag_fwd_stages;
    const mn_column_coord at = mn_column_block_coord(p, tiles);
    if (at.span.length == 1) return;    // cell by cell (longhorn.cu)
    for (int i = threadIdx.x; i < 2 * GROUP * record::N_ZEROS; i += size::THREADS) {
        const int token = i / record::N_ZEROS;
        stages[token / GROUP].tokens[token % GROUP].zeros[i % record::N_ZEROS] = 0;
    }
    if ((int)threadIdx.x >= size::SCAN_THREADS) produce(stages, p, at);
    else scan(stages, p, at);
}

/* ---- launch ---------------------------------------------------------------------------------- */

bool supported(const mn_call &c) {
    return c.dtype == MN_BF16 && c.K <= 128;
}

template <int ROW_WARPS, int COLUMN_WARPS>
static int launch_with(const mn_column_params &p, cudaStream_t on) {
    typedef sizes<ROW_WARPS, COLUMN_WARPS> size;
    const int64_t tiles = mn_ceil_div(p.columns, (int64_t)size::COLUMNS);
    const int64_t blocks = tiles * p.call.H * mn_n_spans(p.call);
    if (blocks == 0) return cudaSuccess;
    if (blocks > INT32_MAX) return cudaErrorNotSupported;
    return mn_launch_smem(longhorn_diag_fwd<ROW_WARPS, COLUMN_WARPS>, dim3((unsigned)blocks),
                          size::THREADS, 2 * sizeof(stage<ROW_WARPS, COLUMN_WARPS>), on, p, tiles);
}

/* Few columns are spread over more SMs; a column's result does not depend on it. */
template <int ROW_WARPS>
static int launch_rows(const mn_column_params &p, cudaStream_t on) {
    const int64_t heads = p.call.H * mn_n_spans(p.call);
    const bool many = mn_ceil_div(p.columns, (int64_t)MN_COLUMNS_TILE) * heads > 64;
    return many ? launch_with<ROW_WARPS, 2>(p, on) : launch_with<ROW_WARPS, 1>(p, on);
}

int launch(mn_column_params p, cudaStream_t on) {
    p.vec_aligned = mn_columns_vec_aligned<mn_bf16>(p, 4);
    if (p.call.K <= 32) return launch_rows<2>(p, on);
    return p.call.K <= 64 ? launch_rows<4>(p, on) : launch_rows<8>(p, on);
}

}    // namespace mneme::longhorn::diag_fwd
