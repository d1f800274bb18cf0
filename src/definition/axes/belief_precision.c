/* belief_precision.c - a Gaussian with one precision (importance) per memory cell:
 *
 *   I = I~ + k^2 b',   mu = (I~ mu~ + k v') / I
 *
 * v is the gated value. Where one gate beta serves both, b = beta and the value is beta v.
 * Parts: mu (K,V), I (K,V). Fresh: mu = 0, I = ip. */
#include "definition/axes.h"

static void start(mn_head *head) {
    for (int64_t i = 0; i < head->count[1]; i++) head->part[1][i] = head->in.ip[0];
}

static void observe(mn_head *head) {
    const int64_t V = head->size->V;
    double *mu = head->part[0], *importance = head->part[1];
    for (int64_t j = 0; j < V; j++) {
        const double b = head->in.b ? head->in.b[j] : head->in.beta[j];
        const double v = head->in.b ? head->in.v[j] : b * head->in.v[j];
        for (int64_t i = 0; i < head->size->K; i++) {
            const int64_t at = i * V + j;
            const double k = head->in.k[i], before = importance[at];
            importance[at] = before + b * k * k;
            mu[at] = (before * mu[at] + k * v) / importance[at];
        }
    }
}

static double mean(const mn_head *head, int64_t i, int64_t j) {
    return head->part[0][i * head->size->V + j];
}

/* scale^2 sum_i q_i^2 / I_ij */
static void variance(double *out, const mn_head *head) {
    const int64_t V = head->size->V;
    for (int64_t j = 0; j < V; j++) {
        double sum = 0.0;
        for (int64_t i = 0; i < head->size->K; i++) {
            const double q = head->config->scale * head->in.q[i];
            sum += q * q / head->part[1][i * V + j];
        }
        out[j] = sum;
    }
}

const mn_belief mn_belief_precision = {
    .name = "diagonal precision per cell",
    .equation = "I = I~ + k^2 b', mu = (I~ mu~ + k v') / I",
    .matrix = true,
    .start = start,
    .observe = observe,
    .mean = mean,
    .variance = variance,
};
