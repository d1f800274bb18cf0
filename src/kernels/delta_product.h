/* delta_product.h - one token of delta_product on a GPU, all of its steps in one pass over the
 * state. */
#ifndef MN_KERNELS_DELTA_PRODUCT_H
#define MN_KERNELS_DELTA_PRODUCT_H

#include "kernels/kernel.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The kernel for a call of delta_product whose views are complete; NULL where there is none: it
 * takes one token of unpacked sequences with the state in place, at most four steps, and widths and
 * views of whole packs. Looks at sizes, strides and addresses only. */
const mn_kernel *mn_delta_product_kernel(mn_pass pass, const void *args);

#ifdef __cplusplus
}
#endif
#endif
