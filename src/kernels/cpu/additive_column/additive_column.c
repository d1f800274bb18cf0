/* additive_column.c - chunks of additive_column.h, and the forward pass: one item is some value
 * columns of one head of one sequence. */
#include "kernels/cpu/additive_column/additive_column.h"

#include <string.h>

#include "base/checked.h"
#include "base/util.h"

float *MN_T(mn_column_place)(mn_column_chunk *c, float *memory, const mn_call *call) {
    const int64_t values = MN_COLUMN_BLOCK * call->V;
    float *at = memory;
    c->P = at, at += MN_COLUMN_BLOCK * MN_COLUMN_BLOCK;
    c->up = at, at += values;
    c->down = at, at += values;
    c->tail = at, at += values;
    c->R = at, at += values;
    c->o = at, at += values;
    c->first = at, at += call->V;
    c->all = at, at += call->V;
    c->G = at, at += call->V;
    return at;
}

void MN_T(mn_column_outer)(float *S, const mn_column_chunk *c, const float *x, const float *y,
                           int64_t y_row, float alpha) {
    const int64_t K = c->p->call.K, V = c->p->call.V;
    const mn_gemm_args args = { .c = S, .c_row = K, .a = x, .a_row = 1, .a_col = V, .b = y,
                                .b_row = y_row, .M = V, .N = K, .K = c->L, .alpha = alpha,
                                .base = MN_GEMM_SCALE, .c_scale = c->all };
    MN_T(mn_gemm)(&args);
}

/* Tokens of the chunk at t. */
static int64_t length_of(const mn_column_chunk *c, int64_t t, int64_t end) {
    const int64_t V = c->p->call.V;
    memset(c->G, 0, (size_t)V * sizeof *c->G);
    for (int64_t n = 1; t + n < end; n++) {
        const float *g = MN_ROW(float, c->p->g, c->b, t + n, c->h);
        vf least = vf_zero();
        for (int64_t j = 0; j < V; j += MN_VW) {
            const int lanes = vf_lanes(V - j);
            const vf sum = vf_add(vf_load_n(c->G + j, lanes), vf_load_n(g + j, lanes));
            vf_store_n(c->G + j, sum, lanes);
            least = vf_min(least, vf_keep_first(sum, lanes));
        }
        if (-vf_max_lanes(vf_neg(least)) < -MN_COLUMN_FALL) return n;
    }
    return end - t;
}

/* The decays of a chunk, column by column. */
static void take_decays(mn_column_chunk *c) {
    const int64_t V = c->p->call.V, L = c->L;
    const float *g0 = MN_ROW(float, c->p->g, c->b, c->t0, c->h);
    for (int64_t j = 0; j < V; j += MN_VW) {
        const int lanes = vf_lanes(V - j);
        const vf start = vf_load_n(g0 + j, lanes);
        vf G = vf_zero();
        for (int64_t t = 0; t < L; t++) {
            const float *g = MN_ROW(float, c->p->g, c->b, c->t0 + t, c->h);
            if (t > 0) G = vf_add(G, vf_load_n(g + j, lanes));
            vf_store_n(c->tail + t * V + j, G, lanes);
            vf_store_n(c->up + t * V + j, vf_exp(G), lanes);
            vf_store_n(c->down + t * V + j, vf_exp(vf_neg(G)), lanes);
        }
        for (int64_t t = 0; t < L; t++) {
            float *at = c->tail + t * V + j;
            vf_store_n(at, vf_exp(vf_sub(G, vf_load_n(at, lanes))), lanes);
        }
        vf_store_n(c->first + j, vf_exp(start), lanes);
        vf_store_n(c->all + j, vf_exp(vf_add(start, G)), lanes);
    }
}

void MN_T(mn_column_take)(mn_column_chunk *c, int64_t t, int64_t end) {
    const mn_additive_column_args *p = c->p;
    c->L = length_of(c, t, end);
    c->t0 = t;
    take_decays(c);
    const mn_gemm_args scores = {
        .c = c->P, .c_row = c->L, .a = MN_ROW(float, p->q, c->b, t, c->h),
        .a_row = p->q.stride[1], .a_col = 1, .b = MN_ROW(float, p->k, c->b, t, c->h),
        .b_row = p->k.stride[1], .M = c->L, .N = c->L, .K = p->call.K, .alpha = (float)p->scale,
        .shape = MN_GEMM_C_LOWER,
    };
    MN_T(mn_gemm_nt)(&scores);
}

/* R = V . factors */
static void scale_values(mn_column_chunk *c, const float *factors) {
    const int64_t V = c->p->call.V;
    for (int64_t t = 0; t < c->L; t++) {
        mn_column_times(c->R + t * V, MN_ROW(float, c->p->v, c->b, c->t0 + t, c->h),
                        factors + t * V, V);
    }
}

void MN_T(mn_column_outputs)(mn_column_chunk *c, const float *S) {
    const mn_additive_column_args *p = c->p;
    const int64_t K = p->call.K, V = p->call.V, L = c->L;
    const mn_gemm_args before = { .c = c->o, .c_row = V,
                                  .a = MN_ROW(float, p->q, c->b, c->t0, c->h),
                                  .a_row = p->q.stride[1], .a_col = 1, .b = S, .b_row = K, .M = L,
                                  .N = V, .K = K, .alpha = (float)p->scale };
    MN_T(mn_gemm_nt)(&before);
    for (int64_t t = 0; t < L; t++) mn_column_times(c->o + t * V, c->o + t * V, c->first, V);
    scale_values(c, c->down);
    const mn_gemm_args inside = { .c = c->o, .c_row = V, .a = c->P, .a_row = L, .a_col = 1,
                                  .b = c->R, .b_row = V, .M = L, .N = V, .K = L, .alpha = 1.0f,
                                  .base = MN_GEMM_ADD, .shape = MN_GEMM_A_LOWER };
    MN_T(mn_gemm)(&inside);
}

void MN_T(mn_column_advance)(mn_column_chunk *c, float *S) {
    const mn_additive_column_args *p = c->p;
    scale_values(c, c->tail);
    MN_T(mn_column_outer)(S, c, c->R, MN_ROW(float, p->k, c->b, c->t0, c->h), p->k.stride[1], 1.0f);
}

/* ---- forward --------------------------------------------------------------------------------- */

mn_additive_column_args MN_T(mn_additive_column_tile)(const mn_additive_column_args *p,
                                                      mn_columns col) {
    mn_additive_column_args tile = *p;
    const int64_t j0 = col.j0, state = j0 * p->call.K;
    tile.call.V = col.n;
    tile.v = mn_in_from(p->v, j0), tile.g = mn_in_from(p->g, j0);
    tile.o = mn_out_from(p->o, j0), tile.cot.o = mn_in_from(p->cot.o, j0);
    tile.state0 = mn_in_from(p->state0, state), tile.state = mn_out_from(p->state, state);
    tile.cot.state = mn_in_from(p->cot.state, state);
    tile.grad.v = mn_out_from(p->grad.v, j0), tile.grad.g = mn_out_from(p->grad.g, j0);
    tile.grad.state0 = mn_out_from(p->grad.state0, state);
    return tile;
}

bool MN_T(mn_additive_column_forward_plan)(const void *args, mn_plan *plan) {
    const mn_call *c = args;
    int64_t state, floats;
    plan->n_phases = 1;
    plan->items[0] = mn_n_sequences(c) * c->H * mn_column_tiles_of(c).count;
    return mn_mul_i64(&state, c->K, c->V) && mn_mul_i64(&floats, c->V, 8 * MN_COLUMN_BLOCK) &&
           mn_add_i64(&floats, state, mn_column_floats(c)) &&
           mn_mul_size(&plan->scratch_bytes, (size_t)floats, sizeof(float));
}

static void write_outputs(const mn_column_chunk *c) {
    const int64_t V = c->p->call.V;
    for (int64_t t = 0; t < c->L; t++) {
        float *o = MN_ROW_OUT(float, c->p->o, c->b, c->t0 + t, c->h);
        if (o) mn_column_times(o, c->o + t * V, c->up + t * V, V);
    }
}

void MN_T(mn_additive_column_forward_run)(const void *args, int phase, int64_t item, void *shared,
                                          void *scratch) {
    (void)phase, (void)shared;
    const mn_call *call = args;
    const mn_column_tiles tiles = mn_column_tiles_of(call);
    const mn_columns col = mn_columns_at(call, tiles, item % tiles.count);
    const mn_additive_column_args some = MN_T(mn_additive_column_tile)(args, col), *p = &some;
    item /= tiles.count;
    const int64_t n = item / p->call.H, h = item % p->call.H, KV = p->call.K * p->call.V;
    const mn_sequence seq = mn_sequence_at(&p->call, n);
    const float *from = MN_ROW(float, p->state0, n, 0, h);
    float *S = scratch, *last = MN_ROW_OUT(float, p->state, n, 0, h);
    mn_column_chunk c = { .p = p, .b = seq.b, .h = h };
    MN_T(mn_column_place)(&c, S + KV, &p->call);
    if (from) memcpy(S, from, (size_t)KV * sizeof *S);
    else memset(S, 0, (size_t)KV * sizeof *S);
    for (int64_t t = 0; t < seq.length; t += c.L) {
        const int64_t end = mn_min(t / MN_COLUMN_BLOCK * MN_COLUMN_BLOCK + MN_COLUMN_BLOCK,
                                   seq.length);
        MN_T(mn_column_take)(&c, seq.t0 + t, seq.t0 + end);
        if (p->o.data) {
            MN_T(mn_column_outputs)(&c, S);
            write_outputs(&c);
        }
        MN_T(mn_column_advance)(&c, S);
    }
    if (last) memcpy(last, S, (size_t)KV * sizeof *last);
}
