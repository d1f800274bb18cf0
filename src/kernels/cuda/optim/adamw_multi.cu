/* adamw_multi.cu - AdamW over all parameters of a model (see kernels/adamw_all.h).
 *
 *   g = scale grad;  m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2
 *   p = p (1 - lr wd) - lr (m / bias1) / (sqrt(v / bias2) + eps)
 *
 * One block per piece of one parameter, packs of four numbers. Squares are added in float by a
 * thread, in double over threads and pieces, always in the same order. The block that decides
 * compares norm and loss with what the host allows: a step with numbers that are not finite changes
 * nothing. */
#include "kernels/adamw_all.h"

#include "kernels/cuda/prim/common.cuh"

enum { THREADS = 256, DECIDERS = 1024, PACK = 4 };

__device__ static double warp_sum(double x) {
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes >>= 1) x += __shfl_xor_sync(0xffffffffu, x, lanes);
    return x;
}

/* The sum over a block of N threads, in thread 0. */
template <int N>
__device__ static double block_sum(double x) {
    __shared__ double room[N / 32];
    x = warp_sum(x);
    if (threadIdx.x % 32 == 0) room[threadIdx.x / 32] = x;
    __syncthreads();
    double sum = 0.0;
    for (int warp = 0; threadIdx.x == 0 && warp < N / 32; warp++) sum += room[warp];
    return sum;
}

__global__ void __launch_bounds__(THREADS) squares_kernel(const __grid_constant__ mn_adamw_all a) {
    const mn_adamw_cut cut = a.cuts[blockIdx.x];
    const float *g = a.params[cut.param].g + cut.first;
    float sum = 0.0f;
    for (int i = threadIdx.x * PACK; i < cut.count; i += THREADS * PACK) {
        if (i + PACK <= cut.count) {
            float x[PACK];
            mn_load<PACK>(x, g, i);
#pragma unroll
            for (int j = 0; j < PACK; j++) sum = fmaf(x[j], x[j], sum);
        } else {
            for (int j = i; j < cut.count; j++) sum = fmaf(g[j], g[j], sum);
        }
    }
    const double all = block_sum<THREADS>((double)sum);
    if (threadIdx.x == 0) a.squares[blockIdx.x] = all;
}

__global__ void __launch_bounds__(DECIDERS) decide_kernel(const __grid_constant__ mn_adamw_all a) {
    double sum = 0.0;
    for (int64_t i = threadIdx.x; i < a.n_cuts; i += DECIDERS) sum += a.squares[i];
    sum = block_sum<DECIDERS>(sum);
    if (threadIdx.x != 0) return;
    mn_adamw_result r;
    r.norm = sqrt(sum);
    r.loss = 0.0;
    r.counted = 0;
    for (int64_t i = 0; i < a.n_losses; i++) {
        r.loss += a.losses[i].loss / (double)a.n_losses;
        r.counted += a.losses[i].counted;
    }
    const mn_adamw_facts *facts = a.facts;
    const bool clips = facts->clip > 0.0 && r.norm > facts->clip;
    r.scale = clips ? (float)(facts->clip / r.norm) : 1.0f;
    r.update = isfinite(r.norm) && isfinite(r.loss) && !(r.loss > facts->loss_limit);
    *a.result = r;
}

/* The numbers of a step that are the same for all of a parameter. */
struct constants {
    float scale, beta1, rest1, beta2, rest2, eps, bias1, bias2, lr, keep;
};

__device__ static void step(float &p, float &m, float &v, float g, const constants &c) {
    g *= c.scale;
    m = fmaf(c.beta1, m, c.rest1 * g);
    v = fmaf(c.beta2, v, c.rest2 * g * g);
    const float ahead = (m / c.bias1) / (sqrtf(v / c.bias2) + c.eps);
    p = fmaf(-c.lr, ahead, p * c.keep);
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

__global__ void __launch_bounds__(THREADS) update_kernel(const __grid_constant__ mn_adamw_all a) {
    if (!a.result->update) return;
    const mn_adamw_cut cut = a.cuts[blockIdx.x];
    const mn_adamw_param p = a.params[cut.param];
    const mn_adamw_facts f = *a.facts;
    const float lr = f.lr * p.lr_scale;
    const constants c = { a.result->scale, f.beta1, f.rest1, f.beta2, f.rest2,
                          f.eps,           f.bias1, f.bias2, lr,      1.0f - lr * p.weight_decay };
    for (int i = threadIdx.x * PACK; i < cut.count; i += THREADS * PACK) {
        if (i + PACK <= cut.count) step_pack<PACK>(p, cut.first + i, c);
        else for (int j = i; j < cut.count; j++) step_pack<1>(p, cut.first + j, c);
    }
}

__global__ void __launch_bounds__(THREADS)
shadow_kernel(mn_bf16 *to, const float *from, int64_t n) {
    const int64_t i = blockIdx.x * (int64_t)THREADS + threadIdx.x;
    if (i < n) mn_put(to + i, from[i]);
}

int mn_adamw_norm_cuda(const mn_adamw_all *all, void *stream) {
    const cudaStream_t on = (cudaStream_t)stream;
    if (all->n_cuts > 0) squares_kernel<<<(unsigned)all->n_cuts, THREADS, 0, on>>>(*all);
    decide_kernel<<<1, DECIDERS, 0, on>>>(*all);
    return mn_launch_status();
}

int mn_adamw_update_cuda(const mn_adamw_all *all, void *stream) {
    if (all->n_cuts == 0) return cudaSuccess;
    update_kernel<<<(unsigned)all->n_cuts, THREADS, 0, (cudaStream_t)stream>>>(*all);
    return mn_launch_status();
}

int mn_shadow_cuda(void *to, const float *from, int64_t n, void *stream) {
    if (n == 0) return cudaSuccess;
    shadow_kernel<<<mn_blocks(n, THREADS), THREADS, 0, (cudaStream_t)stream>>>((mn_bf16 *)to, from,
                                                                               n);
    return mn_launch_status();
}
