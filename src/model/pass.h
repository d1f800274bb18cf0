/* pass.h - how much memory a forward pass takes, and how many tokens fit into a given amount.
 *
 * A pass keeps the activations of all its tokens until it ends, on a GPU (mn_model_input.recompute)
 * those of one block at a time; long inputs are cut into passes that follow each other in a
 * state. */
#ifndef MN_MODEL_PASS_H
#define MN_MODEL_PASS_H

#include "model/model.h"

/* For mn_model_input.recompute of passes that do not go back. */
mn_recompute mn_pass_recompute(const mn_context *context);

/* What a pass over (B,T) tokens takes from the tape, logits left out. Uses the tape. */
mn_status mn_pass_bytes(size_t *bytes, mn_model *model, mn_tape *tape, int64_t B, int64_t T);

/* The most tokens, halving from `most` and not below `least`, of which B rows fit into `budget`
 * bytes. */
mn_status mn_pass_tokens(int64_t *tokens, mn_model *model, mn_tape *tape, int64_t B, int64_t least,
                         int64_t most, size_t budget);

/* Row `t` of batch row 0 of (B,T,1,D) as (1,1,1,D), without gradient. */
mn_tensor *mn_pass_row(mn_tape *tape, const mn_tensor *x, int64_t t);

#endif
