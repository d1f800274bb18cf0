/* state.c - named pieces of a layer's memory: recurrent states in two buffers, caches in one
 * that doubles. In the host's memory or in a GPU's. */
#include "layers/state.h"

#include <stdlib.h>
#include <string.h>

#include "base/bf16.h"
#include "base/checked.h"
#include "base/dtype.h"
#include "base/status.h"
#include "base/util.h"

/* ---- memory, wherever it is ------------------------------------------------------------------ */

static mn_status no_memory(const char *name, int64_t count) {
    return mn_fail(MN_ERR_MEMORY, "no memory for a state %s of %lld numbers", name,
                   (long long)count);
}

static void *numbers(const mn_layer_state *state, int64_t count, size_t item) {
    size_t bytes;
    void *memory = NULL;
    if (count < 0 || !mn_mul_size(&bytes, (size_t)count, item) ||
        !mn_add_size(&bytes, bytes, MN_ALIGN)) {
        return NULL;
    }
    if (!state->device) return aligned_alloc(MN_ALIGN, bytes / MN_ALIGN * MN_ALIGN);
    return mn_device_pool_allocate(state->device, &memory, bytes) == MN_OK ? memory : NULL;
}

static void discard(const mn_layer_state *state, void *memory) {
    if (state->device) mn_device_pool_free(state->device, memory);
    else free(memory);
}

/* Copies within the memory of a state. */
static mn_status copy_bytes(const mn_layer_state *state, void *to, const void *from,
                            size_t bytes) {
    if (state->device) return mn_device_copy(state->device, to, from, bytes);
    memcpy(to, from, bytes);
    return MN_OK;
}

/* Copies `rows` rows of `bytes`, which begin so many bytes apart. */
static mn_status copy_rows(const mn_layer_state *state, void *to, size_t to_step,
                           const void *from, size_t from_step, size_t bytes, int64_t rows) {
    if (to_step == bytes && from_step == bytes) {
        return copy_bytes(state, to, from, bytes * (size_t)rows);
    }
    if (state->device && to_step <= INT32_MAX && from_step <= INT32_MAX) {
        return mn_device_copy_rows(state->device, to, to_step, from, from_step, bytes, rows);
    }
    mn_status st = MN_OK;
    for (int64_t i = 0; i < rows && st == MN_OK; i++) {
        st = copy_bytes(state, (char *)to + (size_t)i * to_step,
                        (const char *)from + (size_t)i * from_step, bytes);
    }
    return st;
}

void mn_layer_state_free(mn_layer_state *state) {
    for (int i = 0; i < state->n_pieces; i++) {
        discard(state, state->pieces[i].now);
        discard(state, state->pieces[i].next);
    }
    memset(state, 0, sizeof *state);
}

static size_t item_of(const mn_state_piece *piece) {
    return mn_dtype_bytes(piece->dtype);
}

size_t mn_layer_state_bytes(const mn_layer_state *state) {
    size_t bytes = 0;
    for (int i = 0; i < state->n_pieces; i++) {
        bytes += (size_t)state->pieces[i].count * item_of(&state->pieces[i]);
    }
    return bytes;
}

/* ---- pieces ---------------------------------------------------------------------------------- */

mn_state_piece *mn_state_find(mn_layer_state *state, const char *name) {
    for (int i = 0; i < state->n_pieces; i++) {
        if (strcmp(state->pieces[i].name, name) == 0) return &state->pieces[i];
    }
    return NULL;
}

static mn_state_piece *find_or_add(mn_layer_state *state, const char *name) {
    mn_state_piece *piece = mn_state_find(state, name);
    if (piece || state->n_pieces == MN_STATE_PIECES) return piece;
    piece = &state->pieces[state->n_pieces++];
    memset(piece, 0, sizeof *piece);
    strncpy(piece->name, name, sizeof piece->name - 1);
    return piece;
}

/* A piece of `count` numbers of `dtype` with nothing in it yet, in place of what it was. */
static mn_status renew(mn_state_piece **out, mn_layer_state *state, const char *name,
                       mn_dtype dtype, int64_t count) {
    mn_state_piece *piece = find_or_add(state, name);
    void *memory = piece ? numbers(state, count, mn_dtype_bytes(dtype)) : NULL;
    if (!memory) return no_memory(name, count);
    discard(state, piece->now);
    discard(state, piece->next);
    piece->now = memory;
    piece->next = NULL;
    piece->dtype = dtype;
    piece->count = count;
    *out = piece;
    return MN_OK;
}

static void shape_cache(mn_state_piece *piece, int64_t B, int64_t length, int64_t width) {
    piece->B = B;
    piece->length = piece->capacity = length;
    piece->width = width;
}

mn_status mn_state_put(mn_layer_state *state, const char *name, mn_dtype dtype, const void *from,
                       int64_t count, int64_t B, int64_t length, int64_t width) {
    mn_state_piece *piece = NULL;
    const mn_status st = renew(&piece, state, name, dtype, count);
    if (st != MN_OK) return st;
    memcpy(piece->now, from, (size_t)count * item_of(piece));
    shape_cache(piece, B, length, width);
    return MN_OK;
}

/* ---- copies ---------------------------------------------------------------------------------- */

/* Rows of a cache lie `capacity` apart; a copy has no room to spare. */
static mn_status copy_piece(mn_layer_state *to, const mn_state_piece *from) {
    mn_state_piece *piece = NULL;
    mn_status st = renew(&piece, to, from->name, from->dtype, from->count);
    if (st != MN_OK) return st;
    shape_cache(piece, from->B, from->length, from->width);
    const size_t item = item_of(from);
    if (from->width == 0) return copy_bytes(to, piece->now, from->now, (size_t)from->count * item);
    const size_t row = (size_t)from->width * item;
    return copy_rows(to, piece->now, (size_t)from->length * row, from->now,
                     (size_t)from->capacity * row, (size_t)from->length * row, from->B);
}

mn_status mn_layer_state_copy(mn_layer_state *to, const mn_layer_state *from) {
    *to = (mn_layer_state){ .device = from->device, .by_position = from->by_position,
                            .reads_position = from->reads_position };
    mn_status st = MN_OK;
    for (int i = 0; i < from->n_pieces && st == MN_OK; i++) {
        st = copy_piece(to, &from->pieces[i]);
    }
    if (st != MN_OK) mn_layer_state_free(to);
    return st;
}

/* n numbers from bf16 to float32 in place, from the last one; and back, from the first. */
static void widen(void *data, int64_t n) {
    for (int64_t i = n - 1; i >= 0; i--) {
        ((float *)data)[i] = mn_bf16_to_float(((const uint16_t *)data)[i]);
    }
}

static void narrow(void *data, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        ((uint16_t *)data)[i] = mn_bf16_from_float(((const float *)data)[i]);
    }
}

/* A packed piece of a GPU as a piece of the host in float32. */
static mn_status fetch_piece(mn_layer_state *to, const mn_state_piece *from, mn_device *device) {
    mn_state_piece *piece;
    mn_status st = renew(&piece, to, from->name, MN_F32, from->count);
    if (st == MN_OK) {
        st = mn_device_download(device, piece->now, from->now,
                                (size_t)from->count * item_of(from));
    }
    if (st != MN_OK) return st;
    if (from->dtype == MN_BF16) widen(piece->now, from->count);
    shape_cache(piece, from->B, from->length, from->width);
    return MN_OK;
}

mn_status mn_layer_state_fetch(mn_layer_state *to, const mn_layer_state *from) {
    if (!from->device) return mn_layer_state_copy(to, from);
    mn_layer_state packed;
    mn_status st = mn_layer_state_copy(&packed, from);
    *to = (mn_layer_state){ .by_position = from->by_position };
    for (int i = 0; i < from->n_pieces && st == MN_OK; i++) {
        st = fetch_piece(to, &packed.pieces[i], from->device);
    }
    mn_layer_state_free(&packed);
    if (st != MN_OK) mn_layer_state_free(to);
    return st;
}

static mn_status send_piece(mn_layer_state *to, mn_state_piece *from, mn_dtype dtype) {
    mn_state_piece *piece;
    const mn_dtype type = from->width ? dtype : MN_F32;
    if (from->dtype != MN_F32) return mn_fail(MN_ERR_UNSUPPORTED, "a GPU takes states of f32");
    mn_status st = renew(&piece, to, from->name, type, from->count);
    if (st != MN_OK) return st;
    if (type == MN_BF16) narrow(from->now, from->count);
    shape_cache(piece, from->B, from->length, from->width);
    return mn_device_upload(to->device, piece->now, from->now,
                            (size_t)from->count * item_of(piece));
}

mn_status mn_layer_state_send(mn_layer_state *to, const mn_layer_state *from, mn_device *device,
                              mn_dtype dtype) {
    mn_layer_state packed;
    mn_status st = mn_layer_state_copy(&packed, from);
    *to = (mn_layer_state){ .device = device, .by_position = from->by_position };
    for (int i = 0; i < from->n_pieces && st == MN_OK; i++) {
        st = send_piece(to, &packed.pieces[i], dtype);
    }
    mn_layer_state_free(&packed);
    if (st != MN_OK) mn_layer_state_free(to);
    return st;
}

/* ---- slots ----------------------------------------------------------------------------------- */

/* The piece of the slots that `piece` of a sequence has its place in; NULL: of another model. */
static char *place_in_slot(const mn_layer_state *slots, const mn_state_piece *piece, int64_t slot) {
    for (int i = 0; i < slots->n_pieces; i++) {
        const mn_state_piece *all = &slots->pieces[i];
        if (strcmp(all->name, piece->name) != 0 || all->dtype != piece->dtype) continue;
        return (char *)all->now + (size_t)(slot * piece->count) * item_of(piece);
    }
    return NULL;
}

bool mn_layer_state_fits_slot(const mn_layer_state *slots, const mn_layer_state *state) {
    bool fits = state->device && state->n_pieces == slots->n_pieces;
    for (int i = 0; fits && i < state->n_pieces; i++) {
        const mn_state_piece *piece = &state->pieces[i];
        const mn_state_piece *all = mn_state_find((mn_layer_state *)slots, piece->name);
        fits = piece->now && piece->width == 0 && all && all->dtype == piece->dtype;
    }
    return fits;
}

void mn_layer_state_view_slot(const mn_layer_state *slots, mn_layer_state *state, int64_t slot) {
    for (int i = 0; i < state->n_pieces; i++) {
        state->pieces[i].now = place_in_slot(slots, &state->pieces[i], slot);
    }
}

mn_status mn_layer_state_to_slot(const mn_layer_state *slots, mn_layer_state *state, bool lent,
                                 int64_t slot) {
    mn_status st = MN_OK;
    for (int i = 0; i < state->n_pieces && st == MN_OK; i++) {
        mn_state_piece *piece = &state->pieces[i];
        char *to = place_in_slot(slots, piece, slot);
        if (!to) return mn_fail(MN_ERR_INTERNAL, "a state %s has no slot", piece->name);
        st = mn_device_copy(state->device, to, piece->now, (size_t)piece->count * item_of(piece));
        if (st != MN_OK) break;
        if (!lent) discard(state, piece->now);
        discard(state, piece->next);
        piece->now = to;
        piece->next = NULL;
    }
    return st;
}

mn_status mn_layer_state_from_slot(mn_layer_state *state) {
    mn_status st = MN_OK;
    for (int i = 0; i < state->n_pieces; i++) {
        mn_state_piece *piece = &state->pieces[i];
        void *own = st == MN_OK ? numbers(state, piece->count, item_of(piece)) : NULL;
        if (st == MN_OK && !own) st = no_memory(piece->name, piece->count);
        if (own) {
            const size_t bytes = (size_t)piece->count * item_of(piece);
            st = mn_device_copy(state->device, own, piece->now, bytes);
        }
        piece->now = own;
    }
    return st;
}

void mn_layer_state_leave_slot(mn_layer_state *state) {
    for (int i = 0; i < state->n_pieces; i++) state->pieces[i].now = NULL;
}

/* ---- recurrent states ------------------------------------------------------------------------ */

/* Where the tape computes is where the state's memory is taken. */
static mn_device *device_of(const mn_tape *tape) {
    return mn_tape_context(tape)->device;
}

/* The type of a recurrent state: that of the tape, and float32 on a GPU. */
static mn_dtype state_dtype(const mn_tape *tape) {
    return mn_tape_dtype(tape) == MN_F64 ? MN_F64 : MN_F32;
}

/* Where a call finds the piece, NULL if it is fresh, and where it leaves it. */
typedef struct piece_place {
    void *before, *after;
} piece_place;

static bool place_piece(piece_place *place, mn_layer_state *state, const mn_run *run,
                        const char *name, int64_t count) {
    mn_tape *tape = run->tape;
    state->device = device_of(tape);
    mn_state_piece *piece = find_or_add(state, name);
    if (!piece || (piece->now && (piece->count != count || piece->width))) {
        mn_tape_fail(tape, mn_fail(MN_ERR_ARGUMENT, "a state %s of %lld numbers where the model "
                                   "has %lld: it belongs to another model or batch", name,
                                   piece ? (long long)piece->count : 0, (long long)count));
        return false;
    }
    piece->dtype = state_dtype(tape);
    const bool fresh = !piece->now, in_place = run->call->T == 1 && !fresh;
    if (!in_place && !piece->next) piece->next = numbers(state, count, item_of(piece));
    if (!in_place && !piece->next) {
        mn_tape_fail(tape, no_memory(name, count));
        return false;
    }
    place->before = piece->now;
    if (!in_place) {
        piece->now = piece->next;
        piece->next = place->before;
    }
    place->after = piece->now;
    piece->count = count;
    return true;
}

/* Keeps the piece after each step. Its memory is that of the first step's result: a fresh piece
 * gets it here, so that all steps find it at one place. */
static bool save_steps(mn_layer_state *state, mn_run *run, const char *name, int64_t count) {
    mn_tape *tape = run->tape;
    mn_state_piece *piece = find_or_add(state->rows[0], name);
    void *steps = mn_tape_memory(tape, count * state->n_rows);
    if (!piece || !steps) return false;
    if (!piece->now && !piece->next) {
        piece->dtype = state_dtype(tape);
        piece->next = numbers(state->rows[0], count, item_of(piece));
    }
    void *at = piece->now ? piece->now : piece->next;
    piece->steps = steps;
    if (at) mn_run_row_save(run, at, steps, (size_t)count * item_of(piece));
    return at != NULL;
}

void mn_layer_state_back(mn_layer_state *state, int64_t count) {
    for (int i = 0; i < state->n_pieces; i++) {
        mn_state_piece *piece = &state->pieces[i];
        if (piece->width) {
            piece->length = piece->before + count;
            piece->count = piece->B * piece->length * piece->width;
        } else if (piece->steps) {
            const size_t bytes = (size_t)piece->count * item_of(piece);
            memcpy(piece->now, (const char *)piece->steps + (size_t)(count - 1) * bytes, bytes);
        }
    }
}

/* Of a plan: what the piece would be; `width` 0: not of a cache. */
static void note(mn_layer_state *state, const mn_tape *tape, const char *name, int64_t count,
                 int64_t width) {
    if (!state || !state->counts || mn_tape_status(tape) != MN_OK) return;
    mn_state_piece *piece = find_or_add(state, name);
    if (!piece) return;
    piece->dtype = width ? mn_tape_dtype(tape) : state_dtype(tape);
    piece->count = count;
    piece->width = width;
}

/* The initial and the final state as tensors of the caller. */
static void bind_ends(const mn_state_ends *ends, mn_run *run, const char *in, const char *out,
                      const char *name) {
    mn_tensor *before = ends->before(ends->context, name);
    if (before) mn_run_in(run, in, before);
    ends->after(ends->context, name, mn_run_out(run, out));
}

void mn_state_bind(mn_layer_state *state, mn_run *run, const char *in, const char *out,
                   const char *name, int64_t count) {
    mn_tape *tape = run->tape;
    if (state && state->ends) {
        bind_ends(state->ends, run, in, out, name);
        return;
    }
    if (mn_tape_plans(tape)) note(state, tape, name, count, 0);
    if (!state || mn_tape_status(tape) != MN_OK || mn_tape_plans(tape)) return;
    piece_place place;
    const int64_t each = state->n_rows && !state->starts ? count / state->n_rows : count;
    if (state->n_rows) mn_run_by_rows(run, state->n_rows, state->starts);
    if (state->steps && !save_steps(state, run, name, each)) return;
    for (int64_t b = 0; b < state->n_rows; b++) {
        if (!place_piece(&place, state->rows[b], run, name, each)) return;
        mn_run_row_at(run, in, b, place.before);
        mn_run_row_at(run, out, b, place.after);
    }
    if (state->n_rows || !place_piece(&place, state, run, name, count)) return;
    const size_t bytes = (size_t)count * mn_dtype_bytes(state_dtype(tape));
    mn_tape_declare(tape, place.before, bytes);
    mn_tape_declare(tape, place.after, bytes);
    if (place.before) mn_run_in_at(run, in, place.before);
    mn_run_out_at(run, out, place.after);
}

void mn_state_position(mn_layer_state *state, mn_run *run, int64_t *slot, int64_t position) {
    if (state) state->by_position = true;
    *slot = position;
    if (!state || !state->rows) return;
    mn_run_by_rows(run, state->n_rows, state->starts);
    mn_run_row_numbers(run, slot, state->positions);
}

void mn_state_count(mn_layer_state *state, mn_run *run, int64_t *slot, const int64_t **counts,
                    int64_t position) {
    const int64_t *host = mn_tape_position(run->tape);
    if (!state || state->rows || !host) {
        mn_state_position(state, run, slot, position);
        return;
    }
    state->reads_position = true;
    *counts = host;
}

void mn_state_rows(const mn_layer_state *state, mn_run *run) {
    if (state && state->rows) mn_run_by_rows(run, state->n_rows, state->starts);
}

/* ---- caches ---------------------------------------------------------------------------------- */

enum { ROOM = 256 };    // tokens that a cache of a step that repeats grows by, at least

/* Makes room for `length` tokens in each of B rows. */
static mn_status grow(mn_layer_state *state, mn_state_piece *piece, int64_t length) {
    if (length <= piece->capacity) return MN_OK;
    const int64_t twice = 2 * piece->capacity;
    const int64_t capacity = mn_max(length, piece->most ? mn_min(twice, piece->most) : twice);
    const size_t row = (size_t)piece->width * item_of(piece);
    int64_t count;
    if (!mn_mul_i64(&count, piece->B * piece->width, capacity)) count = -1;
    char *memory = numbers(state, count, item_of(piece));
    if (!memory) return no_memory(piece->name, count);
    mn_status st = MN_OK;
    if (piece->length) {
        st = copy_rows(state, memory, (size_t)capacity * row, piece->now,
                       (size_t)piece->capacity * row, (size_t)piece->length * row, piece->B);
    }
    discard(state, piece->now);
    piece->now = memory;
    piece->capacity = capacity;
    return st;
}

/* Puts the tokens of x behind those of the cache. */
static mn_status append(mn_layer_state *state, mn_state_piece *piece, const mn_tensor *x) {
    const int64_t B = x->shape[0], T = x->shape[1];
    const size_t item = item_of(piece), row = (size_t)piece->width * item;
    mn_status st = MN_OK;
    for (int64_t b = 0; b < B && st == MN_OK; b++) {
        char *to = (char *)piece->now + (size_t)(b * piece->capacity + piece->length) * row;
        const char *from = (const char *)x->data + (size_t)(b * x->stride[0]) * item;
        st = copy_rows(state, to, row, from, (size_t)x->stride[1] * item, row, T);
    }
    return st;
}

/* Puts x behind what the piece `name` holds; NULL after a failure, which the tape then has. */
static mn_state_piece *extend(mn_layer_state *state, mn_tape *tape, const mn_tensor *x,
                              const char *name) {
    state->device = device_of(tape);
    state->by_position = true;
    const int64_t B = x->shape[0], T = x->shape[1], width = x->shape[2] * x->shape[3];
    mn_state_piece *piece = find_or_add(state, name);
    if (piece && !piece->now) {
        piece->dtype = mn_tape_dtype(tape);
        piece->B = B;
        piece->width = width;
    }
    if (!piece || piece->B != B || piece->width != width || x->stride[2] != x->shape[3]) {
        mn_tape_fail(tape, mn_fail(MN_ERR_ARGUMENT, "the cache %s belongs to another model or "
                                   "batch", name));
        return NULL;
    }
    mn_status st = grow(state, piece, piece->length + T);
    if (st == MN_OK) st = append(state, piece, x);
    if (st != MN_OK) {
        mn_tape_fail(tape, st);
        return NULL;
    }
    piece->length += T;
    piece->count = B * piece->length * width;
    return piece;
}

/* Steps share a cache, which may have moved since the ones before. */
static void keep_before(mn_tensor_rows *rows, mn_layer_state *state, const char *name, int64_t b) {
    mn_state_piece *piece = mn_state_find(state, name);
    piece->before = piece->length - b - 1;
    for (int64_t k = 0; k <= b; k++) rows->data[k] = piece->now;
}

/* The caches of a batch, each behind its own tokens. */
static mn_tensor *append_rows(mn_layer_state *state, mn_tape *tape, mn_tensor *x,
                              const char *name) {
    const int64_t n = state->n_rows;
    mn_tensor_rows *rows = mn_tape_rows(tape, n);
    if (!rows) return NULL;
    int64_t most = 0;
    for (int64_t b = 0; b < n; b++) {
        mn_tensor one = *x;
        const int64_t *starts = state->starts;
        const int64_t at = starts ? starts[b] * x->stride[1] : b * x->stride[0];
        one.shape[0] = 1;
        if (starts) one.shape[1] = starts[b + 1] - starts[b];
        one.data = (char *)x->data + (size_t)at * mn_dtype_bytes(x->dtype);
        const mn_state_piece *piece = extend(state->rows[b], tape, &one, name);
        if (!piece) return NULL;
        rows->data[b] = piece->now;
        rows->length[b] = piece->length;
        most = mn_max(most, piece->length);
        if (state->steps) keep_before(rows, state->rows[b], name, b);
    }
    const int64_t shape[4] = { x->shape[0], most, x->shape[2], x->shape[3] };
    mn_tensor *all = mn_tape_input(tape, rows->data[0], NULL, shape);
    if (all) all->rows = rows;
    return all;
}

const mn_state_piece *mn_state_extend(mn_layer_state *state, mn_tape *tape, const char *name,
                                      int64_t width, int64_t most) {
    if (mn_tape_status(tape) != MN_OK) return NULL;
    state->device = device_of(tape);
    mn_state_piece *piece = find_or_add(state, name);
    if (piece && !piece->now) {
        piece->dtype = mn_tape_dtype(tape);
        piece->B = 1;
        piece->width = width;
    }
    if (!piece || piece->B != 1 || piece->width != width || piece->dtype != mn_tape_dtype(tape)) {
        mn_tape_fail(tape, mn_fail(MN_ERR_ARGUMENT, "the cache %s belongs to another model or "
                                   "batch", name));
        return NULL;
    }
    piece->most = most;
    if (most && piece->length >= most) {
        mn_tape_fail(tape, mn_fail(MN_ERR_ARGUMENT, "the cache %s has %lld tokens, which is all "
                                   "that its layer takes", name, (long long)piece->length));
        return NULL;
    }
    if (piece->length == piece->capacity) {
        mn_tape_flush(tape);    // what waits may read the cache where it is
        const int64_t more = piece->length / ROOM * ROOM + ROOM;
        const mn_status st = grow(state, piece, most ? mn_min(more, most) : more);
        if (st != MN_OK) mn_tape_fail(tape, st);
        if (st != MN_OK) return NULL;
    }
    piece->length++;
    piece->count = piece->length * width;
    mn_tape_declare(tape, piece->now, (size_t)(piece->capacity * width) * item_of(piece));
    return piece;
}

bool mn_layer_state_has_room(const mn_layer_state *state) {
    bool room = true;
    for (int i = 0; i < state->n_pieces; i++) {
        const mn_state_piece *piece = &state->pieces[i];
        room = room && (!piece->width || piece->length < piece->capacity) &&
               (!piece->most || piece->length < piece->most);
    }
    return room;
}

void mn_layer_state_count(mn_layer_state *state, int64_t tokens) {
    for (int i = 0; i < state->n_pieces; i++) {
        mn_state_piece *piece = &state->pieces[i];
        if (!piece->width) continue;
        piece->length += tokens;
        piece->count = piece->B * piece->length * piece->width;
    }
}

uint64_t mn_layer_state_place(const mn_layer_state *state) {
    uint64_t place = 0;
    for (int i = 0; i < state->n_pieces; i++) {
        place = (place ^ (uint64_t)(uintptr_t)state->pieces[i].now) * UINT64_C(0x100000001b3);
    }
    return place;
}

mn_tensor *mn_state_append(mn_layer_state *state, mn_tape *tape, mn_tensor *x, const char *name) {
    if (x && mn_tape_plans(tape)) {
        const int64_t width = x->shape[2] * x->shape[3];
        note(state, tape, name, x->shape[0] * x->shape[1] * width, width);
    }
    if (!state || !x || mn_tape_status(tape) != MN_OK || mn_tape_plans(tape)) return x;
    mn_tape_flush(tape);    // x is copied by the device itself
    if (state->rows) return append_rows(state, tape, x, name);
    const mn_state_piece *piece = extend(state, tape, x, name);
    if (!piece) return NULL;
    const int64_t shape[4] = { x->shape[0], piece->length, x->shape[2], x->shape[3] };
    mn_tensor *all = mn_tape_input(tape, piece->now, NULL, shape);
    if (all) all->stride[0] = piece->capacity * piece->width;
    return all;
}
