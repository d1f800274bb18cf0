/* linears.c - several projections of one tensor, on the tape.
 *
 * Weights that follow each other in memory, and whose gradients do, are one weight to a product:
 *
 *   (y_1 .. y_n) = x (W_1 .. W_n)'      dx = sum dy_i W_i      (dW_1 .. dW_n) = (dy_1 .. dy_n)'x
 *
 * On the tape that is a projection by a leaf that stands for all of them, and a split of its rows.
 * Before the product goes back the leaf learns whether gradients have come already, and afterwards
 * the weights learn that theirs are there. */
#include <string.h>

#include "base/dtype.h"
#include "tape/tape_internal.h"

typedef struct joined {
    mn_tensor *whole, *weights[MN_TAPE_PARTS];
    int n;
} joined;

static size_t bytes_of(const mn_tensor *weight, mn_dtype dtype) {
    return (size_t)mn_count4(weight->shape) * mn_dtype_bytes(dtype);
}

static const char *end_of(const void *from, const mn_tensor *weight, mn_dtype dtype) {
    return (const char *)from + bytes_of(weight, dtype);
}

/* Whether b goes on where a ends, for a product. */
static bool follows(const mn_tape *tape, const mn_tensor *a, const mn_tensor *b) {
    if (!a || !b || a->quant || b->quant) return false;
    if (a->dtype != tape->dtype || b->dtype != tape->dtype) return false;
    const bool values = a->shape[3] == b->shape[3] && end_of(a->data, a, a->dtype) == b->data;
    if (!values || !a->slot != !b->slot) return false;
    return !a->slot || (a->slot->kept && b->slot->kept && a->slot->dtype == b->slot->dtype &&
                        end_of(a->slot->memory, a, a->slot->dtype) == b->slot->memory);
}

static void zero(mn_tape *tape, mn_tensor *weight) {
    bool add;
    mn_fill_params work = { .to = mn_grad_write(tape, weight, &add) };
    memcpy(work.shape, weight->shape, sizeof work.shape);
    if (work.to.data) mn_tape_do(tape, MN_ELEMENTWISE_FILL, &work);
}

/* Either all of them hold a gradient, or none. */
static void back_learn(mn_tape *tape, void *payload) {
    joined *j = payload;
    bool any = false;
    for (int i = 0; i < j->n; i++) any |= j->weights[i]->slot->written;
    for (int i = 0; i < j->n && any; i++) {
        if (!j->weights[i]->slot->written) zero(tape, j->weights[i]);
    }
    j->whole->slot->written = any;
}

static void back_tell(mn_tape *tape, void *payload) {
    joined *j = payload;
    (void)tape;
    for (int i = 0; i < j->n; i++) j->weights[i]->slot->written = j->whole->slot->written;
}

/* The leaf that stands for all. */
static mn_tensor *whole_of(mn_tape *tape, mn_tensor *const *weights, int n) {
    mn_slot *slot = weights[0]->slot;
    int64_t rows = 0;
    for (int i = 0; i < n; i++) rows += weights[i]->shape[2];
    return mn_tape_leaf_of(tape, weights[0]->data, weights[0]->dtype, slot ? slot->memory : NULL,
                           slot ? slot->dtype : tape->dtype, rows, weights[0]->shape[3], false);
}

static void run_joined(mn_tape *tape, mn_tensor *x, mn_tensor *const *weights, int n,
                       mn_tensor **results) {
    int64_t widths[MN_TAPE_PARTS];
    joined *j = mn_tape_note(tape, sizeof *j);
    mn_tensor *whole = whole_of(tape, weights, n);
    if (!j || !whole) return;
    j->whole = whole;
    for (j->n = 0; j->n < n; j->n++) {
        j->weights[j->n] = weights[j->n];
        widths[j->n] = weights[j->n]->shape[2];
    }
    mn_tape_record(tape, "projections", back_tell, j, mn_wants(whole), NULL, 0);
    mn_tensor *y = mn_tape_linear(tape, x, whole, NULL);
    mn_tape_split(tape, y, widths, n, results);
    mn_tape_record(tape, "projections", back_learn, j, mn_wants(whole), NULL, 0);
}

void mn_tape_linears(mn_tape *tape, mn_tensor *x, mn_tensor *const *weights, int n,
                     mn_tensor **results) {
    for (int i = 0; i < n; i++) results[i] = NULL;
    if (!x || mn_tape_dead(tape)) return;
    const bool few = x->shape[0] * x->shape[1] <= MN_TAPE_FEW &&
                     !(tape->modes & MN_TAPE_ALIKE);    // decoding joins them by itself
    for (int first = 0, count; first < n; first += count) {
        count = 1;
        while (!few && first + count < n && count < MN_TAPE_PARTS &&
               follows(tape, weights[first + count - 1], weights[first + count])) {
            count++;
        }
        if (count > 1) run_joined(tape, x, weights + first, count, results + first);
        else results[first] = mn_tape_linear(tape, x, weights[first], NULL);
    }
}
