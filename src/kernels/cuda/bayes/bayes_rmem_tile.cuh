/* bayes_rmem_tile.cuh - a covariance, D, M' or E' in the registers of a block that scans the way
 * back of the Bayesian Layer; which scans those are is in bayes_bwd_chunk.cu.
 *
 * A covariance or D is in R / 16 warps, 16 rows in each: of 8 columns a lane has two in rows l / 4
 * and l / 4 + 8, as products leave them. Read as columns, which a symmetric matrix allows, the same
 * numbers are the right factor of the next product. Two warps of the mean have 16 value columns of
 * M' or E' alike, each half of the rows. */
#ifndef MN_KERNELS_CUDA_BAYES_BAYES_RMEM_TILE_CUH
#define MN_KERNELS_CUDA_BAYES_BAYES_RMEM_TILE_CUH

#include "kernels/cuda/bayes/bayes_span.cuh"

namespace mneme::bayes {

enum { STAGES = 3, PARTS_LD = 24 };

/* Where a scan is: the chunks of a group of a head of a sequence. */
struct scan_place {
    span_group s;
    mn_span span;
    int64_t H, G, slot0, n_chunks;

    __device__ int64_t head(int64_t c) const { return (slot0 + c / SPAN_CHUNKS) * H + s.h; }
    __device__ int64_t group(int64_t c) const { return head(c) * G + s.g; }
    /* numbers of the chunk among those of heads, and of groups */
    __device__ int64_t shared(int64_t c) const { return head(c) * SPAN_CHUNKS + c % SPAN_CHUNKS; }
    __device__ int64_t own(int64_t c) const { return group(c) * SPAN_CHUNKS + c % SPAN_CHUNKS; }
    /* from the real frame to that of the first span; NULL where there is none */
    template <int R>
    __device__ const double *enter(const span_work &w) const {
        return n_chunks > 0 ? w.enter + head(0) * R : NULL;
    }
};

__device__ static scan_place scan_place_at(const mn_bayes_args &p, int64_t block) {
    scan_place at;
    at.s = group_at(p, block), at.span = mn_span_at(p.call, at.s.n);
    at.H = p.call.H, at.G = p.call.G, at.slot0 = first_slot(p.call, at.span, at.s.n);
    at.n_chunks = SPAN_CHUNKS * n_spans_of(at.span);
    return at;
}

/* A lane's part of 16 rows: [block of 8 columns][row l / 4 + 8 m][column] */
template <int R>
using strip = double[R / 8][2][2];

/* The strip's columns by Phi of a frame, or by Phi'. */
template <int R>
__device__ static void move_col_tile_columns(strip<R> &x, const double *phi, bool turns,
                                             bool back) {
#pragma unroll
    for (int j = 0; j < R / 8; j++) {
        const int column = mn_tile_column(j);
        const double2 by = *(const double2 *)(phi + column);
        const double sine = back ? -by.y : by.y;
#pragma unroll
        for (int m = 0; m < 2; m++) {
            const double re = x[j][m][0], im = x[j][m][1];
            x[j][m][0] = turns ? by.x * re - sine * im : by.x * re;
            x[j][m][1] = turns ? sine * re + by.x * im : by.y * im;
        }
    }
}

/* Its rows alike; the rows of a channel lie in neighbouring lanes. */
template <int R>
__device__ static void move_col_tile_rows(strip<R> &x, const double *phi, bool turns, bool back) {
#pragma unroll
    for (int m = 0; m < 2; m++) {
        const int row = mn_tile_row(2 * (int)(threadIdx.x / 32) + m);
        const double own = phi[turns ? row / 2 * 2 : row], sine = phi[row / 2 * 2 + 1];
        const double other = (row % 2 == 1) != back ? sine : -sine;
#pragma unroll
        for (int j = 0; j < R / 8; j++) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                double moved = own * x[j][m][i];
                if (turns) moved += other * __shfl_xor_sync(0xffffffffu, x[j][m][i], 4);
                x[j][m][i] = moved;
            }
        }
    }
}

/* What a lane has inside channels is in column block 2 warp + m of its rows m, if anything. All
 * lanes select, for an index that the compiler does not know would send the strip to memory. */
__device__ static bool is_inside() {
    const int lane = threadIdx.x % 32;
    return lane / 8 == lane % 4;
}

template <int R>
__device__ static void pick_inside(double (&v)[2][2], const strip<R> &x) {
    const int warp = threadIdx.x / 32;
#pragma unroll
    for (int j = 0; j < R / 8; j++) {
#pragma unroll
        for (int i = 0; i < 2; i++) v[j % 2][i] = warp == j / 2 ? x[j][j % 2][i] : v[j % 2][i];
    }
}

template <int R>
__device__ static void put_inside(strip<R> &x, const double (&v)[2][2]) {
    const int warp = threadIdx.x / 32;
    const bool mine = is_inside();
#pragma unroll
    for (int j = 0; j < R / 8; j++) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            x[j][j % 2][i] = mine && warp == j / 2 ? v[j % 2][i] : x[j][j % 2][i];
        }
    }
}

/* use(element, row, column) for them; rows and columns of the whole matrix */
template <typename F>
__device__ static void each_inside(double (&v)[2][2], F use) {
    const int lane = threadIdx.x % 32;
    if (!is_inside()) return;
#pragma unroll
    for (int m = 0; m < 2; m++) {
        const int row = threadIdx.x / 32 * 16 + 8 * m + lane / 4;
        use(v[m][0], row, row / 2 * 2), use(v[m][1], row, row / 2 * 2 + 1);
    }
}

/* The strip from its elements, use(row, column). */
template <int R, typename F>
__device__ static void fill_col_tile(strip<R> &x, F use) {
    const int warp = threadIdx.x / 32;
#pragma unroll
    for (int j = 0; j < R / 8; j++) {
#pragma unroll
        for (int m = 0; m < 2; m++) {
            const int row = mn_tile_row(2 * warp + m), column = mn_tile_column(j);
            x[j][m][0] = use(row, column), x[j][m][1] = use(row, column + 1);
        }
    }
}

/* An element of (dP + dP') / 2, or zero. */
__device__ static double symmetric_cotangent(const float *dP, int rows, int row, int column) {
    if (!dP || row >= rows || column >= rows) return 0.0;
    return 0.5 * ((double)dP[(int64_t)row * rows + column] +
                  (double)dP[(int64_t)column * rows + row]);
}

/* c += (16 rows of `left`, R columns) times the strip read as columns: 16 x 16 */
template <int R>
__device__ static void through_col_tile(double (&c)[2][2][2], const double *left, int ld,
                                     const strip<R> &x) {
#pragma unroll
    for (int j = 0; j < R / 8; j++) {
        double a[4];
        left_rows(a, left, ld, 8 * j);
        mn_mma_f64_k8(c[0], a, x[j][0]);
        mn_mma_f64_k8(c[1], a, x[j][1]);
    }
}

/* This warp's share, its 16 rows, of x (16, R) times `right` (16, R)' into its (16,16) of parts. */
template <int R, int PARTS = PARTS_LD>
__device__ static void gram_share(double *parts, const double (&x)[2][2][2], const double *right,
                                  int ld) {
    const int warp = threadIdx.x / 32;
    double s[2][2][2];
    zero(s[0]), zero(s[1]);
#pragma unroll
    for (int m = 0; m < 2; m++) {
        double a[4];
        left_result(a, x[m]);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            double b[2];
            right_rows(b, right + 8 * half * ld, ld, 16 * warp + 8 * m);
            mn_mma_f64_k8(s[half], a, b);
        }
    }
    put_rows(parts + warp * 16 * PARTS, PARTS, 0, s[0]);
    put_rows(parts + warp * 16 * PARTS, PARTS, 8, s[1]);
}

/* The sums of the shares; all threads call, between barriers. */
template <int R>
__device__ static void add_shares(double *sum, const double *parts) {
    for (int i = threadIdx.x; i < SMALL; i += 2 * R) {
        double x = 0.0;
#pragma unroll
        for (int warp = 0; warp < R / 16; warp++) {
            x += parts[(warp * 16 + i / 16) * PARTS_LD + i % 16];
        }
        sum[i / 16 * SMALL_LD + i % 16] = x;
    }
}

/* 16 rows of a state += left (16, 16 tokens) times `rows` (16 tokens, N) */
template <int N>
__device__ static void add_product(strip<N> &M, const double (&left)[8],
                                                   const double *rows, int ld) {
#pragma unroll
    for (int j = 0; j < N / 8; j++) {
        double b[4];
        right_columns16(b, rows, ld, 8 * j);
        mn_mma_f64_k16(M[j], left, b);
    }
}

}    // namespace mneme::bayes

#endif
