/* delta_triangle.cuh - T of all chunks on Hopper, as tiles, where nothing else is wanted of them
 * yet and channels share decays: keys write where they erase, and queries may still be in the
 * making.
 *
 * One block of four warps has one chunk of one head. These are few, and what they take little, so
 * that blocks find room beside those of another kernel: most of the time each waits for itself. */
#ifndef MN_KERNELS_CUDA_DELTA_TRIANGLE_CUH
#define MN_KERNELS_CUDA_DELTA_TRIANGLE_CUH

#include "kernels/cuda/after.cuh"
#include "kernels/cuda/delta_prepare.cuh"
#include "kernels/cuda/delta_unit.cuh"

enum { MN_DELTA_SOLVERS = 128 };

template <int KP>
struct mn_triangle_room {
    union {
        alignas(1024) unsigned char e[mn_tile_bytes<KP>()];
        mn_delta_solver solver;    // once the keys have been read
    };
    alignas(16) mn_delta_levels levels;
};

/* Where a chunk's falls are kept, for scores of its queries: where P would be that others make. */
__device__ inline float4 *mn_triangle_falls(const mn_delta_job &job, int64_t index) {
    static_assert(MN_DELTA_SQUARE * sizeof(mn_bf16) >= 3 * MN_DELTA_SOLVERS * sizeof(float4),
                  "P has room for falls");
    return (float4 *)(job.work.P + index * MN_DELTA_SQUARE);
}

/* Rows of tile `left` with those of tile `right`, 64 each, by four warps: a warp has 16 of them. */
template <int KP>
__device__ inline void mn_group_scores(float (&sum)[8][4], unsigned left, unsigned right) {
    mn_unit_begin<true>();
#pragma unroll
    for (int k = 0; k < KP; k += 16) {
        const unsigned at = k / 64 * 512 + k % 64 / 8;
        mn_group_product(sum, mn_group_sees(left) + at, mn_group_sees(right) + at, k > 0);
    }
    mn_unit_end<true>();
}

template <int KP>
__device__ inline void mn_triangle_of(mn_triangle_room<KP> &room, const mn_delta_job &job) {
    const mn_delta_args &p = job.p;
    const int64_t h = blockIdx.x % p.call.H, slot = blockIdx.x / p.call.H, index = blockIdx.x;
    const mn_tile_span tile = mn_tile_at(p.call, MN_DELTA_CHUNK, slot);
    const int count = (int)tile.n_rows, warp = threadIdx.x / 32;
    float sum[8][4];
    if (count == 0) return;
    mn_tile_fetch<KP, MN_DELTA_SOLVERS>(room.e, p.e, job.packed[MN_DELTA_E], tile.span, h,
                                        tile.first, count, 0, p.call.K, threadIdx.x);
    mn_copy_commit();
    if (warp == 0) mn_delta_sum_decays(room.levels, p, tile.span, h, tile.first, count);
    mn_copy_wait<0>();
    __syncthreads();
    mn_shared_show();
    mn_group_scores<KP>(sum, mn_shared(room.e), mn_shared(room.e));
    __syncthreads();
    mn_delta_falls falls;
    falls.make(room.levels, warp);
    falls.put(mn_triangle_falls(job, index));
    const auto put = [&](int t, int s, float x, float y) {
        *(float2 *)&room.solver.A[t][s] = make_float2(x, y);
    };
    mn_delta_decay_scores(sum, falls, room.levels, warp, false, put);
    mn_delta_leave_levels(job.work.levels + index, room.levels);
    mn_delta_invert<MN_DELTA_SOLVERS, true>(room.solver, job.work.T + index * MN_DELTA_SQUARE,
                                            nullptr);
}

/* May start before the launch in front of it has ended: the first block waits for that. */
template <int KP>
__global__ void __launch_bounds__(MN_DELTA_SOLVERS, 8)
mn_delta_triangle_kernel(const __grid_constant__ mn_delta_job job) {
#if MN_HAS_WGMMA
    extern __shared__ __align__(1024) unsigned char triangle_bytes[];
    mn_let_next_begin();
    mn_triangle_of<KP>(*(mn_triangle_room<KP> *)triangle_bytes, job);
    if (blockIdx.x == 0) mn_wait_for_before();
#endif
}

/* `early`: the launch in front makes nothing that this one reads. */
template <int KP>
inline int mn_delta_triangles(const mn_delta_job &job, bool early, cudaStream_t stream) {
    const int64_t blocks = mn_tile_slots(job.p.call, MN_DELTA_CHUNK) * job.p.call.H;
    if (blocks == 0) return cudaSuccess;
    if (blocks > INT32_MAX) return cudaErrorNotSupported;
    const size_t room = sizeof(mn_triangle_room<KP>);
    if (early) {
        return mn_launch_early(mn_delta_triangle_kernel<KP>, dim3((unsigned)blocks),
                               MN_DELTA_SOLVERS, room, stream, job);
    }
    return mn_launch_with_room(mn_delta_triangle_kernel<KP>, dim3((unsigned)blocks),
                               MN_DELTA_SOLVERS, room, stream, job);
}

#endif
