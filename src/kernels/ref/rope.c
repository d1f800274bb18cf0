/* rope.c - rotary positions: pair j of a row's channels turns by (pos0 + t) base^(-2j/K).
 *
 * A rotation's adjoint is the rotation back. One item is one head of one sequence; positions
 * restart in each. */
#include "kernels/ref/turn.h"

static bool plan_rows(const mn_rope_args *p, mn_plan *plan) {
    return mn_ref_plan(plan, mn_n_sequences(&p->call) * p->call.H, p->call.K);
}

/* Rows of one head from `x` to `y`; zero where x is absent. */
static void turn_rows(const mn_rope_args *p, const mn_in *x, const mn_out *y, int64_t item,
                      int direction, double *row) {
    const int64_t K = p->call.K, n = item / p->call.H, h = item % p->call.H;
    const mn_sequence seq = mn_sequence_at(&p->call, n);
    for (int64_t t = 0; y->data && t < seq.length; t++) {
        const REAL *from = MN_ROW(REAL, *x, seq.b, seq.t0 + t, h);
        REAL *to = MN_ROW_OUT(REAL, *y, seq.b, seq.t0 + t, h);
        for (int64_t i = 0; i < K; i++) row[i] = mn_ref_get(from, i);
        mn_ref_turn(row, row, K, p->kind, p->base, p->pos0 + t, direction);
        for (int64_t i = 0; i < K; i++) to[i] = (REAL)row[i];
    }
}

bool MN_REF(mn_rope_forward_plan)(const void *args, mn_plan *plan) {
    return plan_rows(args, plan);
}

void MN_REF(mn_rope_forward_run)(const void *args, int phase, int64_t item, void *shared,
                                 void *scratch) {
    (void)phase, (void)shared;
    const mn_rope_args *p = args;
    turn_rows(p, &p->x, &p->y, item, 1, scratch);
}

bool MN_REF(mn_rope_backward_plan)(const void *args, mn_plan *plan) {
    return plan_rows(args, plan);
}

void MN_REF(mn_rope_backward_run)(const void *args, int phase, int64_t item, void *shared,
                                  void *scratch) {
    (void)phase, (void)shared;
    const mn_rope_args *p = args;
    turn_rows(p, &p->cot.y, &p->grad.x, item, -1, scratch);
}
