/* attention.cu - softmax attention and relu_attention (equations in ref/attention.c). */
#include "kernels/cuda/attention/attention_bwd_single_pass_sm90.cuh"
#include "kernels/cuda/attention/attention_step.cuh"

static mn_reads softmax_reads(const void *args) {
    const mn_attention_args *p = (const mn_attention_args *)args;
    mn_reads r = {};
    r.call = p->call, r.scale = (float)p->scale, r.base = p->rope_base, r.rope = p->rope_kind;
    r.softmax = true;
    r.q = p->q, r.k = p->k, r.v = p->v, r.d_o = p->cot.o, r.o = p->o, r.lse = p->lse;
    r.dq = p->grad.q, r.dk = p->grad.k, r.dv = p->grad.v;
    return r;
}

static mn_reads relu_reads(const void *args) {
    const mn_relu_attention_args *p = (const mn_relu_attention_args *)args;
    mn_reads r = {};
    r.call = p->call, r.scale = (float)p->scale, r.eps = (float)p->eps;
    r.q = p->q, r.k = p->k, r.v = p->v, r.d_o = p->cot.o, r.o = p->o;
    r.dq = p->grad.q, r.dk = p->grad.k, r.dv = p->grad.v;
    return r;
}

static bool plan_forward(mn_plan *plan, const mn_reads &p) {
    return mn_flash_serves(p) || mn_reads_plan(plan, p, false);
}

static int forward(const mn_reads &p, void *shared, void *stream) {
    if (!p.o.data && !p.lse.data) return cudaSuccess;
    if (mn_flash_serves(p)) return mn_flash_forward(p, (cudaStream_t)stream);
    return mn_reads_any(p, false, shared, stream);
}

static bool plan_step(mn_plan *plan, const mn_reads &p) {
    return mn_step_serves(p) ? mn_step_plan(plan, p) : plan_forward(plan, p);
}

static int step(const mn_reads &p, void *shared, void *stream) {
    if (!p.o.data && !p.lse.data) return cudaSuccess;
    if (!mn_step_serves(p)) return forward(p, shared, stream);
    return mn_step(p, (float *)shared, (cudaStream_t)stream);
}

static bool plan_backward(mn_plan *plan, const mn_reads &p) {
    if (mn_once_serves(p)) return mn_once_plan(plan, p);
    return mn_flash_serves_back(p) ? mn_flash_plan_back(plan, p) : mn_reads_plan(plan, p, true);
}

static int backward(const mn_reads &p, void *shared, void *stream) {
    if (!mn_flash_serves_back(p)) return mn_reads_any(p, true, shared, stream);
    if (mn_once_serves(p)) return mn_once_backward(p, (float *)shared, (cudaStream_t)stream);
    return mn_flash_backward(p, (float *)shared, (cudaStream_t)stream);
}

MN_CUDA_PLAN(attention_forward) {
    return plan_forward(plan, softmax_reads(args));
}

MN_CUDA_LAUNCH(attention_forward) {
    return forward(softmax_reads(args), shared, stream);
}

MN_CUDA_PLAN(attention_backward) {
    return plan_backward(plan, softmax_reads(args));
}

MN_CUDA_LAUNCH(attention_backward) {
    return backward(softmax_reads(args), shared, stream);
}

MN_CUDA_PLAN(relu_attention_forward) {
    return plan_forward(plan, relu_reads(args));
}

MN_CUDA_LAUNCH(relu_attention_forward) {
    return forward(relu_reads(args), shared, stream);
}

MN_CUDA_PLAN(relu_attention_backward) {
    return plan_backward(plan, relu_reads(args));
}

MN_CUDA_LAUNCH(relu_attention_backward) {
    return backward(relu_reads(args), shared, stream);
}

MN_CUDA_PLAN(attention_step) {
    return plan_step(plan, softmax_reads(args));
}

MN_CUDA_LAUNCH(attention_step) {
    return step(softmax_reads(args), shared, stream);
}

MN_CUDA_PLAN(relu_attention_step) {
    return plan_step(plan, relu_reads(args));
}

MN_CUDA_LAUNCH(relu_attention_step) {
    return step(relu_reads(args), shared, stream);
}
