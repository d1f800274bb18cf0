/* tiles.h - value columns of a head cut into tiles, so that one long sequence uses several cores.
 *
 * Columns never meet in a forward pass, so the cut leaves every bit as it is. Gradients of what all
 * columns share are sums over tiles (parts.h). */
#ifndef MN_KERNELS_CPU_CHUNK_TILES_H
#define MN_KERNELS_CPU_CHUNK_TILES_H

#include "base/util.h"
#include "mneme.h"

/* How the value columns of a head are cut: by H and V alone, never by how many sequences there are.
 */
typedef struct mn_column_tiles {
    int64_t count, width;
} mn_column_tiles;

typedef struct mn_columns {
    int64_t j0, n;
} mn_columns;

enum { MN_MANY_HEADS = 4, MN_TILE = 32, MN_MAX_TILES = 4 };

static inline mn_column_tiles mn_column_tiles_of(const mn_call *call) {
    const int64_t count = mn_min(call->V / MN_TILE, MN_MAX_TILES);
    if (count < 2 || call->H >= MN_MANY_HEADS) return (mn_column_tiles){ 1, call->V };
    const int64_t width = mn_ceil_div(mn_ceil_div(call->V, count), 16) * 16;
    return (mn_column_tiles){ mn_ceil_div(call->V, width), mn_min(width, call->V) };
}

static inline mn_columns mn_columns_at(const mn_call *call, mn_column_tiles tiles, int64_t tile) {
    const int64_t j0 = tile * tiles.width;
    return (mn_columns){ j0, mn_min(tiles.width, call->V - j0) };
}

/* Columns of a view of rows over V, from column j0 on. */
static inline mn_in mn_in_from(mn_in x, int64_t j0) {
    if (x.data) x.data = (const float *)x.data + j0;
    return x;
}

static inline mn_out mn_out_from(mn_out x, int64_t j0) {
    if (x.data) x.data = (float *)x.data + j0;
    return x;
}

#endif
