/* fused.c - fused functions (elementwise.def) and sums over tokens on the CPU's threads. */
#include "kernels/functions_scalar.h"
#include "kernels/cpu/simd/vector_targets.h"
#include "ops/elementwise/elementwise_internal.h"

#define MN_PER_TARGET "kernels/cpu/simd/elementwise.h"
#include "kernels/cpu/simd/per_target.h"

/* ---- element by element ---------------------------------------------------------------------- */

#define FUSED_LOOP(id, outs, suffix, TYPE)                                                         \
    static void run_##id##_##suffix(const mn_fused_args *p) {                                      \
        for (int64_t i = 0; i < p->n; i++) {                                                       \
            TYPE x[3], y[3];                                                                       \
            for (int k = 0; k < 3; k++) x[k] = p->in[k] ? ((const TYPE *)p->in[k])[i] : 0;         \
            fused_##id##_##suffix(y, x[0], x[1], x[2]);                                            \
            for (int k = 0; k < outs; k++) {                                                       \
                if (p->out[k]) ((TYPE *)p->out[k])[i] = y[k];                                      \
            }                                                                                      \
        }                                                                                          \
    }
#define FUSED(id, ins, outs, about)                                                                \
    FUSED_LOOP(id, outs, f32, float)                                                               \
    FUSED_LOOP(id, outs, f64, double)
#include "kernels/elementwise.def"

typedef void fused_loop(const mn_fused_args *p);

static fused_loop *loop_of(const mn_context *context, mn_fused_kind kind, mn_dtype dtype) {
    static fused_loop *const loops[MN_N_FUSED][2] = {
#define FUSED(id, ins, outs, about) [MN_FUSED_##id] = { run_##id##_f32, run_##id##_f64 },
#include "kernels/elementwise.def"
    };
#define LOOP(id, name)                                                                             \
    if (dtype == MN_F32 && context->target == MN_TARGET_##id) return mn_fused_##name;
    MN_VECTOR_TARGETS(LOOP)
#undef LOOP
    (void)context;
    return loops[kind][dtype == MN_F64];
}

typedef struct fused_job {
    const mn_fused_params *w;
    fused_loop *loop;
    mn_pieces pieces;
} fused_job;

static void run_piece(void *context, int64_t item, int worker) {
    (void)worker;
    const fused_job *j = context;
    mn_fused_args piece = { .kind = j->w->f, .n = mn_piece_width(&j->pieces, item) };
    for (int k = 0; k < 3; k++) {
        piece.in[k] = mn_piece_at(&j->pieces, &j->w->in[k], item);
        piece.out[k] = mn_piece_at(&j->pieces, &j->w->out[k], item);
    }
    j->loop(&piece);
}

int mn_elementwise_fused_cpu(void *where, const void *work, void *space) {
    (void)space;
    const mn_fused_params *w = work;
    const mn_view *const views[] = { &w->in[0], &w->in[1], &w->in[2],
                                     &w->out[0], &w->out[1], &w->out[2] };
    fused_job job = { .w = w, .loop = loop_of(where, w->f, w->in[0].dtype) };
    job.pieces = mn_pieces_of(w->shape, views, MN_COUNTOF(views));
    return mn_elementwise_items(where, job.pieces.count, run_piece, &job);
}

/* ---- sums over tokens ------------------------------------------------------------------------ */

enum { COLUMNS = 64 };

static double get(const mn_view *v, int64_t i) {
    if (!v->data) return 0.0;
    return v->dtype == MN_F64 ? ((const double *)v->data)[i] : (double)((const float *)v->data)[i];
}

/* sum[i] gets the terms of a token's numbers [first, first + n) of a head, which begin at `at`. */
#define TOKEN_SUM(id, about)                                                                       \
    static void add_##id(double *sum, const mn_token_sum_params *w, const int64_t at[3],           \
                         int64_t n) {                                                              \
        for (int64_t i = 0; i < n; i++) {                                                          \
            sum[i] += mn_term_##id(get(&w->in[0], at[0] + i), get(&w->in[1], at[1] + i),           \
                                   get(&w->in[2], at[2] + i));                                     \
        }                                                                                          \
    }
#include "kernels/elementwise.def"

/* One item is up to 64 columns of a head, whose tokens are added in their order. */
static void sum_columns(void *context, int64_t item, int worker) {
    (void)worker;
    static void (*const add[MN_N_TOKEN_SUM])(double *, const mn_token_sum_params *,
                                             const int64_t *, int64_t) = {
#define TOKEN_SUM(id, about) [MN_TOKEN_SUM_##id] = add_##id,
#include "kernels/elementwise.def"
    };
    const mn_token_sum_params *w = context;
    const int64_t *shape = w->shape, across = mn_ceil_div(shape[3], COLUMNS);
    const int64_t h = item / across, first = item % across * COLUMNS;
    const int64_t n = mn_min(COLUMNS, shape[3] - first), tokens = shape[0] * shape[1];
    double sum[COLUMNS] = { 0.0 };
    for (int64_t token = 0; token < tokens; token++) {
        int64_t at[3];
        for (int k = 0; k < 3; k++) {
            at[k] = mn_view_row(&w->in[k], shape, token * shape[2] + h) + first;
        }
        add[w->f](sum, w, at, n);
    }
    const int64_t to = h * w->sum.stride[2] + first;
    for (int64_t i = 0; i < n; i++) {
        if (w->sum.dtype == MN_F64) ((double *)w->sum.data)[to + i] = sum[i];
        else ((float *)w->sum.data)[to + i] = (float)sum[i];
    }
}

int mn_elementwise_token_sum_cpu(void *where, const void *work, void *space) {
    (void)space;
    const mn_token_sum_params *w = work;
    if (!w->sum.data) return 0;
    const int64_t items = w->shape[2] * mn_ceil_div(w->shape[3], (int64_t)COLUMNS);
    return mn_elementwise_items(where, items, sum_columns, w);
}
