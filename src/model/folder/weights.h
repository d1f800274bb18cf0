/* weights.h - the tensors of a model folder's files, found by parameter and read one at a time.
 *
 * Files are mapped: a tensor's bytes come into memory when it is read, straight into where they are
 * wanted, and the system may drop them again. */
#ifndef MN_MODEL_FOLDER_WEIGHTS_H
#define MN_MODEL_FOLDER_WEIGHTS_H

#include "io/safetensors.h"
#include "model/model.h"

typedef struct mn_weights mn_weights;

/* Opens model.safetensors, or the shards that its index names, of `folder` for `model`, a sketch or
 * not. On failure `*out` is NULL. */
mn_status mn_weights_open(mn_weights **out, const char *folder, const mn_model *model);
void mn_weights_close(mn_weights *w);    // NULL accepted

/* The folder's path, for messages. */
const char *mn_weights_folder(const mn_weights *w);

int mn_weights_files(const mn_weights *w);
const mn_safetensors *mn_weights_file(const mn_weights *w, int i);

/* The tensor of parameter `name`: its part of a tensor of all experts (mn_dialect_stacked); or by
 * the name that the model's family gives it, with or without the name of the whole model before it;
 * or by one of other spellings. NULL: there is none. */
const mn_stored_tensor *mn_weights_find(const mn_weights *w, const mn_model *model,
                                        const char *name);

/* The tensor of a file that `t`, found for a parameter, is or is part of. */
const mn_stored_tensor *mn_weights_whole(const mn_weights *w, const mn_stored_tensor *t);

/* The tensors of what is beside the model (mn_dialect_beside): calls `visit` for each until it
 * fails. */
mn_status mn_weights_beside(const mn_weights *w, const mn_model *model,
                            mn_status (*visit)(void *context, const mn_stored_tensor *t),
                            void *context);

/* The tensor that a file calls `name`, or NULL. */
const mn_stored_tensor *mn_weights_exact(const mn_weights *w, const char *name);

/* Every parameter is there in its shape; the message names the first that is not. */
mn_status mn_weights_check(mn_model *model, const mn_weights *w);

/* Parameter i in the model's shape, of a folder that passed the check: the file's own bits, whose
 * type is mn_weights_dtype, or converted to `dtype`, MN_F32 or MN_F64. */
mn_stored_dtype mn_weights_dtype(const mn_weights *w, const mn_model *model, const char *name);
mn_status mn_weights_raw(void *out, mn_model *model, const mn_weights *w, int i);
mn_status mn_weights_read(void *numbers, mn_dtype dtype, mn_model *model, const mn_weights *w,
                          int i);

/* Notes in a parameter how the file has it, for writing it back so. */
void mn_weights_remember(mn_model_param *p, const mn_stored_tensor *t);

/* The kind of layer that a parameter of a block is in, "hybrid" with a shared block before it;
 * NULL: in none. */
const char *mn_weights_kind(const mn_model *model, const char *name);

/* ---- q, k and v that a file cuts elsewhere --------------------------------------------------- */

enum { MN_TRIO = 3 };

/* The three parameters that `name` is one of; returns which of them, -1 if they are not there. */
int mn_weights_trio(int trio[MN_TRIO], mn_model *model, const char *name);

/* Whether the file cuts the three elsewhere, and has as many numbers in all. */
bool mn_weights_cut(mn_model *model, const mn_weights *w, const mn_model_param *p);

/* The other way round: `rows` of `columns` become as many columns. */
mn_status mn_weights_turn(void *numbers, int64_t rows, int64_t columns, size_t item);

#endif
