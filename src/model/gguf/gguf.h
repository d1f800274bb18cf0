/* gguf.h - a model folder as a GGUF file: which architecture of llama.cpp it is, its keys, tokens
 * and tensors. */
#ifndef MN_MODEL_GGUF_GGUF_H
#define MN_MODEL_GGUF_GGUF_H

#include "io/gguf.h"
#include "model/folder/source.h"

/* Type of the matrices; the rest is float32, as llama.cpp's own converter does. */
typedef enum mn_gguf_as {
    MN_GGUF_AS_STORED,     // f16 and bf16 stay, others become f32
    MN_GGUF_AS_F32,
    MN_GGUF_AS_F16,
    MN_GGUF_AS_BF16,
    MN_GGUF_AS_Q8_0,
} mn_gguf_as;

typedef struct mn_gguf_plan mn_gguf_plan;

/* `source` must outlive the plan and have passed mn_weights_check. A model that llama.cpp has no
 * architecture for, or that differs from it in a setting, fails with what it is. */
mn_status mn_gguf_plan_create(mn_gguf_plan **out, const mn_source *source, mn_gguf_as as);
void mn_gguf_plan_destroy(mn_gguf_plan *plan);    // NULL accepted

const char *mn_gguf_plan_arch(const mn_gguf_plan *plan);
int mn_gguf_plan_tensors(const mn_gguf_plan *plan);
int64_t mn_gguf_plan_bytes(const mn_gguf_plan *plan);
const char *mn_gguf_plan_remark(const mn_gguf_plan *plan);    // what is otherwise; "": nothing

/* Writes the file. `progress` hears of bytes; NULL: nobody. */
mn_status mn_gguf_plan_write(mn_gguf_plan *plan, const char *path,
                             bool (*progress)(void *context, int64_t bytes, int64_t of),
                             void *context);

/* ---- within the folder ----------------------------------------------------------------------- */

enum { MN_GGUF_REMARK = 512 };

/* Keys of an architecture, keys.c: sizes, norms, positions, states, multipliers. `remark` gets a
 * sentence where llama.cpp computes something a little otherwise. */
mn_status mn_gguf_put_keys(mn_gguf_keys *keys, char remark[MN_GGUF_REMARK], const char *arch,
                           const mn_model *model);

/* Keys of the tokenizer of a folder, tokens.c; `remark` gets a sentence where something is not as
 * llama.cpp's converter would have it. */
mn_status mn_gguf_put_tokens(mn_gguf_keys *keys, char remark[MN_GGUF_REMARK], const char *folder,
                             int64_t vocab_size);

/* Adds a sentence behind those that are there. */
void mn_gguf_remark(char remark[MN_GGUF_REMARK], const char *format, ...)
    __attribute__((format(printf, 2, 3)));

#endif
