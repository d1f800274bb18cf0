/* mesa_solve.cuh - M x = b for a symmetric positive definite M and one or two b, by a block.
 *
 * Gauss and Jordan's elimination without pivots, in double so that any data is solved to the
 * accuracy of its statistics: at step j every row i but j loses M_ij / M_jj of row j, and what is
 * left is a diagonal. Row j right of the diagonal is column j below it, so that one column is all
 * that threads tell each other, at one barrier a step.
 *
 * Up to 128 unknowns M is in registers: thread (a, b) of 16 x 16 has the rows a, a + 16, ... of the
 * columns b, b + 16, ...; wider ones lie in memory. */
#ifndef MN_KERNELS_CUDA_MESA_SOLVE_CUH
#define MN_KERNELS_CUDA_MESA_SOLVE_CUH

#include "kernels/cuda/common.cuh"

enum { MN_MESA_THREADS = 256, MN_MESA_SIDE = 16, MN_MESA_WIDEST = 256 };

struct mn_mesa_room {
    double column[2][MN_MESA_WIDEST];
    double of_row[2][2];                 // the two b at row j
    double inverse[MN_MESA_WIDEST];      // 1 / M_jj
    double b[2][MN_MESA_WIDEST];         // wide ones only
};

/* 1 / x: 20 bits of an estimate, doubled twice */
__device__ inline double mn_mesa_inverse(double x) {
    double y;
    asm("rcp.approx.ftz.f64 %0, %1;" : "=d"(y) : "d"(x));
    y = fma(y, fma(-x, y, 1.0), y);
    return fma(y, fma(-x, y, 1.0), y);
}

/* b[0] and b[1], K numbers in shared memory each, become M^-1 b; M = H + diag(lam), of which H is
 * in rows of `pitch`. All threads of the block call; barriers on both sides. */
template <int CELLS, typename T>
__device__ void mn_mesa_solve(float *const (&b)[2], const float *H, int64_t pitch, const T *lam,
                              int64_t K, mn_mesa_room &room) {
    const int row0 = threadIdx.x / MN_MESA_SIDE, column0 = threadIdx.x % MN_MESA_SIDE;
    double m[CELLS][CELLS], mine[CELLS];
#pragma unroll
    for (int r = 0; r < CELLS; r++) {
        const int i = row0 + MN_MESA_SIDE * r;
#pragma unroll
        for (int c = 0; c < CELLS; c++) {
            const int j = column0 + MN_MESA_SIDE * c;
            m[r][c] = i < K && j < K ? (double)H[i * pitch + j] : 0.0;
            if (i == j && i < K) m[r][c] += (double)mn_float(lam[i]);
        }
        mine[r] = column0 < 2 && i < K ? (double)b[column0][i] : 0.0;
    }
#pragma unroll
    for (int c = 0; c < CELLS; c++) {
        for (int at = 0; at < MN_MESA_SIDE && MN_MESA_SIDE * c + at < K; at++) {
            const int j = MN_MESA_SIDE * c + at;
            double *column = room.column[j % 2];
#pragma unroll
            for (int r = 0; r < CELLS; r++) {
                if (column0 == at) column[row0 + MN_MESA_SIDE * r] = m[r][c];
            }
            if (row0 == at && column0 < 2) room.of_row[j % 2][column0] = mine[c];
            __syncthreads();
            const double inverse = mn_mesa_inverse(column[j]);
            const double of_row = column0 < 2 ? room.of_row[j % 2][column0] : 0.0;
            if (threadIdx.x == 0) room.inverse[j] = inverse;
            double row[CELLS];
#pragma unroll
            for (int k = c; k < CELLS; k++) row[k] = column[column0 + MN_MESA_SIDE * k];
#pragma unroll
            for (int r = 0; r < CELLS; r++) {
                const int i = row0 + MN_MESA_SIDE * r;
                const double share = i == j ? 0.0 : -inverse * column[i];
#pragma unroll
                for (int k = c; k < CELLS; k++) m[r][k] = fma(share, row[k], m[r][k]);
                mine[r] = fma(share, of_row, mine[r]);
            }
        }
    }
    __syncthreads();
#pragma unroll
    for (int r = 0; r < CELLS; r++) {
        const int i = row0 + MN_MESA_SIDE * r;
        if (column0 < 2 && i < K) b[column0][i] = (float)(mine[r] * room.inverse[i]);
    }
    __syncthreads();
}

/* The same with M in memory: K rows of K doubles. */
template <typename T>
__device__ void mn_mesa_solve_wide(float *const (&b)[2], const float *H, int64_t pitch,
                                   const T *lam, int64_t K, mn_mesa_room &room, double *M) {
    for (int64_t cell = threadIdx.x; cell < K * K; cell += MN_MESA_THREADS) {
        const int64_t i = cell / K, j = cell % K;
        M[cell] = (double)H[i * pitch + j] + (i == j ? (double)mn_float(lam[i]) : 0.0);
    }
    for (int64_t i = threadIdx.x; i < 2 * K; i += MN_MESA_THREADS) {
        room.b[i / K][i % K] = (double)b[i / K][i % K];
    }
    __syncthreads();
    for (int64_t j = 0; j < K; j++) {
        for (int64_t i = threadIdx.x; i < K; i += MN_MESA_THREADS) {
            room.column[0][i] = M[i * K + j];
        }
        if (threadIdx.x < 2) room.of_row[0][threadIdx.x] = room.b[threadIdx.x][j];
        __syncthreads();
        const double inverse = mn_mesa_inverse(room.column[0][j]);
        if (threadIdx.x == 0) room.inverse[j] = inverse;
        const int64_t right = K - j - 1;
        for (int64_t cell = threadIdx.x; cell < K * right; cell += MN_MESA_THREADS) {
            const int64_t i = cell / right, k = j + 1 + cell % right;
            if (i == j) continue;
            M[i * K + k] = fma(-inverse * room.column[0][i], room.column[0][k], M[i * K + k]);
        }
        for (int64_t i = threadIdx.x; i < 2 * K; i += MN_MESA_THREADS) {
            double &x = room.b[i / K][i % K];
            if (i % K != j) x = fma(-inverse * room.column[0][i % K], room.of_row[0][i / K], x);
        }
        __syncthreads();
    }
    for (int64_t i = threadIdx.x; i < 2 * K; i += MN_MESA_THREADS) {
        b[i / K][i % K] = (float)(room.b[i / K][i % K] * room.inverse[i % K]);
    }
    __syncthreads();
}

#endif
