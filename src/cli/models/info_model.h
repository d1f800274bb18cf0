/* info_model.h - mneme info MODEL. */
#ifndef MN_CLI_MODELS_INFO_MODEL_H
#define MN_CLI_MODELS_INFO_MODEL_H

#include <stdbool.h>

#include "mneme.h"

/* Describes the model of a folder or a run, without reading its numbers: with sequences of
 * `context` tokens (0: the model's, 4096 at most), `batch` of them. */
mn_status mn_info_model(const char *given, int batch, int context, bool json, mn_context *machine);

#endif
