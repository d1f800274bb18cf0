/* lanes.h - one tile of channels, a channel per vector lane: moving it in and out.
 *
 * Kernels whose cells (channel, slot) are independent keep MN_VW channels in a vector, so sums over
 * slots need no shuffles. Tensors are (.., channel) or (channel, slot); a tile holds
 * [count][MN_VW]. Lanes beyond the last channel hold a given number, so they compute something
 * harmless. */
#ifndef MN_KERNELS_CPU_SIMD_LANES_H
#define MN_KERNELS_CPU_SIMD_LANES_H

#include "base/util.h"
#include "kernels/cpu/gemm/gemm.h"
#include "kernels/cpu/simd/vec.h"

/* dst[t] = row t of a view's tile, t < count; rows are `stride` apart; zero where src is NULL */
static inline void lanes_load(float *dst, const float *src, int64_t stride, int64_t count,
                              int lanes) {
    for (int64_t t = 0; t < count; t++) {
        vf row = vf_zero();
        if (src) {
            row = lanes == MN_VW ? vf_load(src + t * stride) : vf_load_n(src + t * stride, lanes);
        }
        vf_store(dst + t * MN_VW, row);
    }
}

static inline void lanes_store(float *dst, int64_t stride, const float *src, int64_t count,
                               int lanes) {
    if (!dst) return;
    for (int64_t t = 0; t < count; t++) {
        const vf row = vf_load(src + t * MN_VW);
        if (lanes == MN_VW) vf_store(dst + t * stride, row);
        else vf_store_n(dst + t * stride, row, lanes);
    }
}

/* dst[s] = slot s of the tile's channels, from rows of K slots; `rest` where src is NULL and in the
 * lanes beyond. */
static inline void lanes_load_cells(float *dst, const float *src, int64_t K, int lanes,
                                    float rest) {
    if (!src || lanes < MN_VW) {
        for (int64_t s = 0; s < K; s++) vf_store(dst + s * MN_VW, vf_set1(rest));
    }
    if (src) MN_T(mn_transpose)(dst, MN_VW, src, K, lanes, K);
}

static inline void lanes_store_cells(float *dst, const float *src, int64_t K, int lanes) {
    if (dst) MN_T(mn_transpose)(dst, K, src, MN_VW, K, lanes);
}

/* dst[t] = row t of width K, rows being `stride` apart; square[t] its squares, if wanted */
static inline void lanes_copy_rows(float *dst, float *square, const float *src, int64_t stride,
                                   int64_t count, int64_t K) {
    for (int64_t t = 0; t < count; t++) {
        for (int64_t s = 0; s < K; s += MN_VW) {
            const int n = vf_lanes(K - s);
            const vf x = vf_load_n(src + t * stride + s, n);
            vf_store_n(dst + t * K + s, x, n);
            if (square) vf_store_n(square + t * K + s, vf_mul(x, x), n);
        }
    }
}

/* Four vectors into one: lane 4 g + i holds the sum of quad g of v[i]. */
static inline vf lanes_fold(vf v[4]) {
    vf_transpose_quads(v);
    return vf_add(vf_add(v[0], v[1]), vf_add(v[2], v[3]));
}

/* From MN_VW / 4 such folds in a row: lane i is the sum over lanes of vector i. */
static inline vf lanes_join(const float *folds) {
    vf sum = vf_load_quads(folds, MN_VW);
    MN_UNROLL
    for (int g = 1; g < MN_VW / 4; g++) sum = vf_add(sum, vf_load_quads(folds + 4 * g, MN_VW));
    return sum;
}

/* Sums over lanes of MN_VW vectors at once: lane i of the result is the sum of x[i]. */
static inline vf lanes_sum_square(const float *x) {
    _Alignas(64) float folds[MN_VW / 4 * MN_VW];
    MN_UNROLL
    for (int h = 0; h < MN_VW / 4; h++) {
        vf v[4];
        MN_UNROLL
        for (int i = 0; i < 4; i++) v[i] = vf_load(x + (4 * h + i) * MN_VW);
        vf_store(folds + h * MN_VW, lanes_fold(v));
    }
    return lanes_join(folds);
}

/* out[t] = (add ? out[t] : 0) + sum over lanes of x[t], t < count. x is read up to a multiple of
 * MN_VW vectors. */
static inline void lanes_sum(float *out, const float *x, int64_t count, bool add) {
    for (int64_t t = 0; t < count; t += MN_VW) {
        const int n = vf_lanes(count - t);
        vf sum = lanes_sum_square(x + t * MN_VW);
        if (add) sum = vf_add(sum, vf_load_n(out + t, n));
        vf_store_n(out + t, sum, n);
    }
}

#endif
