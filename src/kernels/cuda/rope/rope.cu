/* rope.cu - rotary positions: pair j of a row's channels turns by (pos0 + t) base^(-2j/K), backward
 * by as much the other way (see ref/rope.c).
 *
 * A block takes a few tokens. First its threads make the speeds of the K/2 pairs, then the cosines
 * and sines of each token, which all heads share; then they turn pairs. The angle is made in double
 * and as a part of a full turn, so that it is as good at position 1000000 as at 1. */
#include "kernels/cuda/prim/common.cuh"

namespace mneme::rope {

enum { HALF = 0, THREADS = 256, MAX_TABLE = 4096, MAX_PAIRS = 2048 };    // of a block, a row

/* Turns from `x` to `y`; zeros where x is absent. */
struct rotation {
    mn_in x;
    mn_out y;
    int direction;
};

/* Radians from position to position for pair j. */
__device__ static double inv_freq_of(double base, int64_t j, int64_t K) {
    return exp2(-2.0 * (double)j / (double)K * log2(base));
}

/* cos and sin at position `pos` of a pair of that inv_freq */
__device__ static float2 cos_sin_at(double inv_freq, int64_t pos, int direction) {
    const double turns = (double)pos * inv_freq * 0.15915494309189533577;    // 1 / (2 pi)
    float2 at;
    sincospif((float)(2.0 * (turns - rint(turns))), &at.y, &at.x);
    at.y *= (float)direction;
    return at;
}

/* The places of N pairs from pair j on, as two packs: halves lie K/2 apart, pairs side by side. */
template <typename T, int N>
__device__ static void rotate_vec(const rotation &to, const mn_rope_args &p, const float2 *table,
                                 int64_t b, int64_t t, int64_t h, int64_t j) {
    const int64_t K = p.call.K;
    const int64_t first = p.kind == HALF ? j : 2 * j;
    const int64_t second = p.kind == HALF ? j + K / 2 : 2 * j + N;
    const T *x = mn_row<T>(to.x, b, t, h);
    T *y = mn_row<T>(to.y, b, t, h);
    float a[N], c[N], out_a[N], out_c[N];
    mn_load<N>(a, x, first);
    mn_load<N>(c, x, second);
    if (p.kind == HALF) {
#pragma unroll
        for (int i = 0; i < N; i++) {
            const float2 at = table[j + i];
            out_a[i] = fmaf(at.x, a[i], -at.y * c[i]);
            out_c[i] = fmaf(at.y, a[i], at.x * c[i]);
        }
    } else {
        float all[2 * N], rotated[2 * N];
#pragma unroll
        for (int i = 0; i < N; i++) all[i] = a[i], all[N + i] = c[i];
#pragma unroll
        for (int i = 0; i < N; i++) {
            const float2 at = table[j + i];
            rotated[2 * i] = fmaf(at.x, all[2 * i], -at.y * all[2 * i + 1]);
            rotated[2 * i + 1] = fmaf(at.y, all[2 * i], at.x * all[2 * i + 1]);
        }
#pragma unroll
        for (int i = 0; i < N; i++) out_a[i] = rotated[i], out_c[i] = rotated[N + i];
    }
    mn_store<N>(y, first, out_a);
    mn_store<N>(y, second, out_c);
}

/* Block i has the tokens [i n_tokens, (i + 1) n_tokens) of all batch rows' tokens in a line. */
template <typename T, int N>
__global__ void __launch_bounds__(THREADS)
rope_kernel(const __grid_constant__ mn_rope_args p, rotation to, int n_tokens) {
    extern __shared__ float2 table[];
    const unsigned pairs = (unsigned)(p.call.K / 2), length = (unsigned)p.call.T;
    const unsigned start = blockIdx.x * (unsigned)n_tokens;
    const unsigned count = min((unsigned)n_tokens, (unsigned)(p.call.B * p.call.T) - start);
    double *inv_freq = (double *)(table + n_tokens * pairs);
    for (unsigned j = threadIdx.x; j < pairs; j += THREADS) {
        inv_freq[j] = inv_freq_of(p.base, j, p.call.K);
    }
    __syncthreads();
    for (unsigned i = threadIdx.x; i < count * pairs; i += THREADS) {
        const unsigned at = start + i / pairs, b = at / length, t = at % length;
        const mn_span span = mn_span_at(p.call, mn_span_of(p.call, b, t));
        table[i] = cos_sin_at(inv_freq[i % pairs], p.pos0 + t - span.t0, to.direction);
    }
    __syncthreads();
    const unsigned packs = pairs / N, per_token = (unsigned)p.call.H * packs;
    for (unsigned i = threadIdx.x; i < count * per_token; i += THREADS) {
        const unsigned token = i / per_token, h = i % per_token / packs, j = i % packs * N;
        const unsigned at = start + token;
        rotate_vec<T, N>(to, p, table + token * pairs, at / length, at % length, h, j);
    }
}

/* A row longer than the table holds: the angle is made where it is needed. */
template <typename T>
__global__ void __launch_bounds__(THREADS)
rope_long_kernel(const __grid_constant__ mn_rope_args p, rotation to) {
    const int64_t pairs = p.call.K / 2, per_token = p.call.H * pairs;
    const int64_t b = blockIdx.x / p.call.T, t = blockIdx.x % p.call.T;
    const mn_span span = mn_span_at(p.call, mn_span_of(p.call, b, t));
    for (int64_t i = threadIdx.x; i < per_token; i += THREADS) {
        const int64_t j = i % pairs;
        const float2 at = cos_sin_at(inv_freq_of(p.base, j, p.call.K), p.pos0 + t - span.t0,
                                   to.direction);
        rotate_vec<T, 1>(to, p, &at - j, b, t, i / pairs, j);
    }
}

static bool aligned(const mn_call &call, const void *data, const int64_t *stride, int64_t N) {
    if (!data) return true;
    const int64_t bytes = call.dtype == MN_BF16 ? 2 : 4;
    bool whole = (uintptr_t)data % (uintptr_t)(N * bytes) == 0;
    for (int axis = 0; axis < 3; axis++) whole = whole && stride[axis] % N == 0;
    return whole;
}

template <typename T>
static int rotate_all(const mn_rope_args *p, const rotation &to, cudaStream_t stream) {
    const int64_t pairs = p->call.K / 2, tokens = p->call.B * p->call.T;
    if (tokens == 0) return cudaSuccess;
    if (pairs > MAX_PAIRS || tokens > INT32_MAX ||
        p->call.H > INT32_MAX / 2 / mn_max(pairs, 1)) {
        rope_long_kernel<T><<<mn_blocks(tokens, 1), THREADS, 0, stream>>>(*p, to);
        return mn_launch_status();
    }
    constexpr int N = mn_vec_width<T>();
    const bool packs = pairs % N == 0 && aligned(p->call, to.x.data, to.x.stride, N) &&
                       aligned(p->call, to.y.data, to.y.stride, N);
    const int64_t per_token_vecs = p->call.H * pairs / (packs ? N : 1);    // packs of a token
    const int64_t wanted = mn_ceil_div(4 * THREADS, mn_max(per_token_vecs, 1));
    const int n_tokens = (int)mn_max(mn_min(wanted, MAX_TABLE / pairs), 1);
    const unsigned blocks = mn_blocks(tokens, n_tokens);
    const size_t shared = (size_t)((n_tokens + 1) * pairs) * sizeof(float2);
    if (packs) rope_kernel<T, N><<<blocks, THREADS, shared, stream>>>(*p, to, n_tokens);
    else rope_kernel<T, 1><<<blocks, THREADS, shared, stream>>>(*p, to, n_tokens);
    return mn_launch_status();
}

static int launch(const mn_rope_args *p, const rotation &to, void *stream) {
    if (!to.y.data) return cudaSuccess;
    if (p->call.dtype == MN_BF16) return rotate_all<mn_bf16>(p, to, (cudaStream_t)stream);
    return rotate_all<float>(p, to, (cudaStream_t)stream);
}

MN_CUDA_PLAN(rope_forward) {
    (void)args, (void)plan;
    return true;
}

MN_CUDA_LAUNCH(rope_forward) {
    (void)shared;
    const mn_rope_args *p = (const mn_rope_args *)args;
    return launch(p, { p->x, p->y, 1 }, stream);
}

MN_CUDA_PLAN(rope_backward) {
    (void)args, (void)plan;
    return true;
}

MN_CUDA_LAUNCH(rope_backward) {
    (void)shared;
    const mn_rope_args *p = (const mn_rope_args *)args;
    return launch(p, { p->cot.y, p->grad.x, -1 }, stream);
}

}    // namespace mneme::rope
