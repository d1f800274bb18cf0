/* norm.h - what the row norms share: sums over a row, and the gradient of a shared weight. */
#ifndef MN_KERNELS_CPU_NORM_NORM_H
#define MN_KERNELS_CPU_NORM_NORM_H

#include "kernels/cpu/simd/row.h"

/* Rows of one item; also how the sum over rows behind a weight's gradient is cut. */
enum { MN_NORM_ROWS = 256, MN_NORM_SUMS = 4 };

/* sum of x_i y_i; several sums in flight hide the latency of their chains */
static inline float mn_row_dot(const float *x, const float *y, int64_t n) {
    vf sum[MN_NORM_SUMS] = { vf_zero(), vf_zero(), vf_zero(), vf_zero() };
    int64_t i = 0;
    for (; i + MN_NORM_SUMS * MN_VW <= n; i += MN_NORM_SUMS * MN_VW) {
        MN_UNROLL
        for (int k = 0; k < MN_NORM_SUMS; k++) {
            sum[k] = vf_fma(vf_load(x + i + k * MN_VW), vf_load(y + i + k * MN_VW), sum[k]);
        }
    }
    for (; i < n; i += MN_VW) {
        const int lanes = vf_lanes(n - i);
        sum[0] = vf_fma(vf_load_row(x + i, lanes), vf_load_row(y + i, lanes), sum[0]);
    }
    return vf_sum(vf_add(vf_add(sum[0], sum[1]), vf_add(sum[2], sum[3])));
}

/* sum of x_i^2. Rows whose squares leave the range of float, zero rows among them, are summed again
 * in double. */
static inline double mn_row_squares(const float *x, int64_t n) {
    const float sum = mn_row_dot(x, x, n);
    if (sum > 1e-30f && sum < 1e37f) return sum;
    double exact = 0.0;
    for (int64_t i = 0; i < n; i++) exact += (double)x[i] * x[i];
    return exact;
}

/* out[first ..) = sum over n_parts of parts[part * width + ..], for one block of MN_NORM_ROWS
 * columns; always in the same order. */
static inline void mn_sum_parts(float *out, const float *parts, int64_t block, int64_t n_parts,
                                int64_t width) {
    const int64_t first = block * MN_NORM_ROWS;
    const int64_t count = width - first < MN_NORM_ROWS ? width - first : MN_NORM_ROWS;
    double sum[MN_NORM_ROWS] = { 0.0 };
    for (int64_t part = 0; part < n_parts; part++) {
        for (int64_t i = 0; i < count; i++) sum[i] += parts[part * width + first + i];
    }
    for (int64_t i = 0; out && i < count; i++) out[first + i] = (float)sum[i];
}

#endif
