/* importance_backward.c - Palimpsa's gradients. Frame and cells in importance.h.
 *
 * In the frame, with A, C the adjoints of M f and J f, r = 1 / (I f), mu = M r and do scaled:
 *
 *   t = q do' r       A += t       C -= t mu + f scale^2 (q r)^2 dovar'
 *   dq = mu do + 2 f scale^2 q . (r dovar)      dk = A (f v) + 2 k . C (f b)
 *   dv = f A'k        db = f C'k^2
 *   dg = sum(A . M_{t-1} + C . J_{t-1}) + drift sum C        dip += from_ip sum C
 *
 * M_{t-1} and J_{t-1} are those of the token's own frame; A and C change only where a frame begins,
 * by the factor the cells were given there. States come from replay.h, and those inside a block
 * from a third walk over it: no state is got by undoing a step.
 *
 * One item is some key rows, with all value columns, of one head of one sequence: sums over columns
 * end inside the item. Where few heads make it worth cutting the rows, the parts of dv, db and dg
 * wait in shared memory and a second phase adds them in the order of the rows; a last phase adds
 * dip over sequences. The cut depends on H and K alone. */
#include "kernels/cpu/importance/importance.h"

#include <math.h>
#include <string.h>

#include "base/checked.h"
#include "base/util.h"
#include "kernels/cpu/simd/ahead.h"
#include "kernels/cpu/chunk/replay.h"

/* 2 * ROWS vectors, of dq and of dk, are whole transposes of four. */
enum { ROWS = MN_VW == 16 ? 4 : 2, TOKENS = 16, BLOCK_FLOATS = 2 * ROWS * MN_VW };

/* Parts in shared memory, tile after tile: dip (N,H) as double, then dv, db (B,T,H,V), dg (B,T,H).
 */
typedef struct parts {
    double *ip;
    float *v, *b, *g;    // NULL where one tile writes the results itself
    int64_t rows;        // B T H
} parts;

static parts parts_at(const mn_importance_args *p, mn_row_cut rows, void *shared) {
    const mn_call *c = &p->call;
    const int64_t n = c->B * c->T * c->H;
    parts out = { .ip = shared, .rows = n };
    if (rows.tiles == 1) return out;
    out.v = (float *)(out.ip + rows.tiles * mn_n_sequences(c) * c->H);
    out.b = out.v + rows.tiles * n * c->V;
    out.g = out.b + rows.tiles * n * c->V;
    return out;
}

/* Everything an item needs. Arrays per token of the sequence come from the frame; those of a block
 * have one vector per token and vector of columns, or per token and row. */
typedef struct item_state {
    const mn_importance_args *p;
    mn_cells tile;
    mn_sequence seq;
    int64_t number;             // of the row tile
    parts parts;
    mn_frame_tokens tokens;
    mn_frame frame;             // behind the last token
    bool spread;                // dovar is given
    mn_ahead ahead;             // rows of the next block
    double to_prior;            // this item's part of dip
    float *adjoint;             // A and C as cells
    float *keys;                // per group and token: k, k^2, q of its rows
    float *v, *b, *d_o, *dovar; // f v, f b, scale do, f scale^2 dovar
    float *dv, *db;             // sums over rows
    _Alignas(64) float dg[TOKENS * MN_VW], sum[TOKENS * MN_VW];
    _Alignas(64) float dqk[TOKENS * 2 * ROWS * MN_VW];    // per token: dq of its rows, dk of them
    _Alignas(64) float before[TOKENS * BLOCK_FLOATS];    // M and J before each token of a block
} item_state;

static int64_t padded(int64_t n) {
    return mn_ceil_div(n, MN_VW) * MN_VW;
}

bool MN_T(mn_importance_backward_plan)(const void *args, mn_plan *plan) {
    const mn_importance_args *p = args;
    const mn_call *c = &p->call;
    if (!mn_cells_fit(c)) return false;
    const mn_row_cut rows = mn_row_cut_of(c, ROWS);
    const int64_t T = mn_longest_sequence(c), heads = mn_n_sequences(c) * c->H;
    const mn_cells tile = mn_cells_of(0, 0, 0, mn_min(rows.rows, c->K), 0, c->V, ROWS);
    const int64_t per_block = tile.groups * TOKENS * 3 * ROWS + 6 * tile.vectors * TOKENS * MN_VW;
    int64_t floats, tokens, shared, wide;
    plan->n_phases = 3;
    plan->items[0] = heads * rows.tiles;
    plan->items[1] = rows.tiles > 1 ? c->B * mn_ceil_div(c->T, 64) : 0;
    plan->items[2] = p->grad.ip.data ? c->H : 0;
    if (!mn_replay_floats(&floats, T, TOKENS, mn_cells_floats(&tile)) ||
        !mn_add_i64(&floats, floats, mn_cells_floats(&tile) + per_block) ||
        !mn_mul_i64(&tokens, 5, padded(T)) || !mn_add_i64(&floats, floats, tokens) ||
        !mn_mul_size(&plan->scratch_bytes, (size_t)floats, sizeof(float)) ||
        !mn_add_size(&plan->scratch_bytes, plan->scratch_bytes, sizeof(item_state))) {
        return false;
    }
    if (rows.tiles == 1) return mn_mul_size(&plan->shared_bytes, (size_t)heads, sizeof(double));
    return mn_mul_i64(&wide, c->B * c->T * c->H, 2 * c->V + 1) &&
           mn_add_i64(&shared, wide, 2 * heads) && mn_mul_i64(&shared, shared, rows.tiles) &&
           mn_mul_size(&plan->shared_bytes, (size_t)shared, sizeof(float));
}

/* ---- a block made ready ---------------------------------------------------------------------- */

static float *keys_at(const item_state *s, int64_t group) {
    return s->keys + group * TOKENS * 3 * ROWS;
}

static void stage_keys(item_state *s, int64_t t0, int64_t n) {
    const mn_cells *tile = &s->tile;
    for (int64_t t = 0; t < n; t++) {
        const float *k = MN_ROW(float, s->p->k, s->seq.b, s->seq.t0 + t0 + t, tile->h);
        const float *q = MN_ROW(float, s->p->q, s->seq.b, s->seq.t0 + t0 + t, tile->h);
        for (int64_t g = 0; g < tile->groups; g++) {
            float *to = keys_at(s, g) + t * 3 * ROWS;
            const int64_t i = tile->i0 + g * ROWS, count = mn_min(ROWS, tile->i1 - i);
            if (count < ROWS) memset(to, 0, 3 * ROWS * sizeof *to);
            for (int64_t r = 0; r < count; r++) {
                to[r] = k[i + r];
                to[ROWS + r] = k[i + r] * k[i + r];
                to[2 * ROWS + r] = q[i + r];
            }
        }
    }
}

/* to[c][t] = factor_t * row t of view, or 0; factor NULL: 1 */
static void stage_rows(const item_state *s, float *to, mn_in view, const float *factor, float scale,
                       int64_t t0, int64_t n) {
    const mn_cells *tile = &s->tile;
    for (int64_t t = 0; t < n; t++) {
        const float *row = MN_ROW(float, view, s->seq.b, s->seq.t0 + t0 + t, tile->h);
        const vf times = vf_set1(factor ? factor[t0 + t] * scale : scale);
        for (int64_t c = 0; c < tile->vectors; c++) {
            const int lanes = vf_lanes(tile->j1 - c * MN_VW);
            const vf x = row ? vf_load_row(row + c * MN_VW, lanes) : vf_zero();
            vf_store(to + (c * TOKENS + t) * MN_VW, vf_mul(times, x));
        }
    }
}

static void stage_inputs(item_state *s, int64_t t0, int64_t n) {
    stage_keys(s, t0, n);
    stage_rows(s, s->v, s->p->v, s->tokens.grow, 1.0f, t0, n);
    stage_rows(s, s->b, s->p->b, s->tokens.grow, 1.0f, t0, n);
}

/* ---- forward --------------------------------------------------------------------------------- */

MN_ALWAYS_INLINE void load_cells(vf M[ROWS], vf J[ROWS], const float *from) {
    MN_UNROLL
    for (int r = 0; r < ROWS; r++) {
        M[r] = vf_load(from + r * MN_VW);
        J[r] = vf_load(from + (ROWS + r) * MN_VW);
    }
}

MN_ALWAYS_INLINE void store_cells(float *to, const vf M[ROWS], const vf J[ROWS]) {
    MN_UNROLL
    for (int r = 0; r < ROWS; r++) {
        vf_store(to + r * MN_VW, M[r]);
        vf_store(to + (ROWS + r) * MN_VW, J[r]);
    }
}

MN_ALWAYS_INLINE void renew_cells(vf M[ROWS], vf J[ROWS], float factor) {
    if (factor == 1.0f) return;
    const vf f = vf_set1(factor);
    MN_UNROLL
    for (int r = 0; r < ROWS; r++) {
        M[r] = vf_mul(f, M[r]);
        J[r] = vf_mul(f, J[r]);
    }
}

/* Takes one block of cells from `from` through n tokens. With `keep`, their values before each
 * token, in its frame, are left there; the last state goes to `to` where that is not NULL. */
MN_ALWAYS_INLINE void walk(float *to, const float *from, float *keep, const float *keys,
                           const float *v, const float *b, const float *renew, mn_line next,
                           int64_t n) {
    vf M[ROWS], J[ROWS];
    load_cells(M, J, from);
    for (int64_t t = 0; t < n; t++, keys += 3 * ROWS, next.at += next.step) {
        __builtin_prefetch(next.at, 0, 2);
        renew_cells(M, J, renew[t]);
        if (keep) store_cells(keep + t * BLOCK_FLOATS, M, J);
        const vf v_t = vf_load(v + t * MN_VW), b_t = vf_load(b + t * MN_VW);
        MN_UNROLL
        for (int r = 0; r < ROWS; r++) {
            M[r] = vf_fma(vf_set1(keys[r]), v_t, M[r]);
            J[r] = vf_fma(vf_set1(keys[ROWS + r]), b_t, J[r]);
        }
    }
    if (to) store_cells(to, M, J);
}

/* Line `index` of the tokens from t on, if there is a whole block of them */
static mn_line line_ahead(const item_state *s, int64_t t, int64_t index) {
    if (t < 0 || t + TOKENS > s->seq.length) return (mn_line){ s->sum, 0 };
    return mn_line_ahead(&s->ahead, s->seq.b, s->seq.t0 + t, s->tile.h, index, s->sum);
}

static void advance(void *context, float *cells, int64_t t0, int64_t n) {
    item_state *s = context;
    const mn_cells *tile = &s->tile;
    stage_inputs(s, t0, n);
    for (int64_t g = 0; g < tile->groups; g++) {
        for (int64_t c = 0; c < tile->vectors; c++) {
            const int64_t at = c * TOKENS * MN_VW;
            float *block = mn_cells_block(cells, tile, g, c);
            const mn_line next = line_ahead(s, t0 + TOKENS, g * tile->vectors + c);
            walk(block, block, NULL, keys_at(s, g), s->v + at, s->b + at, s->tokens.renew + t0,
                 next, n);
        }
    }
}

/* ---- backward -------------------------------------------------------------------------------- */

/* Adjoints of the last state from the cotangents of mu and imp */
static void turn(void *context, const float *cells) {
    item_state *s = context;
    const mn_cells *tile = &s->tile;
    const float *dmu = MN_ROW(float, s->p->cot.mu, tile->n, 0, tile->h);
    const float *dimp = MN_ROW(float, s->p->cot.imp, tile->n, 0, tile->h);
    const vf prior = vf_set1((float)(s->frame.prior * exp(-s->frame.fallen)));
    const vf keep = vf_set1((float)exp(s->frame.fallen));
    memset(s->adjoint, 0, (size_t)mn_cells_floats(tile) * sizeof(float));
    for (int64_t i = tile->i0; (dmu || dimp) && i < tile->i1; i++) {
        const int64_t g = (i - tile->i0) / ROWS, r = (i - tile->i0) % ROWS;
        for (int64_t c = 0; c < tile->vectors; c++) {
            const float *M = mn_cells_block((float *)cells, tile, g, c) + r * MN_VW;
            float *A = mn_cells_block(s->adjoint, tile, g, c) + r * MN_VW;
            const int64_t at = i * s->p->call.V + c * MN_VW;
            const int lanes = vf_lanes(tile->j1 - c * MN_VW);
            const vf one_over_I = vf_div(vf_set1(1.0f), vf_add(vf_load(M + ROWS * MN_VW), prior));
            const vf to_M = dmu ? vf_mul(vf_load_row(dmu + at, lanes), one_over_I) : vf_zero();
            const vf to_I = dimp ? vf_mul(keep, vf_load_row(dimp + at, lanes)) : vf_zero();
            vf_store(A, to_M);
            vf_store(A + ROWS * MN_VW, vf_fnma(to_M, vf_mul(vf_load(M), one_over_I), to_I));
        }
    }
}

/* Takes the adjoints of one block of cells back through n tokens, adding to all sums. */
MN_ALWAYS_INLINE void scan_back(item_state *s, float *adjoint, const float *keys, int64_t c,
                                int64_t t0, int64_t n, bool spread) {
    const vf one = vf_set1(1.0f);
    vf A[ROWS], C[ROWS];
    load_cells(A, C, adjoint);
    for (int64_t t = n - 1; t >= 0; t--) {
        const float *key = keys + t * 3 * ROWS, *before = s->before + t * BLOCK_FLOATS;
        const int64_t at = (c * TOKENS + t) * MN_VW;
        const vf v = vf_load(s->v + at), b = vf_load(s->b + at), b_twice = vf_add(b, b);
        const vf d_o = vf_load(s->d_o + at), dovar = spread ? vf_load(s->dovar + at) : one;
        const vf prior = vf_set1(s->tokens.prior[t0 + t]);
        vf dv = vf_load(s->dv + at), db = vf_load(s->db + at);
        vf dg = vf_load(s->dg + t * MN_VW), sum = vf_load(s->sum + t * MN_VW);
        MN_UNROLL
        for (int r = 0; r < ROWS; r++) {
            const vf k = vf_set1(key[r]), q = vf_set1(key[2 * ROWS + r]);
            const vf M0 = vf_load(before + r * MN_VW), J0 = vf_load(before + (ROWS + r) * MN_VW);
            const vf M = vf_fma(k, v, M0), J = vf_fma(vf_set1(key[ROWS + r]), b, J0);
            const vf inverse = vf_div(one, vf_add(J, prior)), mu = vf_mul(M, inverse);
            const vf to_M = vf_mul(vf_mul(q, d_o), inverse);
            float *dq = s->dqk + (t * 2 * ROWS + r) * MN_VW, *dk = dq + ROWS * MN_VW;
            vf dq_r = vf_fma(d_o, mu, vf_load(dq));
            A[r] = vf_add(A[r], to_M);
            C[r] = vf_fnma(to_M, mu, C[r]);
            if (spread) {
                const vf u = vf_mul(q, inverse), w = vf_mul(u, dovar);
                C[r] = vf_fnma(u, w, C[r]);
                dq_r = vf_add(dq_r, vf_add(w, w));
            }
            const vf Ck = vf_mul(C[r], k);
            vf_store(dq, dq_r);
            vf_store(dk, vf_fma(Ck, b_twice, vf_fma(A[r], v, vf_load(dk))));
            dv = vf_fma(A[r], k, dv);
            db = vf_fma(Ck, k, db);
            dg = vf_fma(C[r], J0, vf_fma(A[r], M0, dg));
            sum = vf_add(sum, C[r]);
        }
        vf_store(s->dv + at, dv);
        vf_store(s->db + at, db);
        vf_store(s->dg + t * MN_VW, dg);
        vf_store(s->sum + t * MN_VW, sum);
        renew_cells(A, C, s->tokens.renew[t0 + t]);
    }
    store_cells(adjoint, A, C);
}

static void scan_back_mean(item_state *s, float *adjoint, const float *keys, int64_t c, int64_t t0,
                           int64_t n) {
    scan_back(s, adjoint, keys, c, t0, n, false);
}

static void scan_back_spread(item_state *s, float *adjoint, const float *keys, int64_t c,
                             int64_t t0, int64_t n) {
    scan_back(s, adjoint, keys, c, t0, n, true);
}

/* dq and dk of the rows of one group: lanes are summed four vectors at a time. */
static void write_keys(const item_state *s, int64_t group, int64_t t0, int64_t n) {
    const int64_t i = s->tile.i0 + group * ROWS, rows = mn_min(ROWS, s->tile.i1 - i);
    for (int64_t t = 0; t < n; t++) {
        float *dq = MN_ROW_OUT(float, s->p->grad.q, s->seq.b, s->seq.t0 + t0 + t, s->tile.h);
        float *dk = MN_ROW_OUT(float, s->p->grad.k, s->seq.b, s->seq.t0 + t0 + t, s->tile.h);
        float sums[2 * ROWS];
        for (int r = 0; r < 2 * ROWS; r += 4) {
            mn_sum_four(sums + r, s->dqk + (t * 2 * ROWS + r) * MN_VW);
        }
        for (int64_t r = 0; r < rows; r++) {
            if (dq) dq[i + r] = sums[r];
            if (dk) dk[i + r] = sums[ROWS + r];
        }
    }
}

/* Where this item's rows of dv or db go: the result itself, or its part. */
static float *value_row(const item_state *s, mn_out result, float *waiting, int64_t t) {
    const mn_call *c = &s->p->call;
    if (!result.data) return NULL;
    if (!waiting) return MN_ROW_OUT(float, result, s->seq.b, t, s->tile.h);
    return waiting + (s->number * s->parts.rows + (s->seq.b * c->T + t) * c->H + s->tile.h) * c->V;
}

static void write_values(item_state *s, int64_t t0, int64_t n) {
    const mn_call *c = &s->p->call;
    for (int64_t t = 0; t < n; t++) {
        const int64_t at = s->seq.t0 + t0 + t;
        const vf grow = vf_set1(s->tokens.grow[t0 + t]);
        float *dv = value_row(s, s->p->grad.v, s->parts.v, at);
        float *db = value_row(s, s->p->grad.b, s->parts.b, at);
        for (int64_t j = 0; j < s->tile.vectors; j++) {
            const int lanes = vf_lanes(c->V - j * MN_VW);
            const int64_t from = (j * TOKENS + t) * MN_VW;
            if (dv) vf_store_row(dv + j * MN_VW, vf_mul(grow, vf_load(s->dv + from)), lanes);
            if (db) vf_store_row(db + j * MN_VW, vf_mul(grow, vf_load(s->db + from)), lanes);
        }
        const float sum = vf_sum(vf_load(s->sum + t * MN_VW));
        const float dg = vf_sum(vf_load(s->dg + t * MN_VW)) + s->tokens.drift[t0 + t] * sum;
        float *to = MN_ROW_OUT(float, s->p->grad.g, s->seq.b, at, s->tile.h);
        if (s->parts.g) {
            s->parts.g[s->number * s->parts.rows + (s->seq.b * c->T + at) * c->H + s->tile.h] = dg;
        } else if (to) {
            *to = dg;
        }
        s->to_prior += (double)s->tokens.from_ip[t0 + t] * sum;
    }
}

static void reverse(void *context, const float *cells, int64_t t0, int64_t n) {
    item_state *s = context;
    const mn_cells *tile = &s->tile;
    const float scale = (float)s->p->scale, square = (float)(s->p->scale * s->p->scale);
    const size_t row_bytes = (size_t)(tile->vectors * TOKENS * MN_VW) * sizeof(float);
    stage_inputs(s, t0, n);
    stage_rows(s, s->d_o, s->p->cot.o, NULL, scale, t0, n);
    if (s->spread) stage_rows(s, s->dovar, s->p->cot.ovar, s->tokens.grow, square, t0, n);
    memset(s->dv, 0, row_bytes);
    memset(s->db, 0, row_bytes);
    memset(s->dg, 0, sizeof s->dg);
    memset(s->sum, 0, sizeof s->sum);
    for (int64_t g = 0; g < tile->groups; g++) {
        const float *keys = keys_at(s, g);
        memset(s->dqk, 0, sizeof s->dqk);
        for (int64_t c = 0; c < tile->vectors; c++) {
            const int64_t at = c * TOKENS * MN_VW;
            float *adjoint = mn_cells_block(s->adjoint, tile, g, c);
            walk(NULL, mn_cells_block((float *)cells, tile, g, c), s->before, keys, s->v + at,
                 s->b + at, s->tokens.renew + t0,
                 line_ahead(s, t0 - TOKENS, g * tile->vectors + c), n);
            if (s->spread) scan_back_spread(s, adjoint, keys, c, t0, n);
            else scan_back_mean(s, adjoint, keys, c, t0, n);
        }
        write_keys(s, g, t0, n);
    }
    write_values(s, t0, n);
}

/* Gradients of the first state, and what a state that starts at the prior adds to dip */
static void write_first(item_state *s) {
    const mn_cells *tile = &s->tile;
    const mn_importance_args *p = s->p;
    const float *mu0 = MN_ROW(float, p->mu0, tile->n, 0, tile->h);
    float *dmu0 = MN_ROW_OUT(float, p->grad.mu0, tile->n, 0, tile->h);
    float *dimp0 = MN_ROW_OUT(float, p->grad.imp0, tile->n, 0, tile->h);
    for (int64_t i = tile->i0; i < tile->i1; i++) {
        const int64_t g = (i - tile->i0) / ROWS, r = (i - tile->i0) % ROWS;
        vf sum = vf_zero();
        for (int64_t c = 0; c < tile->vectors; c++) {
            const vf A = vf_load(mn_cells_block(s->adjoint, tile, g, c) + r * MN_VW);
            const vf C = vf_load(mn_cells_block(s->adjoint, tile, g, c) + (ROWS + r) * MN_VW);
            const int64_t at = i * p->call.V + c * MN_VW;
            const int lanes = vf_lanes(tile->j1 - c * MN_VW);
            const vf I = mn_first_importance(p, tile, i, c * MN_VW, lanes, (float)s->frame.ip);
            const vf mu = mu0 ? vf_load_row(mu0 + at, lanes) : vf_zero(), to_I = vf_fma(A, mu, C);
            if (dmu0) vf_store_row(dmu0 + at, vf_mul(A, I), lanes);
            if (dimp0) vf_store_row(dimp0 + at, to_I, lanes);
            sum = vf_add(sum, to_I);
        }
        if (!p->imp0.data) s->to_prior += vf_sum(sum);
    }
}

/* ---- phases ---------------------------------------------------------------------------------- */

static float *take(float **at, int64_t n) {
    float *here = *at;
    *at += n;
    return here;
}

static void run_item(const mn_importance_args *p, int64_t item, mn_row_cut rows, void *shared,
                     void *scratch) {
    const mn_call *call = &p->call;
    const int64_t head = item / rows.tiles, i0 = item % rows.tiles * rows.rows;
    item_state *s = scratch;
    float *memory = (float *)(s + 1);
    *s = (item_state){ .p = p, .number = item % rows.tiles, .parts = parts_at(p, rows, shared),
                       .spread = p->cot.ovar.data };
    s->tile = mn_cells_of(head / call->H, head % call->H, i0, mn_min(i0 + rows.rows, call->K), 0,
                          call->V, ROWS);
    s->seq = mn_sequence_at(call, s->tile.n);
    const int64_t T = padded(s->seq.length), wide = s->tile.vectors * TOKENS * MN_VW;
    s->tokens = (mn_frame_tokens){ take(&memory, T), take(&memory, T), take(&memory, T),
                                   take(&memory, T), take(&memory, T) };
    s->keys = take(&memory, s->tile.groups * TOKENS * 3 * ROWS);
    s->v = take(&memory, wide), s->b = take(&memory, wide);
    s->d_o = take(&memory, wide), s->dovar = take(&memory, wide);
    s->dv = take(&memory, wide), s->db = take(&memory, wide);
    s->adjoint = take(&memory, mn_cells_floats(&s->tile));
    mn_ahead_add(&s->ahead, p->v, 0, call->V);
    mn_ahead_add(&s->ahead, p->b, 0, call->V);
    mn_ahead_add(&s->ahead, p->k, i0, s->tile.i1);
    mn_ahead_add(&s->ahead, p->q, i0, s->tile.i1);
    mn_ahead_add(&s->ahead, p->cot.o, 0, call->V);
    MN_T(mn_cells_load)(memory, &s->frame, p, &s->tile);
    MN_T(mn_frame_advance)(&s->frame, &s->tokens, p, s->seq.b, s->seq.t0, s->tile.h, s->seq.length);
    const mn_replay replay = { .T = s->seq.length, .block = TOKENS,
                               .floats = mn_cells_floats(&s->tile), .context = s,
                               .advance = advance, .turn = turn, .reverse = reverse };
    mn_replay_run(&replay, memory);
    write_first(s);
    s->parts.ip[item] = s->to_prior;
}

/* to = sum of the parts, n numbers each, in the order of the tiles */
static void add_parts(float *to, const float *from, int64_t tiles, int64_t step, int64_t n) {
    for (int64_t j = 0; to && j < n; j++) {
        float sum = from[j];
        for (int64_t tile = 1; tile < tiles; tile++) sum += from[tile * step + j];
        to[j] = sum;
    }
}

/* 64 tokens of one batch row */
static void add_tokens(const mn_importance_args *p, int64_t item, mn_row_cut rows, void *shared) {
    const mn_call *c = &p->call;
    const parts from = parts_at(p, rows, shared);
    const int64_t blocks = mn_ceil_div(c->T, 64), b = item / blocks, t0 = item % blocks * 64;
    for (int64_t t = t0; t < mn_min(t0 + 64, c->T); t++) {
        for (int64_t h = 0; h < c->H; h++) {
            const int64_t row = (b * c->T + t) * c->H + h, V = c->V;
            add_parts(MN_ROW_OUT(float, p->grad.v, b, t, h), from.v + row * V, rows.tiles,
                      from.rows * V, V);
            add_parts(MN_ROW_OUT(float, p->grad.b, b, t, h), from.b + row * V, rows.tiles,
                      from.rows * V, V);
            add_parts(MN_ROW_OUT(float, p->grad.g, b, t, h), from.g + row, rows.tiles, from.rows,
                      1);
        }
    }
}

void MN_T(mn_importance_backward_run)(const void *args, int phase, int64_t item, void *shared,
                                      void *scratch) {
    const mn_importance_args *p = args;
    const mn_row_cut rows = mn_row_cut_of(&p->call, ROWS);
    if (phase == 0) {
        run_item(p, item, rows, shared, scratch);
    } else if (phase == 1) {
        add_tokens(p, item, rows, shared);
    } else {
        const double *part = shared;
        double sum = 0.0;
        for (int64_t n = 0; n < mn_n_sequences(&p->call) * rows.tiles; n++) {
            sum += part[(n / rows.tiles * p->call.H + item) * rows.tiles + n % rows.tiles];
        }
        *MN_ROW_OUT(float, p->grad.ip, 0, 0, item) = (float)sum;
    }
}
