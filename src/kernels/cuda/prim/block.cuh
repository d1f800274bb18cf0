/* block.cuh - the threads that go through a device function together: those of a block of a
 * kernel of its own, or the consumer warps of a megakernel (decode/megakernel.cuh). */
#ifndef MN_KERNELS_CUDA_PRIM_BLOCK_CUH
#define MN_KERNELS_CUDA_PRIM_BLOCK_CUH

namespace mneme {

/* All threads of a block of THREADS. */
template <int THREADS>
struct mn_cta {
    static constexpr int size = THREADS;

    __device__ static int threads(void) {
        return THREADS;
    }

    __device__ static void sync(void) {
        __syncthreads();
    }
};

}    // namespace mneme

#endif
