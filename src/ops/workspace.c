/* workspace.c - work space where a context's operators run. */
#include "ops/workspace.h"

#include <string.h>

#include "base/checked.h"

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
