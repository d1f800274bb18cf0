/* state.h - what a layer remembers between passes: named pieces of memory.
 *
 * Recurrent kinds keep pieces of constant size, caches grow. A piece appears when the layer first
 * writes it; before that the layer starts from its prior. */
#ifndef MN_LAYERS_STATE_H
#define MN_LAYERS_STATE_H

#include "tape/tape.h"
#include "runtime/device.h"

enum { MN_STATE_PIECES = 16, MN_STATE_NAME = 16 };

typedef struct mn_state_piece {
    char name[MN_STATE_NAME];
    mn_dtype dtype;            // of its numbers: on a GPU caches have the type of activations
    int64_t count;             // numbers in use
    void *now, *next;          // the state, and memory for the one after it
    /* caches: (B, capacity, width) with the first `length` tokens written */
    int64_t length, capacity, width, B;
    int64_t most;              // tokens that steps which repeat may put there; 0: any number
    void *steps;               // what it was after each step of the last pass of steps, in memory
                               //   of that pass; and tokens of a cache before
    int64_t before;
} mn_state_piece;

/* Of a pass whose states have gradients: what a piece is before it, NULL where it is fresh, and the
 * callback that takes what it is afterwards. */
typedef struct mn_state_ends {
    mn_tensor *(*before)(void *context, const char *name);
    void (*after)(void *context, const char *name, mn_tensor *x);
    void *context;
} mn_state_ends;

/* All zeros is a fresh state, of the host. */
typedef struct mn_layer_state {
    mn_device *device;         // whose memory the pieces are in; NULL: the host's
    bool by_position;          // the host does something else at each position: turns, caches
    bool reads_position;       // operators read it when they run
    int n_pieces;
    mn_state_piece pieces[MN_STATE_PIECES];
    /* Of a batch on the CPU, which has no pieces: borrowed states of its sequences, and how many
     * tokens each has read. */
    struct mn_layer_state **rows;
    const int64_t *positions;
    const int64_t *starts;     // B = 1: sequence b is tokens [starts[b], starts[b+1]); NULL: row b
    int64_t n_rows;
    bool counts;               // a plan notes the sizes of pieces here, which get no memory
    bool steps;                // the rows are one state: steps one after the other
    const mn_state_ends *ends; // tensors in place of pieces; NULL: pieces
} mn_layer_state;

void mn_layer_state_free(mn_layer_state *state);    // becomes fresh

/* A deep copy where it is. On failure `*to` is fresh. */
mn_status mn_layer_state_copy(mn_layer_state *to, const mn_layer_state *from);

/* A copy in the host's memory of what is on a GPU, in float32, and the other way: recurrent states
 * stay float32 there, caches get `dtype`. On failure `*to` is fresh. */
mn_status mn_layer_state_fetch(mn_layer_state *to, const mn_layer_state *from);
mn_status mn_layer_state_send(mn_layer_state *to, const mn_layer_state *from, mn_device *device,
                              mn_dtype dtype);

size_t mn_layer_state_bytes(const mn_layer_state *state);

/* The piece called `name`, NULL if it was never written. */
mn_state_piece *mn_state_find(mn_layer_state *state, const char *name);

/* Makes (or replaces) a piece of a state of the host from `count` numbers, as loaded from a file;
 * caches with B, length and width, others with zeros there. */
mn_status mn_state_put(mn_layer_state *state, const char *name, mn_dtype dtype,
                       const void *numbers, int64_t count, int64_t B, int64_t length,
                       int64_t width);

/* Of steps that are recorded and launched again: whether all caches have room for another token;
 * that they have one more, or with -1 one less, than before; and a number that changes when a piece
 * lies elsewhere. */
bool mn_layer_state_has_room(const mn_layer_state *state);
void mn_layer_state_count(mn_layer_state *state, int64_t tokens);
uint64_t mn_layer_state_place(const mn_layer_state *state);

/* After a pass of steps, as long as its tape has not begun another: the state as it was after the
 * first `count` of them. */
void mn_layer_state_back(mn_layer_state *state, int64_t count);

/* ---- slots -----------------------------------------------------------------------------------
 *
 * Sequences of a batch on a GPU keep their states side by side, (slots, ...), in a state of the
 * batch: operators then take all of them in one launch. A sequence's pieces are views of its slot
 * for as long as it has one. */

/* Whether it can have a slot: all pieces have been written, and are those of the slots. */
bool mn_layer_state_fits_slot(const mn_layer_state *slots, const mn_layer_state *state);

/* The slots have moved: pieces that are views become views of where their slot is now. */
void mn_layer_state_view_slot(const mn_layer_state *slots, mn_layer_state *state, int64_t slot);

/* Copies the pieces to a slot and makes them views of it; `lent`: they were views of another one.
 * From there back to memory of their own; after a failure they are lost, NULL. Or left there. */
mn_status mn_layer_state_to_slot(const mn_layer_state *slots, mn_layer_state *state, bool lent,
                                 int64_t slot);
mn_status mn_layer_state_from_slot(mn_layer_state *state);
void mn_layer_state_leave_slot(mn_layer_state *state);

/* ---- for layers ------------------------------------------------------------------------------ */

/* Sets `slot`, a number of the operator at hand, to the tokens of the sequence before this pass:
 * `position`, or for a batch those of each sequence. */
void mn_state_position(mn_layer_state *state, mn_run *run, int64_t *slot, int64_t position);

/* The same for an operator that may read counts of tokens when it runs: on a tape that goes by
 * position `counts` is set instead. */
void mn_state_count(mn_layer_state *state, mn_run *run, int64_t *slot, const int64_t **counts,
                    int64_t position);

/* Before an operator takes what mn_state_append gave: that a batch runs it sequence by sequence. */
void mn_state_rows(const mn_layer_state *state, mn_run *run);

/* Binds an operator's initial and final state to the piece `name` of `count` numbers. With T = 1
 * the piece is updated in place. `state` NULL: binds nothing. A fresh piece leaves the initial
 * state absent. Call before mn_run_now. */
void mn_state_bind(mn_layer_state *state, mn_run *run, const char *in, const char *out,
                   const char *name, int64_t count);

/* Of a step that goes by a position which is read when it runs (mn_tape_set_position): room for one
 * more token of `width` numbers behind the cache `name`, which counts it and is declared; the
 * operation that is given the cache writes it there. `most`: tokens that the operation can take, 0:
 * any number; there is no room for more. NULL after a failure. */
const mn_state_piece *mn_state_extend(mn_layer_state *state, mn_tape *tape, const char *name,
                                      int64_t width, int64_t most);

/* Appends (B,T,H,X) to the cache `name` and returns all tokens, (B,L,H,X), without gradient; `x`
 * itself when state is NULL. */
mn_tensor *mn_state_append(mn_layer_state *state, mn_tape *tape, mn_tensor *x, const char *name);

#endif
