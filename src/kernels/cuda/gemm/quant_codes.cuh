/* quant_codes.cuh - sixteen bytes of codes of 8 or 4 bits as floats, and the scales that go with
 * them (kernels/quant.h). */
#ifndef MN_KERNELS_CUDA_GEMM_QUANT_CODES_CUH
#define MN_KERNELS_CUDA_GEMM_QUANT_CODES_CUH

#include "kernels/cuda/prim/common.cuh"
#include "kernels/quant.h"

namespace mneme::gemm {

struct quant_weights {
    const unsigned char *codes;
    const unsigned *scales;
    int64_t row_bytes, groups;
    int group, rows, cols;
};

static inline quant_weights quant_weights_of(const mn_quant *q) {
    return { (const unsigned char *)q->codes, (const unsigned *)q->scales, mn_quant_row_bytes(q),
             mn_quant_groups(q), (int)q->group, (int)q->rows, (int)q->cols };
}

/* 16 codes of 8 bits, 32 of 4. A byte becomes the last one of 2^23, from which that is taken off
 * again: conversions of integers are few a clock. */
template <int BITS>
struct quant_codes {
    static constexpr int N = 128 / BITS;
    unsigned word[4];

    __device__ explicit quant_codes(uint4 four) : word{ four.x, four.y, four.z, four.w } {}

    __device__ float at(int i) const {
        const unsigned high = 0x4b000000u;
        if (BITS == 8) {
            const unsigned raised = word[i / 4] ^ 0x80808080u;
            return __uint_as_float(__byte_perm(raised, high, 0x7440 | i % 4)) - 8388736.0f;
        }
        const unsigned halves = (i % 2 ? word[i / 8] >> 4 : word[i / 8]) & 0x0f0f0f0fu;
        return __uint_as_float(__byte_perm(halves, high, 0x7440 | i / 2 % 4)) - 8388608.0f;
    }
};

struct quant_levels {
    float scale, least;
};

template <int BITS>
__device__ inline quant_levels quant_levels_at(const quant_weights &w, int64_t row, int k) {
    const unsigned word = w.scales[row * w.groups + k / w.group];
    if (BITS == 8) return { __uint_as_float(word), 0.0f };
    return { __half2float(__ushort_as_half((unsigned short)word)),
             __half2float(__ushort_as_half((unsigned short)(word >> 16))) };
}

}    // namespace mneme::gemm

#endif
