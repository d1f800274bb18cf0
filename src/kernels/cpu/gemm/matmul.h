/* matmul.h - pieces of large float32 products, for the threads of ops/matmul.c.
 *
 *   C[i,j] = sum_k A[i,k] B[k,j], or C[i,j] + sum_k A[i,k] B[k,j]
 *
 * K is cut into blocks by its length alone. In a block an element is one chain, s = 0, then
 * s = fma(A[i,k], B[k,j], s) for k going up; block after block joins C, the first as s or C + s,
 * the others as C + s. Every function below and mn_gemm on the same blocks keep that order, so an
 * element's bits depend on its row of A and its column of B alone.
 *
 * Packed form of a chunk of B, K rows [k0, k1) and columns [j0, j1): panels of MN_MATMUL_COLS
 * columns, the last one cut to whole vectors; a panel's rows lie one after the other, zeros in the
 * lanes beyond N. As in gemm.h, prototypes carry the target. */
#include "kernels/cpu/simd/target.h"

#include <stdbool.h>
#include <stdint.h>

#ifndef MN_KERNELS_CPU_GEMM_MATMUL_H
#define MN_KERNELS_CPU_GEMM_MATMUL_H

#include "kernels/quant.h"

typedef struct mn_product {
    float *c;
    int64_t c_row;               // C[i,j] is c[i*c_row + j]
    const float *a;
    int64_t a_row, a_col;        // A[i,k] is a[i*a_row + k*a_col]; one of the steps is 1
    const float *b;
    int64_t b_row, b_col;        // B[k,j] is b[k*b_row + j*b_col]; one of the steps is 1
    int64_t M, N, K;
    bool accumulate;
    const mn_quant *quant;       // B' in 8 or 4 bits, in place of b; NULL: b
} mn_product;

/* A chunk of B, and what packing it gave. */
typedef struct mn_chunk {
    int64_t k0, k1, j0, j1;
    float *packed;               // aligned to 64 bytes
} mn_chunk;

enum {
    MN_MATMUL_K = 512,           // the longest chain
    MN_MATMUL_FEW = 4,           // rows up to which mn_matmul_few serves
    MN_MATMUL_ROWS = 128         // rows of A that a worker's scratch holds
};

/* Length of the blocks of K: equal but for the last, multiples of 8. */
static inline int64_t mn_matmul_block(int64_t K) {
    const int64_t blocks = (K + MN_MATMUL_K - 1) / MN_MATMUL_K;
    return blocks == 0 ? 8 : ((K + blocks - 1) / blocks + 7) / 8 * 8;
}

#endif

/* Columns of a panel. */
int64_t MN_T(mn_matmul_panel)(void);

/* Packs panel `panel` of the chunk. */
void MN_T(mn_matmul_pack)(const mn_product *p, const mn_chunk *chunk, int64_t panel);

/* The chunk's share of rows [i0, i1), at most MN_MATMUL_ROWS of them, and of panels [first, last).
 * scratch: MN_MATMUL_ROWS * MN_MATMUL_K floats, aligned to 64 bytes. */
void MN_T(mn_matmul_rows)(const mn_product *p, const mn_chunk *chunk, int64_t i0, int64_t i1,
                          int64_t first, int64_t last, float *scratch);

/* Columns [j0, j1) of a product with 1 <= M <= MN_MATMUL_FEW, K > 0 and b_row = 1 (B stored
 * transposed): reads B once, as it lies. */
void MN_T(mn_matmul_few)(const mn_product *p, int64_t j0, int64_t j1);
