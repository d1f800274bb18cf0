/* bayes_bwd_covariance_scan.cuh - D, the covariance's adjoint, back by chunks of 16 tokens:
 * bayes_bwd_chunk.cu. One block for each group of a head of a sequence. */
#ifndef MN_KERNELS_CUDA_BAYES_BAYES_BWD_COVARIANCE_SCAN_CUH
#define MN_KERNELS_CUDA_BAYES_BAYES_BWD_COVARIANCE_SCAN_CUH

#include "kernels/cuda/bayes/bayes_rmem_tile.cuh"

namespace mneme::bayes {

/* ---- the covariance's adjoint ---------------------------------------------------------------- */

template <int R>
struct adjoint_stage {
    double w[16 * pitch<R>::left], k[16 * pitch<R>::right], q[16 * pitch<R>::right];
    double eliminate[16 * SMALL_LD], phi[R];
};

/* TIGHT: chunks are loaded when the one before has been read, not half a chunk earlier. */
template <int R, bool TIGHT>
struct adjoint_smem {
    static constexpr int N_STAGES = TIGHT ? 2 : STAGES, PARTS = TIGHT ? 18 : PARTS_LD;

    adjoint_stage<R> stage[N_STAGES];
    double h[16 * pitch<R>::right], turned[16 * pitch<R>::right];
    double parts[R / 16 * 16 * PARTS];
    double S[16 * SMALL_LD];
};

/* Chunk c on its way to shared memory; later chunks come first. */
template <int R, bool TIGHT>
__device__ static void load_adjoint(adjoint_smem<R, TIGHT> &smem, const span_work &w,
                                     const scan_place &at, int64_t c, bool weighs) {
    constexpr int LEFT = pitch<R>::left, RIGHT = pitch<R>::right, THREADS = 2 * R;
    adjoint_stage<R> &to = smem.stage[(at.n_chunks - 1 - c) % smem.N_STAGES];
    if (c >= 0) {
        const int64_t shared = at.shared(c) * CHUNK * R;
        copy_rows_later<R, CHUNK, THREADS>(to.w, LEFT, w.w + at.own(c) * CHUNK * R);
        copy_rows_later<R, CHUNK, THREADS>(to.k, RIGHT, w.k + shared);
        if (weighs) copy_rows_later<R, CHUNK, THREADS>(to.q, RIGHT, w.q + shared);
        copy_rows_later<16, CHUNK, THREADS>(to.eliminate, SMALL_LD,
                                            w.eliminate + at.own(c) * SMALL);
        copy_rows_later<R, 1, THREADS>(to.phi, R, w.leave + at.head(c) * R);
    }
    close_copies();
}

/* x = omega (16,16) times 16 columns of 16 rows */
__device__ static void small_times_rows(double (&x)[2][2][2], const double (&omega)[2][2][2],
                                        const double *rows, int ld) {
    zero(x[0]), zero(x[1]);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        double a[4], b[2];
        left_result(a, omega[half]);
#pragma unroll
        for (int m = 0; m < 2; m++) {
            right_columns(b, rows + 8 * half * ld, ld, 8 * m);
            mn_mma_f64_k8(x[m], a, b);
        }
    }
}

/* dP_0 and D's trace in front of a sequence; all threads call. */
template <int R>
__device__ static void put_first(const strip<R> &D, double *sums, const mn_bayes_args &p,
                                 const span_group &s, const double *enter, double *trace,
                                 int rows) {
    const int warp = threadIdx.x / 32;
    float *dP0 = mn_row<float>(p.grad.P0, s.n, 0, s.h);
    if (dP0) dP0 += s.g * rows * rows;
    double sum = 0.0;
#pragma unroll
    for (int j = 0; j < R / 8; j++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int row = mn_tile_row(2 * warp + i / 2), other = mn_tile_column(j) + i % 2;
            const bool inside = enter && row < rows && other < rows;
            const double d = D[j][i / 2][i % 2] * (inside ? enter[row] * enter[other] : 1.0);
            if (row == other && row < rows) sum += d;
            if (!dP0 || row >= rows || other > row) continue;
            dP0[(int64_t)row * rows + other] = dP0[(int64_t)other * rows + row] = (float)d;
        }
    }
    for (int lanes = 16; lanes > 0; lanes >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, lanes);
    if (threadIdx.x % 32 == 0) sums[warp] = sum;
    __syncthreads();
    if (threadIdx.x != 0) return;
    sum = 0.0;
    for (int i = 0; i < R / 16; i++) sum += sums[i];
    *trace = sum;
}

/* What is added to the diagonal of S that this thread sums, if any. */
template <int R>
__device__ static double own_ahead(const double *own) {
    double x = 0.0;
    for (int i = threadIdx.x; i < SMALL; i += 2 * R) {
        if (i / 16 == i % 16) x = own[i % 16];
    }
    return x;
}

/* S from the shares of Y W', of which its lower half holds; all threads call, between barriers. */
template <int R, int PARTS>
__device__ static void add_lower(double *S, const double *parts, double own) {
    for (int i = threadIdx.x; i < SMALL; i += 2 * R) {
        const int t = max(i / 16, i % 16), s = min(i / 16, i % 16);
        double x = t == s ? own : 0.0;
#pragma unroll
        for (int warp = 0; warp < R / 16; warp++) x += parts[(warp * 16 + t) * PARTS + s];
        S[i / 16 * SMALL_LD + i % 16] = x;
    }
}

/* 16 columns of du = -2 H + (diag O + 2 upper O) K. */
template <int R>
__device__ static void put_du(double *to, double (&omega)[2][2][2], const double (&h)[2][2][2],
                              const double *k) {
    double du[2][2][2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        each_result(omega[half], 8 * half, [&](double &x, int t, int s) {
            x = s > t ? 2.0 * x : s == t ? x : 0.0;    // no 0 times Inf
        });
    }
    small_times_rows(du, omega, k, pitch<R>::right);
#pragma unroll
    for (int m = 0; m < 2; m++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            du[m][i / 2][i % 2] = fma(-2.0, h[m][i / 2][i % 2], du[m][i / 2][i % 2]);
        }
        put_rows(to, R, 8 * m, du[m]);
    }
}

/* du of all chunks and O, from b of the mean scan; dP_0. The first 2 R threads of a block. */
template <typename T, int R, bool TIGHT>
__device__ static void scan_adjoint(adjoint_smem<R, TIGHT> &smem, const mn_bayes_args &p,
                                    const span_work &w, int64_t block) {
    constexpr int LEFT = pitch<R>::left, RIGHT = pitch<R>::right;
    const scan_place at = scan_place_at(p, block);
    const span_group &s = at.s;
    const int64_t n_chunks = at.n_chunks;
    if (w.steep[s.n * at.H + s.h]) return;
    const bool turns = p.theta.data != NULL, weighs = p.cot.qvar.data && p.q.data;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int rows = (int)p.call.K * (turns ? 2 : 1), column = 16 * warp;
    const int *counter = w.back + (block + 1) * w.slices - 1;
    const float *dP = mn_row<float>(p.cot.P, s.n, 0, s.h);
    if (dP) dP += s.g * rows * rows;
    strip<R> D;
    fill_col_tile<R>(D, [&](int row, int other) { return symmetric_cotangent(dP, rows, row,
                                                                             other); });
    load_adjoint<R, TIGHT>(smem, w, at, n_chunks - 1, weighs);
    load_adjoint<R, TIGHT>(smem, w, at, n_chunks - 2, weighs);
    await_copies();
    int seen = 0;
    if (threadIdx.x == 0) await_left(seen, counter, min((int64_t)1, n_chunks));
    __syncthreads();
    for (int64_t c = n_chunks - 1; c >= 0; c--) {
        const adjoint_stage<R> &here = smem.stage[(n_chunks - 1 - c) % smem.N_STAGES];
        double *h = w.h + at.own(c) * CHUNK * R, *theta = w.theta + at.own(c) * SMALL;
        double x[2][2][2], known[2][2][2], omega[2][2][2], left[8], b[4];
        get_rows(known[0], h, R, column), get_rows(known[1], h, R, column + 8);
        const double psi = own_ahead<R>(w.own + at.own(c) * CHUNK);
        if (c % SPAN_CHUNKS == SPAN_CHUNKS - 1) {
            move_col_tile_columns<R>(D, here.phi, turns, true);
            move_col_tile_rows<R>(D, here.phi, turns, true);
        }
        double *inside = w.inside + at.own(c) * 2 * R;
        double own[2][2] = {};
        pick_inside<R>(own, D);
        each_inside(own, [&](double &from, int row, int other) {
            inside[row == other ? row : R + row] = from;
        });
        zero(x[0]), zero(x[1]);
        through_col_tile<R>(x, here.w, LEFT, D);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            double &y = x[i / 4][i / 2 % 2][i % 2];
            y = fma(-0.5, known[i / 4][i / 2 % 2][i % 2], y);
        }
        gram_share<R, smem.PARTS>(smem.parts, x, here.w, LEFT);
        double *turned = smem.turned + column;
        put_rows(turned, RIGHT, 0, x[0]), put_rows(turned, RIGHT, 8, x[1]);
        __syncwarp();
        left_columns16(left, here.eliminate, SMALL_LD, 0);
#pragma unroll
        for (int m = 0; m < 2; m++) {
            right_columns16(b, turned, RIGHT, 8 * m);
            zero(known[m]);
            mn_mma_f64_k16(known[m], left, b);
            put_rows(smem.h, RIGHT, column + 8 * m, known[m]);
        }
        __syncthreads();
        if (!TIGHT) load_adjoint<R, TIGHT>(smem, w, at, c - 2, weighs);
        add_lower<R, smem.PARTS>(smem.S, smem.parts, psi);
        left_columns16(left, here.k, RIGHT, column);
#pragma unroll
        for (int i = 0; i < 8; i++) left[i] = -left[i];
        add_product<R>(D, left, smem.h, RIGHT);
        __syncthreads();
        left_columns16(left, here.eliminate, SMALL_LD, 0);
#pragma unroll
        for (int m = 0; m < 2; m++) {
            right_columns16(b, smem.S, SMALL_LD, 8 * m);
            zero(x[m]);
            mn_mma_f64_k16(x[m], left, b);
        }
        small_times_rows(omega, x, here.eliminate, SMALL_LD);
        if (warp == 0) put_rows(theta, 16, 0, omega[0]), put_rows(theta, 16, 8, omega[1]);
        small_times_rows(x, omega, here.k + column, RIGHT);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            x[i / 4][i / 2 % 2][i % 2] -= known[i / 4][i / 2 % 2][i % 2];
        }
        put_rows(turned, RIGHT, 0, x[0]), put_rows(turned, RIGHT, 8, x[1]);
        __syncwarp();
        put_du<R>(h + column, omega, known, here.k + column);
        left_columns16(left, turned, RIGHT, 0);
        add_product<R>(D, left, here.k, RIGHT);
        if (weighs) {
            left_columns16(left, here.q, RIGHT, column);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int64_t t = c * CHUNK + lane % 4 + 4 * i;
                const T *dqvar = mn_row<T>(p.cot.qvar, at.span.b, at.span.t0 + t, s.h);
                const double a = t < at.span.length
                                     ? p.scale * p.scale * (double)mn_float(dqvar[s.g]) : 0.0;
                left[2 * i] *= a, left[2 * i + 1] *= a;
            }
            add_product<R>(D, left, here.q, RIGHT);
        }
        if (TIGHT) await_last_copies();
        else await_copies();
        if (threadIdx.x == 0) await_left(seen, counter, min(n_chunks - c + 1, n_chunks));
        __syncthreads();
        if (TIGHT) load_adjoint<R, TIGHT>(smem, w, at, c - 2, weighs);
    }
    put_first<R>(D, smem.S, p, s, at.template enter<R>(w), w.traces + block, rows);
}

}    // namespace mneme::bayes

#endif
