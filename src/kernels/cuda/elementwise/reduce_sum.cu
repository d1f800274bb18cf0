/* reduce_sum.cu - sums over axes of dy, of dy a, or of dy f(a), for what was repeated along them.
 *
 * Axes that go on evenly and are alike, kept or summed, are one; at most two of each remain. Where
 * the last one is kept, a thread owns a pack of results and runs over what is summed; where the
 * last one is summed, a warp does, its lanes along that axis. Long sums are cut into parts, whose
 * sums wait in the work space and are added in their order. */
#include "kernels/cuda/elementwise/elementwise_fwd.cuh"
#include "kernels/cuda/prim/split_reduce.cuh"

namespace mneme::elementwise {

/* MIN_STEPS: terms of a thread in a part; MAX_AXIS: of an axis that is cut into two. */
enum { LANES = 32, GROUPS = 8, BLOCKS = 1056, MIN_STEPS = 32, MAX_AXIS = 4096 };

/* One of the merged axes, and what a step along it is. */
struct axis {
    int64_t n, a, dy, sum;
};

/* Results are counted by kept[0] and kept[1], terms by summed[0] and summed[1]; the second is the
 * one whose neighbours are nearer. */
struct plan {
    axis kept[2], summed[2];
    mn_fast_divisor kept1, summed1;
    int64_t n_results, n_terms, n_partials, part;    // part: steps of the outer loop that one takes
    int64_t each;                                 // results of a block
    int lanes;                                    // of a result, where a block has several rows
    mn_operand a, dy, sum;
    // rows: the last axis is summed; row_groups: a block per result
    bool rows, vectorized, row_groups, add;
    mn_unary_forward f;
};

/* The merged axes, last first; false is returned in `kept` for those that are summed. */
static int merge(const mn_sum_params *w, axis (&axes)[4], bool (&kept)[4]) {
    int count = 0;
    for (int i = 3; i >= 0; i--) {
        const bool keeps = w->kept[i] != 1;
        if (w->shape[i] == 1) continue;
        const axis next = { w->shape[i], w->a.data ? w->a.stride[i] : 0, w->dy.stride[i],
                            keeps ? w->sum.stride[i] : 0 };
        axis *last = count ? &axes[count - 1] : nullptr;
        const bool even = last && kept[count - 1] == keeps && next.dy == last->dy * last->n &&
                          next.a == last->a * last->n && next.sum == last->sum * last->n;
        if (even) {
            last->n *= next.n;
        } else {
            axes[count] = next;
            kept[count++] = keeps;
        }
    }
    return count;
}

static bool vectorized(const plan *p) {
    const axis &last = p->rows ? p->summed[1] : p->kept[1];
    const axis *others[3] = { &p->kept[0], &p->summed[0], p->rows ? &p->kept[1] : &p->summed[1] };
    bool even = last.n % MN_VEC == 0 && last.dy == 1 && (uintptr_t)p->dy.data % 16 == 0;
    if (p->a.data) even &= last.a == 1 && (uintptr_t)p->a.data % 16 == 0;
    for (const axis *other : others) {
        if (other->n > 1) even &= other->dy % MN_VEC == 0 && other->a % MN_VEC == 0;
    }
    return even;
}

/* A sum along one long axis as one along two, so that it can be cut into parts. */
static void split_axis(axis (&summed)[2]) {
    axis &last = summed[1];
    int64_t cut = 1;
    while (cut < MAX_AXIS && last.n % (2 * cut) == 0) cut *= 2;
    if (cut < MAX_AXIS / 64 || last.n == cut) return;
    summed[0] = { last.n / cut, last.a * cut, last.dy * cut, 0 };
    last.n = cut;
}

/* How the work is cut, from sizes alone. */
static plan plan_of(const mn_sum_params *w) {
    const axis one = { 1, 0, 0, 0 };
    plan p = {};
    p.kept[0] = p.kept[1] = p.summed[0] = p.summed[1] = one;
    axis axes[4];
    bool kept[4];
    const int count = merge(w, axes, kept);
    int n_kept = 0, n_summed = 0;
    for (int i = 0; i < count; i++) {
        if (kept[i] && n_kept < 2) p.kept[1 - n_kept++] = axes[i];
        if (!kept[i] && n_summed < 2) p.summed[1 - n_summed++] = axes[i];
    }
    p.rows = count > 0 && !kept[0];
    if (p.rows && n_summed == 1) split_axis(p.summed);
    p.a = mn_operand_of(w->a);
    p.dy = mn_operand_of(w->dy);
    p.sum = mn_operand_of(w->sum);
    p.a.stride[3] = p.dy.stride[3] = 1;    // of a pack
    p.add = w->add;
    p.f = { w->f, false };
    p.n_results = p.kept[0].n * p.kept[1].n;
    p.n_terms = p.summed[0].n * p.summed[1].n;
    p.kept1 = mn_fast_divisor_of(mn_max(p.kept[1].n, (int64_t)1));
    p.summed1 = mn_fast_divisor_of(mn_max(p.summed[1].n, (int64_t)1));
    p.vectorized = vectorized(&p);
    /* a block takes 32 packs of results, or a result, or as many as it has row_groups of lanes */
    const int pack = p.vectorized ? MN_VEC : 1;
    p.row_groups = p.rows && (p.summed[0].n >= GROUPS || p.n_results < BLOCKS);
    for (p.lanes = 1; p.lanes < LANES && p.lanes * pack < p.summed[1].n;) p.lanes *= 2;
    p.each = p.row_groups ? 1 : p.rows ? GROUPS * (LANES / p.lanes) : LANES * pack;
    const int64_t steps = p.rows ? p.summed[0].n : p.n_terms;
    const int64_t across = mn_max(mn_ceil_div(p.n_results, p.each), (int64_t)1);
    const int64_t most = mn_max(steps / (p.rows ? GROUPS : MIN_STEPS), (int64_t)1);
    p.n_partials = mn_max(mn_min(BLOCKS / across, most), (int64_t)1);
    if (p.rows && !p.row_groups) p.n_partials = 1;
    p.part = mn_ceil_div(mn_max(steps, (int64_t)1), p.n_partials);
    p.n_partials = mn_ceil_div(mn_max(steps, (int64_t)1), p.part);
    return p;
}

/* Puts a result where it belongs. */
struct store_sum {
    axis kept0, kept1;
    mn_fast_divisor by;
    mn_operand sum;
    bool add;

    __device__ void operator()(int64_t i, float x) const {
        const uint32_t high = mn_fast_div((uint32_t)i, by), low = (uint32_t)i - high * by.d;
        const int64_t at = high * kept0.sum + low * kept1.sum;
        mn_operand_store(sum, at, add ? mn_operand_load(sum, at) + x : x);
    }
};

/* The part of a result: to its place when it is all there is. */
__device__ static void store_partial(const plan &p, const store_sum &put, float *partials,
                                     int64_t part,
                                int64_t i, float x) {
    if (p.n_partials == 1) put(i, x);
    else partials[part * p.n_results + i] = x;
}

/* Adds N terms to N sums. ACTIVATED: of f(a). */
template <int N, mn_operand_types TYPES, bool ACTIVATED>
__device__ static void accumulate(const plan &p, float (&sum)[N], int64_t at_a, int64_t at_dy) {
    float a[MN_VEC], dy[MN_VEC];
    if (N == MN_VEC) {
        mn_raw_vec raw_a = {};
        const mn_raw_vec raw_dy = mn_load_raw<TYPES>(p.dy, at_dy);
        if (p.a.data) raw_a = mn_load_raw<TYPES>(p.a, at_a);
        mn_unpack<TYPES>(dy, p.dy, raw_dy);
        mn_unpack<TYPES>(a, p.a, raw_a);
    } else {
        dy[0] = mn_operand_load(p.dy, at_dy);
        a[0] = p.a.data ? mn_operand_load(p.a, at_a) : 0.0f;
    }
    if constexpr (ACTIVATED) {
        float x[3][N], y[1][N];
#pragma unroll
        for (int j = 0; j < N; j++) x[0][j] = a[j];
        p.f.template run<TYPES == MN_ALL_BF16>(x, y);
#pragma unroll
        for (int j = 0; j < N; j++) a[j] = y[0][j];
    }
#pragma unroll
    for (int j = 0; j < N; j++) sum[j] = p.a.data ? fmaf(dy[j], a[j], sum[j]) : sum[j] + dy[j];
}

/* The last axis is kept. A block: 32 packs of results side by side, 8 row_groups of threads that
 * take every eighth term of the part. */
template <int N, mn_operand_types TYPES>
__global__ void __launch_bounds__(LANES * GROUPS)
sum_columns_kernel(const __grid_constant__ plan p, const __grid_constant__ store_sum put,
                   float *partials) {
    __shared__ float smem[GROUPS][LANES * N];
    const int64_t i = (blockIdx.x * (int64_t)LANES + threadIdx.x) * N;
    const int64_t first = blockIdx.y * p.part, last = min(first + p.part, p.n_terms);
    float sum[N] = {};
    if (i < p.n_results) {
        const uint32_t high = mn_fast_div((uint32_t)i, p.kept1);
        const uint32_t low = (uint32_t)i - high * p.kept1.d;
        const int64_t a0 = high * p.kept[0].a + low * p.kept[1].a;
        const int64_t dy0 = high * p.kept[0].dy + low * p.kept[1].dy;
#pragma unroll 4
        for (int64_t term = first + threadIdx.y; term < last; term += GROUPS) {
            const uint32_t r = mn_fast_div((uint32_t)term, p.summed1);
            const uint32_t s = (uint32_t)term - r * p.summed1.d;
            accumulate<N, TYPES, false>(p, sum, a0 + r * p.summed[0].a + s * p.summed[1].a,
                                  dy0 + r * p.summed[0].dy + s * p.summed[1].dy);
        }
    }
#pragma unroll
    for (int j = 0; j < N; j++) smem[threadIdx.y][threadIdx.x * N + j] = sum[j];
    __syncthreads();
    const int thread = threadIdx.y * LANES + threadIdx.x;
    const int64_t result = blockIdx.x * (int64_t)LANES * N + thread;
    if (thread >= LANES * N || result >= p.n_results) return;
    float all = 0.0f;
    for (int group = 0; group < GROUPS; group++) all += smem[group][thread];
    store_partial(p, put, partials, blockIdx.y, result, all);
}

/* The last axis is summed: a row_group of lanes runs along it, and has a result of its own, or a
 * block's row_groups take the rows of one result in turn. */
template <int N, mn_operand_types TYPES, bool ACTIVATED>
__global__ void __launch_bounds__(LANES * GROUPS)
sum_rows_kernel(const __grid_constant__ plan p, const __grid_constant__ store_sum put,
                float *partials) {
    __shared__ float smem[GROUPS];
    const int lane = threadIdx.x % p.lanes, n_row_groups = GROUPS * (LANES / p.lanes);
    const int row_group = threadIdx.y * (LANES / p.lanes) + threadIdx.x / p.lanes;
    const int64_t i = p.row_groups ? blockIdx.x : blockIdx.x * p.each + row_group;
    const int64_t part = blockIdx.y, first = part * p.part;
    const int64_t last = min(first + p.part, p.summed[0].n);
    float sum[N] = {};
    if (i < p.n_results) {
        const uint32_t high = mn_fast_div((uint32_t)i, p.kept1);
        const uint32_t low = (uint32_t)i - high * p.kept1.d;
        const int64_t a0 = high * p.kept[0].a + low * p.kept[1].a;
        const int64_t dy0 = high * p.kept[0].dy + low * p.kept[1].dy;
        const int step = p.row_groups ? n_row_groups : 1;
        for (int64_t r = first + (p.row_groups ? row_group : 0); r < last; r += step) {
            for (int64_t s = lane * N; s < p.summed[1].n; s += p.lanes * N) {
                accumulate<N, TYPES, ACTIVATED>(p, sum, a0 + r * p.summed[0].a + s * p.summed[1].a,
                                       dy0 + r * p.summed[0].dy + s * p.summed[1].dy);
            }
        }
    }
    float all = 0.0f;
#pragma unroll
    for (int j = 0; j < N; j++) all += sum[j];
    for (int other = (p.row_groups ? LANES : p.lanes) / 2; other > 0; other /= 2) {
        all += __shfl_xor_sync(0xffffffffu, all, other);
    }
    if (p.row_groups) {
        if (threadIdx.x == 0) smem[threadIdx.y] = all;
        __syncthreads();
        all = 0.0f;
        for (int group = 0; group < GROUPS; group++) all += smem[group];
        if (threadIdx.x + threadIdx.y == 0) store_partial(p, put, partials, part, i, all);
    } else if (lane == 0 && i < p.n_results) {
        store_partial(p, put, partials, part, i, all);
    }
}

extern "C" size_t mn_elementwise_sum_cuda_bytes(const void *args) {
    const plan p = plan_of((const mn_sum_params *)args);
    return p.n_partials > 1 ? (size_t)(p.n_partials * p.n_results) * sizeof(float) : 0;
}

template <int N, mn_operand_types TYPES>
static int launch(const plan &p, const store_sum &put, bool shaped, float *partials,
                  cudaStream_t on) {
    const dim3 threads(LANES, GROUPS), blocks(mn_blocks(p.n_results, p.each),
                                              (unsigned)p.n_partials);
    if (shaped) sum_rows_kernel<N, TYPES, true><<<blocks, threads, 0, on>>>(p, put, partials);
    else if (p.rows) sum_rows_kernel<N, TYPES, false><<<blocks, threads, 0, on>>>(p, put, partials);
    else sum_columns_kernel<N, TYPES><<<blocks, threads, 0, on>>>(p, put, partials);
    return mn_launch_status();
}

static int launch_any(const plan &p, const store_sum &put, bool shaped, float *partials,
                      cudaStream_t on) {
    const mn_operand operands[2] = { p.a, p.dy };
    if (!p.vectorized) return launch<1, MN_MIXED>(p, put, shaped, partials, on);
    switch (mn_operand_types_of(operands)) {
    case MN_ALL_BF16: return launch<MN_VEC, MN_ALL_BF16>(p, put, shaped, partials, on);
    case MN_ALL_F32: return launch<MN_VEC, MN_ALL_F32>(p, put, shaped, partials, on);
    default: return launch<MN_VEC, MN_MIXED>(p, put, shaped, partials, on);
    }
}

MN_CUDA_ELEMENTWISE(sum) {
    const cudaStream_t on = (cudaStream_t)backend;
    const mn_sum_params *w = (const mn_sum_params *)args;
    const plan p = plan_of(w);
    float *partials = (float *)workspace;
    const store_sum put = { p.kept[0], p.kept[1], p.kept1, p.sum, p.add };
    const int64_t most = (int64_t)1 << 31;
    if (p.n_results >= most || p.n_terms >= most) return cudaErrorInvalidConfiguration;
    if (w->shaped && p.n_results > 0 && !p.rows) return cudaErrorInvalidConfiguration;
    const int code = launch_any(p, put, w->shaped, partials, on);
    if (code != cudaSuccess || p.n_partials == 1) return code;
    return mn_reduce_partials_to(put, partials, p.n_partials, p.n_results, on);
}

}    // namespace mneme::elementwise
