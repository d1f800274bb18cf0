/* vec_target.h (neon) - eight floats in a vector: two registers of four. Contract in
 * kernels/cpu/simd/vec.h.
 *
 * Half of the 32 registers of AArch64 hold what the 16 of AVX2 hold, so tiles have the same shapes
 * and every sum the same order: results have the bits of avx2. Two halves in flight also hide the
 * latency of a multiply-add. */
#ifndef MN_KERNELS_CPU_SIMD_NEON_VEC_TARGET_H
#define MN_KERNELS_CPU_SIMD_NEON_VEC_TARGET_H

#include <arm_neon.h>
#include <stdbool.h>
#include <stdint.h>

#if !defined(__aarch64__)
#error "this target needs 64-bit ARM"
#endif

#define MN_VW 8

typedef struct { float32x4_t lo, hi; } vf;
typedef struct { int32x4_t lo, hi; } vi;
typedef struct { uint32x4_t lo, hi; } vm;      // all bits of a true lane are set

/* The compiler's own type of this width: it takes C's operators apart into halves. */
typedef float vn __attribute__((vector_size(32)));
typedef union { vf halves; vn whole; } vn_or_vf;
static inline vn vf_as_vn(vf a) { return ((vn_or_vf){ .halves = a }).whole; }
static inline vf vn_as_vf(vn a) { return ((vn_or_vf){ .whole = a }).halves; }

static inline vf vf_zero(void) { return (vf){ vdupq_n_f32(0.0f), vdupq_n_f32(0.0f) }; }
static inline vf vf_set1(float x) { return (vf){ vdupq_n_f32(x), vdupq_n_f32(x) }; }
static inline vi vi_set1(int32_t x) { return (vi){ vdupq_n_s32(x), vdupq_n_s32(x) }; }

static inline vm vm_first(int n) {
    static const int32_t lanes[8] = { 0, 1, 2, 3, 4, 5, 6, 7 };
    const int32x4_t count = vdupq_n_s32(n);
    return (vm){ vcgtq_s32(count, vld1q_s32(lanes)), vcgtq_s32(count, vld1q_s32(lanes + 4)) };
}
static inline vm vm_and(vm a, vm b) {
    return (vm){ vandq_u32(a.lo, b.lo), vandq_u32(a.hi, b.hi) };
}
static inline vm vm_or(vm a, vm b) {
    return (vm){ vorrq_u32(a.lo, b.lo), vorrq_u32(a.hi, b.hi) };
}
static inline vm vm_not(vm a) { return (vm){ vmvnq_u32(a.lo), vmvnq_u32(a.hi) }; }
static inline bool vm_any(vm a) { return vmaxvq_u32(vorrq_u32(a.lo, a.hi)) != 0; }

static inline vf vf_load(const float *p) { return (vf){ vld1q_f32(p), vld1q_f32(p + 4) }; }
static inline void vf_store(float *p, vf v) {
    vst1q_f32(p, v.lo);
    vst1q_f32(p + 4, v.hi);
}

/* The first n < 4 of four lanes. */
static inline float32x4_t vf_load_some(const float *p, int n) {
    const float32x2_t none = vdup_n_f32(0.0f);
    if (n <= 0) return vcombine_f32(none, none);
    if (n == 1) return vcombine_f32(vld1_lane_f32(p, none, 0), none);
    const float32x2_t two = vld1_f32(p);
    return vcombine_f32(two, n == 3 ? vld1_lane_f32(p + 2, none, 0) : none);
}
static inline void vf_store_some(float *p, float32x4_t v, int n) {
    if (n >= 2) vst1_f32(p, vget_low_f32(v));
    if (n == 1) vst1q_lane_f32(p, v, 0);
    if (n == 3) vst1q_lane_f32(p + 2, v, 2);
}
static inline vf vf_load_n(const float *p, int n) {
    if (n < 4) return (vf){ vf_load_some(p, n), vdupq_n_f32(0.0f) };
    return (vf){ vld1q_f32(p), n < 8 ? vf_load_some(p + 4, n - 4) : vld1q_f32(p + 4) };
}
static inline void vf_store_n(float *p, vf v, int n) {
    if (n < 4) {
        vf_store_some(p, v.lo, n);
        return;
    }
    vst1q_f32(p, v.lo);
    if (n < 8) vf_store_some(p + 4, v.hi, n - 4);
    else vst1q_f32(p + 4, v.hi);
}

static inline vi vi_load(const void *p) {
    return (vi){ vreinterpretq_s32_u8(vld1q_u8(p)),
                 vreinterpretq_s32_u8(vld1q_u8((const uint8_t *)p + 16)) };
}
static inline vi vi_load_i8(const int8_t *p) {
    const int16x8_t wide = vmovl_s8(vld1_s8(p));
    return (vi){ vmovl_s16(vget_low_s16(wide)), vmovl_s16(vget_high_s16(wide)) };
}

static inline vi vi_from_vf(vf a) { return (vi){ vcvtnq_s32_f32(a.lo), vcvtnq_s32_f32(a.hi) }; }
static inline vf vf_from_vi(vi a) { return (vf){ vcvtq_f32_s32(a.lo), vcvtq_f32_s32(a.hi) }; }
static inline vi vf_as_vi(vf a) {
    return (vi){ vreinterpretq_s32_f32(a.lo), vreinterpretq_s32_f32(a.hi) };
}
static inline vf vi_as_vf(vi a) {
    return (vf){ vreinterpretq_f32_s32(a.lo), vreinterpretq_f32_s32(a.hi) };
}

static inline vi vi_add(vi a, vi b) {
    return (vi){ vaddq_s32(a.lo, b.lo), vaddq_s32(a.hi, b.hi) };
}
static inline vi vi_sub(vi a, vi b) {
    return (vi){ vsubq_s32(a.lo, b.lo), vsubq_s32(a.hi, b.hi) };
}
static inline vi vi_and(vi a, vi b) {
    return (vi){ vandq_s32(a.lo, b.lo), vandq_s32(a.hi, b.hi) };
}
static inline vi vi_or(vi a, vi b) {
    return (vi){ vorrq_s32(a.lo, b.lo), vorrq_s32(a.hi, b.hi) };
}
static inline vi vi_shl(vi a, int bits) {
    const int32x4_t by = vdupq_n_s32(bits);
    return (vi){ vshlq_s32(a.lo, by), vshlq_s32(a.hi, by) };
}
/* Shifts to the right are shifts to the left by a negative count. */
static inline vi vi_shr(vi a, int bits) { return vi_shl(a, -bits); }
static inline vi vi_srl(vi a, int bits) {
    const int32x4_t by = vdupq_n_s32(-bits);
    return (vi){ vreinterpretq_s32_u32(vshlq_u32(vreinterpretq_u32_s32(a.lo), by)),
                 vreinterpretq_s32_u32(vshlq_u32(vreinterpretq_u32_s32(a.hi), by)) };
}

static inline vf vf_from_bits4(vi a) { return vf_from_vi(vi_and(a, vi_set1(15))); }

static inline vf vf_add(vf a, vf b) {
    return (vf){ vaddq_f32(a.lo, b.lo), vaddq_f32(a.hi, b.hi) };
}
static inline vf vf_sub(vf a, vf b) {
    return (vf){ vsubq_f32(a.lo, b.lo), vsubq_f32(a.hi, b.hi) };
}
static inline vf vf_mul(vf a, vf b) {
    return (vf){ vmulq_f32(a.lo, b.lo), vmulq_f32(a.hi, b.hi) };
}
static inline vf vf_div(vf a, vf b) {
    return (vf){ vdivq_f32(a.lo, b.lo), vdivq_f32(a.hi, b.hi) };
}
static inline vf vf_sqrt(vf a) { return (vf){ vsqrtq_f32(a.lo), vsqrtq_f32(a.hi) }; }
static inline vf vf_fma(vf a, vf b, vf c) {
    return (vf){ vfmaq_f32(c.lo, a.lo, b.lo), vfmaq_f32(c.hi, a.hi, b.hi) };
}
static inline vf vf_fnma(vf a, vf b, vf c) {
    return (vf){ vfmsq_f32(c.lo, a.lo, b.lo), vfmsq_f32(c.hi, a.hi, b.hi) };
}
static inline vf vf_neg(vf a) { return (vf){ vnegq_f32(a.lo), vnegq_f32(a.hi) }; }
static inline vf vf_abs(vf a) { return (vf){ vabsq_f32(a.lo), vabsq_f32(a.hi) }; }

static inline vm vf_lt(vf a, vf b) {
    return (vm){ vcltq_f32(a.lo, b.lo), vcltq_f32(a.hi, b.hi) };
}
static inline vm vf_le(vf a, vf b) {
    return (vm){ vcleq_f32(a.lo, b.lo), vcleq_f32(a.hi, b.hi) };
}
static inline vm vf_gt(vf a, vf b) { return vf_lt(b, a); }
static inline vm vf_ge(vf a, vf b) { return vf_le(b, a); }
static inline vm vf_eq(vf a, vf b) {
    return (vm){ vceqq_f32(a.lo, b.lo), vceqq_f32(a.hi, b.hi) };
}
static inline vm vf_nan(vf a) { return vm_not(vf_eq(a, a)); }
static inline vf vf_select(vm m, vf a, vf b) {
    return (vf){ vbslq_f32(m.lo, a.lo, b.lo), vbslq_f32(m.hi, a.hi, b.hi) };
}

/* The instructions of these names let a NaN in either operand through; the contract has another
 * rule. */
static inline vf vf_min(vf a, vf b) { return vf_select(vf_lt(a, b), a, b); }
static inline vf vf_max(vf a, vf b) { return vf_select(vf_gt(a, b), a, b); }

static inline vf vf_round(vf a) { return (vf){ vrndnq_f32(a.lo), vrndnq_f32(a.hi) }; }

static inline float vf_sum(vf v) {
    const float32x4_t b = vaddq_f32(v.lo, v.hi);
    const float32x2_t c = vadd_f32(vget_low_f32(b), vget_high_f32(b));
    return vget_lane_f32(c, 0) + vget_lane_f32(c, 1);
}
static inline float vf_max_lanes(vf v) { return vmaxvq_f32(vmaxq_f32(v.lo, v.hi)); }

#define MN_VD 4
typedef struct { float64x2_t lo, hi; } vd;
static inline vd vd_load(const double *p) { return (vd){ vld1q_f64(p), vld1q_f64(p + 2) }; }
static inline vd vd_load_floats(const float *p) {
    const float32x4_t v = vld1q_f32(p);
    return (vd){ vcvt_f64_f32(vget_low_f32(v)), vcvt_high_f64_f32(v) };
}
static inline void vd_store(double *p, vd v) {
    vst1q_f64(p, v.lo);
    vst1q_f64(p + 2, v.hi);
}
static inline vd vd_set1(double x) { return (vd){ vdupq_n_f64(x), vdupq_n_f64(x) }; }
static inline vd vd_fnma(vd a, vd b, vd c) {
    return (vd){ vfmsq_f64(c.lo, a.lo, b.lo), vfmsq_f64(c.hi, a.hi, b.hi) };
}

static inline vf vf_unknown(vf a) {
    __asm__ volatile("" : "+w"(a.lo), "+w"(a.hi));
    return a;
}

static inline vf vf_load_quads(const float *p, int64_t step) {
    return (vf){ vld1q_f32(p), vld1q_f32(p + step) };
}

static inline void vf_transpose_4x4(float32x4_t v[4]) {
    const float32x4_t ab_lo = vzip1q_f32(v[0], v[1]), ab_hi = vzip2q_f32(v[0], v[1]);
    const float32x4_t cd_lo = vzip1q_f32(v[2], v[3]), cd_hi = vzip2q_f32(v[2], v[3]);
    v[0] = vcombine_f32(vget_low_f32(ab_lo), vget_low_f32(cd_lo));
    v[1] = vcombine_f32(vget_high_f32(ab_lo), vget_high_f32(cd_lo));
    v[2] = vcombine_f32(vget_low_f32(ab_hi), vget_low_f32(cd_hi));
    v[3] = vcombine_f32(vget_high_f32(ab_hi), vget_high_f32(cd_hi));
}
static inline void vf_transpose_quads(vf v[4]) {
    float32x4_t lo[4] = { v[0].lo, v[1].lo, v[2].lo, v[3].lo };
    float32x4_t hi[4] = { v[0].hi, v[1].hi, v[2].hi, v[3].hi };
    vf_transpose_4x4(lo);
    vf_transpose_4x4(hi);
    for (int i = 0; i < 4; i++) v[i] = (vf){ lo[i], hi[i] };
}

#endif
