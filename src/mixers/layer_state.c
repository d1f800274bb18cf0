/* layer_state.c - named pieces of a layer's memory: recurrent states in two buffers, caches in one
 * that doubles. */
#include "mixers/layer_state.h"

#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "base/dtype.h"
#include "base/status.h"
#include "base/util.h"

void mn_layer_state_free(mn_layer_state *state) {
    for (int i = 0; i < state->n_pieces; i++) {
        free(state->pieces[i].now);
        free(state->pieces[i].next);
    }
    memset(state, 0, sizeof *state);
}

static size_t item_of(const mn_layer_state *state) {
    return mn_dtype_bytes(state->dtype);
}

size_t mn_layer_state_bytes(const mn_layer_state *state) {
    size_t bytes = 0;
    for (int i = 0; i < state->n_pieces; i++) {
        bytes += (size_t)state->pieces[i].count * item_of(state);
    }
    return bytes;
}

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

static void *numbers(int64_t count, size_t item) {
    size_t bytes;
    if (count < 0 || !mn_mul_size(&bytes, (size_t)count, item) ||
        !mn_add_size(&bytes, bytes, MN_ALIGN)) {
        return NULL;
    }
    return aligned_alloc(MN_ALIGN, bytes / MN_ALIGN * MN_ALIGN);
}

static mn_status no_memory(const char *name, int64_t count) {
    return mn_fail(MN_ERR_MEMORY, "no memory for a state %s of %lld numbers", name,
                   (long long)count);
}

mn_status mn_state_put(mn_layer_state *state, const char *name, const void *from, int64_t count,
                       int64_t B, int64_t length, int64_t width) {
    mn_state_piece *piece = find_or_add(state, name);
    void *memory = piece ? numbers(count, item_of(state)) : NULL;
    if (!memory) return no_memory(name, count);
    memcpy(memory, from, (size_t)count * item_of(state));
    free(piece->now);
    free(piece->next);
    piece->now = memory;
    piece->next = NULL;
    piece->count = count;
    piece->B = B;
    piece->length = piece->capacity = length;
    piece->width = width;
    return MN_OK;
}

/* Rows of a cache lie `capacity` apart; a copy has no room to spare. */
static mn_status copy_piece(mn_layer_state *to, const mn_state_piece *from, size_t item) {
    if (from->width == 0) return mn_state_put(to, from->name, from->now, from->count, 0, 0, 0);
    const size_t row = (size_t)from->width * item;
    char *packed = numbers(from->count, item);
    if (!packed) return no_memory(from->name, from->count);
    for (int64_t b = 0; b < from->B; b++) {
        memcpy(packed + (size_t)(b * from->length) * row,
               (char *)from->now + (size_t)(b * from->capacity) * row,
               (size_t)from->length * row);
    }
    const mn_status st = mn_state_put(to, from->name, packed, from->count, from->B, from->length,
                                      from->width);
    free(packed);
    return st;
}

mn_status mn_layer_state_copy(mn_layer_state *to, const mn_layer_state *from) {
    memset(to, 0, sizeof *to);
    to->dtype = from->dtype;
    mn_status st = MN_OK;
    for (int i = 0; i < from->n_pieces && st == MN_OK; i++) {
        st = copy_piece(to, &from->pieces[i], item_of(from));
    }
    if (st != MN_OK) mn_layer_state_free(to);
    return st;
}

/* ---- recurrent states ------------------------------------------------------------------------ */

void mn_state_bind(mn_layer_state *state, mn_run *run, const char *in, const char *out,
                   const char *name, int64_t count) {
    mn_tape *tape = run->tape;
    if (!state || mn_tape_status(tape) != MN_OK || mn_tape_plans(tape)) return;
    state->dtype = mn_tape_dtype(tape);
    mn_state_piece *piece = find_or_add(state, name);
    if (!piece || (piece->now && (piece->count != count || piece->width))) {
        mn_tape_fail(tape, mn_fail(MN_ERR_ARGUMENT, "a state %s of %lld numbers where the model "
                                   "has %lld: it belongs to another model or batch", name,
                                   piece ? (long long)piece->count : 0, (long long)count));
        return;
    }
    const bool fresh = !piece->now, in_place = run->call->T == 1 && !fresh;
    if (!in_place && !piece->next) piece->next = numbers(count, item_of(state));
    if (!in_place && !piece->next) {
        mn_tape_fail(tape, no_memory(name, count));
        return;
    }
    if (!fresh) mn_run_in_at(run, in, piece->now);
    if (!in_place) {
        void *before = piece->now;
        piece->now = piece->next;
        piece->next = before;
    }
    mn_run_out_at(run, out, piece->now);
    piece->count = count;
}

/* ---- caches ---------------------------------------------------------------------------------- */

/* Makes room for `length` tokens in each of B rows. */
static mn_status grow(mn_layer_state *state, mn_state_piece *piece, int64_t length) {
    if (length <= piece->capacity) return MN_OK;
    const int64_t capacity = mn_max(length, 2 * piece->capacity);
    const size_t row = (size_t)piece->width * item_of(state);
    int64_t count;
    if (!mn_mul_i64(&count, piece->B * piece->width, capacity)) count = -1;
    char *memory = numbers(count, item_of(state));
    if (!memory) return no_memory(piece->name, count);
    for (int64_t b = 0; b < piece->B && piece->length; b++) {
        memcpy(memory + (size_t)(b * capacity) * row,
               (char *)piece->now + (size_t)(b * piece->capacity) * row,
               (size_t)piece->length * row);
    }
    free(piece->now);
    piece->now = memory;
    piece->capacity = capacity;
    return MN_OK;
}

mn_tensor *mn_state_append(mn_layer_state *state, mn_tape *tape, mn_tensor *x, const char *name) {
    if (!state || !x || mn_tape_status(tape) != MN_OK || mn_tape_plans(tape)) return x;
    state->dtype = mn_tape_dtype(tape);
    const int64_t B = x->shape[0], T = x->shape[1], width = x->shape[2] * x->shape[3];
    mn_state_piece *piece = find_or_add(state, name);
    if (piece && !piece->now) {
        piece->B = B;
        piece->width = width;
    }
    if (!piece || piece->B != B || piece->width != width || x->stride[2] != x->shape[3]) {
        return mn_tape_fail(tape, mn_fail(MN_ERR_ARGUMENT, "the cache %s belongs to another model "
                                          "or batch", name));
    }
    const mn_status st = grow(state, piece, piece->length + T);
    if (st != MN_OK) return mn_tape_fail(tape, st);
    const size_t item = item_of(state);
    for (int64_t b = 0; b < B; b++) {
        for (int64_t t = 0; t < T; t++) {
            memcpy((char *)piece->now +
                       (size_t)((b * piece->capacity + piece->length + t) * width) * item,
                   (char *)x->data + (size_t)(b * x->stride[0] + t * x->stride[1]) * item,
                   (size_t)width * item);
        }
    }
    piece->length += T;
    piece->count = B * piece->length * width;
    const int64_t shape[4] = { B, piece->length, x->shape[2], x->shape[3] };
    mn_tensor *all = mn_tape_input(tape, piece->now, NULL, shape);
    if (all) all->stride[0] = piece->capacity * width;
    return all;
}
