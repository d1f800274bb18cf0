/* conv_unit.h - conv_unit on a GPU by kernels of its own where heads and views suit them: the
 * convolution and the lengths of its heads in one pass over memory. */
#ifndef MN_KERNELS_CONV_UNIT_H
#define MN_KERNELS_CONV_UNIT_H

#include "kernels/kernel.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The kernel for a call of conv_unit whose views are complete; NULL where there is none: it takes
 * four taps, and heads of at most 32 whole packs of 16 bytes, aligned and side by side. Looks at
 * sizes, strides and addresses only. */
const mn_kernel *mn_conv_unit_kernel(mn_pass pass, const void *args);

#ifdef __cplusplus
}
#endif
#endif
