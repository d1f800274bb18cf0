/* importance.cu - Palimpsa: every cell keeps a mean and how much it matters (see ref/importance.c
 * for the equations).
 *
 *   I <- a I + (1 - a) ip + k^2 b      M <- a M + k v      mu = M / I
 *   o = scale sum_i q mu               ovar = scale^2 sum_i q^2 / I
 *
 * Calls in bf16 go over tensor cores (importance_mma.cuh, importance_bwd_mma.cuh) where a block
 * gets the shared memory for it, others and those with ovar cell by cell
 * (below). */
#include "kernels/cuda/importance/importance_bwd_mma.cuh"
#include "kernels/cuda/importance/importance_mma.cuh"
#include "kernels/cuda/importance/importance.cuh"
#include "kernels/cuda/prim/device_props.h"

namespace mneme::importance {

/* Palimpsa cell by cell: calls in float32, and those with ovar.
 *
 * A thread keeps 4 slots of 2 value columns, a block 64 slots of 32 columns or, of short keys, 32
 * of 64, of one head of one sequence. With more slots, blocks leave parts of the sums over slots.
 * Backward, a first pass leaves the states in front of each span of 32 tokens. The second goes
 * through the spans from the last one on: forward, while a state in eight stays in shared memory,
 * then back by halves of tiles, whose states are made again in registers. */

namespace cell_path {

enum { SPAN = 32 };

/* Where slot j, column i of this thread lies in (K,V); -1 outside. */
template <typename Block>
__device__ static int64_t cell_at(const mn_call &call, int i, int j) {
    const int64_t s = Block::slot0() + Block::slot(j), v = Block::column0() + Block::column(i);
    return s < call.K && v < call.V ? s * call.V + v : -1;
}

/* M and I of a thread's cells, or their adjoints. */
struct state {
    float M[C][SLOTS], I[C][SLOTS];

    /* One token, number n of those in v and b. */
    template <int count>
    __device__ __forceinline__ void advance(const float (&k)[SLOTS], const float (&v)[C][count],
                                            const float (&b)[C][count], int n, float a,
                                            float fresh) {
#pragma unroll
        for (int i = 0; i < C; i++) {
#pragma unroll
            for (int j = 0; j < SLOTS; j++) {
                M[i][j] = fmaf(a, M[i][j], k[j] * v[i][n]);
                I[i][j] = fmaf(a, I[i][j], fmaf(k[j] * k[j], b[i][n], fresh));
            }
        }
    }

    /* Four numbers for each thread of a block, SETS times. */
    __device__ void load(const float *from, int64_t stride) {
#pragma unroll
        for (int set = 0; set < SETS; set++) {
            const float4 four = *(const float4 *)(from + set * stride);
            float(&x)[SLOTS] = set < C ? M[set % C] : I[set % C];
            x[0] = four.x, x[1] = four.y, x[2] = four.z, x[3] = four.w;
        }
    }

    __device__ void store(float *to, int64_t stride) const {
#pragma unroll
        for (int set = 0; set < SETS; set++) {
            const float(&x)[SLOTS] = set < C ? M[set % C] : I[set % C];
            *(float4 *)(to + set * stride) = make_float4(x[0], x[1], x[2], x[3]);
        }
    }
};

template <typename Block>
__device__ static void load_first(state &c, const mn_importance_args &p, const place &at) {
    const float *mu0 = mn_row<float>(p.mu0, at.n, 0, at.h);
#pragma unroll
    for (int i = 0; i < C; i++) {
#pragma unroll
        for (int j = 0; j < SLOTS; j++) {
            const int64_t cell = cell_at<Block>(p.call, i, j);
            c.I[i][j] = cell >= 0 ? first_importance(p, at, cell) : 1.0f;
            c.M[i][j] = cell >= 0 && mu0 ? mu0[cell] * c.I[i][j] : 0.0f;
        }
    }
}

/* ---- the numbers of a tile ------------------------------------------------------------------- */

enum { KEYS, QUERIES };
enum { VALUES, WRITES, MEAN_COTS, SPREAD_COTS };

/* a and what it leaves of the prior: forget = 1 - a, formed without cancellation. Tokens that the
 * tile lacks change nothing. */
struct gates {
    alignas(16) float a[TOKENS], forget[TOKENS], fresh[TOKENS];

    /* Thread t brings token t of the n_rows that there are. */
    __device__ void put(float g, int n_rows, float ip) {
        const int t = threadIdx.x;
        if (t >= TOKENS) return;
        a[t] = expf(g);
        forget[t] = -expm1f(g);
        fresh[t] = t < n_rows ? fmaf(forget[t], ip, min_importance) : 0.0f;
    }
};

template <typename Block, int N_KEYS, int N_LINES>
struct stage {
    mn_cell_keys<Block> keys[N_KEYS];
    mn_cell_columns<Block> lines[N_LINES];
    gates g;

    /* One token, number n of those in v and b. */
    template <int count>
    __device__ __forceinline__ void advance(state &c, int t, int n, const float (&v)[C][count],
                                            const float (&b)[C][count]) const {
        float k[SLOTS];
        keys[KEYS].get(k, t);
        c.advance(k, v, b, n, g.a[t], g.fresh[t]);
    }

    /* Tokens [t0, t1), multiples of 8: eight at a time, so that reads of the second four need not
     * wait for the first. */
    __device__ void scan(state &c, int t0, int t1) const {
#pragma unroll 1
        for (int t = t0; t < t1; t += HALF) {
#pragma unroll
            for (int four = t; four < t + HALF; four += 4) {
                float v[C][4], b[C][4];
                lines[VALUES].get(v, four);
                lines[WRITES].get(b, four);
#pragma unroll
                for (int n = 0; n < 4; n++) advance(c, four + n, n, v, b);
            }
        }
    }
};

template <typename T, typename Block, int N_KEYS, int N_LINES>
struct loaded {
    mn_cell_prefetch<T, Block::SLOTS, Block::THREADS> keys[N_KEYS];
    mn_cell_prefetch<T, Block::COLUMNS, Block::THREADS> lines[N_LINES];
    float g;
    int n_rows;

    __device__ void open(const mn_importance_args &p, const place &at) {
        const int64_t s0 = Block::slot0(), v0 = Block::column0(), K = p.call.K, V = p.call.V;
        keys[KEYS].open(p.k, at.span, at.h, s0, K);
        if (N_KEYS > QUERIES) keys[N_KEYS - 1].open(p.q, at.span, at.h, s0, K);
        lines[VALUES].open(p.v, at.span, at.h, v0, V);
        lines[WRITES].open(p.b, at.span, at.h, v0, V);
        if (N_LINES > MEAN_COTS) lines[N_LINES > 2 ? 2 : 0].open(p.cot.o, at.span, at.h, v0, V);
        if (N_LINES > SPREAD_COTS) lines[N_LINES - 1].open(p.cot.ovar, at.span, at.h, v0, V);
    }

    __device__ __forceinline__ void fetch(const mn_importance_args &p, const place &at,
                                          const mn_cell_tile &tile) {
        keys[KEYS].fetch(p.k, tile);
        if (N_KEYS > QUERIES) keys[N_KEYS - 1].fetch(p.q, tile);
        lines[VALUES].fetch(p.v, tile);
        lines[WRITES].fetch(p.b, tile);
        if (N_LINES > MEAN_COTS) lines[N_LINES > 2 ? 2 : 0].fetch(p.cot.o, tile);
        if (N_LINES > SPREAD_COTS) lines[N_LINES - 1].fetch(p.cot.ovar, tile);
        const int t = threadIdx.x;
        n_rows = tile.n_rows;
        g = 0.0f;
        if (t >= n_rows) return;
        g = *mn_row<float>(p.g, tile.span.b, tile.span.t0 + tile.first + t, at.h);
    }

    /* Cotangents are put times `scale` and its square, which spares the sums over slots that. */
    template <typename Stage>
    __device__ void put(Stage &to, float ip, float scale) const {
#pragma unroll
        for (int i = 0; i < N_KEYS; i++) keys[i].put(to.keys[i]);
#pragma unroll
        for (int i = 0; i < N_LINES; i++) {
            lines[i].put(to.lines[i], i == MEAN_COTS ? scale : i == SPREAD_COTS ? scale * scale :
                                                                                  1.0f);
        }
        to.g.put(g, n_rows, ip);
    }
};

/* ---- forward --------------------------------------------------------------------------------- */

/* Sums of two tokens over the slots of this warp: column(0) at the token of this lane. */
__device__ __forceinline__ static float sum_pair(float (&first)[C], float (&second)[C]) {
    mn_cell_reduce_swap<1>(first, 1);
    mn_cell_reduce_swap<1>(second, 1);
    float both[2] = { first[0], second[0] };
    mn_cell_reduce_half<1>(both, 2);
    return both[0];
}

/* Two tokens of a tile. They are read before the sums of the two before them are written: the
 * compiler keeps the order of reads and writes of shared memory, and sums come late. */
template <typename Block>
struct two {
    float k[2][SLOTS], q[2][SLOTS], v[C][2], b[C][2], a[2], forget[2], fresh[2];

    template <int N_LINES>
    __device__ __forceinline__ void load(const stage<Block, 2, N_LINES> &in, int t) {
#pragma unroll
        for (int n = 0; n < 2; n++) {
            in.keys[KEYS].get(k[n], t + n);
            in.keys[QUERIES].get(q[n], t + n);
        }
        in.lines[VALUES].get(v, t);
        in.lines[WRITES].get(b, t);
        mn_load<2>(a, in.g.a, t);
        mn_load<2>(forget, in.g.forget, t);
        mn_load<2>(fresh, in.g.fresh, t);
    }
};

template <typename Block, bool VARIANCE>
__device__ __forceinline__ static void tile_forward(state &c, mn_cell_sums<Block> &out,
                                                    const stage<Block, 2, 2> &in, float scale) {
    two<Block> now, next;
    now.load(in, 0);
#pragma unroll 4
    for (int t = 0; t < TOKENS; t += 2) {
        float o[2][C], ovar[2][C];
        next.load(in, (t + 2) % TOKENS);
#pragma unroll
        for (int n = 0; n < 2; n++) {
            c.advance(now.k[n], now.v, now.b, n, now.a[n], now.fresh[n]);
#pragma unroll
            for (int i = 0; i < C; i++) {
                o[n][i] = ovar[n][i] = 0.0f;
#pragma unroll
                for (int j = 0; j < SLOTS; j++) {
                    const float q = now.q[n][j], qr = q * mn_rcp_ftz(c.I[i][j]);
                    o[n][i] = fmaf(c.M[i][j], qr, o[n][i]);
                    if (VARIANCE) ovar[n][i] = fmaf(q, qr, ovar[n][i]);
                }
            }
        }
        const int at = t + Block::slot_lane() / 2, column = Block::column(0);
        out.at[0][Block::group()][at][column] = scale * sum_pair(o[0], o[1]);
        if (VARIANCE) {
            out.at[1][Block::group()][at][column] = scale * scale * sum_pair(ovar[0], ovar[1]);
        }
        now = next;
    }
}

template <typename Block>
struct fwd_smem {
    stage<Block, 2, 2> in;
    mn_cell_sums<Block> out;
};

template <typename T, typename Block, bool VARIANCE>
__global__ void __launch_bounds__(Block::THREADS, 2)
importance_fwd_kernel(const __grid_constant__ mn_importance_args p, float *sums, int64_t n_rows) {
    extern __shared__ float4 shared[];
    fwd_smem<Block> &r = *(fwd_smem<Block> *)shared;
    for (int64_t item = blockIdx.y; item < mn_n_spans(p.call) * p.call.H; item += gridDim.y) {
        const place at = place::of(p, item);
        const int64_t n_tiles = mn_cell_tiles(at.span.length);
        loaded<T, Block, 2, 2> next;
        next.open(p, at);
        state c;
        load_first<Block>(c, p, at);
        if (n_tiles > 0) next.fetch(p, at, mn_cell_tile_at(at.span, 0));
        for (int64_t i = 0; i < n_tiles; i++) {
            const mn_cell_tile tile = mn_cell_tile_at(at.span, i);
            next.put(r.in, at.ip, 1.0f);
            __syncthreads();
            if (i + 1 < n_tiles) next.fetch(p, at, mn_cell_tile_at(at.span, i + 1));
            tile_forward<Block, VARIANCE>(c, r.out, r.in, (float)p.scale);
            __syncthreads();
            mn_cell_store_sums<T>(p.o, p.ovar, sums, p.call, tile, at.h, p.call.H, n_rows, r.out);
        }
        float *mu = mn_row<float>(p.mu, at.n, 0, at.h), *imp = mn_row<float>(p.imp, at.n, 0, at.h);
#pragma unroll
        for (int i = 0; i < C; i++) {
#pragma unroll
            for (int j = 0; j < SLOTS; j++) {
                const int64_t cell = cell_at<Block>(p.call, i, j);
                if (cell >= 0 && mu) mu[cell] = c.M[i][j] / c.I[i][j];
                if (cell >= 0 && imp) imp[cell] = c.I[i][j];
            }
        }
        __syncthreads();
    }
}

/* States in front of every span, of which there are `n_slots` for each head. */
template <typename T, typename Block>
__global__ void __launch_bounds__(Block::THREADS, 3)
importance_states_kernel(const __grid_constant__ mn_importance_args p, float *states) {
    __shared__ stage<Block, 1, 2> in;
    for (int64_t item = blockIdx.y; item < mn_n_spans(p.call) * p.call.H; item += gridDim.y) {
        const place at = place::of(p, item);
        const int64_t n_tiles = mn_cell_tiles(at.span.length);
        const int64_t slot = mn_cell_first_slot(p.call, at.n, SPAN);
        loaded<T, Block, 1, 2> next;
        next.open(p, at);
        state c;
        load_first<Block>(c, p, at);
        if (n_tiles > 0) next.fetch(p, at, mn_cell_tile_at(at.span, 0));
        for (int64_t i = 0; i < n_tiles; i++) {
            next.put(in, at.ip, 1.0f);
            if (i % (SPAN / TOKENS) == 0) {
                const int64_t set = ((slot + i / (SPAN / TOKENS)) * p.call.H + at.h) * SETS;
                c.store(states + Block::own(set), Block::own(1) - Block::own(0));
            }
            __syncthreads();
            if (i + 1 < n_tiles) next.fetch(p, at, mn_cell_tile_at(at.span, i + 1));
            in.scan(c, 0, TOKENS);
            __syncthreads();
        }
    }
}

/* ---- backward -------------------------------------------------------------------------------- */

/* What one token says: dk and dq slot by slot, dv and db column by column, and for dg and dip the
 * sums of A M + C I and of C. */
struct token_cots {
    float k[SLOTS], q[SLOTS], v[C], b[C], along, fresh;
};

/* From `before` to `after` one token, number n of `in`; `adj` has the adjoints A and C of M and
 * I. */
template <bool SPREAD, typename Block>
__device__ __forceinline__ static void token_backward(token_cots &to, state &adj,
                                                      const state &before, const state &after,
                                                      const two<Block> &in, int n,
                                                      const float (&means)[C][2],
                                                      const float (&spreads)[C][2]) {
    float by_gate[SLOTS], along[C] = {}, fresh[C] = {};
#pragma unroll
    for (int j = 0; j < SLOTS; j++) to.k[j] = to.q[j] = by_gate[j] = 0.0f;
#pragma unroll
    for (int i = 0; i < C; i++) {
        const float v = in.v[i][n], b = in.b[i][n], mean = means[i][n];
        to.v[i] = to.b[i] = 0.0f;
#pragma unroll
        for (int j = 0; j < SLOTS; j++) {
            float &A = adj.M[i][j], &D = adj.I[i][j];
            const float k = in.k[n][j], q = in.q[n][j];
            const float r = mn_rcp_ftz(after.I[i][j]), mu = after.M[i][j] * r, pull = q * mean * r;
            A += pull;
            D = fmaf(-pull, mu, D);
            to.q[j] = fmaf(mean, mu, to.q[j]);
            if (SPREAD) {
                const float qr = q * r, wide = qr * spreads[i][n];
                D = fmaf(-qr, wide, D);
                to.q[j] = fmaf(2.0f, wide, to.q[j]);
            }
            to.k[j] = fmaf(A, v, to.k[j]);
            by_gate[j] = fmaf(D, b, by_gate[j]);
            to.v[i] = fmaf(A, k, to.v[i]);
            to.b[i] = fmaf(D, k * k, to.b[i]);
            along[i] = fmaf(A, before.M[i][j], along[i]);
            along[i] = fmaf(D, before.I[i][j], along[i]);
            fresh[i] += D;
            A *= in.a[n];
            D *= in.a[n];
        }
    }
#pragma unroll
    for (int j = 0; j < SLOTS; j++) to.k[j] = fmaf(2.0f * in.k[n][j], by_gate[j], to.k[j]);
    to.along = along[0] + along[1];
    to.fresh = fresh[0] + fresh[1];
}

template <typename Block, bool SPREAD>
struct bwd_smem {
    stage<Block, 2, SPREAD ? 4 : 3> in;
    mn_cell_sums<Block> out;
    mn_cell_key_partials<Block> keys;
    float dg[WARPS][TOKENS], thread_group[32];
    float4 states[SPAN / HALF][SETS][Block::THREADS];    // in front of each half of a tile
};

/* Sums over the warp at four tokens: lane 8 t has token t. */
__device__ __forceinline__ static float warp_sums(float (&x)[4]) {
    mn_cell_reduce_half<2>(x, 16);
    mn_cell_reduce_half<1>(x, 8);
#pragma unroll
    for (int mask = 4; mask > 0; mask >>= 1) x[0] += __shfl_xor_sync(0xffffffffu, x[0], mask);
    return x[0];
}

/* Half a tile from its first token t0 on, with the state in front of it in `first`. Adds to
 * `prior`, the part of dip. */
template <typename Block, bool SPREAD>
__device__ __forceinline__ static void half_tile_backward(state &adj, float &prior,
                                                          const state &first,
                                                     bwd_smem<Block, SPREAD> &r, int t0,
                                                     float ip) {
    state c[HALF + 1];
    float v[C][2], b[C][2], means[C][2], spreads[C][2] = {}, along[4];
    c[0] = first;
#pragma unroll
    for (int t = 0; t < HALF; t++) {
        if (t % 2 == 0) {
            r.in.lines[VALUES].get(v, t0 + t);
            r.in.lines[WRITES].get(b, t0 + t);
        }
        c[t + 1] = c[t];
        r.in.advance(c[t + 1], t0 + t, t % 2, v, b);
    }
#pragma unroll
    for (int t = HALF - 2; t >= 0; t -= 2) {
        two<Block> now;
        now.load(r.in, t0 + t);
        r.in.lines[MEAN_COTS].get(means, t0 + t);
        if (SPREAD) r.in.lines[SPREAD ? SPREAD_COTS : 0].get(spreads, t0 + t);
#pragma unroll
        for (int n = 1; n >= 0; n--) {
            const int at = t0 + t + n;
            token_cots to;
            token_backward<SPREAD>(to, adj, c[t + n], c[t + n + 1], now, n, means, spreads);
            along[(t + n) % 4] = now.a[n] * fmaf(-ip, to.fresh, to.along);
            prior = fmaf(now.forget[n], to.fresh, prior);
            r.keys.put(at, mn_cell_key_sums(to.k, to.q));
            const float line = sum_pair(to.v, to.b);
            r.out.at[Block::slot_lane() / 2][Block::group()][at][Block::column(0)] = line;
        }
        if (t % 4 != 0) continue;
        const int lane = threadIdx.x % 32;
        const float sum = warp_sums(along);
        if (lane % 8 == 0) r.dg[threadIdx.x / 32][t0 + t + lane / 8] = sum;
    }
}

/* Adjoints of the last state, `c`. */
template <typename Block>
__device__ static void init_adjoint(state &adj, const state &c, const mn_importance_args &p,
                                  const place &at) {
    const float *dmu = mn_row<float>(p.cot.mu, at.n, 0, at.h);
    const float *dimp = mn_row<float>(p.cot.imp, at.n, 0, at.h);
#pragma unroll
    for (int i = 0; i < C; i++) {
#pragma unroll
        for (int j = 0; j < SLOTS; j++) {
            const int64_t cell = cell_at<Block>(p.call, i, j);
            const float by = 1.0f / c.I[i][j];
            adj.M[i][j] = cell >= 0 && dmu ? dmu[cell] * by : 0.0f;
            adj.I[i][j] = cell >= 0 && dimp ? dimp[cell] : 0.0f;
            adj.I[i][j] -= adj.M[i][j] * (c.M[i][j] * by);
        }
    }
}

/* Gradients of the first state; returns the part of dip of one that starts at the prior. */
template <typename Block>
__device__ static float store_state0_grads(const state &adj, const mn_importance_args &p,
                                           const place &at) {
    const float *mu0 = mn_row<float>(p.mu0, at.n, 0, at.h);
    float *dmu0 = mn_row<float>(p.grad.mu0, at.n, 0, at.h), sum = 0.0f;
    float *dimp0 = mn_row<float>(p.grad.imp0, at.n, 0, at.h);
#pragma unroll
    for (int i = 0; i < C; i++) {
#pragma unroll
        for (int j = 0; j < SLOTS; j++) {
            const int64_t cell = cell_at<Block>(p.call, i, j);
            if (cell < 0) continue;
            const float to_imp = fmaf(adj.M[i][j], mn_get(mu0, cell), adj.I[i][j]);
            if (dmu0) dmu0[cell] = adj.M[i][j] * first_importance(p, at, cell);
            if (dimp0) dimp0[cell] = to_imp;
            sum += to_imp;
        }
    }
    return p.imp0.data ? 0.0f : sum;
}

/* Forward over the tiles [first, end) of a span from the state in `c`; states in front of each half
 * stay in shared memory. At the end of the sequence, its adjoint begins. */
template <typename T, typename Block, bool SPREAD>
__device__ static void scan_segment(state &c, state &adj, bwd_smem<Block, SPREAD> &r,
                                 const mn_importance_args &p, const place &at, int64_t first,
                                 int64_t end) {
    const bool last = end == mn_cell_tiles(at.span.length);
    loaded<T, Block, 1, 2> next;
    next.open(p, at);
    next.fetch(p, at, mn_cell_tile_at(at.span, first));
    for (int64_t i = first; i < end; i++) {
        next.put(r.in, at.ip, 1.0f);
        __syncthreads();
        if (i + 1 < end) next.fetch(p, at, mn_cell_tile_at(at.span, i + 1));
#pragma unroll 1
        for (int half = 0; half < 2; half++) {
            c.store((float *)&r.states[2 * (i - first) + half][0][threadIdx.x], 4 * Block::THREADS);
            if (half == 0 || i + 1 < end || last) r.in.scan(c, half * HALF, (half + 1) * HALF);
        }
        __syncthreads();
    }
    if (last) init_adjoint<Block>(adj, c, p, at);
}

template <typename T, typename Block, bool SPREAD>
__global__ void __launch_bounds__(Block::THREADS, 1)
importance_bwd_kernel(const __grid_constant__ mn_importance_args p, workspace to, int64_t n_rows) {
    extern __shared__ float4 shared[];
    bwd_smem<Block, SPREAD> &r = *(bwd_smem<Block, SPREAD> *)shared;
    const int64_t blocks = gridDim.x * gridDim.z, block = blockIdx.z * gridDim.x + blockIdx.x;
    for (int64_t item = blockIdx.y; item < mn_n_spans(p.call) * p.call.H; item += gridDim.y) {
        const place at = place::of(p, item);
        const int64_t n_tiles = mn_cell_tiles(at.span.length);
        const int64_t slot = mn_cell_first_slot(p.call, at.n, SPAN);
        state adj, c;
        float prior = 0.0f;
        if (n_tiles == 0) {
            load_first<Block>(c, p, at);
            init_adjoint<Block>(adj, c, p, at);
        }
        for (int64_t end = n_tiles; end > 0;) {
            const int64_t span = (end - 1) / (SPAN / TOKENS), first = span * (SPAN / TOKENS);
            const int64_t set = ((slot + span) * p.call.H + at.h) * SETS;
            loaded<T, Block, 2, SPREAD ? 4 : 3> next;
            next.open(p, at);
            c.load(to.at[STATES] + Block::own(set), Block::own(1) - Block::own(0));
            next.fetch(p, at, mn_cell_tile_at(at.span, end - 1));
            scan_segment<T, Block, SPREAD>(c, adj, r, p, at, first, end);
            for (int64_t i = end - 1; i >= first; i--) {
                const mn_cell_tile tile = mn_cell_tile_at(at.span, i);
                next.put(r.in, at.ip, (float)p.scale);
                __syncthreads();
                if (i > first) next.fetch(p, at, mn_cell_tile_at(at.span, i - 1));
#pragma unroll 1
                for (int t0 = HALF; t0 >= 0; t0 -= HALF) {
                    const int64_t half = 2 * (i - first) + t0 / HALF;
                    c.load((float *)&r.states[half][0][threadIdx.x], 4 * Block::THREADS);
                    half_tile_backward<Block, SPREAD>(adj, prior, c, r, t0, at.ip);
                }
                __syncthreads();
                mn_cell_store_keys(to.at[KEY_PARTS], p.call, tile, at.h, p.call.H, n_rows, r.keys);
                mn_cell_store_sums<T>(p.grad.v, p.grad.b, to.at[SUMS], p.call, tile, at.h, p.call.H,
                                    n_rows, r.out);
                if (threadIdx.x < tile.n_rows) {
                    float sum = 0.0f;
                    for (int warp = 0; warp < WARPS; warp++) sum += r.dg[warp][threadIdx.x];
                    const int64_t row = tile.row(p.call, threadIdx.x) * p.call.H + at.h;
                    to.at[GATES][block * n_rows + row] = sum;
                }
            }
            end = first;
            __syncthreads();
        }
        prior += store_state0_grads<Block>(adj, p, at);
        prior = mn_group_sum<Block::THREADS>(prior, r.thread_group);
        if (threadIdx.x == 0) to.at[PRIORS][(at.n * blocks + block) * p.call.H + at.h] = prior;
        __syncthreads();
    }
}

}    // namespace cell_path

/* gradients of Palimpsa's log decays and prior, from what the blocks of
 * importance_bwd_mma.cuh have left.
 *
 *   S_t = a sum(D_t . M_{t-1} + C_t . I_{t-1})     dg = S_t - a ip sum C_t
 *   S_{t+1} = S_t + v'dv + b'db + (1 - a) ip sum C_t     dip = sum (1 - a) sum C_t
 *
 * Sums are over cells. S in front of each tile is formed from its definition; sum C_t, which is
 * also what ip in I adds to it, is a number that decays and gets -sum pull_t mu_t: a scan from the
 * last token to the first, in float32, which tiles know up to what comes from behind them. */

namespace mma_path {

enum {
    SCAN_THREADS = 512,                      // threads of a block
    AT_ONCE = SCAN_THREADS / TOKENS,         // tiles that they have at once
    EACH = 8,                                // tiles of half a warp, AT_ONCE apart
    SCAN_TILES = EACH * AT_ONCE,            // tiles of one step of the scan between tiles
    LANE_TILES = SCAN_TILES / 32,           // of a lane, neighbours, there
};

/* A head of one sequence, half a warp to a tile. */
template <typename Block>
struct gate_scan {
    partials_of<Block> parts;    // of the first block
    const gates *decays;      // of the first tile
    int64_t n_rows, n_blocks, heads;
    int length;

    /* The tile that this half warp has as number n of those from `first` on. */
    __device__ static int tile_of(int first, int n) {
        return first + n * AT_ONCE + (int)(threadIdx.x / TOKENS);
    }

    /* Sums over the blocks: what S gets at this lane's tokens without ip, and sum pull mu there.
     * All loads of a block are asked for at once. */
    __device__ void tokens(float2 (&sums)[EACH], int first, int end) const {
#pragma unroll
        for (int n = 0; n < EACH; n++) sums[n] = { 0.0f, 0.0f };
        for (int64_t block = 0; block < n_blocks; block++) {
            const float2 *from = parts.gates + block * n_rows;
            float2 part[EACH];
#pragma unroll
            for (int n = 0; n < EACH; n++) {
                const int tile = tile_of(first, n), t = tile * TOKENS + threadIdx.x % TOKENS;
                part[n] = { 0.0f, 0.0f };
                if (tile < end && t < length) part[n] = from[t];
            }
#pragma unroll
            for (int n = 0; n < EACH; n++) sums[n].x += part[n].x, sums[n].y += part[n].y;
        }
    }

    /* S in front of the tiles without ip sum C: this lane's shares of the sums over half a warp. */
    __device__ void starts(float (&sums)[EACH], int first, int end) const {
        static_assert(Block::WARPS == TOKENS, "a lane for each warp");
        const float *from = parts.along + threadIdx.x % TOKENS;
#pragma unroll
        for (int n = 0; n < EACH; n++) sums[n] = 0.0f;
        for (int64_t block = 0; block < n_blocks; block++) {
#pragma unroll
            for (int n = 0; n < EACH; n++) {
                const int tile = tile_of(first, n);
                if (tile < end) sums[n] += from[tile * parts.tile_stride + block * Block::WARPS];
            }
        }
    }

    /* sum C_t = -spread_t + a_{t+1} sum C_{t+1} is the result and `keeps` times what comes from
     * behind the tile. */
    __device__ static float local(float &keeps, float spread, const gates &g) {
        const int t = threadIdx.x % TOKENS;
        float C = -spread;
        keeps = t + 1 < TOKENS ? g.a[t + 1] : 1.0f;
#pragma unroll
        for (int by = 1; by < TOKENS; by *= 2) {
            const float later = __shfl_down_sync(0xffffffffu, C, by, TOKENS);
            const float more = __shfl_down_sync(0xffffffffu, keeps, by, TOKENS);
            if (t + by < TOKENS) C = fmaf(keeps, later, C), keeps *= more;
        }
        return C;
    }
};

/* What comes from behind each of a step's tiles: first its own share of what goes to the tile in
 * front of it, and by what it multiplies what comes from behind itself. */
struct gate_scan_smem {
    float keeps[SCAN_TILES], share[SCAN_TILES], behind[SCAN_TILES + 1], thread_group[32];

    /* From keeps and share of `count` tiles and `edge`, what comes from behind the last one, by one
     * warp: a lane goes through neighbours, those behind it are summed up by exchanges. */
    __device__ void scan(int count, float edge) {
        const int lane = threadIdx.x % 32, first = lane * LANE_TILES;
        float to[LANE_TILES], keep[LANE_TILES], sum = 0.0f, keeps_all = 1.0f;
#pragma unroll
        for (int i = LANE_TILES - 1; i >= 0; i--) {
            const bool exists = first + i < count;
            to[i] = exists ? share[first + i] : 0.0f, keep[i] = exists ? keeps[first + i] : 1.0f;
            sum = fmaf(keep[i], sum, to[i]), keeps_all *= keep[i];
        }
#pragma unroll
        for (int by = 1; by < 32; by *= 2) {
            const float later = __shfl_down_sync(0xffffffffu, sum, by);
            const float more = __shfl_down_sync(0xffffffffu, keeps_all, by);
            if (lane + by < 32) sum = fmaf(keeps_all, later, sum), keeps_all *= more;
        }
        sum = fmaf(keeps_all, edge, sum);
        const float next = __shfl_down_sync(0xffffffffu, sum, 1);
        float from = lane == 31 ? edge : next;
#pragma unroll
        for (int i = LANE_TILES - 1; i >= 0; i--) {
            if (first + i < count) behind[first + i + 1] = from;
            from = fmaf(keep[i], from, to[i]);
        }
        if (lane == 0) behind[0] = from;
    }
};

/* A block has a head of a sequence; `dips` (sequence, head) gets its part of dip. */
template <typename Block>
__global__ void __launch_bounds__(SCAN_THREADS)
importance_gate_scan_kernel(const __grid_constant__ mn_importance_args p, const gates *decays,
                            workspace to,
                  float *dips, int64_t n_blocks, int64_t n_rows) {
    __shared__ gate_scan_smem r;
    mn_pdl_launch_dependents();
    const place at = place::of(p, blockIdx.x);
    const int64_t slot = mn_cell_first_slot(p.call, at.n, TOKENS);
    const gate_scan<Block> along = { partials_of<Block>(p, to, at, n_rows, n_blocks, 0),
                                     decays + slot * p.call.H + at.h, n_rows, n_blocks, p.call.H,
                                     (int)at.span.length };
    const int n_tiles = (int)mn_cell_tiles(at.span.length), t = threadIdx.x % TOKENS;
    float dip = 0.0f, edge = 0.0f;
    for (int64_t block = 0; block < n_blocks; block++) edge += along.parts.edge[block].x;
    for (int end = n_tiles; end > 0; end -= SCAN_TILES) {
        const int first = max(end - SCAN_TILES, 0);
        float2 tokens[EACH];
        float starts[EACH];
        along.tokens(tokens, first, end);
        along.starts(starts, first, end);
#pragma unroll
        for (int n = 0; n < EACH; n++) {
            if (first + n * AT_ONCE >= end) break;
            const int wanted = along.tile_of(first, n), tile = min(wanted, end - 1);
            const gates &g = along.decays[tile * along.heads];
            float keeps;
            const float C = along.local(keeps, tokens[n].y, g);
            if (t > 0 || wanted >= end) continue;
            r.keeps[tile - first] = g.a[0] * keeps;
            r.share[tile - first] = g.a[0] * C;
        }
        __syncthreads();
        if (threadIdx.x < 32) r.scan(end - first, edge);
        __syncthreads();
        edge = r.behind[0];
#pragma unroll
        for (int n = 0; n < EACH; n++) {
            if (first + n * AT_ONCE >= end) break;
            const int wanted = along.tile_of(first, n), tile = min(wanted, end - 1);
            const gates &g = along.decays[tile * along.heads];
            float keeps, C = along.local(keeps, tokens[n].y, g);
            C = fmaf(keeps, r.behind[tile - first + 1], C);
            const float fall = fmaf(g.forget[t] * at.ip, C, tokens[n].x);
            float sum = fall;
#pragma unroll
            for (int by = 1; by < TOKENS; by *= 2) {
                const float before = __shfl_up_sync(0xffffffffu, sum, by, TOKENS);
                if (t >= by) sum += before;
            }
            float start = starts[n];
#pragma unroll
            for (int by = 1; by < TOKENS; by *= 2) {
                start += __shfl_xor_sync(0xffffffffu, start, by);
            }
            start = fmaf(at.ip, r.behind[tile - first], start);
            const int64_t token_at = (int64_t)tile * TOKENS + t;
            if (wanted >= end || token_at >= at.span.length) continue;
            dip = fmaf(g.forget[t], C, dip);
            float *dg = mn_row<float>(p.grad.g, at.span.b, at.span.t0 + token_at, at.h);
            if (dg) *dg = start + (sum - fall) - g.a[t] * at.ip * C;
        }
        __syncthreads();
    }
    dip = mn_group_sum<SCAN_THREADS>(dip, r.thread_group);
    for (int64_t block = 0; block < n_blocks; block++) dip += along.parts.edge[block].y;
    if (threadIdx.x == 0) dips[at.n * p.call.H + at.h] = dip;
}

}    // namespace mma_path

/* ---- launches -------------------------------------------------------------------------------- */

/* dg: rows are (b, t, h) */
struct store_gate_grads {
    mn_out g;
    int64_t tokens, heads;

    __device__ void operator()(int64_t i, float sum) const {
        const int64_t token = i / heads;
        *mn_row<float>(g, token / tokens, token % tokens, i % heads) = sum;
    }
};

struct store_prior_grads {
    mn_out ip;

    __device__ void operator()(int64_t h, float sum) const {
        *mn_row<float>(ip, 0, 0, h) = sum;
    }
};

typedef mn_cell_block<4, WARPS, C> long_block;
typedef mn_cell_block<2, WARPS, C> short_block;
/* Blocks that read: of keys up to SLOTS and of longer ones, each with half of the columns where
 * there are few blocks. A number of o is the same sum in both. */
typedef mma_path::block<4, 16> fwd_block;
typedef mma_path::block<4, 8> fwd_block_half;
typedef mma_path::block<8, 16> fwd_block_k128;
typedef mma_path::block<8, 8> fwd_block_k128_half;
typedef mma_path::block<4, 8, true> fwd_block_ready;
typedef mma_path::block<8, 8, true> fwd_block_k128_ready;
typedef mma_path::block<4, 16> bwd_block;
typedef mma_path::block<4, 8> bwd_block_half;

static_assert(sizeof(mma_path::fwd_smem<fwd_block_k128_half>) >=
                      sizeof(mma_path::fwd_smem<fwd_block_k128>) &&
                  sizeof(mma_path::fwd_smem<fwd_block_k128_half>) >=
                      sizeof(mma_path::fwd_smem<fwd_block_half>),
              "whose shared memory is asked for reads most");

/* How a call is cut into blocks, and how many tokens lie between the states that are kept for going
 * back. `slices`: blocks along the columns go back one after the other, each adding to what those
 * before it have of dk and dq; `crossed`: of dv and db, too (see launch_slice). The same sums.
 * `parts`: of each sequence, which blocks read at once (see sequence_part). `keys_ready`: factors
 * of keys are made by a kernel of their own. */
struct partition {
    int64_t slots, columns, span;
    bool mma_path, serialized, diagonal;
    int parts;
    bool keys_ready;
};

template <typename Block>
static partition partition_of_block(int64_t span, bool mma_path) {
    return { Block::SLOTS, Block::COLUMNS, span, mma_path, false, false, 1, false };
}

/* Whether a block may have so much shared memory. */
static bool has_smem(size_t bytes) {
    return bytes <= (size_t)mn_device_props_current().shared_bytes;
}

static int64_t sm_count(void) {
    const int processors = mn_device_props_current().processors;
    return processors > 0 ? processors : 1;
}

/* Blocks that share the columns of all heads, and those along the columns. */
static int64_t blocks_per_column_tile(const mn_call *call, const partition &by) {
    return mn_ceil_div(call->K, by.slots) * mn_n_spans(*call) * call->H;
}

static int64_t n_column_tiles(const mn_call *call, const partition &by) {
    return mn_ceil_div(call->V, by.columns);
}

/* Whether blocks would leave half of the processors without one. */
static bool underfills_gpu(const mn_call *call, const partition &by) {
    return 2 * n_column_tiles(call, by) * blocks_per_column_tile(call, by) <= sm_count();
}

/* Whether slices, a block on each processor, take no longer than all blocks at once. */
static bool can_serialize(const mn_call *call, const partition &by) {
    const int64_t processors = sm_count(), down = blocks_per_column_tile(call, by);
    const int64_t across = n_column_tiles(call, by);
    return across * mn_ceil_div(down, processors) == mn_ceil_div(across * down, processors);
}

/* Whether sequences have tiles enough to pay for a kernel of 2.6 us that makes keys' factors. */
static bool is_long(const mn_call *call) {
    return mn_tile_slots(*call, TOKENS) >= 16 * mn_n_spans(*call);
}

static partition choose_partition(const mn_importance_args *p, bool backward) {
    const bool spread = backward ? p->cot.ovar.data != NULL : p->ovar.data != NULL;
    const size_t workspace = backward ? sizeof(mma_path::bwd_smem<bwd_block>) :
                                        sizeof(mma_path::fwd_smem<fwd_block_k128_half>);
    if (p->call.dtype == MN_BF16 && !spread && has_smem(workspace)) {
        if (backward) {
            partition by = partition_of_block<bwd_block>(TOKENS, true);
            by.serialized = can_serialize(&p->call, by);
            by.diagonal = by.serialized && n_column_tiles(&p->call, by) == 2 &&
                         mn_ceil_div(p->call.K, by.slots) == 2;
            return by;
        }
        const bool tall = p->call.K > fwd_block::SLOTS;
        const partition wide = tall ? partition_of_block<fwd_block_k128>(TOKENS, true) :
                                 partition_of_block<fwd_block>(TOKENS, true);
        if (!underfills_gpu(&p->call, wide)) return wide;
        partition narrow = tall ? partition_of_block<fwd_block_k128_half>(TOKENS, true) :
                                  partition_of_block<fwd_block_half>(TOKENS, true);
        if (underfills_gpu(&p->call, narrow)) narrow.parts = 2;
        narrow.keys_ready = mn_device_is_sm90() && is_long(&p->call) &&
                            has_smem(sizeof(mma_path::fwd_smem<fwd_block_k128_ready>)) &&
                            has_smem(sizeof(mma_path::fwd_smem<fwd_block_ready>));
        return narrow;
    }
    if (p->call.K <= SHORT_KEY) return partition_of_block<short_block>(cell_path::SPAN, false);
    return partition_of_block<long_block>(cell_path::SPAN, false);
}

static dim3 blocks_of(const mn_call *call, const partition &by) {
    return dim3(mn_blocks(call->V, by.columns),
                mn_blocks(mn_n_spans(*call) * call->H * by.parts, 1, MAX_HEADS),
                mn_blocks(call->K, by.slots));
}

/* Numbers of each part of the work space. */
static bool workspace_sizes(int64_t (&counts)[N_BUFFERS], const mn_importance_args *p,
                            const partition &by,
                    bool backward) {
    const mn_call *call = &p->call;
    const int64_t thread_groups = mn_ceil_div(call->K, by.slots);
    const int64_t across = mn_ceil_div(call->V, by.columns);
    int64_t rows, blocks, heads;
    const size_t factors = by.slots == fwd_block::SLOTS ?
                               sizeof(mma_path::key_factors<fwd_block_ready>) :
                               sizeof(mma_path::key_factors<fwd_block_k128_ready>);
    for (int64_t &count : counts) count = 0;
    if (by.mma_path &&
        (!mn_mul_i64(&counts[DECAYS], mn_tile_slots(*call, TOKENS), call->H) ||
         !mn_mul_i64(&counts[DECAYS], counts[DECAYS], sizeof(mma_path::gates) / sizeof(float)))) {
        return false;
    }
    if (by.keys_ready &&
        (!mn_mul_i64(&counts[KEYS_MADE], mn_tile_slots(*call, TOKENS), call->H * thread_groups) ||
         !mn_mul_i64(&counts[KEYS_MADE], counts[KEYS_MADE], factors / sizeof(float)))) {
        return false;
    }
    bool ok = mn_mul_i64(&rows, mn_cell_rows_of(call), 2 * call->H) &&
              mn_mul_i64(&blocks, thread_groups, across);
    if (ok && thread_groups > 1) {
        ok = mn_mul_i64(&counts[SUMS], rows, call->V) &&
             mn_mul_i64(&counts[SUMS], counts[SUMS], by.diagonal ? 1 : thread_groups);
    }
    if (!backward || !ok) return ok;
    if (by.mma_path) {
        ok = mn_mul_i64(&heads, blocks, call->H) &&
             mn_mul_i64(&counts[ALONG], heads, bwd_block::WARPS) &&
             mn_mul_i64(&counts[ALONG], counts[ALONG], mn_tile_slots(*call, TOKENS)) &&
             mn_mul_i64(&counts[EDGES], heads, 2 * mn_n_spans(*call));
    }
    if (!ok) return false;
    return mn_mul_i64(&heads, blocks, call->H) &&
           mn_mul_i64(&counts[STATES], heads, 2 * by.slots * by.columns) &&
           mn_mul_i64(&counts[STATES], counts[STATES], mn_tile_slots(*call, by.span)) &&
           mn_mul_i64(&counts[KEY_PARTS], rows, call->K) &&
           mn_mul_i64(&counts[KEY_PARTS], counts[KEY_PARTS], by.serialized ? 1 : across) &&
           mn_mul_i64(&counts[GATES], rows, blocks) &&
           mn_mul_i64(&counts[PRIORS], heads, mn_n_spans(*call));
}

static bool plan_workspace(mn_plan *plan, const mn_importance_args *p, bool backward) {
    int64_t counts[N_BUFFERS];
    return workspace_sizes(counts, p, choose_partition(p, backward), backward)
        && mn_cell_plan_workspace(plan, counts);
}

template <typename T>
static int reduce_groups(const mn_out &first, const mn_out &second, const float *sums,
                      const mn_call *call, const partition &by, cudaStream_t stream) {
    const int64_t thread_groups = mn_ceil_div(call->K, by.slots);
    if (thread_groups == 1 || by.diagonal) return cudaSuccess;
    return mn_cell_reduce_partials<T>(first, second, sums, thread_groups, call, call->H, call->V,
                                      stream);
}

template <typename Smem, typename Block, typename Kernel, typename... KernelArgs>
static int launch(Kernel kernel, const mn_importance_args *p, const partition &by,
                  cudaStream_t stream,
                  const KernelArgs &...kernel_args) {
    const int64_t n_rows = mn_cell_rows_of(&p->call) * p->call.H;
    return mn_launch_smem(kernel, blocks_of(&p->call, by), Block::THREADS, sizeof(Smem),
                               stream, *p, kernel_args..., n_rows);
}

/* What decays make of all tiles. */
static int compute_gates(mma_path::gates **gates, const mn_importance_args *p, const workspace &to,
                      float unit, cudaStream_t stream) {
    const int64_t count = mn_tile_slots(p->call, TOKENS) * p->call.H;
    *gates = (mma_path::gates *)to.at[DECAYS];
    if (count == 0) return cudaSuccess;
    mma_path::importance_gates_kernel<<<mn_blocks(count, mma_path::GATES_PER_BLOCK),
                           mma_path::GATES_PER_BLOCK * TOKENS, 0, stream>>>(*p, *gates, unit);
    return mn_launch_status();
}

/* The same and, for such blocks, factors of keys. */
template <typename Block>
static int compute_keys(mma_path::gates **gates, const mn_importance_args *p, const workspace &to,
                        cudaStream_t stream) {
    if constexpr (Block::KEYS_READY) {
        const int64_t count = mn_tile_slots(p->call, TOKENS) * p->call.H;
        typedef mma_path::key_factors<Block> factors;
        *gates = (mma_path::gates *)to.at[DECAYS];
        if (count == 0) return cudaSuccess;
        const dim3 blocks(mn_blocks(count, 1), mn_blocks(p->call.K, Block::SLOTS));
        mma_path::importance_keys_kernel<Block><<<blocks, mma_path::KEY_THREADS, 0, stream>>>(
            *p, *gates, (factors *)to.at[KEYS_MADE], mma_path::FORWARD_UNIT);
        return mn_launch_status();
    } else {
        return compute_gates(gates, p, to, mma_path::FORWARD_UNIT, stream);
    }
}

template <typename Block>
static int forward_mma_of(const mn_importance_args *p, const workspace &to, const partition &by,
                     cudaStream_t stream) {
    mma_path::gates *gates;
    const int code = compute_keys<Block>(&gates, p, to, stream);
    if (code != cudaSuccess) return code;
    const int64_t n_rows = mn_cell_rows_of(&p->call) * p->call.H;
    return mn_launch_smem(mma_path::importance_fwd_kernel<Block>, blocks_of(&p->call, by),
                          Block::THREADS + mma_path::producer_warps<Block>::THREADS,
                          sizeof(mma_path::fwd_smem<Block>), stream, *p, gates,
                          (const void *)to.at[KEYS_MADE], to.at[SUMS], n_rows, by.parts);
}

static int forward_mma(const mn_importance_args *p, const workspace &to, const partition &by,
                       cudaStream_t stream) {
    if (by.slots == fwd_block::SLOTS) {
        if (by.columns == fwd_block::COLUMNS) return forward_mma_of<fwd_block>(p, to, by, stream);
        if (by.keys_ready) return forward_mma_of<fwd_block_ready>(p, to, by, stream);
        return forward_mma_of<fwd_block_half>(p, to, by, stream);
    }
    if (by.columns == fwd_block_k128::COLUMNS) return forward_mma_of<fwd_block_k128>(p, to, by,
                                                                                     stream);
    if (by.keys_ready) return forward_mma_of<fwd_block_k128_ready>(p, to, by, stream);
    return forward_mma_of<fwd_block_k128_half>(p, to, by, stream);
}

template <typename T, typename Block>
static int forward_cells(const mn_importance_args *p, const workspace &to, const partition &by,
                        cudaStream_t stream) {
    if (p->ovar.data) {
        return launch<cell_path::fwd_smem<Block>,
            Block>(cell_path::importance_fwd_kernel<T, Block, true>,
                                                           p, by, stream, to.at[SUMS]);
    }
    return launch<cell_path::fwd_smem<Block>,
        Block>(cell_path::importance_fwd_kernel<T, Block, false>, p,
                                                       by, stream, to.at[SUMS]);
}

/* The parts of the work space. */
static workspace workspace_of(const mn_importance_args *p, const partition &by, float *shared,
                              bool backward) {
    int64_t counts[N_BUFFERS];
    workspace to;
    (void)workspace_sizes(counts, p, by, backward);    // went well when it was planned
    mn_cell_carve_workspace(to.at, shared, counts);
    return to;
}

template <typename T>
static int forward(const mn_importance_args *p, float *shared, cudaStream_t stream) {
    const partition by = choose_partition(p, false);
    const workspace to = workspace_of(p, by, shared, false);
    int code;
    if (by.mma_path) code = forward_mma(p, to, by, stream);
    else if (p->call.K <= SHORT_KEY) code = forward_cells<T, short_block>(p, to, by, stream);
    else code = forward_cells<T, long_block>(p, to, by, stream);
    if (code != cudaSuccess) return code;
    return reduce_groups<T>(p->o, p->ovar, to.at[SUMS], &p->call, by, stream);
}

/* The states first, then the way back from them. */
static int backward_mma(const mn_importance_args *p, const workspace &to, const partition &by,
                       cudaStream_t stream) {
    mma_path::gates *gates;
    int code = compute_gates(&gates, p, to, 1.0f, stream);
    const dim3 blocks = blocks_of(&p->call, by);
    if (code == cudaSuccess) {
        code = mn_launch_smem(mma_path::importance_states_kernel<bwd_block_half, bwd_block>,
                              dim3(2 * blocks.x, blocks.y, blocks.z), bwd_block_half::THREADS,
                              sizeof(mma_path::states_smem<bwd_block_half>), stream, *p, gates,
                              to.at[STATES]);
    }
    mma_path::launch_slice now = { by.serialized ? 0 : mma_path::launch_slice::ALL, by.diagonal };
    do {
        if (code != cudaSuccess) return code;
        code = mn_launch_smem(mma_path::importance_bwd_kernel<bwd_block>, blocks,
                                   bwd_block::THREADS
                                       + mma_path::producer_warps<bwd_block>::THREADS,
                                   sizeof(mma_path::bwd_smem<bwd_block>), stream, *p, gates, to,
                                   now, mn_cell_rows_of(&p->call) * p->call.H);
        now.slice++;
    } while (by.serialized && now.slice < (int)blocks.x);
    const int64_t items = mn_n_spans(p->call) * p->call.H;
    if (code != cudaSuccess || items == 0) return code;
    mma_path::importance_gate_scan_kernel<bwd_block><<<(unsigned)items, mma_path::SCAN_THREADS, 0,
        stream>>>(
        *p, gates, to, to.at[PRIORS], blocks.x * blocks.z, mn_cell_rows_of(&p->call) * p->call.H);
    return mn_launch_status();
}

template <typename T, typename Block, bool SPREAD>
static int backward_cells_of(const mn_importance_args *p, const workspace &to, const partition &by,
                        cudaStream_t stream) {
    cell_path::importance_states_kernel<T, Block>
        <<<blocks_of(&p->call, by), Block::THREADS, 0, stream>>>(*p, to.at[STATES]);
    const int code = mn_launch_status();
    if (code != cudaSuccess) return code;
    return launch<cell_path::bwd_smem<Block, SPREAD>, Block>(
        cell_path::importance_bwd_kernel<T, Block, SPREAD>, p, by, stream, to);
}

template <typename T, bool SPREAD>
static int backward_cells(const mn_importance_args *p, const workspace &to, const partition &by,
                         cudaStream_t stream) {
    if (p->call.K <= SHORT_KEY) return backward_cells_of<T, short_block, SPREAD>(p, to, by, stream);
    return backward_cells_of<T, long_block, SPREAD>(p, to, by, stream);
}

/* Adds the parts of all gradients. */
template <typename T>
static int reduce_partials(const mn_importance_args *p, const workspace &at, const partition &by,
                     cudaStream_t stream) {
    const mn_call *call = &p->call;
    const int64_t n_rows = mn_cell_rows_of(call) * call->H;
    const dim3 blocks = blocks_of(call, by);
    int code = reduce_groups<T>(p->grad.v, p->grad.b, at.at[SUMS], call, by, stream);
    if (code == cudaSuccess && !by.serialized) {
        const bool beside_gates = by.mma_path && blocks.z == 1;    // and behind nothing else
        code = mn_cell_reduce_partials<T>(p->grad.k, p->grad.q, at.at[KEY_PARTS], blocks.x, call,
                                          call->H, call->K, stream, beside_gates);
    }
    if (code == cudaSuccess && n_rows > 0 && p->grad.g.data && !by.mma_path) {
        const store_gate_grads put = { p->grad.g, call->T, call->H };
        code = mn_reduce_partials_to(put, at.at[GATES], blocks.x * blocks.z, n_rows, stream);
    }
    if (code != cudaSuccess || !p->grad.ip.data) return code;
    const int64_t n_partials = mn_n_spans(*call) * (by.mma_path ? 1 : blocks.x * blocks.z);
    return mn_reduce_partials_to(store_prior_grads{ p->grad.ip }, at.at[PRIORS], n_partials,
                                 call->H, stream);
}

template <typename T>
static int backward(const mn_importance_args *p, float *shared, cudaStream_t stream) {
    const partition by = choose_partition(p, true);
    const workspace at = workspace_of(p, by, shared, true);
    int code;
    if (by.mma_path) code = backward_mma(p, at, by, stream);
    else if (p->cot.ovar.data) code = backward_cells<T, true>(p, at, by, stream);
    else code = backward_cells<T, false>(p, at, by, stream);
    return code != cudaSuccess ? code : reduce_partials<T>(p, at, by, stream);
}

MN_CUDA_PLAN(importance_forward) {
    return plan_workspace(plan, (const mn_importance_args *)args, false);
}

MN_CUDA_LAUNCH(importance_forward) {
    const mn_importance_args *p = (const mn_importance_args *)args;
    float *workspace = (float *)shared;
    if (p->call.dtype == MN_BF16) return forward<mn_bf16>(p, workspace, (cudaStream_t)stream);
    return forward<float>(p, workspace, (cudaStream_t)stream);
}

MN_CUDA_PLAN(importance_backward) {
    return plan_workspace(plan, (const mn_importance_args *)args, true);
}

MN_CUDA_LAUNCH(importance_backward) {
    const mn_importance_args *p = (const mn_importance_args *)args;
    float *workspace = (float *)shared;
    if (p->call.dtype == MN_BF16) return backward<mn_bf16>(p, workspace, (cudaStream_t)stream);
    return backward<float>(p, workspace, (cudaStream_t)stream);
}

}    // namespace mneme::importance
