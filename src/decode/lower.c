/* lower.c - works of a tape and operators as works on few rows (kernels/decode.h), and which memory
 * they touch. */
#include <string.h>

#include "base/dtype.h"
#include "base/util.h"
#include "decode/defer.h"
#include "ops/validate.h"

int mn_few_inputs_of(mn_few_kind kind) {
    static const int inputs[MN_FEW_KINDS] = {
#define FEW(id, inputs, results) [MN_FEW_##id] = inputs,
#include "kernels/decode_jobs.def"
#undef FEW
    };
    return inputs[kind];
}

const mn_view *mn_few_result(const mn_few *few) {
    return &few->at[mn_few_inputs_of(few->kind)];
}

/* ---- memory ---------------------------------------------------------------------------------- */

static void touch(mn_delayed *d, const void *data, int64_t count, mn_dtype dtype, bool writes) {
    if (!data || count <= 0) return;
    if (d->n_touched < MN_TOUCHED) {
        const uintptr_t begin = (uintptr_t)data;
        d->touched[d->n_touched] = (mn_touch){ begin, begin + (size_t)count * mn_dtype_bytes(dtype),
                                               writes };
    }
    d->n_touched++;
}

/* From the first number of a view to its last. */
static int64_t touch_view(mn_delayed *d, const mn_view *view, const int64_t shape[4],
                          bool writes) {
    int64_t count = 1;
    for (int i = 0; i < 4; i++) count += (shape[i] - 1) * view->stride[i];
    touch(d, view->data, count, view->dtype, writes);
    return count;
}

void mn_touch_product(mn_delayed *d, const mn_product_work *p) {
    touch(d, p->a, (p->M - 1) * p->a_row + p->K, p->dtype, false);
    touch(d, p->b, (p->N - 1) * p->b_row + p->K, p->dtype, false);
    touch(d, p->bias, p->N, p->c_dtype, false);
    touch(d, p->c, (p->M - 1) * p->c_row + p->N, p->c_dtype, true);
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

bool mn_touch_op(mn_delayed *d, mn_op_id op, const void *args) {
    const mn_call *call = args;
    int n_fields;
    bool ok = true;
    const mn_field *fields = mn_op_fields(op, &n_fields);
    for (int i = 0; i < n_fields; i++) {
        char buffer[MN_MAX_RANK + 1];
        const mn_in *view = (const mn_in *)((const char *)args + fields[i].offset);
        const char *axes = mn_field_axes(&fields[i], mn_args_decay(op, args), buffer);
        if (!view->data || !axes) continue;
        touch(d, view->data, extent(call, axes, view, &ok), mn_field_dtype(&fields[i], call->dtype),
              fields[i].role >= MN_ROLE_OUT);
    }
    return ok && d->n_touched <= MN_TOUCHED;
}

/* ---- works ----------------------------------------------------------------------------------- */

static bool start(mn_delayed *d, mn_few_kind kind, const int64_t shape[4]) {
    *d = (mn_delayed){ .kind = MN_DELAYED_FEW };
    d->of.few.kind = kind;
    memcpy(d->of.few.shape, shape, sizeof d->of.few.shape);
    const int64_t count = mn_count4(shape);
    return count > 0 && count <= MN_FEW_NUMBERS;
}

static void view(mn_delayed *d, int i, const mn_view *at, bool writes) {
    d->of.few.at[i] = *at;
    d->of.few.numbers[i] = touch_view(d, at, d->of.few.shape, writes);
}

static bool few_unary(mn_delayed *d, const mn_unary_work *w) {
    if (!w->y.data || !start(d, MN_FEW_UNARY, w->shape)) return false;
    d->of.few.f = (int)w->f;
    view(d, 0, &w->x, false);
    view(d, 1, &w->b, false);
    view(d, 2, &w->y, true);
    return true;
}

static bool few_pair(mn_delayed *d, const mn_pair_work *w) {
    if (!w->y.data || w->kind == MN_PAIR_SCALED) return false;
    if (!start(d, MN_FEW_PAIR, w->shape)) return false;
    d->of.few.f = (int)w->kind;
    d->of.few.scale = w->scale;
    d->of.few.shift = w->shift;
    view(d, 0, &w->a, false);
    view(d, 1, &w->b, false);
    view(d, 2, &w->y, true);
    return true;
}

/* Copies of heads are an axis of their own, along which `from` stands still. */
/* `most`: numbers, where something may end with them. */
static bool few_move(mn_delayed *d, const mn_move_work *w, int64_t most) {
    const int64_t *n = w->shape;
    if (w->folds || w->add) return false;
    const bool few = start(d, MN_FEW_MOVE, n);
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

static bool few_fill(mn_delayed *d, const mn_fill_work *w) {
    if (!start(d, MN_FEW_FILL, w->shape)) return false;
    d->of.few.shift = w->value;
    view(d, 0, &w->to, true);
    return true;
}

static bool few_rows(mn_delayed *d, const mn_rows_work *w) {
    const int64_t shape[4] = { 1, 1, w->n, w->shape[3] };
    if (w->scatters || w->table.stride[1] != w->shape[3] || !start(d, MN_FEW_ROWS, shape)) {
        return false;
    }
    d->of.few.index = w->index;
    d->of.few.at[0] = w->table;
    d->of.few.at[1] = w->rows;
    d->of.few.numbers[0] = touch_view(d, &w->table, w->shape, false);
    touch(d, w->index, w->n, MN_F32, false);    // as wide as an index
    touch(d, w->rows.data, w->n * w->shape[3], w->rows.dtype, true);
    return true;
}

bool mn_few_of_work(mn_delayed *d, mn_work_id id, const void *work, int64_t most_moved) {
    switch (id) {
    case MN_WORK_UNARY: return few_unary(d, work);
    case MN_WORK_PAIR: return few_pair(d, work);
    case MN_WORK_MOVE: return few_move(d, work, most_moved);
    case MN_WORK_FILL: return few_fill(d, work);
    case MN_WORK_ROWS: return few_rows(d, work);
    default: return false;
    }
}

/* ---- operators ------------------------------------------------------------------------------- */

/* `count` neighbours as view i. */
static void flat(mn_delayed *d, int i, const void *data, int64_t count, mn_dtype dtype,
                 bool writes) {
    const int64_t shape[4] = { 1, 1, 1, count };
    d->of.few.at[i] = mn_flat_view((void *)data, dtype, shape);
    d->of.few.numbers[i] = count;
    touch(d, data, count, dtype, writes);
}

static bool few_conv(mn_delayed *d, const mn_conv_args *p) {
    const mn_call *c = &p->call;
    const int64_t shape[4] = { 1, c->W, c->B, c->V }, tails = c->B * (c->W - 1) * c->V;
    const bool even = c->B == 1 || p->x.stride[0] == 0 || p->x.stride[0] == c->V;
    if (c->T != 1 || c->cu_seqlens || !even || !p->y.data) return false;
    if (!start(d, MN_FEW_CONV, shape)) return false;
    d->of.few.f = p->act;
    flat(d, 0, p->x.data, c->B * c->V, c->dtype, false);
    flat(d, 1, p->w.data, c->V * c->W, c->dtype, false);
    flat(d, 2, p->bias.data, c->V, c->dtype, false);
    flat(d, 3, p->tail0.data, tails, MN_F32, false);
    flat(d, 4, p->y.data, c->B * c->V, c->dtype, true);
    flat(d, 5, p->tail.data, tails, MN_F32, true);
    return true;
}

static bool few_l2_norm(mn_delayed *d, const mn_l2_norm_args *p) {
    const mn_call *c = &p->call;
    const int64_t shape[4] = { 1, 1, c->B, c->V };
    if (!p->y.data || !start(d, MN_FEW_L2_NORM, shape)) return false;
    d->of.few.f = p->kind;
    d->of.few.scale = p->eps;
    flat(d, 0, p->x.data, c->B * c->V, c->dtype, false);
    flat(d, 1, p->y.data, c->B * c->V, c->dtype, true);
    return true;
}

static bool few_rms_norm(mn_delayed *d, const mn_rms_norm_args *p) {
    const mn_call *c = &p->call;
    const int64_t shape[4] = { 1, 1, c->B, c->V };
    if (!p->y.data || !start(d, MN_FEW_RMS_NORM, shape)) return false;
    d->of.few.scale = p->eps;
    flat(d, 0, p->x.data, c->B * c->V, c->dtype, false);
    flat(d, 1, p->w.data, c->V, c->dtype, false);
    flat(d, 2, p->y.data, c->B * c->V, c->dtype, true);
    return true;
}

static bool few_gated_norm(mn_delayed *d, const mn_rms_norm_gated_args *p) {
    const mn_call *c = &p->call;
    const int64_t shape[4] = { 1, p->groups, c->B * p->groups, c->V / p->groups };
    if (!p->y.data || !start(d, MN_FEW_GATED_NORM, shape)) return false;
    d->of.few.f = p->act;
    d->of.few.order = p->order;
    d->of.few.scale = p->eps;
    flat(d, 0, p->x.data, c->B * c->V, c->dtype, false);
    flat(d, 1, p->z.data, c->B * c->V, c->dtype, false);
    flat(d, 2, p->w.data, c->V, c->dtype, false);
    flat(d, 3, p->y.data, c->B * c->V, c->dtype, true);
    return true;
}

bool mn_few_of_op(mn_delayed *d, mn_op_id op, const void *args) {
    switch (op) {
    case MN_OP_conv: return few_conv(d, args);
    case MN_OP_l2_norm: return few_l2_norm(d, args);
    case MN_OP_rms_norm: return few_rms_norm(d, args);
    case MN_OP_rms_norm_gated: return few_gated_norm(d, args);
    default: return false;
    }
}

/* The state has to stay in place: other calls take another kernel. */
bool mn_few_memory_of(mn_few_memory *out, mn_op_id op, const void *given) {
    _Alignas(16) unsigned char args[MN_MAX_ARGS_BYTES];
    memcpy(args, given, mn_op_describe(op)->args_bytes);
    if (op != MN_OP_delta && op != MN_OP_delta_net && op != MN_OP_additive) return false;
    if (((const mn_call *)given)->T != 1 || mn_validate_sizes(op, args, false) != MN_OK) {
        return false;
    }
    if (op == MN_OP_delta) {
        const mn_delta_args *p = (const mn_delta_args *)args;
        *out = (mn_few_memory){ .call = p->call, .scale = p->scale, .decay = p->decay, .q = p->q,
                                .e = p->e, .w = p->w, .v = p->v, .beta = p->beta, .g = p->g,
                                .state0 = p->state0, .o = p->o, .state = p->state };
    } else if (op == MN_OP_delta_net) {
        const mn_delta_net_args *p = (const mn_delta_net_args *)args;
        *out = (mn_few_memory){ .call = p->call, .scale = p->scale, .decay = p->decay, .q = p->q,
                                .e = p->k, .v = p->v, .beta = p->beta, .g = p->g,
                                .state0 = p->state0, .o = p->o, .state = p->state };
    } else {
        const mn_additive_args *p = (const mn_additive_args *)args;
        *out = (mn_few_memory){ .call = p->call, .scale = p->scale, .decay = p->decay, .q = p->q,
                                .w = p->k, .v = p->v, .g = p->g, .state0 = p->state0, .o = p->o,
                                .state = p->state };
    }
    return out->state0.data && out->state0.data == out->state.data;
}
