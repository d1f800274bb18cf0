/* unpack.cuh - packs of numbers as floats. Two bf16 are a word: one is its high half as it stands,
 * the other its low half moved up, one instruction each. */
#ifndef MN_KERNELS_CUDA_UNPACK_CUH
#define MN_KERNELS_CUDA_UNPACK_CUH

#include <string.h>

#include "kernels/cuda/common.cuh"

template <typename T, int N>
__device__ inline void mn_unpack_to(float (&out)[N], const mn_pack<T, N> &pack) {
#pragma unroll
    for (int j = 0; j < N; j++) out[j] = mn_float(pack.at[j]);
}

template <int N>
__device__ inline void mn_unpack_to(float (&out)[N], const mn_pack<mn_bf16, N> &pack) {
    if constexpr (N % 2 == 0) {
        uint32_t words[N / 2];
        memcpy(words, &pack, sizeof words);
#pragma unroll
        for (int j = 0; j < N; j++) {
            out[j] = __uint_as_float(j % 2 ? words[j / 2] & 0xffff0000u : words[j / 2] << 16);
        }
    } else {
#pragma unroll
        for (int j = 0; j < N; j++) out[j] = mn_float(pack.at[j]);
    }
}

#endif
