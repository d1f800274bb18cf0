/* additive.cu - S = diag(exp g) S + k v';  o = scale S'q (see ref/additive.c), as the recurrence of
 * memory.cuh without its eraser: w = k, and the residual is the value. Forward in bf16 with a decay
 * that channels share goes over chunks instead; a decode step does not. */
#include "kernels/cuda/additive_chunk.cuh"
#include "kernels/cuda/memory.cuh"

static mn_memory memory_of(const mn_additive_args *p) {
    mn_memory m = {};
    m.call = p->call, m.scale = (float)p->scale, m.decay = p->decay;
    m.q = p->q, m.w = p->k, m.v = p->v, m.g = p->g, m.state0 = p->state0;
    m.o = p->o, m.state = p->state, m.cot_o = p->cot.o, m.cot_state = p->cot.state;
    m.dq = p->grad.q, m.dw = p->grad.k, m.dv = p->grad.v, m.dg = p->grad.g;
    m.dstate0 = p->grad.state0;
    return m;
}

MN_CUDA_PLAN(additive_forward) {
    (void)args, (void)plan;
    return true;
}

MN_CUDA_LAUNCH(additive_forward) {
    (void)shared;
    const mn_additive_args *p = (const mn_additive_args *)args;
    const cudaStream_t on = (cudaStream_t)stream;
    if (!mn_additive_chunks(p)) return mn_memory_forward<false>(memory_of(p), stream);
    if (p->call.K <= 64) return mn_additive_chunk_forward<64>(p, on);
    return mn_additive_chunk_forward<128>(p, on);
}

MN_CUDA_PLAN(additive_step) {
    (void)args, (void)plan;
    return true;
}

MN_CUDA_LAUNCH(additive_step) {
    (void)shared;
    return mn_memory_forward<false>(memory_of((const mn_additive_args *)args), stream);
}

MN_CUDA_PLAN(additive_backward) {
    return mn_memory_backward_plan(plan, *(const mn_call *)args);
}

MN_CUDA_LAUNCH(additive_backward) {
    return mn_memory_backward<false>(memory_of((const mn_additive_args *)args), shared, stream);
}
