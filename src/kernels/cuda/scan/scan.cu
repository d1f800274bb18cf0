/* scan.cu - Mamba-1's selective scan (see ref/scan.c): one thread has one state of one channel, a
 * block 16 channels with 16 states at a time, and scans through time by tiles of 16 tokens.
 *
 *   d = softplus(dt + dt_bias)     h_t = exp(d A) h_{t-1} + d u B     y = (sum C h + D u) silu(z)
 *
 * u, dt, z, y (B,T,V), B and C (B,T,K), A (V,K), h (N,V,K); a block has 16 channels of a sequence.
 * y, du and ddt are sums over the 16 columns (states) of a line (channel), dB and dC over lines and
 * blocks, through partials. Backward stores h before each tile and computes it again inside. More
 * than 16 states go one group after the other through a tile. One token: scan_step.cuh. */
#include "kernels/cuda/prim/activation.cuh"
#include "kernels/cuda/prim/common.cuh"
#include "kernels/cuda/prim/pdl.cuh"
#include "kernels/cuda/prim/split_reduce.cuh"
#include "kernels/cuda/scan/scan_step.cuh"

namespace mneme::scan {

/* Tiles of diagonal recurrences, 16 lines x 16 columns, one thread each, by 16 tokens.
 *
 *
 * Thread i of a block has line i / 16 and column i % 16 of the block's cells. Numbers of a token
 * that belong to a line or to a column lie in shared memory, 16 tokens in a row, so that a thread
 * reads four tokens at once. */

enum {
    MN_DIAG_SIDE = 16,
    MN_DIAG_BLOCK_THREADS = MN_DIAG_SIDE * MN_DIAG_SIDE,    // threads of a block
    MN_DIAG_TOKENS = 16,                       // of a tile
    MN_DIAG_PITCH = MN_DIAG_TOKENS + 4,        // rows 16 bytes aligned, in different banks
};

/* at[i][t]: number of line or column i at token t of the tile */
struct alignas(16) mn_diag_rows {
    float at[MN_DIAG_SIDE][MN_DIAG_PITCH];

    /* Thread (t, i) brings one number. */
    __device__ void put(float x) {
        at[threadIdx.x % MN_DIAG_SIDE][threadIdx.x / MN_DIAG_SIDE] = x;
    }

    /* Tokens t to t + 3 of line or column i; t is a multiple of 4. */
    __device__ void get(float (&x)[4], int i, int t) const {
        const float4 four = *(const float4 *)(at[i] + t);
        x[0] = four.x, x[1] = four.y, x[2] = four.z, x[3] = four.w;
    }
};

/* Tokens [first, first + MN_DIAG_TOKENS) of a sequence, or those of them that there are. */
struct mn_diag_tile {
    mn_span span;
    int64_t first;
    int n_rows;
};

__device__ inline mn_diag_tile mn_diag_tile_at(const mn_span &span, int64_t index) {
    const int64_t first = index * MN_DIAG_TOKENS;
    return { span, first, (int)min((int64_t)MN_DIAG_TOKENS, span.length - first) };
}

__device__ inline int64_t mn_diag_tiles(const mn_span &span) {
    return (span.length + MN_DIAG_TOKENS - 1) / MN_DIAG_TOKENS;
}

/* Where the tiles of sequence n begin among those of all, as mn_tile_slots counts them. */
__device__ inline int64_t mn_diag_first_slot(const mn_call &call, int64_t n) {
    if (call.cu_seqlens) return call.cu_seqlens[n] / MN_DIAG_TOKENS + n;
    return n * ((call.T + MN_DIAG_TOKENS - 1) / MN_DIAG_TOKENS);
}

/* Thread (t, i)'s number: element base + i of token t of head h; zero outside of `count` and of the
 * tile, and where the tensor is absent. */
template <typename T>
__device__ inline float mn_diag_load(const mn_in &view, const mn_diag_tile &tile, int64_t h,
                                      int64_t base, int64_t count) {
    const int t = threadIdx.x / MN_DIAG_SIDE;
    const int64_t i = base + threadIdx.x % MN_DIAG_SIDE;
    if (!view.data || i >= count || t >= tile.n_rows) return 0.0f;
    return mn_float(mn_row<T>(view, tile.span.b, tile.span.t0 + tile.first + t, h)[i]);
}

/* One exchange between lanes `width` apart: each keeps one half of 2 width tokens. */
template <int width>
__device__ __forceinline__ void mn_diag_reduce_half(float (&x)[MN_DIAG_TOKENS]) {
    const bool upper = threadIdx.x & width;
#pragma unroll
    for (int i = 0; i < width; i++) {
        const float early = x[i], late = x[i + width];    // values: chosen addresses would
        const float give = upper ? early : late;          // keep x out of the registers
        x[i] = (upper ? late : early) + __shfl_xor_sync(0xffffffffu, give, width);
    }
}

/* x[t] summed over the 16 columns of each line: column t gets the sum of token t. The halves of the
 * lanes exchange halves of the tokens, so it takes 15 exchanges and not 64. */
__device__ __forceinline__ float mn_diag_row_sums(float (&x)[MN_DIAG_TOKENS]) {
    mn_diag_reduce_half<8>(x);
    mn_diag_reduce_half<4>(x);
    mn_diag_reduce_half<2>(x);
    mn_diag_reduce_half<1>(x);
    return x[0];
}

/* Two numbers of a token summed over the two lines of a warp: the first sum in the lower half of
 * its lanes, the second one in the upper half. */
__device__ inline float mn_diag_pair_sums(float first, float second) {
    const bool upper = threadIdx.x & MN_DIAG_SIDE;
    const float give = upper ? first : second, keep = upper ? second : first;
    return keep + __shfl_xor_sync(0xffffffffu, give, MN_DIAG_SIDE);
}

enum { SIDE = MN_DIAG_SIDE, TOKENS = MN_DIAG_TOKENS, WARPS = MN_DIAG_BLOCK_THREADS / 32,
    MAX_GROUPS = 16 };

/* Work space of the way back: h in front of tiles, dB and dC by channel tiles, and dA, dD and the
 * bias's gradient by sequences. */
struct workspace {
    float *states, *rows, *partials;
};

/* A tile's inputs: d and u by lines, B and C by columns. */
struct inputs {
    mn_diag_rows d, u, gr, B, C;
};

struct coord {
    int64_t n, channel0, tile;    // tile: of channels
    int line, column;
};

__device__ static coord coord_of(int64_t tiles) {
    coord at;
    at.tile = blockIdx.x % tiles, at.n = blockIdx.x / tiles, at.channel0 = at.tile * SIDE;
    at.line = threadIdx.x / SIDE, at.column = threadIdx.x % SIDE;
    return at;
}

/* This thread's number of a (V,K) matrix; zero outside. */
template <typename T>
__device__ static float cell_of(const void *data, const mn_scan_args &p, const coord &at,
                                int group) {
    const int64_t v = at.channel0 + at.line, k = group * SIDE + at.column;
    if (!data || v >= p.call.V || k >= p.call.K) return 0.0f;
    return mn_float(((const T *)data)[v * p.call.K + k]);
}

/* d and u of the tile; thread (t, i) has channel i. Returns dt + dt_bias there. */
template <typename T>
__device__ static float load_channels(inputs &in, const mn_scan_args &p, const mn_diag_tile &tile,
                                       int64_t channel0) {
    const int64_t v = channel0 + threadIdx.x % SIDE;
    const bool valid = v < p.call.V && (int)threadIdx.x / SIDE < tile.n_rows;
    const float bias = valid ? mn_get((const T *)p.dt_bias.data, v) : 0.0f;
    const float x = mn_diag_load<T>(p.dt, tile, 0, channel0, p.call.V) + bias;
    in.d.put(!valid ? 0.0f : p.softplus ? mn_softplus(x) : x);
    in.u.put(mn_diag_load<T>(p.u, tile, 0, channel0, p.call.V));
    return x;
}

template <typename T>
__device__ static void load_states(inputs &in, const mn_scan_args &p, const mn_diag_tile &tile,
                                    int group) {
    in.B.put(mn_diag_load<T>(p.Bm, tile, 0, group * SIDE, p.call.K));
    in.C.put(mn_diag_load<T>(p.Cm, tile, 0, group * SIDE, p.call.K));
}

/* ---- forward --------------------------------------------------------------------------------- */

template <typename T, int GROUPS>
__global__ void __launch_bounds__(MN_DIAG_BLOCK_THREADS)
scan_forward_kernel(const __grid_constant__ mn_scan_args p, int64_t tiles) {
    __shared__ inputs in;
    const coord at = coord_of(tiles);
    const mn_span span = mn_span_at(p.call, at.n);
    float h[GROUPS], A[GROUPS];
    const float *first = mn_row<float>(p.h0, at.n, 0, 0);
#pragma unroll
    for (int g = 0; g < GROUPS; g++) {
        h[g] = cell_of<float>(first, p, at, g);
        A[g] = cell_of<T>(p.A.data, p, at, g);
    }
    const int64_t v = at.channel0 + at.line;
    const float D = v < p.call.V ? mn_get((const T *)p.D.data, v) : 0.0f;
    for (int64_t i = 0; i < mn_diag_tiles(span); i++) {
        const mn_diag_tile tile = mn_diag_tile_at(span, i);
        float sums[TOKENS] = {};
        __syncthreads();
        load_channels<T>(in, p, tile, at.channel0);
#pragma unroll
        for (int g = 0; g < GROUPS; g++) {
            if (g > 0) __syncthreads();
            load_states<T>(in, p, tile, g);
            __syncthreads();
#pragma unroll
            for (int t = 0; t < TOKENS; t++) {
                const float d = in.d.at[at.line][t], u = in.u.at[at.line][t];
                h[g] = fmaf(expf(d * A[g]), h[g], d * u * in.B.at[at.column][t]);
                sums[t] = fmaf(in.C.at[at.column][t], h[g], sums[t]);
            }
        }
        const float sum = mn_diag_row_sums(sums);    // of token at.column
        if (!p.y.data || v >= p.call.V || at.column >= tile.n_rows) continue;
        const int64_t t = span.t0 + tile.first + at.column;
        const T *z = mn_row<T>(p.z, span.b, t, 0);
        const float x = z ? mn_float(z[v]) : 0.0f, gate = z ? x * mn_sigmoid_tail(x) : 1.0f;
        mn_put(mn_row<T>(p.y, span.b, t, 0) + v,
               gate * fmaf(D, in.u.at[at.line][at.column], sum));
    }
    float *last = mn_row<float>(p.h, at.n, 0, 0);
#pragma unroll
    for (int g = 0; g < GROUPS; g++) {
        const int64_t k = g * SIDE + at.column;
        if (last && v < p.call.V && k < p.call.K) last[v * p.call.K + k] = h[g];
    }
}

/* ---- backward -------------------------------------------------------------------------------- */

/* h in front of a tile, for each thread. */
__device__ static float *state_at(const workspace &w, const mn_call &call, const coord &at,
                                  int64_t tile,
                                  int64_t tiles, int thread_groups, int group) {
    const int64_t slot = mn_diag_first_slot(call, at.n) + tile;
    return w.states + ((slot * tiles + at.tile) * thread_groups + group) * MN_DIAG_BLOCK_THREADS
        + threadIdx.x;
}

template <typename T, int GROUPS>
__global__ void __launch_bounds__(MN_DIAG_BLOCK_THREADS)
scan_states_kernel(const __grid_constant__ mn_scan_args p, workspace w, int64_t tiles) {
    __shared__ inputs in;
    const coord at = coord_of(tiles);
    const mn_span span = mn_span_at(p.call, at.n);
    float h[GROUPS], A[GROUPS];
    const float *first = mn_row<float>(p.h0, at.n, 0, 0);
#pragma unroll
    for (int g = 0; g < GROUPS; g++) {
        h[g] = cell_of<float>(first, p, at, g);
        A[g] = cell_of<T>(p.A.data, p, at, g);
    }
    for (int64_t i = 0; i < mn_diag_tiles(span); i++) {
        const mn_diag_tile tile = mn_diag_tile_at(span, i);
        __syncthreads();
        load_channels<T>(in, p, tile, at.channel0);
#pragma unroll
        for (int g = 0; g < GROUPS; g++) {
            *state_at(w, p.call, at, i, tiles, GROUPS, g) = h[g];
            if (g > 0) __syncthreads();
            in.B.put(mn_diag_load<T>(p.Bm, tile, 0, g * SIDE, p.call.K));
            __syncthreads();
#pragma unroll
            for (int t = 0; t < TOKENS; t++) {
                const float d = in.d.at[at.line][t];
                h[g] = fmaf(expf(d * A[g]), h[g],
                            d * in.u.at[at.line][t] * in.B.at[at.column][t]);
            }
        }
    }
}

/* Sums of a channel at the tokens of a tile. */
struct line_sums {
    float r[TOKENS], d[TOKENS], u[TOKENS];
};

/* One group of states through a tile, back; `sums` gathers what channels need. */
__device__ static void group_bwd(float &g, float &dA, line_sums &sums,
                                  float (&column_partials)[WARPS][TOKENS][2][SIDE],
                                      const inputs &in,
                                  float h0, float A, const coord &at) {
    float h[TOKENS];    // in front of each token
    float state = h0;
#pragma unroll
    for (int t = 0; t < TOKENS; t++) {
        const float d = in.d.at[at.line][t];
        h[t] = state;
        state = fmaf(expf(d * A), state, d * in.u.at[at.line][t] * in.B.at[at.column][t]);
        sums.r[t] = fmaf(in.C.at[at.column][t], state, sums.r[t]);
    }
    const int warp = threadIdx.x / 32, upper = threadIdx.x % 32 / SIDE;
#pragma unroll
    for (int t = TOKENS - 1; t >= 0; t--) {
        const float d = in.d.at[at.line][t], u = in.u.at[at.line][t], gr = in.gr.at[at.line][t];
        const float B = in.B.at[at.column][t], decay = expf(d * A);
        const float after = t + 1 < TOKENS ? h[t + 1 < TOKENS ? t + 1 : t] : state;
        g = fmaf(gr, in.C.at[at.column][t], g);
        const float x = g * decay * h[t];
        const float both = mn_diag_pair_sums(g * d * u, gr * after);
        column_partials[warp][t][upper][at.column] = both;
        dA = fmaf(d, x, dA);
        sums.d[t] = fmaf(g, u * B, fmaf(A, x, sums.d[t]));
        sums.u[t] = fmaf(g, d * B, sums.u[t]);
        g *= decay;
    }
}

template <typename T, int GROUPS>
__global__ void __launch_bounds__(MN_DIAG_BLOCK_THREADS)
scan_backward_kernel(const __grid_constant__ mn_scan_args p, workspace w, int64_t tiles) {
    __shared__ inputs in;
    __shared__ float column_partials[WARPS][TOKENS][2][SIDE];
    const coord at = coord_of(tiles);
    const mn_span span = mn_span_at(p.call, at.n);
    const int64_t V = p.call.V, K = p.call.K, v = at.channel0 + at.line;
    const int64_t rows = p.call.B * p.call.T;
    float g[GROUPS], A[GROUPS], dA[GROUPS], dD = 0.0f, dbias = 0.0f;
    const float *last = mn_row<float>(p.cot.h, at.n, 0, 0);
#pragma unroll
    for (int i = 0; i < GROUPS; i++) {
        g[i] = cell_of<float>(last, p, at, i);
        A[i] = cell_of<T>(p.A.data, p, at, i);
        dA[i] = 0.0f;
    }
    const float D = v < V ? mn_get((const T *)p.D.data, v) : 0.0f;
    for (int64_t i = mn_diag_tiles(span) - 1; i >= 0; i--) {
        const mn_diag_tile tile = mn_diag_tile_at(span, i);
        line_sums sums = {};
        __syncthreads();
        load_channels<T>(in, p, tile, at.channel0);
        const float z = mn_diag_load<T>(p.z, tile, 0, at.channel0, V);
        in.gr.put(mn_diag_load<T>(p.cot.y, tile, 0, at.channel0, V) *
                  (p.z.data ? z * mn_sigmoid_tail(z) : 1.0f));
#pragma unroll
        for (int j = 0; j < GROUPS; j++) {
            if (j > 0) __syncthreads();
            load_states<T>(in, p, tile, j);
            __syncthreads();
            group_bwd(g[j], dA[j], sums, column_partials, in,
                       *state_at(w, p.call, at, i, tiles, GROUPS, j), A[j], at);
            __syncthreads();
            for (int k = threadIdx.x; k < tile.n_rows * 2 * SIDE; k += MN_DIAG_BLOCK_THREADS) {
                const int t = k / (2 * SIDE), which = k / SIDE % 2, column = k % SIDE;
                const int64_t row = span.b * p.call.T + span.t0 + tile.first + t;
                float sum = 0.0f;
#pragma unroll
                for (int warp = 0; warp < WARPS; warp++) sum +=
                    column_partials[warp][t][which][column];
                if (j * SIDE + column >= K) continue;
                w.rows[((at.tile * rows + row) * 2 + which) * K + j * SIDE + column] = sum;
            }
        }
        const float r = mn_diag_row_sums(sums.r), to_d = mn_diag_row_sums(sums.d);
        const float to_u = mn_diag_row_sums(sums.u);    // of token at.column
        if (v >= V || at.column >= tile.n_rows) continue;
        const int64_t t = span.t0 + tile.first + at.column;
        const float u = in.u.at[at.line][at.column], gr = in.gr.at[at.line][at.column];
        const T *dy_at = mn_row<T>(p.cot.y, span.b, t, 0), *z_at = mn_row<T>(p.z, span.b, t, 0);
        const float x = mn_float(mn_row<T>(p.dt, span.b, t, 0)[v]) +
                        mn_get((const T *)p.dt_bias.data, v);
        const float ddt = to_d * (p.softplus ? mn_sigmoid_tail(x) : 1.0f);
        T *du = mn_row<T>(p.grad.u, span.b, t, 0), *to_dt = mn_row<T>(p.grad.dt, span.b, t, 0);
        T *dz = mn_row<T>(p.grad.z, span.b, t, 0);
        if (du) mn_put(du + v, fmaf(gr, D, to_u));
        if (to_dt) mn_put(to_dt + v, ddt);
        if (dz) {
            const float own = mn_float(z_at[v]), s = mn_sigmoid_tail(own);
            const float slope = s * fmaf(own, 1.0f - s, 1.0f);
            mn_put(dz + v, mn_get(dy_at, v) * slope * fmaf(D, u, r));
        }
        dD = fmaf(gr, u, dD);
        dbias += ddt;
    }
#pragma unroll
    for (int lanes = SIDE / 2; lanes > 0; lanes >>= 1) {
        dD += __shfl_xor_sync(0xffffffffu, dD, lanes);
        dbias += __shfl_xor_sync(0xffffffffu, dbias, lanes);
    }
    if (v >= V) return;
    float *partial = w.partials + (at.n * V + v) * (K + 2),
        *first = mn_row<float>(p.grad.h0, at.n, 0, 0);
#pragma unroll
    for (int i = 0; i < GROUPS; i++) {
        const int64_t k = i * SIDE + at.column;
        if (k >= K) continue;
        partial[k] = dA[i];
        if (first) first[v * K + k] = g[i];
    }
    if (at.column == 0) partial[K] = dD, partial[K + 1] = dbias;
}

/* dB and dC of a token from the channel tiles' parts. */
template <typename T>
struct store_state_grads {
    mn_out B, C;
    int64_t tokens, K;

    __device__ void operator()(int64_t i, float sum) const {
        const int64_t row = i / (2 * K), which = i / K % 2, k = i % K;
        const mn_out to = which ? C : B;
        if (to.data) mn_put(mn_row<T>(to, row / tokens, row % tokens, 0) + k, sum);
    }
};

template <typename T>
struct store_channel_grads {
    T *A, *D, *bias;
    int64_t K;

    __device__ void operator()(int64_t i, float sum) const {
        const int64_t v = i / (K + 2), k = i % (K + 2);
        if (k < K && A) mn_put(A + v * K + k, sum);
        if (k == K && D) mn_put(D + v, sum);
        if (k == K + 1 && bias) mn_put(bias + v, sum);
    }
};

/* ---- launches -------------------------------------------------------------------------------- */

static int groups_of(int64_t K) {
    return K <= SIDE ? 1 : K <= 2 * SIDE ? 2 : K <= 4 * SIDE ? 4 : MAX_GROUPS;
}

/* Floats of the three parts of the work space. */
static bool workspace_sizes(size_t *states, size_t *rows, size_t *partials, const mn_call *c) {
    const size_t tiles = (size_t)mn_ceil_div(c->V, SIDE), thread_groups = (size_t)groups_of(c->K);
    return mn_mul_size(states, (size_t)mn_tile_slots(*c, TOKENS),
                       tiles * thread_groups * MN_DIAG_BLOCK_THREADS) &&
           mn_mul_size(rows, (size_t)c->B, (size_t)c->T) && mn_mul_size(rows, *rows, tiles) &&
           mn_mul_size(rows, *rows, 2 * (size_t)c->K) &&
           mn_mul_size(partials, (size_t)mn_n_spans(*c), (size_t)c->V) &&
           mn_mul_size(partials, *partials, (size_t)c->K + 2);
}

MN_CUDA_PLAN(scan_forward) {
    (void)args, (void)plan;
    return true;
}

MN_CUDA_PLAN(scan_backward) {
    size_t states, rows, partials, all;
    return workspace_sizes(&states, &rows, &partials, (const mn_call *)args) &&
           mn_add_size(&all, states, rows) && mn_add_size(&all, all, partials) &&
           mn_mul_size(&plan->shared_bytes, all, sizeof(float));
}

template <typename T, int GROUPS>
static int forward_of(const mn_scan_args *p, cudaStream_t on) {
    const int64_t tiles = mn_ceil_div(p->call.V, SIDE), blocks = tiles * mn_n_spans(p->call);
    if (blocks == 0) return cudaSuccess;
    if (blocks > INT32_MAX) return cudaErrorNotSupported;
    scan_forward_kernel<T, GROUPS><<<(unsigned)blocks, MN_DIAG_BLOCK_THREADS, 0, on>>>(*p, tiles);
    return mn_launch_status();
}

template <typename T, int GROUPS>
static int backward_of(const mn_scan_args *p, float *at, cudaStream_t on) {
    const mn_call &c = p->call;
    const int64_t tiles = mn_ceil_div(c.V, SIDE), blocks = tiles * mn_n_spans(c);
    size_t states, rows, partials;
    if (blocks == 0) return cudaSuccess;
    if (blocks > INT32_MAX || !workspace_sizes(&states, &rows, &partials,
                                               &c)) return cudaErrorNotSupported;
    const workspace w = { at, at + states, at + states + rows };
    scan_states_kernel<T, GROUPS><<<(unsigned)blocks, MN_DIAG_BLOCK_THREADS, 0, on>>>(*p, w, tiles);
    scan_backward_kernel<T, GROUPS><<<(unsigned)blocks, MN_DIAG_BLOCK_THREADS, 0,
        on>>>(*p, w, tiles);
    int code = mn_launch_status();
    if (code != cudaSuccess) return code;
    const store_state_grads<T> to_rows = { p->grad.Bm, p->grad.Cm, c.T, c.K };
    const store_channel_grads<T> to_channels = { (T *)p->grad.A.data, (T *)p->grad.D.data,
                                          (T *)p->grad.dt_bias.data, c.K };
    if (c.B * c.T > 0) code = mn_reduce_partials_to(to_rows, w.rows, tiles, c.B * c.T * 2 * c.K,
                                                    on);
    if (code != cudaSuccess) return code;
    return mn_reduce_partials_to(to_channels, w.partials, mn_n_spans(c), c.V * (c.K + 2), on);
}

/* Calls function<T, GROUPS> for a number of states; `arguments` in parentheses. */
#define DISPATCH_STATES(function, T, K, arguments)                                                 \
    do {                                                                                           \
        const int thread_groups = groups_of(K);                                                    \
        if (thread_groups == 1) return function<T, 1> arguments;                                   \
        if (thread_groups == 2) return function<T, 2> arguments;                                   \
        if (thread_groups == 4) return function<T, 4> arguments;                                   \
        return function<T, MAX_GROUPS> arguments;                                                 \
    } while (0)

MN_CUDA_LAUNCH(scan_forward) {
    (void)shared;
    const mn_scan_args *p = (const mn_scan_args *)args;
    const cudaStream_t on = (cudaStream_t)stream;
    if (p->call.K > MAX_GROUPS * SIDE) return cudaErrorNotSupported;
    if (p->call.dtype == MN_BF16) DISPATCH_STATES(forward_of, mn_bf16, p->call.K, (p, on));
    DISPATCH_STATES(forward_of, float, p->call.K, (p, on));
}

template <typename T>
__global__ void __launch_bounds__(STEP_THREADS)
scan_step_kernel(const __grid_constant__ mn_scan_args p, int n_tiles) {
    const int64_t column = blockIdx.x % n_tiles * (int64_t)STEP_COLUMNS;
    mn_pdl_launch_dependents();
    mn_pdl_wait();
    scan_step<T, mn_cta<STEP_THREADS>>(p, blockIdx.x / n_tiles, 0, column, nullptr);
}

MN_CUDA_PLAN(scan_step) {
    (void)args, (void)plan;
    return true;
}

MN_CUDA_LAUNCH(scan_step) {
    (void)shared;
    const mn_scan_args *p = (const mn_scan_args *)args;
    const int64_t tiles = mn_ceil_div(p->call.V, (int64_t)STEP_COLUMNS);
    const int64_t blocks = p->call.B * tiles;
    if (blocks == 0) return cudaSuccess;
    if (blocks > INT32_MAX) return cudaErrorNotSupported;
    return mn_launch_pdl(p->call.dtype == MN_BF16 ? scan_step_kernel<mn_bf16>
                                                  : scan_step_kernel<float>,
                         dim3((unsigned)blocks), STEP_THREADS, 0, (cudaStream_t)stream, *p,
                         (int)tiles);
}

MN_CUDA_LAUNCH(scan_backward) {
    const mn_scan_args *p = (const mn_scan_args *)args;
    const cudaStream_t on = (cudaStream_t)stream;
    float *at = (float *)shared;
    if (p->call.K > MAX_GROUPS * SIDE) return cudaErrorNotSupported;
    if (p->call.dtype == MN_BF16) DISPATCH_STATES(backward_of, mn_bf16, p->call.K, (p, at, on));
    DISPATCH_STATES(backward_of, float, p->call.K, (p, at, on));
}

}    // namespace mneme::scan
