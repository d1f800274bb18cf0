/* kla_mc.cu - KLA+ loss: the marginal likelihood of a token under S draws (see ref/kla_mc.c).
 *
 * Tokens are taken in blocks whose rows, one for each token and draw, have room for all their
 * logits:
 *
 *   h = features      L = h head'      lse, w_s      L <- g w_s (softmax - onehot)
 *   dh = L head       dhead += L'h     dmu, dvar, dnoise and parts of dnorm from dh
 *
 * The products are those of gemm_fallback.cu, in float32, so that sums over blocks have the same
 * order each time. Other kernels have a row, a token or a number for each thread, warp or block. */
#include "kernels/cuda/prim/common.cuh"
#include "kernels/cuda/gemm/gemm_fallback.h"
#include "kernels/cuda/prim/fmax.cuh"

namespace mneme::moebius {

enum { THREADS = 256, ROWS = 8 };
static const int64_t max_logits = (int64_t)1 << 26;

/* Work space, floats: of a block of tokens; of the whole call. */
struct workspace {
    float *h, *logits, *dh;                // rows of D, V, D
    float *r, *lse, *hit, *weight;         // of rows; r is 1 / rms
    float *head, *dhead;                   // (V,D)
    float *dnorm;                          // (tokens, D)
    int64_t first, tokens;                 // of this block
};

struct row_coord {
    int64_t row, b, t, s;    // rows are (token of the block, draw)
};

__device__ static row_coord row_coord_of(const mn_kla_mc_args &p, const workspace &w, int64_t row) {
    const int64_t token = w.first + row / p.call.S;
    return { row, token / p.call.T, token % p.call.T, row % p.call.S };
}

template <typename T>
__device__ static float deviation(const mn_kla_mc_args &p, int64_t b, int64_t t, int64_t i) {
    return sqrtf(mn_fmax(mn_float(mn_row<T>(p.var, b, t, 0)[i]), 1e-12f));
}

__device__ static int64_t noise_at(const mn_kla_mc_args &p, const row_coord &at) {
    return ((at.s * p.call.B + at.b) * p.call.T + at.t) * p.call.D;
}

__device__ static int64_t target_of(const mn_kla_mc_args &p, int64_t b, int64_t t) {
    const float id = *mn_row<float>(p.target, b, t, 0);
    return id >= 0.0f && id < (float)p.call.V ? (int64_t)id : -1;
}

template <typename T>
__device__ static float feature(const mn_kla_mc_args &p, const row_coord &at, int64_t i) {
    const float noise = mn_float(((const T *)p.noise.data)[noise_at(p, at) + i]);
    return fmaf(deviation<T>(p, at.b, at.t, i), noise, mn_float(mn_row<T>(p.mu, at.b, at.t, 0)[i]));
}

/* A warp has a row. */
template <typename T>
__global__ void __launch_bounds__(32 * ROWS)
kla_features_kernel(const __grid_constant__ mn_kla_mc_args p, workspace w) {
    const int64_t row = blockIdx.x * (int64_t)ROWS + threadIdx.x / 32, D = p.call.D;
    if (row >= w.tokens * p.call.S) return;
    const row_coord at = row_coord_of(p, w, row);
    const T *norm = (const T *)p.norm.data;
    float square = 0.0f;
    for (int64_t i = threadIdx.x % 32; i < D; i += 32) {
        const float x = feature<T>(p, at, i);
        w.h[row * D + i] = x;
        square = fmaf(x, x, square);
    }
    if (!norm) return;
    const float r = 1.0f / sqrtf(mn_warp_sum(square) / (float)D + (float)p.norm_eps);
    if (threadIdx.x % 32 == 0) w.r[row] = r;
    for (int64_t i = threadIdx.x % 32; i < D; i += 32) w.h[row * D + i] *= r * mn_float(norm[i]);
}

template <typename T>
__global__ void __launch_bounds__(THREADS)
kla_to_f32_kernel(float *to, const T *from, int64_t count) {
    const int64_t i = blockIdx.x * (int64_t)THREADS + threadIdx.x;
    if (i < count) to[i] = mn_float(from[i]);
}

template <typename T>
__global__ void __launch_bounds__(THREADS)
kla_from_f32_kernel(T *to, const float *from, int64_t count) {
    const int64_t i = blockIdx.x * (int64_t)THREADS + threadIdx.x;
    if (i < count) mn_put(to + i, from[i]);
}

/* The log-normaliser of a row, and the log-probability of its target. A block has a row. */
__global__ void __launch_bounds__(THREADS)
kla_logsumexp_kernel(const __grid_constant__ mn_kla_mc_args p, workspace w) {
    __shared__ float smem[32];
    const int64_t row = blockIdx.x, V = p.call.V;
    const row_coord at = row_coord_of(p, w, row);
    const float *logits = w.logits + row * V;
    float top = -INFINITY, sum = 0.0f;
    for (int64_t v = threadIdx.x; v < V; v += THREADS) top = fmaxf(top, logits[v]);
    top = mn_group_max<THREADS>(top, smem);
    for (int64_t v = threadIdx.x; v < V; v += THREADS) sum += expf(logits[v] - top);
    sum = mn_group_sum<THREADS>(sum, smem);
    if (threadIdx.x != 0) return;
    const int64_t target = target_of(p, at.b, at.t);
    w.lse[row] = top + logf(sum);
    w.hit[row] = target >= 0 ? logits[target] - w.lse[row] : -INFINITY;
}

/* log of the sum over draws of exp(x_s), s of stride `step` */
template <typename F>
__device__ static float logsumexp_draws(int64_t S, F x) {
    float top = -INFINITY, sum = 0.0f;
    for (int64_t s = 0; s < S; s++) top = mn_fmax(top, x(s));
    if (top == -INFINITY) return top;
    for (int64_t s = 0; s < S; s++) sum += expf(x(s) - top);
    return top + logf(sum);
}

/* nll of a token or, going back, the weights of its draws. A thread has a token. */
template <typename T>
__global__ void __launch_bounds__(THREADS)
kla_nll_kernel(const __grid_constant__ mn_kla_mc_args p, workspace w, bool backward) {
    const int64_t token = blockIdx.x * (int64_t)THREADS + threadIdx.x, S = p.call.S;
    if (token >= w.tokens) return;
    const row_coord at = row_coord_of(p, w, token * S);
    const float *hit = w.hit + token * S;
    const bool counts = target_of(p, at.b, at.t) >= 0;
    const float all = logsumexp_draws(S, [&](int64_t s) { return hit[s]; });
    if (!backward) {
        float *nll = mn_row<float>(p.nll, at.b, at.t, 0);
        if (nll) *nll = counts ? logf((float)S) - all : 0.0f;
        return;
    }
    const float *cot = mn_row<float>(p.cot.nll, at.b, at.t, 0);
    const float g = cot ? *cot : 0.0f;
    for (int64_t s = 0; s < S; s++) {
        w.weight[token * S + s] = counts ? g * expf(hit[s] - all) : 0.0f;
    }
}

/* Log-probabilities: a thread has a token and class. */
template <typename T>
__global__ void __launch_bounds__(THREADS)
kla_logprob_kernel(const __grid_constant__ mn_kla_mc_args p, workspace w) {
    const int64_t i = blockIdx.x * (int64_t)THREADS + threadIdx.x, V = p.call.V, S = p.call.S;
    if (i >= w.tokens * V) return;
    const int64_t token = i / V, v = i % V;
    const row_coord at = row_coord_of(p, w, token * S);
    const float all = logsumexp_draws(S, [&](int64_t s) {
        return w.logits[(token * S + s) * V + v] - w.lse[token * S + s];
    });
    mn_put(mn_row<T>(p.logprob, at.b, at.t, 0) + v, all - logf((float)S));
}

/* Logits become their gradients. */
__global__ void __launch_bounds__(THREADS)
kla_logits_bwd_kernel(const __grid_constant__ mn_kla_mc_args p, workspace w) {
    const int64_t i = blockIdx.x * (int64_t)THREADS + threadIdx.x, V = p.call.V;
    if (i >= w.tokens * p.call.S * V) return;
    const int64_t row = i / V;
    const row_coord at = row_coord_of(p, w, row);
    const float hit = i % V == target_of(p, at.b, at.t) ? 1.0f : 0.0f;
    w.logits[i] = w.weight[row] * (expf(w.logits[i] - w.lse[row]) - hit);
}

/* dh becomes dx, with the row's part of dnorm in place of h. A warp has a row. */
template <typename T>
__global__ void __launch_bounds__(32 * ROWS)
kla_norm_bwd_kernel(const __grid_constant__ mn_kla_mc_args p, workspace w) {
    const int64_t row = blockIdx.x * (int64_t)ROWS + threadIdx.x / 32, D = p.call.D;
    if (row >= w.tokens * p.call.S) return;
    const row_coord at = row_coord_of(p, w, row);
    const T *norm = (const T *)p.norm.data;
    const float r = w.r[row];
    float dot = 0.0f;
    for (int64_t i = threadIdx.x % 32; i < D; i += 32) {
        dot = fmaf(w.dh[row * D + i], w.h[row * D + i], dot);
    }
    dot = mn_warp_sum(dot) / (float)D;
    for (int64_t i = threadIdx.x % 32; i < D; i += 32) {
        const float x = feature<T>(p, at, i) * r, dh = w.dh[row * D + i];
        w.h[row * D + i] = dh * x;
        w.dh[row * D + i] = r * fmaf(dh, mn_float(norm[i]), -x * dot);
    }
}

/* Gradients of mu, var and noise, and a token's part of dnorm, draws in their order. A thread has a
 * channel of a token. */
template <typename T>
__global__ void __launch_bounds__(THREADS)
kla_features_bwd_kernel(const __grid_constant__ mn_kla_mc_args p, workspace w) {
    const int64_t item = blockIdx.x * (int64_t)THREADS + threadIdx.x, D = p.call.D, S = p.call.S;
    if (item >= w.tokens * D) return;
    const int64_t token = item / D, i = item % D;
    const row_coord first = row_coord_of(p, w, token * S);
    T *dmu = mn_row<T>(p.grad.mu, first.b, first.t, 0);
    T *dvar = mn_row<T>(p.grad.var, first.b, first.t, 0);
    T *dnoise = (T *)p.grad.noise.data;
    const float std = deviation<T>(p, first.b, first.t, i);
    const float var = mn_float(mn_row<T>(p.var, first.b, first.t, 0)[i]);
    float to_mu = 0.0f, to_var = 0.0f, to_norm = 0.0f;
    for (int64_t s = 0; s < S; s++) {
        const row_coord at = row_coord_of(p, w, token * S + s);
        const float dx = w.dh[at.row * D + i];
        const float noise = mn_float(((const T *)p.noise.data)[noise_at(p, at) + i]);
        to_mu += dx;
        to_var = fmaf(dx, noise, to_var);
        if (p.norm.data) to_norm += w.h[at.row * D + i];
        if (dnoise) mn_put(dnoise + noise_at(p, at) + i, dx * std);
    }
    if (dmu) mn_put(dmu + i, to_mu);
    if (dvar) mn_put(dvar + i, var >= 1e-12f ? to_var / (2.0f * std) : 0.0f);
    if (p.norm.data) w.dnorm[(w.first + token) * D + i] = to_norm;
}

/* The gradient of norm: tokens in their order. A thread has a channel. */
template <typename T>
__global__ void __launch_bounds__(THREADS)
kla_norm_grad_kernel(const __grid_constant__ mn_kla_mc_args p, const float *parts) {
    const int64_t i = blockIdx.x * (int64_t)THREADS + threadIdx.x, D = p.call.D;
    if (i >= D) return;
    float sum = 0.0f;
    for (int64_t token = 0; token < p.call.B * p.call.T; token++) sum += parts[token * D + i];
    mn_put((T *)p.grad.norm.data + i, sum);
}

/* ---- launches -------------------------------------------------------------------------------- */

static int64_t tokens_of_block(const mn_call *c) {
    return mn_max(1, mn_min(c->B * c->T, max_logits / mn_max(1, c->S * c->V)));
}

/* Parts of `at`, NULL to count; floats, or 0 where their number overflows. */
static bool carve_workspace(workspace *w, size_t *count, float *at, const mn_call *c,
                            bool backward) {
    size_t rows, features, logits, head, norm, all = 0;
    *w = {};
    bool ok = mn_mul_size(&rows, (size_t)tokens_of_block(c), (size_t)c->S) &&
              mn_mul_size(&features, rows, (size_t)c->D) &&
              mn_mul_size(&logits, rows, (size_t)c->V) &&
              mn_mul_size(&head, (size_t)c->V, (size_t)c->D) &&
              mn_mul_size(&norm, (size_t)c->B, (size_t)c->T) &&
              mn_mul_size(&norm, norm, (size_t)c->D);
    const auto carve = [&](float **to, size_t n) {
        *to = at ? at + all : NULL;
        ok = ok && mn_add_size(&all, all, n);
    };
    if (!ok) return false;
    carve(&w->h, features), carve(&w->logits, logits), carve(&w->head, head);
    carve(&w->r, rows), carve(&w->lse, rows), carve(&w->hit, rows);
    if (backward) {
        carve(&w->dh, features), carve(&w->dhead, head), carve(&w->weight, rows);
        carve(&w->dnorm, norm);
    }
    *count = all;
    return ok;
}

static bool plan_of(const mn_call *c, bool backward, mn_plan *plan) {
    workspace w;
    size_t count;
    return carve_workspace(&w, &count, NULL, c, backward) &&
           mn_mul_size(&plan->shared_bytes, count, sizeof(float));
}

/* c (M,N) of rows that lie close */
static mn_gemm_problem gemm_of(const float *a, const float *b, float *c, int64_t M, int64_t N,
                                  int64_t K) {
    mn_gemm_problem workspace = {};
    workspace.dtype = workspace.c_dtype = MN_F32;
    workspace.a = a, workspace.b = b, workspace.c = c;
    workspace.M = M, workspace.N = N, workspace.K = K;
    workspace.a_row = K, workspace.b_row = N, workspace.c_row = N;
    return workspace;
}

/* Features, logits and what tokens make of them. */
template <typename T>
static int fwd_block(const mn_kla_mc_args *p, const workspace &w, bool backward, cudaStream_t on) {
    const mn_call &c = p->call;
    const int64_t rows = w.tokens * c.S;
    kla_features_kernel<T><<<mn_blocks(rows, ROWS), 32 * ROWS, 0, on>>>(*p, w);
    mn_gemm_problem logits = gemm_of(w.h, w.head, w.logits, rows, c.V, c.D);
    logits.b_transposed = true, logits.b_row = c.D;
    const int code = mn_gemm_simt(&logits, on);
    if (code != cudaSuccess) return code;
    kla_logsumexp_kernel<<<(unsigned)rows, THREADS, 0, on>>>(*p, w);
    kla_nll_kernel<T><<<mn_blocks(w.tokens, THREADS), THREADS, 0, on>>>(*p, w, backward);
    if (!backward && p->logprob.data) {
        kla_logprob_kernel<T><<<mn_blocks(w.tokens * c.V, THREADS), THREADS, 0, on>>>(*p, w);
    }
    return mn_launch_status();
}

template <typename T>
static int gradients_of_block(const mn_kla_mc_args *p, const workspace &w, cudaStream_t on) {
    const mn_call &c = p->call;
    const int64_t rows = w.tokens * c.S;
    kla_logits_bwd_kernel<<<mn_blocks(rows * c.V, THREADS), THREADS, 0, on>>>(*p, w);
    const mn_gemm_problem dh = gemm_of(w.logits, w.head, w.dh, rows, c.D, c.V);
    mn_gemm_problem dhead = gemm_of(w.logits, w.h, w.dhead, c.V, c.D, rows);
    dhead.a_transposed = true, dhead.a_row = c.V, dhead.accumulate = w.first > 0;
    int code = mn_gemm_simt(&dh, on);
    if (code == cudaSuccess && p->grad.head.data) code = mn_gemm_simt(&dhead, on);
    if (code != cudaSuccess) return code;
    if (p->norm.data) kla_norm_bwd_kernel<T><<<mn_blocks(rows, ROWS), 32 * ROWS, 0, on>>>(*p, w);
    kla_features_bwd_kernel<T><<<mn_blocks(w.tokens * c.D, THREADS), THREADS, 0, on>>>(*p, w);
    return mn_launch_status();
}

template <typename T>
static int run(const mn_kla_mc_args *p, float *shared, bool backward, cudaStream_t on) {
    const mn_call &c = p->call;
    const int64_t tokens = c.B * c.T, step = tokens_of_block(&c), head = c.V * c.D;
    workspace w;
    size_t count;
    if (!carve_workspace(&w, &count, shared, &c, backward) || step * c.S > INT32_MAX) {
        return cudaErrorNotSupported;
    }
    if (head > 0) {
        kla_to_f32_kernel<T><<<mn_blocks(head, THREADS), THREADS, 0, on>>>(
            w.head, (const T *)p->head.data, head);
    }
    int code = mn_launch_status();
    if (backward && code == cudaSuccess) {
        code = cudaMemsetAsync(w.dhead, 0, (size_t)head * sizeof(float), on);
    }
    for (w.first = 0; w.first < tokens && code == cudaSuccess; w.first += step) {
        w.tokens = mn_min(step, tokens - w.first);
        code = fwd_block<T>(p, w, backward, on);
        if (code == cudaSuccess && backward) code = gradients_of_block<T>(p, w, on);
    }
    if (code != cudaSuccess || !backward) return code;
    if (p->grad.head.data && head > 0) {
        kla_from_f32_kernel<T><<<mn_blocks(head, THREADS), THREADS, 0, on>>>(
            (T *)p->grad.head.data, w.dhead, head);
    }
    if (p->grad.norm.data && c.D > 0) {
        kla_norm_grad_kernel<T><<<mn_blocks(c.D, THREADS), THREADS, 0, on>>>(*p, w.dnorm);
    }
    return mn_launch_status();
}

static int run_any(const void *args, void *shared, bool backward, void *stream) {
    const mn_kla_mc_args *p = (const mn_kla_mc_args *)args;
    const cudaStream_t on = (cudaStream_t)stream;
    return p->call.dtype == MN_BF16 ? run<mn_bf16>(p, (float *)shared, backward, on)
                                    : run<float>(p, (float *)shared, backward, on);
}

MN_CUDA_PLAN(kla_mc_forward) {
    return plan_of((const mn_call *)args, false, plan);
}

MN_CUDA_PLAN(kla_mc_backward) {
    return plan_of((const mn_call *)args, true, plan);
}

MN_CUDA_LAUNCH(kla_mc_forward) {
    return run_any(args, shared, false, stream);
}

MN_CUDA_LAUNCH(kla_mc_backward) {
    return run_any(args, shared, true, stream);
}

}    // namespace mneme::moebius
