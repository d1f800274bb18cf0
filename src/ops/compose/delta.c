/* delta.c - delta_net and gdn2 in terms of delta. */
#include "base/status.h"
#include "ops/compose/compose.h"
#include "ops/rows.h"

mn_status mn_compose_delta_net(mn_context *context, mn_pass pass, const void *args) {
    const mn_delta_net_args *p = args;
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

/* In bf16 the products would be rounded before the recurrence takes them, and it would make more of
 * that error than a result may have: there all of it is float32.
 *
 * e = erase k, w = k, v' = write v:  dk = dw + erase de, derase = k de, dv = write dv', dwrite = v
 * dv'. */
mn_status mn_compose_gdn2(mn_context *context, mn_pass pass, const void *args) {
    const mn_gdn2_args *p = args;
    const mn_call *c = &p->call;
    const bool back = pass == MN_BACKWARD;
    if (c->dtype == MN_BF16) return mn_compose_wide(context, MN_OP_gdn2, pass, args);
    const mn_out e = mn_rows_temporary(context, c, c->K), v = mn_rows_temporary(context, c, c->V);
    const mn_out de = mn_rows_temporary(context, c, back ? c->K : 0);
    const mn_out dv = mn_rows_temporary(context, c, back ? c->V : 0);
    const mn_out dw = p->grad.k.data ? p->grad.k : mn_rows_temporary(context, c, back ? c->K : 0);
    if (!e.data || !v.data || !de.data || !dv.data || !dw.data) {
        return mn_fail(MN_ERR_MEMORY, "gdn2: no memory for its temporaries");
    }
    mn_status st = mn_rows_multiply(context, c, c->K, e, p->k, p->erase, false);
    if (st == MN_OK) st = mn_rows_multiply(context, c, c->V, v, p->v, p->write, false);
    const mn_delta_args delta = {
        .call = p->call, .scale = p->scale, .decay = p->decay,
        .q = p->q, .e = mn_as_input(e), .w = p->k, .v = mn_as_input(v), .g = p->g,
        .state0 = p->state0, .o = p->o, .state = p->state,
        .cot = { p->cot.o, p->cot.state },
        .grad = { .q = p->grad.q, .e = de, .w = dw, .v = dv, .g = p->grad.g,
                  .state0 = p->grad.state0 },
    };
    if (st == MN_OK) st = mn_op_run(context, MN_OP_delta, pass, &delta);
    if (st != MN_OK || !back) return st;
    const mn_in d_e = mn_as_input(de), d_v = mn_as_input(dv);
    st = mn_rows_multiply(context, c, c->K, dw, d_e, p->erase, true);
    if (st == MN_OK) st = mn_rows_multiply(context, c, c->K, p->grad.erase, d_e, p->k, false);
    if (st == MN_OK) st = mn_rows_multiply(context, c, c->V, p->grad.v, d_v, p->write, false);
    if (st == MN_OK) st = mn_rows_multiply(context, c, c->V, p->grad.write, d_v, p->v, false);
    return st;
}
