/* longhorn_diag_factors.cuh - a token of longhorn_diag as two products of depth 8 onto cells:
 *
 *   C = 1 - W X'     S <- C . S + P K'
 *
 * each entry of a factor being two numbers of bf16 (W of w, X of k^2, P of w v; k is one). Depths 0
 * to 3 have W with X, 4 and 5 have P with K, and 6 and 7 zeros: C and the second sum read the same
 * factor of keys and different ones of columns, with zeros where the other's depths are. */
#ifndef MN_KERNELS_CUDA_LONGHORN_LONGHORN_DIAG_FACTORS_CUH
#define MN_KERNELS_CUDA_LONGHORN_LONGHORN_DIAG_FACTORS_CUH

#include "kernels/cuda/prim/common.cuh"

namespace mneme::longhorn::diag_factors {

/* A token's factors, in words of two numbers. Tables of keys lie a quarter of the banks apart,
 * those of columns a quarter from the zeros: lanes of different depths meet no bank twice. */
template <int ROWS, int COLUMNS>
struct alignas(16) token_factors {
    static constexpr int PITCH = ROWS + 8;
    unsigned keys[3][PITCH];       // k^2 in two parts, k; each twice
    unsigned zeros[40];            // of which 32 are read
    unsigned weights[COLUMNS];     // -w in two parts
    unsigned writes[COLUMNS];      // w v in two parts
};

/* A lane's place: its row of a product's first factor and its pair of the depth, which in results
 * is a pair of columns. */
__device__ __forceinline__ int lane_row() { return (int)threadIdx.x % 32 / 4; }
__device__ __forceinline__ int lane_pair() { return (int)threadIdx.x % 4; }

/* Where a lane reads a token's factors, in words: of the depths that it has, four neighbours of the
 * 32 from `row` and from `column` on. */
struct lane_factors {
    int keys, weights, writes;

    template <int ROWS, int COLUMNS>
    __device__ static lane_factors of(int row, int column) {
        typedef token_factors<ROWS, COLUMNS> tables;
        const int pair = lane_pair(), own = 4 * lane_row(), zeros = 3 * tables::PITCH + own;
        const int weights = 3 * tables::PITCH + 40 + column + own;
        return { pair < 3 ? pair * tables::PITCH + row + own : zeros, pair < 2 ? weights : zeros,
                 pair == 2 ? weights + COLUMNS : zeros };
    }
};

template <typename Tables>
__device__ __forceinline__ void load_words(unsigned (&to)[4], const Tables &from, int at) {
    const uint4 four = *(const uint4 *)((const unsigned *)&from + at);
    to[0] = four.x, to[1] = four.y, to[2] = four.z, to[3] = four.w;
}

/* to = 1 + A b of depth 8 */
__device__ __forceinline__ void mma_k8_one(float (&to)[4], unsigned a0, unsigned a1, unsigned b) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, "
        "{%7, %7, %7, %7};"
        : "=f"(to[0]), "=f"(to[1]), "=f"(to[2]), "=f"(to[3])
        : "r"(a0), "r"(a1), "r"(b), "f"(1.0f));
}

/* sum += A b of depth 8 */
__device__ __forceinline__ void mma_k8(float (&sum)[4], unsigned a0, unsigned a1, unsigned b) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, "
        "{%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a0), "r"(a1), "r"(b));
}

/* A pair of bf16, the first number in the lower half. */
__device__ __forceinline__ unsigned pair_of(float first, float second) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(first, second);
    return *(const unsigned *)&pair;
}

__device__ __forceinline__ float rounded(float x) {
    return __bfloat162float(__float2bfloat16_rn(x));
}

/* Two numbers of bf16 whose sum is x. */
__device__ __forceinline__ unsigned split(float x) {
    const float high = rounded(x);
    return pair_of(high, x - high);
}

/* x y for both numbers of a pair */
__device__ __forceinline__ unsigned multiply_bf16(unsigned x, unsigned y) {
    unsigned z;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(z) : "r"(x), "r"(y), "r"(0x80008000u));
    return z;
}

/* Words of keys: x^2 in two parts, and x. */
__device__ __forceinline__ void key_words(unsigned &high, unsigned &low, unsigned &key, float x) {
    const float square = x * x, first = rounded(square);
    high = pair_of(first, first);
    low = pair_of(square - first, square - first);
    key = pair_of(x, x);
}

/* Where the word of column j of a block lies if rows are a product's first factor: a lane's numbers
 * of four tiles side by side. */
__device__ constexpr int saved_column_word(int j) {
    return j / 32 * 32 + j % 16 / 4 * 8 + j % 2 * 4 + j % 32 / 16 * 2 + j % 4 / 2;
}

}    // namespace mneme::longhorn::diag_factors

#endif
