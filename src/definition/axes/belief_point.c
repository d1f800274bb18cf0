/* belief_point.c - a point estimate corrected by the delta rule, which is a Gaussian belief whose
 * covariance is reset at every step:
 *
 *   S = S~ + beta k (write v - S~'(erase k))'
 *
 * Absent gates are one. */
#include "definition/axes.h"

static double gate(const double *gates, int64_t i) {
    return gates ? gates[i] : 1.0;
}

static void observe(mn_head *head) {
    const int64_t K = head->size->K, V = head->size->V;
    double *S = head->part[0];
    for (int64_t j = 0; j < V; j++) {
        double missing = gate(head->in.write, j) * head->in.v[j];
        for (int64_t i = 0; i < K; i++) {
            missing -= S[i * V + j] * gate(head->in.erase, i) * head->in.k[i];
        }
        for (int64_t i = 0; i < K; i++) {
            S[i * V + j] += gate(head->in.beta, 0) * head->in.k[i] * missing;
        }
    }
}

static double mean(const mn_head *head, int64_t i, int64_t j) {
    return head->part[0][i * head->size->V + j];
}

const mn_belief mn_belief_point = {
    .name = "point, delta rule",
    .equation = "S = S~ + beta k (v - S~'k)'",
    .matrix = true,
    .observe = observe,
    .mean = mean,
};
