/* bayes_step.cu - one token of the Bayesian Layer (see ref/bayes.c), states in place, in double.
 *
 *   Pbar = A P A' + l2     u = Pbar k     s = r2 + k'u     P = Pbar - u u' / s
 *   e = v - (A M)'k        M = A M + u e' / s              o = scale M'q
 *
 * A block has a noise group of a head: its covariance, and the value columns it is for. P is read
 * twice, for u and to be moved, so that nothing waits in registers. Turning channels go the way of
 * longer calls. */
#include "kernels/cuda/prim/pdl.cuh"
#include "kernels/cuda/prim/common.cuh"

namespace mneme::bayes {

/* Threads, rows of P that a warp has at once, columns of M and threads that share one. */
enum { STEP_WARPS = 16, STEP_THREADS = 512, STEP_ROWS = 4, STEP_COLUMNS = 64, STEP_SHARE = 8 };
enum { STEP_WIDEST = 512 };

/* Numbers of each channel: decay, key, query, u, the diagonal of Pbar. */
struct step_smem {
    double a[STEP_WIDEST], k[STEP_WIDEST], q[STEP_WIDEST], u[STEP_WIDEST], d[STEP_WIDEST];
    double2 sums[STEP_SHARE][STEP_COLUMNS];
    double spread[STEP_WARPS];
};

__device__ static double step_warp_sum(double x) {
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes >>= 1) x += __shfl_xor_sync(0xffffffffu, x, lanes);
    return x;
}

/* The sum of term(i) over channels, alike in all warps. */
template <typename F>
__device__ static double step_over(int K, F term) {
    double sum = 0.0;
    for (int i = threadIdx.x % 32; i < K; i += 32) sum += term(i);
    return step_warp_sum(sum);
}

/* u, before anything is raised, and the diagonal of Pbar. */
__device__ static void step_predict(step_smem &smem, const float *P, int K, double l2) {
    const int lane = threadIdx.x % 32;
    for (int row0 = threadIdx.x / 32 * STEP_ROWS; row0 < K; row0 += STEP_WARPS * STEP_ROWS) {
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
    __syncthreads();
}

/* k'u; where roundings of P show, its diagonal is raised first, as in ref/bayes.c. */
__device__ static double step_variance(step_smem &smem, int K, double l2, double r2) {
    const double few = 8.0 * 0x1p-24;
    const auto variance_of = [&](int i) { return smem.k[i] * smem.u[i]; };
    const double variance = step_over(K, variance_of);
    const double shows = few * step_over(K, [&](int i) {
        return smem.k[i] * smem.k[i] * smem.d[i];
    });
    const double hidden = step_over(K, [&](int i) { return smem.k[i] * smem.k[i] * l2; });
    if (fmin(variance, r2) >= shows || hidden >= shows) return variance;
    __syncthreads();
    for (int i = threadIdx.x; i < K; i += STEP_THREADS) {
        smem.u[i] = fma(few * smem.d[i], smem.k[i], smem.u[i]);
        smem.d[i] *= 1.0 + few;
    }
    __syncthreads();
    return fmax(step_over(K, variance_of), 0.0);
}

/* P of the token; returns this thread's part of q'P q. Products that commute keep P symmetric. */
__device__ static double step_update(const step_smem &smem, float *to, const float *P, int K,
                                     double scale) {
    double spread = 0.0;
    for (int row0 = threadIdx.x / 32 * STEP_ROWS; row0 < K; row0 += STEP_WARPS * STEP_ROWS) {
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
template <typename T>
__device__ static void step_means(step_smem &smem, const mn_bayes_args &p, int64_t n, int64_t h,
                                  int64_t first, int64_t end, double scale, double reach) {
    const int64_t K = p.call.K, V = p.call.V;
    const int column = threadIdx.x % STEP_COLUMNS, share = threadIdx.x / STEP_COLUMNS;
    const float *M0 = mn_row<float>(p.M0, n, 0, h);
    float *M = mn_row<float>(p.M, n, 0, h);
    const T *v = mn_row<T>(p.v, n, 0, h);
    T *o = mn_row<T>(p.o, n, 0, h);
    for (int64_t j0 = first; j0 < end; j0 += STEP_COLUMNS) {
        const int64_t j = j0 + column;
        double misses = j < end ? (double)mn_float(v[j]) : 0.0, reads = 0.0;
        double2 sum = make_double2(0.0, 0.0);
#pragma unroll 8
        for (int64_t i = share; i < K; i += STEP_SHARE) {
            const double x = j < end ? smem.a[i] * (double)mn_get(M0, i * V + j) : 0.0;
            sum.x = fma(smem.k[i], x, sum.x), sum.y = fma(smem.q[i], x, sum.y);
        }
        smem.sums[share][column] = sum;
        __syncthreads();
#pragma unroll
        for (int i = 0; i < STEP_SHARE; i++) {
            misses -= smem.sums[i][column].x, reads += smem.sums[i][column].y;
        }
        __syncthreads();
        if (j >= end) continue;
#pragma unroll 8
        for (int64_t i = share; i < K && M; i += STEP_SHARE) {
            const double x = smem.a[i] * (double)mn_get(M0, i * V + j);
            M[i * V + j] = (float)fma(smem.u[i] * scale, misses, x);
        }
        if (o && share == 0) mn_put(o + j, (float)(p.scale * fma(reach, misses, reads)));
    }
}

template <typename T>
__global__ void __launch_bounds__(STEP_THREADS)
bayes_step_kernel(const __grid_constant__ mn_bayes_args p) {
    extern __shared__ __align__(16) unsigned char bytes[];
    step_smem &smem = *(step_smem *)bytes;
    const int64_t G = p.call.G, g = blockIdx.x % G, h = blockIdx.x / G % p.call.H;
    const int64_t n = blockIdx.x / G / p.call.H, V = p.call.V;
    const int K = (int)p.call.K;
    const T *q = mn_row<T>(p.q, n, 0, h), *k = mn_row<T>(p.k, n, 0, h);
    const T *la = mn_row<T>(p.la, n, 0, h);
    const float *P0 = mn_row<float>(p.P0, n, 0, h) + g * K * K;
    float *P = mn_row<float>(p.P, n, 0, h);
    T *gain = mn_row<T>(p.gain, n, 0, h), *gainvec = mn_row<T>(p.gainvec, n, 0, h);
    T *kvar = mn_row<T>(p.kvar, n, 0, h), *qvar = mn_row<T>(p.qvar, n, 0, h);
    mn_pdl_launch_dependents();
    mn_pdl_wait();
    const double l2 = mn_float(*mn_row<T>(p.l2, n, 0, h));
    const double r2 = mn_float(mn_row<T>(p.r2, n, 0, h)[g]);
    for (int i = threadIdx.x; i < K; i += STEP_THREADS) {
        smem.a[i] = exp((double)mn_float(la[i]));
        smem.k[i] = mn_float(k[i]), smem.q[i] = mn_get(q, i);
    }
    __syncthreads();
    step_predict(smem, P0, K, l2);
    const double variance = step_variance(smem, K, l2, r2), scale = 1.0 / (r2 + variance);
    const double reach = scale * step_over(K, [&](int i) { return smem.q[i] * smem.u[i]; });
    const double spread =
        step_warp_sum(step_update(smem, P ? P + g * K * K : nullptr, P0, K, scale));
    if (threadIdx.x % 32 == 0) smem.spread[threadIdx.x / 32] = spread;
    if (gainvec) {
        for (int i = threadIdx.x; i < K; i += STEP_THREADS) {
            mn_put(gainvec + g * K + i, (float)(smem.u[i] * scale));
        }
    }
    step_means<T>(smem, p, n, h, (g * V + G - 1) / G, ((g + 1) * V + G - 1) / G, scale, reach);
    __syncthreads();
    if (threadIdx.x > 0) return;
    double sum = 0.0;
    for (int warp = 0; warp < STEP_WARPS; warp++) sum += smem.spread[warp];
    if (gain) mn_put(gain + g, (float)(variance * scale));
    if (kvar) mn_put(kvar + g, (float)variance);
    if (qvar) mn_put(qvar + g, (float)(p.scale * p.scale * sum));
}

static bool serves(const mn_bayes_args *p) {
    bool packs = p->call.K % 4 == 0 && p->call.K <= STEP_WIDEST && p->P0.data &&
                 (uintptr_t)p->P0.data % 16 == 0 && (uintptr_t)p->P.data % 16 == 0;
    for (int i = 0; i < 3; i++) {
        packs = packs && p->P0.stride[i] % 4 == 0 && p->P.stride[i] % 4 == 0;
    }
    return packs && !p->theta.data;
}

MN_CUDA_PLAN(bayes_forward);
MN_CUDA_LAUNCH(bayes_forward);

MN_CUDA_PLAN(bayes_step) {
    return serves((const mn_bayes_args *)args) ? true : mn_bayes_forward_cuda_plan(args, plan);
}

MN_CUDA_LAUNCH(bayes_step) {
    const mn_bayes_args *p = (const mn_bayes_args *)args;
    const auto kernel = p->call.dtype == MN_BF16 ? bayes_step_kernel<mn_bf16>
                                                 : bayes_step_kernel<float>;
    const int64_t blocks = p->call.B * p->call.H * p->call.G;
    if (!serves(p)) return mn_bayes_forward_cuda(args, shared, stream);
    if (blocks == 0) return cudaSuccess;
    if (blocks > INT32_MAX) return cudaErrorNotSupported;
    return mn_launch_pdl(kernel, dim3((unsigned)blocks), STEP_THREADS, sizeof(step_smem),
                           (cudaStream_t)stream, *p);
}

}    // namespace mneme::bayes
