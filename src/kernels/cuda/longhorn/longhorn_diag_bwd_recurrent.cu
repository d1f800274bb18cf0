/* longhorn_diag_bwd_recurrent.cu - gradients of longhorn_diag in bf16, for keys of at most 128
 * channels. With c = 1 - w k^2, S the state in front of a token, S' the one behind it, and D the
 * adjoint of S':
 *
 *   D += scale q do'     dq = scale S' do     E = D . S     D <- c D
 *   dv_j = w (D'k)_j     y_j = v (D'k)_j - (E'k^2)_j     dk_i = (D w v)_i - 2 k_i (E w)_i
 *
 * What a cell does to itself is float32; all sums over columns and rows are products of the three
 * matrices S', D and E, rounded to half precision, with a vector each, m16n8k16 with the same
 * vector in all columns. So every lane ends with sums, and tokens share no product: what is not
 * finite stays with its token. Bf16 would not do: y is a difference. So that half precision has
 * the range, a warp's part of S and of D is kept in a unit, a power of two that is made larger
 * before a bound of the largest cell gets too large, and every vector is in a unit of its own;
 * which unit it is goes by tokens already seen.
 *
 * A warp has 32 x 32 cells, a lane four rows by eight columns of them, which are the factors of
 * products over columns as they lie in registers. Sums over rows are first those of a lane's own
 * four, in half precision, which movmatrix turns: what goes through shared memory's pipe, movmatrix
 * with it, is what this kernel waits for. For the same reason a lane's columns of do, and of w, are
 * read once, as factors or as numbers, and made the other.
 *
 * The state in front of every eighth token goes to memory on a first way through, in half
 * precision. Going back, half of the warps make a group's eight states from it, in shared memory,
 * while the other half has the adjoint of the group behind: pairs of warps with the same cells, so
 * that only they wait for each other. A state's place is free for one of the next group when the
 * adjoint has passed it. The first half also brings tokens and adds up the sums of warps. */
#include "kernels/cuda/longhorn/longhorn_diag_bwd.h"

#include <cuda_fp16.h>
#include <float.h>

#include "kernels/cuda/prim/device_props.h"
#include "kernels/cuda/prim/mbarrier.cuh"
#include "kernels/cuda/prim/sync.cuh"

namespace mneme::longhorn::diag {

using namespace recurrent;

enum { GROUP = 8, TILE = MN_COLUMNS_TILE };    // tokens; columns of a block

/* Of a block with ROW_WARPS pairs of warps along the rows and two along the columns; of its warps
 * with one role. */
template <int ROW_WARPS>
struct sizes {
    static constexpr int WARPS = 2 * ROW_WARPS, THREADS = 32 * WARPS, ROWS = 32 * ROW_WARPS;
    static constexpr int TOKENS = GROUP / WARPS;    // which a warp loads
    static constexpr int CELLS = 4 * THREADS;       // packs of 16 bytes: a state
    static constexpr int PACKS = CELLS + 2;         // and its warps' units
};

/* A token as cells and their sums want it: a lane has four rows side by side and twice four
 * columns. */
template <int ROW_WARPS>
struct token_smem {
    static constexpr int ROWS = sizes<ROW_WARPS>::ROWS;
    alignas(16) mn_bf16 k[ROWS], q[ROWS];
    alignas(16) float squares[ROWS];              // k^2 and the unit of w
    alignas(16) float w[TILE];                    // in its unit
    alignas(16) float write[TILE];                // w v
    alignas(16) unsigned cot_write[TILE / 4][4];  // factors: do and w v of four columns
    alignas(16) unsigned k_pair[ROWS];            // and k, k^2 / 8, both in the unit of k
    alignas(4) mn_bf16 v[TILE];
    float cot_unit, write_unit, w_unit, k_unit;
    float grow, read;    // bounds of what a token adds to S and to D
    float q_unit;        // scale times the unit of do
};

/* ---- products -------------------------------------------------------------------------------- */

/* A lane's cells as factors: pair p of the four of row r is number r % 2 + p % 2 * 2 of factor
 * r / 2 * 2 + p / 2, whose four numbers have to lie side by side. */
typedef unsigned pairs[4][4];

__device__ constexpr int row_in(int factor, int n) { return factor / 2 * 2 + n % 2; }
__device__ constexpr int pair_in(int factor, int n) { return factor % 2 * 2 + n / 2; }

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

/* sum += A b */
__device__ __forceinline__ void mma_add(float (&sum)[4], const unsigned (&a)[4], unsigned b0,
                                        unsigned b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
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

__device__ __forceinline__ void cp_async(void *smem, const void *from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;"
                 ::"r"((unsigned)__cvta_generic_to_shared(smem)), "l"(from) : "memory");
}

__device__ __forceinline__ void cp_async_wait(void) {
    asm volatile("cp.async.wait_all;" ::: "memory");
}

/* Sums over this warp's columns for the lane's four rows. */
__device__ __forceinline__ float4 rows_times(const pairs &a, uint2 b0, uint2 b1) {
    float x[2][4];
#pragma unroll
    for (int m = 0; m < 2; m++) {
        mma_zero(x[m], a[2 * m], b0.x, b0.y);
        mma_add(x[m], a[2 * m + 1], b1.x, b1.y);
    }
    return make_float4(x[0][0], x[0][2], x[1][0], x[1][2]);
}

/* Sums over this warp's rows for four columns, those of column_place; `by` has the same number
 * twice, that of each row. */
__device__ __forceinline__ float4 columns_times(const pairs &a, const unsigned (&by)[4]) {
    unsigned turned[4];
    float x[2][4];
#pragma unroll
    for (int p = 0; p < 4; p++) {
        unsigned sum = multiply(a[p / 2][p % 2 * 2], by[0]);
#pragma unroll
        for (int r = 1; r < 4; r++) {
            sum = multiply_add(a[r / 2 * 2 + p / 2][r % 2 + p % 2 * 2], by[r], sum);
        }
        turned[p] = transpose(sum);
    }
#pragma unroll
    for (int m = 0; m < 2; m++) mma_sums(x[m], turned[2 * m], turned[2 * m + 1]);
    return make_float4(x[0][0], x[0][2], x[1][0], x[1][2]);
}

/* ---- units ----------------------------------------------------------------------------------- */

/* Cell in its unit: sums of four of E, a product of two, times k^2 / 8, stay below 65504. */
constexpr float LARGEST = 128.0f;

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

/* ---- tokens ---------------------------------------------------------------------------------- */

/* A thread among those of its role, and its warp's part of the block's cells, 32 x 32 from this row
 * and column on. */
template <int ROW_WARPS>
struct role_coord {
    __device__ static int thread() { return threadIdx.x % sizes<ROW_WARPS>::THREADS; }
    __device__ static int warp() { return thread() / 32; }
    __device__ static int row() { return thread() / 64 * 32; }
    __device__ static int column() { return thread() / 32 % 2 * 32; }
};

/* The lane's row r of four and column c of eight, of the warp's. */
__device__ inline int own_row(int r) { return threadIdx.x % 32 / 4 * 4 + r; }
__device__ inline int own_column(int c) { return 16 * (c / 4) + threadIdx.x % 4 * 4 + c % 4; }

/* Where a lane leaves the sum of column j of a block: its four side by side. */
__device__ inline int column_place(int j) {
    const int pack = 2 * (j % 16 / 4) + j % 2;
    return j / 32 * 32 + 4 * pack + 2 * (j % 32 / 16) + j % 4 / 2;
}

/* Two groups' tokens, the one's adjoint is made and the next one's states; of a state, which group
 * it is of by turns. */
template <int ROW_WARPS>
struct smem_of {
    typedef sizes<ROW_WARPS> size;
    token_smem<ROW_WARPS> in[2][GROUP];
    alignas(16) float row_sums[2][GROUP][3][size::ROWS];      // S' do, D w v, E w
    alignas(16) float column_sums[ROW_WARPS][GROUP][2][TILE]; // D'k, E'k^2
    float state_unit[2][size::WARPS][GROUP + 1];    // in front of tokens and behind all
    float adjoint_unit[size::WARPS][GROUP];         // of D
    uint4 states[GROUP + 1][size::CELLS];
    uint64_t made[size::WARPS], taken[size::WARPS][GROUP / 2];
};

/* Where the state in front of a token of the group of this turn is: what the last turn is done with
 * makes room for the next in turn, last token first, and one place more is free. */
__device__ inline int state_slot(int turn, int token) { return turn % 2 ? GROUP - token : token; }

/* Units of a token's w and do, and the bits of the largest of do and w v. */
struct column_units {
    float w, cot;
    unsigned most_cot, most_written;
};

/* Eight tokens on their way, as they were stored; a warp loads some of them. */
template <int ROW_WARPS>
struct prefetch {
    typedef sizes<ROW_WARPS> size;
    static constexpr int ITEMS = size::ROWS / 32;
    mn_column_raw<ITEMS, mn_bf16> k[size::TOKENS], q[size::TOKENS];
    mn_column_raw<2, mn_bf16> v[size::TOKENS], beta[size::TOKENS], cot[size::TOKENS];

    /* Those of the group whose first token is t. */
    template <bool BACK>
    __device__ void fetch(const mn_column_params &p, const mn_column_coord &at, int64_t t) {
        const int64_t first = t + role_coord<ROW_WARPS>::warp() * size::TOKENS;
        const int row = threadIdx.x % 32 * ITEMS, b = (int)at.span.b, h = (int)at.h;
        const int j = (int)at.tile * TILE + threadIdx.x % 32 * 2;
        const int left = (int)max(min(at.span.length - first, (int64_t)size::TOKENS), (int64_t)0);
#pragma unroll
        for (int n = 0; n < size::TOKENS; n++) {
            const int K = n < left ? (int)p.call.K : 0, V = n < left ? (int)p.call.V : 0;
            const int64_t when = at.span.t0 + first + n;
            k[n].fetch(mn_row<mn_bf16>(p.k, b, when, h), row, K, p.vec_aligned);
            v[n].fetch(mn_row<mn_bf16>(p.v, b, when, h), j, V, p.vec_aligned);
            beta[n].fetch(mn_row<mn_bf16>(p.beta, b, when, h), j, V, p.vec_aligned);
            if (!BACK) continue;
            q[n].fetch(mn_row<mn_bf16>(p.q, b, when, h), row, K, p.vec_aligned);
            cot[n].fetch(p.cot_o.data ? mn_row<mn_bf16>(p.cot_o, b, when, h) : NULL, j,
                         p.cot_o.data ? V : 0, p.vec_aligned);
        }
    }

    /* |k|^2, in all lanes */
    __device__ double norm(int n) const {
        double sum = 0.0;
#pragma unroll
        for (int i = 0; i < ITEMS; i++) sum += (double)k[n].at(i) * (double)k[n].at(i);
        for (int lanes = 16; lanes > 0; lanes >>= 1) {
            sum += __shfl_xor_sync(0xffffffffu, sum, lanes);
        }
        return sum;
    }

    /* A token's columns to shared memory. */
    template <bool BACK>
    __device__ column_units put_columns(token_smem<ROW_WARPS> &smem, int n, double all) const {
        const int pair = threadIdx.x % 32;
        float w[2], write[2], cots[2];
#pragma unroll
        for (int c = 0; c < 2; c++) {
            const float b = beta[n].at(c), u = 1.0f / (float)(1.0 + (double)b * all);
            w[c] = b * u, write[c] = w[c] * v[n].at(c);
            cots[c] = BACK ? cot[n].at(c) : 0.0f;
        }
        const float w_unit = unit_of(largest_of(w)), to_w = inverse_of(w_unit);
        const float own[2] = { to_w * w[0], to_w * w[1] };
        mn_store<2>(smem.w, 2 * pair, own);
        mn_store<2>(smem.write, 2 * pair, write);
        if (!BACK) return { w_unit, 0.0f, 0, 0 };
        const unsigned most = largest_of(cots), most_written = largest_of(write);
        const float cot_unit = wide_unit_of(most), write_unit = unit_of(most_written);
        const float to_cot = inverse_of(cot_unit), to_write = inverse_of(write_unit);
        unsigned *to = smem.cot_write[pair / 2] + pair % 2;
        to[0] = pair_of(to_cot * cots[0], to_cot * cots[1]);
        to[2] = pair_of(to_write * write[0], to_write * write[1]);
        *(unsigned *)&smem.v[2 * pair] = v[n].word[0];
        smem.cot_unit = cot_unit, smem.write_unit = write_unit;
        smem.w_unit = w_unit;
        return { w_unit, cot_unit, most, most_written };
    }

    /* And its rows. Where |k|^2 is too large for float32, nothing is a number. */
    template <bool BACK>
    __device__ void put_rows(token_smem<ROW_WARPS> &smem, float scale, int n,
                             double all, const column_units &of) const {
        const int row = threadIdx.x % 32 * ITEMS;
        const float w_unit = isinf((float)all) ? (float)all : of.w;
        float key[ITEMS], query[ITEMS], square[ITEMS], factors[ITEMS];
#pragma unroll
        for (int i = 0; i < ITEMS; i++) {
            key[i] = k[n].at(i), square[i] = key[i] * key[i] * w_unit;
            query[i] = BACK ? q[n].at(i) : 0.0f;
        }
        mn_store<ITEMS>(smem.k, row, key);
        mn_store<ITEMS>(smem.squares, row, square);
        if (!BACK) return;
        const unsigned most = largest_of(key);
        const float unit = unit_of(most);
        smem.k_unit = unit, smem.q_unit = scale * of.cot;
        smem.grow = __uint_as_float(most) * __uint_as_float(of.most_written);
        smem.read =
            fabsf(scale) * __uint_as_float(largest_of(query)) * __uint_as_float(of.most_cot);
#pragma unroll
        for (int i = 0; i < ITEMS; i++) {
            const float own = key[i] * inverse_of(unit);
            factors[i] = __uint_as_float(pair_of(own, 0.125f * (own * own)));
        }
        mn_store<ITEMS>((float *)smem.k_pair, row, factors);
        mn_store<ITEMS>(smem.q, row, query);
    }

    /* The tokens to shared memory. All threads of a role call; a barrier follows. */
    template <bool BACK>
    __device__ void put(token_smem<ROW_WARPS> (&smem)[GROUP], float scale) const {
#pragma unroll
        for (int n = 0; n < size::TOKENS; n++) {
            const double all = norm(n);
            token_smem<ROW_WARPS> &to = smem[role_coord<ROW_WARPS>::warp() * size::TOKENS + n];
            put_rows<BACK>(to, scale, n, all, put_columns<BACK>(to, n, all));
        }
    }
};

/* Four numbers of bf16 that lie side by side. */
__device__ __forceinline__ void load_four(float (&out)[4], const mn_bf16 *from) {
    const uint2 x = *(const uint2 *)from;
    out[0] = __uint_as_float(x.x << 16), out[1] = __uint_as_float(x.x & 0xffff0000u);
    out[2] = __uint_as_float(x.y << 16), out[3] = __uint_as_float(x.y & 0xffff0000u);
}

/* ---- cells ----------------------------------------------------------------------------------- */

/* A lane's four rows by eight columns. */
template <int ROW_WARPS>
struct cells {
    typedef role_coord<ROW_WARPS> coord;
    float at[4][8];

    template <typename F>
    __device__ void each(const mn_column_params &p, const mn_column_coord &place, F use) {
        const int64_t head = place.n * p.call.H + place.h;
#pragma unroll
        for (int n = 0; n < 32; n++) {
            const int64_t i = coord::row() + own_row(n / 8);
            const int64_t j = place.tile * TILE + coord::column() + own_column(n % 8);
            use(at[n / 8][n % 8], (head * p.call.K + i) * p.call.V + j,
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

    __device__ __forceinline__ void pack(pairs &to, float by = 1.0f) const {
#pragma unroll
        for (int f = 0; f < 4; f++) {
#pragma unroll
            for (int n = 0; n < 4; n++) {
                const float(&row)[8] = at[row_in(f, n)];
                const int c = 2 * pair_in(f, n);
                to[f][n] = pair_of(row[c] * by, row[c + 1] * by);
            }
        }
    }

    __device__ __forceinline__ void unpack(const pairs &from) {
#pragma unroll
        for (int f = 0; f < 4; f++) {
#pragma unroll
            for (int n = 0; n < 4; n++) {
                const float2 x = __half22float2(*(const __half2 *)&from[f][n]);
                float(&row)[8] = at[row_in(f, n)];
                row[2 * pair_in(f, n)] = x.x, row[2 * pair_in(f, n) + 1] = x.y;
            }
        }
    }

    /* One token: a state becomes the one behind it, in units of which `inverse` is the inverse. */
    __device__ __forceinline__ void advance(const token_smem<ROW_WARPS> &in, float inverse) {
        const int first = coord::row() + own_row(0);
        float keys[4], squares[4], weights[4], writes[4];
        load_four(keys, in.k + first);
        mn_load<4>(squares, in.squares, first);
#pragma unroll
        for (int r = 0; r < 4; r++) keys[r] *= inverse;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int j = coord::column() + own_column(4 * half);
            mn_load<4>(weights, in.w, j);
            mn_load<4>(writes, in.write, j);
#pragma unroll
            for (int n = 0; n < 16; n++) {
                const int r = n / 4, c = n % 4;
                float &cell = at[r][4 * half + c];
                cell = fmaf(-(weights[c] * squares[r]), cell, fmaf(keys[r], writes[c], cell));
            }
        }
    }

    /* An adjoint takes what a token reads: cots of this lane's columns. */
    __device__ __forceinline__ void take(const token_smem<ROW_WARPS> &in, float inverse,
                                         const unsigned (&cots)[4]) {
        float queries[4];
        const float by = fminf(in.q_unit * inverse, FLT_MAX);
        load_four(queries, in.q + coord::row() + own_row(0));
#pragma unroll
        for (int r = 0; r < 4; r++) queries[r] *= by;
#pragma unroll
        for (int p = 0; p < 4; p++) {
            const float2 cot = __half22float2(*(const __half2 *)&cots[p]);
#pragma unroll
            for (int r = 0; r < 4; r++) {
                at[r][2 * p] = fmaf(queries[r], cot.x, at[r][2 * p]);
                at[r][2 * p + 1] = fmaf(queries[r], cot.y, at[r][2 * p + 1]);
            }
        }
    }

    /* And goes in front of it. */
    __device__ __forceinline__ void decay(const token_smem<ROW_WARPS> &in,
                                          const float (&weights)[2][4]) {
        float squares[4];
        mn_load<4>(squares, in.squares, coord::row() + own_row(0));
#pragma unroll
        for (int n = 0; n < 32; n++) {
            float &cell = at[n / 8][n % 8];
            cell = fmaf(-(weights[n % 8 / 4][n % 4] * squares[n / 8]), cell, cell);
        }
    }

    /* From one unit to another. */
    __device__ __forceinline__ void rescale(float from, float to) {
        const float inverse = inverse_of(to);
#pragma unroll
        for (int n = 0; n < 32; n++) at[n / 8][n % 8] = at[n / 8][n % 8] * from * inverse;
    }

    /* The bits of the warp's largest cell, of those that are finite. */
    __device__ __forceinline__ unsigned largest() const {
        float most = 0.0f;
#pragma unroll
        for (int n = 0; n < 32; n++) most = fmaxf(most, fabsf(at[n / 8][n % 8]));
        const unsigned bits = __reduce_max_sync(0xffffffffu, __float_as_uint(most));
        if (bits < 0x7f800000u) return bits;
        unsigned finite = 0;
#pragma unroll
        for (int n = 0; n < 32; n++) finite = max(finite, size_of(at[n / 8][n % 8]));
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

template <int THREADS>
__device__ __forceinline__ void store_packed(uint4 *to, const pairs &x) {
#pragma unroll
    for (int f = 0; f < 4; f++) {
        to[f * THREADS + threadIdx.x % THREADS] = make_uint4(x[f][0], x[f][1], x[f][2], x[f][3]);
    }
}

template <int THREADS>
__device__ __forceinline__ void load_packed(pairs &x, const uint4 *from) {
#pragma unroll
    for (int f = 0; f < 4; f++) {
        const uint4 vec = from[f * THREADS + threadIdx.x % THREADS];
        x[f][0] = vec.x, x[f][1] = vec.y, x[f][2] = vec.z, x[f][3] = vec.w;
    }
}

/* ---- gradients ------------------------------------------------------------------------------- */

/* Where a lane leaves a token's sums: over columns, each by another lane of those that have them
 * all, and over rows; and the unit of its warp's. */
template <int ROW_WARPS>
struct sums_place {
    float *rows, *columns, *unit;

    __device__ sums_place(smem_of<ROW_WARPS> &smem, int token) {
        typedef role_coord<ROW_WARPS> coord;
        const int across = coord::warp() % 2, down = coord::warp() / 2, part = threadIdx.x % 4;
        rows = smem.row_sums[across][token][part % 3] + coord::row() + own_row(0);
        columns = smem.column_sums[down][token][0] + 32 * across + threadIdx.x % 32 / 4 * 4;
        unit = &smem.adjoint_unit[coord::warp()][token];
    }

    __device__ __forceinline__ void back(void) {
        rows -= 3 * sizes<ROW_WARPS>::ROWS, columns -= 2 * TILE, unit--;
    }

    __device__ __forceinline__ void leave(float4 to_q, float4 to_k, float4 to_kk) const {
        const int part = threadIdx.x % 4;
        if (part == 0) *(float4 *)rows = to_q;
        if (part == 1) *(float4 *)rows = to_k;
        if (part == 2) *(float4 *)rows = to_kk;
    }

    __device__ __forceinline__ void leave(float4 to_v, float4 to_w) const {
        const int part = threadIdx.x % 4;
        if (part == 3) *(float4 *)columns = to_v;
        if (part == 0) *(float4 *)(columns + TILE) = to_w;
    }
};

/* Sums of a token, from the states behind and in front of it. */
template <int ROW_WARPS>
__device__ __forceinline__ void token_bwd(cells<ROW_WARPS> &D, const pairs &behind,
                                          const pairs &front, const token_smem<ROW_WARPS> &in,
                                          sums_place<ROW_WARPS> &sums, float &bound,
                                          float &unit) {
    typedef role_coord<ROW_WARPS> coord;
    const int column = coord::column() + own_column(0);
    const uint4 b0 = *(const uint4 *)in.cot_write[column / 4];
    const uint4 b1 = *(const uint4 *)in.cot_write[column / 4 + 4];
    const uint4 keys = *(const uint4 *)(in.k_pair + coord::row() + own_row(0));
    const unsigned own[4] = { keys.x, keys.y, keys.z, keys.w };
    const unsigned cots[4] = { b0.x, b0.y, b1.x, b1.y };
    const float4 to_q = rows_times(behind, make_uint2(b0.x, b0.y), make_uint2(b1.x, b1.y));
    pairs read, product;
    unsigned k[4], kk[4];
    float w[2][4];
    D.make_room(bound, unit, in.read);
    D.take(in, inverse_of(unit), cots);
    D.pack(read);
    *sums.unit = unit;
#pragma unroll
    for (int n = 0; n < 16; n++) {
        product[n / 4][n % 4] = multiply(read[n / 4][n % 4], front[n / 4][n % 4]);
    }
#pragma unroll
    for (int half = 0; half < 2; half++) mn_load<4>(w[half], in.w, column + 16 * half);
    D.decay(in, w);
    const float4 to_k = rows_times(read, make_uint2(b0.z, b0.w), make_uint2(b1.z, b1.w));
    const float4 to_kk =
        rows_times(product, make_uint2(pair_of(w[0][0], w[0][1]), pair_of(w[0][2], w[0][3])),
                   make_uint2(pair_of(w[1][0], w[1][1]), pair_of(w[1][2], w[1][3])));
    sums.leave(to_q, to_k, to_kk);
#pragma unroll
    for (int r = 0; r < 4; r++) k[r] = twice_low(own[r]), kk[r] = twice_high(own[r]);
    sums.leave(columns_times(read, k), columns_times(product, kk));
    sums.back();
}

/* dq and dk of row i of a token, `part` where dq is. */
template <int ROW_WARPS>
__device__ inline void reduce_row(float *part, const smem_of<ROW_WARPS> &smem,
                                  const token_smem<ROW_WARPS> &in, int turn, float scale, int64_t K,
                                  int token, int i) {
    float to_q = 0.0f, to_k = 0.0f, to_kk = 0.0f;
#pragma unroll
    for (int across = 0; across < 2; across++) {
        const float *sums = smem.row_sums[across][token][0] + i;
        const float *units = smem.state_unit[turn % 2][i / 32 * 2 + across] + token;
        const float unit = smem.adjoint_unit[i / 32 * 2 + across][token];
        to_q = fmaf(sums[0], units[1], to_q);
        to_k = fmaf(sums[sizes<ROW_WARPS>::ROWS], unit, to_k);
        to_kk = fmaf(sums[2 * sizes<ROW_WARPS>::ROWS] * units[0], unit, to_kk);
    }
    part[0] = scale * (to_q * in.cot_unit);
    part[K] = fmaf(-2.0f * mn_float(in.k[i]), to_kk * in.w_unit,
                   to_k * in.write_unit);
}

/* y and dv of a column of a token. */
template <int ROW_WARPS>
__device__ inline void reduce_column(float &y, float &dv, const smem_of<ROW_WARPS> &smem,
                                     const token_smem<ROW_WARPS> &in, int turn, int token,
                                     int column) {
    float to_v = 0.0f, to_w = 0.0f;
#pragma unroll
    for (int down = 0; down < ROW_WARPS; down++) {
        const int warp = 2 * down + column / 32;
        const float *sums = smem.column_sums[down][token][0] + column_place(column);
        const float unit = smem.adjoint_unit[warp][token];
        to_v = fmaf(sums[0], unit, to_v);
        to_w = fmaf(sums[TILE] * smem.state_unit[turn % 2][warp][token], unit, to_w);
    }
    const float key = in.k_unit;
    to_v *= key;
    y = fmaf(mn_float(in.v[column]), to_v, -8.0f * (to_w * key * key));
    dv = in.w[column] * in.w_unit * to_v;
}

/* Adds the warps' sums of half of a group, of which `count` tokens from token t on there are. All
 * threads of a role call. */
template <int ROW_WARPS>
__device__ inline void reduce_warps(const smem_of<ROW_WARPS> &smem, const mn_column_params &p,
                                    const mn_column_coord &at, int64_t t, int count, int turn,
                                    int half) {
    typedef sizes<ROW_WARPS> size;
    constexpr int HALF = GROUP / 2, AT_ONCE = size::THREADS / size::ROWS;
    constexpr int COLUMNS_AT_ONCE = size::THREADS / TILE;
    const token_smem<ROW_WARPS> (&in)[GROUP] = smem.in[turn % 2];
    const int64_t all = p.call.B * p.call.T * p.call.H, K = p.call.K;
    const int thread = role_coord<ROW_WARPS>::thread();
    const int first = half * HALF + thread / size::ROWS, i = thread % size::ROWS;
    float *part = p.partials + (at.tile * all + mn_columns_row(p, at, t + first)) * 2 * K + i;
#pragma unroll 1
    for (int n = 0; n < HALF; n += AT_ONCE, part += AT_ONCE * p.call.H * 2 * K) {
        if (i < K && first + n < count) {
            reduce_row(part, smem, in[first + n], turn, p.scale, K, first + n, i);
        }
    }
    const int own = half * HALF + thread / TILE, column = thread % TILE;
    const int64_t j = at.tile * TILE + column;
    float *y = p.y + mn_columns_row(p, at, t + own) * p.columns + j;
    mn_bf16 *dv = mn_row<mn_bf16>(p.dv, at.span.b, at.span.t0 + t + own, at.h);
#pragma unroll
    for (int n = 0; n < HALF; n += COLUMNS_AT_ONCE) {
        float to_v;
        if (j >= p.columns || own + n >= count) continue;
        reduce_column(y[n * p.call.H * p.columns], to_v, smem, in[own + n], turn,
                      own + n, column);
        if (dv) mn_put(dv + n * p.dv.stride[1] + j, to_v);
    }
}

/* mn_mbarrier_wait, on machines from 8.0 on. */
__device__ __forceinline__ void wait_for(const uint64_t *mbar, int phase) {
#if __CUDA_ARCH__ >= 900
    mn_mbarrier_wait(mbar, phase);
#else
    asm volatile("{\n\t.reg .pred done;\n"
                 "again:\n\t"
                 "mbarrier.test_wait.parity.shared.b64 done, [%0], %1;\n\t"
                 "@!done bra again;\n\t}" ::"r"(mn_smem_addr(mbar)), "r"(phase) : "memory");
#endif
}

/* ---- roles ----------------------------------------------------------------------------------- */

/* Half of a block makes states, the other one adjoints, in pairs of warps that have the same cells.
 * Named barriers: sums of half a group are there, and have been added; tokens are in place. */
enum { BARRIER_SUMS = 1, BARRIER_ADDED = 3, BARRIER_TOKENS = 5 };

/* Where a head's states in front of groups go. */
template <int ROW_WARPS>
struct saved_states {
    typedef sizes<ROW_WARPS> size;
    uint4 *first;
    int64_t stride;

    __device__ saved_states(const mn_column_params &p, const mn_column_coord &at, int64_t tiles,
                            int64_t groups) {
        const int64_t slot = p.call.cu_seqlens ? at.span.t0 / GROUP + at.n : at.n * groups;
        stride = p.call.H * tiles * size::PACKS;
        first = (uint4 *)p.spans + slot * stride + (at.h * tiles + at.tile) * size::PACKS;
    }

    __device__ float &unit(int64_t n) const {
        return ((float *)(first + n * stride + size::CELLS))[role_coord<ROW_WARPS>::warp()];
    }
};

/* Those that make states: those in front of groups on a first way, to memory; then, back, all of
 * a group's, while the adjoint goes through the one behind it, whose sums they add. */
template <int ROW_WARPS>
struct state_role {
    typedef sizes<ROW_WARPS> size;
    typedef role_coord<ROW_WARPS> coord;
    smem_of<ROW_WARPS> &smem;
    const mn_column_params &p;
    const mn_column_coord &at;
    const saved_states<ROW_WARPS> saved;
    const int64_t groups;
    cells<ROW_WARPS> S;
    float unit_behind;

    __device__ __forceinline__ float pack(pairs &packed) const {
        const float unit = unit_of(S.largest());
        S.pack(packed, inverse_of(unit));
        return unit;
    }

    /* The last state is left where the adjoint begins. */
    __device__ __forceinline__ void save() {
        pairs packed;
        S.load(p, at, p.state0);
#pragma unroll 1
        for (int64_t n = 0; n < groups; n++) {
            __syncthreads();
            saved.unit(n) = pack(packed);
            store_packed<size::THREADS>(saved.first + n * saved.stride, packed);
#pragma unroll 2
            for (int token = 0; token < GROUP; token++) S.advance(smem.in[n % 2][token], 1.0f);
        }
        unit_behind = pack(packed);
        store_packed<size::THREADS>(smem.states[GROUP], packed);
        __syncthreads();
    }

    /* Waits until the adjoint has taken the states of its `turn` whose places are the next for this
     * token and the one behind it. */
    __device__ void wait_taken(int turn, int token) const {
        if (turn >= 0) wait_for(&smem.taken[coord::warp()][token / 2], turn % 2);
    }

    __device__ void ask(int64_t n, int turn) const {
#pragma unroll
        for (int r = 0; r < 4; r++) {
            const int place = r * size::THREADS + coord::thread();
            cp_async(smem.states[state_slot(turn, 0)] + place,
                     saved.first + n * saved.stride + place);
        }
    }

    __device__ void add_sums(int turn, int half) const {
        const int64_t n = groups - 1 - turn;
        const int count = (int)min((int64_t)GROUP, at.span.length - n * GROUP);
        mn_named_barrier_sync(BARRIER_SUMS + half, 2 * size::THREADS);
        reduce_warps(smem, p, at, n * GROUP, count, turn, half);
        mn_named_barrier_arrive(BARRIER_ADDED + half, 2 * size::THREADS);
    }

    /* The states of a group but the first, from that one, in its unit. */
    __device__ __forceinline__ void make(int turn, float unit) {
        const token_smem<ROW_WARPS> *in = smem.in[turn % 2];
        float *units = smem.state_unit[turn % 2][coord::warp()], bound = 2.0f;
        pairs packed;
        load_packed<size::THREADS>(packed, smem.states[state_slot(turn, 0)]);
        S.unpack(packed);
        units[0] = unit, units[GROUP] = unit_behind, unit_behind = unit;
#pragma unroll 1
        for (int pair = 0; pair < GROUP; pair += 2) {
            if (pair == GROUP / 2 && turn > 0) add_sums(turn - 1, 1);
            if (pair > 0) {
                wait_taken(turn - 1, pair);
                advance(in[pair - 1], units, pair, turn, bound, unit);
            }
            advance(in[pair], units, pair + 1, turn, bound, unit);
        }
    }

    /* Makes the state in front of this token. */
    __device__ __forceinline__ void advance(const token_smem<ROW_WARPS> &in, float *units,
                                            int token, int turn, float &bound, float &unit) {
        pairs packed;
        S.make_room(bound, unit, in.grow);
        S.advance(in, inverse_of(unit));
        S.pack(packed);
        units[token] = unit;
        store_packed<size::THREADS>(smem.states[state_slot(turn, token)], packed);
    }

    __device__ __forceinline__ void back() {
        prefetch<ROW_WARPS> ahead;
        float unit = saved.unit(groups - 1);
        ask(groups - 1, 0);
        ahead.template fetch<true>(p, at, (groups - 1) * GROUP);
        ahead.template put<true>(smem.in[0], p.scale);
#pragma unroll 1
        for (int turn = 0; turn < groups; turn++) {
            const int64_t next = groups - 2 - turn;
            const float own = unit;
            if (next >= 0) {
                ahead.template fetch<true>(p, at, next * GROUP);
                unit = saved.unit(next);
            }
            cp_async_wait();
            mn_named_barrier_sync(BARRIER_TOKENS, size::THREADS);
            make(turn, own);
            mn_mbarrier_arrive_warp(&smem.made[coord::warp()]);
            if (turn > 0) add_sums(turn - 1, 0);
            mn_named_barrier_sync(BARRIER_TOKENS, size::THREADS);
            if (next < 0) continue;
            wait_taken(turn, 0);
            ask(next, turn + 1);
            ahead.template put<true>(smem.in[(turn + 1) % 2], p.scale);
        }
        add_sums((int)groups - 1, 1);
        add_sums((int)groups - 1, 0);
    }
};

/* Those that bring tokens on the first way, and then make adjoints. */
template <int ROW_WARPS>
struct adjoint_role {
    typedef sizes<ROW_WARPS> size;
    typedef role_coord<ROW_WARPS> coord;
    smem_of<ROW_WARPS> &smem;
    const mn_column_params &p;
    const mn_column_coord &at;
    const int64_t groups;

    __device__ __forceinline__ void bring() const {
        prefetch<ROW_WARPS> ahead;
        ahead.template fetch<false>(p, at, 0);
#pragma unroll 1
        for (int64_t n = 0; n <= groups; n++) {
            if (n < groups) {
                ahead.template put<false>(smem.in[n % 2], p.scale);
                ahead.template fetch<false>(p, at, (n + 1) * GROUP);
            }
            __syncthreads();
        }
    }

    /* Once in four groups the unit of D is made that of its largest cell. */
    __device__ __forceinline__ void look(cells<ROW_WARPS> &D, float &bound, float &unit) const {
        const float most = __uint_as_float(D.largest()) * unit;
        const float next = unit_of(__float_as_uint(most));
        if (next != unit) D.rescale(unit, next);
        bound = most * inverse_of(next), unit = next;
    }

    __device__ __forceinline__ void back(cells<ROW_WARPS> &D, float &bound, float &unit) const {
        const int warp = coord::warp();
        pairs behind, old;
        load_packed<size::THREADS>(behind, smem.states[GROUP]);
#pragma unroll 1
        for (int turn = 0; turn < groups; turn++) {
            const token_smem<ROW_WARPS> *in = smem.in[turn % 2] + GROUP - 1;
            sums_place<ROW_WARPS> sums(smem, GROUP - 1);
            wait_for(&smem.made[warp], turn % 2);
            if (turn % 4 == 0) look(D, bound, unit);
            const uint4 *front = smem.states[state_slot(turn, GROUP - 1)];
            const int next = turn % 2 ? size::CELLS : -size::CELLS;    // that of the token before
#pragma unroll 1
            for (int token = GROUP - 1; token > 0; token -= 2) {
                const int half = token / (GROUP / 2);
                const bool first = token % (GROUP / 2) == GROUP / 2 - 1;
                load_packed<size::THREADS>(old, front);
                mn_mbarrier_arrive_warp(&smem.taken[warp][(GROUP - 1 - token) / 2]);
                if (first && turn > 0) {
                    mn_named_barrier_sync(BARRIER_ADDED + half, 2 * size::THREADS);
                }
                token_bwd(D, behind, old, *in--, sums, bound, unit);
                load_packed<size::THREADS>(behind, front += next);
                token_bwd(D, old, behind, *in--, sums, bound, unit);
                front += next;
                if (!first) mn_named_barrier_arrive(BARRIER_SUMS + half, 2 * size::THREADS);
            }
        }
    }
};

template <int ROW_WARPS>
__global__ void __launch_bounds__(2 * sizes<ROW_WARPS>::THREADS, ROW_WARPS == 4 ? 1 : 2)
longhorn_diag_bwd_products(const __grid_constant__ mn_column_params p, int64_t tiles) {
    typedef sizes<ROW_WARPS> size;
    extern __shared__ __align__(128) unsigned char diag_bytes[];
    smem_of<ROW_WARPS> &smem = *(smem_of<ROW_WARPS> *)diag_bytes;
    const mn_column_coord at = mn_column_block_coord(p, tiles);
    const int64_t groups = (at.span.length + GROUP - 1) / GROUP;
    const int role = __shfl_sync(0xffffffffu, (int)threadIdx.x / size::THREADS, 0);
    if (threadIdx.x < size::WARPS) {
        mn_mbarrier_init(&smem.made[threadIdx.x], 1);
#pragma unroll
        for (int n = 0; n < GROUP / 2; n++) mn_mbarrier_init(&smem.taken[threadIdx.x][n], 1);
    }
    __syncthreads();
    if (role == 0 && groups > 0) {
        const saved_states<ROW_WARPS> saved(p, at, tiles, groups);
        state_role<ROW_WARPS> states = { smem, p, at, saved, groups };
        states.save();
        states.back();
    } else if (role == 1) {
        const adjoint_role<ROW_WARPS> adjoints = { smem, p, at, groups };
        cells<ROW_WARPS> D;
        float bound = 0.0f, unit = 1.0f;
        D.load(p, at, p.cot_state);
        if (groups > 0) {
            adjoints.bring();
            adjoints.back(D, bound, unit);
        }
        D.rescale(unit, 1.0f);
        D.store(p, at, p.dstate0);
    }
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

template <int ROW_WARPS>
static int launch_with(const mn_column_params &p, cudaStream_t on) {
    const int64_t tiles = mn_ceil_div(p.columns, (int64_t)TILE);
    const int64_t blocks = tiles * p.call.H * mn_n_spans(p.call);
    if (blocks == 0) return cudaSuccess;
    if (blocks > INT32_MAX) return cudaErrorNotSupported;
    return mn_launch_smem(longhorn_diag_bwd_products<ROW_WARPS>, dim3((unsigned)blocks),
                          2 * sizes<ROW_WARPS>::THREADS, sizeof(smem_of<ROW_WARPS>), on, p, tiles);
}

int launch(mn_column_params p, cudaStream_t on) {
    const int warps = row_warps(p.call);
    p.vec_aligned = mn_columns_vec_aligned<mn_bf16>(p, warps);
    return warps == 2 ? launch_with<2>(p, on) : launch_with<4>(p, on);
}

}    // namespace mneme::longhorn::diag
