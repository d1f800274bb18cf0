/* kla_discretise.cu - KLA's dynamics from its parameters, cell by cell (see ref/kla_discretise.c).
 *
 *   dt = softplus(delta) + 1e-7    c = exp(lambda_log)    p = max(process_noise, 1e-7)
 *   abar = exp(-c dt)              pbar = p dt w(2 c dt)  or, as a zero-order hold, p dt
 *
 * with w(x) = (1 - e^-x) / x. One thread per cell. The results are float32 in a bf16 call too. */
#include "kernels/cuda/moebius/moebius_step.cuh"

namespace mneme::moebius {

enum { THREADS = 128 };

/* Its slope (e^-x (1 + x) - 1) / x^2, below 1 by its series sum_i (i-1) (-1)^(i-1) x^(i-2) / i!,
 * i = 2 ... 13, whose last term is below 1e-8 of the first. */
__device__ static float weight_slope(float x) {
    if (x >= 1.0f) return (expf(-x) * (1.0f + x) - 1.0f) / (x * x);
    const float last = 12.0f / 6227020800.0f;    // (13 - 1) / 13!
    float sum = last, factor = 6227020800.0f;
#pragma unroll
    for (int i = 12; i >= 2; i--) {
        factor /= (float)(i + 1);    // i!
        sum = fmaf(-x, sum, (float)(i - 1) / factor);
    }
    return -sum;
}

template <typename T>
__global__ void kla_discretise_fwd_kernel(const __grid_constant__ mn_kla_discretise_args p) {
    const int64_t i = blockIdx.x * (int64_t)THREADS + threadIdx.x;
    if (i >= p.call.V * p.call.K) return;
    discretise_cell<T>(p, i);
}

/* With x = 2 c dt:  dc = -dabar dt abar + 2 dpbar p dt^2 w'(x)   ddt = -dabar c abar + dpbar p e^-x
 *   dlambda_log = c dc    ddelta = sigmoid(delta) ddt    dprocess_noise = dpbar dt w(x) */
template <typename T>
__global__ void kla_discretise_bwd_kernel(const __grid_constant__ mn_kla_discretise_args p) {
    const int64_t i = blockIdx.x * (int64_t)THREADS + threadIdx.x;
    if (i >= p.call.V * p.call.K) return;
    const float delta = mn_float(((const T *)p.delta.data)[i]), dt = mn_softplus(delta) + 1e-7f;
    const float c = expf(mn_float(((const T *)p.lambda_log.data)[i])), x = 2.0f * c * dt;
    const float given = mn_float(((const T *)p.process_noise.data)[i]);
    const float noise = fmaxf(given, min_noise), abar = expf(-c * dt);
    const float ga = mn_get((const float *)p.cot.abar.data, i);
    const float gp = mn_get((const float *)p.cot.pbar.data, i);
    const bool ou = p.mode == 0;
    const float slope = ou ? weight_slope(x) : 0.0f, fade = ou ? expf(-x) : 1.0f;
    const float dc = -ga * dt * abar + 2.0f * gp * noise * dt * dt * slope;
    const float ddt = -ga * c * abar + gp * noise * fade;
    T *ddelta = (T *)p.grad.delta.data, *dlambda = (T *)p.grad.lambda_log.data;
    T *dnoise = (T *)p.grad.process_noise.data;
    if (ddelta) mn_put(ddelta + i, mn_sigmoid(delta) * ddt);
    if (dlambda) mn_put(dlambda + i, c * dc);
    if (dnoise) {
        mn_put(dnoise + i, given >= min_noise ? gp * dt * (ou ? weight(x) : 1.0f) : 0.0f);
    }
}

MN_CUDA_PLAN(kla_discretise_forward) {
    (void)args, (void)plan;
    return true;
}

MN_CUDA_LAUNCH(kla_discretise_forward) {
    (void)shared;
    const mn_kla_discretise_args *p = (const mn_kla_discretise_args *)args;
    const unsigned blocks = mn_blocks(p->call.V * p->call.K, THREADS);
    const cudaStream_t on = (cudaStream_t)stream;
    if (p->call.dtype == MN_BF16) kla_discretise_fwd_kernel<mn_bf16><<<blocks, THREADS, 0,
        on>>>(*p);
    else kla_discretise_fwd_kernel<float><<<blocks, THREADS, 0, on>>>(*p);
    return mn_launch_status();
}

MN_CUDA_PLAN(kla_discretise_backward) {
    (void)args, (void)plan;
    return true;
}

MN_CUDA_LAUNCH(kla_discretise_backward) {
    (void)shared;
    const mn_kla_discretise_args *p = (const mn_kla_discretise_args *)args;
    const unsigned blocks = mn_blocks(p->call.V * p->call.K, THREADS);
    const cudaStream_t on = (cudaStream_t)stream;
    if (p->call.dtype == MN_BF16) kla_discretise_bwd_kernel<mn_bf16><<<blocks, THREADS, 0,
        on>>>(*p);
    else kla_discretise_bwd_kernel<float><<<blocks, THREADS, 0, on>>>(*p);
    return mn_launch_status();
}

}    // namespace mneme::moebius
