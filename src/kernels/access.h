/* access.h - how kernels find rows and sequences inside the views of a call. */
#ifndef MN_KERNELS_ACCESS_H
#define MN_KERNELS_ACCESS_H

#include "mneme.h"

/* Offset in elements of row (b, t, h) of a view; works for (B,T,H,X), (N,H,X), (H,X) alike because
 * the strides of absent axes are zero. */
#define MN_OFFSET(view, b, t, h)                                                                   \
    ((b) * (view).stride[0] + (t) * (view).stride[1] + (h) * (view).stride[2])

/* Pointers to row (b, t, h); NULL when the view is absent. `type` is the storage type. */
#define MN_ROW(type, view, b, t, h)                                                                \
    ((view).data ? (const type *)(view).data + MN_OFFSET(view, b, t, h) : NULL)
#define MN_ROW_OUT(type, view, b, t, h)                                                            \
    ((view).data ? (type *)(view).data + MN_OFFSET(view, b, t, h) : NULL)

/* The query and key head that value head h uses. */
static inline int64_t mn_key_head(const mn_call *call, int64_t h) {
    return call->J == call->H ? h : h * call->J / call->H;
}

/* One sequence of a call: tokens [t0, t0 + length) of batch row b; its states are row n. */
typedef struct mn_sequence {
    int64_t b, t0, length;
} mn_sequence;

static inline int64_t mn_n_sequences(const mn_call *call) {
    return call->cu_seqlens ? call->n_seqs : call->B;
}

static inline mn_sequence mn_sequence_at(const mn_call *call, int64_t n) {
    if (!call->cu_seqlens) return (mn_sequence){ n, 0, call->T };
    const int64_t t0 = call->cu_seqlens[n];
    return (mn_sequence){ 0, t0, call->cu_seqlens[n + 1] - t0 };
}

/* Tokens of the longest sequence. */
static inline int64_t mn_longest_sequence(const mn_call *call) {
    if (!call->cu_seqlens) return call->T;
    int64_t longest = 0;
    for (int64_t n = 0; n < call->n_seqs; n++) {
        const int64_t length = call->cu_seqlens[n + 1] - call->cu_seqlens[n];
        if (length > longest) longest = length;
    }
    return longest;
}

#endif
