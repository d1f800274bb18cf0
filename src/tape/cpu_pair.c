/* cpu_pair.c - a + b, a b, scale a + shift, max(a, low), a + b c, and sums over axes, on the
 * CPU's threads. Sums are taken in double and in the order of the axes. */
#include "base/util.h"
#include "tape/cpu.h"

enum { ROWS = 8, COLUMNS = 64 };

#define PAIR_LOOPS(suffix, TYPE)                                                                   \
    static const TYPE *row_##suffix(const mn_view *v, const int64_t *shape, int64_t row) {         \
        return (const TYPE *)v->data + mn_view_row(v, shape, row);                                 \
    }                                                                                              \
    static void forward_##suffix(const mn_pair_params *w, int64_t row) {                           \
        const int64_t n = w->shape[3], step = w->b.stride[3];                                      \
        const TYPE *a = row_##suffix(&w->a, w->shape, row);                                        \
        const TYPE *b = w->b.data ? row_##suffix(&w->b, w->shape, row) : a;                        \
        const TYPE *c = w->c.data ? row_##suffix(&w->c, w->shape, row) : a;                        \
        TYPE *y = (TYPE *)row_##suffix(&w->y, w->shape, row);                                      \
        const TYPE scale = (TYPE)w->scale, shift = (TYPE)w->shift;                                 \
        switch (w->kind) {                                                                         \
        case MN_PAIR_ADD:                                                                          \
            if (step) for (int64_t i = 0; i < n; i++) y[i] = a[i] + b[i];                          \
            else for (int64_t i = 0; i < n; i++) y[i] = a[i] + b[0];                               \
            break;                                                                                 \
        case MN_PAIR_MULTIPLY:                                                                     \
            if (step) for (int64_t i = 0; i < n; i++) y[i] = a[i] * b[i];                          \
            else for (int64_t i = 0; i < n; i++) y[i] = a[i] * b[0];                               \
            break;                                                                                 \
        case MN_PAIR_AFFINE:                                                                       \
            for (int64_t i = 0; i < n; i++) y[i] = scale * a[i] + shift;                           \
            break;                                                                                 \
        case MN_PAIR_AT_LEAST:                                                                     \
            for (int64_t i = 0; i < n; i++) y[i] = a[i] > shift ? a[i] : shift;                    \
            break;                                                                                 \
        case MN_PAIR_SCALED:                                                                       \
            for (int64_t i = 0; i < n; i++) y[i] = a[i] + b[step * i] * c[w->c.stride[3] * i];     \
            break;                                                                                 \
        }                                                                                          \
    }                                                                                              \
    static void back_a_##suffix(const mn_pair_params *w, int64_t row) {                            \
        const int64_t n = w->shape[3], step = w->b.stride[3];                                      \
        const TYPE *dy = row_##suffix(&w->dy, w->shape, row);                                      \
        const TYPE *a = w->a.data ? row_##suffix(&w->a, w->shape, row) : dy;                       \
        const TYPE *b = w->b.data ? row_##suffix(&w->b, w->shape, row) : dy;                       \
        TYPE *da = (TYPE *)row_##suffix(&w->da, w->shape, row);                                    \
        for (int64_t i = 0; i < n; i++) {                                                          \
            TYPE g = dy[i];                                                                        \
            if (w->kind == MN_PAIR_MULTIPLY) g *= b[step * i];                                     \
            if (w->kind == MN_PAIR_AFFINE) g *= (TYPE)w->scale;                                    \
            if (w->kind == MN_PAIR_AT_LEAST && !(a[i] > (TYPE)w->shift)) g = 0;                    \
            da[i] = w->add_a ? da[i] + g : g;                                                      \
        }                                                                                          \
    }                                                                                              \
    static void back_b_##suffix(const mn_pair_params *w, int64_t row) {                            \
        const TYPE *dy = row_##suffix(&w->dy, w->shape, row);                                      \
        const TYPE *a = w->a.data ? row_##suffix(&w->a, w->shape, row) : dy;                       \
        TYPE *db = (TYPE *)row_##suffix(&w->db, w->shape, row);                                    \
        for (int64_t i = 0; i < w->shape[3]; i++) {                                                \
            const TYPE g = w->kind == MN_PAIR_MULTIPLY ? dy[i] * a[i] : dy[i];                     \
            db[i] = w->add_b ? db[i] + g : g;                                                      \
        }                                                                                          \
    }                                                                                              \
    /* sum[0 .. n) gets columns [first, first + n) of a row, or sum[0] all of it. */               \
    static void add_row_##suffix(double *sum, const mn_sum_params *w, int64_t row, int64_t first,  \
                                 int64_t n, bool whole) {                                          \
        const TYPE *dy = row_##suffix(&w->dy, w->shape, row) + first;                              \
        const TYPE *a = w->a.data ? row_##suffix(&w->a, w->shape, row) + first : NULL;             \
        if (whole && a) for (int64_t i = 0; i < n; i++) sum[0] += (double)dy[i] * a[i];            \
        else if (whole) for (int64_t i = 0; i < n; i++) sum[0] += (double)dy[i];                   \
        else if (a) for (int64_t i = 0; i < n; i++) sum[i] += (double)dy[i] * a[i];                \
        else for (int64_t i = 0; i < n; i++) sum[i] += (double)dy[i];                              \
    }                                                                                              \
    static void put_##suffix(const mn_sum_params *w, int64_t at, const double *sum, int64_t n) {   \
        TYPE *to = (TYPE *)w->sum.data + at;                                                       \
        for (int64_t i = 0; i < n; i++) to[i] = (TYPE)(w->add ? to[i] + sum[i] : sum[i]);          \
    }
PAIR_LOOPS(f32, float)
PAIR_LOOPS(f64, double)

static void pair_rows(void *context, int64_t item, int worker) {
    (void)worker;
    const mn_pair_params *w = context;
    const bool back = !w->y.data, f64 = (back ? w->dy : w->y).dtype == MN_F64;
    const int64_t last = mn_min((item + 1) * ROWS, mn_rows_of(w->shape));
    for (int64_t row = item * ROWS; row < last; row++) {
        if (!back) (f64 ? forward_f64 : forward_f32)(w, row);
        if (w->da.data) (f64 ? back_a_f64 : back_a_f32)(w, row);
        if (w->db.data) (f64 ? back_b_f64 : back_b_f32)(w, row);
    }
}

int mn_elementwise_pair_cpu(void *where, const void *work, void *space) {
    (void)space;
    const mn_pair_params *w = work;
    return mn_elementwise_items(where, mn_ceil_div(mn_rows_of(w->shape), ROWS), pair_rows, w);
}

/* ---- sums ------------------------------------------------------------------------------------ */

/* Items are rows of the sum, each in blocks of columns. */
typedef struct sum_job {
    const mn_sum_params *w;
    bool whole;          // rows are summed too
    int64_t n_across;    // blocks side by side
} sum_job;

static void sum_block(void *context, int64_t item, int worker) {
    (void)worker;
    const sum_job *j = context;
    const mn_sum_params *w = j->w;
    const int64_t *n = w->shape, *kept = w->kept, row = item / j->n_across;
    const int64_t first = item % j->n_across * COLUMNS;
    const int64_t width = j->whole ? n[3] : mn_min(COLUMNS, n[3] - first);
    const int64_t at[3] = { row / kept[2] / kept[1], row / kept[2] % kept[1], row % kept[2] };
    int64_t to[3], into = j->whole ? 0 : first;
    for (int i = 0; i < 3; i++) {
        to[i] = kept[i] == 1 ? n[i] : at[i] + 1;
        if (kept[i] != 1) into += at[i] * w->sum.stride[i];
    }
    double sum[COLUMNS] = { 0.0 };
    const bool f64 = w->dy.dtype == MN_F64;
    for (int64_t b = at[0]; b < to[0]; b++) {
        for (int64_t t = at[1]; t < to[1]; t++) {
            for (int64_t h = at[2]; h < to[2]; h++) {
                (f64 ? add_row_f64 : add_row_f32)(sum, w, (b * n[1] + t) * n[2] + h, first, width,
                                                  j->whole);
            }
        }
    }
    (f64 ? put_f64 : put_f32)(w, into, sum, j->whole ? 1 : width);
}

int mn_elementwise_sum_cpu(void *where, const void *work, void *space) {
    (void)space;
    const mn_sum_params *w = work;
    sum_job job = { .w = w, .whole = w->kept[3] == 1, .n_across = 1 };
    if (!job.whole) job.n_across = mn_ceil_div(w->shape[3], COLUMNS);
    return mn_elementwise_items(where, mn_rows_of(w->kept) * job.n_across, sum_block, &job);
}
