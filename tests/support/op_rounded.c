/* op_rounded.c - operators in float64, rounding to bf16 between their parts. Of those made of
 * others two pass rows on: ccq_read the cleaned query, its cotangent and the memory's gradient of
 * k; conv_unit what goes into the norm, and its cotangent. */
#include "support/op_rounded.h"

#include <stdlib.h>

#include "base/bf16.h"
#include "base/util.h"
#include "ops/sample_device.h"
#include "support/check.h"
#include "support/delta_rounded.h"
#include "support/op_walk.h"
#include "support/shares.h"

static void round_all(double *x, int64_t count) {
    for (int64_t i = 0; i < count; i++) x[i] = mn_bf16_round(x[i]);
}

/* Results and gradients, but for states, which stay wide. */
static void round_results(mn_sample *sample) {
    for (int i = 0; i < sample->n_tensors; i++) {
        const mn_sample_tensor *t = &sample->tensors[i];
        double *x = op_memory(t, OP_COMPUTED);
        if (x && mn_field_dtype(t->field, MN_BF16) == MN_BF16) round_all(x, t->count);
    }
}

/* A tensor of rows of K numbers for every token and head. */
static mn_out rows_of(double *data, const mn_call *c) {
    return (mn_out){ data, { c->T * c->H * c->K, c->H * c->K, c->K } };
}

static mn_in as_input(mn_out x) {
    return (mn_in){ x.data, { x.stride[0], x.stride[1], x.stride[2] } };
}

static void run(mn_op_id op, mn_pass pass, const void *args, const op_case *c) {
    const mn_status st = mn_op_run(op_context("ref", mn_min(shares_threads(), 2)), op, pass, args);
    if (st != MN_OK) check_fatal("%s: %s", op_case_text(c), mn_last_error());
}

static void run_memory(mn_pass pass, const mn_ccq_read_args *p, mn_out qt, mn_out dqt,
                       const op_case *c) {
    const mn_delta_net_args delta = {
        .call = p->call, .scale = p->scale, .decay = p->decay,
        .q = as_input(qt), .k = p->k, .v = p->v, .beta = p->beta, .g = p->g,
        .state0 = p->state0, .o = p->o, .state = p->state, .cot = { p->cot.o, p->cot.state },
        .grad = { .q = dqt, .k = p->grad.k, .v = p->grad.v, .beta = p->grad.beta, .g = p->grad.g,
                  .state0 = p->grad.state0 },
    };
    const mn_additive_args sum = {
        .call = p->call, .scale = p->scale, .decay = p->decay,
        .q = as_input(qt), .k = p->k, .v = p->v, .g = p->g,
        .state0 = p->state0, .o = p->o, .state = p->state, .cot = { p->cot.o, p->cot.state },
        .grad = { .q = dqt, .k = p->grad.k, .v = p->grad.v, .g = p->grad.g,
                  .state0 = p->grad.state0 },
    };
    if (p->beta.data) run(MN_OP_delta_net, pass, &delta, c);
    else run(MN_OP_additive, pass, &sum, c);
}

static void run_ccq_read(mn_sample *sample, const op_case *c) {
    const mn_ccq_read_args *p = (const mn_ccq_read_args *)sample->args;
    const int64_t count = p->call.B * p->call.T * p->call.H * p->call.K;
    double *rows = calloc((size_t)(2 * count + 1), sizeof *rows);
    if (!rows) check_fatal("%s: no memory", op_case_text(c));
    const mn_out qt = rows_of(rows, &p->call), dqt = rows_of(rows + count, &p->call);
    mn_curvature_args clean = {
        .call = p->call, .n0 = p->n0, .q = p->q, .k = p->k, .gamma = p->gamma, .kk0 = p->kk0,
        .ks0 = p->ks0, .qt = qt, .kk = p->kk, .ks = p->ks,
    };
    run(MN_OP_curvature, MN_FORWARD, &clean, c);
    round_all(rows, count);
    run_memory(MN_FORWARD, p, qt, (mn_out){ 0 }, c);
    run_memory(MN_BACKWARD, p, qt, dqt, c);
    round_all(rows + count, count);
    if (p->grad.k.data) round_all(p->grad.k.data, count);
    clean.cot.qt = as_input(dqt);
    clean.cot.kk = p->cot.kk, clean.cot.ks = p->cot.ks;
    clean.grad.q = p->grad.q, clean.grad.k = p->grad.k, clean.grad.gamma = p->grad.gamma;
    clean.grad.kk0 = p->grad.kk0, clean.grad.ks0 = p->grad.ks0;
    clean.adds_k = true;
    run(MN_OP_curvature, MN_BACKWARD, &clean, c);
    free(rows);
}

static void run_conv_unit(mn_sample *sample, const op_case *c) {
    const mn_conv_unit_args *p = (const mn_conv_unit_args *)sample->args;
    const int64_t rows = p->call.B * p->call.T * p->call.H, count = rows * p->call.K;
    double *a = calloc((size_t)(2 * count + 1), sizeof *a), *da = a + count;
    if (!a) check_fatal("%s: no memory", op_case_text(c));
    mn_conv_args conv = {
        .call = p->call, .act = 1, .x.data = p->x.data, .w.data = p->w.data,
        .bias.data = p->bias.data, .tail0.data = p->tail0.data, .y.data = a,
        .tail.data = p->tail.data,
    };
    mn_l2_norm_args norm = { .call = { .dtype = MN_F64, .B = rows, .V = p->call.K },
                             .eps = p->eps, .kind = p->kind, .x.data = a, .y.data = p->y.data,
                             .cot.y.data = p->cot.y.data, .grad.x.data = da };
    conv.call.V = p->call.H * p->call.K;
    run(MN_OP_conv, MN_FORWARD, &conv, c);
    round_all(a, count);
    if (count > 0) run(MN_OP_l2_norm, MN_FORWARD, &norm, c);
    if (count > 0) run(MN_OP_l2_norm, MN_BACKWARD, &norm, c);
    round_all(da, count);
    conv.cot.y.data = da, conv.cot.tail.data = p->cot.tail.data;
    conv.grad.x.data = p->grad.x.data, conv.grad.w.data = p->grad.w.data;
    conv.grad.bias.data = p->grad.bias.data, conv.grad.tail0.data = p->grad.tail0.data;
    run(MN_OP_conv, MN_BACKWARD, &conv, c);
    free(a);
}

bool op_run_rounded(mn_sample *sample, const op_case *c) {
    if (c->op == MN_OP_ccq_read) run_ccq_read(sample, c);
    else if (c->op == MN_OP_conv_unit) run_conv_unit(sample, c);
    else if (c->op == MN_OP_delta) delta_run_rounded(sample, c, true);
    else return false;
    round_results(sample);
    return true;
}
