/* glue.cu - the small steps between the parts of composed operators: glue.def in CUDA.
 *
 * Element by element, one thread has a pack of neighbours in a row. The log decays of Palimpsa are
 * made in double and rounded once: a decay close to 1 keeps all its digits in its logarithm. */
#include "kernels/cuda/prim/common.cuh"
#include "kernels/glue.h"

namespace mneme::elementwise {

enum { THREADS = 256, COLUMNS = 32, GROUPS = 32, REDUCE_THREADS = 1024, SMALL_COLUMNS = 256 };

__device__ static float sigmoid(float x) {
    const float e = expf(-fabsf(x)), s = 1.0f / (1.0f + e);
    return x >= 0.0f ? s : e * s;
}

/* What a step makes of its inputs. */
#define STEP(name, ...)                                                                            \
    struct name {                                                                                  \
        __device__ static void apply(float *out, float a, float b, float c) {                      \
            (void)a, (void)b, (void)c;                                                             \
            __VA_ARGS__                                                                            \
        }                                                                                          \
    }
STEP(glue_copy, out[0] = a;);
STEP(glue_add, out[0] = a + b;);
STEP(glue_multiply, out[0] = a * b;);
STEP(glue_multiply_add, out[0] = fmaf(a, b, c););
STEP(glue_sigmoid, out[0] = sigmoid(a + b););
STEP(glue_sigmoid_back, out[0] = a * b * (1.0f - b););
STEP(glue_swiglu, out[0] = a * sigmoid(a) * b;);
STEP(glue_swiglu_back, {
    const float s = sigmoid(a), silu = a * s;
    out[0] = c * b * (s * fmaf(a, 1.0f - s, 1.0f));
    out[1] = c * silu;
    out[2] = silu * b;
});
STEP(glue_decay_paper, out[0] = (float)log1p(-(double)a / (double)b););
STEP(glue_decay_paper_back, out[0] = (float)(-(double)c / ((double)b - (double)a)););
STEP(glue_decay_code, out[0] = -a * b;);
STEP(glue_decay_code_back, out[0] = -c * b;);

/* Terms of sums over tokens. */
#define TERM(name, term)                                                                           \
    struct name {                                                                                  \
        __device__ static double of(double a, double b, double c) {                                \
            (void)a, (void)b, (void)c;                                                             \
            return term;                                                                           \
        }                                                                                          \
    }
TERM(glue_sum, a);
TERM(glue_sum_decay_paper, c * a / (b * (b - a)));
TERM(glue_sum_decay_code, -c * a);

/* ---- element by element ---------------------------------------------------------------------- */

template <typename T, int N>
__device__ static void load(float (&to)[N], const mn_in &view, bool wide, int64_t b, int64_t t,
                            int64_t h, int64_t i) {
    if (wide) mn_load<N>(to, mn_row<float>(view, b, t, h), i);
    else mn_load<N>(to, mn_row<T>(view, b, t, h), i);
}

template <typename T, int N>
__device__ static void store(const mn_out &view, bool wide, int64_t b, int64_t t, int64_t h,
                             int64_t i, const float (&x)[N]) {
    if (!view.data) return;
    if (wide) mn_store<N>(mn_row<float>(view, b, t, h), i, x);
    else mn_store<N>(mn_row<T>(view, b, t, h), i, x);
}

template <typename T, int N, typename F, int INS, int OUTS>
__global__ void __launch_bounds__(THREADS) glue_kernel(const __grid_constant__ mn_glue p) {
    const int64_t packs = p.width / N, count = p.B * p.T * p.H * packs;
    const int64_t step = gridDim.x * (int64_t)THREADS;
    for (int64_t at = blockIdx.x * (int64_t)THREADS + threadIdx.x; at < count; at += step) {
        const int64_t row = at / packs, i = at % packs * N;
        const int64_t h = row % p.H, token = row / p.H, t = token % p.T, b = token / p.T;
        float in[3][N] = {}, out[3][N];
        load<T, N>(in[0], p.a, p.wide & MN_GLUE_F32_A, b, t, h, i);
        if (INS > 1) load<T, N>(in[1], p.b, p.wide & MN_GLUE_F32_B, b, t, h, i);
        if (INS > 2) load<T, N>(in[2], p.c, p.wide & MN_GLUE_F32_C, b, t, h, i);
#pragma unroll
        for (int j = 0; j < N; j++) {
            float result[3];
            F::apply(result, in[0][j], in[1][j], in[2][j]);
#pragma unroll
            for (int k = 0; k < OUTS; k++) out[k][j] = result[k];
        }
        store<T, N>(p.x, p.wide & MN_GLUE_F32_X, b, t, h, i, out[0]);
        if (OUTS > 1) store<T, N>(p.y, p.wide & MN_GLUE_F32_Y, b, t, h, i, out[1]);
        if (OUTS > 2) store<T, N>(p.z, p.wide & MN_GLUE_F32_Z, b, t, h, i, out[2]);
    }
}

/* Whether rows of a view may be touched in packs of 16 bytes, whichever type it has. */
template <typename T, typename View>
static bool packable(const View &view) {
    bool fits = mn_vec_aligned<T>(view.data, 0);
    for (int i = 0; view.data && i < 3; i++) fits = fits && mn_vec_aligned<T>(NULL, view.stride[i]);
    return fits;
}

template <typename T, typename F, int INS, int OUTS>
static int launch_of(const mn_glue *p, cudaStream_t stream) {
    constexpr int N = mn_vec_width<T>();
    const int64_t count = p->B * p->T * p->H * p->width;
    if (count == 0) return cudaSuccess;
    const bool packs = p->width % N == 0 && packable<T>(p->a) && packable<T>(p->b) &&
                       packable<T>(p->c) && packable<T>(p->x) && packable<T>(p->y) &&
                       packable<T>(p->z);
    if (packs) {
        const unsigned blocks = mn_blocks(count / N, THREADS, 1 << 16);
        glue_kernel<T, N, F, INS, OUTS><<<blocks, THREADS, 0, stream>>>(*p);
    } else {
        glue_kernel<T, 1, F, INS, OUTS><<<mn_blocks(count, THREADS, 1 << 16), THREADS, 0,
                                          stream>>>(*p);
    }
    return mn_launch_status();
}

/* ---- sums over tokens ------------------------------------------------------------------------ */

/* A block has 32 columns and 32 row_groups of threads; group g adds tokens g, g + 32, ..., and the
 * row_groups' sums are added in their order. */
template <typename T, typename F>
__global__ void glue_sum_kernel(const __grid_constant__ mn_glue p) {
    __shared__ double sums[GROUPS][COLUMNS + 1];
    const int64_t column = blockIdx.x * (int64_t)COLUMNS + threadIdx.x;
    const int64_t h = column / p.width, i = column % p.width, tokens = p.B * p.T;
    double sum = 0.0;
    for (int64_t at = threadIdx.y; h < p.H && at < tokens; at += GROUPS) {
        const int64_t b = at / p.T, t = at % p.T;
        sum += F::of((double)mn_get(mn_row<T>(p.a, b, t, h), i),
                     (double)mn_get(mn_row<T>(p.b, b, t, h), i),
                     (double)mn_get(mn_row<T>(p.c, b, t, h), i));
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
    glue_sum_small_kernel(const __grid_constant__ mn_glue p) {
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
static int launch_sum(const mn_glue *p, cudaStream_t stream) {
    if (!p->x.data || p->H * p->width == 0) return cudaSuccess;
    const int64_t columns = p->H * p->width;
    if (columns <= SMALL_COLUMNS) {
        glue_sum_small_kernel<T, F><<<(unsigned)columns, REDUCE_THREADS, 0, stream>>>(*p);
    } else {
        const dim3 threads(COLUMNS, GROUPS);
        glue_sum_kernel<T, F><<<mn_blocks(columns, COLUMNS), threads, 0, stream>>>(*p);
    }
    return mn_launch_status();
}

/* ---- the table ------------------------------------------------------------------------------- */

#define GLUE(name, ins, outs, about)                                                               \
    extern "C" int mn_glue_##name##_cuda(const mn_glue *p, void *stream) {                         \
        const cudaStream_t on = (cudaStream_t)stream;                                              \
        return p->dtype == MN_BF16 ? launch_of<mn_bf16, glue_##name, ins, outs>(p, on)             \
                                   : launch_of<float, glue_##name, ins, outs>(p, on);              \
    }
#define GLUE_SUM(name, about)                                                                      \
    extern "C" int mn_glue_##name##_cuda(const mn_glue *p, void *stream) {                         \
        const cudaStream_t on = (cudaStream_t)stream;                                              \
        return p->dtype == MN_BF16 ? launch_sum<mn_bf16, glue_##name>(p, on)                       \
                                   : launch_sum<float, glue_##name>(p, on);                        \
    }
#include "kernels/glue.def"

}    // namespace mneme::elementwise
