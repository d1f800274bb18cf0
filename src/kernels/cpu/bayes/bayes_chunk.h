/* bayes_chunk.h - the chunk form of the Bayesian Layer: covariance and mean of one noise group.
 *
 * Inside a chunk that starts from P0, M0, with a_t the transition of token t, Phi_t = a_t .. a_1
 * and N_t = a_t N_{t-1} a_t' + l2_t N the process noise gathered since its start,
 *
 *   u_t   = Phi_t P0 (Phi_t'k_t) + N_t k_t - sum_{s<t} c_ts / sigma_s z_ts
 *   z_ts  = a_t z_{t-1,s},  z_ss = u_s            c_ts = k_t'z_ts         sigma_t = r2_t + k_t'u_t
 *   eps_t = v_t - (Phi_t'k_t)'M0 - sum_{s<t} c_ts / sigma_s eps_s
 *   o_t   = (Phi_t'q_t)'M0 + sum_{s<=t} g_ts / sigma_s eps_s              g_ts = q_t'z_ts
 *   q_t'P_t q_t = (Phi_t'q_t)'P0 (Phi_t'q_t) + q_t'N_t q_t - sum_{s<=t} g_ts^2 / sigma_s
 *
 * so P0 is read once, in K P0, and written once: P <- Phi P0 Phi' + N - sum_s z_s z_s' / sigma_s;
 * M <- Phi M0 + sum_s z_s eps_s' / sigma_s. c / sigma is the unit lower factor of the keys'
 * covariance and sigma its diagonal. Every factor that decays is a product of transitions inside
 * the chunk: nothing is ever divided by a decay, and no angle grows with the length of the
 * sequence.
 *
 * Rows are channels padded to whole vectors, with zeros; a rotation has the real rows first and
 * then the imaginary ones, R = 2 Kp, and its a and Phi are complex numbers. See
 * docs/math/covariance.md. */
#ifndef MN_KERNELS_CPU_BAYES_BAYES_CHUNK_H
#define MN_KERNELS_CPU_BAYES_BAYES_CHUNK_H

#include "kernels/access.h"
#include "kernels/kernel.h"
#include "kernels/cpu/gemm/gemm.h"
#include "kernels/cpu/simd/vec.h"

/* Most tokens of a chunk. */
enum { MN_BAYES_CHUNK = 16 };

/* Tokens of a chunk. A chunk rounds relative to the covariance it starts from, and sixteen writes
 * into a few channels shrink that so much that its sums would be worse than token after token. */
static inline int64_t mn_bayes_chunk_tokens(int64_t K) {
    return K < 2 * MN_BAYES_CHUNK ? MN_BAYES_CHUNK / 2 : MN_BAYES_CHUNK;
}

/* Memory handed out front to back; with memory NULL it only counts. `used` in floats. */
typedef struct mn_space {
    float *memory;
    size_t used;
    bool ok;
} mn_space;

/* Rows of tokens have the width in brackets. */
typedef struct mn_bayes_chunk {
    const mn_bayes_args *p;
    int64_t Kp, R, Vp, noise_width;    // Vp: columns of a group, padded; noise: Kp or 3 Kp
    bool turns, reads_variance;
    int64_t n, h, g, b, j0, columns;   // sequence, head, group; its value columns
    int64_t t0, L;
    float *k, *q;                      // [Kp]
    float *a, *phi;                    // [R] transition of the token, and of all tokens so far
    float *kt, *qt;                    // [R] Phi'k, Phi'q
    float *kP, *qP;                    // [R] P0 Phi'k, P0 Phi'q
    float *noise;                      // N_t: [Kp], or with rotation rr, ri, ii [3 Kp]
    float *u, *z;                      // [R] z_ss, and z_ts at the last token
    float *w;                          // [R] z / sqrt(sigma)
    float *eps, *out;                  // [Vp]
    float *ell, *g_sigma;              // [CHUNK] c_ts / sigma_s, g_ts / sigma_s
    float *diagonal;                   // of P0
    double *wide;                      // work space of the careful form
    bool careful;
    float l2[MN_BAYES_CHUNK], r2[MN_BAYES_CHUNK];
    float sigma[MN_BAYES_CHUNK], kvar[MN_BAYES_CHUNK], qvar[MN_BAYES_CHUNK];
} mn_bayes_chunk;

/* Sizes, and the arrays from `space`. */
void MN_T(mn_bayes_place)(mn_bayes_chunk *c, mn_space *space, const mn_bayes_args *p);

/* Whole 64-byte lines of rows * cols floats. */
float *MN_T(mn_take)(mn_space *space, int64_t rows, int64_t cols);

/* Which sequence, head and group the chunk is of. */
void MN_T(mn_bayes_select)(mn_bayes_chunk *c, int64_t n, int64_t h, int64_t g);

/* Matrices over the rows of the state: P (R,R) and M (R,Vp), from views laid out as P0 and M0, zero
 * where there is none, and back. */
void MN_T(mn_bayes_load_square)(float *P, const mn_bayes_chunk *c, mn_in from);
void MN_T(mn_bayes_load_columns)(float *M, const mn_bayes_chunk *c, mn_in from);
void MN_T(mn_bayes_store_square)(mn_out to, const mn_bayes_chunk *c, const float *P);
void MN_T(mn_bayes_store_columns)(mn_out to, const mn_bayes_chunk *c, const float *M);

/* P_0 and M_0 of the sequence */
void MN_T(mn_bayes_first)(float *P, float *M, const mn_bayes_chunk *c);

/* rows[t] (Vp) = this group's columns of a view over tokens; zero where absent */
void MN_T(mn_bayes_load_values)(float *rows, const mn_bayes_chunk *c, mn_in view);

/* Reads L tokens from t0 on; everything that depends on them alone. */
void MN_T(mn_bayes_load)(mn_bayes_chunk *c, int64_t t0, int64_t L);

/* u, z, sigma, kvar, qvar, ell, g_sigma from P at the start of the chunk; kP and qP on the way. */
void MN_T(mn_bayes_gains)(mn_bayes_chunk *c, const float *P);

/* eps, from M at the start of the chunk */
void MN_T(mn_bayes_residuals)(mn_bayes_chunk *c, const float *M);

/* P and M behind the chunk */
void MN_T(mn_bayes_advance)(mn_bayes_chunk *c, float *P, float *M);

/* The same as mn_bayes_gains and the P of mn_bayes_advance, computed in double. Rows of tokens
 * before `first` stay as they are: what comes later must not move them. */
void MN_T(mn_bayes_careful_gains)(mn_bayes_chunk *c, const float *P, int64_t first);
void MN_T(mn_bayes_careful_advance)(mn_bayes_chunk *c, float *P);
int64_t MN_T(mn_bayes_careful_doubles)(const mn_bayes_chunk *c);

/* Copies the lower triangle of P (R,R) over the upper one. */
void MN_T(mn_bayes_mirror)(float *P, int64_t R);

/* Where the rounding of a float32 covariance begins to matter. A variance k'Pk is a sum of terms of
 * either sign, rounded relative to S = sum_i k_i^2 P_ii, in P as it was before the chunk. As soon
 * as the variance of a key, before or after its write, is less than MN_BAYES_DOUBT roundings of S,
 * the chunk is done again in double, and gives the rows from that key's on. If then neither noise
 * hides the rounding of the P it started from, that P may be indefinite; from the token that shows
 * it, rows are those of a P whose diagonal was first raised by MN_BAYES_RAISE roundings. */
#define MN_BAYES_ROUNDING 0x1p-24f
#define MN_BAYES_DOUBT 1024.0f
#define MN_BAYES_HIDDEN 8.0f
#define MN_BAYES_RAISE 8.0f

/* k and the posterior variance of its direction are large against the rounding of S. */
static inline bool mn_bayes_sound(float variance, float r2, float S) {
    const float left = variance * (r2 / (r2 + variance)), least = variance < left ? variance : left;
    return S == 0.0f || least >= MN_BAYES_DOUBT * MN_BAYES_ROUNDING * S;
}

/* y = a x over R numbers, or conj(a) x; y may be x */
static inline void mn_bayes_turn(float *y, const float *a, const float *x, int64_t Kp, bool turns,
                                 bool back) {
    for (int64_t i = 0; i < Kp; i += MN_VW) {
        const vf ar = vf_load(a + i), xr = vf_load(x + i);
        if (!turns) {
            vf_store(y + i, vf_mul(ar, xr));
            continue;
        }
        const vf plus = vf_load(a + Kp + i), ai = back ? vf_neg(plus) : plus;
        const vf xi = vf_load(x + Kp + i);
        vf_store(y + i, vf_fnma(ai, xi, vf_mul(ar, xr)));
        vf_store(y + Kp + i, vf_fma(ai, xr, vf_mul(ar, xi)));
    }
}

#endif
