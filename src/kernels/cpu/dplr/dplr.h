/* dplr.h - diagonal plus low rank on vectors of value columns, token after token.
 *
 *   u = S'a;  S = diag(exp g) S + b u' + k v';  o = scale S'q
 *
 * A token's rows of the state are read and written once: while they are made, the output of this
 * token and u of the next are gathered from them. Tokens go in blocks, and a block goes over one
 * strip of columns at a time, whose state stays in the first cache. */
#ifndef MN_KERNELS_CPU_DPLR_DPLR_H
#define MN_KERNELS_CPU_DPLR_DPLR_H

#include "kernels/cpu/longhorn/longhorn_column.h"

enum { MN_DPLR_BLOCK = 16, MN_DPLR_STRIP = MN_VW == 16 ? 4 : 2 };    // tokens; vectors

/* Up to MN_DPLR_BLOCK tokens of one head. */
typedef struct mn_dplr_block {
    const mn_dplr_args *p;
    int64_t b, h, t0, n;            // tokens [t0, t0 + n) of batch row b
    bool more;                      // token t0 + n belongs to the sequence too
    float *w;                       // (n,K): exp g
} mn_dplr_block;

/* w of the block's tokens */
void MN_T(mn_dplr_prepare)(mn_dplr_block *block);

/* Takes S (K,width) through the block. `u` (width) is that of the first token and becomes that of
 * the token behind the block. With `before`, states (n,K,width) in front of each token, and their u
 * (n,width), are kept; else outputs are written where they are wanted. */
void MN_T(mn_dplr_advance)(const mn_dplr_block *block, const mn_column_tile *tile, float *S,
                           float *u, float *before, float *before_u);

/* u = S'a of token t */
void MN_T(mn_dplr_read)(float *u, const float *S, const mn_dplr_args *p, int64_t b, int64_t t,
                        int64_t h, int64_t width);

#endif
