/* deviation.h - how far numbers lie from their reference, and how far roundings to bf16 may carry
 * the largest of them.
 *
 * u = 2^-8. A result stored in bf16 is off by u of itself at most. What is rounded on the way to it
 * adds many small errors, which together are close to normal; the largest of n of these is near
 * sqrt(2 ln n) of their rms. So the law of the largest, with the rms that was measured:
 *
 *   |x_i - r_i| <= u scale_i + sqrt(2 ln n) rms(x - r) / rms(r) size_i
 *
 * scale_i is the largest number of the row, size_i its rms, both the tensor's rms where that is
 * more (tests/golden/README.md shows what follows from it). */
#ifndef MN_BASE_DEVIATION_H
#define MN_BASE_DEVIATION_H

#include <stdint.h>

typedef struct mn_deviation {
    double rms, of_rms;    // of the reference, and of the error, as a share of it where it has one
    double worst, share;   // the largest error: as it is, and of its row's scale
    double of_law;         // the largest share of what the law allows
    int64_t at;            // the number that is off by `share`
} mn_deviation;

/* What rounding once to bf16 is off by at most, as a share of the number. */
#define MN_BF16_UNIT (1.0 / 256.0)

/* Of `count` numbers in rows of `width`. Numbers of the reference that are infinite are not off
 * where x is the same, and count for no scale. */
mn_deviation mn_deviation_of(const double *x, const double *r, int64_t count, int64_t width);

#endif
