/* shape.c - views of tensors: heads, flat, shaped, split, residual. Nothing is computed. */
#include <string.h>

#include "base/checked.h"
#include "base/dtype.h"
#include "tape/tape_internal.h"

static mn_tensor *internal(mn_tape *tape, const char *what) {
    return mn_tape_fail(tape, mn_fail(MN_ERR_INTERNAL, "%s: %s", tape->scope, what));
}

/* Shares memory and gradient with x. */
static mn_tensor *view_of(mn_tape *tape, const mn_tensor *x) {
    mn_tensor *view = mn_tape_note(tape, sizeof *view);
    mn_quant_misuse(x);
    if (view) *view = *x;
    return view;
}

mn_tensor *mn_tape_heads(mn_tape *tape, mn_tensor *x, int64_t n_heads) {
    if (!x || mn_tape_dead(tape)) return NULL;
    if (x->shape[2] != 1 || n_heads < 1 || x->shape[3] % n_heads != 0) {
        return internal(tape, "heads of a tensor that does not divide into them");
    }
    mn_tensor *view = view_of(tape, x);
    if (!view) return NULL;
    view->shape[2] = n_heads;
    view->shape[3] = x->shape[3] / n_heads;
    view->stride[2] = view->shape[3];
    return view;
}

mn_tensor *mn_tape_flat(mn_tape *tape, mn_tensor *x) {
    if (!x || mn_tape_dead(tape)) return NULL;
    if (x->shape[2] > 1 && x->stride[2] != x->shape[3]) {
        return internal(tape, "flat of heads that do not lie side by side");
    }
    mn_tensor *view = view_of(tape, x);
    if (!view) return NULL;
    view->shape[3] = x->shape[2] * x->shape[3];
    view->shape[2] = 1;
    view->stride[2] = view->shape[3];
    return view;
}

mn_tensor *mn_tape_shaped(mn_tape *tape, mn_tensor *x, const int64_t shape[4]) {
    if (!x || mn_tape_dead(tape)) return NULL;
    if (!mn_is_contiguous(x) || mn_count4(shape) != mn_count4(x->shape)) {
        return internal(tape, "a shape of other size, or of a tensor that is not contiguous");
    }
    mn_tensor *view = view_of(tape, x);
    if (!view) return NULL;
    memcpy(view->shape, shape, sizeof view->shape);
    view->stride[2] = shape[3];
    view->stride[1] = shape[2] * view->stride[2];
    view->stride[0] = shape[1] * view->stride[1];
    return view;
}

/* ---- split ----------------------------------------------------------------------------------- */

typedef struct split {
    mn_tensor *whole, *parts[MN_TAPE_PARTS];
    int n;
} split;

static void zero_rows(mn_tape *tape, mn_tensor *part) {
    bool add;
    mn_fill_params work = { .to = mn_grad_write(tape, part, &add) };
    memcpy(work.shape, part->shape, sizeof work.shape);
    if (work.to.data) mn_tape_do(tape, MN_ELEMENTWISE_FILL, &work);
}

/* The parts' gradients already lie in the whole's memory: only those that never came are missing.
 */
static void back_split(mn_tape *tape, void *payload) {
    split *s = payload;
    bool any = false;
    for (int i = 0; i < s->n; i++) any |= mn_grad_read(s->parts[i]).data != NULL;
    if (!any) return;
    for (int i = 0; i < s->n; i++) {
        if (!mn_grad_read(s->parts[i]).data) zero_rows(tape, s->parts[i]);
    }
    bool add;
    mn_grad_write(tape, s->whole, &add);
    if (add) internal(tape, "a tensor that was split is used elsewhere");
}

void mn_tape_split(mn_tape *tape, mn_tensor *x, const int64_t *widths, int n, mn_tensor **parts) {
    for (int i = 0; i < n; i++) parts[i] = NULL;
    if (!x || mn_tape_dead(tape)) return;
    split *s = mn_tape_note(tape, sizeof *s);
    if (!s) return;
    s->whole = x;
    s->n = n;
    int64_t at = 0;
    for (int i = 0; i < n && i < MN_TAPE_PARTS; i++) {
        mn_tensor *part = view_of(tape, x);
        if (!part) return;
        part->shape[3] = widths[i];
        part->data = (char *)x->data + (size_t)at * mn_dtype_bytes(x->dtype);
        if (x->slot) {
            part->slot = mn_tape_note(tape, sizeof *part->slot);
            if (!part->slot) return;
            *part->slot = (mn_slot){ .whole = x->slot, .dtype = x->slot->dtype,
                                     .offset = (size_t)at * mn_dtype_bytes(x->slot->dtype) };
        }
        parts[i] = s->parts[i] = part;
        at += widths[i];
    }
    if (n > MN_TAPE_PARTS || at != x->shape[3] || x->shape[2] != 1) {
        internal(tape, "a split whose parts do not make the whole");
        return;
    }
    mn_tape_record(tape, "split", back_split, s, mn_wants(x), NULL, 0);
}
