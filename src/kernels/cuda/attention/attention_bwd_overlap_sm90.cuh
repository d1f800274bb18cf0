/* attention_bwd_overlap_sm90.cuh - the pass of attention_bwd_single_pass_sm90.cuh with its five
 * products in another order: a warpgroup has products under way while it makes weights and
 * cotangents, and the two share no buffer of dq.
 *
 * Tile n of 64 queries, by a warpgroup's 64 keys; in brackets the products that run meanwhile, in
 * the order in which they were started:
 *
 *   start g(n)                              [z(n), g(n)]
 *   weights from z(n); start dv(n)          [g(n), dv(n)]
 *   dz(n) from weights and g(n); start dk(n)               [dv(n), dk(n)]
 *   start dq(n-1), start z(n+1)             [dk(n), dq(n-1), z(n+1)]
 *   dq(n-1) to where the TMA finds it       [z(n+1)]
 *
 * dq is made a tile later, when both groups have written their dz. Each group has its half of the
 * head's columns of dq in a buffer and semaphores of its own, and a thread that adds it to the sums
 * of all blocks. Queries have three stages, as z(n+1) is started before tile n is done with;
 * cotangents two. One warp loads the ones and sums dz over the keys, one loads the others. */
#ifndef MN_KERNELS_CUDA_ATTENTION_ATTENTION_BWD_OVERLAP_SM90_CUH
#define MN_KERNELS_CUDA_ATTENTION_ATTENTION_BWD_OVERLAP_SM90_CUH

#include "kernels/cuda/attention/attention_bwd_single_pass_sm90.cuh"

namespace mneme::attention {

struct alignas(1024) mn_overlap_smem {
    static constexpr int tile = MN_SINGLE_PASS_STEP * 128 * 2, half = MN_SINGLE_PASS_ACC / 2;
    unsigned char a[2 * tile], b[2 * tile], x[3][tile], y[2][tile];    // k, v; q, do
    unsigned char dz[2][tile];                                        // rows are keys
    float dq[2][half];                                                // of the groups
    float off[4][8 * MN_SINGLE_PASS_STEP];                            // sums of dz over 16 keys
    /* Of a stage of cotangents: numbers of its queries, where to note keys, queries that are there,
     * and queries from the first that sees the block's first key. */
    float rows[2][2][MN_SINGLE_PASS_STEP];
    int *dominant_key[2];
    int left[2], past[2];
    uint64_t k_full, v_full, x_full[3], x_empty[3], y_full[2], y_empty[2], dz_full[2], dz_empty[2];
    uint64_t dq_full[2], dq_empty[2];    // of the groups
    uint64_t off_full[4];
    mn_single_pass_coord coord;
};

#if MN_HAS_WGMMA

/* 64 rows of up to 128 columns to a tile, the top of one of TILE_ROWS rows; a warp calls, lane i
 * brings piece i % 16 of every second row. */
template <int TILE_ROWS>
__device__ inline void mn_overlap_load_rows(uint32_t to, const mn_bf16 *from, int64_t stride,
                                            int n_rows, int width) {
    const int vec = threadIdx.x % 16, row = threadIdx.x % 32 / 16;
    const int left = vec * 8 < width ? n_rows - row : 0;
    const mn_bf16 *at = from + row * stride + vec * 8;
    uint32_t place[4];
#pragma unroll
    for (int i = 0; i < 4; i++) place[i] = to + mn_swizzle_byte(TILE_ROWS, row + 2 * i, vec * 8);
#pragma unroll
    for (int r = 0; r < MN_SINGLE_PASS_STEP; r += 2) {
        mn_cp_async_16(place[r / 2 % 4] + r / 8 * 1024, at, r < left);    // else nothing is read
        at += 2 * stride;
    }
}

/* The block's 128 keys or values. */
__device__ inline void mn_overlap_load_keys(unsigned char *to, const mn_in &view,
                                            const mn_single_pass_coord &coord, int width) {
    for (int r = 0; r < MN_SINGLE_PASS_KEYS; r += MN_SINGLE_PASS_STEP) {
        const int left = coord.n_keys - r;
        const int64_t t = coord.t0 + coord.key + (left > 0 ? r : 0);
        mn_overlap_load_rows<128>(mn_smem_addr(to) + r * 128,
                                  mn_row<mn_bf16>(view, coord.b, t, coord.h), view.stride[1], left,
                                  width);
    }
}

/* The sums over keys of dz of tile n, which is there when both groups have written it, for the TMA:
 * of the first and the second 64 keys four rows each, of every fourth key. A warp calls. */
__device__ inline void mn_overlap_sum_dz(mn_overlap_smem &smem, int n) {
    const int vec = threadIdx.x % 8, row0 = threadIdx.x % 32 / 8;
    mn_mbarrier_wait(&smem.dz_full[n & 1], n / 2 & 1);
#pragma unroll 1
    for (int half = 0; half < 2; half++) {
        float sum[8] = {};
#pragma unroll 2
        for (int i = 0; i < 16; i++) {
            const int row = half * 64 + 4 * i + row0;
            const uint4 x = *(const uint4 *)(smem.dz[n & 1] + mn_swizzle_byte(128, row, vec * 8));
            const uint32_t words[4] = { x.x, x.y, x.z, x.w };
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const float2 pair = mn_single_pass_unpack(words[j]);
                sum[2 * j] += pair.x, sum[2 * j + 1] += pair.y;
            }
        }
        float *to = smem.off[n & 3] + (half * 4 + row0) * MN_SINGLE_PASS_STEP + vec * 8;
        *(float4 *)to = make_float4(sum[0], sum[1], sum[2], sum[3]);
        *(float4 *)(to + 4) = make_float4(sum[4], sum[5], sum[6], sum[7]);
    }
    cuda::ptx::fence_proxy_async(cuda::ptx::space_shared);
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
        mn_mbarrier_arrive(&smem.off_full[n & 3]);
        mn_mbarrier_arrive(&smem.dz_empty[n & 1]);
    }
}

/* A warp: keys, then queries of every tile; while they come it sums dz of the tile two before. */
__device__ inline void mn_overlap_load_queries(mn_overlap_smem &smem, const mn_attn_params &p) {
    const mn_single_pass_coord &coord = smem.coord;
    if (coord.all == 0) return;    // no query sees the keys: zeros leave at once
    mn_overlap_load_keys(smem.a, p.k, coord, (int)p.call.K);
    mn_single_pass_tile_iter at(coord);
    for (int n = 0, stage = 0, phase = 1; n < coord.all + 2; n++) {
        if (n < coord.all) {
            mn_mbarrier_wait(&smem.x_empty[stage], phase);
            mn_overlap_load_rows<64>(mn_smem_addr(smem.x[stage]),
                                     mn_row<mn_bf16>(p.q, coord.b, coord.t0 + at.t, at.h),
                                     p.q.stride[1], coord.length - at.t, (int)p.call.K);
            at.next();
        }
        if (n >= 2) mn_overlap_sum_dz(smem, n - 2);
        if (n >= coord.all) continue;
        mn_cp_async_wait_fence();
        if (n == 0) mn_mbarrier_arrive(&smem.k_full);
        mn_mbarrier_arrive(&smem.x_full[stage]);
        if (++stage == 3) stage = 0, phase ^= 1;
    }
}

/* Cotangents of a tile and its rows' numbers to a stage. */
__device__ inline void mn_overlap_load_tile(mn_overlap_smem &smem, const mn_single_pass &k,
                                            const mn_single_pass_tile_iter &at, int n) {
    const mn_single_pass_coord &coord = smem.coord;
    const mn_attn_params &p = k.f.p;
    const int lane = threadIdx.x % 32, stage = n % 2, left = coord.length - at.t;
    const int64_t t = coord.t0 + at.t, row = mn_single_pass_row(p.call, coord.b, at.h, t);
    mn_mbarrier_wait(&smem.y_empty[stage], (n / 2 & 1) ^ 1);
    mn_overlap_load_rows<64>(mn_smem_addr(smem.y[stage]),
                             mn_row<mn_bf16>(p.d_o, coord.b, t, at.h), p.d_o.stride[1], left,
                             (int)p.call.V);
    if (lane == 0) {
        smem.dominant_key[stage] = k.dominant_key + row;
        smem.left[stage] = left;
        smem.past[stage] = at.t - coord.seen;
    }
#pragma unroll
    for (int i = lane; i < MN_SINGLE_PASS_STEP; i += 32) {
        smem.rows[stage][0][i] = i < left ? k.a[row + i] : 0.0f;
        smem.rows[stage][1][i] = i < left ? k.b[row + i] : 0.0f;
    }
}

/* Another: values, then cotangents of every tile. */
__device__ inline void mn_overlap_load_cotangents(mn_overlap_smem &smem, const mn_single_pass &k) {
    const mn_single_pass_coord &coord = smem.coord;
    if (coord.all == 0) return;
    mn_overlap_load_keys(smem.b, k.f.p.v, coord, (int)k.f.p.call.V);
    mn_single_pass_tile_iter at(coord);
    for (int n = 0; n < coord.all; n++, at.next()) {
        mn_overlap_load_tile(smem, k, at, n);
        mn_cp_async_wait_fence();
        if (n == 0) mn_mbarrier_arrive(&smem.v_full);
        mn_mbarrier_arrive(&smem.y_full[n % 2]);
    }
}

/* A thread of each group: adds the group's half of dq of every tile, and its sums of dz, to those
 * of all blocks when it is the block's turn (mn_single_pass_accumulate_dq). */
template <bool has_window>
__device__ inline void mn_overlap_accumulate_dq(mn_overlap_smem &smem, const mn_single_pass &k,
                                                int half) {
    const mn_single_pass_coord &coord = smem.coord;
    const int rank = coord.key / MN_SINGLE_PASS_KEYS;
    mn_single_pass_tile_iter at(coord);
    for (int n = 0; n < coord.all; n++, at.next()) {
        const int64_t chunk =
            (coord.slot + at.t / MN_SINGLE_PASS_STEP) * k.f.p.call.H + at.h;
        int *semaphore = k.semaphores + chunk * 2 + half;
        float *to = k.sums + chunk * MN_SINGLE_PASS_CHUNK;
        const int64_t sees = at.t + coord.key - coord.seen + 1;    // of the first query
        const bool adds = has_window ? rank > mn_window_first(sees, k.f.p.window)
                                                  / MN_SINGLE_PASS_KEYS
                                     : rank > 0;
        int now = 0;
        while (adds && now != rank) now = mn_load_acquire(semaphore);
        mn_mbarrier_wait(&smem.off_full[n & 3], n >> 2 & 1);
        mn_mbarrier_wait(&smem.dq_full[half], n & 1);
        cuda::ptx::fence_proxy_async();
        mn_tma_accumulate_1d(to + half * mn_overlap_smem::half, smem.dq[half],
                             mn_overlap_smem::half * 4, adds);
        mn_tma_accumulate_1d(to + MN_SINGLE_PASS_ACC + half * 4 * MN_SINGLE_PASS_STEP,
                             smem.off[n % 4] + half * 4 * MN_SINGLE_PASS_STEP,
                             4 * MN_SINGLE_PASS_STEP * 4, adds);
        cuda::ptx::cp_async_bulk_commit_group();
        mn_tma_store_wait_read();
        mn_mbarrier_arrive(&smem.dq_empty[half]);
        mn_tma_store_wait();
        cuda::ptx::fence_proxy_async();
        asm volatile("fence.acq_rel.gpu;" ::: "memory");
        mn_store_release(semaphore, rank + 1);
    }
}

/* The thread's number among consumers, asked for again where it is used: registers that depend on
 * it do not stay while products need all there are. */
__device__ inline int mn_overlap_thread(void) {
    int thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    return thread - MN_WARPGROUP;
}

/* The first row and column that such a thread has of a product of 128 rows. */
__device__ inline int mn_overlap_row(int thread) {
    return thread / 32 * 16 + thread % 32 / 4;
}

__device__ inline int mn_overlap_column(int thread) {
    return thread % 4 * 2;
}

/* A group's half of dq of tile n to where the TMA finds it, as registers lie. */
__device__ inline void mn_overlap_stage_dq(mn_overlap_smem &smem, const float (&dq)[32], int half,
                                           int n) {
    const int thread = mn_overlap_thread() % MN_WARPGROUP;
    mn_mbarrier_wait(&smem.dq_empty[half], (n & 1) ^ 1);
#pragma unroll
    for (int i = 0; i < 32; i += 4) {
        *(float4 *)&smem.dq[half][i * 128 + thread * 4] =
            make_float4(dq[i], dq[i + 1], dq[i + 2], dq[i + 3]);
    }
    cuda::ptx::fence_proxy_async(cuda::ptx::space_shared);
    __syncwarp();
    if (thread % 32 == 0) mn_mbarrier_arrive(&smem.dq_full[half]);
}

/* Scores of a tile of queries become weights. */
template <bool has_window>
__device__ inline void mn_overlap_weights(float (&z)[32], const mn_overlap_smem &smem, int stage,
                                          const mn_attn_params &p) {
    const int thread = mn_overlap_thread();
    const int row = mn_overlap_row(thread), column = mn_overlap_column(thread);
    const float scale = p.scale * 1.4426950408889634f;
    const int unseen = row - smem.past[stage] - column;    // queries before the first to see
    if (unseen > -8) {
#pragma unroll
        for (int i = 0; i < 32; i++) {
            if (i / 4 * 8 + i % 2 < unseen + i % 4 / 2 * 8) z[i] = -INFINITY;
        }
    }
    if (has_window && unseen + p.window < MN_SINGLE_PASS_STEP) {
#pragma unroll
        for (int i = 0; i < 32; i++) {
            if (i / 4 * 8 + i % 2 >= unseen + p.window + i % 4 / 2 * 8) z[i] = -INFINITY;
        }
    }
#pragma unroll
    for (int i = 0; i < 32; i += 4) {
        const float2 a = *(const float2 *)&smem.rows[stage][0][i / 4 * 8 + column];
#pragma unroll
        for (int j = i; j < i + 4; j++) z[j] = mn_exp2(fmaf(z[j], scale, j % 2 ? -a.y : -a.x));
    }
}

/* g becomes dz = w (g - b). */
__device__ inline void mn_overlap_dscores(float (&g)[32], const float (&z)[32],
                                          const float (&rows)[2][MN_SINGLE_PASS_STEP]) {
    const int column = mn_overlap_column(mn_overlap_thread());
#pragma unroll
    for (int i = 0; i < 32; i += 4) {
        const float2 b = *(const float2 *)&rows[1][i / 4 * 8 + column];
#pragma unroll
        for (int j = i; j < i + 4; j++) g[j] = z[j] * (g[j] - (j % 2 ? b.y : b.x));
    }
}

/* Whether a key may have more than half of the weight of a query. */
__device__ inline bool mn_overlap_dominates(const uint32_t (&w)[16]) {
    uint32_t most[4] = { w[0], w[1], w[2], w[3] };
#pragma unroll
    for (int i = 4; i < 16; i++) asm("max.bf16x2 %0, %0, %1;" : "+r"(most[i % 4]) : "r"(w[i]));
    asm("max.bf16x2 %0, %0, %1;" : "+r"(most[0]) : "r"(most[1]));
    asm("max.bf16x2 %0, %0, %1;" : "+r"(most[2]) : "r"(most[3]));
    asm("max.bf16x2 %0, %0, %1;" : "+r"(most[0]) : "r"(most[2]));
    const float2 pair = mn_single_pass_unpack(most[0]);
    return fmaxf(pair.x, pair.y) > 0.5f;
}

/* Notes such keys (mn_single_pass_note_dominant) by weights in float32: one that bf16 has above
 * half is above the middle of half and bf16's next number. */
__device__ inline void mn_overlap_note_dominant(const mn_overlap_smem &smem, const float (&z)[32],
                                                int stage) {
    const int thread = mn_overlap_thread();
    const int row = mn_overlap_row(thread), column = mn_overlap_column(thread);
    int *dominant_key = smem.dominant_key[stage] + column;
    const int left = smem.left[stage] - column, key = smem.coord.key + row;
#pragma unroll
    for (int i = 0; i < 32; i++) {
        const int query = i / 4 * 8 + i % 2;
        if (z[i] > 0.501953125f && query < left) dominant_key[query] = key + i % 4 / 2 * 8;
    }
}

/* dz to where both groups' products of dq find it. */
__device__ inline void mn_overlap_store_dz(unsigned char *to, const uint32_t (&dz)[16]) {
    const int thread = mn_overlap_thread();
    const int row = mn_overlap_row(thread), column = mn_overlap_column(thread);
#pragma unroll
    for (int i = 0; i < 16; i++) {
        *(uint32_t *)(to + mn_swizzle_byte(128, row + i % 2 * 8, i / 2 * 8 + column)) = dz[i];
    }
    cuda::ptx::fence_proxy_async(cuda::ptx::space_shared);
    __syncwarp();
}

/* Multiplies a group's 64 keys. */
template <bool has_window>
__device__ inline void mn_overlap_consumer(mn_overlap_smem &smem, const mn_single_pass &k) {
    const mn_single_pass_coord &coord = smem.coord;
    const mn_attn_params &p = k.f.p;
    const int half = __shfl_sync(0xffffffffu, threadIdx.x / MN_WARPGROUP - 1, 0);
    const bool leads = threadIdx.x % 32 == 0;
    const uint32_t keys = mn_smem_addr(smem.a) + half * 8192;
    const uint32_t values = mn_smem_addr(smem.b) + half * 8192;
    const uint32_t keys_trans = mn_smem_addr(smem.a) + half * 16384;    // 64 columns of all keys
    float z[32], g[32], dq[32], dk[64] = {}, dv[64] = {};
    uint32_t w[16];    // weights, then dz
    const auto start_scores = [&](int stage, int phase) {
        mn_mbarrier_wait(&smem.x_full[stage], phase);
        mn_wgmma_fence();
        mn_wgmma_abt<128, 128, 64>(z, keys, mn_smem_addr(smem.x[stage]));
        mn_wgmma_commit();
    };
    /* What tile n adds to dk, and dq of the tile before: of none at first. */
    const auto start_grads = [&](int x_stage, int n) {
        mn_fence_operand(w);
        mn_wgmma_fence();
        mn_wgmma_ab<64, 128>(dk, w, mn_smem_addr(smem.x[x_stage]), true);
        mn_wgmma_commit();
        if (n > 0) mn_mbarrier_wait(&smem.dz_full[n & 1 ^ 1], (n - 1) / 2 & 1);
        mn_wgmma_fence();
        mn_single_pass_wgmma_dq(dq, keys_trans, mn_smem_addr(smem.dz[n & 1 ^ 1]));
        mn_wgmma_commit();
    };
    const auto end_grads = [&](int x_stage, int n) {
        mn_fence_operand(dq);
        if (leads) {
            mn_mbarrier_arrive(&smem.x_empty[x_stage]);
            mn_mbarrier_arrive(&smem.y_empty[n & 1]);
            if (n > 0) mn_mbarrier_arrive(&smem.dz_empty[n & 1 ^ 1]);
        }
        if (n > 0) mn_overlap_stage_dq(smem, dq, half, n - 1);
    };
    /* From scores, which are under way, to cotangents of scores, and dv. */
    const auto softmax_tile = [&](int n) {
        const int stage = n & 1;
        mn_mbarrier_wait(&smem.y_full[stage], n / 2 & 1);
        mn_wgmma_fence();
        mn_wgmma_abt<128, 128, 64>(g, values, mn_smem_addr(smem.y[stage]));
        mn_wgmma_commit();
        mn_wgmma_wait<1>();
        mn_fence_operand(z);
        mn_overlap_weights<has_window>(z, smem, stage, p);
#pragma unroll
        for (int i = 0; i < 16; i++) w[i] = mn_bf16x2(z[2 * i], z[2 * i + 1]);
        const bool dominates = mn_overlap_dominates(w);
        mn_fence_operand(w);
        mn_wgmma_fence();
        mn_wgmma_ab<64, 128>(dv, w, mn_smem_addr(smem.y[stage]), true);
        mn_wgmma_commit();
        if (dominates) mn_overlap_note_dominant(smem, z, stage);
        mn_wgmma_wait<1>();
        mn_fence_operand(g);
        mn_overlap_dscores(g, z, smem.rows[stage]);
        mn_mbarrier_wait(&smem.dz_empty[stage], (n / 2 & 1) ^ 1);
        mn_wgmma_wait<0>();    // dz takes the registers of w; none runs when the loop turns
#pragma unroll
        for (int i = 0; i < 16; i++) w[i] = mn_bf16x2(g[2 * i], g[2 * i + 1]);
        mn_overlap_store_dz(smem.dz[stage], w);
        if (leads) mn_mbarrier_arrive(&smem.dz_full[stage]);
    };
    if (coord.all > 0) {
        const int last = coord.all - 1;
        int x_stage = 0, x_phase = 0;    // of tile n - 1
        mn_mbarrier_wait(&smem.k_full, 0);
        mn_mbarrier_wait(&smem.v_full, 0);
        start_scores(0, 0);
        softmax_tile(0);
        for (int n = 1; n <= last; n++) {
            const int next = x_stage == 2 ? 0 : x_stage + 1;
            x_phase ^= next == 0;
            start_grads(x_stage, n - 1);
            start_scores(next, x_phase);
            mn_wgmma_wait<1>();
            end_grads(x_stage, n - 1);
            softmax_tile(n);
            x_stage = next;
        }
        start_grads(x_stage, last);
        mn_wgmma_wait<0>();
        end_grads(x_stage, last);
        mn_mbarrier_wait(&smem.dz_full[last & 1], last / 2 & 1);
        mn_wgmma_fence();
        mn_single_pass_wgmma_dq(dq, keys_trans, mn_smem_addr(smem.dz[last & 1]));
        mn_wgmma_commit();
        mn_wgmma_wait<0>();
        mn_fence_operand(dq);
        mn_overlap_stage_dq(smem, dq, half, last);
    }
    mn_fence_operand(dk), mn_fence_operand(dv);
    mn_named_barrier_sync(3, 256);    // both groups are done with k
    const int64_t first = coord.t0 + coord.key;
    mn_bwd_store_tile<128>(smem.a, dk, p.scale, p.dk, coord.b, first, coord.h, coord.n_keys,
                           (int)p.call.K);
    mn_bwd_store_tile<128>(smem.b, dv, 1.0f, p.dv, coord.b, first, coord.h, coord.n_keys,
                           (int)p.call.V);
}

#endif

static_assert(sizeof(mn_overlap_smem) <= 227 * 1024, "shared memory of a block");

/* attention_bwd_single_pass_kernel in this order; a redo is that one's. Of the registers that 384
 * threads begin with, 168 each, consumers take 240 and leave 24. */
template <bool has_window>
__global__ static void __launch_bounds__(MN_FLASH_THREADS, 1)
attention_bwd_overlap_kernel(const __grid_constant__ mn_single_pass k) {
#if MN_HAS_WGMMA
    extern __shared__ __align__(1024) unsigned char bytes[];
    mn_overlap_smem &smem = *(mn_overlap_smem *)bytes;
    if (threadIdx.x == 0) {
        smem.coord = mn_single_pass_coord_of(k, mn_single_pass_keys(k, atomicAdd(k.ticket, 1)));
        mn_mbarrier_init(&smem.k_full, 32);
        mn_mbarrier_init(&smem.v_full, 32);
        for (int i = 0; i < 4; i++) mn_mbarrier_init(&smem.off_full[i], 1);
        for (int i = 0; i < 3; i++) {
            mn_mbarrier_init(&smem.x_full[i], 32);
            mn_mbarrier_init(&smem.x_empty[i], 8);
        }
        for (int i = 0; i < 2; i++) {
            mn_mbarrier_init(&smem.y_full[i], 32);
            mn_mbarrier_init(&smem.y_empty[i], 8);
            mn_mbarrier_init(&smem.dz_full[i], 8);
            mn_mbarrier_init(&smem.dz_empty[i], 9);
            mn_mbarrier_init(&smem.dq_full[i], 4);
            mn_mbarrier_init(&smem.dq_empty[i], 1);
        }
    }
    __syncthreads();
    if (smem.coord.n_keys == 0) return;
    if (threadIdx.x < MN_WARPGROUP) {
        mn_setmaxnreg_dec<24>();
        const int warp = threadIdx.x / 32;
        if (warp == 0) mn_overlap_load_queries(smem, k.f.p);
        else if (warp == 1) mn_overlap_load_cotangents(smem, k);
        else if (threadIdx.x % 32 == 0) mn_overlap_accumulate_dq<has_window>(smem, k, warp - 2);
    } else {
        mn_setmaxnreg_inc<240>();
        mn_overlap_consumer<has_window>(smem, k);
    }
#endif
}

/* ---- launches -------------------------------------------------------------------------------- */

inline auto mn_overlap_kernel(bool has_window) {
    return has_window ? attention_bwd_overlap_kernel<true> : attention_bwd_overlap_kernel<false>;
}

inline int mn_single_pass_bwd(const mn_attn_params &p, float *shared, cudaStream_t stream) {
    const mn_call &c = p.call;
    mn_single_pass_layout layout;
    int64_t blocks;
    if (!mn_single_pass_layout_of(&layout, c)) return cudaErrorInvalidValue;
    const mn_single_pass k = mn_single_pass_of(p, layout, shared, &blocks);
    if (c.H > 65535 || blocks > INT32_MAX) return cudaErrorNotSupported;
    const int64_t row_groups = MN_SINGLE_PASS_ROW_THREADS / MN_SINGLE_PASS_ROW_GROUP;
    attention_bwd_preprocess_kernel<<<mn_blocks(layout.rows, row_groups),
        MN_SINGLE_PASS_ROW_THREADS, 0, stream>>>(k);
    if (blocks == 0) return mn_launch_status();
    const auto kernel = mn_single_pass_overlaps ? mn_overlap_kernel(p.window)
                        : p.window ? attention_bwd_single_pass_kernel<true, false>
                                   : attention_bwd_single_pass_kernel<false, false>;
    const size_t bytes =
        mn_single_pass_overlaps ? sizeof(mn_overlap_smem) : sizeof(mn_single_pass_smem);
    const auto redo = p.window ? attention_bwd_single_pass_kernel<true, true>
                               : attention_bwd_single_pass_kernel<false, true>;
    const int64_t redone = mn_n_spans(c) * c.J * 2;
    int code = mn_launch_smem(kernel, dim3((unsigned)blocks), MN_FLASH_THREADS,
                              bytes, stream, k);
    if (code == cudaSuccess && redoes_gradients && redone <= INT32_MAX) {
        code = mn_launch_smem_behind(true, redo, dim3((unsigned)redone), MN_FLASH_THREADS,
                                     sizeof(mn_single_pass_smem), stream, k);
    }
    if (code != cudaSuccess) return code;
    const dim3 queries((unsigned)(layout.n_semaphores / c.H), (unsigned)c.H);
    if (layout.n_semaphores > 0) attention_bwd_dq_postprocess_kernel<<<queries, 256, 0,
        stream>>>(k);
    const dim3 tiles((unsigned)(layout.n_flags / c.J), (unsigned)c.J);
    if (!p.dk.data) return mn_launch_status();
    return mn_launch_smem(attention_bwd_dk_correction_kernel, tiles, 128,
                          MN_SINGLE_PASS_KEYS * 128 * sizeof(float),
                               stream, k);
}

}    // namespace mneme::attention

#endif
