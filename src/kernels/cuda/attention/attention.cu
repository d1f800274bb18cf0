/* attention.cu - softmax attention and relu_attention (equations in ref/attention.c). */
#include "kernels/cuda/attention/attention_rows.cuh"
#include "kernels/cuda/attention/attention_bwd_flash_sm90.cuh"
#include "kernels/cuda/attention/attention_bwd_single_pass_sm90.cuh"
#include "kernels/cuda/attention/attention_fwd_flash_sm90.cuh"
#include "kernels/cuda/prim/fmax.cuh"

namespace mneme::attention {

/* One query of each head against a cache of keys (attention and relu_attention, T = 1), split over
 * the keys.
 *
 * A block reads 256 keys and values of one key-value head for up to four of the query heads that
 * share it, and leaves a part of the result with its largest score and its sum; a second kernel
 * adds the parts in their order. Rows are read by groups of 16 threads, eight numbers at a time
 * where they can. */

enum {
    MN_STEP_KEYS = 256,       // of a block
    MN_STEP_HEADS = 4,        // query heads of a block
    MN_STEP_THREADS = 256,
    MN_STEP_ROW_THREADS = 16,        // threads of a row
    MN_STEP_ROW_GROUPS = MN_STEP_THREADS / MN_STEP_ROW_THREADS,
    MN_STEP_MAX_K = 2048,    // K, for queries in shared memory
};

inline int64_t mn_decode_attn_splits(const mn_call &call) {
    return mn_ceil_div(call.L, MN_STEP_KEYS);
}

/* Scores of the block's keys into w. A thread group takes four keys at a time, N columns of each
 * thread. */
template <typename T, int N>
__device__ inline void mn_decode_attn_scores(float (*w)[MN_STEP_KEYS], const float *q,
                                             const mn_attn_params &p,
                                      int64_t b, int64_t j, int64_t key0, int n_keys) {
    enum { AT_ONCE = 4 };
    const int lane = threadIdx.x % MN_STEP_ROW_THREADS,
        thread_group = threadIdx.x / MN_STEP_ROW_THREADS;
    const int K = (int)p.call.K;
    for (int first = 0; first < K; first += MN_STEP_ROW_THREADS * N) {
        const int a = first + lane * N;
        float of_q[MN_STEP_HEADS][N];
#pragma unroll
        for (int h = 0; h < MN_STEP_HEADS; h++) {
#pragma unroll
            for (int e = 0; e < N; e++) of_q[h][e] = a < K ? q[h * K + a + e] : 0.0f;
        }
        for (int i0 = thread_group; i0 < MN_STEP_KEYS; i0 += AT_ONCE * MN_STEP_ROW_GROUPS) {
            float x[AT_ONCE][N];
#pragma unroll
            for (int u = 0; u < AT_ONCE; u++) {
                const int i = i0 + u * MN_STEP_ROW_GROUPS;
                const bool inside = i < n_keys && a < K;
                mn_load<N>(x[u], inside ? mn_row<T>(p.k, b, key0 + i, j) : (const T *)nullptr, a);
            }
#pragma unroll
            for (int u = 0; u < AT_ONCE; u++) {
#pragma unroll
                for (int h = 0; h < MN_STEP_HEADS; h++) {
                    float sum = 0.0f;
#pragma unroll
                    for (int e = 0; e < N; e++) sum = fmaf(x[u][e], of_q[h][e], sum);
#pragma unroll
                    for (int lanes = MN_STEP_ROW_THREADS / 2; lanes > 0; lanes >>= 1) {
                        sum += __shfl_xor_sync(0xffffffffu, sum, lanes);
                    }
                    float *to = &w[h][i0 + u * MN_STEP_ROW_GROUPS];
                    if (lane == 0) *to = fmaf(p.scale, sum, first ? *to : 0.0f);
                }
            }
        }
    }
}

/* Sums of w v over the block's keys, N columns of each thread from column0 + lane N on: in `out`
 * of thread group 0. */
template <typename T, int N>
__device__ inline void mn_decode_attn_pv(float (&out)[MN_STEP_HEADS][N], float (*w)[MN_STEP_KEYS],
                                    float *smem, const mn_attn_params &p, int64_t b, int64_t j,
                                    int64_t key0, int n_keys, int column0) {
    const int lane = threadIdx.x % MN_STEP_ROW_THREADS,
        thread_group = threadIdx.x / MN_STEP_ROW_THREADS;
    const int column = column0 + lane * N;
#pragma unroll
    for (int h = 0; h < MN_STEP_HEADS; h++) {
#pragma unroll
        for (int e = 0; e < N; e++) out[h][e] = 0.0f;
    }
    enum { AT_ONCE = 4 };
    for (int i0 = thread_group; i0 < n_keys && column < p.call.V;
         i0 += AT_ONCE * MN_STEP_ROW_GROUPS) {
        float x[AT_ONCE][N];
#pragma unroll
        for (int u = 0; u < AT_ONCE; u++) {
            const int i = i0 + u * MN_STEP_ROW_GROUPS;
            mn_load<N>(x[u], i < n_keys ? mn_row<T>(p.v, b, key0 + i, j) : (const T *)nullptr,
                       column);
        }
#pragma unroll
        for (int u = 0; u < AT_ONCE; u++) {
            const int i = min(i0 + u * MN_STEP_ROW_GROUPS, MN_STEP_KEYS - 1);
#pragma unroll
            for (int h = 0; h < MN_STEP_HEADS; h++) {
#pragma unroll
                for (int e = 0; e < N; e++) out[h][e] = fmaf(w[h][i], x[u][e], out[h][e]);
            }
        }
    }
#pragma unroll
    for (int h = 0; h < MN_STEP_HEADS; h++) {
        __syncthreads();
#pragma unroll
        for (int e = 0; e < N; e++) {
            smem[(e * MN_STEP_ROW_GROUPS + thread_group) * MN_STEP_ROW_THREADS + lane] = out[h][e];
        }
        __syncthreads();
        if (thread_group != 0) continue;
#pragma unroll
        for (int e = 0; e < N; e++) {
            float sum = 0.0f;
            for (int i = 0; i < MN_STEP_ROW_GROUPS; i++) {
                sum += smem[(e * MN_STEP_ROW_GROUPS + i) * MN_STEP_ROW_THREADS + lane];
            }
            out[h][e] = sum;
        }
    }
}

/* Grid: (n_partials, J * sets, B); block: 256 keys of key head j, up to four of its query heads.
 * Loads   q (4,K), k (256,K), v (256,V).
 * Stores  parts (B, H, n_partials, V + 2): sums of w v (V), the largest score, and the sum of w;
 *         for relu_attention w = max(z, 0), 0 in place of the largest score, and the sum of z^2. */
template <typename T, int N>
__global__ void __launch_bounds__(MN_STEP_THREADS)
attention_decode_split_kernel(const __grid_constant__ mn_attn_params p, float *parts,
                              int64_t n_partials) {
    extern __shared__ float q[];
    __shared__ float w[MN_STEP_HEADS][MN_STEP_KEYS], smem[N * MN_STEP_THREADS], sums[32];
    const int64_t group = p.call.H / p.call.J, sets = (group + MN_STEP_HEADS - 1) / MN_STEP_HEADS;
    const int64_t part = blockIdx.x, j = blockIdx.y / sets, b = blockIdx.z;
    const int64_t first = j * group + blockIdx.y % sets * MN_STEP_HEADS;
    const int n_heads = (int)min((int64_t)MN_STEP_HEADS, (j + 1) * group - first);
    const int64_t key0 = part * MN_STEP_KEYS, K = p.call.K, V = p.call.V;
    const int n_keys = (int)min((int64_t)MN_STEP_KEYS, p.call.L - key0);
    for (int64_t i = threadIdx.x; i < MN_STEP_HEADS * K; i += MN_STEP_THREADS) {
        const int h = (int)(i / K);
        q[i] = h < n_heads ? mn_float(mn_row<T>(p.q, b, 0, first + h)[i % K]) : 0.0f;
    }
    __syncthreads();
    mn_decode_attn_scores<T, N>(w, q, p, b, j, key0, n_keys);
    __syncthreads();
    for (int h = 0; h < n_heads; h++) {
        const bool inside = threadIdx.x < n_keys;
        const float z = inside ? w[h][threadIdx.x] : 0.0f;
        float most = 0.0f, x = mn_fmax(z, 0.0f), weight = z * z;
        if (p.softmax) {
            most = mn_group_max<MN_STEP_THREADS>(inside ? z : -INFINITY, sums);
            weight = x = inside ? expf(z - most) : 0.0f;
        }
        w[h][threadIdx.x] = inside ? x : 0.0f;
        const float sum = mn_group_sum<MN_STEP_THREADS>(weight, sums);
        float *to = parts + ((b * p.call.H + first + h) * n_partials + part) * (V + 2) + V;
        if (threadIdx.x == 0) to[0] = most, to[1] = sum;
    }
    __syncthreads();
    for (int64_t column0 = 0; column0 < V; column0 += MN_STEP_ROW_THREADS * N) {
        float out[MN_STEP_HEADS][N];
        mn_decode_attn_pv<T, N>(out, w, smem, p, b, j, key0, n_keys, (int)column0);
        const int64_t column = column0 + threadIdx.x * N;
        if (threadIdx.x >= MN_STEP_ROW_THREADS || column >= V) continue;
#pragma unroll
        for (int h = 0; h < MN_STEP_HEADS; h++) {
            if (h >= n_heads) break;
            float *to = parts + ((b * p.call.H + first + h) * n_partials + part) * (V + 2) + column;
#pragma unroll
            for (int e = 0; e < N; e++) to[e] = out[h][e];
        }
    }
}

/* Grid: (H, B). Loads the parts of a head, rescales them to their largest score and adds them in
 * order.
 * Stores o (B,1,H,V), and lse (B,1,H) where given. */
template <typename T>
__global__ void __launch_bounds__(MN_STEP_THREADS)
attention_decode_combine_kernel(const __grid_constant__ mn_attn_params p, const float *parts,
                                int64_t n_partials) {
    __shared__ float smem[32];
    const int64_t h = blockIdx.x, b = blockIdx.y, V = p.call.V;
    const float *from = parts + (b * p.call.H + h) * n_partials * (V + 2);
    float most = -INFINITY, sum = 0.0f;
    for (int64_t i = threadIdx.x; i < n_partials; i += MN_STEP_THREADS) {
        most = fmaxf(most, from[i * (V + 2) + V]);
    }
    most = mn_group_max<MN_STEP_THREADS>(most, smem);
    for (int64_t i = threadIdx.x; i < n_partials; i += MN_STEP_THREADS) {
        const float *at = from + i * (V + 2) + V;
        sum = fmaf(at[1], expf(at[0] - most), sum);
    }
    sum = mn_group_sum<MN_STEP_THREADS>(sum, smem);
    const float by = 1.0f / (p.softmax ? sum : mn_fmax(sqrtf(sum), p.eps));
    T *o = mn_row<T>(p.o, b, 0, h);
    float *lse = mn_row<float>(p.lse, b, 0, h);
    if (lse && threadIdx.x == 0) *lse = most + logf(sum);
    for (int64_t a = threadIdx.x; o && a < V; a += MN_STEP_THREADS) {
        float y = 0.0f;
        for (int64_t i = 0; i < n_partials; i++) {
            const float *at = from + i * (V + 2);
            y = fmaf(at[a], expf(at[V] - most), y);
        }
        mn_put(o + a, y * by);
    }
}

inline bool mn_decode_attn_supported(const mn_attn_params &p) {
    return p.rope == 0 && p.call.K <= MN_STEP_MAX_K && p.call.H <= 65535 && p.call.B <= 65535;
}

inline bool mn_decode_attn_plan(mn_plan *plan, const mn_attn_params &p) {
    int64_t count;
    return mn_mul_i64(&count, p.call.B * p.call.H, mn_decode_attn_splits(p.call)) &&
           mn_mul_i64(&count, count, p.call.V + 2) &&
           mn_mul_size(&plan->shared_bytes, (size_t)count, sizeof(float));
}

template <typename T, int N>
inline int mn_decode_attn_run(const mn_attn_params &p, float *parts, cudaStream_t stream) {
    const mn_call &c = p.call;
    const int64_t n_partials = mn_decode_attn_splits(c);
    const int64_t sets = mn_ceil_div(c.H / c.J, MN_STEP_HEADS);
    const dim3 blocks((unsigned)n_partials, (unsigned)(c.J * sets), (unsigned)c.B);
    const size_t bytes = (size_t)(MN_STEP_HEADS * c.K) * sizeof(float);
    attention_decode_split_kernel<T, N><<<blocks, MN_STEP_THREADS, bytes,
        stream>>>(p, parts, n_partials);
    const dim3 heads((unsigned)c.H, (unsigned)c.B);
    attention_decode_combine_kernel<T><<<heads, MN_STEP_THREADS, 0, stream>>>(p, parts, n_partials);
    return mn_launch_status();
}

template <typename T>
inline int mn_decode_attn_of(const mn_attn_params &p, float *parts, cudaStream_t stream) {
    constexpr int N = mn_vec_width<T>();
    bool packs = p.call.K % N == 0 && p.call.V % N == 0;
    for (const mn_in *view : { &p.k, &p.v }) {
        packs = packs && (uintptr_t)view->data % 16 == 0;
        for (int axis = 0; axis < 3; axis++) packs = packs && view->stride[axis] % N == 0;
    }
    if (packs) return mn_decode_attn_run<T, N>(p, parts, stream);
    return mn_decode_attn_run<T, 1>(p, parts, stream);
}

inline int mn_decode_attn(const mn_attn_params &p, float *parts, cudaStream_t stream) {
    if (p.call.dtype == MN_BF16) return mn_decode_attn_of<mn_bf16>(p, parts, stream);
    return mn_decode_attn_of<float>(p, parts, stream);
}

static mn_attn_params softmax_params(const void *args) {
    const mn_attention_args *p = (const mn_attention_args *)args;
    mn_attn_params r = {};
    r.call = p->call, r.scale = (float)p->scale, r.base = p->rope_base, r.rope = p->rope_kind;
    r.softmax = true;
    r.window = p->window < p->call.L ? p->window : 0;
    r.q = p->q, r.k = p->k, r.v = p->v, r.d_o = p->cot.o, r.o = p->o, r.lse = p->lse;
    r.dq = p->grad.q, r.dk = p->grad.k, r.dv = p->grad.v;
    return r;
}

static mn_attn_params relu_params(const void *args) {
    const mn_relu_attention_args *p = (const mn_relu_attention_args *)args;
    mn_attn_params r = {};
    r.call = p->call, r.scale = (float)p->scale, r.eps = (float)p->eps;
    r.q = p->q, r.k = p->k, r.v = p->v, r.d_o = p->cot.o, r.o = p->o;
    r.dq = p->grad.q, r.dk = p->grad.k, r.dv = p->grad.v;
    return r;
}

static bool plan_forward(mn_plan *plan, const mn_attn_params &p) {
    return mn_flash_supported(p) || mn_attn_plan(plan, p, false);
}

static int forward(const mn_attn_params &p, void *shared, void *stream) {
    if (!p.o.data && !p.lse.data) return cudaSuccess;
    if (mn_flash_supported(p)) return mn_flash_fwd(p, (cudaStream_t)stream);
    return mn_attn_run(p, false, shared, stream);
}

/* One query's window is the newest keys: the views begin there. Positions that turn count from the
 * first key, which those calls keep. */
static mn_attn_params newest(mn_attn_params p) {
    if (!p.window || !mn_decode_attn_supported(p)) return p;
    const size_t item = p.call.dtype == MN_BF16 ? 2 : 4;
    for (mn_in *view : { &p.k, &p.v }) {
        const int64_t skipped = (p.call.L - p.window) * view->stride[1];
        if (view->data) view->data = (const char *)view->data + skipped * (int64_t)item;
    }
    p.call.L = p.window;
    p.window = 0;
    return p;
}

static bool plan_step(mn_plan *plan, const mn_attn_params &all) {
    const mn_attn_params p = newest(all);
    return mn_decode_attn_supported(p) ? mn_decode_attn_plan(plan, p) : plan_forward(plan, p);
}

static int step(const mn_attn_params &all, void *shared, void *stream) {
    const mn_attn_params p = newest(all);
    if (!p.o.data && !p.lse.data) return cudaSuccess;
    if (!mn_decode_attn_supported(p)) return forward(p, shared, stream);
    return mn_decode_attn(p, (float *)shared, (cudaStream_t)stream);
}

static bool plan_backward(mn_plan *plan, const mn_attn_params &p) {
    if (mn_single_pass_supported(p)) return mn_single_pass_plan(plan, p);
    return mn_flash_bwd_supported(p) ? mn_flash_bwd_plan(plan, p) : mn_attn_plan(plan, p, true);
}

static int backward(const mn_attn_params &p, void *shared, void *stream) {
    if (!mn_flash_bwd_supported(p)) return mn_attn_run(p, true, shared, stream);
    if (mn_single_pass_supported(p)) return mn_single_pass_bwd(p, (float *)shared,
                                                               (cudaStream_t)stream);
    return mn_flash_bwd(p, (float *)shared, (cudaStream_t)stream);
}

MN_CUDA_PLAN(attention_forward) {
    return plan_forward(plan, softmax_params(args));
}

MN_CUDA_LAUNCH(attention_forward) {
    return forward(softmax_params(args), shared, stream);
}

MN_CUDA_PLAN(attention_backward) {
    return plan_backward(plan, softmax_params(args));
}

MN_CUDA_LAUNCH(attention_backward) {
    return backward(softmax_params(args), shared, stream);
}

MN_CUDA_PLAN(relu_attention_forward) {
    return plan_forward(plan, relu_params(args));
}

MN_CUDA_LAUNCH(relu_attention_forward) {
    return forward(relu_params(args), shared, stream);
}

MN_CUDA_PLAN(relu_attention_backward) {
    return plan_backward(plan, relu_params(args));
}

MN_CUDA_LAUNCH(relu_attention_backward) {
    return backward(relu_params(args), shared, stream);
}

MN_CUDA_PLAN(attention_step) {
    return plan_step(plan, softmax_params(args));
}

MN_CUDA_LAUNCH(attention_step) {
    return step(softmax_params(args), shared, stream);
}

MN_CUDA_PLAN(relu_attention_step) {
    return plan_step(plan, relu_params(args));
}

MN_CUDA_LAUNCH(relu_attention_step) {
    return step(relu_params(args), shared, stream);
}

}    // namespace mneme::attention
