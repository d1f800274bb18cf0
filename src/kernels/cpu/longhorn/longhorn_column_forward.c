/* longhorn_column_forward.c - outputs and final state of per-column Longhorn, chunk after chunk.
 *
 * One item is some value columns of one head of one sequence. Chunk form in longhorn_column.h. */
#include "base/checked.h"
#include "kernels/cpu/longhorn/longhorn_column.h"

bool MN_T(mn_longhorn_column_forward_plan)(const void *args, mn_plan *plan) {
    const mn_call *c = args;
    if (!mn_cells_fit(c)) return false;
    const int64_t width = mn_column_tile_width(c);
    int64_t state;
    plan->n_phases = 1;
    plan->items[0] = mn_n_sequences(c) * c->H * mn_ceil_div(c->V, width);
    return mn_mul_i64(&state, c->K, width) &&
           mn_add_i64(&state, state, MN_T(mn_column_chunk_floats)(c->K, width)) &&
           mn_mul_size(&plan->scratch_bytes, (size_t)state, sizeof(float));
}

/* O = scale (Q S + P U) */
static void write_outputs(const mn_longhorn_column_args *p, const mn_column_chunk *c,
                          const mn_column_tile *tile, int64_t b, int64_t t0, const float *S) {
    float *o = MN_ROW_OUT(float, p->o, b, t0, tile->h);
    if (!o) return;
    mn_gemm_args product = { .c = o + tile->j0,
                             .c_row = p->o.stride[1],
                             .a = c->q,
                             .a_row = p->call.K,
                             .a_col = 1,
                             .b = S,
                             .b_row = tile->width,
                             .M = c->L,
                             .N = tile->n,
                             .K = p->call.K,
                             .alpha = (float)p->scale,
                             .base = MN_GEMM_SET };
    MN_T(mn_gemm)(&product);
    product.a = c->P, product.a_row = c->L;
    product.b = c->u, product.K = c->L;
    product.base = MN_GEMM_ADD, product.shape = MN_GEMM_A_LOWER;
    MN_T(mn_gemm)(&product);
}

void MN_T(mn_longhorn_column_forward_run)(const void *args, int phase, int64_t item, void *shared,
                                          void *scratch) {
    (void)phase, (void)shared;
    const mn_longhorn_column_args *p = args;
    const int64_t K = p->call.K, V = p->call.V;
    const mn_column_tile tile = mn_column_tile_at(&p->call, item);
    const mn_sequence seq = mn_sequence_at(&p->call, tile.sequence);
    mn_column_chunk c;
    float *S = scratch;
    MN_T(mn_column_chunk_place)(&c, S + K * tile.width, K, tile.width);
    MN_T(mn_column_state_load)(S, p->state0, &tile, K, V);
    for (int64_t start = 0; start < seq.length; start += MN_COLUMN_CHUNK) {
        const int64_t t0 = seq.t0 + start, L = mn_min(MN_COLUMN_CHUNK, seq.length - start);
        MN_T(mn_column_chunk_prepare)(&c, p, &tile, seq.b, t0, L, p->o.data);
        MN_T(mn_column_chunk_solve)(&c, p, &tile, seq.b, t0, S);
        write_outputs(p, &c, &tile, seq.b, t0, S);
        MN_T(mn_column_chunk_advance)(S, &c, K, tile.width);
    }
    MN_T(mn_column_state_store)(p->state, S, &tile, K, V);
}
