/* belief_point_cell.c - the same gain per value column with the correction of each cell cut down to
 * what that cell itself predicts, so that cells do not mix:
 *
 *   n_j = 1 + beta_j |k|^2;   S_ij = (1 - beta_j k_i^2 / n_j) S~_ij + beta_j v_j k_i / n_j */
#include "definition/axes.h"

static void observe(mn_head *head) {
    const int64_t K = head->size->K, V = head->size->V;
    const double *k = head->in.k;
    double *S = head->part[0], norm2 = 0.0;
    for (int64_t i = 0; i < K; i++) norm2 += k[i] * k[i];
    for (int64_t j = 0; j < V; j++) {
        const double eta = head->in.beta[j] / (1.0 + head->in.beta[j] * norm2);
        for (int64_t i = 0; i < K; i++) {
            S[i * V + j] += eta * k[i] * (head->in.v[j] - k[i] * S[i * V + j]);
        }
    }
}

static double mean(const mn_head *head, int64_t i, int64_t j) {
    return head->part[0][i * head->size->V + j];
}

const mn_belief mn_belief_point_cell = {
    .name = "point, gain per cell",
    .equation = "S_ij = S~_ij + eta_j k_i (v_j - k_i S~_ij)",
    .matrix = true,
    .observe = observe,
    .mean = mean,
};
