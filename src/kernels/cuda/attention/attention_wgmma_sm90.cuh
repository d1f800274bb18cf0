/* attention_wgmma_sm90.cuh - what tiles of attention are made of on Hopper (sm_90a): tiles of
 * bf16 in shared memory, products by warpgroups.
 *
 * A tile has rows of up to 64 columns, 128 bytes each, in groups of eight rows whose
 * 16-byte pieces are exchanged (piece c of row r lies at c ^ r % 8); wider tiles are several of
 * these, one after the other. A product reads such a tile with its columns as depth ("plain") or
 * with its rows as depth ("transposed"), so that one copy serves both.
 *
 * A warpgroup is four warps. It starts products, which run on their own, and waits for them. Of a
 * product of 64 rows thread i of the group has rows i / 32 16 + i % 32 / 4 and that plus 8, and of
 * each eight columns the two from i % 4 2 on: d[4 j + 0, 1] in the first row, d[4 j + 2, 3] in the
 * second. */
#ifndef MN_KERNELS_CUDA_ATTENTION_ATTENTION_WGMMA_SM90_CUH
#define MN_KERNELS_CUDA_ATTENTION_ATTENTION_WGMMA_SM90_CUH

#include "kernels/cuda/prim/exp2.cuh"
#include "kernels/cuda/prim/mbarrier.cuh"

namespace mneme::attention {

enum { MN_WARPGROUP = 128 };    // threads of a warp group

/* ---- shared memory --------------------------------------------------------------------------- */

/* Bytes from a tile's start to element (row, column) of a tile of `rows` rows. */
__device__ inline uint32_t mn_swizzle_byte(int rows, int row, int column) {
    const int vec = column % 64 / 8;
    return (uint32_t)(column / 64 * rows * 128 + row * 128 + ((vec ^ (row & 7)) << 4) +
                      column % 8 * 2);
}

/* 16 bytes to shared memory on their own; zeros unless `inside`. */
__device__ inline void mn_cp_async_16(uint32_t to, const void *from, bool inside) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
                 "r"(inside ? 16 : 0) : "memory");
}

/* Waits for the thread's own copies and shows them to products. */
__device__ inline void mn_cp_async_wait_fence(void) {
    asm volatile("cp.async.wait_all;\n\tfence.proxy.async.shared::cta;" ::: "memory");
}

/* A tile of ROWS rows of D columns from rows `from` + r `stride`, of which `n_rows` and `width`
 * columns are there, where SKIPS those from row `skipped` on; 128 threads call, `i` their number.
 * The tile is the top of one of TILE_ROWS. */
template <int ROWS, int D, int TILE_ROWS = ROWS, bool SKIPS = false>
__device__ inline void mn_cp_async_tile(uint32_t to, const mn_bf16 *from, int64_t stride,
                                        int n_rows, int width, int i, int skipped = 0) {
    constexpr int vecs = D / 8, rows_per_pass = MN_WARPGROUP / vecs;    // pieces of a row; rows
    const int vec = i % vecs, row = i / vecs;
    const bool column = vec * 8 < width;
    const mn_bf16 *at = from + row * stride + vec * 8;
#pragma unroll 4
    for (int r = 0; r < ROWS; r += rows_per_pass) {
        const bool inside = column && row + r < n_rows && (!SKIPS || row + r >= skipped);
        mn_cp_async_16(to + mn_swizzle_byte(TILE_ROWS, row + r, vec * 8), inside ? at : from,
                       inside);
        at += rows_per_pass * stride;
    }
}

/* ---- products -------------------------------------------------------------------------------- */

#if MN_HAS_WGMMA

/* The wgmma descriptor of a tile: groups of eight rows 1024 bytes apart, `stride_bytes` between
 * blocks of 64 columns (for a transposed tile). */
__device__ inline uint64_t mn_smem_desc(uint32_t at, int stride_bytes) {
    return (uint64_t)((at & 0x3FFFF) >> 4) | (uint64_t)(stride_bytes >> 4) << 16 |
           (uint64_t)(1024 >> 4) << 32 | (uint64_t)1 << 62;
}

__device__ inline void mn_wgmma_fence(void) {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ inline void mn_wgmma_commit(void) {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

/* Waits until at most `pending` of the groups of products last committed still run. */
template <int pending>
__device__ inline void mn_wgmma_wait(void) {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}

/* Keeps the compiler from moving sums while products write them. */
template <int N>
__device__ inline void mn_fence_operand(float (&d)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+f"(d[i])::"memory");
}

template <int N>
__device__ inline void mn_fence_operand(uint32_t (&a)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+r"(a[i])::"memory");
}

#define MN_ACC4(i)                                                                            \
    "+f"(d[i]), "+f"(d[(i) + 1]), "+f"(d[(i) + 2]), "+f"(d[(i) + 3])
#define MN_ACC16(i)                                                                                \
    MN_ACC4(i), MN_ACC4((i) + 4), MN_ACC4((i) + 8), MN_ACC4((i) + 12)
#define MN_ACC_N64_OUT MN_ACC16(0), MN_ACC16(16)
#define MN_ACC_N128_OUT MN_ACC16(0), MN_ACC16(16), MN_ACC16(32), MN_ACC16(48)
#define MN_ACC_N64                                                                                 \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                       \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define MN_ACC_N128                                                                                \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                       \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "             \
    "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "             \
    "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"

/* d += a b over a depth of 16; d starts from 0 unless `more`. a: 64 rows, plain, in shared memory
 * or in registers; b: 64 or 128 rows plain, or columns when `turned`; a likewise. */
template <int trans, int a_trans = 0>
__device__ inline void mn_wgmma(float (&d)[32], uint64_t a, uint64_t b, int accumulate) {
    asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %34, 0;\n\t"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" MN_ACC_N64 "}, "
                 "%32, %33, p, 1, 1, %36, %35;\n\t}"
                 : MN_ACC_N64_OUT
                 : "l"(a), "l"(b), "r"(accumulate), "n"(trans), "n"(a_trans));
}

template <int trans>
__device__ inline void mn_wgmma(float (&d)[64], uint64_t a, uint64_t b, int accumulate) {
    asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %66, 0;\n\t"
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" MN_ACC_N128 "}, "
                 "%64, %65, p, 1, 1, 0, %67;\n\t}"
                 : MN_ACC_N128_OUT : "l"(a), "l"(b), "r"(accumulate), "n"(trans));
}

template <int trans>
__device__ inline void mn_wgmma(float (&d)[32], const uint32_t *a, uint64_t b, int accumulate) {
    asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %37, 0;\n\t"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" MN_ACC_N64 "}, "
                 "{%32, %33, %34, %35}, %36, p, 1, 1, %38;\n\t}"
                 : MN_ACC_N64_OUT
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate), "n"(trans));
}

template <int trans>
__device__ inline void mn_wgmma(float (&d)[64], const uint32_t *a, uint64_t b, int accumulate) {
    asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %69, 0;\n\t"
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" MN_ACC_N128 "}, "
                 "{%64, %65, %66, %67}, %68, p, 1, 1, %70;\n\t}"
                 : MN_ACC_N128_OUT
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate), "n"(trans));
}

/* The descriptor of what lies `bytes` behind: an addition to its lower word, which the compiler can
 * leave to the uniform datapath, where a descriptor made anew takes seven instructions. */
__device__ inline uint64_t mn_smem_desc_at(uint64_t desc, int bytes) {
    return (desc & 0xffffffff00000000u) | (uint32_t)((uint32_t)desc + (uint32_t)(bytes >> 4));
}

/* Starts d = a b' over D columns: 64 rows of tile `a` (of A_ROWS) from `a_at` on, N of tile `b`. */
template <int D, int A_ROWS, int N>
__device__ inline void mn_wgmma_abt(float (&d)[N / 2], uint32_t a_at, uint32_t b_at) {
    const uint64_t a = mn_smem_desc(a_at, 16), b = mn_smem_desc(b_at, 16);
#pragma unroll
    for (int k = 0; k < D; k += 16) {
        const int in = k % 64 * 2;
        mn_wgmma<0>(d, mn_smem_desc_at(a, k / 64 * A_ROWS * 128 + in),
                    mn_smem_desc_at(b, k / 64 * N * 128 + in), k > 0);
    }
}

/* Starts d += p x over DEPTH rows of tile `x`, D columns; p in registers, four for 16 rows. */
template <int DEPTH, int D>
__device__ inline void mn_wgmma_ab(float (&d)[D / 2], const uint32_t *p, uint32_t x_at,
                                     bool accumulate) {
    const uint64_t x = mn_smem_desc(x_at, DEPTH * 128);
#pragma unroll
    for (int k = 0; k < DEPTH; k += 16) {
        mn_wgmma<1>(d, p + k / 4, mn_smem_desc_at(x, k * 128), accumulate || k > 0);
    }
}

#endif

/* Two floats as bf16, the first in the lower half. */
__device__ inline uint32_t mn_bf16x2(float x, float y) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(x, y);
    return *(const uint32_t *)&pair;
}

/* The same of the four threads that share a row. */
__device__ inline float mn_quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

__device__ inline float mn_quad_sum(float x) {
    x += __shfl_xor_sync(0xffffffffu, x, 1);
    return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

}    // namespace mneme::attention

#endif
