/* stat.c - masked products and sums over the tokens of a chunk. */
#include "kernels/cpu/chunk/stat.h"

#include <string.h>

#include "kernels/cpu/simd/map.h"

/* Rows of a state that share a product and its factors. */
enum { BLOCK_ROWS = 64 };

void MN_T(mn_stat_load)(float *to, const float *from, int64_t n) {
    if (from) memcpy(to, from, (size_t)n * sizeof *to);
    else memset(to, 0, (size_t)n * sizeof *to);
}

void MN_T(mn_stat_store)(float *to, const float *from, int64_t n) {
    if (to) memcpy(to, from, (size_t)n * sizeof *to);
}

void MN_T(mn_stat_load_rows)(float *to, const float *from, int64_t row, int64_t count,
                             int64_t width) {
    for (int64_t i = 0; i < count; i++) {
        MN_T(mn_stat_load)(to + i * width, from ? from + i * row : NULL, width);
    }
}

void MN_T(mn_stat_store_rows)(float *to, int64_t row, const float *from, int64_t count,
                              int64_t width) {
    for (int64_t i = 0; to && i < count; i++) {
        MN_T(mn_stat_store)(to + i * row, from + i * width, width);
    }
}

void MN_T(mn_stat_load_symmetric)(float *S, const float *R, int64_t K) {
    if (!R) {
        memset(S, 0, (size_t)(K * K) * sizeof *S);
        return;
    }
    for (int64_t i = 0; i < K; i++) {
        for (int64_t j = 0; j <= i; j++) {
            S[i * K + j] = S[j * K + i] = 0.5f * (R[i * K + j] + R[j * K + i]);
        }
    }
}

void MN_T(mn_stat_twice_symmetric)(float *S, const float *R, int64_t K) {
    MN_T(mn_transpose)(S, K, R, K, K, K);
    for (int64_t i = 0; i < K * K; i += MN_VW) {
        const int n = vf_lanes(K * K - i);
        vf_store_n(S + i, vf_add(vf_load_n(S + i, n), vf_load_n(R + i, n)), n);
    }
}

/* The upper triangle becomes that of the lower one: blocks of rows left of the diagonal are turned
 * over whole, the blocks on it element by element. */
static void mirror(float *H, int64_t K) {
    enum { BLOCK = 16 };
    for (int64_t i0 = 0; i0 < K; i0 += BLOCK) {
        const int64_t i1 = mn_min(K, i0 + BLOCK);
        if (i0 > 0) MN_T(mn_transpose)(H + i0, K, H + i0 * K, K, i1 - i0, i0);
        for (int64_t i = i0; i < i1; i++) {
            for (int64_t j = i0; j < i; j++) H[j * K + i] = H[i * K + j];
        }
    }
}

void MN_T(mn_stat_add_symmetric)(float *H, float fall, mn_mat X, mn_mat Y, int64_t L, int64_t K) {
    float factor[BLOCK_ROWS];
    const mn_mat all = mn_mat_of(H, K);
    for (int i = 0; i < BLOCK_ROWS; i++) factor[i] = fall;
    for (int64_t i0 = 0; i0 < K; i0 += BLOCK_ROWS) {
        const int64_t rows = mn_min(K - i0, BLOCK_ROWS);
        const mn_mat c = mn_mat_of(mn_row_of(all, i0), K);
        const mn_mat x = { X.at + i0, X.row, X.col };
        mn_gemm_args g = mn_product(c, mn_transposed(x), Y, (mn_dims){ rows, i0, L });
        g.base = MN_GEMM_SCALE;
        g.c_scale = factor;
        MN_T(mn_gemm)(&g);
        g.c += i0;
        g.b += i0;
        g.N = rows;
        g.shape = MN_GEMM_C_LOWER;
        MN_T(mn_gemm)(&g);
    }
    mirror(H, K);
}

void MN_T(mn_stat_add_products)(mn_mat H, float fall, float alpha, mn_mat X, mn_mat Y,
                                mn_dims K_V_L) {
    float factor[BLOCK_ROWS];
    for (int i = 0; i < BLOCK_ROWS; i++) factor[i] = fall;
    for (int64_t i = 0; i < K_V_L.M; i += BLOCK_ROWS) {
        const mn_mat x = { X.at + i, X.row, X.col };
        mn_gemm_args g = mn_product(mn_mat_of(mn_row_of(H, i), H.row), mn_transposed(x), Y, K_V_L);
        g.M = mn_min(K_V_L.M - i, BLOCK_ROWS);
        g.alpha = alpha;
        g.base = MN_GEMM_SCALE;
        g.c_scale = factor;
        MN_T(mn_gemm)(&g);
    }
}

void MN_T(mn_stat_weights)(float *W, const double *row, const double *col, int64_t from,
                           int64_t L) {
    for (int64_t t = from; t < L; t++) {
        float *w = W + t * MN_STAT_CHUNK;
        for (int64_t s = 0; s <= t; s++) w[s] = (float)(row[t] + col[s]);
        MN_T(mn_map_exp)(w, w, t + 1);
        memset(w + t + 1, 0, (size_t)(L - t - 1) * sizeof *w);
    }
}

void MN_T(mn_stat_scores)(float *P, mn_mat a, mn_mat b, int64_t L, int64_t width) {
    mn_gemm_args g = mn_product(mn_mat_of(P, MN_STAT_CHUNK), a, b, (mn_dims){ L, L, width });
    g.shape = MN_GEMM_C_LOWER;
    MN_T(mn_gemm_nt)(&g);
    for (int64_t t = 0; t < L; t++) {
        memset(P + t * MN_STAT_CHUNK + t + 1, 0, (size_t)(L - t - 1) * sizeof *P);
    }
}

void MN_T(mn_stat_weigh)(float *Y, const float *A, const float *B, int64_t L) {
    for (int64_t at = 0; at < L * MN_STAT_CHUNK; at += MN_STAT_CHUNK) {
        for (int64_t s = 0; s < L; s += MN_VW) {
            const int n = vf_lanes(L - s);
            vf_store_n(Y + at + s, vf_mul(vf_load_n(A + at + s, n), vf_load_n(B + at + s, n)), n);
        }
    }
}

double MN_T(mn_stat_column_sum)(const float *E, int64_t i, int64_t L) {
    double sum = 0.0;
    for (int64_t s = i; s < L; s++) sum += E[s * MN_STAT_CHUNK + i];
    return sum;
}

void MN_T(mn_stat_flow)(double *flow, double all, const double *late, const double *early,
                        const float *E, int64_t L) {
    double before[MN_STAT_CHUNK + 1];    // before[t]: sum of early[i], i < t
    before[0] = 0.0;
    for (int64_t t = 0; t < L; t++) before[t + 1] = before[t] + early[t];
    double inside = 0.0, after = 0.0;
    for (int64_t t = L - 1; t >= 0; t--) {
        for (int64_t i = 0; i < t; i++) inside += E[t * MN_STAT_CHUNK + i];
        for (int64_t s = t + 1; s < L; s++) inside -= E[s * MN_STAT_CHUNK + t];
        after += late[t];
        flow[t] = all + after + before[t] + inside;
    }
}
