/* smem_gemm.cuh - products of smem_tiles in shared memory by warps: bf16 on tensor cores, float32
 * in
 * fused
 * multiply-adds, with sums in float32 that lie in registers alike in both.
 *
 * A warp has tiles of 16 rows and 8 columns: lane l holds rows l / 4 and l / 4 + 8, columns
 * 2 (l % 4) and its neighbour. Panels have a row pitch of MN_SMEM_TILE_PAD more elements than
 * columns,
 * so that what a warp reads together lies in different banks. */
#ifndef MN_KERNELS_CUDA_PRIM_SMEM_GEMM_CUH
#define MN_KERNELS_CUDA_PRIM_SMEM_GEMM_CUH

#include "kernels/cuda/prim/common.cuh"

enum { MN_SMEM_TILE_PAD = 8 };

/* How the factor A (16, depth) or B (depth, columns) lies: as it is, or with its axes exchanged. */
enum mn_smem_tile_side { MN_PLAIN, MN_TRANSPOSED };

/* N tiles side by side */
template <int N>
struct mn_smem_tile_sum {
    float at[N][4];

    __device__ void clear() {
#pragma unroll
        for (int n = 0; n < N; n++) {
#pragma unroll
            for (int i = 0; i < 4; i++) at[n][i] = 0.0f;
        }
    }

    /* use(number, row, column) for what this lane holds */
    template <typename F>
    __device__ void each(F use) {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int n = 0; n < N; n++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                use(at[n][i], lane / 4 + i / 2 * 8, 8 * n + 2 * (lane % 4) + i % 2);
            }
        }
    }

    /* use(pair of neighbours, row, column of the first) */
    template <typename F>
    __device__ void pairs(F use) {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int n = 0; n < N; n++) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                use(at[n] + 2 * i, lane / 4 + 8 * i, 8 * n + 2 * (lane % 4));
            }
        }
    }
};

/* Four matrices of 8 x 8, of which each lane gives a row; TURNS exchanges their axes. */
template <bool TURNS>
__device__ inline void mn_matrices(unsigned (&to)[4], const mn_bf16 *at) {
    const unsigned address = (unsigned)__cvta_generic_to_shared(at);
    if (!TURNS) {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                     : "r"(address) : "memory");
    } else {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                     : "r"(address) : "memory");
    }
}

__device__ inline void mn_tile_product(float (&sum)[4], const unsigned (&a)[4], unsigned b0,
                                       unsigned b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, "
                 "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/* sum += A B. A plain is a[row * lda + i], turned a[i * lda + row]; B plain is b[i * ldb + column],
 * turned b[column * ldb + i]. `depth` is a multiple of 16, N even; rows start at 16 bytes. */
template <mn_smem_tile_side A, mn_smem_tile_side B, int N>
__device__ inline void mn_smem_tile_product(mn_smem_tile_sum<N> &sum, const mn_bf16 *a, int lda,
                                        const mn_bf16 *b, int ldb, int depth) {
    static_assert(N % 2 == 0, "columns come in pairs of tiles");
    const int lane = threadIdx.x % 32, low = lane % 8, middle = lane / 8 % 2 * 8;
    const int high = lane / 16 * 8;
    a += A == MN_PLAIN ? (low + middle) * lda + high : (low + high) * lda + middle;
    b += B == MN_PLAIN ? (low + middle) * ldb + high : (low + high) * ldb + middle;
    for (int i = 0; i < depth; i += 16) {
        unsigned from_a[4];
        mn_matrices<A == MN_TRANSPOSED>(from_a, a + (A == MN_PLAIN ? i : i * lda));
#pragma unroll
        for (int n = 0; n < N; n += 2) {
            unsigned from_b[4];
            mn_matrices<B == MN_PLAIN>(from_b, b + (B == MN_PLAIN ? i * ldb + 8 * n
                                                                  : 8 * n * ldb + i));
            mn_tile_product(sum.at[n], from_a, from_b[0], from_b[1]);
            mn_tile_product(sum.at[n + 1], from_a, from_b[2], from_b[3]);
        }
    }
}

template <mn_smem_tile_side A, mn_smem_tile_side B, int N>
__device__ inline void mn_smem_tile_product(mn_smem_tile_sum<N> &sum, const float *a, int lda,
                                        const float *b, int ldb, int depth) {
    const int row = threadIdx.x % 32 / 4, column = 2 * (threadIdx.x % 4);
    a += A == MN_PLAIN ? row * lda : row;
    b += B == MN_PLAIN ? column : column * ldb;
    const int step_a = A == MN_PLAIN ? 1 : lda, step_b = B == MN_PLAIN ? 1 : ldb;
    const int next_a = A == MN_PLAIN ? lda : 1, next_b = B == MN_PLAIN ? ldb : 1;
#pragma unroll 4
    for (int i = 0; i < depth; i++) {
        const float upper = a[i * step_a], lower = a[i * step_a + 8 * next_a];
#pragma unroll
        for (int n = 0; n < N; n++) {
            const float *at = b + i * next_b + 8 * n * step_b;
            const float left = at[0], right = at[step_b];
            sum.at[n][0] = fmaf(upper, left, sum.at[n][0]);
            sum.at[n][1] = fmaf(upper, right, sum.at[n][1]);
            sum.at[n][2] = fmaf(lower, left, sum.at[n][2]);
            sum.at[n][3] = fmaf(lower, right, sum.at[n][3]);
        }
    }
}

/* Two neighbours at once; `to` is even. */
__device__ inline void mn_put_pair(mn_bf16 *to, float x, float y) {
    *(__nv_bfloat162 *)to = __floats2bfloat162_rn(x, y);
}

__device__ inline void mn_put_pair(float *to, float x, float y) {
    *(float2 *)to = make_float2(x, y);
}

/* Rows [0, count) of a view from token t on into rows of `ld`, `width` numbers and zeros up to
 * `padded`, zeros in rows up to `rows`. `packs` where mn_smem_tile_packs allows them. */
template <typename T>
__device__ inline void mn_smem_tile_load(T *to, int ld, int rows, int padded, const mn_in &view,
                                      const mn_span &span, int64_t h, int64_t t, int count,
                                      int64_t width, bool packs) {
    constexpr int N = 16 / (int)sizeof(T);
    const T *from = mn_row<T>(view, span.b, span.t0 + t, h);
    const int64_t step = view.stride[1];
    if (packs) {
        for (int at = threadIdx.x; at < rows * (padded / N); at += blockDim.x) {
            const int token = at / (padded / N), i = at % (padded / N) * N;
            mn_pack<T, N> pack = {};
            if (from && token < count && i < width) {
                pack = *(const mn_pack<T, N> *)(from + token * step + i);
            }
            *(mn_pack<T, N> *)(to + token * ld + i) = pack;
        }
        return;
    }
    for (int at = threadIdx.x; at < rows * padded; at += blockDim.x) {
        const int token = at / padded, i = at % padded;
        T x = (T)0.0f;
        if (from && token < count && i < width) x = from[token * step + i];
        to[token * ld + i] = x;
    }
}

/* Whether all rows of a view start at 16 bytes and are whole packs. */
template <typename T>
inline bool mn_smem_tile_packs(const mn_in &view, int64_t width) {
    bool whole = mn_packable<T>(view.data, 0) && width % mn_pack_width<T>() == 0;
    for (int i = 0; i < 3; i++) whole = whole && mn_packable<T>(NULL, view.stride[i]);
    return !view.data || whole;
}

#endif
