/* quant.h - weights in 8 or 4 bits, as the kernels of a machine read them.
 *
 * W (rows, cols) is that of y = x W': a row gives one output. Along a row, `group` inputs share a
 * scale, and in 4 bits a least value too:
 *
 *   8 bits    w = scale q              q = -127 .. 127, scale float32
 *   4 bits    w = scale q + least      q = 0 .. 15,     scale and least float16
 *
 * each rounded once to float32: a product, or a fused multiply-add. That is the weight; products
 * with it have the bits of products with a float32 matrix of such numbers.
 *
 * In a CPU's memory 16 rows lie side by side, a strip. Beyond the last row and the last input there
 * are zeros:
 *
 *   8 bits    codes (strip, input, 16) int8          scales (strip, group, 16) float32
 *   4 bits    codes (strip, input / 8, 16) uint32    scales (strip, group, 16) uint32
 *             the first of 8 inputs in the lowest     scale in the lower half, least in the upper
 *             4 bits
 *
 * In a GPU's memory rows are as in files: codes (rows, row_bytes), the first of two inputs in the
 * lower 4 bits, and scales (rows, groups) of the same numbers. */
#ifndef MN_KERNELS_QUANT_H
#define MN_KERNELS_QUANT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/f16.h"
#include "base/util.h"

enum {
    MN_QUANT_STRIP = 16,
    MN_QUANT_MIN_GROUP = 32,     // groups are 32, 64, 128 or 256 inputs
    MN_QUANT_MAX_GROUP = 256,
};

typedef struct mn_quant {
    int bits;                    // 8 or 4
    int64_t rows, cols, group;
    const void *codes, *scales;
    bool misused;                // something other than a product asked for its numbers
} mn_quant;

static inline int64_t mn_quant_groups(const mn_quant *q) {
    return mn_ceil_div(q->cols, q->group);
}

/* Bytes of a row of codes in files, and in a GPU's memory, where rows begin at packs of 16. */
static inline int64_t mn_quant_file_row(const mn_quant *q) {
    return q->bits == 8 ? q->cols : mn_ceil_div(q->cols, 2);
}

static inline int64_t mn_quant_row_bytes(const mn_quant *q) {
    return mn_ceil_div(mn_quant_file_row(q), 16) * 16;
}

/* Inputs of a strip's codes, and its bytes. */
static inline int64_t mn_quant_strip_inputs(const mn_quant *q) {
    return mn_ceil_div(q->cols, 8) * 8;
}

static inline int64_t mn_quant_strip_bytes(const mn_quant *q) {
    return mn_quant_strip_inputs(q) * MN_QUANT_STRIP * q->bits / 8;
}

/* The weight of code `q` in a group of 4 bits whose scale and least value are `pair`. */
static inline float mn_quant_weight4(uint32_t pair, int q) {
    return fmaf(mn_f16_to_float((uint16_t)pair), (float)q, mn_f16_to_float((uint16_t)(pair >> 16)));
}

/* Weight (row, col) in a CPU's memory. */
static inline float mn_quant_weight(const mn_quant *q, int64_t row, int64_t col) {
    const int64_t strip = row / MN_QUANT_STRIP, lane = row % MN_QUANT_STRIP;
    const int64_t g = (strip * mn_quant_groups(q) + col / q->group) * MN_QUANT_STRIP + lane;
    const unsigned char *codes = (const unsigned char *)q->codes + strip * mn_quant_strip_bytes(q);
    if (q->bits == 8) {
        return ((const float *)q->scales)[g] *
               (float)((const int8_t *)codes)[col * MN_QUANT_STRIP + lane];
    }
    const uint32_t word = ((const uint32_t *)codes)[col / 8 * MN_QUANT_STRIP + lane];
    return mn_quant_weight4(((const uint32_t *)q->scales)[g], word >> (col % 8 * 4) & 15);
}

#endif
