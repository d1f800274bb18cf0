/* additive_column.cu - S = diag(exp g) S + v k';  o = scale S q (see ref/additive_column.c).
 *
 * S is the state of additive the other way round. Let additive take the gradient of this o as
 * queries, values as keys and keys as values, with queries as the gradient of what it reads; then
 *
 *   its dq is o    its dv is dk    its dk is dv    its o is dq    dg and dstate0 are the same,
 *
 * so that a backward pass here is a backward and a forward pass of additive. A forward pass in bf16
 * is what additive has for dq over chunks; other sizes, float32 and one token are the recurrence
 * below, where a row of the state belongs to a value channel and waits for no other. */
#include "kernels/cuda/additive/additive.cuh"
#include "kernels/cuda/additive/additive_column_step.cuh"
#include "kernels/cuda/recurrent/matrix_state.cuh"

namespace mneme::additive {

using recurrent::mn_matrix_apply_decay;
using recurrent::mn_matrix_decay;

MN_CUDA_PLAN(additive_forward);
MN_CUDA_PLAN(additive_backward);
MN_CUDA_LAUNCH(additive_forward);

enum { MAX_K = 1024, CHANNELS = 4, WARPS = 8, TILE = CHANNELS * WARPS };

/* ---- recurrence ------------------------------------------------------------------------------ */

template <int R>
constexpr int column_tokens = R > 8 ? 2 : R > 4 ? 8 : 16;    // that shared memory has at a time

/* Tokens in shared memory, zeros beyond the sizes; decays as mn_matrix_decay has them. */
template <int R>
struct column_smem {
    float q[column_tokens<R>][32 * R], k[column_tokens<R>][32 * R];
    float v[column_tokens<R>][TILE], decay[column_tokens<R>][TILE];
};

/* Which value channels of which head of which sequence a block has. */
struct column_coord {
    int64_t n, h, channel0;
    mn_span span;
};

/* Loads tokens [t, t + count). All threads of the block call; those that still read the tokens
 * before must be done. */
template <typename T, int R>
__device__ static void load_tokens(column_smem<R> &to, const mn_additive_column_args &p,
                                   const column_coord &at, int64_t t, int count) {
    for (int n = threadIdx.x; n < count * 32 * R; n += 32 * WARPS) {
        const int token = n / (32 * R), i = n % (32 * R);
        const int64_t when = at.span.t0 + t + token;
        const bool inside = i < p.call.K;
        to.q[token][i] = inside ? mn_float(mn_row<T>(p.q, at.span.b, when, at.h)[i]) : 0.0f;
        to.k[token][i] = inside ? mn_float(mn_row<T>(p.k, at.span.b, when, at.h)[i]) : 0.0f;
    }
    for (int n = threadIdx.x; n < count * TILE; n += 32 * WARPS) {
        const int token = n / TILE, c = n % TILE;
        const int64_t when = at.span.t0 + t + token, j = at.channel0 + c;
        const bool inside = j < p.call.V;
        const float g = inside ? mn_float(mn_row<T>(p.g, at.span.b, when, at.h)[j]) : 0.0f;
        to.v[token][c] = inside ? mn_float(mn_row<T>(p.v, at.span.b, when, at.h)[j]) : 0.0f;
        to.decay[token][c] = mn_matrix_decay(g);
    }
}

/* Calls use(cell, its number in the state of the head, whether there is such a cell): a warp has
 * CHANNELS rows of the state, lane l of it the cells l, l + 32, ... of each. */
template <int R, typename F>
__device__ static void each_cell(float (&S)[R][CHANNELS], const mn_call &call,
                                 const column_coord &at, F use) {
    const int64_t j0 = at.channel0 + threadIdx.x / 32 * CHANNELS;
#pragma unroll
    for (int r = 0; r < R; r++) {
        const int64_t i = threadIdx.x % 32 + 32 * r;
#pragma unroll
        for (int c = 0; c < CHANNELS; c++) {
            use(S[r][c], (j0 + c) * call.K + i, i < call.K && j0 + c < call.V);
        }
    }
}

/* One token: the state moves behind it; `o` becomes S q in all lanes. */
template <int R>
__device__ static void advance(float (&S)[R][CHANNELS], float (&o)[CHANNELS],
                               const column_smem<R> &in, int token) {
    const int lane = threadIdx.x % 32, c0 = threadIdx.x / 32 * CHANNELS;
#pragma unroll
    for (int c = 0; c < CHANNELS; c++) {
        const float decay = in.decay[token][c0 + c], v = in.v[token][c0 + c];
        o[c] = 0.0f;
#pragma unroll
        for (int r = 0; r < R; r++) {
            const int i = lane + 32 * r;
            S[r][c] = fmaf(v, in.k[token][i], mn_matrix_apply_decay(S[r][c], decay));
            o[c] = fmaf(in.q[token][i], S[r][c], o[c]);
        }
    }
#pragma unroll
    for (int c = 0; c < CHANNELS; c++) o[c] = mn_warp_sum(o[c]);
}

template <typename T, int R>
__global__ void __launch_bounds__(32 * WARPS)
additive_column_fwd_recurrent(const __grid_constant__ mn_additive_column_args p, int64_t n_tiles) {
    constexpr int TOKENS = column_tokens<R>;
    __shared__ column_smem<R> in;
    const int64_t index = blockIdx.x, n = index / n_tiles / p.call.H;
    const column_coord at = { n, index / n_tiles % p.call.H, index % n_tiles * TILE,
                              mn_span_at(p.call, n) };
    const float *from = mn_row<float>(p.state0, n, 0, at.h);
    float *to = mn_row<float>(p.state, n, 0, at.h);
    float S[R][CHANNELS];
    each_cell<R>(S, p.call, at, [&](float &cell, int64_t i, bool inside) {
        cell = inside && from ? from[i] : 0.0f;
    });
    for (int64_t t = 0; t < at.span.length; t += TOKENS) {
        const int count = (int)min((int64_t)TOKENS, at.span.length - t);
        __syncthreads();
        load_tokens<T, R>(in, p, at, t, count);
        __syncthreads();
        for (int token = 0; token < count; token++) {
            float o[CHANNELS];
            advance<R>(S, o, in, token);
            T *row = mn_row<T>(p.o, at.span.b, at.span.t0 + t + token, at.h);
            const int64_t j0 = at.channel0 + threadIdx.x / 32 * CHANNELS;
#pragma unroll
            for (int c = 0; c < CHANNELS; c++) {
                const bool mine = row && threadIdx.x % 32 == c && j0 + c < p.call.V;
                if (mine) mn_put(row + j0 + c, (float)p.scale * o[c]);
            }
        }
    }
    each_cell<R>(S, p.call, at, [&](float &cell, int64_t i, bool inside) {
        if (inside && to) to[i] = cell;
    });
}

template <typename T, int R>
static int forward_of(const mn_additive_column_args *p, cudaStream_t stream) {
    const int64_t n_tiles = mn_ceil_div(p->call.V, TILE);
    const int64_t blocks = n_tiles * p->call.H * mn_n_spans(p->call);
    if (blocks == 0) return cudaSuccess;
    if (blocks > INT32_MAX) return cudaErrorNotSupported;
    additive_column_fwd_recurrent<T, R><<<(unsigned)blocks, 32 * WARPS, 0, stream>>>(*p, n_tiles);
    return mn_launch_status();
}

template <typename T>
static int forward(const mn_additive_column_args *p, cudaStream_t stream) {
    const int64_t K = p->call.K;
    if (K <= 32) return forward_of<T, 1>(p, stream);
    if (K <= 64) return forward_of<T, 2>(p, stream);
    if (K <= 128) return forward_of<T, 4>(p, stream);
    if (K <= 256) return forward_of<T, 8>(p, stream);
    return K <= MAX_K ? forward_of<T, 32>(p, stream) : (int)cudaErrorNotSupported;
}

static int forward_any(const mn_additive_column_args *p, void *stream) {
    const cudaStream_t on = (cudaStream_t)stream;
    return p->call.dtype == MN_BF16 ? forward<mn_bf16>(p, on) : forward<float>(p, on);
}

/* ---- gradients of many channels -------------------------------------------------------------- */

/* Channels that additive has as keys are at most so many; beyond, the recurrence goes back itself,
 * from states kept in front of every SEGMENT tokens and, of a segment, in front of each. */
enum { MOST_CHANNELS = recurrent::MN_MATRIX_MAX_K, MOST_BACK_K = 256, SEGMENT = 64 };

struct column_workspace {
    float *segments, *tokens, *sums;
};

/* Floats of the parts of a workspace. */
struct column_extent {
    size_t kept, segments, tokens, sums;
};

static bool size_back(column_extent *to, const mn_call &call) {
    const size_t rows = call.K <= 32 ? 1 : call.K <= 64 ? 2 : call.K <= 128 ? 4 : 8;
    const size_t tiles = (size_t)mn_ceil_div(call.V, TILE), H = (size_t)call.H;
    size_t slots, blocks;
    to->kept = rows * CHANNELS * 32 * WARPS;
    return mn_mul_size(&slots, (size_t)mn_tile_slots(call, SEGMENT), H * tiles) &&
           mn_mul_size(&to->segments, slots, to->kept) &&
           mn_mul_size(&blocks, (size_t)mn_n_spans(call), H * tiles) &&
           mn_mul_size(&to->tokens, blocks, SEGMENT * to->kept) &&
           mn_mul_size(&to->sums, (size_t)call.B * (size_t)call.T, H * tiles) &&
           mn_mul_size(&to->sums, to->sums, (size_t)(2 * call.K));
}

/* A thread's cells to memory and back. */
template <int R>
__device__ static void keep(float *to, const float (&S)[R][CHANNELS]) {
#pragma unroll
    for (int r = 0; r < R; r++) {
        mn_store<CHANNELS>(to, (r * 32 * WARPS + (int)threadIdx.x) * CHANNELS, S[r]);
    }
}

template <int R>
__device__ static void recall(float (&S)[R][CHANNELS], const float *from) {
#pragma unroll
    for (int r = 0; r < R; r++) {
        mn_load<CHANNELS>(S[r], from, (r * 32 * WARPS + (int)threadIdx.x) * CHANNELS);
    }
}

/* Moves S over tokens [t0, t1) and keeps it in front of every `every`. */
template <typename T, int R>
__device__ static void replay(float (&S)[R][CHANNELS], float *kept, int64_t stride, int every,
                              column_smem<R> &in, const mn_additive_column_args &p,
                              const column_coord &at, int64_t t0, int64_t t1) {
    for (int64_t t = t0; t < t1; t += column_tokens<R>) {
        const int count = (int)min((int64_t)column_tokens<R>, t1 - t);
        __syncthreads();
        load_tokens<T, R>(in, p, at, t, count);
        __syncthreads();
        for (int token = 0; token < count; token++) {
            float o[CHANNELS];
            const int64_t past = t + token - t0;
            if (past % every == 0) keep<R>(kept + past / every * stride, S);
            advance<R>(S, o, in, token);
        }
    }
}

/* Gradients of one token from the state in front of it; D moves in front of it too. Sums over this
 * warp's channels, of dq and dk, go to shared memory. */
template <typename T, int R>
__device__ static void token_back(float (&D)[R][CHANNELS], const float (&before)[R][CHANNELS],
                                  float (*sums)[32 * R], const column_smem<R> &in,
                                  const mn_additive_column_args &p, const column_coord &at,
                                  int64_t t) {
    const int lane = threadIdx.x % 32, c0 = threadIdx.x / 32 * CHANNELS;
    const int64_t j0 = at.channel0 + c0;
    const T *d_o = mn_row<T>(p.cot.o, at.span.b, at.span.t0 + t, at.h);
    T *dv = mn_row<T>(p.grad.v, at.span.b, at.span.t0 + t, at.h);
    T *dg = mn_row<T>(p.grad.g, at.span.b, at.span.t0 + t, at.h);
    float to_q[R] = {}, to_k[R] = {};
#pragma unroll
    for (int c = 0; c < CHANNELS; c++) {
        const bool inside = j0 + c < p.call.V;
        const float d = inside ? mn_get(d_o, j0 + c) : 0.0f;
        const float decay = in.decay[0][c0 + c], v = in.v[0][c0 + c];
        float to_v = 0.0f, to_g = 0.0f;
#pragma unroll
        for (int r = 0; r < R; r++) {
            const float k = in.k[0][lane + 32 * r], q = in.q[0][lane + 32 * r];
            const float decayed = mn_matrix_apply_decay(before[r][c], decay);
            to_q[r] = fmaf(fmaf(v, k, decayed), d, to_q[r]);
            D[r][c] = fmaf((float)p.scale * q, d, D[r][c]);
            to_k[r] = fmaf(D[r][c], v, to_k[r]);
            to_v = fmaf(D[r][c], k, to_v);
            to_g = fmaf(D[r][c], decayed, to_g);
            D[r][c] = mn_matrix_apply_decay(D[r][c], decay);
        }
        to_v = mn_warp_sum(to_v), to_g = mn_warp_sum(to_g);
        if (inside && dv && lane == 0) mn_put(dv + j0 + c, to_v);
        if (inside && dg && lane == 1) mn_put(dg + j0 + c, to_g);
    }
#pragma unroll
    for (int r = 0; r < R; r++) sums[0][lane + 32 * r] = to_q[r], sums[1][lane + 32 * r] = to_k[r];
}

template <typename T, int R>
__global__ void __launch_bounds__(32 * WARPS)
additive_column_bwd_recurrent(const __grid_constant__ mn_additive_column_args p, int64_t n_tiles,
                              column_workspace workspace) {
    constexpr int64_t KEPT = R * CHANNELS * 32 * WARPS;
    __shared__ column_smem<R> in;
    __shared__ float sums[WARPS][2][32 * R];
    const int64_t index = blockIdx.x, n = index / n_tiles / p.call.H, tile = index % n_tiles;
    const column_coord at = { n, index / n_tiles % p.call.H, tile * TILE, mn_span_at(p.call, n) };
    const int64_t stride = p.call.H * n_tiles * KEPT, K = p.call.K;
    float *segments = workspace.segments + mn_scan_first_slot(p.call, n, SEGMENT) * stride +
                      index % (p.call.H * n_tiles) * KEPT;
    float *tokens = workspace.tokens + index * SEGMENT * KEPT;
    const float *from = mn_row<float>(p.state0, n, 0, at.h);
    const float *cot = mn_row<float>(p.cot.state, n, 0, at.h);
    float *to = mn_row<float>(p.grad.state0, n, 0, at.h);
    float S[R][CHANNELS], D[R][CHANNELS];
    each_cell<R>(S, p.call, at, [&](float &cell, int64_t i, bool inside) {
        cell = inside && from ? from[i] : 0.0f;
    });
    each_cell<R>(D, p.call, at, [&](float &cell, int64_t i, bool inside) {
        cell = inside && cot ? cot[i] : 0.0f;
    });
    replay<T, R>(S, segments, stride, SEGMENT, in, p, at, 0, at.span.length);
    for (int64_t s = (at.span.length - 1) / SEGMENT; s >= 0 && at.span.length > 0; s--) {
        const int64_t t0 = s * SEGMENT, t1 = min(t0 + SEGMENT, at.span.length);
        recall<R>(S, segments + s * stride);
        replay<T, R>(S, tokens, KEPT, 1, in, p, at, t0, t1);
        for (int64_t t = t1 - 1; t >= t0; t--) {
            __syncthreads();
            load_tokens<T, R>(in, p, at, t, 1);
            __syncthreads();
            recall<R>(S, tokens + (t - t0) * KEPT);
            token_back<T, R>(D, S, sums[threadIdx.x / 32], in, p, at, t);
            __syncthreads();
            const int64_t row = (at.span.b * p.call.T + at.span.t0 + t) * p.call.H + at.h;
            float *partial = workspace.sums + (tile * p.call.B * p.call.T * p.call.H + row) * 2 * K;
            for (int i = threadIdx.x; i < 64 * R; i += 32 * WARPS) {
                float sum = 0.0f;
#pragma unroll
                for (int warp = 0; warp < WARPS; warp++) {
                    sum += sums[warp][i / (32 * R)][i % (32 * R)];
                }
                if (i % (32 * R) < K) partial[i / (32 * R) * K + i % (32 * R)] = sum;
            }
        }
    }
    each_cell<R>(D, p.call, at, [&](float &cell, int64_t i, bool inside) {
        if (inside && to) to[i] = cell;
    });
}

/* dq and dk of a token and head: sums over the tiles in their order. A warp has one. */
template <typename T>
__global__ void __launch_bounds__(256)
additive_column_reduce_grads(const __grid_constant__ mn_additive_column_args p, int64_t n_tiles,
                             const float *sums) {
    const int64_t row = blockIdx.x * (int64_t)8 + threadIdx.x / 32, K = p.call.K;
    const int64_t rows = p.call.B * p.call.T * p.call.H;
    if (row >= rows) return;
    const int64_t h = row % p.call.H, t = row / p.call.H % p.call.T, b = row / p.call.H / p.call.T;
    T *dq = mn_row<T>(p.grad.q, b, t, h), *dk = mn_row<T>(p.grad.k, b, t, h);
    for (int64_t i = threadIdx.x % 32; i < K; i += 32) {
        float to_q = 0.0f, to_k = 0.0f;
        for (int64_t tile = 0; tile < n_tiles; tile++) {
            const float *partial = sums + (tile * rows + row) * 2 * K + i;
            to_q += partial[0], to_k += partial[K];
        }
        if (dq) mn_put(dq + i, (float)p.scale * to_q);
        if (dk) mn_put(dk + i, to_k);
    }
}

template <typename T, int R>
static int back_of(const mn_additive_column_args *p, float *shared, cudaStream_t stream) {
    const int64_t n_tiles = mn_ceil_div(p->call.V, TILE);
    const int64_t blocks = n_tiles * p->call.H * mn_n_spans(p->call);
    const int64_t rows = p->call.B * p->call.T * p->call.H;
    column_extent extent;
    if (blocks == 0) return cudaSuccess;
    if (blocks > INT32_MAX || !size_back(&extent, p->call)) return cudaErrorNotSupported;
    const column_workspace workspace = { shared, shared + extent.segments,
                                         shared + extent.segments + extent.tokens };
    additive_column_bwd_recurrent<T, R>
        <<<(unsigned)blocks, 32 * WARPS, 0, stream>>>(*p, n_tiles, workspace);
    if (rows > 0) {
        additive_column_reduce_grads<T><<<mn_blocks(rows, 8), 256, 0, stream>>>(*p, n_tiles,
                                                                               workspace.sums);
    }
    return mn_launch_status();
}

template <typename T>
static int back(const mn_additive_column_args *p, float *shared, cudaStream_t stream) {
    const int64_t K = p->call.K;
    if (K <= 32) return back_of<T, 1>(p, shared, stream);
    if (K <= 64) return back_of<T, 2>(p, shared, stream);
    if (K <= 128) return back_of<T, 4>(p, shared, stream);
    return K <= MOST_BACK_K ? back_of<T, 8>(p, shared, stream) : (int)cudaErrorNotSupported;
}

/* ---- one token ------------------------------------------------------------------------------- */

enum { STEP_ROWS = 2 };    // of the state of some lanes

/* While it waits for the launch in front a thread prefetches its cells into L2. */
template <typename T, int LANES, int PACKS>
__global__ void __launch_bounds__(STEP_THREADS)
additive_column_step_recurrent(const __grid_constant__ mn_additive_column_args p,
                               int64_t n_tiles) {
    typedef step_tile<LANES, PACKS, STEP_ROWS> tile;
    const int64_t index = blockIdx.x, h = index / n_tiles % p.call.H;
    const int64_t n = index / n_tiles / p.call.H, first = index % n_tiles * tile::columns;
    mn_pdl_launch_dependents();
    tile::prefetch(p, n, h, first);
    mn_pdl_wait();
    tile::template step<T>(p, n, h, first);
}

template <typename T, int LANES, int PACKS>
static int step_of(const mn_additive_column_args *p, cudaStream_t stream) {
    const int64_t n_tiles = mn_ceil_div(p->call.V, step_tile<LANES, PACKS, STEP_ROWS>::columns);
    const int64_t blocks = n_tiles * p->call.H * p->call.B;
    if (blocks == 0) return cudaSuccess;
    if (blocks > INT32_MAX) return cudaErrorNotSupported;
    return mn_launch_pdl(additive_column_step_recurrent<T, LANES, PACKS>, dim3((unsigned)blocks),
                         STEP_THREADS, 0, stream, *p, n_tiles);
}

template <typename T>
static int step(const mn_additive_column_args *p, cudaStream_t stream) {
    const int64_t K = p->call.K;
    if (!additive_column_step_supported(p)) return forward<T>(p, stream);
    if (K <= 64) return step_of<T, 16, 1>(p, stream);
    if (K <= 128) return step_of<T, 32, 1>(p, stream);
    return K <= 256 ? step_of<T, 32, 2>(p, stream) : step_of<T, 32, 4>(p, stream);
}

/* ---- calls of additive ----------------------------------------------------------------------- */

/* additive with values as keys and keys as values; queries are the gradient of what it reads. */
static mn_additive_args mirrored(const mn_additive_column_args *p) {
    mn_additive_args m = {};
    m.call = p->call, m.call.K = p->call.V, m.call.V = p->call.K, m.call.J = p->call.H;
    m.scale = p->scale, m.decay = MN_DECAY_CHANNEL;
    m.k = p->v, m.v = p->k, m.g = p->g, m.state0 = p->state0;
    m.cot.o = p->q;
    return m;
}

/* The forward pass as additive's scan of dq, which also leaves the last state. */
static mn_additive_args forward_call(const mn_additive_column_args *p) {
    mn_additive_args m = mirrored(p);
    m.grad.q = p->o, m.state = p->state;
    return m;
}

/* Without a gradient of o any tensor of its shape stands for it where it is multiplied by an absent
 * one. */
static mn_additive_args gradient_call(const mn_additive_column_args *p) {
    mn_additive_args m = mirrored(p);
    m.q = p->cot.o.data ? p->cot.o : p->v;
    if (!p->cot.o.data) m.cot.o = {};
    m.cot.state = p->cot.state;
    m.grad.k = p->grad.v, m.grad.v = p->grad.k, m.grad.g = p->grad.g;
    m.grad.state0 = p->grad.state0;
    return m;
}

/* What dq is read from, and zero where there is no gradient of o. */
static mn_additive_args query_call(const mn_additive_column_args *p) {
    mn_additive_args m = mirrored(p);
    m.q = p->cot.o.data ? p->cot.o : p->v;
    m.cot.o = {};
    if (!p->cot.o.data) m.scale = 0.0;
    m.o = p->grad.q;
    return m;
}

/* Bytes of o, which additive's fastest way makes again with the other gradients; 0 where that does
 * not serve. */
static bool output_bytes(size_t *bytes, const mn_additive_column_args *p) {
    const mn_call &c = p->call;
    *bytes = 0;
    if (c.dtype != MN_BF16 || c.K > 128 || c.V > 128 || !p->grad.k.data || !p->grad.v.data ||
        !p->grad.g.data) {
        return true;
    }
    return mn_mul_size(bytes, (size_t)c.B, (size_t)c.T) &&
           mn_mul_size(bytes, *bytes, (size_t)(c.H * c.V)) &&
           mn_mul_size(bytes, *bytes, sizeof(mn_bf16)) && mn_add_size(bytes, *bytes, 255) &&
           (*bytes = *bytes / 256 * 256, true);
}

MN_CUDA_PLAN(additive_column_forward) {
    const mn_additive_args m = forward_call((const mn_additive_column_args *)args);
    return !mn_additive_query_chunks(&m) || mn_additive_query_plan(plan, &m);
}

MN_CUDA_LAUNCH(additive_column_forward) {
    const mn_additive_column_args *p = (const mn_additive_column_args *)args;
    const mn_additive_args m = forward_call(p);
    if (!mn_additive_query_chunks(&m)) return forward_any(p, stream);
    return mn_additive_query_launch(&m, shared, (cudaStream_t)stream);
}

MN_CUDA_PLAN(additive_column_step) {
    (void)args, (void)plan;
    return true;
}

MN_CUDA_LAUNCH(additive_column_step) {
    const mn_additive_column_args *p = (const mn_additive_column_args *)args;
    const cudaStream_t on = (cudaStream_t)stream;
    (void)shared;
    return p->call.dtype == MN_BF16 ? step<mn_bf16>(p, on) : step<float>(p, on);
}

MN_CUDA_PLAN(additive_column_backward) {
    const mn_additive_column_args *p = (const mn_additive_column_args *)args;
    mn_additive_args gradients = gradient_call(p), queries = query_call(p);
    mn_plan of_gradients = {}, of_queries = {};
    column_extent extent;
    size_t output, floats;
    if (p->call.V > MOST_CHANNELS) {
        return size_back(&extent, p->call) &&
               mn_add_size(&floats, extent.segments, extent.tokens) &&
               mn_add_size(&floats, floats, extent.sums) &&
               mn_mul_size(&plan->shared_bytes, floats, sizeof(float));
    }
    if (!output_bytes(&output, p)) return false;
    if (output) gradients.grad.q = p->grad.v;    // where it is, is for the launch
    return mn_additive_backward_cuda_plan(&gradients, &of_gradients) &&
           mn_additive_forward_cuda_plan(&queries, &of_queries) &&
           mn_add_size(&plan->shared_bytes, output,
                       mn_max(of_gradients.shared_bytes, of_queries.shared_bytes));
}

MN_CUDA_LAUNCH(additive_column_backward) {
    const mn_additive_column_args *p = (const mn_additive_column_args *)args;
    const mn_call &c = p->call;
    const cudaStream_t on = (cudaStream_t)stream;
    mn_additive_args gradients = gradient_call(p), queries = query_call(p);
    size_t output;
    if (c.V > MOST_CHANNELS) {
        return c.dtype == MN_BF16 ? back<mn_bf16>(p, (float *)shared, on)
                                  : back<float>(p, (float *)shared, on);
    }
    if (!output_bytes(&output, p)) return cudaErrorNotSupported;
    void *rest = (unsigned char *)shared + output;
    if (output) gradients.grad.q = { shared, { c.T * c.H * c.V, c.H * c.V, c.V } };
    const int code = mn_additive_backward_launch(&gradients, rest, true, on);
    if (code != cudaSuccess || !p->grad.q.data) return code;
    return mn_additive_forward_cuda(&queries, rest, stream);
}

}    // namespace mneme::additive
