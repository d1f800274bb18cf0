/* rows.c - elementwise work over the rows of (B,T,H,X) views, for composed operators. */
#include "ops/rows.h"

#include "base/checked.h"
#include "base/dtype.h"
#include "kernels/access.h"
#include "kernels/elementwise.h"
#include "ops/workspace.h"
#include "runtime/device.h"

typedef struct product {
    const mn_call *call;
    int64_t width;
    mn_out y;
    mn_in a, b;
    bool add;
} product;

static void multiply_f32(float *y, const float *a, const float *b, int64_t n, bool add) {
    if (add) for (int64_t i = 0; i < n; i++) y[i] += a[i] * b[i];
    else for (int64_t i = 0; i < n; i++) y[i] = a[i] * b[i];
}

static void multiply_f64(double *y, const double *a, const double *b, int64_t n, bool add) {
    if (add) for (int64_t i = 0; i < n; i++) y[i] += a[i] * b[i];
    else for (int64_t i = 0; i < n; i++) y[i] = a[i] * b[i];
}

/* One item is all heads of one token. */
static void multiply_token(void *context, int64_t item, int worker) {
    (void)worker;
    const product *p = context;
    const int64_t b = item / p->call->T, t = item % p->call->T, n = p->width;
    for (int64_t h = 0; h < p->call->H; h++) {
        if (p->call->dtype == MN_F64) {
            multiply_f64(MN_ROW_OUT(double, p->y, b, t, h), MN_ROW(double, p->a, b, t, h),
                         MN_ROW(double, p->b, b, t, h), n, p->add);
        } else {
            multiply_f32(MN_ROW_OUT(float, p->y, b, t, h), MN_ROW(float, p->a, b, t, h),
                         MN_ROW(float, p->b, b, t, h), n, p->add);
        }
    }
}

mn_status mn_rows_glue(mn_context *context, mn_glue_id id, const mn_call *call, int64_t width,
                       mn_out x, mn_in a, mn_in b, mn_in c) {
    const mn_glue step = { .dtype = call->dtype, .B = call->B, .T = call->T, .H = call->H,
                           .width = width, .a = a, .b = b, .c = c, .x = x };
    return x.data ? mn_run_glue(context, id, &step) : MN_OK;
}

mn_status mn_rows_convert(mn_context *context, const mn_call *call, int64_t width, mn_out x,
                          mn_in a, bool widen) {
    const mn_glue step = { .dtype = call->dtype, .B = call->B, .T = call->T, .H = call->H,
                           .width = width, .a = a, .x = x,
                           .wide = widen ? MN_GLUE_F32_X : MN_GLUE_F32_A };
    return x.data && a.data ? mn_run_glue(context, MN_GLUE_copy, &step) : MN_OK;
}

mn_status mn_rows_multiply(mn_context *context, const mn_call *call, int64_t width, mn_out y,
                           mn_in a, mn_in b, bool add) {
    product p = { call, width, y, a, b, add };
    if (!y.data || !a.data || !b.data || context->plans) return MN_OK;
    if (context->device) {
        return mn_rows_glue(context, add ? MN_GLUE_multiply_add : MN_GLUE_multiply, call, width, y,
                            a, b, add ? mn_as_input(y) : (mn_in){ 0 });
    }
    mn_threads_run(context->threads, call->B * call->T, multiply_token, &p);
    return MN_OK;
}

static void copy_f32(float *y, const float *a, int64_t n) {
    for (int64_t i = 0; i < n; i++) y[i] = a[i];
}

static void copy_f64(double *y, const double *a, int64_t n) {
    for (int64_t i = 0; i < n; i++) y[i] = a[i];
}

static void copy_token(void *context, int64_t item, int worker) {
    (void)worker;
    const product *p = context;
    const int64_t b = item / p->call->T, t = item % p->call->T, n = p->width;
    for (int64_t h = 0; h < p->call->H; h++) {
        if (p->call->dtype == MN_F64) {
            copy_f64(MN_ROW_OUT(double, p->y, b, t, h), MN_ROW(double, p->a, b, t, h), n);
        } else {
            copy_f32(MN_ROW_OUT(float, p->y, b, t, h), MN_ROW(float, p->a, b, t, h), n);
        }
    }
}

mn_status mn_rows_copy(mn_context *context, const mn_call *call, int64_t width, mn_out y, mn_in a) {
    product p = { .call = call, .width = width, .y = y, .a = a };
    if (!y.data || !a.data || context->plans) return MN_OK;
    if (context->device) {
        return mn_rows_glue(context, MN_GLUE_copy, call, width, y, a, (mn_in){ 0 }, (mn_in){ 0 });
    }
    mn_threads_run(context->threads, call->B * call->T, copy_token, &p);
    return MN_OK;
}

static void add_f32(float *y, const float *a, int64_t n) {
    for (int64_t i = 0; i < n; i++) y[i] += a[i];
}

static void add_f64(double *y, const double *a, int64_t n) {
    for (int64_t i = 0; i < n; i++) y[i] += a[i];
}

typedef struct fold {
    const mn_call *call;
    int64_t width, times;
    mn_out y;
    mn_in a;
} fold;

/* One item is all heads of one token. */
static void fold_token(void *context, int64_t item, int worker) {
    (void)worker;
    const fold *p = context;
    const int64_t b = item / p->call->T, t = item % p->call->T, n = p->width;
    for (int64_t h = 0; h < p->call->H * p->times; h++) {
        const bool first = h % p->times == 0;
        if (p->call->dtype == MN_F64) {
            (first ? copy_f64 : add_f64)(MN_ROW_OUT(double, p->y, b, t, h / p->times),
                                         MN_ROW(double, p->a, b, t, h), n);
        } else {
            (first ? copy_f32 : add_f32)(MN_ROW_OUT(float, p->y, b, t, h / p->times),
                                         MN_ROW(float, p->a, b, t, h), n);
        }
    }
}

static mn_view view_of(const void *data, const int64_t stride[3], mn_dtype dtype) {
    return (mn_view){ (void *)data, dtype, { stride[0], stride[1], stride[2], 1 } };
}

mn_status mn_rows_fold(mn_context *context, const mn_call *call, int64_t width, int64_t times,
                       mn_out y, mn_in a) {
    if (!y.data || !a.data || context->plans) return MN_OK;
    if (context->device) {
        const mn_move_params move = {
            .shape = { call->B, call->T, call->H, width }, .times = times, .folds = true,
            .to = view_of(y.data, y.stride, call->dtype),
            .from = view_of(a.data, a.stride, call->dtype),
        };
        const mn_elementwise_fn *fn = &mn_elementwise_cuda()[MN_ELEMENTWISE_MOVE];
        const mn_status st = mn_device_use(context->device);
        if (st != MN_OK) return st;
        return mn_device_check(context->device,
                               fn->run(mn_device_stream(context->device), &move, NULL),
                               "a sum over the heads of a group");
    }
    fold p = { call, width, times, y, a };
    mn_threads_run(context->threads, call->B * call->T, fold_token, &p);
    return MN_OK;
}

mn_out mn_rows_temporary(mn_context *context, const mn_call *call, int64_t width) {
    mn_out view = { NULL, { call->T * call->H * width, call->H * width, width } };
    int64_t rows;
    if (mn_mul_i64(&rows, call->B * call->T, call->H)) {
        view.data = mn_workspace_array(context, rows, width, mn_dtype_bytes(call->dtype));
    }
    return view;
}
