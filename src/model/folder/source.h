/* source.h - a model folder opened for looking: its configuration, parameters without memory, and
 * its mapped files. */
#ifndef MN_MODEL_FOLDER_SOURCE_H
#define MN_MODEL_FOLDER_SOURCE_H

#include "io/folder.h"
#include "model/folder/weights.h"

typedef struct mn_source {
    char folder[MN_FOLDER_PATH];    // of a training run: that of its best checkpoint
    mn_json config;                 // as written there
    mn_model *model;                // mn_model_sketch
    mn_weights *weights;
} mn_source;

/* Headers are read, numbers are not. Whether every parameter has its tensor is for
 * mn_weights_check. On failure `*out` is all zeros. */
mn_status mn_source_open(mn_source *out, const char *given);

/* The same without its files: `weights` stays NULL. */
mn_status mn_source_open_config(mn_source *out, const char *given);
void mn_source_close(mn_source *source);    // all zeros is fine

/* What the system has to keep of a sequence, in bytes: of each layer, fixed and for each token of a
 * cache, in float32. `fixed` and `token` have room for the layers. */
mn_status mn_sketch_state(size_t *fixed, size_t *token, mn_model *sketch, mn_context *context);

/* Memory of a pass beside parameters and states: over B x T tokens with logits of the last, or with
 * `train` a step forward and back, whose gradients are not counted. */
mn_status mn_sketch_pass(size_t *bytes, mn_model *sketch, mn_context *context, int64_t B, int64_t T,
                         bool train);

#endif
