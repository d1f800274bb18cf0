/* unary.c - y = f(x) and y = f(x) b on the tape.
 *
 * One number of b may count for all of a row of x: going back, its gradient is the sum of f(x) dy
 * over the row, for which f(x) is made again, in the pass that makes the gradient of x. */
#include <string.h>

#include "tape/tape_internal.h"

typedef struct unary {
    mn_unary f;
    mn_tensor *x, *b, *y;
} unary;

static mn_unary_params work_of(mn_tape *tape, const unary *u) {
    mn_unary_params work = { .f = u->f, .x = mn_value(u->x) };
    memcpy(work.shape, u->x->shape, sizeof work.shape);
    mn_repeated(tape, &work.b, u->b, work.shape);
    return work;
}

static bool same_shape(const mn_tensor *x, const mn_tensor *b) {
    return memcmp(x->shape, b->shape, sizeof x->shape) == 0;
}

static void back_unary(mn_tape *tape, void *payload) {
    const unary *u = payload;
    mn_unary_params work = work_of(tape, u);
    work.dy = mn_grad_read(u->y);
    if (!work.dy.data) return;
    const bool rows = mn_gates_rows(tape, u->x, u->b);
    const bool whole = !u->b || rows || same_shape(u->x, u->b);
    if (mn_wants(u->x)) work.dx = mn_grad_write(tape, u->x, &work.add_x);
    if (whole && mn_wants(u->b)) work.db = mn_grad_write(tape, u->b, &work.add_b);
    if (rows) work.db.stride[3] = 0;
    if (work.dx.data || work.db.data) mn_tape_do(tape, MN_ELEMENTWISE_UNARY, &work);
    if (!whole && mn_wants(u->b)) mn_sum_to(tape, &u->f, u->x, u->b, &work.dy, work.shape);
}

static void unary_again(mn_tape *tape, void *payload) {
    const unary *u = payload;
    mn_unary_params work = work_of(tape, u);
    work.y = mn_value(u->y);
    mn_tape_do(tape, MN_ELEMENTWISE_UNARY, &work);
}

static mn_tensor *make(mn_tape *tape, mn_unary f, mn_tensor *x, mn_tensor *b) {
    unary *u = mn_tape_note(tape, sizeof *u);
    mn_tensor *y = mn_tape_result_of(tape, x->dtype, x->shape, tape->lighter);
    if (!u || !y) return NULL;
    *u = (unary){ f, x, b, y };
    unary_again(tape, u);
    if (tape->lighter) mn_tape_make_again(tape, unary_again, u);
    mn_tape_record(tape, mn_unary_name(f), back_unary, u, mn_wants(x) || mn_wants(b), &y, 1);
    return y;
}

mn_tensor *mn_tape_gate(mn_tape *tape, mn_unary f, mn_tensor *x, mn_tensor *b) {
    if (!x || !b || mn_tape_dead(tape)) return NULL;
    mn_view fits;
    if (x == b || !mn_repeated(tape, &fits, b, x->shape)) {
        return mn_tape_fail(tape, mn_fail(MN_ERR_INTERNAL, "%s: a gate of another shape",
                                          tape->scope));
    }
    const bool rows = b->shape[3] == 1 && x->shape[3] > 1;
    const bool at_once = same_shape(x, b) || (tape->device && mn_tape_records(tape) && rows);
    return at_once ? make(tape, f, x, b) : mn_tape_multiply(tape, make(tape, f, x, NULL), b);
}

mn_tensor *mn_tape_unary(mn_tape *tape, mn_unary f, mn_tensor *x) {
    return x && !mn_tape_dead(tape) ? make(tape, f, x, NULL) : NULL;
}
