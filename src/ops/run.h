/* run.h - runs an operator: validate, plan, take memory, hand the items to the threads. */
#ifndef MN_OPS_RUN_H
#define MN_OPS_RUN_H

#include "kernels/moebius_span.h"
#include "ops/context.h"
#include "ops/describe.h"

/* `args` is the op's argument struct as a caller filled it; MN_FORWARD or MN_BACKWARD. */
mn_status mn_op_run(mn_context *context, mn_op_id op, mn_pass pass, const void *args);

/* Forward over `n` argument structs of `step` bytes each, on the CPU: independent calls, each with
 * the bits it would have alone, whose items the threads share out together. */
mn_status mn_op_run_rows(mn_context *context, mn_op_id op, const void *rows, size_t step,
                         int64_t n);

/* What the tokens of a call do to the state that enters them, or to its gradient, on the CPU:
 * fills args->out and args->good. Results of the operator itself are not touched. */
mn_status mn_op_run_span(mn_context *context, mn_span_id id, const mn_moebius_span_args *args);

/* Bytes of work space such a call takes, without running it; pointers of `args` are only compared
 * with NULL. */
mn_status mn_op_workspace(mn_context *context, mn_op_id op, mn_pass pass, const void *args,
                          size_t *bytes);

/* Where an operator's counts of tokens seen before are `counts` of the host, the device's take
 * their place in `args`; false where they are others. */
bool mn_op_find_counts(mn_op_id op, void *args, const mn_borders *counts);

/* Whether this build has a CUDA kernel for that pass of an operator. */
bool mn_op_has_cuda(mn_op_id op, mn_pass pass);

/* Whether the operator keeps results of its parts, and in a bf16 call rounds them. Its error is
 * then that of a chain of roundings, and it is judged by how far the exact result moves when every
 * input moves by one rounding. */
bool mn_op_rounds_between(mn_op_id op);

/* The kernel that would serve this call, for tables; NULL for a composed op. */
const mn_kernel *mn_op_kernel(const mn_context *context, mn_op_id op, mn_pass pass, mn_dtype dtype);

#endif
