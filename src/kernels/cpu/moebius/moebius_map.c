/* moebius_map.c - the map of a stretch of tokens (moebius_map.h), and the kernel that finds those
 * of whole sequences for the ranks that share them (kernels/moebius_span.h).
 *
 * An item is a few neighbouring tiles of channels of one sequence. */
#include "kernels/cpu/moebius/moebius_map.h"

#include <string.h>

#include "kernels/cpu/moebius/moebius_span_tiles.h"

_Static_assert((int)MOEBIUS_ENTRIES == (int)MN_MAP_ENTRIES && (int)MOEBIUS_X == (int)MN_MAP_X,
               "entries of a map have one order");

/* ---- maps ------------------------------------------------------------------------------------ */

/* Multiplies the map of slot s by the tokens of the block: the states that start as (1, 0, 0) and
 * (0, 1, 0) take them, and E collects a. */
static void extend_slot(float *map, const moebius_tile *tile, int64_t s) {
    const int64_t at = s * MN_VW, K = tile->K;
    const vf a = vf_load(tile->a + at), a2 = vf_load(tile->a2 + at), p = vf_load(tile->p + at);
    vf m[MOEBIUS_ENTRIES];
    MN_UNROLL
    for (int i = 0; i < MOEBIUS_ENTRIES; i++) m[i] = vf_load(map + i * MN_VW);
    for (int64_t t = 0; t < tile->rows->count;) {
        const int64_t end = mn_min(tile->rows->count, t + tile->period);
        for (; t < end; t++) {
            const vf phi =
                vf_mul(vf_load(tile->prec + t * MN_VW), vf_set1(tile->rows->k2[t * K + s]));
            const vf r = vf_mul(vf_load(tile->pv + t * MN_VW), vf_set1(tile->rows->k[t * K + s]));
            m[MOEBIUS_C] = vf_fma(p, m[MOEBIUS_A], vf_mul(a2, m[MOEBIUS_C]));
            m[MOEBIUS_D] = vf_fma(p, m[MOEBIUS_B], vf_mul(a2, m[MOEBIUS_D]));
            m[MOEBIUS_A] = vf_fma(phi, m[MOEBIUS_C], m[MOEBIUS_A]);
            m[MOEBIUS_B] = vf_fma(phi, m[MOEBIUS_D], m[MOEBIUS_B]);
            m[MOEBIUS_X] = vf_fma(r, m[MOEBIUS_C], vf_mul(a, m[MOEBIUS_X]));
            m[MOEBIUS_Y] = vf_fma(r, m[MOEBIUS_D], vf_mul(a, m[MOEBIUS_Y]));
            m[MOEBIUS_E] = vf_mul(a, m[MOEBIUS_E]);
        }
        const vf top =
            vf_max(vf_max(m[MOEBIUS_A], m[MOEBIUS_B]), vf_max(m[MOEBIUS_C], m[MOEBIUS_D]));
        const vf scale = moebius_shrink(top);
        MN_UNROLL
        for (int i = 0; i < MOEBIUS_ENTRIES; i++) m[i] = vf_mul(m[i], scale);
    }
    MN_UNROLL
    for (int i = 0; i < MOEBIUS_ENTRIES; i++) vf_store(map + i * MN_VW, m[i]);
}

void MN_T(mn_moebius_identity)(float *map, int64_t K) {
    for (int64_t s = 0; s < K; s++) {
        for (int i = 0; i < MOEBIUS_ENTRIES; i++) {
            const bool one = i == MOEBIUS_A || i == MOEBIUS_D || i == MOEBIUS_E;
            vf_store(map + (s * MOEBIUS_ENTRIES + i) * MN_VW, vf_set1(one ? 1.0f : 0.0f));
        }
    }
}

void MN_T(mn_moebius_extend)(float *map, const moebius_tile *tile) {
    for (int64_t s = 0; s < tile->K; s++) {
        extend_slot(map + s * MOEBIUS_ENTRIES * MN_VW, tile, s);
    }
}

void MN_T(mn_moebius_compose)(float *out, const float *later, const float *earlier, int64_t count) {
    for (int64_t at = 0; at < count; at++, out += MOEBIUS_ENTRIES * MN_VW) {
        vf x[MOEBIUS_ENTRIES], y[MOEBIUS_ENTRIES];
        MN_UNROLL
        for (int i = 0; i < MOEBIUS_ENTRIES; i++) {
            x[i] = vf_load(later + (at * MOEBIUS_ENTRIES + i) * MN_VW);
            y[i] = vf_load(earlier + (at * MOEBIUS_ENTRIES + i) * MN_VW);
        }
#define ROW_COLUMN(row0, row1, c0, c1)                                                             \
    vf_fma(x[MOEBIUS_##row0], y[MOEBIUS_##c0], vf_mul(x[MOEBIUS_##row1], y[MOEBIUS_##c1]))
        const vf A = ROW_COLUMN(A, B, A, C), B = ROW_COLUMN(A, B, B, D);
        const vf C = ROW_COLUMN(C, D, A, C), D = ROW_COLUMN(C, D, B, D);
        const vf X = vf_fma(x[MOEBIUS_E], y[MOEBIUS_X], ROW_COLUMN(X, Y, A, C));
        const vf Y = vf_fma(x[MOEBIUS_E], y[MOEBIUS_Y], ROW_COLUMN(X, Y, B, D));
        const vf E = vf_mul(x[MOEBIUS_E], y[MOEBIUS_E]);
#undef ROW_COLUMN
        const vf r = vf_div(vf_set1(1.0f), vf_add(A, D));
        const vf entries[MOEBIUS_ENTRIES] = { A, B, C, D, X, Y, E };
        MN_UNROLL
        for (int i = 0; i < MOEBIUS_ENTRIES; i++) vf_store(out + i * MN_VW, vf_mul(entries[i], r));
    }
}

/* ---- the kernel ------------------------------------------------------------------------------ */

/* Scratch: rows, tiles, and the map of each. */
bool MN_T(mn_moebius_map_plan)(const void *args, mn_plan *plan) {
    const mn_call *c = args;
    return span_plan(args, plan, MOEBIUS_ENTRIES * c->K * MN_VW);
}

/* Entries of a tile's map to where the other channels' are, and whether all are numbers. */
static void store_map(const mn_moebius_span_args *args, const moebius_tile *tile, const float *map,
                      bool good, int64_t n) {
    for (int i = 0; i < MOEBIUS_ENTRIES; i++) {
        for (int64_t s = 0; s < tile->K; s++) {
            vf_store(tile->e + s * MN_VW, vf_load(map + (s * MOEBIUS_ENTRIES + i) * MN_VW));
        }
        good &= span_store(args, tile, tile->e, MOEBIUS_ENTRIES, i, n);
    }
    span_mark(args, tile, good, n);
}

void MN_T(mn_moebius_map_run)(const void *args, int phase, int64_t item, void *shared,
                              void *scratch) {
    (void)phase, (void)shared;
    const mn_moebius_span_args *p = args;
    const int64_t K = p->op.call.K, each = MOEBIUS_ENTRIES * K * MN_VW;
    span_tiles w;
    float *maps = span_open(&w, p, item, scratch);
    bool good[SPAN_TILES];
    for (int64_t j = 0; j < w.n_tiles; j++) {
        MN_T(mn_moebius_identity)(maps + j * each, K);
        good[j] = w.tiles[j].checked = true;    // maps know nothing of the state
    }
    for (int64_t t = 0; t < w.seq.length; t += MOEBIUS_BLOCK) {
        const int64_t count = mn_min(MOEBIUS_BLOCK, w.seq.length - t);
        MN_T(mn_moebius_load)(&w.rows, w.all, w.n_tiles, w.seq.b, w.seq.t0 + t, count, false);
        for (int64_t j = 0; j < w.n_tiles; j++) {
            if (w.tiles[j].period == 0) good[j] = false;
            else if (good[j]) MN_T(mn_moebius_extend)(maps + j * each, &w.tiles[j]);
        }
    }
    for (int64_t j = 0; j < w.n_tiles; j++) {
        store_map(p, &w.tiles[j], maps + j * each, good[j], w.n);
    }
}
