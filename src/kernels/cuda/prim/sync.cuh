/* sync.cuh - how threads of a kernel wait for others, beyond __syncthreads and mbarriers: named
 * barriers, clusters, counters in device memory; and hints to the processor.
 *
 * What libcu++ has is called by its name (cuda::ptx). Its atomic_ref goes by generic addresses,
 * which these counters in device memory need not pay for; it has neither named barriers nor
 * prefetches nor setmaxnreg. */
#ifndef MN_KERNELS_CUDA_PRIM_SYNC_CUH
#define MN_KERNELS_CUDA_PRIM_SYNC_CUH

#include <cuda/ptx>

#include "kernels/cuda/prim/common.cuh"

namespace mneme {

/* ---- named barriers of a block: `count` threads, whole warps --------------------------------- */

__device__ __forceinline__ void mn_named_barrier_sync(int id, int count) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(count) : "memory");
}

/* Arrives without waiting. */
__device__ __forceinline__ void mn_named_barrier_arrive(int id, int count) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(count) : "memory");
}

/* ---- counters in device memory --------------------------------------------------------------- */

/* What the thread that stored this value had written, or waited for, before is seen after it. */
__device__ __forceinline__ int mn_load_acquire(const int *from) {
    int value;
    asm volatile("ld.acquire.gpu.global.b32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
    return value;
}

__device__ __forceinline__ void mn_store_release(int *to, int value) {
    asm volatile("st.release.gpu.global.b32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}

__device__ __forceinline__ void mn_store_relaxed(int *to, int value) {
    asm volatile("st.relaxed.gpu.global.b32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}

/* ---- hints ----------------------------------------------------------------------------------- */

__device__ __forceinline__ void mn_prefetch_l2(const void *at) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(at));
}

__device__ __forceinline__ void mn_prefetch_l1(const void *at) {
    asm volatile("prefetch.global.L1 [%0];" ::"l"(at));
}

/* Registers of each thread of a warp group from here on; compiled for sm_90a alone. */
template <int N>
__device__ __forceinline__ void mn_setmaxnreg_inc(void) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}

template <int N>
__device__ __forceinline__ void mn_setmaxnreg_dec(void) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}

/* ---- clusters -------------------------------------------------------------------------------- */

#if __CUDA_ARCH__ >= 900

__device__ __forceinline__ void mn_cluster_arrive(void) {
    cuda::ptx::barrier_cluster_arrive(cuda::ptx::sem_release);
}

__device__ __forceinline__ void mn_cluster_wait(void) {
    cuda::ptx::barrier_cluster_wait(cuda::ptx::sem_acquire);
}

/* Where block `rank` of the cluster has what this one has at shared address `here`. */
__device__ __forceinline__ uint32_t mn_cluster_address(uint32_t here, unsigned rank) {
    uint32_t there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(here), "r"(rank));
    return there;
}

/* Stores x at `to` in a block of the cluster, whose mbarrier counts its bytes. */
__device__ __forceinline__ void mn_cluster_store(uint32_t to, float4 x, uint32_t mbar) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 "
                 "[%0], {%1, %2, %3, %4}, [%5];"
                 ::"r"(to), "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w), "r"(mbar) : "memory");
}

__device__ __forceinline__ void mn_cluster_store(uint32_t to, float x, uint32_t mbar) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];"
                 ::"r"(to), "f"(x), "r"(mbar) : "memory");
}

__device__ __forceinline__ void mn_cluster_store(uint32_t to, double2 x, uint32_t mbar) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f64 "
                 "[%0], {%1, %2}, [%3];" ::"r"(to), "d"(x.x), "d"(x.y), "r"(mbar) : "memory");
}

#endif

}    // namespace mneme

#endif
