/* bayes_bwd_mean_scan.cuh - two scans of bayes_bwd_chunk.cu, which has the equations: mean_forward,
 * the mean M forward by chunks of 16 tokens, and mean_backward, its adjoint E back with de, dv and
 * b = dw / sigma - 2 A a Q. A block has 64 value columns of a group of a head of a sequence, two
 * warps for each 16: one has the first R / 2 rows of the state, one the others. */
#ifndef MN_KERNELS_CUDA_BAYES_BAYES_BWD_MEAN_SCAN_CUH
#define MN_KERNELS_CUDA_BAYES_BAYES_BWD_MEAN_SCAN_CUH

#include "kernels/cuda/bayes/bayes_rmem_tile.cuh"
#include "kernels/cuda/prim/sync.cuh"

namespace mneme::bayes {

/* ---- the mean forward ------------------------------------------------------------------------ */

/* Shared memory of one chunk. */
template <int R>
struct mean_stage {
    double k[16 * pitch<R>::left], w[16 * pitch<R>::right];
    double eliminate[16 * SMALL_LD], phi[R];
};

template <int R>
struct mean_smem {
    mean_stage<R> stage[STAGES];
    double sums[MEAN_WARPS / 2][2][16 * SMALL_LD];    // of pairs of warps
    double turned[MEAN_WARPS][16 * SMALL_LD];         // of each warp: (16,16) to be read across
};

/* Where a warp of the mean works. */
struct mean_place {
    scan_place at;
    int first, count;       // value columns of the warp: the first one within the group
    int half, base;         // half of the state's rows, and its first
};

template <int R>
__device__ static mean_place mean_place_at(const mn_bayes_args &p,
                                                           const span_work &w, int64_t block) {
    mean_place a;
    a.at = scan_place_at(p, block / w.slices);
    a.first = (int)((block % w.slices * SLICES + threadIdx.x / 64) * SLICE);
    a.half = threadIdx.x / 32 % 2, a.base = a.half * R / 2;
    a.count = max(min(a.at.s.count - a.first, (int)SLICE), 0);
    return a;
}

/* Starts loading chunk c to its stage: k, w (16,R), L (16,16) and Phi (R) of its span's last
 * token. */
template <int R>
__device__ static void fetch_mean(mean_smem<R> &smem, const span_work &w, const scan_place &at,
                                  int64_t c) {
    constexpr int LEFT = pitch<R>::left, RIGHT = pitch<R>::right, THREADS = 32 * MEAN_WARPS;
    mean_stage<R> &to = smem.stage[c % STAGES];
    if (c < at.n_chunks) {
        copy_rows_later<R, CHUNK, THREADS>(to.k, LEFT, w.k + at.shared(c) * CHUNK * R);
        copy_rows_later<R, CHUNK, THREADS>(to.w, RIGHT, w.w + at.own(c) * CHUNK * R);
        copy_rows_later<16, CHUNK, THREADS>(to.eliminate, SMALL_LD,
                                            w.eliminate + at.own(c) * SMALL);
        copy_rows_later<R, 1, THREADS>(to.phi, R, w.leave + at.head(c) * R);
    }
    close_copies();
}

/* A state's 16 value columns as rows of R numbers, of which N are this warp's. */
template <int N>
__device__ static void put_mean(double *to, int ld, const strip<N> &M) {
#pragma unroll
    for (int j = 0; j < N / 8; j++) put_rows(to, ld, 8 * j, M[j]);
}

/* use(element, value column, row of the warp's) for all of them */
template <int N, typename F>
__device__ static void each_mean(strip<N> &M, F use) {
#pragma unroll
    for (int j = 0; j < N / 8; j++) {
#pragma unroll
        for (int m = 0; m < 2; m++) {
            const int v = 8 * m + (int)(threadIdx.x % 32) / 4, row = mn_tile_column(j);
            use(M[j][m][0], v, row), use(M[j][m][1], v, row + 1);
        }
    }
}

template <int N>
__device__ static void load_mean(strip<N> &M, const mn_in &from, const double *enter,
                                 const mn_bayes_args &p, const mean_place &a, int rows) {
    const float *x = mn_row<float>(from, a.at.s.n, 0, a.at.s.h);
    each_mean<N>(M, [&](double &to, int v, int row) {
        row += a.base;
        const bool inside = x && v < a.count && row < rows;
        to = inside ? (double)x[(int64_t)row * p.call.V + a.at.s.first + a.first + v] : 0.0;
        if (enter && inside) to *= enter[row];
    });
}

/* x (16,16) of a warp, through its part of shared memory, as the right factors of both halves of
 * its columns, tokens summed over. */
__device__ static void turn(double (&b)[2][4], double *smem,
                                            const double (&x)[2][2][2]) {
    __syncwarp();
    put_rows(smem, SMALL_LD, 0, x[0]), put_rows(smem, SMALL_LD, 8, x[1]);
    __syncwarp();
    right_columns16(b[0], smem, SMALL_LD, 0);
    right_columns16(b[1], smem, SMALL_LD, 8);
}

/* The two warps that have the rows of a state. Those without value columns meet as well, so that
 * all warps pass equally many barriers: what looks for races counts these. */
__device__ static void meet_pair() {
    mn_named_barrier_sync((int)threadIdx.x / 64 + 1, 64);
}

/* The same of the sum over both warps. */
__device__ static void turn_sum(double (&b)[2][4], double (*smem)[16 * SMALL_LD], int half,
                                const double (&x)[2][2][2]) {
    double other[2][4];
    put_rows(smem[half], SMALL_LD, 0, x[0]), put_rows(smem[half], SMALL_LD, 8, x[1]);
    meet_pair();
#pragma unroll
    for (int m = 0; m < 2; m++) {
        right_columns16(b[m], smem[0], SMALL_LD, 8 * m);
        right_columns16(other[m], smem[1], SMALL_LD, 8 * m);
#pragma unroll
        for (int i = 0; i < 4; i++) b[m][i] += other[m][i];
    }
}

/* The right factors that `turn` made, as a left factor: columns become rows. */
__device__ static void left_transposed(double (&a)[8], const double (&b)[2][4], double sign) {
#pragma unroll
    for (int i = 0; i < 4; i++) a[2 * i] = sign * b[0][i], a[2 * i + 1] = sign * b[1][i];
}

/* C behind the last token, this warp's columns of it, as put_last does P's. */
template <int R>
__device__ static void put_last_mean(const strip<R / 2> &M, const mn_bayes_args &p,
                                     const span_work &w, const mean_place &a, int64_t block,
                                     int rows) {
    constexpr int N = R / 2;
    const int lane = threadIdx.x % 32;
    const float *dM = mn_row<float>(p.cot.M, a.at.s.n, 0, a.at.s.h);
    const int part = 1 + a.first / SLICE;
    double *to = w.last + ((block / w.slices) * (w.slices * SLICES + 1) + part) * 2 * R;
#pragma unroll
    for (int j = 0; j < N / 8; j++) {
        double own[2] = { 0.0, 0.0 }, cross[2] = { 0.0, 0.0 };
#pragma unroll
        for (int m = 0; m < 2; m++) {
            const int v = 8 * m + lane / 4, row = a.base + mn_tile_column(j);
            const int64_t at = (int64_t)row * p.call.V + a.at.s.first + a.first + v;
            const bool there = dM && v < a.count;
            const double d0 = there && row < rows ? (double)dM[at] : 0.0;
            const double d1 = there && row + 1 < rows ? (double)dM[at + p.call.V] : 0.0;
            own[0] += d0 * M[j][m][0], own[1] += d1 * M[j][m][1];
            cross[0] += d0 * M[j][m][1], cross[1] += d1 * M[j][m][0];
        }
#pragma unroll
        for (int i = 0; i < 2; i++) {
            for (int lanes = 4; lanes < 32; lanes <<= 1) {
                own[i] += __shfl_xor_sync(0xffffffffu, own[i], lanes);
                cross[i] += __shfl_xor_sync(0xffffffffu, cross[i], lanes);
            }
            const int row = a.base + mn_tile_column(j) + i;
            if (lane < 4) to[row] = own[i], to[R + row] = cross[i];
        }
    }
}

/* The mean forward, for one block of scans_forward_kernel.
 *
 * Loads   w.k, w.w (16,R), w.eliminate = L (16,16) and w.leave (R) of each chunk, as soon as the
 *         covariance's block has counted it in w.left; v (16, 64 columns); at the start M0 (R,V).
 * Computes e = L (V - K M), M <- M + W'e; at the end of a span M moves to the next frame by Phi.
 * Stores  w.e (16, columns) of each chunk, w.M (columns,R) in front of each span, and w.last: C
 *         behind the last token, from the cotangent of the last M. */
template <typename T, int R>
__device__ static void mean_forward(mean_smem<R> &smem, const mn_bayes_args &p,
                                    const span_work &w, int64_t block) {
    const mean_place a = mean_place_at<R>(p, w, block);
    if (w.steep[a.at.s.n * a.at.H + a.at.s.h]) return;
    const bool turns = p.theta.data != NULL;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int rows = (int)p.call.K * (turns ? 2 : 1);
    constexpr int N = R / 2;
    strip<N> M;
    load_mean<N>(M, p.M0, a.at.template enter<R>(w), p, a, rows);
    const int *scanned = w.left + block / w.slices;
    int seen = 0;
    if (threadIdx.x == 0) await_left(seen, scanned, min((int64_t)2, a.at.n_chunks));
    __syncthreads();
    fetch_mean<R>(smem, w, a.at, 0), fetch_mean<R>(smem, w, a.at, 1);
    for (int64_t c = 0; c < a.at.n_chunks; c++) {
        await_copies();
        if (threadIdx.x == 0) await_left(seen, scanned, min(c + 3, a.at.n_chunks));
        __syncthreads();
        fetch_mean<R>(smem, w, a.at, c + 2);
        if (a.first >= w.columns) {
            meet_pair();
            continue;
        }
        const mean_stage<R> &here = smem.stage[c % STAGES];
        if (c % SPAN_CHUNKS == 0) {
            put_mean<N>(w.M + (a.at.group(c) * w.columns + a.first) * R + a.base, R, M);
        }
        double x[2][2][2], v[2][2][2];
        const T *from = mn_row<T>(p.v, a.at.span.b, a.at.span.t0 + c * CHUNK, a.at.s.h);
        from += a.at.s.first + a.first;
        const int left_over = (int)min((int64_t)CHUNK, a.at.span.length - c * CHUNK);
        const bool takes = left_over > 0 && a.count > 0 && a.half == 0;
        float raw[8] = {};    // guarded one by one, each load would wait for the one before
        if (takes) {
#pragma unroll
            for (int i = 0; i < 8; i++) {
                const int t = 8 * (i / 2 % 2) + lane / 4, j = 8 * (i / 4) + 2 * (lane % 4) + i % 2;
                const int64_t row = min(t, left_over - 1) * p.v.stride[1];
                raw[i] = mn_float(from[row + min(j, a.count - 1)]);
            }
        }
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const int t = 8 * (i / 2 % 2) + lane / 4, j = 8 * (i / 4) + 2 * (lane % 4) + i % 2;
            const bool there = j < a.count && t < left_over;
            v[i / 4][i / 2 % 2][i % 2] = there ? (double)raw[i] : 0.0;
        }
        zero(x[0]), zero(x[1]);
        through_col_tile<N>(x, here.k + a.base, pitch<R>::left, M);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const int m = i / 4, t = i / 2 % 2;
            x[m][t][i % 2] = v[m][t][i % 2] - x[m][t][i % 2];
        }
        double b[2][4], left[8];
        turn_sum(b, smem.sums[warp / 2], a.half, x);
        left_small(left, here.eliminate, SMALL_LD);
#pragma unroll
        for (int m = 0; m < 2; m++) {
            zero(x[m]);
            mn_mma_f64_k16(x[m], left, b[m]);
            double *to = w.e + a.at.own(c) * CHUNK * w.columns + a.first;
            if (a.half == 1) put_rows(to, w.columns, 8 * m, x[m]);
        }
        turn(b, smem.turned[warp], x);
        left_transposed(left, b, 1.0);
        add_product<N>(M, left, here.w + a.base, pitch<R>::right);
        if (c % SPAN_CHUNKS == SPAN_CHUNKS - 1) {
            move_col_tile_columns<N>(M, here.phi + a.base, turns, false);
        }
    }
    put_last_mean<R>(M, p, w, a, block, rows);
}

enum {
    VALUES = SLICE * SLICES, VALUES_LD = VALUES + 4,
    E_ROWS = 2 * 32 * MEAN_WARPS / VALUES,    // of e that a block copies at a time
};

/* A chunk's inputs in shared memory. */
template <int R>
struct mean_back_stage {
    double w[16 * pitch<R>::left], k[16 * pitch<R>::right], q[16 * pitch<R>::right];
    double eliminate[16 * SMALL_LD], reads[16 * SMALL_LD], phi[R], e[16 * VALUES_LD];
};

/* TIGHT: a chunk is loaded when the one before has been read, and no earlier. */
template <int R, bool TIGHT>
struct mean_back_smem {
    static constexpr int N_STAGES = TIGHT ? 1 : 2;

    mean_back_stage<R> stage[N_STAGES];
    double E[VALUES * pitch<R>::right];              // behind the chunk; value columns are its rows
    double de[16 * VALUES_LD], y[16 * VALUES_LD];    // rows of tokens
    double weights[2][16 * SMALL_LD];                // e_t.y_s for s >= t, -e_t.de_s for s > t
    double shares[MEAN_WARPS][CHUNK];                // of w_t.b_t, by warps
};

/* Starts loading chunk c to its stage, of e `width` value columns from `first` on. */
template <int R, bool TIGHT>
__device__ static void load_mean_back(mean_back_smem<R, TIGHT> &smem, const span_work &w,
                                       const scan_place &at, int64_t c, int first, int width) {
    constexpr int LEFT = pitch<R>::left, RIGHT = pitch<R>::right, THREADS = 32 * MEAN_WARPS;
    mean_back_stage<R> &to = smem.stage[c & (smem.N_STAGES - 1)];
    if (c < 0) return;
    const int64_t shared = at.shared(c) * CHUNK * R, own = at.own(c);
    copy_rows_later<R, CHUNK, THREADS>(to.k, RIGHT, w.k + shared);
    copy_rows_later<R, CHUNK, THREADS>(to.q, RIGHT, w.q + shared);
    copy_rows_later<R, CHUNK, THREADS>(to.w, LEFT, w.w + own * CHUNK * R);
    copy_rows_later<16, CHUNK, THREADS>(to.eliminate, SMALL_LD, w.eliminate + own * SMALL);
    copy_rows_later<16, CHUNK, THREADS>(to.reads, SMALL_LD, w.reads + own * SMALL);
    copy_rows_later<R, 1, THREADS>(to.phi, R, w.leave + at.head(c) * R);
    const int thread = (int)fresh_thread();
    const int t = thread / (VALUES / 2), j = thread % (VALUES / 2) * 2;
    if (j >= width) return;
    const double *e = w.e + (own * CHUNK + t) * w.columns + first + j;
#pragma unroll
    for (int i = 0; i < CHUNK / E_ROWS; i++) {
        copy_later(to.e + (t + i * E_ROWS) * VALUES_LD + j, e + i * E_ROWS * w.columns);
    }
}

/* Asks L2 for what load_mean_back will load: a thread for each 128 bytes of two rows of tiles. */
template <int R>
__device__ static void ask_mean_back(const span_work &w, const scan_place &at, int64_t c,
                                     int first, int width) {
    constexpr int LINE = 128 / (int)sizeof(double), LINES = CHUNK * R / LINE;
    static_assert(2 * LINES == 32 * MEAN_WARPS, "two lines for each thread");
    if (c < 0) return;
    const int thread = (int)threadIdx.x, line = thread % LINES * LINE, t = thread % CHUNK;
    const int64_t shared = at.shared(c) * CHUNK * R, own = at.own(c);
    const int j = (thread - LINES) / CHUNK * LINE;
    mn_prefetch_l2((thread < LINES ? w.k : w.q) + shared + line);
    if (thread < LINES) mn_prefetch_l2(w.w + own * CHUNK * R + line);
    else if (j < width) mn_prefetch_l2(w.e + (own * CHUNK + t) * w.columns + first + j);
}

/* Rows of do of 16 value columns of a chunk. They are prefetched into L2 a chunk ahead: kept in
 * registers that long they would spill others. */
template <typename T>
struct chunk_outputs {
    const T *rows;    // NULL: zeros
    int64_t stride;
    int n_rows, count;

    __device__ chunk_outputs(const mn_bayes_args &p, const mean_place &a, int64_t c) {
        rows = mn_row<T>(p.cot.o, a.at.span.b, a.at.span.t0 + c * CHUNK, a.at.s.h);
        stride = p.cot.o.stride[1], count = a.count;
        n_rows = (int)min((int64_t)CHUNK, a.at.span.length - c * CHUNK);
        if (n_rows <= 0 || count <= 0) rows = nullptr;
        if (rows) rows += a.at.s.first + a.first;
    }

    __device__ void ask() const {
        const int t = threadIdx.x % 32;
        if (rows && t < n_rows) mn_prefetch_l2(rows + t * stride);
    }

    /* At t = l % 4 + 4 i and column l / 4 of the two halves. A load that a guard waits for would
     * make it wait for the load before. */
    __device__ void load(T (&raw)[8]) const {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int i = 0; i < 8; i++) raw[i] = T();
        if (!rows) return;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const T *row = rows + min(lane % 4 + 4 * i, n_rows - 1) * stride;
            raw[i] = row[min(lane / 4, count - 1)], raw[4 + i] = row[min(8 + lane / 4, count - 1)];
        }
    }

    /* Times scale, as the right factor that sums over tokens. */
    __device__ void put(double (&y)[2][4], const T (&raw)[8], double scale) const {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const bool there = lane % 4 + i % 4 * 4 < n_rows && 8 * (i / 4) + lane / 4 < count;
            y[i / 4][i % 4] = there ? scale * (double)mn_float(raw[i]) : 0.0;
        }
    }
};

/* dkvar + dgain r2 / sigma^2 - sum_{s >= t} a_s A_ts^2 of token t of a chunk. */
template <typename T>
__device__ static double own_of(const mn_bayes_args &p, const span_work &w,
                                const mn_tile_span &tile, const span_group &s, int64_t chunk,
                                const double *reads, int t, bool weighs) {
    if (t >= tile.n_rows) return 0.0;
    const int64_t when = tile.span.t0 + tile.first + t, at = chunk * CHUNK + t;
    const double by = mn_rcp_f64(w.sigma[at]);
    double own = (double)mn_get(mn_row<T>(p.cot.kvar, tile.span.b, when, s.h), s.g);
    own += (double)mn_get(mn_row<T>(p.cot.gain, tile.span.b, when, s.h), s.g) * w.r2[at] * by * by;
    for (int other = t; weighs && other < CHUNK; other++) {
        const double read = reads[t * SMALL_LD + other];
        own -= weight_of<T>(p, tile, s, other) * read * read;
    }
    return own;
}

/* This warp's part of b from that of dw, 8 * TILES rows of the state from `column` on: into h, and
 * its share of w_t.b_t. */
template <typename T, int R, int TILES, bool TIGHT>
__device__ static void put_b(double (&dw)[TILES][2][2], mean_back_smem<R, TIGHT> &smem,
                             const mean_back_stage<R> &here, const mn_bayes_args &p,
                             const span_work &w, const mn_tile_span &tile, const scan_place &at,
                             int64_t c, int column, const double (&sigma)[2], bool weighs) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const bool turns = p.theta.data != NULL;
    const int rows = (int)p.call.K * (turns ? 2 : 1);
    const double *phi = w.phi + at.shared(c) * CHUNK * R;
    const double by[2] = { mn_rcp_f64(sigma[0]), mn_rcp_f64(sigma[1]) };
    double left[8], b[4], shares[2] = { 0.0, 0.0 };
    if (weighs) {
        left_small(left, here.reads, SMALL_LD);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const double a = -2.0 * weight_of<T>(p, tile, at.s, lane % 4 + 4 * i);
            left[2 * i] *= a, left[2 * i + 1] *= a;
        }
    }
#pragma unroll
    for (int j = 0; j < TILES; j++) {
        double with[2][2];
        get_rows(with, here.w, pitch<R>::left, column + 8 * j);
        each_result(dw[j], column + 8 * j, [&](double &x, int t, int r) {
            if (p.cot.gainvec.data) {
                x += transposed_gain<T>(p, tile, at.s, phi + t * R, t, r, rows, turns);
            }
            x *= by[t / 8];
        });
        if (weighs) {
            right_columns16(b, here.q, pitch<R>::right, column + 8 * j);
            mn_mma_f64_k16(dw[j], left, b);
        }
        put_rows(w.h + at.own(c) * CHUNK * R, R, column + 8 * j, dw[j]);
#pragma unroll
        for (int i = 0; i < 4; i++) shares[i / 2] += with[i / 2][i % 2] * dw[j][i / 2][i % 2];
    }
#pragma unroll
    for (int m = 0; m < 2; m++) {
        shares[m] += __shfl_xor_sync(0xffffffffu, shares[m], 1);
        shares[m] += __shfl_xor_sync(0xffffffffu, shares[m], 2);
        if (lane % 4 == 0) smem.shares[warp][8 * m + lane / 4] = shares[m];
    }
}

/* The products of e with y and with de of the chunk: half of one of them by each of four warps. */
template <int R, bool TIGHT>
__device__ static void put_chunk_weights(mean_back_smem<R, TIGHT> &smem, const double *e,
                                         int width) {
    const int warp = threadIdx.x / 32, from = 8 * (warp % 2);
    const bool later = warp >= 2;
    double c[2][2];
    zero(c);
    for (int i = 0; i < width; i += 16) {
        double a[8], b[4];
        left_small(a, e + i, VALUES_LD);
        right_rows16(b, (later ? smem.de : smem.y) + from * VALUES_LD + i, VALUES_LD);
        mn_mma_f64_k16(c, a, b);
    }
    each_result(c, from, [&](double &x, int t, int s) {
        x = later ? (s > t ? -x : 0.0) : (s >= t ? x : 0.0);
    });
    put_rows(smem.weights[later], SMALL_LD, from, c);
}

/* de of 16 value columns of a pair of warps, 8 by each, from what both halves of the state's rows
 * say: to shared memory, to memory and to dv; and y. */
template <typename T, int R, bool TIGHT>
__device__ static void put_de(double (&x)[2][2][2], mean_back_smem<R, TIGHT> &smem,
                              const mean_back_stage<R> &here, double (&y)[2][4],
                              const mn_bayes_args &p, const span_work &w, const mean_place &a,
                              int64_t c) {
    const int pair = threadIdx.x / 64, lane = threadIdx.x % 32, column = 8 * a.half;
    double *smem_tile = smem.de + pair * SLICE, own[2][2], other[2][2], left[8], b[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        own[i / 2][i % 2] = a.half ? x[1][i / 2][i % 2] : x[0][i / 2][i % 2];
        other[i / 2][i % 2] = a.half ? x[0][i / 2][i % 2] : x[1][i / 2][i % 2];
    }
    put_rows(smem_tile, VALUES_LD, 8 - column, other);
    const chunk_outputs<T> outputs(p, a, c);
    T raw[8];
    outputs.load(raw);
    meet_pair();
    get_rows(other, smem_tile, VALUES_LD, column);
    outputs.put(y, raw, (double)p.scale);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        own[i / 2][i % 2] += other[i / 2][i % 2];
        b[i] = a.half ? y[1][i] : y[0][i];
        smem.y[(lane % 4 + 4 * i) * VALUES_LD + pair * SLICE + column + lane / 4] = b[i];
    }
    left_small(left, here.reads, SMALL_LD);
    mn_mma_f64_k16(own, left, b);
    put_rows(smem_tile, VALUES_LD, column, own);
    __syncwarp();
    right_columns16(b, smem_tile, VALUES_LD, column);
    __syncwarp();
    left_columns16(left, here.eliminate, SMALL_LD, 0);
    zero(own);
    mn_mma_f64_k16(own, left, b);
    put_rows(smem_tile, VALUES_LD, column, own);
    put_rows(w.de + a.at.own(c) * CHUNK * w.columns + a.first, w.columns, column, own);
    T *dv = mn_row<T>(p.grad.v, a.at.span.b, a.at.span.t0 + c * CHUNK, a.at.s.h);
    if (!dv) return;
    dv += a.at.s.first + a.first;
    each_result(own, column, [&](double &d, int t, int j) {
        const bool there = j < a.count && c * CHUNK + t < a.at.span.length;
        if (there) mn_put(dv + t * p.grad.v.stride[1] + j, (float)d);
    });
}

/* Stores w.own of a chunk, once its b has been computed: `own` - w_t.b_t / 2. One warp calls. */
template <int R, bool TIGHT>
__device__ static void finish_own(const mean_back_smem<R, TIGHT> &smem, const span_work &w,
                                  const scan_place &at, int64_t c, double own) {
    const int t = threadIdx.x % 32;
    double sum = 0.0;
    if (t >= CHUNK) return;
#pragma unroll
    for (int i = 0; i < MEAN_WARPS; i++) sum += smem.shares[i][t];
    w.own[at.own(c) * CHUNK + t] = own - 0.5 * sum;
}

/* The mean's adjoint back, for one block of scans_back_kernel; chunks in reverse.
 *
 * Loads   w.w, w.k, w.q (16,R), L, A (16,16), Phi (R) and e (16, 64 columns) of each chunk, sigma
 *         (16); do (16, 64 columns); at the start the cotangent of the last M (R,V).
 * Computes de = L'(W E + A Y), E <- E + Q'Y - K'de, and this block's part of dw.
 * Stores  w.de (16, columns), grad.v, at the end grad.M0. Of several blocks of a group all but the
 *         last store their dw (16,R) in w.dw and count chunks in w.back; the last one waits for
 *         these, adds them in order and stores b in w.h (16,R) and w.own (16). */
template <typename T, int R, bool TIGHT>
__device__ static void mean_backward(mean_back_smem<R, TIGHT> &smem, const mn_bayes_args &p,
                                     const span_work &w, int64_t block) {
    constexpr int N = R / 2, LEFT = pitch<R>::left, RIGHT = pitch<R>::right;
    constexpr int TILES = R / (8 * MEAN_WARPS);
    const mean_place a = mean_place_at<R>(p, w, block);
    const scan_place &at = a.at;
    if (w.steep[at.s.n * at.H + at.s.h]) return;
    const bool turns = p.theta.data != NULL, weighs = p.cot.qvar.data && p.q.data;
    const int warp = threadIdx.x / 32, slice = (int)(block % w.slices);
    const int rows = (int)p.call.K * (turns ? 2 : 1), column = 8 * TILES * warp;
    const int first = slice * VALUES, width = min((int)VALUES, w.columns - first);
    const bool has_values = a.first < w.columns, last = slice == w.slices - 1;
    const int64_t n_chunks = at.n_chunks;
    const int lane = threadIdx.x % 32;
    const bool closing = warp == MEAN_WARPS - 1;
    double own = 0.0;    // of the closing warp's lane t: token t of the chunk before
    strip<N> E;
    load_mean<N>(E, p.cot.M, NULL, p, a, rows);
    load_mean_back<R, TIGHT>(smem, w, at, n_chunks - 1, first, width);
    for (int64_t c = n_chunks - 1; c >= 0; c--) {
        await_all_copies();
        if constexpr (TIGHT) ask_mean_back<R>(w, at, c - 1, first, width);
        else load_mean_back<R, TIGHT>(smem, w, at, c - 1, first, width);
        const mean_back_stage<R> &here = smem.stage[c & (smem.N_STAGES - 1)];
        const int left_over = (int)min((int64_t)CHUNK, at.span.length - c * CHUNK);
        const mn_tile_span tile = { at.s.n, c * CHUNK, left_over, at.span };
        if (a.half == 0 && c > 0) chunk_outputs<T>(p, a, c - 1).ask();
        if (c % SPAN_CHUNKS == SPAN_CHUNKS - 1) {
            move_col_tile_columns<N>(E, here.phi + a.base, turns, true);
        }
        if (closing && last && c + 1 < n_chunks) finish_own<R, TIGHT>(smem, w, at, c + 1, own);
        if (closing && last && lane < CHUNK) {
            own = own_of<T>(p, w, tile, at.s, at.own(c), here.reads, lane, weighs);
        }
        const double *sigmas = w.sigma + at.own(c) * CHUNK + lane / 4;
        const double sigma[2] = { sigmas[0], sigmas[8] };
        double y[2][4], left[8], b[4], dw[TILES][2][2], x[2][2][2];
        if (has_values) {
            put_mean<N>(smem.E + warp / 2 * SLICE * RIGHT + a.base, RIGHT, E);
            zero(x[0]), zero(x[1]);
            through_col_tile<N>(x, here.w + a.base, LEFT, E);
        }
        if (closing) {
            __syncwarp();
            if (lane == 0) say_left(w.back + block, n_chunks - 1 - c);
        }
        if (has_values) {
            put_de<T, R, TIGHT>(x, smem, here, y, p, w, a, c);
        } else {
            meet_pair();
        }
        __syncthreads();
        if (warp < 4) put_chunk_weights<R, TIGHT>(smem, here.e, width);
        if (last && threadIdx.x == 0) {
            for (int i = 0; i < slice; i++) {
                int seen = 0;
                await_left(seen, w.back + block - slice + i, n_chunks - c);
            }
        }
#pragma unroll
        for (int j = 0; j < TILES; j++) zero(dw[j]);
        for (int i = 0; i < width; i += 16) {
            left_small(left, here.e + i, VALUES_LD);
#pragma unroll
            for (int j = 0; j < TILES; j++) {
                right_columns16(b, smem.E + i * RIGHT, RIGHT, column + 8 * j);
                mn_mma_f64_k16(dw[j], left, b);
            }
        }
        if (has_values) {
            left_transposed(left, y, 1.0);
            add_product<N>(E, left, here.q + a.base, RIGHT);
            left_columns16(left, smem.de + warp / 2 * SLICE, VALUES_LD, 0);
#pragma unroll
            for (int i = 0; i < 8; i++) left[i] = -left[i];
            add_product<N>(E, left, here.k + a.base, RIGHT);
        }
        __syncthreads();
#pragma unroll
        for (int later = 0; later < 2; later++) {
            left_small(left, smem.weights[later], SMALL_LD);
#pragma unroll
            for (int j = 0; j < TILES; j++) {
                right_columns16(b, later ? here.k : here.q, RIGHT, column + 8 * j);
                mn_mma_f64_k16(dw[j], left, b);
            }
        }
        double *part = w.dw + at.group(c) * w.dw_each + c % SPAN_CHUNKS * CHUNK * R;
#pragma unroll
        for (int j = 0; j < TILES; j++) {
            if (!last) put_rows(part + slice * SPAN_TOKENS * R, R, column + 8 * j, dw[j]);
            for (int i = 0; last && i < slice; i++) {
                double more[2][2];
                get_rows(more, part + i * SPAN_TOKENS * R, R, column + 8 * j);
#pragma unroll
                for (int k = 0; k < 4; k++) dw[j][k / 2][k % 2] += more[k / 2][k % 2];
            }
        }
        if (last) {
            put_b<T, R, TILES, TIGHT>(dw, smem, here, p, w, tile, at, c, column, sigma, weighs);
        }
        if (TIGHT) {
            __syncthreads();
            load_mean_back<R, TIGHT>(smem, w, at, c - 1, first, width);
        }
    }
    __syncthreads();
    if (closing) {
        if (last && n_chunks > 0) finish_own<R, TIGHT>(smem, w, at, 0, own);
        __syncwarp();
        if (lane == 0) say_left(w.back + block, n_chunks);
    }
    float *dM = mn_row<float>(p.grad.M0, at.s.n, 0, at.s.h);
    const double *enter = at.template enter<R>(w);
    each_mean<N>(E, [&](double &x, int v, int row) {
        row += a.base;
        if (!dM || v >= a.count || row >= rows) return;
        const double by = enter ? enter[row] : 1.0;
        dM[(int64_t)row * p.call.V + at.s.first + a.first + v] = (float)(by * x);
    });
}

}    // namespace mneme::bayes

#endif
