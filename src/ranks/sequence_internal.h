/* sequence_internal.h - a call of an operator over a sequence in parts, taken apart. Shared by
 * sequence.c and the ways in which states cross ranks that have a file of their own. */
#ifndef MN_RANKS_SEQUENCE_INTERNAL_H
#define MN_RANKS_SEQUENCE_INTERNAL_H

#include <stdlib.h>

#include "base/status.h"
#include "ranks/sequence.h"

enum { CUT_STATES = 8, CUT_KEYED = 2 };

typedef enum cut_law { CUT_PIPELINE, CUT_AFFINE, CUT_MOEBIUS, CUT_DIAGONAL, CUT_TAIL } cut_law;

/* An initial state and the final one that follows from it. */
typedef struct cut_state {
    const mn_field *in, *out, *sum;    // sum: what takes the cotangent where `out` has none
    size_t bytes;
} cut_state;

/* A call taken apart. */
typedef struct cut_call {
    const mn_sequence *s;
    mn_op_id op;
    unsigned char *args;
    mn_call *sizes;
    int rank, world;
    size_t item;
    cut_law law;
    mn_device *device;                 // NULL: the host
    cut_state states[CUT_STATES];
    int n_states;
    const mn_field *keys[CUT_KEYED];       // fields with axes BL.. of what is gathered
    int n_keys;
} cut_call;

static inline mn_in *cut_in(const cut_call *c, const mn_field *f) {
    return (mn_in *)(c->args + f->offset);
}

static inline mn_in *cut_partner(const cut_call *c, const mn_field *f) {
    return (mn_in *)(c->args + f->partner);
}

/* Zeros in the host's memory, which free() gives back; NULL after a failure of its own. */
static inline void *cut_zeros(size_t bytes) {
    void *memory = calloc(1, bytes ? bytes : 1);
    if (!memory) mn_fail(MN_ERR_MEMORY, "no memory for %zu bytes of states", bytes);
    return memory;
}

/* ---- parts of a call, shared by the files of this folder ------------------------------------- */

int64_t mn_cut_count(const cut_call *c, const char *axes);    // numbers of a tensor
mn_status mn_cut_run(const cut_call *c, mn_pass pass, const void *args);
mn_status mn_cut_exchange(const cut_call *c, const mn_transfer *t, int n);
void mn_cut_set_positions(const cut_call *c, int64_t before);
void mn_cut_add(const cut_call *c, void *a, const void *b, int64_t n);    // a += b

/* Final states that the caller does not ask for get memory for the length of a call. */
mn_status mn_cut_lend_finals(cut_call *c, void **lent);
void mn_cut_return_finals(cut_call *c, void **lent);

/* The field whose partner takes the cotangent of a final state; NULL: it has none. */
const mn_field *mn_cut_taker(const cut_state *of);

/* Makes the gradient of an initial state the cotangent of what it was on the rank before. */
void mn_cut_scale_sums(const cut_call *c, const cut_state *of, void *gradient);

/* Affine maps, (K,K) for every sequence and head: what the call's tokens do to a state, and
 * out = a b + out, or a' b + out. */
size_t mn_cut_map_bytes(const cut_call *c);
mn_status mn_cut_find_map(const cut_call *c, void *map);
void mn_cut_apply_map(const cut_call *c, void *out, const void *a, const void *b, bool transposed);

/* ---- packed sequences (sequence_packed.c) ---------------------------------------------------- */

/* The rank's part of a row: `head` is the rest, or more, of a sequence that began on a rank before,
 * `fresh` are those that begin here. Both are calls of their own over parts of the tensors. */
typedef struct cut_row {
    cut_call head, fresh;
    unsigned char head_args[MN_MAX_ARGS_BYTES], fresh_args[MN_MAX_ARGS_BYTES];
    bool has_head, has_fresh;
    bool through;              // the head is all of the part and goes on behind it
    bool goes_on;              // the last sequence of the part has tokens on the next rank
    int64_t before;            // tokens of the head's sequence on earlier ranks
    int64_t first, last;       // sequences of the rank
    void *start[CUT_STATES];   // the head's initial states
} cut_row;

typedef struct cut_packed {
    cut_call c;                // over all of the rank's tokens, with args of its own
    unsigned char args[MN_MAX_ARGS_BYTES];
    cut_row *rows;
    int64_t n_rows, length;    // tokens of a row on a rank
    size_t each[CUT_STATES];   // bytes of a sequence's states
    int64_t *starts;
    mn_transfer *transfers;
    void *cotangent[CUT_STATES];
    bool ran;                  // backward: gradients of what sequences share hold something
} cut_packed;

mn_status mn_cut_forward_packed(cut_call *c, bool plan);
mn_status mn_cut_backward_packed(cut_call *c);

/* Final state i of a sequence of the rank. */
void *mn_cut_final(const cut_packed *p, int i, int64_t sequence);

/* Forward, or back with gradients of what sequences share added up. */
mn_status mn_cut_run_fresh(cut_packed *p, cut_row *row, mn_pass pass);
mn_status mn_cut_run_head(cut_packed *p, cut_row *row, mn_pass pass);

/* Rows of kla by their maps; *done is false where a rank has none, and nothing was run that may not
 * run once more. */
mn_status mn_cut_packed_moebius_forward(cut_packed *p, bool *done);
mn_status mn_cut_packed_moebius_backward(cut_packed *p, bool *done);

/* ---- ways across ----------------------------------------------------------------------------- */

/* The rank's initial states are in memory of their own: runs it forward, or back. */
mn_status mn_cut_forward_pipeline(cut_call *c);
mn_status mn_cut_backward_pipeline(cut_call *c);

/* The same by the maps of all ranks (sequence_moebius.c), or as a pipeline where a rank has
 * none. */
mn_status mn_cut_forward_moebius(cut_call *c);
mn_status mn_cut_backward_moebius(cut_call *c);

/* The same of Palimpsa's states, which are affine with one decay a head (sequence_diagonal.c). */
mn_status mn_cut_forward_diagonal(cut_call *c);
mn_status mn_cut_backward_diagonal(cut_call *c);

/* Keys and values between GPUs (sequence_keys_device.c). */
mn_status mn_cut_forward_keys_device(cut_call *c);
mn_status mn_cut_backward_keys_device(cut_call *c);

#endif
