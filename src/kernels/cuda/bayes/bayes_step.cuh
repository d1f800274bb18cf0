/* bayes_step.cuh - a noise group through one token of the Bayesian Layer (see ref/bayes.c),
 * states in place, in double.
 *
 *   Pbar = A P A' + l2     u = Pbar k     s = r2 + k'u     P = Pbar - u u' / s
 *   e = v - (A M)'k        M = A M + u e' / s              o = scale M'q
 *
 * The threads have a noise group of a head: its covariance, and the value columns it is for. P
 * is read twice, for u and to be moved, so that nothing waits in registers. */
#ifndef MN_KERNELS_CUDA_BAYES_BAYES_STEP_CUH
#define MN_KERNELS_CUDA_BAYES_BAYES_STEP_CUH

#include "kernels/cuda/prim/block.cuh"
#include "kernels/cuda/prim/common.cuh"
#include "kernels/cuda/prim/fmax.cuh"

namespace mneme::bayes {

/* Rows of P that a warp has at once; threads that share a column of M. */
enum { STEP_ROWS = 4, STEP_SHARE = 8 };

/* What the token brings to a head: rows of K, of V, and the noises of a group. */
template <typename T>
struct step_token {
    const T *q, *k, *la, *v;    // q: or NULL
    float l2, r2;
};

template <typename T>
__device__ inline step_token<T> step_token_of(const mn_bayes_args &p, int64_t n, int64_t h,
                                              int64_t g) {
    return { mn_row<T>(p.q, n, 0, h), mn_row<T>(p.k, n, 0, h), mn_row<T>(p.la, n, 0, h),
             mn_row<T>(p.v, n, 0, h), mn_float(*mn_row<T>(p.l2, n, 0, h)),
             mn_float(mn_row<T>(p.r2, n, 0, h)[g]) };
}

/* Numbers of each of up to K channels: decay, key, query, u, the diagonal of Pbar. */
template <int THREADS, int K>
struct step_smem {
    static constexpr int warps = THREADS / 32, columns = THREADS / STEP_SHARE;
    double a[K], k[K], q[K], u[K], d[K];
    double2 sums[STEP_SHARE][columns];
    double spread[warps];
};

__device__ inline double step_warp_sum(double x) {
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes >>= 1) x += __shfl_xor_sync(0xffffffffu, x, lanes);
    return x;
}

/* The sum of term(i) over channels, alike in all warps. */
template <typename F>
__device__ inline double step_over(int K, F term) {
    double sum = 0.0;
    for (int i = threadIdx.x % 32; i < K; i += 32) sum += term(i);
    return step_warp_sum(sum);
}

/* u, before anything is raised, and the diagonal of Pbar. */
template <typename Block, typename Smem>
__device__ inline void step_predict(Smem &smem, const float *P, int K, double l2) {
    const int lane = threadIdx.x % 32;
    for (int row0 = threadIdx.x / 32 * STEP_ROWS; row0 < K; row0 += Smem::warps * STEP_ROWS) {
        double sums[STEP_ROWS] = {};
        for (int i = 4 * lane; i < K; i += 128) {
            float x[STEP_ROWS][4];
#pragma unroll
            for (int r = 0; r < STEP_ROWS; r++) {
                mn_load<4>(x[r], row0 + r < K ? P : nullptr, (int64_t)(row0 + r) * K + i);
            }
#pragma unroll
            for (int c = 0; c < 4; c++) {
                const double moved = smem.a[i + c] * smem.k[i + c];
#pragma unroll
                for (int r = 0; r < STEP_ROWS; r++) {
                    sums[r] = fma((double)x[r][c], moved, sums[r]);
                    if (row0 + r == i + c) {
                        smem.d[i + c] = fma(smem.a[i + c] * smem.a[i + c], (double)x[r][c], l2);
                    }
                }
            }
        }
#pragma unroll
        for (int r = 0; r < STEP_ROWS; r++) {
            const int row = row0 + r;
            const double sum = step_warp_sum(sums[r]);
            if (row < K && lane == 0) smem.u[row] = fma(smem.a[row], sum, l2 * smem.k[row]);
        }
    }
    Block::sync();
}

/* k'u; where roundings of P show, its diagonal is raised first, as in ref/bayes.c. */
template <typename Block, typename Smem>
__device__ inline double step_variance(Smem &smem, int K, double l2, double r2) {
    const double few = 8.0 * 0x1p-24;
    const auto variance_of = [&](int i) { return smem.k[i] * smem.u[i]; };
    const double variance = step_over(K, variance_of);
    const double shows = few * step_over(K, [&](int i) {
        return smem.k[i] * smem.k[i] * smem.d[i];
    });
    const double hidden = step_over(K, [&](int i) { return smem.k[i] * smem.k[i] * l2; });
    if (fmin(variance, r2) >= shows || hidden >= shows) return variance;
    Block::sync();
    for (int i = threadIdx.x; i < K; i += Block::size) {
        smem.u[i] = fma(few * smem.d[i], smem.k[i], smem.u[i]);
        smem.d[i] *= 1.0 + few;
    }
    Block::sync();
    return mn_fmax(step_over(K, variance_of), 0.0);
}

/* P of the token; returns this thread's part of q'P q. Products that commute keep P symmetric. */
template <typename Smem>
__device__ inline double step_update(const Smem &smem, float *to, const float *P, int K,
                                     double scale) {
    double spread = 0.0;
    for (int row0 = threadIdx.x / 32 * STEP_ROWS; row0 < K; row0 += Smem::warps * STEP_ROWS) {
        for (int i = threadIdx.x % 32 * 4; i < K; i += 128) {
            float x[STEP_ROWS][4];
#pragma unroll
            for (int r = 0; r < STEP_ROWS; r++) {
                mn_load<4>(x[r], row0 + r < K ? P : nullptr, (int64_t)(row0 + r) * K + i);
            }
#pragma unroll
            for (int r = 0; r < STEP_ROWS; r++) {
                const int row = row0 + r;
                if (row >= K) break;
#pragma unroll
                for (int c = 0; c < 4; c++) {
                    const int j = i + c;
                    const double moved = row == j ? smem.d[j]
                                                  : (smem.a[row] * smem.a[j]) * (double)x[r][c];
                    const double next = moved - (smem.u[row] * smem.u[j]) * scale;
                    spread = fma(smem.q[row] * smem.q[j], next, spread);
                    x[r][c] = (float)next;
                }
                if (to) mn_store<4>(to, (int64_t)row * K + i, x[r]);
            }
        }
    }
    return spread;
}

/* The columns [first, end) of M and of o. `scale` is 1 / s, `reach` q'u / s. */
template <typename T, typename Block, typename Smem>
__device__ inline void step_means(Smem &smem, const mn_bayes_args &p, int64_t n, int64_t h,
                                  const T *v, int64_t first, int64_t end, double scale,
                                  double reach) {
    const int64_t K = p.call.K, V = p.call.V;
    const int column = threadIdx.x % Smem::columns, share = threadIdx.x / Smem::columns;
    const float *M0 = mn_row<float>(p.M0, n, 0, h);
    float *M = mn_row<float>(p.M, n, 0, h);
    T *o = mn_row<T>(p.o, n, 0, h);
    for (int64_t j0 = first; j0 < end; j0 += Smem::columns) {
        const int64_t j = j0 + column;
        double misses = j < end ? (double)mn_float(v[j]) : 0.0, reads = 0.0;
        double2 sum = make_double2(0.0, 0.0);
#pragma unroll 8
        for (int64_t i = share; i < K; i += STEP_SHARE) {
            const double x = j < end ? smem.a[i] * (double)mn_get(M0, i * V + j) : 0.0;
            sum.x = fma(smem.k[i], x, sum.x), sum.y = fma(smem.q[i], x, sum.y);
        }
        smem.sums[share][column] = sum;
        Block::sync();
#pragma unroll
        for (int i = 0; i < STEP_SHARE; i++) {
            misses -= smem.sums[i][column].x, reads += smem.sums[i][column].y;
        }
        Block::sync();
        if (j >= end) continue;
#pragma unroll 8
        for (int64_t i = share; i < K && M; i += STEP_SHARE) {
            const double x = smem.a[i] * (double)mn_get(M0, i * V + j);
            M[i * V + j] = (float)fma(smem.u[i] * scale, misses, x);
        }
        if (o && share == 0) mn_put(o + j, (float)(p.scale * fma(reach, misses, reads)));
    }
}

/* Group g of head h of sequence n; `bytes` of shared memory hold a Smem. */
template <typename T, typename Block, typename Smem>
__device__ inline void bayes_step_group(const mn_bayes_args &p, int64_t n, int64_t h, int64_t g,
                                        const step_token<T> &token, unsigned char *bytes) {
    Smem &smem = *(Smem *)bytes;
    const int64_t G = p.call.G, V = p.call.V;
    const int K = (int)p.call.K;
    const float *P0 = mn_row<float>(p.P0, n, 0, h) + g * K * K;
    float *P = mn_row<float>(p.P, n, 0, h);
    T *gain = mn_row<T>(p.gain, n, 0, h), *gainvec = mn_row<T>(p.gainvec, n, 0, h);
    T *kvar = mn_row<T>(p.kvar, n, 0, h), *qvar = mn_row<T>(p.qvar, n, 0, h);
    const double l2 = token.l2, r2 = token.r2;
    for (int i = threadIdx.x; i < K; i += Block::size) {
        smem.a[i] = exp((double)mn_float(token.la[i]));
        smem.k[i] = mn_float(token.k[i]), smem.q[i] = mn_get(token.q, i);
    }
    Block::sync();
    step_predict<Block>(smem, P0, K, l2);
    const double variance = step_variance<Block>(smem, K, l2, r2), scale = 1.0 / (r2 + variance);
    const double reach = scale * step_over(K, [&](int i) { return smem.q[i] * smem.u[i]; });
    const double spread =
        step_warp_sum(step_update(smem, P ? P + g * K * K : nullptr, P0, K, scale));
    if (threadIdx.x % 32 == 0) smem.spread[threadIdx.x / 32] = spread;
    if (gainvec) {
        for (int i = threadIdx.x; i < K; i += Block::size) {
            mn_put(gainvec + g * K + i, (float)(smem.u[i] * scale));
        }
    }
    const int64_t first = (g * V + G - 1) / G, end = ((g + 1) * V + G - 1) / G;
    step_means<T, Block>(smem, p, n, h, token.v, first, end, scale, reach);
    Block::sync();
    if (threadIdx.x > 0) return;
    double sum = 0.0;
    for (int warp = 0; warp < Smem::warps; warp++) sum += smem.spread[warp];
    if (gain) mn_put(gain + g, (float)(variance * scale));
    if (kvar) mn_put(kvar + g, (float)variance);
    if (qvar) mn_put(qvar + g, (float)(p.scale * p.scale * sum));
}

/* Of up to STEP_NARROW channels, which is what a stage of a megakernel has room for. */
enum { STEP_NARROW = 128 };

template <typename T, typename Block>
__device__ inline void bayes_step(const mn_bayes_args &p, int64_t n, int64_t h, int64_t g,
                                  unsigned char *bytes) {
    bayes_step_group<T, Block, step_smem<Block::size, STEP_NARROW>>(
        p, n, h, g, step_token_of<T>(p, n, h, g), bytes);
}

/* Turning channels, and very many, go the way of longer calls. */
inline bool bayes_step_serves(const mn_bayes_args *p, int64_t widest) {
    bool packs = p->call.K % 4 == 0 && p->call.K <= widest && p->P0.data &&
                 (uintptr_t)p->P0.data % 16 == 0 && (uintptr_t)p->P.data % 16 == 0;
    for (int i = 0; i < 3; i++) {
        packs = packs && p->P0.stride[i] % 4 == 0 && p->P.stride[i] % 4 == 0;
    }
    return packs && !p->theta.data;
}

inline bool bayes_step_supported(const mn_bayes_args *p) {
    return bayes_step_serves(p, STEP_NARROW);
}

}    // namespace mneme::bayes

#endif
