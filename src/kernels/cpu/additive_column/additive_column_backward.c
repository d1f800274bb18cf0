/* additive_column_backward.c - gradients in the terms of additive_column.h, chunk after chunk from
 * the last: with D the adjoint of the state behind the chunk and S the state before,
 *
 *   dZ = e^G . dO      dP = tril(dZ R')      U = k D'      R = V . e^-G, W = V . e^(G_L - G)
 *   dq = scale (dP k + (f . dZ) S)           dk = scale dP'q + W D
 *   dv = e^-G . (P'dZ) + e^(G_L - G) . U
 *   dG_t = o do - v dv;  dG_L += f e^(G_L) rowsum(S . D) + sum_s W . U
 *   D <- diag(f e^(G_L)) D + scale (f . dZ)'q
 *
 * and dg is the sum of dG from t to the end of the chunk. States come from replay.h, a block of
 * tokens at a time; those of the chunks inside a block are kept. One item is some value columns of
 * one head of one sequence; where they are not all, dq and dk are sums of parts. */
#include "kernels/cpu/additive_column/additive_column.h"

#include <string.h>

#include "kernels/cpu/chunk/parts.h"
#include "kernels/cpu/chunk/replay.h"
#include "kernels/cpu/simd/row.h"

typedef struct work {
    mn_column_chunk c;
    mn_sequence seq;
    int64_t n, h;
    float *D, *inner;                 // (V,K); states before the chunks of a block
    float *dZ, *fZ, *U, *dR, *dP;     // (L,V) four times, (L,L)
    float *to_keys;                   // (L,K)
    float *run;                       // (V)
    float *states;                    // of replay.h
} work;

static int64_t state_floats(const mn_call *c) {
    return mn_ceil_div(c->K * c->V, MN_VW) * MN_VW;
}

/* Floats of a work without the states of replay.h. */
static int64_t work_floats(const mn_call *call) {
    return mn_column_floats(call) + (MN_COLUMN_BLOCK + 1) * state_floats(call) +
           (4 * MN_COLUMN_BLOCK + 1) * call->V + MN_COLUMN_BLOCK * (MN_COLUMN_BLOCK + call->K);
}

static void place(work *w, float *memory, const mn_call *call) {
    const int64_t values = MN_COLUMN_BLOCK * call->V, state = state_floats(call);
    float *at = MN_T(mn_column_place)(&w->c, memory, call);
    w->D = at, at += state;
    w->inner = at, at += MN_COLUMN_BLOCK * state;
    w->dZ = at, at += values;
    w->fZ = at, at += values;
    w->U = at, at += values;
    w->dR = at, at += values;
    w->dP = at, at += MN_COLUMN_BLOCK * MN_COLUMN_BLOCK;
    w->to_keys = at, at += MN_COLUMN_BLOCK * call->K;
    w->run = at, at += call->V;
    w->states = at;
}

/* The gradients that are sums over value columns. */
static mn_parts parts_of(mn_additive_column_args *p, const mn_call *call) {
    return (mn_parts){ .call = call, .tiles = mn_column_tiles_of(call).count, .n = 2,
                       .part = { { &p->grad.q, call->K }, { &p->grad.k, call->K } } };
}

bool MN_T(mn_additive_column_backward_plan)(const void *args, mn_plan *plan) {
    const mn_call *c = args;
    mn_additive_column_args all = *(const mn_additive_column_args *)args;
    const mn_parts parts = parts_of(&all, c);
    int64_t states, state, shared;
    plan->n_phases = 2;
    plan->items[0] = mn_n_sequences(c) * c->H * parts.tiles;
    plan->items[1] = mn_parts_items(&parts);
    return mn_parts_floats(&shared, &parts) &&
           mn_mul_size(&plan->shared_bytes, (size_t)shared, sizeof(float)) &&
           mn_mul_i64(&state, c->K, c->V) && mn_mul_i64(&state, state, 2 * MN_COLUMN_BLOCK) &&
           mn_replay_floats(&states, mn_longest_sequence(c), MN_COLUMN_BLOCK, state_floats(c)) &&
           mn_add_i64(&states, states, work_floats(c)) &&
           mn_mul_size(&plan->scratch_bytes, (size_t)states, sizeof(float));
}

/* ---- one chunk ------------------------------------------------------------------------------- */

/* C = A B', sizes M, N, K. */
static void product_nt(float *C, const float *A, int64_t a_row, const float *B, int64_t b_row,
                       const int64_t size[3], mn_gemm_shape shape) {
    const mn_gemm_args args = { .c = C, .c_row = size[1], .a = A, .a_row = a_row, .a_col = 1,
                                .b = B, .b_row = b_row, .M = size[0], .N = size[1],
                                .K = size[2], .alpha = 1.0f, .shape = shape };
    MN_T(mn_gemm_nt)(&args);
}

/* C = base(C) + alpha A B, with the triangle of A that `shape` says. */
static void product(float *C, const float *A, int64_t a_row, int64_t a_col, const float *B,
                    int64_t b_row, const int64_t size[3], mn_gemm_base base, mn_gemm_shape shape,
                    float alpha) {
    const mn_gemm_args args = { .c = C, .c_row = size[1], .a = A, .a_row = a_row, .a_col = a_col,
                                .b = B, .b_row = b_row, .M = size[0], .N = size[1],
                                .K = size[2], .alpha = alpha, .base = base, .shape = shape };
    MN_T(mn_gemm)(&args);
}

/* dZ and f . dZ; zeros without cotangents. */
static void take_cotangents(work *w) {
    const mn_column_chunk *c = &w->c;
    const int64_t V = c->p->call.V;
    for (int64_t t = 0; t < c->L; t++) {
        const float *d_o = MN_ROW(float, c->p->cot.o, c->b, c->t0 + t, c->h);
        if (d_o) mn_column_times(w->dZ + t * V, d_o, c->up + t * V, V);
        else memset(w->dZ + t * V, 0, (size_t)V * sizeof *w->dZ);
        mn_column_times(w->fZ + t * V, w->dZ + t * V, c->first, V);
    }
}

/* Rows that were summed up leave as gradients, times `by`. */
static void give_keys(const work *w, mn_out to, float by) {
    const mn_column_chunk *c = &w->c;
    const int64_t K = c->p->call.K;
    for (int64_t t = 0; t < c->L; t++) {
        float *row = MN_ROW_OUT(float, to, c->b, c->t0 + t, c->h);
        for (int64_t i = 0; row && i < K; i += MN_VW) {
            const int lanes = vf_lanes(K - i);
            const vf x = vf_load_n(w->to_keys + t * K + i, lanes);
            vf_store_n(row + i, vf_mul(x, vf_set1(by)), lanes);
        }
    }
}

/* R = V . e^(G_L - G), from now on called W. */
static void take_tails(mn_column_chunk *c) {
    const int64_t V = c->p->call.V;
    for (int64_t t = 0; t < c->L; t++) {
        mn_column_times(c->R + t * V, MN_ROW(float, c->p->v, c->b, c->t0 + t, c->h),
                        c->tail + t * V, V);
    }
}

/* Gradients of queries and keys, and U. S is the state before the chunk. */
static void key_gradients(work *w, const float *S) {
    mn_column_chunk *c = &w->c;
    const mn_additive_column_args *p = c->p;
    const int64_t K = p->call.K, V = p->call.V, L = c->L;
    const int64_t keys_by_values[] = { L, K, V }, keys_by_tokens[] = { L, K, L };
    const float *q = MN_ROW(float, p->q, c->b, c->t0, c->h);
    const float *k = MN_ROW(float, p->k, c->b, c->t0, c->h);
    product_nt(w->dP, w->dZ, V, c->R, V, (int64_t[]){ L, L, V }, MN_GEMM_C_LOWER);
    product(w->to_keys, w->fZ, V, 1, S, K, keys_by_values, MN_GEMM_SET, MN_GEMM_FULL, 1.0f);
    product(w->to_keys, w->dP, L, 1, k, p->k.stride[1], keys_by_tokens, MN_GEMM_ADD,
            MN_GEMM_A_LOWER, 1.0f);
    give_keys(w, p->grad.q, (float)p->scale);
    take_tails(c);
    product(w->to_keys, c->R, V, 1, w->D, K, keys_by_values, MN_GEMM_SET, MN_GEMM_FULL, 1.0f);
    product(w->to_keys, w->dP, 1, L, q, p->q.stride[1], keys_by_tokens, MN_GEMM_ADD,
            MN_GEMM_A_UPPER, (float)p->scale);
    give_keys(w, p->grad.k, 1.0f);
    product_nt(w->U, k, p->k.stride[1], w->D, K, (int64_t[]){ L, V, K }, MN_GEMM_FULL);
}

/* run = f e^(G_L) rowsum(S . D) + sum_s W . U: dG of the chunk's end. */
static void end_gradient(work *w, const float *S) {
    const mn_column_chunk *c = &w->c;
    const int64_t K = c->p->call.K, V = c->p->call.V;
    for (int64_t j = 0; j < V; j++) w->run[j] = c->all[j] * vf_dot_row(S + j * K, w->D + j * K, K);
    for (int64_t j = 0; j < V; j += MN_VW) {
        const int lanes = vf_lanes(V - j);
        vf sum = vf_load_n(w->run + j, lanes);
        for (int64_t t = 0; t < c->L; t++) {
            sum = vf_fma(vf_load_n(c->R + t * V + j, lanes), vf_load_n(w->U + t * V + j, lanes),
                         sum);
        }
        vf_store_n(w->run + j, sum, lanes);
    }
}

/* Gradients of values and decays, from the last token to the first. */
static void value_gradients(work *w) {
    const mn_column_chunk *c = &w->c;
    const mn_additive_column_args *p = c->p;
    const int64_t V = p->call.V;
    for (int64_t t = c->L - 1; t >= 0; t--) {
        const float *v = MN_ROW(float, p->v, c->b, c->t0 + t, c->h);
        float *dv = MN_ROW_OUT(float, p->grad.v, c->b, c->t0 + t, c->h);
        float *dg = MN_ROW_OUT(float, p->grad.g, c->b, c->t0 + t, c->h);
        for (int64_t j = 0; j < V; j += MN_VW) {
            const int lanes = vf_lanes(V - j);
            const int64_t at = t * V + j;
            const vf inside = vf_mul(vf_load_n(c->down + at, lanes), vf_load_n(w->dR + at, lanes));
            const vf to_v = vf_fma(vf_load_n(c->tail + at, lanes), vf_load_n(w->U + at, lanes),
                                   inside);
            vf run = vf_load_n(w->run + j, lanes);
            run = vf_fma(vf_load_n(c->o + at, lanes), vf_load_n(w->dZ + at, lanes), run);
            run = vf_fnma(vf_load_n(v + j, lanes), to_v, run);
            if (dv) vf_store_n(dv + j, to_v, lanes);
            if (dg) vf_store_n(dg + j, run, lanes);
            vf_store_n(w->run + j, run, lanes);
        }
    }
}

/* The chunk that was taken; S is the state before it, D becomes the adjoint of that. */
static void reverse_chunk(work *w, const float *S) {
    mn_column_chunk *c = &w->c;
    const mn_additive_column_args *p = c->p;
    const int64_t V = p->call.V, L = c->L;
    take_cotangents(w);
    MN_T(mn_column_outputs)(c, S);
    key_gradients(w, S);
    end_gradient(w, S);
    product(w->dR, c->P, 1, L, w->dZ, V, (int64_t[]){ L, V, L }, MN_GEMM_SET, MN_GEMM_A_UPPER,
            1.0f);
    value_gradients(w);
    MN_T(mn_column_outer)(w->D, c, w->fZ, MN_ROW(float, p->q, c->b, c->t0, c->h), p->q.stride[1],
                          (float)p->scale);
}

/* ---- blocks ---------------------------------------------------------------------------------- */

static void advance(void *context, float *state, int64_t t, int64_t n) {
    work *w = context;
    for (int64_t i = 0; i < n; i += w->c.L) {
        MN_T(mn_column_take)(&w->c, w->seq.t0 + t + i, w->seq.t0 + t + n);
        MN_T(mn_column_advance)(&w->c, state);
    }
}

static void turn(void *context, const float *state) {
    (void)state;
    const work *w = context;
    const mn_additive_column_args *p = w->c.p;
    const size_t bytes = (size_t)(p->call.K * p->call.V) * sizeof(float);
    const float *d = MN_ROW(float, p->cot.state, w->n, 0, w->h);
    if (d) memcpy(w->D, d, bytes);
    else memset(w->D, 0, bytes);
}

static void reverse(void *context, const float *state, int64_t t, int64_t n) {
    work *w = context;
    const mn_call *call = &w->c.p->call;
    const int64_t floats = state_floats(call);
    const size_t bytes = (size_t)(call->K * call->V) * sizeof(float);
    int64_t first[MN_COLUMN_BLOCK], chunks = 0;
    for (int64_t i = 0; i < n; i += w->c.L) {
        float *here = w->inner + chunks * floats;
        memcpy(here, chunks ? here - floats : state, bytes);
        if (chunks) MN_T(mn_column_advance)(&w->c, here);
        MN_T(mn_column_take)(&w->c, w->seq.t0 + t + i, w->seq.t0 + t + n);
        first[chunks++] = i;
    }
    for (int64_t k = chunks - 1; k >= 0; k--) {
        if (k + 1 < chunks) {
            MN_T(mn_column_take)(&w->c, w->seq.t0 + t + first[k], w->seq.t0 + t + first[k + 1]);
        }
        reverse_chunk(w, w->inner + k * floats);
    }
}

void MN_T(mn_additive_column_backward_run)(const void *args, int phase, int64_t item, void *shared,
                                           void *scratch) {
    mn_additive_column_args some = *(const mn_additive_column_args *)args;
    const mn_call *whole = args, *call = &some.call;
    const mn_additive_column_args *p = &some;
    const mn_column_tiles tiles = mn_column_tiles_of(whole);
    if (phase == 1) {
        const mn_parts parts = parts_of(&some, whole);
        mn_parts_add(&parts, shared, item);
        return;
    }
    some = MN_T(mn_additive_column_tile)(args, mn_columns_at(whole, tiles, item % tiles.count));
    const mn_parts parts = parts_of(&some, whole);
    mn_parts_redirect(&parts, shared, item % tiles.count);
    item /= tiles.count;
    const size_t bytes = (size_t)(call->K * call->V) * sizeof(float);
    work w = { .n = item / call->H, .h = item % call->H };
    place(&w, scratch, call);
    w.seq = mn_sequence_at(call, w.n);
    w.c.p = p, w.c.b = w.seq.b, w.c.h = w.h;
    const float *from = MN_ROW(float, p->state0, w.n, 0, w.h);
    if (from) memcpy(w.states, from, bytes);
    else memset(w.states, 0, bytes);
    const mn_replay r = { .T = w.seq.length, .block = MN_COLUMN_BLOCK,
                          .floats = state_floats(call), .context = &w, .advance = advance,
                          .turn = turn, .reverse = reverse };
    mn_replay_run(&r, w.states);
    float *first = MN_ROW_OUT(float, p->grad.state0, w.n, 0, w.h);
    if (first) memcpy(first, w.D, bytes);
}
