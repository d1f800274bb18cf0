/* dplr_forward.c - outputs and final state of diagonal plus low rank.
 *
 * One item is some value columns of one head of one sequence; columns never meet. */
#include "base/checked.h"
#include "kernels/cpu/dplr/dplr.h"

bool MN_T(mn_dplr_forward_plan)(const void *args, mn_plan *plan) {
    const mn_call *c = args;
    if (!mn_cells_fit(c)) return false;
    const int64_t width = mn_column_tile_width(c);
    int64_t floats, decays;
    plan->n_phases = 1;
    plan->items[0] = mn_n_sequences(c) * c->H * mn_ceil_div(c->V, width);
    return mn_mul_i64(&floats, c->K + 1, width) &&
           mn_mul_i64(&decays, c->K, MN_DPLR_BLOCK) && mn_add_i64(&floats, floats, decays) &&
           mn_mul_size(&plan->scratch_bytes, (size_t)floats, sizeof(float));
}

void MN_T(mn_dplr_forward_run)(const void *args, int phase, int64_t item, void *shared,
                               void *scratch) {
    (void)phase, (void)shared;
    const mn_dplr_args *p = args;
    const int64_t K = p->call.K, V = p->call.V;
    const mn_column_tile tile = mn_column_tile_at(&p->call, item);
    const mn_sequence seq = mn_sequence_at(&p->call, tile.sequence);
    float *S = scratch, *u = S + K * tile.width;
    mn_dplr_block block = { .p = p, .b = seq.b, .h = tile.h, .w = u + tile.width };
    MN_T(mn_column_state_load)(S, p->state0, &tile, K, V);
    if (seq.length > 0) MN_T(mn_dplr_read)(u, S, p, seq.b, seq.t0, tile.h, tile.width);
    for (int64_t t = 0; t < seq.length; t += MN_DPLR_BLOCK) {
        block.t0 = seq.t0 + t;
        block.n = mn_min(MN_DPLR_BLOCK, seq.length - t);
        block.more = t + block.n < seq.length;
        MN_T(mn_dplr_prepare)(&block);
        MN_T(mn_dplr_advance)(&block, &tile, S, u, NULL, NULL);
    }
    MN_T(mn_column_state_store)(p->state, S, &tile, K, V);
}
