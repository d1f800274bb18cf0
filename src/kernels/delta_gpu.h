/* delta_gpu.h - what delta's kernels of GPUs do that otherwise is made of several launches: a token
 * of delta_product, and sums of gradients over value heads that share a query and key head. */
#ifndef MN_KERNELS_DELTA_GPU_H
#define MN_KERNELS_DELTA_GPU_H

#include "kernels/kernel.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The kernel for a call of delta_product whose views are complete; NULL where there is none: it
 * takes one token of unpacked sequences with the state in place, at most four steps, and widths and
 * views of whole packs. Looks at sizes, strides and addresses only. */
const mn_kernel *mn_delta_product_kernel(mn_pass pass, const void *args);

/* Whether the backward pass of this call of delta writes gradients of its J query and key heads
 * itself. Looks at sizes only. */
bool mn_delta_folds_groups(const void *args);

#ifdef __cplusplus
}
#endif
#endif
