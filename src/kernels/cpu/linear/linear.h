/* linear.h - the chunk form that additive and delta share.
 *
 * Delta with decay, for the L tokens of a chunk that starts from the state S (rows are tokens, G
 * the running sum of log decays inside the chunk, w the write key times beta, q times the scale):
 *
 *   P[t,s] = sum_i q[t,i] w[s,i] exp(G[t,i] - G[s,i])    s <= t
 *   A[t,s] = sum_i e[t,i] w[s,i] exp(G[t,i] - G[s,i])    s <  t
 *   (I + A) R = V - (e exp G) S            residuals
 *   O  = (q exp G) S + P R
 *   S <- diag(exp G_L) S + (w exp(G_L - G))' R
 *
 * Additive is the same without e: A = 0 and R = V. Docs: docs/math/linear.md.
 *
 * exp(G_t - G_s) is at most 1, but its two halves are not. The chunk is cut into segments inside
 * which no channel falls by more than MN_SEGMENT_FALL; G counts from rho, the level of its segment.
 * Row t of a segment uses exp(G_t) <= 1; column s uses exp(-G_s) <= exp(MN_SEGMENT_FALL) inside the
 * segment, and exp(rho - rho_s - G_s) <= 1 before it. The first segment's level is 0, unless its
 * first token alone falls further; that of every other segment is its first token's. Weak decay
 * gives one segment. Any decay gives the exact value, since small sums are never added to large
 * ones. */
#ifndef MN_KERNELS_CPU_LINEAR_LINEAR_H
#define MN_KERNELS_CPU_LINEAR_LINEAR_H

#include "kernels/access.h"
#include "kernels/kernel.h"
#include "kernels/cpu/gemm/gemm.h"
#include "kernels/cpu/simd/row.h"

#define MN_SEGMENT_FALL 40.0f
enum { MN_CHUNK = 32, MN_SOLVE_BLOCK = 16 };

/* The two operators as one. Additive: e absent, w = k, beta absent. */
typedef struct mn_linear {
    const mn_call *call;
    float scale;
    int decay;
    bool w_is_e;                // the write key was not given: it is e
    mn_in q, e, w, v, beta, g, state0;
    mn_out o, state;
    mn_in cot_o, cot_state;
    mn_out dq, de, dw, dv, dbeta, dg, dstate0;
} mn_linear;

/* One chunk of one head of one sequence and all that its keys and decays determine. Matrices are
 * contiguous: (L,K) unless said, rows of log decays have `width` numbers (0 none, 1, or K). */
typedef struct mn_chunk {
    int64_t b, t0, h, L, K, width;
    int64_t j;                      // head of its queries and keys
    int64_t ahead, n_ahead;         // first token and tokens of the chunk that follows in the scan
    int n_segments;
    int64_t first[MN_CHUNK + 1];    // token each segment starts at; first[n_segments] = L
    bool late;                      // the first segment's level is not 0
    float *G;                       // (L,width) log decay since the level of the row's segment
    float *step, *rho;    // (segments,width) levels: above the one before; above the start
    float *qs, *es;                 // q, e times exp(G - rho of the row's segment)
    float *qd, *ed;                 // q, e times exp G; with one segment from 0 these are qs, es
    float *qd_memory, *ed_memory;   // where qd, ed are when they are not
    float *ws_memory;               // where ws is when it is not one of a bank
    float *ws, *wd;    // w times exp(rho - G), rho of the segment at hand; exp(G_L - G)
    float *factor;                  // (L,width) work
    float *fall;                    // (K) exp G_L, or ones
    float *P, *A;                   // (L,L), zero above the diagonal; A also on it
    float beta[MN_CHUNK];
} mn_chunk;

/* Floats of the arrays of a chunk. */
int64_t MN_T(mn_chunk_floats)(int64_t K, int64_t width, bool has_e);

/* Points the arrays into `memory`; returns the first float behind them. */
float *MN_T(mn_chunk_place)(mn_chunk *c, float *memory, int64_t K, int64_t width, bool has_e);

/* Which way a scan goes through the chunks; a replay needs states only, not q. */
typedef enum { MN_SCAN_FORWARD, MN_SCAN_REPLAY, MN_SCAN_BACKWARD } mn_scan_mode;

/* Computes the chunk at `start`; MN_SCAN_REPLAY leaves out qs, qd and P. ws is then that of the
 * last segment. */
void MN_T(mn_chunk_prepare)(mn_chunk *c, const mn_linear *p, const mn_sequence *seq, int64_t h,
                            int64_t start, mn_scan_mode mode);

/* Columns of ws for segment `to` of the chunk, from those of segment to - 1 (0 starts afresh). */
void MN_T(mn_chunk_columns)(mn_chunk *c, const mn_linear *p, int to);

/* dst = src factor scale over a row of K; width 0: no factor, 1: factor[0] for all, else one each.
 */
MN_ALWAYS_INLINE void mn_scale_row(float *dst, const float *src, const float *factor, int64_t width,
                                   float scale, int64_t K) {
    const vf common = vf_set1(width == 1 ? scale * factor[0] : scale);
    int64_t i = 0;
    for (; i + MN_VW <= K; i += MN_VW) {
        const vf x = vf_mul(vf_load(src + i), common);
        vf_store(dst + i, width > 1 ? vf_mul(x, vf_load(factor + i)) : x);
    }
    const int n = (int)(K - i);
    if (n > 0) {
        const vf x = vf_mul(vf_load_row(src + i, n), common);
        vf_store_row(dst + i, width > 1 ? vf_mul(x, vf_load_row(factor + i, n)) : x, n);
    }
}

/* Asks for the rows of the chunk that comes next in the scan: rows of one head lie a page or more
 * apart, where the processor does not look ahead by itself. */
MN_ALWAYS_INLINE void mn_prefetch_next(mn_in x, const mn_chunk *c, int64_t h, int64_t width) {
    for (int64_t t = c->ahead; x.data && t < c->ahead + c->n_ahead; t++) {
        const float *row = MN_ROW(float, x, c->b, t, h);
        for (int64_t i = 0; i < width; i += 16) __builtin_prefetch(row + i, 0, 2);
    }
}

/* The same for rows of this chunk that will be written. */
MN_ALWAYS_INLINE void mn_prefetch_written(mn_out x, const mn_chunk *c, int64_t width) {
    for (int64_t t = c->t0; x.data && t < c->t0 + c->L; t++) {
        const float *row = MN_ROW(float, x, c->b, t, c->h);
        for (int64_t i = 0; i < width; i += 16) __builtin_prefetch(row + i, 1, 2);
    }
}

/* factor = exp(a - b) over a row of log decays; NULL is zero */
MN_ALWAYS_INLINE void mn_exp_row(float *factor, const float *a, const float *b, int64_t width) {
    for (int64_t i = 0; i < width; i += MN_VW) {
        const int n = vf_lanes(width - i);
        const vf x = a ? vf_load_row(a + i, n) : vf_zero();
        vf_store_row(factor + i, vf_exp(b ? vf_sub(x, vf_load_row(b + i, n)) : x), n);
    }
}

/* One segment whose level is 0: exp(rho) = 1. */
static inline bool mn_chunk_simple(const mn_chunk *c) {
    return c->n_segments == 1 && !c->late;
}

/* X <- (I + A)^-1 X and X <- (I + A)^-T X; A (L,L) strictly lower, X (L,n) contiguous. */
void MN_T(mn_solve_lower)(float *X, const float *A, int64_t L, int64_t n);
void MN_T(mn_solve_upper)(float *X, const float *A, int64_t L, int64_t n);

/* Width of a row of log decays. */
static inline int64_t mn_decay_width(int decay, int64_t K) {
    return decay == MN_DECAY_NONE ? 0 : decay == MN_DECAY_CHANNEL ? K : 1;
}

mn_linear MN_T(mn_linear_from_additive)(const mn_additive_args *args);
mn_linear MN_T(mn_linear_from_delta)(const mn_delta_args *args);

bool MN_T(mn_linear_forward_plan)(const mn_linear *p, mn_plan *plan);
void MN_T(mn_linear_forward_run)(const mn_linear *p, int phase, int64_t item, void *shared,
                                 void *scratch);
bool MN_T(mn_linear_backward_plan)(const mn_linear *p, mn_plan *plan);
void MN_T(mn_linear_backward_run)(const mn_linear *p, int phase, int64_t item, void *shared,
                                  void *scratch);
bool MN_T(mn_linear_step_plan)(const mn_linear *p, mn_plan *plan);
void MN_T(mn_linear_step_run)(const mn_linear *p, int64_t item, void *scratch);

#endif
