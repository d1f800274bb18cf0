/* ceiling_divide.h - how fast this core does what Palimpsa needs, with nothing in its way.
 *
 * A cell and token of the importance kernel take one division, three fused multiply-adds and one
 * addition. This runs them in that proportion on registers alone: no loads, no stores, all cells
 * independent. Included once per target by code that sees several (see target.h). */
#include "kernels/cpu/simd/target.h"

#include <stdint.h>

/* Cells that one round computes. */
int64_t MN_T(mn_ceiling_divide_cells)(void);

/* Runs `rounds` rounds; the caller takes the time. The result depends on every operation. */
float MN_T(mn_ceiling_divide)(int64_t rounds);
