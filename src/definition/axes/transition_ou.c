/* transition_ou.c - an Ornstein-Uhlenbeck process on every cell, x~ = a x + noise of variance p. In
 * information form, with den = a^2 + p lam:
 *
 *   lam~ = lam / den,   eta~ = a eta / den
 *
 * a^2, p and den have the floor 1e-12 that the published code has. Belief parts: lam, eta. */
#include "definition/axes.h"

#include <math.h>

static const double floor_of_all = 1e-12;

static void predict(mn_head *head) {
    for (int64_t i = 0; i < head->count[0]; i++) {
        const double a = head->in.a[i], p = fmax(head->in.p[i], floor_of_all);
        const double den = fmax(fmax(a * a, floor_of_all) + p * head->part[0][i], floor_of_all);
        head->part[0][i] /= den;
        head->part[1][i] *= a / den;
    }
}

const mn_transition mn_transition_ou = {
    .name = "Ornstein-Uhlenbeck",
    .equation = "lam~ = lam / (a^2 + p lam), eta~ = a eta / (a^2 + p lam)",
    .predict = predict,
};
