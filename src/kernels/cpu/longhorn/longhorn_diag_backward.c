/* longhorn_diag_backward.c - gradients of diagonal Longhorn. Gains in longhorn.h.
 *
 * With D the adjoint of S_t, S0 the state before, e = v - k S0 (per cell) and do scaled:
 *
 *   D += q do'      dq = S_t do      y = D k      du_j = sum_i y      x_j = sum_i y e
 *   dk = sum_j w D (e - k S0) - 2 k sum_j w_j^2 x_j      dv = w . du      dbeta = rest^2 . x
 *   D <- c . D
 *
 * x is the gradient of w. States come from replay.h and, inside a block, from one more walk over
 * it. One item is some key rows, with all value columns, of one head of one sequence. du and x are
 * sums over all rows: an item that has them all finishes its tokens itself, else the parts wait in
 * shared memory and a second phase adds them in the order of the rows. The cut depends on H and K
 * alone. */
#include <string.h>

#include "base/checked.h"
#include "base/util.h"
#include "kernels/cpu/simd/ahead.h"
#include "kernels/cpu/longhorn/longhorn.h"
#include "kernels/cpu/chunk/replay.h"

/* ROWS vectors, of dq and of dk, are whole transposes of four. */
enum { ROWS = 4, TOKENS = 16, BLOCK_FLOATS = ROWS * MN_VW };

/* Everything an item needs. Arrays of a block have one vector per token and vector of columns. */
typedef struct item_state {
    const mn_longhorn_diag_args *p;
    mn_sequence seq;
    int64_t n, h, i0, i1, groups, vectors;
    int64_t cells;              // floats of a state
    mn_ahead ahead;             // rows of the next block
    float *adjoint;             // D
    float *keys;                // per group and token: k, |k|^2 - k^2, q of its rows
    float *u, *w, *rest, *v, *d_o;
    float *du, *x;              // sums over rows
    float *du_parts, *x_parts;  // (B,T,H,V) of this tile in shared memory; NULL: no parts
    float norm[TOKENS];
    _Alignas(64) float dqk[TOKENS * 2 * ROWS * MN_VW];    // per token: dq of its rows, dk of them
    _Alignas(64) float before[TOKENS * BLOCK_FLOATS];     // S before each token of a block
} item_state;

bool MN_T(mn_longhorn_diag_backward_plan)(const void *args, mn_plan *plan) {
    const mn_call *c = args;
    if (!mn_cells_fit(c)) return false;
    const mn_row_cut cut = mn_row_cut_of(c, ROWS);
    const int64_t groups = cut.rows / ROWS, vectors = mn_ceil_div(c->V, MN_VW);
    const int64_t cells = groups * vectors * ROWS * MN_VW;
    const int64_t per_block = groups * TOKENS * 3 * ROWS + 7 * vectors * TOKENS * MN_VW;
    int64_t floats, shared = 0;
    plan->n_phases = 2;
    plan->items[0] = mn_n_sequences(c) * c->H * cut.tiles;
    plan->items[1] = cut.tiles > 1 ? c->B * mn_ceil_div(c->T, 64) : 0;
    return mn_replay_floats(&floats, mn_longest_sequence(c), TOKENS, cells) &&
           mn_add_i64(&floats, floats, cells + per_block) &&
           mn_mul_size(&plan->scratch_bytes, (size_t)floats, sizeof(float)) &&
           mn_add_size(&plan->scratch_bytes, plan->scratch_bytes, sizeof(item_state)) &&
           (cut.tiles == 1 || mn_mul_i64(&shared, c->B * c->T * c->H * c->V, 2 * cut.tiles)) &&
           mn_mul_size(&plan->shared_bytes, (size_t)shared, sizeof(float));
}

/* ---- a block made ready ---------------------------------------------------------------------- */

static float *keys_at(const item_state *s, int64_t group) {
    return s->keys + group * TOKENS * 3 * ROWS;
}

static float *block_at(const item_state *s, const float *cells, int64_t g, int64_t c) {
    return (float *)cells + (g * s->vectors + c) * BLOCK_FLOATS;
}

static void stage_inputs(item_state *s, int64_t t0, int64_t n) {
    const mn_longhorn_diag_args *p = s->p;
    for (int64_t t = 0; t < n; t++) {
        const int64_t from = s->seq.t0 + t0 + t;
        const float *k = MN_ROW(float, p->k, s->seq.b, from, s->h);
        const float *q = MN_ROW(float, p->q, s->seq.b, from, s->h);
        const float *v = MN_ROW(float, p->v, s->seq.b, from, s->h);
        const float *beta = MN_ROW(float, p->beta, s->seq.b, from, s->h);
        const double norm = mn_key_norm(k, p->call.K);
        for (int64_t g = 0; g < s->groups; g++) {
            float *to = keys_at(s, g) + t * 3 * ROWS;
            const int64_t i = s->i0 + g * ROWS, count = mn_min(ROWS, s->i1 - i);
            if (count < ROWS) memset(to, 0, 3 * ROWS * sizeof *to);
            for (int64_t r = 0; r < count; r++) {
                to[r] = k[i + r];
                to[ROWS + r] = (float)(norm - (double)k[i + r] * k[i + r]);
                to[2 * ROWS + r] = q[i + r];
            }
        }
        for (int64_t c = 0; c < s->vectors; c++) {
            const int lanes = vf_lanes(p->call.V - c * MN_VW);
            const int64_t at = (c * TOKENS + t) * MN_VW;
            const mn_gain gain = mn_gain_of(vf_load_row(beta + c * MN_VW, lanes), (float)norm);
            const vf v_c = vf_load_row(v + c * MN_VW, lanes);
            vf_store(s->v + at, v_c);
            vf_store(s->u + at, vf_mul(gain.w, v_c));
            vf_store(s->w + at, gain.w);
            vf_store(s->rest + at, gain.rest);
        }
    }
}

static void stage_cotangents(item_state *s, int64_t t0, int64_t n) {
    const vf scale = vf_set1((float)s->p->scale);
    for (int64_t t = 0; t < n; t++) {
        const float *d_o = MN_ROW(float, s->p->cot.o, s->seq.b, s->seq.t0 + t0 + t, s->h);
        for (int64_t c = 0; c < s->vectors; c++) {
            const int lanes = vf_lanes(s->p->call.V - c * MN_VW);
            const int64_t at = (c * TOKENS + t) * MN_VW;
            const vf x = d_o ? vf_load_row(d_o + c * MN_VW, lanes) : vf_zero();
            vf_store(s->d_o + at, vf_mul(scale, x));
            vf_store(s->du + at, vf_zero());
            vf_store(s->x + at, vf_zero());
        }
    }
}

/* Line `index` of the tokens from t on, if there is a whole block of them */
static mn_line line_ahead(const item_state *s, int64_t t, int64_t index) {
    if (t < 0 || t + TOKENS > s->seq.length) return (mn_line){ s->norm, 0 };
    return mn_line_ahead(&s->ahead, s->seq.b, s->seq.t0 + t, s->h, index, s->norm);
}

/* ---- forward --------------------------------------------------------------------------------- */

/* Takes one block of cells from `from` through n tokens. With `keep`, S before each is left there;
 * the last state goes to `to` where that is not NULL. */
MN_ALWAYS_INLINE void walk(float *to, const float *from, float *keep, const item_state *s,
                           const float *keys, mn_line next, int64_t at, int64_t n) {
    vf S[ROWS];
    MN_UNROLL
    for (int r = 0; r < ROWS; r++) S[r] = vf_load(from + r * MN_VW);
    for (int64_t t = 0; t < n; t++, at += MN_VW, keys += 3 * ROWS, next.at += next.step) {
        const vf u = vf_load(s->u + at), w = vf_load(s->w + at), rest = vf_load(s->rest + at);
        __builtin_prefetch(next.at, 0, 2);
        MN_UNROLL
        for (int r = 0; r < ROWS; r++) {
            if (keep) vf_store(keep + t * BLOCK_FLOATS + r * MN_VW, S[r]);
            const vf c = vf_fma(vf_set1(keys[ROWS + r]), w, rest);
            S[r] = vf_fma(c, S[r], vf_mul(vf_set1(keys[r]), u));
        }
    }
    MN_UNROLL
    for (int r = 0; to && r < ROWS; r++) vf_store(to + r * MN_VW, S[r]);
}

static void advance(void *context, float *cells, int64_t t0, int64_t n) {
    item_state *s = context;
    stage_inputs(s, t0, n);
    for (int64_t g = 0; g < s->groups; g++) {
        for (int64_t c = 0; c < s->vectors; c++) {
            float *block = block_at(s, cells, g, c);
            const mn_line next = line_ahead(s, t0 + TOKENS, g * s->vectors + c);
            walk(block, block, NULL, s, keys_at(s, g), next, c * TOKENS * MN_VW, n);
        }
    }
}

/* ---- backward -------------------------------------------------------------------------------- */

/* Rows of a state-shaped tensor as cells; zero where it is absent and outside the item. */
static void load_cells(float *cells, const item_state *s, mn_in view) {
    const float *from = MN_ROW(float, view, s->n, 0, s->h);
    for (int64_t i = s->i0; i < s->i0 + s->groups * ROWS; i++) {
        for (int64_t c = 0; c < s->vectors; c++) {
            const int lanes = vf_lanes(s->p->call.V - c * MN_VW);
            const int64_t at = i * s->p->call.V + c * MN_VW;
            const vf x = from && i < s->i1 ? vf_load_row(from + at, lanes) : vf_zero();
            vf_store(block_at(s, cells, (i - s->i0) / ROWS, c) + (i - s->i0) % ROWS * MN_VW, x);
        }
    }
}

static void turn(void *context, const float *cells) {
    (void)cells;
    item_state *s = context;
    load_cells(s->adjoint, s, s->p->cot.state);
}

/* Takes the adjoint of one block of cells back through n tokens, adding to all sums. */
static void walk_back(item_state *s, float *adjoint, const float *keys, int64_t c, int64_t n) {
    vf D[ROWS];
    MN_UNROLL
    for (int r = 0; r < ROWS; r++) D[r] = vf_load(adjoint + r * MN_VW);
    for (int64_t t = n - 1; t >= 0; t--) {
        const float *key = keys + t * 3 * ROWS;
        const int64_t at = (c * TOKENS + t) * MN_VW;
        const vf u = vf_load(s->u + at), w = vf_load(s->w + at), rest = vf_load(s->rest + at);
        const vf v = vf_load(s->v + at), d_o = vf_load(s->d_o + at);
        vf du = vf_load(s->du + at), x = vf_load(s->x + at);
        MN_UNROLL
        for (int r = 0; r < ROWS; r++) {
            const vf k = vf_set1(key[r]), S0 = vf_load(s->before + t * BLOCK_FLOATS + r * MN_VW);
            const vf keep = vf_fma(vf_set1(key[ROWS + r]), w, rest);
            const vf S = vf_fma(keep, S0, vf_mul(k, u)), e = vf_fnma(k, S0, v);
            float *dq = s->dqk + (t * 2 * ROWS + r) * MN_VW, *dk = dq + ROWS * MN_VW;
            D[r] = vf_fma(vf_set1(key[2 * ROWS + r]), d_o, D[r]);
            const vf y = vf_mul(D[r], k), wD = vf_mul(w, D[r]);
            vf_store(dq, vf_fma(S, d_o, vf_load(dq)));
            vf_store(dk, vf_fma(wD, vf_fnma(k, S0, e), vf_load(dk)));
            du = vf_add(du, y);
            x = vf_fma(y, e, x);
            D[r] = vf_mul(keep, D[r]);
        }
        vf_store(s->du + at, du);
        vf_store(s->x + at, x);
    }
    MN_UNROLL
    for (int r = 0; r < ROWS; r++) vf_store(adjoint + r * MN_VW, D[r]);
}

/* dq, and dk without the part that goes through |k|^2, of the rows of one group */
static void write_keys(const item_state *s, int64_t group, int64_t t0, int64_t n) {
    const int64_t i = s->i0 + group * ROWS, rows = mn_min(ROWS, s->i1 - i);
    for (int64_t t = 0; t < n; t++) {
        float *dq = MN_ROW_OUT(float, s->p->grad.q, s->seq.b, s->seq.t0 + t0 + t, s->h);
        float *dk = MN_ROW_OUT(float, s->p->grad.k, s->seq.b, s->seq.t0 + t0 + t, s->h);
        float sums[2 * ROWS];
        mn_sum_four(sums, s->dqk + t * 2 * ROWS * MN_VW);
        mn_sum_four(sums + ROWS, s->dqk + (t * 2 + 1) * ROWS * MN_VW);
        for (int64_t r = 0; r < rows; r++) {
            if (dq) dq[i + r] = sums[r];
            if (dk) dk[i + r] = sums[ROWS + r];
        }
    }
}

/* dv, dbeta and the rest of dk of one token, from du and x: vectors `step` floats apart, then the
 * same of each further tile `tile_step` floats on. */
static void finish_token(const mn_longhorn_diag_args *p, int64_t b, int64_t t, int64_t h,
                         const float *du, const float *x, int64_t step, int64_t tiles,
                         int64_t tile_step) {
    const float *k = MN_ROW(float, p->k, b, t, h), *beta = MN_ROW(float, p->beta, b, t, h);
    float *dv = MN_ROW_OUT(float, p->grad.v, b, t, h),
          *dbeta = MN_ROW_OUT(float, p->grad.beta, b, t, h);
    float *dk = MN_ROW_OUT(float, p->grad.k, b, t, h);
    const float norm = (float)mn_key_norm(k, p->call.K);
    vf through_norm = vf_zero();
    for (int64_t c = 0; c * MN_VW < p->call.V; c++) {
        const int lanes = vf_lanes(p->call.V - c * MN_VW);
        const mn_gain gain = mn_gain_of(vf_load_row(beta + c * MN_VW, lanes), norm);
        vf du_c = vf_zero(), x_c = vf_zero();
        for (int64_t tile = 0; tile < tiles; tile++) {
            du_c = vf_add(du_c, vf_load_row(du + c * step + tile * tile_step, lanes));
            x_c = vf_add(x_c, vf_load_row(x + c * step + tile * tile_step, lanes));
        }
        if (dv) vf_store_row(dv + c * MN_VW, vf_mul(gain.w, du_c), lanes);
        const vf to_beta = vf_mul(vf_mul(gain.rest, gain.rest), x_c);
        if (dbeta) vf_store_row(dbeta + c * MN_VW, to_beta, lanes);
        through_norm = vf_fma(vf_mul(gain.w, gain.w), x_c, through_norm);
    }
    const float factor = -2.0f * vf_sum(through_norm);
    for (int64_t i = 0; dk && i < p->call.K; i++) dk[i] += factor * k[i];
}

static void write_values(const item_state *s, int64_t t0, int64_t n) {
    const mn_call *c = &s->p->call;
    for (int64_t t = 0; t < n; t++) {
        const int64_t at = s->seq.t0 + t0 + t, row = (s->seq.b * c->T + at) * c->H + s->h;
        if (!s->du_parts) {
            finish_token(s->p, s->seq.b, at, s->h, s->du + t * MN_VW, s->x + t * MN_VW,
                         TOKENS * MN_VW, 1, 0);
            continue;
        }
        for (int64_t j = 0; j < s->vectors; j++) {
            const int lanes = vf_lanes(c->V - j * MN_VW);
            const int64_t from = (j * TOKENS + t) * MN_VW, to = row * c->V + j * MN_VW;
            vf_store_row(s->du_parts + to, vf_load(s->du + from), lanes);
            vf_store_row(s->x_parts + to, vf_load(s->x + from), lanes);
        }
    }
}

static void reverse(void *context, const float *cells, int64_t t0, int64_t n) {
    item_state *s = context;
    stage_inputs(s, t0, n);
    stage_cotangents(s, t0, n);
    for (int64_t g = 0; g < s->groups; g++) {
        memset(s->dqk, 0, sizeof s->dqk);
        for (int64_t c = 0; c < s->vectors; c++) {
            walk(NULL, block_at(s, cells, g, c), s->before, s, keys_at(s, g),
                 line_ahead(s, t0 - TOKENS, g * s->vectors + c), c * TOKENS * MN_VW, n);
            walk_back(s, block_at(s, s->adjoint, g, c), keys_at(s, g), c, n);
        }
        write_keys(s, g, t0, n);
    }
    write_values(s, t0, n);
}

static void write_first(const item_state *s) {
    float *to = MN_ROW_OUT(float, s->p->grad.state0, s->n, 0, s->h);
    for (int64_t i = s->i0; to && i < s->i1; i++) {
        for (int64_t c = 0; c < s->vectors; c++) {
            const float *D = block_at(s, s->adjoint, (i - s->i0) / ROWS, c);
            const vf x = vf_load(D + (i - s->i0) % ROWS * MN_VW);
            vf_store_row(to + i * s->p->call.V + c * MN_VW, x,
                           vf_lanes(s->p->call.V - c * MN_VW));
        }
    }
}

/* ---- phases ---------------------------------------------------------------------------------- */

static float *take(float **at, int64_t n) {
    float *here = *at;
    *at += n;
    return here;
}

static void run_item(const mn_longhorn_diag_args *p, int64_t item, mn_row_cut cut, float *parts,
                     void *scratch) {
    const mn_call *call = &p->call;
    const int64_t head = item / cut.tiles, tile = item % cut.tiles, i0 = tile * cut.rows;
    item_state *s = scratch;
    float *memory = (float *)(s + 1);
    *s = (item_state){ .p = p,
                       .n = head / call->H,
                       .h = head % call->H,
                       .i0 = i0,
                       .i1 = mn_min(i0 + cut.rows, call->K),
                       .vectors = mn_ceil_div(call->V, MN_VW) };
    s->groups = mn_ceil_div(s->i1 - i0, ROWS);
    s->cells = s->groups * s->vectors * BLOCK_FLOATS;
    s->seq = mn_sequence_at(call, s->n);
    const int64_t wide = s->vectors * TOKENS * MN_VW, rows = call->B * call->T * call->H * call->V;
    s->keys = take(&memory, s->groups * TOKENS * 3 * ROWS);
    s->u = take(&memory, wide), s->w = take(&memory, wide), s->rest = take(&memory, wide);
    s->v = take(&memory, wide), s->d_o = take(&memory, wide);
    s->du = take(&memory, wide), s->x = take(&memory, wide);
    s->adjoint = take(&memory, s->cells);
    if (cut.tiles > 1) {
        s->du_parts = parts + tile * rows;
        s->x_parts = parts + (cut.tiles + tile) * rows;
    }
    mn_ahead_add(&s->ahead, p->v, 0, call->V);
    mn_ahead_add(&s->ahead, p->beta, 0, call->V);
    mn_ahead_add(&s->ahead, p->k, 0, call->K);
    mn_ahead_add(&s->ahead, p->q, i0, s->i1);
    mn_ahead_add(&s->ahead, p->cot.o, 0, call->V);
    load_cells(memory, s, p->state0);
    const mn_replay replay = { .T = s->seq.length,
                               .block = TOKENS,
                               .floats = s->cells,
                               .context = s,
                               .advance = advance,
                               .turn = turn,
                               .reverse = reverse };
    mn_replay_run(&replay, memory);
    write_first(s);
}

/* 64 tokens of one batch row */
static void finish_tokens(const mn_longhorn_diag_args *p, int64_t item, mn_row_cut cut,
                          const float *parts) {
    const mn_call *c = &p->call;
    const int64_t blocks = mn_ceil_div(c->T, 64), b = item / blocks, t0 = item % blocks * 64;
    const int64_t rows = c->B * c->T * c->H * c->V;
    for (int64_t t = t0; t < mn_min(t0 + 64, c->T); t++) {
        for (int64_t h = 0; h < c->H; h++) {
            const float *du = parts + ((b * c->T + t) * c->H + h) * c->V;
            finish_token(p, b, t, h, du, du + cut.tiles * rows, MN_VW, cut.tiles, rows);
        }
    }
}

void MN_T(mn_longhorn_diag_backward_run)(const void *args, int phase, int64_t item, void *shared,
                                         void *scratch) {
    const mn_longhorn_diag_args *p = args;
    const mn_row_cut cut = mn_row_cut_of(&p->call, ROWS);
    if (phase == 0) run_item(p, item, cut, shared, scratch);
    else finish_tokens(p, item, cut, shared);
}
