/* log_decay.cu - log decays y = -e^a softplus(x + b) and their gradients (kernels/decay.h).
 *
 * Going back a thread owns a pack of columns, of all heads and channels, and runs over tokens: its
 * terms of db and da wait in the work space, a part for each block along the tokens. Then a block
 * per head adds the parts in their order. */
#include "kernels/decay.h"
#include "kernels/cuda/elementwise/elementwise_fwd.cuh"

namespace mneme::elementwise {

enum { THREADS = 256, BLOCKS = 264, MIN_STEPS = 4, LANES = 32, GROUPS = 32, TERMS = 2 };

struct decay_forward {
    static constexpr int INS = 3, OUTS = 1;    // x, b, a; y

    template <bool BF16, int N>
    __device__ void run(const float (&x)[4][N], float (&y)[1][N]) const {
#pragma unroll
        for (int j = 0; j < N; j++) {
            const float rate = mn_fn_exp<BF16>(x[2][j]);
            y[0][j] = -rate * mn_fn_softplus<BF16>(x[0][j] + x[1][j]);
        }
    }
};

/* How going back is cut, from sizes alone: blocks of `across` packs of columns and `deep` tokens
 * side by side, which take `part` such steps along the tokens. */
struct split {
    int64_t H, X, columns, tokens, part, n_partials;
    int across, deep;
};

/* A pack of columns is one of a head. */
static bool operand_vec_ok(const mn_operand &operand, const split &c) {
    return !operand.data || (operand.stride[3] == 1 && (uintptr_t)operand.data % 16 == 0 &&
                          (c.H == 1 || operand.stride[2] % MN_VEC == 0) &&
                          operand.stride[1] % MN_VEC == 0 && operand.stride[0] % MN_VEC == 0);
}

static split make_split(const int64_t shape[4], int pack) {
    split c = { shape[2], shape[3], shape[2] * shape[3], shape[0] * shape[1], 0, 0, 0, 0 };
    const int64_t packs = mn_max(c.columns / pack, (int64_t)1);
    c.across = (int)mn_min(packs, (int64_t)THREADS);
    c.deep = THREADS / c.across;
    const int64_t steps = mn_max(mn_ceil_div(c.tokens, (int64_t)c.deep), (int64_t)1);
    const int64_t most = mn_max(BLOCKS / mn_ceil_div(packs, (int64_t)c.across), (int64_t)1);
    c.n_partials = mn_max(mn_min(most, steps / MIN_STEPS), (int64_t)1);
    c.part = mn_ceil_div(steps, c.n_partials);
    c.n_partials = mn_ceil_div(steps, c.part);
    return c;
}

struct decay_bwd {
    split c;
    mn_operand x, b, a, dy, dx, db, da;
    mn_fast_divisor per_sequence, per_head;    // tokens, columns
    bool add_x, add_b, add_a, per_channel;
    float *partials;    // parts[part][term][column]
};

template <int N>
__device__ static void load(float (&out)[N], const mn_operand &operand, int64_t at) {
    if constexpr (N == MN_VEC) mn_unpack(out, operand, mn_load_raw(operand, at));
    else out[0] = mn_operand_load(operand, at);
}

/* Offset of a token, and of a column of it. */
__device__ static int64_t token_of(const mn_operand &operand, const decay_bwd &d, uint32_t token) {
    const uint32_t sequence = mn_fast_div(token, d.per_sequence);
    return sequence * operand.stride[0] + (token - sequence * d.per_sequence.d) * operand.stride[1];
}

__device__ static int64_t column_of(const mn_operand &operand, const decay_bwd &d,
                                    uint32_t column) {
    const uint32_t head = mn_fast_div(column, d.per_head);
    return head * operand.stride[2] + (column - head * d.per_head.d) * operand.stride[3];
}

/* One token's pack: dx, and what it adds to the sums. */
template <bool BF16, int N>
__device__ static void step(const decay_bwd &d, float (&sums)[TERMS][N], const float (&x)[N],
                            const float (&dy)[N], const float (&b)[N], const float (&rate)[N],
                            int64_t to) {
    float dx[N];
#pragma unroll
    for (int j = 0; j < N; j++) {
        const float at = x[j] + b[j], down = -rate[j] * dy[j];
        dx[j] = down * mn_fn_sigmoid<BF16>(at);
        sums[0][j] += dx[j];
        sums[1][j] = fmaf(down, mn_fn_softplus<BF16>(at), sums[1][j]);
    }
    if (!d.dx.data) return;
    if (d.add_x) {
        float old[N];
        load(old, d.dx, to);
#pragma unroll
        for (int j = 0; j < N; j++) dx[j] += old[j];
    }
    if constexpr (N == MN_VEC) mn_store_vec(d.dx, to, dx);
    else mn_operand_store(d.dx, to, dx[0]);
}

template <bool BF16, int N>
__global__ void __launch_bounds__(THREADS) decay_bwd_kernel(const __grid_constant__ decay_bwd d) {
    constexpr int PREFETCH = N == MN_VEC ? 2 : 4;
    __shared__ float smem[THREADS][TERMS * N + 1];
    const split &c = d.c;
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
        for (int j = 0; j < N; j++) rate[j] = mn_fn_exp<BF16>(rate[j]);
        const int64_t x0 = column_of(d.x, d, column), dy0 = column_of(d.dy, d, column);
        const int64_t dx0 = column_of(d.dx, d, column);
        for (int64_t token = first + row; token < last; token += PREFETCH * c.deep) {
            float x[PREFETCH][N], dy[PREFETCH][N];
#pragma unroll
            for (int k = 0; k < PREFETCH; k++) {
                const uint32_t at = (uint32_t)min(token + k * c.deep, last - 1);
                load(x[k], d.x, x0 + token_of(d.x, d, at));
                load(dy[k], d.dy, dy0 + token_of(d.dy, d, at));
            }
#pragma unroll
            for (int k = 0; k < PREFETCH; k++) {
                const int64_t at = token + k * c.deep;
                if (at >= last) continue;
                const int64_t to = dx0 + token_of(d.dx, d, (uint32_t)at);
                step<BF16>(d, sums, x[k], dy[k], b, rate, to);
            }
        }
    }
#pragma unroll
    for (int j = 0; j < TERMS * N; j++) smem[threadIdx.x][j] = sums[j / N][j % N];
    __syncthreads();
    if (row != 0 || !works) return;
#pragma unroll
    for (int j = 0; j < TERMS * N; j++) {
        float sum = 0.0f;
        for (int other = 0; other < c.deep; other++) sum += smem[lane + other * c.across][j];
        d.partials[(blockIdx.y * TERMS + j / N) * c.columns + column + j % N] = sum;
    }
}

__device__ static void store_sum(const mn_operand &operand, int64_t at, float sum, bool add) {
    if (operand.data) mn_operand_store(operand, at, add ? mn_operand_load(operand, at) + sum : sum);
}

/* A block per head. Group g adds parts g, g + GROUPS, ... of 32 columns at a time. */
__global__ void __launch_bounds__(LANES *GROUPS)
decay_bwd_reduce_kernel(const __grid_constant__ decay_bwd d) {
    __shared__ float smem[TERMS][GROUPS][LANES];
    const int lane = threadIdx.x, group = threadIdx.y;
    const int64_t head = blockIdx.x;
    float of_head = 0.0f;
    for (int64_t first = 0; first < d.c.X; first += LANES) {
        const int64_t i = first + lane, column = head * d.c.X + i;
        float sums[TERMS] = {};
#pragma unroll 4
        for (int64_t part = group; i < d.c.X && part < d.c.n_partials; part += GROUPS) {
#pragma unroll
            for (int term = 0; term < TERMS; term++) {
                sums[term] += d.partials[(part * TERMS + term) * d.c.columns + column];
            }
        }
        for (int term = 0; term < TERMS; term++) smem[term][group][lane] = sums[term];
        __syncthreads();
        if (group < TERMS) {    // a warp for each term
            float sum = 0.0f;
            for (int other = 0; other < GROUPS; other++) sum += smem[group][other][lane];
            of_head += sum;
            const mn_operand &operand = group == 0 ? d.db : d.da;
            const bool each = i < d.c.X && (group == 0 || d.per_channel);
            const int64_t at = head * operand.stride[2] + i * operand.stride[3];
            if (each) store_sum(operand, at, sum, group == 0 ? d.add_b : d.add_a);
        }
        __syncthreads();
    }
    if (group != 1 || d.per_channel) return;
    of_head = mn_warp_sum(of_head);
    if (lane == 0) store_sum(d.da, head * d.da.stride[2], of_head, d.add_a);
}

static bool packs(const mn_decay_params *w, const split &c) {
    const mn_view *views[] = { &w->x, &w->dy, &w->dx };
    const mn_operand a = mn_operand_of(w->a);
    bool all = c.X % MN_VEC == 0 && operand_vec_ok(mn_operand_of(w->b), c);
    for (const mn_view *view : views) all = all && operand_vec_ok(mn_operand_of(*view), c);
    return all && (a.stride[3] == 0 || operand_vec_ok(a, c));
}

static int back(const mn_decay_params *w, float *partials, cudaStream_t on) {
    const bool by_packs = packs(w, make_split(w->shape, 1));
    const int N = by_packs ? MN_VEC : 1;
    const decay_bwd d = {
        make_split(w->shape, N), mn_operand_of(w->x), mn_operand_of(w->b), mn_operand_of(w->a),
        mn_operand_of(w->dy), mn_operand_of(w->dx), mn_operand_of(w->db), mn_operand_of(w->da),
        mn_fast_divisor_of(w->shape[1]), mn_fast_divisor_of(w->shape[3]), w->add_x, w->add_b,
            w->add_a,
        w->a.stride[3] != 0 || w->shape[3] == 1, partials
    };
    if (d.c.tokens >= (int64_t)1 << 31 || d.c.columns >= (int64_t)1 << 31) {
        return cudaErrorInvalidConfiguration;
    }
    const dim3 blocks(mn_blocks(d.c.columns / N, d.c.across), (unsigned)d.c.n_partials);
    const bool narrow = w->x.dtype == MN_BF16;
    const auto kernel = by_packs ? (narrow ? decay_bwd_kernel<true, MN_VEC>
                                           : decay_bwd_kernel<false, MN_VEC>)
                                 : (narrow ? decay_bwd_kernel<true, 1>
                                           : decay_bwd_kernel<false, 1>);
    kernel<<<blocks, THREADS, 0, on>>>(d);
    const int code = mn_launch_status();
    if (code != cudaSuccess || (!w->db.data && !w->da.data)) return code;
    decay_bwd_reduce_kernel<<<(unsigned)d.c.H, dim3(LANES, GROUPS), 0, on>>>(d);
    return mn_launch_status();
}

/* As many bytes as either way of going back takes. */
extern "C" size_t mn_decay_cuda_bytes(const mn_decay_params *args) {
    const split by_numbers = make_split(args->shape, 1), by_packs = make_split(args->shape, MN_VEC);
    const int64_t n_partials = mn_max(by_numbers.n_partials, by_packs.n_partials);
    return (size_t)(n_partials * TERMS * by_numbers.columns) * sizeof(float);
}

extern "C" int mn_decay_cuda(const mn_decay_params *w, void *workspace, void *stream) {
    if (w->shape[0] * w->shape[1] * w->shape[2] * w->shape[3] == 0) return cudaSuccess;
    if (!w->y.data) return back(w, (float *)workspace, (cudaStream_t)stream);
    return mn_run_elementwise(decay_forward{}, w->shape, { &w->x, &w->b, &w->a }, { &w->y },
                              { false },
                       stream);
}

}    // namespace mneme::elementwise
