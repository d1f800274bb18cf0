/* grouped.c - value heads that share query and key heads, for kernels that read head h J / H and
 * write gradients of H heads: those are added up here, a group's heads in their order. */
#include "ops/grouped.h"

#include <string.h>

#include "base/dtype.h"
#include "base/status.h"
#include "ops/rows.h"
#include "ops/workspace.h"

enum { MOST = 4 };    // fields of J heads of an operator

/* Gradients of one field: of all H heads, and of its own J. */
typedef struct shared {
    mn_out all, own;
} shared;

/* Head h of every group, numbers of `item` bytes. */
static mn_in each(mn_out view, int64_t h, int64_t times, size_t item) {
    return (mn_in){ (const char *)view.data + (size_t)(h * view.stride[2]) * item,
                    { view.stride[0], view.stride[1], view.stride[2] * times } };
}

bool mn_op_is_grouped(mn_op_id op, const void *args) {
    const mn_call *c = args;
    return mn_op_traits_of(op)->groups && c->J < c->H;
}

/* The gradients of fields of J heads, which `args` is made to write elsewhere. */
static mn_status divert(mn_context *context, mn_op_id op, void *args, shared *fields, int *n) {
    int count;
    const mn_field *all = mn_op_fields(op, &count);
    const mn_call *call = args;
    *n = 0;
    for (int i = 0; i < count; i++) {
        if (strcmp(all[i].axes, "BTJK") != 0) continue;
        mn_out *grad = (mn_out *)((char *)args + all[i].partner);
        if (!grad->data || *n == MOST) continue;
        shared *f = &fields[(*n)++];
        f->own = *grad;
        f->all = *grad = mn_rows_temporary(context, call, call->K);
        if (!f->all.data) {
            return mn_fail(MN_ERR_MEMORY, "%s: no memory for gradients of %lld heads",
                           mn_op_describe(op)->name, (long long)call->H);
        }
    }
    return MN_OK;
}

/* On a device: sums stay in float32 until the last head is in, and are rounded once. */
static mn_status add_on_device(mn_context *context, const mn_call *rows, const shared *f,
                               int64_t times, size_t item) {
    mn_out sum = { NULL, { rows->T * rows->H * rows->K, rows->H * rows->K, rows->K } };
    mn_status st = MN_OK;
    if (times > 2) {
        sum.data = mn_workspace_array(context, rows->B * rows->T * rows->H, rows->K, sizeof(float));
        if (!sum.data) return mn_fail(MN_ERR_MEMORY, "no memory for gradients of shared heads");
    }
    for (int64_t h = 1; h < times && st == MN_OK; h++) {
        const bool first = h == 1, last = h == times - 1;
        const mn_glue step = {
            .dtype = rows->dtype, .B = rows->B, .T = rows->T, .H = rows->H, .width = rows->K,
            .a = first ? each(f->all, 0, times, item) : mn_as_input(sum),
            .b = each(f->all, h, times, item), .x = last ? f->own : sum,
            .wide = (first ? 0 : MN_GLUE_F32_A) | (last ? 0 : MN_GLUE_F32_X),
        };
        st = mn_run_glue(context, MN_GLUE_add, &step);
    }
    return st;
}

mn_status mn_grouped_backward(mn_context *context, mn_op_id op, void *args, mn_grouped_fn run) {
    const mn_call *call = args;
    const int64_t times = call->H / call->J;
    const size_t item = mn_dtype_bytes(call->dtype);
    mn_call rows = *call;
    shared fields[MOST];
    int n;
    rows.H = call->J;
    mn_status st = divert(context, op, args, fields, &n);
    if (st == MN_OK) st = run(context, op, args);
    for (int i = 0; i < n && st == MN_OK; i++) {
        const shared *f = &fields[i];
        if (context->device) {
            st = add_on_device(context, &rows, f, times, item);
            continue;
        }
        st = mn_rows_copy(context, &rows, rows.K, f->own, each(f->all, 0, times, item));
        for (int64_t h = 1; h < times && st == MN_OK; h++) {
            st = mn_rows_add(context, &rows, rows.K, f->own, each(f->all, h, times, item));
        }
    }
    return st;
}
