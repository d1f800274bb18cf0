/* move.c - jobs that move or make numbers, on the CPU's threads. */
#include "ops/elementwise/elementwise_internal.h"

#include <math.h>
#include <string.h>

#include "base/dtype.h"
#include "base/rng.h"
#include "base/util.h"

enum { ROWS = 16, COLUMNS = 64 };

static char *at(const mn_view *v, int64_t elements) {
    return (char *)v->data + elements * (int64_t)mn_dtype_bytes(v->dtype);
}

/* n numbers; `from` has a step of 1 or 0. */
#define GIVE(suffix, TYPE)                                                                         \
    static void give_##suffix(TYPE *to, const TYPE *from, int64_t step, int64_t n, bool add) {     \
        if (!add && step == 1) memcpy(to, from, (size_t)n * sizeof *to);                           \
        else if (!add) for (int64_t i = 0; i < n; i++) to[i] = from[step * i];                     \
        else for (int64_t i = 0; i < n; i++) to[i] += from[step * i];                              \
    }
GIVE(f32, float)
GIVE(f64, double)

static void give(const mn_view *to, int64_t to_at, const mn_view *from, int64_t from_at, int64_t n,
                 bool add) {
    void *y = at(to, to_at);
    const void *x = at(from, from_at);
    if (to->dtype == MN_F64) give_f64(y, x, from->stride[3], n, add);
    else give_f32(y, x, from->stride[3], n, add);
}

/* ---- move and fill --------------------------------------------------------------------------- */

static void move_rows(void *context, int64_t item, int worker) {
    (void)worker;
    const mn_move_params *w = context;
    const int64_t *n = w->shape, last = mn_min((item + 1) * ROWS, mn_rows_of(n));
    const int64_t copies = w->folds ? w->times : 1;
    const int64_t heads = w->folds ? n[2] * w->times : n[2] / w->times;
    const int64_t from_shape[4] = { n[0], n[1], heads, n[3] };
    for (int64_t row = item * ROWS; row < last; row++) {
        const int64_t first = w->folds ? row * w->times : row / w->times;
        for (int64_t copy = 0; copy < copies; copy++) {
            give(&w->to, mn_view_row(&w->to, n, row), &w->from,
                 mn_view_row(&w->from, from_shape, first + copy), n[3], w->add || copy > 0);
        }
    }
}

int mn_elementwise_move_cpu(void *where, const void *work, void *space) {
    (void)space;
    const mn_move_params *w = work;
    return mn_elementwise_items(where, mn_ceil_div(mn_rows_of(w->shape), ROWS), move_rows, w);
}

static void fill_rows(void *context, int64_t item, int worker) {
    (void)worker;
    const mn_fill_params *w = context;
    const int64_t last = mn_min((item + 1) * ROWS, mn_rows_of(w->shape));
    const float narrow = (float)w->value;
    const mn_view value = { w->to.dtype == MN_F64 ? (void *)&w->value : (void *)&narrow,
                            w->to.dtype, { 0 } };
    for (int64_t row = item * ROWS; row < last; row++) {
        give(&w->to, mn_view_row(&w->to, w->shape, row), &value, 0, w->shape[3], false);
    }
}

int mn_elementwise_fill_cpu(void *where, const void *work, void *space) {
    (void)space;
    const mn_fill_params *w = work;
    return mn_elementwise_items(where, mn_ceil_div(mn_rows_of(w->shape), ROWS), fill_rows, w);
}

enum { DRAWN = 1024 };    // numbers of an item

static void draw(void *context, int64_t item, int worker) {
    (void)worker;
    const mn_normal_params *w = context;
    const int64_t last = mn_min((item + 1) * DRAWN, w->n);
    for (int64_t i = item * DRAWN; i < last; i++) {
        const double x = mn_rng_normal(w->seed, w->stream, (uint64_t)i);
        if (w->to.dtype == MN_F64) ((double *)w->to.data)[i] = x;
        else ((float *)w->to.data)[i] = (float)x;
    }
}

int mn_elementwise_normal_cpu(void *where, const void *work, void *space) {
    (void)space;
    const mn_normal_params *w = work;
    return mn_elementwise_items(where, mn_ceil_div(w->n, DRAWN), draw, w);
}

/* ---- rows by index --------------------------------------------------------------------------- */

/* Row `row` of a quantised table as row i of the result. */
static void unpack_row(const mn_rows_params *w, int64_t i, int64_t row) {
    float *to = (float *)w->rows.data + i * w->quant->cols;
    for (int64_t k = 0; k < w->quant->cols; k++) to[k] = mn_quant_weight(w->quant, row, k);
}

static void index_rows(void *context, int64_t item, int worker) {
    (void)worker;
    const mn_rows_params *w = context;
    const int64_t last = mn_min((item + 1) * ROWS, w->n), width = w->shape[3];
    for (int64_t i = item * ROWS; i < last; i++) {
        if (w->quant) {
            unpack_row(w, i, w->index[i]);
            continue;
        }
        const int64_t there = mn_view_row(&w->table, w->shape, w->index[i]);
        if (w->scatters) give(&w->table, there, &w->rows, i * width, width, true);
        else give(&w->rows, i * width, &w->table, there, width, false);
    }
}

int mn_elementwise_rows_cpu(void *where, const void *work, void *space) {
    (void)space;
    const mn_rows_params *w = work;
    return mn_elementwise_items(where, mn_ceil_div(w->n, ROWS), index_rows, w);
}

/* Columns [64 item, ...) of the table: every token in order, so that the sum has one order. */
static void embed_columns(void *context, int64_t item, int worker) {
    (void)worker;
    const mn_embed_params *w = context;
    const int64_t first = item * COLUMNS, n = mn_min(COLUMNS, w->X - first);
    for (int64_t v = 0; v < w->V && !w->add; v++) {
        memset(at(&w->table, v * w->X + first), 0, (size_t)n * mn_dtype_bytes(w->table.dtype));
    }
    for (int64_t row = 0; row < w->n; row++) {
        give(&w->table, w->tokens[row] * w->X + first, &w->dy, row * w->X + first, n, true);
    }
}

int mn_elementwise_embed_cpu(void *where, const void *work, void *space) {
    (void)space;
    const mn_embed_params *w = work;
    return mn_elementwise_items(where, mn_ceil_div(w->X, COLUMNS), embed_columns, w);
}

/* ---- finite ---------------------------------------------------------------------------------- */

int mn_elementwise_finite_cpu(void *where, const void *work, void *space) {
    (void)where, (void)space;
    const mn_finite_params *w = work;
    int64_t i = 0;
    if (w->x.dtype == MN_F64) while (i < w->n && isfinite(((const double *)w->x.data)[i])) i++;
    else while (i < w->n && isfinite(((const float *)w->x.data)[i])) i++;
    *w->first = i;
    return 0;
}
