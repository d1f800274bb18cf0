/* bayes_span_gather.cuh - what of the way back of the Bayesian Layer all spans do at once: what
 * drives the covariance's adjoint, and the gradients. Formulas are in bayes_backward.cu. */
#ifndef MN_KERNELS_CUDA_BAYES_SPAN_GATHER_CUH
#define MN_KERNELS_CUDA_BAYES_SPAN_GATHER_CUH

#include "kernels/cuda/bayes_span.cuh"

enum { TOKENS_LD = SPAN_TOKENS + 8, SOURCE_THREADS = 256, GATHER_THREADS = 512 };

/* Weights of 16 of a span's tokens, scaled: element (t, j) for all that a lane gives as a left
 * factor of 8 columns, taken from a tensor of type T whose rows may be absent. */
template <typename T>
struct token_rows {
    const T *first;       // NULL: zeros
    int64_t stride;       // of tokens
    int n_rows, count;    // tokens, columns
    double scale;

    __device__ double at(int t, int j) const {
        if (!first || t >= n_rows || j >= count) return 0.0;
        return scale * (double)mn_float(first[t * stride + j]);
    }

    /* as left_rows and right_rows */
    __device__ void left(double (&a)[4], int row, int column) const {
        const int lane = threadIdx.x % 32, t = row + lane / 4, j = column + 2 * (lane % 4);
        a[0] = at(t, j), a[1] = at(t + 8, j), a[2] = at(t, j + 1), a[3] = at(t + 8, j + 1);
    }

    __device__ void right(double (&b)[2], int row, int column) const {
        const int lane = threadIdx.x % 32, t = row + lane / 4, j = column + 2 * (lane % 4);
        b[0] = at(t, j), b[1] = at(t, j + 1);
    }
};

/* Rows of do, times scale, of a group. */
template <typename T>
__device__ static token_rows<T> outputs_of(const mn_bayes_args &p, const mn_tile_span &tile,
                                           const span_group &s) {
    const T *d_o = mn_row<T>(p.cot.o, tile.span.b, tile.span.t0 + tile.first, s.h);
    return { d_o ? d_o + s.first : nullptr, p.cot.o.stride[1], (int)tile.n_rows, s.count,
             (double)p.scale };
}

/* scale^2 dqvar of a token, or zero */
template <typename T>
__device__ static double weight_of(const mn_bayes_args &p, const mn_tile_span &tile,
                                   const span_group &s, int t) {
    const T *x = mn_row<T>(p.cot.qvar, tile.span.b, tile.span.t0 + tile.first + t, s.h);
    if (!x || !p.q.data || t >= tile.n_rows) return 0.0;
    return p.scale * p.scale * (double)mn_float(x[s.g]);
}

/* Channel-wise Phi'dgainvec of a token: of row r. */
template <typename T>
__device__ static double turned_gain(const mn_bayes_args &p, const mn_tile_span &tile,
                                     const span_group &s, const double *phi, int t, int r,
                                     int rows, bool turns) {
    const T *x = mn_row<T>(p.cot.gainvec, tile.span.b, tile.span.t0 + tile.first + t, s.h);
    if (!x || t >= tile.n_rows || r >= rows) return 0.0;
    x += s.g * rows;
    if (!turns) return phi[r] * (double)mn_float(x[r]);
    const double other = (double)mn_float(x[r ^ 1]), mine = (double)mn_float(x[r]);
    return r % 2 == 0 ? phi[r] * mine + phi[r + 1] * other : phi[r - 1] * mine - phi[r] * other;
}

/* Results in rows 16 mb .. of a matrix: use(element, row within the 16, column) */
template <typename F>
__device__ static void each_result(double (&c)[2][2], int column, F use) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        use(c[i / 2][i % 2], 8 * (i / 2) + lane / 4, column + 2 * (lane % 4) + i % 2);
    }
}

/* ---- what drives D --------------------------------------------------------------------------- */

/* Weights of later tokens in dw: e_t.y_s (s >= t), or -e_t.de_s (s > t), for blocks (a, b) of 16
 * tokens. */
template <typename T>
__device__ static void source_weights(double *to, const double *e, const double *de,
                                      const token_rows<T> &y, int columns, int a, int b,
                                      bool reads) {
    double c[2][2][2];
    zero(c[0]), zero(c[1]);
    for (int j = 0; j < columns; j += 8) {
        double left[4], right[2];
        left_rows(left, e + 16 * a * columns, columns, j);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int row = 16 * b + 8 * half;
            if (reads) y.right(right, row, j);
            else right_rows(right, de + (int64_t)row * columns, columns, j);
            mn_dmma_8(c[half], left, right);
        }
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
        each_result(c[half], 16 * b + 8 * half, [&](double &x, int row, int column) {
            const int t = 16 * a + row;
            if (reads ? column < t : column <= t) x = 0.0;
            else if (!reads) x = -x;
        });
        put_rows(to + 16 * a * TOKENS_LD, TOKENS_LD, 16 * b + 8 * half, c[half]);
    }
}

/* Shared memory of span_sources_kernel. */
template <int R>
struct source_room {
    union {
        double weights[2][SPAN_TOKENS * TOKENS_LD];
        double b[SPAN_TOKENS * pitch<R>::left];
    };
    double psi[SPAN_CHUNKS][16 * SMALL_LD];
};

/* -beta / 2 into h and Theta / 2 of a group of a head of a span, as they are where D is zero; dv.
 * Warps 4 i + a have chunk a. */
template <typename T, int R>
__global__ void __launch_bounds__(SOURCE_THREADS, 2)
span_sources_kernel(const __grid_constant__ mn_bayes_args p, const __grid_constant__ span_work w) {
    extern __shared__ __align__(16) double doubles[];
    source_room<R> &room = *(source_room<R> *)doubles;
    const int64_t H = p.call.H, G = p.call.G, group = blockIdx.x, slot = group / (H * G);
    const mn_tile_span tile = mn_tile_at(p.call, SPAN_TOKENS, slot);
    if (tile.n_rows == 0) return;
    const span_group s = group_at(p, (tile.n * H + group / G % H) * G + group % G);
    if (w.steep[s.n * H + s.h]) return;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, mb = warp % 4, half = warp / 4;
    const bool turns = p.theta.data != NULL, weighs = p.cot.qvar.data && p.q.data;
    const int rows = (int)p.call.K * (turns ? 2 : 1), columns = w.columns;
    const int64_t head = slot * H + s.h;
    const double *k = w.k + head * SPAN_TOKENS * R, *q = w.q + head * SPAN_TOKENS * R;
    const double *phi = w.phi + head * SPAN_TOKENS * R, *z = w.w + group * SPAN_TOKENS * R;
    const double *e = w.e + group * SPAN_TOKENS * columns;
    const double *de = w.de + group * SPAN_TOKENS * columns, *E = w.E + group * columns * R;
    const double *sigma = w.sigma + group * SPAN_TOKENS, *r2 = w.r2 + group * SPAN_TOKENS;
    const token_rows<T> y = outputs_of<T>(p, tile, s);
    for (int task = warp; task < 20 && columns > 0; task += SOURCE_THREADS / 32) {
        int a = 0, b = task / 2;    // pairs a <= b
        while (b >= 4 - a) b -= 4 - a, a++;
        source_weights<T>(room.weights[task % 2], e, de, y, columns, a, a + b, task % 2 == 0);
    }
    constexpr int TILES = R / 16;
    double c[TILES][2][2];
    const int first = half * R / 2;
#pragma unroll
    for (int j = 0; j < TILES; j++) {
        zero(c[j]);
        if (!p.cot.gainvec.data) continue;
        each_result(c[j], first + 8 * j, [&](double &x, int row, int r) {
            const int t = 16 * mb + row;
            x = turned_gain<T>(p, tile, s, phi + t * R, t, r, rows, turns);
        });
    }
#pragma unroll 2
    for (int i = 0; i < columns; i += 8) {
        double a[4], b[2];
        left_rows(a, e + 16 * mb * columns, columns, i);
#pragma unroll
        for (int j = 0; j < TILES; j++) {
            right_columns(b, E + (int64_t)i * R, R, first + 8 * j);
            mn_dmma_8(c[j], a, b);
        }
    }
    __syncthreads();
#pragma unroll 2
    for (int i = 16 * mb; i < SPAN_TOKENS && columns > 0; i += 8) {
        double a[4], b[2];
        left_rows(a, room.weights[0] + 16 * mb * TOKENS_LD, TOKENS_LD, i);
#pragma unroll
        for (int j = 0; j < TILES; j++) {
            right_columns(b, q + i * R, R, first + 8 * j);
            mn_dmma_8(c[j], a, b);
        }
        left_rows(a, room.weights[1] + 16 * mb * TOKENS_LD, TOKENS_LD, i);
#pragma unroll
        for (int j = 0; j < TILES; j++) {
            right_columns(b, k + i * R, R, first + 8 * j);
            mn_dmma_8(c[j], a, b);
        }
    }
    __syncthreads();
    const int64_t chunk = group * SPAN_CHUNKS + mb;
    const double *reads = w.reads + chunk * SMALL, *eliminate = w.eliminate + chunk * SMALL;
    double weighted[8];
    if (weighs) {
        left_small(weighted, reads, 16);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const double a = -2.0 * weight_of<T>(p, tile, s, 16 * mb + lane % 4 + 4 * i);
            weighted[2 * i] *= a, weighted[2 * i + 1] *= a;
        }
    }
#pragma unroll
    for (int j = 0; j < TILES; j++) {
        each_result(c[j], 0, [&](double &x, int row, int) { x /= sigma[16 * mb + row]; });
        if (weighs) {
            double b[4];
            right_columns16(b, q + 16 * mb * R, R, first + 8 * j);
            mn_dmma_16(c[j], weighted, b);
        }
        put_rows(room.b + 16 * mb * pitch<R>::left, pitch<R>::left, first + 8 * j, c[j]);
    }
    __syncthreads();
    double psi[2][2];
    zero(psi);
    for (int i = 0; i < R; i += 8) {
        double a[4], b[2];
        left_rows(a, z + 16 * mb * R, R, i);
        right_rows(b, room.b + (16 * mb + 8 * half) * pitch<R>::left, pitch<R>::left, i);
        mn_dmma_8(psi, a, b);
    }
    double *mine = room.psi[mb];
    each_result(psi, 8 * half, [&](double &x, int row, int column) {
        const int t = 16 * mb + row;
        if (column > row) {
            mine[row * SMALL_LD + column] = mine[column * SMALL_LD + row] = -x;
        } else if (column == row) {
            const int64_t when = tile.span.t0 + tile.first + t;
            const bool there = t < tile.n_rows;
            const T *dkvar = mn_row<T>(p.cot.kvar, tile.span.b, when, s.h);
            const T *dgain = mn_row<T>(p.cot.gain, tile.span.b, when, s.h);
            double own = there ? (double)mn_get(dkvar, s.g) : 0.0;
            if (there) own += (double)mn_get(dgain, s.g) * r2[t] / (sigma[t] * sigma[t]);
            for (int other = row; weighs && other < CHUNK; other++) {
                const double read = reads[row * 16 + other];
                own -= weight_of<T>(p, tile, s, 16 * mb + other) * read * read;
            }
            mine[row * SMALL_LD + column] = 2.0 * (own - x);
        }
    });
    __syncthreads();
    double left[8], b[4], half_theta[2][2];
    left_small(left, mine, SMALL_LD);
    right_columns16(b, eliminate, 16, 8 * half);
    zero(half_theta);
    mn_dmma_16(half_theta, left, b);
    __syncthreads();
    put_rows(mine, SMALL_LD, 8 * half, half_theta);
    __syncthreads();
    left_columns16(left, eliminate, 16, 0);
    right_columns16(b, mine, SMALL_LD, 8 * half);
    zero(half_theta);
    mn_dmma_16(half_theta, left, b);
    each_result(half_theta, 0, [&](double &x, int, int) { x *= 0.5; });
    put_rows(w.theta + chunk * SMALL, 16, 8 * half, half_theta);
#pragma unroll
    for (int j = 0; j < TILES; j++) {
        right_columns16(b, room.b + 16 * mb * pitch<R>::left, pitch<R>::left, first + 8 * j);
        zero(c[j]);
        mn_dmma_16(c[j], left, b);
        each_result(c[j], 0, [&](double &x, int, int) { x *= -0.5; });
        put_rows(w.h + chunk * CHUNK * R, R, first + 8 * j, c[j]);
    }
    for (int i = threadIdx.x; p.grad.v.data && i < tile.n_rows * s.count; i += SOURCE_THREADS) {
        const int t = i / s.count, j = i % s.count;
        T *dv = mn_row<T>(p.grad.v, tile.span.b, tile.span.t0 + tile.first + t, s.h);
        mn_put(dv + s.first + j, (float)de[(int64_t)t * columns + j]);
    }
}

/* ---- gradients ------------------------------------------------------------------------------- */

/* Shared memory of span_gather_kernel. */
template <int R>
struct gather_room {
    double du[SPAN_TOKENS * pitch<R>::left];         // of a group; then dk
    union {
        double weights[2][SPAN_TOKENS * TOKENS_LD];  // of z in dk and dq
        double dq[SPAN_TOKENS * pitch<R>::left];
    };
    double all[SPAN_TOKENS * pitch<R>::left];        // du of all groups; then dl2 by rows
    double inside[SPAN_CHUNKS][2 * R];               // D of all groups
    double a[SPAN_TOKENS];                           // of all groups
};

/* Pointers to a group's part of a span. */
template <typename T>
struct gather_group {
    span_group s;
    const double *z, *h, *theta, *e, *de, *M, *P, *sigma;
    token_rows<T> y;
};

/* Weights of a chunk's z in dk, at (t, s): -z_s.du_t - e_s.de_t for s < t, and c_t sigma_t for
 * s = t; in dq: e_s.y_t - 2 a_t z_s.q_t for s <= t. Blocks (a, b) of 16 tokens, b <= a. */
template <typename T, int R>
__device__ static void gather_weights(gather_room<R> &room, const mn_bayes_args &p,
                                      const mn_tile_span &tile, const gather_group<T> &of,
                                      const double *q, int columns, int a, int b, bool reads,
                                      bool weighs) {
    double c[2][2][2];
    zero(c[0]), zero(c[1]);
    for (int i = 0; i < R && (!reads || weighs); i += 8) {
        double left[4], right[2];
        if (reads) left_rows(left, q + 16 * a * R, R, i);
        else left_rows(left, room.du + 16 * a * pitch<R>::left, pitch<R>::left, i);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            right_rows(right, of.z + (16 * b + 8 * half) * R, R, i);
            mn_dmma_8(c[half], left, right);
        }
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
        each_result(c[half], 16 * b + 8 * half, [&](double &x, int row, int column) {
            x *= of.sigma[column];
            if (reads) x *= -2.0 * weight_of<T>(p, tile, of.s, 16 * a + row);
        });
    }
    for (int i = 0; i < columns; i += 8) {
        double left[4], right[2];
        if (reads) of.y.left(left, 16 * a, i);
        else left_rows(left, of.de + 16 * a * columns, columns, i);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            right_rows(right, of.e + (int64_t)(16 * b + 8 * half) * columns, columns, i);
            mn_dmma_8(c[half], left, right);
        }
    }
    double *to = room.weights[reads] + 16 * a * TOKENS_LD;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        each_result(c[half], 16 * b + 8 * half, [&](double &x, int row, int column) {
            const int t = 16 * a + row;
            if (reads) {
                if (column > t) x = 0.0;
            } else if (column == t) {
                x = of.theta[a * SMALL + row * 17] * of.sigma[t];
            } else {
                x = column < t ? -x : 0.0;
            }
        });
        put_rows(to, TOKENS_LD, 16 * b + 8 * half, c[half]);
    }
}

/* du of a group into the room: -2 H + (Theta's upper half) K. */
template <typename T, int R>
__device__ static void gather_du(gather_room<R> &room, const gather_group<T> &of, const double *k,
                                 bool first_group) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, mb = warp % 4;
    const int first = warp / 4 * (R / 4);
    double left[8];
    left_small(left, of.theta + mb * SMALL, 16);
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const int t = lane / 4 + i % 2 * 8, s = lane % 4 + i / 2 * 4;
        left[i] *= s > t ? 2.0 : s == t ? 1.0 : 0.0;
    }
#pragma unroll
    for (int j = 0; j < R / 32; j++) {
        const int column = first + 8 * j;
        double c[2][2], b[4], sum[2][2];
        get_rows(c, of.h + 16 * mb * R, R, column);
        each_result(c, 0, [&](double &x, int, int) { x *= -2.0; });
        right_columns16(b, k + 16 * mb * R, R, column);
        mn_dmma_16(c, left, b);
        put_rows(room.du + 16 * mb * pitch<R>::left, pitch<R>::left, column, c);
        double *all = room.all + 16 * mb * pitch<R>::left;
        if (!first_group) {
            get_rows(sum, all, pitch<R>::left, column);
#pragma unroll
            for (int i = 0; i < 4; i++) c[i / 2][i % 2] += sum[i / 2][i % 2];
        }
        put_rows(all, pitch<R>::left, column, c);
    }
}

/* dk and dq of a group but for the noise: states in front of the span, then its earlier tokens. */
template <typename T, int R>
__device__ static void gather_products(double (&dk)[R / 32][2][2], double (&dq)[R / 32][2][2],
                                       gather_room<R> &room, const mn_bayes_args &p,
                                       const mn_tile_span &tile, const gather_group<T> &of,
                                       const double *q, int columns, bool weighs) {
    constexpr int TILES = R / 32;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, mb = warp % 4;
    const int first = warp / 4 * (R / 4);
    double a[4], b[2];
#pragma unroll 4
    for (int i = 0; i < R; i += 8) {
        left_rows(a, room.du + 16 * mb * pitch<R>::left, pitch<R>::left, i);
#pragma unroll
        for (int j = 0; j < TILES; j++) {
            right_rows(b, of.P + (first + 8 * j) * R, R, i);
            mn_dmma_8(dk[j], a, b);
        }
    }
    if (weighs) {
        const double upper = 2.0 * weight_of<T>(p, tile, of.s, 16 * mb + lane / 4);
        const double lower = 2.0 * weight_of<T>(p, tile, of.s, 16 * mb + 8 + lane / 4);
        for (int i = 0; i < R; i += 8) {
            left_rows(a, q + 16 * mb * R, R, i);
            a[0] *= upper, a[1] *= lower, a[2] *= upper, a[3] *= lower;
#pragma unroll
            for (int j = 0; j < TILES; j++) {
                right_rows(b, of.P + (first + 8 * j) * R, R, i);
                mn_dmma_8(dq[j], a, b);
            }
        }
    }
#pragma unroll 2
    for (int i = 0; i < columns; i += 8) {
        double along[4];
        left_rows(a, of.de + 16 * mb * columns, columns, i);
        of.y.left(along, 16 * mb, i);
#pragma unroll
        for (int j = 0; j < 4; j++) a[j] = -a[j];
#pragma unroll
        for (int j = 0; j < TILES; j++) {
            right_columns(b, of.M + (int64_t)i * R, R, first + 8 * j);
            mn_dmma_8(dk[j], a, b);
            mn_dmma_8(dq[j], along, b);
        }
    }
#pragma unroll 2
    for (int i = 0; i < 16 * mb + 16; i += 8) {
        double along[4];
        left_rows(a, room.weights[0] + 16 * mb * TOKENS_LD, TOKENS_LD, i);
        left_rows(along, room.weights[1] + 16 * mb * TOKENS_LD, TOKENS_LD, i);
#pragma unroll
        for (int j = 0; j < TILES; j++) {
            right_columns(b, of.z + i * R, R, first + 8 * j);
            mn_dmma_8(dk[j], a, b);
            mn_dmma_8(dq[j], along, b);
        }
    }
}

/* x_t w_t inside channel i, of all groups: its trace and its turn. */
template <typename T, int R>
__device__ static void gain_inside(double &trace, double &turn, const mn_bayes_args &p,
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
        turn += x1 * z[0] - x0 * z[1];
    }
}

/* What channel i leaves of chunk c's tokens: the raw inputs' gradients but for what later chunks
 * say of la and theta. The noise comes from the first token on, the rest from the last. */
template <typename T, int R>
__device__ static void gather_channel(gather_room<R> &room, const mn_bayes_args &p,
                                      const span_work &w, const mn_tile_span &tile, int64_t head,
                                      int c, int i) {
    constexpr int LD = pitch<R>::left;
    const bool turns = p.theta.data != NULL;
    const int r = i * (turns ? 2 : 1), K = (int)p.call.K;
    const int count = (int)min((int64_t)CHUNK, tile.n_rows - c * CHUNK);
    const int64_t b = tile.span.b, t0 = tile.span.t0 + tile.first + c * CHUNK, h = head % p.call.H;
    const double *noise = w.noise + (head * (SPAN_CHUNKS + 1) + c) * 2 * R;
    const int64_t panel = (head * SPAN_TOKENS + c * CHUNK) * R + r;
    const double *phi = w.phi + panel, *k = w.k + panel, *q = w.q + panel;
    double nrr = noise[r], nri = turns ? noise[R + r] : 0.0, nii = turns ? noise[r + 1] : 0.0;
    for (int t = 0; t < count; t++) {
        const int at = (c * CHUNK + t) * LD + r;
        const double re = phi[t * R], im = turns ? phi[t * R + 1] : 0.0;
        const double square = re * re + im * im, a = 2.0 * room.a[c * CHUNK + t];
        const double l2 = (double)mn_float(*mn_row<T>(p.l2, b, t0 + t, h));
        const double weight = l2 / (square * square);
        nrr += weight * re * re, nri -= weight * re * im, nii += weight * im * im;
        const double du0 = room.all[at], du1 = turns ? room.all[at + 1] : 0.0;
        const double q0 = q[t * R], q1 = turns ? q[t * R + 1] : 0.0;
        room.du[at] += nrr * du0 + nri * du1;
        room.dq[at] += a * (nrr * q0 + nri * q1);
        if (!turns) continue;
        room.du[at + 1] += nri * du0 + nii * du1;
        room.dq[at + 1] += a * (nri * q0 + nii * q1);
    }
    double rr = room.inside[c][r], ri = turns ? room.inside[c][R + r] : 0.0;
    double ii = turns ? room.inside[c][r + 1] : 0.0, trace = 0.0, turn = 0.0;
    for (int t = count - 1; t >= 0; t--) {
        const int at = (c * CHUNK + t) * LD + r;
        const double re = phi[t * R], im = turns ? phi[t * R + 1] : 0.0;
        const double k0 = k[t * R], k1 = turns ? k[t * R + 1] : 0.0, a = room.a[c * CHUNK + t];
        const double q0 = q[t * R], q1 = turns ? q[t * R + 1] : 0.0;
        const double du0 = room.all[at], du1 = turns ? room.all[at + 1] : 0.0;
        const double dk0 = room.du[at], dk1 = turns ? room.du[at + 1] : 0.0;
        const double dq0 = room.dq[at], dq1 = turns ? room.dq[at + 1] : 0.0;
        const double square = re * re + im * im, unit = 1.0 / (square * square);
        const double l2 = (double)mn_float(*mn_row<T>(p.l2, b, t0 + t, h)) * unit;
        const double own_rr = l2 * re * re, own_ri = -l2 * re * im, own_ii = l2 * im * im;
        rr += a * q0 * q0 + du0 * k0;
        ri += a * q0 * q1 + 0.5 * (du0 * k1 + du1 * k0);
        ii += a * q1 * q1 + du1 * k1;
        trace += q0 * dq0 + q1 * dq1 + k0 * dk0 + k1 * dk1;
        trace -= 2.0 * (rr * own_rr + 2.0 * ri * own_ri + ii * own_ii);
        turn += q1 * dq0 - q0 * dq1 + k1 * dk0 - k0 * dk1;
        turn -= 2.0 * ((ri * own_rr + ii * own_ri) - (rr * own_ri + ri * own_ii));
        if (p.cot.gainvec.data) {
            gain_inside<T, R>(trace, turn, p, w, tile, head, c * CHUNK + t, i,
                              phi + t * R - r);
        }
        T *dq = mn_row<T>(p.grad.q, b, t0 + t, h), *dk = mn_row<T>(p.grad.k, b, t0 + t, h);
        if (dq) mn_put(dq + i, (float)(re * dq0 - im * dq1));
        if (dk) mn_put(dk + i, (float)(re * dk0 - im * dk1));
        float *local = w.local + (head * SPAN_TOKENS + c * CHUNK + t) * 2 * K;
        local[i] = (float)trace;
        if (turns) local[K + i] = (float)turn;
        room.all[at] = unit * (re * re * rr - 2.0 * re * im * ri + im * im * ii);
        if (turns) room.all[at + 1] = 0.0;
    }
    double *total = w.totals + (head * SPAN_CHUNKS + c) * 2 * K;
    total[i] = trace, total[K + i] = turn;
}

/* All gradients of a head of a span but dv, dla and dtheta; groups one after the other. */
template <typename T, int R>
__global__ void __launch_bounds__(GATHER_THREADS, 1)
span_gather_kernel(const __grid_constant__ mn_bayes_args p, const __grid_constant__ span_work w) {
    extern __shared__ __align__(16) double doubles[];
    gather_room<R> &room = *(gather_room<R> *)doubles;
    constexpr int TILES = R / 32, LD = pitch<R>::left;
    const int64_t H = p.call.H, G = p.call.G, head = blockIdx.x, slot = head / H, h = head % H;
    const mn_tile_span tile = mn_tile_at(p.call, SPAN_TOKENS, slot);
    if (tile.n_rows == 0 || w.steep[tile.n * H + h]) return;
    const bool turns = p.theta.data != NULL, weighs = p.cot.qvar.data && p.q.data;
    const int warp = threadIdx.x / 32, mb = warp % 4, first = warp / 4 * (R / 4);
    const int columns = w.columns, K = (int)p.call.K;
    const double *k = w.k + head * SPAN_TOKENS * R, *q = w.q + head * SPAN_TOKENS * R;
    double dk[TILES][2][2], dq[TILES][2][2];
#pragma unroll
    for (int j = 0; j < TILES; j++) zero(dk[j]), zero(dq[j]);
    for (int64_t g = 0; g < G; g++) {
        const int64_t group = head * G + g;
        gather_group<T> of;
        of.s = group_at(p, (tile.n * H + h) * G + g);
        of.z = w.w + group * SPAN_TOKENS * R, of.h = w.h + group * SPAN_TOKENS * R;
        of.theta = w.theta + group * SPAN_CHUNKS * SMALL;
        of.e = w.e + group * SPAN_TOKENS * columns, of.de = w.de + group * SPAN_TOKENS * columns;
        of.M = w.M + group * columns * R, of.P = w.P + group * R * R;
        of.sigma = w.sigma + group * SPAN_TOKENS;
        of.y = outputs_of<T>(p, tile, of.s);
        gather_du<T, R>(room, of, k, g == 0);
        for (int i = threadIdx.x; i < SPAN_CHUNKS * 2 * R; i += GATHER_THREADS) {
            const double x = w.inside[group * SPAN_CHUNKS * 2 * R + i];
            double *to = &room.inside[0][0] + i;
            *to = g == 0 ? x : *to + x;
        }
        if (threadIdx.x < SPAN_TOKENS) {
            const int t = threadIdx.x;
            const double a = weight_of<T>(p, tile, of.s, t);
            room.a[t] = g == 0 ? a : room.a[t] + a;
            const T *dgain = mn_row<T>(p.cot.gain, tile.span.b, tile.span.t0 + tile.first + t, h);
            const T *dkvar = mn_row<T>(p.cot.kvar, tile.span.b, tile.span.t0 + tile.first + t, h);
            T *dr2 = mn_row<T>(p.grad.r2, tile.span.b, tile.span.t0 + tile.first + t, h);
            if (dr2 && t < tile.n_rows) {
                const double sigma = of.sigma[t], gain = (double)mn_get(dgain, g);
                const double c = of.theta[t / CHUNK * SMALL + t % CHUNK * 17];
                mn_put(dr2 + g, (float)(c - (double)mn_get(dkvar, g) - gain / sigma));
            }
        }
        __syncthreads();
        for (int task = warp; task < 20; task += GATHER_THREADS / 32) {
            int a = 0, b = task / 2;    // pairs b <= a
            while (b > a) a++, b -= a;
            gather_weights<T, R>(room, p, tile, of, q, columns, a, b, task % 2 != 0, weighs);
        }
        __syncthreads();
        gather_products<T, R>(dk, dq, room, p, tile, of, q, columns, weighs);
        __syncthreads();
    }
#pragma unroll
    for (int j = 0; j < TILES; j++) {
        put_rows(room.du + 16 * mb * LD, LD, first + 8 * j, dk[j]);
        put_rows(room.dq + 16 * mb * LD, LD, first + 8 * j, dq[j]);
    }
    __syncthreads();
    const int c = threadIdx.x / 128, i = threadIdx.x % 128;
    if (i < K) gather_channel<T, R>(room, p, w, tile, head, c, i);
    __syncthreads();
    const int rows = K * (turns ? 2 : 1);
    for (int t = warp; t < tile.n_rows && p.grad.l2.data; t += GATHER_THREADS / 32) {
        double sum = 0.0;
        for (int r = threadIdx.x % 32; r < rows; r += 32) sum += room.all[t * LD + r];
        for (int lanes = 16; lanes > 0; lanes >>= 1) {
            sum += __shfl_xor_sync(0xffffffffu, sum, lanes);
        }
        T *dl2 = mn_row<T>(p.grad.l2, tile.span.b, tile.span.t0 + tile.first + t, h);
        if (threadIdx.x % 32 == 0) mn_put(dl2, (float)sum);
    }
}

/* C behind each chunk in place of its growth there, one thread for each channel of a head of a
 * sequence, from its last chunk on. */
template <int R>
__global__ void __launch_bounds__(128)
span_totals_kernel(const __grid_constant__ mn_bayes_args p, const __grid_constant__ span_work w) {
    const int64_t H = p.call.H, G = p.call.G, n = blockIdx.x / H, h = blockIdx.x % H;
    const int i = threadIdx.x, K = (int)p.call.K;
    if (i >= K || w.steep[n * H + h]) return;
    const mn_span span = mn_span_at(p.call, n);
    const bool turns = p.theta.data != NULL;
    const int64_t slot0 = first_slot(p.call, span, n), parts = w.slices * MEAN_WARPS + 1;
    double trace = 0.0, turn = 0.0;
    for (int64_t part = 0; part < G * parts; part++) {
        const double *last = w.last + (blockIdx.x * G * parts + part) * 2 * R;
        if (turns) {
            trace += last[2 * i] + last[2 * i + 1];
            turn += last[R + 2 * i + 1] - last[R + 2 * i];
        } else {
            trace += last[i];
        }
    }
#pragma unroll 8
    for (int64_t c = SPAN_CHUNKS * n_spans_of(span) - 1; c >= 0; c--) {
        const int64_t head = (slot0 + c / SPAN_CHUNKS) * H + h;
        double *at = w.totals + (head * SPAN_CHUNKS + c % SPAN_CHUNKS) * 2 * K + i;
        const double grows = at[0], turning = at[K];
        at[0] = trace, at[K] = turn;
        trace += grows, turn += turning;
    }
}

/* dla and dtheta of a head of a span. */
template <typename T>
__global__ void __launch_bounds__(256)
span_decay_kernel(const __grid_constant__ mn_bayes_args p, const __grid_constant__ span_work w) {
    const int64_t H = p.call.H, slot = blockIdx.x / H, h = blockIdx.x % H;
    const mn_tile_span tile = mn_tile_at(p.call, SPAN_TOKENS, slot);
    if (tile.n_rows == 0 || w.steep[tile.n * H + h]) return;
    const int K = (int)p.call.K;
    for (int at = threadIdx.x; at < tile.n_rows * K; at += 256) {
        const int t = at / K, i = at % K;
        const int64_t when = tile.span.t0 + tile.first + t;
        const double *behind = w.totals + (blockIdx.x * (int64_t)SPAN_CHUNKS + t / CHUNK) * 2 * K;
        const float *local = w.local + (blockIdx.x * (int64_t)SPAN_TOKENS + t) * 2 * K;
        T *dla = mn_row<T>(p.grad.la, tile.span.b, when, h);
        T *dtheta = mn_row<T>(p.grad.theta, tile.span.b, when, h);
        if (dla) mn_put(dla + i, (float)(behind[i] + (double)local[i]));
        if (dtheta) mn_put(dtheta + i, (float)(behind[K + i] + (double)local[K + i]));
    }
}

#endif
