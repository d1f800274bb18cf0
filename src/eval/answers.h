/* answers.h - what a model answers where a batch asks: the likeliest token at every target. */
#ifndef MN_EVAL_ANSWERS_H
#define MN_EVAL_ANSWERS_H

#include "data/loader.h"
#include "model/model.h"

/* Called for each target of a batch, in order: its place in the batch (row * length + token), the
 * target, and the model's answer. */
typedef void (*mn_answer_fn)(void *context, int64_t place, int32_t target, int32_t answer);

/* Batches [first, first + count) of the loader. Logits exist for the targets alone. The mean loss
 * over all targets goes to *loss (NULL: not wanted). */
mn_status mn_answers(mn_model *model, mn_tape *tape, const mn_loader *loader, int64_t first,
                     int64_t count, mn_answer_fn tell, void *context, double *loss);

#endif
