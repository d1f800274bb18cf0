/* longhorn_column.h - the chunk form of per-column Longhorn. Gains in longhorn.h.
 *
 * For the L tokens of a chunk that starts from the state S (rows are tokens):
 *
 *   A[t,s] = k_t.k_s  s < t      P[t,s] = q_t.k_s  s <= t
 *   r_t = v_t - S'k_t - sum_{s<t} A[t,s] u_s      u_t = w_t . r_t
 *   O = scale (Q S + P U)      S <- S + K'U
 *
 * Each column has its own w, so there is no inverse that all columns share: r is solved token after
 * token, on vectors of columns. */
#ifndef MN_KERNELS_CPU_LONGHORN_LONGHORN_COLUMN_H
#define MN_KERNELS_CPU_LONGHORN_LONGHORN_COLUMN_H

#include "base/util.h"
#include "kernels/cpu/gemm/gemm.h"
#include "kernels/cpu/longhorn/longhorn.h"

enum { MN_COLUMN_CHUNK = 32 };

/* Columns [j0, j0 + n) of one head of one sequence; `width` is n in whole vectors, the unused lanes
 * of every array below hold zeros. */
typedef struct mn_column_tile {
    int64_t sequence, h, j0, n, width;
} mn_column_tile;

/* One chunk. Arrays of keys are (L,K), of values (L,width). */
typedef struct mn_column_chunk {
    int64_t L;
    float *k, *q;              // copies without gaps
    float *A, *P;              // (L,L): lower triangles as above, P zero above the diagonal
    float *w, *rest, *r, *u;
    float norm[MN_COLUMN_CHUNK];
} mn_column_chunk;

int64_t MN_T(mn_column_chunk_floats)(int64_t K, int64_t width);

/* Points the arrays into `memory`; returns the first float behind them. */
float *MN_T(mn_column_chunk_place)(mn_column_chunk *c, float *memory, int64_t K, int64_t width);

/* Tokens [t0, t0 + L) of batch row b: everything but r and u. `reads` = false leaves out q and P.
 */
void MN_T(mn_column_chunk_prepare)(mn_column_chunk *c, const mn_longhorn_column_args *p,
                                   const mn_column_tile *tile, int64_t b, int64_t t0, int64_t L,
                                   bool reads);

/* r and u from the state S (K,width) */
void MN_T(mn_column_chunk_solve)(mn_column_chunk *c, const mn_longhorn_column_args *p,
                                 const mn_column_tile *tile, int64_t b, int64_t t0, const float *S);

/* S <- S + K'U */
void MN_T(mn_column_chunk_advance)(float *S, const mn_column_chunk *c, int64_t K, int64_t width);

/* State-shaped rows (K,V) to and from (K,width); zero where `from` is absent. */
void MN_T(mn_column_state_load)(float *S, mn_in from, const mn_column_tile *tile, int64_t K,
                                int64_t V);
void MN_T(mn_column_state_store)(mn_out to, const float *S, const mn_column_tile *tile, int64_t K,
                                 int64_t V);

/* How value columns are cut into items: by H and V alone, never by how many sequences there are. */
static inline int64_t mn_column_tile_width(const mn_call *c) {
    const int64_t wanted = c->H >= 8
                               ? 1
                               : mn_min(mn_min(4, mn_ceil_div(8, c->H)), mn_ceil_div(c->V, 32));
    return mn_ceil_div(mn_ceil_div(c->V, wanted), 16) * 16;
}

static inline mn_column_tile mn_column_tile_at(const mn_call *c, int64_t item) {
    const int64_t width = mn_column_tile_width(c), tiles = mn_ceil_div(c->V, width);
    const int64_t head = item / tiles, j0 = item % tiles * width, n = mn_min(width, c->V - j0);
    return (mn_column_tile){ head / c->H, head % c->H, j0, n, mn_ceil_div(n, MN_VW) * MN_VW };
}

#endif
