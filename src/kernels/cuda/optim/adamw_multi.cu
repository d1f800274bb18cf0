/* adamw_multi.cu - AdamW over all parameters of a model (see kernels/adamw_all.h).
 *
 *   g = scale grad;  m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2
 *   p = p (1 - lr wd) - lr (m / bias1) / (sqrt(v / bias2) + eps)
 *
 * One block per chunk of one parameter, packs of four numbers. Squares are added in float by a
 * thread, in double over threads and chunks, always in the same order. The block that decides
 * compares norm and loss with what the host allows: a step with numbers that are not finite changes
 * nothing. */
#include "kernels/adamw_all.h"

#include "kernels/cuda/prim/common.cuh"

namespace mneme::optim {

enum { THREADS = 256, DECIDE_THREADS = 1024, PACK = 4 };

__device__ static double warp_sum(double x) {
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes >>= 1) x += __shfl_xor_sync(0xffffffffu, x, lanes);
    return x;
}

/* The sum over a block of N threads, in thread 0. */
template <int N>
__device__ static double block_sum(double x) {
    __shared__ double smem[N / 32];
    x = warp_sum(x);
    if (threadIdx.x % 32 == 0) smem[threadIdx.x / 32] = x;
    __syncthreads();
    double sum = 0.0;
    for (int warp = 0; threadIdx.x == 0 && warp < N / 32; warp++) sum += smem[warp];
    return sum;
}

__global__ void __launch_bounds__(THREADS)
    adamw_sumsq_kernel(const __grid_constant__ mn_adamw_all a) {
    const int64_t at = a.first + blockIdx.x;
    const mn_adamw_chunk chunk = a.chunks[at];
    const float *g = a.params[chunk.param].g + chunk.first;
    float sum = 0.0f;
    for (int i = threadIdx.x * PACK; i < chunk.count; i += THREADS * PACK) {
        if (i + PACK <= chunk.count) {
            float x[PACK];
            mn_load<PACK>(x, g, i);
#pragma unroll
            for (int j = 0; j < PACK; j++) sum = fmaf(x[j], x[j], sum);
        } else {
            for (int j = i; j < chunk.count; j++) sum = fmaf(g[j], g[j], sum);
        }
    }
    const double all = block_sum<THREADS>((double)sum);
    if (threadIdx.x == 0) a.squares[at] = all;
}

/* The mean loss of batch i over the targets of all its parts. */
__device__ static double batch_loss(const mn_adamw_all &a, int64_t i, int64_t *counted) {
    *counted = a.losses[i].counted;
    if (a.n_parts == 1) return a.losses[i].loss;
    double sum = 0.0;
    *counted = 0;
    for (int64_t part = 0; part < a.n_parts; part++) {
        const mn_adamw_loss of = a.losses[part * a.n_losses + i];
        if (of.counted > 0) sum += of.loss * (double)of.counted;
        *counted += of.counted;
    }
    return *counted > 0 ? sum / (double)*counted : 0.0;
}

__global__ void __launch_bounds__(DECIDE_THREADS)
    adamw_decide_kernel(const __grid_constant__ mn_adamw_all a) {
    double sum = 0.0;
    for (int64_t i = threadIdx.x; i < a.n_chunks; i += DECIDE_THREADS) sum += a.squares[i];
    sum = block_sum<DECIDE_THREADS>(sum);
    if (threadIdx.x != 0) return;
    mn_adamw_result r;
    r.norm = sqrt(sum);
    r.loss = 0.0;
    r.counted = 0;
    for (int64_t i = 0; i < a.n_losses; i++) {
        int64_t counted;
        r.loss += batch_loss(a, i, &counted) / (double)a.n_losses;
        r.counted += counted;
    }
    const mn_adamw_hparams *hparams = a.hparams;
    const bool clips = hparams->clip > 0.0 && r.norm > hparams->clip;
    r.scale = clips ? (float)(hparams->clip / r.norm) : 1.0f;
    r.update = isfinite(r.norm) && isfinite(r.loss) && !(r.loss > hparams->loss_limit);
    *a.result = r;
}

/* The numbers of a step that are the same for all of a parameter. */
struct constants {
    float scale, beta1, rest1, beta2, rest2, eps, bias1, bias2, lr, decay;
};

__device__ static void step(float &p, float &m, float &v, float g, const constants &c) {
    g *= c.scale;
    m = fmaf(c.beta1, m, c.rest1 * g);
    v = fmaf(c.beta2, v, c.rest2 * g * g);
    const float direction = (m / c.bias1) / (sqrtf(v / c.bias2) + c.eps);
    p = fmaf(-c.lr, direction, p * c.decay);
}

template <int N>
__device__ static void step_pack(const mn_adamw_param &p, int64_t i, const constants &c) {
    float value[N], first[N], second[N], g[N];
    mn_load<N>(value, p.p, i);
    mn_load<N>(first, p.m, i);
    mn_load<N>(second, p.v, i);
    mn_load<N>(g, p.g, i);
#pragma unroll
    for (int j = 0; j < N; j++) step(value[j], first[j], second[j], g[j], c);
    mn_store<N>(p.p, i, value);
    mn_store<N>(p.m, i, first);
    mn_store<N>(p.v, i, second);
    if (p.shadow) mn_store<N>((mn_bf16 *)p.shadow, i, value);
}

__global__ void __launch_bounds__(THREADS)
    adamw_update_kernel(const __grid_constant__ mn_adamw_all a) {
    if (!a.result->update) return;
    const mn_adamw_chunk chunk = a.chunks[a.first + blockIdx.x];
    const mn_adamw_param p = a.params[chunk.param];
    const mn_adamw_hparams f = *a.hparams;
    const float lr = f.lr * p.lr_scale;
    const constants c = { a.result->scale, f.beta1, f.rest1, f.beta2, f.rest2,
                          f.eps,           f.bias1, f.bias2, lr,      1.0f - lr * p.weight_decay };
    for (int i = threadIdx.x * PACK; i < chunk.count; i += THREADS * PACK) {
        if (i + PACK <= chunk.count) step_pack<PACK>(p, chunk.first + i, c);
        else for (int j = i; j < chunk.count; j++) step_pack<1>(p, chunk.first + j, c);
    }
}

__global__ void __launch_bounds__(THREADS)
    adamw_shadows_kernel(const __grid_constant__ mn_adamw_all a) {
    const int64_t at = blockIdx.x < a.first ? blockIdx.x : a.own + blockIdx.x;
    const mn_adamw_chunk chunk = a.chunks[at];
    const mn_adamw_param p = a.params[chunk.param];
    if (!p.shadow || !a.result->update) return;
    mn_bf16 *to = (mn_bf16 *)p.shadow + chunk.first;
    const float *from = p.p + chunk.first;
    for (int i = threadIdx.x * PACK; i < chunk.count; i += THREADS * PACK) {
        if (i + PACK <= chunk.count) {
            float x[PACK];
            mn_load<PACK>(x, from, i);
            mn_store<PACK>(to, i, x);
        } else {
            for (int j = i; j < chunk.count; j++) mn_put(to + j, from[j]);
        }
    }
}

/* One thread per pack of four numbers. */
__global__ void __launch_bounds__(THREADS)
    add_kernel(float *out, const float *a, const float *b, int64_t n) {
    const int64_t i = (blockIdx.x * (int64_t)THREADS + threadIdx.x) * PACK;
    if (i + PACK <= n) {
        float x[PACK], y[PACK];
        mn_load<PACK>(x, a, i);
        mn_load<PACK>(y, b, i);
#pragma unroll
        for (int j = 0; j < PACK; j++) x[j] += y[j];
        mn_store<PACK>(out, i, x);
    } else {
        for (int64_t j = i; j < n; j++) out[j] = a[j] + b[j];
    }
}

__global__ void __launch_bounds__(THREADS)
cast_bf16_kernel(mn_bf16 *to, const float *from, int64_t n) {
    const int64_t i = blockIdx.x * (int64_t)THREADS + threadIdx.x;
    if (i < n) mn_put(to + i, from[i]);
}

extern "C" int mn_adamw_squares_cuda(const mn_adamw_all *all, void *stream) {
    if (all->own == 0) return cudaSuccess;
    adamw_sumsq_kernel<<<(unsigned)all->own, THREADS, 0, (cudaStream_t)stream>>>(*all);
    return mn_launch_status();
}

extern "C" int mn_adamw_decide_cuda(const mn_adamw_all *all, void *stream) {
    adamw_decide_kernel<<<1, DECIDE_THREADS, 0, (cudaStream_t)stream>>>(*all);
    return mn_launch_status();
}

extern "C" int mn_adamw_update_cuda(const mn_adamw_all *all, void *stream) {
    if (all->own == 0) return cudaSuccess;
    adamw_update_kernel<<<(unsigned)all->own, THREADS, 0, (cudaStream_t)stream>>>(*all);
    return mn_launch_status();
}

extern "C" int mn_adamw_shadows_cuda(const mn_adamw_all *all, void *stream) {
    const int64_t others = all->n_chunks - all->own;
    if (others == 0) return cudaSuccess;
    adamw_shadows_kernel<<<(unsigned)others, THREADS, 0, (cudaStream_t)stream>>>(*all);
    return mn_launch_status();
}

extern "C" int mn_add_cuda(float *out, const float *a, const float *b, int64_t n, void *stream) {
    if (n == 0) return cudaSuccess;
    add_kernel<<<mn_blocks(n, THREADS * PACK), THREADS, 0, (cudaStream_t)stream>>>(out, a, b, n);
    return mn_launch_status();
}

extern "C" int mn_cast_bf16_cuda(void *to, const float *from, int64_t n, void *stream) {
    if (n == 0) return cudaSuccess;
    cast_bf16_kernel<<<mn_blocks(n, THREADS), THREADS, 0,
        (cudaStream_t)stream>>>((mn_bf16 *)to, from,
                                                                               n);
    return mn_launch_status();
}

}    // namespace mneme::optim
