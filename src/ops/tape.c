/* tape.c - memory, slots and nodes of a tape, and the way back. */
#include "ops/tape.h"

#include <inttypes.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "base/dtype.h"
#include "base/util.h"
#include "ops/tape_node.h"

mn_status mn_tape_create(mn_tape **out, mn_context *context, mn_dtype dtype) {
    *out = NULL;
    const mn_status cpu = mn_context_needs_cpu(context, "a tape");
    if (cpu != MN_OK) return cpu;
    if (dtype != MN_F32 && dtype != MN_F64) {
        return mn_fail(MN_ERR_UNSUPPORTED, "a tape of %s: use f32 or f64", mn_dtype_name(dtype));
    }
    mn_tape *tape = calloc(1, sizeof *tape);
    if (!tape) return mn_fail(MN_ERR_MEMORY, "no memory for a tape");
    tape->context = context;
    tape->dtype = dtype;
    tape->item = mn_dtype_bytes(dtype);
    mn_status st = mn_arena_create(&tape->data);
    if (st == MN_OK) st = mn_arena_create(&tape->notes);
    if (st != MN_OK) {
        mn_tape_destroy(tape);
        return st;
    }
    *out = tape;
    return MN_OK;
}

void mn_tape_destroy(mn_tape *tape) {
    if (!tape) return;
    mn_arena_destroy(tape->data);
    mn_arena_destroy(tape->notes);
    free(tape);
}

void mn_tape_start(mn_tape *tape, unsigned modes) {
    mn_arena_release(tape->data, (mn_mark){ 0 });
    mn_arena_release(tape->notes, (mn_mark){ 0 });
    tape->modes = modes;
    tape->status = MN_OK;
    tape->last = NULL;
    tape->spare = tape->unused = NULL;
    tape->used = tape->peak = tape->work = 0;
    tape->cu_seqlens = NULL;
    tape->n_seqs = 0;
    tape->scope[0] = '\0';
}

void mn_tape_pack(mn_tape *tape, const int64_t *cu_seqlens, int64_t n_seqs) {
    tape->cu_seqlens = cu_seqlens;
    tape->n_seqs = cu_seqlens ? n_seqs : 0;
}

int64_t mn_tape_sequences(const mn_tape *tape) {
    return tape->n_seqs;
}

mn_status mn_tape_status(const mn_tape *tape) {
    return tape->status;
}

mn_tensor *mn_tape_fail(mn_tape *tape, mn_status status) {
    if (tape->status == MN_OK) tape->status = status;
    return NULL;
}

void mn_tape_scope(mn_tape *tape, const char *format, ...) {
    va_list args;
    va_start(args, format);
    vsnprintf(tape->scope, sizeof tape->scope, format, args);
    va_end(args);
}

mn_dtype mn_tape_dtype(const mn_tape *tape) {
    return tape->dtype;
}

mn_context *mn_tape_context(const mn_tape *tape) {
    return tape->context;
}

bool mn_tape_records(const mn_tape *tape) {
    return tape->modes & MN_TAPE_RECORD;
}

bool mn_tape_plans(const mn_tape *tape) {
    return tape->modes & MN_TAPE_PLAN;
}

size_t mn_tape_bytes(const mn_tape *tape) {
    return tape->peak;
}

size_t mn_tape_work_bytes(const mn_tape *tape) {
    return tape->work;
}

mn_status mn_tape_reserve(mn_tape *tape, size_t bytes) {
    mn_arena_release(tape->data, (mn_mark){ 0 });
    const bool there = mn_arena_bytes(tape->data, bytes);
    mn_arena_release(tape->data, (mn_mark){ 0 });
    if (there) return MN_OK;
    return mn_fail(MN_ERR_MEMORY, "no memory for a step of %.1f MiB; use a smaller batch, a "
                   "shorter context or a smaller model", (double)bytes / 1048576.0);
}

/* ---- memory ---------------------------------------------------------------------------------- */

void *mn_tape_bytes_of(mn_tape *tape, size_t bytes) {
    if (mn_tape_dead(tape)) return NULL;
    size_t want;
    if (!mn_add_size(&want, bytes, MN_ALIGN) || want > PTRDIFF_MAX / 2) {
        mn_tape_fail(tape, mn_fail(MN_ERR_MEMORY, "%s: a size overflows", tape->scope));
        return NULL;
    }
    want = want / MN_ALIGN * MN_ALIGN;
    /* A planned address is never touched; it only has to differ from NULL. */
    const uintptr_t planned = (uintptr_t)MN_ALIGN + tape->used;
    void *memory = mn_tape_plans(tape) ? (void *)planned : mn_arena_bytes(tape->data, bytes);
    if (!memory) {
        mn_tape_fail(tape, mn_fail(MN_ERR_MEMORY, "%s: no memory for %zu bytes beside %zu in use",
                                   tape->scope, bytes, tape->used));
        return NULL;
    }
    tape->used += want;
    if (tape->used > tape->peak) tape->peak = tape->used;
    return memory;
}

void *mn_tape_note(mn_tape *tape, size_t bytes) {
    if (mn_tape_dead(tape)) return NULL;
    void *note = mn_arena_bytes(tape->notes, bytes);
    if (note) return memset(note, 0, bytes);
    mn_tape_fail(tape, mn_fail(MN_ERR_MEMORY, "%s: no memory for a tape's notes", tape->scope));
    return NULL;
}

mn_tape_mark mn_tape_hold(const mn_tape *tape) {
    return (mn_tape_mark){ mn_arena_mark(tape->data), tape->used };
}

void mn_tape_let_go(mn_tape *tape, mn_tape_mark mark) {
    mn_arena_release(tape->data, mark.mark);
    tape->used = mark.used;
}

void mn_tape_product(mn_tape *tape, const mn_matmul_args *p) {
    if (mn_tape_runs(tape)) mn_matmul(tape->context, p);
    else tape->work = mn_max(tape->work, mn_matmul_work(tape->context, p));
}

void *mn_tape_memory(mn_tape *tape, int64_t count) {
    size_t bytes;
    if (count < 0 || !mn_mul_size(&bytes, (size_t)count, tape->item)) bytes = SIZE_MAX;
    return mn_tape_bytes_of(tape, bytes);
}

void mn_tape_items(mn_tape *tape, int64_t n_items, mn_item_fn fn, void *job) {
    mn_threads_run(tape->context->threads, n_items, fn, job);
}

/* ---- tensors --------------------------------------------------------------------------------- */

int64_t mn_count4(const int64_t shape[4]) {
    int64_t count = 1;
    for (int i = 0; i < 4; i++) {
        if (shape[i] < 0 || !mn_mul_i64(&count, count, shape[i])) return -1;
    }
    return count;
}

bool mn_is_contiguous(const mn_tensor *x) {
    int64_t step = x->shape[3];
    for (int i = 2; i >= 0; i--) {
        if (x->shape[i] > 1 && x->stride[i] != step) return false;
        step *= x->shape[i];
    }
    return true;
}

int64_t mn_row_step(const mn_tensor *x) {
    int64_t step = 0, rows = 1;
    for (int i = 2; i >= 0; i--) {
        if (x->shape[i] == 1) continue;
        if (step == 0) step = x->stride[i];
        else if (x->stride[i] != step * rows) return 0;
        rows *= x->shape[i];
    }
    return step ? step : x->shape[3];
}

static mn_slot *new_slot(mn_tape *tape, size_t bytes) {
    mn_slot *slot = mn_tape_note(tape, sizeof *slot);
    if (slot) slot->bytes = bytes;
    return slot;
}

mn_tensor *mn_tape_over(mn_tape *tape, void *data, const int64_t shape[4], bool wants_grad) {
    mn_tensor *x = mn_tape_note(tape, sizeof *x);
    if (!x) return NULL;
    memcpy(x->shape, shape, sizeof x->shape);
    x->stride[2] = shape[3];
    x->stride[1] = shape[2] * x->stride[2];
    x->stride[0] = shape[1] * x->stride[1];
    x->data = data;
    if (wants_grad && mn_tape_records(tape)) {
        x->slot = new_slot(tape, (size_t)mn_count4(shape) * tape->item);
        if (!x->slot) return NULL;
    }
    return x;
}

mn_tensor *mn_tape_new(mn_tape *tape, const int64_t shape[4]) {
    const int64_t count = mn_count4(shape);
    void *data = mn_tape_memory(tape, count);
    return data ? mn_tape_over(tape, data, shape, true) : NULL;
}

mn_tensor *mn_tape_input(mn_tape *tape, void *data, void *grad, const int64_t shape[4]) {
    mn_tensor *x = mn_tape_over(tape, data, shape, grad != NULL);
    if (x && x->slot) {
        x->slot->memory = grad;
        x->slot->kept = true;
    }
    return x;
}

mn_tensor *mn_tape_leaf(mn_tape *tape, void *data, void *grad, int64_t rows, int64_t cols,
                        bool add) {
    mn_tensor *x = mn_tape_input(tape, data, grad, (int64_t[]){ 1, 1, rows, cols });
    if (x && x->slot) x->slot->written = add;
    return x;
}

bool mn_tape_untouched(const mn_tensor *leaf) {
    return leaf->slot && !leaf->slot->written;
}

bool mn_wants(const mn_tensor *x) {
    return x && x->slot;
}

/* ---- gradients ------------------------------------------------------------------------------- */

/* Gradient memory of `bytes`: some that is free again, or new. */
static void *take_gradient(mn_tape *tape, size_t bytes) {
    for (mn_spare **at = &tape->spare; *at; at = &(*at)->next) {
        mn_spare *found = *at;
        if (found->bytes != bytes) continue;
        *at = found->next;
        found->next = tape->unused;
        tape->unused = found;
        return found->memory;
    }
    return mn_tape_bytes_of(tape, bytes);
}

static void give_back(mn_tape *tape, mn_slot *slot) {
    if (slot->kept || slot->whole || !slot->memory) return;
    mn_spare *cell = tape->unused;
    if (cell) tape->unused = cell->next;
    else cell = mn_tape_note(tape, sizeof *cell);
    if (!cell) return;
    *cell = (mn_spare){ tape->spare, slot->memory, slot->bytes };
    tape->spare = cell;
    slot->memory = NULL;
}

mn_slot *mn_slot_standing_for(mn_slot *slot) {
    while (slot->whole && slot->bytes == slot->whole->bytes) slot = slot->whole;
    return slot;
}

static void *slot_memory(mn_tape *tape, mn_slot *slot) {
    if (slot->memory) return slot->memory;
    if (!slot->whole) return slot->memory = take_gradient(tape, slot->bytes);
    char *whole = slot_memory(tape, slot->whole);
    return slot->memory = whole ? whole + slot->offset : NULL;
}

void *mn_grad_read(const mn_tensor *x) {
    if (!x || !x->slot) return NULL;
    const mn_slot *slot = mn_slot_standing_for(x->slot);
    return slot->written ? slot->memory : NULL;
}

void *mn_grad_write(mn_tape *tape, mn_tensor *x, bool *add) {
    mn_slot *slot = mn_slot_standing_for(x->slot);
    *add = slot->written;
    slot->written = true;
    return slot_memory(tape, slot);
}

bool mn_grad_place(mn_tape *tape, mn_tensor *x) {
    return slot_memory(tape, mn_slot_standing_for(x->slot)) != NULL;
}

void mn_tape_give(const mn_tape *tape, void *to, const void *from, int64_t n, bool add) {
    if (!add) {
        memcpy(to, from, (size_t)n * tape->item);
    } else if (tape->dtype == MN_F64) {
        for (int64_t i = 0; i < n; i++) ((double *)to)[i] += ((const double *)from)[i];
    } else {
        for (int64_t i = 0; i < n; i++) ((float *)to)[i] += ((const float *)from)[i];
    }
}

typedef struct giving {
    const mn_tape *tape;
    const mn_tensor *x;
    char *to;
    const char *from;
    bool add;
} giving;

/* Token `item`: its heads one after the other. */
static void give_token(void *context, int64_t item, int worker) {
    (void)worker;
    const giving *g = context;
    const int64_t *n = g->x->shape, *s = g->x->stride;
    for (int64_t h = 0; h < n[2]; h++) {
        const int64_t to = item / n[1] * s[0] + item % n[1] * s[1] + h * s[2];
        const int64_t from = (item * n[2] + h) * n[3];
        mn_tape_give(g->tape, g->to + (size_t)to * g->tape->item,
                 g->from + (size_t)from * g->tape->item, n[3], g->add);
    }
}

void mn_grad_give(mn_tape *tape, mn_tensor *x, const void *gradient) {
    giving g = { .tape = tape, .x = x, .from = gradient };
    g.to = mn_grad_write(tape, x, &g.add);
    if (!g.to || !mn_tape_runs(tape)) return;
    mn_tape_items(tape, x->shape[0] * x->shape[1], give_token, &g);
}

/* ---- nodes ----------------------------------------------------------------------------------- */

static bool all_finite(const void *data, mn_dtype dtype, int64_t n, int64_t *at) {
    for (int64_t i = 0; i < n; i++) {
        const double x = dtype == MN_F64 ? ((const double *)data)[i] : ((const float *)data)[i];
        if (!isfinite(x)) {
            *at = i;
            return false;
        }
    }
    return true;
}

static void check_result(mn_tape *tape, const char *what, const mn_tensor *x) {
    int64_t at;
    if (!mn_is_contiguous(x) || all_finite(x->data, tape->dtype, mn_count4(x->shape), &at)) return;
    const int64_t row = at / x->shape[3] / x->shape[2];
    mn_tape_fail(tape, mn_fail(MN_ERR_NUMERIC, "%s: the result of %s is not finite, first in row %"
                               PRId64 " of the batch, at token %" PRId64, tape->scope, what,
                               row / x->shape[1], row % x->shape[1]));
}

void mn_tape_record(mn_tape *tape, const char *what, mn_back_fn back, void *payload, bool wanted,
                    mn_tensor *const *made, int n_made) {
    if (mn_tape_dead(tape)) return;
    for (int i = 0; i < n_made && (tape->modes & MN_TAPE_CHECK) && mn_tape_runs(tape); i++) {
        check_result(tape, what, made[i]);
    }
    if (!mn_tape_records(tape)) return;
    if (!wanted) {    // nothing upstream wants a gradient, so neither does this
        for (int i = 0; i < n_made; i++) made[i]->slot = NULL;
        return;
    }
    mn_node *node = mn_tape_note(tape, sizeof *node);
    if (!node) return;
    node->before = tape->last;
    node->back = back;
    node->payload = payload;
    for (int i = 0; i < n_made; i++) {
        if (made[i]->slot && node->n_made < (int)MN_COUNTOF(node->made)) {
            node->made[node->n_made++] = made[i]->slot;
        }
    }
    memcpy(node->scope, tape->scope, sizeof node->scope);
    tape->last = node;
}

void mn_tape_go_back(mn_tape *tape) {
    for (mn_node *node = tape->last; node && !mn_tape_dead(tape); node = node->before) {
        memcpy(tape->scope, node->scope, sizeof tape->scope);
        node->back(tape, node->payload);
        for (int i = 0; i < node->n_made; i++) give_back(tape, node->made[i]);
    }
    tape->last = NULL;
}

mn_status mn_tape_backward(mn_tape *tape) {
    if (!mn_tape_records(tape)) {
        return mn_fail(MN_ERR_INTERNAL, "backward over a tape that does not record");
    }
    mn_tape_go_back(tape);
    return tape->status;
}

/* ---- seed ------------------------------------------------------------------------------------ */

typedef struct seed {
    mn_tensor *x;
    const void *cotangent;
} seed;

static void back_seed(mn_tape *tape, void *payload) {
    const seed *s = payload;
    mn_grad_give(tape, s->x, s->cotangent);
}

void mn_tape_seed(mn_tape *tape, mn_tensor *x, const void *cotangent) {
    if (mn_tape_dead(tape) || !x || !x->slot) return;
    seed *s = mn_tape_note(tape, sizeof *s);
    if (!s) return;
    *s = (seed){ x, cotangent };
    mn_tape_record(tape, "seed", back_seed, s, true, NULL, 0);
}
