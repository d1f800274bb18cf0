/* cost.h - what a step costs on N ranks, before there are any: docs/guide/scaling.md derives it.
 *
 *   seconds = compute + exposed gradients + values + messages
 *
 * compute of the rank with most batches; gradients travel while its last batch goes back, on GPUs
 * behind it; values of parameters after the update; every message between two ranks costs a latency
 * once. */
#ifndef MN_TRAIN_COST_H
#define MN_TRAIN_COST_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct mn_cost_input {
    int64_t parameters, batches, tokens;    // of the model; of a step; of a batch
    double flops;                           // of a token, forward and backward
    size_t activations;                     // bytes that a rank holds beside parameters
    bool shards_gradients;
    bool shards_parameters;                 // then these, too: of no block, of the largest one
    int64_t outside, block, blocks;
    bool device;                            // on GPUs: messages follow the pass
    size_t shadow;                          // bytes of a number's copy for passes
    double rate, bandwidth, latency;        // of a rank: operations and bytes a second, seconds
} mn_cost_input;

typedef struct mn_cost {
    size_t bytes;                // of memory a rank: values, gradients, moments, sums, activations
    double sent;                 // bytes a rank sends in a step
    double compute, communicate; // seconds of a step; what of the messages is not hidden
    double seconds;
    double tokens_per_second;    // of all ranks
    double efficiency;           // of the rate of one rank, times the ranks
} mn_cost;

/* Ranks beyond the batches of a step have nothing to do: efficiency says so. */
mn_cost mn_train_cost(const mn_cost_input *in, int64_t ranks);

#endif
