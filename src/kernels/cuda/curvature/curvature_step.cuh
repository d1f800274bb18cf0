/* curvature_step.cuh - a head of curvature through one token (see ref/curvature.c), states in
 * place.
 *
 *   R += k k'     s += k     qt = q - gamma / n (R q - (s.q / n) s)
 *
 * A warp has one square of 32 x 32 of R at a time with the one across the diagonal, as R counts by
 * its symmetric part. A lane has a row of it, which is a column of the other; rows and columns
 * change places by exchanges between lanes. What a square adds to R q goes to a row of shared
 * memory that no other one writes. */
#ifndef MN_KERNELS_CUDA_CURVATURE_CURVATURE_STEP_CUH
#define MN_KERNELS_CUDA_CURVATURE_CURVATURE_STEP_CUH

#include "kernels/cuda/curvature/curvature.cuh"
#include "kernels/cuda/prim/block.cuh"

namespace mneme::curvature {

enum { STEP_SIDE = 32, STEP_SIDES = MN_CURVE_WIDEST / STEP_SIDE };

struct step_smem {
    float q[MN_CURVE_WIDEST], k[MN_CURVE_WIDEST];
    float reads[STEP_SIDES][MN_CURVE_WIDEST];
    float sums[32];
};

/* x[r] of lane l and x[l] of lane r change places, by halves. */
__device__ inline void step_transpose(float (&x)[STEP_SIDE]) {
#pragma unroll
    for (int half = STEP_SIDE / 2; half > 0; half /= 2) {
        const bool upper = threadIdx.x & half;
#pragma unroll
        for (int r = 0; r < STEP_SIDE; r++) {
            if (r & half) continue;
            const float give = upper ? x[r] : x[r + half];
            const float got = __shfl_xor_sync(0xffffffffu, give, half);
            x[r] = upper ? got : x[r], x[r + half] = upper ? x[r + half] : got;
        }
    }
}

/* x[r] = R_{i + r, j + lane}, zeros outside. */
__device__ inline void step_load(float (&x)[STEP_SIDE], const float *from, int i, int j, int K) {
    const int column = j + threadIdx.x % 32;
#pragma unroll
    for (int r = 0; r < STEP_SIDE; r++) {
        x[r] = from && i + r < K && column < K ? from[(i + r) * K + column] : 0.0f;
    }
}

__device__ inline void step_store(float *to, const float (&x)[STEP_SIDE], int i, int j, int K) {
    const int column = j + threadIdx.x % 32;
#pragma unroll
    for (int r = 0; r < STEP_SIDE; r++) {
        if (to && i + r < K && column < K) to[(i + r) * K + column] = x[r];
    }
}

/* What row i + lane reads of [j, j + 32) is left; x[r] = R_{i + lane, j + r}. */
__device__ inline void step_read(step_smem &smem, const float (&x)[STEP_SIDE], int i, int j) {
    float read = 0.0f;
#pragma unroll
    for (int r = 0; r < STEP_SIDE; r++) read = fmaf(x[r], smem.q[j + r], read);
    smem.reads[j / STEP_SIDE][i + threadIdx.x % 32] = read;
}

/* Rows [i, i + 32) and columns [j, j + 32) of R, and their like across the diagonal. */
__device__ inline void step_square(step_smem &smem, const float *from, float *to, int i, int j,
                                   int K) {
    const float own = smem.k[i + threadIdx.x % 32];
    float x[STEP_SIDE], other[STEP_SIDE];
    step_load(x, from, i, j, K);
    step_load(other, from, j, i, K);
    __syncwarp();
    step_transpose(x);    // rows to lanes
#pragma unroll
    for (int r = 0; r < STEP_SIDE; r++) {
        x[r] = fmaf(own, smem.k[j + r], 0.5f * (x[r] + other[r]));
    }
    step_read(smem, x, i, j);
    step_store(to, x, j, i, K);
    if (i == j) return;
    step_transpose(x);
    step_read(smem, x, j, i);
    step_store(to, x, i, j, K);
}

/* Sum over the first warps of the block, each of which has had a number of 32 rows. */
template <typename Block>
__device__ inline float step_sum(float x, float *sums) {
    x = mn_warp_sum(x);
    Block::sync();
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = x;
    Block::sync();
    float sum = 0.0f;
#pragma unroll
    for (int warp = 0; warp < STEP_SIDES; warp++) sum += sums[warp];
    return sum;
}

/* Head h of sequence n. */
template <typename T, typename Block>
__device__ inline void curvature_step(const mn_curvature_args &p, int64_t n, int64_t h, int64_t,
                                      unsigned char *bytes) {
    static_assert(Block::size >= MN_CURVE_WIDEST, "a thread for each row");
    step_smem &smem = *(step_smem *)bytes;
    const int K = (int)p.call.K, sides = (K + STEP_SIDE - 1) / STEP_SIDE;
    const T *q = mn_row<T>(p.q, n, 0, h), *k = mn_row<T>(p.k, n, 0, h);
    const float *R0 = mn_row<float>(p.kk0, n, 0, h), *s0 = mn_row<float>(p.ks0, n, 0, h);
    float *R = mn_row<float>(p.kk, n, 0, h), *s = mn_row<float>(p.ks, n, 0, h);
    T *qt = mn_row<T>(p.qt, n, 0, h);
    const float gamma = mn_float(*mn_row<T>(p.gamma, n, 0, h));
    const float each = (float)(1.0 / (mn_curve_before(p, n) + 1.0));
    for (int i = threadIdx.x; i < sides * STEP_SIDE; i += Block::size) {
        smem.q[i] = i < K ? mn_float(q[i]) : 0.0f;
        smem.k[i] = i < K ? mn_float(k[i]) : 0.0f;
    }
    Block::sync();
#pragma unroll 1
    for (int at = threadIdx.x / 32; at < sides * (sides + 1) / 2; at += Block::size / 32) {
        int row = 0, column = at;
        while (column >= sides - row) column -= sides - row, row++;
        step_square(smem, R0, R, STEP_SIDE * row, STEP_SIDE * (row + column), K);
    }
    const int i = threadIdx.x;
    const float sum = i < K ? mn_get(s0, i) + smem.k[i] : 0.0f;
    const float mean = each * step_sum<Block>(i < K ? sum * smem.q[i] : 0.0f, smem.sums);
    if (i >= K) return;
    if (s) s[i] = sum;
    float read = -mean * sum;
    for (int side = 0; side < sides; side++) read += smem.reads[side][i];
    if (qt) mn_put(qt + i, fmaf(-gamma * each, read, smem.q[i]));
}

inline bool curvature_step_supported(const mn_curvature_args *p) {
    return p->call.K <= MN_CURVE_WIDEST;
}

}    // namespace mneme::curvature

#endif
