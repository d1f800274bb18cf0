/* matmul.h - matrix products of whole activations and weights, on the context's threads.
 *
 *   C = A B, C += A B or C = onto + A B     C (M,N), A (M,K), B (K,N), A and B possibly transposed
 *
 * An element is a sum over k in blocks of fixed length, so its bits depend on its row of A and its
 * column of B alone: not on M, N, its place or the number of threads. That is what keeps packed
 * sequences bit-equal to separate ones, and why this does not call a BLAS: OpenBLAS sums a row in
 * an order that changes with the number of rows and with its place among them. On a device it does
 * (kernels/cuda/product.h), and bits are the same only for the same sizes. */
#ifndef MN_OPS_MATMUL_H
#define MN_OPS_MATMUL_H

#include "kernels/gemm.h"
#include "ops/context.h"

typedef struct mn_matmul_args {
    mn_dtype dtype;                 // of A and B: MN_F32, MN_F64 on a CPU, MN_BF16 on a device
    mn_dtype c_dtype;               // of C: the same, or MN_F32 (the default) where that is MN_BF16
    void *c;
    const void *a, *b, *bias;       // bias: a row in C's type, added to each of C's; or NULL
    int64_t M, N, K;
    bool a_transposed;              // A is stored (K,M)
    bool b_transposed;              // B is stored (N,K): the layout of a linear layer's weight
    bool accumulate;                // C += A B
    const void *onto;               // C = onto + A B, laid out as C, in its type; NULL: not
    const mn_quant *quant;          // B transposed in 8 or 4 bits, in place of b, A as it is
    int64_t c_row, a_row, b_row;    // elements between stored rows; 0: contiguous
    bool alike, b_is_old;           // as mn_gemm_problem has them; on a device
} mn_matmul_args;

/* Sizes may be 0; K = 0 gives C = 0 unless accumulating. C overlaps neither A nor B. On a context
 * with a device the product is put on its stream, and memory is the device's; only there it can
 * fail. One that plans counts work space and computes nothing. */
mn_status mn_matmul(mn_context *context, const mn_matmul_args *args);

/* On a context with a device: the product as its kernels know it, and doing it. */
mn_gemm_problem mn_matmul_work_of(const mn_matmul_args *args);
mn_status mn_matmul_run(mn_context *context, const mn_gemm_problem *work);

/* Bytes of the context's arena, or of its device's scratch memory, it takes at most. */
size_t mn_matmul_work(const mn_context *context, const mn_matmul_args *args);

#endif
