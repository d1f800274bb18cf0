/* grouped.h - value heads that share query and key heads. */
#ifndef MN_OPS_GROUPED_H
#define MN_OPS_GROUPED_H

#include "ops/context.h"
#include "ops/describe.h"

/* Whether heads of this call share those of fields with axis J. `args` is validated. */
bool mn_op_is_grouped(mn_op_id op, const void *args);

typedef mn_status (*mn_grouped_fn)(mn_context *context, mn_op_id op, void *args);

/* Whether a kernel of the device adds up gradients of shared heads by itself. */
bool mn_op_folds_on_device(mn_op_id op, const void *args);

/* Runs `run` on `args`, with gradients of shared heads written one for each of the H heads, and
 * adds them up. */
mn_status mn_grouped_backward(mn_context *context, mn_op_id op, void *args, mn_grouped_fn run);

#endif
