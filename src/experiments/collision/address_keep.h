/* address_keep.h - a training of the small network of address_model.h on the disk, so that it goes
 * on after a kill with the numbers of one that never stopped. */
#ifndef MN_EXPERIMENTS_COLLISION_ADDRESS_KEEP_H
#define MN_EXPERIMENTS_COLLISION_ADDRESS_KEEP_H

#include "experiments/collision/address_model.h"

/* Where a training is. */
typedef struct mn_address_progress {
    int64_t step;
    double loss;                 // NAN until there is one
} mn_address_progress;

/* Writes values, moments and progress into `folder`, in place of what was there. */
mn_status mn_address_save(const char *folder, const mn_address_model *model,
                          mn_optimizer *optimizer, const mn_address_progress *now);

/* Takes them up; false, and nothing changes, when there is nothing that fits. */
bool mn_address_take(const char *folder, mn_address_model *model, mn_optimizer *optimizer,
                     mn_address_progress *now);

#endif
