/* emit.h - writes a model folder with one tensor in memory at a time. */
#ifndef MN_MODEL_FOLDER_EMIT_H
#define MN_MODEL_FOLDER_EMIT_H

#include "model/folder/source.h"

/* What a file gets for a parameter. */
typedef struct mn_emit_tensor {
    char name[MN_PARAM_NAME];
    mn_stored_dtype dtype;
    int rank;
    int64_t shape[MN_STORED_MAX_RANK];
    int64_t count;
} mn_emit_tensor;

/* A folder to be: `fill` writes tensor i, of tensors[i].dtype, into `out`. */
typedef struct mn_emit {
    const char *folder;
    const mn_source *source;          // whose tokenizer and other files go along; NULL: none
    mn_emit_tensor *tensors;
    int n;
    mn_status (*fill)(void *out, void *context, int i);
    void *context;
    bool (*progress)(void *context, int64_t bytes, int64_t of);    // false stops it; NULL: nobody
    void *progress_context;
} mn_emit;

/* Bytes of the tensors, and of the largest. */
int64_t mn_emit_bytes(const mn_emit *emit, int64_t *largest);

/* Fails with a sentence when the folder holds a model already, unless `overwrite`, when the disk
 * has no room for the tensors or the memory none for what writing the largest takes. */
mn_status mn_emit_check(const mn_emit *emit, bool overwrite);

/* Makes the folder with model.safetensors, config.json (`config`, which is not released) and what
 * goes along from the source. The configuration comes last: without it there is no model. */
mn_status mn_emit_write(const mn_emit *emit, const json_t *config);

/* The tokenizer and other files that go along with a model. */
mn_status mn_emit_files(const char *folder, const char *from);

#endif
