/* columns.h - columns of a block of rows as vectors: transposes in registers. */
#ifndef MN_KERNELS_CPU_SIMD_COLUMNS_H
#define MN_KERNELS_CPU_SIMD_COLUMNS_H

#include <string.h>

#include "kernels/cpu/simd/vec.h"

/* v[c] holds column c of src, its rows as lanes; rows <= MN_VW, cols <= 4, the rest is 0. */
static inline void load_columns(vf v[4], const float *src, int64_t src_row, int rows, int cols) {
    float block[MN_VW][4];
    if (rows < MN_VW || cols < 4) {
        memset(block, 0, sizeof block);
        for (int r = 0; r < rows; r++) {
            const float *row = src + r * src_row;
            if (cols == 4) memcpy(block[r], row, 4 * sizeof *row);
            else memcpy(block[r], row, (size_t)cols * sizeof *row);
        }
        src = block[0];
        src_row = 4;
    }
    MN_UNROLL
    for (int q = 0; q < 4; q++) v[q] = vf_load_quads(src + q * src_row, 4 * src_row);
    vf_transpose_quads(v);
}

#endif
