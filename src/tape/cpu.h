/* cpu.h - works of a tape (kernels/elementwise.h) as loops on the threads of a context. All
 * views of a work are of one type there, float32 or float64. */
#ifndef MN_TAPE_CPU_H
#define MN_TAPE_CPU_H

#include "kernels/elementwise.h"
#include "ops/context.h"

/* `where` is a mn_context; no work needs space. */
#define WORK(id, name, space)                                                                      \
    int mn_elementwise_##name##_cpu(void *backend, const void *args, void *workspace);
#include "kernels/elementwise.def"
#undef WORK

const mn_elementwise_fn *mn_elementwise_cpu(void);

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

/* Whether the view's numbers are side by side, in the order of the axes. */
bool mn_view_is_flat(const mn_view *v, const int64_t shape[4]);

#endif
