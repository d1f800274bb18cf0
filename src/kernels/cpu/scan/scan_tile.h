/* scan_tile.h - a tile of selective-scan channels: parameters, state and a block of tokens. Shared
 * by the forward and backward kernels; equations in ref/scan.c. */
#ifndef MN_KERNELS_CPU_SCAN_SCAN_TILE_H
#define MN_KERNELS_CPU_SCAN_SCAN_TILE_H

#include "base/checked.h"
#include "kernels/access.h"
#include "kernels/kernel.h"
#include "kernels/cpu/simd/lanes.h"

enum { SCAN_BLOCK = 32 };

/* Rows of a block that all channels share: [BLOCK][K]. */
typedef struct scan_rows {
    int64_t K, count;
    float *B, *C;
} scan_rows;

typedef struct scan_tile {
    const mn_scan_args *args;
    const scan_rows *rows;
    int64_t K, v0;
    int lanes;
    float *rate;              // [K][MN_VW]: A log2 e, so that exp(d A) = 2^(d rate)
    float *h;                 // [K][MN_VW]
    float *D, *bias;          // [MN_VW], zero where absent
    float *x, *u, *d, *du;    // [BLOCK][MN_VW]: dt + bias, u, d, d u
} scan_tile;

static inline bool scan_rows_floats(int64_t *floats, int64_t K) {
    return mn_mul_i64(floats, K, 2 * SCAN_BLOCK);
}

static inline bool scan_tile_floats(int64_t *floats, int64_t K) {
    return mn_mul_i64(floats, K, 2 * MN_VW) &&
           mn_add_i64(floats, *floats, (4 * SCAN_BLOCK + 2) * MN_VW);
}

/* Both lay themselves out in `memory` and return what follows. */
float *MN_T(mn_scan_rows_open)(scan_rows *rows, float *memory, int64_t K);
float *MN_T(mn_scan_tile_open)(scan_tile *tile, const scan_rows *rows, float *memory,
                               const mn_scan_args *args, int64_t v0);

/* h from h0 of sequence n */
void MN_T(mn_scan_tile_start)(scan_tile *tile, int64_t n);

/* Takes `count` <= BLOCK tokens from t on into the rows and into neighbouring tiles. */
void MN_T(mn_scan_load)(scan_rows *rows, scan_tile *const *tiles, int64_t n_tiles, int64_t b,
                        int64_t t, int64_t count);

/* 2^x = 2^n (1 + f Q(f)), f = x - n in [-1/2, 1/2]. Q is minimax for relative error of the result,
 * 2^-25.9 with rounded coefficients. This returns 1 + f Q(f). */
static inline vf scan_exp2_part(vf n, vf x) {
    static const float Q[] = { 0x1.62e430p-1f, 0x1.ebfbdcp-3f, 0x1.c6aee8p-5f,
                               0x1.3b2d4cp-7f, 0x1.5f3e78p-10f, 0x1.41fc10p-13f };
    const vf f = vf_sub(x, n);
    vf q = vf_set1(Q[5]);
    MN_UNROLL
    for (int i = 4; i >= 0; i--) q = vf_fma(q, f, vf_set1(Q[i]));
    return vf_fma(q, f, vf_set1(1.0f));
}

/* The ends are those where float32 has reached 0 and infinity. */
static inline vf scan_exp2(vf x) {
    x = vf_max(vf_set1(-160.0f), vf_min(vf_set1(160.0f), x));    // this order keeps NaN
    const vf n = vf_round(x);
    return vf_ldexp(scan_exp2_part(n, x), n);
}

/* The same bits where the result is normal for certain, |x| <= SCAN_NEAR, and for NaN: n joins the
 * exponent, which takes two instructions in place of nine. */
#define SCAN_NEAR 125.0f
static inline vf scan_exp2_near(vf x) {
    const vf n = vf_round(x);
    return vi_as_vf(vi_add(vf_as_vi(scan_exp2_part(n, x)), vi_shl(vi_from_vf(n), 23)));
}

#endif
