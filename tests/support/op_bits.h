/* op_bits.h - what must be equal bit for bit, wherever it is computed. */
#ifndef TESTS_SUPPORT_OP_BITS_H
#define TESTS_SUPPORT_OP_BITS_H

#include "support/op_case.h"

/* Which tensors of a sample are compared: all; results and gradients of single tokens and of single
 * states, not those shared by all. */
typedef bool op_bits_filter(const mn_sample *s, const mn_sample_tensor *t);
bool op_bits_everything(const mn_sample *s, const mn_sample_tensor *t);
bool op_bits_per_sequence(const mn_sample *s, const mn_sample_tensor *t);

/* `what` and `target` say what differs where. */
void op_check_same(const char *what, const char *target, const mn_sample *a, const mn_sample *b,
                   op_bits_filter *wanted, const op_case *c);

/* Runs an opened sample, forward and back where that is there. */
typedef void op_bits_run(void *how, mn_sample *sample, const op_case *c);

/* A call of several sequences, packed or the rows of a batch, against its sequences one by one;
 * `packed` is opened and has not run. */
void op_check_packed(const char *target, mn_sample *packed, const op_case *c, op_bits_run *run,
                     void *how);

#endif
