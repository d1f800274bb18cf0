/* read_ccq.c - the curvature-conditioned contraction of a query, which goes before any other read:
 *
 *   kbar = sum k_i / n;  C = sum k_i k_i' / n - kbar kbar';  qt = q - gamma C q
 *
 * over the n keys written so far, each scaled to unit length here, so that the spectrum of
 * I - gamma C stays in [1 - gamma, 1] whatever the keys of the row look like. */
#include "definition/axes.h"

#include <math.h>

void mn_curvature_observe(double *kk, double *ks, const double *k, int64_t K) {
    double norm2 = 0.0;
    for (int64_t i = 0; i < K; i++) norm2 += k[i] * k[i];
    const double length = fmax(sqrt(norm2), 1e-12); // as l2_norm has it; a zero key stays zero
    for (int64_t i = 0; i < K; i++) {
        for (int64_t j = 0; j < K; j++) kk[i * K + j] += k[i] / length * (k[j] / length);
        ks[i] += k[i] / length;
    }
}

void mn_curvature_contract(double *qt, const double *q, double gamma, const double *kk,
                           const double *ks, int64_t count, int64_t K) {
    const double n = count > 0 ? (double)count : 1.0;
    double along = 0.0;
    for (int64_t i = 0; i < K; i++) along += ks[i] * q[i];
    for (int64_t i = 0; i < K; i++) {
        double spread = 0.0;
        for (int64_t j = 0; j < K; j++) spread += kk[i * K + j] * q[j];
        qt[i] = q[i] - gamma * (spread / n - ks[i] / n * (along / n));
    }
}
