/* additive_token_chunk_sm90.cu - the scans of additive over chunks of 64 tokens on Hopper, for
 * decays that the channels of a head share, or none, and rows of up to 128.
 *
 *   O = scale (L X M + P Z)     P = (X Y') in the chunk's triangle, decayed     M <- d M + (E Y)'Z
 *
 * What mn_chunk_scan describes, with X, Y (64, depth) and Z, O (64, 64 columns): M (depth, 64
 * columns) is the state, L the decays from where the scan comes into the chunk to each token, E
 * those to where it leaves it, d that of the chunk.
 *
 * Three warpgroups work on different chunks. The first keeps M, transposed, in registers: sums of
 * tokens are columns of wgmma, Z comes from shared memory as its left operand. The second makes P.
 * Of the third one warp loads tiles by TMA, chunks ahead, one makes a chunk ready (decays, zeros
 * behind the last token of a packed sequence), and one stores results. */
#include "kernels/cuda/additive/additive.cuh"
#include "kernels/cuda/additive/additive_state_scan.cuh"
#include "kernels/cuda/delta/delta_mma.cuh"
#include "kernels/cuda/prim/sync.cuh"
#include "kernels/cuda/prim/tma.cuh"

namespace mneme::additive {

enum {
    MN_TOKEN_CHUNK = 64,
    MN_TOKEN_STAGES = 4,             // chunks under way
    MN_TOKEN_WARPGROUP = 128,
    MN_TOKEN_THREADS = 3 * MN_TOKEN_WARPGROUP,
    MN_TOKEN_TILE = MN_TOKEN_CHUNK * 128,    // bytes of 64 rows of 64 columns
};

/* A scan of a launch, and its tensors for TMA. */
struct mn_token_scan {
    mn_chunk_scan scan;
    CUtensorMap x, y, z, out;
};

struct mn_token_params {
    mn_call call;
    mn_in g;
    mn_token_scan scans[MN_SCAN_MAX];
};

/* Tiles are swizzled as delta_smem.cuh says. */
template <int DEPTH>
struct alignas(1024) mn_token_stage {
    unsigned char x[DEPTH / 64 * MN_TOKEN_TILE], y[DEPTH / 64 * MN_TOKEN_TILE];
    unsigned char z[MN_TOKEN_TILE], P[MN_TOKEN_TILE];
};

/* Barriers of stages: tiles have come; they are ready; P is there; all have been used. */
template <int DEPTH>
struct mn_token_smem {
    mn_token_stage<DEPTH> stage[MN_TOKEN_STAGES];
    alignas(1024) unsigned char out[2][MN_TOKEN_TILE];
    mn_scan_log_decays<MN_TOKEN_CHUNK> log_decays[MN_TOKEN_STAGES];
    uint64_t full[MN_TOKEN_STAGES], ready[MN_TOKEN_STAGES], scored[MN_TOKEN_STAGES];
    uint64_t empty[MN_TOKEN_STAGES], out_full[2], out_empty[2];
    mn_scan_coord place;
};

#if MN_HAS_WGMMA

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
template <int DEPTH, bool HAS_OUT>
__device__ inline void mn_token_load(mn_token_smem<DEPTH> &smem, const mn_token_scan &job) {
    const mn_chunk_scan &p = job.scan;
    const mn_scan_coord &at = smem.place;
    const int iters = (int)(at.end - at.iter), b = (int)at.span.b, column0 = (int)at.column0;
    const int deep = (int)(p.transposed ? at.h : at.key);
    const int wide = (int)(p.transposed ? at.key : at.h);
    constexpr int rows = (HAS_OUT ? 2 : 1) * (DEPTH / 64) + 1;
#pragma unroll 1
    for (int n = 0; n < iters; n++) {
        const int slot = n % MN_TOKEN_STAGES;
        const int t = (int)(at.span.t0 + mn_token_first(at, p.reverse, n));
        mn_token_stage<DEPTH> &to = smem.stage[slot];
        uint64_t *full = &smem.full[slot];
        mn_mbarrier_wait(&smem.empty[slot], (n / MN_TOKEN_STAGES & 1) ^ 1);
        if (!mn_elect_one()) continue;
        mn_mbarrier_arrive_expect_tx(full, rows * MN_TOKEN_TILE);
#pragma unroll
        for (int i = 0; i < DEPTH / 64; i++) {
            mn_tma_load(to.y + i * MN_TOKEN_TILE, job.y, full, 64 * i, deep, t, b);
            if (HAS_OUT) mn_tma_load(to.x + i * MN_TOKEN_TILE, job.x, full, 64 * i, deep, t, b);
        }
        mn_tma_load(to.z, job.z, full, column0, wide, t, b);
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

/* Sums of log2 decays of a chunk, by tokens: as mn_scan_cumsum_decays, whose rows are in the order
 * of the scan, as those of `g` are here. A warp calls. */
__device__ inline void mn_token_cumsum_decays(mn_scan_log_decays<MN_TOKEN_CHUNK> &to,
                                              const float (&g)[MN_TOKEN_CHUNK / 32],
                                              bool reverse) {
    const double unit = 1.4426950408889634;
    double own = 0.0, log_decay, whole;
#pragma unroll
    for (int i = 0; i < MN_TOKEN_CHUNK / 32; i++) own += unit * g[i];
    mn_scan_warp_cumsum(log_decay, whole, own);
#pragma unroll
    for (int i = 0; i < MN_TOKEN_CHUNK / 32; i++) {
        const int row = threadIdx.x % 32 * (MN_TOKEN_CHUNK / 32) + i;
        const int token = reverse ? MN_TOKEN_CHUNK - 1 - row : row;
        const double before = log_decay;
        log_decay += unit * g[i];
        const double l = reverse ? before : log_decay;
        to.log_decay[token] = make_float2((float)l, (float)(l - (double)(float)l));
        to.to_end[token] = mn_exp2((float)(whole - l));
    }
    if (threadIdx.x % 32 == 0) to.whole = (float)whole;
}

/* A warp makes the decays of each chunk, and tokens behind a sequence's last zeros, which TMA does
 * only behind the last of the tensor. */
template <int DEPTH, bool DECAYS>
__device__ inline void mn_token_make_ready(mn_token_smem<DEPTH> &smem, const mn_token_params &all,
                                           const mn_chunk_scan &p) {
    const mn_scan_coord &at = smem.place;
    const int iters = (int)(at.end - at.iter);
    mn_chunk_scans decays = {};
    decays.g = all.g;
#pragma unroll 1
    for (int n = 0; n < iters; n++) {
        const int slot = n % MN_TOKEN_STAGES;
        const int64_t t = mn_token_first(at, p.reverse, n);
        const int count = mn_token_count(at, t);
        float g[MN_TOKEN_CHUNK / 32];
        if (DECAYS) mn_scan_load_decays<MN_TOKEN_CHUNK>(g, decays, at, t, count, p.reverse);
        mn_mbarrier_wait(&smem.full[slot], n / MN_TOKEN_STAGES & 1);
        if (DECAYS) mn_token_cumsum_decays(smem.log_decays[slot], g, p.reverse);
        if (all.call.cu_seqlens && count < MN_TOKEN_CHUNK) {
            mn_token_zero_tail(smem.stage[slot].y, DEPTH / 64, count);
            mn_token_zero_tail(smem.stage[slot].z, 1, count);
            mn_fence_proxy_async();
        }
        mn_mbarrier_arrive_warp(&smem.ready[slot]);
    }
}

/* A warp stores the results of all chunks: by TMA, or row by row where fewer tokens are the
 * sequence's. */
template <int DEPTH>
__device__ inline void mn_token_store(mn_token_smem<DEPTH> &smem, const mn_token_scan &job,
                                      bool packed) {
    const mn_chunk_scan &p = job.scan;
    const mn_scan_coord &at = smem.place;
    const int iters = (int)(at.end - at.iter), lane = threadIdx.x % 32, vec16 = lane % 8;
    const int64_t j = at.column0 + 8 * vec16;
    for (int n = 0; n < iters; n++) {
        const int64_t t = mn_token_first(at, p.reverse, n);
        const int count = mn_token_count(at, t);
        const unsigned char *tile = smem.out[n % 2];
        mn_mbarrier_wait(&smem.out_full[n % 2], n / 2 & 1);
        if (packed && count < MN_TOKEN_CHUNK) {
            for (int row = lane / 8; j < p.width && row < count; row += 4) {
                mn_bf16 *to = mn_row<mn_bf16>(p.out, at.span.b, at.span.t0 + t + row, at.h) + j;
                *(uint4 *)to = *(const uint4 *)(tile + delta::mn_tile_swizzle(row, vec16));
            }
        } else if (lane == 0) {
            mn_tma_store(job.out, tile, (int)at.column0, (int)at.h, (int)(at.span.t0 + t),
                         (int)at.span.b);
            mn_tma_store_wait_read();
        }
        mn_mbarrier_arrive_warp(&smem.out_empty[n % 2]);
    }
}

/* ---- the warpgroup that computes scores ------------------------------------------------------ */

/* Stores P (64,64) of every chunk; a warp has 16 rows. */
template <int DEPTH, bool DECAYS>
__device__ inline void mn_token_scores(mn_token_smem<DEPTH> &smem, bool reverse) {
    const int lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16 + lane / 4;
    const int iters = (int)(smem.place.end - smem.place.iter);
#pragma unroll 1
    for (int n = 0; n < iters; n++) {
        const int slot = n % MN_TOKEN_STAGES, phase = n / MN_TOKEN_STAGES & 1;
        mn_token_stage<DEPTH> &in = smem.stage[slot];
        const float2 *l = smem.log_decays[slot].log_decay;
        const unsigned x = mn_smem_addr(in.x), y = mn_smem_addr(in.y);
        float sum[8][4] = {};
        mn_mbarrier_wait(&smem.full[slot], phase);
        mn_mbarrier_wait(&smem.ready[slot], phase);
        mn_fence_proxy_async();
        delta::mn_mma_fence<true>();
#pragma unroll
        for (int k = 0; k < DEPTH; k += 16) {
            const unsigned at = k / 64 * MN_TOKEN_TILE + k % 64 * 2;
            delta::mn_wgmma_m64n64k16(sum, x + at, y + at);
        }
        delta::mn_mma_commit_wait<true>();
        const float2 of_row[2] = { DECAYS ? l[row] : float2{}, DECAYS ? l[row + 8] : float2{} };
#pragma unroll
        for (int tile = 0; tile < 8; tile++) {
            const int column = 8 * tile + lane % 4 * 2;
            float4 of_columns = {};
            if (DECAYS) of_columns = *(const float4 *)(l + column);
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float at[2];
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    const int r = row + 8 * half, c = column + i;
                    at[i] = sum[tile][2 * half + i];
                    if (DECAYS) {
                        const float high = i ? of_columns.z : of_columns.x;
                        const float low = i ? of_columns.w : of_columns.y;
                        at[i] *= mn_exp2((of_row[half].x - high) + (of_row[half].y - low));
                    }
                    if (reverse ? c < r : c > r) at[i] = 0.0f;
                }
                *(unsigned *)(in.P + delta::mn_tile_swizzle(row + 8 * half, tile) + lane % 4 * 4) =
                    mn_bf16x2(at[0], at[1]);
            }
        }
        mn_fence_proxy_async();
        mn_mbarrier_arrive(&smem.scored[slot]);
    }
}

/* ---- the warpgroup that keeps the state ------------------------------------------------------ */

/* The state, transposed: a thread has rows of two of the 64 value columns and, of each eight
 * channels, two. */
template <int DEPTH>
struct mn_token_state {
    float at[DEPTH / 8][4];

    template <typename F>
    __device__ void each(F use) {
        const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane / 4;
#pragma unroll
        for (int i = 0; i < DEPTH / 2; i++) {
            use(at[i / 4][i % 4], i / 4 * 8 + lane % 4 * 2 + i % 2, row + i % 4 / 2 * 8);
        }
    }

    __device__ void scale(float by) {
#pragma unroll
        for (int i = 0; i < DEPTH / 2; i++) at[i / 4][i % 4] *= by;
    }

    /* The state in front of the segment, from what those before it have left. */
    __device__ void begin(const mn_chunk_scan &p, const mn_scan_coord &place) {
        const float *from = mn_row<float>(p.state0, place.n, 0, place.h);
        const bool given = from && !p.reduce_pass;
        each([&](float &cell, int i, int j) {
            const int64_t column = place.column0 + j;
            const bool inside = given && i < p.depth && column < p.width;
            cell = inside ? p.into * from[i * p.state_row + column * p.state_column] : 0.0f;
        });
        for (int before = p.reduce_pass ? 0 : (int)blockIdx.z; before > 0; before--) {
            const int64_t index = place.index - before * place.stride;
            const float4 *sums = (const float4 *)(p.sums + index * DEPTH * MN_SCAN_WIDTH);
            scale(p.cum_decays[index * MN_SCAN_DECAYS]);
#pragma unroll
            for (int k = 0; k < DEPTH / 8; k++) {
                const float4 sum = sums[k * MN_TOKEN_WARPGROUP + threadIdx.x];
                at[k][0] += sum.x, at[k][1] += sum.y, at[k][2] += sum.z, at[k][3] += sum.w;
            }
        }
    }

    __device__ void end(const mn_chunk_scan &p, const mn_scan_coord &place, float cum_decay) {
        float *to = mn_row<float>(p.state, place.n, 0, place.h);
        if (p.reduce_pass) {
            float4 *sums = (float4 *)(p.sums + place.index * DEPTH * MN_SCAN_WIDTH);
#pragma unroll
            for (int k = 0; k < DEPTH / 8; k++) {
                sums[k * MN_TOKEN_WARPGROUP + threadIdx.x] =
                    make_float4(at[k][0], at[k][1], at[k][2], at[k][3]);
            }
            if (threadIdx.x == 0) p.cum_decays[place.index * MN_SCAN_DECAYS] = cum_decay;
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
        delta::mn_frag_a_trans(z, mn_smem_addr(z_tile), threadIdx.x / 32 * 16, s / 16 * 16);
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

/* Left operands of this warp's 16 value columns of Z, tokens as depth. `finite` has zeros where a
 * number is not; the result says whether there is one. */
__device__ inline bool mn_token_values(uint32_t (&z)[4][4], uint32_t (&finite)[4][4],
                                       const unsigned char *tile) {
    uint32_t watch = 0;
#pragma unroll
    for (int k = 0; k < 4; k++) {
        delta::mn_frag_a_trans(z[k], mn_smem_addr(tile), threadIdx.x / 32 * 16, 16 * k);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            watch = mn_bf16x2_watch(z[k][i], watch);
            finite[k][i] = z[k][i];
        }
    }
    if (!__any_sync(0xffffffffu, watch & 0x7fff7fffu)) return false;
#pragma unroll
    for (int i = 0; i < 16; i++) finite[i / 4][i % 4] &= ~mn_bf16x2_wild(finite[i / 4][i % 4]);
    return true;
}

/* O, transposed in registers, times `by` to a tile (64 tokens, 64 columns) in shared memory. */
__device__ inline void mn_token_stage_out(unsigned char *tile, const float (&O)[8][4], float by) {
    const int lane = threadIdx.x % 32, row = lane % 8 + lane / 16 * 8;
    const int vec16 = threadIdx.x / 32 * 2 + lane / 8 % 2;
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
__device__ inline void mn_token_scale_out(float (&O)[8][4], const float2 *log_decay) {
    const int column = threadIdx.x % 4 * 2;
#pragma unroll
    for (int n = 0; n < 8; n++) {
        const float low = mn_exp2(log_decay[8 * n + column].x);
        const float high = mn_exp2(log_decay[8 * n + column + 1].x);
        O[n][0] *= low, O[n][1] *= high, O[n][2] *= low, O[n][3] *= high;
    }
}

__device__ inline void mn_token_scale_values(uint32_t (&z)[4][4], const float *to_end) {
    const int column = threadIdx.x % 4 * 2;
#pragma unroll
    for (int k = 0; k < 4; k++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float2 by = *(const float2 *)(to_end + 16 * k + i / 2 * 8 + column);
            z[k][i] = mn_bf16x2_mul(z[k][i], by.x, by.y);
        }
    }
}

/* O of every chunk to smem.out, what becomes of M. HAS_OUT: otherwise M alone. */
template <int DEPTH, bool DECAYS, bool HAS_OUT>
__device__ inline void mn_token_state_scan(mn_token_smem<DEPTH> &smem, const mn_chunk_scan &p) {
    using namespace delta;
    const int iters = (int)(smem.place.end - smem.place.iter);
    const bool reverse = p.reverse;
    const float by = p.scale;
    float cum_decay = 1.0f;
    mn_token_state<DEPTH> M;
    M.begin(p, smem.place);
#pragma unroll 1
    for (int n = 0; n < iters; n++) {
        const int slot = n % MN_TOKEN_STAGES, phase = n / MN_TOKEN_STAGES & 1;
        mn_token_stage<DEPTH> &in = smem.stage[slot];
        const mn_scan_log_decays<MN_TOKEN_CHUNK> &decays = smem.log_decays[slot];
        uint32_t a[DEPTH / 16][4], z[4][4], finite[4][4];
        float O[8][4] = {};
        if (HAS_OUT) {
#pragma unroll
            for (int k = 0; k < DEPTH / 16; k++) {
                additive::mn_frag_a_of(a[k], M.at[2 * k], M.at[2 * k + 1]);
            }
        }
        mn_mbarrier_wait(&smem.full[slot], phase);
        mn_mbarrier_wait(&smem.ready[slot], phase);
        mn_fence_proxy_async();
        if (HAS_OUT) {
            mn_mma_fence<true>();
#pragma unroll
            for (int k = 0; k < DEPTH / 16; k++) {
                mn_mma_abt<true>(O, a[k], mn_smem_addr(in.x), 16 * k, 0);
            }
            mn_mma_commit<true>();
        }
        const bool wild = mn_token_values(z, finite, in.z);
        if (DECAYS) {
            const float whole = mn_exp2(decays.whole);
            M.scale(whole);
            cum_decay *= whole;
            mn_token_scale_values(z, decays.to_end);
        }
        if (HAS_OUT) {
            if (DECAYS) {
                mn_mma_wait<true>();
                mn_token_scale_out(O, decays.log_decay);
            }
            mn_mbarrier_wait(&smem.scored[slot], phase);
            mn_mma_fence<true>();
#pragma unroll
            for (int k = 0; k < 4; k++) {
                mn_mma_abt<true>(O, finite[k], mn_smem_addr(in.P), 16 * k, 0);
            }
            mn_mma_commit<true>();
        } else {
            mn_mma_fence<true>();
        }
#pragma unroll
        for (int i = 0; i < DEPTH / 64; i++) {
#pragma unroll
            for (int k = 0; k < 4; k++) {
                mn_mma_ab<true>(&M.at[8 * i], z[k], mn_smem_addr(in.y), 16 * k, i, 4);
            }
        }
        mn_mma_commit<true>();
        if (HAS_OUT) {
            mn_mbarrier_wait(&smem.out_empty[n % 2], (n / 2 & 1) ^ 1);
            mn_mma_wait<true, 1>();
            if (wild) mn_token_add_wild(O, in.z, in.P, reverse);
            mn_token_stage_out(smem.out[n % 2], O, by);
            mn_fence_proxy_async();
            mn_mbarrier_arrive(&smem.out_full[n % 2]);
        }
        mn_mma_wait<true>();
        mn_mbarrier_arrive(&smem.empty[slot]);
    }
    M.end(p, smem.place, cum_decay);
}

#endif

/* ---- the kernel ------------------------------------------------------------------------------ */

/* Grid: blocks of 384 threads, block = (n * H + h) * n_slices + slice for sequence n, head h and 64
 * columns, by scans, by segments.
 * Loads   for each chunk x, y (64, depth), z (64, 64 columns) and the decays of 64 tokens; at the
 *         start the state (depth, 64 columns), or what the segments before have left.
 * Stores  out (64, 64 columns) of each chunk, and the state at the end of the sequence; without
 *         HAS_OUT what the segment adds to a state, and its decay. */
template <int DEPTH, bool DECAYS, bool HAS_OUT>
__global__ void __launch_bounds__(MN_TOKEN_THREADS, 1)
additive_token_scan_sm90(const __grid_constant__ mn_token_params all) {
#if MN_HAS_WGMMA
    extern __shared__ __align__(1024) unsigned char token_smem_bytes[];
    mn_token_smem<DEPTH> &smem = *(mn_token_smem<DEPTH> *)token_smem_bytes;
    const mn_token_scan &job = all.scans[blockIdx.y];
    if (blockIdx.x >= mn_scan_slices(job.scan) * all.call.H * mn_n_spans(all.call)) return;
    if (threadIdx.x == 0) {
        for (int i = 0; i < MN_TOKEN_STAGES; i++) {
            mn_mbarrier_init(&smem.full[i], 1);
            mn_mbarrier_init(&smem.ready[i], 1);
            mn_mbarrier_init(&smem.scored[i], MN_TOKEN_WARPGROUP);
            mn_mbarrier_init(&smem.empty[i], MN_TOKEN_WARPGROUP);
        }
        for (int i = 0; i < 2; i++) {
            mn_mbarrier_init(&smem.out_full[i], MN_TOKEN_WARPGROUP);
            mn_mbarrier_init(&smem.out_empty[i], 1);
        }
        mn_mbarrier_init_fence();
        smem.place = mn_scan_block_coord(all.call, job.scan, MN_TOKEN_CHUNK);
    }
    __syncthreads();
    if (smem.place.idle) return;
    if (threadIdx.x < MN_TOKEN_WARPGROUP) {
        mn_setmaxnreg_inc<240>();
        mn_token_state_scan<DEPTH, DECAYS, HAS_OUT>(smem, job.scan);
    } else if (threadIdx.x < 2 * MN_TOKEN_WARPGROUP) {
        mn_setmaxnreg_dec<144>();
        if (HAS_OUT) mn_token_scores<DEPTH, DECAYS>(smem, job.scan.reverse);
    } else {
        mn_setmaxnreg_dec<120>();
        const int warp = threadIdx.x / 32 % 4;
        if (warp == 0) mn_token_load<DEPTH, HAS_OUT>(smem, job);
        if (warp == 1 && HAS_OUT) mn_token_store(smem, job, all.call.cu_seqlens != nullptr);
        if (warp == 2) mn_token_make_ready<DEPTH, DECAYS>(smem, all, job.scan);
    }
#endif
}

/* Whether the kernel serves a scan: by its kind and sizes, never by its length; rows have to be
 * such that TMA can bring them. Fills in the maps. */
static bool supports(mn_token_scan *job, const mn_chunk_scan &p, const mn_call &call) {
    job->scan = p;
    return p.mode == MN_SCAN_PLAIN && p.out.data && p.depth <= 128 &&
           p.depth % 8 == 0 && p.width % 8 == 0 &&
           mn_tma_map(&job->x, p.x, call, p.depth, MN_TOKEN_CHUNK) &&
           mn_tma_map(&job->y, p.y, call, p.depth, MN_TOKEN_CHUNK) &&
           mn_tma_map(&job->z, p.z, call, p.width, MN_TOKEN_CHUNK) &&
           mn_tma_map(&job->out, p.out, call, p.width, MN_TOKEN_CHUNK);
}

template <int DEPTH, bool DECAYS>
static int launch(const mn_token_params &job, int count, int64_t segments, cudaStream_t stream) {
    int64_t blocks = 0;
    for (int i = 0; i < count; i++) {
        const int64_t n = mn_scan_slices(job.scans[i].scan) * job.call.H * mn_n_spans(job.call);
        blocks = mn_max(blocks, n);
    }
    if (blocks == 0) return cudaSuccess;
    if (blocks > INT32_MAX) return cudaErrorNotSupported;
    const dim3 grid((unsigned)blocks, (unsigned)count, (unsigned)segments);
    const auto kernel = job.scans[0].scan.reduce_pass
                            ? additive_token_scan_sm90<DEPTH, DECAYS, false>
                            : additive_token_scan_sm90<DEPTH, DECAYS, true>;
    return mn_launch_smem(kernel, grid, MN_TOKEN_THREADS, sizeof(mn_token_smem<DEPTH>), stream,
                          job);
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
