/* elementwise.cu - works of a tape with one result per number: moves, constants, normal numbers,
 * sums and products of pairs; and heads folded together. One thread per pack (elementwise.cuh),
 * nothing shared. / */
#include "kernels/cuda/elementwise/elementwise_fwd.cuh"
#include "kernels/cuda/elementwise/row_gate.cuh"

namespace mneme::elementwise {

/* ---- moves ----------------------------------------------------------------------------------- */

/* A head of the result is the sum of `times` heads that follow each other. */
struct fold {
    mn_offset_calc calc;
    mn_operand to, from;
    int64_t times, head;    // elements from head to head of `from`
    bool add;
};

/* A whole pack: the heads of four copies are on their way before the first is added. */
__device__ static void fold_whole(const fold &f, int64_t to, int64_t from) {
    enum { AHEAD = 4 };
    float sum[MN_VEC] = {}, x[MN_VEC];
    if (f.add) mn_unpack(sum, f.to, mn_load_raw(f.to, to));
    for (int64_t copy = 0; copy < f.times; copy += AHEAD) {
        mn_raw_vec raw[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            if (copy + i < f.times) raw[i] = mn_load_raw(f.from, from + (copy + i) * f.head);
        }
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            if (copy + i >= f.times) break;
            mn_unpack(x, f.from, raw[i]);
#pragma unroll
            for (int j = 0; j < MN_VEC; j++) sum[j] += x[j];
        }
    }
    mn_store_vec(f.to, to, sum);
}

template <int N>
__global__ void __launch_bounds__(MN_ELEMENTWISE_THREADS)
fold_heads_kernel(const __grid_constant__ fold f) {
    const uint32_t pack = blockIdx.x * MN_ELEMENTWISE_THREADS + threadIdx.x;
    if (pack >= f.calc.n_vecs) return;
    const mn_coord coord = mn_coord_of<N>(f.calc, pack);
    const int64_t to = mn_offset(f.to, coord), from = mn_offset(f.from, coord);
    const int count = (int)min((int64_t)N, f.calc.width - coord.x);
    if (N == MN_VEC && count == N) {
        fold_whole(f, to, from);
        return;
    }
    for (int j = 0; j < count; j++) {
        float sum = f.add ? mn_operand_load(f.to, to + j) : 0.0f;
        for (int64_t copy = 0; copy < f.times; copy++) {
            sum += mn_operand_load(f.from, from + copy * f.head + j);
        }
        mn_operand_store(f.to, to + j, sum);
    }
}

/* Four axes that are not merged: T and H of the iteration are those of the tensor. */
static int run_fold(const mn_move_params *w, cudaStream_t stream) {
    fold f = { {}, mn_operand_of(w->to), mn_operand_of(w->from), w->times, w->from.stride[2],
        w->add };
    f.from.stride[2] *= w->times;
    const mn_axes axes = { { w->shape[0], w->shape[1], w->shape[2], w->shape[3] } };
    mn_operand heads = f.from;    // whether each single head begins at 16 bytes
    heads.stride[2] = f.head;
    const mn_axes many = { { axes.n[0], axes.n[1], axes.n[2] * w->times, axes.n[3] } };
    const bool vectorized = mn_operand_vec_ok(heads, many) && mn_operand_vec_ok(f.to, axes);
    if (!mn_offset_calc_init(&f.calc, axes,
                             vectorized ? MN_VEC : 1)) return cudaErrorInvalidConfiguration;
    if (f.calc.n_vecs == 0) return cudaSuccess;
    const unsigned blocks = mn_blocks(f.calc.n_vecs, MN_ELEMENTWISE_THREADS);
    if (vectorized) fold_heads_kernel<MN_VEC><<<blocks, MN_ELEMENTWISE_THREADS, 0, stream>>>(f);
    else fold_heads_kernel<1><<<blocks, MN_ELEMENTWISE_THREADS, 0, stream>>>(f);
    return mn_launch_status();
}

/* Whether B, T and heads of a view go on evenly, as one axis. */
static bool is_even(const mn_view &view, const int64_t shape[4]) {
    return (shape[1] == 1 || view.stride[1] == view.stride[2] * shape[2]) &&
           (shape[0] == 1 || view.stride[0] == view.stride[2] * shape[2] * shape[1]);
}

/* Copies of heads are an axis of their own, along which `from` stands still, where the other axes
 * are one; else the copies are made one after the other. */
static int run_repeat(const mn_move_params *w, void *stream) {
    const int64_t *n = w->shape, times = w->times;
    const int64_t heads[4] = { n[0], n[1], n[2] / times, n[3] };
    mn_view to = w->to, from = w->from;
    to.stride[2] *= times;
    if (is_even(to, heads) && is_even(from, heads)) {
        const int64_t shape[4] = { 1, n[0] * n[1] * heads[2], times, n[3] };
        mn_view even_to = to, even_from = from;
        even_to.stride[1] = to.stride[2], even_to.stride[2] = w->to.stride[2];
        even_from.stride[1] = from.stride[2], even_from.stride[2] = 0;
        return mn_run_elementwise(mn_identity{}, shape, { &even_from }, { &even_to }, { w->add },
                                  stream);
    }
    const int64_t item = to.dtype == MN_F32 ? sizeof(float) : sizeof(mn_bf16);
    for (int64_t copy = 0; copy < times; copy++) {
        const int code = mn_run_elementwise(mn_identity{}, heads, { &from }, { &to }, { w->add },
                                            stream);
        if (code != cudaSuccess) return code;
        to.data = (char *)to.data + w->to.stride[2] * item;
    }
    return cudaSuccess;
}

MN_CUDA_ELEMENTWISE(move) {
    const mn_move_params *w = (const mn_move_params *)args;
    (void)workspace;
    if (w->times > 1) {
        return w->folds ? run_fold(w, (cudaStream_t)backend) : run_repeat(w, backend);
    }
    return mn_run_elementwise(mn_identity{}, w->shape, { &w->from }, { &w->to }, { w->add },
                              backend);
}

MN_CUDA_ELEMENTWISE(fill) {
    const mn_fill_params *w = (const mn_fill_params *)args;
    (void)workspace;
    mn_elementwise<mn_constant> e = {};
    e.f.value = (float)w->value;
    e.operand[0] = mn_operand_of(w->to);
    return mn_launch_elementwise(e, w->shape, (cudaStream_t)backend);
}

/* ---- normal numbers -------------------------------------------------------------------------- */

__device__ static double unit(uint64_t bits) {
    return ((double)(bits >> 11) + 0.5) * 0x1p-53;
}

/* As base/rng.c: Philox 2x64 of ten rounds, then Box and Muller, in double. */
__device__ static double normal(uint64_t seed, uint64_t stream, uint64_t index) {
    const uint64_t multiplier = 0xD2B74407B1CE6E93u, weyl = 0x9E3779B97F4A7C15u;
    uint64_t low = index, high = stream;
    for (int round = 0; round < 10; round++, seed += weyl) {
        const uint64_t top = __umul64hi(multiplier, low) ^ seed ^ high;
        high = multiplier * low;
        low = top;
    }
    return sqrt(-2.0 * log(unit(low))) * cospi(2.0 * unit(high));
}

__global__ void __launch_bounds__(MN_ELEMENTWISE_THREADS)
normal_kernel(mn_operand to, int64_t n, uint64_t seed, uint64_t stream) {
    const int64_t i = blockIdx.x * (int64_t)MN_ELEMENTWISE_THREADS + threadIdx.x;
    if (i < n) mn_operand_store(to, i, (float)normal(seed, stream, (uint64_t)i));
}

MN_CUDA_ELEMENTWISE(normal) {
    const mn_normal_params *w = (const mn_normal_params *)args;
    (void)workspace;
    if (w->n == 0) return cudaSuccess;
    normal_kernel<<<mn_blocks(w->n, MN_ELEMENTWISE_THREADS), MN_ELEMENTWISE_THREADS, 0,
        (cudaStream_t)backend>>>(
        mn_operand_of(w->to), w->n, w->seed, w->stream);
    return mn_launch_status();
}

/* ---- pairs ----------------------------------------------------------------------------------- */

struct add_scaled {
    static constexpr int INS = 3, OUTS = 1;    // a, b, c; y

    template <bool BF16, int N>
    __device__ void run(const float (&x)[4][N], float (&y)[1][N]) const {
#pragma unroll
        for (int j = 0; j < N; j++) {
            y[0][j] = mn_functions<BF16>::pair_SCALED(x[0][j], x[1][j], x[2][j], 0.0f, 0.0f);
        }
    }
};

/* y = 1 / (softplus(a) + low), or da from a and dy. */
template <bool BACK>
struct precision {
    static constexpr int INS = 2, OUTS = 1;    // a, dy; y or da
    float low;

    template <bool BF16, int N>
    __device__ void run(const float (&x)[3][N], float (&y)[1][N]) const {
#pragma unroll
        for (int j = 0; j < N; j++) {
            y[0][j] = BACK ? mn_functions<BF16>::pair_da_PRECISION(x[0][j], 0.0f, x[1][j], 0.0f,
                                                                   low)
                           : mn_functions<BF16>::pair_PRECISION(x[0][j], 0.0f, 0.0f, 0.0f, low);
        }
    }
};

struct pair_backward {
    static constexpr int INS = 3, OUTS = 2;    // a, b, dy; da, db
    mn_pair_kind kind;
    float scale, shift;

    template <bool BF16, int N>
    __device__ void run(const float (&x)[5][N], float (&y)[2][N]) const {
        switch (kind) {
#define BACKWARD_1(id) BACKWARD_3(id)
#define BACKWARD_2(id) BACKWARD_3(id)
#define BACKWARD_TAPE(id)
#define BACKWARD_3(id)                                                                             \
    case MN_PAIR_##id:                                                                             \
        _Pragma("unroll")                                                                          \
        for (int j = 0; j < N; j++) {                                                              \
            const float a = x[0][j], b = x[1][j], dy = x[2][j];                                    \
            y[0][j] = mn_functions<BF16>::pair_da_##id(a, b, dy, scale, shift);                    \
            y[1][j] = mn_functions<BF16>::pair_db_##id(a, b, dy, scale, shift);                    \
        }                                                                                          \
        break;
#define PAIR(id, ins, about) BACKWARD_##ins(id)
#include "kernels/elementwise.def"
#undef BACKWARD_1
#undef BACKWARD_2
#undef BACKWARD_3
#undef BACKWARD_TAPE
        default: __builtin_unreachable();
        }
    }
};

/* What the gradients do not depend on is not read. Where both are one tensor's, the second one is
 * added after the first. */
static int pair_back(mn_pair_params w, void *stream) {
    const pair_backward f = { w.kind, (float)w.scale, (float)w.shift };
    const bool multiplies = w.kind == MN_PAIR_MULTIPLY;
    if (w.da.data && w.da.data == w.db.data) {
        mn_pair_params first = w, second = w;
        first.db.data = second.da.data = NULL;
        const int code = pair_back(first, stream);
        return code == cudaSuccess ? pair_back(second, stream) : code;
    }
    if (w.kind != MN_PAIR_AT_LEAST && !(multiplies && w.db.data)) w.a.data = NULL;
    if (!multiplies || !w.da.data) w.b.data = NULL;
    return mn_run_elementwise(f, w.shape, { &w.a, &w.b, &w.dy }, { &w.da, &w.db },
                              { w.add_a, w.add_b },
                       stream);
}

MN_CUDA_ELEMENTWISE(pair) {
    const mn_pair_params *w = (const mn_pair_params *)args;
    (void)workspace;
    if (!w->y.data && w->kind == MN_PAIR_MULTIPLY && mn_is_row_gate(w->db, w->shape)) {
        return mn_row_gate_bwd_cuda({ w->shape, NULL, &w->a, &w->b, &w->dy, &w->da, &w->db, &w->e,
                                   &w->c, &w->dc, w->add_a, w->add_b }, backend);
    }
    if (w->kind == MN_PAIR_PRECISION) {
        const float low = (float)w->shift;
        return w->y.data ? mn_run_elementwise(precision<false>{ low }, w->shape, { &w->a, &w->dy },
                                              { &w->y }, { false }, backend)
                         : mn_run_elementwise(precision<true>{ low }, w->shape, { &w->a, &w->dy },
                                              { &w->da }, { w->add_a }, backend);
    }
    if (!w->y.data) return pair_back(*w, backend);
    if (w->kind == MN_PAIR_SCALED) {
        return mn_run_elementwise(add_scaled{}, w->shape, { &w->a, &w->b, &w->c }, { &w->y },
                                  { false },
                           backend);
    }
    const mn_pair_forward f = { w->kind, (float)w->scale, (float)w->shift };
    return mn_run_elementwise(f, w->shape, { &w->a, &w->b }, { &w->y }, { false }, backend);
}

}    // namespace mneme::elementwise
