/* row.c - softmax over the last axis and turning it, on the tape. */
#include <string.h>

#include "tape/tape_internal.h"

typedef struct row_op {
    mn_tensor *x, *y;
    int64_t by;    // of a roll
} row_op;

static row_op *open_op(mn_tape *tape, mn_tensor *x, int64_t by) {
    row_op *r = mn_tape_note(tape, sizeof *r);
    mn_tensor *y = mn_tape_new_of(tape, x->dtype, x->shape);
    if (!r || !y) return NULL;
    *r = (row_op){ x, y, by };
    return r;
}

static void back_softmax(mn_tape *tape, void *payload) {
    const row_op *r = payload;
    mn_softmax_params work = { .y = mn_value(r->y), .dy = mn_grad_read(r->y) };
    if (!work.dy.data || !mn_wants(r->x)) return;
    memcpy(work.shape, r->x->shape, sizeof work.shape);
    work.dx = mn_grad_write(tape, r->x, &work.add);
    if (work.dx.data) mn_tape_do(tape, MN_ELEMENTWISE_SOFTMAX, &work);
}

mn_tensor *mn_tape_softmax(mn_tape *tape, mn_tensor *x) {
    row_op *r = x && !mn_tape_dead(tape) ? open_op(tape, x, 0) : NULL;
    if (!r) return NULL;
    mn_softmax_params work = { .x = mn_value(x), .y = mn_value(r->y) };
    memcpy(work.shape, x->shape, sizeof work.shape);
    mn_tape_do(tape, MN_ELEMENTWISE_SOFTMAX, &work);
    mn_tape_record(tape, "softmax", back_softmax, r, mn_wants(x), &r->y, 1);
    return r->y;
}

/* The way back turns the other way. */
static void back_roll(mn_tape *tape, void *payload) {
    const row_op *r = payload;
    const int64_t n = r->x->shape[3];
    mn_roll_params work = { .by = (n - r->by) % n, .from = mn_grad_read(r->y) };
    if (!work.from.data || !mn_wants(r->x)) return;
    memcpy(work.shape, r->x->shape, sizeof work.shape);
    work.to = mn_grad_write(tape, r->x, &work.add);
    if (work.to.data) mn_tape_do(tape, MN_ELEMENTWISE_ROLL, &work);
}

mn_tensor *mn_tape_roll(mn_tape *tape, mn_tensor *x, int64_t by) {
    if (!x || mn_tape_dead(tape)) return NULL;
    const int64_t n = x->shape[3];
    row_op *r = open_op(tape, x, (by % n + n) % n);
    if (!r) return NULL;
    mn_roll_params work = { .by = r->by, .to = mn_value(r->y), .from = mn_value(x) };
    memcpy(work.shape, x->shape, sizeof work.shape);
    mn_tape_do(tape, MN_ELEMENTWISE_ROLL, &work);
    mn_tape_record(tape, "a roll", back_roll, r, mn_wants(x), &r->y, 1);
    return r->y;
}
