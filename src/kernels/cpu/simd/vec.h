/* vec.h - float vectors of the width of the target, for kernels written once (see target.h).
 *
 * kernels/cpu/simd/TARGET/vec_target.h gives, all static inline and thin:
 *
 *   MN_VW                       floats in a vector: 8 (avx2, neon), 16 (avx512)
 *   vf, vi, vm                  float vector, int32 vector, mask with one truth per lane
 *   vf_load vf_store            whole vectors, any alignment
 *   vf_load_n vf_store_n        the first n lanes, 0 <= n <= MN_VW; touch no memory beyond; load
 *                               fills the other lanes with 0
 *   vf_zero vf_set1             every lane 0; every lane x
 *   vf_add sub mul div sqrt     correctly rounded
 *   vf_fma vf_fnma              a*b + c and c - a*b, rounded once
 *   vf_neg vf_abs               sign bit only, so NaN and zero too
 *   vf_min vf_max               the SECOND argument where either is NaN
 *   vf_lt le gt ge eq nan       comparisons, false where either is NaN; nan(a): a is NaN
 *   vm_and vm_or vm_not vm_any  mask algebra; vm_any is a bool
 *   vm_first(n)                 lanes 0 .. n-1; every int is allowed, also n < 0 and n > MN_VW
 *   vf_select(m, a, b)          a where m, else b
 *   vf_sum                      sum of lanes, halves folded onto each other: (l0+l8)+(l4+l12)...
 *   vf_max_lanes                largest lane; unspecified when one is NaN
 *   vf_unknown(a)               a, of which the compiler then knows nothing
 *   vf_round                    nearest integer, ties to even
 *   vf_ldexp(v, n)              v * 2^n for 1/2 <= |v| <= 2 and integral |n| <= 200 in a vf,
 *                               rounded once also when denormal; only where an instruction does
 *                               it, and then with MN_TARGET_HAS_LDEXP (below for the others)
 *   vi_set1 add sub and or      int32 lanes
 *   vi_load vi_load_i8          whole vectors of int32 (from void *) and of int8
 *   vi_shl vi_srl vi_shr        shifts by a constant: left, right logical, right arithmetic
 *   vf_from_vi vi_from_vf       numbers: 3 <-> 3.0f (rounds ties to even)
 *   vf_from_bits4(a)            the lowest four bits of each lane as a number: 0 .. 15
 *   vf_as_vi vi_as_vf           bits
 *   vn vf_as_vn vn_as_vf        a vector's numbers for C's operators; vf itself where it has them
 *   vd MN_VD                    vector of MN_VD = MN_VW / 2 doubles: vd_load, vd_store, vd_set1 and
 *                               vd_fnma, as of floats; vd_load_floats: MN_VD floats as doubles
 *   vf_load_quads(p, step)      lanes 4g .. 4g+3 from p + g*step
 *   vf_transpose_quads(v)       for v[0..3], in each group of four lanes: a 4 x 4 transpose
 *
 * The elementary functions are in vec_math.h, included below.
 *
 * One element gives the same bits in whatever lane or tail it sits: tails go through masked loads
 * and the same vector code, never through scalar libm. That needs products and sums to be fused
 * only where vf_fma says so: build with -ffp-contract=off. */
#ifndef MN_KERNELS_CPU_SIMD_VEC_H
#define MN_KERNELS_CPU_SIMD_VEC_H

#include "kernels/cpu/simd/target.h"

#include <stdbool.h>
#include <stdint.h>

#ifndef MN_TARGET
#error "kernels/cpu is compiled once per vector target: pass -DMN_TARGET=avx2, avx512 or neon"
#endif

#define MN_VEC_QUOTE(path) #path
#define MN_VEC_EXPAND(path) MN_VEC_QUOTE(path)
#include MN_VEC_EXPAND(kernels/cpu/simd/MN_TARGET/vec_target.h)
#undef MN_VEC_QUOTE
#undef MN_VEC_EXPAND

/* Loops over tile rows and columns must vanish for their arrays to live in registers. Under
 * sanitizers they stay: compilers take minutes over the checks in hundreds of unrolled steps. */
#define MN_ALWAYS_INLINE static inline __attribute__((always_inline))
#if defined(__clang__)
#if __has_feature(address_sanitizer) || __has_feature(undefined_behavior_sanitizer)
#define MN_UNROLL _Pragma("clang loop unroll(disable)")
#else
#define MN_UNROLL _Pragma("clang loop unroll(full)")
#endif
#elif defined(__SANITIZE_ADDRESS__)
#define MN_UNROLL _Pragma("GCC unroll 1")
#else
#define MN_UNROLL _Pragma("GCC unroll 32")
#endif

/* How many lanes the vector at an index holds when `left` elements remain. */
static inline int vf_lanes(int64_t left) {
    return left < MN_VW ? (int)left : MN_VW;
}

/* v with lanes n and above set to 0; any n, as in vm_first */
static inline vf vf_keep_first(vf v, int n) {
    return vf_select(vm_first(n), v, vf_zero());
}

/* 2^n, -126 <= n <= 127 */
static inline vf vf_pow2(vi n) {
    return vi_as_vf(vi_shl(vi_add(n, vi_set1(127)), 23));
}

#ifndef MN_TARGET_HAS_LDEXP
/* In two steps, since 2^n alone may not be a float; the first is exact. */
static inline vf vf_ldexp(vf v, vf n) {
    const vi whole = vi_from_vf(n), half = vi_shr(whole, 1);
    return vf_mul(vf_mul(v, vf_pow2(half)), vf_pow2(vi_sub(whole, half)));
}
#endif

#include "kernels/cpu/simd/vec_math.h"

#endif
