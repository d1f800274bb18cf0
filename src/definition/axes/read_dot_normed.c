/* read_dot_normed.c - o = scale C'q / max(|scale n.q|, exp(-m)): both sums are in units of
 * exp(m), so the bound is 1 in plain units. */
#include "definition/axes.h"

#include <math.h>

static void run(double *o, const mn_head *head) {
    double along = 0.0;
    for (int64_t i = 0; i < head->size->K; i++) along += head->part[1][i] * head->in.q[i];
    const double bound = exp(-head->part[2][0]);
    const double divisor = fmax(fabs(head->config->scale * along), bound);
    mn_read_mean(o, head);
    for (int64_t j = 0; j < head->size->V; j++) o[j] /= divisor;
}

const mn_read mn_read_dot_normed = {
    .name = "normalised dot",
    .equation = "o = scale C'q / max(|scale n.q|, e^-m)",
    .run = run,
};
