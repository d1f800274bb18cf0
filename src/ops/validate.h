/* validate.h - checks a call and completes its views. */
#ifndef MN_OPS_VALIDATE_H
#define MN_OPS_VALIDATE_H

#include "ops/describe.h"

/* Checks the argument struct `args` of `op` and fills what callers may leave out: strides, J, L,
 * and R of the Bayesian operators. `args` is the library's own copy. The message names the
 * argument. Nothing is written to the caller's memory. */
/* The same without looking at any tensor's numbers, for planning. */
mn_status mn_validate_sizes(mn_op_id op, void *args, bool backward);

mn_status mn_validate(mn_op_id op, void *args, bool backward);

#endif
