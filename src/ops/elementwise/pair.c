/* pair.c - a + b, a b, scale a + shift, max(a, low), a + b c, and sums over axes, on the
 * CPU's threads. Sums are taken in double and in the order of the axes. */
#include "kernels/functions_scalar.h"
#include "ops/elementwise/elementwise_internal.h"

enum { ROWS = 8, COLUMNS = 64 };

/* A row of the operands; what is absent stands for a number that nobody looks at. A step is 1, or
 * 0 where one number serves the row. */
typedef struct pair_row {
    int64_t n, b_step, c_step;
    const void *a, *b, *c, *dy;
    void *y, *da, *db;
    double scale, shift;
    bool add_a, add_b;
} pair_row;

#define PAIR_LOOPS(id, suffix, TYPE)                                                               \
    static void y_##id##_##suffix(const pair_row *p) {                                             \
        const TYPE *a = p->a, *b = p->b, *c = p->c, scale = (TYPE)p->scale, shift = (TYPE)p->shift;\
        TYPE *y = p->y;                                                                            \
        if (p->b_step) for (int64_t i = 0; i < p->n; i++) {                                        \
            y[i] = pair_##id##_##suffix(a[i], b[i], c[p->c_step * i], scale, shift);               \
        }                                                                                          \
        else for (int64_t i = 0; i < p->n; i++) {                                                  \
            y[i] = pair_##id##_##suffix(a[i], b[0], c[p->c_step * i], scale, shift);               \
        }                                                                                          \
    }                                                                                              \
    static void da_##id##_##suffix(const pair_row *p) {                                            \
        const TYPE *a = p->a, *b = p->b, *dy = p->dy;                                              \
        const TYPE scale = (TYPE)p->scale, shift = (TYPE)p->shift;                                 \
        TYPE *da = p->da;                                                                          \
        for (int64_t i = 0; i < p->n; i++) {                                                       \
            const TYPE g = pair_da_##id##_##suffix(a[i], b[p->b_step * i], dy[i], scale, shift);   \
            da[i] = p->add_a ? da[i] + g : g;                                                      \
        }                                                                                          \
    }                                                                                              \
    static void db_##id##_##suffix(const pair_row *p) {                                            \
        const TYPE *a = p->a, *dy = p->dy;                                                         \
        TYPE *db = p->db;                                                                          \
        for (int64_t i = 0; i < p->n; i++) {                                                       \
            const TYPE g = pair_db_##id##_##suffix(a[i], 0, dy[i], 0, 0);                          \
            db[i] = p->add_b ? db[i] + g : g;                                                      \
        }                                                                                          \
    }
#define PAIR(id, ins, about) PAIR_LOOPS(id, f32, float) PAIR_LOOPS(id, f64, double)
#include "kernels/elementwise.def"

typedef void pair_loop(const pair_row *p);

/* By kind and whether numbers are float64. */
static const struct pair_loops {
    pair_loop *y[2], *da[2], *db[2];
} loops[MN_N_PAIR] = {
#define PAIR(id, ins, about)                                                                       \
    [MN_PAIR_##id] = { { y_##id##_f32, y_##id##_f64 }, { da_##id##_f32, da_##id##_f64 },           \
                       { db_##id##_f32, db_##id##_f64 } },
#include "kernels/elementwise.def"
};

/* Row `row` of a view; of `other`, where that is absent. */
static void *row_of(const mn_view *v, const mn_view *other, const int64_t shape[4], int64_t row) {
    const mn_view *at = v->data ? v : other;
    const int64_t to = mn_view_row(at, shape, row) * (int64_t)mn_dtype_bytes(at->dtype);
    return (char *)at->data + to;
}

static void pair_rows(void *context, int64_t item, int worker) {
    (void)worker;
    const mn_pair_params *w = context;
    const bool back = !w->y.data;
    const mn_view *there = back ? &w->dy : &w->a;
    const int f64 = there->dtype == MN_F64;
    const struct pair_loops *loop = &loops[w->kind];
    const int64_t last = mn_min((item + 1) * ROWS, mn_rows_of(w->shape));
    for (int64_t row = item * ROWS; row < last; row++) {
        const pair_row p = {
            .n = w->shape[3], .b_step = w->b.stride[3], .c_step = w->c.stride[3],
            .a = row_of(&w->a, there, w->shape, row), .b = row_of(&w->b, there, w->shape, row),
            .c = row_of(&w->c, there, w->shape, row), .dy = row_of(&w->dy, there, w->shape, row),
            .y = row_of(&w->y, there, w->shape, row), .da = row_of(&w->da, there, w->shape, row),
            .db = row_of(&w->db, there, w->shape, row), .scale = w->scale, .shift = w->shift,
            .add_a = w->add_a, .add_b = w->add_b };
        if (!back) loop->y[f64](&p);
        if (w->da.data) loop->da[f64](&p);
        if (w->db.data) loop->db[f64](&p);
    }
}

int mn_elementwise_pair_cpu(void *where, const void *work, void *space) {
    (void)space;
    const mn_pair_params *w = work;
    return mn_elementwise_items(where, mn_ceil_div(mn_rows_of(w->shape), ROWS), pair_rows, w);
}

/* ---- sums ------------------------------------------------------------------------------------ */

#define SUM_LOOPS(suffix, TYPE)                                                                    \
    static const TYPE *row_##suffix(const mn_view *v, const int64_t *shape, int64_t row) {         \
        return (const TYPE *)v->data + mn_view_row(v, shape, row);                                 \
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
SUM_LOOPS(f32, float)
SUM_LOOPS(f64, double)

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
