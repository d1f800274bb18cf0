/* delta_gva.c - delta_net whose J query and key heads each serve H / J value heads: as many calls of
 * J heads, each with every (H / J)-th value head, on views of the same memory. Gradients of queries
 * and keys are sums over the calls, in their order. */
#include "base/dtype.h"
#include "base/status.h"
#include "ops/compose/compose.h"
#include "ops/rows.h"

/* Every `times`-th head of a view from head `first` on, numbers of `item` bytes. */
static mn_out every_out(mn_out view, int64_t first, int64_t times, size_t item) {
    if (view.data) view.data = (char *)view.data + (size_t)(first * view.stride[2]) * item;
    view.stride[2] *= times;
    return view;
}

static mn_in every(mn_in view, int64_t first, int64_t times, size_t item) {
    if (view.data) view.data = (const char *)view.data + (size_t)(first * view.stride[2]) * item;
    view.stride[2] *= times;
    return view;
}

/* Call number `i` of those that make up the whole. */
static mn_delta_net_args part_of(const mn_delta_gva_args *p, int64_t i, int64_t times) {
    const size_t item = mn_dtype_bytes(p->call.dtype);
    const size_t wide = p->call.dtype == MN_BF16 ? mn_dtype_bytes(MN_F32) : item;    // states
    mn_delta_net_args part = {
        .call = p->call, .scale = p->scale, .decay = p->decay, .q = p->q, .k = p->k,
        .v = every(p->v, i, times, item), .beta = every(p->beta, i, times, item),
        .g = every(p->g, i, times, item), .state0 = every(p->state0, i, times, wide),
        .o = every_out(p->o, i, times, item), .state = every_out(p->state, i, times, wide),
        .cot = { every(p->cot.o, i, times, item), every(p->cot.state, i, times, wide) },
        .grad = { .q = p->grad.q, .k = p->grad.k, .v = every_out(p->grad.v, i, times, item),
                  .beta = every_out(p->grad.beta, i, times, item),
                  .g = every_out(p->grad.g, i, times, item),
                  .state0 = every_out(p->grad.state0, i, times, wide) },
    };
    part.call.H = p->call.J;
    part.call.J = 0;
    return part;
}

mn_status mn_compose_delta_gva(mn_context *context, mn_pass pass, const void *args) {
    const mn_delta_gva_args *p = args;
    const int64_t times = p->call.H / p->call.J, K = p->call.K;
    mn_call rows = p->call;
    rows.H = p->call.J;
    const bool sums = pass == MN_BACKWARD && times > 1;
    const mn_out dq = mn_rows_temporary(context, &rows, sums && p->grad.q.data ? K : 0);
    const mn_out dk = mn_rows_temporary(context, &rows, sums && p->grad.k.data ? K : 0);
    mn_status st = MN_OK;
    if (!dq.data || !dk.data) {
        return mn_fail(MN_ERR_MEMORY, "delta_gva: no memory for its temporaries");
    }
    for (int64_t i = 0; i < times && st == MN_OK; i++) {
        mn_delta_net_args part = part_of(p, i, times);
        if (i > 0 && p->grad.q.data) part.grad.q = dq;
        if (i > 0 && p->grad.k.data) part.grad.k = dk;
        st = mn_op_run(context, MN_OP_delta_net, pass, &part);
        if (!sums || i == 0 || st != MN_OK) continue;
        if (p->grad.q.data) st = mn_rows_add(context, &rows, K, p->grad.q, mn_as_input(dq));
        if (st == MN_OK && p->grad.k.data) {
            st = mn_rows_add(context, &rows, K, p->grad.k, mn_as_input(dk));
        }
    }
    return st;
}
