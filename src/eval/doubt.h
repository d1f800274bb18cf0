/* doubt.h - what a model answers where a batch asks, how sure its prediction is, and what its
 * memories know there. */
#ifndef MN_EVAL_DOUBT_H
#define MN_EVAL_DOUBT_H

#include "data/loader.h"
#include "model/posterior.h"

/* Answers one after the other. Features are those of the posterior, (n, features). */
typedef struct mn_doubts {
    int64_t n, room;
    int features;
    float *entropy, *confidence;     // of the prediction: natural units; the largest probability
    float *chance;                   // probability of the target
    uint8_t *wrong;                  // the likeliest token is not the target
    int8_t *kind;                    // what the caller says of the place, -1: nothing
    float *value;
} mn_doubts;

void mn_doubts_free(mn_doubts *d);

/* Adds the answers to a batch whose rows are sequences. `kinds` (may be NULL) has one for each
 * place of the batch; `posterior` is of this model. */
mn_status mn_doubts_add(mn_doubts *d, mn_model *model, mn_tape *tape, mn_posterior *posterior,
                        const mn_token_batch *batch, const int8_t *kinds);

#endif
