/* norm_adds.h - norms going back on a GPU to where a tape wants their gradients: dx added to what
 * grad.x holds, as where that of a residual stream has arrived by another way already, and dw as
 * float32, whatever w is. */
#ifndef MN_KERNELS_NORM_ADDS_H
#define MN_KERNELS_NORM_ADDS_H

#include <stdbool.h>

#include "mneme.h"

#ifdef __cplusplus
extern "C" {
#endif

/* dw NULL: to grad.w as usual. accumulate_x is for rms_norm only. */
typedef struct mn_norm_accumulate {
    float *dw;
    bool accumulate_x, accumulate_w;
} mn_norm_accumulate;

/* The kernels of the backward passes but for that; `partials` is as large as their plans say.
 * Return 0 or the cudaError_t of the launch. */
int mn_norm_accumulate_cuda(const mn_rms_norm_args *args, mn_norm_accumulate to, void *partials,
                            void *stream);
int mn_norm_gated_accumulate_cuda(const mn_rms_norm_gated_args *args, mn_norm_accumulate to,
                                  void *partials, void *stream);

#ifdef __cplusplus
}
#endif
#endif
