/* delta.cu - S' = diag(exp g) S;  S = S' + beta w (v - S'^T e)';  o = scale S'q (see ref/delta.c).
 * bf16 goes over chunks (delta_chunk.h) unless memories are narrow; the rest is the recurrence of
 * matrix_state.cuh, and decode steps are matrix_step.cuh. */
#include "kernels/cuda/curvature/curvature_ready.cuh"
#include "kernels/cuda/delta/delta_chunk.h"
#include "kernels/cuda/recurrent/matrix_step.cuh"

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

}    // namespace mneme::delta
