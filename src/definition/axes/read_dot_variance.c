/* read_dot_variance.c - the dot read of a belief that knows how sure it is: mean o = scale S'q, and
 * the variance of o under the belief. */
#include "definition/axes.h"

const mn_read mn_read_dot_variance = {
    .name = "dot, variance",
    .equation = "o = scale E[S]'q, var = scale^2 Var[S'q]",
    .variance = true,
    .run = mn_read_mean,
};
