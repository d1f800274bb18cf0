/* bayes_split.cuh - float32 numbers in two parts for products of tensor cores in tf32, with the
 * registers of products of doubles (prim/mma_f64.cuh).
 *
 * A part has 11 bits: x = hi + lo to 2^-21, and a product is hi lo + lo hi + hi hi. Neither these
 * products nor the parts of a double need the units for doubles, for which warps of the covariance
 * scan wait up to 4,000 clocks of each other. */
#ifndef MN_KERNELS_CUDA_BAYES_BAYES_SPLIT_CUH
#define MN_KERNELS_CUDA_BAYES_BAYES_SPLIT_CUH

#include "kernels/cuda/prim/mma_f64.cuh"

namespace mneme::bayes {

struct split {
    float hi, lo;
};

__device__ inline split split_of(float x) {
    const float hi = __uint_as_float(__float_as_uint(x) & 0xffffe000u);
    return { hi, x - hi };
}

/* x with its last bits cut off, by integers: 0 below 2^-126, NaN beyond float32's range. */
__device__ inline float cut_to_float(double x) {
    const unsigned high = (unsigned)__double2hiint(x), low = (unsigned)__double2loint(x);
    const unsigned bits = __funnelshift_l(low, high, 3);    // exponents differ by 896
    const unsigned size = (bits & 0x7fffffffu) ^ 0x40000000u, exponent = high >> 20 & 0x7ffu;
    const unsigned most = exponent < 897u ? 0u : exponent > 1150u ? 0x7fffffffu : size;
    return __uint_as_float(most | (high & 0x80000000u));
}

__device__ inline split split_of(double x) {
    return split_of(cut_to_float(x));
}

/* x y of normal numbers, of which one may be far beyond float32's range, without units for doubles:
 * 0 where the product is below 2^-126, NaN where it is beyond 2^126. */
__device__ inline float product_cut_to_float(double x, double y) {
    const auto mantissa = [](double z) {
        const unsigned bits =
            __funnelshift_l((unsigned)__double2loint(z), (unsigned)__double2hiint(z), 3);
        return __uint_as_float((bits & 0x007fffffu) | 0x3f800000u);
    };
    const unsigned a = (unsigned)__double2hiint(x), b = (unsigned)__double2hiint(y);
    const int ex = (int)(a >> 20 & 0x7ffu), ey = (int)(b >> 20 & 0x7ffu), e = ex + ey - 2046;
    const unsigned product = __float_as_uint(mantissa(x) * mantissa(y)) + ((unsigned)e << 23);
    const bool none = ex == 0 || ey == 0, wild = ex == 2047 || ey == 2047;
    unsigned size = e < -126 ? 0u : e > 125 ? 0x7fffffffu : product;
    size = wild ? 0x7fffffffu : none ? 0u : size;
    return __uint_as_float(size | ((a ^ b) & 0x80000000u));
}

/* (16,8) += (16,8) (8,8), as mn_mma_f64_k8. */
__device__ inline void mma_tf32_k8(float (&c)[2][2], float a0, float a1, float a2, float a3,
                                   float b0, float b1) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, "
        "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0][0]), "+f"(c[0][1]), "+f"(c[1][0]), "+f"(c[1][1])
        : "r"(__float_as_uint(a0)), "r"(__float_as_uint(a1)), "r"(__float_as_uint(a2)),
          "r"(__float_as_uint(a3)), "r"(__float_as_uint(b0)), "r"(__float_as_uint(b1)));
}

__device__ inline void mma_k8(float (&c)[2][2], const split (&a)[4], const split (&b)[2]) {
    mma_tf32_k8(c, a[0].hi, a[1].hi, a[2].hi, a[3].hi, b[0].lo, b[1].lo);
    mma_tf32_k8(c, a[0].lo, a[1].lo, a[2].lo, a[3].lo, b[0].hi, b[1].hi);
    mma_tf32_k8(c, a[0].hi, a[1].hi, a[2].hi, a[3].hi, b[0].hi, b[1].hi);
}

__device__ inline void mma_k16(float (&c)[2][2], const split (&a)[8], const split (&b)[4]) {
    const split a0[4] = { a[0], a[1], a[2], a[3] }, a1[4] = { a[4], a[5], a[6], a[7] };
    const split b0[2] = { b[0], b[1] }, b1[2] = { b[2], b[3] };
    mma_k8(c, a0, b0);
    mma_k8(c, a1, b1);
}

__device__ inline void mma_k8(double (&c)[2][2], const double (&a)[4], const double (&b)[2]) {
    mn_mma_f64_k8(c, a, b);
}

__device__ inline void mma_k16(double (&c)[2][2], const double (&a)[8], const double (&b)[4]) {
    mn_mma_f64_k16(c, a, b);
}

/* What a kernel computes in: its numbers, factors of products, pairs of neighbours. */
template <bool SPLIT>
struct numbers {
    typedef double number, factor;
    typedef double2 pair;

    __device__ static double factor_of(double x) { return x; }
    __device__ static double number_of(double x) { return x; }
    __device__ static double2 pair_of(double x, double y) { return make_double2(x, y); }
};

template <>
struct numbers<true> {
    typedef float number;
    typedef split factor;
    typedef float2 pair;

    __device__ static split factor_of(double x) { return split_of(x); }
    __device__ static split factor_of(float x) { return split_of(x); }
    __device__ static float number_of(double x) { return cut_to_float(x); }
    __device__ static float number_of(float x) { return x; }
    __device__ static float2 pair_of(float x, float y) { return make_float2(x, y); }
};

}    // namespace mneme::bayes

#endif
