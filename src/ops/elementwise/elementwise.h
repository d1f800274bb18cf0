/* elementwise.h - runs elementwise jobs (kernels/elementwise.h) where a context's operators run. */
#ifndef MN_OPS_ELEMENTWISE_H
#define MN_OPS_ELEMENTWISE_H

#include "kernels/elementwise.h"
#include "ops/context.h"

/* How the CPU does each job; `backend` is a mn_context, and no job needs space. */
const mn_elementwise_fn *mn_elementwise_cpu(void);

/* Runs a job that needs no work space on the context's CPU or device; nothing while the context
 * plans. `params` is the struct of the job. */
mn_status mn_elementwise_run(mn_context *context, mn_elementwise_id id, const void *params);

/* The view of rows that follow each other as operators' views say. */
static inline mn_view mn_view_of(const void *data, const int64_t stride[3], mn_dtype dtype) {
    return (mn_view){ (void *)data, dtype, { stride[0], stride[1], stride[2], 1 } };
}

#endif
