/* context.c - worker threads, scratch memory and kernels of one caller. */
#include "ops/context.h"

#include <stdlib.h>

#include "base/status.h"

mn_status mn_context_create(mn_context **out, const mn_context_options *options) {
    const mn_context_options defaults = { 0, NULL };
    if (!out) return mn_fail(MN_ERR_ARGUMENT, "context: out is NULL");
    if (!options) options = &defaults;
    mn_target_id target;
    mn_status st = mn_target_choose(&target, options->target);
    if (st != MN_OK) return st;
    mn_context *context = calloc(1, sizeof *context);
    if (!context) return mn_fail(MN_ERR_MEMORY, "no memory for a context");
    context->target = target;
    st = mn_threads_create(&context->threads, options->n_threads);
    if (st == MN_OK) st = mn_arena_create(&context->arena);
    if (st == MN_OK) st = mn_kernel_table_fill(&context->f32, target, MN_F32);
    if (st == MN_OK) st = mn_kernel_table_fill(&context->f64, target, MN_F64);
    if (st != MN_OK) {
        mn_context_destroy(context);
        return st;
    }
    *out = context;
    return MN_OK;
}

void mn_context_destroy(mn_context *context) {
    if (!context) return;
    mn_threads_destroy(context->threads);
    mn_arena_destroy(context->arena);
    free(context);
}

int mn_context_threads(const mn_context *context) {
    return mn_threads_count(context->threads);
}

const char *mn_context_target(const mn_context *context) {
    return mn_target_name(context->target);
}
