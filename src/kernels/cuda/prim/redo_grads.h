/* redo_grads.h - gradients of tokens behind a cotangent that is not finite, made again by all
 * kernels of a call (docs/internals/causality.md). For operators whose chunks take in every
 * cotangent at once, in products with zeros.
 *
 * mn_redo_grads_find looks at the gradients of each head's first token, where such a cotangent
 * shows. Where they are not finite it copies the head's cotangents, with zeros up to the last token
 * that has one. The kernels make the gradients of such heads from the copies, into memory of their
 * own, and leave other heads alone. mn_redo_grads_store copies those of the tokens behind. */
#ifndef MN_KERNELS_CUDA_PRIM_REDO_GRADS_H
#define MN_KERNELS_CUDA_PRIM_REDO_GRADS_H

#include "mneme.h"

namespace mneme {

enum { MN_REDO_TENSORS = 8 };

/* A tensor of the call and the redo's own: rows (B T, H, width). */
typedef struct mn_redo_tensor {
    mn_out call, own;
    int64_t width;
} mn_redo_tensor;

typedef struct mn_redo_grads {
    mn_call call;
    int n_cots, n_grads;
    mn_redo_tensor cots[MN_REDO_TENSORS], grads[MN_REDO_TENSORS];
    int *cuts;              // [n * H + h]: tokens whose cotangents are zeros; 0: nothing to do
    const int *aside;       // [n * H + h]: heads that go another way; NULL: none
    int *skips, *takes;     // [n * H + h]: 0, 1 where a head goes again: the one way, the other
    int *zeros;             // counters that become 0
    int64_t n_zeros;
    char *base;             // memory that is not yet taken; NULL: it is only counted
    size_t used;
    bool ok;                // sizes fit
} mn_redo_grads;

/* A redo of `call` with memory from `base` on (NULL: used says how much it takes). */
mn_redo_grads mn_redo_grads_of(const mn_call &call, void *base);

/* Takes memory for a cotangent or a gradient of `width` numbers a token and head, and lets `view`
 * be there; nothing where there is none. */
void mn_redo_grads_cot(mn_redo_grads *redo, mn_in *view, int64_t width);
void mn_redo_grads_grad(mn_redo_grads *redo, mn_out *view, int64_t width);

/* 0 or a cudaError_t; `stream` is a cudaStream_t. */
int mn_redo_grads_find(const mn_redo_grads *redo, void *stream);
int mn_redo_grads_store(const mn_redo_grads *redo, void *stream);

}    // namespace mneme

#endif
