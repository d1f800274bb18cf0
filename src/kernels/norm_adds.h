/* norm_adds.h - rms_norm going back on a GPU where the gradient of its input, a residual stream,
 * has arrived by another way already: dx is added to what grad.x holds. */
#ifndef MN_KERNELS_NORM_ADDS_H
#define MN_KERNELS_NORM_ADDS_H

#include "mneme.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The kernel of rms_norm's backward pass but for the sum; `parts` is as large as its plan says.
 * Returns 0 or the cudaError_t of the launch. */
int mn_norm_adds_cuda(const mn_rms_norm_args *args, void *parts, void *stream);

#ifdef __cplusplus
}
#endif
#endif
