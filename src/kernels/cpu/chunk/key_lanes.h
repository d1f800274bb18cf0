/* key_lanes.h - sums over query rows that end up on keys, in a fixed order and yet in parallel.
 *
 * Gradients of keys and values are sums over all later queries. The blocks of queries of a sequence
 * are dealt to a few lanes, block i to lane i mod lanes; each lane adds up its blocks in their
 * order, and a last phase adds the lanes. Early blocks see few keys and late ones many, so dealing
 * also evens out the work. Lane 0 adds into the result itself; the others need memory of its size,
 * so long sequences have fewer. */
#ifndef MN_KERNELS_CPU_CHUNK_KEY_LANES_H
#define MN_KERNELS_CPU_CHUNK_KEY_LANES_H

#include "base/util.h"
#include "kernels/access.h"

enum { MOST_LANES = 4, FEWEST_LANES = 2, LONG_KEYS = 8192 };

/* Lanes of a sequence with n_keys keys whose queries make n_blocks blocks, at least 1. */
static inline int64_t n_lanes(int64_t n_keys, int64_t n_blocks) {
    return mn_max(1, mn_min(n_blocks, n_keys > LONG_KEYS ? FEWEST_LANES : MOST_LANES));
}

/* The most lanes that any sequence of a call has; `length` is the number of keys when not
 * packed. */
static inline int64_t most_lanes(const mn_call *call, int64_t length) {
    if (!call->cu_seqlens) return length > LONG_KEYS ? FEWEST_LANES : MOST_LANES;
    int64_t shortest = LONG_KEYS + 1;
    for (int64_t n = 0; n < call->n_seqs; n++) {
        shortest = mn_min(shortest, call->cu_seqlens[n + 1] - call->cu_seqlens[n]);
    }
    return shortest > LONG_KEYS ? FEWEST_LANES : MOST_LANES;
}

#endif
