/* rows.c - elementwise work over the rows of (B,T,H,X) views, for composed operators. */
#include "ops/rows.h"

#include "base/checked.h"
#include "base/dtype.h"
#include "ops/elementwise/elementwise.h"
#include "ops/workspace.h"

mn_status mn_rows_fused(mn_context *context, mn_fused_kind f, const mn_call *call, int64_t width,
                        mn_out x, mn_in a, mn_in b, mn_in c) {
    const mn_dtype dtype = call->dtype;
    const mn_fused_params job = {
        .f = f, .shape = { call->B, call->T, call->H, width },
        .in = { mn_view_of(a.data, a.stride, dtype), mn_view_of(b.data, b.stride, dtype),
                mn_view_of(c.data, c.stride, dtype) },
        .out = { mn_view_of(x.data, x.stride, dtype) },
    };
    return x.data ? mn_elementwise_run(context, MN_ELEMENTWISE_FUSED, &job) : MN_OK;
}

mn_status mn_rows_token_sum(mn_context *context, mn_token_sum_kind f, const mn_call *call,
                            int64_t width, mn_out sum, mn_in a, mn_in b, mn_in c) {
    const mn_dtype dtype = call->dtype;
    const mn_token_sum_params job = {
        .f = f, .shape = { call->B, call->T, call->H, width },
        .in = { mn_view_of(a.data, a.stride, dtype), mn_view_of(b.data, b.stride, dtype),
                mn_view_of(c.data, c.stride, dtype) },
        .sum = mn_view_of(sum.data, sum.stride, dtype),
    };
    return sum.data ? mn_elementwise_run(context, MN_ELEMENTWISE_TOKEN_SUM, &job) : MN_OK;
}

/* y, one head for `times` heads of `a` that are added up, = a. */
static mn_status move(mn_context *context, const mn_call *call, int64_t width, int64_t times,
                      mn_view y, mn_view a) {
    const mn_move_params job = { .shape = { call->B, call->T, call->H, width }, .to = y, .from = a,
                                 .times = times, .folds = times > 1 };
    if (!y.data || !a.data) return MN_OK;
    return mn_elementwise_run(context, MN_ELEMENTWISE_MOVE, &job);
}

mn_status mn_rows_convert(mn_context *context, const mn_call *call, int64_t width, mn_out x,
                          mn_in a, bool widen) {
    return move(context, call, width, 1,
                mn_view_of(x.data, x.stride, widen ? MN_F32 : call->dtype),
                mn_view_of(a.data, a.stride, widen ? call->dtype : MN_F32));
}

mn_status mn_rows_copy(mn_context *context, const mn_call *call, int64_t width, mn_out y, mn_in a) {
    return mn_rows_fold(context, call, width, 1, y, a);
}

mn_status mn_rows_fold(mn_context *context, const mn_call *call, int64_t width, int64_t times,
                       mn_out y, mn_in a) {
    return move(context, call, width, times, mn_view_of(y.data, y.stride, call->dtype),
                mn_view_of(a.data, a.stride, call->dtype));
}

mn_status mn_rows_multiply(mn_context *context, const mn_call *call, int64_t width, mn_out y,
                           mn_in a, mn_in b, bool add) {
    const mn_view first = mn_view_of(a.data, a.stride, call->dtype);
    const mn_view second = mn_view_of(b.data, b.stride, call->dtype);
    mn_pair_params job = { .kind = MN_PAIR_MULTIPLY, .a = first, .b = second,
                           .shape = { call->B, call->T, call->H, width },
                           .y = mn_view_of(y.data, y.stride, call->dtype) };
    if (add) job.kind = MN_PAIR_SCALED, job.a = job.y, job.b = first, job.c = second;
    if (!y.data || !a.data || !b.data) return MN_OK;
    return mn_elementwise_run(context, MN_ELEMENTWISE_PAIR, &job);
}

mn_out mn_rows_temporary(mn_context *context, const mn_call *call, int64_t width) {
    mn_out view = { NULL, { call->T * call->H * width, call->H * width, width } };
    int64_t rows;
    if (mn_mul_i64(&rows, call->B * call->T, call->H)) {
        view.data = mn_workspace_array(context, rows, width, mn_dtype_bytes(call->dtype));
    }
    return view;
}
