/* vec_target.h (avx512) - sixteen floats in a vector. Contract in kernels/cpu/simd/vec.h. */
#ifndef MN_KERNELS_CPU_SIMD_AVX512_VEC_TARGET_H
#define MN_KERNELS_CPU_SIMD_AVX512_VEC_TARGET_H

#include <immintrin.h>
#include <stdbool.h>
#include <stdint.h>

#if !defined(__AVX512F__) || !defined(__AVX512DQ__) || !defined(__AVX512VL__) || !defined(__FMA__)
#error "this target needs -mavx512f -mavx512dq -mavx512bw -mavx512vl -mfma"
#endif

#define MN_VW 16

typedef __m512 vf;
typedef __m512i vi;
typedef __mmask16 vm;

typedef vf vn;
static inline vn vf_as_vn(vf a) { return a; }
static inline vf vn_as_vf(vn a) { return a; }

static inline vf vf_zero(void) { return _mm512_setzero_ps(); }
static inline vf vf_set1(float x) { return _mm512_set1_ps(x); }
static inline vi vi_set1(int32_t x) { return _mm512_set1_epi32(x); }

static inline vm vm_first(int n) {
    const vi lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    return _mm512_cmplt_epi32_mask(lane, _mm512_set1_epi32(n));
}
static inline vm vm_and(vm a, vm b) { return (vm)(a & b); }
static inline vm vm_or(vm a, vm b) { return (vm)(a | b); }
static inline vm vm_not(vm a) { return (vm)~a; }
static inline bool vm_any(vm a) { return a != 0; }

static inline vf vf_load(const float *p) { return _mm512_loadu_ps(p); }
static inline void vf_store(float *p, vf v) { _mm512_storeu_ps(p, v); }
static inline vf vf_load_n(const float *p, int n) { return _mm512_maskz_loadu_ps(vm_first(n), p); }
static inline void vf_store_n(float *p, vf v, int n) { _mm512_mask_storeu_ps(p, vm_first(n), v); }

static inline vi vi_load(const void *p) { return _mm512_loadu_si512(p); }
static inline vi vi_load_i8(const int8_t *p) {
    return _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p));
}

static inline vi vi_from_vf(vf a) { return _mm512_cvtps_epi32(a); }
static inline vf vf_from_vi(vi a) { return _mm512_cvtepi32_ps(a); }
static inline vi vf_as_vi(vf a) { return _mm512_castps_si512(a); }
static inline vf vi_as_vf(vi a) { return _mm512_castsi512_ps(a); }

static inline vi vi_add(vi a, vi b) { return _mm512_add_epi32(a, b); }
static inline vi vi_sub(vi a, vi b) { return _mm512_sub_epi32(a, b); }
static inline vi vi_and(vi a, vi b) { return _mm512_and_si512(a, b); }
static inline vi vi_or(vi a, vi b) { return _mm512_or_si512(a, b); }
static inline vi vi_shl(vi a, int bits) { return _mm512_slli_epi32(a, (unsigned)bits); }
static inline vi vi_srl(vi a, int bits) { return _mm512_srli_epi32(a, (unsigned)bits); }
static inline vi vi_shr(vi a, int bits) { return _mm512_srai_epi32(a, (unsigned)bits); }

/* A permutation looks at the lowest 4 bits of each lane only. */
static inline vf vf_from_bits4(vi a) {
    const vf table = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    return _mm512_permutexvar_ps(a, table);
}

static inline vf vf_add(vf a, vf b) { return _mm512_add_ps(a, b); }
static inline vf vf_sub(vf a, vf b) { return _mm512_sub_ps(a, b); }
static inline vf vf_mul(vf a, vf b) { return _mm512_mul_ps(a, b); }
static inline vf vf_div(vf a, vf b) { return _mm512_div_ps(a, b); }
static inline vf vf_sqrt(vf a) { return _mm512_sqrt_ps(a); }
static inline vf vf_fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
static inline vf vf_fnma(vf a, vf b, vf c) { return _mm512_fnmadd_ps(a, b, c); }
static inline vf vf_neg(vf a) { return _mm512_xor_ps(a, _mm512_set1_ps(-0.0f)); }
static inline vf vf_abs(vf a) { return _mm512_andnot_ps(_mm512_set1_ps(-0.0f), a); }
static inline vf vf_min(vf a, vf b) { return _mm512_min_ps(a, b); }
static inline vf vf_max(vf a, vf b) { return _mm512_max_ps(a, b); }

static inline vm vf_lt(vf a, vf b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
static inline vm vf_le(vf a, vf b) { return _mm512_cmp_ps_mask(a, b, _CMP_LE_OQ); }
static inline vm vf_gt(vf a, vf b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ); }
static inline vm vf_ge(vf a, vf b) { return _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ); }
static inline vm vf_eq(vf a, vf b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }
static inline vm vf_nan(vf a) { return _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q); }
static inline vf vf_select(vm m, vf a, vf b) { return _mm512_mask_blend_ps(m, b, a); }

static inline vf vf_round(vf a) {
    return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

#define MN_TARGET_HAS_LDEXP
static inline vf vf_ldexp(vf v, vf n) { return _mm512_scalef_ps(v, n); }

static inline float vf_sum(vf v) {
    const __m256 a = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
    const __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    const __m128 c = _mm_add_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_add_ss(c, _mm_movehdup_ps(c)));
}

static inline float vf_max_lanes(vf v) {
    const __m256 a = _mm256_max_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
    const __m128 b = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    const __m128 c = _mm_max_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_max_ss(c, _mm_movehdup_ps(c)));
}

#define MN_VD 8
typedef __m512d vd;
static inline vd vd_load(const double *p) { return _mm512_loadu_pd(p); }
static inline vd vd_load_floats(const float *p) { return _mm512_cvtps_pd(_mm256_loadu_ps(p)); }
static inline void vd_store(double *p, vd v) { _mm512_storeu_pd(p, v); }
static inline vd vd_set1(double x) { return _mm512_set1_pd(x); }
static inline vd vd_fnma(vd a, vd b, vd c) { return _mm512_fnmadd_pd(a, b, c); }

static inline vf vf_unknown(vf a) {
    __asm__ volatile("" : "+v"(a));
    return a;
}

static inline vf vf_load_quads(const float *p, int64_t step) {
    vf v = _mm512_castps128_ps512(_mm_loadu_ps(p));
    v = _mm512_insertf32x4(v, _mm_loadu_ps(p + step), 1);
    v = _mm512_insertf32x4(v, _mm_loadu_ps(p + 2 * step), 2);
    return _mm512_insertf32x4(v, _mm_loadu_ps(p + 3 * step), 3);
}

static inline void vf_transpose_quads(vf v[4]) {
    const vf ab_lo = _mm512_unpacklo_ps(v[0], v[1]), ab_hi = _mm512_unpackhi_ps(v[0], v[1]);
    const vf cd_lo = _mm512_unpacklo_ps(v[2], v[3]), cd_hi = _mm512_unpackhi_ps(v[2], v[3]);
    v[0] = _mm512_shuffle_ps(ab_lo, cd_lo, _MM_SHUFFLE(1, 0, 1, 0));
    v[1] = _mm512_shuffle_ps(ab_lo, cd_lo, _MM_SHUFFLE(3, 2, 3, 2));
    v[2] = _mm512_shuffle_ps(ab_hi, cd_hi, _MM_SHUFFLE(1, 0, 1, 0));
    v[3] = _mm512_shuffle_ps(ab_hi, cd_hi, _MM_SHUFFLE(3, 2, 3, 2));
}

#endif
