/* tape_pair.c - a + b, a b, scale a + shift, max(a, low), spreads and residuals on the tape.
 *
 * An axis of b that is 1 counts for all of that axis of a; its gradient is the sum over it, taken
 * in double and in the order of the axes. */
#include <string.h>

#include "base/util.h"
#include "ops/tape_node.h"

typedef enum pair_kind { ADD, MULTIPLY, AFFINE, AT_LEAST, SPREAD } pair_kind;

typedef struct pair {
    pair_kind kind;
    mn_tensor *a, *b, *y;
    double scale, shift;
    int64_t b_stride[4];    // 0 along axes that are repeated
} pair;

enum { ROWS = 8, COLUMNS = 64 };

/* What a loop over rows works on; for the way back y is dy, and the rest are gradients. */
typedef struct pair_job {
    const pair *p;
    const void *dy;
    void *da, *db;
    bool add_a, add_b;
    int64_t b_count;
} pair_job;

typedef struct place {
    int64_t a, b, y;    // offsets of a row
} place;

static place row_place(const pair *p, int64_t row) {
    const int64_t *n = p->a->shape, *s = p->a->stride, *r = p->b_stride;
    const int64_t h = row % n[2], t = row / n[2] % n[1], b = row / n[2] / n[1];
    return (place){ b * s[0] + t * s[1] + h * s[2], b * r[0] + t * r[1] + h * r[2], row * n[3] };
}

#define LOOPS(suffix, TYPE)                                                                        \
    static void forward_row_##suffix(const pair *p, int64_t row) {                                 \
        const place at = row_place(p, row);                                                        \
        const int64_t n = p->a->shape[3], step = p->b_stride[3];                                   \
        const TYPE *a = (const TYPE *)p->a->data + at.a;                                           \
        const TYPE *b = p->b ? (const TYPE *)p->b->data + at.b : a;                                \
        TYPE *y = (TYPE *)p->y->data + at.y;                                                       \
        const TYPE scale = (TYPE)p->scale, shift = (TYPE)p->shift;                                 \
        switch (p->kind) {                                                                         \
        case ADD:                                                                                  \
            if (step) for (int64_t i = 0; i < n; i++) y[i] = a[i] + b[i];                          \
            else for (int64_t i = 0; i < n; i++) y[i] = a[i] + b[0];                               \
            break;                                                                                 \
        case MULTIPLY:                                                                             \
            if (step) for (int64_t i = 0; i < n; i++) y[i] = a[i] * b[i];                          \
            else for (int64_t i = 0; i < n; i++) y[i] = a[i] * b[0];                               \
            break;                                                                                 \
        case AFFINE: for (int64_t i = 0; i < n; i++) y[i] = scale * a[i] + shift; break;           \
        case AT_LEAST: for (int64_t i = 0; i < n; i++) y[i] = a[i] > shift ? a[i] : shift; break;  \
        case SPREAD: for (int64_t i = 0; i < n; i++) y[i] = b[step * i]; break;                    \
        }                                                                                          \
    }                                                                                              \
    static void back_a_row_##suffix(const pair_job *j, int64_t row) {                              \
        const pair *p = j->p;                                                                      \
        const place at = row_place(p, row);                                                        \
        const int64_t n = p->a->shape[3], step = p->b_stride[3];                                   \
        const TYPE *a = (const TYPE *)p->a->data + at.a, *dy = (const TYPE *)j->dy + at.y;         \
        const TYPE *b = p->b ? (const TYPE *)p->b->data + at.b : a;                                \
        TYPE *da = (TYPE *)j->da + at.a;                                                           \
        for (int64_t i = 0; i < n; i++) {                                                          \
            TYPE g = dy[i];                                                                        \
            if (p->kind == MULTIPLY) g *= b[step * i];                                             \
            if (p->kind == AFFINE) g *= (TYPE)p->scale;                                            \
            if (p->kind == AT_LEAST && !(a[i] > (TYPE)p->shift)) g = 0;                            \
            da[i] = j->add_a ? da[i] + g : g;                                                      \
        }                                                                                          \
    }                                                                                              \
    static void back_b_row_##suffix(const pair_job *j, int64_t row) {                              \
        const pair *p = j->p;                                                                      \
        const place at = row_place(p, row);                                                        \
        const int64_t n = p->a->shape[3];                                                          \
        const TYPE *a = (const TYPE *)p->a->data + at.a, *dy = (const TYPE *)j->dy + at.y;         \
        TYPE *db = (TYPE *)j->db + at.b;                                                           \
        for (int64_t i = 0; i < n; i++) {                                                          \
            const TYPE g = p->kind == MULTIPLY ? dy[i] * a[i] : dy[i];                             \
            db[i] = j->add_b ? db[i] + g : g;                                                      \
        }                                                                                          \
    }                                                                                              \
    /* Entries [first, first + COLUMNS) of a repeated b. */                                        \
    static void back_b_sums_##suffix(const pair_job *j, int64_t first) {                           \
        const pair *p = j->p;                                                                      \
        const int64_t *n = p->a->shape, *r = p->b->shape;                                          \
        for (int64_t at = first; at < mn_min(first + COLUMNS, j->b_count); at++) {                 \
            int64_t from[4], to[4], left = at;                                                     \
            for (int i = 3; i >= 0; i--) {                                                         \
                from[i] = r[i] == 1 ? 0 : left % r[i];                                             \
                to[i] = r[i] == 1 ? n[i] : from[i] + 1;                                            \
                left /= r[i];                                                                      \
            }                                                                                      \
            double sum = 0.0;                                                                      \
            for (int64_t b = from[0]; b < to[0]; b++)                                              \
                for (int64_t t = from[1]; t < to[1]; t++)                                          \
                    for (int64_t h = from[2]; h < to[2]; h++) {                                    \
                        const place w = row_place(p, (b * n[1] + t) * n[2] + h);                   \
                        const TYPE *a = (const TYPE *)p->a->data + w.a;                            \
                        const TYPE *dy = (const TYPE *)j->dy + w.y;                                \
                        for (int64_t i = from[3]; i < to[3]; i++)                                  \
                            sum += p->kind == MULTIPLY ? (double)dy[i] * a[i] : (double)dy[i];     \
                    }                                                                              \
            int64_t into = 0;                                                                      \
            for (int i = 0; i < 4; i++) into += from[i] * (i < 3 ? p->b->stride[i] : 1);           \
            TYPE *db = (TYPE *)j->db + into;                                                       \
            *db = (TYPE)(j->add_b ? *db + sum : sum);                                              \
        }                                                                                          \
    }
LOOPS(f32, float)
LOOPS(f64, double)

static int64_t rows_of(const pair *p) {
    return p->a->shape[0] * p->a->shape[1] * p->a->shape[2];
}

typedef struct rows_job {
    const pair_job *job;
    bool f64;
    enum { FORWARD, BACK_A, BACK_B, BACK_SUMS } what;
} rows_job;

static void run_rows(void *context, int64_t item, int worker) {
    (void)worker;
    const rows_job *r = context;
    const pair_job *j = r->job;
    if (r->what == BACK_SUMS) {
        if (r->f64) back_b_sums_f64(j, item * COLUMNS);
        else back_b_sums_f32(j, item * COLUMNS);
        return;
    }
    const int64_t last = mn_min((item + 1) * ROWS, rows_of(j->p));
    for (int64_t row = item * ROWS; row < last; row++) {
        if (r->what == FORWARD && r->f64) forward_row_f64(j->p, row);
        else if (r->what == FORWARD) forward_row_f32(j->p, row);
        else if (r->what == BACK_A && r->f64) back_a_row_f64(j, row);
        else if (r->what == BACK_A) back_a_row_f32(j, row);
        else if (r->f64) back_b_row_f64(j, row);
        else back_b_row_f32(j, row);
    }
}

static void run(mn_tape *tape, const pair_job *job, int what) {
    rows_job rows = { .job = job, .f64 = tape->dtype == MN_F64, .what = what };
    const int64_t items = what == BACK_SUMS ? mn_ceil_div(job->b_count, COLUMNS)
                                            : mn_ceil_div(rows_of(job->p), ROWS);
    mn_tape_items(tape, items, run_rows, &rows);
}

static void back_pair(mn_tape *tape, void *payload) {
    const pair *p = payload;
    pair_job job = { .p = p, .dy = mn_grad_read(p->y) };
    if (!job.dy) return;
    if (mn_wants(p->a)) {
        job.da = mn_grad_write(tape, p->a, &job.add_a);
        if (job.da && mn_tape_runs(tape)) run(tape, &job, BACK_A);
    }
    if (p->b && mn_wants(p->b)) {
        job.db = mn_grad_write(tape, p->b, &job.add_b);
        job.b_count = mn_count4(p->b->shape);
        const bool whole = memcmp(p->a->shape, p->b->shape, sizeof p->a->shape) == 0;
        if (job.db && mn_tape_runs(tape)) run(tape, &job, whole ? BACK_B : BACK_SUMS);
    }
}

static mn_tensor *make(mn_tape *tape, pair_kind kind, mn_tensor *a, mn_tensor *b, double scale,
                       double shift) {
    pair *p = mn_tape_note(tape, sizeof *p);
    mn_tensor *y = mn_tape_new(tape, a->shape);
    if (!p || !y) return NULL;
    if (kind == SPREAD) a->data = y->data;    // a lends its shape, nothing is read from it
    *p = (pair){ .kind = kind, .a = a, .b = b, .y = y, .scale = scale, .shift = shift };
    for (int i = 0; b && i < 4; i++) {
        if (b->shape[i] != 1 && b->shape[i] != a->shape[i]) {
            return mn_tape_fail(tape, mn_fail(MN_ERR_INTERNAL, "%s: shapes that do not go together",
                                              tape->scope));
        }
        p->b_stride[i] = b->shape[i] == 1 ? 0 : i < 3 ? b->stride[i] : 1;
    }
    static const char *const names[] = { "a sum", "a product", "a scaling", "a bound", "a spread" };
    pair_job job = { .p = p };
    if (mn_tape_runs(tape)) run(tape, &job, FORWARD);
    mn_tape_record(tape, names[kind], back_pair, p, mn_wants(a) || mn_wants(b), &y, 1);
    return y;
}

mn_tensor *mn_tape_add(mn_tape *tape, mn_tensor *a, mn_tensor *b) {
    return a && b && !mn_tape_dead(tape) ? make(tape, ADD, a, b, 0, 0) : NULL;
}

mn_tensor *mn_tape_multiply(mn_tape *tape, mn_tensor *a, mn_tensor *b) {
    return a && b && !mn_tape_dead(tape) ? make(tape, MULTIPLY, a, b, 0, 0) : NULL;
}

mn_tensor *mn_tape_affine(mn_tape *tape, mn_tensor *x, double scale, double shift) {
    return x && !mn_tape_dead(tape) ? make(tape, AFFINE, x, NULL, scale, shift) : NULL;
}

mn_tensor *mn_tape_at_least(mn_tape *tape, mn_tensor *x, double low) {
    return x && !mn_tape_dead(tape) ? make(tape, AT_LEAST, x, NULL, 0, low) : NULL;
}

mn_tensor *mn_tape_spread(mn_tape *tape, mn_tensor *x, const int64_t shape[4]) {
    if (!x || mn_tape_dead(tape)) return NULL;
    mn_tensor *like = mn_tape_over(tape, NULL, shape, false);
    return like ? make(tape, SPREAD, like, x, 0, 0) : NULL;
}

/* dx = db = dy, and when dy is complete b is asked for its gradient before anything is added to
 * that of x: one piece of memory serves all three. */
mn_tensor *mn_tape_residual(mn_tape *tape, mn_tensor *x, mn_tensor *b) {
    if (!x || !b || mn_tape_dead(tape)) return NULL;
    const bool alike = memcmp(x->shape, b->shape, sizeof x->shape) == 0 && mn_is_contiguous(x) &&
                       mn_is_contiguous(b);
    const bool shares = alike && mn_wants(x) && mn_wants(b) && !x->slot->kept && !b->slot->kept &&
                        !b->slot->whole && b->slot->bytes == x->slot->bytes;
    if (!shares) return mn_tape_add(tape, x, b);
    pair *p = mn_tape_note(tape, sizeof *p);
    mn_tensor *y = mn_tape_new(tape, x->shape);
    if (!p || !y) return NULL;
    *p = (pair){ .kind = ADD, .a = x, .b = b, .y = y,
                 .b_stride = { b->stride[0], b->stride[1], b->stride[2], 1 } };
    pair_job job = { .p = p };
    if (mn_tape_runs(tape)) run(tape, &job, FORWARD);
    mn_tape_record(tape, "a residual", NULL, NULL, false, &y, 1);
    y->slot = x->slot;
    b->slot->whole = x->slot;
    return y;
}
