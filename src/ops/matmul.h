/* matmul.h - matrix products of whole activations and weights, on the context's threads.
 *
 *   C = A B, or C += A B        C (M,N), A (M,K), B (K,N), each possibly stored transposed
 *
 * An element is a sum over k in blocks of fixed length, so its bits depend on its row of A and its
 * column of B alone: not on M, N, its place or the number of threads. That is what keeps packed
 * sequences bit-equal to separate ones, and why this does not call a BLAS: OpenBLAS sums a row in
 * an order that changes with the number of rows and with its place among them. */
#ifndef MN_OPS_MATMUL_H
#define MN_OPS_MATMUL_H

#include "ops/context.h"

typedef struct mn_matmul_args {
    mn_dtype dtype;                 // MN_F32 or MN_F64, of all three
    void *c;
    const void *a, *b;
    int64_t M, N, K;
    bool a_transposed;              // A is stored (K,M)
    bool b_transposed;              // B is stored (N,K): the layout of a linear layer's weight
    bool accumulate;                // C += A B
    int64_t c_row, a_row, b_row;    // elements between stored rows; 0: contiguous
} mn_matmul_args;

/* Sizes may be 0; K = 0 gives C = 0 unless accumulating. C overlaps neither A nor B. */
void mn_matmul(mn_context *context, const mn_matmul_args *args);

/* Bytes of the context's arena it takes at most. */
size_t mn_matmul_work(const mn_context *context, const mn_matmul_args *args);

#endif
