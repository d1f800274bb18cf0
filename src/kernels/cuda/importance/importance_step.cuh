/* importance_step.cuh - columns of a memory through one token of Palimpsa (see
 * ref/importance.c), states in place.
 *
 *   I = a I + (1 - a) ip + k^2 b'     mu = (a I mu + k v') / I     o = scale mu'q
 *   ovar_j = scale^2 sum_i q_i^2 / I_ij                            a = exp g
 *
 * The threads have some columns of a memory, each thread four of them in every so many-th row. */
#ifndef MN_KERNELS_CUDA_IMPORTANCE_IMPORTANCE_STEP_CUH
#define MN_KERNELS_CUDA_IMPORTANCE_IMPORTANCE_STEP_CUH

#include "kernels/cuda/prim/block.cuh"
#include "kernels/cuda/importance/importance.cuh"

namespace mneme::importance {

/* Columns of four, groups of rows, rows of a thread at once. */
template <int THREADS, int COLUMNS, int ROWS>
struct step_tile {
    static constexpr int columns = COLUMNS, quads = COLUMNS / 4, groups = THREADS / quads;
    static constexpr int rows = ROWS, warps = THREADS / 32;

    /* Sums of each warp, for each four columns: what o and what ovar read. */
    struct smem {
        float4 mean[warps][quads], spread[warps][quads];
    };
};

/* Adds up over a warp's groups of rows: its first lanes store. */
template <int QUADS>
__device__ inline void step_warp_sums(float4 (&to)[QUADS], float (&sum)[4]) {
#pragma unroll
    for (int lanes = QUADS; lanes < 32; lanes *= 2) {
#pragma unroll
        for (int c = 0; c < 4; c++) sum[c] += __shfl_xor_sync(0xffffffffu, sum[c], lanes);
    }
    const int lane = threadIdx.x % 32;
    if (lane < QUADS) to[lane] = make_float4(sum[0], sum[1], sum[2], sum[3]);
}

/* And over warps, in their order. */
template <int WARPS, int QUADS>
__device__ inline void step_block_sums(float (&sum)[4], const float4 (&of)[WARPS][QUADS],
                                       int quad) {
    sum[0] = sum[1] = sum[2] = sum[3] = 0.0f;
#pragma unroll
    for (int warp = 0; warp < WARPS; warp++) {
        const float4 x = of[warp][quad];
        sum[0] += x.x, sum[1] += x.y, sum[2] += x.z, sum[3] += x.w;
    }
}

/* What the token adds to its rows: a and (1 - a) ip; NULL where a state is absent. */
struct step_states {
    const float *mu0, *imp0;
    float *mu, *imp;
    float a, fresh, ip;
};

/* Rows of a group, from i0 on, of columns j to j + 3; adds to what o and ovar read. */
template <typename T, typename Tile>
__device__ inline void step_rows(float (&mean)[4], float (&spread)[4], const step_states &s,
                                 const T *q, const T *k, const float (&v)[4], const float (&b)[4],
                                 int64_t i0, int64_t j, int64_t K, int64_t V) {
    float mu[Tile::rows][4], imp[Tile::rows][4];
#pragma unroll
    for (int r = 0; r < Tile::rows; r++) {
        const int64_t i = i0 + r * Tile::groups;
        mn_load<4>(mu[r], i < K ? s.mu0 : nullptr, i * V + j);
        mn_load<4>(imp[r], i < K ? s.imp0 : nullptr, i * V + j);
    }
#pragma unroll
    for (int r = 0; r < Tile::rows; r++) {
        const int64_t i = i0 + r * Tile::groups;
        if (i >= K) break;
        const float key = mn_float(k[i]), query = mn_float(q[i]);
#pragma unroll
        for (int c = 0; c < 4; c++) {
            const float kept = s.a * (s.imp0 ? imp[r][c] : s.ip);
            const float I = fmaf(key * key, b[c], kept + s.fresh) + min_importance;
            const float inverse = 1.0f / I;
            mu[r][c] = fmaf(key, v[c], kept * mu[r][c]) * inverse, imp[r][c] = I;
            mean[c] = fmaf(query, mu[r][c], mean[c]);
            spread[c] = fmaf(query * query, inverse, spread[c]);
        }
        if (s.mu) mn_store<4>(s.mu, i * V + j, mu[r]);
        if (s.imp) mn_store<4>(s.imp, i * V + j, imp[r]);
    }
}

/* Columns of a tile, from `column` on, of head h of sequence n. */
template <typename T, typename Block, typename Tile>
__device__ inline void step_columns(const mn_importance_args &p, int64_t n, int64_t h,
                                    int64_t column, typename Tile::smem &smem) {
    const int quad = threadIdx.x % Tile::quads;
    const int64_t j = column + quad * 4, K = p.call.K, V = p.call.V;
    const float scale = (float)p.scale, g = *mn_row<float>(p.g, n, 0, h);
    const float ip = *mn_row<float>(p.ip, 0, 0, h);
    const step_states s = { mn_row<float>(p.mu0, n, 0, h), mn_row<float>(p.imp0, n, 0, h),
                            mn_row<float>(p.mu, n, 0, h), mn_row<float>(p.imp, n, 0, h),
                            expf(g), -expm1f(g) * ip, ip };
    T *o = mn_row<T>(p.o, n, 0, h), *ovar = mn_row<T>(p.ovar, n, 0, h);
    float v[4] = {}, b[4] = {}, mean[4] = {}, spread[4] = {};
    if (j < V) {
        mn_load<4>(v, mn_row<T>(p.v, n, 0, h), j);
        mn_load<4>(b, mn_row<T>(p.b, n, 0, h), j);
    }
    for (int64_t i = threadIdx.x / Tile::quads; i < K && j < V; i += Tile::groups * Tile::rows) {
        step_rows<T, Tile>(mean, spread, s, mn_row<T>(p.q, n, 0, h), mn_row<T>(p.k, n, 0, h), v, b,
                           i, j, K, V);
    }
    __syncwarp();
    step_warp_sums(smem.mean[threadIdx.x / 32], mean);
    if (ovar) step_warp_sums(smem.spread[threadIdx.x / 32], spread);
    Block::sync();
    if (threadIdx.x >= Tile::quads || j >= V) return;
    step_block_sums(mean, smem.mean, quad);
    if (ovar) step_block_sums(spread, smem.spread, quad);
#pragma unroll
    for (int c = 0; c < 4; c++) mean[c] *= scale, spread[c] *= scale * scale;
    if (o) mn_store<4>(o, j, mean);
    if (ovar) mn_store<4>(ovar, j, spread);
}

/* The stage of a megakernel: eight columns, as many pieces as keep all processors busy. */
enum { STEP_THREADS = 256, STEP_COLUMNS = 8, STEP_ROWS = 2 };

typedef step_tile<STEP_THREADS, STEP_COLUMNS, STEP_ROWS> step_piece;
typedef step_piece::smem step_smem;

/* `bytes` of shared memory hold a step_smem. */
template <typename T, typename Block>
__device__ inline void importance_step(const mn_importance_args &p, int64_t n, int64_t h,
                                       int64_t column, unsigned char *bytes) {
    static_assert(Block::size == STEP_THREADS, "a step's threads");
    step_columns<T, Block, step_piece>(p, n, h, column, *(step_smem *)bytes);
}

/* Whether rows of the view can be read four numbers at a time. */
template <typename View>
inline bool is_vec4_aligned(const View &view, size_t each) {
    bool even = (uintptr_t)view.data % (4 * each) == 0;
    for (int i = 0; i < 3; i++) even = even && view.stride[i] % 4 == 0;
    return even;
}

inline bool importance_step_supported(const mn_importance_args *p) {
    const size_t each = p->call.dtype == MN_BF16 ? sizeof(mn_bf16) : sizeof(float);
    return p->call.V % 4 == 0 && is_vec4_aligned(p->v, each) && is_vec4_aligned(p->b, each) &&
           is_vec4_aligned(p->o, each) && is_vec4_aligned(p->ovar, each)
               && is_vec4_aligned(p->mu0, sizeof(float)) &&
           is_vec4_aligned(p->imp0, sizeof(float)) && is_vec4_aligned(p->mu, sizeof(float)) &&
           is_vec4_aligned(p->imp, sizeof(float));
}

}    // namespace mneme::importance

#endif
