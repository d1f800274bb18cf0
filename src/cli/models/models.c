/* models.c - opening a model folder with its seal, writing one with a bar and a seal. */
#include "cli/models/models.h"

#include <unistd.h>

#include "base/status.h"
#include "model/folder/auto_map.h"
#include "train/run/run_folder.h"

mn_status mn_models_open(mn_source *out, const char *given) {
    mn_status st = mn_source_open(out, given);
    if (st == MN_OK) st = mn_run_check_model(out->folder, false);
    if (st == MN_OK) st = mn_weights_check(out->model, out->weights);
    if (st != MN_OK) mn_source_close(out);
    return st;
}

bool mn_models_progress(void *bar, int64_t bytes, int64_t of) {
    (void)of;
    mn_progress_update(bar, bytes, NULL);
    return true;
}

static bool has_seal(const char *folder) {
    char path[MN_RUN_PATH];
    return mn_run_join(path, folder, "done") == MN_OK && access(path, F_OK) == 0;
}

mn_status mn_models_write(mn_transfer *t, const char *out, mn_stored_dtype dtype, bool overwrite,
                          bool quiet) {
    mn_progress bar = { 0 };
    char done[MN_RUN_PATH];
    json_t *config = NULL;
    int64_t largest;
    mn_emit emit = { .folder = out, .source = t->source, .tensors = t->tensors,
                     .n = t->n_tensors,
                     .fill = mn_transfer_fill, .context = t, .progress = mn_models_progress,
                     .progress_context = &bar };
    mn_status st = mn_emit_check(&emit, overwrite);
    if (st == MN_OK) st = mn_transfer_config(&config, t, dtype);
    if (st == MN_OK) {
        mn_progress_start(&bar, "weights", "bytes", 0, mn_emit_bytes(&emit, &largest), quiet);
        if (mn_run_join(done, out, "done") == MN_OK) unlink(done);
        st = mn_folder_make(out);
        if (st == MN_OK) st = mn_auto_map_add(config, mn_model_describe(t->target), out);
        if (st == MN_OK) st = mn_emit_write(&emit, config);
        if (st == MN_OK) mn_progress_finish(&bar, NULL);
        else mn_progress_clear(&bar);
    }
    if (st == MN_OK && has_seal(t->source->folder)) st = mn_run_seal(out);
    json_decref(config);
    return st;
}
