/* op_visit.h - one test per operator, and the targets to run them on. */
#ifndef TESTS_SUPPORT_OP_WALK_H
#define TESTS_SUPPORT_OP_WALK_H

#include "kernels/dispatch.h"
#include "ops/run.h"
#include "support/check.h"
#include "support/op_case.h"

/* Runs `test` for every operator as tests called by its name; returns the number that failed.
 * argv[1], when there is one, names the only operator wanted. */
int op_visit(const char *title, void (*test)(mn_op_id op), int argc, char **argv);

/* A target with a storage type: ref f64, ref f32, and each vector target of this machine. */
typedef struct op_target {
    const char *name;
    mn_dtype dtype;
} op_target;
int op_targets(op_target out[MN_TARGET_COUNT + 1]);

/* A context that lives until the program ends. */
mn_context *op_context(const char *target, int n_threads);

/* Runs one pass; a status other than MN_OK fails the test at once. */
void op_run(mn_context *context, mn_sample *sample, mn_pass pass, const op_case *c);

/* Forward, then backward where the operator has one. */
void op_run_both(mn_context *context, mn_sample *sample, const op_case *c);

bool op_has_backward(mn_op_id op);

#endif
