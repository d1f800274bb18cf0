/* attention.cu - softmax attention and relu_attention (equations in ref/attention.c). */
#include "kernels/cuda/attention_rows.cuh"

static mn_reads softmax_reads(const void *args) {
    const mn_attention_args *p = (const mn_attention_args *)args;
    mn_reads r = {};
    r.call = p->call, r.scale = (float)p->scale, r.base = p->rope_base, r.rope = p->rope_kind;
    r.softmax = true;
    r.q = p->q, r.k = p->k, r.v = p->v, r.d_o = p->cot.o, r.o = p->o;
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

MN_CUDA_PLAN(attention_forward) {
    return mn_reads_plan(plan, softmax_reads(args), false);
}

MN_CUDA_LAUNCH(attention_forward) {
    return mn_reads_any(softmax_reads(args), false, shared, stream);
}

MN_CUDA_PLAN(attention_backward) {
    return mn_reads_plan(plan, softmax_reads(args), true);
}

MN_CUDA_LAUNCH(attention_backward) {
    return mn_reads_any(softmax_reads(args), true, shared, stream);
}

MN_CUDA_PLAN(relu_attention_forward) {
    return mn_reads_plan(plan, relu_reads(args), false);
}

MN_CUDA_LAUNCH(relu_attention_forward) {
    return mn_reads_any(relu_reads(args), false, shared, stream);
}

MN_CUDA_PLAN(relu_attention_backward) {
    return mn_reads_plan(plan, relu_reads(args), true);
}

MN_CUDA_LAUNCH(relu_attention_backward) {
    return mn_reads_any(relu_reads(args), true, shared, stream);
}
