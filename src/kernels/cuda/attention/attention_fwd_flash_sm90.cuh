/* attention_fwd_flash_sm90.cuh - attention and relu_attention forward by Hopper's products, in
 * bf16, for heads of up to 128 columns.
 *
 *   softmax   m = max(m, z)   l = sum 2^(c z - c m)   O = sum 2^(c z - c m) v / l
 *   relu      O = sum relu(z) v scale / max(scale |z|, eps)
 *
 * with z before its scale and c = scale log2 e. There is a block for each processor, which takes
 * tiles of 128 queries of one head until there are none: one warpgroup brings tiles of 128 keys and
 * values, two multiply, 64 queries each. Scores of the next tile are made while the values of this
 * one are read. Tiles with many keys go first; heads go in sections whose keys and values fit in
 * the second cache. With a window a tile begins at the keys that hold the first of its first row's
 * window.
 *
 * The producer goes on to the next tile while the consumers end this one: its queries come into the
 * other of two stages, its keys and values into stages that are read out, so that only a block's
 * first tile waits for memory. Tiles of 128 rows come by TMA; by cp.async, with zeros behind the
 * end, where rows of the tensor lie behind those that count. Tiles are taken by a ticket in the
 * order of mn_flash_coord_of. Which block has a tile changes no bit of it.
 *
 * REDO, a block for each head: tiles that a value which is not finite has spoilt, with 0 in its
 * place, for those of their rows that do not see it (docs/internals/causality.md). */
#ifndef MN_KERNELS_CUDA_ATTENTION_ATTENTION_FWD_FLASH_SM90_CUH
#define MN_KERNELS_CUDA_ATTENTION_ATTENTION_FWD_FLASH_SM90_CUH

#include "kernels/cuda/attention/attention_tiles.cuh"
#include "kernels/cuda/prim/sync.cuh"
#include "kernels/cuda/prim/tma.cuh"

namespace mneme::attention {

enum { MN_FLASH_KEYS = 128, MN_FLASH_THREADS = 3 * MN_WARPGROUP };

/* `ticket`: NULL where there are no more tiles than blocks. */
struct mn_attn_fwd_params {
    mn_flash_params f;
    CUtensorMap q, k, v;
    int *ticket;
    int n_tiles;    // of all heads
    bool by_tma;
};

/* 128 queries of head h, key head j: rows from `first` on of the sequence that starts at t0 of
 * batch row b, `n_rows` of them; `n_keys` keys are seen, in tiles from `skipped` to `skipped` +
 * n_tiles. No tiles of keys: no more work. */
struct mn_attn_fwd_tile {
    int64_t b, t0;
    int h, j, first, n_rows, before, n_keys, n_tiles, skipped;
};

template <int D>
struct alignas(1024) mn_attn_fwd_smem {
    static constexpr int bytes = 128 * D * 2;    // of a tile of 128 rows
    unsigned char q[2][bytes], k[2][bytes], v[2][bytes];
    mn_attn_fwd_tile tile[2];
    uint64_t q_full[2], k_full[2], v_full[2], q_empty[2], k_empty[2], v_empty[2];
    int ticket[2];
    uint32_t spoilt[2][4];    // of a redo: rows that see a value that is not finite
};

/* ---- tiles ----------------------------------------------------------------------------------- */

template <bool has_window>
__device__ inline mn_attn_fwd_tile mn_attn_fwd_tile_of(const mn_flash_coord &at,
                                                       const mn_attn_params &p) {
    mn_attn_fwd_tile tile;
    tile.b = at.tile.span.b, tile.t0 = at.tile.span.t0;
    tile.h = (int)at.h;
    tile.j = (int)((uint32_t)at.h / ((uint32_t)p.call.H / (uint32_t)p.call.J));
    tile.first = (int)at.tile.first, tile.n_rows = (int)at.tile.n_rows;
    tile.before = (int)at.before, tile.n_keys = tile.before + tile.first + tile.n_rows;
    tile.skipped = has_window ? mn_flash_skipped(at, p, MN_FLASH_KEYS) : 0;
    tile.n_tiles = (tile.n_keys + MN_FLASH_KEYS - 1) / MN_FLASH_KEYS - tile.skipped;
    return tile;
}

/* The producer warpgroup's way through the tiles: its block's number, then what the ticket says. */
template <bool has_window>
struct mn_attn_fwd_scheduler {
    int next, ahead, n_taken;

    __device__ mn_attn_fwd_scheduler() : next((int)blockIdx.x), ahead(0), n_taken(0) {}

    /* Asks for the number after the next; the answer comes while tiles are loaded. */
    __device__ void ask(const mn_attn_fwd_params &f) {
        if (threadIdx.x == 0 && f.ticket) ahead = (int)gridDim.x + atomicAdd(f.ticket, 1);
    }

    __device__ void step(const mn_attn_fwd_params &f, int *ticket) {
        ticket += n_taken++ & 1;
        if (threadIdx.x == 0) *ticket = ahead;
        mn_named_barrier_sync(5, MN_WARPGROUP);
        next = f.ticket ? *ticket : f.n_tiles;
    }

    /* The next tile that has rows; in packed calls some have none. */
    template <typename Smem>
    __device__ mn_attn_fwd_tile tile(Smem &smem, const mn_attn_fwd_params &f, int) {
        const mn_call &call = f.f.p.call;
        while (next < f.n_tiles) {
            const mn_flash_coord at =
                mn_flash_coord_of(f.f, next, call, call.H, MN_FLASH_QUERIES, true);
            ask(f);
            if (at.tile.n_rows > 0) return mn_attn_fwd_tile_of<has_window>(at, f.f.p);
            step(f, smem.ticket);
        }
        return {};
    }
};

/* ---- tiles made again ------------------------------------------------------------------------ */

/* Whether a value of the row's columns is not finite; a warp looks at it together. */
__device__ inline bool mn_attn_redo_is_wild(const mn_bf16 *row, int width) {
    bool wild = false;
    for (int j = threadIdx.x % 32; j < width; j += 32) wild = wild || mn_is_wild(mn_float(row[j]));
    return __any_sync(0xffffffffu, wild);
}

/* How a redo goes through tiles [next, end) of a head, of which the last row's o tells whether
 * values that are not finite came in: such a value is a term of all rows of a tile, with 0 where
 * they do not see it. */
template <bool has_window>
struct mn_attn_redo_scheduler {
    mn_span span;
    int h, next, end;

    __device__ void ask(const mn_attn_fwd_params &) {}

    __device__ void step(const mn_attn_fwd_params &, int *) {}

    /* Marks the rows of a tile that see a value which is not finite; true where others are left. */
    __device__ bool mark(uint32_t (&spoilt)[4], const mn_attn_fwd_tile &tile,
                         const mn_attn_params &p) const {
        const mn_bf16 *v = mn_row<mn_bf16>(p.v, tile.b, tile.t0, tile.j);
        mn_named_barrier_sync(5, MN_WARPGROUP);    // others have read what was there
        if (threadIdx.x < 4) spoilt[threadIdx.x] = 0;
        mn_named_barrier_sync(5, MN_WARPGROUP);
        for (int key = tile.skipped * MN_FLASH_KEYS + (int)threadIdx.x; key < tile.n_keys;
             key += MN_WARPGROUP) {
            if (!mn_redo_has_wild(v + key * p.v.stride[1], p.call.V, 3.40282347e38f)) continue;
            const int from = max(key - tile.before - tile.first, 0);
            int64_t to = tile.n_rows;
            if (has_window) to = min(to, key - tile.before - tile.first + p.window);
            for (int row = from; row < to; row++) atomicOr(&spoilt[row / 32], 1u << row % 32);
        }
        mn_named_barrier_sync(5, MN_WARPGROUP);
        int n_spoilt = 0;
        for (int i = 0; i < 4; i++) n_spoilt += __popc(spoilt[i]);
        return n_spoilt < tile.n_rows;
    }

    template <typename Smem>
    __device__ mn_attn_fwd_tile tile(Smem &smem, const mn_attn_fwd_params &f, int stage) {
        const mn_attn_params &p = f.f.p;
        for (; next < end; next++) {
            mn_flash_coord at = {};
            at.h = h, at.before = mn_keys_before(p.call);
            at.tile.span = span, at.tile.first = (int64_t)next * MN_FLASH_QUERIES;
            at.tile.n_rows = min((int64_t)MN_FLASH_QUERIES, span.length - at.tile.first);
            const int64_t last = span.t0 + at.tile.first + at.tile.n_rows - 1;
            if (!mn_attn_redo_is_wild(mn_row<mn_bf16>(p.o, span.b, last, h), (int)p.call.V)) {
                continue;
            }
            const mn_attn_fwd_tile tile = mn_attn_fwd_tile_of<has_window>(at, p);
            if (!mark(smem.spoilt[stage], tile, p)) continue;
            next++;
            return tile;
        }
        return {};
    }
};

/* What block n * H + h of a redo looks at: without a window rows from the first value on that is
 * not finite see it, and only its tile has others; with one any tile may have. All threads of the
 * block call; no tiles where there is nothing to do. */
template <bool has_window>
__device__ inline mn_attn_redo_scheduler<has_window> mn_attn_redo_of(const mn_attn_params &p) {
    const mn_call &call = p.call;
    mn_attn_redo_scheduler<has_window> redo = {};
    mn_pdl_wait();
    redo.span = mn_span_at(call, blockIdx.x / call.H), redo.h = (int)(blockIdx.x % call.H);
    const int64_t length = redo.span.length, before = mn_keys_before(call);
    const int n_tiles = (int)((length + MN_FLASH_QUERIES - 1) / MN_FLASH_QUERIES);
    const mn_bf16 *o = mn_row<mn_bf16>(p.o, redo.span.b, redo.span.t0, redo.h);
    bool wild = false;
    for (int i = has_window ? 0 : max(n_tiles - 1, 0); i < n_tiles; i++) {
        if (has_window && i % (MN_FLASH_THREADS / 32) != (int)threadIdx.x / 32) continue;
        const int64_t row = min(length, (int64_t)(i + 1) * MN_FLASH_QUERIES) - 1;
        wild = mn_attn_redo_is_wild(o + row * p.o.stride[1], (int)call.V) || wild;
    }
    if (!__syncthreads_or(wild)) return redo;
    redo.end = n_tiles;
    if (has_window) return redo;
    const mn_bf16 *v = mn_row<mn_bf16>(p.v, redo.span.b, redo.span.t0,
                                       redo.h / (call.H / call.J));
    const int64_t cut = mn_redo_first_token(before + length, [&](int64_t t, float most) {
        return mn_redo_has_wild(v + t * p.v.stride[1], call.V, most);
    }) - before;
    redo.next = (int)(max(cut, (int64_t)0) / MN_FLASH_QUERIES);
    redo.end = cut > 0 ? redo.next + 1 : redo.next;
    return redo;
}

/* ---- producer -------------------------------------------------------------------------------- */

/* 128 rows of values with 0 for those that are not finite; 128 threads call, `i` their number. */
template <int D>
__device__ inline void mn_attn_redo_load_values(unsigned char *to, const mn_bf16 *from,
                                                int64_t stride, int n_rows, int width, int i) {
    for (int e = i; e < 128 * D / 8; e += MN_WARPGROUP) {
        const int row = e / (D / 8), column = e % (D / 8) * 8;
        uint4 x = {};
        if (row < n_rows && column < width) x = *(const uint4 *)(from + row * stride + column);
        x.x &= ~mn_bf16x2_wild(x.x), x.y &= ~mn_bf16x2_wild(x.y);
        x.z &= ~mn_bf16x2_wild(x.z), x.w &= ~mn_bf16x2_wild(x.w);
        *(uint4 *)(to + mn_swizzle_byte(128, row, column)) = x;
    }
    mn_fence_proxy_async();
}

#if MN_HAS_WGMMA

/* The two consumer warpgroups start products in turns, so that one makes weights while
 * products of the other run: waits for the turn of group `half`; gives it to the other one, if
 * that waits. */
__device__ inline void mn_flash_scheduler_sync(int half) {
    mn_named_barrier_sync(3 + half, 256);
}

__device__ inline void mn_flash_scheduler_arrive(int half, bool waits) {
    if (waits) mn_named_barrier_arrive(4 - half, 256);
}

/* Where 128 rows of a tensor of up to D columns come from: (b, t, h) and behind it, of which
 * `n_rows` count. */
struct mn_attn_fwd_rows {
    const mn_in *view;
    const CUtensorMap *map;
    int64_t b, t;
    int h, n_rows, width;
    bool by_tma;
};

/* Loads such rows to a stage; the warpgroup calls, and a thread of each warp arrives at `full`. */
template <int D, bool FINITE = false>
__device__ inline void mn_attn_fwd_load(unsigned char *to, uint64_t *full,
                                        const mn_attn_fwd_rows &rows) {
    const int i = threadIdx.x;
    if (rows.by_tma && !FINITE) {
        if (i >= 32) {
            if (i % 32 == 0) mn_mbarrier_arrive(full);
        } else if (mn_elect_one()) {
            mn_mbarrier_arrive_expect_tx(full, 128 * D * 2);
#pragma unroll
            for (int column = 0; column < D; column += 64) {
                mn_tma_load(to + column / 64 * 128 * 128, *rows.map, full, column, rows.h,
                            (int)rows.t, (int)rows.b);
            }
        }
        return;
    }
    const mn_bf16 *from = mn_row<mn_bf16>(*rows.view, rows.b, rows.t, rows.h);
    const int64_t stride = rows.view->stride[1];
    if (FINITE) mn_attn_redo_load_values<D>(to, from, stride, rows.n_rows, rows.width, i);
    else {
        mn_cp_async_tile<128, D>(mn_smem_addr(to), from, stride, rows.n_rows, rows.width, i);
        mn_cp_async_wait_fence();
    }
    mn_mbarrier_arrive_warp(full);
}

/* Queries of each tile, and its keys and values in turns of two stages that go on from tile to
 * tile. */
template <int D, bool REDO, typename Scheduler>
__device__ inline void mn_attn_fwd_producer(mn_attn_fwd_smem<D> &smem, const mn_attn_fwd_params &f,
                                            Scheduler scheduler) {
    const mn_attn_params &p = f.f.p;
    const int K = (int)p.call.K, V = (int)p.call.V;
    for (int w = 0, turn = 0;; w++) {
        const int q_stage = w & 1;
        mn_mbarrier_wait(&smem.q_empty[q_stage], (w >> 1 & 1) ^ 1);
        const mn_attn_fwd_tile tile = scheduler.tile(smem, f, q_stage);
        if (threadIdx.x == 0) smem.tile[q_stage] = tile;
        __syncwarp();
        if (tile.n_tiles == 0) {
            mn_mbarrier_arrive_warp(&smem.q_full[q_stage]);
            return;
        }
        mn_attn_fwd_load<D>(smem.q[q_stage], &smem.q_full[q_stage],
                            { &p.q, &f.q, tile.b, tile.t0 + tile.first, tile.h, tile.n_rows, K,
                              f.by_tma });
        for (int n = 0; n < tile.n_tiles; n++, turn++) {
            const int stage = turn & 1, phase = (turn >> 1 & 1) ^ 1;
            const int key = (n + tile.skipped) * MN_FLASH_KEYS, left = tile.n_keys - key;
            /* Behind the sequence's end the tensor may go on, and keys that no row of the tile sees
             * must not come in with what they have that is not finite. */
            const bool whole = left >= MN_FLASH_KEYS ||
                               (!p.call.cu_seqlens && tile.n_keys == (int)p.call.L);
            mn_mbarrier_wait(&smem.k_empty[stage], phase);
            mn_attn_fwd_load<D>(smem.k[stage], &smem.k_full[stage],
                                { &p.k, &f.k, tile.b, tile.t0 + key, tile.j, left, K,
                                  f.by_tma && whole });
            mn_mbarrier_wait(&smem.v_empty[stage], phase);
            mn_attn_fwd_load<D, REDO>(smem.v[stage], &smem.v_full[stage],
                                      { &p.v, &f.v, tile.b, tile.t0 + key, tile.j, left, V,
                                        f.by_tma && whole });
        }
        scheduler.step(f, smem.ticket);
    }
}

/* ---- consumers ------------------------------------------------------------------------------- */

/* Of a group's 64 queries, what is left to do when all keys are read: o and, with softmax, lse
 * leave, o through the queries' stage, so that rows leave in packs. */
template <int D, bool softmax, bool REDO>
__device__ inline void mn_attn_fwd_finish(mn_attn_fwd_smem<D> &smem, const mn_attn_params &p,
                                          const float (&o)[D / 2], const mn_flash_row_state &s,
                                          int stage) {
    const mn_attn_fwd_tile &tile = smem.tile[stage];
    const int half = threadIdx.x / MN_WARPGROUP - 1, thread = threadIdx.x % MN_WARPGROUP;
    const int row = half * 64 + thread / 32 * 16 + thread % 32 / 4, n_rows = tile.n_rows;
    const int64_t b = tile.b, t = tile.t0 + tile.first, h = tile.h;
    float by[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const float sum = mn_quad_sum(s.sum[r]);
        by[r] = softmax ? 1.0f / sum : p.scale / mn_fmax(p.scale * sqrtf(sum), p.eps);
        if (softmax && !REDO && p.lse.data && thread % 4 == 0 && row + 8 * r < n_rows) {
            *mn_row<float>(p.lse, b, t + row + 8 * r, h) =
                fmaf(s.row_max[r], p.scale, logf(sum));
        }
    }
    if (!p.o.data) return;
#pragma unroll
    for (int i = 0; i < D / 2; i += 2) {
        const int column = i / 4 * 8 + thread % 4 * 2, r = i % 4 / 2;
        *(uint32_t *)(smem.q[stage] + mn_swizzle_byte(128, row + 8 * r, column)) =
            mn_bf16x2(o[i] * by[r], o[i + 1] * by[r]);
    }
    mn_named_barrier_sync(half + 1, 128);
    for (int i = thread; i < 64 * D / 8; i += MN_WARPGROUP) {
        const int r = half * 64 + i / (D / 8), column = i % (D / 8) * 8;
        if (r >= n_rows || column >= p.call.V) continue;
        if (REDO && (smem.spoilt[stage][r / 32] >> r % 32 & 1)) continue;
        *(uint4 *)(mn_row<mn_bf16>(p.o, b, t + r, h) + column) =
            *(const uint4 *)(smem.q[stage] + mn_swizzle_byte(128, r, column));
    }
    mn_fence_proxy_async();    // the next queries come by TMA
}

/* What relu_attention needs of scores beside the weights; relu itself waits for bf16: done here, it
 * has the products wait for each other (C7511), and it takes half the instructions there. */
__device__ inline void mn_attn_fwd_square_sums(const float (&z)[64], mn_flash_row_state &s) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float sum = 0.0f;
#pragma unroll
        for (int i = 2 * r; i < 64; i += i % 2 ? 3 : 1) sum = fmaf(z[i], z[i], sum);
        s.sum[r] += sum;
    }
}

template <bool softmax>
__device__ inline void mn_attn_fwd_pack(uint32_t (&w)[32], const float (&z)[64]) {
    mn_flash_pack_bf16(w, z);
#pragma unroll
    for (int i = 0; !softmax && i < 32; i++) {
        asm("max.NaN.bf16x2 %0, %0, %1;" : "+r"(w[i]) : "r"(0u));
    }
}

/* A multiplying warp group: 64 queries of each tile. */
template <int D, bool softmax, bool has_window, bool REDO>
__device__ inline void mn_attn_fwd_consumer(mn_attn_fwd_smem<D> &smem, const mn_attn_params &p) {
    const int half = __shfl_sync(0xffffffffu, threadIdx.x / MN_WARPGROUP - 1, 0);
    const int thread = threadIdx.x % MN_WARPGROUP;
    const int row = half * 64 + thread / 32 * 16 + thread % 32 / 4;
    const float scale = p.scale * 1.4426950408889634f;
    float o[D / 2], z[64], by[2];
    uint32_t w[32];
    if (half == 1) mn_flash_scheduler_arrive(1, true);    // the first group begins
    for (int tile = 0, turn = 0;; tile++) {
        const int q_stage = tile & 1;
        mn_mbarrier_wait(&smem.q_full[q_stage], tile >> 1 & 1);
        const int n_tiles = smem.tile[q_stage].n_tiles;
        if (n_tiles == 0) return;
        const int seen = smem.tile[q_stage].before + smem.tile[q_stage].first + row + 1 -
                         smem.tile[q_stage].skipped * MN_FLASH_KEYS;
        const uint32_t q = mn_smem_addr(smem.q[q_stage]) + half * 64 * 128;
        mn_flash_row_state s = { { -INFINITY, -INFINITY }, { 0.0f, 0.0f } };
#pragma unroll
        for (int i = 0; i < D / 2; i++) o[i] = 0.0f;
        const auto softmax_tile = [&](int n) {
            const int left = seen - n * MN_FLASH_KEYS;
            if (left < MN_FLASH_KEYS) mn_flash_causal_mask<softmax>(z, left);
            if (has_window && left + 8 > p.window) mn_flash_window_mask(z, left - p.window);
            if (softmax) mn_flash_online_softmax<true, has_window>(z, s, by, scale);
            else mn_attn_fwd_square_sums(z, s);
        };
        const auto scores = [&](int n) {
            const int stage = (turn + n) & 1;
            mn_mbarrier_wait(&smem.k_full[stage], (turn + n) >> 1 & 1);
            if (n > 0) mn_flash_scheduler_sync(half);
            mn_wgmma_fence();
            mn_wgmma_abt<D, 128, 128>(z, q, mn_smem_addr(smem.k[stage]));
            mn_wgmma_commit();
        };
        const auto read = [&](int n) {
            const int stage = (turn + n) & 1;
            mn_mbarrier_wait(&smem.v_full[stage], (turn + n) >> 1 & 1);
            mn_wgmma_fence();
            mn_wgmma_ab<128, D>(o, w, mn_smem_addr(smem.v[stage]), true);
            mn_wgmma_commit();
        };
        scores(0);
        mn_wgmma_wait<0>();
        if (thread % 32 == 0) mn_mbarrier_arrive(&smem.k_empty[turn & 1]);
        softmax_tile(0);
        mn_attn_fwd_pack<softmax>(w, z);
        for (int n = 1; n < n_tiles; n++) {
            scores(n);
            read(n - 1);
            mn_flash_scheduler_arrive(half, true);
            mn_wgmma_wait<1>();
            if (thread % 32 == 0) mn_mbarrier_arrive(&smem.k_empty[(turn + n) & 1]);
            softmax_tile(n);
            mn_wgmma_wait<0>();
            if (thread % 32 == 0) mn_mbarrier_arrive(&smem.v_empty[(turn + n - 1) & 1]);
            if (softmax) {
#pragma unroll
                for (int i = 0; i < D / 2; i++) o[i] *= by[i % 4 / 2];
            }
            mn_attn_fwd_pack<softmax>(w, z);
        }
        read(n_tiles - 1);
        mn_wgmma_wait<0>();
        if (thread % 32 == 0) mn_mbarrier_arrive(&smem.v_empty[(turn + n_tiles - 1) & 1]);
        turn += n_tiles;
        mn_fence_operand(o);
        mn_attn_fwd_finish<D, softmax, REDO>(smem, p, o, s, q_stage);
        mn_mbarrier_arrive_warp(&smem.q_empty[q_stage]);
    }
}

#endif

/* ---- kernel ---------------------------------------------------------------------------------- */

/* Block: tiles of 128 queries of a head. Loads q (128,D), then k and v (128,D) in turns. Stores o
 * (128,D) and lse (128). */
template <int D, bool softmax, bool has_window, bool REDO>
__global__ void __launch_bounds__(MN_FLASH_THREADS, 1)
attention_fwd_flash_kernel(const __grid_constant__ mn_attn_fwd_params f) {
#if MN_HAS_WGMMA
    extern __shared__ __align__(1024) unsigned char bytes[];
    mn_attn_fwd_smem<D> &smem = *(mn_attn_fwd_smem<D> *)bytes;
    mn_attn_redo_scheduler<has_window> redo = {};
    if (!REDO) mn_pdl_launch_dependents();
    if (REDO) {
        redo = mn_attn_redo_of<has_window>(f.f.p);
        if (redo.next == redo.end) return;
    }
    if (threadIdx.x == 0) {
        for (int i = 0; i < 2; i++) {
            mn_mbarrier_init(&smem.q_full[i], MN_WARPGROUP / 32);
            mn_mbarrier_init(&smem.k_full[i], MN_WARPGROUP / 32);
            mn_mbarrier_init(&smem.v_full[i], MN_WARPGROUP / 32);
            mn_mbarrier_init(&smem.q_empty[i], 8);
            mn_mbarrier_init(&smem.k_empty[i], 8);
            mn_mbarrier_init(&smem.v_empty[i], 8);
        }
        mn_mbarrier_init_fence();
    }
    __syncthreads();
    if (threadIdx.x < MN_WARPGROUP) {
        mn_setmaxnreg_dec<40>();
        if constexpr (REDO) mn_attn_fwd_producer<D, true>(smem, f, redo);
        else mn_attn_fwd_producer<D, false>(smem, f, mn_attn_fwd_scheduler<has_window>());
    } else {
        mn_setmaxnreg_inc<232>();
        mn_attn_fwd_consumer<D, softmax, has_window, REDO>(smem, f.f.p);
    }
#endif
}

/* ---- launches -------------------------------------------------------------------------------- */

inline bool mn_flash_supported(const mn_attn_params &p) {
    return mn_flash_serves(p) && mn_device_is_sm90();
}

template <typename Params>
inline int mn_flash_launch(void (*kernel)(Params), const Params &params, int64_t blocks,
                           size_t bytes,
                          cudaStream_t stream) {
    if (blocks == 0) return cudaSuccess;
    if (blocks > INT32_MAX) return cudaErrorNotSupported;
    return mn_launch_smem(kernel, dim3((unsigned)blocks), MN_FLASH_THREADS, bytes, stream,
                               params);
}

/* Bytes of work space: the ticket. */
enum { MN_ATTN_FWD_BYTES = 64 };

/* What the kernel gets; *blocks: how many it has. */
inline mn_attn_fwd_params mn_attn_fwd_params_of(const mn_attn_params &p, void *ticket,
                                                int64_t *blocks) {
    mn_attn_fwd_params f = {};
    mn_call keys = p.call;
    keys.T = keys.L, keys.H = keys.J;
    f.f = mn_flash_params_of(p, p.call, p.call.H, MN_FLASH_QUERIES, p.call.H / p.call.J, blocks);
    f.n_tiles = (int)*blocks;
    f.by_tma = mn_tma_map(&f.q, p.q, p.call, p.call.K, 128) &&
               mn_tma_map(&f.k, p.k, keys, p.call.K, 128) &&
               mn_tma_map(&f.v, p.v, keys, p.call.V, 128);
    const int64_t processors = mn_device_props_current().processors;
    if (*blocks > processors) {
        f.ticket = (int *)ticket;
        *blocks = processors;
    }
    return f;
}

template <int D, bool softmax, bool has_window>
inline int mn_attn_fwd_of(const mn_attn_params &p, void *ticket, cudaStream_t stream) {
    int64_t blocks;
    const auto kernel = attention_fwd_flash_kernel<D, softmax, has_window, false>;
    const auto redo = attention_fwd_flash_kernel<D, softmax, has_window, true>;
    const size_t smem = sizeof(mn_attn_fwd_smem<D>);
    const mn_attn_fwd_params f = mn_attn_fwd_params_of(p, ticket, &blocks);
    if (blocks == 0) return cudaSuccess;
    if (f.f.tiles > INT32_MAX / 2 / mn_max(p.call.B * p.call.H, 1)) return cudaErrorNotSupported;
    cudaError_t code = cudaSuccess;
    if (f.ticket) code = cudaMemsetAsync(f.ticket, 0, sizeof(int), stream);
    if (code != cudaSuccess) return (int)code;
    const int status = mn_flash_launch(kernel, f, blocks, smem, stream);
    if (status != cudaSuccess || !p.o.data) return status;
    return mn_launch_smem_behind(true, redo, dim3((unsigned)(mn_n_spans(p.call) * p.call.H)),
                                 MN_FLASH_THREADS, smem, stream, f);
}

inline int mn_attn_fwd(const mn_attn_params &p, void *ticket, cudaStream_t stream) {
    const bool wide = mn_max(p.call.K, p.call.V) > 64;
    if (p.window && wide) return mn_attn_fwd_of<128, true, true>(p, ticket, stream);
    if (p.window) return mn_attn_fwd_of<64, true, true>(p, ticket, stream);
    if (p.softmax && wide) return mn_attn_fwd_of<128, true, false>(p, ticket, stream);
    if (p.softmax) return mn_attn_fwd_of<64, true, false>(p, ticket, stream);
    if (wide) return mn_attn_fwd_of<128, false, false>(p, ticket, stream);
    return mn_attn_fwd_of<64, false, false>(p, ticket, stream);
}

}    // namespace mneme::attention

#endif
