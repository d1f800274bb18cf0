/* importance_step.cu - one token of Palimpsa (see ref/importance.c), states in place.
 *
 *   I = a I + (1 - a) ip + k^2 b'     mu = (a I mu + k v') / I     o = scale mu'q
 *   ovar_j = scale^2 sum_i q_i^2 / I_ij                            a = exp g
 *
 * A block has a memory, a thread four neighbouring columns in every 16th row. */
#include "kernels/cuda/prim/pdl.cuh"
#include "kernels/cuda/importance/importance.cuh"

namespace mneme::importance {

MN_CUDA_PLAN(importance_forward);
MN_CUDA_LAUNCH(importance_forward);

/* Threads with four columns each, groups of rows, rows that a thread loads at once. */
enum { STEP_QUADS = 32, STEP_GROUPS = 16, STEP_ROWS = 4, STEP_THREADS = STEP_QUADS * STEP_GROUPS };

typedef float4 step_smem[STEP_GROUPS][STEP_QUADS];

/* Sums over the groups of rows, for the thread's four columns, in the first group. All call.
 * */
__device__ static void reduce_columns(float (&sum)[4], step_smem &smem) {
    const int quad = threadIdx.x % STEP_QUADS;
    smem[threadIdx.x / STEP_QUADS][quad] = make_float4(sum[0], sum[1], sum[2], sum[3]);
    __syncthreads();
    if (threadIdx.x < STEP_QUADS) {
#pragma unroll
        for (int group = 1; group < STEP_GROUPS; group++) {
            const float4 x = smem[group][quad];
            sum[0] += x.x, sum[1] += x.y, sum[2] += x.z, sum[3] += x.w;
        }
    }
    __syncthreads();
}

/* What the token adds to its rows: a and (1 - a) ip; NULL where a state is absent. */
struct step_states {
    const float *mu0, *imp0;
    float *mu, *imp;
    float a, fresh, ip;
};

/* Rows i0, i0 + 16, ... of columns j to j + 3; adds to what o and ovar read. */
template <typename T>
__device__ static void step_rows(float (&mean)[4], float (&spread)[4], const step_states &s,
                                 const T *q, const T *k, const float (&v)[4], const float (&b)[4],
                                 int64_t i0, int64_t j, int64_t K, int64_t V) {
    float mu[STEP_ROWS][4], imp[STEP_ROWS][4];
#pragma unroll
    for (int r = 0; r < STEP_ROWS; r++) {
        const int64_t i = i0 + r * STEP_GROUPS;
        mn_load<4>(mu[r], i < K ? s.mu0 : nullptr, i * V + j);
        mn_load<4>(imp[r], i < K ? s.imp0 : nullptr, i * V + j);
    }
#pragma unroll
    for (int r = 0; r < STEP_ROWS; r++) {
        const int64_t i = i0 + r * STEP_GROUPS;
        if (i >= K) break;
        const float key = mn_float(k[i]), query = mn_float(q[i]);
#pragma unroll
        for (int c = 0; c < 4; c++) {
            const float kept = s.a * (s.imp0 ? imp[r][c] : s.ip);
            const float I = fmaf(key * key, b[c], kept + s.fresh) + min_importance;
            const float inverse = 1.0f / I;
            mu[r][c] = fmaf(key, v[c], kept * mu[r][c]) * inverse, imp[r][c] = I;
            mean[c] = fmaf(query, mu[r][c], mean[c]);
            spread[c] = fmaf(query * query, inverse, spread[c]);
        }
        if (s.mu) mn_store<4>(s.mu, i * V + j, mu[r]);
        if (s.imp) mn_store<4>(s.imp, i * V + j, imp[r]);
    }
}

template <typename T>
__global__ void __launch_bounds__(STEP_THREADS)
importance_step_kernel(const __grid_constant__ mn_importance_args p) {
    __shared__ step_smem smem;
    const int64_t h = blockIdx.x % p.call.H, n = blockIdx.x / p.call.H, K = p.call.K, V = p.call.V;
    const int group = threadIdx.x / STEP_QUADS, column0 = threadIdx.x % STEP_QUADS * 4;
    const float scale = (float)p.scale;
    T *o = mn_row<T>(p.o, n, 0, h), *ovar = mn_row<T>(p.ovar, n, 0, h);
    mn_pdl_launch_dependents();
    mn_pdl_wait();
    const float g = *mn_row<float>(p.g, n, 0, h), ip = *mn_row<float>(p.ip, 0, 0, h);
    const step_states s = { mn_row<float>(p.mu0, n, 0, h), mn_row<float>(p.imp0, n, 0, h),
                            mn_row<float>(p.mu, n, 0, h), mn_row<float>(p.imp, n, 0, h),
                            expf(g), -expm1f(g) * ip, ip };
    for (int64_t first = 0; first < V; first += 4 * STEP_QUADS) {
        const int64_t j = first + column0;
        float v[4] = {}, b[4] = {}, mean[4] = {}, spread[4] = {};
        if (j < V) {
            mn_load<4>(v, mn_row<T>(p.v, n, 0, h), j);
            mn_load<4>(b, mn_row<T>(p.b, n, 0, h), j);
        }
        for (int64_t i = group; i < K && j < V; i += STEP_GROUPS * STEP_ROWS) {
            step_rows<T>(mean, spread, s, mn_row<T>(p.q, n, 0, h), mn_row<T>(p.k, n, 0, h), v, b, i,
                         j, K, V);
        }
        reduce_columns(mean, smem);
        if (ovar) reduce_columns(spread, smem);
        if (group > 0 || j >= V) continue;
#pragma unroll
        for (int c = 0; c < 4; c++) mean[c] *= scale, spread[c] *= scale * scale;
        if (o) mn_store<4>(o, j, mean);
        if (ovar) mn_store<4>(ovar, j, spread);
    }
}

/* Whether rows of the view can be read four numbers at a time. */
template <typename View>
static bool is_vec4_aligned(const View &view, size_t each) {
    bool even = (uintptr_t)view.data % (4 * each) == 0;
    for (int i = 0; i < 3; i++) even = even && view.stride[i] % 4 == 0;
    return even;
}

static bool step_supported(const mn_importance_args *p) {
    const size_t each = p->call.dtype == MN_BF16 ? sizeof(mn_bf16) : sizeof(float);
    return p->call.V % 4 == 0 && is_vec4_aligned(p->v, each) && is_vec4_aligned(p->b, each) &&
           is_vec4_aligned(p->o, each) && is_vec4_aligned(p->ovar, each)
               && is_vec4_aligned(p->mu0, sizeof(float)) &&
           is_vec4_aligned(p->imp0, sizeof(float)) && is_vec4_aligned(p->mu, sizeof(float)) &&
           is_vec4_aligned(p->imp, sizeof(float));
}

MN_CUDA_PLAN(importance_step) {
    const mn_importance_args *p = (const mn_importance_args *)args;
    return importance::step_supported(p) ? true : mn_importance_forward_cuda_plan(args, plan);
}

MN_CUDA_LAUNCH(importance_step) {
    const mn_importance_args *p = (const mn_importance_args *)args;
    const int64_t blocks = p->call.B * p->call.H;
    if (!importance::step_supported(p)) return mn_importance_forward_cuda(args, shared, stream);
    if (blocks == 0) return cudaSuccess;
    if (blocks > INT32_MAX) return cudaErrorNotSupported;
    return mn_launch_pdl(p->call.dtype == MN_BF16 ? importance::importance_step_kernel<mn_bf16>
                                                    : importance::importance_step_kernel<float>,
                           dim3((unsigned)blocks), importance::STEP_THREADS, 0,
                           (cudaStream_t)stream, *p);
}

}    // namespace mneme::importance
