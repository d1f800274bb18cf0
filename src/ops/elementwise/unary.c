/* unary.c - y = f(x) and y = f(x) b on the CPU's threads, a row of the operands at a time. */
#include "kernels/cpu/simd/vector_targets.h"
#include "ops/elementwise/elementwise_internal.h"

#define MN_PER_TARGET "kernels/cpu/simd/elementwise.h"
#include "kernels/cpu/simd/per_target.h"

typedef void unary_loop(const mn_unary_args *p);

static unary_loop *loop_of(const mn_context *context, mn_dtype dtype, bool backward) {
    if (dtype == MN_F64) return backward ? mn_unary_backward_f64 : mn_unary_forward_f64;
#define LOOP(id, name)                                                                             \
    if (context->target == MN_TARGET_##id) {                                                       \
        return backward ? mn_unary_backward_##name : mn_unary_forward_##name;                      \
    }
    MN_VECTOR_TARGETS(LOOP)
#undef LOOP
    (void)context;
    return backward ? mn_unary_backward_f32 : mn_unary_forward_f32;
}

typedef struct unary_job {
    const mn_unary_params *w;
    unary_loop *forward, *backward;    // NULL: not wanted
    mn_pieces pieces;
} unary_job;

static void run_piece(void *context, int64_t item, int worker) {
    (void)worker;
    const unary_job *j = context;
    const mn_unary_params *w = j->w;
    const mn_pieces *p = &j->pieces;
    const mn_unary_args piece = {
        .kind = w->f, .n = mn_piece_width(p, item), .x = mn_piece_at(p, &w->x, item),
        .b = mn_piece_at(p, &w->b, item), .y = mn_piece_at(p, &w->y, item),
        .dy = mn_piece_at(p, &w->dy, item), .dx = mn_piece_at(p, &w->dx, item),
        .db = mn_piece_at(p, &w->db, item), .add_x = w->add_x, .add_b = w->add_b };
    if (j->forward) j->forward(&piece);
    if (j->backward) j->backward(&piece);
}

int mn_elementwise_unary_cpu(void *where, const void *work, void *space) {
    (void)space;
    const mn_unary_params *w = work;
    const mn_view *const views[] = { &w->x, &w->b, &w->y, &w->dy, &w->dx, &w->db };
    unary_job job = { .w = w };
    job.pieces = mn_pieces_of(w->shape, views, MN_COUNTOF(views));
    if (w->y.data) job.forward = loop_of(where, w->x.dtype, false);
    if (w->dy.data) job.backward = loop_of(where, w->x.dtype, true);
    return mn_elementwise_items(where, job.pieces.count, run_piece, &job);
}
