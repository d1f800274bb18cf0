/* delta_rounded.h - the delta rule over chunks, evaluated in float64 with bf16 factors: what bf16
 * itself costs, which a kernel for it may lose twice. */
#ifndef TESTS_SUPPORT_DELTA_ROUNDED_H
#define TESTS_SUPPORT_DELTA_ROUNDED_H

#include "support/op_case.h"

/* Results and gradients of `sample`, in float64, with inputs drawn. `rounded`: every factor of a
 * product is rounded to bf16; else it is delta itself. */
void delta_run_rounded(mn_sample *sample, const op_case *c, bool rounded);

#endif
