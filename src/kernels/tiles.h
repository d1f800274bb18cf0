/* tiles.h - cuts the tokens of all sequences into tiles that never cross a border.
 *
 * Tiles are numbered by slots, a few of which are empty when sequences are packed: sequence n,
 * which starts at token a, owns slots from a / rows + n on. That is smem enough, since
 * ceil(length / rows) + a / rows <= (a + length) / rows + 1, and finding a slot's sequence needs no
 * table. Where a tile lies in its sequence depends on that sequence alone. */
#ifndef MN_KERNELS_TILES_H
#define MN_KERNELS_TILES_H

#include <stdbool.h>

#include "base/util.h"
#include "kernels/access.h"

typedef struct mn_tile {
    int64_t n;           // sequence
    int64_t index;       // of the tile in its sequence
    int64_t first;       // row in the sequence
    int64_t n_rows;      // >= 1
} mn_tile;

/* Slots for tiles of `rows` rows; `length` is that of unpacked sequences. */
static inline int64_t mn_tile_slots(const mn_call *call, int64_t length, int64_t rows) {
    if (!call->cu_seqlens) return call->B * mn_ceil_div(length, rows);
    return call->cu_seqlens[call->n_seqs] / rows + call->n_seqs;
}

/* The last sequence whose first slot is not above `slot`. */
static inline int64_t mn_tile_sequence(const mn_call *call, int64_t rows, int64_t slot) {
    int64_t low = 0, high = call->n_seqs - 1;
    while (low < high) {
        const int64_t middle = high - (high - low) / 2;
        if (call->cu_seqlens[middle] / rows + middle <= slot) low = middle;
        else high = middle - 1;
    }
    return low;
}

/* The tile in a slot; false when the slot is empty. */
static inline bool mn_tile_at(mn_tile *out, const mn_call *call, int64_t length, int64_t rows,
                              int64_t slot) {
    mn_tile tile;
    if (!call->cu_seqlens) {
        const int64_t per_sequence = mn_ceil_div(length, rows);
        tile.n = slot / per_sequence;
        tile.index = slot % per_sequence;
    } else {
        tile.n = mn_tile_sequence(call, rows, slot);
        tile.index = slot - (call->cu_seqlens[tile.n] / rows + tile.n);
        length = call->cu_seqlens[tile.n + 1] - call->cu_seqlens[tile.n];
    }
    tile.first = tile.index * rows;
    tile.n_rows = mn_min(rows, length - tile.first);
    *out = tile;
    return tile.n_rows > 0;
}

#endif
