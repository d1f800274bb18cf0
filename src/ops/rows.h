/* rows.h - elementwise work over the rows of (B,T,H,X) views, for composed operators. */
#ifndef MN_OPS_ROWS_H
#define MN_OPS_ROWS_H

#include "ops/context.h"

/* y = a b, or y += a b when `add`; rows of `width`, sizes and type from `call`. Views carry their
 * strides; y may be a or b. */
void mn_rows_multiply(mn_context *context, const mn_call *call, int64_t width, mn_out y, mn_in a,
                      mn_in b, bool add);

/* y += a over the same rows. */
void mn_rows_add(mn_context *context, const mn_call *call, int64_t width, mn_out y, mn_in a);

/* A contiguous temporary (B,T,H,width) from the context's arena; data is NULL when memory is out.
 */
mn_out mn_rows_temporary(mn_context *context, const mn_call *call, int64_t width);

/* The same view, to read. */
static inline mn_in mn_as_input(mn_out view) {
    return (mn_in){ view.data, { view.stride[0], view.stride[1], view.stride[2] } };
}

#endif
