/* pass.c - how much memory a forward pass takes, found by planning it. */
#include "model/pass.h"

#include <stdlib.h>

#include "base/checked.h"
#include "base/dtype.h"
#include "base/status.h"
#include "base/util.h"

mn_recompute mn_pass_recompute(const mn_context *context) {
    return context->device ? MN_RECOMPUTE_LAYER : MN_RECOMPUTE_NONE;
}

mn_status mn_pass_bytes(size_t *bytes, mn_model *model, mn_tape *tape, int64_t B, int64_t T) {
    int64_t count;
    int32_t *tokens = NULL;
    if (mn_mul_i64(&count, B, T) && count > 0) tokens = calloc((size_t)count, sizeof *tokens);
    if (!tokens) {
        return mn_fail(MN_ERR_MEMORY, "no memory for %lld x %lld tokens", (long long)B,
                       (long long)T);
    }
    const mn_model_input in = { .tokens = tokens, .B = B, .T = T,
                                .recompute = mn_pass_recompute(mn_tape_context(tape)) };
    mn_tape_start(tape, MN_TAPE_PLAN);
    mn_model_hidden(model, tape, &in);
    const mn_status st = mn_tape_status(tape);
    *bytes = mn_tape_bytes(tape);
    free(tokens);
    return st;
}

mn_status mn_pass_tokens(int64_t *tokens, mn_model *model, mn_tape *tape, int64_t B, int64_t least,
                         int64_t most, size_t budget) {
    mn_status st = MN_OK;
    for (*tokens = most; st == MN_OK && *tokens > least; *tokens = mn_max(*tokens / 2, least)) {
        size_t bytes = 0;
        st = mn_pass_bytes(&bytes, model, tape, B, *tokens);
        if (st == MN_OK && bytes <= budget) break;
    }
    return st;
}

mn_tensor *mn_pass_row(mn_tape *tape, const mn_tensor *x, int64_t t) {
    if (!x) return NULL;
    char *row = (char *)x->data + (size_t)(t * x->stride[1]) * mn_dtype_bytes(x->dtype);
    return mn_tape_input(tape, row, NULL, (int64_t[]){ 1, 1, 1, x->shape[3] });
}
