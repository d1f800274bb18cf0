/* palimpsa.c - Palimpsa's two gatings in terms of importance.
 *
 *   paper: g = log(1 - gamma / n), v' = beta v, b = beta      code: g = -dt rate
 *
 * so that dgamma = -dg / (n - gamma), dn = sum dg gamma / (n (n - gamma)), ddt = -dg rate and
 * drate = -sum dg dt. The log decay is rounded once, after log1p in double: a decay that is close
 * to 1 keeps all its digits in g, which is float32 in calls of bf16 too. As paper's v' would be
 * rounded besides, its calls of bf16 run in float32. */
#include <inttypes.h>
#include <math.h>

#include "base/dtype.h"
#include "base/status.h"
#include "kernels/access.h"
#include "kernels/functions_double.h"
#include "ops/compose/compose.h"
#include "ops/rows.h"
#include "ops/workspace.h"

/* A gate x per token and a number c per head that make a log decay. */
typedef struct gating {
    const mn_call *call;
    bool paper;             // x is gamma and c is n_mem; else dt and decay_rate
    mn_in x, c, dg;
    mn_out g, dx, dc;
    int64_t *bad_tokens;    // per head: tokens whose decay is no number in (0, 1]
} gating;

static double get(mn_dtype dtype, mn_in view, int64_t b, int64_t t, int64_t h) {
    return dtype == MN_F64 ? *MN_ROW(double, view, b, t, h) : (double)*MN_ROW(float, view, b, t, h);
}

/* One item is one head. */
static void check_decays(void *context, int64_t h, int worker) {
    (void)worker;
    const gating *p = context;
    const mn_dtype dtype = p->call->dtype;
    const double c = get(dtype, p->c, 0, 0, h);
    int64_t n_bad = 0;
    for (int64_t b = 0; b < p->call->B; b++) {
        for (int64_t t = 0; t < p->call->T; t++) {
            const double x = get(dtype, p->x, b, t, h);
            const double g = p->paper ? mn_decay_paper(x, c, 0.0) : mn_decay_code(x, c, 0.0);
            n_bad += !(g <= 0.0 && g > -INFINITY);
        }
    }
    p->bad_tokens[h] = n_bad;
}

/* dx and dc from dg. */
static mn_status finish_decays(mn_context *context, gating *p) {
    mn_status st = mn_rows_fused(context,
                                 p->paper ? MN_FUSED_DECAY_PAPER_BACK : MN_FUSED_DECAY_CODE_BACK,
                                 p->call, 1, p->dx, p->x, p->c, p->dg);
    if (st != MN_OK) return st;
    return mn_rows_token_sum(context,
                             p->paper ? MN_TOKEN_SUM_DECAY_PAPER : MN_TOKEN_SUM_DECAY_CODE,
                             p->call, 1, p->dc, p->x, p->c, p->dg);
}

/* Fills p->g, and p->dg with room for its gradient when `back`. */
static mn_status prepare_decays(mn_context *context, gating *p, bool back) {
    const char *name = p->paper ? "palimpsa_paper" : "palimpsa_code";
    const mn_out dg = mn_rows_temporary(context, p->call, back ? 1 : 0);
    p->g = mn_rows_temporary(context, p->call, 1);
    p->dg = mn_as_input(dg);
    p->bad_tokens = mn_workspace_array(context, p->call->H, 1, sizeof *p->bad_tokens);
    if (!dg.data || !p->g.data || !p->bad_tokens) {
        return mn_fail(MN_ERR_MEMORY, "%s: no memory for its temporaries", name);
    }
    const mn_status st = mn_rows_fused(context,
                                       p->paper ? MN_FUSED_DECAY_PAPER : MN_FUSED_DECAY_CODE,
                                       p->call, 1, p->g, p->x, p->c, (mn_in){ 0 });
    if (st != MN_OK || context->plans || context->device) return st;    // not checked on a device
    mn_threads_run(context->threads, p->call->H, check_decays, p);
    for (int64_t h = 0; h < p->call->H; h++) {
        if (p->bad_tokens[h] == 0) continue;
        return mn_fail(MN_ERR_ARGUMENT,
                       p->paper
                           ? "%s: head %" PRId64 " has %" PRId64
                             " tokens without 0 <= gamma < n_mem; is gamma a sigmoid, n_mem > 1?"
                           : "%s: head %" PRId64 " has %" PRId64 " tokens where dt decay_rate is "
                             "negative or not finite; are both of them positive?",
                       name, h, p->bad_tokens[h]);
    }
    return MN_OK;
}

static mn_out writable(mn_in view) {
    return (mn_out){ (void *)view.data, { view.stride[0], view.stride[1], view.stride[2] } };
}

mn_status mn_compose_palimpsa_code(mn_context *context, mn_pass pass, const void *args) {
    const mn_palimpsa_code_args *p = args;
    const bool back = pass == MN_BACKWARD;
    mn_call wide = p->call;
    if (wide.dtype == MN_BF16) wide.dtype = MN_F32;    // its WIDE rows
    gating gates = { .call = &wide, .paper = false, .x = p->dt, .c = p->decay_rate,
                     .dx = p->grad.dt, .dc = p->grad.decay_rate };
    mn_status st = prepare_decays(context, &gates, back);
    if (st != MN_OK) return st;
    const mn_importance_args child = {
        .call = p->call, .scale = p->scale,
        .q = p->q, .k = p->k, .v = p->v, .b = p->b, .g = mn_as_input(gates.g), .ip = p->ip,
        .mu0 = p->mu0, .imp0 = p->imp0,
        .o = p->o, .ovar = p->ovar, .mu = p->mu, .imp = p->imp,
        .cot = { p->cot.o, p->cot.ovar, p->cot.mu, p->cot.imp },
        .grad = { .q = p->grad.q, .k = p->grad.k, .v = p->grad.v, .b = p->grad.b,
                  .g = writable(gates.dg), .ip = p->grad.ip, .mu0 = p->grad.mu0,
                  .imp0 = p->grad.imp0 },
    };
    st = mn_op_run(context, MN_OP_importance, pass, &child);
    return st == MN_OK && back ? finish_decays(context, &gates) : st;
}

/* With v' = beta v:  dv = beta dv',  dbeta = v dv' + db. */
mn_status mn_compose_palimpsa_paper(mn_context *context, mn_pass pass, const void *args) {
    const mn_palimpsa_paper_args *p = args;
    const mn_call *c = &p->call;
    const bool back = pass == MN_BACKWARD;
    if (c->dtype == MN_BF16) return mn_compose_wide(context, MN_OP_palimpsa_paper, pass, args);
    gating gates = { .call = c, .paper = true, .x = p->gamma, .c = p->n_mem,
                     .dx = p->grad.gamma, .dc = p->grad.n_mem };
    mn_status st = prepare_decays(context, &gates, back);
    if (st != MN_OK) return st;
    const mn_out v = mn_rows_temporary(context, c, c->V);
    const mn_out dv = mn_rows_temporary(context, c, back ? c->V : 0);
    if (!v.data || !dv.data) {
        return mn_fail(MN_ERR_MEMORY, "palimpsa_paper: no memory for its temporaries");
    }
    st = mn_rows_multiply(context, c, c->V, v, p->v, p->beta, false);
    if (st != MN_OK) return st;
    const mn_importance_args child = {
        .call = p->call, .scale = p->scale,
        .q = p->q, .k = p->k, .v = mn_as_input(v), .b = p->beta, .g = mn_as_input(gates.g),
        .ip = p->ip, .mu0 = p->mu0, .imp0 = p->imp0,
        .o = p->o, .ovar = p->ovar, .mu = p->mu, .imp = p->imp,
        .cot = { p->cot.o, p->cot.ovar, p->cot.mu, p->cot.imp },
        .grad = { .q = p->grad.q, .k = p->grad.k, .v = dv, .b = p->grad.beta,
                  .g = writable(gates.dg), .ip = p->grad.ip, .mu0 = p->grad.mu0,
                  .imp0 = p->grad.imp0 },
    };
    st = mn_op_run(context, MN_OP_importance, pass, &child);
    if (st != MN_OK || !back) return st;
    st = mn_rows_multiply(context, c, c->V, p->grad.v, mn_as_input(dv), p->beta, false);
    if (st == MN_OK) {
        st = mn_rows_multiply(context, c, c->V, p->grad.beta, mn_as_input(dv), p->v, true);
    }
    return st == MN_OK ? finish_decays(context, &gates) : st;
}
