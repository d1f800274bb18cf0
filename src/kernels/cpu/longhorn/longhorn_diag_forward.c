/* longhorn_diag_forward.c - outputs and final state of diagonal Longhorn. Gains in longhorn.h.
 *
 *   S_ij <- c_ij S_ij + k_i u_j,  u = w . v      o = scale S'q
 *
 * One item is some value columns of one head of one sequence; columns never meet, so the cut
 * changes no bit. A block of cells stays in registers for all tokens of a block of tokens: four
 * operations per cell and token. */
#include <string.h>

#include "base/checked.h"
#include "base/util.h"
#include "kernels/cpu/simd/ahead.h"
#include "kernels/cpu/longhorn/longhorn.h"

enum { ROWS = 8, TOKENS = 32, MOST_COLUMNS = 128, VECTORS = MOST_COLUMNS / MN_VW };

/* A block of tokens, made ready. keys: for each group of rows and each token k, |k|^2 - k^2 and q
 * of its ROWS rows. The others: for each vector of columns and each token one vector. */
typedef struct stage {
    float u[VECTORS * TOKENS * MN_VW], w[VECTORS * TOKENS * MN_VW];
    float rest[VECTORS * TOKENS * MN_VW], o[VECTORS * TOKENS * MN_VW];
    float norm[TOKENS];
    float keys[];
} stage;

/* The columns [j0, j1) of one head of one sequence; cells lie in blocks of ROWS vectors. */
typedef struct tile {
    int64_t n, h, j0, j1, groups, vectors;
} tile;

/* Columns of an item: with few heads less, so that a long sequence has work for several cores. */
static int64_t width_of(const mn_call *c) {
    return c->H < 8 ? MOST_COLUMNS / 4 : MOST_COLUMNS;
}

bool MN_T(mn_longhorn_diag_forward_plan)(const void *args, mn_plan *plan) {
    const mn_call *c = args;
    int64_t padded, floats;
    if (!mn_cells_fit(c)) return false;
    plan->n_phases = 1;
    plan->items[0] = mn_n_sequences(c) * c->H * mn_ceil_div(c->V, width_of(c));
    return mn_add_i64(&padded, c->K, ROWS) &&
           mn_mul_i64(&floats, padded, 3 * TOKENS + MOST_COLUMNS) &&
           mn_mul_size(&plan->scratch_bytes, (size_t)floats, sizeof(float)) &&
           mn_add_size(&plan->scratch_bytes, plan->scratch_bytes, sizeof(stage) + 64);
}

static float *block_at(float *cells, const tile *a, int64_t g, int64_t c) {
    return cells + (g * a->vectors + c) * ROWS * MN_VW;
}

static void load_state(float *cells, const mn_longhorn_diag_args *p, const tile *a) {
    const float *from = MN_ROW(float, p->state0, a->n, 0, a->h);
    for (int64_t i = 0; i < a->groups * ROWS; i++) {
        for (int64_t c = 0; c < a->vectors; c++) {
            const int64_t j = a->j0 + c * MN_VW;
            const bool given = from && i < p->call.K;
            const vf S = given ? vf_load_row(from + i * p->call.V + j, vf_lanes(a->j1 - j))
                               : vf_zero();
            vf_store(block_at(cells, a, i / ROWS, c) + i % ROWS * MN_VW, S);
        }
    }
}

static void store_state(const mn_longhorn_diag_args *p, float *cells, const tile *a) {
    float *to = MN_ROW_OUT(float, p->state, a->n, 0, a->h);
    for (int64_t i = 0; to && i < p->call.K; i++) {
        for (int64_t c = 0; c < a->vectors; c++) {
            const int64_t j = a->j0 + c * MN_VW;
            const vf S = vf_load(block_at(cells, a, i / ROWS, c) + i % ROWS * MN_VW);
            vf_store_row(to + i * p->call.V + j, S, vf_lanes(a->j1 - j));
        }
    }
}

static void stage_keys(stage *s, const mn_longhorn_diag_args *p, const tile *a, int64_t b,
                       int64_t t0, int64_t n) {
    const int64_t K = p->call.K;
    for (int64_t t = 0; t < n; t++) {
        const float *k = MN_ROW(float, p->k, b, t0 + t, a->h);
        const float *q = MN_ROW(float, p->q, b, t0 + t, a->h);
        const double norm = mn_key_norm(k, K);
        s->norm[t] = (float)norm;
        for (int64_t g = 0; g < a->groups; g++) {
            float *to = s->keys + (g * TOKENS + t) * 3 * ROWS;
            const int64_t i = g * ROWS, count = mn_min(ROWS, K - i);
            if (count < ROWS) memset(to, 0, 3 * ROWS * sizeof *to);
            for (int64_t r = 0; r < count; r++) {
                to[r] = k[i + r];
                to[ROWS + r] = (float)(norm - (double)k[i + r] * k[i + r]);
                to[2 * ROWS + r] = q[i + r];
            }
        }
    }
}

static void stage_values(stage *s, const mn_longhorn_diag_args *p, const tile *a, int64_t b,
                         int64_t t0, int64_t n) {
    for (int64_t t = 0; t < n; t++) {
        const float *v = MN_ROW(float, p->v, b, t0 + t, a->h) + a->j0;
        const float *beta = MN_ROW(float, p->beta, b, t0 + t, a->h) + a->j0;
        for (int64_t c = 0; c < a->vectors; c++) {
            const int lanes = vf_lanes(a->j1 - a->j0 - c * MN_VW);
            const int64_t at = (c * TOKENS + t) * MN_VW;
            const mn_gain gain = mn_gain_of(vf_load_row(beta + c * MN_VW, lanes), s->norm[t]);
            vf_store(s->u + at, vf_mul(gain.w, vf_load_row(v + c * MN_VW, lanes)));
            vf_store(s->w + at, gain.w);
            vf_store(s->rest + at, gain.rest);
            vf_store(s->o + at, vf_zero());
        }
    }
}

/* Takes one block of cells through n tokens, adding to o. */
static void walk(float *cells, stage *s, const float *keys, mn_line next, int64_t at, int64_t n) {
    vf S[ROWS];
    MN_UNROLL
    for (int r = 0; r < ROWS; r++) S[r] = vf_load(cells + r * MN_VW);
    for (int64_t t = 0; t < n; t++, at += MN_VW, keys += 3 * ROWS, next.at += next.step) {
        const vf u = vf_load(s->u + at), w = vf_load(s->w + at), rest = vf_load(s->rest + at);
        vf o = vf_load(s->o + at);
        __builtin_prefetch(next.at, 0, 2);
        MN_UNROLL
        for (int r = 0; r < ROWS; r++) {
            const vf c = vf_fma(vf_set1(keys[ROWS + r]), w, rest);
            S[r] = vf_fma(c, S[r], vf_mul(vf_set1(keys[r]), u));
            o = vf_fma(vf_set1(keys[2 * ROWS + r]), S[r], o);
        }
        vf_store(s->o + at, o);
    }
    MN_UNROLL
    for (int r = 0; r < ROWS; r++) vf_store(cells + r * MN_VW, S[r]);
}

static void write_outputs(const stage *s, const mn_longhorn_diag_args *p, const tile *a, int64_t b,
                          int64_t t0, int64_t n) {
    const vf scale = vf_set1((float)p->scale);
    for (int64_t t = 0; p->o.data && t < n; t++) {
        float *o = MN_ROW_OUT(float, p->o, b, t0 + t, a->h) + a->j0;
        for (int64_t c = 0; c < a->vectors; c++) {
            const vf y = vf_mul(scale, vf_load(s->o + (c * TOKENS + t) * MN_VW));
            vf_store_row(o + c * MN_VW, y, vf_lanes(a->j1 - a->j0 - c * MN_VW));
        }
    }
}

void MN_T(mn_longhorn_diag_forward_run)(const void *args, int phase, int64_t item, void *shared,
                                        void *scratch) {
    (void)phase, (void)shared;
    const mn_longhorn_diag_args *p = args;
    const mn_call *call = &p->call;
    const int64_t width = width_of(call), tiles = mn_ceil_div(call->V, width);
    const int64_t j0 = item % tiles * width, j1 = mn_min(j0 + width, call->V);
    const tile a = { item / tiles / call->H, item / tiles % call->H, j0, j1,
                     mn_ceil_div(call->K, ROWS), mn_ceil_div(j1 - j0, MN_VW) };
    const mn_sequence seq = mn_sequence_at(call, a.n);
    float *cells = scratch;
    stage *s = (stage *)(cells + a.groups * a.vectors * ROWS * MN_VW);
    mn_ahead ahead = { 0 };
    mn_ahead_add(&ahead, p->k, 0, call->K);
    mn_ahead_add(&ahead, p->q, 0, call->K);
    mn_ahead_add(&ahead, p->v, j0, j1);
    mn_ahead_add(&ahead, p->beta, j0, j1);
    load_state(cells, p, &a);
    for (int64_t start = 0; start < seq.length; start += TOKENS) {
        const int64_t t0 = seq.t0 + start, count = mn_min(TOKENS, seq.length - start);
        const bool more = start + 2 * TOKENS <= seq.length;
        stage_keys(s, p, &a, seq.b, t0, count);
        stage_values(s, p, &a, seq.b, t0, count);
        for (int64_t g = 0; g < a.groups; g++) {
            for (int64_t c = 0; c < a.vectors; c++) {
                const int64_t index = more ? g * a.vectors + c : INT64_MAX;
                walk(block_at(cells, &a, g, c), s, s->keys + g * TOKENS * 3 * ROWS,
                     mn_line_ahead(&ahead, seq.b, t0 + TOKENS, a.h, index, s->norm),
                     c * TOKENS * MN_VW, count);
            }
        }
        write_outputs(s, p, &a, seq.b, t0, count);
    }
    store_state(p, cells, &a);
}
