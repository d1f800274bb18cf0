/* delta.cu - S' = diag(exp g) S;  S = S' + beta w (v - S'^T e)';  o = scale S'q (see ref/delta.c),
 * the recurrence of memory.cuh. */
#include "kernels/cuda/memory.cuh"

static mn_memory memory_of(const mn_delta_args *p) {
    mn_memory m = {};
    m.call = p->call, m.scale = (float)p->scale, m.decay = p->decay;
    m.q = p->q, m.e = p->e, m.w = p->w, m.v = p->v, m.beta = p->beta, m.g = p->g;
    m.state0 = p->state0;
    m.o = p->o, m.state = p->state, m.cot_o = p->cot.o, m.cot_state = p->cot.state;
    m.dq = p->grad.q, m.de = p->grad.e, m.dw = p->grad.w, m.dv = p->grad.v;
    m.dbeta = p->grad.beta, m.dg = p->grad.g, m.dstate0 = p->grad.state0;
    return m;
}

MN_CUDA_PLAN(delta_forward) {
    (void)args, (void)plan;
    return true;
}

MN_CUDA_LAUNCH(delta_forward) {
    (void)shared;
    return mn_memory_forward<true>(memory_of((const mn_delta_args *)args), stream);
}

MN_CUDA_PLAN(delta_backward) {
    return mn_memory_backward_plan(plan, *(const mn_call *)args);
}

MN_CUDA_LAUNCH(delta_backward) {
    return mn_memory_backward<true>(memory_of((const mn_delta_args *)args), shared, stream);
}
