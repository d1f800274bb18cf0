/* checkpoint.h - models as Hugging Face folders: config.json, model.safetensors, tokenizer.json. */
#ifndef MN_MODEL_CHECKPOINT_H
#define MN_MODEL_CHECKPOINT_H

#include "model/model.h"

/* Reads config.json and the weights of `folder` (one file, or several with their index), of any
 * real type. Names and shapes must match the model exactly; the message names the first that does
 * not. The folder of a training run stands for its best checkpoint. On failure `*out` is NULL. */
mn_status mn_checkpoint_load(mn_model **out, const char *folder, mn_dtype dtype);

/* Copies the weights of `folder` into `model`, whose configuration must fit. On failure the model
 * is unchanged. */
mn_status mn_checkpoint_read_weights(mn_model *model, const char *folder);

/* The model of folder `given`, its parameters not read yet. */
mn_status mn_checkpoint_create(mn_model **out, const char *given, mn_dtype dtype);

/* The weights of `folder` into `model`, fn(context, i) after parameter i has come. */
typedef mn_status (*mn_checkpoint_each)(void *context, int i);
mn_status mn_checkpoint_read_each(mn_model *model, const char *folder, mn_checkpoint_each fn,
                                  void *context);

/* Writes config.json and model.safetensors into the folder, which must exist; each file appears
 * whole or not at all. */
mn_status mn_checkpoint_save(mn_model *model, const char *folder);

#endif
