/* stacks.h - tensors of all experts of a block, put together from the matrices of each. */
#ifndef MN_MODEL_FOLDER_STACKS_H
#define MN_MODEL_FOLDER_STACKS_H

#include "io/safetensors.h"
#include "model/families/dialect.h"

/* What a file gets, as it grows: copies[i] is memory of tensors[i] to be freed, or NULL. */
typedef struct mn_stack_list {
    mn_stored_tensor *tensors;
    char (*names)[MN_PARAM_NAME];
    void **copies;
    int n;
} mn_stack_list;

/* Moves the last tensor of the list, a matrix, to its place in tensor at->name of E experts, which
 * the first of them makes. The whole has the type of its matrices, or `wide`, which holds any,
 * where they differ. */
mn_status mn_stack_add(mn_stack_list *list, const mn_stacked *at, int64_t E, mn_stored_dtype wide);

#endif
