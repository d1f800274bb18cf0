/* additive_token_chunk_sm90.cu - the scans of additive over chunks of 64 tokens on Hopper, for
 * decays that the channels of a head share, or none, and rows of up to 128.
 *
 *   O = scale (L X M + P Z)     P = (X Y') in the chunk's triangle, decayed     M <- d M + (E Y)'Z
 *
 * What mn_chunk_scan describes, with X, Y (64, depth) and Z, O (64, 64 columns): M (depth, 64
 * columns) is the state, L the decays from where the scan comes into the chunk to each token, E
 * those to where it leaves it, d that of the chunk.
 *
 * Warpgroups work on different chunks. The first keeps M, transposed, in registers: sums of tokens
 * are columns of wgmma, Z comes from shared memory as its left operand; where depths are up to 64
 * and what the gradient of a decay takes is left, there are two of these for 128 columns. The next
 * one makes P. Of the last one warp loads tiles by TMA, chunks ahead, one or two make chunks ready
 * (decays, zeros behind the last token of a packed sequence), and one stores results.
 *
 * For the gradient of a decay (additive_decay_grad.cuh) the scan of dq leaves, for each token, its
 * q.dq' with dq' what is read from the state, less what tokens of the chunk read from each other:
 *
 *   F_t = sum over s < t <= u of P_us (q_u.k_s)     F_(t+1) - F_t = sum_u>t G_ut - sum_s<t G_ts
 *
 * with G_us = P_us (q_u.k_s), both products of tensor cores in float32, so that roundings of what a
 * token reads from itself and its neighbours do not have to cancel. The scan of dk leaves k.dk' of
 * the state. */
#include "kernels/cuda/additive/additive.cuh"
#include "kernels/cuda/additive/additive_state_scan.cuh"
#include "kernels/cuda/delta/delta_mma.cuh"
#include "kernels/cuda/prim/sync.cuh"
#include "kernels/cuda/prim/tma.cuh"

namespace mneme::additive {

enum {
    MN_TOKEN_CHUNK = MN_SCAN_BY_WARPGROUPS,
    MN_TOKEN_WARPGROUP = 128,
    MN_TOKEN_TILE = MN_TOKEN_CHUNK * 128,    // bytes of 64 rows of 64 columns
};

/* A scan of a launch, and its tensors for TMA. */
struct mn_token_scan {
    mn_chunk_scan scan;
    CUtensorMap x, y, z, paired, out;
};

struct mn_token_params {
    mn_call call;
    mn_in g;
    mn_token_scan scans[MN_SCAN_MAX];
};

/* Tiles are swizzled as delta_smem.cuh says. */
template <int DEPTH, int GROUPS, bool PAIRS>
struct alignas(1024) mn_token_stage {
    unsigned char x[DEPTH / 64 * MN_TOKEN_TILE], y[DEPTH / 64 * MN_TOKEN_TILE];
    unsigned char z[GROUPS * MN_TOKEN_TILE], P[MN_TOKEN_TILE];
    unsigned char paired[PAIRS ? GROUPS * MN_TOKEN_TILE : 1024];
};

/* Barriers of stages: tiles have come; they are ready; P is there; all have been used. GROUPS: with
 * states, 64 columns each. PAIRS: with what lies beside the results.
 *
 * Chunk n has slot n % stages and phase n / stages of full, ready, scored and empty, and buffer
 * n % 2, phase n / 2, of out_full and out_empty.
 *
 * No cycle: what happens to chunk n comes in the order of load (which waits for empty of chunk
 * n - stages), decays (full), scores (ready; where they leave products, out_empty of chunk n - 2),
 * state (scored; out_empty of n - 2) and store (out_full). Each waits for an earlier chunk, or for
 * what is in front of it in this order, and goes through its chunks in order. So the first of all
 * that has not happened can happen.
 *
 * Parity: a wait for phase k of a barrier is right while phase k - 1 is over and phase k + 1 is
 * not; else the phase two away is taken for it. Phase k - 1: whoever waits has waited for it, as
 * each warp goes through all chunks, or, where two make decays in turn, through all of its slots:
 * stages is a multiple of makers. (Two warps and three slots stood still: tiles of two slots may
 * come in either order, and phase 1 of a slot whose phase 0 is to come seems to be over.) Phase
 * k + 1: full of chunk n + stages is asked for behind empty of n, for which each group with a state
 * arrives having waited for full, ready and scored of n; scores arrive at scored of n when they
 * have waited for full and ready, decays at ready when they have for full. Those who wait for
 * out_empty of n - 2 arrive at out_full of n later, and the store that waits for that gives
 * out_empty of n after it.
 *
 * Arrivals: full 1 and bytes; ready a warp; scored 128; empty 128 of each group; out_full as empty,
 * and 128 where scores leave products; out_empty a warp. A sequence without tokens has no chunk,
 * and nobody waits. tests/kernels/test_pipelines.c goes through these orders. */
template <int DEPTH, int GROUPS, bool PAIRS>
struct mn_token_smem {
    static constexpr int depth = DEPTH, groups = GROUPS;
    static constexpr bool pairs = PAIRS;
    static constexpr int stages = PAIRS ? 3 : 4;    // chunks under way
    static constexpr int makers = stages % 2 == 0 ? 2 : 1;    // warps that make decays in turn
    static constexpr int threads = (GROUPS + 2) * MN_TOKEN_WARPGROUP;
    mn_token_stage<DEPTH, GROUPS, PAIRS> stage[stages];
    alignas(1024) unsigned char out[2][GROUPS * MN_TOKEN_TILE];
    mn_scan_log_decays<MN_TOKEN_CHUNK> log_decays[stages];
    alignas(16) float from_start[stages][MN_TOKEN_CHUNK];
    alignas(16) float products[2][PAIRS ? 4 * GROUPS + 4 : 1][MN_TOKEN_CHUNK];    // of warps
    uint64_t full[stages], ready[stages], scored[stages], empty[stages], out_full[2], out_empty[2];
    mn_scan_coord place[GROUPS];
};

#if MN_HAS_WGMMA

/* A tile as an operand of products: where what lies `bytes` further on is found. What has to be
 * done for that is one addition, as wgmma is asked for faster than addresses could be made. */
struct mn_token_operand {
    unsigned low;

    __device__ explicit mn_token_operand(const unsigned char *tile)
        : low((unsigned)delta::mn_wgmma_smem_desc(mn_smem_addr(tile))) {}

    __device__ uint64_t operator[](int bytes) const {
        const uint64_t high = delta::mn_wgmma_smem_desc(0) >> 32 << 32;
        return high | (low + (unsigned)bytes / 16);
    }
};

/* The first token of the chunk that is number `iter` of the segment's scan. */
__device__ inline int64_t mn_token_first(const mn_scan_coord &at, bool reverse, int iter) {
    const int64_t n = at.iter + iter;
    return (reverse ? at.n_chunks - 1 - n : n) * MN_TOKEN_CHUNK;
}

__device__ inline int mn_token_count(const mn_scan_coord &at, int64_t t) {
    return (int)min((int64_t)MN_TOKEN_CHUNK, at.span.length - t);
}

/* ---- the producer warpgroup ------------------------------------------------------------------ */

/* A warp asks TMA for the tiles of all chunks. */
template <bool HAS_OUT, typename Smem>
__device__ inline void mn_token_load(Smem &smem, const mn_token_scan &job) {
    constexpr int deep_tiles = Smem::depth / 64, groups = Smem::groups;
    const mn_chunk_scan &p = job.scan;
    const mn_scan_coord &at = smem.place[0];
    const int iters = (int)(at.end - at.iter), b = (int)at.span.b, column0 = (int)at.column0;
    const int deep = (int)(p.transposed ? at.h : at.key);
    const int wide = (int)(p.transposed ? at.key : at.h);
    const bool pairs = Smem::pairs && p.mode != MN_SCAN_PLAIN;
    const int tiles = (HAS_OUT ? 2 : 1) * deep_tiles + (pairs ? 2 : 1) * groups;
#pragma unroll 1
    for (int n = 0; n < iters; n++) {
        const int slot = n % Smem::stages;
        const int t = (int)(at.span.t0 + mn_token_first(at, p.reverse, n));
        auto &to = smem.stage[slot];
        uint64_t *full = &smem.full[slot];
        mn_mbarrier_wait(&smem.empty[slot], (n / Smem::stages & 1) ^ 1);
        if (!mn_elect_one()) continue;
        mn_mbarrier_arrive_expect_tx(full, tiles * MN_TOKEN_TILE);
#pragma unroll
        for (int i = 0; i < deep_tiles; i++) {
            mn_tma_load(to.y + i * MN_TOKEN_TILE, job.y, full, 64 * i, deep, t, b);
            if (HAS_OUT) mn_tma_load(to.x + i * MN_TOKEN_TILE, job.x, full, 64 * i, deep, t, b);
        }
#pragma unroll
        for (int i = 0; i < groups; i++) {
            const int column = column0 + 64 * i;
            mn_tma_load(to.z + i * MN_TOKEN_TILE, job.z, full, column, wide, t, b);
            if (!pairs) continue;
            mn_tma_load(to.paired + i * MN_TOKEN_TILE, job.paired, full, column, wide, t, b);
        }
    }
}

/* Rows from `count` on become zeros in tiles side by side. A warp calls. */
__device__ inline void mn_token_zero_tail(unsigned char *tiles, int n, int count) {
    const int each = (MN_TOKEN_CHUNK - count) * 8;
    for (int i = threadIdx.x % 32; i < n * each; i += 32) {
        *(uint4 *)(tiles + i / each * MN_TOKEN_TILE + count * 128 + i % each * 16) =
            make_uint4(0, 0, 0, 0);
    }
}

/* Log decays of a lane's tokens of a chunk as they lie in memory, in the order of the scan; zeros
 * beyond its `count` tokens. */
struct mn_token_decays {
    mn_bf16 at[MN_TOKEN_CHUNK / 32];

    __device__ void load(const mn_in &g, const mn_scan_coord &place, int64_t t, int count,
                         bool reverse) {
#pragma unroll
        for (int i = 0; i < MN_TOKEN_CHUNK / 32; i++) {
            const int row = threadIdx.x % 32 * (MN_TOKEN_CHUNK / 32) + i;
            const int token = reverse ? MN_TOKEN_CHUNK - 1 - row : row;
            at[i] = __ushort_as_bfloat16(0);
            if (token < count) {
                at[i] = *mn_row<mn_bf16>(g, place.span.b, place.span.t0 + t + token, place.h);
            }
        }
    }

    /* In units of 2; a sum of -200 is as good as any below. */
    __device__ double log2(int i) const {
        const float x = mn_float(at[i]);
        return 1.4426950408889634 * (x < -200.0f ? -200.0f : x);    // NaN stays
    }
};

/* Sums of log2 decays of a chunk, by tokens: as mn_scan_cumsum_decays, whose rows are in the order
 * of the scan, as those of `g` are here. A warp calls. */
__device__ inline void mn_token_cumsum_decays(mn_scan_log_decays<MN_TOKEN_CHUNK> &to,
                                              float *from_start, const mn_token_decays &g,
                                              bool reverse) {
    double own = 0.0, log_decay, whole;
#pragma unroll
    for (int i = 0; i < MN_TOKEN_CHUNK / 32; i++) own += g.log2(i);
    mn_scan_warp_cumsum(log_decay, whole, own);
#pragma unroll
    for (int i = 0; i < MN_TOKEN_CHUNK / 32; i++) {
        const int row = threadIdx.x % 32 * (MN_TOKEN_CHUNK / 32) + i;
        const int token = reverse ? MN_TOKEN_CHUNK - 1 - row : row;
        const double before = log_decay;
        log_decay += g.log2(i);
        const double l = reverse ? before : log_decay;
        to.log_decay[token] = make_float2((float)l, (float)(l - (double)(float)l));
        to.to_end[token] = mn_exp2((float)(whole - l));
        from_start[token] = mn_exp2((float)l);
    }
    if (threadIdx.x % 32 == 0) to.whole = (float)whole;
}

/* Smem::makers warps make the decays of each chunk in turn, and tokens behind a sequence's last
 * zeros, which TMA does only behind the last of the tensor. Decays are asked for as many chunks
 * ahead. A stage has the same warp always (see above, parity). */
template <bool DECAYS, typename Smem>
__device__ inline void mn_token_make_ready(Smem &smem, const mn_token_params &all,
                                           const mn_chunk_scan &p, int first) {
    constexpr int deep_tiles = Smem::depth / 64, groups = Smem::groups, makers = Smem::makers;
    static_assert(Smem::stages % makers == 0, "a warp for each stage");
    const mn_scan_coord &at = smem.place[0];
    const int iters = (int)(at.end - at.iter);
    mn_token_decays g = {}, next = {};
    if (DECAYS && first < iters) {
        const int64_t t = mn_token_first(at, p.reverse, first);
        next.load(all.g, at, t, mn_token_count(at, t), p.reverse);
    }
#pragma unroll 1
    for (int n = first; n < iters; n += makers) {
        const int slot = n % Smem::stages;
        const int count = mn_token_count(at, mn_token_first(at, p.reverse, n));
        g = next;
        if (DECAYS && n + makers < iters) {
            const int64_t t = mn_token_first(at, p.reverse, n + makers);
            next.load(all.g, at, t, mn_token_count(at, t), p.reverse);
        }
        mn_mbarrier_wait(&smem.full[slot], n / Smem::stages & 1);
        if (DECAYS) {
            mn_token_cumsum_decays(smem.log_decays[slot], smem.from_start[slot], g, p.reverse);
        }
        if (all.call.cu_seqlens && count < MN_TOKEN_CHUNK) {
            auto &in = smem.stage[slot];
            mn_token_zero_tail(in.y, deep_tiles, count);
            mn_token_zero_tail(in.z, groups, count);
            if (Smem::pairs && p.mode != MN_SCAN_PLAIN) {
                mn_token_zero_tail(in.x, deep_tiles, count);
                mn_token_zero_tail(in.paired, groups, count);
            }
            mn_fence_proxy_async();
        }
        mn_mbarrier_arrive_warp(&smem.ready[slot]);
    }
}

/* Where a chunk's state is kept, and what its block leaves for the gradient of a decay. */
__device__ inline int64_t mn_token_slot(const mn_call &call, const mn_scan_coord &at,
                                        int64_t chunk) {
    return (mn_scan_first_slot(call, at.n, MN_TOKEN_CHUNK) + chunk) * call.H + at.h;
}

/* What the warps have left of a chunk's tokens, added up, and over all of them what was read from
 * the state. A warp calls. */
template <typename Smem>
__device__ inline void mn_token_store_products(const Smem &smem, const mn_call &call,
                                               const mn_chunk_scan &p, int64_t chunk, int buffer) {
    const mn_scan_coord &at = smem.place[0];
    const int lane = threadIdx.x % 32;
    const int64_t index = mn_token_slot(call, at, chunk) * (at.n_slices / Smem::groups) +
                          at.slice / Smem::groups;
    float2 read = { 0.0f, 0.0f }, own = read;
#pragma unroll
    for (int i = 0; i < 4 * Smem::groups; i++) {
        const float2 x = *(const float2 *)&smem.products[buffer][i][2 * lane];
        read.x += x.x, read.y += x.y;
    }
    for (int i = 0; i < 4 && p.mode == MN_SCAN_SAVE_STATE; i++) {
        const float2 x = *(const float2 *)&smem.products[buffer][4 * Smem::groups + i][2 * lane];
        own.x += x.x, own.y += x.y;
    }
    *(float2 *)(p.products + index * MN_TOKEN_CHUNK + 2 * lane) =
        make_float2(p.scale * (read.x - own.x), p.scale * (read.y - own.y));
    const float all = mn_warp_sum(read.x + read.y);
    if (p.mode == MN_SCAN_DOT_STATE && lane == 0) p.inside[index] = p.scale * all;
}

/* A warp stores the results of all chunks: by TMA, or row by row where fewer tokens are the
 * sequence's. */
template <typename Smem>
__device__ inline void mn_token_store(Smem &smem, const mn_token_scan &job, const mn_call &call) {
    const mn_chunk_scan &p = job.scan;
    const mn_scan_coord &at = smem.place[0];
    const int iters = (int)(at.end - at.iter), lane = threadIdx.x % 32, vec16 = lane % 8;
    for (int n = 0; n < iters; n++) {
        const int64_t t = mn_token_first(at, p.reverse, n);
        const int count = mn_token_count(at, t);
        mn_mbarrier_wait(&smem.out_full[n % 2], n / 2 & 1);
#pragma unroll
        for (int i = 0; i < Smem::groups; i++) {
            const unsigned char *tile = smem.out[n % 2] + i * MN_TOKEN_TILE;
            const int64_t column0 = at.column0 + 64 * i, j = column0 + 8 * vec16;
            if (call.cu_seqlens && count < MN_TOKEN_CHUNK) {
                for (int row = lane / 8; j < p.width && row < count; row += 4) {
                    mn_bf16 *to = mn_row<mn_bf16>(p.out, at.span.b, at.span.t0 + t + row, at.h) + j;
                    *(uint4 *)to = *(const uint4 *)(tile + delta::mn_tile_swizzle(row, vec16));
                }
            } else if (lane == 0) {
                mn_tma_store(job.out, tile, (int)column0, (int)at.h, (int)(at.span.t0 + t),
                             (int)at.span.b);
            }
        }
        if (Smem::pairs && p.mode != MN_SCAN_PLAIN) {
            mn_token_store_products(smem, call, p, t / MN_TOKEN_CHUNK, n % 2);
        }
        if (lane == 0) mn_tma_store_wait_read();
        mn_mbarrier_arrive_warp(&smem.out_empty[n % 2]);
    }
}

/* Sums are in their registers from here on: what is moved there, or scaled, behind the first of
 * several products makes all of them wait for each other. */
template <int N>
__device__ __forceinline__ void mn_token_pin(float (&x)[N][4]) {
#pragma unroll
    for (int i = 0; i < 4 * N; i++) asm volatile("" : "+f"(x[i / 4][i % 4]));
}

template <int N>
__device__ __forceinline__ void mn_token_pin(uint32_t (&x)[N][4]) {
#pragma unroll
    for (int i = 0; i < 4 * N; i++) asm volatile("" : "+r"(x[i / 4][i % 4]));
}

/* ---- the warpgroup that computes scores ------------------------------------------------------ */

/* Adds up with the lane that is 2 STEP away, each of both one half of the numbers. */
template <int STEP>
__device__ __forceinline__ void mn_token_halve(float (&x)[16]) {
    const bool upper = threadIdx.x % 32 & 2 * STEP;
#pragma unroll
    for (int i = 0; i < STEP; i++) {
        const float low = x[i], high = x[i + STEP];    // not a choice of addresses
        x[i] = (upper ? high : low) +
               __shfl_xor_sync(0xffffffffu, upper ? low : high, 2 * STEP);
    }
}

/* Sums over a warp's 16 rows, of which a thread has two: of 16 numbers, columns 8 n + 2 (lane % 4)
 * and the next, those that are this lane's, columns 2 lane and the next. */
__device__ __forceinline__ float2 mn_token_column_sums(float (&x)[16]) {
    mn_token_halve<8>(x);
    mn_token_halve<4>(x);
    mn_token_halve<2>(x);
    return make_float2(x[0], x[1]);
}

/* Decays from the tokens of P's columns to those of this warp's 16 rows. */
__device__ inline void mn_token_decays_between(float (&decay)[8][4], const float2 *l) {
    const int lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16 + lane / 4;
    const float2 of_row[2] = { l[row], l[row + 8] };
#pragma unroll
    for (int tile = 0; tile < 8; tile++) {
        const float4 of_columns = *(const float4 *)(l + 8 * tile + lane % 4 * 2);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float high = i % 2 ? of_columns.z : of_columns.x;
            const float low = i % 2 ? of_columns.w : of_columns.y;
            decay[tile][i] = mn_exp2((of_row[i / 2].x - high) + (of_row[i / 2].y - low));
        }
    }
}

/* P of this warp's 16 rows, decayed in place, zero where a row does not see a column; to a tile. */
template <bool DECAYS>
__device__ inline void mn_token_weigh(float (&sum)[8][4], const float (&decay)[8][4],
                                      unsigned char *P, bool reverse) {
    const int lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16 + lane / 4;
#pragma unroll
    for (int tile = 0; tile < 8; tile++) {
        const int column = 8 * tile + lane % 4 * 2;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float *at = &sum[tile][2 * half];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int r = row + 8 * half, c = column + i;
                if (DECAYS) at[i] *= decay[tile][2 * half + i];
                if (reverse ? c < r : c > r) at[i] = 0.0f;
            }
            *(unsigned *)(P + delta::mn_tile_swizzle(row + 8 * half, tile) + lane % 4 * 4) =
                mn_bf16x2(at[0], at[1]);
        }
    }
}

/* This warp's part of sum_u>t G_ut - sum_s<t G_ts for all tokens t, G = P R in front of the
 * diagonal. */
__device__ inline void mn_token_store_own(float *to, const float (&P)[8][4],
                                          const float (&R)[8][4]) {
    const int lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16 + lane / 4;
    float columns[16], rows[2] = { 0.0f, 0.0f };
#pragma unroll
    for (int i = 0; i < 16; i++) {
        const int c = i / 2 * 8 + lane % 4 * 2 + i % 2;
        const float low = c < row ? P[i / 2][i % 2] * R[i / 2][i % 2] : 0.0f;
        const float high = c < row + 8 ? P[i / 2][2 + i % 2] * R[i / 2][2 + i % 2] : 0.0f;
        columns[i] = low + high;
        rows[0] += low, rows[1] += high;
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
        rows[half] += __shfl_xor_sync(0xffffffffu, rows[half], 1);
        rows[half] += __shfl_xor_sync(0xffffffffu, rows[half], 2);
    }
    *(float2 *)(to + 2 * lane) = mn_token_column_sums(columns);
    __syncwarp();
    if (lane % 4 == 0) to[row] -= rows[0], to[row + 8] -= rows[1];
}

/* Stores P (64,64) of every chunk; a warp has 16 rows. OWN: and what tokens of a chunk read from
 * each other. */
template <bool DECAYS, bool OWN, typename Smem>
__device__ inline void mn_token_scores(Smem &smem, bool reverse) {
    const int iters = (int)(smem.place[0].end - smem.place[0].iter);
#pragma unroll 1
    for (int n = 0; n < iters; n++) {
        const int slot = n % Smem::stages, phase = n / Smem::stages & 1;
        auto &in = smem.stage[slot];
        float P[8][4] = {}, R[8][4] = {}, decay[8][4];
        const mn_token_operand x(in.x), y(in.y), z(in.z), paired(in.paired);
        mn_mbarrier_wait(&smem.full[slot], phase);
        mn_mbarrier_wait(&smem.ready[slot], phase);
        if constexpr (OWN) mn_token_pin(R);
        delta::mn_mma_fence<true>();
#pragma unroll
        for (int k = 0; k < Smem::depth; k += 16) {
            const int at = k / 64 * MN_TOKEN_TILE + k % 64 * 2;
            delta::mn_wgmma_m64n64k16(P, x[at], y[at]);
        }
        delta::mn_mma_commit<true>();
        if constexpr (OWN) {
#pragma unroll
            for (int k = 0; k < 64 * Smem::groups; k += 16) {
                const int at = k / 64 * MN_TOKEN_TILE + k % 64 * 2;
                delta::mn_wgmma_m64n64k16(R, paired[at], z[at]);
            }
            delta::mn_mma_commit<true>();
        }
        if (DECAYS) mn_token_decays_between(decay, smem.log_decays[slot].log_decay);
        delta::mn_mma_wait<true, OWN ? 1 : 0>();
        mn_token_weigh<DECAYS>(P, decay, in.P, reverse);
        mn_fence_proxy_async();
        if constexpr (OWN) delta::mn_mma_wait<true>();
        mn_mbarrier_arrive(&smem.scored[slot]);
        if constexpr (OWN) {
            const int warp = threadIdx.x / 32 % 4;
            mn_mbarrier_wait(&smem.out_empty[n % 2], (n / 2 & 1) ^ 1);
            mn_token_store_own(smem.products[n % 2][4 * Smem::groups + warp], P, R);
            mn_mbarrier_arrive(&smem.out_full[n % 2]);
        }
    }
}

/* ---- the warpgroup that keeps the state ------------------------------------------------------ */

/* The state of a warpgroup, transposed: a thread has rows of two of the 64 value columns and, of
 * each eight channels, two. */
template <int DEPTH>
struct mn_token_state {
    float at[DEPTH / 8][4];

    template <typename F>
    __device__ void each(F use) {
        const int lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16 + lane / 4;
#pragma unroll
        for (int i = 0; i < DEPTH / 2; i++) {
            use(at[i / 4][i % 4], i / 4 * 8 + lane % 4 * 2 + i % 2, row + i % 4 / 2 * 8);
        }
    }

    __device__ void scale(float by) {
#pragma unroll
        for (int i = 0; i < DEPTH / 2; i++) at[i / 4][i % 4] *= by;
    }

    /* The state that a sequence begins with, or zeros. All numbers are asked for before one is
     * used, without a branch between; those outside are looked for where the first one lies. */
    __device__ void load(const mn_chunk_scan &p, const mn_scan_coord &place) {
        const float *from = mn_row<float>(p.state0, place.n, 0, place.h);
        if (!from || p.reduce_pass) {
            each([](float &cell, int, int) { cell = 0.0f; });
            return;
        }
        const int depth = (int)p.depth, down = (int)p.state_row, along = (int)p.state_column;
        const int left = (int)min(p.width - place.column0, (int64_t)MN_SCAN_WIDTH);
        from += place.column0 * along;
        each([&](float &cell, int i, int j) {
            cell = from[i < depth && j < left ? i * down + j * along : 0];
        });
        each([&](float &cell, int i, int j) {
            cell = i < depth && j < left ? p.into * cell : 0.0f;
        });
    }

    /* The state in front of the segment, from what those before it have left. */
    __device__ void begin(const mn_chunk_scan &p, const mn_scan_coord &place) {
        load(p, place);
        for (int before = p.reduce_pass ? 0 : (int)blockIdx.z; before > 0; before--) {
            const int64_t index = place.index - before * place.stride;
            const float4 *sums = (const float4 *)(p.sums + index * DEPTH * MN_SCAN_WIDTH);
            scale(p.cum_decays[index * MN_SCAN_DECAYS]);
#pragma unroll
            for (int k = 0; k < DEPTH / 8; k++) {
                const float4 sum = sums[k * MN_TOKEN_WARPGROUP + threadIdx.x % MN_TOKEN_WARPGROUP];
                at[k][0] += sum.x, at[k][1] += sum.y, at[k][2] += sum.z, at[k][3] += sum.w;
            }
        }
    }

    __device__ void end(const mn_chunk_scan &p, const mn_scan_coord &place, float cum_decay) {
        float *to = mn_row<float>(p.state, place.n, 0, place.h);
        if (p.reduce_pass) {
            const int thread = threadIdx.x % MN_TOKEN_WARPGROUP;
            float4 *sums = (float4 *)(p.sums + place.index * DEPTH * MN_SCAN_WIDTH);
#pragma unroll
            for (int k = 0; k < DEPTH / 8; k++) {
                sums[k * MN_TOKEN_WARPGROUP + thread] =
                    make_float4(at[k][0], at[k][1], at[k][2], at[k][3]);
            }
            if (thread == 0) p.cum_decays[place.index * MN_SCAN_DECAYS] = cum_decay;
        } else if (place.last && to) {
            each([&](float &cell, int i, int j) {
                const int64_t column = place.column0 + j;
                if (i >= p.depth || column >= p.width) return;
                to[i * p.state_row + column * p.state_column] = p.from * cell;
            });
        }
    }
};

/* O (16 value columns of a warp, 64 tokens) += P Z for what is not finite in Z, of each token into
 * those that see it: 0 times it would be NaN elsewhere. A warp calls, by whose operands of Z. */
__device__ __forceinline__ void mn_token_add_wild(float (&O)[8][4], const unsigned char *z_tile,
                                                  const unsigned char *P, bool reverse) {
    const int lane = threadIdx.x % 32, column = lane % 4 * 2;
#pragma unroll 1
    for (int s = 0; s < MN_TOKEN_CHUNK; s++) {
        uint32_t z[4];
        delta::mn_frag_a_trans(z, mn_smem_addr(z_tile), threadIdx.x / 32 % 4 * 16, s / 16 * 16);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int token = s / 16 * 16 + i / 2 * 8 + column;    // of the lower half
            const uint32_t half = token == s ? 0xffffu : token + 1 == s ? 0xffff0000u : 0u;
            z[i] &= mn_bf16x2_wild(z[i]) & half;
        }
        if (!__any_sync(0xffffffffu, z[0] | z[1] | z[2] | z[3])) continue;
#pragma unroll
        for (int n = 0; n < 4; n++) {
            uint32_t b[4];
            float own[2][4] = {};
            delta::mn_frag_b(b, mn_smem_addr(P), s / 16 * 16, 16 * n);
            mn_mma(own[0], z, b[0], b[1]);
            mn_mma(own[1], z, b[2], b[3]);
#pragma unroll
            for (int i = 0; i < 8; i++) {
                const int t = 16 * n + i / 4 * 8 + column + i % 2;
                if (reverse ? t <= s : t >= s) O[2 * n + i / 4][i % 4] += own[i / 4][i % 4];
            }
        }
    }
}

/* Left operands of this warp's 16 value columns of Z, tokens as depth. The result has a bit where
 * there may be a number that is not finite. */
__device__ inline uint32_t mn_token_values(uint32_t (&z)[4][4], const unsigned char *tile) {
    uint32_t watch = 0;
#pragma unroll
    for (int k = 0; k < 4; k++) {
        delta::mn_frag_a_trans(z[k], mn_smem_addr(tile), threadIdx.x / 32 % 4 * 16, 16 * k);
#pragma unroll
        for (int i = 0; i < 4; i++) watch = mn_bf16x2_watch(z[k][i], watch);
    }
    return watch & 0x7fff7fffu;
}

/* Zeros in the place of numbers that are not finite; whether the warp has one. */
__device__ inline bool mn_token_drop_wild(uint32_t (&z)[4][4], uint32_t watch) {
    const bool wild = __any_sync(0xffffffffu, watch);
    if (__builtin_expect(wild, 0)) {
#pragma unroll
        for (int i = 0; i < 16; i++) z[i / 4][i % 4] &= ~mn_bf16x2_wild(z[i / 4][i % 4]);
    }
    return wild;
}

/* O, transposed in registers, times `by` to a tile (64 tokens, 64 columns) in shared memory. */
__device__ inline void mn_token_stage_out(unsigned char *tile, const float (&O)[8][4], float by) {
    const int lane = threadIdx.x % 32, row = lane % 8 + lane / 16 * 8;
    const int vec16 = threadIdx.x / 32 % 4 * 2 + lane / 8 % 2;
#pragma unroll
    for (int k = 0; k < 4; k++) {
        uint32_t x[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float(&o)[4] = O[2 * k + i / 2];
            x[i] = mn_bf16x2(by * o[i % 2 * 2], by * o[i % 2 * 2 + 1]);
        }
        asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};\n" ::
                         "r"(mn_smem_addr(tile) + delta::mn_tile_swizzle(16 * k + row, vec16)),
                     "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]) : "memory");
    }
}

/* Decays of a chunk: those of O's tokens from its start, those of Z's to its end. */
__device__ inline void mn_token_scale_out(float (&O)[8][4], const float *from_start) {
    const int column = threadIdx.x % 4 * 2;
#pragma unroll
    for (int n = 0; n < 8; n++) {
        const float2 by = *(const float2 *)(from_start + 8 * n + column);
        O[n][0] *= by.x, O[n][1] *= by.y, O[n][2] *= by.x, O[n][3] *= by.y;
    }
}

template <bool DECAYS>
struct mn_token_decays_to_end {
    float2 by[8];

    __device__ void load(const float *to_end) {
#pragma unroll
        for (int k = 0; k < 8 && DECAYS; k++) {
            by[k] = *(const float2 *)(to_end + 8 * k + threadIdx.x % 4 * 2);
        }
    }

    __device__ void scale(uint32_t (&to)[4][4], const uint32_t (&z)[4][4]) const {
#pragma unroll
        for (int i = 0; i < 16; i++) {
            const float2 &f = by[i / 4 * 2 + i % 4 / 2];
            const uint32_t x = z[i / 4][i % 4];
            to[i / 4][i % 4] = DECAYS ? mn_bf16x2_mul(x, f.x, f.y) : x;
        }
    }
};

/* ---- what the gradient of a decay takes ------------------------------------------------------ */

/* Sums over this warp's 16 columns of O with what lies beside, for two tokens. */
__device__ inline float2 mn_token_dot(const float (&O)[8][4], const unsigned char *paired) {
    float sums[16];
#pragma unroll
    for (int k = 0; k < 4; k++) {
        uint32_t x[4];
        delta::mn_frag_a_trans(x, mn_smem_addr(paired), threadIdx.x / 32 % 4 * 16, 16 * k);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const float(&o)[4] = O[2 * k + half];
            float *to = &sums[4 * k + 2 * half];
            to[0] = fmaf(o[2], mn_bf16_lo(x[2 * half + 1]), o[0] * mn_bf16_lo(x[2 * half]));
            to[1] = fmaf(o[3], mn_bf16_hi(x[2 * half + 1]), o[1] * mn_bf16_hi(x[2 * half]));
        }
    }
    return mn_token_column_sums(sums);
}

/* The state in front of a chunk, in bf16 as operands have it: kept, or it meets the one behind the
 * chunk, which comes decayed over it, and is asked for a chunk ahead. */
template <int MODE, int DEPTH>
struct mn_token_kept {
    uint4 at[MODE == MN_SCAN_DOT_STATE ? DEPTH / 16 : 1];
    int index;    // of the chunk and slice

    /* The chunk whose first token is t; a scan that meets states asks for its own. */
    __device__ void begin(const mn_call &call, const mn_chunk_scan &p, const mn_scan_coord &place,
                          int64_t t) {
        if constexpr (MODE == MN_SCAN_PLAIN) return;
        index = (int)(mn_token_slot(call, place, t / MN_TOKEN_CHUNK) * place.n_slices +
                      place.slice);
        if constexpr (MODE == MN_SCAN_DOT_STATE) {
            const uint4 *kept = (const uint4 *)(p.kept + (int64_t)index * DEPTH * MN_SCAN_WIDTH) +
                                threadIdx.x % MN_TOKEN_WARPGROUP;
#pragma unroll
            for (int k = 0; k < DEPTH / 16; k++) at[k] = kept[k * MN_TOKEN_WARPGROUP];
        }
    }

    __device__ void keep(const mn_chunk_scan &p, const uint32_t (&a)[DEPTH / 16][4]) const {
        if constexpr (MODE == MN_SCAN_SAVE_STATE) {
            uint4 *kept = (uint4 *)(p.kept + (int64_t)index * DEPTH * MN_SCAN_WIDTH) +
                          threadIdx.x % MN_TOKEN_WARPGROUP;
#pragma unroll
            for (int k = 0; k < DEPTH / 16; k++) {
                kept[k * MN_TOKEN_WARPGROUP] = make_uint4(a[k][0], a[k][1], a[k][2], a[k][3]);
            }
        }
    }

    __device__ void meet(const mn_token_state<DEPTH> &M, const mn_chunk_scan &p,
                         float cum_decay) const {
        if constexpr (MODE == MN_SCAN_DOT_STATE) {
            float sum = 0.0f;
#pragma unroll
            for (int i = 0; i < DEPTH / 4; i++) {
                const uint32_t pairs[4] = { at[i / 4].x, at[i / 4].y, at[i / 4].z, at[i / 4].w };
                const float(&cells)[4] = M.at[i / 2];
                sum = fmaf(cells[i % 2 * 2], mn_bf16_lo(pairs[i % 4]), sum);
                sum = fmaf(cells[i % 2 * 2 + 1], mn_bf16_hi(pairs[i % 4]), sum);
            }
            sum = mn_warp_sum(sum);
            if (threadIdx.x % 32 == 0) {
                p.state_dots[(int64_t)index * 4 + threadIdx.x / 32 % 4] = p.scale * cum_decay * sum;
            }
        }
    }
};

/* O of every chunk to smem.out, what becomes of M. HAS_OUT: otherwise M alone. MODE: what else the
 * scan leaves; `group` has the columns. */
template <int MODE, bool DECAYS, bool HAS_OUT, typename Smem>
__device__ inline void mn_token_state_scan(Smem &smem, const mn_call &call, const mn_chunk_scan &p,
                                           int group) {
    using namespace delta;
    constexpr int DEPTH = Smem::depth;
    const mn_scan_coord &place = smem.place[group];
    const int iters = (int)(place.end - place.iter), tile = group * MN_TOKEN_TILE;
    const bool reverse = p.reverse;
    const float by = p.scale;
    float cum_decay = 1.0f;
    mn_token_state<DEPTH> M;
    mn_token_kept<MODE, DEPTH> kept;
    M.begin(p, place);
    if (iters > 0) kept.begin(call, p, place, mn_token_first(place, reverse, 0));
#pragma unroll 1
    for (int n = 0; n < iters; n++) {
        const int slot = n % Smem::stages, phase = n / Smem::stages & 1;
        auto &in = smem.stage[slot];
        const mn_token_operand x(in.x), y(in.y), P(in.P);
        const mn_scan_log_decays<MN_TOKEN_CHUNK> &decays = smem.log_decays[slot];
        uint32_t a[DEPTH / 16][4], z[4][4], lowered[4][4];
        mn_token_decays_to_end<DECAYS> to_end;
        float O[8][4] = {}, whole = 1.0f;
        float2 read = {};
        mn_mbarrier_wait(&smem.full[slot], phase);
        mn_mbarrier_wait(&smem.ready[slot], phase);
        if (HAS_OUT) {
#pragma unroll
            for (int k = 0; k < DEPTH / 16; k++) {
                additive::mn_frag_a_of(a[k], M.at[2 * k], M.at[2 * k + 1]);
            }
        }
        kept.keep(p, a);
        const uint32_t watch = mn_token_values(z, in.z + tile);
        to_end.load(decays.to_end);
        if (DECAYS) whole = mn_exp2(decays.whole);
        if (HAS_OUT) {
            mn_mma_fence<true>();
#pragma unroll
            for (int k = 0; k < DEPTH / 16; k++) {
                mn_wgmma_m64n64k16<0>(O, a[k], x[k / 4 * MN_TOKEN_TILE + k % 4 * 32]);
            }
            mn_mma_commit<true>();
        }
        if (DECAYS) {
            kept.meet(M, p, whole);
            kept.begin(call, p, place, mn_token_first(place, reverse, min(n + 1, iters - 1)));
            M.scale(whole);
            cum_decay *= whole;
        }
        to_end.scale(lowered, z);
        mn_token_pin(M.at), mn_token_pin(lowered);
        if (HAS_OUT && DECAYS) {
            mn_mma_wait<true>();
            mn_token_scale_out(O, smem.from_start[slot]);
            if (MODE != MN_SCAN_PLAIN) read = mn_token_dot(O, in.paired + tile);
        }
        const bool wild = mn_token_drop_wild(z, watch);
        if (HAS_OUT) {
            mn_mbarrier_wait(&smem.scored[slot], phase);
            mn_token_pin(z);
            mn_mma_fence<true>();
#pragma unroll
            for (int k = 0; k < 4; k++) {
                mn_wgmma_m64n64k16<0>(O, z[k], P[32 * k]);
            }
            mn_mma_commit<true>();
        } else {
            mn_mma_fence<true>();
        }
#pragma unroll
        for (int i = 0; i < DEPTH / 64; i++) {
#pragma unroll
            for (int k = 0; k < 4; k++) {
                mn_wgmma_m64n64k16<1>(&M.at[8 * i], lowered[k], y[i * MN_TOKEN_TILE + k * 2048]);
            }
        }
        mn_mma_commit<true>();
        if (HAS_OUT) {
            mn_mbarrier_wait(&smem.out_empty[n % 2], (n / 2 & 1) ^ 1);
            if (MODE != MN_SCAN_PLAIN) {
                float *to = smem.products[n % 2][4 * group + threadIdx.x / 32 % 4];
                *(float2 *)(to + threadIdx.x % 32 * 2) = read;
            }
            mn_mma_wait<true, 1>();
            if (__builtin_expect(wild, 0)) {
                mn_token_add_wild(O, in.z + tile, in.P, reverse);
            }
            mn_token_stage_out(smem.out[n % 2] + tile, O, by);
        }
        mn_mma_wait<true>();
        mn_mbarrier_arrive(&smem.empty[slot]);
        if (HAS_OUT) {
            mn_fence_proxy_async();
            mn_mbarrier_arrive(&smem.out_full[n % 2]);
        }
    }
    M.end(p, place, cum_decay);
}

/* The same by what the scan leaves. */
template <bool DECAYS, bool HAS_OUT, typename Smem>
__device__ inline void mn_token_state_part(Smem &smem, const mn_call &call, const mn_chunk_scan &p,
                                           int group) {
    if constexpr (Smem::pairs) {
        if (p.mode == MN_SCAN_SAVE_STATE) {
            mn_token_state_scan<MN_SCAN_SAVE_STATE, DECAYS, HAS_OUT>(smem, call, p, group);
            return;
        }
        if (p.mode == MN_SCAN_DOT_STATE) {
            mn_token_state_scan<MN_SCAN_DOT_STATE, DECAYS, HAS_OUT>(smem, call, p, group);
            return;
        }
    }
    mn_token_state_scan<MN_SCAN_PLAIN, DECAYS, HAS_OUT>(smem, call, p, group);
}

template <bool DECAYS, typename Smem>
__device__ inline void mn_token_scores_part(Smem &smem, const mn_chunk_scan &p) {
    if constexpr (Smem::pairs) {
        if (p.mode == MN_SCAN_SAVE_STATE) {
            mn_token_scores<DECAYS, true>(smem, p.reverse);
            return;
        }
    }
    mn_token_scores<DECAYS, false>(smem, p.reverse);
}

#endif

/* ---- the kernel ------------------------------------------------------------------------------ */

/* Registers of threads that keep the state, make scores, and do the rest. */
template <int GROUPS>
struct mn_token_registers {
    static constexpr int state = GROUPS == 1 ? 240 : 160, scores = GROUPS == 1 ? 152 : 136;
    static constexpr int rest = GROUPS == 1 ? 112 : 56;
    static constexpr int launched = 65536 / ((GROUPS + 2) * MN_TOKEN_WARPGROUP) / 8 * 8;
    static_assert(state > launched && rest < launched &&
                      GROUPS * state + scores + rest <= (GROUPS + 2) * launched,
                  "as many as the block has");
};

/* Grid: blocks of 384 or 512 threads, block = (n * H + h) * n_slices + slice for sequence n, head h
 * and 64 columns of each group, by scans, by segments.
 * Loads   for each chunk x, y (64, depth), z (64, columns) and the decays of 64 tokens; at the
 *         start the state (depth, columns), or what the segments before have left.
 * Stores  out (64, columns) of each chunk, and the state at the end of the sequence; without
 *         HAS_OUT what the segment adds to a state, and its decay. PAIRS: what scan.mode says for
 *         the gradient of a decay. */
template <int DEPTH, int GROUPS, bool DECAYS, bool HAS_OUT, bool PAIRS>
__global__ void __launch_bounds__((GROUPS + 2) * MN_TOKEN_WARPGROUP, 1)
additive_token_scan_sm90(const __grid_constant__ mn_token_params all) {
#if MN_HAS_WGMMA
    extern __shared__ __align__(1024) unsigned char token_smem_bytes[];
    using smem_type = mn_token_smem<DEPTH, GROUPS, PAIRS>;
    using registers = mn_token_registers<GROUPS>;
    smem_type &smem = *(smem_type *)token_smem_bytes;
    const mn_token_scan &job = all.scans[blockIdx.y];
    const int64_t n_slices = mn_scan_slices(job.scan) / GROUPS;
    if (blockIdx.x >= n_slices * all.call.H * mn_n_spans(all.call)) return;
    if (threadIdx.x == 0) {
        const int states = GROUPS * MN_TOKEN_WARPGROUP;
        const bool own = PAIRS && job.scan.mode == MN_SCAN_SAVE_STATE;
        for (int i = 0; i < smem_type::stages; i++) {
            mn_mbarrier_init(&smem.full[i], 1);
            mn_mbarrier_init(&smem.ready[i], 1);
            mn_mbarrier_init(&smem.scored[i], MN_TOKEN_WARPGROUP);
            mn_mbarrier_init(&smem.empty[i], states);
        }
        for (int i = 0; i < 2; i++) {
            mn_mbarrier_init(&smem.out_full[i], states + (own ? MN_TOKEN_WARPGROUP : 0));
            mn_mbarrier_init(&smem.out_empty[i], 1);
        }
        mn_mbarrier_init_fence();
        for (int i = 0; i < GROUPS; i++) {
            smem.place[i] = mn_scan_block_coord(all.call, job.scan, MN_TOKEN_CHUNK, i, GROUPS);
        }
    }
    __syncthreads();
    if (smem.place[0].idle) return;
    const int group = threadIdx.x / MN_TOKEN_WARPGROUP, warp = threadIdx.x / 32 % 4;
    if (group < GROUPS) {
        mn_setmaxnreg_inc<registers::state>();
        mn_token_state_part<DECAYS, HAS_OUT>(smem, all.call, job.scan, group);
    } else if (group == GROUPS) {
        if constexpr (registers::scores > registers::launched) {
            mn_setmaxnreg_inc<registers::scores>();
        } else {
            mn_setmaxnreg_dec<registers::scores>();
        }
        if (HAS_OUT) mn_token_scores_part<DECAYS>(smem, job.scan);
    } else {
        mn_setmaxnreg_dec<registers::rest>();
        if (warp == 0) mn_token_load<HAS_OUT>(smem, job);
        if (warp == 1 && HAS_OUT) mn_token_store(smem, job, all.call);
        if (warp >= 2 && warp < 2 + smem_type::makers) {
            mn_token_make_ready<DECAYS>(smem, all, job.scan, warp - 2);
        }
    }
#endif
}

/* Whether the kernel serves a scan: by its kind and sizes, never by its length; rows have to be
 * such that TMA can bring them. Fills in the maps. */
static bool supports(mn_token_scan *job, const mn_chunk_scan &p, const mn_call &call) {
    const bool plain = p.mode == MN_SCAN_PLAIN;
    job->scan = p;
    return (plain || p.by_warpgroups) && p.out.data && p.depth <= 128 && p.depth % 8 == 0 &&
           p.width % 8 == 0 && mn_tma_map(&job->x, p.x, call, p.depth, MN_TOKEN_CHUNK) &&
           mn_tma_map(&job->y, p.y, call, p.depth, MN_TOKEN_CHUNK) &&
           mn_tma_map(&job->z, p.z, call, p.width, MN_TOKEN_CHUNK) &&
           (plain || mn_tma_map(&job->paired, p.paired, call, p.width, MN_TOKEN_CHUNK)) &&
           mn_tma_map(&job->out, p.out, call, p.width, MN_TOKEN_CHUNK);
}

bool mn_additive_token_supported_sm90(const mn_chunk_scans *scans, int count) {
    if (!mn_device_is_sm90()) return false;
    for (int i = 0; i < count; i++) {
        mn_token_scan job;
        mn_chunk_scan scan = scans->scan[i];
        scan.by_warpgroups = true;
        if (scan.paired.data) scan.mode = MN_SCAN_SAVE_STATE;
        if (!supports(&job, scan, scans->call)) return false;
    }
    return true;
}

int mn_additive_token_blocks_sm90(int64_t depth, int64_t width) {
    const int slices = (int)mn_ceil_div(width, MN_SCAN_WIDTH);
    return depth <= 64 && slices == 2 ? 1 : slices;
}

template <int DEPTH, int GROUPS, bool DECAYS, bool HAS_OUT, bool PAIRS>
static int launch_of(const mn_token_params &job, int count, int64_t segments,
                     cudaStream_t stream) {
    using smem_type = mn_token_smem<DEPTH, GROUPS, PAIRS>;
    int64_t blocks = 0;
    for (int i = 0; i < count; i++) {
        const int64_t n_slices = mn_scan_slices(job.scans[i].scan) / GROUPS;
        blocks = mn_max(blocks, n_slices * job.call.H * mn_n_spans(job.call));
    }
    if (blocks == 0) return cudaSuccess;
    if (blocks > INT32_MAX) return cudaErrorNotSupported;
    const dim3 grid((unsigned)blocks, (unsigned)count, (unsigned)segments);
    return mn_launch_smem(additive_token_scan_sm90<DEPTH, GROUPS, DECAYS, HAS_OUT, PAIRS>, grid,
                          smem_type::threads, sizeof(smem_type), stream, job);
}

template <int DEPTH, bool DECAYS>
static int launch(const mn_token_params &job, int count, int64_t segments, cudaStream_t stream) {
    bool pairs = false;
    if (job.scans[0].scan.reduce_pass) {
        return launch_of<DEPTH, 1, DECAYS, false, false>(job, count, segments, stream);
    }
    for (int i = 0; i < count; i++) {
        pairs = pairs || job.scans[i].scan.mode != MN_SCAN_PLAIN;
    }
    if constexpr (DECAYS) {
        if constexpr (DEPTH == 64) {
            const mn_chunk_scan &p = job.scans[0].scan;
            if (pairs && mn_additive_token_blocks_sm90(p.depth, p.width) < mn_scan_slices(p)) {
                return launch_of<64, 2, true, true, true>(job, count, segments, stream);
            }
        }
        if (pairs) return launch_of<DEPTH, 1, true, true, true>(job, count, segments, stream);
    }
    return launch_of<DEPTH, 1, DECAYS, true, false>(job, count, segments, stream);
}

int mn_additive_token_launch_sm90(mn_chunk_scans *scans, int *count, int64_t segments, bool decays,
                                  cudaStream_t stream) {
    mn_token_params job = {};
    int n = 0, left = 0;
    if (!mn_device_is_sm90()) return cudaSuccess;
    job.call = scans->call, job.g = scans->g;
    for (int i = 0; i < *count; i++) {
        if (supports(&job.scans[n], scans->scan[i], scans->call)) n++;
        else scans->scan[left++] = scans->scan[i];
    }
    *count = left;
    if (n == 0) return cudaSuccess;
    if (job.scans[0].scan.depth <= 64) {
        return decays ? launch<64, true>(job, n, segments, stream)
                      : launch<64, false>(job, n, segments, stream);
    }
    return decays ? launch<128, true>(job, n, segments, stream)
                  : launch<128, false>(job, n, segments, stream);
}

}    // namespace mneme::additive
