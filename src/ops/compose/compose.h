/* compose.h - operators made of others.
 *
 * Each takes validated arguments and runs its parts through mn_op_run with temporaries from
 * workspace.h, which the caller releases. */
#ifndef MN_OPS_COMPOSE_COMPOSE_H
#define MN_OPS_COMPOSE_COMPOSE_H

#include "ops/run.h"

#define COMPOSE(name, parts)                                                                       \
    mn_status mn_compose_##name(mn_context *context, mn_pass pass, const void *args);
#include "ops/compose/compose.def"

/* A call of bf16 by one of float32 with copies of its tensors. Of operators whose tensors have axes
 * BTHx, BTH or H, and N... */
mn_status mn_compose_wide(mn_context *context, mn_op_id op, mn_pass pass, const void *args);

#endif
