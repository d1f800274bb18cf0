/* transition_forget_gate.c - a sigmoid forget gate on a memory kept in units of exp(m): fading by
 * sigmoid(fpre) is m~ = m + logsigmoid(fpre), and the numbers themselves do not move.
 *
 * Belief parts: content, normaliser, m. */
#include "definition/axes.h"

#include <math.h>

static void predict(mn_head *head) {
    const double f = head->in.fpre[0];
    head->part[2][0] += fmin(f, 0.0) - log1p(exp(-fabs(f)));
}

const mn_transition mn_transition_forget_gate = {
    .name = "decay per token, gated",
    .equation = "m~ = m + logsigmoid(fpre)",
    .predict = predict,
};
