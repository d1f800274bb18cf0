/* read_dot_gated.c - o = (S'q + D v) silu(z), the dot read of a selective scan with its skip and
 * its gate, each of which may be absent. */
#include "definition/axes.h"

#include <math.h>

static void run(double *o, const mn_head *head) {
    mn_read_mean(o, head);
    for (int64_t j = 0; j < head->size->V; j++) {
        if (head->in.D) o[j] += head->in.D[j] * head->in.v[j];
        if (head->in.z) o[j] *= head->in.z[j] / (1.0 + exp(-head->in.z[j]));
    }
}

const mn_read mn_read_dot_gated = {
    .name = "dot, skip, gate",
    .equation = "o = (S'q + D v) silu(z)",
    .run = run,
};
