/* logits.h - logits of rows of tokens as a file, for comparison with other software. */
#ifndef MN_EVAL_LOGITS_H
#define MN_EVAL_LOGITS_H

#include "tokenizer/tokenizer.h"
#include "model/model.h"

/* Reads ids below `vocabulary`: a .bin of llm.c or nanoGPT, a JSON list, or whole numbers with
 * blanks or commas between them. `ends` has where each row of tokens ends: a JSON list of lists
 * holds several, everything else is one. The message names what is none. */
mn_status mn_logits_read_ids(mn_token_list *out, mn_token_list *ends, const char *path,
                             int64_t vocabulary);

/* One pass over each row of `tokens` as a sequence that starts from nothing, in pieces that follow
 * each other where it would take more than 1 GiB. Writes a safetensors file in the model's type:
 *
 *   logits (T, vocabulary)   tokens (T)   variance (layers that tell one, T)
 *
 * `per_pass` tokens at a time, each pass going on from the state the last one left; 0: all. */
mn_status mn_logits_write(const char *path, mn_context *context, mn_model *model,
                          const mn_token_list *tokens, const mn_token_list *ends,
                          int64_t per_pass);

#endif
