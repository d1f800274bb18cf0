/* tape.c - memory, slots and nodes of a tape, and the way back. */
#include "tape/tape.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "base/dtype.h"
#include "base/util.h"
#include "decode/defer.h"
#include "ops/elementwise/elementwise.h"
#include "tape/tape_internal.h"

static mn_status check_type(const mn_context *context, mn_dtype dtype) {
    const char *name = mn_dtype_name(dtype);
    if (context->device && dtype != MN_F32 && dtype != MN_BF16) {
        return mn_fail(MN_ERR_UNSUPPORTED, "a tape of %s is for the CPU; GPUs take f32 and bf16",
                       name);
    }
    if (!context->device && dtype != MN_F32 && dtype != MN_F64) {
        return mn_fail(MN_ERR_UNSUPPORTED, "a tape of %s is for GPUs; use f32 or f64 on the CPU",
                       name);
    }
    return MN_OK;
}

mn_status mn_tape_create(mn_tape **out, mn_context *context, mn_dtype dtype) {
    *out = NULL;
    mn_status st = check_type(context, dtype);
    if (st != MN_OK) return st;
    mn_tape *tape = calloc(1, sizeof *tape);
    if (!tape) return mn_fail(MN_ERR_MEMORY, "no memory for a tape");
    tape->context = context;
    tape->device = context->device;
    tape->works = tape->device ? mn_elementwise_cuda() : mn_elementwise_cpu();
    tape->where = tape->device ? mn_device_stream(tape->device) : context;
    tape->dtype = dtype;
    tape->item = mn_dtype_bytes(dtype);
    st = tape->device ? mn_device_arena(tape->device, &tape->data) : mn_arena_create(&tape->data);
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
    if (tape->device) mn_device_synchronize(tape->device);
    for (int64_t i = 0; i < tape->most_lent; i++) {
        mn_device_free(tape->device, tape->lent[i].there);
    }
    free(tape->lent);
    mn_defer_destroy(tape->delay);
    mn_arena_destroy(tape->data);
    mn_arena_destroy(tape->notes);
    free(tape);
}

void mn_tape_start(mn_tape *tape, unsigned modes) {
    mn_arena_release(tape->data, (mn_mark){ 0 });
    mn_arena_release(tape->notes, (mn_mark){ 0 });
    if (tape->device) tape->where = mn_device_stream(tape->device);
    tape->modes = modes;
    tape->pauses = false;
    tape->status = MN_OK;
    tape->last = NULL;
    tape->spare = tape->unused = NULL;
    tape->part = tape->present = NULL;
    tape->light = NULL;
    tape->used = tape->peak = tape->work = 0;
    tape->cu_seqlens = tape->borders = NULL;
    tape->n_seqs = tape->n_lent = 0;
    tape->lent_bytes = 0;
    tape->told = NULL;
    tape->position = tape->position_host = NULL;
    tape->sequences = 0;
    mn_defer_discard(tape);
    tape->n_checkpoints = tape->checkpoint = 0;
    tape->again = false;
    tape->scope[0] = '\0';
}

void mn_tape_start_alike(mn_tape *tape, unsigned modes, int64_t sequences) {
    mn_tape_start(tape, modes | MN_TAPE_ALIKE);
    if (mn_tape_gathers(tape)) tape->sequences = sequences;
}

void mn_tape_no_gradient(mn_tape *tape, bool none) {
    const unsigned records = MN_TAPE_RECORD;
    if (none == tape->pauses || (none && !(tape->modes & records))) return;
    tape->pauses = none;
    tape->modes = none ? tape->modes & ~records : tape->modes | records;
}

void mn_tape_pack(mn_tape *tape, const int64_t *cu_seqlens, int64_t n_seqs) {
    tape->cu_seqlens = cu_seqlens;
    tape->n_seqs = cu_seqlens ? n_seqs : 0;
    tape->borders = NULL;
    if (!cu_seqlens) return;
    tape->borders = mn_tape_lend(tape, cu_seqlens, (size_t)(n_seqs + 1) * sizeof *cu_seqlens);
}

void mn_tape_run_by(mn_tape *tape, const mn_tape_runner *runner) {
    tape->runner = runner;
}

int64_t mn_tape_sequences(const mn_tape *tape) {
    return tape->n_seqs;
}

const int64_t *mn_tape_borders(const mn_tape *tape) {
    return tape->cu_seqlens;
}

mn_status mn_tape_status(const mn_tape *tape) {
    return tape->status;
}

mn_tensor *mn_tape_fail(mn_tape *tape, mn_status status) {
    if (tape->status == MN_OK) tape->status = status;
    return NULL;
}

void mn_tape_scope(mn_tape *tape, const char *format, ...) {
    mn_defer_lower(tape);    // under the name of what asked for it
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

bool mn_tape_gathers(const mn_tape *tape) {
    return tape->device && tape->modes & MN_TAPE_DEFER;
}

size_t mn_tape_bytes(const mn_tape *tape) {
    return tape->peak;
}

size_t mn_tape_work_bytes(const mn_tape *tape) {
    return tape->work + tape->lent_bytes;
}

mn_status mn_tape_reserve(mn_tape *tape, size_t bytes) {
    mn_arena_release(tape->data, (mn_mark){ 0 });
    const bool there = mn_arena_bytes(tape->data, bytes);
    mn_arena_release(tape->data, (mn_mark){ 0 });
    if (there) return MN_OK;
    return mn_fail(MN_ERR_MEMORY, "%s has no memory for a step of %.1f MiB; use a smaller batch, a "
                   "shorter context or a smaller model", tape->device ? "the GPU" : "this machine",
                   (double)bytes / 1048576.0);
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
    if (mn_tape_gathers(tape)) mn_defer_renew(tape, memory, bytes);
    return memory;
}

void mn_tape_declare(mn_tape *tape, const void *data, size_t bytes) {
    if (mn_tape_gathers(tape)) mn_defer_declare(tape, data, bytes);
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
    mn_defer_lower(tape);
    mn_arena_release(tape->data, mark.mark);
    tape->used = mark.used;
}

void mn_tape_do(mn_tape *tape, mn_elementwise_id id, const void *work) {
    if (mn_defer_elementwise(tape, id, work)) return;
    const mn_elementwise_fn *fn = &tape->works[id];
    const size_t bytes = fn->bytes ? fn->bytes(work) : 0;
    const mn_tape_mark mark = mn_tape_hold(tape);
    void *space = bytes > 0 ? mn_tape_bytes_of(tape, bytes) : NULL;
    if (mn_tape_runs(tape)) {
        mn_status st = tape->device ? mn_device_use(tape->device) : MN_OK;
        const int code = st == MN_OK ? fn->run(tape->where, work, space) : 0;
        if (code != 0) st = mn_device_check(tape->device, code, tape->scope);
        if (st != MN_OK) mn_tape_fail(tape, st);
    }
    mn_tape_let_go(tape, mark);
}

void mn_tape_product(mn_tape *tape, const mn_matmul_args *p) {
    if (!mn_tape_runs(tape)) {
        tape->work = mn_max(tape->work, mn_matmul_work(tape->context, p));
        return;
    }
    mn_matmul_args all = *p;
    all.alike = tape->device && (tape->modes & MN_TAPE_ALIKE);
    all.b_is_old = all.alike && !mn_arena_holds(tape->data, p->b);
    if (mn_defer_gemm(tape, &all)) return;
    const mn_status st = mn_matmul(tape->context, &all);
    if (st != MN_OK) mn_tape_fail(tape, st);
}

void *mn_tape_memory(mn_tape *tape, int64_t count) {
    size_t bytes;
    if (count < 0 || !mn_mul_size(&bytes, (size_t)count, tape->item)) bytes = SIZE_MAX;
    return mn_tape_bytes_of(tape, bytes);
}

void *mn_tape_host(mn_tape *tape, size_t bytes) {
    return mn_tape_dead(tape) ? NULL : mn_tape_note(tape, bytes);
}

mn_status mn_tape_fetch(mn_tape *tape, void *to, const void *from, size_t bytes) {
    mn_tape_flush(tape);
    if (tape->device) return mn_device_download(tape->device, to, from, bytes);
    memcpy(to, from, bytes);
    return MN_OK;
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

mn_view mn_flat_view(void *data, mn_dtype dtype, const int64_t shape[4]) {
    const int64_t row = shape[2] * shape[3];
    return (mn_view){ data, dtype, { shape[1] * row, row, shape[3], 1 } };
}

void mn_quant_misuse(const mn_tensor *x) {
    if (!x->quant) return;
    x->quant->misused = true;
    if (!mn_tape_runs(x->tape)) return;
    mn_tape_fail(x->tape, mn_fail(MN_ERR_UNSUPPORTED, "%s: weights of %d bits serve products only, "
                                  "and this layer needs the numbers themselves; quantise the model "
                                  "once more with this build", x->tape->scope, x->quant->bits));
}

void mn_tape_observe(mn_tape *tape, mn_tape_observer fn, void *context) {
    tape->observer = fn;
    tape->observer_context = context;
}

mn_view mn_value(const mn_tensor *x) {
    if (!x) return (mn_view){ 0 };
    mn_quant_misuse(x);
    return (mn_view){ x->data, x->dtype, { x->stride[0], x->stride[1], x->stride[2], 1 } };
}

static mn_slot *new_slot(mn_tape *tape, mn_dtype dtype, const int64_t shape[4]) {
    mn_slot *slot = mn_tape_note(tape, sizeof *slot);
    if (!slot) return NULL;
    slot->dtype = dtype;
    slot->bytes = (size_t)mn_count4(shape) * mn_dtype_bytes(dtype);
    return slot;
}

mn_tensor *mn_tape_over(mn_tape *tape, void *data, mn_dtype dtype, const int64_t shape[4],
                        bool wants_grad) {
    mn_tensor *x = mn_tape_note(tape, sizeof *x);
    if (!x) return NULL;
    memcpy(x->shape, shape, sizeof x->shape);
    memcpy(x->stride, mn_flat_view(data, dtype, shape).stride, sizeof x->stride);
    x->dtype = dtype;
    x->data = data;
    mn_tape_declare(tape, data, (size_t)mn_max(mn_count4(shape), 0) * mn_dtype_bytes(dtype));
    if (wants_grad && mn_tape_records(tape)) {
        x->slot = new_slot(tape, dtype, shape);
        if (!x->slot) return NULL;
    }
    return x;
}

mn_tensor *mn_tape_new_of(mn_tape *tape, mn_dtype dtype, const int64_t shape[4]) {
    const int64_t count = mn_count4(shape);
    size_t bytes;
    if (count < 0 || !mn_mul_size(&bytes, (size_t)count, mn_dtype_bytes(dtype))) bytes = SIZE_MAX;
    void *data = mn_tape_bytes_of(tape, bytes);
    return data ? mn_tape_over(tape, data, dtype, shape, true) : NULL;
}

mn_tensor *mn_tape_new(mn_tape *tape, const int64_t shape[4]) {
    return mn_tape_new_of(tape, tape->dtype, shape);
}

mn_tensor *mn_tape_filled(mn_tape *tape, const int64_t shape[4], double value) {
    mn_tensor *x = mn_tape_new(tape, shape);
    if (!x) return NULL;
    x->slot = NULL;
    mn_fill_params work = { .to = mn_value(x), .value = value };
    memcpy(work.shape, shape, sizeof work.shape);
    mn_tape_do(tape, MN_ELEMENTWISE_FILL, &work);
    return x;
}

mn_tensor *mn_tape_normal(mn_tape *tape, const int64_t shape[4], uint64_t seed, uint64_t stream) {
    mn_tensor *x = mn_tape_new(tape, shape);
    if (!x) return NULL;
    x->slot = NULL;
    mn_tape_do(tape, MN_ELEMENTWISE_NORMAL,
               &(mn_normal_params){ mn_value(x), mn_count4(shape), seed, stream });
    return x;
}

/* float32 on a device whatever the tape's type: what fits in a table is small. */
mn_tensor *mn_tape_constant(mn_tape *tape, const int64_t shape[4], const double *values) {
    const mn_dtype dtype = tape->dtype == MN_F64 ? MN_F64 : MN_F32;
    const int64_t count = mn_count4(shape);
    const size_t bytes = (size_t)mn_max(count, 0) * mn_dtype_bytes(dtype);
    void *copy = count < 0 ? NULL : mn_tape_note(tape, bytes);
    for (int64_t i = 0; copy && i < count; i++) {
        if (dtype == MN_F64) ((double *)copy)[i] = values[i];
        else ((float *)copy)[i] = (float)values[i];
    }
    void *data = copy ? (void *)mn_tape_lend_fixed(tape, copy, bytes) : NULL;
    return data ? mn_tape_over(tape, data, dtype, shape, false) : NULL;
}

static mn_tensor *given(mn_tape *tape, void *data, mn_dtype data_dtype, void *grad,
                        mn_dtype grad_dtype, const int64_t shape[4], bool add) {
    mn_tensor *x = mn_tape_over(tape, data, data_dtype, shape, grad != NULL);
    if (!x || !x->slot) return x;
    *x->slot = (mn_slot){ .memory = grad, .dtype = grad_dtype, .kept = true, .written = add,
                          .bytes = (size_t)mn_count4(shape) * mn_dtype_bytes(grad_dtype) };
    return x;
}

mn_tensor *mn_tape_input(mn_tape *tape, void *data, void *grad, const int64_t shape[4]) {
    return given(tape, data, tape->dtype, grad, tape->dtype, shape, false);
}

mn_tensor *mn_tape_leaf_of(mn_tape *tape, void *data, mn_dtype data_dtype, void *grad,
                           mn_dtype grad_dtype, int64_t rows, int64_t cols, bool add) {
    return given(tape, data, data_dtype, grad, grad_dtype, (int64_t[]){ 1, 1, rows, cols }, add);
}

mn_tensor *mn_tape_leaf(mn_tape *tape, void *data, void *grad, int64_t rows, int64_t cols,
                        bool add) {
    const mn_dtype sums = tape->dtype == MN_BF16 ? MN_F32 : tape->dtype;
    return mn_tape_leaf_of(tape, data, tape->dtype, grad, sums, rows, cols, add);
}

mn_tensor *mn_tape_leaf_quant(mn_tape *tape, mn_quant *quant) {
    mn_tensor *x = mn_tape_over(tape, NULL, tape->dtype, (int64_t[]){ 1, 1, quant->rows,
                                                                      quant->cols }, false);
    if (!x) return NULL;
    x->quant = quant;
    x->tape = tape;
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
    if (slot->kept || slot->held || slot->whole || !slot->memory) return;
    mn_spare *cell = tape->unused;
    if (cell) tape->unused = cell->next;
    else cell = mn_tape_note(tape, sizeof *cell);
    if (!cell) return;
    *cell = (mn_spare){ tape->spare, slot->memory, slot->bytes };
    tape->spare = cell;
    slot->memory = NULL;
}

void mn_slot_release(mn_tape *tape, mn_slot *slot) {
    slot->held = false;
    give_back(tape, slot);
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

/* A view of gradient memory, laid out as x is. */
static mn_view gradient_view(const mn_tensor *x, const mn_slot *slot, void *memory) {
    mn_view view = mn_value(x);
    view.data = memory;
    view.dtype = slot->dtype;
    return view;
}

mn_view mn_grad_read(const mn_tensor *x) {
    if (!x || !x->slot) return (mn_view){ 0 };
    const mn_slot *slot = mn_slot_standing_for(x->slot);
    return slot->written ? gradient_view(x, slot, slot->memory) : (mn_view){ 0 };
}

mn_view mn_grad_write(mn_tape *tape, mn_tensor *x, bool *add) {
    mn_slot *slot = mn_slot_standing_for(x->slot);
    *add = slot->written;
    slot->written = true;
    return gradient_view(x, slot, slot_memory(tape, slot));
}

bool mn_grad_place(mn_tape *tape, mn_tensor *x) {
    return slot_memory(tape, mn_slot_standing_for(x->slot)) != NULL;
}

void mn_grad_give(mn_tape *tape, mn_tensor *x, const mn_view *gradient) {
    mn_move_params work = { .from = *gradient, .times = 1 };
    memcpy(work.shape, x->shape, sizeof work.shape);
    work.to = mn_grad_write(tape, x, &work.add);
    if (work.to.data) mn_tape_do(tape, MN_ELEMENTWISE_MOVE, &work);
}

void mn_grad_hand(mn_tape *tape, mn_tensor *x, const mn_view *gradient) {
    mn_slot *slot = mn_slot_standing_for(x->slot);
    const size_t bytes = (size_t)mn_count4(x->shape) * mn_dtype_bytes(slot->dtype);
    const bool fits = !slot->memory && !slot->whole && slot->bytes == bytes &&
                      slot->dtype == gradient->dtype && mn_is_contiguous(x);
    if (!fits) {
        mn_grad_give(tape, x, gradient);
        return;
    }
    slot->memory = gradient->data;
    slot->written = true;
}

/* Contiguous numbers share their gradient whatever their type; others have one beside. */
typedef struct cast {
    mn_tensor *x, *y;
} cast;

static void back_cast(mn_tape *tape, void *payload) {
    const cast *c = payload;
    const mn_view dy = mn_grad_read(c->y);
    if (dy.data) mn_grad_give(tape, c->x, &dy);
}

mn_tensor *mn_tape_cast(mn_tape *tape, mn_tensor *x, mn_dtype dtype) {
    if (!x || mn_tape_dead(tape)) return x;
    mn_quant_misuse(x);
    if (x->dtype == dtype) return x;
    cast *c = mn_tape_note(tape, sizeof *c);
    mn_tensor *y = mn_tape_new_of(tape, dtype, x->shape);
    if (!c || !y) return NULL;
    *c = (cast){ x, y };
    mn_move_params work = { .to = mn_value(y), .from = mn_value(x), .times = 1 };
    memcpy(work.shape, x->shape, sizeof work.shape);
    mn_tape_do(tape, MN_ELEMENTWISE_MOVE, &work);
    if (mn_is_contiguous(x)) y->slot = x->slot;
    else mn_tape_record(tape, "a conversion", back_cast, c, mn_wants(x), &y, 1);
    return y;
}

/* ---- nodes ----------------------------------------------------------------------------------- */

/* Reads the verdict back: a tape that checks waits for its device. */
static void check_result(mn_tape *tape, const char *what, const mn_tensor *x) {
    const int64_t n = mn_count4(x->shape);
    int64_t at = n;
    if (!mn_is_contiguous(x)) return;
    const mn_tape_mark mark = mn_tape_hold(tape);
    mn_finite_params work = { mn_value(x), n, mn_tape_bytes_of(tape, sizeof at) };
    if (work.first) mn_tape_do(tape, MN_ELEMENTWISE_FINITE, &work);
    if (mn_tape_runs(tape)) mn_tape_fail(tape, mn_tape_fetch(tape, &at, work.first, sizeof at));
    mn_tape_let_go(tape, mark);
    if (at >= n || mn_tape_dead(tape)) return;
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
    node->part = tape->part;
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
        mn_part_present(tape, node->part);
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
    const mn_view dy = mn_flat_view((void *)s->cotangent, s->x->dtype, s->x->shape);
    mn_grad_give(tape, s->x, &dy);
}

void mn_tape_seed(mn_tape *tape, mn_tensor *x, const void *cotangent) {
    if (mn_tape_dead(tape) || !x || !x->slot) return;
    seed *s = mn_tape_note(tape, sizeof *s);
    if (!s) return;
    *s = (seed){ x, cotangent };
    mn_tape_record(tape, "seed", back_seed, s, true, NULL, 0);
}

/* ---- notes on the way ------------------------------------------------------------------------ */

typedef struct notice {
    void (*fn)(void *context, int number);
    void *context;
    int number;
} notice;

static void back_notice(mn_tape *tape, void *payload) {
    const notice *n = payload;
    if (!mn_tape_dead(tape) && mn_tape_runs(tape)) n->fn(n->context, n->number);
}

void mn_tape_notify(mn_tape *tape, void (*fn)(void *context, int number), void *context,
                    int number) {
    if (mn_tape_dead(tape) || !mn_tape_records(tape)) return;
    notice *n = mn_tape_note(tape, sizeof *n);
    if (!n) return;
    *n = (notice){ fn, context, number };
    mn_tape_record(tape, "notice", back_notice, n, true, NULL, 0);
}
