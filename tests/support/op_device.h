/* op_device.h - an operator's call on a GPU. */
#ifndef TESTS_SUPPORT_OP_DEVICE_H
#define TESTS_SUPPORT_OP_DEVICE_H

#include "support/op_case.h"

/* op_visit with `*gpu` open meanwhile; NULL, and a line that says why, where there is none. */
int op_visit_device(mn_context **gpu, const char *title, void (*test)(mn_op_id op), int argc,
                  char **argv);

/* Forward, and backward where kernels have it, in `dtype`; results and gradients into `got`. */
void op_run_device(mn_context *gpu, mn_sample *got, const op_case *c, mn_dtype dtype);

/* Forward only. */
void op_step_device(mn_context *gpu, mn_sample *got, const op_case *c, mn_dtype dtype);

/* Whether kernels refuse this form of the operator, as they do a layout of hyper; says so. */
bool op_is_refused(mn_context *gpu, op_case c);

#endif
