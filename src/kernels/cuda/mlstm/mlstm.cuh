/* mlstm.cuh - the parts of mlstm: the gates of all tokens, first and last states, and which calls
 * go over chunks (mlstm_chunk.cu); the others are the recurrence of mlstm.cu. */
#ifndef MN_KERNELS_CUDA_MLSTM_MLSTM_CUH
#define MN_KERNELS_CUDA_MLSTM_MLSTM_CUH

#include "kernels/cuda/prim/common.cuh"
#include "kernels/cuda/prim/fmax.cuh"

namespace mneme::mlstm {

/* States at the end or, going back, the cotangents of their sums in units of exp(-m), and the
 * gradients of the first ones: (N,H,K,V) and (N,H,K). `last`: m at the end, (N,H). */
struct mn_mlstm_states {
    float *state, *ones, *last, *dstate0, *dones0;
};

/* Whether a call goes over chunks, by its kind and sizes, never its length. */
bool mn_mlstm_uses_chunks(const mn_mlstm_args *p, bool backward);
bool mn_mlstm_chunk_plan(const mn_mlstm_args *p, bool backward, mn_plan *plan);
int mn_mlstm_chunk_run(const mn_mlstm_args *p, void *shared, bool backward, cudaStream_t stream);

/* ---- gates ----------------------------------------------------------------------------------- */

enum { MN_GATE_THREADS = 256, MN_GATE_TOKENS = 4, MN_GATE_TILE = MN_GATE_THREADS * MN_GATE_TOKENS };

/* What some tokens do to the stabiliser: m <- max(m + fall, most). */
struct mn_mlstm_maxplus {
    double fall, most;
};

/* The larger of two, and NaN where one is. */
__device__ inline double mn_mlstm_max(double x, double y) {
    return x > y || x != x ? x : y;
}

__device__ inline mn_mlstm_maxplus mn_mlstm_compose(const mn_mlstm_maxplus &a,
                                                    const mn_mlstm_maxplus &b) {
    return { a.fall + b.fall, mn_mlstm_max(a.most + b.fall, b.most) };
}

__device__ inline float mn_log_sigmoid(float x) {
    return fminf(x, 0.0f) - log1pf(expf(-fabsf(x)));
}

/* The map of all threads before this one; `whole` becomes that of the block. All call. */
__device__ inline mn_mlstm_maxplus mn_mlstm_exclusive_scan(mn_mlstm_maxplus own,
                                                           mn_mlstm_maxplus &whole,
                                                    mn_mlstm_maxplus *smem) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const mn_mlstm_maxplus none = { 0.0, -INFINITY };
    for (int step = 1; step < 32; step <<= 1) {
        const mn_mlstm_maxplus other = { __shfl_up_sync(0xffffffffu, own.fall, step),
                                     __shfl_up_sync(0xffffffffu, own.most, step) };
        if (lane >= step) own = mn_mlstm_compose(other, own);
    }
    mn_mlstm_maxplus before = { __shfl_up_sync(0xffffffffu, own.fall, 1),
                            __shfl_up_sync(0xffffffffu, own.most, 1) };
    if (lane == 0) before = none;
    __syncthreads();
    if (lane == 31) smem[warp] = own;
    __syncthreads();
    whole = none;
    mn_mlstm_maxplus warps = none;
    for (int i = 0; i < MN_GATE_THREADS / 32; i++) {
        if (i == warp) warps = whole;
        whole = mn_mlstm_compose(whole, smem[i]);
    }
    return mn_mlstm_compose(warps, before);
}

/* f, w and m of all tokens, rows of all heads; or LOGS, the log2 of f and w, by heads: (H, B T). A
 * block has a head of a sequence. A gate that is 0 has the log -1000, of which nothing is left. */
template <typename T, bool LOGS>
__global__ void __launch_bounds__(MN_GATE_THREADS)
mlstm_gates(const __grid_constant__ mn_mlstm_args p, float *f, float *w, float *m_of,
                      float *last) {
    __shared__ mn_mlstm_maxplus smem[MN_GATE_THREADS / 32];
    const float unit = 1.44269504f;
    const int64_t n = blockIdx.x / p.call.H, h = blockIdx.x % p.call.H;
    const mn_span span = mn_span_at(p.call, n);
    const float *first = mn_row<float>(p.m0, n, 0, h);
    double carried = first ? (double)*first : -INFINITY;
    for (int64_t t0 = 0; t0 < span.length; t0 += MN_GATE_TILE) {
        const int64_t t = t0 + threadIdx.x * MN_GATE_TOKENS;
        float fall[MN_GATE_TOKENS], in[MN_GATE_TOKENS];
        mn_mlstm_maxplus own = { 0.0, -INFINITY }, whole;
#pragma unroll
        for (int i = 0; i < MN_GATE_TOKENS; i++) {
            fall[i] = 0.0f, in[i] = -INFINITY;
            if (t + i >= span.length) continue;
            in[i] = mn_float(*mn_row<T>(p.ipre, span.b, span.t0 + t + i, h));
            fall[i] = mn_log_sigmoid(mn_float(*mn_row<T>(p.fpre, span.b, span.t0 + t + i, h)));
            if (fall[i] < -1e5f) fall[i] = -1e5f;    // NaN stays
            own = mn_mlstm_compose(own, { (double)fall[i], (double)in[i] });
        }
        const mn_mlstm_maxplus before = mn_mlstm_exclusive_scan(own, whole, smem);
        double m = mn_mlstm_max(carried + before.fall, before.most);
        carried = mn_mlstm_max(carried + whole.fall, whole.most);
#pragma unroll
        for (int i = 0; i < MN_GATE_TOKENS; i++) {
            if (t + i >= span.length) break;
            const int64_t token = span.b * p.call.T + span.t0 + t + i;
            const int64_t to = LOGS ? h * p.call.B * p.call.T + token : token * p.call.H + h;
            const double decayed = (double)fall[i] + m, next = mn_mlstm_max(decayed, (double)in[i]);
            const float log_f = decayed == -INFINITY ? -1000.0f : (float)(decayed - next);
            const float log_w = in[i] == -INFINITY ? -1000.0f : (float)((double)in[i] - next);
            f[to] = LOGS ? mn_fmax(unit * log_f, -1000.0f) : expf(log_f);
            w[to] = LOGS ? mn_fmax(unit * log_w, -1000.0f) : expf(log_w);
            m_of[to] = (float)next;
            m = next;
        }
    }
    if (threadIdx.x == 0) last[blockIdx.x] = (float)carried;
}

/* ---- states ---------------------------------------------------------------------------------- */

/* What is asked of the states at the end, or the cotangents of their sums in units of exp(-m). */
static __global__ void __launch_bounds__(256)
mlstm_store_states(const __grid_constant__ mn_mlstm_args p, mn_mlstm_states s, bool backward) {
    const int64_t K = p.call.K, V = p.call.V, size = K * (V + 1);
    const int64_t at = blockIdx.x * (int64_t)256 + threadIdx.x;
    if (at >= size * p.call.H * mn_n_spans(p.call)) return;
    const int64_t head = at / size, i = at % size / (V + 1), j = at % size % (V + 1);
    const int64_t cell = (head * K + i) * V + j, row = head * K + i;
    const float m = s.last[head], unit = expf(m);
    if (backward) {
        const float *sum = j < V ? (const float *)p.cot.csum.data : (const float *)p.cot.nsum.data;
        const float x = mn_get(sum, j < V ? cell : row);
        if (j < V) s.state[cell] = x == 0.0f ? 0.0f : x * unit;
        else s.ones[row] = x == 0.0f ? 0.0f : x * unit;
        return;
    }
    const float x = j < V ? s.state[cell] : s.ones[row];
    float *to = j < V ? (float *)p.C.data : (float *)p.n.data;
    float *sum = j < V ? (float *)p.csum.data : (float *)p.nsum.data;
    if (to) to[j < V ? cell : row] = x;
    if (sum) sum[j < V ? cell : row] = x * unit;
    if (p.m.data && at % size == 0) ((float *)p.m.data)[head] = m;
}

/* The gradients of the first states; dm0 is their product with them. A block has a head. */
static __global__ void __launch_bounds__(256)
mlstm_state0_grads(const __grid_constant__ mn_mlstm_args p, mn_mlstm_states s) {
    __shared__ float smem[32];
    const int64_t head = blockIdx.x, K = p.call.K, KV = K * p.call.V;
    float sum = 0.0f;
    for (int64_t i = threadIdx.x; i < KV + K; i += 256) {
        const int64_t at = i < KV ? head * KV + i : head * K + i - KV;
        const float d = i < KV ? s.dstate0[at] : s.dones0[at];
        float *to = i < KV ? (float *)p.grad.C0.data : (float *)p.grad.n0.data;
        const float *first = i < KV ? (const float *)p.C0.data : (const float *)p.n0.data;
        if (to) to[at] = d;
        sum = fmaf(d, mn_get(first, at), sum);
    }
    sum = mn_group_sum<256>(sum, smem);
    if (threadIdx.x == 0 && p.grad.m0.data) ((float *)p.grad.m0.data)[head] = sum;
}

inline bool mn_mlstm_wants_states(const mn_mlstm_args *p, bool backward) {
    if (backward) return p->cot.csum.data || p->cot.nsum.data;
    return p->C.data || p->n.data || p->m.data || p->csum.data || p->nsum.data;
}

/* Either of them for (N,H) heads. */
inline int mn_mlstm_store_states(const mn_mlstm_args *p, const mn_mlstm_states &s, int64_t heads,
                               bool backward, cudaStream_t on) {
    const int64_t count = heads * p->call.K * (p->call.V + 1);
    mlstm_store_states<<<mn_blocks(count, 256), 256, 0, on>>>(*p, s, backward);
    return mn_launch_status();
}

inline int mn_mlstm_store_state0_grads(const mn_mlstm_args *p, const mn_mlstm_states &s,
                                       int64_t heads,
                              cudaStream_t on) {
    mlstm_state0_grads<<<(unsigned)heads, 256, 0, on>>>(*p, s);
    return mn_launch_status();
}

}    // namespace mneme::mlstm

#endif
