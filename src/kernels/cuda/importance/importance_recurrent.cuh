/* importance_recurrent.cuh - Palimpsa cell by cell: calls in float32, and those with ovar.
 *
 * A thread keeps 4 slots of 2 value columns, a block 64 slots of 32 columns or, of short keys, 32
 * of 64, of one head of one sequence. With more slots, blocks leave parts of the sums over slots.
 * Backward, a first pass leaves the states in front of each span of 32 tokens. The second goes
 * through the spans from the last one on: forward, while a state in eight stays in shared memory,
 * then back by halves of tiles, whose states are made again in registers. */
#ifndef MN_KERNELS_CUDA_IMPORTANCE_IMPORTANCE_RECURRENT_CUH
#define MN_KERNELS_CUDA_IMPORTANCE_IMPORTANCE_RECURRENT_CUH

#include "kernels/cuda/importance/importance.cuh"

namespace importance::by_cell {

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
        fresh[t] = t < n_rows ? fmaf(forget[t], ip, least_importance) : 0.0f;
    }
};

template <typename Block, int N_KEYS, int N_LINES>
struct stage {
    mn_cell_keys<Block> keys[N_KEYS];
    mn_cell_lines<Block> lines[N_LINES];
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
    __device__ void walk(state &c, int t0, int t1) const {
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
    mn_cell_loaded<T, Block::SLOTS, Block::THREADS> keys[N_KEYS];
    mn_cell_loaded<T, Block::COLUMNS, Block::THREADS> lines[N_LINES];
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
__device__ __forceinline__ static float pair_sums(float (&first)[C], float (&second)[C]) {
    mn_cell_swap<1>(first, 1);
    mn_cell_swap<1>(second, 1);
    float both[2] = { first[0], second[0] };
    mn_cell_halve<1>(both, 2);
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
                    const float q = now.q[n][j], qr = q * mn_inverse(c.I[i][j]);
                    o[n][i] = fmaf(c.M[i][j], qr, o[n][i]);
                    if (VARIANCE) ovar[n][i] = fmaf(q, qr, ovar[n][i]);
                }
            }
        }
        const int at = t + Block::slot_lane() / 2, column = Block::column(0);
        out.at[0][Block::group()][at][column] = scale * pair_sums(o[0], o[1]);
        if (VARIANCE) {
            out.at[1][Block::group()][at][column] = scale * scale * pair_sums(ovar[0], ovar[1]);
        }
        now = next;
    }
}

template <typename Block>
struct forward_smem {
    stage<Block, 2, 2> in;
    mn_cell_sums<Block> out;
};

template <typename T, typename Block, bool VARIANCE>
__global__ void __launch_bounds__(Block::THREADS, 2)
forward_kernel(const __grid_constant__ mn_importance_args p, float *sums, int64_t n_rows) {
    extern __shared__ float4 shared[];
    forward_smem<Block> &r = *(forward_smem<Block> *)shared;
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
            mn_cell_put_sums<T>(p.o, p.ovar, sums, p.call, tile, at.h, p.call.H, n_rows, r.out);
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
states_kernel(const __grid_constant__ mn_importance_args p, float *states) {
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
            in.walk(c, 0, TOKENS);
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
            const float r = mn_inverse(after.I[i][j]), mu = after.M[i][j] * r, pull = q * mean * r;
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
struct backward_smem {
    stage<Block, 2, SPREAD ? 4 : 3> in;
    mn_cell_sums<Block> out;
    mn_cell_key_parts<Block> keys;
    float dg[WARPS][TOKENS], team[32];
    float4 states[SPAN / HALF][SETS][Block::THREADS];    // in front of each half of a tile
};

/* Sums over the warp at four tokens: lane 8 t has token t. */
__device__ __forceinline__ static float warp_sums(float (&x)[4]) {
    mn_cell_halve<2>(x, 16);
    mn_cell_halve<1>(x, 8);
#pragma unroll
    for (int mask = 4; mask > 0; mask >>= 1) x[0] += __shfl_xor_sync(0xffffffffu, x[0], mask);
    return x[0];
}

/* Half a tile from its first token t0 on, with the state in front of it in `first`. Adds to
 * `prior`, the part of dip. */
template <typename Block, bool SPREAD>
__device__ __forceinline__ static void half_backward(state &adj, float &prior, const state &first,
                                                     backward_smem<Block, SPREAD> &r, int t0,
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
            const float line = pair_sums(to.v, to.b);
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
__device__ static void start_back(state &adj, const state &c, const mn_importance_args &p,
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
__device__ static float put_first(const state &adj, const mn_importance_args &p, const place &at) {
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
__device__ static void scan_span(state &c, state &adj, backward_smem<Block, SPREAD> &r,
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
            if (half == 0 || i + 1 < end || last) r.in.walk(c, half * HALF, (half + 1) * HALF);
        }
        __syncthreads();
    }
    if (last) start_back<Block>(adj, c, p, at);
}

template <typename T, typename Block, bool SPREAD>
__global__ void __launch_bounds__(Block::THREADS, 1)
backward_kernel(const __grid_constant__ mn_importance_args p, room to, int64_t n_rows) {
    extern __shared__ float4 shared[];
    backward_smem<Block, SPREAD> &r = *(backward_smem<Block, SPREAD> *)shared;
    const int64_t blocks = gridDim.x * gridDim.z, block = blockIdx.z * gridDim.x + blockIdx.x;
    for (int64_t item = blockIdx.y; item < mn_n_spans(p.call) * p.call.H; item += gridDim.y) {
        const place at = place::of(p, item);
        const int64_t n_tiles = mn_cell_tiles(at.span.length);
        const int64_t slot = mn_cell_first_slot(p.call, at.n, SPAN);
        state adj, c;
        float prior = 0.0f;
        if (n_tiles == 0) {
            load_first<Block>(c, p, at);
            start_back<Block>(adj, c, p, at);
        }
        for (int64_t end = n_tiles; end > 0;) {
            const int64_t span = (end - 1) / (SPAN / TOKENS), first = span * (SPAN / TOKENS);
            const int64_t set = ((slot + span) * p.call.H + at.h) * SETS;
            loaded<T, Block, 2, SPREAD ? 4 : 3> next;
            next.open(p, at);
            c.load(to.at[STATES] + Block::own(set), Block::own(1) - Block::own(0));
            next.fetch(p, at, mn_cell_tile_at(at.span, end - 1));
            scan_span<T, Block, SPREAD>(c, adj, r, p, at, first, end);
            for (int64_t i = end - 1; i >= first; i--) {
                const mn_cell_tile tile = mn_cell_tile_at(at.span, i);
                next.put(r.in, at.ip, (float)p.scale);
                __syncthreads();
                if (i > first) next.fetch(p, at, mn_cell_tile_at(at.span, i - 1));
#pragma unroll 1
                for (int t0 = HALF; t0 >= 0; t0 -= HALF) {
                    const int64_t half = 2 * (i - first) + t0 / HALF;
                    c.load((float *)&r.states[half][0][threadIdx.x], 4 * Block::THREADS);
                    half_backward<Block, SPREAD>(adj, prior, c, r, t0, at.ip);
                }
                __syncthreads();
                mn_cell_put_keys(to.at[KEY_PARTS], p.call, tile, at.h, p.call.H, n_rows, r.keys);
                mn_cell_put_sums<T>(p.grad.v, p.grad.b, to.at[SUMS], p.call, tile, at.h, p.call.H,
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
        prior += put_first<Block>(adj, p, at);
        prior = mn_group_sum<Block::THREADS>(prior, r.team);
        if (threadIdx.x == 0) to.at[PRIORS][(at.n * blocks + block) * p.call.H + at.h] = prior;
        __syncthreads();
    }
}

}    // namespace importance::by_cell

#endif
