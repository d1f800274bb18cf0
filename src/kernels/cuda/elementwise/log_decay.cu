/* log_decay.cu - log decays y = -e^a softplus(x + b) and their gradients (kernels/decay.h).
 *
 * Going back a thread owns a pack of columns, of all heads and channels, and runs over tokens: its
 * terms of db and da wait in the work space, a part for each block along the tokens. Then a block
 * per head adds the parts in their order. */
#include "kernels/decay.h"
#include "kernels/cuda/elementwise/elementwise_fwd.cuh"

enum { THREADS = 256, BLOCKS = 264, LEAST = 4, LANES = 32, GROUPS = 32, TERMS = 2 };

struct decay_forward {
    static constexpr int INS = 3, OUTS = 1;    // x, b, a; y

    template <bool NARROW, int N>
    __device__ void run(const float (&x)[4][N], float (&y)[1][N]) const {
#pragma unroll
        for (int j = 0; j < N; j++) {
            const float rate = mn_fn_exponential<NARROW>(x[2][j]);
            y[0][j] = -rate * mn_fn_softplus<NARROW>(x[0][j] + x[1][j]);
        }
    }
};

/* How going back is cut, from sizes alone: blocks of `across` packs of columns and `deep` tokens
 * side by side, which take `part` such steps along the tokens. */
struct cut {
    int64_t H, X, columns, tokens, part, n_parts;
    int across, deep;
};

/* A pack of columns is one of a head. */
static bool side_packs(const mn_side &side, const cut &c) {
    return !side.data || (side.stride[3] == 1 && (uintptr_t)side.data % 16 == 0 &&
                          (c.H == 1 || side.stride[2] % MN_PACK == 0) &&
                          side.stride[1] % MN_PACK == 0 && side.stride[0] % MN_PACK == 0);
}

static cut cut_of(const int64_t shape[4], int pack) {
    cut c = { shape[2], shape[3], shape[2] * shape[3], shape[0] * shape[1], 0, 0, 0, 0 };
    const int64_t packs = mn_max(c.columns / pack, (int64_t)1);
    c.across = (int)mn_min(packs, (int64_t)THREADS);
    c.deep = THREADS / c.across;
    const int64_t steps = mn_max(mn_ceil_div(c.tokens, (int64_t)c.deep), (int64_t)1);
    const int64_t most = mn_max(BLOCKS / mn_ceil_div(packs, (int64_t)c.across), (int64_t)1);
    c.n_parts = mn_max(mn_min(most, steps / LEAST), (int64_t)1);
    c.part = mn_ceil_div(steps, c.n_parts);
    c.n_parts = mn_ceil_div(steps, c.part);
    return c;
}

struct decay_back {
    cut c;
    mn_side x, b, a, dy, dx, db, da;
    mn_divisor per_sequence, per_head;    // tokens, columns
    bool add_x, add_b, add_a, per_channel;
    float *parts;    // parts[part][term][column]
};

template <int N>
__device__ static void load(float (&out)[N], const mn_side &side, int64_t at) {
    if constexpr (N == MN_PACK) mn_unpack(out, side, mn_load_tile(side, at));
    else out[0] = mn_side_get(side, at);
}

/* Offset of a token, and of a column of it. */
__device__ static int64_t token_of(const mn_side &side, const decay_back &d, uint32_t token) {
    const uint32_t sequence = mn_quotient(token, d.per_sequence);
    return sequence * side.stride[0] + (token - sequence * d.per_sequence.d) * side.stride[1];
}

__device__ static int64_t column_of(const mn_side &side, const decay_back &d, uint32_t column) {
    const uint32_t head = mn_quotient(column, d.per_head);
    return head * side.stride[2] + (column - head * d.per_head.d) * side.stride[3];
}

/* One token's pack: dx, and what it adds to the sums. */
template <bool NARROW, int N>
__device__ static void step(const decay_back &d, float (&sums)[TERMS][N], const float (&x)[N],
                            const float (&dy)[N], const float (&b)[N], const float (&rate)[N],
                            int64_t to) {
    float dx[N];
#pragma unroll
    for (int j = 0; j < N; j++) {
        const float at = x[j] + b[j], down = -rate[j] * dy[j];
        dx[j] = down * mn_fn_sigmoid<NARROW>(at);
        sums[0][j] += dx[j];
        sums[1][j] = fmaf(down, mn_fn_softplus<NARROW>(at), sums[1][j]);
    }
    if (!d.dx.data) return;
    if (d.add_x) {
        float there[N];
        load(there, d.dx, to);
#pragma unroll
        for (int j = 0; j < N; j++) dx[j] += there[j];
    }
    if constexpr (N == MN_PACK) mn_store_pack(d.dx, to, dx);
    else mn_side_put(d.dx, to, dx[0]);
}

template <bool NARROW, int N>
__global__ void __launch_bounds__(THREADS) decay_back_kernel(const __grid_constant__ decay_back d) {
    constexpr int AHEAD = N == MN_PACK ? 2 : 4;
    __shared__ float room[THREADS][TERMS * N + 1];
    const cut &c = d.c;
    const int lane = (int)threadIdx.x % c.across, row = (int)threadIdx.x / c.across;
    const uint32_t column = (blockIdx.x * (uint32_t)c.across + lane) * N;
    const bool works = row < c.deep && column < c.columns;
    const int64_t first = blockIdx.y * c.part * c.deep;
    const int64_t last = min(first + c.part * c.deep, c.tokens);
    float sums[TERMS][N] = {}, b[N] = {}, rate[N] = {};
    if (works) {
        load(b, d.b, column_of(d.b, d, column));
        load(rate, d.a, column_of(d.a, d, column));
#pragma unroll
        for (int j = 0; j < N; j++) rate[j] = mn_fn_exponential<NARROW>(rate[j]);
        const int64_t x0 = column_of(d.x, d, column), dy0 = column_of(d.dy, d, column);
        const int64_t dx0 = column_of(d.dx, d, column);
        for (int64_t token = first + row; token < last; token += AHEAD * c.deep) {
            float x[AHEAD][N], dy[AHEAD][N];
#pragma unroll
            for (int k = 0; k < AHEAD; k++) {
                const uint32_t at = (uint32_t)min(token + k * c.deep, last - 1);
                load(x[k], d.x, x0 + token_of(d.x, d, at));
                load(dy[k], d.dy, dy0 + token_of(d.dy, d, at));
            }
#pragma unroll
            for (int k = 0; k < AHEAD; k++) {
                const int64_t at = token + k * c.deep;
                if (at >= last) continue;
                const int64_t to = dx0 + token_of(d.dx, d, (uint32_t)at);
                step<NARROW>(d, sums, x[k], dy[k], b, rate, to);
            }
        }
    }
#pragma unroll
    for (int j = 0; j < TERMS * N; j++) room[threadIdx.x][j] = sums[j / N][j % N];
    __syncthreads();
    if (row != 0 || !works) return;
#pragma unroll
    for (int j = 0; j < TERMS * N; j++) {
        float sum = 0.0f;
        for (int other = 0; other < c.deep; other++) sum += room[lane + other * c.across][j];
        d.parts[(blockIdx.y * TERMS + j / N) * c.columns + column + j % N] = sum;
    }
}

__device__ static void put_sum(const mn_side &side, int64_t at, float sum, bool add) {
    if (side.data) mn_side_put(side, at, add ? mn_side_get(side, at) + sum : sum);
}

/* A block per head. Group g adds parts g, g + GROUPS, ... of 32 columns at a time. */
__global__ void __launch_bounds__(LANES *GROUPS)
decay_sums_kernel(const __grid_constant__ decay_back d) {
    __shared__ float room[TERMS][GROUPS][LANES];
    const int lane = threadIdx.x, group = threadIdx.y;
    const int64_t head = blockIdx.x;
    float of_head = 0.0f;
    for (int64_t first = 0; first < d.c.X; first += LANES) {
        const int64_t i = first + lane, column = head * d.c.X + i;
        float sums[TERMS] = {};
#pragma unroll 4
        for (int64_t part = group; i < d.c.X && part < d.c.n_parts; part += GROUPS) {
#pragma unroll
            for (int term = 0; term < TERMS; term++) {
                sums[term] += d.parts[(part * TERMS + term) * d.c.columns + column];
            }
        }
        for (int term = 0; term < TERMS; term++) room[term][group][lane] = sums[term];
        __syncthreads();
        if (group < TERMS) {    // a warp for each term
            float sum = 0.0f;
            for (int other = 0; other < GROUPS; other++) sum += room[group][other][lane];
            of_head += sum;
            const mn_side &side = group == 0 ? d.db : d.da;
            const bool each = i < d.c.X && (group == 0 || d.per_channel);
            const int64_t at = head * side.stride[2] + i * side.stride[3];
            if (each) put_sum(side, at, sum, group == 0 ? d.add_b : d.add_a);
        }
        __syncthreads();
    }
    if (group != 1 || d.per_channel) return;
    of_head = mn_warp_sum(of_head);
    if (lane == 0) put_sum(d.da, head * d.da.stride[2], of_head, d.add_a);
}

static bool packs(const mn_decay_work *w, const cut &c) {
    const mn_view *views[] = { &w->x, &w->dy, &w->dx };
    const mn_side a = mn_side_of(w->a);
    bool all = c.X % MN_PACK == 0 && side_packs(mn_side_of(w->b), c);
    for (const mn_view *view : views) all = all && side_packs(mn_side_of(*view), c);
    return all && (a.stride[3] == 0 || side_packs(a, c));
}

static int back(const mn_decay_work *w, float *parts, cudaStream_t on) {
    const bool by_packs = packs(w, cut_of(w->shape, 1));
    const int N = by_packs ? MN_PACK : 1;
    const decay_back d = {
        cut_of(w->shape, N), mn_side_of(w->x), mn_side_of(w->b), mn_side_of(w->a),
        mn_side_of(w->dy), mn_side_of(w->dx), mn_side_of(w->db), mn_side_of(w->da),
        mn_divide_by(w->shape[1]), mn_divide_by(w->shape[3]), w->add_x, w->add_b, w->add_a,
        w->a.stride[3] != 0 || w->shape[3] == 1, parts
    };
    if (d.c.tokens >= (int64_t)1 << 31 || d.c.columns >= (int64_t)1 << 31) {
        return cudaErrorInvalidConfiguration;
    }
    const dim3 blocks(mn_blocks(d.c.columns / N, d.c.across), (unsigned)d.c.n_parts);
    const bool narrow = w->x.dtype == MN_BF16;
    const auto kernel = by_packs ? (narrow ? decay_back_kernel<true, MN_PACK>
                                           : decay_back_kernel<false, MN_PACK>)
                                 : (narrow ? decay_back_kernel<true, 1>
                                           : decay_back_kernel<false, 1>);
    kernel<<<blocks, THREADS, 0, on>>>(d);
    const int code = mn_launch_status();
    if (code != cudaSuccess || (!w->db.data && !w->da.data)) return code;
    decay_sums_kernel<<<(unsigned)d.c.H, dim3(LANES, GROUPS), 0, on>>>(d);
    return mn_launch_status();
}

/* As many bytes as either way of going back takes. */
size_t mn_decay_cuda_bytes(const mn_decay_work *work) {
    const cut by_numbers = cut_of(work->shape, 1), by_packs = cut_of(work->shape, MN_PACK);
    const int64_t n_parts = mn_max(by_numbers.n_parts, by_packs.n_parts);
    return (size_t)(n_parts * TERMS * by_numbers.columns) * sizeof(float);
}

int mn_decay_cuda(const mn_decay_work *w, void *space, void *stream) {
    if (w->shape[0] * w->shape[1] * w->shape[2] * w->shape[3] == 0) return cudaSuccess;
    if (!w->y.data) return back(w, (float *)space, (cudaStream_t)stream);
    return mn_run_each(decay_forward{}, w->shape, { &w->x, &w->b, &w->a }, { &w->y }, { false },
                       stream);
}
