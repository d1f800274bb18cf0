/* conv_unit.c - conv_unit as conv, then l2_norm over its heads, where no kernel does both
 * (kernels/conv_unit.h).
 *
 * Backward computes the convolution again and takes its cotangent from the norm. */
#include "base/status.h"
#include "ops/compose/compose.h"
#include "ops/rows.h"

/* Whether the heads of a token lie side by side; `dense`: and the tokens too. */
static bool is_flat(const mn_call *c, const int64_t stride[3], bool dense) {
    const int64_t token = c->H * c->K;
    const bool flat = c->H == 1 || stride[2] == c->K;
    return flat && (!dense || ((c->T == 1 || stride[1] == token) &&
                               (c->B == 1 || stride[0] == c->T * token)));
}

/* A view as it is where it is flat, else a copy; without data where memory is out. */
static mn_status flatten(mn_in *out, mn_context *context, const mn_call *c, mn_in view,
                         bool dense) {
    *out = view;
    if (!view.data || is_flat(c, view.stride, dense)) return MN_OK;
    const mn_out copy = mn_rows_temporary(context, c, c->K);
    *out = mn_as_input(copy);
    return copy.data ? mn_rows_copy(context, c, c->K, copy, view)
                     : mn_fail(MN_ERR_MEMORY, "conv_unit: no memory for its temporaries");
}

/* Where a result is made: where it shall be if that is flat, else beside. */
static mn_status place(mn_out *out, mn_context *context, const mn_call *c, mn_out view,
                       bool dense) {
    *out = view;
    if (!view.data || is_flat(c, view.stride, dense)) return MN_OK;
    *out = mn_rows_temporary(context, c, c->K);
    return out->data ? MN_OK : mn_fail(MN_ERR_MEMORY, "conv_unit: no memory for its temporaries");
}

/* Brings what was made beside to where it shall be. */
static mn_status deliver(mn_context *context, const mn_call *c, mn_out view, mn_out made) {
    if (made.data == view.data) return MN_OK;
    return mn_rows_copy(context, c, c->K, view, mn_as_input(made));
}

/* The convolution over all channels of x. */
static mn_conv_args convolution(const mn_conv_unit_args *p, mn_in x) {
    mn_conv_args conv = { .call = p->call, .act = 1, .x = x, .w = { .data = p->w.data },
                          .bias = { .data = p->bias.data }, .tail0 = { .data = p->tail0.data } };
    conv.call.V = p->call.H * p->call.K;
    return conv;
}

/* The norm over the heads of x, a row each. */
static mn_l2_norm_args norm(const mn_conv_unit_args *p, const void *x) {
    mn_l2_norm_args norm = { .call = { .dtype = p->call.dtype }, .eps = p->eps, .kind = p->kind,
                             .x = { .data = x } };
    norm.call.B = p->call.B * p->call.T * p->call.H;
    norm.call.V = p->call.K;
    return norm;
}

static mn_status forward(mn_context *context, const mn_conv_unit_args *p) {
    const mn_call *c = &p->call;
    mn_in x;
    mn_out y;
    mn_status st = flatten(&x, context, c, p->x, false);
    if (st == MN_OK) st = place(&y, context, c, p->y, true);
    if (st != MN_OK) return st;
    mn_conv_args conv = convolution(p, x);
    conv.y = y;
    conv.tail.data = p->tail.data;
    st = mn_op_run(context, MN_OP_conv, MN_FORWARD, &conv);
    if (st != MN_OK || !y.data || c->T == 0) return st;
    mn_l2_norm_args unit = norm(p, y.data);
    unit.y.data = y.data;
    st = mn_op_run(context, MN_OP_l2_norm, MN_FORWARD, &unit);
    return st == MN_OK ? deliver(context, c, p->y, y) : st;
}

/* The cotangent of the convolution's result. */
static mn_status norm_back(mn_out *da, mn_context *context, const mn_conv_unit_args *p, mn_in x) {
    const mn_call *c = &p->call;
    const mn_out a = mn_rows_temporary(context, c, c->K);
    mn_in dy;
    *da = mn_rows_temporary(context, c, c->K);
    if (!a.data || !da->data) {
        return mn_fail(MN_ERR_MEMORY, "conv_unit: no memory for its temporaries");
    }
    mn_conv_args conv = convolution(p, x);
    conv.y = a;
    mn_status st = mn_op_run(context, MN_OP_conv, MN_FORWARD, &conv);
    if (st == MN_OK) st = flatten(&dy, context, c, p->cot.y, true);
    if (st != MN_OK) return st;
    mn_l2_norm_args unit = norm(p, a.data);
    unit.cot.y.data = dy.data;
    unit.grad.x.data = da->data;
    return mn_op_run(context, MN_OP_l2_norm, MN_BACKWARD, &unit);
}

static mn_status backward(mn_context *context, const mn_conv_unit_args *p) {
    const mn_call *c = &p->call;
    mn_in x;
    mn_out da = { 0 }, dx;
    mn_status st = flatten(&x, context, c, p->x, false);
    if (st == MN_OK) st = place(&dx, context, c, p->grad.x, false);
    if (st == MN_OK && p->cot.y.data && c->T > 0) st = norm_back(&da, context, p, x);
    if (st != MN_OK) return st;
    mn_conv_args conv = convolution(p, x);
    conv.cot.y = mn_as_input(da);
    conv.cot.tail.data = p->cot.tail.data;
    conv.grad.x = dx;
    conv.grad.w.data = p->grad.w.data;
    conv.grad.bias.data = p->grad.bias.data;
    conv.grad.tail0.data = p->grad.tail0.data;
    st = mn_op_run(context, MN_OP_conv, MN_BACKWARD, &conv);
    return st == MN_OK ? deliver(context, c, p->grad.x, dx) : st;
}

mn_status mn_compose_conv_unit(mn_context *context, mn_pass pass, const void *args) {
    return pass == MN_BACKWARD ? backward(context, args) : forward(context, args);
}
