/* sincos.h - sine and cosine of a vector of angles, to about one unit in the last place.
 *
 * x = n pi/2 + r with |r| <= pi/4. pi/2 is taken off in three parts: n HI is a multiple of the last
 * bit of x for every n that occurs, so the first difference is exact, and the other two parts bring
 * what is left to a relative 2^-24 up to |x| = MN_SINCOS_MOST. Beyond, the C library is asked. */
#ifndef MN_KERNELS_CPU_SIMD_SINCOS_H
#define MN_KERNELS_CPU_SIMD_SINCOS_H

#include "kernels/cpu/simd/vec.h"

#define MN_SINCOS_MOST 1e5f

static inline void vf_sincos_far(vf *sine, vf *cosine, vf x) {
    float angle[MN_VW], s[MN_VW], c[MN_VW];
    vf_store(angle, x);
    for (int i = 0; i < MN_VW; i++) {
        s[i] = (float)sin((double)angle[i]);
        c[i] = (float)cos((double)angle[i]);
    }
    *sine = vf_load(s);
    *cosine = vf_load(c);
}

/* Minimax polynomials for the relative error of sin, 2^-28, and of cos - 1 + r^2/2, 2^-33. */
static inline void vf_sincos(vf *sine, vf *cosine, vf x) {
    static const float S[] = { -0x1.555546p-3f, 0x1.110760p-7f, -0x1.994e5cp-13f };
    static const float C[] = { 0x1.55554ap-5f, -0x1.6c0c8ap-10f, 0x1.9a020ap-16f };
    if (vm_any(vm_not(vf_le(vf_abs(x), vf_set1(MN_SINCOS_MOST))))) {
        vf_sincos_far(sine, cosine, x);
        return;
    }
    const vf one = vf_set1(1.0f), n = vf_round(vf_mul(x, vf_set1(0x1.45f306p-1f)));
    vf r = vf_fnma(n, vf_set1(0x1.921fb6p+0f), x);
    r = vf_fnma(n, vf_set1(-0x1.777a5cp-25f), r);
    r = vf_fnma(n, vf_set1(-0x1.ee59dap-50f), r);
    const vf y = vf_mul(r, r);
    const vf s = vf_fma(vf_mul(r, y), vf_poly(S, 3, y), r);
    const vf c = vf_fma(vf_mul(y, y), vf_poly(C, 3, y), vf_fnma(vf_set1(0.5f), y, one));
    /* quarter turns: odd ones swap the two, the second bit of n and of n + 1 give the signs */
    const vi quarter = vi_from_vf(n), next = vi_add(quarter, vi_set1(1));
    const vm odd = vf_eq(vf_from_vi(vi_and(quarter, vi_set1(1))), one);
    const vf s_sign = vf_sub(one, vf_from_vi(vi_and(quarter, vi_set1(2))));
    const vf c_sign = vf_sub(one, vf_from_vi(vi_and(next, vi_set1(2))));
    *sine = vf_mul(s_sign, vf_select(odd, c, s));
    *cosine = vf_mul(c_sign, vf_select(odd, s, c));
}

#endif
