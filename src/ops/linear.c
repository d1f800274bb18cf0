/* linear.c - y = x W' + b over rows, or its sigmoid s; ds/dz = s (1 - s).
 *
 *   dz = dy or dy s (1 - s)      dW = dz'x      db = column sums of dz      dx = dz W */
#include "ops/linear.h"

#include "ops/elementwise/elementwise.h"
#include "ops/matmul.h"

/* The rows of results; `one` serves all of them. */
static mn_view rows_of(const mn_linear *p, const void *data, bool one) {
    return (mn_view){ (void *)data, p->dtype, { 0, one ? 0 : p->n_out, 0, 1 } };
}

/* y = f(y, b); b may be one row. */
static mn_status fused(mn_context *context, mn_fused_kind f, const mn_linear *p, void *y,
                       const void *b, bool b_is_row) {
    const mn_fused_params job = { .f = f, .shape = { 1, p->n_rows, 1, p->n_out },
                                  .in = { rows_of(p, y, false), rows_of(p, b, b_is_row) },
                                  .out = { rows_of(p, y, false) } };
    return mn_elementwise_run(context, MN_ELEMENTWISE_FUSED, &job);
}

/* ---- the gemms ---------------------------------------------------------------------------- */

static mn_matmul_args forward_gemm(const mn_linear *p, void *y) {
    return (mn_matmul_args){ .dtype = p->dtype, .c_dtype = p->dtype, .c = y, .a = p->x,
                             .b = p->weight, .M = p->n_rows, .N = p->n_out, .K = p->n_in,
                             .b_transposed = true };
}

static mn_status weight_backward(mn_context *context, const mn_linear *p, const void *dy,
                                 void *dweight) {
    const mn_matmul_args product = { .dtype = p->dtype, .c_dtype = p->dtype, .c = dweight, .a = dy,
                                     .b = p->x, .M = p->n_out, .N = p->n_in, .K = p->n_rows,
                                     .a_transposed = true };
    return dweight ? mn_matmul(context, &product) : MN_OK;
}

static mn_status input_backward(mn_context *context, const mn_linear *p, const void *dy, void *dx,
                                bool add) {
    const mn_matmul_args product = { .dtype = p->dtype, .c_dtype = p->dtype,
                                     .c = dx, .a = dy, .b = p->weight, .M = p->n_rows,
                                     .N = p->n_in, .K = p->n_out, .accumulate = add };
    return dx ? mn_matmul(context, &product) : MN_OK;
}

mn_status mn_linear_forward(mn_context *context, const mn_linear *p, void *y) {
    mn_matmul_args product = forward_gemm(p, y);
    product.bias = context->device && !p->sigmoid ? p->bias : NULL;
    const mn_status st = mn_matmul(context, &product);
    if (st != MN_OK) return st;
    if (p->sigmoid) return fused(context, MN_FUSED_SIGMOID_SUM, p, y, p->bias, true);
    if (!p->bias || context->device) return MN_OK;
    const mn_pair_params sum = { .kind = MN_PAIR_ADD, .shape = { 1, p->n_rows, 1, p->n_out },
                                 .a = rows_of(p, y, false), .b = rows_of(p, p->bias, true),
                                 .y = rows_of(p, y, false) };
    return mn_elementwise_run(context, MN_ELEMENTWISE_PAIR, &sum);
}

/* dy becomes the cotangent of x W' + b, and dbias its sums. */
static mn_status preact_backward(mn_context *context, const mn_linear *p, const void *y, void *dy,
                               void *dbias) {
    mn_status st = MN_OK;
    if (p->sigmoid) st = fused(context, MN_FUSED_SIGMOID_BACK, p, dy, y, false);
    if (st != MN_OK || !dbias) return st;
    const mn_token_sum_params sum = { .f = MN_TOKEN_SUM_PLAIN,
                                      .shape = { 1, p->n_rows, 1, p->n_out },
                                      .in = { rows_of(p, dy, false) },
                                      .sum = rows_of(p, dbias, true) };
    return mn_elementwise_run(context, MN_ELEMENTWISE_TOKEN_SUM, &sum);
}

mn_status mn_linear_backward(mn_context *context, const mn_linear *p, const void *y, void *dy,
                             void *dweight, void *dbias, void *dx, bool add) {
    mn_status st = preact_backward(context, p, y, dy, dbias);
    if (st == MN_OK) st = weight_backward(context, p, dy, dweight);
    if (st == MN_OK) st = input_backward(context, p, dy, dx, add);
    return st;
}
