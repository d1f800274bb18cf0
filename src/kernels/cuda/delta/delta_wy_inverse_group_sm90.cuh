/* delta_wy_inverse_group_sm90.cuh - T of all chunks on Hopper where value heads share keys: a block
 * of delta_wy_inverse_sm90.cuh has up to four heads of a chunk, for which keys are loaded and
 * multiplied once. Two of them at a time are in work, so that the blocks on a diagonal, which take
 * two warps, are those of one head for either two. The same sums in the same order. */
#ifndef MN_KERNELS_CUDA_DELTA_DELTA_WY_INVERSE_GROUP_SM90_CUH
#define MN_KERNELS_CUDA_DELTA_DELTA_WY_INVERSE_GROUP_SM90_CUH

#include "kernels/cuda/delta/delta_wy_inverse_sm90.cuh"

namespace mneme::delta {

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
