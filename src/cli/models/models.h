/* models.h - what mneme convert and mneme graft share. */
#ifndef MN_CLI_MODELS_MODELS_H
#define MN_CLI_MODELS_MODELS_H

#include "cli/progress.h"
#include "model/folder/transfer.h"

/* The folder `given`, whose seal and weights are in order. */
mn_status mn_models_open(mn_source *out, const char *given);

/* Writes what `transfer` plans to `out`, tensor by tensor with a bar, and seals it where the source
 * has a seal. `dtype` is that of mn_transfer_create. */
mn_status mn_models_write(mn_transfer *transfer, const char *out, mn_stored_dtype dtype,
                          bool overwrite, bool quiet);

/* For mn_emit.progress, with a bar as context. */
bool mn_models_progress(void *bar, int64_t bytes, int64_t of);

#endif
