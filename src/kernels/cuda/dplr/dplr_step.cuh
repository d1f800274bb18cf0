/* dplr_step.cuh - columns of a memory through one token of dplr (see ref/dplr.c), states in place.
 *
 *   u = S'a     S = w S + b u' + k v'     o = scale ((w S)'q + u (q.b) + v (q.k)),  w = exp g
 *
 * THREADS of a block have 64 columns, a thread four neighbours of them in STEP_ROWS rows that lie
 * as far apart as there are groups of STEP_QUADS threads. */
#ifndef MN_KERNELS_CUDA_DPLR_DPLR_STEP_CUH
#define MN_KERNELS_CUDA_DPLR_DPLR_STEP_CUH

#include "kernels/cuda/prim/block.cuh"
#include "kernels/cuda/prim/pdl.cuh"
#include "kernels/cuda/prim/sync.cuh"

namespace mneme::dplr {

enum { STEP_SUMS = 10 };    // S'a and (w . S)'q of four columns; q.b and q.k
enum { STEP_QUADS = 16, STEP_ROWS = 8, STEP_COLUMNS = 4 * STEP_QUADS };    // rows of a thread

template <int THREADS>
struct step_smem {
    float sums[THREADS / 32][STEP_QUADS][STEP_SUMS];
};

/* Sums over the rows of a column, in all of THREADS: lanes of a warp first, which lie STEP_QUADS
 * apart. All of the block call. */
template <typename Block, int THREADS>
__device__ inline void step_gather(float (&sums)[STEP_SUMS], step_smem<THREADS> &smem) {
    const int quad = threadIdx.x % STEP_QUADS, warp = threadIdx.x / 32;
    if (threadIdx.x < THREADS) {
#pragma unroll
        for (int i = 0; i < STEP_SUMS; i++) {
            sums[i] += __shfl_xor_sync(0xffffffffu, sums[i], STEP_QUADS);
            if (threadIdx.x % 32 < STEP_QUADS) smem.sums[warp][quad][i] = sums[i];
        }
    }
    Block::sync();
#pragma unroll
    for (int i = 0; i < STEP_SUMS; i++) {
        sums[i] = 0.0f;
#pragma unroll
        for (int k = 0; k < THREADS / 32; k++) sums[i] += smem.sums[k][quad][i];
    }
}

/* Columns from `column` on of head h of sequence n; threads behind THREADS have none. */
template <typename T, typename Block, int THREADS>
__device__ inline void step_columns(const mn_dplr_args &p, int64_t n, int64_t h, int64_t column,
                                    step_smem<THREADS> &smem) {
    constexpr int R = STEP_ROWS, GROUPS = THREADS / STEP_QUADS;
    const int64_t K = p.call.K, V = threadIdx.x < THREADS ? p.call.V : 0;
    const int64_t j = column + threadIdx.x % STEP_QUADS * 4;
    const int first = threadIdx.x / STEP_QUADS;
    const float *from = mn_row<float>(p.state0, n, 0, h);
    float *to = mn_row<float>(p.state, n, 0, h);
    const T *q = mn_row<T>(p.q, n, 0, h), *k = mn_row<T>(p.k, n, 0, h);
    const T *a = mn_row<T>(p.a, n, 0, h), *b = mn_row<T>(p.b, n, 0, h);
    const T *g = mn_row<T>(p.g, n, 0, h), *v = mn_row<T>(p.v, n, 0, h);
    T *o = mn_row<T>(p.o, n, 0, h);
    float S[R][4], enter[R], write[R], value[4] = {}, sums[STEP_SUMS] = {};
#pragma unroll
    for (int r = 0; r < R; r++) {
        const int64_t i = first + GROUPS * r;
        mn_load<4>(S[r], i < K && j < V ? from : nullptr, i * V + j);
    }
    if (j < V) mn_load<4>(value, v, j);
#pragma unroll
    for (int r = 0; r < R; r++) {
        const int64_t i = first + GROUPS * r;
        const bool inside = i < K;
        enter[r] = inside ? mn_float(b[i]) : 0.0f, write[r] = inside ? mn_float(k[i]) : 0.0f;
        const float query = inside ? mn_float(q[i]) : 0.0f, read = inside ? mn_float(a[i]) : 0.0f;
        const float decay = inside ? expf(mn_float(g[i])) : 1.0f;
#pragma unroll
        for (int c = 0; c < 4; c++) {
            sums[c] = fmaf(read, S[r][c], sums[c]);
            S[r][c] *= decay;
            sums[4 + c] = fmaf(query, S[r][c], sums[4 + c]);
        }
        sums[8] = fmaf(query, enter[r], sums[8]);
        sums[9] = fmaf(query, write[r], sums[9]);
    }
    step_gather<Block, THREADS>(sums, smem);
    if (j >= V) return;
#pragma unroll
    for (int r = 0; r < R; r++) {
        const int64_t i = first + GROUPS * r;
        if (i >= K || !to) continue;
#pragma unroll
        for (int c = 0; c < 4; c++) {
            S[r][c] = fmaf(enter[r], sums[c], fmaf(write[r], value[c], S[r][c]));
        }
        mn_store<4>(to, i * V + j, S[r]);
    }
    if (first > 0 || !o) return;
    float out[4];
#pragma unroll
    for (int c = 0; c < 4; c++) {
        out[c] = (float)p.scale * fmaf(sums[8], sums[c], fmaf(sums[9], value[c], sums[4 + c]));
    }
    mn_store<4>(o, j, out);
}

/* The stage of a megakernel: as many threads as the step kernel has for such keys. */
enum { STAGE_THREADS = 256, STAGE_WIDEST = STAGE_THREADS / STEP_QUADS * STEP_ROWS };

template <typename T, typename Block>
__device__ inline void dplr_step(const mn_dplr_args &p, int64_t n, int64_t h, int64_t column,
                                 unsigned char *bytes) {
    enum { HALF = STAGE_THREADS / 2 };
    static_assert(Block::size == STAGE_THREADS, "a step's threads");
    if (p.call.K <= STAGE_WIDEST / 2) {
        step_columns<T, Block, HALF>(p, n, h, column, *(step_smem<HALF> *)bytes);
    } else {
        step_columns<T, Block, STAGE_THREADS>(p, n, h, column,
                                              *(step_smem<STAGE_THREADS> *)bytes);
    }
}

/* Whether four columns come by one access. */
inline bool step_serves(const mn_dplr_args *p) {
    const size_t each = p->call.dtype == MN_BF16 ? sizeof(mn_bf16) : sizeof(float);
    const auto by_fours = [](const void *data, const int64_t *stride, size_t bytes) {
        bool even = (uintptr_t)data % (4 * bytes) == 0;
        for (int i = 0; i < 3; i++) even = even && stride[i] % 4 == 0;
        return even;
    };
    return p->call.V % 4 == 0 && by_fours(p->v.data, p->v.stride, each) &&
           by_fours(p->o.data, p->o.stride, each) &&
           by_fours(p->state0.data, p->state0.stride, sizeof(float)) &&
           by_fours(p->state.data, p->state.stride, sizeof(float));
}

inline bool dplr_step_supported(const mn_dplr_args *p) {
    return p->call.K <= STAGE_WIDEST && step_serves(p);
}

}    // namespace mneme::dplr

#endif
