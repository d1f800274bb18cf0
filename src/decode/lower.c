/* lower.c - works of a tape and operators as works on few rows (kernels/decode.h), and which memory
 * they access. */
#include <string.h>

#include "base/dtype.h"
#include "base/util.h"
#include "decode/defer.h"
#include "ops/validate.h"

int mn_decode_inputs_of(mn_decode_op_kind kind) {
    static const int inputs[MN_DECODE_KINDS] = {
#define DECODE_OP(id, inputs, results) [MN_DECODE_##id] = inputs,
#include "kernels/decode_jobs.def"
#undef DECODE_OP
    };
    return inputs[kind];
}

const mn_view *mn_decode_result(const mn_decode_op *few) {
    return &few->at[mn_decode_inputs_of(few->kind)];
}

/* ---- memory ---------------------------------------------------------------------------------- */

static void access(mn_deferred *d, const void *data, int64_t count, mn_dtype dtype, bool writes) {
    if (!data || count <= 0) return;
    if (d->n_ranges < MN_DEFERRED_RANGES) {
        const uintptr_t begin = (uintptr_t)data;
        d->ranges[d->n_ranges] = (mn_mem_range){ begin,
            begin + (size_t)count * mn_dtype_bytes(dtype),
                                               writes };
    }
    d->n_ranges++;
}

/* From the first number of a view to its last. */
static int64_t access_view(mn_deferred *d, const mn_view *view, const int64_t shape[4],
                          bool writes) {
    int64_t count = 1;
    for (int i = 0; i < 4; i++) count += (shape[i] - 1) * view->stride[i];
    access(d, view->data, count, view->dtype, writes);
    return count;
}

void mn_ranges_of_gemm(mn_deferred *d, const mn_gemm_problem *p) {
    access(d, p->a, (p->M - 1) * p->a_row + p->K, p->dtype, false);
    access(d, p->b, (p->N - 1) * p->b_row + p->K, p->dtype, false);
    access(d, p->bias, p->N, p->c_dtype, false);
    access(d, p->c, (p->M - 1) * p->c_row + p->N, p->c_dtype, true);
}

/* Numbers from the first to the last of a field's view; views without strides are contiguous. */
static int64_t extent(const mn_call *call, const char *axes, const mn_in *view, bool *ok) {
    const bool contiguous = !view->stride[0] && !view->stride[1] && !view->stride[2];
    int64_t inner = 1, count = 0;
    for (int i = 0; axes[i]; i++) {
        const int64_t size = mn_axis_size(call, axes[i], ok);
        if (contiguous || i > 2 || view->stride[i] == 0) inner *= size;
        else count += (size - 1) * view->stride[i];
    }
    return count + inner;
}

bool mn_ranges_of_op(mn_deferred *d, mn_op_id op, const void *args) {
    const mn_call *call = args;
    int n_fields;
    bool ok = true;
    const mn_field *fields = mn_op_fields(op, &n_fields);
    for (int i = 0; i < n_fields; i++) {
        char buffer[MN_MAX_RANK + 1];
        const mn_in *view = (const mn_in *)((const char *)args + fields[i].offset);
        const char *axes = mn_field_axes(&fields[i], mn_args_decay(op, args), buffer);
        if (!view->data || !axes) continue;
        access(d, view->data, extent(call, axes, view, &ok),
               mn_field_dtype(&fields[i], call->dtype),
              fields[i].role >= MN_ROLE_OUT);
    }
    return ok && d->n_ranges <= MN_DEFERRED_RANGES;
}

/* ---- works ----------------------------------------------------------------------------------- */

static bool start(mn_deferred *d, mn_decode_op_kind kind, const int64_t shape[4]) {
    *d = (mn_deferred){ .kind = MN_DEFERRED_SMALL };
    d->of.few.kind = kind;
    memcpy(d->of.few.shape, shape, sizeof d->of.few.shape);
    const int64_t count = mn_count4(shape);
    return count > 0 && count <= MN_DECODE_MAX_NUMEL;
}

static void view(mn_deferred *d, int i, const mn_view *at, bool writes) {
    d->of.few.at[i] = *at;
    d->of.few.elements[i] = access_view(d, at, d->of.few.shape, writes);
}

static bool decode_unary(mn_deferred *d, const mn_unary_params *w) {
    if (!w->y.data || !start(d, MN_DECODE_UNARY, w->shape)) return false;
    d->of.few.f = (int)w->f;
    view(d, 0, &w->x, false);
    view(d, 1, &w->b, false);
    view(d, 2, &w->y, true);
    return true;
}

static bool decode_pair(mn_deferred *d, const mn_pair_params *w) {
    if (!w->y.data || w->kind == MN_PAIR_SCALED) return false;
    if (!start(d, MN_DECODE_PAIR, w->shape)) return false;
    d->of.few.f = (int)w->kind;
    d->of.few.scale = w->scale;
    d->of.few.shift = w->shift;
    view(d, 0, &w->a, false);
    view(d, 1, &w->b, false);
    view(d, 2, &w->y, true);
    return true;
}

/* Copies of heads are an axis of their own, along which `from` stands still. */
/* `most`: elements, where something may end with them. */
static bool decode_move(mn_deferred *d, const mn_move_params *w, int64_t most) {
    const int64_t *n = w->shape;
    if (w->folds || w->add) return false;
    const bool few = start(d, MN_DECODE_MOVE, n);
    if (!few && (w->times > 1 || mn_count4(n) > most)) return false;
    mn_view to = w->to, from = w->from;
    if (w->times > 1) {
        if (n[0] * n[1] != 1) return false;
        const int64_t heads[4] = { 1, n[2] / w->times, w->times, n[3] };
        memcpy(d->of.few.shape, heads, sizeof heads);
        to.stride[1] = w->times * to.stride[2];
        from.stride[1] = from.stride[2];
        from.stride[2] = 0;
    }
    view(d, 0, &from, false);
    view(d, 1, &to, true);
    return true;
}

static bool decode_fill(mn_deferred *d, const mn_fill_params *w) {
    if (!start(d, MN_DECODE_FILL, w->shape)) return false;
    d->of.few.shift = w->value;
    view(d, 0, &w->to, true);
    return true;
}

static bool decode_rows(mn_deferred *d, const mn_rows_params *w) {
    const int64_t shape[4] = { 1, 1, w->n, w->shape[3] };
    if (w->quant) return false;
    if (w->scatters || w->table.stride[1] != w->shape[3] || !start(d, MN_DECODE_ROWS, shape)) {
        return false;
    }
    d->of.few.index = w->index;
    d->of.few.at[0] = w->table;
    d->of.few.at[1] = w->rows;
    d->of.few.elements[0] = access_view(d, &w->table, w->shape, false);
    access(d, w->index, w->n, MN_F32, false);    // as wide as an index
    access(d, w->rows.data, w->n * w->shape[3], w->rows.dtype, true);
    return true;
}

bool mn_decode_of_elementwise(mn_deferred *d, mn_elementwise_id id, const void *work,
                              int64_t max_move) {
    switch (id) {
    case MN_ELEMENTWISE_UNARY: return decode_unary(d, work);
    case MN_ELEMENTWISE_PAIR: return decode_pair(d, work);
    case MN_ELEMENTWISE_MOVE: return decode_move(d, work, max_move);
    case MN_ELEMENTWISE_FILL: return decode_fill(d, work);
    case MN_ELEMENTWISE_ROWS: return decode_rows(d, work);
    default: return false;
    }
}

/* ---- operators ------------------------------------------------------------------------------- */

/* `count` neighbours as view i. */
static void flat(mn_deferred *d, int i, const void *data, int64_t count, mn_dtype dtype,
                 bool writes) {
    const int64_t shape[4] = { 1, 1, 1, count };
    d->of.few.at[i] = mn_flat_view((void *)data, dtype, shape);
    d->of.few.elements[i] = count;
    access(d, data, count, dtype, writes);
}

static bool decode_conv(mn_deferred *d, const mn_conv_args *p) {
    const mn_call *c = &p->call;
    const int64_t shape[4] = { 1, c->W, c->B, c->V }, tails = c->B * (c->W - 1) * c->V;
    const bool even = c->B == 1 || p->x.stride[0] == 0 || p->x.stride[0] == c->V;
    if (c->T != 1 || c->cu_seqlens || !even || !p->y.data) return false;
    start(d, MN_DECODE_CONV, shape);
    if (c->B * c->V <= 0 || c->B * c->V > MN_DECODE_MAX_NUMEL) return false;
    d->of.few.f = p->act;
    flat(d, 0, p->x.data, c->B * c->V, c->dtype, false);
    flat(d, 1, p->w.data, c->V * c->W, c->dtype, false);
    flat(d, 2, p->bias.data, c->V, c->dtype, false);
    flat(d, 3, p->tail0.data, tails, MN_F32, false);
    flat(d, 4, p->y.data, c->B * c->V, c->dtype, true);
    flat(d, 5, p->tail.data, tails, MN_F32, true);
    return true;
}

static bool decode_l2_norm(mn_deferred *d, const mn_l2_norm_args *p) {
    const mn_call *c = &p->call;
    const int64_t shape[4] = { 1, 1, c->B, c->V };
    if (!p->y.data || !start(d, MN_DECODE_L2_NORM, shape)) return false;
    d->of.few.f = p->kind;
    d->of.few.scale = p->eps;
    flat(d, 0, p->x.data, c->B * c->V, c->dtype, false);
    flat(d, 1, p->y.data, c->B * c->V, c->dtype, true);
    return true;
}

static bool decode_rms_norm(mn_deferred *d, const mn_rms_norm_args *p) {
    const mn_call *c = &p->call;
    const int64_t shape[4] = { 1, 1, c->B, c->V };
    if (!p->y.data || !start(d, MN_DECODE_RMS_NORM, shape)) return false;
    d->of.few.scale = p->eps;
    flat(d, 0, p->x.data, c->B * c->V, c->dtype, false);
    flat(d, 1, p->w.data, c->V, c->dtype, false);
    flat(d, 2, p->y.data, c->B * c->V, c->dtype, true);
    return true;
}

static bool decode_gated_norm(mn_deferred *d, const mn_rms_norm_gated_args *p) {
    const mn_call *c = &p->call;
    const int64_t shape[4] = { 1, p->groups, c->B * p->groups, c->V / p->groups };
    if (!p->y.data || !start(d, MN_DECODE_GATED_NORM, shape)) return false;
    d->of.few.f = p->act;
    d->of.few.order = p->order;
    d->of.few.scale = p->eps;
    flat(d, 0, p->x.data, c->B * c->V, c->dtype, false);
    flat(d, 1, p->z.data, c->B * c->V, c->dtype, false);
    flat(d, 2, p->w.data, c->V, c->dtype, false);
    flat(d, 3, p->y.data, c->B * c->V, c->dtype, true);
    return true;
}

bool mn_decode_of_op(mn_deferred *d, mn_op_id op, const void *args) {
    switch (op) {
    case MN_OP_conv: return decode_conv(d, args);
    case MN_OP_l2_norm: return decode_l2_norm(d, args);
    case MN_OP_rms_norm: return decode_rms_norm(d, args);
    case MN_OP_rms_norm_gated: return decode_gated_norm(d, args);
    default: return false;
    }
}

/* The state has to stay in place: other calls take another kernel. */
bool mn_decode_recurrence_of(mn_decode_recurrence *out, mn_op_id op, const void *given) {
    _Alignas(16) unsigned char args[MN_MAX_ARGS_BYTES];
    memcpy(args, given, mn_op_describe(op)->args_bytes);
    if (op != MN_OP_delta && op != MN_OP_delta_net && op != MN_OP_additive) return false;
    if (((const mn_call *)given)->T != 1 || mn_validate_sizes(op, args, false) != MN_OK) {
        return false;
    }
    if (op == MN_OP_delta) {
        const mn_delta_args *p = (const mn_delta_args *)args;
        *out = (mn_decode_recurrence){ .call = p->call, .scale = p->scale, .decay = p->decay,
            .q = p->q,
                                .e = p->e, .w = p->w, .v = p->v, .beta = p->beta, .g = p->g,
                                .state0 = p->state0, .o = p->o, .state = p->state };
    } else if (op == MN_OP_delta_net) {
        const mn_delta_net_args *p = (const mn_delta_net_args *)args;
        *out = (mn_decode_recurrence){ .call = p->call, .scale = p->scale, .decay = p->decay,
            .q = p->q,
                                .e = p->k, .v = p->v, .beta = p->beta, .g = p->g,
                                .state0 = p->state0, .o = p->o, .state = p->state };
    } else {
        const mn_additive_args *p = (const mn_additive_args *)args;
        *out = (mn_decode_recurrence){ .call = p->call, .scale = p->scale, .decay = p->decay,
            .q = p->q,
                                .w = p->k, .v = p->v, .g = p->g, .state0 = p->state0, .o = p->o,
                                .state = p->state };
    }
    return out->state0.data && out->state0.data == out->state.data;
}
