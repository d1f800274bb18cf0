/* moebius.cu - Kalman Linear Attention: a scalar Kalman filter per channel and slot (see
 * ref/moebius.c for the equations).
 *
 *   den = a^2 + p lam      lam <- lam / den + prec k^2      eta <- a / den eta + prec v k
 *   y = sum_s q eta / lam  yvar = sum_s q^2 / lam
 *
 * A thread has one cell and walks through time by tiles of 16 tokens: a block is 16 channels (its
 * lines, see lines.cuh) with 16 slots (its columns), so that a sequence of 2048 channels fills the
 * GPU by itself. With more slots, blocks leave parts of the sums over slots, added up afterwards.
 * Backward, a first pass leaves the states in front of each tile; the second goes through the tiles
 * from the last one on, makes the states of a tile again in registers, and leaves dk and dq of its
 * 16 channels as parts. */
#include "kernels/cuda/cells.cuh"
#include "kernels/cuda/lines.cuh"

enum {
    TOKENS = MN_LINE_TOKENS,
    HALF = TOKENS / 2,
    SIDE = MN_LINE_SIDE,
    THREADS = MN_LINE_CELLS,
    WARPS = THREADS / 32,
    MOST_SEQUENCES = 65535,
};

static __device__ const float floor_at = 1e-12f;

/* The work space of a call, each part behind the other. */
struct room {
    float *sums;        // groups of slots x tokens x 2 x V: parts of y, yvar or dv, dprec
    float *states;      // tiles x blocks x 2 x THREADS: the state in front of each tile
    float *keys;        // blocks of channels x tokens x 2 x K: parts of dk, dq
    float *dynamics;    // sequences x 2 x V x K: parts of da, dp
};

/* ---- cells ----------------------------------------------------------------------------------- */

__device__ static int line(void) {
    return threadIdx.x / SIDE;
}

__device__ static int column(void) {
    return threadIdx.x % SIDE;
}

__device__ static int64_t channel0(void) {
    return blockIdx.x * (int64_t)SIDE;
}

__device__ static int64_t slot0(void) {
    return blockIdx.z * (int64_t)SIDE;
}

/* A cell, or its adjoint. */
struct state {
    float lam, eta;
};

/* Where this thread's cell lies in (V,K); -1 outside. */
__device__ static int64_t own_cell(const mn_call &call) {
    const int64_t v = channel0() + line(), s = slot0() + column();
    return v < call.V && s < call.K ? v * call.K + s : -1;
}

/* The cell of states (N,V,K): given ones, or `usual` and 0. */
__device__ static state load_cell(const mn_in &lam, const mn_in &eta, const mn_call &call,
                                  int64_t n, float usual) {
    const float *from_lam = mn_row<float>(lam, n, 0, 0), *from_eta = mn_row<float>(eta, n, 0, 0);
    const int64_t at = own_cell(call);
    return { at >= 0 && from_lam ? from_lam[at] : usual, at >= 0 && from_eta ? from_eta[at] : 0.0f };
}

__device__ static void store_cell(const mn_out &lam, const mn_out &eta, const state &from,
                                  const mn_call &call, int64_t n) {
    float *to_lam = mn_row<float>(lam, n, 0, 0), *to_eta = mn_row<float>(eta, n, 0, 0);
    const int64_t at = own_cell(call);
    if (at >= 0 && to_lam) to_lam[at] = from.lam;
    if (at >= 0 && to_eta) to_eta[at] = from.eta;
}

/* The dynamics of a cell with their floors. */
struct dynamics {
    float a, a2, p;

    __device__ explicit dynamics(const mn_moebius_args &args) {
        const int64_t at = own_cell(args.call);
        a = at >= 0 ? ((const float *)args.a.data)[at] : 1.0f;
        a2 = fmaxf(a * a, floor_at);
        p = at >= 0 ? fmaxf(((const float *)args.p.data)[at], floor_at) : floor_at;
    }

    /* One token; returns 1 / den. */
    __device__ __forceinline__ float advance(state &c, float k, float v, float prec) const {
        const float g = mn_inverse(fmaxf(fmaf(p, c.lam, a2), floor_at)), pk = prec * k;
        c.lam = fmaf(c.lam, g, pk * k);
        c.eta = fmaf(a * g, c.eta, pk * v);
        return g;
    }
};

/* ---- the numbers of a tile ------------------------------------------------------------------- */

/* By slots, then by channels. */
enum { KEYS, QUERIES, VALUES, PRECISIONS, MEAN_COTS, SPREAD_COTS };

/* What a pass reads, as a set of bits. */
enum {
    STATES_READ = 1 << KEYS | 1 << VALUES | 1 << PRECISIONS,
    FORWARD_READ = STATES_READ | 1 << QUERIES,
    BACKWARD_READ = FORWARD_READ | 1 << MEAN_COTS,
    FULL_BACKWARD_READ = BACKWARD_READ | 1 << SPREAD_COTS,
};

__host__ __device__ constexpr int count_bits(int set) {
    return set == 0 ? 0 : set % 2 + count_bits(set / 2);
}

template <int READ>
struct stage {
    static constexpr int COUNT = count_bits(READ);
    mn_line_rows rows[COUNT];

    __host__ __device__ static constexpr int index(int kind) {
        return count_bits(READ & ((1 << kind) - 1));
    }

    /* Four tokens from t on of this thread's slot or channel; zeros of what is not read. */
    template <int KIND>
    __device__ __forceinline__ void get(float (&x)[4], int t) const {
        if constexpr (READ >> KIND & 1) {
            rows[index(KIND)].get(x, KIND <= QUERIES ? column() : line(), t);
        } else {
            x[0] = x[1] = x[2] = x[3] = 0.0f;
        }
    }
};

/* Numbers on their way to shared memory: thread (t, i) brings number i of token t. */
template <typename T, int READ>
struct fetched {
    static constexpr int COUNT = stage<READ>::COUNT;
    T x[COUNT];
    const T *from[COUNT];    // NULL: nothing there

    template <int KIND>
    __device__ void open(const mn_in &view, const mn_span &span, int64_t base, int64_t count) {
        if constexpr (READ >> KIND & 1) {
            const int64_t i = base + threadIdx.x % SIDE;
            const T *row = mn_row<T>(view, span.b, span.t0 + threadIdx.x / SIDE, 0);
            from[stage<READ>::index(KIND)] = row && i < count ? row + i : nullptr;
        }
    }

    __device__ fetched(const mn_moebius_args &p, const mn_span &span) {
        open<KEYS>(p.k, span, slot0(), p.call.K);
        open<QUERIES>(p.q, span, slot0(), p.call.K);
        open<VALUES>(p.v, span, channel0(), p.call.V);
        open<PRECISIONS>(p.prec, span, channel0(), p.call.V);
        open<MEAN_COTS>(p.cot.y, span, channel0(), p.call.V);
        open<SPREAD_COTS>(p.cot.yvar, span, channel0(), p.call.V);
    }

    template <int KIND>
    __device__ __forceinline__ void fetch_one(const mn_in &view, const mn_line_tile &tile) {
        if constexpr (READ >> KIND & 1) {
            constexpr int i = stage<READ>::index(KIND);
            x[i] = T(0.0f);
            if ((int)threadIdx.x / SIDE < tile.n_rows && from[i]) {
                x[i] = from[i][tile.first * view.stride[1]];
            }
        }
    }

    __device__ __forceinline__ void fetch(const mn_moebius_args &p, const mn_line_tile &tile) {
        fetch_one<KEYS>(p.k, tile);
        fetch_one<QUERIES>(p.q, tile);
        fetch_one<VALUES>(p.v, tile);
        fetch_one<PRECISIONS>(p.prec, tile);
        fetch_one<MEAN_COTS>(p.cot.y, tile);
        fetch_one<SPREAD_COTS>(p.cot.yvar, tile);
    }

    __device__ __forceinline__ void put(stage<READ> &to) const {
#pragma unroll
        for (int i = 0; i < COUNT; i++) to.rows[i].put(mn_float(x[i]));
    }
};

/* Four tokens of a tile. */
template <int READ>
struct four {
    float k[4], q[4], v[4], prec[4], gy[4], gw[4];

    __device__ __forceinline__ four(const stage<READ> &in, int t) {
        in.template get<KEYS>(k, t);
        in.template get<QUERIES>(q, t);
        in.template get<VALUES>(v, t);
        in.template get<PRECISIONS>(prec, t);
        in.template get<MEAN_COTS>(gy, t);
        in.template get<SPREAD_COTS>(gw, t);
    }
};

/* walk(i, tile) over the tiles of a sequence, whose numbers are in[i % 2] then. */
template <typename T, int READ, typename F>
__device__ __forceinline__ void each_tile(stage<READ> (&in)[2], const mn_moebius_args &p,
                                          const mn_span &span, F walk) {
    fetched<T, READ> next(p, span);
    const int64_t end = mn_line_tiles(span);
    if (end > 0) next.fetch(p, mn_line_tile_at(span, 0));
    for (int64_t i = 0; i < end; i++) {
        next.put(in[i % 2]);
        __syncthreads();
        if (i + 1 < end) next.fetch(p, mn_line_tile_at(span, i + 1));
        walk(i, mn_line_tile_at(span, i));
    }
    __syncthreads();
}

/* ---- forward --------------------------------------------------------------------------------- */

/* Sums of a tile's tokens, of each channel. */
struct sums_of_lines {
    float at[2][TOKENS][SIDE + 1];
};

/* One of two numbers of each token and channel, to rows that begin at `to` for the block and lie
 * `stride` apart, of which `count` exist: thread (t, i) has channel i of token t. */
template <typename T>
__device__ __forceinline__ static void put_kind(T *to, int64_t stride, int64_t count, int n_rows,
                                                const sums_of_lines &sums, int kind) {
    const int t = threadIdx.x / SIDE, i = threadIdx.x % SIDE;
    if (t < n_rows && i < count) mn_put(to + t * stride + i, sums.at[kind][t][i]);
}

/* To two tensors or, where blockIdx.z counts blocks of slots, as its part. */
template <typename T>
__device__ __forceinline__ static void put_lines(const mn_out &first, const mn_out &second,
                                                 float *parts, const mn_call &call,
                                                 const mn_line_tile &tile, int64_t n_rows,
                                                 const sums_of_lines &sums) {
    const int64_t v = channel0(), count = call.V - v, token = tile.span.t0 + tile.first;
    if (gridDim.z > 1) {
        const int64_t row = blockIdx.z * n_rows + tile.span.b * call.T + token;
        float *to = parts + row * 2 * call.V + v;
        put_kind(to, 2 * call.V, count, tile.n_rows, sums, 0);
        put_kind(to + call.V, 2 * call.V, count, tile.n_rows, sums, 1);
        return;
    }
    T *to_first = mn_row<T>(first, tile.span.b, token, 0);
    T *to_second = mn_row<T>(second, tile.span.b, token, 0);
    if (to_first) put_kind(to_first + v, first.stride[1], count, tile.n_rows, sums, 0);
    if (to_second) put_kind(to_second + v, second.stride[1], count, tile.n_rows, sums, 1);
}

/* FULL: with yvar, or read from the prior. WHOLE: the tile has all of its tokens, and nothing
 * asks. */
template <bool FULL, bool WHOLE>
__device__ __forceinline__ static void tile_forward(state &c, const dynamics &dyn,
                                                    sums_of_lines &out,
                                                    const stage<FORWARD_READ> &in, int n_rows,
                                                    bool prior) {
    float y[TOKENS], yvar[TOKENS];
#pragma unroll
    for (int t = 0; t < TOKENS; t += 4) {
        const four<FORWARD_READ> now(in, t);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            y[t + i] = yvar[t + i] = 0.0f;
            if (!WHOLE && t + i >= n_rows) continue;
            dyn.advance(c, now.k[i], now.v[i], now.prec[i]);
            const float var = mn_inverse(fmaxf(c.lam, floor_at)), q = now.q[i];
            y[t + i] = (FULL && prior ? q * dyn.a : q) * c.eta * var;
            if (FULL) yvar[t + i] = q * q * (prior ? fmaf(dyn.a2, var, dyn.p) : var);
        }
    }
    out.at[0][column()][line()] = mn_line_sums(y);
    if (FULL) out.at[1][column()][line()] = mn_line_sums(yvar);
}

template <typename T, bool FULL>
__global__ void __launch_bounds__(THREADS, FULL ? 3 : 4)
forward_kernel(const __grid_constant__ mn_moebius_args p, room to, int64_t n_rows) {
    __shared__ stage<FORWARD_READ> in[2];
    __shared__ sums_of_lines out[2];
    const dynamics dyn(p);
    for (int64_t n = blockIdx.y; n < mn_n_spans(p.call); n += gridDim.y) {
        const mn_span span = mn_span_at(p.call, n);
        const int64_t n_tiles = mn_line_tiles(span);
        state c = load_cell(p.lam0, p.eta0, p.call, n, 1.0f);
        const auto put = [&](int64_t i) {
            put_lines<T>(p.y, p.yvar, to.sums, p.call, mn_line_tile_at(span, i), n_rows,
                         out[i % 2]);
        };
        each_tile<T>(in, p, span, [&](int64_t i, const mn_line_tile &tile) {
            if (i > 0) put(i - 1);
            if (tile.n_rows == TOKENS) {
                tile_forward<FULL, true>(c, dyn, out[i % 2], in[i % 2], TOKENS, p.from_prior);
            } else {
                tile_forward<FULL, false>(c, dyn, out[i % 2], in[i % 2], tile.n_rows,
                                          p.from_prior);
            }
        });
        if (n_tiles > 0) put(n_tiles - 1);
        __syncthreads();
        store_cell(p.lam, p.eta, c, p.call, n);
    }
}

/* ---- backward -------------------------------------------------------------------------------- */

/* Where this thread's state in front of tile number `slot` of all sequences lies. */
__device__ static float2 *state_at(float *states, int64_t slot) {
    const int64_t block = blockIdx.z * (int64_t)gridDim.x + blockIdx.x;
    return (float2 *)states + (slot * gridDim.x * gridDim.z + block) * THREADS + threadIdx.x;
}

/* Through a tile, as far as there are tokens. */
template <int READ>
__device__ __forceinline__ static void advance_tile(state &c, const dynamics &dyn,
                                                    const stage<READ> &in, int n_rows) {
#pragma unroll
    for (int t = 0; t < TOKENS; t += 4) {
        const four<READ> now(in, t);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if (t + i < n_rows) dyn.advance(c, now.k[i], now.v[i], now.prec[i]);
        }
    }
}

/* States in front of every tile. */
template <typename T>
__global__ void __launch_bounds__(THREADS, 6)
states_kernel(const __grid_constant__ mn_moebius_args p, room to) {
    __shared__ stage<STATES_READ> in[2];
    const dynamics dyn(p);
    for (int64_t n = blockIdx.y; n < mn_n_spans(p.call); n += gridDim.y) {
        const mn_span span = mn_span_at(p.call, n);
        const int64_t slot = mn_line_first_slot(p.call, n);
        state c = load_cell(p.lam0, p.eta0, p.call, n, 1.0f);
        each_tile<T>(in, p, span, [&](int64_t i, const mn_line_tile &tile) {
            *state_at(to.states, slot + i) = make_float2(c.lam, c.eta);
            advance_tile(c, dyn, in[i % 2], tile.n_rows);
        });
    }
}

/* Adjoint of a thread's cell and its sums over time. */
struct adjoint {
    state d;
    float a, a2, p;
};

/* States of a tile: in front of each token with the 1 / den that it makes of it, and the last. */
struct history {
    float lam[TOKENS + 1], eta[TOKENS + 1], g[TOKENS];
};

/* What one token says to its channel and its slot. */
struct token_cots {
    float v, prec, k, q;
};

/* Token t back. FULL: with cotangents of yvar or a read from the prior. */
template <bool FULL>
__device__ __forceinline__ static token_cots token_backward(adjoint &sum, const dynamics &dyn,
                                                            const history &c, int t, float k,
                                                            float q, float v, float prec, float gy,
                                                            float gw, bool prior) {
    const float a = dyn.a, a2 = dyn.a2, p = dyn.p, after = c.lam[t + 1];
    const float var = mn_inverse(fmaxf(after, floor_at)), mean = c.eta[t + 1] * var;
    token_cots to;
    float gm = gy * q, pull = gm * mean;
    to.q = gy * mean;
    if (FULL) {
        float gv = gw * q * q;
        if (prior) {
            to.q = fmaf(gy * a, mean, 2.0f * q * gw * fmaf(a2, var, p));
            sum.a += pull;
            sum.a2 = fmaf(gv, var, sum.a2);
            sum.p += gv;
            gm *= a;
            gv *= a2;
        } else {
            to.q = fmaf(gy, mean, 2.0f * q * gw * var);
        }
        pull = fmaf(gm, mean, gv * var);
    }
    const float ne = fmaf(gm, var, sum.d.eta);
    const float nl = after >= floor_at ? fmaf(-var, pull, sum.d.lam) : sum.d.lam;
    const float u = fmaf(nl, k, ne * v);
    to.k = prec * fmaf(nl, k, u);
    to.prec = k * u;
    to.v = prec * (ne * k);
    const float lam = c.lam[t], eta = c.eta[t], g = c.g[t], ng = nl * g, de = ne * (a * g);
    const bool bent = fmaf(p, lam, a2) >= floor_at;
    sum.a = fmaf(ne, eta * g, sum.a);
    sum.d.eta = de;
    const float through = de * eta;
    const float pulled = bent ? fmaf(ng, lam, through) * g : 0.0f;
    sum.a2 -= pulled;
    sum.p = fmaf(-pulled, lam, sum.p);
    sum.d.lam = bent ? g * fmaf(ng, a2, -(p * through)) : ng;
    return to;
}

template <bool FULL>
struct backward_room {
    static constexpr int READ = FULL ? FULL_BACKWARD_READ : BACKWARD_READ;
    stage<READ> in;
    sums_of_lines out;
    float keys[WARPS][TOKENS][2][SIDE];    // dk and dq of a warp's two channels
};

/* A tile from the state in front of it. WHOLE as above. */
template <bool FULL, bool WHOLE>
__device__ __forceinline__ static void tile_backward(adjoint &sum, const dynamics &dyn,
                                                     backward_room<FULL> &r, state c, int n_rows,
                                                     bool prior) {
    typedef four<backward_room<FULL>::READ> tokens;
    history past;
    past.lam[0] = c.lam, past.eta[0] = c.eta;
#pragma unroll
    for (int t = 0; t < TOKENS; t += 4) {
        const tokens now(r.in, t);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            past.g[t + i] = 0.0f;
            if (WHOLE || t + i < n_rows) {
                past.g[t + i] = dyn.advance(c, now.k[i], now.v[i], now.prec[i]);
            }
            past.lam[t + i + 1] = c.lam, past.eta[t + i + 1] = c.eta;
        }
    }
    adjoint here = { sum.d, 0.0f, 0.0f, 0.0f };
    const int warp = threadIdx.x / 32, kind = threadIdx.x % 32 / SIDE;
#pragma unroll
    for (int half = TOKENS - HALF; half >= 0; half -= HALF) {
        float sums[TOKENS];    // dv of eight tokens, then dprec
#pragma unroll
        for (int t = half + HALF - 4; t >= half; t -= 4) {
            const tokens now(r.in, t);
#pragma unroll
            for (int i = 3; i >= 0; i--) {
                token_cots to = {};
                if (WHOLE || t + i < n_rows) {
                    to = token_backward<FULL>(here, dyn, past, t + i, now.k[i], now.q[i], now.v[i],
                                              now.prec[i], now.gy[i], now.gw[i], prior);
                }
                sums[t + i - half] = to.v, sums[t + i - half + HALF] = to.prec;
                r.keys[warp][t + i][kind][column()] = mn_line_pair_sums(to.k, to.q);
            }
        }
        r.out.at[column() / HALF][half + column() % HALF][line()] = mn_line_sums(sums);
    }
    sum.d = here.d;
    sum.a += here.a, sum.a2 += here.a2, sum.p += here.p;
}

/* This block's share of dk and dq of a tile, as a part. */
template <bool FULL>
__device__ __forceinline__ static void put_keys(float *parts, const mn_call &call,
                                                const mn_line_tile &tile, int64_t n_rows,
                                                const backward_room<FULL> &r) {
#pragma unroll
    for (int j = 0; j < 2; j++) {
        const int t = (threadIdx.x + j * THREADS) / (2 * SIDE), kind = threadIdx.x / SIDE % 2;
        const int64_t s = slot0() + column();
        if (t >= tile.n_rows || s >= call.K) continue;
        float sum = 0.0f;
#pragma unroll
        for (int warp = 0; warp < WARPS; warp++) sum += r.keys[warp][t][kind][column()];
        const int64_t row = tile.span.b * call.T + tile.span.t0 + tile.first + t;
        parts[((blockIdx.x * n_rows + row) * 2 + kind) * call.K + s] = sum;
    }
}

/* What is left of a sequence after its first token. */
__device__ static void put_first(const mn_moebius_args &p, float *to, const adjoint &sum,
                                 const dynamics &dyn, int64_t n) {
    store_cell(p.grad.lam0, p.grad.eta0, sum.d, p.call, n);
    const int64_t cells = p.call.V * p.call.K, i = own_cell(p.call);
    if (i < 0) return;
    const float a = dyn.a;
    const bool kept = ((const float *)p.p.data)[i] >= floor_at;
    to[2 * n * cells + i] = sum.a + (a * a >= floor_at ? 2.0f * a * sum.a2 : 0.0f);
    to[(2 * n + 1) * cells + i] = kept ? sum.p : 0.0f;
}

template <typename T, bool FULL>
__global__ void __launch_bounds__(THREADS, 2)
backward_kernel(const __grid_constant__ mn_moebius_args p, room to, int64_t n_rows) {
    __shared__ backward_room<FULL> r;
    const dynamics dyn(p);
    for (int64_t n = blockIdx.y; n < mn_n_spans(p.call); n += gridDim.y) {
        const mn_span span = mn_span_at(p.call, n);
        const int64_t slot = mn_line_first_slot(p.call, n), last = mn_line_tiles(span) - 1;
        adjoint sum = { load_cell(p.cot.lam, p.cot.eta, p.call, n, 0.0f), 0.0f, 0.0f, 0.0f };
        fetched<T, backward_room<FULL>::READ> next(p, span);
        float2 ahead = make_float2(0.0f, 0.0f);
        if (last >= 0) {
            next.fetch(p, mn_line_tile_at(span, last));
            ahead = *state_at(to.states, slot + last);
        }
        for (int64_t i = last; i >= 0; i--) {
            const mn_line_tile tile = mn_line_tile_at(span, i);
            const state first = { ahead.x, ahead.y };
            next.put(r.in);
            __syncthreads();
            if (i > 0) {
                next.fetch(p, mn_line_tile_at(span, i - 1));
                ahead = *state_at(to.states, slot + i - 1);
            }
            if (tile.n_rows == TOKENS) {
                tile_backward<FULL, true>(sum, dyn, r, first, TOKENS, p.from_prior);
            } else {
                tile_backward<FULL, false>(sum, dyn, r, first, tile.n_rows, p.from_prior);
            }
            __syncthreads();
            put_keys(to.keys, p.call, tile, n_rows, r);
            put_lines<T>(p.grad.v, p.grad.prec, to.sums, p.call, tile, n_rows, r.out);
        }
        put_first(p, to.dynamics, sum, dyn, n);
        __syncthreads();
    }
}

/* ---- launches -------------------------------------------------------------------------------- */

struct put_dynamics {
    float *da, *dp;
    int64_t cells;

    __device__ void operator()(int64_t i, float sum) const {
        if (i < cells && da) da[i] = sum;
        if (i >= cells && dp) dp[i - cells] = sum;
    }
};

static dim3 blocks_of(const mn_call *call) {
    return dim3(mn_blocks(call->V, SIDE), mn_blocks(mn_n_spans(*call), 1, MOST_SEQUENCES),
                mn_blocks(call->K, SIDE));
}

enum { N_ROOMS = 4 };

/* Numbers of each part of the work space, in the order of `room`. */
static bool measure(int64_t (&counts)[N_ROOMS], const mn_call *call, bool backward) {
    const int64_t groups = mn_ceil_div(call->K, SIDE), across = mn_ceil_div(call->V, SIDE);
    int64_t rows, cells, set;    // set: one state of each thread
    for (int64_t &count : counts) count = 0;
    bool ok = mn_mul_i64(&rows, mn_cell_rows_of(call), 2) && mn_mul_i64(&set, groups, across) &&
              mn_mul_i64(&set, set, 2 * THREADS);
    if (ok && groups > 1) {
        ok = mn_mul_i64(&counts[0], rows, call->V) && mn_mul_i64(&counts[0], counts[0], groups);
    }
    if (!backward || !ok) return ok;
    return mn_mul_i64(&counts[1], set, mn_tile_slots(*call, TOKENS)) &&
           mn_mul_i64(&counts[2], rows, call->K) && mn_mul_i64(&counts[2], counts[2], across) &&
           mn_mul_i64(&cells, call->V, 2 * call->K) &&
           mn_mul_i64(&counts[3], cells, mn_n_spans(*call));
}

static bool plan_room(mn_plan *plan, const mn_call *call, bool backward) {
    int64_t counts[N_ROOMS];
    return measure(counts, call, backward) && mn_cell_plan(plan, counts);
}

static room room_at(float *shared, const mn_call *call, bool backward) {
    int64_t counts[N_ROOMS];
    float *at[N_ROOMS];
    (void)measure(counts, call, backward);    // went well when it was planned
    mn_cell_rooms(at, shared, counts);
    return { at[0], at[1], at[2], at[3] };
}

/* Sums over groups of slots, where there are several. */
template <typename T>
static int sum_groups(const mn_out &first, const mn_out &second, const float *sums,
                      const mn_call *call, cudaStream_t stream) {
    const int64_t groups = mn_ceil_div(call->K, SIDE);
    if (groups == 1) return cudaSuccess;
    return mn_cell_add_rows<T>(first, second, sums, groups, call, 1, call->V, stream);
}

template <typename T>
static int forward(const mn_moebius_args *p, float *shared, cudaStream_t stream) {
    const dim3 blocks = blocks_of(&p->call);
    const int64_t n_rows = mn_cell_rows_of(&p->call);
    const room to = room_at(shared, &p->call, false);
    if (p->yvar.data || p->from_prior) {
        forward_kernel<T, true><<<blocks, THREADS, 0, stream>>>(*p, to, n_rows);
    } else {
        forward_kernel<T, false><<<blocks, THREADS, 0, stream>>>(*p, to, n_rows);
    }
    const int code = mn_launched();
    return code != cudaSuccess ? code : sum_groups<T>(p->y, p->yvar, to.sums, &p->call, stream);
}

template <typename T>
static int backward(const mn_moebius_args *p, float *shared, cudaStream_t stream) {
    const mn_call *call = &p->call;
    const dim3 blocks = blocks_of(call);
    const int64_t n_rows = mn_cell_rows_of(call), cells = call->V * call->K;
    const room to = room_at(shared, call, true);
    states_kernel<T><<<blocks, THREADS, 0, stream>>>(*p, to);
    if (p->from_prior || p->cot.yvar.data) {
        backward_kernel<T, true><<<blocks, THREADS, 0, stream>>>(*p, to, n_rows);
    } else {
        backward_kernel<T, false><<<blocks, THREADS, 0, stream>>>(*p, to, n_rows);
    }
    int code = mn_launched();
    if (code == cudaSuccess) {
        code = sum_groups<T>(p->grad.v, p->grad.prec, to.sums, call, stream);
    }
    if (code == cudaSuccess) {
        code = mn_cell_add_rows<T>(p->grad.k, p->grad.q, to.keys, blocks.x, call, 1, call->K,
                                   stream);
    }
    if (code != cudaSuccess || (!p->grad.a.data && !p->grad.p.data)) return code;
    const put_dynamics put = { (float *)p->grad.a.data, (float *)p->grad.p.data, cells };
    return mn_sum_parts_into(put, to.dynamics, mn_n_spans(*call), 2 * cells, stream);
}

MN_CUDA_PLAN(moebius_forward) {
    return plan_room(plan, (const mn_call *)args, false);
}

MN_CUDA_LAUNCH(moebius_forward) {
    const mn_moebius_args *p = (const mn_moebius_args *)args;
    if (p->call.dtype == MN_BF16) {
        return forward<mn_bf16>(p, (float *)shared, (cudaStream_t)stream);
    }
    return forward<float>(p, (float *)shared, (cudaStream_t)stream);
}

MN_CUDA_PLAN(moebius_backward) {
    return plan_room(plan, (const mn_call *)args, true);
}

MN_CUDA_LAUNCH(moebius_backward) {
    const mn_moebius_args *p = (const mn_moebius_args *)args;
    if (p->call.dtype == MN_BF16) {
        return backward<mn_bf16>(p, (float *)shared, (cudaStream_t)stream);
    }
    return backward<float>(p, (float *)shared, (cudaStream_t)stream);
}
