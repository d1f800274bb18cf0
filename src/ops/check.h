/* check.h - what an operator refuses that no column of its row says: CHECKED(op) in ops.def. Sizes
 * are complete and none of them is negative when these are called. */
#ifndef MN_OPS_CHECK_H
#define MN_OPS_CHECK_H

#include "mneme.h"

/* Branches of a hyper call, and a mixing parameter for every lag a query can see. */
mn_status mn_check_hyper(const void *args);

/* Groups cut the width evenly. */
mn_status mn_check_rms_norm_gated(const void *args);

/* Rows of keys are whole steps of all heads; value heads are a multiple of key heads. */
mn_status mn_check_delta_product(const void *args);
mn_status mn_check_delta_gva(const void *args);

#endif
