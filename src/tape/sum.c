/* sum.c - sums over whole axes on the tape, without gradient.
 *
 *   y_(b,t,h,x) = sum of x over the axes that `shape` has as 1, in float32 */
#include <string.h>

#include "tape/tape_internal.h"

mn_tensor *mn_tape_sum(mn_tape *tape, mn_tensor *x, const int64_t shape[4]) {
    if (!x || mn_tape_dead(tape)) return NULL;
    for (int i = 0; i < 4; i++) {
        if (shape[i] == 1 || shape[i] == x->shape[i]) continue;
        return mn_tape_fail(tape, mn_fail(MN_ERR_INTERNAL, "%s: a sum of another shape",
                                          tape->scope));
    }
    const mn_dtype dtype = tape->dtype == MN_F64 ? MN_F64 : MN_F32;
    mn_tensor *y = mn_tape_new_of(tape, dtype, shape);
    if (!y) return NULL;
    y->slot = NULL;
    mn_sum_params work = { .dy = mn_value(x), .sum = mn_value(y) };
    memcpy(work.shape, x->shape, sizeof work.shape);
    memcpy(work.kept, shape, sizeof work.kept);
    mn_tape_do(tape, MN_ELEMENTWISE_SUM, &work);
    return y;
}
