/* attention_step.cu - one query of each head against a cache of keys (attention_step.cuh): the
 * operators' steps, and the token of a step that repeats where no megakernel takes it. */
#include "kernels/cuda/attention/attention_step.cuh"

namespace mneme::attention {

MN_CUDA_PLAN(attention_forward);
MN_CUDA_LAUNCH(attention_forward);
MN_CUDA_PLAN(relu_attention_forward);
MN_CUDA_LAUNCH(relu_attention_forward);

enum { MAX_K = 2048, AT_ONCE = 4 };    // queries are in shared memory; keys of a thread group

/* Both operators. */
struct step_params {
    mn_call call;
    float scale, eps;
    bool softmax, served;
    mn_in q, k, v;
    mn_out o, lse;
};

static int64_t n_parts_of(const mn_call &call) {
    return mn_ceil_div(call.L, (int64_t)MN_STEP_KEYS);
}

/* Grid: (n_parts, J * sets, B); block: 256 keys of key head j, up to HEADS of its query heads.
 * Loads   q (HEADS,K), k (256,K), v (256,V).
 * Stores  parts (B, H, n_parts, V + 2). */
template <typename T, int N, int HEADS>
__global__ void __launch_bounds__(MN_STEP_THREADS)
attention_step_split_kernel(const __grid_constant__ step_params p, float *parts, int64_t n_parts) {
    extern __shared__ __align__(16) unsigned char bytes[];
    mn_step_smem<N> &smem = *(mn_step_smem<N> *)bytes;
    const int64_t group = p.call.H / p.call.J, sets = (group + HEADS - 1) / HEADS;
    const int64_t part = blockIdx.x, j = blockIdx.y / sets, b = blockIdx.z;
    const int64_t first = j * group + blockIdx.y % sets * HEADS;
    const int64_t key0 = part * MN_STEP_KEYS, K = p.call.K, V = p.call.V;
    const mn_step_sizes sizes = { (int)K, (int)V,
                                  (int)min((int64_t)HEADS, (j + 1) * group - first),
                                  (int)min((int64_t)MN_STEP_KEYS, p.call.L - key0), p.scale,
                                  p.softmax };
    for (int64_t i = threadIdx.x; i < HEADS * K; i += MN_STEP_THREADS) {
        const int h = (int)(i / K);
        smem.q[i] = h < sizes.n_heads ? mn_float(mn_row<T>(p.q, b, 0, first + h)[i % K]) : 0.0f;
    }
    const mn_step_rows<T> keys = { mn_row<T>(p.k, b, key0, j), p.k.stride[1] };
    const mn_step_rows<T> values = { mn_row<T>(p.v, b, key0, j), p.v.stride[1] };
    mn_step_part<T, N, AT_ONCE, HEADS, mn_cta<MN_STEP_THREADS>>(
        smem, keys, values, sizes, parts + ((b * p.call.H + first) * n_parts + part) * (V + 2),
        n_parts * (V + 2));
}

/* Grid: (H, B). Stores o (B,1,H,V), and lse (B,1,H) where given. */
template <typename T>
__global__ void __launch_bounds__(MN_STEP_THREADS)
attention_step_combine_kernel(const __grid_constant__ step_params p, const float *parts,
                              int64_t n_parts) {
    __shared__ float warps[MN_STEP_WARPS];
    const int64_t h = blockIdx.x, b = blockIdx.y, V = p.call.V;
    mn_step_combine<T, mn_cta<MN_STEP_THREADS>>(
        parts + (b * p.call.H + h) * n_parts * (V + 2), n_parts, V, p.softmax, p.eps,
        mn_row<T>(p.o, b, 0, h), mn_row<float>(p.lse, b, 0, h), warps);
}

static bool plan(mn_plan *plan, const step_params &p) {
    int64_t count;
    return mn_mul_i64(&count, p.call.B * p.call.H, n_parts_of(p.call)) &&
           mn_mul_i64(&count, count, p.call.V + 2) &&
           mn_mul_size(&plan->shared_bytes, (size_t)count, sizeof(float));
}

template <typename T, int N>
static int run(const step_params &p, float *parts, cudaStream_t stream) {
    const mn_call &c = p.call;
    const int64_t n_parts = n_parts_of(c);
    const int64_t sets = mn_ceil_div(c.H / c.J, (int64_t)MN_STEP_HEADS);
    const dim3 blocks((unsigned)n_parts, (unsigned)(c.J * sets), (unsigned)c.B);
    const size_t bytes = mn_step_smem<N>::bytes(c.K);
    const auto split = c.H == c.J ? attention_step_split_kernel<T, N, 1>
                                  : attention_step_split_kernel<T, N, MN_STEP_HEADS>;
    split<<<blocks, MN_STEP_THREADS, bytes, stream>>>(p, parts, n_parts);
    const dim3 heads((unsigned)c.H, (unsigned)c.B);
    attention_step_combine_kernel<T><<<heads, MN_STEP_THREADS, 0, stream>>>(p, parts, n_parts);
    return mn_launch_status();
}

template <typename T>
static int run_of(const step_params &p, float *parts, cudaStream_t stream) {
    constexpr int N = mn_vec_width<T>();
    bool packs = p.call.K % N == 0 && p.call.V % N == 0;
    for (const mn_in *view : { &p.k, &p.v }) {
        packs = packs && (uintptr_t)view->data % 16 == 0;
        for (int axis = 0; axis < 3; axis++) packs = packs && view->stride[axis] % N == 0;
    }
    return packs ? run<T, N>(p, parts, stream) : run<T, 1>(p, parts, stream);
}

static int step(const step_params &p, void *shared, void *stream) {
    if (!p.o.data && !p.lse.data) return cudaSuccess;
    if (p.call.dtype == MN_BF16) return run_of<mn_bf16>(p, (float *)shared, (cudaStream_t)stream);
    return run_of<float>(p, (float *)shared, (cudaStream_t)stream);
}

static bool serves(const mn_call &c) {
    return c.K <= MAX_K && c.H <= 65535 && c.B <= 65535;
}

/* One query's window is the newest keys: the views begin there. Positions that turn count from the
 * first key, which calls that are not served keep. */
static step_params softmax_params(const void *args) {
    const mn_attention_args *p = (const mn_attention_args *)args;
    step_params r = {};
    r.call = p->call, r.scale = (float)p->scale, r.softmax = true;
    r.served = p->rope_kind == 0 && serves(p->call);
    r.q = p->q, r.k = p->k, r.v = p->v, r.o = p->o, r.lse = p->lse;
    if (p->window <= 0 || p->window >= p->call.L) return r;
    const size_t item = p->call.dtype == MN_BF16 ? 2 : 4;
    for (mn_in *view : { &r.k, &r.v }) {
        const int64_t skipped = (r.call.L - p->window) * view->stride[1];
        if (view->data) view->data = (const char *)view->data + skipped * (int64_t)item;
    }
    r.call.L = p->window;
    return r;
}

static step_params relu_params(const void *args) {
    const mn_relu_attention_args *p = (const mn_relu_attention_args *)args;
    step_params r = {};
    r.call = p->call, r.scale = (float)p->scale, r.eps = (float)p->eps, r.served = serves(p->call);
    r.q = p->q, r.k = p->k, r.v = p->v, r.o = p->o;
    return r;
}

MN_CUDA_PLAN(attention_step) {
    const step_params p = softmax_params(args);
    return p.served ? attention::plan(plan, p) : mn_attention_forward_cuda_plan(args, plan);
}

MN_CUDA_LAUNCH(attention_step) {
    const step_params p = softmax_params(args);
    return p.served ? step(p, shared, stream) : mn_attention_forward_cuda(args, shared, stream);
}

MN_CUDA_PLAN(relu_attention_step) {
    const step_params p = relu_params(args);
    return p.served ? attention::plan(plan, p) : mn_relu_attention_forward_cuda_plan(args, plan);
}

MN_CUDA_LAUNCH(relu_attention_step) {
    const step_params p = relu_params(args);
    return p.served ? step(p, shared, stream)
                    : mn_relu_attention_forward_cuda(args, shared, stream);
}

/* ---- a token of a step that repeats ---------------------------------------------------------- */

/* Grid: (n_slots, J). Stores parts, and the token's key and value. */
template <typename T, int N>
__global__ void __launch_bounds__(MN_STEP_THREADS)
attend_split_kernel(const __grid_constant__ mn_decode_attention p) {
    extern __shared__ __align__(16) unsigned char bytes[];
    const mn_attend_token<T> token(p, blockIdx.y);
    mn_attend_piece<T, N, mn_cta<MN_STEP_THREADS>>(p, blockIdx.y, blockIdx.x, gridDim.x, token,
                                                   bytes);
}

/* Grid: (H). Stores o. */
template <typename T>
__global__ void __launch_bounds__(MN_STEP_THREADS)
attend_combine_kernel(const __grid_constant__ mn_decode_attention p) {
    __shared__ __align__(16) unsigned char bytes[MN_STEP_WARPS * sizeof(float)];
    mn_attend_combine<T, mn_cta<MN_STEP_THREADS>>(p, blockIdx.x, bytes);
}

template <typename T, int N>
static int attend(const mn_decode_attention &p, cudaStream_t stream) {
    const dim3 pieces((unsigned)mn_min(p.n_parts, (int64_t)1024), (unsigned)p.J);
    const size_t bytes = mn_attend_smem<N>::bytes(p.K);
    attend_split_kernel<T, N><<<pieces, MN_STEP_THREADS, bytes, stream>>>(p);
    attend_combine_kernel<T><<<(unsigned)p.H, MN_STEP_THREADS, 0, stream>>>(p);
    return mn_launch_status();
}

template <typename T>
static int attend_of(const mn_decode_attention &p, cudaStream_t stream) {
    constexpr int N = mn_vec_width<T>();
    const bool packs = p.K % N == 0 && p.V % N == 0 && (uintptr_t)p.keys % 16 == 0 &&
                       (uintptr_t)p.values % 16 == 0;
    return packs ? attend<T, N>(p, stream) : attend<T, 1>(p, stream);
}

extern "C" int mn_decode_run_attention(const mn_decode_attention *p, void *stream) {
    if (p->dtype == MN_BF16) return attend_of<mn_bf16>(*p, (cudaStream_t)stream);
    return attend_of<float>(*p, (cudaStream_t)stream);
}

}    // namespace mneme::attention
