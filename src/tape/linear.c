/* linear.c - y = x W' + b on the tape, put onto another tensor or not, and the same for
 * x = f(u) v, which is not kept.
 *
 *   dx = dy W      dW = dy'x      db = column sums of dy      x = f(u) v: made again next to du, dv
 *
 * The product takes x and W in the tape's type; dW has the type of W's gradient. */
#include <string.h>

#include "ops/matmul.h"
#include "tape/tape_internal.h"

/* x itself, or u and v of x = f(u) v; v may be NULL. */
typedef struct linear {
    mn_tensor *x, *u, *v;
    mn_unary f;
    mn_tensor *weight, *bias, *y;
    int64_t rows, n_in, n_out;
} linear;

static bool wants_source(const linear *l) {
    return mn_wants(l->x) || mn_wants(l->u) || mn_wants(l->v);
}

/* dy W to where `to` is. */
static void product_to_source(mn_tape *tape, const linear *l, const mn_view *dy, const mn_view *to,
                              int64_t row, bool add) {
    if (!to->data) return;
    mn_tape_product(tape, &(mn_matmul_args){
        .dtype = tape->dtype, .c_dtype = to->dtype, .c = to->data, .c_row = row, .a = dy->data,
        .b = l->weight->data, .M = l->rows, .N = l->n_in, .K = l->n_out, .accumulate = add });
}

static void back_weight(mn_tape *tape, const linear *l, const mn_view *dy, const void *x,
                        int64_t x_row) {
    mn_matmul_args dw = { .dtype = tape->dtype, .a = dy->data, .a_transposed = true, .b = x,
                          .b_row = x_row, .M = l->n_out, .N = l->n_in, .K = l->rows };
    const mn_view to = mn_grad_write(tape, l->weight, &dw.accumulate);
    dw.c = to.data;
    dw.c_dtype = to.dtype;
    if (dw.c) mn_tape_product(tape, &dw);
}

static void back_bias(mn_tape *tape, const linear *l, const mn_view *dy) {
    mn_sum_params db = { .shape = { 1, 1, l->rows, l->n_out }, .kept = { 1, 1, 1, l->n_out } };
    db.dy = mn_flat_view(dy->data, dy->dtype, db.shape);
    db.sum = mn_grad_write(tape, l->bias, &db.add);
    if (db.sum.data) mn_tape_do(tape, MN_ELEMENTWISE_SUM, &db);
}

/* The gradient of x goes straight to where it belongs. */
static void back_plain(mn_tape *tape, const linear *l, const mn_view *dy) {
    if (mn_wants(l->x)) {
        bool add;
        const mn_view to = mn_grad_write(tape, l->x, &add);
        product_to_source(tape, l, dy, &to, mn_row_step(l->x), add);
    }
    if (mn_wants(l->weight)) back_weight(tape, l, dy, l->x->data, mn_row_step(l->x));
}

/* x over its own memory. */
static mn_unary_params source_work(const linear *l) {
    mn_unary_params work = { .f = l->f, .x = mn_value(l->u), .b = mn_value(l->v) };
    memcpy(work.shape, l->u->shape, sizeof work.shape);
    return work;
}

/* dx and x pass through scratch; gradients that stay get their place in front of it. */
static void back_through(mn_tape *tape, const linear *l, const mn_view *dy) {
    mn_tensor *const stays[] = { l->u, l->v, l->weight };
    for (int i = 0; i < 3; i++) {
        if (mn_wants(stays[i])) mn_grad_place(tape, stays[i]);
    }
    const mn_tape_mark mark = mn_tape_hold(tape);
    mn_unary_params work = source_work(l);
    if (mn_wants(l->weight)) {
        void *x = mn_tape_memory(tape, l->rows * l->n_in);
        work.y = mn_flat_view(x, tape->dtype, l->u->shape);
    }
    if (wants_source(l)) {
        void *dx = mn_tape_memory(tape, l->rows * l->n_in);
        work.dy = mn_flat_view(dx, tape->dtype, l->u->shape);
        product_to_source(tape, l, dy, &work.dy, l->n_in, false);
        if (mn_wants(l->u)) work.dx = mn_grad_write(tape, l->u, &work.add_x);
        if (mn_wants(l->v)) work.db = mn_grad_write(tape, l->v, &work.add_b);
    }
    if (work.y.data || work.dy.data) mn_tape_do(tape, MN_ELEMENTWISE_UNARY, &work);
    if (mn_wants(l->weight)) back_weight(tape, l, dy, work.y.data, l->n_in);
    mn_tape_let_go(tape, mark);
}

static void back_linear(mn_tape *tape, void *payload) {
    const linear *l = payload;
    const mn_view dy = mn_grad_read(l->y);
    if (!dy.data) return;
    if (l->x) back_plain(tape, l, &dy);
    else back_through(tape, l, &dy);
    if (mn_wants(l->bias)) back_bias(tape, l, &dy);
}

static void product(mn_tape *tape, const linear *l, const void *x, int64_t x_row,
                    const mn_tensor *onto) {
    if (tape->observer && !tape->device && mn_tape_runs(tape)) {
        tape->observer(tape->observer_context, l->weight, x, l->rows, x_row);
    }
    mn_tape_product(tape, &(mn_matmul_args){
        .dtype = tape->dtype, .c = l->y->data, .c_dtype = l->y->dtype, .a = x, .a_row = x_row,
        .b = l->weight->data, .b_transposed = true, .quant = l->weight->quant,
        .bias = l->bias ? l->bias->data : NULL, .onto = onto ? onto->data : NULL, .M = l->rows,
        .N = l->n_out, .K = l->n_in });
}

static void forward(mn_tape *tape, const linear *l, const mn_tensor *onto) {
    if (l->x) {
        product(tape, l, l->x->data, mn_row_step(l->x), onto);
        return;
    }
    const mn_tape_mark mark = mn_tape_hold(tape);
    mn_unary_params work = source_work(l);
    work.y = mn_flat_view(mn_tape_memory(tape, l->rows * l->n_in), tape->dtype, l->u->shape);
    if (work.y.data) mn_tape_do(tape, MN_ELEMENTWISE_UNARY, &work);
    product(tape, l, work.y.data, l->n_in, onto);
    mn_tape_let_go(tape, mark);
}

static void linear_again(mn_tape *tape, void *payload) {
    forward(tape, payload, NULL);
}

/* Decoding on a device: its small steps are put together by other rules. */
static bool is_few(const mn_tape *tape, const int64_t shape[4]) {
    return tape->device && !(tape->modes & MN_TAPE_ALIKE) && shape[0] * shape[1] <= MN_TAPE_FEW;
}

/* Whether y, which is onto + x W' + b, can have one gradient with `onto`, as in a residual. */
static bool shares(const mn_tape *tape, const linear *l, const mn_tensor *onto) {
    const bool alike = onto->dtype == tape->dtype && mn_is_contiguous(onto) &&
                       onto->shape[0] * onto->shape[1] == l->rows && onto->shape[2] == 1 &&
                       onto->shape[3] == l->n_out;
    const bool wanted = wants_source(l) || mn_wants(l->weight) || mn_wants(l->bias);
    if (!alike || is_few(tape, onto->shape)) return false;
    return !mn_tape_records(tape) || (wanted && mn_wants(onto) && !onto->slot->kept);
}

/* Memory for y; for what is kept of a part, there. */
static mn_tensor *place_result(mn_tape *tape, const int64_t shape[4], bool light, bool ends_part) {
    const mn_tensor *kept = tape->kept;
    if (!ends_part || !kept || memcmp(kept->shape, shape, sizeof kept->shape) != 0) {
        return mn_tape_result_of(tape, tape->dtype, shape, light);
    }
    return mn_tape_over(tape, kept->data, tape->dtype, shape, true);
}

/* l has its source; `shape` is that of x. */
static mn_tensor *make(mn_tape *tape, linear l, const int64_t shape[4], mn_tensor *onto) {
    mn_tensor *weight = l.weight->quant ? l.weight : mn_tape_cast(tape, l.weight, tape->dtype);
    linear *kept = mn_tape_note(tape, sizeof *kept);
    if (!kept || !weight) return NULL;
    l.weight = weight;
    l.bias = mn_tape_cast(tape, l.bias, tape->dtype);
    l.rows = shape[0] * shape[1];
    l.n_in = weight->shape[3];
    l.n_out = weight->shape[2];
    const bool light = tape->lighter && !onto;
    const bool fused = onto && shares(tape, &l, onto), ends_part = fused && tape->ends_part;
    const int64_t made[4] = { shape[0], shape[1], 1, l.n_out };
    l.y = place_result(tape, made, light, ends_part);
    if (!l.y) return NULL;
    if (fused) l.y->slot = NULL;
    *kept = l;
    const bool unread = ends_part && tape->again && !(tape->modes & MN_TAPE_CHECK);
    if (!unread) forward(tape, &l, fused ? onto : NULL);
    tape->ends_part = false;
    if (light) mn_tape_make_again(tape, linear_again, kept);
    const bool wanted = wants_source(&l) || mn_wants(l.weight) || mn_wants(l.bias);
    mn_tape_record(tape, "a projection", back_linear, kept, wanted, &l.y, 1);
    if (fused) l.y->slot = onto->slot;
    return onto && !fused ? mn_tape_residual(tape, onto, l.y) : l.y;
}

static bool fits(mn_tape *tape, const mn_tensor *x, const mn_tensor *weight) {
    if (x->shape[2] == 1 && x->shape[3] == weight->shape[3] && mn_row_step(x) != 0) return true;
    mn_tape_fail(tape, mn_fail(MN_ERR_INTERNAL, "%s: a weight of %lld inputs on rows of %lld "
                               "numbers", tape->scope, (long long)weight->shape[3],
                               (long long)x->shape[3]));
    return false;
}

mn_tensor *mn_tape_linear_onto(mn_tape *tape, mn_tensor *onto, mn_tensor *x, mn_tensor *weight,
                               mn_tensor *bias) {
    if (!x || !weight || mn_tape_dead(tape) || !fits(tape, x, weight)) return NULL;
    x = mn_tape_cast(tape, x, tape->dtype);
    if (!x) return NULL;
    return make(tape, (linear){ .x = x, .weight = weight, .bias = bias }, x->shape, onto);
}

mn_tensor *mn_tape_linear(mn_tape *tape, mn_tensor *x, mn_tensor *weight, mn_tensor *bias) {
    return mn_tape_linear_onto(tape, NULL, x, weight, bias);
}

mn_tensor *mn_tape_gated_onto(mn_tape *tape, mn_tensor *onto, mn_unary f, mn_tensor *u,
                              mn_tensor *v, mn_tensor *weight) {
    if (!u || !weight || mn_tape_dead(tape) || !fits(tape, u, weight)) return NULL;
    if (v && (v == u || memcmp(v->shape, u->shape, sizeof u->shape) != 0)) {
        return mn_tape_fail(tape, mn_fail(MN_ERR_INTERNAL, "%s: a gate of another shape",
                                          tape->scope));
    }
    const bool odd = u->dtype != tape->dtype || (v && v->dtype != tape->dtype);
    if (odd || is_few(tape, u->shape)) {
        mn_tensor *x = v ? mn_tape_gate(tape, f, u, v) : mn_tape_unary(tape, f, u);
        return mn_tape_linear_onto(tape, onto, x, weight, NULL);
    }
    return make(tape, (linear){ .u = u, .v = v, .f = f, .weight = weight }, u->shape, onto);
}
