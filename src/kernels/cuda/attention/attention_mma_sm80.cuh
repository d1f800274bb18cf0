/* attention_mma_sm80.cuh - what the kernels of attention by mma.sync share (compute capability 8.0,
 * or newer without wgmma): products of warps on swizzled tiles in shared memory, copies, and which
 * calls they serve.
 *
 * Tiles lie as those of attention_wgmma_sm90.cuh. A warp has 16 rows of a product: lane l rows
 * l / 4 and that plus 8, of each eight columns the two from l % 4 2 on: d[4 j + 0, 1] in the first
 * row, d[4 j + 2, 3] in the second. */
#ifndef MN_KERNELS_CUDA_ATTENTION_ATTENTION_MMA_SM80_CUH
#define MN_KERNELS_CUDA_ATTENTION_ATTENTION_MMA_SM80_CUH

#include "kernels/cuda/attention/attention_mma.cuh"
#include "kernels/cuda/attention/attention_tiles.cuh"
#include "kernels/cuda/prim/device_props.h"

namespace mneme::attention {

/* Whether calls go by these kernels where Hopper's do not serve. */
static const bool mn_flash_sm80_taken = true;

enum {
    MN_FLASH80_ROWS = 128,       // that stay: of queries, or of keys
    MN_FLASH80_STEP = 64,        // that come in turns
    MN_FLASH80_THREADS = 256,    // a warp has 16 of the rows that stay
};

/* ---- tiles ----------------------------------------------------------------------------------- */

__device__ inline void mn_cp_async_commit_group(void) {
    asm volatile("cp.async.commit_group;" ::: "memory");
}

/* Waits for all groups of the thread's own copies but the last `pending`. */
template <int pending>
__device__ inline void mn_cp_async_wait_group(void) {
    asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

/* A float on its own; zero unless `inside`. */
__device__ inline void mn_cp_async_float(uint32_t to, const float *from, bool inside) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from),
                 "r"(inside ? 4 : 0) : "memory");
}

/* A tile of ROWS rows of D columns from rows `from` + r `stride`, of which `n_rows` and `width`
 * columns are there, the others become zeros; the block calls. */
template <int ROWS, int D>
__device__ inline void mn_flash80_load_tile(uint32_t to, const mn_bf16 *from, int64_t stride,
                                            int n_rows, int width) {
    constexpr int vecs = D / 8, rows_per_pass = MN_FLASH80_THREADS / vecs;
    const int vec = threadIdx.x % vecs, row = threadIdx.x / vecs;
    const bool column = vec * 8 < width;
    const mn_bf16 *at = from + row * stride + vec * 8;
#pragma unroll
    for (int r = 0; r < ROWS; r += rows_per_pass) {
        const bool inside = column && row + r < n_rows;
        mn_cp_async_16(to + mn_swizzle_byte(ROWS, row + r, vec * 8), inside ? at : from, inside);
        at += rows_per_pass * stride;
    }
}

/* ---- products -------------------------------------------------------------------------------- */

/* 16 rows from `row0` on of a tile of ROWS rows, 16 columns from k on, as a left operand. */
template <int ROWS>
__device__ inline void mn_warp_frag_a(uint32_t (&a)[4], uint32_t tile, int row0, int k) {
    const int lane = threadIdx.x % 32;
    mn_ldmatrix_x4<false>(a, tile + mn_swizzle_byte(ROWS, row0 + lane % 16, k + lane / 16 * 8));
}

/* d += a b' for a left operand 16 deep and N rows from `row0` on of a tile of ROWS rows, columns
 * from k on. */
template <int ROWS, int N>
__device__ inline void mn_warp_mma_abt(float (&d)[N / 2], const uint32_t (&a)[4], uint32_t tile,
                                       int row0, int k) {
    const int lane = threadIdx.x % 32;
    const int row = row0 + lane % 8 + lane / 16 * 8, column = k + lane / 8 % 2 * 8;
#pragma unroll
    for (int n = 0; n < N; n += 16) {
        uint32_t b[4];
        mn_ldmatrix_x4<false>(b, tile + mn_swizzle_byte(ROWS, row + n, column));
        mn_mma_m16n8k16(d + n / 2, a, b[0], b[1]);
        mn_mma_m16n8k16(d + n / 2 + 4, a, b[2], b[3]);
    }
}

/* d = a b' over D columns: 16 rows of tile `a` (of A_ROWS) from a_row0 on, N rows of tile `b` (of
 * B_ROWS) from b_row0 on. */
template <int D, int A_ROWS, int B_ROWS, int N>
__device__ inline void mn_warp_abt(float (&d)[N / 2], uint32_t a, int a_row0, uint32_t b,
                                   int b_row0) {
#pragma unroll
    for (int i = 0; i < N / 2; i++) d[i] = 0.0f;
#pragma unroll
    for (int k = 0; k < D; k += 16) {
        uint32_t left[4];
        mn_warp_frag_a<A_ROWS>(left, a, a_row0, k);
        mn_warp_mma_abt<B_ROWS, N>(d, left, b, b_row0, k);
    }
}

/* d += p x over DEPTH rows from `row0` on of tile `x` of ROWS rows, D columns; p in registers, four
 * for a depth of 16. */
template <int DEPTH, int D, int ROWS>
__device__ inline void mn_warp_ab(float (&d)[D / 2], const uint32_t *p, uint32_t x, int row0) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int k = 0; k < DEPTH; k += 16) {
#pragma unroll
        for (int n = 0; n < D; n += 16) {
            uint32_t b[4];
            mn_ldmatrix_x4<true>(b, x + mn_swizzle_byte(ROWS, row0 + k + lane % 16,
                                                        n + lane / 16 * 8));
            mn_mma_m16n8k16(d + n / 2, p + k / 4, b[0], b[1]);
            mn_mma_m16n8k16(d + n / 2 + 4, p + k / 4, b[2], b[3]);
        }
    }
}

/* ---- results --------------------------------------------------------------------------------- */

/* 16 rows of sums of each warp leave through its own rows of a tile at `smem`, times `by` of the
 * lane's two rows; row r of the block is row t + r of head h. */
template <int D>
__device__ inline void mn_flash80_store_rows(unsigned char *smem, const float (&d)[D / 2],
                                             const float (&by)[2], const mn_out &to, int64_t b,
                                             int64_t t, int64_t h, int n_rows, int width) {
    const int lane = threadIdx.x % 32, row0 = threadIdx.x / 32 * 16;
    if (!to.data) return;
    __syncwarp();    // all of it have read these rows
#pragma unroll
    for (int i = 0; i < D / 2; i += 2) {
        const int column = i / 4 * 8 + lane % 4 * 2, r = i % 4 / 2;
        *(uint32_t *)(smem + mn_swizzle_byte(MN_FLASH80_ROWS, row0 + lane / 4 + 8 * r, column)) =
            mn_bf16x2(d[i] * by[r], d[i + 1] * by[r]);
    }
    __syncwarp();
    for (int i = lane; i < 16 * D / 8; i += 32) {
        const int r = row0 + i / (D / 8), column = i % (D / 8) * 8;
        if (r >= n_rows || column >= width) continue;
        *(uint4 *)(mn_row<mn_bf16>(to, b, t + r, h) + column) =
            *(const uint4 *)(smem + mn_swizzle_byte(MN_FLASH80_ROWS, r, column));
    }
}

/* ---- calls ----------------------------------------------------------------------------------- */

/* Shared memory of a block forward, and of one back. */
template <int D>
struct alignas(1024) mn_flash80_fwd_smem {
    static constexpr int wide = MN_FLASH80_ROWS * D * 2, narrow = MN_FLASH80_STEP * D * 2;
    unsigned char q[wide], k[2][narrow], v[2][narrow];
};

template <int D>
struct alignas(1024) mn_flash80_bwd_smem {
    static constexpr int wide = MN_FLASH80_ROWS * D * 2, narrow = MN_FLASH80_STEP * D * 2;
    unsigned char a[wide], b[wide], x[2][narrow], y[2][narrow];
    float rows[2][2][MN_FLASH80_STEP];
};

inline bool mn_flash80_has_smem(const mn_attn_params &p, size_t narrow, size_t wide) {
    const mn_device_props props = mn_device_props_current();
    const size_t bytes = mn_max(p.call.K, p.call.V) > 64 ? wide : narrow;
    return mn_flash_sm80_taken && props.major >= 8 && bytes <= (size_t)props.shared_bytes &&
           !mn_device_is_sm90();
}

inline bool mn_flash_sm80_supported(const mn_attn_params &p) {
    return mn_flash_serves(p) && mn_flash80_has_smem(p, sizeof(mn_flash80_fwd_smem<64>),
                                                     sizeof(mn_flash80_fwd_smem<128>));
}

inline bool mn_flash_bwd_sm80_supported(const mn_attn_params &p) {
    return mn_flash_bwd_serves(p) && mn_flash80_has_smem(p, sizeof(mn_flash80_bwd_smem<64>),
                                                         sizeof(mn_flash80_bwd_smem<128>));
}

int mn_flash_fwd_sm80(const mn_attn_params &p, cudaStream_t stream);
int mn_flash_bwd_sm80(const mn_attn_params &p, float *rows, cudaStream_t stream);

}    // namespace mneme::attention

#endif
