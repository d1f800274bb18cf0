/* transition_channel_state.c - S~_ij = exp(d_j A_ji) S_ij: every channel j forgets its states i at
 * rates of its own, faster for a longer step d_j = softplus(dt_j + bias_j). */
#include "definition/axes.h"

#include <math.h>

double mn_scan_step(const mn_head *head, int64_t j) {
    const double x = head->in.dt[j] + (head->in.dt_bias ? head->in.dt_bias[j] : 0.0);
    if (!head->config->softplus) return x;
    return fmax(x, 0.0) + log1p(exp(-fabs(x)));
}

static void predict(mn_head *head) {
    const int64_t K = head->size->K;
    for (int64_t j = 0; j < head->size->V; j++) {
        const double step = mn_scan_step(head, j);
        for (int64_t i = 0; i < K; i++) {
            head->part[0][i * head->key_step + j * head->value_step] *=
                exp(step * head->in.A[j * K + i]);
        }
    }
}

const mn_transition mn_transition_channel_state = {
    .name = "decay per channel, state",
    .equation = "S~_ij = e^(d_j A_ji) S_ij",
    .predict = predict,
};
