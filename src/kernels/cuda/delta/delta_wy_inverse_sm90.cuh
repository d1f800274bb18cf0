/* delta_wy_inverse_sm90.cuh - T of all chunks on Hopper, as tiles, where nothing else is wanted of
 * them
 * yet and channels share decays: keys write where they erase, and queries may still be in the
 * making.
 *
 * One block of four warps has one chunk of one head. These are few, and what they take little, so
 * that blocks find smem beside those of another kernel: most of the time each waits for itself. */
#ifndef MN_KERNELS_CUDA_DELTA_DELTA_WY_INVERSE_SM90_CUH
#define MN_KERNELS_CUDA_DELTA_DELTA_WY_INVERSE_SM90_CUH

#include "kernels/cuda/prim/pdl.cuh"
#include "kernels/cuda/prim/tma.cuh"
#include "kernels/cuda/delta/delta_intra_chunk.cuh"
#include "kernels/cuda/delta/delta_mma.cuh"

enum { MN_DELTA_WY_THREADS = 128 };

template <int KP>
struct mn_wy_inverse_smem {
    union {
        alignas(1024) unsigned char e[mn_tile_bytes<KP>()];
        mn_delta_wy_solver solver;    // once the keys have been read
    };
    alignas(16) mn_delta_log_decays log_decays;
    uint64_t full;
};

#if MN_HAS_WGMMA

/* One thread calls. */
template <int KP>
__device__ inline void mn_wy_inverse_tma_load(mn_wy_inverse_smem<KP> &smem, const CUtensorMap &keys,
                                           int h,
                                       int t, int b) {
    constexpr int matrix = MN_DELTA_MATRIX * (int)sizeof(mn_bf16);
    mn_mbarrier_init(&smem.full, 1);
    mn_mbarrier_init_fence();
    mn_mbarrier_arrive_expect_tx(&smem.full, KP / 64 * matrix);
#pragma unroll
    for (int smem_tile = 0; smem_tile < KP / 64; smem_tile++) {
        mn_tma_load(smem.e + smem_tile * matrix, keys, &smem.full, 64 * smem_tile, h, t, b);
    }
}

/* Rows of tile `left` with those of tile `right`, 64 each, by four warps: a warp has 16 of them. */
template <int KP>
__device__ inline void mn_wgmma_scores(float (&sum)[8][4], unsigned left, unsigned right) {
    mn_mma_fence<true>();
#pragma unroll
    for (int k = 0; k < KP; k += 16) {
        const unsigned at = k / 64 * 8192 + k % 64 * 2;
        mn_wgmma_m64n64k16(sum, left + at, right + at);
    }
    mn_mma_commit_wait<true>();
}

template <int KP>
__device__ inline void mn_wy_inverse_chunk(mn_wy_inverse_smem<KP> &smem, const mn_delta_params &job,
                                      const CUtensorMap &keys) {
    const mn_delta_args &p = job.p;
    const int h = (int)(blockIdx.x % (unsigned)p.call.H), index = (int)blockIdx.x;
    const mn_tile_span tile = mn_tile_at(p.call, MN_DELTA_CHUNK, blockIdx.x / (unsigned)p.call.H);
    const int count = (int)tile.n_rows, warp = threadIdx.x / 32;
    const bool copies = p.call.cu_seqlens && count < MN_DELTA_CHUNK;    // others' keys follow
    float sum[8][4] = {};
    if (count == 0) return;
    if (copies) {
        mn_tile_load<KP, MN_DELTA_WY_THREADS>(smem.e, p.e, true, tile.span, h, tile.first, count, 0,
                                            p.call.K, threadIdx.x);
        mn_cp_async_commit();
    } else if (threadIdx.x == 0) {
        mn_wy_inverse_tma_load(smem, keys, h, (int)(tile.span.t0 + tile.first), (int)tile.span.b);
    }
    if (warp == 0) mn_delta_cumsum_decays(smem.log_decays, p, tile.span, h, tile.first, count);
    mn_cp_async_wait<0>();
    __syncthreads();
    if (copies) mn_fence_proxy_async();
    else mn_mbarrier_wait(&smem.full, 0);
    mn_wgmma_scores<KP>(sum, mn_shared_u32(smem.e), mn_shared_u32(smem.e));
    __syncthreads();
    mn_delta_decay_scores(sum, smem.log_decays, warp, false, [&](int t, int s, float x, float y) {
        *(float2 *)&smem.solver.A[t][s] = make_float2(x, y);
    });
    mn_delta_store_log_decays(job.workspace.log_decays + index, smem.log_decays);
    mn_delta_wy_inverse<MN_DELTA_WY_THREADS, true>(
        smem.solver, job.workspace.T + (int64_t)index * MN_DELTA_MATRIX, nullptr);
}

#endif

/* May start before the launch in front of it has ended: the first block waits for that. */
template <int KP>
__global__ void __launch_bounds__(MN_DELTA_WY_THREADS, 8)
delta_wy_inverse_sm90_kernel(const __grid_constant__ mn_delta_params job,
                         const __grid_constant__ CUtensorMap keys) {
#if MN_HAS_WGMMA
    extern __shared__ __align__(1024) unsigned char wy_smem_bytes[];
    mn_pdl_launch_dependents();
    mn_wy_inverse_chunk<KP>(*(mn_wy_inverse_smem<KP> *)wy_smem_bytes, job, keys);
    if (blockIdx.x == 0) mn_pdl_wait();
#endif
}

/* `early`: the launch in front makes nothing that this one reads. */
template <int KP>
inline int mn_delta_wy_inverse_sm90(const mn_delta_params &job, const CUtensorMap &keys, bool early,
                              cudaStream_t stream) {
    const int64_t blocks = mn_tile_slots(job.p.call, MN_DELTA_CHUNK) * job.p.call.H;
    if (blocks == 0) return cudaSuccess;
    if (blocks > INT32_MAX) return cudaErrorNotSupported;
    const size_t smem = sizeof(mn_wy_inverse_smem<KP>);
    if (early) {
        return mn_launch_pdl(delta_wy_inverse_sm90_kernel<KP>, dim3((unsigned)blocks),
                               MN_DELTA_WY_THREADS, smem, stream, job, keys);
    }
    return mn_launch_smem(delta_wy_inverse_sm90_kernel<KP>, dim3((unsigned)blocks),
                               MN_DELTA_WY_THREADS, smem, stream, job, keys);
}

#endif
