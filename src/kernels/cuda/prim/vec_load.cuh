/* vec_load.cuh - packs of numbers as floats. Two bf16 are a word: one is its high half as it
 * stands, the other its low half moved up, one instruction each. */
#ifndef MN_KERNELS_CUDA_PRIM_VEC_LOAD_CUH
#define MN_KERNELS_CUDA_PRIM_VEC_LOAD_CUH

#include <string.h>

#include "kernels/cuda/prim/common.cuh"

namespace mneme {

template <typename T, int N>
__device__ inline void mn_unpack_to(float (&out)[N], const mn_vec<T, N> &vec) {
#pragma unroll
    for (int j = 0; j < N; j++) out[j] = mn_float(vec.at[j]);
}

template <int N>
__device__ inline void mn_unpack_to(float (&out)[N], const mn_vec<mn_bf16, N> &vec) {
    if constexpr (N % 2 == 0) {
        uint32_t words[N / 2];
        memcpy(words, &vec, sizeof words);
#pragma unroll
        for (int j = 0; j < N; j++) {
            out[j] = __uint_as_float(j % 2 ? words[j / 2] & 0xffff0000u : words[j / 2] << 16);
        }
    } else {
#pragma unroll
        for (int j = 0; j < N; j++) out[j] = mn_float(vec.at[j]);
    }
}

/* A pack as it waits in registers. Several bf16 would be as many numbers to the compiler, which
 * takes them apart right behind their load, and so waits for memory there. */
template <typename T, int N>
struct mn_vec_bits {
    typedef mn_vec<T, N> type;
};

template <>
struct mn_vec_bits<mn_bf16, 2> {
    typedef uint32_t type;
};

template <>
struct mn_vec_bits<mn_bf16, 4> {
    typedef uint2 type;
};

template <>
struct mn_vec_bits<mn_bf16, 8> {
    typedef uint4 type;
};

template <int N>
__device__ inline void mn_unpack_words(float (&out)[2 * N], const uint32_t (&words)[N]) {
#pragma unroll
    for (int j = 0; j < 2 * N; j++) {
        out[j] = __uint_as_float(j % 2 ? words[j / 2] & 0xffff0000u : words[j / 2] << 16);
    }
}

__device__ inline void mn_unpack_to(float (&out)[2], const uint32_t &vec) {
    const uint32_t words[1] = { vec };
    mn_unpack_words(out, words);
}

__device__ inline void mn_unpack_to(float (&out)[4], const uint2 &vec) {
    const uint32_t words[2] = { vec.x, vec.y };
    mn_unpack_words(out, words);
}

__device__ inline void mn_unpack_to(float (&out)[8], const uint4 &vec) {
    const uint32_t words[4] = { vec.x, vec.y, vec.z, vec.w };
    mn_unpack_words(out, words);
}

}    // namespace mneme

#endif
