/* row.c - softmax over the last axis and turning it, on the CPU's threads.
 *
 *   softmax   y_i = e^(x_i - max x) / sum_j e^(x_j - max x)      dx = y (dy - sum_j y_j dy_j)
 *   roll      y_i = x_(i - by), indices modulo the width
 *
 * Sums are taken in double. */
#include <math.h>

#include "base/util.h"
#include "ops/elementwise/elementwise_internal.h"

enum { ROWS = 16 };

#define ROW_LOOPS(suffix, TYPE, EXP)                                                               \
    static void softmax_##suffix(const mn_softmax_params *w, int64_t row) {                        \
        const int64_t n = w->shape[3];                                                             \
        const TYPE *x = (const TYPE *)w->x.data + mn_view_row(&w->x, w->shape, row);               \
        TYPE *y = (TYPE *)w->y.data + mn_view_row(&w->y, w->shape, row), top = x[0];               \
        for (int64_t i = 1; i < n; i++) top = x[i] > top ? x[i] : top;                             \
        double sum = 0.0;                                                                          \
        for (int64_t i = 0; i < n; i++) {                                                          \
            y[i] = EXP(x[i] - top);                                                                \
            sum += (double)y[i];                                                                   \
        }                                                                                          \
        for (int64_t i = 0; i < n; i++) y[i] = (TYPE)((double)y[i] / sum);                         \
    }                                                                                              \
    static void back_softmax_##suffix(const mn_softmax_params *w, int64_t row) {                   \
        const int64_t n = w->shape[3];                                                             \
        const TYPE *y = (const TYPE *)w->y.data + mn_view_row(&w->y, w->shape, row);               \
        const TYPE *dy = (const TYPE *)w->dy.data + mn_view_row(&w->dy, w->shape, row);            \
        TYPE *dx = (TYPE *)w->dx.data + mn_view_row(&w->dx, w->shape, row);                        \
        double along = 0.0;                                                                        \
        for (int64_t i = 0; i < n; i++) along += (double)y[i] * (double)dy[i];                     \
        for (int64_t i = 0; i < n; i++) {                                                          \
            const TYPE g = (TYPE)((double)y[i] * ((double)dy[i] - along));                         \
            dx[i] = w->add ? dx[i] + g : g;                                                        \
        }                                                                                          \
    }                                                                                              \
    static void roll_##suffix(const mn_roll_params *w, int64_t row) {                              \
        const int64_t n = w->shape[3];                                                             \
        const TYPE *from = (const TYPE *)w->from.data + mn_view_row(&w->from, w->shape, row);      \
        TYPE *to = (TYPE *)w->to.data + mn_view_row(&w->to, w->shape, row);                        \
        for (int64_t i = 0; i < n; i++) {                                                          \
            const TYPE x = from[i >= w->by ? i - w->by : i - w->by + n];                           \
            to[i] = w->add ? to[i] + x : x;                                                        \
        }                                                                                          \
    }
ROW_LOOPS(f32, float, expf)
ROW_LOOPS(f64, double, exp)

static void softmax_rows(void *context, int64_t item, int worker) {
    (void)worker;
    const mn_softmax_params *w = context;
    const bool f64 = w->y.dtype == MN_F64;
    const int64_t last = mn_min((item + 1) * ROWS, mn_rows_of(w->shape));
    for (int64_t row = item * ROWS; row < last; row++) {
        if (w->dx.data) (f64 ? back_softmax_f64 : back_softmax_f32)(w, row);
        else (f64 ? softmax_f64 : softmax_f32)(w, row);
    }
}

int mn_elementwise_softmax_cpu(void *where, const void *work, void *space) {
    (void)space;
    const mn_softmax_params *w = work;
    return mn_elementwise_items(where, mn_ceil_div(mn_rows_of(w->shape), ROWS), softmax_rows, w);
}

static void roll_rows(void *context, int64_t item, int worker) {
    (void)worker;
    const mn_roll_params *w = context;
    const int64_t last = mn_min((item + 1) * ROWS, mn_rows_of(w->shape));
    for (int64_t row = item * ROWS; row < last; row++) {
        (w->to.dtype == MN_F64 ? roll_f64 : roll_f32)(w, row);
    }
}

int mn_elementwise_roll_cpu(void *where, const void *work, void *space) {
    (void)space;
    const mn_roll_params *w = work;
    return mn_elementwise_items(where, mn_ceil_div(mn_rows_of(w->shape), ROWS), roll_rows, w);
}
