/* lower.c - works of a tape and operators as works on few rows (kernels/decode.h), and which memory
 * they access. */
#include <string.h>

#include "base/dtype.h"
#include "base/util.h"
#include "decode/defer.h"
#include "ops/validate.h"

int mn_decode_inputs_of(mn_decode_op_kind kind) {
    static const int inputs[MN_DECODE_KINDS] = {
#define INPUTS_DECODE(id, ins) [MN_DECODE_##id] = ins,
#define INPUTS_NO_DECODE(id, ins)
#define JOB(id, name, ins, outs, workspace, decode, about) INPUTS_##decode(id, ins)
#define DECODE_JOB(id, ins, outs, weights, about) [MN_DECODE_##id] = ins,
#include "kernels/elementwise.def"
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
        const size_t bytes = (size_t)count * mn_dtype_bytes(dtype);
        mn_mem_range range = mn_values_range(d->values, data, bytes);
        range.writes = writes;
        d->unnamed = d->unnamed || range.value == 0;
        d->ranges[d->n_ranges] = range;
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
    access(d, p->onto, (p->M - 1) * p->c_row + p->N, p->c_dtype, false);
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

void mn_ranges_of_attention(mn_deferred *d, const mn_decode_attention *p) {
    access(d, p->q, (p->H - 1) * p->q_step + p->K, p->dtype, false);
    access(d, p->k, (p->J - 1) * p->k_step + p->K, p->dtype, false);
    access(d, p->v, (p->J - 1) * p->v_step + p->V, p->dtype, false);
    access(d, p->inv_freq, p->turns / 2, MN_F64, false);
    access(d, p->position, 1, MN_F64, false);    // as wide as a position
    access(d, p->keys, p->capacity * p->J * p->K, p->dtype, true);
    access(d, p->values, p->capacity * p->J * p->V, p->dtype, true);
    access(d, p->parts, p->H * p->n_parts * (p->V + 2), MN_F32, true);
    access(d, p->o, p->H * p->V, p->dtype, true);
}

/* Numbers `step` apart of n branches or heads, `width` of each. */
static void access_rows(mn_deferred *d, const void *data, int64_t n, int64_t step, int64_t width,
                        mn_dtype dtype) {
    access(d, data, (n - 1) * step + width, dtype, false);
}

void mn_ranges_of_hyper(mn_deferred *d, const mn_decode_hyper *p) {
    const int64_t heads[2] = { p->Q, p->H };
    access_rows(d, p->q, p->Q, p->q_step, p->K, p->dtype);
    access_rows(d, p->k, p->Q, p->k_step, p->K, p->dtype);
    access_rows(d, p->v, p->H, p->v_step, p->V, p->dtype);
    access_rows(d, p->gv, p->H, p->gv_step, p->V, p->dtype);
    int64_t numbers[2];
    for (int i = 0; i < 2; i++) {
        const mn_decode_mix *m = &p->mix[i];
        access_rows(d, m->c, heads[i], m->c_step, m->R, p->dtype);
        access_rows(d, m->U, heads[i], m->U_step, p->P * m->R, p->dtype);
        access_rows(d, m->Vt, heads[i], m->Vt_step, m->R * p->P, p->dtype);
        access_rows(d, m->d, heads[i], m->d_step, p->P, m->wide ? MN_F32 : p->dtype);
        numbers[i] = heads[i] * p->n_parts * (MN_DECODE_ATTEND_KEYS + m->R);
    }
    access(d, p->position, 1, MN_F64, false);    // as wide as a position
    access(d, p->keys, p->capacity * p->Q * p->K, p->dtype, true);
    access(d, p->values, p->capacity * p->H * p->V, p->dtype, true);
    access(d, p->scores, numbers[0], MN_F32, true);
    access(d, p->mixed, numbers[1] + p->H * p->n_parts, MN_F32, true);
    access(d, p->parts, p->H * p->n_parts * p->V, MN_F32, true);
    access(d, p->o, p->H * p->V, p->dtype, true);
}

/* ---- works ----------------------------------------------------------------------------------- */

/* `sequences`: what a launch tells apart, each with its part of the elements; 0: one does all. */
static bool start(mn_deferred *d, mn_decode_op_kind kind, const int64_t shape[4],
                  int64_t sequences) {
    *d = (mn_deferred){ .kind = MN_DEFERRED_SMALL, .values = d->values };
    d->of.few.kind = kind;
    memcpy(d->of.few.shape, shape, sizeof d->of.few.shape);
    const int64_t count = mn_count4(shape);
    return count > 0 && count <= MN_DECODE_MAX_NUMEL * mn_max(sequences, 1);
}

static void view(mn_deferred *d, int i, const mn_view *at, bool writes) {
    d->of.few.at[i] = *at;
    d->of.few.elements[i] = access_view(d, at, d->of.few.shape, writes);
}

/* decode_<name> for jobs of elementwise.def. `most`: elements of a move, where something may end
 * with them. */
static bool decode_unary(mn_deferred *d, const mn_unary_params *w, int64_t most,
                         int64_t sequences) {
    (void)most;
    if (!w->y.data || !start(d, MN_DECODE_UNARY, w->shape, sequences)) return false;
    d->of.few.f = (int)w->f;
    view(d, 0, &w->x, false);
    view(d, 1, &w->b, false);
    view(d, 2, &w->y, true);
    return true;
}

static bool decode_pair(mn_deferred *d, const mn_pair_params *w, int64_t most, int64_t sequences) {
    (void)most;
    if (!w->y.data || w->kind == MN_PAIR_SCALED) return false;
    if (!start(d, MN_DECODE_PAIR, w->shape, sequences)) return false;
    d->of.few.f = (int)w->kind;
    d->of.few.scale = w->scale;
    d->of.few.shift = w->shift;
    view(d, 0, &w->a, false);
    view(d, 1, &w->b, false);
    view(d, 2, &w->y, true);
    return true;
}

/* Copies of heads are an axis of their own, along which `from` stands still. */
static bool decode_move(mn_deferred *d, const mn_move_params *w, int64_t most,
                        int64_t sequences) {
    const int64_t *n = w->shape;
    if (w->folds || w->add || (w->times > 1 && sequences > 0)) return false;
    const bool few = start(d, MN_DECODE_MOVE, n, sequences);
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

static bool decode_fill(mn_deferred *d, const mn_fill_params *w, int64_t most, int64_t sequences) {
    (void)most;
    if (!start(d, MN_DECODE_FILL, w->shape, sequences)) return false;
    d->of.few.shift = w->value;
    view(d, 0, &w->to, true);
    return true;
}

static bool decode_rows(mn_deferred *d, const mn_rows_params *w, int64_t most, int64_t sequences) {
    const int64_t shape[4] = { 1, 1, w->n, w->shape[3] };
    (void)most;
    if (w->quant || sequences > 0) return false;
    if (w->scatters || w->table.stride[1] != w->shape[3] || !start(d, MN_DECODE_ROWS, shape, 0)) {
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

static bool elementwise_of(mn_deferred *d, mn_elementwise_id id, const void *work,
                           int64_t max_move, int64_t sequences) {
    switch (id) {
#define CASE_DECODE(id, name)                                                                      \
    case MN_ELEMENTWISE_##id: return decode_##name(d, work, max_move, sequences);
#define CASE_NO_DECODE(id, name)
#define JOB(id, name, ins, outs, workspace, decode, about) CASE_##decode(id, name)
#include "kernels/elementwise.def"
    default: return false;
    }
}

/* ---- one sequence of several ----------------------------------------------------------------- */

/* Elements that a view has of a shape, from the first to the last. */
static int64_t span_of(const mn_view *view, const int64_t shape[4]) {
    int64_t count = 1;
    for (int i = 0; i < 4; i++) count += (shape[i] - 1) * view->stride[i];
    return count;
}

/* The part of one sequence of a work that goes element by element: along the first axis, or the
 * second where rows of all sequences lie there. Works without such an axis are the same for all. */
static bool slice_elements(mn_decode_op *few, int64_t sequences) {
    int axis = -1;
    if (few->shape[0] == sequences) axis = 0;
    else if (few->shape[0] == 1 && few->shape[1] > 1 && few->shape[1] % sequences == 0) axis = 1;
    else if (few->shape[0] != 1 || few->shape[1] != 1) return false;
    const int64_t part = axis >= 0 ? few->shape[axis] / sequences : 1;
    if (axis >= 0) few->shape[axis] = part;
    for (int i = 0; i < MN_DECODE_VIEWS; i++) {
        mn_view *view = &few->at[i];
        if (!view->data) continue;
        if (axis >= 0) {
            const int64_t step = view->stride[axis] * part;
            few->advance[i] = step * (int64_t)mn_dtype_bytes(view->dtype);
        }
        few->elements[i] = span_of(view, few->shape);
    }
    return axis < 0 || few->advance[mn_decode_inputs_of(few->kind)] != 0;
}

/* Of an operator: all views but weights have a part for each sequence. */
static bool slice_rows(mn_decode_op *few, int64_t sequences) {
    static const int weights[MN_DECODE_KINDS] = {
#define DECODE_JOB(id, ins, outs, weights, about) [MN_DECODE_##id] = weights,
#include "kernels/elementwise.def"
    };
    if (few->shape[2] % sequences != 0) return false;
    few->shape[2] /= sequences;
    for (int i = 0; i < MN_DECODE_VIEWS; i++) {
        mn_view *view = &few->at[i];
        if (!view->data || weights[few->kind] >> i & 1) continue;
        const bool apart = few->kind == MN_DECODE_CONV && i == 0;
        const int64_t step = apart ? view->stride[0] : few->elements[i] / sequences;
        few->advance[i] = step * (int64_t)mn_dtype_bytes(view->dtype);
        few->elements[i] = apart ? few->shape[3] : step;
    }
    return true;
}

static bool slice(mn_deferred *d, int64_t sequences) {
    if (sequences == 0) return true;
    const bool sliced = d->of.few.kind <= MN_DECODE_FILL ? slice_elements(&d->of.few, sequences)
                                                         : slice_rows(&d->of.few, sequences);
    return sliced && mn_count4(d->of.few.shape) <= MN_DECODE_MAX_NUMEL;
}

/* View i of one sequence. */
static mn_mem_range part_of(const mn_values *values, const mn_decode_op *few, int i) {
    const size_t bytes = (size_t)few->elements[i] * mn_dtype_bytes(few->at[i].dtype);
    mn_mem_range range = mn_values_range(values, few->at[i].data, bytes);
    range.writes = i >= mn_decode_inputs_of(few->kind);
    return range;
}

/* Whether view i of one work and view k of another meet nowhere but within each sequence, where
 * either writes. What is the same for all sequences is made by each of them. */
static bool meet_within(const mn_values *values, const mn_decode_op *later, int i,
                        const mn_decode_op *earlier, int k, int64_t sequences) {
    const mn_mem_range a = part_of(values, later, i), b = part_of(values, earlier, k);
    const int64_t a_end = a.end + (sequences - 1) * later->advance[i];
    const int64_t b_end = b.end + (sequences - 1) * earlier->advance[k];
    if (!a.writes && !b.writes) return true;
    if (a.value != b.value || a.begin >= b_end || b.begin >= a_end) return true;
    if (!a.writes && earlier->advance[k] == 0) return true;
    const int64_t first = mn_min(a.begin, b.begin), last = mn_max(a.end, b.end);
    return later->advance[i] == earlier->advance[k] && last - first <= later->advance[i];
}

bool mn_decode_follows(const mn_values *values, const mn_decode_op *later,
                       const mn_decode_op *earlier, int64_t sequences) {
    for (int i = 0; i < MN_DECODE_VIEWS; i++) {
        for (int k = 0; k < MN_DECODE_VIEWS && later->at[i].data; k++) {
            if (!earlier->at[k].data) continue;
            if (!meet_within(values, later, i, earlier, k, sequences)) return false;
        }
    }
    return true;
}

bool mn_decode_of_elementwise(mn_deferred *d, mn_elementwise_id id, const void *work,
                              int64_t max_move, int64_t sequences) {
    return elementwise_of(d, id, work, max_move, sequences) && slice(d, sequences);
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

/* Rows of x may lie apart where a launch tells sequences apart. */
static bool decode_conv(mn_deferred *d, const mn_conv_args *p, int64_t sequences) {
    const mn_call *c = &p->call;
    const int64_t shape[4] = { 1, c->W, c->B, c->V }, tails = c->B * (c->W - 1) * c->V;
    const int64_t row = p->x.stride[0] ? p->x.stride[0] : c->V;
    const bool even = c->B == 1 || row == c->V || sequences == c->B;
    if (c->T != 1 || c->cu_seqlens || !even || !p->y.data) return false;
    (void)start(d, MN_DECODE_CONV, shape, sequences);
    if (c->B * c->V <= 0 || c->B * c->V > MN_DECODE_MAX_NUMEL * mn_max(sequences, 1)) return false;
    d->of.few.f = p->act;
    flat(d, 0, p->x.data, (c->B - 1) * row + c->V, c->dtype, false);
    d->of.few.at[0].stride[0] = row;
    flat(d, 1, p->w.data, c->V * c->W, c->dtype, false);
    flat(d, 2, p->bias.data, c->V, c->dtype, false);
    flat(d, 3, p->tail0.data, tails, MN_F32, false);
    flat(d, 4, p->y.data, c->B * c->V, c->dtype, true);
    flat(d, 5, p->tail.data, tails, MN_F32, true);
    return true;
}

static bool decode_l2_norm(mn_deferred *d, const mn_l2_norm_args *p, int64_t sequences) {
    const mn_call *c = &p->call;
    const int64_t shape[4] = { 1, 1, c->B, c->V };
    if (!p->y.data || !start(d, MN_DECODE_L2_NORM, shape, sequences)) return false;
    d->of.few.f = p->kind;
    d->of.few.scale = p->eps;
    flat(d, 0, p->x.data, c->B * c->V, c->dtype, false);
    flat(d, 1, p->y.data, c->B * c->V, c->dtype, true);
    return true;
}

static bool decode_rms_norm(mn_deferred *d, const mn_rms_norm_args *p, int64_t sequences) {
    const mn_call *c = &p->call;
    const int64_t shape[4] = { 1, 1, c->B, c->V };
    if (!p->y.data || !start(d, MN_DECODE_RMS_NORM, shape, sequences)) return false;
    d->of.few.scale = p->eps;
    flat(d, 0, p->x.data, c->B * c->V, c->dtype, false);
    flat(d, 1, p->w.data, c->V, c->dtype, false);
    flat(d, 2, p->y.data, c->B * c->V, c->dtype, true);
    return true;
}

static bool decode_gated_norm(mn_deferred *d, const mn_rms_norm_gated_args *p, int64_t sequences) {
    const mn_call *c = &p->call;
    const int64_t shape[4] = { 1, p->groups, c->B * p->groups, c->V / p->groups };
    if (!p->y.data || !start(d, MN_DECODE_GATED_NORM, shape, sequences)) return false;
    d->of.few.f = p->act;
    d->of.few.order = p->order;
    d->of.few.scale = p->eps;
    flat(d, 0, p->x.data, c->B * c->V, c->dtype, false);
    flat(d, 1, p->z.data, c->B * c->V, c->dtype, false);
    flat(d, 2, p->w.data, c->V, c->dtype, false);
    flat(d, 3, p->y.data, c->B * c->V, c->dtype, true);
    return true;
}

static bool small_op_of(mn_deferred *d, mn_op_id op, const void *args, int64_t sequences) {
    switch (op) {
    case MN_OP_conv: return decode_conv(d, args, sequences);
    case MN_OP_l2_norm: return decode_l2_norm(d, args, sequences);
    case MN_OP_rms_norm: return decode_rms_norm(d, args, sequences);
    case MN_OP_rms_norm_gated: return decode_gated_norm(d, args, sequences);
    default: return false;
    }
}

bool mn_decode_of_op(mn_deferred *d, mn_op_id op, const void *args, int64_t sequences) {
    return small_op_of(d, op, args, sequences) && slice(d, sequences);
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
