/* vec_math.h - elementary functions of float vectors. Included at the end of vec.h.
 *
 *   vf_exp vf_expm1 vf_log vf_log1p vf_sigmoid vf_softplus vf_tanh
 *
 * Largest errors over the whole float range, in units in the last place, denormal arguments and
 * results included: exp 1.1, log 0.9, expm1 1.6, log1p 1.5, tanh 1.5, softplus 1.8, sigmoid 2.4.
 * Limits at zero and at the infinities are exact, NaN gives NaN, and arguments are clamped only
 * where the result no longer changes. Every target gives the same bits: all are built from
 * correctly rounded operations in one order.
 */
#ifndef MN_KERNELS_CPU_SIMD_VEC_MATH_H
#define MN_KERNELS_CPU_SIMD_VEC_MATH_H

#ifndef MN_KERNELS_CPU_SIMD_VEC_H
#error "include kernels/cpu/simd/vec.h"
#endif

#include <float.h>
#include <math.h>       // INFINITY, NAN

/* ln 2 as float and remainder. x - n*HI is exact under fma for |n| < 2^8: HI is a multiple of
 * 2^-24, so the difference is too, and it stays below 1/2. */
#define MN_LN2_HI 0x1.62e430p-1f
#define MN_LN2_LO (-0x1.05c610p-29f)
#define MN_LOG2_E 0x1.715476p+0f

/* Below this |x|, expm1 and log1p equal x to half an ulp, and returning x itself keeps denormals
 * and the sign of zero. */
#define MN_VEC_TINY 0x1p-30f

/* c[0] + c[1] x + ... + c[n-1] x^(n-1), n >= 2; even and odd terms are shorter chains in x^2. */
MN_ALWAYS_INLINE vf vf_poly(const float *c, int n, vf x) {
    const vf x2 = vf_mul(x, x);
    vf part[2];
    part[(n - 1) % 2] = vf_set1(c[n - 1]);
    part[n % 2] = vf_set1(c[n - 2]);
    MN_UNROLL
    for (int i = n - 3; i >= 0; i--) part[i % 2] = vf_fma(part[i % 2], x2, vf_set1(c[i]));
    return vf_fma(part[1], x, part[0]);
}

/* x = n ln2 + r with |r| <= ln2/2; returns e^r - 1 = r + r^2 Q(r).
 * Q is the minimax quintic for relative error of the result: 2^-27.9 with rounded coefficients. */
static inline vf vf_expm1_reduced(vf *n, vf x) {
    static const float Q[] = { 0x1.000000p-1f, 0x1.555556p-3f, 0x1.555470p-5f,
                               0x1.1110acp-7f, 0x1.6da76cp-10f, 0x1.a17e08p-13f };
    *n = vf_round(vf_mul(x, vf_set1(MN_LOG2_E)));
    vf r = vf_fnma(*n, vf_set1(MN_LN2_HI), x);
    r = vf_fnma(*n, vf_set1(MN_LN2_LO), r);
    return vf_fma(vf_mul(r, r), vf_poly(Q, 6, r), r);
}

/* e^x. e^-104 rounds to 0 and e^89 to infinity. */
static inline vf vf_exp(vf x) {
    vf n;
    x = vf_max(vf_set1(-104.0f), vf_min(vf_set1(89.0f), x));    // this order keeps NaN
    const vf p = vf_expm1_reduced(&n, x);
    return vf_ldexp(vf_add(vf_set1(1.0f), p), n);
}

/* e^x - 1 = 2 (s p + (s - 1/2)) with s = 2^(n-1), which is finite up to the largest result. */
static inline vf vf_expm1(vf x) {
    vf n;
    const vf clamped = vf_max(vf_set1(-30.0f), vf_min(vf_set1(89.0f), x));
    const vf p = vf_expm1_reduced(&n, clamped);
    const vf s = vf_pow2(vi_sub(vi_from_vf(n), vi_set1(1)));
    const vf y = vf_fma(s, p, vf_sub(s, vf_set1(0.5f)));
    return vf_select(vf_lt(vf_abs(x), vf_set1(MN_VEC_TINY)), x, vf_add(y, y));
}

/* x = 2^e m with sqrt(1/2) <= m < sqrt(2), for normal x > 0; returns m. */
static inline vf vf_split(vf *e, vf x) {
    const vi exponent = vi_shr(vi_sub(vf_as_vi(x), vi_set1(0x3f3504f3)), 23);
    *e = vf_from_vi(exponent);
    return vi_as_vf(vi_sub(vf_as_vi(x), vi_shl(exponent, 23)));
}

/* e ln2 + log(1 + f), with 1 + f in the range of vf_split: log(1 + f) = f - f^2/2 + f^3 R(f).
 * R is minimax for relative error of log(1 + f): 2^-28.9 with rounded coefficients. */
static inline vf vf_log_reduced(vf e, vf f) {
    static const float R[] = { 0x1.555548p-2f, -0x1.ffffeap-3f, 0x1.99a518p-3f,
                               -0x1.556428p-3f, 0x1.232a24p-3f, -0x1.faf8acp-4f,
                               0x1.e6fc78p-4f, -0x1.e550f8p-4f, 0x1.1c3140p-4f };
    const vf bend = vf_fma(f, vf_poly(R, 9, f), vf_set1(-0.5f));
    const vf low = vf_fma(e, vf_set1(MN_LN2_LO), vf_mul(vf_mul(f, f), bend));
    return vf_fma(e, vf_set1(MN_LN2_HI), vf_add(f, low));
}

/* y where 0 < u < infinity; else the limits of log: -infinity at 0, NaN below, u = infinity, NaN */
static inline vf vf_log_limits(vf y, vf u) {
    const vf outside = vf_select(vf_eq(u, vf_zero()), vf_set1(-INFINITY),
                                 vf_select(vf_lt(u, vf_zero()), vf_set1(NAN), u));
    return vf_select(vm_and(vf_gt(u, vf_zero()), vf_lt(u, vf_set1(INFINITY))), y, outside);
}

static inline vf vf_log(vf x) {
    const vm denormal = vf_lt(x, vf_set1(FLT_MIN));
    vf e;
    const vf m = vf_split(&e, vf_select(denormal, vf_mul(x, vf_set1(0x1p23f)), x));
    e = vf_select(denormal, vf_sub(e, vf_set1(23.0f)), e);
    return vf_log_limits(vf_log_reduced(e, vf_sub(m, vf_set1(1.0f))), x);
}

/* log(1 + x): u = 1 + x is rounded, `lost` is exactly what the rounding took, and
 * (u + lost) 2^-e - 1 = (m - 1) + lost 2^-e, of which m - 1 is exact. With e = 0 it is x. */
static inline vf vf_log1p(vf x) {
    const vf one = vf_set1(1.0f);
    const vf u = vf_add(one, x), x_part = vf_sub(u, one);
    const vf lost = vf_add(vf_sub(one, vf_sub(u, x_part)), vf_sub(x, x_part));
    vf e;
    const vf m = vf_split(&e, u);
    const vf down = vf_pow2(vi_from_vf(vf_max(vf_neg(e), vf_set1(-126.0f))));
    const vf y = vf_log_reduced(e, vf_fma(lost, down, vf_sub(m, one)));
    return vf_select(vf_lt(vf_abs(x), vf_set1(MN_VEC_TINY)), x, vf_log_limits(y, u));
}

/* 1 / (1 + e^-x); for x < 0 as e^x / (1 + e^x), which stays accurate down to the denormals */
static inline vf vf_sigmoid(vf x) {
    const vf one = vf_set1(1.0f), z = vf_exp(vf_neg(vf_abs(x)));
    return vf_div(vf_select(vf_gt(x, vf_zero()), one, z), vf_add(one, z));
}

/* log(1 + e^x) = max(x, 0) + log1p(e^-|x|): x itself for large x, e^x for very negative x */
static inline vf vf_softplus(vf x) {
    const vf z = vf_exp(vf_neg(vf_abs(x)));
    return vf_add(vf_max(vf_zero(), x), vf_log1p(z));
}

/* For |x| < 0.55, x + x^3 P(x^2) with P minimax for relative error of tanh (2^-27.7); beyond,
 * 1 - 2 / (e^2|x| + 1), where at most half is subtracted. */
static inline vf vf_tanh(vf x) {
    static const float P[] = { -0x1.55554cp-2f, 0x1.110d5ap-3f, -0x1.b92718p-5f,
                               0x1.58fa72p-6f, -0x1.98de76p-8f };
    const vf size = vf_abs(x), square = vf_mul(x, x);
    const vf small = vf_fma(vf_mul(size, square), vf_poly(P, 5, square), size);
    const vf e = vf_exp(vf_add(size, size)), one = vf_set1(1.0f);
    const vf large = vf_sub(one, vf_div(vf_set1(2.0f), vf_add(e, one)));
    const vf y = vf_select(vf_lt(size, vf_set1(0.55f)), small, large);
    return vi_as_vf(vi_or(vf_as_vi(y), vi_and(vf_as_vi(x), vi_set1(INT32_MIN))));
}

#endif
