/* vec_target.h (avx2) - eight floats in a vector. Contract in kernels/cpu/simd/vec.h. */
#ifndef MN_KERNELS_CPU_SIMD_AVX2_VEC_TARGET_H
#define MN_KERNELS_CPU_SIMD_AVX2_VEC_TARGET_H

#include <immintrin.h>
#include <stdbool.h>
#include <stdint.h>

#if !defined(__AVX2__) || !defined(__FMA__)
#error "this target needs -mavx2 -mfma"
#endif

#define MN_VW 8

typedef __m256 vf;
typedef __m256i vi;
typedef __m256 vm;      // all bits of a true lane are set

typedef vf vn;
static inline vn vf_as_vn(vf a) { return a; }
static inline vf vn_as_vf(vn a) { return a; }

static inline vf vf_zero(void) { return _mm256_setzero_ps(); }
static inline vf vf_set1(float x) { return _mm256_set1_ps(x); }
static inline vi vi_set1(int32_t x) { return _mm256_set1_epi32(x); }

static inline vm vm_first(int n) {
    const vi lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(n), lane));
}
static inline vm vm_and(vm a, vm b) { return _mm256_and_ps(a, b); }
static inline vm vm_or(vm a, vm b) { return _mm256_or_ps(a, b); }
static inline vm vm_not(vm a) {
    return _mm256_xor_ps(a, _mm256_castsi256_ps(_mm256_set1_epi32(-1)));
}
static inline bool vm_any(vm a) { return _mm256_movemask_ps(a) != 0; }

static inline vf vf_load(const float *p) { return _mm256_loadu_ps(p); }
static inline void vf_store(float *p, vf v) { _mm256_storeu_ps(p, v); }
static inline vf vf_load_n(const float *p, int n) {
    return _mm256_maskload_ps(p, _mm256_castps_si256(vm_first(n)));
}
/* By halves, pairs and single floats: a masked store is twenty micro-operations on some processors
 * that have this target, ten times the time of a whole vector. */
static inline void vf_store_n(float *p, vf v, int n) {
    if (n >= MN_VW) {
        _mm256_storeu_ps(p, v);
        return;
    }
    __m128 part = _mm256_castps256_ps128(v);
    if (n >= 4) {
        _mm_storeu_ps(p, part);
        part = _mm256_extractf128_ps(v, 1);
        p += 4;
    }
    if (n & 2) {
        _mm_storel_pi((__m64 *)(void *)p, part);
        part = _mm_movehl_ps(part, part);
        p += 2;
    }
    if (n & 1) _mm_store_ss(p, part);
}

static inline vi vi_load(const void *p) { return _mm256_loadu_si256(p); }
static inline vi vi_load_i8(const int8_t *p) {
    return _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p));
}

static inline vi vi_from_vf(vf a) { return _mm256_cvtps_epi32(a); }
static inline vf vf_from_vi(vi a) { return _mm256_cvtepi32_ps(a); }
static inline vi vf_as_vi(vf a) { return _mm256_castps_si256(a); }
static inline vf vi_as_vf(vi a) { return _mm256_castsi256_ps(a); }

static inline vi vi_add(vi a, vi b) { return _mm256_add_epi32(a, b); }
static inline vi vi_sub(vi a, vi b) { return _mm256_sub_epi32(a, b); }
static inline vi vi_and(vi a, vi b) { return _mm256_and_si256(a, b); }
static inline vi vi_or(vi a, vi b) { return _mm256_or_si256(a, b); }
static inline vi vi_shl(vi a, int bits) { return _mm256_slli_epi32(a, bits); }
static inline vi vi_srl(vi a, int bits) { return _mm256_srli_epi32(a, bits); }
static inline vi vi_shr(vi a, int bits) { return _mm256_srai_epi32(a, bits); }

static inline vf vf_from_bits4(vi a) { return vf_from_vi(vi_and(a, vi_set1(15))); }

static inline vf vf_add(vf a, vf b) { return _mm256_add_ps(a, b); }
static inline vf vf_sub(vf a, vf b) { return _mm256_sub_ps(a, b); }
static inline vf vf_mul(vf a, vf b) { return _mm256_mul_ps(a, b); }
static inline vf vf_div(vf a, vf b) { return _mm256_div_ps(a, b); }
static inline vf vf_sqrt(vf a) { return _mm256_sqrt_ps(a); }
static inline vf vf_fma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
static inline vf vf_fnma(vf a, vf b, vf c) { return _mm256_fnmadd_ps(a, b, c); }
static inline vf vf_neg(vf a) { return _mm256_xor_ps(a, _mm256_set1_ps(-0.0f)); }
static inline vf vf_abs(vf a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
static inline vf vf_min(vf a, vf b) { return _mm256_min_ps(a, b); }
static inline vf vf_max(vf a, vf b) { return _mm256_max_ps(a, b); }

static inline vm vf_lt(vf a, vf b) { return _mm256_cmp_ps(a, b, _CMP_LT_OQ); }
static inline vm vf_le(vf a, vf b) { return _mm256_cmp_ps(a, b, _CMP_LE_OQ); }
static inline vm vf_gt(vf a, vf b) { return _mm256_cmp_ps(a, b, _CMP_GT_OQ); }
static inline vm vf_ge(vf a, vf b) { return _mm256_cmp_ps(a, b, _CMP_GE_OQ); }
static inline vm vf_eq(vf a, vf b) { return _mm256_cmp_ps(a, b, _CMP_EQ_OQ); }
static inline vm vf_nan(vf a) { return _mm256_cmp_ps(a, a, _CMP_UNORD_Q); }
static inline vf vf_select(vm m, vf a, vf b) { return _mm256_blendv_ps(b, a, m); }

static inline vf vf_round(vf a) {
    return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

static inline float vf_sum(vf v) {
    const __m128 b = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    const __m128 c = _mm_add_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_add_ss(c, _mm_movehdup_ps(c)));
}

static inline float vf_max_lanes(vf v) {
    const __m128 b = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    const __m128 c = _mm_max_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_max_ss(c, _mm_movehdup_ps(c)));
}

#define MN_VD 4
typedef __m256d vd;
static inline vd vd_load(const double *p) { return _mm256_loadu_pd(p); }
static inline vd vd_load_floats(const float *p) { return _mm256_cvtps_pd(_mm_loadu_ps(p)); }
static inline void vd_store(double *p, vd v) { _mm256_storeu_pd(p, v); }
static inline vd vd_set1(double x) { return _mm256_set1_pd(x); }
static inline vd vd_fnma(vd a, vd b, vd c) { return _mm256_fnmadd_pd(a, b, c); }

static inline vf vf_unknown(vf a) {
    __asm__ volatile("" : "+v"(a));
    return a;
}

static inline vf vf_load_quads(const float *p, int64_t step) {
    const vf v = _mm256_castps128_ps256(_mm_loadu_ps(p));
    return _mm256_insertf128_ps(v, _mm_loadu_ps(p + step), 1);
}

static inline void vf_transpose_quads(vf v[4]) {
    const vf ab_lo = _mm256_unpacklo_ps(v[0], v[1]), ab_hi = _mm256_unpackhi_ps(v[0], v[1]);
    const vf cd_lo = _mm256_unpacklo_ps(v[2], v[3]), cd_hi = _mm256_unpackhi_ps(v[2], v[3]);
    v[0] = _mm256_shuffle_ps(ab_lo, cd_lo, _MM_SHUFFLE(1, 0, 1, 0));
    v[1] = _mm256_shuffle_ps(ab_lo, cd_lo, _MM_SHUFFLE(3, 2, 3, 2));
    v[2] = _mm256_shuffle_ps(ab_hi, cd_hi, _MM_SHUFFLE(1, 0, 1, 0));
    v[3] = _mm256_shuffle_ps(ab_hi, cd_hi, _MM_SHUFFLE(3, 2, 3, 2));
}

#endif
