/* gemm.h - small float32 matrix products inside one thread, for the chunk-form kernels.
 *
 *   C[i,j] = base(C[i,j]) + alpha * sum_k A[i,k] B[k,j]
 *
 * base is 0 (MN_GEMM_SET: C is not read), C[i,j] (MN_GEMM_ADD) or c_scale[i]*C[i,j]
 * (MN_GEMM_SCALE). Sizes 0 .. a few hundred, operands in or near the first caches.
 *
 * Every element is one chain: s = 0, then s = fma(A[i,k], B[k,j], s) for k = 0, 1, .. K-1 (of a
 * triangle only those k that are inside), then
 *
 *   t = alpha * s;    SET: t    ADD: C + t    SCALE: fma(c_scale[i], C, t)
 *
 * So its bits depend on its row of A, its column of B, alpha and base alone: not on M, N, its
 * place, the strides, or which of the functions below was called. alpha = 1 and -1 are exact.
 *
 * C overlaps neither A nor B. Nothing outside the M x N elements of C is written, and nothing
 * outside the elements of A, B, c_scale is read. K = 0 leaves base(C). Uses up to 48 KiB of stack
 * and no other memory.
 *
 * Prototypes carry the target in their names through MN_T, so code that sees several targets
 * (tests) defines MN_TARGET and includes this header once for each: only the types are guarded. */
#include "kernels/cpu/simd/target.h"

#include <stdint.h>

#ifndef MN_KERNELS_CPU_GEMM_GEMM_H
#define MN_KERNELS_CPU_GEMM_GEMM_H

typedef enum { MN_GEMM_SET, MN_GEMM_ADD, MN_GEMM_SCALE } mn_gemm_base;

/* Triangles save work by whole tiles; they change no bit of an element that is asked for.
 * C_LOWER: only C[i,j] with j <= i is asked for, the others are unspecified after the call
 *          (written, or left as they were) and should be masked by the caller.
 * A_LOWER: only A[i,k] with k <= diagonal + i / group takes part, so no row meets numbers of B
 *          that it must not see: 0 times Inf or NaN would be NaN.
 * A_UPPER: the transpose of such an A, so only A[i,k] with i <= diagonal + k / group. */
typedef enum {
    MN_GEMM_FULL,
    MN_GEMM_C_LOWER,
    MN_GEMM_A_LOWER,
    MN_GEMM_A_UPPER
} mn_gemm_shape;

typedef struct {
    float *c;
    int64_t c_row;              // C[i,j] is c[i*c_row + j]
    const float *a;
    int64_t a_row, a_col;       // A[i,k] is a[i*a_row + k*a_col]; swap the two for A^T
    const float *b;
    int64_t b_row;              // mn_gemm: B[k,j] is b[k*b_row + j]; mn_gemm_nt: b[j*b_row + k]
    int64_t M, N, K;
    float alpha;                // 1 for a plain product: 0, the default of an initialiser, gives 0
    mn_gemm_base base;
    const float *c_scale;       // M factors, read with MN_GEMM_SCALE only
    mn_gemm_shape shape;
    int64_t diagonal, group;    // of A_LOWER and A_UPPER; group 0 is 1: a step at every row
} mn_gemm_args;

#endif

/* C = base(C) + alpha * A * B, B stored [K, N] */
void MN_T(mn_gemm)(const mn_gemm_args *p);

/* C = base(C) + alpha * A * B^T, B stored [N, K]: scores q k^T. */
void MN_T(mn_gemm_nt)(const mn_gemm_args *p);

/* dst[c,r] = src[r,c] for src of rows x cols, at dst[c*dst_row + r] and src[r*src_row + c].
 * No overlap. */
void MN_T(mn_transpose)(float *dst, int64_t dst_row, const float *src, int64_t src_row,
                        int64_t rows, int64_t cols);
