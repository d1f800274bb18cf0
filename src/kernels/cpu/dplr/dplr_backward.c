/* dplr_backward.c - gradients of diagonal plus low rank, token after token from the last.
 *
 * With D the adjoint of S_t, S0 the state before it, u = S0'a, and do scaled:
 *
 *   D += q do'    dv = D'k    du = D'b    dk = D v    db = D u    da = S0 du
 *   dq = w . (S0 do) + b (u.do) + k (v.do)        dg = w . rowsum(D . S0)
 *   D <- diag(w) D + a du'
 *
 * States come from replay.h; those of a block's tokens are kept. One item is some value columns of
 * one head of one sequence; where they are not all, gradients of rows of K are sums of parts. */
#include <string.h>

#include "base/checked.h"
#include "kernels/cpu/chunk/parts.h"
#include "kernels/cpu/chunk/replay.h"
#include "kernels/cpu/chunk/tiles.h"
#include "kernels/cpu/dplr/dplr.h"
#include "kernels/cpu/simd/lanes.h"
#include "kernels/cpu/simd/row.h"

/* Sums over columns, a vector each row until their lanes are added. */
enum { TO_K, TO_B, TO_A, TO_G, TO_Q, SUMS };

typedef struct item {
    mn_dplr_block block;
    mn_column_tile tile;
    mn_sequence seq;
    int64_t rows;               // K, in whole vectors
    float *D, *S, *u;           // adjoint; state and u on the way through a block
    float *before, *before_u;   // in front of each token of a block
    float *d_o, *v, *du;        // (width) of one token
    float *lanes, *sums;        // (SUMS,rows,MN_VW) and (SUMS,rows)
} item;

static int64_t place(item *s, float *memory, const mn_call *c) {
    const int64_t K = c->K, width = mn_ceil_div(mn_column_tile_width(c), MN_VW) * MN_VW;
    const int64_t rows = mn_ceil_div(K, MN_VW) * MN_VW;
    float *at = memory;
    s->rows = rows;
    s->lanes = at, at += SUMS * rows * MN_VW;
    s->sums = at, at += SUMS * rows;
    s->D = at, at += K * width;
    s->S = at, at += K * width;
    s->u = at, at += width;
    s->before = at, at += MN_DPLR_BLOCK * K * width;
    s->before_u = at, at += MN_DPLR_BLOCK * width;
    s->d_o = at, at += width;
    s->v = at, at += width;
    s->du = at, at += width;
    s->block.w = at, at += MN_DPLR_BLOCK * K;
    return at - memory;
}

/* The gradients that are sums over value columns. */
static mn_parts parts_of(mn_dplr_args *p, const mn_call *c) {
    return (mn_parts){ .call = c, .tiles = mn_ceil_div(c->V, mn_column_tile_width(c)), .n = 5,
                       .part = { { &p->grad.q, c->K }, { &p->grad.k, c->K }, { &p->grad.a, c->K },
                                 { &p->grad.b, c->K }, { &p->grad.g, c->K } } };
}

bool MN_T(mn_dplr_backward_plan)(const void *args, mn_plan *plan) {
    const mn_call *c = args;
    mn_dplr_args all = *(const mn_dplr_args *)args;
    item s;
    int64_t states, floats, shared;
    if (!mn_cells_fit(c)) return false;
    const mn_parts parts = parts_of(&all, c);
    plan->n_phases = 2;
    plan->items[0] = mn_n_sequences(c) * c->H * parts.tiles;
    plan->items[1] = mn_parts_items(&parts);
    const int64_t cells = c->K * mn_ceil_div(mn_column_tile_width(c), MN_VW) * MN_VW;
    return mn_parts_floats(&shared, &parts) &&
           mn_mul_size(&plan->shared_bytes, (size_t)shared, sizeof(float)) &&
           mn_replay_floats(&states, mn_longest_sequence(c), MN_DPLR_BLOCK, cells) &&
           mn_add_i64(&floats, states, place(&s, NULL, c)) &&
           mn_mul_size(&plan->scratch_bytes, (size_t)floats, sizeof(float));
}

static void set_block(item *s, int64_t t, int64_t n) {
    s->block.t0 = s->seq.t0 + t;
    s->block.n = n;
    s->block.more = t + n < s->seq.length;
    MN_T(mn_dplr_prepare)(&s->block);
}

static void advance(void *context, float *state, int64_t t, int64_t n) {
    item *s = context;
    set_block(s, t, n);
    MN_T(mn_dplr_read)(s->u, state, s->block.p, s->seq.b, s->block.t0, s->tile.h, s->tile.width);
    MN_T(mn_dplr_advance)(&s->block, &s->tile, state, s->u, s->before, s->before_u);
}

static void turn(void *context, const float *state) {
    item *s = context;
    (void)state;
    MN_T(mn_column_state_load)(s->D, s->block.p->cot.state, &s->tile, s->block.p->call.K,
                               s->block.p->call.V);
}

/* A row of V numbers times `scale` in whole vectors; zeros where there is none. */
static void load_row(float *to, const float *from, float scale, const mn_column_tile *tile) {
    for (int64_t j = 0; j < tile->width; j += MN_VW) {
        const vf x = from ? vf_load_row(from + j, vf_lanes(tile->n - j)) : vf_zero();
        vf_store(to + j, vf_mul(vf_set1(scale), x));
    }
}

/* One token: its rows of K. */
typedef struct token {
    const float *w, *q, *k, *a, *b;
} token;

/* D += q do', dv and du */
static void columns_backward(item *s, const token *t, float *dv) {
    const int64_t width = s->tile.width;
    for (int64_t j = 0; j < width; j += MN_VW) {
        const vf d_o = vf_load(s->d_o + j);
        vf to_v = vf_zero(), to_u = vf_zero();
        for (int64_t i = 0; i < s->block.p->call.K; i++) {
            const vf D = vf_fma(vf_set1(t->q[i]), d_o, vf_load(s->D + i * width + j));
            to_v = vf_fma(vf_set1(t->k[i]), D, to_v);
            to_u = vf_fma(vf_set1(t->b[i]), D, to_u);
            vf_store(s->D + i * width + j, D);
        }
        vf_store(s->du + j, to_u);
        if (dv) vf_store_row(dv + j, to_v, vf_lanes(s->tile.n - j));
    }
}

/* Sums over columns of one row, and D of the token before. */
static void row_backward(item *s, const token *t, const float *S0, const float *u, int64_t i) {
    const int64_t width = s->tile.width;
    const vf w = vf_set1(t->w[i]), a = vf_set1(t->a[i]);
    vf sum[SUMS];
    for (int n = 0; n < SUMS; n++) sum[n] = vf_zero();
    for (int64_t j = 0; j < width; j += MN_VW) {
        const vf D = vf_load(s->D + i * width + j), was = vf_load(S0 + i * width + j);
        const vf du = vf_load(s->du + j);
        sum[TO_K] = vf_fma(D, vf_load(s->v + j), sum[TO_K]);
        sum[TO_B] = vf_fma(D, vf_load(u + j), sum[TO_B]);
        sum[TO_A] = vf_fma(was, du, sum[TO_A]);
        sum[TO_G] = vf_fma(D, was, sum[TO_G]);
        sum[TO_Q] = vf_fma(was, vf_load(s->d_o + j), sum[TO_Q]);
        vf_store(s->D + i * width + j, vf_fma(a, du, vf_mul(w, D)));
    }
    for (int n = 0; n < SUMS; n++) vf_store(s->lanes + (n * s->rows + i) * MN_VW, sum[n]);
}

static void store_keys(item *s, const token *t, int64_t at, float known, float written) {
    const mn_dplr_args *p = s->block.p;
    const int64_t b = s->seq.b, h = s->tile.h, K = p->call.K;
    const mn_out to[SUMS] = { [TO_K] = p->grad.k, [TO_B] = p->grad.b, [TO_A] = p->grad.a,
                              [TO_G] = p->grad.g, [TO_Q] = p->grad.q };
    for (int n = 0; n < SUMS; n++) {
        float *row = MN_ROW_OUT(float, to[n], b, at, h), *sum = s->sums + n * s->rows;
        if (!row) continue;
        lanes_sum(sum, s->lanes + n * s->rows * MN_VW, s->rows, false);
        for (int64_t i = 0; i < K; i += MN_VW) {
            const int lanes = vf_lanes(K - i);
            vf x = vf_load(sum + i);
            if (n == TO_G || n == TO_Q) x = vf_mul(vf_load_row(t->w + i, lanes), x);
            if (n == TO_Q) {
                x = vf_fma(vf_set1(known), vf_load_row(t->b + i, lanes), x);
                x = vf_fma(vf_set1(written), vf_load_row(t->k + i, lanes), x);
            }
            vf_store_row(row + i, x, lanes);
        }
    }
}

static void reverse(void *context, const float *state, int64_t t0, int64_t n) {
    item *s = context;
    const mn_dplr_args *p = s->block.p;
    const int64_t K = p->call.K, width = s->tile.width, h = s->tile.h;
    memcpy(s->S, state, (size_t)(K * width) * sizeof *state);
    advance(s, s->S, t0, n);
    for (int64_t i = n - 1; i >= 0; i--) {
        const int64_t at = s->block.t0 + i, b = s->seq.b;
        const float *u = s->before_u + i * width, *S0 = s->before + i * K * width;
        const token t = { s->block.w + i * K, MN_ROW(float, p->q, b, at, h),
                          MN_ROW(float, p->k, b, at, h), MN_ROW(float, p->a, b, at, h),
                          MN_ROW(float, p->b, b, at, h) };
        load_row(s->d_o, MN_ROW(float, p->cot.o, b, at, h), (float)p->scale, &s->tile);
        load_row(s->v, MN_ROW(float, p->v, b, at, h) + s->tile.j0, 1.0f, &s->tile);
        columns_backward(s, &t, MN_ROW_OUT(float, p->grad.v, b, at, h));
        for (int64_t row = 0; row < K; row++) row_backward(s, &t, S0, u, row);
        store_keys(s, &t, at, vf_dot_whole(u, s->d_o, width), vf_dot_whole(s->v, s->d_o, width));
    }
}

void MN_T(mn_dplr_backward_run)(const void *args, int phase, int64_t index, void *shared,
                                void *scratch) {
    mn_dplr_args mine = *(const mn_dplr_args *)args;
    const mn_dplr_args *p = &mine;
    const mn_parts parts = parts_of(&mine, &p->call);
    const int64_t K = p->call.K, V = p->call.V;
    if (phase == 1) {
        mn_parts_add(&parts, shared, index);
        return;
    }
    mn_parts_redirect(&parts, shared, index % parts.tiles);
    item s = { .tile = mn_column_tile_at(&p->call, index) };
    s.seq = mn_sequence_at(&p->call, s.tile.sequence);
    mine.cot.o = mn_in_from(mine.cot.o, s.tile.j0);
    mine.grad.v = mn_out_from(mine.grad.v, s.tile.j0);
    float *memory = (float *)scratch + place(&s, scratch, &p->call);
    s.block.p = p, s.block.b = s.seq.b, s.block.h = s.tile.h;
    memset(s.lanes, 0, (size_t)(SUMS * s.rows * MN_VW) * sizeof *s.lanes);
    const mn_replay replay = { .T = s.seq.length, .block = MN_DPLR_BLOCK,
                               .floats = K * s.tile.width, .context = &s, .advance = advance,
                               .turn = turn, .reverse = reverse };
    MN_T(mn_column_state_load)(memory, p->state0, &s.tile, K, V);
    mn_replay_run(&replay, memory);
    MN_T(mn_column_state_store)(p->grad.state0, s.D, &s.tile, K, V);
}
