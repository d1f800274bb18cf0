/* mlstm_step.cuh - a head of mLSTM through one token (see mlstm.cu), states in place.
 *
 *   m' = max(log f + m, i)     f' = exp(log f + m - m')     w = exp(i - m')
 *   n = f' n + w k     C = f' C + w k v'     o = scale C'q / max(|scale n.q|, exp(-m'))
 *
 * A thread has four neighbouring columns of C in every 16th row. Stabiliser and normaliser belong
 * to all columns: whoever has columns makes what it reads of them from what was there before, and
 * they are stored when all have read that. */
#ifndef MN_KERNELS_CUDA_MLSTM_MLSTM_STEP_CUH
#define MN_KERNELS_CUDA_MLSTM_MLSTM_STEP_CUH

#include "kernels/cuda/mlstm/mlstm.cuh"
#include "kernels/cuda/prim/block.cuh"

namespace mneme::mlstm {

/* Groups of rows; rows that a thread loads at once; parts of n.q, which go over every so many-th
 * row whatever the block has for threads. */
enum { STEP_GROUPS = 16, STEP_ROWS = 8, STEP_PARTS = 512 };

template <typename Block>
struct step_tile {
    static constexpr int quads = Block::size / STEP_GROUPS, columns = 4 * quads;

    struct smem {
        float4 read[STEP_GROUPS][quads];
        float sums[STEP_PARTS / 32];
    };
};

struct step_gates {
    float f, w, m;
};

template <typename T>
__device__ inline step_gates step_gates_of(const mn_mlstm_args &p, int64_t n, int64_t h) {
    const float *first = mn_row<float>(p.m0, n, 0, h);
    const float in = mn_float(*mn_row<T>(p.ipre, n, 0, h));
    const float fall = mn_log_sigmoid(mn_float(*mn_row<T>(p.fpre, n, 0, h)));
    const double decayed = (double)fall + (first ? (double)*first : -INFINITY);
    const double next = fmax(decayed, (double)in);
    const float f = decayed == -INFINITY ? 0.0f : expf((float)(decayed - next));
    const float w = in == -INFINITY ? 0.0f : expf((float)((double)in - next));
    return { f, w, (float)next };
}

/* Number i of the normaliser after the token. */
template <typename T>
__device__ inline float step_norm_at(const mn_mlstm_args &p, const step_gates &g, int64_t n,
                                     int64_t h, int64_t i) {
    const float before = mn_get(mn_row<float>(p.n0, n, 0, h), i);
    return fmaf(g.f, before, g.w * mn_float(mn_row<T>(p.k, n, 0, h)[i]));
}

/* What o is divided by. All threads call. */
template <typename T, typename Block>
__device__ inline float step_divisor(const mn_mlstm_args &p, const step_gates &g, int64_t n,
                                     int64_t h, typename step_tile<Block>::smem &smem) {
    const T *q = mn_row<T>(p.q, n, 0, h);
#pragma unroll
    for (int part = threadIdx.x; part < STEP_PARTS; part += Block::size) {
        float a = 0.0f;
        for (int64_t i = part; i < p.call.K; i += STEP_PARTS) {
            a = fmaf(step_norm_at<T>(p, g, n, h, i), mn_float(q[i]), a);
        }
        a = mn_warp_sum(a);
        if (threadIdx.x % 32 == 0) smem.sums[part / 32] = a;
    }
    Block::sync();
    float a = 0.0f;
#pragma unroll
    for (int warp = 0; warp < STEP_PARTS / 32; warp++) a += smem.sums[warp];
    return mn_fmax(fabsf((float)p.scale * a), expf(-g.m));
}

/* Sums of `local` over the groups of rows, for the thread's four columns; all threads call. */
template <typename Block>
__device__ inline void step_reduce(float (&local)[4], typename step_tile<Block>::smem &smem) {
    const int quad = threadIdx.x % step_tile<Block>::quads;
    const int group = threadIdx.x / step_tile<Block>::quads;
    smem.read[group][quad] = make_float4(local[0], local[1], local[2], local[3]);
    Block::sync();
    local[0] = local[1] = local[2] = local[3] = 0.0f;
#pragma unroll
    for (int at = 0; at < STEP_GROUPS; at++) {
        const float4 x = smem.read[at][quad];
        local[0] += x.x, local[1] += x.y, local[2] += x.z, local[3] += x.w;
    }
    Block::sync();
}

/* A tile of columns from `column` on. */
template <typename T, typename Block>
__device__ inline void step_columns(const mn_mlstm_args &p, const step_gates &g, float divisor,
                                    int64_t n, int64_t h, int64_t column,
                                    typename step_tile<Block>::smem &smem) {
    const int group = threadIdx.x / step_tile<Block>::quads;
    const int64_t j = column + threadIdx.x % step_tile<Block>::quads * 4;
    const int64_t K = p.call.K, V = p.call.V;
    const T *q = mn_row<T>(p.q, n, 0, h), *k = mn_row<T>(p.k, n, 0, h);
    const float *C0 = mn_row<float>(p.C0, n, 0, h);
    float *C = mn_row<float>(p.C, n, 0, h), value[4] = {}, read[4] = {};
    T *o = mn_row<T>(p.o, n, 0, h);
    if (j < V) mn_load<4>(value, mn_row<T>(p.v, n, 0, h), j);
    for (int64_t i0 = group; i0 < K && j < V; i0 += STEP_GROUPS * STEP_ROWS) {
        float S[STEP_ROWS][4];
#pragma unroll
        for (int r = 0; r < STEP_ROWS; r++) {
            const int64_t i = i0 + r * STEP_GROUPS;
            mn_load<4>(S[r], i < K ? C0 : nullptr, i * V + j);
        }
#pragma unroll
        for (int r = 0; r < STEP_ROWS; r++) {
            const int64_t i = i0 + r * STEP_GROUPS;
            if (i >= K) break;
            const float write = g.w * mn_float(k[i]), query = mn_float(q[i]);
#pragma unroll
            for (int c = 0; c < 4; c++) {
                S[r][c] = fmaf(write, value[c], g.f * S[r][c]);
                read[c] = fmaf(query, S[r][c], read[c]);
            }
            if (C) mn_store<4>(C, i * V + j, S[r]);
        }
    }
    step_reduce<Block>(read, smem);
    if (group > 0 || j >= V || !o) return;
#pragma unroll
    for (int c = 0; c < 4; c++) {
        read[c] = divisor == 0.0f ? 0.0f : (float)p.scale * read[c] / divisor;
    }
    mn_store<4>(o, j, read);
}

/* Stabiliser and normaliser after the token. */
template <typename T, typename Block>
__device__ inline void step_shared(const mn_mlstm_args &p, const step_gates &g, int64_t n,
                                   int64_t h) {
    float *ones = mn_row<float>(p.n, n, 0, h), *m = mn_row<float>(p.m, n, 0, h);
    for (int64_t i = threadIdx.x; i < p.call.K && ones; i += Block::size) {
        ones[i] = step_norm_at<T>(p, g, n, h, i);
    }
    if (m && threadIdx.x == 0) *m = g.m;
}

/* The stage of a megakernel: columns from `column` on or, where that is negative, what belongs to
 * all columns of the head. */
template <typename T, typename Block>
__device__ inline void mlstm_step(const mn_mlstm_args &p, int64_t n, int64_t h, int64_t column,
                                  unsigned char *bytes) {
    typedef typename step_tile<Block>::smem smem;
    const step_gates g = step_gates_of<T>(p, n, h);
    if (column < 0) {
        Block::sync();    // all have read the first m
        step_shared<T, Block>(p, g, n, h);
        return;
    }
    const float divisor = step_divisor<T, Block>(p, g, n, h, *(smem *)bytes);
    step_columns<T, Block>(p, g, divisor, n, h, column, *(smem *)bytes);
}

/* Whether four columns come by one access. */
inline bool mlstm_step_supported(const mn_mlstm_args *p) {
    const size_t each = p->call.dtype == MN_BF16 ? sizeof(mn_bf16) : sizeof(float);
    const auto by_fours = [](const void *data, const int64_t *stride, size_t bytes) {
        bool even = (uintptr_t)data % (4 * bytes) == 0;
        for (int i = 0; i < 3; i++) even = even && stride[i] % 4 == 0;
        return even;
    };
    return p->call.V % 4 == 0 && by_fours(p->v.data, p->v.stride, each) &&
           by_fours(p->o.data, p->o.stride, each) &&
           by_fours(p->C0.data, p->C0.stride, sizeof(float)) &&
           by_fours(p->C.data, p->C.stride, sizeof(float)) && !p->csum.data && !p->nsum.data;
}

}    // namespace mneme::mlstm

#endif
