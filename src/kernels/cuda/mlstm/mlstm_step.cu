/* mlstm_step.cu - one token of mLSTM (see mlstm.cu), states in place: a block has a memory, a
 * thread four neighbouring columns in every 16th row. The normaliser and the stabiliser belong to
 * all columns, so that no other block may have written them before. */
#include "kernels/cuda/prim/pdl.cuh"
#include "kernels/cuda/mlstm/mlstm.cuh"

namespace mneme::mlstm {

/* Threads with four columns each, groups of rows, rows that a thread loads at once. */
enum { STEP_QUADS = 32, STEP_GROUPS = 16, STEP_ROWS = 8, STEP_THREADS = STEP_QUADS * STEP_GROUPS };

struct step_gates {
    float f, w, m;
};

template <typename T>
__device__ static step_gates step_gates_of(const mn_mlstm_args &p, int64_t n, int64_t h) {
    const float *first = mn_row<float>(p.m0, n, 0, h);
    const float in = mn_float(*mn_row<T>(p.ipre, n, 0, h));
    const float fall = mn_log_sigmoid(mn_float(*mn_row<T>(p.fpre, n, 0, h)));
    const double decayed = (double)fall + (first ? (double)*first : -INFINITY);
    const double next = fmax(decayed, (double)in);
    const float f = decayed == -INFINITY ? 0.0f : expf((float)(decayed - next));
    const float w = in == -INFINITY ? 0.0f : expf((float)((double)in - next));
    return { f, w, (float)next };
}

/* Sums of `local` over the groups of rows, for the thread's four columns; all threads call. */
__device__ static void reduce_columns(float (&local)[4], float4 (*smem)[STEP_QUADS]) {
    const int quad = threadIdx.x % STEP_QUADS;
    smem[threadIdx.x / STEP_QUADS][quad] = make_float4(local[0], local[1], local[2], local[3]);
    __syncthreads();
    local[0] = local[1] = local[2] = local[3] = 0.0f;
#pragma unroll
    for (int group = 0; group < STEP_GROUPS; group++) {
        const float4 x = smem[group][quad];
        local[0] += x.x, local[1] += x.y, local[2] += x.z, local[3] += x.w;
    }
    __syncthreads();
}

template <typename T>
__global__ void __launch_bounds__(STEP_THREADS)
mlstm_step_recurrent(const __grid_constant__ mn_mlstm_args p) {
    __shared__ float4 smem[STEP_GROUPS][STEP_QUADS];
    __shared__ float sums[32];
    const int64_t h = blockIdx.x % p.call.H, n = blockIdx.x / p.call.H, K = p.call.K, V = p.call.V;
    const int group = threadIdx.x / STEP_QUADS, column0 = threadIdx.x % STEP_QUADS * 4;
    const T *q = mn_row<T>(p.q, n, 0, h), *k = mn_row<T>(p.k, n, 0, h);
    const T *v = mn_row<T>(p.v, n, 0, h);
    const float *C0 = mn_row<float>(p.C0, n, 0, h), *ones0 = mn_row<float>(p.n0, n, 0, h);
    float *C = mn_row<float>(p.C, n, 0, h), *ones = mn_row<float>(p.n, n, 0, h);
    float *m = mn_row<float>(p.m, n, 0, h), a = 0.0f;
    T *o = mn_row<T>(p.o, n, 0, h);
    mn_pdl_launch_dependents();
    mn_pdl_wait();
    const step_gates g = step_gates_of<T>(p, n, h);
    for (int64_t i = threadIdx.x; i < K; i += STEP_THREADS) {
        const float x = fmaf(g.f, mn_get(ones0, i), g.w * mn_float(k[i]));
        if (ones) ones[i] = x;
        a = fmaf(x, mn_float(q[i]), a);
    }
    a = (float)p.scale * mn_group_sum<STEP_THREADS>(a, sums);    // all have seen the first m
    if (m && threadIdx.x == 0) *m = g.m;
    const float den = mn_fmax(fabsf(a), expf(-g.m));
    for (int64_t first = 0; first < V; first += 4 * STEP_QUADS) {
        const int64_t j = first + column0;
        float value[4] = {}, read[4] = {};
        if (j < V) mn_load<4>(value, v, j);
        for (int64_t i0 = group; i0 < K && j < V; i0 += STEP_GROUPS * STEP_ROWS) {
            float S[STEP_ROWS][4];
#pragma unroll
            for (int r = 0; r < STEP_ROWS; r++) {
                const int64_t i = i0 + r * STEP_GROUPS;
                mn_load<4>(S[r], i < K ? C0 : nullptr, i * V + j);
            }
#pragma unroll
            for (int r = 0; r < STEP_ROWS; r++) {
                const int64_t i = i0 + r * STEP_GROUPS;
                if (i >= K) break;
                const float write = g.w * mn_float(k[i]), query = mn_float(q[i]);
#pragma unroll
                for (int c = 0; c < 4; c++) {
                    S[r][c] = fmaf(write, value[c], g.f * S[r][c]);
                    read[c] = fmaf(query, S[r][c], read[c]);
                }
                if (C) mn_store<4>(C, i * V + j, S[r]);
            }
        }
        reduce_columns(read, smem);
        if (group > 0 || j >= V || !o) continue;
#pragma unroll
        for (int c = 0; c < 4; c++) {
            read[c] = den == 0.0f ? 0.0f : (float)p.scale * read[c] / den;
        }
        mn_store<4>(o, j, read);
    }
}

/* Whether rows of the view can be read four numbers at a time. */
template <typename View>
static bool is_vec4_aligned(const View &view, size_t each) {
    bool even = (uintptr_t)view.data % (4 * each) == 0;
    for (int i = 0; i < 3; i++) even = even && view.stride[i] % 4 == 0;
    return even;
}

static bool serves(const mn_mlstm_args *p) {
    const size_t each = p->call.dtype == MN_BF16 ? sizeof(mn_bf16) : sizeof(float);
    return p->call.V % 4 == 0 && is_vec4_aligned(p->v, each) && is_vec4_aligned(p->o, each) &&
           is_vec4_aligned(p->C0, sizeof(float)) && is_vec4_aligned(p->C, sizeof(float))
               && !p->csum.data &&
           !p->nsum.data;
}

MN_CUDA_PLAN(mlstm_forward);
MN_CUDA_LAUNCH(mlstm_forward);

MN_CUDA_PLAN(mlstm_step) {
    return serves((const mn_mlstm_args *)args) ? true : mn_mlstm_forward_cuda_plan(args, plan);
}

MN_CUDA_LAUNCH(mlstm_step) {
    const mn_mlstm_args *p = (const mn_mlstm_args *)args;
    const int64_t blocks = p->call.B * p->call.H;
    if (!serves(p)) return mn_mlstm_forward_cuda(args, shared, stream);
    if (blocks == 0) return cudaSuccess;
    if (blocks > INT32_MAX) return cudaErrorNotSupported;
    return mn_launch_pdl(p->call.dtype == MN_BF16 ? mlstm_step_recurrent<mn_bf16>
                                                    : mlstm_step_recurrent<float>,
                           dim3((unsigned)blocks), STEP_THREADS, 0, (cudaStream_t)stream, *p);
}

}    // namespace mneme::mlstm
