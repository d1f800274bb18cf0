/* mlstm.h - what forward and backward of mlstm know of one chunk.
 *
 * Definition and gradients in ref/mlstm.c. With F the running sum of lf inside the chunk and m_0
 * the stabiliser before it, everything a token reads has a weight of at most 1:
 *
 *   W[t,s] = exp(F_t - F_s + ipre_s - m_t)   s <= t     first[t] = exp(F_t + m_0 - m_t)
 *   last[s] = W[L-1,s]                                  fall     = first[L-1]
 *   S = Q K'     num_t = scale (first_t q_t C_0 + sum_s W S [t,s] v_s)
 *                a_t   = scale (first_t q_t.n_0 + sum_s W S [t,s])
 *   C <- fall C_0 + (last K)'V              n <- fall n_0 + sum_s last_s k_s
 *
 * The normaliser is one more value column, of ones. Sums of logs are formed in double. */
#ifndef MN_KERNELS_CPU_MLSTM_MLSTM_H
#define MN_KERNELS_CPU_MLSTM_MLSTM_H

#include "kernels/cpu/chunk/stat.h"
#include "kernels/cpu/chunk/tiles.h"

/* The operator on some of its value columns: args.call.V of them, rows of C `row` numbers apart.
 * The first columns have what belongs to all, n and m, and the cotangent of nsum. Everything is
 * linear in the cotangents, so gradients of q, k, the gates, n0 and m0 are sums over the tiles. */
typedef struct mn_mlstm_tile {
    mn_mlstm_args args;
    int64_t row;
} mn_mlstm_tile;

mn_mlstm_tile MN_T(mn_mlstm_tile_at)(const mn_mlstm_args *p, int64_t tile);

/* C (K,V), n (K), m; contiguous in one block of K (V + 1) + 1 floats, m as a float. */
typedef struct mn_mlstm_state {
    float *C, *n, *m;
} mn_mlstm_state;

typedef struct mn_mlstm_chunk {
    int64_t b, t0, h, L;
    mn_mat q, k, v;
    double m[MN_STAT_CHUNK], slope[MN_STAT_CHUNK];    // slope: d lf / d fpre
    float first[MN_STAT_CHUNK], last[MN_STAT_CHUNK];
    double a[MN_STAT_CHUNK];
    double over[MN_STAT_CHUNK];      // 1 / den, 0 where den underflows
    bool bounded[MN_STAT_CHUNK];     // exp(-m) is the larger: den does not depend on q
    float *W, *P;                    // (chunk,chunk): weights; W S where s <= t, else 0
    float *num;                      // (chunk,V)
    float *Kw;                       // (chunk,K) rows last_s k_s
} mn_mlstm_chunk;

bool MN_T(mn_mlstm_chunk_floats)(int64_t *count, const mn_call *call);
float *MN_T(mn_mlstm_chunk_place)(mn_mlstm_chunk *c, float *at, const mn_call *call);

bool MN_T(mn_mlstm_state_floats)(int64_t *count, const mn_call *call);
mn_mlstm_state MN_T(mn_mlstm_state_at)(float *at, const mn_call *call);
void MN_T(mn_mlstm_state_load)(mn_mlstm_state S, const mn_mlstm_tile *tile, int64_t n, int64_t h);

/* Gates, weights and Kw of the chunk that starts `start` tokens into the sequence at state S.
 * Without `reads` only the last row of W. */
void MN_T(mn_mlstm_prepare)(mn_mlstm_chunk *c, const mn_mlstm_args *p, const mn_sequence *seq,
                            int64_t h, int64_t start, mn_mlstm_state S, bool reads);

/* num, a, over and bounded; P is then W S. */
void MN_T(mn_mlstm_read)(mn_mlstm_chunk *c, const mn_mlstm_args *p, mn_mlstm_state S);

/* S goes on to the end of the chunk. */
void MN_T(mn_mlstm_advance)(mn_mlstm_state S, const mn_mlstm_chunk *c, const mn_mlstm_args *p);

/* exp(x - m), 0 where x is -inf: nothing has been stored yet */
static inline double mn_relative_exp(double x, double m) {
    return x == -INFINITY ? 0.0 : exp(x - m);
}

/* x * factor, where 0 stays 0 whatever the factor is */
static inline float mn_zero_safe(float x, double factor) {
    return x == 0.0f ? 0.0f : (float)(x * factor);
}

#endif
