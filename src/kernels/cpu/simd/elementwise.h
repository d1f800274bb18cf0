/* elementwise.h - functions of one number with derivatives, and fused functions, a vector at a
 * time (kernels/unary.h, kernels/elementwise.h). Prototypes only, included once per target. */
#include "kernels/elementwise.h"
#include "kernels/cpu/simd/target.h"

void MN_T(mn_unary_forward)(const mn_unary_args *p);
void MN_T(mn_unary_backward)(const mn_unary_args *p);
void MN_T(mn_fused)(const mn_fused_args *p);
