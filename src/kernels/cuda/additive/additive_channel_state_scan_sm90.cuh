/* additive_channel_state_scan_sm90.cuh - scans of keys with decays per channel on Hopper, for bf16
 * and keys of up to
 * 128: what additive_channel_state_scan.cuh computes, by groups of warps that work on different
 * chunks of 32
 * tokens.
 *
 *   o    O = scale (Q~ M + P V)       M <- fall M + K~'V
 *   dv   O = scale (K~ M + P'V)       M <- fall M + Q~'V     in reverse, V the gradient of o
 *
 * Q~ are queries lowered from the chunk's start, K~ keys to its end, P scores of its own tokens.
 * One warp requests the copy engine for tiles, chunks ahead, and one for results to be stored.
 * Eight
 * warps scale (additive_channel_scale_sm90.cuh): queries and keys become Q~ and K~ in their places,
 * scores
 * and falls take that of the decays. A group of four warps has M, turned, in its registers; results
 * take the place of values. */
#ifndef MN_KERNELS_CUDA_ADDITIVE_ADDITIVE_CHANNEL_STATE_SCAN_SM90_CUH
#define MN_KERNELS_CUDA_ADDITIVE_ADDITIVE_CHANNEL_STATE_SCAN_SM90_CUH

#include "kernels/cuda/additive/additive_channel_scale_sm90.cuh"
#include "kernels/cuda/prim/tma.cuh"

enum {
    MN_GATED_GROUP = 128,
    MN_GATED_SCALERS = 32 * MN_GATED_PAIRS * 2,
    MN_GATED_THREADS = 2 * MN_GATED_GROUP + MN_GATED_SCALERS,
};

struct mn_gated_job {
    mn_call call;
    mn_scan walk;
    CUtensorMap q, k, v, g, out;
};

#if MN_HAS_WGMMA

/* ---- products of a group --------------------------------------------------------------------- */

/* Where a product finds rows of a tile; `n` bytes further on, n / 16 is added. */
__device__ inline uint64_t mn_gated_sees(uint32_t address) {
    return (address & 0x3ffffu) >> 4 | (uint64_t)1 << 16 | (uint64_t)64 << 32 | (uint64_t)1 << 62;
}

__device__ inline void mn_gated_begin(void) {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ inline void mn_gated_send(void) {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

/* Waits for all that was sent but the last LEFT times. */
template <int LEFT>
__device__ inline void mn_gated_wait(void) {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}

#define MN_GATED_EIGHT(i)                                                                          \
    "+f"(y[i][0]), "+f"(y[i][1]), "+f"(y[i][2]), "+f"(y[i][3]), "+f"(y[(i) + 1][0]),               \
        "+f"(y[(i) + 1][1]), "+f"(y[(i) + 1][2]), "+f"(y[(i) + 1][3])

/* y (32 columns) += a b' for 16 columns of a tile, whose rows are those of b */
__device__ inline void mn_gated_rows(float (*y)[4], const uint32_t (&a)[4], uint64_t b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 "
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
                 "{%16, %17, %18, %19}, %20, 1, 1, 1, 0;"
                 : MN_GATED_EIGHT(0), MN_GATED_EIGHT(2)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b)
                 : "memory");
}

/* y (64 columns) += a b for 16 rows of a tile */
__device__ inline void mn_gated_depth(float (*y)[4], const uint32_t (&a)[4], uint64_t b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
                 "{%32, %33, %34, %35}, %36, 1, 1, 1, 1;"
                 : MN_GATED_EIGHT(0), MN_GATED_EIGHT(2), MN_GATED_EIGHT(4), MN_GATED_EIGHT(6)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b)
                 : "memory");
}

/* ---- warps that fetch and store -------------------------------------------------------------- */

/* A warp. */
template <int KP, bool READS>
__device__ inline void mn_gated_request(mn_gated_smem<KP> &room, const mn_gated_job &job) {
    const mn_state_scan_place &at = room.place;
    const int turns = (int)(at.end - at.turn), h = (int)at.h, b = (int)at.span.b;
    const int column0 = (int)at.column0;
    const bool has_q = READS || job.walk.reverse, has_k = READS || !job.walk.reverse;
#pragma unroll 1
    for (int n = 0; n < turns; n++) {
        const int slot = n % MN_GATED_STAGES;
        const int t = (int)(at.span.t0 + mn_gated_start(at, job.walk.reverse, n));
        mn_gated_stage<KP> &to = room.stage[slot];
        uint64_t *there = &room.there[slot];
        mn_mbarrier_wait(&room.gone[slot], (n / MN_GATED_STAGES & 1) ^ 1);
        if (!mn_elect_one()) continue;
        mn_mbarrier_arrive_expect_tx(there,
                                     ((1 + has_q + has_k) * (KP / 64) + 1) * MN_GATED_SMEM_TILE);
#pragma unroll
        for (int smem_tile = 0; smem_tile < KP / 64; smem_tile++) {
            const int at_smem_tile = smem_tile * MN_GATED_SMEM_TILE;
            mn_tma_load(to.g + at_smem_tile, job.g, there, 64 * smem_tile, h, t, b);
            if (has_k) mn_tma_load(to.k + at_smem_tile, job.k, there, 64 * smem_tile, h, t, b);
            if (has_q) mn_tma_load(to.q + at_smem_tile, job.q, there, 64 * smem_tile, h, t, b);
        }
        mn_tma_load(to.v, job.v, there, column0, h, t, b);
    }
}

/* Results of a chunk with which one of several packed sequences ends; a warp calls. */
__device__ inline void mn_gated_put_rows(const mn_gated_job &job, const mn_state_scan_place &at,
                                         const unsigned char *tile, int64_t t, int count) {
    const int lane = threadIdx.x % 32, vec16 = lane % 8;
    const int64_t j = at.column0 + 8 * vec16;
    for (int row = lane / 8; j < job.walk.width && row < count; row += 4) {
        mn_bf16 *to = mn_row<mn_bf16>(job.walk.out, at.span.b, at.span.t0 + t + row, at.h) + j;
        *(uint4 *)to = *(const uint4 *)(tile + mn_gated_place(row, vec16));
    }
}

/* A warp: the place of a chunk is free when the next one's results are on their way. */
template <int KP>
__device__ inline void mn_gated_store(mn_gated_smem<KP> &room, const mn_gated_job &job) {
    const mn_state_scan_place &at = room.place;
    const int turns = (int)(at.end - at.turn), lane = threadIdx.x % 32;
    for (int n = 0; n <= turns; n++) {
        if (n < turns) {
            const int64_t t = mn_gated_start(at, job.walk.reverse, n);
            const int count = mn_gated_count(at, t);
            const unsigned char *tile = room.stage[n % MN_GATED_STAGES].v;
            mn_mbarrier_wait(&room.done[n % MN_GATED_STAGES], n / MN_GATED_STAGES & 1);
            if (job.call.cu_seqlens && count < MN_GATED_CHUNK) {
                mn_gated_put_rows(job, at, tile, t, count);
                __syncwarp();
            } else if (lane == 0) {
                mn_tma_store(job.out, tile, (int)at.column0, (int)at.h, (int)(at.span.t0 + t),
                              (int)at.span.b);
            }
        }
        if (lane > 0) continue;
        if (n < turns) asm volatile("cp.async.bulk.wait_group.read 1;" ::: "memory");
        else mn_tma_store_wait_read();
        if (n > 0) mn_mbarrier_arrive(&room.gone[(n - 1) % MN_GATED_STAGES]);
    }
}

/* ---- the group that has the state ------------------------------------------------------------ */

/* The state, turned: a thread has two of the 64 value columns and, of each eight channels, two. */
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

    __device__ void begin(const mn_scan &p, const mn_state_scan_place &place) {
        const float *from = mn_row<float>(p.state0, place.n, 0, place.h);
        const int depth = from && !p.gathers ? (int)p.depth : 0;
        const int left = (int)min(p.width - place.column0, (int64_t)MN_SCAN_WIDTH);
        each([&](float &cell, int i, int j) {
            const bool inside = i < depth && j < left;
            cell = inside ? p.into * from[i * p.state_row + place.column0 + j] : 0.0f;
        });
        for (int before = p.gathers ? 0 : (int)blockIdx.z; before > 0; before--) {
            const int64_t index = place.index - before * place.stride;
            const float *falls = p.falls + index * MN_SCAN_FALLS;
            const float4 *sums = (const float4 *)(p.sums + index * KP * MN_SCAN_WIDTH);
            each([&](float &cell, int i, int) { cell *= falls[i]; });
#pragma unroll
            for (int k = 0; k < KP / 8; k++) {
                const float4 x = sums[k * MN_GATED_GROUP + threadIdx.x];
                at[k][0] += x.x, at[k][1] += x.y, at[k][2] += x.z, at[k][3] += x.w;
            }
        }
    }

    __device__ void end(const mn_scan &p, const mn_state_scan_place &place, float fall) {
        float *to = mn_row<float>(p.state, place.n, 0, place.h);
        if (p.gathers) {
            float4 *sums = (float4 *)(p.sums + place.index * KP * MN_SCAN_WIDTH);
#pragma unroll
            for (int k = 0; k < KP / 8; k++) {
                sums[k * MN_GATED_GROUP + threadIdx.x] =
                    make_float4(at[k][0], at[k][1], at[k][2], at[k][3]);
            }
            if (threadIdx.x < KP) p.falls[place.index * MN_SCAN_FALLS + threadIdx.x] = fall;
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
        for (int k = 0; k < KP / 16; k++) mn_left_of(a[k], at[2 * k], at[2 * k + 1]);
    }

    /* In bf16, as matrices of 8 x 8: for each 64 channels, `ws` numbers from the next, eight
     * such side by side for each eight rows. */
    __device__ void keep(mn_bf16 *to, int64_t ws) const {
        uint32_t *pairs = (uint32_t *)to + threadIdx.x / 32 * 512 + threadIdx.x % 32;
#pragma unroll
        for (int k = 0; k < KP / 4; k++) {
            pairs[k / 16 * (ws / 2) + k % 2 * 256 + k / 2 % 8 * 32] =
                mn_pair(at[k / 2][k % 2 * 2], at[k / 2][k % 2 * 2 + 1]);
        }
    }

    __device__ void lower(const float *falls) {
#pragma unroll
        for (int k = 0; k < KP / 8; k++) {
            const float2 f = *(const float2 *)(falls + 8 * k + threadIdx.x % 4 * 2);
            at[k][0] *= f.x, at[k][1] *= f.y, at[k][2] *= f.x, at[k][3] *= f.y;
        }
    }
};

/* Where lane l points in 16 tokens and this warp's 16 columns of a tile of values, turned. */
__device__ inline uint32_t mn_gated_transposed(uint32_t tile, int token) {
    const int lane = threadIdx.x % 32, row = token + lane % 8 + lane / 16 * 8;
    return tile + mn_gated_place(row, threadIdx.x / 32 * 2 + lane / 8 % 2);
}

/* scale O as a tile of rows */
__device__ inline void mn_gated_turn(uint32_t tile, float (&O)[4][4], float scale) {
#pragma unroll
    for (int i = 0; i < 16; i++) O[i / 4][i % 4] *= scale;
#pragma unroll
    for (int k = 0; k < 2; k++) {
        uint32_t x[4];
        mn_left_of(x, O[2 * k], O[2 * k + 1]);
        mn_gated_put<true>(mn_gated_transposed(tile, 16 * k), x);
    }
}

/* Where a state is kept in front of a chunk: once in 64 tokens, NULL elsewhere. Against time that
 * is behind them. */
template <int KP>
__device__ inline mn_bf16 *mn_gated_kept_at(const mn_gated_job &job, const mn_state_scan_place &at,
                                            int turn) {
    if (!job.walk.kept || job.walk.gathers) return NULL;
    const int64_t chunk = mn_gated_start(at, job.walk.reverse, turn) / MN_GATED_CHUNK;
    const bool first = job.walk.reverse ? chunk % 2 == 1 || chunk == at.n_chunks - 1
                                        : chunk % 2 == 0;
    if (!first) return NULL;
    const int64_t slot = mn_state_scan_first_slot(job.call, at.n, 2 * MN_GATED_CHUNK) + chunk / 2;
    return job.walk.kept +
           ((slot * job.call.H + at.h) * at.n_slices * KP + at.slice * MN_SCAN_WIDTH) *
               MN_SCAN_WIDTH;
}

/* READS: leaves results; otherwise only what becomes of the state. */
template <int KP, bool READS>
__device__ inline void mn_gated_scan(mn_gated_smem<KP> &room, const mn_gated_job &job) {
    const mn_scan &p = job.walk;
    const int turns = (int)(room.place.end - room.place.turn);
    float fall = 1.0f;
    mn_gated_state<KP> M;
    M.begin(p, room.place);
    for (int n = 0; n < turns; n++) {
        const int slot = n % MN_GATED_STAGES, phase = n / MN_GATED_STAGES & 1;
        mn_gated_stage<KP> &in = room.stage[slot];
        const uint32_t v = mn_smem_address(in.v);
        const uint64_t read = mn_gated_sees(mn_smem_address(p.reverse ? in.k : in.q));
        const uint64_t write = mn_gated_sees(mn_smem_address(p.reverse ? in.q : in.k));
        uint32_t a[KP / 16][4], z[2][4];
        float O[4][4] = {};
        mn_bf16 *kept = mn_gated_kept_at<KP>(job, room.place, n);
        if (kept) M.keep(kept, room.place.n_slices * (MN_SCAN_WIDTH * MN_SCAN_WIDTH));
        if (READS) M.left(a);
        mn_mbarrier_wait(&room.there[slot], phase);
        mn_mbarrier_wait(&room.made[slot], phase);
        mn_gated_matrices<true>(z[0], mn_gated_transposed(v, 0));
        mn_gated_matrices<true>(z[1], mn_gated_transposed(v, 16));
        M.lower(in.falls());
        if (!READS && threadIdx.x < KP) fall *= in.falls()[threadIdx.x];
        mn_gated_begin();
        if (READS) {
            const uint64_t P = mn_gated_sees(mn_smem_address(in.scores()));
#pragma unroll
            for (int i = 0; i < KP / 16; i++) {
                mn_gated_rows(O, a[i], read + (i / 4 * MN_GATED_SMEM_TILE + i % 4 * 32) / 16);
            }
            mn_gated_rows(O, z[0], P);
            mn_gated_rows(O, z[1], P + 32 / 16);
            mn_gated_send();
        }
#pragma unroll
        for (int smem_tile = 0; smem_tile < KP / 64; smem_tile++) {
            const uint64_t rows = write + smem_tile * MN_GATED_SMEM_TILE / 16;
            mn_gated_depth(M.at + 8 * smem_tile, z[0], rows);
            mn_gated_depth(M.at + 8 * smem_tile, z[1], rows + MN_GATED_ROWS / 16);
        }
        mn_gated_send();
        if (READS) {
            mn_gated_wait<1>();
            mn_gated_turn(v, O, p.scale);
            mn_fence_proxy_async();
        }
        mn_gated_wait<0>();
        mn_mbarrier_arrive_warp(READS ? &room.done[slot] : &room.gone[slot]);
    }
    M.end(p, room.place, fall);
}

#endif

/* ---- the kernel ------------------------------------------------------------------------------ */

template <int KP, bool READS>
__global__ void __launch_bounds__(MN_GATED_THREADS, 1)
mn_gated_kernel(const __grid_constant__ mn_gated_job job) {
#if MN_HAS_WGMMA
    extern __shared__ __align__(1024) unsigned char gated_bytes[];
    mn_gated_smem<KP> &room = *(mn_gated_smem<KP> *)gated_bytes;
    if (threadIdx.x == 0) {
        for (int i = 0; i < MN_GATED_STAGES; i++) {
            mn_mbarrier_init(&room.there[i], 1);
            mn_mbarrier_init(&room.made[i], 2);
            mn_mbarrier_init(&room.done[i], MN_GATED_GROUP / 32);
            mn_mbarrier_init(&room.gone[i], READS ? 1 : MN_GATED_GROUP / 32);
        }
        mn_mbarrier_init_fence();
        room.place = mn_state_scan_here(job.call, job.walk, MN_GATED_CHUNK);
    }
    __syncthreads();
    if (room.place.idle) return;
    if (threadIdx.x < MN_GATED_GROUP) {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 168;");
        mn_gated_scan<KP, READS>(room, job);
    } else if (threadIdx.x < MN_GATED_GROUP + MN_GATED_SCALERS) {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 152;");
        mn_gated_scale<KP, READS>(room, job.walk.reverse);
    } else {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        const int warp = threadIdx.x / 32 % 4;
        if (warp == 0) mn_gated_request<KP, READS>(room, job);
        if (warp == 1 && READS) mn_gated_store<KP>(room, job);
    }
#endif
}

/* Whether the kernel serves a walk: by its kind and sizes, never by its length; rows have to be
 * such that the copy engine can bring them. Fills in the maps. */
inline bool mn_gated_serves(mn_gated_job *job, const mn_state_scans *scans) {
    const mn_scan &p = scans->walk[0];
    const mn_call &call = scans->call;
    const mn_in &q = p.reverse ? p.y : p.x, &k = p.reverse ? p.x : p.y;
    job->call = call, job->walk = p;
    return p.duty == MN_SCAN_PLAIN && p.state_column == 1 && p.depth <= 128 &&
           p.depth % 8 == 0 && p.width % 8 == 0 && mn_device_is_sm90() &&
           mn_tma_map(&job->q, q, call, p.depth, MN_GATED_CHUNK) &&
           mn_tma_map(&job->k, k, call, p.depth, MN_GATED_CHUNK) &&
           mn_tma_map(&job->v, p.z, call, p.width, MN_GATED_CHUNK) &&
           mn_tma_map(&job->g, scans->g, call, p.depth, MN_GATED_CHUNK) &&
           (p.out.data ? mn_tma_map(&job->out, p.out, call, p.width, MN_GATED_CHUNK)
                       : p.kept != NULL);
}

#endif
