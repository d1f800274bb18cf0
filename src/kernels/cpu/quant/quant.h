/* quant.h - float32 products with weights of 8 or 4 bits (kernels/quant.h), for the threads of
 * ops/matmul.c. Weights become float32 in registers; the order of sums is that of
 * kernels/cpu/gemm/matmul.h, so that bits are those of the same product with float32 weights. */
#include "kernels/cpu/gemm/matmul.h"

#ifndef MN_KERNELS_CPU_QUANT_QUANT_H
#define MN_KERNELS_CPU_QUANT_QUANT_H

enum {
    MN_QUANT_FEW = 16,           // rows up to which codes are read again for each tile of rows
    MN_QUANT_COLS = 64           // columns that items of mn_quant_few are multiples of
};

#endif

/* Columns [j0, j1) of C = A W', W being p->quant: j0 is a multiple of MN_QUANT_COLS, a_col is 1. */
void MN_T(mn_quant_few)(const mn_product *p, int64_t j0, int64_t j1);

/* Panel `panel` of the chunk as mn_matmul_pack makes it. */
void MN_T(mn_quant_pack)(const mn_product *p, const mn_chunk *chunk, int64_t panel);
