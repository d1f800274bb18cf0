/* bf16.h - bfloat16 in host memory: the upper half of a float32. */
#ifndef MN_BASE_BF16_H
#define MN_BASE_BF16_H

#include <stdint.h>
#include <string.h>

static inline float mn_bf16_to_float(uint16_t x) {
    const uint32_t bits = (uint32_t)x << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* Rounds to the nearest, ties to even; NaN stays NaN. */
static inline uint16_t mn_bf16_from_float(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    if (x != x) return (uint16_t)(bits >> 16 | 0x40);
    return (uint16_t)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

/* What is left of a number that is stored as bf16. */
static inline float mn_bf16_round(double x) {
    return mn_bf16_to_float(mn_bf16_from_float((float)x));
}

#endif
