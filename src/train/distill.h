/* distill.h - learning from a frozen teacher whose layers were replaced (Bayesian Layer,
 * Appendix G).
 *
 *   layers   every replaced mixer by itself, reading the teacher's stream, over them the mean of
 *              |y - t|^2 / (Var t + 1e-6) + cosine (1 - cos(y, t))
 *   model    kl KL(teacher || student) + boundary mean_l |y_l - t_l|^2 / (Var t_l + 1e-6),
 *            the student reading its own stream; two stages of weights with a ramp between
 *
 * y and t are what the mixer adds to the stream. Squares and Var are means over all numbers of a
 * batch, cosines and KL over its tokens. The teacher's pass is part of the step and has no
 * gradient. */
#ifndef MN_TRAIN_DISTILL_H
#define MN_TRAIN_DISTILL_H

#include "data/loader.h"
#include "model/model.h"
#include "train/options.h"

typedef struct mn_distill mn_distill;

/* The blocks of train.distill_layers; where it is empty, those whose layers differ from the
 * teacher's, which may be NULL. */
mn_status mn_distill_layers(bool of[MN_MAX_LAYERS], const mn_train_options *options,
                            const mn_model_config *student, const mn_model_config *teacher);

/* Reads the teacher, where train.teacher names one (else *out is NULL), and places it beside the
 * student for passes of `dtype`; `of` gets the blocks. */
mn_status mn_distill_create(mn_distill **out, bool of[MN_MAX_LAYERS],
                            const mn_train_options *options, const mn_model *student,
                            mn_context *context, mn_dtype dtype);
void mn_distill_destroy(mn_distill *d);    // NULL accepted

/* The weights of the KL and boundary terms at a step. */
void mn_distill_weights(double *kl, double *boundary, const mn_train_options *options,
                        int64_t step);

/* One batch forward, with gradients of `weight` times the objective started: mn_tape_backward is
 * the caller's. `in` is the student's pass. *loss is the objective, *counted the targets. */
void mn_distill_forward(mn_distill *d, mn_tape *tape, mn_model *student, const mn_model_input *in,
                        const int32_t *targets, int64_t step, double weight, double *loss,
                        int64_t *counted);

/* The loss of the last pass on a GPU, as mn_tape_told has it; NULL on a CPU. */
const void *mn_distill_told(const mn_distill *d);

/* Bytes of the teacher. */
size_t mn_distill_bytes(const mn_distill *d);

#endif
