/* dplr.cu - u = S'a;  S = diag(exp g) S + b u' + k v';  o = scale S'q (see ref/dplr.c). bf16 goes
 * over chunks (dplr_chunk.h) unless memories are narrow, decode steps are matrix_step.cuh of
 * recurrent/ (dplr_step.cuh is the stage of a megakernel); the rest goes token by token with the
 * state in registers: the tiles, cells and sums of recurrent/matrix_state.cuh.
 *
 *   D += scale q do'      dq = scale S do     dk = D v     dv = D'k     db = D u     du = D'b
 *   da = S0 du            dg = exp(g) rowsum(D . S0)        D = diag(exp g) D + a du'
 *
 * A block has a tile of value columns of one head of one sequence. Backward scans forward first and
 * keeps the state of every 64 tokens; from there, last span first, it keeps the state of every
 * group, and of a group every token's in shared memory. A second kernel adds the tiles' sums over
 * columns in the order of the tiles. */
#include "kernels/cuda/dplr/dplr_chunk.h"
#include "kernels/cuda/recurrent/matrix_state.cuh"
#include "kernels/cuda/recurrent/matrix_step.cuh"

namespace mneme::dplr {

using namespace recurrent;

enum { TO_Q, TO_K, TO_A, TO_B, TO_G, SUMS };

/* What finds a tile in the engine: its call alone. */
static __device__ inline mn_matrix_params params_of(const mn_dplr_args &p) {
    mn_matrix_params m = {};
    m.call = p.call;
    return m;
}

/* A group of tokens in shared memory; zeros beyond the sizes. */
template <int R, int TOKENS>
struct token_group {
    float q[TOKENS][32 * R], k[TOKENS][32 * R], a[TOKENS][32 * R], b[TOKENS][32 * R];
    float decay[TOKENS][32 * R];
    float v[TOKENS][mn_matrix_sizes<R>::tile], cot[TOKENS][mn_matrix_sizes<R>::tile];
};

/* Tokens of a group: their rows and, backward, their states fit shared memory. */
template <int R>
struct group_sizes {
    static constexpr int ahead = R > 8 ? 1 : R > 4 ? 4 : 8;
};

/* Loads tokens [t, t + count) of the sequence. All threads of the block call; those that still read
 * the group before must be done. */
template <typename T, int R, int TOKENS>
__device__ void load_group(token_group<R, TOKENS> &to, const mn_dplr_args &p,
                           const mn_matrix_coord &at, int64_t t, int count) {
    using sizes = mn_matrix_sizes<R>;
    for (int n = threadIdx.x; n < count * sizes::rows; n += sizes::threads) {
        const int token = n / sizes::rows, i = n % sizes::rows;
        const int64_t b = at.span.b, when = at.span.t0 + t + token;
        const bool inside = i < p.call.K;
        to.q[token][i] = inside ? mn_get(mn_row<T>(p.q, b, when, at.h), i) : 0.0f;
        to.k[token][i] = inside ? mn_get(mn_row<T>(p.k, b, when, at.h), i) : 0.0f;
        to.a[token][i] = inside ? mn_get(mn_row<T>(p.a, b, when, at.h), i) : 0.0f;
        to.b[token][i] = inside ? mn_get(mn_row<T>(p.b, b, when, at.h), i) : 0.0f;
        to.decay[token][i] = 1.0f;
        if (inside) to.decay[token][i] = mn_matrix_decay(mn_get(mn_row<T>(p.g, b, when, at.h), i));
    }
    for (int n = threadIdx.x; n < count * sizes::tile; n += sizes::threads) {
        const int token = n / sizes::tile, c = n % sizes::tile;
        const int64_t b = at.span.b, when = at.span.t0 + t + token, j = at.column0 + c;
        const bool inside = j < p.call.V;
        to.v[token][c] = inside ? mn_get(mn_row<T>(p.v, b, when, at.h), j) : 0.0f;
        to.cot[token][c] = inside ? mn_get(mn_row<T>(p.cot.o, b, when, at.h), j) : 0.0f;
    }
}

/* One token: leaves S'a in `known`, then writes. */
template <int R, int TOKENS>
__device__ void advance(mn_matrix_cells<R> &S, float (&known)[MN_MATRIX_COLUMNS],
                        const token_group<R, TOKENS> &in, int token) {
    const int lane = threadIdx.x % 32, c0 = threadIdx.x / 32 * MN_MATRIX_COLUMNS;
    float v[MN_MATRIX_COLUMNS];
    mn_load<MN_MATRIX_COLUMNS>(v, in.v[token], c0);
    S.dot(known, in.a[token]);
#pragma unroll
    for (int r = 0; r < R; r++) {
        const int i = lane + 32 * r;
        const float decay = in.decay[token][i], b = in.b[token][i], k = in.k[token][i];
#pragma unroll
        for (int c = 0; c < MN_MATRIX_COLUMNS; c++) {
            const float kept = mn_matrix_apply_decay(S.at[r][c], decay);
            S.at[r][c] = fmaf(b, known[c], fmaf(k, v[c], kept));
        }
    }
}

/* ---- forward --------------------------------------------------------------------------------- */

template <typename T, int R>
__global__ void __launch_bounds__(mn_matrix_sizes<R>::threads)
dplr_fwd_recurrent(const __grid_constant__ mn_dplr_args p, int64_t n_tiles) {
    constexpr int TOKENS = group_sizes<R>::ahead;
    __shared__ token_group<R, TOKENS> in;
    const mn_matrix_coord at = mn_matrix_block_coord<R>(params_of(p), n_tiles);
    mn_matrix_cells<R> S;
    S.load(p.state0, p.call, at);
    for (int64_t t = 0; t < at.span.length; t += TOKENS) {
        const int count = (int)min((int64_t)TOKENS, at.span.length - t);
        __syncthreads();
        load_group<T, R, TOKENS>(in, p, at, t, count);
        __syncthreads();
        for (int token = 0; token < count; token++) {
            float known[MN_MATRIX_COLUMNS], o[MN_MATRIX_COLUMNS];
            advance<R, TOKENS>(S, known, in, token);
            if (!p.o.data) continue;
            S.dot(o, in.q[token]);
#pragma unroll
            for (int c = 0; c < MN_MATRIX_COLUMNS; c++) o[c] *= (float)p.scale;
            T *row = mn_row<T>(p.o, at.span.b, at.span.t0 + t + token, at.h);
            mn_matrix_store_row(row, o, at.column0, p.call.V);
        }
    }
    S.store(p.state, p.call, at);
}

/* ---- backward -------------------------------------------------------------------------------- */

/* Shared memory of a group going back. Four columns of every row of the state for each token. */
template <int R>
struct group_smem {
    token_group<R, mn_matrix_sizes<R>::group> in;
    float before[mn_matrix_sizes<R>::group][mn_matrix_sizes<R>::kept];
    float known[mn_matrix_sizes<R>::group][mn_matrix_sizes<R>::tile];
    float sums[mn_matrix_sizes<R>::warps][SUMS][32 * R];
};

/* Where the sums of a token start in a tile's part: SUMS rows of K. */
__device__ inline int64_t partial_of(const mn_dplr_args &p, int64_t tile, int64_t b, int64_t t,
                                     int64_t h) {
    return (((tile * p.call.B + b) * p.call.T + t) * p.call.H + h) * SUMS * p.call.K;
}

/* Gradients of one token, from D behind it; D is then the one in front of it. This warp's sums over
 * its columns go to shared memory. */
template <typename T, int R>
__device__ void token_bwd(mn_matrix_cells<R> &D, group_smem<R> &smem, const mn_dplr_args &p,
                          const mn_matrix_coord &at, int64_t t, int token) {
    constexpr int C = MN_MATRIX_COLUMNS;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    mn_matrix_cells<R> before;
    float cot[C], known[C], v[C], dv[C], du[C];
    before.recall(smem.before[token]);
    mn_load<C>(cot, smem.in.cot[token], warp * C);
    mn_load<C>(known, smem.known[token], warp * C);
    mn_load<C>(v, smem.in.v[token], warp * C);
#pragma unroll
    for (int r = 0; r < R; r++) {
        const float q = (float)p.scale * smem.in.q[token][lane + 32 * r];
#pragma unroll
        for (int c = 0; c < C; c++) D.at[r][c] = fmaf(q, cot[c], D.at[r][c]);
    }
    D.dot(dv, smem.in.k[token]);
    D.dot(du, smem.in.b[token]);
    mn_matrix_store_row(mn_row<T>(p.grad.v, at.span.b, at.span.t0 + t, at.h), dv, at.column0,
                        p.call.V);
#pragma unroll
    for (int r = 0; r < R; r++) {
        const int i = lane + 32 * r;
        const float decay = smem.in.decay[token][i], a = smem.in.a[token][i];
        const float b = smem.in.b[token][i], k = smem.in.k[token][i];
        float to_q = 0.0f, to_k = 0.0f, to_a = 0.0f, to_b = 0.0f, to_g = 0.0f;
#pragma unroll
        for (int c = 0; c < C; c++) {
            const float kept = mn_matrix_apply_decay(before.at[r][c], decay);
            to_q = fmaf(fmaf(b, known[c], fmaf(k, v[c], kept)), cot[c], to_q);
            to_k = fmaf(D.at[r][c], v[c], to_k);
            to_b = fmaf(D.at[r][c], known[c], to_b);
            to_a = fmaf(before.at[r][c], du[c], to_a);
            to_g = fmaf(D.at[r][c], kept, to_g);
            D.at[r][c] = fmaf(a, du[c], mn_matrix_apply_decay(D.at[r][c], decay));
        }
        smem.sums[warp][TO_Q][i] = to_q;
        smem.sums[warp][TO_K][i] = to_k;
        smem.sums[warp][TO_A][i] = to_a;
        smem.sums[warp][TO_B][i] = to_b;
        smem.sums[warp][TO_G][i] = to_g;
    }
}

/* Adds the warps' sums of a token in their order. All threads of the block call. */
template <int R>
__device__ void store_sums(const group_smem<R> &smem, const mn_dplr_args &p, float *partial) {
    using sizes = mn_matrix_sizes<R>;
    for (int n = threadIdx.x; n < SUMS * sizes::rows; n += sizes::threads) {
        const int which = n / sizes::rows, i = n % sizes::rows;
        if (i >= p.call.K) continue;
        float sum = 0.0f;
#pragma unroll
        for (int warp = 0; warp < sizes::warps; warp++) sum += smem.sums[warp][which][i];
        partial[which * p.call.K + i] = sum;
    }
}

/* The gradients of group [t, t + count), from the state in front of it and D behind it. */
template <typename T, int R>
__device__ void group_bwd(mn_matrix_cells<R> &D, const float *state, group_smem<R> &smem,
                          float *sums, const mn_dplr_args &p, const mn_matrix_coord &at,
                          int64_t t, int count) {
    constexpr int C = MN_MATRIX_COLUMNS;
    mn_matrix_cells<R> S;
    S.recall(state);
    __syncthreads();
    load_group<T, R>(smem.in, p, at, t, count);
    __syncthreads();
    for (int token = 0; token < count; token++) {
        float known[C];
        S.keep(smem.before[token]);
        advance<R>(S, known, smem.in, token);
        if (threadIdx.x % 32 == 0) mn_store<C>(smem.known[token], threadIdx.x / 32 * C, known);
        __syncwarp();
    }
    const int64_t tile = at.column0 / mn_matrix_sizes<R>::tile;
    for (int token = count - 1; token >= 0; token--) {
        token_bwd<T, R>(D, smem, p, at, t + token, token);
        __syncthreads();
        const int64_t when = at.span.t0 + t + token;
        store_sums<R>(smem, p, sums + partial_of(p, tile, at.span.b, when, at.h));
        __syncthreads();
    }
}

/* Scans tokens [t0, t1) and keeps the state in front of every `every` of them. */
template <typename T, int R>
__device__ void recompute(mn_matrix_cells<R> &S, float *kept, int64_t stride, int every,
                          group_smem<R> &smem, const mn_dplr_args &p, const mn_matrix_coord &at,
                          int64_t t0, int64_t t1) {
    constexpr int TOKENS = mn_matrix_sizes<R>::group;
    for (int64_t t = t0; t < t1; t += TOKENS) {
        const int count = (int)min((int64_t)TOKENS, t1 - t);
        if ((t - t0) % every == 0) S.keep(kept + (t - t0) / every * stride);
        __syncthreads();
        load_group<T, R>(smem.in, p, at, t, count);
        __syncthreads();
        for (int token = 0; token < count; token++) {
            float known[MN_MATRIX_COLUMNS];
            advance<R>(S, known, smem.in, token);
        }
    }
}

template <typename T, int R>
__global__ void __launch_bounds__(mn_matrix_sizes<R>::threads)
dplr_bwd_recurrent(const __grid_constant__ mn_dplr_args p, int64_t n_tiles,
                   mn_matrix_workspace workspace) {
    using sizes = mn_matrix_sizes<R>;
    extern __shared__ __align__(128) unsigned char bytes[];
    group_smem<R> &smem = *(group_smem<R> *)bytes;
    const mn_matrix_coord at = mn_matrix_block_coord<R>(params_of(p), n_tiles);
    const int64_t stride = p.call.H * n_tiles * sizes::kept;    // between spans
    float *spans = workspace.spans + mn_matrix_first_segment(p.call, at.n) * stride +
                   at.index % (p.call.H * n_tiles) * sizes::kept;
    float *row_groups = workspace.row_groups + at.index * sizes::row_groups * sizes::kept;
    mn_matrix_cells<R> S, D;
    S.load(p.state0, p.call, at);
    recompute<T, R>(S, spans, stride, MN_MATRIX_SEGMENT, smem, p, at, 0, at.span.length);
    D.load(p.cot.state, p.call, at);
    const int64_t n_spans = (at.span.length + MN_MATRIX_SEGMENT - 1) / MN_MATRIX_SEGMENT;
    for (int64_t span = n_spans - 1; span >= 0; span--) {
        const int64_t t0 = span * MN_MATRIX_SEGMENT;
        const int64_t t1 = min(t0 + MN_MATRIX_SEGMENT, at.span.length);
        S.recall(spans + span * stride);
        recompute<T, R>(S, row_groups, sizes::kept, sizes::group, smem, p, at, t0, t1);
        for (int64_t group = (t1 - t0 - 1) / sizes::group; group >= 0; group--) {
            const int64_t t = t0 + group * sizes::group;
            const int count = (int)min((int64_t)sizes::group, t1 - t);
            group_bwd<T, R>(D, row_groups + group * sizes::kept, smem, workspace.sums, p, at, t,
                            count);
        }
    }
    D.store(p.grad.state0, p.call, at);
}

/* Sums of a token over the tiles, in their order. One warp has one token and head. */
template <typename T>
__global__ void __launch_bounds__(256)
dplr_reduce_grads(const __grid_constant__ mn_dplr_args p, int64_t n_tiles, const float *sums) {
    const int64_t row = blockIdx.x * (int64_t)8 + threadIdx.x / 32, K = p.call.K;
    if (row >= p.call.B * p.call.T * p.call.H) return;
    const int64_t h = row % p.call.H, t = row / p.call.H % p.call.T;
    const int64_t b = row / p.call.H / p.call.T;
    T *to[SUMS] = { mn_row<T>(p.grad.q, b, t, h), mn_row<T>(p.grad.k, b, t, h),
                    mn_row<T>(p.grad.a, b, t, h), mn_row<T>(p.grad.b, b, t, h),
                    mn_row<T>(p.grad.g, b, t, h) };
    for (int64_t i = threadIdx.x % 32; i < K; i += 32) {
        float sum[SUMS] = {};
        for (int64_t tile = 0; tile < n_tiles; tile++) {
            const float *partial = sums + partial_of(p, tile, b, t, h) + i;
#pragma unroll
            for (int which = 0; which < SUMS; which++) sum[which] += partial[which * K];
        }
        sum[TO_Q] *= (float)p.scale;
#pragma unroll
        for (int which = 0; which < SUMS; which++) {
            if (to[which]) mn_put(to[which] + i, sum[which]);
        }
    }
}

/* ---- launches -------------------------------------------------------------------------------- */

template <typename T, int R>
static int forward_of(const mn_dplr_args &p, cudaStream_t stream) {
    using sizes = mn_matrix_sizes<R>;
    const int64_t n_tiles = mn_ceil_div(p.call.V, sizes::tile);
    const int64_t blocks = n_tiles * p.call.H * mn_n_spans(p.call);
    if (blocks == 0) return cudaSuccess;
    if (blocks > INT32_MAX) return cudaErrorNotSupported;
    dplr_fwd_recurrent<T, R><<<(unsigned)blocks, sizes::threads, 0, stream>>>(p, n_tiles);
    return mn_launch_status();
}

/* The engine's work space with more sums of each token. */
template <int R>
static bool size_workspace(mn_matrix_workspace_sizes *to, const mn_call &call) {
    return mn_matrix_size_workspace<R>(to, call) &&
           mn_mul_size(&to->sums, to->sums / MN_MATRIX_SUMS, SUMS);
}

template <typename T, int R>
static int backward_of(const mn_dplr_args &p, float *shared, cudaStream_t stream) {
    using sizes = mn_matrix_sizes<R>;
    const int64_t n_tiles = mn_ceil_div(p.call.V, sizes::tile);
    const int64_t blocks = n_tiles * p.call.H * mn_n_spans(p.call);
    const int64_t rows = p.call.B * p.call.T * p.call.H;
    mn_matrix_workspace_sizes extent;
    if (blocks == 0) return cudaSuccess;
    if (blocks > INT32_MAX || !size_workspace<R>(&extent, p.call)) return cudaErrorNotSupported;
    const mn_matrix_workspace workspace = { shared, shared + extent.spans,
                                            shared + extent.spans + extent.row_groups };
    const int launched = mn_launch_smem(dplr_bwd_recurrent<T, R>, dim3((unsigned)blocks),
                                        sizes::threads, sizeof(group_smem<R>), stream, p, n_tiles,
                                        workspace);
    if (launched != cudaSuccess || rows == 0) return launched;
    dplr_reduce_grads<T><<<mn_blocks(rows, 8), 256, 0, stream>>>(p, n_tiles, workspace.sums);
    return mn_launch_status();
}

/* Calls function<T, R> for a key width; `arguments` in parentheses. */
#define DPLR_DISPATCH_K(function, T, K, arguments)                                                 \
    do {                                                                                           \
        if ((K) <= 32) return function<T, 1> arguments;                                            \
        if ((K) <= 64) return function<T, 2> arguments;                                            \
        if ((K) <= 128) return function<T, 4> arguments;                                           \
        if ((K) <= 256) return function<T, 8> arguments;                                           \
        if ((K) <= MN_MATRIX_MAX_K) return function<T, 32> arguments;                              \
        return cudaErrorNotSupported;                                                              \
    } while (0)

MN_CUDA_PLAN(dplr_forward) {
    const mn_dplr_args *p = (const mn_dplr_args *)args;
    return !mn_dplr_uses_chunks(p) || mn_dplr_chunk_plan(plan, p, false);
}

MN_CUDA_LAUNCH(dplr_forward) {
    const mn_dplr_args &p = *(const mn_dplr_args *)args;
    if (mn_dplr_uses_chunks(&p)) return mn_dplr_chunk_forward(&p, shared, stream);
    const cudaStream_t on = (cudaStream_t)stream;
    if (p.call.dtype == MN_BF16) DPLR_DISPATCH_K(forward_of, mn_bf16, p.call.K, (p, on));
    DPLR_DISPATCH_K(forward_of, float, p.call.K, (p, on));
}

/* One token with the state in place, by the kernel that delta's and additive's steps have. */
template <typename T>
static int step_in(const mn_dplr_args &p, cudaStream_t stream) {
    mn_step_params s = {};
    s.K = (int)p.call.K, s.V = (int)p.call.V, s.H = (int)p.call.H, s.share = 1, s.n_rows = 1;
    s.by_channel = true, s.scale = (float)p.scale;
    const bool fits = mn_step_fits(p.call) && mn_step_vec_aligned<T>(p.v) &&
                      mn_step_vec_aligned<T>(p.o) && mn_step_vec_aligned<float>(p.state0) &&
                      mn_step_vec_aligned<float>(p.state) && mn_step_view_of(&s.state0, p.state0) &&
                      mn_step_view_of(&s.state, p.state) && mn_step_view_of(&s.q, p.q) &&
                      mn_step_view_of(&s.e, p.a) && mn_step_view_of(&s.w, p.k) &&
                      mn_step_view_of(&s.v, p.v) && mn_step_view_of(&s.b, p.b) &&
                      mn_step_view_of(&s.g, p.g) && mn_step_view_of(&s.o, p.o);
    if (!fits) DPLR_DISPATCH_K(forward_of, T, p.call.K, (p, stream));
    return mn_step_launch<T, MN_STEP_DPLR, 1>(s, p.call.B, stream);
}

MN_CUDA_PLAN(dplr_step) {
    (void)args, (void)plan;
    return true;
}

MN_CUDA_LAUNCH(dplr_step) {
    (void)shared;
    const mn_dplr_args &p = *(const mn_dplr_args *)args;
    const cudaStream_t on = (cudaStream_t)stream;
    return p.call.dtype == MN_BF16 ? step_in<mn_bf16>(p, on) : step_in<float>(p, on);
}

static bool size_workspace_any(mn_matrix_workspace_sizes *to, const mn_call &call) {
    if (call.K <= 32) return size_workspace<1>(to, call);
    if (call.K <= 64) return size_workspace<2>(to, call);
    if (call.K <= 128) return size_workspace<4>(to, call);
    if (call.K <= 256) return size_workspace<8>(to, call);
    return size_workspace<32>(to, call);
}

MN_CUDA_PLAN(dplr_backward) {
    const mn_dplr_args *p = (const mn_dplr_args *)args;
    mn_matrix_workspace_sizes extent;
    size_t all;
    if (mn_dplr_uses_chunks(p)) return mn_dplr_chunk_plan(plan, p, true);
    return size_workspace_any(&extent, p->call) &&
           mn_add_size(&all, extent.spans, extent.row_groups) &&
           mn_add_size(&all, all, extent.sums) &&
           mn_mul_size(&plan->shared_bytes, all, sizeof(float));
}

MN_CUDA_LAUNCH(dplr_backward) {
    const mn_dplr_args &p = *(const mn_dplr_args *)args;
    const cudaStream_t on = (cudaStream_t)stream;
    float *work = (float *)shared;
    if (mn_dplr_uses_chunks(&p)) return mn_dplr_chunk_backward(&p, shared, stream);
    if (p.call.dtype == MN_BF16) DPLR_DISPATCH_K(backward_of, mn_bf16, p.call.K, (p, work, on));
    DPLR_DISPATCH_K(backward_of, float, p.call.K, (p, work, on));
}

}    // namespace mneme::dplr
