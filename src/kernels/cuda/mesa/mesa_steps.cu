/* mesa_steps.cu - mesa where a fixed number of conjugate-gradient steps takes the place of the
 * solution (see ref/mesa.c), as models of other software ask for: forward alone, token by token. */
#include "kernels/cuda/mesa/mesa_steps.h"

#include "kernels/cuda/prim/common.cuh"

namespace mneme::mesa {

enum { STEPS_THREADS = 256, STEPS_MAX_K = 256 };

/* M x' = x is solved from x' = 0; r is what is left of x, d the direction, Md its product. */
struct steps_smem {
    double x[STEPS_MAX_K], r[STEPS_MAX_K], d[STEPS_MAX_K], Md[STEPS_MAX_K];
};

__device__ static double warp_sum(double x) {
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes >>= 1) x += __shfl_xor_sync(0xffffffffu, x, lanes);
    return x;
}

/* x'y, in all lanes of the warp; every warp adds in the same order. */
__device__ static double dot(const double *x, const double *y, int64_t n) {
    double sum = 0.0;
    for (int64_t i = threadIdx.x % 32; i < n; i += 32) sum = fma(x[i], y[i], sum);
    return warp_sum(sum);
}

/* S <- e^g S + beta k (k, v)', a row of K + V numbers for each key channel. */
template <typename T>
__device__ static void add_token(double *S, const mn_mesa_args &p, int64_t b, int64_t t,
                                 int64_t h) {
    const int64_t K = p.call.K, width = K + p.call.V;
    const T *k = mn_row<T>(p.k, b, t, h), *v = mn_row<T>(p.v, b, t, h);
    const double decay = exp((double)mn_float(*mn_row<T>(p.g, b, t, h)));
    const double beta = mn_float(*mn_row<T>(p.beta, b, t, h));
    for (int64_t n = threadIdx.x; n < K * width; n += STEPS_THREADS) {
        const int64_t i = n / width, j = n % width;
        const double other = mn_float(j < K ? k[j] : v[j - K]);
        S[n] = fma(decay, S[n], beta * mn_float(k[i]) * other);
    }
}

/* x of shared memory after all steps. All threads of the block call. */
template <typename T>
__device__ static void take_steps(steps_smem &smem, const double *S, const T *lam,
                                  const mn_mesa_args &p) {
    const int64_t K = p.call.K, width = K + p.call.V;
    double size = dot(smem.r, smem.r, K);
    for (int64_t n = 0; n < p.steps; n++) {
        for (int64_t i = threadIdx.x / 32; i < K; i += STEPS_THREADS / 32) {
            const double row = dot(S + i * width, smem.d, K);
            if (threadIdx.x % 32 == 0) smem.Md[i] = fma((double)mn_float(lam[i]), smem.d[i], row);
        }
        __syncthreads();
        const double alpha = size / (dot(smem.d, smem.Md, K) + 1e-5);
        for (int64_t i = threadIdx.x; i < K; i += STEPS_THREADS) {
            smem.x[i] = fma(alpha, smem.d[i], smem.x[i]);
            smem.r[i] = fma(-alpha, smem.Md[i], smem.r[i]);
        }
        __syncthreads();
        const double next = dot(smem.r, smem.r, K), beta = next / (size + 1e-5);
        for (int64_t i = threadIdx.x; i < K; i += STEPS_THREADS) {
            smem.d[i] = fma(beta, smem.d[i], smem.r[i]);
        }
        __syncthreads();
        size = next;
    }
}

/* A block has a head of a sequence; its sums are `work`, (K, K + V) in double. Of what is given for
 * Hkk the symmetric part counts. */
template <typename T>
__global__ void __launch_bounds__(STEPS_THREADS)
mesa_fwd_steps(const __grid_constant__ mn_mesa_args p, double *work) {
    __shared__ steps_smem smem;
    const int64_t n = blockIdx.x / p.call.H, h = blockIdx.x % p.call.H, K = p.call.K;
    const int64_t V = p.call.V, width = K + V;
    const mn_span span = mn_span_at(p.call, n);
    const float *kk0 = mn_row<float>(p.hkk0, n, 0, h), *kv0 = mn_row<float>(p.hkv0, n, 0, h);
    float *kk = mn_row<float>(p.hkk, n, 0, h), *kv = mn_row<float>(p.hkv, n, 0, h);
    const T *lam = mn_row<T>(p.lam, 0, 0, h);
    double *S = work + blockIdx.x * K * width;
    for (int64_t m = threadIdx.x; m < K * width; m += STEPS_THREADS) {
        const int64_t i = m / width, j = m % width;
        if (j < K) S[m] = kk0 ? 0.5 * ((double)kk0[i * K + j] + (double)kk0[j * K + i]) : 0.0;
        else S[m] = kv0 ? (double)kv0[i * V + j - K] : 0.0;
    }
    for (int64_t t = span.t0; t < span.t0 + span.length; t++) {
        T *o = mn_row<T>(p.o, span.b, t, h);
        __syncthreads();
        add_token<T>(S, p, span.b, t, h);
        const T *q = mn_row<T>(p.q, span.b, t, h);
        for (int64_t i = threadIdx.x; i < K; i += STEPS_THREADS) {
            smem.r[i] = smem.d[i] = p.scale * mn_float(q[i]);
            smem.x[i] = 0.0;
        }
        __syncthreads();
        if (!o) continue;
        take_steps<T>(smem, S, lam, p);
        for (int64_t j = threadIdx.x; j < V; j += STEPS_THREADS) {
            double sum = 0.0;
            for (int64_t i = 0; i < K; i++) sum = fma(S[i * width + K + j], smem.x[i], sum);
            mn_put(o + j, (float)sum);
        }
    }
    __syncthreads();
    for (int64_t m = threadIdx.x; m < K * width; m += STEPS_THREADS) {
        const int64_t i = m / width, j = m % width;
        if (j < K && kk) kk[i * K + j] = (float)S[m];
        if (j >= K && kv) kv[i * V + j - K] = (float)S[m];
    }
}

bool mn_mesa_steps_plan(mn_plan *plan, const mn_call *c) {
    return mn_mul_size(&plan->shared_bytes, (size_t)(mn_n_spans(*c) * c->H), (size_t)c->K) &&
           mn_mul_size(&plan->shared_bytes, plan->shared_bytes, (size_t)(c->K + c->V)) &&
           mn_mul_size(&plan->shared_bytes, plan->shared_bytes, sizeof(double));
}

int mn_mesa_steps_launch(const mn_mesa_args *p, void *shared, cudaStream_t stream) {
    const int64_t blocks = mn_n_spans(p->call) * p->call.H;
    if (blocks == 0) return cudaSuccess;
    if (p->call.K > STEPS_MAX_K || blocks > INT32_MAX) return cudaErrorNotSupported;
    if (p->call.dtype == MN_BF16) {
        mesa_fwd_steps<mn_bf16><<<(unsigned)blocks, STEPS_THREADS, 0, stream>>>(*p,
                                                                               (double *)shared);
    } else {
        mesa_fwd_steps<float><<<(unsigned)blocks, STEPS_THREADS, 0, stream>>>(*p,
                                                                             (double *)shared);
    }
    return mn_launch_status();
}

}    // namespace mneme::mesa
