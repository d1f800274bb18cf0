/* elementwise.c - the CPU's table of elementwise jobs, and running one of them. */
#include "ops/elementwise/elementwise.h"

#include "base/status.h"
#include "ops/elementwise/elementwise_internal.h"

const mn_elementwise_fn *mn_elementwise_cpu(void) {
    static const mn_elementwise_fn jobs[MN_N_ELEMENTWISE] = {
#define JOB(id, name, ins, outs, workspace, decode, about)                                         \
    [MN_ELEMENTWISE_##id] = { mn_elementwise_##name##_cpu, NULL },
#include "kernels/elementwise.def"
    };
    return jobs;
}

static const char *name_of(mn_elementwise_id id) {
    static const char *const names[MN_N_ELEMENTWISE] = {
#define JOB(id, name, ins, outs, workspace, decode, about) [MN_ELEMENTWISE_##id] = about,
#include "kernels/elementwise.def"
    };
    return names[id];
}

mn_status mn_elementwise_run(mn_context *context, mn_elementwise_id id, const void *params) {
    if (context->plans) return MN_OK;
    if (!context->device) {
        mn_elementwise_cpu()[id].run(context, params, NULL);
        return MN_OK;
    }
    const mn_status st = mn_device_use(context->device);
    if (st != MN_OK) return st;
    const int code = mn_elementwise_cuda()[id].run(mn_device_stream(context->device), params, NULL);
    return mn_device_check(context->device, code, name_of(id));
}

static bool is_flat(const mn_view *v, const int64_t shape[4]) {
    int64_t step = 1;
    for (int i = 3; i >= 0; i--) {
        if (shape[i] > 1 && v->stride[i] != step) return false;
        step *= shape[i];
    }
    return true;
}

mn_pieces mn_pieces_of(const int64_t shape[4], const mn_view *const views[], int n) {
    mn_pieces p = { .shape = shape, .rows = mn_rows_of(shape), .flat = true };
    for (int i = 0; i < n; i++) {
        if (views[i]->data && !is_flat(views[i], shape)) p.flat = false;
    }
    p.count = p.flat ? mn_ceil_div(p.rows * shape[3], MN_PIECE) : p.rows;
    return p;
}
