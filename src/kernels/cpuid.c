/* cpuid.c - what the processor and the operating system support. */
#include "kernels/cpuid.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <stdint.h>

/* XCR0, the register sets the operating system saves: bits 1, 2 for SSE and AVX, 5 to 7 for
 * AVX-512. */
static uint64_t saved_register_sets(void) {
    unsigned a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_OSXSAVE)) return 0;
    uint32_t low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (uint64_t)high << 32 | low;
}

bool mn_cpu_has_avx2(void) {
    unsigned a, b, c, d;
    if ((saved_register_sets() & 0x6) != 0x6) return false;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_FMA)) return false;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & bit_AVX2);
}

bool mn_cpu_has_avx512(void) {
    const unsigned needed = bit_AVX512F | bit_AVX512BW | bit_AVX512DQ | bit_AVX512VL;
    unsigned a, b, c, d;
    if (!mn_cpu_has_avx2() || (saved_register_sets() & 0xe6) != 0xe6) return false;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & needed) == needed;
}

#else

bool mn_cpu_has_avx2(void) {
    return false;
}

bool mn_cpu_has_avx512(void) {
    return false;
}

#endif

bool mn_cpu_has_neon(void) {
#if defined(__aarch64__)
    return true;
#else
    return false;
#endif
}
