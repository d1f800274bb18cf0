/* quantised.h - weights in 8 or 4 bits as the files of a folder have them: codes under the name of
 * the parameter, their scales and least values under that name and a suffix. */
#ifndef MN_MODEL_FOLDER_QUANTISED_H
#define MN_MODEL_FOLDER_QUANTISED_H

#include "model/folder/weights.h"

enum { MN_QUANTISED_PARTS = 3 };    // tensors of one parameter at most

/* Whether tensor `t` holds codes of parameter `p`. */
bool mn_quantised_stored(const mn_model_param *p, const mn_stored_tensor *t);

/* All tensors of quantised parameter `p` are there in their types and shapes. */
mn_status mn_quantised_check(const mn_model *model, const mn_weights *w, const mn_model_param *p,
                             const mn_stored_tensor *t);

/* Takes the codes of parameter `p` in place of its numbers. */
mn_status mn_quantised_read(mn_model *model, const mn_weights *w, mn_model_param *p,
                            const mn_stored_tensor *t);

/* The tensors of quantised parameter `p`, whose name is in names[0], for a file; their bytes are in
 * `copies`, to be freed. Returns how many these are, 0 without memory. */
int mn_quantised_tensors(mn_stored_tensor *tensors, char (*names)[MN_PARAM_NAME], void **copies,
                         const mn_model_param *p);

#endif
