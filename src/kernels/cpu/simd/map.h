/* map.h - elementary functions over arrays: y[i] = f(x[i]) for i < n. y may be x.
 *
 * Accuracy as in vec_math.h; an element's bits do not depend on its place. Included once per
 * target by code that sees several (see target.h): prototypes only, so nothing to guard. */
#include "kernels/cpu/simd/target.h"

#include <stdint.h>

void MN_T(mn_map_exp)(float *y, const float *x, int64_t n);
void MN_T(mn_map_expm1)(float *y, const float *x, int64_t n);
void MN_T(mn_map_log)(float *y, const float *x, int64_t n);
void MN_T(mn_map_log1p)(float *y, const float *x, int64_t n);
void MN_T(mn_map_sigmoid)(float *y, const float *x, int64_t n);
void MN_T(mn_map_softplus)(float *y, const float *x, int64_t n);
void MN_T(mn_map_tanh)(float *y, const float *x, int64_t n);

/* sum of x[0 .. n-1] and the largest of them (-infinity for n = 0; unspecified with NaN inside) */
float MN_T(mn_map_sum)(const float *x, int64_t n);
float MN_T(mn_map_max)(const float *x, int64_t n);
