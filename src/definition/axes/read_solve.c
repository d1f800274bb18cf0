/* read_solve.c - o = Hkv'x with (Hkk + diag lam) x = scale q, solved exactly by Cholesky.
 *
 * lam > 0 and Hkk is a sum of squares, so the matrix is positive definite. */
#include "definition/axes.h"

#include <math.h>

/* Lower factor of Hkk + diag lam, in place of a copy of Hkk. */
static void factorise(double *L, const mn_head *head) {
    const int64_t K = head->size->K;
    for (int64_t i = 0; i < K; i++) {
        for (int64_t j = 0; j <= i; j++) {
            double sum = head->part[0][i * K + j] + (i == j ? head->in.lam[i] : 0.0);
            for (int64_t n = 0; n < j; n++) sum -= L[i * K + n] * L[j * K + n];
            L[i * K + j] = i == j ? sqrt(sum) : sum / L[j * K + j];
        }
    }
}

static void solve(double *x, const double *L, int64_t K) {
    for (int64_t i = 0; i < K; i++) {
        for (int64_t n = 0; n < i; n++) x[i] -= L[i * K + n] * x[n];
        x[i] /= L[i * K + i];
    }
    for (int64_t i = K; i-- > 0;) {
        for (int64_t n = i + 1; n < K; n++) x[i] -= L[n * K + i] * x[n];
        x[i] /= L[i * K + i];
    }
}

static void run(double *o, const mn_head *head) {
    const int64_t K = head->size->K, V = head->size->V;
    double *x = head->scratch, *L = x + K;
    for (int64_t i = 0; i < K; i++) x[i] = head->config->scale * head->in.q[i];
    factorise(L, head);
    solve(x, L, K);
    for (int64_t j = 0; j < V; j++) {
        o[j] = 0.0;
        for (int64_t i = 0; i < K; i++) o[j] += head->part[1][i * V + j] * x[i];
    }
}

const mn_read mn_read_solve = {
    .name = "solve",
    .equation = "o = Hkv'(Hkk + diag lam)^-1 scale q",
    .run = run,
};
