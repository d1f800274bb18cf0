/* tape_row.c - softmax over the last axis and turning it, on the tape.
 *
 *   softmax   y_i = e^(x_i - max x) / sum_j e^(x_j - max x)      dx = y (dy - sum_j y_j dy_j)
 *   roll      y_i = x_(i - by), indices modulo the width         dx_i = dy_(i + by) */
#include <math.h>
#include <string.h>

#include "base/util.h"
#include "ops/tape_node.h"

enum { ROWS = 16 };

typedef struct row_op {
    mn_tensor *x, *y;
    int64_t by;          // of a roll
    bool rolls, f64, add;
    const void *dy;      // going back
    void *dx;
} row_op;

static int64_t rows_of(const mn_tensor *x) {
    return x->shape[0] * x->shape[1] * x->shape[2];
}

/* Rows of y and dy lie n apart, those of x and dx as x says. Sums are taken in double. */
#define ROW_LOOPS(suffix, TYPE, EXP)                                                               \
    static void softmax_##suffix(const row_op *r, int64_t row) {                                   \
        const int64_t n = r->x->shape[3];                                                          \
        const TYPE *x = (const TYPE *)r->x->data + mn_row_at(r->x, row);                           \
        TYPE *y = (TYPE *)r->y->data + row * n, top = x[0];                                        \
        for (int64_t i = 1; i < n; i++) top = x[i] > top ? x[i] : top;                             \
        double sum = 0.0;                                                                          \
        for (int64_t i = 0; i < n; i++) {                                                          \
            y[i] = EXP(x[i] - top);                                                                \
            sum += (double)y[i];                                                                   \
        }                                                                                          \
        for (int64_t i = 0; i < n; i++) y[i] = (TYPE)((double)y[i] / sum);                         \
    }                                                                                              \
    static void back_softmax_##suffix(const row_op *r, int64_t row) {                              \
        const int64_t n = r->x->shape[3];                                                          \
        const TYPE *y = (const TYPE *)r->y->data + row * n, *dy = (const TYPE *)r->dy + row * n;   \
        TYPE *dx = (TYPE *)r->dx + mn_row_at(r->x, row);                                           \
        double along = 0.0;                                                                        \
        for (int64_t i = 0; i < n; i++) along += (double)y[i] * (double)dy[i];                     \
        for (int64_t i = 0; i < n; i++) {                                                          \
            const TYPE g = (TYPE)((double)y[i] * ((double)dy[i] - along));                         \
            dx[i] = r->add ? dx[i] + g : g;                                                        \
        }                                                                                          \
    }                                                                                              \
    static void roll_##suffix(const row_op *r, int64_t row) {                                      \
        const int64_t n = r->x->shape[3], by = r->by;                                              \
        const TYPE *x = (const TYPE *)r->x->data + mn_row_at(r->x, row);                           \
        TYPE *y = (TYPE *)r->y->data + row * n;                                                    \
        memcpy(y, x + n - by, (size_t)by * sizeof *y);                                             \
        memcpy(y + by, x, (size_t)(n - by) * sizeof *y);                                           \
    }                                                                                              \
    static void back_roll_##suffix(const row_op *r, int64_t row) {                                 \
        const int64_t n = r->x->shape[3];                                                          \
        const TYPE *dy = (const TYPE *)r->dy + row * n;                                            \
        TYPE *dx = (TYPE *)r->dx + mn_row_at(r->x, row);                                           \
        for (int64_t i = 0; i < n; i++) {                                                          \
            const TYPE g = dy[i + r->by < n ? i + r->by : i + r->by - n];                          \
            dx[i] = r->add ? dx[i] + g : g;                                                        \
        }                                                                                          \
    }
ROW_LOOPS(f32, float, expf)
ROW_LOOPS(f64, double, exp)

typedef void row_loop(const row_op *r, int64_t row);

static row_loop *loop_of(const row_op *r) {
    if (r->dx) {
        if (r->rolls) return r->f64 ? back_roll_f64 : back_roll_f32;
        return r->f64 ? back_softmax_f64 : back_softmax_f32;
    }
    if (r->rolls) return r->f64 ? roll_f64 : roll_f32;
    return r->f64 ? softmax_f64 : softmax_f32;
}

static void run_rows(void *context, int64_t item, int worker) {
    (void)worker;
    const row_op *r = context;
    row_loop *loop = loop_of(r);
    const int64_t last = mn_min((item + 1) * ROWS, rows_of(r->x));
    for (int64_t row = item * ROWS; row < last; row++) loop(r, row);
}

static void back_rows(mn_tape *tape, void *payload) {
    row_op *r = payload;
    r->dy = mn_grad_read(r->y);
    if (!r->dy || !mn_wants(r->x)) return;
    r->dx = mn_grad_write(tape, r->x, &r->add);
    if (r->dx && mn_tape_runs(tape)) {
        mn_tape_items(tape, mn_ceil_div(rows_of(r->x), ROWS), run_rows, r);
    }
}

static mn_tensor *make(mn_tape *tape, mn_tensor *x, bool rolls, int64_t by) {
    row_op *r = mn_tape_note(tape, sizeof *r);
    mn_tensor *y = mn_tape_new(tape, x->shape);
    if (!r || !y) return NULL;
    *r = (row_op){ .x = x, .y = y, .by = by, .rolls = rolls, .f64 = tape->dtype == MN_F64 };
    if (mn_tape_runs(tape)) {
        mn_tape_items(tape, mn_ceil_div(rows_of(x), ROWS), run_rows, r);
    }
    mn_tape_record(tape, rolls ? "a roll" : "softmax", back_rows, r, mn_wants(x), &y, 1);
    return y;
}

mn_tensor *mn_tape_softmax(mn_tape *tape, mn_tensor *x) {
    return x && !mn_tape_dead(tape) ? make(tape, x, false, 0) : NULL;
}

mn_tensor *mn_tape_roll(mn_tape *tape, mn_tensor *x, int64_t by) {
    if (!x || mn_tape_dead(tape)) return NULL;
    const int64_t n = x->shape[3];
    return make(tape, x, true, (by % n + n) % n);
}
