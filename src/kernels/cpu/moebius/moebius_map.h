/* moebius_map.h - what a stretch of tokens does to KLA's state, as a matrix.
 *
 * One token is linear in (n, d, e) (see moebius_tile.h), so a stretch is the product
 *
 *   n' = A n + B d      d' = C n + D d      e' = X n + Y d + E e
 *
 * known up to a common factor, which composing chooses so that A + D = 1. Entries A to D are >= 0,
 * and AD >= BC, so BC <= 1/4. */
#include "kernels/cpu/simd/target.h"

#include <stdint.h>

#ifndef MN_KERNELS_CPU_MOEBIUS_MOEBIUS_MAP_H
#define MN_KERNELS_CPU_MOEBIUS_MOEBIUS_MAP_H

/* Entries of a map for one slot of a tile: MOEBIUS_ENTRIES vectors. */
enum {
    MOEBIUS_A, MOEBIUS_B, MOEBIUS_C, MOEBIUS_D, MOEBIUS_X, MOEBIUS_Y, MOEBIUS_E,
    MOEBIUS_ENTRIES
};

#endif

struct moebius_tile;

/* The maps (K, MOEBIUS_ENTRIES, MN_VW) of no tokens, and with those of the tile's block behind
 * them; the block has a period. The common factor is a power of two. */
void MN_T(mn_moebius_identity)(float *map, int64_t K);
void MN_T(mn_moebius_extend)(float *map, const struct moebius_tile *tile);

/* out = later after earlier, divided by its trace; out may be either of them. `count` maps in a
 * row. */
void MN_T(mn_moebius_compose)(float *out, const float *later, const float *earlier, int64_t count);
