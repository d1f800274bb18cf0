/* moebius_span.h - what a stretch of tokens does to KLA's state and to the gradient of it, as
 * numbers of each cell (channel, slot) that compose (docs/math/precision.md, "Over ranks").
 *
 * Map: with lam = n / d, eta = e / d,
 *
 *   n' = A n + B d      d' = C n + D d      e' = X n + Y d + E e      up to a common factor
 *
 * Adjoint: om and mu are the gradients of w = 1 / lam and m = eta / lam; those at the start of the
 * stretch follow from those at its end by
 *
 *   om <- gamma om + delta mu + eps         mu <- alpha mu + beta
 *
 * where beta and eps are of the cotangents of y, yvar and, where they are given, lam and eta. */
#ifndef MN_KERNELS_MOEBIUS_SPAN_H
#define MN_KERNELS_MOEBIUS_SPAN_H

#include "kernels/kernel.h"

enum { MN_MAP_A, MN_MAP_B, MN_MAP_C, MN_MAP_D, MN_MAP_X, MN_MAP_Y, MN_MAP_E, MN_MAP_ENTRIES };

enum {
    MN_ADJOINT_GAMMA, MN_ADJOINT_ALPHA, MN_ADJOINT_DELTA, MN_ADJOINT_BETA, MN_ADJOINT_EPS,
    MN_ADJOINT_ENTRIES
};

/* The operator's arguments, strides filled in, and where the summaries go: (N, entries, V, K) in
 * the type of the call. good (N, V) is 0 for a channel that has none: inputs without a projective
 * form, and for the adjoint a precision at its floor. The numbers of such a channel are any. */
typedef struct mn_moebius_span_args {
    mn_moebius_args op;
    void *out;
    unsigned char *good;
} mn_moebius_span_args;

#endif
