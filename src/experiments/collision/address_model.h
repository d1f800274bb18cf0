/* address_model.h - the small network of the learned collision experiments: everything about it is
 * learned except where it writes and reads.
 *
 *   h = W_in token + b                        then two blocks, and a linear head:
 *   h = h + W_O memory(address, W_V rms(h))   h = h + swiglu(rms(h))
 *
 * Four heads of 16 share the address of the token, which is key and query. Only writes write: the
 * key of a question is 0, so that its step forgets or predicts and no more. Memories are rows of
 * address_memories.def. */
#ifndef MN_EXPERIMENTS_COLLISION_ADDRESS_MODEL_H
#define MN_EXPERIMENTS_COLLISION_ADDRESS_MODEL_H

#include "tape/tape.h"
#include "optim/optim.h"
#include "tasks/task.h"

enum { MN_ADDRESS_WIDTH = 64, MN_ADDRESS_HEADS = 4, MN_ADDRESS_KEY = 16, MN_ADDRESS_PARAMS = 64 };

typedef enum mn_address_memory {
#define MEMORY(id, name, about) MN_ADDRESS_##id,
#include "experiments/collision/address_memories.def"
#undef MEMORY
    MN_ADDRESS_MEMORIES
} mn_address_memory;

bool mn_address_find(mn_address_memory *out, const char *name);

typedef struct mn_address_model {
    mn_address_memory memory;
    int64_t features, classes;
    mn_optim_param params[MN_ADDRESS_PARAMS];
    int64_t rows[MN_ADDRESS_PARAMS], n_params;
    float *numbers;              // values, then gradients
} mn_address_model;

/* Initial values are a function of `seed`. */
mn_status mn_address_model_create(mn_address_model *out, mn_address_memory memory, int64_t features,
                                  int64_t classes, uint64_t seed);
void mn_address_model_free(mn_address_model *model);    // all zeros is fine

/* Samples of one length, side by side. */
typedef struct mn_address_batch {
    int64_t rows, length, most;  // most: tokens of the longest sample there may be
    float *features;             // (rows, length, features)
    float *query, *key;          // (rows, length, heads, 16): address; key 0 where none is written
    float *constants;            // zeros, then ones, as many
    int32_t *targets, *rivals;   // (rows, length); rivals -100 where there are none
    float *sample;               // one as the task makes it
    int32_t *sample_targets, *sample_rivals;
    float *frozen;               // (16, width of a key): orthonormal rows; NULL: keys are addresses
} mn_address_batch;

/* `seed` draws the frozen projection of tasks whose keys are wider than 16. */
mn_status mn_address_batch_create(mn_address_batch *out, const mn_task *task, int64_t rows,
                                  uint64_t seed);
void mn_address_batch_free(mn_address_batch *batch);

/* Samples [first, first + rows) of a split, which must have one length: the task's option batch is
 * `rows`. */
mn_status mn_address_batch_fill(mn_address_batch *batch, mn_task *task, uint64_t seed,
                                mn_split split, int64_t first);

/* The last residual stream, (rows, length, 1, 64); *head is the leaf of the head. */
mn_tensor *mn_address_forward(mn_address_model *model, mn_tape *tape, const mn_address_batch *batch,
                              mn_tensor **head);

#endif
