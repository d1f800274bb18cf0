/* delta_wy_inverse_sm90.cuh - T of all chunks on Hopper, where channels share decays and w = e;
 * queries may still be in the making. On the way back, and for keys of more than 128 channels, A
 * and P too (delta_intra_chunk.cuh has the equations). Of such keys 128 channels are there at a
 * time, so that as many blocks fit.
 *
 * One block of four warps has one chunk of one head, or of up to four that share keys. Warps are
 * few, and what they take little, so that blocks fit beside those of another kernel: most of the
 * time each waits for itself. */
#ifndef MN_KERNELS_CUDA_DELTA_DELTA_WY_INVERSE_SM90_CUH
#define MN_KERNELS_CUDA_DELTA_DELTA_WY_INVERSE_SM90_CUH

#include "kernels/cuda/delta/delta_intra_chunk.cuh"
#include "kernels/cuda/delta/delta_mma.cuh"
#include "kernels/cuda/delta/delta_redo.cuh"
#include "kernels/cuda/prim/pdl.cuh"
#include "kernels/cuda/prim/tma.cuh"

namespace mneme::delta {

enum { MN_DELTA_WY_THREADS = 128 };

/* Channels of keys that a block holds at a time. */
template <int KP>
static constexpr int mn_wy_inverse_channels = KP < 128 ? KP : 128;

/* SCORES: with queries, whose place P takes. */
template <int KP, bool SCORES>
struct mn_wy_inverse_smem {
    static constexpr int KT = mn_wy_inverse_channels<KP>;
    union {
        alignas(1024) unsigned char e[mn_tile_bytes<KT>()];
        mn_delta_wy_solver solver;    // once the keys have been read
    };
    alignas(1024) unsigned char q[SCORES ? mn_tile_bytes<KT>() : 16];
    alignas(16) mn_delta_log_decays log_decays;
    uint64_t full;
};

/* Which heads a block has: `heads` of one chunk; `blocks` have those of a chunk; `group` heads
 * share keys. */
struct mn_wy_inverse_order {
    unsigned heads, blocks, group;
};

#if MN_HAS_WGMMA

/* Loads rows of the chunk, (64, KT) in tiles of 64 columns, from `channel`, token t of batch row b
 * and key head h on. */
template <int KT>
__device__ inline void mn_wy_inverse_tma_load(unsigned char *to, const CUtensorMap &map,
                                              uint64_t *full, int h, int t, int b,
                                              int channel = 0) {
    constexpr int matrix = MN_DELTA_MATRIX * (int)sizeof(mn_bf16);
#pragma unroll
    for (int smem_tile = 0; smem_tile < KT / 64; smem_tile++) {
        mn_tma_load(to + smem_tile * matrix, map, full, channel + 64 * smem_tile, h, t, b);
    }
}

/* Starts sum += left right', (64,64), for tiles of 64 rows and KP columns, by a warpgroup: a warp
 * has 16 rows. */
template <int KP>
__device__ inline void mn_wgmma_scores_start(float (&sum)[8][4], unsigned left, unsigned right) {
    const uint64_t a = mn_wgmma_smem_desc(left), b = mn_wgmma_smem_desc(right);
    mn_mma_fence<true>();
#pragma unroll
    for (int k = 0; k < KP; k += 16) {
        const int at = (k / 64 * 8192 + k % 64 * 2) / 16;
        mn_wgmma_m64n64k16(sum, a + at, b + at);
    }
    mn_mma_commit<true>();
}

template <int KP>
__device__ inline void mn_wgmma_scores(float (&sum)[8][4], unsigned left, unsigned right) {
    mn_wgmma_scores_start<KP>(sum, left, right);
    mn_mma_wait<true>();
}

/* Brings part `part` of e and, for SCORES, q of a chunk and key head. Meanwhile, with the first,
 * the warps make decays: decays(warp). Who calls for a later part has passed a barrier behind the
 * products of the one before. */
template <int KP, bool SCORES, bool REDO, typename Smem, typename F>
__device__ inline void mn_wy_inverse_load(Smem &smem, const mn_delta_params &job,
                                          const CUtensorMap &keys, const CUtensorMap &queries,
                                          const mn_tile_span &tile, int key, int part, F decays) {
    constexpr int KT = mn_wy_inverse_channels<KP>;
    const mn_delta_args &p = job.p;
    const int count = (int)tile.n_rows, channel = KT * part;
    // others' keys follow, or what a redo leaves out
    const bool copies = (p.call.cu_seqlens || REDO) && count < MN_DELTA_CHUNK;
    if (copies) {
        mn_tile_load<KT, MN_DELTA_WY_THREADS>(smem.e, p.e, true, tile.span, key, tile.first, count,
                                              channel, p.call.K, threadIdx.x);
        if constexpr (SCORES) {
            mn_tile_load<KT, MN_DELTA_WY_THREADS>(smem.q, p.q, true, tile.span, key, tile.first,
                                                  count, channel, p.call.K, threadIdx.x);
        }
        mn_cp_async_commit();
    } else if (threadIdx.x == 0) {
        const int t = (int)(tile.span.t0 + tile.first), b = (int)tile.span.b;
        if (part == 0) {
            mn_mbarrier_init(&smem.full, 1);
            mn_fence_proxy_async();    // of the block's memory alone: a fence of all takes longer
        }
        mn_mbarrier_arrive_expect_tx(&smem.full, (SCORES ? 2 : 1) * mn_tile_bytes<KT>());
        mn_wy_inverse_tma_load<KT>(smem.e, keys, &smem.full, key, t, b, channel);
        if constexpr (SCORES) {
            mn_wy_inverse_tma_load<KT>(smem.q, queries, &smem.full, key, t, b, channel);
        }
    }
    if (part == 0) decays(threadIdx.x / 32);
    mn_cp_async_wait<0>();
    __syncthreads();
    if (copies) mn_fence_proxy_async();
    else mn_mbarrier_wait(&smem.full, part & 1);
}

/* P (64,64) from a swizzled tile, row by row, with zeros in blocks above the diagonal. */
__device__ inline void mn_wy_inverse_store_P(mn_bf16 *P, const unsigned char *tile) {
    for (int k = threadIdx.x; k < MN_DELTA_MATRIX / 8; k += MN_DELTA_WY_THREADS) {
        const int row = k / 8, vec16 = k % 8;
        uint4 pack = make_uint4(0, 0, 0, 0);
        if (vec16 / 2 <= row / 16) pack = *(const uint4 *)(tile + mn_tile_swizzle(row, vec16));
        *(uint4 *)(P + k * 8) = pack;
    }
}

/* The chunk of a block and the first of its heads. Of a batch, without SCORES, the last chunks of
 * all sequences are the first: the scan behind begins with the other ones, of which keys and T are
 * in the second cache then. */
template <bool SCORES, bool REDO>
__device__ inline mn_delta_chunk_place mn_wy_inverse_find_chunk(const mn_delta_params &job,
                                                                const mn_wy_inverse_order &order) {
    const mn_call &call = job.p.call;
    if (REDO) return mn_delta_find_chunk<true>(job, MN_DELTA_CHUNK);
    const unsigned turn = blockIdx.x / order.blocks, B = (unsigned)call.B;
    mn_delta_chunk_place place = {};
    mn_tile_span &tile = place.tile;
    place.h = (blockIdx.x - turn * order.blocks) * order.heads;
    if (SCORES || call.cu_seqlens) {
        tile = mn_tile_at(call, MN_DELTA_CHUNK, turn);
        place.index = (int64_t)turn * call.H + place.h;
        return place;
    }
    const unsigned n_chunks = (unsigned)((call.T + MN_DELTA_CHUNK - 1) / MN_DELTA_CHUNK);
    const unsigned n = turn % B, chunk = n_chunks - 1 - turn / B;
    place.index = ((int64_t)n * n_chunks + chunk) * call.H + place.h;
    tile.n = n, tile.span = mn_span_at(call, n), tile.first = (int64_t)chunk * MN_DELTA_CHUNK;
    tile.n_rows = min((int64_t)MN_DELTA_CHUNK, call.T - tile.first);
    return place;
}

/* From e, g and beta of a chunk, and q for SCORES, to T and the decays in the workspace, and A and
 * P. */
template <int KP, bool SCORES, bool REDO>
__device__ inline void mn_wy_inverse_chunk(mn_wy_inverse_smem<KP, SCORES> &smem,
                                           const mn_delta_params &job, const CUtensorMap &keys,
                                           const CUtensorMap &queries,
                                           const mn_wy_inverse_order &order) {
    const mn_delta_workspace &workspace = job.workspace;
    const mn_delta_chunk_place place = mn_wy_inverse_find_chunk<SCORES, REDO>(job, order);
    const mn_tile_span &tile = place.tile;
    constexpr int KT = mn_wy_inverse_channels<KP>;
    const int64_t matrix = place.index * MN_DELTA_MATRIX;
    const int warp = threadIdx.x / 32, key = (int)((unsigned)place.h / order.group);
    float sum[8][4] = {}, scores[8][4] = {};
    if (tile.n_rows == 0) return;
    const auto decays = [&](int by) {    // the first two warps have more of the inverse
        if (by != 3) return;
        mn_delta_cumsum_decays(smem.log_decays, job.p, tile.span, place.h, tile.first,
                               (int)tile.n_rows);
    };
#pragma unroll
    for (int part = 0; part < KP / KT; part++) {
        mn_wy_inverse_load<KP, SCORES, REDO>(smem, job, keys, queries, tile, key, part, decays);
        mn_wgmma_scores<KT>(sum, mn_shared_u32(smem.e), mn_shared_u32(smem.e));
        if (SCORES) mn_wgmma_scores<KT>(scores, mn_shared_u32(smem.q), mn_shared_u32(smem.e));
        __syncthreads();
    }
    mn_delta_decay_scores(sum, smem.log_decays, warp, false, [&](int t, int s, float x, float y) {
        *(float2 *)&smem.solver.A[t][s] = make_float2(x, y);
    });
    if (SCORES) {
        mn_delta_decay_scores(
            scores, smem.log_decays, warp, true, [&](int t, int s, float x, float y) {
                *(unsigned *)(smem.q + mn_tile_swizzle(t, s / 8) + s % 8 * 2) =
                    mn_bf16x2(job.scale * x, job.scale * y);
            });
    }
    mn_delta_store_log_decays(workspace.log_decays + place.index, smem.log_decays);
    mn_delta_wy_inverse<MN_DELTA_WY_THREADS, !SCORES>(smem.solver, workspace.T + matrix,
                                                      SCORES && workspace.A ? workspace.A + matrix
                                                                            : nullptr);
    if (SCORES) mn_wy_inverse_store_P(workspace.P + matrix, smem.q);
}

/* T and the decays of the chunk `place` of a redo, from its rows in front of the cut alone, by a
 * block of THREADS of which the first warpgroup multiplies; e is left in shared memory no longer
 * than that. */
template <int KP, int THREADS>
__device__ inline void mn_wy_inverse_redo(mn_wy_inverse_smem<KP, false> &smem,
                                          const mn_delta_params &job,
                                          const mn_delta_chunk_place &place) {
    const mn_delta_args &p = job.p;
    const mn_tile_span &tile = place.tile;
    const int count = (int)tile.n_rows, warp = threadIdx.x / 32;
    const bool multiplies = threadIdx.x < MN_DELTA_WY_THREADS;
    float sum[8][4] = {};
    if (multiplies) {
        mn_tile_load<KP, MN_DELTA_WY_THREADS>(smem.e, p.e, true, tile.span,
                                              mn_key_head(p.call, place.h), tile.first, count, 0,
                                              p.call.K, threadIdx.x);
        mn_cp_async_commit();
    }
    if (warp == 0) {
        mn_delta_cumsum_decays(smem.log_decays, p, tile.span, place.h, tile.first, count);
    }
    mn_cp_async_wait<0>();
    mn_fence_proxy_async();
    __syncthreads();
    if (multiplies) mn_wgmma_scores<KP>(sum, mn_shared_u32(smem.e), mn_shared_u32(smem.e));
    __syncthreads();
    if (multiplies) {
        mn_delta_decay_scores(sum, smem.log_decays, warp, false,
                              [&](int t, int s, float x, float y) {
                                  *(float2 *)&smem.solver.A[t][s] = make_float2(x, y);
                              });
    }
    mn_delta_store_log_decays(job.workspace.log_decays + place.index, smem.log_decays);
    mn_delta_wy_inverse<THREADS, true>(smem.solver, job.workspace.T + place.index * MN_DELTA_MATRIX,
                                       nullptr);
}

#endif

/* Grid: chunk slots * H blocks of 128 threads, block = slot * H + h, or as delta_redo.cuh says;
 *         without SCORES a batch's as mn_wy_inverse_find_chunk says.
 * Loads   e and, for SCORES, q (64,K) of the key head by TMA, and g and beta (64) of the head.
 * Stores  at slot * H + h workspace.T (64,64) in bf16, swizzled: (I + A)^-1 with
 *         A_ts = beta_s e_t.e_s exp(G_t - G_s) for s < t; workspace.log_decays. SCORES: row by row,
 *         and P, and A where wanted.
 * May start before the launch in front of it has ended: the first block waits for that. */
template <int KP, bool SCORES, bool REDO>
__global__ void __launch_bounds__(MN_DELTA_WY_THREADS, SCORES ? 5 : REDO ? 1 : 8)
delta_wy_inverse_sm90_kernel(const __grid_constant__ mn_delta_params job,
                             const __grid_constant__ CUtensorMap keys,
                             const __grid_constant__ CUtensorMap queries,
                             mn_wy_inverse_order order) {
#if MN_HAS_WGMMA
    extern __shared__ __align__(1024) unsigned char wy_smem_bytes[];
    mn_pdl_launch_dependents();
    mn_wy_inverse_chunk<KP, SCORES, REDO>(*(mn_wy_inverse_smem<KP, SCORES> *)wy_smem_bytes, job,
                                          keys, queries, order);
    if (blockIdx.x == 0) mn_pdl_wait();
#endif
}

/* Blocks with `heads` heads each. */
inline mn_wy_inverse_order mn_wy_inverse_order_of(const mn_call &call, int64_t heads) {
    return { (unsigned)heads, (unsigned)(call.H / heads), (unsigned)(call.H / call.J) };
}

/* Keys of so many channels, at most, have A, P and T from this kernel; 128: 256 from
 * delta_intra_chunk_kernel. */
static constexpr int mn_delta_wy_inverse_keys = 256;

/* T, A and P of all chunks, on the way back or where the scan forward takes P; false in `served`
 * where the kernel cannot. */
template <int KP>
inline int mn_delta_intra_chunk_sm90(const mn_delta_params &job, bool *served,
                                     cudaStream_t stream) {
    const mn_delta_args &p = job.p;
    const int64_t blocks = mn_delta_chunk_blocks(job, MN_DELTA_CHUNK);
    CUtensorMap keys, queries;
    *served = mn_device_is_sm90() && (KP > 128 || !job.cuts) && p.decay != MN_DECAY_CHANNEL &&
              !p.w.data && blocks > 0 && blocks <= INT32_MAX && job.packed[MN_DELTA_Q] &&
              job.packed[MN_DELTA_E] &&
              mn_tma_map(&keys, p.e, p.call, p.call.K, MN_DELTA_CHUNK) &&
              mn_tma_map(&queries, p.q, p.call, p.call.K, MN_DELTA_CHUNK);
    if (!*served) return cudaSuccess;
    auto kernel = delta_wy_inverse_sm90_kernel<KP, true, false>;
    if constexpr (KP > 128) {    // narrower ones are not made again with scores
        if (job.cuts) kernel = delta_wy_inverse_sm90_kernel<KP, true, true>;
    }
    return mn_launch_smem_behind(job.cuts, kernel, dim3((unsigned)blocks), MN_DELTA_WY_THREADS,
                                 sizeof(mn_wy_inverse_smem<KP, true>), stream, job, keys, queries,
                                 mn_wy_inverse_order_of(p.call, 1));
}

/* Where value heads share keys a block has up to four heads of a chunk, for which keys are loaded
 * and multiplied once. Two of them at a time are in work, so that the blocks on a diagonal, which
 * take two warps, are those of one head for either two. The same sums in the same order. */

enum {
    MN_WY_GROUP_HEADS = 4,     // of a block: a warp makes the decays of one
    MN_WY_GROUP_BLOCKS = 4,    // of a processor
};

template <int KP> struct mn_wy_group_smem {
    union {
        alignas(1024) unsigned char e[mn_tile_bytes<KP>()];
        mn_delta_wy_solver solver[2];    // once the keys have been read
    };
    alignas(16) mn_delta_log_decays log_decays[MN_WY_GROUP_HEADS];
    uint64_t full;
};

static_assert(MN_WY_GROUP_BLOCKS * (sizeof(mn_wy_group_smem<128>) + 1024) <= 228 * 1024,
              "blocks a processor");

#if MN_HAS_WGMMA

/* From E E' to T and the decays in the workspace, for `n` heads from head `i` of the block on, one
 * or two. */
template <int KP>
__device__ inline void mn_wy_group_pair(mn_wy_group_smem<KP> &smem, const mn_delta_params &job,
                                        const mn_delta_chunk_place &place, const float (&sum)[8][4],
                                        int i, int n) {
    const int warp = threadIdx.x / 32, pair = warp / 2;
#pragma unroll 1
    for (int j = 0; j < n; j++) {
        mn_delta_wy_solver &solver = smem.solver[j];
        mn_delta_decay_scores(sum, smem.log_decays[i + j], warp, false,
                              [&](int t, int s, float x, float y) {
                                  *(float2 *)&solver.A[t][s] = make_float2(x, y);
                              });
        mn_delta_store_log_decays(job.workspace.log_decays + place.index + i + j,
                                  smem.log_decays[i + j]);
    }
    __syncthreads();
    if (pair < n) {
        mn_delta_invert_diagonal(smem.solver[pair], warp % 2);
        mn_delta_invert_half(smem.solver[pair], warp % 2);
    }
    __syncthreads();
    for (int j = 0; j < n; j++) mn_delta_invert_quarter(smem.solver[j], warp);
    __syncthreads();
#pragma unroll 1
    for (int j = 0; j < n; j++) {
        mn_delta_store_inverse<true>(
            smem.solver[j], job.workspace.T + (place.index + i + j) * MN_DELTA_MATRIX, nullptr);
    }
}

#endif

/* Grid: chunk slots * H / order.heads blocks of 128 threads, block = slot * order.blocks + h /
 *         order.heads; a batch's as mn_wy_inverse_find_chunk says.
 * Loads   e (64,K) of the key head by TMA, and g and beta (64) of each head.
 * Stores  workspace.T and log_decays as delta_wy_inverse_sm90_kernel.
 * May start before the launch in front of it has ended: the first block waits for that. */
template <int KP>
__global__ void __launch_bounds__(MN_DELTA_WY_THREADS, MN_WY_GROUP_BLOCKS)
    delta_wy_inverse_group_sm90_kernel(const __grid_constant__ mn_delta_params job,
                                       const __grid_constant__ CUtensorMap keys,
                                       mn_wy_inverse_order order) {
#if MN_HAS_WGMMA
    extern __shared__ __align__(1024) unsigned char group_smem_bytes[];
    mn_wy_group_smem<KP> &smem = *(mn_wy_group_smem<KP> *)group_smem_bytes;
    const mn_delta_chunk_place place = mn_wy_inverse_find_chunk<false, false>(job, order);
    const mn_tile_span &tile = place.tile;
    const int key = (int)((unsigned)place.h / order.group), heads = (int)order.heads;
    float sum[8][4] = {};
    mn_pdl_launch_dependents();
    if (tile.n_rows > 0) {
        mn_wy_inverse_load<KP, false, false>(smem, job, keys, keys, tile, key, 0, [&](int warp) {
            if (warp >= heads) return;
            mn_delta_cumsum_decays(smem.log_decays[warp], job.p, tile.span, place.h + warp,
                                   tile.first, (int)tile.n_rows);
        });
        mn_wgmma_scores<KP>(sum, mn_shared_u32(smem.e), mn_shared_u32(smem.e));
#pragma unroll 1
        for (int i = 0; i < heads; i += 2) {
            __syncthreads();    // keys have been read, or T has left
            mn_wy_group_pair<KP>(smem, job, place, sum, i, min(2, heads - i));
        }
    }
    if (blockIdx.x == 0) mn_pdl_wait();
#endif
}

/* Heads of a block of a launch that has `blocks` with one each: more than one where they share
 * keys, as long as processors have a block for each two heads that these take in turn. */
inline int64_t mn_wy_inverse_heads(const mn_call &call, int64_t blocks) {
    const int64_t group = call.H / call.J, processors = mn_device_props_current().processors;
    int64_t heads = MN_WY_GROUP_HEADS;
    while (heads > 1 && (group % heads != 0 || blocks / heads < processors * heads / 2)) heads--;
    return heads;
}

/* T and the decays of all chunks. `early`: the launch in front makes nothing that this one
 * reads. */
template <int KP>
inline int mn_delta_wy_inverse_sm90(const mn_delta_params &job, const CUtensorMap &keys, bool early,
                                    cudaStream_t stream) {
    const mn_call &call = job.p.call;
    const int64_t blocks = mn_delta_chunk_blocks(job, MN_DELTA_CHUNK);
    if (blocks == 0) return cudaSuccess;
    if (blocks > INT32_MAX) return cudaErrorNotSupported;
    const int64_t heads = job.cuts ? 1 : mn_wy_inverse_heads(call, blocks);
    const mn_wy_inverse_order order = mn_wy_inverse_order_of(call, heads);
    if (heads > 1) {
        return mn_launch_smem_behind(early, delta_wy_inverse_group_sm90_kernel<KP>,
                                     dim3((unsigned)(blocks / heads)), MN_DELTA_WY_THREADS,
                                     sizeof(mn_wy_group_smem<KP>), stream, job, keys, order);
    }
    return mn_launch_smem_behind(early || job.cuts,
                                 job.cuts ? delta_wy_inverse_sm90_kernel<KP, false, true>
                                          : delta_wy_inverse_sm90_kernel<KP, false, false>,
                                 dim3((unsigned)blocks), MN_DELTA_WY_THREADS,
                                 sizeof(mn_wy_inverse_smem<KP, false>), stream, job, keys, keys,
                                 order);
}

}    // namespace mneme::delta

#endif
