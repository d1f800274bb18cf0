/* optim.h - AdamW over groups of parameters, learning-rate schedules, gradient clipping.
 *
 * The optimiser owns the moments; parameters and gradients belong to the model. Everything is
 * elementwise or a sum in fixed order, so results are bit-equal at any number of threads. */
#ifndef MN_OPTIM_OPTIM_H
#define MN_OPTIM_OPTIM_H

#include "ops/context.h"

/* One parameter as the optimiser sees it: float32 values. */
typedef struct mn_optim_param {
    const char *name;
    float *value, *grad;
    int64_t count;
    double lr_scale;       // times the schedule's learning rate
    bool decays;           // subject to weight decay
    void *shadow;          // on a device: the value in bf16, kept up to date; NULL: none
} mn_optim_param;

typedef struct mn_adamw_options {
    double beta1, beta2, eps, weight_decay;
} mn_adamw_options;

typedef struct mn_optimizer mn_optimizer;

/* Fails with the parameter's or the option's name where one is out of range. */
mn_status mn_optim_check(const mn_optim_param *params, int64_t n_params,
                         const mn_adamw_options *options);

/* `params` is copied, the memory it points to must outlive the optimiser. Moments start at 0.
 * Betas lie between 0 and 1, eps is positive, weight_decay and every lr_scale are not negative. */
mn_status mn_optimizer_create(mn_optimizer **out, const mn_optim_param *params, int64_t n_params,
                              const mn_adamw_options *options);
void mn_optimizer_destroy(mn_optimizer *optimizer);    // NULL accepted

/* The same for one of `parts` owners that share the parameters: it has moments of its own part, a
 * row of whole pieces, and steps only those. All parts together do what one optimiser does, with
 * the same bits. */
mn_status mn_optimizer_create_part(mn_optimizer **out, const mn_optim_param *params,
                                   int64_t n_params, const mn_adamw_options *options, int part,
                                   int parts);

/* Where parts begin (parts + 1 numbers each): counted in numbers over all parameters one after the
 * other, and in pieces. */
void mn_optim_shares(const mn_optim_param *params, int64_t n_params, int parts, int64_t *elements,
                     int64_t *pieces);

/* The squares of the pieces owned, in order; their number. The norm of the gradient is the root of
 * their sum over all parts, added one after the other. */
int64_t mn_optimizer_squares(const double **squares, mn_optimizer *optimizer, mn_context *context);

/* sqrt of the sum of squares of all gradients, summed in double in a fixed order; not finite when a
 * gradient is not. */
double mn_optimizer_grad_norm(mn_optimizer *optimizer, mn_context *context);

/* One AdamW step number `step` (from 0) at learning rate `lr`, gradients multiplied by
 * `grad_scale` (clipping: min(1, clip / norm)) as they are read. Decoupled weight decay:
 * p -= lr lr_scale (m^ / (sqrt v^ + eps) + weight_decay p). Allocates nothing. */
mn_status mn_optimizer_step(mn_optimizer *optimizer, mn_context *context, int64_t step, double lr,
                            double grad_scale);

/* The moments of parameter `i`, for checkpoints: of its numbers [begin, begin + count), which are
 * all of them unless others own a part. */
float *mn_optimizer_first(mn_optimizer *optimizer, int64_t i);
float *mn_optimizer_second(mn_optimizer *optimizer, int64_t i);
void mn_optimizer_owned(const mn_optimizer *optimizer, int64_t i, int64_t *begin, int64_t *count);

/* ---- schedules ------------------------------------------------------------------------------- */

typedef enum mn_schedule_kind {
#define SCHEDULE(id, name, about) MN_SCHEDULE_##id,
#include "optim/schedules.def"
#undef SCHEDULE
    MN_SCHEDULE_COUNT
} mn_schedule_kind;

typedef struct mn_schedule {
    mn_schedule_kind kind;
    double peak, floor;         // learning rates
    int64_t warmup, steps;      // step s < warmup: peak (s + 1) / (warmup + 1), so no step is at 0;
                                // `steps` is the whole run, the floor would be reached at its end
    double decay_part;          // warmup-stable-decay: the last part of the run that falls
    int64_t hold;               // steps that share the rate of their first, after the warmup; 0: 1
} mn_schedule;

const char *mn_schedule_name(mn_schedule_kind kind);
bool mn_schedule_parse(mn_schedule_kind *out, const char *name);

/* The learning rate of step `step` in [0, steps). */
double mn_schedule_rate(const mn_schedule *schedule, int64_t step);

#endif
