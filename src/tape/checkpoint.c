/* checkpoint.c - parts that are computed once more going back, so that what is inside them need not
 * be kept.
 *
 *   forward     y = part(x) without recording; everything but y is let go
 *   backward    part(x) once more, recording; back over it; everything is let go
 *
 * y shares the gradient of x, like a residual: inside the second computation the same memory is the
 * gradient of the part's result first and of its x in the end. A part may say which product is its
 * result (mn_tape_ends_part): that is made where y lies, and not made again. */
#include <string.h>

#include "tape/tape_internal.h"

typedef struct again {
    mn_tensor *x, *y;
    mn_part_fn fn;
    const void *job;
    int number;
} again;

/* What the tape was about before a part of its own lifetime began. */
typedef struct pause {
    mn_tape_mark numbers;
    mn_mark notes;
    mn_node *last;
    mn_part *part;
    mn_spare *spare, *unused;
} pause;

static pause set_aside(mn_tape *tape) {
    const pause p = { mn_tape_hold(tape), mn_arena_mark(tape->notes), tape->last, tape->part,
                      tape->spare, tape->unused };
    tape->last = NULL;
    tape->part = NULL;
    tape->spare = tape->unused = NULL;
    return p;
}

static void take_up(mn_tape *tape, const pause *p) {
    mn_tape_let_go(tape, p->numbers);
    mn_arena_release(tape->notes, p->notes);
    tape->last = p->last;
    tape->part = p->part;
    tape->spare = p->spare;
    tape->unused = p->unused;
}

/* The gradient of y, which lies in the slot of x, becomes that of `result` where the two do not
 * share one. */
static void hand_over(mn_tape *tape, const again *a, mn_tensor *result) {
    mn_slot *own = mn_slot_standing_for(a->x->slot);
    if (!mn_wants(result) || mn_slot_standing_for(result->slot) == own) return;
    const mn_view dy = mn_grad_read(a->y);
    mn_grad_give(tape, result, &dy);
    own->written = false;
}

static void back_again(mn_tape *tape, void *payload) {
    const again *a = payload;
    if (!mn_grad_read(a->y).data) return;
    const pause before = set_aside(tape);
    mn_tensor *x = mn_tape_note(tape, sizeof *x);
    if (x) *x = *a->x;
    tape->checkpoint = a->number;
    tape->again = true;
    mn_tensor *result = x ? a->fn(tape, x, a->job) : NULL;
    tape->checkpoint = 0;
    tape->again = tape->ends_part = false;
    if (result) {
        hand_over(tape, a, result);
        mn_tape_go_back(tape);
    }
    take_up(tape, &before);
}

/* The part without recording; its result in y. */
static void run_once(mn_tape *tape, const again *a) {
    const pause before = set_aside(tape);
    const unsigned modes = tape->modes;
    tape->modes &= ~(unsigned)MN_TAPE_RECORD;
    mn_tensor *x = mn_tape_note(tape, sizeof *x);
    if (x) *x = *a->x;
    tape->checkpoint = a->number;
    tape->kept = a->y;
    const mn_tensor *result = x ? a->fn(tape, x, a->job) : NULL;
    tape->checkpoint = 0;
    tape->kept = NULL;
    tape->ends_part = false;
    tape->modes = modes;
    if (result && (memcmp(result->shape, a->y->shape, sizeof result->shape) != 0 ||
                   !mn_is_contiguous(result))) {
        mn_tape_fail(tape, mn_fail(MN_ERR_INTERNAL, "%s: a part that changes its shape cannot be "
                                   "computed again", tape->scope));
    } else if (result && result->data != a->y->data) {
        mn_move_params work = { .to = mn_value(a->y), .from = mn_value(result), .times = 1 };
        memcpy(work.shape, result->shape, sizeof work.shape);
        mn_tape_do(tape, MN_ELEMENTWISE_MOVE, &work);
    }
    take_up(tape, &before);
}

void mn_tape_ends_part(mn_tape *tape) {
    tape->ends_part = tape->kept || tape->again;
}

int mn_tape_checkpoint_at(const mn_tape *tape, bool *again_out) {
    *again_out = tape->again;
    return tape->checkpoint;
}

mn_tensor *mn_tape_checkpoint(mn_tape *tape, mn_tensor *x, mn_part_fn fn, const void *job,
                         size_t job_bytes) {
    if (!x || mn_tape_dead(tape)) return NULL;
    const bool records = mn_tape_records(tape);
    const bool takes = !records || (mn_wants(x) && !x->slot->kept && mn_is_contiguous(x));
    if (!takes) return fn(tape, x, job);
    again *a = mn_tape_note(tape, sizeof *a);
    void *copy = mn_tape_note(tape, job_bytes);
    mn_tensor *y = mn_tape_new(tape, x->shape);
    if (!a || !copy || !y) return NULL;
    memcpy(copy, job, job_bytes);
    *a = (again){ x, y, fn, copy, ++tape->n_checkpoints };
    run_once(tape, a);
    if (mn_tape_dead(tape)) return NULL;
    if (!records) return y;
    y->slot = x->slot;
    mn_tape_record(tape, "a part", back_again, a, true, NULL, 0);
    return y;
}
