/* hyper.c - the HyperMLP / HyperGLU module:
 *
 *   gates       gq = sigmoid(x Wl' + bl)     gv = sigmoid(x Wr' + br)
 *   controls    c1 = sigmoid(x W1' + b1)     c2 = sigmoid(x W2' + b2)
 *   xk = conv1(x), xv = conv2(x)             depthwise, causal, neither bias nor activation
 *   q = gq . (x Wq')    k = xk Wk'    v = xv Wv'    y = hyper(q, k, v, gv, c1, c2) Wp'
 *
 * Backward recomputes all of it, then goes the same way back. dx has seven terms.
 *
 * On a device what is made from x itself, q gates and controls, is one product with the weights one
 * below the other, forward and back: rows of q, gq, gv, c1 and c2 side by side. A call's first run
 * waits for each kernel that the library of products loads, and for a second set of them where it
 * is asked for float32 results of bf16, so there are few shapes, and results in the call's type.
 * hyper's backward makes o anyway there and hands it out. */
#include <inttypes.h>
#include <string.h>

#include "base/dtype.h"
#include "base/status.h"
#include "kernels/access.h"
#include "ops/compose/compose.h"
#include "ops/elementwise/elementwise.h"
#include "ops/linear.h"
#include "ops/rows.h"
#include "ops/workspace.h"

/* What forward makes and backward needs, contiguous over the B T rows but for what rows of `side`
 * numbers have side by side on a device: q0, gq, gv, c1, c2, which begin at `made`. d_* are their
 * cotangents; dq0 is q0's. */
typedef struct layer {
    mn_context *context;
    const mn_hyper_layer_args *p;
    int64_t n_rows, side;
    void *made, *d_made, *weights, *dweights;    // on a device only
    void *x, *xk, *xv, *gq, *gv, *c1, *c2, *q0, *q, *k, *v, *o;
    void *dy, *d_o, *dq, *dk, *dv, *dq0, *dgq, *dgv, *dc1, *dc2, *dx, *dxk, *dxv, *dconv, *dsum;
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
    void *data = mn_workspace_array(s->context, s->n_rows, width, mn_dtype_bytes(s->p->call.dtype));
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

/* The same of what is made from x, in heads of `width`. */
static mn_out from_x(const layer *s, void *data, int64_t n_heads, int64_t width) {
    const int64_t row = s->side ? s->side : n_heads * width;
    return (mn_out){ data, { s->p->call.T * row, row, width } };
}

/* Copies rows of `width` between views. */
static mn_status copy_rows(const layer *s, mn_out to, mn_in from, int64_t width) {
    mn_call rows = s->p->call;
    rows.H = 1;
    return mn_rows_copy(s->context, &rows, width, to, from);
}

/* dx += dconv; on a device in float32 after the first time, and after the second to the caller. */
static mn_status add_conv(const layer *s, bool last) {
    const mn_call *c = &s->p->call;
    const bool device = s->context->device;
    const mn_dtype wide = device ? MN_F32 : c->dtype;
    const mn_in a = flat(s, device && last ? s->dsum : s->dx, c->D), b = flat(s, s->dconv, c->D);
    mn_out y = flat_out(s, s->dx, c->D);
    if (device) y = last ? s->p->grad.x : flat_out(s, s->dsum, c->D);
    const mn_pair_params sum = { .kind = MN_PAIR_ADD, .shape = { c->B, c->T, 1, c->D },
                                 .a = mn_view_of(a.data, a.stride, last ? wide : c->dtype),
                                 .b = mn_view_of(b.data, b.stride, c->dtype),
                                 .y = mn_view_of(y.data, y.stride, last ? c->dtype : wide) };
    if (!y.data) return MN_OK;
    const mn_status st = mn_elementwise_run(s->context, MN_ELEMENTWISE_PAIR, &sum);
    if (st != MN_OK || device || !last || !s->p->grad.x.data) return st;
    return copy_rows(s, s->p->grad.x, flat(s, s->dx, c->D), c->D);
}

/* ---- what is made from x, on a device -------------------------------------------------------- */

enum { Q, LEFT, RIGHT, CONTROL1, CONTROL2, SIDES };

/* One of the projections of x: its weight, bias and width, where its results and their cotangents
 * are kept, and the gradients of its weight and bias. */
typedef struct side {
    mn_in weight, bias;
    int64_t width;
    void **made, **d_made;
    mn_out dweight, dbias;
} side;

static void sides_of(side (*sides)[SIDES], layer *s) {
    const mn_hyper_layer_args *p = s->p;
    const mn_call *c = &p->call;
    const mn_in none = { NULL, { 0, 0, 0 } };
    const side all[SIDES] = {
        [Q] = { p->q_weight, none, c->K, &s->q0, &s->dq0, p->grad.q_weight,
                { NULL, { 0, 0, 0 } } },
        [LEFT] = { p->left_gate_weight, p->left_gate_bias, c->K, &s->gq, &s->dgq,
                   p->grad.left_gate_weight, p->grad.left_gate_bias },
        [RIGHT] = { p->right_gate_weight, p->right_gate_bias, c->V, &s->gv, &s->dgv,
                    p->grad.right_gate_weight, p->grad.right_gate_bias },
        [CONTROL1] = { p->control1_weight, p->control1_bias, c->J, &s->c1, &s->dc1,
                       p->grad.control1_weight, p->grad.control1_bias },
        [CONTROL2] = { p->control2_weight, p->control2_bias, c->L, &s->c2, &s->dc2,
                       p->grad.control2_weight, p->grad.control2_bias },
    };
    memcpy(*sides, all, sizeof all);
}

static void open_sides(layer *s, bool backward) {
    const mn_call *c = &s->p->call;
    const size_t bytes = mn_dtype_bytes(c->dtype);
    side sides[SIDES];
    s->side = 2 * c->K + c->V + c->J + c->L;
    s->made = temporary(s, s->side);
    s->d_made = backward ? temporary(s, s->side) : NULL;
    s->weights = mn_workspace_array(s->context, s->side, c->D, bytes);
    s->dweights = backward ? mn_workspace_array(s->context, s->side, c->D, bytes) : NULL;
    if (!s->weights || (backward && !s->dweights)) s->out_of_memory = true;
    if (s->out_of_memory) return;
    sides_of(&sides, s);
    size_t at = 0;
    for (int i = 0; i < SIDES; at += (size_t)sides[i++].width * bytes) {
        *sides[i].made = (char *)s->made + at;
        if (backward) *sides[i].d_made = (char *)s->d_made + at;
    }
}

/* Weights from `from` to `to`, n rows of D. */
static mn_status copy_weights(const layer *s, void *to, const void *from, int64_t n) {
    const mn_call *c = &s->p->call;
    const mn_call rows = { .dtype = c->dtype, .B = 1, .T = n, .H = 1 };
    return mn_rows_copy(s->context, &rows, c->D, (mn_out){ to, { 0, c->D, 0 } },
                        (mn_in){ from, { 0, c->D, 0 } });
}

static mn_linear sides_product(const layer *s) {
    return (mn_linear){ .dtype = s->p->call.dtype, .n_rows = s->n_rows, .n_in = s->p->call.D,
                        .n_out = s->side, .x = s->x, .weight = s->weights };
}

/* The rows of one of them as a call. */
static mn_call side_rows(const layer *s) {
    mn_call rows = s->p->call;
    rows.H = 1;
    return rows;
}

/* A fused function of one of them, in place: of its rows and, the same for all rows or row by row,
 * of b. */
static mn_status side_fused(const layer *s, const side *of, mn_fused_kind f, void *x, mn_in b) {
    const mn_call rows = side_rows(s);
    const mn_out at = from_x(s, x, 1, of->width);
    return mn_rows_fused(s->context, f, &rows, of->width, at, mn_as_input(at), b, (mn_in){ 0 });
}

static mn_status sides_forward(layer *s) {
    side sides[SIDES];
    mn_status st = MN_OK;
    int64_t row = 0;
    sides_of(&sides, s);
    for (int i = 0; i < SIDES && st == MN_OK; row += sides[i++].width) {
        char *to = (char *)s->weights +
                   (size_t)(row * s->p->call.D) * mn_dtype_bytes(s->p->call.dtype);
        st = copy_weights(s, to, sides[i].weight.data, sides[i].width);
    }
    const mn_linear product = sides_product(s);
    if (st == MN_OK) st = mn_linear_forward(s->context, &product, s->made);
    for (int i = LEFT; i < SIDES && st == MN_OK; i++) {
        const mn_in bias = { sides[i].bias.data, { 0, 0, 0 } };
        st = side_fused(s, &sides[i], MN_FUSED_SIGMOID_SUM, *sides[i].made, bias);
    }
    return st;
}

/* From the cotangents of the results to those of x, weights and biases. */
static mn_status sides_backward(layer *s) {
    side sides[SIDES];
    mn_status st = MN_OK;
    sides_of(&sides, s);
    for (int i = LEFT; i < SIDES && st == MN_OK; i++) {
        void *dy = *sides[i].d_made;
        const mn_in gate = mn_as_input(from_x(s, *sides[i].made, 1, sides[i].width));
        st = side_fused(s, &sides[i], MN_FUSED_SIGMOID_BACK, dy, gate);
        if (st != MN_OK) break;
        const mn_call rows = side_rows(s);
        const mn_in none = { 0 };
        st = mn_rows_token_sum(s->context, MN_TOKEN_SUM_PLAIN, &rows, sides[i].width,
                               (mn_out){ sides[i].dbias.data, { 0, 0, 0 } },
                               mn_as_input(from_x(s, dy, 1, sides[i].width)), none, none);
    }
    const mn_linear product = sides_product(s);
    if (st == MN_OK) {
        st = mn_linear_backward(s->context, &product, NULL, s->d_made, s->dweights, NULL, s->dx,
                                false);
    }
    int64_t row = 0;
    for (int i = 0; i < SIDES && st == MN_OK; row += sides[i++].width) {
        const char *from = (const char *)s->dweights +
                           (size_t)(row * s->p->call.D) * mn_dtype_bytes(s->p->call.dtype);
        st = copy_weights(s, sides[i].dweight.data, from, sides[i].width);
    }
    return st;
}

/* ---- all ------------------------------------------------------------------------------------- */

static void open_layer(layer *s, bool backward) {
    const mn_call *c = &s->p->call;
    const bool device = s->context->device;
    void **wide[] = { &s->x, &s->xk, &s->xv, &s->dy, &s->dxk, &s->dxv, &s->dconv, &s->dx };
    void **key[] = { &s->q, &s->k, &s->dq, &s->dk };
    void **value[] = { &s->v, &s->o, &s->dv, &s->d_o };
    void **side_key[] = { &s->q0, &s->gq, &s->dgq };
    for (int i = 0; i < (backward ? 8 : 3); i++) *wide[i] = temporary(s, c->D);
    for (int i = 0; i < (backward ? 4 : 2); i++) *key[i] = temporary(s, c->K);
    for (int i = 0; i < (backward ? 4 : 2); i++) *value[i] = temporary(s, c->V);
    if (device) {
        open_sides(s, backward);
        if (backward) s->dsum = temporary(s, c->dtype == MN_BF16 ? 2 * c->D : c->D);
        return;
    }
    for (int i = 0; i < (backward ? 3 : 2); i++) *side_key[i] = temporary(s, c->K);
    s->dq0 = s->dq;    // in place
    s->gv = temporary(s, c->V), s->c1 = temporary(s, c->J), s->c2 = temporary(s, c->L);
    if (!backward) return;
    s->dgv = temporary(s, c->V), s->dc1 = temporary(s, c->J), s->dc2 = temporary(s, c->L);
}

static mn_linear linear(const layer *s, const void *x, int64_t n_in, mn_in weight, mn_in bias,
                        int64_t n_out) {
    return (mn_linear){ .dtype = s->p->call.dtype, .n_rows = s->n_rows, .n_in = n_in,
                        .n_out = n_out, .x = x, .weight = weight.data, .bias = bias.data,
                        .sigmoid = bias.data != NULL };    // exactly the gates have a bias
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
    hyper.gv = mn_as_input(from_x(s, s->gv, c->H, c->V));
    hyper.c1 = mn_as_input(from_x(s, s->c1, c->Q, c->R));
    hyper.c2 = mn_as_input(from_x(s, s->c2, c->H, c->W));
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
    const mn_linear *products[] = { &w->k, &w->v, &w->left, &w->right, &w->control1, &w->control2,
                                    &w->q };
    void *const results[] = { s->k, s->v, s->gq, s->gv, s->c1, s->c2, s->q0 };
    for (int i = 0; st == MN_OK && i < (context->device ? 2 : 7); i++) {
        st = mn_linear_forward(context, products[i], results[i]);
    }
    if (st == MN_OK && context->device) st = sides_forward(s);
    if (st == MN_OK) {
        const mn_out q0 = from_x(s, s->q0, 1, K), gq = from_x(s, s->gq, 1, K);
        st = mn_rows_multiply(context, &rows, K, flat_out(s, s->q, K), mn_as_input(q0),
                              mn_as_input(gq), false);
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
    hyper.grad.gv = from_x(s, s->dgv, p->call.H, hyper.call.V);
    hyper.grad.c1 = from_x(s, s->dc1, p->call.Q, p->call.R);
    hyper.grad.c2 = from_x(s, s->dc2, p->call.H, hyper.call.W);
    hyper.grad.U1.data = p->grad.op_mix_U.data;
    hyper.grad.Vt1.data = p->grad.op_mix_Vt.data;
    hyper.grad.d1.data = p->grad.op_mix_d.data;
    hyper.grad.U2.data = p->grad.op2_mix_U.data;
    hyper.grad.Vt2.data = p->grad.op2_mix_Vt.data;
    hyper.grad.d2.data = p->grad.op2_mix_d.data;
    return mn_op_run(s->context, MN_OP_hyper, MN_BACKWARD, &hyper);
}

/* From the cotangent of a convolution's result: its weight's gradient, and dx grows by its part. */
static mn_status conv_backward(layer *s, mn_in weight, const void *dy, mn_out dweight, bool last) {
    mn_conv_args conv = convolution(s, weight);
    conv.cot.y.data = dy;
    conv.grad.x.data = s->dconv;
    conv.grad.w.data = dweight.data;
    const mn_status st = mn_op_run(s->context, MN_OP_conv, MN_BACKWARD, &conv);
    return st == MN_OK ? add_conv(s, last) : st;
}

/* The cotangent of y as rows, and of what hyper gave. */
static mn_status open_backward(layer *s, const projections *w) {
    const mn_hyper_layer_args *p = s->p;
    const mn_call *c = &p->call;
    mn_status st = p->cot.y.data
                       ? copy_rows(s, flat_out(s, s->dy, c->D), p->cot.y, c->D)
                       : mn_workspace_clear(s->context, s->dy,
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
        { &w->k, NULL, s->dk, p->grad.k_weight.data, NULL, s->dxk, false },
        { &w->v, NULL, s->dv, p->grad.v_weight.data, NULL, s->dxv, false },
        { &w->q, NULL, s->dq0, p->grad.q_weight.data, NULL, s->dx, false },
        { &w->left, s->gq, s->dgq, p->grad.left_gate_weight.data, p->grad.left_gate_bias.data,
          s->dx, true },
        { &w->right, s->gv, s->dgv, p->grad.right_gate_weight.data, p->grad.right_gate_bias.data,
          s->dx, true },
        { &w->control1, s->c1, s->dc1, p->grad.control1_weight.data, p->grad.control1_bias.data,
          s->dx, true },
        { &w->control2, s->c2, s->dc2, p->grad.control2_weight.data, p->grad.control2_bias.data,
          s->dx, true },
    };
    mn_status st = MN_OK;
    for (int i = 0; st == MN_OK && i < (s->context->device ? 2 : 7); i++) {
        st = mn_linear_backward(s->context, steps[i].of, steps[i].y, steps[i].dy, steps[i].dweight,
                                steps[i].dbias, steps[i].dx, steps[i].add);
    }
    if (st == MN_OK && s->context->device) st = sides_backward(s);
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
        st = mn_rows_multiply(context, &rows, K, from_x(s, s->dgq, 1, K), dq,
                              mn_as_input(from_x(s, s->q0, 1, K)), false);
    }
    if (st == MN_OK) {
        st = mn_rows_multiply(context, &rows, K, from_x(s, s->dq0, 1, K), dq,
                              mn_as_input(from_x(s, s->gq, 1, K)), false);
    }
    if (st == MN_OK) st = projections_backward(s, w);
    if (st == MN_OK) {
        st = conv_backward(s, p->conv1_conv_weight, s->dxk, p->grad.conv1_conv_weight, false);
    }
    if (st == MN_OK) {
        st = conv_backward(s, p->conv2_conv_weight, s->dxv, p->grad.conv2_conv_weight, true);
    }
    return st;
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
