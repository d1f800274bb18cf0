/* moebius_span_tiles.h - tiles of channels that go over a sequence together to find what it does to
 * a state (moebius_map.c) or to its gradient (moebius_adjoint.c). */
#ifndef MN_KERNELS_CPU_MOEBIUS_MOEBIUS_SPAN_TILES_H
#define MN_KERNELS_CPU_MOEBIUS_MOEBIUS_SPAN_TILES_H

#include <string.h>

#include "kernels/cpu/moebius/moebius_tile.h"
#include "kernels/moebius_span.h"

enum { SPAN_TILES = 4, SPAN_ITEMS = 16 };

typedef struct span_tiles {
    moebius_rows rows;
    moebius_tile tiles[SPAN_TILES], *all[SPAN_TILES];
    int64_t n_tiles, n;        // of sequence n
    mn_sequence seq;
} span_tiles;

/* Tiles that go together: memory streams like some, if that leaves enough items. */
static inline int64_t span_together(const mn_call *call) {
    const int64_t tiles = mn_ceil_div(call->V, MN_VW);
    return mn_max(1, mn_min(SPAN_TILES, mn_n_sequences(call) * tiles / SPAN_ITEMS));
}

/* One phase; `extra` floats of each tile beside its own. */
static inline bool span_plan(const void *args, mn_plan *plan, int64_t extra) {
    const mn_call *c = args;
    const int64_t groups = mn_ceil_div(mn_ceil_div(c->V, MN_VW), span_together(c));
    int64_t rows, floats;
    plan->n_phases = 1;
    return mn_mul_i64(&plan->items[0], mn_n_sequences(c), groups) &&
           moebius_rows_floats(&rows, c->K) && moebius_tile_floats(&floats, c->K) &&
           mn_add_i64(&floats, floats, extra) && mn_mul_i64(&floats, floats, span_together(c)) &&
           mn_add_i64(&floats, floats, rows) &&
           mn_mul_size(&plan->scratch_bytes, (size_t)floats, sizeof(float));
}

/* Opens the tiles of an item; returns the scratch memory that is left. */
static inline float *span_open(span_tiles *w, const mn_moebius_span_args *args, int64_t item,
                               float *memory) {
    const mn_call *call = &args->op.call;
    const int64_t tiles = mn_ceil_div(call->V, MN_VW), together = span_together(call);
    const int64_t groups = mn_ceil_div(tiles, together), first = item % groups * together;
    w->n = item / groups;
    w->seq = mn_sequence_at(call, w->n);
    w->n_tiles = mn_min(together, tiles - first);
    memory = MN_T(mn_moebius_rows_open)(&w->rows, memory, call->K);
    for (int64_t j = 0; j < w->n_tiles; j++) {
        w->all[j] = &w->tiles[j];
        memory = MN_T(mn_moebius_tile_open)(&w->tiles[j], &w->rows, memory, &args->op,
                                            (first + j) * MN_VW);
    }
    return memory;
}

/* Entry `entry` of the tile's cells, [K][MN_VW], to where the other channels' are; whether all of
 * it are finite. */
static inline bool span_store(const mn_moebius_span_args *args, const moebius_tile *tile,
                              const float *cells, int entries, int entry, int64_t n) {
    const mn_call *call = &args->op.call;
    float *out = (float *)args->out + ((n * entries + entry) * call->V + tile->v0) * call->K;
    vm finite = vm_first(MN_VW);
    for (int64_t s = 0; s < tile->K; s++) {
        const vf x = vf_load(cells + s * MN_VW);
        finite = vm_and(finite, vf_eq(vf_sub(x, x), vf_zero()));
    }
    lanes_store_cells(out, cells, tile->K, tile->lanes);
    return !vm_any(vm_not(finite));
}

static inline void span_mark(const mn_moebius_span_args *args, const moebius_tile *tile, bool good,
                             int64_t n) {
    memset(args->good + n * args->op.call.V + tile->v0, good, (size_t)tile->lanes);
}

#endif
