/* shadow_ops.c - operations on tags: what each element of a result is computed from. */
#include <float.h>
#include <stdlib.h>
#include <string.h>

#include "base/dtype.h"
#include "base/util.h"
#include "ops/validate.h"
#include "support/decode/shadow.h"
#include "tape/tape_internal.h"

/* What begins a tag. */
enum { T_UNARY = 101, T_TIMES, T_PAIR, T_ROUND, T_WIDE, T_FILL, T_ROW, T_ATTEND, T_RMS,
       T_GATED, T_L2, T_COLUMN, T_TABLE, T_CONV, T_STATE, T_STEP, T_OP, T_ONTO, T_NONE, T_HYPER };

static uint64_t bits(double x) {
    const float narrow = (float)x;
    uint32_t out;
    memcpy(&out, &narrow, sizeof out);
    return out;
}

/* ---- elements -------------------------------------------------------------------------------- */

uint64_t shadow_cell(int kind, int f, double scale, double shift, uint64_t a, uint64_t b) {
    if (kind == MN_DECODE_UNARY) {
        const uint64_t y = shadow_mix(shadow_mix(T_UNARY, (uint64_t)f), a);
        return b ? shadow_mix(shadow_mix(T_TIMES, y), b) : y;
    }
    if (kind == MN_DECODE_MOVE) return a;
    if (kind == MN_DECODE_FILL) return shadow_mix(T_FILL, bits(shift));
    uint64_t y = shadow_mix(shadow_mix(T_PAIR, (uint64_t)f), bits(scale));
    const bool swap = (f == MN_PAIR_ADD || f == MN_PAIR_MULTIPLY) && a > b;
    y = shadow_mix(y, bits(shift));
    return shadow_mix(shadow_mix(y, swap ? b : a), swap ? a : b);
}

/* Numbers are moved to more bits as they are; other results of float32 are not rounded. */
uint64_t shadow_stored(int kind, uint64_t tag, mn_dtype from, mn_dtype to) {
    if (kind == MN_DECODE_MOVE) return from == MN_F32 && to == MN_BF16 ? shadow_mix(T_ROUND, tag)
                                                                       : tag;
    return to == MN_F32 ? shadow_mix(T_WIDE, tag) : tag;
}

uint64_t shadow_row(const uint64_t *tags, int64_t n) {
    uint64_t row = T_ROW;
    for (int64_t i = 0; i < n; i++) row = shadow_mix(row, tags[i]);
    return row;
}

uint64_t shadow_rms(double eps, uint64_t of_row, uint64_t x, uint64_t w) {
    return shadow_mix(shadow_mix(shadow_mix(shadow_mix(T_RMS, bits(eps)), of_row), x), w);
}

uint64_t shadow_gated(double eps, int sigmoid, int order, uint64_t of_row, uint64_t x, uint64_t z,
                      uint64_t w) {
    const uint64_t gate = (uint64_t)(sigmoid + 2 * order);
    const uint64_t how = shadow_mix(shadow_mix(T_GATED, bits(eps)), gate);
    return shadow_mix(shadow_mix(shadow_mix(shadow_mix(how, of_row), x), z), w);
}

uint64_t shadow_l2(float plus, float most, uint64_t of_row, uint64_t x) {
    const uint64_t how = shadow_mix(shadow_mix(T_L2, bits(plus)), bits(most));
    return shadow_mix(shadow_mix(how, of_row), x);
}

uint64_t shadow_column(uint64_t of_row, const void *weights, int64_t K, uint64_t bias) {
    uint64_t y = shadow_mix(shadow_mix(T_COLUMN, of_row), shadow_get(weights));
    y = shadow_mix(y, shadow_get((const uint16_t *)weights + K - 1));
    return bias ? shadow_mix(y, bias) : y;
}

uint64_t shadow_table(const int32_t *index, const void *first_row, int64_t row) {
    const uint64_t from = shadow_mix(shadow_get(index), shadow_get(first_row));
    return shadow_mix(shadow_mix(T_TABLE, from), (uint64_t)row);
}

uint64_t shadow_conv(uint64_t *tail, int act, uint64_t x, const uint64_t *tail0, int64_t W,
                     const void *taps, uint64_t bias) {
    uint64_t y = shadow_mix(shadow_mix(shadow_mix(T_CONV, act != 0), x), shadow_get(taps));
    y = shadow_mix(y, bias);
    for (int64_t i = 0; i + 1 < W; i++) y = shadow_mix(y, tail0 ? tail0[i] : T_NONE);
    for (int64_t i = 0; i + 2 < W; i++) tail[i] = tail0 ? tail0[i + 1] : T_NONE;
    tail[W - 2] = x;
    return y;
}

uint64_t shadow_recurrence(uint64_t *state, const shadow_column_of_state *c) {
    uint64_t all = shadow_mix(shadow_mix(T_STATE, bits(c->scale)), c->delta_rule);
    const uint64_t inputs[] = { c->q, c->key, c->other, c->v, c->beta, c->g };
    for (size_t i = 0; i < MN_COUNTOF(inputs); i++) all = shadow_mix(all, inputs[i]);
    all = shadow_mix(all, shadow_row(state, c->K));
    for (int64_t k = 0; k < c->K; k++) state[k] = shadow_mix(all, (uint64_t)k + 1);
    return all;
}

/* ---- small works ----------------------------------------------------------------------------- */

/* Writes that are made when all has been read. */
typedef struct later {
    void **at;
    uint64_t *tag;
    int64_t n, most;
} later;

static void put_later(later *l, void *at, uint64_t tag) {
    if (l->n == l->most) {
        l->most = 2 * l->most + 64;
        l->at = realloc(l->at, (size_t)l->most * sizeof *l->at);
        l->tag = realloc(l->tag, (size_t)l->most * sizeof *l->tag);
        if (!l->at || !l->tag) abort();
    }
    l->at[l->n] = at;
    l->tag[l->n++] = tag;
}

static void put_now(later *l) {
    for (int64_t i = 0; i < l->n; i++) shadow_put(l->at[i], l->tag[i]);
    free(l->at);
    free(l->tag);
}

static void *at_of(const mn_view *view, const int64_t shape[4], int64_t i) {
    const int64_t x = i % shape[3], h = i / shape[3] % shape[2], row = i / shape[3] / shape[2];
    const int64_t t = row % shape[1], b = row / shape[1];
    const int64_t at = b * view->stride[0] + t * view->stride[1] + h * view->stride[2] +
                       x * view->stride[3];
    return (char *)view->data + at * (int64_t)mn_dtype_bytes(view->dtype);
}

static char *flat_at(const mn_view *view, int64_t i) {
    return (char *)view->data + i * (int64_t)mn_dtype_bytes(view->dtype);
}

static uint64_t read_at(const mn_view *view, const int64_t shape[4], int64_t i) {
    return view->data ? shadow_get(at_of(view, shape, i)) : 0;
}

static void small_elements(later *l, const mn_decode_op *w, int64_t begin, int64_t end) {
    const int inputs = w->kind == MN_DECODE_FILL ? 0 : w->kind == MN_DECODE_MOVE ? 1 : 2;
    const mn_view *to = &w->at[inputs];
    for (int64_t i = begin; i < end; i++) {
        const uint64_t a = inputs > 0 ? read_at(&w->at[0], w->shape, i) : 0;
        const uint64_t b = inputs > 1 ? read_at(&w->at[1], w->shape, i) : 0;
        const uint64_t y = shadow_cell(w->kind, w->f, w->scale, w->shift, a, b);
        put_later(l, at_of(to, w->shape, i), shadow_stored(w->kind, y, w->at[0].dtype, to->dtype));
    }
}

static void small_conv(later *l, const mn_decode_op *w, int64_t begin, int64_t end) {
    const int64_t W = w->shape[1], V = w->shape[3];
    for (int64_t i = begin; i < end; i++) {
        const int64_t row = i / V, c = i % V;
        uint64_t tail0[16], tail[16];
        for (int64_t m = 0; m + 1 < W && w->at[3].data; m++) {
            tail0[m] = shadow_get(flat_at(&w->at[3], (row * (W - 1) + m) * V + c));
        }
        const uint64_t bias = w->at[2].data ? shadow_get(flat_at(&w->at[2], c)) : 0;
        const uint64_t x = shadow_get(flat_at(&w->at[0], row * w->at[0].stride[0] + c));
        const uint64_t y = shadow_conv(tail, w->f, x, w->at[3].data ? tail0 : NULL, W,
                                       flat_at(&w->at[1], c * W), bias);
        put_later(l, flat_at(&w->at[4], row * V + c), y);
        for (int64_t m = 0; m + 1 < W && w->at[5].data; m++) {
            put_later(l, flat_at(&w->at[5], (row * (W - 1) + m) * V + c), tail[m]);
        }
    }
}

static void small_norm(later *l, const mn_decode_op *w, int64_t begin, int64_t end) {
    const int64_t width = w->shape[3];
    const bool root = w->f == MN_DECODE_ROOT;
    uint64_t *x = malloc((size_t)width * sizeof *x);
    if (!x) abort();
    for (int64_t r = begin; r < end; r++) {
        for (int64_t i = 0; i < width; i++) x[i] = shadow_get(flat_at(&w->at[0], r * width + i));
        const uint64_t row = shadow_row(x, width);
        for (int64_t i = 0; i < width; i++) {
            const int64_t at = r * width + i, group = r % mn_max(w->shape[1], 1) * width + i;
            uint64_t y;
            if (w->kind == MN_DECODE_L2_NORM) {
                y = shadow_l2(root ? (float)w->scale : 0.0f,
                              root ? FLT_MAX : 1.0f / (float)w->scale, row, x[i]);
            } else if (w->kind == MN_DECODE_RMS_NORM) {
                y = shadow_rms(w->scale, row, x[i], shadow_get(flat_at(&w->at[1], i)));
            } else {
                const uint64_t z = w->at[1].data ? shadow_get(flat_at(&w->at[1], at)) : 0;
                const uint64_t by = w->at[2].data ? shadow_get(flat_at(&w->at[2], group)) : 0;
                y = shadow_gated(w->scale, w->f == MN_DECODE_SIGMOID, w->order, row, x[i], z, by);
            }
            const int to = w->kind == MN_DECODE_L2_NORM ? 1 : w->kind == MN_DECODE_RMS_NORM ? 2 : 3;
            put_later(l, flat_at(&w->at[to], at), y);
        }
    }
    free(x);
}

static void small_rows(later *l, const mn_decode_op *w, int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; r++) {
        for (int64_t i = 0; i < w->shape[3]; i++) {
            put_later(l, flat_at(&w->at[1], r * w->shape[3] + i),
                      shadow_table(w->index + r, flat_at(&w->at[0], i), w->at[0].stride[1]));
        }
    }
}

int64_t shadow_small_units(const mn_decode_op *w) {
    if (w->kind <= MN_DECODE_FILL) return mn_count4(w->shape);
    return w->kind == MN_DECODE_CONV ? w->shape[2] * w->shape[3] : w->shape[2];
}

void shadow_small(const mn_decode_op *w, int64_t begin, int64_t end) {
    later l = { 0 };
    if (w->kind <= MN_DECODE_FILL) small_elements(&l, w, begin, end);
    else if (w->kind == MN_DECODE_ROWS) small_rows(&l, w, begin, end);
    else if (w->kind == MN_DECODE_CONV) small_conv(&l, w, begin, end);
    else small_norm(&l, w, begin, end);
    put_now(&l);
}

/* ---- works of a tape ------------------------------------------------------------------------- */

static void unary(const mn_unary_params *p) {
    mn_decode_op w = { .kind = MN_DECODE_UNARY, .f = (int)p->f, .at = { p->x, p->b, p->y } };
    memcpy(w.shape, p->shape, sizeof w.shape);
    shadow_small(&w, 0, mn_count4(w.shape));
}

static void pair(const mn_pair_params *p) {
    mn_decode_op w = { .kind = MN_DECODE_PAIR, .f = (int)p->kind, .at = { p->a, p->b, p->y },
                       .scale = p->scale, .shift = p->shift };
    memcpy(w.shape, p->shape, sizeof w.shape);
    if (p->kind == MN_PAIR_SCALED) {    // a + b c
        later l = { 0 };
        for (int64_t i = 0; i < mn_count4(p->shape); i++) {
            const uint64_t more = shadow_cell(MN_DECODE_PAIR, MN_PAIR_MULTIPLY, 0.0, 0.0,
                                              read_at(&p->b, p->shape, i),
                                              read_at(&p->c, p->shape, i));
            const uint64_t y = shadow_cell(MN_DECODE_PAIR, MN_PAIR_SCALED, 0.0, 0.0,
                                           read_at(&p->a, p->shape, i), more);
            put_later(&l, at_of(&p->y, p->shape, i), y);
        }
        put_now(&l);
        return;
    }
    shadow_small(&w, 0, mn_count4(w.shape));
}

/* Head j of `to` is head j / times of `from`. */
static void move(const mn_move_params *p) {
    const int64_t *n = p->shape, heads[4] = { n[0], n[1], n[2] / p->times, n[3] };
    later l = { 0 };
    if (p->folds || p->add) shadow_fail("a move that adds is no part of a step");
    for (int64_t i = 0; i < mn_count4(n); i++) {
        const int64_t x = i % n[3], h = i / n[3] % n[2], row = i / n[3] / n[2];
        const int64_t from = (row * heads[2] + h / p->times) * n[3] + x;
        put_later(&l, at_of(&p->to, n, i),
                  shadow_stored(MN_DECODE_MOVE, read_at(&p->from, heads, from), p->from.dtype,
                                p->to.dtype));
    }
    put_now(&l);
}

static void fill(const mn_fill_params *p) {
    mn_decode_op w = { .kind = MN_DECODE_FILL, .at = { p->to }, .shift = p->value };
    memcpy(w.shape, p->shape, sizeof w.shape);
    shadow_small(&w, 0, mn_count4(w.shape));
}

static void rows(const mn_rows_params *p) {
    mn_decode_op w = { .kind = MN_DECODE_ROWS, .at = { p->table, p->rows }, .index = p->index,
                       .shape = { 1, 1, p->n, p->shape[3] } };
    if (p->quant || p->scatters) shadow_fail("these rows are no part of a step here");
    shadow_small(&w, 0, p->n);
}

void shadow_elementwise(int id, const void *work) {
    switch (id) {
    case MN_ELEMENTWISE_UNARY: unary(work); break;
    case MN_ELEMENTWISE_PAIR: pair(work); break;
    case MN_ELEMENTWISE_MOVE: move(work); break;
    case MN_ELEMENTWISE_FILL: fill(work); break;
    case MN_ELEMENTWISE_ROWS: rows(work); break;
    default: shadow_fail("work %d of a tape is not known here", id);
    }
}

/* ---- products -------------------------------------------------------------------------------- */

void shadow_gemm(const mn_gemm_problem *p) {
    const int64_t each = (int64_t)mn_dtype_bytes(p->dtype);
    const int64_t out = (int64_t)mn_dtype_bytes(p->c_dtype);
    uint64_t *row = malloc((size_t)p->K * sizeof *row);
    later l = { 0 };
    if (!row) abort();
    if (!p->b_transposed || p->a_transposed || p->accumulate || p->quant) {
        shadow_fail("a product of another kind is no part of a step here");
    }
    for (int64_t m = 0; m < p->M; m++) {
        for (int64_t k = 0; k < p->K; k++) {
            row[k] = shadow_get((const char *)p->a + (m * p->a_row + k) * each);
        }
        const uint64_t of_row = shadow_row(row, p->K);
        for (int64_t n = 0; n < p->N; n++) {
            const int64_t at = (m * p->c_row + n) * out;
            const char *weights = (const char *)p->b + n * p->b_row * each;
            const uint64_t bias = p->bias ? shadow_get((const char *)p->bias + n * out) : 0;
            uint64_t y = shadow_column(of_row, weights, p->K, bias);
            if (p->onto) {
                y = shadow_mix(shadow_mix(T_ONTO, y), shadow_get((const char *)p->onto + at));
            }
            put_later(&l, (char *)p->c + at,
                      p->c_dtype == p->dtype ? y : shadow_mix(T_WIDE, y));
        }
    }
    put_now(&l);
    free(row);
}

/* ---- operators ------------------------------------------------------------------------------- */

/* A tensor of an operator, of one token: where element (i of each axis) lies. */
typedef struct tensor {
    char *data;
    char axes[MN_MAX_RANK + 1];
    int64_t n[MN_MAX_RANK], step[MN_MAX_RANK], count;
    int rank, each;
    bool out;
} tensor;

static bool tensor_of(tensor *t, mn_op_id op, const void *args, int field) {
    int n_fields;
    bool ok = true;
    const mn_field *f = &mn_op_fields(op, &n_fields)[field];
    const mn_in *view = (const mn_in *)((const char *)args + f->offset);
    const char *axes = mn_field_axes(f, mn_args_decay(op, args), t->axes);
    if (!axes || !view->data) return false;
    memmove(t->axes, axes, strlen(axes) + 1);
    t->data = (char *)(uintptr_t)view->data;
    t->each = (int)mn_dtype_bytes(mn_field_dtype(f, ((const mn_call *)args)->dtype));
    t->out = f->role >= MN_ROLE_OUT;
    t->rank = (int)strlen(t->axes);
    t->count = 1;
    for (int i = t->rank - 1; i >= 0; i--) {
        const bool square = t->axes[i + 1] == t->axes[i];
        t->n[i] = mn_axis_size(args, t->axes[i], &ok);
        t->step[i] = t->count;
        if (i <= 2 && strchr("HJQ", t->axes[i]) && !square) t->step[i] = view->stride[2];
        if (i <= 1 && strchr("TL", t->axes[i])) t->step[i] = view->stride[1];
        t->count *= t->n[i];
    }
    if (!ok) shadow_fail("%s: axes %s", mn_op_describe(op)->name, t->axes);
    return ok;
}

/* Element number i in the order of axes, and its place along one of them; -1: there is none. */
static char *tensor_at(const tensor *t, int64_t i, int64_t place[MN_MAX_RANK]) {
    int64_t at = 0;
    for (int a = t->rank - 1; a >= 0; a--) {
        place[a] = i % t->n[a];
        at += place[a] * t->step[a];
        i /= t->n[a];
    }
    return t->data + at * t->each;
}

static int64_t along(const tensor *t, const int64_t place[MN_MAX_RANK], char letter) {
    for (int a = 0; a < t->rank; a++) {
        if (t->axes[a] == letter) return place[a];
    }
    return -1;
}

static uint64_t numbers_of(mn_op_id op, const void *args) {
    int n;
    const mn_param *params = mn_op_params(op, &n);
    uint64_t all = shadow_mix(T_OP, (uint64_t)op);
    for (int i = 0; i < n; i++) {
        const char *at = (const char *)args + params[i].offset;
        if (params[i].kind == MN_PARAM_REAL) all = shadow_mix(all, bits(*(const double *)at));
        else if (params[i].kind == MN_PARAM_INT) all = shadow_mix(all, *(const uint64_t *)at);
        else all = shadow_mix(all, *(const unsigned *)at);
    }
    return all;
}

/* Of all inputs, what belongs to head h, column v and group g, each -1 where that is no matter. */
static uint64_t inputs_of(mn_op_id op, const void *args, int64_t h, int64_t v, int64_t g) {
    const mn_call *c = args;
    uint64_t all = numbers_of(op, args);
    int n;
    mn_op_fields(op, &n);
    for (int i = 0; i < n; i++) {
        tensor t;
        if (!tensor_of(&t, op, args, i) || t.out) continue;
        all = shadow_mix(all, (uint64_t)i);
        if (v == -2 && strchr(t.axes, 'V')) continue;
        for (int64_t k = 0; k < t.count; k++) {
            int64_t place[MN_MAX_RANK];
            char *at = tensor_at(&t, k, place);
            const int64_t head = along(&t, place, 'H'), key = along(&t, place, 'J');
            const int64_t column = along(&t, place, 'V'), group = along(&t, place, 'G');
            if (h >= 0 && head >= 0 && head != h) continue;
            if (h >= 0 && key >= 0 && key != h * c->J / mn_max(c->H, 1)) continue;
            if (v >= 0 && column >= 0 && column != v) continue;
            if (g >= 0 && group >= 0 && group != g) continue;
            all = shadow_mix(all, shadow_get(at));
        }
    }
    return all;
}

uint64_t shadow_made(mn_op_id op, const void *args, const shadow_input *inputs, int n) {
    uint64_t all = numbers_of(op, args);
    for (int i = 0; i < n; i++) {
        all = shadow_mix(all, (uint64_t)i);
        for (int64_t k = 0; k < inputs[i].count; k++) all = shadow_mix(all, inputs[i].tags[k]);
    }
    return all;
}

uint64_t shadow_made_at(uint64_t made, mn_op_id op, const char *field, int64_t place) {
    int n, i = 0;
    const mn_field *fields = mn_op_fields(op, &n);
    while (i < n && strcmp(fields[i].name, field) != 0) i++;
    if (i == n) shadow_fail("there is no %s", field);
    return shadow_mix(shadow_mix(made, (uint64_t)i), (uint64_t)place);
}

/* Which results: all; those of columns; those that belong to all columns of a head. */
typedef enum which { ALL, OF_COLUMNS, OF_HEADS } which;

/* Results of head h in [begin, end) of its columns, and where there are groups of group g. */
static void write_piece(later *l, mn_op_id op, const void *args, int64_t h, int64_t begin,
                        int64_t end, int64_t g, which results) {
    int n;
    mn_op_fields(op, &n);
    uint64_t *of = malloc((size_t)(end - begin + 1) * sizeof *of);
    if (!of) abort();
    for (int64_t v = begin; v < end; v++) of[v - begin] = inputs_of(op, args, h, v, g);
    const uint64_t of_group = inputs_of(op, args, h, -2, g);
    for (int i = 0; i < n; i++) {
        tensor t;
        if (!tensor_of(&t, op, args, i) || !t.out) continue;
        for (int64_t k = 0; k < t.count; k++) {
            int64_t place[MN_MAX_RANK];
            char *at = tensor_at(&t, k, place);
            const int64_t head = along(&t, place, 'H'), column = along(&t, place, 'V');
            const int64_t group = along(&t, place, 'G');
            if ((head >= 0 && head != h) || (g >= 0 && group >= 0 && group != g)) continue;
            if (column >= 0 && (column < begin || column >= end)) continue;
            if (results == (column >= 0 ? OF_HEADS : OF_COLUMNS)) continue;
            const uint64_t from = column >= 0 ? of[column - begin] : of_group;
            put_later(l, at, shadow_mix(shadow_mix(from, (uint64_t)i), (uint64_t)k));
        }
    }
    free(of);
}

enum { OWN, SHARED };

static const struct step_row {
    mn_op_id op;
    int columns, results;
} step_rows[] = {
#define DECODE_STEP(op, folder, columns, results, memory) { MN_OP_##op, columns, results },
#include "kernels/decode_steps.def"
#undef DECODE_STEP
};

/* As decode_steps.def has it: so many columns of a head, or a group of it. */
void shadow_step(int step, const void *args, int64_t head, int64_t column) {
    const mn_call *c = args;
    const mn_op_id op = step_rows[step].op;
    const int64_t columns = step_rows[step].columns;
    const bool shares = step_rows[step].results == SHARED;
    later l = { 0 };
    if (column < 0) {
        if (!shares) shadow_fail("a step of no columns");
        write_piece(&l, op, args, head, 0, 0, -1, OF_HEADS);
    } else if (columns > 0) {
        write_piece(&l, op, args, head, column, mn_min(column + columns, c->V), -1,
                    shares ? OF_COLUMNS : ALL);
    } else {
        const int64_t G = mn_max(c->G, 1);
        write_piece(&l, op, args, head, (column * c->V + G - 1) / G,
                    ((column + 1) * c->V + G - 1) / G, column, ALL);
    }
    put_now(&l);
}

static int64_t step_columns(mn_op_id op) {
    for (size_t i = 0; i < MN_COUNTOF(step_rows); i++) {
        if (step_rows[i].op == op) return step_rows[i].columns;
    }
    return -1;
}

/* All pieces read before any is written: they are independent. */
static void all_steps(later *l, mn_op_id op, const void *args, int64_t columns) {
    const mn_call *c = args;
    const int64_t G = mn_max(c->G, 1);
    for (int64_t h = 0; h < mn_max(c->H, 1); h++) {
        if (columns > 0) write_piece(l, op, args, h, 0, c->V, -1, ALL);
        for (int64_t g = 0; g < G && columns == 0; g++) {
            write_piece(l, op, args, h, (g * c->V + G - 1) / G, ((g + 1) * c->V + G - 1) / G, g,
                        ALL);
        }
    }
}

/* Any other operator: every result of every input. */
static void any_op(later *l, mn_op_id op, const void *args) {
    const uint64_t all = inputs_of(op, args, -1, -1, -1);
    int n;
    mn_op_fields(op, &n);
    for (int i = 0; i < n; i++) {
        tensor t;
        if (!tensor_of(&t, op, args, i) || !t.out) continue;
        for (int64_t k = 0; k < t.count; k++) {
            int64_t place[MN_MAX_RANK];
            put_later(l, tensor_at(&t, k, place),
                      shadow_mix(shadow_mix(all, (uint64_t)i), (uint64_t)k));
        }
    }
}

/* ---- operators that stages know by name ------------------------------------------------------ */

typedef struct state_args {
    const mn_call *call;
    double scale;
    int decay;
    const mn_in *q, *e, *w, *v, *beta, *g, *state0;
    const mn_out *o, *state;
} state_args;

static bool state_of(state_args *s, mn_op_id op, const void *args) {
    static const mn_in none;
#define COMMON(p) .call = &p->call, .scale = p->scale, .decay = p->decay, .q = &p->q, .v = &p->v, \
    .g = &p->g, .state0 = &p->state0, .o = &p->o, .state = &p->state
    if (op == MN_OP_delta) {
        const mn_delta_args *p = args;
        *s = (state_args){ COMMON(p), .e = &p->e, .w = &p->w, .beta = &p->beta };
    } else if (op == MN_OP_delta_net) {
        const mn_delta_net_args *p = args;
        *s = (state_args){ COMMON(p), .e = &p->k, .w = &none, .beta = &p->beta };
    } else if (op == MN_OP_additive) {
        const mn_additive_args *p = args;
        *s = (state_args){ COMMON(p), .e = &none, .w = &p->k, .beta = &none };
    } else {
        return false;
    }
    return s->call->T == 1 && s->call->B == 1 && s->state0->data &&
           s->state0->data == s->state->data;
#undef COMMON
}

/* Elements of head h of a vector as a row; 0: there is none. */
static uint64_t head_row(const state_args *s, const mn_in *x, int64_t h, int64_t n) {
    const int64_t each = (int64_t)mn_dtype_bytes(s->call->dtype);
    uint64_t row = T_ROW;
    if (!x->data) return 0;
    for (int64_t i = 0; i < n; i++) {
        row = shadow_mix(row, shadow_get((const char *)x->data + (h * x->stride[2] + i) * each));
    }
    return row;
}

static void state_op(later *l, const state_args *s) {
    const mn_call *c = s->call;
    const int64_t each = (int64_t)mn_dtype_bytes(c->dtype);
    uint64_t *column = malloc((size_t)c->K * sizeof *column);
    if (!column) abort();
    for (int64_t h = 0; h < c->H; h++) {
        const int64_t key = h * c->J / c->H;
        const bool channel = s->decay == MN_DECAY_CHANNEL;
        shadow_column_of_state of = { .K = c->K, .scale = (float)s->scale,
            .delta_rule = s->e->data != NULL, .q = head_row(s, s->q, key, c->K),
            .key = head_row(s, s->e->data ? s->e : s->w, key, c->K),
            .other = s->e->data ? head_row(s, s->w, key, c->K) : 0,
            .beta = head_row(s, s->beta, h, 1), .g = head_row(s, s->g, h, channel ? c->K : 1) };
        for (int64_t v = 0; v < c->V; v++) {
            char *state = (char *)s->state->data + (h * s->state->stride[2] + v) * 4;
            const int64_t at = h * s->v->stride[2] + v, to = h * s->o->stride[2] + v;
            of.v = shadow_get((const char *)s->v->data + at * each);
            for (int64_t k = 0; k < c->K; k++) column[k] = shadow_get(state + k * c->V * 4);
            const uint64_t o = shadow_recurrence(column, &of);
            for (int64_t k = 0; k < c->K; k++) put_later(l, state + k * c->V * 4, column[k]);
            if (s->o->data) put_later(l, (char *)s->o->data + to * each, o);
        }
    }
    free(column);
}

static mn_view flat(const void *data, mn_dtype dtype) {
    return (mn_view){ (void *)(uintptr_t)data, dtype, { 0, 0, 0, 1 } };
}

/* Convolutions of one token, and norms, as small works. */
static bool small_of(mn_decode_op *w, mn_op_id op, const void *args) {
    const mn_call *c = args;
    *w = (mn_decode_op){ .shape = { 1, 1, c->B, c->V } };
    if (op == MN_OP_conv) {
        const mn_conv_args *p = args;
        if (c->T != 1 || c->W > 16) return false;
        w->kind = MN_DECODE_CONV, w->f = p->act, w->shape[1] = c->W;
        w->at[0] = flat(p->x.data, c->dtype), w->at[1] = flat(p->w.data, c->dtype);
        w->at[2] = flat(p->bias.data, c->dtype), w->at[3] = flat(p->tail0.data, MN_F32);
        w->at[4] = flat(p->y.data, c->dtype), w->at[5] = flat(p->tail.data, MN_F32);
        w->at[0].stride[0] = p->x.stride[0] ? p->x.stride[0] : c->V;
    } else if (op == MN_OP_l2_norm) {
        const mn_l2_norm_args *p = args;
        w->kind = MN_DECODE_L2_NORM, w->f = p->kind, w->scale = p->eps;
        w->at[0] = flat(p->x.data, c->dtype), w->at[1] = flat(p->y.data, c->dtype);
    } else if (op == MN_OP_rms_norm) {
        const mn_rms_norm_args *p = args;
        w->kind = MN_DECODE_RMS_NORM, w->scale = p->eps;
        w->at[0] = flat(p->x.data, c->dtype), w->at[1] = flat(p->w.data, c->dtype);
        w->at[2] = flat(p->y.data, c->dtype);
    } else if (op == MN_OP_rms_norm_gated) {
        const mn_rms_norm_gated_args *p = args;
        w->kind = MN_DECODE_GATED_NORM, w->f = p->act, w->order = p->order, w->scale = p->eps;
        w->shape[1] = p->groups, w->shape[2] *= p->groups, w->shape[3] /= p->groups;
        w->at[0] = flat(p->x.data, c->dtype), w->at[1] = flat(p->z.data, c->dtype);
        w->at[2] = flat(p->w.data, c->dtype), w->at[3] = flat(p->y.data, c->dtype);
    } else {
        return false;
    }
    return true;
}

/* ---- attention over a cache ------------------------------------------------------------------ */

/* A row of `n` numbers of bf16 from element `at` on. */
static uint64_t row_tag(const void *data, int64_t at, int64_t n, int64_t each) {
    uint64_t row = T_ROW;
    for (int64_t i = 0; i < n; i++) {
        row = shadow_mix(row, shadow_get((const char *)data + (at + i) * each));
    }
    return row;
}

/* Row t of a cache of n numbers a head, which may become `made`; returns its tag. */
static uint64_t attend_row(void *cache, const mn_decode_attention *p, int64_t t, int64_t head,
                           int64_t n, uint64_t made) {
    const int64_t each = (int64_t)mn_dtype_bytes(p->dtype);
    uint64_t row = T_ROW;
    for (int64_t i = 0; i < n; i++) {
        char *at = (char *)cache + ((t * p->J + head) * n + i) * each;
        const uint64_t tag = shadow_mix(shadow_mix(made, shadow_get(at)), (uint64_t)i);
        shadow_put(at, tag);
        row = shadow_mix(row, tag);
    }
    return row;
}

void shadow_attend(const mn_decode_attention *p, int64_t head, int64_t slot, int64_t n_slots) {
    const int64_t each = (int64_t)mn_dtype_bytes(p->dtype), group = p->H / p->J;
    uint64_t turn = shadow_mix(T_ATTEND, shadow_get(p->position));
    for (int64_t i = 0; i < p->turns / 2; i++) turn = shadow_mix(turn, shadow_get(p->inv_freq + i));
    turn = shadow_mix(shadow_mix(turn, bits(p->turned_scale)), (uint64_t)p->window);
    const uint64_t key = shadow_mix(turn, row_tag(p->k, head * p->k_step, p->K, each));
    const uint64_t value = shadow_mix(turn, row_tag(p->v, head * p->v_step, p->V, each));
    for (int64_t part = slot; part < p->n_parts; part += n_slots) {
        uint64_t all = shadow_mix(turn, bits(p->scale));
        const int64_t end = mn_min((part + 1) * MN_DECODE_ATTEND_KEYS, p->capacity);
        for (int64_t t = part * MN_DECODE_ATTEND_KEYS; t < end; t++) {
            all = shadow_mix(all, attend_row(p->keys, p, t, head, p->K, key));
            all = shadow_mix(all, attend_row(p->values, p, t, head, p->V, value));
        }
        for (int64_t h = head * group; h < (head + 1) * group; h++) {
            const uint64_t q = shadow_mix(all, row_tag(p->q, h * p->q_step, p->K, each));
            float *to = p->parts + (h * p->n_parts + part) * (p->V + 2);
            for (int64_t i = 0; i < p->V + 2; i++) shadow_put(to + i, shadow_mix(q, (uint64_t)i));
        }
    }
}

/* Number i of a split: of every so many-th part. */
uint64_t shadow_split(const mn_decode_attention *p, int64_t head, int64_t split, int64_t i) {
    const int64_t n = p->V + 2, n_splits = mn_decode_splits(p->J);
    const float *from = p->parts + head * p->n_parts * n;
    uint64_t tag = T_ATTEND;
    for (int64_t part = split; part < p->n_parts; part += n_splits) {
        tag = shadow_mix(tag, shadow_get(from + part * n + i));
    }
    return tag;
}

void shadow_combine_splits(const mn_decode_attention *p, int64_t head, const uint64_t *splits) {
    const int64_t each = (int64_t)mn_dtype_bytes(p->dtype), n = p->V + 2;
    const uint64_t seen = shadow_mix(T_ATTEND, shadow_get(p->position));
    for (int64_t v = 0; v < p->V; v++) {
        uint64_t tag = seen;
        for (int64_t split = 0; split < mn_decode_splits(p->J); split++) {
            const uint64_t *of = splits + split * n;
            tag = shadow_mix(shadow_mix(tag, of[p->V]), shadow_mix(of[p->V + 1], of[v]));
        }
        shadow_put((char *)p->o + (head * p->V + v) * each, tag);
    }
}

void shadow_combine(const mn_decode_attention *p, int64_t head) {
    const int64_t n = p->V + 2, n_splits = mn_decode_splits(p->J);
    uint64_t *splits = calloc((size_t)(n_splits * n), sizeof *splits);
    if (!splits) abort();
    for (int64_t i = 0; i < n_splits * n; i++) splits[i] = shadow_split(p, head, i / n, i % n);
    shadow_combine_splits(p, head, splits);
    free(splits);
}

void shadow_attention(const mn_decode_attention *p) {
    for (int64_t j = 0; j < p->J; j++) shadow_attend(p, j, 0, 1);
    for (int64_t h = 0; h < p->H; h++) shadow_combine(p, h);
}

/* ---- HyperMLP over a cache ------------------------------------------------------------------- */

/* Row t of a cache of n numbers of each of some heads, h may become `made`; its tag. */
static uint64_t hyper_row(void *cache, int64_t row, int64_t at, int64_t n, int64_t each,
                          uint64_t made) {
    uint64_t tag = T_ROW;
    for (int64_t i = 0; i < n; i++) {
        char *to = (char *)cache + (row + at + i) * each;
        const uint64_t one = shadow_mix(shadow_mix(made, shadow_get(to)), (uint64_t)i);
        shadow_put(to, one);
        tag = shadow_mix(tag, one);
    }
    return tag;
}

/* Numbers of a mix that meet the keys of a part, of h `h` are the entries is not known: all
 * that branch or head `h` has. */
static uint64_t mix_factor(const void *data, int64_t at, int64_t n, int64_t each) {
    return data ? row_tag(data, at, n, each) : 0;
}

/* What sums over ranks have become: of all parts. */
static uint64_t ranks_tag(const mn_decode_mix *m, int64_t h, const float *first, int64_t step,
                          int64_t n_parts, int64_t each) {
    uint64_t tag = T_HYPER;
    if (!m->U) return tag;
    tag = shadow_mix(tag, mix_factor(m->c, h * m->c_step, m->R, each));
    for (int64_t part = 0; part < n_parts; part++) {
        tag = shadow_mix(tag, row_tag(first + part * step, 0, m->R, sizeof *first));
    }
    return tag;
}

/* A mix of a part's numbers, but for these. */
static uint64_t mixed_by(const mn_decode_mix *m, int64_t h, uint64_t ranks, int64_t P,
                         int64_t each) {
    if (!m->U) return ranks;
    ranks = shadow_mix(ranks, mix_factor(m->Vt, h * m->Vt_step, m->R * P, each));
    return shadow_mix(ranks, mix_factor(m->d, h * m->d_step, P, m->wide ? 4 : each));
}

/* Numbers of keys and sums of ranks that a part has, from the tag of what they are made of. */
static void put_part(float *to, const mn_decode_mix *m, int64_t h, int64_t P, int64_t each,
                     int64_t more, uint64_t tag) {
    for (int64_t i = 0; i < MN_DECODE_ATTEND_KEYS; i++) {
        shadow_put(to + i, shadow_mix(tag, (uint64_t)i));
    }
    if (m->U) tag = shadow_mix(tag, mix_factor(m->U, h * m->U_step, P * m->R, each));
    for (int64_t i = 0; i < m->R + more; i++) {
        shadow_put(to + MN_DECODE_ATTEND_KEYS + i, shadow_mix(shadow_mix(tag, 7), (uint64_t)i));
    }
}

typedef struct hyper_at {
    int64_t each, scores, mixed;    // bytes of a number; numbers of a part
    uint64_t seen;
} hyper_at;

static void hyper_scores(const mn_decode_hyper *p, const hyper_at *a, int64_t branch,
                         int64_t part) {
    const int64_t end = mn_min((part + 1) * MN_DECODE_ATTEND_KEYS, p->capacity);
    const uint64_t key = shadow_mix(a->seen, row_tag(p->k, branch * p->k_step, p->K, a->each));
    const uint64_t q = row_tag(p->q, branch * p->q_step, p->K, a->each);
    uint64_t all = shadow_mix(a->seen, q);
    for (int64_t t = part * MN_DECODE_ATTEND_KEYS; t < end; t++) {
        all = shadow_mix(all, hyper_row(p->keys, t * p->key_row, branch * p->key_step, p->K,
                                        a->each, key));
        if (branch >= p->H) continue;
        const uint64_t value = shadow_mix(a->seen,
                                          row_tag(p->v, branch * p->v_step, p->V, a->each));
        hyper_row(p->values, t * p->value_row, branch * p->value_step, p->V, a->each, value);
    }
    put_part(p->scores + (branch * p->n_parts + part) * a->scores, &p->mix[0], branch, p->P,
             a->each, 0, all);
}

static void hyper_mix(const mn_decode_hyper *p, const hyper_at *a, int64_t h, int64_t part) {
    uint64_t all = shadow_mix(a->seen, 1);
    for (int64_t branch = h; branch < p->Q; branch += p->H) {
        const float *from = p->scores + branch * p->n_parts * a->scores;
        const uint64_t ranks = ranks_tag(&p->mix[0], branch, from + MN_DECODE_ATTEND_KEYS,
                                         a->scores, p->n_parts, a->each);
        all = shadow_mix(all, mixed_by(&p->mix[0], branch, ranks, p->P, a->each));
        all = shadow_mix(all, row_tag(from + part * a->scores, 0, MN_DECODE_ATTEND_KEYS, 4));
    }
    put_part(p->mixed + (h * p->n_parts + part) * a->mixed, &p->mix[1], h, p->P, a->each, 1, all);
}

static void hyper_values(const mn_decode_hyper *p, const hyper_at *a, int64_t h, int64_t part) {
    const int64_t end = mn_min((part + 1) * MN_DECODE_ATTEND_KEYS, p->capacity);
    const float *from = p->mixed + h * p->n_parts * a->mixed;
    const uint64_t ranks = ranks_tag(&p->mix[1], h, from + MN_DECODE_ATTEND_KEYS, a->mixed,
                                     p->n_parts, a->each);
    uint64_t all = mixed_by(&p->mix[1], h, shadow_mix(ranks, a->seen), p->P, a->each);
    all = shadow_mix(all, row_tag(from + part * a->mixed, 0, MN_DECODE_ATTEND_KEYS, 4));
    for (int64_t t = part * MN_DECODE_ATTEND_KEYS; t < end; t++) {
        all = shadow_mix(all, row_tag(p->values, t * p->value_row + h * p->value_step, p->V,
                                      a->each));
    }
    for (int64_t i = 0; i < p->V; i++) {
        shadow_put(p->parts + (h * p->n_parts + part) * p->V + i, shadow_mix(all, (uint64_t)i));
    }
}

static void hyper_output(const mn_decode_hyper *p, const hyper_at *a, int64_t h) {
    uint64_t all = shadow_mix(shadow_mix(a->seen, bits(p->eps)), p->normed);
    for (int64_t part = 0; part < p->n_parts; part++) {
        const float *mixed = p->mixed + (h * p->n_parts + part) * a->mixed;
        all = shadow_mix(all, shadow_get(mixed + a->mixed - 1));
    }
    for (int64_t i = 0; i < p->V; i++) {
        uint64_t tag = all;
        for (int64_t part = 0; part < p->n_parts; part++) {
            tag = shadow_mix(tag, shadow_get(p->parts + (h * p->n_parts + part) * p->V + i));
        }
        if (p->gv) tag = shadow_mix(tag, row_tag(p->gv, h * p->gv_step + i, 1, a->each));
        shadow_put((char *)p->o + (h * p->o_step + i) * a->each, tag);
    }
}

void shadow_hyper_piece(const mn_decode_hyper *p, int phase, int64_t head, int64_t slot,
                        int64_t n_slots) {
    const hyper_at a = { (int64_t)mn_dtype_bytes(p->dtype), MN_DECODE_ATTEND_KEYS + p->mix[0].R,
                         MN_DECODE_ATTEND_KEYS + p->mix[1].R + 1,
                         shadow_mix(shadow_mix(T_HYPER, shadow_get(p->position)), p->by_place) };
    if (phase == MN_HYPER_OUTPUT) hyper_output(p, &a, head);
    for (int64_t part = slot; part < p->n_parts && phase != MN_HYPER_OUTPUT; part += n_slots) {
        if (phase == MN_HYPER_SCORES) hyper_scores(p, &a, head, part);
        else if (phase == MN_HYPER_MIX) hyper_mix(p, &a, head, part);
        else hyper_values(p, &a, head, part);
    }
}

void shadow_hyper(const mn_decode_hyper *p) {
    for (int phase = 0; phase < MN_HYPER_PHASES; phase++) {
        const int64_t heads = phase == MN_HYPER_SCORES ? p->Q : p->H;
        for (int64_t h = 0; h < heads; h++) shadow_hyper_piece(p, phase, h, 0, 1);
    }
}

void shadow_op(mn_op_id op, const void *given) {
    _Alignas(16) unsigned char args[MN_MAX_ARGS_BYTES];
    mn_decode_op small;
    state_args state;
    later l = { 0 };
    memcpy(args, given, mn_op_describe(op)->args_bytes);
    if (mn_validate_sizes(op, args, false) != MN_OK) {
        shadow_fail("%s: %s", mn_op_describe(op)->name, mn_last_error());
    }
    const mn_call *c = (const mn_call *)args;
    const int64_t columns = c->T <= 1 && c->B <= 1 ? step_columns(op) : -1;
    if (small_of(&small, op, args)) shadow_small(&small, 0, shadow_small_units(&small));
    else if (state_of(&state, op, args)) state_op(&l, &state);
    else if (columns >= 0) all_steps(&l, op, args, columns);
    else any_op(&l, op, args);
    put_now(&l);
}
