/* adamw.cu - AdamW with decoupled weight decay and bias-corrected moments (see ref/adamw.c).
 *
 *   p -= lr wd p;  m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2
 *   p -= lr (m / (1 - b1^s)) / (sqrt(v / (1 - b2^s)) + eps)
 *
 * One thread per pack of four numbers; all steps of a call in registers. The corrections of the S
 * steps are made once, in double, by a small kernel before. p, m and v are float32 in a bf16 call
 * too: they are the numbers that small steps add up in. */
#include "kernels/cuda/prim/common.cuh"

namespace mneme::optim {

enum { THREADS = 256 };

/* table[2s] = 1 - b1^(step0 + s + 1), table[2s + 1] the same of b2, without cancellation */
__global__ void adamw_bias_correction_kernel(const __grid_constant__ mn_adamw_args a,
                                             float *table) {
    for (int64_t s = threadIdx.x; s < a.call.S; s += THREADS) {
        const double step = (double)(a.step0 + s + 1);
        table[2 * s] = (float)-expm1(step * log(a.beta1));
        table[2 * s + 1] = (float)-expm1(step * log(a.beta2));
    }
}

/* The numbers of a step that are the same for all parameters. */
struct constants {
    float lr, beta1, rest1, beta2, rest2, eps, decay;    // rest: 1 - beta; keep: 1 - lr wd
};

template <typename T, int N>
__global__ void __launch_bounds__(THREADS)
adamw_step_kernel(const __grid_constant__ mn_adamw_args a, constants c, const float *table) {
    const int64_t B = a.call.B, i = (blockIdx.x * (int64_t)THREADS + threadIdx.x) * N;
    if (i >= B) return;
    float p[N], m[N], v[N];
    mn_load<N>(p, (const float *)a.p.data, i);
    mn_load<N>(m, (const float *)a.m.data, i);
    mn_load<N>(v, (const float *)a.v.data, i);
    float *p_out = (float *)a.p_out.data, *m_out = (float *)a.m_out.data;
    float *v_out = (float *)a.v_out.data;
    for (int64_t s = 0; s < a.call.S; s++) {
        const float bias1 = table[2 * s], bias2 = table[2 * s + 1];
        float g[N];
        mn_load<N>(g, (const T *)a.grads.data, s * B + i);
#pragma unroll
        for (int j = 0; j < N; j++) {
            m[j] = fmaf(c.beta1, m[j], c.rest1 * g[j]);
            v[j] = fmaf(c.beta2, v[j], c.rest2 * g[j] * g[j]);
            const float direction = (m[j] / bias1) / (sqrtf(v[j] / bias2) + c.eps);
            p[j] = fmaf(-c.lr, direction, p[j] * c.decay);
        }
        if (p_out) mn_store<N>(p_out, s * B + i, p);
        if (m_out) mn_store<N>(m_out, s * B + i, m);
        if (v_out) mn_store<N>(v_out, s * B + i, v);
    }
}

template <typename T, int N>
static int step(const mn_adamw_args *a, const float *table, cudaStream_t stream) {
    const constants c = { (float)a->lr,          (float)a->beta1,
                          (float)(1 - a->beta1), (float)a->beta2,
                          (float)(1 - a->beta2), (float)a->eps,
                          (float)(1 - a->lr * a->weight_decay) };
    adamw_step_kernel<T, N><<<mn_blocks(a->call.B, THREADS * N), THREADS, 0,
        stream>>>(*a, c, table);
    return mn_launch_status();
}

MN_CUDA_PLAN(adamw_forward) {
    const mn_call *call = (const mn_call *)args;
    return mn_mul_size(&plan->shared_bytes, (size_t)call->S, 2 * sizeof(float));
}

MN_CUDA_LAUNCH(adamw_forward) {
    const mn_adamw_args *a = (const mn_adamw_args *)args;
    const cudaStream_t on = (cudaStream_t)stream;
    float *table = (float *)shared;
    adamw_bias_correction_kernel<<<1, THREADS, 0, on>>>(*a, table);
    const int code = mn_launch_status();
    if (code != cudaSuccess) return code;
    const void *tensors[] = { a->p.data,     a->m.data,     a->v.data,    a->grads.data,
                              a->p_out.data, a->m_out.data, a->v_out.data };
    bool vectorized = a->call.B % 4 == 0;
    for (const void *tensor : tensors) vectorized = vectorized && (uintptr_t)tensor % 16 == 0;
    const bool bf16 = a->call.dtype == MN_BF16;
    if (vectorized) return bf16 ? step<mn_bf16, 4>(a, table, on) : step<float, 4>(a, table, on);
    return bf16 ? step<mn_bf16, 1>(a, table, on) : step<float, 1>(a, table, on);
}

}    // namespace mneme::optim
