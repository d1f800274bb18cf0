/* hyper_step.cu - one query of each head against a cache of keys (hyper_step.cuh): the operator's
 * step, and the token of a step that repeats where no megakernel takes it. */
#include "kernels/cuda/hyper/hyper_step.cuh"

namespace mneme::hyper {

MN_CUDA_PLAN(hyper_forward);
MN_CUDA_LAUNCH(hyper_forward);

enum { STEP_MOST_SLOTS = 1024, STEP_MAX_K = 2048 };    // queries are in shared memory

/* Grid: (n_slots, branches or heads). Loads and stores what the phase does. */
template <typename T, int N, int PHASE>
__global__ void __launch_bounds__(MN_STEP_THREADS)
hyper_step_kernel(const __grid_constant__ mn_decode_hyper p) {
    extern __shared__ __align__(16) unsigned char bytes[];
    step_piece<T, N, mn_cta<MN_STEP_THREADS>>(p, PHASE, blockIdx.y, blockIdx.x, gridDim.x, bytes);
}

template <typename T, int N>
static int launch(const mn_decode_hyper &p, cudaStream_t stream) {
    const unsigned slots = (unsigned)mn_min(mn_max(p.n_parts, 1), (int64_t)STEP_MOST_SLOTS);
    const dim3 branches(slots, (unsigned)p.Q), heads(slots, (unsigned)p.H);
    const size_t bytes = step_smem<N>::bytes(p.K, p.mix[0].R, p.mix[1].R);
    hyper_step_kernel<T, N, MN_HYPER_SCORES><<<branches, MN_STEP_THREADS, bytes, stream>>>(p);
    hyper_step_kernel<T, N, MN_HYPER_MIX><<<heads, MN_STEP_THREADS, bytes, stream>>>(p);
    hyper_step_kernel<T, N, MN_HYPER_VALUES><<<heads, MN_STEP_THREADS, bytes, stream>>>(p);
    hyper_step_kernel<T, N, MN_HYPER_OUTPUT>
        <<<dim3(1, (unsigned)p.H), MN_STEP_THREADS, bytes, stream>>>(p);
    return mn_launch_status();
}

template <typename T>
static int launch_of(const mn_decode_hyper &p, cudaStream_t stream) {
    constexpr int N = mn_vec_width<T>();
    const bool packs = p.K % N == 0 && p.V % N == 0 && (uintptr_t)p.keys % 16 == 0 &&
                       (uintptr_t)p.values % 16 == 0 && p.key_row % N == 0 &&
                       p.key_step % N == 0 && p.value_row % N == 0 && p.value_step % N == 0;
    return packs ? launch<T, N>(p, stream) : launch<T, 1>(p, stream);
}

extern "C" int mn_decode_run_hyper(const mn_decode_hyper *p, void *stream) {
    if (p->dtype == MN_BF16) return launch_of<mn_bf16>(*p, (cudaStream_t)stream);
    return launch_of<float>(*p, (cudaStream_t)stream);
}

/* ---- the operator's step --------------------------------------------------------------------- */

static bool serves(const mn_hyper_args *p) {
    const mn_call &c = p->call;
    return c.K <= STEP_MAX_K && c.Q <= 65535 &&
           (!p->U1.data || c.R <= MN_DECODE_HYPER_RANKS) &&
           (!p->U2.data || c.W <= MN_DECODE_HYPER_RANKS);
}

static mn_decode_mix mix_of(const mn_in &c, const mn_in &U, const mn_in &Vt, const mn_in &d,
                            int64_t ranks) {
    return { c.data, U.data, Vt.data, d.data, U.data ? ranks : 0,
             c.stride[2], U.stride[2], Vt.stride[2], d.stride[2], false };
}

/* All but where sums and results of a row of the batch lie. */
static mn_decode_hyper params_of(const mn_hyper_args *p) {
    const mn_call &c = p->call;
    mn_decode_hyper r = {};
    r.dtype = c.dtype, r.H = c.H, r.Q = c.Q, r.K = c.K, r.V = c.V, r.P = c.P;
    r.capacity = r.n_keys = c.L, r.n_parts = mn_ceil_div(c.L, (int64_t)MN_STEP_KEYS);
    r.by_place = p->layout == 1, r.normed = p->norm != 2, r.eps = p->eps;
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

static const void *row_of(const mn_in &view, int64_t b, size_t item) {
    return view.data ? (const char *)view.data + b * view.stride[0] * (int64_t)item : nullptr;
}

MN_CUDA_PLAN(hyper_step) {
    const mn_hyper_args *p = (const mn_hyper_args *)args;
    int64_t n[3];
    if (!serves(p)) return mn_hyper_forward_cuda_plan(args, plan);
    return sizes_of(n, params_of(p)) &&
           mn_mul_size(&plan->shared_bytes, (size_t)(n[0] + n[1] + n[2]), sizeof(float));
}

MN_CUDA_LAUNCH(hyper_step) {
    const mn_hyper_args *p = (const mn_hyper_args *)args;
    if (!p->o.data) return cudaSuccess;
    if (!serves(p)) return mn_hyper_forward_cuda(args, shared, stream);
    mn_decode_hyper r = params_of(p);
    const size_t item = p->call.dtype == MN_BF16 ? 2 : 4;
    int64_t n[3];
    int code = sizes_of(n, r) ? cudaSuccess : cudaErrorInvalidValue;
    r.scores = (float *)shared, r.mixed = r.scores + n[0], r.parts = r.mixed + n[1];
    for (int64_t b = 0; b < p->call.B && code == cudaSuccess; b++) {    // most often one
        r.q = row_of(p->q, b, item), r.gv = row_of(p->gv, b, item);
        r.keys = (void *)row_of(p->k, b, item), r.values = (void *)row_of(p->v, b, item);
        r.mix[0].c = row_of(p->c1, b, item), r.mix[1].c = row_of(p->c2, b, item);
        r.o = (char *)p->o.data + b * p->o.stride[0] * (int64_t)item;
        code = mn_decode_run_hyper(&r, stream);
    }
    return code;
}

}    // namespace mneme::hyper
