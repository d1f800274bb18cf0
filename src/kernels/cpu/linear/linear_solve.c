/* linear_solve.c - unit triangular systems of a chunk, in blocks: products between blocks, plain
 * substitution inside one. Each column is solved by itself, so its bits do not depend on the
 * others. */
#include "kernels/cpu/linear/linear.h"

enum { STRIP = 4 };    // vectors that hide each other's latency

/* Row t of X minus sum over rows s in [s0, s1) of coefficient(s) X_s, for columns [j0, n). */
static void eliminate_row(float *X, int64_t n, int64_t t, int64_t s0, int64_t s1, const float *a,
                          int64_t a_step) {
    int64_t j = 0;
    for (; j + STRIP * MN_VW <= n; j += STRIP * MN_VW) {
        vf x[STRIP];
        MN_UNROLL
        for (int i = 0; i < STRIP; i++) x[i] = vf_load(X + t * n + j + i * MN_VW);
        for (int64_t s = s0; s < s1; s++) {
            const vf c = vf_set1(a[s * a_step]);
            MN_UNROLL
            for (int i = 0; i < STRIP; i++)
                x[i] = vf_fnma(c, vf_load(X + s * n + j + i * MN_VW), x[i]);
        }
        MN_UNROLL
        for (int i = 0; i < STRIP; i++) vf_store(X + t * n + j + i * MN_VW, x[i]);
    }
    for (; j < n; j += MN_VW) {
        const int lanes = vf_lanes(n - j);
        vf x = vf_load_row(X + t * n + j, lanes);
        for (int64_t s = s0; s < s1; s++) {
            x = vf_fnma(vf_set1(a[s * a_step]), vf_load_row(X + s * n + j, lanes), x);
        }
        vf_store_row(X + t * n + j, x, lanes);
    }
}

static void subtract_product(float *C, const float *a, int64_t a_row, int64_t a_col, const float *B,
                             int64_t M, int64_t K, int64_t n) {
    const mn_gemm_args product = { .c = C, .c_row = n, .a = a, .a_row = a_row, .a_col = a_col,
                                   .b = B, .b_row = n, .M = M, .N = n, .K = K, .alpha = -1.0f,
                                   .base = MN_GEMM_ADD };
    MN_T(mn_gemm)(&product);
}

void MN_T(mn_solve_lower)(float *X, const float *A, int64_t L, int64_t n) {
    for (int64_t t0 = 0; t0 < L; t0 += MN_SOLVE_BLOCK) {
        const int64_t end = t0 + MN_SOLVE_BLOCK < L ? t0 + MN_SOLVE_BLOCK : L;
        if (t0 > 0) subtract_product(X + t0 * n, A + t0 * L, L, 1, X, end - t0, t0, n);
        for (int64_t t = t0 + 1; t < end; t++) eliminate_row(X, n, t, t0, t, A + t * L, 1);
    }
}

void MN_T(mn_solve_upper)(float *X, const float *A, int64_t L, int64_t n) {
    const int64_t n_blocks = (L + MN_SOLVE_BLOCK - 1) / MN_SOLVE_BLOCK;
    for (int64_t t0 = (n_blocks - 1) * MN_SOLVE_BLOCK; t0 >= 0; t0 -= MN_SOLVE_BLOCK) {
        const int64_t end = t0 + MN_SOLVE_BLOCK < L ? t0 + MN_SOLVE_BLOCK : L;
        if (end < L) {
            subtract_product(X + t0 * n, A + end * L + t0, 1, L, X + end * n, end - t0, L - end, n);
        }
        for (int64_t t = end - 2; t >= t0; t--) eliminate_row(X, n, t, t + 1, end, A + t, L);
    }
}
