/* rows.h - elementwise work over the rows of (B,T,H,X) views, for composed operators. */
#ifndef MN_OPS_ROWS_H
#define MN_OPS_ROWS_H

#include "kernels/elementwise.h"
#include "ops/context.h"

/* y = a b, or y += a b when `add`; rows of `width`, sizes and type from `call`. Views carry their
 * strides; y may be a or b. Nothing happens where a view is absent. */
mn_status mn_rows_multiply(mn_context *context, const mn_call *call, int64_t width, mn_out y,
                           mn_in a, mn_in b, bool add);

/* y = a over the same rows. */
mn_status mn_rows_copy(mn_context *context, const mn_call *call, int64_t width, mn_out y, mn_in a);

/* Head h of y is the sum of heads h times .. (h + 1) times - 1 of `a`, in their order; sums are
 * float32 at least and rounded once. H of `call` is that of y. */
mn_status mn_rows_fold(mn_context *context, const mn_call *call, int64_t width, int64_t times,
                       mn_out y, mn_in a);

/* A fused function (elementwise.def) with one result over the same rows. */
mn_status mn_rows_fused(mn_context *context, mn_fused_kind f, const mn_call *call, int64_t width,
                        mn_out x, mn_in a, mn_in b, mn_in c);

/* sum (H,width) = terms of a, b and c over all tokens. */
mn_status mn_rows_token_sum(mn_context *context, mn_token_sum_kind f, const mn_call *call,
                            int64_t width, mn_out sum, mn_in a, mn_in b, mn_in c);

/* x = a, where x (or else a) is float32 and the other one of the call's type; of contexts with a
 * device only. */
mn_status mn_rows_convert(mn_context *context, const mn_call *call, int64_t width, mn_out x,
                          mn_in a, bool widen);

/* A contiguous temporary (B,T,H,width) of workspace.h; data is NULL when memory is out. */
mn_out mn_rows_temporary(mn_context *context, const mn_call *call, int64_t width);

/* The same view, to read. */
static inline mn_in mn_as_input(mn_out view) {
    return (mn_in){ view.data, { view.stride[0], view.stride[1], view.stride[2] } };
}

#endif
