/* row.h - rows whose last vector may be partial, and their products. That branch is almost never
 * taken, and a whole vector costs less without a mask; the lanes get the same bits either way. */
#ifndef MN_KERNELS_CPU_SIMD_ROW_H
#define MN_KERNELS_CPU_SIMD_ROW_H

#include "kernels/cpu/simd/vec.h"

static inline vf vf_load_row(const float *p, int lanes) {
    return lanes == MN_VW ? vf_load(p) : vf_load_n(p, lanes);
}

static inline void vf_store_row(float *p, vf v, int lanes) {
    if (lanes == MN_VW) vf_store(p, v);
    else vf_store_n(p, v, lanes);
}

/* sum of x y over a row */
static inline float vf_dot_row(const float *x, const float *y, int64_t n) {
    vf sum = vf_zero();
    for (int64_t i = 0; i < n; i += MN_VW) {
        const int lanes = vf_lanes(n - i);
        sum = vf_fma(vf_load_row(x + i, lanes), vf_load_row(y + i, lanes), sum);
    }
    return vf_sum(sum);
}

/* The same of rows that are padded to whole vectors. */
static inline float vf_dot_whole(const float *x, const float *y, int64_t n) {
    vf sum = vf_zero();
    for (int64_t i = 0; i < n; i += MN_VW) sum = vf_fma(vf_load(x + i), vf_load(y + i), sum);
    return vf_sum(sum);
}

/* s[i] = scale x.y_i for four rows y_i, y_row floats apart. Their sums are folded together. */
static inline void vf_four_dots(float *s, const float *x, const float *y, int64_t y_row, int64_t n,
                                float scale) {
    vf sum[4] = { vf_zero(), vf_zero(), vf_zero(), vf_zero() };
    for (int64_t a = 0; a < n; a += MN_VW) {
        const int lanes = vf_lanes(n - a);
        const vf x_a = vf_load_row(x + a, lanes);
        MN_UNROLL
        for (int i = 0; i < 4; i++) {
            sum[i] = vf_fma(x_a, vf_load_row(y + i * y_row + a, lanes), sum[i]);
        }
    }
    float folded[MN_VW];
    vf_transpose_quads(sum);    // each group of four lanes: one lane per row
    vf_store(folded, vf_add(vf_add(sum[0], sum[1]), vf_add(sum[2], sum[3])));
    for (int i = 0; i < 4; i++) {
        float total = 0.0f;
        for (int g = 0; g < MN_VW; g += 4) total += folded[g + i];
        s[i] = scale * total;
    }
}

/* y += w[0] x_0 + .. + w[count-1] x_{count-1} for count <= 4 rows, x_row floats apart */
static inline void vf_add_rows(float *y, const float *w, const float *x, int64_t x_row,
                               int64_t count, int64_t n) {
    for (int64_t a = 0; a < n; a += MN_VW) {
        const int lanes = vf_lanes(n - a);
        vf sum = vf_load_row(y + a, lanes);
        for (int64_t i = 0; i < count; i++) {
            sum = vf_fma(vf_set1(w[i]), vf_load_row(x + i * x_row + a, lanes), sum);
        }
        vf_store_row(y + a, sum, lanes);
    }
}

#endif
