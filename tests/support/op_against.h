/* op_against.h - one call of an operator on chosen numbers, on every vector target, against the
 * float64 reference under the tolerances of op_error.h. */
#ifndef TESTS_SUPPORT_OP_AGAINST_H
#define TESTS_SUPPORT_OP_AGAINST_H

#include "support/op_error.h"

/* Changes the inputs of a drawn float32 sample; may be NULL. */
typedef void op_shape_fn(mn_sample *sample);

/* Forward and backward of all targets, ref with float32 storage among them. */
void op_against_reference(op_case c, op_shape_fn *shape);

/* The same where float32 arrays on the way lose more than the inputs do: tolerances are at least
 * `arrays` times the usual factors times how far the float64 result moves when the state is rounded
 * to float32 at every 32nd token. `arrays` counts the state and whatever else is held in float32
 * and amplified as the state is. No optional state may be absent, and there is one sequence. */
void op_against_rounded_states(op_case c, op_shape_fn *shape, int arrays);

/* Forward again token by token, each state written over the one before; every state must be an
 * optional input of the case. */
void op_steps_against_reference(op_case c, op_shape_fn *shape);

/* Sets every number of tensor `name`, or those of token t, to x. */
void op_fill(mn_sample *sample, const char *name, double x);
void op_fill_token(mn_sample *sample, const char *name, int64_t t, double x);

/* Element i of the tensor called `name`. */
double op_at(mn_sample *sample, const char *name, int64_t i);

#endif
