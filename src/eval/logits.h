/* logits.h - logits of a row of tokens as a file, for comparison with other software. */
#ifndef MN_EVAL_LOGITS_H
#define MN_EVAL_LOGITS_H

#include "tokenizer/tokenizer.h"
#include "model/model.h"

/* Reads ids below `vocabulary`: a .bin of llm.c or nanoGPT, a JSON list, or whole numbers with
 * blanks or commas between them. The message names what is none. */
mn_status mn_logits_read_ids(mn_token_list *out, const char *path, int64_t vocabulary);

/* One pass over `tokens` as one sequence, in pieces that follow each other where it would take more
 * than 1 GiB. Writes a safetensors file in the model's type:
 *
 *   logits (T, vocabulary)   tokens (T)   variance (layers that tell one, T)
 *
 * `per_pass` tokens at a time, each pass going on from the state the last one left; 0: all. */
mn_status mn_logits_write(const char *path, mn_context *context, mn_model *model,
                          const mn_token_list *tokens, int64_t per_pass);

#endif
