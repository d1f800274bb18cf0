/* turn.h - rotary positions on one row: pair j turns by pos base^(-2j/K). */
#ifndef MN_KERNELS_REF_TURN_H
#define MN_KERNELS_REF_TURN_H

#include <math.h>

#include "kernels/ref/ref.h"

/* Kinds as rope numbers them; attention's rope_kind is one more, 0 being none. */
enum { TURN_HALF, TURN_PAIRS };

/* y = x turned forward (direction 1) or back (-1, which is also the adjoint); y may be x. */
static inline void mn_ref_turn(double *y, const double *x, int64_t K, int kind, double base,
                               int64_t pos, int direction) {
    for (int64_t j = 0; j < K / 2; j++) {
        const int64_t first = kind == TURN_HALF ? j : 2 * j;
        const int64_t second = kind == TURN_HALF ? j + K / 2 : 2 * j + 1;
        const double angle = (double)pos * pow(base, -2.0 * (double)j / (double)K);
        const double c = cos(angle), s = direction * sin(angle), x0 = x[first], x1 = x[second];
        y[first] = c * x0 - s * x1;
        y[second] = s * x0 + c * x1;
    }
}

#endif
