/* cells.h - what passes over memory cells share: how rows are cut, sums of lanes. */
#ifndef MN_KERNELS_CPU_CHUNK_CELLS_H
#define MN_KERNELS_CPU_CHUNK_CELLS_H

#include "base/checked.h"
#include "base/util.h"
#include "mneme.h"
#include "kernels/cpu/simd/row.h"

/* Sizes with which no plan of these kernels overflows before its checked sums. T = 0 lets any width
 * come this far. */
static inline bool mn_cells_fit(const mn_call *c) {
    int64_t cells;
    const int64_t most = (int64_t)1 << 40;
    return c->K <= most && c->V <= most && mn_mul_i64(&cells, c->K, c->V) && cells <= most << 10;
}

/* How the key rows of a head are cut into items: by H and K alone, never by how many sequences
 * there are. Eight heads or more are not cut. */
typedef struct mn_row_cut {
    int64_t tiles, rows;    // rows of a tile, a multiple of what was asked for
} mn_row_cut;

static inline mn_row_cut mn_row_cut_of(const mn_call *c, int64_t multiple) {
    const int64_t wanted = mn_min(mn_min(4, mn_ceil_div(8, c->H)), mn_ceil_div(c->K, 16));
    const int64_t rows = mn_ceil_div(mn_ceil_div(c->K, wanted), multiple) * multiple;
    return (mn_row_cut){ mn_ceil_div(c->K, rows), rows };
}

/* Sums of the lanes of four vectors that lie one after the other */
static inline void mn_sum_four(float out[4], const float *from) {
    vf v[4] = { vf_load(from), vf_load(from + MN_VW), vf_load(from + 2 * MN_VW),
                vf_load(from + 3 * MN_VW) };
    float quads[MN_VW];
    vf_transpose_quads(v);
    vf_store(quads, vf_add(vf_add(v[0], v[1]), vf_add(v[2], v[3])));
    for (int i = 0; i < 4; i++) out[i] = quads[i];
    for (int at = 4; at < MN_VW; at += 4) {
        for (int i = 0; i < 4; i++) out[i] += quads[at + i];
    }
}

#endif
