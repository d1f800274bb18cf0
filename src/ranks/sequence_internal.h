/* sequence_internal.h - a call of an operator over a sequence in parts, taken apart. Shared by
 * sequence.c and the ways in which states cross ranks that have a file of their own. */
#ifndef MN_RANKS_SEQUENCE_INTERNAL_H
#define MN_RANKS_SEQUENCE_INTERNAL_H

#include <stdlib.h>

#include "base/status.h"
#include "ranks/sequence.h"

enum { CUT_STATES = 8, CUT_KEYED = 2 };

typedef enum cut_law { CUT_PIPELINE, CUT_AFFINE, CUT_MOEBIUS, CUT_TAIL } cut_law;

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

/* The rank's initial states are in memory of their own: runs it forward, or back. */
mn_status mn_cut_forward_pipeline(cut_call *c);
mn_status mn_cut_backward_pipeline(cut_call *c);

/* The same by the maps of all ranks (sequence_moebius.c), or as a pipeline where a rank has
 * none. */
mn_status mn_cut_forward_moebius(cut_call *c);
mn_status mn_cut_backward_moebius(cut_call *c);

#endif
