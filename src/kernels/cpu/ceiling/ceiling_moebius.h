/* ceiling_moebius.h - how fast this core does what KLA needs, with nothing in its way.
 *
 * A cell and token of the moebius kernel take one division and eleven products and multiply-adds in
 * the form that needs the fewest: d = p n + a2 d, n += c d, e = w d + a e with c = prec k2 and
 * w = prec v k, r = 1 / n, y += q (e r), yvar += q2 (d r). This runs them in that proportion on
 * registers alone: no loads, no stores, all cells independent. */
#include "kernels/cpu/simd/target.h"

#include <stdint.h>

/* Cells that one round computes. */
int64_t MN_T(mn_ceiling_moebius_cells)(void);

/* Runs `rounds` rounds; the caller takes the time. The result depends on every operation. */
float MN_T(mn_ceiling_moebius)(int64_t rounds);
