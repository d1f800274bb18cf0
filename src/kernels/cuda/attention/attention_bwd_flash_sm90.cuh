/* attention_bwd_flash_sm90.cuh - attention and relu_attention backward by Hopper's products, in
 * bf16, for heads of up to 128 columns.
 *
 * Two numbers of each row, a and b, make its weights w and the cotangents dz of its scores again
 * (attention_tiles.cuh).
 *
 * First kernel, a block for 128 queries: scans over the keys and sums dq = scale sum dz k. Where
 * forward left its sums and o, they give a and b = o.do; otherwise a scan before finds them. o was
 * rounded to bf16, and where a row has nearly all its weight on one key g - b has to cancel better
 * than that: the scan sums w (g - b), which is what b lacks, and where that counts beside the sum
 * of |w (g - b)| the block scans once more, its other rows with the b that they had. Second kernel,
 * a block for 128 keys: with keys as rows, dv = sum w do and dk = scale sum dz q. Nothing is added
 * across blocks. Windows of heads of up to 64 columns are served where forward left its sums. */
#ifndef MN_KERNELS_CUDA_ATTENTION_ATTENTION_BWD_FLASH_SM90_CUH
#define MN_KERNELS_CUDA_ATTENTION_ATTENTION_BWD_FLASH_SM90_CUH

#include "kernels/cuda/attention/attention_fwd_flash_sm90.cuh"
#include "kernels/cuda/prim/sync.cuh"

namespace mneme::attention {

enum { MN_BWD_ROWS = 128 };

/* The rows of a block stay (queries and do, or keys and values), those of the other side come in
 * stages of STEP, with two numbers a row where they are queries. Products of less than 128 columns
 * wait for shared memory, so steps are as wide as registers allow. */
template <int D, int STEP, int STAGES>
struct alignas(1024) mn_bwd_smem {
    static constexpr int step = STEP, stages = STAGES;
    static constexpr int wide = MN_BWD_ROWS * D * 2, narrow = STEP * D * 2;
    unsigned char a[wide], b[wide], x[STAGES][narrow], y[STAGES][narrow];
    float rows[STAGES][2][STEP];
    uint64_t resident_full, stage_full[STAGES], stage_empty[STAGES];
    // of a redo, as its registers are short: its keys, and the last query that is left out
    mn_flash_coord redone;
    int wild;
};

template <int D>
using mn_bwd_dq_smem = mn_bwd_smem<D, 128, D == 64 ? 4 : 2>;
template <int D>
using mn_bwd_dkv_smem = mn_bwd_smem<D, D == 64 ? 128 : 64, 4>;

template <typename Smem>
__device__ inline void mn_bwd_init_mbarriers(Smem &smem) {
    if (threadIdx.x == 0) {
        mn_mbarrier_init(&smem.resident_full, MN_WARPGROUP);
        for (int i = 0; i < Smem::stages; i++) {
            mn_mbarrier_init(&smem.stage_full[i], MN_WARPGROUP);
            mn_mbarrier_init(&smem.stage_empty[i], 8);
        }
    }
    __syncthreads();
}

/* Waits for stage n to be there; says that the calling warp is done with it. */
template <typename Smem>
__device__ inline void mn_bwd_wait_full(Smem &smem, int n) {
    mn_mbarrier_wait(&smem.stage_full[n % Smem::stages], n / Smem::stages & 1);
}

template <typename Smem>
__device__ inline void mn_bwd_arrive_empty(Smem &smem, int n) {
    if (threadIdx.x % 32 == 0) mn_mbarrier_arrive(&smem.stage_empty[n % Smem::stages]);
}

/* 64 rows of sums leave through shared memory at `smem` (of 128 rows, these from 64 half on), times
 * `by`; row r of the block is row t + r of head h. SKIPS: from row `skipped` on. */
template <int D, bool SKIPS = false>
__device__ inline void mn_bwd_store_tile(unsigned char *smem, const float (&d)[D / 2], float by,
                                         const mn_out &to, int64_t b, int64_t t, int64_t h,
                                         int n_rows, int width, int skipped = 0) {
    const int half = threadIdx.x / MN_WARPGROUP - 1, thread = threadIdx.x % MN_WARPGROUP;
    const int row = half * 64 + thread / 32 * 16 + thread % 32 / 4;
    if (!to.data) return;
#pragma unroll
    for (int i = 0; i < D / 2; i += 2) {
        const int column = i / 4 * 8 + thread % 4 * 2;
        *(uint32_t *)(smem + mn_swizzle_byte(128, row + i % 4 / 2 * 8, column)) =
            mn_bf16x2(d[i] * by, d[i + 1] * by);
    }
    mn_named_barrier_sync(half + 1, 128);
    constexpr int passes = D / 16, pass_rows = 64 / passes;
    const int first = half * 64 + thread / (D / 8), column = thread % (D / 8) * 8;
    mn_bf16 *const at = mn_row<mn_bf16>(to, b, t + first, h) + column;
    uint4 vecs[passes];    // all on their way together
#pragma unroll
    for (int i = 0; i < passes; i++) {
        vecs[i] = *(const uint4 *)(smem + mn_swizzle_byte(128, first + i * pass_rows, column));
    }
#pragma unroll
    for (int i = 0; i < passes; i++) {
        const int r = first + i * pass_rows;
        if (r >= n_rows || column >= width || (SKIPS && r < skipped)) continue;
        *(uint4 *)(at + i * pass_rows * to.stride[1]) = vecs[i];
    }
}

/* ---- queries --------------------------------------------------------------------------------- */

template <int D, bool has_stats>
__device__ inline void mn_bwd_dq_producer(mn_bwd_dq_smem<D> &smem, const mn_flash_coord &at,
                                         const mn_attn_params &p, int n_tiles, int skipped) {
    using Smem = mn_bwd_dq_smem<D>;
    const int i = threadIdx.x % MN_WARPGROUP, K = (int)p.call.K, V = (int)p.call.V;
    const int64_t b = at.tile.span.b, t0 = at.tile.span.t0, t = t0 + at.tile.first;
    const int64_t j = at.h / (p.call.H / p.call.J);
    const mn_bf16 *k = mn_row<mn_bf16>(p.k, b, t0, j), *v = mn_row<mn_bf16>(p.v, b, t0, j);
    const int n_rows = (int)at.tile.n_rows;
    const int n_keys = (int)(at.before + at.tile.first) + n_rows;
    mn_cp_async_tile<128, D>(mn_smem_addr(smem.a), mn_row<mn_bf16>(p.q, b, t, at.h), p.q.stride[1],
                         n_rows, K, i);
    mn_cp_async_tile<128, D>(mn_smem_addr(smem.b), mn_row<mn_bf16>(p.d_o, b, t, at.h),
                         p.d_o.stride[1], n_rows, V, i);
    int end = has_stats ? n_tiles : 2 * n_tiles;
    for (int n = 0; n < end; n++) {
        const int stage = n % Smem::stages, phase = (n / Smem::stages & 1) ^ 1;
        const int first = ((n < n_tiles ? n : n - n_tiles) + skipped) * Smem::step;
        mn_mbarrier_wait(&smem.stage_empty[stage], phase);
        mn_cp_async_tile<Smem::step, D>(mn_smem_addr(smem.x[stage]), k + first * p.k.stride[1],
                                    p.k.stride[1], n_keys - first, K, i);
        mn_cp_async_tile<Smem::step, D>(mn_smem_addr(smem.y[stage]), v + first * p.v.stride[1],
                                    p.v.stride[1], n_keys - first, V, i);
        mn_cp_async_wait_fence();
        if (n == 0) mn_mbarrier_arrive(&smem.resident_full);
        mn_mbarrier_arrive(&smem.stage_full[stage]);
        if (has_stats && n == n_tiles - 1 && __syncthreads_or(0)) end = 2 * n_tiles;
    }
}

#if MN_HAS_WGMMA

/* Multiplies a group's 64 queries. */
template <int D, bool softmax, bool has_stats, bool has_window>
__device__ inline void mn_bwd_dq_consumer(mn_bwd_dq_smem<D> &smem, const mn_flash_coord &at,
                                       const mn_bwd_params &k, int n_tiles, int skipped) {
    using Smem = mn_bwd_dq_smem<D>;
    constexpr int step = Smem::step;
    constexpr bool overlap = D == 64;    // registers for a product to go on during the next scores
    const mn_attn_params &p = k.f.p;
    const int half = threadIdx.x / MN_WARPGROUP - 1, thread = threadIdx.x % MN_WARPGROUP;
    const int row = half * 64 + thread / 32 * 16 + thread % 32 / 4;
    const int seen = (int)(at.before + at.tile.first) + row + 1;
    const float scale = softmax ? p.scale * 1.4426950408889634f : p.scale;
    const uint32_t q = mn_smem_addr(smem.a) + half * 8192,
        d_o = mn_smem_addr(smem.b) + half * 8192;
    float z[step / 2], g[step / 2], a[2], b[2], tolerance[2];
    const auto start = [&](int n) {
        const int stage = n % Smem::stages;
        mn_bwd_wait_full(smem, n);
        mn_wgmma_fence();
        mn_wgmma_abt<D, 128, step>(z, q, mn_smem_addr(smem.x[stage]));
        mn_wgmma_commit();
        mn_wgmma_abt<D, 128, step>(g, d_o, mn_smem_addr(smem.y[stage]));
        mn_wgmma_commit();
    };
    const auto mask = [&](int tile) {
        const int left = seen - (tile + skipped) * step;
        if (left < step) mn_flash_causal_mask<softmax>(z, left);
        if (has_window && left + 8 > p.window) mn_flash_window_mask(z, left - p.window);
    };
    const auto store_stats = [&](const float (&b)[2]) {
        for (int r = 0; r < 2 && thread % 4 == 0; r++) {
            if (row + 8 * r >= at.tile.n_rows) continue;
            float *to = mn_bwd_row_stats(k, at.tile.span.b, at.h,
                                    at.tile.span.t0 + at.tile.first + row + 8 * r);
            to[0] = a[r];
            to[mn_bwd_stats_stride(k)] = b[r];
        }
    };
    if (has_stats) mn_bwd_load_stats(a, b, tolerance, p, at, row);
    mn_mbarrier_wait(&smem.resident_full, 0);
    int n = 0;
    if (!has_stats) {
        mn_bwd_row_state s = { { -INFINITY, -INFINITY }, { 0.0f, 0.0f }, { 0.0f, 0.0f } };
        for (; n < n_tiles; n++) {
            start(n);
            mn_wgmma_wait<0>();
            mn_fence_operand(z), mn_fence_operand(g);
            mn_bwd_arrive_empty(smem, n);
            mask(n);
            mn_bwd_accumulate_stats<softmax>(s, z, g, scale);
        }
        mn_bwd_finish_stats<softmax>(s, a, b, p, scale);
        store_stats(b);
    }
    float dq[D / 2];
    uint32_t dz[step / 4];
    const auto mma_dq = [&](int n, bool more) {
        mn_wgmma_fence();
        mn_wgmma_ab<step, D>(dq, dz, mn_smem_addr(smem.x[n % Smem::stages]), more);
        mn_wgmma_commit();
    };
    for (;;) {
        float residual_sum[2] = { 0.0f, 0.0f }, size[2] = { 0.0f, 0.0f };
        for (int tile = 0; tile < n_tiles; tile++, n++) {
            if (overlap && tile > 0) mma_dq(n - 1, tile > 1);
            start(n);
            mn_wgmma_wait<1>();
            mn_fence_operand(z);
            if (overlap && tile > 0) mn_bwd_arrive_empty(smem, n - 1);
            mask(tile);
            mn_bwd_weights<softmax>(z, a, scale);
            mn_wgmma_wait<0>();
            mn_fence_operand(g);
#pragma unroll
            for (int i = 0; i < step / 2; i += 2) {
                const int r = i % 4 / 2;
                const float x = mn_bwd_dscore<softmax>(z[i], g[i], a[r], b[r]);
                const float y = mn_bwd_dscore<softmax>(z[i + 1], g[i + 1], a[r], b[r]);
                if (has_stats) residual_sum[r] += x + y, size[r] += fabsf(x) + fabsf(y);
                dz[i / 2] = mn_bf16x2(x, y);
            }
            if (overlap) continue;
            mma_dq(n, tile > 0);
            mn_wgmma_wait<0>();
            mn_bwd_arrive_empty(smem, n);
        }
        if (overlap) {
            mma_dq(n - 1, n_tiles > 1);
            mn_wgmma_wait<0>();
            mn_bwd_arrive_empty(smem, n - 1);
        }
        if (!has_stats || n > n_tiles) break;
        float whole[2];
        const bool inexact = mn_bwd_correct_delta(whole, b, tolerance, residual_sum, size);
        store_stats(whole);
        if (!__syncthreads_or(inexact)) break;
    }
    mn_fence_operand(dq);
    mn_bwd_store_tile<D>(smem.a, dq, p.scale, p.dq, at.tile.span.b,
                         at.tile.span.t0 + at.tile.first, at.h,
                   (int)at.tile.n_rows, (int)p.call.K);
}

#endif

/* ---- keys ------------------------------------------------------------------------------------ */

/* Cotangents of queries up to `wild` are left out by a redo; -1: none. */
template <int D, bool REDO>
__device__ inline void mn_bwd_dkv_producer(mn_bwd_dkv_smem<D> &smem, const mn_flash_coord &at,
                                           const mn_bwd_params &k, const mn_bwd_q_range &range,
                                           int wild) {
    using Smem = mn_bwd_dkv_smem<D>;
    const mn_attn_params &p = k.f.p;
    const int i = threadIdx.x % MN_WARPGROUP, K = (int)p.call.K, V = (int)p.call.V;
    const int64_t b = at.tile.span.b, t0 = at.tile.span.t0, first = t0 + at.tile.first;
    const int n_rows = (int)at.tile.n_rows;
    if (range.n == 0) return;    // no queries
    mn_cp_async_tile<128, D>(mn_smem_addr(smem.a), mn_row<mn_bf16>(p.k, b, first, at.h),
                         p.k.stride[1], n_rows, K, i);
    mn_cp_async_tile<128, D>(mn_smem_addr(smem.b), mn_row<mn_bf16>(p.v, b, first, at.h),
                         p.v.stride[1], n_rows, V, i);
    for (int n = 0; n < range.n * range.heads; n++) {
        const int stage = n % Smem::stages, phase = (n / Smem::stages & 1) ^ 1;
        const int t = range.first + n % range.n * Smem::step, left = (int)range.length - t;
        const int64_t h = range.head0 + n / range.n;
        mn_mbarrier_wait(&smem.stage_empty[stage], phase);
        mn_cp_async_tile<Smem::step, D>(mn_smem_addr(smem.x[stage]),
                                    mn_row<mn_bf16>(p.q, b, t0 + t, h), p.q.stride[1], left, K, i);
        mn_cp_async_tile<Smem::step, D, Smem::step, REDO>(
            mn_smem_addr(smem.y[stage]), mn_row<mn_bf16>(p.d_o, b, t0 + t, h), p.d_o.stride[1],
            left, V, i, wild + 1 - t);
        for (int e = i; e < 2 * Smem::step; e += MN_WARPGROUP) {
            const int r = e % Smem::step, which = e / Smem::step;
            const float *from = mn_bwd_row_stats(k, b, h, t0 + t + r) + which
                * mn_bwd_stats_stride(k);
            const bool inside = r < left && !(REDO && which == 1 && t + r <= wild);
            smem.rows[stage][which][r] = inside ? *from : 0.0f;
        }
        mn_cp_async_wait_fence();
        if (n == 0) mn_mbarrier_arrive(&smem.resident_full);
        mn_mbarrier_arrive(&smem.stage_full[stage]);
    }
}

#if MN_HAS_WGMMA

template <int D, bool softmax, bool has_window, bool REDO>
__device__ inline void mn_bwd_dkv_consumer(mn_bwd_dkv_smem<D> &smem, const mn_flash_coord &at,
                                           const mn_bwd_params &k, const mn_bwd_q_range &range) {
    using Smem = mn_bwd_dkv_smem<D>;
    constexpr int step = Smem::step;
    const mn_attn_params &p = k.f.p;
    const int half = threadIdx.x / MN_WARPGROUP - 1, thread = threadIdx.x % MN_WARPGROUP;
    const int row = half * 64 + thread / 32 * 16 + thread % 32 / 4, column = thread % 4 * 2;
    const int key = (int)(at.tile.first - at.before) + row;    // the first query that sees it
    const float scale = softmax ? p.scale * 1.4426950408889634f : p.scale;
    const uint32_t keys = mn_smem_addr(smem.a) + half * 8192;
    const uint32_t values = mn_smem_addr(smem.b) + half * 8192;
    float z[step / 2], g[step / 2], dk[D / 2] = {}, dv[D / 2] = {};
    uint32_t w[step / 4], dz[step / 4];
    if (range.n > 0) mn_mbarrier_wait(&smem.resident_full, 0);
    for (int n = 0; n < range.n * range.heads; n++) {
        const int stage = n % Smem::stages, t = range.first + n % range.n * step;
        mn_bwd_wait_full(smem, n);
        mn_wgmma_fence();
        mn_wgmma_abt<D, 128, step>(z, keys, mn_smem_addr(smem.x[stage]));
        mn_wgmma_commit();
        mn_wgmma_abt<D, 128, step>(g, values, mn_smem_addr(smem.y[stage]));
        mn_wgmma_commit();
        mn_wgmma_wait<1>();
        mn_fence_operand(z);
        if (t < key + 8) {
#pragma unroll
            for (int i = 0; i < step / 2; i++) {
                if (t + i / 4 * 8 + column + i % 2 < key + i % 4 / 2 * 8) {
                    z[i] = softmax ? -INFINITY : 0.0f;
                }
            }
        }
        if (has_window && t + step > key + p.window) {
#pragma unroll
            for (int i = 0; i < step / 2; i++) {
                const int query = t + i / 4 * 8 + column + i % 2;
                if (query >= key + i % 4 / 2 * 8 + p.window) z[i] = -INFINITY;
            }
        }
#pragma unroll
        for (int i = 0; softmax && i < step / 2; i += 4) {
            const float2 a = *(const float2 *)&smem.rows[stage][0][i / 4 * 8 + column];
            z[i] = mn_bwd_weight<softmax>(z[i], a.x, scale);
            z[i + 1] = mn_bwd_weight<softmax>(z[i + 1], a.y, scale);
            z[i + 2] = mn_bwd_weight<softmax>(z[i + 2], a.x, scale);
            z[i + 3] = mn_bwd_weight<softmax>(z[i + 3], a.y, scale);
        }
        mn_wgmma_wait<0>();
        mn_fence_operand(g);
#pragma unroll
        for (int i = 0; i < step / 2; i += 4) {
            float2 a = {};
            if (!softmax) a = *(const float2 *)&smem.rows[stage][0][i / 4 * 8 + column];
            const float2 b = *(const float2 *)&smem.rows[stage][1][i / 4 * 8 + column];
#pragma unroll
            for (int j = i; j < i + 4; j += 2) {
                const float x = softmax ? z[j] : mn_bwd_weight<softmax>(z[j], a.x, scale);
                const float y = softmax ? z[j + 1] : mn_bwd_weight<softmax>(z[j + 1], a.y, scale);
                w[j / 2] = mn_bf16x2(x, y);
                dz[j / 2] = mn_bf16x2(mn_bwd_dscore<softmax>(z[j], g[j], a.x, b.x),
                                    mn_bwd_dscore<softmax>(z[j + 1], g[j + 1], a.y, b.y));
            }
        }
        mn_wgmma_fence();
        mn_wgmma_ab<step, D>(dv, w, mn_smem_addr(smem.y[stage]), true);
        mn_wgmma_ab<step, D>(dk, dz, mn_smem_addr(smem.x[stage]), true);
        mn_wgmma_commit();
        mn_wgmma_wait<0>();
        mn_bwd_arrive_empty(smem, n);
    }
    mn_fence_operand(dk), mn_fence_operand(dv);
    const int64_t b = at.tile.span.b, first = at.tile.span.t0 + at.tile.first;
    const int n_rows = (int)at.tile.n_rows;
    const int skipped = REDO ? (int)(at.before + smem.wild + 1 - at.tile.first) : 0;
    mn_bwd_store_tile<D, REDO>(smem.a, dk, p.scale, p.dk, b, first, at.h, n_rows, (int)p.call.K,
                               skipped);
    mn_bwd_store_tile<D, REDO>(smem.b, dv, 1.0f, p.dv, b, first, at.h, n_rows, (int)p.call.V,
                               skipped);
}

#endif

/* ---- cotangents that are not finite (docs/internals/causality.md) ---------------------------- */

/* Whether dk and dv are made again behind cotangents that are not finite. */
static const bool redoes_gradients = true;

/* The last of `length` queries whose b shows a cotangent that is not finite, or so large that
 * products of two may not be; -1: none. `b` has a row for each of the `heads` that share a key
 * head, T apart; `found` is of shared memory. All threads of the block call. */
__device__ inline int mn_bwd_last_wild(int *found, const float *b, int64_t heads, int64_t T,
                                       int64_t length) {
    int last = -1;
    if (threadIdx.x == 0) *found = -1;
    for (int64_t h = 0; h < heads; h++) {
        for (int64_t t = threadIdx.x; t < length; t += blockDim.x) {
            if (!(fabsf(b[h * T + t]) <= 1e12f)) last = max(last, (int)t);
        }
    }
    if (!__syncthreads_or(last >= 0)) return -1;
    if (last >= 0) atomicMax(found, last);
    __syncthreads();
    last = *found;
    __syncthreads();
    return last;
}

/* The keys of block (n * J + j) * 2 + i of a redo: 128 of which the first that the last wild query
 * does not see is one, or for i = 1 those behind them, with which that query is loaded where keys
 * do not begin with queries. `wild` becomes the query. No rows where there is nothing to do. b of
 * query t of head h of batch row b lies at [(b * H + h) * T + t]. All threads of the block call. */
__device__ inline mn_flash_coord mn_bwd_redo_coord(int *found, int &wild, const mn_call &call,
                                                   const float *b) {
    const int64_t j = blockIdx.x / 2 % call.J, heads = call.H / call.J;
    mn_flash_coord at = {};
    mn_tile_span &tile = at.tile;
    mn_call keys = call;
    keys.T = keys.L;
    mn_pdl_wait();
    tile.n = blockIdx.x / 2 / call.J, tile.span = mn_span_at(keys, tile.n);
    at.h = j, at.before = mn_keys_before(call);
    const int64_t length = call.cu_seqlens ? tile.span.length : call.T;
    const int64_t row = (tile.span.b * call.H + j * heads) * call.T + tile.span.t0;
    wild = mn_bwd_last_wild(found, b + row, heads, call.T, length);
    const int64_t kept = at.before + wild + 1;
    if (wild < 0 || kept >= tile.span.length) return at;
    const int64_t first = (kept / MN_BWD_ROWS + blockIdx.x % 2) * MN_BWD_ROWS;
    const int64_t first_query = max(first - at.before, (int64_t)0) / 64 * 64;
    if (first >= tile.span.length || first_query > wild) return at;
    tile.first = first, tile.n_rows = min((int64_t)MN_BWD_ROWS, tile.span.length - first);
    return at;
}

/* Block: 128 queries of a head. Loads q, do (128,D) and o (128,D) or nothing, then k and v (keys,D)
 * in tiles of `step`. Stores dq (128,D), and a and b (128) in k.rows for the second kernel.
 * has_stats: forward left lse and o. */
template <int D, bool softmax, bool has_stats, bool has_window>
__global__ void __launch_bounds__(MN_FLASH_THREADS, 1)
attention_bwd_dq_kernel(const __grid_constant__ mn_bwd_params k) {
#if MN_HAS_WGMMA
    extern __shared__ __align__(1024) unsigned char bytes[];
    mn_bwd_dq_smem<D> &smem = *(mn_bwd_dq_smem<D> *)bytes;
    const mn_call &call = k.f.p.call;
    const mn_flash_coord at = mn_flash_coord_of(k.f, blockIdx.x, call, call.H, MN_BWD_ROWS, true);
    if (at.tile.n_rows == 0) return;
    const int n_keys = (int)(at.before + at.tile.first + at.tile.n_rows);
    const int skipped = has_window ? mn_flash_skipped(at, k.f.p, smem.step) : 0;
    const int n_tiles = (n_keys + smem.step - 1) / smem.step - skipped;
    mn_bwd_init_mbarriers(smem);
    if (threadIdx.x < MN_WARPGROUP) {
        mn_setmaxnreg_dec<40>();
        mn_bwd_dq_producer<D, has_stats>(smem, at, k.f.p, n_tiles, skipped);
    } else {
        mn_setmaxnreg_inc<232>();
        mn_bwd_dq_consumer<D, softmax, has_stats, has_window>(smem, at, k, n_tiles, skipped);
    }
#endif
}

/* Block: 128 keys of a key head. Loads k, v (128,D), then q, do (queries,D), a and b of every query
 * that sees them, of all query heads that share the key head. Stores dk, dv (128,D). REDO: of keys
 * behind a query whose cotangent is not finite, mn_bwd_redo_coord. */
template <int D, bool softmax, bool has_window, bool REDO>
__global__ void __launch_bounds__(MN_FLASH_THREADS, 1)
attention_bwd_dkv_kernel(const __grid_constant__ mn_bwd_params k) {
#if MN_HAS_WGMMA
    extern __shared__ __align__(1024) unsigned char bytes[];
    mn_bwd_dkv_smem<D> &smem = *(mn_bwd_dkv_smem<D> *)bytes;
    mn_call keys = k.f.p.call;
    keys.T = keys.L;
    int wild = -1;
    const mn_flash_coord found = [&] {
        if (REDO) {
            return mn_bwd_redo_coord((int *)bytes, wild, k.f.p.call,
                                     k.rows + mn_bwd_stats_stride(k));
        }
        mn_flash_coord coord = mn_flash_coord_of(k.f, blockIdx.x, keys, keys.J, MN_BWD_ROWS, false);
        coord.before = mn_keys_before(k.f.p.call);
        return coord;
    }();
    if (found.tile.n_rows == 0) return;
    if (REDO && threadIdx.x == 0) smem.redone = found, smem.wild = wild;
    mn_bwd_init_mbarriers(smem);
    const mn_flash_coord &at = REDO ? smem.redone : found;
    const mn_bwd_q_range range = mn_bwd_q_range_of<has_window>(at, k.f.p, smem.step);
    if (threadIdx.x < MN_WARPGROUP) {
        mn_setmaxnreg_dec<40>();
        mn_bwd_dkv_producer<D, REDO>(smem, at, k, range, REDO ? smem.wild : -1);
    } else {
        mn_setmaxnreg_inc<232>();
        mn_bwd_dkv_consumer<D, softmax, has_window, REDO>(smem, at, k, range);
    }
#endif
}

/* ---- launches -------------------------------------------------------------------------------- */

inline bool mn_flash_bwd_supported(const mn_attn_params &p) {
    return mn_flash_bwd_serves(p) && mn_device_is_sm90();
}

template <int D, bool softmax, bool has_stats, bool has_window>
inline int mn_flash_bwd_of(const mn_attn_params &p, float *rows, cudaStream_t stream) {
    const int64_t group = p.call.H / p.call.J;
    mn_call keys = p.call;
    keys.T = keys.L;
    int64_t blocks;
    mn_bwd_params k = { mn_flash_params_of(p, p.call, p.call.H, MN_BWD_ROWS, group, &blocks),
        rows };
    int code = mn_flash_launch(attention_bwd_dq_kernel<D, softmax, has_stats, has_window>, k,
                               blocks, sizeof(mn_bwd_dq_smem<D>), stream);
    if (code != cudaSuccess || (!p.dk.data && !p.dv.data)) return code;
    k.f = mn_flash_params_of(p, keys, p.call.J, MN_BWD_ROWS, 1, &blocks);
    code = mn_flash_launch(attention_bwd_dkv_kernel<D, softmax, has_window, false>, k, blocks,
                           sizeof(mn_bwd_dkv_smem<D>), stream);
    const int64_t redone = mn_n_spans(p.call) * p.call.J * 2;
    if (code != cudaSuccess || !redoes_gradients || blocks == 0 || redone > INT32_MAX) return code;
    return mn_launch_smem_behind(true, attention_bwd_dkv_kernel<D, softmax, has_window, true>,
                                 dim3((unsigned)redone), MN_FLASH_THREADS,
                                 sizeof(mn_bwd_dkv_smem<D>), stream, k);
}

template <int D>
inline int mn_flash_bwd_by(const mn_attn_params &p, float *rows, cudaStream_t stream) {
    if (!p.softmax) return mn_flash_bwd_of<D, false, false, false>(p, rows, stream);
    const bool has_stats = p.lse.data && p.o.data;
    return has_stats ? mn_flash_bwd_of<D, true, true, false>(p, rows, stream)
                 : mn_flash_bwd_of<D, true, false, false>(p, rows, stream);
}

inline int mn_flash_bwd(const mn_attn_params &p, float *rows, cudaStream_t stream) {
    const bool wide = mn_max(p.call.K, p.call.V) > 64;
    /* of wide heads a single pass has gone back */
    if (p.window) return mn_flash_bwd_of<64, true, true, true>(p, rows, stream);
    return wide ? mn_flash_bwd_by<128>(p, rows, stream)
                : mn_flash_bwd_by<64>(p, rows, stream);
}

}    // namespace mneme::attention

#endif
