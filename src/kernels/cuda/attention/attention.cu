/* attention.cu - softmax attention and relu_attention (equations in ref/attention.c): which kernels
 * serve a call, and those for any sizes and types. */
#include "kernels/cuda/attention/attention_bwd_flash_sm90.cuh"
#include "kernels/cuda/attention/attention_bwd_single_pass_sm90.cuh"
#include "kernels/cuda/attention/attention_fwd_flash_sm90.cuh"
#include "kernels/cuda/attention/attention_mma_sm80.cuh"

namespace mneme::attention {

/* ---- any sizes and types, by strips (attention_strip_mma.cuh) -------------------------------- */

/* A strip's rows of scores become weights in place; backward has a second matrix, do v', which
 * becomes the cotangent of the scores. Keys and queries to be turned are turned into float work
 * space first. One kernel serves both operators, a block for each row. */

/* Largest of the block, and sums of it. */
__device__ inline float mn_block_max(float x, float *smem) {
    return mn_group_max<MN_Q_BLOCK_THREADS>(x, smem);
}

__device__ inline float mn_block_sum(float x, float *smem) {
    return mn_group_sum<MN_Q_BLOCK_THREADS>(x, smem);
}

/* z becomes w; returns the log of the sum of e^z. */
__device__ inline float mn_softmax_row(float *z, int64_t n, float *smem) {
    float most = -INFINITY, sum = 0.0f;
    for (int64_t i = threadIdx.x; i < n; i += MN_Q_BLOCK_THREADS) most = fmaxf(most, z[i]);
    most = mn_block_max(most, smem);
    for (int64_t i = threadIdx.x; i < n; i += MN_Q_BLOCK_THREADS) {
        z[i] = expf(z[i] - most);
        sum += z[i];
    }
    sum = mn_block_sum(sum, smem);
    const float by = 1.0f / sum;
    for (int64_t i = threadIdx.x; i < n; i += MN_Q_BLOCK_THREADS) z[i] *= by;
    return most + logf(sum);
}

/* From softmax's w, g becomes the cotangent of its scores, w (g - sum w g). Seen from the largest
 * weight m that is w (g - g_m - d), d = sum w (g - g_m): where m has nearly all the weight
 * nothing cancels. */
__device__ inline void mn_softmax_row_bwd(const float *w, float *g, int64_t n, float *smem) {
    float most = 0.0f, mean = 0.0f;
    for (int64_t i = threadIdx.x; i < n; i += MN_Q_BLOCK_THREADS) most = fmaxf(most, w[i]);
    most = mn_block_max(most, smem);
    float first = INFINITY;    // the first key of that weight
    for (int64_t i = threadIdx.x; i < n; i += MN_Q_BLOCK_THREADS) {
        if (w[i] == most) first = fminf(first, (float)i);
    }
    first = -mn_block_max(-first, smem);
    const float at = first < (float)n ? g[(int64_t)first] : 0.0f;    // none where w is NaN
    for (int64_t i = threadIdx.x; i < n; i += MN_Q_BLOCK_THREADS) mean =
        fmaf(w[i], g[i] - at, mean);
    mean = mn_block_sum(mean, smem);
    for (int64_t i = threadIdx.x; i < n; i += MN_Q_BLOCK_THREADS) g[i] = w[i] * (g[i] - at - mean);
}

/* z becomes w and, where it is given, g = do v' the cotangent of z. */
template <bool softmax>
__global__ void __launch_bounds__(MN_Q_BLOCK_THREADS)
attention_weights_kernel(const __grid_constant__ mn_q_block s, float *w, float *gs, mn_out lse,
                         float eps) {
    __shared__ float smem[32];
    const mn_tile_span tile = mn_tile_at(s.call, MN_Q_BLOCK_ROWS, s.first + blockIdx.z);
    const int64_t r = blockIdx.x, sees = mn_keys_before(s.call) + tile.first + r + 1;
    const int64_t from = mn_window_first(sees, s.window), n = sees - from;
    if (r >= tile.n_rows) return;
    const int64_t at = mn_q_block_offset(s, blockIdx.z, blockIdx.y, r) + from;
    float *z = w + at, *g = gs ? gs + at : nullptr;
    if (softmax) {
        const float sum = mn_softmax_row(z, n, smem);
        if (g) mn_softmax_row_bwd(z, g, n, smem);
        float *to = mn_row<float>(lse, tile.span.b, tile.span.t0 + tile.first + r, blockIdx.y);
        if (to && threadIdx.x == 0) *to = sum;
        return;
    }
    float mean = 0.0f, square = 0.0f;
    for (int64_t i = threadIdx.x; i < n; i += MN_Q_BLOCK_THREADS) {
        square = fmaf(z[i], z[i], square);
        if (g) mean = fmaf(mn_fmax(z[i], 0.0f), g[i], mean);
    }
    mean = g ? mn_block_sum(mean, smem) : 0.0f;
    const float norm = sqrtf(mn_block_sum(square, smem)), size = mn_fmax(norm, eps);
    const float by = 1.0f / size, pull = norm > eps ? mean * by * by : 0.0f;
    for (int64_t i = threadIdx.x; i < n; i += MN_Q_BLOCK_THREADS) {
        const float x = z[i];
        z[i] = mn_fmax(x, 0.0f) * by;
        if (g) g[i] = ((x > 0.0f ? g[i] : 0.0f) - pull * x) * by;
    }
}

inline void mn_attn_weights(const mn_q_block &s, const mn_attn_params &p, float *w, float *g,
                     cudaStream_t stream) {
    const dim3 blocks((unsigned)s.rows, (unsigned)s.heads, (unsigned)s.n_tiles);
    mn_out lse = p.lse;
    if (g) lse.data = nullptr;    // backward only reads it
    if (p.softmax) {
        attention_weights_kernel<true><<<blocks, MN_Q_BLOCK_THREADS, 0,
            stream>>>(s, w, g, lse, p.eps);
    } else attention_weights_kernel<false><<<blocks, MN_Q_BLOCK_THREADS, 0,
        stream>>>(s, w, g, lse, p.eps);
}

/* Work space: one or two matrices of a strip; where positions turn, q, k and dq in float; sums of
 * dk and dv. All counts in floats. */
struct mn_attn_workspace {
    mn_q_block q_block;
    int64_t most, matrix, q, k, dq, dk, dv, all;
};

inline bool mn_attn_workspace_of(mn_attn_workspace *smem, const mn_attn_params &p, bool backward) {
    const mn_call &c = p.call;
    smem->q_block = mn_q_block_of(c, c.H, backward ? 2 : 1, &smem->most);
    smem->q_block.window = p.window;
    int64_t queries, keys;
    bool ok = mn_q_block_numel(&smem->matrix, smem->q_block, smem->most) &&
              mn_mul_i64(&queries, c.B * c.T, c.H * c.K) && mn_mul_i64(&keys, c.B * c.L, c.J) &&
              mn_mul_i64(&smem->dk, keys, c.K) && mn_mul_i64(&smem->dv, keys, c.V);
    smem->q = ok && p.rope ? queries : 0;
    smem->k = ok && p.rope ? smem->dk : 0;
    smem->dq = backward ? smem->q : 0;
    if (!backward) smem->dk = smem->dv = 0;
    const int64_t buffer_sizes[] = { smem->matrix, backward ? smem->matrix : 0, smem->q, smem->k,
        smem->dq,
                              smem->dk, smem->dv };
    smem->all = 0;
    for (int64_t buffer_size : buffer_sizes) {
        ok = ok && mn_add_i64(&smem->all, smem->all, (buffer_size + 63) / 64 * 64);
    }
    return ok;
}

/* The next part of work space, NULL where it has no floats. */
inline float *mn_carve_floats(float **at, int64_t count) {
    float *buffer = count ? *at : nullptr;
    *at += (count + 63) / 64 * 64;
    return buffer;
}

inline bool mn_attn_plan(mn_plan *plan, const mn_attn_params &p, bool backward) {
    mn_attn_workspace smem;
    return mn_attn_workspace_of(&smem, p, backward) &&
           mn_mul_size(&plan->shared_bytes, (size_t)smem.all, sizeof(float));
}

inline mn_rope_params mn_rope_params_of(const mn_attn_params &p, bool keys, int direction) {
    mn_rope_params rope_params = { p.call, keys ? 0 : mn_keys_before(p.call),
        keys ? p.call.J : p.call.H,
                           p.call.K, p.base, p.rope, direction, 1.0f };
    if (keys) rope_params.call.T = p.call.L;
    return rope_params;
}

/* T: the call's type; TQ: that of q and k as the products see them. */
template <typename T, typename TQ>
inline void mn_attn_q_block(const mn_q_block &s, const mn_attn_params &p, const mn_in &q,
                            const mn_in &k,
                           float *w, float *g, const mn_out &dq, const mn_out &dk,
                           const mn_out &dv, cudaStream_t stream) {
    const int64_t group = p.call.H / p.call.J, K = p.call.K, V = p.call.V;
    const mn_attn_operand<TQ> queries = { q, 0, 1 }, keys = { k, 0, group };
    const mn_attn_operand<T> values = { p.v, 0, group }, d_o = { p.d_o, 0, 1 };
    mn_attn_scores(s, w, queries, keys, K, p.scale, stream);
    if (!g) {
        mn_attn_weights(s, p, w, g, stream);
        mn_attn_pv<false, T, T>(s, p.o, 0, w, values, V, 1.0f, stream);
        return;
    }
    mn_attn_scores(s, g, d_o, values, V, 1.0f, stream);
    mn_attn_weights(s, p, w, g, stream);
    mn_attn_grad_kv<false, mn_is_bf16<T>()>(s, dv, 0, group, w, d_o, V, stream);
    mn_attn_grad_kv<true, mn_is_bf16<TQ>()>(s, dk, 0, group, g, queries, K, stream);
    if (p.rope) mn_attn_pv<true, TQ, float>(s, dq, 0, g, keys, K, p.scale, stream);
    else mn_attn_pv<true, TQ, T>(s, dq, 0, g, keys, K, p.scale, stream);
}

template <typename T>
inline int mn_attn_run_typed(const mn_attn_params &p, bool backward, float *shared,
                             cudaStream_t stream) {
    const mn_call &c = p.call;
    mn_attn_workspace smem;
    if (!mn_attn_workspace_of(&smem, p, backward)) return cudaErrorInvalidValue;
    if (c.H > 65535 || c.B * c.L > INT32_MAX) return cudaErrorNotSupported;
    float *at = shared;
    float *w = mn_carve_floats(&at, smem.matrix);
    float *g = mn_carve_floats(&at, backward ? smem.matrix : 0);
    mn_out q = mn_workspace_view(mn_carve_floats(&at, smem.q), c.T, c.H, c.K);
    mn_out k = mn_workspace_view(mn_carve_floats(&at, smem.k), c.L, c.J, c.K);
    mn_out dq = mn_workspace_view(mn_carve_floats(&at, smem.dq), c.T, c.H, c.K);
    mn_out dk = mn_workspace_view(mn_carve_floats(&at, smem.dk), c.L, c.J, c.K);
    mn_out dv = mn_workspace_view(mn_carve_floats(&at, smem.dv), c.L, c.J, c.V);
    if (p.rope) {
        mn_rope_rows<T, float>(mn_rope_params_of(p, false, 1), q, p.q, stream);
        mn_rope_rows<T, float>(mn_rope_params_of(p, true, 1), k, p.k, stream);
    }
    if (!p.dk.data) dk.data = nullptr;
    if (!p.dv.data) dv.data = nullptr;
    if (!p.dq.data) dq.data = nullptr;
    if (dk.data) cudaMemsetAsync(dk.data, 0, (size_t)smem.dk * sizeof(float), stream);
    if (dv.data) cudaMemsetAsync(dv.data, 0, (size_t)smem.dv * sizeof(float), stream);
    mn_q_block s = smem.q_block;
    const int64_t slots = mn_tile_slots(c, MN_Q_BLOCK_ROWS);
    for (s.first = 0; c.T > 0 && s.first < slots; s.first += s.n_tiles) {
        s.n_tiles = mn_min(smem.most, slots - s.first);
        if (p.rope) {
            mn_attn_q_block<T, float>(s, p, mn_view_as_input(q), mn_view_as_input(k), w, g, dq,
                                      dk, dv,
                                     stream);
        } else {
            mn_attn_q_block<T, T>(s, p, p.q, p.k, w, g, p.dq, dk, dv, stream);
        }
    }
    if (!backward) return mn_launch_status();
    mn_rope_params values = mn_rope_params_of(p, true, 1);
    values.kind = 0, values.width = c.V;
    if (p.rope && dq.data) {
        mn_rope_rows<float, T>(mn_rope_params_of(p, false, -1), p.dq, mn_view_as_input(dq), stream);
    }
    if (dk.data) {
        mn_rope_params inverse_rope = mn_rope_params_of(p, true, -1);
        inverse_rope.scale = p.scale;
        mn_rope_rows<float, T>(inverse_rope, p.dk, mn_view_as_input(dk), stream);
    }
    if (dv.data) mn_rope_rows<float, T>(values, p.dv, mn_view_as_input(dv), stream);
    return mn_launch_status();
}

inline int mn_attn_run(const mn_attn_params &p, bool backward, void *shared, void *stream) {
    const cudaStream_t on = (cudaStream_t)stream;
    if (p.call.dtype == MN_BF16) return mn_attn_run_typed<mn_bf16>(p, backward, (float *)shared,
                                                                   on);
    return mn_attn_run_typed<float>(p, backward, (float *)shared, on);
}

/* ---- calls ----------------------------------------------------------------------------------- */

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
    if (mn_flash_supported(p)) {
        plan->shared_bytes = MN_ATTN_FWD_BYTES;
        return true;
    }
    return mn_flash_sm80_supported(p) || mn_attn_plan(plan, p, false);
}

static int forward(const mn_attn_params &p, void *shared, void *stream) {
    if (!p.o.data && !p.lse.data) return cudaSuccess;
    if (mn_flash_supported(p)) return mn_attn_fwd(p, shared, (cudaStream_t)stream);
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
