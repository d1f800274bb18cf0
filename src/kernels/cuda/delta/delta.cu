/* delta.cu - S' = diag(exp g) S;  S = S' + beta w (v - S'^T e)';  o = scale S'q (see ref/delta.c).
 * bf16 goes over chunks (delta_chunk.h) unless memories are narrow; the rest, and decode steps, are
 * the recurrence of matrix_state.cuh. */
#include "kernels/cuda/curvature/curvature_ready.cuh"
#include "kernels/cuda/delta/delta_chunk.h"
#include "kernels/cuda/recurrent/matrix_state.cuh"
#include "kernels/cuda/recurrent/matrix_step.cuh"
#include "kernels/delta_gpu.h"

namespace mneme::delta {

using namespace curvature;
using namespace recurrent;

static mn_matrix_params memory_of(const mn_delta_args *p) {
    mn_matrix_params m = {};
    m.call = p->call, m.scale = (float)p->scale, m.decay = p->decay;
    m.q = p->q, m.e = p->e, m.w = p->w, m.v = p->v, m.beta = p->beta, m.g = p->g;
    m.state0 = p->state0;
    m.o = p->o, m.state = p->state, m.cot_o = p->cot.o, m.cot_state = p->cot.state;
    m.dq = p->grad.q, m.de = p->grad.e, m.dw = p->grad.w, m.dv = p->grad.v;
    m.dbeta = p->grad.beta, m.dg = p->grad.g, m.dstate0 = p->grad.state0;
    return m;
}

MN_CUDA_PLAN(delta_forward) {
    const mn_delta_args *p = (const mn_delta_args *)args;
    if (mn_delta_uses_chunks(p)) return mn_delta_chunk_forward_plan(plan, p);
    return !p->query || mn_curvature_forward_cuda_plan(p->query, plan);
}

/* What makes the queries has the call's borders, which are on the device now. */
MN_CUDA_LAUNCH(delta_forward) {
    mn_delta_args p = *(const mn_delta_args *)args;
    mn_curvature_args query;
    if (p.query) {
        query = *p.query;
        query.call = p.call;
        p.query = &query;
    }
    if (mn_delta_uses_chunks(&p)) return mn_delta_chunk_forward(&p, shared, stream);
    const int code = p.query ? mn_curvature_forward_cuda(p.query, shared, stream) : cudaSuccess;
    return code == cudaSuccess ? mn_matrix_forward<true>(memory_of(&p), stream) : code;
}

MN_CUDA_PLAN(delta_step) {
    (void)args, (void)plan;
    return true;
}

MN_CUDA_LAUNCH(delta_step) {
    (void)shared;
    return mn_matrix_step<true>(memory_of((const mn_delta_args *)args), stream);
}

MN_CUDA_PLAN(delta_backward) {
    const mn_delta_args *p = (const mn_delta_args *)args;
    if (mn_delta_uses_chunks(p)) return mn_delta_chunk_backward_plan(plan, p);
    return mn_matrix_backward_plan(plan, p->call);
}

MN_CUDA_LAUNCH(delta_backward) {
    const mn_delta_args *p = (const mn_delta_args *)args;
    if (mn_delta_uses_chunks(p)) return mn_delta_chunk_backward(p, shared, stream);
    return mn_matrix_backward<true>(memory_of(p), shared, stream);
}

/* ---- delta_product, one token ---------------------------------------------------------------- */

static mn_matrix_params memory_of(const mn_delta_product_args *p) {
    mn_matrix_params m = {};
    m.call = p->call, m.call.J = p->call.H, m.scale = (float)p->scale, m.decay = MN_DECAY_TOKEN;
    m.q = p->q, m.e = p->k, m.v = p->v, m.beta = p->beta, m.g = p->g;
    m.state0 = p->state0, m.o = p->o, m.state = p->state;
    return m;
}

template <typename T>
static bool product_step(mn_step_params *to, const mn_delta_product_args *p) {
    const bool fits = mn_matrix_step_params<T>(to, memory_of(p));
    to->n_rows = (int)(p->call.Q / p->call.H);
    return fits;
}

static bool product_plan(const void *args, mn_plan *plan) {
    (void)args, (void)plan;
    return true;
}

static int product_launch(const void *args, void *shared, void *stream) {
    (void)shared;
    const mn_delta_product_args *p = (const mn_delta_product_args *)args;
    const cudaStream_t on = (cudaStream_t)stream;
    mn_step_params step;
    if (p->call.dtype == MN_BF16) {
        if (!product_step<mn_bf16>(&step, p)) return cudaErrorNotSupported;
        return mn_step_launch<mn_bf16, MN_STEP_DELTA, MN_STEP_MOST_ROWS>(step, p->call.B, on);
    }
    if (!product_step<float>(&step, p)) return cudaErrorNotSupported;
    return mn_step_launch<float, MN_STEP_DELTA, MN_STEP_MOST_ROWS>(step, p->call.B, on);
}

extern "C" const mn_kernel *mn_delta_product_kernel(mn_pass pass, const void *args) {
    static const mn_kernel kernel = { product_plan, NULL, "cuda", product_launch };
    const mn_delta_product_args *p = (const mn_delta_product_args *)args;
    const mn_call &c = p->call;
    mn_step_params step;
    if (pass != MN_FORWARD || c.T != 1 || c.cu_seqlens || !p->state0.data ||
        p->state0.data != p->state.data || c.H < 1 || c.Q < c.H ||
        c.Q > MN_STEP_MOST_ROWS * c.H) {
        return NULL;
    }
    const bool takes = c.dtype == MN_BF16 ? product_step<mn_bf16>(&step, p)
                                          : product_step<float>(&step, p);
    return takes ? &kernel : NULL;
}

}    // namespace mneme::delta
