/* longhorn_diag_bwd_recurrent.cu - gradients of longhorn_diag in bf16, for keys of at most 128
 * channels. With c = 1 - w k^2, S the state in front of a token, S' the one behind it, and D the
 * adjoint of S':
 *
 *   D += scale q do'     dq = scale S' do     E = D . S     D <- c D
 *   dv_j = w (D'k)_j     y_j = v (D'k)_j - (E'k^2)_j     dk_i = (D w v)_i - 2 k_i (E w)_i
 *
 * What a cell does to itself is float32: what it is multiplied with, and what is added to it, are
 * outer products by tensor cores of numbers split as longhorn_outer.cuh says. All sums over
 * columns and rows are products of the three matrices S', D and E, rounded to half precision, with
 * a vector each, m16n8k16 with the same vector in all columns. So every lane ends with sums, and
 * tokens share no product: what is not finite stays with its token. Bf16 would not do: y is a
 * difference. So that half precision has the range, a warp's part of S and of D is kept in a unit,
 * a power of two that is made larger before a bound of the largest cell gets too large, and every
 * vector is in a unit of its own; which unit it is goes by tokens already seen.
 *
 * A warp has 32 x 16 cells, a lane four rows by four columns of them, which are factors of products
 * over columns as they lie in registers, and results of the products that move them. Sums over rows
 * are first those of a lane's own four, in half precision, which movmatrix turns.
 *
 * The state in front of every eighth token goes to memory on a first way through, in half
 * precision. Going back, states of eight tokens are made from it once and kept in shared memory, by
 * the lane that reads them, so that no barrier stands between; the one behind the last of them is
 * the next group's first. */
#include "kernels/cuda/longhorn/longhorn_diag_bwd.h"

#include <cuda_fp16.h>

#include "kernels/cuda/longhorn/longhorn_outer.cuh"
#include "kernels/cuda/prim/device_props.h"
#include "kernels/cuda/prim/sync.cuh"
#include "kernels/cuda/prim/tma.cuh"

namespace mneme::longhorn::diag {

using namespace outer;
using namespace recurrent;

enum { GROUP = 8, TILE = MN_COLUMNS_TILE };    // tokens; columns of a block

/* Of a block with ROW_WARPS warps along the rows and four along the columns. */
template <int ROW_WARPS>
struct sizes {
    static constexpr int ACROSS = TILE / 16, WARPS = ACROSS * ROW_WARPS, THREADS = 32 * WARPS;
    static constexpr int ROWS = 32 * ROW_WARPS;
    static constexpr int LOADERS = WARPS / 2;         // warps that bring a group
    static constexpr int TOKENS = GROUP / LOADERS;    // which each of them does
    static constexpr int CELLS = 2 * THREADS;         // packs of 16 bytes: a state
    static constexpr int PACKS = CELLS + WARPS / 4;   // and its warps' units
    static constexpr bool MAY_FINISH = ROW_WARPS == 4;    // see `inbox`
};

/* What moves a state over a token, in words of two numbers of bf16: depths of products, of which a
 * lane has one pair. Tables of keys lie a quarter of the banks apart, so that lanes of different
 * depths meet no bank twice; zeros are what lanes of other depths read. */
template <int ROW_WARPS>
struct alignas(16) step_record {
    static constexpr int ROWS = sizes<ROW_WARPS>::ROWS, PITCH = ROWS + 8;
    static constexpr int ZEROS = 3 * PITCH, WEIGHTS = ZEROS + 32, WRITES = WEIGHTS + TILE;
    unsigned keys[3][PITCH];    // k^2 in two parts, k; each twice
    unsigned zeros[32];
    unsigned weights[TILE];    // -w in two parts, at place_of
    unsigned writes[TILE];     // w v in two parts; going back in its unit
};

/* And what else a token needs going back; numbers of columns and k are in units of theirs, powers
 * of two. */
template <int ROW_WARPS>
struct token_record : step_record<ROW_WARPS> {
    typedef step_record<ROW_WARPS> step;
    static constexpr int QUERIES = step::WRITES + TILE, COTS = QUERIES + step::ROWS;
    unsigned queries[step::ROWS];    // scale q in two parts
    unsigned cots[TILE];             // do, twice, at place_of
    alignas(16) unsigned cot_write[TILE / 4][4];    // in half precision: do, w v of four columns
    unsigned w_value[TILE / 4][4];                  // w; v as it was stored
    unsigned k_pair[step::ROWS];                    // in half precision: k, k^2 / 8
    float4 adjoint;    // a bound of q do', units of do, of w v, and of w times -2
    float2 state;      // a bound of k (w v)', the unit of w v
    float cot_unit, k_unit;
    float u[sizes<ROW_WARPS>::MAY_FINISH ? TILE : 4];    // w = beta u
};

/* ---- products -------------------------------------------------------------------------------- */

/* A lane's cells as factors: pair p of the two of row r is number r % 2 + 2 p of factor r / 2,
 * whose four numbers have to lie side by side. */
typedef unsigned pairs[2][4];

__device__ __forceinline__ unsigned pair_of(float low, float high) {
    const __half2 pair = __floats2half2_rn(low, high);
    return *(const unsigned *)&pair;
}

/* One of a pair, twice, which costs nothing (as __byte_perm it would). */
__device__ __forceinline__ unsigned twice_low(unsigned x) {
    unsigned y;
    asm("{ .reg .b16 low, high; mov.b32 {low, high}, %1; mov.b32 %0, {low, low}; }"
        : "=r"(y) : "r"(x));
    return y;
}

__device__ __forceinline__ unsigned twice_high(unsigned x) {
    unsigned y;
    asm("{ .reg .b16 low, high; mov.b32 {low, high}, %1; mov.b32 %0, {high, high}; }"
        : "=r"(y) : "r"(x));
    return y;
}

/* to = A b of depth 16, where every column of b is the same */
__device__ __forceinline__ void mma_zero(float (&to)[4], const unsigned (&a)[4], unsigned b0,
                                         unsigned b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%10, %10, %10, %10};"
        : "=f"(to[0]), "=f"(to[1]), "=f"(to[2]), "=f"(to[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(0.0f));
}

/* to = sums of A over its eight columns */
__device__ __forceinline__ void mma_sums(float (&to)[4], unsigned upper, unsigned lower) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, "
        "{%7, %7, %7, %7};"
        : "=f"(to[0]), "=f"(to[1]), "=f"(to[2]), "=f"(to[3])
        : "r"(upper), "r"(lower), "r"(0x3c003c00), "f"(0.0f));
}

/* Eight rows of eight numbers, a pair a lane, with their axes exchanged. */
__device__ __forceinline__ unsigned transpose(unsigned x) {
    unsigned y;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}

__device__ __forceinline__ unsigned multiply(unsigned x, unsigned y) {
    unsigned product;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(product) : "r"(x), "r"(y));
    return product;
}

__device__ __forceinline__ unsigned multiply_add(unsigned x, unsigned y, unsigned z) {
    unsigned sum;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(sum) : "r"(x), "r"(y), "r"(z));
    return sum;
}

/* Of bf16 */
__device__ __forceinline__ unsigned bf16_times(unsigned x, unsigned y) {
    unsigned z;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(z) : "r"(x), "r"(y), "r"(0x80008000u));
    return z;
}

__device__ __forceinline__ void cp_async(void *smem, const void *from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;"
                 ::"r"((unsigned)__cvta_generic_to_shared(smem)), "l"(from) : "memory");
}

__device__ __forceinline__ void cp_async_wait(void) {
    asm volatile("cp.async.wait_all;" ::: "memory");
}

/* One of four, by the lane's place in its quad. */
__device__ __forceinline__ float own_of(int quarter, float x, float y, float z, float w) {
    return quarter < 2 ? quarter % 2 ? y : x : quarter % 2 ? w : z;
}

/* Sums over this warp's columns for the lane's row, from those of the products of both factors. */
__device__ __forceinline__ float row_of(int quarter, const float (&x)[2][4]) {
    return own_of(quarter, x[0][0], x[0][2], x[1][0], x[1][2]);
}

/* Sums over a lane's rows, of its two pairs of columns: those of a factor's two rows, `by` twice
 * each row's number, to what there is of others. */
template <bool FIRST>
__device__ __forceinline__ void add_rows(unsigned (&sum)[2], const unsigned (&a)[4], unsigned by0,
                                         unsigned by1) {
#pragma unroll
    for (int p = 0; p < 2; p++) {
        sum[p] = FIRST ? multiply(a[2 * p], by0) : multiply_add(a[2 * p], by0, sum[p]);
        sum[p] = multiply_add(a[2 * p + 1], by1, sum[p]);
    }
}

/* And of those over the warp's rows, for two columns, two apart. */
__device__ __forceinline__ float2 columns_of(const unsigned (&sum)[2]) {
    float x[4];
    mma_sums(x, transpose(sum[0]), transpose(sum[1]));
    return make_float2(x[0], x[2]);
}

/* ---- units ----------------------------------------------------------------------------------- */

/* Cell in its unit: sums of four of E, a product of two, times k^2 / 8, stay below 65504. */
constexpr float LARGEST = 128.0f;

/* The largest cell of what comes in a unit of its own is below this. */
constexpr float FIRST_BOUND = 2.0f;

/* The power of two at or below what these bits, of a positive number, say; not too near to the
 * ends. */
__device__ inline float unit_of(unsigned bits) {
    return __uint_as_float(min(max(bits & 0x7f800000u, 27u << 23), 227u << 23));
}

/* That in which such a number of bf16 is some 2^14: whatever is above 2^-17 of it is exact in half
 * precision, and far smaller ones are not zero. */
__device__ inline float wide_unit_of(unsigned bits) {
    return __uint_as_float(max(bits & 0x7f800000u, 27u << 23) - (14u << 23));
}

__device__ inline float inverse_of(float unit) {
    return __uint_as_float((254u << 23) - __float_as_uint(unit));
}

/* A power of two, twice, to multiply numbers of at most 2^15 of columns with: where it is larger,
 * what they meet in rows is below what there is, or zero. */
__device__ inline unsigned factor_of(float x) {
    return __byte_perm(__float_as_uint(fminf(x, 0x1p112f)), 0, 0x3232);
}

/* Bits of |x|, which are in the order of numbers; 0 for what is not finite */
__device__ inline unsigned size_of(float x) {
    const unsigned bits = __float_as_uint(x) & 0x7fffffffu;
    return bits < 0x7f800000u ? bits : 0;
}

template <int N>
__device__ inline unsigned largest_of(const float (&x)[N]) {
    unsigned most = 0;
#pragma unroll
    for (int n = 0; n < N; n++) most = max(most, size_of(x[n]));
    return __reduce_max_sync(0xffffffffu, most);
}

/* Whether something holds for a warp, all lanes of which say the same, as the compiler sees by
 * this: branches by it leave numbers that are alike in all lanes in their common registers. */
__device__ __forceinline__ bool alike(bool x) {
    return __reduce_max_sync(0xffffffffu, (unsigned)x) > 0;
}

/* ---- tokens ---------------------------------------------------------------------------------- */

/* A warp's part of the block's cells, 32 x 16 from this row and column on; a lane's place in it. */
struct warp_coord {
    __device__ static int warp() { return threadIdx.x / 32; }
    __device__ static int down() { return threadIdx.x / 128; }
    __device__ static int across() { return threadIdx.x / 32 % 4; }
    __device__ static int row() { return 32 * down(); }
    __device__ static int column() { return 16 * across(); }
    __device__ static int eighth() { return threadIdx.x % 32 / 4; }
    __device__ static int quarter() { return threadIdx.x % 4; }
};

/* The first of the lane's four rows and of its four columns, of the warp's. */
__device__ inline int own_row() { return warp_coord::eighth() * 4; }
__device__ inline int own_column() { return warp_coord::quarter() * 4; }

/* Where the words of column j are: those of two columns, two apart, that a lane takes lie side by
 * side. */
__device__ inline int place_of(int j) {
    return j / 16 * 16 + j % 16 / 4 * 4 + j % 2 * 2 + j % 4 / 2;
}

/* A number that the compiler is not to make again where it is used: it comes from a lane, this
 * one. */
__device__ __forceinline__ int kept(int x) {
    return __shfl_sync(0xffffffffu, x, threadIdx.x % 32);
}

/* Sums of a token, of warps. */
template <int ROW_WARPS>
struct alignas(16) sums_record {
    typedef sizes<ROW_WARPS> size;
    enum { PITCH = TILE + 16 };                   // both kinds meet no bank twice
    float rows[size::ACROSS][2][size::ROWS];      // S' do; all of dk
    float columns[ROW_WARPS][2][PITCH];           // D'k, E'k^2
};

/* Where a lane reads and writes, in bytes: in a token's record words of the depths that it has, its
 * own row of the block's, the first of its four, its four columns' pack; sums in theirs; its warp's
 * units; its part of a state. */
template <int ROW_WARPS>
struct lane_places {
    typedef token_record<ROW_WARPS> record;
    typedef sums_record<ROW_WARPS> sums;
    int keys, weights, writes, queries, cots, row, rows, pack, row_sum, column_sum, units, cells;
    int quarter;

    /* Zeros that lie in other banks than word `of`. */
    __device__ static int zeros(int of) {
        return record::ZEROS + (of + 48 - record::ZEROS % 32) % 32;
    }

    __device__ lane_places() {
        const int depth = warp_coord::quarter(), first = warp_coord::row() + own_row();
        const int eighth = warp_coord::eighth(), column = warp_coord::column() + 2 * eighth;
        const int weight = record::WEIGHTS + column, write = record::WRITES + column;
        const int query = record::QUERIES + first, cot = record::COTS + column;
        const int own = warp_coord::row() + threadIdx.x % 32;
        const int place = eighth / 2 * 4 + eighth % 2 + depth % 2 * 2;    // of a sum's column
        keys = kept(4 * (depth < 3 ? depth * record::PITCH + first : record::ZEROS + own_row()));
        weights = kept(4 * (depth < 2 ? weight : zeros(weight)));
        writes = kept(4 * (depth == 2 ? write : zeros(write)));
        queries = kept(4 * (depth == 0 ? query : zeros(query)));
        cots = kept(4 * (depth == 0 ? cot : zeros(cot)));
        row = kept(4 * own), rows = kept(4 * first);
        pack = kept(4 * (warp_coord::column() + own_column()));
        row_sum = kept(4 * (warp_coord::across() * 2 * record::ROWS + own));
        column_sum = kept((int)offsetof(sums, columns)
                          + 4 * ((2 * warp_coord::down() + depth / 2) * sums::PITCH
                                 + warp_coord::column() + place));
        units = kept(4 * GROUP * warp_coord::warp()), cells = kept(16 * (int)threadIdx.x);
        quarter = kept(depth);
    }
};

/* What lies so many bytes behind the start of something. */
template <typename T>
__device__ __forceinline__ T &behind_of(void *start, int bytes) {
    return *(T *)((unsigned char *)start + bytes);
}

template <typename T>
__device__ __forceinline__ const T &behind_of(const void *start, int bytes) {
    return *(const T *)((const unsigned char *)start + bytes);
}

template <int ROW_WARPS>
struct smem_of {
    typedef sizes<ROW_WARPS> size;
    token_record<ROW_WARPS> in[GROUP];
    sums_record<ROW_WARPS> sums[GROUP];
    float state_unit[size::WARPS][GROUP];    // of the states in front of tokens
    uint2 bounds[GROUP];                     // of what each token adds to a state, an adjoint
    alignas(16) uint4 front[size::CELLS];        // state in front of a group
    uint4 states[GROUP - 1][size::CELLS];        // and of its other tokens
};

/* The largest of a token's do and w v; units. */
struct column_sizes {
    float cot, written, cot_unit, write_unit, w_unit;
};

template <int N>
__device__ __forceinline__ void store_words(unsigned *to, const unsigned (&x)[N]) {
    static_assert(N == 2 || N == 4, "one access");
    if constexpr (N == 4) *(uint4 *)to = make_uint4(x[0], x[1], x[2], x[3]);
    else *(uint2 *)to = make_uint2(x[0], x[1]);
}

/* Eight tokens on their way, as they were stored; each of half of the warps loads some of them. */
template <int ROW_WARPS>
struct prefetch {
    typedef sizes<ROW_WARPS> size;
    static constexpr int ITEMS = size::ROWS / 32;
    mn_column_raw<ITEMS, mn_bf16> k[size::TOKENS], q[size::TOKENS];
    mn_column_raw<2, mn_bf16> v[size::TOKENS], beta[size::TOKENS], cot[size::TOKENS];
    const mn_bf16 *k_at, *q_at, *v_at, *beta_at, *cot_at;    // this lane's part of a first token
    int64_t left;                                            // tokens from there to the end

    /* The first of a group that this warp loads. */
    __device__ static int token() { return warp_coord::warp() % size::LOADERS * size::TOKENS; }

    /* At the group whose first token is t. */
    __device__ prefetch(const mn_column_params &p, const mn_column_coord &at, int64_t t) {
        const int64_t first = t + token(), b = at.span.b, h = at.h;
        const int64_t row = threadIdx.x % 32 * ITEMS, when = at.span.t0 + first;
        const int64_t j = at.tile * TILE + threadIdx.x % 32 * 2;
        left = at.span.length - first;
        k_at = mn_row<mn_bf16>(p.k, b, when, h) + row;
        q_at = mn_row<mn_bf16>(p.q, b, when, h) + row;
        v_at = mn_row<mn_bf16>(p.v, b, when, h) + j;
        beta_at = mn_row<mn_bf16>(p.beta, b, when, h) + j;
        cot_at = p.cot_o.data ? mn_row<mn_bf16>(p.cot_o, b, when, h) + j : NULL;
    }

    /* Goes on, or back, by a group. */
    template <int GROUPS>
    __device__ void move(const mn_column_params &p) {
        constexpr int64_t tokens = GROUPS * (int64_t)GROUP;
        left -= tokens;
        k_at += tokens * p.k.stride[1], v_at += tokens * p.v.stride[1];
        beta_at += tokens * p.beta.stride[1];
        if (GROUPS > 0) return;
        q_at += tokens * p.q.stride[1];
        if (cot_at) cot_at += tokens * p.cot_o.stride[1];
    }

    template <bool BACK>
    __device__ void fetch(const mn_column_params &p, const mn_column_coord &at) {
        const int keys = (int)p.call.K - (int)threadIdx.x % 32 * ITEMS;
        const int columns = (int)(p.call.V - at.tile * TILE) - (int)threadIdx.x % 32 * 2;
#pragma unroll
        for (int n = 0; n < size::TOKENS; n++) {
            const int K = n < left ? keys : 0, V = n < left ? columns : 0;
            k[n].fetch(k_at + n * p.k.stride[1], 0, K, p.vec_aligned);
            v[n].fetch(v_at + n * p.v.stride[1], 0, V, p.vec_aligned);
            beta[n].fetch(beta_at + n * p.beta.stride[1], 0, V, p.vec_aligned);
            if (!BACK) continue;
            q[n].fetch(q_at + n * p.q.stride[1], 0, K, p.vec_aligned);
            cot[n].fetch(cot_at + n * p.cot_o.stride[1], 0, cot_at ? V : 0, p.vec_aligned);
        }
    }

    /* |k|^2, in all lanes */
    __device__ float norm(int n) const {
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < ITEMS; i++) sum = fmaf(k[n].at(i), k[n].at(i), sum);
        return mn_warp_sum(sum);
    }

    /* u, w and w v of the lane's two columns, and the words of w to shared memory. */
    __device__ void put_weights(step_record<ROW_WARPS> &to, float (&u)[2], float (&w)[2],
                                float (&write)[2], int n, float all) const {
#pragma unroll
        for (int c = 0; c < 2; c++) {
            const float b = beta[n].at(c);
            u[c] = reciprocal(fmaf(b, all, 1.0f)), w[c] = b * u[c], write[c] = w[c] * v[n].at(c);
            to.weights[place_of(threadIdx.x % 32 * 2 + c)] = mn_bf16_split(-w[c]);
        }
    }

    /* A token's keys. Where |k|^2 is too large for float32, nothing is a number. */
    __device__ void put_keys(step_record<ROW_WARPS> &to, int n, float all) const {
        const int row = threadIdx.x % 32 * ITEMS;
        unsigned high[ITEMS], low[ITEMS], key[ITEMS];
#pragma unroll
        for (int i = 0; i < ITEMS; i++) {
            const float x = k[n].at(i), square = isinf(all) ? all : x * x;
            const float first = mn_bf16_rounded(square);
            high[i] = mn_bf16x2_of(first, first);
            low[i] = mn_bf16x2_of(square - first, square - first);
            key[i] = mn_bf16x2_of(x, x);
        }
        store_words<ITEMS>(to.keys[0] + row, high);
        store_words<ITEMS>(to.keys[1] + row, low);
        store_words<ITEMS>(to.keys[2] + row, key);
        to.zeros[threadIdx.x % 32] = 0;
    }

    /* The tokens to shared memory as going forward wants them. A barrier follows. */
    __device__ void put(step_record<ROW_WARPS> *to) const {
#pragma unroll
        for (int n = 0; n < size::TOKENS; n++) {
            step_record<ROW_WARPS> &one = to[token() + n];
            const float all = norm(n);
            float u[2], w[2], write[2];
            put_keys(one, n, all);
            put_weights(one, u, w, write, n, all);
#pragma unroll
            for (int c = 0; c < 2; c++) {
                one.writes[place_of(threadIdx.x % 32 * 2 + c)] = mn_bf16_split(write[c]);
            }
        }
    }

    /* And going back. */
    __device__ void put_back(smem_of<ROW_WARPS> &to, float scale) const {
#pragma unroll
        for (int n = 0; n < size::TOKENS; n++) {
            token_record<ROW_WARPS> &one = to.in[token() + n];
            const float all = norm(n);
            put_keys(one, n, all);
            put_rows_back(one, scale, n, put_columns_back(one, n, all));
            to.bounds[token() + n] =
                make_uint2(__float_as_uint(one.state.x), __float_as_uint(one.adjoint.x));
        }
    }

    __device__ column_sizes put_columns_back(token_record<ROW_WARPS> &to, int n,
                                                float all) const {
        const int pair = threadIdx.x % 32;
        float u[2], w[2], write[2];
        put_weights(to, u, w, write, n, all);
        if (size::MAY_FINISH) mn_store<2>(to.u, 2 * pair, u);
        const float cots[2] = { cot[n].at(0), cot[n].at(1) };
        const unsigned most_cot = largest_of(cots), most_written = largest_of(write);
        const float w_unit = unit_of(largest_of(w)), to_w = inverse_of(w_unit);
        const float cot_unit = wide_unit_of(most_cot), to_cot = inverse_of(cot_unit);
        const float write_unit = unit_of(most_written), to_write = inverse_of(write_unit);
        unsigned *halves = to.cot_write[pair / 2] + pair % 2;
        halves[0] = pair_of(to_cot * cots[0], to_cot * cots[1]);
        halves[2] = pair_of(to_write * write[0], to_write * write[1]);
        unsigned *rest = to.w_value[pair / 2] + pair % 2;
        rest[0] = pair_of(to_w * w[0], to_w * w[1]), rest[2] = v[n].word[0];
#pragma unroll
        for (int c = 0; c < 2; c++) {
            const int place = place_of(2 * pair + c);
            to.writes[place] = mn_bf16_split(to_write * write[c]);
            to.cots[place] = mn_bf16x2_of(to_cot * cots[c], to_cot * cots[c]);
        }
        return { __uint_as_float(most_cot), __uint_as_float(most_written), cot_unit, write_unit,
                 w_unit };
    }

    __device__ void put_rows_back(token_record<ROW_WARPS> &to, float scale, int n,
                                  const column_sizes &of) const {
        const int row = threadIdx.x % 32 * ITEMS;
        float key[ITEMS], query[ITEMS];
        unsigned halves[ITEMS], queries[ITEMS];
#pragma unroll
        for (int i = 0; i < ITEMS; i++) key[i] = k[n].at(i), query[i] = scale * q[n].at(i);
        const unsigned most = largest_of(key), most_read = largest_of(query);
        const float unit = unit_of(most);
#pragma unroll
        for (int i = 0; i < ITEMS; i++) {
            const float own = key[i] * inverse_of(unit);
            halves[i] = pair_of(own, 0.125f * (own * own)), queries[i] = mn_bf16_split(query[i]);
        }
        store_words<ITEMS>(to.k_pair + row, halves);
        store_words<ITEMS>(to.queries + row, queries);
        to.k_unit = unit, to.cot_unit = of.cot_unit;
        to.state = make_float2(__uint_as_float(most) * of.written, of.write_unit);
        to.adjoint = make_float4(__uint_as_float(most_read) * of.cot, of.cot_unit, of.write_unit,
                                 -2.0f * of.w_unit);
    }
};

/* A lane's factors of a token that moves a state. They are loaded before what is known of the one
 * in front is stored: loads and stores of shared memory keep their order. */
struct step_factors {
    uint4 keys;
    uint2 weights, writes;

    template <int ROW_WARPS>
    __device__ __forceinline__ step_factors(const step_record<ROW_WARPS> &in,
                                            const lane_places<ROW_WARPS> &own)
        : keys(behind_of<uint4>(&in, own.keys)), weights(behind_of<uint2>(&in, own.weights)),
          writes(behind_of<uint2>(&in, own.writes)) {}
};

/* ---- cells ----------------------------------------------------------------------------------- */

/* A lane's four rows by four columns: two tiles of two rows by two of two columns, each a lane's
 * part of a product's result. */
struct cells {
    float at[2][2][4];

    template <typename F>
    __device__ void each(const mn_column_params &p, const mn_column_coord &place, F use) {
        const int64_t head = place.n * p.call.H + place.h;
#pragma unroll
        for (int n = 0; n < 16; n++) {
            const int64_t i = warp_coord::row() + own_row() + n / 8 * 2 + n / 2 % 2;
            const int64_t j = place.tile * TILE + warp_coord::column() + own_column()
                + n / 4 % 2 * 2 + n % 2;
            use(at[n / 8][n / 4 % 2][n % 4], (head * p.call.K + i) * p.call.V + j,
                i < p.call.K && j < p.call.V);
        }
    }

    __device__ void load(const mn_column_params &p, const mn_column_coord &place,
                         const float *state) {
        each(p, place, [&](float &x, int64_t cell, bool inside) {
            x = state && inside ? state[cell] : 0.0f;
        });
    }

    __device__ void store(const mn_column_params &p, const mn_column_coord &place, float *state) {
        each(p, place, [&](float &x, int64_t cell, bool inside) {
            if (state && inside) state[cell] = x;
        });
    }

    /* Rows m of two, as a factor */
    __device__ __forceinline__ void pack(unsigned (&to)[4], int m, float by = 1.0f) const {
#pragma unroll
        for (int n = 0; n < 4; n++) {
            const float *two = at[m][n / 2] + n % 2 * 2;
            to[n] = pair_of(two[0] * by, two[1] * by);
        }
    }

    __device__ __forceinline__ void pack(pairs &to, float by = 1.0f) const {
        pack(to[0], 0, by), pack(to[1], 1, by);
    }

    __device__ __forceinline__ void unpack(const pairs &from) {
#pragma unroll
        for (int n = 0; n < 8; n++) {
            const float2 x = __half22float2(*(const __half2 *)&from[n / 4][n % 4]);
            float *two = at[n / 4][n % 4 / 2] + n % 2 * 2;
            two[0] = x.x, two[1] = x.y;
        }
    }

    /* += A B, of words that lanes have of four rows and of two pairs of columns */
    __device__ __forceinline__ void add(uint4 a, uint2 b) {
#pragma unroll
        for (int n = 0; n < 2; n++) {
            mn_mma_bf16_k8(at[0][n], make_uint2(a.x, a.y), n ? b.y : b.x);
            mn_mma_bf16_k8(at[1][n], make_uint2(a.z, a.w), n ? b.y : b.x);
        }
    }

    /* Rows m of two: += (A B) times what they are */
    __device__ __forceinline__ void scale(int m, uint4 a, uint2 b) {
#pragma unroll
        for (int n = 0; n < 2; n++) {
            float by[4];
            mn_mma_bf16_k8_zero(by, m ? make_uint2(a.z, a.w) : make_uint2(a.x, a.y),
                                n ? b.y : b.x);
#pragma unroll
            for (int i = 0; i < 4; i++) at[m][n][i] = fmaf(by[i], at[m][n][i], at[m][n][i]);
        }
    }

    /* One token: a state becomes the one behind it. Where what it writes is in a unit it is
     * multiplied with `by`, a power of two, twice. */
    template <bool IN_UNIT>
    __device__ __forceinline__ void advance(const step_factors &in, unsigned by) {
        uint2 writes = in.writes;
        if (IN_UNIT) writes.x = bf16_times(writes.x, by), writes.y = bf16_times(writes.y, by);
        scale(0, in.keys, in.weights), scale(1, in.keys, in.weights);
        add(in.keys, writes);
    }

    /* From one unit to another. */
    __device__ __forceinline__ void rescale(float from, float to) {
        const float inverse = inverse_of(to);
#pragma unroll
        for (int n = 0; n < 16; n++) {
            float &cell = at[n / 8][n / 4 % 2][n % 4];
            cell = cell * from * inverse;
        }
    }

    /* The bits of the warp's largest cell, of those that are finite. */
    __device__ __forceinline__ unsigned largest() const {
        float most = 0.0f;
#pragma unroll
        for (int n = 0; n < 16; n++) most = fmaxf(most, fabsf(at[n / 8][n / 4 % 2][n % 4]));
        const unsigned bits = __reduce_max_sync(0xffffffffu, __float_as_uint(most));
        if (bits < 0x7f800000u) return bits;
        unsigned finite = 0;
#pragma unroll
        for (int n = 0; n < 16; n++) finite = max(finite, size_of(at[n / 8][n / 4 % 2][n % 4]));
        return __reduce_max_sync(0xffffffffu, finite);
    }

    /* Before something of at most `more` is added to cells of at most `bound` units. */
    __device__ __forceinline__ void make_room(float &bound, float &unit, float more) {
        const float before = bound;
        bound = fmaf(more, inverse_of(unit), bound);
        if (bound <= LARGEST) return;
        const float most = fmaf(before, unit, more), next = unit_of(__float_as_uint(most));
        rescale(unit, next);
        bound = most * inverse_of(next), unit = next;
    }
};

/* A lane's part of a state of THREADS threads, `place` bytes behind its start. */
template <int THREADS>
__device__ __forceinline__ void store_packed(uint4 *to, int place, const pairs &x) {
#pragma unroll
    for (int f = 0; f < 2; f++) {
        behind_of<uint4>(to + f * THREADS, place) = make_uint4(x[f][0], x[f][1], x[f][2], x[f][3]);
    }
}

template <int THREADS>
__device__ __forceinline__ void load_packed(pairs &x, const uint4 *from, int place) {
#pragma unroll
    for (int f = 0; f < 2; f++) {
        const uint4 vec = behind_of<uint4>(from + f * THREADS, place);
        x[f][0] = vec.x, x[f][1] = vec.y, x[f][2] = vec.z, x[f][3] = vec.w;
    }
}

/* ---- gradients ------------------------------------------------------------------------------- */

/* Sums of a token, from the states behind and in front of it, to shared memory in no unit of the
 * warp's: a lane has one of each row, and one of two kinds of a column. They are stored when all
 * that the token needs has been loaded. */
template <bool TIGHT, int ROW_WARPS>
__device__ __forceinline__ void token_bwd(cells &D, const pairs &behind, const pairs &front,
                                          smem_of<ROW_WARPS> &smem,
                                          const lane_places<ROW_WARPS> &own, float &bound,
                                          float &unit, float &unit_behind, int token) {
    const token_record<ROW_WARPS> &in = smem.in[token];
    sums_record<ROW_WARPS> &sums = smem.sums[token];
    const float front_unit = (&behind_of<float>(smem.state_unit, own.units))[token];
    const float4 of = in.adjoint;
    const uint2 cots = behind_of<uint2>(&in, own.cots);
    const uint4 queries = behind_of<uint4>(&in, own.queries);
    const uint4 b = behind_of<uint4>(in.cot_write, own.pack);
    const uint2 w = behind_of<uint2>(in.w_value, own.pack);
    const uint4 pairs_of_k = behind_of<uint4>(in.k_pair, own.rows);
    const uint4 keys = behind_of<uint4>(&in, own.keys);
    const uint2 weights = behind_of<uint2>(&in, own.weights);
    const float key = __uint_as_float(behind_of<unsigned>(in.keys[2], own.row) << 16);
    const unsigned halves[4] = { pairs_of_k.x, pairs_of_k.y, pairs_of_k.z, pairs_of_k.w };
    unsigned column_k[2], column_kk[2];
    float x[2][4], x_k[2][4], x_kk[2][4];
#pragma unroll
    for (int m = 0; m < 2; m++) mma_zero(x[m], behind[m], b.x, b.y);
    const float to_q = row_of(own.quarter, x) * unit_behind;
    unit_behind = front_unit;
    if (TIGHT) D.make_room(bound, unit, of.x);
    const unsigned by = factor_of(of.y * inverse_of(unit));
    D.add(queries, make_uint2(bf16_times(cots.x, by), bf16_times(cots.y, by)));
#pragma unroll
    for (int m = 0; m < 2; m++) {
        unsigned read[4], product[4];
        D.pack(read, m);
        D.scale(m, keys, weights);
#pragma unroll
        for (int n = 0; n < 4; n++) product[n] = multiply(read[n], front[m][n]);
        const unsigned k0 = halves[2 * m], k1 = halves[2 * m + 1];
        if (m == 0) {
            add_rows<true>(column_k, read, twice_low(k0), twice_low(k1));
            add_rows<true>(column_kk, product, twice_high(k0), twice_high(k1));
        } else {
            add_rows<false>(column_k, read, twice_low(k0), twice_low(k1));
            add_rows<false>(column_kk, product, twice_high(k0), twice_high(k1));
        }
        mma_zero(x_k[m], read, b.z, b.w);
        mma_zero(x_kk[m], product, w.x, w.y);
    }
    const float to_k = row_of(own.quarter, x_k) * unit * of.z;
    const float to_kk = row_of(own.quarter, x_kk) * front_unit * unit * of.w;
    const float2 to_v = columns_of(column_k), to_w = columns_of(column_kk);
    const float sum = own_of(own.quarter, to_v.x, to_v.y, to_w.x, to_w.y) * unit;
    behind_of<float>(&sums, own.row_sum) = to_q;
    behind_of<float>(sums.rows[0][1], own.row_sum) = fmaf(key, to_kk, to_k);
    behind_of<float>(&sums, own.column_sum) =
        sum * (own.quarter < 2 ? 1.0f : front_unit);
}

/* ---- sums of warps --------------------------------------------------------------------------- */

/* Where one or two blocks have all columns of a head nothing is left to another kernel: they are a
 * cluster, and each sends the other its sums of half of a group's tokens. Two groups have places,
 * so that no block waits for the other to have read. */
struct inbox {
    enum { TOKENS = GROUP / 2, ROWS = sizes<4>::ROWS };
    enum { BYTES = TOKENS * (2 * ROWS + 1) * (int)sizeof(float) };    // of a group
    alignas(16) float rows[2][TOKENS][2][ROWS];
    float through[2][TOKENS];
    alignas(8) uint64_t full[2];

    __device__ void open(void) {
#if __CUDA_ARCH__ >= 900
        mn_mbarrier_init(&full[0], 1), mn_mbarrier_init(&full[1], 1);
        cuda::ptx::fence_mbarrier_init(cuda::ptx::sem_release, cuda::ptx::scope_cluster);
#endif
    }

    /* A warp's token to the other block. */
    __device__ __forceinline__ void send(unsigned rank, int64_t turn, int token, int row,
                                         const float (&q)[4], const float (&k)[4], float sum) {
#if __CUDA_ARCH__ >= 900
        const int place = turn % 2, n = token % TOKENS;
        const uint32_t there = mn_cluster_address(mn_smem_addr(rows[place][n][0] + row), rank);
        const uint32_t last = mn_cluster_address(mn_smem_addr(&through[place][n]), rank);
        const uint32_t count = mn_cluster_address(mn_smem_addr(&full[place]), rank);
        const auto four = [&](uint32_t to, const float(&x)[4]) {
            mn_cluster_store(to, make_float4(x[0], x[1], x[2], x[3]), count);
        };
        four(there, q), four(there + ROWS * (int)sizeof(float), k);
        if (threadIdx.x % 32 > 0) return;
        mn_cluster_store(last, sum, count);
#endif
    }

    /* The other block's of a warp's token. */
    __device__ __forceinline__ void add(int64_t turn, int token, int row, float (&q)[4],
                                        float (&k)[4], float &sum) {
#if __CUDA_ARCH__ >= 900
        const int place = turn % 2, n = token % TOKENS;
        float more[2][4];
        if (n == 0 && threadIdx.x % 32 == 0) mn_mbarrier_arrive_expect_tx(&full[place], BYTES);
        __syncwarp();
        mn_mbarrier_wait(&full[place], turn / 2 % 2);
        mn_load<4>(more[0], rows[place][n][0], row);
        mn_load<4>(more[1], rows[place][n][1], row);
        for (int i = 0; i < 4; i++) q[i] += more[0][i], k[i] += more[1][i];
        sum += through[place][n];
#endif
    }
};

/* Half of the warps add the others' sums up while the other half brings tokens. A thread has four
 * rows of a token, and PASSES times two columns of one; first what that takes of a group's tokens,
 * which the next group's write over. */
template <int ROW_WARPS>
struct warp_sums {
    typedef sizes<ROW_WARPS> size;
    static constexpr int HALF = size::THREADS / 2, QUADS = size::ROWS / 4, PAIRS = TILE / 2;
    static constexpr int AT_ONCE = HALF / PAIRS, PASSES = GROUP / AT_ONCE;    // tokens of columns
    static_assert(HALF == GROUP * QUADS, "a thread has one four of rows");
    float cot, k_unit[PASSES], u[2];
    unsigned v[PASSES], w[PASSES][2];    // as they lie in shared memory
    uint4 keys;

    __device__ static int thread() { return (int)threadIdx.x - HALF; }
    __device__ static int row_token() { return thread() / QUADS; }
    __device__ static int first_row() { return thread() % QUADS * 4; }
    __device__ static int column_token(int pass) { return thread() / PAIRS + pass * AT_ONCE; }
    __device__ static int pair() { return thread() % PAIRS; }

    __device__ __forceinline__ void load(const token_record<ROW_WARPS> *in) {
        cot = in[row_token()].cot_unit;
        if constexpr (size::MAY_FINISH) {
            mn_load<2>(u, in[row_token()].u, 2 * pair());
            keys = *(const uint4 *)(in[row_token()].keys[2] + first_row());
        }
#pragma unroll
        for (int pass = 0; pass < PASSES; pass++) {
            const token_record<ROW_WARPS> &one = in[column_token(pass)];
            k_unit[pass] = one.k_unit, v[pass] = one.w_value[pair() / 2][2 + pair() % 2];
            w[pass][0] = one.weights[place_of(2 * pair())];
            w[pass][1] = one.weights[place_of(2 * pair() + 1)];
        }
    }

    __device__ static float lower(unsigned x) { return __uint_as_float(x << 16); }
    __device__ static float upper(unsigned x) { return __uint_as_float(x & 0xffff0000u); }

    /* dq and dk of the thread's rows by the block's columns. */
    __device__ __forceinline__ void rows(float (&to_q)[4], float (&to_k)[4],
                                         const smem_of<ROW_WARPS> &smem, float scale) const {
#pragma unroll
        for (int n = 0; n < 4; n++) to_q[n] = 0.0f, to_k[n] = 0.0f;
#pragma unroll
        for (int across = 0; across < size::ACROSS; across++) {
            float q[4], k[4];
            mn_load<4>(q, smem.sums[row_token()].rows[across][0], first_row());
            mn_load<4>(k, smem.sums[row_token()].rows[across][1], first_row());
#pragma unroll
            for (int n = 0; n < 4; n++) to_q[n] += q[n], to_k[n] += k[n];
        }
#pragma unroll
        for (int n = 0; n < 4; n++) to_q[n] = scale * (to_q[n] * cot);
    }

    __device__ __forceinline__ void leave_part(float *part, const smem_of<ROW_WARPS> &smem,
                                               float scale, int64_t K) const {
        float to_q[4], to_k[4];
        rows(to_q, to_k, smem, scale);
        if (K % 4 == 0) {
            mn_store<4>(part, first_row(), to_q);
            mn_store<4>(part, K + first_row(), to_k);
            return;
        }
#pragma unroll
        for (int n = 0; n < 4; n++) {
            if (first_row() + n >= K) continue;
            part[first_row() + n] = to_q[n], part[K + first_row() + n] = to_k[n];
        }
    }

    /* y and dv of the thread's two columns. */
    __device__ __forceinline__ void columns(float (&y)[2], float (&dv)[2],
                                            const smem_of<ROW_WARPS> &smem, int pass) const {
        const float of_k = k_unit[pass], values[2] = { lower(v[pass]), upper(v[pass]) };
        float to_v[2] = {}, to_w[2] = {};
#pragma unroll
        for (int down = 0; down < ROW_WARPS; down++) {
            float read[2], written[2];
            mn_load<2>(read, smem.sums[column_token(pass)].columns[down][0], 2 * pair());
            mn_load<2>(written, smem.sums[column_token(pass)].columns[down][1], 2 * pair());
#pragma unroll
            for (int n = 0; n < 2; n++) to_v[n] += read[n], to_w[n] += written[n];
        }
#pragma unroll
        for (int n = 0; n < 2; n++) {
            to_v[n] *= of_k;
            y[n] = fmaf(values[n], to_v[n], -8.0f * (to_w[n] * of_k * of_k));
            dv[n] = -(lower(w[pass][n]) + upper(w[pass][n])) * to_v[n];
        }
    }

    /* dq and dk of a token in parts, dv and y of `count` tokens of which the first is token t. */
    __device__ __forceinline__ void reduce(const smem_of<ROW_WARPS> &smem,
                                           const mn_column_params &p, const mn_column_coord &at,
                                           int64_t t, int count) const {
        const int64_t all = p.call.B * p.call.T * p.call.H, K = p.call.K;
        if (first_row() < K && row_token() < count) {
            const int64_t row = at.tile * all + mn_columns_row(p, at, t + row_token());
            leave_part(p.partials + row * 2 * K, smem, p.scale, K);
        }
        const int64_t j = at.tile * TILE + 2 * pair();
#pragma unroll
        for (int pass = 0; pass < PASSES; pass++) {
            const int64_t when = t + column_token(pass);
            if (column_token(pass) >= count) continue;
            float y[2], dv[2], *to_y = p.y + mn_columns_row(p, at, when) * p.columns + j;
            mn_bf16 *to_v = mn_row<mn_bf16>(p.dv, at.span.b, at.span.t0 + when, at.h);
            columns(y, dv, smem, pass);
#pragma unroll
            for (int n = 0; n < 2; n++) {
                if (j + n >= p.columns) continue;
                to_y[n] = y[n];
                if (to_v) mn_put(to_v + j + n, dv[n]);
            }
        }
    }

    /* dv and dbeta of the thread's columns; returns what comes to a key by all that are there. */
    __device__ __forceinline__ float finish_columns(const smem_of<ROW_WARPS> &smem,
                                                    const mn_column_params &p,
                                                    const whole_grads &grads,
                                                    const mn_column_coord &at, int64_t when,
                                                    bool there) const {
        const int64_t j = at.tile * TILE + 2 * pair(), b = at.span.b, t = at.span.t0 + when;
        mn_bf16 *to_v = there ? mn_row<mn_bf16>(p.dv, b, t, at.h) : NULL;
        mn_bf16 *to_beta = there ? mn_row<mn_bf16>(grads.beta, b, t, at.h) : NULL;
        float y[2], dv[2], through = 0.0f;
        columns(y, dv, smem, 0);
#pragma unroll
        for (int n = 0; n < 2; n++) {
            if (j + n >= p.columns) continue;
            const float weight = lower(w[0][n]) + upper(w[0][n]);
            through = fmaf(weight * weight, y[n], through);
            if (to_v) mn_put(to_v + j + n, dv[n]);
            if (to_beta) mn_put(to_beta + j + n, y[n] * u[n] * u[n]);
        }
        return mn_warp_sum(through);
    }

    __device__ __forceinline__ void store_rows(mn_bf16 *to, const float (&x)[4], int64_t K,
                                               bool vec_aligned) const {
        if (!to || first_row() >= K) return;
        if (vec_aligned) {
            mn_store<4>(to, first_row(), x);
            return;
        }
#pragma unroll
        for (int n = 0; n < 4; n++) {
            if (first_row() + n < K) mn_put(to + first_row() + n, x[n]);
        }
    }

    /* All gradients of those tokens, of which each of two blocks finishes half; `turn` counts
     * groups. */
    __device__ __forceinline__ void finish(const smem_of<ROW_WARPS> &smem, inbox &box,
                                           const mn_column_params &p, const whole_grads &grads,
                                           const mn_column_coord &at, int64_t t, int count,
                                           bool shared, int64_t turn) const {
        const int token = row_token();
        const bool there = token < count;
        float to_q[4], to_k[4];
        float through = finish_columns(smem, p, grads, at, t + token, there);
        rows(to_q, to_k, smem, p.scale);
        if (shared && token / inbox::TOKENS != at.tile) {
            box.send(1 - (unsigned)at.tile, turn, token, first_row(), to_q, to_k, through);
            return;
        }
        if (shared) box.add(turn, token, first_row(), to_q, to_k, through);
        const unsigned words[4] = { keys.x, keys.y, keys.z, keys.w };
#pragma unroll
        for (int n = 0; n < 4; n++) to_k[n] = fmaf(-2.0f * lower(words[n]), through, to_k[n]);
        if (!there) return;
        const int64_t b = at.span.b, when = at.span.t0 + t + token;
        store_rows(mn_row<mn_bf16>(grads.q, b, when, at.h), to_q, p.call.K, grads.vec_aligned);
        store_rows(mn_row<mn_bf16>(grads.k, b, when, at.h), to_k, p.call.K, grads.vec_aligned);
    }
};

/* ---- both ways ------------------------------------------------------------------------------- */

/* Does one thing and the other, which are free to come in either order; of two warps that share a
 * scheduler each begins with another one, so that one's waits are the other's turn. */
template <typename One, typename Other>
__device__ __forceinline__ void in_turns(One one, Other other) {
    const int first = __shfl_sync(0xffffffffu, (int)threadIdx.x / 128, 0);    // alike in a warp
#pragma unroll 1
    for (int turn = 0; turn < 2; turn++) {
        if ((turn ^ first) & 1) other();
        else one();
    }
}

/* The state in front of every group to memory, and the last one, packed; returns its unit. The
 * tokens of two groups, one by each half of the warps, go to shared memory while other warps are
 * still in the two in front of them. */
template <int ROW_WARPS>
__device__ inline float save_states(pairs &last, uint4 *saved, int64_t stride,
                                    smem_of<ROW_WARPS> &smem, const mn_column_params &p,
                                    const mn_column_coord &at, int64_t groups) {
    typedef sizes<ROW_WARPS> size;
    typedef step_record<ROW_WARPS> tokens[GROUP];
    static_assert(4 * sizeof(tokens) <= sizeof(smem.states), "their places are free on this way");
    tokens *const stages = (tokens *)smem.states;
    const lane_places<ROW_WARPS> own;
    const int half = warp_coord::warp() / size::LOADERS;
    cells S;
    prefetch<ROW_WARPS> ahead(p, at, half * (int64_t)GROUP);
    const auto pack = [&](pairs &packed) {
        const float unit = unit_of(S.largest());
        S.pack(packed, inverse_of(unit));
        return unit;
    };
    const auto save = [&](int64_t n) {
        pairs packed;
        const float unit = pack(packed);
        store_packed<size::THREADS>(saved + n * stride, own.cells, packed);
        if (threadIdx.x % 32 > 0) return;
        ((float *)(saved + n * stride + size::CELLS))[warp_coord::warp()] = unit;
    };
    const auto bring = [&](int64_t n) {    // of groups n and n + 1, and asks for those behind them
        ahead.put(stages[(n + half) % 4]);
        ahead.template move<2>(p);
        ahead.template fetch<false>(p, at);
    };
    S.load(p, at, p.state0);
    ahead.template fetch<false>(p, at);
    bring(0);
#pragma unroll 1
    for (int64_t first = 0; first < groups; first += 2) {
        __syncthreads();
        const auto pass = [&]() {
#pragma unroll 1
            for (int64_t n = first; n < min(first + 2, groups); n++) {
                save(n);
                const auto &tokens = stages[n % 4];
                step_factors now(tokens[0], own);
#pragma unroll 2
                for (int token = 0; token < GROUP; token++) {
                    const step_factors next(tokens[min(token + 1, GROUP - 1)], own);
                    S.template advance<false>(now, 0);
                    now = next;
                }
            }
        };
        in_turns([&]() { if (first + 2 < groups) bring(first + 2); }, pass);
    }
    const float unit = pack(last);
    __syncthreads();
    return unit;
}

/* States of a group's tokens from the one in front of it, `last`, to shared memory; leaves the one
 * in front of the last token. TIGHT: their unit may get too small on the way. */
template <bool TIGHT, int ROW_WARPS>
__device__ __forceinline__ void make_states(pairs &last, float unit, smem_of<ROW_WARPS> &smem,
                                            const lane_places<ROW_WARPS> &own) {
    float *units = &behind_of<float>(smem.state_unit, own.units), bound = FIRST_BOUND;
    cells S;
    S.unpack(last);
    units[0] = unit;
    step_factors now(smem.in[0], own);
    float2 of = smem.in[0].state;
#pragma unroll (TIGHT ? 1 : GROUP - 1)
    for (int token = 0; token + 1 < GROUP; token++) {
        if (TIGHT) S.make_room(bound, unit, of.x);
        S.template advance<true>(now, factor_of(of.y * inverse_of(unit)));
        const token_record<ROW_WARPS> &next = smem.in[min(token + 1, GROUP - 2)];
        now = step_factors(next, own), of = next.state;
        S.pack(last);
        units[token + 1] = unit;
        store_packed<sizes<ROW_WARPS>::THREADS>(smem.states[token], own.cells, last);
    }
}

/* Sums of a group's tokens, whose states are there, the last one's in `old`; behind its first
 * tokens' `ask` sends for the next group. */
template <bool TIGHT, int ROW_WARPS, typename Ask>
__device__ __forceinline__ void tokens_bwd(cells &D, float &most_of_D, float &unit_of_D,
                                           pairs &behind, float &unit_behind, pairs &old,
                                           smem_of<ROW_WARPS> &smem,
                                           const lane_places<ROW_WARPS> &own, Ask ask) {
    constexpr int THREADS = sizes<ROW_WARPS>::THREADS;
#pragma unroll 1
    for (int token = GROUP - 1; token > 0; token -= 2) {
        load_packed<THREADS>(old, smem.states[token - 1], own.cells);
        token_bwd<TIGHT>(D, behind, old, smem, own, most_of_D, unit_of_D, unit_behind, token);
        if (token == GROUP - 1) ask();
        load_packed<THREADS>(behind, token == 1 ? smem.front : smem.states[token - 2], own.cells);
        token_bwd<TIGHT>(D, old, behind, smem, own, most_of_D, unit_of_D, unit_behind, token - 1);
    }
}

/* The group that is in shared memory, from the state in front of it, in its unit, which came to
 * where the last token's will be; `ask` sends for another one, once that place is free again.
 * Behind the last token of a sequence there are zeros, which change nothing. Where what all tokens
 * add fits into the units at hand, as nearly always, none of them has to be looked at: the same
 * bits. */
template <int ROW_WARPS, typename Ask>
__device__ __forceinline__ void group_bwd(cells &D, float &most_of_D, float &unit_of_D, bool look,
                                          pairs &behind, float &unit_behind, float unit,
                                          smem_of<ROW_WARPS> &smem,
                                          const lane_places<ROW_WARPS> &own, Ask ask) {
    constexpr int THREADS = sizes<ROW_WARPS>::THREADS;
    const uint2 bounds = smem.bounds[threadIdx.x % GROUP];
    pairs old;
    load_packed<THREADS>(old, smem.states[GROUP - 2], own.cells);
    store_packed<THREADS>(smem.front, own.cells, old);
    const float to_state = GROUP * __uint_as_float(__reduce_max_sync(0xffffffffu, bounds.x));
    const float to_adjoint = GROUP * __uint_as_float(__reduce_max_sync(0xffffffffu, bounds.y));
    if (alike(fmaf(to_state, inverse_of(unit), FIRST_BOUND) < LARGEST)) {
        make_states<false>(old, unit, smem, own);
    } else {
        make_states<true>(old, unit, smem, own);
    }
    if (look) {
        const float most = __uint_as_float(D.largest()) * unit_of_D;
        const float next = unit_of(__float_as_uint(most));
        if (next != unit_of_D) D.rescale(unit_of_D, next);
        most_of_D = most * inverse_of(next), unit_of_D = next;
    }
    const float most = fmaf(to_adjoint, inverse_of(unit_of_D), most_of_D);
    if (alike(most < LARGEST)) {
        tokens_bwd<false>(D, most_of_D, unit_of_D, behind, unit_behind, old, smem, own, ask);
        most_of_D = most;
    } else {
        tokens_bwd<true>(D, most_of_D, unit_of_D, behind, unit_behind, old, smem, own, ask);
    }
}

__device__ __forceinline__ void cluster_arrive(void) {
#if __CUDA_ARCH__ >= 900
    mn_cluster_arrive();
#endif
}

__device__ __forceinline__ void cluster_wait(void) {
#if __CUDA_ARCH__ >= 900
    mn_cluster_wait();
#endif
}

template <int ROW_WARPS, bool WHOLE>
__global__ void __launch_bounds__(sizes<ROW_WARPS>::THREADS, ROW_WARPS == 4 ? 1 : 2)
longhorn_diag_bwd_products(const __grid_constant__ mn_column_params p,
                           const __grid_constant__ whole_grads grads, int64_t tiles) {
    typedef sizes<ROW_WARPS> size;
    extern __shared__ __align__(128) unsigned char diag_bytes[];
    smem_of<ROW_WARPS> &smem = *(smem_of<ROW_WARPS> *)diag_bytes;
    inbox &box = *(inbox *)(diag_bytes + sizeof(smem));
    const bool shared = WHOLE && tiles == 2;
    if (shared) {
        if (threadIdx.x == 0) box.open();
        cluster_arrive();
    }
    const mn_column_coord at = mn_column_block_coord(p, tiles);
    const int64_t length = at.span.length, groups = (length + GROUP - 1) / GROUP;
    const int64_t stride = p.call.H * tiles * size::PACKS;
    const int64_t slot = p.call.cu_seqlens ? at.span.t0 / GROUP + at.n : at.n * groups;
    uint4 *saved = (uint4 *)p.spans + slot * stride + (at.h * tiles + at.tile) * size::PACKS;
    const bool brings = __shfl_sync(0xffffffffu, warp_coord::warp() < size::LOADERS, 0);
    cells D;
    pairs behind;
    float most_of_D = 0.0f, unit_of_D = 1.0f, unit = 1.0f;
    if (shared) cluster_wait();
    float unit_behind = 1.0f;
    if (groups > 0) {
        unit_behind = save_states<ROW_WARPS>(behind, saved, stride, smem, p, at, groups);
    }
    D.load(p, at, p.cot_state);
    if (groups > 0) {
        const lane_places<ROW_WARPS> places;
        prefetch<ROW_WARPS> ahead(p, at, (groups - 1) * GROUP);
        const auto ask = [&](int64_t n) {
#pragma unroll
            for (int r = 0; r < 2; r++) {
                const int place = r * size::THREADS + (int)threadIdx.x;
                cp_async(smem.states[GROUP - 2] + place, saved + n * stride + place);
            }
            unit = ((const float *)(saved + n * stride + size::CELLS))[warp_coord::warp()];
        };
        ask(groups - 1);
        if (brings) {
            ahead.template fetch<true>(p, at);
            ahead.put_back(smem, p.scale);
        }
        cp_async_wait();
        __syncthreads();
#pragma unroll 1
        for (int64_t n = groups - 1, looks = 0; n >= 0; n--, looks++) {
            const float own = unit;
            if (brings && n > 0) {
                ahead.template move<-1>(p);
                ahead.template fetch<true>(p, at);
            }
            group_bwd<ROW_WARPS>(D, most_of_D, unit_of_D, looks % 4 == 0, behind, unit_behind, own,
                                 smem,
                                 places, [&]() { if (n > 0) ask(n - 1); });
            warp_sums<ROW_WARPS> sums;
            if (!brings) sums.load(smem.in);
            __syncthreads();
            const int count = (int)min((int64_t)GROUP, length - n * GROUP);
            if (brings) {
                if (n > 0) ahead.put_back(smem, p.scale);
            } else if constexpr (WHOLE) {
                sums.finish(smem, box, p, grads, at, n * GROUP, count, shared, looks);
            } else {
                sums.reduce(smem, p, at, n * GROUP, count);
            }
            cp_async_wait();
            __syncthreads();
        }
    }
    D.rescale(unit_of_D, 1.0f);
    D.store(p, at, p.dstate0);
    if (shared) cluster_arrive(), cluster_wait();    // what this block sent has come
}

/* ---- launch ---------------------------------------------------------------------------------- */

static int row_warps(const mn_call &c) { return c.K <= 64 ? 2 : 4; }

bool supported(const mn_call &c) {
    const int limit = mn_device_props_current().shared_bytes;
    if (c.dtype != MN_BF16 || c.K > 128) return false;
    return (int)(row_warps(c) == 2 ? sizeof(smem_of<2>) : sizeof(smem_of<4>)) <= limit;
}

bool saved_size(size_t *count, const mn_call &c) {
    const size_t floats = 4 * (size_t)(row_warps(c) == 2 ? sizes<2>::PACKS : sizes<4>::PACKS);
    return mn_mul_size(count, (size_t)mn_tile_slots(c, GROUP), floats) &&
           mn_mul_size(count, *count, (size_t)mn_ceil_div(c.V, (int64_t)TILE)) &&
           mn_mul_size(count, *count, (size_t)c.H);
}

bool makes_whole(const mn_call &c) {
    return supported(c) && row_warps(c) == 4 && c.V <= 2 * TILE && mn_device_is_sm90();
}

template <int ROW_WARPS, bool WHOLE>
static int launch_with(const mn_column_params &p, const whole_grads &grads, cudaStream_t on) {
    const int64_t tiles = mn_ceil_div(p.columns, (int64_t)TILE);
    const int64_t blocks = tiles * p.call.H * mn_n_spans(p.call);
    const size_t bytes = sizeof(smem_of<ROW_WARPS>) + (WHOLE ? sizeof(inbox) : 0);
    if (blocks == 0) return cudaSuccess;
    if (blocks > INT32_MAX) return cudaErrorNotSupported;
    const cudaError_t code =
        cudaFuncSetAttribute(longhorn_diag_bwd_products<ROW_WARPS, WHOLE>,
                             cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes);
    if (code != cudaSuccess) return code;
    cudaLaunchAttribute cluster = {};
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim.x = (unsigned)tiles;
    cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3((unsigned)blocks), config.blockDim = dim3(sizes<ROW_WARPS>::THREADS);
    config.dynamicSmemBytes = bytes, config.stream = on;
    config.attrs = &cluster, config.numAttrs = WHOLE && tiles == 2 ? 1 : 0;
    return cudaLaunchKernelEx(&config, longhorn_diag_bwd_products<ROW_WARPS, WHOLE>, p, grads,
                              tiles);
}

int launch(mn_column_params p, const whole_grads &grads, cudaStream_t on) {
    const int warps = row_warps(p.call);
    p.vec_aligned = mn_columns_vec_aligned<mn_bf16>(p, warps);
    if (makes_whole(p.call)) return launch_with<4, true>(p, grads, on);
    return warps == 2 ? launch_with<2, false>(p, grads, on) : launch_with<4, false>(p, grads, on);
}

}    // namespace mneme::longhorn::diag
