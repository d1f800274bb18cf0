/* gemm_fallback.cu - c = a b, c += a b or c = onto + a b, plus a bias: tiles of 64 x 64 through
 * shared memory.
 *
 * A block of 256 threads makes a tile, 4 x 4 elements a thread, from column tiles of 16 columns
 * of a and rows of b. Sums are float32 and run along K in order. Tensors may be transposed and of
 * any alignment; nothing here is fast. */
#include "kernels/cuda/gemm/gemm_fallback.h"

#include "kernels/cuda/prim/common.cuh"

namespace mneme::gemm {

enum { TILE = 64, COL_TILE = 16, SIDE = 4, THREADS = 256 };

/* A factor: number (i, k), i along the tile. */
struct factor {
    const void *data;
    int64_t i_step, k_step, count;
};

/* column tile[k][i] = f(i0 + i, k0 + k), zero outside. Neighbouring threads read neighbouring
 * elements. */
template <typename T>
__device__ static void load_col_tile(float (*col_tile)[TILE + 1], const factor &f, int64_t i0,
                                     int64_t k0,
                                  int64_t K) {
    for (int n = threadIdx.x; n < TILE * COL_TILE; n += THREADS) {
        const int i = f.i_step == 1 ? n % TILE : n / COL_TILE;
        const int k = f.i_step == 1 ? n / TILE : n % COL_TILE;
        const bool inside = i0 + i < f.count && k0 + k < K;
        const int64_t at = (i0 + i) * f.i_step + (k0 + k) * f.k_step;
        col_tile[k][i] = inside ? mn_float(((const T *)f.data)[at]) : 0.0f;
    }
}

template <typename T, typename C>
__global__ void __launch_bounds__(THREADS)
gemm_simt(const __grid_constant__ mn_gemm_problem w, factor a, factor b) {
    __shared__ float a_tile[COL_TILE][TILE + 1], b_tile[COL_TILE][TILE + 1];
    const int64_t i0 = blockIdx.y * (int64_t)TILE, j0 = blockIdx.x * (int64_t)TILE;
    const int across = threadIdx.x % (TILE / SIDE), down = threadIdx.x / (TILE / SIDE);
    float sum[SIDE][SIDE] = {};
    for (int64_t k0 = 0; k0 < w.K; k0 += COL_TILE) {
        load_col_tile<T>(a_tile, a, i0, k0, w.K);
        load_col_tile<T>(b_tile, b, j0, k0, w.K);
        __syncthreads();
#pragma unroll
        for (int k = 0; k < COL_TILE; k++) {
#pragma unroll
            for (int i = 0; i < SIDE; i++) {
#pragma unroll
                for (int j = 0; j < SIDE; j++) {
                    sum[i][j] = fmaf(a_tile[k][down * SIDE + i],
                                     b_tile[k][across + j * (TILE / SIDE)], sum[i][j]);
                }
            }
        }
        __syncthreads();
    }
    for (int i = 0; i < SIDE; i++) {
        for (int j = 0; j < SIDE; j++) {
            const int64_t row = i0 + down * SIDE + i, column = j0 + across + j * (TILE / SIDE);
            if (row >= w.M || column >= w.N) continue;
            const int64_t at = row * w.c_row + column;
            const C *base = (const C *)(w.accumulate ? w.c : w.onto);
            mn_put((C *)w.c + at, mn_get(base, at) + sum[i][j] + mn_get((const C *)w.bias, column));
        }
    }
}

template <typename T, typename C>
static int launch(const mn_gemm_problem *w, cudaStream_t stream) {
    const factor a = { w->a, w->a_transposed ? 1 : w->a_row, w->a_transposed ? w->a_row : 1, w->M };
    const factor b = { w->b, w->b_transposed ? w->b_row : 1, w->b_transposed ? 1 : w->b_row, w->N };
    const int64_t down = mn_ceil_div(w->M, TILE);
    if (down > 65535) return cudaErrorInvalidConfiguration;
    const dim3 blocks(mn_blocks(w->N, TILE), (unsigned)down);
    gemm_simt<T, C><<<blocks, THREADS, 0, stream>>>(*w, a, b);
    return mn_launch_status();
}

extern "C" int mn_gemm_simt(const mn_gemm_problem *w, void *stream) {
    const cudaStream_t on = (cudaStream_t)stream;
    if (w->dtype == MN_F32) return launch<float, float>(w, on);
    return w->c_dtype == MN_BF16 ? launch<mn_bf16, mn_bf16>(w, on) : launch<mn_bf16, float>(w, on);
}

}    // namespace mneme::gemm
