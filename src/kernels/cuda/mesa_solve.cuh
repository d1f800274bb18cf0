/* mesa_solve.cuh - M x = b for a symmetric positive definite M and two b, by a block, for keys of
 * more than 128 channels; narrower ones have mesa_tiles.cuh.
 *
 * Gauss and Jordan's elimination without pivots, in double so that any data is solved to the
 * accuracy of its statistics: at step j every row i but j loses M_ij / M_jj of row j, and what is
 * left is a diagonal. M lies in memory. */
#ifndef MN_KERNELS_CUDA_MESA_SOLVE_CUH
#define MN_KERNELS_CUDA_MESA_SOLVE_CUH

#include "kernels/cuda/common.cuh"
#include "kernels/cuda/dmma.cuh"

enum { MN_MESA_THREADS = 256, MN_MESA_WIDEST = 256 };

struct mn_mesa_room {
    double column[MN_MESA_WIDEST], of_row[2];    // column j, and the two b at row j
    double inverse[MN_MESA_WIDEST];              // 1 / M_jj
    double b[2][MN_MESA_WIDEST];
};

/* b[0] and b[1], K numbers in shared memory each, become M^-1 b; M = H + diag(lam), of which H is
 * in rows of `pitch`; M has K rows of K doubles. All threads of the block call; barriers on both
 * sides. */
template <typename T>
__device__ void mn_mesa_solve(float *const (&b)[2], const float *H, int64_t pitch, const T *lam,
                              int64_t K, mn_mesa_room &room, double *M) {
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
            room.column[i] = M[i * K + j];
        }
        if (threadIdx.x < 2) room.of_row[threadIdx.x] = room.b[threadIdx.x][j];
        __syncthreads();
        const double inverse = mn_reciprocal(room.column[j]);
        if (threadIdx.x == 0) room.inverse[j] = inverse;
        const int64_t right = K - j - 1;
        for (int64_t cell = threadIdx.x; cell < K * right; cell += MN_MESA_THREADS) {
            const int64_t i = cell / right, k = j + 1 + cell % right;
            if (i == j) continue;
            M[i * K + k] = fma(-inverse * room.column[i], room.column[k], M[i * K + k]);
        }
        for (int64_t i = threadIdx.x; i < 2 * K; i += MN_MESA_THREADS) {
            double &x = room.b[i / K][i % K];
            if (i % K != j) x = fma(-inverse * room.column[i % K], room.of_row[i / K], x);
        }
        __syncthreads();
    }
    for (int64_t i = threadIdx.x; i < 2 * K; i += MN_MESA_THREADS) {
        b[i / K][i % K] = (float)(room.b[i / K][i % K] * room.inverse[i % K]);
    }
    __syncthreads();
}

#endif
