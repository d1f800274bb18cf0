/* ccq.c - the curvature-conditioned read: curvature cleans the query, then a sum (beta
 * absent) or a delta-rule memory reads with it. What the memory writes does not change.
 *
 * Backward computes the cleaned query again, takes its cotangent from the memory and hands it to
 * curvature, which adds its gradient of the key to the memory's. On a GPU a delta-rule memory's
 * forward pass goes on beside curvature. */
#include "base/status.h"
#include "ops/compose/compose.h"
#include "ops/rows.h"

static mn_curvature_args contraction(const mn_ccq_read_args *p, mn_out qt) {
    return (mn_curvature_args){
        .call = p->call, .n0 = p->n0,
        .q = p->q, .k = p->k, .gamma = p->gamma, .kk0 = p->kk0, .ks0 = p->ks0, .qt = qt,
    };
}

/* The memory behind the read, reading qt, which `query` makes on the way unless it is NULL; dqt is
 * the gradient of its query. */
static mn_status run_memory(mn_context *context, mn_pass pass, const mn_ccq_read_args *p,
                            const mn_curvature_args *query, mn_out qt, mn_out dqt) {
    if (p->beta.data) {
        const mn_delta_args memory = {
            .call = p->call, .scale = p->scale, .decay = p->decay, .query = query,
            .q = mn_as_input(qt), .e = p->k, .v = p->v, .beta = p->beta, .g = p->g,
            .state0 = p->state0, .o = p->o, .state = p->state,
            .cot = { p->cot.o, p->cot.state },
            .grad = { .q = dqt, .e = p->grad.k, .v = p->grad.v, .beta = p->grad.beta,
                      .g = p->grad.g, .state0 = p->grad.state0 },
        };
        return mn_op_run(context, MN_OP_delta, pass, &memory);
    }
    const mn_additive_args memory = {
        .call = p->call, .scale = p->scale, .decay = p->decay,
        .q = mn_as_input(qt), .k = p->k, .v = p->v, .g = p->g, .state0 = p->state0,
        .o = p->o, .state = p->state,
        .cot = { p->cot.o, p->cot.state },
        .grad = { .q = dqt, .k = p->grad.k, .v = p->grad.v, .g = p->grad.g,
                  .state0 = p->grad.state0 },
    };
    return mn_op_run(context, MN_OP_additive, pass, &memory);
}

/* Sums over few channels average roundings less: what rounding the cleaned query in bf16 does to
 * narrow memories is more than twice what rounding results does. */
static bool is_narrow(const mn_call *c) {
    return c->K < 32 || c->V <= 32;
}

mn_status mn_compose_ccq_read(mn_context *context, mn_pass pass, const void *args) {
    const mn_ccq_read_args *p = args;
    const mn_call *c = &p->call;
    const bool back = pass == MN_BACKWARD;
    if (c->dtype == MN_BF16 && is_narrow(c)) {
        return mn_compose_wide(context, MN_OP_ccq_read, pass, args);
    }
    const mn_out qt = mn_rows_temporary(context, c, c->K);
    const mn_out dqt = mn_rows_temporary(context, c, back ? c->K : 0);
    if (!qt.data || !dqt.data) {
        return mn_fail(MN_ERR_MEMORY, "ccq_read: no memory for its temporaries");
    }
    mn_curvature_args clean = contraction(p, qt);
    if (!back) {
        clean.kk = p->kk;
        clean.ks = p->ks;
    }
    const bool together = context->device && !back && p->beta.data && c->T > 1;
    mn_status st = together ? MN_OK : mn_op_run(context, MN_OP_curvature, MN_FORWARD, &clean);
    if (st == MN_OK) {
        st = run_memory(context, pass, p, together ? &clean : NULL, qt, back ? dqt : (mn_out){ 0 });
    }
    if (st != MN_OK || !back) return st;
    clean.cot.qt = mn_as_input(dqt);
    clean.cot.kk = p->cot.kk;
    clean.cot.ks = p->cot.ks;
    clean.grad.q = p->grad.q;
    clean.grad.gamma = p->grad.gamma;
    clean.grad.kk0 = p->grad.kk0;
    clean.grad.ks0 = p->grad.ks0;
    clean.grad.k = p->grad.k;
    clean.adds_k = true;
    return mn_op_run(context, MN_OP_curvature, MN_BACKWARD, &clean);
}
