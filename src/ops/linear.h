/* linear.h - y = x W' + b over rows, or its sigmoid: the projections inside composed operators.
 *
 * Weights are (out, in) as linear layers store them. A row's bits depend on that row alone; sums
 * over rows (the gradients of W and b) are the same at any number of threads. */
#ifndef MN_OPS_LINEAR_H
#define MN_OPS_LINEAR_H

#include "ops/context.h"

typedef struct mn_linear {
    mn_dtype dtype;
    int64_t n_rows, n_in, n_out;
    const void *x;               // (n_rows, n_in)
    const void *weight, *bias;   // (n_out, n_in); (n_out) or NULL
    bool sigmoid;
} mn_linear;

/* On a context with a device the work is put on its stream, and only there it can fail. */
mn_status mn_linear_forward(mn_context *context, const mn_linear *p, void *y);

/* Adds nothing where a pointer is NULL. `y` is the result of forward, needed with sigmoid only;
 * `dy` becomes the cotangent of x W' + b. dx is written, or added to when `add`. */
mn_status mn_linear_backward(mn_context *context, const mn_linear *p, const void *y, void *dy,
                             void *dweight, void *dbias, void *dx, bool add);

#endif
