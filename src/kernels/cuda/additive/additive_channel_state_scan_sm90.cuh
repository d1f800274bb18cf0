/* additive_channel_state_scan_sm90.cuh - scans of keys with decays per channel on Hopper, for bf16
 * and keys of up to
 * 128: what additive_channel_state_scan.cuh computes, by splits of warps that workspace on
 * different
 * chunks of 32
 * tokens.
 *
 *   o    O = scale (Q~ M + P V)       M <- cum_decay M + K~'V
 *   dv   O = scale (K~ M + P'V)       M <- cum_decay M + Q~'V     in reverse, V the gradient of o
 *
 * Q~ are queries lowered from the chunk's start, K~ keys to its end, P scores of its own tokens.
 * One warp uses_tma the copy engine for tiles, chunks ahead, and one for results to be stored.
 * Eight
 * warps scale (additive_channel_scale_sm90.cuh): queries and keys become Q~ and K~ in their
 * positions,
 * scores
 * and cum_decays take that of the decays. A group of four warps has M, transposed, in its
 * registers; results
 * take the place of values. */
#ifndef MN_KERNELS_CUDA_ADDITIVE_ADDITIVE_CHANNEL_STATE_SCAN_SM90_CUH
#define MN_KERNELS_CUDA_ADDITIVE_ADDITIVE_CHANNEL_STATE_SCAN_SM90_CUH

#include "kernels/cuda/additive/additive_channel_scale_sm90.cuh"
#include "kernels/cuda/prim/tma.cuh"

enum {
    MN_GATED_WARPGROUP = 128,
    MN_GATED_SCALE_THREADS = 32 * MN_GATED_PAIRS * 2,
    MN_GATED_THREADS = 2 * MN_GATED_WARPGROUP + MN_GATED_SCALE_THREADS,
};

struct mn_gated_params {
    mn_call call;
    mn_chunk_scan scan;
    CUtensorMap q, k, v, g, out;
};

#if MN_HAS_WGMMA

/* ---- products of a group --------------------------------------------------------------------- */

/* Where a product finds rows of a tile; `n` bytes further on, n / 16 is added. */
__device__ inline uint64_t mn_gated_smem_desc(uint32_t address) {
    return (address & 0x3ffffu) >> 4 | (uint64_t)1 << 16 | (uint64_t)64 << 32 | (uint64_t)1 << 62;
}

__device__ inline void mn_gated_wgmma_fence(void) {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ inline void mn_gated_wgmma_commit(void) {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

/* Waits for all that was sent but the last PENDING times. */
template <int PENDING>
__device__ inline void mn_gated_wgmma_wait(void) {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

#define MN_GATED_ACC8(i)                                                                          \
    "+f"(y[i][0]), "+f"(y[i][1]), "+f"(y[i][2]), "+f"(y[i][3]), "+f"(y[(i) + 1][0]),               \
        "+f"(y[(i) + 1][1]), "+f"(y[(i) + 1][2]), "+f"(y[(i) + 1][3])

/* y (32 columns) += a b' for 16 columns of a tile, whose rows are those of b */
__device__ inline void mn_gated_wgmma_abt(float (*y)[4], const uint32_t (&a)[4], uint64_t b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 "
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
                 "{%16, %17, %18, %19}, %20, 1, 1, 1, 0;"
                 : MN_GATED_ACC8(0), MN_GATED_ACC8(2)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b)
                 : "memory");
}

/* y (64 columns) += a b for 16 rows of a tile */
__device__ inline void mn_gated_wgmma_ab(float (*y)[4], const uint32_t (&a)[4], uint64_t b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
                 "{%32, %33, %34, %35}, %36, 1, 1, 1, 1;"
                 : MN_GATED_ACC8(0), MN_GATED_ACC8(2), MN_GATED_ACC8(4), MN_GATED_ACC8(6)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b)
                 : "memory");
}

/* ---- warps that fetch and store -------------------------------------------------------------- */

/* A warp. */
template <int KP, bool HAS_OUT>
__device__ inline void mn_gated_producer(mn_gated_smem<KP> &smem, const mn_gated_params &job) {
    const mn_scan_coord &at = smem.place;
    const int iters = (int)(at.end - at.iter), h = (int)at.h, b = (int)at.span.b;
    const int column0 = (int)at.column0;
    const bool has_q = HAS_OUT || job.scan.reverse, has_k = HAS_OUT || !job.scan.reverse;
#pragma unroll 1
    for (int n = 0; n < iters; n++) {
        const int slot = n % MN_GATED_STAGES;
        const int t = (int)(at.span.t0 + mn_gated_token0(at, job.scan.reverse, n));
        mn_gated_stage<KP> &to = smem.stage[slot];
        uint64_t *full = &smem.full[slot];
        mn_mbarrier_wait(&smem.empty[slot], (n / MN_GATED_STAGES & 1) ^ 1);
        if (!mn_elect_one()) continue;
        mn_mbarrier_arrive_expect_tx(full,
                                     ((1 + has_q + has_k) * (KP / 64) + 1) * MN_GATED_SMEM_TILE);
#pragma unroll
        for (int smem_tile = 0; smem_tile < KP / 64; smem_tile++) {
            const int at_smem_tile = smem_tile * MN_GATED_SMEM_TILE;
            mn_tma_load(to.g + at_smem_tile, job.g, full, 64 * smem_tile, h, t, b);
            if (has_k) mn_tma_load(to.k + at_smem_tile, job.k, full, 64 * smem_tile, h, t, b);
            if (has_q) mn_tma_load(to.q + at_smem_tile, job.q, full, 64 * smem_tile, h, t, b);
        }
        mn_tma_load(to.v, job.v, full, column0, h, t, b);
    }
}

/* Results of a chunk with which one of several packed sequences ends; a warp calls. */
__device__ inline void mn_gated_store_rows(const mn_gated_params &job, const mn_scan_coord &at,
                                         const unsigned char *tile, int64_t t, int count) {
    const int lane = threadIdx.x % 32, vec16 = lane % 8;
    const int64_t j = at.column0 + 8 * vec16;
    for (int row = lane / 8; j < job.scan.width && row < count; row += 4) {
        mn_bf16 *to = mn_row<mn_bf16>(job.scan.out, at.span.b, at.span.t0 + t + row, at.h) + j;
        *(uint4 *)to = *(const uint4 *)(tile + mn_gated_swizzle(row, vec16));
    }
}

/* A warp: the place of a chunk is free when the next one's results are on their way. */
template <int KP>
__device__ inline void mn_gated_tma_store(mn_gated_smem<KP> &smem, const mn_gated_params &job) {
    const mn_scan_coord &at = smem.place;
    const int iters = (int)(at.end - at.iter), lane = threadIdx.x % 32;
    for (int n = 0; n <= iters; n++) {
        if (n < iters) {
            const int64_t t = mn_gated_token0(at, job.scan.reverse, n);
            const int count = mn_gated_chunk_len(at, t);
            const unsigned char *tile = smem.stage[n % MN_GATED_STAGES].v;
            mn_mbarrier_wait(&smem.out_full[n % MN_GATED_STAGES], n / MN_GATED_STAGES & 1);
            if (job.call.cu_seqlens && count < MN_GATED_CHUNK) {
                mn_gated_store_rows(job, at, tile, t, count);
                __syncwarp();
            } else if (lane == 0) {
                mn_tma_store(job.out, tile, (int)at.column0, (int)at.h, (int)(at.span.t0 + t),
                              (int)at.span.b);
            }
        }
        if (lane > 0) continue;
        if (n < iters) asm volatile("cp.async.bulk.wait_group.read 1;" ::: "memory");
        else mn_tma_store_wait_read();
        if (n > 0) mn_mbarrier_arrive(&smem.empty[(n - 1) % MN_GATED_STAGES]);
    }
}

/* ---- the group that has the state ------------------------------------------------------------ */

/* The state, transposed: a thread has two of the 64 value columns and, of each eight channels, two.
 * */
template <int KP>
struct mn_gated_state {
    float at[KP / 8][4];

    template <typename F>
    __device__ void each(F use) {
        const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane / 4;
#pragma unroll
        for (int i = 0; i < KP / 2; i++) {
            use(at[i / 4][i % 4], i / 4 * 8 + lane % 4 * 2 + i % 2, row + i % 4 / 2 * 8);
        }
    }

    __device__ void begin(const mn_chunk_scan &p, const mn_scan_coord &place) {
        const float *from = mn_row<float>(p.state0, place.n, 0, place.h);
        const int depth = from && !p.reduce_pass ? (int)p.depth : 0;
        const int left = (int)min(p.width - place.column0, (int64_t)MN_SCAN_WIDTH);
        each([&](float &cell, int i, int j) {
            const bool inside = i < depth && j < left;
            cell = inside ? p.into * from[i * p.state_row + place.column0 + j] : 0.0f;
        });
        for (int before = p.reduce_pass ? 0 : (int)blockIdx.z; before > 0; before--) {
            const int64_t index = place.index - before * place.stride;
            const float *cum_decays = p.cum_decays + index * MN_SCAN_DECAYS;
            const float4 *sums = (const float4 *)(p.sums + index * KP * MN_SCAN_WIDTH);
            each([&](float &cell, int i, int) { cell *= cum_decays[i]; });
#pragma unroll
            for (int k = 0; k < KP / 8; k++) {
                const float4 x = sums[k * MN_GATED_WARPGROUP + threadIdx.x];
                at[k][0] += x.x, at[k][1] += x.y, at[k][2] += x.z, at[k][3] += x.w;
            }
        }
    }

    __device__ void end(const mn_chunk_scan &p, const mn_scan_coord &place, float cum_decay) {
        float *to = mn_row<float>(p.state, place.n, 0, place.h);
        if (p.reduce_pass) {
            float4 *sums = (float4 *)(p.sums + place.index * KP * MN_SCAN_WIDTH);
#pragma unroll
            for (int k = 0; k < KP / 8; k++) {
                sums[k * MN_GATED_WARPGROUP + threadIdx.x] =
                    make_float4(at[k][0], at[k][1], at[k][2], at[k][3]);
            }
            if (threadIdx.x < KP) p.cum_decays[place.index * MN_SCAN_DECAYS + threadIdx.x] =
                cum_decay;
        } else if (place.last && to) {
            const int depth = (int)p.depth;
            const int left = (int)min(p.width - place.column0, (int64_t)MN_SCAN_WIDTH);
            each([&](float &cell, int i, int j) {
                if (i < depth && j < left) to[i * p.state_row + place.column0 + j] = p.from * cell;
            });
        }
    }

    /* As left operands of 16 channels each. */
    __device__ void left(uint32_t (&a)[KP / 16][4]) const {
#pragma unroll
        for (int k = 0; k < KP / 16; k++) mn_frag_a_of(a[k], at[2 * k], at[2 * k + 1]);
    }

    /* In bf16, as matrices of 8 x 8: for each 64 channels, `subtile_stride` numbers from the next,
     * eight
     * such side by side for each eight rows. */
    __device__ void keep(mn_bf16 *to, int64_t subtile_stride) const {
        uint32_t *pairs = (uint32_t *)to + threadIdx.x / 32 * 512 + threadIdx.x % 32;
#pragma unroll
        for (int k = 0; k < KP / 4; k++) {
            pairs[k / 16 * (subtile_stride / 2) + k % 2 * 256 + k / 2 % 8 * 32] =
                mn_bf16x2(at[k / 2][k % 2 * 2], at[k / 2][k % 2 * 2 + 1]);
        }
    }

    __device__ void lower(const float *cum_decays) {
#pragma unroll
        for (int k = 0; k < KP / 8; k++) {
            const float2 f = *(const float2 *)(cum_decays + 8 * k + threadIdx.x % 4 * 2);
            at[k][0] *= f.x, at[k][1] *= f.y, at[k][2] *= f.x, at[k][3] *= f.y;
        }
    }
};

/* Where lane l points in 16 tokens and this warp's 16 columns of a tile of values, transposed. */
__device__ inline uint32_t mn_gated_trans_addr(uint32_t tile, int token) {
    const int lane = threadIdx.x % 32, row = token + lane % 8 + lane / 16 * 8;
    return tile + mn_gated_swizzle(row, threadIdx.x / 32 * 2 + lane / 8 % 2);
}

/* scale O as a tile of rows */
__device__ inline void mn_gated_store_out(uint32_t tile, float (&O)[4][4], float scale) {
#pragma unroll
    for (int i = 0; i < 16; i++) O[i / 4][i % 4] *= scale;
#pragma unroll
    for (int k = 0; k < 2; k++) {
        uint32_t x[4];
        mn_frag_a_of(x, O[2 * k], O[2 * k + 1]);
        mn_gated_stmatrix<true>(mn_gated_trans_addr(tile, 16 * k), x);
    }
}

/* Where a state is kept in front of a chunk: once in 64 tokens, NULL elsewhere. Against time that
 * is behind them. */
template <int KP>
__device__ inline mn_bf16 *mn_gated_saved_at(const mn_gated_params &job, const mn_scan_coord &at,
                                            int iter) {
    if (!job.scan.kept || job.scan.reduce_pass) return NULL;
    const int64_t chunk = mn_gated_token0(at, job.scan.reverse, iter) / MN_GATED_CHUNK;
    const bool first = job.scan.reverse ? chunk % 2 == 1 || chunk == at.n_chunks - 1
                                        : chunk % 2 == 0;
    if (!first) return NULL;
    const int64_t slot = mn_scan_first_slot(job.call, at.n, 2 * MN_GATED_CHUNK) + chunk / 2;
    return job.scan.kept +
           ((slot * job.call.H + at.h) * at.n_slices * KP + at.slice * MN_SCAN_WIDTH) *
               MN_SCAN_WIDTH;
}

/* HAS_OUT: leaves results; otherwise only what becomes of the state. */
template <int KP, bool HAS_OUT>
__device__ inline void mn_gated_state_scan(mn_gated_smem<KP> &smem, const mn_gated_params &job) {
    const mn_chunk_scan &p = job.scan;
    const int iters = (int)(smem.place.end - smem.place.iter);
    float cum_decay = 1.0f;
    mn_gated_state<KP> M;
    M.begin(p, smem.place);
    for (int n = 0; n < iters; n++) {
        const int slot = n % MN_GATED_STAGES, phase = n / MN_GATED_STAGES & 1;
        mn_gated_stage<KP> &in = smem.stage[slot];
        const uint32_t v = mn_smem_address(in.v);
        const uint64_t read = mn_gated_smem_desc(mn_smem_address(p.reverse ? in.k : in.q));
        const uint64_t write = mn_gated_smem_desc(mn_smem_address(p.reverse ? in.q : in.k));
        uint32_t a[KP / 16][4], z[2][4];
        float O[4][4] = {};
        mn_bf16 *kept = mn_gated_saved_at<KP>(job, smem.place, n);
        if (kept) M.keep(kept, smem.place.n_slices * (MN_SCAN_WIDTH * MN_SCAN_WIDTH));
        if (HAS_OUT) M.left(a);
        mn_mbarrier_wait(&smem.full[slot], phase);
        mn_mbarrier_wait(&smem.scaled[slot], phase);
        mn_gated_ldmatrix<true>(z[0], mn_gated_trans_addr(v, 0));
        mn_gated_ldmatrix<true>(z[1], mn_gated_trans_addr(v, 16));
        M.lower(in.cum_decays());
        if (!HAS_OUT && threadIdx.x < KP) cum_decay *= in.cum_decays()[threadIdx.x];
        mn_gated_wgmma_fence();
        if (HAS_OUT) {
            const uint64_t P = mn_gated_smem_desc(mn_smem_address(in.scores()));
#pragma unroll
            for (int i = 0; i < KP / 16; i++) {
                mn_gated_wgmma_abt(O, a[i], read + (i / 4 * MN_GATED_SMEM_TILE + i % 4 * 32) / 16);
            }
            mn_gated_wgmma_abt(O, z[0], P);
            mn_gated_wgmma_abt(O, z[1], P + 32 / 16);
            mn_gated_wgmma_commit();
        }
#pragma unroll
        for (int smem_tile = 0; smem_tile < KP / 64; smem_tile++) {
            const uint64_t rows = write + smem_tile * MN_GATED_SMEM_TILE / 16;
            mn_gated_wgmma_ab(M.at + 8 * smem_tile, z[0], rows);
            mn_gated_wgmma_ab(M.at + 8 * smem_tile, z[1], rows + MN_GATED_SUB_BYTES / 16);
        }
        mn_gated_wgmma_commit();
        if (HAS_OUT) {
            mn_gated_wgmma_wait<1>();
            mn_gated_store_out(v, O, p.scale);
            mn_fence_proxy_async();
        }
        mn_gated_wgmma_wait<0>();
        mn_mbarrier_arrive_warp(HAS_OUT ? &smem.out_full[slot] : &smem.empty[slot]);
    }
    M.end(p, smem.place, cum_decay);
}

#endif

/* ---- the kernel ------------------------------------------------------------------------------ */

template <int KP, bool HAS_OUT>
__global__ void __launch_bounds__(MN_GATED_THREADS, 1)
additive_gated_scan_sm90(const __grid_constant__ mn_gated_params job) {
#if MN_HAS_WGMMA
    extern __shared__ __align__(1024) unsigned char gated_smem_bytes[];
    mn_gated_smem<KP> &smem = *(mn_gated_smem<KP> *)gated_smem_bytes;
    if (threadIdx.x == 0) {
        for (int i = 0; i < MN_GATED_STAGES; i++) {
            mn_mbarrier_init(&smem.full[i], 1);
            mn_mbarrier_init(&smem.scaled[i], 2);
            mn_mbarrier_init(&smem.out_full[i], MN_GATED_WARPGROUP / 32);
            mn_mbarrier_init(&smem.empty[i], HAS_OUT ? 1 : MN_GATED_WARPGROUP / 32);
        }
        mn_mbarrier_init_fence();
        smem.place = mn_scan_block_coord(job.call, job.scan, MN_GATED_CHUNK);
    }
    __syncthreads();
    if (smem.place.idle) return;
    if (threadIdx.x < MN_GATED_WARPGROUP) {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 168;");
        mn_gated_state_scan<KP, HAS_OUT>(smem, job);
    } else if (threadIdx.x < MN_GATED_WARPGROUP + MN_GATED_SCALE_THREADS) {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 152;");
        mn_gated_scale<KP, HAS_OUT>(smem, job.scan.reverse);
    } else {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        const int warp = threadIdx.x / 32 % 4;
        if (warp == 0) mn_gated_producer<KP, HAS_OUT>(smem, job);
        if (warp == 1 && HAS_OUT) mn_gated_tma_store<KP>(smem, job);
    }
#endif
}

/* Whether the kernel serves a scan: by its kind and sizes, never by its length; rows have to be
 * such that the copy engine can bring them. Fills in the maps. */
inline bool mn_gated_supported(mn_gated_params *job, const mn_chunk_scans *scans) {
    const mn_chunk_scan &p = scans->scan[0];
    const mn_call &call = scans->call;
    const mn_in &q = p.reverse ? p.y : p.x, &k = p.reverse ? p.x : p.y;
    job->call = call, job->scan = p;
    return p.mode == MN_SCAN_PLAIN && p.state_column == 1 && p.depth <= 128 &&
           p.depth % 8 == 0 && p.width % 8 == 0 && mn_device_is_sm90() &&
           mn_tma_map(&job->q, q, call, p.depth, MN_GATED_CHUNK) &&
           mn_tma_map(&job->k, k, call, p.depth, MN_GATED_CHUNK) &&
           mn_tma_map(&job->v, p.z, call, p.width, MN_GATED_CHUNK) &&
           mn_tma_map(&job->g, scans->g, call, p.depth, MN_GATED_CHUNK) &&
           (p.out.data ? mn_tma_map(&job->out, p.out, call, p.width, MN_GATED_CHUNK)
                       : p.kept != NULL);
}

#endif
