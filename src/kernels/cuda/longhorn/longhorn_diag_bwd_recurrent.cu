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
 * four, in half precision, which movmatrix turns: as little as can be goes through the pipe of
 * shared memory, movmatrix with it. So a lane's columns of do, and of w, are read once, as factors
 * or as numbers, and made the other.
 *
 * The state in front of every eighth token goes to memory on a first way through, in half
 * precision. Going back, states of eight tokens are made from it once and kept in shared memory, by
 * the lane that reads them, so that no barrier stands between; the one behind the last of them is
 * the next group's first. */
#include "kernels/cuda/longhorn/longhorn_diag_bwd.h"

#include <float.h>

#include "kernels/cuda/longhorn/longhorn_diag_fwd.h"
#include "kernels/cuda/longhorn/longhorn_diag_states.cuh"
#include "kernels/cuda/prim/device_props.h"

namespace mneme::longhorn::diag {

using namespace recurrent;

/* Whether the states are saved by products (longhorn_diag_fwd_recurrent.cu) instead of here. */
static constexpr bool SAVED_BY_PRODUCTS = true;

/* Of a block with ROW_WARPS warps along the rows and two along the columns. */
template <int ROW_WARPS>
struct sizes {
    static constexpr int WARPS = 2 * ROW_WARPS, THREADS = 32 * WARPS, ROWS = 32 * ROW_WARPS;
    static constexpr int TOKENS = GROUP / WARPS;    // which a warp loads
    static constexpr int CELLS = saved_state<ROW_WARPS>::CELLS;    // packs of 16 bytes: a state
};

/* Eight tokens as cells and their sums want them: a lane has four rows side by side and twice four
 * columns. */
template <int ROW_WARPS>
struct token_smem {
    static constexpr int ROWS = sizes<ROW_WARPS>::ROWS;
    alignas(16) mn_bf16 k[GROUP][ROWS], q[GROUP][ROWS];
    alignas(16) float squares[GROUP][ROWS];    // k^2 and the unit of w
    alignas(16) float w[GROUP][TILE];          // in its unit
    alignas(16) float write[GROUP][TILE];      // w v
    alignas(16) unsigned cot_write[GROUP][TILE / 4][4];    // factors: do and w v of four columns
    alignas(16) unsigned k_pair[GROUP][ROWS];    // and k, k^2 / 8, both in the unit of k
    alignas(4) mn_bf16 v[GROUP][TILE];
    float cot_unit[GROUP], write_unit[GROUP], w_unit[GROUP], k_unit[GROUP];
    float grow[GROUP], read[GROUP];    // bounds of what a token adds to S and to D
    float q_unit[GROUP];               // scale times the unit of do
};

/* ---- products -------------------------------------------------------------------------------- */

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

/* That in which such a number of bf16 is some 2^14: whatever is above 2^-17 of it is exact in half
 * precision, and far smaller ones are not zero. */
__device__ inline float wide_unit_of(unsigned bits) {
    return __uint_as_float(max(bits & 0x7f800000u, 27u << 23) - (14u << 23));
}

template <int N>
__device__ inline unsigned largest_of(const float (&x)[N]) {
    unsigned most = 0;
#pragma unroll
    for (int n = 0; n < N; n++) most = max(most, size_of(x[n]));
    return __reduce_max_sync(0xffffffffu, most);
}

/* ---- tokens ---------------------------------------------------------------------------------- */

/* A warp's part of the block's cells, 32 x 32 from this row and column on; a lane's place in it. */
struct warp_coord {
    __device__ static int row() { return threadIdx.x / 64 * 32; }
    __device__ static int column() { return threadIdx.x / 32 % 2 * 32; }
    __device__ static int eighth() { return threadIdx.x % 32 / 4; }
    __device__ static int quarter() { return threadIdx.x % 4; }
};

/* The lane's row r of four and column c of eight, of the warp's. */
__device__ inline int own_row(int r) { return warp_coord::eighth() * 4 + r; }
__device__ inline int own_column(int c) {
    return 16 * (c / 4) + 4 * warp_coord::quarter() + c % 4;
}

/* Where a lane leaves the sum of column j of a block: its four side by side. */
__device__ inline int column_place(int j) {
    const int pack = 2 * (j % 16 / 4) + j % 2;
    return j / 32 * 32 + 4 * pack + 2 * (j % 32 / 16) + j % 4 / 2;
}

template <int ROW_WARPS>
struct smem_of {
    typedef sizes<ROW_WARPS> size;
    token_smem<ROW_WARPS> in;
    alignas(16) float row_sums[2][GROUP][3][size::ROWS];      // S' do, D w v, E w
    alignas(16) float column_sums[ROW_WARPS][GROUP][2][TILE]; // D'k, E'k^2
    float state_unit[size::WARPS][GROUP + 1];    // of the states in front of tokens and behind all
    float adjoint_unit[size::WARPS][GROUP];      // of D
    uint4 front[2][size::CELLS];                 // state in front of a group
    uint4 states[GROUP - 1][size::CELLS];        // and of its other tokens
};

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
    const mn_bf16 *k_at, *q_at, *v_at, *beta_at, *cot_at;    // this lane's part of a first token
    int64_t left;                                            // tokens from there to the end

    /* At the group whose first token is t. */
    __device__ prefetch(const mn_column_params &p, const mn_column_coord &at, int64_t t) {
        const int64_t first = t + threadIdx.x / 32 * size::TOKENS, b = at.span.b, h = at.h;
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
    __device__ column_units put_columns(token_smem<ROW_WARPS> &smem, int n, int token,
                                        double all) const {
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
        mn_store<2>(smem.w[token], 2 * pair, own);
        mn_store<2>(smem.write[token], 2 * pair, write);
        if (!BACK) return { w_unit, 0.0f, 0, 0 };
        const unsigned most = largest_of(cots), most_written = largest_of(write);
        const float cot_unit = wide_unit_of(most), write_unit = unit_of(most_written);
        const float to_cot = inverse_of(cot_unit), to_write = inverse_of(write_unit);
        unsigned *to = smem.cot_write[token][pair / 2] + pair % 2;
        to[0] = pair_of(to_cot * cots[0], to_cot * cots[1]);
        to[2] = pair_of(to_write * write[0], to_write * write[1]);
        *(unsigned *)&smem.v[token][2 * pair] = v[n].word[0];
        smem.cot_unit[token] = cot_unit, smem.write_unit[token] = write_unit;
        smem.w_unit[token] = w_unit;
        return { w_unit, cot_unit, most, most_written };
    }

    /* And its rows. Where |k|^2 is too large for float32, nothing is a number. */
    template <bool BACK>
    __device__ void put_rows(token_smem<ROW_WARPS> &smem, float scale, int n, int token,
                             double all, const column_units &of) const {
        const int row = threadIdx.x % 32 * ITEMS;
        const float w_unit = isinf((float)all) ? (float)all : of.w;
        float key[ITEMS], query[ITEMS], square[ITEMS], factors[ITEMS];
#pragma unroll
        for (int i = 0; i < ITEMS; i++) {
            key[i] = k[n].at(i), square[i] = key[i] * key[i] * w_unit;
            query[i] = BACK ? q[n].at(i) : 0.0f;
        }
        mn_store<ITEMS>(smem.k[token], row, key);
        mn_store<ITEMS>(smem.squares[token], row, square);
        if (!BACK) return;
        const unsigned most = largest_of(key);
        const float unit = unit_of(most);
        smem.k_unit[token] = unit, smem.q_unit[token] = scale * of.cot;
        smem.grow[token] = __uint_as_float(most) * __uint_as_float(of.most_written);
        smem.read[token] =
            fabsf(scale) * __uint_as_float(largest_of(query)) * __uint_as_float(of.most_cot);
#pragma unroll
        for (int i = 0; i < ITEMS; i++) {
            const float own = key[i] * inverse_of(unit);
            factors[i] = __uint_as_float(pair_of(own, 0.125f * (own * own)));
        }
        mn_store<ITEMS>((float *)smem.k_pair[token], row, factors);
        mn_store<ITEMS>(smem.q[token], row, query);
    }

    /* The tokens to shared memory. All threads call; a barrier follows. */
    template <bool BACK>
    __device__ void put(token_smem<ROW_WARPS> &smem, float scale) const {
#pragma unroll
        for (int n = 0; n < size::TOKENS; n++) {
            const int token = threadIdx.x / 32 * size::TOKENS + n;
            const double all = norm(n);
            put_rows<BACK>(smem, scale, n, token, all, put_columns<BACK>(smem, n, token, all));
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
struct cells {
    float at[4][8];

    template <typename F>
    __device__ void each(const mn_column_params &p, const mn_column_coord &place, F use) {
        const int64_t head = place.n * p.call.H + place.h;
#pragma unroll
        for (int n = 0; n < 32; n++) {
            const int64_t i = warp_coord::row() + own_row(n / 8);
            const int64_t j = place.tile * TILE + warp_coord::column() + own_column(n % 8);
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
    template <int ROW_WARPS>
    __device__ __forceinline__ void advance(const token_smem<ROW_WARPS> &in, int token,
                                            float inverse) {
        const int first = warp_coord::row() + own_row(0);
        float keys[4], squares[4], weights[4], writes[4];
        load_four(keys, in.k[token] + first);
        mn_load<4>(squares, in.squares[token], first);
#pragma unroll
        for (int r = 0; r < 4; r++) keys[r] *= inverse;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int j = warp_coord::column() + own_column(4 * half);
            mn_load<4>(weights, in.w[token], j);
            mn_load<4>(writes, in.write[token], j);
#pragma unroll
            for (int n = 0; n < 16; n++) {
                const int r = n / 4, c = n % 4;
                float &cell = at[r][4 * half + c];
                cell = fmaf(-(weights[c] * squares[r]), cell, fmaf(keys[r], writes[c], cell));
            }
        }
    }

    /* An adjoint takes what a token reads: cots of this lane's columns. */
    template <int ROW_WARPS>
    __device__ __forceinline__ void take(const token_smem<ROW_WARPS> &in, int token, float inverse,
                                         const unsigned (&cots)[4]) {
        float queries[4];
        const float by = fminf(in.q_unit[token] * inverse, FLT_MAX);
        load_four(queries, in.q[token] + warp_coord::row() + own_row(0));
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
    template <int ROW_WARPS>
    __device__ __forceinline__ void decay(const token_smem<ROW_WARPS> &in, int token,
                                          const float (&weights)[2][4]) {
        float squares[4];
        mn_load<4>(squares, in.squares[token], warp_coord::row() + own_row(0));
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
        return largest_finite<32>([&](int n) { return at[n / 8][n % 8]; });
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
__device__ __forceinline__ void load_packed(pairs &x, const uint4 *from) {
#pragma unroll
    for (int f = 0; f < 4; f++) {
        const uint4 vec = from[f * THREADS + threadIdx.x];
        x[f][0] = vec.x, x[f][1] = vec.y, x[f][2] = vec.z, x[f][3] = vec.w;
    }
}

/* ---- gradients ------------------------------------------------------------------------------- */

/* The sums of a token to shared memory: over columns, each by another lane of those that have them
 * all, and over rows. */
template <int ROW_WARPS>
__device__ __forceinline__ void leave_rows(smem_of<ROW_WARPS> &smem, int token, float4 to_q,
                                           float4 to_k, float4 to_kk) {
    const int across = threadIdx.x / 32 % 2, part = threadIdx.x % 4;
    float *rows = smem.row_sums[across][token][0] + warp_coord::row() + own_row(0);
    if (part == 0) *(float4 *)rows = to_q;
    if (part == 1) *(float4 *)(rows + sizes<ROW_WARPS>::ROWS) = to_k;
    if (part == 2) *(float4 *)(rows + 2 * sizes<ROW_WARPS>::ROWS) = to_kk;
}

template <int ROW_WARPS>
__device__ __forceinline__ void leave_columns(smem_of<ROW_WARPS> &smem, int token, float4 to_v,
                                              float4 to_w) {
    const int across = threadIdx.x / 32 % 2, down = threadIdx.x / 64, part = threadIdx.x % 4;
    float *columns = smem.column_sums[down][token][0] + 32 * across + threadIdx.x % 32 / 4 * 4;
    if (part == 3) *(float4 *)columns = to_v;
    if (part == 0) *(float4 *)(columns + TILE) = to_w;
}

/* Sums of a token, from the states behind and in front of it. */
template <int ROW_WARPS>
__device__ __forceinline__ void token_bwd(cells &D, const pairs &behind, const pairs &front,
                                          smem_of<ROW_WARPS> &smem, float &bound, float &unit,
                                          int token) {
    const token_smem<ROW_WARPS> &in = smem.in;
    const int column = warp_coord::column() + own_column(0);
    const uint4 b0 = *(const uint4 *)in.cot_write[token][column / 4];
    const uint4 b1 = *(const uint4 *)in.cot_write[token][column / 4 + 4];
    const uint4 keys = *(const uint4 *)(in.k_pair[token] + warp_coord::row() + own_row(0));
    const unsigned own[4] = { keys.x, keys.y, keys.z, keys.w };
    const unsigned cots[4] = { b0.x, b0.y, b1.x, b1.y };
    const float4 to_q = rows_times(behind, make_uint2(b0.x, b0.y), make_uint2(b1.x, b1.y));
    pairs read, product;
    unsigned k[4], kk[4];
    float w[2][4];
    D.make_room(bound, unit, in.read[token]);
    D.take(in, token, inverse_of(unit), cots);
    D.pack(read);
    if (threadIdx.x % 32 == 0) smem.adjoint_unit[threadIdx.x / 32][token] = unit;
#pragma unroll
    for (int n = 0; n < 16; n++) {
        product[n / 4][n % 4] = multiply(read[n / 4][n % 4], front[n / 4][n % 4]);
    }
#pragma unroll
    for (int half = 0; half < 2; half++) mn_load<4>(w[half], in.w[token], column + 16 * half);
    D.decay(in, token, w);
    const float4 to_k = rows_times(read, make_uint2(b0.z, b0.w), make_uint2(b1.z, b1.w));
    const float4 to_kk =
        rows_times(product, make_uint2(pair_of(w[0][0], w[0][1]), pair_of(w[0][2], w[0][3])),
                   make_uint2(pair_of(w[1][0], w[1][1]), pair_of(w[1][2], w[1][3])));
    leave_rows(smem, token, to_q, to_k, to_kk);
#pragma unroll
    for (int r = 0; r < 4; r++) k[r] = twice_low(own[r]), kk[r] = twice_high(own[r]);
    leave_columns(smem, token, columns_times(read, k), columns_times(product, kk));
}

/* What a thread's sums of a group take of its tokens, which the next group's write over: of every
 * second token and a row (of ROW_WARPS 4), of every fourth and a column. */
template <int ROW_WARPS>
struct sum_factors {
    typedef sizes<ROW_WARPS> size;
    static constexpr int ROWS_AT_ONCE = size::THREADS / size::ROWS;
    static constexpr int COLUMNS_AT_ONCE = size::THREADS / TILE;
    float key[GROUP / ROWS_AT_ONCE], cot[GROUP / ROWS_AT_ONCE], write[GROUP / ROWS_AT_ONCE];
    float w_unit[GROUP / ROWS_AT_ONCE];
    float v[GROUP / COLUMNS_AT_ONCE], w[GROUP / COLUMNS_AT_ONCE], k_unit[GROUP / COLUMNS_AT_ONCE];

    __device__ __forceinline__ void load(const token_smem<ROW_WARPS> &in) {
        const int row = threadIdx.x % size::ROWS, column = threadIdx.x % TILE;
#pragma unroll
        for (int n = 0; n < GROUP / ROWS_AT_ONCE; n++) {
            const int token = threadIdx.x / size::ROWS + n * ROWS_AT_ONCE;
            key[n] = mn_float(in.k[token][row]), cot[n] = in.cot_unit[token];
            write[n] = in.write_unit[token], w_unit[n] = in.w_unit[token];
        }
#pragma unroll
        for (int n = 0; n < GROUP / COLUMNS_AT_ONCE; n++) {
            const int token = threadIdx.x / TILE + n * COLUMNS_AT_ONCE;
            v[n] = mn_float(in.v[token][column]), k_unit[n] = in.k_unit[token];
            w[n] = in.w[token][column] * in.w_unit[token];
        }
    }
};

/* dq and dk of row i of a token, `part` where dq is; the thread's number n of these. */
template <int ROW_WARPS>
__device__ inline void reduce_row(float *part, const smem_of<ROW_WARPS> &smem,
                                  const sum_factors<ROW_WARPS> &of, float scale, int64_t K,
                                  int token, int i, int n) {
    float to_q = 0.0f, to_k = 0.0f, to_kk = 0.0f;
#pragma unroll
    for (int across = 0; across < 2; across++) {
        const float *sums = smem.row_sums[across][token][0] + i;
        const int warp = i / 32 * 2 + across;
        const float unit = smem.adjoint_unit[warp][token];
        to_q = fmaf(sums[0], smem.state_unit[warp][token + 1], to_q);
        to_k = fmaf(sums[sizes<ROW_WARPS>::ROWS], unit, to_k);
        to_kk = fmaf(sums[2 * sizes<ROW_WARPS>::ROWS] * smem.state_unit[warp][token], unit, to_kk);
    }
    part[0] = scale * (to_q * of.cot[n]);
    part[K] = fmaf(-2.0f * of.key[n], to_kk * of.w_unit[n], to_k * of.write[n]);
}

/* y and dv of a column of a token. */
template <int ROW_WARPS>
__device__ inline void reduce_column(float &y, float &dv, const smem_of<ROW_WARPS> &smem,
                                     const sum_factors<ROW_WARPS> &of, int token, int column,
                                     int n) {
    const int place = column_place(column);
    float to_v = 0.0f, to_w = 0.0f;
#pragma unroll
    for (int down = 0; down < ROW_WARPS; down++) {
        const int warp = 2 * down + column / 32;
        const float *sums = smem.column_sums[down][token][0] + place;
        const float unit = smem.adjoint_unit[warp][token];
        to_v = fmaf(sums[0], unit, to_v);
        to_w = fmaf(sums[TILE] * smem.state_unit[warp][token], unit, to_w);
    }
    const float key = of.k_unit[n];
    to_v *= key;
    y = fmaf(of.v[n], to_v, -8.0f * (to_w * key * key));
    dv = of.w[n] * to_v;
}

/* Adds the warps' sums of `count` tokens, of which the first is token t. All threads call, between
 * barriers. */
template <int ROW_WARPS>
__device__ inline void reduce_warps(const smem_of<ROW_WARPS> &smem,
                                    const sum_factors<ROW_WARPS> &of, const mn_column_params &p,
                                    const mn_column_coord &at, int64_t t, int count) {
    typedef sizes<ROW_WARPS> size;
    constexpr int AT_ONCE = sum_factors<ROW_WARPS>::ROWS_AT_ONCE;
    constexpr int COLUMNS_AT_ONCE = sum_factors<ROW_WARPS>::COLUMNS_AT_ONCE;
    const int64_t all = p.call.B * p.call.T * p.call.H, K = p.call.K;
    const int first = threadIdx.x / size::ROWS, i = threadIdx.x % size::ROWS;
    float *part = p.partials + (at.tile * all + mn_columns_row(p, at, t + first)) * 2 * K + i;
#pragma unroll
    for (int token = 0; token < GROUP; token += AT_ONCE, part += AT_ONCE * p.call.H * 2 * K) {
        if (i < K && first + token < count) {
            reduce_row(part, smem, of, p.scale, K, first + token, i, token / AT_ONCE);
        }
    }
    const int own = threadIdx.x / TILE, column = threadIdx.x % TILE;
    const int64_t j = at.tile * TILE + column;
    float *y = p.y + mn_columns_row(p, at, t + own) * p.columns + j;
    mn_bf16 *dv = mn_row<mn_bf16>(p.dv, at.span.b, at.span.t0 + t + own, at.h);
#pragma unroll
    for (int token = 0; token < GROUP; token += COLUMNS_AT_ONCE) {
        float to_v;
        if (j >= p.columns || own + token >= count) continue;
        reduce_column(y[token * p.call.H * p.columns], to_v, smem, of, own + token, column,
                      token / COLUMNS_AT_ONCE);
        if (dv) mn_put(dv + token * p.dv.stride[1] + j, to_v);
    }
}

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

/* The state in front of every group to memory, and the last one, packed; returns its unit. Tokens
 * of the next group go to shared memory while other warps are still in this one. */
template <int ROW_WARPS>
__device__ inline float save_states(pairs &last, uint4 *saved, int64_t stride,
                                    smem_of<ROW_WARPS> &smem, const mn_column_params &p,
                                    const mn_column_coord &at, int64_t groups) {
    constexpr int THREADS = sizes<ROW_WARPS>::THREADS;
    typedef token_smem<ROW_WARPS> tokens;
    static_assert(sizeof(tokens) <= sizeof(smem.states), "their places are free on this way");
    const auto stage = [&](int64_t n) -> tokens & {
        const ptrdiff_t apart = (unsigned char *)smem.states - (unsigned char *)&smem.in;
        return *(tokens *)((unsigned char *)&smem.in + n % 2 * apart);
    };
    cells S;
    prefetch<ROW_WARPS> ahead(p, at, 0);
    const auto pack = [&](pairs &packed) {
        const float unit = unit_of(S.largest());
        S.pack(packed, inverse_of(unit));
        return unit;
    };
    const auto save = [&](int64_t n) {
        pairs packed;
        const float unit = pack(packed);
        store_packed<THREADS>(saved + n * stride, packed);
        if (threadIdx.x % 32 > 0) return;
        ((float *)(saved + n * stride + sizes<ROW_WARPS>::CELLS))[threadIdx.x / 32] = unit;
    };
    const auto bring = [&](int64_t n) {    // group n, and asks for the one behind it
        ahead.template put<false>(stage(n), p.scale);
        ahead.template move<1>(p);
        ahead.template fetch<false>(p, at);
    };
    S.load(p, at, p.state0);
    ahead.template fetch<false>(p, at);
    bring(0);
#pragma unroll 1
    for (int64_t n = 0; n < groups; n++) {
        __syncthreads();
        const auto pass = [&]() {
            save(n);
#pragma unroll 2
            for (int token = 0; token < GROUP; token++) S.advance(stage(n), token, 1.0f);
        };
        in_turns([&]() { if (n + 1 < groups) bring(n + 1); }, pass);
    }
    const float unit = pack(last);
    __syncthreads();
    return unit;
}

/* The group that is in shared memory, from the state in front of it, in its unit, which takes the
 * place of the one behind it; that of the last group is made here. Behind the last token of a
 * sequence there are zeros, which change nothing. */
template <int ROW_WARPS>
__device__ __forceinline__ void group_bwd(cells &D, float &most_of_D, float &unit_of_D, bool look,
                                          bool last, pairs &behind, const uint4 *front, float unit,
                                          smem_of<ROW_WARPS> &smem) {
    constexpr int THREADS = sizes<ROW_WARPS>::THREADS;
    float *units = smem.state_unit[threadIdx.x / 32], bound = 2.0f;
    cells S;
    pairs old;
    load_packed<THREADS>(old, front);
    S.unpack(old);
    units[0] = unit;
#pragma unroll 2
    for (int token = 0; token + 1 < GROUP; token++) {
        S.make_room(bound, unit, smem.in.grow[token]);
        S.advance(smem.in, token, inverse_of(unit));
        S.pack(old);
        units[token + 1] = unit;
        store_packed<THREADS>(smem.states[token], old);
    }
    if (SAVED_BY_PRODUCTS && last) {
        S.make_room(bound, unit, smem.in.grow[GROUP - 1]);
        S.advance(smem.in, GROUP - 1, inverse_of(unit));
        S.pack(behind);
        units[GROUP] = unit;
    }
    if (look) {
        const float most = __uint_as_float(D.largest()) * unit_of_D;
        const float next = unit_of(__float_as_uint(most));
        if (next != unit_of_D) D.rescale(unit_of_D, next);
        most_of_D = most * inverse_of(next), unit_of_D = next;
    }
#pragma unroll 1
    for (int token = GROUP - 1; token > 0; token -= 2) {
        load_packed<THREADS>(old, smem.states[token - 1]);
        token_bwd(D, behind, old, smem, most_of_D, unit_of_D, token);
        load_packed<THREADS>(behind, token == 1 ? front : smem.states[token - 2]);
        token_bwd(D, old, behind, smem, most_of_D, unit_of_D, token - 1);
    }
}

template <int ROW_WARPS>
__global__ void __launch_bounds__(sizes<ROW_WARPS>::THREADS, ROW_WARPS == 4 ? 1 : 2)
longhorn_diag_bwd_products(const __grid_constant__ mn_column_params p, int64_t tiles) {
    typedef sizes<ROW_WARPS> size;
    extern __shared__ __align__(128) unsigned char diag_bytes[];
    smem_of<ROW_WARPS> &smem = *(smem_of<ROW_WARPS> *)diag_bytes;
    const mn_column_coord at = mn_column_block_coord(p, tiles);
    const int64_t length = at.span.length, groups = (length + GROUP - 1) / GROUP;
    int64_t stride;
    uint4 *saved = saved_states<ROW_WARPS>(p, at, tiles, stride);
    cells D;
    pairs behind;
    float most_of_D = 0.0f, unit_of_D = 1.0f, unit = 1.0f;
    D.load(p, at, p.cot_state);
    if (groups > 0) {
        float unit_behind = 1.0f;
        if constexpr (!SAVED_BY_PRODUCTS) {
            unit_behind = save_states<ROW_WARPS>(behind, saved, stride, smem, p, at, groups);
        }
        prefetch<ROW_WARPS> ahead(p, at, (groups - 1) * GROUP);
        ahead.template fetch<true>(p, at);
        const auto ask = [&](int64_t n) {
#pragma unroll
            for (int r = 0; r < 4; r++) {
                const int place = r * size::THREADS + (int)threadIdx.x;
                cp_async(smem.front[n % 2] + place, saved + n * stride + place);
            }
            unit = ((const float *)(saved + n * stride + size::CELLS))[threadIdx.x / 32];
        };
        __syncthreads();
        ask(groups - 1);
        ahead.template put<true>(smem.in, p.scale);
        cp_async_wait();
        __syncthreads();
#pragma unroll 1
        for (int64_t n = groups - 1, looks = 0; n >= 0; n--, looks++) {
            const float own = unit;
            sum_factors<ROW_WARPS> factors;
            if (n > 0) {
                ahead.template move<-1>(p);
                ahead.template fetch<true>(p, at);
                ask(n - 1);
            }
            smem.state_unit[threadIdx.x / 32][GROUP] = unit_behind, unit_behind = own;
            group_bwd<ROW_WARPS>(D, most_of_D, unit_of_D, looks % 4 == 0, looks == 0, behind,
                                 smem.front[n % 2], own, smem);
            factors.load(smem.in);
            __syncthreads();
            const int count = (int)min((int64_t)GROUP, length - n * GROUP);
            in_turns([&]() { if (n > 0) ahead.template put<true>(smem.in, p.scale); },
                     [&]() { reduce_warps(smem, factors, p, at, n * GROUP, count); });
            cp_async_wait();
            __syncthreads();
        }
    }
    D.rescale(unit_of_D, 1.0f);
    D.store(p, at, p.dstate0);
}

/* ---- launch ---------------------------------------------------------------------------------- */

static int row_warps(const mn_call &c) { return c.K <= 64 ? 2 : 4; }

bool supported(const mn_call &c) {
    const int limit = mn_device_props_current().shared_bytes;
    if (c.dtype != MN_BF16 || c.K > 128) return false;
    return (int)(row_warps(c) == 2 ? sizeof(smem_of<2>) : sizeof(smem_of<4>)) <= limit;
}

bool saved_size(size_t *count, const mn_call &c) {
    const size_t floats =
        4 * (size_t)(row_warps(c) == 2 ? saved_state<2>::PACKS : saved_state<4>::PACKS);
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
                          sizes<ROW_WARPS>::THREADS, sizeof(smem_of<ROW_WARPS>), on, p, tiles);
}

int launch(mn_column_params p, cudaStream_t on) {
    const int warps = row_warps(p.call);
    const int code = SAVED_BY_PRODUCTS ? diag_fwd::save_states(p, on) : (int)cudaSuccess;
    if (code != cudaSuccess) return code;
    p.vec_aligned = mn_columns_vec_aligned<mn_bf16>(p, warps);
    return warps == 2 ? launch_with<2>(p, on) : launch_with<4>(p, on);
}

}    // namespace mneme::longhorn::diag
