/* cpuid.h - what the processor and the operating system support. */
#ifndef MN_KERNELS_CPUID_H
#define MN_KERNELS_CPUID_H

#include <stdbool.h>

/* Both also check that the operating system saves the registers (XGETBV). */
bool mn_cpu_has_avx2(void);      // AVX2 and FMA
bool mn_cpu_has_avx512(void);    // AVX-512 F, BW, DQ, VL
bool mn_cpu_has_neon(void);      // 64-bit ARM, all of which have it

#endif
