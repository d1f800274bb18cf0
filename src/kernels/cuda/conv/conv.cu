/* conv.cu - y_t = act(p_t), p_t = bias + sum_i w_i u_{t+i}, depthwise, over u = (tail0, x) (see
 * ref/conv.c, whose index convention u_{s+W-1} = x_s is used here); and conv_unit, whose y_t is
 * that over its length, head by head: y_t = r a_t, a_t = silu(p_t), r = 1 / max(|a_t|, eps) or
 * 1 / sqrt(|a_t|^2 + eps).
 *
 *   du_j = sum_i w_i d_{j-i}  (+ dtail_{j-length} for j >= length),  d_t = da_t act'(p_t)
 *   dw_i = sum_t d_t u_{t+i}     dbias = sum_t d_t
 *   da_t = dy_t, or r (dy_t - a_t r^2 (a_t.dy_t)) where there is a length (r dy_t below its floor)
 *
 * A thread has N neighbouring channels, 16 bytes, and scans down the tokens of a tile with the W
 * - 1 inputs before them in registers (W = 4, what models have; any other W reads its inputs
 * again from the cache), the rows after them on their way. A warp is on its own: a column tile of
 * channels, which are whole heads, times a tile, so that the sums over a head are exchanges among
 * its lanes. What lies between x and y is made again going back, in registers. Backward, a warp
 * gathers its part of dw and dbias over the tiles it takes, and mn_reduce_partials adds the
 * parts. */
#include <float.h>

#include "kernels/conv_unit.h"
#include "kernels/cuda/prim/activation.cuh"
#include "kernels/cuda/prim/split_reduce.cuh"
#include "kernels/cuda/prim/vec_load.cuh"

namespace mneme::conv {

enum { THREADS = 128, WARPS = THREADS / 32, TAPS = 4, GROUP = 4, STAGES = 3, SILU = 1, ROOT = 1 };
enum { FORWARD_ROWS = 8, MIN_ROWS = 16, MAX_ROWS = 1024, GENERIC_ROWS = 32 };    // tokens
enum { MAX_TILES = 65535 };    // blocks
enum { BACKWARD_BLOCKS = 2, SM_COUNT = 132 };    // blocks of a processor; of those, an H200

/* x_s of a sequence for channels [channel, channel + N); before its start the tail, or zero. */
template <typename T, int N>
__device__ static void input_at(float (&u)[N], const mn_conv_args &p, int64_t n,
                                const mn_span &span, int64_t s, int64_t channel) {
    if (s >= 0) {
        mn_load<N>(u, mn_row<T>(p.x, span.b, span.t0 + s, 0), channel);
        return;
    }
    const int64_t M = p.call.W - 1;
    const float *tail0 = (const float *)p.tail0.data;
    mn_load<N>(u, tail0 ? tail0 + (n * M + M + s) * p.call.V : nullptr, channel);
}

template <typename T>
__device__ static float weight_at(const mn_conv_args &p, int64_t channel, int64_t i) {
    return mn_float(((const T *)p.w.data)[channel * p.call.W + i]);
}

/* p_t of one channel, every input read anew */
template <typename T>
__device__ static float preact(const mn_conv_args &p, int64_t n, const mn_span &span, int64_t t,
                                   int64_t channel) {
    float sum = mn_get((const T *)p.bias.data, channel);
    for (int64_t i = 0; i < p.call.W; i++) {
        float u[1];
        input_at<T, 1>(u, p, n, span, t - (p.call.W - 1) + i, channel);
        sum = fmaf(weight_at<T>(p, channel, i), u[0], sum);
    }
    return sum;
}

/* d_t of one channel, every input read anew; 0 outside of the sequence */
template <typename T>
__device__ static float preact_grad(const mn_conv_args &p, int64_t n, const mn_span &span,
                                       int64_t t, int64_t channel) {
    if (t < 0 || t >= span.length) return 0.0f;
    const float dy = mn_get(mn_row<T>(p.cot.y, span.b, span.t0 + t, 0), channel);
    if (p.act != SILU) return dy;
    return dy * mn_silu(preact<T>(p, n, span, t, channel)).slope;
}

/* ---- column tiles ---------------------------------------------------------------------------- */

/* How warps share channels: heads of `width` channels have `head_lanes` lanes each, a power of two,
 * of which the last ones may have no channels; a column tile is as many heads as a warp has groups
 * of so many lanes. The rest is about lengths: r = max(|a|^2 + more, least)^-1/2, which is constant
 * below `least`. */
struct heads {
    int width, head_lanes, col_tile;
    float more, least;
};

/* Where a warp and a lane of it work: tiles `part`, part + n_partials, ..., and N channels; lanes
 * that are not `on` do as others do and keep nothing. */
struct lane_coord {
    int64_t partial, channel;
    bool on;
};

template <int N>
__device__ static lane_coord make_lane_coord(const mn_conv_args &p, const heads &h) {
    const int own = __shfl_sync(0xffffffffu, (int)threadIdx.x / 32, 0);    // the same in all lanes
    const int64_t warp = blockIdx.x * (int64_t)WARPS + own;
    const int64_t n_col_tiles = (p.call.V + h.col_tile - 1) / h.col_tile;
    const int lane = threadIdx.x % 32, within = lane % h.head_lanes * N;
    const int64_t channel = warp % n_col_tiles * h.col_tile + lane / h.head_lanes * h.width
        + within;
    const bool on = within < h.width && channel < p.call.V;
    return { warp / n_col_tiles, on ? channel : 0, on };
}

/* Sums over the lanes of a head, in all of them. */
template <int COUNT>
__device__ static void sum_head(float (&x)[COUNT], int head_lanes) {
#pragma unroll
    for (int lanes = 1; lanes < 32; lanes *= 2) {
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            const float other = __shfl_xor_sync(0xffffffffu, x[i], lanes);
            x[i] = lanes < head_lanes ? x[i] + other : x[i];
        }
    }
}

/* x[0..N), 16 bytes, where `on`: a store that is left out, without a way around it, so that what
 * other tokens need goes on beside. */
template <typename T, int N>
__device__ static void store_pred(bool on, T *y, const float (&x)[N]) {
    mn_vec<T, N> vec;
#pragma unroll
    for (int j = 0; j < N; j++) mn_put(&vec.at[j], x[j]);
    uint4 all;
    static_assert(sizeof all == sizeof vec, "a pack is 16 bytes");
    memcpy(&all, &vec, sizeof all);
    asm volatile("{ .reg .pred on; setp.ne.s32 on, %0, 0; "
                 "@on st.global.v4.b32 [%1], {%2, %3, %4, %5}; }"
                 :: "r"((int)on), "l"(y), "r"(all.x), "r"(all.y), "r"(all.z), "r"(all.w)
                 : "memory");
}

/* Blocks of a processor; those of more registers need no more to have enough on their way. */
constexpr int forward_blocks(bool unit) {
    return unit ? 4 : 5;
}

/* W taps and the bias of N channels. */
template <typename T, int N, bool BIAS>
struct filter {
    float w[TAPS][N], bias[N];

    __device__ filter(const mn_conv_args &p, int64_t channel) {
#pragma unroll
        for (int j = 0; j < N; j++) {
            float taps[TAPS];
            bias[j] = BIAS ? mn_get((const T *)p.bias.data, channel + j) : 0.0f;
            mn_load<TAPS>(taps, (const T *)p.w.data, (channel + j) * TAPS);
#pragma unroll
            for (int i = 0; i < TAPS; i++) w[i][j] = taps[i];
        }
    }

    /* p_t from the last TAPS inputs, a ring whose newest is number `newest` */
    __device__ void apply(float (&sum)[N], const float (&u)[TAPS][N], int newest) const {
#pragma unroll
        for (int j = 0; j < N; j++) {
            sum[j] = bias[j];
#pragma unroll
            for (int i = 0; i < TAPS; i++) {
                sum[j] = fmaf(w[i][j], u[(newest + 1 + i) % TAPS][j], sum[j]);
            }
        }
    }
};

/* Rows on their way into shared memory, STAGES groups of tokens deep: a lane has 16 bytes of
 * each row to itself, so nobody waits for anybody. */
template <typename T, int N>
struct prefetch {
    typedef typename mn_vec_bits<T, N>::type stored;
    static_assert(sizeof(stored) == 16, "a row is 16 bytes of each lane");
    stored *const own;    // of the first row; the next ones are THREADS apart

    __device__ prefetch(uint4 *smem) : own((stored *)smem + threadIdx.x) {}

    /* Row g of a group on its way; zeros where it is not there. */
    __device__ void issue(int stage, int g, const T *row, bool in_range) const {
        const uint32_t to = (uint32_t)__cvta_generic_to_shared(own + (stage * GROUP + g) * THREADS);
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                     :: "r"(to), "l"(row), "r"(in_range ? 16 : 0) : "memory");
    }

    __device__ void consume(float (&u)[N], int stage, int g) const {
        mn_unpack_to(u, own[(stage * GROUP + g) * THREADS]);
    }
};

/* All that was asked for since the last call is a group. */
__device__ static void cp_async_commit() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}

/* The oldest of STAGES groups has come. */
__device__ static void cp_async_wait_group() {
    asm volatile("cp.async.wait_group %0;" :: "n"(STAGES - 1) : "memory");
}

/* All groups have come: nothing of this tile is left that could arrive on top of the next
 * one's. */
__device__ static void cp_async_wait_all() {
    asm volatile("cp.async.wait_all;" ::: "memory");
}

/* The inputs before a tile, in a ring in which its first token is number 0. */
template <typename T, int N>
__device__ static void load_history(float (&u)[TAPS][N], const mn_conv_args &p,
                                     const mn_tile_span &tile, int64_t channel) {
#pragma unroll
    for (int i = 1; i < TAPS; i++) {
        input_at<T, N>(u[i], p, tile.n, tile.span, tile.first - TAPS + i, channel);
    }
}

/* ---- forward --------------------------------------------------------------------------------- */

template <typename T, int N, bool ACT, bool UNIT, bool BIAS>
__device__ static void tile_forward(const mn_conv_args &p, const heads &h,
                                    const filter<T, N, BIAS> &f, const mn_tile_span &tile,
                                    const lane_coord &at, uint4 *smem) {
    const int n = (int)tile.n_rows;
    const int64_t x_step = p.x.stride[1], y_step = p.y.stride[1];
    const T *x = mn_row<T>(p.x, tile.span.b, tile.span.t0 + tile.first, 0) + at.channel;
    T *y = mn_row<T>(p.y, tile.span.b, tile.span.t0 + tile.first, 0) + at.channel;
    const prefetch<T, N> rows(smem);
    float u[TAPS][N];
    int stage = 0;
#pragma unroll
    for (int g = 0; g < STAGES * GROUP; g++) {
        rows.issue(g / GROUP, g % GROUP, x + (g < n ? g * x_step : 0), g < n);
        if (g % GROUP == GROUP - 1) cp_async_commit();
    }
    load_history<T, N>(u, p, tile, at.channel);
    x += STAGES * GROUP * x_step;
    for (int t = 0; t < n; t += GROUP, y += GROUP * y_step, x += GROUP * x_step) {
        cp_async_wait_group();
#pragma unroll
        for (int g = 0; g < GROUP; g++) {
            float a[N], squares[1] = { 0.0f };
            rows.consume(u[g], stage, g);
            f.apply(a, u, g);
#pragma unroll
            for (int j = 0; j < N; j++) {
                if (ACT) a[j] = mn_silu(a[j]).value;
                if (UNIT) squares[0] = fmaf(a[j], a[j], squares[0]);
            }
            if (UNIT) {
                if (!at.on) squares[0] = 0.0f;
                sum_head(squares, h.head_lanes);
                const float r = rsqrtf(fmaxf(squares[0] + h.more, h.least));
#pragma unroll
                for (int j = 0; j < N; j++) a[j] *= r;
            }
            store_pred(at.on && t + g < n, y + g * y_step, a);
        }
#pragma unroll
        for (int g = 0; g < GROUP; g++) {
            const bool in_range = t + STAGES * GROUP + g < n;
            rows.issue(stage, g, in_range ? x + g * x_step : (const T *)p.x.data, in_range);
        }
        cp_async_commit();
        stage = stage + 1 < STAGES ? stage + 1 : 0;
    }
    cp_async_wait_all();
}

/* The new tail of a sequence, of a lane's channels, where no other warp reads the old one any more
 * or it lies elsewhere. */
template <typename T, int N>
__device__ static void store_tails(const mn_conv_args &p, const mn_tile_span &tile,
                                   const lane_coord &at) {
    constexpr int M = TAPS - 1;
    float *const tail = (float *)p.tail.data + tile.n * M * p.call.V + at.channel;
#pragma unroll 1
    for (int m = 0; m < M; m++) {
        float u[N];
        input_at<T, N>(u, p, tile.n, tile.span, tile.span.length - M + m, at.channel);
#pragma unroll
        for (int j = 0; j < N; j++) {
            if (at.on) tail[m * p.call.V + j] = u[j];
        }
    }
}

/* A warp has a column tile of a tile. `tails`: the last one of a sequence leaves its tail. */
template <typename T, int N, bool ACT, bool UNIT, bool BIAS>
__global__ void __launch_bounds__(THREADS, forward_blocks(UNIT))
conv_fwd_kernel(const __grid_constant__ mn_conv_args p, const heads h, int64_t n_slots, int rows,
                bool tails) {
    __shared__ uint4 smem[STAGES * GROUP * THREADS];
    const lane_coord at = make_lane_coord<N>(p, h);
    if (at.partial >= n_slots) return;
    const mn_tile_span tile = mn_tile_at(p.call, rows, at.partial);
    if (tile.n_rows <= 0) return;
    const filter<T, N, BIAS> f(p, at.channel);
    tile_forward<T, N, ACT, UNIT, BIAS>(p, h, f, tile, at, smem);
    if (tails && tile.first + tile.n_rows == tile.span.length) store_tails<T, N>(p, tile, at);
}

template <typename T>
__global__ void __launch_bounds__(THREADS)
conv_fwd_generic_kernel(const __grid_constant__ mn_conv_args p, int64_t n_slots) {
    const int64_t channel = blockIdx.x * (int64_t)THREADS + threadIdx.x;
    if (channel >= p.call.V) return;
    for (int64_t slot = blockIdx.y; slot < n_slots; slot += gridDim.y) {
        const mn_tile_span tile = mn_tile_at(p.call, GENERIC_ROWS, slot);
        for (int64_t t = tile.first; t < tile.first + tile.n_rows; t++) {
            const float sum = preact<T>(p, tile.n, tile.span, t, channel);
            T *y = mn_row<T>(p.y, tile.span.b, tile.span.t0 + t, 0);
            mn_put(y + channel, p.act == SILU ? mn_silu(sum).value : sum);
        }
    }
}

/* The new tail of a sequence, one channel: its last W-1 inputs. A thread reads ahead of where it
 * writes, or where it writes, so the tail may be tail0 itself. */
template <typename T>
__device__ static void store_tail(const mn_conv_args &p, int64_t n, int64_t channel) {
    const mn_span span = mn_span_at(p.call, n);
    const int64_t M = p.call.W - 1;
    for (int64_t m = 0; m < M; m++) {
        float u[1];
        input_at<T, 1>(u, p, n, span, span.length - M + m, channel);
        ((float *)p.tail.data)[(n * M + m) * p.call.V + channel] = u[0];
    }
}

template <typename T>
__global__ void __launch_bounds__(THREADS)
    conv_tail_kernel(const __grid_constant__ mn_conv_args p) {
    const int64_t channel = blockIdx.x * (int64_t)THREADS + threadIdx.x;
    if (channel >= p.call.V) return;
    for (int64_t n = blockIdx.y; n < mn_n_spans(p.call); n += gridDim.y) store_tail<T>(p, n,
                                                                                       channel);
}

/* ---- backward -------------------------------------------------------------------------------- */

/* dtail_m where it counts for du_{length+m}; zeros elsewhere */
template <int N>
__device__ static void tail_grad(float (&d)[N], const mn_conv_args &p, int64_t n, int64_t m,
                                int64_t channel) {
    const float *dtail = (const float *)p.cot.tail.data;
    const int64_t M = p.call.W - 1;
    mn_load<N>(d, dtail && m >= 0 && m < M ? dtail + (n * M + m) * p.call.V : nullptr, channel);
}

/* Goes through one tile by groups of tokens: from u and dy of token t it makes d_t and then du_t,
 * which is dx_{t-3}, with the last four of u and of d in rings. Tokens past the tile's end belong
 * to the next one and count for dx only. */
template <typename T, int N, bool ACT, bool UNIT, bool BIAS>
struct tile_scan {
    const mn_conv_args &p;
    const heads &h;
    const filter<T, N, BIAS> &f;
    const mn_tile_span &tile;
    const lane_coord &at;
    const int64_t left, left_d;    // tokens from the tile's first on: of the sequence, that have dy
    const T *x, *dy;               // of the group to be asked for
    T *to;                         // dx of the token three before the group
    float u[TAPS][N], d[TAPS][N];
    const prefetch<T, N> next_u, next_d;
    int stage = 0;

    __device__ tile_scan(const mn_conv_args &p_, const heads &h_, const filter<T, N, BIAS> &f_,
                    const mn_tile_span &tile_, const lane_coord &at_, uint4 *smem)
        : p(p_), h(h_), f(f_), tile(tile_), at(at_), left(tile_.span.length - tile_.first),
          left_d(p_.cot.y.data ? left : 0), next_u(smem),
          next_d(smem + STAGES * GROUP * THREADS) {
        const int64_t b = tile.span.b, from = tile.span.t0 + tile.first;
        x = (const T *)p.x.data + b * p.x.stride[0] + from * p.x.stride[1] + at.channel;
        dy = (const T *)p.cot.y.data + b * p.cot.y.stride[0] + from * p.cot.y.stride[1] +
             at.channel;
        to = (T *)p.grad.x.data + b * p.grad.x.stride[0] +
             (from - (TAPS - 1)) * p.grad.x.stride[1] + at.channel;
        for (int64_t t = 0; t < STAGES * GROUP; t += GROUP) issue<false>(t);
        load_history<T, N>(u, p, tile, at.channel);
#pragma unroll
        for (int g = 0; g < TAPS; g++) {
#pragma unroll
            for (int j = 0; j < N; j++) d[g][j] = 0.0f;
        }
    }

    /* The group from token t of the tile on, where the one before lay. INTERIOR: it is there. */
    template <bool INTERIOR>
    __device__ void issue(int64_t t) {
#pragma unroll
        for (int g = 0; g < GROUP; g++) {
            const bool in_range = INTERIOR || t + g < left, has_d = INTERIOR || t + g < left_d;
            next_u.issue(stage, g, in_range ? x + g * p.x.stride[1] : (const T *)p.x.data,
                         in_range);
            next_d.issue(stage, g, has_d ? dy + g * p.cot.y.stride[1] : (const T *)p.x.data,
                       has_d);
        }
        cp_async_commit();
        x += GROUP * p.x.stride[1];
        dy += GROUP * p.cot.y.stride[1];
        stage = stage + 1 < STAGES ? stage + 1 : 0;
    }

    /* a_t in place of p_t, and its slope, of two tokens; of UNIT da_t in place of dy_t as well: the
     * sums over a head of both tokens pass through the lanes together. */
    __device__ void preact_two(float (&dy_0)[N], float (&dy_1)[N], float (&sum)[2][N]) const {
        if constexpr (ACT) {
            float slope[2][N], sums[4] = { 0.0f, 0.0f, 0.0f, 0.0f };
#pragma unroll
            for (int k = 0; k < 2; k++) {
#pragma unroll
                for (int j = 0; j < N; j++) {
                    const float s = mn_sigmoid(sum[k][j]);
                    sum[k][j] *= s;
                    slope[k][j] = fmaf(sum[k][j], 1.0f - s, s);
                }
            }
            if constexpr (UNIT) {
#pragma unroll
                for (int j = 0; j < N; j++) {
                    sums[0] = fmaf(sum[0][j], sum[0][j], sums[0]);
                    sums[1] = fmaf(sum[0][j], dy_0[j], sums[1]);
                    sums[2] = fmaf(sum[1][j], sum[1][j], sums[2]);
                    sums[3] = fmaf(sum[1][j], dy_1[j], sums[3]);
                }
                if (!at.on) sums[0] = sums[1] = sums[2] = sums[3] = 0.0f;
                sum_head(sums, h.head_lanes);
                unit_grad(dy_0, sum[0], sums[0], sums[1]);
                unit_grad(dy_1, sum[1], sums[2], sums[3]);
            }
#pragma unroll
            for (int j = 0; j < N; j++) {
                dy_0[j] *= slope[0][j];
                dy_1[j] *= slope[1][j];
            }
        }
    }

    /* da_t in place of dy_t, from the sums of a_t^2 and a_t.dy_t over the head. */
    __device__ void unit_grad(float (&dy_t)[N], const float (&a)[N], float a_a, float a_dy) const {
        const float squares = a_a + h.more, r = rsqrtf(fmaxf(squares, h.least));
        const float pull = squares > h.least ? r * r * a_dy : 0.0f;
#pragma unroll
        for (int j = 0; j < N; j++) dy_t[j] = r * fmaf(-pull, a[j], dy_t[j]);
    }

    /* `oldest`: the first input of token g, whose place in the ring may have been taken. */
    __device__ void accumulate(float (&dw)[TAPS + 1][N], int g, const float (&oldest)[N]) const {
#pragma unroll
        for (int j = 0; j < N; j++) {
#pragma unroll
            for (int i = 0; i < TAPS; i++) {
                const float input = i == 0 ? oldest[j] : u[(g + 1 + i) % TAPS][j];
                dw[i][j] = fmaf(d[g][j], input, dw[i][j]);
            }
            if (BIAS) dw[TAPS][j] += d[g][j];
        }
    }

    /* du_t, to which `du` has what comes from elsewhere */
    __device__ void input_grad(float (&du)[N], int g) const {
#pragma unroll
        for (int i = 0; i < TAPS; i++) {    // d_{t-i}
#pragma unroll
            for (int j = 0; j < N; j++) {
                du[j] = fmaf(f.w[i][j], d[(g + TAPS - i) % TAPS][j], du[j]);
            }
        }
    }

    /* What is left of token g once d_t is there. */
    template <bool INTERIOR>
    __device__ void finish(float (&dw)[TAPS + 1][N], int64_t t, int g, const float (&oldest)[N]) {
        float du[N] = {};
        if (INTERIOR || t + g < tile.n_rows) accumulate(dw, g, oldest);
        if (!INTERIOR) tail_grad<N>(du, p, tile.n, t + g - left, at.channel);
        input_grad(du, g);
        if (INTERIOR) {
            store_pred(at.on, to + g * p.grad.x.stride[1], du);
        } else {
            put(du, t + g - (TAPS - 1), g);
        }
    }

    /* Two tokens at a time, one's exchanges among lanes under the other's. INTERIOR: the tile has
     * these tokens and the three before, the sequence those to be asked for; dy and dx exist. */
    template <bool INTERIOR>
    __device__ void group(float (&dw)[TAPS + 1][N], int64_t t) {
        cp_async_wait_group();
#pragma unroll
        for (int g = 0; g < GROUP; g += 2) {
            float sum[2][N], next[N], oldest[N];
            next_u.consume(u[g], stage, g);
            next_d.consume(d[g], stage, g);
            f.apply(sum[0], u, g);
#pragma unroll
            for (int j = 0; j < N; j++) oldest[j] = u[g + 1][j];
            next_u.consume(u[g + 1], stage, g + 1);
            next_d.consume(next, stage, g + 1);
            f.apply(sum[1], u, g + 1);
            preact_two(d[g], next, sum);
            finish<INTERIOR>(dw, t, g, oldest);
#pragma unroll
            for (int j = 0; j < N; j++) d[g + 1][j] = next[j];
            finish<INTERIOR>(dw, t, g + 1, u[(g + 2) % TAPS]);
        }
        issue<INTERIOR>(t + STAGES * GROUP);
        to += GROUP * p.grad.x.stride[1];
    }

    /* du of the tile's token s: dx or, before the sequence, dtail0 */
    __device__ void put(const float (&du)[N], int64_t s, int g) const {
        const int64_t M = TAPS - 1;
        float *dtail0 = (float *)p.grad.tail0.data;
        if (!at.on || s >= tile.n_rows) return;
        if (s >= 0 && p.grad.x.data) mn_store<N>(to + g * p.grad.x.stride[1], 0, du);
        if (s < 0 && tile.first == 0 && dtail0) {
            mn_store<N>(dtail0 + (tile.n * M + M + s) * p.call.V, at.channel, du);
        }
    }
};

template <typename T, int N, bool ACT, bool UNIT, bool BIAS>
__device__ static void tile_backward(float (&dw)[TAPS + 1][N], const mn_conv_args &p,
                                     const heads &h, const filter<T, N, BIAS> &f,
                                     const mn_tile_span &tile, const lane_coord &at, uint4 *smem) {
    tile_scan<T, N, ACT, UNIT, BIAS> w(p, h, f, tile, at, smem);
    const bool plain = p.cot.y.data && p.grad.x.data;
    int64_t t = 0;
    for (; t < tile.n_rows + TAPS - 1; t += GROUP) {
        const bool inside = plain && t > 0 && t + GROUP <= tile.n_rows &&
                            t + (STAGES + 1) * GROUP <= w.left;
        if (inside) w.template group<true>(dw, t);
        else w.template group<false>(dw, t);
    }
    cp_async_wait_all();
}

/* Part k: W rows of dw and, with BIAS, one of dbias, each of V channels. */
template <typename T, int N, bool ACT, bool UNIT, bool BIAS>
__global__ void __launch_bounds__(THREADS, BACKWARD_BLOCKS)
conv_bwd_kernel(const __grid_constant__ mn_conv_args p, const heads h, float *partials,
                int64_t n_partials, int64_t n_slots, int rows) {
    __shared__ uint4 smem[2 * STAGES * GROUP * THREADS];
    const lane_coord at = make_lane_coord<N>(p, h);
    if (at.partial >= n_partials) return;
    const filter<T, N, BIAS> f(p, at.channel);
    float dw[TAPS + 1][N] = {};
    for (int64_t slot = at.partial; slot < n_slots; slot += n_partials) {
        const mn_tile_span tile = mn_tile_at(p.call, rows, slot);
        if (tile.n_rows > 0 || tile.span.length == 0) {
            tile_backward<T, N, ACT, UNIT, BIAS>(dw, p, h, f, tile, at, smem);
        }
    }
    if (!at.on) return;
    float *partial = partials + at.partial * (TAPS + BIAS) * p.call.V;
#pragma unroll
    for (int i = 0; i < TAPS + BIAS; i++) mn_store<N>(partial, i * p.call.V + at.channel, dw[i]);
}

template <typename T>
__global__ void __launch_bounds__(THREADS)
conv_bwd_generic_kernel(const __grid_constant__ mn_conv_args p, float *partials, int64_t n_slots) {
    const int64_t channel = blockIdx.x * (int64_t)THREADS + threadIdx.x, W = p.call.W;
    if (channel >= p.call.V) return;
    float *partial = partials + blockIdx.y * (W + 1) * p.call.V + channel;
    for (int64_t i = 0; i <= W; i++) partial[i * p.call.V] = 0.0f;
    for (int64_t slot = blockIdx.y; slot < n_slots; slot += gridDim.y) {
        const mn_tile_span tile = mn_tile_at(p.call, GENERIC_ROWS, slot);
        for (int64_t t = tile.first; t < tile.first + tile.n_rows; t++) {
            const float d = preact_grad<T>(p, tile.n, tile.span, t, channel);
            for (int64_t i = 0; i < W; i++) {
                float u[1];
                input_at<T, 1>(u, p, tile.n, tile.span, t - (W - 1) + i, channel);
                partial[i * p.call.V] = fmaf(d, u[0], partial[i * p.call.V]);
            }
            partial[W * p.call.V] += d;
            if (!p.grad.x.data) continue;
            float dx[1];
            tail_grad<1>(dx, p, tile.n, t + W - 1 - tile.span.length, channel);
            for (int64_t i = 0; i < W; i++) {
                const float prefetch = preact_grad<T>(p, tile.n, tile.span, t + W - 1 - i, channel);
                dx[0] = fmaf(weight_at<T>(p, channel, i), prefetch, dx[0]);
            }
            mn_put(mn_row<T>(p.grad.x, tile.span.b, tile.span.t0 + t, 0) + channel, dx[0]);
        }
    }
}

/* dtail0_j = du_j, j < W - 1, of sequence blockIdx.y */
template <typename T>
__global__ void __launch_bounds__(THREADS)
conv_tail_bwd_kernel(const __grid_constant__ mn_conv_args p) {
    const int64_t channel = blockIdx.x * (int64_t)THREADS + threadIdx.x, M = p.call.W - 1;
    if (channel >= p.call.V) return;
    for (int64_t n = blockIdx.y; n < mn_n_spans(p.call); n += gridDim.y) {
        const mn_span span = mn_span_at(p.call, n);
        for (int64_t j = 0; j < M; j++) {
            float sum[1];
            tail_grad<1>(sum, p, n, j - span.length, channel);
            for (int64_t i = 0; i <= j; i++) {
                const float d = preact_grad<T>(p, n, span, j - i, channel);
                sum[0] = fmaf(weight_at<T>(p, channel, i), d, sum[0]);
            }
            ((float *)p.grad.tail0.data)[(n * M + j) * p.call.V + channel] = sum[0];
        }
    }
}

/* Sums lie tap by tap, dw channel by channel. */
template <typename T>
struct store_filter {
    T *dw, *dbias;
    int64_t V, W;

    __device__ void operator()(int64_t i, float sum) const {
        const int64_t tap = i / V, channel = i % V;
        if (tap < W && dw) mn_put(dw + channel * W + tap, sum);
        if (tap == W && dbias) mn_put(dbias + channel, sum);
    }
};

/* ---- launches -------------------------------------------------------------------------------- */

template <typename T>
static bool packable(const mn_conv_args *p) {
    constexpr int64_t N = mn_vec_width<T>();
    const struct { const void *data; const int64_t *stride; } views[] = {
        { p->x.data, p->x.stride },
        { p->y.data, p->y.stride },
        { p->cot.y.data, p->cot.y.stride },
        { p->grad.x.data, p->grad.x.stride },
    };
    bool vectorized = p->call.W == TAPS && p->call.V % N == 0 && mn_vec_aligned<T>(p->w.data, N) &&
                 mn_vec_aligned<T>(p->tail0.data, N) && mn_vec_aligned<T>(p->cot.tail.data, N) &&
                 mn_vec_aligned<T>(p->grad.tail0.data, N);
    for (const auto &view : views) {
        vectorized = vectorized && mn_vec_aligned<T>(view.data, view.stride[0])
            && view.stride[1] % N == 0;
    }
    return vectorized;
}

/* Heads of `width` channels, or (0) channels that nothing holds together. */
static heads heads_of(int64_t width, int N) {
    if (width == 0) return { 32 * N, 32, 32 * N, 0.0f, 0.0f };
    int head_lanes = 1;
    while (head_lanes * N < width) head_lanes *= 2;
    return { (int)width, head_lanes, 32 / head_lanes * (int)width, 0.0f, 0.0f };
}

/* Tokens of a tile: so many that each of `warps` has about one tile, and fewer rows are read and
 * worked on twice; `least` at least. */
static int tile_rows(const mn_call &call, int64_t n_col_tiles, int64_t warps, int least) {
    int rows = least;
    while (rows < MAX_ROWS && mn_tile_slots(call, rows) * n_col_tiles > warps) rows += GROUP;
    return rows;
}

/* Parts of the sums of dw, at most. */
static int64_t count_partials(const mn_call *call, int64_t n_col_tiles) {
    const int64_t warps = SM_COUNT * BACKWARD_BLOCKS * WARPS;
    return mn_max(mn_min(mn_tile_slots(*call, MIN_ROWS), warps / n_col_tiles), 1);
}

/* Whether tiles of column tiles leave the tails as well: each sequence has tiles, and none of them
 * reads an old tail where a new one comes to lie. */
static bool tiles_store_tails(const mn_conv_args *p) {
    const float *before = (const float *)p->tail0.data, *after = (const float *)p->tail.data;
    const int64_t count = mn_n_spans(p->call) * (TAPS - 1) * p->call.V;
    return after && !p->call.cu_seqlens && p->call.T > 0 && p->y.data &&
           (!before || before + count <= after || after + count <= before);
}

/* Behind the rest, which reads the old tails where the new ones may come to lie. */
template <typename T>
static int launch_tails(const mn_conv_args *p, cudaStream_t stream) {
    const dim3 blocks(mn_blocks(p->call.V, THREADS),
                      mn_blocks(mn_n_spans(p->call), 1, MAX_TILES));
    conv_tail_kernel<T><<<blocks, THREADS, 0, stream>>>(*p);
    return mn_launch_status();
}

/* Launches a kernel of column tiles with shared memory for as many blocks as registers allow:
 * unasked, what the kernel before it had is kept. */
template <typename... Arguments, typename... Given>
static int launch_max_smem(void (*kernel)(Arguments...), unsigned blocks, cudaStream_t stream,
                         const Given &...given) {
    const cudaError_t code = cudaFuncSetAttribute(
        kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
    if (code != cudaSuccess) return code;
    kernel<<<blocks, THREADS, 0, stream>>>(given...);
    return mn_launch_status();
}

template <typename T, bool ACT, bool UNIT>
static int forward_col_tiles(const mn_conv_args *p, const heads &h, cudaStream_t stream) {
    constexpr int N = mn_vec_width<T>();
    const int64_t n_col_tiles = mn_ceil_div(p->call.V, h.col_tile);
    const int64_t warps = SM_COUNT * forward_blocks(UNIT) * WARPS;
    const int rows = tile_rows(p->call, n_col_tiles, warps, FORWARD_ROWS);
    const int64_t n_slots = mn_tile_slots(p->call, rows);
    const unsigned blocks = mn_blocks(n_slots * n_col_tiles, WARPS);
    const auto kernel = p->bias.data ? conv_fwd_kernel<T, N, ACT, UNIT, true>
                                     : conv_fwd_kernel<T, N, ACT, UNIT, false>;
    return launch_max_smem(kernel, blocks, stream, *p, h, n_slots, rows, tiles_store_tails(p));
}

template <typename T>
static int forward(const mn_conv_args *p, cudaStream_t stream) {
    bool has_tail = p->tail.data && p->call.W > 1;
    int code = cudaSuccess;
    if (p->y.data && p->call.T > 0) {
        const heads h = heads_of(0, mn_vec_width<T>());
        if (!packable<T>(p)) {
            const int64_t n_slots = mn_tile_slots(p->call, GENERIC_ROWS);
            const dim3 blocks(mn_blocks(p->call.V, THREADS), mn_blocks(n_slots, 1, MAX_TILES));
            conv_fwd_generic_kernel<T><<<blocks, THREADS, 0, stream>>>(*p, n_slots);
            code = mn_launch_status();
        } else {
            code = p->act == SILU ? forward_col_tiles<T, true, false>(p, h, stream)
                                  : forward_col_tiles<T, false, false>(p, h, stream);
            has_tail = has_tail && !tiles_store_tails(p);
        }
    }
    return code == cudaSuccess && has_tail ? launch_tails<T>(p, stream) : code;
}

/* Adds the parts of dw and, with them, dbias. */
template <typename T>
static int reduce_dw(const mn_conv_args *p, const float *partials, int64_t n_partials, bool bias,
                     cudaStream_t stream) {
    const int64_t V = p->call.V, W = p->call.W, width = (W + bias) * V;
    if (!p->grad.w.data && !p->grad.bias.data) return cudaSuccess;
    const store_filter<T> put = { (T *)p->grad.w.data, (T *)p->grad.bias.data, V, W };
    reduce_partials_kernel<32, 32><<<mn_blocks(width, 32), dim3(32, 32), 0, stream>>>(
        put, partials, n_partials, width);
    return mn_launch_status();
}

/* dtail0 by a kernel of its own. */
template <typename T>
static int launch_tails_backward(const mn_conv_args *p, cudaStream_t stream) {
    if (!p->grad.tail0.data || p->call.W == 1) return cudaSuccess;
    const dim3 blocks(mn_blocks(p->call.V, THREADS),
                      mn_blocks(mn_n_spans(p->call), 1, MAX_TILES));
    conv_tail_bwd_kernel<T><<<blocks, THREADS, 0, stream>>>(*p);
    return mn_launch_status();
}

/* Without a token there is no tile, and dtail0 is what dtail leaves of it. */
template <typename T, bool ACT, bool UNIT>
static int backward_col_tiles(const mn_conv_args *p, const heads &h, float *partials,
                           cudaStream_t stream) {
    constexpr int N = mn_vec_width<T>();
    const int64_t n_col_tiles = mn_ceil_div(p->call.V, h.col_tile);
    const int64_t most = count_partials(&p->call, n_col_tiles);
    const int rows = tile_rows(p->call, 1, most, MIN_ROWS);
    const int64_t n_slots = mn_tile_slots(p->call, rows), n_partials = mn_min(n_slots, most);
    const unsigned blocks = mn_blocks(n_partials * n_col_tiles, WARPS);
    const bool bias = p->bias.data || p->grad.bias.data;
    const auto kernel = bias ? conv_bwd_kernel<T, N, ACT, UNIT, true>
                             : conv_bwd_kernel<T, N, ACT, UNIT, false>;
    int code = launch_max_smem(kernel, blocks, stream, *p, h, partials, n_partials, n_slots, rows);
    if (code == cudaSuccess && p->call.T == 0) code = launch_tails_backward<T>(p, stream);
    return code == cudaSuccess ? reduce_dw<T>(p, partials, n_partials, bias, stream) : code;
}

template <typename T>
static int backward_generic(const mn_conv_args *p, float *partials, cudaStream_t stream) {
    const int64_t V = p->call.V, n_slots = mn_tile_slots(p->call, GENERIC_ROWS);
    const int64_t most = count_partials(&p->call, mn_ceil_div(V, THREADS));
    const int64_t n_partials = mn_max(mn_min(n_slots, most), 1);
    const dim3 blocks(mn_blocks(V, THREADS), (unsigned)n_partials);
    conv_bwd_generic_kernel<T><<<blocks, THREADS, 0, stream>>>(*p, partials, n_slots);
    int code = mn_launch_status();
    if (code == cudaSuccess) code = launch_tails_backward<T>(p, stream);
    return code == cudaSuccess ? reduce_dw<T>(p, partials, n_partials, true, stream) : code;
}

template <typename T>
static int backward(const mn_conv_args *p, float *partials, cudaStream_t stream) {
    const heads h = heads_of(0, mn_vec_width<T>());
    if (!packable<T>(p)) return backward_generic<T>(p, partials, stream);
    if (p->act == SILU) return backward_col_tiles<T, true, false>(p, h, partials, stream);
    return backward_col_tiles<T, false, false>(p, h, partials, stream);
}

MN_CUDA_PLAN(conv_forward) {
    (void)args, (void)plan;
    return true;
}

MN_CUDA_LAUNCH(conv_forward) {
    (void)shared;
    const mn_conv_args *p = (const mn_conv_args *)args;
    if (p->call.dtype == MN_BF16) return forward<mn_bf16>(p, (cudaStream_t)stream);
    return forward<float>(p, (cudaStream_t)stream);
}

static bool plan_partials(mn_plan *plan, const mn_call *call, int64_t col_tile) {
    const int64_t n_partials = count_partials(call, mn_ceil_div(call->V, col_tile));
    int64_t count;
    return mn_mul_i64(&count, n_partials, call->V) && mn_mul_i64(&count, count, call->W + 1) &&
           mn_mul_size(&plan->shared_bytes, (size_t)count, sizeof(float));
}

/* As many parts as the widest column tile leads to. */
MN_CUDA_PLAN(conv_backward) {
    const mn_call *call = (const mn_call *)args;
    return plan_partials(plan, call, call->dtype == MN_BF16 ? 32 * mn_vec_width<mn_bf16>()
                         : THREADS);
}

MN_CUDA_LAUNCH(conv_backward) {
    const mn_conv_args *p = (const mn_conv_args *)args;
    float *partials = (float *)shared;
    if (p->call.dtype == MN_BF16) return backward<mn_bf16>(p, partials, (cudaStream_t)stream);
    return backward<float>(p, partials, (cudaStream_t)stream);
}

/* ---- conv_unit ------------------------------------------------------------------------------- */

/* The convolution that it is, over all its channels. */
static mn_conv_args flat(const mn_conv_unit_args *p) {
    mn_conv_args flat = { .call = p->call, .act = SILU, .x = p->x, .w = p->w, .bias = p->bias,
                          .tail0 = p->tail0, .y = p->y, .tail = p->tail,
                          .cot = { p->cot.y, p->cot.tail },
                          .grad = { p->grad.x, p->grad.w, p->grad.bias, p->grad.tail0 } };
    flat.call.V = p->call.H * p->call.K;
    return flat;
}

/* Whether the heads of a view lie side by side. */
static bool is_flat(const void *data, const int64_t *stride, int64_t width, int64_t H) {
    return !data || H == 1 || stride[2] == width;
}

template <typename T>
static bool fits(const mn_conv_unit_args *p) {
    constexpr int64_t N = mn_vec_width<T>();
    const int64_t H = p->call.H, K = p->call.K;
    const mn_conv_args all = flat(p);
    return K % N == 0 && K <= 32 * N && packable<T>(&all) &&
           is_flat(p->x.data, p->x.stride, K, H) && is_flat(p->y.data, p->y.stride, K, H) &&
           is_flat(p->cot.y.data, p->cot.y.stride, K, H) &&
           is_flat(p->grad.x.data, p->grad.x.stride, K, H);
}

template <typename T>
static heads heads_of(const mn_conv_unit_args *p) {
    heads h = heads_of(p->call.K, mn_vec_width<T>());
    h.more = p->kind == ROOT ? (float)p->eps : 0.0f;
    h.least = p->kind == ROOT ? FLT_MIN : fmaxf((float)(p->eps * p->eps), FLT_MIN);
    return h;
}

template <typename T>
static int unit_forward(const mn_conv_unit_args *p, cudaStream_t stream) {
    const mn_conv_args all = flat(p);
    int code = cudaSuccess;
    if (p->y.data && p->call.T > 0) {
        code = forward_col_tiles<T, true, true>(&all, heads_of<T>(p), stream);
    }
    const bool has_tail = p->tail.data && !tiles_store_tails(&all);
    return code == cudaSuccess && has_tail ? launch_tails<T>(&all, stream) : code;
}

static bool unit_forward_plan(const void *args, mn_plan *plan) {
    (void)args, (void)plan;
    return true;
}

static int unit_forward(const void *args, void *shared, void *stream) {
    (void)shared;
    const mn_conv_unit_args *p = (const mn_conv_unit_args *)args;
    if (p->call.dtype == MN_BF16) return unit_forward<mn_bf16>(p, (cudaStream_t)stream);
    return unit_forward<float>(p, (cudaStream_t)stream);
}

static bool unit_backward_plan(const void *args, mn_plan *plan) {
    const mn_conv_unit_args *p = (const mn_conv_unit_args *)args;
    const mn_conv_args all = flat(p);
    const bool half = p->call.dtype == MN_BF16;
    return plan_partials(plan, &all.call,
                      half ? heads_of<mn_bf16>(p).col_tile : heads_of<float>(p).col_tile);
}

static int unit_backward(const void *args, void *shared, void *stream) {
    const mn_conv_unit_args *p = (const mn_conv_unit_args *)args;
    const mn_conv_args all = flat(p);
    float *partials = (float *)shared;
    if (p->call.dtype == MN_BF16) {
        return backward_col_tiles<mn_bf16, true, true>(&all, heads_of<mn_bf16>(p), partials,
                                                    (cudaStream_t)stream);
    }
    return backward_col_tiles<float, true, true>(&all, heads_of<float>(p), partials,
                                              (cudaStream_t)stream);
}

extern "C" const mn_kernel *mn_conv_unit_kernel(mn_pass pass, const void *args) {
    static const mn_kernel forward = { unit_forward_plan, NULL, "cuda", unit_forward };
    static const mn_kernel backward = { unit_backward_plan, NULL, "cuda", unit_backward };
    const mn_conv_unit_args *p = (const mn_conv_unit_args *)args;
    const bool takes = p->call.dtype == MN_BF16 ? fits<mn_bf16>(p) : fits<float>(p);
    return !takes ? NULL : pass == MN_BACKWARD ? &backward : &forward;
}

}    // namespace mneme::conv
