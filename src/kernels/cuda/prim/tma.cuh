/* tma.cuh - tiles of tokens loaded and stored by TMA: a tensor map made by the host, one thread
 * that issues the copy, an mbarrier that counts bytes.
 *
 * A tile has rows of 64 columns, 128 bytes each, swizzled as attention_wgmma_sm90.cuh describes.
 * What lies beyond the tensor's sizes becomes zeros. */
#ifndef MN_KERNELS_CUDA_PRIM_TMA_CUH
#define MN_KERNELS_CUDA_PRIM_TMA_CUH

#include <cuda.h>

#include "kernels/cuda/prim/mbarrier.cuh"

namespace mneme {

/* ---- on the host ----------------------------------------------------------------------------- */

typedef CUresult (*mn_tma_encode_fn)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *,
                                   const cuuint64_t *, const cuuint64_t *, const cuuint32_t *,
                                   const cuuint32_t *, CUtensorMapInterleave, CUtensorMapSwizzle,
                                   CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

/* The driver's function that makes maps: found through the runtime, as programs that serve machines
 * without a GPU cannot link to the driver. NULL where there is none. */
inline mn_tma_encode_fn mn_tma_encoder(void) {
    void *function = nullptr;
    cudaDriverEntryPointQueryResult found;
#if CUDART_VERSION >= 12050
    const cudaError_t code = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function,
                                                              12000, cudaEnableDefault, &found);
#else
    const cudaError_t code = cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &function,
                                                     cudaEnableDefault, &found);
#endif
    if (code == cudaSuccess && found == cudaDriverEntryPointSuccess) {
        return (mn_tma_encode_fn)function;
    }
    (void)cudaGetLastError();
    return nullptr;
}

/* Maps tiles of `rows` tokens by 64 columns of a view (b, t, h, columns) in bf16, whose rows start
 * at 16 bytes; false where that cannot be done. */
template <typename View>
inline bool mn_tma_map(CUtensorMap *map, const View &view, const mn_call &call, int64_t columns,
                        int rows) {
    static const mn_tma_encode_fn encode = mn_tma_encoder();
    if (!encode || !view.data || call.T == 0) return false;
    const cuuint64_t sizes[4] = { (cuuint64_t)columns, (cuuint64_t)call.H, (cuuint64_t)call.T,
                                  (cuuint64_t)call.B };
    const cuuint64_t strides[3] = { (cuuint64_t)view.stride[2] * 2, (cuuint64_t)view.stride[1] * 2,
                                    (cuuint64_t)view.stride[0] * 2 };
    const cuuint32_t box[4] = { 64, 1, (cuuint32_t)rows, 1 }, steps[4] = { 1, 1, 1, 1 };
    return encode(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4, (void *)view.data, sizes, strides, box,
                  steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                  CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                  CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

/* ---- on the device, from 9.0 on -------------------------------------------------------------- */

#if __CUDA_ARCH__ >= 900

/* Shows barriers just opened to TMA; a barrier of the block has to follow. */
__device__ inline void mn_mbarrier_init_fence(void) {
    cuda::ptx::fence_mbarrier_init(cuda::ptx::sem_release, cuda::ptx::scope_cluster);
    cuda::ptx::fence_proxy_async();
}

/* Arrives at a barrier whose phase ends when `bytes` have come, too. */
__device__ inline void mn_mbarrier_arrive_expect_tx(uint64_t *mbar, int bytes) {
    using namespace cuda::ptx;
    mbarrier_arrive_expect_tx(sem_release, scope_cta, space_shared, mbar, (uint32_t)bytes);
}

/* One lane of the warp, all of which call: asking in a branch of it needs no loop over lanes. */
__device__ inline bool mn_elect_one(void) {
    unsigned chosen;
    asm volatile("{\n\t.reg .pred one;\n\telect.sync _|one, 0xffffffff;\n\t"
                 "selp.b32 %0, 1, 0, one;\n\t}" : "=r"(chosen));
    return chosen != 0;
}

/* Loads the tile at (column, h, t, b). */
__device__ inline void mn_tma_load(void *to, const CUtensorMap &map, uint64_t *mbar, int column,
                                   int h, int t, int b) {
    using namespace cuda::ptx;
    const int32_t at[4] = { column, h, t, b };
    cp_async_bulk_tensor(space_cluster, space_global, to, &map, at, mbar);
}

/* The same of what is read once: the second cache gives up other things later. */
__device__ inline void mn_tma_load_once(void *to, const CUtensorMap &map, uint64_t *mbar,
                                        int column, int h, int t, int b) {
    asm volatile("{\n\t.reg .b64 policy;\n\t"
                 "createpolicy.fractional.L2::evict_first.b64 policy, 1.0;\n\t"
                 "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
                 ".L2::cache_hint [%0], [%1, {%2, %3, %4, %5}], [%6], policy;\n\t}"
                 ::"r"(mn_smem_addr(to)), "l"(&map), "r"(column), "r"(h), "r"(t), "r"(b),
                 "r"(mn_smem_addr(mbar)) : "memory");
}

/* Loads `bytes` as they lie, a multiple of 16 from an address that is one. */
__device__ inline void mn_tma_load_1d(void *to, const void *from, int bytes, uint64_t *mbar) {
    using namespace cuda::ptx;
    cp_async_bulk(space_cluster, space_global, to, from, (uint32_t)bytes, mbar);
}

/* The other way; what lies beyond the tensor's sizes is left out. Those who wrote the tile must
 * have shown it (fence.proxy.async) before a barrier. */
__device__ inline void mn_tma_store(const CUtensorMap &map, const void *from, int column, int h,
                                    int t, int b) {
    using namespace cuda::ptx;
    const int32_t at[4] = { column, h, t, b };
    cp_async_bulk_tensor(space_global, space_shared, &map, at, from);
    cp_async_bulk_commit_group();
}

/* Waits until this thread's stores, but for the newest `most` groups, have read all tiles. */
template <int most = 0>
__device__ inline void mn_tma_store_wait_read(void) {
    cuda::ptx::cp_async_bulk_wait_group_read(cuda::ptx::n32_t<most>());
}

/* Waits until all of them are in memory. */
__device__ inline void mn_tma_store_wait(void) {
    cuda::ptx::cp_async_bulk_wait_group(cuda::ptx::n32_t<0>());
}

#endif

}    // namespace mneme

#endif
