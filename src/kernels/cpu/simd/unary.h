/* unary.h - elementwise functions and derivatives, a vector at a time; see kernels/unary.h.
 * Prototypes only, included once per target. */
#include "kernels/unary.h"
#include "kernels/cpu/simd/target.h"

void MN_T(mn_unary_forward)(const mn_unary_args *p);
void MN_T(mn_unary_backward)(const mn_unary_args *p);
