/* decode_elementwise.cuh - one small work (kernels/decode.h) by one block of threads.
 *
 * Results go where the work says, or, for the input of a product, to rows in shared memory. They
 * are rounded as the kernels of single works round them. */
#ifndef MN_KERNELS_CUDA_DECODE_DECODE_ELEMENTWISE_CUH
#define MN_KERNELS_CUDA_DECODE_DECODE_ELEMENTWISE_CUH

#include "kernels/cuda/elementwise/elementwise_fwd.cuh"
#include "kernels/cuda/prim/activation.cuh"
#include "kernels/decode.h"

namespace mneme::decode {

using namespace elementwise;

enum { MN_DECODE_PACK = 4 };

/* The threads that do a work: all of a block. WIDE: a convolution goes by packs of channels where
 * it can, which takes registers. */
struct mn_decode_cta {
    static constexpr bool WIDE = true;

    __device__ static int threads(void) {
        return (int)blockDim.x;
    }

    __device__ static int thread(int turn) {
        (void)turn;
        return (int)threadIdx.x;
    }

    __device__ static void sync(void) {
        __syncthreads();
    }
};

/* A work as kernels know it. Element by element, `layout` and the sides have merged axes.
 * [begin, end): packs, channels of a convolution or rows of a norm. `turn`: the thread that has
 * the first of them; `waits`: for works in front of it. */
struct alignas(16) mn_decode_job {
    int kind, f, order, rows, width, taps, begin, end, turn, waits;
    float scale, shift;
    bool packs, narrow;
    mn_offset_calc layout;
    mn_operand side[MN_DECODE_VIEWS];
    int lines[MN_DECODE_VIEWS];    // of a cache, of each input
    const int32_t *index;
};

/* Where results go: number i of the work, of which the first lies at `at` where that is not NULL,
 * in rows of `width`, `step` apart. */
struct mn_decode_dst {
    char *at;
    int width, step;
};

/* Packs of four: registers are for weights on their way. */
template <int N>
__device__ inline void mn_decode_load(float (&x)[N], const mn_operand &side, int64_t at) {
    if (N == 1 || side.stride[3] == 0) {
        const float one = mn_operand_load(side, at);
#pragma unroll
        for (int j = 0; j < N; j++) x[j] = one;
    } else if (side.is_f32) {
        mn_load<N>(x, (const float *)side.data, at);
    } else {
        mn_load<N>(x, (const mn_bf16 *)side.data, at);
    }
}

template <int N>
__device__ inline void mn_decode_store(const mn_operand &side, const mn_decode_dst &to, int64_t at,
                                  const float (&x)[N]) {
    char *data = side.data;
    if (to.at) {
        const int row = (int)at / to.width;
        at = (int64_t)row * to.step + ((int)at - row * to.width);
        data = to.at;
    }
    if (side.is_f32) mn_store<N>((float *)data, at, x);
    else mn_store<N>((mn_bf16 *)data, at, x);
}

/* ---- element by element ---------------------------------------------------------------------- */

template <typename Block, int N, typename F>
__device__ inline void mn_decode_elementwise_of(const mn_decode_job &job, const F &f,
                                                const mn_decode_dst &to) {
    constexpr int INS = F::INS;
#pragma unroll 1
    for (int pack = job.begin + Block::thread(job.turn); pack < job.end; pack += Block::threads()) {
        const mn_coord spot = mn_coord_of<N>(job.layout, (uint32_t)pack);
        float x[INS + 1][N] = {}, y[1][N];
#pragma unroll
        for (int i = 0; i < INS; i++) {
            if (job.side[i].data) mn_decode_load<N>(x[i], job.side[i],
                                                    mn_offset(job.side[i], spot));
        }
        if (job.narrow) f.template run<true>(x, y);
        else f.template run<false>(x, y);
        mn_decode_store<N>(job.side[INS], to, mn_offset(job.side[INS], spot), y[0]);
    }
}

template <typename Block, typename F>
__device__ inline void mn_decode_elementwise(const mn_decode_job &job, const F &f,
                                             const mn_decode_dst &to) {
    if (job.packs) mn_decode_elementwise_of<Block, MN_DECODE_PACK>(job, f, to);
    else mn_decode_elementwise_of<Block, 1>(job, f, to);
}

/* Rows of a table; a row here is a line of the layout over (rows, width). */
template <typename Block, int N>
__device__ inline void mn_decode_gather(const mn_decode_job &job, const mn_decode_dst &to) {
#pragma unroll 1
    for (int i = threadIdx.x * N; i < job.rows * job.width; i += Block::threads() * N) {
        const int row = i / job.width;
        float x[N];
        mn_decode_load<N>(x, job.side[0], job.index[row] * (int64_t)job.width + i % job.width);
        mn_decode_store<N>(job.side[1], to, i, x);
    }
}

/* ---- norms ----------------------------------------------------------------------------------- */

/* The sum over a warp, or over the block; `smem` is 32 floats. */
template <typename Block>
__device__ inline float mn_decode_reduce_sum(float x, bool block, float *smem) {
    x = mn_warp_sum(x);
    if (!block) return x;
    if (threadIdx.x % 32 == 0) smem[threadIdx.x / 32] = x;
    Block::sync();
    const int warps = Block::threads() / 32;
    x = mn_warp_sum((int)threadIdx.x % 32 < warps ? smem[threadIdx.x % 32] : 0.0f);
    Block::sync();
    return x;
}

__device__ inline float mn_decode_gate(const mn_decode_job &job, float z) {
    return job.f == MN_DECODE_SIGMOID ? mn_sigmoid(z) : mn_silu(z).value;
}

/* What a norm is taken of: x, or x a. */
__device__ inline float mn_decode_norm_input(const mn_decode_job &job, float x, float z) {
    return job.order == MN_DECODE_GATE_FIRST ? x * mn_decode_gate(job, z) : x;
}

__device__ inline float mn_decode_rnorm(const mn_decode_job &job, float squares) {
    if (job.kind != MN_DECODE_L2_NORM) return 1.0f / sqrtf(squares / (float)job.width + job.scale);
    if (job.f == MN_DECODE_ROOT) return 1.0f / sqrtf(squares + job.scale);
    return 1.0f / fmaxf(sqrtf(squares), job.scale);
}

/* One row is the block's, several, or one that a warp has at once, are a warp's each. The first
 * elements stay in registers. */
template <typename Block, int N>
__device__ inline void mn_decode_norm_of(const mn_decode_job &job, const mn_decode_dst &to,
                                         float *smem) {
    constexpr int KEPT = N == 1 ? 4 : 1;
    const bool block = job.rows == 1 && job.width > 32 * N;
    const bool gated = job.kind == MN_DECODE_GATED_NORM;
    const bool weighted = job.kind != MN_DECODE_L2_NORM;
    const int thread = Block::thread(job.turn);
    const int lane = block ? thread : thread % 32, lanes = block ? Block::threads() : 32;
    const int first = block ? 0 : thread / 32, step = block ? 1 : Block::threads() / 32;
    const mn_operand &w = job.side[gated ? 2 : 1], &y = job.side[gated ? 3 : weighted ? 2 : 1];
#pragma unroll 1
    for (int row = job.begin + first; row < job.end; row += step) {
        const int64_t at = row * (int64_t)job.width;
        const int64_t weights = gated ? row % job.taps * (int64_t)job.width : 0;
        float x[KEPT][N], z[KEPT][N], weight[N] = {}, sum = 0.0f;
        if (weighted && lane * N < job.width) mn_decode_load<N>(weight, w, weights + lane * N);
#pragma unroll 1
        for (int from = lane * N, k = 0; from < job.width; from += lanes * N, k++) {
            float now[N], gate[N] = {};
            mn_decode_load<N>(now, job.side[0], at + from);
            if (gated) mn_decode_load<N>(gate, job.side[1], at + from);
#pragma unroll
            for (int j = 0; j < N; j++) {
                const float u = mn_decode_norm_input(job, now[j], gate[j]);
                sum = fmaf(u, u, sum);
#pragma unroll
                for (int i = 0; i < KEPT; i++) {
                    if (i == k) x[i][j] = now[j], z[i][j] = gate[j];
                }
            }
        }
        const float r = mn_decode_rnorm(job, mn_decode_reduce_sum<Block>(sum, block, smem));
#pragma unroll 1
        for (int from = lane * N, k = 0; from < job.width; from += lanes * N, k++) {
            float now[N], gate[N] = {}, out[N];
            if (k >= KEPT) mn_decode_load<N>(now, job.side[0], at + from);
            if (k >= KEPT && gated) mn_decode_load<N>(gate, job.side[1], at + from);
            if (k > 0 && weighted) mn_decode_load<N>(weight, w, weights + from);
#pragma unroll
            for (int j = 0; j < N; j++) {
#pragma unroll
                for (int i = 0; i < KEPT; i++) {
                    if (i == k) now[j] = x[i][j], gate[j] = z[i][j];
                }
                const float u = gated ? now[j] * mn_decode_gate(job, gate[j]) : now[j];
                out[j] = weighted ? u * r * weight[j] : u * r;
            }
            mn_decode_store<N>(y, to, at + from, out);
        }
    }
}

template <typename Block>
__device__ inline void mn_decode_norm(const mn_decode_job &job, const mn_decode_dst &to,
                                      float *smem) {
    if (job.packs) mn_decode_norm_of<Block, MN_DECODE_PACK>(job, to, smem);
    else mn_decode_norm_of<Block, 1>(job, to, smem);
}

/* ---- convolution of one token ---------------------------------------------------------------- */

enum { MN_DECODE_X, MN_DECODE_W, MN_DECODE_BIAS, MN_DECODE_TAIL0, MN_DECODE_Y, MN_DECODE_TAIL };

/* A thread has a channel; it has read what was there before it writes the new tail, which may lie
 * in the same place. */
template <typename Block, int TAPS>
__device__ inline void mn_decode_conv_of(const mn_decode_job &job) {
    constexpr int M = TAPS - 1;
    const int V = job.width;
    const float *tail0 = (const float *)job.side[MN_DECODE_TAIL0].data;
    float *tail = (float *)job.side[MN_DECODE_TAIL].data;
    const mn_operand &w = job.side[MN_DECODE_W], &bias = job.side[MN_DECODE_BIAS];
#pragma unroll 1
    for (int i = job.begin + Block::thread(job.turn); i < job.end; i += Block::threads()) {
        const int row = i / V, channel = i - row * V, before = row * M * V + channel;
        float u[TAPS], weight[TAPS], sum = bias.data ? mn_operand_load(bias, channel) : 0.0f;
#pragma unroll
        for (int m = 0; m < TAPS; m++) weight[m] = mn_operand_load(w, channel * TAPS + m);
#pragma unroll
        for (int m = 0; m < M; m++) u[m] = tail0 ? tail0[before + m * V] : 0.0f;
        u[M] = mn_operand_load(job.side[MN_DECODE_X], i);
#pragma unroll
        for (int m = 0; m < TAPS; m++) sum = fmaf(weight[m], u[m], sum);
        mn_operand_store(job.side[MN_DECODE_Y], i, job.f ? mn_silu(sum).value : sum);
#pragma unroll
        for (int m = 0; m < M; m++) {
            if (tail) tail[before + m * V] = u[m + 1];
        }
    }
}

/* The same for packs of neighbouring channels, whose taps lie together. */
template <typename Block, int TAPS>
__device__ inline void mn_decode_conv_packs(const mn_decode_job &job) {
    constexpr int M = TAPS - 1, N = MN_DECODE_PACK;
    const int V = job.width;
    const float *tail0 = (const float *)job.side[MN_DECODE_TAIL0].data;
    float *tail = (float *)job.side[MN_DECODE_TAIL].data;
    const mn_operand &w = job.side[MN_DECODE_W], &bias = job.side[MN_DECODE_BIAS];
#pragma unroll 1
    for (int i = N * Block::thread(job.turn); i < job.end; i += N * Block::threads()) {
        const int row = i / V, channel = i - row * V, before = row * M * V + channel;
        float u[TAPS][N] = {}, weight[N][TAPS], sum[N] = {};
        mn_decode_load<N>(u[M], job.side[MN_DECODE_X], i);
#pragma unroll
        for (int j = 0; j < N; j++) mn_decode_load<TAPS>(weight[j], w, (channel + j) * TAPS);
#pragma unroll
        for (int m = 0; m < M; m++) {
            if (tail0) mn_load<N>(u[m], tail0, before + m * V);
        }
        if (bias.data) mn_decode_load<N>(sum, bias, channel);
#pragma unroll
        for (int j = 0; j < N; j++) {
#pragma unroll
            for (int m = 0; m < TAPS; m++) sum[j] = fmaf(weight[j][m], u[m][j], sum[j]);
            if (job.f) sum[j] = mn_silu(sum[j]).value;
        }
        mn_decode_store<N>(job.side[MN_DECODE_Y], mn_decode_dst{}, i, sum);
#pragma unroll
        for (int m = 0; m < M; m++) {
            if (tail) mn_store<N>(tail, before + m * V, u[m + 1]);
        }
    }
}

/* The same with any number of taps. */
template <typename Block>
__device__ inline void mn_decode_conv_any(const mn_decode_job &job) {
    const int taps = job.taps, M = taps - 1, V = job.width;
    const float *tail0 = (const float *)job.side[MN_DECODE_TAIL0].data;
    float *tail = (float *)job.side[MN_DECODE_TAIL].data;
    const mn_operand &w = job.side[MN_DECODE_W], &bias = job.side[MN_DECODE_BIAS];
#pragma unroll 1
    for (int i = job.begin + Block::thread(job.turn); i < job.end; i += Block::threads()) {
        const int row = i / V, channel = i - row * V, before = row * M * V + channel;
        const float x = mn_operand_load(job.side[MN_DECODE_X], i);
        float sum = bias.data ? mn_operand_load(bias, channel) : 0.0f;
        for (int m = 0; m < M; m++) {
            const float u = tail0 ? tail0[before + m * V] : 0.0f;
            sum = fmaf(mn_operand_load(w, channel * taps + m), u, sum);
            if (m > 0 && tail) tail[before + (m - 1) * V] = u;
        }
        sum = fmaf(mn_operand_load(w, channel * taps + M), x, sum);
        if (tail && M > 0) tail[before + (M - 1) * V] = x;
        mn_operand_store(job.side[MN_DECODE_Y], i, job.f ? mn_silu(sum).value : sum);
    }
}

template <typename Block>
__device__ inline void mn_decode_conv(const mn_decode_job &job) {
    if constexpr (Block::WIDE) {
        if (job.packs && job.begin == 0 && job.taps == MN_DECODE_TAPS) {
            mn_decode_conv_packs<Block, MN_DECODE_TAPS>(job);
            return;
        }
    }
    if (job.taps == MN_DECODE_TAPS) mn_decode_conv_of<Block, MN_DECODE_TAPS>(job);
    else mn_decode_conv_any<Block>(job);
}

/* Asks the second cache for the inputs, which a step has not ranges since the last one. */
__device__ inline void mn_decode_prefetch(const mn_decode_job &job) {
#pragma unroll
    for (int i = 0; i < MN_DECODE_VIEWS; i++) {
        for (int line = threadIdx.x; line < job.lines[i]; line += blockDim.x) {
            asm volatile("prefetch.global.L2 [%0];" :: "l"(job.side[i].data + line * 128));
        }
    }
}

/* ---- all of them ----------------------------------------------------------------------------- */

/* All threads of the block call; results are there after the next barrier. `smem`: 32 floats. */
template <typename Block = mn_decode_cta>
__device__ inline void mn_decode_run_op(const mn_decode_job &job, const mn_decode_dst &to,
                                        float *smem) {
    switch (job.kind) {
    case MN_DECODE_UNARY:
        mn_decode_elementwise<Block>(job, mn_unary_forward{ (mn_unary)job.f,
            job.side[1].data != nullptr }, to);
        break;
    case MN_DECODE_PAIR:
        mn_decode_elementwise<Block>(
            job, mn_pair_forward{ (mn_pair_kind)job.f, job.scale, job.shift }, to);
        break;
    case MN_DECODE_MOVE: mn_decode_elementwise<Block>(job, mn_identity{}, to); break;
    case MN_DECODE_FILL: mn_decode_elementwise<Block>(job, mn_constant{ job.shift }, to); break;
    case MN_DECODE_ROWS:
        if (job.packs) mn_decode_gather<Block, MN_DECODE_PACK>(job, to);
        else mn_decode_gather<Block, 1>(job, to);
        break;
    case MN_DECODE_CONV: mn_decode_conv<Block>(job); break;
    default: mn_decode_norm<Block>(job, to, smem); break;
    }
}

/* ---- from decode.h --------------------------------------------------------------------------- */

inline int mn_decode_n_inputs(int kind) {
    static const int inputs[] = {
#define INPUTS_DECODE(ins) ins,
#define INPUTS_NO_DECODE(ins)
#define JOB(id, name, ins, outs, workspace, decode, about) INPUTS_##decode(ins)
#define DECODE_JOB(id, ins, outs, weights, about) ins,
#include "kernels/elementwise.def"
#undef INPUTS_DECODE
#undef INPUTS_NO_DECODE
    };
    return inputs[kind];
}

/* The layout of a work that goes element by element; `aligned`: for all sequences. */
inline void mn_decode_set_layout(mn_decode_job *job, const int64_t shape[4], bool aligned) {
    const mn_axes axes = mn_coalesce_axes(shape, job->side);
    bool packs = aligned && axes.n[3] % MN_DECODE_PACK == 0;
    for (const mn_operand &side : job->side) packs &= mn_operand_vec_ok(side, axes);
    job->packs = packs;
    mn_offset_calc_init(&job->layout, axes, packs ? MN_DECODE_PACK : 1);    // few elements fit
}

inline mn_decode_job mn_decode_job_of(const mn_decode_op &work) {
    mn_decode_job job = {};
    job.kind = work.kind, job.f = work.f, job.order = work.order;
    job.scale = (float)work.scale, job.shift = (float)work.shift, job.index = work.index;
    job.rows = (int)work.shape[2], job.width = (int)work.shape[3], job.taps = (int)work.shape[1];
    job.narrow = true;
    bool packs = job.width % MN_DECODE_PACK == 0, aligned = true;
    const int inputs = work.kind == MN_DECODE_ROWS ? 0 : mn_decode_n_inputs(work.kind);
    for (int i = 0; i < MN_DECODE_VIEWS; i++) {
        job.side[i] = mn_operand_of(work.at[i]);
        job.narrow &= !job.side[i].data || !job.side[i].is_f32;
        packs &= (uintptr_t)job.side[i].data % 16 == 0;
        aligned &= work.advance[i] % 16 == 0;
        if (i >= inputs || !work.at[i].data) continue;
        job.lines[i] = (int)mn_ceil_div(work.elements[i] * (job.side[i].is_f32 ? 4 : 2), 128);
    }
    if (work.kind <= MN_DECODE_FILL) {
        mn_decode_set_layout(&job, work.shape, aligned);
        job.end = (int)job.layout.n_vecs;
        return job;
    }
    job.end = work.kind == MN_DECODE_CONV ? job.rows * job.width : job.rows;
    for (mn_operand &side : job.side) side.stride[3] = 1;
    job.packs = packs && aligned;
    return job;
}

}    // namespace mneme::decode

#endif
