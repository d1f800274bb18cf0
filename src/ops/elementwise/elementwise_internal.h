/* elementwise_internal.h - what the loops of elementwise jobs on the CPU's threads have in common.
 * All views of a job are of one type there, float32 or float64. */
#ifndef MN_OPS_ELEMENTWISE_INTERNAL_H
#define MN_OPS_ELEMENTWISE_INTERNAL_H

#include "base/dtype.h"
#include "base/util.h"
#include "kernels/elementwise.h"
#include "ops/context.h"

/* `backend` is a mn_context; no job needs space. */
#define JOB(id, name, ins, outs, workspace, decode, about)                                         \
    int mn_elementwise_##name##_cpu(void *backend, const void *args, void *space);
#include "kernels/elementwise.def"

/* Runs fn over items on the context's threads. */
static inline int mn_elementwise_items(void *where, int64_t n_items, mn_item_fn fn,
                                       const void *job) {
    mn_threads_run(((mn_context *)where)->threads, n_items, fn, (void *)job);
    return 0;
}

static inline int64_t mn_rows_of(const int64_t shape[4]) {
    return shape[0] * shape[1] * shape[2];
}

/* Elements from the start of a view to row `row` of `shape`. */
static inline int64_t mn_view_row(const mn_view *v, const int64_t shape[4], int64_t row) {
    const int64_t h = row % shape[2], t = row / shape[2] % shape[1];
    return row / shape[2] / shape[1] * v->stride[0] + t * v->stride[1] + h * v->stride[2];
}

/* Rows of views, or, where the numbers of all views lie side by side in the order of the axes,
 * pieces of one row. */
typedef struct mn_pieces {
    const int64_t *shape;
    int64_t rows, count;    // pieces
    bool flat;
} mn_pieces;

enum { MN_PIECE = 4096 };    // numbers of a piece of one row

/* Of n views; absent ones do not count. */
mn_pieces mn_pieces_of(const int64_t shape[4], const mn_view *const views[], int n);

static inline int64_t mn_piece_width(const mn_pieces *p, int64_t item) {
    const int64_t width = p->shape[3];
    return p->flat ? mn_min(MN_PIECE, p->rows * width - item * MN_PIECE) : width;
}

/* Where piece `item` of a view begins; NULL where that is absent. */
static inline void *mn_piece_at(const mn_pieces *p, const mn_view *v, int64_t item) {
    if (!v->data) return NULL;
    const int64_t to = p->flat ? item * MN_PIECE : mn_view_row(v, p->shape, item);
    return (char *)v->data + to * (int64_t)mn_dtype_bytes(v->dtype);
}

#endif
