/* bayes_span_gemm.cu - dk and dq of the way back of the Bayesian Layer, of all spans at once,
 * once the scans are done. Formulas are in bayes_bwd_chunk.cu.
 *
 * Of a group of a head of a span they are three products: with P, summed over rows of the state,
 * with M, over value columns, and with w, over earlier tokens. Factors flow through shared memory
 * in slices of 16 of what is summed over. The same slices of du and z, then of de, y and e make the
 * weights that the third product gives to w,
 *
 *   (t, s) in dk: -z_s.du_t - e_s.de_t for s < t, c_t sigma_t for s = t
 *          in dq: e_s.y_t - 2 a_t z_s.q_t for s <= t
 *
 * Tiles have rows of the state, or earlier tokens, as rows and tokens as columns: then both factors
 * come from shared memory as registers of a product want them, with no moves in between. dq is kept
 * without the factor `scale` of y. */
#include "kernels/cuda/bayes/bayes_span.cuh"
#include "kernels/cuda/prim/mbarrier.cuh"
#include "kernels/cuda/prim/sync.cuh"

namespace mneme::bayes {

enum {
    SLICE_WIDTH = 16,
    PRODUCT_THREADS = 256, COPY_THREADS = 128,
    COPY_ROWS = COPY_THREADS / 8, COPIES = SPAN_TOKENS / COPY_ROWS,    // of left factors
    SLICE_LEFT = SPAN_TOKENS * SLICE_WIDTH,    // numbers of a slice of 64 rows
    WEIGHTS = SPAN_CHUNKS * (SPAN_CHUNKS + 1) / 2 * SMALL,
};

template <int R>
struct product_stage {
    double left[3][SLICE_LEFT];    // of dk, of dq; z or e: swizzled
    double right[SLICE_WIDTH * (R + 2)];
};

/* The tokens of a block, and the value columns of the group whose slices come next. */
struct product_place {
    int64_t b, t0, h;
    int n_rows, first, count;
};

/* TIGHT: one slice fewer is on its way. */
template <int R, bool TIGHT>
struct product_smem {
    static constexpr int N_STAGES = TIGHT ? 3 : 4;

    product_stage<R> stage[N_STAGES];
    double weights[2][WEIGHTS];    // of dk and dq: (t, s) in slices of 16 s, from the first t >= s
    double sigma[SPAN_TOKENS], c[SPAN_TOKENS];
    double twice[SPAN_TOKENS];     // 2 a / scale
    product_place place;
};

/* ---- slices ---------------------------------------------------------------------------------- */

/* Where column `column`, even, of a row of a slice's left factors is: neighbouring rows exchange
 * halves, so that four lanes of each read all banks. */
__device__ static int swizzled(int row, int column) {
    return row * SLICE_WIDTH + ((column / 2) ^ (row % 2 * 4)) * 2;
}

/* -x where `flip` is the bit of the sign, x where it is zero */
__device__ static double flipped(double x, int flip) {
    return __hiloint2double(__double2hiint(x) ^ flip, __double2loint(x));
}

/* Eight rows of a slice read as columns, and sixteen as rows, summed over [column, column + 8) in
 * the order 0 2 4 6 1 3 5 7. */
__device__ static void right_slice(double (&b)[2], const double *slice, int row, int column) {
    const int lane = threadIdx.x % 32;
    const double2 x =
        *(const double2 *)(slice + swizzled(row + lane / 4, column + 2 * (lane % 4)));
    b[0] = x.x, b[1] = x.y;
}

__device__ static void left_slice(double (&a)[4], const double *slice, int row, int column,
                                  int flip) {
    const int lane = threadIdx.x % 32;
    const double *at = slice + swizzled(row + lane / 4, column + 2 * (lane % 4));
    const double2 upper = *(const double2 *)at;
    const double2 lower = *(const double2 *)(at + 8 * SLICE_WIDTH);
    a[0] = flipped(upper.x, flip), a[1] = flipped(lower.x, flip);
    a[2] = flipped(upper.y, flip), a[3] = flipped(lower.y, flip);
}

/* Sixteen columns from `column` on as rows, summed over rows [row, row + 8) in that order. */
__device__ static void left_columns(double (&a)[4], const double *rows, int ld, int row, int column,
                                    int flip) {
    const int lane = threadIdx.x % 32;
    const double *at = rows + (row + 2 * (lane % 4)) * ld + column + lane / 4;
    a[0] = flipped(at[0], flip), a[1] = flipped(at[8], flip);
    a[2] = flipped(at[ld], flip), a[3] = flipped(at[ld + 8], flip);
}

/* Where row 0 of slice j of the weights would be; its first row is 16 j. */
__device__ static int weights_at(int j) {
    return j * (56 - 8 * j) * SLICE_WIDTH;
}

/* ---- copies ---------------------------------------------------------------------------------- */

/* Counts slices: of P, of M and of w of a head's group, then of the next one. */
template <int R>
struct product_count {
    static constexpr int OF_P = R / SLICE_WIDTH;
    int g, i;

    __device__ int of_w(const span_work &w) const { return OF_P + w.columns / SLICE_WIDTH; }
    __device__ int all(const span_work &w) const { return of_w(w) + SPAN_CHUNKS; }
    __device__ bool is_mean(const span_work &w) const { return i >= OF_P && i < of_w(w); }

    __device__ void next(const span_work &w) {
        if (++i == all(w)) i = 0, g++;
    }
};

/* This thread's number among those that copy. */
__device__ static int copy_thread() {
    return (int)(fresh_thread() % COPY_THREADS);
}

/* Two numbers in each of COPIES rows of do, without `scale`: what a thread has of a slice, loaded
 * when the copies of the slice start and stored a slice later. */
template <typename T>
struct product_y {
    T raw[COPIES][2];

    /* A load that a condition guards would wait for the one before. */
    __device__ void load(const mn_bayes_args &p, const product_place &at, int row, int column) {
        if (!p.cot.o.data || at.count == 0) return;
#pragma unroll
        for (int i = 0; i < COPIES; i++) {
            const int64_t t = at.t0 + min(row + COPY_ROWS * i, at.n_rows - 1);
            const T *from = mn_row<T>(p.cot.o, at.b, t, at.h) + at.first;
#pragma unroll
            for (int k = 0; k < 2; k++) raw[i][k] = from[min(column + k, at.count - 1)];
        }
    }

    __device__ void store(double *to, const mn_bayes_args &p, const product_place &at, int row,
                          int column) const {
#pragma unroll
        for (int i = 0; i < COPIES; i++) {
            const bool there = p.cot.o.data && row + COPY_ROWS * i < at.n_rows;
            double x[2];
#pragma unroll
            for (int k = 0; k < 2; k++) {
                x[k] = there && column + k < at.count ? (double)mn_float(raw[i][k]) : 0.0;
            }
            *(double2 *)(to + COPY_ROWS * i * SLICE_WIDTH) = make_double2(x[0], x[1]);
        }
    }
};

/* A thread copies two neighbours in each of COPIES rows of left factors. */
__device__ static void copy_left_later(double *to, const double *from, int64_t ld) {
#pragma unroll
    for (int i = 0; i < COPIES; i++) {
        copy_later(to + i * COPY_ROWS * SLICE_WIDTH, from + i * COPY_ROWS * ld);
    }
}

/* What a group's slices need besides them. */
template <typename T, int R, bool TIGHT>
__device__ static void begin_group(product_smem<R, TIGHT> &smem, const mn_bayes_args &p,
                                   const span_work &w, int64_t head, int g) {
    const int t = copy_thread();
    const int64_t group = head * p.call.G + g;
    product_place &at = smem.place;
    if (t >= SPAN_TOKENS) return;
    const double *c = w.theta + (group * SPAN_CHUNKS + t / CHUNK) * SMALL;
    copy_one_later(smem.sigma + t, w.sigma + group * SPAN_TOKENS + t);
    copy_one_later(smem.c + t, c + t % CHUNK * (CHUNK + 1));
    if (t == 0) {
        const span_group s = group_at(p, g);
        at.first = s.first, at.count = s.count;
    }
    const int64_t when = at.t0 + min(t, at.n_rows - 1);
    const T *y = mn_row<T>(p.cot.o, at.b, when, at.h);
    if (y) {    // it is read without copies: what waits for it should not wait for memory
        const span_group s = group_at(p, g);
        for (int j = 0; j < s.count; j += 128 / (int)sizeof(T)) {
            mn_prefetch_l2(y + s.first + j);
        }
    }
    const T *x = mn_row<T>(p.cot.qvar, at.b, when, at.h);
    if (x && p.q.data) smem.twice[t] = 2.0 * p.scale * (double)mn_float(x[g]);
}

/* A slice on its way. */
template <typename T, int R, bool TIGHT>
__device__ static void load_slice(product_stage<R> &to, product_smem<R, TIGHT> &smem,
                                  product_y<T> &y, const product_count<R> &at,
                                  const mn_bayes_args &p, const span_work &w, int64_t head) {
    const bool weighs = p.cot.qvar.data && p.q.data;
    const int thread = copy_thread(), row = thread / 8, column = thread % 8 * 2;
    const int64_t group = head * p.call.G + at.g, t = group * SPAN_TOKENS + row;
    double *left = to.left[0] + swizzled(row, column);
    const double *right;
    if (at.i < at.OF_P) {
        const int64_t from = t * R + at.i * SLICE_WIDTH + column;
        const double *q = w.q + (head - group) * SPAN_TOKENS * R;
        right = w.P + group * w.P_each + at.i * SLICE_WIDTH * R;
        copy_left_later(left, w.h + from, R);
        if (weighs) copy_left_later(left + SLICE_LEFT, q + from, R);
        copy_left_later(left + 2 * SLICE_LEFT, w.w + from, R);
        if (at.i == 0) begin_group<T, R, TIGHT>(smem, p, w, head, at.g);
    } else if (at.is_mean(w)) {
        const int j = at.i - at.OF_P;
        const int64_t from = t * w.columns + j * SLICE_WIDTH + column;
        right = w.M + (group * w.columns + j * SLICE_WIDTH) * R;
        copy_left_later(left, w.de + from, w.columns);
        copy_left_later(left + 2 * SLICE_LEFT, w.e + from, w.columns);
        y.load(p, smem.place, row, j * SLICE_WIDTH + column);
    } else {
        right = w.w + (group * SPAN_TOKENS + (at.i - at.of_w(w)) * SLICE_WIDTH) * R;
    }
    double *rows = to.right + thread / (R / 2) * (R + 2) + thread % (R / 2) * 2;
    right += 2 * thread;
#pragma unroll
    for (int i = 0; i < SLICE_WIDTH * R / 2 / COPY_THREADS; i++) {
        copy_later(rows + i * (2 * COPY_THREADS / R) * (R + 2), right + i * 2 * COPY_THREADS);
    }
}

/* y of a slice that is on its way, if it has one. */
template <typename T, int R, bool TIGHT>
__device__ static void finish_slice(product_stage<R> &to, const product_smem<R, TIGHT> &smem,
                                    const product_y<T> &y, const product_count<R> &at,
                                    const mn_bayes_args &p, const span_work &w) {
    const int thread = copy_thread(), row = thread / 8, column = thread % 8 * 2;
    if (!at.is_mean(w)) return;
    y.store(to.left[1] + swizzled(row, column), p, smem.place, row,
            (at.i - at.OF_P) * SLICE_WIDTH + column);
}

/* ---- products -------------------------------------------------------------------------------- */

/* Where a warp works: a quarter of the columns of dk or of dq, which are rows of the tiles, of all
 * tokens, and five of the twenty tiles of their weights, 16 earlier tokens s by 8 tokens t. Both
 * warps of a quarter of a processor have the same place; the one for dq, which has nothing to do
 * with P unless dqvar is there, also copies. */
struct product_warp {
    bool reads;
    int quarter, tiles;    // the t of its tiles, a bit for each eight

    __device__ product_warp() {
        reads = threadIdx.x >= PRODUCT_THREADS - COPY_THREADS, quarter = threadIdx.x / 32 % 4;
        tiles = quarter == 0 ? 0xcb : quarter == 2 ? 0xf8 : 0xf4;
    }

    /* the s of the tile of tokens [8 u, 8 u + 8) */
    __device__ int earlier(int u) const {
        const int block = quarter < 2 ? quarter : quarter == 2 ? (u < 4 ? 1 : 2) : u < 6 ? 0 : 3;
        return block * CHUNK;
    }
};

enum { TOKEN_TILES = SPAN_TOKENS / 8, WEIGHT_TILES = 5 };

/* Where a warp keeps the tile of tokens [8 u, 8 u + 8): none has two in one place. */
__device__ constexpr int weight_place(int u) {
    return u < 2 ? u + 1 : u < 4 ? 0 : u - 3;
}

/* What a warp sums up of dk, or of dq without `scale`. */
template <int R>
struct product_sums {
    static constexpr int TILES = R / 64;
    double d[TILES][TOKEN_TILES][2][2], weights[WEIGHT_TILES][2][2];

    __device__ void clear_weights() {
#pragma unroll
        for (int i = 0; i < WEIGHT_TILES; i++) zero(weights[i]);
    }

    __device__ void clear() {
#pragma unroll
        for (int i = 0; i < TILES * TOKEN_TILES; i++) zero(d[i / TOKEN_TILES][i % TOKEN_TILES]);
        clear_weights();
    }
};

/* A slice of P or of M, and z or e of earlier tokens, times rows of tokens; the former and the
 * latter with another sign if `flip` has that bit, and SCALED by tokens. */
template <int R, bool SCALED>
__device__ static void add_state_slice(product_sums<R> &to, const product_stage<R> &here,
                                       const double *twice, int flip, const product_warp &at) {
    const double *rows = here.left[at.reads];
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int k = 0; k < SLICE_WIDTH; k += 8) {
        double a[to.TILES][4], z[4], b[2];
#pragma unroll
        for (int i = 0; i < to.TILES; i++) {
            left_columns(a[i], here.right, R + 2, k, at.quarter * (R / 4) + 16 * i, flip);
        }
        left_slice(z, here.left[2], at.earlier(0), k, flip);
#pragma unroll
        for (int u = 0; u < TOKEN_TILES; u++) {
            right_slice(b, rows, 8 * u, k);
            if ((u == 4 && at.quarter == 2) || (u == 6 && at.quarter == 3)) {
                left_slice(z, here.left[2], at.earlier(u), k, flip);
            }
            if (at.tiles >> u & 1) mn_mma_f64_k8(to.weights[weight_place(u)], z, b);
            if (SCALED) b[0] *= twice[8 * u + lane / 4], b[1] *= twice[8 * u + lane / 4];
#pragma unroll
            for (int i = 0; i < to.TILES; i++) mn_mma_f64_k8(to.d[i][u], a[i], b);
        }
    }
}

/* Slice j of w times its weights; it has no part in tokens before its own. */
template <int R, bool TIGHT>
__device__ static void add_token_slice(product_sums<R> &to, const product_smem<R, TIGHT> &smem,
                                       const product_stage<R> &here, int j,
                                       const product_warp &at) {
    const double *rows = smem.weights[at.reads] + weights_at(j);
#pragma unroll
    for (int k = 0; k < SLICE_WIDTH; k += 8) {
        double a[to.TILES][4], b[2];
#pragma unroll
        for (int i = 0; i < to.TILES; i++) {
            left_columns(a[i], here.right, R + 2, k, at.quarter * (R / 4) + 16 * i, 0);
        }
#pragma unroll
        for (int u = 0; u < TOKEN_TILES; u++) {
            if (u < 2 * j) continue;
            right_slice(b, rows, 8 * u, k);
#pragma unroll
            for (int i = 0; i < to.TILES; i++) mn_mma_f64_k8(to.d[i][u], a[i], b);
        }
    }
}

/* From w.du and w.q to -z.du and -2 a z.q / scale. */
template <int R, bool TIGHT>
__device__ static void scale_weights(product_sums<R> &x, const product_smem<R, TIGHT> &smem,
                                     const product_warp &at) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int u = 0; u < TOKEN_TILES; u++) {
        if (!(at.tiles >> u & 1)) continue;
        double (&c)[2][2] = x.weights[weight_place(u)];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            double by = minus(smem.sigma[at.earlier(u) + i / 2 * 8 + lane / 4]);
            if (at.reads) by *= smem.twice[8 * u + 2 * (lane % 4) + i % 2];
            c[i / 2][i % 2] *= by;
        }
    }
}

/* The weights of a group into shared memory; then they are zero again. */
template <int R, bool TIGHT>
__device__ static void put_weights(product_smem<R, TIGHT> &smem, product_sums<R> &x,
                                   const product_warp &at) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int u = 0; u < TOKEN_TILES; u++) {
        if (!(at.tiles >> u & 1)) continue;
        const double (&c)[2][2] = x.weights[weight_place(u)];
        double *slice = smem.weights[at.reads] + weights_at(at.earlier(u) / SLICE_WIDTH);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int column = i / 2 * 8 + lane / 4, s = at.earlier(u) + column;
            const int t = 8 * u + 2 * (lane % 4) + i % 2;
            double put = s <= t ? c[i / 2][i % 2] : 0.0;
            if (s == t && !at.reads) put = smem.c[t] * smem.sigma[t];
            slice[swizzled(t, column / 2 * 2) + column % 2] = put;
        }
    }
    x.clear_weights();
}

/* All that a slice is good for. */
template <int R, bool TIGHT>
__device__ static void multiply_slice(product_sums<R> &x, product_smem<R, TIGHT> &smem,
                                      const product_stage<R> &here, const product_count<R> &s,
                                      const span_work &w, const product_warp &at, bool weighs) {
    const bool mean = s.is_mean(w), idle = at.reads && !weighs;
    if (s.i >= s.of_w(w)) {
        add_token_slice<R, TIGHT>(x, smem, here, s.i - s.of_w(w), at);
        return;
    }
    if (mean || !at.reads) {
        add_state_slice<R, false>(x, here, smem.twice, mean && !at.reads ? (int)0x80000000 : 0,
                                  at);
    } else if (weighs) {
        add_state_slice<R, true>(x, here, smem.twice, 0, at);
    }
    if (s.i + 1 == s.OF_P && !idle) scale_weights<R, TIGHT>(x, smem, at);
    if (s.i + 1 == s.of_w(w)) put_weights<R, TIGHT>(smem, x, at);
}

/* dr2 of all groups of a head of a span. */
template <typename T>
__device__ static void put_dr2(const mn_bayes_args &p, const span_work &w,
                               const mn_tile_span &tile, int64_t head) {
    const int64_t G = p.call.G, h = head % p.call.H;
    for (int64_t i = threadIdx.x; i < tile.n_rows * G; i += PRODUCT_THREADS) {
        const int64_t g = i % G, t = i / G, when = tile.span.t0 + tile.first + t;
        const int64_t at = (head * G + g) * SPAN_TOKENS + t;
        const T *dgain = mn_row<T>(p.cot.gain, tile.span.b, when, h);
        const T *dkvar = mn_row<T>(p.cot.kvar, tile.span.b, when, h);
        T *dr2 = mn_row<T>(p.grad.r2, tile.span.b, when, h);
        const double c = w.theta[at / CHUNK * SMALL + at % CHUNK * (CHUNK + 1)];
        const double gain = (double)mn_get(dgain, g) / w.sigma[at];
        if (dr2) mn_put(dr2 + g, (float)(c - (double)mn_get(dkvar, g) - gain));
    }
}

/* What a warp has summed up, in place of the first group's P. */
template <int R>
__device__ static void put_products(const product_sums<R> &x, const mn_bayes_args &p,
                                    const span_work &w, int64_t head, const product_warp &at) {
    const int lane = threadIdx.x % 32;
    double *to = w.P + head * p.call.G * w.P_each + at.quarter * (R / 4) + lane / 4;
    if (at.reads) to += SPAN_TOKENS * R;
#pragma unroll
    for (int i = 0; i < x.TILES * TOKEN_TILES * 4; i++) {
        const int tile = i / 4 / TOKEN_TILES, u = i / 4 % TOKEN_TILES, m = i / 2 % 2;
        const int t = 8 * u + 2 * (lane % 4) + i % 2;
        const double d = x.d[tile][u][m][i % 2];
        to[t * R + 16 * tile + 8 * m] = at.reads ? (double)p.scale * d : d;
    }
}

/* dk and dq of a head of a span in the frame, of all groups, but for the noise, in place of the
 * first group's P; and dr2. */
template <typename T, int R, bool TIGHT>
__device__ static void products_of(product_smem<R, TIGHT> &smem, const mn_bayes_args &p,
                                   const span_work &w, int64_t head) {
    constexpr int N_STAGES = product_smem<R, TIGHT>::N_STAGES;
    const int64_t H = p.call.H, G = p.call.G;
    const mn_tile_span tile = mn_tile_at(p.call, SPAN_TOKENS, head / H);
    if (tile.n_rows == 0 || w.steep[tile.n * H + head % H]) return;
    const bool weighs = p.cot.qvar.data && p.q.data;
    const product_warp at;
    if (threadIdx.x == 0) {
        smem.place.b = tile.span.b, smem.place.t0 = tile.span.t0 + tile.first;
        smem.place.h = head % H, smem.place.n_rows = (int)tile.n_rows;
    }
    __syncthreads();
    product_sums<R> x;
    product_y<T> y;
    product_count<R> ahead = { 0, 0 };
    x.clear();
    for (int i = 0; i < N_STAGES - 1; i++) {    // slices of P
        if (i > 0) ahead.next(w);
        if (at.reads) load_slice<T, R, TIGHT>(smem.stage[i], smem, y, ahead, p, w, head);
        close_copies();
    }
    put_dr2<T>(p, w, tile, head);
    int stage = 0, before = N_STAGES - 2;
    for (product_count<R> s = { 0, 0 }; s.g < (int)G; s.next(w)) {
        asm volatile("cp.async.wait_group %0;" ::"n"(N_STAGES - 2) : "memory");
        __syncthreads();
        product_stage<R> &last = smem.stage[before];
        before = before + 1 == N_STAGES ? 0 : before + 1;
        if (at.reads) {
            finish_slice<T, R, TIGHT>(last, smem, y, ahead, p, w);
            ahead.next(w);
            if (ahead.g < (int)G) {
                load_slice<T, R, TIGHT>(smem.stage[before], smem, y, ahead, p, w, head);
            }
            close_copies();
        }
        multiply_slice<R, TIGHT>(x, smem, smem.stage[stage], s, w, at, weighs);
        stage = stage + 1 == N_STAGES ? 0 : stage + 1;
    }
    __syncthreads();
    put_products<R>(x, p, w, head, at);
}

template <typename T, int R, bool TIGHT, bool REDO>
__global__ void __launch_bounds__(PRODUCT_THREADS, 1)
span_products_kernel(const __grid_constant__ mn_bayes_args p,
                     const __grid_constant__ span_work w) {
    extern __shared__ __align__(16) double doubles[];
    each_span<REDO>(p, w, blockIdx.x, [&](int64_t head) {
        products_of<T, R, TIGHT>(*(product_smem<R, TIGHT> *)doubles, p, w, head);
    });
}

/* ---- the same with warps that copy alone ----------------------------------------------------- */

/* On Hopper a warp group issues all copies and stays ahead by N_STAGES slices; those that multiply
 * wait for slices only, not for each other's copies. */
template <int R>
struct apart_smem {
    static constexpr int N_STAGES = product_smem<R, false>::N_STAGES;

    product_smem<R, false> of;
    uint64_t full[N_STAGES], empty[N_STAGES];
};

enum { APART_THREADS = PRODUCT_THREADS + COPY_THREADS, PRODUCT_WARPS = PRODUCT_THREADS / 32 };

/* Registers of a thread; together those of a processor: 256 x 232 + 128 x 40 = 384 x 168. */
enum { MULTIPLY_REGISTERS = 232, COPY_REGISTERS = 40 };

/* Arrives at the barrier when all copies of this thread so far have come. */
__device__ inline void arrive_with_copies(uint64_t *mbar) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(mn_smem_addr(mbar))
                 : "memory");
}

/* Slices of all groups of a head to shared memory. A thread arrives twice at a slice's barrier: by
 * its copies, and once it has stored y, a slice later. What begin_group writes of a group follows
 * when each warp has given back the first slice of w of the group before, behind which nobody reads
 * that one's. */
template <typename T, int R>
__device__ static void copy_slices(apart_smem<R> &smem, const mn_bayes_args &p,
                                   const span_work &w, int64_t head) {
    constexpr int N_STAGES = apart_smem<R>::N_STAGES;
    static_assert(N_STAGES <= SPAN_CHUNKS, "the stage had one of the last group's slices of w");
    product_y<T> y;
    product_count<R> at = { 0, 0 }, before = at;
    int stage = 0, last = 0, turn = 0;
    for (bool first = true; at.g < (int)p.call.G; first = false) {
        if (turn > 0) mn_mbarrier_wait(&smem.empty[stage], (turn - 1) & 1);
        if (!first) {
            finish_slice<T, R, false>(smem.of.stage[last], smem.of, y, before, p, w);
            mn_mbarrier_arrive(&smem.full[last]);
        }
        load_slice<T, R, false>(smem.of.stage[stage], smem.of, y, at, p, w, head);
        arrive_with_copies(&smem.full[stage]);
        before = at, at.next(w), last = stage;
        if (++stage == N_STAGES) stage = 0, turn++;
    }
    finish_slice<T, R, false>(smem.of.stage[last], smem.of, y, before, p, w);
    mn_mbarrier_arrive(&smem.full[last]);
}

template <int R>
__device__ static void multiply_slices(product_sums<R> &x, apart_smem<R> &smem,
                                       const mn_bayes_args &p, const span_work &w,
                                       const product_warp &at) {
    constexpr int N_STAGES = apart_smem<R>::N_STAGES;
    const bool weighs = p.cot.qvar.data && p.q.data;
    int stage = 0, turn = 0;
    for (product_count<R> s = { 0, 0 }; s.g < (int)p.call.G; s.next(w)) {
        mn_mbarrier_wait(&smem.full[stage], turn);
        multiply_slice<R, false>(x, smem.of, smem.of.stage[stage], s, w, at, weighs);
        if (s.i + 1 == s.of_w(w)) mn_named_barrier_sync(1, PRODUCT_THREADS);    // weights
        mn_mbarrier_arrive_warp(&smem.empty[stage]);
        if (++stage == N_STAGES) stage = 0, turn ^= 1;
    }
}

/* As span_products_kernel. */
template <typename T, int R>
__global__ void __launch_bounds__(APART_THREADS, 1)
span_products_apart_kernel(const __grid_constant__ mn_bayes_args p,
                           const __grid_constant__ span_work w) {
#if MN_HAS_WGMMA
    extern __shared__ __align__(16) double doubles[];
    apart_smem<R> &smem = *(apart_smem<R> *)doubles;
    const int64_t H = p.call.H, head = blockIdx.x;
    const mn_tile_span tile = mn_tile_at(p.call, SPAN_TOKENS, head / H);
    if (tile.n_rows == 0 || w.steep[tile.n * H + head % H]) return;
    if (threadIdx.x == 0) {
        product_place &place = smem.of.place;
        place.b = tile.span.b, place.t0 = tile.span.t0 + tile.first;
        place.h = head % H, place.n_rows = (int)tile.n_rows;
        for (int i = 0; i < apart_smem<R>::N_STAGES; i++) {
            mn_mbarrier_init(&smem.full[i], 2 * COPY_THREADS);
            mn_mbarrier_init(&smem.empty[i], PRODUCT_WARPS);
        }
    }
    __syncthreads();
    if (threadIdx.x >= PRODUCT_THREADS) {
        mn_setmaxnreg_dec<COPY_REGISTERS>();
        copy_slices<T, R>(smem, p, w, head);
    } else {
        mn_setmaxnreg_inc<MULTIPLY_REGISTERS>();
        const product_warp at;
        product_sums<R> x;
        x.clear();
        put_dr2<T>(p, w, tile, head);
        multiply_slices<R>(x, smem, p, w, at);
        put_products<R>(x, p, w, head, at);
    }
#endif
}

/* ---- launches -------------------------------------------------------------------------------- */

template <int R>
static size_t smem_bytes(bool tight) {
    if (tight) return sizeof(product_smem<R, true>);
    return mn_device_is_sm90() ? sizeof(apart_smem<R>) : sizeof(product_smem<R, false>);
}

size_t span_products_smem(int R, bool tight) {
    static_assert(sizeof(product_smem<128, true>) <= 163 * 1024, "what a GPU of 8.0 has");
    return R == 64 ? smem_bytes<64>(tight) : smem_bytes<128>(tight);
}

template <typename T, int R>
static int start(const mn_bayes_args *p, const span_work &w, bool tight, cudaStream_t on) {
    const dim3 grid(span_blocks(p, w));
    const size_t bytes = smem_bytes<R>(tight);
    if (!w.redo && !tight && mn_device_is_sm90()) {
        return mn_launch_smem(span_products_apart_kernel<T, R>, grid, APART_THREADS, bytes, on, *p,
                              w);
    }
    const auto kernel = w.redo ? tight ? span_products_kernel<T, R, true, true>
                                       : span_products_kernel<T, R, false, true>
                        : tight ? span_products_kernel<T, R, true, false>
                                : span_products_kernel<T, R, false, false>;
    return mn_launch_smem(kernel, grid, PRODUCT_THREADS, bytes, on, *p, w);
}

template <typename T>
static int start_rows(const mn_bayes_args *p, const span_work &w, int R, bool tight,
                      cudaStream_t on) {
    return R == 64 ? start<T, 64>(p, w, tight, on) : start<T, 128>(p, w, tight, on);
}

int span_products(const mn_bayes_args *p, const span_work &w, int R, bool tight, cudaStream_t on) {
    return p->call.dtype == MN_BF16 ? start_rows<mn_bf16>(p, w, R, tight, on)
                                    : start_rows<float>(p, w, R, tight, on);
}

}    // namespace mneme::bayes

