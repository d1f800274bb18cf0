/* rope.c - rotary positions on the rows of (B,T,H,K).
 *
 * Phase 0 fills the table of cosines and sines, phase 1 turns all heads of a block of tokens. */
#include "kernels/cpu/rope/turn.h"

#include <string.h>

#include "base/checked.h"
#include "kernels/kernel.h"
#include "kernels/tiles.h"
#include "kernels/cpu/simd/target.h"

enum { TOKENS = 64 };    // of one item

static turn_table open_table(const mn_rope_args *p, void *shared) {
    const int64_t n_steps = turn_steps(mn_longest_sequence(&p->call));
    return (turn_table){ shared, n_steps, p->call.K, p->pos0, p->base, p->kind };
}

static bool plan_blocks(const mn_rope_args *p, mn_plan *plan) {
    const int64_t rows = turn_table_rows(mn_longest_sequence(&p->call));
    plan->n_phases = 2;
    plan->items[0] = mn_ceil_div(rows, TURN_ROWS);
    plan->items[1] = mn_tile_slots(&p->call, p->call.T, TOKENS);
    return mn_mul_size(&plan->shared_bytes, (size_t)rows * sizeof(double), (size_t)p->call.K);
}

/* Turns the rows of one tile from x to y; zero where x is absent. */
static void turn_tile(const mn_rope_args *p, const mn_in *x, const mn_out *y, int64_t slot,
                      const turn_table *table, bool back) {
    const mn_call *c = &p->call;
    mn_tile tile;
    if (!y->data || !mn_tile_at(&tile, c, c->T, TOKENS, slot)) return;
    const mn_sequence seq = mn_sequence_at(c, tile.n);
    for (int64_t t = tile.first; t < tile.first + tile.n_rows; t++) {
        for (int64_t h = 0; h < c->H; h++) {
            const float *from = MN_ROW(float, *x, seq.b, seq.t0 + t, h);
            float *to = MN_ROW_OUT(float, *y, seq.b, seq.t0 + t, h);
            if (from) turn_row(to, from, table, t, back);
            else memset(to, 0, (size_t)c->K * sizeof *to);
        }
    }
}

static void run_block(const mn_rope_args *p, int phase, int64_t item, void *shared, bool back) {
    const turn_table table = open_table(p, shared);
    if (phase == 0) {
        const int64_t rows = turn_table_rows(mn_longest_sequence(&p->call));
        const int64_t end = mn_min(rows, (item + 1) * TURN_ROWS);
        for (int64_t row = item * TURN_ROWS; row < end; row++) turn_fill_row(&table, row);
    } else if (back) {
        turn_tile(p, &p->cot.y, &p->grad.x, item, &table, true);
    } else {
        turn_tile(p, &p->x, &p->y, item, &table, false);
    }
}

bool MN_T(mn_rope_forward_plan)(const void *args, mn_plan *plan) {
    return plan_blocks(args, plan);
}

void MN_T(mn_rope_forward_run)(const void *args, int phase, int64_t item, void *shared,
                               void *scratch) {
    (void)scratch;
    run_block(args, phase, item, shared, false);
}

bool MN_T(mn_rope_backward_plan)(const void *args, mn_plan *plan) {
    return plan_blocks(args, plan);
}

void MN_T(mn_rope_backward_run)(const void *args, int phase, int64_t item, void *shared,
                                void *scratch) {
    (void)scratch;
    run_block(args, phase, item, shared, true);
}
