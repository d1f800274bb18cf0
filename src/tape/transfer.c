/* transfer.c - what passes between the host and a tape's device: ids and borders going there,
 * losses and numbers coming back. Places there stay where they are from step to step, so that a
 * recorded step finds what is uploaded before it is launched again. */
#include <stdlib.h>
#include <string.h>

#include "base/util.h"
#include "tape/tape_internal.h"

static mn_status check_ids(const mn_lent *lent) {
    const int32_t *ids = lent->host;
    const int64_t n = lent->what ? (int64_t)(lent->bytes / sizeof *ids) : 0;
    for (int64_t i = 0; i < n; i++) {
        if (ids[i] >= lent->least && ids[i] < lent->below) continue;
        return mn_fail(MN_ERR_ARGUMENT, "%s %d at place %lld of the batch is outside the model's "
                       "vocabulary of %lld; the data and the model have different tokenizers",
                       lent->what, (int)ids[i], (long long)i, (long long)lent->below);
    }
    return MN_OK;
}

/* The place for what is lent next; NULL when there is no memory for its notes. */
static mn_lent *next_place(mn_tape *tape) {
    if (tape->n_lent == tape->most_lent) {
        const int64_t most = mn_max(2 * tape->most_lent, 8);
        mn_lent *more = realloc(tape->lent, (size_t)most * sizeof *more);
        if (!more) return NULL;
        memset(more + tape->most_lent, 0, (size_t)(most - tape->most_lent) * sizeof *more);
        tape->lent = more;
        tape->most_lent = most;
    }
    return &tape->lent[tape->n_lent++];
}

static mn_status make_room(mn_tape *tape, mn_lent *place) {
    if (place->bytes <= place->capacity) return MN_OK;
    if (mn_device_captures(tape->device)) {
        return mn_fail(MN_ERR_INTERNAL, "a step is recorded that has not run before");
    }
    mn_device_free(tape->device, place->there);
    place->there = NULL;
    place->capacity = 0;
    const mn_status st = mn_device_allocate(tape->device, &place->there, place->bytes);
    if (st == MN_OK) place->capacity = place->bytes;
    return st;
}

/* While a step is recorded nothing is copied: mn_tape_feed does, in front of each launch. */
static const void *lend(mn_tape *tape, const mn_lent *what) {
    if (mn_tape_dead(tape)) return NULL;
    if (tape->device) tape->lent_bytes += what->bytes;
    if (mn_tape_plans(tape)) return what->host;
    mn_status st = check_ids(what);
    if (st == MN_OK && !tape->device) return what->host;
    mn_lent *place = st == MN_OK ? next_place(tape) : NULL;
    if (st == MN_OK && !place) st = mn_fail(MN_ERR_MEMORY, "no memory for a tape's notes");
    if (st == MN_OK) {
        void *there = place->there;
        const size_t capacity = place->capacity;
        *place = *what;
        place->there = there;
        place->capacity = capacity;
        st = make_room(tape, place);
    }
    if (st == MN_OK && !mn_device_captures(tape->device)) {
        st = mn_device_upload(tape->device, place->there, place->host, place->bytes);
        place->there_already = true;
    }
    if (st == MN_OK) return place->there;
    mn_tape_fail(tape, st);
    return NULL;
}

const void *mn_tape_lend(mn_tape *tape, const void *host, size_t bytes) {
    return lend(tape, &(mn_lent){ .host = host, .bytes = bytes });
}

const void *mn_tape_lend_fixed(mn_tape *tape, const void *host, size_t bytes) {
    return lend(tape, &(mn_lent){ .host = host, .bytes = bytes, .fixed = true });
}

const void *mn_tape_lend_once(mn_tape *tape, const void *host, size_t bytes) {
    return lend(tape, &(mn_lent){ .host = host, .bytes = bytes, .once = true });
}

const int32_t *mn_tape_lend_ids(mn_tape *tape, const int32_t *ids, int64_t n, const char *what,
                                int64_t least, int64_t below) {
    const mn_lent lent = { .host = ids, .bytes = (size_t)n * sizeof *ids, .what = what,
                           .least = least, .below = below };
    const bool stay = tape->device && (tape->modes & MN_TAPE_REPEATS);
    const mn_status st = stay ? check_ids(&lent) : MN_OK;
    if (st != MN_OK) mn_tape_fail(tape, st);
    const int32_t *there = stay ? ids : lend(tape, &lent);
    if (st == MN_OK) mn_tape_declare(tape, there, lent.bytes);
    return st == MN_OK ? there : NULL;
}

mn_status mn_tape_feed(mn_tape *tape) {
    mn_status st = MN_OK;
    for (int64_t i = 0; i < tape->n_lent && st == MN_OK; i++) {
        mn_lent *lent = &tape->lent[i];
        if (lent->fixed || (lent->once && lent->there_already)) continue;
        st = check_ids(lent);
        if (st != MN_OK) break;
        st = mn_device_upload(tape->device, lent->there, lent->host, lent->bytes);
        lent->there_already = st == MN_OK;
    }
    return st;
}

const void *mn_tape_told(const mn_tape *tape) {
    return tape->device && tape->told ? tape->told->result : NULL;
}

mn_status mn_tape_results(mn_tape *tape) {
    mn_status st = mn_tape_status(tape);
    for (const mn_told *told = tape->told; told && st == MN_OK; told = told->next) {
        mn_loss_result result;
        st = mn_tape_fetch(tape, &result, told->result, sizeof result);
        if (st != MN_OK) break;
        *told->loss = result.loss;
        *told->counted = result.counted;
        if (!told->nll_to || told->nll_to == told->nll) continue;
        st = mn_tape_fetch(tape, told->nll_to, told->nll, (size_t)told->rows * sizeof(float));
    }
    return st;
}

/* ---- numbers of a tensor --------------------------------------------------------------------- */

/* Through the device's scratch memory: reading is no part of the step. */
static mn_status read_from_device(mn_tape *tape, const mn_tensor *x, float *out) {
    const size_t bytes = (size_t)mn_count4(x->shape) * sizeof *out;
    const mn_mark mark = mn_device_mark(tape->device);
    void *there = mn_device_bytes(tape->device, bytes);
    if (!there) return mn_fail(MN_ERR_MEMORY, "the GPU has no memory to convert %zu bytes", bytes);
    mn_move_params work = { .to = mn_flat_view(there, MN_F32, x->shape), .from = mn_value(x),
                          .times = 1 };
    memcpy(work.shape, x->shape, sizeof work.shape);
    mn_tape_declare(tape, there, bytes);
    mn_tape_do(tape, MN_ELEMENTWISE_MOVE, &work);
    mn_status st = mn_tape_status(tape);
    if (st == MN_OK) st = mn_tape_fetch(tape, out, there, bytes);
    mn_device_release(tape->device, mark);
    return st;
}

mn_status mn_tape_read(mn_tape *tape, const mn_tensor *x, float *out) {
    if (!x || mn_tape_status(tape) != MN_OK) return mn_tape_status(tape);
    if (tape->device) return read_from_device(tape, x, out);
    const int64_t *n = x->shape, *s = x->stride;
    for (int64_t i = 0; i < mn_count4(n); i++) {
        const int64_t row = i / n[3];
        const int64_t at = row / n[2] / n[1] * s[0] + row / n[2] % n[1] * s[1] +
                           row % n[2] * s[2] + i % n[3];
        out[i] = x->dtype == MN_F64 ? (float)((const double *)x->data)[at]
                                    : ((const float *)x->data)[at];
    }
    return MN_OK;
}

mn_status mn_tape_send(mn_tape *tape, mn_tensor *x, float *out) {
    if (!x || mn_tape_status(tape) != MN_OK) return mn_tape_status(tape);
    mn_move_params work = { .to = mn_flat_view(out, MN_F32, x->shape), .from = mn_value(x),
                          .times = 1 };
    memcpy(work.shape, x->shape, sizeof work.shape);
    mn_tape_declare(tape, out, (size_t)mn_count4(x->shape) * sizeof *out);
    mn_tape_do(tape, MN_ELEMENTWISE_MOVE, &work);
    mn_tape_flush(tape);
    return mn_tape_status(tape);
}
