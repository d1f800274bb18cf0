/* mesa_step_wide.cuh - a head through one token of MesaNet (see mesa_step.cuh) for keys of 65 to
 * 128 channels; results are those of mesa.cu to the last bit.
 *
 * M = e^g Hkk + beta k k' + diag lam, and then L of M = L D L' (mesa_solve.cuh), is in shared
 * memory: the registers of a megakernel's threads have no room for it. Of the lower triangle of
 * tiles a warp has two rows and eliminates them; going back, warps w < 4 have the pairs of rows w
 * and 7 - w, as the groups of mesa_output.cuh have, whose order of sums it is, and the others store
 * Hkk. Then all read Hkv once, for o and for the one that is stored. */
#ifndef MN_KERNELS_CUDA_MESA_MESA_STEP_WIDE_CUH
#define MN_KERNELS_CUDA_MESA_MESA_STEP_WIDE_CUH

#include "kernels/cuda/mesa/mesa_output.cuh"

namespace mneme::mesa {

enum {
    WIDE_MAX_K = 128,
    WIDE_TILES = WIDE_MAX_K / 8,
    WIDE_PAIRS = WIDE_TILES / 2,     // of rows of tiles; pair p has 2 p + 2 columns of tiles
    WIDE_BACK_WARPS = 4,
    WIDE_PITCH = WIDE_MAX_K + 4,     // rows and columns of a tile are in different banks
    WIDE_AHEAD = 4,                  // tiles loaded at once
    WIDE_COLUMNS = 64,               // of o, of four warps
};

struct wide_smem {
    double matrix[2 * WIDE_PAIRS * (WIDE_PAIRS + 1)][64];
    double tile[2][WIDE_TILES][64];              // column k, in turn with the one before
    double z[2][8], sum[2][WIDE_BACK_WARPS][8];
    double solved[WIDE_MAX_K];                   // D^-1 z
    alignas(16) float given[WIDE_MAX_K][WIDE_PITCH];
    float key[WIDE_MAX_K], side[WIDE_MAX_K], ridge[WIDE_MAX_K];    // side: scale q, then x
    float2 parts[2][4][32];                      // of o, by quarters of the rows
    float weight;                                // of the token's value in o
};

/* The token of a head, and where its thread is. */
struct wide_ctx {
    int64_t head, h;
    mn_span span;
    int K, V, tiles, warp, lane, row, pair;    // row and pair of columns of a tile
    float decay, beta;
    bool some;                                 // there is a token

    template <typename T>
    __device__ void init(const mn_mesa_args &p, int64_t n, int64_t head_of) {
        h = head_of, head = n * p.call.H + h, span = mn_span_at(p.call, n);
        K = (int)p.call.K, V = (int)p.call.V, tiles = (K + 7) / 8;
        warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = lane / 4, pair = lane % 4;
        some = span.length > 0;
        beta = some ? mn_float(*mn_row<T>(p.beta, span.b, span.t0, h)) : 0.0f;
        decay = some ? expf(mn_mesa_log<T>(p, span.b, span.t0, h)) : 1.0f;
    }

    /* Tile i of pair p's two, column j. */
    __device__ double *tile(wide_smem &smem, int p, int j, int i) const {
        return smem.matrix[2 * (p * (p + 1) + j) + i] + 2 * lane;
    }

    __device__ void load(double (&c)[2][2], wide_smem &smem, int p, int j) const {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const double2 x = *(const double2 *)tile(smem, p, j, i);
            c[i][0] = x.x, c[i][1] = x.y;
        }
    }

    __device__ void store(wide_smem &smem, int p, int j, const double (&c)[2][2]) const {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            *(double2 *)tile(smem, p, j, i) = make_double2(c[i][0], c[i][1]);
        }
    }
};

/* Hkk as it was given, zeros outside; and the token. */
template <typename T, typename Block>
__device__ inline void wide_load(wide_smem &smem, const mn_mesa_args &p, const wide_ctx &ctx) {
    const float *kk = (const float *)p.hkk0.data;
    const float *from = kk ? kk + ctx.head * ctx.K * ctx.K : nullptr;
    const bool packs = ctx.K % 4 == 0 && (uintptr_t)from % 16 == 0;
    const int thread = (int)threadIdx.x;
    if (thread < WIDE_MAX_K) {
        const bool inside = thread < ctx.K, valid = inside && ctx.some;
        const T *k = mn_row<T>(p.k, ctx.span.b, ctx.span.t0, ctx.h);
        const T *q = mn_row<T>(p.q, ctx.span.b, ctx.span.t0, ctx.h);
        smem.key[thread] = valid ? mn_float(k[thread]) : 0.0f;
        smem.side[thread] = valid ? (float)p.scale * mn_float(q[thread]) : 0.0f;
        smem.ridge[thread] = inside ? mn_float(mn_row<T>(p.lam, 0, 0, ctx.h)[thread]) : 1.0f;
    }
#pragma unroll 8
    for (int i = thread; i < WIDE_MAX_K * WIDE_MAX_K / 4; i += Block::size) {
        const int row = i / (WIDE_MAX_K / 4), j = i % (WIDE_MAX_K / 4) * 4;
        const bool inside = from && row < ctx.K && j < ctx.K;
        float4 x = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (inside && packs) {
            x = *(const float4 *)(from + row * ctx.K + j);
        } else if (inside) {
            const float *at = from + row * ctx.K + j;
            x.x = at[0], x.y = j + 1 < ctx.K ? at[1] : 0.0f;
            x.z = j + 2 < ctx.K ? at[2] : 0.0f, x.w = j + 3 < ctx.K ? at[3] : 0.0f;
        }
        *(float4 *)&smem.given[row][j] = x;
    }
}

/* The symmetric part of what was given. */
__device__ inline float wide_front(const wide_smem &smem, int i, int j) {
    return 0.5f * (smem.given[i][j] + smem.given[j][i]);
}

/* This warp's two rows of tiles of M, and of the identity from row K on. */
__device__ inline void wide_matrix(wide_smem &smem, const wide_ctx &ctx) {
    const int p = ctx.warp;
    double left[4] = {};    // the token's key: the first of eight that tensor cores take
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const double k = (double)smem.key[8 * (2 * p + i) + ctx.row];
        if (ctx.pair == 0) left[i] = (double)ctx.beta * k;
    }
    for (int j = 0; j < 2 * p + 2 && 2 * p < ctx.tiles; j++) {
        double c[2][2];
        const double right[2] = { ctx.pair == 0 ? (double)smem.key[8 * j + ctx.row] : 0.0, 0.0 };
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int r = 8 * (2 * p + i) + ctx.row;
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const int u = 8 * j + 2 * ctx.pair + e;
                c[i][e] = (double)(ctx.decay * wide_front(smem, r, u));
                if (j == 2 * p + i) c[i][e] += r == u ? (double)smem.ridge[r] : 0.0;
            }
        }
        mn_mma_f64_k8(c, left, right);
        ctx.store(smem, p, j, c);
    }
}

/* The warp's rows lose what they have of column k, of which -L_ik is left; `less` is -D_k^-1. */
__device__ inline void wide_eliminate(wide_smem &smem, const wide_ctx &ctx, double (&v)[2],
                                      const double (&c)[2][2], const double (&less)[2],
                                      const double (&z)[2], int k) {
    const int p = ctx.warp, last = 2 * p + 1;
    const double from[4] = { c[0][0], c[1][0], c[0][1], c[1][1] };
    double L[2][2] = {};
    mn_mma_f64_k8(L, from, less);
    ctx.store(smem, p, k, L);
    const double left[4] = { L[0][0], L[1][0], L[0][1], L[1][1] };
#pragma unroll 1
    for (int j0 = k + 1; j0 <= last; j0 += WIDE_AHEAD) {
        double to[WIDE_AHEAD][2][2];
#pragma unroll
        for (int j = 0; j < WIDE_AHEAD; j++) ctx.load(to[j], smem, p, min(j0 + j, last));
#pragma unroll
        for (int j = 0; j < WIDE_AHEAD; j++) {
            const double2 x =
                *(const double2 *)&smem.tile[k % 2][min(j0 + j, last)][2 * ctx.lane];
            const double right[2] = { x.x, x.y };
            mn_mma_f64_k8(to[j], left, right);
        }
#pragma unroll
        for (int j = 0; j < WIDE_AHEAD; j++) {
            if (j0 + j <= last) ctx.store(smem, p, j0 + j, to[j]);
        }
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        if (2 * p + i > k) v[i] = fma(L[i][0], z[0], fma(L[i][1], z[1], v[i]));
    }
}

/* L and D^-1 z. All threads call; a barrier stands in front. */
template <typename Block>
__device__ inline void wide_forward(wide_smem &smem, const wide_ctx &ctx) {
    const int p = ctx.warp;
    double v[2] = {};    // what the rows get until their turn
#pragma unroll 1
    for (int k = 0; k < ctx.tiles; k++) {
        const bool has = k / 2 == p, reads = 2 * p + 1 >= k && 2 * p < ctx.tiles;
        double c[2][2] = {};
        if (reads) ctx.load(c, smem, p, k);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            if (!reads || 2 * p + i < k) continue;
            *(double2 *)&smem.tile[k % 2][2 * p + i][2 * ctx.lane] = make_double2(c[i][0], c[i][1]);
        }
        if (has) {
            const double got = mn_mesa_lane_sum(k % 2 ? v[1] : v[0], 1, 2);
            const double own = (double)smem.side[8 * k + ctx.row] + got;
            if (ctx.pair == 0) smem.z[k % 2][ctx.row] = own;
        }
        Block::sync();
        double d[2] = { smem.tile[k % 2][k][2 * ctx.lane], smem.tile[k % 2][k][2 * ctx.lane + 1] };
        mn_mesa_invert(d);
        const double z[2] = { smem.z[k % 2][2 * ctx.pair], smem.z[k % 2][2 * ctx.pair + 1] };
        const double x = mn_mesa_lane_sum(fma(d[0], z[0], d[1] * z[1]), 1, 2);
        if (has && ctx.pair == 0) smem.solved[8 * k + ctx.row] = x;
        const double less[2] = { -d[0], -d[1] };
        if (reads && 2 * p + 1 > k) wide_eliminate(smem, ctx, v, c, less, z, k);
    }
}

/* Every fourth tile of a row of tiles of the new Hkk, by a warp that does not go back. */
__device__ inline void wide_store_front(const wide_smem &smem, const mn_mesa_args &p,
                                        const wide_ctx &ctx, int tile_row) {
    float *kk = (float *)p.hkk.data;
    const int i = 8 * tile_row + ctx.row;
    for (int j = ctx.warp % WIDE_BACK_WARPS; j < ctx.tiles && kk && i < ctx.K;
         j += WIDE_BACK_WARPS) {
#pragma unroll
        for (int e = 0; e < 2; e++) {
            const int u = 8 * j + 2 * ctx.pair + e;
            const float x = wide_front(smem, i, u);
            const float write = fmaf(ctx.beta, smem.key[i] * smem.key[u], 0.0f);
            if (u < ctx.K) {
                kk[(ctx.head * ctx.K + i) * ctx.K + u] = ctx.some ? fmaf(ctx.decay, x, write) : x;
            }
        }
    }
}

/* x takes the place of scale q, and Hkk is stored. All threads call, behind a barrier; one follows
 * each row of tiles. */
template <typename Block>
__device__ inline void wide_back(wide_smem &smem, const mn_mesa_args &p, const wide_ctx &ctx) {
    const bool goes = ctx.warp < WIDE_BACK_WARPS;
    const int pairs[2] = { ctx.warp, WIDE_PAIRS - 1 - ctx.warp };    // of warps that go
    double v[2][2];
#pragma unroll
    for (int n = 0; n < 4; n++) {
        const int at = 8 * (2 * pairs[n / 2] + n % 2) + ctx.row;
        v[n / 2][n % 2] = goes && at < 8 * ctx.tiles ? smem.solved[at] : 0.0;
    }
#pragma unroll 1
    for (int k = ctx.tiles - 1; k >= 0; k--) {
        double sum[2] = {};
        if (!goes) wide_store_front(smem, p, ctx, k);
#pragma unroll
        for (int slot = 0; slot < 2; slot++) {
            double L[2][2];
            const int first = 2 * pairs[slot];
            if (!goes || first + 1 <= k || first >= ctx.tiles) continue;
            ctx.load(L, smem, pairs[slot], k);
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const double x = first + i > k ? v[slot][i] : 0.0;
                sum[0] = fma(x, L[i][0], sum[0]), sum[1] = fma(x, L[i][1], sum[1]);
            }
        }
#pragma unroll
        for (int e = 0; e < 2; e++) {
            sum[e] = mn_mesa_lane_sum(sum[e], 4, 16);
            if (goes && ctx.row == 0) smem.sum[k % 2][ctx.warp][2 * ctx.pair + e] = sum[e];
        }
        Block::sync();
        double back = 0.0;
#pragma unroll
        for (int i = 0; i < WIDE_BACK_WARPS; i++) back += smem.sum[k % 2][i][ctx.row];
#pragma unroll
        for (int n = 0; n < 4; n++) {
            if (!goes || 2 * pairs[n / 2] + n % 2 != k) continue;
            v[n / 2][n % 2] += back;
            if (ctx.pair == 0) smem.side[8 * k + ctx.row] = (float)v[n / 2][n % 2];
        }
    }
}

/* The weight of the token's value in o: beta k.x. By the first warp. */
__device__ inline void wide_weigh(wide_smem &smem, const wide_ctx &ctx) {
    float with = 0.0f;
    for (int i = ctx.lane % 4; i < WIDE_MAX_K; i += 4) {
        with = fmaf(smem.side[i], smem.key[i], with);
    }
    with += __shfl_xor_sync(0xffffffffu, with, 1);
    with += __shfl_xor_sync(0xffffffffu, with, 2);
    if (ctx.lane == 0) smem.weight = ctx.beta * with;
}

/* Two columns of Hkv from j on: what a quarter of its rows gives o, and the new ones. */
template <typename T>
__device__ inline void wide_values(float (&sum)[2], const wide_smem &smem, const mn_mesa_args &p,
                                   const wide_ctx &ctx, int quarter, int j) {
    enum { ROWS = WIDE_MAX_K / 4, AT_ONCE = 8 };
    const float *from = (const float *)p.hkv0.data;
    float *to = (float *)p.hkv.data;
    const T *v = mn_row<T>(p.v, ctx.span.b, ctx.span.t0, ctx.h);
    const bool next = j + 1 < ctx.V;
    const float value[2] = { ctx.some ? mn_float(v[j]) : 0.0f,
                             ctx.some && next ? mn_float(v[j + 1]) : 0.0f };
#pragma unroll 1
    for (int i0 = 0; i0 < ROWS; i0 += AT_ONCE) {
        float h[AT_ONCE][2];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            const int row = quarter * ROWS + i0 + i;
            const int64_t at = (ctx.head * ctx.K + row) * ctx.V + j;
            const bool inside = from && row < ctx.K;
            h[i][0] = inside ? from[at] : 0.0f, h[i][1] = inside && next ? from[at + 1] : 0.0f;
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            const int row = quarter * ROWS + i0 + i;
            const int64_t at = (ctx.head * ctx.K + row) * ctx.V + j;
            const float x = smem.side[row], k = smem.key[row];
#pragma unroll
            for (int e = 0; e < 2; e++) {
                sum[e] = fmaf(x, h[i][e], sum[e]);
                const float write = ctx.some ? fmaf(ctx.beta, k * value[e], 0.0f) : 0.0f;
                const float out = ctx.some ? fmaf(ctx.decay, h[i][e], write) : h[i][e];
                if (to && row < ctx.K && j + e < ctx.V) to[at + e] = out;
            }
        }
    }
#pragma unroll
    for (int e = 0; e < 2; e++) {
        sum[e] *= ctx.decay;
        if (quarter == 0) sum[e] = fmaf(smem.weight, value[e], sum[e]);
    }
}

/* o, and Hkv. All threads call, behind a barrier. */
template <typename T, typename Block>
__device__ inline void wide_output(wide_smem &smem, const mn_mesa_args &p, const wide_ctx &ctx) {
    T *o = mn_row<T>(p.o, ctx.span.b, ctx.span.t0, ctx.h);
    const int quarter = ctx.warp % 4, half = ctx.warp / 4;
#pragma unroll 1
    for (int j0 = 0; j0 < ctx.V; j0 += 2 * WIDE_COLUMNS) {
        const int j = j0 + half * WIDE_COLUMNS + 2 * ctx.lane;
        float sum[2] = {};
        if (j < ctx.V) wide_values<T>(sum, smem, p, ctx, quarter, j);
        smem.parts[half][quarter][ctx.lane] = make_float2(sum[0], sum[1]);
        Block::sync();
        if (quarter == 0 && ctx.some && o) {
            float2 all = smem.parts[half][0][ctx.lane];
#pragma unroll
            for (int i = 1; i < 4; i++) {
                all.x += smem.parts[half][i][ctx.lane].x, all.y += smem.parts[half][i][ctx.lane].y;
            }
            if (j < ctx.V) mn_put(o + j, all.x);
            if (j + 1 < ctx.V) mn_put(o + j + 1, all.y);
        }
        Block::sync();
    }
}

/* Head h of sequence n; all threads call. It is a call of its own: who solves in registers has all
 * of them. */
template <typename T, typename Block>
__device__ __noinline__ void step_head_wide(wide_smem &smem, const mn_mesa_args &p, int64_t n,
                                      int64_t h) {
    static_assert(Block::size == 32 * WIDE_PAIRS, "a warp has a pair of rows of tiles");
    wide_ctx ctx;
    ctx.init<T>(p, n, h);
    wide_load<T, Block>(smem, p, ctx);
    Block::sync();
    wide_matrix(smem, ctx);
    wide_forward<Block>(smem, ctx);
    Block::sync();
    wide_back<Block>(smem, p, ctx);
    Block::sync();
    if (ctx.warp == 0) wide_weigh(smem, ctx);
    Block::sync();
    wide_output<T, Block>(smem, p, ctx);
}

}    // namespace mneme::mesa

#endif
