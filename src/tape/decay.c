/* decay.c - y = -e^a softplus(x + b) on the tape: the log decay of a token.
 *
 * A GPU that trains does it in one launch forward and two back (kernels/decay.h). Elsewhere it is
 * the sum, the two functions and the product, which decoding has launches of its own for
 * (decode/epilogue.c). */
#include <string.h>

#include "kernels/decay.h"
#include "tape/tape_internal.h"

typedef struct decay {
    mn_tensor *x, *b, *a, *y;
} decay;

static mn_decay_params work_of(mn_tape *tape, const decay *d) {
    mn_decay_params work = { .x = mn_value(d->x) };
    memcpy(work.shape, d->x->shape, sizeof work.shape);
    mn_repeated(tape, &work.b, d->b, work.shape);
    mn_repeated(tape, &work.a, d->a, work.shape);
    return work;
}

static void run(mn_tape *tape, const mn_decay_params *work) {
    const mn_tape_mark mark = mn_tape_hold(tape);
    const size_t bytes = work->y.data ? 0 : mn_decay_cuda_bytes(work);
    void *space = bytes ? mn_tape_bytes_of(tape, bytes) : NULL;
    if (mn_tape_runs(tape)) {
        mn_status st = mn_device_use(tape->device);
        if (st == MN_OK) {
            const int code = mn_decay_cuda(work, space, mn_device_stream(tape->device));
            st = mn_device_check(tape->device, code, tape->scope);
        }
        if (st != MN_OK) mn_tape_fail(tape, st);
    }
    mn_tape_let_go(tape, mark);
}

static void decay_again(mn_tape *tape, void *payload) {
    const decay *d = payload;
    mn_decay_params work = work_of(tape, d);
    work.y = mn_value(d->y);
    run(tape, &work);
}

static void back_decay(mn_tape *tape, void *payload) {
    const decay *d = payload;
    mn_decay_params work = work_of(tape, d);
    work.dy = mn_grad_read(d->y);
    if (!work.dy.data) return;
    if (mn_wants(d->x)) work.dx = mn_grad_write(tape, d->x, &work.add_x);
    if (mn_wants(d->b)) work.db = mn_grad_write(tape, d->b, &work.add_b);
    if (mn_wants(d->a)) work.da = mn_grad_write(tape, d->a, &work.add_a);
    run(tape, &work);
}

/* Whether the kernels serve: one number of b per channel, one of a per channel or head. */
static bool at_once(const mn_tape *tape, const mn_tensor *x, const mn_tensor *b,
                    const mn_tensor *a) {
    if (!tape->device || (tape->modes & MN_TAPE_DEFER)) return false;
    const bool once = b->shape[0] == 1 && b->shape[1] == 1 && a->shape[0] == 1 && a->shape[1] == 1;
    return once && b->shape[2] == x->shape[2] && b->shape[3] == x->shape[3] &&
           a->shape[2] == x->shape[2] && (a->shape[3] == x->shape[3] || a->shape[3] == 1);
}

mn_tensor *mn_tape_decay(mn_tape *tape, mn_tensor *x, mn_tensor *b, mn_tensor *a) {
    if (!x || !b || !a || mn_tape_dead(tape)) return NULL;
    if (!at_once(tape, x, b, a)) {
        x = mn_tape_add(tape, x, b);
        a = mn_tape_unary(tape, MN_UNARY_NEG_EXP, a);
        return mn_tape_multiply(tape, mn_tape_unary(tape, MN_UNARY_SOFTPLUS, x), a);
    }
    decay *d = mn_tape_note(tape, sizeof *d);
    mn_tensor *y = mn_tape_result_of(tape, x->dtype, x->shape, tape->lighter);
    if (!d || !y) return NULL;
    *d = (decay){ x, b, a, y };
    decay_again(tape, d);
    if (tape->lighter) mn_tape_make_again(tape, decay_again, d);
    const bool wanted = mn_wants(x) || mn_wants(b) || mn_wants(a);
    mn_tape_record(tape, "a decay", back_decay, d, wanted, &y, 1);
    return y;
}
