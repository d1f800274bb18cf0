/* importance_forward.c - Palimpsa's outputs and final state. Equations in importance.h.
 *
 * One item is some value columns of one head of one sequence; columns never meet, so the cut
 * changes no bit. Tokens go in blocks. A block of cells stays in registers for all tokens of its
 * block, which costs per cell and token two multiply-adds, an addition, a division and the
 * multiply-add of the read. The division is exact: vdivps hides the others, and an estimate refined
 * by Newton would take three more operations from the same ports. */
#include "kernels/cpu/importance/importance.h"

#include <string.h>

#include "base/checked.h"
#include "base/util.h"
#include "kernels/cpu/simd/ahead.h"

/* Registers hold 2 * ROWS vectors of cells and some for the token. */
enum {
    ROWS = MN_VW == 16 ? 8 : 4,
    TOKENS = 32,
    MOST_COLUMNS = 128,
    VECTORS = MOST_COLUMNS / MN_VW
};

/* A block of tokens, made ready. keys: for each group of rows and each token k, k^2 and q of its
 * ROWS rows. The others: for each vector of columns and each token one vector. */
typedef struct stage {
    float grow[TOKENS], renew[TOKENS], prior[TOKENS];
    float v[VECTORS * TOKENS * MN_VW], b[VECTORS * TOKENS * MN_VW];      // v f, b f
    float o[VECTORS * TOKENS * MN_VW], ovar[VECTORS * TOKENS * MN_VW];   // sums without scale and f
    float keys[];
} stage;

/* Columns of an item: with few heads less, so that a long sequence has work for several cores. */
static int64_t width_of(const mn_call *c) {
    return c->H < 8 ? MOST_COLUMNS / 4 : MOST_COLUMNS;
}

bool MN_T(mn_importance_forward_plan)(const void *args, mn_plan *plan) {
    const mn_call *c = args;
    int64_t padded, keys, cells, floats;
    if (!mn_cells_fit(c)) return false;
    plan->n_phases = 1;
    plan->items[0] = mn_n_sequences(c) * c->H * mn_ceil_div(c->V, width_of(c));
    return mn_add_i64(&padded, c->K, ROWS) && mn_mul_i64(&keys, padded, 3 * TOKENS) &&
           mn_mul_i64(&cells, padded, 2 * MOST_COLUMNS) && mn_add_i64(&floats, keys, cells) &&
           mn_mul_size(&plan->scratch_bytes, (size_t)floats, sizeof(float)) &&
           mn_add_size(&plan->scratch_bytes, plan->scratch_bytes, sizeof(stage) + 64);
}

static float *keys_of(stage *s, int64_t g) {
    return s->keys + g * TOKENS * 3 * ROWS;
}

static void stage_keys(stage *s, const mn_importance_args *p, const mn_cells *tile, int64_t b,
                       int64_t t0, int64_t n) {
    for (int64_t t = 0; t < n; t++) {
        const float *k = MN_ROW(float, p->k, b, t0 + t, tile->h);
        const float *q = MN_ROW(float, p->q, b, t0 + t, tile->h);
        for (int64_t g = 0; g < tile->groups; g++) {
            float *to = keys_of(s, g) + t * 3 * ROWS;
            const int64_t i = g * ROWS, count = mn_min(ROWS, tile->i1 - i);
            if (count < ROWS) memset(to, 0, 3 * ROWS * sizeof *to);
            for (int64_t r = 0; r < count; r++) {
                to[r] = k[i + r];
                to[ROWS + r] = k[i + r] * k[i + r];
                to[2 * ROWS + r] = q[i + r];
            }
        }
    }
}

static void stage_values(stage *s, const mn_importance_args *p, const mn_cells *tile, int64_t b,
                         int64_t t0, int64_t n) {
    for (int64_t t = 0; t < n; t++) {
        const float *v = MN_ROW(float, p->v, b, t0 + t, tile->h) + tile->j0;
        const float *gate = MN_ROW(float, p->b, b, t0 + t, tile->h) + tile->j0;
        const vf grow = vf_set1(s->grow[t]);
        for (int64_t c = 0; c < tile->vectors; c++) {
            const int lanes = vf_lanes(tile->j1 - tile->j0 - c * MN_VW);
            const int64_t at = (c * TOKENS + t) * MN_VW;
            vf_store(s->v + at, vf_mul(grow, vf_load_row(v + c * MN_VW, lanes)));
            vf_store(s->b + at, vf_mul(grow, vf_load_row(gate + c * MN_VW, lanes)));
            vf_store(s->o + at, vf_zero());
            vf_store(s->ovar + at, vf_zero());
        }
    }
}

/* Takes one block of cells through n tokens, adding to o and, where `spread`, to ovar. */
MN_ALWAYS_INLINE void walk(float *cells, stage *s, const float *keys, mn_line next,
                           int64_t at, int64_t n, bool spread) {
    const vf one = vf_set1(1.0f);
    vf M[ROWS], J[ROWS];
    MN_UNROLL
    for (int r = 0; r < ROWS; r++) {
        M[r] = vf_load(cells + r * MN_VW);
        J[r] = vf_load(cells + (ROWS + r) * MN_VW);
    }
    for (int64_t t = 0; t < n; t++, at += MN_VW, keys += 3 * ROWS, next.at += next.step) {
        __builtin_prefetch(next.at, 0, 2);
        if (s->renew[t] != 1.0f) {
            const vf renew = vf_set1(s->renew[t]);
            MN_UNROLL
            for (int r = 0; r < ROWS; r++) {
                M[r] = vf_mul(renew, M[r]);
                J[r] = vf_mul(renew, J[r]);
            }
        }
        const vf v = vf_load(s->v + at), b = vf_load(s->b + at), prior = vf_set1(s->prior[t]);
        vf o = vf_load(s->o + at), ovar = spread ? vf_load(s->ovar + at) : vf_zero();
        MN_UNROLL
        for (int r = 0; r < ROWS; r++) {
            const vf q = vf_set1(keys[2 * ROWS + r]);
            M[r] = vf_fma(vf_set1(keys[r]), v, M[r]);
            J[r] = vf_fma(vf_set1(keys[ROWS + r]), b, J[r]);
            const vf I = vf_add(J[r], prior);
            if (spread) {
                const vf q_over_I = vf_mul(q, vf_div(one, I));
                o = vf_fma(q_over_I, M[r], o);
                ovar = vf_fma(q_over_I, q, ovar);
            } else {
                o = vf_fma(q, vf_div(M[r], I), o);
            }
        }
        vf_store(s->o + at, o);
        if (spread) vf_store(s->ovar + at, ovar);
    }
    MN_UNROLL
    for (int r = 0; r < ROWS; r++) {
        vf_store(cells + r * MN_VW, M[r]);
        vf_store(cells + (ROWS + r) * MN_VW, J[r]);
    }
}

static void scan_mean(float *cells, stage *s, const float *keys, mn_line next, int64_t at,
                      int64_t n) {
    walk(cells, s, keys, next, at, n, false);
}

static void scan_spread(float *cells, stage *s, const float *keys, mn_line next, int64_t at,
                        int64_t n) {
    walk(cells, s, keys, next, at, n, true);
}

static void write_outputs(const stage *s, const mn_importance_args *p, const mn_cells *tile,
                          int64_t b, int64_t t0, int64_t n) {
    const float scale = (float)p->scale, square = (float)(p->scale * p->scale);
    for (int64_t t = 0; t < n; t++) {
        float *o = MN_ROW_OUT(float, p->o, b, t0 + t, tile->h);
        float *ovar = MN_ROW_OUT(float, p->ovar, b, t0 + t, tile->h);
        for (int64_t c = 0; c < tile->vectors; c++) {
            const int64_t at = (c * TOKENS + t) * MN_VW, j = tile->j0 + c * MN_VW;
            const int lanes = vf_lanes(tile->j1 - j);
            if (o) vf_store_row(o + j, vf_mul(vf_set1(scale), vf_load(s->o + at)), lanes);
            const vf factor = vf_set1(square * s->grow[t]);
            if (ovar) vf_store_row(ovar + j, vf_mul(factor, vf_load(s->ovar + at)), lanes);
        }
    }
}

void MN_T(mn_importance_forward_run)(const void *args, int phase, int64_t item, void *shared,
                                     void *scratch) {
    (void)phase, (void)shared;
    const mn_importance_args *p = args;
    const mn_call *call = &p->call;
    const int64_t width = width_of(call), tiles = mn_ceil_div(call->V, width);
    const int64_t j0 = item % tiles * width, j1 = mn_min(j0 + width, call->V);
    const int64_t n = item / tiles / call->H, h = item / tiles % call->H;
    const mn_cells tile = mn_cells_of(n, h, 0, call->K, j0, j1, ROWS);
    const mn_sequence seq = mn_sequence_at(call, n);
    float *cells = scratch;
    stage *s = (stage *)(cells + mn_cells_floats(&tile));
    const mn_frame_tokens tokens = { .grow = s->grow, .renew = s->renew, .prior = s->prior };
    mn_frame frame;
    mn_ahead ahead = { 0 };
    mn_ahead_add(&ahead, p->k, 0, call->K);
    mn_ahead_add(&ahead, p->q, 0, call->K);
    mn_ahead_add(&ahead, p->v, j0, j1);
    mn_ahead_add(&ahead, p->b, j0, j1);
    MN_T(mn_cells_load)(cells, &frame, p, &tile);
    for (int64_t start = 0; start < seq.length; start += TOKENS) {
        const int64_t t0 = seq.t0 + start, count = mn_min(TOKENS, seq.length - start);
        MN_T(mn_frame_advance)(&frame, &tokens, p, seq.b, t0, h, count);
        stage_keys(s, p, &tile, seq.b, t0, count);
        stage_values(s, p, &tile, seq.b, t0, count);
        const bool more = start + 2 * TOKENS <= seq.length;
        for (int64_t g = 0; g < tile.groups; g++) {
            for (int64_t c = 0; c < tile.vectors; c++) {
                float *block = mn_cells_block(cells, &tile, g, c);
                const int64_t index = more ? g * tile.vectors + c : INT64_MAX;
                const mn_line next = mn_line_ahead(&ahead, seq.b, t0 + TOKENS, h, index, s->grow);
                if (p->ovar.data) {
                    scan_spread(block, s, keys_of(s, g), next, c * TOKENS * MN_VW, count);
                } else {
                    scan_mean(block, s, keys_of(s, g), next, c * TOKENS * MN_VW, count);
                }
            }
        }
        write_outputs(s, p, &tile, seq.b, t0, count);
    }
    MN_T(mn_cells_store)(p, cells, &frame, &tile);
}
