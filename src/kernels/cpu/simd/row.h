/* row.h - vectors along a row whose last one may be partial. The branch is almost never taken, and
 * a whole vector costs less without a mask; the lanes get the same bits either way. */
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

#endif
