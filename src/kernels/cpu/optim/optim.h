/* optim.h - what src/optim takes from the vector targets; prototypes carry the target. */
#include "kernels/cpu/simd/target.h"

#include <stdint.h>

#ifndef MN_KERNELS_CPU_OPTIM_OPTIM_H
#define MN_KERNELS_CPU_OPTIM_OPTIM_H

/* `count` numbers of one parameter, before and after step number `step` (from 1). */
typedef struct mn_adamw_piece {
    float *p, *m, *v;
    const float *g;             // times grad_scale
    int64_t count, step;
    double lr, beta1, beta2, eps, weight_decay, grad_scale;
} mn_adamw_piece;

#endif

/* An element's bits do not depend on its place. */
void MN_T(mn_adamw_update)(const mn_adamw_piece *piece);

/* Sum of squares in double; the same bits on every target. */
double MN_T(mn_sum_squares)(const float *x, int64_t count);
