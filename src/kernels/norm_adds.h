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

/* dw NULL: to grad.w as usual. adds_x is for rms_norm only. */
typedef struct mn_norm_adds {
    float *dw;
    bool adds_x, adds_w;
} mn_norm_adds;

/* The kernels of the backward passes but for that; `parts` is as large as their plans say. Return 0
 * or the cudaError_t of the launch. */
int mn_norm_adds_cuda(const mn_rms_norm_args *args, mn_norm_adds to, void *parts, void *stream);
int mn_norm_gated_adds_cuda(const mn_rms_norm_gated_args *args, mn_norm_adds to, void *parts,
                            void *stream);

#ifdef __cplusplus
}
#endif
#endif
