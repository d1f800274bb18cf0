/* longhorn.h - gains of Longhorn's tokens, shared by its kernels.
 *
 *   n_j = 1 + beta_j |k|^2      w_j = beta_j / n_j      rest_j = 1 / n_j
 *
 * The diagonal form keeps c_ij = 1 - k_i^2 w_j = rest_j + (|k|^2 - k_i^2) w_j of a cell, a sum of
 * positive terms; |k|^2 and |k|^2 - k_i^2 are formed in double, so that a key with one large entry
 * keeps its small remainder. */
#ifndef MN_KERNELS_CPU_LONGHORN_LONGHORN_H
#define MN_KERNELS_CPU_LONGHORN_LONGHORN_H

#include "kernels/access.h"
#include "kernels/kernel.h"
#include "kernels/cpu/chunk/cells.h"
#include "kernels/cpu/simd/vec.h"

/* |k|^2 */
static inline double mn_key_norm(const float *k, int64_t K) {
    double part[8] = { 0 }, sum = 0.0;
    int64_t i = 0;
    for (; i + 8 <= K; i += 8) {
        for (int r = 0; r < 8; r++) part[r] += (double)k[i + r] * k[i + r];
    }
    for (; i < K; i++) sum += (double)k[i] * k[i];
    for (int r = 0; r < 8; r++) sum += part[r];
    return sum;
}

typedef struct mn_gain {
    vf w, rest;
} mn_gain;

/* beta = 0 in unused lanes gives w = 0, rest = 1. */
static inline mn_gain mn_gain_of(vf beta, float norm) {
    const vf one = vf_set1(1.0f), rest = vf_div(one, vf_fma(beta, vf_set1(norm), one));
    return (mn_gain){ vf_mul(beta, rest), rest };
}

#endif
