/* delta_grad_sm90.cuh - delta_grad.cuh on Hopper, for decays that channels share, w = e and keys of
 * up to 128 channels, or of 256 in two halves: the same sums in the same order.
 *
 * A block of delta_grad_kernel waits for its tiles, multiplies, and stores, one after the other,
 * and is alone on its processor. Here a block stays and goes through chunks; a producer warp has
 * TMA load what the next ones need while 16 warps compute. The halves of a chunk are neighbours,
 * so that what both load comes from the second cache once. */
#ifndef MN_KERNELS_CUDA_DELTA_DELTA_GRAD_SM90_CUH
#define MN_KERNELS_CUDA_DELTA_DELTA_GRAD_SM90_CUH

#include "kernels/cuda/delta/delta_grad.cuh"
#include "kernels/cuda/delta/delta_launch.cuh"

namespace mneme::delta {

enum { MN_GRAD_SM90_THREADS = MN_DELTA_GRAD_THREADS + 128 };    // a warpgroup gives registers

/* A block's chunks: number `index` is half index % HALVES of record index / HALVES, each of KT
 * channels. */
template <int KT, int HALVES>
__device__ inline int64_t mn_grad_channel0(int64_t index) {
    return HALVES == 1 ? 0 : index % HALVES * KT;
}

/* The tensors for TMA: q, e, do, and of the workspace what the scans have left. */
struct mn_grad_tma_maps {
    CUtensorMap q, e, cot, S, D, R, dX, P, A;
};

template <int KT>
struct alignas(1024) mn_grad_sm90_keys {
    unsigned char q[mn_tile_bytes<KT>()], e[mn_tile_bytes<KT>()];
};

/* Two tiles of value columns are under way; keys and decays of two chunks. P and A of a chunk are
 * loaded to where their gradients go. */
template <int KT>
struct mn_grad_sm90_smem {
    alignas(1024) mn_grad_stage<KT> stage[2];
    mn_grad_sm90_keys<KT> keys[2];
    alignas(1024) mn_grad_matrices matrices;
    mn_delta_log_decays log_decays[2];
    mn_grad_sums sums[2];
    mn_grad_coord place[2];
    uint64_t stage_full[2], stage_empty[2], keys_full[2], keys_empty[2];
    uint64_t matrices_full, matrices_empty;
};

/* What is one chunk's, as the functions of delta_grad.cuh know it. */
struct mn_grad_chunk {
    struct {
        unsigned char *q, *e, *w;
    } keys;
    mn_grad_matrices &matrices;
    const mn_delta_log_decays &log_decays;
    mn_grad_sums &sums;
};

#if MN_HAS_WGMMA

/* ---- the producer warp ----------------------------------------------------------------------- */

/* Whether TMA may load rows of tensors: they are tokens of the chunk's sequence, or zeros behind
 * the tensor's end. */
__device__ inline bool mn_grad_is_full(const mn_delta_params &job, const mn_grad_coord &at) {
    return !job.p.call.cu_seqlens || at.count == MN_DELTA_CHUNK;
}

/* The warp's own copies are there, for those who read them and for TMA, which writes over them. */
__device__ inline void mn_grad_copies_done(void) {
    mn_cp_async_commit();
    mn_cp_async_wait<0>();
    mn_fence_proxy_async();
    __syncwarp();
}

/* Issues loads of `tiles` tiles of 64 columns of 64 rows from (h, t, b) on. */
template <int TILES>
__device__ inline void mn_grad_tma_load(unsigned char *to, const CUtensorMap &map, uint64_t *full,
                                        int64_t column, int64_t h, int64_t t, int64_t b) {
#pragma unroll
    for (int i = 0; i < TILES; i++) {
        mn_tma_load(to + i * mn_tile_bytes<64>(), map, full, (int)column + 64 * i, (int)h, (int)t,
                    (int)b);
    }
}

/* Loads q, e and the decays of a chunk. All lanes call; each arrives at the mbarrier. */
template <int KT>
__device__ inline void mn_grad_load_keys(mn_grad_sm90_smem<KT> &smem, int slot,
                                         const mn_delta_params &job, const mn_grad_tma_maps &maps,
                                         const mn_grad_coord &at) {
    const mn_delta_args &p = job.p;
    const int lane = threadIdx.x % 32;
    const bool full = mn_grad_is_full(job, at);
    const int64_t key = mn_key_head(p.call, at.h), t = at.tile.span.t0 + at.tile.first;
    mn_grad_sm90_keys<KT> &to = smem.keys[slot];
    uint64_t *mbar = &smem.keys_full[slot];
    if (!full) {
        mn_tile_load<KT, 32>(to.q, p.q, true, at.tile.span, key, at.tile.first, at.count,
                             at.channel0, p.call.K, lane);
        mn_tile_load<KT, 32>(to.e, p.e, true, at.tile.span, key, at.tile.first, at.count,
                             at.channel0, p.call.K, lane);
        mn_grad_copies_done();
    }
    if (lane > 0) {
        mn_mbarrier_arrive(mbar);
        return;
    }
    smem.place[slot] = at;
    mn_mbarrier_arrive_expect_tx(mbar, (int)sizeof(mn_delta_log_decays) +
                                           (full ? 2 * mn_tile_bytes<KT>() : 0));
    mn_tma_load_1d(&smem.log_decays[slot], job.workspace.log_decays + at.index,
                   (int)sizeof(mn_delta_log_decays), mbar);
    if (!full) return;
    mn_grad_tma_load<KT / 64>(to.q, maps.q, mbar, at.channel0, key, t, at.tile.span.b);
    mn_grad_tma_load<KT / 64>(to.e, maps.e, mbar, at.channel0, key, t, at.tile.span.b);
}

/* Likewise a tile of value columns: do, dX, R, S and D. */
template <int KT>
__device__ inline void mn_grad_load_values(mn_grad_stage<KT> &to, uint64_t *mbar,
                                           const mn_delta_params &job,
                                           const mn_grad_tma_maps &maps, const mn_grad_coord &at,
                                           int64_t column0) {
    const mn_delta_args &p = job.p;
    const int lane = threadIdx.x % 32;
    const bool full = mn_grad_is_full(job, at);
    const int64_t row = at.index * job.padded_v + column0;
    if (!full) {
        mn_tile_load<64, 32>(to.cot, p.cot.o, true, at.tile.span, at.h, at.tile.first, at.count,
                             column0, p.call.V, lane);
        mn_grad_copies_done();
    }
    if (lane > 0) {
        mn_mbarrier_arrive(mbar);
        return;
    }
    mn_mbarrier_arrive_expect_tx(mbar, 2 * mn_tile_bytes<KT>() +
                                           (full ? 3 : 2) * mn_tile_bytes<64>());
    if (full) {
        mn_tma_load(to.cot, maps.cot, mbar, (int)column0, (int)at.h,
                    (int)(at.tile.span.t0 + at.tile.first), (int)at.tile.span.b);
    }
    mn_grad_tma_load<1>(to.dX, maps.dX, mbar, 0, 0, row, 0);
    mn_grad_tma_load<KT / 64>(to.S, maps.S, mbar, at.channel0, 0, row, 0);
    mn_grad_tma_load<1>(to.R, maps.R, mbar, 0, 0, row, 0);
    mn_grad_tma_load<KT / 64>(to.D, maps.D, mbar, at.channel0, 0, row, 0);
}

/* Loads what the block's chunks need, in the order of its use, as soon as there is room. */
template <int KT, int HALVES, bool REDO>
__device__ inline void mn_grad_producer(mn_grad_sm90_smem<KT> &smem, const mn_delta_params &job,
                                        const mn_grad_tma_maps &maps, int64_t n_records) {
    const int tiles = (int)(job.padded_v / 64);
    int n = 0, iter = 0;    // tiles of value columns, chunks
    for (int64_t index = blockIdx.x; index < n_records; index += gridDim.x) {
        mn_grad_coord at = mn_grad_record_coord<REDO>(job, index / HALVES, KT * HALVES);
        if (REDO && at.index < 0) continue;
        at.channel0 = mn_grad_channel0<KT, HALVES>(index);
        mn_mbarrier_wait(&smem.keys_empty[iter % 2], (iter / 2 & 1) ^ 1);
        mn_grad_load_keys<KT>(smem, iter % 2, job, maps, at);
        for (int i = 0; i < tiles; i++, n++) {
            mn_mbarrier_wait(&smem.stage_empty[n % 2], (n / 2 & 1) ^ 1);
            mn_grad_load_values<KT>(smem.stage[n % 2], &smem.stage_full[n % 2], job, maps, at,
                                    64 * i);
        }
        mn_mbarrier_wait(&smem.matrices_empty, (iter & 1) ^ 1);
        iter++;
        if (threadIdx.x % 32 > 0) continue;
        mn_mbarrier_arrive_expect_tx(&smem.matrices_full, 2 * mn_tile_bytes<64>());
        mn_grad_tma_load<1>(smem.matrices.P, maps.P, &smem.matrices_full, 0, 0,
                            at.index * MN_DELTA_CHUNK, 0);
        mn_grad_tma_load<1>(smem.matrices.A, maps.A, &smem.matrices_full, 0, 0,
                            at.index * MN_DELTA_CHUNK, 0);
    }
}

/* ---- the warps that multiply ----------------------------------------------------------------- */

/* What is left of a chunk once all value columns are in `sum`. */
template <int KT, int HALVES>
__device__ inline void mn_grad_finish_chunk(mn_grad_sm90_smem<KT> &smem, mn_grad_acc<KT> &sum,
                                            const mn_delta_params &job, const mn_grad_coord &at,
                                            int iter) {
    const int slot = iter % 2;
    unsigned char *e = smem.keys[slot].e;
    mn_grad_chunk chunk = { { smem.keys[slot].q, e, e }, smem.matrices, smem.log_decays[slot],
                            smem.sums[slot] };
    float end = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; i++) end += sum.end[i];
    end = mn_warp_sum(end);
    if (threadIdx.x % 32 == 0) chunk.sums.end[threadIdx.x / 32] = end;
    mn_mbarrier_wait(&smem.matrices_full, iter & 1);
    mn_grad_pairs<KT>(chunk, sum, job.scale, at, [&](int t, int s) {
        const unsigned place = mn_tile_swizzle(t, s / 8) + s % 8 * 2;
        return make_uint2(*(const unsigned *)(smem.matrices.P + place),
                          *(const unsigned *)(smem.matrices.A + place));
    });
    mn_grad_states<KT>(chunk, sum, mn_shared_u32(e), job.scale, at);
    mn_grad_sync();
    mn_grad_intra_chunk<KT>(chunk, sum, mn_shared_u32(e), at);
    mn_grad_store_keys<KT>(chunk, sum, job, chunk.log_decays.beta, mn_shared_u32(e), at, [&] {
        mn_fence_proxy_async();
        mn_mbarrier_arrive_warp(&smem.matrices_empty);
    });
    mn_delta_partial *parts = (mn_delta_partial *)job.workspace.parts;
    if (HALVES > 1) parts += mn_delta_records(job) * (at.channel0 / KT);
    mn_grad_store_partial(parts[at.index], chunk.sums,
                          chunk.log_decays.gamma[MN_DELTA_CHUNK - 1], at.channel0 == 0);
    mn_fence_proxy_async();
    mn_mbarrier_arrive_warp(&smem.keys_empty[slot]);
}

template <int KT, int HALVES, bool REDO>
__device__ inline void mn_grad_consumer(mn_grad_sm90_smem<KT> &smem, const mn_delta_params &job,
                                        int64_t n_records) {
    const int tiles = (int)(job.padded_v / 64);
    int n = 0, iter = 0;
    for (int64_t index = blockIdx.x; index < n_records; index += gridDim.x) {
        mn_grad_coord at;
        if (REDO && job.cuts[index / HALVES] == 0) continue;
        at.block = threadIdx.x / 32 % 4, at.quarter = threadIdx.x / 128;
        mn_grad_acc<KT> sum = {};
        for (int i = 0; i < tiles; i++, n++) {
            mn_mbarrier_wait(&smem.stage_full[n % 2], n / 2 & 1);
            mn_grad_mma_values<KT>(sum, smem.stage[n % 2], at);
            mn_mbarrier_arrive_warp(&smem.stage_empty[n % 2]);
        }
        mn_mbarrier_wait(&smem.keys_full[iter % 2], iter / 2 & 1);
        at.tile = smem.place[iter % 2].tile, at.h = smem.place[iter % 2].h;
        at.count = smem.place[iter % 2].count;
        at.index = REDO ? smem.place[iter % 2].index : index / HALVES;
        at.channel0 = mn_grad_channel0<KT, HALVES>(index);
        mn_grad_finish_chunk<KT, HALVES>(smem, sum, job, at, iter);
        iter++;
    }
}

#endif

/* Grid: as many blocks of 17 warps as there are processors, block b has records b, b + grid, ...
 * of n_records = slots * H, or halves of records of twice as many.
 * Loads   P, A (64,64), S, D (V,KT), R, dX (V,64) and the decays of the workspace, do (64,V), q and
 *         e (64,KT), for each chunk.
 * Stores  grad.q, grad.e (64,KT) where given; parts of dbeta and dg in workspace.parts. */
template <int KT, int HALVES, bool REDO>
__global__ void __launch_bounds__(MN_GRAD_SM90_THREADS, 1)
delta_grad_sm90_kernel(const __grid_constant__ mn_delta_params job,
                       const __grid_constant__ mn_grad_tma_maps maps, int64_t n_records) {
#if MN_HAS_WGMMA
    extern __shared__ __align__(1024) unsigned char grad_smem_bytes[];
    mn_grad_sm90_smem<KT> &smem = *(mn_grad_sm90_smem<KT> *)grad_smem_bytes;
    if (REDO) {
        mn_pdl_launch_dependents();
        mn_pdl_wait();
    }
    if (threadIdx.x == 0) {
        for (int i = 0; i < 2; i++) {
            mn_mbarrier_init(&smem.stage_full[i], 32);
            mn_mbarrier_init(&smem.keys_full[i], 32);
            mn_mbarrier_init(&smem.stage_empty[i], MN_DELTA_GRAD_WARPS);
            mn_mbarrier_init(&smem.keys_empty[i], MN_DELTA_GRAD_WARPS);
        }
        mn_mbarrier_init(&smem.matrices_full, 1);
        mn_mbarrier_init(&smem.matrices_empty, MN_DELTA_GRAD_WARPS);
        mn_mbarrier_init_fence();
        if (REDO) mn_fence_proxy_async();
    }
    __syncthreads();
    if (threadIdx.x < MN_DELTA_GRAD_THREADS) {
        mn_setmaxnreg_inc<112>();
        mn_grad_consumer<KT, HALVES, REDO>(smem, job, n_records);
    } else {
        mn_setmaxnreg_dec<32>();
        if (threadIdx.x < MN_DELTA_GRAD_THREADS + 32) {
            mn_grad_producer<KT, HALVES, REDO>(smem, job, maps, n_records);
        }
    }
#endif
}

/* ---- on the host ----------------------------------------------------------------------------- */

/* Keys of so many channels, at most, have their gradients from this kernel; 128: 256 from
 * delta_grad_kernel. */
static constexpr int mn_delta_grad_sm90_keys = 256;

/* Whether the kernel serves a call of `records` chunks and heads; fills in the maps. */
inline bool mn_delta_grad_sm90_supported(mn_grad_tma_maps *maps, const mn_delta_params &job,
                                         int64_t records) {
    const mn_delta_args &p = job.p;
    const mn_delta_workspace &workspace = job.workspace;
    const int64_t K = mn_delta_padded_k(p.call.K), rows = records * job.padded_v;
    *maps = {};
    return mn_device_is_sm90() && K <= mn_delta_grad_sm90_keys && p.decay != MN_DECAY_CHANNEL &&
           !p.w.data && job.packed[MN_DELTA_Q] && job.packed[MN_DELTA_E] &&
           job.packed[MN_DELTA_COT] &&
           mn_tma_map(&maps->q, p.q, p.call, p.call.K, MN_DELTA_CHUNK) &&
           mn_tma_map(&maps->e, p.e, p.call, p.call.K, MN_DELTA_CHUNK) &&
           mn_tma_map(&maps->cot, p.cot.o, p.call, p.call.V, MN_DELTA_CHUNK) &&
           mn_delta_tma_map_rows(&maps->S, workspace.S, rows, K) &&
           mn_delta_tma_map_rows(&maps->D, workspace.D, rows, K) &&
           mn_delta_tma_map_rows(&maps->R, workspace.R, rows, MN_DELTA_CHUNK) &&
           mn_delta_tma_map_rows(&maps->dX, workspace.dX, rows, MN_DELTA_CHUNK) &&
           mn_delta_tma_map_rows(&maps->P, workspace.P, records * MN_DELTA_CHUNK, MN_DELTA_CHUNK) &&
           mn_delta_tma_map_rows(&maps->A, workspace.A, records * MN_DELTA_CHUNK, MN_DELTA_CHUNK);
}

template <int KP>
inline int mn_delta_grad_sm90(const mn_delta_params &job, const mn_grad_tma_maps &maps,
                              int64_t records, cudaStream_t stream) {
    constexpr int KT = KP < 128 ? KP : 128, HALVES = KP / KT;
    const int64_t n = mn_delta_grad_blocks(job, records) * HALVES;
    const int64_t blocks = mn_min(n, (int64_t)mn_device_props_current().processors);
    const auto kernel =
        job.cuts ? delta_grad_sm90_kernel<KT, HALVES, true>
                 : delta_grad_sm90_kernel<KT, HALVES, false>;
    return mn_launch_smem_behind(job.cuts, kernel, dim3((unsigned)blocks), MN_GRAD_SM90_THREADS,
                                 sizeof(mn_grad_sm90_smem<KT>), stream, job, maps, n);
}

}    // namespace mneme::delta

#endif
