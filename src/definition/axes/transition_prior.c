/* transition_prior.c - forgetting towards a prior of mean 0 and precision ip:
 *
 *   I~ = a I + (1 - a) ip,   mu~ = a I mu / I~
 *
 * so that for a = 0 only the prior is left. The paper takes a = 1 - gamma / n_mem, its code
 * a = exp(-dt decay_rate). Belief parts: mean, importance. */
#include "definition/axes.h"

#include <math.h>

static void towards_prior(mn_head *head, double a) {
    double *mean = head->part[0], *importance = head->part[1];
    for (int64_t i = 0; i < head->count[0]; i++) {
        const double kept = a * importance[i];
        importance[i] = kept + (1.0 - a) * head->in.ip[0];
        mean[i] *= kept / importance[i];
    }
}

static void predict_rate(mn_head *head) {
    towards_prior(head, 1.0 - head->in.gamma[0] / head->in.n_mem[0]);
}

static void predict_step(mn_head *head) {
    towards_prior(head, exp(-head->in.dt[0] * head->in.decay_rate[0]));
}

const mn_transition mn_transition_prior = {
    .name = "towards a prior",
    .equation = "I~ = a I + (1-a) ip, a = 1 - gamma/n",
    .predict = predict_rate,
};

const mn_transition mn_transition_prior_step = {
    .name = "towards a prior, by step",
    .equation = "I~ = a I + (1-a) ip, a = e^(-dt rate)",
    .predict = predict_step,
};
