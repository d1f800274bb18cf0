/* delta_wy_inverse_sm90.cuh - T of all chunks on Hopper, as tiles, where nothing else is wanted of
 * them
 * yet and channels share decays: keys write where they erase, and queries may still be in the
 * making.
 *
 * One block of four warps has one chunk of one head. These are few, and what they take little, so
 * that blocks find room beside those of another kernel: most of the time each waits for itself. */
#ifndef MN_KERNELS_CUDA_DELTA_DELTA_WY_INVERSE_SM90_CUH
#define MN_KERNELS_CUDA_DELTA_DELTA_WY_INVERSE_SM90_CUH

#include "kernels/cuda/prim/pdl.cuh"
#include "kernels/cuda/prim/tma.cuh"
#include "kernels/cuda/delta/delta_intra_chunk.cuh"
#include "kernels/cuda/delta/delta_mma.cuh"

enum { MN_DELTA_SOLVERS = 128 };

template <int KP>
struct mn_triangle_smem {
    union {
        alignas(1024) unsigned char e[mn_tile_bytes<KP>()];
        mn_delta_solver solver;    // once the keys have been read
    };
    alignas(16) mn_delta_levels levels;
    uint64_t there;
};

#if MN_HAS_WGMMA

/* One thread calls. */
template <int KP>
__device__ inline void mn_triangle_request(mn_triangle_smem<KP> &room, const CUtensorMap &keys,
                                           int h,
                                       int t, int b) {
    constexpr int square = MN_DELTA_SQUARE * (int)sizeof(mn_bf16);
    mn_mbarrier_init(&room.there, 1);
    mn_mbarrier_init_fence();
    mn_mbarrier_arrive_expect_tx(&room.there, KP / 64 * square);
#pragma unroll
    for (int smem_tile = 0; smem_tile < KP / 64; smem_tile++) {
        mn_tma_load(room.e + smem_tile * square, keys, &room.there, 64 * smem_tile, h, t, b);
    }
}

/* Rows of tile `left` with those of tile `right`, 64 each, by four warps: a warp has 16 of them. */
template <int KP>
__device__ inline void mn_group_scores(float (&sum)[8][4], unsigned left, unsigned right) {
    mn_unit_begin<true>();
#pragma unroll
    for (int k = 0; k < KP; k += 16) {
        const unsigned at = k / 64 * 8192 + k % 64 * 2;
        mn_group_product(sum, left + at, right + at);
    }
    mn_unit_end<true>();
}

template <int KP>
__device__ inline void mn_triangle_of(mn_triangle_smem<KP> &room, const mn_delta_job &job,
                                      const CUtensorMap &keys) {
    const mn_delta_args &p = job.p;
    const int h = (int)(blockIdx.x % (unsigned)p.call.H), index = (int)blockIdx.x;
    const mn_tile_span tile = mn_tile_at(p.call, MN_DELTA_CHUNK, blockIdx.x / (unsigned)p.call.H);
    const int count = (int)tile.n_rows, warp = threadIdx.x / 32;
    const bool copies = p.call.cu_seqlens && count < MN_DELTA_CHUNK;    // others' keys follow
    float sum[8][4] = {};
    if (count == 0) return;
    if (copies) {
        mn_tile_load<KP, MN_DELTA_SOLVERS>(room.e, p.e, true, tile.span, h, tile.first, count, 0,
                                            p.call.K, threadIdx.x);
        mn_copy_commit();
    } else if (threadIdx.x == 0) {
        mn_triangle_request(room, keys, h, (int)(tile.span.t0 + tile.first), (int)tile.span.b);
    }
    if (warp == 0) mn_delta_sum_decays(room.levels, p, tile.span, h, tile.first, count);
    mn_copy_wait<0>();
    __syncthreads();
    if (copies) mn_fence_proxy_async();
    else mn_mbarrier_wait(&room.there, 0);
    mn_group_scores<KP>(sum, mn_shared(room.e), mn_shared(room.e));
    __syncthreads();
    mn_delta_decay_scores(sum, room.levels, warp, false, [&](int t, int s, float x, float y) {
        *(float2 *)&room.solver.A[t][s] = make_float2(x, y);
    });
    mn_delta_leave_levels(job.work.levels + index, room.levels);
    mn_delta_invert<MN_DELTA_SOLVERS, true>(
        room.solver, job.work.T + (int64_t)index * MN_DELTA_SQUARE, nullptr);
}

#endif

/* May start before the launch in front of it has ended: the first block waits for that. */
template <int KP>
__global__ void __launch_bounds__(MN_DELTA_SOLVERS, 8)
mn_delta_triangle_kernel(const __grid_constant__ mn_delta_job job,
                         const __grid_constant__ CUtensorMap keys) {
#if MN_HAS_WGMMA
    extern __shared__ __align__(1024) unsigned char triangle_bytes[];
    mn_pdl_launch_dependents();
    mn_triangle_of<KP>(*(mn_triangle_smem<KP> *)triangle_bytes, job, keys);
    if (blockIdx.x == 0) mn_pdl_wait();
#endif
}

/* `early`: the launch in front makes nothing that this one reads. */
template <int KP>
inline int mn_delta_triangles(const mn_delta_job &job, const CUtensorMap &keys, bool early,
                              cudaStream_t stream) {
    const int64_t blocks = mn_tile_slots(job.p.call, MN_DELTA_CHUNK) * job.p.call.H;
    if (blocks == 0) return cudaSuccess;
    if (blocks > INT32_MAX) return cudaErrorNotSupported;
    const size_t room = sizeof(mn_triangle_smem<KP>);
    if (early) {
        return mn_launch_pdl(mn_delta_triangle_kernel<KP>, dim3((unsigned)blocks),
                               MN_DELTA_SOLVERS, room, stream, job, keys);
    }
    return mn_launch_smem(mn_delta_triangle_kernel<KP>, dim3((unsigned)blocks),
                               MN_DELTA_SOLVERS, room, stream, job, keys);
}

#endif
