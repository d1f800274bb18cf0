/* hyper_step.cu - one query of each head against a cache of keys (hyper_step.cuh): the operator's
 * step, and the token of a step that repeats where no megakernel takes it. */
#include "kernels/cuda/hyper/hyper_step.cuh"

namespace mneme::hyper {

MN_CUDA_PLAN(hyper_forward);
MN_CUDA_LAUNCH(hyper_forward);

enum { STEP_MOST_SLOTS = 1024, STEP_MAX_K = 2048 };    // queries are in shared memory

/* A batch of `n`: how many numbers its rows lie apart. */
struct step_batch {
    int64_t n, q, gv, keys, values, o, c[2], scores, mixed, parts;
};

template <typename T>
__device__ static mn_decode_hyper row_of(const mn_decode_hyper &p, const step_batch &rows,
                                         int64_t b) {
    mn_decode_hyper r = p;
    r.q = (const T *)p.q + b * rows.q, r.gv = p.gv ? (const T *)p.gv + b * rows.gv : nullptr;
    r.keys = (T *)p.keys + b * rows.keys, r.values = (T *)p.values + b * rows.values;
    r.o = (T *)p.o + b * rows.o;
    for (int i = 0; i < 2; i++) r.mix[i].c = (const T *)p.mix[i].c + b * rows.c[i];
    r.scores += b * rows.scores, r.mixed += b * rows.mixed, r.parts += b * rows.parts;
    return r;
}

/* Grid: (n_slots, branches or heads, rows). Loads and stores what the phase does. */
template <typename T, int N, int PHASE>
__global__ void __launch_bounds__(MN_STEP_THREADS)
hyper_step_kernel(const __grid_constant__ mn_decode_hyper p,
                  const __grid_constant__ step_batch rows) {
    extern __shared__ __align__(16) unsigned char bytes[];
    const mn_decode_hyper row = row_of<T>(p, rows, blockIdx.z);
    step_piece<T, N, mn_cta<MN_STEP_THREADS>>(row, PHASE, blockIdx.y, blockIdx.x, gridDim.x,
                                              bytes);
}

template <typename T, int N, int PHASE>
static void launch_phase(const mn_decode_hyper &p, const step_batch &rows, cudaStream_t stream) {
    const int64_t slots = PHASE == MN_HYPER_OUTPUT ? 1 : mn_max(p.n_parts, 1);
    const dim3 blocks((unsigned)mn_min(slots, (int64_t)STEP_MOST_SLOTS),
                      (unsigned)(PHASE == MN_HYPER_SCORES ? p.Q : p.H), (unsigned)rows.n);
    const size_t bytes = step_smem<N>::bytes(p.K, p.mix[0].R, p.mix[1].R);
    hyper_step_kernel<T, N, PHASE><<<blocks, MN_STEP_THREADS, bytes, stream>>>(p, rows);
}

template <typename T, int N>
static int launch(const mn_decode_hyper &p, const step_batch &rows, cudaStream_t stream) {
    launch_phase<T, N, MN_HYPER_SCORES>(p, rows, stream);
    launch_phase<T, N, MN_HYPER_MIX>(p, rows, stream);
    launch_phase<T, N, MN_HYPER_VALUES>(p, rows, stream);
    launch_phase<T, N, MN_HYPER_OUTPUT>(p, rows, stream);
    return mn_launch_status();
}

template <typename T>
static int launch_of(const mn_decode_hyper &p, const step_batch &rows, cudaStream_t stream) {
    constexpr int N = mn_vec_width<T>();
    bool packs = p.K % N == 0 && p.V % N == 0 && (uintptr_t)p.keys % 16 == 0 &&
                 (uintptr_t)p.values % 16 == 0;
    for (const int64_t step : { p.key_row, p.key_step, p.value_row, p.value_step, rows.keys,
                                rows.values }) {
        packs = packs && step % N == 0;
    }
    return packs ? launch<T, N>(p, rows, stream) : launch<T, 1>(p, rows, stream);
}

static int launch_any(const mn_decode_hyper &p, const step_batch &rows, void *stream) {
    if (p.dtype == MN_BF16) return launch_of<mn_bf16>(p, rows, (cudaStream_t)stream);
    return launch_of<float>(p, rows, (cudaStream_t)stream);
}

extern "C" int mn_decode_run_hyper(const mn_decode_hyper *p, void *stream) {
    step_batch one = {};
    one.n = 1;
    return launch_any(*p, one, stream);
}

/* ---- the operator's step --------------------------------------------------------------------- */

static bool serves(const mn_hyper_args *p) {
    const mn_call &c = p->call;
    return c.K <= STEP_MAX_K && c.Q <= 65535 && c.B <= 65535 &&
           (!p->U1.data || c.R <= MN_DECODE_HYPER_RANKS) &&
           (!p->U2.data || c.W <= MN_DECODE_HYPER_RANKS);
}

static mn_decode_mix mix_of(const mn_in &c, const mn_in &U, const mn_in &Vt, const mn_in &d,
                            int64_t ranks) {
    return { c.data, U.data, Vt.data, d.data, U.data ? ranks : 0,
             c.stride[2], U.stride[2], Vt.stride[2], d.stride[2] };
}

/* Of the first row, but for where its sums lie. */
static mn_decode_hyper params_of(const mn_hyper_args *p) {
    const mn_call &c = p->call;
    mn_decode_hyper r = {};
    r.dtype = c.dtype, r.H = c.H, r.Q = c.Q, r.K = c.K, r.V = c.V, r.P = c.P;
    r.capacity = r.n_keys = c.L, r.n_parts = mn_ceil_div(c.L, (int64_t)MN_STEP_KEYS);
    r.by_place = p->layout == 1, r.normed = p->norm != 2, r.eps = p->eps;
    r.q = p->q.data, r.gv = p->gv.data, r.o = p->o.data;
    r.keys = (void *)p->k.data, r.values = (void *)p->v.data;
    r.q_step = p->q.stride[2], r.gv_step = p->gv.stride[2], r.o_step = p->o.stride[2];
    r.mix[0] = mix_of(p->c1, p->U1, p->Vt1, p->d1, c.R);
    r.mix[1] = mix_of(p->c2, p->U2, p->Vt2, p->d2, c.W);
    r.key_row = p->k.stride[1], r.key_step = p->k.stride[2];
    r.value_row = p->v.stride[1], r.value_step = p->v.stride[2];
    return r;
}

/* Floats of scores, mixed and parts of a row of the batch; false when they overflow. */
static bool sizes_of(int64_t (&n)[3], const mn_decode_hyper &p) {
    return mn_mul_i64(&n[0], p.Q * p.n_parts, MN_STEP_KEYS + p.mix[0].R) &&
           mn_mul_i64(&n[1], p.H * p.n_parts, MN_STEP_KEYS + p.mix[1].R + 1) &&
           mn_mul_i64(&n[2], p.H * p.n_parts, p.V);
}

MN_CUDA_PLAN(hyper_step) {
    const mn_hyper_args *p = (const mn_hyper_args *)args;
    int64_t n[3];
    if (!serves(p)) return mn_hyper_forward_cuda_plan(args, plan);
    return sizes_of(n, params_of(p)) &&
           mn_mul_size(&plan->shared_bytes, (size_t)(n[0] + n[1] + n[2]), sizeof(float)) &&
           mn_mul_size(&plan->shared_bytes, plan->shared_bytes, (size_t)p->call.B);
}

MN_CUDA_LAUNCH(hyper_step) {
    const mn_hyper_args *p = (const mn_hyper_args *)args;
    if (!p->o.data) return cudaSuccess;
    if (!serves(p)) return mn_hyper_forward_cuda(args, shared, stream);
    mn_decode_hyper r = params_of(p);
    int64_t n[3];
    if (!sizes_of(n, r)) return cudaErrorInvalidValue;
    const int64_t B = p->call.B;
    r.scores = (float *)shared, r.mixed = r.scores + B * n[0], r.parts = r.mixed + B * n[1];
    const step_batch rows = { B, p->q.stride[0], p->gv.stride[0], p->k.stride[0], p->v.stride[0],
                              p->o.stride[0], { p->c1.stride[0], p->c2.stride[0] },
                              n[0], n[1], n[2] };
    return B > 0 ? launch_any(r, rows, stream) : cudaSuccess;
}

}    // namespace mneme::hyper
