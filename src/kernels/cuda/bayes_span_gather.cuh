/* bayes_span_gather.cuh - what of the way back of the Bayesian Layer all spans do at once, once the
 * walks are done: the gradients. Formulas are in bayes_backward.cu. */
#ifndef MN_KERNELS_CUDA_BAYES_SPAN_GATHER_CUH
#define MN_KERNELS_CUDA_BAYES_SPAN_GATHER_CUH

#include "kernels/cuda/bayes_span.cuh"

enum { TOKENS_LD = SPAN_TOKENS + 8, CHANNELS_LD = 129, GATHER_THREADS = 512 };

/* Weights of 16 of a span's tokens, scaled: element (t, j) for all that a lane gives as a left
 * factor of 8 columns, taken from a tensor of type T whose rows may be absent. */
template <typename T>
struct token_rows {
    const T *first;       // NULL where `any` is false: zeros
    int64_t stride;       // of tokens
    int n_rows, count;    // tokens, columns
    bool any;
    double scale;

    /* A load that a condition guards would wait for the one before. */
    __device__ double at(int t, int j) const {
        const T x = first[min(t, n_rows - 1) * stride + min(j, count - 1)];
        return t < n_rows && j < count ? scale * (double)mn_float(x) : 0.0;
    }
};

/* Rows of do, times scale, of a group. */
template <typename T>
__device__ static token_rows<T> outputs_of(const mn_bayes_args &p, const mn_tile_span &tile,
                                           const span_group &s) {
    const T *d_o = mn_row<T>(p.cot.o, tile.span.b, tile.span.t0 + tile.first, s.h);
    const bool any = d_o && s.count > 0;
    return { any ? d_o + s.first : nullptr, p.cot.o.stride[1], (int)tile.n_rows, s.count, any,
             (double)p.scale };
}

/* ---- products between a span's tokens -------------------------------------------------------- */

/* 64 columns of a panel of 64 tokens on their way into shared memory. */
__device__ static void copy_slice_later(double *to, const double *from, int columns, int first) {
    const int width = min(64, columns - first);
    for (int i = threadIdx.x; i < SPAN_TOKENS * width / 2; i += GATHER_THREADS) {
        const int t = i / (width / 2), j = i % (width / 2) * 2;
        copy_later(to + t * TOKENS_LD + j, from + (int64_t)t * columns + first + j);
    }
}

/* c += x y' of 16 rows of x and 8 of y */
template <int WIDTH>
__device__ static void add_gram(double (&c)[2][2], const double *x, const double *y, int ld) {
    double more[2][2];
    zero(more);
#pragma unroll
    for (int i = 0; i < WIDTH; i += 16) {
        double a[4], b[2];
        left_rows(a, x, ld, i), right_rows(b, y, ld, i);
        mn_dmma_8(c, a, b);
        left_rows(a, x, ld, i + 8), right_rows(b, y, ld, i + 8);
        mn_dmma_8(more, a, b);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) c[i / 2][i % 2] += more[i / 2][i % 2];
}

/* Half of a block of 16 x 16 tokens, of those that are not above the diagonal. */
struct weights_task {
    bool any;
    int row, column;    // tokens

    __device__ weights_task(int i) {
        int a = 0, b = i / 2;
        while (b > a) a++, b -= a;
        any = i < 20, row = 16 * a, column = 16 * b + 8 * (i % 2);
    }
};

/* c += e x' or the like of a slice of value columns in shared memory. */
__device__ static void add_slice(double (&c)[2][2], const double *x, const double *y, int width,
                                 const weights_task &task) {
    if (!task.any) return;
    x += task.row * TOKENS_LD, y += task.column * TOKENS_LD;
    if (width == 64) add_gram<64>(c, x, y, TOKENS_LD);
    for (int j = 0; j < width && width < 64; j += 16) add_gram<16>(c, x + j, y + j, TOKENS_LD);
}

/* What a thread has of 64 columns of y, on its way into shared memory. */
template <typename T>
struct y_slice {
    static constexpr int EACH = SPAN_TOKENS * 64 / GATHER_THREADS;
    double at[EACH];

    __device__ void load(const token_rows<T> &y, int first) {
#pragma unroll
        for (int i = 0; i < EACH; i++) at[i] = 0.0;
        if (!y.any) return;
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            const int j = threadIdx.x + i * GATHER_THREADS;
            at[i] = y.at(j / 64, first + j % 64);
        }
    }

    __device__ void store(double *to) const {
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            const int j = threadIdx.x + i * GATHER_THREADS;
            to[j / 64 * TOKENS_LD + j % 64] = at[i];
        }
    }
};

/* ---- gradients ------------------------------------------------------------------------------- */

/* Pointers to a group's part of a span. */
template <typename T>
struct gather_group {
    span_group s;
    const double *z, *theta, *e, *de, *M, *P, *sigma;
    double *h, *weights;
    token_rows<T> y;
};

template <typename T, int R>
__device__ static gather_group<T> gather_group_at(const mn_bayes_args &p, const span_work &w,
                                                  const mn_tile_span &tile, int64_t head,
                                                  int64_t g) {
    const int64_t group = head * p.call.G + g;
    gather_group<T> of;
    of.s = group_at(p, (tile.n * p.call.H + head % p.call.H) * p.call.G + g);
    of.z = w.w + group * SPAN_TOKENS * R, of.h = w.h + group * SPAN_TOKENS * R;
    of.theta = w.theta + group * SPAN_CHUNKS * SMALL;
    of.e = w.e + group * SPAN_TOKENS * w.columns, of.de = w.de + group * SPAN_TOKENS * w.columns;
    of.M = w.M + group * w.columns * R, of.P = w.P + group * w.P_each;
    of.sigma = w.sigma + group * SPAN_TOKENS, of.weights = w.dw + group * w.dw_each;
    of.y = outputs_of<T>(p, tile, of.s);
    return of;
}

/* Shared memory of span_weights_kernel; 64 value columns at a time. */
template <int R>
struct weights_room {
    double du[SPAN_TOKENS * pitch<R>::left], z[SPAN_TOKENS * pitch<R>::left];
    double e[SPAN_TOKENS * TOKENS_LD], other[SPAN_TOKENS * TOKENS_LD];    // de, then y
};

/* Weights of a span's w in dk, at (t, s): -z_s.du_t - e_s.de_t for s < t, and c_t sigma_t for
 * s = t; or in dq: e_s.y_t - 2 a_t z_s.q_t for s <= t. The room has du, z, e and de or y. */
template <typename T>
__device__ static void put_weights(double (&c)[2][2], const weights_task &task,
                                   const gather_group<T> &of, bool reads) {
    each_result(c, task.column, [&](double &x, int row, int s) {
        const int t = task.row + row;
        if (reads) {
            if (s > t) x = 0.0;
        } else if (s == t) {
            x = of.theta[t / CHUNK * SMALL + t % CHUNK * 17] * of.sigma[t];
        } else {
            x = s < t ? -x : 0.0;
        }
    });
    double *to = of.weights + (reads ? SPAN_TOKENS * SPAN_TOKENS : 0);
    put_rows(to + task.row * SPAN_TOKENS, SPAN_TOKENS, task.column, c);
}

template <typename T>
__device__ static void put_dr2(const mn_bayes_args &p, const mn_tile_span &tile,
                               const gather_group<T> &of, int t) {
    const int64_t when = tile.span.t0 + tile.first + t;
    const T *dgain = mn_row<T>(p.cot.gain, tile.span.b, when, of.s.h);
    const T *dkvar = mn_row<T>(p.cot.kvar, tile.span.b, when, of.s.h);
    T *dr2 = mn_row<T>(p.grad.r2, tile.span.b, when, of.s.h);
    const double c = of.theta[t / CHUNK * SMALL + t % CHUNK * 17];
    const double gain = (double)mn_get(dgain, of.s.g) / of.sigma[t];
    if (dr2) mn_put(dr2 + of.s.g, (float)(c - (double)mn_get(dkvar, of.s.g) - gain));
}

/* What earlier tokens of the span weigh in dk and dq, and dr2: of a group of a head. */
template <typename T, int R>
__global__ void __launch_bounds__(GATHER_THREADS, 1)
span_weights_kernel(const __grid_constant__ mn_bayes_args p, const __grid_constant__ span_work w) {
    extern __shared__ __align__(16) double doubles[];
    weights_room<R> &room = *(weights_room<R> *)doubles;
    constexpr int LD = pitch<R>::left;
    const int64_t H = p.call.H, G = p.call.G, head = blockIdx.x / G, g = blockIdx.x % G;
    const mn_tile_span tile = mn_tile_at(p.call, SPAN_TOKENS, head / H);
    if (tile.n_rows == 0 || w.steep[tile.n * H + head % H]) return;
    const gather_group<T> of = gather_group_at<T, R>(p, w, tile, head, g);
    const bool weighs = p.cot.qvar.data && p.q.data;
    const int warp = threadIdx.x / 32, columns = w.columns;
    const double *q = w.q + head * SPAN_TOKENS * R;
    copy_rows_later<R>(room.du, LD, of.h, SPAN_TOKENS, GATHER_THREADS);
    copy_rows_later<R>(room.z, LD, of.z, SPAN_TOKENS, GATHER_THREADS);
    const weights_task tasks[2] = { { warp }, { warp + GATHER_THREADS / 32 } };
    double along[2][2][2], reads[2][2][2];    // of dk and of dq
    zero(along[0]), zero(along[1]), zero(reads[0]), zero(reads[1]);
    if (columns > 0) copy_slice_later(room.e, of.e, columns, 0);
    if (columns > 0) copy_slice_later(room.other, of.de, columns, 0);
    if (threadIdx.x < tile.n_rows) put_dr2<T>(p, tile, of, threadIdx.x);
    await_all_copies();
#pragma unroll
    for (int i = 0; i < 2; i++) {
        if (!tasks[i].any) continue;
        const int row = tasks[i].row, column = tasks[i].column;
        add_gram<R>(along[i], room.du + row * LD, room.z + column * LD, LD);
        each_result(along[i], column, [&](double &x, int, int s) { x *= of.sigma[s]; });
        if (!weighs) continue;
        for (int j = 0; j < R; j += 8) {
            double a[4], b[2];
            left_rows(a, q + row * R, R, j), right_rows(b, room.z + column * LD, LD, j);
            mn_dmma_8(reads[i], a, b);
        }
        each_result(reads[i], column, [&](double &x, int t, int s) {
            x *= -2.0 * weight_of<T>(p, tile, of.s, row + t) * of.sigma[s];
        });
    }
    for (int first = 0; first < columns; first += 64) {
        y_slice<T> y;
        y.load(of.y, first);
        if (first > 0) {
            copy_slice_later(room.e, of.e, columns, first);
            copy_slice_later(room.other, of.de, columns, first);
            await_all_copies();
        }
        const int width = min(64, columns - first);
        add_slice(along[0], room.other, room.e, width, tasks[0]);
        add_slice(along[1], room.other, room.e, width, tasks[1]);
        __syncthreads();
        y.store(room.other);
        __syncthreads();
        add_slice(reads[0], room.other, room.e, width, tasks[0]);
        add_slice(reads[1], room.other, room.e, width, tasks[1]);
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        if (!tasks[i].any) continue;
        put_weights<T>(along[i], tasks[i], of, false);
        put_weights<T>(reads[i], tasks[i], of, true);
    }
}

/* ---- dk and dq ------------------------------------------------------------------------------- */

/* Of a group they are three products that sum over rows of the state, value columns and earlier
 * tokens; their factors flow through shared memory in slices of 16 of these. */
enum { PRODUCT_STAGES = 5, SLICE_WIDTH = 16 };

template <int R>
struct product_stage {
    double left[2][SPAN_TOKENS * SLICE_WIDTH];    // of dk and of dq, swizzled
    double right[SLICE_WIDTH * (R + 2)];
};

/* Where column `column`, even, of a row of a slice's left factors is: neighbouring rows exchange
 * halves, so that four lanes of each read all banks. */
__device__ static int swizzled(int row, int column) {
    return row * SLICE_WIDTH + ((column / 2) ^ (row % 2 * 4)) * 2;
}

/* As left_rows. */
__device__ static void left_slice(double (&a)[4], const double *left, int row, int column) {
    const int lane = threadIdx.x % 32;
    const double *at = left + swizzled(row + lane / 4, column + 2 * (lane % 4));
    const double2 upper = *(const double2 *)at;
    const double2 lower = *(const double2 *)(at + 8 * SLICE_WIDTH);
    a[0] = upper.x, a[1] = lower.x, a[2] = upper.y, a[3] = lower.y;
}

/* 16 columns of the rows of a span's tokens on their way. */
__device__ static void copy_left_later(double *to, const double *from, int ld) {
    for (int i = threadIdx.x; i < SPAN_TOKENS * SLICE_WIDTH / 2; i += GATHER_THREADS) {
        const int t = i / (SLICE_WIDTH / 2), j = i % (SLICE_WIDTH / 2) * 2;
        copy_later(to + swizzled(t, j), from + t * ld + j);
    }
}

/* Counts slices of P (0), of M (1) and of w (2) of a head's group, then of the next one. */
template <int R>
struct product_count {
    int g, kind, j, count;

    __device__ product_count() : g(-1), kind(2), j(0), count(0) {}

    /* Goes on to the next slice; false behind the last one. */
    __device__ bool next(int columns, int groups) {
        if (g == groups) return false;
        if (++j < count) return true;
        j = 0, kind = kind == 0 && columns > 0 ? 1 : kind < 2 ? 2 : 0;
        count = (kind == 0 ? R : kind == 1 ? columns : (int)SPAN_TOKENS) / SLICE_WIDTH;
        return kind > 0 || ++g < groups;
    }
};

/* The factors of a slice. */
template <typename T, int R>
struct product_factors {
    const double *left[2], *right;
    token_rows<T> y;    // of M
    int ld;

    /* To those of `at`, which has gone on by one. */
    __device__ void follow(const product_count<R> &at, const mn_bayes_args &p, const span_work &w,
                           const mn_tile_span &tile, int64_t head) {
        if (at.j > 0) {
            left[0] += SLICE_WIDTH, left[1] += SLICE_WIDTH, right += SLICE_WIDTH * R;
            return;
        }
        const int64_t H = p.call.H, G = p.call.G, group = head * G + at.g;
        if (at.kind == 0) {
            ld = R, right = w.P + group * w.P_each;
            left[0] = w.h + group * SPAN_TOKENS * R, left[1] = w.q + head * SPAN_TOKENS * R;
        } else if (at.kind == 1) {
            ld = w.columns, right = w.M + group * w.columns * R;
            left[0] = left[1] = w.de + group * SPAN_TOKENS * w.columns;
            y = outputs_of<T>(p, tile, group_at(p, (tile.n * H + head % H) * G + at.g));
        } else {
            ld = SPAN_TOKENS, right = w.w + group * SPAN_TOKENS * R;
            left[0] = w.dw + group * w.dw_each, left[1] = left[0] + SPAN_TOKENS * SPAN_TOKENS;
        }
    }
};

/* y of a slice of M, two numbers of each thread: loaded when its copies start, stored later. */
template <typename T>
struct product_y {
    double x[2];
    double *to;    // NULL: no such slice

    __device__ void load(const token_rows<T> &y, double *left, int column) {
        const int t = threadIdx.x / 8, j = threadIdx.x % 8 * 2;
        to = left + swizzled(t, j), x[0] = x[1] = 0.0;
        if (y.any) x[0] = y.at(t, column + j), x[1] = y.at(t, column + j + 1);
    }

    __device__ void store() {
        if (to) *(double2 *)to = make_double2(x[0], x[1]);
        to = nullptr;
    }
};

template <typename T, int R>
__device__ static void fetch_product(product_stage<R> &to, product_y<T> &y,
                                     const product_factors<T, R> &from,
                                     const product_count<R> &at, bool weighs) {
    copy_left_later(to.left[0], from.left[0], from.ld);
    if (at.kind == 1) y.load(from.y, to.left[1], at.j * SLICE_WIDTH);
    else if (at.kind == 2 || weighs) copy_left_later(to.left[1], from.left[1], from.ld);
    copy_rows_later<R>(to.right, R + 2, from.right, SLICE_WIDTH, GATHER_THREADS);
}

/* A slice's part of dk and, if BOTH, of dq: chunks 0 and 3, or the inner ones, of 8 * TILES columns
 * of the state. Slice j of w has no part in chunks before its own. */
template <int R, int KIND, bool BOTH>
__device__ static void multiply_slice(double (&dk)[2][R / 64][2][2], double (&dq)[2][R / 64][2][2],
                                      const product_stage<R> &here, const double (&scales)[2][2],
                                      bool outer, int column, int j) {
    constexpr int TILES = R / 64;
#pragma unroll
    for (int k = 0; k < SLICE_WIDTH; k += 8) {
        double b[TILES][2], a[4];
#pragma unroll
        for (int i = 0; i < TILES; i++) {
            right_columns(b[i], here.right + k * (R + 2), R + 2, column + 8 * i);
        }
#pragma unroll
        for (int m = 0; m < 2; m++) {
            const int chunk = outer ? 3 * m : 1 + m;
            if (KIND == 2 && chunk < j) continue;
            left_slice(a, here.left[0], chunk * CHUNK, k);
#pragma unroll
            for (int i = 0; i < 4 && KIND == 1; i++) a[i] = minus(a[i]);
#pragma unroll
            for (int i = 0; i < TILES; i++) mn_dmma_8(dk[m][i], a, b[i]);
            if (!BOTH) continue;
            left_slice(a, here.left[1], chunk * CHUNK, k);
#pragma unroll
            for (int i = 0; i < 4 && KIND == 0; i++) a[i] *= scales[m][i % 2];
#pragma unroll
            for (int i = 0; i < TILES; i++) mn_dmma_8(dq[m][i], a, b[i]);
        }
    }
}

/* dk and dq of a head of a span in the frame, of all groups, but for the noise: states in front of
 * the span, then its earlier tokens. They take the place of the first group's P. Of two sets of
 * warps one has chunks 0 and 3, the other 1 and 2, of which sums over earlier tokens ask alike. */
template <typename T, int R>
__global__ void __launch_bounds__(GATHER_THREADS, 1)
span_products_kernel(const __grid_constant__ mn_bayes_args p,
                     const __grid_constant__ span_work w) {
    extern __shared__ __align__(16) double doubles[];
    product_stage<R> *stages = (product_stage<R> *)doubles;
    constexpr int TILES = R / 64;
    const int64_t H = p.call.H, G = p.call.G, head = blockIdx.x;
    const mn_tile_span tile = mn_tile_at(p.call, SPAN_TOKENS, head / H);
    if (tile.n_rows == 0 || w.steep[tile.n * H + head % H]) return;
    const bool weighs = p.cot.qvar.data && p.q.data;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, outer = warp % 2 == 0;
    const int column = warp / 2 * 8 * TILES;
    double dk[2][TILES][2][2], dq[2][TILES][2][2], scales[2][2];
#pragma unroll
    for (int i = 0; i < 2 * TILES; i++) {
        zero(dk[i / TILES][i % TILES]), zero(dq[i / TILES][i % TILES]);
    }
    product_y<T> y;
    y.to = nullptr;
    product_count<R> ahead, s;
    product_factors<T, R> from;
    const auto fetch = [&](product_stage<R> &to) {
        if (ahead.next(w.columns, (int)G)) {
            from.follow(ahead, p, w, tile, head);
            fetch_product<T, R>(to, y, from, ahead, weighs);
        }
        close_copies();
    };
    for (int i = 0; i < PRODUCT_STAGES - 1; i++) {
        fetch(stages[i]);
        y.store();
    }
    int now = 0, then = PRODUCT_STAGES - 1;
    while (s.next(w.columns, (int)G)) {
        asm volatile("cp.async.wait_group %0;" ::"n"(PRODUCT_STAGES - 2) : "memory");
        __syncthreads();
        y.store();
        fetch(stages[then]);
        const product_stage<R> &here = stages[now];
        then = now, now = now + 1 < PRODUCT_STAGES ? now + 1 : 0;
        if (weighs && s.kind == 0 && s.j == 0) {
            const span_group of = { tile.n, head % H, s.g, 0, 0 };
#pragma unroll
            for (int m = 0; m < 4; m++) {
                const int chunk = outer ? m / 2 * 3 : 1 + m / 2;
                const int t = chunk * CHUNK + lane / 4 + m % 2 * 8;
                scales[m / 2][m % 2] = 2.0 * weight_of<T>(p, tile, of, t);
            }
        }
        if (s.kind == 1) multiply_slice<R, 1, true>(dk, dq, here, scales, outer, column, s.j);
        else if (s.kind == 2) multiply_slice<R, 2, true>(dk, dq, here, scales, outer, column, s.j);
        else if (weighs) multiply_slice<R, 0, true>(dk, dq, here, scales, outer, column, s.j);
        else multiply_slice<R, 0, false>(dk, dq, here, scales, outer, column, s.j);
    }
    __syncthreads();
    double *to = w.P + head * G * w.P_each;
#pragma unroll
    for (int m = 0; m < 2; m++) {
        double *rows = to + (outer ? 3 * m : 1 + m) * CHUNK * R;
#pragma unroll
        for (int j = 0; j < TILES; j++) {
            put_rows(rows, R, column + 8 * j, dk[m][j]);
            put_rows(rows + SPAN_TOKENS * R, R, column + 8 * j, dq[m][j]);
        }
    }
}

/* ---- channels -------------------------------------------------------------------------------- */

/* x_t w_t inside channel i, of all groups: its trace and its turn. */
template <typename T, int R>
__device__ static void gain_inside(double &trace, double &turning, const mn_bayes_args &p,
                                   const span_work &w, const mn_tile_span &tile, int64_t head,
                                   int t, int i, const double *phi) {
    const int64_t G = p.call.G, H = p.call.H;
    const bool turns = p.theta.data != NULL;
    const int step = turns ? 2 : 1, r = i * step, rows = (int)p.call.K * step;
    for (int64_t g = 0; g < G; g++) {
        const span_group s = { tile.n, head % H, g, 0, 0 };
        const double *z = w.w + ((head * G + g) * SPAN_TOKENS + t) * R + r;
        const double x0 = turned_gain<T>(p, tile, s, phi, t, r, rows, turns);
        trace += x0 * z[0];
        if (!turns) continue;
        const double x1 = turned_gain<T>(p, tile, s, phi, t, r + 1, rows, turns);
        trace += x1 * z[1];
        turning += x1 * z[0] - x0 * z[1];
    }
}

/* What a thread has of a token: its channel's rows, in complex numbers where channels turn. */
struct channel_token {
    double2 phi, k, q, dk, dq;
    double l2;
};

template <bool TURNS>
__device__ static double2 pair_at(const double *x) {
    if (TURNS) return *(const double2 *)x;
    return make_double2(*x, 0.0);
}

/* What channel i leaves of a chunk's tokens: the raw inputs' gradients but for what later chunks
 * say of la and theta; parts of dl2 by channels into `dl2`. n_t grows from the first token on, all
 * else from the last. */
template <typename T, int R, bool TURNS>
__device__ static void gather_channel(double *dl2, const double *weights, const mn_bayes_args &p,
                                      const span_work &w, const mn_tile_span &tile, int64_t head,
                                      int c, int i) {
    constexpr int AHEAD = 4, STEP = TURNS ? 2 : 1;
    const int64_t G = p.call.G, h = head % p.call.H;
    const int r = i * STEP, K = (int)p.call.K;
    const int count = (int)(tile.n_rows - c * CHUNK);    // 0 or less: no token, all else holds
    const int64_t b = tile.span.b, t0 = tile.span.t0 + tile.first + c * CHUNK;
    const int64_t panel = (head * SPAN_TOKENS + c * CHUNK) * R + r;
    const double *dk = w.P + head * G * w.P_each + c * CHUNK * R + r, *dq = dk + SPAN_TOKENS * R;
    const double *du = w.h + (head * G * SPAN_TOKENS + c * CHUNK) * R + r;
    const double *noise = w.noise + (head * (SPAN_CHUNKS + 1) + c) * 2 * R;
    noise_sums n[CHUNK], sum = { noise[r], noise[R + r], TURNS ? noise[r + 1] : 0.0 };
#pragma unroll
    for (int t = 0; t < CHUNK; t++) {
        const float l2 = mn_float(*mn_row<T>(p.l2, b, t0 + min(t, count - 1), h));
        sum.add(noise_row(pair_at<TURNS>(w.phi + panel + t * R)), t < count ? (double)l2 : 0.0);
        n[t] = sum;
    }
    double rr = 0.0, ri = 0.0, ii = 0.0;
    for (int64_t g = 0; g < G; g++) {
        const double *inside = w.inside + ((head * G + g) * SPAN_CHUNKS + c) * 2 * R;
        rr += inside[r];
        if (TURNS) ri += inside[R + r], ii += inside[r + 1];
    }
    double2 sums[CHUNK];    // du of all groups
#pragma unroll
    for (int t = 0; t < CHUNK; t++) sums[t] = make_double2(0.0, 0.0);
    for (int64_t g = 0; g < G; g++) {
#pragma unroll
        for (int t = 0; t < CHUNK; t++) {
            const double2 more = pair_at<TURNS>(du + (g * SPAN_TOKENS + t) * R);
            sums[t].x += more.x, sums[t].y += more.y;
        }
    }
    double trace = 0.0, turning = 0.0;
#pragma unroll
    for (int last = CHUNK - 1; last >= 0; last -= AHEAD) {
        channel_token x[AHEAD];
#pragma unroll
        for (int j = 0; j < AHEAD; j++) {
            const int t = last - j;
            x[j].phi = pair_at<TURNS>(w.phi + panel + t * R);
            x[j].k = pair_at<TURNS>(w.k + panel + t * R);
            x[j].q = pair_at<TURNS>(w.q + panel + t * R);
            x[j].dk = pair_at<TURNS>(dk + t * R), x[j].dq = pair_at<TURNS>(dq + t * R);
            x[j].l2 = (double)mn_float(*mn_row<T>(p.l2, b, t0 + min(t, count - 1), h));
        }
#pragma unroll
        for (int j = 0; j < AHEAD; j++) {
            const int t = last - j;
            if (t >= count) continue;
            const double2 k = x[j].k, q = x[j].q, d = sums[t], phi = x[j].phi;
            const double2 own = noise_row(phi);
            const double a = weights[c * CHUNK + t], l2 = x[j].l2;
            double2 gk = x[j].dk, gq = x[j].dq;
            gk.x += n[t].rr * d.x, gq.x += 2.0 * a * n[t].rr * q.x;
            if (TURNS) {
                gk.x += n[t].ri * d.y, gk.y += n[t].ri * d.x + n[t].ii * d.y;
                gq.x += 2.0 * a * n[t].ri * q.y;
                gq.y += 2.0 * a * (n[t].ri * q.x + n[t].ii * q.y);
            }
            rr += a * q.x * q.x + d.x * k.x;
            ri += a * q.x * q.y + 0.5 * (d.x * k.y + d.y * k.x);
            ii += a * q.y * q.y + d.y * k.y;
            const double along = rr * own.x + ri * own.y, across = ri * own.x + ii * own.y;
            const double by_noise = along * own.x + across * own.y;
            trace += q.x * gq.x + q.y * gq.y + k.x * gk.x + k.y * gk.y - 2.0 * l2 * by_noise;
            turning += q.y * gq.x - q.x * gq.y + k.y * gk.x - k.x * gk.y;
            turning -= 2.0 * l2 * (across * own.x - along * own.y);
            if (p.cot.gainvec.data) {
                gain_inside<T, R>(trace, turning, p, w, tile, head, c * CHUNK + t, i,
                                  w.phi + panel + t * R - r);
            }
            T *to_q = mn_row<T>(p.grad.q, b, t0 + t, h), *to_k = mn_row<T>(p.grad.k, b, t0 + t, h);
            if (to_q) mn_put(to_q + i, (float)(phi.x * gq.x - phi.y * gq.y));
            if (to_k) mn_put(to_k + i, (float)(phi.x * gk.x - phi.y * gk.y));
            float *local = w.local + (head * SPAN_TOKENS + c * CHUNK + t) * 2 * K;
            local[i] = (float)trace;
            if (TURNS) local[K + i] = (float)turning;
            dl2[(c * CHUNK + t) * CHANNELS_LD + i] = by_noise;
        }
    }
    double *total = w.totals + (head * SPAN_CHUNKS + c) * 2 * K;
    total[i] = trace, total[K + i] = turning;
}

/* All gradients of a head of a span but dv, dr2, dla and dtheta. */
template <typename T, int R, bool TURNS>
__global__ void __launch_bounds__(GATHER_THREADS, 1)
span_channels_kernel(const __grid_constant__ mn_bayes_args p,
                     const __grid_constant__ span_work w) {
    extern __shared__ __align__(16) double doubles[];
    double *weights = doubles, *dl2 = doubles + SPAN_TOKENS;
    const int64_t H = p.call.H, G = p.call.G, head = blockIdx.x, h = head % H;
    const mn_tile_span tile = mn_tile_at(p.call, SPAN_TOKENS, head / H);
    if (tile.n_rows == 0 || w.steep[tile.n * H + h]) return;
    const int K = (int)p.call.K, warp = threadIdx.x / 32;
    if (threadIdx.x < SPAN_TOKENS) {
        double sum = 0.0;
        for (int64_t g = 0; g < G; g++) {
            const span_group s = { tile.n, h, g, 0, 0 };
            sum += weight_of<T>(p, tile, s, threadIdx.x);
        }
        weights[threadIdx.x] = sum;
    }
    __syncthreads();
    const int c = threadIdx.x / 128, i = threadIdx.x % 128;
    if (i < K) gather_channel<T, R, TURNS>(dl2, weights, p, w, tile, head, c, i);
    __syncthreads();
    for (int t = warp; t < tile.n_rows && p.grad.l2.data; t += GATHER_THREADS / 32) {
        double sum = 0.0;
        for (int j = threadIdx.x % 32; j < K; j += 32) sum += dl2[t * CHANNELS_LD + j];
        for (int lanes = 16; lanes > 0; lanes >>= 1) {
            sum += __shfl_xor_sync(0xffffffffu, sum, lanes);
        }
        T *to = mn_row<T>(p.grad.l2, tile.span.b, tile.span.t0 + tile.first + t, h);
        if (threadIdx.x % 32 == 0) mn_put(to, (float)sum);
    }
}

/* C behind each chunk in place of its growth there, one thread for each channel of a head of a
 * sequence, from its last chunk on. */
template <int R>
__global__ void __launch_bounds__(128)
span_totals_kernel(const __grid_constant__ mn_bayes_args p, const __grid_constant__ span_work w) {
    constexpr int AHEAD = 4;    // spans whose sums are loaded together
    const int64_t H = p.call.H, G = p.call.G, n = blockIdx.x / H, h = blockIdx.x % H;
    const int i = threadIdx.x, K = (int)p.call.K;
    if (i >= K || w.steep[n * H + h]) return;
    const mn_span span = mn_span_at(p.call, n);
    const bool turns = p.theta.data != NULL;
    const int64_t slot0 = first_slot(p.call, span, n), parts = w.slices * SLICES + 1;
    double trace = 0.0, turning = 0.0;
    for (int64_t part = 0; part < G * parts; part++) {
        const double *last = w.last + (blockIdx.x * G * parts + part) * 2 * R;
        if (turns) {
            trace += last[2 * i] + last[2 * i + 1];
            turning += last[R + 2 * i + 1] - last[R + 2 * i];
        } else {
            trace += last[i];
        }
    }
    double *totals = w.totals + i, grows[AHEAD][SPAN_CHUNKS][2];
    const int64_t last = slot0 + n_spans_of(span) - 1;
    for (int64_t slot = last; slot >= slot0; slot -= AHEAD) {
        const auto place = [&](int j) {
            return totals + (max(slot - j, slot0) * H + h) * SPAN_CHUNKS * 2 * K;
        };
#pragma unroll
        for (int j = 0; j < AHEAD; j++) {
#pragma unroll
            for (int c = 0; c < SPAN_CHUNKS; c++) {
                grows[j][c][0] = place(j)[c * 2 * K], grows[j][c][1] = place(j)[c * 2 * K + K];
            }
        }
#pragma unroll
        for (int j = 0; j < AHEAD; j++) {
            if (slot - j < slot0) break;
#pragma unroll
            for (int c = SPAN_CHUNKS - 1; c >= 0; c--) {
                place(j)[c * 2 * K] = trace, place(j)[c * 2 * K + K] = turning;
                trace += grows[j][c][0], turning += grows[j][c][1];
            }
        }
    }
}

/* dla and dtheta of a head of a span. */
template <typename T>
__global__ void __launch_bounds__(256)
span_decay_kernel(const __grid_constant__ mn_bayes_args p, const __grid_constant__ span_work w) {
    constexpr int AHEAD = 8;    // numbers of a thread that are loaded together
    const int64_t H = p.call.H, slot = blockIdx.x / H, h = blockIdx.x % H;
    const mn_tile_span tile = mn_tile_at(p.call, SPAN_TOKENS, slot);
    if (tile.n_rows == 0 || w.steep[tile.n * H + h]) return;
    const int K = (int)p.call.K, count = (int)tile.n_rows * K;
    const mn_out to[] = { p.grad.la, p.grad.theta };
    const double *totals = w.totals + blockIdx.x * (int64_t)SPAN_CHUNKS * 2 * K;
    const float *locals = w.local + blockIdx.x * (int64_t)SPAN_TOKENS * 2 * K;
#pragma unroll
    for (int which = 0; which < 2; which++) {
        T *first = mn_row<T>(to[which], tile.span.b, tile.span.t0 + tile.first, h);
        for (int base = threadIdx.x; first && base < count; base += AHEAD * 256) {
            double behind[AHEAD];
            float local[AHEAD];
#pragma unroll
            for (int j = 0; j < AHEAD; j++) {
                const int at = min(base + 256 * j, count - 1), t = at / K, i = at % K + which * K;
                behind[j] = totals[t / CHUNK * 2 * K + i], local[j] = locals[t * 2 * K + i];
            }
#pragma unroll
            for (int j = 0; j < AHEAD; j++) {
                const int at = base + 256 * j, t = at / K, i = at % K;
                if (at >= count) break;
                mn_put(first + t * to[which].stride[1] + i, (float)(behind[j] + (double)local[j]));
            }
        }
    }
}

#endif
