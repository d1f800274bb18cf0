/* gemv.cu - c = a b' or c += a b', plus a bias, for one to four rows of a: a token at a
 * time.
 *
 * Such a product reads every weight once and does next to nothing with it, so that all depends on
 * how many bytes are on their way. A warp makes one column: its lanes read the weight's row in
 * packs of 16 bytes, four of them at once, next to the same places of each row of a. Sums are
 * float32, of each lane in order, then over the lanes. */
#include "kernels/cuda/prim/common.cuh"
#include "kernels/cuda/gemm/gemm_fallback.h"

namespace mneme::gemm {

enum { THREADS = 128, WARPS = THREADS / 32, DEPTH = 4, MAX_ROWS = 4 };

template <int N, typename T>
__device__ static float dot(const mn_vec<T, N> &x, const mn_vec<T, N> &y, float sum) {
#pragma unroll
    for (int j = 0; j < N; j++) sum = fmaf(mn_float(x.at[j]), mn_float(y.at[j]), sum);
    return sum;
}

template <typename T, typename C, int ROWS, int PACK>
__global__ void __launch_bounds__(THREADS) gemm_small_m(const __grid_constant__ mn_gemm_problem w) {
    typedef mn_vec<T, PACK> pack;
    const int64_t column = blockIdx.x * (int64_t)WARPS + threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    if (column >= w.N) return;
    const pack *b = (const pack *)((const T *)w.b + column * w.b_row);
    const int64_t n_vecs = w.K / PACK;
    float sum[ROWS] = {};
    for (int64_t first = lane; first < n_vecs; first += 32 * DEPTH) {
        pack weight[DEPTH];
#pragma unroll
        for (int i = 0; i < DEPTH; i++) {
            if (first + 32 * i < n_vecs) weight[i] = b[first + 32 * i];
        }
#pragma unroll
        for (int i = 0; i < DEPTH; i++) {
            if (first + 32 * i >= n_vecs) continue;
#pragma unroll
            for (int row = 0; row < ROWS; row++) {
                const pack *a = (const pack *)((const T *)w.a + row * w.a_row);
                sum[row] = dot<PACK, T>(a[first + 32 * i], weight[i], sum[row]);
            }
        }
    }
#pragma unroll
    for (int row = 0; row < ROWS; row++) {
        const float all = mn_warp_sum(sum[row]);
        if (lane != 0) continue;
        C *c = (C *)w.c + row * w.c_row + column;
        const float base = w.accumulate ? mn_float(*c) : 0.0f;
        mn_put(c, base + all + mn_get((const C *)w.bias, column));
    }
}

template <typename T, typename C>
static int launch(const mn_gemm_problem *w, cudaStream_t on) {
    constexpr int PACK = mn_vec_width<T>();
    const unsigned blocks = mn_blocks(w->N, WARPS);
    switch (w->M) {
    case 1: gemm_small_m<T, C, 1, PACK><<<blocks, THREADS, 0, on>>>(*w); break;
    case 2: gemm_small_m<T, C, 2, PACK><<<blocks, THREADS, 0, on>>>(*w); break;
    case 3: gemm_small_m<T, C, 3, PACK><<<blocks, THREADS, 0, on>>>(*w); break;
    default: gemm_small_m<T, C, 4, PACK><<<blocks, THREADS, 0, on>>>(*w); break;
    }
    return mn_launch_status();
}

extern "C" bool mn_gemm_small_m_supported(const mn_gemm_problem *w) {
    const int64_t pack = w->dtype == MN_F32 ? 4 : 8;
    return w->M <= MAX_ROWS && w->b_transposed && !w->a_transposed && !w->onto &&
           w->K % pack == 0 && w->a_row % pack == 0 && w->b_row % pack == 0 &&
           (uintptr_t)w->a % 16 == 0 && (uintptr_t)w->b % 16 == 0;
}

extern "C" int mn_gemm_small_m(const mn_gemm_problem *w, void *stream) {
    const cudaStream_t on = (cudaStream_t)stream;
    if (w->dtype == MN_F32) return launch<float, float>(w, on);
    return w->c_dtype == MN_BF16 ? launch<mn_bf16, mn_bf16>(w, on) : launch<mn_bf16, float>(w, on);
}

}    // namespace mneme::gemm
