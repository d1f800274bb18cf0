/* reduce.h - the gradient of a step from the gradients of its batches, over all ranks.
 *
 *   mn_reduce_begin(r, round);  a pass, which calls mn_reduce_ready going back;  mn_reduce_end(r);
 *
 * Every batch (with sequences cut over ranks: every batch's part) is an item of one binary tree
 * (ranks/tree.h), so that the sum has the same bits however many ranks there are. A rank adds what
 * it can by itself; what is left of bucket after bucket is sent to the rank that owns these
 * numbers, by a thread of its own while the pass goes back through the blocks before.
 *
 *   shards of the optimiser (ZeRO-1): a rank has neighbouring batches, and ranks talk once a step
 *   shards of gradients too (ZeRO-2): batches are dealt out in turn, and ranks talk once a batch;
 *                                     sums are kept of the rank's own numbers only
 *   shards of parameters too (ZeRO-3): values and gradients of others' numbers are there while a
 *                                      block is at work; their pages go back to the system after,
 *                                      at the same addresses. What belongs to no block (embedding,
 *                                      head, last norm) is there for the length of a step */
#ifndef MN_TRAIN_REDUCE_H
#define MN_TRAIN_REDUCE_H

#include "model/model.h"
#include "optim/optim.h"
#include "ranks/comm.h"

typedef struct mn_reduce mn_reduce;

typedef struct mn_reduce_options {
    mn_comm *comm;             // NULL: one rank
    mn_model *model;           // in the host's memory, with gradients
    int64_t batches;           // of a step
    int sequence;              // ranks that share a batch; 1: none
    bool shards_gradients, shards_parameters;    // the second takes the first with it
    const int64_t *elements;   // (world + 1): which numbers are whose
} mn_reduce_options;

mn_status mn_reduce_create(mn_reduce **out, const mn_reduce_options *how);
void mn_reduce_destroy(mn_reduce *reduce);    // NULL accepted

/* Rounds of a step, and the batch of this rank in round `round`; -1: none. */
int64_t mn_reduce_rounds(const mn_reduce *reduce);
int64_t mn_reduce_batch(const mn_reduce *reduce, int64_t round);

/* The batch that rank `rank` has in its round `round`; -1: none. */
int64_t mn_reduce_batch_of(const mn_reduce *reduce, int rank, int64_t round);

void mn_reduce_begin(mn_reduce *reduce, int64_t round);
void mn_reduce_ready(void *reduce, int block);    // for mn_model_input

/* All gradients of the round are complete. After the last round the rank's own numbers hold the
 * sum; others hold nothing of use. */
mn_status mn_reduce_end(mn_reduce *reduce);

/* After an update: all ranks get the values of the parameters, each from their owner; of sharded
 * ones nothing happens before they are asked for. */
mn_status mn_reduce_share_values(mn_reduce *reduce);

/* Of sharded parameters; nothing otherwise. A step begins with `open`; `enter` is for
 * mn_model_input and gets the values of a block. mn_reduce_end tells of a failure of `enter` or
 * mn_reduce_ready. A rank without a batch in a round calls `idle` in place of a pass, as all ranks
 * talk in it. */
mn_status mn_reduce_open(mn_reduce *reduce);
void mn_reduce_enter(void *reduce, int block);
void mn_reduce_idle(mn_reduce *reduce);

/* All values are on all ranks until the next step: for evaluations and checkpoints. */
mn_status mn_reduce_whole(mn_reduce *reduce);

size_t mn_reduce_bytes(const mn_reduce *reduce);    // of memory it holds

#endif
