/* delta_mma.cuh - the products of delta's scans, 16 deep and 64 columns wide: by a warp on any
 * machine (mma), or by the four warps of a group together on one that has wgmma, which reads the
 * right operand from shared memory by itself. A warp has 16 rows of the left operand and of the
 * sums either way, in the same positions. */
#ifndef MN_KERNELS_CUDA_DELTA_DELTA_MMA_CUH
#define MN_KERNELS_CUDA_DELTA_DELTA_MMA_CUH

#include "kernels/cuda/delta/delta_smem.cuh"
#include "kernels/cuda/prim/mbarrier.cuh"
#include "kernels/cuda/prim/wild.cuh"

namespace mneme::delta {

#if MN_HAS_WGMMA

/* Where a product finds rows of a tile whose tiles of 64 columns start at multiples of 1024
 * bytes. */
__device__ __forceinline__ uint64_t mn_wgmma_smem_desc(unsigned address) {
    return (address & 0x3ffffu) >> 4 | (uint64_t)1 << 16 | (uint64_t)64 << 32 | (uint64_t)1 << 62;
}

#define MN_WGMMA_ACC_REGS                                                                          \
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, "       \
    "%19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
#define MN_WGMMA_ACC8(i)                                                                           \
    "+f"(y[i][0]), "+f"(y[i][1]), "+f"(y[i][2]), "+f"(y[i][3]), "+f"(y[(i) + 1][0]),               \
        "+f"(y[(i) + 1][1]), "+f"(y[(i) + 1][2]), "+f"(y[(i) + 1][3])

/* y += a b, b at `address` in a tile. TRANS: the tile's rows are the depth. */
template <int TRANS>
__device__ __forceinline__ void mn_wgmma_m64n64k16(float (*y)[4], const unsigned (&a)[4],
                                                 unsigned address) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " MN_WGMMA_ACC_REGS
                 "{%32, %33, %34, %35}, %36, 1, 1, 1, %37;\n"
                 : MN_WGMMA_ACC8(0), MN_WGMMA_ACC8(2), MN_WGMMA_ACC8(4), MN_WGMMA_ACC8(6)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(mn_wgmma_smem_desc(address)),
                   "n"(TRANS)
                 : "memory");
}

/* y += a b', 64 rows each of two tiles, 16 deep. */
__device__ __forceinline__ void mn_wgmma_m64n64k16(float (*y)[4], unsigned a, unsigned b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " MN_WGMMA_ACC_REGS
                 "%32, %33, 1, 1, 1, 0, 0;\n"
                 : MN_WGMMA_ACC8(0), MN_WGMMA_ACC8(2), MN_WGMMA_ACC8(4), MN_WGMMA_ACC8(6)
                 : "l"(mn_wgmma_smem_desc(a)), "l"(mn_wgmma_smem_desc(b))
                 : "memory");
}

#else

template <int TRANS>
__device__ inline void mn_wgmma_m64n64k16(float (*)[4], const unsigned (&)[4], unsigned) {}

__device__ inline void mn_wgmma_m64n64k16(float (*)[4], unsigned, unsigned) {}

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
        mn_wgmma_m64n64k16<0>(y, a, tile + k / 64 * 8192 + k % 64 * 2);
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
        mn_wgmma_m64n64k16<1>(y, a, tile + smem_tile * 8192 + k * 128);
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

/* ---- triangles of tokens and large numbers --------------------------------------------------- */

/* Where tokens meet a triangle of tokens, y = x M' for a lower triangle M or y = x M, a number so
 * large that others would meet 0 times an infinity goes in by itself (docs/internals/causality.md).
 * Numbers of 2^60 and more count as large: neither M nor products of what is left then overflow,
 * and M with such numbers (mn_delta_wy_inverse) reaches only later rows. */

/* Halves of a pair that are large. */
__device__ inline unsigned mn_delta_large(unsigned x) {
    const unsigned low = (x & 0x7fffu) >= 0x5d80u ? 0xffffu : 0u;
    return low | ((x & 0x7fff0000u) >= 0x5d800000u ? 0xffff0000u : 0u);
}

/* Whether a number of the warp's may be large: sums of x 2^67 overflow. */
template <int N>
__device__ inline bool mn_delta_is_wild(const unsigned (&x)[N][4]) {
    unsigned sum[4] = { 0, 0, 0, 0 };
#pragma unroll
    for (int k = 0; k < N; k++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            asm("fma.rn.bf16x2 %0, %1, %2, %0;" : "+r"(sum[i]) : "r"(x[k][i]), "r"(0x61006100u));
        }
    }
    const unsigned watch = mn_bf16x2_watch(
        sum[0], mn_bf16x2_watch(sum[1], mn_bf16x2_watch(sum[2], mn_bf16x2_watch(sum[3], 0))));
    return __any_sync(0xffffffffu, watch & 0x7fff7fffu);
}

/* Right operand of tokens 16 n on, of which 16 k on are the depth. */
template <bool LOWER>
__device__ inline void mn_delta_triangle(unsigned (&b)[4], unsigned matrix, int k, int n) {
    if (LOWER) mn_frag_b(b, matrix, 16 * k, 16 * n);
    else mn_frag_b_trans(b, matrix, 16 * k, 16 * n);
}

/* y, tokens 16 n0 on in n1 - n0 blocks, += what is not large of x, n_x blocks of tokens from 16 k0
 * on, in the order in which the plain products add it up; then, token by token, what is large, into
 * the tokens that see it. By a warp. */
template <bool LOWER>
__device__ __noinline__ void mn_delta_mma_wild(float (*y)[4], int n0, int n1, unsigned (*x)[4],
                                               int n_x, int k0, unsigned matrix) {
    const int lane = threadIdx.x % 32, column = lane % 4 * 2;
    for (int k = 0; k < n_x; k++) {
        unsigned a[4];
        for (int i = 0; i < 4; i++) a[i] = x[k][i] & ~mn_delta_large(x[k][i]);
        for (int n = n0; n < n1; n++) {
            unsigned b[4];
            if (LOWER ? n < k0 + k : n > k0 + k) continue;
            mn_delta_triangle<LOWER>(b, matrix, k0 + k, n);
            float(*to)[4] = y + 2 * (n - n0);
            mn_mma(to[0], a, b[0], b[1]);
            mn_mma(to[1], a, b[2], b[3]);
        }
    }
    for (int s = 0; s < 16 * n_x; s++) {
        unsigned a[4], any = 0;
        for (int i = 0; i < 4; i++) {
            const int token = i / 2 * 8 + column;    // of the lower half
            const unsigned half = token == s % 16 ? 0xffffu : token + 1 == s % 16 ? 0xffff0000u : 0;
            a[i] = x[s / 16][i] & mn_delta_large(x[s / 16][i]) & half;
            any |= a[i];
        }
        if (!__any_sync(0xffffffffu, any)) continue;
        for (int n = n0; n < n1; n++) {
            unsigned b[4];
            float own[2][4] = {};
            if (LOWER ? n < k0 + s / 16 : n > k0 + s / 16) continue;
            mn_delta_triangle<LOWER>(b, matrix, k0 + s / 16, n);
            mn_mma(own[0], a, b[0], b[1]);
            mn_mma(own[1], a, b[2], b[3]);
            for (int i = 0; i < 8; i++) {
                const int t = 16 * n + i / 4 * 8 + column + i % 2, from = 16 * k0 + s;
                if (LOWER ? t < from : t > from) continue;
                y[2 * (n - n0) + i / 4][i % 4] += own[i / 4][i % 4];
            }
        }
    }
}

/* The same for sums in registers; `sets`: they are garbage so far and start from 0. */
template <bool LOWER, int M, int N>
__device__ __forceinline__ void mn_delta_redo(float (&y)[M][4], int n0, const unsigned (&x)[N][4],
                                              int k0, unsigned matrix, bool sets) {
    float sums[M][4];
    unsigned copy[N][4];
#pragma unroll
    for (int i = 0; i < 4 * M; i++) sums[i / 4][i % 4] = sets ? 0.0f : y[i / 4][i % 4];
#pragma unroll
    for (int i = 0; i < 4 * N; i++) copy[i / 4][i % 4] = x[i / 4][i % 4];
    mn_delta_mma_wild<LOWER>(sums, n0, n0 + M / 2, copy, N, k0, matrix);
#pragma unroll
    for (int i = 0; i < 4 * M; i++) y[i / 4][i % 4] = sums[i / 4][i % 4];
}

}    // namespace mneme::delta

#endif
