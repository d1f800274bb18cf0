/* vector_targets.h - the vector targets that this build has, for code that sees several.
 *
 * MN_VECTOR_TARGETS(X) calls X(id, name) for each, a row of targets.def. Whoever includes this is
 * compiled with MN_HAVE_id (cmake/Targets.cmake); prototypes of functions that exist once a target
 * come through per_target.h. */
#ifndef MN_KERNELS_CPU_SIMD_VECTOR_TARGETS_H
#define MN_KERNELS_CPU_SIMD_VECTOR_TARGETS_H

#if MN_HAVE_AVX2
#define MN_IF_AVX2(X) X(AVX2, avx2)
#else
#define MN_IF_AVX2(X)
#endif
#if MN_HAVE_AVX512
#define MN_IF_AVX512(X) X(AVX512, avx512)
#else
#define MN_IF_AVX512(X)
#endif
#if MN_HAVE_NEON
#define MN_IF_NEON(X) X(NEON, neon)
#else
#define MN_IF_NEON(X)
#endif
#define MN_VECTOR_TARGETS(X) MN_IF_AVX2(X) MN_IF_AVX512(X) MN_IF_NEON(X)

#endif
