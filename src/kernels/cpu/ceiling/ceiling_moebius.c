/* ceiling_moebius.c - KLA's arithmetic on registers. Contract in ceiling_moebius.h. */
#include "kernels/cpu/ceiling/ceiling_moebius.h"

#include "kernels/cpu/simd/vec.h"

/* Enough independent cells to hide the chain d, n; few enough to stay in registers. */
enum { ROWS = MN_VW == 16 ? 6 : 3 };

int64_t MN_T(mn_ceiling_moebius_cells)(void) {
    return ROWS * MN_VW;
}

float MN_T(mn_ceiling_moebius)(int64_t rounds) {
    /* a2 = 1 and p < 0 turn (n, d) in a circle: nothing overflows, nothing becomes denormal. */
    const vf a = vf_set1(0.875f), a2 = vf_unknown(vf_set1(1.0f)), p = vf_set1(-0.0625f);
    const vf prec = vf_set1(0.5f), pv = vf_set1(-0.25f), q = vf_set1(0.75f), k = q;
    vf y = vf_zero(), yvar = vf_zero();
    vf n[ROWS], d[ROWS], e[ROWS];
    MN_UNROLL
    for (int r = 0; r < ROWS; r++) {
        n[r] = vf_set1((float)(1 + r));
        d[r] = vf_set1(0.25f * (float)(r + 1));
        e[r] = vf_set1(-0.5f);
    }
    /* unknown factors: else the compiler would take equal products out of the loop */
    for (int64_t round = 0; round < rounds; round++) {
        MN_UNROLL
        for (int r = 0; r < ROWS; r++) {
            d[r] = vf_fma(p, n[r], vf_mul(a2, d[r]));
            n[r] = vf_fma(vf_mul(vf_unknown(prec), k), d[r], n[r]);
            e[r] = vf_fma(vf_mul(vf_unknown(pv), k), d[r], vf_mul(a, e[r]));
            const vf inverse = vf_div(a2, n[r]);
            y = vf_fma(q, vf_mul(e[r], inverse), y);
            yvar = vf_fma(a, vf_mul(d[r], inverse), yvar);
        }
    }
    return vf_sum(vf_add(y, yvar));
}
