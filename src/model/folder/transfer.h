/* transfer.h - the tensors of one folder as those of another: as they are, under other names, the
 * other way round, in another type, or made anew. */
#ifndef MN_MODEL_FOLDER_TRANSFER_H
#define MN_MODEL_FOLDER_TRANSFER_H

#include "model/folder/emit.h"

enum { MN_TRANSFER_MADE = -1 };

typedef struct mn_transfer {
    const mn_source *source;      // borrowed; its weights passed the check
    mn_model *target;             // a sketch, owned
    const char *family;           // whose names and orientation are written; NULL: ours
    bool same_family;             // as the source: tensors keep their shape as stored
    int *from;                    // of each parameter: the source's, or MN_TRANSFER_MADE
    mn_stored_dtype *dtypes;      // in which raw numbers of each come
    int n;                        // parameters
    mn_emit_tensor *tensors;      // what is written: of parameters, then what is beside the model
    int n_tensors, n_beside;
    int *first, *next;            // first parameter of a tensor, the next of its tensor or -1
    int64_t *place;               // of each parameter: its first number in its tensor
    const mn_stored_tensor **beside;
    mn_stored_dtype as;           // what all tensors become; MN_STORED_COUNT: none changes
    /* Parameter i of the target, of MN_TRANSFER_MADE, in the target's shape and dtypes[i]. */
    mn_status (*make)(void *raw, void *context, int i);
    void *context;
} mn_transfer;

/* Takes over `target`. `dtype` is what all tensors become; MN_STORED_COUNT: none changes.
 * Parameters of equal names are the same; `is_made` (NULL: none) says which are made nevertheless,
 * and `made` in which type. A parameter that the source lacks and nobody makes fails. */
mn_status mn_transfer_create(mn_transfer **out, const mn_source *source, mn_model *target,
                             mn_stored_dtype dtype, const bool *is_made,
                             const mn_stored_dtype *made);
void mn_transfer_destroy(mn_transfer *transfer);    // NULL accepted

/* Tensor k, for mn_emit.fill with the transfer as context. Numbers that the new type cannot hold
 * fail by the tensor's name. */
mn_status mn_transfer_fill(void *out, void *transfer, int k);

/* The configuration of `target` as JSON, in the words of its family: what was read, with
 * `torch_dtype` set where types change. To be released by json_decref. */
mn_status mn_transfer_config(json_t **out, const mn_transfer *transfer, mn_stored_dtype dtype);

/* A sketch of a model like `config`, which is written as JSON, read again and compared: fails with
 * the first difference where the configuration cannot be said. */
mn_status mn_transfer_target(mn_model **out, const mn_model_config *config);

#endif
