/* f16.h - IEEE half precision in host memory. */
#ifndef MN_BASE_F16_H
#define MN_BASE_F16_H

#include <math.h>
#include <stdint.h>
#include <string.h>

static inline float mn_f16_to_float(uint16_t x) {
    const int exponent = x >> 10 & 31, fraction = x & 1023;
    const float sign = x >> 15 ? -1.0f : 1.0f;
    if (exponent == 31) return fraction ? NAN : sign * INFINITY;
    if (exponent == 0) return sign * ldexpf((float)fraction, -24);
    return sign * ldexpf((float)(fraction + 1024), exponent - 25);
}

/* Rounds to the nearest, ties to even; NaN stays NaN, what is too large becomes infinite. */
static inline uint16_t mn_f16_from_float(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    const uint16_t sign = (uint16_t)(bits >> 16 & 0x8000);
    const float size = fabsf(x);
    if (x != x) return (uint16_t)(sign | 0x7E00);
    if (size >= 65520.0f) return (uint16_t)(sign | 0x7C00);
    if (size < 6.103515625e-05f) return (uint16_t)(sign | (uint16_t)rintf(ldexpf(size, 24)));
    bits &= 0x7FFFFFFF;
    bits += 0xFFF + (bits >> 13 & 1);
    return (uint16_t)(sign | (uint16_t)((bits - (112u << 23)) >> 13));
}

#endif
