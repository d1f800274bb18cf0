/* token_sum.cu - terms added over all tokens (TOKEN_SUM rows of elementwise.def), in double and in
 * an order that goes by sizes alone. */
#include "kernels/cuda/elementwise/elementwise.cuh"
#include "kernels/functions_double.h"

namespace mneme::elementwise {

enum { COLUMNS = 32, GROUPS = 32, AT_ONCE = 8, REDUCE_THREADS = 1024, SMALL_COLUMNS = 256 };

#define TOKEN_SUM(id, about)                                                                       \
    struct term_##id {                                                                             \
        __device__ static double of(double a, double b, double c) {                                \
            return mn_term_##id(a, b, c);                                                          \
        }                                                                                          \
    };
#include "kernels/elementwise.def"

/* x (H,width) from a, b and c (B,T,H,width); all of one type, rows are neighbours. */
struct sums_of_tokens {
    int64_t B, T, H, width;
    mn_in a, b, c;
    mn_out x;
};

/* A block has 32 columns and 32 row_groups of threads; group g adds tokens g, g + 32, ... of all
 * sequences, eight of which are on their way at once, and the row_groups' sums are added in their
 * order. */
template <typename T, typename F>
__global__ void token_sum_kernel(const __grid_constant__ sums_of_tokens p) {
    __shared__ double sums[GROUPS][COLUMNS + 1];
    const int64_t column = blockIdx.x * (int64_t)COLUMNS + threadIdx.x;
    const int64_t h = column / p.width, i = column % p.width;
    double sum = 0.0;
    for (int64_t b = 0; b < p.B && h < p.H; b++) {
        const T *of_a = mn_row<T>(p.a, b, 0, h), *of_b = mn_row<T>(p.b, b, 0, h);
        const T *of_c = mn_row<T>(p.c, b, 0, h);
        const auto term = [&](int64_t t) {
            return F::of((double)mn_get(of_a, t * p.a.stride[1] + i),
                         (double)mn_get(of_b, t * p.b.stride[1] + i),
                         (double)mn_get(of_c, t * p.c.stride[1] + i));
        };
        int64_t t = (threadIdx.y + GROUPS - b * p.T % GROUPS) % GROUPS;
        for (; t + (AT_ONCE - 1) * GROUPS < p.T; t += AT_ONCE * GROUPS) {
            double terms[AT_ONCE];
#pragma unroll
            for (int e = 0; e < AT_ONCE; e++) terms[e] = term(t + e * GROUPS);
#pragma unroll
            for (int e = 0; e < AT_ONCE; e++) sum += terms[e];
        }
        for (; t < p.T; t += GROUPS) sum += term(t);
    }
    sums[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y != 0 || h >= p.H) return;
    sum = 0.0;
    for (int group = 0; group < GROUPS; group++) sum += sums[group][threadIdx.x];
    mn_put(mn_row<T>(p.x, 0, 0, h) + i, (float)sum);
}

/* Where columns are few a block has one of them: thread i adds tokens i, i + REDUCE_THREADS, ...
 * of each sequence, and threads are added by halves. */
template <typename T, typename F>
__global__ void __launch_bounds__(REDUCE_THREADS)
    token_sum_small_kernel(const __grid_constant__ sums_of_tokens p) {
    __shared__ double sums[REDUCE_THREADS];
    const int64_t h = blockIdx.x / p.width, i = blockIdx.x % p.width;
    double sum = 0.0;
    for (int64_t b = 0; b < p.B; b++) {
#pragma unroll 4
        for (int64_t t = threadIdx.x; t < p.T; t += REDUCE_THREADS) {
            sum += F::of((double)mn_get(mn_row<T>(p.a, b, t, h), i),
                         (double)mn_get(mn_row<T>(p.b, b, t, h), i),
                         (double)mn_get(mn_row<T>(p.c, b, t, h), i));
        }
    }
    sums[threadIdx.x] = sum;
    for (int half = REDUCE_THREADS / 2; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
    }
    if (threadIdx.x == 0) mn_put(mn_row<T>(p.x, 0, 0, h) + i, (float)sums[0]);
}

template <typename T, typename F>
static int launch(const sums_of_tokens &p, cudaStream_t stream) {
    const int64_t columns = p.H * p.width;
    if (!p.x.data || columns == 0) return cudaSuccess;
    if (columns <= SMALL_COLUMNS) {
        token_sum_small_kernel<T, F><<<(unsigned)columns, REDUCE_THREADS, 0, stream>>>(p);
    } else {
        const dim3 threads(COLUMNS, GROUPS);
        token_sum_kernel<T, F><<<mn_blocks(columns, COLUMNS), threads, 0, stream>>>(p);
    }
    return mn_launch_status();
}

/* Rows of a view. */
static mn_in rows_of(const mn_view &view) {
    return { view.data, { view.stride[0], view.stride[1], view.stride[2] } };
}

MN_CUDA_ELEMENTWISE(token_sum) {
    const mn_token_sum_params *w = (const mn_token_sum_params *)args;
    const cudaStream_t on = (cudaStream_t)backend;
    (void)workspace;
    const mn_in sum = rows_of(w->sum);
    const sums_of_tokens p = { w->shape[0], w->shape[1], w->shape[2], w->shape[3],
                               rows_of(w->in[0]), rows_of(w->in[1]), rows_of(w->in[2]),
                               { w->sum.data, { 0, 0, sum.stride[2] } } };
    const bool bf16 = w->sum.dtype == MN_BF16;
    switch (w->f) {
#define TOKEN_SUM(id, about)                                                                       \
    case MN_TOKEN_SUM_##id:                                                                        \
        return bf16 ? launch<mn_bf16, term_##id>(p, on) : launch<float, term_##id>(p, on);
#include "kernels/elementwise.def"
    default: return cudaErrorInvalidValue;
    }
}

}    // namespace mneme::elementwise
