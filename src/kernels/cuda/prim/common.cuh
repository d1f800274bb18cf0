/* common.cuh - what every CUDA kernel here starts from: storage types, 16-byte packs, sums over
 * row_groups of threads, rows of views, sequences, launches.
 *
 * Kernels are templates over the storage type T, float or bf16, and compute in float. They fuse
 * products and sums only where fmaf says so, and add in an order that depends on sizes alone, so
 * that a result has the same bits each time. */
#ifndef MN_KERNELS_CUDA_PRIM_COMMON_CUH
#define MN_KERNELS_CUDA_PRIM_COMMON_CUH

#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <stdint.h>

#include "base/checked.h"
#include "base/util.h"
#include "kernels/kernel.h"

namespace mneme {

typedef __nv_bfloat16 mn_bf16;

/* The functions of cuda_kernels.def, as overlay.c declares them. */
#define MN_CUDA_PLAN(name) extern "C" bool mn_##name##_cuda_plan(const void *args, mn_plan *plan)
#define MN_CUDA_LAUNCH(name)                                                                       \
    extern "C" int mn_##name##_cuda(const void *args, void *shared, void *stream)

/* ---- storage --------------------------------------------------------------------------------- */

__device__ inline float mn_float(float x) {
    return x;
}

__device__ inline float mn_float(mn_bf16 x) {
    return __bfloat162float(x);
}

__device__ inline void mn_put(float *to, float x) {
    *to = x;
}

__device__ inline void mn_put(mn_bf16 *to, float x) {
    *to = __float2bfloat16_rn(x);
}

/* x[i], or zero where the tensor is absent */
template <typename T>
__device__ inline float mn_get(const T *x, int64_t i) {
    return x ? mn_float(x[i]) : 0.0f;
}

/* N neighbours moved by one access; N = 1 needs no alignment. */
template <typename T, int N>
struct alignas(N * sizeof(T) < 16 ? N * sizeof(T) : 16) mn_vec {
    T at[N];
};

template <typename T>
constexpr int mn_vec_width() {
    return 16 / (int)sizeof(T);
}

/* x[0..N) as floats; zeros where the tensor is absent */
template <int N, typename T>
__device__ inline void mn_load(float (&out)[N], const T *x, int64_t i) {
    if (!x) {
#pragma unroll
        for (int j = 0; j < N; j++) out[j] = 0.0f;
        return;
    }
    const mn_vec<T, N> vec = *(const mn_vec<T, N> *)(x + i);
#pragma unroll
    for (int j = 0; j < N; j++) out[j] = mn_float(vec.at[j]);
}

template <int N, typename T>
__device__ inline void mn_store(T *y, int64_t i, const float (&x)[N]) {
    mn_vec<T, N> vec;
#pragma unroll
    for (int j = 0; j < N; j++) mn_put(&vec.at[j], x[j]);
    *(mn_vec<T, N> *)(y + i) = vec;
}

/* Whether packs of 16 bytes may be used on a tensor at `data` (NULL: yes) whose rows are `stride`
 * elements of T apart. */
template <typename T>
inline bool mn_vec_aligned(const void *data, int64_t stride) {
    return (uintptr_t)data % 16 == 0 && stride % mn_vec_width<T>() == 0;
}

/* ---- sums over threads ----------------------------------------------------------------------- */

/* The sum over the warp, in all its lanes. */
__device__ inline float mn_warp_sum(float x) {
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes >>= 1) x += __shfl_xor_sync(0xffffffffu, x, lanes);
    return x;
}

__device__ inline float mn_warp_max(float x) {
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes >>= 1) {
        x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, lanes));
    }
    return x;
}

/* The sum over a row_group of GROUP threads, in all of them. A row_group is a warp, or a block of
 * at most 1024 threads that calls together; `smem` is 32 floats of shared memory of a block, for
 * that second form. Successive calls may use the same smem. */
template <int GROUP>
__device__ inline float mn_group_sum(float x, float *smem) {
    x = mn_warp_sum(x);
    if (GROUP == 32) return x;
    __syncthreads();
    if (threadIdx.x % 32 == 0) smem[threadIdx.x / 32] = x;
    __syncthreads();
    float sum = 0.0f;
#pragma unroll
    for (int warp = 0; warp < GROUP / 32; warp++) sum += smem[warp];
    return sum;
}

template <int GROUP>
__device__ inline float mn_group_max(float x, float *smem) {
    x = mn_warp_max(x);
    if (GROUP == 32) return x;
    __syncthreads();
    if (threadIdx.x % 32 == 0) smem[threadIdx.x / 32] = x;
    __syncthreads();
    float most = smem[0];
#pragma unroll
    for (int warp = 1; warp < GROUP / 32; warp++) most = fmaxf(most, smem[warp]);
    return most;
}

/* ---- views and sequences --------------------------------------------------------------------- */

/* Row (b, t, h) of a view; NULL where it is absent. The strides of absent axes are zero. */
template <typename T>
__device__ inline const T *mn_row(const mn_in &view, int64_t b, int64_t t, int64_t h) {
    if (!view.data) return nullptr;
    return (const T *)view.data + b * view.stride[0] + t * view.stride[1] + h * view.stride[2];
}

template <typename T>
__device__ inline T *mn_row(const mn_out &view, int64_t b, int64_t t, int64_t h) {
    if (!view.data) return nullptr;
    return (T *)view.data + b * view.stride[0] + t * view.stride[1] + h * view.stride[2];
}

/* The query and key head that value head h uses. */
__device__ inline int64_t mn_key_head(const mn_call &call, int64_t h) {
    return call.J == call.H ? h : h / (call.H / call.J);
}

/* Tokens [t0, t0 + length) of batch row b; its states are row n. */
struct mn_span {
    int64_t b, t0, length;
};

__host__ __device__ inline int64_t mn_n_spans(const mn_call &call) {
    return call.cu_seqlens ? call.n_seqs : call.B;
}

/* Sequence n; cu_seqlens must be of this side, as it is in kernels and in plans. */
__host__ __device__ inline mn_span mn_span_at(const mn_call &call, int64_t n) {
    if (!call.cu_seqlens) return { n, 0, call.T };
    const int64_t t0 = call.cu_seqlens[n];
    return { 0, t0, call.cu_seqlens[n + 1] - t0 };
}

/* The sequence that holds token t of batch row b: the last one that starts no later. */
__device__ inline int64_t mn_span_of(const mn_call &call, int64_t b, int64_t t) {
    if (!call.cu_seqlens) return b;
    int64_t low = 0, high = call.n_seqs - 1;
    while (low < high) {
        const int64_t middle = high - (high - low) / 2;
        if (call.cu_seqlens[middle] <= t) low = middle;
        else high = middle - 1;
    }
    return low;
}

/* Tiles of at most `rows` tokens that never cross a border, numbered by slots, of which a few are
 * empty in packed calls: the numbering of kernels/tiles.h. */
struct mn_tile_span {
    int64_t n, first, n_rows;    // sequence, first token in it, tokens (0: the slot is empty)
    mn_span span;
};

__host__ __device__ inline int64_t mn_tile_slots(const mn_call &call, int64_t rows) {
    if (call.cu_seqlens) return call.T / rows + call.n_seqs;
    return call.B * ((call.T + rows - 1) / rows);
}

__device__ inline mn_tile_span mn_tile_at(const mn_call &call, int64_t rows, int64_t slot) {
    mn_tile_span tile;
    int64_t index;
    if (!call.cu_seqlens) {
        const int64_t per_sequence = (call.T + rows - 1) / rows;
        tile.n = slot / per_sequence;
        index = slot % per_sequence;
    } else {
        int64_t low = 0, high = call.n_seqs - 1;
        while (low < high) {
            const int64_t middle = high - (high - low) / 2;
            if (call.cu_seqlens[middle] / rows + middle <= slot) low = middle;
            else high = middle - 1;
        }
        tile.n = low;
        index = slot - (call.cu_seqlens[low] / rows + low);
    }
    tile.span = mn_span_at(call, tile.n);
    tile.first = index * rows;
    tile.n_rows = max(min(rows, tile.span.length - tile.first), (int64_t)0);
    return tile;
}

/* ---- launches -------------------------------------------------------------------------------- */

/* Blocks for n items of which one block takes `each`, at most `most`: kernels loop from there. */
inline unsigned mn_blocks(int64_t n, int64_t each, int64_t most = (int64_t)1 << 30) {
    return (unsigned)mn_max(mn_min(mn_ceil_div(n, each), most), 1);
}

/* What the last launch said, as launchers return it. */
inline int mn_launch_status(void) {
    return (int)cudaGetLastError();
}

/* Launches a kernel whose `smem`, bytes of shared memory, may be more than a block gets unasked. */
template <typename... Arguments, typename... LaunchArgs>
inline int mn_launch_smem(void (*kernel)(Arguments...), dim3 blocks, int threads, size_t smem,
                               cudaStream_t stream, const LaunchArgs &...launch_args) {
    const cudaError_t code = cudaFuncSetAttribute(
        kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)smem);
    if (code != cudaSuccess) return code;
    kernel<<<blocks, (unsigned)threads, smem, stream>>>(launch_args...);
    return mn_launch_status();
}

}    // namespace mneme

#endif
