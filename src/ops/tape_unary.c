/* tape_unary.c - y = f(x) and y = f(x) b on the tape, a row of the operands at a time. */
#include "base/util.h"
#include "ops/tape_node.h"

#if MN_HAVE_X86_TARGETS
#define MN_TARGET avx2
#include "kernels/vec/unary.h"
#undef MN_TARGET
#define MN_TARGET avx512
#include "kernels/vec/unary.h"
#undef MN_TARGET
#endif

typedef struct unary {
    mn_unary f;
    mn_tensor *x, *b, *y;
} unary;

typedef void unary_loop(const mn_unary_args *p);

static unary_loop *loop_of(const mn_tape *tape, bool backward) {
    if (tape->dtype == MN_F64) return backward ? mn_unary_backward_f64 : mn_unary_forward_f64;
#if MN_HAVE_X86_TARGETS
    if (tape->context->target == MN_TARGET_AVX512) {
        return backward ? mn_unary_backward_avx512 : mn_unary_forward_avx512;
    }
    if (tape->context->target == MN_TARGET_AVX2) {
        return backward ? mn_unary_backward_avx2 : mn_unary_forward_avx2;
    }
#endif
    return backward ? mn_unary_backward_f32 : mn_unary_forward_f32;
}

/* Elements per item where everything is contiguous. */
enum { PIECE = 4096 };

/* The operands as rows; contiguous ones are one row cut into pieces. */
typedef struct unary_job {
    mn_unary_args args;
    unary_loop *loop;
    size_t item;
    int64_t width, rows, shape[3];
    bool plain;
    const mn_tensor *x, *b;
} unary_job;

static const void *moved(const void *at, int64_t elements, size_t item) {
    return at ? (const char *)at + (size_t)elements * item : NULL;
}

static void run_piece(void *context, int64_t item, int worker) {
    (void)worker;
    const unary_job *j = context;
    mn_unary_args p = j->args;
    const int64_t at = j->plain ? item * PIECE : item * j->width;
    const int64_t x_at = j->plain ? at : mn_row_at(j->x, item);
    const int64_t b_at = j->plain || !j->b ? at : mn_row_at(j->b, item);
    p.n = j->plain ? mn_min(PIECE, j->rows * j->width - at) : j->width;
    p.x = moved(p.x, x_at, j->item);
    p.dx = (void *)moved(p.dx, x_at, j->item);
    p.b = moved(p.b, b_at, j->item);
    p.db = (void *)moved(p.db, b_at, j->item);
    p.y = (void *)moved(p.y, at, j->item);
    p.dy = moved(p.dy, at, j->item);
    j->loop(&p);
}

static void run(mn_tape *tape, const unary *u, const mn_unary_args *args, bool backward) {
    const int64_t *n = u->x->shape;
    unary_job job = { .args = *args, .loop = loop_of(tape, backward), .item = tape->item,
                      .width = n[3], .rows = n[0] * n[1] * n[2], .x = u->x, .b = u->b };
    job.plain = mn_is_contiguous(u->x) && (!u->b || mn_is_contiguous(u->b));
    job.args.kind = u->f;
    job.args.x = u->x->data;
    job.args.b = u->b ? u->b->data : NULL;
    const int64_t pieces = job.plain ? mn_ceil_div(job.rows * job.width, PIECE) : job.rows;
    mn_tape_items(tape, pieces, run_piece, &job);
}

static void back_unary(mn_tape *tape, void *payload) {
    unary *u = payload;
    mn_unary_args args = { .dy = mn_grad_read(u->y) };
    if (!args.dy) return;
    if (mn_wants(u->x)) args.dx = mn_grad_write(tape, u->x, &args.add_x);
    if (mn_wants(u->b)) args.db = mn_grad_write(tape, u->b, &args.add_b);
    if (mn_tape_runs(tape)) run(tape, u, &args, true);
}

mn_tensor *mn_tape_gate(mn_tape *tape, mn_unary f, mn_tensor *x, mn_tensor *b) {
    if (!x || !b || mn_tape_dead(tape)) return NULL;
    for (int i = 0; i < 4; i++) {
        if (x->shape[i] == b->shape[i] && x != b) continue;
        return mn_tape_fail(tape, mn_fail(MN_ERR_INTERNAL, "%s: a gate of another shape",
                                          tape->scope));
    }
    unary *u = mn_tape_note(tape, sizeof *u);
    mn_tensor *y = mn_tape_new(tape, x->shape);
    if (!u || !y) return NULL;
    *u = (unary){ f, x, b, y };
    if (mn_tape_runs(tape)) run(tape, u, &(mn_unary_args){ .y = y->data }, false);
    mn_tape_record(tape, mn_unary_name(f), back_unary, u, mn_wants(x) || mn_wants(b), &y, 1);
    return y;
}

mn_tensor *mn_tape_unary(mn_tape *tape, mn_unary f, mn_tensor *x) {
    if (!x || mn_tape_dead(tape)) return NULL;
    unary *u = mn_tape_note(tape, sizeof *u);
    mn_tensor *y = mn_tape_new(tape, x->shape);
    if (!u || !y) return NULL;
    *u = (unary){ f, x, NULL, y };
    if (mn_tape_runs(tape)) run(tape, u, &(mn_unary_args){ .y = y->data }, false);
    mn_tape_record(tape, mn_unary_name(f), back_unary, u, mn_wants(x), &y, 1);
    return y;
}
