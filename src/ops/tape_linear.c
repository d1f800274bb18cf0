/* tape_linear.c - y = x W' + b on the tape.
 *
 *   dx = dy W      dW = dy'x      db = column sums of dy
 *
 * The product takes x and W in the tape's type; dW has the type of W's gradient. */
#include <string.h>

#include "ops/matmul.h"
#include "ops/tape_node.h"

typedef struct linear {
    mn_tensor *x, *weight, *bias, *y;
    int64_t rows, n_in, n_out;
} linear;

/* The gradient of x goes straight to where it belongs. */
static void back_input(mn_tape *tape, const linear *l, const mn_view *dy) {
    mn_matmul_args dx = { .dtype = tape->dtype, .a = dy->data, .b = l->weight->data, .M = l->rows,
                          .N = l->n_in, .K = l->n_out, .c_row = mn_row_step(l->x) };
    const mn_view to = mn_grad_write(tape, l->x, &dx.accumulate);
    dx.c = to.data;
    dx.c_dtype = to.dtype;
    if (dx.c) mn_tape_product(tape, &dx);
}

static void back_weight(mn_tape *tape, const linear *l, const mn_view *dy) {
    mn_matmul_args dw = { .dtype = tape->dtype, .a = dy->data, .a_transposed = true,
                          .b = l->x->data, .b_row = mn_row_step(l->x), .M = l->n_out,
                          .N = l->n_in, .K = l->rows };
    const mn_view to = mn_grad_write(tape, l->weight, &dw.accumulate);
    dw.c = to.data;
    dw.c_dtype = to.dtype;
    if (dw.c) mn_tape_product(tape, &dw);
}

static void back_bias(mn_tape *tape, const linear *l, const mn_view *dy) {
    mn_sum_work db = { .shape = { 1, 1, l->rows, l->n_out }, .kept = { 1, 1, 1, l->n_out } };
    db.dy = mn_flat_view(dy->data, dy->dtype, db.shape);
    db.sum = mn_grad_write(tape, l->bias, &db.add);
    if (db.sum.data) mn_tape_do(tape, MN_WORK_SUM, &db);
}

static void back_linear(mn_tape *tape, void *payload) {
    const linear *l = payload;
    const mn_view dy = mn_grad_read(l->y);
    if (!dy.data) return;
    if (mn_wants(l->x)) back_input(tape, l, &dy);
    if (mn_wants(l->weight)) back_weight(tape, l, &dy);
    if (mn_wants(l->bias)) back_bias(tape, l, &dy);
}

mn_tensor *mn_tape_linear(mn_tape *tape, mn_tensor *x, mn_tensor *weight, mn_tensor *bias) {
    if (!x || !weight || mn_tape_dead(tape)) return NULL;
    const int64_t n_in = weight->shape[3], n_out = weight->shape[2];
    if (x->shape[2] != 1 || x->shape[3] != n_in || mn_row_step(x) == 0) {
        return mn_tape_fail(tape, mn_fail(MN_ERR_INTERNAL,
                            "%s: a weight of %lld inputs on rows of %lld numbers", tape->scope,
                            (long long)n_in, (long long)x->shape[3]));
    }
    x = mn_tape_cast(tape, x, tape->dtype);
    weight = mn_tape_cast(tape, weight, tape->dtype);
    bias = mn_tape_cast(tape, bias, tape->dtype);
    linear *l = mn_tape_note(tape, sizeof *l);
    mn_tensor *y = x ? mn_tape_new(tape, (int64_t[]){ x->shape[0], x->shape[1], 1, n_out }) : NULL;
    if (!l || !y) return NULL;
    *l = (linear){ x, weight, bias, y, x->shape[0] * x->shape[1], n_in, n_out };
    mn_tape_product(tape, &(mn_matmul_args){
        .dtype = tape->dtype, .c = y->data, .c_dtype = y->dtype, .a = x->data, .b = weight->data,
        .bias = bias ? bias->data : NULL, .M = l->rows, .N = n_out, .K = n_in,
        .b_transposed = true, .a_row = mn_row_step(x) });
    const bool wanted = mn_wants(x) || mn_wants(weight) || mn_wants(bias);
    mn_tape_record(tape, "a projection", back_linear, l, wanted, &y, 1);
    return y;
}
