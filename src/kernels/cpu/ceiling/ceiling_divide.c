/* ceiling_divide.c - divisions and multiply-adds on registers. Contract in ceiling_divide.h. */
#include "kernels/cpu/ceiling/ceiling_divide.h"

#include "kernels/cpu/simd/vec.h"

/* Enough independent cells to fill the divider, few enough to stay in registers. */
enum { ROWS = MN_VW == 16 ? 8 : 4, SUMS = 2 };

int64_t MN_T(mn_ceiling_divide_cells)(void) {
    return ROWS * MN_VW;
}

float MN_T(mn_ceiling_divide)(int64_t rounds) {
    const vf q = vf_set1(0.75f), k = vf_set1(0.5f), v = vf_set1(-1.25f), b = vf_set1(0.0625f);
    const vf prior = vf_set1(1.5f);
    vf M[ROWS], J[ROWS], o[SUMS];
    MN_UNROLL
    for (int r = 0; r < ROWS; r++) {
        M[r] = vf_set1((float)(1 + r));
        J[r] = vf_set1(0.25f * (float)r);
    }
    MN_UNROLL
    for (int i = 0; i < SUMS; i++) o[i] = vf_zero();
    for (int64_t round = 0; round < rounds; round++) {
        MN_UNROLL
        for (int r = 0; r < ROWS; r++) {
            M[r] = vf_fma(k, v, M[r]);
            J[r] = vf_fma(k, b, J[r]);
            o[r % SUMS] = vf_fma(q, vf_div(M[r], vf_add(J[r], prior)), o[r % SUMS]);
        }
    }
    vf sum = vf_zero();
    MN_UNROLL
    for (int i = 0; i < SUMS; i++) sum = vf_add(sum, o[i]);
    return vf_sum(sum);
}
