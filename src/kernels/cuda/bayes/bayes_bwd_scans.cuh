/* bayes_bwd_scans.cuh - scans on the way back of the Bayesian Layer that run side by side in a
 * launch:
 * bayes_bwd_chunk.cu. A walk that waits for another has the later blocks: by the time that they
 * start, all blocks before them have started, so that nobody waits for what cannot come. GPUs deal
 * blocks out in the order of their numbers, on which scans in one pass rely as well, though CUDA
 * does not say so. Taking work by counting needs no such order and took 7.94 ms instead of 7.24,
 * perhaps as neighbouring processors are then at different scans. */
#ifndef MN_KERNELS_CUDA_BAYES_BAYES_BWD_SCANS_CUH
#define MN_KERNELS_CUDA_BAYES_BAYES_BWD_SCANS_CUH

#include "kernels/cuda/bayes/bayes_bwd_covariance_scan.cuh"
#include "kernels/cuda/bayes/bayes_bwd_covariance_replay.cuh"
#include "kernels/cuda/bayes/bayes_bwd_mean_scan.cuh"

enum { SCAN_THREADS = 32 * MEAN_WARPS };

/* The covariances, and behind each the slices of its mean. */
template <typename T, int R>
__global__ void __launch_bounds__(SCAN_THREADS, 1)
scans_forward_kernel(const __grid_constant__ mn_bayes_args p,
                     const __grid_constant__ span_work w) {
    extern __shared__ __align__(16) double doubles[];
    const int64_t covariances = gridDim.x / (1 + w.slices), block = blockIdx.x;
    if (block >= covariances) {
        mean_forward<T, R>(*(mean_smem<R> *)doubles, p, w, block - covariances);
    } else if (threadIdx.x < 2 * R) {
        scan_covariance<R>(*(covariance_smem<R> *)doubles, p, w, block, sizeof(T) == 2);
    }
}

/* The adjoints of means, and behind them those of covariances. */
template <typename T, int R>
__global__ void __launch_bounds__(SCAN_THREADS, 1)
scans_back_kernel(const __grid_constant__ mn_bayes_args p, const __grid_constant__ span_work w) {
    extern __shared__ __align__(16) double doubles[];
    const int64_t means = (int64_t)gridDim.x / (1 + w.slices) * w.slices, block = blockIdx.x;
    if (block < means) {
        mean_backward<T, R>(*(mean_back_smem<R> *)doubles, p, w, block);
    } else if (threadIdx.x < 2 * R) {
        scan_adjoint<T, R>(*(adjoint_smem<R> *)doubles, p, w, block - means);
    }
}

#endif
