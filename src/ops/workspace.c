/* workspace.c - work space where a context's operators run, and steps of compositions there. */
#include "ops/workspace.h"

#include <string.h>

#include "base/checked.h"
#include "base/status.h"

static const char *const names[MN_GLUE_COUNT] = {
#define GLUE(name, ins, outs, about) [MN_GLUE_##name] = #name,
#define GLUE_SUM(name, about) [MN_GLUE_##name] = #name,
#include "kernels/glue.def"
};

static bool uses_device(const mn_context *context) {
    return context->device && !context->plans;
}

void *mn_workspace_bytes(mn_context *context, size_t bytes) {
    return uses_device(context) ? mn_device_bytes(context->device, bytes)
                             : mn_arena_bytes(context->arena, bytes);
}

void *mn_workspace_array(mn_context *context, int64_t rows, int64_t cols, size_t size) {
    int64_t count;
    size_t bytes;
    if (rows < 0 || cols < 0 || !mn_mul_i64(&count, rows, cols)) return NULL;
    return mn_mul_size(&bytes, (size_t)count, size) ? mn_workspace_bytes(context, bytes) : NULL;
}

mn_mark mn_workspace_mark(const mn_context *context) {
    return uses_device(context) ? mn_device_mark(context->device) : mn_arena_mark(context->arena);
}

void mn_workspace_release(mn_context *context, mn_mark mark) {
    if (uses_device(context)) mn_device_release(context->device, mark);
    else mn_arena_release(context->arena, mark);
}

mn_status mn_workspace_clear(mn_context *context, void *to, size_t bytes) {
    if (context->plans || !to || bytes == 0) return MN_OK;
    if (context->device) return mn_device_fill(context->device, to, 0, bytes);
    memset(to, 0, bytes);
    return MN_OK;
}

mn_status mn_run_glue(mn_context *context, mn_glue_id id, const mn_glue *args) {
    if (context->plans) return MN_OK;
    const mn_glue_fn step = mn_glue_cuda(id);
    if (!step) return mn_fail(MN_ERR_UNSUPPORTED, "this build has no CUDA kernels");
    const mn_status st = mn_device_use(context->device);
    if (st != MN_OK) return st;
    return mn_device_check(context->device, step(args, mn_device_stream(context->device)),
                           names[id]);
}
