/* optimizer_device.h - AdamW over parameters in a GPU's memory, without waiting for it.
 *
 *   mn_device_optimizer_tell(o, step, lr, clip, limit);      before a step: uploads a few numbers
 *   mn_device_optimizer_step(o, losses, n);                  norm, decision, update: launches only
 *   mn_device_optimizer_ask(o, &outcome);                    waits, and says what came of it
 *
 * The middle one can be recorded in a graph with the rest of a step and played again: it reads what
 * differs from step to step from the device's memory. The sums have a fixed order. */
#ifndef MN_OPTIM_OPTIMIZER_DEVICE_H
#define MN_OPTIM_OPTIMIZER_DEVICE_H

#include "optim/optim.h"

typedef struct mn_device_optimizer mn_device_optimizer;

/* What came of a step. */
typedef struct mn_optim_outcome {
    double norm, loss;     // of the gradients; mean of the losses
    bool updated;
} mn_optim_outcome;

/* As mn_optimizer_create, with values and gradients in the memory of the context's device. A
 * parameter's `shadow` gets each new value in bf16. The context must outlive the optimiser. */
mn_status mn_device_optimizer_create(mn_device_optimizer **out, mn_context *context,
                                     const mn_optim_param *params, int64_t n_params,
                                     const mn_adamw_options *options);
void mn_device_optimizer_destroy(mn_device_optimizer *optimizer);    // NULL accepted

/* Step number `step` (from 0) at learning rate `lr`. Gradients are scaled down to the norm `clip`
 * (0: never). Nothing is updated where the loss lies above `limit` or where loss or norm are not
 * finite. */
mn_status mn_device_optimizer_tell(mn_device_optimizer *optimizer, int64_t step, double lr,
                                   double clip, double limit);

/* `losses` are n addresses on the device, of mean losses; the list itself is read before the call
 * returns, and may only change between steps that are not played from a graph. */
mn_status mn_device_optimizer_step(mn_device_optimizer *optimizer, const double *const *losses,
                                   int64_t n);
mn_status mn_device_optimizer_ask(mn_device_optimizer *optimizer, mn_optim_outcome *outcome);

/* The moments of parameter `i`, (count) each, for checkpoints: addresses on the device. */
float *mn_device_optimizer_first(mn_device_optimizer *optimizer, int64_t i);
float *mn_device_optimizer_second(mn_device_optimizer *optimizer, int64_t i);

/* Bytes of the device's memory that it holds. */
size_t mn_device_optimizer_bytes(const mn_device_optimizer *optimizer);

#endif
