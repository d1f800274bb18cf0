/* pair.c - a + b, a b, scale a + shift, max(a, low), 1 / (softplus(a) + low), a + b c, spreads and
 * residuals on the tape.
 *
 * An axis of b that is 1 counts for all of that axis of a; its gradient is the sum over it. */
#include <string.h>

#include "base/dtype.h"
#include "tape/tape_internal.h"

typedef struct pair {
    mn_pair_kind kind;
    mn_tensor *a, *b, *y;
    double scale, shift;
    const struct scaled *beside;    // another product of a, which goes back with this one
} pair;

/* y = a + b c */
typedef struct scaled {
    mn_tensor *a, *b, *c, *y;
    bool waits;    // to go back with another product of b
} scaled;

bool mn_repeated(mn_tape *tape, mn_view *view, const mn_tensor *b, const int64_t shape[4]) {
    *view = mn_value(b);
    for (int i = 0; b && i < 4; i++) {
        if (b->shape[i] == 1) view->stride[i] = 0;
        if (b->shape[i] == 1 || b->shape[i] == shape[i]) continue;
        mn_tape_fail(tape, mn_fail(MN_ERR_INTERNAL, "%s: shapes that do not go together",
                                   tape->scope));
        return false;
    }
    return true;
}

static bool same_shape(const mn_tensor *a, const mn_tensor *b) {
    return memcmp(a->shape, b->shape, sizeof a->shape) == 0;
}

static mn_pair_params work_of(mn_tape *tape, const pair *p) {
    mn_pair_params work = { .kind = p->kind, .a = mn_value(p->a), .scale = p->scale,
                          .shift = p->shift };
    memcpy(work.shape, p->y->shape, sizeof work.shape);
    mn_repeated(tape, &work.b, p->b, p->y->shape);
    return work;
}

void mn_sum_to(mn_tape *tape, const mn_unary *f, const mn_tensor *a, mn_tensor *b,
               const mn_view *dy, const int64_t shape[4]) {
    mn_sum_params work = { .a = mn_value(a), .dy = *dy, .shaped = f != NULL };
    if (f) work.f = *f;
    memcpy(work.shape, shape, sizeof work.shape);
    memcpy(work.kept, b->shape, sizeof work.kept);
    work.sum = mn_grad_write(tape, b, &work.add);
    if (work.sum.data) mn_tape_do(tape, MN_ELEMENTWISE_SUM, &work);
}

bool mn_gates_rows(const mn_tape *tape, const mn_tensor *a, const mn_tensor *b) {
    return tape->device && b && memcmp(a->shape, b->shape, 3 * sizeof *a->shape) == 0 &&
           b->shape[3] == 1 && a->shape[3] > 1;
}

/* Sums over rows come with the gradient of b, in float32, and are then added up to what c has of
 * them: `work` has everything but these two. */
static void back_rows(mn_tape *tape, const scaled *s, mn_pair_params *work, mn_view *sums) {
    const int64_t *n = work->shape, rows[4] = { n[0], n[1], n[2], 1 };
    if (!mn_grad_place(tape, s->b) || (mn_wants(s->c) && !mn_grad_place(tape, s->c))) return;
    const mn_tape_mark mark = mn_tape_hold(tape);
    mn_view of_rows = { 0 };
    if (mn_wants(s->c)) {
        const size_t bytes = (size_t)mn_count4(rows) * mn_dtype_bytes(MN_F32);
        of_rows = mn_flat_view(mn_tape_bytes_of(tape, bytes), MN_F32, rows);
        *sums = of_rows;
        sums->stride[3] = 0;
    }
    work->da = mn_grad_write(tape, s->b, &work->add_a);
    mn_tape_do(tape, MN_ELEMENTWISE_PAIR, work);
    if (of_rows.data) mn_sum_to(tape, NULL, NULL, s->c, &of_rows, rows);
    mn_tape_let_go(tape, mark);
}

/* The gradient of a is that of y: they share it. */
static void back_scaled_alone(mn_tape *tape, const scaled *s) {
    mn_pair_params work = { .kind = MN_PAIR_MULTIPLY, .dy = mn_grad_read(s->y) };
    if (!work.dy.data) return;
    memcpy(work.shape, s->y->shape, sizeof work.shape);
    mn_repeated(tape, &work.b, s->c, work.shape);
    const bool rows = tape->device && s->c->shape[3] == 1 && work.shape[3] > 1;
    if (rows && mn_wants(s->b) && mn_wants(s->c)) {
        work.a = mn_value(s->b);
        back_rows(tape, s, &work, &work.db);
        return;
    }
    if (mn_wants(s->b)) work.da = mn_grad_write(tape, s->b, &work.add_a);
    if (work.da.data) mn_tape_do(tape, MN_ELEMENTWISE_PAIR, &work);
    if (mn_wants(s->c)) mn_sum_to(tape, NULL, s->b, s->c, &work.dy, work.shape);
}

/* Both products of a, with its gate and with that of `beside`, from one pass over a. */
static void back_both(mn_tape *tape, const pair *p, mn_pair_params *work) {
    const scaled *s = p->beside;
    mn_slot *held = mn_slot_standing_for(s->y->slot);
    work->e = mn_grad_read(s->y);
    mn_repeated(tape, &work->c, s->c, work->shape);
    work->db = mn_grad_write(tape, p->b, &work->add_b);
    work->db.stride[3] = 0;
    back_rows(tape, s, work, &work->dc);
    mn_slot_release(tape, held);
}

/* Sums have dy as the gradient of both; what is not needed is not read. */
static void back_pair(mn_tape *tape, void *payload) {
    const pair *p = payload;
    mn_pair_params work = work_of(tape, p);
    work.dy = mn_grad_read(p->y);
    const bool both = p->beside && mn_slot_standing_for(p->beside->y->slot)->held;
    if (both && work.dy.data) {
        back_both(tape, p, &work);
        return;
    }
    if (both) {
        back_scaled_alone(tape, p->beside);
        mn_slot_release(tape, mn_slot_standing_for(p->beside->y->slot));
    }
    if (!work.dy.data) return;
    const bool rows = p->kind == MN_PAIR_MULTIPLY && mn_gates_rows(tape, p->a, p->b);
    const bool whole = p->b && (rows || same_shape(p->a, p->b));
    if (mn_wants(p->a)) work.da = mn_grad_write(tape, p->a, &work.add_a);
    if (whole && mn_wants(p->b)) work.db = mn_grad_write(tape, p->b, &work.add_b);
    if (rows) work.db.stride[3] = 0;
    if (work.da.data || work.db.data) mn_tape_do(tape, MN_ELEMENTWISE_PAIR, &work);
    if (!p->b || whole || !mn_wants(p->b)) return;
    const mn_tensor *factor = p->kind == MN_PAIR_MULTIPLY ? p->a : NULL;
    mn_sum_to(tape, NULL, factor, p->b, &work.dy, work.shape);
}

static void pair_again(mn_tape *tape, void *payload) {
    const pair *p = payload;
    mn_pair_params work = work_of(tape, p);
    work.y = mn_value(p->y);
    mn_tape_do(tape, MN_ELEMENTWISE_PAIR, &work);
}

static mn_tensor *make(mn_tape *tape, mn_pair_kind kind, mn_tensor *a, mn_tensor *b, double scale,
                       double shift) {
    static const char *const names[MN_N_PAIR] = {
        [MN_PAIR_ADD] = "a sum", [MN_PAIR_MULTIPLY] = "a product", [MN_PAIR_AFFINE] = "a scaling",
        [MN_PAIR_AT_LEAST] = "a bound", [MN_PAIR_PRECISION] = "a precision" };
    mn_view fits;
    if (b && !mn_repeated(tape, &fits, b, a->shape)) return NULL;
    pair *p = mn_tape_note(tape, sizeof *p);
    mn_tensor *y = mn_tape_result_of(tape, a->dtype, a->shape, tape->lighter);
    if (!p || !y) return NULL;
    *p = (pair){ .kind = kind, .a = a, .b = b, .y = y, .scale = scale, .shift = shift };
    pair_again(tape, p);
    if (tape->lighter) mn_tape_make_again(tape, pair_again, p);
    mn_tape_record(tape, names[kind], back_pair, p, mn_wants(a) || mn_wants(b), &y, 1);
    return y;
}

mn_tensor *mn_tape_add(mn_tape *tape, mn_tensor *a, mn_tensor *b) {
    return a && b && !mn_tape_dead(tape) ? make(tape, MN_PAIR_ADD, a, b, 0, 0) : NULL;
}

mn_tensor *mn_tape_multiply(mn_tape *tape, mn_tensor *a, mn_tensor *b) {
    return a && b && !mn_tape_dead(tape) ? make(tape, MN_PAIR_MULTIPLY, a, b, 0, 0) : NULL;
}

mn_tensor *mn_tape_affine(mn_tape *tape, mn_tensor *x, double scale, double shift) {
    return x && !mn_tape_dead(tape) ? make(tape, MN_PAIR_AFFINE, x, NULL, scale, shift) : NULL;
}

mn_tensor *mn_tape_at_least(mn_tape *tape, mn_tensor *x, double low) {
    return x && !mn_tape_dead(tape) ? make(tape, MN_PAIR_AT_LEAST, x, NULL, 0, low) : NULL;
}

mn_tensor *mn_tape_precision(mn_tape *tape, mn_tensor *x, double low) {
    return x && !mn_tape_dead(tape) ? make(tape, MN_PAIR_PRECISION, x, NULL, 0, low) : NULL;
}

/* ---- a + b c, where a was -------------------------------------------------------------------- */

/* The product of b by a gate of each row that is to go back together with b c; NULL if there is
 * none. */
static pair *product_beside(mn_tape *tape, const mn_tensor *product, const mn_tensor *b,
                            const mn_tensor *c) {
    for (const mn_node *node = tape->last; product && node; node = node->before) {
        pair *p = node->payload;
        if (node->back != back_pair || p->y != product) continue;
        const bool fits = p->kind == MN_PAIR_MULTIPLY && mn_gates_rows(tape, p->a, p->b) &&
                          mn_wants(p->a) && mn_wants(p->b) && p->a == b && c->shape[3] == 1;
        return fits && !p->beside ? p : NULL;
    }
    return NULL;
}

/* Where a product waits for it, the gradient of y does too. */
static void back_scaled(mn_tape *tape, void *payload) {
    const scaled *s = payload;
    if (!s->waits) {
        back_scaled_alone(tape, s);
    } else if (mn_grad_read(s->y).data) {
        mn_slot_standing_for(s->y->slot)->held = true;
    }
}

mn_tensor *mn_tape_add_scaled(mn_tape *tape, mn_tensor *a, mn_tensor *b, mn_tensor *c,
                              const mn_tensor *product) {
    if (!a || !b || !c || mn_tape_dead(tape)) return NULL;
    const size_t bytes = (size_t)mn_count4(a->shape) * mn_dtype_bytes(a->dtype);
    const bool alike = mn_is_contiguous(a) && same_shape(a, b), records = mn_tape_records(tape);
    const bool slots = mn_wants(a) && !a->slot->kept && a->slot->bytes == bytes;
    if (!alike || (records ? !slots : mn_tape_gathers(tape))) {
        return mn_tape_add(tape, a, mn_tape_multiply(tape, b, c));
    }
    mn_pair_params work = { .kind = MN_PAIR_SCALED, .a = mn_value(a), .b = mn_value(b) };
    if (!mn_repeated(tape, &work.c, c, a->shape)) return NULL;
    scaled *s = mn_tape_note(tape, sizeof *s);
    mn_tensor *y = mn_tape_over(tape, a->data, a->dtype, a->shape, false);
    if (!s || !y) return NULL;
    pair *beside = product_beside(tape, product, b, c);
    *s = (scaled){ a, b, c, y, beside != NULL };
    if (beside) beside->beside = s;
    memcpy(work.shape, y->shape, sizeof work.shape);
    work.y = mn_value(y);
    mn_tape_do(tape, MN_ELEMENTWISE_PAIR, &work);
    if (!records) return y;
    mn_tape_record(tape, "a scaled sum", back_scaled, s, true, NULL, 0);
    y->slot = a->slot;    // as both have the same numbers
    return y;
}

/* ---- spread ---------------------------------------------------------------------------------- */

typedef struct spread {
    mn_tensor *x, *y;
} spread;

static void back_spread(mn_tape *tape, void *payload) {
    const spread *s = payload;
    const mn_view dy = mn_grad_read(s->y);
    if (!dy.data || !mn_wants(s->x)) return;
    if (same_shape(s->x, s->y)) mn_grad_give(tape, s->x, &dy);
    else mn_sum_to(tape, NULL, NULL, s->x, &dy, s->y->shape);
}

mn_tensor *mn_tape_spread(mn_tape *tape, mn_tensor *x, const int64_t shape[4]) {
    if (!x || mn_tape_dead(tape)) return NULL;
    mn_move_params work = { .times = 1 };
    if (!mn_repeated(tape, &work.from, x, shape)) return NULL;
    spread *s = mn_tape_note(tape, sizeof *s);
    mn_tensor *y = mn_tape_new_of(tape, x->dtype, shape);
    if (!s || !y) return NULL;
    *s = (spread){ x, y };
    memcpy(work.shape, shape, sizeof work.shape);
    work.to = mn_value(y);
    mn_tape_do(tape, MN_ELEMENTWISE_MOVE, &work);
    mn_tape_record(tape, "a spread", back_spread, s, mn_wants(x), &y, 1);
    return y;
}

/* ---- residual -------------------------------------------------------------------------------- */

/* dx = db = dy, and when dy is complete b is asked for its gradient before anything is added to
 * that of x: one piece of memory serves all three. */
mn_tensor *mn_tape_residual(mn_tape *tape, mn_tensor *x, mn_tensor *b) {
    if (!x || !b || mn_tape_dead(tape)) return NULL;
    const bool alike = same_shape(x, b) && mn_is_contiguous(x) && mn_is_contiguous(b);
    const bool shares = alike && mn_wants(x) && mn_wants(b) && !x->slot->kept && !b->slot->kept &&
                        !b->slot->whole && b->slot->bytes == x->slot->bytes;
    if (!shares) return mn_tape_add(tape, x, b);
    mn_tensor *y = mn_tape_new_of(tape, x->dtype, x->shape);
    if (!y) return NULL;
    const pair p = { .kind = MN_PAIR_ADD, .a = x, .b = b, .y = y };
    mn_pair_params work = work_of(tape, &p);
    work.y = mn_value(y);
    mn_tape_do(tape, MN_ELEMENTWISE_PAIR, &work);
    mn_tape_record(tape, "a residual", NULL, NULL, false, &y, 1);
    y->slot = x->slot;
    b->slot->whole = x->slot;
    return y;
}
