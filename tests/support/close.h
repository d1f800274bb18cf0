/* close.h - relative distance of two arrays of samples, as a check. */
#ifndef TESTS_SUPPORT_CLOSE_H
#define TESTS_SUPPORT_CLOSE_H

#include "ops/sample.h"
#include "support/check.h"

/* rms(x - r) <= tolerance rms(r) over `count` numbers of two samples, which may differ in type;
 * both finite. `what` and `target` name them in the message. */
bool check_close(const char *what, const char *target, const mn_sample *x_of, const void *x,
                 const mn_sample *r_of, const void *r, int64_t count, double tolerance);

/* Every result (or gradient, when `gradients`) of `got` against that of `want`. */
bool check_samples_close(const char *what, const char *target, const mn_sample *got,
                         const mn_sample *want, bool gradients, double tolerance);

#endif
