/* attention.cu - softmax attention and relu_attention (equations in ref/attention.c). */
#include "kernels/cuda/attention/attention_rows.cuh"
#include "kernels/cuda/attention/attention_bwd_flash_sm90.cuh"
#include "kernels/cuda/attention/attention_bwd_single_pass_sm90.cuh"
#include "kernels/cuda/attention/attention_fwd_flash_sm90.cuh"
#include "kernels/cuda/attention/attention_mma_sm80.cuh"

namespace mneme::attention {

static mn_attn_params softmax_params(const void *args) {
    const mn_attention_args *p = (const mn_attention_args *)args;
    mn_attn_params r = {};
    r.call = p->call, r.scale = (float)p->scale, r.base = p->rope_base, r.rope = p->rope_kind;
    r.softmax = true;
    r.window = p->window;    // one that binds nowhere, too: a kernel is chosen by kind, not length
    r.q = p->q, r.k = p->k, r.v = p->v, r.d_o = p->cot.o, r.o = p->o, r.lse = p->lse;
    r.dq = p->grad.q, r.dk = p->grad.k, r.dv = p->grad.v;
    return r;
}

static mn_attn_params relu_params(const void *args) {
    const mn_relu_attention_args *p = (const mn_relu_attention_args *)args;
    mn_attn_params r = {};
    r.call = p->call, r.scale = (float)p->scale, r.eps = (float)p->eps;
    r.q = p->q, r.k = p->k, r.v = p->v, r.d_o = p->cot.o, r.o = p->o;
    r.dq = p->grad.q, r.dk = p->grad.k, r.dv = p->grad.v;
    return r;
}

static bool plan_forward(mn_plan *plan, const mn_attn_params &p) {
    return mn_flash_supported(p) || mn_flash_sm80_supported(p) || mn_attn_plan(plan, p, false);
}

static int forward(const mn_attn_params &p, void *shared, void *stream) {
    if (!p.o.data && !p.lse.data) return cudaSuccess;
    if (mn_flash_supported(p)) return mn_flash_fwd(p, (cudaStream_t)stream);
    if (mn_flash_sm80_supported(p)) return mn_flash_fwd_sm80(p, (cudaStream_t)stream);
    return mn_attn_run(p, false, shared, stream);
}

static bool plan_backward(mn_plan *plan, const mn_attn_params &p) {
    if (mn_single_pass_supported(p)) return mn_single_pass_plan(plan, p);
    const bool by_tiles = mn_flash_bwd_supported(p) || mn_flash_bwd_sm80_supported(p);
    return by_tiles ? mn_flash_bwd_plan(plan, p) : mn_attn_plan(plan, p, true);
}

static int backward(const mn_attn_params &p, void *shared, void *stream) {
    if (mn_flash_bwd_sm80_supported(p)) {
        return mn_flash_bwd_sm80(p, (float *)shared, (cudaStream_t)stream);
    }
    if (!mn_flash_bwd_supported(p)) return mn_attn_run(p, true, shared, stream);
    if (mn_single_pass_supported(p)) return mn_single_pass_bwd(p, (float *)shared,
                                                               (cudaStream_t)stream);
    return mn_flash_bwd(p, (float *)shared, (cudaStream_t)stream);
}

MN_CUDA_PLAN(attention_forward) {
    return plan_forward(plan, softmax_params(args));
}

MN_CUDA_LAUNCH(attention_forward) {
    return forward(softmax_params(args), shared, stream);
}

MN_CUDA_PLAN(attention_backward) {
    return plan_backward(plan, softmax_params(args));
}

MN_CUDA_LAUNCH(attention_backward) {
    return backward(softmax_params(args), shared, stream);
}

MN_CUDA_PLAN(relu_attention_forward) {
    return plan_forward(plan, relu_params(args));
}

MN_CUDA_LAUNCH(relu_attention_forward) {
    return forward(relu_params(args), shared, stream);
}

MN_CUDA_PLAN(relu_attention_backward) {
    return plan_backward(plan, relu_params(args));
}

MN_CUDA_LAUNCH(relu_attention_backward) {
    return backward(relu_params(args), shared, stream);
}

}    // namespace mneme::attention
