/* stat.h - what the kernels over running statistics share: curvature, mesa, mlstm.
 *
 * They go through a sequence in chunks of MN_STAT_CHUNK tokens. Inside a chunk token t sees token
 * s <= t through a scalar weight, so everything is products of matrices whose rows are tokens, some
 * of them masked to s <= t.
 *
 * Backward of mesa and mlstm goes through the chunks from the last to the first and needs the state
 * each started from. States are kept at the start of every MN_STAT_SEGMENT chunks, and of every
 * chunk of the segment at hand: T / 1024 + 32 states instead of T. */
#ifndef MN_KERNELS_CPU_CHUNK_STAT_H
#define MN_KERNELS_CPU_CHUNK_STAT_H

#include "base/checked.h"
#include "base/util.h"
#include "kernels/access.h"
#include "kernels/kernel.h"
#include "kernels/cpu/gemm/gemm.h"
#include "kernels/cpu/simd/row.h"
#include "kernels/cpu/simd/vec.h"

enum { MN_STAT_CHUNK = 32, MN_STAT_SEGMENT = 32 };

/* Log decays below this are as good as -inf, and their sums over a chunk keep the digits of small
 * ones: exp(-1e5) is 0, and doubles near 32e5 are 5e-10 apart. */
static const double mn_lowest_log = -1e5;

/* A matrix in memory; as an operand it is only read. */
typedef struct mn_mat {
    float *at;
    int64_t row, col;    // from one row to the next, from one column to the next
} mn_mat;

typedef struct mn_dims {
    int64_t M, N, K;
} mn_dims;

static inline mn_mat mn_mat_of(const float *at, int64_t row) {
    return (mn_mat){ (float *)at, row, 1 };
}

static inline mn_mat mn_transposed(mn_mat m) {
    return (mn_mat){ m.at, m.col, m.row };
}

/* Tokens t, t + 1, .. of head h; `at` is NULL for an absent view. */
static inline mn_mat mn_mat_rows(mn_in view, int64_t b, int64_t t, int64_t h) {
    return mn_mat_of(MN_ROW(float, view, b, t, h), view.stride[1]);
}

static inline mn_mat mn_mat_rows_out(mn_out view, int64_t b, int64_t t, int64_t h) {
    return mn_mat_of(MN_ROW_OUT(float, view, b, t, h), view.stride[1]);
}

static inline float *mn_row_of(mn_mat m, int64_t i) {
    return m.at + i * m.row;
}

/* C = A B; the caller may change base, alpha and shape. */
static inline mn_gemm_args mn_product(mn_mat c, mn_mat a, mn_mat b, mn_dims d) {
    return (mn_gemm_args){ .c = c.at, .c_row = c.row, .a = a.at, .a_row = a.row, .a_col = a.col,
                           .b = b.at, .b_row = b.row, .M = d.M, .N = d.N, .K = d.K, .alpha = 1.0f,
                           .base = MN_GEMM_SET, .shape = MN_GEMM_FULL };
}

/* y += a x */
static inline void mn_axpy(float *y, float a, const float *x, int64_t n) {
    const vf factor = vf_set1(a);
    for (int64_t i = 0; i < n; i += MN_VW) {
        const int lanes = vf_lanes(n - i);
        vf_store_n(y + i, vf_fma(factor, vf_load_n(x + i, lanes), vf_load_n(y + i, lanes)), lanes);
    }
}

/* y = a x; y may be x */
static inline void mn_scale(float *y, float a, const float *x, int64_t n) {
    const vf factor = vf_set1(a);
    for (int64_t i = 0; i < n; i += MN_VW) {
        const int lanes = vf_lanes(n - i);
        vf_store_n(y + i, vf_mul(factor, vf_load_n(x + i, lanes)), lanes);
    }
}

/* Asks for `n` rows that are needed soon: rows of one head lie far apart, where the processor does
 * not look ahead by itself. */
MN_ALWAYS_INLINE void mn_prefetch_rows(mn_mat m, int64_t n, int64_t width) {
    for (int64_t t = 0; m.at && t < n; t++) {
        for (int64_t i = 0; i < width; i += 16) __builtin_prefetch(mn_row_of(m, t) + i, 0, 2);
    }
}

/* The same for rows that will be written. */
MN_ALWAYS_INLINE void mn_prefetch_written_rows(mn_mat m, int64_t n, int64_t width) {
    for (int64_t t = 0; m.at && t < n; t++) {
        for (int64_t i = 0; i < width; i += 16) __builtin_prefetch(mn_row_of(m, t) + i, 1, 2);
    }
}

/* Copies n numbers; zeros where `from` is NULL. */
void MN_T(mn_stat_load)(float *to, const float *from, int64_t n);

/* Copies `count` rows of `width` numbers that are `row` apart, without gaps; zeros where `from` is
 * NULL. And back, unless `to` is NULL. */
void MN_T(mn_stat_load_rows)(float *to, const float *from, int64_t row, int64_t count,
                             int64_t width);
void MN_T(mn_stat_store_rows)(float *to, int64_t row, const float *from, int64_t count,
                              int64_t width);

/* Copies n numbers unless `to` is NULL. */
void MN_T(mn_stat_store)(float *to, const float *from, int64_t n);

/* S = (R + R') / 2 of a K x K matrix; zeros where R is NULL. */
void MN_T(mn_stat_load_symmetric)(float *S, const float *R, int64_t K);

/* S = R + R' */
void MN_T(mn_stat_twice_symmetric)(float *S, const float *R, int64_t K);

/* H <- fall H + X'Y for L rows of X and Y, where the sum is symmetric, K x K. */
void MN_T(mn_stat_add_symmetric)(float *H, float fall, mn_mat X, mn_mat Y, int64_t L, int64_t K);

/* H <- fall H + alpha X'Y for L rows of X and Y, H being K x V. */
void MN_T(mn_stat_add_products)(mn_mat H, float fall, float alpha, mn_mat X, mn_mat Y,
                                mn_dims K_V_L);

/* Rows t >= from of W[t,s] = exp(row[t] + col[s]) for s <= t, else 0; rows are MN_STAT_CHUNK apart.
 * The sums are formed in double. */
void MN_T(mn_stat_weights)(float *W, const double *row, const double *col, int64_t from, int64_t L);

/* P[t,s] = a_t.b_s for s <= t, else 0, over rows of `width`; rows of P are MN_STAT_CHUNK apart. */
void MN_T(mn_stat_scores)(float *P, mn_mat a, mn_mat b, int64_t L, int64_t width);

/* Y[t,s] = A[t,s] B[t,s] for s <= t, else 0. Y may be A or B. */
void MN_T(mn_stat_weigh)(float *Y, const float *A, const float *B, int64_t L);

/* How much of what flows through a state passes from before token t to t or later:
 *
 *   flow[t] = all + sum_{s>=t} late[s] + sum_{i<t} early[i] + sum_{s>=t>i} E[s,i]
 *
 * the gradient of the log decay of token t, where E[s,i] is what token i wrote and token s read,
 * late[s] what s read of the state before the chunk, early[i] what tokens behind the chunk read of
 * i, and `all` what they read of the state before it. E[t,t] takes no part. Sums are in double, so
 * adding and taking away the same entries leaves nothing behind. */
void MN_T(mn_stat_flow)(double *flow, double all, const double *late, const double *early,
                        const float *E, int64_t L);

/* sum over s >= i of E[s,i] */
double MN_T(mn_stat_column_sum)(const float *E, int64_t i, int64_t L);

#endif
