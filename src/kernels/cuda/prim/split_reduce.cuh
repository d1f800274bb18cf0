/* split_reduce.cuh - second step of sums over tokens: parts gathered by row_groups of threads,
 * added up in their order. A floating-point atomic would give other bits each time. */
#ifndef MN_KERNELS_CUDA_PRIM_SPLIT_REDUCE_CUH
#define MN_KERNELS_CUDA_PRIM_SPLIT_REDUCE_CUH

#include "kernels/cuda/prim/common.cuh"

namespace mneme {

/* put(i, sum over parts of parts[part * width + i]). A block has COLUMNS columns and GROUPS
 * row_groups of threads; group g adds parts g, g + GROUPS, ..., and the row_groups' sums are
 * added in their order. / */
template <int COLUMNS, int GROUPS, typename F>
__global__ void __launch_bounds__(COLUMNS *GROUPS)
reduce_partials_kernel(F store, const float *partials, int64_t n_partials, int64_t width) {
    __shared__ float sums[GROUPS][COLUMNS + 1];
    const int64_t i = blockIdx.x * (int64_t)COLUMNS + threadIdx.x;
    float sum = 0.0f;
    if (i < width) {
#pragma unroll 8
        for (int64_t partial = threadIdx.y; partial < n_partials; partial += GROUPS) {
            sum += partials[partial * width + i];
        }
    }
    sums[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y != 0 || i >= width) return;
    sum = 0.0f;
    for (int group = 0; group < GROUPS; group++) sum += sums[group][threadIdx.x];
    store(i, sum);
}

/* Launches it with a `put` of the caller's. With many parts, more threads share a column, unless
 * there are columns enough for all processors. */
template <typename F>
inline int mn_reduce_partials_to(F store, const float *partials, int64_t n_partials, int64_t width,
                             cudaStream_t stream) {
    if (n_partials <= 32) {
        reduce_partials_kernel<128, 2, F><<<mn_blocks(width, 128), dim3(128, 2), 0, stream>>>(
            store, partials, n_partials, width);
    } else if (n_partials <= 128 || (n_partials <= 512 && width >= 4096)) {
        reduce_partials_kernel<32, 32, F><<<mn_blocks(width, 32), dim3(32, 32), 0, stream>>>(
            store, partials, n_partials, width);
    } else {
        reduce_partials_kernel<8, 128, F><<<mn_blocks(width, 8), dim3(8, 128), 0, stream>>>(
            store, partials, n_partials, width);
    }
    return mn_launch_status();
}

/* Sums that lie as the parts do. */
template <typename T>
struct mn_store_sum {
    T *out;

    __device__ void operator()(int64_t i, float sum) const {
        mn_put(out + i, sum);
    }
};

/* The same as float32, added to what is there or in its place. */
struct mn_store_sum_f32 {
    float *out;
    bool add;

    __device__ void operator()(int64_t i, float sum) const {
        out[i] = add ? out[i] + sum : sum;
    }
};

/* out[i] = sum over parts of parts[part * width + i]; nothing where `out` is NULL. */
template <typename T>
inline int mn_reduce_partials(T *out, const float *partials, int64_t n_partials, int64_t width,
                        cudaStream_t stream) {
    if (!out) return cudaSuccess;
    return mn_reduce_partials_to(mn_store_sum<T>{ out }, partials, n_partials, width, stream);
}

}    // namespace mneme

#endif
