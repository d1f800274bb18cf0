/* moebius_tile.h - a tile of KLA channels: dynamics, state and a block of tokens. Shared by the
 * forward, backward and segmented kernels.
 *
 * The state of a cell is kept as three numbers n, d, e, known up to a common factor:
 *
 *   lam = n / d      eta = e / d      mean = e / n      variance = d / n
 *
 * One token is then linear in them and needs no division,
 *
 *   d <- a^2 d + p n      n <- n + prec k^2 d      e <- a e + prec v k d      (new d on the right)
 *
 * so the only division left is the one by n in the read-out, off the chain from token to token. n
 * and d are sums of numbers >= 0: nothing cancels. The common factor is a power of two, taken out
 * every `period` tokens, and therefore changes no bit.
 *
 * All this needs prec >= 0, lam >= 0 and a bound on how much one token makes n, d, e grow. A cell
 * without them takes that token on lam and eta themselves, two divisions and all floors, as in
 * ref/. Which form a token takes is decided by its own numbers. Blocks are tested as a whole first;
 * one that may hold such cells (period 0) takes the careful path, which asks at every token. */
#ifndef MN_KERNELS_CPU_MOEBIUS_MOEBIUS_TILE_H
#define MN_KERNELS_CPU_MOEBIUS_MOEBIUS_TILE_H

#include "base/checked.h"
#include "kernels/access.h"
#include "kernels/kernel.h"
#include "kernels/cpu/simd/lanes.h"

/* Tokens in a block, and the floor below a^2, p, den and a lam that divides. */
enum { MOEBIUS_BLOCK = 32 };
#define MOEBIUS_FLOOR 1e-12f
#define MOEBIUS_TOP 0x1p120f
#define MOEBIUS_GROWTH 0x1p40f

/* Rows of a block of tokens that all channels share: [BLOCK][K], k2 and q2 being squares. */
typedef struct moebius_rows {
    int64_t K, count;         // tokens in the block
    float *k, *k2, *q, *q2;
    float top_k2;
} moebius_rows;

typedef struct moebius_tile {
    const mn_moebius_args *args;
    const moebius_rows *rows;
    int64_t K, v0;            // first channel
    int lanes;                // channels, at most MN_VW
    float *a, *a2, *p;        // [K][MN_VW], floors applied to a2 and p
    float *n, *d, *e;         // [K][MN_VW]
    float *v, *prec, *pv;     // [BLOCK][MN_VW], pv = prec v
    float reach;              // largest a^2 + p
    bool checked;             // n is known to be in range
    bool plain; // since the start no block had period 0 and no lam fell below the floor
    int period;               // tokens until the next common factor is taken out; 0: see above
} moebius_tile;

/* Floats that rows and one tile need. */
static inline bool moebius_rows_floats(int64_t *floats, int64_t K) {
    return mn_mul_i64(floats, K, 4 * MOEBIUS_BLOCK);
}

static inline bool moebius_tile_floats(int64_t *floats, int64_t K) {
    return mn_mul_i64(floats, K, 6 * MN_VW) &&
           mn_add_i64(floats, *floats, 3 * MOEBIUS_BLOCK * MN_VW);
}

/* Both lay themselves out in `memory` and return what follows. A tile is that of channels
 * [v0, v0 + MN_VW); its dynamics are loaded. */
float *MN_T(mn_moebius_rows_open)(moebius_rows *rows, float *memory, int64_t K);
float *MN_T(mn_moebius_tile_open)(moebius_tile *tile, const moebius_rows *rows, float *memory,
                                  const mn_moebius_args *args, int64_t v0);

/* Sets the state from lam0, eta0 of sequence n. */
void MN_T(mn_moebius_tile_start)(moebius_tile *tile, int64_t n);

/* Every n is a number from 0 to MOEBIUS_TOP. */
bool MN_T(mn_moebius_tile_in_range)(const moebius_tile *tile);

/* lam and eta [K][MN_VW] from the state; may overwrite n and e. */
void MN_T(mn_moebius_tile_moments)(float *lam, float *eta, const moebius_tile *tile);

/* Takes `count` <= BLOCK tokens from t on of batch row b into the rows and into the tiles, which
 * should be neighbours; q only if `read`. */
void MN_T(mn_moebius_load)(moebius_rows *rows, moebius_tile *const *tiles, int64_t n_tiles,
                           int64_t b, int64_t t, int64_t count, bool read);

/* Advances the state over the block without reading. Watches for what ends `plain`. */
void MN_T(mn_moebius_tile_advance)(moebius_tile *tile);

/* 2^-i for the i with 2^i <= x < 2^(i+1), x > 0 normal; then c * result is exact but for range */
static inline vf moebius_shrink(vf x) {
    const vi exponent = vi_and(vf_as_vi(x), vi_set1(0x7f800000));
    return vi_as_vf(vi_sub(vi_set1(0x7f000000), exponent));
}

static inline void moebius_renormalise(vf *n, vf *d, vf *e) {
    const vf scale = moebius_shrink(vf_max(*n, *d));
    *n = vf_mul(*n, scale);
    *d = vf_mul(*d, scale);
    *e = vf_mul(*e, scale);
}

/* What one token multiplies the larger of n and d by, at most; reach is a^2 + p. */
static inline vf moebius_growth(vf prec, vf k2, vf reach) {
    return vf_max(vf_fma(vf_mul(prec, k2), reach, vf_set1(1.0f)), reach);
}

/* One token for cells of any kind; a2 and p have their floors. */
static inline void moebius_careful(vf *n, vf *d, vf *e, vf a, vf a2, vf p, vf prec, vf pv, vf k,
                                   vf k2) {
    const vf zero = vf_zero(), one = vf_set1(1.0f);
    const vf growth = moebius_growth(prec, k2, vf_add(a2, p));
    const vm good = vm_and(vm_and(vf_ge(*n, zero), vf_le(*n, vf_set1(MOEBIUS_TOP))),
                           vm_and(vf_ge(prec, zero), vf_le(growth, vf_set1(MOEBIUS_GROWTH))));
    vf n1 = *n, d1 = *d, e1 = *e;
    moebius_renormalise(&n1, &d1, &e1);
    d1 = vf_fma(p, n1, vf_mul(a2, d1));
    n1 = vf_fma(vf_mul(prec, k2), d1, n1);
    e1 = vf_fma(vf_mul(pv, k), d1, vf_mul(a, e1));
    if (vm_any(vm_not(good))) {
        const vf lam = vf_div(*n, *d), eta = vf_div(*e, *d);
        const vf den = vf_max(vf_fma(p, lam, a2), vf_set1(MOEBIUS_FLOOR)), g = vf_div(one, den);
        n1 = vf_select(good, n1, vf_fma(prec, k2, vf_mul(lam, g)));
        e1 = vf_select(good, e1, vf_fma(pv, k, vf_mul(vf_mul(a, g), eta)));
        d1 = vf_select(good, d1, one);
    }
    *n = n1, *d = d1, *e = e1;
}

#endif
