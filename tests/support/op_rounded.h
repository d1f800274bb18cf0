/* op_rounded.h - what bf16 costs an operator, by the rule for bf16 itself: the same formula in
 * float64, its inputs, results and what passes between its parts rounded to bf16. Written down for
 * ccq_read, conv_unit and the delta rule over chunks, whatever its decays (delta_rounded.h). */
#ifndef TESTS_SUPPORT_OP_ROUNDED_H
#define TESTS_SUPPORT_OP_ROUNDED_H

#include "support/op_case.h"

/* Evaluates `sample` (float64, inputs already rounded) that way, forward and back; false for an
 * operator that is not written down, which is then left as it is. */
bool op_run_rounded(mn_sample *sample, const op_case *c);

#endif
