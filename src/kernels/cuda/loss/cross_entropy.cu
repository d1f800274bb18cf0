/* cross_entropy.cu - nll = logsumexp(logits) - logits[target]; loss = mean over the rows kept (see
 * ref/cross_entropy.c).
 *
 *   dlogits = dloss / kept (softmax(logits) - onehot(target)), zero where the target is `ignore`
 *
 * A block takes a row. One pass makes its largest logit and its sum of exp(x - largest); backward
 * reads the row a second time, from the second cache. Rows of an odd width start anywhere: numbers
 * up to the next 16 bytes are taken one by one. The rows' losses wait in the work space for one
 * block that adds them in order. A target that is no class gives NaN.
 *
 * In bf16 there is little time for a logit, hence an exponential of two instructions; it is off by
 * about |x - top| 2^-24 of itself, most where it counts least. */
#include "kernels/cuda/prim/common.cuh"

namespace mneme::loss {

enum { THREADS = 512, PREFETCH = 4, IGNORED = -1, NO_CLASS = -2 };    // PREFETCH: packs in flight

__device__ __forceinline__ static float exp_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(1.44269504f * x));
    return y;
}

/* The class of row b; targets are float32 whatever the logits are. */
__device__ static int64_t class_of(const mn_cross_entropy_args &p, int64_t b) {
    const float target = ((const float *)p.target.data)[b];
    if (target == (float)p.ignore) return IGNORED;
    const bool is_class = target >= 0.0f && target < (float)p.call.V && target == floorf(target);
    return is_class ? (int64_t)target : NO_CLASS;
}

/* use(i, x[i..i+n), n) over the row, by the threads of the block; n is N or 1. */
template <int N, typename T, typename F>
__device__ static void each_column(const T *x, int64_t V, F use) {
    const int64_t past = (int64_t)((uintptr_t)x % 16 / sizeof(T));
    const int64_t head = N == 1 ? 0 : min(past ? N - past : 0, V);
    const int64_t packs = (V - head) / N, tail = head + packs * N;
    int64_t i = threadIdx.x;
    for (; i + (PREFETCH - 1) * THREADS < packs; i += PREFETCH * THREADS) {
        mn_vec<T, N> prefetch[PREFETCH];
#pragma unroll
        for (int k = 0; k < PREFETCH; k++) {
            prefetch[k] = *(const mn_vec<T, N> *)(x + head + (i + k * THREADS) * N);
        }
#pragma unroll
        for (int k = 0; k < PREFETCH; k++) {
            float at[N];
#pragma unroll
            for (int j = 0; j < N; j++) at[j] = mn_float(prefetch[k].at[j]);
            use(head + (i + k * THREADS) * N, at);
        }
    }
    for (; i < packs; i += THREADS) {
        float at[N];
        mn_load<N>(at, x, head + i * N);
        use(head + i * N, at);
    }
    for (i = threadIdx.x; i < head + V - tail; i += THREADS) {
        const int64_t column = i < head ? i : tail + i - head;
        const float at[1] = { mn_float(x[column]) };
        use(column, at);
    }
}

/* The largest logit, and the sum of exp(x - largest). */
struct row_sums {
    float top, sum;
};

/* Thread by thread, sums of exp(x - from) with the largest logit so far in `from`; 0 stands for
 * none, so that -inf less -inf does not come up. */
template <int N, typename T>
__device__ static row_sums sum_row(const T *x, int64_t V, float *smem) {
    float top = -INFINITY, from = 0.0f, sum = 0.0f;
    each_column<N>(x, V, [&](int64_t, const auto &at) {
        constexpr int n = sizeof at / sizeof(float);
        float most = at[0];
#pragma unroll
        for (int j = 1; j < n; j++) most = fmaxf(most, at[j]);
        if (most > top) {
            sum = top == -INFINITY ? 0.0f : sum * expf(top - most);
            top = from = most;
        }
#pragma unroll
        for (int j = 0; j < n; j++) sum += exp_approx(at[j] - from);
    });
    const float all = mn_group_max<THREADS>(top, smem);
    if (top != -INFINITY) sum *= expf(top - all);
    return { all, mn_group_sum<THREADS>(sum, smem) };
}

template <typename T, int N>
__global__ void __launch_bounds__(THREADS)
cross_entropy_fwd_kernel(const __grid_constant__ mn_cross_entropy_args p, float *losses) {
    __shared__ float smem[32];
    const int64_t b = blockIdx.x, V = p.call.V, target = class_of(p, b);
    const T *x = (const T *)p.logits.data + b * V;
    float loss = target == IGNORED ? 0.0f : NAN;
    if (target >= 0) {
        const row_sums row = sum_row<N>(x, V, smem);
        loss = (row.top - mn_float(x[target])) + logf(row.sum);
    }
    if (threadIdx.x != 0) return;
    losses[b] = loss;
    if (p.nll.data) ((float *)p.nll.data)[b] = loss;
}

/* One block: how many rows are kept, and their mean where losses are given. */
__global__ void __launch_bounds__(THREADS)
cross_entropy_reduce_kernel(const __grid_constant__ mn_cross_entropy_args p, const float *losses,
                            float *kept,
             float *loss) {
    __shared__ float smem[32];
    float n = 0.0f, sum = 0.0f;
    for (int64_t b = threadIdx.x; b < p.call.B; b += THREADS) {
        n += class_of(p, b) != IGNORED ? 1.0f : 0.0f;
        if (losses) sum += losses[b];
    }
    n = mn_group_sum<THREADS>(n, smem);
    sum = mn_group_sum<THREADS>(sum, smem);
    if (threadIdx.x != 0) return;
    if (kept) *kept = n;
    if (loss) *loss = n > 0.0f ? sum / n : 0.0f;
}

template <typename T, int N>
__global__ void __launch_bounds__(THREADS)
cross_entropy_bwd_kernel(const __grid_constant__ mn_cross_entropy_args p, const float *kept) {
    __shared__ float smem[32];
    const int64_t b = blockIdx.x, V = p.call.V, target = class_of(p, b);
    const T *x = (const T *)p.logits.data + b * V;
    T *dx = (T *)p.grad.logits.data + b * V;
    float share = 0.0f, inverse = 0.0f, top = 0.0f;
    if (target != IGNORED) {
        const row_sums row = sum_row<N>(x, V, smem);
        const float dloss = mn_get((const float *)p.cot.loss.data, 0);
        share = target == NO_CLASS ? NAN : dloss / *kept;
        inverse = 1.0f / row.sum;
        top = row.top;
    }
    const float by = share * inverse;
    each_column<N>(x, V, [&](int64_t i, const auto &at) {
        constexpr int n = sizeof at / sizeof(float);
        float d[n] = {};
        if (target == IGNORED) {
            mn_store<n>(dx, i, d);
            return;
        }
#pragma unroll
        for (int j = 0; j < n; j++) d[j] = by * exp_approx(at[j] - top);
        if (i <= target && target < i + n) {
#pragma unroll
            for (int j = 0; j < n; j++) d[j] -= i + j == target ? share : 0.0f;
        }
        mn_store<n>(dx, i, d);
    });
}

template <typename T, int N>
static int forward(const mn_cross_entropy_args *p, float *losses, cudaStream_t stream) {
    if (p->call.B > 0) {
        cross_entropy_fwd_kernel<T, N><<<mn_blocks(p->call.B, 1), THREADS, 0, stream>>>(*p, losses);
        const int code = mn_launch_status();
        if (code != cudaSuccess || !p->loss.data) return code;
    }
    cross_entropy_reduce_kernel<<<1, THREADS, 0,
        stream>>>(*p, losses, nullptr, (float *)p->loss.data);
    return mn_launch_status();
}

template <typename T, int N>
static int backward(const mn_cross_entropy_args *p, float *kept, cudaStream_t stream) {
    cross_entropy_reduce_kernel<<<1, THREADS, 0, stream>>>(*p, nullptr, kept, nullptr);
    const int code = mn_launch_status();
    if (code != cudaSuccess) return code;
    cross_entropy_bwd_kernel<T, N><<<mn_blocks(p->call.B, 1), THREADS, 0, stream>>>(*p, kept);
    return mn_launch_status();
}

MN_CUDA_PLAN(cross_entropy_forward) {
    const mn_call *call = (const mn_call *)args;
    return mn_mul_size(&plan->shared_bytes, (size_t)call->B, sizeof(float));
}

MN_CUDA_LAUNCH(cross_entropy_forward) {
    const mn_cross_entropy_args *p = (const mn_cross_entropy_args *)args;
    const cudaStream_t on = (cudaStream_t)stream;
    float *losses = (float *)shared;
    const bool bf16 = p->call.dtype == MN_BF16;
    if ((uintptr_t)p->logits.data % 16 == 0) {
        return bf16 ? forward<mn_bf16, 8>(p, losses, on) : forward<float, 4>(p, losses, on);
    }
    return bf16 ? forward<mn_bf16, 1>(p, losses, on) : forward<float, 1>(p, losses, on);
}

MN_CUDA_PLAN(cross_entropy_backward) {
    (void)args;
    plan->shared_bytes = sizeof(float);
    return true;
}

/* Packs where a row of the gradient starts as far behind 16 bytes as the row of logits does. */
MN_CUDA_LAUNCH(cross_entropy_backward) {
    const mn_cross_entropy_args *p = (const mn_cross_entropy_args *)args;
    const cudaStream_t on = (cudaStream_t)stream;
    float *kept = (float *)shared;
    if (!p->grad.logits.data || p->call.B == 0) return cudaSuccess;
    const bool bf16 = p->call.dtype == MN_BF16;
    if ((uintptr_t)p->logits.data % 16 == 0 && (uintptr_t)p->grad.logits.data % 16 == 0) {
        return bf16 ? backward<mn_bf16, 8>(p, kept, on) : backward<float, 4>(p, kept, on);
    }
    return bf16 ? backward<mn_bf16, 1>(p, kept, on) : backward<float, 1>(p, kept, on);
}

}    // namespace mneme::loss
