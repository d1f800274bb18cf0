/* bounds.c - least gates of layers, from one row of a parameter for each (HGRN2):
 *
 *   lb_l = sum over j = 1 .. l of softmax over layers of w, so lb_0 = 0 and they grow with depth
 *
 * Layers take them as log odds: log(sum over 1 .. l of e^w) - log(sum over the others of e^w).
 * Sums are built up by log(e^a + e^b) = a + softplus(b - a), in which nothing overflows. */
#include "layers/family.h"

/* log(e^a + e^b); either may be NULL, a sum of nothing. */
static mn_tensor *log_sum(mn_tape *tape, mn_tensor *a, mn_tensor *b) {
    if (!a || !b) return a ? a : b;
    mn_tensor *apart = mn_tape_add(tape, b, mn_tape_affine(tape, a, -1.0, 0.0));
    return mn_tape_add(tape, a, mn_tape_unary(tape, MN_UNARY_SOFTPLUS, apart));
}

void mn_gate_bounds(mn_tape *tape, mn_tensor *const *rows, int L, mn_tensor **bounds) {
    mn_tensor *after = NULL, *before = NULL;
    for (int l = 0; l < L; l++) bounds[l] = NULL;
    for (int l = L - 1; l >= 1; l--) {       // what is not of 1 .. l
        bounds[l] = log_sum(tape, rows[0], after);
        after = log_sum(tape, rows[l], after);
    }
    for (int l = 1; l < L; l++) {
        before = log_sum(tape, rows[l], before);
        if (bounds[l]) {
            bounds[l] = mn_tape_add(tape, before, mn_tape_affine(tape, bounds[l], -1.0, 0.0));
        }
    }
}
