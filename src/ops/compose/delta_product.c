/* delta_product.c - n delta steps a token as n times as many tokens of delta_net.
 *
 * Token t becomes tokens t n + j, j = 0 .. n - 1: its decay belongs to the first, its query to the
 * last, whose output is the token's; others have no decay and a query of zeros. Keys, values and
 * strengths (B,T,n H,..) are those tokens as they lie in memory. */
#include <stdlib.h>

#include "base/checked.h"
#include "base/dtype.h"
#include "base/status.h"
#include "ops/compose/compose.h"
#include "ops/rows.h"
#include "ops/workspace.h"

#include <inttypes.h>

typedef struct product {
    mn_context *context;
    mn_call token, step;      // rows of tokens, and of their steps
    int64_t n;
} product;

/* Rows of tokens, X wide, among those of steps: the j-th of each. */
static mn_out nth(const product *p, mn_out steps, int64_t width, int64_t j) {
    const size_t item = mn_dtype_bytes(p->step.dtype);
    const int64_t row = p->step.H * width;
    mn_out view = steps;
    if (!steps.data) return view;
    view.data = (char *)steps.data + (size_t)(j * row) * item;
    view.stride[0] = p->step.T * row, view.stride[1] = p->n * row, view.stride[2] = width;
    return view;
}

/* Rows of steps, zeros but for the j-th of each token, which is `from`; nothing where that is
 * absent. */
static mn_status spread(const product *p, mn_out *to, mn_in from, int64_t width, int64_t j) {
    *to = (mn_out){ 0 };
    if (!from.data) return MN_OK;
    *to = mn_rows_temporary(p->context, &p->step, width);
    if (!to->data) return mn_fail(MN_ERR_MEMORY, "delta_product: no memory for its temporaries");
    const int64_t count = p->step.B * p->step.T * p->step.H * width;
    mn_status st = mn_workspace_clear(p->context, to->data,
                                      (size_t)count * mn_dtype_bytes(p->step.dtype));
    if (st == MN_OK) {
        st = mn_rows_copy(p->context, &p->token, width, nth(p, *to, width, j), from);
    }
    return st;
}

/* Memory for rows of steps of which the j-th of each token is a result. */
static mn_status room(const product *p, mn_out *to, mn_out result, int64_t width) {
    *to = (mn_out){ 0 };
    if (!result.data) return MN_OK;
    *to = mn_rows_temporary(p->context, &p->step, width);
    return to->data ? MN_OK : mn_fail(MN_ERR_MEMORY, "delta_product: no memory for temporaries");
}

static mn_status gather(const product *p, mn_out result, mn_out steps, int64_t width, int64_t j) {
    return mn_rows_copy(p->context, &p->token, width, result,
                        mn_as_input(nth(p, steps, width, j)));
}

/* Rows (B,T,n H,X) as rows of steps: the same memory where they lie side by side, or a copy. */
static mn_status as_steps(const product *p, mn_in *to, mn_in from, int64_t width) {
    mn_call rows = p->token;
    rows.H = p->n * p->step.H;
    *to = from;
    to->stride[1] = p->step.H * from.stride[2];
    if (!from.data || from.stride[1] == rows.H * from.stride[2]) return MN_OK;
    const mn_out copy = mn_rows_temporary(p->context, &rows, width);
    if (!copy.data) return mn_fail(MN_ERR_MEMORY, "delta_product: no memory for its temporaries");
    *to = (mn_in){ copy.data, { rows.T * rows.H * width, p->step.H * width, width } };
    return mn_rows_copy(p->context, &rows, width, copy, from);
}

/* Where gradients of such rows go: there if they lie side by side, else into a copy. */
static mn_status grad_steps(const product *p, mn_out *to, mn_out result, int64_t width) {
    const int64_t rows = p->n * p->step.H;
    *to = result;
    to->stride[1] = p->step.H * result.stride[2];
    if (!result.data || result.stride[1] == rows * result.stride[2]) return MN_OK;
    return room(p, to, result, width);
}

static mn_status grad_back(const product *p, mn_out result, mn_out steps, int64_t width) {
    mn_call rows = p->token;
    rows.H = p->n * p->step.H;
    if (!result.data || result.data == steps.data) return MN_OK;
    const mn_in from = { steps.data, { rows.T * rows.H * width, rows.H * width, width } };
    return mn_rows_copy(p->context, &rows, width, result, from);
}

static mn_status inputs_of(const product *p, mn_delta_net_args *to,
                           const mn_delta_product_args *args, bool back) {
    const int64_t K = p->token.K, V = p->token.V, last = p->n - 1;
    mn_out q = {0}, g = {0}, o;
    mn_status st = spread(p, &q, args->q, K, last);
    if (st == MN_OK) st = spread(p, &g, args->g, 1, 0);
    if (st == MN_OK) st = as_steps(p, &to->k, args->k, K);
    if (st == MN_OK) st = as_steps(p, &to->v, args->v, V);
    if (st == MN_OK) st = as_steps(p, &to->beta, args->beta, 1);
    to->q = mn_as_input(q), to->g = mn_as_input(g);
    if (st == MN_OK && back) {
        st = spread(p, &o, args->cot.o, V, last);
        to->cot.o = mn_as_input(o);
    } else if (st == MN_OK) {
        st = room(p, &to->o, args->o, V);
    }
    return st;
}

static mn_status grads_of(const product *p, mn_delta_net_args *to,
                          const mn_delta_product_args *args) {
    const int64_t K = p->token.K, V = p->token.V;
    mn_status st = room(p, &to->grad.q, args->grad.q, K);
    if (st == MN_OK) st = room(p, &to->grad.g, args->grad.g, 1);
    if (st == MN_OK) st = grad_steps(p, &to->grad.k, args->grad.k, K);
    if (st == MN_OK) st = grad_steps(p, &to->grad.v, args->grad.v, V);
    if (st == MN_OK) st = grad_steps(p, &to->grad.beta, args->grad.beta, 1);
    return st;
}

static mn_status results_of(const product *p, const mn_delta_net_args *from,
                            const mn_delta_product_args *args, bool back) {
    const int64_t K = p->token.K, V = p->token.V, last = p->n - 1;
    if (!back) return gather(p, args->o, from->o, V, last);
    mn_status st = gather(p, args->grad.q, from->grad.q, K, last);
    if (st == MN_OK) st = gather(p, args->grad.g, from->grad.g, 1, 0);
    if (st == MN_OK) st = grad_back(p, args->grad.k, from->grad.k, K);
    if (st == MN_OK) st = grad_back(p, args->grad.v, from->grad.v, V);
    return st == MN_OK ? grad_back(p, args->grad.beta, from->grad.beta, 1) : st;
}

mn_status mn_compose_delta_product(mn_context *context, mn_pass pass, const void *args) {
    const mn_delta_product_args *a = args;
    const mn_call *c = args;
    const bool back = pass == MN_BACKWARD;
    product p = { .context = context, .token = *c, .step = *c, .n = c->Q / c->H };
    int64_t *borders = NULL;
    if (!mn_mul_i64(&p.step.T, c->T, p.n)) {
        return mn_fail(MN_ERR_ARGUMENT, "delta_product: %" PRId64 " steps a token overflow", p.n);
    }
    p.step.Q = p.token.Q = 0;
    p.token.cu_seqlens = NULL;
    if (c->cu_seqlens) {
        borders = malloc((size_t)(c->n_seqs + 1) * sizeof *borders);
        if (!borders) return mn_fail(MN_ERR_MEMORY, "delta_product: no memory for borders");
        for (int64_t i = 0; i <= c->n_seqs; i++) borders[i] = p.n * c->cu_seqlens[i];
        p.step.cu_seqlens = borders;
    }
    mn_delta_net_args net = { .call = p.step, .scale = a->scale, .state0 = a->state0,
                              .decay = a->g.data ? MN_DECAY_TOKEN : MN_DECAY_NONE,
                              .cot = { .state = a->cot.state }, .state = a->state,
                              .grad = { .state0 = a->grad.state0 } };
    mn_status st = inputs_of(&p, &net, a, back);
    if (st == MN_OK && back) st = grads_of(&p, &net, a);
    if (st == MN_OK) st = mn_op_run(context, MN_OP_delta_net, pass, &net);
    if (st == MN_OK) st = results_of(&p, &net, a, back);
    free(borders);
    return st;
}
