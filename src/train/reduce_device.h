/* reduce_device.h - the gradient of a step from those of its batches, over the GPUs of all ranks.
 *
 *   in every round of a step:  a pass, if the rank has a batch in it, then
 *                              mn_device_reduce_put(r, round)    joins it with those before
 *   once a step:               mn_device_reduce_sum(r)           own numbers hold the sum
 *                              mn_device_reduce_tell(r, ..)      all have all squares and losses
 *   after the update:          mn_device_reduce_values(r)        all ranks have all values
 *
 * The tree of reduce.h, with the same bits on any number of ranks. Every rank gets the parts that
 * the others have of its own numbers, piece after piece so that few are on the way, and adds them
 * in the order of the tree by a kernel of ours: no sum is NCCL's, whose order it chooses itself by
 * sizes and links. Nothing waits.
 *
 *   shards of the optimiser (ZeRO-1)  a rank has neighbouring batches; the ranks talk in `sum`
 *   shards of gradients (ZeRO-2)      batches are dealt out in turn; the ranks talk in every `put`,
 *                                     and sums are kept of the rank's own numbers only
 *   shards of parameters (ZeRO-3)     and values and gradients of others are there only while a
 *                                     block works; the model lies in pages */
#ifndef MN_TRAIN_REDUCE_DEVICE_H
#define MN_TRAIN_REDUCE_DEVICE_H

#include "model/model.h"
#include "optim/optimizer_device.h"
#include "ranks/nccl.h"
#include "runtime/device.h"

typedef struct mn_device_reduce mn_device_reduce;

typedef struct mn_device_reduce_options {
    mn_device *device;
    mn_nccl *nccl;
    mn_model *model;           // on the device, with gradients
    int rank, world, sequence;
    int64_t batches;           // of a step
    bool shards_gradients, shards_parameters;
    const int64_t *elements;   // (world + 1): which numbers are whose
    const int64_t *pieces;     // (world + 1): the same of the optimiser's pieces
} mn_device_reduce_options;

mn_status mn_device_reduce_create(mn_device_reduce **out, const mn_device_reduce_options *how);
void mn_device_reduce_destroy(mn_device_reduce *reduce);    // NULL accepted

/* Rounds of a step, and the batch that a rank has in one; -1: none. */
int64_t mn_device_reduce_rounds(const mn_device_reduce *reduce);
int64_t mn_device_reduce_batch(const mn_device_reduce *reduce, int rank, int64_t round);

void mn_device_reduce_begin(mn_device_reduce *reduce);
mn_status mn_device_reduce_put(mn_device_reduce *reduce, int64_t round);
mn_status mn_device_reduce_sum(mn_device_reduce *reduce);

/* Squares of pieces and losses of batches, from whose they are to all, so that all decide alike. */
mn_status mn_device_reduce_tell(mn_device_reduce *reduce, mn_device_optimizer *optimizer);
mn_status mn_device_reduce_values(mn_device_reduce *reduce);

/* ---- shards of parameters; elsewhere these do nothing ----
 *
 * open: what belongs to no block comes, before the batches of a step; block i is about to work, or
 * has its gradients, on the pass's way back; a round without a batch. What fails comes out of the
 * round's put. */
bool mn_device_reduce_on_request(const mn_device_reduce *reduce);
mn_status mn_device_reduce_open(mn_device_reduce *reduce);
void mn_device_reduce_enter(mn_device_reduce *reduce, int block);
void mn_device_reduce_ready(mn_device_reduce *reduce, int block);
void mn_device_reduce_idle(mn_device_reduce *reduce);

/* All values come, and stay until the next step is opened. */
mn_status mn_device_reduce_whole(mn_device_reduce *reduce);

/* Bytes of the model's pages during steps. */
size_t mn_device_reduce_paged(const mn_device_reduce *reduce);

size_t mn_device_reduce_bytes(const mn_device_reduce *reduce);    // of the device's memory

#endif
