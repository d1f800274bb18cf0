/* belief_point_column.c - a point estimate with a gain of its own for each value column, the closed
 * form of an implicit gradient step:
 *
 *   eta_j = beta_j / (1 + beta_j |k|^2);   S_:j = S~_:j + eta_j k (v_j - k'S~_:j) */
#include "definition/axes.h"

static void observe(mn_head *head) {
    const int64_t K = head->size->K, V = head->size->V;
    double *S = head->part[0], norm2 = 0.0;
    for (int64_t i = 0; i < K; i++) norm2 += head->in.k[i] * head->in.k[i];
    for (int64_t j = 0; j < V; j++) {
        const double eta = head->in.beta[j] / (1.0 + head->in.beta[j] * norm2);
        double missing = head->in.v[j];
        for (int64_t i = 0; i < K; i++) missing -= head->in.k[i] * S[i * V + j];
        for (int64_t i = 0; i < K; i++) S[i * V + j] += eta * head->in.k[i] * missing;
    }
}

static double mean(const mn_head *head, int64_t i, int64_t j) {
    return head->part[0][i * head->size->V + j];
}

const mn_belief mn_belief_point_column = {
    .name = "point, gain per column",
    .equation = "S_:j = S~_:j + eta_j k (v_j - k'S~_:j)",
    .matrix = true,
    .observe = observe,
    .mean = mean,
};
