/* delta_gva.c - delta_net under the name of its grouped value heads: the operator shares heads of
 * queries and keys by itself. */
#include "base/status.h"
#include "ops/compose/compose.h"

mn_status mn_compose_delta_gva(mn_context *context, mn_pass pass, const void *args) {
    const mn_delta_gva_args *p = args;
    const mn_delta_args delta = {
        .call = p->call, .scale = p->scale, .decay = p->decay,
        .q = p->q, .e = p->k, .v = p->v, .beta = p->beta, .g = p->g, .state0 = p->state0,
        .o = p->o, .state = p->state,
        .cot = { p->cot.o, p->cot.state },
        .grad = { .q = p->grad.q, .e = p->grad.k, .v = p->grad.v, .beta = p->grad.beta,
                  .g = p->grad.g, .state0 = p->grad.state0 },
    };
    return mn_op_run(context, MN_OP_delta, pass, &delta);
}
