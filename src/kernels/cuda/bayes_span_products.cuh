/* bayes_span_products.cuh - dk and dq of the way back of the Bayesian Layer, of all spans at once,
 * once the walks are done. Formulas are in bayes_backward.cu.
 *
 * Of a group of a head of a span they are three products: with P, summed over rows of the state,
 * with M, over value columns, and with w, over earlier tokens. Factors flow through shared memory
 * in slices of 16 of what is summed over. The same slices of du and z, then of de, y and e make the
 * weights that the third product gives to w,
 *
 *   (t, s) in dk: -z_s.du_t - e_s.de_t for s < t, c_t sigma_t for s = t
 *          in dq: e_s.y_t - 2 a_t z_s.q_t for s <= t
 *
 * Single sums and products of doubles wait long for others' products of tiles (see minus), so that
 * dq is kept without the factor `scale` of y, and tiles are scaled as products with a diagonal. */
#ifndef MN_KERNELS_CUDA_BAYES_SPAN_PRODUCTS_CUH
#define MN_KERNELS_CUDA_BAYES_SPAN_PRODUCTS_CUH

#include "kernels/cuda/bayes_span.cuh"

enum {
    PRODUCT_STAGES = 4, SLICE_WIDTH = 16, PRODUCT_THREADS = 256,
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

template <int R>
struct product_room {
    product_stage<R> stage[PRODUCT_STAGES];
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

/* As left_rows and right_rows. */
__device__ static void left_slice(double (&a)[4], const double *left, int row, int column) {
    const int lane = threadIdx.x % 32;
    const double *at = left + swizzled(row + lane / 4, column + 2 * (lane % 4));
    const double2 upper = *(const double2 *)at;
    const double2 lower = *(const double2 *)(at + 8 * SLICE_WIDTH);
    a[0] = upper.x, a[1] = lower.x, a[2] = upper.y, a[3] = lower.y;
}

__device__ static void right_slice(double (&b)[2], const double *rows, int row, int column) {
    const int lane = threadIdx.x % 32;
    const double2 x =
        *(const double2 *)(rows + swizzled(row + lane / 4, column + 2 * (lane % 4)));
    b[0] = x.x, b[1] = x.y;
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

/* This thread's number, anew at each call: what follows from it is worked out where it is wanted
 * and takes no registers in between. */
__device__ static int own_thread() {
    int thread = threadIdx.x;
    asm volatile("" : "+r"(thread));
    return thread;
}

/* Two numbers in each of two rows of do, without `scale`: what a thread has of a slice, loaded when
 * the copies of the slice start and stored a slice later. */
template <typename T>
struct product_y {
    T raw[2][2];

    /* A load that a condition guards would wait for the one before. */
    __device__ void load(const mn_bayes_args &p, const product_place &at, int row, int column) {
        if (!p.cot.o.data || at.count == 0) return;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int64_t t = at.t0 + min(row + 32 * i, at.n_rows - 1);
            const T *from = mn_row<T>(p.cot.o, at.b, t, at.h) + at.first;
#pragma unroll
            for (int k = 0; k < 2; k++) raw[i][k] = from[min(column + k, at.count - 1)];
        }
    }

    __device__ void store(double *to, const mn_bayes_args &p, const product_place &at, int row,
                          int column) const {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const bool there = p.cot.o.data && row + 32 * i < at.n_rows;
            double x[2];
#pragma unroll
            for (int k = 0; k < 2; k++) {
                x[k] = there && column + k < at.count ? (double)mn_float(raw[i][k]) : 0.0;
            }
            *(double2 *)(to + 32 * i * SLICE_WIDTH) = make_double2(x[0], x[1]);
        }
    }
};

/* A thread copies two neighbours in each of two rows, 32 rows apart, of left factors. */
__device__ static void copy_left_later(double *to, const double *from, int64_t ld) {
    copy_later(to, from), copy_later(to + 32 * SLICE_WIDTH, from + 32 * ld);
}

/* What a group's slices need besides them. */
template <typename T, int R>
__device__ static void begin_group(product_room<R> &room, const mn_bayes_args &p,
                                   const span_work &w, int64_t head, int g) {
    const int t = (int)threadIdx.x;
    const int64_t group = head * p.call.G + g;
    product_place &at = room.place;
    if (t >= SPAN_TOKENS) return;
    const double *c = w.theta + (group * SPAN_CHUNKS + t / CHUNK) * SMALL;
    copy_one_later(room.sigma + t, w.sigma + group * SPAN_TOKENS + t);
    copy_one_later(room.c + t, c + t % CHUNK * (CHUNK + 1));
    if (t == 0) {
        const span_group s = group_at(p, g);
        at.first = s.first, at.count = s.count;
    }
    const T *x = mn_row<T>(p.cot.qvar, at.b, at.t0 + min(t, at.n_rows - 1), at.h);
    if (x && p.q.data) room.twice[t] = 2.0 * p.scale * (double)mn_float(x[g]);
}

/* A slice on its way. */
template <typename T, int R>
__device__ static void fetch_slice(product_stage<R> &to, product_room<R> &room, product_y<T> &y,
                                   const product_count<R> &at, const mn_bayes_args &p,
                                   const span_work &w, int64_t head) {
    const bool weighs = p.cot.qvar.data && p.q.data;
    const int thread = own_thread(), row = thread / 8, column = thread % 8 * 2;
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
        if (at.i == 0) begin_group<T, R>(room, p, w, head, at.g);
    } else if (at.is_mean(w)) {
        const int j = at.i - at.OF_P;
        const int64_t from = t * w.columns + j * SLICE_WIDTH + column;
        right = w.M + (group * w.columns + j * SLICE_WIDTH) * R;
        copy_left_later(left, w.de + from, w.columns);
        copy_left_later(left + 2 * SLICE_LEFT, w.e + from, w.columns);
        y.load(p, room.place, row, j * SLICE_WIDTH + column);
    } else {
        right = w.w + (group * SPAN_TOKENS + (at.i - at.of_w(w)) * SLICE_WIDTH) * R;
    }
    double *rows = to.right + thread / (R / 2) * (R + 2) + thread % (R / 2) * 2;
    right += 2 * thread;
#pragma unroll
    for (int i = 0; i < R / 32; i++) {
        copy_later(rows + i * (2 * PRODUCT_THREADS / R) * (R + 2),
                   right + i * 2 * PRODUCT_THREADS);
    }
}

/* y of a slice that is on its way, if it has one. */
template <typename T, int R>
__device__ static void finish_slice(product_stage<R> &to, const product_room<R> &room,
                                    const product_y<T> &y, const product_count<R> &at,
                                    const mn_bayes_args &p, const span_work &w) {
    const int thread = own_thread(), row = thread / 8, column = thread % 8 * 2;
    if (!at.is_mean(w)) return;
    y.store(to.left[1] + swizzled(row, column), p, room.place, row,
            (at.i - at.OF_P) * SLICE_WIDTH + column);
}

/* ---- products -------------------------------------------------------------------------------- */

/* Where a warp works: chunks 0 and 3 or 1 and 2, of which sums over earlier tokens ask alike, and
 * a quarter of the columns of dk and dq. Of the weights of its chunks it has one tile of 8 earlier
 * tokens in the first chunk and up to two in the second, so that warps of a quarter of a processor
 * have five together. */
struct product_warp {
    int chunk[2], column;
    int tile[3];
    bool any[3];

    __device__ product_warp(int columns) {
        const int warp = threadIdx.x / 32, quarter = warp % 4;
        const bool outer = warp < 4;
        chunk[0] = outer ? 0 : 1, chunk[1] = outer ? 3 : 2, column = quarter * columns;
        tile[0] = quarter, any[0] = !outer || quarter < 2;
        tile[1] = outer ? 2 * quarter : quarter < 2 ? quarter : 2 * quarter - 2, any[1] = true;
        tile[2] = tile[1] + 1, any[2] = outer || quarter >= 2;
    }

    /* the chunk of tile i */
    __device__ int chunk_of(int i) const { return chunk[i > 0]; }
};

/* What a warp sums up. */
template <int TILES>
struct product_sums {
    double dk[2][TILES][2][2], dq[2][TILES][2][2];    // rows of chunks; dq without `scale`
    double along[3][2][2], reads[3][2][2];            // of weights in dk and in dq

    __device__ void clear_weights() {
#pragma unroll
        for (int i = 0; i < 3; i++) zero(along[i]), zero(reads[i]);
    }

    __device__ void clear() {
#pragma unroll
        for (int i = 0; i < 2 * TILES; i++) {
            zero(dk[i / TILES][i % TILES]), zero(dq[i / TILES][i % TILES]);
        }
        clear_weights();
    }
};

/* c += a b of the tiles of chunk m */
__device__ static void add_weights(double (&c)[3][2][2], const double (&a)[4],
                                   const double (&b)[3][2], const product_warp &at, int m) {
    if (m == 0) {
        if (at.any[0]) mn_dmma_8(c[0], a, b[0]);
    } else {
        mn_dmma_8(c[1], a, b[1]);
        if (at.any[2]) mn_dmma_8(c[2], a, b[2]);
    }
}

/* A slice of P or, with MEAN, of M. If BOTH, it says something of dq, too. */
template <int R, bool MEAN, bool BOTH>
__device__ static void add_state_slice(product_sums<R / 32> &to, const product_stage<R> &here,
                                       const double *twice, const product_warp &at) {
    constexpr int TILES = R / 32;
#pragma unroll
    for (int k = 0; k < SLICE_WIDTH; k += 8) {
        double b[TILES][2], with[3][2], a[4];
#pragma unroll
        for (int i = 0; i < TILES; i++) {
            right_columns(b[i], here.right + k * (R + 2), R + 2, at.column + 8 * i);
        }
#pragma unroll
        for (int i = 0; i < 3; i++) right_slice(with[i], here.left[2], 8 * at.tile[i], k);
#pragma unroll
        for (int m = 0; m < 2; m++) {
            left_slice(a, here.left[0], at.chunk[m] * CHUNK, k);
#pragma unroll
            for (int i = 0; i < 4 && MEAN; i++) a[i] = minus(a[i]);
#pragma unroll
            for (int i = 0; i < TILES; i++) mn_dmma_8(to.dk[m][i], a, b[i]);
            add_weights(to.along, a, with, at, m);
            if (!BOTH) continue;
            left_slice(a, here.left[1], at.chunk[m] * CHUNK, k);
            add_weights(to.reads, a, with, at, m);
#pragma unroll
            for (int i = 0; i < 4 && !MEAN; i++) {
                a[i] *= twice[at.chunk[m] * CHUNK + i % 2 * 8 + (int)threadIdx.x % 32 / 4];
            }
#pragma unroll
            for (int i = 0; i < TILES; i++) mn_dmma_8(to.dq[m][i], a, b[i]);
        }
    }
}

/* Slice j of w, which has no part in chunks before its own. */
template <int R>
__device__ static void add_token_slice(product_sums<R / 32> &to, const product_room<R> &room,
                                       const product_stage<R> &here, int j,
                                       const product_warp &at) {
    constexpr int TILES = R / 32;
#pragma unroll
    for (int k = 0; k < SLICE_WIDTH; k += 8) {
        double b[TILES][2], a[4];
#pragma unroll
        for (int i = 0; i < TILES; i++) {
            right_columns(b[i], here.right + k * (R + 2), R + 2, at.column + 8 * i);
        }
#pragma unroll
        for (int m = 0; m < 2; m++) {
            if (at.chunk[m] < j) continue;
            left_slice(a, room.weights[0] + weights_at(j), at.chunk[m] * CHUNK, k);
#pragma unroll
            for (int i = 0; i < TILES; i++) mn_dmma_8(to.dk[m][i], a, b[i]);
            left_slice(a, room.weights[1] + weights_at(j), at.chunk[m] * CHUNK, k);
#pragma unroll
            for (int i = 0; i < TILES; i++) mn_dmma_8(to.dq[m][i], a, b[i]);
        }
    }
}

/* From du.w and q.w to -du.z and -2 a q.z / scale. */
template <int R>
__device__ static void scale_weights(product_sums<R / 32> &x, const product_room<R> &room,
                                     const product_warp &at, bool weighs) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < 3; i++) {
        const double by = minus(room.sigma[8 * at.tile[i] + lane / 4]);
        double a[4], b[2];
        b[0] = 2 * (lane % 4) == lane / 4 ? by : 0.0;
        b[1] = 2 * (lane % 4) + 1 == lane / 4 ? by : 0.0;
        left_result(a, x.along[i]), zero(x.along[i]);
        mn_dmma_8(x.along[i], a, b);
        if (!weighs) continue;
        left_result(a, x.reads[i]), zero(x.reads[i]);
#pragma unroll
        for (int k = 0; k < 4; k++) {
            a[k] *= room.twice[at.chunk_of(i) * CHUNK + k % 2 * 8 + lane / 4];
        }
        mn_dmma_8(x.reads[i], a, b);
    }
}

/* The weights of a group into the room; then they are zero again. */
template <int R>
__device__ static void put_weights(product_room<R> &room, product_sums<R / 32> &x,
                                   const product_warp &at) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < 3; i++) {
        const int column = 8 * at.tile[i], s = column + 2 * (lane % 4);
        double *slice = room.weights[0] + weights_at(column / SLICE_WIDTH);
        if (!at.any[i]) continue;
#pragma unroll
        for (int m = 0; m < 2; m++) {
            const int t = at.chunk_of(i) * CHUNK + 8 * m + lane / 4;
            double along[2], reads[2];
#pragma unroll
            for (int k = 0; k < 2; k++) {
                along[k] = s + k < t ? x.along[i][m][k] : 0.0;
                if (s + k == t) along[k] = room.c[t] * room.sigma[t];
                reads[k] = s + k <= t ? x.reads[i][m][k] : 0.0;
            }
            double *to = slice + swizzled(t, s % SLICE_WIDTH);
            *(double2 *)to = make_double2(along[0], along[1]);
            *(double2 *)(to + WEIGHTS) = make_double2(reads[0], reads[1]);
        }
    }
    x.clear_weights();
}

/* All that a slice is good for. */
template <int R>
__device__ static void multiply_slice(product_sums<R / 32> &x, product_room<R> &room,
                                      const product_stage<R> &here, const product_count<R> &s,
                                      const span_work &w, const product_warp &at, bool weighs) {
    if (s.i >= s.of_w(w)) {
        add_token_slice<R>(x, room, here, s.i - s.of_w(w), at);
        return;
    }
    if (s.is_mean(w)) add_state_slice<R, true, true>(x, here, room.twice, at);
    else if (weighs) add_state_slice<R, false, true>(x, here, room.twice, at);
    else add_state_slice<R, false, false>(x, here, room.twice, at);
    if (s.i + 1 == s.OF_P) scale_weights<R>(x, room, at, weighs);
    if (s.i + 1 == s.of_w(w)) put_weights<R>(room, x, at);
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

/* dk and dq of a head of a span in the frame, of all groups, but for the noise, in place of the
 * first group's P; and dr2. */
template <typename T, int R>
__global__ void __launch_bounds__(PRODUCT_THREADS, 1)
span_products_kernel(const __grid_constant__ mn_bayes_args p,
                     const __grid_constant__ span_work w) {
    extern __shared__ __align__(16) double doubles[];
    product_room<R> &room = *(product_room<R> *)doubles;
    constexpr int TILES = R / 32;
    const int64_t H = p.call.H, G = p.call.G, head = blockIdx.x;
    const mn_tile_span tile = mn_tile_at(p.call, SPAN_TOKENS, head / H);
    if (tile.n_rows == 0 || w.steep[tile.n * H + head % H]) return;
    const bool weighs = p.cot.qvar.data && p.q.data;
    const product_warp at(8 * TILES);
    if (threadIdx.x == 0) {
        room.place.b = tile.span.b, room.place.t0 = tile.span.t0 + tile.first;
        room.place.h = head % H, room.place.n_rows = (int)tile.n_rows;
    }
    __syncthreads();
    product_sums<TILES> x;
    product_y<T> y;
    product_count<R> ahead = { 0, 0 };
    x.clear();
    for (int i = 0; i < PRODUCT_STAGES - 1; i++) {    // slices of P
        if (i > 0) ahead.next(w);
        fetch_slice<T, R>(room.stage[i], room, y, ahead, p, w, head);
        close_copies();
    }
    put_dr2<T>(p, w, tile, head);
    int stage = 0, before = PRODUCT_STAGES - 2;
    for (product_count<R> s = { 0, 0 }; s.g < (int)G; s.next(w)) {
        asm volatile("cp.async.wait_group %0;" ::"n"(PRODUCT_STAGES - 2) : "memory");
        __syncthreads();
        finish_slice<T, R>(room.stage[before], room, y, ahead, p, w);
        before = before + 1 == PRODUCT_STAGES ? 0 : before + 1;
        ahead.next(w);
        if (ahead.g < (int)G) {
            fetch_slice<T, R>(room.stage[before], room, y, ahead, p, w, head);
        }
        close_copies();
        multiply_slice<R>(x, room, room.stage[stage], s, w, at, weighs);
        stage = stage + 1 == PRODUCT_STAGES ? 0 : stage + 1;
    }
    __syncthreads();
    double *to = w.P + head * G * w.P_each;
#pragma unroll
    for (int m = 0; m < 2; m++) {
        double *rows = to + at.chunk[m] * CHUNK * R;
#pragma unroll
        for (int j = 0; j < TILES; j++) {
#pragma unroll
            for (int i = 0; i < 4; i++) x.dq[m][j][i / 2][i % 2] *= (double)p.scale;
            put_rows(rows, R, at.column + 8 * j, x.dk[m][j]);
            put_rows(rows + SPAN_TOKENS * R, R, at.column + 8 * j, x.dq[m][j]);
        }
    }
}

#endif
