/* wide.c - a call of bf16 as one of float32, for operators whose results would be rounded
 * more than once: every tensor but the states is copied, and results are rounded at the end. */
#include <string.h>

#include "base/status.h"
#include "ops/compose/compose.h"
#include "ops/rows.h"

/* A view of the narrow call, what it is in the wide one, and the rows they have. */
typedef struct wide_copy {
    const mn_out *narrow;
    mn_out *wide;
    mn_call rows;
    int64_t width;
    bool per_head;           // of axes H: a view without strides
} wide_copy;

/* How rows of a tensor with these axes are walked: H rows for each token, or once. */
static void rows_of(wide_copy *copy, const mn_call *call, const char *axes) {
    const size_t rank = strlen(axes);
    bool ok = true;
    copy->rows = *call;
    copy->width = rank > 1 && axes[rank - 1] != 'H' ? mn_axis_size(call, axes[rank - 1], &ok) : 1;
    copy->per_head = axes[0] != 'B';
    if (copy->per_head) copy->rows.B = copy->rows.T = 1;
}

/* The wide view with the strides by which rows are walked. */
static mn_out wide_rows(const wide_copy *copy) {
    mn_out view = *copy->wide;
    if (copy->per_head) view.stride[2] = copy->width;
    return view;
}

/* Gives the wide call memory for a view; fills it where it is read. */
static mn_status widen(mn_context *context, const wide_copy *copy, bool is_read) {
    mn_call wide = copy->rows;
    wide.dtype = MN_F32;
    *copy->wide = mn_rows_temporary(context, &wide, copy->width);
    if (!copy->wide->data) return mn_fail(MN_ERR_MEMORY, "no memory for float32 temporaries");
    if (copy->per_head) memset(copy->wide->stride, 0, sizeof copy->wide->stride);
    if (!is_read) return MN_OK;
    return mn_rows_convert(context, &copy->rows, copy->width, wide_rows(copy),
                           mn_as_input(*copy->narrow), true);
}

static mn_status narrow(mn_context *context, const wide_copy *copy) {
    return mn_rows_convert(context, &copy->rows, copy->width, *copy->narrow,
                           mn_as_input(wide_rows(copy)), false);
}

/* Visits the view at `offset` of both calls: before the run, or after it. */
static mn_status visit(mn_context *context, const void *args, unsigned char *wide, size_t offset,
                       const char *axes, bool is_read, bool after) {
    if (offset == MN_NO_OFFSET) return MN_OK;
    wide_copy copy = { .narrow = (const mn_out *)((const char *)args + offset),
                       .wide = (mn_out *)(wide + offset) };
    if (!copy.narrow->data || (after && is_read)) return MN_OK;
    rows_of(&copy, args, axes);
    return after ? narrow(context, &copy) : widen(context, &copy, is_read);
}

static mn_status visit_all(mn_context *context, mn_op_id op, mn_pass pass, const void *args,
                           unsigned char *wide, bool after) {
    int count;
    const mn_field *fields = mn_op_fields(op, &count);
    mn_status st = MN_OK;
    for (int i = 0; i < count && st == MN_OK; i++) {
        char text[MN_MAX_RANK + 1];
        const char *axes = mn_field_axes(&fields[i], mn_args_decay(op, wide), text);
        if (!axes || mn_field_dtype(&fields[i], MN_BF16) != MN_BF16) continue;
        const bool input = fields[i].role <= MN_ROLE_RAW, back = pass == MN_BACKWARD;
        if (input || !back) {
            st = visit(context, args, wide, fields[i].offset, axes, input, after);
        }
        if (st == MN_OK && back) {
            st = visit(context, args, wide, fields[i].partner, axes, !input, after);
        }
    }
    return st;
}

mn_status mn_compose_wide(mn_context *context, mn_op_id op, mn_pass pass, const void *args) {
    _Alignas(16) unsigned char wide[MN_MAX_ARGS_BYTES];
    memcpy(wide, args, mn_op_describe(op)->args_bytes);
    ((mn_call *)wide)->dtype = MN_F32;
    mn_status st = visit_all(context, op, pass, args, wide, false);
    if (st == MN_OK) st = mn_op_run(context, op, pass, wide);
    return st == MN_OK ? visit_all(context, op, pass, args, wide, true) : st;
}
