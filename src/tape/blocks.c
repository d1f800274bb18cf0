/* blocks.c - a block-diagonal product on the tape: every block of a row by a matrix of its own.
 *
 *   y_h = x_h W_h      dx_h = dy_h W_h'      dW_h = x_h'dy_h      W_h (in,out), n of them
 *
 * Blocks are columns of x and y as they lie: nothing is copied. */
#include "base/dtype.h"
#include "ops/matmul.h"
#include "tape/tape_internal.h"

typedef struct blocks {
    mn_tensor *x, *weight, *y;
    int64_t rows, n, in, out;
} blocks;

static void *at(void *data, mn_dtype dtype, int64_t numbers) {
    return (char *)data + (size_t)numbers * mn_dtype_bytes(dtype);
}

static void back_blocks(mn_tape *tape, void *payload) {
    const blocks *p = payload;
    const mn_view dy = mn_grad_read(p->y);
    if (!dy.data) return;
    const int64_t x_row = mn_row_step(p->x), y_row = p->n * p->out, cells = p->in * p->out;
    bool add_x = false, add_w = false;
    mn_view dx = { 0 }, dw = { 0 };
    if (mn_wants(p->x)) dx = mn_grad_write(tape, p->x, &add_x);
    if (mn_wants(p->weight)) dw = mn_grad_write(tape, p->weight, &add_w);
    for (int64_t h = 0; h < p->n; h++) {
        const void *cotangent = at(dy.data, dy.dtype, h * p->out);
        if (dx.data) {
            mn_tape_product(tape, &(mn_matmul_args){
                .dtype = tape->dtype, .c = at(dx.data, dx.dtype, h * p->in), .c_dtype = dx.dtype,
                .c_row = x_row, .a = cotangent, .a_row = y_row, .b_transposed = true,
                .b = at(p->weight->data, tape->dtype, h * cells), .M = p->rows, .N = p->in,
                .K = p->out, .accumulate = add_x });
        }
        if (dw.data) {
            mn_tape_product(tape, &(mn_matmul_args){
                .dtype = tape->dtype, .c = at(dw.data, dw.dtype, h * cells), .c_dtype = dw.dtype,
                .a = at(p->x->data, tape->dtype, h * p->in), .a_row = x_row, .a_transposed = true,
                .b = cotangent, .b_row = y_row, .M = p->in, .N = p->out, .K = p->rows,
                .accumulate = add_w });
        }
    }
}

mn_tensor *mn_tape_linear_blocks(mn_tape *tape, mn_tensor *x, mn_tensor *weight, int64_t n) {
    if (!x || !weight || mn_tape_dead(tape)) return NULL;
    const int64_t in = n > 0 ? x->shape[3] / n : 0, out = weight->shape[3];
    if (in < 1 || in * n != x->shape[3] || x->shape[2] != 1 || mn_row_step(x) == 0 ||
        weight->shape[2] != n * in) {
        return mn_tape_fail(tape, mn_fail(MN_ERR_INTERNAL, "%s: blocks that do not fit their rows",
                                          tape->scope));
    }
    blocks *p = mn_tape_note(tape, sizeof *p);
    x = mn_tape_cast(tape, x, tape->dtype);
    weight = mn_tape_cast(tape, weight, tape->dtype);
    if (!p || !x || !weight) return NULL;
    *p = (blocks){ x, weight, NULL, x->shape[0] * x->shape[1], n, in, out };
    p->y = mn_tape_new(tape, (int64_t[]){ x->shape[0], x->shape[1], 1, n * out });
    if (!p->y) return NULL;
    for (int64_t h = 0; h < n; h++) {
        mn_tape_product(tape, &(mn_matmul_args){
            .dtype = tape->dtype, .c = at(p->y->data, tape->dtype, h * out), .c_row = n * out,
            .c_dtype = tape->dtype, .a = at(x->data, tape->dtype, h * in),
            .a_row = mn_row_step(x), .b = at(weight->data, tape->dtype, h * in * out),
            .M = p->rows, .N = out, .K = in });
    }
    mn_tape_record(tape, "a block-diagonal projection", back_blocks, p,
                   mn_wants(x) || mn_wants(weight), &p->y, 1);
    return p->y;
}
