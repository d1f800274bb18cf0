/* additive_channel_sm90.cuh - what the scans of additive_channel_chunk_sm90.cu and the gradients of
 * additive_channel_grad_sm90.cu share: swizzled tiles, sums of decays by tensor cores, and what the
 * one asks of the other. */
#ifndef MN_KERNELS_CUDA_ADDITIVE_ADDITIVE_CHANNEL_SM90_CUH
#define MN_KERNELS_CUDA_ADDITIVE_ADDITIVE_CHANNEL_SM90_CUH

#include "kernels/cuda/additive/additive.cuh"
#include "kernels/cuda/additive/additive_channel_scale.cuh"
#include "kernels/cuda/prim/mbarrier.cuh"
#include "kernels/cuda/prim/sync.cuh"
#include "kernels/cuda/prim/tma.cuh"

namespace mneme::additive {

enum { MN_GATED_GRAD_CHUNK = MN_SUBCHUNK_CHUNK };    // tokens between states

/* Gradients of all chunks from states that two scans have kept. */
struct mn_gated_grad_params {
    mn_call call;
    CUtensorMap q, k, v, g, cot;
    mn_out dq, dk, dg;
    const mn_bf16 *S, *N;
    float scale;
    bool contain;    // q that is not finite reaches the tokens up to its own alone
};

/* dq, dk and dg; dq alone, from job.S. V is at most 128. */
int mn_additive_gated_grads(const mn_gated_grad_params &job, cudaStream_t stream);
int mn_additive_gated_queries(const mn_gated_grad_params &job, cudaStream_t stream);

/* Tiles have rows of 64 columns, 128 bytes each, 16-byte vector o of row r at place o ^ (r % 8). */
__device__ inline uint32_t mn_gated_swizzle(int row, int vec16) {
    return (uint32_t)(row * 128 + (((vec16 ^ row) & 7) << 4));
}

#if MN_HAS_WGMMA

template <bool TRANS = false>
__device__ inline void mn_gated_stmatrix(uint32_t at, const uint32_t (&r)[4]) {
    if (TRANS) {
        asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                         at), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]) : "memory");
    } else {
        asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at),
                     "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]) : "memory");
    }
}

template <bool TRANS = false>
__device__ inline void mn_gated_stmatrix(uint32_t at, uint32_t r0, uint32_t r1) {
    if (TRANS) {
        asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(at),
                     "r"(r0), "r"(r1) : "memory");
    } else {
        asm volatile("stmatrix.sync.aligned.m8n8.x2.shared.b16 [%0], {%1, %2};" ::"r"(at), "r"(r0),
                     "r"(r1) : "memory");
    }
}

/* The same number, which the compiler then keeps in a register instead of making it again and again
 * where it is used. */
__device__ inline uint32_t mn_gated_pin_reg(uint32_t x) {
    return __shfl_sync(0xffffffffu, x, threadIdx.x % 32);
}

/* The triangle of ones as a left operand: its upper right quarter is zero. */
struct mn_gated_cumsum_mma {
    uint32_t ones[4];

    __device__ mn_gated_cumsum_mma() {
        const int row = threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
        const uint32_t mask = (column <= row ? 0xffffu : 0) | (column < row ? 0xffff0000u : 0);
        ones[1] = 0x3f803f80, ones[2] = 0, ones[0] = ones[3] = ones[1] & mask;
    }

    /* To shared memory, by a warp, and from there: numbers that the compiler cannot know stay in
     * their registers, where constants are moved to them for each product. */
    __device__ void put(uint32_t *to) const {
#pragma unroll
        for (int i = 0; i < 4; i++) to[32 * i + threadIdx.x % 32] = ones[i];
    }

    __device__ void get(const volatile uint32_t *from) {
#pragma unroll
        for (int i = 0; i < 4; i++) ones[i] = from[32 * i + threadIdx.x % 32];
    }

    __device__ static void multiply(float (&e)[4], const uint32_t (&a)[4], uint32_t b0,
                                    uint32_t b1, const float (&c)[4]) {
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, "
                     "{%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};"
                     : "=f"(e[0]), "=f"(e[1]), "=f"(e[2]), "=f"(e[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c[0]),
                       "f"(c[1]), "f"(c[2]), "f"(c[3]));
    }

    /* Sums of log2 decays over tokens of eight channels; a decay below exp(-208) leaves nothing of
     * a float. */
    __device__ void sum(float (&e)[4], uint32_t g0, uint32_t g1) const {
        const float zero[4] = {};
        asm("max.NaN.bf16x2 %0, %0, %1;" : "+r"(g0) : "r"(0xc350c350));
        asm("max.NaN.bf16x2 %0, %0, %1;" : "+r"(g1) : "r"(0xc350c350));
        multiply(e, ones, g0, g1, zero);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            e[i] *= 1.44269504f;
            asm("" : "+f"(e[i]));    // -e is no other product
        }
    }
};

/* ---- products of four warps together --------------------------------------------------------- */

/* Where a product finds rows of a tile; `n` bytes further on, n / 16 is added. */
__device__ inline uint64_t mn_gated_smem_desc(uint32_t address) {
    return (address & 0x3ffffu) >> 4 | (uint64_t)1 << 16 | (uint64_t)64 << 32 | (uint64_t)1 << 62;
}

__device__ inline void mn_gated_wgmma_fence(void) {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ inline void mn_gated_wgmma_commit(void) {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

/* Waits for all that was sent but the last PENDING times. */
template <int PENDING>
__device__ inline void mn_gated_wgmma_wait(void) {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

#define MN_GATED_ACC8(i)                                                                          \
    "+f"(y[i][0]), "+f"(y[i][1]), "+f"(y[i][2]), "+f"(y[i][3]), "+f"(y[(i) + 1][0]),               \
        "+f"(y[(i) + 1][1]), "+f"(y[(i) + 1][2]), "+f"(y[(i) + 1][3])

#endif

}    // namespace mneme::additive

#endif
