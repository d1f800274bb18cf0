/* optimizer_device.h - AdamW over parameters in a GPU's memory, without waiting for it.
 *
 *   mn_device_optimizer_tell(o, step, lr, clip, limit);      before a step: uploads a few numbers
 *   mn_device_optimizer_loss(o, i, loss);                    of each batch: a copy on the device
 *   mn_device_optimizer_step(o, n_batches);                  norm, decision, update: launches only
 *   mn_device_optimizer_ask(o, &outcome);                    waits, and says what came of it
 *
 * What differs from step to step is read from the device's memory, norm and clipping among it. The
 * sums have a fixed order. */
#ifndef MN_OPTIM_OPTIMIZER_DEVICE_H
#define MN_OPTIM_OPTIMIZER_DEVICE_H

#include "optim/optim.h"

typedef struct mn_device_optimizer mn_device_optimizer;

/* What came of a step. */
typedef struct mn_optim_outcome {
    double norm, loss;     // of the gradients; mean of the losses
    int64_t counted;       // targets of all batches
    bool updated;
} mn_optim_outcome;

/* As mn_optimizer_create, with values and gradients in the memory of the context's device. A
 * parameter's `shadow` gets each new value in bf16. The context must outlive the optimiser. */
mn_status mn_device_optimizer_create(mn_device_optimizer **out, mn_context *context,
                                     const mn_optim_param *params, int64_t n_params,
                                     const mn_adamw_options *options);
void mn_device_optimizer_destroy(mn_device_optimizer *optimizer);    // NULL accepted

/* The same for one of `parts` owners, as mn_optimizer_create_part. */
mn_status mn_device_optimizer_create_part(mn_device_optimizer **out, mn_context *context,
                                          const mn_optim_param *params, int64_t n_params,
                                          const mn_adamw_options *options, int part, int parts);

/* Step number `step` (from 0) at learning rate `lr`. Gradients are scaled down to the norm `clip`
 * (0: never). Nothing is updated where the loss lies above `limit` or where loss or norm are not
 * finite. */
mn_status mn_device_optimizer_tell(mn_device_optimizer *optimizer, int64_t step, double lr,
                                   double clip, double limit);

/* Takes over what batch `i` of the step has told: a double, its mean loss, and an int64, over how
 * many targets, at an address on the device. */
mn_status mn_device_optimizer_loss(mn_device_optimizer *optimizer, int64_t i, const void *told);
mn_status mn_device_optimizer_step(mn_device_optimizer *optimizer, int64_t n_batches);

/* The same step by several owners: each measures the squares of its pieces, they exchange squares
 * and losses, whose addresses on the device are these, and all decide alike; each updates its own
 * numbers. Where sequences are cut in `parts`, the loss of part p of batch i is number
 * p n_batches + i. */
mn_status mn_device_optimizer_measure(mn_device_optimizer *optimizer);
double *mn_device_optimizer_squares(mn_device_optimizer *optimizer);    // of all pieces
void *mn_device_optimizer_losses(mn_device_optimizer *optimizer);       // 16 bytes each
mn_status mn_device_optimizer_decide(mn_device_optimizer *optimizer, int64_t n_batches, int parts);

/* After the values of other owners came: their shadows. */
mn_status mn_device_optimizer_shadows(mn_device_optimizer *optimizer);
mn_status mn_device_optimizer_ask(mn_device_optimizer *optimizer, mn_optim_outcome *outcome);

/* The moments of parameter `i`, for checkpoints: addresses on the device, of its numbers
 * [begin, begin + count), which are all of them unless others own a part. */
float *mn_device_optimizer_first(mn_device_optimizer *optimizer, int64_t i);
float *mn_device_optimizer_second(mn_device_optimizer *optimizer, int64_t i);
void mn_device_optimizer_owned(const mn_device_optimizer *optimizer, int64_t i, int64_t *begin,
                               int64_t *count);

/* Bytes of the device's memory that it holds. */
size_t mn_device_optimizer_bytes(const mn_device_optimizer *optimizer);

#endif
