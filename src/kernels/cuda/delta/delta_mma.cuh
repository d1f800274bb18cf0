/* delta_mma.cuh - the products of delta's scans, 16 deep and 64 columns wide: by a warp on any
 * machine (mma), or by the four warps of a group together on one that has wgmma, which reads the
 * right operand from shared memory by itself. A warp has 16 rows of the left operand and of the
 * sums either way, in the same positions. */
#ifndef MN_KERNELS_CUDA_DELTA_DELTA_MMA_CUH
#define MN_KERNELS_CUDA_DELTA_DELTA_MMA_CUH

#include "kernels/cuda/delta/delta_smem.cuh"
#include "kernels/cuda/prim/mbarrier.cuh"

namespace mneme::delta {

/* Where a product finds rows of a tile whose tiles of 64 columns start at multiples of 1024
 * bytes. */
__device__ __forceinline__ uint64_t mn_wgmma_smem_desc(unsigned address) {
    return (address & 0x3ffffu) >> 4 | (uint64_t)1 << 16 | (uint64_t)64 << 32 | (uint64_t)1 << 62;
}

#if MN_HAS_WGMMA

#define MN_WGMMA_ACC_REGS                                                                          \
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, "       \
    "%19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
#define MN_WGMMA_ACC8(i)                                                                           \
    "+f"(y[i][0]), "+f"(y[i][1]), "+f"(y[i][2]), "+f"(y[i][3]), "+f"(y[(i) + 1][0]),               \
        "+f"(y[(i) + 1][1]), "+f"(y[(i) + 1][2]), "+f"(y[(i) + 1][3])
#define MN_WGMMA_OUT8(i)                                                                           \
    "=f"(y[i][0]), "=f"(y[i][1]), "=f"(y[i][2]), "=f"(y[i][3]), "=f"(y[(i) + 1][0]),               \
        "=f"(y[(i) + 1][1]), "=f"(y[(i) + 1][2]), "=f"(y[(i) + 1][3])

/* y += a b, b where a descriptor says, or at `address` in a tile. TRANS: the tile's rows are the
 * depth. Descriptors count in 16 bytes: to one, places inside a tile are added, which takes fewer
 * instructions than to make another. */
template <int TRANS>
__device__ __forceinline__ void mn_wgmma_m64n64k16(float (*y)[4], const unsigned (&a)[4],
                                                   uint64_t b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " MN_WGMMA_ACC_REGS
                 "{%32, %33, %34, %35}, %36, 1, 1, 1, %37;\n"
                 : MN_WGMMA_ACC8(0), MN_WGMMA_ACC8(2), MN_WGMMA_ACC8(4), MN_WGMMA_ACC8(6)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(TRANS)
                 : "memory");
}

template <int TRANS>
__device__ __forceinline__ void mn_wgmma_m64n64k16(float (*y)[4], const unsigned (&a)[4],
                                                 unsigned address) {
    mn_wgmma_m64n64k16<TRANS>(y, a, mn_wgmma_smem_desc(address));
}

/* y = a b', the first product of a sum: y has held nothing. */
__device__ __forceinline__ void mn_wgmma_start_m64n64k16(float (*y)[4], const unsigned (&a)[4],
                                                         uint64_t b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " MN_WGMMA_ACC_REGS
                 "{%32, %33, %34, %35}, %36, 0, 1, 1, 0;\n"
                 : MN_WGMMA_OUT8(0), MN_WGMMA_OUT8(2), MN_WGMMA_OUT8(4), MN_WGMMA_OUT8(6)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b)
                 : "memory");
}

/* y += a b', 64 rows each of two tiles, 16 deep, where descriptors say, or at addresses. */
__device__ __forceinline__ void mn_wgmma_m64n64k16(float (*y)[4], uint64_t a, uint64_t b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " MN_WGMMA_ACC_REGS
                 "%32, %33, 1, 1, 1, 0, 0;\n"
                 : MN_WGMMA_ACC8(0), MN_WGMMA_ACC8(2), MN_WGMMA_ACC8(4), MN_WGMMA_ACC8(6)
                 : "l"(a), "l"(b)
                 : "memory");
}

__device__ __forceinline__ void mn_wgmma_m64n64k16(float (*y)[4], unsigned a, unsigned b) {
    mn_wgmma_m64n64k16(y, mn_wgmma_smem_desc(a), mn_wgmma_smem_desc(b));
}

/* y += a b of 16 N columns, operands where descriptors say. TRANS_A, TRANS_B: rows of that tile
 * are the depth, else columns. */
template <int TRANS_A, int TRANS_B>
__device__ __forceinline__ void mn_wgmma_m64k16(float (&y)[2][4], uint64_t a, uint64_t b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 "
                 "{%0, %1, %2, %3, %4, %5, %6, %7}, %8, %9, 1, 1, 1, %10, %11;\n"
                 : MN_WGMMA_ACC8(0)
                 : "l"(a), "l"(b), "n"(TRANS_A), "n"(TRANS_B)
                 : "memory");
}

template <int TRANS_A, int TRANS_B>
__device__ __forceinline__ void mn_wgmma_m64k16(float (&y)[4][4], uint64_t a, uint64_t b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 "
                 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
                 "%16, %17, 1, 1, 1, %18, %19;\n"
                 : MN_WGMMA_ACC8(0), MN_WGMMA_ACC8(2)
                 : "l"(a), "l"(b), "n"(TRANS_A), "n"(TRANS_B)
                 : "memory");
}

#else

template <int TRANS>
__device__ inline void mn_wgmma_m64n64k16(float (*)[4], const unsigned (&)[4], uint64_t) {}

__device__ inline void mn_wgmma_m64n64k16(float (*)[4], unsigned, unsigned) {}

template <int TRANS_A, int TRANS_B, int N>
__device__ inline void mn_wgmma_m64k16(float (&)[N][4], uint64_t, uint64_t) {}

#endif

/* Before products whose operands were just written. */
template <bool WGMMA>
__device__ __forceinline__ void mn_mma_fence(void) {
#if MN_HAS_WGMMA
    if (WGMMA) asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory");
#endif
}

/* After the last product of several; other work may follow. */
template <bool WGMMA>
__device__ __forceinline__ void mn_mma_commit(void) {
#if MN_HAS_WGMMA
    if (WGMMA) asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory");
#endif
}

/* Before sums are read, or operands of products written over, but for what was sent last, PENDING
 * times. */
template <bool WGMMA, int PENDING = 0>
__device__ __forceinline__ void mn_mma_wait(void) {
#if MN_HAS_WGMMA
    if (WGMMA) asm volatile("wgmma.wait_group.sync.aligned %0;\n" ::"n"(PENDING) : "memory");
#endif
}

template <bool WGMMA>
__device__ __forceinline__ void mn_mma_commit_wait(void) {
    mn_mma_commit<WGMMA>();
    mn_mma_wait<WGMMA>();
}

/* y (64 columns) += a b': the tile's rows are columns, its columns from k on the depth. Columns of
 * b' before 16 * from are zero. */
template <bool WGMMA>
__device__ __forceinline__ void mn_mma_abt(float (*y)[4], const unsigned (&a)[4], unsigned tile,
                                             int k, int from) {
    if constexpr (WGMMA && MN_HAS_WGMMA) {
        mn_wgmma_m64n64k16<0>(y, a, mn_wgmma_smem_desc(tile) + (k / 64 * 8192 + k % 64 * 2) / 16);
    } else {
#pragma unroll
        for (int n = 0; n < 4; n++) {
            if (n < from) continue;
            unsigned b[4];
            mn_frag_b(b, tile, k, 16 * n);
            mn_mma(y[2 * n], a, b[0], b[1]);
            mn_mma(y[2 * n + 1], a, b[2], b[3]);
        }
    }
}

/* y (64 columns) += a b: the tile's rows from k on are the depth, its columns from 64 * smem_tile
 * on columns, of which those from 16 * end on are zero. */
template <bool WGMMA>
__device__ __forceinline__ void mn_mma_ab(float (*y)[4], const unsigned (&a)[4], unsigned tile,
                                              int k, int smem_tile, int end) {
    if constexpr (WGMMA && MN_HAS_WGMMA) {
        mn_wgmma_m64n64k16<1>(y, a, mn_wgmma_smem_desc(tile) + (smem_tile * 8192 + k * 128) / 16);
    } else {
#pragma unroll
        for (int n = 0; n < 4; n++) {
            if (n >= end) continue;
            unsigned b[4];
            mn_frag_b_trans(b, tile, k, 64 * smem_tile + 16 * n);
            mn_mma(y[2 * n], a, b[0], b[1]);
            mn_mma(y[2 * n + 1], a, b[2], b[3]);
        }
    }
}

}    // namespace mneme::delta

#endif
