/* delta_grad_channel_sm90.cuh - delta_grad_channel.cuh on Hopper for keys of up to 128, all of
 * whose channels a block has: TMA brings values, states and residuals, and wgmma multiplies them.
 * What follows is the same code. */
#ifndef MN_KERNELS_CUDA_DELTA_DELTA_GRAD_CHANNEL_SM90_CUH
#define MN_KERNELS_CUDA_DELTA_DELTA_GRAD_CHANNEL_SM90_CUH

#include "kernels/cuda/delta/delta_grad_channel.cuh"
#include "kernels/cuda/delta/delta_grad_sm90.cuh"

namespace mneme::delta {

/* Whether the kernel is chosen; false: delta_grad_channel_kernel, as elsewhere. */
static const bool mn_channel_grad_by_wgmma = false;

template <int KT>
struct mn_channel_grad_sm90_smem {
    mn_channel_grad_smem<KT> chunk;    // begins with the tiles of values
    uint64_t full[2];
};

#if MN_HAS_WGMMA

/* Asks for a tile of value columns; a warp calls. */
template <int KT>
__device__ inline void mn_channel_ask_values(mn_channel_grad_sm90_smem<KT> &smem,
                                             const mn_delta_params &job,
                                             const mn_grad_tma_maps &maps, const mn_grad_coord &at,
                                             int i) {
    if (64 * i >= job.padded_v) return;
    mn_grad_load_values<KT>(smem.chunk.stage[i % 2], &smem.full[i % 2], job, maps, at, 64 * i);
}

/* All value columns' sums; the first two tiles are on their way. */
template <int KT>
__device__ inline void mn_channel_wgmma_values(mn_grad_acc<KT> &sum,
                                               mn_channel_grad_sm90_smem<KT> &smem,
                                               const mn_delta_params &job,
                                               const mn_grad_tma_maps &maps,
                                               const mn_grad_coord &at) {
    const int tiles = (int)(job.padded_v / 64);
    sum = {};
#pragma unroll 1
    for (int i = 0; i < tiles; i++) {
        const mn_grad_stage<KT> &stage = smem.chunk.stage[i % 2];
        mn_mbarrier_wait(&smem.full[i % 2], i / 2 & 1);
        if (job.dX_is_dv) mn_grad_wgmma_values<KT, true>(sum, sum.end, stage, at);
        else mn_grad_wgmma_values<KT, false>(sum, sum.end, stage, at);
        __syncthreads();
        if (threadIdx.x < 32) mn_channel_ask_values<KT>(smem, job, maps, at, i + 2);
    }
}

#endif

/* Grid: chunk slots * H blocks of 512 threads.
 * Loads   and stores what delta_grad_channel_kernel does. */
template <int KT>
__global__ void __launch_bounds__(MN_DELTA_GRAD_THREADS, 1)
delta_grad_channel_sm90_kernel(const __grid_constant__ mn_delta_params job,
                               const __grid_constant__ mn_grad_fold fold,
                               const __grid_constant__ mn_grad_tma_maps maps) {
#if MN_HAS_WGMMA
    extern __shared__ __align__(1024) unsigned char channel_smem_bytes[];
    mn_channel_grad_sm90_smem<KT> &smem = *(mn_channel_grad_sm90_smem<KT> *)channel_smem_bytes;
    if (job.cuts) mn_pdl_wait();
    const mn_grad_coord at = mn_grad_block_coord(job, KT, KT);
    if (at.count == 0) return;
    if (threadIdx.x == 0) {
        for (int i = 0; i < 2; i++) mn_mbarrier_init(&smem.full[i], 32);
        mn_mbarrier_init_fence();
        if (job.cuts) mn_fence_proxy_async();
    }
    __syncthreads();
    if (threadIdx.x < 32) {
#pragma unroll 1
        for (int i = 0; i < 2; i++) mn_channel_ask_values<KT>(smem, job, maps, at, i);
    }
    mn_grad_acc<KT> sum;
    mn_grad_load_keys<KT>(smem.chunk.keys, job, at);
    mn_channel_load_log_decays<KT, true>(smem.chunk, job, at);
    mn_channel_wgmma_values<KT>(sum, smem, job, maps, at);
    mn_cp_async_wait<0>();
    __syncthreads();
    mn_channel_finish_chunk<KT, true>(smem.chunk, sum, job, at);
    mn_channel_store_betas<KT, KT>(smem.chunk, job, at);
    mn_grad_fold_heads<KT>(job, fold, at, (int *)channel_smem_bytes);
#endif
}

/* Whether the kernel serves a call of `records` chunks and heads; fills in the maps. */
inline bool mn_delta_grad_channel_sm90_supported(mn_grad_tma_maps *maps, const mn_delta_params &job,
                                                 int64_t records) {
    *maps = {};
    return mn_channel_grad_by_wgmma && mn_device_is_sm90() && job.p.call.K <= 128 &&
           job.p.decay == MN_DECAY_CHANNEL && mn_delta_grad_value_maps(maps, job, records);
}

template <int KT>
inline int mn_delta_grad_channel_sm90(const mn_delta_params &job, const mn_grad_tma_maps &maps,
                                      const mn_grad_fold &fold, int64_t records,
                                      cudaStream_t stream) {
    return mn_launch_smem_behind(job.cuts, delta_grad_channel_sm90_kernel<KT>,
                                 dim3((unsigned)mn_delta_grad_blocks(job, records)),
                                 MN_DELTA_GRAD_THREADS, sizeof(mn_channel_grad_sm90_smem<KT>),
                                 stream, job, fold, maps);
}

}    // namespace mneme::delta

#endif
