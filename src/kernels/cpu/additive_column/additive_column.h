/* additive_column.h - the chunk form of a sum whose value channels forget at their own rates.
 *
 * For the L tokens of a chunk that starts from the state S (rows are tokens; f the decay of the
 * first token, G the running sum of log decays behind it, so 0 in the first row):
 *
 *   P[t,s] = scale q_t.k_s    s <= t
 *   O  = e^G . (P (V . e^-G) + f . (scale q S'))
 *   S <- diag(f e^(G_L)) S + (V . e^(G_L - G))'k          S (V,K)
 *
 * Scores know no decay, so all channels share them. A chunk ends where a channel has fallen by
 * MN_COLUMN_FALL within it, and after MN_COLUMN_BLOCK tokens counted from the sequence's first:
 * e^-G stays finite, and a token that forgets all begins a chunk. */
#ifndef MN_KERNELS_CPU_ADDITIVE_COLUMN_ADDITIVE_COLUMN_H
#define MN_KERNELS_CPU_ADDITIVE_COLUMN_ADDITIVE_COLUMN_H

#include "kernels/access.h"
#include "kernels/cpu/chunk/tiles.h"
#include "kernels/cpu/gemm/gemm.h"
#include "kernels/cpu/simd/vec.h"
#include "kernels/kernel.h"

#define MN_COLUMN_FALL 40.0f
enum { MN_COLUMN_BLOCK = 32 };

typedef struct mn_column_chunk {
    const mn_additive_column_args *p;
    int64_t b, t0, h, L;         // tokens t0 .. t0 + L - 1 of row b
    float *P;                    // (L,L), what is above the diagonal is not to be read
    float *up, *down, *tail;     // (L,V) e^G, e^-G, e^(G_L - G)
    float *R;                    // (L,V) V . e^-G, then V . e^(G_L - G)
    float *o;                    // (L,V)
    float *first, *all, *G;      // (V) f, f e^(G_L), work
} mn_column_chunk;

/* Floats that a chunk takes; puts its arrays there and returns what follows. */
static inline int64_t mn_column_floats(const mn_call *call) {
    return MN_COLUMN_BLOCK * MN_COLUMN_BLOCK + (5 * MN_COLUMN_BLOCK + 3) * call->V;
}
float *MN_T(mn_column_place)(mn_column_chunk *c, float *memory, const mn_call *call);

/* The operator on some of its value columns. */
mn_additive_column_args MN_T(mn_additive_column_tile)(const mn_additive_column_args *p,
                                                      mn_columns col);

/* Takes the chunk at token t of [t, end): scores and decays; c->p, b and h are set. */
void MN_T(mn_column_take)(mn_column_chunk *c, int64_t t, int64_t end);

/* Outputs of the chunk without e^G in c->o, from S (V,K); R is then V . e^-G. */
void MN_T(mn_column_outputs)(mn_column_chunk *c, const float *S);

/* S of the chunk's end; R is then V . e^(G_L - G). */
void MN_T(mn_column_advance)(mn_column_chunk *c, float *S);

/* S = diag(c->all) S + alpha x'y for x (L,V) and rows y of the chunk's tokens. */
void MN_T(mn_column_outer)(float *S, const mn_column_chunk *c, const float *x, const float *y,
                           int64_t y_row, float alpha);

/* to = x y over n numbers. */
MN_ALWAYS_INLINE void mn_column_times(float *to, const float *x, const float *y, int64_t n) {
    for (int64_t i = 0; i < n; i += MN_VW) {
        const int lanes = vf_lanes(n - i);
        vf_store_n(to + i, vf_mul(vf_load_n(x + i, lanes), vf_load_n(y + i, lanes)), lanes);
    }
}

#endif
