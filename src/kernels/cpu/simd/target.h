/* target.h - the name a function has in the vector target it is compiled for.
 *
 * Files in kernels/cpu are written once and compiled once per target with -DMN_TARGET=avx2,
 * avx512 or neon and that target's flags. MN_T(mn_gemm) is mn_gemm_avx2 in one object,
 * mn_gemm_avx512 in another. No intrinsics here, so code without vector flags may include it. */
#ifndef MN_KERNELS_CPU_SIMD_TARGET_H
#define MN_KERNELS_CPU_SIMD_TARGET_H

#define MN_T_PASTE(name, target) name##_##target
#define MN_T_EXPAND(name, target) MN_T_PASTE(name, target)
#define MN_T(name) MN_T_EXPAND(name, MN_TARGET)

#endif
