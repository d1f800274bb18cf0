/* trainable.h - which parameters of a run learn. */
#ifndef MN_TRAIN_TRAINABLE_H
#define MN_TRAIN_TRAINABLE_H

#include "model/model.h"

/* Sets the rates of the parameters from a list such as "*.attn.*, *.down_proj.weight=0.1": the
 * first pattern that a name matches says how fast it learns, times its group's rate (1 without
 * "="); names that none matches stay as they are. "mixers" in the list stands for the mixers of
 * the blocks `of`, and their MLP's gate and down projections at 0.1. "": all learn. A pattern that
 * matches nothing is refused. */
mn_status mn_trainable_apply(mn_model *model, const char *list, const bool of[MN_MAX_LAYERS]);

#endif
