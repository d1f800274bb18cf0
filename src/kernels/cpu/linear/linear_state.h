/* linear_state.h - the state side of the chunk form: columns, residuals, advance. */
#ifndef MN_KERNELS_CPU_LINEAR_LINEAR_STATE_H
#define MN_KERNELS_CPU_LINEAR_LINEAR_STATE_H

#include "kernels/cpu/linear/linear.h"

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
    if (count < 1 || call->H >= MN_MANY_HEADS) count = 1;
    const int64_t width = (call->V + count - 1) / count;
    return (mn_column_tiles){ count,
                              (width + 15) / 16 * 16 < call->V ? (width + 15) / 16 * 16 : call->V };
}

static inline mn_columns mn_columns_at(const mn_call *call, mn_column_tiles tiles, int64_t tile) {
    const int64_t j0 = tile * tiles.width < call->V ? tile * tiles.width : call->V;
    const int64_t end = j0 + tiles.width < call->V ? j0 + tiles.width : call->V;
    return (mn_columns){ j0, end - j0 };
}

/* S (K, columns) from and to rows (n, h) of a state; zero where there is none. */
void MN_T(mn_state_load)(float *S, mn_in from, const mn_call *call, int64_t n, int64_t h,
                         const mn_columns *col);
void MN_T(mn_state_store)(mn_out to, const float *S, const mn_call *call, int64_t n, int64_t h,
                          const mn_columns *col);

/* The residuals of a chunk: the values themselves for additive, else solved in R (L, columns).
 * *r_row is the distance between rows of what is returned. */
const float *MN_T(mn_chunk_residual)(float *R, int64_t *r_row, const mn_linear *p,
                                     const mn_chunk *c, const mn_columns *col, const float *S);

/* S <- diag(fall) S + wd' R */
void MN_T(mn_state_advance)(float *S, const mn_chunk *c, const mn_columns *col, const float *R,
                            int64_t r_row);

#endif
