/* bayes_bwd_mean_replay.cuh - the mean of the Bayesian Layer forward by chunks of 16 tokens, as its
 * way
 * back needs it: bayes_bwd_chunk.cu. A block has 64 value columns of a group of a head of a
 * sequence. */
#ifndef MN_KERNELS_CUDA_BAYES_BAYES_BWD_MEAN_REPLAY_CUH
#define MN_KERNELS_CUDA_BAYES_BAYES_BWD_MEAN_REPLAY_CUH

#include "kernels/cuda/bayes/bayes_rmem_tile.cuh"

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

/* Chunk c on its way into the room. */
template <int R>
__device__ static void fetch_mean(mean_smem<R> &room, const span_work &w, const scan_place &at,
                                  int64_t c) {
    constexpr int LEFT = pitch<R>::left, RIGHT = pitch<R>::right, THREADS = 32 * MEAN_WARPS;
    mean_stage<R> &to = room.stage[c % STAGES];
    if (c < at.n_chunks) {
        copy_rows_later<R, CHUNK, THREADS>(to.k, LEFT, w.k + at.shared(c) * CHUNK * R);
        copy_rows_later<R, CHUNK, THREADS>(to.w, RIGHT, w.w + at.own(c) * CHUNK * R);
        copy_rows_later<16, CHUNK, THREADS>(to.eliminate, SMALL_LD,
                                            w.eliminate + at.own(c) * SMALL);
        copy_rows_later<R, 1, THREADS>(to.phi, R, w.phi + at.last_token(c) * R);
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
__device__ static void load_mean(strip<N> &M, const mn_in &from,
                                                 const mn_bayes_args &p, const mean_place &a,
                                                 int rows) {
    const float *x = mn_row<float>(from, a.at.s.n, 0, a.at.s.h);
    each_mean<N>(M, [&](double &to, int v, int row) {
        row += a.base;
        const bool inside = x && v < a.count && row < rows;
        to = inside ? (double)x[(int64_t)row * p.call.V + a.at.s.first + a.first + v] : 0.0;
    });
}

/* (16,16) of a warp as the right factors of both halves of its columns, tokens summed over. */
__device__ static void turn(double (&b)[2][4], double *room,
                                            const double (&x)[2][2][2]) {
    __syncwarp();
    put_rows(room, SMALL_LD, 0, x[0]), put_rows(room, SMALL_LD, 8, x[1]);
    __syncwarp();
    right_columns16(b[0], room, SMALL_LD, 0);
    right_columns16(b[1], room, SMALL_LD, 8);
}

/* The two warps that have the rows of a state. Those without value columns meet as well, so that
 * all warps pass equally many barriers: what looks for races counts these. */
__device__ static void meet_pair() {
    asm volatile("bar.sync %0, 64;" ::"r"((int)threadIdx.x / 64 + 1) : "memory");
}

/* The same of the sum over both warps. */
__device__ static void turn_sum(double (&b)[2][4], double (*room)[16 * SMALL_LD], int half,
                                const double (&x)[2][2][2]) {
    double other[2][4];
    put_rows(room[half], SMALL_LD, 0, x[0]), put_rows(room[half], SMALL_LD, 8, x[1]);
    meet_pair();
#pragma unroll
    for (int m = 0; m < 2; m++) {
        right_columns16(b[m], room[0], SMALL_LD, 8 * m);
        right_columns16(other[m], room[1], SMALL_LD, 8 * m);
#pragma unroll
        for (int i = 0; i < 4; i++) b[m][i] += other[m][i];
    }
}

/* What turn left in the room, as a left factor: columns become rows. */
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

/* e_t, and M in front of spans. */
template <typename T, int R>
__device__ static void mean_forward(mean_smem<R> &room, const mn_bayes_args &p,
                                    const span_work &w, int64_t block) {
    const mean_place a = mean_place_at<R>(p, w, block);
    if (w.steep[a.at.s.n * a.at.H + a.at.s.h]) return;
    const bool turns = p.theta.data != NULL;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int rows = (int)p.call.K * (turns ? 2 : 1);
    constexpr int N = R / 2;
    strip<N> M;
    load_mean<N>(M, p.M0, p, a, rows);
    const int *scanned = w.left + block / w.slices;
    int seen = 0;
    if (threadIdx.x == 0) await_left(seen, scanned, min((int64_t)2, a.at.n_chunks));
    __syncthreads();
    fetch_mean<R>(room, w, a.at, 0), fetch_mean<R>(room, w, a.at, 1);
    for (int64_t c = 0; c < a.at.n_chunks; c++) {
        await_copies();
        if (threadIdx.x == 0) await_left(seen, scanned, min(c + 3, a.at.n_chunks));
        __syncthreads();
        fetch_mean<R>(room, w, a.at, c + 2);
        if (a.first >= w.columns) {
            meet_pair();
            continue;
        }
        const mean_stage<R> &here = room.stage[c % STAGES];
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
        turn_sum(b, room.sums[warp / 2], a.half, x);
        left_small(left, here.eliminate, SMALL_LD);
#pragma unroll
        for (int m = 0; m < 2; m++) {
            zero(x[m]);
            mn_mma_f64_16(x[m], left, b[m]);
            double *to = w.e + a.at.own(c) * CHUNK * w.columns + a.first;
            if (a.half == 1) put_rows(to, w.columns, 8 * m, x[m]);
        }
        turn(b, room.turned[warp], x);
        left_transposed(left, b, 1.0);
        add_product<N>(M, left, here.w + a.base, pitch<R>::right);
        if (c % SPAN_CHUNKS == SPAN_CHUNKS - 1) {
            move_col_tile_columns<N>(M, here.phi + a.base, turns, false);
        }
    }
    put_last_mean<R>(M, p, w, a, block, rows);
}

#endif
