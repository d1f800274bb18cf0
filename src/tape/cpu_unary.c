/* cpu_unary.c - y = f(x) and y = f(x) b on the CPU's threads, a row of the operands at a time.
 * */
#include "base/dtype.h"
#include "base/util.h"
#include "tape/cpu.h"

#if MN_HAVE_X86_TARGETS
#define MN_TARGET avx2
#include "kernels/cpu/simd/unary.h"
#undef MN_TARGET
#define MN_TARGET avx512
#include "kernels/cpu/simd/unary.h"
#undef MN_TARGET
#endif

typedef void unary_loop(const mn_unary_args *p);

static unary_loop *loop_of(const mn_context *context, mn_dtype dtype, bool backward) {
    if (dtype == MN_F64) return backward ? mn_unary_backward_f64 : mn_unary_forward_f64;
#if MN_HAVE_X86_TARGETS
    if (context->target == MN_TARGET_AVX512) {
        return backward ? mn_unary_backward_avx512 : mn_unary_forward_avx512;
    }
    if (context->target == MN_TARGET_AVX2) {
        return backward ? mn_unary_backward_avx2 : mn_unary_forward_avx2;
    }
#endif
    (void)context;
    return backward ? mn_unary_backward_f32 : mn_unary_forward_f32;
}

/* Elements per item where everything is contiguous. */
enum { PIECE = 4096 };

/* The operands as rows; contiguous ones are one row cut into pieces. */
typedef struct unary_job {
    const mn_unary_params *w;
    unary_loop *forward, *backward;    // NULL: not wanted
    int64_t rows;
    bool flat;
} unary_job;

static void *row_of(const unary_job *j, const mn_view *v, int64_t item) {
    if (!v->data) return NULL;
    const int64_t to = j->flat ? item * PIECE : mn_view_row(v, j->w->shape, item);
    return (char *)v->data + to * (int64_t)mn_dtype_bytes(v->dtype);
}

static void run_piece(void *context, int64_t item, int worker) {
    (void)worker;
    const unary_job *j = context;
    const mn_unary_params *w = j->w;
    const int64_t width = w->shape[3];
    const mn_unary_args piece = {
        .kind = w->f, .n = j->flat ? mn_min(PIECE, j->rows * width - item * PIECE) : width,
        .x = row_of(j, &w->x, item), .b = row_of(j, &w->b, item), .y = row_of(j, &w->y, item),
        .dy = row_of(j, &w->dy, item), .dx = row_of(j, &w->dx, item),
        .db = row_of(j, &w->db, item), .add_x = w->add_x, .add_b = w->add_b };
    if (j->forward) j->forward(&piece);
    if (j->backward) j->backward(&piece);
}

int mn_elementwise_unary_cpu(void *where, const void *work, void *space) {
    (void)space;
    const mn_unary_params *w = work;
    const mn_view *views[] = { &w->x, &w->b, &w->y, &w->dy, &w->dx, &w->db };
    unary_job job = { .w = w, .rows = mn_rows_of(w->shape), .flat = true };
    if (w->y.data) job.forward = loop_of(where, w->x.dtype, false);
    if (w->dy.data) job.backward = loop_of(where, w->x.dtype, true);
    for (size_t i = 0; i < MN_COUNTOF(views); i++) {
        if (views[i]->data && !mn_view_is_flat(views[i], w->shape)) job.flat = false;
    }
    const int64_t pieces = job.flat ? mn_ceil_div(job.rows * w->shape[3], PIECE) : job.rows;
    return mn_elementwise_items(where, pieces, run_piece, &job);
}
