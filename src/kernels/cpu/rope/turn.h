/* turn.h - rotary positions: pair j of a row turns by pos base^(-2j/K).
 *
 * Angles are sums: position 64 a + b turns by the anchor's angle and then by the step's, and both
 * have their cosine and sine in a table of doubles. So a long sequence needs few calls of libm,
 * none in an inner loop, and the angle at position 65,535 is as sharp as at 1. */
#ifndef MN_KERNELS_CPU_ROPE_TURN_H
#define MN_KERNELS_CPU_ROPE_TURN_H

#include <math.h>
#include <stdbool.h>
#include <stdint.h>

/* Kinds as rope numbers them; attention's rope_kind is one more, 0 being none. */
enum { TURN_HALF, TURN_PAIRS };
enum { TURN_STEPS = 64, TURN_ROWS = 16 };    // positions per anchor; table rows filled by one item

typedef struct turn_table {
    double *at;              // rows of (K/2 cosines, K/2 sines): the steps, then the anchors
    int64_t n_steps;         // 64, or fewer when all positions are
    int64_t K, pos0;         // the first anchor stands at pos0
    double base;
    int kind;
} turn_table;

static inline int64_t turn_steps(int64_t length) {
    return length < TURN_STEPS ? length : TURN_STEPS;
}

/* Rows of the table for positions pos0 .. pos0 + length - 1. */
static inline int64_t turn_table_rows(int64_t length) {
    return turn_steps(length) + (length + TURN_STEPS - 1) / TURN_STEPS;
}

static inline void turn_fill_row(const turn_table *table, int64_t row) {
    const int64_t half = table->K / 2, n = table->n_steps;
    const int64_t pos = row < n ? row : table->pos0 + (row - n) * TURN_STEPS;
    double *c = table->at + row * table->K, *s = c + half;
    for (int64_t j = 0; j < half; j++) {
        const double angle = (double)pos * pow(table->base, -2.0 * (double)j / (double)table->K);
        c[j] = cos(angle);
        s[j] = sin(angle);
    }
}

/* y = x turned to position pos0 + pos, or back when `back`, which is also the adjoint; y may be
 * x. */
static inline void turn_row(float *y, const float *x, const turn_table *table, int64_t pos,
                            bool back) {
    const int64_t half = table->K / 2;
    const double *c0 = table->at + (table->n_steps + pos / TURN_STEPS) * table->K, *s0 = c0 + half;
    const double *c1 = table->at + pos % TURN_STEPS * table->K, *s1 = c1 + half;
    const int64_t step = table->kind == TURN_HALF ? 1 : 2;
    const int64_t other = table->kind == TURN_HALF ? half : 1;
    const double sign = back ? -1.0 : 1.0;
    for (int64_t j = 0; j < half; j++) {
        const float c = (float)(c0[j] * c1[j] - s0[j] * s1[j]);
        const float s = (float)(sign * (s0[j] * c1[j] + c0[j] * s1[j]));
        const float x0 = x[j * step], x1 = x[j * step + other];
        y[j * step] = c * x0 - s * x1;
        y[j * step + other] = s * x0 + c * x1;
    }
}

#endif
