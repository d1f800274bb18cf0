/* column_state.cuh - the recurrences of column_state.cuh forward.
 *
 * A warp has eight columns. Where a token writes what it finds missing in them (COLUMN), or has
 * one more column of ones (SUM), four lanes have a column, each a quarter of its rows in
 * registers, so that a sum over rows is a chain of multiply-adds and two exchanges; the lanes'
 * rows lie in packs of four side by side. CELL waits for no sum: sixteen lanes have four columns,
 * so that what is read of a token serves four cells. Tokens come through shared memory eight at a
 * time, the next eight on their way in registers meanwhile, as they were stored: nothing waits for
 * them until they are put. Where columns are few, a scan is as long as its chain, and other warps
 * of the block bring the tokens. */
#ifndef MN_KERNELS_CUDA_RECURRENT_COLUMN_STATE_CUH
#define MN_KERNELS_CUDA_RECURRENT_COLUMN_STATE_CUH

#include "kernels/cuda/prim/common.cuh"

namespace mneme::recurrent {

/* matrix memories whose value columns go their own way: the recurrence of mlstm and of both forms
 * of Longhorn.
 *
 *   SUM     S_ij <- f S_ij + w k_i v_j                         w, f numbers of a token
 *   CELL    S_ij <- (u_j + w_j x_i) S_ij + w_j k_i v_j       x_i = |k|^2 - k_i^2, u = 1 - w |k|^2
 *   COLUMN  S_ij <- S_ij + w_j k_i (v_j - k'S_:j)              o_j = scale S_:j'q
 *
 * Backward, D the adjoint of S_t, B that of the memory before the write, y_j the gradient of w_j:
 *
 *   D += scale q do'          dq = scale S do        SUM     y = k'D v, dv = w D'k, dk = w D v,
 *   df = f D.S, D <- f D      CELL    y_j = sum D k (v - k S), dk = sum w D (v - 2 k S), D <- c D
 *   COLUMN  y_j = (D'k)_j (v_j - k'S), dk = D (w (v - k'S)) - S (w D'k), D <- D - k (w D'k)'
 *
 * How threads share the cells is in column_state.cuh and column_state_bwd.cuh. */

enum { MN_COLUMNS_MAX_K = 256, MN_COLUMNS_TILE = 64 };    // rows; columns of a block

enum mn_column_kind { MN_COLUMNS_SUM, MN_COLUMNS_CELL, MN_COLUMNS_COLUMN };

/* Tensors of tokens are views; what is made in work space has rows of all heads of all tokens. */
struct mn_column_params {
    mn_call call;
    float scale;
    int64_t columns;             // V, or V + 1 where a last column of ones is added
    mn_in q, k, v;
    mn_in beta;                  // CELL, COLUMN: w_j = beta_j u_j, u_j = 1 / (1 + beta_j |k|^2)
    const float *w, *f;          // SUM: (rows)
    const float *state0, *ones0; // (N,H,K,V) and the added column's (N,H,K), or NULL
    float *state, *ones;
    bool reads;                  // whether o or out is wanted
    float *o;                    // (rows, columns): S'q scale
    mn_out out;                  // the same as a tensor
    const float *cot;            // (rows, columns)
    mn_in cot_o;                 // the same as a tensor, where cot is NULL
    const float *cot_state, *cot_ones;
    float *y;                    // (rows, columns): gradient of w
    float *partials;                // (tiles, rows, 2, K): dq, dk
    float *f_partials;               // (tiles, rows): df
    mn_out dv;
    float *dstate0, *dones0;
    float *spans, *tokens;       // states
    int n_saved_states;                   // states that shared memory has room for
    bool vec_aligned;                  // whether neighbours of a token's numbers come by one access
    bool single_tokens;                // whether only sequences of one token are wanted, forward
};

/* Rows that threads have between them. */
__host__ __device__ inline int mn_columns_rows(const mn_call &c) {
    return c.K <= 32 ? 32 : c.K <= 64 ? 64 : c.K <= 128 ? 128 : 256;
}

struct mn_column_coord {
    int64_t n, h, tile, block;
    mn_span span;
};

__device__ inline mn_column_coord mn_column_block_coord(const mn_column_params &p, int64_t tiles) {
    mn_column_coord at;
    at.block = blockIdx.x, at.tile = at.block % tiles;
    at.h = at.block / tiles % p.call.H, at.n = at.block / tiles / p.call.H;
    at.span = mn_span_at(p.call, at.n);
    return at;
}

__device__ inline int64_t mn_columns_row(const mn_column_params &p, const mn_column_coord &at,
                                         int64_t t) {
    return (at.span.b * p.call.T + at.span.t0 + t) * p.call.H + at.h;
}

/* WARPS of a block have its columns; PRODUCERS more bring its tokens, or, where there are none, the
 * same warps do. */
template <int ROWS, int WARPS = MN_COLUMNS_TILE / 8, int PRODUCERS = 0>
struct mn_column_sizes {
    static constexpr int columns = 1, warps = WARPS, threads = 32 * warps;
    static constexpr int tile = 8 * WARPS;              // columns of a block
    static constexpr int group = 8;                     // tokens
    static constexpr int rows = 4 * ROWS;
    // threads that bring tokens
    static constexpr int producer_threads = PRODUCERS ? 32 * PRODUCERS : threads;
    static constexpr int row_items = rows / 32, column_items = (tile + 31) / 32;

    /* This thread's place among those that bring tokens; the token that its warp brings. */
    __device__ static int producer_thread() {
        return (int)threadIdx.x - (PRODUCERS ? threads : 0);
    }
    __device__ static int token() {
        return producer_thread() / 32;
    }

    /* The first of this thread's rows and columns of a token, which are neighbours. */
    __device__ static int row() {
        return (int)threadIdx.x % 32 * row_items;
    }
    __device__ static int column() {
        return (int)threadIdx.x % 32 * column_items;
    }
};

template <int ROWS, int WARPS = MN_COLUMNS_TILE / 8>
struct mn_column_smem {
    using sizes = mn_column_sizes<ROWS, WARPS>;
    alignas(16) float k[sizes::group][sizes::rows];
    alignas(16) float q[sizes::group][sizes::rows];
    alignas(16) float x[sizes::group][sizes::rows];    // |k|^2 - k_i^2
    alignas(16) float v[sizes::group][sizes::tile];
    alignas(16) float w[sizes::group][sizes::tile];
    alignas(16) float u[sizes::group][sizes::tile];
    alignas(16) float o[sizes::group][sizes::tile];
    float f[sizes::group], token_weight[sizes::group];
};

/* A single token, for steps. */
template <int ROWS, int WARPS = MN_COLUMNS_TILE / 8>
struct mn_column_step_token {
    using sizes = mn_column_sizes<ROWS, WARPS>;
    alignas(16) float k[1][sizes::rows], q[1][sizes::rows], x[1][sizes::rows];
    alignas(16) float v[1][sizes::tile], w[1][sizes::tile], u[1][sizes::tile];
    float f[1], token_weight[1];
};

/* A few neighbours of a row as they were stored: they stay in the words that they came in until
 * they are used, as taking them apart would wait for them. */
template <int N, typename T>
struct mn_column_raw {
    static constexpr int bytes = N * (int)sizeof(T), words = bytes < 4 ? 1 : bytes / 4;
    uint32_t word[words];

    /* From number i on; zeros from `width` on. `whole`: all are there or none, and come by one
     * access. */
    __device__ void fetch(const T *row, int64_t i, int64_t width, bool vec_aligned) {
#pragma unroll
        for (int n = 0; n < words; n++) word[n] = 0;
        if (i >= width) return;
        if (vec_aligned) {
            if constexpr (bytes == 2) {
                word[0] = *(const uint16_t *)(row + i);
            } else {
                constexpr int each = words < 4 ? words : 4;
#pragma unroll
                for (int n = 0; n < words; n += each) {
                    const mn_vec<uint32_t, each> vec =
                        *((const mn_vec<uint32_t, each> *)(row + i) + n / each);
#pragma unroll
                    for (int c = 0; c < each; c++) word[n + c] = vec.at[c];
                }
            }
            return;
        }
#pragma unroll
        for (int n = 0; n < N; n++) {
            if (i + n < width) set(n, row[i + n]);
        }
    }

    __device__ void set(int n, float x) { word[n] = __float_as_uint(x); }
    __device__ void set(int n, mn_bf16 x) {
        word[n / 2] |= (uint32_t)__bfloat16_as_ushort(x) << (n % 2 ? 16 : 0);
    }
    __device__ float at(int n) const {
        if (sizeof(T) == 4) return __uint_as_float(word[n]);
        return __uint_as_float(n % 2 ? word[n / 2] & 0xffff0000u : word[n / 2] << 16);
    }
};

/* What this thread has of a token of the next group: a few rows and columns, zeros outside. `f` and
 * `weight` are those of token producer_thread(). */
template <typename T, int ROWS, int WARPS = MN_COLUMNS_TILE / 8, int PRODUCERS = 0>
struct mn_column_prefetch {
    using sizes = mn_column_sizes<ROWS, WARPS, PRODUCERS>;
    static_assert(sizes::producer_threads == 32 * sizes::group,
                  "a warp brings each token of a group");
    mn_column_raw<sizes::row_items, T> k, q;
    mn_column_raw<sizes::column_items, T> v, beta;
    float f, weight;

    template <mn_column_kind KIND>
    __device__ void fetch(const mn_column_params &p, const mn_column_coord &at, int64_t t) {
        constexpr int columns = sizes::column_items;
        const int count = (int)min((int64_t)sizes::group, at.span.length - t);
        const int64_t when = at.span.t0 + t + sizes::token(), b = at.span.b, V = p.call.V;
        const int64_t j = at.tile * sizes::tile + sizes::column();
        const bool there = sizes::token() < count, mine = there && sizes::column() < sizes::tile;
        const int64_t K = there ? p.call.K : 0, width = mine ? V : 0;
        k.fetch(mn_row<T>(p.k, b, when, at.h), sizes::row(), K, p.vec_aligned);
        q.fetch(mn_row<T>(p.q, b, when, at.h), sizes::row(), p.reads ? K : 0, p.vec_aligned);
        v.fetch(mn_row<T>(p.v, b, when, at.h), j, width, p.vec_aligned);
        if constexpr (KIND != MN_COLUMNS_SUM) {
            beta.fetch(mn_row<T>(p.beta, b, when, at.h), j, width, p.vec_aligned);
        } else {
#pragma unroll
            for (int n = 0; n < columns; n++) {
                if (mine && j + n == V && j + n < p.columns) v.set(n, (T)1.0f);
            }
            if (sizes::producer_thread() >= count) return;
            const int64_t row = mn_columns_row(p, at, t + sizes::producer_thread());
            f = p.f[row], weight = p.w[row];
        }
    }

    /* |k|^2, which all lanes of the token's warp return. */
    __device__ double norm() const {
        double sum = 0.0;
#pragma unroll
        for (int n = 0; n < sizes::row_items; n++) {
            sum += (double)k.at(n) * (double)k.at(n);
        }
        for (int lanes = 16; lanes > 0; lanes >>= 1) {
            sum += __shfl_xor_sync(0xffffffffu, sum, lanes);
        }
        return sum;
    }

    /* The tokens to shared memory, with their weights. All that bring tokens call; a barrier
     * follows. */
    template <mn_column_kind KIND, typename Smem>
    __device__ void put(Smem &smem) const {
        constexpr int rows = sizes::row_items, columns = sizes::column_items;
        const int token = sizes::token(), i = sizes::row(), j = sizes::column();
        const double all = KIND == MN_COLUMNS_SUM ? 0.0 : norm();
        float keys[rows], queries[rows], x[rows], values[columns], w[columns], u[columns];
#pragma unroll
        for (int n = 0; n < rows; n++) {
            keys[n] = k.at(n), queries[n] = q.at(n);
            x[n] = (float)(all - (double)keys[n] * (double)keys[n]);
        }
        mn_store<rows>(smem.k[token], i, keys);
        mn_store<rows>(smem.q[token], i, queries);
        if (KIND == MN_COLUMNS_CELL) mn_store<rows>(smem.x[token], i, x);
#pragma unroll
        for (int n = 0; n < columns; n++) {
            const float b = KIND == MN_COLUMNS_SUM ? 0.0f : beta.at(n);
            values[n] = v.at(n);
            u[n] = 1.0f / (float)(1.0 + (double)b * all), w[n] = b * u[n];
        }
        if (j < sizes::tile) {
            mn_store<columns>(smem.v[token], j, values);
            if (KIND != MN_COLUMNS_SUM) mn_store<columns>(smem.u[token], j, u);
            if (KIND != MN_COLUMNS_SUM) mn_store<columns>(smem.w[token], j, w);
        }
        const int mine = sizes::producer_thread();
        if (KIND == MN_COLUMNS_SUM && mine < sizes::group) {
            smem.f[mine] = f, smem.token_weight[mine] = weight;
        }
    }
};

/* The cells of a thread. */
template <int ROWS, int WARPS = MN_COLUMNS_TILE / 8>
struct mn_column_cells {
    using sizes = mn_column_sizes<ROWS, WARPS>;
    static constexpr int C = sizes::columns;
    float at[ROWS][C];

    /* The row of cell r; the column in the block of cell c. */
    __device__ static int row(int r) {
        return 4 * (threadIdx.x % 4 + 4 * (r / 4)) + r % 4;
    }

    __device__ static int column(int c) {
        return threadIdx.x / 4 * C + c;
    }

    template <typename F>
    __device__ void each(const mn_column_params &p, const mn_column_coord &place, F use) {
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
#pragma unroll
            for (int c = 0; c < C; c++) {
                const int64_t j = place.tile * sizes::tile + column(c);
                use(at[r][c], (int64_t)row(r), j, row(r) < p.call.K && j < p.columns);
            }
        }
    }

    __device__ void load(const mn_column_params &p, const mn_column_coord &place,
                         const float *state,
                         const float *ones) {
        const int64_t head = place.n * p.call.H + place.h, K = p.call.K, V = p.call.V;
        each(p, place, [&](float &x, int64_t i, int64_t j, bool inside) {
            x = 0.0f;
            if (inside && j < V && state) x = state[(head * K + i) * V + j];
            if (inside && j == V && ones) x = ones[head * K + i];
        });
    }

    __device__ void store(const mn_column_params &p, const mn_column_coord &place, float *state,
                          float *ones) {
        const int64_t head = place.n * p.call.H + place.h, K = p.call.K, V = p.call.V;
        each(p, place, [&](float &x, int64_t i, int64_t j, bool inside) {
            if (inside && j < V && state) state[(head * K + i) * V + j] = x;
            if (inside && j == V && ones) ones[head * K + i] = x;
        });
    }

    /* What four tokens read to the columns of their rows. */
    __device__ static void leave(float (*rows)[sizes::tile], const float (&o)[4][C]) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if (threadIdx.x % 4 == 0) rows[i][column(0)] = o[i][0];
        }
    }

    __device__ static float reduce_lanes(float x) {
        x += __shfl_xor_sync(0xffffffffu, x, 1);
        return x + __shfl_xor_sync(0xffffffffu, x, 2);
    }

    /* k'S of this thread's columns, in all four lanes */
    __device__ void dot(float (&sums)[C], const float *k) const {
        float part[C][4] = {};
#pragma unroll
        for (int m = 0; m < ROWS / 4; m++) {
            const float4 x = *(const float4 *)(k + 4 * (threadIdx.x % 4 + 4 * m));
#pragma unroll
            for (int c = 0; c < C; c++) {
                part[c][0] = fmaf(x.x, at[4 * m][c], part[c][0]);
                part[c][1] = fmaf(x.y, at[4 * m + 1][c], part[c][1]);
                part[c][2] = fmaf(x.z, at[4 * m + 2][c], part[c][2]);
                part[c][3] = fmaf(x.w, at[4 * m + 3][c], part[c][3]);
            }
        }
#pragma unroll
        for (int c = 0; c < C; c++) {
            sums[c] = reduce_lanes((part[c][0] + part[c][1]) + (part[c][2] + part[c][3]));
        }
    }

    /* To memory and back, by the same thread. */
    __device__ void keep(float *smem) const {
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            mn_store<C>(smem, (r * sizes::threads + (int)threadIdx.x) * C, at[r]);
        }
    }

    __device__ void recall(const float *smem) {
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            mn_load<C>(at[r], smem, (r * sizes::threads + (int)threadIdx.x) * C);
        }
    }

    template <mn_column_kind KIND, bool HAS_OUT, typename Smem>
    __device__ void advance(float (&o)[C], const Smem &in, int token) {
        float written[C];
        advance<KIND, HAS_OUT>(o, written, in, token);
    }

    /* One token, which writes w v; for COLUMN v is what k'S leaves of it. Where HAS_OUT, o becomes
     * S'q. */
    template <mn_column_kind KIND, bool HAS_OUT, typename Smem>
    __device__ void advance(float (&o)[C], float (&v)[C], const Smem &in, int token) {
        float w[C], u[C], write[C], sums[C][4] = {};
#pragma unroll
        for (int c = 0; c < C; c++) {
            v[c] = in.v[token][column(c)];
            w[c] = KIND == MN_COLUMNS_SUM ? in.token_weight[token] : in.w[token][column(c)];
            u[c] = KIND == MN_COLUMNS_SUM ? in.f[token] : in.u[token][column(c)];
        }
        if (KIND == MN_COLUMNS_COLUMN) {
            float seen[C];
            dot(seen, in.k[token]);
#pragma unroll
            for (int c = 0; c < C; c++) v[c] -= seen[c];
        }
#pragma unroll
        for (int c = 0; c < C; c++) write[c] = w[c] * v[c];
#pragma unroll
        for (int m = 0; m < ROWS / 4; m++) {
            const int first = 4 * (threadIdx.x % 4 + 4 * m);
            float k[4], q[4], x[4];
            mn_load<4>(k, in.k[token], first);
            if (HAS_OUT) mn_load<4>(q, in.q[token], first);
            if (KIND == MN_COLUMNS_CELL) mn_load<4>(x, in.x[token], first);
#pragma unroll
            for (int i = 0; i < 4; i++) {
#pragma unroll
                for (int c = 0; c < C; c++) {
                    float cell = at[4 * m + i][c];
                    if (KIND == MN_COLUMNS_SUM) cell *= u[c];
                    if (KIND == MN_COLUMNS_CELL) cell *= fmaf(w[c], x[i], u[c]);
                    cell = fmaf(k[i], write[c], cell);
                    if (HAS_OUT) sums[c][i] = fmaf(q[i], cell, sums[c][i]);
                    at[4 * m + i][c] = cell;
                }
            }
        }
#pragma unroll
        for (int c = 0; c < C && HAS_OUT; c++) {
            o[c] = reduce_lanes((sums[c][0] + sums[c][1]) + (sums[c][2] + sums[c][3]));
        }
    }
};

/* Of 2 HALF sums lanes that lie LANES apart add up HALF each: the upper lane the later ones. */
template <int HALF, int LANES, int N>
__device__ inline void mn_lanes_reduce_scatter(float (&x)[N]) {
    const bool upper = threadIdx.x & LANES;
#pragma unroll
    for (int i = 0; i < HALF; i++) {
        const float give = upper ? x[i] : x[i + HALF], own = upper ? x[i + HALF] : x[i];
        x[i] = own + __shfl_xor_sync(0xffffffffu, give, LANES);
    }
}

/* The cells of a thread for CELL: R rows of four columns, the rows in packs. */
template <int ROWS, int WARPS = MN_COLUMNS_TILE / 8>
struct mn_column_cells4 {
    using sizes = mn_column_sizes<ROWS, WARPS>;
    static constexpr int R = ROWS / 4, P = R < 4 ? R : 4;
    float at[R][4];

    __device__ static int first_row(int m) {
        return P * (threadIdx.x % 16 + 16 * m);
    }
    __device__ static int first_column() {
        return threadIdx.x / 16 * 4;
    }

    template <typename F>
    __device__ void each(const mn_column_params &p, const mn_column_coord &place, F use) {
        const int64_t head = place.n * p.call.H + place.h;
        const int64_t j0 = place.tile * sizes::tile + first_column();
#pragma unroll
        for (int r = 0; r < R; r++) {
            const int64_t i = first_row(r / P) + r % P;
#pragma unroll
            for (int c = 0; c < 4; c++) {
                use(at[r][c], (head * p.call.K + i) * p.call.V + j0 + c,
                    i < p.call.K && j0 + c < p.call.V);
            }
        }
    }

    __device__ void load(const mn_column_params &p, const mn_column_coord &place,
                         const float *state,
                         const float *) {
        each(p, place, [&](float &x, int64_t cell, bool inside) {
            x = state && inside ? state[cell] : 0.0f;
        });
    }

    __device__ void store(const mn_column_params &p, const mn_column_coord &place, float *state,
                          float *) {
        each(p, place, [&](float &x, int64_t cell, bool inside) {
            if (state && inside) state[cell] = x;
        });
    }

    /* To memory and back, by the same thread. */
    __device__ void keep(float *smem) const {
#pragma unroll
        for (int r = 0; r < R; r++) {
            mn_store<4>(smem, (r * sizes::threads + (int)threadIdx.x) * 4, at[r]);
        }
    }

    __device__ void recall(const float *smem) {
#pragma unroll
        for (int r = 0; r < R; r++) {
            mn_load<4>(at[r], smem, (r * sizes::threads + (int)threadIdx.x) * 4);
        }
    }

    /* One token. Where HAS_OUT, o becomes this thread's part of S'q. */
    template <mn_column_kind KIND, bool HAS_OUT>
    __device__ void advance(float (&o)[4], const mn_column_smem<ROWS, WARPS> &in, int token) {
        float w[4], u[4], write[4];
        mn_load<4>(w, in.w[token], first_column());
        mn_load<4>(u, in.u[token], first_column());
        mn_load<4>(write, in.v[token], first_column());
#pragma unroll
        for (int c = 0; c < 4; c++) write[c] *= w[c], o[c] = 0.0f;
#pragma unroll
        for (int m = 0; m < R / P; m++) {
            float k[P], q[P], x[P];
            mn_load<P>(k, in.k[token], first_row(m));
            if (HAS_OUT) mn_load<P>(q, in.q[token], first_row(m));
            mn_load<P>(x, in.x[token], first_row(m));
#pragma unroll
            for (int i = 0; i < P; i++) {
#pragma unroll
                for (int c = 0; c < 4; c++) {
                    float &cell = at[P * m + i][c];
                    cell = fmaf(k[i], write[c], cell * fmaf(w[c], x[i], u[c]));
                    if (HAS_OUT) o[c] = fmaf(q[i], cell, o[c]);
                }
            }
        }
    }

    /* Sums of the parts of four tokens to the columns of their rows: each lane ends with one. */
    __device__ static void leave(float (*rows)[sizes::tile], float (&o)[4][4]) {
        float x[16];
#pragma unroll
        for (int i = 0; i < 16; i++) x[i] = o[i / 4][i % 4];
        mn_lanes_reduce_scatter<8, 8>(x);
        mn_lanes_reduce_scatter<4, 4>(x);
        mn_lanes_reduce_scatter<2, 2>(x);
        mn_lanes_reduce_scatter<1, 1>(x);
        rows[threadIdx.x % 16 / 4][first_column() + threadIdx.x % 4] = x[0];
    }
};

template <mn_column_kind KIND, int ROWS, int WARPS>
struct mn_column_cells_of {
    typedef mn_column_cells<ROWS, WARPS> type;
};
template <int ROWS, int WARPS>
struct mn_column_cells_of<MN_COLUMNS_CELL, ROWS, WARPS> {
    typedef mn_column_cells4<ROWS, WARPS> type;
};

/* What the tokens of the group at t read, to memory, by those that bring tokens. */
template <typename T, int ROWS, int WARPS, int PRODUCERS>
__device__ inline void mn_column_store_out(const mn_column_smem<ROWS, WARPS> &smem,
                                           const mn_column_params &p,
                                   const mn_column_coord &at, int64_t t, int count) {
    using sizes = mn_column_sizes<ROWS, WARPS, PRODUCERS>;
    const int token = sizes::token();
    if (token >= count || sizes::column() >= sizes::tile) return;
    T *out = mn_row<T>(p.out, at.span.b, at.span.t0 + t + token, at.h);
    const int64_t row = mn_columns_row(p, at, t + token) * p.columns;
#pragma unroll
    for (int n = 0; n < sizes::column_items; n++) {
        const int64_t j = at.tile * sizes::tile + sizes::column() + n;
        if (j >= p.columns) break;
        const float o = p.scale * smem.o[token][sizes::column() + n];
        if (p.o) p.o[row + j] = o;
        if (out && j < p.call.V) mn_put(out + j, o);
    }
}

/* `count` tokens of a group, four at a time. What they read is left together: it comes late, and a
 * token behind it would wait for it. Behind the last token there are zeros, which change nothing of
 * CELL. */
template <mn_column_kind KIND, int ROWS, int WARPS, typename Cells>
__device__ inline void mn_column_scan_group(Cells &S, mn_column_smem<ROWS, WARPS> &smem,
                                            int count) {
    constexpr int EACH = 4;
#pragma unroll 1
    for (int token = 0; token < count; token += EACH) {
        float o[EACH][sizeof S.at[0] / sizeof(float)] = {};
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            if (KIND != MN_COLUMNS_CELL && token + i >= count) break;
            S.template advance<KIND, true>(o[i], smem, token + i);
        }
        Cells::leave(smem.o + token, o);
    }
}

template <typename T, int ROWS, int WARPS, mn_column_kind KIND>
__global__ void __launch_bounds__(32 * WARPS)
column_state_scan_kernel(const __grid_constant__ mn_column_params p, int64_t tiles) {
    using sizes = mn_column_sizes<ROWS, WARPS>;
    __shared__ mn_column_smem<ROWS, WARPS> smem;
    const mn_column_coord at = mn_column_block_coord(p, tiles);
    if (p.single_tokens && at.span.length != 1) return;
    typename mn_column_cells_of<KIND, ROWS, WARPS>::type S;
    mn_column_prefetch<T, ROWS, WARPS> ahead;
    S.load(p, at, p.state0, p.ones0);
    if (at.span.length > 0) ahead.template fetch<KIND>(p, at, 0);
    for (int64_t t = 0; t < at.span.length; t += sizes::group) {
        const int count = (int)min((int64_t)sizes::group, at.span.length - t);
        __syncthreads();
        if (p.reads && t > 0) {
            mn_column_store_out<T, ROWS, WARPS, 0>(smem, p, at, t - sizes::group, sizes::group);
        }
        ahead.template put<KIND>(smem);
        __syncthreads();
        if (t + sizes::group < at.span.length) {
            ahead.template fetch<KIND>(p, at, t + sizes::group);
        }
        mn_column_scan_group<KIND, ROWS, WARPS>(S, smem, count);
    }
    const int64_t t = (at.span.length - 1) / sizes::group * sizes::group;
    __syncthreads();
    if (p.reads) mn_column_store_out<T, ROWS, WARPS, 0>(smem, p, at, t, (int)(at.span.length - t));
    S.store(p, at, p.state, p.ones);
}

/* The same with PRODUCERS warps that bring the next group and take away what the last one read
 * while the others scan. */
template <typename T, int ROWS, int WARPS, int PRODUCERS, mn_column_kind KIND>
__global__ void __launch_bounds__(32 * (WARPS + PRODUCERS), 1)
column_state_scan_producer_kernel(const __grid_constant__ mn_column_params p, int64_t tiles) {
    using sizes = mn_column_sizes<ROWS, WARPS, PRODUCERS>;
    extern __shared__ float4 mn_column_smem_stages[];
    mn_column_smem<ROWS, WARPS> *const smem_stages =
        (mn_column_smem<ROWS, WARPS> *)mn_column_smem_stages;
    const mn_column_coord at = mn_column_block_coord(p, tiles);
    const int64_t length = at.span.length;
    const bool is_producer = sizes::producer_thread() >= 0;
    if (p.single_tokens && length != 1) return;
    typename mn_column_cells_of<KIND, ROWS, WARPS>::type S;
    mn_column_prefetch<T, ROWS, WARPS, PRODUCERS> ahead;
    if (!is_producer) S.load(p, at, p.state0, p.ones0);
    if (is_producer && length > 0) {
        ahead.template fetch<KIND>(p, at, 0);
        ahead.template put<KIND>(smem_stages[0]);
        if (length > sizes::group) ahead.template fetch<KIND>(p, at, sizes::group);
    }
    int here = 0;
    for (int64_t t = 0; t < length; t += sizes::group, here ^= 1) {
        __syncthreads();
        if (!is_producer) {
            mn_column_scan_group<KIND, ROWS, WARPS>(S, smem_stages[here],
                                            (int)min((int64_t)sizes::group, length - t));
            continue;
        }
        const int64_t last = t - sizes::group, next = t + sizes::group;
        if (p.reads && t > 0) {
            mn_column_store_out<T, ROWS, WARPS,
                PRODUCERS>(smem_stages[here ^ 1], p, at, last, sizes::group);
        }
        if (next < length) ahead.template put<KIND>(smem_stages[here ^ 1]);
        if (next + sizes::group < length) {
            ahead.template fetch<KIND>(p, at, next + sizes::group);
        }
    }
    __syncthreads();
    const int64_t t = (length - 1) / sizes::group * sizes::group;
    if (is_producer && p.reads) {
        mn_column_store_out<T, ROWS, WARPS,
            PRODUCERS>(smem_stages[here ^ 1], p, at, t, (int)(length - t));
    }
    if (!is_producer) S.store(p, at, p.state, p.ones);
}

/* Whether a thread's rows and columns of tokens are neighbours that come by one access each. */
template <typename T>
static bool mn_columns_vec_aligned(const mn_column_params &p, int rows) {
    const auto fits = [](const mn_in &view, int64_t width, int each) {
        bool vec_aligned = (uintptr_t)view.data % mn_min(each * sizeof(T), 16) == 0
            && width % each == 0;
        for (int axis = 0; axis < 3; axis++) vec_aligned = vec_aligned
            && view.stride[axis] % each == 0;
        return vec_aligned;
    };
    return fits(p.k, p.call.K, rows) && fits(p.q, p.call.K, rows) && fits(p.v, p.call.V, 2) &&
           fits(p.beta, p.call.V, 2) && fits(p.cot_o, p.call.V, 2);
}

/* Few columns are spread over more processors, with producer_threads; a column's result does not
 * depend on it. */
template <typename T, int ROWS, mn_column_kind KIND>
static int mn_column_launch(const mn_column_params &p, cudaStream_t on) {
    constexpr int LARGE_WARPS = MN_COLUMNS_TILE / 8, SMALL_WARPS = 2, PRODUCERS = 8;
    const int64_t heads = p.call.H * mn_n_spans(p.call);
    const bool many = mn_ceil_div(p.columns, MN_COLUMNS_TILE) * heads > 64;
    const int64_t tiles = mn_ceil_div(p.columns, 8 * (many ? LARGE_WARPS : SMALL_WARPS)),
        blocks = tiles * heads;
    if (blocks == 0) return cudaSuccess;
    if (blocks > INT32_MAX) return cudaErrorNotSupported;
    if (many) {
        column_state_scan_kernel<T, ROWS, LARGE_WARPS, KIND><<<(unsigned)blocks, 32 * LARGE_WARPS,
            0, on>>>(p, tiles);
        return mn_launch_status();
    }
    return mn_launch_smem(column_state_scan_producer_kernel<T, ROWS, SMALL_WARPS, PRODUCERS, KIND>,
                               dim3((unsigned)blocks), 32 * (SMALL_WARPS + PRODUCERS),
                               2 * sizeof(mn_column_smem<ROWS, SMALL_WARPS>), on, p, tiles);
}

template <typename T, mn_column_kind KIND>
static int mn_columns_forward(mn_column_params p, cudaStream_t on) {
    p.vec_aligned = mn_columns_vec_aligned<T>(p, mn_columns_rows(p.call) / 32);
    if (p.call.K <= 32) return mn_column_launch<T, 8, KIND>(p, on);
    if (p.call.K <= 64) return mn_column_launch<T, 16, KIND>(p, on);
    if (p.call.K <= 128) return mn_column_launch<T, 32, KIND>(p, on);
    if (p.call.K <= MN_COLUMNS_MAX_K) return mn_column_launch<T, 64, KIND>(p, on);
    return cudaErrorNotSupported;
}

}    // namespace mneme::recurrent

#endif
