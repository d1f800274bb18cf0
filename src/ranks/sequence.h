/* sequence.h - operators over sequences that are cut over ranks: rank r of S has tokens
 * [r T, (r + 1) T) of each of B sequences, and every rank makes the same calls in the same order.
 *
 *   keys          attention and its relatives: keys and values of the tokens before are gathered;
 *                 going back, their gradients are summed where the tokens are
 *   affine maps   every rank runs from a state of zeros and finds the map of its tokens, one gather
 *                 of (A, b) gives each its initial state, and it runs once more from there; going
 *                 back the same with A transposed
 *   tails         of convolutions: the last W - 1 tokens, from neighbour to neighbour at once
 *   others        states go from rank to rank, and their gradients back: a pipeline
 *
 * What an operator counts (positions, tokens seen) begins where the rank's tokens begin. On the CPU;
 * sequences are not packed. Results are those of one rank within rounding. */
#ifndef MN_RANKS_SEQUENCE_H
#define MN_RANKS_SEQUENCE_H

#include "ops/context.h"
#include "ops/describe.h"
#include "ranks/comm.h"

/* Memory that lasts until the backward pass of this call; NULL after a failure of its own. */
typedef void *(*mn_keep_fn)(void *owner, size_t bytes);

typedef struct mn_sequence {
    mn_comm *comm;             // the ranks that share sequences
    mn_context *context;
    mn_keep_fn keep;
    void *owner;
} mn_sequence;

/* Runs forward on the rank's tokens. `args` is the operator's argument struct as for them alone; it
 * is changed to what the backward pass needs (states, all keys). With `plan` only memory is taken.
 * Initial states that are given count on rank 0. */
mn_status mn_sequence_forward(const mn_sequence *s, mn_op_id op, void *args, bool plan);

/* The same backward, over the args that forward left, with cotangents and gradients filled in as
 * for the rank's tokens alone. */
mn_status mn_sequence_backward(const mn_sequence *s, mn_op_id op, void *args, bool plan);

#endif
