/* mesa.h - what forward and backward of mesa know of one chunk, and the solver they share.
 *
 * Definition and gradients in ref/mesa.c. With G the running sum of g inside the chunk, Hkk_0,
 * Hkv_0 the statistics before it, and rows being tokens:
 *
 *   W[t,s] = exp(G_t - G_s), s <= t      first_t = exp G_t      last_s = W[L-1,s]
 *   row t of X M     = first_t x_t Hkk_0 + sum_s W[t,s] (x_t.k_s) beta_s k_s' + lam x_t
 *   row t of X'Hkv   = first_t x_t Hkv_0 + sum_s W[t,s] (x_t.k_s) beta_s v_s'
 *   Hkk <- first_{L-1} Hkk_0 + (last beta K)'K      Hkv <- first_{L-1} Hkv_0 + (last beta K)'V
 *
 * so no token's M is ever formed to be multiplied with. */
#ifndef MN_KERNELS_CPU_MESA_MESA_H
#define MN_KERNELS_CPU_MESA_MESA_H

#include "kernels/cpu/chunk/stat.h"
#include "kernels/cpu/chunk/tiles.h"

/* Hkk (K,K), then Hkv (K,V). */
typedef struct mn_mesa_state {
    float *kk, *kv;
} mn_mesa_state;

typedef struct mn_mesa_chunk {
    int64_t b, t0, h, L;
    mn_mat k, v;
    double G[MN_STAT_CHUNK];
    float first[MN_STAT_CHUNK], last[MN_STAT_CHUNK], beta[MN_STAT_CHUNK];
    float *W, *Wb;      // (chunk,chunk): W, and W with columns times beta
    float *P;           // (chunk,chunk) work
    float *Kw;          // (chunk,K): last beta k
} mn_mesa_chunk;

bool MN_T(mn_mesa_chunk_floats)(int64_t *count, const mn_call *call);
float *MN_T(mn_mesa_chunk_place)(mn_mesa_chunk *c, float *at, const mn_call *call);

/* Few heads go in segments of so many chunks, counted from the start of the sequence: solving is
 * most of the work and needs no later statistics, so once a phase has gone over the statistics
 * alone and kept them at the starts of segments, these are items of their own. Many heads are one
 * segment. */
enum { MN_MESA_SEGMENT = 8 };

static inline bool mn_mesa_is_cut(const mn_call *call) {
    return call->H < MN_MANY_HEADS && mn_longest_sequence(call) > MN_MESA_SEGMENT * MN_STAT_CHUNK;
}

static inline int64_t mn_mesa_chunks(const mn_call *call) {
    return mn_ceil_div(mn_longest_sequence(call), MN_STAT_CHUNK);
}

/* Segments of the longest sequence. */
static inline int64_t mn_mesa_segments(const mn_call *call) {
    return mn_mesa_is_cut(call) ? mn_ceil_div(mn_mesa_chunks(call), MN_MESA_SEGMENT) : 1;
}

bool MN_T(mn_mesa_state_floats)(int64_t *count, const mn_call *call);
mn_mesa_state MN_T(mn_mesa_state_at)(float *at, const mn_call *call);
void MN_T(mn_mesa_state_load)(mn_mesa_state S, const mn_mesa_args *p, int64_t n, int64_t h);

/* Without `reads` only the last row of W, and no Wb. */
void MN_T(mn_mesa_prepare)(mn_mesa_chunk *c, const mn_mesa_args *p, const mn_sequence *seq,
                           int64_t h, int64_t start, bool reads);

/* Goes over the sequence with its statistics alone; those before every `every`th chunk end up in
 * `kept`, the last ones in S. */
void MN_T(mn_mesa_keep)(float *kept, mn_mesa_state S, mn_mesa_chunk *c, const mn_mesa_args *p,
                        const mn_sequence *seq, int64_t n, int64_t h, int64_t every);

/* S goes on to the end of the chunk. */
void MN_T(mn_mesa_advance)(mn_mesa_state S, const mn_mesa_chunk *c, const mn_call *call);

enum { MN_MESA_SIDES = 2 };

/* Solves for the tokens of one chunk after the other; see mesa_solve.c. */
typedef struct mn_mesa_solver {
    int64_t K;
    const float *lam;
    double *M, *U;                   // (K,K)
    float *inverse[2];               // (K,K): of M at the start of each half of the chunk
    float *B, *R, *D, *Z, *Y;        // (chunk,K)
    int64_t dense[2];                // tokens of each half that it preconditions; others: 1 / lam
    int64_t steps;                   // of the plain iteration, whatever it comes to; 0: solve
    int direct_chunks;               // so many chunks to come are not worth iterating for
} mn_mesa_solver;

/* Bytes of its arrays; `memory` must be aligned for a double. */
bool MN_T(mn_mesa_solver_bytes)(size_t *bytes, const mn_call *call);
void MN_T(mn_mesa_solver_place)(mn_mesa_solver *s, void *memory, int64_t K, const float *lam);

/* Solves n <= MN_MESA_SIDES systems for each token of the chunk that starts from the statistics kk:
 * x_t <- M_t^-1 x_t for the rows of X[0] .. X[n-1], of length K without gaps. */
void MN_T(mn_mesa_solve)(float *const *X, int n, mn_mesa_solver *s, mn_mesa_chunk *c,
                         const float *kk);

/* The upper triangle of U, symmetric positive definite, becomes its factor: U'U is what U was. */
void MN_T(mn_mesa_factorise)(double *U, int64_t K);

/* x <- (U'U)^-1 x */
void MN_T(mn_mesa_substitute)(double *x, const double *U, int64_t K);

/* ---- one token ------------------------------------------------------------------------------- */

/* Lines of memory that are asked for from `at` on, then those from `next` on. */
typedef struct mn_mesa_ahead {
    const float *at, *next;
    int64_t lines, next_lines;
} mn_mesa_ahead;

/* A system and its factor in float32; see mesa_refine.c. The caller fills H and b. */
typedef struct mn_mesa_refiner {
    int64_t K, N, row;              // N: K up to whole vectors; floats from row to row of U
    double *b, *x, *r;              // (N)
    float *H, *U;                   // (N,N): of symmetric H the first K columns; (N,row)
    float *inverse, *inverse_t;     // (N,MN_VW): of the blocks on the diagonal of U
    float *d;                       // (N): a correction; the last of its memory
} mn_mesa_refiner;

/* Bytes of its arrays; `memory` must be aligned for a double. */
bool MN_T(mn_mesa_refiner_bytes)(size_t *bytes, int64_t K);
void MN_T(mn_mesa_refiner_place)(mn_mesa_refiner *s, void *memory, int64_t K);

/* x = (H + diag lam)^-1 b as exactly as in double; false where float32 does not lead there. */
bool MN_T(mn_mesa_refine)(mn_mesa_refiner *s, const float *lam, mn_mesa_ahead ahead);

bool MN_T(mn_mesa_forward_plan)(const void *args, mn_plan *plan);
void MN_T(mn_mesa_forward_run)(const void *args, int phase, int64_t item, void *shared,
                               void *scratch);

/* The step of head h of sequence n, which is one token long; next: Hkk that is wanted after it, or
 * NULL. */
bool MN_T(mn_mesa_token_plan)(const void *args, mn_plan *plan);
void MN_T(mn_mesa_token)(const mn_mesa_args *p, const mn_sequence *seq, int64_t n, int64_t h,
                         const float *next, void *scratch);

#endif
