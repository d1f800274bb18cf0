/* longhorn_diag_states.cuh - the states in front of every eighth token that longhorn_diag keeps in
 * bf16 for going back: longhorn_diag_fwd_recurrent.cu stores them, longhorn_diag_bwd_recurrent.cu
 * reads them.
 *
 * A block has 64 columns, and a warp of it 32 by 32 cells: a lane has four rows side by side and
 * twice four columns. States are in half precision, each warp's part in a unit, a power of two. */
#ifndef MN_KERNELS_CUDA_LONGHORN_LONGHORN_DIAG_STATES_CUH
#define MN_KERNELS_CUDA_LONGHORN_LONGHORN_DIAG_STATES_CUH

#include <cuda_fp16.h>

#include "kernels/cuda/recurrent/column_state.cuh"

namespace mneme::longhorn::diag {

enum { GROUP = 8, TILE = recurrent::MN_COLUMNS_TILE };    // tokens; columns of a block

/* Of a block with ROW_WARPS warps along the rows and two along the columns. */
template <int ROW_WARPS>
struct saved_state {
    static constexpr int THREADS = 64 * ROW_WARPS;
    static constexpr int CELLS = 4 * THREADS;    // packs of 16 bytes, four of a thread
    static constexpr int PACKS = CELLS + 2;      // and its warps' units
};

/* A lane's cells as factors of products: pair p of the four of row r is number r % 2 + p % 2 * 2 of
 * factor r / 2 * 2 + p / 2, whose four numbers have to lie side by side. */
typedef unsigned pairs[4][4];

__device__ constexpr int row_in(int factor, int n) { return factor / 2 * 2 + n % 2; }
__device__ constexpr int pair_in(int factor, int n) { return factor % 2 * 2 + n / 2; }

__device__ __forceinline__ unsigned pair_of(float low, float high) {
    const __half2 pair = __floats2half2_rn(low, high);
    return *(const unsigned *)&pair;
}

template <int THREADS>
__device__ __forceinline__ void store_packed(uint4 *to, const pairs &x) {
#pragma unroll
    for (int f = 0; f < 4; f++) {
        to[f * THREADS + threadIdx.x] = make_uint4(x[f][0], x[f][1], x[f][2], x[f][3]);
    }
}

/* Where the states of a block's sequence begin, and from one to the next. */
template <int ROW_WARPS>
__device__ inline uint4 *saved_states(const recurrent::mn_column_params &p,
                                      const recurrent::mn_column_coord &at, int64_t tiles,
                                      int64_t &stride) {
    const int64_t groups = (at.span.length + GROUP - 1) / GROUP;
    const int64_t slot = p.call.cu_seqlens ? at.span.t0 / GROUP + at.n : at.n * groups;
    stride = p.call.H * tiles * saved_state<ROW_WARPS>::PACKS;
    return (uint4 *)p.spans + slot * stride +
        (at.h * tiles + at.tile) * saved_state<ROW_WARPS>::PACKS;
}

/* ---- units ----------------------------------------------------------------------------------- */

/* The power of two at or below what these bits, of a positive number, say; not too near to the
 * ends. */
__device__ inline float unit_of(unsigned bits) {
    return __uint_as_float(min(max(bits & 0x7f800000u, 27u << 23), 227u << 23));
}

__device__ inline float inverse_of(float unit) {
    return __uint_as_float((254u << 23) - __float_as_uint(unit));
}

/* Bits of |x|, which are in the order of numbers; 0 for what is not finite */
__device__ inline unsigned size_of(float x) {
    const unsigned bits = __float_as_uint(x) & 0x7fffffffu;
    return bits < 0x7f800000u ? bits : 0;
}

/* The bits of the warp's largest number, of those that are finite; at(n): number n of N. */
template <int N, typename F>
__device__ __forceinline__ unsigned largest_finite(F at) {
    float most = 0.0f;
#pragma unroll
    for (int n = 0; n < N; n++) most = fmaxf(most, fabsf(at(n)));
    const unsigned bits = __reduce_max_sync(0xffffffffu, __float_as_uint(most));
    if (bits < 0x7f800000u) return bits;
    unsigned finite = 0;
#pragma unroll
    for (int n = 0; n < N; n++) finite = max(finite, size_of(at(n)));
    return __reduce_max_sync(0xffffffffu, finite);
}

}    // namespace mneme::longhorn::diag

#endif
