/* bayes_ldl.cuh - S + diag r2 = L diag(sigma) L' and L^-1 for the 16 tokens of a chunk, by one
 * warp: the chain that the walk over covariances waits for; bayes_covariance_scan.cu.
 *
 * Lane t has column t of S, lane 16 + t column t of what becomes L^-1. The first eight tokens and
 * then the others are a square that every lane eliminates alike in registers, so that no lane waits
 * for another; between the two squares the rows of the first go through shared memory once. */
#ifndef MN_KERNELS_CUDA_BAYES_BAYES_LDL_CUH
#define MN_KERNELS_CUDA_BAYES_BAYES_LDL_CUH

#include "kernels/cuda/prim/mma_f64.cuh"

enum {
    MN_PIVOT_HALF = 8,
    MN_PIVOT_SUM = 192,     // doubles of S that are handed over
    MN_PIVOT_PITCH = 18,    // of a row of S
};

/* Shared memory of a chunk's elimination. */
struct alignas(16) mn_pivot_smem {
    double r2[16], variance[16], inverse[16];
    double rows[MN_PIVOT_HALF][MN_PIVOT_HALF];    // [i - 8][k]: L_ik of the lower left square
    double square[16][MN_PIVOT_PITCH];            // S, then what is left of its lower right part
};

/* max(x, 0) by its sign bit. */
__device__ inline double mn_pivot_positive(double x) {
    return __double2hiint(x) < 0 ? 0.0 : x;
}

/* Tokens [first, first + 8), whose part of S is the upper triangle `a`; x, rows of this lane's
 * column, becomes L^-1 x, and of the first eight x / sigma the rows of lanes 8 to 15. Two tokens
 * at a time, so that both reciprocals of
 *
 *   1 / sigma_j    and    1 / sigma_{j+1} = sigma_j / (sigma_j (S_{j+1,j+1} + r2) - S_{j,j+1}^2)
 *
 * are on their way together; where that difference keeps few digits, one after the other. From
 * what the next two tokens wait for, both writes are taken off at once,
 *
 *   S_ik - (S_ji S_jk + (d_i d_k) / that difference) / sigma_j    d_i = sigma_j S_{j+1,i} - b S_ji
 *
 * with b = S_{j,j+1}, so that reciprocals are the last thing needed. Says whether the differences
 * keep enough digits; only if CAREFUL it looks at each one by itself. */
template <bool CAREFUL>
__device__ inline bool mn_pivot_eight(double (&a)[MN_PIVOT_HALF][MN_PIVOT_HALF],
                                      double (&x)[MN_PIVOT_HALF], mn_pivot_smem &room,
                                      int first_token) {
    const int lane = (int)threadIdx.x % 32;
    bool all_kept = true;
#pragma unroll
    for (int j = 0; j < MN_PIVOT_HALF; j += 2) {
        const double2 noise = *(const double2 *)&room.r2[first_token + j];
        const double one = mn_pivot_positive(a[j][j]), sigma = one + noise.x;
        const double b = a[j][j + 1], c = a[j + 1][j + 1], square = b * b;
        const double least = fma(sigma, c + noise.y, -square);
        const bool kept = fma(sigma, c, -square) > 0x1p-30 * (sigma * c);
        const double first = mn_reciprocal(sigma), ratio = b * first;
        double quick = mn_reciprocal(least), left = fma(-ratio, b, c), second = sigma * quick;
        all_kept = all_kept && kept;
        if (CAREFUL && !kept) {
            left = mn_pivot_positive(left), second = mn_reciprocal(left + noise.y);
            quick = first * second;
        }
        double f[MN_PIVOT_HALF], g[MN_PIVOT_HALF], y[MN_PIVOT_HALF], d[MN_PIVOT_HALF];
#pragma unroll
        for (int i = j + 2; i < MN_PIVOT_HALF; i++) {
            d[i] = fma(sigma, a[j + 1][i], -(b * a[j][i]));
            y[i] = fma(-ratio, a[j][i], a[j + 1][i]);
            f[i] = a[j][i] * first, g[i] = y[i] * second;
        }
#pragma unroll
        for (int i = j + 2; i < MN_PIVOT_HALF; i++) {
#pragma unroll
            for (int k = i; k < MN_PIVOT_HALF; k++) {
                const double both = fma(d[i] * d[k], quick, a[j][i] * a[j][k]);
                a[i][k] = k < j + 4 ? fma(-first, both, a[i][k])
                                    : fma(-g[i], y[k], fma(-f[i], a[j][k], a[i][k]));
            }
        }
        x[j + 1] = fma(-ratio, x[j], x[j + 1]);
        if (lane == 0) {
            *(double2 *)&room.variance[first_token + j] = make_double2(one, left);
            *(double2 *)&room.inverse[first_token + j] = make_double2(first, second);
        }
        if (first_token == 0 && lane >= MN_PIVOT_HALF && lane < 2 * MN_PIVOT_HALF) {
            *(double2 *)&room.rows[lane - MN_PIVOT_HALF][j] =
                make_double2(x[j] * first, x[j + 1] * second);
        }
#pragma unroll
        for (int i = j + 2; i < MN_PIVOT_HALF; i++) {
            x[i] = fma(-g[i], x[j + 1], fma(-f[i], x[j], x[i]));
        }
    }
    return all_kept;
}

/* A number, or two, of the sum of PARTS squares that follow each other at `from`. */
template <int PARTS>
__device__ inline double mn_pivot_sum(const double *from) {
    if (PARTS == 1) return *from;
    const double low = mn_pivot_sum<(PARTS + 1) / 2>(from);
    return low + mn_pivot_sum<(PARTS + 1) / 2>(from + MN_PIVOT_SUM * (PARTS / 2));
}

template <int PARTS>
__device__ inline double2 mn_pivot_pair(const double *from) {
    if (PARTS == 1) return *(const double2 *)from;
    const double2 low = mn_pivot_pair<(PARTS + 1) / 2>(from);
    const double2 high = mn_pivot_pair<(PARTS + 1) / 2>(from + MN_PIVOT_SUM * (PARTS / 2));
    return make_double2(low.x + high.x, low.y + high.y);
}

/* The upper triangle of a symmetric square of eight rows of 16, from its lower one. */
__device__ inline void mn_pivot_load(double (&a)[MN_PIVOT_HALF][MN_PIVOT_HALF],
                                     const double *from) {
#pragma unroll
    for (int k = 0; k < MN_PIVOT_HALF; k++) {
#pragma unroll
        for (int i = 0; i <= k; i += 2) {
            const double2 pair = *(const double2 *)(from + MN_PIVOT_PITCH * k + i);
            a[i][k] = pair.x;
            if (i < k) a[i + 1][k] = pair.y;
        }
    }
}

/* x: rows [first, first + 8) of this lane's column. */
__device__ inline void mn_pivot_column(double (&x)[MN_PIVOT_HALF], const mn_pivot_smem &room,
                                       int first) {
    const int lane = (int)threadIdx.x % 32, t = lane % 16;
#pragma unroll
    for (int i = 0; i < MN_PIVOT_HALF; i++) {
        x[i] = lane < 16 ? room.square[first + i][t] : first + i == t ? 1.0 : 0.0;
    }
}

/* S as the sum of PARTS at `sums`, 1, 2 or 4 of them, by one warp. Of each there are the fragments
 * of a product that hold rows [0, 8) by columns [0, 8) and [8, 16), and rows [8, 16) by columns
 * [8, 16). The second goes where it belongs, the upper triangles of the others below the diagonal:
 * nobody looks at the rest. All is read before any is written, or each read would wait for the
 * write in front of it. */
template <int PARTS>
__device__ inline void mn_pivot_add(mn_pivot_smem &room, const double (*sums)[MN_PIVOT_SUM]) {
    const int lane = (int)threadIdx.x % 32, row = lane / 4, column = 2 * (lane % 4);
    double2 sum[3];
#pragma unroll
    for (int f = 0; f < 3; f++) sum[f] = mn_pivot_pair<PARTS>(&sums[0][64 * f + 2 * lane]);
    *(double2 *)&room.square[row][MN_PIVOT_HALF + column] = sum[1];
#pragma unroll
    for (int f = 0; f < 3; f += 2) {
        double (*to)[MN_PIVOT_PITCH] = room.square + 4 * f;
        if (row <= column) to[column][4 * f + row] = sum[f].x;
        if (row <= column + 1) to[column + 1][4 * f + row] = sum[f].y;
    }
    __syncwarp();
}

/* S and r2 are in the room. Leaves L^-1 in `undo`, rows of PITCH doubles, and variances and
 * 1 / sigma in the room, for after a barrier. Both halves run the same instructions. If not
 * CAREFUL, what it leaves is right only if it says so; then it is the same. */
template <bool CAREFUL, int PITCH>
__device__ inline bool mn_pivot(mn_pivot_smem &room, double (*undo)[PITCH]) {
    const int lane = (int)threadIdx.x % 32, t = lane % 16;
    double a[MN_PIVOT_HALF][MN_PIVOT_HALF], x[MN_PIVOT_HALF], y[MN_PIVOT_HALF];
    mn_pivot_column(x, room, 0);
    bool kept = true;
#pragma unroll 1
    for (int first = 0;; first = MN_PIVOT_HALF) {
        mn_pivot_load(a, &room.square[first][first]);
        kept = mn_pivot_eight<CAREFUL>(a, x, room, first) && kept;
#pragma unroll
        for (int i = 0; i < MN_PIVOT_HALF; i++) {
            if (lane >= 16) undo[first + i][t] = x[i];
        }
        if (first > 0) return kept;
        __syncwarp();
        mn_pivot_column(y, room, MN_PIVOT_HALF);    // not before: it would not stay in registers
#pragma unroll
        for (int k = 0; k < MN_PIVOT_HALF; k += 2) {    // eight sums abreast, written behind them
#pragma unroll
            for (int i = 0; i < MN_PIVOT_HALF; i++) {
                const double2 row = *(const double2 *)&room.rows[i][k];
                y[i] = fma(-row.y, x[k + 1], fma(-row.x, x[k], y[i]));
            }
        }
#pragma unroll
        for (int i = 0; i < MN_PIVOT_HALF; i++) {
            if (lane >= MN_PIVOT_HALF && lane < 16) room.square[MN_PIVOT_HALF + i][t] = y[i];
            x[i] = y[i];
        }
        __syncwarp();
    }
}

#endif
