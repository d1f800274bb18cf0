/* longhorn_diag_fwd_recurrent.cu - longhorn_diag forward in bf16, for keys of at most 128 channels:
 *
 *   w_j = beta_j / (1 + beta_j |k|^2)   S_ij <- (1 - w_j k_i^2) S_ij + w_j v_j k_i   o = scale S'q
 *
 * What a cell is multiplied with and what is added to it are outer products of a row's and a
 * column's number, so tensor cores compute both, and a multiplication is left for each cell:
 *
 *   C = 1 - W X'     S <- C . S + P K'
 *
 * where each entry of a factor is split into two numbers of bf16 (W of w, X of k^2, P of w v; k is
 * one), and products are added up in float32. One product of depth 8 holds both pairs: depths 0 to
 * 3 have W with X, 4 and 5 have P with K, and 6 and 7 zeros; C and the second sum read the same
 * factor of keys and different ones of columns, with zeros where the other's depths are. An element
 * of a product depends on its own row and column alone, so what is not finite goes no further than
 * it does cell by cell.
 *
 * o takes S cut to tf32, as products of depth 8: accumulators of a tile are a factor as they lie in
 * registers. (Rounded to bf16 it would miss where terms of o cancel.) A warp has 32 columns by 32
 * rows; warps along the rows leave parts of o in shared memory. Four producer warps load the next
 * eight tokens, make their factors, and store what the last eight read. */
#include "kernels/cuda/longhorn/longhorn_diag_fwd.h"

namespace mneme::longhorn::diag_fwd {

using namespace recurrent;

enum { GROUP = 8, PRODUCERS = 4 };    // tokens of a stage; warps that load them

/* Of a block with ROW_WARPS by COLUMN_WARPS warps that scan. */
template <int ROW_WARPS, int COLUMN_WARPS>
struct sizes {
    static constexpr int ROWS = 32 * ROW_WARPS, COLUMNS = 32 * COLUMN_WARPS;
    static constexpr int WARPS = ROW_WARPS * COLUMN_WARPS, SCAN_THREADS = 32 * WARPS;
    static constexpr int THREADS = SCAN_THREADS + 32 * PRODUCERS;
    static constexpr int TOKENS = GROUP / PRODUCERS;    // that a producer warp loads
    static constexpr int BLOCKS = THREADS > 256 ? 1 : 2;    // of an SM
};

/* A token's factors, in words of two numbers. Tables of keys lie a quarter of the banks apart,
 * those of columns a quarter from the zeros, so that lanes of different depths meet no bank twice.
 * Words of keys lie as a lane's four tiles want them (key_row). */
template <int ROW_WARPS, int COLUMN_WARPS>
struct token_record {
    typedef sizes<ROW_WARPS, COLUMN_WARPS> size;
    static constexpr int PITCH = size::ROWS + 8, ZEROS = 3 * PITCH;
    unsigned keys[3][PITCH];            // k^2 in two parts, k; each twice
    unsigned zeros[40];                 // of which 32 are read
    unsigned weights[size::COLUMNS];    // -w in two parts
    unsigned writes[size::COLUMNS];     // w v in two parts
    unsigned queries[size::ROWS / 2];   // as they are in memory
};

/* What warps read of a stage's tokens, as products leave it: of eight lanes the numbers of columns
 * 0, 0, 1, 1 of each tile's pair. */
template <int ROW_WARPS, int COLUMN_WARPS>
struct read_parts {
    enum { PITCH = 48 };
    alignas(16) float at[GROUP][ROW_WARPS][COLUMN_WARPS][2][PITCH];
};

template <int ROW_WARPS, int COLUMN_WARPS>
struct stage {
    alignas(16) token_record<ROW_WARPS, COLUMN_WARPS> tokens[GROUP];
    read_parts<ROW_WARPS, COLUMN_WARPS> out;
};

/* ---- products -------------------------------------------------------------------------------- */

/* to = 1 + A b of depth 8 */
__device__ __forceinline__ void mma_k8_one(float (&to)[4], unsigned a0, unsigned a1, unsigned b) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, "
        "{%7, %7, %7, %7};"
        : "=f"(to[0]), "=f"(to[1]), "=f"(to[2]), "=f"(to[3])
        : "r"(a0), "r"(a1), "r"(b), "f"(1.0f));
}

/* sum += A b of depth 8 */
__device__ __forceinline__ void mma_k8(float (&sum)[4], unsigned a0, unsigned a1, unsigned b) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, "
        "{%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a0), "r"(a1), "r"(b));
}

/* sum += A b of depth 8, of float32 as tf32: what is behind ten bits is cut off. */
__device__ __forceinline__ void mma_k8_tf32(float (&sum)[4], const float (&a)[4],
                                            const float (&b)[2]) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(__float_as_uint(a[0])), "r"(__float_as_uint(a[1])), "r"(__float_as_uint(a[2])),
          "r"(__float_as_uint(a[3])), "r"(__float_as_uint(b[0])), "r"(__float_as_uint(b[1])));
}

/* A pair of bf16, the first number in the lower half. */
__device__ __forceinline__ unsigned pair_of(float first, float second) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(first, second);
    return *(const unsigned *)&pair;
}

__device__ __forceinline__ float rounded(float x) {
    return __bfloat162float(__float2bfloat16_rn(x));
}

/* Two numbers of bf16 whose sum is x. */
__device__ __forceinline__ unsigned split(float x) {
    const float high = rounded(x);
    return pair_of(high, x - high);
}

/* ---- cells ----------------------------------------------------------------------------------- */

/* A lane's place: its row of a product's first factor and its pair of the depth, which in results
 * is a pair of columns. */
__device__ __forceinline__ int lane_row() { return (int)threadIdx.x % 32 / 4; }
__device__ __forceinline__ int lane_pair() { return (int)threadIdx.x % 4; }

/* Which of a warp's rows is number n = 0 .. 7 of the four tiles of a product's second factor: such
 * that a lane's pairs of rows are neighbours in memory. Words of keys lie as lanes
 * read them, number n of four tiles side by side. */
__device__ constexpr int key_row(int tile, int n) { return n / 2 * 8 + 2 * tile + n % 2; }

/* Cells of a lane: of two tiles of 16 columns and four of 8 rows two columns and two rows. */
template <int ROW_WARPS, int COLUMN_WARPS>
struct cells {
    float at[2][4][4];

    __device__ static int row_warp() { return (int)threadIdx.x / 32 / COLUMN_WARPS; }
    __device__ static int column_warp() { return (int)threadIdx.x / 32 % COLUMN_WARPS; }

    /* use(cell, its place in the state, whether there is one) */
    template <typename F>
    __device__ void each(const mn_column_params &p, const mn_column_coord &place, F use) {
        const int64_t head = place.n * p.call.H + place.h;
#pragma unroll
        for (int n = 0; n < 32; n++) {
            const int c = n / 16, tile = n / 4 % 4, first = 4 * lane_row() + 2 * c + n / 2 % 2;
            const int second = 2 * lane_pair() + n % 2;
            const int64_t i = 32 * row_warp() + key_row(tile, second);
            const int64_t j = (place.tile * COLUMN_WARPS + column_warp()) * 32 + first;
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

/* Where a lane reads a token's factors, in words of its record: of the depths that the lane has. */
template <int ROW_WARPS, int COLUMN_WARPS>
struct lane_factors {
    typedef token_record<ROW_WARPS, COLUMN_WARPS> record;
    int keys, weights, writes, queries;

    __device__ lane_factors() {
        typedef cells<ROW_WARPS, COLUMN_WARPS> cells;
        const int pair = lane_pair(), own = 4 * lane_row(), zeros = record::ZEROS + own;
        const int column = 32 * cells::column_warp() + own, row = 32 * cells::row_warp();
        keys = pair < 3 ? pair * record::PITCH + row + own : zeros;
        weights = pair < 2 ? (int)offsetof(record, weights) / 4 + column : zeros;
        writes = pair == 2 ? (int)offsetof(record, writes) / 4 + column : zeros;
        queries = (int)offsetof(record, queries) / 4 + row / 2 + 4 * pair;
    }

    __device__ __forceinline__ static uint4 get(const record &token, int at) {
        return *(const uint4 *)((const unsigned *)&token + at);
    }
};

/* One token onto the cells. */
template <int ROW_WARPS, int COLUMN_WARPS>
__device__ __forceinline__ void advance(cells<ROW_WARPS, COLUMN_WARPS> &S,
                                        const lane_factors<ROW_WARPS, COLUMN_WARPS> &own,
                                        const token_record<ROW_WARPS, COLUMN_WARPS> &token) {
    const uint4 keys = own.get(token, own.keys), weights = own.get(token, own.weights);
    const uint4 writes = own.get(token, own.writes);
    const unsigned k[4] = { keys.x, keys.y, keys.z, keys.w };
    const unsigned w[4] = { weights.x, weights.y, weights.z, weights.w };
    const unsigned p[4] = { writes.x, writes.y, writes.z, writes.w };
#pragma unroll
    for (int n = 0; n < 8; n++) {
        const int c = n / 4, tile = n % 4;
        float(&cell)[4] = S.at[c][tile], kept[4];
        mma_k8_one(kept, w[2 * c], w[2 * c + 1], k[tile]);
#pragma unroll
        for (int i = 0; i < 4; i++) cell[i] *= kept[i];
        mma_k8(cell, p[2 * c], p[2 * c + 1], k[tile]);
    }
}

/* S'q of this warp's rows to its part. A lane's two rows of a tile are depths 0 to 3 and 4 to 7. */
template <int ROW_WARPS, int COLUMN_WARPS>
__device__ __forceinline__ void read(float (&to)[ROW_WARPS][COLUMN_WARPS][2][48],
                                     const cells<ROW_WARPS, COLUMN_WARPS> &S,
                                     const lane_factors<ROW_WARPS, COLUMN_WARPS> &own,
                                     const token_record<ROW_WARPS, COLUMN_WARPS> &token) {
    const uint4 queries = own.get(token, own.queries);
    const unsigned pairs[4] = { queries.x, queries.y, queries.z, queries.w };
#pragma unroll
    for (int c = 0; c < 2; c++) {
        float o[4] = {};
#pragma unroll
        for (int tile = 0; tile < 4; tile++) {
            const float(&x)[4] = S.at[c][tile];
            const float cells[4] = { x[0], x[2], x[1], x[3] };
            const float q[2] = { __uint_as_float(pairs[tile] << 16),
                                 __uint_as_float(pairs[tile] & 0xffff0000u) };
            mma_k8_tf32(o, cells, q);
        }
        if (lane_pair() != 0) continue;
        mn_store<4>(to[S.row_warp()][S.column_warp()][c], 4 * lane_row(), o);
    }
}

/* ---- tokens ---------------------------------------------------------------------------------- */

/* Tokens of the next stage as they were stored. Two lanes load the same eight rows, of which one
 * takes the even ones and the other the odd ones: those whose words lie side by side. */
template <int ROW_WARPS, int COLUMN_WARPS>
struct prefetch {
    typedef sizes<ROW_WARPS, COLUMN_WARPS> size;
    mn_column_raw<8, mn_bf16> k[size::TOKENS], q[size::TOKENS];
    mn_column_raw<COLUMN_WARPS, mn_bf16> v[size::TOKENS], beta[size::TOKENS];

    __device__ static int lane() { return (int)threadIdx.x % 32; }
    __device__ static bool has_rows() { return 4 * lane() < size::ROWS; }
    __device__ static int first_row() { return lane() / 2 * 8; }
    __device__ static int first_column() { return COLUMN_WARPS * lane(); }

    /* The number in its group of this warp's token n. */
    __device__ static int token(int n) {
        return ((int)threadIdx.x - size::SCAN_THREADS) / 32 * size::TOKENS + n;
    }

    /* The group at t. */
    __device__ void fetch(const mn_column_params &p, const mn_column_coord &at, int64_t t) {
        const int64_t j = at.tile * size::COLUMNS + first_column(), b = at.span.b;
#pragma unroll
        for (int n = 0; n < size::TOKENS; n++) {
            const bool exists = t + token(n) < at.span.length;
            const int64_t when = at.span.t0 + t + token(n), V = exists ? p.call.V : 0;
            const int64_t K = exists && has_rows() ? p.call.K : 0;
            k[n].fetch(mn_row<mn_bf16>(p.k, b, when, at.h), first_row(), K, p.vec_aligned);
            q[n].fetch(mn_row<mn_bf16>(p.q, b, when, at.h), first_row(), p.reads ? K : 0,
                       p.vec_aligned);
            v[n].fetch(mn_row<mn_bf16>(p.v, b, when, at.h), j, V, p.vec_aligned);
            beta[n].fetch(mn_row<mn_bf16>(p.beta, b, when, at.h), j, V, p.vec_aligned);
        }
    }

    /* Rows of token n; returns |k|^2 in all lanes. */
    __device__ __forceinline__ float put_rows(token_record<ROW_WARPS, COLUMN_WARPS> &to,
                                              int n) const {
        float norm = 0.0f;
        unsigned high[4], low[4], key[4];
#pragma unroll
        for (int tile = 0; tile < 4; tile++) {
            const float x = lane() % 2 ? k[n].at(2 * tile + 1) : k[n].at(2 * tile);
            const float square = x * x, first = rounded(square);
            norm = fmaf(x, x, norm);
            high[tile] = pair_of(first, first);
            low[tile] = pair_of(square - first, square - first);
            key[tile] = pair_of(x, x);
        }
        norm = mn_warp_sum(norm);
        if (!has_rows()) return norm;
        *(uint4 *)(to.keys[0] + 4 * lane()) = make_uint4(high[0], high[1], high[2], high[3]);
        *(uint4 *)(to.keys[1] + 4 * lane()) = make_uint4(low[0], low[1], low[2], low[3]);
        *(uint4 *)(to.keys[2] + 4 * lane()) = make_uint4(key[0], key[1], key[2], key[3]);
        if (lane() % 2 == 0) {
            *(uint4 *)(to.queries + first_row() / 2) =
                make_uint4(q[n].word[0], q[n].word[1], q[n].word[2], q[n].word[3]);
        }
        return norm;
    }

    /* And its columns. */
    __device__ __forceinline__ void put_columns(token_record<ROW_WARPS, COLUMN_WARPS> &to, int n,
                                                float norm) const {
#pragma unroll
        for (int c = 0; c < COLUMN_WARPS; c++) {
            const float b = beta[n].at(c), w = b / fmaf(b, norm, 1.0f);
            const int word = first_column() + c;
            to.weights[word] = split(-w);
            to.writes[word] = split(w * v[n].at(c));
        }
    }

    __device__ void put(stage<ROW_WARPS, COLUMN_WARPS> &to) const {
#pragma unroll
        for (int n = 0; n < size::TOKENS; n++) {
            put_columns(to.tokens[token(n)], n, put_rows(to.tokens[token(n)], n));
        }
    }
};

/* What the tokens of the group at t read, to memory. By producers. */
template <int ROW_WARPS, int COLUMN_WARPS>
__device__ inline void store_out(const stage<ROW_WARPS, COLUMN_WARPS> &from,
                                 const mn_column_params &p, const mn_column_coord &at, int64_t t) {
    typedef sizes<ROW_WARPS, COLUMN_WARPS> size;
    typedef prefetch<ROW_WARPS, COLUMN_WARPS> producer;
    const int column = producer::first_column(), own = column % 32;
    const int64_t j = at.tile * size::COLUMNS + column;
#pragma unroll
    for (int n = 0; n < size::TOKENS; n++) {
        const int token = producer::token(n);
        float two[2] = {};
#pragma unroll
        for (int row_warp = 0; row_warp < ROW_WARPS; row_warp++) {
            float x[4];
            mn_load<4>(x, from.out.at[token][row_warp][column / 32][own / 2 % 2], own / 4 * 4);
            two[0] += x[0], two[1] += x[2];
        }
        if (t + token >= at.span.length) continue;
        mn_bf16 *out = mn_row<mn_bf16>(p.out, at.span.b, at.span.t0 + t + token, at.h) + j;
        if (COLUMN_WARPS == 1) {
            if (j < p.call.V) mn_put(out, p.scale * (own % 2 ? two[1] : two[0]));
        } else if (j + 1 < p.call.V && (uintptr_t)out % 4 == 0) {
            *(unsigned *)out = pair_of(p.scale * two[0], p.scale * two[1]);
        } else {
            if (j < p.call.V) mn_put(out, p.scale * two[0]);
            if (j + 1 < p.call.V) mn_put(out + 1, p.scale * two[1]);
        }
    }
}

/* ---- scan ------------------------------------------------------------------------------------ */

/* A block's scan: put_back(stage, t) by producers of the group at t when it has been scanned,
 * group(S, lane_factors, stage, t) by the others; returns where both call. */
template <int ROW_WARPS, int COLUMN_WARPS, typename Put, typename Group>
__device__ __forceinline__ void scan_groups(stage<ROW_WARPS, COLUMN_WARPS> *stages,
                                            cells<ROW_WARPS, COLUMN_WARPS> &S,
                                            const mn_column_params &p, const mn_column_coord &at,
                                            const Put &put_back, const Group &group) {
    typedef sizes<ROW_WARPS, COLUMN_WARPS> size;
    constexpr int ZEROS = sizeof(stages->tokens[0].zeros) / sizeof(unsigned);
    const int64_t length = at.span.length;
    const bool is_producer = (int)threadIdx.x >= size::SCAN_THREADS;
    prefetch<ROW_WARPS, COLUMN_WARPS> ahead;
    const lane_factors<ROW_WARPS, COLUMN_WARPS> own;
    for (int i = threadIdx.x; i < 2 * GROUP * ZEROS; i += size::THREADS) {
        stages[i / (GROUP * ZEROS)].tokens[i / ZEROS % GROUP].zeros[i % ZEROS] = 0;
    }
    if (!is_producer) S.load(p, at);
    if (is_producer && length > 0) {
        ahead.fetch(p, at, 0);
        ahead.put(stages[0]);
        ahead.fetch(p, at, GROUP);
    }
    int turn = 0;
#pragma unroll 1
    for (int64_t t = 0; t < length; t += GROUP, turn ^= 1) {
        __syncthreads();
        if (!is_producer) {
            group(own, stages[turn], t);
            continue;
        }
        if (t > 0) put_back(stages[turn ^ 1], t - GROUP);
        ahead.put(stages[turn ^ 1]);
        ahead.fetch(p, at, t + 2 * GROUP);
    }
    __syncthreads();
    if (is_producer && length > 0) put_back(stages[turn ^ 1], (length - 1) / GROUP * GROUP);
}

template <int ROW_WARPS, int COLUMN_WARPS>
__global__ void __launch_bounds__(sizes<ROW_WARPS, COLUMN_WARPS>::THREADS,
                                  sizes<ROW_WARPS, COLUMN_WARPS>::BLOCKS)
longhorn_diag_fwd(const __grid_constant__ mn_column_params p, int64_t tiles) {
    typedef stage<ROW_WARPS, COLUMN_WARPS> stage;
    extern __shared__ float4 diag_fwd_stages[];
    const mn_column_coord at = mn_column_block_coord(p, tiles);
    if (at.span.length == 1) return;    // cell by cell (longhorn.cu)
    cells<ROW_WARPS, COLUMN_WARPS> S;
    const auto put_back = [&](const stage &from, int64_t t) {
        if (p.reads) store_out(from, p, at, t);
    };
    const auto group = [&](const lane_factors<ROW_WARPS, COLUMN_WARPS> &own, stage &in, int64_t) {
#pragma unroll 4
        for (int token = 0; token < GROUP; token++) {    // behind the last one there are zeros
            advance(S, own, in.tokens[token]);
            read(in.out.at[token], S, own, in.tokens[token]);
        }
    };
    scan_groups((stage *)diag_fwd_stages, S, p, at, put_back, group);
    if ((int)threadIdx.x < sizes<ROW_WARPS, COLUMN_WARPS>::SCAN_THREADS) S.store(p, at);
}

/* ---- launch ---------------------------------------------------------------------------------- */

bool supported(const mn_call &c) {
    return c.dtype == MN_BF16 && c.K <= 128;
}

template <int ROW_WARPS, int COLUMN_WARPS, typename Kernel>
static int launch_with(Kernel kernel, const mn_column_params &p, cudaStream_t on) {
    typedef sizes<ROW_WARPS, COLUMN_WARPS> size;
    const int64_t tiles = mn_ceil_div(p.columns, (int64_t)size::COLUMNS);
    const int64_t blocks = tiles * p.call.H * mn_n_spans(p.call);
    if (blocks == 0) return cudaSuccess;
    if (blocks > INT32_MAX) return cudaErrorNotSupported;
    return mn_launch_smem(kernel, dim3((unsigned)blocks), size::THREADS,
                          2 * sizeof(stage<ROW_WARPS, COLUMN_WARPS>), on, p, tiles);
}

/* Few columns are spread over more SMs; a column's result does not depend on it. */
template <int ROW_WARPS>
static int launch_rows(const mn_column_params &p, cudaStream_t on) {
    const int64_t heads = p.call.H * mn_n_spans(p.call);
    const bool many = mn_ceil_div(p.columns, (int64_t)MN_COLUMNS_TILE) * heads > 64;
    return many ? launch_with<ROW_WARPS, 2>(longhorn_diag_fwd<ROW_WARPS, 2>, p, on)
                : launch_with<ROW_WARPS, 1>(longhorn_diag_fwd<ROW_WARPS, 1>, p, on);
}

int launch(mn_column_params p, cudaStream_t on) {
    p.vec_aligned = mn_columns_vec_aligned<mn_bf16>(p, 8);
    if (p.call.K <= 32) return launch_rows<1>(p, on);
    return p.call.K <= 64 ? launch_rows<2>(p, on) : launch_rows<4>(p, on);
}

}    // namespace mneme::longhorn::diag_fwd
