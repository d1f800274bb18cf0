/* matrix.h - fragments of matrices (PTX ISA: Matrix Fragments). Lane l has g = l / 4 and t = l %
 * 4.
 *
 * A tile of 8 x 8 elements of 16 bits: lane l has elements (g, 2t) and (g, 2t + 1) in a
 * register, the first lower. Accumulators of 32 bits: register i of lane l is element (g + 8 (i
 * / 2 % 2), 2t + i % 2 + 8 (i / 4)). */
#ifndef PTX_MATRIX_H
#define PTX_MATRIX_H

#include "run/registers.h"

namespace ptx {

struct element {
    int row, column;
};

inline element accumulator_element(int l, int i) {
    return { l / 4 + 8 * (i / 2 % 2), l % 4 * 2 + i % 2 + 8 * (i / 4) };
}

/* The first of the two elements in register i of a 16 x 16 operand A of 16 bits: rows g and g +
 * 8, then columns. */
inline element operand_element(int l, int i) {
    return { l / 4 + 8 * (i % 2), l % 4 * 2 + 8 * (i / 2) };
}

inline void need_warp(u32 lanes, const char *what) {
    if (lanes != FULL) fail("%s of lanes 0x%08x, not of a warp", what, lanes);
}

}    // namespace ptx
#endif
