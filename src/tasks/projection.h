/* projection.h - the fixed random address of crowded keys: R k / |R k|, rows of R orthonormal. */
#ifndef MN_TASKS_PROJECTION_H
#define MN_TASKS_PROJECTION_H

#include <stdint.h>

#include "mneme.h"

/* Writes R (rows, columns), rows <= columns, a function of seed: normal numbers, made orthonormal
 * row after row. */
mn_status mn_projection_make(float *out, int64_t rows, int64_t columns, uint64_t seed);

/* address = R key / |R key|, or zeros where R key is. */
void mn_projection_apply(float *address, const float *projection, const float *key, int64_t rows,
                         int64_t columns);

#endif
