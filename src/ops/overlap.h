/* overlap.h - whether tensors that a call writes share memory. */
#ifndef MN_OPS_OVERLAP_H
#define MN_OPS_OVERLAP_H

#include "ops/describe.h"

/* Fails where two results (or in backward two gradients) of validated arguments share an element.
 * Views that lie side by side in the rows of one block do not. */
mn_status mn_check_overlap(mn_op_id op, const void *args, bool backward);

#endif
