/* conv.cu - y_t = act(p_t), p_t = bias + sum_i w_i u_{t+i}, depthwise, over u = (tail0, x) (see
 * ref/conv.c, whose index convention u_{s+W-1} = x_s is used here).
 *
 *   du_j = sum_i w_i d_{j-i}  (+ dtail_{j-length} for j >= length),  d_t = dy_t act'(p_t)
 *   dw_i = sum_t d_t u_{t+i}     dbias = sum_t d_t
 *
 * A thread has N neighbouring channels and walks down the tokens of a tile, four at a time so that
 * their loads are in flight together, with the W - 1 inputs before them in registers (W = 4, what
 * models have; any other W reads its inputs again from the cache). Backward, it gathers its
 * part of dw and dbias over the tiles it takes, and mn_sum_parts adds the parts. */
#include "kernels/cuda/gate.cuh"
#include "kernels/cuda/parts.cuh"
#include "kernels/cuda/unpack.cuh"

enum { THREADS = 128, PACK = 4, TILE = 32, TAPS = 4, GROUP = 4, SILU = 1 };
enum { MOST_TILES = 65535, BLOCKS = 528 };    // BLOCKS: four for each processor of an H200

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
__device__ static float before_act(const mn_conv_args &p, int64_t n, const mn_span &span, int64_t t,
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
__device__ static float before_act_cot(const mn_conv_args &p, int64_t n, const mn_span &span,
                                       int64_t t, int64_t channel) {
    if (t < 0 || t >= span.length) return 0.0f;
    const float dy = mn_get(mn_row<T>(p.cot.y, span.b, span.t0 + t, 0), channel);
    if (p.act != SILU) return dy;
    return dy * mn_silu(before_act<T>(p, n, span, t, channel)).slope;
}

/* ---- forward --------------------------------------------------------------------------------- */

/* W taps and the bias of N channels. */
template <typename T, int N>
struct filter {
    float w[TAPS][N], bias[N];

    __device__ filter(const mn_conv_args &p, int64_t channel) {
#pragma unroll
        for (int j = 0; j < N; j++) {
            bias[j] = mn_get((const T *)p.bias.data, channel + j);
#pragma unroll
            for (int i = 0; i < TAPS; i++) w[i][j] = weight_at<T>(p, channel + j, i);
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

/* Rows of a group of tokens on their way, asked for while the group before is worked on. */
template <typename T, int N>
struct ahead {
    mn_pack<T, N> at[GROUP];

    /* Row `row` and the ones after it, of which `left` are there: INSIDE, at least a group. */
    template <bool INSIDE>
    __device__ void ask(const T *row, int64_t step, int64_t left) {
#pragma unroll
        for (int i = 0; i < GROUP; i++, row += step) {
            if (INSIDE || i < left) at[i] = *(const mn_pack<T, N> *)row;
            else at[i] = mn_pack<T, N>{};
        }
    }

    __device__ void take(float (&u)[N], int i) const {
        mn_unpack_to(u, at[i]);
    }
};

/* The inputs before a tile, in a ring in which its first token is number 0. */
template <typename T, int N>
__device__ static void inputs_before(float (&u)[TAPS][N], const mn_conv_args &p,
                                     const mn_tile_span &tile, int64_t channel) {
#pragma unroll
    for (int i = 1; i < TAPS; i++) {
        input_at<T, N>(u[i], p, tile.n, tile.span, tile.first - TAPS + i, channel);
    }
}

/* INSIDE: the tile is whole. */
template <typename T, int N, bool ACT, bool INSIDE>
__device__ static void tile_forward(const mn_conv_args &p, const filter<T, N> &f,
                                    const mn_tile_span &tile, int64_t channel) {
    const int64_t n = INSIDE ? TILE : tile.n_rows, from = tile.span.t0 + tile.first;
    const T *x = mn_row<T>(p.x, tile.span.b, from, 0) + channel;
    T *y = mn_row<T>(p.y, tile.span.b, from, 0) + channel;
    float u[TAPS][N];
    ahead<T, N> now, next;
    next.template ask<INSIDE>(x, p.x.stride[1], n);
    inputs_before<T, N>(u, p, tile, channel);
    for (int64_t t = 0; t < n; t += GROUP, y += GROUP * p.y.stride[1]) {
        now = next;
        x += GROUP * p.x.stride[1];
        if (t + GROUP < n) next.template ask<INSIDE>(x, p.x.stride[1], n - t - GROUP);
#pragma unroll
        for (int g = 0; g < GROUP; g++) {
            float sum[N];
            now.take(u[g], g);
            f.apply(sum, u, g);
#pragma unroll
            for (int j = 0; j < N; j++) sum[j] = ACT ? mn_silu(sum[j]).value : sum[j];
            if (INSIDE || t + g < n) mn_store<N>(y + g * p.y.stride[1], 0, sum);
        }
    }
}

template <typename T, int N, bool ACT>
__global__ void __launch_bounds__(THREADS)
forward_kernel(const __grid_constant__ mn_conv_args p, int64_t n_slots) {
    const int64_t channel = (blockIdx.x * (int64_t)THREADS + threadIdx.x) * N;
    if (channel >= p.call.V) return;
    const filter<T, N> f(p, channel);
    for (int64_t slot = blockIdx.y; slot < n_slots; slot += gridDim.y) {
        const mn_tile_span tile = mn_tile_at(p.call, TILE, slot);
        if (tile.n_rows == TILE) tile_forward<T, N, ACT, true>(p, f, tile, channel);
        else if (tile.n_rows > 0) tile_forward<T, N, ACT, false>(p, f, tile, channel);
    }
}

template <typename T>
__global__ void __launch_bounds__(THREADS)
forward_any_kernel(const __grid_constant__ mn_conv_args p, int64_t n_slots) {
    const int64_t channel = blockIdx.x * (int64_t)THREADS + threadIdx.x;
    if (channel >= p.call.V) return;
    for (int64_t slot = blockIdx.y; slot < n_slots; slot += gridDim.y) {
        const mn_tile_span tile = mn_tile_at(p.call, TILE, slot);
        for (int64_t t = tile.first; t < tile.first + tile.n_rows; t++) {
            const float sum = before_act<T>(p, tile.n, tile.span, t, channel);
            T *y = mn_row<T>(p.y, tile.span.b, tile.span.t0 + t, 0);
            mn_put(y + channel, p.act == SILU ? mn_silu(sum).value : sum);
        }
    }
}

/* The new tail of sequence blockIdx.y: its last W-1 inputs. A thread reads ahead of where it
 * writes, or where it writes, so the tail may be tail0 itself. */
template <typename T>
__global__ void __launch_bounds__(THREADS) tail_kernel(const __grid_constant__ mn_conv_args p) {
    const int64_t channel = blockIdx.x * (int64_t)THREADS + threadIdx.x, M = p.call.W - 1;
    if (channel >= p.call.V) return;
    for (int64_t n = blockIdx.y; n < mn_n_spans(p.call); n += gridDim.y) {
        const mn_span span = mn_span_at(p.call, n);
        for (int64_t m = 0; m < M; m++) {
            float u[1];
            input_at<T, 1>(u, p, n, span, span.length - M + m, channel);
            ((float *)p.tail.data)[(n * M + m) * p.call.V + channel] = u[0];
        }
    }
}

/* ---- backward -------------------------------------------------------------------------------- */

/* dtail_m where it counts for du_{length+m}; zeros elsewhere */
template <int N>
__device__ static void tail_cot(float (&d)[N], const mn_conv_args &p, int64_t n, int64_t m,
                                int64_t channel) {
    const float *dtail = (const float *)p.cot.tail.data;
    const int64_t M = p.call.W - 1;
    mn_load<N>(d, dtail && m >= 0 ? dtail + (n * M + m) * p.call.V : nullptr, channel);
}

/* Walks one tile by groups of tokens: from u and dy of token t it makes d_t and then dx_{t-3}, with
 * the last four of u and of d in rings. Tokens past the tile's end belong to the next one and count
 * for dx only. INSIDE: the tile is whole, the group behind it is there, and so are dy and dx. */
template <typename T, int N, bool ACT, bool INSIDE>
__device__ static void tile_backward(float (&dw)[TAPS + 1][N], const mn_conv_args &p,
                                     const filter<T, N> &f, const mn_tile_span &tile,
                                     int64_t channel) {
    const mn_span &span = tile.span;
    const int64_t n = INSIDE ? TILE : tile.n_rows, from = span.t0 + tile.first;
    const int64_t left = span.length - tile.first, left_d = p.cot.y.data ? left : 0;
    const int64_t x_step = p.x.stride[1], d_step = p.cot.y.stride[1], to_step = p.grad.x.stride[1];
    const T *x = mn_row<T>(p.x, span.b, from, 0) + channel;
    const T *dy = (const T *)p.cot.y.data + span.b * p.cot.y.stride[0] + from * d_step + channel;
    T *to = (T *)p.grad.x.data + span.b * p.grad.x.stride[0] + (from - (TAPS - 1)) * to_step +
            channel;
    float u[TAPS][N], d[TAPS][N] = {};
    ahead<T, N> now_u, now_d, next_u, next_d;
    next_u.template ask<INSIDE>(x, x_step, left);
    next_d.template ask<INSIDE>(dy, d_step, left_d);
    inputs_before<T, N>(u, p, tile, channel);
    for (int64_t t = 0; t < n + TAPS - 1; t += GROUP, to += GROUP * to_step) {
        now_u = next_u;
        now_d = next_d;
        x += GROUP * x_step;
        dy += GROUP * d_step;
        if (t + GROUP < n + TAPS - 1) {
            next_u.template ask<INSIDE>(x, x_step, left - t - GROUP);
            next_d.template ask<INSIDE>(dy, d_step, left_d - t - GROUP);
        }
#pragma unroll
        for (int g = 0; g < GROUP; g++) {
            float sum[N];
            now_u.take(u[g], g);
            now_d.take(d[g], g);
            f.apply(sum, u, g);
#pragma unroll
            for (int j = 0; j < N; j++) {
                if (ACT) d[g][j] *= mn_silu(sum[j]).slope;
            }
            if (INSIDE ? t < n : t + g < n) {
#pragma unroll
                for (int j = 0; j < N; j++) {
#pragma unroll
                    for (int i = 0; i < TAPS; i++) {
                        dw[i][j] = fmaf(d[g][j], u[(g + 1 + i) % TAPS][j], dw[i][j]);
                    }
                    dw[TAPS][j] += d[g][j];
                }
            }
            const int64_t s = t + g - (TAPS - 1);    // of the tile
            const bool own = INSIDE ? (g == TAPS - 1 ? t < n : t > 0) : s >= 0 && s < n;
            if (!own || !(INSIDE || p.grad.x.data)) continue;
            float dx[N];
            if (INSIDE) {
#pragma unroll
                for (int j = 0; j < N; j++) dx[j] = 0.0f;
            } else {
                tail_cot<N>(dx, p, tile.n, t + g - left, channel);
            }
#pragma unroll
            for (int i = 0; i < TAPS; i++) {    // d_{t-i}
#pragma unroll
                for (int j = 0; j < N; j++) {
                    dx[j] = fmaf(f.w[i][j], d[(g + TAPS - i) % TAPS][j], dx[j]);
                }
            }
            mn_store<N>(to + g * to_step, 0, dx);
        }
    }
}

/* Part blockIdx.y: W rows of dw and one of dbias, each of V channels. */
template <typename T, int N, bool ACT>
__global__ void __launch_bounds__(THREADS, 4)
backward_kernel(const __grid_constant__ mn_conv_args p, float *parts, int64_t n_slots) {
    const int64_t channel = (blockIdx.x * (int64_t)THREADS + threadIdx.x) * N;
    if (channel >= p.call.V) return;
    const filter<T, N> f(p, channel);
    const bool plain = p.cot.y.data && p.grad.x.data;
    float dw[TAPS + 1][N] = {};
    for (int64_t slot = blockIdx.y; slot < n_slots; slot += gridDim.y) {
        const mn_tile_span tile = mn_tile_at(p.call, TILE, slot);
        const bool inside = plain && tile.first + TILE + GROUP <= tile.span.length;
        if (inside) tile_backward<T, N, ACT, true>(dw, p, f, tile, channel);
        else if (tile.n_rows > 0) tile_backward<T, N, ACT, false>(dw, p, f, tile, channel);
    }
    float *part = parts + blockIdx.y * (int64_t)(TAPS + 1) * p.call.V;
#pragma unroll
    for (int i = 0; i <= TAPS; i++) mn_store<N>(part, i * p.call.V + channel, dw[i]);
}

template <typename T>
__global__ void __launch_bounds__(THREADS)
backward_any_kernel(const __grid_constant__ mn_conv_args p, float *parts, int64_t n_slots) {
    const int64_t channel = blockIdx.x * (int64_t)THREADS + threadIdx.x, W = p.call.W;
    if (channel >= p.call.V) return;
    float *part = parts + blockIdx.y * (W + 1) * p.call.V + channel;
    for (int64_t i = 0; i <= W; i++) part[i * p.call.V] = 0.0f;
    for (int64_t slot = blockIdx.y; slot < n_slots; slot += gridDim.y) {
        const mn_tile_span tile = mn_tile_at(p.call, TILE, slot);
        for (int64_t t = tile.first; t < tile.first + tile.n_rows; t++) {
            const float d = before_act_cot<T>(p, tile.n, tile.span, t, channel);
            for (int64_t i = 0; i < W; i++) {
                float u[1];
                input_at<T, 1>(u, p, tile.n, tile.span, t - (W - 1) + i, channel);
                part[i * p.call.V] = fmaf(d, u[0], part[i * p.call.V]);
            }
            part[W * p.call.V] += d;
            if (!p.grad.x.data) continue;
            float dx[1];
            tail_cot<1>(dx, p, tile.n, t + W - 1 - tile.span.length, channel);
            for (int64_t i = 0; i < W; i++) {
                const float ahead = before_act_cot<T>(p, tile.n, tile.span, t + W - 1 - i, channel);
                dx[0] = fmaf(weight_at<T>(p, channel, i), ahead, dx[0]);
            }
            mn_put(mn_row<T>(p.grad.x, tile.span.b, tile.span.t0 + t, 0) + channel, dx[0]);
        }
    }
}

/* dtail0_j = du_j, j < W - 1, of sequence blockIdx.y */
template <typename T>
__global__ void __launch_bounds__(THREADS)
tail_backward_kernel(const __grid_constant__ mn_conv_args p) {
    const int64_t channel = blockIdx.x * (int64_t)THREADS + threadIdx.x, M = p.call.W - 1;
    if (channel >= p.call.V) return;
    for (int64_t n = blockIdx.y; n < mn_n_spans(p.call); n += gridDim.y) {
        const mn_span span = mn_span_at(p.call, n);
        for (int64_t j = 0; j < M; j++) {
            float sum[1];
            tail_cot<1>(sum, p, n, j - span.length, channel);
            for (int64_t i = 0; i <= j; i++) {
                const float d = before_act_cot<T>(p, n, span, j - i, channel);
                sum[0] = fmaf(weight_at<T>(p, channel, i), d, sum[0]);
            }
            ((float *)p.grad.tail0.data)[(n * M + j) * p.call.V + channel] = sum[0];
        }
    }
}

/* Sums lie tap by tap, dw channel by channel. */
template <typename T>
struct put_filter {
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
    constexpr int64_t N = mn_pack_width<T>();    // more than PACK asks
    const struct { const void *data; const int64_t *stride; } views[] = {
        { p->x.data, p->x.stride },
        { p->y.data, p->y.stride },
        { p->cot.y.data, p->cot.y.stride },
        { p->grad.x.data, p->grad.x.stride },
    };
    bool packs = p->call.W == TAPS && p->call.V % N == 0 && mn_packable<T>(p->tail0.data, N) &&
                 mn_packable<T>(p->cot.tail.data, N);
    for (const auto &view : views) {
        packs = packs && mn_packable<T>(view.data, view.stride[0]) && view.stride[1] % N == 0;
    }
    return packs;
}

static int64_t count_parts(const mn_call *call, int64_t channels_per_block) {
    const int64_t across = mn_ceil_div(call->V, channels_per_block);
    return mn_max(mn_min(mn_tile_slots(*call, TILE), mn_ceil_div(BLOCKS, across)), 1);
}

template <typename T>
static int forward(const mn_conv_args *p, cudaStream_t stream) {
    constexpr int N = PACK;
    const int64_t V = p->call.V, n_slots = mn_tile_slots(p->call, TILE);
    const unsigned down = mn_blocks(n_slots, 1, MOST_TILES);
    int code = cudaSuccess;
    if (p->y.data && n_slots > 0) {
        const dim3 packed(mn_blocks(V, THREADS * N), down), single(mn_blocks(V, THREADS), down);
        const bool packs = packable<T>(p), silu = p->act == SILU;
        const auto kernel = silu ? forward_kernel<T, N, true> : forward_kernel<T, N, false>;
        if (packs) kernel<<<packed, THREADS, 0, stream>>>(*p, n_slots);
        else forward_any_kernel<T><<<single, THREADS, 0, stream>>>(*p, n_slots);
        code = mn_launched();
    }
    if (code != cudaSuccess || !p->tail.data || p->call.W == 1) return code;
    const dim3 blocks(mn_blocks(V, THREADS), mn_blocks(mn_n_spans(p->call), 1, MOST_TILES));
    tail_kernel<T><<<blocks, THREADS, 0, stream>>>(*p);
    return mn_launched();
}

template <typename T>
static int backward(const mn_conv_args *p, float *parts, cudaStream_t stream) {
    constexpr int N = PACK;
    const int64_t V = p->call.V, W = p->call.W, n_slots = mn_tile_slots(p->call, TILE);
    const bool packs = packable<T>(p);
    const int64_t n_parts = count_parts(&p->call, packs ? THREADS * N : THREADS);
    const dim3 blocks(mn_blocks(V, packs ? THREADS * N : THREADS), (unsigned)n_parts);
    const auto kernel =
        p->act == SILU ? backward_kernel<T, N, true> : backward_kernel<T, N, false>;
    if (packs) kernel<<<blocks, THREADS, 0, stream>>>(*p, parts, n_slots);
    else backward_any_kernel<T><<<blocks, THREADS, 0, stream>>>(*p, parts, n_slots);
    int code = mn_launched();
    if (code == cudaSuccess && p->grad.tail0.data && W > 1) {
        const dim3 tails(mn_blocks(V, THREADS), mn_blocks(mn_n_spans(p->call), 1, MOST_TILES));
        tail_backward_kernel<T><<<tails, THREADS, 0, stream>>>(*p);
        code = mn_launched();
    }
    if (code != cudaSuccess || (!p->grad.w.data && !p->grad.bias.data)) return code;
    const put_filter<T> put = { (T *)p->grad.w.data, (T *)p->grad.bias.data, V, W };
    return mn_sum_parts_into(put, parts, n_parts, (W + 1) * V, stream);
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

/* As many parts as the widest pack leads to. */
MN_CUDA_PLAN(conv_backward) {
    const mn_call *call = (const mn_call *)args;
    const int64_t n_parts = count_parts(call, THREADS * PACK);
    int64_t count;
    return mn_mul_i64(&count, n_parts, call->V) && mn_mul_i64(&count, count, call->W + 1) &&
           mn_mul_size(&plan->shared_bytes, (size_t)count, sizeof(float));
}

MN_CUDA_LAUNCH(conv_backward) {
    const mn_conv_args *p = (const mn_conv_args *)args;
    float *parts = (float *)shared;
    if (p->call.dtype == MN_BF16) return backward<mn_bf16>(p, parts, (cudaStream_t)stream);
    return backward<float>(p, parts, (cudaStream_t)stream);
}
