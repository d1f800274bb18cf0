/* parts.cuh - second step of sums over tokens: parts gathered by teams of threads, added up in
 * their order. A floating-point atomic would give other bits each time. */
#ifndef MN_KERNELS_CUDA_PARTS_CUH
#define MN_KERNELS_CUDA_PARTS_CUH

#include "kernels/cuda/common.cuh"

enum { MN_PART_COLUMNS = 32, MN_PART_GROUPS = 32 };

/* put(i, sum over parts of parts[part * width + i]). A block has 32 columns and 32 groups of
 * threads; group g adds parts g, g + 32, ..., and the groups' sums are added in their order. */
template <typename F>
__global__ void mn_sum_parts_kernel(F put, const float *parts, int64_t n_parts, int64_t width) {
    __shared__ float sums[MN_PART_GROUPS][MN_PART_COLUMNS + 1];
    const int64_t i = blockIdx.x * (int64_t)MN_PART_COLUMNS + threadIdx.x;
    float sum = 0.0f;
    for (int64_t part = threadIdx.y; i < width && part < n_parts; part += MN_PART_GROUPS) {
        sum += parts[part * width + i];
    }
    sums[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y != 0 || i >= width) return;
    sum = 0.0f;
    for (int group = 0; group < MN_PART_GROUPS; group++) sum += sums[group][threadIdx.x];
    put(i, sum);
}

/* Launches it with a `put` of the caller's. */
template <typename F>
inline int mn_sum_parts_into(F put, const float *parts, int64_t n_parts, int64_t width,
                             cudaStream_t stream) {
    const dim3 threads(MN_PART_COLUMNS, MN_PART_GROUPS);
    mn_sum_parts_kernel<F><<<mn_blocks(width, MN_PART_COLUMNS), threads, 0, stream>>>(
        put, parts, n_parts, width);
    return mn_launched();
}

/* Sums that lie as the parts do. */
template <typename T>
struct mn_put_there {
    T *out;

    __device__ void operator()(int64_t i, float sum) const {
        mn_put(out + i, sum);
    }
};

/* out[i] = sum over parts of parts[part * width + i]; nothing where `out` is NULL. */
template <typename T>
inline int mn_sum_parts(T *out, const float *parts, int64_t n_parts, int64_t width,
                        cudaStream_t stream) {
    if (!out) return cudaSuccess;
    return mn_sum_parts_into(mn_put_there<T>{ out }, parts, n_parts, width, stream);
}

#endif
