/* workspace.h - work space where a context's operators run.
 *
 * On the CPU the space comes from the context's arena, on a device from the device's; while a
 * context plans it is counted only, and nothing runs. */
#ifndef MN_OPS_WORKSPACE_H
#define MN_OPS_WORKSPACE_H

#include "ops/context.h"
#include "ops/matmul.h"

/* Uninitialised memory, of rows * cols elements of `size` bytes in the second form; NULL when it
 * overflows or there is none. */
void *mn_workspace_bytes(mn_context *context, size_t bytes);
void *mn_workspace_array(mn_context *context, int64_t rows, int64_t cols, size_t size);

/* All that was taken since the mark goes back. */
mn_mark mn_workspace_mark(const mn_context *context);
void mn_workspace_release(mn_context *context, mn_mark mark);

/* `to` becomes zeros. */
mn_status mn_workspace_clear(mn_context *context, void *to, size_t bytes);

#endif
