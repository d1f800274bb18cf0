/* overlap.c - whether tensors that a call writes share memory. */
#include "ops/overlap.h"

#include <string.h>

#include "base/dtype.h"
#include "base/status.h"

/* Bytes that a tensor takes: `rows` of `width` contiguous bytes, `step` apart, from `at` on. A
 * contiguous tensor is one row. */
typedef struct extent {
    const char *name;
    uintptr_t at, end;
    uintptr_t step, width;
} extent;

static extent extent_of(const mn_field *field, const char *axes, const mn_call *call,
                        const mn_in *view) {
    bool ok = true;
    const uintptr_t size = mn_dtype_bytes(mn_field_dtype(field, call->dtype));
    uintptr_t last[3] = { 0, 0, 0 }, inner = 1, count = 1;
    for (const char *letter = axes; *letter; letter++) {
        const uintptr_t n = (uintptr_t)mn_axis_size(call, *letter, &ok);
        const size_t i = (size_t)(letter - axes);
        const bool strided = i < 3 && strlen(axes) > i + 1 && axes[0] == 'B' &&
                             (i == 0 || (i == 1 && strchr("TL", *letter)) ||
                              (i == 2 && strchr("HJQ", *letter)));
        count *= n;
        if (strided) last[i] = n > 0 ? n - 1 : 0;
        else inner *= n;
    }
    extent e = { field->name, (uintptr_t)view->data, (uintptr_t)view->data, 0, 0 };
    if (count == 0) return e;
    const uintptr_t heads = last[2] * (uintptr_t)view->stride[2] + inner;
    const uintptr_t span = last[0] * (uintptr_t)view->stride[0] +
                           last[1] * (uintptr_t)view->stride[1] + heads;
    e.end = e.at + span * size;
    e.width = heads * size;
    const int rows = last[1] > 0 ? 1 : 0;    // sequences of one token are rows themselves
    const bool regular = last[rows] > 0 && view->stride[rows] > 0 &&
                         (last[0] == 0 || view->stride[0] % view->stride[rows] == 0);
    e.step = regular ? (uintptr_t)view->stride[rows] * size : 0;
    if (e.step < e.width) e.step = 0;
    return e;
}

/* Rows of one step that lie side by side meet only where they overlap modulo that step. Steps that
 * differ are taken to be apart: what cannot be told is not refused. */
static bool meet(const extent *a, const extent *b) {
    if (a->end <= b->at || b->end <= a->at) return false;
    if (a->at == b->at) return true;
    const uintptr_t distance = a->at < b->at ? b->at - a->at : a->at - b->at;
    const extent *first = a->at < b->at ? a : b, *second = a->at < b->at ? b : a;
    if (first->step == 0 && second->step == 0) return true;
    const uintptr_t step = first->step ? first->step : second->step;
    if (first->step != second->step) {
        const bool dense = first->step == 0 ? first->end - first->at == first->width
                                            : first->step == first->width;
        return dense;
    }
    const uintptr_t offset = distance % step;
    return offset < first->width || offset + second->width > step;
}

mn_status mn_check_overlap(mn_op_id op, const void *args, bool backward) {
    const mn_call *call = args;
    const int decay = mn_args_decay(op, args);
    extent written[32];
    int count, n = 0;
    const mn_field *fields = mn_op_fields(op, &count);
    for (int i = 0; i < count; i++) {
        const bool result = fields[i].role >= MN_ROLE_OUT;
        const size_t offset = backward ? fields[i].partner : fields[i].offset;
        char buffer[MN_MAX_RANK + 1];
        const char *axes = mn_field_axes(&fields[i], decay, buffer);
        if (result == backward || offset == MN_NO_OFFSET || !axes) continue;
        const mn_in *view = (const mn_in *)((const char *)args + offset);
        if (!view->data || n == 32) continue;
        written[n] = extent_of(&fields[i], axes, call, view);
        for (int k = 0; k < n; k++) {
            if (!meet(&written[k], &written[n])) continue;
            return mn_fail(MN_ERR_ARGUMENT, "%s: %s%s and %s%s share memory, each needs its own",
                           mn_op_describe(op)->name, backward ? "grad." : "", written[k].name,
                           backward ? "grad." : "", written[n].name);
        }
        n++;
    }
    return MN_OK;
}
