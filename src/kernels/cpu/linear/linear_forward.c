/* linear_forward.c - outputs and states of additive and delta, chunk after chunk.
 *
 * With many heads one item is a few neighbouring heads of one sequence: rows of one head lie a page
 * apart, and finding a page costs more than reading a row, so heads take turns chunk by chunk while
 * the pages are at hand. With few, a first phase prepares all chunks
 * in parallel (linear_bank.h) and a second walks them with the value columns cut into tiles, so
 * that one long sequence uses several cores. Columns never meet, so the cut leaves every bit as it
 * is. */
#include "kernels/cpu/linear/linear.h"

#include <string.h>

#include "base/checked.h"
#include "base/util.h"
#include "kernels/cpu/linear/linear_bank.h"
#include "kernels/cpu/linear/linear_state.h"

/* Heads of an item: as many as leave enough items and have their states in the second cache. No bit
 * depends on it. */
static int64_t heads_of_item(const mn_call *c) {
    enum { ENOUGH = 8, MOST = 4, MOST_FLOATS = 1 << 16 };
    int64_t heads = 1;
    while (heads < MOST && c->H % (2 * heads) == 0 &&
           mn_n_sequences(c) * (c->H / (2 * heads)) >= ENOUGH &&
           c->V <= MOST_FLOATS / mn_max(c->K, 1) / (2 * heads)) {
        heads *= 2;
    }
    return heads;
}

bool MN_T(mn_linear_forward_plan)(const mn_linear *p, mn_plan *plan) {
    const mn_call *c = p->call;
    const int64_t width = mn_decay_width(p->decay, c->K);
    const mn_column_tiles tiles = mn_column_tiles_of(c);
    int64_t state, rows, slots;
    plan->n_phases = 2;
    plan->items[0] = tiles.count > 1 ? mn_bank_slots(c) * c->H : 0;
    plan->items[1] = mn_n_sequences(c) * c->H / heads_of_item(c) * tiles.count;
    return mn_mul_i64(&slots, mn_bank_slots(c), tiles.count > 1 ? c->H : 0) &&
           mn_mul_size(&plan->shared_bytes, MN_T(mn_bank_stride)(p), (size_t)slots) &&
           mn_mul_i64(&state, c->K, tiles.width) &&
           mn_mul_i64(&state, state, heads_of_item(c)) &&
           mn_mul_i64(&rows, MN_CHUNK, tiles.width) &&
           mn_mul_size(&plan->scratch_bytes, sizeof(float),
                       (size_t)(state + rows + MN_T(mn_chunk_floats)(c->K, width, p->e.data)));
}

/* o = (q exp G) S + P R for the columns of the tile */
static void write_outputs(const mn_linear *p, const mn_chunk *c, const mn_columns *col,
                          const float *S, const float *R, int64_t r_row) {
    float *o = MN_ROW_OUT(float, p->o, c->b, c->t0, c->h);
    if (!o) return;
    mn_gemm_args product = { .c = o + col->j0, .c_row = p->o.stride[1], .a = c->qd, .a_row = c->K,
                             .a_col = 1, .b = S, .b_row = col->n, .M = c->L, .N = col->n, .K = c->K,
                             .alpha = 1.0f, .base = MN_GEMM_SET };
    MN_T(mn_gemm)(&product);
    product.a = c->P, product.a_row = c->L;
    product.b = R, product.b_row = r_row, product.K = c->L;
    product.base = MN_GEMM_ADD, product.shape = MN_GEMM_A_LOWER;
    MN_T(mn_gemm)(&product);
}

/* Values that lie a page or more apart are gathered: two products go over them. */
static const float *gather_values(float *R, int64_t *r_row, const float *v, int64_t L, int64_t n) {
    if (*r_row == n) return v;
    for (int64_t t = 0; t < L; t++) memcpy(R + t * n, v + t * *r_row, (size_t)n * sizeof *R);
    *r_row = n;
    return R;
}

/* Work space of an item: states of its heads, and the chunk at hand. */
typedef struct work {
    mn_chunk c;
    mn_columns col;
    float *S, *R;
    void *bank;    // prepared chunks, or NULL
} work;

/* The chunk at `start` of one head, whose state is S. */
static void forward_chunk(work *w, const mn_linear *p, int64_t n, int64_t h, int64_t start,
                          float *S) {
    const mn_call *call = p->call;
    const mn_scan_mode mode = p->o.data ? MN_SCAN_FORWARD : MN_SCAN_REPLAY;
    const mn_sequence seq = mn_sequence_at(call, n);
    mn_chunk *c = &w->c;
    int64_t r_row;
    if (w->bank)
        MN_T(mn_bank_take)(c, w->bank, p, mn_bank_first(call, n) + start / MN_CHUNK, h);
    else MN_T(mn_chunk_prepare)(c, p, &seq, h, start, mode);
    mn_prefetch_written(p->o, c, call->V);
    const float *residual = MN_T(mn_chunk_residual)(w->R, &r_row, p, c, &w->col, S);
    if (!p->e.data) residual = gather_values(w->R, &r_row, residual, c->L, w->col.n);
    write_outputs(p, c, &w->col, S, residual, r_row);
    MN_T(mn_state_advance)(S, c, &w->col, residual, r_row);
}

static void forward_item(const mn_linear *p, int64_t item, void *bank, void *scratch) {
    const mn_call *call = p->call;
    const mn_column_tiles tiles = mn_column_tiles_of(call);
    const int64_t heads = heads_of_item(call), groups = call->H / heads;
    const int64_t n = item / tiles.count / groups, first = item / tiles.count % groups * heads;
    const int64_t state = call->K * tiles.width, length = mn_sequence_at(call, n).length;
    work w = { .col = mn_columns_at(call, tiles, item % tiles.count), .S = scratch,
               .R = (float *)scratch + heads * state, .bank = tiles.count > 1 ? bank : NULL };
    MN_T(mn_chunk_place)(&w.c, w.R + MN_CHUNK * tiles.width, call->K,
                         mn_decay_width(p->decay, call->K), p->e.data);
    for (int64_t i = 0; i < heads; i++) {
        MN_T(mn_state_load)(w.S + i * state, p->state0, call, n, first + i, &w.col);
    }
    for (int64_t start = 0; start < length; start += MN_CHUNK) {
        for (int64_t i = 0; i < heads; i++) {
            forward_chunk(&w, p, n, first + i, start, w.S + i * state);
        }
    }
    for (int64_t i = 0; i < heads; i++) {
        MN_T(mn_state_store)(p->state, w.S + i * state, call, n, first + i, &w.col);
    }
}

void MN_T(mn_linear_forward_run)(const mn_linear *p, int phase, int64_t item, void *shared,
                                 void *scratch) {
    if (phase == 0) MN_T(mn_bank_fill)(shared, p, item);
    else forward_item(p, item, shared, scratch);
}
