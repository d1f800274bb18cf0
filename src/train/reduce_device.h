/* reduce_device.h - the gradient of a step from those of its batches, over the GPUs of all ranks.
 *
 *   of each of this rank's batches:  mn_device_reduce_put(r)     joins it with those before
 *   once a step:                     mn_device_reduce_sum(r)     own numbers hold the sum
 *   after the update:                mn_device_reduce_values(r)  all ranks have all values
 *
 * The tree of reduce.h, with the same bits on any number of ranks. Every rank gets the parts that
 * the others have of its own numbers, piece after piece so that few are on the way, and adds them
 * in the order of the tree by a kernel of ours: no sum is NCCL's. Nothing waits. */
#ifndef MN_TRAIN_REDUCE_DEVICE_H
#define MN_TRAIN_REDUCE_DEVICE_H

#include "model/model.h"
#include "ranks/nccl.h"
#include "runtime/device.h"

typedef struct mn_device_reduce mn_device_reduce;

typedef struct mn_device_reduce_options {
    mn_device *device;
    mn_nccl *nccl;
    mn_model *model;           // on the device, with gradients
    int rank, world, sequence;
    int64_t batches;           // of a step
    const int64_t *elements;   // (world + 1): which numbers are whose
} mn_device_reduce_options;

mn_status mn_device_reduce_create(mn_device_reduce **out, const mn_device_reduce_options *how);
void mn_device_reduce_destroy(mn_device_reduce *reduce);    // NULL accepted

/* This rank's batches of a step: [*first, *end). */
void mn_device_reduce_batches(const mn_device_reduce *reduce, int rank, int64_t *first,
                              int64_t *end);

void mn_device_reduce_begin(mn_device_reduce *reduce);
mn_status mn_device_reduce_put(mn_device_reduce *reduce);    // of the next batch
mn_status mn_device_reduce_sum(mn_device_reduce *reduce);
mn_status mn_device_reduce_values(mn_device_reduce *reduce);

size_t mn_device_reduce_bytes(const mn_device_reduce *reduce);    // of the device's memory

#endif
