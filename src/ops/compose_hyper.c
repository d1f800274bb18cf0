/* compose_hyper.c - the HyperMLP / HyperGLU module:
 *
 *   gates       gq = sigmoid(x Wl' + bl)     gv = sigmoid(x Wr' + br)
 *   controls    c1 = sigmoid(x W1' + b1)     c2 = sigmoid(x W2' + b2)
 *   xk = conv1(x), xv = conv2(x)             depthwise, causal, neither bias nor activation
 *   q = gq . (x Wq')    k = xk Wk'    v = xv Wv'    y = hyper(q, k, v, gv, c1, c2) Wp'
 *
 * Backward recomputes all of it, then goes the same way back; on a device hyper's backward makes o
 * anyway and hands it out. dx has seven terms, which are added up in float32 where the call is of
 * bf16. */
#include <inttypes.h>
#include <string.h>

#include "base/dtype.h"
#include "base/status.h"
#include "kernels/access.h"
#include "ops/compose.h"
#include "ops/linear.h"
#include "ops/rows.h"
#include "ops/work.h"

/* What forward makes and backward needs, all contiguous over the B T rows; d_* are its
 * cotangents. */
typedef struct layer {
    mn_context *context;
    const mn_hyper_layer_args *p;
    int64_t n_rows;
    void *x, *xk, *xv, *gq, *gv, *c1, *c2, *q0, *q, *k, *v, *o;
    void *dy, *d_o, *dq, *dk, *dv, *dgq, *dgv, *dc1, *dc2, *dx, *dxk, *dxv, *dconv;
    bool out_of_memory;
} layer;

static mn_status check_sizes(const mn_hyper_layer_args *p) {
    const mn_call *c = &p->call;
    const int64_t branches = p->kind == 1 ? 2 : 1;
    const int64_t longest = c->cu_seqlens ? mn_longest_sequence(c) : c->T;
    if (c->Q % c->H != 0 || c->Q / c->H != branches) {
        return mn_fail(MN_ERR_ARGUMENT, "hyper_layer: Q = %" PRId64 " branches for H = %" PRId64
                       " heads; kind %s needs %s", c->Q, c->H, branches == 2 ? "glu" : "relu",
                       branches == 2 ? "Q = 2 H" : "Q = H");
    }
    if (c->K % c->Q != 0 || c->V % c->H != 0) {
        return mn_fail(MN_ERR_ARGUMENT,
                       "hyper_layer: K = %" PRId64 " must be a multiple of Q = %" PRId64
                       ", and V = %" PRId64 " of H = %" PRId64,
                       c->K, c->Q, c->V, c->H);
    }
    if (c->J % c->Q != 0 || c->J / c->Q != c->R || c->L % c->H != 0 || c->L / c->H != c->S) {
        return mn_fail(MN_ERR_ARGUMENT, "hyper_layer: control1 has J = %" PRId64
                       " rows, not Q R, or control2 has L = %" PRId64 ", not H S", c->J, c->L);
    }
    if (longest > c->P) {
        return mn_fail(MN_ERR_ARGUMENT,
                       "hyper_layer: %" PRId64 " tokens, and mixing parameters for P = %" PRId64
                       "; use a larger block size or shorter sequences",
                       longest, c->P);
    }
    return MN_OK;
}

static void *temporary(layer *s, int64_t width) {
    void *data = mn_work_array(s->context, s->n_rows, width, mn_dtype_bytes(s->p->call.dtype));
    if (!data) s->out_of_memory = true;
    return data;
}

/* A contiguous view of rows of `width`, one head. */
static mn_in flat(const layer *s, const void *data, int64_t width) {
    return (mn_in){ data, { s->p->call.T * width, width, 0 } };
}

static mn_out flat_out(const layer *s, void *data, int64_t width) {
    return (mn_out){ data, { s->p->call.T * width, width, 0 } };
}

/* Copies rows of `width` between views. */
static mn_status copy_rows(const layer *s, mn_out to, mn_in from, int64_t width) {
    mn_call rows = s->p->call;
    rows.H = 1;
    const mn_in none = { NULL, { 0, 0, 0 } };
    if (s->context->device) {
        return mn_rows_glue(s->context, MN_GLUE_copy, &rows, width, to, from, none, none);
    }
    if (s->context->plans) return MN_OK;
    const size_t bytes = mn_dtype_bytes(rows.dtype);
    for (int64_t b = 0; b < rows.B; b++) {
        for (int64_t t = 0; t < rows.T; t++) {
            memcpy((char *)to.data + (size_t)MN_OFFSET(to, b, t, 0) * bytes,
                   (const char *)from.data + (size_t)MN_OFFSET(from, b, t, 0) * bytes,
                   (size_t)width * bytes);
        }
    }
    return MN_OK;
}

/* dx += dconv */
static mn_status add_conv(const layer *s) {
    const mn_call *c = &s->p->call;
    const int64_t count = s->context->plans ? 0 : s->n_rows * c->D;
    if (s->context->device) {
        const mn_in dx = flat(s, s->dx, c->D), dconv = flat(s, s->dconv, c->D);
        const mn_glue sum = { .dtype = c->dtype, .B = c->B, .T = c->T, .H = 1, .width = c->D,
                              .wide = MN_GLUE_WIDE_A | MN_GLUE_WIDE_X, .a = dx, .b = dconv,
                              .x = flat_out(s, s->dx, c->D) };
        return mn_work_glue(s->context, MN_GLUE_add, &sum);
    }
    for (int64_t i = 0; i < count; i++) {
        if (c->dtype == MN_F64) ((double *)s->dx)[i] += ((double *)s->dconv)[i];
        else ((float *)s->dx)[i] += ((float *)s->dconv)[i];
    }
    return MN_OK;
}

/* dx to the caller's view. */
static mn_status put_dx(const layer *s) {
    mn_call rows = s->p->call;
    rows.H = 1;
    const mn_in dx = flat(s, s->dx, rows.D);
    if (!s->context->device) return copy_rows(s, s->p->grad.x, dx, rows.D);
    return mn_rows_convert(s->context, &rows, rows.D, s->p->grad.x, dx, false);
}

static void open_layer(layer *s, bool backward) {
    const mn_call *c = &s->p->call;
    void **wide[] = { &s->x, &s->xk, &s->xv, &s->dy, &s->dxk, &s->dxv, &s->dconv };
    void **key[] = { &s->gq, &s->q0, &s->q, &s->k, &s->dq, &s->dgq, &s->dk };
    void **value[] = { &s->gv, &s->v, &s->o, &s->dgv, &s->dv, &s->d_o };
    for (int i = 0; i < (backward ? 7 : 3); i++) *wide[i] = temporary(s, c->D);
    for (int i = 0; i < (backward ? 7 : 4); i++) *key[i] = temporary(s, c->K);
    for (int i = 0; i < (backward ? 6 : 3); i++) *value[i] = temporary(s, c->V);
    s->c1 = temporary(s, c->J);
    s->c2 = temporary(s, c->L);
    if (backward) s->dx = temporary(s, c->dtype == MN_BF16 ? 2 * c->D : c->D);
    if (backward) s->dc1 = temporary(s, c->J);
    if (backward) s->dc2 = temporary(s, c->L);
}

static mn_linear linear(const layer *s, const void *x, int64_t n_in, mn_in weight, mn_in bias,
                        int64_t n_out) {
    return (mn_linear){ .dtype = s->p->call.dtype, .n_rows = s->n_rows, .n_in = n_in,
                        .n_out = n_out, .x = x, .weight = weight.data, .bias = bias.data,
                        .sigmoid = bias.data != NULL,      // exactly the gates have a bias
                        .wide = x == s->x };
}

/* The projections, in the order of the equations above. */
typedef struct projections {
    mn_linear left, right, control1, control2, q, k, v, c_proj;
} projections;

static projections projections_of(const layer *s) {
    const mn_hyper_layer_args *p = s->p;
    const mn_call *c = &p->call;
    const mn_in none = { NULL, { 0, 0, 0 } };
    return (projections){
        .left = linear(s, s->x, c->D, p->left_gate_weight, p->left_gate_bias, c->K),
        .right = linear(s, s->x, c->D, p->right_gate_weight, p->right_gate_bias, c->V),
        .control1 = linear(s, s->x, c->D, p->control1_weight, p->control1_bias, c->J),
        .control2 = linear(s, s->x, c->D, p->control2_weight, p->control2_bias, c->L),
        .q = linear(s, s->x, c->D, p->q_weight, none, c->K),
        .k = linear(s, s->xk, c->D, p->k_weight, none, c->K),
        .v = linear(s, s->xv, c->D, p->v_weight, none, c->V),
        .c_proj = linear(s, s->o, c->V, p->c_proj_weight, none, c->D),
    };
}

static mn_conv_args convolution(const layer *s, mn_in weight) {
    mn_conv_args conv = { .call = s->p->call, .x = flat(s, s->x, s->p->call.D) };
    conv.call.V = s->p->call.D;
    conv.w.data = weight.data;
    return conv;
}

static mn_hyper_args core(const layer *s) {
    const mn_hyper_layer_args *p = s->p;
    mn_hyper_args hyper = {
        .call = p->call, .eps = p->eps, .kind = p->kind, .norm = p->norm,
        .q = { .data = s->q }, .k = { .data = s->k }, .v = { .data = s->v },
        .gv = { .data = s->gv }, .c1 = { .data = s->c1 }, .c2 = { .data = s->c2 },
        .U1 = p->op_mix_U, .Vt1 = p->op_mix_Vt, .d1 = p->op_mix_d,
        .U2 = p->op2_mix_U, .Vt2 = p->op2_mix_Vt, .d2 = p->op2_mix_d,
    };
    mn_in *whole[] = { &hyper.U1, &hyper.Vt1, &hyper.d1, &hyper.U2, &hyper.Vt2, &hyper.d2 };
    for (int i = 0; i < 6; i++) memset(whole[i]->stride, 0, sizeof whole[i]->stride);
    mn_call *c = &hyper.call;
    c->K /= c->Q;
    c->V /= c->H;
    c->L = c->T;
    c->J = 0;
    c->W = c->S;
    return hyper;
}

/* What hyper takes. */
static mn_status forward(layer *s, const projections *w) {
    mn_call rows = s->p->call;
    rows.H = 1;
    const int64_t D = rows.D, K = rows.K;
    mn_context *context = s->context;
    mn_status st = copy_rows(s, flat_out(s, s->x, D), s->p->x, D);
    mn_conv_args conv = convolution(s, s->p->conv1_conv_weight);
    conv.y.data = s->xk;
    if (st == MN_OK) st = mn_op_run(context, MN_OP_conv, MN_FORWARD, &conv);
    conv = convolution(s, s->p->conv2_conv_weight);
    conv.y.data = s->xv;
    if (st == MN_OK) st = mn_op_run(context, MN_OP_conv, MN_FORWARD, &conv);
    const mn_linear *products[] = { &w->left, &w->right, &w->control1, &w->control2, &w->q, &w->k,
                                    &w->v };
    void *const results[] = { s->gq, s->gv, s->c1, s->c2, s->q0, s->k, s->v };
    for (int i = 0; st == MN_OK && i < 7; i++) {
        st = mn_linear_forward(context, products[i], results[i]);
    }
    if (st == MN_OK) {
        st = mn_rows_multiply(context, &rows, K, flat_out(s, s->q, K), flat(s, s->q0, K),
                              flat(s, s->gq, K), false);
    }
    return st;
}

static mn_status hyper_forward(layer *s) {
    mn_hyper_args hyper = core(s);
    hyper.o.data = s->o;
    return mn_op_run(s->context, MN_OP_hyper, MN_FORWARD, &hyper);
}

static mn_status hyper_backward(layer *s) {
    const mn_hyper_layer_args *p = s->p;
    mn_hyper_args hyper = core(s);
    if (s->context->device) hyper.o.data = s->o;
    hyper.cot.o.data = s->d_o;
    hyper.grad.q.data = s->dq;
    hyper.grad.k.data = s->dk;
    hyper.grad.v.data = s->dv;
    hyper.grad.gv.data = s->dgv;
    hyper.grad.c1.data = s->dc1;
    hyper.grad.c2.data = s->dc2;
    hyper.grad.U1.data = p->grad.op_mix_U.data;
    hyper.grad.Vt1.data = p->grad.op_mix_Vt.data;
    hyper.grad.d1.data = p->grad.op_mix_d.data;
    hyper.grad.U2.data = p->grad.op2_mix_U.data;
    hyper.grad.Vt2.data = p->grad.op2_mix_Vt.data;
    hyper.grad.d2.data = p->grad.op2_mix_d.data;
    return mn_op_run(s->context, MN_OP_hyper, MN_BACKWARD, &hyper);
}

/* From the cotangent of a convolution's result: its weight's gradient, and dx grows by its part. */
static mn_status conv_backward(layer *s, mn_in weight, const void *dy, mn_out dweight) {
    mn_conv_args conv = convolution(s, weight);
    conv.cot.y.data = dy;
    conv.grad.x.data = s->dconv;
    conv.grad.w.data = dweight.data;
    const mn_status st = mn_op_run(s->context, MN_OP_conv, MN_BACKWARD, &conv);
    return st == MN_OK ? add_conv(s) : st;
}

/* The cotangent of y as rows, and of what hyper gave. */
static mn_status open_backward(layer *s, const projections *w) {
    const mn_hyper_layer_args *p = s->p;
    const mn_call *c = &p->call;
    mn_status st = p->cot.y.data
                       ? copy_rows(s, flat_out(s, s->dy, c->D), p->cot.y, c->D)
                       : mn_work_clear(s->context, s->dy,
                                       (size_t)(s->n_rows * c->D) * mn_dtype_bytes(c->dtype));
    if (st != MN_OK) return st;
    return mn_linear_backward(s->context, &w->c_proj, NULL, s->dy, NULL, NULL, s->d_o, false);
}

/* From the cotangents of what hyper took to those of x, xk and xv. */
static mn_status projections_backward(layer *s, const projections *w) {
    const mn_hyper_layer_args *p = s->p;
    const struct {
        const mn_linear *of;
        void *y, *dy, *dweight, *dbias, *dx;
        bool add;
    } steps[] = {
        { &w->q, NULL, s->dq, p->grad.q_weight.data, NULL, s->dx, false },
        { &w->left, s->gq, s->dgq, p->grad.left_gate_weight.data, p->grad.left_gate_bias.data,
          s->dx, true },
        { &w->right, s->gv, s->dgv, p->grad.right_gate_weight.data, p->grad.right_gate_bias.data,
          s->dx, true },
        { &w->control1, s->c1, s->dc1, p->grad.control1_weight.data, p->grad.control1_bias.data,
          s->dx, true },
        { &w->control2, s->c2, s->dc2, p->grad.control2_weight.data, p->grad.control2_bias.data,
          s->dx, true },
        { &w->k, NULL, s->dk, p->grad.k_weight.data, NULL, s->dxk, false },
        { &w->v, NULL, s->dv, p->grad.v_weight.data, NULL, s->dxv, false },
    };
    mn_status st = MN_OK;
    for (int i = 0; st == MN_OK && i < 7; i++) {
        st = mn_linear_backward(s->context, steps[i].of, steps[i].y, steps[i].dy, steps[i].dweight,
                                steps[i].dbias, steps[i].dx, steps[i].add);
    }
    return st;
}

static mn_status backward(layer *s, const projections *w) {
    const mn_hyper_layer_args *p = s->p;
    mn_call rows = p->call;
    rows.H = 1;
    const int64_t K = rows.K;
    mn_context *context = s->context;
    mn_status st = open_backward(s, w);
    if (st == MN_OK && !context->device) st = hyper_forward(s);
    if (st == MN_OK) st = hyper_backward(s);
    if (st == MN_OK) {
        st = mn_linear_backward(context, &w->c_proj, NULL, s->dy, p->grad.c_proj_weight.data, NULL,
                                NULL, false);
    }
    const mn_in dq = flat(s, s->dq, K);
    if (st == MN_OK) {
        st = mn_rows_multiply(context, &rows, K, flat_out(s, s->dgq, K), dq, flat(s, s->q0, K),
                              false);
    }
    if (st == MN_OK) {
        st = mn_rows_multiply(context, &rows, K, flat_out(s, s->dq, K), dq, flat(s, s->gq, K),
                              false);
    }
    if (st == MN_OK) st = projections_backward(s, w);
    if (st == MN_OK) {
        st = conv_backward(s, p->conv1_conv_weight, s->dxk, p->grad.conv1_conv_weight);
    }
    if (st == MN_OK) {
        st = conv_backward(s, p->conv2_conv_weight, s->dxv, p->grad.conv2_conv_weight);
    }
    return st == MN_OK && p->grad.x.data ? put_dx(s) : st;
}

mn_status mn_compose_hyper_layer(mn_context *context, mn_pass pass, const void *args) {
    const mn_hyper_layer_args *p = args;
    const mn_call *c = &p->call;
    layer s = { .context = context, .p = p, .n_rows = c->B * c->T };
    mn_status st = check_sizes(p);
    if (st != MN_OK) return st;
    open_layer(&s, pass == MN_BACKWARD);
    if (s.out_of_memory)
        return mn_fail(MN_ERR_MEMORY, "hyper_layer: no memory for its temporaries");
    const projections w = projections_of(&s);
    st = forward(&s, &w);
    if (st != MN_OK || pass == MN_BACKWARD) return st == MN_OK ? backward(&s, &w) : st;
    if (!p->y.data) return MN_OK;
    void *y = s.x;    // no longer needed
    st = hyper_forward(&s);
    if (st == MN_OK) st = mn_linear_forward(context, &w.c_proj, y);
    return st == MN_OK ? copy_rows(&s, p->y, flat(&s, y, c->D), c->D) : st;
}
