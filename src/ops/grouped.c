/* grouped.c - value heads that share query and key heads, for kernels that read head h J / H and
 * write gradients of H heads: those are added up here, a group's heads in their order. */
#include "ops/grouped.h"

#include <string.h>

#include "base/status.h"
#include "base/util.h"
#include "kernels/delta_gpu.h"
#include "ops/rows.h"

enum { MOST = 4 };    // fields of J heads of an operator

/* Gradients of one field: of all H heads, and of its own J. */
typedef struct shared {
    mn_out all, own;
} shared;

bool mn_op_is_grouped(mn_op_id op, const void *args) {
    const mn_call *c = args;
    return mn_op_traits_of(op)->groups && c->J < c->H;
}

bool mn_op_folds_on_device(mn_op_id op, const void *args) {
    static const struct {
        mn_op_id op;
        bool (*folds)(const void *args);
    } kernels[] = { { MN_OP_delta, mn_delta_folds_groups } };
    for (size_t i = 0; i < MN_COUNTOF(kernels); i++) {
        if (kernels[i].op == op) return kernels[i].folds(args);
    }
    return false;
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

mn_status mn_grouped_backward(mn_context *context, mn_op_id op, void *args, mn_grouped_fn run) {
    const mn_call *call = args;
    const int64_t times = call->H / call->J;
    mn_call rows = *call;
    shared fields[MOST];
    int n;
    rows.H = call->J;
    mn_status st = divert(context, op, args, fields, &n);
    if (st == MN_OK) st = run(context, op, args);
    for (int i = 0; i < n && st == MN_OK; i++) {
        st = mn_rows_fold(context, &rows, rows.K, times, fields[i].own,
                          mn_as_input(fields[i].all));
    }
    return st;
}
