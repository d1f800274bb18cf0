/* linear_state.h - the state side of the chunk form: columns, residuals, advance. */
#ifndef MN_KERNELS_CPU_LINEAR_LINEAR_STATE_H
#define MN_KERNELS_CPU_LINEAR_LINEAR_STATE_H

#include "kernels/cpu/chunk/tiles.h"
#include "kernels/cpu/linear/linear.h"

/* S (K, columns) from and to rows (n, h) of a state; zero where there is none. */
void MN_T(mn_state_load)(float *S, mn_in from, const mn_call *call, int64_t n, int64_t h,
                         const mn_columns *col);
void MN_T(mn_state_store)(mn_out to, const float *S, const mn_call *call, int64_t n, int64_t h,
                          const mn_columns *col);

/* The residuals of a chunk: the values themselves for additive, else solved in R (L, columns).
 * *r_row is the distance between rows of what is returned. */
const float *MN_T(mn_chunk_residual)(float *R, int64_t *r_row, const mn_linear *p,
                                     const mn_chunk *c, const mn_columns *col, const float *S);

/* S <- diag(fall) S + wd' R */
void MN_T(mn_state_advance)(float *S, const mn_chunk *c, const mn_columns *col, const float *R,
                            int64_t r_row);

#endif
