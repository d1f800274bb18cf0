/* tiles.h - value columns of a head cut into tiles, so that one long sequence uses several cores.
 *
 * Columns never meet in a forward pass, so the cut leaves every bit as it is. Gradients of what all
 * columns share are sums over tiles (parts.h). */
#ifndef MN_KERNELS_CPU_CHUNK_TILES_H
#define MN_KERNELS_CPU_CHUNK_TILES_H

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
    int64_t count = call->V / MN_TILE;
    if (count > MN_MAX_TILES) count = MN_MAX_TILES;
    if (count < 2 || call->H >= MN_MANY_HEADS) return (mn_column_tiles){ 1, call->V };
    const int64_t width = ((call->V + count - 1) / count + 15) / 16 * 16;
    return (mn_column_tiles){ (call->V + width - 1) / width, width < call->V ? width : call->V };
}

static inline mn_columns mn_columns_at(const mn_call *call, mn_column_tiles tiles, int64_t tile) {
    const int64_t j0 = tile * tiles.width, left = call->V - j0;
    return (mn_columns){ j0, left < tiles.width ? left : tiles.width };
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
