/* delta_gva.c - delta_net whose J query and key heads each serve H / J value heads: as many calls
 * of J heads, each with every (H / J)-th value head, on views of the same memory. Gradients of
 * queries and keys are sums over the calls, in their order. States, which operators take whole, are
 * copied; not so those of single tokens on the CPU, which go key head by key head, its row read by
 * all. */
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
    mn_delta_net_args part = {
        .call = p->call, .scale = p->scale, .decay = p->decay, .q = p->q, .k = p->k,
        .v = every(p->v, i, times, item), .beta = every(p->beta, i, times, item),
        .g = every(p->g, i, times, item), .o = every_out(p->o, i, times, item),
        .cot.o = every(p->cot.o, i, times, item),
        .grad = { .q = p->grad.q, .k = p->grad.k, .v = every_out(p->grad.v, i, times, item),
                  .beta = every_out(p->grad.beta, i, times, item),
                  .g = every_out(p->grad.g, i, times, item) },
    };
    part.call.H = p->call.J;
    part.call.J = 0;
    return part;
}

/* States of a call of part of the heads: rows of numbers, a matrix each, copied from or to every
 * `times`-th head of the whole's. */
typedef struct states {
    mn_context *context;
    mn_call rows;             // (sequences, 1, J), in the type of states
    int64_t cells, times;
} states;

static states states_of(mn_context *context, const mn_delta_gva_args *p) {
    const mn_call *c = &p->call;
    states s = { .context = context, .cells = c->K * c->V, .times = c->H / c->J };
    s.rows = (mn_call){ .dtype = c->dtype == MN_BF16 ? MN_F32 : c->dtype, .T = 1, .H = c->J,
                        .B = c->cu_seqlens ? c->n_seqs : c->B };
    return s;
}

/* The same for a decay (H): one number each. */
static states decays_of(mn_context *context, const mn_delta_gva_args *p) {
    states s = states_of(context, p);
    s.rows.B = s.cells = 1;
    s.rows.dtype = p->call.dtype;
    return s;
}

static mn_status state_room(const states *s, mn_out *to, bool wanted) {
    *to = wanted ? mn_rows_temporary(s->context, &s->rows, s->cells) : (mn_out){ 0 };
    const bool failed = wanted && !to->data;
    return failed ? mn_fail(MN_ERR_MEMORY, "delta_gva: no memory for its states") : MN_OK;
}

static mn_status take_state(const states *s, mn_in *to, mn_in from, int64_t i) {
    mn_out copy;
    mn_status st = state_room(s, &copy, from.data != NULL);
    if (st != MN_OK || !from.data) return st;
    const size_t item = mn_dtype_bytes(s->rows.dtype);
    st = mn_rows_copy(s->context, &s->rows, s->cells, copy, every(from, i, s->times, item));
    *to = (mn_in){ .data = copy.data };
    return st;
}

static mn_status give_state(const states *s, mn_out to, mn_out from, int64_t i) {
    const size_t item = mn_dtype_bytes(s->rows.dtype);
    return mn_rows_copy(s->context, &s->rows, s->cells, every_out(to, i, s->times, item),
                        mn_as_input(from));
}

/* One call of J heads; its gradients of queries and keys go to dq and dk. */
static mn_status run_part(mn_context *context, mn_pass pass, const mn_delta_gva_args *p, int64_t i,
                          mn_out dq, mn_out dk) {
    const states s = states_of(context, p);
    const states decays = decays_of(context, p);
    mn_delta_net_args part = part_of(p, i, s.times);
    const bool whole = p->decay == MN_DECAY_HEAD;    // a decay of no token: by copies too
    mn_out last, first, dg = { 0 };
    part.grad.q = dq;
    part.grad.k = dk;
    mn_status st = whole ? take_state(&decays, &part.g, p->g, i) : MN_OK;
    if (st == MN_OK && whole) {
        st = state_room(&decays, &dg, p->grad.g.data && pass == MN_BACKWARD);
        part.grad.g = (mn_out){ .data = dg.data };
    }
    if (st == MN_OK) st = take_state(&s, &part.state0, p->state0, i);
    if (st == MN_OK) st = take_state(&s, &part.cot.state, p->cot.state, i);
    if (st == MN_OK) st = state_room(&s, &last, p->state.data && pass != MN_BACKWARD);
    if (st == MN_OK) st = state_room(&s, &first, p->grad.state0.data && pass == MN_BACKWARD);
    if (st != MN_OK) return st;
    part.state = (mn_out){ .data = last.data };
    part.grad.state0 = (mn_out){ .data = first.data };
    st = mn_op_run(context, MN_OP_delta_net, pass, &part);
    if (st == MN_OK && last.data) st = give_state(&s, p->state, last, i);
    if (st == MN_OK && first.data) st = give_state(&s, p->grad.state0, first, i);
    if (st == MN_OK && dg.data) st = give_state(&decays, p->grad.g, dg, i);
    return st;
}

/* Row (b,j) of a view, with the heads of it that follow: stride 0 where they are one. */
static mn_in from_row(mn_in view, int64_t b, int64_t h, int64_t step, size_t item) {
    if (!view.data) return view;
    const int64_t at = b * view.stride[0] + h * view.stride[2];
    return (mn_in){ (const char *)view.data + (size_t)at * item, { 1, 1, step * view.stride[2] } };
}

static mn_status run_token(mn_context *context, const mn_delta_gva_args *p, int64_t b, int64_t j) {
    const mn_call *c = &p->call;
    const size_t item = mn_dtype_bytes(c->dtype);
    const int64_t times = c->H / c->J, h = j * times, cells = (b * c->H + h) * c->K * c->V;
    const mn_in o = from_row(mn_as_input(p->o), b, h, 1, item);
    mn_delta_net_args one = {
        .call = *c, .scale = p->scale, .decay = p->decay, .q = from_row(p->q, b, j, 0, item),
        .k = from_row(p->k, b, j, 0, item), .v = from_row(p->v, b, h, 1, item),
        .beta = from_row(p->beta, b, h, 1, item), .g = from_row(p->g, b, h, 1, item),
        .o = { (void *)o.data, { o.stride[0], o.stride[1], o.stride[2] } },
    };
    one.call.B = 1, one.call.H = times, one.call.J = 0;
    if (p->decay == MN_DECAY_HEAD) one.g.stride[0] = one.g.stride[1] = 0;
    if (p->state0.data) one.state0.data = (const char *)p->state0.data + (size_t)cells * item;
    if (p->state.data) one.state.data = (char *)p->state.data + (size_t)cells * item;
    return mn_op_run(context, MN_OP_delta_net, MN_FORWARD, &one);
}

mn_status mn_compose_delta_gva(mn_context *context, mn_pass pass, const void *args) {
    const mn_delta_gva_args *p = args;
    const mn_call *c = args;
    const int64_t times = c->H / c->J, K = c->K;
    const bool back = pass == MN_BACKWARD, token = c->T == 1 && !c->cu_seqlens && !back;
    mn_status st = MN_OK;
    if (token && !context->device) {
        for (int64_t i = 0; i < c->B * c->J && st == MN_OK; i++) {
            st = run_token(context, p, i / c->J, i % c->J);
        }
        return st;
    }
    mn_call rows = *c;
    rows.H = c->J;
    const bool dq_sums = back && times > 1 && p->grad.q.data;
    const bool dk_sums = back && times > 1 && p->grad.k.data;
    const mn_out dq = dq_sums ? mn_rows_temporary(context, &rows, K) : p->grad.q;
    const mn_out dk = dk_sums ? mn_rows_temporary(context, &rows, K) : p->grad.k;
    if ((dq_sums && !dq.data) || (dk_sums && !dk.data)) {
        return mn_fail(MN_ERR_MEMORY, "delta_gva: no memory for its temporaries");
    }
    for (int64_t i = 0; i < times && st == MN_OK; i++) {
        st = run_part(context, pass, p, i, i ? dq : p->grad.q, i ? dk : p->grad.k);
        if (st == MN_OK && i && dq_sums) {
            st = mn_rows_add(context, &rows, K, p->grad.q, mn_as_input(dq));
        }
        if (st == MN_OK && i && dk_sums) {
            st = mn_rows_add(context, &rows, K, p->grad.k, mn_as_input(dk));
        }
    }
    return st;
}
